/* pairs.h - the arithmetic of bf16 pairs (kernels.h) in plain C: subnormal operands count as zero, subnormal results become zero, the
 * sign kept. "Subnormal" is decided after rounding to 24 bits, as processors do. */
#ifndef AFF_BACKEND_CPU_PAIRS_H
#define AFF_BACKEND_CPU_PAIRS_H
#include "quant/numbers.h"
#include <math.h>

static inline float aff__flush(float x)
{
    const uint32_t u = aff__f32_bits(x);
    return u & 0x7f800000u ? x : aff__bits_f32(u & 0x80000000u);
}

/* a * b + c of flushed operands. */
static inline float aff__pair_fma(float a, float b, float c)
{
    const float r = fmaf(a, b, c);
    const uint32_t size = aff__f32_bits(r) & 0x7fffffffu;
    /* 2^-126 may have come from below: it has one bit more to round to than a subnormal. In double no value rounds onto the limit. */
    const int small = size < 0x00800000u || (size == 0x00800000u && fabs(fma((double)a, (double)b, (double)c)) < 0x1.ffffffp-127);
    return small ? aff__bits_f32(aff__f32_bits(r) & 0x80000000u) : r;
}

/* One step of a lane: the odd product first. */
static inline float aff__pair_dot(float acc, float w0, float w1, float x0, float x1)
{
    acc = aff__pair_fma(aff__flush(w1), aff__flush(x1), acc);
    return aff__pair_fma(aff__flush(w0), aff__flush(x0), acc);
}
#endif
