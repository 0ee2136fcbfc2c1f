#define _GNU_SOURCE
#include "quant/quantize.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/threads.h"
#include "format/container.h"
#include "quant/numbers.h"
#include "quant/quantize_job.h"
#include "quant/refold.h"
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

static void tell(const aff_qjob *j, void (*fn)(void *, const char *), const char *fmt, va_list ap)
{
    char line[512];
    if (!fn) return;
    vsnprintf(line, sizeof line, fmt, ap);
    fn(j->o->ctx, line);
}

void aff__q_say(const aff_qjob *j, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    tell(j, j->o->say, fmt, ap);
    va_end(ap);
}

void aff__q_warn(const aff_qjob *j, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    tell(j, j->o->warn, fmt, ap);
    va_end(ap);
}

double aff__q_seconds_since(uint64_t ns)
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

void aff__q_add_done(aff_qjob *j, uint64_t bytes)
{
    pthread_mutex_lock(&j->lock);
    j->done += bytes;
    if (j->o->progress && !j->o->progress(j->o->ctx, j->done, j->total)) j->stopped = true;
    pthread_mutex_unlock(&j->lock);
}

aff_status aff__q_go_on(aff_qjob *j, aff_error *err)
{
    pthread_mutex_lock(&j->lock);
    const bool stopped = j->stopped;
    pthread_mutex_unlock(&j->lock);
    return stopped ? aff__fail(err, AFF_E_CANCELLED, "%s: stopped", j->o->out) : AFF_OK;
}

static aff_status check_codebook_flags(const aff_quantize_options *o, aff_error *err)
{
    bool given = o->codebook || o->codebook_raw;
    if (o->mxfp4 && (given || o->cb_spread || o->codebook_out))
        return aff__fail(
            err, AFF_E_INVALID,
            "--experts mxfp4 needs no codebook: leave out --codebook, --codebook-raw, --codebook-out and --cb-spread");
    if (given && o->cb_spread)
        return aff__fail(err, AFF_E_INVALID, "--cb-spread: nothing is fitted when the codebook is given");
    if (o->dspark && !o->mxfp4 && !given)
        return aff__fail(err, AFF_E_INVALID,
                         "--dspark: the draft shares the model's codebook; give --codebook MAIN.aff or --codebook-raw");
    return AFF_OK;
}

static aff_status check_split_flags(const aff_quantize_options *o, aff_error *err)
{
    if (o->experts_dir && o->experts_from)
        return aff__fail(err, AFF_E_INVALID, "--experts-dir and --experts-from are two steps: give one of them");
    if ((o->experts_dir || o->experts_from) && (o->mxfp4 || !(o->codebook_raw || o->codebook)))
        return aff__fail(err, AFF_E_INVALID,
                         "--experts-dir and --experts-from need the one codebook of all machines: give --codebook-raw");
    if (o->codebook_out && (o->experts_dir || o->experts_from || o->resume || o->verify || o->report))
        return aff__fail(err, AFF_E_INVALID, "--codebook-out writes the codebook and nothing else");
    if ((o->range_from || o->range_to) && !o->experts_dir)
        return aff__fail(err, AFF_E_INVALID, "--layer-range belongs to --experts-dir");
    if (o->range_from < 0 || o->range_to < 0 || (o->range_to && o->range_from >= o->range_to))
        return aff__fail(err, AFF_E_INVALID, "--layer-range %" PRId64 ":%" PRId64 ": expected A:B with 0 <= A < B",
                         o->range_from, o->range_to);
    if (o->experts_dir && (o->verify || o->report || o->resume))
        return aff__fail(
            err, AFF_E_INVALID,
            "--experts-dir goes on by itself and has no container yet: leave out --resume, --verify and --report");
    return AFF_OK;
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
    if (o->encoder && (o->mxfp4 || o->compat))
        return aff__fail(err, AFF_E_INVALID, "--device: %s; leave out one of the two",
                         o->compat ? "--compat is encoded by this program's threads alone" : "--experts mxfp4 leaves nothing to encode");
    AFF_TRY(check_codebook_flags(o, err));
    return check_split_flags(o, err);
}

/* ---- hash of the checkpoint ---- */

/* Which checkpoint this is, without reading all of it: XXH3-64 over every tensor in order of name - name and NUL, dtype
 * name and NUL, rank and dimensions as u64, and the contents if they are at most 64 KiB (norms, biases, sinks, small
 * scales: training moves all of them). The same for model and draft, and for any sharding. */
static aff_status hash_checkpoint(aff_qjob *j, aff_error *err)
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

/* Values are checked before anything expensive: a NaN would otherwise show hours later. */

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

static aff_status bad_value(const aff_qjob *j, const aff_st_tensor *t, uint64_t i, const char *what, aff_error *err)
{
    return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': element %" PRIu64 " is %s",
                     aff__ckpt_shard_path(j->plan.ckpt, t->shard), t->name, i, what);
}

static void convert(const aff_qdense *d, void *out)
{
    for (uint64_t i = 0; i < d->rows * d->cols; i++) {
        float f;
        if (d->most) {
            uint64_t v;
            memcpy(&v, d->src->data + i * 8, 8);
            f = (float)v;
        } else {
            f = source_value(d->src, i);
        }
        const uint16_t h = aff__f32_to_bf16(f);
        if (d->dtype == AFF_BF16)
            memcpy((uint8_t *)out + i * 2, &h, 2);
        else
            memcpy((uint8_t *)out + i * 4, &f, 4);
    }
}

static aff_status check_table(const aff_qjob *j, const aff_qdense *d, aff_error *err)
{
    for (uint64_t i = 0; i < d->rows * d->cols; i++) {
        uint64_t v;
        memcpy(&v, d->src->data + i * 8, 8);
        if (v >= d->most) return bad_value(j, d->src, i, "no number of an expert", err);
    }
    return AFF_OK;
}

static aff_status check_floats(const aff_qjob *j, const aff_qdense *d, aff_error *err)
{
    for (uint64_t i = 0; i < d->rows * d->cols; i++) {
        const float f = source_value(d->src, i);
        if (!isfinite(f) || (d->dtype == AFF_BF16 && !isfinite(aff__bf16_to_f32(aff__f32_to_bf16(f)))))
            return bad_value(j, d->src, i, "not finite", err);
    }
    return AFF_OK;
}

static aff_status check_fp8(const aff_qjob *j, const aff_qdense *d, aff_error *err)
{
    for (uint64_t i = 0; i < d->src->size; i++)
        if ((d->src->data[i] & 0x7f) == 0x7f) return bad_value(j, d->src, i, "not a number", err);
    for (uint64_t i = 0; i < d->scale->size; i++)
        if (d->scale->data[i] == 255) return bad_value(j, d->scale, i, "not a number", err);
    return AFF_OK;
}

typedef struct dense_check {
    aff_qjob *j;
    aff_error first; /* of the lowest number that failed */
    int64_t failed;
} dense_check;

static void check_task(void *ctx, int64_t i, int thread)
{
    dense_check *c = ctx;
    const aff_qdense *d = &c->j->plan.dense[i];
    aff_error err = {0};
    (void)thread;
    if ((d->scale  ? check_fp8(c->j, d, &err)
         : d->most ? check_table(c->j, d, &err)
                   : check_floats(c->j, d, &err)) != AFF_OK) {
        pthread_mutex_lock(&c->j->lock);
        if (c->failed < 0 || i < c->failed) {
            c->failed = i;
            c->first = err;
        }
        pthread_mutex_unlock(&c->j->lock);
    }
    aff__q_release(d->src);
}

static aff_status check_dense(aff_qjob *j, aff_error *err)
{
    dense_check c = {.j = j, .failed = -1};
    aff__pool_run(j->pool, check_task, &c, (int64_t)j->plan.n_dense);
    if (c.failed < 0) return AFF_OK;
    if (err) *err = c.first;
    return c.first.code;
}

static aff_status write_refolded(aff_qjob *j, const aff_qdense *d, aff_error *err)
{
    const uint64_t tiles = d->src->size / (128 * 128);
    uint8_t *buf;
    AFF_TRY(aff__calloc(&buf, d->src->size + tiles, 1, d->name, err));
    aff__refold_fp8(d->src->data, d->scale->data, d->rows, d->cols, buf, buf + d->src->size);
    aff_status s = aff__cwriter_tensor(j->w, d->index, buf, d->src->size, buf + d->src->size, tiles, err);
    free(buf);
    return s;
}

static aff_status write_dense_tensor(aff_qjob *j, const aff_qdense *d, aff_error *err)
{
    uint64_t bytes = d->src->size + (d->scale ? d->scale->size : 0);
    AFF_TRY(aff__q_go_on(j, err));
    if (d->refold) {
        AFF_TRY(write_refolded(j, d, err));
    } else if (d->scale) {
        AFF_TRY(aff__cwriter_tensor(j->w, d->index, d->src->data, d->src->size, d->scale->data, d->scale->size, err));
    } else {
        uint64_t size = d->rows * d->cols * (d->dtype == AFF_BF16 ? 2 : 4);
        void *buf;
        AFF_TRY(aff__calloc(&buf, size, 1, d->name, err));
        convert(d, buf);
        aff_status s = aff__cwriter_tensor(j->w, d->index, buf, size, NULL, 0, err);
        free(buf);
        AFF_TRY(s);
    }
    aff__q_release(d->src);
    aff__q_add_done(j, bytes);
    return AFF_OK;
}

/* Whole pages inside the tensor. */
static void advise(const aff_st_tensor *t, int advice)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = ((uintptr_t)t->data + page - 1) / page * page,
              to = ((uintptr_t)t->data + t->size) / page * page;
    if (to > from)
        (void)posix_madvise((void *)from, to - from, advice); /* best effort: only memory use depends on it */
}

void aff__q_drop(const uint8_t *p, uint64_t n)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = ((uintptr_t)p + page - 1) / page * page,
              to = ((uintptr_t)p + n) / page * page;
    /* posix_madvise's DONTNEED does nothing in the C library; the mapping is read-only and shared, so nothing is lost.
     */
    if (to > from) (void)madvise((void *)from, to - from, MADV_DONTNEED);
}

void aff__q_release(const aff_st_tensor *t)
{
    aff__q_drop(t->data, t->size);
}

void aff__q_want(const aff_st_tensor *t)
{
    advise(t, POSIX_MADV_WILLNEED);
}

/* In the order of the shards, which is that of the disk. */
static aff_status write_dense(aff_qjob *j, aff_error *err)
{
    if (j->has_codebook) AFF_TRY(aff__cwriter_tensor(j->w, j->codebook_index, j->codebook, AFF_CB_BYTES, NULL, 0, err));
    for (int shard = 0; shard < aff__ckpt_shards(j->plan.ckpt); shard++)
        for (uint64_t i = 0; i < j->plan.n_dense; i++)
            if (j->plan.dense[i].src->shard == shard) AFF_TRY(write_dense_tensor(j, &j->plan.dense[i], err));
    return AFF_OK;
}

/* ---- container ---- */

static aff_status declare(aff_qjob *j, aff_error *err)
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
static aff_status add_provenance(aff_qjob *j, aff_error *err)
{
    char checkpoint[17], codebook[17], imatrix[17] = "";
    if (j->o->compat) return AFF_OK;
    snprintf(checkpoint, sizeof checkpoint, "%016" PRIx64, j->checkpoint_hash);
    snprintf(codebook, sizeof codebook, "%016" PRIx64, (uint64_t)XXH3_64bits(j->codebook, AFF_CB_BYTES));
    if (j->imatrix) snprintf(imatrix, sizeof imatrix, "%016" PRIx64, aff__imatrix_info(j->imatrix)->hash);
    json_t *recipe = json_pack("{s:s, s:s}", "experts", j->o->mxfp4 ? "mxfp4" : "q2p875", "hc_fn", "f32");
    json_t *prov = json_pack("{s:i, s:s+, s:s, s:s, s:i, s:s}", "version", 1, "tool", "aff-quantize ", aff_version(),
                             "role", j->o->dspark ? "draft" : "main", "chat_encoding",
                             j->plan.v41          ? "v4.1"
                             : j->plan.has_dspark ? "0731"
                                                  : "v4",
                             "layers", (int)j->plan.layers, "checkpoint_xxh3", checkpoint);
    char *text = NULL;
    if (prov && recipe) {
        if (j->has_codebook) {
            json_object_set_new(recipe, "codebook", json_string(j->codebook_from));
            json_object_set_new(prov, "codebook_xxh3", json_string(codebook));
        }
        if (j->imatrix) json_object_set_new(prov, "imatrix_xxh3", json_string(imatrix));
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

/* ---- the whole ---- */

static void describe_source(const aff_qjob *j)
{
    const aff_qplan *p = &j->plan;
    aff__q_say(j,
               "%s: %" PRIu64 " tensors in %d shards; hidden %" PRId64 ", %" PRId64 " layers, %" PRId64
               " experts of width %" PRId64 ", %" PRId64 " draft stages%s",
               j->o->src, aff__ckpt_count(p->ckpt), aff__ckpt_shards(p->ckpt), p->hidden, p->layers_in_config,
               p->experts, p->inter, p->stages, p->has_dspark ? " (DSpark)" : "");
    const aff_clayer *l = aff__cwriter_layer_layout(j->w, 0);
    aff__q_say(j, "%u %s -> %s at %.3f bits per expert weight (%s)%s", p->layers, j->o->dspark ? "stages" : "layers",
               j->o->out, (double)l->stride * 8 / (3.0 * (double)p->inter * (double)p->hidden),
               aff__dtype_info(j->dtype)->name,
               !j->o->dspark && p->layers < p->layers_in_config ? "; NOT a usable model" : "");
}

static aff_status open_imatrix(aff_qjob *j, aff_error *err)
{
    const aff_qplan *p = &j->plan;
    struct stat st;
    if (!j->o->imatrix) return AFF_OK;
    if (j->o->dspark || j->o->mxfp4) {
        aff__q_warn(j, "note: --imatrix is not used: %s",
                    j->o->dspark ? "it knows only the model's own layers" : "mxfp4 experts are copied");
        return AFF_OK;
    }
    aff_im_shape shape = {(uint32_t)p->layers_in_config, (uint32_t)p->experts, (uint64_t)p->hidden, (uint64_t)p->inter};
    AFF_TRY(aff__imatrix_open(&j->imatrix, j->o->imatrix, &shape, err));
    if (stat(j->o->imatrix, &st) == 0) j->imatrix_size = (uint64_t)st.st_size;
    const aff_im_info *i = aff__imatrix_info(j->imatrix);
    aff__q_say(j,
               "imatrix: %s, %016" PRIx64 ": %" PRIu64 " of %" PRIu64 " matrices; %" PRIu64
               " experts never seen (weight 1)%s",
               j->o->imatrix, i->hash, i->present, i->present + i->missing, i->unseen,
               i->has_counts ? "" : "; without counts, so there will be no profile");
    if (i->moments && !j->o->compat)
        aff__q_say(
            j, "imatrix: second moments for gate and up of %" PRIu64 " and down of %" PRIu64 " layers: error feedback",
            i->moments - i->moments_down, i->moments_down);
    if (i->moments && j->o->encoder)
        aff__q_warn(j, "--device: matrices with second moments (error feedback) are encoded by this program's threads, at their speed");
    return AFF_OK;
}

static aff_status add_profile(aff_qjob *j, aff_error *err)
{
    const float *p = j->imatrix ? aff__imatrix_profile(j->imatrix) : NULL;
    return p ? aff__cwriter_profile(j->w, p, (uint64_t)j->plan.layers * (uint64_t)j->plan.experts, err) : AFF_OK;
}

static aff_status begin(aff_qjob *j, aff_error *err)
{
    uint64_t kept, size;
    char text[32];
    AFF_TRY(add_provenance(j, err));
    AFF_TRY(aff__cwriter_begin_journal(j->w, aff__q_recipe_hash(j), j->o->resume, &kept, err));
    j->begun = true;
    size = aff__cwriter_file_size(j->w);
    aff__q_say(j, "container: %s, %" PRIu64 " dense tensors, %" PRId64 " experts", size_text(text, size),
               j->plan.n_dense + j->has_codebook, j->plan.layers * j->plan.experts);
    if (j->o->resume) aff__q_say(j, "resume: %" PRIu64 " experts are there already", kept);
    aff__q_add_done(j, 0); /* the rate counts from here, not from the fit */
    return AFF_OK;
}

static aff_status finish(aff_qjob *j, uint64_t start, aff_error *err)
{
    char text[32];
    uint64_t size = aff__cwriter_file_size(j->w);
    aff_cwriter *w = j->w;
    aff__q_table(j);
    AFF_TRY(add_profile(j, err));
    j->w = NULL; /* finish frees it in every case */
    AFF_TRY(aff__cwriter_finish(w, err));
    aff_status st = j->o->verify && j->has_codebook ? aff__q_verify(j, err) : AFF_OK;
    if (st != AFF_OK) {
        unlink(j->o->out);
        return st;
    }
    if (j->o->report) AFF_TRY(aff__q_report(j, aff__q_seconds_since(start), err));
    aff__q_say(j, "%s: %s in %.1f s", j->o->out, size_text(text, size), aff__q_seconds_since(start));
    return AFF_OK;
}

static aff_status run(aff_qjob *j, aff_error *err)
{
    uint64_t start = aff__now_ns();
    AFF_TRY(aff__qplan_make(&j->plan, j->o, err));
    AFF_TRY(hash_checkpoint(j, err));
    AFF_TRY(aff__pool_create(&j->pool, j->o->threads, err));
    AFF_TRY(open_imatrix(j, err));
    AFF_TRY(aff__calloc(&j->errors, (uint64_t)j->plan.layers * (uint64_t)j->plan.experts, sizeof *j->errors,
                        "expert errors", err));
    if (j->o->codebook_out) {
        AFF_TRY(aff__q_codebook(j, err));
        return aff__q_codebook_write(j, j->o->codebook_out, err);
    }
    AFF_TRY(aff__cwriter_create(&j->w, j->o->out, j->o->compat, err));
    AFF_TRY(declare(j, err));
    describe_source(j);
    if (!j->o->experts_dir) AFF_TRY(check_dense(j, err));
    AFF_TRY(aff__q_codebook(j, err));
    if (j->o->experts_dir) {
        AFF_TRY(aff__cwriter_layout(j->w, err));
        return aff__q_blobs_write(j, err);
    }
    AFF_TRY(begin(j, err));
    AFF_TRY(write_dense(j, err));
    AFF_TRY(aff__q_experts(j, err));
    return finish(j, start, err);
}

/* What a run that ends early leaves for --resume. */
static void name_the_rest(const aff_qjob *j, aff_error *err)
{
    char path[4096];
    const size_t n = err ? strlen(err->msg) : sizeof err->msg;
    const int k = snprintf(path, sizeof path, "%s.partial", j->o->out);
    if (!j->begun || k < 0 || (size_t)k >= sizeof path || n >= sizeof err->msg || !aff__file_exists(path)) return;
    snprintf(err->msg + n, sizeof err->msg - n,
             "; the experts done so far are kept: the same command with --resume goes on");
}

aff_status aff__quantize(const aff_quantize_options *o, aff_error *err)
{
    aff_qjob *j;
    AFF_TRY(aff__quantize_check(o, err));
    AFF_TRY(aff__calloc(&j, 1, sizeof *j, "quantiser", err));
    j->o = o;
    j->has_codebook = !o->mxfp4;
    j->dtype = o->mxfp4 ? AFF_MXFP4 : o->compat ? AFF_Q2P875Q4 : AFF_Q2P875G;
    pthread_mutex_init(&j->lock, NULL);
    aff_status s = run(j, err);
    aff__cwriter_suspend(j->w);
    if (s != AFF_OK) name_the_rest(j, err);
    aff__cb_index_free(j->index);
    aff__search_free(j->search);
    aff__feedback_free(j->feedback);
    aff__imatrix_close(j->imatrix);
    aff__pool_free(j->pool);
    aff__qplan_free(&j->plan);
    free(j->errors);
    pthread_mutex_destroy(&j->lock);
    free(j);
    return s;
}
