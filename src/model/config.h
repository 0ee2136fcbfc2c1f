/* config.h - config.json of DeepSeek-V4 as numbers (spec model-v4 section 2). Nothing about geometry is compiled in. */
#ifndef AFF_MODEL_CONFIG_H
#define AFF_MODEL_CONFIG_H
#include "backend/types.h"
#include "base/status.h"

enum { AFF_MAX_LAYERS = 128, AFF_MAX_STAGES = 8, AFF_MAX_TAPS = 8 };

typedef struct aff_config {
    int vocab, hidden, layers, heads, head_dim, rope_dim, q_rank, o_groups, o_rank, window;
    int ratio[AFF_MAX_LAYERS + AFF_MAX_STAGES]; /* 0, or tokens per compressed row; draft stages follow the layers */
    int n_ratio;
    double rope_theta, compress_rope_theta;
    bool yarn;
    double yarn_factor, yarn_beta_fast, yarn_beta_slow;
    int64_t yarn_original; /* original_max_position_embeddings */
    int64_t max_positions;
    int index_heads, index_dim, index_topk;
    int hc, hc_iters;
    float hc_eps, rms_eps;
    int experts, picks, shared_experts, inter, hash_layers;
    aff_scoring scoring;
    float routed_scale, swiglu_limit;
    int64_t bos, eos;
    int draft_block, draft_noise, draft_rank, n_taps; /* 0 when absent */
    int tap[AFF_MAX_TAPS];                            /* ascending */
} aff_config;

/* Parses and validates; `name` is the file named in errors. A missing field is named. */
aff_status aff__config_parse(aff_config *c, const char *json, size_t size, const char *name, aff_error *err);
#endif
