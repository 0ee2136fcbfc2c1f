/* Telling networks apart without reading all of them. */
#include "base/mem.h"
#include "model/net_internal.h"
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

enum { SAMPLE = 256 };

static void add(XXH3_state_t *h, const void *p, uint64_t n)
{
    XXH3_128bits_update(h, p, (size_t)n);
}

/* Length and both ends. */
static void sample(XXH3_state_t *h, const void *p, uint64_t n)
{
    if (!p) n = 0;
    add(h, &n, sizeof n);
    if (!n) return;
    const uint64_t k = n < SAMPLE ? n : SAMPLE;
    add(h, p, k);
    add(h, (const uint8_t *)p + (n - k), k);
}

static void sample_weight(XXH3_state_t *h, const aff_weight *w)
{
    const int32_t shape[3] = {(int32_t)w->dtype, w->rows, w->cols};
    const uint64_t size = w->dtype == AFF_F32 ? 4 : w->dtype == AFF_BF16 ? 2 : 1;
    add(h, shape, sizeof shape);
    sample(h, w->data, (uint64_t)w->rows * (uint64_t)w->cols * size);
}

static void sample_block(XXH3_state_t *h, const aff_block *b, const aff_config *c)
{
    const aff_weight *w[] = {&b->wq_a,           &b->wq_b,       &b->wkv,      &b->wo_a,     &b->wo_b,
                             &b->comp_wkv,       &b->comp_wgate, &b->idx_wq_b, &b->idx_proj, &b->idx_comp_wkv,
                             &b->idx_comp_wgate, &b->gate,       &b->sh_gate,  &b->sh_up,    &b->sh_down};
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) sample_weight(h, w[i]);
    sample(h, b->attn_norm, (uint64_t)c->hidden * sizeof(float));
    sample(h, b->ffn_norm, (uint64_t)c->hidden * sizeof(float));
    sample(h, b->kv_norm, (uint64_t)c->head_dim * sizeof(float));
    sample(h, b->sink, (uint64_t)c->heads * sizeof(float));
}

static void sample_experts(XXH3_state_t *h, aff_experts *x, int layers, int experts)
{
    const aff_expert_shape s = aff__experts_shape(x);
    const int32_t dtype = (int32_t)s.dtype;
    add(h, &dtype, sizeof dtype);
    const aff_slot_layout y = aff__experts_layout(x);
    uint8_t *slot = NULL; /* for row-major ones; without memory for it they do not count */
    if (!aff__experts_in_place(x) && aff__calloc(&slot, 1, y.bytes, "identity", NULL) != AFF_OK) return;
    for (int l = 0; l < layers; l++)
        for (int i = 0; i < 3; i++) {
            const int id = i * (experts - 1) / 2;
            if (slot) aff__experts_copy(x, l, id, slot);
            const aff_expert e = slot ? aff__slot_expert(&y, slot) : aff__experts_at(x, l, id);
            const uint64_t n = (uint64_t)s.hidden * (uint64_t)s.inter / 4; /* no format has fewer bytes of codes */
            sample(h, e.gate.codes, n);
            sample(h, e.up.codes, n);
            sample(h, e.down.codes, n);
        }
    free(slot);
}

void aff__net_identity(const aff_net *n, uint64_t id[2])
{
    XXH3_state_t h;
    const aff_config *c = &n->cfg;
    const int32_t scope[] = {
        n->layers,   n->stages,   (int32_t)n->draft, c->n_ratio,          c->window,      c->head_dim,
        c->rope_dim, c->heads,    c->index_heads,    c->index_dim,        c->index_topk,  c->picks,
        c->hc,       c->hc_iters, c->yarn,           (int32_t)c->scoring, c->draft_block, c->draft_noise};
    const double reals[] = {c->rope_theta,           c->compress_rope_theta,   c->yarn_factor,    c->yarn_beta_fast,
                            c->yarn_beta_slow,       (double)c->yarn_original, (double)c->hc_eps, (double)c->rms_eps,
                            (double)c->routed_scale, (double)c->swiglu_limit};
    XXH3_INITSTATE(&h);
    XXH3_128bits_reset(&h);
    add(&h, scope, sizeof scope);
    add(&h, reals, sizeof reals);
    add(&h, c->ratio, (uint64_t)c->n_ratio * sizeof *c->ratio);
    add(&h, c->tap, (uint64_t)c->n_taps * sizeof *c->tap);
    sample_weight(&h, &n->embed);
    sample_weight(&h, &n->head);
    sample(&h, n->norm, (uint64_t)c->hidden * sizeof(float));
    for (int l = 0; l < n->layers; l++) sample_block(&h, &n->layer[l], c);
    sample_experts(&h, n->experts, n->layers, c->experts);
    for (int i = 0; i < n->stages; i++) sample_block(&h, &n->stage[i], c);
    if (n->stages) sample_experts(&h, n->draft_experts, n->stages, c->experts);
    const XXH128_hash_t d = XXH3_128bits_digest(&h);
    id[0] = d.low64;
    id[1] = d.high64;
}
