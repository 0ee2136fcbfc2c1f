#include "quant/numbers.h"
#include <math.h>

/* One row of E4M3 per exponent field: mantissas 0..7 times the step of that binade. */
#define ROW(s, f)                                                                                                      \
    (s) * 8 * (f), (s)*9 * (f), (s)*10 * (f), (s)*11 * (f), (s)*12 * (f), (s)*13 * (f), (s)*14 * (f), (s)*15 * (f)
#define SUB(s)                                                                                                         \
    (s) * 0.0f, (s)*0x1p-9f, (s)*0x1p-8f, (s)*0x1.8p-8f, (s)*0x1p-7f, (s)*0x1.4p-7f, (s)*0x1.8p-7f, (s)*0x1.cp-7f
#define TOP(s) (s) * 256.0f, (s)*288.0f, (s)*320.0f, (s)*352.0f, (s)*384.0f, (s)*416.0f, (s)*448.0f, NAN
#define HALF(s)                                                                                                        \
    SUB(s), ROW(s, 0x1p-9f), ROW(s, 0x1p-8f), ROW(s, 0x1p-7f), ROW(s, 0x1p-6f), ROW(s, 0x1p-5f), ROW(s, 0x1p-4f),      \
        ROW(s, 0x1p-3f), ROW(s, 0x1p-2f), ROW(s, 0x1p-1f), ROW(s, 1.0f), ROW(s, 2.0f), ROW(s, 4.0f), ROW(s, 8.0f),     \
        ROW(s, 16.0f), TOP(s)

const float aff__e4m3_table[256] = {HALF(1.0f), HALF(-1.0f)};

const float aff__e2m1_table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

uint8_t aff__f32_to_e4m3(float f)
{
    uint32_t u = aff__f32_bits(f), sign = u >> 24 & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return 0x7f;
    float a = aff__bits_f32(u);
    if (a >= 448.0f) return (uint8_t)(sign | 0x7e);
    /* Below 2^-6 the step is 2^-9, which is the ulp of 2^14: the addition rounds to nearest even for us, and eight
     * steps carry into the smallest normal code. */
    if (a < 0x1p-6f) return (uint8_t)(sign | (aff__f32_bits(a + 0x1p14f) & 0xfu));
    u += 0x7ffffu + (u >> 20 & 1u);
    return (uint8_t)(sign | ((u >> 20) - ((127u - 7u) << 3)));
}

uint8_t aff__f32_to_e2m1(float f)
{
    float a = fabsf(f);
    /* Midpoints between neighbouring codes; a tie goes to the even one. */
    int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)((aff__f32_bits(f) >> 28 & 8u) | (uint32_t)code);
}

float aff__pow2_scale(float amax, float inv_m)
{
    uint32_t u = aff__f32_bits(amax * inv_m);
    return aff__bits_f32(((u >> 23) + ((u & 0x7fffffu) != 0)) << 23);
}

static float amax_of(const float *x, int n, float floor)
{
    float m = floor;
    for (int i = 0; i < n; i++) m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
    return m;
}

void aff__a8(float *x, int n, int g)
{
    for (int b = 0; b + g <= n; b += g) {
        float s = aff__pow2_scale(amax_of(x + b, g, 1e-4f), 1.0f / 448.0f);
        for (int i = b; i < b + g; i++) x[i] = aff__e4m3_to_f32(aff__f32_to_e4m3(x[i] / s)) * s;
    }
}

void aff__a4(float *x, int n)
{
    for (int b = 0; b + 32 <= n; b += 32) {
        float s = aff__pow2_scale(amax_of(x + b, 32, 6.0f * 0x1p-126f), 1.0f / 6.0f);
        for (int i = b; i < b + 32; i++) x[i] = aff__e2m1_table[aff__f32_to_e2m1(x[i] / s)] * s;
    }
}

void aff__hadamard(float *x, int n)
{
    /* Double inside: outputs that cancel would otherwise carry the rounding of the large sums they are made of, and A4,
     * which follows, turns that into whole steps. */
    double t[AFF__HADAMARD_MAX];
    for (int i = 0; i < n; i++) t[i] = (double)x[i];
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < n; i += 2 * h) {
            for (int j = i; j < i + h; j++) {
                double a = t[j], b = t[j + h];
                t[j] = a + b;
                t[j + h] = a - b;
            }
        }
    }
    double s = 1.0 / sqrt((double)n);
    for (int i = 0; i < n; i++) x[i] = (float)(t[i] * s);
}
