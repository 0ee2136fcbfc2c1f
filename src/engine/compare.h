/* compare.h - a model against another, or against saved logits, over a text. Both run layer by layer (model/sweep.h),
 * as many rows at a time as the memory allowed holds, so either may be larger than the machine's memory. */
#ifndef AFF_ENGINE_COMPARE_H
#define AFF_ENGINE_COMPARE_H
#include "base/cpu.h"
#include "engine/logits_file.h"
#include "model/sweep.h"

/* The rows that predict the tokens id[0..n): sequences of `chunk` rows, each begin-of-sequence and then the tokens
 * before; so row i, at position i % chunk of its sequence, predicts id[i], and each token is predicted once. *rows is
 * malloc'ed. */
aff_status aff__text_rows(const int32_t *id, int64_t n, int64_t chunk, int32_t bos, int32_t **rows, aff_error *err);
/* Refuses ids outside the vocabulary, an empty text, and sequences longer than the model's context. */
aff_status aff__text_check(const int32_t *id, int64_t n, int64_t chunk, const aff_net *net, aff_error *err);
/* XXH3-64 of ids. */
uint64_t aff__text_hash(const int32_t *id, int64_t n);

/* One of the two. The fields below net change no result: that is what a comparison of a net with itself shows. */
typedef struct aff_compare_side {
    const aff_net *net; /* NULL: absent */
    int threads;        /* <= 0: one per CPU */
    int pass;           /* rows at a time; 0: AFF_MAX_CHUNK */
    bool capped;        /* at most this instruction set; else the process's */
    aff_cpu_level level;
} aff_compare_side;

typedef struct aff_compare {
    aff_compare_side model, ref;
    const aff_logits_in *saved; /* instead of ref.net; NULL: none */
    aff_logits_out *save;       /* receives ref's rows, or model's if there is no ref; NULL: none */
    const int32_t *id;          /* [n] the text */
    int64_t n, chunk;
    int32_t bos;
    uint64_t memory; /* bytes for the rows in flight of one side; at least one sequence is run at a time */
    void *ctx;
    /* `layer` of `layers` done for rows first .. first+rows-1 of n; false stops (AFF_E_CANCELLED). NULL: none */
    bool (*progress)(void *ctx, bool ref, int64_t first, int64_t rows, int layer, int layers);
} aff_compare;

/* Fills row[0..n). model.net NULL is allowed when there is ref.net and save: rows are then those of a model without
 * reference. The two must have one vocabulary, and `saved` this text, chunk and begin of sequence. */
aff_status aff__compare(const aff_compare *c, aff_eval_row *row, aff_error *err);
#endif
