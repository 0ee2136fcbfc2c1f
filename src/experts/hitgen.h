/* hitgen.h - made-up routes by where experts are: each pick falls into a tier with a given probability, and there on any expert of the layer alike.
 * For measuring what misses cost (docs/bench.md). And made-up predictions of such routes.
 *
 * A pick depends on seed, layer, key (a token or a position) and place alone. A tier without enough experts of the layer gives way to the others. */
#ifndef AFF_EXPERTS_HITGEN_H
#define AFF_EXPERTS_HITGEN_H
#include "experts/placement.h"

enum { AFF_HITGEN_PICKS = 64 };
typedef struct aff_hitgen aff_hitgen;
typedef struct aff_hitgen_options {
    int layers, experts, picks; /* picks <= experts, AFF_HITGEN_PICKS */
    double share[AFF_TIERS];    /* of picks; the last tier has what the others leave */
    const uint8_t *tier;        /* [layers][experts]; copied */
    uint64_t seed;
} aff_hitgen_options;
aff_status aff__hitgen_create(aff_hitgen **out, const aff_hitgen_options *o, aff_error *err);
void aff__hitgen_free(aff_hitgen *g);
/* out[picks]: distinct. */
void aff__hitgen_pick(const aff_hitgen *g, int layer, uint64_t key, int32_t *out);
/* A guess at them: each of `picks` is right with probability `recall`, else another expert, by tiers as picks are. out[picks]: distinct, the wrong ones in the
 * places of those that were missed. */
void aff__hitgen_predict(const aff_hitgen *g, int layer, uint64_t key, double recall, int32_t *out);
/* Both for keys 0..keys-1, as router tables: picks and (NULL: none) guess [layers][keys][picks]. */
aff_status aff__hitgen_tables(const aff_hitgen *g, int64_t keys, double recall, int32_t *picks, int32_t *guess, aff_error *err);
#endif
