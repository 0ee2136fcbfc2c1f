/* tiers.h - where every routed expert is right now, and what carries it elsewhere (design 3 promise 1; spec runtime 2-6, 15; docs/placement.md).
 *
 * An expert is in exactly one of three tiers: CARD (a slot of the slab, which the card's owner holds), HOST (a slot of the pool) or DISK (its
 * file, which has all of them). This file owns the table of slots, the pool, the loader and the mover's thread; placement.h decides who moves; a
 * card takes part through aff_card. Draft stages are further layers behind the trunk's.
 *
 * A pass:   aff__tiers_begin                  what the mover has landed becomes valid: the card's table is told, slots that were left are free
 *           aff__tiers_note per layer         what it used
 *           aff__tiers_end                    the next moves go to the mover
 * On the host a layer's experts are taken with aff__tiers_open / _next / _close: those in memory first, then each group of experts as it
 * arrives from the disk. A slot that somebody computes from is pinned, and nothing is read into a pinned slot. With a card one thread makes
 * passes, one at a time, and a slot that a move has left is not reused before the begin that published the move.
 *
 * Without a pool of its own ("mapped") every expert is used where it lies in the file's mapping or in memory, which is HOST. */
#ifndef AFF_EXPERTS_TIERS_H
#define AFF_EXPERTS_TIERS_H
#include "experts/loader.h"
#include "experts/placement.h"
#include "experts/pool.h"
#include "experts/store.h"

typedef struct aff_tiers aff_tiers;

/* A place. host: the pool slot's address, NULL without one; an expert on the CARD has one too while the pool is inclusive. */
typedef struct aff_tier_place {
    aff_tier tier;
    int64_t slab, pool; /* slots; -1: none */
    const uint8_t *host;
} aff_tier_place;

typedef struct aff_tier_change {
    int layer, expert;
    aff_tier_place place;
} aff_tier_change;

/* A slot's bytes from the pool to the slab (up) or back. */
typedef struct aff_tier_copy {
    bool up;
    int64_t slab;
    uint8_t *host;
} aff_tier_copy;

/* A card's side. All calls return when they are done. */
typedef struct aff_card {
    void *ctx;
    int64_t slots; /* of the slab, spare ones (placement's `shadow`) included */
    /* The pool, once, before anything is in it: registers its memory. A refusal is told to `warn` with what it costs; the card's copies must then
     * go through memory of its own. */
    aff_status (*attach)(void *ctx, uint8_t *base, uint64_t bytes, uint64_t pitch, aff_error *err);
    void (*detach)(void *ctx, uint8_t *base, uint64_t bytes);
    /* The mover's thread; while the tiers are filled, the thread that does it. */
    aff_status (*copy)(void *ctx, const aff_tier_copy *c, int n, aff_error *err);
    /* Within begin, before anything of the pass is queued. After the fill: all of the table. */
    aff_status (*publish)(void *ctx, const aff_tier_change *c, int n, aff_error *err);
} aff_card;

typedef struct aff_tier_options {
    bool mapped;       /* no pool: experts are used where they lie, which must be the kernels' layout (aff__experts_in_place) */
    int64_t slots;     /* of host memory, pool and staging together (aff__tiers_split) */
    int64_t staging;   /* of them, for experts on disk that are in use; 0: as aff__tiers_split says */
    bool inclusive;    /* with a card: what is in the slab keeps its pool slot */
    bool fill;         /* experts are brought to their first places by aff__tiers_create; else as they are used (no card only) */
    aff_placement_options placement;
    const float *profile; /* [layers + stages][experts] popularity, for the first places; NULL: all alike. Read by create only */
    aff_loader_options loader;
    const aff_card *card; /* NULL: none. Copied */
    int picks;            /* experts a row: no fewer slots than that are staging */
    bool (*progress)(void *ctx, int64_t done, int64_t total); /* of the fill; NULL allowed; false: stop, AFF_E_CANCELLED */
    void *progress_ctx;
} aff_tier_options;

/* How `slots` slots are dealt. staging: 0: an eighth of them, at least 2 * picks where that leaves a pool of the same size, at most 64; the rest is the
 * pool, of all experts (`total`) at most. Fewer than `picks` slots are AFF_E_INVALID, and the error names the least --host-pool-mib that works. */
enum { AFF_MOST_STAGING = 64 };
typedef struct aff_tier_split {
    int64_t pool, staging;
} aff_tier_split;
aff_status aff__tiers_split(int64_t slots, int64_t staging, int64_t total, int picks, uint64_t pitch, aff_tier_split *out, aff_error *err);

/* trunk and draft (NULL: none) must outlive the tiers. */
aff_status aff__tiers_create(aff_tiers **out, aff_experts *trunk, aff_experts *draft, const aff_tier_options *o, aff_error *err);
/* Ends the mover's thread; nobody may be in a pass. */
void aff__tiers_free(aff_tiers *t);
int aff__tiers_layers(const aff_tiers *t); /* trunk and draft */
int aff__tiers_experts(const aff_tiers *t);
bool aff__tiers_mapped(const aff_tiers *t);
aff_slot_layout aff__tiers_layout(const aff_tiers *t);
aff_slots *aff__tiers_pool(const aff_tiers *t);     /* NULL when mapped */
aff_loader *aff__tiers_loader(const aff_tiers *t);  /* NULL when mapped */
/* With a card: slots 0..n-1 of the pool are staging, for its owner to use as it likes. */
int64_t aff__tiers_staging(const aff_tiers *t);

/* ---- a pass; any thread, with a card one ---- */

/* Fails when the card's table cannot be written, or with what a failed move left broken. */
aff_status aff__tiers_begin(aff_tiers *t, aff_error *err);
/* One layer's use; before the end. Counts are by rows (placement.h). */
aff_status aff__tiers_note(aff_tiers *t, const aff_placement_use *u, aff_error *err);
/* The same from a layer's picks [rows][picks], as the router gave them (already checked). value [experts]: what the router ranked by, summed over the
 * rows, for near misses (near.h); NULL: not known. */
aff_status aff__tiers_note_picks(aff_tiers *t, int layer, aff_use_phase phase, const int32_t *picks, int rows, int K, const float *value, aff_error *err);
void aff__tiers_end(aff_tiers *t);

/* ---- the host's use of a layer's experts ---- */

/* One layer's experts on their way to the kernels. */
typedef struct aff_tier_use aff_tier_use;
uint64_t aff__tier_use_bytes(int experts);
aff_status aff__tier_use_create(aff_tier_use **out, int experts, aff_error *err);
void aff__tier_use_free(aff_tier_use *u);
/* id[0..n): distinct, ascending. Starts reading what is on disk, in the order of the disk. Every open needs a close. */
void aff__tiers_open(aff_tiers *t, aff_tier_use *u, int layer, const int *id, int n);
/* The next experts that can be computed: `which` [n of open] indices into id, ascending, `at` their addresses, valid until the next call on u. Waits
 * for at least one; *count 0: all were there. A read that failed for good is the error. */
aff_status aff__tiers_next(aff_tiers *t, aff_tier_use *u, int *which, aff_expert *at, int *count, aff_error *err);
void aff__tiers_close(aff_tiers *t, aff_tier_use *u);

/* ---- other ---- */

/* Where an expert is by the table (not by moves under way). Any thread. */
aff_tier_place aff__tiers_place(aff_tiers *t, int layer, int e);
aff_tier aff__tiers_tier(aff_tiers *t, int layer, int e);
/* Whether its bytes are in host memory, if only in a staging slot. Any thread. */
bool aff__tiers_at_hand(aff_tiers *t, int layer, int e);
/* heat and tier [layers][experts] of trunk and draft, either NULL. */
void aff__tiers_planes(aff_tiers *t, float *heat, uint8_t *tier);
/* The slab shrinks or grows to `slots` (KV growth): the experts in slots from there on leave, the coldest of the rest make room for them if
 * they are hotter. Between passes; returns when the slots are empty and the table is told. */
aff_status aff__tiers_resize(aff_tiers *t, int64_t slots, aff_error *err);
/* Keeps an expert in its tier, or no longer. */
void aff__tiers_pin(aff_tiers *t, int layer, int e, bool pinned);
/* Returns when the mover has nothing to do (tests; before measuring). */
void aff__tiers_settle(aff_tiers *t);

/* Since the start. Those marked (card) are added by the card's owner with aff__tiers_count. */
typedef struct aff_tier_counters {
    int64_t picks[2][AFF_TIERS]; /* experts that dispatches used, by phase and tier (placement's count) */
    int64_t staged_again;        /* on disk, but their bytes were still in a staging slot */
    int64_t link_items;          /* (card) experts read over the link inside kernels */
    uint64_t link_bytes;
    uint64_t up_bytes, down_bytes; /* copied by moves: to the card, from it */
    uint64_t up_copies, down_copies;
    uint64_t disk_bytes;           /* read, for whatever reason */
    int64_t disk_requests, disk_failed, disk_retries;
    uint64_t disk_busy_ns;         /* with a read under way */
    int64_t staged;                /* experts read into staging slots because they were picked */
    int64_t promotions[2], demotions[2], refused[2], starved[2], readmits[2], failed[2]; /* moves over the edge below CARD, below HOST */
    int64_t prefetch_asked, prefetch_used, prefetch_wasted, prefetch_cancelled; /* (card) */
    uint64_t prefetch_bytes;
    int64_t guess_picks, guess_right; /* (card) picks that were predicted by a router ahead of its layer, and rightly */
    int64_t help_items;            /* (card) experts computed by the host */
    uint64_t stream_bytes;         /* (card) experts copied for a prompt's pass */
    uint64_t wait_disk_ns;         /* the host had nothing to compute before a read was done */
    uint64_t wait_link_ns;         /* (card) where it can be measured */
    int64_t quarantined, moves_in_flight; /* now */
} aff_tier_counters;
aff_tier_counters aff__tiers_counters(aff_tiers *t);
/* One line for people, without its end: hits, what the disk gave, moves. */
void aff__tier_counters_line(const aff_tier_counters *c, char *out, size_t cap);
/* Adds the (card) fields of `more`. */
void aff__tiers_count(aff_tiers *t, const aff_tier_counters *more);

/* Tests: the mover takes moves but carries none out while it is on. */
void aff__tiers_stall(aff_tiers *t, bool on);
/* Tests: the invariants of the table, AFF_E_INVALID naming the first that does not hold. */
aff_status aff__tiers_check(aff_tiers *t, aff_error *err);
#endif
