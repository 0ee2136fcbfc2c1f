/* pairs_simd.h - products of bf16 pairs over simd16.h, included once per instruction set: VDPBF16PS in AVX-512; in AVX2 two fused
 * multiply-adds of float32 with subnormals off, which is the same (kernels.h).
 *
 * Up to PR_FEW activation rows: weights are decoded in registers and used at once. More: a panel of columns of a few weight rows is decoded
 * into a buffer in the first cache and multiplied with all activation rows, whose part of the panel stays there too; the lanes of every
 * (weight row, activation row) wait in the second. */
#include "backend/cpu/matmul_simd.h"
#include "backend/cpu/pairs.h"

#if defined(__AVX512F__)
typedef __m512i p32; /* 32 columns of bf16; dword i holds columns 2i (low) and 2i + 1 */
enum { PR_ROWS = 4, PR_FEW = 4, PR_TILE = 6 };
#define PR_APART static

AFF__INLINE v16 p32_dot(v16 acc, p32 a, p32 b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
AFF__INLINE p32 p32_load(const uint16_t *p)
{
    return _mm512_loadu_si512(p);
}
AFF__INLINE void p32_hold(p32 *a)
{
    __asm__("" : "+v"(*a));
}
AFF__INLINE unsigned pr_flush_begin(void)
{
    return 0;
}
AFF__INLINE void pr_flush_end(unsigned was)
{
    (void)was;
}

/* E4M3 times a power of two as bf16: the value's upper and lower bytes by its seven lower bits. */
typedef struct pr_table {
    __m512i low[2], high[2];
} pr_table;
typedef struct pr_decoder {
    __m512i order, word[4], even, odd, sign;
} pr_decoder;

#define PR_EIGHT(X, i) X(i), X((i) + 1), X((i) + 2), X((i) + 3), X((i) + 4), X((i) + 5), X((i) + 6), X((i) + 7)
#define PR_SIXTY_FOUR(X, i)                                                                                                                 \
    PR_EIGHT(X, i), PR_EIGHT(X, (i) + 8), PR_EIGHT(X, (i) + 16), PR_EIGHT(X, (i) + 24), PR_EIGHT(X, (i) + 32), PR_EIGHT(X, (i) + 40),       \
        PR_EIGHT(X, (i) + 48), PR_EIGHT(X, (i) + 56)
#define PR_ORDER(i) ((i) / 16 * 8 + (i) % 8 + (i) % 16 / 8 * 32)
#define PR_EVEN(i)  (2 * (i))
/* E4M3 as bf16: m * 2^-9 first; from 8 on the three fraction bits and the exponent only move. */
#define PR_WORD(i) ((i) < 8 ? PR_TINY((i) & 7) : (i) == 127 ? 0x7fc0 : ((i) << 4) + (120 << 7))
#define PR_TINY(m) ((m) == 0 ? 0 : (m) == 1 ? 0x3b00 : (m) < 4 ? 0x3b80 + ((m) - 2) * 0x40 : 0x3c00 + ((m) - 4) * 0x20)
static const _Alignas(64) uint8_t pr_order[64] = {PR_SIXTY_FOUR(PR_ORDER, 0)}, pr_even[64] = {PR_SIXTY_FOUR(PR_EVEN, 0)};
static const _Alignas(64) uint16_t pr_word[128] = {PR_SIXTY_FOUR(PR_WORD, 0), PR_SIXTY_FOUR(PR_WORD, 64)};

AFF__INLINE pr_decoder pr_setup(void)
{
    pr_decoder d = {.order = _mm512_load_si512(pr_order), .even = _mm512_load_si512(pr_even), .sign = _mm512_set1_epi8((char)0x80)};
    d.odd = _mm512_or_si512(d.even, _mm512_set1_epi8(1));
    for (int i = 0; i < 4; i++) d.word[i] = _mm512_load_si512(pr_word + 32 * i);
    return d;
}

AFF__INLINE pr_table pr_table_from(const pr_decoder *d, const __m512i word[4])
{
    return (pr_table){{_mm512_permutex2var_epi8(word[0], d->even, word[1]), _mm512_permutex2var_epi8(word[2], d->even, word[3])},
                      {_mm512_permutex2var_epi8(word[0], d->odd, word[1]), _mm512_permutex2var_epi8(word[2], d->odd, word[3])}};
}
/* Where some values leave the range of normal numbers. */
static __attribute__((noinline, cold)) pr_table pr_odd_table(const pr_decoder *d, uint8_t scale)
{
    _Alignas(64) uint16_t w[128];
    for (int i = 0; i < 128; i++) w[i] = (uint16_t)(aff__f32_bits(aff__flush(aff__e4m3_to_f32((uint8_t)i) * aff__e8m0_to_f32(scale))) >> 16);
    const __m512i word[4] = {_mm512_load_si512(w), _mm512_load_si512(w + 32), _mm512_load_si512(w + 64), _mm512_load_si512(w + 96)};
    return pr_table_from(d, word);
}
AFF__INLINE pr_table pr_table_of(const pr_decoder *d, uint8_t scale)
{
    if (__builtin_expect(scale < 10 || scale > 246, 0)) return pr_odd_table(d, scale);
    const __m512i up = _mm512_set1_epi16((short)((scale - 127) * 128));
    const __m512i word[4] = {_mm512_mask_add_epi16(d->word[0], 0xfffffffeu, d->word[0], up), _mm512_add_epi16(d->word[1], up),
                             _mm512_add_epi16(d->word[2], up), _mm512_mask_add_epi16(d->word[3], 0x7fffffffu, d->word[3], up)}; /* not zero, not NaN */
    return pr_table_from(d, word);
}

AFF__INLINE void pr_halves(const pr_decoder *d, const pr_table *t, __m512i raw, __m512i *low, __m512i *high)
{
    raw = _mm512_permutexvar_epi8(d->order, raw);
    *low = _mm512_permutex2var_epi8(t->low[0], raw, t->low[1]);
    const __m512i mag = _mm512_permutex2var_epi8(t->high[0], raw, t->high[1]);
    *high = _mm512_ternarylogic_epi64(mag, raw, d->sign, 0xf8); /* mag | (raw & sign) */
}
AFF__INLINE p32 pr_fp8(const pr_decoder *d, const pr_table *t, const uint8_t *p)
{
    __m512i low, high;
    pr_halves(d, t, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)p)), &low, &high);
    return _mm512_unpacklo_epi8(low, high);
}
/* 64 columns. */
AFF__INLINE void pr_fp8_twice(const pr_decoder *d, const pr_table *t, const uint8_t *p, p32 *a, p32 *b)
{
    __m512i low, high;
    pr_halves(d, t, _mm512_loadu_si512(p), &low, &high);
    *a = _mm512_unpacklo_epi8(low, high), *b = _mm512_unpackhi_epi8(low, high);
}

#else
typedef struct p32 {
    v16 even, odd;
} p32;
enum { PR_ROWS = 2, PR_FEW = 2, PR_TILE = 2 };
#define PR_APART static __attribute__((noinline)) /* nothing may move out of where subnormals are off */

AFF__INLINE v16 p32_dot(v16 acc, p32 a, p32 b)
{
    return v16_fma(a.even, b.even, v16_fma(a.odd, b.odd, acc));
}
AFF__INLINE p32 p32_load(const uint16_t *p)
{
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    const __m256i l = _mm256_loadu_si256((const __m256i *)(const void *)p), h = _mm256_loadu_si256((const __m256i *)(const void *)(p + 16));
    return (p32){{_mm256_castsi256_ps(_mm256_slli_epi32(l, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(h, 16))},
                 {_mm256_castsi256_ps(_mm256_and_si256(l, upper)), _mm256_castsi256_ps(_mm256_and_si256(h, upper))}};
}
AFF__INLINE void p32_hold(p32 *a)
{
    v16_hold(&a->even), v16_hold(&a->odd);
}
AFF__INLINE unsigned pr_flush_begin(void)
{
    const unsigned was = _mm_getcsr();
    _mm_setcsr(was | 0x8040); /* flush to zero, subnormals are zeros */
    return was;
}
AFF__INLINE void pr_flush_end(unsigned was)
{
    _mm_setcsr(was);
}

/* Through binary16 as in simd16.h; the power of two in two factors, of which neither is subnormal nor too large. */
typedef struct pr_table {
    __m256 first, second;
} pr_table;
typedef struct pr_decoder {
    int unused;
} pr_decoder;
AFF__INLINE pr_decoder pr_setup(void)
{
    return (pr_decoder){0};
}
AFF__INLINE pr_table pr_table_of(const pr_decoder *d, uint8_t scale)
{
    (void)d;
    return (pr_table){_mm256_set1_ps(scale ? 256.0f : 128.0f), _mm256_set1_ps(scale ? aff__e8m0_to_f32(scale) : 0x1p-126f)};
}
/* 16 words, each a code in its lower byte. */
AFF__INLINE v16 pr_fp8_words(const pr_table *t, __m256i v)
{
    const __m256i low = _mm256_set1_epi16(127), nan = _mm256_cmpeq_epi16(_mm256_and_si256(v, low), low);
    __m256i h = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), _mm256_set1_epi16((short)0xbf80));
    h = _mm256_or_si256(h, nan);
    const __m256 a = _mm256_cvtph_ps(_mm256_castsi256_si128(h)), b = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
    return (v16){_mm256_mul_ps(_mm256_mul_ps(a, t->first), t->second), _mm256_mul_ps(_mm256_mul_ps(b, t->first), t->second)};
}
AFF__INLINE p32 pr_fp8(const pr_decoder *d, const pr_table *t, const uint8_t *p)
{
    (void)d;
    const __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return (p32){pr_fp8_words(t, _mm256_and_si256(v, _mm256_set1_epi16(255))), pr_fp8_words(t, _mm256_srli_epi16(v, 8))};
}
AFF__INLINE void pr_fp8_twice(const pr_decoder *d, const pr_table *t, const uint8_t *p, p32 *a, p32 *b)
{
    *a = pr_fp8(d, t, p), *b = pr_fp8(d, t, p + 32);
}
#endif

enum { PR_PANEL = 1024, PR_STEPS = PR_PANEL / 32, PR_BLOCK = 32 };

/* Columns k..k+31 of a row, zeros past n. */
AFF__INLINE p32 pr_load(aff_dtype d, const pr_decoder *dec, const pr_table *t, const uint8_t *row, int64_t k, int n)
{
    if (k + 32 <= n) return d == AFF_BF16 ? p32_load((const uint16_t *)(const void *)row + k) : pr_fp8(dec, t, row + k);
    _Alignas(64) uint8_t pad[64] = {0};
    memcpy(pad, row + k * mm_size(d), (size_t)(n - k) * (size_t)mm_size(d));
    return d == AFF_BF16 ? p32_load((const uint16_t *)(const void *)pad) : pr_fp8(dec, t, pad);
}

/* Chains of R weight rows by N activation rows over columns k0..k1, one FP8 tile at most. ahead: as in mm_chain. */
AFF__INLINE void pr_cut(aff_dtype d, const pr_decoder *dec, const pr_table *t, int R, int N, const mm_row *row, const uint16_t *const *x, int k0,
                        int k1, int64_t ahead, v16 acc[][PR_FEW])
{
    int k = k0;
    p32 a[PR_ROWS], b[PR_ROWS];
    for (; k + 64 <= k1; k += 64) {
        for (int r = 0; r < R; r++) {
            const uint8_t *p = row[r].data + (int64_t)k * mm_size(d);
            if (ahead)
                for (int i = 0; i < mm_size(d); i++) _mm_prefetch((const char *)p + ahead + 64 * i, _MM_HINT_T0);
            if (d == AFF_BF16)
                a[r] = p32_load((const uint16_t *)(const void *)p), b[r] = p32_load((const uint16_t *)(const void *)p + 32);
            else
                pr_fp8_twice(dec, t, p, &a[r], &b[r]);
        }
        for (int c = 0; c < N; c++) {
            const p32 xa = p32_load(x[c] + k), xb = p32_load(x[c] + k + 32);
            for (int r = 0; r < R; r++) acc[r][c] = p32_dot(p32_dot(acc[r][c], a[r], xa), b[r], xb);
        }
    }
    for (; k < k1; k += 32) {
        for (int r = 0; r < R; r++) {
            if (ahead) _mm_prefetch((const char *)row[r].data + (int64_t)k * mm_size(d) + ahead, _MM_HINT_T0);
            a[r] = pr_load(d, dec, t, row[r].data, k, k1);
        }
        for (int c = 0; c < N; c++) {
            const p32 xa = p32_load(x[c] + k);
            for (int r = 0; r < R; r++) acc[r][c] = p32_dot(acc[r][c], a[r], xa);
        }
    }
}

/* Whether R rows from r on share their tiles' scales. */
AFF__INLINE bool pr_together(aff_dtype d, int R, int r)
{
    return d == AFF_BF16 || r / mm_cut(d) == (r + R - 1) / mm_cut(d);
}

/* lanes[r * ld + t] of R weight rows by N activation rows. */
AFF__INLINE void pr_tile(const aff_weight *w, aff_dtype d, const pr_decoder *dec, int R, int N, int r0, const uint16_t *const *x, v16 *lanes,
                         int ld)
{
    mm_row row[PR_ROWS];
    v16 acc[PR_ROWS][PR_FEW];
    const int64_t ahead = mm_ahead(w, d, R, r0);
    for (int r = 0; r < R; r++) {
        row[r] = mm_row_at(w, d, r0 + r);
        for (int t = 0; t < N; t++) acc[r][t] = v16_zero();
    }
    if (d == AFF_BF16)
        pr_cut(d, dec, NULL, R, N, row, x, 0, w->cols, ahead, acc);
    else
        for (int k = 0; k < w->cols; k += mm_cut(d)) {
            const pr_table t = pr_table_of(dec, row[0].scale[k / mm_cut(d)]);
            pr_cut(d, dec, &t, R, N, row, x, k, aff__min_int(w->cols, k + mm_cut(d)), ahead, acc);
        }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) lanes[r * ld + t] = acc[r][t];
}

AFF__INLINE void pr_few(const aff_weight *w, aff_dtype d, const pr_decoder *dec, int R, int r0, const uint16_t *const *x, int n, v16 *lanes, int ld)
{
    if (n == 1)
        pr_tile(w, d, dec, R, 1, r0, x, lanes, ld);
    else if (n == 2)
        pr_tile(w, d, dec, R, 2, r0, x, lanes, ld);
#if defined(__AVX512F__)
    else if (n == 3)
        pr_tile(w, d, dec, R, 3, r0, x, lanes, ld);
    else
        pr_tile(w, d, dec, R, 4, r0, x, lanes, ld);
#endif
}

/* PR_ROWS decoded rows of a panel (steps of 32 columns from k on) by N activation rows, added to their lanes. */
AFF__INLINE void pr_panel_tile(int N, const p32 (*buf)[PR_STEPS + 1], const uint16_t *const *x, int k, int steps, v16 *lanes, int ld)
{
    v16 acc[PR_ROWS][PR_TILE];
    const uint16_t *xk[PR_TILE];
    for (int t = 0; t < N; t++) {
        xk[t] = x[t] + k;
        for (int r = 0; r < PR_ROWS; r++) acc[r][t] = lanes[r * ld + t];
    }
    for (int s = 0; s < steps; s++) {
        p32 a[PR_ROWS];
        for (int r = 0; r < PR_ROWS; r++) {
            a[r] = buf[r][s];
            p32_hold(&a[r]);
        }
        for (int t = 0; t < N; t++) {
            const p32 xt = p32_load(xk[t] + 32 * s);
            for (int r = 0; r < PR_ROWS; r++) acc[r][t] = p32_dot(acc[r][t], a[r], xt);
        }
    }
    for (int t = 0; t < N; t++)
        for (int r = 0; r < PR_ROWS; r++) lanes[r * ld + t] = acc[r][t];
}

/* Columns k0..k1 of a row to buf: one FP8 tile at most. */
AFF__INLINE void pr_decode_cut(aff_dtype d, const pr_decoder *dec, const pr_table *t, const uint8_t *row, int k0, int k1, int64_t ahead, p32 *buf)
{
    int k = k0;
    for (; k + 64 <= k1; k += 64, buf += 2) {
        const uint8_t *p = row + (int64_t)k * mm_size(d);
        if (ahead)
            for (int i = 0; i < mm_size(d); i++) _mm_prefetch((const char *)p + ahead + 64 * i, _MM_HINT_T0);
        if (d == AFF_BF16)
            buf[0] = p32_load((const uint16_t *)(const void *)p), buf[1] = p32_load((const uint16_t *)(const void *)p + 32);
        else
            pr_fp8_twice(dec, t, p, buf, buf + 1);
    }
    for (; k < k1; k += 32) {
        if (ahead) _mm_prefetch((const char *)row + (int64_t)k * mm_size(d) + ahead, _MM_HINT_T0);
        *buf++ = pr_load(d, dec, t, row, k, k1);
    }
}

/* Columns k0..k1 of PR_ROWS rows; same: their tiles are the same. */
AFF__INLINE void pr_decode(const aff_weight *w, aff_dtype d, const pr_decoder *dec, int r0, bool same, int k0, int k1, p32 (*buf)[PR_STEPS + 1])
{
    const int64_t ahead = mm_ahead(w, d, PR_ROWS, r0);
    mm_row row[PR_ROWS];
    for (int r = 0; r < PR_ROWS; r++) row[r] = mm_row_at(w, d, r0 + r);
    if (d == AFF_BF16) {
        for (int r = 0; r < PR_ROWS; r++) pr_decode_cut(d, dec, NULL, row[r].data, k0, k1, ahead, buf[r]);
        return;
    }
    for (int k = k0; k < k1; k += mm_cut(d)) {
        pr_table t = pr_table_of(dec, row[0].scale[k / mm_cut(d)]);
        for (int r = 0; r < PR_ROWS; r++) {
            if (!same) t = pr_table_of(dec, row[r].scale[k / mm_cut(d)]);
            pr_decode_cut(d, dec, &t, row[r].data, k, aff__min_int(k1, k + mm_cut(d)), ahead, buf[r] + (k - k0) / 32);
        }
    }
}

/* rows, a multiple of PR_ROWS, by many activation rows: panels of columns outside, so that the activations of one stay in the first cache for all rows. */
AFF__INLINE void pr_many(const aff_weight *w, aff_dtype d, const pr_decoder *dec, int rows, int r0, const uint16_t *const *x, int n, v16 *lanes)
{
    p32 buf[PR_ROWS][PR_STEPS + 1];
    for (int i = 0; i < rows * n; i++) lanes[i] = v16_zero();
    for (int k0 = 0; k0 < w->cols; k0 += PR_PANEL) {
        const int k1 = aff__min_int(w->cols, k0 + PR_PANEL), steps = aff__ceil_div(k1 - k0, 32);
        for (int r = 0; r < rows; r += PR_ROWS) {
            v16 *at = lanes + (int64_t)r * n;
            int t = 0;
            pr_decode(w, d, dec, r0 + r, pr_together(d, PR_ROWS, r0 + r), k0, k1, buf);
            for (; t + PR_TILE <= n; t += PR_TILE) pr_panel_tile(PR_TILE, buf, x + t, k0, steps, at + t, n);
            if (PR_TILE > 4 && t + 4 <= n) pr_panel_tile(4, buf, x + t, k0, steps, at + t, n), t += 4;
            for (; t + 2 <= n; t += 2) pr_panel_tile(2, buf, x + t, k0, steps, at + t, n);
            if (t < n) pr_panel_tile(1, buf, x + t, k0, steps, at + t, n);
        }
    }
}

/* lanes[r * n + t] of `rows` <= PR_BLOCK rows from r0 on. */
AFF__INLINE void pr_rows(const aff_weight *w, aff_dtype d, int rows, int r0, const uint16_t *const *x, int n, v16 *lanes)
{
    const pr_decoder dec = pr_setup();
    int r = 0;
    if (n > PR_FEW) pr_many(w, d, &dec, r = rows / PR_ROWS * PR_ROWS, r0, x, n, lanes);
    while (r < rows) {
        const bool together = r + PR_ROWS <= rows && pr_together(d, PR_ROWS, r0 + r);
        for (int t = 0; t < n; t += PR_FEW) {
            const int some = aff__min_int(PR_FEW, n - t);
            v16 *at = lanes + (int64_t)r * n + t;
            if (together)
                pr_few(w, d, &dec, PR_ROWS, r0 + r, x + t, some, at, n);
            else
                pr_few(w, d, &dec, 1, r0 + r, x + t, some, at, n);
        }
        r += together ? PR_ROWS : 1;
    }
}

PR_APART void pr_bf16(const aff_weight *w, int rows, int r0, const uint16_t *const *x, int n, v16 *lanes)
{
    pr_rows(w, AFF_BF16, rows, r0, x, n, lanes);
}
PR_APART void pr_fp8_128(const aff_weight *w, int rows, int r0, const uint16_t *const *x, int n, v16 *lanes)
{
    pr_rows(w, AFF_FP8, rows, r0, x, n, lanes);
}
PR_APART void pr_fp8_32(const aff_weight *w, int rows, int r0, const uint16_t *const *x, int n, v16 *lanes)
{
    pr_rows(w, AFF_FP8_32, rows, r0, x, n, lanes);
}

static void pairs_simd(const aff_weight *w, int r0, int r1, const uint16_t *const *x, int n, float *const *y)
{
    v16 lanes[PR_BLOCK * AFF__BATCH_MAX];
    for (int r = r0; r < r1; r += PR_BLOCK) {
        const int rows = aff__min_int(PR_BLOCK, r1 - r);
        const unsigned was = pr_flush_begin();
        (w->dtype == AFF_BF16 ? pr_bf16 : w->dtype == AFF_FP8 ? pr_fp8_128 : pr_fp8_32)(w, rows, r, x, n, lanes);
        pr_flush_end(was);
        for (int t = 0; t < n; t++) {
            float *out = y[t] + (r - r0);
            const v16 *l = lanes + t;
            int i = 0;
            for (; i + 4 <= rows; i += 4, l += 4 * n) _mm_storeu_ps(out + i, v16_fold_4(l[0], l[n], l[2 * n], l[3 * n]));
            for (; i < rows; i++, l += n) out[i] = v16_fold(*l);
        }
    }
}

static void to_bf16_simd(const float *x, uint16_t *y, int n)
{
    int i = 0;
    for (; i + 16 <= n; i += 16) v16_store_bf16(y + i, v16_round_bf16(v16_load(x + i)));
    if (i == n) return;
    uint16_t rest[16];
    v16_store_bf16(rest, v16_round_bf16(v16_load_part(x + i, n - i)));
    memcpy(y + i, rest, (size_t)(n - i) * sizeof *y);
}
