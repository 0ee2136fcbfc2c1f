/* Made-up routes: distinct, a function of position, with the skew and the locality that were asked for. */
#include "experts/routegen.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { E = 256, K = 6, N = 20000 };
static aff_error err;

static aff_routegen *make(double skew, double locality, uint64_t seed)
{
    aff_routegen *g;
    if (aff__routegen_create(&g, &(aff_routegen_options){3, E, K, skew, locality, seed}, &err) != AFF_OK)
        fail_msg("%s", err.msg);
    return g;
}

static int by_count(const void *a, const void *b)
{
    return *(const int *)b - *(const int *)a;
}

/* Counts of layer 1, largest first; returns the mean share of a token's experts that the one before had. */
static double measure(const aff_routegen *g, int count[E])
{
    int32_t old[K], now[K];
    int64_t kept = 0;
    memset(count, 0, E * sizeof *count);
    for (int p = 0; p < N; p++) {
        aff__routegen_pick(g, 1, p, now);
        for (int i = 0; i < K; i++) {
            assert_in_range(now[i], 0, E - 1);
            for (int k = 0; k < i; k++) assert_int_not_equal(now[k], now[i]);
            count[now[i]]++;
            for (int k = 0; p && k < K; k++) kept += old[k] == now[i];
        }
        memcpy(old, now, sizeof old);
    }
    qsort(count, E, sizeof *count, by_count);
    return (double)kept / ((double)(N - 1) * K);
}

static void test_properties(void **state)
{
    int count[E];
    /* Uniform: every expert close to N*K/E = 468.75 (6 sigma), neighbours share K/E of their choices. */
    aff_routegen *g = make(0, 0, 7);
    assert_true(fabs(measure(g, count) - (double)K / E) < 0.005);
    assert_true(count[0] < 469 + 130 && count[E - 1] > 469 - 130);
    aff__routegen_free(g);
    /* Skew: the ten most popular have about half; repeated draws for taken experts flatten that a little. */
    g = make(1, 0, 7);
    measure(g, count);
    double ten = 0, want = 0, all = 0;
    for (int i = 0; i < 10; i++) ten += count[i];
    for (int i = 0; i < E; i++) all += 1.0 / (i + 1);
    for (int i = 0; i < 10; i++) want += 1.0 / (i + 1) / all;
    assert_true(fabs(want - 0.4785) < 0.001); /* the header's "about half" */
    assert_true(ten / ((double)N * K) > want - 0.08 && ten / ((double)N * K) < want + 0.02);
    aff__routegen_free(g);
    /* Locality: at least that share is kept. */
    static const double local[] = {0.5, 0.9, 0.99};
    for (int i = 0; i < 3; i++) {
        g = make(0, local[i], 7);
        const double kept = measure(g, count);
        assert_true(fabs(kept - (local[i] + (1 - local[i]) * K / E)) < 0.015);
        aff__routegen_free(g);
    }
}

static void test_function_of_position(void **state)
{
    aff_routegen *a = make(0.8, 0.7, 1), *b = make(0.8, 0.7, 1), *c = make(0.8, 0.7, 2);
    int32_t x[K], y[K], z[K], w[K];
    int other_seed = 0, other_layer = 0;
    for (int64_t p = 5000; p >= 0; p -= 7) {
        aff__routegen_pick(a, 0, p, x);
        aff__routegen_pick(b, 0, 5000 - p, y);
        aff__routegen_pick(b, 0, p, y);
        assert_memory_equal(x, y, sizeof x);
        aff__routegen_pick(c, 0, p, z);
        aff__routegen_pick(a, 2, p, w);
        other_seed += memcmp(x, z, sizeof x) != 0;
        other_layer += memcmp(x, w, sizeof x) != 0;
    }
    assert_true(other_seed > 700 && other_layer > 700);
    aff__routegen_free(a);
    aff__routegen_free(b);
    aff__routegen_free(c);
}

static void test_edges(void **state)
{
    aff_routegen *g;
    int32_t all[4];
    static const aff_routegen_options bad[] = {{0, 4, 4, 0, 0, 0},  {1, 4, 5, 0, 0, 0},   {1, 4, 0, 0, 0, 0},
                                               {1, 4, 4, -1, 0, 0}, {1, 4, 4, NAN, 0, 0}, {1, 4, 4, 0, 1, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(aff__routegen_create(&g, &bad[i], &err), AFF_E_INVALID);
    assert_int_equal(aff__routegen_create(&g, &(aff_routegen_options){1, 4, 4, 10, 0.999, 3}, &err), AFF_OK);
    aff__routegen_pick(g, 0, 1 << 20, all); /* all there are, whatever the skew */
    int seen = 0;
    for (int i = 0; i < 4; i++) seen |= 1 << all[i];
    assert_int_equal(seen, 15);
    aff__routegen_free(g);
    aff__routegen_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_properties), cmocka_unit_test(test_function_of_position),
                                       cmocka_unit_test(test_edges)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
