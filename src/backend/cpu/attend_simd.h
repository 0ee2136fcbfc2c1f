/* attend_simd.h - attention of one position over simd16.h, included once per instruction set.
 *
 * All heads share the key rows, so a few heads go through the cut together: first their scores, a few keys at a time;
 * then the weighted sum, a strip of columns at a time, whose lanes stay in registers over the whole cut. A cut of 64
 * keys of 512 columns is 128 KiB and stays in L2 while all heads pass over it. */
#include "backend/cpu/simd16.h"

#if defined(__AVX512F__)
enum { AT_HEADS = 4, AT_KEYS = 4, AT_STRIP = 4 }; /* heads at once, keys at once, vectors of a strip */
#else
enum { AT_HEADS = 2, AT_KEYS = 2, AT_STRIP = 2 };
#endif

/* dot(a[i], b[j]) for i < A, j < B into out[i * ld + j]. */
AFF__INLINE void at_dots(int A, int B, const float *a, int64_t lda, const float *const *b, int n, float *out, int ld)
{
    v16 acc[AT_HEADS][AT_KEYS];
    for (int i = 0; i < A; i++)
        for (int j = 0; j < B; j++) acc[i][j] = v16_zero();
    int k = 0;
    for (; k + 16 <= n; k += 16) {
        v16 vb[AT_KEYS];
        for (int j = 0; j < B; j++) vb[j] = v16_load(b[j] + k);
        for (int i = 0; i < A; i++) {
            v16 va = v16_load(a + i * lda + k);
            for (int j = 0; j < B; j++) acc[i][j] = v16_fma(va, vb[j], acc[i][j]);
        }
    }
    for (int i = 0; i < A && k < n; i++)
        for (int j = 0; j < B; j++)
            acc[i][j] =
                v16_fma_part(v16_load_part(a + i * lda + k, n - k), v16_load_part(b[j] + k, n - k), acc[i][j], n - k);
    for (int i = 0; i < A; i++) {
        if (B == 4)
            _mm_storeu_ps(out + i * ld,
                          v16_fold_4(acc[i][0], acc[i][1 % AT_KEYS], acc[i][2 % AT_KEYS], acc[i][3 % AT_KEYS]));
        else
            for (int j = 0; j < B; j++) out[i * ld + j] = v16_fold(acc[i][j]);
    }
}

/* Asks for a few more rows of the next cut. A few at every step of this one: asked for all at once they would be waited
 * for. */
AFF__INLINE void at_ask(aff__ahead *next)
{
    for (int i = 0; i < next->step && next->at < next->n; i++, next->at++)
        for (int b = 0; b < next->bytes; b += 64) _mm_prefetch((const char *)next->row[next->at] + b, _MM_HINT_T1);
}

/* The state of the heads that go together; p[i][j] is the weight of key j of the cut for head i. */
typedef struct at_heads {
    float M[AT_HEADS], Z[AT_HEADS];
    float a[AT_HEADS], b[AT_HEADS]; /* factors of the merge */
    _Alignas(64) float p[AT_HEADS][AFF__KEY_CUT];
} at_heads;

/* Scores of a cut to weights; M and Z move on, or (alone) become the cut's own. */
AFF__INLINE void at_weights(at_heads *s, int i, int n, float scale, bool alone)
{
    float *p = s->p[i];
    for (int j = 0; j < n; j++) p[j] *= scale;
    float m = p[0], z = 0.0f;
    for (int j = 1; j < n; j++) m = p[j] > m ? p[j] : m;
    v16 vm = v16_set1(m);
    for (int j = 0; j < n; j += 16) v16_store(p + j, v16_exp(v16_sub(v16_load(p + j), vm)));
    for (int j = 0; j < n; j++) z += p[j];
    if (alone) {
        s->M[i] = m, s->Z[i] = z;
        return;
    }
    float top = m > s->M[i] ? m : s->M[i];
    s->a[i] = aff__expf(s->M[i] - top), s->b[i] = aff__expf(m - top);
    s->M[i] = top;
    s->Z[i] = fmaf(s->Z[i], s->a[i], z * s->b[i]);
}

/* V[i][d..] = V * a + (sum over the cut of p k) * b, or (alone) that sum, for S vectors of columns from d on; the last
 * may be partial (live lanes). */
AFF__INLINE void at_strip(const at_heads *s, int H, int S, const float *const *key, int n, int d, int live, bool alone,
                          float *V, int D)
{
    v16 acc[AT_HEADS][AT_STRIP];
    for (int i = 0; i < H; i++)
        for (int c = 0; c < S; c++) acc[i][c] = v16_zero();
    for (int j = 0; j < n; j++) {
        v16 k[AT_STRIP];
        for (int c = 0; c < S; c++) k[c] = live == 16 ? v16_load(key[j] + d + 16 * c) : v16_load_part(key[j] + d, live);
        for (int i = 0; i < H; i++) {
            v16 p = v16_set1(s->p[i][j]);
            for (int c = 0; c < S; c++) acc[i][c] = v16_fma(p, k[c], acc[i][c]);
        }
    }
    for (int i = 0; i < H; i++) {
        float *v = V + (int64_t)i * D + d;
        v16 a = v16_set1(s->a[i]), b = v16_set1(s->b[i]);
        for (int c = 0; c < S; c++) {
            if (alone)
                v16_store_part(v + 16 * c, acc[i][c], live);
            else if (live == 16)
                v16_store(v + 16 * c, v16_fma(v16_load(v + 16 * c), a, v16_mul(acc[i][c], b)));
            else
                v16_store_part(v, v16_fma(v16_load_part(v, live), a, v16_mul(acc[i][c], b)), live);
        }
    }
}

AFF__INLINE void at_cut(at_heads *s, int H, const float *q, int D, const float *const *key, int n, float scale,
                        bool alone, aff__ahead *next, float *V)
{
    int j = 0;
    for (; j + AT_KEYS <= n; j += AT_KEYS) {
        if (next) at_ask(next);
        at_dots(H, AT_KEYS, q, D, key + j, D, &s->p[0][j], AFF__KEY_CUT);
    }
    for (; j < n; j++) at_dots(H, 1, q, D, key + j, D, &s->p[0][j], AFF__KEY_CUT);
    for (int i = 0; i < H; i++) at_weights(s, i, n, scale, alone);
    int d = 0;
    for (; d + 16 * AT_STRIP <= D; d += 16 * AT_STRIP) {
        if (next) at_ask(next);
        at_strip(s, H, AT_STRIP, key, n, d, 16, alone, V, D);
    }
    for (; d + 16 <= D; d += 16) at_strip(s, H, 1, key, n, d, 16, alone, V, D);
    if (d < D) at_strip(s, H, 1, key, n, d, D - d, alone, V, D);
}

AFF__INLINE void at_some(int H, const float *q, int D, const float *const *key, int n, float scale, bool alone,
                         aff__ahead *next, float *M, float *Z, float *V)
{
    at_heads s = {0};
    for (int i = 0; i < H && !alone; i++) s.M[i] = M[i], s.Z[i] = Z[i];
    at_cut(&s, H, q, D, key, n, scale, alone, next, V);
    for (int i = 0; i < H; i++) M[i] = s.M[i], Z[i] = s.Z[i];
}

static void attend_group(const float *q, int D, const float *const *key, int n, float scale, bool alone,
                         aff__ahead *next, float *M, float *Z, float *V)
{
    if (alone)
        at_some(AT_HEADS, q, D, key, n, scale, true, next, M, Z, V);
    else
        at_some(AT_HEADS, q, D, key, n, scale, false, next, M, Z, V);
}
static void attend_one(const float *q, int D, const float *const *key, int n, float scale, bool alone, aff__ahead *next,
                       float *M, float *Z, float *V)
{
    at_some(1, q, D, key, n, scale, alone, next, M, Z, V);
}

static void attend_simd(const float *q, int heads, int D, const float *const *key, int n, float scale, bool alone,
                        aff__ahead *next, float *M, float *Z, float *V)
{
    const int steps = (heads / AT_HEADS + heads % AT_HEADS) * (n / AT_KEYS + D / (16 * AT_STRIP));
    int h = 0;
    if (next) next->step = (next->n + steps) / (steps + 1);
    for (; h + AT_HEADS <= heads; h += AT_HEADS)
        attend_group(q + (int64_t)h * D, D, key, n, scale, alone, next, M + h, Z + h, V + (int64_t)h * D);
    for (; h < heads; h++)
        attend_one(q + (int64_t)h * D, D, key, n, scale, alone, next, M + h, Z + h, V + (int64_t)h * D);
}

static void merge_simd(int D, float a, float b, const float *v, float *V)
{
    const v16 va = v16_set1(a), vb = v16_set1(b);
    for (int d = 0; d < D; d += 16) {
        const int live = aff__min_int(16, D - d);
        v16_store_part(V + d, v16_fma(v16_load_part(V + d, live), va, v16_mul(v16_load_part(v + d, live), vb)), live);
    }
}
