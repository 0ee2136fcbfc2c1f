/* engine/sampler: the filters against hand-made distributions, the draw against its definition, and chi-square. */
#include "support/test.h"
#include "engine/sampler.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EIGHT = 8 };

/* Logits whose softmax at temperature 1 is p/sum, as near as float32 logits allow. */
static void logits_of(const double *p, int n, float *l)
{
    for (int i = 0; i < n; i++) l[i] = p[i] > 0 ? (float)log(p[i]) : -INFINITY;
}

/* Ids that survive, as a bit mask. */
static unsigned kept(const float *l, int n, aff_sampling sp)
{
    aff_sampler *s;
    aff_dist d;
    aff_error err = {0};
    unsigned mask = 0;
    assert_int_equal(aff__sampler_create(&s, n, &err), AFF_OK);
    assert_int_equal(aff__sampler_filter(s, l, &sp, &d, &err), AFF_OK);
    uint64_t total = 0;
    for (int i = 0; i < n; i++) {
        if (d.weight[i] < d.keep) continue;
        mask |= 1u << i;
        total += d.weight[i];
    }
    assert_int_equal(total, d.total);
    aff__sampler_free(s);
    return mask;
}

static aff_status next(const float *l, int n, aff_sampling sp, int64_t pos, int32_t *id, aff_error *err)
{
    aff_sampler *s;
    assert_int_equal(aff__sampler_create(&s, n, err), AFF_OK);
    *id = -99;
    aff_status st = aff__sampler_next(s, l, &sp, pos, id, err);
    aff__sampler_free(s);
    return st;
}

static void key_has_golden_values(void **state)
{
    (void)state;
    /* mix64(0x9E3779B97F4A7C15) is the first output of splitmix64(0), E220A8397B1DCDAF; the rest from an independent
     * evaluation of the rule in sampler.h. */
    assert_int_equal(aff__mix64(0x9E3779B97F4A7C15u), 0xE220A8397B1DCDAFu);
    static const struct {
        uint64_t seed;
        uint32_t choice;
        int64_t pos;
        uint64_t u;
    } g[] = {
        {0, 0, 0, 1249383295688599u},        {0, 0, 1, 1660627371350223u},
        {0, 1, 0, 2424110414043343u},        {1, 0, 0, 6246602021646768u},
        {42, 0, 1048575, 7939471407498530u}, {UINT64_MAX, UINT32_MAX, INT64_MAX, 605183042953855u},
    };
    for (size_t i = 0; i < sizeof g / sizeof g[0]; i++)
        assert_int_equal(aff__sampler_uniform(g[i].seed, g[i].choice, g[i].pos), g[i].u);
}

static void weights_are_exp(void **state)
{
    (void)state;
    /* exp(-1), exp(-0.5) ... times 2^44, rounded; computed with 60 digits. */
    const float l[] = {0, -1, -0.5f, -10, -30.5f, -33, -1e30f, -0.001f};
    static const uint64_t want[] = {17592186044416, 6471803571004, 10670200207307, 798684011, 1, 0, 0, 17574602650699};
    aff_sampler *s;
    aff_dist d;
    aff_error err = {0};
    aff_sampling sp = {.temperature = 1, .top_p = 1};
    assert_int_equal(aff__sampler_create(&s, EIGHT, &err), AFF_OK);
    assert_int_equal(aff__sampler_filter(s, l, &sp, &d, &err), AFF_OK);
    for (int i = 0; i < EIGHT; i++) assert_int_equal(d.weight[i], want[i]);
    assert_int_equal(d.keep, 1);
    /* Half the logits at half the temperature are the same distribution. */
    float shifted[EIGHT];
    for (int i = 0; i < EIGHT; i++) shifted[i] = l[i] * 0.5f;
    sp.temperature = 0.5;
    assert_int_equal(aff__sampler_filter(s, shifted, &sp, &d, &err), AFF_OK);
    for (int i = 0; i < EIGHT; i++) assert_int_equal(d.weight[i], want[i]);
    aff__sampler_free(s);
}

static void filters_keep_the_right_tokens(void **state)
{
    (void)state;
    float l[EIGHT];
    const double p[EIGHT] = {0.05, 0.40, 0.02, 0.20, 0.01, 0.20, 0.10, 0.02};
    logits_of(p, EIGHT, l);
    const aff_sampling all = {.temperature = 1, .top_p = 1};
    aff_sampling sp = all;
    assert_int_equal(kept(l, EIGHT, sp), 0xFF);
    sp.top_k = 1;
    assert_int_equal(kept(l, EIGHT, sp), 1u << 1);
    sp.top_k = 2; /* ids 3 and 5 tie for the second place: both stay */
    assert_int_equal(kept(l, EIGHT, sp), 0x2A);
    sp.top_k = 3;
    assert_int_equal(kept(l, EIGHT, sp), 0x2A);
    sp.top_k = 4;
    assert_int_equal(kept(l, EIGHT, sp), 0x6A);
    sp.top_k = EIGHT;
    assert_int_equal(kept(l, EIGHT, sp), 0xFF);
    sp.top_k = 1000000;
    assert_int_equal(kept(l, EIGHT, sp), 0xFF);

    sp = all;
    sp.top_p = 0;
    assert_int_equal(kept(l, EIGHT, sp), 0x02);
    sp.top_p = 0.39;
    assert_int_equal(kept(l, EIGHT, sp), 0x02);
    sp.top_p = 0.41; /* one more is needed; its equal stays too */
    assert_int_equal(kept(l, EIGHT, sp), 0x2A);
    sp.top_p = 0.79;
    assert_int_equal(kept(l, EIGHT, sp), 0x2A);
    sp.top_p = 0.81; /* 0.80 is not enough: the token that crosses is kept */
    assert_int_equal(kept(l, EIGHT, sp), 0x6A);
    sp.top_p = 0.96;
    assert_int_equal(kept(l, EIGHT, sp), 0xEF);

    sp = all;
    sp.min_p = 0.24; /* of 0.40: 0.096 */
    assert_int_equal(kept(l, EIGHT, sp), 0x6A);
    sp.min_p = 0.26;
    assert_int_equal(kept(l, EIGHT, sp), 0x2A);
    sp.min_p = 1;
    assert_int_equal(kept(l, EIGHT, sp), 0x02);
}

static void top_p_counts_what_top_k_left(void **state)
{
    (void)state;
    float l[EIGHT];
    const double p[EIGHT] = {0.30, 0.25, 0.15, 0.10, 0.08, 0.06, 0.04, 0.02};
    logits_of(p, EIGHT, l);
    aff_sampling sp = {.temperature = 1, .top_p = 0.75};
    assert_int_equal(kept(l, EIGHT, sp), 0x0F); /* 0.30 0.55 0.70 0.80 */
    sp.top_k = 3;                               /* renormalised over 0.70: 0.43 0.79 */
    assert_int_equal(kept(l, EIGHT, sp), 0x03);
    sp.min_p = 0.9; /* relative to the mode, whatever the other filters left */
    assert_int_equal(kept(l, EIGHT, sp), 0x01);
    sp = (aff_sampling){.temperature = 2, .top_p = 1, .min_p = 0.6}; /* sqrt: 1 .91 .71 .58 */
    assert_int_equal(kept(l, EIGHT, sp), 0x07);
}

static void equal_logits_all_stay(void **state)
{
    (void)state;
    const float l[EIGHT] = {3, 3, 3, 3, 3, 3, 3, 3};
    const aff_sampling cases[] = {{.temperature = 1, .top_p = 1},      {.temperature = 1, .top_p = 0},
                                  {.temperature = 1, .top_p = 0.5},    {.temperature = 1, .top_p = 1, .top_k = 1},
                                  {.temperature = 1e-300, .top_p = 1}, {.temperature = 1, .top_p = 1, .min_p = 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) assert_int_equal(kept(l, EIGHT, cases[i]), 0xFF);
}

/* The draw on a distribution small enough to walk by hand: weights 1 : 2 : 4 of 7, and the edges of u. */
static void draw_is_the_inverse_cdf(void **state)
{
    (void)state;
    const uint64_t w[] = {2, 9, 4, 3, 8}; /* keep 4: ids 1 2 4, total 21 */
    const aff_dist d = {.weight = w, .vocab = 5, .keep = 4, .total = 21};
    const uint64_t one = 1ull << 53;
    for (uint64_t r = 0; r < 21; r++) { /* smallest and largest u with floor(u * 21 / 2^53) = r */
        int32_t want = r < 9 ? 1 : r < 13 ? 2 : 4;
        uint64_t lo = (uint64_t)(((unsigned __int128)r * one + 20) / 21),
                 hi = (uint64_t)(((unsigned __int128)(r + 1) * one + 20) / 21) - 1;
        assert_int_equal(aff__dist_draw(&d, lo), want);
        assert_int_equal(aff__dist_draw(&d, hi), want);
    }
    assert_int_equal(aff__dist_draw(&d, one - 1), 4);
}

static void greedy_takes_the_lowest_of_equals(void **state)
{
    (void)state;
    aff_error err = {0};
    int32_t id;
    const float l[] = {-3, 7, 2, 7, 7, -INFINITY};
    const aff_sampling zero = {.top_p = 1}, below = {.temperature = -1, .top_p = 1, .seed = 9};
    assert_int_equal(next(l, 6, zero, 4, &id, &err), AFF_OK);
    assert_int_equal(id, 1);
    assert_int_equal(next(l, 6, below, 5, &id, &err), AFF_OK);
    assert_int_equal(id, 1);
    const float one[] = {-5}, low[] = {-INFINITY, -INFINITY, -3.4e38f};
    assert_int_equal(next(one, 1, zero, 0, &id, &err), AFF_OK);
    assert_int_equal(id, 0);
    assert_int_equal(next(low, 3, zero, 0, &id, &err), AFF_OK);
    assert_int_equal(id, 2);
}

static void extreme_floats_stay_sane(void **state)
{
    (void)state;
    aff_error err = {0};
    int32_t id;
    const float huge[] = {-3.4e38f, 3.4e38f, -INFINITY, 3.3e38f};
    const aff_sampling temps[] = {
        {.temperature = 1e-308, .top_p = 1}, {.temperature = 5e-324, .top_p = 1}, {.temperature = 1, .top_p = 1}};
    for (size_t t = 0; t < 3; t++)
        for (int64_t pos = 0; pos < 50; pos++) {
            assert_int_equal(next(huge, 4, temps[t], pos, &id, &err), AFF_OK);
            assert_int_equal(id, 1);
        }
    /* At a vast temperature everything but -inf is equally likely. */
    assert_int_equal(kept(huge, 4, (aff_sampling){.temperature = 1e300, .top_p = 1}), 0x0B);
}

static void bad_input_is_refused(void **state)
{
    (void)state;
    aff_error err = {0};
    int32_t id;
    const float nan[] = {1, NAN, 2}, inf[] = {1, 2, INFINITY}, none[] = {-INFINITY, -INFINITY, -INFINITY},
                good[] = {1, 2, 3};
    for (int hot = 0; hot < 2; hot++) {
        const aff_sampling sp = {.temperature = hot, .top_p = 1};
        assert_int_equal(next(nan, 3, sp, 0, &id, &err), AFF_E_INVALID);
        assert_non_null(strstr(err.msg, "token 1"));
        assert_int_equal(next(inf, 3, sp, 0, &id, &err), AFF_E_INVALID);
        assert_non_null(strstr(err.msg, "token 2"));
        assert_int_equal(next(none, 3, sp, 0, &id, &err), AFF_E_INVALID);
        assert_int_equal(id, -99);
    }
    const struct {
        aff_sampling sp;
        const char *names;
    } bad[] = {
        {{.temperature = NAN, .top_p = 1}, "temperature"},     {{.temperature = INFINITY, .top_p = 1}, "temperature"},
        {{.temperature = 1, .top_p = 1.01}, "top_p"},          {{.temperature = 1, .top_p = -0.1}, "top_p"},
        {{.temperature = 1, .top_p = NAN}, "top_p"},           {{.temperature = 1, .top_p = 1, .min_p = -1}, "min_p"},
        {{.temperature = 1, .top_p = 1, .min_p = 2}, "min_p"}, {{.temperature = 0, .top_p = 1, .top_k = -1}, "top_k"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(next(good, 3, bad[i].sp, 0, &id, &err), AFF_E_INVALID);
        assert_non_null(strstr(err.msg, bad[i].names));
    }
    aff_sampler *s;
    assert_int_equal(aff__sampler_create(&s, 0, &err), AFF_E_UNSUPPORTED);
    assert_int_equal(aff__sampler_create(&s, AFF_SAMPLER_MAX_VOCAB + 1, &err), AFF_E_UNSUPPORTED);
    assert_null(s);
}

/* 100,000 draws at positions 0.. of one seed: 99.9 % quantile of chi-square with 19 degrees of freedom is 43.82. */
static double chi_square(const double *p, int n, aff_sampling sp, int draws)
{
    float l[32];
    int count[32] = {0};
    double sum = 0, x = 0;
    aff_sampler *s;
    aff_error err = {0};
    logits_of(p, n, l);
    assert_int_equal(aff__sampler_create(&s, n, &err), AFF_OK);
    for (int64_t pos = 0; pos < draws; pos++) {
        int32_t id;
        assert_int_equal(aff__sampler_next(s, l, &sp, pos, &id, &err), AFF_OK);
        assert_in_range(id, 0, n - 1);
        count[id]++;
    }
    aff__sampler_free(s);
    for (int i = 0; i < n; i++) sum += p[i];
    for (int i = 0; i < n; i++) {
        double e = draws * p[i] / sum;
        x += (count[i] - e) * (count[i] - e) / e;
    }
    return x;
}

static void draws_follow_the_distribution(void **state)
{
    (void)state;
    double p[20];
    for (int i = 0; i < 20; i++) p[i] = 1 + i * 7 % 13;
    for (uint64_t seed = 0; seed < 3; seed++) {
        aff_sampling sp = {.temperature = 1, .top_p = 1, .seed = seed, .choice = (uint32_t)seed};
        double x = chi_square(p, 20, sp, 100000);
        assert_true(x < 43.82 && x > 4.0);
    }
    /* The test can fail: at temperature 0.8 the draws follow p^1.25. */
    aff_sampling hot = {.temperature = 0.8, .top_p = 1};
    assert_true(chi_square(p, 20, hot, 100000) > 200);
}

/* A choice is a function of the position alone: drawn backwards, or with another choice index in between, it is the
 * same. */
static void draws_depend_on_position_seed_and_choice_only(void **state)
{
    (void)state;
    enum { N = 200 };
    float l[16];
    int32_t first[N], id;
    int by_seed = 0, by_choice = 0;
    aff_error err = {0};
    for (int i = 0; i < 16; i++) l[i] = 0.1f * (float)(i * 5 % 16);
    aff_sampling sp = {.temperature = 1, .top_p = 1, .seed = 42}, seed = sp, choice = sp;
    seed.seed = 43;
    choice.choice = 1;
    for (int i = 0; i < N; i++) assert_int_equal(next(l, 16, sp, i, &first[i], &err), AFF_OK);
    for (int i = N - 1; i >= 0; i--) {
        assert_int_equal(next(l, 16, choice, i, &id, &err), AFF_OK);
        by_choice += id == first[i];
        assert_int_equal(next(l, 16, seed, i, &id, &err), AFF_OK);
        by_seed += id == first[i];
        assert_int_equal(next(l, 16, sp, i, &id, &err), AFF_OK);
        assert_int_equal(id, first[i]);
    }
    assert_in_range(by_seed, 1, 40); /* about one in 15 by chance */
    assert_in_range(by_choice, 1, 40);
}

static int by_weight(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Thresholds of the radix search against a sort, on a full-size vocabulary with many ties. */
static void thresholds_equal_a_sort(void **state)
{
    (void)state;
    enum { V = 129280 };
    aff_error err = {0};
    aff_sampler *s;
    aff_dist d;
    float *l = malloc(V * sizeof *l);
    uint64_t *w = malloc(V * sizeof *w), rng = 7;
    assert_int_equal(aff__sampler_create(&s, V, &err), AFF_OK);
    for (int v = 0; v < V; v++) l[v] = (float)(int)(aff__splitmix64(&rng) % 4000) / 200.0f;
    aff_sampling plain = {.temperature = 1, .top_p = 1};
    assert_int_equal(aff__sampler_filter(s, l, &plain, &d, &err), AFF_OK);
    memcpy(w, d.weight, V * sizeof *w);
    qsort(w, V, sizeof *w, by_weight);
    const int ks[] = {1, 2, 40, 1000, 129279};
    const double ps[] = {0.001, 0.5, 0.95, 0.999999};
    for (int i = 0; i < 5; i++) {
        aff_sampling sp = {.temperature = 1, .top_p = 1, .top_k = ks[i]};
        assert_int_equal(aff__sampler_filter(s, l, &sp, &d, &err), AFF_OK);
        assert_int_equal(d.keep, w[ks[i] - 1] ? w[ks[i] - 1] : 1);
        uint64_t left = d.total;
        for (int j = 0; j < 4; j++) {
            uint64_t sum = 0;
            int at = 0;
            while ((double)(sum += w[at]) < ps[j] * (double)left) at++;
            sp.top_p = ps[j];
            assert_int_equal(aff__sampler_filter(s, l, &sp, &d, &err), AFF_OK);
            assert_int_equal(d.keep, w[at]);
        }
    }
    aff__sampler_free(s);
    free(l);
    free(w);
}

static void top_logits_are_ordered(void **state)
{
    (void)state;
    aff_error err = {0};
    int32_t id[7];
    const float l[] = {1, 5, -2, 5, 9, 1, -INFINITY};
    static const int32_t want[] = {4, 1, 3, 0, 5, 2, 6};
    for (int k = 0; k <= 7; k++) {
        assert_int_equal(aff__top_logits(l, 7, k, id, &err), AFF_OK);
        for (int i = 0; i < k; i++) assert_int_equal(id[i], want[i]);
    }
    assert_int_equal(aff__top_logits(l, 7, 8, id, &err), AFF_E_INVALID);
    const float nan[] = {1, NAN};
    assert_int_equal(aff__top_logits(nan, 2, 1, id, &err), AFF_E_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(key_has_golden_values),
        cmocka_unit_test(weights_are_exp),
        cmocka_unit_test(filters_keep_the_right_tokens),
        cmocka_unit_test(top_p_counts_what_top_k_left),
        cmocka_unit_test(equal_logits_all_stay),
        cmocka_unit_test(draw_is_the_inverse_cdf),
        cmocka_unit_test(greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(extreme_floats_stay_sane),
        cmocka_unit_test(bad_input_is_refused),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(draws_depend_on_position_seed_and_choice_only),
        cmocka_unit_test(thresholds_equal_a_sort),
        cmocka_unit_test(top_logits_are_ordered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
