/* The host's use of a layer's experts, and staging. A staging slot keeps what was read into it until it is needed for
 * something else, the one not used for longest first, so staging is a small cache too. Reads begin as slots can be had,
 * in ascending id, which is the order of a container.
 *
 * Several threads may use layers at a time. Nobody can wait for ever: who waits in aff__tiers_next has given back what
 * it computed from, and holds pins only on slots that are being read. */
#include "experts/tiers_internal.h"
#include "base/clock.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

/* How far an expert of a use is. */
enum { UNREAD, PINNED, RETURNED, OVER };

struct aff_tier_use {
    int layer, n, experts;
    int32_t *id, *slot; /* [experts]; slot -1: used where it lies */
    uint8_t *state;
};

uint64_t aff__tier_use_bytes(int experts)
{
    return aff__align_up(sizeof(aff_tier_use), 64) + 2 * aff__align_up((uint64_t)experts * sizeof(int32_t), 64) +
           aff__align_up((uint64_t)experts, 64);
}

aff_status aff__tier_use_create(aff_tier_use **out, int experts, aff_error *err)
{
    aff_tier_use *u;
    AFF_TRY(aff__calloc(&u, 1, sizeof *u, "use of a layer's experts", err));
    u->experts = experts;
    aff_status s = aff__calloc(&u->id, (uint64_t)experts, sizeof *u->id, "use of a layer's experts", err);
    if (s == AFF_OK) s = aff__calloc(&u->slot, (uint64_t)experts, sizeof *u->slot, "use of a layer's experts", err);
    if (s == AFF_OK) s = aff__calloc(&u->state, (uint64_t)experts, 1, "use of a layer's experts", err);
    if (s != AFF_OK) {
        aff__tier_use_free(u);
        u = NULL;
    }
    *out = u;
    return s;
}

void aff__tier_use_free(aff_tier_use *u)
{
    if (!u) return;
    free(u->id);
    free(u->slot);
    free(u->state);
    free(u);
}

aff_expert aff__tiers_at(const aff_tiers *t, int layer, int e, int32_t slot)
{
    const bool draft = layer >= t->trunk_layers;
    if (slot < 0) return aff__experts_at(t->store[draft], draft ? layer - t->trunk_layers : layer, e);
    return aff__slot_expert(&t->layout[draft], aff__slots_at(t->pool, slot));
}

/* ---- slots; under the lock ---- */

void aff__tiers_free_slot(aff_tiers *t, int32_t slot)
{
    t->entry[slot] = (aff_slot_entry){.state = AFF_SLOT_FREE, .expert = -1, .load = -1, .older = t->free_slot};
    t->free_slot = slot;
    t->free_slots++;
}

void aff__tiers_idle_slot(aff_tiers *t, int32_t slot)
{
    t->entry[slot] = (aff_slot_entry){.state = AFF_SLOT_IDLE, .expert = -1, .load = -1, .older = t->idle_slot};
    t->idle_slot = slot;
}

int32_t aff__tiers_take_free(aff_tiers *t)
{
    const int32_t s = t->free_slot;
    if (s < 0) return -1;
    t->free_slot = t->entry[s].older;
    t->free_slots--;
    t->entry[s] = (aff_slot_entry){.state = AFF_SLOT_TAKEN, .expert = -1, .load = -1};
    return s;
}

/* The list of STAGED slots that nobody uses. */
static void unlist(aff_tiers *t, int32_t s)
{
    const aff_slot_entry *e = &t->entry[s];
    *(e->newer >= 0 ? &t->entry[e->newer].older : &t->newest) = e->older;
    *(e->older >= 0 ? &t->entry[e->older].newer : &t->oldest) = e->newer;
}

static void list(aff_tiers *t, int32_t s)
{
    aff_slot_entry *e = &t->entry[s];
    e->newer = -1;
    e->older = t->newest;
    *(t->newest >= 0 ? &t->entry[t->newest].newer : &t->oldest) = s;
    t->newest = s;
}

static void pin(aff_tiers *t, int32_t s)
{
    aff_slot_entry *e = &t->entry[s];
    if (e->state == AFF_SLOT_STAGED && !e->pins) unlist(t, s);
    e->pins++;
}

static void give_load(aff_tiers *t, int32_t load)
{
    t->load[load].next = t->free_load;
    t->free_load = load;
}

static void unpin(aff_tiers *t, int32_t s)
{
    aff_slot_entry *e = &t->entry[s];
    if (--e->pins) return;
    if (e->state == AFF_SLOT_STAGED) {
        list(t, s);
    } else if (e->state == AFF_SLOT_LEFT) {
        aff__tiers_released(t, s);
    } else if (e->state == AFF_SLOT_FAILED) {
        give_load(t, e->load);
        aff__tiers_idle_slot(t, s);
    } else {
        return;
    }
    pthread_cond_broadcast(&t->changed);
}

/* A slot to read into: an empty one, else the one not used for longest; -1: all are in use. */
static int32_t stage_slot(aff_tiers *t)
{
    int32_t s = t->idle_slot;
    if (t->free_load < 0) return -1;
    if (s >= 0) {
        t->idle_slot = t->entry[s].older;
        return s;
    }
    s = t->oldest;
    if (s < 0) return -1;
    unlist(t, s);
    t->staged[t->entry[s].expert] = -1;
    return s;
}

void aff__tiers_adopt(aff_tiers *t, int64_t i)
{
    const int32_t s = t->staged[i], empty = aff__tiers_take_free(t);
    aff_slot_entry *e = &t->entry[s];
    if (!e->pins) unlist(t, s);
    e->state = AFF_SLOT_POOL;
    t->slot[i] = s;
    t->staged[i] = -1;
    aff__tiers_idle_slot(t, empty);
}

/* ---- reading ---- */

/* On the loader's thread. */
static void read_done(aff_load *l)
{
    aff_stage_load *sl = l->ctx;
    aff_tiers *t = sl->tiers;
    pthread_mutex_lock(&t->lock);
    const int32_t s = sl->slot;
    aff_slot_entry *e = &t->entry[s];
    if (l->status == AFF_OK) {
        e->state = AFF_SLOT_STAGED;
        give_load(t, e->load);
        e->load = -1;
        if (!e->pins) list(t, s);
    } else {
        t->staged[e->expert] = -1;
        e->state = AFF_SLOT_FAILED;
        if (!e->pins) {
            give_load(t, e->load);
            aff__tiers_idle_slot(t, s);
        }
    }
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

/* Begins to read expert i; false: there is no slot now. */
static bool read_expert(aff_tiers *t, int layer, int e, int32_t *slot)
{
    const int64_t i = aff__tier_index(t, layer, e);
    const int32_t s = stage_slot(t);
    if (s < 0) return false;
    const int32_t k = t->free_load;
    aff_stage_load *l = &t->load[k];
    t->free_load = l->next;
    t->entry[s] = (aff_slot_entry){.state = AFF_SLOT_FILLING, .expert = (int32_t)i, .pins = 1, .load = k};
    t->staged[i] = s;
    t->n.staged++;
    l->tiers = t;
    l->slot = s;
    l->load = (aff_load){.layer = layer, .expert = e, .to = aff__slots_at(t->pool, s), .done = read_done, .ctx = l};
    aff__loader_submit(t->loader, &l->load, AFF_LOAD_NOW);
    *slot = s;
    return true;
}

/* Pins the expert's place in memory, or one that it is being read into; false: it is on disk. */
static bool find(aff_tiers *t, int64_t i, int32_t *slot)
{
    if (t->slot[i] >= 0) {
        *slot = t->slot[i];
    } else if (t->staged[i] >= 0) {
        *slot = t->staged[i];
        t->n.staged_again += t->entry[*slot].state == AFF_SLOT_STAGED;
    } else {
        return false;
    }
    pin(t, *slot);
    return true;
}

/* As many reads as there are slots; an expert that came into memory in the meantime needs none. */
static void read_more(aff_tiers *t, aff_tier_use *u)
{
    for (int k = 0; k < u->n; k++) {
        if (u->state[k] != UNREAD) continue;
        if (!find(t, aff__tier_index(t, u->layer, u->id[k]), &u->slot[k]) &&
            !read_expert(t, u->layer, u->id[k], &u->slot[k]))
            return;
        u->state[k] = PINNED;
    }
}

/* ---- a layer ---- */

void aff__tiers_open(aff_tiers *t, aff_tier_use *u, int layer, const int *id, int n)
{
    u->layer = layer;
    u->n = n < u->experts ? n : u->experts;
    for (int k = 0; k < u->n; k++) {
        u->id[k] = id[k];
        u->slot[k] = -1;
        u->state[k] = t->mapped ? PINNED : UNREAD;
    }
    if (t->mapped) return;
    pthread_mutex_lock(&t->lock);
    for (int k = 0; k < u->n; k++) /* all that are in memory before the first read takes a slot away */
        if (find(t, aff__tier_index(t, layer, u->id[k]), &u->slot[k])) u->state[k] = PINNED;
    read_more(t, u);
    pthread_mutex_unlock(&t->lock);
}

/* What was returned is not used any more. */
static void give_back(aff_tiers *t, aff_tier_use *u)
{
    for (int k = 0; k < u->n; k++) {
        if (u->state[k] != RETURNED) continue;
        if (u->slot[k] >= 0) unpin(t, u->slot[k]);
        u->state[k] = OVER;
    }
}

/* Those that can be computed; *open: some cannot yet. */
static aff_status collect(aff_tiers *t, aff_tier_use *u, int *which, aff_expert *at, int *count, bool *open,
                          aff_error *err)
{
    *count = 0;
    *open = false;
    for (int k = 0; k < u->n; k++) {
        const int state = u->slot[k] < 0 ? AFF_SLOT_POOL : t->entry[u->slot[k]].state;
        if (u->state[k] == UNREAD || (u->state[k] == PINNED && state == AFF_SLOT_FILLING)) *open = true;
        if (u->state[k] != PINNED || state == AFF_SLOT_FILLING) continue;
        if (state == AFF_SLOT_FAILED) {
            const aff_load *l = &t->load[t->entry[u->slot[k]].load].load;
            if (err) *err = l->err;
            return l->status;
        }
        which[*count] = k;
        at[(*count)++] = aff__tiers_at(t, u->layer, u->id[k], u->slot[k]);
        u->state[k] = RETURNED;
    }
    return AFF_OK;
}

aff_status aff__tiers_next(aff_tiers *t, aff_tier_use *u, int *which, aff_expert *at, int *count, aff_error *err)
{
    bool open;
    if (t->mapped) {
        give_back(t, u);
        return collect(t, u, which, at, count, &open, err);
    }
    pthread_mutex_lock(&t->lock);
    give_back(t, u);
    aff_status s;
    for (;;) {
        read_more(t, u);
        s = collect(t, u, which, at, count, &open, err);
        if (s != AFF_OK || *count || !open) break;
        const uint64_t from = aff__now_ns();
        pthread_cond_wait(&t->changed, &t->lock);
        t->n.wait_disk_ns += aff__now_ns() - from;
    }
    pthread_mutex_unlock(&t->lock);
    return s;
}

/* Slots of the pool that nobody needs go to what was read, coldness or not: the first experts of a run. */
static void settle(aff_tiers *t, int layer, int e)
{
    aff_move m;
    const int64_t i = aff__tier_index(t, layer, e);
    if (t->has_card || t->staged[i] < 0 || t->entry[t->staged[i]].state != AFF_SLOT_STAGED) return;
    if (aff__placement_free_slots(t->place, AFF_TIER_HOST) <= t->pool_spare) return;
    if (!aff__placement_force(t->place, layer, e, AFF_TIER_DISK, AFF_TIER_HOST, &m)) return;
    aff__tiers_adopt(t, i);
    aff__placement_landed(t->place, &m);
    aff__placement_released(t->place, &m);
}

void aff__tiers_close(aff_tiers *t, aff_tier_use *u)
{
    if (t->mapped) return;
    pthread_mutex_lock(&t->lock);
    for (int k = 0; k < u->n; k++) {
        if (u->state[k] != PINNED && u->state[k] != RETURNED) continue;
        unpin(t, u->slot[k]);
        u->state[k] = OVER;
    }
    for (int k = 0; k < u->n; k++) settle(t, u->layer, u->id[k]);
    pthread_mutex_unlock(&t->lock);
}
