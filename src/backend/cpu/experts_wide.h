/* experts_wide.h - the product of format-34 experts for AVX-512, defined in kernels.h. Exact integers, so their order
 * is free.
 *
 * Eight weight rows are the 64-bit lanes: a vector holds the same quad (four columns, one codebook entry) of each, and
 * meets four activations broadcast to all lanes. So a row's sum needs no turning at the end, and the block's sign and
 * 2^e are folded into the 16-bit weights on decoding: 960 * 2^5 still fits, so that blocks with e >= 2 are kept at a
 * quarter of their value and multiplied up after the sum. Blocks with e < 2, rare beside them, go into a second set of
 * vectors that is used when needed. */
#include "backend/cpu/experts_simd.h"

enum { EW_QUADS = EX_GROUP / 4, EW_ACTS = 4 /* activation rows that share a load of weights */ };

typedef struct ew_group {
    __m512i high[EW_QUADS], low[EW_QUADS];
    bool has_low;
} ew_group;

/* By field bits 0-3 (e, sign): twice the 16-bit factor, for e >= 2 and for the others. */
#define EW_PAIR(v) (((v)&0xffff) * 0x10001)
static const uint32_t ew_high[16] = {
    0, 0, EW_PAIR(1u),  EW_PAIR(2u),  EW_PAIR(4u),  EW_PAIR(8u),  EW_PAIR(16u),  EW_PAIR(32u),
    0, 0, EW_PAIR(-1u), EW_PAIR(-2u), EW_PAIR(-4u), EW_PAIR(-8u), EW_PAIR(-16u), EW_PAIR(-32u)};
static const uint32_t ew_low[16] = {EW_PAIR(1u),  EW_PAIR(2u),  0, 0, 0, 0, 0, 0,
                                    EW_PAIR(-1u), EW_PAIR(-2u), 0, 0, 0, 0, 0, 0};

/* The 24 field bits of eight rows, each in both halves of its lane. */
AFF__INLINE __m512i ew_fields(const uint8_t *p)
{
    const __m512i order =
        _mm512_setr_epi64(0x0002010000020100, 0x0005040300050403, 0x0008070600080706, 0x000b0a09000b0a09,
                          0x000e0d0c000e0d0c, 0x0011100f0011100f, 0x0014131200141312, 0x0017161500171615);
    return _mm512_maskz_permutexvar_epi8(0x7777777777777777u, order, _mm512_maskz_loadu_epi8(0xffffff, p));
}

/* Values that the compiler shall keep as they are: it otherwise makes the masks anew at every use, and splits addresses
 * into more additions than the processor needs. */
#define EW_KEEP_MASK(m) __asm__("" : "+k"(m))
#define EW_KEEP(p)      __asm__("" : "+r"(p))

/* Where the entries of the row's variant begin: bit `row` of `variant`. */
AFF__INLINE const int16_t (*ew_entries(const int16_t (*table)[1024][4], unsigned variant, int row))[4]
{
    const int16_t(*t)[4] = variant >> row & 1 ? table[1] : table[0];
    EW_KEEP(t);
    return t;
}

/* Rows 0 and 1: the four quads of a block to lanes 0 and 1 of v[]. */
AFF__INLINE void ew_first_rows(const int16_t (*t0)[4], uint64_t b0, const int16_t (*t1)[4], uint64_t b1, __m512i v[4])
{
    for (int q = 0; q < 4; q++)
        v[q] = _mm512_castsi128_si512(_mm_castps_si128(_mm_loadh_pi(
            _mm_castsi128_ps(ex_quad(t0, b0 >> (10 * q))), (const __m64 *)(const void *)t1[b1 >> (10 * q) & 1023])));
}

AFF__INLINE void ew_row(const int16_t (*t)[4], uint64_t bits, __mmask8 lane, __m512i v[4])
{
    for (int q = 0; q < 4; q++) v[q] = _mm512_mask_broadcastq_epi64(v[q], lane, ex_quad(t, bits >> (10 * q)));
}

/* Block b (16 columns) of eight rows: quads 4b.. of the group. lane: the masks of lanes 2..7. */
AFF__INLINE void ew_decode16(const uint8_t *codes, __m512i fields, int b, const int16_t (*table)[1024][4],
                             const __mmask8 lane[6], ew_group *g, int at)
{
    const __m512i field = _mm512_srli_epi32(fields, (unsigned)(6 * b));
    const unsigned variant = _mm512_test_epi64_mask(field, _mm512_set1_epi64(32));
    __m512i v[4];
    ew_first_rows(ew_entries(table, variant, 0), ex_codes(codes, b), ew_entries(table, variant, 1),
                  ex_codes(codes + 20, b), v);
    ew_row(ew_entries(table, variant, 2), ex_codes(codes + 40, b), lane[0], v);
    ew_row(ew_entries(table, variant, 3), ex_codes(codes + 60, b), lane[1], v);
    ew_row(ew_entries(table, variant, 4), ex_codes(codes + 80, b), lane[2], v);
    ew_row(ew_entries(table, variant, 5), ex_codes(codes + 100, b), lane[3], v);
    ew_row(ew_entries(table, variant, 6), ex_codes(codes + 120, b), lane[4], v);
    ew_row(ew_entries(table, variant, 7), ex_codes(codes + 140, b), lane[5], v);
    const __mmask16 rotated = _mm512_test_epi32_mask(field, _mm512_set1_epi32(16));
    const __m512i factor = _mm512_permutexvar_epi32(field, _mm512_loadu_si512(ew_high));
    for (int q = 0; q < 4; q++) {
        v[q] = _mm512_mask_shuffle_epi32(v[q], rotated, v[q], _MM_PERM_CDAB);
        g->high[at + q] = _mm512_mullo_epi16(v[q], factor);
    }
    if (!_mm512_testn_epi32_mask(field, _mm512_set1_epi32(6))) return;
    if (!g->has_low) memset(g->low, 0, sizeof g->low);
    g->has_low = true;
    const __m512i small = _mm512_permutexvar_epi32(field, _mm512_loadu_si512(ew_low));
    for (int q = 0; q < 4; q++) g->low[at + q] = _mm512_mullo_epi16(v[q], small);
}

/* sum[t] += lanes of w . x[t] for T activation rows over `quads` quads, a multiple of 4. */
AFF__INLINE void ew_dot(const __m512i *w, int quads, int T, const int16_t (*x)[EX_GROUP], __m512i sum[EW_ACTS])
{
    enum { CHAINS = 4 };
    const int chains = T > 2 ? 1 : CHAINS / T; /* enough of them to hide the instruction's latency */
    __m512i part[EW_ACTS][CHAINS];
    for (int t = 0; t < T; t++)
        for (int c = 0; c < chains; c++) part[t][c] = c ? _mm512_setzero_si512() : sum[t];
    for (int k = 0; k < quads; k += chains)
        for (int c = 0; c < chains; c++)
            for (int t = 0; t < T; t++) {
                int64_t four;
                memcpy(&four, &x[t][4 * (k + c)], 8);
                part[t][c] = _mm512_dpwssd_epi32(part[t][c], w[k + c], _mm512_set1_epi64(four));
            }
    for (int t = 0; t < T; t++) {
        sum[t] = part[t][0];
        for (int c = 1; c < chains; c++) sum[t] = _mm512_add_epi32(sum[t], part[t][c]);
    }
}

/* The same of two groups of weights for EW_ACTS activation rows: each load of activations serves both. */
AFF__INLINE void ew_dot_both(const __m512i *w, const __m512i *v, int quads, const int16_t (*x)[EX_GROUP], __m512i sum[EW_ACTS], __m512i rest[EW_ACTS])
{
    for (int k = 0; k < quads; k++)
        for (int t = 0; t < EW_ACTS; t++) {
            int64_t four;
            memcpy(&four, &x[t][4 * k], 8);
            const __m512i a = _mm512_set1_epi64(four);
            sum[t] = _mm512_dpwssd_epi32(sum[t], w[k], a), rest[t] = _mm512_dpwssd_epi32(rest[t], v[k], a);
        }
}

/* acc[t] = fmaf((float)(row sums), s[t], acc[t]); sum: of what g holds at a quarter. */
AFF__INLINE void ew_finish(const ew_group *g, int quads, int T, const int16_t (*x)[EX_GROUP], const float *s, __m512i sum[EW_ACTS], __m256 *acc)
{
    for (int t = 0; t < T; t++) sum[t] = _mm512_slli_epi32(sum[t], 2);
    if (g->has_low) ew_dot(g->low, quads, T, x, sum);
    for (int t = 0; t < T; t++) {
        const __m256i rows = _mm512_cvtepi64_epi32(_mm512_add_epi32(sum[t], _mm512_srli_epi64(sum[t], 32)));
        acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(rows), _mm256_set1_ps(s[t]), acc[t]);
    }
}

AFF__INLINE void ew_product(const ew_group *g, int quads, int T, const int16_t (*x)[EX_GROUP], const float *s,
                            __m256 *acc)
{
    __m512i sum[EW_ACTS];
    for (int t = 0; t < T; t++) sum[t] = _mm512_setzero_si512();
    ew_dot(g->high, quads, T, x, sum);
    ew_finish(g, quads, T, x, s, sum, acc);
}

AFF__INLINE void ew_product_both(const ew_group *g, int quads, const int16_t (*x)[EX_GROUP], const float *s, __m256 *acc, __m256 *next)
{
    __m512i sum[EW_ACTS], rest[EW_ACTS];
    for (int t = 0; t < EW_ACTS; t++) sum[t] = rest[t] = _mm512_setzero_si512();
    ew_dot_both(g[0].high, g[1].high, quads, x, sum, rest);
    ew_finish(&g[0], quads, EW_ACTS, x, s, sum, acc);
    ew_finish(&g[1], quads, EW_ACTS, x, s, rest, next);
}

/* The quantiser group's activations as 16 bits, and its scales. */
AFF__INLINE void ew_activations(const int8_t *const *xq, const float *const *xs, int n, int k0, int width,
                                int16_t (*x)[EX_GROUP], float *s)
{
    for (int t = 0; t < n; t++) {
        for (int k = 0; k < width; k += 32)
            _mm512_storeu_si512(&x[t][k], _mm512_cvtepi8_epi16(ex_load(xq[t] + k0 + k)));
        s[t] = xs[t][k0 / EX_GROUP];
    }
}

/* `width` columns from k0 on of the eight rows from r on. */
AFF__INLINE void ew_decode(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r, int k0, int width,
                           const __mmask8 lane[6], ew_group *g)
{
    g->has_low = false;
    for (int k = 0; k < width; k += 64) {
        const int64_t p = (int64_t)((k0 + k) / 64) * rows + r;
        const __m512i fields = ew_fields(m->fields + p * 3);
        const uint8_t *codes = m->codes + p * 20;
        ew_decode16(codes, fields, 0, table, lane, g, k / 4);
        ew_decode16(codes, fields, 1, table, lane, g, k / 4 + 4);
        ew_decode16(codes, fields, 2, table, lane, g, k / 4 + 8);
        ew_decode16(codes, fields, 3, table, lane, g, k / 4 + 12);
    }
    if (k0 + 2 * EX_GROUP <= cols) ex_prefetch(m, (int64_t)(k0 / 64 + 2) * rows + r, rows);
}

/* At most EX_BLOCK rows: columns outside, so that codes and fields are read as they lie; the chains of all rows wait in
 * acc. Two groups of eight rows at a time when activation rows are many. */
static void ew_rows(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0, int octets,
                    const int8_t *const *xq, const float *const *xs, int n, float *const *y, int at)
{
    ew_group g[2];
    __m256 acc[EX_BLOCK / EX_ROWS][AFF__BATCH_MAX];
    int16_t x[AFF__BATCH_MAX][EX_GROUP];
    float s[AFF__BATCH_MAX];
    __mmask8 lane[6] = {4, 8, 16, 32, 64, 128};
    for (int i = 0; i < 6; i++) EW_KEEP_MASK(lane[i]);
    for (int o = 0; o < octets; o++)
        for (int t = 0; t < n; t++) acc[o][t] = _mm256_setzero_ps();
    for (int k0 = 0; k0 < cols; k0 += EX_GROUP) {
        const int width = aff__min_int(EX_GROUP, cols - k0);
        ew_activations(xq, xs, n, k0, width, x, s);
        for (int o = 0, some; o < octets; o += some) {
            some = n >= EW_ACTS ? aff__min_int(2, octets - o) : 1;
            for (int i = 0; i < some; i++) ew_decode(m, table, rows, cols, r0 + (o + i) * EX_ROWS, k0, width, lane, &g[i]);
            int both = 0;
            for (; some == 2 && both + EW_ACTS <= n; both += EW_ACTS)
                ew_product_both(g, width / 4, x + both, s + both, acc[o] + both, acc[o + 1] + both);
            for (int i = 0; i < some; i++) {
                int t = both;
                for (; t + EW_ACTS <= n; t += EW_ACTS) ew_product(&g[i], width / 4, EW_ACTS, x + t, s + t, acc[o + i] + t);
                if (n - t >= 2) ew_product(&g[i], width / 4, 2, x + t, s + t, acc[o + i] + t), t += 2;
                if (t < n) ew_product(&g[i], width / 4, 1, x + t, s + t, acc[o + i] + t);
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
        ew_rows(m, table, rows, cols, r, octets, xq, xs, n, y, r - r0);
        r += octets * EX_ROWS;
    }
    if (r == r1) return;
    float *rest[AFF__BATCH_MAX];
    for (int t = 0; t < n; t++) rest[t] = y[t] + (r - r0);
    aff__q2p875_scalar(m, table, rows, cols, r, r1, xq, xs, n, rest);
}
