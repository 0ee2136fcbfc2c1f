/* seq_internal.h - what a sequence's state is made of; the forward pass writes it, seq.c owns it. */
#ifndef AFF_STATE_SEQ_INTERNAL_H
#define AFF_STATE_SEQ_INTERNAL_H
#include "backend/types.h"
#include "state/seq.h"

struct aff_seq {
    const aff_net *net;
    int64_t pos, capacity;
    int64_t high; /* one past the last position ever written since the reset: what lies that far back in a history ring is gone */
    int n_layers, n_stages;
    aff_layer_state layer[AFF_MAX_LAYERS]; /* trunk */
    aff_layer_state stage[AFF_MAX_STAGES]; /* draft */
    void *region; /* one reserved range holds every array: all rings, then the rows that grow, then room for a copy of the rings */
    uint64_t region_size, rings_size;
    void *saved;
    bool has_saved;
    int64_t saved_pos, saved_high;
};

/* Around the writing of n rows at pos: after undo the sequence is as it was at begin. More rows than AFF_MAX_ROLLBACK overwrite
 * history that a second attempt needs, so the rings are copied first; fewer do no harm (spec 10.4). */
void aff__seq_begin(aff_seq *s, int n);
void aff__seq_undo(aff_seq *s);
#endif
