/* Routed experts in exact integers, as kernels.h defines them. */
#include "backend/cpu/inner_scalar.h"
#include "backend/mathfn.h"
#include "quant/numbers.h"
#include <math.h>

float aff__quantise_scalar(const float *x, int n, int8_t *q)
{
    float amax = 0.0f;
    bool finite = true;
    for (int i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        finite = finite && a <= 0x1.fffffep+127f;
        amax = a > amax ? a : amax;
    }
    bool live = finite && amax >= 0x1p-100f;
    float inv = live ? 127.0f / amax : 0.0f;
    for (int i = 0; i < n; i++) {
        /* Adding and taking away 1.5 * 2^23 rounds to the nearest even integer. */
        float v = live ? (x[i] * inv + AFF__ROUNDER) - AFF__ROUNDER : 0.0f;
        q[i] = (int8_t)(v > 127.0f ? 127.0f : v < -127.0f ? -127.0f : v);
    }
    return live ? amax / 127.0f : finite ? 0.0f : NAN;
}

void aff__swiglu_scalar(float *g, const float *u, float weight, float limit, int n)
{
    for (int i = 0; i < n; i++) {
        float a = g[i], b = u[i];
        if (limit > 0.0f) {
            a = a > limit ? limit : a;
            b = b > limit ? limit : b < -limit ? -limit : b;
        }
        g[i] = weight * ((a * aff__sigmoid(a)) * b);
    }
}

/* Sixteen columns of block b (of the group's four): four codes of 10 bits in 5 bytes, one field of 6 bits. */
static void decode16(const uint8_t *codes, const uint8_t *fields, int b, const int16_t (*table)[1024][4], int32_t w[16])
{
    uint32_t field = ((uint32_t)fields[0] | (uint32_t)fields[1] << 8 | (uint32_t)fields[2] << 16) >> (6 * b) & 63;
    uint64_t bits = 0;
    for (int i = 0; i < 5; i++) bits |= (uint64_t)codes[5 * b + i] << (8 * i);
    int e = field & 7, rot = field & 16 ? 2 : 0;
    for (int k = 0; k < 16; k++) {
        int32_t v = table[field >> 5][bits >> (10 * (k / 4)) & 1023][(k + rot) % 4];
        w[k] = (field & 8 ? -v : v) * (1 << e);
    }
}

void aff__q2p875_scalar(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0, int r1,
                        const int8_t *const *xq, const float *const *xs, int n, float *const *y)
{
    for (int r = r0; r < r1; r++) {
        float acc[AFF__BATCH_MAX] = {0};
        for (int k0 = 0; k0 < cols; k0 += AFF__QUANT_GROUP) {
            int32_t sum[AFF__BATCH_MAX] = {0};
            for (int k = k0; k < aff__min_int(cols, k0 + AFF__QUANT_GROUP); k += 16) {
                int64_t group = (int64_t)(k / 64) * rows + r;
                int32_t w[16];
                decode16(m->codes + group * 20, m->fields + group * 3, k % 64 / 16, table, w);
                for (int t = 0; t < n; t++)
                    for (int i = 0; i < 16; i++) sum[t] += w[i] * xq[t][k + i];
            }
            for (int t = 0; t < n; t++) acc[t] = fmaf((float)sum[t], xs[t][k0 / AFF__QUANT_GROUP], acc[t]);
        }
        for (int t = 0; t < n; t++) y[t][r - r0] = (acc[t] * 0x1p-9f) * aff__row_scale(m, r);
    }
}

static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* 2 * E2M1 */

void aff__mxfp4_scalar(const aff_expert_mat *m, int rows, int cols, int r0, int r1, const int8_t *const *xq,
                       const float *const *xs, int n, float *const *y)
{
    (void)rows;
    for (int r = r0; r < r1; r++) {
        const uint8_t *codes = m->codes + (int64_t)r * (cols / 2), *scales = m->fields + (int64_t)r * (cols / 32);
        float acc[AFF__BATCH_MAX] = {0};
        for (int k0 = 0; k0 < cols; k0 += 32) {
            float half = aff__half_e8m0(scales[k0 / 32]);
            for (int t = 0; t < n; t++) {
                int32_t sum = 0;
                for (int k = k0; k < k0 + 32; k++) sum += twice[codes[k / 2] >> (k % 2 * 4) & 15] * xq[t][k];
                acc[t] = fmaf((float)sum, xs[t][k0 / AFF__QUANT_GROUP] * half, acc[t]);
            }
        }
        for (int t = 0; t < n; t++) y[t][r - r0] = acc[t];
    }
}

void aff__expert_row(const aff_expert_shape *shape, const aff_expert_mat *m, int rows, int cols, int r, float *out)
{
    if (shape->dtype == AFF_MXFP4) {
        const uint8_t *codes = m->codes + (int64_t)r * (cols / 2), *scales = m->fields + (int64_t)r * (cols / 32);
        for (int k = 0; k < cols; k++)
            out[k] = (float)twice[codes[k / 2] >> (k % 2 * 4) & 15] * aff__half_e8m0(scales[k / 32]);
        return;
    }
    float unit = aff__row_scale(m, r) * 0x1p-9f;
    for (int k = 0; k < cols; k += 16) {
        int64_t group = (int64_t)(k / 64) * rows + r;
        int32_t w[16];
        decode16(m->codes + group * 20, m->fields + group * 3, k % 64 / 16, shape->table, w);
        for (int i = 0; i < 16; i++) out[k + i] = (float)w[i] * unit;
    }
}
