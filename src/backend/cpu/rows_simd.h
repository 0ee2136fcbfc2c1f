/* rows_simd.h - rows of a sequence's state back to float32 (quant/rows.h) over simd16.h, included once per instruction
 * set. */
#include "backend/cpu/simd16.h"

/* 16 bytes of nibble pairs times s: the low nibbles are columns 0..15, the high ones 16..31. */
AFF__INLINE void e2m1_load32(const uint8_t *p, v16 s, float *x)
{
#if defined(__AVX512F__)
    __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    v16 table = v16_load(aff__e2m1_table); /* the permutation takes the low four bits of an index */
    v16_store(x, v16_mul(_mm512_permutexvar_ps(v, table), s));
    v16_store(x + 16, v16_mul(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table), s));
#else
    __m256 table = _mm256_loadu_ps(aff__e2m1_table);
    __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    for (int i = 0; i < 2; i++) {
        __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p + 8 * i)));
        __m256 lo = _mm256_permutevar8x32_ps(table, v);
        __m256 hi = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4));
        lo = _mm256_or_ps(lo, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(v, 28), sign)));
        hi = _mm256_or_ps(hi, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(v, 24), sign)));
        _mm256_storeu_ps(x + 8 * i, _mm256_mul_ps(lo, i ? s.h : s.l));
        _mm256_storeu_ps(x + 16 + 8 * i, _mm256_mul_ps(hi, i ? s.h : s.l));
    }
#endif
}

static void row_simd(const aff_rowfmt *f, const uint8_t *row, float *x)
{
    const uint8_t *scale = row + f->scales;
    if (f->group == AFF__A8_GROUP) {
        e4m3_decoder d = e4m3_setup();
        for (int i = 0; i < f->coded; i += 32) {
            v16 a, b, s = v16_set1(aff__e8m0_to_f32(scale[i / AFF__A8_GROUP]));
            e4m3_load32(&d, row + i, &a, &b);
            v16_store(x + i, v16_mul(a, s));
            v16_store(x + i + 16, v16_mul(b, s));
        }
    } else if (f->group == AFF__A4_GROUP) {
        for (int i = 0; i < f->coded; i += 32)
            e2m1_load32(row + i / 2, v16_set1(aff__e8m0_to_f32(scale[i / AFF__A4_GROUP])), x + i);
    }
    if (f->tail > f->floats) memcpy(x + f->coded, row + f->floats, (size_t)(f->tail - f->floats));
    if (!f->bf16) return;
    const uint8_t *tail = row + f->tail;
    float *y = x + f->n - f->bf16;
    int i = 0;
    for (; i + 16 <= f->bf16; i += 16) v16_store(y + i, v16_load_bf16((const uint16_t *)(const void *)(tail + 2 * i)));
    for (; i < f->bf16; i++) y[i] = aff__bf16_to_f32((uint16_t)(tail[2 * i] | tail[2 * i + 1] << 8));
}
