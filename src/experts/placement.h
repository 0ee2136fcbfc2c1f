/* placement.h - which experts lie in which tier, and which move next (spec runtime 5; docs/placement.md). Pure
 * bookkeeping: no thread, no file, no memory but its own; whoever owns the tiers asks for moves and carries them out.
 * One thread at a time; nothing is shared between instances.
 *
 * Three tiers: the slab (a card's memory), the pool (host memory), the disk (the container, which has everything). A
 * tier without slots is left out: with no card the pool is the fastest, with no pool the slab stands on the disk.
 * Experts move between neighbouring tiers only.
 *
 * An edge is the border between a tier and the one below it. What belongs together is a swap over an edge: the hottest
 * expert below it goes up and the coldest above it goes down, if hot >= cold * hysteresis + min_gain. Its halves are
 * moves of their own: one that lacks a free slot now is left out and counted as starved, the other goes on, so that
 * spare slots set the machine in motion. An empty slot beyond the spare ones is filled without anybody leaving. Weights
 * are only read: leaving for the disk, or for an inclusive pool (which keeps a copy of what is in the slab), moves no
 * bytes.
 *
 * Heat (spec 5.2): every dispatch of a layer multiplies the heats of its experts by `decay`, then those it used gain
 * their rows, at most `credit` of them; an expert that was nearly chosen gains a fraction. A prompt's chunks are kept
 * in a plane of their own, which their own dispatches decay too, at most `prefill_credit` each, and which counts with
 * `prefill_weight`. Every comparison is of heats at this moment, over all layers. Equal heats: up into the layer with
 * the fewest above the edge, down from the one with the most, then the lowest layer and id. A note costs O(experts used
 * x log(experts)), with a prompt's chunk O(experts of the layer); a move O(log). */
#ifndef AFF_EXPERTS_PLACEMENT_H
#define AFF_EXPERTS_PLACEMENT_H
#include "base/status.h"
#include <stdint.h>

/* From the fastest to the slowest. */
typedef enum aff_tier { AFF_TIER_CARD, AFF_TIER_HOST, AFF_TIER_DISK } aff_tier;
enum { AFF_TIERS = 3 };

typedef enum aff_placement_strategy {
    AFF_PLACE_HEAT,   /* the hottest below an edge for the coldest above it */
    AFF_PLACE_DEMAND, /* only what the last dispatch missed goes up, ascending; the same guard and victim */
    AFF_PLACE_STATIC  /* nothing moves, except out of slots that are taken away */
} aff_placement_strategy;

/* What the --placement- flags set, and what none does (docs/placement.md says how these were chosen). A number below 0
 * stands for the default, which for some depends on whether the pool is inclusive. */
typedef struct aff_placement_options {
    aff_placement_strategy strategy;
    int moves;         /* swaps a note and edge, 0 .. 4096 */
    double decay;      /* 0 .. 1 */
    double hysteresis; /* 0 .. 1000 */
    double min_gain;   /* 0 .. 1e6 */
    int lead;   /* dispatches that the host may run ahead of the card while decoding, 1 .. 127; 0: any number. The
                   mover's, not used here */
    int shadow; /* slab slots beyond the residents, kept free for moves, and moves in flight, 1 .. 4096 */
    double disk_hysteresis, disk_min_gain; /* of swaps over the edge to the disk; the same ranges */
    double credit, prefill_credit;         /* most that an expert gains in a dispatch, 0 .. 1e6 */
    double prefill_weight;                 /* 0 .. 1000 */
    double prefill_decay;                  /* of the prefill plane, at every chunk, 0 .. 1 */
    double near;                           /* what a near miss of score 1 gains, 0 .. 1000 */
} aff_placement_options;

/* Everything "default". */
void aff__placement_options_init(aff_placement_options *o);
/* Ranges. The error names the flag (or the field), what was expected and what it is. NaN is refused. */
aff_status aff__placement_options_check(const aff_placement_options *o, aff_error *err);
/* The options with defaults filled in, as they are in force. */
aff_placement_options aff__placement_options_resolve(const aff_placement_options *o, bool inclusive);
/* "heat", "demand", "static"; else AFF_E_INVALID. */
aff_status aff__placement_strategy_parse(const char *name, aff_placement_strategy *out, aff_error *err);
const char *aff__placement_strategy_name(aff_placement_strategy s);

typedef struct aff_placement_shape {
    int layers, experts;            /* 1 .. 4096, 1 .. 65536; drafts that share the tiers are further layers */
    int64_t slab_slots, pool_slots; /* all of them, spare ones included; 0: there is no such tier */
    int64_t pool_spare; /* pool slots kept free for moves from the disk; at least one is, where there is a disk tier in
                           use */
    bool inclusive;     /* what is in the slab keeps its slot in the pool; pool_slots >= slab_slots then */
} aff_placement_shape;

typedef struct aff_placement aff_placement;
/* Everything is on the disk at first. */
aff_status aff__placement_create(aff_placement **out, const aff_placement_shape *s, const aff_placement_options *o,
                                 aff_error *err);
void aff__placement_free(aff_placement *p);
uint64_t aff__placement_bytes(const aff_placement_shape *s); /* that it takes */

/* ---- at load ---- */

/* Where everything begins: the experts by `profile` [layers][experts] descending (NULL: all alike; finite, else
 * AFF_E_INVALID), into the slab up to its spare slots, then into the pool, the rest stays on disk. Equal values: by id,
 * then by layer, so that all layers get as many. Read the outcome with aff__placement_tier. Before the first note. */
aff_status aff__placement_fill(aff_placement *p, const float *profile, aff_error *err);
/* Or one by one: puts an expert on disk into a tier with a free slot. */
aff_status aff__placement_put(aff_placement *p, int layer, int e, aff_tier tier, aff_error *err);

/* ---- a dispatch ---- */

typedef enum aff_use_phase { AFF_USE_DECODE, AFF_USE_PREFILL } aff_use_phase;

typedef struct aff_placement_use {
    int layer;
    aff_use_phase phase;
    int n;                /* distinct experts of the dispatch */
    const int32_t *id;    /* [n] distinct */
    const int32_t *count; /* [n] rows that chose it, > 0; NULL: 1 each */
    int n_near;           /* near misses (near.h); may be 0 */
    const int32_t *near;  /* [n_near] distinct */
    const float *score;   /* [n_near] how near, 0 .. 1 */
} aff_placement_use;

/* What a dispatch used. Counts hits by tier, renews the budget of moves. AFF_E_INVALID, and nothing changes, if an id,
 * count or score is outside its range (NaN, infinities) or an id comes twice. */
aff_status aff__placement_note(aff_placement *p, const aff_placement_use *u, aff_error *err);

/* ---- moves ---- */

typedef struct aff_move {
    int layer, expert;
    aff_tier from, to;
    bool copy; /* bytes must be at `to` before it counts: not for the disk, nor for an inclusive pool */
} aff_move;

/* The next move over the edge below `upper` (AFF_TIER_CARD: into and out of the slab; AFF_TIER_HOST: between pool and
 * disk), false: none for now. The expert is busy from here on and a slot of `to` is spoken for. Who asks carries it
 * out:
 *   1. bytes at `to`, if `copy`; then publish the new address (none, if on disk), then aff__placement_landed: the tier
 * changes;
 *   2. once nobody can read the old place any more: aff__placement_released: its slot is free. Also after moves that
 * kept their slot (up from an inclusive pool, or from the disk), where it does nothing. or  aff__placement_failed
 * instead of 1: all is as before the move, and the expert is not tried again until it is used again. */
bool aff__placement_next(aff_placement *p, aff_tier upper, aff_move *out);
/* AFF_E_INVALID if there is no such move under way; nothing changes then. */
aff_status aff__placement_landed(aff_placement *p, const aff_move *m);
aff_status aff__placement_failed(aff_placement *p, const aff_move *m);
aff_status aff__placement_released(aff_placement *p, const aff_move *m);
/* A move that the owner wants (a slot that must be emptied, an expert whose bytes happen to be in memory): false if the
 * expert is busy or not in `from`, or `to` has no free slot or is no neighbour. No guard, no budget. */
bool aff__placement_force(aff_placement *p, int layer, int e, aff_tier from, aff_tier to, aff_move *out);
/* A tier gets another number of slots (spare ones included). Taken away: the coldest leave, by aff__placement_next
 * before anything else and under every strategy; aff__placement_excess says how many slots are still to be emptied. A
 * tier cannot appear or disappear, and an inclusive pool not become smaller than the slab: AFF_E_INVALID. */
aff_status aff__placement_resize(aff_placement *p, aff_tier tier, int64_t slots, aff_error *err);
int64_t aff__placement_excess(const aff_placement *p, aff_tier tier);
/* Keeps an expert where it is (or no longer); counts nothing, nests not. A move under way is not affected. */
void aff__placement_pin(aff_placement *p, int layer, int e, bool pinned);

/* ---- what is ---- */

aff_tier aff__placement_tier(const aff_placement *p, int layer, int e);
bool aff__placement_busy(const aff_placement *p, int layer, int e);
float aff__placement_heat(const aff_placement *p, int layer, int e);
/* All of them: heat and tier [layers][experts], either NULL. */
void aff__placement_planes(const aff_placement *p, float *heat, uint8_t *tier);
int aff__placement_residents(const aff_placement *p, int layer, aff_tier tier);
int64_t aff__placement_free_slots(const aff_placement *p, aff_tier tier);
aff_placement_shape aff__placement_shape_now(const aff_placement *p);
aff_placement_options aff__placement_options_now(const aff_placement *p); /* resolved */

/* All since the start, indexed by the edge's upper tier where there is an index. Promoted: up over the edge. */
typedef struct aff_placement_counts {
    int64_t notes[2];   /* by phase */
    int64_t used[2][3]; /* experts that dispatches used, by phase and the tier they were in */
    int64_t promotions[2], demotions[2], failed[2];
    int64_t rounds[2];                      /* pairs that were looked at */
    int64_t refused[2];                     /* by the guard */
    int64_t starved_up[2], starved_down[2]; /* halves left out for want of a free slot above or below */
    int64_t no_supply[2];                   /* nothing to promote or nothing to demote */
    int64_t readmits[2];                    /* promoted after they were demoted */
    int64_t distinct[2];                    /* experts ever promoted */
    int64_t in_flight;                      /* now */
} aff_placement_counts;
aff_placement_counts aff__placement_counts_now(const aff_placement *p);
#endif
