#include "experts/routegen.h"
#include "base/mem.h"
#include "base/rng.h"
#include <math.h>
#include <stdlib.h>

enum { FARTHEST = 20000 }; /* positions back that a place is followed */

struct aff_routegen {
    aff_routegen_options o;
    double *upto;   /* [experts] running sum of the probabilities by rank */
    int32_t *order; /* [layers][experts] expert of every rank */
};

/* A uniform number of [0, 1) that depends on all of these. */
static double uniform(uint64_t seed, int layer, int64_t pos, int place, int attempt)
{
    const uint64_t key[] = {(uint64_t)layer, (uint64_t)pos, (uint64_t)place << 32 | (uint32_t)attempt};
    uint64_t h = aff__mix64(seed + 0x9E3779B97F4A7C15u);
    for (int i = 0; i < 3; i++) h = aff__mix64((h ^ key[i]) + 0x9E3779B97F4A7C15u);
    return (double)(h >> 11) * 0x1p-53;
}

/* An order of the experts for every layer. */
static void shuffle(aff_routegen *g)
{
    const int E = g->o.experts;
    for (int l = 0; l < g->o.layers; l++) {
        int32_t *v = g->order + (int64_t)l * E;
        for (int i = 0; i < E; i++) v[i] = i;
        for (int i = E - 1; i > 0; i--) {
            const int k = (int)(uniform(g->o.seed, l, -1, i, 0) * (i + 1));
            const int32_t t = v[i];
            v[i] = v[k];
            v[k] = t;
        }
    }
}

aff_status aff__routegen_create(aff_routegen **out, const aff_routegen_options *o, aff_error *err)
{
    aff_routegen *g;
    *out = NULL;
    if (o->layers < 1 || o->experts < 1 || o->picks < 1 || o->picks > o->experts)
        return aff__fail(err, AFF_E_INVALID,
                         "routes: %d of %d experts in %d layers: expected at least 1, and no more than there are",
                         o->picks, o->experts, o->layers);
    if (!(o->skew >= 0 && o->skew <= 10) || !(o->locality >= 0 && o->locality <= 0.999))
        return aff__fail(err, AFF_E_INVALID, "routes: skew %g, locality %g: expected 0 to 10 and 0 to 0.999", o->skew,
                         o->locality);
    AFF_TRY(aff__calloc(&g, 1, sizeof *g, "routes", err));
    g->o = *o;
    aff_status s = aff__calloc(&g->upto, (uint64_t)o->experts, sizeof *g->upto, "routes", err);
    if (s == AFF_OK)
        s = aff__calloc(&g->order, (uint64_t)o->layers * (uint64_t)o->experts, sizeof *g->order, "routes", err);
    if (s != AFF_OK) {
        aff__routegen_free(g);
        return s;
    }
    double sum = 0;
    for (int r = 0; r < o->experts; r++) g->upto[r] = sum += pow(r + 1, -o->skew);
    for (int r = 0; r < o->experts; r++) g->upto[r] /= sum;
    shuffle(g);
    *out = g;
    return AFF_OK;
}

void aff__routegen_free(aff_routegen *g)
{
    if (!g) return;
    free(g->upto);
    free(g->order);
    free(g);
}

static int32_t draw(const aff_routegen *g, int layer, double u)
{
    int lo = 0, hi = g->o.experts - 1; /* the first rank whose sum exceeds u */
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (g->upto[mid] > u)
            hi = mid;
        else
            lo = mid + 1;
    }
    return g->order[(int64_t)layer * g->o.experts + lo];
}

static bool has(const int32_t *v, int n, int32_t id)
{
    while (n--)
        if (v[n] == id) return true;
    return false;
}

void aff__routegen_pick(const aff_routegen *g, int layer, int64_t pos, int32_t *out)
{
    for (int k = 0; k < g->o.picks; k++) {
        int64_t from = pos; /* where this place was last drawn anew */
        while (from > 0 && pos - from < FARTHEST && uniform(g->o.seed, layer, from, k, -1) < g->o.locality) from--;
        int attempt = 0;
        do out[k] = draw(g, layer, uniform(g->o.seed, layer, from, k, attempt));
        while (has(out, k, out[k]) && ++attempt < 1000);
        for (int r = 0; has(out, k, out[k]); r++)
            out[k] = g->order[(int64_t)layer * g->o.experts + r]; /* a skew that leaves hardly anything else */
    }
}
