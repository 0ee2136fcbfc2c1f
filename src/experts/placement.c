#include "experts/placement_internal.h"
#include "base/mem.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- made and freed ---- */

static int power_of_two(int n)
{
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

/* An edge's tiers: true if there is one. */
static bool edge_of(const aff_placement_shape *s, int edge, aff_tier *lower)
{
    *lower = edge == 0 && s->pool_slots > 0 ? AFF_TIER_HOST : AFF_TIER_DISK;
    return edge == 0 ? s->slab_slots > 0 : s->pool_slots > 0;
}

uint64_t aff__placement_bytes(const aff_placement_shape *s)
{
    aff_tier lower;
    const uint64_t L = (uint64_t)s->layers, E = (uint64_t)s->experts, leaves = (uint64_t)power_of_two(s->experts),
                   tops = (uint64_t)power_of_two(s->layers),
                   edges = (uint64_t)edge_of(s, 0, &lower) + (uint64_t)edge_of(s, 1, &lower);
    return sizeof(aff_placement) + L * E * (3 * sizeof(double) + 5) + L * (sizeof(double) + 5 * sizeof(int32_t)) +
           2 * edges * (L * 2 * leaves + 2 * tops) * sizeof(int32_t) + 2 * E * sizeof(int32_t);
}

static aff_status check_shape(const aff_placement_shape *s, aff_error *err)
{
    if (s->layers < 1 || s->layers > 4096 || s->experts < 1 || s->experts > 65536)
        return aff__fail(err, AFF_E_INVALID, "placement: %d layers of %d experts: expected 1 to 4096, 1 to 65536",
                         s->layers, s->experts);
    if (s->slab_slots < 0 || s->pool_slots < 0 || s->pool_spare < 0 || s->slab_slots > INT64_MAX / 4 ||
        s->pool_slots > INT64_MAX / 4)
        return aff__fail(err, AFF_E_INVALID,
                         "placement: %lld slots on the card, %lld in the pool, %lld of them spare: out of range",
                         (long long)s->slab_slots, (long long)s->pool_slots, (long long)s->pool_spare);
    if (s->inclusive && s->pool_slots < s->slab_slots)
        return aff__fail(err, AFF_E_INVALID,
                         "placement: an inclusive pool of %lld slots is smaller than the slab's %lld",
                         (long long)s->pool_slots, (long long)s->slab_slots);
    return AFF_OK;
}

static aff_status allocate(aff_placement *p, aff_error *err)
{
    static const char what[] = "placement of the experts";
    const uint64_t L = (uint64_t)p->shape.layers, E = (uint64_t)p->shape.experts;
    AFF_TRY(aff__calloc(&p->decode, L * E, sizeof *p->decode, what, err));
    AFF_TRY(aff__calloc(&p->prefill, L * E, sizeof *p->prefill, what, err));
    AFF_TRY(aff__calloc(&p->key, L * E, sizeof *p->key, what, err));
    AFF_TRY(aff__calloc(&p->scale, L, sizeof *p->scale, what, err));
    AFF_TRY(aff__calloc(&p->tier, L * E, 1, what, err));
    AFF_TRY(aff__calloc(&p->mark, L * E, 1, what, err));
    AFF_TRY(aff__calloc(&p->to, L * E, 1, what, err));
    AFF_TRY(aff__calloc(&p->held, 2 * L * E, 1, what, err));
    AFF_TRY(aff__calloc(&p->asked, E, sizeof *p->asked, what, err));
    AFF_TRY(aff__calloc(&p->seen, E, sizeof *p->seen, what, err));
    for (int t = 0; t < AFF_TIERS; t++) AFF_TRY(aff__calloc(&p->count[t], L, sizeof *p->count[t], what, err));
    for (int k = 0; k < 2; k++) {
        AFF_TRY(aff__calloc(&p->above[k], L, sizeof *p->above[k], what, err));
        for (int t = tree_of(k, 0); p->edge[k] && t <= tree_of(k, 1); t++) {
            AFF_TRY(aff__calloc(&p->tree[t], L * 2 * (uint64_t)p->leaves, sizeof *p->tree[t], what, err));
            AFF_TRY(aff__calloc(&p->top[t], 2 * (uint64_t)p->tops, sizeof *p->top[t], what, err));
        }
    }
    return AFF_OK;
}

/* Few slots are too dear to keep some free; a tier that has room for everything, or from which nothing moves, needs
 * none. */
static int64_t spare_of(int64_t wanted, int64_t slots, bool still)
{
    return still ? 0 : wanted < slots / 32 ? wanted : slots / 32;
}

aff_status aff__placement_create(aff_placement **out, const aff_placement_shape *s, const aff_placement_options *o,
                                 aff_error *err)
{
    aff_placement *p;
    *out = NULL;
    AFF_TRY(check_shape(s, err));
    AFF_TRY(aff__placement_options_check(o, err));
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "placement of the experts", err));
    p->shape = *s;
    p->o = aff__placement_options_resolve(o, s->inclusive);
    p->leaves = power_of_two(s->experts);
    p->tops = power_of_two(s->layers);
    for (int k = 0; k < 2; k++) {
        p->edge[k] = edge_of(s, k, &p->lower[k]);
        p->second[k] = -1;
    }
    const bool still = p->o.strategy == AFF_PLACE_STATIC;
    p->spare[0] = spare_of(p->o.shadow, s->slab_slots, still);
    p->spare[1] = spare_of(s->pool_spare, s->pool_slots, still);
    const aff_status st = allocate(p, err);
    if (st != AFF_OK) {
        aff__placement_free(p);
        return st;
    }
    memset(p->tier, AFF_TIER_DISK, (size_t)s->layers * (size_t)s->experts);
    for (int t = 0; t < TREES; t++)
        if (p->top[t]) memset(p->top[t], 0xff, 2 * (size_t)p->tops * sizeof *p->top[t]);
    for (int t = 0; t < TREES; t++)
        if (p->tree[t]) memset(p->tree[t], 0xff, (size_t)s->layers * 2 * (size_t)p->leaves * sizeof *p->tree[t]);
    for (int l = 0; l < s->layers; l++) {
        p->scale[l] = 1;
        p->count[AFF_TIER_DISK][l] = s->experts;
        aff__placement_rebuild(p, l);
        aff__placement_layer_changed(p, l);
    }
    *out = p;
    return AFF_OK;
}

void aff__placement_free(aff_placement *p)
{
    if (!p) return;
    void *const all[] = {p->decode,   p->prefill,  p->key,      p->scale,   p->tier,     p->mark,
                         p->to,       p->held,     p->asked,    p->seen,    p->above[0], p->above[1],
                         p->count[0], p->count[1], p->count[2], p->tree[0], p->tree[1],  p->tree[2],
                         p->tree[3],  p->top[0],   p->top[1],   p->top[2],  p->top[3]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p);
}

/* ---- slots ---- */

static int64_t slots_of(const aff_placement *p, int tier)
{
    return tier == AFF_TIER_CARD ? p->shape.slab_slots : p->shape.pool_slots;
}

/* Slots of a tier that nobody is in, was in, or goes into; may be negative after a resize. */
static int64_t free_of(const aff_placement *p, int tier)
{
    return slots_of(p, tier) - p->used[tier] - p->reserved[tier] - p->quarantined[tier];
}

static bool takes_slot(const aff_placement *p, aff_tier from, aff_tier to)
{
    return to != AFF_TIER_DISK && !(p->shape.inclusive && from == AFF_TIER_CARD && to == AFF_TIER_HOST);
}
static bool leaves_slot(const aff_placement *p, aff_tier from, aff_tier to)
{
    return takes_slot(p, to, from);
}

/* Puts an expert elsewhere in the books. */
static void settle(aff_placement *p, int64_t i, aff_tier to)
{
    const int layer = (int)(i / p->shape.experts);
    const aff_tier from = (aff_tier)p->tier[i];
    if (takes_slot(p, from, to)) p->used[to]++;
    if (leaves_slot(p, from, to)) p->used[from]--;
    p->count[from][layer]--;
    p->count[to][layer]++;
    p->tier[i] = (uint8_t)to;
}

/* What a move does to the counts by which ties are broken. */
static void shift(aff_placement *p, int layer, aff_tier from, aff_tier to)
{
    for (int k = 0; k < 2; k++) p->above[k][layer] += ((int)to <= k) - ((int)from <= k);
}

static void changed(aff_placement *p, int layer, int e)
{
    aff__placement_touch(p, layer, e);
    aff__placement_layer_changed(p, layer);
}

static bool in_range(const aff_placement *p, int layer, int e)
{
    return layer >= 0 && layer < p->shape.layers && e >= 0 && e < p->shape.experts;
}

aff_status aff__placement_put(aff_placement *p, int layer, int e, aff_tier tier, aff_error *err)
{
    if (!in_range(p, layer, e) || tier < AFF_TIER_CARD || tier > AFF_TIER_DISK)
        return aff__fail(err, AFF_E_INVALID, "placement: expert %d of layer %d into tier %d: out of range", e, layer,
                         (int)tier);
    const int64_t i = place_index(p, layer, e);
    if (p->tier[i] != AFF_TIER_DISK || p->mark[i] & MARK_BUSY)
        return aff__fail(err, AFF_E_INVALID, "placement: expert %d of layer %d is not on disk any more", e, layer);
    if (tier == AFF_TIER_DISK) return AFF_OK;
    const bool both = tier == AFF_TIER_CARD && p->shape.inclusive;
    if (free_of(p, tier) < 1 || (both && free_of(p, AFF_TIER_HOST) < 1))
        return aff__fail(err, AFF_E_INVALID, "placement: expert %d of layer %d: no free slot in tier %d", e, layer,
                         (int)tier);
    if (both) settle(p, i, AFF_TIER_HOST);
    settle(p, i, tier);
    shift(p, layer, AFF_TIER_DISK, tier);
    changed(p, layer, e);
    return AFF_OK;
}

typedef struct ranked {
    float value;
    int32_t e, layer;
} ranked;

static int by_rank(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->value != y->value) return x->value > y->value ? -1 : 1;
    if (x->e != y->e) return x->e < y->e ? -1 : 1;
    return x->layer < y->layer ? -1 : x->layer > y->layer;
}

aff_status aff__placement_fill(aff_placement *p, const float *profile, aff_error *err)
{
    const int E = p->shape.experts;
    const int64_t all = (int64_t)p->shape.layers * E;
    ranked *r;
    for (int64_t i = 0; profile && i < all; i++)
        if (!isfinite(profile[i]))
            return aff__fail(err, AFF_E_INVALID, "profile: expert %lld of layer %lld: expected a finite number",
                             (long long)(i % E), (long long)(i / E));
    for (int64_t i = 0; i < all; i++)
        if (p->tier[i] != AFF_TIER_DISK || p->mark[i] & MARK_BUSY)
            return aff__fail(err, AFF_E_INVALID, "placement: filled already");
    AFF_TRY(aff__calloc(&r, (uint64_t)all, sizeof *r, "ranking of the experts", err));
    for (int64_t i = 0; i < all; i++) r[i] = (ranked){profile ? profile[i] : 0, (int32_t)(i % E), (int32_t)(i / E)};
    qsort(r, (size_t)all, sizeof *r, by_rank);
    /* Spare slots are for moves, of which there are none where everything fits. */
    const int64_t slab = p->shape.slab_slots >= all ? all : p->shape.slab_slots - p->spare[0],
                  wanted = p->shape.inclusive ? all : all - slab,
                  pool = p->shape.pool_slots >= wanted ? wanted : p->shape.pool_slots - p->spare[1];
    aff_status s = AFF_OK;
    for (int64_t i = 0; i < all && s == AFF_OK; i++) {
        const bool room = p->used[1] < pool;
        const aff_tier t = p->used[0] < slab && (room || !p->shape.inclusive) ? AFF_TIER_CARD
                           : room                                             ? AFF_TIER_HOST
                                                                              : AFF_TIER_DISK;
        s = aff__placement_put(p, r[i].layer, r[i].e, t, err);
    }
    free(r);
    return s;
}

/* ---- a dispatch ---- */

static aff_status check_use(aff_placement *p, const aff_placement_use *u, aff_error *err)
{
    const int E = p->shape.experts;
    if (u->layer < 0 || u->layer >= p->shape.layers || u->n < 0 || u->n > E || u->n_near < 0 || u->n_near > E)
        return aff__fail(err, AFF_E_INVALID, "placement: layer %d used %d experts and missed %d: out of range",
                         u->layer, u->n, u->n_near);
    for (int half = 0; half < 2; half++) {
        const int32_t *id = half ? u->near : u->id;
        if (++p->seen_now == 0) { /* once in 2^32 */
            memset(p->seen, 0, (size_t)E * sizeof *p->seen);
            p->seen_now = 1;
        }
        for (int i = 0; i < (half ? u->n_near : u->n); i++) {
            if (id[i] < 0 || id[i] >= E || p->seen[id[i]] == p->seen_now)
                return aff__fail(err, AFF_E_INVALID,
                                 "placement: layer %d: expert %d of 0 to %d is out of range or comes twice", u->layer,
                                 (int)id[i], E - 1);
            if (half ? !(u->score[i] >= 0 && u->score[i] <= 1) : u->count && u->count[i] < 1)
                return aff__fail(err, AFF_E_INVALID, "placement: layer %d, expert %d: %s %g is out of range", u->layer,
                                 (int)id[i], half ? "score" : "count",
                                 half ? (double)u->score[i] : (double)u->count[i]);
            p->seen[id[i]] = p->seen_now;
        }
    }
    return AFF_OK;
}

static int by_id(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

aff_status aff__placement_note(aff_placement *p, const aff_placement_use *u, aff_error *err)
{
    AFF_TRY(check_use(p, u, err));
    const int phase = u->phase == AFF_USE_PREFILL;
    p->n.notes[phase]++;
    for (int i = 0; i < u->n; i++) p->n.used[phase][p->tier[place_index(p, u->layer, u->id[i])]]++;
    aff__placement_warm(p, u);
    p->left[0] = p->left[1] = p->o.moves;
    if (p->o.strategy == AFF_PLACE_DEMAND) {
        if (u->n) memcpy(p->asked, u->id, (size_t)u->n * sizeof *p->asked);
        qsort(p->asked, (size_t)u->n, sizeof *p->asked, by_id);
        p->n_asked = u->n;
        p->asked_layer = u->layer;
        p->at_asked[0] = p->at_asked[1] = 0;
    }
    return AFF_OK;
}

/* ---- moves ---- */

static void issue(aff_placement *p, int64_t i, aff_tier to, aff_move *out)
{
    const int layer = (int)(i / p->shape.experts), e = (int)(i % p->shape.experts);
    const aff_tier from = (aff_tier)p->tier[i];
    *out = (aff_move){layer, e, from, to, takes_slot(p, from, to)};
    p->mark[i] |= MARK_BUSY;
    p->to[i] = (uint8_t)to;
    if (out->copy) p->reserved[to]++;
    if (leaves_slot(p, from, to)) p->leaving[from]++;
    shift(p, layer, from, to);
    p->n.in_flight++;
    changed(p, layer, e);
}

int64_t aff__placement_excess(const aff_placement *p, aff_tier tier)
{
    if (tier >= AFF_TIER_DISK) return 0;
    const int64_t f = free_of(p, tier);
    return f < 0 ? -f : 0;
}

/* Slots that must be emptied beyond those that are being: the tier's own, and in an exclusive pool those that a smaller
 * slab needs there. */
static int64_t to_empty(const aff_placement *p, int edge)
{
    int64_t n = -free_of(p, edge);
    if (edge == 1 && p->edge[0] && p->lower[0] == AFF_TIER_HOST && !p->shape.inclusive) {
        const int64_t more = to_empty(p, 0);
        if (more > 0) n += more;
    }
    return n - p->leaving[edge];
}

/* Free slots that moves over an edge leave alone: its spare ones, and in an exclusive pool those that the slab is owed,
 * which it gave up when experts came up before others went down. */
static int64_t kept_free(const aff_placement *p, int edge)
{
    const bool owes = edge == 1 && p->edge[0] && p->lower[0] == AFF_TIER_HOST && !p->shape.inclusive;
    const int64_t owed = owes ? p->spare[0] - free_of(p, 0) - p->leaving[0] : 0;
    return p->spare[edge] + (owed > 0 ? owed : 0);
}

static bool lower_has_room(const aff_placement *p, int edge)
{
    return p->lower[edge] == AFF_TIER_DISK || p->shape.inclusive || free_of(p, AFF_TIER_HOST) > 0;
}

/* The next expert that may go up, -1: none. */
static int64_t candidate(aff_placement *p, int edge)
{
    if (p->o.strategy == AFF_PLACE_HEAT) return aff__placement_best(p, tree_of(edge, TREE_UP));
    for (; p->at_asked[edge] < p->n_asked; p->at_asked[edge]++) {
        const int64_t i = place_index(p, p->asked_layer, p->asked[p->at_asked[edge]]);
        if (p->tier[i] == p->lower[edge] && !(p->mark[i] & MARK_FIXED)) return i;
    }
    return -1;
}

/* A pair that may change places, or (*cold < 0) an expert for an empty slot. False: none, and none in this round. */
static bool find_pair(aff_placement *p, int edge, int64_t *hot, int64_t *cold)
{
    const double times = edge ? p->o.disk_hysteresis : p->o.hysteresis,
                 gain = edge ? p->o.disk_min_gain : p->o.min_gain;
    const bool empty = free_of(p, edge) > kept_free(p, edge);
    for (;;) {
        *hot = candidate(p, edge);
        *cold = empty ? -1 : aff__placement_best(p, tree_of(edge, TREE_DOWN));
        p->n.rounds[edge]++;
        if (*hot < 0 || (*cold < 0 && !empty)) {
            p->n.no_supply[edge]++;
            return false;
        }
        if (heat_now(p, *hot) >= (*cold < 0 ? 0 : heat_now(p, *cold)) * times + gain) return true;
        p->n.refused[edge]++;
        if (p->o.strategy == AFF_PLACE_HEAT) return false;
        p->at_asked[edge]++;
    }
}

/* Out of slots that are to be emptied. */
static bool vacate(aff_placement *p, int edge, aff_move *out)
{
    if (to_empty(p, edge) <= 0) return false;
    const int64_t cold = aff__placement_best(p, tree_of(edge, TREE_DOWN));
    if (cold < 0) return false;
    if (!lower_has_room(p, edge)) {
        p->n.starved_down[edge]++;
        return false;
    }
    issue(p, cold, p->lower[edge], out);
    return true;
}

static bool swap(aff_placement *p, int edge, aff_move *out)
{
    int64_t hot, cold;
    if (p->left[edge] < 1 || p->o.strategy == AFF_PLACE_STATIC) return false;
    if (!find_pair(p, edge, &hot, &cold)) {
        p->left[edge] = 0;
        return false;
    }
    const int64_t kept = kept_free(p, edge), spare = kept > 1 ? kept : 1;
    const bool up = free_of(p, edge) > 0, room = lower_has_room(p, edge),
               down = cold >= 0 && room && (up || free_of(p, edge) + p->leaving[edge] < spare);
    p->n.starved_up[edge] += !up;
    p->n.starved_down[edge] += cold >= 0 && !room;
    if (!up && !down) {
        p->left[edge] = 0;
        return false;
    }
    p->left[edge]--;
    if (!up) {
        issue(p, cold, p->lower[edge], out);
        return true;
    }
    issue(p, hot, (aff_tier)edge, out);
    if (down && !(p->mark[cold] & MARK_FIXED)) p->second[edge] = cold;
    return true;
}

bool aff__placement_next(aff_placement *p, aff_tier upper, aff_move *out)
{
    const int edge = (int)upper;
    if (edge < 0 || edge > 1 || !p->edge[edge]) return false;
    if (vacate(p, edge, out)) return true;
    const int64_t cold = p->second[edge];
    p->second[edge] = -1;
    if (cold >= 0 && p->tier[cold] == (uint8_t)edge && !(p->mark[cold] & MARK_FIXED) && lower_has_room(p, edge)) {
        issue(p, cold, p->lower[edge], out);
        return true;
    }
    return swap(p, edge, out);
}

/* The edge that a move crosses, -1: none. */
static int crossed(const aff_placement *p, aff_tier from, aff_tier to)
{
    for (int k = 0; k < 2; k++)
        if (p->edge[k] && ((from == (aff_tier)k && to == p->lower[k]) || (to == (aff_tier)k && from == p->lower[k])))
            return k;
    return -1;
}

bool aff__placement_force(aff_placement *p, int layer, int e, aff_tier from, aff_tier to, aff_move *out)
{
    if (!in_range(p, layer, e) || crossed(p, from, to) < 0) return false;
    const int64_t i = place_index(p, layer, e);
    if (p->tier[i] != (uint8_t)from || p->mark[i] & (MARK_BUSY | MARK_PINNED) ||
        (takes_slot(p, from, to) && free_of(p, to) < 1))
        return false;
    issue(p, i, to, out);
    return true;
}

/* Of a move under way its expert, else -1. */
static int64_t under_way(const aff_placement *p, const aff_move *m)
{
    if (!in_range(p, m->layer, m->expert)) return -1;
    const int64_t i = place_index(p, m->layer, m->expert);
    return p->mark[i] & MARK_BUSY && p->tier[i] == (uint8_t)m->from && p->to[i] == (uint8_t)m->to ? i : -1;
}

aff_status aff__placement_landed(aff_placement *p, const aff_move *m)
{
    const int64_t i = under_way(p, m), all = (int64_t)p->shape.layers * p->shape.experts;
    if (i < 0) return AFF_E_INVALID;
    const int k = crossed(p, m->from, m->to);
    const bool up = m->to < m->from;
    if (takes_slot(p, m->from, m->to)) p->reserved[m->to]--;
    if (leaves_slot(p, m->from, m->to)) {
        p->quarantined[m->from]++;
        p->held[(int)m->from * all + i]++;
    }
    settle(p, i, m->to);
    if (up) {
        p->n.distinct[k] += !(p->mark[i] & MARK_UP << k);
        p->n.readmits[k] += (p->mark[i] & MARK_DOWN << k) != 0;
        p->n.promotions[k]++;
    } else {
        p->n.demotions[k]++;
    }
    p->mark[i] = (uint8_t)((p->mark[i] & ~MARK_BUSY) | (up ? MARK_UP : MARK_DOWN) << k);
    p->n.in_flight--;
    changed(p, m->layer, m->expert);
    return AFF_OK;
}

aff_status aff__placement_failed(aff_placement *p, const aff_move *m)
{
    const int64_t i = under_way(p, m);
    if (i < 0) return AFF_E_INVALID;
    if (takes_slot(p, m->from, m->to)) p->reserved[m->to]--;
    if (leaves_slot(p, m->from, m->to)) p->leaving[m->from]--;
    shift(p, m->layer, m->to, m->from);
    p->n.failed[crossed(p, m->from, m->to)]++;
    p->mark[i] = (uint8_t)((p->mark[i] & ~MARK_BUSY) | MARK_BARRED);
    p->n.in_flight--;
    changed(p, m->layer, m->expert);
    return AFF_OK;
}

aff_status aff__placement_released(aff_placement *p, const aff_move *m)
{
    if (!in_range(p, m->layer, m->expert) || crossed(p, m->from, m->to) < 0) return AFF_E_INVALID;
    if (!leaves_slot(p, m->from, m->to)) return AFF_OK;
    uint8_t *held =
        &p->held[(int64_t)m->from * p->shape.layers * p->shape.experts + place_index(p, m->layer, m->expert)];
    if (!*held) return AFF_E_INVALID;
    --*held;
    p->quarantined[m->from]--;
    p->leaving[m->from]--;
    return AFF_OK;
}

aff_status aff__placement_resize(aff_placement *p, aff_tier tier, int64_t slots, aff_error *err)
{
    const bool slab = tier == AFF_TIER_CARD;
    if (tier < AFF_TIER_CARD || tier > AFF_TIER_HOST || !p->edge[(int)tier] || slots < 0 || slots > INT64_MAX / 4)
        return aff__fail(err, AFF_E_INVALID, "placement: tier %d cannot have %lld slots", (int)tier, (long long)slots);
    if (p->shape.inclusive && (slab ? slots > p->shape.pool_slots : slots < p->shape.slab_slots))
        return aff__fail(err, AFF_E_INVALID,
                         "placement: tier %d of %lld slots: an inclusive pool cannot be smaller than the slab",
                         (int)tier, (long long)slots);
    *(slab ? &p->shape.slab_slots : &p->shape.pool_slots) = slots;
    p->spare[tier] = spare_of(slab ? p->o.shadow : p->shape.pool_spare, slots, p->o.strategy == AFF_PLACE_STATIC);
    return AFF_OK;
}

void aff__placement_pin(aff_placement *p, int layer, int e, bool pinned)
{
    if (!in_range(p, layer, e)) return;
    uint8_t *m = &p->mark[place_index(p, layer, e)];
    *m = (uint8_t)(pinned ? *m | MARK_PINNED : *m & ~MARK_PINNED);
    changed(p, layer, e);
}

/* ---- what is ---- */

aff_tier aff__placement_tier(const aff_placement *p, int layer, int e)
{
    return (aff_tier)p->tier[place_index(p, layer, e)];
}
bool aff__placement_busy(const aff_placement *p, int layer, int e)
{
    return p->mark[place_index(p, layer, e)] & MARK_BUSY;
}
float aff__placement_heat(const aff_placement *p, int layer, int e)
{
    return (float)heat_now(p, place_index(p, layer, e));
}
int aff__placement_residents(const aff_placement *p, int layer, aff_tier tier)
{
    return p->count[tier][layer];
}
aff_placement_shape aff__placement_shape_now(const aff_placement *p)
{
    return p->shape;
}
aff_placement_options aff__placement_options_now(const aff_placement *p)
{
    return p->o;
}
aff_placement_counts aff__placement_counts_now(const aff_placement *p)
{
    return p->n;
}

int64_t aff__placement_free_slots(const aff_placement *p, aff_tier tier)
{
    const int64_t n = tier >= AFF_TIER_DISK ? 0 : free_of(p, tier);
    return n > 0 ? n : 0;
}

void aff__placement_planes(const aff_placement *p, float *heat, uint8_t *tier)
{
    const int64_t all = (int64_t)p->shape.layers * p->shape.experts;
    for (int64_t i = 0; heat && i < all; i++) heat[i] = (float)heat_now(p, i);
    if (tier) memcpy(tier, p->tier, (size_t)all);
}
