/* experts/placement against a model that does everything the slow way: all heats decayed at every dispatch, the hottest
 * and the coldest looked for among all experts. With powers of two as factors both compute the same numbers, so every
 * choice must be the same one. */
#include "support/test.h"
#include "base/mem.h"
#include "base/rng.h"
#include "experts/placement.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

enum { MOST = 512, FLYING = 64 };

typedef struct model {
    aff_placement_shape s;
    aff_placement_options o;
    double decode[MOST], prefill[MOST];
    int tier[MOST], to[MOST]; /* to: -1 unless it moves */
    bool pinned[MOST], barred[MOST], upped[2][MOST], downed[2][MOST];
    int64_t quarantined[2], left[2], spare[2];
    int second[2];
    int asked[MOST], n_asked, at[2];
    aff_placement_counts n;
} model;

static int all_of(const model *m)
{
    return m->s.layers * m->s.experts;
}
static bool has_edge(const model *m, int k)
{
    return k ? m->s.pool_slots > 0 : m->s.slab_slots > 0;
}
static int lower_of(const model *m, int k)
{
    return k == 0 && m->s.pool_slots > 0 ? 1 : 2;
}
static bool stays(const model *m, int from, int to)
{
    return m->s.inclusive && from == 1 && to == 0;
} /* the slot left behind */
static double heat_of(const model *m, int i)
{
    return m->decode[i] + m->o.prefill_weight * m->prefill[i];
}

/* Slots of a tier that are taken: by experts, copies, moves under way, and places not yet released. */
static int64_t free_of(const model *m, int t)
{
    int64_t used = m->quarantined[t];
    for (int i = 0; i < all_of(m); i++) {
        used += m->tier[i] == t || (t == 1 && m->s.inclusive && m->tier[i] == 0);
        used += m->to[i] == t && !(t == 1 && m->s.inclusive && m->tier[i] == 0);
    }
    return (t ? m->s.pool_slots : m->s.slab_slots) - used;
}
static int64_t leaving(const model *m, int t)
{
    int64_t n = m->quarantined[t];
    for (int i = 0; i < all_of(m); i++) n += m->to[i] >= 0 && m->tier[i] == t && !stays(m, t, m->to[i]);
    return n;
}
static int above(const model *m, int k, int layer)
{
    int n = 0;
    for (int i = layer * m->s.experts; i < (layer + 1) * m->s.experts; i++)
        n += (m->to[i] >= 0 ? m->to[i] : m->tier[i]) <= k;
    return n;
}
static int best(const model *m, int k, bool up)
{
    int b = -1;
    for (int i = 0; i < all_of(m); i++) {
        if (m->tier[i] != (up ? lower_of(m, k) : k) || m->to[i] >= 0 || m->pinned[i] || m->barred[i]) continue;
        if (b >= 0) {
            const double x = heat_of(m, i), y = heat_of(m, b);
            const int ax = above(m, k, i / m->s.experts), ay = above(m, k, b / m->s.experts);
            if (x != y ? (up ? x < y : x > y) : (up ? ax >= ay : ax <= ay)) continue;
        }
        b = i;
    }
    return b;
}

static bool owes(const model *m, int k)
{
    return k == 1 && has_edge(m, 0) && lower_of(m, 0) == 1 && !m->s.inclusive;
}
static int64_t more(int64_t n)
{
    return n > 0 ? n : 0;
}
static int64_t to_empty(const model *m, int k)
{
    return -free_of(m, k) + (owes(m, k) ? more(to_empty(m, 0)) : 0) - leaving(m, k);
}
static int64_t kept(const model *m, int k)
{
    return m->spare[k] + (owes(m, k) ? more(m->spare[0] - free_of(m, 0) - leaving(m, 0)) : 0);
}
static bool room_below(const model *m, int k)
{
    return lower_of(m, k) == 2 || m->s.inclusive || free_of(m, 1) > 0;
}
static bool fixed(const model *m, int i)
{
    return m->to[i] >= 0 || m->pinned[i] || m->barred[i];
}

static int issue(model *m, int i, int to)
{
    m->to[i] = to;
    m->n.in_flight++;
    return i;
}

static int candidate(model *m, int k)
{
    if (m->o.strategy == AFF_PLACE_HEAT) return best(m, k, true);
    for (; m->at[k] < m->n_asked; m->at[k]++)
        if (m->tier[m->asked[m->at[k]]] == lower_of(m, k) && !fixed(m, m->asked[m->at[k]])) return m->asked[m->at[k]];
    return -1;
}

/* The expert that moves, to m->to; -1: none. */
static int model_next(model *m, int k)
{
    const double times = k ? m->o.disk_hysteresis : m->o.hysteresis, gain = k ? m->o.disk_min_gain : m->o.min_gain;
    if (!has_edge(m, k)) return -1;
    if (to_empty(m, k) > 0) {
        const int cold = best(m, k, false);
        if (cold >= 0 && room_below(m, k)) return issue(m, cold, lower_of(m, k));
        m->n.starved_down[k] += cold >= 0;
    }
    const int second = m->second[k];
    m->second[k] = -1;
    if (second >= 0 && m->tier[second] == k && !fixed(m, second) && room_below(m, k))
        return issue(m, second, lower_of(m, k));
    if (m->left[k] < 1 || m->o.strategy == AFF_PLACE_STATIC) return -1;
    const bool empty = free_of(m, k) > kept(m, k);
    int hot, cold;
    for (;;) {
        m->n.rounds[k]++;
        hot = candidate(m, k);
        cold = empty ? -1 : best(m, k, false);
        if (hot < 0 || (cold < 0 && !empty)) {
            m->n.no_supply[k]++;
            m->left[k] = 0;
            return -1;
        }
        if (heat_of(m, hot) >= (cold < 0 ? 0 : heat_of(m, cold)) * times + gain) break;
        m->n.refused[k]++;
        if (m->o.strategy == AFF_PLACE_HEAT) {
            m->left[k] = 0;
            return -1;
        }
        m->at[k]++;
    }
    const bool up = free_of(m, k) > 0, room = room_below(m, k),
               down = cold >= 0 && room && (up || free_of(m, k) + leaving(m, k) < (kept(m, k) > 1 ? kept(m, k) : 1));
    m->n.starved_up[k] += !up;
    m->n.starved_down[k] += cold >= 0 && !room;
    m->left[k] = up || down ? m->left[k] - 1 : 0;
    if (up && down) m->second[k] = cold;
    return up ? issue(m, hot, k) : down ? issue(m, cold, lower_of(m, k)) : -1;
}

static void model_note(model *m, const aff_placement_use *u)
{
    const int first = u->layer * m->s.experts, E = m->s.experts;
    const bool pre = u->phase == AFF_USE_PREFILL;
    m->n.notes[pre]++;
    for (int i = first; i < first + E; i++) {
        if (!pre) m->decode[i] *= m->o.decay;
        m->prefill[i] *= pre ? m->o.prefill_decay : m->o.decay;
    }
    bool used[MOST] = {false};
    for (int k = 0; k < u->n; k++) {
        const int i = first + u->id[k];
        m->n.used[pre][m->tier[i]]++;
        *(pre ? &m->prefill[i] : &m->decode[i]) +=
            fmin(u->count ? u->count[k] : 1, pre ? m->o.prefill_credit : m->o.credit);
        m->barred[i] = false;
        used[u->id[k]] = true;
    }
    for (int k = 0; k < u->n_near && !pre; k++) m->decode[first + u->near[k]] += m->o.near * (double)u->score[k];
    m->n_asked = m->at[0] = m->at[1] = 0;
    for (int e = 0; e < E; e++)
        if (used[e]) m->asked[m->n_asked++] = first + e;
    m->left[0] = m->left[1] = m->o.moves;
}

static void model_landed(model *m, const aff_move *v)
{
    const int i = v->layer * m->s.experts + v->expert, k = v->to < v->from ? (int)v->to : (int)v->from;
    if (v->from != AFF_TIER_DISK && !stays(m, v->from, v->to)) m->quarantined[v->from]++;
    if (v->to < v->from) {
        m->n.promotions[k]++;
        m->n.distinct[k] += !m->upped[k][i];
        m->n.readmits[k] += m->downed[k][i];
        m->upped[k][i] = true;
    } else {
        m->n.demotions[k]++;
        m->downed[k][i] = true;
    }
    m->tier[i] = v->to;
    m->to[i] = -1;
    m->n.in_flight--;
}

static void agree(const model *m, const aff_placement *p)
{
    const aff_placement_counts n = aff__placement_counts_now(p);
    assert_memory_equal(&n, &m->n, sizeof n);
    int64_t count[3] = {0};
    for (int i = 0; i < all_of(m); i++) {
        const int l = i / m->s.experts, e = i % m->s.experts;
        assert_int_equal(aff__placement_tier(p, l, e), m->tier[i]);
        assert_int_equal(aff__placement_busy(p, l, e), m->to[i] >= 0);
        assert_float_equal(aff__placement_heat(p, l, e), heat_of(m, i), 1e-6 * (1 + heat_of(m, i)));
        count[m->tier[i]]++;
    }
    for (int t = 0; t < 3; t++) {
        int64_t have = 0;
        for (int l = 0; l < m->s.layers; l++) have += aff__placement_residents(p, l, (aff_tier)t);
        assert_int_equal(have, count[t]);
    }
    for (int t = 0; t < 2; t++) {
        assert_int_equal(aff__placement_free_slots(p, (aff_tier)t), more(free_of(m, t)));
        assert_int_equal(aff__placement_excess(p, (aff_tier)t), more(-free_of(m, t)));
    }
}

typedef struct run {
    model m;
    aff_placement *p;
    uint64_t seed;
    aff_move flying[FLYING], left[FLYING];
    int n_flying, n_left;
    bool exact;
} run;

static int dice(run *r, int n)
{
    return (int)(aff__splitmix64(&r->seed) % (uint64_t)n);
}

static int64_t clipped(int64_t wanted, int64_t slots, bool still)
{
    return still ? 0 : wanted < slots / 32 ? wanted : slots / 32;
}

static void start(run *r, aff_placement_shape s, aff_placement_options o, const float *profile)
{
    must(aff__placement_create(&r->p, &s, &o, &err));
    r->m.s = s;
    r->m.o = aff__placement_options_now(r->p);
    r->m.spare[0] = clipped(r->m.o.shadow, s.slab_slots, o.strategy == AFF_PLACE_STATIC);
    r->m.spare[1] = clipped(s.pool_spare, s.pool_slots, o.strategy == AFF_PLACE_STATIC);
    r->m.second[0] = r->m.second[1] = -1;
    must(aff__placement_fill(r->p, profile, &err));
    for (int i = 0; i < all_of(&r->m); i++) {
        r->m.tier[i] = aff__placement_tier(r->p, i / s.experts, i % s.experts);
        r->m.to[i] = -1;
    }
    agree(&r->m, r->p);
}

static void event_note(run *r)
{
    int32_t id[MOST], count[MOST], near[MOST];
    float score[MOST];
    const int E = r->m.s.experts;
    aff_placement_use u = {.layer = dice(r, r->m.s.layers),
                           .phase = dice(r, 8) ? AFF_USE_DECODE : AFF_USE_PREFILL,
                           .id = id,
                           .count = dice(r, 4) ? count : NULL,
                           .near = near,
                           .score = score};
    const int rarity = u.phase == AFF_USE_PREFILL ? 2 : 4;
    for (int e = 0; e < E; e++) {
        const bool hot = e % 5 == u.layer % 5; /* some are used more often than others */
        if (dice(r, hot ? 2 : 2 * rarity) == 0) {
            id[u.n] = E - 1 - e; /* any order */
            count[u.n++] = 1 + dice(r, dice(r, 3) ? 3 : 20);
        } else if (dice(r, 8) == 0) {
            near[u.n_near] = E - 1 - e;
            score[u.n_near++] = (float)dice(r, 9) / 8;
        }
    }
    must(aff__placement_note(r->p, &u, &err));
    model_note(&r->m, &u);
}

static void event_next(run *r)
{
    aff_move v;
    if (r->n_flying == FLYING) return;
    const int k = dice(r, 2);
    const bool got = aff__placement_next(r->p, (aff_tier)k, &v);
    const int want = model_next(&r->m, k);
    assert_int_equal(got, want >= 0);
    if (!got) return;
    assert_int_equal(v.layer * r->m.s.experts + v.expert, want);
    assert_int_equal(v.from, r->m.tier[want]);
    assert_int_equal(v.to, r->m.to[want]);
    assert_int_equal(v.copy, v.to != AFF_TIER_DISK && !(r->m.s.inclusive && v.from == AFF_TIER_CARD));
    r->flying[r->n_flying++] = v;
}

static void event_done(run *r)
{
    if (r->n_left && dice(r, 2)) {
        const int i = dice(r, r->n_left);
        const aff_move v = r->left[i];
        assert_int_equal(aff__placement_released(r->p, &v), AFF_OK);
        if (v.from != AFF_TIER_DISK && !stays(&r->m, v.from, v.to)) r->m.quarantined[v.from]--;
        r->left[i] = r->left[--r->n_left];
    } else if (r->n_flying && r->n_left < FLYING) {
        const int i = dice(r, r->n_flying);
        const aff_move v = r->flying[i];
        r->flying[i] = r->flying[--r->n_flying];
        if (dice(r, 16)) {
            assert_int_equal(aff__placement_landed(r->p, &v), AFF_OK);
            assert_int_equal(aff__placement_landed(r->p, &v), AFF_E_INVALID);
            model_landed(&r->m, &v);
            r->left[r->n_left++] = v;
        } else {
            const int x = v.layer * r->m.s.experts + v.expert;
            assert_int_equal(aff__placement_failed(r->p, &v), AFF_OK);
            r->m.n.failed[v.to < v.from ? (int)v.to : (int)v.from]++;
            r->m.to[x] = -1;
            r->m.barred[x] = true;
            r->m.n.in_flight--;
        }
    }
}

/* Pins, forced moves and other sizes. */
static void event_rare(run *r)
{
    model *m = &r->m;
    const int i = dice(r, all_of(m)), l = i / m->s.experts, e = i % m->s.experts, k = dice(r, 2);
    if (dice(r, 3) == 0) {
        m->pinned[i] = !m->pinned[i];
        aff__placement_pin(r->p, l, e, m->pinned[i]);
    } else if (dice(r, 2)) {
        const int64_t slots = 1 + dice(r, all_of(m) + 4);
        const bool ok = has_edge(m, k) && !(m->s.inclusive && (k ? slots < m->s.slab_slots : slots > m->s.pool_slots));
        assert_int_equal(aff__placement_resize(r->p, (aff_tier)k, slots, &err), ok ? AFF_OK : AFF_E_INVALID);
        if (!ok) return;
        *(k ? &m->s.pool_slots : &m->s.slab_slots) = slots;
        m->spare[k] = clipped(k ? m->s.pool_spare : m->o.shadow, slots, m->o.strategy == AFF_PLACE_STATIC);
    } else if (r->n_flying < FLYING) {
        aff_move v;
        const int from = dice(r, 3), to = dice(r, 3), up = from < to ? from : to;
        const bool copies = to < 2 && !(m->s.inclusive && from == 0),
                   ok = from != to && has_edge(m, up > 1 ? 1 : up) && (from > to ? from : to) == lower_of(m, up) &&
                        m->tier[i] == from && m->to[i] < 0 && !m->pinned[i] && (!copies || free_of(m, to) > 0);
        assert_int_equal(aff__placement_force(r->p, l, e, (aff_tier)from, (aff_tier)to, &v), ok);
        if (ok) {
            issue(m, i, to);
            r->flying[r->n_flying++] = v;
        }
    }
}

static int64_t play(aff_placement_shape s, aff_placement_options o, int events, uint64_t seed)
{
    static run r;
    r = (run){.seed = seed};
    float profile[MOST];
    for (int i = 0; i < MOST; i++) profile[i] = (float)dice(&r, 5);
    start(&r, s, o, profile);
    for (int n = 0; n < events; n++) {
        const int what = dice(&r, 1000);
        if (what < 150)
            event_note(&r);
        else if (what < 600)
            event_next(&r);
        else if (what < 998)
            event_done(&r);
        else
            event_rare(&r);
        if (n % 997 == 0) agree(&r.m, r.p);
    }
    agree(&r.m, r.p);
    const aff_placement_counts c = aff__placement_counts_now(r.p);
    aff__placement_free(r.p);
    return c.promotions[0] + c.promotions[1] + c.demotions[0] + c.demotions[1];
}

/* Factors that are powers of two. */
static aff_placement_options exact_options(aff_placement_strategy strategy)
{
    aff_placement_options o;
    aff__placement_options_init(&o);
    o.strategy = strategy;
    o.decay = 0.5;
    o.prefill_decay = 0.5;
    o.prefill_weight = 0.25;
    o.near = 0.5;
    o.shadow = 3;
    o.moves = 3;
    return o;
}

static void equals_the_slow_model(void **state)
{
    /* slab, pool, spare pool slots, inclusive, of 4 x 10 experts */
    static const struct {
        int slab, pool, spare;
        bool inclusive;
    } sizes[] = {{18, 26, 2, false}, {8, 12, 2, false}, {8, 40, 0, true},   {8, 20, 2, true},    {0, 10, 1, false},
                 {0, 1, 0, false},   {1, 39, 0, false}, {1, 1, 0, false},   {40, 0, 0, false},   {12, 0, 0, false},
                 {40, 40, 0, true},  {1, 1, 0, true},   {24, 24, 8, false}, {100, 100, 9, false}};
    enum { SIZES = sizeof sizes / sizeof *sizes, EACH = 1000000 / SIZES / 3 + 1 };
    for (int i = 0; i < SIZES; i++)
        for (int strategy = 0; strategy < 3; strategy++) {
            const aff_placement_shape s = {4, 10, sizes[i].slab, sizes[i].pool, sizes[i].spare, sizes[i].inclusive};
            const int64_t moved =
                play(s, exact_options((aff_placement_strategy)strategy), EACH, (uint64_t)(i * 3 + strategy));
            if (strategy == AFF_PLACE_HEAT && s.slab_slots + s.pool_slots < 40) assert_in_range(moved, 100, EACH);
        }
}

/* The same with several spare slots. */
static void equals_it_with_spare_slots(void **state)
{
    const aff_placement_shape s[] = {{6, 40, 100, 143, 0, false},
                                     {6, 40, 100, 240, 0, true},
                                     {6, 40, 70, 130, 4, false},
                                     {6, 40, 0, 130, 4, false},
                                     {6, 40, 70, 130, 4, true}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++)
        assert_in_range(play(s[i], exact_options(AFF_PLACE_HEAT), 15000, 100 + i), 100, 15000);
}

/* Factors that round: heats stay within rounding of the slow ones through many foldings, and what goes up is the
 * hottest, what goes down the coldest. */
static void heats_with_any_factor(void **state)
{
    static const double decays[] = {0.98, 0.9, 1e-3, 1, 0};
    for (int d = 0; d < 5; d++) {
        run r = {.seed = 7 + (uint64_t)d};
        aff_placement_options o;
        aff__placement_options_init(&o);
        o.decay = decays[d];
        o.moves = 1;
        o.hysteresis = o.min_gain = 0;
        start(&r, (aff_placement_shape){3, 16, 12, 48, 0, true}, o, NULL);
        for (int n = 0; n < 60000; n++) {
            aff_move v;
            event_note(&r);
            const int hot = best(&r.m, 0, true), cold = best(&r.m, 0, false);
            assert_true(aff__placement_next(r.p, AFF_TIER_CARD, &v));
            for (int half = 0; half < 2; half++) {
                const int i = v.layer * 16 + v.expert, want = v.to == AFF_TIER_CARD ? hot : cold;
                assert_float_equal(heat_of(&r.m, i), heat_of(&r.m, want), 1e-9 * (1 + heat_of(&r.m, want)));
                assert_int_equal(aff__placement_landed(r.p, &v), AFF_OK);
                assert_int_equal(aff__placement_released(r.p, &v), AFF_OK);
                r.m.tier[i] = v.to;
                if (!half && !aff__placement_next(r.p, AFF_TIER_CARD, &v)) break;
            }
            const int i = dice(&r, 48);
            assert_float_equal(aff__placement_heat(r.p, i / 16, i % 16), heat_of(&r.m, i), 1e-6 * heat_of(&r.m, i));
        }
        aff__placement_free(r.p);
    }
}

/* Spec runtime 5.2, 5.3 by hand. */
static void use(aff_placement *p, int layer, int n, const int32_t *id, const int32_t *count)
{
    must(aff__placement_note(p, &(aff_placement_use){.layer = layer, .n = n, .id = id, .count = count}, &err));
}

static void is_move(const aff_move *v, int layer, int e, aff_tier to, bool copy)
{
    assert_int_equal(v->layer, layer);
    assert_int_equal(v->expert, e);
    assert_int_equal(v->to, to);
    assert_int_equal(v->copy, copy);
}

static void rules_by_hand(void **state)
{
    aff_placement *p;
    aff_placement_options o;
    aff_move v;
    aff__placement_options_init(&o);
    o.decay = 0.98;
    o.min_gain = 1.5;
    o.hysteresis = 1.25;
    /* 2 x 4, two slots, everything in the pool as well. */
    must(aff__placement_create(&p, &(aff_placement_shape){2, 4, 2, 8, 0, true}, &o, &err));
    must(aff__placement_fill(p, NULL, &err));
    for (int i = 0; i < 8; i++)
        assert_int_equal(aff__placement_tier(p, i / 4, i % 4),
                         i % 4 ? AFF_TIER_HOST : AFF_TIER_CARD); /* every layer its expert 0 */
    use(p, 1, 2, (int32_t[]){3, 2}, (int32_t[]){1, 1});
    assert_false(aff__placement_next(p, AFF_TIER_CARD, &v)); /* 1 < 0 * 1.25 + 1.5 */
    use(p, 1, 1, (int32_t[]){3}, (int32_t[]){1});
    assert_float_equal(aff__placement_heat(p, 1, 3), 1.98, 1e-6);
    assert_float_equal(aff__placement_heat(p, 1, 2), 0.98, 1e-6);
    /* 1.98 suffices. No slot is free: the coldest goes down first, out of the two that are equal the lower layer's. */
    assert_true(aff__placement_next(p, AFF_TIER_CARD, &v));
    is_move(&v, 0, 0, AFF_TIER_HOST, false);
    assert_true(aff__placement_busy(p, 0, 0));
    assert_false(aff__placement_next(p, AFF_TIER_CARD, &v)); /* its slot is on the way */
    v = (aff_move){0, 0, AFF_TIER_CARD, AFF_TIER_HOST, false};
    assert_int_equal(aff__placement_released(p, &v), AFF_E_INVALID); /* not yet */
    assert_int_equal(aff__placement_landed(p, &v), AFF_OK);
    assert_int_equal(aff__placement_free_slots(p, AFF_TIER_CARD), 0);
    assert_int_equal(aff__placement_released(p, &v), AFF_OK);
    assert_int_equal(aff__placement_released(p, &v), AFF_E_INVALID); /* once */
    assert_int_equal(aff__placement_free_slots(p, AFF_TIER_CARD), 1);
    use(p, 0, 0, NULL, NULL);
    assert_true(aff__placement_next(p, AFF_TIER_CARD, &v));
    is_move(&v, 1, 3, AFF_TIER_CARD, true);
    assert_int_equal(aff__placement_failed(p, &v), AFF_OK); /* not again until it is used */
    assert_false(aff__placement_next(p, AFF_TIER_CARD, &v));
    use(p, 1, 1, (int32_t[]){3}, NULL);
    assert_true(aff__placement_next(p, AFF_TIER_CARD, &v));
    assert_int_equal(v.expert, 3);
    assert_int_equal(aff__placement_landed(p, &v), AFF_OK);
    assert_int_equal(aff__placement_residents(p, 1, AFF_TIER_CARD), 2);
    assert_int_equal(aff__placement_residents(p, 0, AFF_TIER_CARD), 0);
    const aff_placement_counts n = aff__placement_counts_now(p);
    assert_int_equal(n.used[AFF_USE_DECODE][AFF_TIER_HOST], 4);
    assert_int_equal(n.promotions[0], 1);
    assert_int_equal(n.failed[0], 1);
    assert_int_equal(n.in_flight, 0);
    aff__placement_free(p);
}

/* Pitfall P37: a long prompt does not outweigh an answer; its heat fades while the answer goes on. */
static void a_prompt_is_capped(void **state)
{
    aff_placement *p;
    aff_placement_options o;
    aff__placement_options_init(&o);
    o.decay = 0.98;
    o.prefill_credit = 4;
    o.prefill_weight = 0.5;
    o.prefill_decay = 0.5;
    o.credit = 3;
    must(aff__placement_create(&p, &(aff_placement_shape){1, 4, 1, 4, 0, true}, &o, &err));
    for (int i = 0; i < 2; i++)
        must(aff__placement_note(
            p,
            &(aff_placement_use){
                .phase = AFF_USE_PREFILL, .n = 2, .id = (int32_t[]){0, 1}, .count = (int32_t[]){1000, 2}},
            &err));
    assert_float_equal(aff__placement_heat(p, 0, 0), 0.5 * (4 + 0.5 * 4), 1e-6);
    assert_float_equal(aff__placement_heat(p, 0, 1), 0.5 * (2 + 0.5 * 2), 1e-6);
    use(p, 0, 1, (int32_t[]){2}, (int32_t[]){9});
    assert_float_equal(aff__placement_heat(p, 0, 0), 0.98 * 3, 1e-6);
    assert_float_equal(aff__placement_heat(p, 0, 2), 3, 1e-6);
    must(aff__placement_note(p, &(aff_placement_use){.phase = AFF_USE_PREFILL}, &err));
    assert_float_equal(aff__placement_heat(p, 0, 2), 3, 1e-6); /* a chunk does not make the answer's heat fade */
    aff__placement_free(p);
}

static void refuses_bad_input(void **state)
{
    aff_placement *p;
    aff_placement_options o;
    aff__placement_options_init(&o);
    const aff_placement_shape bad[] = {{0, 4, 1, 1},     {1, 0, 1, 1},          {4097, 1},
                                       {1, 65537},       {1, 4, -1, 4},         {1, 4, 1, -4},
                                       {1, 4, 1, 4, -1}, {1, 4, 3, 2, 0, true}, {1, 4, INT64_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(aff__placement_create(&p, &bad[i], &o, &err), AFF_E_INVALID);
        assert_null(p);
    }
    must(aff__placement_create(&p, &(aff_placement_shape){2, 4, 2, 3, 0, false}, &o, &err));
    const float profile[8] = {0, 1, 2, NAN};
    assert_int_equal(aff__placement_fill(p, profile, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "expert 3 of layer 0"));
    must(aff__placement_fill(p, NULL, &err));
    assert_int_equal(aff__placement_fill(p, NULL, &err), AFF_E_INVALID);
    assert_int_equal(aff__placement_put(p, 0, 0, AFF_TIER_CARD, &err), AFF_E_INVALID);
    assert_int_equal(aff__placement_put(p, 0, 3, AFF_TIER_CARD, &err), AFF_E_INVALID); /* no slot */
    assert_int_equal(aff__placement_put(p, 2, 0, AFF_TIER_CARD, &err), AFF_E_INVALID);
    const float scores[] = {NAN, INFINITY, -INFINITY, -0.5f, 1.5f};
    for (int i = 0; i < 5; i++) {
        const aff_placement_use u = {
            .n = 1, .id = (int32_t[]){0}, .n_near = 1, .near = (int32_t[]){1}, .score = &scores[i]};
        assert_int_equal(aff__placement_note(p, &u, &err), AFF_E_INVALID);
        assert_non_null(strstr(err.msg, "score"));
    }
    const aff_placement_use wrong[] = {{.layer = 2},
                                       {.layer = -1},
                                       {.n = -1},
                                       {.n = 5, .id = (int32_t[]){0, 1, 2, 3, 4}},
                                       {.n = 1, .id = (int32_t[]){4}},
                                       {.n = 1, .id = (int32_t[]){-1}},
                                       {.n = 2, .id = (int32_t[]){1, 1}},
                                       {.n = 1, .id = (int32_t[]){1}, .count = (int32_t[]){0}},
                                       {.n_near = 2, .near = (int32_t[]){1, 1}, .score = (float[]){0, 0}}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(aff__placement_note(p, &wrong[i], &err), AFF_E_INVALID);
    for (int i = 0; i < 8; i++)
        assert_float_equal(aff__placement_heat(p, i / 4, i % 4), 0, 0); /* nothing was changed */
    assert_int_equal(aff__placement_counts_now(p).notes[0], 0);
    assert_int_equal(aff__placement_landed(p, &(aff_move){0, 0, AFF_TIER_CARD, AFF_TIER_HOST, true}), AFF_E_INVALID);
    assert_int_equal(aff__placement_failed(p, &(aff_move){9, 0, AFF_TIER_CARD, AFF_TIER_HOST, true}), AFF_E_INVALID);
    aff_move v;
    assert_false(aff__placement_next(p, AFF_TIER_DISK, &v));
    assert_false(
        aff__placement_force(p, 0, 0, AFF_TIER_CARD, AFF_TIER_DISK, &v)); /* no neighbours: the pool is between */
    aff__placement_free(p);
    for (unsigned n = 1; n < 40; n++) {
        aff__alloc_fail_after(n);
        const aff_status s = aff__placement_create(&p, &(aff_placement_shape){2, 4, 2, 3, 0, false}, &o, &err);
        aff__alloc_fail_after(0);
        if (s == AFF_OK) break;
        assert_int_equal(s, AFF_E_NOMEM);
        assert_true(n < 39);
    }
    aff__placement_free(p);
}

/* Every flag at both ends is taken and played; beyond them it is refused by name. */
static void knobs_at_their_ends(void **state)
{
    static const struct {
        const char *name;
        double least, most;
        size_t at;
        bool whole;
    } knobs[] = {
#define KNOB(name, field, least, most, whole) {name, least, most, offsetof(aff_placement_options, field), whole}
        KNOB("--placement-moves", moves, 0, 4096, true),
        KNOB("--placement-decay", decay, 0, 1, false),
        KNOB("--placement-hysteresis", hysteresis, 0, 1000, false),
        KNOB("--placement-min-gain", min_gain, 0, 1e6, false),
        KNOB("--placement-lead", lead, 0, 127, true),
        KNOB("--placement-shadow", shadow, 1, 4096, true),
        KNOB("disk", disk_hysteresis, 0, 1000, false),
        KNOB("disk", disk_min_gain, 0, 1e6, false),
        KNOB("credit", credit, 0, 1e6, false),
        KNOB("chunk", prefill_credit, 0, 1e6, false),
        KNOB("chunks", prefill_weight, 0, 1000, false),
        KNOB("chunks", prefill_decay, 0, 1, false),
        KNOB("near miss", near, 0, 1000, false),
#undef KNOB
    };
    for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++)
        for (int end = 0; end < 4; end++) {
            aff_placement_options o = exact_options(AFF_PLACE_HEAT);
            const double v = end == 0   ? knobs[i].least
                             : end == 1 ? knobs[i].most
                             : end == 2 ? knobs[i].most * 1.01 + 1
                                        : NAN;
            if (knobs[i].whole && end == 3) continue;
            if (knobs[i].whole)
                *(int *)(void *)((char *)&o + knobs[i].at) = (int)v;
            else
                *(double *)(void *)((char *)&o + knobs[i].at) = v;
            if (end < 2) {
                must(aff__placement_options_check(&o, &err));
                play((aff_placement_shape){4, 10, 18, 12, 2, false}, o, 3000, i);
            } else {
                assert_int_equal(aff__placement_options_check(&o, &err), AFF_E_INVALID);
                assert_non_null(strstr(err.msg, knobs[i].name));
            }
        }
    aff_placement_strategy s;
    must(aff__placement_strategy_parse("demand", &s, &err));
    assert_int_equal(s, AFF_PLACE_DEMAND);
    assert_int_equal(aff__placement_strategy_parse("lru", &s, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "heat, demand or static, got 'lru'"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rules_by_hand),
                                       cmocka_unit_test(a_prompt_is_capped),
                                       cmocka_unit_test(refuses_bad_input),
                                       cmocka_unit_test(knobs_at_their_ends),
                                       cmocka_unit_test(heats_with_any_factor),
                                       cmocka_unit_test(equals_the_slow_model),
                                       cmocka_unit_test(equals_it_with_spare_slots)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
