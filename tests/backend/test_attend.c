/* Attention, index scores, top-k: double precision and sorting as judges, and the same bits over instruction sets. */
#include "support/test.h"
#include "backend/kernel_random.h"
#include "backend/cpu/inner.h"
#include "backend/cpu/kernels.h"
#include "backend/mathfn.h"
#include "quant/numbers.h"

typedef struct problem {
    int heads, D, n;
    float scale, *q, *rows, *sink;
    const float **key;
} problem;

static problem random_problem(int heads, int D, int n, float spread, uint64_t *seed)
{
    problem p = {heads,
                 D,
                 n,
                 1.0f / sqrtf((float)D),
                 floats((int64_t)heads * D, false, seed),
                 floats((int64_t)(n + 5) * (D + 3), false, seed),
                 floats(heads, false, seed),
                 malloc((size_t)(n + 1) * sizeof(float *))};
    assert_non_null(p.key);
    for (int i = 0; i < heads * D; i++) p.q[i] *= spread;
    for (int j = 0; j < n; j++) p.key[j] = p.rows + (int64_t)draw_int(seed, 0, n + 4) * (D + 3);
    return p;
}

static void free_problem(problem *p)
{
    free(p->q), free(p->rows), free(p->sink), free((void *)(uintptr_t)p->key);
}

static void attention_agrees_with_double_precision(void **state)
{
    (void)state;
    uint64_t seed = 21;
    const int widths[] = {512, 64, 7, 130};
    for (int round = 0; round < 32; round++) {
        int D = widths[round % 4];
        problem p = random_problem(draw_int(&seed, 1, 7), D, round % 8 == 0 ? round / 8 : draw_int(&seed, 1, 210),
                                   round % 3 ? 3.0f : 60.0f, &seed);
        float *o = floats((int64_t)p.heads * D, false, &seed);
        double *s = malloc((size_t)(p.n + 1) * sizeof *s);
        EACH_LEVEL(l)
        {
            aff__cpu_attend(p.q, p.heads, D, p.key, p.n, p.sink, p.scale, o);
            for (int h = 0; h < p.heads; h++) {
                double top = (double)p.sink[h], z;
                for (int j = 0; j < p.n; j++) {
                    s[j] = 0;
                    for (int d = 0; d < D; d++) s[j] += (double)p.q[h * D + d] * (double)p.key[j][d];
                    s[j] *= (double)p.scale;
                    top = fmax(top, s[j]);
                }
                z = exp((double)p.sink[h] - top);
                for (int j = 0; j < p.n; j++) z += s[j] = exp(s[j] - top);
                for (int d = 0; d < D; d++) {
                    double want = 0, got = (double)o[h * D + d];
                    for (int j = 0; j < p.n; j++) want += s[j] * (double)p.key[j][d] / z;
                    if (!(fabs(got - want) <= 2e-5)) fail_msg("D %d, n %d: %.9g, expected %.9g", D, p.n, got, want);
                }
            }
        }
        free(o), free(s), free_problem(&p);
    }
}

/* kernels.h's words, one head and one element at a time. */
static float defined_attention(const problem *p, int h, int d)
{
    float M = p->sink[h], Z = 1, V = 0;
    for (int j0 = 0; j0 < p->n; j0 += 64) {
        float s[64], m = -INFINITY, z = 0, v = 0;
        int n = p->n - j0 < 64 ? p->n - j0 : 64;
        for (int j = 0; j < n; j++) {
            aff__cpu_cap(AFF_CPU_SCALAR);
            s[j] = aff__cpu_dot(p->q + (int64_t)h * p->D, p->key[j0 + j], p->D) * p->scale;
            m = fmaxf(m, s[j]);
        }
        for (int j = 0; j < n; j++) {
            float e = aff__expf(s[j] - m);
            z += e;
            v = fmaf(e, p->key[j0 + j][d], v);
        }
        float top = fmaxf(M, m), a = aff__expf(M - top), b = aff__expf(m - top);
        Z = fmaf(Z, a, z * b), V = fmaf(V, a, v * b), M = top;
    }
    return V / Z;
}

static void attention_has_the_defined_bits(void **state)
{
    (void)state;
    uint64_t seed = 22;
    for (int round = 0; round < 60; round++) {
        int heads = draw_int(&seed, 1, 9), D = round % 4 ? draw_int(&seed, 1, 150) : 512;
        problem p = random_problem(heads, D, round < 20 ? draw_int(&seed, 60, 70) : draw_int(&seed, 0, 150),
                                   round % 3 ? 4.0f : 200.0f, &seed);
        if (round % 11 == 7 && p.n) p.q[draw(&seed, (uint64_t)(heads * D))] = NAN;
        if (round % 11 == 8) fill(p.q, heads * D, true, &seed);
        float *o = floats((int64_t)heads * D, false, &seed), *want = floats((int64_t)heads * D, false, &seed);
        aff__cpu_cap(AFF_CPU_SCALAR);
        aff__cpu_attend(p.q, heads, D, p.key, p.n, p.sink, p.scale, want);
        if (round % 11 < 7)
            for (int i = 0; i < 5; i++) {
                int h = draw_int(&seed, 0, heads - 1), d = draw_int(&seed, 0, D - 1);
                float one = defined_attention(&p, h, d);
                assert_int_equal(first_difference(want + h * D + d, &one, 1), -1);
            }
        EACH_LEVEL(l)
        {
            aff__cpu_attend(p.q, heads, D, p.key, p.n, p.sink, p.scale, o);
            assert_int_equal(first_difference(o, want, (int64_t)heads * D), -1);
            for (int h = 0; h < heads; h++) { /* a head alone */
                aff__cpu_attend(p.q + h * D, 1, D, p.key, p.n, p.sink + h, p.scale, o);
                assert_int_equal(first_difference(o, want + h * D, D), -1);
            }
        }
        free(o), free(want), free_problem(&p);
    }
}

static void index_scores_agree(void **state)
{
    (void)state;
    uint64_t seed = 23;
    for (int round = 0; round < 60; round++) {
        int heads = round % 3 ? draw_int(&seed, 1, 20) : 64, D = round % 2 ? 128 : draw_int(&seed, 1, 200),
            n = draw_int(&seed, 0, 23);
        bool wild = round % 7 == 6;
        int64_t ld = D;
        const aff_rowfmt f = aff__rowfmt_f32(D);
        float *iq = floats((int64_t)heads * D, wild, &seed), *ik = floats(n * ld, wild, &seed),
              *w = floats(heads, false, &seed);
        float score[24], one;
        EACH_LEVEL(l)
        {
            aff_index_query q;
            aff__cpu_index_prepare(&q, iq, w, heads, &f, NULL);
            aff__cpu_index_scores(&q, ik, n, score);
            for (int g = 0; g < n; g++) {
                float s = 0;
                double exact = 0, mag = 0;
                for (int h = 0; h < heads; h++) {
                    double dd = 0;
                    for (int k = 0; k < D; k++) {
                        double v = (double)iq[h * D + k] * (double)ik[g * ld + k];
                        dd += v, mag += fabs(v * (double)w[h]);
                    }
                    exact += (double)w[h] * fmax(0.0, dd);
                    float d = aff__cpu_dot(iq + h * D, ik + g * ld, D);
                    s = fmaf(w[h], d > 0 ? d : 0.0f, s);
                }
                assert_int_equal(first_difference(score + g, &s, 1), -1);
                if (!wild) assert_true(fabs((double)s - exact) <= 2e-6 * mag);
                aff__cpu_index_scores(&q, ik + g * ld, 1, &one);
                assert_int_equal(first_difference(&one, &s, 1), -1);
            }
        }
        free(iq), free(ik), free(w);
    }
}

/* The cuts alone, in any order, then merged in theirs. */
static void attend_cut_by_cut(const aff_keyset *k, const float *q, int heads, int D, const float *sink, float *buf,
                              float *o)
{
    const int cuts = (k->n_raw + k->n_comp + k->n_extra + 63) / 64;
    float *r = malloc(sizeof *r * (size_t)(cuts * heads * (D + 2) + 1)), *M = malloc(sizeof *M * (size_t)(2 * heads));
    assert_true(r && M);
    for (int c = cuts - 1; c >= 0; c--) {
        float *m = r + (int64_t)c * heads * (D + 2);
        aff__cpu_attend_cut(q, heads, D, k, c, 0.05f, buf, m, m + heads, m + 2 * heads);
    }
    for (int h = 0; h < heads; h++) {
        float Z = 1, *V = o + h * D;
        M[h] = sink[h];
        memset(V, 0, sizeof *V * (size_t)D);
        for (int c = 0; c < cuts; c++) {
            const float *m = r + (int64_t)c * heads * (D + 2);
            aff__cpu_attend_merge(D, m[h], m[heads + h], m + 2 * heads + h * D, &M[h], &Z, V);
        }
        for (int d = 0; d < D; d++) V[d] /= Z;
    }
    free(r), free(M);
}

/* kernels.h's words for keys of bf16: one step of a lane, subnormals as zeros (test_matmul looks at those). */
static float pair_step(float acc, float w0, float w1, float x0, float x1)
{
    acc = fmaf(w1, x1, acc);
    acc = fabsf(acc) < 0x1p-126f ? copysignf(0, acc) : acc;
    acc = fmaf(w0, x0, acc);
    return fabsf(acc) < 0x1p-126f ? copysignf(0, acc) : acc;
}

static float fold(float lane[16])
{
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

static void defined_pairs_attention(const float *q, int D, const float *const *key, int n, float sink, float scale, float *V)
{
    float M = sink, Z = 1;
    memset(V, 0, sizeof *V * (size_t)D);
    for (int j0 = 0; j0 < n; j0 += 64) {
        float p[64] = {0}, m = -INFINITY, sum[16] = {0};
        const int some = n - j0 < 64 ? n - j0 : 64;
        for (int j = 0; j < some; j++) {
            float lane[16] = {0};
            for (int d = 0; d < D; d += 2)
                lane[d / 2 % 16] = pair_step(lane[d / 2 % 16], key[j0 + j][d], d + 1 < D ? key[j0 + j][d + 1] : 0, aff__round_bf16(q[d]),
                                             d + 1 < D ? aff__round_bf16(q[d + 1]) : 0);
            p[j] = fold(lane) * scale;
            m = fmaxf(m, p[j]);
        }
        for (int j = 0; j < some; j++) sum[j % 16] += p[j] = aff__round_bf16(aff__expf(p[j] - m));
        const float top = fmaxf(M, m), a = aff__expf(M - top), b = aff__expf(m - top);
        Z = fmaf(Z, a, fold(sum) * b), M = top;
        for (int d = 0; d < D; d++) {
            float v = 0;
            for (int j = 0; j < some; j += 2) v = pair_step(v, p[j], p[j + 1], key[j0 + j][d], j + 1 < some ? key[j0 + j + 1][d] : 0);
            V[d] = fmaf(V[d], a, v * b);
        }
    }
    for (int d = 0; d < D; d++) V[d] /= Z;
}

/* Rows as stored against the same rows in float32: attention gives the same bits, at every level; where bf16 holds the rows, those of its
 * definition. */
static void stored_rows_give_the_same_bits(void **state)
{
    (void)state;
    uint64_t seed = 25;
    const aff_numerics modes[] = {AFF_MATH, AFF_SIM, AFF_FAST};
    for (int round = 0; round < 48; round++) {
        const aff_numerics num = modes[round % 3];
        const int rope = round % 4 == 3 ? 18 : 64, D = round % 8 == 3 ? 2 * draw_int(&seed, 20, 80) : round % 8 == 7 ? 64 * draw_int(&seed, 1, 3) + 18 : 512,
                  heads = round % 5 == 4 ? 70 : draw_int(&seed, 1, 9), ring = 100, rows = 220, extras = 5;
        const aff_rowfmt f = aff__rowfmt_kv(num, D, rope);
        float *raw = floats((int64_t)ring * D, false, &seed), *comp = floats((int64_t)rows * D, false, &seed),
              *extra = floats(extras * D, false, &seed), *q = floats((int64_t)heads * D, false, &seed),
              *sink = floats(heads, false, &seed), *want = malloc(sizeof(float) * (size_t)(heads * D)),
              *got = malloc(sizeof(float) * (size_t)(heads * D)), *buf = aligned_alloc(64, aff__cpu_attend_bytes(D));
        uint8_t *raw_s = malloc((size_t)(ring * f.bytes)), *comp_s = malloc((size_t)(rows * f.bytes));
        for (int i = 0; i < ring + rows; i++) {
            float *x = i < ring ? raw + i * D : comp + (i - ring) * D;
            if (num != AFF_MATH) aff__a8(x, (D - rope) / 64 * 64, 64);
            for (int e = D - rope; num == AFF_FAST && e < D; e++) x[e] = aff__round_bf16(x[e]);
            aff__row_encode(&f, x, i < ring ? raw_s + i * f.bytes : comp_s + (i - ring) * f.bytes);
        }
        int sel[150];
        for (int i = 0, g = -1; i < 150; i++) sel[i] = g += 1 + (int)draw(&seed, i % 2 + 1);
        const aff_keyset k = {.row = &f,
                              .raw = raw_s,
                              .raw_size = ring,
                              .lo = draw_int(&seed, 0, 5000),
                              .n_raw = draw_int(&seed, 0, 90),
                              .comp = comp_s,
                              .sel = round % 2 ? sel : NULL,
                              .n_comp = draw_int(&seed, 0, 150),
                              .extra = extra,
                              .n_extra = round % 3 ? 0 : extras};
        const float *key[256];
        int n = 0;
        for (int i = 0; i < k.n_raw; i++) key[n++] = raw + (k.lo + i) % ring * D;
        for (int i = 0; i < k.n_comp; i++) key[n++] = comp + (k.sel ? sel[i] : i) * D;
        for (int i = 0; i < k.n_extra; i++) key[n++] = extra + i * D;
        const bool pairs = num == AFF_FAST && (D - rope) % 64 == 0;
        assert_true(pairs == aff__rows_pair(&f));
        for (int i = 0; pairs && i < extras * D; i++) extra[i] = aff__round_bf16(extra[i]);
        if (round % 12 == 8) q[draw(&seed, (uint64_t)(heads * D))] = round % 24 == 8 ? NAN : INFINITY;
        aff__cpu_cap(AFF_CPU_SCALAR);
        if (!pairs) aff__cpu_attend(q, heads, D, key, n, sink, 0.05f, want);
        for (int h = 0; pairs && h < heads; h++) defined_pairs_attention(q + h * D, D, key, n, sink[h], 0.05f, want + h * D);
        EACH_LEVEL(l)
        {
            aff__cpu_attend_keys(q, heads, D, &k, sink, 0.05f, buf, got);
            assert_int_equal(first_difference(got, want, (int64_t)heads * D), -1);
            attend_cut_by_cut(&k, q, heads, D, sink, buf, got); /* as threads share a row */
            assert_int_equal(first_difference(got, want, (int64_t)heads * D), -1);
        }
        free(raw), free(comp), free(extra), free(q), free(sink), free(want), free(got), free(buf), free(raw_s);
        free(comp_s);
    }
}

/* The power of two that A4 gives a block: the least s with amax <= 6 s; of the values after it, so that a smaller one
 * may do. */
static float block_scale(const float *x)
{
    float amax = 6 * 0x1p-126f, s = 0x1p-126f;
    for (int i = 0; i < 32; i++) {
        if (x[i] != x[i]) return NAN;
        amax = fmaxf(amax, fabsf(x[i]));
    }
    while (6 * s < amax) s *= 2;
    return s;
}

/* kernels.h's words for coded rows, on the values that the codes stand for. */
static float defined_code_score(const float *iq, const float *ik, const float *w, int heads, int D)
{
    float s = 0;
    for (int h = 0; h < heads; h++) {
        float d = 0;
        for (int b = 0; b < D; b += 32) {
            const float sq = block_scale(iq + h * D + b), sk = block_scale(ik + b);
            double sum = 0; /* exact */
            for (int i = b; i < b + 32; i++) sum += (double)(iq[h * D + i] / sq * 2) * (double)(ik[i] / sk * 2);
            d = fmaf((float)sum, sq * 0.25f * sk, d);
        }
        s = fmaf(w[h], d > 0 ? d : 0.0f, s);
    }
    return s;
}

static void coded_index_scores_are_exact_integers(void **state)
{
    (void)state;
    uint64_t seed = 26;
    for (int round = 0; round < 60; round++) {
        const int D = (int[]){128, 32, 64, 1024, 256}[round % 5], heads = round == 1 ? 64 : draw_int(&seed, 1, 20),
                  n = draw_int(&seed, 1, 50);
        const aff_rowfmt f = aff__rowfmt_key(AFF_FAST, D), plain = aff__rowfmt_f32(D);
        float *iq = floats((int64_t)heads * D, false, &seed), *w = floats(heads, false, &seed),
              *ik = floats((int64_t)n * D, round % 7 == 6, &seed), got[50], want[50], floats_say[50];
        uint8_t *stored = malloc((size_t)(n * f.bytes));
        void *buf = aligned_alloc(64, (size_t)(aff__cpu_index_bytes(heads, &f) + 63) / 64 * 64);
        assert_non_null(stored), assert_non_null(buf);
        for (int g = 0; g < n + heads; g++) {
            float *x = g < n ? ik + g * D : iq + (g - n) * D;
            if (round % 7 < 5) aff__hadamard(x, D);
            if (round % 8 == 7 && g % 3 == 0) x[draw_int(&seed, 0, D - 1)] = g % 2 ? INFINITY : NAN; /* NaN after A4 */
            if (round % 8 == 3 && g % 5 == 0) memset(x, 0, 32 * sizeof *x);
            aff__a4(x, D);
            if (g < n) aff__row_encode(&f, x, stored + g * f.bytes);
        }
        for (int g = 0; g < n; g++) want[g] = defined_code_score(iq, ik + g * D, w, heads, D);
        aff_index_query q;
        EACH_LEVEL(l)
        {
            aff__cpu_index_prepare(&q, iq, w, heads, &f, buf);
            aff__cpu_index_scores(&q, stored, n, got);
            assert_int_equal(first_difference(got, want, n), -1);
            for (int g = 0; g < n; g++) aff__cpu_index_scores(&q, stored + g * f.bytes, 1, got + g);
            assert_int_equal(first_difference(got, want, n), -1);
        }
        if (round % 7 < 5 && round % 8 != 7) { /* scales are near each other: all sums are exact, as floats too */
            aff__cpu_index_prepare(&q, iq, w, heads, &plain, NULL);
            aff__cpu_index_scores(&q, ik, n, floats_say);
            assert_int_equal(first_difference(floats_say, want, n), -1);
        }
        free(iq), free(w), free(ik), free(stored), free(buf);
    }
}

typedef struct ranked {
    float score;
    int at;
} ranked;

static int by_rank(const void *pa, const void *pb)
{
    const ranked *a = pa, *b = pb;
    bool na = isnan(a->score), nb = isnan(b->score);
    if (na != nb) return na ? 1 : -1;
    if (!na && a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->at - b->at;
}

static int by_value(const void *a, const void *b)
{
    return *(const int *)a - *(const int *)b;
}

static void topk_agrees_with_sorting(void **state)
{
    (void)state;
    uint64_t seed = 24;
    enum { MAX = 3000 };
    static float score[MAX];
    static ranked r[MAX];
    static int sel[MAX], want[MAX], scratch[MAX];
    for (int round = 0; round < 400; round++) {
        int n = draw_int(&seed, 0, round % 4 ? 60 : MAX), k = draw_int(&seed, 0, round % 2 ? 64 : n);
        fill(score, n, round % 3 == 0, &seed);
        for (int i = 0; i < n; i++) {
            if (round % 3 == 1) score[i] = roundf(score[i] * 4); /* many ties, both zeros */
            if (round % 5 == 4 && draw(&seed, 4) == 0)
                score[i] = draw(&seed, 2) ? NAN : draw(&seed, 2) ? INFINITY : -INFINITY;
            r[i] = (ranked){score[i], i};
        }
        qsort(r, (size_t)n, sizeof *r, by_rank);
        int count = n < k ? n : k;
        for (int i = 0; i < count; i++) want[i] = r[i].at;
        qsort(want, (size_t)count, sizeof *want, by_value);
        assert_int_equal(aff__cpu_topk(score, n, k, sel, scratch), count);
        assert_memory_equal(sel, want, (size_t)count * sizeof *sel);
    }
    /* Long lists, for which a sample chooses the candidates: smooth, tied, and arranged so that it misleads. */
    enum { LONG = 40000 };
    float *big = malloc(LONG * sizeof *big);
    ranked *order = malloc(LONG * sizeof *order);
    int *room = malloc(LONG * sizeof *room), *best = malloc(LONG * sizeof *best);
    assert_true(big && order && room && best);
    for (int round = 0; round < 16; round++) {
        const int n = LONG - (int)draw(&seed, 3000), k = round % 4 == 3 ? 5000 : draw_int(&seed, 1, 512);
        for (int i = 0; i < n; i++) {
            big[i] = draw_unit(&seed);
            if (round % 4 == 1) big[i] = roundf(big[i] * 8);
            if (round % 8 == 2)
                big[i] = i % (n / 4096) ? -big[i] * big[i] : 1 + big[i]; /* the sample sees the large ones */
            if (round % 8 == 6) big[i] = i % (n / 4096) ? big[i] : NAN;
            order[i] = (ranked){big[i], i};
        }
        qsort(order, (size_t)n, sizeof *order, by_rank);
        for (int i = 0; i < k; i++) best[i] = order[i].at;
        qsort(best, (size_t)k, sizeof *best, by_value);
        int *found = malloc((size_t)k * sizeof *found);
        assert_non_null(found);
        assert_int_equal(aff__cpu_topk(big, n, k, found, room), k);
        assert_memory_equal(found, best, (size_t)k * sizeof *found);
        free(found);
    }
    free(big), free(order), free(room), free(best);
    const float few[] = {1, 5, NAN, 5, -0.0f, 5, -INFINITY, 0};
    assert_int_equal(aff__cpu_topk(few, 8, 2, sel, scratch), 2);
    assert_true(sel[0] == 1 && sel[1] == 3);
    assert_int_equal(aff__cpu_topk(few, 8, 5, sel, scratch), 5);
    assert_true(sel[0] == 0 && sel[3] == 4 && sel[4] == 5); /* -0 equals 0, the lower index wins */
    assert_int_equal(aff__cpu_topk(few, 8, 7, sel, scratch), 7);
    assert_true(sel[1] == 1 && sel[2] == 3 && sel[6] == 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(attention_agrees_with_double_precision),
                                       cmocka_unit_test(attention_has_the_defined_bits),
                                       cmocka_unit_test(index_scores_agree),
                                       cmocka_unit_test(stored_rows_give_the_same_bits),
                                       cmocka_unit_test(coded_index_scores_are_exact_integers),
                                       cmocka_unit_test(topk_agrees_with_sorting)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
