/* Experts of which the card holds a part: the slab, the table of addresses that plans read, and the card's side of the tiers
 * (experts/tiers.h, aff_card; docs/placement.md).
 *
 * The slab is a reserved range whose front is committed in chunks; slot s lies at s * pitch, wherever chunks end. It shrinks from its end. The table
 * changes in stream order only: a copy of the changed words is queued in front of the pass that is to see them. */
#include "backend/gpu/gpu_internal.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256 }; /* kernels may read whole vectors past the end of the last slot */

static void warn(const aff_gpu_slab *s, const char *line)
{
    if (s->o.warn) s->o.warn(s->o.warn_ctx, line);
}

static int64_t slots_in(const aff_gpu_slab *s, uint64_t bytes)
{
    return bytes < GUARD ? 0 : (int64_t)((bytes - GUARD) / s->o.pitch);
}

/* ---- the card's side of the tiers ---- */

static aff_status attach(void *ctx, uint8_t *base, uint64_t bytes, uint64_t pitch, aff_error *err)
{
    aff_gpu *g = ctx;
    aff_gpu_slab *s = g->slab;
    aff_error e;
    char line[sizeof e.msg + 256];
    s->attached = true;
    s->pinned = bytes == 0 || aff__rt_host_register(g->rt, base, bytes, &e) == AFF_OK;
    if (s->pinned) return AFF_OK;
    snprintf(line, sizeof line,
             "the pool of experts cannot be pinned (%s): the card cannot read it; experts there are copied by the processor and then by the driver, which is several times slower "
             "(raise the limit of locked memory: ulimit -l)",
             e.msg);
    warn(s, line);
    return AFF_OK;
}

static void detach(void *ctx, uint8_t *base, uint64_t bytes)
{
    aff_gpu *g = ctx;
    aff__gpu_fetch_drain(g);
    if (g->slab->attached && g->slab->pinned && bytes) aff__rt_host_unregister(g->rt, base);
    g->slab->attached = false;
}

static aff_status copy(void *ctx, const aff_tier_copy *c, int n, aff_error *err)
{
    aff_gpu *g = ctx;
    aff_gpu_slab *s = g->slab;
    for (int i = 0; i < n; i++) {
        char *slot = s->range + (uint64_t)c[i].slab * s->o.pitch;
        if (c[i].slab < 0 || c[i].slab >= s->slots)
            return aff__fail(err, AFF_E_INVALID, "copy of an expert: slab slot %lld of %lld", (long long)c[i].slab, (long long)s->slots);
        AFF_TRY(aff__rt_copy(g->rt, s->moves, c[i].up ? (void *)slot : c[i].host, c[i].up ? (const void *)c[i].host : slot, s->o.bytes, err));
    }
    return aff__rt_sync(g->rt, s->moves, err);
}

static uint64_t word_of(const aff_gpu_slab *s, const aff_tier_place *p)
{
    if (p->tier == AFF_TIER_CARD) return (uint64_t)(uintptr_t)(s->range + (uint64_t)p->slab * s->o.pitch) | AFF_BASE_CARD;
    if (p->tier == AFF_TIER_HOST && p->host && s->pinned) return (uint64_t)(uintptr_t)p->host | AFF_BASE_HOST;
    return 0;
}

static aff_status publish(void *ctx, const aff_tier_change *c, int n, aff_error *err)
{
    aff_gpu *g = ctx;
    if (n) aff__gpu_fetch_drain(g); /* a pool slot that is left may be filled anew */
    aff_gpu_slab *s = g->slab;
    const int64_t all = (int64_t)s->o.layers * s->o.experts;
    int64_t lo = all, hi = 0;
    for (int i = 0; i < n; i++) {
        const int64_t at = (int64_t)c[i].layer * s->o.experts + c[i].expert;
        const uint64_t word = word_of(s, &c[i].place);
        const int left = (int)(s->mirror[at] & AFF_BASE_CARD) - (int)(word & AFF_BASE_CARD);
        s->elsewhere[c[i].layer] += left;
        s->away += left;
        s->mirror[at] = word;
        lo = at < lo ? at : lo;
        hi = at + 1 > hi ? at + 1 : hi;
    }
    g->base.repeat_rows = s->away ? s->few_rows : AFF_MAX_CHUNK;
    return lo < hi ? g->mem.write(&g->mem, s->table + lo, s->mirror + lo, (uint64_t)(hi - lo) * sizeof *s->table, err) : AFF_OK;
}

/* ---- size ---- */

static aff_status grow(aff_gpu *g, uint64_t bytes, aff_error *err)
{
    aff_gpu_slab *s = g->slab;
    while (s->committed < bytes) {
        const uint64_t step = bytes - s->committed < s->chunk ? bytes - s->committed : s->chunk;
        AFF_TRY(aff__rt_commit(g->rt, s->range + s->committed, step, "slab of experts", err));
        s->committed += step;
    }
    s->slots = slots_in(s, s->committed);
    return AFF_OK;
}

/* `bytes` less, in whole chunks. Queued work is waited for: it may still read what leaves. */
static void shrink(aff_gpu *g, uint64_t bytes)
{
    aff_gpu_slab *s = g->slab;
    const uint64_t left = s->committed > bytes ? (s->committed - bytes) / s->chunk * s->chunk : 0;
    const int64_t slots = slots_in(s, left);
    aff_error err;
    if (s->host.resize(s->host.ctx, slots, &err) != AFF_OK || aff__rt_sync(g->rt, g->s, &err) != AFF_OK || aff__rt_sync(g->rt, s->moves, &err) != AFF_OK) {
        warn(s, err.msg);
        return;
    }
    s->slots = slots;
    aff__rt_decommit(g->rt, s->range + left, s->committed - left);
    s->committed = left;
}

void aff__gpu_make_room(aff_gpu *g, uint64_t bytes)
{
    const aff_gpu_slab *s = g->slab;
    uint64_t there;
    if (!s || !s->hosted || !s->host.resize || !pthread_equal(g->owner, pthread_self())) return; /* another thread's, beside a pass: there is room or there is not */
    if (aff__rt_free_memory(g->rt, &there, NULL) != AFF_OK) return;
    const uint64_t need = aff__align_up(bytes, g->mem.page) + s->keep;
    if (there < need && s->committed) shrink(g, need - there);
}

bool aff__gpu_may_take(aff_gpu *g, uint64_t bytes, uint64_t old)
{
    const aff_gpu_slab *s = g->slab;
    uint64_t there;
    if (!s || !s->hosted || !s->host.resize || !s->committed || aff__rt_free_memory(g->rt, &there, NULL) != AFF_OK) return true;
    return there + old >= bytes + s->keep;
}

/* Bytes that the slab may take of those that are free, in whole pages. */
static aff_status budget(aff_gpu *g, uint64_t need, uint64_t *out, aff_error *err)
{
    const aff_gpu_slab *s = g->slab;
    const uint64_t page = g->mem.page;
    uint64_t free_bytes;
    AFF_TRY(aff__rt_free_memory(g->rt, &free_bytes, err));
    uint64_t take = free_bytes > s->keep ? free_bytes - s->keep : 0;
    if (take > s->o.most) take = s->o.most;
    take = take / page * page;
    *out = take < need ? take : need;
    return AFF_OK;
}

static aff_status open_slab(aff_gpu *g, aff_error *err)
{
    aff_gpu_slab *s = g->slab;
    const uint64_t page = g->mem.page, words = (uint64_t)s->o.layers * (uint64_t)s->o.experts;
    const int picks = AFF_K_FEW * s->o.picks;
    uint64_t take;
    s->keep = s->o.keep == UINT64_MAX ? aff__rt_info(g->rt)->memory / 125 : s->o.keep;
    s->log_row = picks > s->o.experts ? picks : s->o.experts;
    AFF_TRY(aff__rt_stream_create(g->rt, &s->moves, err));
    AFF_TRY(aff__calloc(&s->mirror, words, sizeof *s->mirror, "expert table", err));
    AFF_TRY(aff__calloc(&s->elsewhere, (uint64_t)s->o.layers, sizeof *s->elsewhere, "expert table", err));
    for (int l = 0; l < s->o.layers; l++) s->elsewhere[l] = s->o.experts;
    s->away = (int64_t)words;
    s->few_rows = AFF_K_FEW;
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&s->table, words * sizeof *s->table, "expert table", err));
    AFF_TRY(g->mem.write(&g->mem, s->table, s->mirror, words * sizeof *s->table, err));
    AFF_TRY(aff__rt_host_alloc(g->rt, (void **)&s->log, (uint64_t)AFF_G_COUNTS * (uint64_t)s->log_row * sizeof *s->log, "log of picks", err));
    AFF_TRY(aff__gpu_groups_open(g, err));
    const uint64_t full = aff__align_up(words * s->o.pitch + GUARD, page);
    AFF_TRY(budget(g, full, &take, err));
    s->chunk = aff__align_up(aff__rt_info(g->rt)->memory / 512 + 1, page);
    s->range_bytes = full;
    if (take < full) { /* a part of them: then there are moves */
        if (s->o.scratch > 0) AFF_TRY(aff__gpu_fetch_open(g, err));
        s->range_bytes = aff__align_up((words + (uint64_t)s->o.spare) * s->o.pitch + GUARD, page);
        AFF_TRY(budget(g, s->range_bytes, &take, err));
    }
    AFF_TRY(aff__rt_reserve(g->rt, (void **)&s->range, s->range_bytes, "slab of experts", err));
    return grow(g, take, err);
}

static aff_status slab(aff_backend *b, const aff_slab_options *o, aff_card *card, aff_expert_table *table, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    if (g->slab) return aff__fail(err, AFF_E_INVALID, "slab of experts: there is one already");
    AFF_TRY(aff__calloc(&g->slab, 1, sizeof *g->slab, "slab of experts", err));
    g->slab->o = *o;
    const aff_status s = open_slab(g, err);
    if (s != AFF_OK) {
        aff__gpu_slab_free(g);
        return s;
    }
    *card = (aff_card){.ctx = g, .slots = g->slab->slots, .attach = attach, .detach = detach, .copy = copy, .publish = publish};
    *table = (aff_expert_table){.base = g->slab->table, .layers = o->layers, .experts = o->experts};
    memcpy(table->plane, o->plane, sizeof table->plane);
    return AFF_OK;
}

static aff_status slab_host(aff_backend *b, const aff_slab_host *h, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    aff_gpu_slab *s = g->slab;
    aff__gpu_stage_free(g);
    g->owner = pthread_self();
    s->hosted = h != NULL;
    if (!h) return AFF_OK;
    s->host = *h;
    int64_t staging = h->staging_slots;
    if (s->attached && !s->pinned && staging < 2 * s->o.picks) staging = 2 * s->o.picks; /* the whole pool is as far as the disk */
    if (!staging) return AFF_OK;
    const int64_t rows = staging / s->o.picks;
    if (!rows)
        return aff__fail(err, AFF_E_INVALID, "experts on disk: %lld staging slots, expected at least the %d that a row picks", (long long)staging, s->o.picks);
    s->few_rows = rows < AFF_K_FEW ? (int)rows : AFF_K_FEW;
    if (s->away) b->repeat_rows = s->few_rows;
    return aff__gpu_stage_open(g, staging, err);
}

void aff__gpu_slab_free(aff_gpu *g)
{
    aff_gpu_slab *s = g->slab;
    if (!s) return;
    aff__gpu_stage_free(g);
    aff__gpu_groups_free(g);
    aff__gpu_fetch_free(g);
    if (s->moves) aff__rt_sync(g->rt, s->moves, NULL);
    if (s->range) {
        aff__rt_decommit(g->rt, s->range, s->committed);
        aff__rt_unreserve(g->rt, s->range, s->range_bytes);
    }
    aff__rt_free(g->rt, s->table);
    aff__rt_host_free(g->rt, s->log);
    if (s->moves) aff__rt_stream_free(g->rt, s->moves);
    free(s->mirror);
    free(s->elsewhere);
    free(s);
    g->slab = NULL;
}

/* ---- a pass ---- */

int aff__gpu_slab_layer(const aff_gpu *g, const aff_expert_table *e, int layer)
{
    const aff_gpu_slab *s = g->slab;
    if (!s || e->base < s->table || e->base >= s->table + (int64_t)s->o.layers * s->o.experts) return -1;
    return (int)((e->base - s->table) / s->o.experts) + layer;
}

int32_t *aff__gpu_slab_log(const aff_gpu *g, int i)
{
    return g->slab && i < AFF_G_COUNTS ? g->slab->log + (int64_t)i * g->slab->log_row : NULL;
}

void aff__gpu_slab_finish(aff_gpu *g)
{
    if (!g->slab) return;
    aff__gpu_fetch_recall(g);
    for (int i = 0; i < g->moes; i++) {
        const aff_gpu_moe *m = &g->moe[i];
        const int32_t *n = g->host_counts + AFF_K_PLAN_COUNTS * i;
        if (!m->few) continue;
        if (n[AFF_K_TAKEN]) aff__gpu_fetch_used(g, n[AFF_K_TAKEN]);
        g->slab->count.link_items += n[AFF_K_LINKED];
        g->slab->count.link_bytes += (uint64_t)n[AFF_K_READS] * g->slab->o.bytes;
    }
}

static void counted(aff_backend *b, aff_tier_counters *out)
{
    aff_gpu *g = aff__gpu_of(b);
    if (!g->slab) return;
    aff_tier_counters *c = &g->slab->count;
    out->link_items += c->link_items;
    out->link_bytes += c->link_bytes;
    out->stream_bytes += c->stream_bytes;
    out->staged += c->staged;
    out->prefetch_asked += c->prefetch_asked;
    out->prefetch_used += c->prefetch_used;
    out->prefetch_wasted += c->prefetch_wasted;
    out->prefetch_cancelled += c->prefetch_cancelled;
    out->prefetch_bytes += c->prefetch_bytes;
    out->guess_picks += c->guess_picks;
    out->guess_right += c->guess_right;
    *c = (aff_tier_counters){0};
}

static bool used(aff_backend *b, int i, aff_experts_used *out)
{
    const aff_gpu *g = aff__gpu_of(b);
    if (!g->slab || i >= g->used_moes) return false;
    const aff_gpu_moe *m = &g->moe[i];
    const int32_t *log = aff__gpu_slab_log(g, i);
    *out = (aff_experts_used){m->layer, m->T, m->K, m->T <= AFF_K_FEW ? log : NULL, m->T > AFF_K_FEW ? log : NULL};
    return true;
}

void aff__gpu_slab_ops(aff_backend *b)
{
    b->slab = slab;
    b->slab_host = slab_host;
    b->used = used;
    b->counted = counted;
    b->repeat_rows = AFF_MAX_CHUNK;
}
