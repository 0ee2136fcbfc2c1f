/* Binding of a checkpoint or container: whatever does not fit is refused with a line that names it. */
#include "base/mem.h"
#include "model/net_internal.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include "support/variant.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[] = "/tmp/aff-net-XXXXXX", from[1024];

static void refused(const variant *v, const char *word1, const char *word2)
{
    char dir[64];
    aff_net *n;
    aff_error err = {0};
    const aff_net_options o = {.numerics = AFF_MATH, .draft = true};
    snprintf(dir, sizeof dir, "%s/v", root);
    test_write_variant(from, dir, v);
    if (aff__net_open(&n, dir, &o, &err) == AFF_OK) fail_msg("%s: accepted", v->tensor ? v->tensor : v->config_key);
    if (!strstr(err.msg, word1) || !strstr(err.msg, word2))
        fail_msg("expected '%s' and '%s' in: %s", word1, word2, err.msg);
    assert_null(strchr(err.msg, '\n'));
}

static void test_unchanged(void **state)
{
    char dir[64];
    aff_net *n;
    aff_error err = {0};
    const aff_net_options o = {.draft = true};
    snprintf(dir, sizeof dir, "%s/v", root);
    test_write_variant(from, dir, &(variant){0});
    if (aff__net_open(&n, dir, &o, &err) != AFF_OK) fail_msg("%s", err.msg);
    assert_int_equal(aff__net_stages(n), 3);
    assert_int_equal(aff__net_draft(n), AFF_DRAFT_DSPARK);
    assert_int_equal(aff__net_layers(n), 3);
    aff__net_close(n);
}

static void test_missing(void **state)
{
    /* Every dense tensor and one expert plane of the trunk and of the draft, by the spec's names. */
    static const char *const block[] = {"attn_norm.weight",
                                        "ffn_norm.weight",
                                        "hc_attn_fn",
                                        "hc_attn_base",
                                        "hc_attn_scale",
                                        "hc_ffn_fn",
                                        "hc_ffn_base",
                                        "hc_ffn_scale",
                                        "attn.wq_a.weight",
                                        "attn.wq_a.scale",
                                        "attn.q_norm.weight",
                                        "attn.wq_b.weight",
                                        "attn.wkv.weight",
                                        "attn.kv_norm.weight",
                                        "attn.attn_sink",
                                        "attn.wo_a.weight",
                                        "attn.wo_b.weight",
                                        "attn.wo_b.scale",
                                        "ffn.gate.weight",
                                        "ffn.experts.4.w1.weight",
                                        "ffn.experts.0.w3.scale",
                                        "ffn.experts.2.w2.weight",
                                        "ffn.shared_experts.w1.weight",
                                        "ffn.shared_experts.w2.weight",
                                        "ffn.shared_experts.w3.scale"};
    static const char *const others[] = {"embed.weight",
                                         "head.weight",
                                         "norm.weight",
                                         "hc_head_fn",
                                         "hc_head_base",
                                         "hc_head_scale",
                                         "layers.0.ffn.gate.tid2eid",
                                         "layers.2.ffn.gate.bias",
                                         "layers.1.attn.compressor.ape",
                                         "layers.2.attn.compressor.wkv.weight",
                                         "layers.1.attn.indexer.wq_b.weight",
                                         "layers.1.attn.indexer.weights_proj.weight",
                                         "layers.1.attn.indexer.compressor.norm.weight",
                                         "mtp.0.main_norm.weight",
                                         "mtp.2.norm.weight",
                                         "mtp.2.markov_head.markov_w2.weight",
                                         "mtp.2.confidence_head.proj.weight",
                                         "mtp.2.hc_head_fn",
                                         "mtp.1.ffn.gate.bias"};
    char name[128];
    for (size_t i = 0; i < sizeof block / sizeof *block; i++) {
        snprintf(name, sizeof name, "%s%s", i % 3 == 2 ? "mtp.1." : i % 3 ? "layers.2." : "layers.0.", block[i]);
        if (strcmp(block[i], "attn.wkv.weight") == 0)
            snprintf(name, sizeof name, "layers.1.attn.wkv.weight"); /* of a stage: counts the stages */
        refused(&(variant){.tensor = name, .drop = true}, name, "missing");
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        refused(&(variant){.tensor = others[i], .drop = true}, others[i], "missing");
    /* Without the first stage's rows there is no draft at all; without the second's the last stage's extras are not
     * where they belong. */
    refused(&(variant){.tensor = "mtp.0.attn.wkv.weight", .drop = true}, "no draft", "mtp.0.attn.wkv.weight");
    refused(&(variant){.tensor = "mtp.1.attn.wkv.weight", .drop = true}, "mtp.0.", "missing");
}

static void test_dtype_and_shape(void **state)
{
    static const char *const dtype[][3] = {{"layers.0.attn_norm.weight", "F16", "F16"},
                                           {"layers.1.attn.wq_a.weight", "I8", "I8"},
                                           {"layers.1.attn.wq_a.scale", "U8", "F8_E8M0"},
                                           {"layers.2.ffn.experts.1.w1.weight", "F8_E4M3", "F8_E4M3"},
                                           {"layers.2.ffn.experts.1.w2.scale", "I8", "I8"},
                                           {"layers.0.ffn.gate.tid2eid", "F64", "F64"},
                                           {"embed.weight", "F16", "F16"},
                                           {"layers.2.ffn.gate.bias", "I32", "I32"},
                                           {"mtp.2.markov_head.markov_w1.weight", "F16", "F16"}};
    for (size_t i = 0; i < sizeof dtype / sizeof *dtype; i++)
        refused(&(variant){.tensor = dtype[i][0], .dtype = dtype[i][1]}, dtype[i][0], dtype[i][2]);
    static const char *const shape[] = {"embed.weight",
                                        "layers.1.attn.compressor.ape",
                                        "layers.1.attn.indexer.weights_proj.weight",
                                        "layers.0.attn.attn_sink",
                                        "layers.2.ffn.experts.3.w3.weight",
                                        "layers.0.hc_attn_fn",
                                        "mtp.2.confidence_head.proj.weight",
                                        "layers.0.ffn.gate.tid2eid",
                                        "norm.weight"};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        refused(&(variant){.tensor = shape[i], .flip = true}, shape[i], "shape");
    refused(&(variant){.tensor = "layers.0.attn.wq_b.weight", .flip = true}, "layers.0.attn.wq_b", "expected");
    /* Config and tensors disagree. */
    refused(&(variant){.config_key = "vocab_size", .config_value = "255"}, "embed.weight", "255");
    refused(&(variant){.config_key = "hidden_size", .config_value = "256"}, "shape", "256");
    refused(&(variant){.config_key = "n_routed_experts", .config_value = "6"}, "6", "");
    refused(&(variant){.config_key = "num_hidden_layers", .config_value = "4"}, "layers.3.", "missing");
    refused(&(variant){.config_key = "compress_ratios", .config_value = "[0,4,128,0,0]"}, "compress_ratios",
            "3 draft stages");
    refused(&(variant){.config_key = "compress_ratios", .config_value = "[4,4,128,0,0,0]"}, "layers.0.attn.compressor",
            "missing");
    refused(&(variant){.config_key = "dspark_block_size"}, "dspark_block_size", "draft");
}

static void test_values(void **state)
{
    const uint16_t nan16 = 0x7fc0;
    const uint32_t inf32 = 0x7f800000;
    const int64_t five = 5, minus = -1, big = INT64_C(1) << 40;
    refused(&(variant){.tensor = "layers.1.attn_norm.weight", .patch = &nan16, .patch_size = 2, .patch_at = 6},
            "layers.1.attn_norm.weight", "element 3");
    refused(&(variant){.tensor = "layers.2.ffn.gate.bias", .patch = &inf32, .patch_size = 4, .patch_at = 8},
            "layers.2.ffn.gate.bias", "element 2");
    refused(&(variant){.tensor = "mtp.0.main_norm.weight", .patch = &nan16, .patch_size = 2}, "mtp.0.main_norm.weight",
            "element 0");
    refused(&(variant){.tensor = "layers.0.ffn.gate.tid2eid", .patch = &five, .patch_size = 8, .patch_at = 24 * 7},
            "tid2eid", "token 7");
    refused(
        &(variant){.tensor = "layers.1.ffn.gate.tid2eid", .patch = &minus, .patch_size = 8, .patch_at = 24 * 255 + 16},
        "tid2eid", "token 255");
    refused(&(variant){.tensor = "layers.1.ffn.gate.tid2eid", .patch = &big, .patch_size = 8}, "tid2eid", "token 0");
    const int64_t twice[2] = {2, 2};
    refused(&(variant){.tensor = "layers.0.ffn.gate.tid2eid", .patch = twice, .patch_size = 16, .patch_at = 24 * 9},
            "tid2eid", "token 9");
}

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static void test_companion(void **state)
{
    char ckpt[128], path[128], other[160];
    aff_net *n;
    snprintf(ckpt, sizeof ckpt, "%s/kernel", root);
    assert_int_equal(aff_test_write_parity_model("kernel", ckpt), 0);
    snprintf(path, sizeof path, "%s/good.aff", root);
    test_write_container(ckpt, path, AFF_Q2P875G, 3, 1);
    const aff_net_options o = {.numerics = AFF_FAST, .draft = true};
    must(aff__net_open(&n, path, &o, &err));
    assert_int_equal(aff__net_stages(n), 3);
    aff__net_close(n);
    snprintf(path, sizeof path, "%s/odd.aff", root);
    test_write_container(ckpt, path, AFF_Q2P875G, 3, 2);
    assert_int_not_equal(aff__net_open(&n, path, &o, &err), AFF_OK);
    assert_non_null(strstr(err.msg, "odd.dspark.aff"));
    assert_non_null(strstr(err.msg, "codebook"));
    snprintf(other, sizeof other, "%s/good.dspark.aff", root);
    const aff_net_options p = {.numerics = AFF_FAST, .draft = true, .draft_path = other};
    must(aff__net_open(&n, path, &p, &err)); /* the same codebook, another file name */
    aff__net_close(n);
    /* Without codebooks, and of the same shapes: told by the checkpoint it was made from. */
    snprintf(path, sizeof path, "%s/plain.aff", root);
    test_write_container(ckpt, path, AFF_MXFP4, 3, 2);
    assert_int_equal(aff__net_open(&n, path, &o, &err), AFF_E_FORMAT);
    if (!strstr(err.msg, "plain.dspark.aff: a draft of another model")) fail_msg("%s", err.msg);
    test_write_container(ckpt, path, AFF_MXFP4, 3, 1);
    must(aff__net_open(&n, path, &o, &err));
    aff__net_close(n);
    const aff_net_options lost = {.draft = true, .draft_path = "/nonexistent.aff"};
    assert_int_not_equal(aff__net_open(&n, path, &lost, &err), AFF_OK);
    assert_non_null(strstr(err.msg, "/nonexistent.aff"));
    /* A companion is not a model, a draft taps layers that must be there. */
    assert_int_not_equal(aff__net_open(&n, other, &(aff_net_options){0}, &err), AFF_OK);
    const aff_net_options few = {.draft = true, .max_layers = 5};
    snprintf(path, sizeof path, "%s/good.aff", root);
    assert_int_not_equal(aff__net_open(&n, path, &few, &err), AFF_OK);
    assert_non_null(strstr(err.msg, "taps layer 7"));
}

/* Running out of memory while loading: an error each time, nothing leaks (the sanitizer build looks). */
static void test_no_memory(void **state)
{
    aff_status s = AFF_E_NOMEM;
    unsigned k = 1;
    for (; s != AFF_OK; k += k < 20 ? 1 : k / 4) {
        aff_net *n = NULL;
        const aff_net_options o = {.draft = true};
        aff__alloc_fail_after(k);
        s = aff__net_open(&n, from, &o, &err);
        aff__alloc_fail_after(0);
        if (s == AFF_OK)
            aff__net_close(n);
        else
            assert_int_equal(s, AFF_E_NOMEM);
    }
    assert_true(k > 100);
}

static int make_root(void **state)
{
    snprintf(from, sizeof from, "%s/golden/v4-sim/ckpt-dspark", AFF_TESTS_DIR);
    return mkdtemp(root) ? 0 : -1;
}
static int remove_root(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_unchanged),       cmocka_unit_test(test_missing),
                                       cmocka_unit_test(test_dtype_and_shape), cmocka_unit_test(test_values),
                                       cmocka_unit_test(test_companion),       cmocka_unit_test(test_no_memory)};
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
