/* keep.h - the beginnings of one conversation in memory, so that its next turn runs only what is new: what an interactive chat has in
 * place of the files of prefix.h. Each published position is a mark: the growing rows since the mark before, and the tail there. A text that
 * goes another way from some point loses the marks behind that point. The last AFF_KEEP_TAILS marks can be restored; older ones only
 * hold rows for them. One thread at a time. */
#ifndef AFF_STATE_KEEP_H
#define AFF_STATE_KEEP_H
#include "state/snapshot.h"

enum { AFF_KEEP_TAILS = 6 };

typedef struct aff_keep aff_keep;
aff_status aff__keep_create(aff_keep **out, aff_error *err);
void aff__keep_free(aff_keep *k);
/* Brings `s`, which is empty, to the longest beginning of id[0..n) that is known, at most `most` positions. Errors are those of
 * growing the sequence; then it is empty. */
aff_status aff__keep_restore(aff_keep *k, aff_seq *s, const int32_t *id, int64_t n, int64_t most, aff_error *err);
/* The sequence has run exactly id[0..pos), none of which will be taken back. Without memory for it, nothing is kept. */
void aff__keep_publish(aff_keep *k, const aff_seq *s, const int32_t *id);
/* Bytes held. */
uint64_t aff__keep_bytes(const aff_keep *k);
#endif
