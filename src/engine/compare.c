#include "engine/compare.h"
#include "base/mem.h"
#include "state/seq.h"
#include <inttypes.h>
#include <stdlib.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

enum { BLOCK = AFF_MAX_CHUNK }; /* rows whose logits are in memory at a time */

typedef struct side {
    const aff_compare *c;
    const aff_compare_side *o;
    bool is_ref;
    aff_cpu_level level; /* the most that the process may use */
    aff_sweep *sweep;
    float *logits; /* [BLOCK][vocab] */
    int64_t first, rows;
} side;

/* Per-thread scratch and what the rows of a block came to. */
typedef struct scoring {
    const aff_compare *c;
    const side *model, *ref;
    int vocab;
    int64_t first, count;
    aff_eval_row *row;
    uint8_t *used; /* [threads][vocab] */
    float *logit;  /* [threads][width], for saved rows */
    int32_t *id;
    uint64_t width;
    aff_error *err; /* [BLOCK] */
} scoring;

aff_status aff__text_rows(const int32_t *id, int64_t n, int64_t chunk, int32_t bos, int32_t **rows, aff_error *err)
{
    *rows = NULL;
    AFF_TRY(aff__calloc(rows, (uint64_t)n, sizeof **rows, "rows of the text", err));
    for (int64_t i = 0; i < n; i++) (*rows)[i] = i % chunk ? id[i - 1] : bos;
    return AFF_OK;
}

uint64_t aff__text_hash(const int32_t *id, int64_t n)
{
    return XXH3_64bits(id, (size_t)n * sizeof *id);
}

aff_status aff__text_check(const int32_t *id, int64_t n, int64_t chunk, const aff_net *net, aff_error *err)
{
    const aff_config *a = aff__net_config(net);
    if (n < 1) return aff__fail(err, AFF_E_INVALID, "text: expected at least 1 token, got %" PRId64, n);
    if (chunk < 1 || chunk > a->max_positions)
        return aff__fail(err, AFF_E_INVALID, "%s: tokens of a sequence: expected 1 to %" PRId64 ", got %" PRId64,
                         aff__net_path(net), a->max_positions, chunk);
    for (int64_t i = 0; i < n; i++)
        if (id[i] < 0 || id[i] >= a->vocab)
            return aff__fail(err, AFF_E_INVALID, "text: token %" PRId64 ": expected an id of 0 to %d, got %d", i + 1,
                             a->vocab - 1, id[i]);
    return AFF_OK;
}

static aff_status check(const aff_compare *c, const aff_net *any, aff_error *err)
{
    const aff_config *a = aff__net_config(any);
    AFF_TRY(aff__text_check(c->id, c->n, c->chunk, any, err));
    if (c->ref.net && c->model.net && aff__net_config(c->ref.net)->vocab != a->vocab)
        return aff__fail(err, AFF_E_INVALID, "%s: expected a vocabulary of %d as in %s, got %d",
                         aff__net_path(c->ref.net), a->vocab, aff__net_path(c->model.net),
                         aff__net_config(c->ref.net)->vocab);
    if (!c->saved) return AFF_OK;
    const aff_logits_head *h = aff__logits_head(c->saved);
    if (h->vocab != (uint32_t)a->vocab)
        return aff__fail(err, AFF_E_INVALID,
                         "saved logits: expected a vocabulary of %d, got %u: they are of another model", a->vocab,
                         h->vocab);
    if (h->positions != (uint64_t)c->n || h->text != aff__text_hash(c->id, c->n) || h->chunk != (uint64_t)c->chunk ||
        h->bos != (uint32_t)c->bos)
        return aff__fail(err, AFF_E_INVALID,
                         "saved logits: they are of another text: %" PRIu64 " tokens in sequences of %u, got %" PRId64
                         " in sequences of %" PRId64,
                         h->positions, h->chunk, c->n, c->chunk);
    return AFF_OK;
}

static bool on_layer(void *ctx, int layer, int layers)
{
    const side *s = ctx;
    return s->c->progress(s->c->ctx, s->is_ref, s->first, s->rows, layer, layers);
}

/* Rows that fit into the memory, whole sequences. */
static int64_t rows_of_wave(const aff_compare *c, const aff_net *net)
{
    const aff_config *g = aff__net_config(net);
    const uint64_t row = 4 * (uint64_t)g->hc * (uint64_t)g->hidden;
    const int64_t sequences = (int64_t)(c->memory / row / (uint64_t)c->chunk);
    const int64_t most = sequences > 1 ? sequences > INT64_MAX / c->chunk ? INT64_MAX : sequences * c->chunk : c->chunk;
    return most < c->n ? most : c->n;
}

static aff_status side_create(side *s, const aff_compare *c, const aff_compare_side *o, bool is_ref, int64_t rows,
                              aff_error *err)
{
    *s = (side){.c = c, .o = o, .is_ref = is_ref, .level = aff__cpu_level()};
    if (!o->net) return AFF_OK;
    const aff_sweep_options w = {.threads = o->threads,
                                 .chunk = c->chunk,
                                 .rows = rows,
                                 .pass = o->pass,
                                 .ctx = s,
                                 .progress = c->progress ? on_layer : NULL};
    AFF_TRY(aff__sweep_create(&s->sweep, o->net, &w, err));
    return aff__calloc(&s->logits, BLOCK * (uint64_t)aff__net_config(o->net)->vocab, sizeof(float), "logits of a block",
                       err);
}

static void side_free(side *s)
{
    aff__sweep_free(s->sweep);
    free(s->logits);
}

static void cap(const side *s)
{
    aff__cpu_cap(s->o->capped && s->o->level < s->level ? s->o->level : s->level);
}

static aff_status side_run(side *s, const int32_t *rows, int64_t first, int64_t n, aff_error *err)
{
    if (!s->sweep) return AFF_OK;
    s->first = first;
    s->rows = n;
    cap(s);
    return aff__sweep_run(s->sweep, rows + first, n, err);
}

static aff_status side_logits(side *s, int64_t from, int64_t n, aff_error *err)
{
    if (!s->sweep) return AFF_OK;
    cap(s);
    return aff__sweep_logits(s->sweep, from, n, s->logits, err);
}

static aff_status score_row(scoring *s, int64_t i, int thread, aff_error *err)
{
    const aff_compare *c = s->c;
    const int64_t at = s->first + i;
    const int32_t target = c->id[at];
    const side *subject = s->model->sweep ? s->model : s->ref;
    aff_eval_ref ref;
    const bool with = c->saved || (s->ref->sweep && s->model->sweep);
    if (c->saved)
        AFF_TRY(aff__logits_get(c->saved, (uint64_t)at, target, s->logit + (uint64_t)thread * s->width,
                                s->id + (uint64_t)thread * s->width, &ref, err));
    else if (with)
        AFF_TRY(aff__eval_full(s->ref->logits + i * s->vocab, s->vocab, target, &ref, err));
    return aff__eval_compare(with ? &ref : NULL, subject->logits + i * s->vocab, s->vocab, target,
                             s->used + (uint64_t)thread * (uint64_t)s->vocab, &s->row[at], err);
}

static void score_task(void *ctx, int64_t i, int thread)
{
    scoring *s = ctx;
    score_row(s, i, thread, &s->err[i]);
}

/* Logits of a block of rows, saved and scored. */
static aff_status block(scoring *s, side *model, side *ref, int64_t wave, int64_t first, int64_t n, aff_pool *pool,
                        aff_error *err)
{
    const aff_compare *c = s->c;
    AFF_TRY(side_logits(ref, first - wave, n, err));
    AFF_TRY(side_logits(model, first - wave, n, err));
    const side *kept = ref->sweep ? ref : model;
    for (int64_t i = 0; i < n && c->save; i++)
        AFF_TRY(aff__logits_put(c->save, kept->logits + i * s->vocab, c->id[first + i], err));
    s->first = first;
    s->count = n;
    aff__pool_run(pool, score_task, s, n);
    for (int64_t i = 0; i < n; i++)
        if (s->err[i].code != AFF_OK)
            return aff__fail(err, s->err[i].code, "position %" PRId64 " of the text: %s", first + i, s->err[i].msg);
    return AFF_OK;
}

static aff_status waves(scoring *s, side *model, side *ref, const int32_t *rows, int64_t wave, aff_pool *pool,
                        aff_error *err)
{
    for (int64_t at = 0; at < s->c->n; at += wave) {
        const int64_t n = s->c->n - at < wave ? s->c->n - at : wave;
        AFF_TRY(side_run(ref, rows, at, n, err));
        AFF_TRY(side_run(model, rows, at, n, err));
        for (int64_t b = 0; b < n; b += BLOCK)
            AFF_TRY(block(s, model, ref, at, at + b, n - b < BLOCK ? n - b : BLOCK, pool, err));
    }
    return AFF_OK;
}

static aff_status scoring_create(scoring *s, int threads, aff_error *err)
{
    const aff_compare *c = s->c;
    s->width = c->saved ? aff__logits_width(aff__logits_head(c->saved)) : 0;
    AFF_TRY(aff__calloc(&s->used, (uint64_t)threads, (uint64_t)s->vocab, "scoring", err));
    AFF_TRY(aff__calloc(&s->logit, (uint64_t)threads * s->width, sizeof *s->logit, "scoring", err));
    AFF_TRY(aff__calloc(&s->id, (uint64_t)threads * s->width, sizeof *s->id, "scoring", err));
    return aff__calloc(&s->err, BLOCK, sizeof *s->err, "scoring", err);
}

aff_status aff__compare(const aff_compare *c, aff_eval_row *row, aff_error *err)
{
    const aff_net *any = c->model.net ? c->model.net : c->ref.net;
    const aff_cpu_level before = aff__cpu_level();
    side model = {0}, ref = {0};
    int32_t *rows = NULL;
    aff_pool *pool = NULL;
    AFF_TRY(check(c, any, err));
    scoring s = {.c = c, .model = &model, .ref = &ref, .vocab = aff__net_config(any)->vocab, .row = row};
    int64_t wave = rows_of_wave(c, any);
    if (c->ref.net && rows_of_wave(c, c->ref.net) < wave) wave = rows_of_wave(c, c->ref.net);
    aff_status st = aff__text_rows(c->id, c->n, c->chunk, c->bos, &rows, err);
    if (st == AFF_OK) st = aff__pool_create(&pool, c->model.threads, err);
    if (st == AFF_OK) st = scoring_create(&s, aff__pool_threads(pool), err);
    if (st == AFF_OK) st = side_create(&model, c, &c->model, false, wave, err);
    if (st == AFF_OK) st = side_create(&ref, c, &c->ref, true, wave, err);
    if (st == AFF_OK) st = waves(&s, &model, &ref, rows, wave, pool, err);
    aff__cpu_cap(before);
    side_free(&model);
    side_free(&ref);
    aff__pool_free(pool);
    free(s.used);
    free(s.logit);
    free(s.id);
    free(s.err);
    free(rows);
    return st;
}
