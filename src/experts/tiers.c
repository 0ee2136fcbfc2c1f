#include "experts/tiers_internal.h"
#include "base/mem.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPARE = 8 };

aff_status aff__tiers_split(int64_t slots, int64_t staging, int64_t total, int picks, uint64_t pitch, aff_tier_split *out, aff_error *err)
{
    if (slots < picks || staging > slots || (staging && staging < picks)) {
        const uint64_t least = ((uint64_t)picks * pitch + (1 << 20) - 1) >> 20;
        return aff__fail(err, AFF_E_INVALID,
                         "memory for experts: room for %" PRId64 ", %" PRId64 " of them staging: a token of this model uses %d in a layer: expected --host-pool-mib %" PRIu64
                         " or more (0: as few as that, and no pool)",
                         slots, staging, picks, least);
    }
    if (!staging) {
        staging = slots / 8;
        if (staging < 2 * picks && slots >= 4 * picks) staging = 2 * picks;
        if (staging < picks) staging = picks;
        if (staging > AFF_MOST_STAGING && picks <= AFF_MOST_STAGING) staging = AFF_MOST_STAGING;
    }
    *out = (aff_tier_split){slots - staging < total ? slots - staging : total, staging};
    return AFF_OK;
}

/* ---- made ---- */

static aff_status make_table(aff_tiers *t, aff_error *err)
{
    static const char what[] = "table of the experts";
    const uint64_t n = (uint64_t)t->total, slots = (uint64_t)aff__slots_count(t->pool);
    AFF_TRY(aff__calloc(&t->slot, n, sizeof *t->slot, what, err));
    AFF_TRY(aff__calloc(&t->staged, n, sizeof *t->staged, what, err));
    AFF_TRY(aff__calloc(&t->slab, n, sizeof *t->slab, what, err));
    AFF_TRY(aff__calloc(&t->entry, slots, sizeof *t->entry, what, err));
    AFF_TRY(aff__calloc(&t->load, (uint64_t)t->split.staging, sizeof *t->load, what, err));
    for (uint64_t i = 0; i < n; i++) {
        t->slot[i] = t->staged[i] = -1;
        t->slab[i] = -1;
    }
    /* The first slots are staging, then the pool; lists are taken from the front, so all go in from behind. */
    for (int64_t s = (int64_t)slots - 1; s >= 0; s--) {
        if (s < t->split.staging && !t->has_card)
            aff__tiers_idle_slot(t, (int32_t)s);
        else if (s >= t->split.staging && s < t->split.staging + t->split.pool)
            aff__tiers_free_slot(t, (int32_t)s);
        else
            t->entry[s] = (aff_slot_entry){.state = AFF_SLOT_CARD, .expert = -1, .load = -1};
    }
    for (int64_t i = t->split.staging - 1; i >= 0; i--) {
        t->load[i].next = t->free_load;
        t->free_load = (int32_t)i;
    }
    if (!t->has_card) return AFF_OK;
    AFF_TRY(aff__calloc(&t->free_slab, (uint64_t)t->card.slots, sizeof *t->free_slab, what, err));
    for (int64_t i = t->card.slots - 1; i >= 0; i--) t->free_slab[t->free_slabs++] = i;
    t->slab_slots = t->card.slots;
    return AFF_OK;
}

static aff_status make_pool(aff_tiers *t, const aff_tier_options *o, aff_error *err)
{
    for (int i = 0; i < 2; i++)
        if (t->store[i]) {
            t->layout[i] = aff__experts_layout(t->store[i]);
            if (t->layout[i].pitch > t->pitch) t->pitch = t->layout[i].pitch;
        }
    AFF_TRY(aff__tiers_split(o->slots, o->staging, t->total, o->picks, t->pitch, &t->split, err));
    if (t->split.pool > INT32_MAX / 2 || t->total > INT32_MAX / 2) return aff__fail(err, AFF_E_LIMIT, "memory for experts: too many slots");
    t->bounces = t->has_card && !t->split.pool ? 1 : 0;
    AFF_TRY(aff__slots_create(&t->pool, t->pitch, t->split.pool + t->split.staging + t->bounces, t->has_card, err));
    if (t->has_card && t->card.attach) AFF_TRY(t->card.attach(t->card.ctx, aff__slots_base(t->pool), aff__slots_bytes(t->pool), t->pitch, err));
    t->attached = t->has_card;
    AFF_TRY(aff__loader_create(&t->loader, t->store[0], t->store[1], &o->loader, err));
    return make_table(t, err);
}

static aff_status make_placement(aff_tiers *t, const aff_tier_options *o, aff_error *err)
{
    const bool all = t->mapped || t->split.pool >= t->total;
    const aff_placement_shape shape = {.layers = t->layers,
                                       .experts = t->experts,
                                       .slab_slots = t->has_card ? t->card.slots : 0,
                                       .pool_slots = t->mapped ? t->total : t->split.pool,
                                       .pool_spare = all ? 0 : SPARE,
                                       .inclusive = t->inclusive};
    AFF_TRY(aff__placement_create(&t->place, &shape, &o->placement, err));
    if (!all && aff__placement_options_now(t->place).strategy != AFF_PLACE_STATIC) t->pool_spare = SPARE < t->split.pool / 8 ? SPARE : t->split.pool / 8;
    return AFF_OK;
}

/* ---- first places ---- */

enum { WINDOW = 16 };

/* The next expert from *i on that begins in `tier`; -1: none. */
static int64_t next_in(const aff_tiers *t, int64_t i, aff_tier tier)
{
    for (; i < t->total; i++)
        if (aff__placement_tier(t->place, (int)(i / t->experts), (int)(i % t->experts)) == tier) return i;
    return -1;
}

static bool tell(const aff_tier_options *o, int64_t done, int64_t total)
{
    return !o->progress || o->progress(o->progress_ctx, done, total);
}

/* Reads the experts of a tier, each into the slot that `slot_of` says, some at a time; `full` is called when none is free (and at the end). */
typedef struct filling {
    aff_tiers *t;
    const aff_tier_options *o;
    aff_load load[WINDOW];
    int64_t expert[WINDOW], done, total;
} filling;

static aff_status wait_for(filling *f, int k, aff_error *err)
{
    if (f->expert[k] < 0) return AFF_OK;
    f->expert[k] = -1;
    AFF_TRY(aff__loader_wait(f->t->loader, &f->load[k], err));
    return tell(f->o, ++f->done, f->total) ? AFF_OK : aff__fail(err, AFF_E_CANCELLED, "experts: stopped while they were read");
}

static void submit(filling *f, int k, int64_t i, int32_t slot)
{
    aff_tiers *t = f->t;
    f->expert[k] = i;
    f->load[k] = (aff_load){.layer = (int)(i / t->experts), .expert = (int)(i % t->experts), .to = aff__slots_at(t->pool, slot)};
    aff__loader_submit(t->loader, &f->load[k], AFF_LOAD_LATER);
}

/* Into pool slots, WINDOW reads at a time; those of an inclusive slab too. */
static aff_status fill_pool(filling *f, aff_tier tier, aff_error *err)
{
    aff_tiers *t = f->t;
    int k = 0;
    aff_status s = AFF_OK;
    for (int64_t i = next_in(t, 0, tier); i >= 0 && s == AFF_OK; i = next_in(t, i + 1, tier), k = (k + 1) % WINDOW) {
        s = wait_for(f, k, err);
        const int32_t slot = s == AFF_OK ? aff__tiers_take_free(t) : -1;
        if (s == AFF_OK && slot < 0) s = aff__fail(err, AFF_E_LIMIT, "experts: more of them in a tier than it has slots");
        if (slot < 0) break;
        t->entry[slot].state = AFF_SLOT_POOL;
        t->entry[slot].expert = (int32_t)i;
        t->slot[i] = slot;
        submit(f, k, i, slot);
    }
    for (int n = 0; n < WINDOW; n++) { /* all of them, whatever happened */
        const aff_status e = wait_for(f, n, s == AFF_OK ? err : NULL);
        if (s == AFF_OK) s = e;
    }
    return s;
}

/* Slots of the slab, from pool slots or by way of staging. */
static aff_status fill_slab(filling *f, aff_error *err)
{
    aff_tiers *t = f->t;
    const int room = t->inclusive ? WINDOW : t->split.staging < WINDOW ? (int)t->split.staging : WINDOW;
    aff_status s = AFF_OK;
    for (int64_t i = next_in(t, 0, AFF_TIER_CARD); i >= 0 && s == AFF_OK;) {
        aff_tier_copy c[WINDOW];
        int n = 0;
        for (; i >= 0 && n < room; i = next_in(t, i + 1, AFF_TIER_CARD), n++) {
            t->slab[i] = t->free_slab[--t->free_slabs];
            c[n] = (aff_tier_copy){true, t->slab[i], aff__slots_at(t->pool, t->inclusive ? t->slot[i] : n)};
            if (!t->inclusive) submit(f, n, i, n);
        }
        for (int k = 0; k < n && !t->inclusive; k++) {
            const aff_status e = wait_for(f, k, s == AFF_OK ? err : NULL);
            if (s == AFF_OK) s = e;
        }
        if (s == AFF_OK) s = t->card.copy(t->card.ctx, c, n, err);
        t->n.up_copies += (uint64_t)n;
        t->n.up_bytes += (uint64_t)n * t->layout[0].bytes;
    }
    return s;
}

static aff_status publish_all(aff_tiers *t, aff_error *err)
{
    aff_tier_change *c;
    AFF_TRY(aff__calloc(&c, (uint64_t)t->total, sizeof *c, "table of the experts", err));
    for (int64_t i = 0; i < t->total; i++)
        c[i] = (aff_tier_change){(int)(i / t->experts), (int)(i % t->experts), aff__tiers_place(t, (int)(i / t->experts), (int)(i % t->experts))};
    const aff_status s = t->card.publish(t->card.ctx, c, (int)t->total, err);
    free(c);
    return s;
}

static aff_status fill(aff_tiers *t, const aff_tier_options *o, aff_error *err)
{
    filling *f;
    AFF_TRY(aff__placement_fill(t->place, o->profile, err));
    if (t->mapped) return AFF_OK;
    AFF_TRY(aff__calloc(&f, 1, sizeof *f, "reading the experts", err));
    f->t = t;
    f->o = o;
    for (int k = 0; k < WINDOW; k++) f->expert[k] = -1;
    for (int64_t i = 0; i < t->total; i++) f->total += aff__placement_tier(t->place, (int)(i / t->experts), (int)(i % t->experts)) != AFF_TIER_DISK;
    aff_status s = AFF_OK;
    if (t->inclusive) s = fill_pool(f, AFF_TIER_CARD, err);
    if (s == AFF_OK) s = fill_pool(f, AFF_TIER_HOST, err);
    if (s == AFF_OK && t->has_card) s = fill_slab(f, err);
    free(f);
    return s == AFF_OK && t->has_card ? publish_all(t, err) : s;
}

/* ---- */

static aff_status create(aff_tiers *t, const aff_tier_options *o, aff_error *err)
{
    if (t->mapped && (!aff__experts_in_place(t->store[0]) || (t->store[1] && !aff__experts_in_place(t->store[1]))))
        return aff__fail(err, AFF_E_INVALID, "experts: row-major ones (dtype 33) cannot be used in the file's mapping");
    if (t->mapped && t->has_card) return aff__fail(err, AFF_E_INVALID, "experts: a card needs a pool, if one without slots");
    AFF_TRY(aff__calloc(&t->note_id, (uint64_t)t->experts, sizeof *t->note_id, "use of a layer's experts", err));
    AFF_TRY(aff__calloc(&t->note_count, (uint64_t)t->experts, sizeof *t->note_count, "use of a layer's experts", err));
    if (!t->mapped) AFF_TRY(make_pool(t, o, err));
    AFF_TRY(make_placement(t, o, err));
    if (t->mapped || t->has_card || o->fill) AFF_TRY(fill(t, o, err));
    return t->mapped ? AFF_OK : aff__tiers_mover_start(t, err);
}

aff_status aff__tiers_create(aff_tiers **out, aff_experts *trunk, aff_experts *draft, const aff_tier_options *o, aff_error *err)
{
    aff_tiers *t;
    *out = NULL;
    AFF_TRY(aff__calloc(&t, 1, sizeof *t, "expert tiers", err));
    t->store[0] = trunk;
    t->store[1] = draft;
    t->trunk_layers = aff__experts_layers(trunk);
    t->layers = t->trunk_layers + (draft ? aff__experts_layers(draft) : 0);
    t->experts = aff__experts_per_layer(trunk);
    t->total = (int64_t)t->layers * t->experts;
    t->mapped = o->mapped;
    t->inclusive = o->inclusive && o->card;
    t->has_card = o->card != NULL;
    if (o->card) t->card = *o->card;
    t->loader_options = o->loader;
    t->free_slot = t->idle_slot = t->newest = t->oldest = t->free_load = -1;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    pthread_cond_init(&t->work, NULL);
    const aff_status s = create(t, o, err);
    if (s != AFF_OK) {
        aff__tiers_free(t);
        return s;
    }
    *out = t;
    return AFF_OK;
}

void aff__tiers_free(aff_tiers *t)
{
    if (!t) return;
    aff__tiers_mover_stop(t);
    aff__loader_free(t->loader);
    if (t->attached && t->card.detach) t->card.detach(t->card.ctx, aff__slots_base(t->pool), aff__slots_bytes(t->pool));
    aff__slots_free(t->pool);
    aff__placement_free(t->place);
    void *const all[] = {t->slot, t->staged, t->slab, t->entry, t->load, t->free_slab, t->job, t->change, t->note_id, t->note_count};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->changed);
    pthread_cond_destroy(&t->work);
    free(t);
}

/* ---- what is ---- */

int aff__tiers_layers(const aff_tiers *t)
{
    return t->layers;
}
int aff__tiers_experts(const aff_tiers *t)
{
    return t->experts;
}
bool aff__tiers_mapped(const aff_tiers *t)
{
    return t->mapped;
}
aff_slot_layout aff__tiers_layout(const aff_tiers *t)
{
    return t->layout[0];
}
aff_slots *aff__tiers_pool(const aff_tiers *t)
{
    return t->pool;
}
aff_loader *aff__tiers_loader(const aff_tiers *t)
{
    return t->loader;
}
int64_t aff__tiers_staging(const aff_tiers *t)
{
    return t->split.staging;
}

aff_tier_place aff__tiers_place(aff_tiers *t, int layer, int e)
{
    aff_tier_place p = {.tier = AFF_TIER_HOST, .slab = -1, .pool = -1};
    if (t->mapped) return p;
    pthread_mutex_lock(&t->lock);
    const int64_t i = aff__tier_index(t, layer, e);
    p = (aff_tier_place){aff__placement_tier(t->place, layer, e), t->slab[i], t->slot[i], t->slot[i] < 0 ? NULL : aff__slots_at(t->pool, t->slot[i])};
    pthread_mutex_unlock(&t->lock);
    return p;
}

aff_tier aff__tiers_tier(aff_tiers *t, int layer, int e)
{
    return aff__tiers_place(t, layer, e).tier;
}

void aff__tiers_pin(aff_tiers *t, int layer, int e, bool pinned)
{
    pthread_mutex_lock(&t->lock);
    aff__placement_pin(t->place, layer, e, pinned);
    pthread_mutex_unlock(&t->lock);
}

bool aff__tiers_at_hand(aff_tiers *t, int layer, int e)
{
    if (t->mapped) return true;
    pthread_mutex_lock(&t->lock);
    const int64_t i = aff__tier_index(t, layer, e);
    const bool there = t->slot[i] >= 0 || (t->staged[i] >= 0 && t->entry[t->staged[i]].state == AFF_SLOT_STAGED);
    pthread_mutex_unlock(&t->lock);
    return there;
}

void aff__tiers_planes(aff_tiers *t, float *heat, uint8_t *tier)
{
    pthread_mutex_lock(&t->lock);
    aff__placement_planes(t->place, heat, tier);
    pthread_mutex_unlock(&t->lock);
}

aff_tier_counters aff__tiers_counters(aff_tiers *t)
{
    aff_loader_counts l = {0};
    if (t->loader) l = aff__loader_counts_now(t->loader);
    pthread_mutex_lock(&t->lock);
    const aff_placement_counts p = aff__placement_counts_now(t->place);
    aff_tier_counters c = t->n;
    pthread_mutex_unlock(&t->lock);
    c.disk_bytes = l.bytes;
    c.disk_requests = l.requests;
    c.disk_failed = l.failed;
    c.disk_retries = l.retries;
    c.disk_busy_ns = l.busy_ns;
    memcpy(c.picks, p.used, sizeof c.picks);
    for (int k = 0; k < 2; k++) {
        c.promotions[k] = p.promotions[k];
        c.demotions[k] = p.demotions[k];
        c.refused[k] = p.refused[k];
        c.starved[k] = p.starved_up[k] + p.starved_down[k];
        c.readmits[k] = p.readmits[k];
        c.failed[k] = p.failed[k];
    }
    c.moves_in_flight = p.in_flight;
    return c;
}

static double percent(int64_t part, int64_t all)
{
    return all ? 100.0 * (double)part / (double)all : 0;
}

void aff__tier_counters_line(const aff_tier_counters *c, char *out, size_t cap)
{
    const int64_t decode = c->picks[0][0] + c->picks[0][1] + c->picks[0][2], prefill = c->picks[1][0] + c->picks[1][1] + c->picks[1][2];
    const double busy = (double)c->disk_busy_ns / 1e9;
    int n = snprintf(out, cap, "experts:");
    if (c->picks[0][0] + c->picks[1][0] && n > 0 && (size_t)n < cap)
        n += snprintf(out + n, cap - (size_t)n, " on the card %.1f %% of %" PRId64 " (decode), %.1f %% of %" PRId64 " (prompt);", percent(c->picks[0][0], decode), decode,
                      percent(c->picks[1][0], prefill), prefill);
    if (n > 0 && (size_t)n < cap)
        n += snprintf(out + n, cap - (size_t)n,
                      " in memory %.1f %% of %" PRId64 " (decode), %.1f %% of %" PRId64 " (prompt); disk %" PRId64 " reads, %.2f GB at %.2f GB/s, waited %.2f s, %" PRId64 " failed, %" PRId64
                      " tried again",
                      percent(c->picks[0][0] + c->picks[0][1], decode), decode, percent(c->picks[1][0] + c->picks[1][1], prefill), prefill, c->disk_requests,
                      (double)c->disk_bytes / 1e9, busy > 0 ? (double)c->disk_bytes / 1e9 / busy : 0, (double)c->wait_disk_ns / 1e9, c->disk_failed, c->disk_retries);
    if (n > 0 && (size_t)n < cap)
        n += snprintf(out + n, cap - (size_t)n, "; moves pool/disk %" PRId64 " up %" PRId64 " down", c->promotions[1], c->demotions[1]);
    if (c->up_bytes && n > 0 && (size_t)n < cap)
        snprintf(out + n, cap - (size_t)n, ", card/pool %" PRId64 " up %" PRId64 " down, %.2f GB and %.2f GB copied; link %.2f GB in kernels", c->promotions[0], c->demotions[0],
                 (double)c->up_bytes / 1e9, (double)c->down_bytes / 1e9, (double)c->link_bytes / 1e9);
}

void aff__tiers_count(aff_tiers *t, const aff_tier_counters *m)
{
    pthread_mutex_lock(&t->lock);
    t->n.link_items += m->link_items;
    t->n.link_bytes += m->link_bytes;
    t->n.prefetch_asked += m->prefetch_asked;
    t->n.prefetch_used += m->prefetch_used;
    t->n.prefetch_wasted += m->prefetch_wasted;
    t->n.prefetch_cancelled += m->prefetch_cancelled;
    t->n.prefetch_bytes += m->prefetch_bytes;
    t->n.guess_picks += m->guess_picks;
    t->n.guess_right += m->guess_right;
    t->n.help_items += m->help_items;
    t->n.stream_bytes += m->stream_bytes;
    t->n.wait_link_ns += m->wait_link_ns;
    t->n.wait_disk_ns += m->wait_disk_ns;
    t->n.staged += m->staged;
    pthread_mutex_unlock(&t->lock);
}

/* ---- the invariants, for tests ---- */

static aff_status check_expert(aff_tiers *t, int64_t i, aff_error *err)
{
    const int l = (int)(i / t->experts), e = (int)(i % t->experts);
    const aff_tier tier = aff__placement_tier(t->place, l, e);
    const bool pooled = tier == AFF_TIER_HOST || (tier == AFF_TIER_CARD && t->inclusive);
    if (pooled != (t->slot[i] >= 0) || (tier == AFF_TIER_CARD) != (t->slab[i] >= 0))
        return aff__fail(err, AFF_E_INVALID, "layer %d, expert %d in tier %d: pool slot %d, slab slot %" PRId64, l, e, (int)tier, t->slot[i], t->slab[i]);
    if (t->slot[i] >= 0 && (t->entry[t->slot[i]].state != AFF_SLOT_POOL || t->entry[t->slot[i]].expert != i))
        return aff__fail(err, AFF_E_INVALID, "layer %d, expert %d: its slot %d is in state %d, of expert %d", l, e, t->slot[i], t->entry[t->slot[i]].state,
                         t->entry[t->slot[i]].expert);
    if (t->staged[i] >= 0) {
        const aff_slot_entry *s = &t->entry[t->staged[i]];
        if ((s->state != AFF_SLOT_STAGED && s->state != AFF_SLOT_FILLING) || s->expert != i)
            return aff__fail(err, AFF_E_INVALID, "layer %d, expert %d: its staging slot %d is in state %d, of expert %d", l, e, t->staged[i], s->state, s->expert);
    }
    return AFF_OK;
}

static aff_status check_slots(aff_tiers *t, aff_error *err)
{
    int64_t count[AFF_SLOT_CARD + 1] = {0}, listed = 0, slab = 0;
    for (int64_t s = 0; s < aff__slots_count(t->pool); s++) count[t->entry[s].state]++;
    const int64_t pool = count[AFF_SLOT_FREE] + count[AFF_SLOT_POOL] + count[AFF_SLOT_TAKEN] + count[AFF_SLOT_LEFT];
    for (int32_t s = t->free_slot; s >= 0; s = t->entry[s].older) listed++;
    if (pool != t->split.pool || listed != count[AFF_SLOT_FREE] || listed != t->free_slots || listed != aff__placement_free_slots(t->place, AFF_TIER_HOST))
        return aff__fail(err, AFF_E_INVALID, "pool: %" PRId64 " slots of %" PRId64 ", free %" PRId64 " (listed %" PRId64 ", counted %" PRId64 ", by the policy %" PRId64 ")", pool,
                         t->split.pool, count[AFF_SLOT_FREE], listed, t->free_slots, aff__placement_free_slots(t->place, AFF_TIER_HOST));
    for (int64_t i = 0; i < t->total; i++) slab += t->slab[i] >= 0;
    for (const aff_mover_job *j = t->wanted; j; j = j->next) slab += j->slab >= 0;
    for (const aff_mover_job *j = t->landed; j; j = j->next) slab += j->slab >= 0;
    if (!t->at_work && t->has_card && slab + t->free_slabs != t->slab_slots)
        return aff__fail(err, AFF_E_INVALID, "slab: %" PRId64 " slots in use, %" PRId64 " free, of %" PRId64, slab, t->free_slabs, t->slab_slots);
    return AFF_OK;
}

aff_status aff__tiers_check(aff_tiers *t, aff_error *err)
{
    if (t->mapped) return AFF_OK;
    pthread_mutex_lock(&t->lock);
    aff_status s = check_slots(t, err);
    for (int64_t i = 0; i < t->total && s == AFF_OK; i++) s = check_expert(t, i, err);
    pthread_mutex_unlock(&t->lock);
    return s;
}
