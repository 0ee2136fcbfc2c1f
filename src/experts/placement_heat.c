#include "experts/placement_internal.h"
#include <math.h>

static const double fold_below = 1e-100; /* scales under it are multiplied out */

static bool belongs(const aff_placement *p, int tree, int64_t i)
{
    const int edge = tree / 2;
    const aff_tier t = tree % 2 == TREE_UP ? p->lower[edge] : (aff_tier)edge;
    return p->tier[i] == t && !(p->mark[i] & MARK_FIXED);
}

/* The better of two experts of a layer, or -1; the left one has the lower id. */
static int32_t better(const double *key, bool hot, int32_t left, int32_t right)
{
    if (left < 0) return right;
    if (right < 0) return left;
    return (hot ? key[right] > key[left] : key[right] < key[left]) ? right : left;
}

void aff__placement_touch(aff_placement *p, int layer, int e)
{
    const int64_t i = place_index(p, layer, e);
    const double *key = p->key + place_index(p, layer, 0);
    for (int t = 0; t < TREES; t++) {
        if (!p->tree[t]) continue;
        int32_t *v = p->tree[t] + (int64_t)layer * 2 * p->leaves;
        int at = p->leaves + e;
        const int32_t leaf = belongs(p, t, i) ? e : -1;
        if (leaf < 0 && v[at] < 0) continue;
        v[at] = leaf;
        while (at >>= 1) v[at] = better(key, t % 2 == TREE_UP, v[2 * at], v[2 * at + 1]);
    }
}

void aff__placement_rebuild(aff_placement *p, int layer)
{
    const double *key = p->key + place_index(p, layer, 0);
    for (int t = 0; t < TREES; t++) {
        if (!p->tree[t]) continue;
        int32_t *v = p->tree[t] + (int64_t)layer * 2 * p->leaves;
        for (int e = 0; e < p->shape.experts; e++) v[p->leaves + e] = belongs(p, t, place_index(p, layer, e)) ? e : -1;
        for (int at = p->leaves - 1; at >= 1; at--) v[at] = better(key, t % 2 == TREE_UP, v[2 * at], v[2 * at + 1]);
    }
}

static double best_heat(const aff_placement *p, int tree, int layer)
{
    return heat_now(p, place_index(p, layer, p->tree[tree][(int64_t)layer * 2 * p->leaves + 1]));
}

/* The better of two layers by their best; the left one is the lower. */
static int32_t better_layer(const aff_placement *p, int tree, int32_t left, int32_t right)
{
    if (left < 0) return right;
    if (right < 0) return left;
    const bool hot = tree % 2 == TREE_UP;
    const double a = best_heat(p, tree, left), b = best_heat(p, tree, right);
    if (a != b) return (hot ? b > a : b < a) ? right : left;
    const int32_t *above = p->above[tree / 2];
    return (hot ? above[right] < above[left] : above[right] > above[left]) ? right : left;
}

void aff__placement_layer_changed(aff_placement *p, int layer)
{
    for (int t = 0; t < TREES; t++) {
        if (!p->tree[t]) continue;
        int32_t *v = p->top[t];
        int at = p->tops + layer;
        v[at] = p->tree[t][(int64_t)layer * 2 * p->leaves + 1] >= 0 ? layer : -1;
        while (at >>= 1) v[at] = better_layer(p, t, v[2 * at], v[2 * at + 1]);
    }
}

int64_t aff__placement_best(const aff_placement *p, int tree)
{
    const int32_t layer = p->top[tree][1];
    return layer < 0 ? -1 : place_index(p, layer, p->tree[tree][(int64_t)layer * 2 * p->leaves + 1]);
}

/* ---- heat ---- */

static void set_key(aff_placement *p, int64_t i)
{
    p->key[i] = p->decode[i] + p->o.prefill_weight * p->prefill[i];
}

/* Everything of the layer times `by`, at scale 1. */
static void fold(aff_placement *p, int layer, double by)
{
    const int64_t first = place_index(p, layer, 0);
    for (int64_t i = first; i < first + p->shape.experts; i++) {
        p->decode[i] *= by;
        p->prefill[i] *= by;
        set_key(p, i);
    }
    p->scale[layer] = 1;
    aff__placement_rebuild(p, layer);
}

static double credit(const aff_placement_use *u, int i, double most)
{
    return u->count ? fmin(u->count[i], most) : fmin(1, most);
}

static void decoded(aff_placement *p, const aff_placement_use *u)
{
    const int l = u->layer;
    const double scale = p->scale[l] * p->o.decay;
    if (scale < fold_below)
        fold(p, l, scale);
    else
        p->scale[l] = scale;
    for (int k = 0; k < u->n + u->n_near; k++) {
        const int e = k < u->n ? u->id[k] : u->near[k - u->n];
        const int64_t i = place_index(p, l, e);
        p->decode[i] += (k < u->n ? credit(u, k, p->o.credit) : p->o.near * (double)u->score[k - u->n]) / p->scale[l];
        if (k < u->n) p->mark[i] &= (uint8_t)~MARK_BARRED;
        set_key(p, i);
        aff__placement_touch(p, l, e);
    }
}

/* A chunk uses most of a layer's experts: everything is gone through. Near misses of a chunk say nothing beside that.
 */
static void prefilled(aff_placement *p, const aff_placement_use *u)
{
    const int64_t first = place_index(p, u->layer, 0);
    for (int64_t i = first; i < first + p->shape.experts; i++) p->prefill[i] *= p->o.prefill_decay;
    for (int k = 0; k < u->n; k++) {
        const int64_t i = first + u->id[k];
        p->prefill[i] += credit(u, k, p->o.prefill_credit) / p->scale[u->layer];
        p->mark[i] &= (uint8_t)~MARK_BARRED;
    }
    for (int64_t i = first; i < first + p->shape.experts; i++) set_key(p, i);
    aff__placement_rebuild(p, u->layer);
}

void aff__placement_warm(aff_placement *p, const aff_placement_use *u)
{
    if (u->phase == AFF_USE_PREFILL)
        prefilled(p, u);
    else
        decoded(p, u);
    aff__placement_layer_changed(p, u->layer);
}
