/* engine/width: the share of rows against exhaustive search, calibration and time tables against definitions. */
#include "support/test.h"
#include "base/rng.h"
#include "engine/width.h"
#include <math.h>
#include <string.h>

static uint64_t seed = 7;
static double uniform(void) { return (double)(aff__splitmix64(&seed) >> 11) * 0x1p-53; }

static double gain_of(const aff_offer *o, const int *take, int n)
{
    double g = 0;
    for (int i = 0; i < n; i++) {
        double chain = 1;
        for (int j = 0; j < take[i]; j++) g += chain *= o[i].chance[j];
    }
    return g;
}

/* Three offers, all ways to take from them: none has a better gain - price * time. */
static void best_of_all_shares(void **state)
{
    for (int round = 0; round < 300; round++) {
        aff_offer o[3];
        double verify[AFF_PASS_ROWS + 1] = {0};
        for (int i = 1; i <= AFF_PASS_ROWS; i++) verify[i] = verify[i - 1] + 100 * uniform() + (i == 1 ? 500 : 0);
        for (int i = 0; i < 3; i++) {
            o[i].n = (int)(6 * uniform());
            for (int j = 0; j < AFF_MAX_WIDTH; j++) o[i].chance[j] = uniform();
        }
        const double price = 0.01 * uniform();
        const int spare = (int)(14 * uniform());
        double best = 0;
        for (int c = 0; c < 216; c++) {
            const int take[3] = {c % 6, c / 6 % 6, c / 36}, rows = take[0] + take[1] + take[2];
            if (take[0] > o[0].n || take[1] > o[1].n || take[2] > o[2].n || rows > spare) continue;
            best = fmax(best, gain_of(o, take, 3) - price * (verify[3 + rows] - verify[3]));
        }
        const int given = aff__share_rows(o, 3, spare, verify, price), got[3] = {o[0].take, o[1].take, o[2].take};
        assert_int_equal(given, got[0] + got[1] + got[2]);
        assert_true(given <= spare);
        assert_true(fabs(gain_of(o, got, 3) - price * (verify[3 + given] - verify[3]) - best) < 1e-9);
        assert_true(fabs(gain_of(o, got, 3) - aff__offer_gain(&o[0], got[0]) - aff__offer_gain(&o[1], got[1]) - aff__offer_gain(&o[2], got[2])) < 1e-12);
    }
}

static void fixed_widths_fill_the_rows(void **state)
{
    aff_offer o[2] = {{.n = 5, .chance = {0.9, 0.9, 0.9, 0.1, 0.1}}, {.n = 3, .chance = {0.5, 0.5, 0.5}}};
    assert_int_equal(aff__share_rows(o, 2, 14, NULL, 0), 8);
    assert_int_equal(o[0].take, 5);
    assert_int_equal(o[1].take, 3);
    assert_int_equal(aff__share_rows(o, 2, 4, NULL, 0), 4); /* 0.9 0.81 0.729 | 0.5 0.25 */
    assert_int_equal(o[0].take, 3);
    assert_int_equal(o[1].take, 1);
    assert_int_equal(aff__share_rows(o, 2, 0, NULL, 0), 0);
    o[0].n = o[1].n = 0;
    assert_int_equal(aff__share_rows(o, 2, 14, NULL, 0), 0);
}

/* The confidence is corrected by what came of it: for a place, for a sequence, in its slope; and what was is forgotten. */
static void chances_are_fitted(void **state)
{
    aff_calibration all = {0}, none = {0};
    aff_leaning own = {0}, other = {0}, nobody = {0};
    assert_true(fabs(aff__calibration_chance(&none, &nobody, 0, 2) - 1 / (1 + exp(-2))) < 1e-12);
    assert_true(aff__calibration_chance(&none, &nobody, 3, NAN) < 0.01);
    assert_true(aff__calibration_chance(&none, &nobody, 3, INFINITY) > 0.99);
    /* Of 400 tokens at place 1, confidence 2, a quarter is right: the sequence's chance, and near it that of a new one; not at place 2. */
    for (int i = 0; i < 400; i++) aff__calibration_note(&all, &own, 1, 2, i % 4 == 0);
    assert_true(fabs(aff__calibration_chance(&all, &own, 1, 2) - 0.25) < 0.06);
    assert_true(aff__calibration_chance(&all, &nobody, 1, 2) < 0.6);
    assert_true(aff__calibration_chance(&all, &nobody, 2, 2) > aff__calibration_chance(&all, &nobody, 1, 2) + 0.05);
    /* A sequence that does better has its own shift. */
    for (int i = 0; i < 400; i++) {
        aff__calibration_note(&all, &own, 1, 2, i % 4 == 0);
        aff__calibration_note(&all, &other, 1, 2, i % 8 != 0);
    }
    assert_true(aff__calibration_chance(&all, &other, 1, 2) > aff__calibration_chance(&all, &own, 1, 2) + 0.3);
    for (int i = 0; i < 300; i++) aff__calibration_note(&all, &other, 1, 2, false); /* the old fades */
    assert_true(aff__calibration_chance(&all, &other, 1, 2) < 0.1);
    /* A confidence that says too much: half of it is meant. */
    aff_calibration wide = {0};
    uint64_t random = 1;
    for (int i = 0; i < 4000; i++) {
        const float conf = (float)(aff__splitmix64(&random) >> 40) * 0x1p-24f * 8 - 4;
        const double u = (double)(aff__splitmix64(&random) >> 11) * 0x1p-53;
        aff__calibration_note(&wide, &nobody, 0, conf, u < 1 / (1 + exp(-(double)conf / 2)));
    }
    for (int i = -4; i <= 4; i += 2) assert_true(fabs(aff__calibration_chance(&wide, &nobody, 0, (float)i) - 1 / (1 + exp(-i / 2.0))) < 0.12);
    /* Whatever comes, chances are chances. */
    for (int i = 0; i < 3000; i++) aff__calibration_note(&wide, &own, i % 5, i % 3 ? NAN : INFINITY, i % 2);
    for (int i = 0; i < 5; i++) {
        const double p = aff__calibration_chance(&wide, &own, i, 1);
        assert_true(p >= 0 && p <= 1);
    }
}

static void times_between_and_beyond(void **state)
{
    double t[AFF_PASS_ROWS + 1] = {0};
    assert_true(aff__time_of(t, 3) == 0);
    aff__time_note(t, 4, 100);
    assert_true(aff__time_of(t, 2) == 100 && aff__time_of(t, 4) == 100 && aff__time_of(t, 16) == 100);
    aff__time_note(t, 8, 200);
    assert_true(aff__time_of(t, 5) == 125 && aff__time_of(t, 7) == 175 && aff__time_of(t, 12) == 200 && aff__time_of(t, 1) == 100);
    for (int i = 0; i < 200; i++) aff__time_note(t, 8, 300);
    assert_true(fabs(aff__time_of(t, 8) - 300) < 1);
    aff__time_note(t, 8, 1e9); /* a hiccup counts as twice the usual */
    assert_true(aff__time_of(t, 8) < 340);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(best_of_all_shares), cmocka_unit_test(fixed_widths_fill_the_rows), cmocka_unit_test(chances_are_fitted),
                                       cmocka_unit_test(times_between_and_beyond)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
