#include "experts/hitgen.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/threads.h"
#include <stdlib.h>

struct aff_hitgen {
    aff_hitgen_options o;
    int32_t *list; /* [layers][experts] by tier */
    int *first;    /* [layers][AFF_TIERS + 1] of a tier in it */
};

/* A uniform number of [0, 1) that depends on all of these. */
static double uniform(uint64_t seed, int layer, uint64_t key, int place, int what)
{
    const uint64_t k[] = {(uint64_t)layer, key, (uint64_t)place << 32 | (uint32_t)what};
    uint64_t h = aff__mix64(seed + 0x9E3779B97F4A7C15u);
    for (int i = 0; i < 3; i++) h = aff__mix64((h ^ k[i]) + 0x9E3779B97F4A7C15u);
    return (double)(h >> 11) * 0x1p-53;
}

static void sort(aff_hitgen *g, int layer)
{
    const int E = g->o.experts;
    int *first = g->first + (int64_t)layer * (AFF_TIERS + 1), n = 0;
    for (int t = 0; t < AFF_TIERS; t++) {
        first[t] = n;
        for (int e = 0; e < E; e++)
            if (g->o.tier[(int64_t)layer * E + e] == t) g->list[(int64_t)layer * E + n++] = e;
    }
    first[AFF_TIERS] = n;
}

aff_status aff__hitgen_create(aff_hitgen **out, const aff_hitgen_options *o, aff_error *err)
{
    aff_hitgen *g;
    *out = NULL;
    if (o->layers < 1 || o->experts < 1 || o->picks < 1 || o->picks > o->experts || o->picks > AFF_HITGEN_PICKS)
        return aff__fail(err, AFF_E_INVALID, "routes: %d of %d experts in %d layers: expected at least 1, no more than there are, and at most %d", o->picks, o->experts,
                         o->layers, AFF_HITGEN_PICKS);
    double sum = 0;
    for (int t = 0; t < AFF_TIERS; t++) {
        if (!(o->share[t] >= 0 && o->share[t] <= 1)) return aff__fail(err, AFF_E_INVALID, "routes: share %g of a tier: expected 0 to 1", o->share[t]);
        sum += o->share[t];
    }
    if (sum > 1 + 1e-9) return aff__fail(err, AFF_E_INVALID, "routes: shares of the tiers: expected a sum of at most 1, got %g", sum);
    for (int64_t i = 0; i < (int64_t)o->layers * o->experts; i++)
        if (o->tier[i] >= AFF_TIERS) return aff__fail(err, AFF_E_INVALID, "routes: tier %d of an expert", o->tier[i]);
    AFF_TRY(aff__calloc(&g, 1, sizeof *g, "routes", err));
    g->o = *o;
    aff_status s = aff__calloc(&g->list, (uint64_t)o->layers * (uint64_t)o->experts, sizeof *g->list, "routes", err);
    if (s == AFF_OK) s = aff__calloc(&g->first, (uint64_t)o->layers * (AFF_TIERS + 1), sizeof *g->first, "routes", err);
    if (s != AFF_OK) {
        aff__hitgen_free(g);
        return s;
    }
    for (int l = 0; l < o->layers; l++) sort(g, l);
    g->o.tier = NULL; /* all that is needed of it is in the lists */
    *out = g;
    return AFF_OK;
}

void aff__hitgen_free(aff_hitgen *g)
{
    if (!g) return;
    free(g->list);
    free(g->first);
    free(g);
}

static bool has(const int32_t *v, int n, int32_t id)
{
    while (n--)
        if (v[n] == id) return true;
    return false;
}

/* An expert that a[0..n) and b[0..m) do not have out of the layer's list [from, to), from a place that u gives; -1: there is none. */
static int32_t choose(const aff_hitgen *g, int layer, int from, int to, double u, const int32_t *a, int n, const int32_t *b, int m)
{
    const int32_t *list = g->list + (int64_t)layer * g->o.experts;
    const int count = to - from, start = (int)(u * count);
    for (int i = 0; i < count; i++) {
        const int32_t e = list[from + (start + i) % count];
        if (!has(a, n, e) && !has(b, m, e)) return e;
    }
    return -1;
}

static int tier_of(const aff_hitgen *g, double u)
{
    double upto = 0;
    int t = 0;
    while (t < AFF_TIERS - 1 && u >= (upto += g->o.share[t])) t++;
    return t;
}

void aff__hitgen_pick(const aff_hitgen *g, int layer, uint64_t key, int32_t *out)
{
    const int *first = g->first + (int64_t)layer * (AFF_TIERS + 1);
    for (int k = 0; k < g->o.picks; k++) {
        const double at = uniform(g->o.seed, layer, key, k, 1);
        const int t = tier_of(g, uniform(g->o.seed, layer, key, k, 0));
        out[k] = choose(g, layer, first[t], first[t + 1], at, out, k, NULL, 0);
        if (out[k] < 0) out[k] = choose(g, layer, 0, g->o.experts, at, out, k, NULL, 0);
    }
}

void aff__hitgen_predict(const aff_hitgen *g, int layer, uint64_t key, double recall, int32_t *out)
{
    const int *first = g->first + (int64_t)layer * (AFF_TIERS + 1), K = g->o.picks;
    int32_t right[AFF_HITGEN_PICKS];
    aff__hitgen_pick(g, layer, key, right);
    for (int k = 0; k < K; k++) {
        out[k] = right[k];
        if (uniform(g->o.seed, layer, key, k, 2) < recall) continue;
        const double at = uniform(g->o.seed, layer, key, k, 3);
        const int t = tier_of(g, uniform(g->o.seed, layer, key, k, 4));
        int32_t e = choose(g, layer, first[t], first[t + 1], at, out, k, right, K);
        if (e < 0) e = choose(g, layer, 0, g->o.experts, at, out, k, right, K);
        if (e >= 0) out[k] = e;
    }
}

typedef struct {
    const aff_hitgen *g;
    int64_t keys;
    double recall;
    int32_t *picks, *guess;
} tables;

static void layer_table(void *ctx, int64_t layer, int thread)
{
    const tables *t = ctx;
    const int K = t->g->o.picks;
    for (int64_t i = 0; i < t->keys; i++) {
        const int64_t at = (layer * t->keys + i) * K;
        aff__hitgen_pick(t->g, (int)layer, (uint64_t)i, t->picks + at);
        if (t->guess) aff__hitgen_predict(t->g, (int)layer, (uint64_t)i, t->recall, t->guess + at);
    }
}

aff_status aff__hitgen_tables(const aff_hitgen *g, int64_t keys, double recall, int32_t *picks, int32_t *guess, aff_error *err)
{
    aff_pool *pool;
    AFF_TRY(aff__pool_create(&pool, 0, err));
    aff__pool_run(pool, layer_table, &(tables){g, keys, recall, picks, guess}, g->o.layers);
    aff__pool_free(pool);
    return AFF_OK;
}
