/* heat.h - how much each routed expert was used lately (spec runtime 5.2): a number per layer and expert that every dispatch of the
 * layer multiplies by 0.98, and that the experts picked are then given their rows, at most AFF_HEAT_CREDIT of them, so that a chunk
 * of a prompt does not outweigh a whole answer (pitfall P37). One thread at a time. */
#ifndef AFF_EXPERTS_HEAT_H
#define AFF_EXPERTS_HEAT_H
#include "base/status.h"

enum { AFF_HEAT_CREDIT = 8 };

typedef struct aff_heat {
    int layers, experts;
    float *v;   /* [layers][experts] */
    int *count; /* [experts] scratch */
} aff_heat;

aff_status aff__heat_create(aff_heat *h, int layers, int experts, aff_error *err);
void aff__heat_free(aff_heat *h);
/* picks[0..n): experts of a dispatch of the layer, one entry a row and pick. */
void aff__heat_note(aff_heat *h, int layer, const int32_t *picks, int n);
#endif
