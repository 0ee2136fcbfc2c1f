/* Attention's ops: queries, KV rows, compressors, selection, the core (spec model-v4 7). */
#include "backend/gpu/gpu_internal.h"
#include <math.h>

static aff_k_rows rows_of(const aff_gpu *g, const aff_rowset *rs)
{
    return (aff_k_rows){g->pos + rs->at, g->first + rs->at, (const aff_layer_state *const *)g->table + rs->at, rs->n,
                        rs->layer};
}

static void query(aff_gpu *g, const aff_rowset *rs, float *q, int heads, int D, float eps, const aff_rope *rope,
                  bool index)
{
    const aff_k_query a = {.q = q,
                           .f32 = q,
                           .bf16 = aff__gpu_bf16(g, q),
                           .freq = rope->freq,
                           .pos = g->pos + rs->at,
                           .had = index ? 1.0 / sqrt((double)D) : 0,
                           .heads = heads,
                           .D = D,
                           .pairs = rope->pairs,
                           .index = index,
                           .eps = eps};
    aff__gpu_wrote(g, q, (int64_t)rs->n * heads * D);
    const int64_t blocks = (int64_t)rs->n * ((heads + 7) / 8);
    const uint64_t smem = (index ? 96 : 32) * (uint64_t)D + 8 * (uint64_t)rope->pairs;
    if (rs->n <= AFF_K_FEW)
        aff__gpu_small(g, AFF_K_JOB_QUERY, blocks, smem, q, q, (int64_t)rs->n * heads * D)->query = a;
    else
        aff__gpu_launch(g, AFF_K_query, blocks, 256, smem, &a);
    aff__gpu_has_form(g, q);
}

static void q_finish(aff_backend *b, const aff_rowset *rs, float *q, int heads, int D, float eps, const aff_rope *rope)
{
    query(aff__gpu_of(b), rs, q, heads, D, eps, rope, false);
}

static void index_query(aff_backend *b, const aff_rowset *rs, float *iq, int heads, int dim, const aff_rope *rope)
{
    query(aff__gpu_of(b), rs, iq, heads, dim, 0, rope, true);
}

static void kv_finish(aff_backend *b, const aff_rowset *rs, float *kv, int D, const float *norm, float eps,
                      const aff_rope *rope, bool store)
{
    aff_gpu *g = aff__gpu_of(b);
    const aff_k_kv a = {.rows = rows_of(g, rs),
                        .kv = kv,
                        .norm = norm,
                        .f32 = kv,
                        .bf16 = aff__gpu_bf16(g, kv),
                        .freq = rope->freq,
                        .fmt = *rs->state[0]->row,
                        .D = D,
                        .pairs = rope->pairs,
                        .store = store,
                        .eps = eps};
    aff__gpu_wrote(g, kv, (int64_t)rs->n * D);
    const uint64_t smem = 4 * (uint64_t)D + 8 * (uint64_t)rope->pairs;
    if (rs->n <= AFF_K_FEW)
        aff__gpu_small(g, AFF_K_JOB_KV, rs->n, smem, kv, kv, (int64_t)rs->n * D)->kv = a;
    else
        aff__gpu_launch(g, AFF_K_kv, rs->n, 256, smem, &a);
    aff__gpu_has_form(g, kv);
}

static void compress(aff_backend *b, const aff_compression *k, int count, const aff_rope *rope, const aff_rowset *rs)
{
    aff_gpu *g = aff__gpu_of(b);
    aff_k_compress a = {
        .rows = rows_of(g, rs), .freq = rope->freq, .count = count, .pairs = rope->pairs, .append = g->few_each};
    uint64_t smem = 0;
    for (int i = 0; i < count; i++) {
        const aff_compressor *c = k[i].k;
        const uint64_t need = 48 * (uint64_t)c->ratio + 12 * (uint64_t)c->dim + 8 * (uint64_t)rope->pairs;
        a.c[i] = (aff_k_compressor){.c = k[i].c,
                                    .z = k[i].z,
                                    .ape = c->ape,
                                    .norm = c->norm,
                                    .had = c->index ? 1.0 / sqrt((double)c->dim) : 0,
                                    .fmt = c->index ? *rs->state[0]->key : *rs->state[0]->row,
                                    .ratio = c->ratio,
                                    .dim = c->dim,
                                    .overlap = c->overlap,
                                    .index = c->index,
                                    .eps = c->eps};
        if (need > smem) smem = need;
    }
    if (rs->n <= AFF_K_FEW && a.append) { /* what it writes no small job reads */
        aff__gpu_small(g, AFF_K_JOB_COMPRESS, (int64_t)rs->n * count, smem, k[0].c, NULL, 0)->compress = a;
        return;
    }
    aff__gpu_launch(g, AFF_K_compress, (int64_t)rs->n * count, 512, smem, &a);
    if (!a.append) aff__gpu_launch(g, AFF_K_history, (int64_t)rs->n * count, 256, 0, &a);
}

static aff_status index_select(aff_backend *b, const aff_rowset *rs, const float *iq, const float *w, int heads,
                               int dim, int ratio, int topk, int *sel, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    const int64_t groups = (g->max_pos + 1) / ratio, pieces = (groups + 63) / 64;
    const int bundle = rs->n <= AFF_K_FEW ? 1 : 16;
    float *score =
        aff__gpu_scratch(g, AFF_G_SCORE, (uint64_t)(groups > topk ? groups : 1) * (uint64_t)rs->n * sizeof(float));
    if (groups > topk) {
        const aff_k_scores a = {.rows = rows_of(g, rs),
                                .iq = aff__gpu_form(g, iq, rs->n, heads * dim),
                                .w = w,
                                .score = score,
                                .ld = groups,
                                .fmt = *rs->state[0]->key,
                                .heads = heads,
                                .dim = dim,
                                .ratio = ratio,
                                .topk = topk,
                                .bundle = bundle,
                                .scale = 1.0f / sqrtf((float)dim * (float)heads)};
        const int64_t bundles = (rs->n + bundle - 1) / bundle, most = 4 * aff__rt_info(g->rt)->units / bundles + 1;
        aff__gpu_launch(g, AFF_K_scores, bundles * (pieces < most ? pieces : most), 256, aff__k_scores_smem(g->amd),
                        &a);
    }
    aff__gpu_launch(g, AFF_K_topk, rs->n, 1024, AFF_K_TOPK_SMEM, &(aff_k_topk){rows_of(g, rs), score, sel, groups, ratio, topk});
    return AFF_OK;
}

static aff_status attend(aff_backend *b, const aff_rowset *rs, const aff_view *v, const float *q, int heads, int D,
                         const float *sink, const aff_rope *rope, float *o, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    const int T = rs->n;
    if (D > 512)
        return aff__fail(err, AFF_E_UNSUPPORTED, "attention heads of %d values: the device's kernels take at most 512",
                         D);
    aff_k_attend a = {.rows = rows_of(g, rs),
                      .q = aff__gpu_form(g, q, T, heads * D),
                      .sink = sink,
                      .sel = v->sel,
                      .freq = rope->freq,
                      .o = o,
                      .ob = aff__gpu_bf16(g, o),
                      .fmt = *rs->state[0]->row,
                      .heads = heads,
                      .D = D,
                      .pairs = rope->pairs,
                      .window = v->window,
                      .ratio = v->ratio,
                      .topk = v->ratio == 4 ? v->topk : 0,
                      .draft = v->own ? v->block : 0,
                      .scale = (float)(1.0 / sqrt((double)D))};
    if (v->own) a.extra = aff__gpu_form(g, v->own, T, D);
    aff__gpu_wrote(g, o, (int64_t)T * heads * D);
    if (T > AFF_K_FEW) {
        aff__gpu_launch(g, AFF_K_attend, (int64_t)T * ((heads + 63) / 64), 512, aff__k_attend_smem(g->amd, 64), &a);
    } else {
        a.max_cuts = aff__k_attend_cuts(g->max_pos, a.window, a.ratio, a.topk, a.draft);
        const uint64_t n = (uint64_t)T * (uint64_t)a.max_cuts * (uint64_t)heads;
        a.part_v = aff__gpu_scratch(g, AFF_G_PART, n * (uint64_t)(D + 2) * sizeof(float));
        if (!a.part_v) return AFF_OK; /* noted */
        a.part_mz = a.part_v + n * (uint64_t)D;
        aff__gpu_launch(g, AFF_K_attend_cut, (int64_t)T * a.max_cuts * ((heads + AFF_K_CUT_HEADS - 1) / AFF_K_CUT_HEADS), 256,
                        aff__k_attend_smem(g->amd, AFF_K_CUT_HEADS), &a);
        aff__gpu_launch(g, AFF_K_attend_merge, (int64_t)T * heads, 128, 8 * (uint64_t)rope->pairs, &a);
    }
    aff__gpu_has_form(g, o);
    return AFF_OK;
}

void aff__gpu_attention_ops(aff_backend *b)
{
    b->q_finish = q_finish;
    b->kv_finish = kv_finish;
    b->compress = compress;
    b->index_query = index_query;
    b->index_select = index_select;
    b->attend = attend;
}
