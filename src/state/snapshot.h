/* snapshot.h - a sequence's state as bytes (spec model-v4 10.5). A restored sequence equals a recomputed one bit for
 * bit: the same results, and the same rollbacks as far back as the snapshot's `low`.
 *
 * The state at a position splits in two. What only grows (compressed rows, indexer keys) is a list of rows that depend
 * on the tokens up to their group's end alone, so any range of positions can be saved and loaded by itself and shared
 * by all sequences with the same beginning. The rest, the tail, is what rolls: the last rows of the raw rings and draft
 * rings, the projections of the open groups; it belongs to one position, which need not be at the end of any group. */
#ifndef AFF_STATE_SNAPSHOT_H
#define AFF_STATE_SNAPSHOT_H
#include "state/seq.h"

/* Rows of the groups that end in positions from..to-1 (from <= to <= pos): bytes, out, in. Loading needs to <= capacity
 * and does not move the position. Adjacent ranges make up the whole. */
uint64_t aff__seq_rows_bytes(const aff_seq *s, int64_t from, int64_t to);
aff_status aff__seq_rows_save(const aff_seq *s, int64_t from, int64_t to, uint8_t *out, aff_error *err);
aff_status aff__seq_rows_load(aff_seq *s, int64_t from, int64_t to, const uint8_t *in, aff_error *err);

/* The tail at pos with rollback down to `low` (0 <= pos - low <= AFF_MAX_ROLLBACK): bytes; out for the sequence's own
 * pos and low; in, which sets pos and low. The rows of 0..pos must have been loaded. */
uint64_t aff__seq_tail_bytes(const aff_seq *s, int64_t pos, int64_t low);
aff_status aff__seq_tail_save(const aff_seq *s, uint8_t *out, aff_error *err);
aff_status aff__seq_tail_load(aff_seq *s, int64_t pos, int64_t low, const uint8_t *in, aff_error *err);

/* All of it in one piece of memory: malloc'ed, freed by the caller. Restoring checks that the bytes are of a sequence
 * of the same network in the same numerics and are whole; after an error the sequence is as it was. */
aff_status aff__seq_snapshot(const aff_seq *s, uint8_t **out, uint64_t *size, aff_error *err);
aff_status aff__seq_restore(aff_seq *s, const uint8_t *in, uint64_t size, aff_error *err);

/* XXH3-128 of everything the future can depend on, draft rings included: equal states have equal digests. */
typedef struct aff_hash {
    uint64_t lo, hi;
} aff_hash;
aff_hash aff__seq_digest(const aff_seq *s);
/* What state bytes mean: model (aff__net_identity), numerics, row formats, program version. States move between
 * sequences of equal fingerprints only. */
aff_hash aff__seq_fingerprint(const aff_net *n, const char *results); /* backend/device.h; NULL: the CPU's */
#endif
