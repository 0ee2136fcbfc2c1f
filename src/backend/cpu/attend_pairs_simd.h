/* attend_pairs_simd.h - attention of one position over keys of bf16 (kernels.h), included once per instruction set.
 *
 * All heads pass over a cut of keys together. Scores: a few heads by a few keys in registers, whose lanes are folded all at once. The weighted
 * sum: two keys' rows are woven in registers into pairs of one column, and a strip of columns of several heads takes them from there. */
#include "backend/cpu/pairs_simd.h"

enum { AP_KEYS = 4, AP_GROUP = 8 }; /* keys of a tile of scores; heads that go through the weighted sum together */

/* The weights of a cut for a few heads. */
typedef struct ap_heads {
    _Alignas(64) float p[AP_GROUP][AFF__KEY_CUT]; /* scores, then weights */
    uint32_t pair[AP_GROUP][AFF__KEY_CUT / 2];    /* the weights of two keys as bf16, the first in the low half */
    float a[AP_GROUP], b[AP_GROUP];               /* factors of the merge */
} ap_heads;

/* Scores of n keys to weights of head i; M and Z move on, or (alone) become the cut's own. */
AFF__INLINE void ap_weights(ap_heads *s, int i, int n, float scale, bool alone, float *M, float *Z)
{
    float *p = s->p[i], lane[AFF__LANES];
    for (int j = n; j < AFF__KEY_CUT; j++) p[j] = -INFINITY;
    const v16 by = v16_set1(scale);
    v16 top = v16_set1(-INFINITY), sum = v16_zero();
    for (int j = 0; j < AFF__KEY_CUT; j += 16) {
        const v16 x = v16_mul(v16_load(p + j), by);
        v16_store(p + j, x);
        top = v16_max(x, top);
    }
    const float m = v16_largest(top);
    const v16 vm = v16_set1(m);
    for (int j = 0; j < AFF__KEY_CUT; j += 16) {
        v16 w = v16_exp(v16_sub(v16_load(p + j), vm));
        w = v16_round_bf16(w);
        if (j + 16 > n) {
            v16_store(lane, w);
            for (int e = 0; e < 16; e++) lane[e] = j + e < n ? lane[e] : 0.0f;
            w = v16_load(lane);
        }
        sum = v16_add(sum, w);
        v16_store(p + j, w);
    }
    for (int j = 0; j < AFF__KEY_CUT; j += 16) v16_store_bf16((uint16_t *)(void *)s->pair[i] + j, v16_load(p + j));
    const float z = v16_fold(sum);
    if (alone) {
        *M = m, *Z = z;
        return;
    }
    const float most = m > *M ? m : *M;
    s->a[i] = aff__expf(*M - most), s->b[i] = aff__expf(m - most);
    *M = most;
    *Z = fmaf(*Z, s->a[i], z * s->b[i]);
}

/* V = V * a + v * b, or (alone) v, in `live` columns. */
AFF__INLINE void ap_out(const ap_heads *s, int i, v16 v, bool alone, float *V, int live)
{
    if (!alone) v = v16_fma(v16_load_part(V, live), v16_set1(s->a[i]), v16_mul(v, v16_set1(s->b[i])));
    v16_store_part(V, v, live);
}

#if defined(__AVX512F__)
#define AP_LOW(i)  (PR_WORD(i) & 255)
#define AP_HIGH(i) (PR_WORD(i) >> 8)

/* Sixteen trees at once: lane i is the fold of a[i]. */
AFF__INLINE v16 v16_fold_16(const v16 *in)
{
    static const int at[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15}; /* where the shuffles below bring whom */
    v16 x[8], y[4], z[2];
    for (int i = 0; i < 8; i++) {
        const v16 a = in[at[i]], b = in[at[i + 8]];
        x[i] = v16_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; i++) y[i] = v16_add(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) z[i] = v16_add(_mm512_shuffle_ps(y[i], y[i + 2], 0x44), _mm512_shuffle_ps(y[i], y[i + 2], 0xee));
    return v16_add(_mm512_shuffle_ps(z[0], z[1], 0x88), _mm512_shuffle_ps(z[0], z[1], 0xdd));
}

/* Dot products of H heads with AP_KEYS keys. */
AFF__INLINE void ap_dots(int H, const uint16_t *q, int64_t ldq, const uint16_t *key, int64_t ld, int D, float (*out)[AFF__KEY_CUT])
{
    v16 acc[4 * AP_KEYS];
    for (int i = 0; i < H * AP_KEYS; i++) acc[i] = v16_zero();
    for (int d = 0; d < D; d += 32) {
        p32 k[AP_KEYS];
        for (int j = 0; j < AP_KEYS; j++) k[j] = p32_load(key + j * ld + d);
        for (int i = 0; i < H; i++) {
            const p32 x = p32_load(q + i * ldq + d);
            for (int j = 0; j < AP_KEYS; j++) acc[i * AP_KEYS + j] = p32_dot(acc[i * AP_KEYS + j], x, k[j]);
        }
    }
    if (H == 1) {
        _mm_storeu_ps(out[0], v16_fold_4(acc[0], acc[1], acc[2], acc[3]));
        return;
    }
    const v16 all = v16_fold_16(acc);
    _mm_storeu_ps(out[0], _mm512_castps512_ps128(all));
    _mm_storeu_ps(out[1], _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(out[2], _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(out[3], _mm512_extractf32x4_ps(all, 3));
}

AFF__INLINE void ap_scores(int H, const uint16_t *q, int64_t ldq, const uint16_t *key, int64_t ld, int D, int n, aff__ahead *next, ap_heads *s)
{
    for (int j = 0; j < n; j += AP_KEYS) {
        if (next) at_ask(next);
        int i = 0;
        for (; i + 4 <= H; i += 4) ap_dots(4, q + i * ldq, ldq, key + j * ld, ld, D, (float(*)[AFF__KEY_CUT])(s->p[i] + j));
        for (; i < H; i++) ap_dots(1, q + i * ldq, ldq, key + j * ld, ld, D, (float(*)[AFF__KEY_CUT])(s->p[i] + j));
    }
}

/* Columns d..d+31 of the weighted sum. */
AFF__INLINE void ap_strip(int H, const ap_heads *s, const uint16_t *key, int64_t ld, int n, int d, int D, bool alone, float *V)
{
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    v16 acc[AP_GROUP][2];
    for (int i = 0; i < H; i++) acc[i][0] = acc[i][1] = v16_zero();
    for (int j = 0; j < n; j += 2) {
        const p32 a = p32_load(key + j * ld + d), b = p32_load(key + (j + 1) * ld + d);
        const p32 l = _mm512_unpacklo_epi16(a, b), h = _mm512_unpackhi_epi16(a, b);
        for (int i = 0; i < H; i++) {
            const p32 p = _mm512_set1_epi32((int)s->pair[i][j / 2]);
            acc[i][0] = p32_dot(acc[i][0], l, p), acc[i][1] = p32_dot(acc[i][1], h, p);
        }
    }
    for (int i = 0; i < H; i++) {
        float *out = V + (int64_t)i * D + d;
        ap_out(s, i, _mm512_permutex2var_ps(acc[i][0], low, acc[i][1]), alone, out, aff__min_int(16, D - d));
        if (D - d > 16) ap_out(s, i, _mm512_permutex2var_ps(acc[i][0], high, acc[i][1]), alone, out + 16, aff__min_int(16, D - d - 16));
    }
}

AFF__INLINE void ap_sums(int H, const ap_heads *s, const uint16_t *key, int64_t ld, int n, int D, bool alone, float *V)
{
    for (int d = 0; d < D; d += 32) ap_strip(H, s, key, ld, n, d, D, alone, V);
}

/* A stored row as bf16. Codes go through the table of scale 1; then the exponents of what is not zero move, which is less work than a table
 * for each scale. Rows with a NaN, or with values that this would take out of the range of normal numbers, go the long way. */
static void row_pairs_simd(const aff_rowfmt *f, const uint8_t *row, uint16_t *x)
{
    static const _Alignas(64) uint8_t low[128] = {PR_SIXTY_FOUR(AP_LOW, 0), PR_SIXTY_FOUR(AP_LOW, 64)};
    static const _Alignas(64) uint8_t high[128] = {PR_SIXTY_FOUR(AP_HIGH, 0), PR_SIXTY_FOUR(AP_HIGH, 64)};
    const pr_decoder dec = {.order = _mm512_load_si512(pr_order), .sign = _mm512_set1_epi8((char)0x80)};
    const pr_table t = {{_mm512_load_si512(low), _mm512_load_si512(low + 64)}, {_mm512_load_si512(high), _mm512_load_si512(high + 64)}};
    const __m512i size = _mm512_set1_epi16(0x7fff), ones = _mm512_set1_epi8((char)0xff);
    __mmask64 rare = 0;
    for (int i = 0; i < f->coded; i += AFF__A8_GROUP) {
        const int scale = row[f->scales + i / AFF__A8_GROUP];
        const __m512i up = _mm512_set1_epi16((short)((scale - 127) * 128)), raw = _mm512_loadu_si512(row + i);
        __m512i l, h;
        rare |= _mm512_cmpeq_epi8_mask(_mm512_or_si512(raw, dec.sign), ones) | (__mmask64)(scale < 10 || scale > 246);
        pr_halves(&dec, &t, raw, &l, &h);
        const __m512i a = _mm512_unpacklo_epi8(l, h), b = _mm512_unpackhi_epi8(l, h);
        _mm512_storeu_si512(x + i, _mm512_mask_add_epi16(a, _mm512_test_epi16_mask(a, size), a, up));
        _mm512_storeu_si512(x + i + 32, _mm512_mask_add_epi16(b, _mm512_test_epi16_mask(b, size), b, up));
    }
    if (__builtin_expect(rare != 0, 0)) {
        aff__row_pairs_scalar(f, row, x);
        return;
    }
    for (int i = 0; i < f->bf16; i += 32) {
        const __mmask32 in = f->bf16 - i < 32 ? (__mmask32)((1u << (f->bf16 - i)) - 1) : 0xffffffffu;
        _mm512_mask_storeu_epi16(x + f->coded + i, in, _mm512_maskz_loadu_epi16(in, row + f->tail + 2 * i));
    }
}

#else
/* Lanes of one head's dot products with n keys. */
PR_APART void ap_lanes(const uint16_t *q, const uint16_t *key, int64_t ld, int D, int n, v16 *lanes)
{
    for (int j = 0; j < n; j += 2) {
        v16 a = v16_zero(), b = v16_zero();
        for (int d = 0; d < D; d += 32) {
            const p32 x = p32_load(q + d);
            a = p32_dot(a, x, p32_load(key + j * ld + d)), b = p32_dot(b, x, p32_load(key + (j + 1) * ld + d));
        }
        lanes[j] = a, lanes[j + 1] = b;
    }
}

AFF__INLINE void ap_scores(int H, const uint16_t *q, int64_t ldq, const uint16_t *key, int64_t ld, int D, int n, aff__ahead *next, ap_heads *s)
{
    v16 lanes[AFF__KEY_CUT];
    for (int i = 0; i < H; i++) {
        for (int j = 0; next && j < n; j += AP_KEYS) at_ask(next);
        const unsigned was = pr_flush_begin();
        ap_lanes(q + i * ldq, key, ld, D, n, lanes);
        pr_flush_end(was);
        for (int j = 0; j < n; j++) s->p[i][j] = v16_fold(lanes[j]);
    }
}

/* Columns d.. of the weighted sum of one head, 32 of them. */
PR_APART void ap_strip(const uint32_t *pair, const uint16_t *key, int64_t ld, int n, v16 *out)
{
    v16 l = v16_zero(), h = v16_zero();
    for (int j = 0; j < n; j += 2, key += 2 * ld) {
        const v16 even = v16_set1(aff__bits_f32(pair[j / 2] << 16)), odd = v16_set1(aff__bits_f32(pair[j / 2] & 0xffff0000u));
        l = v16_fma(even, v16_load_bf16(key), v16_fma(odd, v16_load_bf16(key + ld), l));
        h = v16_fma(even, v16_load_bf16(key + 16), v16_fma(odd, v16_load_bf16(key + ld + 16), h));
    }
    out[0] = l, out[1] = h;
}

AFF__INLINE void ap_sums(int H, const ap_heads *s, const uint16_t *key, int64_t ld, int n, int D, bool alone, float *V)
{
    for (int d = 0; d < D; d += 32)
        for (int i = 0; i < H; i++) {
            v16 v[2];
            const unsigned was = pr_flush_begin();
            ap_strip(s->pair[i], key + d, ld, n, v);
            pr_flush_end(was);
            for (int c = 0; c < 2 && D - d > 16 * c; c++) ap_out(s, i, v[c], alone, V + (int64_t)i * D + d + 16 * c, aff__min_int(16, D - d - 16 * c));
        }
}

static void row_pairs_simd(const aff_rowfmt *f, const uint8_t *row, uint16_t *x)
{
    float wide[AFF__A8_GROUP];
    for (int i = 0; i < f->coded; i += AFF__A8_GROUP) {
        e4m3_decoder d = e4m3_setup();
        const v16 s = v16_set1(aff__e8m0_to_f32(row[f->scales + i / AFF__A8_GROUP]));
        for (int e = 0; e < AFF__A8_GROUP; e += 32) {
            v16 a, b;
            e4m3_load32(&d, row + i + e, &a, &b);
            v16_store(wide + e, v16_mul(a, s)), v16_store(wide + e + 16, v16_mul(b, s));
        }
        to_bf16_simd(wide, x + i, AFF__A8_GROUP);
    }
    memcpy(x + f->coded, row + f->tail, (size_t)f->bf16 * sizeof *x);
}
#endif

AFF__INLINE void ap_group(int H, const uint16_t *q, int64_t ldq, int D, const uint16_t *key, int64_t ld, int n, float scale, bool alone,
                          aff__ahead *next, float *M, float *Z, float *V)
{
    ap_heads s;
    const int whole = (n + AP_KEYS - 1) / AP_KEYS * AP_KEYS; /* rows up to there are zeros */
    ap_scores(H, q, ldq, key, ld, D, whole, next, &s);
    for (int i = 0; i < H; i++) ap_weights(&s, i, n, scale, alone, M + i, Z + i);
    if (alone)
        ap_sums(H, &s, key, ld, whole, D, true, V);
    else
        ap_sums(H, &s, key, ld, whole, D, false, V);
}

static void attend_pairs_simd(const uint16_t *q, int64_t ldq, int heads, int D, const uint16_t *key, int64_t ld, int n, float scale, bool alone,
                              aff__ahead *next, float *M, float *Z, float *V)
{
    int h = 0;
    const int steps = (heads + AP_GROUP - 1) / AP_GROUP * ((n + AP_KEYS - 1) / AP_KEYS);
    if (next) next->step = (next->n + steps - 1) / (steps ? steps : 1);
    for (; h + AP_GROUP <= heads; h += AP_GROUP)
        ap_group(AP_GROUP, q + h * ldq, ldq, D, key, ld, n, scale, alone, next, M + h, Z + h, V + (int64_t)h * D);
    for (; h + 4 <= heads; h += 4) ap_group(4, q + h * ldq, ldq, D, key, ld, n, scale, alone, next, M + h, Z + h, V + (int64_t)h * D);
    for (; h < heads; h++) ap_group(1, q + h * ldq, ldq, D, key, ld, n, scale, alone, next, M + h, Z + h, V + (int64_t)h * D);
}
