/* A sequence's limits and memory, and what is left of it after a failed call. */
#include "state/seq_internal.h"
#include "base/mem.h"
#include "experts/tiers.h"
#include "base/rng.h"
#include "model/net_internal.h"
#include "model/forward.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include "support/variant.h"
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static char root[] = "/tmp/aff-seq-XXXXXX", ckpt[1024];
static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

enum { V = 256, N = 200 };
static int32_t ids[N];

static aff_net *open_net(const char *path, aff_numerics num)
{
    aff_net *n;
    const aff_net_options o = {.numerics = num, .draft = true};
    must(aff__net_open(&n, path, &o, &err));
    return n;
}

static aff_status feed(aff_runner *r, aff_seq *s, const int32_t *id, int n, float *last)
{
    const aff_batch b = {.n = n, .id = id, .seq = s, .want_from = last ? n - 1 : n, .logits = last};
    return aff__forward(r, &b, &err);
}

static void test_limits(void **state)
{
    aff_net *n = open_net(ckpt, AFF_MATH), *m = open_net(ckpt, AFF_SIM);
    aff_runner *r;
    aff_seq *s, *other;
    float lg[V];
    must(aff__runner_create(&r, n, 1, &err));
    assert_int_equal(aff__seq_create(&s, n, 0, &err), AFF_E_LIMIT);
    assert_int_equal(aff__seq_create(&s, n, aff__net_config(n)->max_positions + 1, &err), AFF_E_LIMIT);
    assert_non_null(strstr(err.msg, "max_position_embeddings"));
    must(aff__seq_create(&s, n, 20, &err));
    must(aff__seq_create(&other, m, 20, &err));
    assert_int_equal(aff__seq_capacity(s), 20);
    /* Errors that change nothing. */
    const int32_t bad[3] = {1, V, 2}, minus[1] = {-1};
    assert_int_equal(feed(r, s, bad, 3, NULL), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "token 1"));
    assert_int_equal(feed(r, s, minus, 1, NULL), AFF_E_INVALID);
    assert_int_equal(feed(r, s, ids, 21, NULL), AFF_E_LIMIT);
    assert_int_equal(feed(r, s, ids, 0, NULL), AFF_E_INVALID);
    assert_int_equal(feed(r, other, ids, 1, NULL), AFF_E_INVALID);
    const aff_batch nowhere = {.n = 2, .id = ids, .seq = s, .want_from = 1},
                    beyond = {.n = 2, .id = ids, .seq = s, .want_from = 3, .logits = lg};
    assert_int_equal(aff__forward(r, &nowhere, &err), AFF_E_INVALID);
    assert_int_equal(aff__forward(r, &beyond, &err), AFF_E_INVALID);
    int32_t d[8];
    assert_int_equal(aff__draft_block(r, s, 1, d, NULL, NULL, NULL, NULL, &err), AFF_E_INVALID); /* an empty sequence */
    assert_int_equal(aff__seq_pos(s), 0);
    must(feed(r, s, ids, 20, lg));
    assert_int_equal(feed(r, s, ids, 1, lg), AFF_E_LIMIT);
    assert_int_equal(aff__draft_block(r, s, V, d, NULL, NULL, NULL, NULL, &err), AFF_E_INVALID);
    must(aff__draft_block(r, s, 1, d, NULL, NULL, NULL, NULL, &err));          /* at the very end of the room */
    assert_int_equal(aff__draft_mtp1(r, ids, 20, 0, lg, &err), AFF_E_INVALID); /* not that kind of draft */
    aff__seq_free(s);
    aff__seq_free(other);
    aff__seq_free(NULL);
    aff__runner_free(r);
    aff__net_close(n);
    aff__net_close(m);
}

static void test_rollback_limits(void **state)
{
    aff_net *n = open_net(ckpt, AFF_MATH);
    aff_runner *r;
    aff_seq *s;
    must(aff__runner_create(&r, n, 1, &err));
    must(aff__seq_create(&s, n, 100, &err));
    must(aff__seq_rollback(s, 0, &err));
    must(feed(r, s, ids, 50, NULL));
    assert_int_equal(aff__seq_rollback(s, 51, &err), AFF_E_LIMIT);
    assert_int_equal(aff__seq_rollback(s, -1, &err), AFF_E_LIMIT);
    assert_int_equal(aff__seq_rollback(s, 50 - AFF_MAX_ROLLBACK - 1, &err), AFF_E_LIMIT);
    assert_non_null(strstr(err.msg, "42 to 50"));
    must(aff__seq_rollback(s, 46, &err));
    must(aff__seq_rollback(s, 42, &err));
    /* History of positions up to 49 was written: from 42 there is no way further back, step by step either. */
    assert_int_equal(aff__seq_rollback(s, 41, &err), AFF_E_LIMIT);
    must(feed(r, s, ids + 42, 2, NULL));
    assert_int_equal(aff__seq_rollback(s, 41, &err), AFF_E_LIMIT);
    must(feed(r, s, ids + 44, 8, NULL)); /* 52: now 44 is in reach, 43 is not */
    assert_int_equal(aff__seq_rollback(s, 43, &err), AFF_E_LIMIT);
    must(aff__seq_rollback(s, 44, &err));
    aff__seq_reset(s);
    assert_int_equal(aff__seq_pos(s), 0);
    must(feed(r, s, ids, 3, NULL));
    must(aff__seq_rollback(s, 0, &err));
    aff__seq_free(s);
    aff__runner_free(r);
    aff__net_close(n);
}

static int64_t resident_kib(void)
{
    long long size, resident;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lld %lld", &size, &resident), 2);
    fclose(f);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

/* A million positions: address space only; a short text in it costs what a short context costs. */
static void test_huge_context(void **state)
{
    char dir[64];
    snprintf(dir, sizeof dir, "%s/big", root);
    test_write_variant(ckpt, dir, &(variant){.config_key = "max_position_embeddings", .config_value = "1048576"});
    aff_net *n = open_net(dir, AFF_SIM);
    aff_runner *r;
    aff_seq *s, *small;
    float a[V], b[V];
    must(aff__runner_create(&r, n, 1, &err));
    must(aff__seq_create(&small, n, 64, &err));
    must(feed(r, small, ids, 40, a));
    const int64_t before = resident_kib();
    must(aff__seq_open(&s, n, &(aff_seq_options){.commit = 1024, .margin = 1024}, &err));
    assert_int_equal(aff__seq_capacity(s), 1048576);
    /* 1M/4 rows of 448 + 8 + 256 and of 64 + 4 bytes, 1M/128 of the former: 200 MiB. */
    assert_true(s->region_size > UINT64_C(200) << 20);
    must(feed(r, s, ids, 40, b));
    assert_true(resident_kib() - before < 160 << 10); /* sanitizers multiply what is touched */
    assert_memory_equal(a, b, sizeof a);
    aff__seq_free(s);
    aff__seq_free(small);
    aff__runner_free(r);
    aff__net_close(n);
}

static uint64_t pages(uint64_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

/* The plan by hand from spec 10.1 and 10.3, and what is committed at every step of growth. */
static void test_plan(void **state)
{
    char dir[64];
    snprintf(dir, sizeof dir, "%s/plan", root);
    test_write_variant(ckpt, dir, &(variant){.config_key = "max_position_embeddings", .config_value = "1048576"});
    static const struct {
        aff_numerics num;
        uint64_t row, key;
    } mode[] = {{AFF_MATH, 2048, 512}, {AFF_SIM, 712, 68}, {AFF_FAST, 584, 68}};
    for (int m = 0; m < 3; m++) {
        aff_net *n = open_net(dir, mode[m].num);
        const aff_config *c = aff__net_config(n);
        aff_seq_plan p, q;
        aff_runner *r;
        aff_seq *s;
        assert_int_equal(c->layers, 3); /* ratios 0, 4, 128; 3 draft stages; window 128 */
        must(aff__seq_plan(&p, n, 1048576, &err));
        assert_int_equal(p.row_bytes, mode[m].row);
        assert_int_equal(p.key_bytes, mode[m].key);
        assert_int_equal(p.raw, 3 * pages((128 + 256) * mode[m].row));
        assert_int_equal(p.draft, 3 * pages((128 + 256) * mode[m].row));
        /* 16 slots of two halves, values and gates, the indexer's too; 256 slots. */
        assert_int_equal(p.history, 2 * 16 * 1024 * 4 + 2 * 16 * 256 * 4 + 2 * 256 * 512 * 4);
        assert_int_equal(p.copy, p.raw + p.draft + p.history);
        assert_int_equal(p.rows, pages(262144 * mode[m].row) + pages(8192 * mode[m].row));
        assert_int_equal(p.keys, pages(262144 * mode[m].key));
        assert_int_equal(p.total, 2 * p.copy + p.rows + p.keys);
        assert_true(p.per_position == (double)(mode[m].row + mode[m].key) / 4 + (double)mode[m].row / 128);
        assert_int_equal(aff__seq_plan(&q, n, 1048577, &err), AFF_E_LIMIT);
        must(aff__runner_create(&r, n, 1, &err));
        assert_int_equal(aff__seq_open(&s, n, &(aff_seq_options){.commit = 2000000}, &err), AFF_E_INVALID);
        assert_int_equal(aff__seq_open(&s, n, &(aff_seq_options){.margin = -1}, &err), AFF_E_INVALID);
        must(aff__seq_open(&s, n, &(aff_seq_options){.commit = -1, .margin = 48}, &err));
        assert_int_equal(aff__seq_backed(s), 0);
        must(aff__seq_plan(&p, n, 0, &err));
        assert_int_equal(aff__seq_committed(s), p.total);
        /* Ahead of the position, in steps of 48. */
        for (int64_t at = 0; at < N; at += 10) {
            must(feed(r, s, ids + at, 10, NULL));
            assert_true(aff__seq_backed(s) >= at + 10 && aff__seq_backed(s) <= at + 10 + 48 &&
                        aff__seq_backed(s) % 48 == 0);
            must(aff__seq_plan(&p, n, aff__seq_backed(s), &err));
            assert_int_equal(aff__seq_committed(s), p.total);
        }
        must(aff__seq_grow(s, 200000, &err));
        const int64_t before = resident_kib();
        const uint64_t had = aff__seq_committed(s);
        must(aff__seq_grow(s, 700000, &err));
        must(aff__seq_plan(&p, n, aff__seq_backed(s), &err));
        assert_int_equal(aff__seq_committed(s), p.total);
        /* It is there, not promised. */
        const double grew = (double)(resident_kib() - before) * 1024 / (double)(p.total - had);
        assert_true(grew > 0.98 && grew < 1.02);
        assert_int_equal(aff__seq_grow(s, 1048577, &err), AFF_E_LIMIT);
        /* A new sequence gives back what the old one needed beyond --kv-commit. */
        aff__seq_reset(s);
        assert_int_equal(aff__seq_backed(s), 0);
        assert_true(resident_kib() < before);
        aff__seq_free(s);
        aff__runner_free(r);
        aff__net_close(n);
    }
}

/* The system refuses memory: the pass fails with one line, nothing is lost, and with memory it goes on to the same
 * result. */
static void test_growth_refused(void **state)
{
    aff_net *n = open_net(ckpt, AFF_SIM);
    aff_runner *r;
    aff_seq *s, *t;
    float a[V], b[V];
    struct rlimit was, now;
    must(aff__runner_create(&r, n, 1, &err));
    must(aff__seq_create(&t, n, 400, &err));
    must(feed(r, t, ids, 150, a));
    must(aff__seq_open(&s, n, &(aff_seq_options){.size = 4096, .commit = 100, .margin = 1000}, &err));
    must(feed(r, s, ids, 90, NULL));
    assert_int_equal(getrlimit(RLIMIT_DATA, &was), 0);
    now = was;
    now.rlim_cur = 4096; /* far below what there is: no page more */
    assert_int_equal(setrlimit(RLIMIT_DATA, &now), 0);
    for (int i = 0; i < 3; i++) {
        const aff_status st = feed(r, s, ids + 90, 60, b);
        assert_int_equal(st, AFF_E_NOMEM);
        assert_non_null(strstr(err.msg, "refuses memory for positions 100 to 150"));
        assert_int_equal(aff__seq_pos(s), 90);
        assert_int_equal(aff__seq_backed(s), 100);
    }
    const aff_status inside = feed(r, s, ids + 90, 10, b); /* what is backed still works */
    assert_int_equal(setrlimit(RLIMIT_DATA, &was), 0);
    assert_int_equal(inside, AFF_OK);
    must(feed(r, s, ids + 100, 50, b));
    assert_memory_equal(a, b, sizeof a);
    aff_seq_plan p;
    must(aff__seq_plan(&p, n, aff__seq_backed(s), &err));
    assert_int_equal(aff__seq_committed(s), p.total);
    aff__seq_free(s);
    aff__seq_free(t);
    aff__runner_free(r);
    aff__net_close(n);
}

/* The disk fails in the middle of a pass (row-major experts are read at first use): the call fails, the position
 * stays, and the same call once more gives what it would have given. The pass begins inside a group and is longer than
 * the history rings. */
static void test_failed_pass(void **state)
{
    enum { WIDTH = 512, HELD = 3, ROWS = 40 };
    char model[64], path[64];
    snprintf(model, sizeof model, "%s/toy", root);
    snprintf(path, sizeof path, "%s/toy.aff", root);
    assert_int_equal(aff_test_write_parity_model("toy", model), 0);
    test_write_container(model, path, AFF_Q2P875Q4, 5, 1);
    static float want[ROWS * WIDTH], got[ROWS * WIDTH];
    int failures = 0;
    for (unsigned k = 0; k < 64; k += k ? 4 : 1) { /* k = 0: nothing fails */
        aff_net *n = open_net(path, AFF_MATH);
        aff_runner *r;
        aff_seq *s;
        must(aff__runner_create(&r, n, 2, &err));
        must(aff__seq_create(&s, n, 256, &err));
        must(feed(r, s, ids, HELD, NULL));
        const aff_batch b = {.n = ROWS, .id = ids + HELD, .seq = s, .want_from = 0, .logits = k ? got : want};
        aff_loader *disk = aff__tiers_loader(aff__net_expert_tiers(n));
        aff__loader_inject(disk, k * 0.01);
        const aff_status st = aff__forward(r, &b, &err);
        aff__loader_inject(disk, 0);
        if (st != AFF_OK) {
            failures++;
            assert_int_equal(st, AFF_E_IO);
            assert_non_null(strstr(err.msg, "expert"));
            assert_int_equal(aff__seq_pos(s), HELD);
            must(aff__forward(r, &b, &err));
        }
        if (k) assert_memory_equal(got, want, sizeof got);
        assert_int_equal(aff__seq_pos(s), HELD + ROWS);
        aff__seq_free(s);
        aff__runner_free(r);
        aff__net_close(n);
    }
    assert_true(failures >= 8);
}

static int make_root(void **state)
{
    uint64_t seed = 5;
    snprintf(ckpt, sizeof ckpt, "%s/golden/v4-sim/ckpt-dspark", AFF_TESTS_DIR);
    for (int i = 0; i < N; i++) ids[i] = (int32_t)(aff__splitmix64(&seed) % V);
    return mkdtemp(root) ? 0 : -1;
}
static int remove_root(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_limits),         cmocka_unit_test(test_rollback_limits),
                                       cmocka_unit_test(test_huge_context),   cmocka_unit_test(test_plan),
                                       cmocka_unit_test(test_growth_refused), cmocka_unit_test(test_failed_pass)};
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
