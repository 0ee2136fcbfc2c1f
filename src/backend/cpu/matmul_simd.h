/* matmul_simd.h - dense products over simd16.h, included once per instruction set.
 *
 * Up to MM_FUSED activation rows: weights are decoded in registers and used at once (decoding a weight row again costs
 * less than a round trip through memory). More rows: weight rows are decoded a panel of columns at a time into a buffer
 * in L1 and multiplied with all activation rows, tile by tile, while the lanes of every (weight row, activation row)
 * pair wait in memory. */
#include "backend/cpu/simd16.h"

#if defined(__AVX512F__)
enum { MM_ROWS = 4, MM_COLS = 4 }; /* register tile: weight rows by activation rows */
enum {
    MM_TILE = 3,
    MM_WIDE = 6
}; /* the second with many activation rows: sums and partial sums in registers, sums alone */
#else
enum { MM_ROWS = 2, MM_COLS = 2, MM_TILE = 2, MM_WIDE = 4 };
#endif
enum { MM_FUSED = MM_COLS, MM_CUT = 128 };
/* Columns decoded at a time (of 32 activation rows, that fills two thirds of the first cache), their distance in the buffer (rows a
 * multiple of 1 KiB apart would share a few sets of the cache), register tiles of rows, rows of a block. */
enum { MM_PANEL = 512, MM_PANEL_LD = MM_PANEL + 16, MM_SETS = 2, MM_BLOCK = 64 };

/* What a weight row looks like to the inner loops. */
typedef struct mm_row {
    const uint8_t *data;  /* first element */
    const uint8_t *scale; /* FP8: first E8M0 of the row's tiles */
} mm_row;

AFF__INLINE int mm_size(aff_dtype d)
{
    return d == AFF_F32 ? 4 : d == AFF_BF16 ? 2 : 1;
}
AFF__INLINE int mm_cut(aff_dtype d)
{
    return d == AFF_FP8_32 ? 32 : MM_CUT;
}
AFF__INLINE bool mm_scaled(aff_dtype d)
{
    return d == AFF_FP8 || d == AFF_FP8_32;
}

AFF__INLINE mm_row mm_row_at(const aff_weight *w, aff_dtype d, int r)
{
    mm_row row = {(const uint8_t *)w->data + (int64_t)r * w->cols * mm_size(d), NULL};
    if (mm_scaled(d)) row.scale = w->scale + (int64_t)(r / mm_cut(d)) * aff__ceil_div(w->cols, mm_cut(d));
    return row;
}

/* Columns k..k+31 of a row. */
AFF__INLINE void mm_load32(aff_dtype d, const e4m3_decoder *dec, const uint8_t *row, int64_t k, v16 *a, v16 *b)
{
    const uint8_t *p = row + k * mm_size(d);
    if (d == AFF_F32)
        *a = v16_load((const float *)(const void *)p), *b = v16_load((const float *)(const void *)p + 16);
    else if (d == AFF_BF16)
        *a = v16_load_bf16((const uint16_t *)(const void *)p),
        *b = v16_load_bf16((const uint16_t *)(const void *)p + 16);
    else
        e4m3_load32(dec, p, a, b);
}

/* The last n < 32 columns, through a copy padded with zeros. */
AFF__INLINE void mm_load_tail(aff_dtype d, const e4m3_decoder *dec, const uint8_t *row, int64_t k, int n, v16 *a,
                              v16 *b)
{
    _Alignas(64) uint8_t pad[32 * 4] = {0};
    memcpy(pad, row + k * mm_size(d), (size_t)n * (size_t)mm_size(d));
    mm_load32(d, dec, pad, 0, a, b);
}

AFF__INLINE int mm_clip16(int n)
{
    return n < 0 ? 0 : n > 16 ? 16 : n;
}

/* Asks for 32 columns. */
AFF__INLINE void mm_prefetch(aff_dtype d, const uint8_t *p)
{
    for (int i = 0; i < 32 * mm_size(d); i += 64) _mm_prefetch((const char *)p + i, _MM_HINT_T0);
}

/* part[r][t] continues its chains over columns k0..k1. The bytes `ahead` of those in use (if not 0) are asked for: rows
 * are about a page long, and hardware prefetch starts anew on each. */
AFF__INLINE void mm_chain(aff_dtype d, const e4m3_decoder *dec, int R, int N, const mm_row *row, const float *const *x,
                          int k0, int k1, int64_t ahead, v16 part[][MM_COLS])
{
    int k = k0;
    v16 a[MM_ROWS], b[MM_ROWS];
#if defined(__AVX512F__)
    for (; d == AFF_FP8 && k + 64 <= k1; k += 64) {
        v16 v[MM_ROWS][4];
        for (int r = 0; r < R; r++) {
            if (ahead) _mm_prefetch((const char *)row[r].data + k + ahead, _MM_HINT_T0);
            e4m3_load64(dec, row[r].data + k, v[r]);
        }
        for (int t = 0; t < N; t++)
            for (int i = 0; i < 4; i++) {
                v16 xi = v16_load(x[t] + k + 16 * i);
                for (int r = 0; r < R; r++) part[r][t] = v16_fma(v[r][i], xi, part[r][t]);
            }
    }
#endif
    for (; k + 32 <= k1; k += 32) {
        for (int r = 0; r < R; r++) {
            if (ahead) mm_prefetch(d, row[r].data + (int64_t)k * mm_size(d) + ahead);
            mm_load32(d, dec, row[r].data, k, &a[r], &b[r]);
        }
        for (int t = 0; t < N; t++) {
            v16 xa = v16_load(x[t] + k), xb = v16_load(x[t] + k + 16);
            for (int r = 0; r < R; r++) part[r][t] = v16_fma(b[r], xb, v16_fma(a[r], xa, part[r][t]));
        }
    }
    if (k == k1) return;
    int na = mm_clip16(k1 - k), nb = mm_clip16(k1 - k - 16);
    for (int r = 0; r < R; r++) mm_load_tail(d, dec, row[r].data, k, k1 - k, &a[r], &b[r]);
    for (int t = 0; t < N; t++) {
        v16 xa = v16_load_part(x[t] + k, na), xb = nb ? v16_load_part(x[t] + k + 16, nb) : v16_zero();
        for (int r = 0; r < R; r++) part[r][t] = v16_fma_part(b[r], xb, v16_fma_part(a[r], xa, part[r][t], na), nb);
    }
}

/* Distance of the next R rows, 0 if there are none. */
AFF__INLINE int64_t mm_ahead(const aff_weight *w, aff_dtype d, int R, int r0)
{
    return r0 + 2 * R <= w->rows ? (int64_t)R * w->cols * mm_size(d) : 0;
}

/* R weight rows by N activation rows, everything in registers. */
AFF__INLINE void mm_tile(const aff_weight *w, aff_dtype d, const e4m3_decoder *dec, int R, int N, int r0,
                         const float *const *x, float *const *y, int at)
{
    mm_row row[MM_ROWS];
    v16 acc[MM_ROWS][MM_COLS], part[MM_ROWS][MM_COLS];
    int64_t ahead = mm_ahead(w, d, R, r0);
    for (int r = 0; r < R; r++) {
        row[r] = mm_row_at(w, d, r0 + r);
        for (int t = 0; t < N; t++) acc[r][t] = v16_zero();
    }
    if (!mm_scaled(d))
        mm_chain(d, dec, R, N, row, x, 0, w->cols, ahead, acc);
    else
        for (int k = 0; k < w->cols; k += mm_cut(d)) {
            for (int r = 0; r < R; r++)
                for (int t = 0; t < N; t++) part[r][t] = v16_zero();
            mm_chain(d, dec, R, N, row, x, k, aff__min_int(w->cols, k + mm_cut(d)), ahead, part);
            for (int r = 0; r < R; r++) {
                v16 s = v16_set1(aff__e8m0_to_f32(row[r].scale[k / mm_cut(d)]));
                for (int t = 0; t < N; t++) acc[r][t] = v16_fma(part[r][t], s, acc[r][t]);
            }
        }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) y[t][at + r] = v16_fold(acc[r][t]);
}

/* part[r][t] continues its chains over columns k0..k1 of decoded rows: one vector of each at a time, since sums take
 * the registers. */
AFF__INLINE void mm_panel_chain(int N, const float *const *row, const float *const *x, int k0, int k1,
                                v16 part[][MM_WIDE])
{
    v16 a[MM_ROWS];
    int k = k0;
    for (; k + 16 <= k1; k += 16) {
        for (int r = 0; r < MM_ROWS; r++) {
            a[r] = v16_load(row[r] + k);
            v16_hold(&a[r]);
        }
        for (int t = 0; t < N; t++) {
            const v16 xt = v16_load(x[t] + k);
            for (int r = 0; r < MM_ROWS; r++) part[r][t] = v16_fma(a[r], xt, part[r][t]);
        }
    }
    if (k == k1) return;
    for (int t = 0; t < N; t++) {
        const v16 xt = v16_load_part(x[t] + k, k1 - k);
        for (int r = 0; r < MM_ROWS; r++)
            part[r][t] = v16_fma_part(v16_load_part(row[r] + k, k1 - k), xt, part[r][t], k1 - k);
    }
}

/* MM_ROWS decoded rows of a panel (columns k..k+n) against activation rows t0..t0+N, added to their lanes. scale[c][r]:
 * of the panel's cuts. */
AFF__INLINE void mm_panel_tile(aff_dtype d, int N, const float *const *buf, const float (*scale)[MM_ROWS],
                               const float *const *x, int t0, int k, int n, v16 lanes[][AFF__ROWS_MAX])
{
    v16 acc[MM_ROWS][MM_WIDE], part[MM_ROWS][MM_WIDE];
    const float *xk[MM_WIDE];
    for (int t = 0; t < N; t++) {
        xk[t] = x[t0 + t] + k;
        for (int r = 0; r < MM_ROWS; r++) acc[r][t] = lanes[r][t0 + t];
    }
    if (!mm_scaled(d))
        mm_panel_chain(N, buf, xk, 0, n, acc);
    else
        for (int c = 0; c < n; c += mm_cut(d)) {
            for (int r = 0; r < MM_ROWS; r++)
                for (int t = 0; t < N; t++) part[r][t] = v16_zero();
            mm_panel_chain(N, buf, xk, c, aff__min_int(n, c + mm_cut(d)), part);
            for (int r = 0; r < MM_ROWS; r++)
                for (int t = 0; t < N; t++)
                    acc[r][t] = v16_fma(part[r][t], v16_set1(scale[c / mm_cut(d)][r]), acc[r][t]);
        }
    for (int t = 0; t < N; t++)
        for (int r = 0; r < MM_ROWS; r++) lanes[r][t0 + t] = acc[r][t];
}

/* Columns k0..k1 of MM_ROWS rows as float32 to buf, and the scales of their cuts. */
AFF__INLINE void mm_decode_panel(aff_dtype d, const e4m3_decoder *dec, const mm_row *from, int k0, int k1,
                                 int64_t ahead, float (*buf)[MM_PANEL_LD], float (*scale)[MM_ROWS])
{
    for (int r = 0; r < MM_ROWS; r++) {
        for (int c = 0; mm_scaled(d) && k0 + c * mm_cut(d) < k1; c++)
            scale[c][r] = aff__e8m0_to_f32(from[r].scale[k0 / mm_cut(d) + c]);
        for (int k = k0; k < k1; k += 32) {
            v16 a, b;
            if (ahead) mm_prefetch(d, from[r].data + (int64_t)k * mm_size(d) + ahead);
            if (d == AFF_F32) continue;
            if (k + 32 <= k1)
                mm_load32(d, dec, from[r].data, k, &a, &b);
            else
                mm_load_tail(d, dec, from[r].data, k, k1 - k, &a, &b);
            v16_store(buf[r] + (k - k0), a), v16_store(buf[r] + (k - k0) + 16, b);
        }
    }
}

/* sets * MM_ROWS rows (of the block's, from row `first` on) times a panel's columns k0..k1 of all activation rows. */
AFF__INLINE void mm_panel(const aff_weight *w, aff_dtype d, const e4m3_decoder *dec, int sets, int row, const float *const *x, int n, int k0,
                          int k1, v16 (*lanes)[AFF__ROWS_MAX])
{
    const int N = mm_scaled(d) ? MM_TILE : MM_WIDE;
    _Alignas(64) float buf[MM_SETS][MM_ROWS][MM_PANEL_LD];
    float scale[MM_SETS][MM_PANEL / 32][MM_ROWS];
    const float *decoded[MM_SETS][MM_ROWS];
    for (int s = 0; s < sets; s++) {
        mm_row from[MM_ROWS];
        for (int r = 0; r < MM_ROWS; r++) {
            from[r] = mm_row_at(w, d, row + s * MM_ROWS + r);
            decoded[s][r] = d == AFF_F32 ? (const float *)(const void *)from[r].data + k0 : buf[s][r];
        }
        mm_decode_panel(d, dec, from, k0, k1, mm_ahead(w, d, sets * MM_ROWS, row), buf[s], scale[s]);
    }
    int t = 0;
    for (; t + N <= n; t += N)
        for (int s = 0; s < sets; s++) mm_panel_tile(d, N, decoded[s], scale[s], x, t, k0, k1 - k0, lanes + s * MM_ROWS);
    for (; t + 2 <= n; t += 2)
        for (int s = 0; s < sets; s++) mm_panel_tile(d, 2, decoded[s], scale[s], x, t, k0, k1 - k0, lanes + s * MM_ROWS);
    for (; t < n; t++)
        for (int s = 0; s < sets; s++) mm_panel_tile(d, 1, decoded[s], scale[s], x, t, k0, k1 - k0, lanes + s * MM_ROWS);
}

/* A block of rows, a multiple of MM_ROWS, against many activation rows: panels of columns outside, so that the activations of one stay in
 * the first cache for all rows. */
AFF__INLINE void mm_many(const aff_weight *w, aff_dtype d, const e4m3_decoder *dec, int rows, int r0, const float *const *x, int n,
                         float *const *y, int at)
{
    v16 lanes[MM_BLOCK][AFF__ROWS_MAX];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < n; t++) lanes[r][t] = v16_zero();
    for (int k0 = 0; k0 < w->cols; k0 += MM_PANEL) {
        const int k1 = aff__min_int(w->cols, k0 + MM_PANEL);
        int r = 0;
        for (; r + MM_SETS * MM_ROWS <= rows; r += MM_SETS * MM_ROWS) mm_panel(w, d, dec, MM_SETS, r0 + r, x, n, k0, k1, lanes + r);
        for (; r < rows; r += MM_ROWS) mm_panel(w, d, dec, 1, r0 + r, x, n, k0, k1, lanes + r);
    }
    for (int t = 0; t < n; t++)
        for (int r = 0; r < rows; r++) y[t][at + r] = v16_fold(lanes[r][t]);
}

/* R weight rows against n <= MM_FUSED activation rows. */
AFF__INLINE void mm_few(const aff_weight *w, aff_dtype d, const e4m3_decoder *dec, int R, int r0, const float *const *x,
                        int n, float *const *y, int at)
{
    if (n == 1)
        mm_tile(w, d, dec, R, 1, r0, x, y, at);
    else if (n == 2)
        mm_tile(w, d, dec, R, 2, r0, x, y, at);
#if defined(__AVX512F__)
    else if (n == 3)
        mm_tile(w, d, dec, R, 3, r0, x, y, at);
    else
        mm_tile(w, d, dec, R, 4, r0, x, y, at);
#endif
}

AFF__INLINE void mm_all(const aff_weight *w, aff_dtype d, int r0, int r1, const float *const *x, int n, float *const *y)
{
    e4m3_decoder dec = e4m3_setup();
    int r = r0;
    for (; n <= MM_FUSED && r + MM_ROWS <= r1; r += MM_ROWS) mm_few(w, d, &dec, MM_ROWS, r, x, n, y, r - r0);
    while (n > MM_FUSED && r + MM_ROWS <= r1) {
        const int rows = aff__min_int(MM_BLOCK, r1 - r) / MM_ROWS * MM_ROWS;
        mm_many(w, d, &dec, rows, r, x, n, y, r - r0);
        r += rows;
    }
    for (; r < r1; r++)
        for (int t = 0; t < n; t += MM_FUSED)
            mm_few(w, d, &dec, 1, r, x + t, aff__min_int(MM_FUSED, n - t), y + t, r - r0);
}

static void mm_f32(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    mm_all(w, AFF_F32, r0, r1, x, n, y);
}
static void mm_bf16(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    mm_all(w, AFF_BF16, r0, r1, x, n, y);
}
static void mm_fp8(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    mm_all(w, AFF_FP8, r0, r1, x, n, y);
}
static void mm_fp8_32(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    mm_all(w, AFF_FP8_32, r0, r1, x, n, y);
}

static void matmul_simd(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y)
{
    if (w->dtype == AFF_F32)
        mm_f32(w, r0, r1, x, n, y);
    else if (w->dtype == AFF_BF16)
        mm_bf16(w, r0, r1, x, n, y);
    else if (w->dtype == AFF_FP8)
        mm_fp8(w, r0, r1, x, n, y);
    else
        mm_fp8_32(w, r0, r1, x, n, y);
}
