#include "experts/heat.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

static const float decay = 0.98f;

aff_status aff__heat_create(aff_heat *h, int layers, int experts, aff_error *err)
{
    *h = (aff_heat){.layers = layers, .experts = experts};
    AFF_TRY(aff__calloc(&h->v, (uint64_t)layers * (uint64_t)experts, sizeof *h->v, "heat of the experts", err));
    return aff__calloc(&h->count, (uint64_t)experts, sizeof *h->count, "heat of the experts", err);
}

void aff__heat_free(aff_heat *h)
{
    free(h->v);
    free(h->count);
    *h = (aff_heat){0};
}

void aff__heat_note(aff_heat *h, int layer, const int32_t *picks, int n)
{
    float *v = h->v + (size_t)layer * (size_t)h->experts;
    memset(h->count, 0, (size_t)h->experts * sizeof *h->count);
    for (int i = 0; i < n; i++) h->count[picks[i]]++;
    for (int e = 0; e < h->experts; e++)
        v[e] = v[e] * decay + (float)(h->count[e] < AFF_HEAT_CREDIT ? h->count[e] : AFF_HEAT_CREDIT);
}
