/* simd16.h - the 16 lanes of kernels.h as a vector: one zmm register (AVX-512) or two ymm registers (AVX2 + FMA +
 * F16C). Kernels written over it are compiled once per instruction set; each lane does what the scalar code does, so
 * the bits agree. */
#ifndef AFF_BACKEND_CPU_SIMD16_H
#define AFF_BACKEND_CPU_SIMD16_H
#include "backend/cpu/inner.h"
#include "backend/mathfn.h"
#include <immintrin.h>
#include <string.h>

#define AFF__INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
typedef __m512 v16;
typedef __mmask16 m16; /* which lanes are live */

AFF__INLINE v16 v16_zero(void)
{
    return _mm512_setzero_ps();
}
AFF__INLINE v16 v16_set1(float a)
{
    return _mm512_set1_ps(a);
}
AFF__INLINE v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
AFF__INLINE void v16_store(float *p, v16 a)
{
    _mm512_storeu_ps(p, a);
}
AFF__INLINE v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}
AFF__INLINE v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}
AFF__INLINE v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}
AFF__INLINE v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}
AFF__INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
/* a < b ? a : b and a > b ? a : b; a NaN on either side gives b. */
AFF__INLINE v16 v16_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}
AFF__INLINE v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}
AFF__INLINE v16 v16_abs(v16 a)
{
    return _mm512_abs_ps(a);
}
/* a < b ? x : y */
AFF__INLINE v16 v16_if_less(v16 a, v16 b, v16 x, v16 y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
AFF__INLINE bool v16_all_finite(v16 a)
{
    return _mm512_cmp_ps_mask(v16_abs(a), v16_set1(0x1.fffffep+127f), _CMP_LE_OQ) == 0xffff;
}

AFF__INLINE m16 m16_first(int n)
{
    return (m16)((1u << n) - 1);
}
AFF__INLINE v16 v16_load_part(const float *p, int n)
{
    return _mm512_maskz_loadu_ps(m16_first(n), p);
}
AFF__INLINE void v16_store_part(float *p, v16 a, int n)
{
    _mm512_mask_storeu_ps(p, m16_first(n), a);
}
/* fma in the first n lanes, c in the others (adding 0 * 0 there would lose the sign of a -0). */
AFF__INLINE v16 v16_fma_part(v16 a, v16 b, v16 c, int n)
{
    return _mm512_mask3_fmadd_ps(a, b, c, m16_first(n));
}

AFF__INLINE v16 v16_load_bf16(const uint16_t *p)
{
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}

/* The upper halves: what a holds if that is bf16. */
AFF__INLINE void v16_store_bf16(uint16_t *p, v16 a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16)));
}
/* aff__round_bf16 */
AFF__INLINE v16 v16_round_bf16(v16 a)
{
    __m512i u = _mm512_castps_si512(a), half = _mm512_set1_epi32(0x7fff), high = _mm512_set1_epi32((int)0xffff0000u);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, half), odd);
    r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    return _mm512_castsi512_ps(_mm512_and_si512(r, high));
}

AFF__INLINE v16 v16_exp(v16 x)
{
    x = v16_max(v16_set1(AFF__EXP_LO), v16_min(v16_set1(AFF__EXP_HI), x));
    v16 t = v16_fma(x, v16_set1(AFF__LOG2E), v16_set1(AFF__ROUNDER));
    v16 nf = v16_sub(t, v16_set1(AFF__ROUNDER));
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(0x4b400000));
    v16 r = _mm512_fnmadd_ps(nf, v16_set1(AFF__LN2_HI), x);
    r = _mm512_fnmadd_ps(nf, v16_set1(AFF__LN2_LO), r);
    v16 q = v16_fma(v16_set1(AFF__EXP_Q4), r, v16_set1(AFF__EXP_Q3));
    q = v16_fma(q, r, v16_set1(AFF__EXP_Q2));
    q = v16_fma(q, r, v16_set1(AFF__EXP_Q1));
    q = v16_fma(q, r, v16_set1(AFF__EXP_Q0));
    q = v16_add(v16_fma(q, v16_mul(r, r), r), v16_set1(1.0f));
    __m512i half = _mm512_srai_epi32(n, 1), rest = _mm512_sub_epi32(n, half), bias = _mm512_set1_epi32(127);
    q = v16_mul(q, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23)));
    return v16_mul(q, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(rest, bias), 23)));
}

AFF__INLINE __m256 v16_fold8(v16 a)
{
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}

#else /* AVX2 */
typedef struct v16 {
    __m256 l, h;
} v16;

AFF__INLINE v16 v16_zero(void)
{
    return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
AFF__INLINE v16 v16_set1(float a)
{
    return (v16){_mm256_set1_ps(a), _mm256_set1_ps(a)};
}
AFF__INLINE v16 v16_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
AFF__INLINE void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.l), _mm256_storeu_ps(p + 8, a.h);
}
AFF__INLINE v16 v16_add(v16 a, v16 b)
{
    return (v16){_mm256_add_ps(a.l, b.l), _mm256_add_ps(a.h, b.h)};
}
AFF__INLINE v16 v16_sub(v16 a, v16 b)
{
    return (v16){_mm256_sub_ps(a.l, b.l), _mm256_sub_ps(a.h, b.h)};
}
AFF__INLINE v16 v16_mul(v16 a, v16 b)
{
    return (v16){_mm256_mul_ps(a.l, b.l), _mm256_mul_ps(a.h, b.h)};
}
AFF__INLINE v16 v16_div(v16 a, v16 b)
{
    return (v16){_mm256_div_ps(a.l, b.l), _mm256_div_ps(a.h, b.h)};
}
AFF__INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)};
}
/* a < b ? a : b and a > b ? a : b; a NaN on either side gives b. */
AFF__INLINE v16 v16_min(v16 a, v16 b)
{
    return (v16){_mm256_min_ps(a.l, b.l), _mm256_min_ps(a.h, b.h)};
}
AFF__INLINE v16 v16_max(v16 a, v16 b)
{
    return (v16){_mm256_max_ps(a.l, b.l), _mm256_max_ps(a.h, b.h)};
}
AFF__INLINE v16 v16_abs(v16 a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){_mm256_andnot_ps(sign, a.l), _mm256_andnot_ps(sign, a.h)};
}
/* a < b ? x : y */
AFF__INLINE v16 v16_if_less(v16 a, v16 b, v16 x, v16 y)
{
    return (v16){_mm256_blendv_ps(y.l, x.l, _mm256_cmp_ps(a.l, b.l, _CMP_LT_OQ)),
                 _mm256_blendv_ps(y.h, x.h, _mm256_cmp_ps(a.h, b.h, _CMP_LT_OQ))};
}
AFF__INLINE bool v16_all_finite(v16 a)
{
    __m256 top = _mm256_set1_ps(0x1.fffffep+127f);
    a = v16_abs(a);
    return _mm256_movemask_ps(
               _mm256_and_ps(_mm256_cmp_ps(a.l, top, _CMP_LE_OQ), _mm256_cmp_ps(a.h, top, _CMP_LE_OQ))) == 0xff;
}

/* All ones in the first n lanes. */
AFF__INLINE v16 v16_first(int n)
{
    __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (v16){_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), at)),
                 _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), at))};
}
AFF__INLINE v16 v16_load_part(const float *p, int n)
{
    v16 m = v16_first(n);
    return (v16){_mm256_maskload_ps(p, _mm256_castps_si256(m.l)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.h))};
}
AFF__INLINE void v16_store_part(float *p, v16 a, int n)
{
    v16 m = v16_first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.l), a.l);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.h), a.h);
}
/* fma in the first n lanes, c in the others (adding 0 * 0 there would lose the sign of a -0). */
AFF__INLINE v16 v16_fma_part(v16 a, v16 b, v16 c, int n)
{
    v16 m = v16_first(n), f = v16_fma(a, b, c);
    return (v16){_mm256_blendv_ps(c.l, f.l, m.l), _mm256_blendv_ps(c.h, f.h, m.h)};
}

AFF__INLINE v16 v16_load_bf16(const uint16_t *p)
{
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)));
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}

/* The upper halves: what a holds if that is bf16. */
AFF__INLINE void v16_store_bf16(uint16_t *p, v16 a)
{
    const __m256i l = _mm256_srli_epi32(_mm256_castps_si256(a.l), 16), h = _mm256_srli_epi32(_mm256_castps_si256(a.h), 16);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(l, h), 0xd8));
}
AFF__INLINE __m256 v8_round_bf16(__m256 a)
{
    __m256i u = _mm256_castps_si256(a), half = _mm256_set1_epi32(0x7fff), high = _mm256_set1_epi32((int)0xffff0000u);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, half), odd);
    __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(u, _mm256_set1_epi32(0x400000)));
    __m256 v = _mm256_blendv_ps(_mm256_castsi256_ps(r), quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_and_ps(v, _mm256_castsi256_ps(high));
}
/* aff__round_bf16 */
AFF__INLINE v16 v16_round_bf16(v16 a)
{
    return (v16){v8_round_bf16(a.l), v8_round_bf16(a.h)};
}

AFF__INLINE __m256 v8_exp(__m256 x)
{
    x = _mm256_max_ps(_mm256_set1_ps(AFF__EXP_LO), _mm256_min_ps(_mm256_set1_ps(AFF__EXP_HI), x));
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(AFF__LOG2E), _mm256_set1_ps(AFF__ROUNDER));
    __m256 nf = _mm256_sub_ps(t, _mm256_set1_ps(AFF__ROUNDER));
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000));
    __m256 r = _mm256_fnmadd_ps(nf, _mm256_set1_ps(AFF__LN2_HI), x);
    r = _mm256_fnmadd_ps(nf, _mm256_set1_ps(AFF__LN2_LO), r);
    __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(AFF__EXP_Q4), r, _mm256_set1_ps(AFF__EXP_Q3));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(AFF__EXP_Q2));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(AFF__EXP_Q1));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(AFF__EXP_Q0));
    q = _mm256_add_ps(_mm256_fmadd_ps(q, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    __m256i half = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, half), bias = _mm256_set1_epi32(127);
    q = _mm256_mul_ps(q, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(q, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
AFF__INLINE v16 v16_exp(v16 x)
{
    return (v16){v8_exp(x.l), v8_exp(x.h)};
}

AFF__INLINE __m256 v16_fold8(v16 a)
{
    return _mm256_add_ps(a.l, a.h);
}
#endif

/* Holds a value in its register: a compiler may otherwise read it from memory again at every use, and loads are what a tile must save. */
AFF__INLINE void v16_hold(v16 *a)
{
#if defined(__AVX512F__)
    __asm__("" : "+v"(*a));
#else
    __asm__("" : "+x"(a->l), "+x"(a->h));
#endif
}

/* The largest lane; a NaN may or may not count. */
AFF__INLINE float v16_largest(v16 a)
{
#if defined(__AVX512F__)
    const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#else
    const __m256 b = _mm256_max_ps(a.l, a.h);
#endif
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

/* The fixed tree: +8, +4, +2, +1. */
AFF__INLINE float v16_fold(v16 a)
{
    __m256 b = v16_fold8(a);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

/* Four trees at once. */
AFF__INLINE __m128 v16_fold_4(v16 a, v16 b, v16 c, v16 d)
{
    __m256 e[4] = {v16_fold8(a), v16_fold8(b), v16_fold8(c), v16_fold8(d)};
    __m128 f[4];
    for (int i = 0; i < 4; i++) f[i] = _mm_add_ps(_mm256_castps256_ps128(e[i]), _mm256_extractf128_ps(e[i], 1));
    __m128 ab = _mm_add_ps(_mm_movelh_ps(f[0], f[1]), _mm_movehl_ps(f[1], f[0]));
    __m128 cd = _mm_add_ps(_mm_movelh_ps(f[2], f[3]), _mm_movehl_ps(f[3], f[2]));
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, _MM_SHUFFLE(2, 0, 2, 0)), _mm_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 1, 3, 1)));
}

/* 1/(1+e^-x) as aff__sigmoid. */
AFF__INLINE v16 v16_sigmoid(v16 x)
{
    v16 one = v16_set1(1.0f), e = v16_exp(v16_sub(v16_zero(), v16_abs(x)));
    return v16_div(v16_if_less(x, v16_zero(), e, one), v16_add(one, e));
}

/* 32 E4M3 bytes as two vectors of columns 0..15 and 16..31, and 64 as four. */
#if defined(__AVX512F__)
typedef struct e4m3_decoder {
    __m512i order, high[2], low[2], sign, upper;
} e4m3_decoder;

/* bf16 holds every E4M3 value exactly, so a decoder is two tables of 128 bytes: the halves of the bf16 magnitudes.
 * Bytes are first dealt so that, once the halves are paired up, dword i of a vector of bf16 holds column i (low word)
 * and i + 16. */
AFF__INLINE e4m3_decoder e4m3_setup(void)
{
    static const uint16_t tiny[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60}; /* m * 2^-9 */
    _Alignas(64) uint8_t order[64], high[128], low[128];
    for (int i = 0; i < 128; i++) {
        /* From 8 on the three fraction bits and the exponent only move. */
        const int v = i < 8 ? tiny[i] : i == 127 ? 0x7fc0 : (i << 4) + (120 << 7);
        high[i] = (uint8_t)(v >> 8), low[i] = (uint8_t)v;
    }
    for (int i = 0; i < 64; i++) order[i] = (uint8_t)(i % 2 * 16 + i % 16 / 8 * 32 + i / 16 * 4 + i % 8 / 2);
    e4m3_decoder d = {.sign = _mm512_set1_epi8((char)0x80), .upper = _mm512_set1_epi32((int)0xffff0000u)};
    d.order = _mm512_load_si512(order);
    for (int i = 0; i < 2; i++) {
        d.high[i] = _mm512_load_si512(high + 64 * i);
        d.low[i] = _mm512_load_si512(low + 64 * i);
    }
    return d;
}

AFF__INLINE void e4m3_halves(const e4m3_decoder *d, __m512i raw, __m512i *low, __m512i *high)
{
    raw = _mm512_permutexvar_epi8(d->order, raw);
    *low = _mm512_permutex2var_epi8(d->low[0], raw, d->low[1]);
    __m512i mag = _mm512_permutex2var_epi8(d->high[0], raw, d->high[1]);
    *high = _mm512_ternarylogic_epi64(mag, raw, d->sign, 0xf8); /* mag | (raw & sign) */
}
AFF__INLINE void e4m3_widen(const e4m3_decoder *d, __m512i bf, v16 *a, v16 *b)
{
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(bf, 16));
    *b = _mm512_castsi512_ps(_mm512_and_si512(bf, d->upper));
}
AFF__INLINE void e4m3_load32(const e4m3_decoder *d, const uint8_t *p, v16 *a, v16 *b)
{
    __m512i low, high;
    e4m3_halves(d, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)p)), &low, &high);
    e4m3_widen(d, _mm512_unpacklo_epi8(low, high), a, b);
}
AFF__INLINE void e4m3_load64(const e4m3_decoder *d, const uint8_t *p, v16 v[4])
{
    __m512i low, high;
    e4m3_halves(d, _mm512_loadu_si512(p), &low, &high);
    e4m3_widen(d, _mm512_unpacklo_epi8(low, high), &v[0], &v[1]);
    e4m3_widen(d, _mm512_unpackhi_epi8(low, high), &v[2], &v[3]);
}
#else
typedef struct e4m3_decoder {
    __m256i unused;
} e4m3_decoder;
AFF__INLINE e4m3_decoder e4m3_setup(void)
{
    return (e4m3_decoder){_mm256_setzero_si256()};
}

/* Through binary16, whose subnormals cost nothing to convert: sign, then the seven bits one place lower than in E4M3's
 * own alignment give the value times 2^-8. The two NaN codes become all ones. */
AFF__INLINE v16 e4m3_load16(const uint8_t *p)
{
    __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
    __m256i low = _mm256_set1_epi16(127);
    __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(v, low), low);
    __m256i h = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), _mm256_set1_epi16((short)0xbf80));
    h = _mm256_or_si256(h, nan);
    __m256 up = _mm256_set1_ps(256.0f);
    return (v16){_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), up),
                 _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), up)};
}
AFF__INLINE void e4m3_load32(const e4m3_decoder *d, const uint8_t *p, v16 *a, v16 *b)
{
    (void)d;
    *a = e4m3_load16(p);
    *b = e4m3_load16(p + 16);
}
#endif
#endif
