/* The dense product as kernels.h defines it. */
#include "backend/cpu/inner_scalar.h"
#include "backend/cpu/pairs.h"
#include <math.h>

static float dot_f32(const float *w, const float *x, int n, bool round)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < n; k++) acc[k % AFF__LANES] = fmaf(w[k], round ? aff__round_bf16(x[k]) : x[k], acc[k % AFF__LANES]);
    return aff__fold_lanes(acc);
}

static float dot_bf16(const uint16_t *w, const float *x, int n)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < n; k++) acc[k % AFF__LANES] = fmaf(aff__bf16_to_f32(w[k]), x[k], acc[k % AFF__LANES]);
    return aff__fold_lanes(acc);
}

/* scale: the tile row's scales, one per `cut` columns. */
static float dot_fp8(const uint8_t *w, const uint8_t *scale, int cut, const float *x, int n)
{
    float acc[AFF__LANES] = {0};
    for (int k0 = 0; k0 < n; k0 += cut) {
        float part[AFF__LANES] = {0}, s = aff__e8m0_to_f32(scale[k0 / cut]);
        for (int k = k0; k < aff__min_int(n, k0 + cut); k++) part[k % AFF__LANES] = fmaf(aff__e4m3_to_f32(w[k]), x[k], part[k % AFF__LANES]);
        for (int i = 0; i < AFF__LANES; i++) acc[i] = fmaf(part[i], s, acc[i]);
    }
    return aff__fold_lanes(acc);
}

static int tile_of(const aff_weight *w)
{
    return w->dtype == AFF_FP8 ? 128 : 32;
}
static const uint8_t *scales_of(const aff_weight *w, int r)
{
    return w->scale + (int64_t)(r / tile_of(w)) * aff__ceil_div(w->cols, tile_of(w));
}

static float dot_row(const aff_weight *w, int r, const float *x)
{
    const int64_t at = (int64_t)r * w->cols;
    if (w->dtype == AFF_F32) return dot_f32((const float *)w->data + at, x, w->cols, false);
    if (w->dtype == AFF_BF16) return dot_bf16((const uint16_t *)w->data + at, x, w->cols);
    return dot_fp8((const uint8_t *)w->data + at, scales_of(w, r), tile_of(w), x, w->cols);
}

void aff__matmul_scalar(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    for (int r = r0; r < r1; r++)
        for (int t = 0; t < n; t++) y[t][r - r0] = dot_row(w, r, x[t]);
}

/* Column k of row r; zero past the end. */
static float weight_at(const aff_weight *w, int r, int k)
{
    const int64_t at = (int64_t)r * w->cols + k;
    if (k >= w->cols) return 0.0f;
    if (w->dtype == AFF_BF16) return aff__bf16_to_f32(((const uint16_t *)w->data)[at]);
    return aff__e4m3_to_f32(((const uint8_t *)w->data)[at]) * aff__e8m0_to_f32(scales_of(w, r)[k / tile_of(w)]);
}

/* The activation, bf16 or float32 to be rounded. */
static float activation_at(const uint16_t *x, const float *wide, int k, int n)
{
    return k >= n ? 0.0f : x ? aff__bf16_to_f32(x[k]) : aff__round_bf16(wide[k]);
}

static float dot_pairs(const aff_weight *w, int r, const uint16_t *x, const float *wide)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < aff__ceil_div(w->cols, 32) * 32; k += 2)
        acc[k / 2 % AFF__LANES] = aff__pair_dot(acc[k / 2 % AFF__LANES], weight_at(w, r, k), weight_at(w, r, k + 1),
                                                activation_at(x, wide, k, w->cols), activation_at(x, wide, k + 1, w->cols));
    return aff__fold_lanes(acc);
}

void aff__pairs_scalar(const aff_weight *w, int r0, int r1, const uint16_t *const *x, int n, float *const *y)
{
    for (int r = r0; r < r1; r++)
        for (int t = 0; t < n; t++) y[t][r - r0] = dot_pairs(w, r, x[t], NULL);
}

void aff__matmul_rounding(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    for (int r = r0; r < r1; r++)
        for (int t = 0; t < n; t++)
            y[t][r - r0] = w->dtype == AFF_F32 ? dot_f32((const float *)w->data + (int64_t)r * w->cols, x[t], w->cols, true) : dot_pairs(w, r, NULL, x[t]);
}
