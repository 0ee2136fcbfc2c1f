/* numbers.h - the number formats and activation quantisers of spec model-v4 section 4, scalar and exact. */
#ifndef AFF_QUANT_NUMBERS_H
#define AFF_QUANT_NUMBERS_H
#include <stdint.h>
#include <string.h>

static inline uint32_t aff__f32_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline float aff__bits_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

static inline float aff__bf16_to_f32(uint16_t h) { return aff__bits_f32((uint32_t)h << 16); }
/* Round to nearest even; a NaN stays a NaN. */
static inline uint16_t aff__f32_to_bf16(float f)
{
    uint32_t u = aff__f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline float aff__round_bf16(float f) { return aff__bf16_to_f32(aff__f32_to_bf16(f)); }

/* E8M0: 2^(b-127); 255 is NaN, 0 the subnormal 2^-127. */
static inline float aff__e8m0_to_f32(uint8_t b) { return aff__bits_f32(b == 255 ? 0x7fc00000u : b ? (uint32_t)b << 23 : 0x00400000u); }

extern const float aff__e4m3_table[256]; /* E4M3FN byte -> value, NaN at 0x7f and 0xff */
static inline float aff__e4m3_to_f32(uint8_t b) { return aff__e4m3_table[b]; }
uint8_t aff__f32_to_e4m3(float f); /* nearest, ties to even, saturates at +-448; NaN -> 0x7f */

extern const float aff__e2m1_table[16]; /* nibble -> value */
uint8_t aff__f32_to_e2m1(float f);      /* nearest, ties to the even code, saturates at +-6 */

/* s = 2^ceil(log2(amax * (1/M))) by bit work (spec "pow2 scale"). */
float aff__pow2_scale(float amax, float inv_m);

/* A8: FP8 round trip of x[n] in place over contiguous groups of g (n a multiple of g). */
void aff__a8(float *x, int n, int g);
/* A4: FP4 round trip over groups of 32. */
void aff__a4(float *x, int n);
/* Orthonormal Walsh-Hadamard transform of n = 2^k <= 1024 values in place, natural order; summed in double, rounded once. */
enum { AFF__HADAMARD_MAX = 1024 };
void aff__hadamard(float *x, int n);
#endif
