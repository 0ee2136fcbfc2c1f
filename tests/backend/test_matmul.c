/* Dense products: against double precision, and bit for bit over instruction sets, rows in a call, threads and strides.
 */
#include "support/test.h"
#include "backend/kernel_random.h"
#include "backend/cpu/inner.h"
#include "backend/cpu/kernels.h"
#include "base/mem.h"
#include "quant/numbers.h"

/* Weights of any dtype with the values they stand for. */
typedef struct matrix {
    aff_weight w;
    double *value; /* [rows][cols] */
} matrix;

static matrix random_matrix(aff_dtype dtype, int rows, int cols, bool wild, uint64_t *seed)
{
    int64_t n = (int64_t)rows * cols;
    matrix m = {.w = {.dtype = dtype, .rows = rows, .cols = cols}, .value = malloc((size_t)n * sizeof(double))};
    assert_non_null(m.value);
    if (dtype == AFF_F32) {
        float *x = floats(n, wild, seed);
        for (int64_t i = 0; i < n; i++) m.value[i] = (double)x[i];
        m.w.data = x;
    } else if (dtype == AFF_BF16) {
        float *x = floats(n, wild, seed);
        uint16_t *h = (uint16_t *)bytes(2 * n, seed);
        for (int64_t i = 0; i < n; i++) h[i] = aff__f32_to_bf16(x[i]), m.value[i] = (double)aff__bf16_to_f32(h[i]);
        free(x);
        m.w.data = h;
    } else {
        int tile = dtype == AFF_FP8 ? 128 : 32, across = (cols + tile - 1) / tile;
        uint8_t *b = bytes(n, seed), *s = bytes((int64_t)((rows + tile - 1) / tile) * across, seed);
        for (int64_t i = 0; i < (int64_t)((rows + tile - 1) / tile) * across; i++)
            s[i] = (uint8_t)(wild ? s[i] % 255 : 112 + s[i] % 16);
        for (int64_t i = 0; i < n; i++) {
            if ((b[i] & 127) == 127) b[i] ^= 1;
            int r = (int)(i / cols), c = (int)(i % cols);
            m.value[i] = (double)aff__e4m3_table[b[i]] * ldexp(1.0, s[r / tile * across + c / tile] - 127);
        }
        m.w.data = b, m.w.scale = s;
    }
    return m;
}

static void free_matrix(matrix *m)
{
    free((void *)(uintptr_t)m->w.data);
    free((void *)(uintptr_t)m->w.scale);
    free(m->value);
}

static const aff_dtype dtypes[] = {AFF_F32, AFF_BF16, AFF_FP8, AFF_FP8_32};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

/* |y - W x| <= 2^-24 * (cols/16 + 8) * sum |w||x|, the bound of the defined chain. */
static void assert_close(const matrix *m, const float *x, int64_t ldx, int T, bool rounded, const float *y, int64_t ldy)
{
    for (int t = 0; t < T; t++)
        for (int r = 0; r < m->w.rows; r++) {
            double sum = 0, mag = 0;
            for (int k = 0; k < m->w.cols; k++) {
                float v = rounded ? aff__round_bf16(x[t * ldx + k]) : x[t * ldx + k];
                double p = m->value[(int64_t)r * m->w.cols + k] * (double)v;
                sum += p, mag += fabs(p);
            }
            double bound = ldexp(mag * (m->w.cols / 16 + 8), -24);
            if (!(fabs((double)y[t * ldy + r] - sum) <= bound))
                fail_msg("dtype %d, row %d of %d, cols %d: %.9g, expected %.9g +- %.3g", (int)m->w.dtype, r, m->w.rows,
                         m->w.cols, (double)y[t * ldy + r], sum, bound);
        }
}

static void products_agree_with_double_precision(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int d = 0; d < DTYPES; d++)
        for (int round = 0; round < 6; round++) {
            int rows = draw_int(&seed, 1, 300), cols = draw_int(&seed, 1, 700), T = draw_int(&seed, 1, 19);
            matrix m = random_matrix(dtypes[d], rows, cols, false, &seed);
            int64_t ldx = cols + draw_int(&seed, 0, 9), ldy = rows + draw_int(&seed, 0, 9);
            float *x = floats(T * ldx, false, &seed), *y = floats(T * ldy, false, &seed);
            EACH_LEVEL(l)
            {
                aff__cpu_matmul(NULL, &m.w, AFF_MATH, x, ldx, T, y, ldy);
                assert_close(&m, x, ldx, T, false, y, ldy);
                aff__cpu_matmul(NULL, &m.w, AFF_FAST, x, ldx, T, y, ldy);
                assert_close(&m, x, ldx, T, true, y, ldy);
                m.w.wide = true;
                aff__cpu_matmul(NULL, &m.w, AFF_FAST, x, ldx, T, y, ldy);
                assert_close(&m, x, ldx, T, false, y, ldy);
                m.w.wide = false;
            }
            free(x), free(y), free_matrix(&m);
        }
}

/* Chains, cuts and tree as kernels.h words them, written down once more. */
static float defined_product(const aff_weight *w, int r, const float *x)
{
    float lane[16] = {0};
    int tile = w->dtype == AFF_FP8 ? 128 : w->dtype == AFF_FP8_32 ? 32 : 0;
    for (int i = 0; i < 16; i++) {
        float chain = 0;
        for (int k = i; k < w->cols; k += 16) {
            int64_t at = (int64_t)r * w->cols + k;
            float v = tile                  ? aff__e4m3_table[((const uint8_t *)w->data)[at]]
                      : w->dtype == AFF_F32 ? ((const float *)w->data)[at]
                                            : aff__bf16_to_f32(((const uint16_t *)w->data)[at]);
            chain = fmaf(v, x[k], chain);
            if (tile && (k + 16 >= w->cols || (k + 16) / tile != k / tile)) {
                int across = (w->cols + tile - 1) / tile;
                lane[i] = fmaf(chain, aff__e8m0_to_f32(w->scale[r / tile * across + k / tile]), lane[i]);
                chain = 0;
            }
        }
        if (!tile) lane[i] = chain;
    }
    for (int i = 0; i < 8; i++) lane[i] += lane[i + 8];
    for (int i = 0; i < 4; i++) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

/* One step of a lane as the instruction is documented: two fused steps, the odd product first, subnormals in and out as zeros. */
static float step(float acc, float w, float x)
{
    if (fabsf(w) < 0x1p-126f) w = copysignf(0, w);
    if (fabsf(x) < 0x1p-126f) x = copysignf(0, x);
    const double exact = fma((double)w, (double)x, (double)acc); /* 53 bits, or an infinity or NaN */
    float r = fmaf(w, x, acc);
    /* Rounded to 24 bits as if exponents had no end: below 2^-126 by half a bit of 24 or more. */
    if (fabs(exact) < 0x1p-126 * (1 - 0x1p-25)) r = copysignf(0, (float)exact);
    return r == 0 ? copysignf(0, fmaf(w, x, acc)) : r;
}

static float defined_pairs(const aff_weight *w, int r, const float *x)
{
    float lane[16] = {0};
    const int tile = w->dtype == AFF_FP8 ? 128 : 32, across = (w->cols + tile - 1) / tile;
    for (int k = 0; k < (w->cols + 31) / 32 * 32; k += 2)
        for (int i = 1; i >= 0; i--) {
            const int64_t at = (int64_t)r * w->cols + k + i;
            const bool in = k + i < w->cols;
            float v = !in                     ? 0.0f
                      : w->dtype == AFF_BF16 ? aff__bf16_to_f32(((const uint16_t *)w->data)[at])
                                             : aff__e4m3_table[((const uint8_t *)w->data)[at]] * aff__e8m0_to_f32(w->scale[r / tile * across + (k + i) / tile]);
            lane[k / 2 % 16] = step(lane[k / 2 % 16], v, in ? aff__round_bf16(x[k + i]) : 0.0f);
        }
    for (int i = 0; i < 8; i++) lane[i] += lane[i + 8];
    for (int i = 0; i < 4; i++) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

static void every_level_gives_the_defined_pairs(void **state)
{
    (void)state;
    uint64_t seed = 12;
    static const int some[] = {1, 2, 4, 5, 8, 13, 32, 33};
    for (int round = 0; round < 400; round++) {
        int rows = draw_int(&seed, 1, 37), cols = draw_int(&seed, 1, 400), T = round % 9 ? draw_int(&seed, 1, 7) : some[draw(&seed, 8)];
        if (round % 4 == 0) cols = (cols + 127) / 128 * 128;
        if (round % 29 == 0) cols += 900; /* more than a panel */
        bool wild = round % 3 != 1;
        matrix m = random_matrix(dtypes[1 + draw(&seed, 3)], rows, cols, wild, &seed);
        float *x = floats((int64_t)T * cols, wild, &seed), *y = floats((int64_t)T * rows, false, &seed), *want = floats((int64_t)T * rows, false, &seed);
        if (round % 5 == 0) /* sums near 2^-126 */
            for (int i = 0; i < T * cols; i++) x[i] = ldexpf(draw_unit(&seed), -120 + draw_int(&seed, 0, 6) - (m.w.dtype == AFF_BF16 ? 0 : 8));
        if (round % 16 == 5) x[draw(&seed, (uint64_t)(T * cols))] = round % 32 == 5 ? INFINITY : NAN;
        for (int t = 0; t < T; t++)
            for (int r = 0; r < rows; r++) want[t * rows + r] = defined_pairs(&m.w, r, x + (int64_t)t * cols);
        EACH_LEVEL(l)
        {
            for (int i = 0; i < T * rows; i++) y[i] = -1.0f;
            aff__cpu_matmul(NULL, &m.w, AFF_FAST, x, cols, T, y, rows);
            assert_int_equal(first_difference(y, want, (int64_t)T * rows), -1);
        }
        free(x), free(y), free(want), free_matrix(&m);
    }
}

/* The instruction itself, where this machine has it: a row of 32 columns whose lane 0 gets c, then two products, over values of all sizes. */
static void a_step_is_the_instruction(void **state)
{
    (void)state;
    uint64_t seed = 13;
    uint16_t w[64] = {0};
    float x[64] = {0};
    const aff_weight m = {.dtype = AFF_BF16, .rows = 1, .cols = 64, .data = w};
    for (int round = 0; round < 100000; round++) {
        const int base = round % 3 == 0 ? draw_int(&seed, -130, 120) : round % 3 == 1 ? -126 : 0;
        for (int i = 0; i < 2; i++) { /* the lane's first pair makes some sum, the second moves it by about as much or by a rounding */
            const int a = draw_int(&seed, -126, 0) / (round % 3 == 1 ? 1 : 8), b = base - a - draw_int(&seed, 0, 26);
            w[i] = aff__f32_to_bf16(ldexpf(draw_unit(&seed), a)), x[i] = ldexpf(draw_unit(&seed), b);
            w[32 + i] = aff__f32_to_bf16(ldexpf(draw_unit(&seed), a)), x[32 + i] = ldexpf(draw_unit(&seed), b - draw_int(&seed, 0, 26));
        }
        const float want = defined_pairs(&m, 0, x);
        EACH_LEVEL(l)
        {
            float y;
            aff__cpu_matmul(NULL, &m, AFF_FAST, x, 64, 1, &y, 1);
            assert_int_equal(first_difference(&y, &want, 1), -1);
        }
    }
    /* 2^-126 less 3/8 of the spacing below it is 2^-126; less 3/4 it is below, and zero. */
    w[0] = 0x3f80, w[1] = 0, x[0] = 0x1p-126f, w[32] = aff__f32_to_bf16(-0x1p-70f), w[33] = 0;
    EACH_LEVEL(l)
    for (int eighths = 0; eighths < 9; eighths++) {
        float y;
        x[32] = (float)eighths * 0x1p-83f;
        aff__cpu_matmul(NULL, &m, AFF_FAST, x, 64, 1, &y, 1);
        assert_true(y == (eighths <= 4 ? 0x1p-126f : 0.0f));
    }
}

static void every_level_gives_the_defined_bits(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (int round = 0; round < 240; round++) {
        int rows = draw_int(&seed, 1, 37), cols = draw_int(&seed, 1, 400), T = draw_int(&seed, 1, 19);
        if (round % 4 == 0) cols = (cols + 127) / 128 * 128;
        bool wild = round % 3 == 0;
        matrix m = random_matrix(dtypes[draw(&seed, DTYPES)], rows, cols, wild, &seed);
        int64_t ldx = cols + draw_int(&seed, 0, 5), ldy = rows + draw_int(&seed, 0, 5);
        float *x = floats(T * ldx, wild, &seed), *y = floats(T * ldy, false, &seed),
              *want = floats(T * ldy, false, &seed);
        if (round % 16 == 5) x[draw(&seed, (uint64_t)(T * ldx))] = round % 32 == 5 ? INFINITY : NAN;
        memcpy(want, y, (size_t)(T * ldy) * sizeof *y); /* gaps between rows of y stay as they were */
        for (int t = 0; t < T; t++)
            for (int r = 0; r < rows; r++) want[t * ldy + r] = defined_product(&m.w, r, x + t * ldx);
        EACH_LEVEL(l)
        {
            for (int t = 0; t < T; t++)
                for (int r = 0; r < rows; r++) y[t * ldy + r] = -1.0f;
            aff__cpu_matmul(NULL, &m.w, AFF_MATH, x, ldx, T, y, ldy);
            assert_int_equal(first_difference(y, want, T * ldy), -1);
        }
        free(x), free(y), free(want), free_matrix(&m);
    }
}

static void every_e4m3_code_and_scale_is_exact(void **state)
{
    (void)state;
    uint8_t code[256], scale[8] = {0};
    float x[256] = {0}, y;
    for (int i = 0; i < 256; i++) code[i] = (uint8_t)i;
    EACH_LEVEL(l)
    for (int tile = 32; tile <= 128; tile += 96)
        for (int b = 0; b < 256; b++)
            for (int i = 0; i < 256; i += b == 127 || b == 255 ? 1 : 37) {
                aff_weight w = {.dtype = tile == 32 ? AFF_FP8_32 : AFF_FP8, .rows = 1, .cols = 256, .scale = scale};
                uint8_t only[256] = {0};
                only[i] = code[i];
                w.data = only;
                memset(scale, 127, sizeof scale);
                scale[i / tile] = (uint8_t)b;
                x[i] = 1.0f;
                aff__cpu_matmul(NULL, &w, AFF_MATH, x, 256, 1, &y, 1);
                x[i] = 0.0f;
                /* E4M3 by its definition. */
                int e = i >> 3 & 15, f = i & 7;
                double v = e ? ldexp(8 + f, e - 10) : ldexp(f, -9);
                if (b == 255 || (i & 127) == 127)
                    assert_true(isnan(y));
                else
                    assert_true((double)y == (i & 128 ? -v : v) * ldexp(1.0, b - 127) || (isinf(y) && b > 245));
                x[i] = 1.0f; /* and as bf16, where subnormal values are zeros */
                float pair;
                aff__cpu_matmul(NULL, &w, AFF_FAST, x, 256, 1, &pair, 1);
                x[i] = 0.0f;
                assert_true(isnan(y) ? isnan(pair) : isinf(y) ? pair == y || isnan(pair) : pair == (fabsf(y) < 0x1p-126f ? 0.0f : y));
            }
}

static void a_row_does_not_depend_on_its_company(void **state)
{
    (void)state;
    aff_pool *pool = NULL;
    assert_int_equal(aff__pool_create(&pool, 3, NULL), AFF_OK);
    uint64_t seed = 3;
    for (int round = 0; round < 24; round++) {
        int rows = draw_int(&seed, 1, 300), cols = draw_int(&seed, 1, 900), T = draw_int(&seed, 2, 70);
        matrix m = random_matrix(dtypes[round % DTYPES], rows, cols, round % 2, &seed);
        float *x = floats((int64_t)T * cols, round % 2, &seed), *y = floats((int64_t)T * rows, false, &seed),
              *one = floats(rows, false, &seed);
        EACH_LEVEL(l)
        {
            if (l == AFF_CPU_SCALAR && l_top > l) continue; /* slow, and covered by the definition test */
            aff__cpu_matmul(pool, &m.w, AFF_FAST, x, cols, T, y, rows);
            for (int t = 0; t < T; t++) {
                aff__cpu_matmul(NULL, &m.w, AFF_FAST, x + (int64_t)t * cols, cols, 1, one, rows);
                assert_int_equal(first_difference(y + (int64_t)t * rows, one, rows), -1);
            }
        }
        free(x), free(y), free(one), free_matrix(&m);
    }
    aff__pool_free(pool);
}

static void groups_are_products_of_their_slices(void **state)
{
    (void)state;
    uint64_t seed = 4;
    for (int d = 0; d < DTYPES; d++) {
        int groups = 3, out = 128, in = 200, T = 5;
        matrix m = random_matrix(dtypes[d], groups * out, in, false, &seed);
        int64_t ldx = groups * in + 3, ldy = groups * out + 1;
        float *x = floats(T * ldx, false, &seed), *y = floats(T * ldy, false, &seed),
              *part = floats(T * out, false, &seed);
        EACH_LEVEL(l)
        {
            aff__cpu_matmul_grouped(NULL, &m.w, AFF_FAST, groups, x, ldx, T, y, ldy);
            for (int g = 0; g < groups; g++) {
                aff_weight w = m.w;
                int tile = w.dtype == AFF_FP8 ? 128 : 32, size = d == 0 ? 4 : d == 1 ? 2 : 1;
                w.rows = out;
                w.data = (const uint8_t *)w.data + (int64_t)g * out * in * size;
                if (w.scale) w.scale += g * out / tile * ((in + tile - 1) / tile);
                aff__cpu_matmul(NULL, &w, AFF_FAST, x + g * in, ldx, T, part, out);
                for (int t = 0; t < T; t++)
                    assert_int_equal(first_difference(y + t * ldy + g * out, part + t * out, out), -1);
            }
        }
        free(x), free(y), free(part), free_matrix(&m);
    }
}

static void no_memory_changes_nothing(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int d = 0; d < DTYPES; d++) {
        matrix m = random_matrix(dtypes[d], 40, 300, false, &seed);
        float *x = floats(3 * 300, false, &seed), a[3 * 40], b[3 * 40];
        aff__cpu_cap(AFF_CPU_AVX512);
        aff__cpu_matmul(NULL, &m.w, AFF_FAST, x, 300, 3, a, 40);
        aff__alloc_fail_after(1);
        aff__cpu_matmul(NULL, &m.w, AFF_FAST, x, 300, 3, b, 40);
        aff__alloc_fail_after(0);
        assert_int_equal(first_difference(a, b, 3 * 40), -1);
        free(x), free_matrix(&m);
    }
}

static void vectors_follow_the_definition(void **state)
{
    (void)state;
    uint64_t seed = 6;
    for (int round = 0; round < 300; round++) {
        int n = draw_int(&seed, 0, 150);
        bool wild = round % 2;
        float *a = floats(n, wild, &seed), *b = floats(n, wild, &seed), *c = floats(n, wild, &seed),
              f = draw_unit(&seed);
        aff_weight w = {.dtype = AFF_F32, .rows = 1, .cols = n, .data = a};
        aff_weight ww = {.dtype = AFF_F32, .rows = 1, .cols = n, .data = b};
        float want = defined_product(&w, 0, b), sq = defined_product(&ww, 0, b);
        EACH_LEVEL(l)
        {
            float got = aff__cpu_dot(a, b, n), got_sq = aff__cpu_sumsq(b, n);
            assert_int_equal(first_difference(&got, &want, 1), -1);
            assert_int_equal(first_difference(&got_sq, &sq, 1), -1);
            float *y = floats(n, false, &seed);
            if (n) memcpy(y, c, (size_t)n * sizeof *y);
            aff__cpu_axpy(y, f, a, n);
            for (int i = 0; i < n; i++) assert_true(y[i] == fmaf(f, a[i], c[i]));
            if (n) memcpy(y, c, (size_t)n * sizeof *y);
            aff__cpu_scale(y, f, n);
            for (int i = 0; i < n; i++) assert_true(y[i] == c[i] * f);
            free(y);
        }
        free(a), free(b), free(c);
    }
}

/* Every product -2^-200 rounds to -0; lanes that a tail does not reach must not turn it into +0. */
static void negative_zero_survives_a_tail(void **state)
{
    (void)state;
    float w[31], x[31], y;
    for (int i = 0; i < 31; i++) w[i] = -0x1p-100f, x[i] = 0x1p-100f;
    EACH_LEVEL(l)
    for (int n = 16; n <= 31; n++) {
        aff_weight m = {.dtype = AFF_F32, .rows = 1, .cols = n, .data = w};
        aff__cpu_matmul(NULL, &m, AFF_MATH, x, n, 1, &y, 1);
        assert_true(y == 0.0f && signbit(y));
        y = aff__cpu_dot(w, x, n);
        assert_true(y == 0.0f && signbit(y));
    }
}

static void rounding_is_one_function(void **state)
{
    (void)state;
    uint64_t seed = 7;
    float x[203], y[203], want[203];
    const float odd[] = {1.00390625f,      1.01171875f, 1.005f,      -1.00390625f, INFINITY, -INFINITY,
                         0x1.fffffep+127f, 0x1p-149f,   0x1.8p-134f, -0.0f,        0.0f};
    const float even[] = {1.0f,     1.015625f, 1.0078125f, -1.0f, INFINITY, -INFINITY,
                          INFINITY, 0.0f,      0x1p-133f,  -0.0f, 0.0f};
    EACH_LEVEL(l)
    {
        const aff__cpu_inner *in = aff__cpu_inner_now();
        in->round_bf16(odd, y, 11);
        assert_int_equal(first_difference(y, even, 11), -1);
        for (int round = 0; round < 50; round++) {
            int n = draw_int(&seed, 0, 203);
            fill(x, n, true, &seed);
            if (n > 3) x[3] = NAN;
            for (int i = 0; i < n; i++) want[i] = aff__round_bf16(x[i]);
            in->round_bf16(x, y, n);
            assert_int_equal(first_difference(y, want, n), -1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_agree_with_double_precision), cmocka_unit_test(every_level_gives_the_defined_bits),
        cmocka_unit_test(every_level_gives_the_defined_pairs),  cmocka_unit_test(a_step_is_the_instruction),
        cmocka_unit_test(every_e4m3_code_and_scale_is_exact),   cmocka_unit_test(a_row_does_not_depend_on_its_company),
        cmocka_unit_test(groups_are_products_of_their_slices),  cmocka_unit_test(no_memory_changes_nothing),
        cmocka_unit_test(vectors_follow_the_definition),        cmocka_unit_test(rounding_is_one_function),
        cmocka_unit_test(negative_zero_survives_a_tail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
