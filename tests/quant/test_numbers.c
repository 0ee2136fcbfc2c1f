/* numbers: every code of the small formats against their definition, rounding against a search over all codes, and the
 * activation quantisers against results of the model's own code. */
#include "support/test.h"
#include "support/golden.h"
#include "base/rng.h"
#include "quant/numbers.h"
#include <math.h>
#include <stdlib.h>

static double e4m3_by_definition(int b)
{
    int e = b >> 3 & 15, m = b & 7;
    double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return b & 0x80 ? -v : v;
}

static void e4m3_bytes(void **state)
{
    (void)state;
    for (int b = 0; b < 256; b++) {
        float v = aff__e4m3_to_f32((uint8_t)b);
        if ((b & 0x7f) == 0x7f) {
            assert_true(isnan(v));
            assert_int_equal(aff__f32_to_e4m3(v), 0x7f);
            continue;
        }
        assert_true((double)v == e4m3_by_definition(b));
        assert_int_equal(signbit(v) != 0, b >> 7);
        assert_int_equal(aff__f32_to_e4m3(v), b);
    }
    assert_true(aff__e4m3_to_f32(0x38) == 1.0f);
    assert_true(aff__e4m3_to_f32(0x7e) == 448.0f);
    assert_true(aff__e4m3_to_f32(0x01) == 0.001953125f);
    assert_true(aff__e4m3_to_f32(0x3b) == 1.375f);
}

/* Nearest code below 0x7f by search over all of them; a tie goes to the even mantissa. */
static int nearest_e4m3(double a)
{
    int best = 0;
    for (int b = 1; b < 0x7f; b++) {
        double d = fabs(e4m3_by_definition(b) - a), e = fabs(e4m3_by_definition(best) - a);
        if (d < e || (d == e && b % 2 == 0)) best = b;
    }
    return best;
}

static void check_e4m3(float f)
{
    int want = nearest_e4m3(fabs((double)f)) | (signbit(f) ? 0x80 : 0);
    if (aff__f32_to_e4m3(f) != want)
        fail_msg("e4m3(%a): expected %02x, got %02x", (double)f, (unsigned)want, aff__f32_to_e4m3(f));
}

static void e4m3_rounding(void **state)
{
    (void)state;
    /* Both sides of every boundary between codes, and the boundary itself. */
    for (int b = 0; b < 0x7e; b++) {
        float mid = (float)((e4m3_by_definition(b) + e4m3_by_definition(b + 1)) / 2);
        for (int s = 0; s < 2; s++) {
            float m = s ? -mid : mid;
            check_e4m3(m);
            check_e4m3(nextafterf(m, INFINITY));
            check_e4m3(nextafterf(m, -INFINITY));
        }
    }
    /* Every float whose low 9 bits are zero covers the rest: no boundary needs more than 5 bits of mantissa. */
    for (uint32_t u = 0; u < 0x7f800000u; u += 1u << 14) {
        check_e4m3(aff__bits_f32(u));
        check_e4m3(aff__bits_f32(u | 1u));
    }
    assert_int_equal(aff__f32_to_e4m3(449.0f), 0x7e);
    assert_int_equal(aff__f32_to_e4m3(1e30f), 0x7e);
    assert_int_equal(aff__f32_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(aff__f32_to_e4m3(0x1p-10f), 0x00);
    assert_int_equal(aff__f32_to_e4m3(-0x1p-149f), 0x80);
}

static void e2m1_codes(void **state)
{
    (void)state;
    static const float val[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int c = 0; c < 16; c++) {
        assert_true(aff__e2m1_table[c] == (c & 8 ? -val[c & 7] : val[c & 7]));
        assert_int_equal(aff__f32_to_e2m1(aff__e2m1_table[c]), c);
    }
    static const float tie[7][2] = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5, 4}};
    for (int i = 0; i < 7; i++) {
        assert_true(aff__e2m1_table[aff__f32_to_e2m1(tie[i][0])] == tie[i][1]);
        assert_true(aff__e2m1_table[aff__f32_to_e2m1(-tie[i][0])] == -tie[i][1]);
    }
    for (uint32_t u = 0; u < 0x4a000000u; u += 1u << 10) {
        float a = aff__bits_f32(u | 1u); /* never a tie, and small enough for exact differences */
        int best = 0;
        for (int c = 1; c < 8; c++)
            if (fabs((double)val[c] - (double)a) < fabs((double)val[best] - (double)a)) best = c;
        assert_int_equal(aff__f32_to_e2m1(a), best);
        assert_int_equal(aff__f32_to_e2m1(-a), best | 8);
    }
    assert_int_equal(aff__f32_to_e2m1(INFINITY), 7);
}

static void bf16_and_e8m0(void **state)
{
    (void)state;
    assert_int_equal(aff__f32_to_bf16(1.0f), 0x3f80);
    assert_int_equal(aff__f32_to_bf16(aff__bits_f32(0x3f808000u)), 0x3f80); /* tie, even below */
    assert_int_equal(aff__f32_to_bf16(aff__bits_f32(0x3f818000u)), 0x3f82); /* tie, even above */
    assert_int_equal(aff__f32_to_bf16(aff__bits_f32(0x3f808001u)), 0x3f81);
    assert_int_equal(aff__f32_to_bf16(aff__bits_f32(0x7f7fffffu)), 0x7f80);
    assert_true(isnan(aff__bf16_to_f32(aff__f32_to_bf16(aff__bits_f32(0x7f800001u)))));
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = aff__bf16_to_f32((uint16_t)h);
        if (!isnan(f)) assert_int_equal(aff__f32_to_bf16(f), h);
    }
    for (int b = 0; b < 255; b++) assert_true((double)aff__e8m0_to_f32((uint8_t)b) == ldexp(1.0, b - 127));
    assert_true(isnan(aff__e8m0_to_f32(255)));
}

static void pow2_scale(void **state)
{
    (void)state;
    assert_true(aff__pow2_scale(448.0f, 1.0f) == 512.0f);
    assert_true(aff__pow2_scale(512.0f, 1.0f) == 512.0f);
    assert_true(aff__pow2_scale(1e-4f, 1.0f / 448.0f) == 0x1p-22f);
    assert_true(aff__pow2_scale(6.0f * 0x1p-126f, 1.0f / 6.0f) == 0x1p-126f);
    /* The smallest power of two at or above y; one ulp above a power of two is where ceil(log2f) goes wrong. */
    uint64_t rng = 7;
    for (int i = 0; i < 200000; i++) {
        uint64_t r = aff__splitmix64(&rng);
        uint32_t mant = i % 3 == 0 ? (uint32_t)(r % 3) : (uint32_t)(r & 0x7fffffu);
        float y = aff__bits_f32(((uint32_t)(r >> 32) % 200u + 20u) << 23 | mant);
        float s = aff__pow2_scale(y, 1.0f);
        int e;
        assert_true(frexpf(s, &e) == 0.5f);
        assert_true(s >= y && s / 2 < y);
    }
}

static float *golden_copy(const aff_ckpt *g, const char *name, size_t count)
{
    size_t n;
    const float *x = golden_f32(g, name, &n);
    assert_int_equal(n, count);
    float *copy = malloc(n * sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, x, n * sizeof *copy);
    return copy;
}

static void quantisers_match_the_reference(void **state)
{
    (void)state;
    aff_ckpt *g = golden_open("v4-sim/golden.safetensors");
    float *in = golden_copy(g, "ops.a8_64_in", 16 * 448), *out = golden_copy(g, "ops.a8_64_out", 16 * 448);
    for (int r = 0; r < 16; r++) aff__a8(in + r * 448, 448, 64);
    assert_memory_equal(in, out, 16 * 448 * 4);
    free(in), free(out);

    in = golden_copy(g, "ops.a4_in", 16 * 128), out = golden_copy(g, "ops.a4_out", 16 * 128);
    for (int r = 0; r < 16; r++) aff__a4(in + r * 128, 128);
    assert_memory_equal(in, out, 16 * 128 * 4);
    free(in), free(out);

    in = golden_copy(g, "ops.had_in", 16 * 128), out = golden_copy(g, "ops.had_out", 16 * 128);
    int64_t worst = 0;
    for (int r = 0; r < 16; r++) aff__hadamard(in + r * 128, 128);
    for (int i = 0; i < 16 * 128; i++) {
        int64_t d = llabs((int64_t)(int32_t)aff__f32_bits(in[i]) - (int32_t)aff__f32_bits(out[i]));
        worst = d > worst ? d : worst;
    }
    print_message("hadamard: worst difference %lld ulp\n", (long long)worst);
    assert_true(worst <= 1);
    free(in), free(out);
    aff__ckpt_close(g);
}

static void hadamard_is_its_own_inverse(void **state)
{
    (void)state;
    /* Row k of H has entries +-1/sqrt(n) with sign (-1)^popcount(k & j). */
    float x[16] = {0};
    x[5] = 4.0f;
    aff__hadamard(x, 16);
    for (int j = 0; j < 16; j++) assert_true(x[j] == (__builtin_popcount(5u & (unsigned)j) & 1 ? -1.0f : 1.0f));
    aff__hadamard(x, 16);
    for (int j = 0; j < 16; j++) assert_true(x[j] == (j == 5 ? 4.0f : 0.0f));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_bytes),
        cmocka_unit_test(e4m3_rounding),
        cmocka_unit_test(e2m1_codes),
        cmocka_unit_test(bf16_and_e8m0),
        cmocka_unit_test(pow2_scale),
        cmocka_unit_test(quantisers_match_the_reference),
        cmocka_unit_test(hadamard_is_its_own_inverse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
