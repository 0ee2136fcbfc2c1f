/* tiers_internal.h - the tiers' table of slots, and what its parts share: tiers.c (made, filled, asked), tiers_use.c (staging and the host's use of a
 * layer), tiers_move.c (moves, the mover's thread). All of it under one lock, which nobody holds while bytes move. */
#ifndef AFF_EXPERTS_TIERS_INTERNAL_H
#define AFF_EXPERTS_TIERS_INTERNAL_H
#include "experts/tiers.h"
#include <pthread.h>

/* What is in a slot of host memory. */
typedef enum aff_slot_state {
    AFF_SLOT_FREE,    /* the pool's, empty */
    AFF_SLOT_POOL,    /* the pool's, an expert's place */
    AFF_SLOT_TAKEN,   /* the pool's, a move is on its way into it */
    AFF_SLOT_LEFT,    /* the pool's, the expert has moved on, but somebody still computes from it */
    AFF_SLOT_IDLE,    /* staging, empty */
    AFF_SLOT_FILLING, /* staging, being read */
    AFF_SLOT_STAGED,  /* staging, holds an expert that is on disk */
    AFF_SLOT_FAILED,  /* staging, the read failed; until those who wait for it have seen that */
    AFF_SLOT_CARD     /* staging of a card's owner, or the mover's own */
} aff_slot_state;

typedef struct aff_slot_entry {
    uint8_t state;
    int32_t expert;      /* index, -1: none */
    int32_t pins;        /* uses of the host */
    int32_t load;        /* FILLING, FAILED: its request */
    int32_t newer, older; /* STAGED without pins, by use; FREE and IDLE: older is the next of the list */
} aff_slot_entry;

/* A read into a staging slot. */
typedef struct aff_stage_load {
    aff_load load;
    aff_tiers *tiers;
    int32_t slot, next;
} aff_stage_load;

/* A move on its way. */
typedef struct aff_mover_job {
    struct aff_mover_job *next;
    aff_move move;
    int32_t slot; /* of host memory it comes into, -1: none */
    int64_t slab; /* of the slab it comes into, -1: none */
    bool ok;
    aff_load load;
    aff_tier_copy copy;
} aff_mover_job;

enum { AFF_MOVER_JOBS = 64 };

struct aff_tiers {
    aff_experts *store[2]; /* trunk, draft or NULL */
    int trunk_layers, layers, experts;
    int64_t total; /* layers * experts */
    aff_slot_layout layout[2];
    uint64_t pitch;
    bool mapped, inclusive;
    aff_tier_split split;
    int64_t bounces; /* slots behind the pool and staging, for moves between card and disk */
    aff_card card;
    bool has_card, attached;
    aff_slots *pool;
    aff_loader *loader;

    pthread_mutex_t lock; /* everything below */
    pthread_cond_t changed; /* a read is over, a slot can be had, a job is done */
    pthread_cond_t work;    /* for the mover */
    aff_placement *place;
    int32_t *slot, *staged; /* [total] pool slot, staging slot; -1: none */
    int64_t *slab;          /* [total] -1: none */
    aff_slot_entry *entry;  /* [slots] */
    int32_t free_slot, idle_slot; /* heads of lists */
    int64_t free_slots, pool_spare;
    int32_t newest, oldest; /* STAGED without pins */
    aff_stage_load *load;   /* [staging] */
    int32_t free_load;
    int64_t *free_slab; /* stack */
    int64_t free_slabs, slab_slots;
    aff_tier_counters n;

    /* The mover. */
    pthread_t mover;
    bool started, stop, stalled, in_pass;
    aff_mover_job *job, *free_job; /* [AFF_MOVER_JOBS] */
    aff_mover_job *wanted, *wanted_last, *landed;
    int at_work; /* jobs wanted or being carried out */
    aff_tier_change *change; /* [AFF_MOVER_JOBS] */
    aff_status broken;       /* the card's copies failed */
    aff_error broken_err;
    int32_t *note_id, *note_count; /* [experts] */
    aff_loader_options loader_options;
};

static inline int64_t aff__tier_index(const aff_tiers *t, int layer, int e)
{
    return (int64_t)layer * t->experts + e;
}

/* tiers_use.c; under the lock. Makes a slot empty: the pool's or staging's. */
void aff__tiers_free_slot(aff_tiers *t, int32_t slot);
void aff__tiers_idle_slot(aff_tiers *t, int32_t slot);
int32_t aff__tiers_take_free(aff_tiers *t); /* -1: none */
/* The bytes of an expert that was just promoted are in a staging slot: that becomes its pool slot, and an empty slot of the pool staging. */
void aff__tiers_adopt(aff_tiers *t, int64_t i);
/* An address of an expert. */
aff_expert aff__tiers_at(const aff_tiers *t, int layer, int e, int32_t slot);

/* tiers_move.c; under the lock. */
void aff__tiers_ask(aff_tiers *t); /* the policy for moves, which go to the mover */
void aff__tiers_released(aff_tiers *t, int32_t slot); /* a LEFT slot that nobody uses any more */
aff_status aff__tiers_mover_start(aff_tiers *t, aff_error *err);
void aff__tiers_mover_stop(aff_tiers *t);
#endif
