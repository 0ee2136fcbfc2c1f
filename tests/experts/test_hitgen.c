/* Routes by tier: shares, recall, distinct picks, the same at every call; layers that lack a tier. */
#include "experts/hitgen.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>

enum { L = 5, E = 40, K = 6, KEYS = 4000 };
static aff_error err;

/* Experts 0..9 on the card, 10..29 in memory, 30..39 on disk; layer 4 has none on the card. */
static uint8_t tier_of(int layer, int e) { return layer == 4 ? (e < 30 ? AFF_TIER_HOST : AFF_TIER_DISK) : e < 10 ? AFF_TIER_CARD : e < 30 ? AFF_TIER_HOST : AFF_TIER_DISK; }

static aff_hitgen *make(double card, double host, uint64_t seed)
{
    uint8_t tier[L * E];
    aff_hitgen *g;
    for (int i = 0; i < L * E; i++) tier[i] = tier_of(i / E, i % E);
    const aff_hitgen_options o = {.layers = L, .experts = E, .picks = K, .share = {card, host}, .tier = tier, .seed = seed};
    if (aff__hitgen_create(&g, &o, &err) != AFF_OK) fail_msg("%s", err.msg);
    return g;
}

static void distinct(const int32_t *v)
{
    for (int k = 0; k < K; k++) {
        assert_in_range(v[k], 0, E - 1);
        for (int i = 0; i < k; i++) assert_int_not_equal(v[i], v[k]);
    }
}

static void test_shares(void **state)
{
    aff_hitgen *g = make(0.7, 0.2, 3);
    int64_t n[L][AFF_TIERS] = {0}, of[E] = {0};
    for (int l = 0; l < L; l++)
        for (int key = 0; key < KEYS; key++) {
            int32_t v[K];
            aff__hitgen_pick(g, l, (uint64_t)key, v);
            distinct(v);
            for (int k = 0; k < K; k++) n[l][tier_of(l, v[k])]++, of[v[k]] += l == 0;
        }
    for (int l = 0; l < 4; l++) { /* 24,000 picks: five standard deviations are below 0.015 */
        assert_true(fabs((double)n[l][AFF_TIER_CARD] / (K * KEYS) - 0.7) < 0.015);
        assert_true(fabs((double)n[l][AFF_TIER_HOST] / (K * KEYS) - 0.2) < 0.015);
        assert_true(fabs((double)n[l][AFF_TIER_DISK] / (K * KEYS) - 0.1) < 0.015);
    }
    assert_int_equal(n[4][AFF_TIER_CARD], 0); /* its share went to the others */
    assert_int_equal(n[4][AFF_TIER_HOST] + n[4][AFF_TIER_DISK], K * KEYS);
    for (int e = 0; e < 10; e++) assert_true(fabs((double)of[e] / (0.7 * K * KEYS / 10) - 1) < 0.15); /* alike */
    aff__hitgen_free(g);
}

static void test_recall(void **state)
{
    static const double recalls[] = {0, 0.5, 0.9, 1};
    aff_hitgen *g = make(0.6, 0.4, 4);
    for (int i = 0; i < 4; i++) {
        int64_t right = 0, card = 0;
        for (int key = 0; key < KEYS; key++) {
            int32_t v[K], p[K];
            aff__hitgen_pick(g, 1, (uint64_t)key, v);
            aff__hitgen_predict(g, 1, (uint64_t)key, recalls[i], p);
            distinct(p);
            for (int k = 0; k < K; k++) {
                bool in = false;
                for (int j = 0; j < K; j++) in |= v[j] == p[k];
                right += in;
                card += !in && tier_of(1, p[k]) == AFF_TIER_CARD;
            }
        }
        assert_true(fabs((double)right / (K * KEYS) - recalls[i]) < 0.017);
        /* Wrong ones by tiers as picks are, less those that a card without enough experts beside the picks gives away. */
        const int64_t wrong = (int64_t)K * KEYS - right;
        if (i == 1) assert_true(fabs((double)card / (double)wrong - 0.6) < 0.05);
    }
    aff__hitgen_free(g);
}

static void test_tables(void **state)
{
    enum { ROWS = 50 };
    aff_hitgen *g = make(0.5, 0.5, 5), *other = make(0.5, 0.5, 6);
    static int32_t picks[L * ROWS * K], guess[L * ROWS * K], of_other[L * ROWS * K];
    assert_int_equal(aff__hitgen_tables(g, ROWS, 0.5, picks, guess, &err), AFF_OK);
    assert_int_equal(aff__hitgen_tables(other, ROWS, 0.5, of_other, NULL, &err), AFF_OK);
    for (int l = 0; l < L; l++)
        for (int key = 0; key < ROWS; key++) {
            int32_t v[K], p[K];
            aff__hitgen_pick(g, l, (uint64_t)key, v);
            aff__hitgen_predict(g, l, (uint64_t)key, 0.5, p);
            assert_memory_equal(v, picks + (l * ROWS + key) * K, sizeof v);
            assert_memory_equal(p, guess + (l * ROWS + key) * K, sizeof p);
        }
    assert_memory_not_equal(picks, of_other, sizeof picks);
    aff__hitgen_free(g);
    aff__hitgen_free(other);
}

static void test_refused(void **state)
{
    static const uint8_t tier[4] = {0, 1, 2, 0}, bad[4] = {0, 3, 0, 0};
    const aff_hitgen_options o[] = {{.layers = 1, .experts = 4, .picks = 5, .tier = tier},
                                    {.layers = 1, .experts = 4, .picks = 2, .tier = bad},
                                    {.layers = 1, .experts = 4, .picks = 2, .tier = tier, .share = {0.8, 0.4}},
                                    {.layers = 1, .experts = 4, .picks = 2, .tier = tier, .share = {-1}},
                                    {.layers = 0, .experts = 4, .picks = 2, .tier = tier}};
    for (size_t i = 0; i < sizeof o / sizeof *o; i++) {
        aff_hitgen *g;
        assert_int_equal(aff__hitgen_create(&g, &o[i], &err), AFF_E_INVALID);
        assert_null(g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shares), cmocka_unit_test(test_recall), cmocka_unit_test(test_tables), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
