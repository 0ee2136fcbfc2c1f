/* An engine whose experts are on disk but for a few: the same tokens; a read that fails for good ends its request with
 * the expert's name, and the next request is served; what the snapshot says of it. */
#include "engine/engine.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PROMPT = 60, TOKENS = 12 };
static char root[] = "/tmp/aff-tiered-XXXXXX", path[64];
static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

typedef struct answer {
    int32_t id[TOKENS];
    int n;
} answer;

static bool take(void *ctx, const aff_token *t)
{
    answer *a = ctx;
    if (a->n < TOKENS) a->id[a->n] = t->id;
    a->n++;
    return true;
}

static aff_status ask(aff_engine *e, answer *a)
{
    int32_t ids[PROMPT];
    aff_outcome out;
    for (int i = 0; i < PROMPT; i++) ids[i] = i * 37 % 500;
    *a = (answer){0};
    return aff__engine_run(
        e,
        &(aff_request){
            .prompt = ids, .n_prompt = PROMPT, .n_predict = TOKENS, .ignore_eos = true, .sampling = {.top_p = 1}},
        &(aff_events){.ctx = a, .token = take}, &out, &err);
}

static void test_errors_end_requests(void **state)
{
    aff_net *net;
    aff_engine *e;
    answer want, got;
    aff_snapshot s;
    const aff_engine_options o = {.threads = 2, .slots = 2, .context = 200, .width = AFF_WIDTH_AUTO};
    const aff_net_options no = {.numerics = AFF_FAST, .draft = true};
    must(aff__net_open(&net, path, &no, &err));
    must(aff__engine_create(&e, net, &o, &err));
    must(ask(e, &want));
    aff__engine_snapshot(e, &s, NULL);
    assert_false(s.tiered);
    assert_true(s.tiers.picks[0][AFF_TIER_HOST] > 0 && s.tiers.picks[1][AFF_TIER_HOST] > 0);
    aff__engine_free(e);

    aff_tier_options t = {.slots = 40, .staging = 16};
    aff__placement_options_init(&t.placement);
    must(aff__net_use_tiers(net, &t, &err));
    aff_tiers *tiers = aff__net_expert_tiers(net);
    must(aff__engine_create(&e, net, &o, &err));
    for (int round = 0; round < 4; round++) {
        const bool broken = round & 1;
        aff__loader_inject(aff__tiers_loader(tiers), broken ? 0.9 : 0);
        const aff_status st = ask(e, &got);
        if (broken) {
            assert_int_equal(st, AFF_E_IO);
            assert_non_null(strstr(err.msg, path) ? strstr(err.msg, path) : strstr(err.msg, ".dspark.aff"));
            assert_non_null(strstr(err.msg, "expert"));
            continue;
        }
        if (st != AFF_OK) fail_msg("%s", err.msg);
        assert_int_equal(got.n, TOKENS);
        assert_memory_equal(got.id, want.id, sizeof want.id);
    }
    aff__engine_snapshot(e, &s, NULL);
    assert_true(s.tiered);
    assert_true(s.tiers.picks[0][AFF_TIER_DISK] > 0 && s.tiers.disk_bytes > 0 && s.tiers.disk_failed > 0 &&
                s.tiers.disk_retries > 0);
    aff__engine_free(e);
    must(aff__tiers_check(tiers, &err));
    aff__net_close(net);
}

/* What cannot be is said before anything runs. */
static void test_refused(void **state)
{
    aff_net *net;
    must(aff__net_open(&net, path, &(aff_net_options){.numerics = AFF_FAST}, &err));
    aff_tier_options t = {.slots = aff__net_config(net)->picks - 1};
    aff__placement_options_init(&t.placement);
    assert_int_equal(aff__net_use_tiers(net, &t, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "--host-pool-mib"));
    t.slots = 20;
    t.placement.moves = 5000;
    assert_int_equal(aff__net_use_tiers(net, &t, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "--placement-moves"));
    t.placement.moves = -1;
    const char *copies[] = {"/nowhere"};
    t.loader = (aff_loader_options){.copies = copies, .n_copies = 1};
    assert_int_equal(aff__net_use_tiers(net, &t, &err), AFF_E_IO);
    t.loader.n_copies = 0;
    float profile[8 * 16] = {0};
    profile[77] = -INFINITY;
    t.profile = profile;
    t.fill = true;
    assert_int_equal(aff__net_use_tiers(net, &t, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "profile"));
    profile[77] = 1;
    t.loader.inject = 1; /* the disk gives nothing at the start */
    assert_int_equal(aff__net_use_tiers(net, &t, &err), AFF_E_IO);
    t.loader.inject = 0;
    must(aff__net_use_tiers(net, &t, &err));
    assert_int_equal(aff__tiers_tier(aff__net_expert_tiers(net), 77 / 16, 77 % 16), AFF_TIER_HOST);
    aff__net_close(net);
}

static int setup(void **state)
{
    char dir[64];
    if (!mkdtemp(root)) return -1;
    snprintf(dir, sizeof dir, "%s/toy", root);
    snprintf(path, sizeof path, "%s/m.aff", root);
    if (aff_test_write_parity_model("toy", dir) != 0) return -1;
    test_write_container(dir, path, AFF_Q2P875G, 11, 1);
    return 0;
}
static int teardown(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_errors_end_requests), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
