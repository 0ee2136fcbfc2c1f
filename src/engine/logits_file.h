/* logits_file.h - a reference's predictions over a text, kept for later comparisons.
 *
 * Little-endian. Header of 80 bytes:
 *   0 "AFFLOGIT"   8 u32 version 1   12 u32 vocabulary   16 u64 positions   24 u32 top (0: whole rows)   28 u32 rows of
 * a sequence 32 u64 XXH3-64 of the text's ids (int32)   40 u64 fingerprint of the model   48 u32 numerics   52 u32
 * begin-of-sequence id 56 u64 XXH3-64 of everything after the header   64 u64 0   72 u64 XXH3-64 of the 72 bytes before
 * then a row per position, of one size: float32[vocabulary]; or, with top N, float64 log-sum-exp, float64 probability
 * of the ids that are not listed, float32 logit of the token that followed, u32 0, int32[N] ids in descending order of
 * logit (the lower id first among equals), float32[N] logits. Perplexity and agreement keep every digit with N; KL
 * counts the unlisted ids as one, which makes it a lower bound. The file has no other bytes. */
#ifndef AFF_ENGINE_LOGITS_FILE_H
#define AFF_ENGINE_LOGITS_FILE_H
#include "engine/eval.h"

enum { AFF_LOGITS_TOP_MIN = 5, AFF_LOGITS_TOP_MAX = 4096 };

typedef struct aff_logits_head {
    uint32_t vocab, top, chunk, numerics, bos;
    uint64_t positions, text, model;
} aff_logits_head;

typedef struct aff_logits_out aff_logits_out;
/* A new file; rows follow in order. */
aff_status aff__logits_create(aff_logits_out **out, const char *path, const aff_logits_head *h, aff_error *err);
/* The next row, l [vocab], and the token that followed. */
aff_status aff__logits_put(aff_logits_out *o, const float *l, int32_t target, aff_error *err);
/* Refuses unless all positions are there; renames into place. Frees o in every case. */
aff_status aff__logits_finish(aff_logits_out *o, aff_error *err);
void aff__logits_abort(aff_logits_out *o);

typedef struct aff_logits_in aff_logits_in;
/* Maps and checks header and size; check_all: the hash of all rows too. */
aff_status aff__logits_open(aff_logits_in **out, const char *path, bool check_all, aff_error *err);
aff_status aff__logits_open_memory(aff_logits_in **out, const void *data, size_t size, const char *name, bool check_all,
                                   aff_error *err);
void aff__logits_close(aff_logits_in *f);
const aff_logits_head *aff__logits_head(const aff_logits_in *f);
/* Row i with the token that followed, into buffers of aff__logits_width floats and ids, which *r points to. Everything
 * in the row is checked. Any thread. */
aff_status aff__logits_get(const aff_logits_in *f, uint64_t i, int32_t target, float *logit, int32_t *id,
                           aff_eval_ref *r, aff_error *err);
static inline uint64_t aff__logits_width(const aff_logits_head *h)
{
    return h->top ? h->top : h->vocab;
}
#endif
