/* The dense product as kernels.h defines it. */
#include "backend/cpu/inner_scalar.h"
#include "quant/numbers.h"
#include <math.h>

typedef float (*prepare)(float x);
static float as_is(float x)
{
    return x;
}

static float dot_f32(const float *w, const float *x, int n, prepare p)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < n; k++) acc[k % AFF__LANES] = fmaf(w[k], p(x[k]), acc[k % AFF__LANES]);
    return aff__fold_lanes(acc);
}

static float dot_bf16(const uint16_t *w, const float *x, int n, prepare p)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < n; k++) acc[k % AFF__LANES] = fmaf(aff__bf16_to_f32(w[k]), p(x[k]), acc[k % AFF__LANES]);
    return aff__fold_lanes(acc);
}

/* scale: the tile row's scales, one per `cut` columns. */
static float dot_fp8(const uint8_t *w, const uint8_t *scale, int cut, const float *x, int n, prepare p)
{
    float acc[AFF__LANES] = {0};
    for (int k0 = 0; k0 < n; k0 += cut) {
        float part[AFF__LANES] = {0}, s = aff__e8m0_to_f32(scale[k0 / cut]);
        for (int k = k0; k < aff__min_int(n, k0 + cut); k++)
            part[k % AFF__LANES] = fmaf(aff__e4m3_to_f32(w[k]), p(x[k]), part[k % AFF__LANES]);
        for (int i = 0; i < AFF__LANES; i++) acc[i] = fmaf(part[i], s, acc[i]);
    }
    return aff__fold_lanes(acc);
}

static float dot_row(const aff_weight *w, int r, const float *x, prepare p)
{
    int64_t at = (int64_t)r * w->cols;
    if (w->dtype == AFF_F32) return dot_f32((const float *)w->data + at, x, w->cols, p);
    if (w->dtype == AFF_BF16) return dot_bf16((const uint16_t *)w->data + at, x, w->cols, p);
    int tile = w->dtype == AFF_FP8 ? 128 : 32;
    const uint8_t *scale = w->scale + (int64_t)(r / tile) * aff__ceil_div(w->cols, tile);
    return dot_fp8((const uint8_t *)w->data + at, scale, tile, x, w->cols, p);
}

void aff__matmul_scalar(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    for (int r = r0; r < r1; r++)
        for (int t = 0; t < n; t++) y[t][r - r0] = dot_row(w, r, x[t], as_is);
}

void aff__matmul_rounding(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    for (int r = r0; r < r1; r++)
        for (int t = 0; t < n; t++) y[t][r - r0] = dot_row(w, r, x[t], aff__round_bf16);
}
