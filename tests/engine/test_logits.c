/* engine/logits: penalties, bias and log-probabilities against values worked out by hand. */
#include "support/test.h"
#include "engine/logits.h"
#include <math.h>

static void penalties_by_hand(void **state)
{
    /* Tokens: 0 never, 1 in the prompt, 2 twice in the output, 3 once in both, 4 negative and in the prompt, 5 -inf in the output. */
    const float l[6] = {1, 2, 3, 4, -1, -INFINITY};
    int32_t all[6] = {0, 1, 2, 2, 3, 1}, output[6] = {0, 0, 2, 1, 0, 1};
    const aff_occurrences o = {all, output};
    float out[6];
    aff__adjust_logits(&(aff_adjust){.repetition = 2}, &o, l, 6, out);
    const float repetition[6] = {1, 1, 1.5f, 2, -2, -INFINITY};
    assert_memory_equal(out, repetition, sizeof out);
    aff__adjust_logits(&(aff_adjust){.frequency = 0.5}, &o, l, 6, out);
    const float frequency[6] = {1, 2, 2, 3.5f, -1, -INFINITY};
    assert_memory_equal(out, frequency, sizeof out);
    aff__adjust_logits(&(aff_adjust){.presence = 0.5}, &o, l, 6, out);
    const float presence[6] = {1, 2, 2.5f, 3.5f, -1, -INFINITY};
    assert_memory_equal(out, presence, sizeof out);
    /* Bias comes first (the repetition penalty sees it, and the sign it gives), twice the same id adds up. */
    const aff_bias bias[] = {{4, 2}, {1, -1}, {1, -3}, {0, 0.25f}};
    aff__adjust_logits(&(aff_adjust){.repetition = 2, .presence = 1, .frequency = 0.25, .bias = bias, .n_bias = 4}, &o, l, 6, out);
    const float both[6] = {1.25f, -4, 0, 0.75f, 0.5f, -INFINITY};
    assert_memory_equal(out, both, sizeof out);
    /* Off is off to the bit, and reads no counts. */
    assert_true(aff__adjust_off(&(aff_adjust){0}));
    assert_true(aff__adjust_off(&(aff_adjust){.repetition = 1}));
    assert_false(aff__adjust_off(&(aff_adjust){.presence = -0.1}));
    aff__adjust_logits(&(aff_adjust){.repetition = 1}, NULL, l, 6, out);
    assert_memory_equal(out, l, sizeof out);
    /* NaN is not hidden. */
    const float bad[6] = {1, 2, NAN, 0, 0, 0};
    aff__adjust_logits(&(aff_adjust){.repetition = 2, .presence = 1}, &o, bad, 6, out);
    assert_true(isnan(out[2]));
}

static void ranges(void **state)
{
    aff_error err = {0};
    const aff_adjust bad[] = {{.repetition = -1}, {.repetition = NAN}, {.repetition = 101}, {.presence = NAN}, {.presence = 101}, {.frequency = -101}, {.frequency = NAN}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_int_equal(aff__adjust_check(&bad[i], 10, &err), AFF_E_INVALID);
    const aff_bias out_of_vocab = {10, 1}, infinite = {3, INFINITY}, fine = {9, -1e6f};
    assert_int_equal(aff__adjust_check(&(aff_adjust){.bias = &out_of_vocab, .n_bias = 1}, 10, &err), AFF_E_INVALID);
    assert_string_equal(err.msg, "logit bias: entry 1: expected an id of 0 to 9, got 10");
    assert_int_equal(aff__adjust_check(&(aff_adjust){.bias = &infinite, .n_bias = 1}, 10, &err), AFF_E_INVALID);
    assert_int_equal(aff__adjust_check(&(aff_adjust){.bias = &fine, .n_bias = 1, .repetition = 1.1, .presence = -2, .frequency = 2}, 10, &err), AFF_OK);
}

static void log_probabilities(void **state)
{
    const float l[4] = {0, 0.69314718f, 1.38629436f, -INFINITY}; /* 1 : 2 : 4 : 0 */
    const int32_t id[] = {2, 0, 1, 3};
    float lp[4];
    aff__logprobs(l, 4, id, 4, lp);
    assert_true(fabsf(lp[0] - logf(4.0f / 7)) < 1e-6f);
    assert_true(fabsf(lp[1] - logf(1.0f / 7)) < 1e-6f);
    assert_true(fabsf(lp[2] - logf(2.0f / 7)) < 1e-6f);
    assert_true(isinf(lp[3]) && lp[3] < 0);
    const float large[2] = {3e38f, 3e38f}; /* no overflow on the way */
    aff__logprobs(large, 2, id + 1, 1, lp);
    assert_true(isfinite(lp[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(penalties_by_hand), cmocka_unit_test(ranges), cmocka_unit_test(log_probabilities)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
