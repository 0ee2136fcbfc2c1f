#include "quant/quantize_plan.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- looking tensors up ---- */

static aff_status note_used(aff_qplan *p, const aff_st_tensor *t, aff_error *err)
{
    if (p->n_used == p->cap_used) {
        uint64_t cap = p->cap_used ? p->cap_used * 2 : 1024;
        AFF_TRY(aff__realloc(&p->used, cap, sizeof *p->used, "tensor list", err));
        p->cap_used = cap;
    }
    p->used[p->n_used++] = t;
    return AFF_OK;
}

static void shape_text(char *buf, size_t cap, int ndim, const uint64_t *shape)
{
    int n = snprintf(buf, cap, "[");
    for (int i = 0; i < ndim && n > 0 && (size_t)n < cap; i++)
        n += snprintf(buf + n, cap - (size_t)n, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    if (n > 0 && (size_t)n < cap) snprintf(buf + n, cap - (size_t)n, "]");
}

/* Finds the tensor and requires its shape: [cols] when rows is 0, else [rows, cols]. */
static aff_status find(aff_qplan *p, const char *name, uint64_t rows, uint64_t cols, const aff_st_tensor **out,
                       aff_error *err)
{
    const aff_st_tensor *t = aff__ckpt_find(p->ckpt, name);
    if (!t) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is missing", aff__ckpt_dir(p->ckpt), name);
    uint64_t want[2] = {rows ? rows : cols, cols};
    int ndim = rows ? 2 : 1;
    if (t->ndim != ndim || t->shape[0] != want[0] || (ndim == 2 && t->shape[1] != cols)) {
        char a[64], b[200];
        shape_text(a, sizeof a, ndim, want);
        shape_text(b, sizeof b, t->ndim, t->shape);
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected shape %s, got %s",
                         aff__ckpt_shard_path(p->ckpt, t->shard), name, a, b);
    }
    *out = t;
    return note_used(p, t, err);
}

static aff_status wrong_dtype(const aff_qplan *p, const aff_st_tensor *t, const char *want, aff_error *err)
{
    return aff__fail(err, AFF_E_UNSUPPORTED, "%s: tensor '%s': expected %s, got %s",
                     aff__ckpt_shard_path(p->ckpt, t->shard), t->name, want, aff__st_dtype_name(t->dtype));
}

/* ---- dense tensors ---- */

/* MIX_FN: the hc_*_fn, F32 in our files and bf16 in compatible ones. */
typedef enum kind { VECTOR, TABLE, MIX_FN, MATRIX, FP8 } kind;

/* Maps checkpoint tensor `src` (FP8: without ".weight") to container tensor `name`. */
typedef struct entry {
    const char *name, *src;
    kind kind;
    bool flat; /* one-dimensional in the checkpoint */
    int64_t rows, cols;
} entry;

/* V4.1's scales stand for tiles of 32 x 32. */
static bool has_fine_scales(const aff_qplan *p, const aff_qdense *d, const char *src)
{
    char name[128];
    snprintf(name, sizeof name, "%s.scale", src);
    const aff_st_tensor *t = aff__ckpt_find(p->ckpt, name);
    return t && p->v41 && t->ndim == 2 && t->shape[0] * 32 == d->rows && t->shape[1] * 32 == d->cols;
}

static aff_status map_fp8(aff_qplan *p, aff_qdense *d, const char *src, bool compat, aff_error *err)
{
    char name[128];
    snprintf(name, sizeof name, "%s.weight", src);
    AFF_TRY(find(p, name, d->rows, d->cols, &d->src, err));
    if (d->src->dtype != AFF_ST_F8_E4M3) return wrong_dtype(p, d->src, "F8_E4M3", err);
    const bool fine = has_fine_scales(p, d, src);
    if (fine && !compat) d->dtype = AFF_FP8_32;
    d->refold = fine && compat;
    const uint64_t grid = fine ? 32 : 128, tile = d->dtype == AFF_FP8_32 ? 32 : 128;
    if (d->rows % tile || d->cols % tile)
        return aff__fail(err, AFF_E_UNSUPPORTED,
                         "tensor '%s': %llu x %llu: a container holds FP8 matrices of whole %llu x %llu tiles only",
                         name, (unsigned long long)d->rows, (unsigned long long)d->cols, (unsigned long long)tile,
                         (unsigned long long)tile);
    snprintf(name, sizeof name, "%s.scale", src);
    AFF_TRY(find(p, name, d->rows / grid, d->cols / grid, &d->scale, err));
    return d->scale->dtype == AFF_ST_F8_E8M0 ? AFF_OK : wrong_dtype(p, d->scale, "F8_E8M0", err);
}

static aff_status map_dense(aff_qplan *p, const entry *e, const char *to, const char *from, bool compat, aff_error *err)
{
    char src[112];
    if (p->n_dense == p->cap_dense) {
        uint64_t cap = p->cap_dense ? p->cap_dense * 2 : 256;
        AFF_TRY(aff__realloc(&p->dense, cap, sizeof *p->dense, "tensor list", err));
        p->cap_dense = cap;
    }
    aff_qdense *d = &p->dense[p->n_dense];
    *d = (aff_qdense){.rows = (uint64_t)e->rows, .cols = (uint64_t)e->cols, .dtype = AFF_F32};
    snprintf(d->name, sizeof d->name, "%s%s", to, e->name);
    snprintf(src, sizeof src, "%s%s", from, e->src);
    p->n_dense++;
    if (e->kind == FP8) {
        d->dtype = AFF_FP8;
        return map_fp8(p, d, src, compat, err);
    }
    if (e->kind == MATRIX || (e->kind == MIX_FN && compat)) d->dtype = AFF_BF16;
    AFF_TRY(find(p, src, e->flat ? 0 : d->rows, d->cols, &d->src, err));
    if (e->kind == TABLE) {
        d->most = (uint64_t)p->experts;
        return d->src->dtype == AFF_ST_I64 ? AFF_OK : wrong_dtype(p, d->src, "I64", err);
    }
    return d->src->dtype == AFF_ST_BF16 || d->src->dtype == AFF_ST_F32 ? AFF_OK
                                                                       : wrong_dtype(p, d->src, "BF16 or F32", err);
}

static aff_status map_all(aff_qplan *p, const entry *e, size_t n, const char *to, const char *from, bool compat,
                          aff_error *err)
{
    for (size_t i = 0; i < n; i++) AFF_TRY(map_dense(p, &e[i], to, from, compat, err));
    return AFF_OK;
}

#define MAP(p, e, to, from, compat, err) map_all(p, e, sizeof(e) / sizeof *(e), to, from, compat, err)

/* Attention, router, shared expert and hyper-connections, which every layer and draft stage has. */
static aff_status map_block(aff_qplan *p, const char *to, const char *from, bool hashed, bool compat, aff_error *err)
{
    int64_t h = p->hidden, n = p->hc, mix = (2 + n) * n, out = p->o_groups * p->o_rank, q = p->heads * p->head_dim;
    const entry attention[] = {
        {"attn_norm", "attn_norm.weight", VECTOR, true, 1, h},
        {"ffn_norm", "ffn_norm.weight", VECTOR, true, 1, h},
        {"attn_sinks", "attn.attn_sink", VECTOR, true, 1, p->heads},
        {"attn_q_a", "attn.wq_a", FP8, false, p->q_rank, h},
        {"attn_q_b", "attn.wq_b", FP8, false, q, p->q_rank},
        {"attn_kv", "attn.wkv", FP8, false, p->head_dim, h},
        {"attn_out_a", "attn.wo_a", FP8, false, out, q / p->o_groups},
        {"attn_out_b", "attn.wo_b", FP8, false, h, out},
        {"attn_q_norm", "attn.q_norm.weight", VECTOR, true, 1, p->q_rank},
        {"attn_kv_norm", "attn.kv_norm.weight", VECTOR, true, 1, p->head_dim},
        {"ffn_gate_inp", "ffn.gate.weight", MATRIX, false, p->experts, h},
    };
    const entry hash = {"ffn_gate_hash", "ffn.gate.tid2eid", TABLE, false, p->vocab, p->top_k};
    const entry bias = {"ffn_gate_bias", "ffn.gate.bias", VECTOR, true, 1, p->experts};
    const entry vision_bias = {"ffn_gate_bias_vl", "ffn.gate.bias_vl", VECTOR, true, 1, p->experts};
    const entry rest[] = {
        {"shexp_gate", "ffn.shared_experts.w1", FP8, false, p->inter, h},
        {"shexp_up", "ffn.shared_experts.w3", FP8, false, p->inter, h},
        {"shexp_down", "ffn.shared_experts.w2", FP8, false, h, p->inter},
        {"hc_attn_fn", "hc_attn_fn", MIX_FN, false, mix, n * h},
        {"hc_attn_base", "hc_attn_base", VECTOR, true, 1, mix},
        {"hc_attn_scale", "hc_attn_scale", VECTOR, true, 1, 3},
        {"hc_ffn_fn", "hc_ffn_fn", MIX_FN, false, mix, n * h},
        {"hc_ffn_base", "hc_ffn_base", VECTOR, true, 1, mix},
        {"hc_ffn_scale", "hc_ffn_scale", VECTOR, true, 1, 3},
    };
    AFF_TRY(MAP(p, attention, to, from, compat, err));
    AFF_TRY(map_dense(p, hashed ? &hash : &bias, to, from, compat, err));
    if (p->v41) AFF_TRY(map_dense(p, &vision_bias, to, from, compat, err));
    return MAP(p, rest, to, from, compat, err);
}

static aff_status map_compressor(aff_qplan *p, const char *to, const char *from, int64_t ratio, bool compat,
                                 aff_error *err)
{
    int64_t wide = (ratio == 4 ? 2 : 1) * p->head_dim, narrow = 2 * p->index_dim;
    const entry compressor[] = {
        {"comp_wkv", "attn.compressor.wkv.weight", MATRIX, false, wide, p->hidden},
        {"comp_wgate", "attn.compressor.wgate.weight", MATRIX, false, wide, p->hidden},
        {"comp_ape", "attn.compressor.ape", VECTOR, false, ratio, wide},
        {"comp_norm", "attn.compressor.norm.weight", VECTOR, true, 1, p->head_dim},
    };
    const entry indexer[] = {
        {"idx_wq_b", "attn.indexer.wq_b", FP8, false, p->index_heads * p->index_dim, p->q_rank},
        {"idx_proj", "attn.indexer.weights_proj.weight", MATRIX, false, p->index_heads, p->hidden},
        {"idx_comp_wkv", "attn.indexer.compressor.wkv.weight", MATRIX, false, narrow, p->hidden},
        {"idx_comp_wgate", "attn.indexer.compressor.wgate.weight", MATRIX, false, narrow, p->hidden},
        {"idx_comp_ape", "attn.indexer.compressor.ape", VECTOR, false, 4, narrow},
        {"idx_comp_norm", "attn.indexer.compressor.norm.weight", VECTOR, true, 1, p->index_dim},
    };
    AFF_TRY(MAP(p, compressor, to, from, compat, err));
    return ratio == 4 ? MAP(p, indexer, to, from, compat, err) : AFF_OK;
}

/* The parts that only some of V4.1's layers have (spec container 5.3). */
static aff_status map_sources(aff_qplan *p, const char *to, const char *from, uint32_t l, bool compat, aff_error *err)
{
    int64_t h = p->hidden, d = p->head_dim;
    const entry wkv = {"comp_wkv", "attn.compressor.wkv.weight", MATRIX, false, d, h};
    const entry gate = {"comp_wgate", "attn.compressor.wgate.weight", MATRIX, false, d, h};
    const entry norm = {"comp_norm", "attn.compressor.norm.weight", VECTOR, true, 1, d};
    const entry index[] = {
        {"idx_wq_b", "attn.indexer.wq_b", FP8, false, p->index_heads * p->index_dim, p->q_rank},
        {"idx_proj", "attn.indexer.weights_proj.weight", MATRIX, false, p->index_heads, h},
    };
    const entry keys[] = {
        {"idx_wk", "attn.indexer.wk.weight", MATRIX, false, p->index_dim, d},
        {"idx_k_norm", "attn.indexer.k_norm.weight", VECTOR, true, 1, p->index_dim},
    };
    const entry engram[] = {
        {"engram_q", "engram.q_weight", MATRIX, false, p->hc, h},
        {"engram_k", "engram.k_weight", MATRIX, false, p->hc, h},
        {"engram_wkv", "engram.wkv", FP8, false, (p->hc + 1) * h, p->engram},
    };
    if (p->roles[l] & AFF_Q_KV) {
        AFF_TRY(map_dense(p, &wkv, to, from, compat, err));
        if (p->ratios[l] > 1) AFF_TRY(map_dense(p, &gate, to, from, compat, err));
        AFF_TRY(map_dense(p, &norm, to, from, compat, err));
    }
    if (p->roles[l] & AFF_Q_INDEX) AFF_TRY(MAP(p, index, to, from, compat, err));
    if (p->roles[l] & AFF_Q_KV) AFF_TRY(MAP(p, keys, to, from, compat, err));
    return p->roles[l] & AFF_Q_ENGRAM ? MAP(p, engram, to, from, compat, err) : AFF_OK;
}

/* ---- experts ---- */

static aff_status map_matrix(aff_qplan *p, aff_qmatrix *m, const char *prefix, uint64_t rows, uint64_t cols,
                             aff_error *err)
{
    char name[128];
    snprintf(name, sizeof name, "%s.weight", prefix);
    AFF_TRY(find(p, name, rows, cols / 2, &m->weight, err));
    if (m->weight->dtype != AFF_ST_I8 && m->weight->dtype != AFF_ST_U8)
        return wrong_dtype(p, m->weight, "I8 (packed FP4)", err);
    snprintf(name, sizeof name, "%s.scale", prefix);
    AFF_TRY(find(p, name, rows, cols / 32, &m->scale, err));
    return m->scale->dtype == AFF_ST_F8_E8M0 ? AFF_OK : wrong_dtype(p, m->scale, "F8_E8M0", err);
}

static aff_status map_experts(aff_qplan *p, uint64_t layer, const char *from, aff_error *err)
{
    static const char *const part[3] = {"w1", "w3", "w2"};
    char prefix[112];
    uint64_t inter = (uint64_t)p->inter, hidden = (uint64_t)p->hidden;
    for (int64_t e = 0; e < p->experts; e++) {
        aff_qmatrix *m = p->matrices + (layer * (uint64_t)p->experts + (uint64_t)e) * 3;
        for (int i = 0; i < 3; i++) {
            snprintf(prefix, sizeof prefix, "%sffn.experts.%lld.%s", from, (long long)e, part[i]);
            AFF_TRY(map_matrix(p, &m[i], prefix, i == 2 ? hidden : inter, i == 2 ? inter : hidden, err));
        }
    }
    return AFF_OK;
}

static aff_status check_expert_width(const aff_qplan *p, bool mxfp4, aff_error *err)
{
    int64_t unit = mxfp4 ? 32 : 64;
    if (p->hidden % unit == 0 && p->inter % unit == 0) return AFF_OK;
    return aff__fail(err, AFF_E_UNSUPPORTED, "experts of %lld x %lld: %s needs both a multiple of %lld",
                     (long long)p->inter, (long long)p->hidden, mxfp4 ? "mxfp4" : "q2p875", (long long)unit);
}

/* ---- main and draft ---- */

static aff_status map_main(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    int64_t h = p->hidden, n = p->hc;
    const entry globals[] = {
        {"token_embd", "embed.weight", MATRIX, false, p->vocab, h},
        {"output", "head.weight", MATRIX, false, p->vocab, h},
        {"output_norm", "norm.weight", VECTOR, true, 1, h},
    };
    const entry mix[] = {
        {"hc_head_fn", "hc_head_fn", MIX_FN, false, n, n * h},
        {"hc_head_base", "hc_head_base", VECTOR, true, 1, n},
        {"hc_head_scale", "hc_head_scale", VECTOR, true, 1, 1},
    };
    AFF_TRY(MAP(p, globals, "", "", o->compat, err));
    if (!p->v41) AFF_TRY(MAP(p, mix, "", "", o->compat, err));
    for (uint32_t l = 0; l < p->layers; l++) {
        char to[32], from[32];
        snprintf(to, sizeof to, "blk.%u.", l);
        snprintf(from, sizeof from, "layers.%u.", l);
        AFF_TRY(map_block(p, to, from, l < p->hash_layers, o->compat, err));
        if (p->v41)
            AFF_TRY(map_sources(p, to, from, l, o->compat, err));
        else if (p->ratios[l])
            AFF_TRY(map_compressor(p, to, from, p->ratios[l], o->compat, err));
        AFF_TRY(map_experts(p, l, from, err));
    }
    return AFF_OK;
}

/* The draft's own tensors, each from the stage that owns it. */
static aff_status map_draft_globals(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    int64_t h = p->hidden, n = p->hc;
    const entry all[] = {
        {"mtp_main_proj", "main_proj", FP8, false, h, h * p->taps},
        {"mtp_main_norm", "main_norm.weight", VECTOR, true, 1, h},
        {"mtp_norm", "norm.weight", VECTOR, true, 1, h},
        {"mtp_hc_head_fn", "hc_head_fn", MIX_FN, false, n, n * h},
        {"mtp_hc_head_base", "hc_head_base", VECTOR, true, 1, n},
        {"mtp_hc_head_scale", "hc_head_scale", VECTOR, true, 1, 1},
        {"mtp_markov_w1", p->v41 ? "markov_head.embed.weight" : "markov_head.markov_w1.weight", MATRIX, false, p->vocab,
         p->markov_rank},
        {"mtp_markov_w2", p->v41 ? "markov_head.head.weight" : "markov_head.markov_w2.weight", MATRIX, false, p->vocab,
         p->markov_rank},
        {"mtp_confidence", "confidence_head.proj.weight", MATRIX, false, 1, h + p->markov_rank},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char from[32], name[128];
        uint32_t owner = i < 2 ? 0 : p->layers - 1; /* where V4 has it; V4.1 does not promise */
        if (p->v41 && i >= 3 && i <= 5) continue;
        for (uint32_t s = 0; s < p->layers && p->v41; s++) {
            snprintf(name, sizeof name, "mtp.%u.%s%s", s, all[i].src, all[i].kind == FP8 ? ".weight" : "");
            if (aff__ckpt_find(p->ckpt, name)) owner = s;
        }
        snprintf(from, sizeof from, "mtp.%u.", owner);
        AFF_TRY(map_dense(p, &all[i], "", from, o->compat, err));
    }
    return AFF_OK;
}

static aff_status map_draft(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    char to[32];
    AFF_TRY(map_draft_globals(p, o, err));
    for (uint32_t s = 0; s < p->layers; s++) {
        snprintf(to, sizeof to, "mtp.%u.", s);
        if (p->ratios[p->layers_in_config + s])
            return aff__fail(err, AFF_E_UNSUPPORTED, "key 'compress_ratios': draft stage %u: expected 0, got %lld", s,
                             (long long)p->ratios[p->layers_in_config + s]);
        AFF_TRY(map_block(p, to, to, false, o->compat, err));
        AFF_TRY(map_experts(p, s, to, err));
    }
    return AFF_OK;
}

static void count_stages(aff_qplan *p)
{
    char name[64];
    for (p->stages = 0; p->stages < 64; p->stages++) {
        snprintf(name, sizeof name, "mtp.%lld.attn.wkv.weight", (long long)p->stages);
        if (!aff__ckpt_find(p->ckpt, name)) break;
    }
    p->has_dspark = aff__ckpt_find(p->ckpt, "mtp.0.main_proj.weight") != NULL;
}

static aff_status check_draft(const aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    if (o->dspark && aff__ckpt_find(p->ckpt, "mtp.0.e_proj.weight"))
        return aff__fail(err, AFF_E_UNSUPPORTED,
                         "%s: its draft is of the MTP-1 kind (mtp.0.e_proj), for which a companion container has no "
                         "tensors; --dspark "
                         "needs a DSpark draft (mtp.0.main_proj)",
                         o->src);
    if (o->dspark && (!p->stages || !p->has_dspark))
        return aff__fail(err, AFF_E_FORMAT, "%s: has no DSpark draft: tensor 'mtp.0.%s.weight' is missing", o->src,
                         p->stages ? "main_proj" : "attn.wkv");
    return AFF_OK;
}

static aff_status choose_layers(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    if (o->layers > p->layers_in_config)
        return aff__fail(err, AFF_E_INVALID, "--layers %lld: the model has %lld layers", (long long)o->layers,
                         (long long)p->layers_in_config);
    p->layers = (uint32_t)(o->dspark ? p->stages : o->layers ? o->layers : p->layers_in_config);
    uint64_t need = (uint64_t)p->layers_in_config + (o->dspark ? p->layers : 0);
    if (p->n_ratios < need)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s/config.json: key 'compress_ratios': expected at least %llu entries, got %llu", o->src,
                         (unsigned long long)need, (unsigned long long)p->n_ratios);
    return AFF_OK;
}

/* ---- nothing left over ---- */

static int by_address(const void *a, const void *b)
{
    const aff_st_tensor *x = *(const aff_st_tensor *const *)a, *y = *(const aff_st_tensor *const *)b;
    return (x > y) - (x < y);
}

static bool in_scope(const aff_qplan *p, const aff_quantize_options *o, const char *name)
{
    static const char *const outside[] = {"vision.", "aligner.", "image_"}; /* V4.1's eyes */
    bool draft = strncmp(name, "mtp.", 4) == 0;
    if (draft != o->dspark) return false;
    for (size_t i = 0; i < sizeof outside / sizeof *outside && p->v41; i++)
        if (strncmp(name, outside[i], strlen(outside[i])) == 0) return false;
    if (p->v41 && strstr(name, ".engram.embed.")) return false; /* the tables stay in the checkpoint */
    if (!draft && strncmp(name, "layers.", 7) == 0 && name[7] >= '0' && name[7] <= '9') {
        unsigned long long l = strtoull(name + 7, NULL, 10);
        if (l >= p->layers && l < (unsigned long long)p->layers_in_config) return false; /* left out by --layers */
    }
    return true;
}

static aff_status check_leftovers(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    qsort((void *)p->used, p->n_used, sizeof *p->used, by_address);
    for (uint64_t i = 0; i < aff__ckpt_count(p->ckpt); i++) {
        const aff_st_tensor *t = aff__ckpt_at(p->ckpt, i);
        if (!in_scope(p, o, t->name) || bsearch(&t, (const void *)p->used, p->n_used, sizeof *p->used, by_address))
            continue;
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: tensor '%s' (%s) has no place in a container of this model",
                         aff__ckpt_shard_path(p->ckpt, t->shard), t->name, aff__st_dtype_name(t->dtype));
    }
    return AFF_OK;
}

aff_status aff__qplan_make(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    *p = (aff_qplan){0};
    AFF_TRY(aff__ckpt_open(&p->ckpt, o->src, err));
    count_stages(p);
    AFF_TRY(check_draft(p, o, err));
    AFF_TRY(aff__qplan_config(p, o, err));
    AFF_TRY(choose_layers(p, o, err));
    AFF_TRY(check_expert_width(p, o->mxfp4, err));
    uint64_t tensors = (uint64_t)p->layers * (uint64_t)p->experts * 6;
    if (tensors > aff__ckpt_count(p->ckpt))
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: expected %llu expert tensors (%u layers of %lld), got %llu tensors in all", o->src,
                         (unsigned long long)tensors, p->layers, (long long)p->experts,
                         (unsigned long long)aff__ckpt_count(p->ckpt));
    AFF_TRY(aff__calloc(&p->matrices, (uint64_t)p->layers * (uint64_t)p->experts, 3 * sizeof *p->matrices,
                        "expert list", err));
    AFF_TRY(o->dspark ? map_draft(p, o, err) : map_main(p, o, err));
    return check_leftovers(p, o, err);
}

void aff__qplan_free(aff_qplan *p)
{
    aff__ckpt_close(p->ckpt);
    free(p->config);
    free(p->ratios);
    free(p->roles);
    free(p->dense);
    free(p->matrices);
    free((void *)p->used);
    *p = (aff_qplan){0};
}
