#include "experts/plan.h"
#include "base/mem.h"
#include <stdlib.h>

struct aff_plan {
    aff_moe_plan out;
    aff_moe_tile *tile;
    int *row, *rank, *fill; /* fill: [experts] running index of a tile's next entry */
    float *weight;
    int experts, capacity;
    /* Parts. */
    aff_moe_tile *part; /* [experts] */
    aff_expert *at;     /* [experts] */
    int *id, *which;    /* [experts] */
    aff_tier_use *use;
};

aff_status aff__plan_create(aff_plan **out, int rows, int picks, int experts, aff_error *err)
{
    aff_plan *p;
    const uint64_t n = (uint64_t)rows * (uint64_t)picks;
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "expert plan", err));
    p->experts = experts;
    p->capacity = (int)n;
    aff_status s = aff__calloc(&p->tile, (uint64_t)experts, sizeof *p->tile, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->fill, (uint64_t)experts, sizeof *p->fill, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->part, (uint64_t)experts, sizeof *p->part, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->at, (uint64_t)experts, sizeof *p->at, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->id, (uint64_t)experts, sizeof *p->id, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->which, (uint64_t)experts, sizeof *p->which, "expert plan", err);
    if (s == AFF_OK) s = aff__tier_use_create(&p->use, experts, err);
    if (s == AFF_OK) s = aff__calloc(&p->row, n, sizeof *p->row, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->rank, n, sizeof *p->rank, "expert plan", err);
    if (s == AFF_OK) s = aff__calloc(&p->weight, n, sizeof *p->weight, "expert plan", err);
    if (s != AFF_OK) {
        aff__plan_free(p);
        return s;
    }
    *out = p;
    return AFF_OK;
}

uint64_t aff__plan_bytes(int rows, int picks, int experts)
{
    const aff_plan *p;
    const uint64_t n = (uint64_t)rows * (uint64_t)picks, E = (uint64_t)experts;
    return aff__align_up(sizeof *p, 64) + 2 * aff__align_up(E * sizeof *p->tile, 64) + 3 * aff__align_up(E * sizeof *p->fill, 64) +
           aff__align_up(E * sizeof *p->at, 64) + aff__tier_use_bytes(experts) +
           2 * aff__align_up(n * sizeof *p->row, 64) + aff__align_up(n * sizeof *p->weight, 64);
}

void aff__plan_free(aff_plan *p)
{
    if (!p) return;
    free(p->tile);
    free(p->fill);
    free(p->row);
    free(p->rank);
    free(p->weight);
    free(p->part);
    free(p->at);
    free(p->id);
    free(p->which);
    aff__tier_use_free(p->use);
    free(p);
}

/* Place of pick k among its row's picks in ascending id; -1 if the id stands there twice. */
static int rank_of(const int32_t *pick, int K, int k)
{
    int r = 0;
    for (int i = 0; i < K; i++) {
        if (i != k && pick[i] == pick[k]) return -1;
        r += pick[i] < pick[k];
    }
    return r;
}

aff_status aff__plan_build(aff_plan *p, int layer, const int32_t *picks, const float *weights, int T, int K, const aff_moe_plan **out, aff_error *err)
{
    const int n = T * K;
    if (n > p->capacity) return aff__fail(err, AFF_E_INVALID, "expert plan: %d entries, room for %d", n, p->capacity);
    for (int e = 0; e < p->experts; e++) p->fill[e] = 0;
    for (int i = 0; i < n; i++) {
        if (picks[i] < 0 || picks[i] >= p->experts || rank_of(picks + i / K * K, K, i % K) < 0)
            return aff__fail(err, AFF_E_FORMAT, "layer %d, row %d: router picked expert %d of %d out of range or twice", layer, i / K, (int)picks[i], p->experts);
        p->fill[picks[i]]++;
    }
    int tiles = 0, first = 0;
    for (int e = 0; e < p->experts; e++) {
        const int count = p->fill[e];
        if (!count) continue;
        p->tile[tiles++] = (aff_moe_tile){.id = e, .first = first, .count = count};
        p->fill[e] = first;
        first += count;
    }
    for (int i = 0; i < n; i++) {
        const int at = p->fill[picks[i]]++;
        p->row[at] = i / K;
        p->rank[at] = rank_of(picks + i / K * K, K, i % K);
        p->weight[at] = weights[i];
    }
    p->out = (aff_moe_plan){.n_tiles = tiles, .n_entries = n, .tile = p->tile, .row = p->row, .rank = p->rank, .weight = p->weight};
    *out = &p->out;
    return AFF_OK;
}

aff_status aff__plan_each(aff_plan *p, aff_tiers *tiers, int layer, aff_plan_fn work, void *ctx, aff_error *err)
{
    aff_moe_plan part = p->out;
    aff_status s;
    int n;
    for (int i = 0; i < p->out.n_tiles; i++) p->id[i] = p->tile[i].id;
    aff__tiers_open(tiers, p->use, layer, p->id, p->out.n_tiles);
    while ((s = aff__tiers_next(tiers, p->use, p->which, p->at, &n, err)) == AFF_OK && n) {
        for (int i = 0; i < n; i++) {
            p->part[i] = p->tile[p->which[i]];
            p->part[i].expert = p->at[i];
        }
        part.tile = p->part;
        part.n_tiles = n;
        if ((s = work(ctx, &part, err)) != AFF_OK) break;
    }
    aff__tiers_close(tiers, p->use);
    return s;
}
