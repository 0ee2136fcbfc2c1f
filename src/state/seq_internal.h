/* seq_internal.h - what a sequence's state is made of; the forward pass writes it, seq.c owns it. */
#ifndef AFF_STATE_SEQ_INTERNAL_H
#define AFF_STATE_SEQ_INTERNAL_H
#include "backend/types.h"
#include "state/seq.h"

struct aff_seq {
    const aff_net *net;
    int64_t pos, capacity;
    int n_layers, n_stages;
    aff_layer_state layer[AFF_MAX_LAYERS]; /* trunk */
    aff_layer_state stage[AFF_MAX_STAGES]; /* draft */
    void *region; /* one reserved range holds every array */
    uint64_t region_size;
};
#endif
