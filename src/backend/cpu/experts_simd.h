/* experts_simd.h - the integer products of routed experts, included once per instruction set.
 *
 * Eight weight rows at a time are decoded for one quantiser group (128 columns) into a buffer in L1, then multiplied
 * with every activation row. Integer sums are exact, so their order is free; rows are the lanes of the float chain that
 * follows. */
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

/* One group of eight format-34 rows: weights before 2^e and sign, and that factor once per pair of columns. */
typedef struct ex_q2 {
    _Alignas(64) int16_t w[EX_ROWS][EX_GROUP];
    _Alignas(64) int32_t factor[EX_ROWS][EX_GROUP / 2];
} ex_q2;

/* Factor of field bits 0-3 (e, sign), and the byte shuffle of field bit 4 (rotation of each quad by two). */
static const int32_t ex_factor[16] = {1, 2, 4, 8, 16, 32, 64, 128, -1, -2, -4, -8, -16, -32, -64, -128};
#if !defined(__AVX512F__)
static const uint8_t ex_rotation[2][32] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}};
#endif

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

/* 64 columns of one row: 20 bytes of codes, 3 of fields. Table entries come by plain loads: gathers, and indices that
 * go from vector registers through memory, both measured half as fast on Zen 5. */
#if defined(__AVX512F__)
/* Two blocks: eight quads, the first from table half t0 by the codes c0, the others merged in by masked loads. Written
 * out, because compilers otherwise leave a loop with masks made on the way. */
AFF__INLINE __m512i ex_eight_quads(const int16_t (*t0)[4], uint64_t c0, const int16_t (*t1)[4], uint64_t c1)
{
    __m512i v = _mm512_castsi128_si512(ex_quad(t0, c0));
    v = _mm512_mask_broadcastq_epi64(v, 2, ex_quad(t0, c0 >> 10));
    v = _mm512_mask_broadcastq_epi64(v, 4, ex_quad(t0, c0 >> 20));
    v = _mm512_mask_broadcastq_epi64(v, 8, ex_quad(t0, c0 >> 30));
    v = _mm512_mask_broadcastq_epi64(v, 16, ex_quad(t1, c1));
    v = _mm512_mask_broadcastq_epi64(v, 32, ex_quad(t1, c1 >> 10));
    v = _mm512_mask_broadcastq_epi64(v, 64, ex_quad(t1, c1 >> 20));
    return _mm512_mask_broadcastq_epi64(v, 128, ex_quad(t1, c1 >> 30));
}

/* Rotation and factor of two blocks, whose fields are at bits `by` of the lanes. */
AFF__INLINE void ex_finish(__m512i v, __m512i field, __m512i by, int16_t *w, int32_t *factor)
{
    field = _mm512_srlv_epi32(field, by);
    __mmask16 rotated = _mm512_test_epi32_mask(field, _mm512_set1_epi32(16));
    _mm512_store_si512(w, _mm512_mask_shuffle_epi32(v, rotated, v, _MM_PERM_CDAB));
    _mm512_store_si512(factor, _mm512_permutexvar_epi32(field, _mm512_loadu_si512(ex_factor)));
}

AFF__INLINE void ex_decode64(const uint8_t *codes, const uint8_t *fields, const int16_t (*table)[1024][4], int16_t *w,
                             int32_t *factor)
{
    const __m512i low = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 6, 6);
    uint32_t f = ex_fields(fields);
    __m512i field = _mm512_set1_epi32((int)f);
    __m512i a = ex_eight_quads(table[f >> 5 & 1], ex_codes(codes, 0), table[f >> 11 & 1], ex_codes(codes, 1));
    __m512i b = ex_eight_quads(table[f >> 17 & 1], ex_codes(codes, 2), table[f >> 23], ex_codes(codes, 3));
    ex_finish(a, field, low, w, factor);
    ex_finish(b, field, _mm512_add_epi32(low, _mm512_set1_epi32(12)), w + 32, factor + 16);
}
#else
AFF__INLINE void ex_decode64(const uint8_t *codes, const uint8_t *fields, const int16_t (*table)[1024][4], int16_t *w,
                             int32_t *factor)
{
    uint32_t field = ex_fields(fields);
    for (int b = 0; b < 4; b++, field >>= 6) {
        const int16_t(*t)[4] = table[field >> 5 & 1];
        uint64_t bits = ex_codes(codes, b);
        __m256i v = _mm256_set_m128i(_mm_unpacklo_epi64(ex_quad(t, bits >> 20), ex_quad(t, bits >> 30)),
                                     _mm_unpacklo_epi64(ex_quad(t, bits), ex_quad(t, bits >> 10)));
        v = _mm256_shuffle_epi8(v, ex_load(ex_rotation[field >> 4 & 1]));
        _mm256_store_si256((__m256i *)(void *)(w + 16 * b), v);
        _mm256_store_si256((__m256i *)(void *)(factor + 8 * b), _mm256_set1_epi32(ex_factor[field & 15]));
    }
}
#endif

/* Lane i: row i of g times q[0..cols), cols 64 or 128. */
AFF__INLINE __m256i ex_q2_product(const ex_q2 *g, const int8_t *q, int cols)
{
    __m256i half[EX_ROWS];
#if defined(__AVX512F__)
    __m512i sum[EX_ROWS];
    for (int r = 0; r < EX_ROWS; r++) sum[r] = _mm512_setzero_si512();
    for (int k = 0; k < cols; k += 32) {
        __m512i x = _mm512_cvtepi8_epi16(ex_load(q + k));
        for (int r = 0; r < EX_ROWS; r++) {
            __m512i p = _mm512_madd_epi16(_mm512_load_si512(g->w[r] + k), x);
            sum[r] = _mm512_add_epi32(sum[r], _mm512_mullo_epi32(p, _mm512_load_si512(g->factor[r] + k / 2)));
        }
    }
    for (int r = 0; r < EX_ROWS; r++)
        half[r] = _mm256_add_epi32(_mm512_castsi512_si256(sum[r]), _mm512_extracti64x4_epi64(sum[r], 1));
#else
    for (int r = 0; r < EX_ROWS; r++) half[r] = _mm256_setzero_si256();
    for (int k = 0; k < cols; k += 16) {
        __m256i x = _mm256_cvtepi8_epi16(ex_load_half(q + k));
        for (int r = 0; r < EX_ROWS; r++) {
            __m256i p = _mm256_madd_epi16(ex_load(g->w[r] + k), x);
            half[r] = _mm256_add_epi32(half[r], _mm256_mullo_epi32(p, ex_load(g->factor[r] + k / 2)));
        }
    }
#endif
    return ex_sums(half);
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

/* At most EX_BLOCK rows: columns outside, so that codes and fields are read as they lie; the chains of all rows wait in
 * acc. */
enum { EX_BLOCK = 128 };

AFF__INLINE void ex_q2_block(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0,
                             int octets, const int8_t *const *xq, const float *const *xs, int n, float *const *y,
                             int at)
{
    ex_q2 g;
    __m256 acc[EX_BLOCK / EX_ROWS][AFF__ROWS_MAX];
    for (int o = 0; o < octets; o++)
        for (int t = 0; t < n; t++) acc[o][t] = _mm256_setzero_ps();
    for (int k0 = 0; k0 < cols; k0 += EX_GROUP) {
        int width = aff__min_int(EX_GROUP, cols - k0);
        for (int o = 0; o < octets; o++) {
            for (int k = 0; k < width; k += 64)
                for (int i = 0; i < EX_ROWS; i++) {
                    int64_t p = (int64_t)((k0 + k) / 64) * rows + r0 + o * EX_ROWS + i;
                    ex_decode64(m->codes + p * 20, m->fields + p * 3, table, g.w[i] + k, g.factor[i] + k / 2);
                }
            if (k0 + 2 * EX_GROUP <= cols) ex_prefetch(m, (int64_t)(k0 / 64 + 2) * rows + r0 + o * EX_ROWS, rows);
            for (int t = 0; t < n; t++) {
                __m256 sum = _mm256_cvtepi32_ps(ex_q2_product(&g, xq[t] + k0, width));
                acc[o][t] = _mm256_fmadd_ps(sum, _mm256_set1_ps(xs[t][k0 / EX_GROUP]), acc[o][t]);
            }
        }
    }
    for (int o = 0; o < octets; o++) {
        float scale[EX_ROWS];
        for (int i = 0; i < EX_ROWS; i++) scale[i] = aff__row_scale(m, r0 + o * EX_ROWS + i);
        for (int t = 0; t < n; t++)
            _mm256_storeu_ps(y[t] + at + o * EX_ROWS,
                             _mm256_mul_ps(_mm256_mul_ps(acc[o][t], _mm256_set1_ps(0x1p-9f)), _mm256_loadu_ps(scale)));
    }
}

static void q2p875_simd(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0, int r1,
                        const int8_t *const *xq, const float *const *xs, int n, float *const *y)
{
    int r = r0;
    while (r1 - r >= EX_ROWS) {
        int octets = aff__min_int(EX_BLOCK, r1 - r) / EX_ROWS;
        ex_q2_block(m, table, rows, cols, r, octets, xq, xs, n, y, r - r0);
        r += octets * EX_ROWS;
    }
    if (r == r1) return;
    float *rest[AFF__ROWS_MAX];
    for (int t = 0; t < n; t++) rest[t] = y[t] + (r - r0);
    aff__q2p875_scalar(m, table, rows, cols, r, r1, xq, xs, n, rest);
}

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
        __m256 acc[AFF__ROWS_MAX];
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
    float *rest[AFF__ROWS_MAX];
    for (int t = 0; t < n; t++) rest[t] = y[t] + (r - r0);
    if (r < r1) aff__mxfp4_scalar(m, rows, cols, r, r1, xq, xs, n, rest);
}
