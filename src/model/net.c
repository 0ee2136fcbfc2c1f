/* Binding: every tensor a network needs is found by name, checked for dtype and shape, and becomes a pointer. Two sources spell
 * the names differently (spec model-v4 3, container 5); everything after this file sees neither. */
#include "model/net_internal.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/json.h"
#include "model/synthetic.h"
#include "quant/numbers.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAME = 160 };

/* Where a block's or the globals' tensors come from; exactly one of the three is set. */
typedef struct {
    aff_net *net;
    const aff_ckpt *ckpt;
    const aff_container *cont;
    const aff_synthetic *synth;
    char cprefix[32], kprefix[32];
} source;

/* A tensor as either source gives it. */
typedef struct {
    char name[NAME]; /* as spelled in the source, for errors */
    aff_dtype dtype;
    bool i64;
    uint64_t rows, cols;
    const uint8_t *data, *scale;
} found;

static const char *source_path(const source *s)
{
    return s->ckpt ? aff__ckpt_dir(s->ckpt) : s->cont ? aff__container_path(s->cont) : s->net->path;
}

static aff_status keep(aff_net *n, void *p, aff_error *err)
{
    if (n->n_owned == n->cap_owned) {
        const int cap = n->cap_owned ? 2 * n->cap_owned : 256;
        aff_status s = aff__realloc(&n->owned, (uint64_t)cap, sizeof *n->owned, "weights", err);
        if (s != AFF_OK) {
            free(p);
            return s;
        }
        n->cap_owned = cap;
    }
    n->owned[n->n_owned++] = p;
    return AFF_OK;
}

/* An outline counts the bytes and makes nothing: NULL. */
static aff_status own(aff_net *n, void *out, uint64_t count, uint64_t size, const char *what, aff_error *err)
{
    void *p = NULL;
    uint64_t bytes;
    if (!aff__mul_ok(count, size, &bytes)) return aff__fail(err, AFF_E_NOMEM, "%s: %llu x %llu bytes overflow", what, (unsigned long long)count, (unsigned long long)size);
    n->sizes.memory[n->binding_draft] += aff__align_up(bytes ? bytes : 1, 64);
    memset(out, 0, sizeof p);
    if (n->outline) return AFF_OK;
    AFF_TRY(aff__calloc(&p, count, size, what, err));
    AFF_TRY(keep(n, p, err));
    memcpy(out, &p, sizeof p);
    return AFF_OK;
}

/* The FP8 scale grid of a checkpoint tensor: "X.weight" -> "X.scale", 128 or 32 wide tiles, partial tiles allowed. */
static aff_status find_scale(const source *s, found *f, aff_error *err)
{
    char name[NAME];
    snprintf(name, sizeof name, "%.*s.scale", (int)(strlen(f->name) - strlen(".weight")), f->name);
    const aff_st_tensor *t = aff__ckpt_find(s->ckpt, name);
    if (!t) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is missing", source_path(s), name);
    for (int tile = 128; tile >= 32; tile -= 96)
        if (t->dtype == AFF_ST_F8_E8M0 && t->ndim == 2 && t->shape[0] == (f->rows + (uint64_t)tile - 1) / (uint64_t)tile &&
            t->shape[1] == (f->cols + (uint64_t)tile - 1) / (uint64_t)tile) {
            f->dtype = tile == 128 ? AFF_FP8 : AFF_FP8_32;
            f->scale = t->data;
            return AFF_OK;
        }
    return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected F8_E8M0 scales for tiles of 128 or 32, got %s of %llu bytes", source_path(s), name,
                     aff__st_dtype_name(t->dtype), (unsigned long long)t->size);
}

static aff_status find_checkpoint(const source *s, found *f, aff_error *err)
{
    const aff_st_tensor *t = aff__ckpt_find(s->ckpt, f->name);
    if (!t) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is missing", source_path(s), f->name);
    if (t->ndim < 1 || t->ndim > 2)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected 1 or 2 dimensions, got %d", source_path(s), f->name, t->ndim);
    f->rows = t->ndim == 2 ? t->shape[0] : 1;
    f->cols = t->shape[t->ndim - 1];
    f->data = t->data;
    switch (t->dtype) {
    case AFF_ST_F32: f->dtype = AFF_F32; return AFF_OK;
    case AFF_ST_BF16: f->dtype = AFF_BF16; return AFF_OK;
    case AFF_ST_I64: f->i64 = true; return AFF_OK;
    case AFF_ST_F8_E4M3: return find_scale(s, f, err);
    default: break;
    }
    return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected F32, BF16, F8_E4M3 or I64, got %s", source_path(s), f->name,
                     aff__st_dtype_name(t->dtype));
}

static aff_status find_container(const source *s, found *f, aff_error *err)
{
    const aff_ctensor *t = aff__container_find(s->cont, f->name);
    if (!t) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is missing", source_path(s), f->name);
    const uint32_t q = t->m.quant;
    if (q != AFF_F32 && q != AFF_BF16 && q != AFF_FP8 && q != AFF_FP8_32) {
        const aff_dtype_info *d = aff__dtype_info(q);
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected f32, bf16 or fp8, got %s", source_path(s), f->name, d ? d->name : "unknown dtype");
    }
    f->dtype = (aff_dtype)q;
    f->rows = t->m.rows;
    f->cols = t->m.cols;
    f->data = t->blob + t->m.data_off;
    f->scale = t->blob + t->m.scale_off;
    return AFF_OK;
}

/* cname: container leaf, kname: checkpoint suffix. Shape must be rows x cols (a vector is 1 x n). */
static aff_status find(const source *s, const char *cname, const char *kname, uint64_t rows, uint64_t cols, found *f, aff_error *err)
{
    memset(f, 0, sizeof *f);
    if (s->synth) {
        snprintf(f->name, sizeof f->name, "%s%s", s->kprefix, kname);
        f->dtype = aff__synthetic_dtype(f->name);
        f->i64 = strstr(kname, "tid2eid") != NULL;
        f->rows = rows;
        f->cols = cols;
    } else if (s->ckpt) {
        snprintf(f->name, sizeof f->name, "%s%s", s->kprefix, kname);
        AFF_TRY(find_checkpoint(s, f, err));
    } else {
        snprintf(f->name, sizeof f->name, "%s%s", s->cprefix, cname);
        AFF_TRY(find_container(s, f, err));
    }
    if (f->rows != rows || f->cols != cols)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected shape [%llu, %llu], got [%llu, %llu]", source_path(s), f->name,
                         (unsigned long long)rows, (unsigned long long)cols, (unsigned long long)f->rows, (unsigned long long)f->cols);
    return AFF_OK;
}

static aff_status matrix(const source *s, const char *cname, const char *kname, int rows, int cols, bool wide, aff_weight *w, aff_error *err)
{
    found f;
    AFF_TRY(find(s, cname, kname, (uint64_t)rows, (uint64_t)cols, &f, err));
    if (f.i64) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected weights, got I64", source_path(s), f.name);
    *w = (aff_weight){.dtype = f.dtype, .rows = rows, .cols = cols, .data = f.data, .scale = f.scale, .wide = wide};
    const uint64_t size = f.dtype == AFF_F32 ? 4 : f.dtype == AFF_BF16 ? 2 : 1, n = (uint64_t)rows * (uint64_t)cols, tile = f.dtype == AFF_FP8 ? 128 : 32;
    const uint64_t scales = size > 1 ? 0 : (((uint64_t)rows + tile - 1) / tile) * (((uint64_t)cols + tile - 1) / tile);
    aff_net *net = s->net;
    if (s->synth) {
        uint8_t *data, *scale = NULL;
        AFF_TRY(own(net, &data, n, size, f.name, err));
        if (scales) AFF_TRY(own(net, &scale, scales, 1, f.name, err));
        if (!net->outline) aff__synthetic_matrix(s->synth->seed, f.name, w, data, scale);
        w->data = data;
        w->scale = scale;
    } else if ((uintptr_t)f.data % size) { /* safetensors promises no alignment */
        void *copy;
        AFF_TRY(own(net, &copy, n, size, f.name, err));
        if (copy) memcpy(copy, f.data, (size_t)(n * size));
        w->data = copy;
        net->sizes.file[net->binding_draft] += scales;
    } else {
        net->sizes.file[net->binding_draft] += n * size + scales;
    }
    return AFF_OK;
}

/* A small tensor as float32, [rows][cols]. */
static aff_status floats(const source *s, const char *cname, const char *kname, int rows, int cols, const float **out, aff_error *err)
{
    found f;
    float *v = NULL;
    AFF_TRY(find(s, cname, kname, (uint64_t)rows, (uint64_t)cols, &f, err));
    if (f.i64 || (f.dtype != AFF_F32 && f.dtype != AFF_BF16))
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected F32 or BF16 values", source_path(s), f.name);
    const size_t n = (size_t)rows * (size_t)cols;
    AFF_TRY(own(s->net, &v, n, sizeof *v, f.name, err));
    *out = v;
    if (!v) return AFF_OK;
    if (s->synth) {
        aff__synthetic_floats(s->synth->seed, f.name, n, v);
        return AFF_OK;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        if (f.dtype == AFF_F32) {
            memcpy(&v[i], f.data + 4 * i, 4);
        } else {
            memcpy(&h, f.data + 2 * i, 2);
            v[i] = aff__bf16_to_f32(h);
        }
        if (!isfinite(v[i])) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': element %zu is not finite", source_path(s), f.name, i);
    }
    return AFF_OK;
}

/* tid2eid [V][K] as int32, every row K distinct experts. */
static aff_status hash_table(const source *s, const aff_config *c, const int32_t **out, aff_error *err)
{
    found f;
    int32_t *v = NULL;
    AFF_TRY(find(s, "ffn_gate_hash", "ffn.gate.tid2eid", (uint64_t)c->vocab, (uint64_t)c->picks, &f, err));
    if (!f.i64 && f.dtype != AFF_F32)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected integers", source_path(s), f.name);
    const size_t n = (size_t)c->vocab * (size_t)c->picks;
    AFF_TRY(own(s->net, &v, n, sizeof *v, f.name, err));
    *out = v;
    if (!v) return AFF_OK;
    if (s->synth) {
        aff__synthetic_hash(s->synth->seed, f.name, c, v);
        return AFF_OK;
    }
    for (size_t i = 0; i < n; i++) {
        int64_t e;
        float x;
        if (f.i64) {
            memcpy(&e, f.data + 8 * i, 8);
        } else {
            memcpy(&x, f.data + 4 * i, 4);
            e = x >= 0 && x < (float)c->experts && x == truncf(x) ? (int64_t)x : -1;
        }
        bool ok = e >= 0 && e < c->experts;
        for (size_t k = i - i % (size_t)c->picks; ok && k < i; k++) ok = v[k] != e;
        if (!ok)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': token %zu: expected %d distinct experts below %d", source_path(s), f.name,
                             i / (size_t)c->picks, c->picks, c->experts);
        v[i] = (int32_t)e;
    }
    return AFF_OK;
}

static aff_status hyper(const source *s, const aff_config *c, const char *which, bool head, aff_hc *h, aff_error *err)
{
    char name[3][64];
    const int N = c->hc, mixes = head ? N : (2 + N) * N;
    snprintf(name[0], 64, "%s_fn", which);
    snprintf(name[1], 64, "%s_scale", which);
    snprintf(name[2], 64, "%s_base", which);
    h->streams = N;
    h->iters = c->hc_iters;
    h->eps = c->hc_eps;
    h->rms_eps = c->rms_eps;
    const char *k = strncmp(which, "mtp_", 4) == 0 ? "mtp_" : ""; /* the companion's globals carry a prefix of their own */
    AFF_TRY(matrix(s, name[0], name[0] + strlen(k), mixes, N * c->hidden, true, &h->fn, err));
    AFF_TRY(floats(s, name[1], name[1] + strlen(k), 1, head ? 1 : 3, &h->scale, err));
    return floats(s, name[2], name[2] + strlen(k), 1, mixes, &h->base, err);
}

static aff_status compressor(const source *s, const aff_config *c, int ratio, bool index, aff_block *b, aff_error *err)
{
    const int d = index ? c->index_dim : c->head_dim, width = (ratio == 4 ? 2 : 1) * d;
    aff_compressor *k = index ? &b->idx_comp : &b->comp;
    *k = (aff_compressor){.ratio = ratio, .dim = d, .overlap = ratio == 4, .index = index, .eps = c->rms_eps};
    const char *cp = index ? "idx_comp_" : "comp_", *kp = index ? "attn.indexer.compressor." : "attn.compressor.";
    char cn[64], kn[64];
#define NAMES(c_, k_) (snprintf(cn, sizeof cn, "%s%s", cp, c_), snprintf(kn, sizeof kn, "%s%s", kp, k_))
    NAMES("wkv", "wkv.weight");
    AFF_TRY(matrix(s, cn, kn, width, c->hidden, false, index ? &b->idx_comp_wkv : &b->comp_wkv, err));
    NAMES("wgate", "wgate.weight");
    AFF_TRY(matrix(s, cn, kn, width, c->hidden, false, index ? &b->idx_comp_wgate : &b->comp_wgate, err));
    NAMES("ape", "ape");
    AFF_TRY(floats(s, cn, kn, ratio, width, &k->ape, err));
    NAMES("norm", "norm.weight");
    return floats(s, cn, kn, 1, d, &k->norm, err);
#undef NAMES
}

static aff_status attention(const source *s, const aff_config *c, aff_block *b, aff_error *err)
{
    const int H = c->hidden, per_group = c->heads * c->head_dim / c->o_groups, low = c->o_groups * c->o_rank;
    AFF_TRY(floats(s, "attn_norm", "attn_norm.weight", 1, H, &b->attn_norm, err));
    AFF_TRY(floats(s, "attn_sinks", "attn.attn_sink", 1, c->heads, &b->sink, err));
    AFF_TRY(matrix(s, "attn_q_a", "attn.wq_a.weight", c->q_rank, H, false, &b->wq_a, err));
    AFF_TRY(matrix(s, "attn_q_b", "attn.wq_b.weight", c->heads * c->head_dim, c->q_rank, false, &b->wq_b, err));
    AFF_TRY(matrix(s, "attn_kv", "attn.wkv.weight", c->head_dim, H, false, &b->wkv, err));
    AFF_TRY(matrix(s, "attn_out_a", "attn.wo_a.weight", low, per_group, false, &b->wo_a, err));
    AFF_TRY(matrix(s, "attn_out_b", "attn.wo_b.weight", H, low, false, &b->wo_b, err));
    AFF_TRY(floats(s, "attn_q_norm", "attn.q_norm.weight", 1, c->q_rank, &b->q_norm, err));
    AFF_TRY(floats(s, "attn_kv_norm", "attn.kv_norm.weight", 1, c->head_dim, &b->kv_norm, err));
    AFF_TRY(hyper(s, c, "hc_attn", false, &b->hc_attn, err));
    if (b->ratio) AFF_TRY(compressor(s, c, b->ratio, false, b, err));
    if (b->ratio != 4) return AFF_OK;
    AFF_TRY(matrix(s, "idx_wq_b", "attn.indexer.wq_b.weight", c->index_heads * c->index_dim, c->q_rank, false, &b->idx_wq_b, err));
    AFF_TRY(matrix(s, "idx_proj", "attn.indexer.weights_proj.weight", c->index_heads, H, false, &b->idx_proj, err));
    return compressor(s, c, b->ratio, true, b, err);
}

static aff_status ffn(const source *s, const aff_config *c, bool hash, aff_block *b, aff_error *err)
{
    AFF_TRY(floats(s, "ffn_norm", "ffn_norm.weight", 1, c->hidden, &b->ffn_norm, err));
    AFF_TRY(hyper(s, c, "hc_ffn", false, &b->hc_ffn, err));
    AFF_TRY(matrix(s, "ffn_gate_inp", "ffn.gate.weight", c->experts, c->hidden, true, &b->gate, err));
    b->router = (aff_router){.scoring = c->scoring, .experts = c->experts, .picks = c->picks, .scale = c->routed_scale};
    if (hash)
        AFF_TRY(hash_table(s, c, &b->router.hash, err));
    else
        AFF_TRY(floats(s, "ffn_gate_bias", "ffn.gate.bias", 1, c->experts, &b->router.bias, err));
    AFF_TRY(matrix(s, "shexp_gate", "ffn.shared_experts.w1.weight", c->inter, c->hidden, false, &b->sh_gate, err));
    AFF_TRY(matrix(s, "shexp_up", "ffn.shared_experts.w3.weight", c->inter, c->hidden, false, &b->sh_up, err));
    return matrix(s, "shexp_down", "ffn.shared_experts.w2.weight", c->hidden, c->inter, false, &b->sh_down, err);
}

static aff_status bind_block(source *s, const aff_config *c, const char *cprefix, const char *kprefix, int i, bool hash, int ratio, aff_block *b, aff_error *err)
{
    snprintf(s->cprefix, sizeof s->cprefix, "%s%d.", cprefix, i);
    snprintf(s->kprefix, sizeof s->kprefix, "%s%d.", kprefix, i);
    b->ratio = ratio;
    AFF_TRY(attention(s, c, b, err));
    return ffn(s, c, hash, b, err);
}

static aff_status bind_trunk(source *s, aff_net *n, aff_error *err)
{
    const aff_config *c = &n->cfg;
    s->cprefix[0] = s->kprefix[0] = 0;
    AFF_TRY(matrix(s, "token_embd", "embed.weight", c->vocab, c->hidden, false, &n->embed, err));
    AFF_TRY(matrix(s, "output", "head.weight", c->vocab, c->hidden, false, &n->head, err));
    AFF_TRY(floats(s, "output_norm", "norm.weight", 1, c->hidden, &n->norm, err));
    AFF_TRY(hyper(s, c, "hc_head", true, &n->hc_head, err));
    if (n->embed.dtype != AFF_BF16 && n->embed.dtype != AFF_F32)
        return aff__fail(err, AFF_E_FORMAT, "%s: the embedding: expected BF16 or F32", source_path(s));
    for (int l = 0; l < n->layers; l++)
        AFF_TRY(bind_block(s, c, "blk.", "layers.", l, l < c->hash_layers, c->ratio[l], &n->layer[l], err));
    return AFF_OK;
}

/* ---- draft ---- */

static aff_status bind_dspark(source *s, aff_net *n, aff_error *err)
{
    const aff_config *c = &n->cfg;
    const int H = c->hidden, V = c->vocab, MR = c->draft_rank;
    if (!c->draft_block)
        return aff__fail(err, AFF_E_FORMAT, "%s: draft tensors without dspark_block_size in the configuration", source_path(s));
    if (c->tap[c->n_taps - 1] >= n->layers)
        return aff__fail(err, AFF_E_INVALID, "%s: the draft taps layer %d, only %d layers are in force", source_path(s), c->tap[c->n_taps - 1], n->layers);
    s->cprefix[0] = 0;
    snprintf(s->kprefix, sizeof s->kprefix, "mtp.0.");
    AFF_TRY(matrix(s, "mtp_main_proj", "main_proj.weight", H, c->n_taps * H, false, &n->main_proj, err));
    AFF_TRY(floats(s, "mtp_main_norm", "main_norm.weight", 1, H, &n->main_norm, err));
    snprintf(s->kprefix, sizeof s->kprefix, "mtp.%d.", n->stages - 1);
    AFF_TRY(floats(s, "mtp_norm", "norm.weight", 1, H, &n->draft_norm, err));
    AFF_TRY(hyper(s, c, "mtp_hc_head", true, &n->draft_hc_head, err));
    AFF_TRY(matrix(s, "mtp_markov_w1", "markov_head.markov_w1.weight", V, MR, false, &n->markov_w1, err));
    if (n->markov_w1.dtype != AFF_BF16 && n->markov_w1.dtype != AFF_F32)
        return aff__fail(err, AFF_E_FORMAT, "%s: the Markov head's first matrix: expected BF16 or F32", source_path(s));
    AFF_TRY(matrix(s, "mtp_markov_w2", "markov_head.markov_w2.weight", V, MR, false, &n->markov_w2, err));
    return matrix(s, "mtp_confidence", "confidence_head.proj.weight", 1, H + MR, true, &n->confidence, err);
}

static aff_status bind_mtp1(source *s, aff_net *n, aff_error *err)
{
    const int H = n->cfg.hidden;
    snprintf(s->kprefix, sizeof s->kprefix, "mtp.0.");
    AFF_TRY(matrix(s, "", "e_proj.weight", H, H, false, &n->e_proj, err));
    AFF_TRY(matrix(s, "", "h_proj.weight", H, H, false, &n->h_proj, err));
    AFF_TRY(floats(s, "", "enorm.weight", 1, H, &n->enorm, err));
    AFF_TRY(floats(s, "", "hnorm.weight", 1, H, &n->hnorm, err));
    AFF_TRY(floats(s, "", "norm.weight", 1, H, &n->draft_norm, err));
    return hyper(s, &n->cfg, "hc_head", true, &n->draft_hc_head, err);
}

/* The layers that a DSpark draft taps must be in force. */
static bool taps_in_force(const aff_net *n) { return !n->cfg.n_taps || n->cfg.tap[n->cfg.n_taps - 1] < n->layers; }

static aff_status bind_stages(source *s, aff_net *n, aff_error *err)
{
    if (n->stages > AFF_MAX_STAGES || n->cfg.n_ratio < n->cfg.layers + n->stages)
        return aff__fail(err, AFF_E_FORMAT, "%s: %d draft stages; compress_ratios has entries for %d, at most %d are supported", source_path(s), n->stages,
                         n->cfg.n_ratio - n->cfg.layers, AFF_MAX_STAGES);
    for (int i = 0; i < n->stages; i++) AFF_TRY(bind_block(s, &n->cfg, "mtp.", "mtp.", i, false, 0, &n->stage[i], err));
    return AFF_OK;
}

static aff_status draft_of_checkpoint(source *s, aff_net *n, const aff_net_options *opt, aff_error *err)
{
    char name[64];
    int stages = 0;
    n->binding_draft = true;
    do
        snprintf(name, sizeof name, "mtp.%d.attn.wkv.weight", stages); /* counted by name: the configuration says 1 in every release */
    while (aff__ckpt_find(n->ckpt, name) && ++stages);
    if (opt->draft_if_any && (!stages || !taps_in_force(n))) return AFF_OK;
    if (!stages) return aff__fail(err, AFF_E_INVALID, "%s: has no draft (tensor '%s' is missing)", n->path, name);
    n->stages = stages;
    const aff_config *c = &n->cfg;
    if (aff__ckpt_find(n->ckpt, "mtp.0.main_proj.weight")) {
        AFF_TRY(bind_dspark(s, n, err));
        n->draft = AFF_DRAFT_DSPARK;
    } else {
        AFF_TRY(bind_mtp1(s, n, err));
        n->draft = AFF_DRAFT_MTP1;
    }
    AFF_TRY(bind_stages(s, n, err));
    return aff__experts_from_checkpoint(&n->draft_experts, n->ckpt, "mtp.", stages, c->experts, c->hidden, c->inter, err);
}

static const uint8_t *codebook_of(const aff_container *c)
{
    const aff_ctensor *t = aff__container_find(c, "__codebook");
    return t && t->m.data_size == 8192 ? t->blob + t->m.data_off : NULL;
}

static aff_status companion_path(const char *path, char *buf, size_t cap, aff_error *err)
{
    const char *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
    const size_t stem = dot && (!slash || dot > slash) ? (size_t)(dot - path) : strlen(path);
    const int w = snprintf(buf, cap, "%.*s.dspark.aff", (int)stem, path);
    return w > 0 && (size_t)w < cap ? AFF_OK : aff__fail(err, AFF_E_LIMIT, "%s: path too long", path);
}

/* The checkpoint that a container was made from, as its provenance says; "" when it does not. */
static void checkpoint_of(const aff_container *c, char id[32])
{
    const char *text;
    size_t n;
    json_t *v = NULL;
    id[0] = 0;
    aff__container_provenance(c, &text, &n);
    if (!n || aff__json_parse(&v, text, n, "provenance", false, NULL) != AFF_OK) return;
    const char *s = json_string_value(json_object_get(v, "checkpoint_xxh3"));
    if (s) snprintf(id, 32, "%s", s);
    json_decref(v);
}

static aff_status same_checkpoint(const aff_net *n, const char *draft, aff_error *err)
{
    char a[32], b[32];
    checkpoint_of(n->main, a);
    checkpoint_of(n->companion, b);
    if (!*a || !*b || strcmp(a, b) == 0) return AFF_OK;
    return aff__fail(err, AFF_E_FORMAT, "%s: a draft of another model: made from checkpoint %s, %s from %s; quantise the draft of the same checkpoint", draft, b, n->path, a);
}

static aff_status draft_of_container(aff_net *n, const aff_net_options *opt, aff_error *err)
{
    char buf[4096];
    const char *path = opt->draft_path;
    if (!path) {
        AFF_TRY(companion_path(n->path, buf, sizeof buf, err));
        path = buf;
        if (opt->draft_if_any && (access(path, F_OK) != 0 || !taps_in_force(n))) return AFF_OK;
    }
    AFF_TRY(aff__container_open(&n->companion, path, err));
    n->binding_draft = true;
    const aff_config *c = &n->cfg;
    const uint8_t *a = codebook_of(n->main), *b = codebook_of(n->companion);
    if (b && (!a || memcmp(a, b, 8192) != 0))
        return aff__fail(err, AFF_E_FORMAT, "%s: its codebook is not that of %s; quantise the draft with --codebook %s", path, n->path, n->path);
    AFF_TRY(same_checkpoint(n, path, err));
    n->stages = (int)aff__container_layers(n->companion);
    source s = {.net = n, .cont = n->companion};
    AFF_TRY(bind_dspark(&s, n, err));
    AFF_TRY(bind_stages(&s, n, err));
    n->draft = AFF_DRAFT_DSPARK;
    return aff__experts_from_container(&n->draft_experts, n->companion, n->stages, c->experts, c->hidden, c->inter, b, err);
}

/* ---- rope tables (spec 7.1), float32 step by step as the published code computes them ---- */

/* The pair whose wavelength makes `beta` turns in the original context. */
static double correction(const aff_config *c, double beta)
{
    return c->rope_dim * log((double)c->yarn_original / (beta * 2 * 3.14159265358979323846)) / (2 * log(c->compress_rope_theta));
}

static aff_status rope_tables(aff_net *n, aff_error *err)
{
    const aff_config *c = &n->cfg;
    const int pairs = c->rope_dim / 2;
    float *f = NULL;
    n->binding_draft = false;
    AFF_TRY(own(n, &f, 2 * (uint64_t)pairs, sizeof *f, "rope tables", err));
    if (!f) return AFF_OK;
    n->rope = (aff_rope){f, pairs};
    n->rope_compressed = (aff_rope){f + pairs, pairs};
    const double lo = fmax(0, floor(correction(c, c->yarn_beta_fast))), up = fmin(c->rope_dim - 1, ceil(correction(c, c->yarn_beta_slow)));
    const double hi = up == lo ? up + 0.001 : up;
    for (int i = 0; i < pairs; i++) {
        const double e = (double)((float)(2 * i) / (float)c->rope_dim);
        f[i] = 1.0f / (float)pow(c->rope_theta, e);
        const float g = 1.0f / (float)pow(c->compress_rope_theta, e);
        const float ramp = ((float)i - (float)lo) / (float)(hi - lo), s = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
        f[pairs + i] = c->yarn ? g / (float)c->yarn_factor * (1.0f - s) + g * s : g;
    }
    return AFF_OK;
}

/* ---- opening ---- */

static aff_status open_checkpoint(aff_net *n, const aff_net_options *opt, aff_error *err)
{
    char path[4096], *text = NULL;
    size_t size;
    AFF_TRY(aff__path_join(path, sizeof path, n->path, "config.json", err));
    AFF_TRY(aff__read_file(path, 16 << 20, &text, &size, err));
    aff_status st = aff__config_parse(&n->cfg, text, size, path, err);
    free(text);
    if (st != AFF_OK) return st;
    const aff_config *c = &n->cfg;
    n->layers = opt->max_layers > 0 && opt->max_layers < c->layers ? opt->max_layers : c->layers;
    AFF_TRY(aff__ckpt_open(&n->ckpt, n->path, err));
    source s = {.net = n, .ckpt = n->ckpt};
    AFF_TRY(bind_trunk(&s, n, err));
    AFF_TRY(aff__experts_from_checkpoint(&n->experts, n->ckpt, "layers.", n->layers, c->experts, c->hidden, c->inter, err));
    return opt->draft ? draft_of_checkpoint(&s, n, opt, err) : AFF_OK;
}

static aff_status open_container(aff_net *n, const aff_net_options *opt, aff_error *err)
{
    const char *text;
    size_t size;
    AFF_TRY(aff__container_open(&n->main, n->path, err));
    aff__container_meta(n->main, &text, &size);
    AFF_TRY(aff__config_parse(&n->cfg, text, size, n->path, err));
    const aff_config *c = &n->cfg;
    n->layers = opt->max_layers > 0 && opt->max_layers < c->layers ? opt->max_layers : c->layers;
    source s = {.net = n, .cont = n->main};
    AFF_TRY(bind_trunk(&s, n, err));
    AFF_TRY(aff__experts_from_container(&n->experts, n->main, n->layers, c->experts, c->hidden, c->inter, codebook_of(n->main), err));
    return opt->draft ? draft_of_container(n, opt, err) : AFF_OK;
}

static aff_status synthetic_experts(aff_experts **out, const aff_synthetic *y, const char *prefix, int layers, const aff_config *c, aff_error *err)
{
    return (y->on_demand ? aff__synthetic_experts_on_demand : aff__synthetic_experts)(out, y->seed, prefix, layers, c, err);
}

/* A geometry's DSpark draft has its tensors under the stages' names like a checkpoint's. */
static aff_status synthetic_draft(source *s, aff_net *n, aff_error *err)
{
    n->binding_draft = true;
    n->stages = AFF_SYNTHETIC_STAGES;
    AFF_TRY(bind_dspark(s, n, err));
    AFF_TRY(bind_stages(s, n, err));
    n->draft = AFF_DRAFT_DSPARK;
    return n->outline ? AFF_OK : synthetic_experts(&n->draft_experts, s->synth, "mtp.", n->stages, &n->cfg, err);
}

static aff_status open_synthetic(aff_net *n, const aff_net_options *opt, aff_error *err)
{
    char *json, name[96];
    const aff_synthetic *y = opt->synthetic;
    AFF_TRY(aff__synthetic_config(y, &json, err));
    snprintf(name, sizeof name, "synthetic %s", y->geometry);
    aff_status st = aff__config_parse(&n->cfg, json, strlen(json), name, err);
    free(json);
    if (st != AFF_OK) return st;
    snprintf(name, sizeof name, "synthetic %s, %d layers, %d experts, seed %llu", y->geometry, n->cfg.layers, n->cfg.experts, (unsigned long long)y->seed);
    AFF_TRY(aff__strndup(&n->path, name, strlen(name), err));
    n->layers = opt->max_layers > 0 && opt->max_layers < n->cfg.layers ? opt->max_layers : n->cfg.layers;
    source s = {.net = n, .synth = y};
    AFF_TRY(bind_trunk(&s, n, err));
    AFF_TRY(aff__synthetic_expert_bytes(&n->cfg, &n->sizes.expert, err));
    if (y->expert_file) n->sizes.expert = aff__align_up(n->sizes.expert, 4096); /* as in a container */
    if (!n->outline && y->expert_file) AFF_TRY(aff__synthetic_experts_file(&n->experts, y->seed, "layers.", n->layers, &n->cfg, y->expert_file, err));
    if (!n->outline && !y->expert_file) AFF_TRY(synthetic_experts(&n->experts, y, "layers.", n->layers, &n->cfg, err));
    return opt->draft ? synthetic_draft(&s, n, err) : AFF_OK;
}

static aff_status open_any(aff_net *n, const char *path, const aff_net_options *opt, aff_error *err)
{
    if (opt->synthetic) return open_synthetic(n, opt, err);
    AFF_TRY(aff__strndup(&n->path, path, strlen(path), err));
    return aff__is_dir(path) ? open_checkpoint(n, opt, err) : open_container(n, opt, err);
}

static void note_experts(aff_net *n)
{
    n->sizes.experts[0] = (int64_t)n->layers * n->cfg.experts;
    n->sizes.experts[1] = (int64_t)n->stages * n->cfg.experts;
    n->sizes.slot = n->experts ? aff__experts_layout(n->experts).pitch : aff__align_up(n->sizes.expert, 4096);
    if (n->draft_experts && aff__experts_layout(n->draft_experts).pitch > n->sizes.slot) n->sizes.slot = aff__experts_layout(n->draft_experts).pitch;
    n->sizes.experts_in_file = n->experts_file;
    n->sizes.experts_copied = n->experts && !aff__experts_in_place(n->experts);
    if (!n->ckpt && !n->main) return;
    n->sizes.experts_in_file = true;
    n->sizes.experts_copied = aff__experts_row_major(n->experts) || (n->draft_experts && aff__experts_row_major(n->draft_experts));
    n->sizes.expert = aff__experts_bytes(n->experts);
}

aff_status aff__net_open(aff_net **out, const char *path, const aff_net_options *opt, aff_error *err)
{
    aff_net *n;
    AFF_TRY(aff__calloc(&n, 1, sizeof *n, "network", err));
    n->numerics = opt->numerics;
    n->experts_file = opt->synthetic && (opt->synthetic->expert_file || opt->synthetic->on_demand);
    n->outline = opt->outline;
    aff_status s = open_any(n, path, opt, err);
    if (s == AFF_OK) s = rope_tables(n, err);
    if (s != AFF_OK) {
        aff__net_close(n);
        return s;
    }
    note_experts(n);
    if (!n->outline) {
        aff_tier_options o = {.mapped = !n->sizes.experts_copied, .slots = INT32_MAX / 4};
        aff__placement_options_init(&o.placement);
        s = aff__net_use_tiers(n, &o, err);
    }
    if (s != AFF_OK) {
        aff__net_close(n);
        return s;
    }
    *out = n;
    return AFF_OK;
}

aff_status aff__net_use_tiers(aff_net *n, const aff_tier_options *o, aff_error *err)
{
    aff_tier_options use = *o;
    const int64_t all = n->sizes.experts[0] + n->sizes.experts[1];
    use.picks = n->cfg.picks;
    if (use.slots > all + AFF_MOST_STAGING) use.slots = all + AFF_MOST_STAGING; /* as many as can be of use */
    aff__tiers_free(n->tiers);
    n->tiers = NULL;
    return aff__tiers_create(&n->tiers, n->experts, n->draft_experts, &use, err);
}

void aff__net_close(aff_net *n)
{
    if (!n) return;
    aff__tiers_free(n->tiers);
    free(n->profile);
    aff__experts_free(n->experts);
    aff__experts_free(n->draft_experts);
    for (int i = 0; i < n->n_owned; i++) free(n->owned[i]);
    free(n->owned);
    aff__ckpt_close(n->ckpt);
    aff__container_close(n->main);
    aff__container_close(n->companion);
    free(n->path);
    free(n);
}

const aff_config *aff__net_config(const aff_net *n) { return &n->cfg; }
const char *aff__net_path(const aff_net *n) { return n->path; }
int aff__net_layers(const aff_net *n) { return n->layers; }

void aff__net_tiers(const aff_net *n, uint8_t *tier)
{
    for (int l = 0; l < n->layers; l++)
        for (int e = 0; e < n->cfg.experts; e++)
            tier[l * n->cfg.experts + e] = (uint8_t)(aff__tiers_mapped(n->tiers) ? aff__experts_tier(n->experts, l, e) : aff__tiers_tier(n->tiers, l, e));
}
aff_draft_kind aff__net_draft(const aff_net *n) { return n->draft; }
int aff__net_stages(const aff_net *n) { return n->stages; }
aff_numerics aff__net_numerics(const aff_net *n) { return n->numerics; }
aff_net_sizes aff__net_sizes(const aff_net *n) { return n->sizes; }

const float *aff__net_profile(const aff_net *n) { return n->profile ? n->profile : n->main ? aff__container_profile(n->main) : NULL; }

void aff__net_set_profile(aff_net *n, float *use)
{
    free(n->profile);
    n->profile = use;
}

aff_tiers *aff__net_expert_tiers(const aff_net *n) { return n->tiers; }
aff_experts *aff__net_experts(const aff_net *n, bool draft) { return draft ? n->draft_experts : n->experts; }
