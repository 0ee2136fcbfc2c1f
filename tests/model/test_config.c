/* config.json: what is read, and that every missing or wrong field is named. */
#include "model/config.h"
#include "support/test.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static json_t *base(void)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/golden/v4-sim/ckpt-dspark/config.json", AFF_TESTS_DIR);
    json_t *o = json_load_file(path, 0, NULL);
    assert_non_null(o);
    return o;
}

static aff_status parse(json_t *o, aff_config *c, aff_error *err)
{
    char *text = json_dumps(o, 0);
    const aff_status s = aff__config_parse(c, text, strlen(text), "config.json", err);
    free(text);
    json_decref(o);
    return s;
}

static void test_values(void **state)
{
    aff_config c;
    aff_error err = {0};
    if (parse(base(), &c, &err) != AFF_OK) fail_msg("%s", err.msg);
    /* tests/golden/v4-sim/README.md */
    assert_int_equal(c.hidden, 128);
    assert_int_equal(c.head_dim, 512);
    assert_int_equal(c.rope_dim, 64);
    assert_int_equal(c.heads, 2);
    assert_int_equal(c.o_groups, 2);
    assert_int_equal(c.o_rank, 64);
    assert_int_equal(c.q_rank, 128);
    assert_int_equal(c.layers, 3);
    assert_int_equal(c.n_ratio, 6);
    static const int ratio[] = {0, 4, 128, 0, 0, 0};
    assert_memory_equal(c.ratio, ratio, sizeof ratio);
    assert_int_equal(c.window, 128);
    assert_int_equal(c.index_topk, 24);
    assert_int_equal(c.experts, 5);
    assert_int_equal(c.picks, 3);
    assert_int_equal(c.inter, 128);
    assert_int_equal(c.hash_layers, 2);
    assert_true(c.swiglu_limit == 0.8f);
    assert_int_equal(c.vocab, 256);
    assert_int_equal(c.draft_block, 5);
    assert_int_equal(c.draft_noise, 253);
    assert_int_equal(c.draft_rank, 64);
    assert_int_equal(c.n_taps, 3);
    assert_true(c.yarn);
    assert_int_equal(c.scoring, AFF_SQRTSOFTPLUS);
}

/* The error must name the key. */
static void refused(json_t *o, const char *key, const char *how)
{
    aff_config c;
    aff_error err = {0};
    if (parse(o, &c, &err) == AFF_OK) fail_msg("%s %s was accepted", key, how);
    if (!strstr(err.msg, key)) fail_msg("%s %s: the error does not name it: %s", key, how, err.msg);
    if (!strstr(err.msg, "config.json")) fail_msg("%s %s: the error does not name the file: %s", key, how, err.msg);
    assert_null(strchr(err.msg, '\n'));
}

static void test_missing(void **state)
{
    static const char *const keys[] = {"model_type",
                                       "vocab_size",
                                       "hidden_size",
                                       "num_hidden_layers",
                                       "num_attention_heads",
                                       "head_dim",
                                       "qk_rope_head_dim",
                                       "q_lora_rank",
                                       "o_groups",
                                       "o_lora_rank",
                                       "sliding_window",
                                       "compress_ratios",
                                       "rope_theta",
                                       "compress_rope_theta",
                                       "max_position_embeddings",
                                       "index_n_heads",
                                       "index_head_dim",
                                       "index_topk",
                                       "hc_mult",
                                       "hc_sinkhorn_iters",
                                       "hc_eps",
                                       "rms_norm_eps",
                                       "n_routed_experts",
                                       "num_experts_per_tok",
                                       "n_shared_experts",
                                       "moe_intermediate_size",
                                       "routed_scaling_factor",
                                       "swiglu_limit",
                                       "dspark_noise_token_id",
                                       "dspark_markov_rank",
                                       "dspark_target_layer_ids"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        json_t *o = base();
        if (json_object_del(o, keys[i]) != 0) fail_msg("the base has no %s", keys[i]);
        refused(o, keys[i], "missing");
    }
    static const char *const yarn[] = {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"};
    for (size_t i = 0; i < sizeof yarn / sizeof *yarn; i++) {
        json_t *o = base();
        assert_int_equal(json_object_del(json_object_get(o, "rope_scaling"), yarn[i]), 0);
        refused(o, yarn[i], "missing");
    }
}

static void test_wrong(void **state)
{
    static const char *const bad[][2] = {
        {"model_type", "\"deepseek_v3\""},
        {"model_type", "7"},
        {"vocab_size", "0"},
        {"vocab_size", "\"256\""},
        {"vocab_size", "1.5"},
        {"hidden_size", "-128"},
        {"hidden_size", "4294967424"},
        {"num_hidden_layers", "0"},
        {"num_hidden_layers", "100000"},
        {"num_key_value_heads", "2"},
        {"n_shared_experts", "2"},
        {"qk_rope_head_dim", "63"},
        {"qk_rope_head_dim", "512"},
        {"head_dim", "513"},
        {"o_groups", "3"},
        {"o_lora_rank", "1000000"},
        {"index_head_dim", "96"},
        {"index_head_dim", "16"},
        {"index_head_dim", "2048"},
        {"index_topk", "16777216"},
        {"hc_mult", "9"},
        {"hc_mult", "0"},
        {"hc_eps", "-1"},
        {"rms_norm_eps", "\"x\""},
        {"num_experts_per_tok", "6"},
        {"num_experts_per_tok", "65"},
        {"num_hash_layers", "4"},
        {"scoring_func", "\"tanh\""},
        {"compress_ratios", "[0,4]"},
        {"compress_ratios", "[0,3,128,0,0,0]"},
        {"compress_ratios", "[0,4,128,4,0,0]"},
        {"compress_ratios", "[0,\"4\",128,0,0,0]"},
        {"compress_ratios", "[0,8192,128,0,0,0]"},
        {"compress_ratios", "4"},
        {"rope_theta", "0"},
        {"rope_scaling", "[]"},
        {"rope_scaling", "{\"type\":\"linear\"}"},
        {"compress_rope_theta", "1"},
        {"bos_token_id", "256"},
        {"dspark_block_size", "65"},
        {"dspark_noise_token_id", "256"},
        {"dspark_target_layer_ids", "[]"},
        {"dspark_target_layer_ids", "[0,1,3]"},
        {"dspark_target_layer_ids", "[0,1,1]"},
        {"max_position_embeddings", "0"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *o = base();
        json_object_set_new(o, bad[i][0], json_loads(bad[i][1], JSON_DECODE_ANY, NULL));
        refused(o, bad[i][0], bad[i][1]);
    }
}

static void test_accepted(void **state)
{
    aff_config c;
    aff_error err = {0};
    json_t *o = base(); /* the other spelling of the type; taps in any order; no draft; no scaling */
    json_t *s = json_object_get(o, "rope_scaling");
    json_object_set_new(s, "rope_type", json_string("yarn"));
    json_object_del(s, "type");
    json_object_set_new(o, "dspark_target_layer_ids", json_loads("[2,0,1]", 0, NULL));
    if (parse(o, &c, &err) != AFF_OK) fail_msg("%s", err.msg);
    for (int i = 0; i < 3; i++) assert_int_equal(c.tap[i], i);
    o = base();
    json_object_set_new(o, "rope_scaling", json_null()); /* said, not left out */
    json_object_del(o, "dspark_block_size");
    if (parse(o, &c, &err) != AFF_OK) fail_msg("%s", err.msg);
    assert_false(c.yarn);
    assert_int_equal(c.draft_block, 0);
}

static void test_no_scaling_is_said(void **state)
{
    aff_config c;
    aff_error err = {0};
    json_t *o = base();
    json_object_del(o, "rope_scaling");
    assert_int_equal(parse(o, &c, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "'rope_scaling' is missing"));
}

static void test_not_json(void **state)
{
    aff_config c;
    static const char *const text[] = {"", "[]", "{", "null", "{\"model_type\":"};
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        aff_error err = {0};
        assert_int_not_equal(aff__config_parse(&c, text[i], strlen(text[i]), "config.json", &err), AFF_OK);
        assert_non_null(strstr(err.msg, "config.json"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_values), cmocka_unit_test(test_missing),
                                       cmocka_unit_test(test_wrong), cmocka_unit_test(test_accepted),
                                       cmocka_unit_test(test_no_scaling_is_said), cmocka_unit_test(test_not_json)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
