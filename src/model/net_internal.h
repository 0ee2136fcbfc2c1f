/* net_internal.h - the bound weights, as the forward pass reads them. Comments give container names (spec container 5). */
#ifndef AFF_MODEL_NET_INTERNAL_H
#define AFF_MODEL_NET_INTERNAL_H
#include "backend/backend.h"
#include "experts/tiers.h"
#include "model/net.h"

/* A transformer block: trunk layer or draft stage. */
typedef struct aff_block {
    int ratio;
    const float *attn_norm, *ffn_norm;             /* [H] */
    aff_hc hc_attn, hc_ffn;
    aff_weight wq_a, wq_b, wkv, wo_a, wo_b;         /* [QR,H] [NH*D,QR] [D,H] [G*OR, NH*D/G] [H, G*OR] */
    const float *q_norm, *kv_norm, *sink;           /* [QR] [D] [NH] */
    aff_weight comp_wkv, comp_wgate;                /* [coff*D, H], ratio != 0 */
    aff_compressor comp;
    aff_weight idx_wq_b, idx_proj;                  /* [IH*ID, QR] [IH, H], ratio 4 */
    aff_weight idx_comp_wkv, idx_comp_wgate;        /* [2*ID, H] */
    aff_compressor idx_comp;
    aff_weight gate;                                /* [E, H] */
    aff_router router;
    aff_weight sh_gate, sh_up, sh_down;             /* shared expert: [I,H] [I,H] [H,I] */
} aff_block;

struct aff_net {
    aff_config cfg;
    char *path;
    int layers, stages;
    aff_numerics numerics;
    aff_rope rope, rope_compressed; /* ratio 0 and drafts; ratio != 0 */
    aff_weight embed, head;         /* [V,H] */
    const float *norm;              /* [H] */
    aff_hc hc_head;
    aff_block layer[AFF_MAX_LAYERS];
    aff_experts *experts;
    float *profile;   /* of aff__net_set_profile */
    aff_tiers *tiers; /* of experts and draft_experts; NULL in an outline */

    aff_draft_kind draft;
    aff_block stage[AFF_MAX_STAGES];
    aff_experts *draft_experts;
    const float *draft_norm; /* mtp.last.norm */
    aff_hc draft_hc_head;
    aff_weight main_proj;    /* DSpark: [H, taps*H] */
    const float *main_norm;
    aff_weight markov_w1, markov_w2, confidence; /* [V,MR] [V,MR] [1,H+MR] */
    aff_weight e_proj, h_proj;                   /* MTP-1: [H,H] */
    const float *enorm, *hnorm;

    bool outline, binding_draft, experts_file; /* a synthetic network's experts are in a file, or nowhere */
    aff_net_sizes sizes;
    aff_ckpt *ckpt;
    aff_container *main, *companion;
    void **owned; /* converted copies, freed at close */
    int n_owned, cap_owned;
};
#endif
