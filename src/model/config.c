#include "model/config.h"
#include "format/json.h"
#include "quant/numbers.h"
#include <string.h>

/* One required integer into an int field. */
#define INT(key, field, lo, hi)                                                                                        \
    do {                                                                                                               \
        int64_t v_;                                                                                                    \
        AFF_TRY(aff__json_int(o, name, key, lo, hi, &v_, err));                                                        \
        c->field = (int)v_;                                                                                            \
    } while (0)

static aff_status num(const json_t *o, const char *name, const char *key, double lo, double hi, double *out, aff_error *err)
{
    AFF_TRY(aff__json_num(o, name, key, out, err));
    if (!(*out >= lo && *out <= hi))
        return aff__fail(err, AFF_E_FORMAT, "%s: key '%s': expected %g to %g, got %g", name, key, lo, hi, *out);
    return AFF_OK;
}

static aff_status geometry(aff_config *c, const json_t *o, const char *name, aff_error *err)
{
    INT("vocab_size", vocab, 1, 1 << 24);
    INT("hidden_size", hidden, 1, 1 << 20);
    INT("num_hidden_layers", layers, 1, AFF_MAX_LAYERS);
    INT("num_attention_heads", heads, 1, 4096);
    INT("head_dim", head_dim, 2, 1 << 16);
    INT("qk_rope_head_dim", rope_dim, 2, 1 << 16);
    INT("q_lora_rank", q_rank, 1, 1 << 20);
    INT("o_groups", o_groups, 1, 1024);
    INT("o_lora_rank", o_rank, 1, 1 << 16);
    INT("sliding_window", window, 1, 1 << 20);
    INT("index_n_heads", index_heads, 1, 4096);
    INT("index_head_dim", index_dim, 2, 1 << 14);
    INT("index_topk", index_topk, 1, 1 << 16);
    INT("hc_mult", hc, 1, AFF_MAX_HC);
    INT("hc_sinkhorn_iters", hc_iters, 1, 1000);
    INT("n_routed_experts", experts, 1, 1 << 16);
    INT("num_experts_per_tok", picks, 1, 64);
    INT("n_shared_experts", shared_experts, 1, 1);
    INT("moe_intermediate_size", inter, 1, 1 << 20);
    int64_t kv_heads = 1;
    AFF_TRY(aff__json_int_opt(o, name, "num_key_value_heads", 1, 1, &kv_heads, err));
    AFF_TRY(aff__json_int(o, name, "max_position_embeddings", 1, 1 << 24, &c->max_positions, err));
    int64_t hash = 3;
    AFF_TRY(aff__json_int_opt(o, name, "num_hash_layers", 0, AFF_MAX_LAYERS, &hash, err));
    c->hash_layers = (int)hash;
    double v;
    AFF_TRY(num(o, name, "hc_eps", 0, 1, &v, err));
    c->hc_eps = (float)v;
    AFF_TRY(num(o, name, "rms_norm_eps", 0, 1, &v, err));
    c->rms_eps = (float)v;
    AFF_TRY(num(o, name, "routed_scaling_factor", 0, 1e6, &v, err));
    c->routed_scale = (float)v;
    AFF_TRY(num(o, name, "swiglu_limit", -1e30, 1e30, &v, err));
    c->swiglu_limit = (float)v;
    AFF_TRY(num(o, name, "rope_theta", 1, 1e12, &c->rope_theta, err));
    AFF_TRY(num(o, name, "compress_rope_theta", 1, 1e12, &c->compress_rope_theta, err));
    c->bos = 0;
    c->eos = 1;
    AFF_TRY(aff__json_int_opt(o, name, "bos_token_id", 0, c->vocab - 1, &c->bos, err));
    AFF_TRY(aff__json_int_opt(o, name, "eos_token_id", 0, c->vocab - 1, &c->eos, err));
    return AFF_OK;
}

static aff_status ratios(aff_config *c, const json_t *o, const char *name, aff_error *err)
{
    const json_t *a = json_object_get(o, "compress_ratios");
    if (!json_is_array(a)) return aff__fail(err, AFF_E_FORMAT, "%s: key 'compress_ratios': expected an array", name);
    size_t n = json_array_size(a);
    if (n < (size_t)c->layers || n > AFF_MAX_LAYERS + AFF_MAX_STAGES)
        return aff__fail(err, AFF_E_FORMAT, "%s: key 'compress_ratios': expected %d to %d entries (one per layer and draft stage), got %zu",
                         name, c->layers, AFF_MAX_LAYERS + AFF_MAX_STAGES, n);
    for (size_t i = 0; i < n; i++) {
        const json_t *e = json_array_get(a, i);
        json_int_t r = json_is_integer(e) ? json_integer_value(e) : -1;
        if (r != 0 && (r < 2 || r > 4096 || (r & (r - 1))))
            return aff__fail(err, AFF_E_FORMAT, "%s: compress_ratios[%zu]: expected 0 or a power of two from 2 to 4096", name, i);
        if (i >= (size_t)c->layers && r != 0)
            return aff__fail(err, AFF_E_FORMAT, "%s: compress_ratios[%zu]: a draft stage must have ratio 0, got %lld", name, i, (long long)r);
        c->ratio[i] = (int)r;
    }
    c->n_ratio = (int)n;
    return AFF_OK;
}

static aff_status yarn(aff_config *c, const json_t *o, const char *name, aff_error *err)
{
    const json_t *s = json_object_get(o, "rope_scaling");
    if (!s)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: key 'rope_scaling' is missing: expected an object, or null for a model without YaRN (a model trained with it gives wrong text "
                         "without it)",
                         name);
    if (json_is_null(s)) return AFF_OK;
    if (!json_is_object(s)) return aff__fail(err, AFF_E_FORMAT, "%s: key 'rope_scaling': expected an object", name);
    const json_t *t = json_object_get(s, "type");
    if (!t) t = json_object_get(s, "rope_type");
    const char *type = json_string_value(t);
    if (!type || strcmp(type, "yarn") != 0)
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: rope_scaling.type: expected \"yarn\", got %s", name, type ? type : "none");
    AFF_TRY(num(s, name, "factor", 1, 1e6, &c->yarn_factor, err));
    AFF_TRY(num(s, name, "beta_fast", 0, 1e6, &c->yarn_beta_fast, err));
    AFF_TRY(num(s, name, "beta_slow", 0, 1e6, &c->yarn_beta_slow, err));
    AFF_TRY(aff__json_int(s, name, "original_max_position_embeddings", 0, 1 << 24, &c->yarn_original, err));
    c->yarn = c->yarn_original > 0;
    if (c->yarn && !(c->compress_rope_theta > 1 && c->yarn_beta_fast > 0 && c->yarn_beta_slow > 0))
        return aff__fail(err, AFF_E_FORMAT, "%s: rope_scaling: expected compress_rope_theta above 1, beta_fast and beta_slow above 0, got %g, %g, %g", name,
                         c->compress_rope_theta, c->yarn_beta_fast, c->yarn_beta_slow);
    return AFF_OK;
}

static aff_status draft(aff_config *c, const json_t *o, const char *name, aff_error *err)
{
    if (!json_object_get(o, "dspark_block_size")) return AFF_OK;
    INT("dspark_block_size", draft_block, 1, 64);
    INT("dspark_noise_token_id", draft_noise, 0, c->vocab - 1);
    INT("dspark_markov_rank", draft_rank, 1, 1 << 16);
    const json_t *a = json_object_get(o, "dspark_target_layer_ids");
    size_t n = json_array_size(a);
    if (!json_is_array(a) || n < 1 || n > AFF_MAX_TAPS)
        return aff__fail(err, AFF_E_FORMAT, "%s: key 'dspark_target_layer_ids': expected an array of 1 to %d layers", name, AFF_MAX_TAPS);
    for (size_t i = 0; i < n; i++) {
        const json_t *e = json_array_get(a, i);
        json_int_t l = json_is_integer(e) ? json_integer_value(e) : -1;
        if (l < 0 || l >= c->layers)
            return aff__fail(err, AFF_E_FORMAT, "%s: dspark_target_layer_ids[%zu]: expected 0 to %d, got %lld", name, i, c->layers - 1, (long long)l);
        size_t k = i;
        for (; k > 0 && c->tap[k - 1] > (int)l; k--) c->tap[k] = c->tap[k - 1]; /* ascending, whatever the order in the file */
        if (k > 0 && c->tap[k - 1] == (int)l)
            return aff__fail(err, AFF_E_FORMAT, "%s: dspark_target_layer_ids: layer %lld is listed twice", name, (long long)l);
        c->tap[k] = (int)l;
    }
    c->n_taps = (int)n;
    return AFF_OK;
}

static aff_status consistent(const aff_config *c, const char *name, aff_error *err)
{
    if (c->rope_dim >= c->head_dim || c->rope_dim % 2 || c->head_dim % 2)
        return aff__fail(err, AFF_E_FORMAT, "%s: qk_rope_head_dim %d and head_dim %d: expected even numbers, the first smaller", name, c->rope_dim, c->head_dim);
    if (c->rope_dim > c->index_dim || (c->index_dim & (c->index_dim - 1)) || c->index_dim < 32 || c->index_dim > AFF__HADAMARD_MAX)
        return aff__fail(err, AFF_E_FORMAT, "%s: index_head_dim %d: expected a power of two from 32 to %d, at least qk_rope_head_dim %d", name, c->index_dim,
                         AFF__HADAMARD_MAX, c->rope_dim);
    if (c->heads % c->o_groups)
        return aff__fail(err, AFF_E_FORMAT, "%s: num_attention_heads %d is not a multiple of o_groups %d", name, c->heads, c->o_groups);
    if (c->picks > c->experts)
        return aff__fail(err, AFF_E_FORMAT, "%s: num_experts_per_tok %d is more than n_routed_experts %d", name, c->picks, c->experts);
    if (c->hash_layers > c->layers)
        return aff__fail(err, AFF_E_FORMAT, "%s: num_hash_layers %d is more than num_hidden_layers %d", name, c->hash_layers, c->layers);
    return AFF_OK;
}

static aff_status parse(aff_config *c, const json_t *o, const char *name, aff_error *err)
{
    const char *type;
    size_t n;
    if (!json_is_object(o)) return aff__fail(err, AFF_E_FORMAT, "%s: expected a JSON object", name);
    AFF_TRY(aff__json_str(o, name, "model_type", &type, &n, err));
    if (strcmp(type, "deepseek_v4") != 0)
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: model_type: expected \"deepseek_v4\", got \"%s\"", name, type);
    AFF_TRY(geometry(c, o, name, err));
    AFF_TRY(ratios(c, o, name, err));
    AFF_TRY(yarn(c, o, name, err));
    AFF_TRY(draft(c, o, name, err));
    const char *score = "sqrtsoftplus";
    if (json_object_get(o, "scoring_func")) AFF_TRY(aff__json_str(o, name, "scoring_func", &score, &n, err));
    if (strcmp(score, "sqrtsoftplus") == 0)
        c->scoring = AFF_SQRTSOFTPLUS;
    else if (strcmp(score, "sigmoid") == 0)
        c->scoring = AFF_SIGMOID;
    else if (strcmp(score, "softmax") == 0)
        c->scoring = AFF_SOFTMAX;
    else
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: scoring_func: expected sqrtsoftplus, sigmoid or softmax, got \"%s\"", name, score);
    return consistent(c, name, err);
}

aff_status aff__config_parse(aff_config *c, const char *json, size_t size, const char *name, aff_error *err)
{
    json_t *o = NULL;
    memset(c, 0, sizeof *c);
    AFF_TRY(aff__json_parse(&o, json, size, name, false, err));
    aff_status s = parse(c, o, name, err);
    json_decref(o);
    return s;
}
