/* quantize of DeepSeek-V4.1 checkpoints (spec model-v41 2, 3; container 5.3): which tensors go where, FP8 on its own
 * grid and refolded, drafts with experts of their own number, and what is refused. The checkpoint is made here from the
 * spec's list. */
#include "support/test.h"
#include "base/file.h"
#include "format/container.h"
#include "quant/compare.h"
#include "quant/numbers.h"
#include "quant/quant_naive.h"
#include "quant/quantize.h"
#include "quant/refold.h"
#include <glob.h>
#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    H = 128,
    I = 128,
    V = 64,
    HEADS = 2,
    D = 64,
    QR = 128,
    OR = 128,
    IH = 2,
    ID = 64,
    E = 3,
    DE = 2,
    HC = 4,
    ENGRAM = 128
};
enum { LAYERS = 4, STAGES = 2, RANK = 32, TAPS = 2 };

static char tmp[64];

static const char *at(const char *name)
{
    static char path[16][128];
    static int turn;
    turn = (turn + 1) % 16;
    snprintf(path[turn], sizeof path[turn], "%s/%s", tmp, name);
    return path[turn];
}

static const char config[] =
    "{\"model_type\": \"deepseek_v41\", \"text_config\": {\"vocab_size\": 64, \"hidden_size\": 128, "
    "\"moe_intermediate_size\": 128,"
    "\"num_hidden_layers\": 4, \"num_attention_heads\": 2, \"head_dim\": 64, \"q_lora_rank\": 128, \"o_lora_rank\": "
    "128,"
    "\"o_groups\": 1, \"n_routed_experts\": 3, \"num_experts_per_tok\": 2, \"compress_ratios\": [0, 2, 1, 1, 0, 0],"
    "\"kv_source_layer_ids\": [1, 2], \"index_source_layer_ids\": [1, 2, 3], \"engram_layer_ids\": [0], "
    "\"index_n_heads\": 2,"
    "\"index_head_dim\": 64, \"hc_mult\": 4, \"engram_max_ngram_size\": 3, \"engram_n_heads\": 2, \"engram_head_dim\": "
    "32,"
    "\"dspark_n_routed_experts\": 2, \"dspark_markov_rank\": 32, \"dspark_target_layer_ids\": [1, 3]},"
    "\"vision_config\": {\"hidden_size\": 7, \"num_hidden_layers\": 9}}";

/* ---- the checkpoint ---- */

typedef struct writer {
    FILE *data;
    json_t *header;
    uint64_t rng;
    const char *drop; /* leave out the tensor of this name */
} writer;

static void put(writer *w, const char *prefix, const char *name, const char *dtype, uint64_t rows, uint64_t cols)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    if (w->drop && strcmp(full, w->drop) == 0) return;
    const uint64_t size = strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "BF16") == 0 ? 2 : 1;
    const uint64_t n = (rows ? rows : 1) * cols;
    const long from = ftell(w->data);
    for (uint64_t i = 0; i < n; i++) {
        const float f = naive_gauss(&w->rng);
        const uint16_t h = aff__f32_to_bf16(f);
        uint8_t b = (uint8_t)aff__splitmix64(&w->rng);
        if (strcmp(dtype, "F8_E4M3") == 0 && (b & 0x7f) == 0x7f) b ^= 1;
        if (strcmp(dtype, "F8_E8M0") == 0) b = (uint8_t)(b % 11 ? 115 + b % 4 : 115 - b % 20);
        assert_int_equal(fwrite(size == 4 ? (const void *)&f : size == 2 ? (const void *)&h : &b, size, 1, w->data), 1);
    }
    json_t *shape = rows ? json_pack("[I,I]", (json_int_t)rows, (json_int_t)cols) : json_pack("[I]", (json_int_t)cols);
    json_object_set_new(w->header, full,
                        json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtype, "shape", shape, "data_offsets",
                                  (json_int_t)from, (json_int_t)ftell(w->data)));
}

static void put_fp8(writer *w, const char *prefix, const char *name, uint64_t rows, uint64_t cols)
{
    char full[128];
    snprintf(full, sizeof full, "%s.weight", name);
    put(w, prefix, full, "F8_E4M3", rows, cols);
    snprintf(full, sizeof full, "%s.scale", name);
    put(w, prefix, full, "F8_E8M0", rows / 32, cols / 32);
}

static void put_fp4(writer *w, const char *prefix, const char *name, uint64_t rows, uint64_t cols)
{
    char full[128];
    snprintf(full, sizeof full, "%s.weight", name);
    put(w, prefix, full, "I8", rows, cols / 2);
    snprintf(full, sizeof full, "%s.scale", name);
    put(w, prefix, full, "F8_E8M0", rows, cols / 32);
}

static void put_block(writer *w, const char *p, int experts)
{
    char name[64];
    put_fp8(w, p, "attn.wq_a", QR, H);
    put(w, p, "attn.q_norm.weight", "BF16", 0, QR);
    put_fp8(w, p, "attn.wq_b", HEADS * D, QR);
    put_fp8(w, p, "attn.wkv", D, H);
    put(w, p, "attn.kv_norm.weight", "BF16", 0, D);
    put_fp8(w, p, "attn.wo_a", OR, HEADS * D);
    put_fp8(w, p, "attn.wo_b", H, OR);
    put(w, p, "attn.attn_sink", "F32", 0, HEADS);
    put(w, p, "attn_norm.weight", "BF16", 0, H);
    put(w, p, "ffn_norm.weight", "BF16", 0, H);
    put(w, p, "ffn.gate.weight", "BF16", (uint64_t)experts, H);
    put(w, p, "ffn.gate.bias", "F32", 0, (uint64_t)experts);
    put(w, p, "ffn.gate.bias_vl", "F32", 0, (uint64_t)experts);
    put_fp8(w, p, "ffn.shared_experts.w1", I, H);
    put_fp8(w, p, "ffn.shared_experts.w3", I, H);
    put_fp8(w, p, "ffn.shared_experts.w2", H, I);
    for (int e = 0; e < experts; e++)
        for (int k = 1; k <= 3; k++) {
            snprintf(name, sizeof name, "ffn.experts.%d.w%d", e, k);
            put_fp4(w, p, name, k == 2 ? H : I, k == 2 ? I : H);
        }
    for (int k = 0; k < 2; k++) {
        const char *const part[2] = {"hc_attn", "hc_ffn"};
        snprintf(name, sizeof name, "%s_fn", part[k]);
        put(w, p, name, "F32", 24, HC * H);
        snprintf(name, sizeof name, "%s_base", part[k]);
        put(w, p, name, "F32", 0, 24);
        snprintf(name, sizeof name, "%s_scale", part[k]);
        put(w, p, name, "F32", 0, 3);
    }
}

static void put_model(writer *w)
{
    put(w, "", "embed.weight", "BF16", V, H);
    put(w, "", "head.weight", "BF16", V, H);
    put(w, "", "norm.weight", "BF16", 0, H);
    put(w, "", "vision.patch.weight", "BF16", 3, 5);
    put(w, "", "aligner.w", "BF16", 0, 5);
    put(w, "", "image_start", "BF16", 0, 5);
    for (int l = 0; l < LAYERS; l++) {
        char p[32];
        snprintf(p, sizeof p, "layers.%d.", l);
        put_block(w, p, E);
        if (l == 1 || l == 2) {
            put(w, p, "attn.compressor.wkv.weight", "BF16", D, H);
            put(w, p, "attn.compressor.norm.weight", "BF16", 0, D);
            if (l == 1) put(w, p, "attn.compressor.wgate.weight", "BF16", D, H);
            put(w, p, "attn.indexer.wk.weight", "BF16", ID, D);
            put(w, p, "attn.indexer.k_norm.weight", "BF16", 0, ID);
        }
        if (l > 0) {
            put_fp8(w, p, "attn.indexer.wq_b", IH * ID, QR);
            put(w, p, "attn.indexer.weights_proj.weight", "BF16", IH, H);
        }
        if (l == 0) {
            put(w, p, "engram.embed.weight", "F8_E4M3", 100, 32);
            put(w, p, "engram.embed.scale", "F8_E8M0", 100, 1);
            put_fp8(w, p, "engram.wkv", (HC + 1) * H, ENGRAM);
            put(w, p, "engram.q_weight", "BF16", HC, H);
            put(w, p, "engram.k_weight", "BF16", HC, H);
        }
    }
}

static void put_draft(writer *w)
{
    for (int s = 0; s < STAGES; s++) {
        char p[32];
        snprintf(p, sizeof p, "mtp.%d.", s);
        put_block(w, p, DE);
    }
    put_fp8(w, "mtp.0.", "main_proj", H, H * TAPS);
    put(w, "mtp.0.", "main_norm.weight", "BF16", 0, H);
    put(w, "mtp.1.", "norm.weight", "BF16", 0, H);
    put(w, "mtp.0.", "markov_head.embed.weight", "BF16", V, RANK); /* not where V4 has it: the owner is looked up */
    put(w, "mtp.1.", "markov_head.head.weight", "BF16", V, RANK);
    put(w, "mtp.1.", "confidence_head.proj.weight", "BF16", 1, H + RANK);
}

/* drop: left out; extra: added, BF16 [5]. */
static void write_checkpoint(const char *drop, const char *extra)
{
    static char bytes[1 << 16];
    writer w = {tmpfile(), json_object(), 5, drop};
    assert_non_null(w.data);
    put_model(&w);
    put_draft(&w);
    if (extra) put(&w, "", extra, "BF16", 0, 5);
    char *text = json_dumps(w.header, JSON_COMPACT);
    const uint64_t n = strlen(text);
    FILE *f = fopen(at("ck/model.safetensors"), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(&n, 8, 1, f), 1);
    assert_int_equal(fwrite(text, 1, n, f), n);
    rewind(w.data);
    for (size_t k; (k = fread(bytes, 1, sizeof bytes, w.data)) > 0;) assert_int_equal(fwrite(bytes, 1, k, f), k);
    assert_int_equal(fclose(f), 0);
    fclose(w.data);
    free(text);
    json_decref(w.header);
    f = fopen(at("ck/config.json"), "wb");
    assert_int_equal(fwrite(config, 1, sizeof config - 1, f), sizeof config - 1);
    assert_int_equal(fclose(f), 0);
}

static int set_up(void **state)
{
    snprintf(tmp, sizeof tmp, "/tmp/aff-v41-XXXXXX");
    if (!mkdtemp(tmp) || mkdir(at("ck"), 0755) != 0) return -1;
    write_checkpoint(NULL, NULL);
    return 0;
}

static int tear_down(void **state)
{
    static const char *const patterns[] = {"ck/*", "*", ""};
    for (int i = 0; i < 3; i++) {
        glob_t g;
        if (glob(at(patterns[i]), 0, NULL, &g) != 0) continue;
        for (size_t k = 0; k < g.gl_pathc; k++) remove(g.gl_pathv[k]);
        globfree(&g);
    }
    return 0;
}

/* ---- tests ---- */

static aff_container *make(aff_quantize_options o)
{
    aff_error err = {0};
    aff_container *c;
    o.src = at("ck");
    o.threads = 2;
    o.out = at("out.aff");
    if (aff__quantize(&o, &err) != AFF_OK) fail_msg("%s", err.msg);
    if (aff__container_open(&c, o.out, &err) != AFF_OK) fail_msg("%s", err.msg);
    if (aff__container_compare(c, o.src, &err) != AFF_OK) fail_msg("%s", err.msg);
    return c;
}

static void expect_names(const aff_container *c, uint64_t from, const char *prefix, const char *const *name)
{
    for (; *name; name++, from++) {
        char want[64];
        snprintf(want, sizeof want, "%s%s", prefix, *name);
        const aff_ctensor *t = aff__container_tensor(c, from);
        assert_non_null(t);
        assert_string_equal(t->name, want);
    }
}

#define BLOCK                                                                                                          \
    "attn_norm", "ffn_norm", "attn_sinks", "attn_q_a", "attn_q_b", "attn_kv", "attn_out_a", "attn_out_b",              \
        "attn_q_norm", "attn_kv_norm", "ffn_gate_inp", "ffn_gate_bias", "ffn_gate_bias_vl", "shexp_gate", "shexp_up",  \
        "shexp_down", "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"

static void order_and_shapes(void **state)
{
    aff_container *c = make((aff_quantize_options){.mxfp4 = true});
    expect_names(c, 0, "", (const char *const[]){"token_embd", "output", "output_norm", NULL});
    expect_names(c, 3, "blk.0.", (const char *const[]){BLOCK, "engram_q", "engram_k", "engram_wkv", NULL});
    expect_names(c, 28, "blk.1.",
                 (const char *const[]){BLOCK, "comp_wkv", "comp_wgate", "comp_norm", "idx_wq_b", "idx_proj", "idx_wk",
                                       "idx_k_norm", NULL});
    expect_names(
        c, 57, "blk.2.",
        (const char *const[]){BLOCK, "comp_wkv", "comp_norm", "idx_wq_b", "idx_proj", "idx_wk", "idx_k_norm", NULL});
    expect_names(c, 85, "blk.3.", (const char *const[]){BLOCK, "idx_wq_b", "idx_proj", NULL});
    assert_int_equal(aff__container_tensors(c), 109);
    assert_int_equal(aff__container_layers(c), LAYERS);
    assert_int_equal(aff__container_layer(c, 0)->n_experts, E);
    const aff_ctensor *wkv = aff__container_find(c, "blk.0.engram_wkv"), *q = aff__container_find(c, "blk.0.engram_q");
    assert_true(wkv->m.rows == (HC + 1) * H && wkv->m.cols == ENGRAM && wkv->m.quant == AFF_FP8_32);
    assert_true(q->m.rows == HC && q->m.cols == H && q->m.quant == AFF_BF16);
    const char *text;
    size_t n;
    aff__container_provenance(c, &text, &n);
    assert_non_null(strstr(text, "\"chat_encoding\":\"v4.1\""));
    aff__container_meta(c, &text, &n);
    assert_int_equal(n, sizeof config - 1);
    assert_memory_equal(text, config, n);
    aff__container_close(c);
}

static void draft(void **state)
{
    aff_container *c = make((aff_quantize_options){.mxfp4 = true, .dspark = true});
    expect_names(c, 0, "",
                 (const char *const[]){"mtp_main_proj", "mtp_main_norm", "mtp_norm", "mtp_markov_w1", "mtp_markov_w2",
                                       "mtp_confidence", NULL});
    expect_names(c, 6, "mtp.0.", (const char *const[]){BLOCK, NULL});
    expect_names(c, 28, "mtp.1.", (const char *const[]){BLOCK, NULL});
    assert_int_equal(aff__container_tensors(c), 50);
    assert_int_equal(aff__container_layers(c), STAGES);
    assert_int_equal(aff__container_layer(c, 0)->n_experts, DE);
    assert_int_equal(aff__container_find(c, "mtp.1.ffn_gate_inp")->m.rows, DE);
    aff__container_close(c);
}

/* The tile's value in the larger scale, rounded by float arithmetic; zeros lose their sign only by rounding. */
static void refolding(void **state)
{
    for (int d = 0; d < 40; d++)
        for (int b = 0; b < 256; b++) {
            const float v = ldexpf(aff__e4m3_to_f32((uint8_t)b), -d);
            uint8_t want = (b & 0x7f) == 0x7f || (b & 0x7f) == 0 || d == 0 ? (uint8_t)b : aff__f32_to_e4m3(v);
            if ((b & 0x7f) && !(want & 0x7f)) want = 0;
            if (aff__refold_code((uint8_t)b, d) != want)
                fail_msg("code %02x by 2^-%d: %02x, expected %02x", b, d, aff__refold_code((uint8_t)b, d), want);
        }
    static uint8_t src[256 * 128], scale[8 * 4], out[256 * 128], tile[2];
    uint64_t rng = 3;
    for (size_t i = 0; i < sizeof src; i++) src[i] = (uint8_t)(aff__splitmix64(&rng) % 127);
    for (size_t i = 0; i < sizeof scale; i++) scale[i] = (uint8_t)(120 + aff__splitmix64(&rng) % 5);
    scale[5] = 130;
    aff__refold_fp8(src, scale, 256, 128, out, tile);
    assert_int_equal(tile[0], 130);
    uint8_t most = 0;
    for (int i = 16; i < 32; i++) most = scale[i] > most ? scale[i] : most;
    assert_int_equal(tile[1], most);
    for (int r = 0; r < 256; r++)
        for (int k = 0; k < 128; k++)
            assert_int_equal(out[r * 128 + k],
                             aff__refold_code(src[r * 128 + k], tile[r / 128] - scale[r / 32 * 4 + k / 32]));
}

static void compatible_form(void **state)
{
    aff_error err = {0};
    aff_quantize_options o = {.src = at("ck"), .out = at("bad.aff"), .compat = true, .threads = 1};
    /* wkv has 64 rows here, half a tile. */
    assert_int_equal(aff__quantize(&o, &err), AFF_E_UNSUPPORTED);
    assert_non_null(
        strstr(err.msg, "layers.0.attn.wkv.weight': 64 x 128: a container holds FP8 matrices of whole 128 x 128"));
}

static void refused(const char *drop, const char *extra, bool dspark, const char *words)
{
    aff_error err = {0};
    write_checkpoint(drop, extra);
    aff_quantize_options o = {.src = at("ck"), .out = at("bad.aff"), .mxfp4 = true, .dspark = dspark};
    assert_int_not_equal(aff__quantize(&o, &err), AFF_OK);
    if (!strstr(err.msg, words)) fail_msg("'%s' does not say '%s'", err.msg, words);
    assert_int_not_equal(access(at("bad.aff"), F_OK), 0);
}

static void bad_checkpoints(void **state)
{
    refused("layers.2.ffn.gate.bias_vl", NULL, false, "tensor 'layers.2.ffn.gate.bias_vl' is missing");
    refused("layers.1.attn.compressor.wgate.weight", NULL, false, "compressor.wgate.weight' is missing");
    refused("layers.0.engram.wkv.scale", NULL, false, "tensor 'layers.0.engram.wkv.scale' is missing");
    refused("layers.3.attn.indexer.wq_b.weight", NULL, false, "attn.indexer.wq_b.weight' is missing");
    refused("mtp.1.markov_head.head.weight", NULL, true, "markov_head.head.weight' is missing");
    refused(NULL, "layers.2.attn.compressor.wgate.weight", false, "has no place"); /* ratio 1 has no gate */
    refused(NULL, "layers.0.attn.indexer.wk.weight", false, "has no place");
    refused(NULL, "hc_head_fn", false, "tensor 'hc_head_fn' (BF16) has no place");
    refused(NULL, "mtp.0.hc_head_fn", true, "tensor 'mtp.0.hc_head_fn' (BF16) has no place");
    write_checkpoint(NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_and_shapes), cmocka_unit_test(draft),           cmocka_unit_test(refolding),
        cmocka_unit_test(compatible_form),  cmocka_unit_test(bad_checkpoints),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
