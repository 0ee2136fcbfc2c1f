/* experts_narrow.h - the product of format-34 experts for AVX2, defined in kernels.h.
 *
 * Eight weight rows at a time are decoded for one quantiser group (128 columns) into a buffer in L1, then multiplied
 * with every activation row. Integer sums are exact, so their order is free; rows are the lanes of the float chain that
 * follows. */
#include "backend/cpu/experts_simd.h"

/* One group of eight format-34 rows: weights before 2^e and sign, and that factor once per pair of columns. */
typedef struct ex_q2 {
    _Alignas(64) int16_t w[EX_ROWS][EX_GROUP];
    _Alignas(64) int32_t factor[EX_ROWS][EX_GROUP / 2];
} ex_q2;

/* Factor of field bits 0-3 (e, sign), and the byte shuffle of field bit 4 (rotation of each quad by two). */
static const int32_t ex_factor[16] = {1, 2, 4, 8, 16, 32, 64, 128, -1, -2, -4, -8, -16, -32, -64, -128};
static const uint8_t ex_rotation[2][32] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}};

/* 64 columns of one row: 20 bytes of codes, 3 of fields. Table entries come by plain loads: gathers, and indices that
 * go from vector registers through memory, both measured half as fast on Zen 5. */
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

/* Lane i: row i of g times q[0..cols), cols 64 or 128. */
AFF__INLINE __m256i ex_q2_product(const ex_q2 *g, const int8_t *q, int cols)
{
    __m256i half[EX_ROWS];
    for (int r = 0; r < EX_ROWS; r++) half[r] = _mm256_setzero_si256();
    for (int k = 0; k < cols; k += 16) {
        __m256i x = _mm256_cvtepi8_epi16(ex_load_half(q + k));
        for (int r = 0; r < EX_ROWS; r++) {
            __m256i p = _mm256_madd_epi16(ex_load(g->w[r] + k), x);
            half[r] = _mm256_add_epi32(half[r], _mm256_mullo_epi32(p, ex_load(g->factor[r] + k / 2)));
        }
    }
    return ex_sums(half);
}

/* At most EX_BLOCK rows: columns outside, so that codes and fields are read as they lie; the chains of all rows wait in
 * acc. */
static void ex_q2_block(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0,
                        int octets, const int8_t *const *xq, const float *const *xs, int n, float *const *y, int at)
{
    ex_q2 g;
    __m256 acc[EX_BLOCK / EX_ROWS][AFF__BATCH_MAX];
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
    for (int o = 0; o < octets; o++)
        for (int t = 0; t < n; t++) ex_finish_rows(m, r0 + o * EX_ROWS, acc[o][t], y[t] + at + o * EX_ROWS);
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
    float *rest[AFF__BATCH_MAX];
    for (int t = 0; t < n; t++) rest[t] = y[t] + (r - r0);
    aff__q2p875_scalar(m, table, rows, cols, r, r1, xq, xs, n, rest);
}
