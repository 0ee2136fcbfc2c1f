#include "support/container_model.h"
#include "base/file.h"
#include "base/rng.h"
#include "format/container.h"
#include "format/safetensors.h"
#include "model/config.h"
#include "quant/expert.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* Container name, checkpoint name (spec container 5, model-v4 3). */
typedef struct pair {
    const char *c, *k;
} pair;
static const pair globals[] = {{"token_embd", "embed.weight"},     {"output", "head.weight"},
                               {"output_norm", "norm.weight"},     {"hc_head_fn", "hc_head_fn"},
                               {"hc_head_scale", "hc_head_scale"}, {"hc_head_base", "hc_head_base"}};
static const pair block[] = {
    {"attn_norm", "attn_norm.weight"},
    {"attn_sinks", "attn.attn_sink"},
    {"attn_q_a", "attn.wq_a.weight"},
    {"attn_q_b", "attn.wq_b.weight"},
    {"attn_kv", "attn.wkv.weight"},
    {"attn_out_a", "attn.wo_a.weight"},
    {"attn_out_b", "attn.wo_b.weight"},
    {"attn_q_norm", "attn.q_norm.weight"},
    {"attn_kv_norm", "attn.kv_norm.weight"},
    {"hc_attn_fn", "hc_attn_fn"},
    {"hc_attn_scale", "hc_attn_scale"},
    {"hc_attn_base", "hc_attn_base"},
    {"hc_ffn_fn", "hc_ffn_fn"},
    {"hc_ffn_scale", "hc_ffn_scale"},
    {"hc_ffn_base", "hc_ffn_base"},
    {"comp_wkv", "attn.compressor.wkv.weight"},
    {"comp_wgate", "attn.compressor.wgate.weight"},
    {"comp_ape", "attn.compressor.ape"},
    {"comp_norm", "attn.compressor.norm.weight"},
    {"idx_wq_b", "attn.indexer.wq_b.weight"},
    {"idx_proj", "attn.indexer.weights_proj.weight"},
    {"idx_comp_wkv", "attn.indexer.compressor.wkv.weight"},
    {"idx_comp_wgate", "attn.indexer.compressor.wgate.weight"},
    {"idx_comp_ape", "attn.indexer.compressor.ape"},
    {"idx_comp_norm", "attn.indexer.compressor.norm.weight"},
    {"ffn_norm", "ffn_norm.weight"},
    {"ffn_gate_inp", "ffn.gate.weight"},
    {"ffn_gate_hash", "ffn.gate.tid2eid"},
    {"ffn_gate_bias", "ffn.gate.bias"},
    {"shexp_gate", "ffn.shared_experts.w1.weight"},
    {"shexp_up", "ffn.shared_experts.w3.weight"},
    {"shexp_down", "ffn.shared_experts.w2.weight"},
};
static const pair draft_first[] = {{"mtp_main_proj", "main_proj.weight"}, {"mtp_main_norm", "main_norm.weight"}};
static const pair draft_last[] = {{"mtp_norm", "norm.weight"},
                                  {"mtp_hc_head_fn", "hc_head_fn"},
                                  {"mtp_hc_head_scale", "hc_head_scale"},
                                  {"mtp_hc_head_base", "hc_head_base"},
                                  {"mtp_markov_w1", "markov_head.markov_w1.weight"},
                                  {"mtp_markov_w2", "markov_head.markov_w2.weight"},
                                  {"mtp_confidence", "confidence_head.proj.weight"}};

typedef struct job {
    const aff_ckpt *k;
    aff_cwriter *w;
    bool filling; /* first every tensor is declared, then every one is written, in the same order */
    uint64_t next;
} job;

static void tensor(job *j, const char *cname, aff_dtype d, uint64_t rows, uint64_t cols, const void *data,
                   uint64_t size, const void *scale, uint64_t scale_size)
{
    uint64_t index;
    if (!j->filling)
        must(aff__cwriter_declare(j->w, cname, d, rows, cols, &index, &err));
    else
        must(aff__cwriter_tensor(j->w, j->next++, data, size, scale, scale_size, &err));
}

static void copy(job *j, const char *cprefix, const char *kprefix, const pair *p)
{
    char c[128], k[128], scale[128];
    snprintf(c, sizeof c, "%s%s", cprefix, p->c);
    snprintf(k, sizeof k, "%s%s", kprefix, p->k);
    const aff_st_tensor *t = aff__ckpt_find(j->k, k);
    if (!t) return; /* not every block has every tensor */
    const uint64_t cols = t->shape[t->ndim - 1], rows = t->ndim == 2 ? t->shape[0] : 1;
    if (t->dtype == AFF_ST_F8_E4M3) {
        snprintf(scale, sizeof scale, "%.*s.scale", (int)(strlen(k) - 7), k);
        const aff_st_tensor *s = aff__ckpt_find(j->k, scale);
        assert_non_null(s);
        if (rows % 128 == 0 && cols % 128 == 0) {
            tensor(j, c, AFF_FP8, rows, cols, t->data, t->size, s->data, s->size);
            return;
        }
        /* Containers hold whole tiles only: the same scales on the finer grid. */
        const uint64_t gr = rows / 32, gc = cols / 32;
        uint8_t *fine = malloc((size_t)(gr * gc));
        assert_non_null(fine);
        for (uint64_t i = 0; i < gr * gc; i++) fine[i] = s->data[i / gc / 4 * ((cols + 127) / 128) + i % gc / 4];
        tensor(j, c, AFF_FP8_32, rows, cols, t->data, t->size, fine, gr * gc);
        free(fine);
    } else if (t->dtype == AFF_ST_I64) { /* the hash table is stored as float values */
        float *v = malloc((size_t)(rows * cols) * sizeof *v);
        assert_non_null(v);
        for (uint64_t i = 0; i < rows * cols; i++) {
            int64_t e;
            memcpy(&e, t->data + 8 * i, 8);
            v[i] = (float)e;
        }
        tensor(j, c, AFF_F32, rows, cols, v, rows * cols * 4, NULL, 0);
        free(v);
    } else {
        tensor(j, c, t->dtype == AFF_ST_BF16 ? AFF_BF16 : AFF_F32, rows, cols, t->data, t->size, NULL, 0);
    }
}

#define COPY_ALL(j, cprefix, kprefix, table)                                                                           \
    do {                                                                                                               \
        for (size_t i_ = 0; i_ < sizeof(table) / sizeof *(table); i_++) copy(j, cprefix, kprefix, &(table)[i_]);       \
    } while (0)

static void dense(job *j, const aff_config *c, bool draft, int stages, const uint8_t *codebook)
{
    char cp[32], kp[32];
    if (codebook) tensor(j, "__codebook", AFF_F32, 1, 2048, codebook, AFF_CB_BYTES, NULL, 0);
    if (draft) {
        snprintf(kp, sizeof kp, "mtp.%d.", stages - 1);
        COPY_ALL(j, "", "mtp.0.", draft_first);
        COPY_ALL(j, "", kp, draft_last);
    } else {
        COPY_ALL(j, "", "", globals);
    }
    for (int l = 0; l < (draft ? stages : c->layers); l++) {
        snprintf(cp, sizeof cp, draft ? "mtp.%d." : "blk.%d.", l);
        snprintf(kp, sizeof kp, draft ? "mtp.%d." : "layers.%d.", l);
        COPY_ALL(j, cp, kp, block);
    }
}

/* Row-major planes of random codes; exponents and row scales small enough that the weights are about 0.05. */
static void random_record(const aff_clayer *l, uint64_t seed, uint8_t *record)
{
    const aff_matdesc *m[3] = {&l->gate, &l->up, &l->down};
    memset(record, 0, (size_t)l->stride);
    for (int k = 0; k < 3; k++) {
        for (uint64_t i = 0; i < m[k]->data_size; i++) record[m[k]->data_off + i] = (uint8_t)aff__splitmix64(&seed);
        for (uint64_t i = 0; i + 3 <= m[k]->scale_size;
             i += 3) { /* four fields of 6 bits: exponent 0..3, sign, rotation, variant */
            uint32_t f = 0;
            for (int b = 0; b < 4; b++) f |= ((uint32_t)aff__splitmix64(&seed) & 0x3bu) << (6 * b);
            for (int b = 0; b < 3; b++) record[m[k]->scale_off + i + (uint64_t)b] = (uint8_t)(f >> (8 * b));
        }
        for (uint64_t r = 0; r < m[k]->rows; r++) { /* bf16 of 2^-6 with a random mantissa */
            const uint16_t h = (uint16_t)(0x3c80u | (aff__splitmix64(&seed) & 0x7fu));
            memcpy(record + m[k]->rscale_off + 2 * r, &h, 2);
        }
    }
}

static void checkpoint_record(const aff_ckpt *k, const aff_clayer *l, const char *prefix, uint32_t layer, uint32_t e,
                              uint8_t *record)
{
    static const char *const leaf[3] = {"w1", "w3", "w2"};
    const aff_matdesc *m[3] = {&l->gate, &l->up, &l->down};
    memset(record, 0, (size_t)l->stride);
    for (int i = 0; i < 3; i++) {
        char name[96];
        snprintf(name, sizeof name, "%s%u.ffn.experts.%u.%s.weight", prefix, layer, e, leaf[i]);
        const aff_st_tensor *t = aff__ckpt_find(k, name);
        snprintf(name, sizeof name, "%s%u.ffn.experts.%u.%s.scale", prefix, layer, e, leaf[i]);
        const aff_st_tensor *s = aff__ckpt_find(k, name);
        assert_non_null(t);
        assert_non_null(s);
        assert_int_equal(t->size, m[i]->data_size);
        assert_int_equal(s->size, m[i]->scale_size);
        memcpy(record + m[i]->data_off, t->data, (size_t)t->size);
        memcpy(record + m[i]->scale_off, s->data, (size_t)s->size);
    }
}

static void experts(job *j, aff_dtype d, const char *prefix, int layers, int n, uint64_t seed)
{
    for (int l = 0; l < layers; l++) {
        const aff_clayer *y = aff__cwriter_layer_layout(j->w, (uint32_t)l);
        uint8_t *a = malloc((size_t)y->stride), *b = calloc(1, (size_t)y->stride);
        assert_non_null(a);
        assert_non_null(b);
        for (int e = 0; e < n; e++) {
            if (d == AFF_MXFP4)
                checkpoint_record(j->k, y, prefix, (uint32_t)l, (uint32_t)e, a);
            else
                random_record(y, seed + (uint64_t)(l * n + e) * 977u, a);
            if (d == AFF_Q2P875G) aff__expert_record_permute(y, b, a, true);
            must(aff__cwriter_expert(j->w, (uint32_t)l, (uint32_t)e, d == AFF_Q2P875G ? b : a, &err));
        }
        free(a);
        free(b);
    }
}

static void write_one(const aff_ckpt *k, const aff_config *c, const char *path, bool draft, aff_dtype d, uint64_t seed,
                      uint64_t cb_seed)
{
    char file[1024], *text;
    size_t size;
    uint8_t codebook[AFF_CB_BYTES];
    const uint64_t identity = cb_seed;
    int stages = 0, layers;
    for (char name[64];; stages++) {
        snprintf(name, sizeof name, "mtp.%d.attn.wkv.weight", stages);
        if (!aff__ckpt_find(k, name)) break;
    }
    layers = draft ? stages : c->layers;
    for (size_t i = 0; i < sizeof codebook; i++) { /* exponent field 5..6, either sign */
        const uint64_t u = aff__splitmix64(&cb_seed);
        codebook[i] = (uint8_t)((u & 0x87u) | (5 + (u >> 8 & 1)) << 3);
    }
    job j = {.k = k};
    must(aff__cwriter_create(&j.w, path, false, &err));
    must(aff__path_join(file, sizeof file, aff__ckpt_dir(k), "config.json", &err));
    must(aff__read_file(file, 1 << 20, &text, &size, &err));
    must(aff__cwriter_meta(j.w, text, size, &err));
    free(text);
    char made[64]; /* stands for the checkpoint: drafts of another model have another */
    snprintf(made, sizeof made, "{\"checkpoint_xxh3\": \"%016llx\"}", (unsigned long long)identity);
    must(aff__cwriter_provenance(j.w, made, strlen(made), &err));
    dense(&j, c, draft, stages, d == AFF_MXFP4 ? NULL : codebook);
    for (int l = 0; l < layers; l++)
        must(aff__cwriter_layer(j.w, (uint32_t)c->experts, d, (uint64_t)c->inter, (uint64_t)c->hidden, &err));
    must(aff__cwriter_begin(j.w, &err));
    j.filling = true;
    dense(&j, c, draft, stages, d == AFF_MXFP4 ? NULL : codebook);
    experts(&j, d, draft ? "mtp." : "layers.", layers, c->experts, seed);
    must(aff__cwriter_finish(j.w, &err));
}

void test_write_container(const char *ckpt, const char *path, aff_dtype d, uint64_t seed, uint64_t cb_seed)
{
    char file[1024], *text;
    size_t size;
    aff_ckpt *k;
    aff_config c;
    must(aff__ckpt_open(&k, ckpt, &err));
    must(aff__path_join(file, sizeof file, ckpt, "config.json", &err));
    must(aff__read_file(file, 1 << 20, &text, &size, &err));
    must(aff__config_parse(&c, text, size, file, &err));
    free(text);
    write_one(k, &c, path, false, d, seed, 1);
    snprintf(file, sizeof file, "%.*s.dspark.aff", (int)(strrchr(path, '.') - path), path);
    write_one(k, &c, file, true, d, seed + 1000003u, cb_seed);
    aff__ckpt_close(k);
}
