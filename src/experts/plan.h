/* plan.h - the router's choice turned into work: which expert, where it lies, for which rows. */
#ifndef AFF_EXPERTS_PLAN_H
#define AFF_EXPERTS_PLAN_H
#include "experts/store.h"

typedef struct aff_plan aff_plan;
/* Room for rows x picks entries over `experts` experts. */
aff_status aff__plan_create(aff_plan **out, int rows, int picks, int experts, aff_error *err);
uint64_t aff__plan_bytes(int rows, int picks, int experts); /* that it takes */
void aff__plan_free(aff_plan *p);
/* picks, weights: [T][K] as routed. Tiles come out in ascending expert id with addresses from the store. The result is valid until
 * aff__plan_done, which gives the experts back and is due once after every success. A pick outside 0..experts-1 or twice in one row (NaN
 * logits) is an error. */
aff_status aff__plan_build(aff_plan *p, aff_experts *store, int layer, const int32_t *picks, const float *weights, int T, int K, const aff_moe_plan **out,
                           aff_error *err);
void aff__plan_done(aff_plan *p);
#endif
