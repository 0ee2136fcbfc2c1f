/* vec.c - the choice of instruction set, the vector primitives in scalar form, and top-k. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "backend/mathfn.h"
#include "base/cpu.h"
#include "quant/numbers.h"
#include <math.h>

const aff__cpu_inner aff__cpu_inner_scalar = {
    .matmul = aff__matmul_scalar,
    .q2p875 = aff__q2p875_scalar,
    .mxfp4 = aff__mxfp4_scalar,
    .dot = aff__dot_scalar,
    .axpy = aff__axpy_scalar,
    .scale = aff__scale_scalar,
    .round_bf16 = aff__round_bf16_scalar,
    .attend = aff__attend_scalar,
    .index_scores = aff__index_scores_scalar,
    .row = aff__row_decode,
    .swiglu = aff__swiglu_scalar,
    .quantise = aff__quantise_scalar,
};

const aff__cpu_inner *aff__cpu_inner_now(void)
{
#if defined(__x86_64__)
    aff_cpu_level level = aff__cpu_level();
    if (level == AFF_CPU_AVX512) return &aff__cpu_inner_avx512;
    if (level == AFF_CPU_AVX2) return &aff__cpu_inner_avx2;
#endif
    return &aff__cpu_inner_scalar;
}

float aff__dot_scalar(const float *a, const float *b, int n)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < n; k++) acc[k % AFF__LANES] = fmaf(a[k], b[k], acc[k % AFF__LANES]);
    return aff__fold_lanes(acc);
}

void aff__axpy_scalar(float *y, float a, const float *x, int n)
{
    for (int i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

void aff__scale_scalar(float *y, float a, int n)
{
    for (int i = 0; i < n; i++) y[i] *= a;
}

void aff__round_bf16_scalar(const float *x, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = aff__round_bf16(x[i]);
}

float aff__cpu_dot(const float *a, const float *b, int n)
{
    return aff__cpu_inner_now()->dot(a, b, n);
}
float aff__cpu_sumsq(const float *a, int n)
{
    return aff__cpu_inner_now()->dot(a, a, n);
}
void aff__cpu_axpy(float *y, float a, const float *x, int n)
{
    aff__cpu_inner_now()->axpy(y, a, x, n);
}
void aff__cpu_scale(float *y, float a, int n)
{
    aff__cpu_inner_now()->scale(y, a, n);
}

/* Unsigned integers in the order of the floats: NaN is 0, both zeros are one key. */
static uint32_t order_key(float f)
{
    if (f != f) return 0;
    uint32_t u = aff__f32_bits(f + 0.0f); /* -0 + 0 = +0 */
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Radix selection from the top byte down: after each round `prefix` holds the leading bytes of the k-th largest key,
 * and `want` how many of the keys with that prefix are still to be taken. Four passes, whatever the data. */
int aff__cpu_topk(const float *score, int n, int k, int *sel, int *scratch)
{
    if (n <= k || k <= 0) {
        int all = k <= 0 ? 0 : n;
        for (int i = 0; i < all; i++) sel[i] = i;
        return all;
    }
    for (int i = 0; i < n; i++) scratch[i] = (int)order_key(score[i]);
    uint32_t prefix = 0, mask = 0;
    int want = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = {0};
        for (int i = 0; i < n; i++)
            if (((uint32_t)scratch[i] & mask) == prefix) count[(uint32_t)scratch[i] >> shift & 255]++;
        int digit = 255;
        while (count[digit] < want) want -= count[digit--];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    int got = 0;
    for (int i = 0; i < n && got < k; i++) {
        uint32_t u = (uint32_t)scratch[i];
        if (u > prefix)
            sel[got++] = i;
        else if (u == prefix && want > 0)
            sel[got++] = i, want--;
    }
    return got;
}
