/* types.h - the operands that model code hands to a backend: matrices, experts and plans over them. */
#ifndef AFF_BACKEND_TYPES_H
#define AFF_BACKEND_TYPES_H
#include "format/dtype.h"
#include <stdbool.h>
#include <stdint.h>

/* How much of the published arithmetic is reproduced (design 5, spec model-v4 16.1).
 *   math  float32 everywhere, no quantiser simulation
 *   sim   math plus A8(64) on KV rows, Hadamard and A4 in the indexer
 *   fast  the production definition: bf16 activations into FP8 and bf16 matrices, exact integer routed experts */
typedef enum aff_numerics { AFF_MATH, AFF_SIM, AFF_FAST } aff_numerics;

/* A dense matrix, row-major [rows][cols]; y = W x. */
typedef struct aff_weight {
    aff_dtype dtype; /* AFF_F32, AFF_BF16, AFF_FP8 (128x128 tiles) or AFF_FP8_32 (32x32 tiles) */
    int rows, cols;
    const void *data;     /* aligned to the element size */
    const uint8_t *scale; /* FP8: E8M0 [ceil(rows/tile)][ceil(cols/tile)] */
    bool wide;            /* activations stay float32 in `fast` too (router, hyper-connections) */
} aff_weight;

/* One matrix of a routed expert. dtype AFF_Q2P875G: codes [cols/64][rows][20], fields [cols/64][rows][3], rscale bf16 [rows].
 * dtype AFF_MXFP4: codes [rows][cols/2], fields = E8M0 [rows][cols/32], rscale unused. */
typedef struct aff_expert_mat {
    const uint8_t *codes, *fields, *rscale;
} aff_expert_mat;

typedef struct aff_expert {
    aff_expert_mat gate, up, down; /* gate, up [inter][hidden]; down [hidden][inter] */
} aff_expert;

/* What all experts of a model share. */
typedef struct aff_expert_shape {
    aff_dtype dtype; /* AFF_Q2P875G or AFF_MXFP4 */
    int hidden, inter;
    float swiglu_limit;                /* <= 0: no clamp */
    const int16_t (*table)[1024][4];   /* AFF_Q2P875G: [2 variants][1024][4] in units of 2^-9 */
} aff_expert_shape;

/* One expert's share of a batch: entries [first, first+count) of the plan's arrays. */
typedef struct aff_moe_tile {
    aff_expert expert;
    int id;
    int first, count;
} aff_moe_tile;

/* The router's choice for T rows as work on experts: tiles in ascending expert id, rows ascending inside a tile. */
typedef struct aff_moe_plan {
    int n_tiles, n_entries;
    const aff_moe_tile *tile;
    const int *row;      /* [n_entries] row of x */
    const int *rank;     /* [n_entries] place of this expert among the row's picks in ascending id, 0..K-1 */
    const float *weight; /* [n_entries] router weight, scaling factor included */
} aff_moe_plan;
#endif
