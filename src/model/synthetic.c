#include "model/synthetic.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/threads.h"
#include "quant/codebook.h"
#include "quant/numbers.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- configuration ---- */

typedef struct {
    const char *name;
    int vocab, hidden, layers, heads, q_rank, o_groups, o_rank, inter, experts, picks, hash, index_heads, topk, markov, noise;
    long long positions, yarn_original;
} geometry;

static const geometry geometries[] = {
    {"flash", 129280, 4096, 43, 64, 1024, 8, 1024, 2048, 256, 6, 3, 64, 512, 256, 128799, 1048576, 65536},
    {"tiny", 4096, 256, 6, 4, 128, 2, 128, 128, 16, 4, 2, 4, 64, 64, 4030, 65536, 4096},
};

static const geometry *find_geometry(const aff_synthetic *s, aff_error *err)
{
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++) {
        const geometry *g = &geometries[i];
        if (strcmp(s->geometry, g->name) != 0) continue;
        if (s->layers < 0 || s->layers > g->layers) {
            aff__fail(err, AFF_E_INVALID, "synthetic %s: layers: expected 1 to %d, got %d", g->name, g->layers, s->layers);
            return NULL;
        }
        if (s->experts && (s->experts < g->picks || s->experts > g->experts)) {
            aff__fail(err, AFF_E_INVALID, "synthetic %s: experts a layer: expected %d to %d, got %d", g->name, g->picks, g->experts, s->experts);
            return NULL;
        }
        return g;
    }
    aff__fail(err, AFF_E_INVALID, "synthetic: expected flash or tiny, got '%s'", s->geometry);
    return NULL;
}

/* 0, 0, then 4 and 128 in turn; draft stages 0. */
static void write_layers(FILE *f, int layers)
{
    fprintf(f, ",\"compress_ratios\":[");
    for (int i = 0; i < layers + AFF_SYNTHETIC_STAGES; i++) fprintf(f, "%s%d", i ? "," : "", i < 2 || i >= layers ? 0 : i % 2 ? 128 : 4);
    fprintf(f, "],\"dspark_target_layer_ids\":[");
    for (int i = layers < 3 ? 0 : layers - 3; i < layers; i++) fprintf(f, "%d%s", i, i + 1 < layers ? "," : "");
    fprintf(f, "]}");
}

aff_status aff__synthetic_config(const aff_synthetic *s, char **json, aff_error *err)
{
    const geometry *g = find_geometry(s, err);
    size_t size;
    *json = NULL;
    if (!g) return AFF_E_INVALID;
    const int layers = s->layers ? s->layers : g->layers;
    FILE *f = open_memstream(json, &size);
    if (!f) return aff__fail(err, AFF_E_NOMEM, "synthetic: no memory for its configuration");
    fprintf(f,
            "{\"model_type\":\"deepseek_v4\",\"vocab_size\":%d,\"hidden_size\":%d,\"num_hidden_layers\":%d,\"num_attention_heads\":%d,\"head_dim\":512,"
            "\"qk_rope_head_dim\":64,\"q_lora_rank\":%d,\"o_groups\":%d,\"o_lora_rank\":%d,\"sliding_window\":128,\"index_n_heads\":%d,"
            "\"index_head_dim\":128,\"index_topk\":%d,\"hc_mult\":4,\"hc_sinkhorn_iters\":20,\"hc_eps\":1e-6,\"rms_norm_eps\":1e-6,"
            "\"n_routed_experts\":%d,\"num_experts_per_tok\":%d,\"n_shared_experts\":1,\"moe_intermediate_size\":%d,\"num_hash_layers\":%d,"
            "\"max_position_embeddings\":%lld,\"routed_scaling_factor\":1.5,\"swiglu_limit\":10.0,\"rope_theta\":10000,\"compress_rope_theta\":160000,"
            "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":16,\"beta_fast\":32,\"beta_slow\":1,\"original_max_position_embeddings\":%lld},"
            "\"dspark_block_size\":5,\"dspark_noise_token_id\":%d,\"dspark_markov_rank\":%d",
            g->vocab, g->hidden, layers, g->heads, g->q_rank, g->o_groups, g->o_rank, g->index_heads, g->topk, s->experts ? s->experts : g->experts, g->picks,
            g->inter, g->hash < layers ? g->hash : layers, g->positions, g->yarn_original, g->noise, g->markov);
    write_layers(f, layers);
    if (fclose(f) == 0 && *json) return AFF_OK;
    return aff__fail(err, AFF_E_NOMEM, "synthetic: no memory for its configuration");
}

/* ---- weights ---- */

static uint64_t key_of(uint64_t seed, const char *name)
{
    uint64_t h = 0xCBF29CE484222325u ^ seed * 0x9E3779B97F4A7C15u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001B3u;
    return h;
}

/* Words of random bits, of each lane those in `mask`, plus `add`. */
static void fill(uint64_t key, void *out, uint64_t bytes, uint64_t mask, uint64_t add)
{
    uint8_t *p = out;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        const uint64_t w = (aff__splitmix64(&key) & mask) + add;
        memcpy(p, &w, 8);
    }
    const uint64_t w = (aff__splitmix64(&key) & mask) + add;
    memcpy(p, &w, (size_t)bytes);
}

/* Exponent of 2 nearest to 1 / sqrt(cols). */
static int gain(int cols) { return -(int)lround(log2((double)cols) / 2); }

aff_dtype aff__synthetic_dtype(const char *name)
{
    static const char *const fp8[] = {"attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "shared_experts", "main_proj"};
    if (strstr(name, "hc_")) return AFF_F32;
    for (size_t i = 0; i < sizeof fp8 / sizeof *fp8; i++)
        if (strstr(name, fp8[i])) return AFF_FP8;
    return AFF_BF16;
}

void aff__synthetic_matrix(uint64_t seed, const char *name, const aff_weight *w, void *data, uint8_t *scale)
{
    /* Signs, two exponent bits and mantissas are random: magnitudes of 2^-3 to 2, root of the mean square 0.9, times the gain. */
    const uint64_t n = (uint64_t)w->rows * (uint64_t)w->cols, key = key_of(seed, name);
    const int g = gain(w->cols);
    if (w->dtype == AFF_FP8) {
        fill(key, data, n, 0x9F9F9F9F9F9F9F9Fu, 0x2020202020202020u);
        memset(scale, 127 + g, (size_t)((w->rows + 127) / 128) * (size_t)((w->cols + 127) / 128));
    } else if (w->dtype == AFF_BF16) {
        fill(key, data, 2 * n, 0x81FF81FF81FF81FFu, 0x0001000100010001u * ((uint64_t)(124 + g) << 7));
    } else {
        fill(key, data, 4 * n, 0x81FFFFFF81FFFFFFu, 0x0000000100000001u * ((uint64_t)(124 + g) << 23));
    }
}

void aff__synthetic_floats(uint64_t seed, const char *name, uint64_t n, float *out)
{
    uint64_t key = key_of(seed, name);
    const bool one = strstr(name, "norm") || strstr(name, "_scale"), random = strstr(name, "ape") != NULL;
    for (uint64_t i = 0; i < n; i++) out[i] = one ? 1 : random ? (float)((double)(aff__splitmix64(&key) >> 11) * 0x1p-53 - 0.5) : 0;
}

void aff__synthetic_hash(uint64_t seed, const char *name, const aff_config *c, int32_t *out)
{
    uint64_t key = key_of(seed, name);
    for (int t = 0; t < c->vocab; t++, out += c->picks)
        for (int k = 0; k < c->picks; k++) {
            bool again;
            do {
                out[k] = (int32_t)(aff__splitmix64(&key) % (uint64_t)c->experts);
                again = false;
                for (int i = 0; i < k; i++) again |= out[i] == out[k];
            } while (again);
        }
}

/* ---- experts ---- */

static aff_status place(aff_matdesc *m, int rows, int cols, uint64_t *at, aff_error *err)
{
    *m = (aff_matdesc){.rows = (uint64_t)rows, .cols = (uint64_t)cols, .quant = AFF_Q2P875G};
    if (!aff__dtype_sizes(aff__dtype_info(AFF_Q2P875G), m->rows, m->cols, &m->data_size, &m->scale_size, &m->rscale_size))
        return aff__fail(err, AFF_E_INVALID, "synthetic: experts of %d x %d: not a shape of this format", rows, cols);
    m->data_off = *at;
    m->scale_off = aff__align_up(m->data_off + m->data_size, 256);
    m->rscale_off = aff__align_up(m->scale_off + m->scale_size, 256);
    *at = aff__align_up(m->rscale_off + m->rscale_size, 256);
    return AFF_OK;
}

static aff_status layout(const aff_config *c, aff_clayer *l, aff_error *err)
{
    uint64_t at = 0;
    *l = (aff_clayer){.n_experts = (uint32_t)c->experts};
    AFF_TRY(place(&l->gate, c->inter, c->hidden, &at, err));
    AFF_TRY(place(&l->up, c->inter, c->hidden, &at, err));
    AFF_TRY(place(&l->down, c->hidden, c->inter, &at, err));
    l->stride = at;
    return AFF_OK;
}

aff_status aff__synthetic_expert_bytes(const aff_config *c, uint64_t *bytes, aff_error *err)
{
    aff_clayer l;
    AFF_TRY(layout(c, &l, err));
    *bytes = l.stride;
    return AFF_OK;
}

typedef struct {
    uint64_t key;
    const aff_clayer *l;
    uint8_t *records;
    int64_t first; /* number of the first expert */
} work;

static void matrix(const aff_matdesc *m, uint64_t key, uint8_t *record)
{
    /* Codes and fields may be any bits, but quantised weights have block exponents of 4 to 7 nearly everywhere (the top bit of the three,
     * at bits 2, 8, 14 and 20 of a group's 24), and kernels may count on it. Entries of the table have a root of the mean square of 0.63,
     * those exponents one of 74; the row scale makes that 1 / sqrt(cols). */
    static const uint8_t top[3] = {0x04, 0x41, 0x10};
    const uint16_t scale = aff__f32_to_bf16((float)(1 / (46.5 * sqrt((double)m->cols))));
    fill(key, record + m->data_off, m->data_size, UINT64_MAX, 0);
    fill(key ^ 0xF1E1D, record + m->scale_off, m->scale_size, UINT64_MAX, 0);
    for (uint64_t i = 0; i < m->scale_size; i++) record[m->scale_off + i] |= top[i % 3];
    for (uint64_t i = 0; i < m->rows; i++) memcpy(record + m->rscale_off + 2 * i, &scale, 2);
}

static void one_expert(void *ctx, int64_t i, int thread)
{
    const work *w = ctx;
    uint8_t *record = w->records + (uint64_t)i * w->l->stride;
    i += w->first;
    matrix(&w->l->gate, w->key + 3 * (uint64_t)i * 0x9E3779B97F4A7C15u, record);
    matrix(&w->l->up, w->key + (3 * (uint64_t)i + 1) * 0x9E3779B97F4A7C15u, record);
    matrix(&w->l->down, w->key + (3 * (uint64_t)i + 2) * 0x9E3779B97F4A7C15u, record);
}

static void make_codebook(uint64_t seed, uint8_t codebook[AFF_CB_BYTES])
{
    uint64_t key = key_of(seed, "codebook");
    for (int i = 0; i < AFF_CB_BYTES; i++) { /* any sign, exponent field 1 to 7, any mantissa */
        const uint64_t r = aff__splitmix64(&key);
        codebook[i] = (uint8_t)((r & 0x87) | (1 + (r >> 8) % 7) << 3);
    }
}

aff_status aff__synthetic_experts(aff_experts **out, uint64_t seed, const char *prefix, int layers, const aff_config *c, aff_error *err)
{
    aff_clayer l;
    aff_pool *pool;
    uint8_t codebook[AFF_CB_BYTES], *records = NULL;
    AFF_TRY(layout(c, &l, err));
    make_codebook(seed, codebook);
    AFF_TRY(aff__pool_create(&pool, 0, err));
    const uint64_t n = (uint64_t)layers * (uint64_t)c->experts;
    aff_status s = aff__calloc(&records, n, l.stride, "synthetic experts", err);
    if (s == AFF_OK) {
        aff__pool_run(pool, one_expert, &(work){key_of(seed, prefix), &l, records, 0}, (int64_t)n);
        s = aff__experts_from_records(out, &l, layers, c->hidden, c->inter, codebook, records, err);
    }
    aff__pool_free(pool);
    return s;
}

static aff_status write_layers_of_experts(aff_outfile *f, aff_pool *pool, const work *w, int layers, aff_error *err)
{
    const uint64_t bytes = (uint64_t)w->l->n_experts * w->l->stride;
    for (int l = 0; l < layers; l++) {
        work here = *w;
        here.first = (int64_t)l * w->l->n_experts;
        memset(here.records, 0, (size_t)bytes);
        aff__pool_run(pool, one_expert, &here, w->l->n_experts);
        AFF_TRY(aff__out_write(f, here.records, bytes, (uint64_t)l * bytes, err));
    }
    return AFF_OK;
}

aff_status aff__synthetic_experts_file(aff_experts **out, uint64_t seed, const char *prefix, int layers, const aff_config *c, const char *path,
                                       aff_error *err)
{
    aff_clayer l;
    aff_pool *pool;
    aff_outfile f;
    uint8_t codebook[AFF_CB_BYTES], *records = NULL;
    AFF_TRY(layout(c, &l, err));
    l.stride = aff__align_up(l.stride, 4096); /* as in a container */
    make_codebook(seed, codebook);
    AFF_TRY(aff__calloc(&records, (uint64_t)c->experts, l.stride, "synthetic experts", err));
    aff_status s = aff__pool_create(&pool, 0, err);
    if (s == AFF_OK) {
        s = aff__out_open(&f, path, err);
        if (s == AFF_OK) {
            s = write_layers_of_experts(&f, pool, &(work){key_of(seed, prefix), &l, records, 0}, layers, err);
            if (s == AFF_OK)
                s = aff__out_commit(&f, err);
            else
                aff__out_abort(&f);
        }
        aff__pool_free(pool);
    }
    free(records);
    return s == AFF_OK ? aff__experts_from_file(out, &l, layers, c->hidden, c->inter, codebook, path, err) : s;
}

/* ---- on demand ---- */

typedef struct {
    aff_clayer l;
    uint8_t *record; /* the one that all are made of */
} turned;

/* The plane's bytes from `distance` units on, then those before. 192 bytes a unit: the fields' pattern of three stays in place. */
static void turn(const turned *t, uint8_t *to, uint64_t off, uint64_t size, uint64_t distance)
{
    const uint64_t cut = distance % (size / 192 + 1) * 192;
    memcpy(to + off, t->record + off + cut, (size_t)(size - cut));
    memcpy(to + off + size - cut, t->record + off, (size_t)cut);
}

static void make_turned(void *ctx, int layer, int e, uint8_t *record)
{
    const turned *t = ctx;
    const aff_matdesc *m[3] = {&t->l.gate, &t->l.up, &t->l.down};
    const uint64_t i = (uint64_t)layer * t->l.n_experts + (uint64_t)e;
    for (int k = 0; k < 3; k++) { /* a prime stride spreads the experts over the plane */
        turn(t, record, m[k]->data_off, m[k]->data_size, i * 7919);
        turn(t, record, m[k]->scale_off, m[k]->scale_size, i * 7919);
        memcpy(record + m[k]->rscale_off, t->record + m[k]->rscale_off, (size_t)m[k]->rscale_size);
    }
}

static void free_turned(void *ctx)
{
    turned *t = ctx;
    free(t->record);
    free(t);
}

aff_status aff__synthetic_experts_on_demand(aff_experts **out, uint64_t seed, const char *prefix, int layers, const aff_config *c, aff_error *err)
{
    turned *t;
    uint8_t book[AFF_CB_BYTES];
    AFF_TRY(aff__calloc(&t, 1, sizeof *t, "synthetic experts", err));
    aff_status s = layout(c, &t->l, err);
    if (s == AFF_OK) s = aff__calloc(&t->record, 1, t->l.stride, "synthetic experts", err);
    if (s != AFF_OK) {
        free_turned(t);
        return s;
    }
    one_expert(&(work){key_of(seed, prefix), &t->l, t->record, 0}, 0, 0);
    make_codebook(seed, book);
    return aff__experts_from_source(out, &t->l, layers, c->hidden, c->inter, book, &(aff_expert_source){t, make_turned, free_turned}, err);
}
