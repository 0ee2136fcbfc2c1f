/* A sequence's arrays lie one after another in a single reserved range of address space. Rings are backed at once; the
 * arrays that grow with the context are backed page by page from their front, ahead of the position, by lifting the
 * protection of the reserved pages and populating them, so that what the plan says is resident and a refusal comes
 * here, as an error, and not later as a signal. Reset only moves the position back (and gives grown memory away): no
 * row is read before it has been written in the new sequence (rings are read at positions >= 0 only, groups only when
 * complete). */
#define _GNU_SOURCE
#include "state/seq_internal.h"
#include "base/mem.h"
#include "base/pages.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE = 4096 };

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
    bool overflow;
} carve;

static void *take(carve *c, int64_t rows, uint64_t row_bytes)
{
    uint64_t bytes, end;
    if (!aff__mul_ok((uint64_t)rows, row_bytes, &bytes) || bytes > UINT64_MAX / 4 ||
        !aff__add_ok(c->used, aff__align_up(bytes, PAGE), &end)) {
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
    for (int l = 0; l < s->n_layers; l++) carve_raw(c, s, &s->layer[l], cf);
    p.raw = c->used;
    for (int l = 0; l < s->n_layers; l++) carve_history(c, &s->layer[l], cf, cf->ratio[l]);
    p.history = c->used - p.raw;
    for (int i = 0; i < s->n_stages; i++) carve_raw(c, s, &s->stage[i], cf);
    p.draft = c->used - p.raw - p.history;
    p.copy = s->rings_size = c->used;
    s->saved = take(c, 1, s->rings_size);
    s->fixed_size = c->used;
    s->n_spans = 0;
    for (int l = 0; l < s->n_layers; l++) {
        if (!cf->ratio[l]) continue;
        s->layer[l].comp = carve_span(c, s, cf->ratio[l], &s->row, false);
        if (cf->ratio[l] == 4) s->layer[l].ikey = carve_span(c, s, 4, &s->key, true);
    }
    if (plan) *plan = p;
}

static uint64_t span_bytes(const aff_span *sp, int64_t positions)
{
    return aff__align_up((uint64_t)(positions / sp->ratio) * sp->row_bytes, PAGE);
}

/* Everything but memory. */
static aff_status describe(aff_seq *s, const aff_net *net, int64_t positions, aff_error *err)
{
    const aff_config *cf = aff__net_config(net);
    if (positions < 1 || positions > cf->max_positions)
        return aff__fail(err, AFF_E_LIMIT, "context of %lld positions: expected 1 to max_position_embeddings %lld",
                         (long long)positions, (long long)cf->max_positions);
    s->net = net;
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
    aff_status st = describe(s, net, positions ? positions : 1, err);
    if (st == AFF_OK) {
        carve c = {0};
        carve_all(&c, s, aff__net_config(net), out);
        out->positions = positions;
        out->row_bytes = (uint64_t)s->row.bytes;
        out->key_bytes = (uint64_t)s->key.bytes;
        for (int i = 0; i < s->n_spans; i++) {
            *(s->span[i].key ? &out->keys : &out->rows) += span_bytes(&s->span[i], positions);
            out->per_position += (double)s->span[i].row_bytes / s->span[i].ratio;
        }
        out->total = s->fixed_size + out->rows + out->keys;
    }
    free(s);
    return st;
}

uint64_t aff__seq_handle_bytes(void) { return aff__align_up(sizeof(aff_seq), 64); }

/* ---- memory ---- */

static bool populate(char *p, uint64_t bytes)
{
    if (!bytes || madvise(p, (size_t)bytes, MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false; /* EINVAL: a kernel before 5.14 */
    for (uint64_t i = 0; i < bytes; i += PAGE) ((volatile char *)p)[i] = 0;
    return true;
}

static bool back(char *p, uint64_t bytes)
{
    return !bytes || (mprotect(p, (size_t)bytes, PROT_READ | PROT_WRITE) == 0 && populate(p, bytes));
}

/* Mapping anew gives the pages back and drops their charge. */
static void unback(char *p, uint64_t bytes)
{
    if (!bytes || mmap(p, (size_t)bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) return;
    aff__pages_prepare(p, bytes);
}

/* From the backed positions to `positions`, more or fewer. On failure nothing has changed. */
static bool set_backed(aff_seq *s, int64_t positions)
{
    bool ok = true;
    int i = 0;
    for (; ok && i < s->n_spans; i++) {
        const uint64_t have = span_bytes(&s->span[i], s->backed), want = span_bytes(&s->span[i], positions);
        char *p = (char *)s->region + s->span[i].off;
        if (want > have)
            ok = back(p + have, want - have);
        else
            unback(p + want, have - want);
    }
    if (ok) {
        s->backed = positions;
        return true;
    }
    while (i--) {
        const uint64_t have = span_bytes(&s->span[i], s->backed), want = span_bytes(&s->span[i], positions);
        if (want > have) unback((char *)s->region + s->span[i].off + have, want - have);
    }
    return false;
}

aff_status aff__seq_grow(aff_seq *s, int64_t positions, aff_error *err)
{
    if (positions <= s->backed) return AFF_OK;
    if (positions > s->capacity)
        return aff__fail(err, AFF_E_LIMIT, "context full: %lld positions, room for %lld", (long long)positions,
                         (long long)s->capacity);
    int64_t want = (positions + s->margin) / s->margin; /* whole steps, one ahead of what is needed now */
    want = want > s->capacity / s->margin ? s->capacity : want * s->margin;
    if (want < positions) want = positions;
    if (set_backed(s, want) || set_backed(s, positions)) return AFF_OK;
    return aff__fail(
        err, AFF_E_NOMEM,
        "context: the system refuses memory for positions %lld to %lld (%s): free memory, or end the sequence here",
        (long long)s->backed, (long long)positions, strerror(errno));
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

static aff_status reserve(aff_seq *s, const aff_config *cf, aff_error *err)
{
    carve c = {0};
    carve_all(&c, s, cf, NULL);
    void *p = c.overflow ? MAP_FAILED
                         : mmap(NULL, (size_t)c.used, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return aff__fail(err, AFF_E_NOMEM, "context of %lld positions: cannot reserve %llu bytes of address space",
                         (long long)s->capacity, (unsigned long long)c.used);
    aff__pages_prepare(p, c.used); /* before anything is backed; a huge page never reaches beyond what is */
    s->region = p;
    s->region_size = c.used;
    c = (carve){.base = p};
    carve_all(&c, s, cf, NULL);
    if (!back(s->region, s->fixed_size) || !set_backed(s, s->commit))
        return aff__fail(err, AFF_E_NOMEM,
                         "context: the system refuses %llu bytes for the rings and the first %lld positions",
                         (unsigned long long)s->fixed_size, (long long)s->commit);
    return AFF_OK;
}

aff_status aff__seq_open(aff_seq **out, const aff_net *net, const aff_seq_options *o, aff_error *err)
{
    const aff_config *cf = aff__net_config(net);
    aff_seq_options use;
    aff_seq *s;
    *out = NULL;
    AFF_TRY(check_options(o, cf, &use, err));
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "sequence", err));
    aff_status st = describe(s, net, use.size, err);
    s->commit = use.commit;
    s->margin = use.margin;
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
    if (s->region) munmap(s->region, (size_t)s->region_size);
    free(s);
}

void aff__seq_reset(aff_seq *s)
{
    s->pos = s->high = s->floor = 0;
    if (s->backed > s->commit) set_backed(s, s->commit);
}

void aff__seq_begin(aff_seq *s, int n)
{
    s->has_saved = n > AFF_MAX_ROLLBACK;
    s->saved_pos = s->pos;
    s->saved_high = s->high;
    if (s->has_saved) memcpy(s->saved, s->region, (size_t)s->rings_size);
    if (s->high < s->pos + n) s->high = s->pos + n;
}

void aff__seq_undo(aff_seq *s)
{
    s->pos = s->saved_pos;
    if (!s->has_saved) return; /* what was written stays in the rings, and `high` says so */
    memcpy(s->region, s->saved, (size_t)s->rings_size);
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
    for (int i = 0; i < s->n_spans; i++) n += span_bytes(&s->span[i], s->backed);
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
