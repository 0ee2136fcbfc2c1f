/* seq.h - the attention state of one sequence (spec model-v4 section 10): raw rings, compressed rows, indexer keys, compressor
 * histories, draft rings, and the number of committed positions. */
#ifndef AFF_STATE_SEQ_H
#define AFF_STATE_SEQ_H
#include "base/status.h"
#include "model/net.h"

typedef struct aff_seq aff_seq;

/* Positions that can be taken back at once: the history rings are that much larger than their look-back (spec 10.3). */
enum { AFF_MAX_ROLLBACK = 8 };
/* Rows of one sequence in one pass; the raw ring is that much larger than the window. */
enum { AFF_MAX_CHUNK = 256 };

/* Room for `positions` positions (at most the model's max_positions): address space is reserved, memory is taken as it is used. */
aff_status aff__seq_create(aff_seq **out, const aff_net *net, int64_t positions, aff_error *err);
void aff__seq_free(aff_seq *s);
void aff__seq_reset(aff_seq *s); /* empty, as new */
int64_t aff__seq_pos(const aff_seq *s); /* committed positions: the next row runs at this position */
int64_t aff__seq_capacity(const aff_seq *s);
/* Back to `keep` positions: at most AFF_MAX_ROLLBACK fewer than the most there ever were since the reset. */
aff_status aff__seq_rollback(aff_seq *s, int64_t keep, aff_error *err);
#endif
