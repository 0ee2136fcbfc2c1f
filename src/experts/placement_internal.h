/* placement_internal.h - the parts of a placement: planes of heat and the trees that know the hottest and the coldest
 * (placement_heat.c), moves (placement.c).
 *
 * Decay is lazy: a layer's heats are stored divided by `scale`, which every dispatch multiplies by the decay; a heat at
 * this moment is stored * scale. So a dispatch touches what it used, and the order within a layer stands. Across layers
 * heats are compared at this moment: a tree per layer knows its best, a tree over the layers compares those, and only
 * the layer of a dispatch has to be looked at again. */
#ifndef AFF_EXPERTS_PLACEMENT_INTERNAL_H
#define AFF_EXPERTS_PLACEMENT_INTERNAL_H
#include "experts/placement.h"

/* Trees: who goes up over an edge, who goes down. Edge 0 is below the slab, 1 below the pool. */
enum { TREE_UP, TREE_DOWN, TREES = 4 };
static inline int tree_of(int edge, int way)
{
    return 2 * edge + way;
}

enum {
    MARK_BUSY = 1,
    MARK_PINNED = 2,
    MARK_BARRED = 4,
    MARK_FIXED = 7,
    MARK_UP = 8,
    MARK_DOWN = 32
}; /* UP, DOWN << edge: was moved so once */

struct aff_placement {
    aff_placement_shape shape;
    aff_placement_options o;
    int leaves, tops;  /* powers of two, at least experts and layers */
    bool edge[2];      /* there is one */
    aff_tier lower[2]; /* below it */
    int64_t spare[2];  /* slots of its upper tier that moves keep free */
    double *decode, *prefill,
        *key;      /* [layers][experts], to be multiplied by scale; key = decode + prefill_weight * prefill */
    double *scale; /* [layers] */
    uint8_t *tier, *mark, *to;                    /* [layers][experts]; to: of a move under way */
    uint8_t *held;                                /* [2][layers][experts] places left and not yet released */
    int32_t *tree[TREES];                         /* [layers][2 leaves] the best expert of the leaves below, -1: none */
    int32_t *top[TREES];                          /* [2 tops] the best layer, -1: none */
    int32_t *above[2];                            /* [layers] experts above the edge once moves under way have landed */
    int32_t *count[AFF_TIERS];                    /* [layers] */
    int64_t used[2], reserved[2], quarantined[2]; /* slots; those of moves to come in, those left */
    int64_t leaving[2];                           /* moves out of the tier that are not released */
    int64_t left[2];                              /* swaps that this note still allows */
    int64_t second[2]; /* index of an expert that goes down as the other half of a swap, -1: none */
    int32_t *asked;    /* [experts] what the last note used, ascending (demand) */
    int n_asked, at_asked[2], asked_layer;
    uint32_t *seen, seen_now; /* [experts] ids of a note */
    aff_placement_counts n;
};

static inline int64_t place_index(const aff_placement *p, int layer, int e)
{
    return (int64_t)layer * p->shape.experts + e;
}
static inline double heat_now(const aff_placement *p, int64_t i)
{
    return p->key[i] * p->scale[i / p->shape.experts];
}

/* An expert's key, tier or marks changed; then, once for the layer, aff__placement_layer_changed. */
void aff__placement_touch(aff_placement *p, int layer, int e);
void aff__placement_layer_changed(aff_placement *p, int layer);
/* All of a layer changed. */
void aff__placement_rebuild(aff_placement *p, int layer);
/* Index of the best of a tree, -1: none. */
int64_t aff__placement_best(const aff_placement *p, int tree);
/* What a checked dispatch does to the heats. */
void aff__placement_warm(aff_placement *p, const aff_placement_use *u);
#endif
