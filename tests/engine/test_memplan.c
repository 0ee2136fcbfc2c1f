/* The memory plan: what it says of machines, what it says of networks against what loading and running allocate, and
 * that its advice holds. */
#include "base/mem.h"
#include "engine/engine_internal.h"
#include "engine/memplan.h"
#include "model/net_internal.h"
#include "model/synthetic.h"
#include "state/seq_internal.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char root[] = "/tmp/aff-memplan-XXXXXX";
static aff_error err;

static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* ---- machines ---- */

static void put(const char *at, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s%s", root, at, name);
    for (char *s = path + strlen(root) + 1; (s = strchr(s, '/')); s++) {
        *s = 0;
        mkdir(path, 0700);
        *s = '/';
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static aff_machine here(const char *at)
{
    char path[256];
    aff_machine m;
    snprintf(path, sizeof path, "%s/%s", root, at);
    must(aff__machine_here(&m, path, &err));
    return m;
}

static void test_machines(void **state)
{
    static const char meminfo[] =
        "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    9000000 kB\nCached: 5 kB\n";
    aff_machine m;
    /* No cgroups at all. */
    put("none", "/proc/meminfo", meminfo);
    m = here("none");
    assert_int_equal(m.ram, UINT64_C(16000000) * 1024);
    assert_int_equal(aff__machine_available(&m), UINT64_C(9000000) * 1024);
    assert_int_equal(m.cgroup, 0);
    /* Version 2: the group's parent binds; its page cache does not count as used. */
    put("two", "/proc/meminfo", meminfo);
    put("two", "/proc/self/cgroup", "0::/user/job\n");
    put("two", "/sys/fs/cgroup/user/job/memory.max", "max\n");
    put("two", "/sys/fs/cgroup/user/job/memory.current", "1000\n");
    put("two", "/sys/fs/cgroup/user/memory.max", "4000000000\n");
    put("two", "/sys/fs/cgroup/user/memory.current", "2500000000\n");
    put("two", "/sys/fs/cgroup/user/memory.stat",
        "anon 500000000\ninactive_file 1200000000\nactive_file 800000000\nfile_dirty 7\n");
    m = here("two");
    assert_int_equal(m.cgroup, 2);
    assert_int_equal(m.limit, 4000000000);
    assert_int_equal(aff__machine_available(&m), 4000000000 - 500000000);
    /* In a container the path named is not there: its root is. */
    put("box", "/proc/meminfo", meminfo);
    put("box", "/proc/self/cgroup", "0::/../../elsewhere\n");
    put("box", "/sys/fs/cgroup/memory.max", "1000000000\n");
    put("box", "/sys/fs/cgroup/memory.current", "400000000\n");
    m = here("box");
    assert_int_equal(aff__machine_available(&m), 600000000);
    /* Version 1, with a limit that is none further up, and usage beyond the limit. */
    put("one", "/proc/meminfo", meminfo);
    put("one", "/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:freezer,memory:/docker/abc\n0::/\n");
    put("one", "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "2000000000\n");
    put("one", "/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "1500000000\n");
    put("one", "/sys/fs/cgroup/memory/docker/abc/memory.stat",
        "cache 1\ninactive_file 9\ntotal_inactive_file 300000000\ntotal_active_file 100000000\n");
    put("one", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("one", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
    m = here("one");
    assert_int_equal(m.cgroup, 1);
    assert_int_equal(aff__machine_available(&m), 2000000000 - 1100000000);
    put("one", "/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "3500000000\n");
    m = here("one");
    assert_int_equal(aff__machine_available(&m), 0);
    /* No such information. */
    put("odd", "/proc/meminfo", "MemTotal: 5 kB\n");
    char path[256];
    snprintf(path, sizeof path, "%s/odd", root);
    assert_int_equal(aff__machine_here(&m, path, &err), AFF_E_UNSUPPORTED);
    must(aff__machine_here(&m, "", &err)); /* this one */
    assert_true(m.ram > 0 && aff__machine_available(&m) <= m.ram);
}

static void test_descriptions(void **state)
{
    aff_machine m;
    must(aff__machine_parse(&m, "2x32G,ram=64G,pcie=27", &err));
    assert_int_equal(m.cards, 2);
    assert_int_equal(m.card[1], UINT64_C(32) << 30);
    assert_int_equal(m.ram, UINT64_C(64) << 30);
    assert_int_equal(m.free, UINT64_C(62) << 30);
    assert_true(m.link == 27 && m.described);
    must(aff__machine_parse(&m, "ram=1.5G,1x24g,2x512m", &err));
    assert_int_equal(m.cards, 3);
    assert_int_equal(m.card[2], 512 << 20);
    assert_int_equal(m.free, 0); /* the system needs it all */
    static const char *const bad[] = {"",
                                      "2x32G",
                                      "ram=64",
                                      "ram=64T",
                                      "ram=64G,",
                                      "ram=0G",
                                      "ram=-1G",
                                      "x32G,ram=64G",
                                      "0x32G,ram=64G",
                                      "ram=nanG",
                                      "2x,ram=64G",
                                      "ram=64G,x",
                                      "17x32G,ram=64G",
                                      "ram=64GB",
                                      "ram=64G,pcie=0",
                                      "ram=64G,pcie",
                                      "ram=64G pcie=2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(aff__machine_parse(&m, bad[i], &err), AFF_E_INVALID);
        assert_non_null(strstr(err.msg, "--machine"));
    }
}

/* ---- plans against allocations ---- */

static aff_memplan plan_of(const aff_net *net, const aff_engine_options *o, uint64_t free, int64_t pool)
{
    const aff_machine m = {.ram = free, .free = free, .limit = UINT64_MAX, .limit_free = UINT64_MAX};
    aff_memplan p;
    must(aff__memplan_make(
        &p, &(aff_memplan_input){.net = net, .engine = o, .machine = &m, .host_pool = pool, .listens_to_prompts = true},
        &err));
    aff__memplan_judge(&p);
    return p;
}

static uint64_t line(const aff_memplan *p, const char *what)
{
    uint64_t n = 0;
    for (int i = 0; i < p->lines; i++)
        if (strncmp(p->line[i].what, what, strlen(what)) == 0 && !p->line[i].later) n += p->line[i].bytes;
    return n;
}

static aff_status take_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *e)
{
    return AFF_OK;
}

static void equal_plan(const char *path, const aff_synthetic *synth, aff_numerics num, int slots, int64_t commit)
{
    aff_net *outline, *net;
    aff_engine *e;
    aff_outcome out;
    aff_net_options no = {.numerics = num, .draft = true, .synthetic = synth};
    const aff_engine_options o = {
        .threads = 2, .slots = slots, .context = 3000, .kv_commit = commit, .kv_margin = 500, .width = AFF_WIDTH_AUTO};
    no.outline = true;
    must(aff__net_open(&outline, path, &no, &err));
    const aff_memplan p = plan_of(outline, &o, UINT64_C(1) << 40, -1);
    const aff_net_sizes want = aff__net_sizes(outline);
    aff__net_close(outline);
    no.outline = false;
    const uint64_t before = aff__alloc_total();
    must(aff__net_open(&net, path, &no, &err));
    const aff_net_sizes got = aff__net_sizes(net);
    assert_memory_equal(&got, &want, sizeof got);
    /* Weights in memory: what was converted (or made), beside the tables of the stores and the file. */
    const uint64_t weights = aff__alloc_total() - before;
    const uint64_t planned =
        synth ? p.total[AFF_PLACE_MEMORY] : line(&p, "converted weights") + line(&p, "draft: converted weights");
    const uint64_t in_memory =
        want.memory[0] + want.memory[1] + (synth ? (uint64_t)(want.experts[0] + want.experts[1]) * want.expert : 0);
    assert_true(planned >= in_memory && weights >= in_memory);
    if (!synth) assert_int_equal(planned, in_memory);
    assert_in_range(weights - in_memory, 0, 1 << 20);
    /* The engine: buffers as planned, to the byte but for the backend, whose scratch grows as it is used. */
    const uint64_t start = aff__alloc_total();
    must(aff__engine_create(&e, net, &o, &err));
    const uint64_t made = aff__alloc_total() - start, buffers = line(&p, "logits of a decode") + line(&p, "sampler") +
                                                                line(&p, "slots") + line(&p, "pass: act") +
                                                                line(&p, "pass: plan");
    assert_in_range(made, buffers, buffers + line(&p, "pass: kernels"));
    uint64_t state = 0;
    for (int i = 0; i < slots; i++) state += aff__seq_committed(e->slot[i].seq);
    assert_int_equal(state, line(&p, "state: "));
    /* The whole context, with everything that makes something grow. */
    static int32_t ids[3000];
    const int64_t n = 3000 - 16;
    for (int i = 0; i < n; i++) ids[i] = (int32_t)(i * 7919 % aff__net_config(net)->vocab);
    const uint64_t run_from = aff__alloc_total();
    must(aff__engine_run(e,
                         &(aff_request){.prompt = ids,
                                        .n_prompt = n,
                                        .n_predict = 16,
                                        .ignore_eos = true,
                                        .logits_from = n - 300,
                                        .sampling = {.top_p = 1}},
                         &(aff_events){.logits = take_logits}, &out, &err));
    const uint64_t run = aff__alloc_total() - run_from - 64 * 64; /* a request's own few tokens and tables */
    assert_true(made + run <= buffers + line(&p, "pass: kernels") + line(&p, "logits of a prompt"));
    state = 0;
    for (int i = 0; i < slots; i++) state += aff__seq_committed(e->slot[i].seq);
    assert_true(state <= line(&p, "state: ") + p.later[AFF_PLACE_MEMORY]);
    assert_true(p.per_position > 0 ? state > line(&p, "state: ") : state == line(&p, "state: "));
    aff__engine_free(e);
    aff__net_close(net);
}

static void test_equals_allocation(void **state)
{
    const aff_synthetic tiny = {.geometry = "tiny", .layers = 4, .experts = 8, .seed = 3};
    equal_plan(AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark", NULL, AFF_FAST, 3, 100);
    equal_plan(AFF_TESTS_DIR "/golden/v4-sim/ckpt-mtp1", NULL, AFF_MATH, 1, -1);
    equal_plan(NULL, &tiny, AFF_FAST, 2, 1000);
}

/* A row-major container whose experts all have a slot, and one with as few slots as go: the same logits, from as many slots as planned. */
static void test_slots_of_experts(void **state)
{
    char dir[256], path[256];
    aff_net *net;
    aff_runner *r;
    aff_seq *s;
    static float want[512], got[512];
    static int32_t ids[300];
    snprintf(dir, sizeof dir, "%s/toy", root);
    snprintf(path, sizeof path, "%s/rows.aff", root);
    if (aff_test_write_parity_model("toy", dir) != 0) fail();
    test_write_container(dir, path, AFF_Q2P875Q4, 11, 1);
    for (int i = 0; i < 300; i++) ids[i] = i * 31 % 500;
    for (int round = 0; round < 2; round++) {
        must(aff__net_open(&net, path, &(aff_net_options){.numerics = AFF_FAST}, &err));
        const aff_net_sizes z = aff__net_sizes(net);
        assert_true(z.experts_copied && z.experts_in_file);
        const aff_engine_options o = {.threads = 1, .slots = 1, .context = 300};
        const aff_memplan p = plan_of(net, &o, UINT64_C(1) << 40, round ? 0 : -1);
        assert_int_equal(z.slot, z.expert);
        assert_int_equal(p.expert_split.pool, round ? 0 : z.experts[0]);
        assert_int_equal(p.expert_split.staging, round ? 2 * aff__net_config(net)->picks : (z.experts[0] + AFF_MOST_STAGING) / 8);
        assert_int_equal(line(&p, "experts: pool"), (uint64_t)p.expert_split.pool * z.slot);
        assert_int_equal(line(&p, "experts: staging"), (uint64_t)p.expert_split.staging * z.slot);
        assert_int_equal(p.total[AFF_PLACE_DISK], (uint64_t)z.experts[0] * z.expert);
        aff_tier_options t = {.slots = p.expert_slots, .staging = p.expert_staging};
        aff__placement_options_init(&t.placement);
        must(aff__net_use_tiers(net, &t, &err));
        assert_int_equal(aff__slots_bytes(aff__tiers_pool(net->tiers)), line(&p, "experts: "));
        must(aff__runner_create(&r, net, 1, &err));
        must(aff__seq_create(&s, net, 300, &err));
        must(aff__forward(
            r, &(aff_batch){.n = 300, .id = ids, .seq = s, .want_from = 299, .logits = round ? got : want}, &err));
        const aff_tier_counters c = aff__tiers_counters(net->tiers);
        if (!round) assert_int_equal(c.staged, c.promotions[1]); /* each was read once, and stayed */
        if (round) assert_true(c.staged > p.expert_split.staging && !c.promotions[1]);
        assert_int_equal(c.disk_bytes, (uint64_t)c.staged * z.expert);
        must(aff__tiers_check(net->tiers, &err));
        aff__seq_free(s);
        aff__runner_free(r);
        aff__net_close(net);
    }
    assert_memory_equal(got, want, sizeof got);
}

/* ---- verdicts ---- */

static void test_advice(void **state)
{
    aff_net *net;
    int refused = 0, hopeless = 0;
    const aff_synthetic flash = {.geometry = "flash"};
    must(aff__net_open(&net, NULL,
                       &(aff_net_options){.numerics = AFF_FAST, .draft = true, .synthetic = &flash, .outline = true},
                       &err));
    const aff_net_sizes z = aff__net_sizes(net);
    assert_int_equal(z.experts[0], 43 * 256);
    assert_int_equal(z.expert, 9060352); /* spec runtime 1 */
    aff_engine_options o = {.threads = 4, .slots = 6, .context = 1 << 20, .kv_commit = 6 << 20};
    const uint64_t weights = (uint64_t)(z.experts[0] + z.experts[1]) * z.expert + z.memory[0] + z.memory[1];
    for (uint64_t free = weights; free < weights + (UINT64_C(30) << 30); free += UINT64_C(450) << 20) {
        o.slots = 6;
        o.kv_commit = 6 << 20;
        aff_memplan p = plan_of(net, &o, free, -1);
        if (p.fits) continue;
        refused++;
        assert_int_equal(aff__memplan_check(&p, &err), AFF_E_NOMEM);
        if (strstr(p.verdict, "even --slots 1")) {
            hopeless++;
            o.slots = 1;
            o.kv_commit = -1;
            p = plan_of(net, &o, free, -1);
            assert_false(p.fits);
            continue;
        }
        const char *s = strstr(p.verdict, "--slots "), *k = strstr(p.verdict, "--kv-commit ");
        if (s) o.slots = atoi(s + 8);
        assert_non_null(k);
        o.kv_commit = atoll(k + 12);
        if (!o.kv_commit) o.kv_commit = -1;
        p = plan_of(net, &o, free, -1);
        if (!p.fits) fail_msg("%s", p.verdict);
    }
    assert_true(refused > 10 && hopeless > 0 && hopeless < refused);
    aff__net_close(net);
}

static void test_output(void **state)
{
    aff_net *net;
    char *text;
    size_t size;
    const aff_engine_options o = {.threads = 1, .slots = 2, .context = 1000, .kv_commit = 10};
    must(aff__net_open(&net, AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark",
                       &(aff_net_options){.numerics = AFF_FAST, .outline = true}, &err));
    aff_memplan p = plan_of(net, &o, UINT64_C(1) << 40, -1);
    FILE *f = open_memstream(&text, &size);
    must(aff__memplan_json(&p, f, &err));
    fclose(f);
    json_t *j = json_loads(text, 0, NULL);
    assert_non_null(j);
    uint64_t sum = 0;
    for (size_t i = 0; i < json_array_size(json_object_get(j, "lines")); i++) {
        const json_t *l = json_array_get(json_object_get(j, "lines"), i);
        if (strcmp(json_string_value(json_object_get(l, "place")), "memory") == 0 &&
            !json_is_true(json_object_get(l, "later")))
            sum += (uint64_t)json_integer_value(json_object_get(l, "bytes"));
    }
    assert_int_equal(sum, json_integer_value(json_object_get(json_object_get(j, "total"), "memory")));
    assert_int_equal(sum, p.total[AFF_PLACE_MEMORY]);
    assert_true(json_is_true(json_object_get(j, "fits")));
    json_decref(j);
    free(text);
    f = open_memstream(&text, &size);
    aff__memplan_print(&p, f);
    fclose(f);
    char bytes[64];
    snprintf(bytes, sizeof bytes, "a position takes %.2f bytes", p.per_position);
    assert_non_null(strstr(text, bytes));
    assert_non_null(strstr(text, "state: indexer keys"));
    assert_non_null(strstr(text, "verdict: fits"));
    free(text);
    /* Cards: lines of their own, against their own memory. More lines than there is room for are not lost. */
    p.machine.cards = 1;
    p.machine.card[0] = 1000;
    const uint64_t memory = p.total[AFF_PLACE_MEMORY];
    aff__memplan_add(&p, AFF_PLACE_CARD, false, 999, "slab", "%d experts", 3);
    aff__memplan_judge(&p);
    assert_true(p.fits);
    for (int i = 0; i < 100; i++) aff__memplan_add(&p, AFF_PLACE_MEMORY, false, 10, "more", "%s", "");
    aff__memplan_judge(&p);
    assert_int_equal(p.total[AFF_PLACE_MEMORY], memory + 1000);
    p.machine.card[0] = 998;
    aff__memplan_judge(&p);
    assert_false(p.fits);
    aff__net_close(net);
}

static int setup(void **state)
{
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_machines),
                                       cmocka_unit_test(test_descriptions),
                                       cmocka_unit_test(test_equals_allocation),
                                       cmocka_unit_test(test_slots_of_experts),
                                       cmocka_unit_test(test_advice),
                                       cmocka_unit_test(test_output)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
