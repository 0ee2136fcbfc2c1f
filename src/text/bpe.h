/* bpe.h - byte-pair merging of one piece (spec text-and-serving 1.6 d). */
#ifndef AFF_TEXT_BPE_H
#define AFF_TEXT_BPE_H
#include "text/tokenizer.h"

#define AFF_NO_ID UINT32_MAX

/* The merge rules: (left id, right id) -> id. A rule's rank is its result: the lowest goes first. Open addressing, at
 * most half full; an empty slot has result AFF_NO_ID. */
typedef struct aff_merge {
    uint32_t left, right, result;
} aff_merge;
typedef struct aff_merges {
    aff_merge *slot;
    uint32_t mask; /* slots - 1 */
} aff_merges;

/* Room for n rules (n < 2^29). */
aff_status aff__merges_init(aff_merges *m, uint32_t n, aff_error *err);
void aff__merges_free(aff_merges *m);
/* Adds a rule; its pair must be new and the room not used up. */
void aff__merges_add(aff_merges *m, uint32_t left, uint32_t right, uint32_t result);
/* The result of the rule of a pair, or AFF_NO_ID. */
uint32_t aff__merges_find(const aff_merges *m, uint32_t left, uint32_t right);

/* Working memory of one thread; zero-initialise, keep for any number of pieces. */
typedef struct aff_bpe {
    struct aff_bpe_symbol *symbol; /* [cap] */
    uint64_t *heap;                /* [2 * cap] */
    size_t cap;
    size_t n_heap;
} aff_bpe;
void aff__bpe_free(aff_bpe *b);

/* Appends to `out` the ids of the piece s[0..n): starts with byte_id of each byte and applies the lowest rule, the
 * leftmost among equals, until none applies. O(n log n). A piece of 4 GiB or more is AFF_E_LIMIT. */
aff_status aff__bpe_encode(aff_bpe *b, const aff_merges *m, const uint32_t byte_id[256], const uint8_t *s, size_t n,
                           aff_ids *out, aff_error *err);
#endif
