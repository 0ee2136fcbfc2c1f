/* Attention around its core: rope, KV rows, compressors, indexer (spec model-v4 section 7). */
#include "backend/cpu/cpu.h"
#include "backend/cpu/inner.h"
#include "backend/mathfn.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <math.h>
#include <string.h>

/* cos and sin of one position; the angle is the float32 product, as in the published code. */
static void rope_table(const aff_rope *r, int64_t pos, float *cs, float *sn)
{
    for (int i = 0; i < r->pairs; i++) aff__sincos((double)((float)pos * r->freq[i]), &sn[i], &cs[i]);
}

/* Rotates the last 2*pairs values of v[n], adjacent pairs; dir = -1 is the inverse. */
static void rotate(float *v, int n, const aff_rope *r, const float *cs, const float *sn, float dir)
{
    float *x = v + n - 2 * r->pairs;
    for (int i = 0; i < r->pairs; i++) {
        const float a = x[2 * i], b = x[2 * i + 1], s = dir * sn[i];
        x[2 * i] = a * cs[i] - b * s;
        x[2 * i + 1] = a * s + b * cs[i];
    }
}

/* What a KV row goes through before it is attended to and cached. */
static void quantise_row(aff_numerics num, float *row, int D, int R)
{
    if (num == AFF_MATH) return;
    aff__a8(row, (D - R) / 64 * 64, 64);
    if (num == AFF_FAST)
        for (int i = D - R; i < D; i++) row[i] = aff__round_bf16(row[i]);
}

typedef struct {
    aff_backend *b;
    aff_cpu *cpu;
    float *q;
    int heads, D;
    float eps;
    const float *norm;
    const aff_rope *rope;
    const int64_t *pos;
} finish_job;

static void q_row(void *ctx, int64_t t, int thread)
{
    const finish_job *j = ctx;
    float *cs = aff__cpu_scratch(j->cpu, thread), *sn = cs + j->rope->pairs;
    rope_table(j->rope, j->pos[t], cs, sn);
    for (int h = 0; h < j->heads; h++) {
        float *v = j->q + (t * j->heads + h) * j->D;
        aff__cpu_rms_row(v, NULL, j->eps, j->D, v);
        rotate(v, j->D, j->rope, cs, sn, 1);
    }
}

void aff__cpu_q_finish(aff_backend *b, float *q, int T, int heads, int D, float eps, const aff_rope *rope, const int64_t *pos)
{
    finish_job j = {.b = b, .cpu = aff__cpu_of(b), .q = q, .heads = heads, .D = D, .eps = eps, .rope = rope, .pos = pos};
    aff__pool_run(j.cpu->pool, q_row, &j, T);
}

static void kv_row(void *ctx, int64_t t, int thread)
{
    const finish_job *j = ctx;
    float *cs = aff__cpu_scratch(j->cpu, thread), *sn = cs + j->rope->pairs, *v = j->q + t * j->D;
    rope_table(j->rope, j->pos[t], cs, sn);
    aff__cpu_rms_row(v, j->norm, j->eps, j->D, v);
    rotate(v, j->D, j->rope, cs, sn, 1);
    quantise_row(j->b->numerics, v, j->D, 2 * j->rope->pairs);
}

void aff__cpu_kv_finish(aff_backend *b, float *kv, int T, int D, const float *norm, float eps, const aff_rope *rope, const int64_t *pos)
{
    finish_job j = {.b = b, .cpu = aff__cpu_of(b), .q = kv, .D = D, .norm = norm, .eps = eps, .rope = rope, .pos = pos};
    aff__pool_run(j.cpu->pool, kv_row, &j, T);
}

static void index_row(void *ctx, int64_t t, int thread)
{
    const finish_job *j = ctx;
    float *cs = aff__cpu_scratch(j->cpu, thread), *sn = cs + j->rope->pairs;
    rope_table(j->rope, j->pos[t], cs, sn);
    for (int h = 0; h < j->heads; h++) {
        float *v = j->q + (t * j->heads + h) * j->D;
        rotate(v, j->D, j->rope, cs, sn, 1);
        if (j->b->numerics == AFF_MATH) continue;
        aff__hadamard(v, j->D);
        aff__a4(v, j->D);
    }
}

void aff__cpu_index_query(aff_backend *b, float *iq, int T, int heads, int dim, const aff_rope *rope, const int64_t *pos)
{
    finish_job j = {.b = b, .cpu = aff__cpu_of(b), .q = iq, .heads = heads, .D = dim, .rope = rope, .pos = pos};
    aff__pool_run(j.cpu->pool, index_row, &j, T);
}

void aff__cpu_raw_store(aff_backend *b, const aff_rowset *rs, const float *kv, int D)
{
    for (int t = 0; t < rs->n; t++) {
        const aff_layer_state *s = rs->state[t];
        aff__row_encode(s->row, kv + (int64_t)t * D, (uint8_t *)s->raw + rs->pos[t] % s->raw_size * s->row->bytes);
    }
}

/* ---- compressors ---- */

typedef struct {
    aff_backend *b;
    aff_cpu *cpu;
    const aff_compressor *c;
    const aff_rope *rope;
    const aff_rowset *rs;
    const float *cp, *zp;
    int width; /* coff * dim */
} compress_job;

/* Projections of position p, seen from row t: from this pass if p is in it, else from the history ring. */
static void projection(const compress_job *j, int64_t t, int64_t p, const float **c, const float **z)
{
    const int64_t r = t - (j->rs->pos[t] - p);
    const aff_layer_state *s = j->rs->state[t];
    if (r >= j->rs->first[t]) {
        *c = j->cp + r * j->width;
        *z = j->zp + r * j->width;
    } else {
        const int64_t slot = p % s->hist_size * j->width;
        *c = (j->c->index ? s->ihist_c : s->hist_c) + slot;
        *z = (j->c->index ? s->ihist_z : s->hist_z) + slot;
    }
}

/* The row of the group that ends with row t, if one does: softmax over the candidates, channel by channel. */
static void compress_row(void *ctx, int64_t t, int thread)
{
    const compress_job *j = ctx;
    const aff_compressor *c = j->c;
    const int64_t pos = j->rs->pos[t];
    if ((pos + 1) % c->ratio) return;
    const int64_t g = pos / c->ratio;
    const int d = c->dim, n_old = c->overlap && g > 0 ? c->ratio : 0, n = n_old + c->ratio;
    aff_layer_state *s = j->rs->state[t];
    const float **pc = aff__cpu_scratch(j->cpu, thread), **pz = pc + n;
    float *cs = (float *)(pz + n), *sn = cs + j->rope->pairs, *row = sn + j->rope->pairs;
    for (int i = 0; i < n; i++) {
        /* With overlap the first half of a projection serves the NEXT group, the second half its own. */
        projection(j, t, g * c->ratio - n_old + i, &pc[i], &pz[i]);
        if (c->overlap && i >= n_old) {
            pc[i] += d;
            pz[i] += d;
        }
    }
    for (int e = 0; e < d; e++) {
        float m = pz[0][e], z = 0, acc = 0;
        for (int i = 1; i < n; i++) m = pz[i][e] > m ? pz[i][e] : m;
        for (int i = 0; i < n; i++) {
            const float w = aff__expf(pz[i][e] - m);
            z += w;
            acc = fmaf(w, pc[i][e], acc);
        }
        row[e] = acc / z;
    }
    aff__cpu_rms_row(row, c->norm, c->eps, d, row);
    rope_table(j->rope, g * c->ratio, cs, sn); /* the group's first token */
    rotate(row, d, j->rope, cs, sn, 1);
    if (!c->index) {
        quantise_row(j->b->numerics, row, d, 2 * j->rope->pairs);
    } else if (j->b->numerics != AFF_MATH) {
        aff__hadamard(row, d);
        aff__a4(row, d);
    }
    const aff_rowfmt *f = c->index ? s->key : s->row;
    aff__row_encode(f, row, (uint8_t *)(c->index ? s->ikey : s->comp) + g * f->bytes);
}

void aff__cpu_compress(aff_backend *b, const aff_compressor *c, const aff_rope *rope, const aff_rowset *rs, const float *cp, float *zp)
{
    const int width = (c->overlap ? 2 : 1) * c->dim;
    for (int t = 0; t < rs->n; t++) {
        const float *ape = c->ape + rs->pos[t] % c->ratio * width;
        float *z = zp + (int64_t)t * width;
        for (int e = 0; e < width; e++) z[e] += ape[e];
    }
    compress_job j = {b, aff__cpu_of(b), c, rope, rs, cp, zp, width};
    aff__pool_run(j.cpu->pool, compress_row, &j, rs->n);
    for (int t = 0; t < rs->n; t++) { /* after all rows are read; later positions of a slot win */
        aff_layer_state *s = rs->state[t];
        const int64_t slot = rs->pos[t] % s->hist_size * width;
        memcpy((c->index ? s->ihist_c : s->hist_c) + slot, cp + (int64_t)t * width, (size_t)width * sizeof *cp);
        memcpy((c->index ? s->ihist_z : s->hist_z) + slot, zp + (int64_t)t * width, (size_t)width * sizeof *zp);
    }
}

/* ---- selection and attention ---- */

/* Scratch of a thread: the query as its keys need it, its weights, scores of all groups, room for the choice. */
typedef struct {
    char *query;
    float *weight, *score;
    int *chosen;
} select_scratch;

typedef struct {
    aff_cpu *cpu;
    const aff_rowset *rs;
    const float *iq, *w;
    int heads, dim, ratio, topk;
    uint64_t query_bytes, weight_bytes, score_bytes; /* multiples of 64 */
    int *sel;
    int64_t row; /* score_task: the row at work, its query and scores */
    const aff_index_query *query;
    float *score;
} select_job;

static select_scratch scratch_of(const select_job *j, int thread)
{
    char *p = aff__cpu_scratch(j->cpu, thread);
    return (select_scratch){p, (float *)(void *)(p + j->query_bytes), (float *)(void *)(p + j->query_bytes + j->weight_bytes),
                            (int *)(void *)(p + j->query_bytes + j->weight_bytes + j->score_bytes)};
}

static aff_index_query query_of(const select_job *j, int64_t t, const select_scratch *s)
{
    aff_index_query q;
    const float f = 1.0f / sqrtf((float)j->dim * (float)j->heads);
    for (int h = 0; h < j->heads; h++) s->weight[h] = j->w[t * j->heads + h] * f;
    aff__cpu_index_prepare(&q, j->iq + t * j->heads * j->dim, s->weight, j->heads, j->rs->state[t]->key, s->query);
    return q;
}

static int group_count(const select_job *j, int64_t t) { return (int)((j->rs->pos[t] + 1) / j->ratio); }

static bool takes_all(const select_job *j, int64_t t)
{
    const int n = group_count(j, t);
    for (int g = 0; g < n && n <= j->topk; g++) j->sel[t * j->topk + g] = g;
    return n <= j->topk;
}

/* A row a task. */
static void select_row(void *ctx, int64_t t, int thread)
{
    const select_job *j = ctx;
    if (takes_all(j, t)) return;
    const select_scratch s = scratch_of(j, thread);
    const int n = group_count(j, t);
    const aff_index_query q = query_of(j, t, &s);
    aff__cpu_index_scores(&q, j->rs->state[t]->ikey, n, s.score);
    aff__cpu_topk(s.score, n, j->topk, j->sel + t * j->topk, s.chosen);
}

enum { SCORE_PIECE = 4096 };

/* A piece of one row's groups a task: all threads have work when rows are few and the context is long. */
static void score_task(void *ctx, int64_t piece, int thread)
{
    (void)thread;
    const select_job *j = ctx;
    const int from = (int)piece * SCORE_PIECE, left = group_count(j, j->row) - from;
    const aff_layer_state *s = j->rs->state[j->row];
    aff__cpu_index_scores(j->query, (const uint8_t *)s->ikey + (int64_t)from * s->key->bytes, left < SCORE_PIECE ? left : SCORE_PIECE, j->score + from);
}

static uint64_t query_bytes(const aff_rowset *rs, int heads)
{
    uint64_t most = 0;
    for (int t = 0; t < rs->n; t++) {
        const uint64_t n = aff__cpu_index_bytes(heads, rs->state[t]->key);
        most = n > most ? n : most;
    }
    return aff__align_up(most, 64);
}

aff_status aff__cpu_index_select(aff_backend *b, const aff_rowset *rs, const float *iq, const float *w, int heads, int dim, int ratio, int topk,
                                 int *sel, aff_error *err)
{
    int64_t groups = 1;
    for (int t = 0; t < rs->n; t++) groups = (rs->pos[t] + 1) / ratio > groups ? (rs->pos[t] + 1) / ratio : groups;
    aff_cpu *c = aff__cpu_of(b);
    select_job j = {.cpu = c, .rs = rs, .iq = iq, .w = w, .heads = heads, .dim = dim, .ratio = ratio, .topk = topk, .sel = sel};
    j.query_bytes = query_bytes(rs, heads);
    j.weight_bytes = aff__align_up((uint64_t)heads * sizeof(float), 64);
    j.score_bytes = aff__align_up((uint64_t)groups * sizeof(float), 64);
    AFF_TRY(aff__cpu_reserve(c, j.query_bytes + j.weight_bytes + 2 * j.score_bytes, err));
    if (rs->n >= 2 * aff__pool_threads(c->pool) || groups < 2 * SCORE_PIECE) {
        aff__pool_run(c->pool, select_row, &j, rs->n);
        return AFF_OK;
    }
    const select_scratch s = scratch_of(&j, 0);
    j.score = s.score;
    for (j.row = 0; j.row < rs->n; j.row++) {
        if (takes_all(&j, j.row)) continue;
        const int n = group_count(&j, j.row);
        const aff_index_query q = query_of(&j, j.row, &s);
        j.query = &q;
        aff__pool_run(c->pool, score_task, &j, (n + SCORE_PIECE - 1) / SCORE_PIECE);
        aff__cpu_topk(j.score, n, topk, sel + j.row * topk, s.chosen);
    }
    return AFF_OK;
}

typedef struct {
    aff_cpu *cpu;
    const float *q, *sink;
    int heads, D, part, parts; /* heads are dealt to tasks in parts */
    const aff_keyset *keys;
    const aff_rope *rope;
    const int64_t *pos;
    float *o, scale;
    /* A row's cuts spread over the threads, WAVE of them a thread at a time, in tasks of RUN. */
    int64_t row;
    int first, count;         /* cuts of the wave */
    uint64_t at, result_bytes; /* in a thread's scratch: where results begin, size of one */
    float *M, *Z;
} attend_job;

enum { WAVE = 8, RUN = 4 };

static void attend_task(void *ctx, int64_t task, int thread)
{
    const attend_job *j = ctx;
    const int64_t t = task / j->parts;
    const int h0 = (int)(task % j->parts) * j->part, nh = h0 + j->part < j->heads ? j->part : j->heads - h0, D = j->D;
    float *buf = aff__cpu_scratch(j->cpu, thread), *cs = buf + aff__cpu_attend_bytes(D) / sizeof *buf, *sn = cs + j->rope->pairs;
    float *o = j->o + (t * j->heads + h0) * D;
    aff__cpu_attend_keys(j->q + (t * j->heads + h0) * D, nh, D, &j->keys[t], j->sink + h0, j->scale, buf, o);
    rope_table(j->rope, j->pos[t], cs, sn);
    for (int h = 0; h < nh; h++) rotate(o + (int64_t)h * D, D, j->rope, cs, sn, -1);
}

/* m, z [heads] and v [heads][D] of the wave's cut number i. */
static float *cut_result(const attend_job *j, int i)
{
    const int threads = aff__pool_threads(j->cpu->pool);
    char *scratch = aff__cpu_scratch(j->cpu, i % threads);
    return (float *)(void *)(scratch + j->at + (uint64_t)(i / threads) * j->result_bytes);
}

static void cut_task(void *ctx, int64_t task, int thread)
{
    const attend_job *j = ctx;
    const int from = (int)task * RUN, to = from + RUN < j->count ? from + RUN : j->count;
    for (int i = from; i < to; i++) {
        float *r = cut_result(j, i);
        aff__cpu_attend_cut(j->q + j->row * j->heads * j->D, j->heads, j->D, &j->keys[j->row], j->first + i, j->scale,
                            aff__cpu_scratch(j->cpu, thread), r, r + j->heads, r + 2 * j->heads);
    }
}

static void merge_task(void *ctx, int64_t h, int thread)
{
    (void)thread;
    const attend_job *j = ctx;
    float *o = j->o + (j->row * j->heads + h) * j->D;
    if (j->first == 0) {
        j->M[h] = j->sink[h], j->Z[h] = 1.0f;
        memset(o, 0, (size_t)j->D * sizeof *o);
    }
    for (int i = 0; i < j->count; i++) {
        const float *r = cut_result(j, i);
        aff__cpu_attend_merge(j->D, r[h], r[j->heads + h], r + 2 * j->heads + h * j->D, &j->M[h], &j->Z[h], o);
    }
}

static void attend_by_cuts(attend_job *j, int cuts)
{
    aff_pool *pool = j->cpu->pool;
    const int wave = WAVE * aff__pool_threads(pool);
    for (j->first = 0; j->first < cuts; j->first += wave) {
        j->count = cuts - j->first < wave ? cuts - j->first : wave;
        aff__pool_run(pool, cut_task, j, (j->count + RUN - 1) / RUN);
        aff__pool_run(pool, merge_task, j, j->heads);
    }
    float *cs = aff__cpu_scratch(j->cpu, 0), *sn = cs + j->rope->pairs; /* where the keys were */
    rope_table(j->rope, j->pos[j->row], cs, sn);
    for (int h = 0; h < j->heads; h++) {
        float *o = j->o + (j->row * j->heads + h) * j->D;
        for (int d = 0; d < j->D; d++) o[d] /= j->Z[h];
        rotate(o, j->D, j->rope, cs, sn, -1);
    }
}

/* Heads of one task: as many as leave every thread two tasks, since each task decodes the keys again; 4 at least. */
static int heads_of_task(int T, int heads, int threads)
{
    const int part = (int)((int64_t)T * heads / threads) / 8 * 4;
    return heads <= 4 || part > heads ? heads : part < 4 ? 4 : part;
}

static int cuts_of(const aff_keyset *k) { return (k->n_raw + k->n_comp + k->n_extra + AFF__KEY_CUT - 1) / AFF__KEY_CUT; }

/* Few rows with long lists: by cuts, each of whose keys is decoded once for all heads. Else heads are dealt out. */
aff_status aff__cpu_attend_rows(aff_backend *b, const float *q, int T, int heads, int D, const aff_keyset *keys, const float *sink, const aff_rope *rope,
                                const int64_t *pos, float *o, aff_error *err)
{
    aff_cpu *c = aff__cpu_of(b);
    const int threads = aff__pool_threads(c->pool), part = heads_of_task(T, heads, threads);
    const uint64_t result = aff__align_up((uint64_t)heads * ((uint64_t)D + 2) * sizeof(float), 64);
    attend_job j = {.cpu = c, .q = q, .sink = sink, .heads = heads, .D = D, .part = part, .parts = (heads + part - 1) / part, .keys = keys, .rope = rope,
                    .pos = pos, .o = o, .scale = (float)(1.0 / sqrt((double)D)), .result_bytes = result};
    bool by_cuts = threads > 1 && j.parts > 1;
    for (int t = 0; t < T; t++) by_cuts = by_cuts && cuts_of(&keys[t]) >= 2 * threads;
    const uint64_t buf = aff__align_up(aff__cpu_attend_bytes(D) + 2 * (uint64_t)rope->pairs * sizeof(float), 64);
    const uint64_t sums = aff__align_up(2 * (uint64_t)heads * sizeof(float), 64);
    j.at = buf + sums;
    AFF_TRY(aff__cpu_reserve(c, by_cuts ? buf + sums + WAVE * result : buf, err));
    if (!by_cuts) {
        aff__pool_run(c->pool, attend_task, &j, (int64_t)T * j.parts);
        return AFF_OK;
    }
    j.M = (float *)(void *)((char *)aff__cpu_scratch(c, 0) + buf);
    j.Z = j.M + heads;
    for (j.row = 0; j.row < T; j.row++) attend_by_cuts(&j, cuts_of(&keys[j.row]));
    return AFF_OK;
}
