/* experts_simd.h - the integer products of MXFP4 experts, and what the formats share; included once per instruction
 * set.
 *
 * Eight weight rows at a time are decoded for one quantiser group (128 columns) into a buffer in L1, then multiplied
 * with every activation row. Integer sums are exact, so their order is free; rows are the lanes of the float chain that
 * follows. */
#ifndef AFF_BACKEND_CPU_EXPERTS_SIMD_H
#define AFF_BACKEND_CPU_EXPERTS_SIMD_H
#include "backend/cpu/simd16.h"

enum { EX_ROWS = 8, EX_GROUP = AFF__QUANT_GROUP };

AFF__INLINE __m256i ex_load(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
AFF__INLINE __m128i ex_load_half(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* Lane i: the sum over s[i]. */
AFF__INLINE __m256i ex_sums(const __m256i s[EX_ROWS])
{
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(s[4], s[5]), _mm256_hadd_epi32(s[6], s[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

/* Five bytes of block b of a row's 20, without reading past them. */
AFF__INLINE uint64_t ex_codes(const uint8_t *codes, int b)
{
    uint64_t bits;
    memcpy(&bits, codes + (b < 3 ? 5 * b : 12), 8);
    return b < 3 ? bits : bits >> 24;
}
AFF__INLINE uint32_t ex_fields(const uint8_t *f)
{
    return (uint32_t)f[0] | (uint32_t)f[1] << 8 | (uint32_t)f[2] << 16;
}
AFF__INLINE __m128i ex_quad(const int16_t (*variant)[4], uint64_t code)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)variant[code & 1023]);
}

/* Asks for eight rows from `at` on of a group of 64 columns and of the next group. */
AFF__INLINE void ex_prefetch(const aff_expert_mat *m, int64_t at, int rows)
{
    for (int i = 0; i < 2; i++, at += rows) {
        const char *c = (const char *)m->codes + at * 20;
        _mm_prefetch(c, _MM_HINT_T0);
        _mm_prefetch(c + 64, _MM_HINT_T0);
        _mm_prefetch(c + 128, _MM_HINT_T0);
        _mm_prefetch((const char *)m->fields + at * 3, _MM_HINT_T0);
    }
}

/* Eight finished rows from r on. */
AFF__INLINE void ex_finish_rows(const aff_expert_mat *m, int r, __m256 acc, float *y)
{
    float scale[EX_ROWS];
    for (int i = 0; i < EX_ROWS; i++) scale[i] = aff__row_scale(m, r + i);
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_mul_ps(acc, _mm256_set1_ps(0x1p-9f)), _mm256_loadu_ps(scale)));
}

enum { EX_BLOCK = 128 };

/* Up to four blocks of eight MXFP4 rows: doubled weights and halved scales. */
typedef struct ex_mx {
    _Alignas(32) int8_t w[EX_GROUP / 32][EX_ROWS][32];
    _Alignas(32) float scale[EX_GROUP / 32][EX_ROWS];
} ex_mx;

AFF__INLINE __m256i ex_nibbles(const uint8_t *p)
{
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m128i raw = ex_load_half(p), four = _mm_set1_epi8(15);
    __m128i even = _mm_shuffle_epi8(twice, _mm_and_si128(raw, four));
    __m128i odd = _mm_shuffle_epi8(twice, _mm_and_si128(_mm_srli_epi16(raw, 4), four));
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

/* Lane i: row i times q[0..32): |w| (unsigned) by q with w's sign; pairs stay below 2^15. */
AFF__INLINE __m256i ex_mx_product(const int8_t (*w)[32], const int8_t *q)
{
    __m256i x = ex_load(q), sum[EX_ROWS];
    for (int r = 0; r < EX_ROWS; r++) {
        __m256i a = ex_load(w[r]), b = _mm256_sign_epi8(x, a);
#if defined(__AVX512F__)
        sum[r] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_abs_epi8(a), b);
#else
        sum[r] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(a), b), _mm256_set1_epi16(1));
#endif
    }
    return ex_sums(sum);
}

static void mxfp4_simd(const aff_expert_mat *m, int rows, int cols, int r0, int r1, const int8_t *const *xq,
                       const float *const *xs, int n, float *const *y)
{
    ex_mx g;
    int r = r0;
    for (; r + EX_ROWS <= r1; r += EX_ROWS) {
        __m256 acc[AFF__BATCH_MAX];
        for (int t = 0; t < n; t++) acc[t] = _mm256_setzero_ps();
        for (int k0 = 0; k0 < cols; k0 += EX_GROUP) {
            int blocks = aff__min_int(EX_GROUP, cols - k0) / 32;
            for (int i = 0; i < EX_ROWS; i++) {
                const uint8_t *codes = m->codes + (int64_t)(r + i) * (cols / 2) + k0 / 2;
                const uint8_t *e8m0 = m->fields + (int64_t)(r + i) * (cols / 32) + k0 / 32;
                if (r + 2 * EX_ROWS <= r1)
                    _mm_prefetch((const char *)codes + (int64_t)EX_ROWS * (cols / 2), _MM_HINT_T0);
                for (int b = 0; b < blocks; b++) {
                    _mm256_store_si256((__m256i *)(void *)g.w[b][i], ex_nibbles(codes + 16 * b));
                    g.scale[b][i] = aff__half_e8m0(e8m0[b]);
                }
            }
            for (int t = 0; t < n; t++) {
                __m256 s = _mm256_set1_ps(xs[t][k0 / EX_GROUP]);
                for (int b = 0; b < blocks; b++) {
                    __m256 sum = _mm256_cvtepi32_ps(ex_mx_product(g.w[b], xq[t] + k0 + 32 * b));
                    acc[t] = _mm256_fmadd_ps(sum, _mm256_mul_ps(s, _mm256_load_ps(g.scale[b])), acc[t]);
                }
            }
        }
        for (int t = 0; t < n; t++) _mm256_storeu_ps(y[t] + (r - r0), acc[t]);
    }
    float *rest[AFF__BATCH_MAX];
    for (int t = 0; t < n; t++) rest[t] = y[t] + (r - r0);
    if (r < r1) aff__mxfp4_scalar(m, rows, cols, r, r1, xq, xs, n, rest);
}
#endif
