/* The small number formats against what ml_dtypes says of them: tests/golden/numbers.bin, made by
 * tests/oracle/make_numbers.py. */
#include "support/test.h"
#include "base/file.h"
#include "quant/numbers.h"
#include <math.h>
#include <stdlib.h>

typedef struct golden {
    float e4m3[256], e8m0[256], e2m1[16], bf16[256], mid[16];
    uint8_t mid_code[16];
    float in8[512];
    uint8_t out8[512];
    float in16[512];
    uint16_t out16[512];
} golden;

static golden *g;

static int set_up(void **state)
{
    (void)state;
    char *data;
    size_t n;
    aff_error err = {0};
    if (aff__read_file(AFF_TESTS_DIR "/golden/numbers.bin", 1 << 20, &data, &n, &err) != AFF_OK) return -1;
    g = (golden *)(void *)data;
    return n == sizeof *g ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    free(g);
    return 0;
}

static void same(float got, float want, int code)
{
    if (isnan(want) ? !isnan(got) : aff__f32_bits(got) != aff__f32_bits(want))
        fail_msg("code %d: expected %a, got %a", code, (double)want, (double)got);
}

static void every_code(void **state)
{
    (void)state;
    for (int b = 0; b < 256; b++) {
        same(aff__e4m3_to_f32((uint8_t)b), g->e4m3[b], b);
        same(aff__e8m0_to_f32((uint8_t)b), g->e8m0[b], b);
        same(aff__bf16_to_f32((uint16_t)(b * 257)), g->bf16[b], b);
    }
    for (int b = 0; b < 16; b++) same(aff__e2m1_table[b], g->e2m1[b], b);
}

static void midpoints_tie_to_even(void **state)
{
    (void)state;
    for (int i = 0; i < 16; i++) {
        assert_int_equal(aff__f32_to_e2m1(g->mid[i]), g->mid_code[i]);
        if (fabsf(g->mid[i]) < 5.25f) assert_int_equal(g->mid_code[i] & 1, 0);
    }
}

static void rounding(void **state)
{
    (void)state;
    for (int i = 0; i < 512; i++) {
        assert_int_equal(aff__f32_to_e4m3(g->in8[i]), g->out8[i]);
        assert_int_equal(aff__f32_to_bf16(g->in16[i]), g->out16[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code),
        cmocka_unit_test(midpoints_tie_to_even),
        cmocka_unit_test(rounding),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
