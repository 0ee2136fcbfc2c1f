/* vec_simd.h - vector primitives, swiglu and the quantiser over simd16.h, included once per instruction set. */
#include "backend/cpu/simd16.h"

static float dot_simd(const float *a, const float *b, int n)
{
    v16 acc = v16_zero();
    int k = 0;
    for (; k + 16 <= n; k += 16) acc = v16_fma(v16_load(a + k), v16_load(b + k), acc);
    if (k < n) acc = v16_fma_part(v16_load_part(a + k, n - k), v16_load_part(b + k, n - k), acc, n - k);
    return v16_fold(acc);
}

static void axpy_simd(float *y, float a, const float *x, int n)
{
    int i = 0;
    v16 f = v16_set1(a);
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_fma(f, v16_load(x + i), v16_load(y + i)));
    if (i < n) v16_store_part(y + i, v16_fma(f, v16_load_part(x + i, n - i), v16_load_part(y + i, n - i)), n - i);
}

static void scale_simd(float *y, float a, int n)
{
    int i = 0;
    v16 f = v16_set1(a);
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_mul(v16_load(y + i), f));
    if (i < n) v16_store_part(y + i, v16_mul(v16_load_part(y + i, n - i), f), n - i);
}

static void round_bf16_simd(const float *x, float *y, int n)
{
    int i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_round_bf16(v16_load(x + i)));
    if (i < n) v16_store_part(y + i, v16_round_bf16(v16_load_part(x + i, n - i)), n - i);
}

static void swiglu_simd(float *g, const float *u, float weight, float limit, int n)
{
    for (int i = 0; i < n; i += 16) {
        int live = aff__min_int(16, n - i);
        v16 a = v16_load_part(g + i, live), b = v16_load_part(u + i, live);
        if (limit > 0.0f) {
            a = v16_min(v16_set1(limit), a);
            b = v16_max(v16_set1(-limit), v16_min(v16_set1(limit), b));
        }
        v16_store_part(g + i, v16_mul(v16_set1(weight), v16_mul(v16_mul(a, v16_sigmoid(a)), b)), live);
    }
}

static float quantise_simd(const float *x, int n, int8_t *q)
{
    v16 top = v16_zero();
    bool finite = true;
    for (int i = 0; i < n; i += 16) {
        v16 a = v16_load_part(x + i, aff__min_int(16, n - i));
        finite = finite && v16_all_finite(a);
        top = v16_max(top, v16_abs(a));
    }
    float lane[16], amax = 0.0f;
    v16_store(lane, top);
    for (int i = 0; i < 16; i++) amax = lane[i] > amax ? lane[i] : amax;
    if (!finite || amax < 0x1p-100f) {
        memset(q, 0, (size_t)n);
        return finite ? 0.0f : NAN;
    }
    v16 inv = v16_set1(127.0f / amax), rounder = v16_set1(AFF__ROUNDER);
    for (int i = 0; i < n; i += 16) {
        int live = aff__min_int(16, n - i);
        v16 v = v16_sub(v16_add(v16_mul(v16_load_part(x + i, live), inv), rounder), rounder);
        v16_store(lane, v16_max(v16_set1(-127.0f), v16_min(v16_set1(127.0f), v)));
        for (int j = 0; j < live; j++) q[i + j] = (int8_t)lane[j];
    }
    return amax / 127.0f;
}
