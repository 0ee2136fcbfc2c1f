/* experts/predict: profiles and maps fitted to traces whose structure is known. */
#include "support/test.h"
#include "base/rng.h"
#include "experts/predict.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

enum { E = 12, K = 2 };

static int dice(uint64_t *seed, int n)
{
    return (int)(aff__splitmix64(seed) % (uint64_t)n);
}

/* Layer 0 at random; layer 1 picks its twins (e * 5 + 1 mod E); layer 2 keeps each pick of the row before with 4 out
 * of 5. In passes of `rows` rows. */
static void make(aff_uses *u, int tokens, int rows, uint64_t seed)
{
    int32_t kept[K] = {0, 1};
    aff__uses_init(u, 3, E, K);
    for (int at = 0; at < tokens; at += rows) {
        int32_t pick[3][64 * K];
        for (int t = 0; t < rows; t++) {
            int32_t *a = pick[0] + t * K, *b = pick[1] + t * K, *c = pick[2] + t * K;
            a[0] = dice(&seed, E);
            a[1] = (a[0] + 1 + dice(&seed, E - 1)) % E;
            for (int k = 0; k < K; k++) b[k] = (a[k] * 5 + 1) % E;
            for (int k = 0; k < K; k++)
                while (dice(&seed, 5) == 0 || kept[k] == kept[1 - k]) kept[k] = dice(&seed, E);
            memcpy(c, kept, sizeof kept);
        }
        for (int l = 0; l < 3; l++) must(aff__uses_add(u, l, rows, pick[l], NULL, 0, &err));
    }
}

static void maps_find_what_is_there(void **state)
{
    aff_uses u[2];
    const aff_uses *all[2] = {&u[0], &u[1]};
    aff_profile p, again;
    aff_recall r[3];
    aff_fit f;
    make(&u[0], 2000, 1, 1);
    make(&u[1], 1984, 32, 2); /* prompts */
    aff__fit_init(&f);
    f.passes = 6;
    must(aff__fit_profile(&p, all, 1, &f, &err));
    must(aff__fit_profile(&again, all, 1, &f, &err));
    assert_memory_equal(p.below, again.below, 2 * E * E * sizeof *p.below);
    aff__profile_free(&again);
    assert_int_equal(p.picks, K);
    must(aff__recall(r, &p, all, 1, &f, all + 1, 1, 0, f.to, &err));
    assert_int_equal(r[0].picks, 0);
    assert_int_equal(r[1].picks, 1984 * K);
    assert_int_equal(r[1].sizes[0], K);
    assert_int_equal(r[1].sizes[3], E);
    assert_int_equal(r[1].found[AFF_GUESS_MAP][3], r[1].picks);  /* all of them are guessed */
    assert_true(r[1].found[AFF_GUESS_MAP][0] > 0.99 * 1984 * K); /* twins */
    assert_true(r[1].found[AFF_GUESS_COUNTS][0] > 0.99 * 1984 * K);
    assert_true(r[1].found[AFF_GUESS_POPULAR][0] < 0.3 * 1984 * K);
    const double stay = (double)r[2].found[AFF_GUESS_BEFORE][0] / (1984 * K),
                 map = (double)r[2].found[AFF_GUESS_MAP][0] / (1984 * K);
    assert_float_equal(stay, 0.8, 0.05);
    assert_true(map > stay - 0.03);
    /* One by hand: the score is the bias and the weights of what was picked. */
    float score[E];
    int32_t top[K];
    aff__predict(&p, 1, (int32_t[]){3, 7}, 2, NULL, 0, score);
    assert_float_equal(
        score[5], p.bias[5] + aff__profile_weight(p.below[3 * E + 5]) + aff__profile_weight(p.below[7 * E + 5]), 1e-5);
    assert_int_equal(aff__predict_top(score, E, K, top), K);
    assert_true((top[0] == 4 && top[1] == 0) || (top[0] == 0 && top[1] == 4));
    for (int i = 0; i < 2; i++) aff__uses_free(&u[i]);
    aff__profile_free(&p);
}

static void profiles_are_shares(void **state)
{
    aff_uses u[2];
    const aff_uses *all[2] = {&u[0], &u[1]};
    aff_profile p;
    aff_fit f;
    aff__uses_init(&u[0], 1, 4, 1);
    for (int i = 0; i < 8; i++) must(aff__uses_add(&u[0], 0, 1, &(int32_t){i < 6 ? 0 : 3}, NULL, 0, &err));
    aff__fit_init(&f);
    must(aff__fit_profile(&p, all, 1, &f, &err));
    assert_null(p.below);
    assert_float_equal(p.use[0], 0.75, 1e-6);
    assert_float_equal(p.use[3], 0.25, 1e-6);
    aff__profile_free(&p);
    f.halflife = 1; /* weights 1, 1/2, 1/4 ... from the last on */
    must(aff__fit_profile(&p, all, 1, &f, &err));
    assert_float_equal(p.use[3], 1.5 / (2 - 1.0 / 128), 1e-6);
    aff__profile_free(&p);
    f.halflife = 0;
    f.to /= 2; /* the first half only */
    must(aff__fit_profile(&p, all, 1, &f, &err));
    assert_float_equal(p.use[0], 1, 1e-6);
    aff__profile_free(&p);
    f.to *= 2;
    /* A prompt's rows may count less: 20 rows of expert 1 at a tenth are 2 beside 8. */
    int32_t ones[20];
    for (int i = 0; i < 20; i++) ones[i] = 1;
    must(aff__uses_add(&u[0], 0, 20, ones, NULL, 0, &err));
    f.prefill_weight = 0.1;
    must(aff__fit_profile(&p, all, 1, &f, &err));
    assert_float_equal(p.use[1], 0.2, 1e-6);
    assert_float_equal(p.use[0], 0.6, 1e-6);
    aff__profile_free(&p);
    aff__uses_init(&u[1], 1, 5, 1);
    assert_int_equal(aff__fit_profile(&p, all, 2, &f, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "different models"));
    aff__uses_free(&u[0]);
}

static void the_best_of_equals(void **state)
{
    int32_t top[4];
    assert_int_equal(aff__predict_top((float[]){1, 2, 2, 0, 2}, 5, 3, top), 3);
    assert_memory_equal(top, ((int32_t[]){1, 2, 4}), 12);
    assert_int_equal(aff__predict_top((float[]){1, 2}, 2, 4, top), 2);
    assert_memory_equal(top, ((int32_t[]){1, 0}), 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(maps_find_what_is_there), cmocka_unit_test(profiles_are_shares),
                                       cmocka_unit_test(the_best_of_equals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
