#include "engine/collect.h"
#include "base/mem.h"
#include "engine/compare.h"
#include "format/gguf.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct sums {
    const aff_collect *c;
    int layers, experts, hidden, inter;
    double *x, *h;   /* [layers][experts][hidden], [inter] */
    int64_t *counts; /* [layers][experts] */
    int64_t first, rows;
} sums;

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

static aff_status declare(const sums *s, aff_gguf_out *o, uint64_t *index, aff_error *err)
{
    const aff_collect *c = s->c;
    AFF_TRY(aff__gguf_out_string(o, "general.type", "imatrix", err));
    AFF_TRY(aff__gguf_out_strings(o, "imatrix.datasets", &c->dataset, 1, err));
    AFF_TRY(aff__gguf_out_u32(o, "imatrix.chunk_count", (uint32_t)((c->n + c->chunk - 1) / c->chunk), err));
    AFF_TRY(aff__gguf_out_u32(o, "imatrix.chunk_size", (uint32_t)c->chunk, err));
    for (int l = 0; l < s->layers; l++)
        for (int p = 0; p < 3; p++) {
            char name[64];
            const uint64_t cols = (uint64_t)(p == 2 ? s->inter : s->hidden), E = (uint64_t)s->experts;
            uint64_t *at = index + 2 * (3 * l + p);
            snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.in_sum2", l, part_name[p]);
            AFF_TRY(aff__gguf_out_tensor(o, name, 2, (const uint64_t[]){cols, E}, &at[0], err));
            snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.counts", l, part_name[p]);
            AFF_TRY(aff__gguf_out_tensor(o, name, 2, (const uint64_t[]){1, E}, &at[1], err));
        }
    return aff__gguf_out_begin(o, err);
}

static aff_status write_part(const sums *s, aff_gguf_out *o, int l, int p, const uint64_t *index, float *buf,
                             aff_error *err)
{
    const int cols = p == 2 ? s->inter : s->hidden;
    const double *sum = (p == 2 ? s->h : s->x) + (int64_t)l * s->experts * cols;
    for (int64_t i = 0; i < (int64_t)s->experts * cols; i++) {
        buf[i] = (float)sum[i];
        if (!isfinite(buf[i]))
            return aff__fail(err, AFF_E_FORMAT,
                             "layer %d, expert %lld: the inputs of %s are not finite: the model or the text is broken",
                             l, (long long)(i / cols), part_name[p]);
    }
    AFF_TRY(aff__gguf_out_data(o, index[0], buf, err));
    for (int e = 0; e < s->experts; e++) buf[e] = (float)s->counts[(int64_t)l * s->experts + e];
    return aff__gguf_out_data(o, index[1], buf, err);
}

static aff_status write_all(const sums *s, const char *path, aff_error *err)
{
    aff_gguf_out *o;
    uint64_t *index = NULL;
    float *buf = NULL;
    const uint64_t wide = (uint64_t)(s->hidden > s->inter ? s->hidden : s->inter);
    AFF_TRY(aff__gguf_out_create(&o, path, err));
    aff_status st = aff__calloc(&index, (uint64_t)s->layers * 6, sizeof *index, path, err);
    if (st == AFF_OK) st = aff__calloc(&buf, (uint64_t)s->experts * wide, sizeof *buf, path, err);
    if (st == AFF_OK) st = declare(s, o, index, err);
    for (int i = 0; i < 3 * s->layers && st == AFF_OK; i++)
        st = write_part(s, o, i / 3, i % 3, index + 2 * i, buf, err);
    free(index);
    free(buf);
    if (st == AFF_OK) return aff__gguf_out_finish(o, err);
    aff__gguf_out_abort(o);
    return st;
}

static aff_status collect(sums *s, const int32_t *rows, const char *path, aff_collected *out, aff_error *err)
{
    const uint64_t pairs = (uint64_t)s->layers * (uint64_t)s->experts;
    AFF_TRY(aff__calloc(&s->x, pairs, (uint64_t)s->hidden * sizeof *s->x, "sums over inputs", err));
    AFF_TRY(aff__calloc(&s->h, pairs, (uint64_t)s->inter * sizeof *s->h, "sums over inputs", err));
    AFF_TRY(aff__calloc(&s->counts, pairs, sizeof *s->counts, "counts of experts", err));
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
    return st;
}
