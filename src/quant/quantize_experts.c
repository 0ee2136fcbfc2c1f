/* Experts of a run: into the container, into blobs, out of blobs; their errors. */
#include "quant/quantize_job.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- one expert ---- */

aff_mxfp4 aff__q_matrix(const aff_qjob *j, const aff_qmatrix *m, int part)
{
    uint64_t inter = (uint64_t)j->plan.inter, hidden = (uint64_t)j->plan.hidden;
    return (aff_mxfp4){m->weight->data, m->scale->data, part == 2 ? hidden : inter, part == 2 ? inter : hidden};
}

const float *aff__q_weights(const aff_qjob *j, uint32_t layer, uint32_t expert, int part, float *out)
{
    if (!j->imatrix) return NULL;
    aff__imatrix_weights(j->imatrix, layer, expert, (aff_im_part)part, out); /* ones where nothing is known */
    return out;
}

bool aff__q_fed_back(const aff_qjob *j, uint32_t layer, uint32_t expert, int part)
{
    return j->imatrix && !j->o->compat && aff__imatrix_moments(j->imatrix, layer, expert, (aff_im_part)part);
}

void aff__q_spaces_free(const aff_qjob *j, aff_qspace *s)
{
    for (int t = 0; s && t < aff__pool_threads(j->pool); t++) {
        free(s[t].scratch);
        free(s[t].weight);
        free(s[t].record);
        aff__encode_space_free(s[t].encode);
        aff__feedback_free(s[t].down);
    }
    free(s);
}

static bool has_moments(const aff_qjob *j, aff_im_part part)
{
    for (uint32_t l = 0; l < j->plan.layers; l++)
        for (uint32_t e = 0; e < (uint32_t)j->plan.experts; e++)
            if (aff__q_fed_back(j, l, e, (int)part)) return true;
    return false;
}

/* The factors of gate and up, which all experts of the layer share. */
static aff_status prepare_layer(aff_qjob *j, uint32_t layer, aff_error *err)
{
    aff_error why = {0};
    j->has_feedback = aff__q_fed_back(j, layer, 0, AFF_IM_GATE);
    if (!j->has_feedback) return AFF_OK;
    if (!j->feedback) AFF_TRY(aff__feedback_create(&j->feedback, (uint64_t)j->plan.hidden, err));
    const uint8_t *moments = aff__imatrix_moments(j->imatrix, layer, 0, AFF_IM_GATE);
    const uint64_t n = (uint64_t)j->plan.hidden;
    const aff_status st = aff__feedback_factor(j->feedback, n, moments, j->pool, &why);
    aff__q_drop(moments, n * (n + 1) * 2);
    return st == AFF_OK ? st : aff__fail(err, st, "%s: layer %u: gate: %s", j->o->imatrix, layer, why.msg);
}

aff_status aff__q_spaces(const aff_qjob *j, uint64_t stride, aff_qspace **out, aff_error *err)
{
    uint64_t inter = (uint64_t)j->plan.inter, hidden = (uint64_t)j->plan.hidden, cols = inter > hidden ? inter : hidden;
    int threads = aff__pool_threads(j->pool);
    aff_qspace *s;
    *out = NULL;
    AFF_TRY(aff__calloc(&s, (uint64_t)threads, sizeof *s, "worker space", err));
    aff_status st = AFF_OK;
    for (int t = 0; t < threads && st == AFF_OK; t++) {
        if (j->o->compat || j->o->verify)
            st = aff__calloc(&s[t].scratch, inter * hidden, sizeof(float), "expert matrix", err);
        if (st == AFF_OK) st = aff__calloc(&s[t].weight, cols, sizeof(float), "worker space", err);
        if (st == AFF_OK) st = aff__calloc(&s[t].record, stride, 1, "expert record", err);
        if (st == AFF_OK) st = aff__encode_space_create(&s[t].encode, cols, err);
        if (st == AFF_OK && has_moments(j, AFF_IM_DOWN)) st = aff__feedback_create(&s[t].down, inter, err);
    }
    if (st == AFF_OK)
        *out = s;
    else
        aff__q_spaces_free(j, s);
    return st;
}

/* One matrix of an expert. */
typedef struct piece {
    uint32_t layer, expert;
    int part;
    const aff_matdesc *m;
    aff_mxfp4 src;
    const float *weight;
} piece;

static aff_status feedback_of(const aff_qjob *j, const piece *p, aff_qspace *s, const aff_feedback **f, aff_error *err)
{
    *f = NULL;
    if (p->part != AFF_IM_DOWN) {
        *f = j->has_feedback ? j->feedback : NULL;
        return AFF_OK;
    }
    if (!aff__q_fed_back(j, p->layer, p->expert, AFF_IM_DOWN)) return AFF_OK;
    *f = s->down;
    return aff__feedback_factor(s->down, p->m->cols, aff__imatrix_moments(j->imatrix, p->layer, p->expert, AFF_IM_DOWN),
                                NULL, err);
}

static aff_status encode_piece(const aff_qjob *j, const piece *p, aff_qspace *s, aff_qerror *e, aff_error *err)
{
    if (j->o->compat) {
        AFF_TRY(aff__mxfp4_decode(&p->src, s->scratch, err));
        aff__expert_matrix_encode(j->index, p->m, s->scratch, p->weight, s->record);
        return aff__expert_matrix_error(p->m, s->record, j->codebook, s->scratch, p->weight, e);
    }
    AFF_TRY(aff__mxfp4_check(&p->src, err));
    if (p->m->quant == AFF_MXFP4) {
        memcpy(s->record + p->m->data_off, p->src.codes, p->m->data_size);
        memcpy(s->record + p->m->scale_off, p->src.scales, p->m->scale_size);
    } else {
        const aff_feedback *f;
        AFF_TRY(feedback_of(j, p, s, &f, err));
        if (j->o->encoder && !f) return aff__encode_matrix_by(j->o->encoder, j->search, s->encode, p->m, &p->src, p->weight, s->record, e, err);
        aff__encode_matrix(j->search, s->encode, p->m, &p->src, p->weight, f, s->record, e);
    }
    return AFF_OK;
}

aff_status aff__q_encode(const aff_qjob *j, const aff_clayer *layout, uint32_t layer, uint32_t expert, aff_qspace *s,
                         aff_qerror *e, aff_error *err)
{
    static const char *const names[3] = {"w1", "w3", "w2"};
    const aff_matdesc *d[3] = {&layout->gate, &layout->up, &layout->down};
    const aff_qmatrix *m = aff__qplan_expert(&j->plan, layer, expert);
    *e = (aff_qerror){0};
    for (int i = 0; i < 3; i++) {
        aff_error why = {0};
        const piece p = {
            layer, expert, i, d[i], aff__q_matrix(j, &m[i], i), aff__q_weights(j, layer, expert, i, s->weight)};
        aff_status st = encode_piece(j, &p, s, e, &why);
        if (st != AFF_OK)
            return aff__fail(err, st, "%s: layer %u expert %u: %s: %s",
                             aff__ckpt_shard_path(j->plan.ckpt, m[i].weight->shard), layer, expert, names[i], why.msg);
        aff__q_release(m[i].weight);
        aff__q_release(m[i].scale);
    }
    return AFF_OK;
}

static uint64_t expert_bytes(const aff_qjob *j, uint32_t layer, uint32_t expert)
{
    const aff_qmatrix *m = aff__qplan_expert(&j->plan, layer, expert);
    uint64_t n = 0;
    for (int i = 0; i < 3; i++) n += m[i].weight->size + m[i].scale->size;
    return n;
}

static aff_qerror *error_of(const aff_qjob *j, uint32_t layer, int64_t expert)
{
    return &j->errors[(uint64_t)layer * (uint64_t)j->plan.experts + (uint64_t)expert];
}

/* ---- a layer, every thread taking the next expert ---- */

typedef struct layer_run {
    aff_qjob *j;
    uint32_t layer;
    const aff_clayer *layout;
    aff_qspace *space;      /* per thread */
    aff_outfile *blob;      /* NULL: into the container */
    const aff_container *c; /* verify */
    aff_error first;        /* of the lowest-numbered expert that failed */
    int64_t failed;         /* its number; under the job's lock */
} layer_run;

static void failed_with(layer_run *r, int64_t e, const aff_error *err)
{
    pthread_mutex_lock(&r->j->lock);
    if (r->failed < 0 || e < r->failed) {
        r->failed = e;
        r->first = *err;
    }
    pthread_mutex_unlock(&r->j->lock);
}

static aff_status run_layer(layer_run *r, void (*task)(void *, int64_t, int), aff_error *err)
{
    r->failed = -1;
    aff__pool_run(r->j->pool, task, r, r->j->plan.experts);
    if (r->failed < 0) return AFF_OK;
    if (err) *err = r->first;
    return r->first.code;
}

_Static_assert(sizeof(aff_qerror) == 5 * sizeof(double), "an aff_qerror is the journal's five figures");

/* The kernel reads the next expert while this one is being encoded. */
static void read_ahead(const aff_qjob *j, uint32_t layer, int64_t expert)
{
    if (expert >= j->plan.experts) return;
    const aff_qmatrix *m = aff__qplan_expert(&j->plan, layer, (uint64_t)expert);
    for (int i = 0; i < 3; i++) {
        aff__q_want(m[i].weight);
        aff__q_want(m[i].scale);
    }
}

static void encode_task(void *ctx, int64_t e, int thread)
{
    layer_run *r = ctx;
    aff_qjob *j = r->j;
    aff_error err = {0};
    aff_status st = aff__q_go_on(j, &err);
    aff_qerror *q = error_of(j, r->layer, e);
    double note[5];
    if (st != AFF_OK) {
        failed_with(r, e, &err);
        return;
    }
    if (!aff__cwriter_has_expert(j->w, r->layer, (uint32_t)e, note)) {
        read_ahead(j, r->layer, e + aff__pool_threads(j->pool));
        st = aff__q_encode(j, r->layout, r->layer, (uint32_t)e, &r->space[thread], q, &err);
        memcpy(note, q, sizeof note);
        if (st == AFF_OK)
            st = aff__cwriter_expert_noted(j->w, r->layer, (uint32_t)e, r->space[thread].record, note, &err);
    } else {
        memcpy(q, note, sizeof note);
    }
    if (st == AFF_OK)
        aff__q_add_done(j, expert_bytes(j, r->layer, (uint32_t)e));
    else
        failed_with(r, e, &err);
}

aff_status aff__q_experts(aff_qjob *j, aff_error *err)
{
    layer_run r = {.j = j, .layout = aff__cwriter_layer_layout(j->w, 0)};
    aff_status st = aff__q_spaces(j, r.layout->stride, &r.space, err);
    for (uint32_t l = 0; l < j->plan.layers && st == AFF_OK; l++) {
        r.layer = l;
        r.layout = aff__cwriter_layer_layout(j->w, l);
        if (j->o->experts_from) {
            st = aff__q_blob_layer(j, l, err);
        } else {
            st = prepare_layer(j, l, err);
            if (st == AFF_OK) st = run_layer(&r, encode_task, err);
        }
    }
    aff__q_spaces_free(j, r.space);
    return st;
}

/* ---- blobs (container 12) ---- */

/* `AFFX0001`, u32 layer, u32 experts, u64 codebook hash, u64 size of the imatrix; ours in the reserved bytes: u64
 * XXH3-64 of the imatrix, u64 hash of the whole recipe; then nine (offset, size) for each expert, payloads, and behind
 * them five doubles for each expert: its error. */
enum { BLOB_HEAD = 64, BLOB_INDEX = 144, BLOB_PLANES = 9 };

static void put_le(uint8_t *p, uint64_t v, int n)
{
    for (int i = 0; i < n; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static uint64_t get_le(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static void blob_head(const aff_qjob *j, uint32_t layer, uint8_t out[BLOB_HEAD])
{
    memset(out, 0, BLOB_HEAD);
    memcpy(out, "AFFX0001", 8);
    put_le(out + 8, layer, 4);
    put_le(out + 12, (uint64_t)j->plan.experts, 4);
    put_le(out + 16, aff__q_codebook_hash(j->codebook), 8);
    put_le(out + 24, j->imatrix_size, 8);
    put_le(out + 32, j->imatrix ? aff__imatrix_info(j->imatrix)->hash : 0, 8);
    put_le(out + 40, aff__q_recipe_hash(j), 8);
}

static aff_status check_head(const aff_qjob *j, const char *path, const uint8_t *got, uint64_t size, uint32_t layer,
                             aff_error *err)
{
    static const struct {
        int at, n;
        const char *what;
    } parts[] = {{0, 8, "magic"},
                 {8, 4, "layer"},
                 {12, 4, "number of experts"},
                 {16, 8, "codebook"},
                 {24, 8, "size of the imatrix"},
                 {32, 8, "imatrix"},
                 {40, 8, "recipe (checkpoint, program, options)"}};
    uint8_t want[BLOB_HEAD];
    blob_head(j, layer, want);
    if (size < BLOB_HEAD) return aff__fail(err, AFF_E_FORMAT, "%s: too short for a layer of experts", path);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (memcmp(got + parts[i].at, want + parts[i].at, (size_t)parts[i].n) != 0)
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: its %s is another: expected %016" PRIx64 ", got %016" PRIx64 "; remove it or "
                             "repeat the step that made it",
                             path, parts[i].what, get_le(want + parts[i].at, parts[i].n),
                             get_le(got + parts[i].at, parts[i].n));
    return AFF_OK;
}

/* The planes of a record in the blob's order: codes, fields, row scales of gate, up, down. */
static void planes_of(const aff_clayer *y, uint64_t off[BLOB_PLANES], uint64_t size[BLOB_PLANES])
{
    const aff_matdesc *m[3] = {&y->gate, &y->up, &y->down};
    for (int i = 0; i < 3; i++) {
        off[3 * i] = m[i]->data_off;
        off[3 * i + 1] = m[i]->scale_off;
        off[3 * i + 2] = m[i]->rscale_off;
        size[3 * i] = m[i]->data_size;
        size[3 * i + 1] = m[i]->scale_size;
        size[3 * i + 2] = m[i]->rscale_size;
    }
}

static uint64_t payload_size(const aff_clayer *y)
{
    uint64_t off[BLOB_PLANES], size[BLOB_PLANES], n = 0;
    planes_of(y, off, size);
    for (int i = 0; i < BLOB_PLANES; i++) n += size[i];
    return n;
}

static aff_status blob_expert(const layer_run *r, int64_t e, const uint8_t *record, const aff_qerror *q, aff_error *err)
{
    uint64_t off[BLOB_PLANES], size[BLOB_PLANES], n = (uint64_t)r->j->plan.experts, each = payload_size(r->layout);
    uint64_t at = BLOB_HEAD + n * BLOB_INDEX + (uint64_t)e * each;
    uint8_t index[BLOB_INDEX];
    planes_of(r->layout, off, size);
    for (int i = 0; i < BLOB_PLANES; i++) {
        put_le(index + 16 * i, at, 8);
        put_le(index + 16 * i + 8, size[i], 8);
        AFF_TRY(aff__out_write(r->blob, record + off[i], size[i], at, err));
        at += size[i];
    }
    AFF_TRY(aff__out_write(r->blob, index, sizeof index, BLOB_HEAD + (uint64_t)e * BLOB_INDEX, err));
    return aff__out_write(r->blob, q, sizeof *q, BLOB_HEAD + n * (BLOB_INDEX + each) + (uint64_t)e * sizeof *q, err);
}

static void blob_task(void *ctx, int64_t e, int thread)
{
    layer_run *r = ctx;
    aff_error err = {0};
    aff_qerror *q = error_of(r->j, r->layer, e);
    aff_status st = aff__q_go_on(r->j, &err);
    if (st == AFF_OK) read_ahead(r->j, r->layer, e + aff__pool_threads(r->j->pool));
    if (st == AFF_OK) st = aff__q_encode(r->j, r->layout, r->layer, (uint32_t)e, &r->space[thread], q, &err);
    if (st == AFF_OK) st = blob_expert(r, e, r->space[thread].record, q, &err);
    if (st == AFF_OK)
        aff__q_add_done(r->j, expert_bytes(r->j, r->layer, (uint32_t)e));
    else
        failed_with(r, e, &err);
}

static aff_status blob_path(const aff_qjob *j, const char *dir, uint32_t layer, char path[4096], aff_error *err)
{
    char name[32];
    (void)j;
    snprintf(name, sizeof name, "L%03u.affx", layer);
    return aff__path_join(path, 4096, dir, name, err);
}

/* Done already? A file that is there must be of this very recipe. */
static aff_status blob_exists(const aff_qjob *j, const char *path, uint32_t layer, bool *there, aff_error *err)
{
    aff_map m;
    *there = aff__file_exists(path);
    if (!*there) return AFF_OK;
    AFF_TRY(aff__map_open(&m, path, err));
    aff_status st = check_head(j, path, m.data, m.size, layer, err);
    aff__map_close(&m);
    return st;
}

static aff_status write_blob(layer_run *r, const char *path, aff_error *err)
{
    aff_outfile f;
    uint8_t head[BLOB_HEAD];
    AFF_TRY(aff__out_open(&f, path, err));
    r->blob = &f;
    aff_status st = run_layer(r, blob_task, err);
    blob_head(r->j, r->layer, head);
    if (st == AFF_OK) st = aff__out_write(&f, head, sizeof head, 0, err);
    if (st == AFF_OK) return aff__out_commit(&f, err);
    aff__out_abort(&f);
    return st;
}

aff_status aff__q_blobs_write(aff_qjob *j, aff_error *err)
{
    uint32_t from = (uint32_t)j->o->range_from, to = j->plan.layers;
    if (j->o->range_to > 0 && j->o->range_to < to) to = (uint32_t)j->o->range_to;
    if (from >= to)
        return aff__fail(err, AFF_E_INVALID, "--layer-range: the model has layers 0 to %u", j->plan.layers - 1);
    AFF_TRY(aff__make_dir(j->o->experts_dir, err));
    layer_run r = {.j = j, .layout = aff__cwriter_layer_layout(j->w, 0)};
    aff_status st = aff__q_spaces(j, r.layout->stride, &r.space, err);
    for (uint32_t l = from; l < to && st == AFF_OK; l++) {
        char path[4096];
        bool there = false;
        r.layer = l;
        st = blob_path(j, j->o->experts_dir, l, path, err);
        if (st == AFF_OK) st = blob_exists(j, path, l, &there, err);
        if (st == AFF_OK && !there) st = prepare_layer(j, l, err);
        if (st == AFF_OK && !there) st = write_blob(&r, path, err);
        if (st == AFF_OK) aff__q_say(j, "%s: %s", path, there ? "is there already" : "written");
    }
    aff__q_spaces_free(j, r.space);
    return st;
}

static aff_status copy_expert(aff_qjob *j, const aff_map *m, const char *path, uint32_t layer, int64_t e,
                              uint8_t *record, aff_error *err)
{
    const aff_clayer *y = aff__cwriter_layer_layout(j->w, layer);
    const uint8_t *index = m->data + BLOB_HEAD + (uint64_t)e * BLOB_INDEX;
    uint64_t off[BLOB_PLANES], size[BLOB_PLANES];
    planes_of(y, off, size);
    for (int i = 0; i < BLOB_PLANES; i++) {
        uint64_t at = get_le(index + 16 * i, 8), n = get_le(index + 16 * i + 8, 8);
        if (n != size[i] || !aff__range_ok(at, n, m->size))
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: expert %" PRId64 ", plane %d: expected %" PRIu64
                             " bytes inside the file, got %" PRIu64 " at %" PRIu64,
                             path, e, i, size[i], n, at);
        memcpy(record + off[i], m->data + at, n);
    }
    return aff__cwriter_expert_noted(j->w, layer, (uint32_t)e, record,
                                     (const double *)(const void *)error_of(j, layer, e), err);
}

aff_status aff__q_blob_layer(aff_qjob *j, uint32_t layer, aff_error *err)
{
    char path[4096];
    aff_map m;
    uint8_t *record;
    uint64_t n = (uint64_t)j->plan.experts;
    const aff_clayer *y = aff__cwriter_layer_layout(j->w, layer);
    AFF_TRY(blob_path(j, j->o->experts_from, layer, path, err));
    AFF_TRY(aff__map_open(&m, path, err));
    uint64_t errors_at = BLOB_HEAD + n * (BLOB_INDEX + payload_size(y));
    aff_status st = check_head(j, path, m.data, m.size, layer, err);
    if (st == AFF_OK && m.size != errors_at + n * sizeof(aff_qerror))
        st = aff__fail(err, AFF_E_FORMAT, "%s: expected %" PRIu64 " bytes, got %" PRIu64, path,
                       errors_at + n * sizeof(aff_qerror), m.size);
    if (st == AFF_OK) memcpy(error_of(j, layer, 0), m.data + errors_at, n * sizeof(aff_qerror));
    if (st == AFF_OK) st = aff__calloc(&record, y->stride, 1, path, err);
    if (st == AFF_OK) {
        for (uint64_t e = 0; e < n && st == AFF_OK; e++) {
            if (!aff__cwriter_has_expert(j->w, layer, (uint32_t)e, NULL))
                st = copy_expert(j, &m, path, layer, (int64_t)e, record, err);
            aff__q_add_done(j, expert_bytes(j, layer, (uint32_t)e));
        }
        free(record);
    }
    aff__map_close(&m);
    return st;
}

/* ---- verify ---- */

static bool close_to(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fabs(b) + 1e-30;
}

static void verify_task(void *ctx, int64_t e, int thread)
{
    layer_run *r = ctx;
    aff_qjob *j = r->j;
    aff_qspace *s = &r->space[thread];
    const aff_clayer *y = aff__container_layer(r->c, r->layer);
    const aff_matdesc *d[3] = {&y->gate, &y->up, &y->down};
    const aff_qmatrix *m = aff__qplan_expert(&j->plan, r->layer, (uint64_t)e);
    aff_qerror got = {0}, *want = error_of(j, r->layer, e);
    aff_error err = {0};
    aff_status st = AFF_OK;
    for (int i = 0; i < 3 && st == AFF_OK; i++) {
        aff_mxfp4 src = aff__q_matrix(j, &m[i], i);
        st = aff__mxfp4_decode(&src, s->scratch, &err);
        if (st == AFF_OK)
            st = aff__expert_matrix_error(d[i], aff__container_expert(r->c, r->layer, (uint32_t)e), j->codebook,
                                          s->scratch, aff__q_weights(j, r->layer, (uint32_t)e, i, s->weight), &got);
        aff__q_release(m[i].weight);
        aff__q_release(m[i].scale);
    }
    if (st == AFF_OK &&
        !(close_to(got.err2, want->err2) && close_to(got.werr2, want->werr2) && close_to(got.max, want->max)))
        st = aff__fail(&err, AFF_E_FORMAT,
                       "%s: layer %u expert %" PRId64 ": its error is %.9g, expected %.9g: the file is damaged",
                       j->o->out, r->layer, e, aff__qerror_relative(&got), aff__qerror_relative(want));
    if (st != AFF_OK) failed_with(r, e, &err);
}

aff_status aff__q_verify(aff_qjob *j, aff_error *err)
{
    aff_container *c;
    layer_run r = {.j = j};
    AFF_TRY(aff__container_open(&c, j->o->out, err));
    aff_status st = aff__container_has_hashes(c) ? aff__container_verify(c, NULL, NULL, err) : AFF_OK;
    if (st == AFF_OK) st = aff__q_spaces(j, 1, &r.space, err);
    r.c = c;
    for (uint32_t l = 0; l < j->plan.layers && st == AFF_OK; l++) {
        r.layer = l;
        st = run_layer(&r, verify_task, err);
    }
    aff__q_spaces_free(j, r.space);
    aff__container_close(c);
    if (st == AFF_OK) aff__q_say(j, "%s: verified, every expert decodes to the error above", j->o->out);
    return st;
}

/* ---- errors ---- */

typedef struct layer_errors {
    double mean, weighted, worst, max;
    int64_t worst_at;
} layer_errors;

static layer_errors errors_of(const aff_qjob *j, uint32_t layer)
{
    layer_errors s = {0};
    for (int64_t e = 0; e < j->plan.experts; e++) {
        const aff_qerror *q = error_of(j, layer, e);
        double rel = aff__qerror_relative(q);
        s.mean += rel / (double)j->plan.experts;
        s.weighted += aff__qerror_weighted(q) / (double)j->plan.experts;
        if (rel > s.worst) {
            s.worst = rel;
            s.worst_at = e;
        }
        s.max = q->max > s.max ? q->max : s.max;
    }
    return s;
}

void aff__q_table(const aff_qjob *j)
{
    if (!j->has_codebook) return;
    aff__q_say(j, "relative Frobenius error of the experts");
    aff__q_say(j, "layer   mean      weighted  worst (expert)  largest |w - w'|");
    for (uint32_t l = 0; l < j->plan.layers; l++) {
        layer_errors s = errors_of(j, l);
        char worst[32], weighted[16] = "-      ";
        snprintf(worst, sizeof worst, "%.5f (%" PRId64 ")", s.worst, s.worst_at);
        if (j->imatrix) snprintf(weighted, sizeof weighted, "%.5f", s.weighted);
        aff__q_say(j, "%5u   %.5f   %s   %-14s  %.3g", l, s.mean, weighted, worst, s.max);
    }
}

aff_status aff__q_report(const aff_qjob *j, double seconds, aff_error *err)
{
    json_t *layers = json_array(), *all;
    char hash[17] = "";
    if (j->imatrix) snprintf(hash, sizeof hash, "%016" PRIx64, aff__imatrix_info(j->imatrix)->hash);
    for (uint32_t l = 0; l < j->plan.layers; l++) {
        layer_errors s = errors_of(j, l);
        json_t *experts = json_array(), *weighted = json_array();
        for (int64_t e = 0; e < j->plan.experts; e++) {
            json_array_append_new(experts, json_real(aff__qerror_relative(error_of(j, l, e))));
            if (j->imatrix) json_array_append_new(weighted, json_real(aff__qerror_weighted(error_of(j, l, e))));
        }
        json_array_append_new(layers, json_pack("{s:i, s:f, s:f, s:f, s:I, s:f, s:o, s:o}", "layer", (int)l, "error",
                                                s.mean, "weighted_error", s.weighted, "worst", s.worst, "worst_expert",
                                                (json_int_t)s.worst_at, "largest", s.max, "experts", experts,
                                                "experts_weighted", weighted));
    }
    all = json_pack("{s:s, s:s, s:s, s:s, s:I, s:f, s:o}", "tool", aff_version(), "source", j->o->src, "container",
                    j->o->out, "imatrix_xxh3", hash, "unseen_experts",
                    (json_int_t)(j->imatrix ? aff__imatrix_info(j->imatrix)->unseen : 0), "seconds", seconds, "layers",
                    layers);
    char *text = all ? json_dumps(all, JSON_INDENT(1)) : NULL;
    json_decref(all);
    if (!text) return aff__fail(err, AFF_E_NOMEM, "%s: out of memory or a path that is not UTF-8", j->o->report);
    aff_outfile f;
    aff_status st = aff__out_open(&f, j->o->report, err);
    if (st == AFF_OK) {
        st = aff__out_write(&f, text, strlen(text), 0, err);
        if (st == AFF_OK)
            st = aff__out_commit(&f, err);
        else
            aff__out_abort(&f);
    }
    free(text);
    return st;
}
