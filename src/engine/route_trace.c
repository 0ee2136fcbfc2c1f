#include "engine/route_trace.h"
#include "base/mem.h"
#include "experts/tiers.h"
#include "format/route.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct aff_route_trace {
    aff_route_file *file;
    int layers, experts;
    double *sum;   /* [experts] */
    int *q;        /* [experts] */
    int32_t *miss; /* [experts] */
    uint8_t *used; /* [experts] */
};

aff_status aff__route_trace_close(aff_route_trace *t, bool keep, aff_error *err)
{
    if (!t) return AFF_OK;
    const aff_status s = aff__route_close(t->file, keep, err);
    free(t->sum);
    free(t->q);
    free(t->miss);
    free(t->used);
    free(t);
    return s;
}

static aff_status make(aff_route_trace *t, const char *path, const aff_net *net, aff_error *err)
{
    const uint64_t E = (uint64_t)t->experts;
    AFF_TRY(aff__calloc(&t->sum, E, sizeof *t->sum, "route trace", err));
    AFF_TRY(aff__calloc(&t->q, E, sizeof *t->q, "route trace", err));
    AFF_TRY(aff__calloc(&t->miss, E, sizeof *t->miss, "route trace", err));
    AFF_TRY(aff__calloc(&t->used, E, 1, "route trace", err));
    AFF_TRY(aff__route_create(&t->file, path, t->layers, t->experts, aff__net_config(net)->picks, err));
    for (int l = 0; l < t->layers; l++) {
        int n = 0;
        for (int e = 0; e < t->experts; e++)
            if (aff__tiers_tier(aff__net_expert_tiers(net), l, e) != AFF_TIER_DISK) t->miss[n++] = e;
        aff__route_resident(t->file, l, t->miss, n);
    }
    return AFF_OK;
}

aff_status aff__route_trace_open(aff_route_trace **out, const char *path, const aff_net *net, aff_error *err)
{
    aff_route_trace *t;
    *out = NULL;
    AFF_TRY(aff__calloc(&t, 1, sizeof *t, "route trace", err));
    t->layers = aff__net_layers(net);
    t->experts = aff__net_config(net)->experts;
    const aff_status s = make(t, path, net, err);
    if (s != AFF_OK) {
        aff__route_trace_close(t, false, NULL);
        return s;
    }
    *out = t;
    return AFF_OK;
}

static void scores(aff_route_trace *t, const aff_route *r)
{
    const int E = t->experts;
    double lo = INFINITY, hi = -INFINITY;
    memset(t->sum, 0, (size_t)E * sizeof *t->sum);
    for (int i = 0; i < r->rows; i++)
        for (int e = 0; e < E; e++) t->sum[e] += aff__rank_value(r->scoring, (double)r->logits[(int64_t)i * E + e], r->bias ? (double)r->bias[e] : 0);
    for (int e = 0; e < E; e++) {
        lo = fmin(lo, t->sum[e]);
        hi = fmax(hi, t->sum[e]);
    }
    for (int e = 0; e < E; e++) {
        const double v = hi > lo ? (t->sum[e] - lo) / (hi - lo) * 1000 : 0;
        t->q[e] = v >= 0 && v <= 1000 ? (int)lround(v) : 0; /* NaN: 0 */
    }
    aff__route_scores(t->file, r->draft ? t->layers + r->layer : r->layer, t->q);
}

void aff__route_trace_note(void *trace, const aff_route *r)
{
    aff_route_trace *t = trace;
    int misses = 0;
    memset(t->used, 0, (size_t)t->experts);
    for (int i = 0; i < r->rows * r->picks; i++) {
        if (r->pick[i] < 0 || r->pick[i] >= t->experts) return; /* NaN logits choose none: this pass fails */
        t->used[r->pick[i]] = 1;
    }
    for (int e = 0; e < t->experts; e++)
        if (t->used[e] && aff__tiers_tier(r->tiers, r->tier_layer, e) == AFF_TIER_DISK) t->miss[misses++] = e;
    scores(t, r);
    aff__route_dispatch(t->file, r->draft, r->layer, r->rows, r->pick, t->miss, misses);
}
