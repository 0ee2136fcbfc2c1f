/* A sequence's limits and memory, and what is left of it after a failed call. */
#include "state/seq_internal.h"
#include "base/mem.h"
#include "base/rng.h"
#include "model/net_internal.h"
#include "model/forward.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include "support/variant.h"
#include <stdlib.h>
#include <string.h>
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
    assert_int_equal(aff__draft_mtp1(r, s, ids, 20, lg, &err), AFF_E_INVALID); /* not that kind of draft */
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

/* Memory runs out in the middle of a pass (row-major experts are copied at first use): the call fails, the position
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
        aff__alloc_fail_after(k);
        const aff_status st = aff__forward(r, &b, &err);
        aff__alloc_fail_after(0);
        if (st != AFF_OK) {
            failures++;
            assert_int_equal(st, AFF_E_NOMEM);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_limits), cmocka_unit_test(test_rollback_limits),
                                       cmocka_unit_test(test_huge_context), cmocka_unit_test(test_failed_pass)};
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
