/* seq.h - the attention state of one sequence (spec model-v4 section 10): raw rings, compressed rows, indexer keys,
 * compressor histories, draft rings, and the number of committed positions. Rows lie in the compact formats of
 * quant/rows.h.
 *
 * Memory. What does not depend on the context (rings, histories) is there from the start. What grows with it
 * (compressed rows, indexer keys) has its address space reserved for `size` positions and memory for the first
 * `commit`. While a pass runs within `margin` of what is backed, the growing thread (grow.h), if there is one, adds memory for
 * as many more; a pass that would go beyond what is backed adds it itself. If the system refuses then, the pass fails with one
 * line and the sequence is as it was. */
#ifndef AFF_STATE_SEQ_H
#define AFF_STATE_SEQ_H
#include "base/status.h"
#include "backend/memory.h"
#include "model/net.h"

typedef struct aff_seq aff_seq;
typedef struct aff_grower aff_grower; /* grow.h */

/* Positions that can be taken back at once: the history rings are that much larger than their look-back (spec 10.3). */
enum { AFF_MAX_ROLLBACK = 8 };
/* Rows of one sequence that are stored at once, before any of them attends; the raw ring is that much larger than the window. A
 * longer pass goes through this part of attention in pieces. */
enum { AFF_MAX_CHUNK = 256 };

enum { AFF_KV_COMMIT = 65536, AFF_KV_MARGIN = 16384 };
typedef struct aff_seq_options {
    int64_t size;   /* positions there is room for, at most the model's max_positions; 0: that (--kv-size) */
    int64_t commit; /* positions backed from the start and kept by a reset; 0: AFF_KV_COMMIT or size, -1: none
                       (--kv-commit) */
    int64_t margin; /* how many more are backed at a time; 0: AFF_KV_MARGIN (--kv-margin) */
    const aff_memory *memory; /* where it lies, aff__runner_memory of its runner; NULL: the host's. Outlives the sequence */
    aff_grower *grower;       /* gives it memory ahead of its position; NULL: nobody does. Outlives the sequence */
} aff_seq_options;

/* Bytes of a sequence with `positions` positions backed, page by page as they are committed: what a memory plan must
 * count. */
typedef struct aff_seq_plan {
    int64_t positions;
    uint64_t raw, history; /* rings of the trunk */
    uint64_t draft;        /* rings of the draft stages */
    uint64_t copy;         /* room for a copy of the rings: a failed pass puts them back */
    uint64_t rows, keys;   /* compressed rows; indexer keys */
    uint64_t total;
    uint64_t row_bytes, key_bytes; /* of one row */
    double per_position;           /* bytes a position adds on average: sum over layers of row_bytes / ratio */
} aff_seq_plan;
aff_status aff__seq_plan(aff_seq_plan *out, const aff_net *net, int64_t positions, aff_error *err);

uint64_t aff__seq_handle_bytes(void); /* beside the plan: the description of a sequence */

aff_status aff__seq_open(aff_seq **out, const aff_net *net, const aff_seq_options *o, aff_error *err);
/* Room for `positions` positions, the rest by default. */
aff_status aff__seq_create(aff_seq **out, const aff_net *net, int64_t positions, aff_error *err);
void aff__seq_free(aff_seq *s);
void aff__seq_reset(aff_seq *s);        /* empty, as new; memory beyond `commit` goes back to the system */
int64_t aff__seq_pos(const aff_seq *s); /* committed positions: the next row runs at this position */
int64_t aff__seq_capacity(const aff_seq *s);
int64_t aff__seq_backed(const aff_seq *s);     /* positions that have memory */
uint64_t aff__seq_committed(const aff_seq *s); /* bytes of memory: aff__seq_plan of the backed positions, total */
/* Memory for `positions` positions at least (AFF_E_LIMIT beyond the capacity, AFF_E_NOMEM when the system refuses; then
 * nothing has changed). A pass does this itself. */
aff_status aff__seq_grow(aff_seq *s, int64_t positions, aff_error *err);
/* The lowest position a rollback can reach: AFF_MAX_ROLLBACK fewer than the most there ever were since the reset, and
 * after a restore no lower than the snapshot allows. */
int64_t aff__seq_low(const aff_seq *s);
aff_status aff__seq_rollback(aff_seq *s, int64_t keep, aff_error *err);
#endif
