#include "quant/quantize.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/threads.h"
#include "format/container.h"
#include "quant/numbers.h"
#include "quant/quantize_plan.h"
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

typedef struct job {
    const aff_quantize_options *o;
    aff_qplan plan;
    aff_pool *pool;
    aff_cwriter *w;
    aff_dtype dtype; /* of the experts */
    bool has_codebook;
    uint8_t codebook[AFF_CB_BYTES];
    uint64_t codebook_index; /* the writer's */
    aff_cb_index *index;
    const char *codebook_from; /* for the provenance */
    uint64_t checkpoint_hash;
    pthread_mutex_t lock; /* guards the next two and the progress callback */
    uint64_t done, total; /* checkpoint bytes */
} job;

static void tell(const job *j, void (*fn)(void *, const char *), const char *fmt, va_list ap)
{
    char line[512];
    if (!fn) return;
    vsnprintf(line, sizeof line, fmt, ap);
    fn(j->o->ctx, line);
}

static void __attribute__((format(printf, 2, 3))) say(const job *j, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    tell(j, j->o->say, fmt, ap);
    va_end(ap);
}

static void __attribute__((format(printf, 2, 3))) warn(const job *j, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    tell(j, j->o->warn, fmt, ap);
    va_end(ap);
}

static double seconds_since(uint64_t ns)
{
    return (double)(aff__now_ns() - ns) * 1e-9;
}

/* "1.23 GiB", or MiB below one. */
static const char *size_text(char buf[32], uint64_t bytes)
{
    bool giga = bytes >= 1ull << 30;
    snprintf(buf, 32, "%.2f %s", (double)bytes * (giga ? 0x1p-30 : 0x1p-20), giga ? "GiB" : "MiB");
    return buf;
}

static void add_done(job *j, uint64_t bytes)
{
    pthread_mutex_lock(&j->lock);
    j->done += bytes;
    if (j->o->progress) j->o->progress(j->o->ctx, j->done, j->total);
    pthread_mutex_unlock(&j->lock);
}

aff_status aff__quantize_check(const aff_quantize_options *o, aff_error *err)
{
    if (!o->src || !*o->src) return aff__fail(err, AFF_E_INVALID, "--src: name the checkpoint's folder");
    if (!o->out || !*o->out) return aff__fail(err, AFF_E_INVALID, "--out: name the container to write");
    if (o->layers < 0)
        return aff__fail(err, AFF_E_INVALID, "--layers %" PRId64 ": expected a positive number", o->layers);
    if (o->dspark && o->layers) return aff__fail(err, AFF_E_INVALID, "--layers: a draft is quantised whole");
    if (o->mxfp4 && o->compat)
        return aff__fail(err, AFF_E_INVALID,
                         "--experts mxfp4: the compatible form has no such dtype; leave out --compat");
    if (o->mxfp4 && (o->codebook || o->cb_spread))
        return aff__fail(err, AFF_E_INVALID, "--experts mxfp4 needs no codebook: leave out --codebook and --cb-spread");
    if (o->codebook && o->cb_spread)
        return aff__fail(err, AFF_E_INVALID, "--cb-spread: nothing is fitted when --codebook gives the codebook");
    if (o->dspark && !o->mxfp4 && !o->codebook)
        return aff__fail(err, AFF_E_INVALID,
                         "--dspark: the draft shares the model's codebook; give --codebook MAIN.aff");
    return AFF_OK;
}

/* ---- hash of the checkpoint ---- */

/* Which checkpoint this is, without reading all of it: XXH3-64 over every tensor in order of name - name and NUL, dtype
 * name and NUL, rank and dimensions as u64, and the contents if they are at most 64 KiB (norms, biases, sinks, small
 * scales: training moves all of them). The same for model and draft, and for any sharding. */
static aff_status hash_checkpoint(job *j, aff_error *err)
{
    XXH3_state_t *s = XXH3_createState();
    if (!s) return aff__fail(err, AFF_E_NOMEM, "hash: cannot allocate its state");
    XXH3_64bits_reset(s);
    for (uint64_t i = 0; i < aff__ckpt_count(j->plan.ckpt); i++) {
        const aff_st_tensor *t = aff__ckpt_at(j->plan.ckpt, i);
        const char *dtype = aff__st_dtype_name(t->dtype);
        uint64_t dims[9] = {(uint64_t)t->ndim};
        for (int k = 0; k < t->ndim; k++) dims[k + 1] = t->shape[k];
        XXH3_64bits_update(s, t->name, strlen(t->name) + 1);
        XXH3_64bits_update(s, dtype, strlen(dtype) + 1);
        XXH3_64bits_update(s, dims, (size_t)(t->ndim + 1) * 8);
        if (t->size && t->size <= 65536) XXH3_64bits_update(s, t->data, (size_t)t->size);
    }
    j->checkpoint_hash = XXH3_64bits_digest(s);
    XXH3_freeState(s);
    return AFF_OK;
}

/* ---- dense tensors ---- */

static float source_value(const aff_st_tensor *t, uint64_t i)
{
    uint32_t u;
    uint16_t h;
    if (t->dtype == AFF_ST_F32) {
        memcpy(&u, t->data + i * 4, 4);
        return aff__bits_f32(u);
    }
    memcpy(&h, t->data + i * 2, 2);
    return aff__bf16_to_f32(h);
}

static aff_status bad_value(const job *j, const aff_st_tensor *t, uint64_t i, const char *what, aff_error *err)
{
    return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': element %" PRIu64 " is %s",
                     aff__ckpt_shard_path(j->plan.ckpt, t->shard), t->name, i, what);
}

static aff_status convert_table(const job *j, const aff_qdense *d, float *out, aff_error *err)
{
    for (uint64_t i = 0; i < d->rows * d->cols; i++) {
        uint64_t v;
        memcpy(&v, d->src->data + i * 8, 8);
        if (v >= d->most) return bad_value(j, d->src, i, "no number of an expert", err);
        out[i] = (float)v;
    }
    return AFF_OK;
}

static aff_status convert(const job *j, const aff_qdense *d, void *out, aff_error *err)
{
    if (d->most) return convert_table(j, d, out, err);
    for (uint64_t i = 0; i < d->rows * d->cols; i++) {
        float f = source_value(d->src, i);
        uint16_t h = aff__f32_to_bf16(f);
        if (!isfinite(f) || (d->dtype == AFF_BF16 && !isfinite(aff__bf16_to_f32(h))))
            return bad_value(j, d->src, i, "not finite", err);
        if (d->dtype == AFF_BF16)
            memcpy((uint8_t *)out + i * 2, &h, 2);
        else
            memcpy((uint8_t *)out + i * 4, &f, 4);
    }
    return AFF_OK;
}

static aff_status check_fp8(const job *j, const aff_qdense *d, aff_error *err)
{
    for (uint64_t i = 0; i < d->src->size; i++)
        if ((d->src->data[i] & 0x7f) == 0x7f) return bad_value(j, d->src, i, "not a number", err);
    for (uint64_t i = 0; i < d->scale->size; i++)
        if (d->scale->data[i] == 255) return bad_value(j, d->scale, i, "not a number", err);
    return AFF_OK;
}

static aff_status write_dense_tensor(job *j, const aff_qdense *d, aff_error *err)
{
    uint64_t bytes = d->src->size + (d->scale ? d->scale->size : 0);
    if (d->dtype == AFF_FP8) {
        AFF_TRY(check_fp8(j, d, err));
        AFF_TRY(aff__cwriter_tensor(j->w, d->index, d->src->data, d->src->size, d->scale->data, d->scale->size, err));
    } else {
        uint64_t size = d->rows * d->cols * (d->dtype == AFF_BF16 ? 2 : 4);
        void *buf;
        AFF_TRY(aff__calloc(&buf, size, 1, d->name, err));
        aff_status s = convert(j, d, buf, err);
        if (s == AFF_OK) s = aff__cwriter_tensor(j->w, d->index, buf, size, NULL, 0, err);
        free(buf);
        AFF_TRY(s);
    }
    add_done(j, bytes);
    return AFF_OK;
}

/* In the order of the shards, which is that of the disk. */
static aff_status write_dense(job *j, aff_error *err)
{
    if (j->has_codebook) AFF_TRY(aff__cwriter_tensor(j->w, j->codebook_index, j->codebook, AFF_CB_BYTES, NULL, 0, err));
    for (int shard = 0; shard < aff__ckpt_shards(j->plan.ckpt); shard++)
        for (uint64_t i = 0; i < j->plan.n_dense; i++)
            if (j->plan.dense[i].src->shard == shard) AFF_TRY(write_dense_tensor(j, &j->plan.dense[i], err));
    return AFF_OK;
}

/* ---- codebook ---- */

static aff_mxfp4 matrix_of(const job *j, const aff_qmatrix *m, int part)
{
    uint64_t inter = (uint64_t)j->plan.inter, hidden = (uint64_t)j->plan.hidden;
    return (aff_mxfp4){m->weight->data, m->scale->data, part == 2 ? hidden : inter, part == 2 ? inter : hidden};
}

static aff_status sample_expert(job *j, uint64_t layer, uint64_t expert, float *w, aff_cb_samples *s, aff_error *err)
{
    const aff_qmatrix *m = aff__qplan_expert(&j->plan, layer, expert);
    for (int i = 0; i < 3; i++) {
        aff_error why = {0};
        aff_mxfp4 x = matrix_of(j, &m[i], i);
        aff_status st = aff__mxfp4_decode(&x, w, &why);
        if (st != AFF_OK) return aff__fail(err, st, "tensor '%s': %s", m[i].scale->name, why.msg);
        AFF_TRY(aff__cb_samples_add(s, w, x.rows, x.cols, err));
    }
    return AFF_OK;
}

/* All tensors of the expert lie in one shard. */
static bool in_shard(const aff_qmatrix m[3], int shard)
{
    for (int i = 0; i < 3; i++)
        if (m[i].weight->shard != shard || m[i].scale->shard != shard) return false;
    return true;
}

/* The experts of spec 5.1: eight of layer 0, or eight over all layers. */
static aff_status draw_samples(job *j, bool spread, aff_cb_samples *s, aff_error *err)
{
    const aff_qplan *p = &j->plan;
    int shard = aff__qplan_expert(p, 0, 0)[0].weight->shard;
    float *w;
    aff_status st = AFF_OK;
    AFF_TRY(aff__calloc(&w, (uint64_t)p->inter * (uint64_t)p->hidden, sizeof *w, "expert matrix", err));
    for (uint64_t e = 0; e < 8 && st == AFF_OK; e++) {
        uint64_t layer = spread ? e * p->layers / 8 : 0, expert = 13 * e;
        if (spread)
            expert %= (uint64_t)p->experts;
        else if (expert >= (uint64_t)p->experts || !in_shard(aff__qplan_expert(p, 0, expert), shard))
            continue;
        st = sample_expert(j, layer, expert, w, s, err);
    }
    free(w);
    return st;
}

static aff_status fit_codebook(job *j, aff_error *err)
{
    uint64_t start = aff__now_ns();
    bool spread = j->o->cb_spread || !j->o->compat;
    aff_cb_samples s = {0};
    aff_status st = draw_samples(j, spread, &s, err);
    if (st == AFF_OK) {
        say(j, "codebook: fitting on %" PRIu64 " blocks of %s", s.blocks,
            spread ? "experts of all layers" : "layer 0's experts");
        st = aff__cb_fit(&s, j->pool, j->codebook, err);
    }
    if (st == AFF_OK) say(j, "codebook: fitted in %.1f s", seconds_since(start));
    j->codebook_from = spread ? "fit-spread" : "fit-layer0";
    aff__cb_samples_free(&s);
    return st;
}

/* A draft made for another model would still work as bytes; that deserves a loud line. */
static void compare_checkpoints(const job *j, const aff_container *c)
{
    const char *text;
    size_t size;
    char mine[17];
    aff__container_provenance(c, &text, &size);
    json_t *prov = size ? json_loadb(text, size, 0, NULL) : NULL;
    const char *theirs = json_string_value(json_object_get(prov, "checkpoint_xxh3"));
    snprintf(mine, sizeof mine, "%016" PRIx64, j->checkpoint_hash);
    if (theirs && strcmp(theirs, mine) != 0)
        warn(j, "warning: %s was made from another checkpoint (%s) than %s (%s)", j->o->codebook, theirs, j->o->src,
             mine);
    json_decref(prov);
}

static aff_status read_codebook(job *j, aff_error *err)
{
    aff_container *c;
    AFF_TRY(aff__container_open(&c, j->o->codebook, err));
    aff_status s = AFF_OK;
    const aff_ctensor *t = aff__container_find(c, "__codebook");
    if (!t || t->m.data_size != AFF_CB_BYTES) {
        s = aff__fail(err, AFF_E_FORMAT, "%s: tensor '__codebook': expected %d bytes, got %" PRIu64, j->o->codebook,
                      AFF_CB_BYTES, t ? t->m.data_size : 0);
    } else {
        memcpy(j->codebook, t->blob + t->m.data_off, AFF_CB_BYTES);
        if (!aff__cb_valid(j->codebook))
            s = aff__fail(err, AFF_E_FORMAT, "%s: tensor '__codebook': a byte has an exponent field outside 1..7",
                          j->o->codebook);
        if (j->o->dspark) compare_checkpoints(j, c);
    }
    aff__container_close(c);
    j->codebook_from = "given";
    if (s == AFF_OK) say(j, "codebook: from %s", j->o->codebook);
    return s;
}

static aff_status get_codebook(job *j, aff_error *err)
{
    if (!j->has_codebook) return AFF_OK;
    AFF_TRY(j->o->codebook ? read_codebook(j, err) : fit_codebook(j, err));
    uint64_t start = aff__now_ns();
    AFF_TRY(aff__cb_index_create(&j->index, j->codebook, j->o->compat ? AFF_CB_GRID_COMPAT : AFF_CB_GRID_EXACT, j->pool,
                                 err));
    const aff_cb_grid *g = j->index->grid;
    uint64_t cells = (uint64_t)g->cells * (uint64_t)g->cells * (uint64_t)g->cells * (uint64_t)g->cells;
    say(j, "codebook: index of %" PRIu64 " cells, %u entries in %.1f s", 2 * cells, g[0].total + g[1].total,
        seconds_since(start));
    return AFF_OK;
}

/* ---- container ---- */

static aff_status declare(job *j, aff_error *err)
{
    aff_qplan *p = &j->plan;
    AFF_TRY(aff__cwriter_meta(j->w, p->config, p->config_size, err));
    if (j->has_codebook) AFF_TRY(aff__cwriter_declare(j->w, "__codebook", AFF_F32, 1, 2048, &j->codebook_index, err));
    for (uint64_t i = 0; i < p->n_dense; i++) {
        aff_qdense *d = &p->dense[i];
        AFF_TRY(aff__cwriter_declare(j->w, d->name, d->dtype, d->rows, d->cols, &d->index, err));
        j->total += d->src->size + (d->scale ? d->scale->size : 0);
    }
    for (uint32_t l = 0; l < p->layers; l++)
        AFF_TRY(aff__cwriter_layer(j->w, (uint32_t)p->experts, j->dtype, (uint64_t)p->inter, (uint64_t)p->hidden, err));
    for (uint64_t i = 0; i < (uint64_t)p->layers * (uint64_t)p->experts * 3; i++)
        j->total += p->matrices[i].weight->size + p->matrices[i].scale->size;
    return AFF_OK;
}

/* No date, no path, no thread count: the file is a function of its inputs. */
static aff_status add_provenance(job *j, aff_error *err)
{
    char checkpoint[17], codebook[17];
    if (j->o->compat) return AFF_OK;
    snprintf(checkpoint, sizeof checkpoint, "%016" PRIx64, j->checkpoint_hash);
    snprintf(codebook, sizeof codebook, "%016" PRIx64, (uint64_t)XXH3_64bits(j->codebook, AFF_CB_BYTES));
    json_t *recipe = json_pack("{s:s, s:s}", "experts", j->o->mxfp4 ? "mxfp4" : "q2p875", "hc_fn", "f32");
    json_t *prov =
        json_pack("{s:i, s:s+, s:s, s:s, s:i, s:s}", "version", 1, "tool", "aff-quantize ", aff_version(), "role",
                  j->o->dspark ? "draft" : "main", "chat_encoding", j->plan.has_dspark ? "0731" : "v4", "layers",
                  (int)j->plan.layers, "checkpoint_xxh3", checkpoint);
    char *text = NULL;
    if (prov && recipe) {
        if (j->has_codebook) {
            json_object_set_new(recipe, "codebook", json_string(j->codebook_from));
            json_object_set_new(prov, "codebook_xxh3", json_string(codebook));
        }
        json_object_set(prov, "recipe", recipe);
        text = json_dumps(prov, JSON_COMPACT);
    }
    aff_status s = text ? aff__cwriter_provenance(j->w, text, strlen(text), err)
                        : aff__fail(err, AFF_E_NOMEM, "provenance: out of memory");
    free(text);
    json_decref(recipe);
    json_decref(prov);
    return s;
}

/* ---- experts ---- */

typedef struct worker_space {
    float *scratch;
    uint8_t *record;
} worker_space;

typedef struct layer_run {
    job *j;
    uint32_t layer;
    worker_space *space; /* per thread */
    aff_qerror *errors;  /* per expert */
    aff_error first;     /* of the lowest-numbered expert that failed */
    int64_t failed;      /* its number; under the job's lock */
} layer_run;

static void expert_task(void *ctx, int64_t e, int thread)
{
    layer_run *r = ctx;
    job *j = r->j;
    const aff_qmatrix *m = aff__qplan_expert(&j->plan, r->layer, (uint64_t)e);
    aff_mxfp4 src[3];
    aff_error why = {0}, err = {0};
    uint64_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        src[i] = matrix_of(j, &m[i], i);
        bytes += m[i].weight->size + m[i].scale->size;
    }
    r->errors[e] = (aff_qerror){0};
    worker_space *s = &r->space[thread];
    aff_status st = aff__expert_encode(aff__cwriter_layer_layout(j->w, r->layer), j->index, j->codebook, src,
                                       s->scratch, s->record, j->has_codebook ? &r->errors[e] : NULL, &why);
    if (st != AFF_OK)
        aff__fail(&err, st, "%s: layer %u expert %" PRId64 ": %s", j->o->src, r->layer, e, why.msg);
    else
        st = aff__cwriter_expert(j->w, r->layer, (uint32_t)e, s->record, &err);
    if (st == AFF_OK) {
        add_done(j, bytes);
        return;
    }
    pthread_mutex_lock(&j->lock);
    if (r->failed < 0 || e < r->failed) {
        r->failed = e;
        r->first = err;
    }
    pthread_mutex_unlock(&j->lock);
}

static void report_layer(const layer_run *r, char *line, size_t cap)
{
    double sum = 0, worst = 0, max = 0;
    int64_t at = 0, n = r->j->plan.experts;
    for (int64_t e = 0; e < n; e++) {
        double rel = aff__qerror_relative(&r->errors[e]);
        sum += rel;
        if (rel > worst) {
            worst = rel;
            at = e;
        }
        if (r->errors[e].max > max) max = r->errors[e].max;
    }
    snprintf(line, cap, "%5u   %.5f   %.5f (%" PRId64 ")%*s%.3g", r->layer, sum / (double)n, worst, at,
             at < 10    ? 6
             : at < 100 ? 5
                        : 4,
             "", max);
}

static aff_status write_layers(job *j, layer_run *r, char (*table)[128], aff_error *err)
{
    for (uint32_t l = 0; l < j->plan.layers; l++) {
        r->layer = l;
        r->failed = -1;
        aff__pool_run(j->pool, expert_task, r, j->plan.experts);
        if (r->failed >= 0) {
            if (err) *err = r->first;
            return r->first.code;
        }
        report_layer(r, table[l], sizeof table[l]);
    }
    return AFF_OK;
}

static aff_status write_experts(job *j, aff_error *err)
{
    int threads = aff__pool_threads(j->pool);
    const aff_clayer *layout = aff__cwriter_layer_layout(j->w, 0);
    layer_run r = {.j = j};
    char(*table)[128] = NULL;
    aff_status s = aff__calloc(&r.space, (uint64_t)threads, sizeof *r.space, "worker space", err);
    if (s == AFF_OK) s = aff__calloc(&r.errors, (uint64_t)j->plan.experts, sizeof *r.errors, "expert errors", err);
    if (s == AFF_OK) s = aff__calloc(&table, j->plan.layers, sizeof *table, "error table", err);
    for (int t = 0; t < threads && s == AFF_OK; t++) {
        s = aff__calloc(&r.space[t].scratch, (uint64_t)j->plan.inter * (uint64_t)j->plan.hidden, sizeof(float),
                        "expert matrix", err);
        if (s == AFF_OK) s = aff__calloc(&r.space[t].record, layout->stride, 1, "expert record", err);
    }
    if (s == AFF_OK) s = write_layers(j, &r, table, err);
    if (s == AFF_OK && j->has_codebook) {
        say(j, "layer   mean      worst (expert)  largest   relative Frobenius error of the experts; largest |w - w'|");
        for (uint32_t l = 0; l < j->plan.layers; l++) say(j, "%s", table[l]);
    }
    for (int t = 0; t < threads && r.space; t++) {
        free(r.space[t].scratch);
        free(r.space[t].record);
    }
    free(r.space);
    free(r.errors);
    free(table);
    return s;
}

/* ---- the whole ---- */

static void describe_source(const job *j)
{
    const aff_qplan *p = &j->plan;
    say(j,
        "%s: %" PRIu64 " tensors in %d shards; hidden %" PRId64 ", %" PRId64 " layers, %" PRId64
        " experts of width %" PRId64 ", %" PRId64 " draft stages%s",
        j->o->src, aff__ckpt_count(p->ckpt), aff__ckpt_shards(p->ckpt), p->hidden, p->layers_in_config, p->experts,
        p->inter, p->stages, p->has_dspark ? " (DSpark)" : "");
    const aff_clayer *l = aff__cwriter_layer_layout(j->w, 0);
    say(j, "%u %s -> %s at %.3f bits per expert weight (%s)%s", p->layers, j->o->dspark ? "stages" : "layers",
        j->o->out, (double)l->stride * 8 / (3.0 * (double)p->inter * (double)p->hidden),
        aff__dtype_info(j->dtype)->name,
        !j->o->dspark && p->layers < p->layers_in_config ? "; NOT a usable model" : "");
}

static aff_status run(job *j, aff_error *err)
{
    uint64_t start = aff__now_ns();
    AFF_TRY(aff__qplan_make(&j->plan, j->o, err));
    AFF_TRY(hash_checkpoint(j, err));
    AFF_TRY(aff__pool_create(&j->pool, j->o->threads, err));
    AFF_TRY(aff__cwriter_create(&j->w, j->o->out, j->o->compat, err));
    AFF_TRY(declare(j, err));
    describe_source(j);
    AFF_TRY(get_codebook(j, err));
    AFF_TRY(add_provenance(j, err));
    AFF_TRY(aff__cwriter_begin(j->w, err));
    uint64_t size = aff__cwriter_file_size(j->w);
    char text[32];
    say(j, "container: %s, %" PRIu64 " dense tensors, %" PRId64 " experts", size_text(text, size),
        j->plan.n_dense + j->has_codebook, j->plan.layers * j->plan.experts);
    add_done(j, 0); /* the rate counts from here, not from the fit */
    AFF_TRY(write_dense(j, err));
    AFF_TRY(write_experts(j, err));
    aff_cwriter *w = j->w;
    j->w = NULL; /* finish frees it in every case */
    AFF_TRY(aff__cwriter_finish(w, err));
    say(j, "%s: %s in %.1f s", j->o->out, size_text(text, size), seconds_since(start));
    return AFF_OK;
}

aff_status aff__quantize(const aff_quantize_options *o, aff_error *err)
{
    job *j;
    AFF_TRY(aff__quantize_check(o, err));
    AFF_TRY(aff__calloc(&j, 1, sizeof *j, "quantiser", err));
    j->o = o;
    j->has_codebook = !o->mxfp4;
    j->dtype = o->mxfp4 ? AFF_MXFP4 : o->compat ? AFF_Q2P875Q4 : AFF_Q2P875G;
    pthread_mutex_init(&j->lock, NULL);
    aff_status s = run(j, err);
    aff__cwriter_abort(j->w);
    aff__cb_index_free(j->index);
    aff__pool_free(j->pool);
    aff__qplan_free(&j->plan);
    pthread_mutex_destroy(&j->lock);
    free(j);
    return s;
}
