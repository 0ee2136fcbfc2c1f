/* Each op of the backend table against brute force in double, on random shapes with tails (spec model-v4 6 to 8). */
#include "backend/backend.h"
#include "backend/cpu/cpu.h"
#include "base/rng.h"
#include "quant/numbers.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static aff_backend *B[3]; /* math, sim, fast */
static uint64_t seed = 2024;

static int below(int n)
{
    return (int)(aff__splitmix64(&seed) % (uint64_t)n);
}
/* About normal: mean 0, deviation 1. */
static float noise(void)
{
    double s = -6;
    for (int i = 0; i < 12; i++) s += (double)(aff__splitmix64(&seed) >> 11) * 0x1p-53;
    return (float)s;
}
static float *noises(int64_t n)
{
    float *v = malloc(sizeof *v * (size_t)(n ? n : 1));
    assert_non_null(v);
    for (int64_t i = 0; i < n; i++) v[i] = noise();
    return v;
}

/* max|a-b| <= tol * max|b|. */
static void near_row(const char *what, const float *a, const double *b, int n, double tol)
{
    double e = 0, m = 0;
    for (int i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - b[i]);
        if (!(d <= e)) e = d;
        m = fabs(b[i]) > m ? fabs(b[i]) : m;
    }
    if (!(e <= tol * m)) fail_msg("%s: error %g of %g (n = %d)", what, e, m, n);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* ---- hyper-connections ---- */

static void mixes(const aff_hc *h, const float *X, double *m)
{
    const int n = h->fn.cols;
    const float *fn = h->fn.data;
    double ss = 0;
    for (int i = 0; i < n; i++) ss += (double)X[i] * (double)X[i];
    for (int o = 0; o < h->fn.rows; o++) {
        double s = 0;
        for (int i = 0; i < n; i++) s += (double)fn[(int64_t)o * n + i] * (double)X[i];
        m[o] = s / sqrt(ss / n + (double)h->rms_eps);
    }
}

static void test_hyper_connections(void **state)
{
    static const int streams[] = {4, 1, 2, 8, 4};
    for (int round = 0; round < 5; round++) {
        const int N = streams[round], H = 3 + below(90), T = 1 + below(round == 0 ? 140 : 9), rows = (2 + N) * N;
        float *fn = noises((int64_t)rows * N * H), *base = noises(rows), *X = noises((int64_t)T * N * H),
              *keep = malloc(sizeof(float) * (size_t)(T * N * H));
        float scale[3] = {1.1f, 0.9f, 1.3f}, *u = noises(T * H), *post = noises(T * N), *comb = noises(T * N * N),
              *f = noises(T * H);
        memcpy(keep, X, sizeof(float) * (size_t)(T * N * H));
        for (int i = 0; i < rows * N * H; i++) fn[i] *= 0.3f;
        const aff_hc h = {.fn = {.dtype = AFF_F32, .rows = rows, .cols = N * H, .data = fn, .wide = true},
                          .scale = scale,
                          .base = base,
                          .streams = N,
                          .iters = 1 + below(20),
                          .eps = 1e-3f,
                          .rms_eps = 1e-2f};
        aff__cpu_hc_pre(B[0], &h, X, T, H, u, post, comb);
        B[0]->hc_post(B[0], f, NULL, 0, post, comb, T, N, H, X);
        for (int t = 0; t < T; t++) {
            const float *x = keep + (int64_t)t * N * H;
            double m[80], pre[8], po[8], C[8][8], want[8 * 128];
            mixes(&h, x, m);
            for (int j = 0; j < N; j++) {
                pre[j] = sigmoid(m[j] * (double)scale[0] + (double)base[j]) + 1e-3f;
                po[j] = 2 * sigmoid(m[N + j] * (double)scale[1] + (double)base[N + j]);
                double top = -INFINITY, z = 0;
                for (int k = 0; k < N; k++) {
                    C[j][k] = m[2 * N + j * N + k] * (double)scale[2] + (double)base[2 * N + j * N + k];
                    top = fmax(top, C[j][k]);
                }
                for (int k = 0; k < N; k++) z += C[j][k] = exp(C[j][k] - top);
                for (int k = 0; k < N; k++) C[j][k] = C[j][k] / z + 1e-3f;
            }
            for (int it = 0; it < h.iters; it++) {
                for (int j = 0; it && j < N; j++) {
                    double z = 1e-3f;
                    for (int k = 0; k < N; k++) z += C[j][k];
                    for (int k = 0; k < N; k++) C[j][k] /= z;
                }
                for (int k = 0; k < N; k++) {
                    double z = 1e-3f;
                    for (int j = 0; j < N; j++) z += C[j][k];
                    for (int j = 0; j < N; j++) C[j][k] /= z;
                }
            }
            near_row("post", post + t * N, po, N, 2e-6);
            for (int j = 0; j < N; j++) near_row("comb", comb + ((int64_t)t * N + j) * N, C[j], N, 5e-6);
            for (int d = 0; d < H; d++) {
                want[d] = 0;
                for (int n = 0; n < N; n++) want[d] += pre[n] * (double)x[n * H + d];
            }
            near_row("u", u + (int64_t)t * H, want, H, 2e-6);
            for (int k = 0; k < N; k++)
                for (int d = 0; d < H; d++) {
                    want[k * H + d] = po[k] * (double)f[t * H + d];
                    for (int j = 0; j < N; j++) want[k * H + d] += C[j][k] * (double)x[j * H + d]; /* the first index */
                }
            near_row("streams", X + (int64_t)t * N * H, want, N * H, 5e-6);
        }
        aff_hc head = h;
        head.fn.rows = N;
        aff__cpu_hc_head(B[0], &head, keep, T, H, u);
        for (int t = 0; t < T; t++) {
            double m[80], want[128];
            mixes(&head, keep + (int64_t)t * N * H, m);
            for (int d = 0; d < H; d++) {
                want[d] = 0;
                for (int n = 0; n < N; n++)
                    want[d] += (sigmoid(m[n] * (double)scale[0] + (double)base[n]) + 1e-3f) *
                               (double)keep[((int64_t)t * N + n) * H + d];
            }
            near_row("head", u + (int64_t)t * H, want, H, 2e-6);
        }
        free(fn), free(base), free(X), free(keep), free(u), free(post), free(comb), free(f);
    }
}

/* ---- norms and rope ---- */

static void rms(double *v, const float *w, int n, double eps)
{
    double ss = 0;
    for (int i = 0; i < n; i++) ss += v[i] * v[i];
    for (int i = 0; i < n; i++) v[i] = v[i] / sqrt(ss / n + eps) * (w ? (double)w[i] : 1);
}

/* Adjacent pairs of the tail; the angle is the float32 product. */
static void rope(double *v, int n, const aff_rope *r, int64_t pos, int dir)
{
    for (int i = 0; i < r->pairs; i++) {
        const double a = (double)((float)pos * r->freq[i]), c = cos(a), s = dir * sin(a);
        double *x = v + n - 2 * r->pairs + 2 * i;
        const double p = x[0], q = x[1];
        x[0] = p * c - q * s;
        x[1] = p * s + q * c;
    }
}

static void widen(const float *x, int n, double *v)
{
    for (int i = 0; i < n; i++) v[i] = (double)x[i];
}

static void test_queries_and_rows(void **state)
{
    for (int round = 0; round < 6; round++) {
        const int pairs = 1 + below(32), D = 2 * pairs + (round % 2 ? 64 * (1 + below(3)) : 1 + below(150)),
                  heads = 1 + below(5), T = 1 + below(9);
        float freq[32], *q = noises((int64_t)T * heads * D), *kv = noises((int64_t)T * D), *w = noises(D);
        int64_t pos[9];
        double v[512];
        for (int i = 0; i < pairs; i++) freq[i] = powf(10000.0f, -(float)i / (float)pairs);
        for (int t = 0; t < T; t++) pos[t] = below(2) ? below(1000) : 1000000 + below(48576);
        const aff_rope r = {freq, pairs};
        float *got = malloc(sizeof(float) * (size_t)(T * heads * D));
        memcpy(got, q, sizeof(float) * (size_t)(T * heads * D));
        const aff_rowset rs = {.n = T, .pos = pos};
        B[0]->q_finish(B[0], &rs, got, heads, D, 1e-2f, &r);
        for (int i = 0; i < T * heads; i++) {
            widen(q + (int64_t)i * D, D, v);
            rms(v, NULL, D, 1e-2f);
            rope(v, D, &r, pos[i / heads], 1);
            near_row("q", got + (int64_t)i * D, v, D, 2e-6);
        }
        float *row[3];
        for (int m = 0; m < 3; m++) {
            row[m] = malloc(sizeof(float) * (size_t)(T * D));
            memcpy(row[m], kv, sizeof(float) * (size_t)(T * D));
            B[m]->kv_finish(B[m], &rs, row[m], D, w, 1e-2f, &r, false);
        }
        for (int t = 0; t < T; t++) {
            float *a = row[0] + (int64_t)t * D;
            widen(kv + (int64_t)t * D, D, v);
            rms(v, w, D, 1e-2f);
            rope(v, D, &r, pos[t], 1);
            near_row("kv", a, v, D, 2e-6);
            aff__a8(a, (D - 2 * pairs) / 64 * 64, 64); /* whole groups in front of the tail */
            assert_memory_equal(a, row[1] + (int64_t)t * D, (size_t)D * 4);
            for (int i = D - 2 * pairs; i < D; i++) a[i] = aff__round_bf16(a[i]);
            assert_memory_equal(a, row[2] + (int64_t)t * D, (size_t)D * 4);
        }
        for (int m = 0; m < 3; m++) free(row[m]);
        free(got), free(q), free(kv), free(w);
    }
}

/* ---- compressors ---- */

static void one_compressor(int ratio, bool index, aff_backend *b)
{
    enum { P = 70, DIM = 64 };
    const bool overlap = ratio == 4;
    const int width = (overlap ? 2 : 1) * DIM, hist = overlap ? 16 : 32;
    float freq[8], *c = noises(P * width), *z = noises(P * width), *ape = noises(ratio * width), *norm = noises(DIM);
    for (int i = 0; i < 8; i++) freq[i] = 1.0f / (float)(1 + 3 * i);
    const aff_rope r = {freq, 8};
    const aff_compressor k = {
        .ratio = ratio, .dim = DIM, .overlap = overlap, .index = index, .ape = ape, .norm = norm, .eps = 1e-3f};
    float *rows = malloc(sizeof(float) * P * DIM), *hc = noises(hist * width), *hz = noises(hist * width);
    const aff_rowfmt f = index ? aff__rowfmt_key(b->numerics, DIM) : aff__rowfmt_kv(b->numerics, DIM, 2 * r.pairs);
    uint8_t *coded = malloc((size_t)(P / ratio * f.bytes));
    aff_layer_state s = {.hist_size = hist, .row = &f, .key = &f};
    if (index)
        s.ikey = coded, s.ihist_c = hc, s.ihist_z = hz;
    else
        s.comp = coded, s.hist_c = hc, s.hist_z = hz;
    int64_t pos[P];
    int first[P] = {0};
    aff_layer_state *st[P];
    for (int at = 0, n; at < P; at += n) { /* random chunks */
        n = 1 + below(30);
        n = n > P - at ? P - at : n;
        for (int i = 0; i < n; i++) pos[i] = at + i, st[i] = &s;
        const aff_rowset rs = {.n = n, .pos = pos, .first = first, .state = st};
        float *zc = malloc(sizeof(float) * (size_t)(n * width));
        memcpy(zc, z + at * width, sizeof(float) * (size_t)(n * width));
        b->compress(b, &(aff_compression){&k, c + at * width, zc}, 1, &r, &rs);
        free(zc);
    }
    for (int g = 0; g < P / ratio; g++) aff__row_decode(&f, coded + g * f.bytes, rows + g * DIM);
    for (int g = 0; g < P / ratio; g++) {
        double v[DIM];
        float got[DIM];
        for (int e = 0; e < DIM; e++) {
            double top = -INFINITY, Z = 0, acc = 0;
            for (int pass = 0; pass < 2; pass++)
                for (int p = overlap && g ? ratio * (g - 1) : ratio * g; p < ratio * (g + 1); p++) {
                    const int at = overlap && p >= ratio * g ? DIM + e : e; /* own group: second half */
                    const double l = (double)z[p * width + at] + (double)ape[p % ratio * width + at];
                    if (!pass)
                        top = fmax(top, l);
                    else
                        Z += exp(l - top), acc += exp(l - top) * (double)c[p * width + at];
                }
            v[e] = acc / Z;
        }
        rms(v, norm, DIM, 1e-3f);
        rope(v, DIM, &r, (int64_t)g * ratio, 1);
        if (b->numerics == AFF_MATH) {
            near_row(index ? "indexer row" : "compressed row", rows + g * DIM, v, DIM, 3e-6);
            continue;
        }
        /* With roundings: at most one element in a row on the other side of one. */
        for (int e = 0; e < DIM; e++) got[e] = (float)v[e];
        if (index)
            aff__hadamard(got, DIM), aff__a4(got, DIM);
        else
            aff__a8(got, (DIM - 16) / 64 * 64, 64);
        int off = 0;
        for (int e = 0; e < DIM; e++) off += fabsf(got[e] - rows[g * DIM + e]) > 1e-5f * fabsf(got[e]) + 1e-5f;
        assert_true(off <= 1);
    }
    free(c), free(z), free(ape), free(norm), free(rows), free(coded), free(hc), free(hz);
}

static void test_compressors(void **state)
{
    static const int ratio[] = {4, 2, 8, 16};
    for (int i = 0; i < 4; i++)
        for (int m = 0; m < 2; m++) {
            one_compressor(ratio[i], false, B[m]);
            if (ratio[i] == 4) one_compressor(4, true, B[m]);
        }
}

/* ---- selection ---- */

/* Small integers: scores are exact, and ties (zero above all) are everywhere. */
static void test_selection_ties(void **state)
{
    enum {
        HEADS = 8,
        DIM = 32,
        GROUPS = 200,
        TOPK = 24,
        T = 40
    }; /* 1/sqrt(HEADS*DIM) is a power of two: it rounds nothing */
    float *ik = noises(GROUPS * DIM), *iq = noises(T * HEADS * DIM), *w = noises(T * HEADS);
    const aff_rowfmt f = aff__rowfmt_f32(DIM);
    aff_layer_state s = {.ikey = ik, .key = &f};
    aff_layer_state *st[T];
    int64_t pos[T];
    int first[T] = {0}, sel[T * TOPK];
    aff_error err;
    for (int i = 0; i < GROUPS * DIM; i++) ik[i] = (float)(below(3) - 1);
    for (int i = 0; i < T * HEADS * DIM; i++) iq[i] = below(3) ? 0.0f : (float)(below(3) - 1);
    for (int i = 0; i < T * HEADS; i++) w[i] = (float)(below(7) - 4);
    for (int t = 0; t < T; t++) pos[t] = 60 + 18 * t, st[t] = &s; /* 15 groups, fewer than topk, up to 190 */
    const aff_rowset rs = {.n = T, .pos = pos, .first = first, .state = st};
    for (int m = 0; m < 3; m++) {
        memset(sel, 0xff, sizeof sel);
        assert_int_equal(B[m]->index_select(B[m], &rs, iq, w, HEADS, DIM, 4, TOPK, sel, &err), AFF_OK);
        for (int t = 0; t < T; t++) {
            const int n = (int)((pos[t] + 1) / 4), k = n < TOPK ? n : TOPK;
            long score[GROUPS];
            for (int g = 0; g < n; g++) {
                score[g] = 0;
                for (int h = 0; h < HEADS; h++) {
                    long d = 0;
                    for (int i = 0; i < DIM; i++) d += (long)iq[(t * HEADS + h) * DIM + i] * (long)ik[g * DIM + i];
                    score[g] += (long)w[t * HEADS + h] * (d > 0 ? d : 0);
                }
            }
            int at = 0;
            for (int g = 0; g < n; g++) { /* taken iff fewer than k come before it */
                int before = 0;
                for (int j = 0; j < n; j++) before += score[j] > score[g] || (score[j] == score[g] && j < g);
                if (before >= k) continue;
                assert_int_equal(sel[t * TOPK + at], g);
                at++;
            }
            assert_int_equal(at, k);
        }
    }
    free(ik), free(iq), free(w);
}

static void test_index_queries(void **state)
{
    enum { HEADS = 3, DIM = 128, T = 5 };
    float freq[32], *iq = noises(T * HEADS * DIM), *a = malloc(sizeof(float) * T * HEADS * DIM),
                    *b = malloc(sizeof(float) * T * HEADS * DIM);
    int64_t pos[T] = {0, 1, 127, 5000, 1048575};
    double v[DIM];
    for (int i = 0; i < 32; i++) freq[i] = 1.0f / (float)(1 + i * i);
    const aff_rope r = {freq, 32};
    memcpy(a, iq, sizeof(float) * T * HEADS * DIM);
    memcpy(b, iq, sizeof(float) * T * HEADS * DIM);
    const aff_rowset rs = {.n = T, .pos = pos};
    B[0]->index_query(B[0], &rs, a, HEADS, DIM, &r);
    B[1]->index_query(B[1], &rs, b, HEADS, DIM, &r);
    for (int i = 0; i < T * HEADS; i++) {
        widen(iq + i * DIM, DIM, v);
        rope(v, DIM, &r, pos[i / HEADS], 1);
        near_row("indexer query", a + i * DIM, v, DIM, 1e-6);
        aff__hadamard(a + i * DIM, DIM);
        aff__a4(a + i * DIM, DIM);
        assert_memory_equal(a + i * DIM, b + i * DIM, DIM * 4);
    }
    free(iq), free(a), free(b);
}

/* ---- attention ---- */

static void test_attention(void **state)
{
    for (int round = 0; round < 8; round++) {
        const int D = 2 * (9 + below(70)), heads = 1 + below(20), ring = 50, T = 1 + below(6), pairs = 4;
        float *raw = noises(ring * D), *comp = noises(300 * D), *extra = noises(6 * D), *sink = noises(heads),
              *q = noises((int64_t)T * heads * D);
        float freq[4] = {1.0f, 0.3f, 0.02f, 0.001f}, *o = noises((int64_t)T * heads * D);
        int sel[90];
        aff_keyset keys[6];
        int64_t pos[6];
        aff_error err;
        const aff_rope r = {freq, pairs};
        const aff_rowfmt f = aff__rowfmt_f32(D);
        for (int i = 0, g = 0; i < 90; i++) sel[i] = g += 1 + below(3);
        for (int t = 0; t < T; t++) {
            pos[t] = 1000 + below(50000);
            keys[t] = (aff_keyset){.row = &f,
                                   .raw = raw,
                                   .raw_size = ring,
                                   .lo = 970 + below(60),
                                   .n_raw = below(41),
                                   .comp = comp,
                                   .n_comp = below(90),
                                   .sel = t % 2 ? sel : NULL,
                                   .extra = extra,
                                   .n_extra = below(7)};
            if (t == 5) keys[t].n_raw = keys[t].n_comp = keys[t].n_extra = 0; /* only the sink: zero */
        }
        assert_int_equal(aff__cpu_attend_rows(B[0], q, T, heads, D, keys, sink, &r, pos, o, &err), AFF_OK);
        for (int t = 0; t < T; t++) {
            const aff_keyset *k = &keys[t];
            const float *row[256];
            int n = 0;
            for (int i = 0; i < k->n_raw; i++) row[n++] = raw + (k->lo + i) % ring * D;
            for (int i = 0; i < k->n_comp; i++) row[n++] = comp + (k->sel ? sel[i] : i) * D;
            for (int i = 0; i < k->n_extra; i++) row[n++] = extra + i * D;
            for (int h = 0; h < heads; h++) {
                const float *qh = q + ((int64_t)t * heads + h) * D;
                double s[256], top = (double)sink[h], Z, v[160] = {0};
                for (int j = 0; j < n; j++) {
                    s[j] = 0;
                    for (int d = 0; d < D; d++) s[j] += (double)qh[d] * (double)row[j][d];
                    s[j] /= sqrt(D);
                    top = fmax(top, s[j]);
                }
                Z = exp((double)sink[h] - top);
                for (int j = 0; j < n; j++) Z += exp(s[j] - top);
                for (int j = 0; j < n; j++)
                    for (int d = 0; d < D; d++) v[d] += exp(s[j] - top) / Z * (double)row[j][d];
                rope(v, D, &r, pos[t], -1);
                near_row("attention", o + ((int64_t)t * heads + h) * D, v, D, 5e-6);
            }
        }
        free(raw), free(comp), free(extra), free(sink), free(q), free(o);
    }
}

/* ---- router and the rest ---- */

static double score_of(aff_scoring kind, const float *l, int E, int e)
{
    double z = 0;
    if (kind == AFF_SIGMOID) return sigmoid((double)l[e]);
    if (kind == AFF_SQRTSOFTPLUS) return sqrt(log1p(exp((double)l[e])));
    for (int i = 0; i < E; i++) z += exp((double)l[i] - (double)l[e]);
    return 1 / z;
}

static void test_router(void **state)
{
    enum { E = 37, K = 5, T = 60 };
    static const aff_scoring kinds[] = {AFF_SQRTSOFTPLUS, AFF_SIGMOID, AFF_SOFTMAX};
    float *l = noises(T * E), bias[E], w[T * K];
    int32_t hash[4 * K], ids[T], picks[T * K];
    for (int i = 0; i < T * E; i++) l[i] = (float)below(9) * 0.75f - 3.0f; /* nine values: ties in every row */
    for (int e = 0; e < E; e++)
        bias[e] = (float)(below(3) - 1) * 4.0f; /* large: bias decides, and must not reach the weights */
    for (int t = 0; t < T; t++) ids[t] = t % 4;
    for (int i = 0; i < 4 * K; i++) hash[i] = (i * 7 + 3) % E;
    l[3] = 60.0f; /* far out in both tails */
    l[E + 4] = -40.0f;
    for (int kind = 0; kind < 3; kind++)
        for (int hashed = 0; hashed < 2; hashed++) {
            const aff_router r = {.scoring = kinds[kind],
                                  .experts = E,
                                  .picks = K,
                                  .scale = 1.5f,
                                  .bias = hashed ? NULL : bias,
                                  .hash = hashed ? hash : NULL};
            B[0]->route(B[0], &r, l, ids, T, picks, w);
            for (int t = 0; t < T; t++) {
                double want[K], sum = 0;
                int id[K];
                for (int k = 0; k < K; k++) {
                    int top = -1;
                    for (int e = 0; !hashed && e < E; e++) { /* equal logits and bias tie exactly: lower id */
                        bool used = false;
                        for (int i = 0; i < k; i++) used |= id[i] == e;
                        const double a = score_of(kinds[kind], l + t * E, E, e) + (double)bias[e];
                        if (!used &&
                            (top < 0 || a > score_of(kinds[kind], l + t * E, E, top) + (double)bias[top] + 1e-9))
                            top = e;
                    }
                    id[k] = hashed ? hash[ids[t] * K + k] : top;
                    sum += want[k] = score_of(kinds[kind], l + t * E, E, id[k]);
                }
                for (int k = 0; k < K; k++) {
                    assert_int_equal(picks[t * K + k], id[k]);
                    want[k] *= 1.5 / (kinds[kind] == AFF_SOFTMAX ? 1 : sum);
                }
                near_row("router weights", w + t * K, want, K, 2e-6);
            }
        }
    for (int e = 0; e < E; e++) l[e] = NAN; /* distinct experts even so */
    const aff_router r = {.experts = E, .picks = K, .scale = 1, .bias = bias};
    B[0]->route(B[0], &r, l, ids, 1, picks, w);
    for (int k = 0; k < K; k++)
        for (int j = 0; j < k; j++) assert_int_not_equal(picks[k], picks[j]);
    assert_true(isnan(w[0]));
    free(l);
}

static void test_swiglu(void **state)
{
    static const float g[] = {-30, -2, -0.5f, 0, 0.5f, 2, 30, NAN, 1, INFINITY, -100},
                       u[] = {3, -9, 9, 1, -0.25f, 30, -30, 1, NAN, 2, 5};
    static const float limits[] = {0.5f, 10, 0, -1};
    for (int k = 0; k < 4; k++) {
        float a[11];
        const double lim = (double)limits[k] > 0 ? (double)limits[k] : INFINITY;
        memcpy(a, g, sizeof a);
        aff__cpu_swiglu(B[0], a, u, limits[k], 11);
        for (int i = 0; i < 11; i++) {
            if (isnan(g[i]) || isnan(u[i])) {
                assert_true(isnan(a[i])); /* a NaN must not turn into the limit */
                continue;
            }
            const double x = fmin((double)g[i], lim), y = fmax(fmin((double)u[i], lim), -lim),
                         want = x * sigmoid(x) * y;
            if (isinf(want))
                assert_true(isinf(a[i]));
            else
                assert_true(fabs((double)a[i] - want) <= 1e-6 * fabs(want) + 1e-40);
        }
    }
}

static void test_small_ops(void **state)
{
    enum { T = 3, K = 4, H = 37, N = 4 };
    float *y = noises(T * K * H), *f = noises(T * H), *X = noises(T * N * H), tap[T * 2 * H],
          *g = malloc(sizeof(float) * T * H);
    double v[H];
    memcpy(g, f, sizeof(float) * T * H);
    B[0]->sum_experts(B[0], y, T, K, H, g);
    B[0]->stream_mean(B[0], X, T, N, H, tap + H, 2 * H);
    for (int t = 0; t < T; t++) {
        for (int d = 0; d < H; d++) {
            float s = y[t * K * H + d];
            for (int k = 1; k < K; k++) s += y[(t * K + k) * H + d];
            assert_true(g[t * H + d] == s + f[t * H + d]); /* ascending experts, the shared one last */
            v[d] = 0;
            for (int n = 0; n < N; n++) v[d] += (double)X[(t * N + n) * H + d] / N;
        }
        near_row("mean", tap + (2 * t + 1) * H, v, H, 1e-6);
    }
    /* Embedding: exact, in every stream. */
    uint16_t e[5 * H];
    for (int i = 0; i < 5 * H; i++) e[i] = aff__f32_to_bf16(noise());
    const aff_weight w = {.dtype = AFF_BF16, .rows = 5, .cols = H, .data = e};
    const int32_t ids[T] = {4, 0, 4};
    B[2]->embed(B[2], &w, ids, T, N, X);
    for (int i = 0; i < T * N * H; i++) assert_true(X[i] == aff__bf16_to_f32(e[ids[i / (N * H)] * H + i % H]));
    /* Argmax: lowest of equals; NaN never wins. */
    const float rows[4][5] = {{1, 3, 2, 3, 0},
                              {NAN, 1, NAN, 2, 2},
                              {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
                              {NAN, NAN, NAN, NAN, -INFINITY}};
    int32_t id[4];
    B[0]->argmax(B[0], &rows[0][0], 4, 5, id);
    assert_int_equal(id[0], 1);
    assert_int_equal(id[1], 3);
    assert_int_equal(id[2], 0);
    assert_int_equal(id[3], 4);
    free(y), free(f), free(X), free(g);
}

static int open_backends(void **state)
{
    aff_error err;
    for (int m = 0; m < 3; m++)
        if (aff__cpu_backend(&B[m], (aff_numerics)m, 1 + m, &err) != AFF_OK) return -1;
    return 0;
}
static int close_backends(void **state)
{
    for (int m = 0; m < 3; m++) B[m]->free(B[m]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hyper_connections),
        cmocka_unit_test(test_queries_and_rows),
        cmocka_unit_test(test_compressors),
        cmocka_unit_test(test_selection_ties),
        cmocka_unit_test(test_index_queries),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_router),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_small_ops),
    };
    return cmocka_run_group_tests(tests, open_backends, close_backends);
}
