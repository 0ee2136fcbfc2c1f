/* tokenizer_data.h - what a loaded tokenizer is; shared by its loader (tokenizer_load.c) and its use (tokenizer.c). */
#ifndef AFF_TEXT_TOKENIZER_DATA_H
#define AFF_TEXT_TOKENIZER_DATA_H
#include "text/bpe.h"

typedef struct aff_added {
    uint32_t id;
    bool normalized; /* matched in the second pass (spec 1.4) */
} aff_added;

/* Read-only once loaded, so any number of threads may use one. */
struct aff_tokenizer {
    uint32_t n;       /* ids, 0..n-1 */
    char *bytes;      /* of all ids, one after the other */
    size_t *offset;   /* [n + 1] into bytes */
    uint8_t *special; /* [n] */
    aff_added *added; /* [n_added] ascending by their bytes */
    uint32_t n_added;
    uint32_t added_first[257]; /* added tokens that start with byte b: [added_first[b], added_first[b + 1]) */
    uint32_t byte_id[256];     /* id of the token that is one byte */
    aff_merges merges;
};
#endif
