/* plan.h - the router's choice turned into work: which expert for which rows, and, group by group, where it lies. */
#ifndef AFF_EXPERTS_PLAN_H
#define AFF_EXPERTS_PLAN_H
#include "experts/tiers.h"

typedef struct aff_plan aff_plan;
/* Room for rows x picks entries over `experts` experts. */
aff_status aff__plan_create(aff_plan **out, int rows, int picks, int experts, aff_error *err);
uint64_t aff__plan_bytes(int rows, int picks, int experts); /* that it takes */
void aff__plan_free(aff_plan *p);
/* picks, weights: [T][K] as routed. Tiles come out in ascending expert id, without addresses. The result is valid until the next call. A pick outside
 * 0..experts-1 or twice in one row (NaN logits) is an error; `layer` is for its message. */
aff_status aff__plan_build(aff_plan *p, int layer, const int32_t *picks, const float *weights, int T, int K, const aff_moe_plan **out, aff_error *err);

/* Calls `work` with parts of the last plan whose experts' addresses are there: those in memory first, then the others as they come from the disk. Every
 * tile is in exactly one part; the arrays of entries are the whole plan's. `layer`: of the tiers. */
typedef aff_status (*aff_plan_fn)(void *ctx, const aff_moe_plan *part, aff_error *err);
aff_status aff__plan_each(aff_plan *p, aff_tiers *tiers, int layer, aff_plan_fn work, void *ctx, aff_error *err);
#endif
