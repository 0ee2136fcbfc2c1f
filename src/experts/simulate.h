/* simulate.h - what a placement would have done on a trace: hits by tier, moves, bytes, beside caches that look back
 * (LRU, LFU) and one that looks ahead (Belady). No experts, no card: tools/aff-profile.c prints it, docs/placement.md
 * explains. */
#ifndef AFF_EXPERTS_SIMULATE_H
#define AFF_EXPERTS_SIMULATE_H
#include "experts/uses.h"

typedef enum aff_sim_kind {
    AFF_SIM_PLACEMENT, /* experts/placement.h, its strategy in the options */
    AFF_SIM_LRU, /* a miss takes the place of what was used longest ago, at once and for the bytes of the miss alone */
    AFF_SIM_LFU, /* of what was used least often so far; of those, longest ago */
    AFF_SIM_BELADY, /* the most hits that a cache of as many slots can have which takes in nothing but misses: each goes
                     * in unless it is needed later than everything there (Belady's MIN with bypass) */
    AFF_SIM_GAIN    /* the same, but only if it is used `gain` times before what it replaces would be: fewer moves */
} aff_sim_kind;

typedef struct aff_sim {
    aff_sim_kind kind;
    aff_placement_shape shape; /* caches that are not PLACEMENT: one of slab_slots, all of them */
    aff_placement_options o;
    const float *profile; /* [layers][experts] what it begins with; NULL: all alike */
    int land;   /* dispatches until a copy has landed, and again until the place that it left is free; at least 1 */
    int copies; /* that land in a dispatch's time, at least 1: the link's rate */
    int gain;
} aff_sim;

typedef struct aff_sim_result {
    int64_t used[2][3]; /* distinct experts of dispatches, by phase and tier */
    int64_t tokens[2];
    int64_t moves[2];       /* experts that came into the slab while that phase went on */
    int64_t up[2], down[2]; /* those whose bytes came for that alone, not with a miss; those copied out */
    int64_t loads[2];       /* from disk into the pool, beside those read because they were missed */
    aff_placement_counts n; /* PLACEMENT */
} aff_sim_result;

/* Plays traces of the shape's counts one after another. */
aff_status aff__simulate(aff_sim_result *r, const aff_sim *s, const aff_uses *const *traces, int n, aff_error *err);

/* Share of `phase`'s uses that were in the slab (tier AFF_TIER_CARD), or in the slab or the pool (HOST). 0 if there
 * were none. */
double aff__sim_hits(const aff_sim_result *r, aff_use_phase phase, aff_tier tier);
/* Experts that crossed the link for a token of the phase: read in place because they were missed (on disk or in the
 * pool), copied up, copied down. */
double aff__sim_link(const aff_sim_result *r, aff_use_phase phase);
/* Experts read from disk for a token of the phase. */
double aff__sim_disk(const aff_sim_result *r, aff_use_phase phase);
#endif
