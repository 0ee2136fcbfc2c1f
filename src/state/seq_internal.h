/* seq_internal.h - what a sequence's state is made of; the forward pass writes it, seq.c owns it. */
#ifndef AFF_STATE_SEQ_INTERNAL_H
#define AFF_STATE_SEQ_INTERNAL_H
#include "backend/memory.h"
#include "backend/types.h"
#include "state/seq.h"
#include <pthread.h>
#include <stdatomic.h>

/* An array that grows with the context: one row for `ratio` positions. */
typedef struct aff_span {
    uint64_t off; /* in the region; page-aligned, as is the room behind it */
    uint64_t row_bytes;
    int ratio;
    bool key; /* indexer keys */
} aff_span;

struct aff_seq {
    const aff_net *net;
    const aff_memory *mem;
    int64_t pos, capacity;
    int64_t high;  /* one past the last position ever written since the reset: what lies that far back in a history ring
                      is gone */
    int64_t floor; /* what lies below in the rings was not restored */
    int64_t commit, margin;
    pthread_mutex_t lock; /* held while `backed` changes */
    _Atomic int64_t backed;
    aff_grower *grower;
    int64_t grow_to; /* the grower's: what is asked for, 0 nothing; the next that waits */
    struct aff_seq *grow_next;
    int n_layers, n_stages, n_spans;
    aff_rowfmt row, key;                   /* of all layers */
    aff_layer_state layer[AFF_MAX_LAYERS]; /* trunk */
    aff_layer_state stage[AFF_MAX_STAGES]; /* draft */
    aff_span span[2 * AFF_MAX_LAYERS];
    void *region; /* one reserved range holds every array: all rings, room for a copy of them, then the spans */
    uint64_t region_size, rings_size, fixed_size;
    void *saved;
    aff_layer_state *table; /* device memory only: copies of layer, then stage, there */
    bool has_saved;
    int64_t saved_pos, saved_high;
};

/* Around the writing of n rows at pos, for which memory must be there: after undo the sequence is as it was at begin.
 * More rows than AFF_MAX_ROLLBACK overwrite history that a second attempt needs, so the rings are copied first; fewer
 * do no harm (spec 10.4). */
aff_status aff__seq_begin(aff_seq *s, int n, aff_error *err);
void aff__seq_undo(aff_seq *s);
/* Memory for `positions` positions if the system has it. Any thread, while the sequence exists. */
void aff__seq_ahead(aff_seq *s, int64_t positions);

/* First position whose projections a layer of this ratio can still need at `pos` (spec 10.1): the open group, and with
 * overlap (ratio 4) the one before. */
static inline int64_t aff__history_from(int64_t pos, int ratio)
{
    const int64_t g = pos / ratio - (ratio == 4);
    return g > 0 ? g * ratio : 0;
}
#endif
