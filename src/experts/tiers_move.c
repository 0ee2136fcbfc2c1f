/* Moves. The policy names one; here it gets a slot, the mover's thread brings the bytes, and publishing makes it valid
 * and frees what it left. With a card publishing waits for the begin of a pass, when no kernel can name an old place;
 * without one the pins say who still computes from it, so it is done at once. What needs no bytes (down to the disk,
 * down to an inclusive pool) goes straight to publishing; an expert that goes up from the disk while staging still has
 * it changes slots. */
#include "experts/tiers_internal.h"
#include "base/mem.h"
#include "experts/near.h"
#include <stdio.h>
#include <stdlib.h>

/* ---- slots of the slab; under the lock ---- */

static int64_t take_slab(aff_tiers *t)
{
    return t->free_slabs ? t->free_slab[--t->free_slabs] : -1;
}

static void free_slab(aff_tiers *t, int64_t slab)
{
    t->free_slab[t->free_slabs++] = slab;
}

/* ---- publishing; under the lock ---- */

void aff__tiers_released(aff_tiers *t, int32_t slot)
{
    const int64_t i = t->entry[slot].expert;
    const aff_move m = {(int)(i / t->experts), (int)(i % t->experts), AFF_TIER_HOST, AFF_TIER_DISK,
                        false}; /* whichever way it left */
    aff__placement_released(t->place, &m);
    aff__tiers_free_slot(t, slot);
    t->n.quarantined--;
}

/* The pool slot that an expert has moved out of. */
static void leave(aff_tiers *t, int64_t i, const aff_move *m)
{
    const int32_t s = t->slot[i];
    t->slot[i] = -1;
    if (t->entry[s].pins) {
        t->entry[s].state = AFF_SLOT_LEFT;
        t->n.quarantined++;
        return;
    }
    aff__placement_released(t->place, m);
    aff__tiers_free_slot(t, s);
}

static void enter(aff_tiers *t, int64_t i, int32_t slot)
{
    t->entry[slot].state = AFF_SLOT_POOL;
    t->entry[slot].expert = (int32_t)i;
    t->slot[i] = slot;
}

static void move_done(aff_tiers *t, const aff_move *m, int32_t slot, int64_t slab)
{
    const int64_t i = aff__tier_index(t, m->layer, m->expert), old = t->slab[i];
    aff__placement_landed(t->place, m);
    if (m->to == AFF_TIER_CARD) t->slab[i] = slab;
    if (m->from == AFF_TIER_CARD) t->slab[i] = -1;
    if (m->to == AFF_TIER_HOST && slot >= 0) enter(t, i, slot);
    if (m->from == AFF_TIER_HOST && (m->to == AFF_TIER_DISK || !t->inclusive)) {
        leave(t, i, m);
        return;
    }
    aff__placement_released(t->place, m);
    if (m->from == AFF_TIER_CARD) free_slab(t, old);
}

static void move_failed(aff_tiers *t, aff_mover_job *j)
{
    if (j->slot >= 0) aff__tiers_free_slot(t, j->slot);
    if (j->slab >= 0) free_slab(t, j->slab);
    aff__placement_failed(t->place, &j->move);
}

/* What has landed becomes valid. */
static aff_status publish(aff_tiers *t, aff_error *err)
{
    int n = 0;
    for (aff_mover_job *j = t->landed; j; j = j->next) {
        const aff_move *m = &j->move;
        if (!j->ok) continue;
        const int64_t i = aff__tier_index(t, m->layer, m->expert),
                      slot = m->to == AFF_TIER_HOST && j->slot >= 0    ? j->slot
                             : m->to == AFF_TIER_DISK || !t->inclusive ? -1
                                                                       : t->slot[i];
        t->change[n++] = (aff_tier_change){
            m->layer,
            m->expert,
            {m->to, m->to == AFF_TIER_CARD ? j->slab : -1, slot, slot >= 0 ? aff__slots_at(t->pool, slot) : NULL}};
    }
    if (n && t->has_card) AFF_TRY(t->card.publish(t->card.ctx, t->change, n, err));
    while (t->landed) {
        aff_mover_job *j = t->landed;
        t->landed = j->next;
        if (j->ok)
            move_done(t, &j->move, j->slot, j->slab);
        else
            move_failed(t, j);
        j->next = t->free_job;
        t->free_job = j;
    }
    pthread_cond_broadcast(&t->changed);
    return AFF_OK;
}

/* ---- moves begin; under the lock ---- */

static bool takes_pool_slot(const aff_tiers *t, const aff_move *m)
{
    return m->to == AFF_TIER_HOST && (m->from == AFF_TIER_DISK || !t->inclusive);
}

static void carry(aff_tiers *t, const aff_move *m)
{
    const int64_t i = aff__tier_index(t, m->layer, m->expert);
    if (!t->has_card && m->to == AFF_TIER_DISK) {
        move_done(t, m, -1, -1);
        return;
    }
    if (!t->has_card && t->staged[i] >= 0 && t->entry[t->staged[i]].state == AFF_SLOT_STAGED) {
        aff__tiers_adopt(t, i);
        aff__placement_landed(t->place, m);
        aff__placement_released(t->place, m);
        return;
    }
    aff_mover_job *j = t->free_job;
    t->free_job = j->next;
    *j = (aff_mover_job){.move = *m, .slot = -1, .slab = -1, .ok = true};
    if (takes_pool_slot(t, m)) j->slot = aff__tiers_take_free(t);
    if (m->to == AFF_TIER_CARD) j->slab = take_slab(t);
    /* The policy counted slots as this table does, so there is one; if they ever disagree, the move is off. */
    j->ok = (!takes_pool_slot(t, m) || j->slot >= 0) && (m->to != AFF_TIER_CARD || j->slab >= 0);
    if (m->to == AFF_TIER_CARD && t->slot[i] >= 0)
        j->copy = (aff_tier_copy){true, j->slab, aff__slots_at(t->pool, t->slot[i])};
    if (m->from == AFF_TIER_CARD && j->slot >= 0)
        j->copy = (aff_tier_copy){false, t->slab[i], aff__slots_at(t->pool, j->slot)};
    if (!j->ok || !m->copy) {
        j->next = t->landed;
        t->landed = j;
        return;
    }
    if (t->wanted)
        t->wanted_last->next = j;
    else
        t->wanted = j;
    t->wanted_last = j;
    t->at_work++;
    pthread_cond_signal(&t->work);
}

void aff__tiers_ask(aff_tiers *t)
{
    aff_move m;
    for (int edge = AFF_TIER_CARD; edge <= AFF_TIER_HOST; edge++)
        while (t->free_job && aff__placement_next(t->place, (aff_tier)edge, &m)) carry(t, &m);
}

/* ---- the mover ---- */

static void load_failed(aff_tiers *t, aff_mover_job *j)
{
    j->ok = false;
    if (t->loader_options.warn) t->loader_options.warn(t->loader_options.warn_ctx, j->load.err.msg);
}

/* Copies of the card; one that fails leaves it broken for good. */
static void copy(aff_tiers *t, aff_mover_job **job, const aff_tier_copy *c, int n)
{
    aff_error err = {0};
    if (!n) return;
    const aff_status s = t->card.copy(t->card.ctx, c, n, &err);
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < n; i++) {
        if (s != AFF_OK) {
            job[i]->ok = false;
        } else if (c[i].up) {
            t->n.up_copies++;
            t->n.up_bytes += t->layout[0].bytes;
        } else {
            t->n.down_copies++;
            t->n.down_bytes += t->layout[0].bytes;
        }
    }
    if (s != AFF_OK && t->broken == AFF_OK) {
        t->broken = s;
        t->broken_err = err;
    }
    pthread_mutex_unlock(&t->lock);
}

/* From the disk to the card, without a pool: one at a time by way of the mover's own slot. */
static void by_bounce(aff_tiers *t, aff_mover_job *j)
{
    uint8_t *to = aff__slots_at(t->pool, t->split.pool + t->split.staging);
    j->load = (aff_load){.layer = j->move.layer, .expert = j->move.expert, .to = to};
    aff__loader_submit(t->loader, &j->load, AFF_LOAD_LATER);
    if (aff__loader_wait(t->loader, &j->load, NULL) != AFF_OK)
        load_failed(t, j);
    else
        copy(t, &j, &(aff_tier_copy){true, j->slab, to}, 1);
}

static void carry_out(aff_tiers *t, aff_mover_job *batch)
{
    aff_mover_job *copied[AFF_MOVER_JOBS];
    aff_tier_copy c[AFF_MOVER_JOBS] = {0};
    int n = 0;
    for (aff_mover_job *j = batch; j; j = j->next) {
        if (j->copy.host) {
            c[n] = j->copy;
            copied[n++] = j;
        } else if (j->move.to == AFF_TIER_HOST) {
            j->load =
                (aff_load){.layer = j->move.layer, .expert = j->move.expert, .to = aff__slots_at(t->pool, j->slot)};
            aff__loader_submit(t->loader, &j->load, AFF_LOAD_LATER);
        }
    }
    copy(t, copied, c, n);
    for (aff_mover_job *j = batch; j; j = j->next) {
        if (j->copy.host) continue;
        if (j->move.to == AFF_TIER_CARD)
            by_bounce(t, j);
        else if (aff__loader_wait(t->loader, &j->load, NULL) != AFF_OK)
            load_failed(t, j);
    }
}

static void *mover_main(void *arg)
{
    aff_tiers *t = arg;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->stop && (t->stalled || !t->wanted)) pthread_cond_wait(&t->work, &t->lock);
        if (t->stop) break;
        aff_mover_job *batch = t->wanted;
        t->wanted = NULL;
        pthread_mutex_unlock(&t->lock);
        carry_out(t, batch);
        pthread_mutex_lock(&t->lock);
        while (batch) {
            aff_mover_job *j = batch;
            batch = j->next;
            j->next = t->landed;
            t->landed = j;
            t->at_work--;
        }
        if (!t->has_card) publish(t, NULL); /* cannot fail without one */
        pthread_cond_broadcast(&t->changed);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

aff_status aff__tiers_mover_start(aff_tiers *t, aff_error *err)
{
    AFF_TRY(aff__calloc(&t->job, AFF_MOVER_JOBS, sizeof *t->job, "moves of experts", err));
    AFF_TRY(aff__calloc(&t->change, AFF_MOVER_JOBS, sizeof *t->change, "moves of experts", err));
    for (int i = 0; i < AFF_MOVER_JOBS; i++) {
        t->job[i].next = t->free_job;
        t->free_job = &t->job[i];
    }
    if (pthread_create(&t->mover, NULL, mover_main, t) != 0)
        return aff__fail(err, AFF_E_IO, "expert tiers: cannot start the mover's thread");
    t->started = true;
    return AFF_OK;
}

void aff__tiers_mover_stop(aff_tiers *t)
{
    if (!t->started) return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_signal(&t->work);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->mover, NULL);
    t->started = false;
}

/* ---- a pass ---- */

aff_status aff__tiers_begin(aff_tiers *t, aff_error *err)
{
    if (t->mapped) return AFF_OK;
    pthread_mutex_lock(&t->lock);
    aff_status s = AFF_OK;
    if (t->has_card && t->in_pass) {
        s = aff__fail(err, AFF_E_INVALID, "expert tiers: a pass begins before the one before it has ended");
    } else if (t->broken != AFF_OK) {
        if (err) *err = t->broken_err;
        s = t->broken;
    } else {
        s = publish(t, err);
    }
    t->in_pass |= s == AFF_OK;
    pthread_mutex_unlock(&t->lock);
    return s;
}

void aff__tiers_end(aff_tiers *t)
{
    if (t->mapped) return;
    pthread_mutex_lock(&t->lock);
    t->in_pass = false;
    pthread_mutex_unlock(&t->lock);
}

static aff_status note(aff_tiers *t, const aff_placement_use *u, aff_error *err)
{
    AFF_TRY(aff__placement_note(t->place, u, err));
    if (!t->mapped) aff__tiers_ask(t);
    return AFF_OK;
}

aff_status aff__tiers_note(aff_tiers *t, const aff_placement_use *u, aff_error *err)
{
    pthread_mutex_lock(&t->lock);
    const aff_status s = note(t, u, err);
    pthread_mutex_unlock(&t->lock);
    return s;
}

aff_status aff__tiers_note_picks(aff_tiers *t, int layer, aff_use_phase phase, const int32_t *picks, int rows, int K,
                                 const float *value, aff_error *err)
{
    int n = 0;
    pthread_mutex_lock(&t->lock);
    for (int e = 0; e < t->experts; e++) t->note_count[e] = 0;
    for (int i = 0; i < rows * K; i++)
        if (picks[i] >= 0 && picks[i] < t->experts) t->note_count[picks[i]]++;
    for (int e = 0; e < t->experts; e++)
        if (t->note_count[e]) {
            t->note_count[n] = t->note_count[e]; /* n <= e */
            t->note_id[n++] = e;
        }
    int32_t near[AFF_NEAR_MOST];
    float score[AFF_NEAR_MOST];
    const int missed = value ? aff__near_misses(value, t->experts, t->note_id, n, AFF_NEAR_MOST, near, score) : 0;
    const aff_placement_use u = {.layer = layer,
                                 .phase = phase,
                                 .n = n,
                                 .id = t->note_id,
                                 .count = t->note_count,
                                 .n_near = missed,
                                 .near = near,
                                 .score = score};
    const aff_status s = note(t, &u, err);
    pthread_mutex_unlock(&t->lock);
    return s;
}

/* ---- other ---- */

void aff__tiers_settle(aff_tiers *t)
{
    if (t->mapped) return;
    pthread_mutex_lock(&t->lock);
    while (t->at_work && !t->stalled) pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

void aff__tiers_stall(aff_tiers *t, bool on)
{
    pthread_mutex_lock(&t->lock);
    t->stalled = on;
    pthread_cond_signal(&t->work);
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

/* A move that must be: an expert that is kept where it is, is so no longer. */
static bool force(aff_tiers *t, int64_t i, aff_tier from, aff_tier to, aff_move *m)
{
    const int l = (int)(i / t->experts), e = (int)(i % t->experts);
    if (aff__placement_force(t->place, l, e, from, to, m)) return true;
    aff__placement_pin(t->place, l, e, false);
    return aff__placement_force(t->place, l, e, from, to, m);
}

/* The pool's coldest expert goes to the disk; false: there is none that can. */
static bool drop_coldest(aff_tiers *t)
{
    aff_move m;
    int64_t cold = -1;
    for (int64_t i = 0; i < t->total; i++) {
        const int l = (int)(i / t->experts), e = (int)(i % t->experts);
        if (aff__placement_tier(t->place, l, e) != AFF_TIER_HOST || aff__placement_busy(t->place, l, e)) continue;
        if (cold < 0 || aff__placement_heat(t->place, l, e) <
                            aff__placement_heat(t->place, (int)(cold / t->experts), (int)(cold % t->experts)))
            cold = i;
    }
    if (cold < 0 || !force(t, cold, AFF_TIER_HOST, AFF_TIER_DISK, &m)) return false;
    carry(t, &m);
    return true;
}

/* Experts in slots from `slots` on are sent down; *left: how many there are. False: none of them could go. */
static bool evict(aff_tiers *t, int64_t slots, int64_t *left)
{
    const aff_tier lower = t->split.pool ? AFF_TIER_HOST : AFF_TIER_DISK;
    bool moved = false;
    *left = 0;
    for (int64_t i = 0; i < t->total; i++) {
        aff_move m;
        if (t->slab[i] < slots) continue;
        ++*left;
        if (!t->free_job) continue;
        if (force(t, i, AFF_TIER_CARD, lower, &m)) {
            carry(t, &m);
            moved = true;
        } else if (lower == AFF_TIER_HOST && t->free_job) {
            moved |= drop_coldest(t);
        }
    }
    return moved;
}

static aff_status resize(aff_tiers *t, int64_t slots, aff_error *err)
{
    int64_t left;
    do {
        while (t->at_work && !t->stalled) pthread_cond_wait(&t->changed, &t->lock);
        AFF_TRY(publish(t, err));
        if (t->broken != AFF_OK) {
            if (err) *err = t->broken_err;
            return t->broken;
        }
        if (!evict(t, slots, &left) && left)
            return aff__fail(err, AFF_E_LIMIT, "expert tiers: %lld experts of the card have nowhere to go",
                             (long long)left);
    } while (left);
    AFF_TRY(aff__placement_resize(t->place, AFF_TIER_CARD, slots, err));
    if (slots > t->card.slots)
        AFF_TRY(aff__realloc(&t->free_slab, (uint64_t)slots, sizeof *t->free_slab, "slots of the card", err));
    if (slots > t->card.slots) t->card.slots = slots; /* the most there were */
    int64_t kept = 0;
    for (int64_t i = 0; i < t->free_slabs; i++)
        if (t->free_slab[i] < slots) t->free_slab[kept++] = t->free_slab[i];
    t->free_slabs = kept;
    for (int64_t i = t->slab_slots; i < slots; i++) free_slab(t, i);
    t->slab_slots = slots;
    return AFF_OK;
}

aff_status aff__tiers_resize(aff_tiers *t, int64_t slots, aff_error *err)
{
    if (!t->has_card || slots < 0)
        return aff__fail(err, AFF_E_INVALID, "expert tiers: %lld slots for a card that is not there", (long long)slots);
    pthread_mutex_lock(&t->lock);
    const aff_status s = t->in_pass ? aff__fail(err, AFF_E_INVALID, "expert tiers: the slab changes within a pass")
                                    : resize(t, slots, err);
    pthread_mutex_unlock(&t->lock);
    return s;
}
