/* Router, routed experts, SwiGLU (spec model-v4 8). */
#include "backend/gpu/gpu_internal.h"
#include <string.h>

static void route(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int T, int32_t *picks,
                  float *weights)
{
    const aff_k_route a = {.logits = logits,
                           .bias = r->bias,
                           .hash = r->hash,
                           .ids = ids,
                           .picks = picks,
                           .weights = weights,
                           .scoring = (int32_t)r->scoring,
                           .experts = r->experts,
                           .picks_n = r->picks,
                           .scale = r->scale};
    aff__gpu_launch(aff__gpu_of(b), AFF_K_route, T, 32, 8 * (uint64_t)r->experts, &a);
}

static void swiglu(aff_backend *b, float *a, const float *bb, float limit, int T, int n)
{
    aff_gpu *g = aff__gpu_of(b);
    const int64_t all = (int64_t)T * n;
    const aff_k_swiglu k = {.a = a, .b = bb, .f32 = a, .bf16 = aff__gpu_bf16(g, a), .n = all, .limit = limit};
    aff__gpu_wrote(g, a, all);
    aff__gpu_launch(g, AFF_K_swiglu, (all + 255) / 256, 256, 0, &k);
    aff__gpu_has_form(g, a);
}

static uint64_t up16(uint64_t n)
{
    return (n + 15) & ~15ull;
}

/* int8 and scales of x[T][n] in scratch `which`. */
static void quantise(aff_gpu *g, const float *x, int T, int n, aff_gpu_scratch which, int8_t **q, float **s)
{
    const uint64_t codes = up16((uint64_t)T * (uint64_t)n);
    *q = aff__gpu_scratch(g, which, codes + (uint64_t)T * (uint64_t)((n + 127) / 128) * 4 + 16);
    *s = (float *)(void *)(*q + codes);
    if (which == AFF_G_XQ && g->q_of == x) return; /* a norm left it there */
    if (!x) return;                                /* room only */
    aff__gpu_launch(g, AFF_K_convert, T, 256, 0, &(aff_k_convert){.x = x, .ldx = n, .y.q = *q, .y.qs = *s, .n = n});
    if (which == AFF_G_XQ) g->q_of = x;
}

/* The plan's arrays in scratch; counts of each plan of the pass have a place of their own. */
static aff_k_moe plan_arrays(aff_gpu *g, uint64_t entries, uint64_t items)
{
    char *p = aff__gpu_scratch(g, AFF_G_PLAN, up16(items * sizeof(aff_k_item)) + 3 * up16(entries * 4));
    const int slot = g->moes < AFF_G_COUNTS ? g->moes++ : AFF_G_COUNTS - 1;
    aff_k_moe m = {.n = g->counts + AFF_K_PLAN_COUNTS * slot, .item = (aff_k_item *)(void *)p};
    p += up16(items * sizeof(aff_k_item));
    m.row = (int32_t *)(void *)p;
    m.rank = (int32_t *)(void *)(p + up16(entries * 4));
    m.weight = (float *)(void *)(p + 2 * up16(entries * 4));
    return m;
}

/* Copies of the codebook with which the streaming kernels run here; 0: they do not. */
static int32_t stream_copies(const aff_gpu *g, const aff_expert_shape *s)
{
    const int32_t widest = s->hidden > s->inter ? s->hidden : s->inter;
    if (s->dtype != AFF_Q2P875G) return 0;
    for (int32_t c = 8; c; c /= 2)
        if (aff__k_stream_smem(c, widest) <= (size_t)aff__rt_info(g->rt)->shared_bytes) return c;
    return 0;
}

static void routed(aff_backend *b, const aff_expert_shape *s, const aff_expert_table *e, int layer,
                   const int32_t *picks, const float *weights, const float *x, int T, int K, float *y)
{
    aff_gpu *g = aff__gpu_of(b);
    const bool few = T <= AFF_K_FEW;
    const int32_t batch = few ? AFF_K_ITEM_FEW : aff__k_item_many(g->amd),
                  items = aff__k_max_items(T, K, e->experts, batch);
    const int n = T * K, up_tiles = (s->inter + (few ? 127 : 63)) / (few ? 128 : 64),
              down_tiles = (s->hidden + (few ? 127 : 63)) / (few ? 128 : 64);
    aff_k_experts a = {.plan = plan_arrays(g, (uint64_t)n, (uint64_t)items),
                       .table = s->table ? s->table[0][0] : NULL,
                       .y = y,
                       .dtype = (int32_t)s->dtype,
                       .hidden = s->hidden,
                       .inter = s->inter,
                       .K = K,
                       .link = (aff__rt_info(g->rt)->units + 7) / 8,
                       .limit = s->swiglu_limit};
    memcpy(a.off, e->plane, sizeof a.off);
    int8_t *xq;
    float *xs;
    quantise(g, x, T, s->hidden, AFF_G_XQ, &xq, &xs);
    a.xq = xq;
    a.xs = xs;
    quantise(g, NULL, n, s->inter, AFF_G_HQ, &a.hq, &a.hs);
    const unsigned threads = (unsigned)((e->experts < 1024 ? e->experts : 1024) + 31) & ~31u;
    const aff_k_plan plan = {.picks = picks, .weights = weights, .base = e->base + (int64_t)layer * e->experts, .plan = a.plan, .T = T, .K = K, .experts = e->experts, .batch = batch};
    aff__gpu_launch(g, AFF_K_plan, 1, threads, aff__k_plan_smem(e->experts), &plan);
    a.copies = few ? stream_copies(g, s) : 0;
    if (a.copies || !few) a.h = aff__gpu_scratch(g, AFF_G_H, (uint64_t)n * (uint64_t)s->inter * sizeof(float));
    if (a.copies) {
        const int units = aff__rt_info(g->rt)->units;
        aff__gpu_launch(g, AFF_K_experts_stream_up, units, 512, aff__k_stream_smem(a.copies, s->hidden), &a);
        aff__gpu_launch(g, AFF_K_experts_stream_down, units, 512, aff__k_stream_smem(a.copies, s->inter), &a);
    } else if (few) {
        aff__gpu_launch(g, AFF_K_experts_up, (int64_t)items * up_tiles, 128, aff__k_experts_smem(a.dtype, s->hidden) + 4096, &a);
        aff__gpu_launch(g, AFF_K_experts_down, (int64_t)items * down_tiles, 128, aff__k_experts_smem(a.dtype, s->inter), &a);
    } else {
        aff__gpu_launch(g, AFF_K_experts_many_up, (int64_t)items * up_tiles, 256, aff__k_experts_many_smem(g->amd), &a);
        quantise(g, a.h, n, s->inter, AFF_G_HQ, &a.hq, &a.hs);
        aff__gpu_launch(g, AFF_K_experts_many_down, (int64_t)items * down_tiles, 256, aff__k_experts_many_smem(g->amd),
                        &a);
    }
    aff__gpu_wrote(g, y, (int64_t)n * s->hidden);
}

void aff__gpu_moe_ops(aff_backend *b)
{
    b->route = route;
    b->swiglu = swiglu;
    b->routed = routed;
}
