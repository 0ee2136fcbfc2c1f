/* collect.h - an importance matrix of our own: how large the inputs of every routed expert's columns are over a text
 * (spec quantiser 8).
 *
 * The text runs in sequences as in compare.h, layer by layer. Per (layer, expert): how many rows were routed to it, the
 * sum of x[j]^2 over them for the input x of gate and up, and of h[j]^2 for the input h of down - what the matrix is
 * multiplied with, so h carries the router's weight. Sums are double in the order of rows; the file is a function of
 * the text and the model.
 *
 * Besides, the whole second moments, for error feedback (quant/feedback.h): sum of x[i] x[j] over all rows of a layer,
 * and of h[i] h[j] for each expert; float32 in the rows of one pass, double from pass to pass. A triangle of n columns
 * takes 2 n (n+1) bytes in the file and twice that in memory: for V4-Flash 1.4 GB for gate and up, 92 GB for down. */
#ifndef AFF_ENGINE_COLLECT_H
#define AFF_ENGINE_COLLECT_H
#include "model/sweep.h"

typedef enum aff_moments {
    AFF_MOMENTS_AUTO, /* gate and up if they take at most 8 GiB in the file, and down if at most 1 GiB */
    AFF_MOMENTS_NONE,
    AFF_MOMENTS_GATE, /* gate and up only */
    AFF_MOMENTS_ALL
} aff_moments;

typedef struct aff_collect {
    const aff_net *net;
    const int32_t *id; /* [n] the text */
    int64_t n, chunk;
    int32_t bos;
    int threads;
    aff_moments moments;
    uint64_t memory;     /* bytes for the rows in flight */
    const char *dataset; /* name of the text, for the file */
    void *ctx;
    /* As in compare.h. NULL: none */
    bool (*progress)(void *ctx, int64_t first, int64_t rows, int layer, int layers);
} aff_collect;

typedef struct aff_collected {
    int64_t unseen; /* (layer, expert) pairs that no row was routed to */
    int64_t pairs;  /* of so many */
} aff_collected;

/* Writes the GGUF `path` (llama.cpp's names; in_sum2 and counts of ffn_gate_exps, ffn_up_exps, ffn_down_exps; second
 * moments as in_cov, the upper triangle row by row: ffn_gate_exps [triangle][1], ffn_down_exps [triangle][experts]),
 * which appears when it is complete. */
aff_status aff__collect_imatrix(const aff_collect *c, const char *path, aff_collected *out, aff_error *err);
#endif
