/* quantize_plan.h - what of a checkpoint goes where in a container: names, shapes, dtypes (spec container 5, model-v4
 * 2, 3, model-v41 2, 3). */
#ifndef AFF_QUANT_QUANTIZE_PLAN_H
#define AFF_QUANT_QUANTIZE_PLAN_H
#include "format/dtype.h"
#include "format/safetensors.h"
#include "quant/expert.h"
#include "quant/quantize.h"

/* One dense tensor of the container. */
typedef struct aff_qdense {
    char name[64];
    aff_dtype dtype; /* AFF_F32, AFF_BF16, AFF_FP8, AFF_FP8_32 */
    bool refold;     /* AFF_FP8 from scales on 32 x 32 tiles (refold.h) */
    uint64_t rows, cols;
    const aff_st_tensor *src, *scale; /* scale: FP8 only */
    uint64_t most;                    /* integer sources: values must be below this */
    uint64_t index;                   /* the writer's */
} aff_qdense;

/* One matrix of an expert: w1, w3, w2 in this order. */
typedef struct aff_qmatrix {
    const aff_st_tensor *weight, *scale;
} aff_qmatrix;

/* What a layer of V4.1 has besides (spec model-v41 3). */
enum { AFF_Q_KV = 1, AFF_Q_INDEX = 2, AFF_Q_ENGRAM = 4 };

typedef struct aff_qplan {
    aff_ckpt *ckpt;
    char *config; /* the bytes of config.json */
    size_t config_size;
    /* Fields of config.json. */
    int64_t vocab, hidden, layers_in_config, heads, head_dim, q_rank, o_groups, o_rank, index_heads, index_dim, experts,
        top_k, inter, hash_layers, hc, markov_rank, taps;
    int64_t *ratios;
    uint64_t n_ratios;
    bool v41;        /* DeepSeek-V4.1 */
    uint8_t *roles;  /* V4.1: [layers_in_config] AFF_Q_* */
    int64_t engram;  /* V4.1: columns of engram.wkv */
    int64_t stages;  /* mtp.S found in the checkpoint */
    bool has_dspark; /* mtp.0.main_proj present: the 0731 generation */

    uint32_t layers; /* of the container: trunk layers or draft stages */
    aff_qdense *dense;
    uint64_t n_dense, cap_dense;
    aff_qmatrix *matrices; /* [layers][experts][3] */
    const aff_st_tensor **used;
    uint64_t n_used, cap_used;
} aff_qplan;

/* Opens the checkpoint and maps every tensor in scope; anything missing, misshapen, of a wrong dtype or left over is an
 * error that names it. Free with aff__qplan_free, also after an error. */
aff_status aff__qplan_make(aff_qplan *p, const aff_quantize_options *o, aff_error *err);
void aff__qplan_free(aff_qplan *p);

/* Reads config.json into p; part of aff__qplan_make. */
aff_status aff__qplan_config(aff_qplan *p, const aff_quantize_options *o, aff_error *err);

static inline const aff_qmatrix *aff__qplan_expert(const aff_qplan *p, uint64_t layer, uint64_t expert)
{
    return p->matrices + (layer * (uint64_t)p->experts + expert) * 3;
}
#endif
