/* See parity_model.h. Mirrors tools/tiny/parity_models.py; keep the two in step. */
#include "parity_model.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { STAGES = 3, TAPS = 3, MARKOV_RANK = 64, BLOCK = 5, NOISE_TOKEN = 509, HC = 4, SHARDS = 3, NAME_SIZE = 96 };

typedef struct {
    const char *name, *key;
    int head_dim, rope_dim, q_rank, o_rank, index_heads, index_dim, hash_layers;
    double swiglu_limit;
    int skipped, layers; /* layers are those of `ratios` from `skipped` on */
    int window, top_k, positions;
    const int *taps;
} model;

/* Fields that all models share. */
enum { VOCAB = 512, HIDDEN = 256, LAYERS = 8, EXPERTS = 16, TOP_K = 4, WIDTH = 128, HEADS = 8, GROUPS = 4 };
static const int ratios[LAYERS + STAGES] = {0, 0, 4, 128, 4, 128, 4, 0, 0, 0, 0};
static const int taps[TAPS] = {3, 5, 7}, low_taps[TAPS] = {0, 1, 2};

static const model models[] = {
    {"toy", "toy.7", 64, 16, 64, 32, 4, 32, 2, 10.0, 0, LAYERS, 16, 16, 65536, taps},
    {"kernel", "kernel.11", 512, 64, 128, 64, 8, 128, 3, 10.0, 0, LAYERS, 16, 16, 65536, taps},
    {"toy-clamp", "toy.7", 64, 16, 64, 32, 4, 32, 2, 0.5, 0, LAYERS, 16, 16, 65536, taps},
    {"long", "long.1", 512, 64, 128, 64, 4, 128, 0, 10.0, 1, 3, 128, 512, 1048576, low_taps},
};

typedef enum { KIND_BF16, KIND_F32, KIND_I64, KIND_FP8, KIND_FP4 } kind; /* how a logical tensor is stored */
typedef enum { T_I64, T_F32, T_BF16, T_E4M3, T_E8M0, T_I8 } dtype;

static const char *const dtype_name[] = {"I64", "F32", "BF16", "F8_E4M3", "F8_E8M0", "I8"};
static const size_t dtype_size[] = {8, 4, 2, 1, 1, 1};

typedef struct {
    char name[NAME_SIZE];
    dtype type;
    int rank;
    size_t shape[2];
    int scale_base; /* T_E8M0: middle scale byte */
    int shard;
    size_t bytes;
} tensor;

typedef struct {
    tensor *v;
    size_t n, cap;
    int failed;
} tensor_list;

/* ------------------------------------------------------------------------------------------------ generator */

static uint64_t fnv1a64(const char *a, const char *b)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (; *a; a++) h = (h ^ (unsigned char)*a) * 0x100000001B3u;
    for (; *b; b++) h = (h ^ (unsigned char)*b) * 0x100000001B3u;
    return h;
}

static uint64_t splitmix(uint64_t start, uint64_t i)
{
    uint64_t z = start + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static int32_t noise(uint64_t start, uint64_t i)
{
    uint64_t u = splitmix(start, i);
    uint32_t sum = 0;
    for (int k = 0; k < 4; k++) sum += (uint32_t)(u >> (16 * k)) & 0xFFFFu;
    return (int32_t)sum - 131070;
}

uint64_t aff_test_stream(const char *key, uint64_t i)
{
    return splitmix(fnv1a64(key, ""), i);
}

int32_t aff_test_noise(const char *key, uint64_t i)
{
    return noise(fnv1a64(key, ""), i);
}

static int ends_with(const char *s, const char *end)
{
    size_t a = strlen(s), b = strlen(end);
    return a >= b && strcmp(s + a - b, end) == 0;
}

/* Element i of a float tensor is (a + b*n(i)) * 2^-s; the first matching end of the name decides. */
typedef struct {
    const char *end;
    int32_t a, b;
    int s;
} float_rule;

static const float_rule *rule_of(const char *name)
{
    static const float_rule rules[] = {
        {"norm.weight", 1 << 21, 6, 21},
        {"embed.weight", 0, 7, 18},
        {"head.weight", 0, 7, 21},
        {"_fn", 0, 7, 23},
        {"_base", 0, 7, 19},
        {"_scale", 1 << 21, 6, 21},
        {"attn_sink", 0, 7, 18},
        {"ape", 0, 7, 19},
        {"gate.bias", 0, 6, 21},
        {"gate.weight", 0, 7, 21},
        {"markov_w1.weight", 0, 7, 18},
        {"markov_w2.weight", 0, 7, 21},
        {"weight", 0, 7, 22},
    };
    const float_rule *r = rules;
    while (!ends_with(name, r->end)) r++;
    return r;
}

static void put_le(unsigned char *p, uint64_t v, size_t bytes)
{
    for (size_t k = 0; k < bytes; k++) p[k] = (unsigned char)(v >> (8 * k));
}

static void fill_floats(const tensor *t, uint64_t start, unsigned char *out)
{
    const float_rule *r = rule_of(t->name);
    size_t size = dtype_size[t->type], count = t->bytes / size;
    for (size_t i = 0; i < count; i++) {
        float f = (float)(r->a + r->b * noise(start, i)) / (float)(1 << r->s); /* below 2^24: exact */
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        if (t->type == T_BF16) bits = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16; /* to nearest even */
        put_le(out + i * size, bits, size);
    }
}

static void fill_bytes(const tensor *t, uint64_t start, unsigned char *out)
{
    uint64_t u = 0;
    for (size_t j = 0; j < t->bytes; j++) {
        u = j % 8 ? u >> 8 : splitmix(start, j / 8);
        unsigned b = (unsigned)(u & 0xFFu);
        if (t->type == T_E4M3 && (b & 0x7Fu) == 0x7Fu) b &= 0xFEu;
        if (t->type == T_E8M0) b = (unsigned)(t->scale_base - 1) + b % 3;
        out[j] = (unsigned char)b;
    }
}

static void fill_hash_table(const tensor *t, uint64_t start, unsigned char *out)
{
    for (size_t row = 0; row < t->shape[0]; row++) {
        unsigned order[EXPERTS];
        for (unsigned e = 0; e < EXPERTS; e++) order[e] = e;
        for (unsigned k = 0; k < TOP_K; k++) {
            unsigned j = k + (unsigned)(splitmix(start, row * TOP_K + k) % (EXPERTS - k));
            unsigned e = order[k];
            order[k] = order[j];
            order[j] = e;
            put_le(out + (row * TOP_K + k) * 8, order[k], 8);
        }
    }
}

/* ---------------------------------------------------------------------------------------------- tensor list */

/* out = a followed by b; a name that does not fit is cut. */
static void join(char out[NAME_SIZE], const char *a, const char *b)
{
    size_t n = 0;
    for (; *a && n + 1 < NAME_SIZE; a++) out[n++] = *a;
    for (; *b && n + 1 < NAME_SIZE; b++) out[n++] = *b;
    out[n] = '\0';
}

static void push(tensor_list *l, const char *name, dtype type, int rank, size_t a, size_t b, int scale_base)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 256;
        tensor *v = realloc(l->v, cap * sizeof *v);
        if (v == NULL) {
            l->failed = 1;
            return;
        }
        l->v = v;
        l->cap = cap;
    }
    tensor *t = &l->v[l->n++];
    memset(t, 0, sizeof *t);
    join(t->name, name, "");
    t->type = type;
    t->rank = rank;
    t->shape[0] = a;
    t->shape[1] = b;
    t->scale_base = scale_base;
    t->shard = strncmp(name, "mtp.", 4) == 0                                      ? 2
               : strncmp(name, "layers.", 7) == 0 && atoi(name + 7) >= LAYERS / 2 ? 1
                                                                                  : 0;
    t->bytes = a * (rank == 2 ? b : 1) * dtype_size[type];
}

static int half_bits(size_t columns) /* (floor(log2 columns) + 1) div 2 */
{
    int bits = 0;
    for (; columns; columns >>= 1) bits++;
    return bits / 2;
}

/* One logical tensor: prefix p, rest of the name, kind, shape [a] (b = 0) or [a, b]. */
static void add(tensor_list *l, const char *p, const char *rest, kind k, int a, int b)
{
    char name[NAME_SIZE];
    join(name, p, rest);
    size_t rows = (size_t)a, cols = (size_t)b;
    if (k == KIND_BF16 || k == KIND_F32 || k == KIND_I64) {
        static const dtype plain[] = {T_BF16, T_F32, T_I64};
        push(l, name, plain[k], b ? 2 : 1, rows, cols, 0);
        return;
    }
    int fp8 = k == KIND_FP8;
    push(l, name, fp8 ? T_E4M3 : T_I8, 2, rows, fp8 ? cols : cols / 2, 0);
    memcpy(name + strlen(name) - strlen("weight"), "scale", sizeof "scale");
    push(l, name, T_E8M0, 2, fp8 ? (rows + 127) / 128 : rows, fp8 ? (cols + 127) / 128 : cols / 32,
         (fp8 ? 120 : 125) - half_bits(cols));
}

static void add_compressor(tensor_list *l, const char *p, const char *which, int ratio, int dim)
{
    char q[NAME_SIZE];
    join(q, p, which);
    int width = (ratio == 4 ? 2 : 1) * dim;
    add(l, q, "ape", KIND_F32, ratio, width);
    add(l, q, "wkv.weight", KIND_BF16, width, HIDDEN);
    add(l, q, "wgate.weight", KIND_BF16, width, HIDDEN);
    add(l, q, "norm.weight", KIND_BF16, dim, 0);
}

static void add_head(tensor_list *l, const char *p)
{
    add(l, p, "norm.weight", KIND_BF16, HIDDEN, 0);
    add(l, p, "hc_head_fn", KIND_F32, HC, HC * HIDDEN);
    add(l, p, "hc_head_base", KIND_F32, HC, 0);
    add(l, p, "hc_head_scale", KIND_F32, 1, 0);
}

static void add_attention(tensor_list *l, const model *m, const char *p, int ratio)
{
    add(l, p, "attn.wq_a.weight", KIND_FP8, m->q_rank, HIDDEN);
    add(l, p, "attn.q_norm.weight", KIND_BF16, m->q_rank, 0);
    add(l, p, "attn.wq_b.weight", KIND_FP8, HEADS * m->head_dim, m->q_rank);
    add(l, p, "attn.wkv.weight", KIND_FP8, m->head_dim, HIDDEN);
    add(l, p, "attn.kv_norm.weight", KIND_BF16, m->head_dim, 0);
    add(l, p, "attn.attn_sink", KIND_F32, HEADS, 0);
    add(l, p, "attn.wo_a.weight", KIND_FP8, GROUPS * m->o_rank, HEADS * m->head_dim / GROUPS);
    add(l, p, "attn.wo_b.weight", KIND_FP8, HIDDEN, GROUPS * m->o_rank);
    if (ratio) add_compressor(l, p, "attn.compressor.", ratio, m->head_dim);
    if (ratio == 4) {
        add(l, p, "attn.indexer.wq_b.weight", KIND_FP8, m->index_heads * m->index_dim, m->q_rank);
        add(l, p, "attn.indexer.weights_proj.weight", KIND_BF16, m->index_heads, HIDDEN);
        add_compressor(l, p, "attn.indexer.compressor.", ratio, m->index_dim);
    }
}

static void add_block(tensor_list *l, const model *m, const char *p, int ratio, int hashed)
{
    static const char *const expert_part[] = {"w1", "w2", "w3"};
    char rest[NAME_SIZE];
    int mix = (2 + HC) * HC;
    add(l, p, "attn_norm.weight", KIND_BF16, HIDDEN, 0);
    add(l, p, "ffn_norm.weight", KIND_BF16, HIDDEN, 0);
    for (int s = 0; s < 2; s++) {
        const char *sub = s ? "ffn" : "attn";
        snprintf(rest, sizeof rest, "hc_%s_fn", sub);
        add(l, p, rest, KIND_F32, mix, HC * HIDDEN);
        snprintf(rest, sizeof rest, "hc_%s_base", sub);
        add(l, p, rest, KIND_F32, mix, 0);
        snprintf(rest, sizeof rest, "hc_%s_scale", sub);
        add(l, p, rest, KIND_F32, 3, 0);
    }
    add_attention(l, m, p, ratio);
    add(l, p, "ffn.gate.weight", KIND_BF16, EXPERTS, HIDDEN);
    if (hashed)
        add(l, p, "ffn.gate.tid2eid", KIND_I64, VOCAB, TOP_K);
    else
        add(l, p, "ffn.gate.bias", KIND_F32, EXPERTS, 0);
    for (int e = 0; e <= EXPERTS; e++) /* the last round is the shared expert */
        for (int w = 0; w < 3; w++) {
            if (e < EXPERTS)
                snprintf(rest, sizeof rest, "ffn.experts.%d.%s.weight", e, expert_part[w]);
            else
                snprintf(rest, sizeof rest, "ffn.shared_experts.%s.weight", expert_part[w]);
            add(l, p, rest, e < EXPERTS ? KIND_FP4 : KIND_FP8, w == 1 ? HIDDEN : WIDTH, w == 1 ? WIDTH : HIDDEN);
        }
}

static void list_tensors(tensor_list *l, const model *m)
{
    char p[32];
    add(l, "", "embed.weight", KIND_BF16, VOCAB, HIDDEN);
    add(l, "", "head.weight", KIND_BF16, VOCAB, HIDDEN);
    add_head(l, "");
    for (int i = 0; i < m->layers; i++) {
        snprintf(p, sizeof p, "layers.%d.", i);
        add_block(l, m, p, ratios[m->skipped + i], i < m->hash_layers);
    }
    for (int s = 0; s < STAGES; s++) {
        snprintf(p, sizeof p, "mtp.%d.", s);
        add_block(l, m, p, 0, 0);
        if (s == 0) {
            add(l, p, "main_proj.weight", KIND_FP8, HIDDEN, TAPS * HIDDEN);
            add(l, p, "main_norm.weight", KIND_BF16, HIDDEN, 0);
        }
        if (s == STAGES - 1) {
            add_head(l, p);
            add(l, p, "markov_head.markov_w1.weight", KIND_BF16, VOCAB, MARKOV_RANK);
            add(l, p, "markov_head.markov_w2.weight", KIND_BF16, VOCAB, MARKOV_RANK);
            add(l, p, "confidence_head.proj.weight", KIND_BF16, 1, HIDDEN + MARKOV_RANK);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- files */

static FILE *open_in(const char *dir, const char *file)
{
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = n > 0 && (size_t)n < sizeof path ? fopen(path, "wb") : NULL;
    if (f == NULL) fprintf(stderr, "parity model: cannot write %s/%s: %s\n", dir, file, strerror(errno));
    return f;
}

static int close_file(FILE *f)
{
    int bad = ferror(f);
    bad |= fclose(f);
    if (bad) fprintf(stderr, "parity model: write error\n");
    return bad ? -1 : 0;
}

static void shard_file(char *out, size_t size, int shard)
{
    snprintf(out, size, "model-%05d-of-%05d.safetensors", shard + 1, SHARDS);
}

typedef struct {
    char *p;
    size_t n, cap;
    int failed;
} text;

__attribute__((format(printf, 2, 3))) static void text_add(text *t, const char *format, ...)
{
    char piece[256];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof piece) {
        t->failed = 1;
        return;
    }
    if (t->n + (size_t)n > t->cap) {
        size_t cap = 2 * t->cap + sizeof piece;
        char *p = realloc(t->p, cap);
        if (p == NULL) {
            t->failed = 1;
            return;
        }
        t->p = p;
        t->cap = cap;
    }
    memcpy(t->p + t->n, piece, (size_t)n);
    t->n += (size_t)n;
}

static int write_data(FILE *f, const model *m, const tensor *t)
{
    char key[32];
    unsigned char *data = malloc(t->bytes);
    if (data == NULL) return -1;
    snprintf(key, sizeof key, "%s/", m->key);
    uint64_t start = fnv1a64(key, t->name);
    if (t->type == T_I64)
        fill_hash_table(t, start, data);
    else if (t->type == T_F32 || t->type == T_BF16)
        fill_floats(t, start, data);
    else
        fill_bytes(t, start, data);
    size_t done = fwrite(data, 1, t->bytes, f);
    free(data);
    return done == t->bytes ? 0 : -1;
}

/* Wider items first, so that every tensor is aligned to its item size. */
static int write_shard(const model *m, const tensor_list *l, int shard, const char *dir)
{
    static const size_t sizes[] = {8, 4, 2, 1};
    char file[64];
    text h = {0};
    size_t pos = 0;
    text_add(&h, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t s = 0; s < 4; s++)
        for (size_t i = 0; i < l->n; i++) {
            const tensor *t = &l->v[i];
            if (t->shard != shard || dtype_size[t->type] != sizes[s]) continue;
            text_add(&h, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu", t->name, dtype_name[t->type], t->shape[0]);
            if (t->rank == 2) text_add(&h, ",%zu", t->shape[1]);
            text_add(&h, "],\"data_offsets\":[%zu,%zu]}", pos, pos + t->bytes);
            pos += t->bytes;
        }
    text_add(&h, "}");
    while (h.n % 8 && !h.failed) text_add(&h, " ");
    shard_file(file, sizeof file, shard);
    FILE *f = h.failed ? NULL : open_in(dir, file);
    if (f == NULL) {
        free(h.p);
        return -1;
    }
    unsigned char length[8];
    put_le(length, h.n, 8);
    int bad = fwrite(length, 1, 8, f) != 8 || fwrite(h.p, 1, h.n, f) != h.n;
    free(h.p);
    for (size_t s = 0; s < 4; s++)
        for (size_t i = 0; i < l->n && !bad; i++)
            if (l->v[i].shard == shard && dtype_size[l->v[i].type] == sizes[s]) bad = write_data(f, m, &l->v[i]);
    return close_file(f) != 0 || bad ? -1 : 0;
}

static int write_index(const tensor_list *l, const char *dir)
{
    FILE *f = open_in(dir, "model.safetensors.index.json");
    if (f == NULL) return -1;
    size_t total = 0;
    for (size_t i = 0; i < l->n; i++) total += l->v[i].bytes;
    fprintf(f, "{\n  \"metadata\": {\n    \"total_size\": %zu\n  },\n  \"weight_map\": {\n", total);
    for (size_t i = 0; i < l->n; i++) {
        char file[64];
        shard_file(file, sizeof file, l->v[i].shard);
        fprintf(f, "    \"%s\": \"%s\"%s\n", l->v[i].name, file, i + 1 < l->n ? "," : "");
    }
    fprintf(f, "  }\n}\n");
    return close_file(f);
}

static void put_ints(FILE *f, const char *name, const int *v, int n)
{
    fprintf(f, "  \"%s\": [\n", name);
    for (int i = 0; i < n; i++) fprintf(f, "    %d%s\n", v[i], i + 1 < n ? "," : "");
    fprintf(f, "  ],\n");
}

static int write_config(const model *m, const char *dir)
{
    FILE *f = open_in(dir, "config.json");
    if (f == NULL) return -1;
    fprintf(f, "{\n  \"architectures\": [\n    \"DeepseekV4ForCausalLM\"\n  ],\n");
    fprintf(f, "  \"model_type\": \"deepseek_v4\",\n  \"torch_dtype\": \"bfloat16\",\n");
    fprintf(f, "  \"vocab_size\": %d,\n  \"hidden_size\": %d,\n  \"num_hidden_layers\": %d,\n", VOCAB, HIDDEN, m->layers);
    fprintf(f, "  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": 1,\n  \"head_dim\": %d,\n", HEADS,
            m->head_dim);
    fprintf(f, "  \"qk_rope_head_dim\": %d,\n  \"q_lora_rank\": %d,\n", m->rope_dim, m->q_rank);
    fprintf(f, "  \"o_groups\": %d,\n  \"o_lora_rank\": %d,\n  \"sliding_window\": %d,\n", GROUPS, m->o_rank,
            m->window);
    int ratio[LAYERS + STAGES] = {0}; /* the draft's are 0 */
    memcpy(ratio, ratios + m->skipped, (size_t)m->layers * sizeof *ratio);
    put_ints(f, "compress_ratios", ratio, m->layers + STAGES);
    fprintf(f, "  \"rope_theta\": 10000,\n  \"compress_rope_theta\": 160000,\n  \"rope_scaling\": {\n");
    fprintf(f, "    \"type\": \"yarn\",\n    \"factor\": 16,\n    \"original_max_position_embeddings\": 64,\n");
    fprintf(f, "    \"beta_fast\": 32,\n    \"beta_slow\": 1\n  },\n  \"max_position_embeddings\": %d,\n",
            m->positions);
    fprintf(f, "  \"index_n_heads\": %d,\n  \"index_head_dim\": %d,\n", m->index_heads, m->index_dim);
    fprintf(f, "  \"index_topk\": %d,\n  \"hc_mult\": %d,\n  \"hc_sinkhorn_iters\": 20,\n", m->top_k, HC);
    fprintf(f, "  \"hc_eps\": 1e-06,\n  \"rms_norm_eps\": 1e-06,\n");
    fprintf(f, "  \"n_routed_experts\": %d,\n  \"num_experts_per_tok\": %d,\n", EXPERTS, TOP_K);
    fprintf(f, "  \"n_shared_experts\": 1,\n  \"moe_intermediate_size\": %d,\n", WIDTH);
    fprintf(f, "  \"scoring_func\": \"sqrtsoftplus\",\n  \"norm_topk_prob\": true,\n");
    fprintf(f, "  \"routed_scaling_factor\": 1.5,\n  \"topk_method\": \"noaux_tc\",\n");
    fprintf(f, "  \"num_hash_layers\": %d,\n  \"swiglu_limit\": %.1f,\n", m->hash_layers, m->swiglu_limit);
    fprintf(f, "  \"hidden_act\": \"silu\",\n  \"expert_dtype\": \"fp4\",\n  \"quantization_config\": {\n");
    fprintf(f, "    \"quant_method\": \"fp8\",\n    \"fmt\": \"e4m3\",\n    \"scale_fmt\": \"ue8m0\",\n");
    fprintf(
        f,
        "    \"activation_scheme\": \"dynamic\",\n    \"weight_block_size\": [\n      128,\n      128\n    ]\n  },\n");
    fprintf(f, "  \"tie_word_embeddings\": false,\n  \"attention_bias\": false,\n  \"attention_dropout\": 0.0,\n");
    fprintf(f, "  \"bos_token_id\": 0,\n  \"eos_token_id\": 1,\n  \"num_nextn_predict_layers\": 1,\n");
    fprintf(f, "  \"dspark_block_size\": %d,\n  \"dspark_noise_token_id\": %d,\n", BLOCK, NOISE_TOKEN);
    put_ints(f, "dspark_target_layer_ids", m->taps, TAPS);
    fprintf(f, "  \"dspark_markov_rank\": %d\n}\n", MARKOV_RANK);
    return close_file(f);
}

int aff_test_write_parity_model(const char *name, const char *dir)
{
    const model *m = NULL;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (strcmp(models[i].name, name) == 0) m = &models[i];
    if (m == NULL) {
        fprintf(stderr, "parity model: no model named %s\n", name);
        return -1;
    }
    if (mkdir(dir, 0777) != 0 && errno != EEXIST) {
        fprintf(stderr, "parity model: cannot create %s: %s\n", dir, strerror(errno));
        return -1;
    }
    tensor_list l = {0};
    list_tensors(&l, m);
    int bad = l.failed;
    for (int s = 0; s < SHARDS && !bad; s++) bad = write_shard(m, &l, s, dir);
    if (!bad) bad = write_index(&l, dir);
    if (!bad) bad = write_config(m, dir);
    free(l.v);
    return bad ? -1 : 0;
}
