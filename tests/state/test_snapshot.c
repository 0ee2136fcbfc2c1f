/* state/snapshot: restored equals recomputed at every kind of position - state, logits, draft, rollback - and bytes
 * that are not a whole snapshot of this network change nothing. */
#include "state/states.h"
#include "model/net_internal.h"

typedef struct {
    float logits[V], draft[5 * V], conf[5];
    int32_t id[5];
    aff_hash digest;
} result;

/* What the future makes of a state: a rollback of `back`, some tokens, a draft, more tokens. */
static result future(aff_runner *r, aff_seq *s, const int32_t *id, int back, uint64_t seed)
{
    result x;
    memset(&x, 0, sizeof x);
    const int64_t low = aff__seq_low(s), pos = aff__seq_pos(s);
    must(aff__seq_rollback(s, pos - back > low ? pos - back : low, &err));
    run_to(r, s, id, pos + 3, 2, &seed, x.logits);
    must(aff__draft_block(r, s, 7, x.id, x.conf, x.draft, NULL, NULL, &err));
    run_to(r, s, id, pos + 140 < N ? pos + 140 : N, 60, &seed, x.logits);
    x.digest = aff__seq_digest(s);
    return x;
}

static void restored_equals_recomputed(aff_numerics num, const int *at, int n)
{
    aff_net *net = open_net(num);
    aff_runner *r;
    aff_seq *a = open_seq(net), *b = open_seq(net);
    uint64_t seed = 3;
    assert_int_equal(aff__net_config(net)->draft_block, 5);
    must(aff__runner_create(&r, net, 1, &err));
    for (int i = 0; i < n; i++) {
        uint8_t *bytes;
        uint64_t size;
        aff__seq_reset(a);
        run_to(r, a, ids[0], at[i], 40, &seed, NULL);
        must(aff__seq_snapshot(a, &bytes, &size, &err));
        aff__seq_reset(b); /* whose rings are full of something else */
        run_to(r, b, ids[3], 230, 50, &seed, NULL);
        must(aff__seq_restore(b, bytes, size, &err));
        assert_int_equal(aff__seq_pos(b), at[i]);
        assert_int_equal(aff__seq_low(b), aff__seq_low(a));
        assert_true(same_hash(aff__seq_digest(a), aff__seq_digest(b)));
        /* A snapshot of the restored one is the same bytes. */
        uint8_t *again;
        uint64_t size2;
        must(aff__seq_snapshot(b, &again, &size2, &err));
        assert_int_equal(size2, size);
        assert_memory_equal(again, bytes, size);
        free(again);
        const int back = i % 9;
        const result x = future(r, a, ids[0], back, (uint64_t)i), y = future(r, b, ids[0], back, (uint64_t)i);
        assert_memory_equal(&x, &y, sizeof x);
        free(bytes);
    }
    aff__seq_free(a);
    aff__seq_free(b);
    aff__runner_free(r);
    aff__net_close(net);
}

/* Group ends, the positions beside them, the middle of groups of 4 and of 128, beyond the window and the second group
 * of 128. */
static void test_math(void **state)
{
    static const int at[] = {1, 6, 127, 129};
    restored_equals_recomputed(AFF_MATH, at, 4);
}
static void test_sim(void **state)
{
    static const int at[] = {2, 3, 4, 5, 7, 8, 9, 31, 33, 126, 128, 130, 151, 255, 256, 257, 262};
    restored_equals_recomputed(AFF_SIM, at, 17);
}
static void test_fast(void **state)
{
    static const int at[] = {3, 8, 70, 127, 128, 135, 137, 258};
    restored_equals_recomputed(AFF_FAST, at, 8);
}

/* The digest tells states apart: every ring of every layer, the draft's too, counts. */
static void test_digest_sees_everything(void **state)
{
    aff_net *net = open_net(AFF_SIM);
    aff_runner *r;
    aff_seq *a = open_seq(net);
    uint64_t seed = 3;
    must(aff__runner_create(&r, net, 1, &err));
    run_to(r, a, ids[0], 133, 40, &seed, NULL);
    const aff_hash was = aff__seq_digest(a);
    uint8_t *bytes;
    uint64_t size, at = 0, changed = 0;
    must(aff__seq_snapshot(a, &bytes, &size, &err));
    const uint64_t rows = aff__seq_rows_bytes(a, 0, 133), tail = aff__seq_tail_bytes(a, 133, aff__seq_low(a)),
                   live = aff__seq_tail_bytes(a, 133, 133), head = size - rows - tail;
    uint8_t *copy = malloc((size_t)size);
    for (at = head; at < size; at += 61) {
        memcpy(copy, bytes, (size_t)size);
        copy[at] ^= 0x10;
        must(aff__seq_rows_load(a, 0, 133, copy + head, &err));
        must(aff__seq_tail_load(a, 133, 125, copy + head + rows, &err));
        changed += !same_hash(aff__seq_digest(a), was);
    }
    /* All but what only a rollback needs. */
    const double share = (double)(rows + live) / (double)(rows + tail),
                 seen = (double)changed * 61 / (double)(rows + tail);
    assert_true(seen > share - 0.03 && seen < share + 0.03);
    free(copy);
    free(bytes);
    aff__seq_free(a);
    aff__runner_free(r);
    aff__net_close(net);
}

static void test_refusals(void **state)
{
    aff_net *net = open_net(AFF_SIM), *other = open_net(AFF_FAST);
    aff_runner *r;
    aff_seq *a = open_seq(net), *b = open_seq(net), *c = open_seq(other), *small;
    uint64_t seed = 3, size;
    uint8_t *bytes;
    must(aff__runner_create(&r, net, 1, &err));
    must(aff__seq_create(&small, net, 40, &err));
    run_to(r, a, ids[0], 50, 40, &seed, NULL);
    run_to(r, b, ids[1], 60, 40, &seed, NULL);
    const aff_hash was = aff__seq_digest(b);
    must(aff__seq_snapshot(a, &bytes, &size, &err));
    assert_int_equal(aff__seq_restore(c, bytes, size, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "another model"));
    assert_int_equal(aff__seq_restore(small, bytes, size, &err), AFF_E_LIMIT);
    for (uint64_t cut = 0; cut < size; cut += size / 37 + 1)
        assert_int_not_equal(aff__seq_restore(b, bytes, cut, &err), AFF_OK);
    for (uint64_t at = 0; at < size; at += at < 88 ? 1 : size / 53) {
        bytes[at] ^= 1;
        assert_int_not_equal(aff__seq_restore(b, bytes, size, &err), AFF_OK);
        bytes[at] ^= 1;
    }
    assert_int_equal(aff__seq_pos(b), 60);
    assert_true(same_hash(aff__seq_digest(b), was));
    must(aff__seq_restore(b, bytes, size, &err));
    /* Below what was restored there is nothing. */
    assert_int_equal(aff__seq_low(b), 42);
    must(aff__seq_rollback(b, 44, &err));
    assert_int_equal(aff__seq_rollback(b, 41, &err), AFF_E_LIMIT);
    run_to(r, b, ids[0], 47, 1, &seed, NULL);
    assert_int_equal(aff__seq_low(b), 42);
    free(bytes);
    aff__seq_free(a);
    aff__seq_free(b);
    aff__seq_free(c);
    aff__seq_free(small);
    aff__runner_free(r);
    aff__net_close(net);
    aff__net_close(other);
}

static int setup(void **state)
{
    make_ids();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_math), cmocka_unit_test(test_sim),
                                       cmocka_unit_test(test_fast), cmocka_unit_test(test_digest_sees_everything),
                                       cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, setup, NULL);
}
