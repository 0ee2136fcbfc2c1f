#include "engine/collect.h"
#include "base/mem.h"
#include "base/threads.h"
#include "engine/compare.h"
#include "format/gguf.h"
#include "model/forward.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define AUTO_GATE (8ull << 30) /* bytes in the file */
#define AUTO_DOWN (1ull << 30)

typedef struct sums {
    const aff_collect *c;
    int layers, experts, hidden, inter;
    double *x, *h;   /* [layers][experts][hidden], [inter] */
    int64_t *counts; /* [layers][experts] */
    double *xx, *hh; /* [layers][triangle of hidden], [layers][experts][triangle of inter]; NULL: not wanted */
    aff_pool *pool;  /* for these */
    float *part;     /* [threads][wider of hidden and inter] */
    const float **v; /* [AFF_MAX_CHUNK] */
    int64_t first, rows;
} sums;

static int wider(const sums *s)
{
    return s->hidden > s->inter ? s->hidden : s->inter;
}

/* ---- second moments: the upper triangle row by row ---- */

static uint64_t triangle(int n)
{
    return (uint64_t)n * ((uint64_t)n + 1) / 2;
}

enum { STRIPE = 16 }; /* rows of a triangle a task */

typedef struct product {
    const sums *s;
    int n_v, n; /* s->v [n_v] vectors of [n] */
    double *sum;
} product;

/* The vectors of one pass in float32, passes in double; every element in the order of the vectors. */
static void add_line(const product *p, int i, float *restrict part)
{
    const int n = p->n - i;
    double *restrict sum = p->sum + (triangle(p->n) - triangle(n));
    for (int j = 0; j < n; j++) part[j] = 0;
    for (int t = 0; t < p->n_v; t++) {
        const float *restrict v = p->s->v[t] + i;
        const float x = v[0];
        for (int j = 0; j < n; j++) part[j] += x * v[j];
    }
    for (int j = 0; j < n; j++) sum[j] += (double)part[j];
}

static void add_stripe(void *ctx, int64_t task, int thread)
{
    const product *p = ctx;
    float *part = p->s->part + (int64_t)thread * wider(p->s);
    for (int i = (int)task * STRIPE; i < ((int)task + 1) * STRIPE && i < p->n; i++) add_line(p, i, part);
}

static void add_products(const sums *s, int n_v, int n, double *sum)
{
    product p = {s, n_v, n, sum};
    aff__pool_run(s->pool, add_stripe, &p, (n + STRIPE - 1) / STRIPE);
}

static void watch_x(const sums *s, int layer, const aff_moe_plan *p, const float *x)
{
    int n = 0;
    for (int i = 0; i < p->n_entries; i++) /* the first pick of every row */
        if (p->rank[i] == 0) s->v[n++] = x + (int64_t)p->row[i] * s->hidden;
    add_products(s, n, s->hidden, s->xx + (uint64_t)layer * triangle(s->hidden));
}

static void watch_h(const sums *s, int layer, const aff_moe_plan *p)
{
    for (int t = 0; t < p->n_tiles; t++) {
        const aff_moe_tile *tile = &p->tile[t];
        const uint64_t at = (uint64_t)layer * (uint64_t)s->experts + (uint64_t)tile->id;
        for (int i = 0; i < tile->count; i++) s->v[i] = p->h + (int64_t)(tile->first + i) * s->inter;
        add_products(s, tile->count, s->inter, s->hh + at * triangle(s->inter));
    }
}

/* ---- sums of squares ---- */

static void add_squares(double *restrict sum, const float *restrict v, int n)
{
    for (int j = 0; j < n; j++) sum[j] += (double)v[j] * (double)v[j];
}

static void watch(void *ctx, int layer, const aff_moe_plan *p, const float *x)
{
    sums *s = ctx;
    for (int t = 0; t < p->n_tiles; t++) {
        const aff_moe_tile *tile = &p->tile[t];
        const int64_t at = (int64_t)layer * s->experts + tile->id;
        s->counts[at] += tile->count;
        for (int i = tile->first; i < tile->first + tile->count; i++) {
            add_squares(s->x + at * s->hidden, x + (int64_t)p->row[i] * s->hidden, s->hidden);
            add_squares(s->h + at * s->inter, p->h + (int64_t)i * s->inter, s->inter);
        }
    }
    if (s->xx) watch_x(s, layer, p, x);
    if (s->hh) watch_h(s, layer, p);
}

static bool on_layer(void *ctx, int layer, int layers)
{
    const sums *s = ctx;
    return !s->c->progress || s->c->progress(s->c->ctx, s->first, s->rows, layer, layers);
}

/* ---- the text ---- */

static aff_status run(sums *s, const int32_t *rows, aff_error *err)
{
    const aff_collect *c = s->c;
    const aff_config *g = aff__net_config(c->net);
    const int64_t sequences = (int64_t)(c->memory / (4 * (uint64_t)g->hc * (uint64_t)g->hidden) / (uint64_t)c->chunk);
    const int64_t n_sequences = c->n / c->chunk + 1, wave = (sequences < 1             ? 1
                                                             : sequences < n_sequences ? sequences
                                                                                       : n_sequences) *
                                                            c->chunk;
    const aff_sweep_options o = {
        .threads = c->threads, .chunk = c->chunk, .rows = wave, .watch = watch, .ctx = s, .progress = on_layer};
    aff_sweep *w;
    AFF_TRY(aff__sweep_create(&w, c->net, &o, err));
    aff_status st = AFF_OK;
    for (s->first = 0; s->first < c->n && st == AFF_OK; s->first += wave) {
        s->rows = c->n - s->first < wave ? c->n - s->first : wave;
        st = aff__sweep_run(w, rows + s->first, s->rows, err);
    }
    aff__sweep_free(w);
    return st;
}

/* ---- the file ---- */

static const char *const part_name[] = {"gate", "up", "down"};

/* Numbers of a part's tensors in the file. */
typedef struct tensors {
    uint64_t sums, counts, moments;
} tensors;

/* Second moments of a part: how many triangles, 0 for up, which shares gate's, or if there are none. */
static uint64_t triangles(const sums *s, int part)
{
    return part == 0 && s->xx ? 1 : part == 2 && s->hh ? (uint64_t)s->experts : 0;
}

static aff_status declare_part(const sums *s, aff_gguf_out *o, int l, int p, tensors *t, aff_error *err)
{
    char name[64];
    const int cols = p == 2 ? s->inter : s->hidden;
    const uint64_t E = (uint64_t)s->experts, n = triangles(s, p);
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.in_sum2", l, part_name[p]);
    AFF_TRY(aff__gguf_out_tensor(o, name, 2, (const uint64_t[]){(uint64_t)cols, E}, &t->sums, err));
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.counts", l, part_name[p]);
    AFF_TRY(aff__gguf_out_tensor(o, name, 2, (const uint64_t[]){1, E}, &t->counts, err));
    if (!n) return AFF_OK;
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.in_cov", l, part_name[p]);
    return aff__gguf_out_tensor(o, name, 2, (const uint64_t[]){triangle(cols), n}, &t->moments, err);
}

static aff_status declare(const sums *s, aff_gguf_out *o, tensors *t, aff_error *err)
{
    const aff_collect *c = s->c;
    AFF_TRY(aff__gguf_out_string(o, "general.type", "imatrix", err));
    AFF_TRY(aff__gguf_out_strings(o, "imatrix.datasets", &c->dataset, 1, err));
    AFF_TRY(aff__gguf_out_u32(o, "imatrix.chunk_count", (uint32_t)((c->n + c->chunk - 1) / c->chunk), err));
    AFF_TRY(aff__gguf_out_u32(o, "imatrix.chunk_size", (uint32_t)c->chunk, err));
    for (int i = 0; i < 3 * s->layers; i++) AFF_TRY(declare_part(s, o, i / 3, i % 3, &t[i], err));
    return aff__gguf_out_begin(o, err);
}

static aff_status to_floats(int l, int p, const double *from, uint64_t n, uint64_t an_expert, float *to, aff_error *err)
{
    for (uint64_t i = 0; i < n; i++) {
        to[i] = (float)from[i];
        if (!isfinite(to[i]))
            return aff__fail(err, AFF_E_FORMAT,
                             "layer %d, expert %llu: the inputs of %s are not finite: the model or the text is broken",
                             l, (unsigned long long)(i / an_expert), part_name[p]);
    }
    return AFF_OK;
}

/* buf: as many floats as the largest tensor has. */
static aff_status write_part(const sums *s, aff_gguf_out *o, int l, int p, const tensors *t, float *buf, aff_error *err)
{
    const uint64_t cols = (uint64_t)(p == 2 ? s->inter : s->hidden), E = (uint64_t)s->experts;
    const uint64_t n = triangles(s, p), each = triangle((int)cols);
    AFF_TRY(to_floats(l, p, (p == 2 ? s->h : s->x) + (uint64_t)l * E * cols, E * cols, cols, buf, err));
    AFF_TRY(aff__gguf_out_data(o, t->sums, buf, err));
    for (uint64_t e = 0; e < E; e++) buf[e] = (float)s->counts[(uint64_t)l * E + e];
    AFF_TRY(aff__gguf_out_data(o, t->counts, buf, err));
    if (!n) return AFF_OK;
    AFF_TRY(to_floats(l, p, (p ? s->hh : s->xx) + (uint64_t)l * n * each, n * each, each, buf, err));
    return aff__gguf_out_data(o, t->moments, buf, err);
}

static uint64_t largest_tensor(const sums *s)
{
    uint64_t n = (uint64_t)s->experts * (uint64_t)wider(s);
    const uint64_t x = triangles(s, 0) * triangle(s->hidden), h = triangles(s, 2) * triangle(s->inter);
    n = x > n ? x : n;
    return h > n ? h : n;
}

static aff_status write_all(const sums *s, const char *path, aff_error *err)
{
    aff_gguf_out *o;
    tensors *t = NULL;
    float *buf = NULL;
    AFF_TRY(aff__gguf_out_create(&o, path, err));
    aff_status st = aff__calloc(&t, (uint64_t)s->layers * 3, sizeof *t, path, err);
    if (st == AFF_OK) st = aff__calloc(&buf, largest_tensor(s), sizeof *buf, path, err);
    if (st == AFF_OK) st = declare(s, o, t, err);
    for (int i = 0; i < 3 * s->layers && st == AFF_OK; i++) st = write_part(s, o, i / 3, i % 3, &t[i], buf, err);
    free(t);
    free(buf);
    if (st == AFF_OK) return aff__gguf_out_finish(o, err);
    aff__gguf_out_abort(o);
    return st;
}

/* What of the second moments is wanted, and room for it. */
static aff_status prepare_moments(sums *s, aff_error *err)
{
    const uint64_t x = (uint64_t)s->layers * triangle(s->hidden),
                   h = (uint64_t)s->layers * (uint64_t)s->experts * triangle(s->inter);
    const aff_moments want = s->c->moments;
    const bool gate = want == AFF_MOMENTS_AUTO ? x <= AUTO_GATE / 4 : want != AFF_MOMENTS_NONE;
    const bool down = want == AFF_MOMENTS_AUTO ? gate && h <= AUTO_DOWN / 4 : want == AFF_MOMENTS_ALL;
    if (!gate) return AFF_OK;
    AFF_TRY(aff__pool_create(&s->pool, s->c->threads, err));
    AFF_TRY(aff__calloc(&s->xx, x, sizeof *s->xx, "second moments of gate and up", err));
    if (down) AFF_TRY(aff__calloc(&s->hh, h, sizeof *s->hh, "second moments of down", err));
    AFF_TRY(aff__calloc(&s->v, AFF_MAX_CHUNK, sizeof *s->v, "second moments", err));
    return aff__calloc(&s->part, (uint64_t)aff__pool_threads(s->pool), (uint64_t)wider(s) * sizeof *s->part,
                       "second moments", err);
}

static aff_status collect(sums *s, const int32_t *rows, const char *path, aff_collected *out, aff_error *err)
{
    const uint64_t pairs = (uint64_t)s->layers * (uint64_t)s->experts;
    AFF_TRY(aff__calloc(&s->x, pairs, (uint64_t)s->hidden * sizeof *s->x, "sums over inputs", err));
    AFF_TRY(aff__calloc(&s->h, pairs, (uint64_t)s->inter * sizeof *s->h, "sums over inputs", err));
    AFF_TRY(aff__calloc(&s->counts, pairs, sizeof *s->counts, "counts of experts", err));
    AFF_TRY(prepare_moments(s, err));
    AFF_TRY(run(s, rows, err));
    out->pairs = (int64_t)pairs;
    for (uint64_t i = 0; i < pairs; i++) out->unseen += s->counts[i] == 0;
    return write_all(s, path, err);
}

aff_status aff__collect_imatrix(const aff_collect *c, const char *path, aff_collected *out, aff_error *err)
{
    const aff_config *g = aff__net_config(c->net);
    sums s = {.c = c, .layers = aff__net_layers(c->net), .experts = g->experts, .hidden = g->hidden, .inter = g->inter};
    int32_t *rows;
    *out = (aff_collected){0};
    AFF_TRY(aff__text_check(c->id, c->n, c->chunk, c->net, err));
    AFF_TRY(aff__text_rows(c->id, c->n, c->chunk, c->bos, &rows, err));
    const aff_status st = collect(&s, rows, path, out, err);
    free(rows);
    free(s.x);
    free(s.h);
    free(s.counts);
    free(s.xx);
    free(s.hh);
    free((void *)s.v);
    free(s.part);
    aff__pool_free(s.pool);
    return st;
}
