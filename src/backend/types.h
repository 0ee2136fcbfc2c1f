/* types.h - the operands that model code hands to a backend: matrices, experts and plans over them. */
#ifndef AFF_BACKEND_TYPES_H
#define AFF_BACKEND_TYPES_H
#include "affinity.h" /* aff_numerics */
#include "format/dtype.h"
#include "quant/rows.h"
#include <stdbool.h>
#include <stdint.h>

enum { AFF_MAX_HC = 8 }; /* streams of the hyper-connections */

/* How router logits become scores (spec model-v4 8). */
typedef enum aff_scoring { AFF_SQRTSOFTPLUS, AFF_SIGMOID, AFF_SOFTMAX } aff_scoring;

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
    float *h; /* NULL, or [n_entries][inter]: receives what down multiplies (router weight included), before it is quantised */
} aff_moe_plan;

/* One layer's share of a sequence's attention state (spec model-v4 10.1). Rings hold position p in slot p mod size. */
typedef struct aff_layer_state {
    const aff_rowfmt *row, *key; /* of raw and comp; of ikey */
    void *raw;                   /* [raw_size] KV rows */
    int raw_size;
    void *comp;              /* [g] compressed rows, g = group; NULL for ratio 0 */
    float *hist_c, *hist_z;  /* [hist_size][coff*head_dim] projections; z with ape already added */
    void *ikey;              /* [g] indexer keys; NULL unless ratio 4 */
    float *ihist_c, *ihist_z; /* [hist_size][2*index_dim] */
    int hist_size;
} aff_layer_state;

/* The rows of a pass. Rows of one sequence are adjacent and in ascending position. */
typedef struct aff_rowset {
    int n;
    const int64_t *pos;             /* [n] absolute position */
    const int *first;               /* [n] first row of this pass that belongs to the same sequence */
    aff_layer_state *const *state;  /* [n] the layer's state of the row's sequence; arrays in it are the backend's memory */
    int at;                         /* rows of the pass in front of these: some ops run on its last rows only */
    /* Device memory only: [n] the sequence's states of all layers, in device memory, and which of them is at work. */
    const aff_layer_state *const *table;
    int layer;
} aff_rowset;

/* What the queries of a block see (spec 7.5, 13.2). */
typedef struct aff_view {
    int window;
    int ratio, topk; /* compressed rows: every complete group, of ratio 4 at most topk, chosen in sel; 0: none */
    const int *sel;  /* [n][topk] where (pos+1)/ratio > topk */
    /* A draft block: the last `window` rows before its first row, then its own rows, which are not stored. NULL, 0 otherwise. */
    const float *own; /* [n][head_dim] */
    int block;        /* rows of one block */
} aff_view;

/* y = W x for one input; groups > 1: block-diagonal, w is [groups*out][in], group g reads x[t][g*in ..]. */
typedef struct aff_product {
    const aff_weight *w;
    const float *x; /* [T][groups*cols] */
    float *y;       /* [T][rows] */
    int groups;     /* 0 counts as 1 */
} aff_product;

/* Where each expert's slot (experts/store.h) is, for a backend that plans its own work: [layers][experts] in its memory. A word is the
 * slot's address, aligned to 256, with AFF_BASE_CARD or AFF_BASE_HOST; 0: on disk. */
enum { AFF_BASE_CARD = 1, AFF_BASE_HOST = 2, AFF_BASE_TAGS = 255 };
typedef struct aff_expert_table {
    const uint64_t *base;
    int layers, experts;
    uint32_t plane[3][3]; /* from a slot's address: gate, up, down; codes, fields, row scales */
} aff_expert_table;

/* The keys of one query in the order of promise 0: ring rows lo .. lo+n_raw-1, then compressed rows, then extra rows. */
typedef struct aff_keyset {
    const aff_rowfmt *row; /* of raw and comp */
    const void *raw;
    int raw_size;
    int64_t lo;
    int n_raw;
    const void *comp;
    const int *sel; /* [n_comp] ascending groups; NULL: groups 0 .. n_comp-1 */
    int n_comp;
    const float *extra; /* [n_extra][head_dim] float32: a draft block's own rows */
    int n_extra;
} aff_keyset;
#endif
