#include "experts/simulate.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

double aff__sim_hits(const aff_sim_result *r, aff_use_phase phase, aff_tier tier)
{
    const int64_t *u = r->used[phase], all = u[0] + u[1] + u[2], in = u[0] + (tier >= AFF_TIER_HOST ? u[1] : 0);
    return all ? (double)in / (double)all : 0;
}

static double per_token(const aff_sim_result *r, int phase, int64_t n)
{
    return r->tokens[phase] ? (double)n / (double)r->tokens[phase] : 0;
}

double aff__sim_link(const aff_sim_result *r, aff_use_phase phase)
{
    return per_token(r, phase,
                     r->up[phase] + r->down[phase] + r->used[phase][AFF_TIER_HOST] + r->used[phase][AFF_TIER_DISK]);
}

double aff__sim_disk(const aff_sim_result *r, aff_use_phase phase)
{
    return per_token(r, phase, r->loads[phase] + r->used[phase][AFF_TIER_DISK]);
}

/* ---- the policy ---- */

typedef struct flight {
    aff_move m;
    int64_t due;
} flight;

typedef struct flights { /* first in, first out */
    flight *v;
    int64_t cap, first, n;
} flights;

static void push(flights *q, const aff_move *m, int64_t due)
{
    q->v[(q->first + q->n++) % q->cap] = (flight){*m, due};
}
static flight *front(const flights *q)
{
    return q->n ? &q->v[q->first] : NULL;
}
static void drop(flights *q)
{
    q->first = (q->first + 1) % q->cap;
    q->n--;
}

/* What has arrived by now; a copy takes its share of a dispatch, other moves do not wait for the link. */
static void arrive(aff_placement *p, const aff_sim *s, aff_sim_result *r, flights *air, flights *quiet, int phase,
                   int64_t now)
{
    int copied = 0;
    for (flight *f; (f = front(quiet)) && f->due <= now; drop(quiet)) aff__placement_released(p, &f->m);
    for (flight *f; (f = front(air)) && f->due <= now && quiet->n < quiet->cap; drop(air)) {
        if (f->m.copy && copied == s->copies) break;
        copied += f->m.copy;
        r->moves[phase] += f->m.to == AFF_TIER_CARD;
        r->up[phase] += f->m.to == AFF_TIER_CARD;
        r->down[phase] += f->m.from == AFF_TIER_CARD && f->m.copy;
        r->loads[phase] += f->m.from == AFF_TIER_DISK && f->m.to == AFF_TIER_HOST;
        aff__placement_landed(p, &f->m);
        push(quiet, &f->m, now + s->land);
    }
}

static aff_status play(aff_placement *p, const aff_sim *s, aff_sim_result *r, flights air[2], flights quiet[2],
                       const aff_uses *u, int64_t *now, aff_error *err)
{
    for (int64_t i = 0; i < u->n; i++, ++*now) {
        const aff_placement_use use = aff__uses_at(u, i);
        for (int k = 0; k < 2; k++) arrive(p, s, r, &air[k], &quiet[k], use.phase, *now);
        AFF_TRY(aff__placement_note(p, &use, err));
        for (int k = 0; k < 2; k++) {
            aff_move m;
            while (air[k].n < air[k].cap && aff__placement_next(p, (aff_tier)k, &m)) push(&air[k], &m, *now + s->land);
        }
    }
    return AFF_OK;
}

static aff_status simulate_placement(aff_sim_result *r, const aff_sim *s, const aff_uses *const *traces, int n,
                                     aff_error *err)
{
    aff_placement *p;
    flights air[2] = {{0}}, quiet[2] = {{0}};
    int64_t now = 0;
    AFF_TRY(aff__placement_create(&p, &s->shape, &s->o, err));
    aff_status st = aff__placement_fill(p, s->profile, err);
    for (int k = 0; k < 2 && st == AFF_OK; k++) {
        air[k].cap = aff__placement_options_now(p).shadow;
        quiet[k].cap = 4 * air[k].cap + 64;
        st = aff__calloc(&air[k].v, (uint64_t)air[k].cap, sizeof *air[k].v, "simulation", err);
        if (st == AFF_OK) st = aff__calloc(&quiet[k].v, (uint64_t)quiet[k].cap, sizeof *quiet[k].v, "simulation", err);
    }
    for (int i = 0; i < n && st == AFF_OK; i++) st = play(p, s, r, air, quiet, traces[i], &now, err);
    r->n = aff__placement_counts_now(p);
    memcpy(r->used, r->n.used, sizeof r->used);
    for (int k = 0; k < 2; k++) {
        free(air[k].v);
        free(quiet[k].v);
    }
    aff__placement_free(p);
    return st;
}

/* ---- caches ---- */

/* Residents in a heap: the first to leave is at the root. */
typedef struct cache {
    aff_sim_kind kind;
    int64_t n, slots;
    int32_t *heap; /* [slots] experts */
    int32_t *at;   /* [all] place in the heap, -1: not in */
    double *key;   /* [all] the lowest leaves */
    double *uses;  /* [all] */
    /* Of those that look ahead: dispatches in which an expert is used, by expert. */
    int64_t *first, *cursor; /* [all + 1], [all]: the next one not yet played */
    int64_t *when;
} cache;

static void settle(cache *c, int64_t i, int32_t x)
{
    c->heap[i] = x;
    c->at[x] = (int32_t)i;
}

static void fix(cache *c, int64_t i)
{
    const int32_t x = c->heap[i];
    while (i > 0 && c->key[c->heap[(i - 1) / 2]] > c->key[x]) {
        settle(c, i, c->heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    for (int64_t j; (j = 2 * i + 1) < c->n; i = j) {
        if (j + 1 < c->n && c->key[c->heap[j + 1]] < c->key[c->heap[j]]) j++;
        if (c->key[c->heap[j]] >= c->key[x]) break;
        settle(c, i, c->heap[j]);
    }
    settle(c, i, x);
}

static void insert(cache *c, int32_t x)
{
    settle(c, c->n++, x);
    fix(c, c->n - 1);
}

/* When the expert is used next, after its cursor moved on. */
static double next_use(const cache *c, int32_t x)
{
    return c->cursor[x] < c->first[x + 1] ? (double)c->when[c->cursor[x]] : 1e18;
}

/* How often x is used before `end`. */
static int64_t uses_before(const cache *c, int32_t x, double end)
{
    int64_t lo = c->cursor[x], hi = c->first[x + 1];
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if ((double)c->when[mid] < end)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo - c->cursor[x];
}

/* The key after a use at `now`. */
static double key_after(cache *c, int32_t x, int64_t now, double span)
{
    c->uses[x]++;
    if (c->first) c->cursor[x]++;
    if (c->kind == AFF_SIM_LRU) return (double)now;
    if (c->kind == AFF_SIM_LFU) return c->uses[x] + (double)now / span;
    return -next_use(c, x);
}

static bool takes_place(const cache *c, const aff_sim *s, int32_t x)
{
    if (c->kind <= AFF_SIM_LFU) return true;
    const int32_t last = c->heap[0];
    if (c->key[x] <= c->key[last]) return false; /* needed later */
    return c->kind == AFF_SIM_BELADY || uses_before(c, x, -c->key[last]) >= s->gain;
}

static void request(cache *c, const aff_sim *s, aff_sim_result *r, int32_t x, int phase, int64_t now, double span)
{
    const bool hit = c->at[x] >= 0;
    r->used[phase][hit ? AFF_TIER_CARD : AFF_TIER_HOST]++;
    c->key[x] = key_after(c, x, now, span);
    if (hit) {
        fix(c, c->at[x]);
    } else if (c->n < c->slots) {
        insert(c, x);
        r->moves[phase]++;
    } else if (c->n && takes_place(c, s, x)) {
        c->at[c->heap[0]] = -1;
        settle(c, 0, x);
        fix(c, 0);
        r->moves[phase]++;
    }
}

/* Lists of the dispatches in which every expert is used. */
static aff_status look_ahead(cache *c, int64_t all, const aff_uses *const *traces, int n, aff_error *err)
{
    int64_t total = 0, now = 0;
    for (int t = 0; t < n; t++) total += traces[t]->requests;
    AFF_TRY(aff__calloc(&c->first, (uint64_t)all + 1, sizeof *c->first, "simulation", err));
    AFF_TRY(aff__calloc(&c->cursor, (uint64_t)all, sizeof *c->cursor, "simulation", err));
    AFF_TRY(aff__calloc(&c->when, (uint64_t)total, sizeof *c->when, "simulation", err));
    for (int pass = 0; pass < 2; pass++, now = 0) {
        for (int t = 0; t < n; t++)
            for (int64_t i = 0; i < traces[t]->n; i++, now++) {
                const aff_dispatch *d = &traces[t]->dispatch[i];
                for (int k = 0; k < d->n; k++) {
                    const int64_t x = (int64_t)d->layer * traces[t]->experts + traces[t]->id[d->id + k];
                    if (pass)
                        c->when[c->cursor[x]++] = now;
                    else
                        c->first[x + 1]++;
                }
            }
        if (pass) break;
        for (int64_t x = 0; x < all; x++) c->first[x + 1] += c->first[x];
        memcpy(c->cursor, c->first, (size_t)all * sizeof *c->cursor);
    }
    memcpy(c->cursor, c->first, (size_t)all * sizeof *c->cursor);
    return AFF_OK;
}

/* It begins with what the profile puts into the slab. */
static aff_status begin(cache *c, const aff_sim *s, int64_t all, aff_error *err)
{
    aff_placement *p;
    aff_placement_options o;
    aff__placement_options_init(&o);
    o.strategy = AFF_PLACE_STATIC;
    AFF_TRY(aff__placement_create(&p, &s->shape, &o, err));
    const aff_status st = aff__placement_fill(p, s->profile, err);
    for (int64_t x = 0; x < all; x++) {
        c->at[x] = -1;
        c->key[x] = c->first ? -next_use(c, (int32_t)x) : 0;
    }
    for (int64_t x = 0; x < all && st == AFF_OK && c->n < c->slots; x++)
        if (aff__placement_tier(p, (int)(x / s->shape.experts), (int)(x % s->shape.experts)) == AFF_TIER_CARD)
            insert(c, (int32_t)x);
    aff__placement_free(p);
    return st;
}

static aff_status simulate_cache(aff_sim_result *r, const aff_sim *s, const aff_uses *const *traces, int n,
                                 aff_error *err)
{
    const int64_t all = (int64_t)s->shape.layers * s->shape.experts;
    cache c = {.kind = s->kind, .slots = s->shape.slab_slots < all ? s->shape.slab_slots : all};
    double span = 1;
    int64_t now = 0;
    for (int t = 0; t < n; t++) span += (double)traces[t]->n;
    aff_status st = aff__calloc(&c.heap, (uint64_t)c.slots + 1, sizeof *c.heap, "simulation", err);
    if (st == AFF_OK) st = aff__calloc(&c.at, (uint64_t)all, sizeof *c.at, "simulation", err);
    if (st == AFF_OK) st = aff__calloc(&c.key, (uint64_t)all, sizeof *c.key, "simulation", err);
    if (st == AFF_OK) st = aff__calloc(&c.uses, (uint64_t)all, sizeof *c.uses, "simulation", err);
    if (st == AFF_OK && s->kind >= AFF_SIM_BELADY) st = look_ahead(&c, all, traces, n, err);
    if (st == AFF_OK) st = begin(&c, s, all, err);
    for (int t = 0; t < n && st == AFF_OK; t++)
        for (int64_t i = 0; i < traces[t]->n; i++, now++) {
            const aff_dispatch *d = &traces[t]->dispatch[i];
            for (int k = 0; k < d->n; k++)
                request(&c, s, r, (int32_t)((int64_t)d->layer * s->shape.experts + traces[t]->id[d->id + k]), d->phase,
                        now, span);
        }
    free(c.heap);
    free(c.at);
    free(c.key);
    free(c.uses);
    free(c.first);
    free(c.cursor);
    free(c.when);
    return st;
}

aff_status aff__simulate(aff_sim_result *r, const aff_sim *s, const aff_uses *const *traces, int n, aff_error *err)
{
    *r = (aff_sim_result){0};
    if (s->land < 1 || s->copies < 1 || s->gain < 0)
        return aff__fail(err, AFF_E_INVALID,
                         "simulation: %d dispatches for a copy, %d copies, gain %d: expected at least 1, 1, 0", s->land,
                         s->copies, s->gain);
    for (int t = 0; t < n; t++) {
        if (traces[t]->layers != s->shape.layers || traces[t]->experts != s->shape.experts)
            return aff__fail(err, AFF_E_INVALID, "simulation: trace %d has %d layers of %d experts: expected %d of %d",
                             t, traces[t]->layers, traces[t]->experts, s->shape.layers, s->shape.experts);
        for (int p = 0; p < 2; p++) r->tokens[p] += traces[t]->tokens[p];
    }
    return s->kind == AFF_SIM_PLACEMENT ? simulate_placement(r, s, traces, n, err)
                                        : simulate_cache(r, s, traces, n, err);
}
