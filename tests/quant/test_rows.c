/* quant/rows: sizes of the spec, and rows that have been through their quantiser come back bit for bit. */
#include "quant/rows.h"
#include "base/rng.h"
#include "quant/numbers.h"
#include "support/test.h"
#include <math.h>

static void test_sizes(void **state)
{
    /* Spec 10.2: 448 E4M3 + 7 E8M0 + 1 pad + 64 bf16 = 584. */
    aff_rowfmt f = aff__rowfmt_kv(AFF_FAST, 512, 64);
    assert_int_equal(f.bytes, 584);
    assert_int_equal(f.coded, 448);
    assert_int_equal(aff__rowfmt_kv(AFF_SIM, 512, 64).bytes, 448 + 8 + 256);
    assert_int_equal(aff__rowfmt_kv(AFF_MATH, 512, 64).bytes, 2048);
    assert_int_equal(aff__rowfmt_key(AFF_FAST, 128).bytes, 68);
    assert_int_equal(aff__rowfmt_key(AFF_SIM, 128).bytes, 68);
    assert_int_equal(aff__rowfmt_key(AFF_MATH, 128).bytes, 512);
    /* No whole group: only the tail is smaller. */
    assert_int_equal(aff__rowfmt_kv(AFF_FAST, 64, 16).bytes, 48 * 4 + 16 * 2);
    assert_int_equal(aff__rowfmt_kv(AFF_SIM, 64, 16).bytes, 256);
    /* A group, ten values of no group, a tail that needs padding. */
    f = aff__rowfmt_kv(AFF_FAST, 80, 6);
    assert_int_equal(f.bytes, 64 + 4 + 10 * 4 + 12);
    assert_int_equal(f.bytes % 4, 0);
}

static uint64_t seed = 77;
static uint32_t random_bits(void)
{
    return (uint32_t)(aff__splitmix64(&seed) >> 32);
}

/* Values of all magnitudes; wild: any bit pattern. */
static float some_value(int spread, bool wild)
{
    if (wild) return aff__bits_f32(random_bits());
    const float u = (float)(int32_t)random_bits() * 0x1p-31f;
    return ldexpf(u, (int)(random_bits() % (unsigned)(2 * spread + 1)) - spread);
}

static void same_value(float got, float want, const char *what, int i)
{
    if (want != want ? got == got : aff__f32_bits(got) != aff__f32_bits(want))
        fail_msg("%s: value %d is %a, expected %a", what, i, (double)got, (double)want);
}

static void round_trip(const aff_rowfmt *f, const float *x, const char *what)
{
    uint8_t row[4200];
    float y[1024];
    memset(row, 0xa5, sizeof row);
    aff__row_encode(f, x, row);
    aff__row_decode(f, row, y);
    for (int i = 0; i < f->n; i++) {
        const int g = i < f->coded ? i / f->group * f->group : f->n;
        bool infinite =
            false; /* rounded up past the largest float: the codes have no infinity, the group becomes NaN */
        for (int j = g; j < g + f->group && i < f->coded; j++) infinite |= isinf(x[j]) != 0;
        same_value(y[i], infinite ? NAN : x[i], what, i);
    }
    for (int i = f->bytes; i < f->bytes + 8; i++) assert_int_equal(row[i], 0xa5);
}

static void test_kv_rows(void **state)
{
    static const int shape[][2] = {{512, 64}, {64, 16}, {80, 6}, {192, 64}, {130, 2}};
    for (int round = 0; round < 2000; round++) {
        const int n = shape[round % 5][0], rope = shape[round % 5][1];
        float x[512];
        for (int m = 0; m < 3; m++) {
            const aff_rowfmt f = aff__rowfmt_kv((aff_numerics[]){AFF_MATH, AFF_SIM, AFF_FAST}[m], n, rope);
            const int spread = round / 5 % 140;
            for (int i = 0; i < n; i++) x[i] = some_value(spread, round % 97 == 0);
            if (m) aff__a8(x, (n - rope) / 64 * 64, 64);
            for (int i = n - rope; m == 2 && i < n; i++) x[i] = aff__round_bf16(x[i]);
            round_trip(&f, x, "kv row");
        }
    }
}

static void test_keys(void **state)
{
    static const int width[] = {128, 32, 64, 1024};
    for (int round = 0; round < 2000; round++) {
        const int n = width[round % 4], spread = round / 4 % 140;
        float x[1024];
        for (int m = 0; m < 3; m++) {
            const aff_rowfmt f = aff__rowfmt_key((aff_numerics[]){AFF_MATH, AFF_SIM, AFF_FAST}[m], n);
            for (int i = 0; i < n; i++) x[i] = some_value(spread, round % 97 == 0);
            if (m && round % 3) aff__hadamard(x, n); /* and A4 on its own, on uneven groups */
            if (m) aff__a4(x, n);
            round_trip(&f, x, "indexer key");
        }
    }
}

/* Every scale with every largest code, when the other values span the whole grid below it: the scale found again may be
 * another one, the values must not. */
static void test_every_scale(void **state)
{
    const aff_rowfmt f = aff__rowfmt_kv(AFF_SIM, 128, 64), k = aff__rowfmt_key(AFF_SIM, 32);
    for (int e = -22; e <= 119; e++) {
        for (int top = 0; top < 127; top++) {
            float x[128] = {0};
            for (int i = 0; i < 64; i++)
                x[i] = ldexpf(aff__e4m3_to_f32((uint8_t)(i % 2 << 7 | (top - i > 0 ? top - i : 0))), e);
            x[63] = ldexpf(aff__e4m3_to_f32((uint8_t)(top % 3)), e); /* something at the far end of the grid */
            if (x[63] > x[0]) x[63] = x[0];
            round_trip(&f, x, "kv row of one scale");
        }
    }
    for (int e = -126; e <= 124; e++)
        for (int top = 0; top < 8; top++) {
            float x[32];
            for (int i = 0; i < 32; i++)
                x[i] = ldexpf(aff__e2m1_table[i % 2 << 3 | (i / 2 <= top ? top - i / 2 : 0)], e);
            round_trip(&k, x, "key of one scale");
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes), cmocka_unit_test(test_kv_rows),
                                       cmocka_unit_test(test_keys), cmocka_unit_test(test_every_scale)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
