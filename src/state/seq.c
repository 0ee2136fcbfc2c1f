/* A sequence's arrays lie one after another in a single reserved range of address space, of the host or of a device
 * (backend/memory.h). Rings are backed at once; the arrays that grow with the context are backed page by page from
 * their front, ahead of the position. Reset only moves the position back (and gives grown memory away): no row is read
 * before it has been written in the new sequence (rings are read at positions >= 0 only, groups only when complete). */
#include "state/grow.h"
#include "state/seq_internal.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 4096 }; /* of arrays that do not grow */

static int pow2_at_least(int n)
{
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

/* First pass (base NULL): adds up sizes. Second pass: hands out pointers. */
typedef struct {
    char *base;
    uint64_t used;
    uint64_t align; /* room of an array is a multiple */
    bool overflow;
} carve;

static void *take(carve *c, int64_t rows, uint64_t row_bytes)
{
    uint64_t bytes, end;
    if (!aff__mul_ok((uint64_t)rows, row_bytes, &bytes) || bytes > UINT64_MAX / 4 ||
        !aff__add_ok(c->used, aff__align_up(bytes, c->align), &end)) {
        c->overflow = true;
        return NULL;
    }
    void *p = c->base ? c->base + c->used : NULL;
    c->used = end;
    return p;
}

static void carve_raw(carve *c, aff_seq *s, aff_layer_state *l, const aff_config *cf)
{
    l->row = &s->row;
    l->key = &s->key;
    l->raw_size = cf->window + AFF_MAX_CHUNK;
    l->raw = take(c, l->raw_size, (uint64_t)s->row.bytes);
}

static void carve_history(carve *c, aff_layer_state *l, const aff_config *cf, int ratio)
{
    if (!ratio) return;
    const int coff = ratio == 4 ? 2 : 1;
    const uint64_t width = (uint64_t)coff * (uint64_t)cf->head_dim * sizeof(float),
                   iwidth = 2 * (uint64_t)cf->index_dim * sizeof(float);
    l->hist_size = pow2_at_least(coff * ratio + AFF_MAX_ROLLBACK);
    l->hist_c = take(c, l->hist_size, width);
    l->hist_z = take(c, l->hist_size, width);
    if (ratio != 4) return;
    l->ihist_c = take(c, l->hist_size, iwidth);
    l->ihist_z = take(c, l->hist_size, iwidth);
}

static void *carve_span(carve *c, aff_seq *s, int ratio, const aff_rowfmt *f, bool key)
{
    s->span[s->n_spans++] = (aff_span){.off = c->used, .row_bytes = (uint64_t)f->bytes, .ratio = ratio, .key = key};
    return take(c, s->capacity / ratio, (uint64_t)f->bytes);
}

/* Adds up the parts in *plan unless it is NULL. */
static void carve_all(carve *c, aff_seq *s, const aff_config *cf, aff_seq_plan *plan)
{
    aff_seq_plan p = {0};
    c->align = ALIGN;
    for (int l = 0; l < s->n_layers; l++) carve_raw(c, s, &s->layer[l], cf);
    p.raw = c->used;
    for (int l = 0; l < s->n_layers; l++) carve_history(c, &s->layer[l], cf, cf->ratio[l]);
    p.history = c->used - p.raw;
    for (int i = 0; i < s->n_stages; i++) carve_raw(c, s, &s->stage[i], cf);
    p.draft = c->used - p.raw - p.history;
    p.copy = s->rings_size = c->used;
    s->saved = take(c, 1, s->rings_size);
    s->table = s->mem->host ? NULL : take(c, s->n_layers + s->n_stages, sizeof(aff_layer_state));
    c->used = aff__align_up(c->used, s->mem->page);
    c->align = s->mem->page;
    s->fixed_size = c->used;
    s->n_spans = 0;
    for (int l = 0; l < s->n_layers; l++) {
        if (!cf->ratio[l]) continue;
        s->layer[l].comp = carve_span(c, s, cf->ratio[l], &s->row, false);
        if (cf->ratio[l] == 4) s->layer[l].ikey = carve_span(c, s, 4, &s->key, true);
    }
    if (plan) *plan = p;
}

static uint64_t span_bytes(const aff_seq *s, const aff_span *sp, int64_t positions)
{
    return aff__align_up((uint64_t)(positions / sp->ratio) * sp->row_bytes, s->mem->page);
}

/* Everything but memory. */
static aff_status describe(aff_seq *s, const aff_net *net, const aff_memory *mem, int64_t positions, aff_error *err)
{
    const aff_config *cf = aff__net_config(net);
    if (positions < 1 || positions > cf->max_positions)
        return aff__fail(err, AFF_E_LIMIT, "context of %lld positions: expected 1 to max_position_embeddings %lld",
                         (long long)positions, (long long)cf->max_positions);
    s->net = net;
    s->mem = mem ? mem : &aff__host_memory;
    s->capacity = positions;
    s->n_layers = aff__net_layers(net);
    s->n_stages = aff__net_stages(net);
    s->row = aff__rowfmt_kv(aff__net_numerics(net), cf->head_dim, cf->rope_dim);
    s->key = aff__rowfmt_key(aff__net_numerics(net), cf->index_dim);
    return AFF_OK;
}

aff_status aff__seq_plan(aff_seq_plan *out, const aff_net *net, int64_t positions, aff_error *err)
{
    aff_seq *s;
    *out = (aff_seq_plan){0};
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "sequence", err));
    aff_status st = describe(s, net, NULL, positions ? positions : 1, err);
    if (st == AFF_OK) {
        carve c = {0};
        carve_all(&c, s, aff__net_config(net), out);
        out->positions = positions;
        out->row_bytes = (uint64_t)s->row.bytes;
        out->key_bytes = (uint64_t)s->key.bytes;
        for (int i = 0; i < s->n_spans; i++) {
            *(s->span[i].key ? &out->keys : &out->rows) += span_bytes(s, &s->span[i], positions);
            out->per_position += (double)s->span[i].row_bytes / s->span[i].ratio;
        }
        out->total = s->fixed_size + out->rows + out->keys;
    }
    free(s);
    return st;
}

uint64_t aff__seq_handle_bytes(void) { return aff__align_up(sizeof(aff_seq), 64); }

/* ---- memory ---- */

/* A range that may be empty. */
static bool back(const aff_seq *s, void *p, uint64_t bytes, aff_error *err)
{
    return !bytes || s->mem->commit(s->mem, p, bytes, "context", err) == AFF_OK;
}

static void unback(const aff_seq *s, void *p, uint64_t bytes)
{
    if (bytes) s->mem->decommit(s->mem, p, bytes);
}

/* From the backed positions to `positions`, more or fewer. On failure nothing has changed. */
static bool set_backed(aff_seq *s, int64_t positions, aff_error *err)
{
    bool ok = true;
    int i = 0;
    for (; ok && i < s->n_spans; i++) {
        const uint64_t have = span_bytes(s, &s->span[i], s->backed), want = span_bytes(s, &s->span[i], positions);
        char *p = (char *)s->region + s->span[i].off;
        if (want > have)
            ok = back(s, p + have, want - have, err);
        else
            unback(s, p + want, have - want);
    }
    if (ok) {
        s->backed = positions;
        return true;
    }
    while (i--) {
        const uint64_t have = span_bytes(s, &s->span[i], s->backed), want = span_bytes(s, &s->span[i], positions);
        if (want > have) unback(s, (char *)s->region + s->span[i].off + have, want - have);
    }
    return false;
}

void aff__seq_ahead(aff_seq *s, int64_t positions)
{
    pthread_mutex_lock(&s->lock);
    if (positions > s->backed) set_backed(s, positions, NULL);
    pthread_mutex_unlock(&s->lock);
}

/* Before less than a step is left, the grower is asked for another. */
static void ask_ahead(aff_seq *s, int64_t positions)
{
    const int64_t backed = s->backed;
    if (!s->grower || backed == s->capacity || backed - positions >= s->margin) return;
    aff__grower_ask(s->grower, s, s->capacity - backed < s->margin ? s->capacity : backed + s->margin);
}

/* Under the lock. */
static aff_status grow(aff_seq *s, int64_t positions, aff_error *err)
{
    if (positions <= s->backed) return AFF_OK;
    if (positions > s->capacity)
        return aff__fail(err, AFF_E_LIMIT, "context full: %lld positions, room for %lld", (long long)positions,
                         (long long)s->capacity);
    int64_t want = (positions + s->margin) / s->margin; /* whole steps, one ahead of what is needed now */
    want = want > s->capacity / s->margin ? s->capacity : want * s->margin;
    if (want < positions) want = positions;
    aff_error why = {0};
    if (set_backed(s, want, NULL) || set_backed(s, positions, &why)) return AFF_OK;
    return aff__fail(
        err, AFF_E_NOMEM,
        "context: the system refuses memory for positions %lld to %lld (%s): free memory, or end the sequence here",
        (long long)s->backed, (long long)positions, why.msg);
}

aff_status aff__seq_grow(aff_seq *s, int64_t positions, aff_error *err)
{
    aff_status st = AFF_OK;
    if (positions > s->backed) {
        pthread_mutex_lock(&s->lock);
        st = grow(s, positions, err);
        pthread_mutex_unlock(&s->lock);
    }
    if (st == AFF_OK) ask_ahead(s, positions);
    return st;
}

static aff_status check_options(const aff_seq_options *o, const aff_config *cf, aff_seq_options *use, aff_error *err)
{
    *use = *o;
    if (use->size == 0) use->size = cf->max_positions;
    if (use->margin == 0) use->margin = AFF_KV_MARGIN;
    if (use->commit == 0) use->commit = AFF_KV_COMMIT < use->size ? AFF_KV_COMMIT : use->size;
    if (use->commit == -1) use->commit = 0;
    if (use->commit < 0 || use->commit > use->size)
        return aff__fail(err, AFF_E_INVALID,
                         "positions backed from the start: expected at most the context's %lld, got %lld",
                         (long long)use->size, (long long)o->commit);
    if (use->margin < 1)
        return aff__fail(err, AFF_E_INVALID, "positions backed at a time: expected 1 or more, got %lld",
                         (long long)o->margin);
    return AFF_OK;
}

/* The layers' addresses where a device's kernels read them. */
static aff_status write_table(aff_seq *s, aff_error *err)
{
    const uint64_t layers = (uint64_t)s->n_layers * sizeof *s->layer, stages = (uint64_t)s->n_stages * sizeof *s->stage;
    if (!s->table) return AFF_OK;
    AFF_TRY(s->mem->write(s->mem, s->table, s->layer, layers, err));
    return stages ? s->mem->write(s->mem, (char *)s->table + layers, s->stage, stages, err) : AFF_OK;
}

static aff_status reserve(aff_seq *s, const aff_config *cf, aff_error *err)
{
    carve c = {0};
    carve_all(&c, s, cf, NULL);
    if (c.overflow)
        return aff__fail(err, AFF_E_NOMEM, "context of %lld positions: more than an address space",
                         (long long)s->capacity);
    AFF_TRY(s->mem->reserve(s->mem, &s->region, c.used, "context", err));
    s->region_size = c.used;
    c = (carve){.base = s->region};
    carve_all(&c, s, cf, NULL);
    if (!back(s, s->region, s->fixed_size, err) || !set_backed(s, s->commit, err)) return AFF_E_NOMEM;
    return write_table(s, err);
}

aff_status aff__seq_open(aff_seq **out, const aff_net *net, const aff_seq_options *o, aff_error *err)
{
    const aff_config *cf = aff__net_config(net);
    aff_seq_options use;
    aff_seq *s;
    *out = NULL;
    AFF_TRY(check_options(o, cf, &use, err));
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "sequence", err));
    aff_status st = describe(s, net, use.memory, use.size, err);
    pthread_mutex_init(&s->lock, NULL);
    s->commit = use.commit;
    s->margin = use.margin;
    s->grower = use.grower;
    if (st == AFF_OK) st = reserve(s, cf, err);
    if (st != AFF_OK) {
        aff__seq_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

aff_status aff__seq_create(aff_seq **out, const aff_net *net, int64_t positions, aff_error *err)
{
    *out = NULL;
    if (positions < 1)
        return aff__fail(err, AFF_E_LIMIT, "context of %lld positions: expected 1 or more", (long long)positions);
    return aff__seq_open(out, net, &(aff_seq_options){.size = positions}, err);
}

void aff__seq_free(aff_seq *s)
{
    if (!s) return;
    if (s->grower) aff__grower_leave(s->grower, s);
    if (s->region) s->mem->release(s->mem, s->region, s->region_size);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void aff__seq_reset(aff_seq *s)
{
    s->pos = s->high = s->floor = 0;
    if (s->grower) aff__grower_leave(s->grower, s);
    if (s->backed > s->commit) set_backed(s, s->commit, NULL);
}

aff_status aff__seq_begin(aff_seq *s, int n, aff_error *err)
{
    s->has_saved = n > AFF_MAX_ROLLBACK;
    s->saved_pos = s->pos;
    s->saved_high = s->high;
    if (s->has_saved) AFF_TRY(s->mem->copy(s->mem, s->saved, s->region, s->rings_size, err));
    if (s->high < s->pos + n) s->high = s->pos + n;
    return AFF_OK;
}

void aff__seq_undo(aff_seq *s)
{
    s->pos = s->saved_pos;
    if (!s->has_saved) return; /* what was written stays in the rings, and `high` says so */
    s->mem->copy(s->mem, s->region, s->saved, s->rings_size,
                 NULL); /* on a device that failed, nothing is left to put back */
    s->high = s->saved_high;
}

int64_t aff__seq_pos(const aff_seq *s)
{
    return s->pos;
}
int64_t aff__seq_capacity(const aff_seq *s)
{
    return s->capacity;
}
int64_t aff__seq_backed(const aff_seq *s)
{
    return s->backed;
}

uint64_t aff__seq_committed(const aff_seq *s)
{
    uint64_t n = s->fixed_size;
    for (int i = 0; i < s->n_spans; i++) n += span_bytes(s, &s->span[i], s->backed);
    return n;
}

int64_t aff__seq_low(const aff_seq *s)
{
    const int64_t low = s->high > AFF_MAX_ROLLBACK ? s->high - AFF_MAX_ROLLBACK : 0;
    return low > s->floor ? low : s->floor;
}

aff_status aff__seq_rollback(aff_seq *s, int64_t keep, aff_error *err)
{
    if (keep < aff__seq_low(s) || keep > s->pos)
        return aff__fail(err, AFF_E_LIMIT, "rollback from %lld to %lld positions: expected %lld to %lld",
                         (long long)s->pos, (long long)keep, (long long)aff__seq_low(s), (long long)s->pos);
    s->pos = keep;
    return AFF_OK;
}
