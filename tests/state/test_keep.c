/* state/keep: beginnings of a conversation in memory, on models/tiny-v4. A restored state is the recomputed one to the bit. */
#include "support/test.h"
#include "model/forward.h"
#include "state/keep.h"
#include <stdlib.h>
#include <string.h>

static aff_net *net;
static aff_runner *runner;

static int open_model(void **state)
{
    aff_error err = {0};
    return aff__net_open(&net, AFF_SOURCE_DIR "/models/tiny-v4", &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err) != AFF_OK ||
                   aff__runner_create(&runner, net, 1, &err) != AFF_OK
               ? -1
               : 0;
}

static int close_model(void **state)
{
    aff__runner_free(runner);
    aff__net_close(net);
    return 0;
}

static aff_seq *make(void)
{
    aff_seq *s;
    aff_error err = {0};
    assert_int_equal(aff__seq_create(&s, net, 2048, &err), AFF_OK);
    return s;
}

static void run_to(aff_seq *s, const int32_t *id, int64_t n)
{
    aff_error err = {0};
    const int64_t pos = aff__seq_pos(s);
    const aff_batch b = {.n = (int)(n - pos), .id = id + pos, .seq = s, .want_from = n - pos};
    if (n > pos) assert_int_equal(aff__forward(runner, &b, &err), AFF_OK);
}

static int64_t restore(aff_keep *k, aff_seq *s, const int32_t *id, int64_t n, int64_t most)
{
    aff_error err = {0};
    aff__seq_reset(s);
    assert_int_equal(aff__keep_restore(k, s, id, n, most, &err), AFF_OK);
    return aff__seq_pos(s);
}

/* s at its position is what running id[0..pos) gives. */
static void is_recomputed(aff_seq *s, const int32_t *id)
{
    aff_seq *fresh = make();
    run_to(fresh, id, aff__seq_pos(s));
    const aff_hash a = aff__seq_digest(s), b = aff__seq_digest(fresh);
    assert_int_equal(a.lo, b.lo);
    assert_int_equal(a.hi, b.hi);
    aff__seq_free(fresh);
}

static void turns_go_on_where_they_ended(void **state)
{
    enum { N = 700 };
    int32_t id[N], other[N];
    aff_keep *k;
    aff_error err = {0};
    aff_seq *s = make();
    for (int i = 0; i < N; i++) id[i] = other[i] = 100 + i * 37 % 3000;
    assert_int_equal(aff__keep_create(&k, &err), AFF_OK);
    assert_int_equal(restore(k, s, id, N, N - 1), 0);
    static const int64_t marks[] = {130, 131, 275, 420};
    for (int i = 0; i < 4; i++) {
        run_to(s, id, marks[i]);
        aff__keep_publish(k, s, id);
        aff__keep_publish(k, s, id); /* again is nothing new */
    }
    assert_int_equal(restore(k, s, id, N, N - 1), 420);
    is_recomputed(s, id);
    run_to(s, id, 500);
    is_recomputed(s, id);

    other[300] = 7; /* another way from there: back to the mark before */
    assert_int_equal(restore(k, s, other, N, N - 1), 275);
    is_recomputed(s, other);
    run_to(s, other, 420);
    aff__keep_publish(k, s, other);
    assert_int_equal(restore(k, s, id, N, N - 1), 275); /* the first text's end is forgotten */
    run_to(s, id, 290);
    aff__keep_publish(k, s, id);
    assert_int_equal(restore(k, s, id, 289, 288), 288); /* a little back from a mark */
    is_recomputed(s, id);
    run_to(s, id, 310);
    aff__keep_publish(k, s, id);
    assert_int_equal(restore(k, s, id, N, N - 1), 310);
    is_recomputed(s, id);
    id[0] = 9;
    assert_int_equal(restore(k, s, id, N, N - 1), 0);
    aff__keep_free(k);
    aff__seq_free(s);
}

/* Old marks cannot be gone back to, but hold their rows. */
static void the_last_tails_are_kept(void **state)
{
    enum { N = 600, EACH = 50 };
    int32_t id[N];
    aff_keep *k;
    aff_error err = {0};
    aff_seq *s = make();
    for (int i = 0; i < N; i++) id[i] = 200 + i * 11 % 2500;
    assert_int_equal(aff__keep_create(&k, &err), AFF_OK);
    for (int i = 1; i <= 10; i++) {
        run_to(s, id, i * EACH);
        aff__keep_publish(k, s, id);
    }
    assert_int_equal(restore(k, s, id, (10 - AFF_KEEP_TAILS) * EACH + EACH + 20, N), (10 - AFF_KEEP_TAILS + 1) * EACH);
    is_recomputed(s, id);
    assert_int_equal(restore(k, s, id, 3 * EACH + 20, N), 0);
    aff__keep_free(k);
    aff__seq_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(turns_go_on_where_they_ended), cmocka_unit_test(the_last_tails_are_kept)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
