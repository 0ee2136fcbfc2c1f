/* config.json for the quantiser's plan. */
#include "base/file.h"
#include "base/mem.h"
#include "format/json.h"
#include "quant/quantize_plan.h"
#include <string.h>

static aff_status read_ratios(aff_qplan *p, const json_t *config, const char *name, aff_error *err)
{
    const json_t *a = json_object_get(config, "compress_ratios");
    if (!json_is_array(a)) return aff__fail(err, AFF_E_FORMAT, "%s: key 'compress_ratios': expected an array", name);
    p->n_ratios = json_array_size(a);
    AFF_TRY(aff__calloc(&p->ratios, p->n_ratios, sizeof *p->ratios, name, err));
    for (uint64_t i = 0; i < p->n_ratios; i++) {
        const json_t *r = json_array_get(a, i);
        p->ratios[i] = json_integer_value(r);
        if (!json_is_integer(r) || p->ratios[i] < 0 || (p->ratios[i] == 1 && !p->v41) || p->ratios[i] > 1 << 16 ||
            (p->ratios[i] & (p->ratios[i] - 1)))
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: key 'compress_ratios': entry %llu is neither 0 nor a power of two%s", name,
                             (unsigned long long)i, p->v41 ? "" : " from 2 on");
    }
    return AFF_OK;
}

static aff_status read_taps(aff_qplan *p, const json_t *config, const char *name, aff_error *err)
{
    const json_t *a = json_object_get(config, "dspark_target_layer_ids");
    if (!json_is_array(a) || !json_array_size(a))
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: key 'dspark_target_layer_ids': expected an array of layers for --dspark", name);
    p->taps = (int64_t)json_array_size(a);
    for (int64_t i = 0; i < p->taps; i++) {
        const json_t *v = json_array_get(a, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= p->layers_in_config)
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: key 'dspark_target_layer_ids': entry %lld is not a layer below %lld", name,
                             (long long)i, (long long)p->layers_in_config);
    }
    return aff__json_int(config, name, "dspark_markov_rank", 1, 1 << 20, &p->markov_rank, err);
}

/* Layers that a list names get the role. */
static aff_status read_roles(aff_qplan *p, const json_t *config, const char *name, const char *key, uint8_t role,
                             aff_error *err)
{
    const json_t *a = json_object_get(config, key);
    if (!json_is_array(a)) return aff__fail(err, AFF_E_FORMAT, "%s: key '%s': expected an array of layers", name, key);
    for (size_t i = 0; i < json_array_size(a); i++) {
        const json_t *v = json_array_get(a, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= p->layers_in_config)
            return aff__fail(err, AFF_E_FORMAT, "%s: key '%s': entry %zu is not a layer below %lld", name, key, i,
                             (long long)p->layers_in_config);
        p->roles[json_integer_value(v)] |= role;
    }
    return AFF_OK;
}

/* What V4.1 has besides (spec model-v41 2). */
static aff_status read_v41(aff_qplan *p, const json_t *config, const char *name, bool dspark, aff_error *err)
{
    int64_t ngram, heads, dim;
    AFF_TRY(aff__calloc(&p->roles, (uint64_t)p->layers_in_config, 1, name, err));
    AFF_TRY(read_roles(p, config, name, "kv_source_layer_ids", AFF_Q_KV, err));
    AFF_TRY(read_roles(p, config, name, "index_source_layer_ids", AFF_Q_INDEX, err));
    AFF_TRY(read_roles(p, config, name, "engram_layer_ids", AFF_Q_ENGRAM, err));
    AFF_TRY(aff__json_int(config, name, "engram_max_ngram_size", 2, 64, &ngram, err));
    AFF_TRY(aff__json_int(config, name, "engram_n_heads", 1, 1 << 10, &heads, err));
    AFF_TRY(aff__json_int(config, name, "engram_head_dim", 1, 1 << 14, &dim, err));
    p->engram = (ngram - 1) * heads * dim;
    return dspark ? aff__json_int(config, name, "dspark_n_routed_experts", 1, 1 << 16, &p->experts, err) : AFF_OK;
}

static aff_status read_fields(aff_qplan *p, const json_t *config, const char *name, bool dspark, aff_error *err)
{
    const struct {
        const char *key;
        int64_t *to, most;
    } fields[] = {
        {"vocab_size", &p->vocab, 1 << 24},
        {"hidden_size", &p->hidden, 1 << 20},
        {"num_hidden_layers", &p->layers_in_config, 1 << 12},
        {"num_attention_heads", &p->heads, 1 << 12},
        {"head_dim", &p->head_dim, 1 << 14},
        {"q_lora_rank", &p->q_rank, 1 << 20},
        {"o_groups", &p->o_groups, 1 << 12},
        {"o_lora_rank", &p->o_rank, 1 << 20},
        {"index_n_heads", &p->index_heads, 1 << 12},
        {"index_head_dim", &p->index_dim, 1 << 14},
        {"n_routed_experts", &p->experts, 1 << 16},
        {"num_experts_per_tok", &p->top_k, 1 << 10},
        {"moe_intermediate_size", &p->inter, 1 << 20},
        {"hc_mult", &p->hc, 64},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        AFF_TRY(aff__json_int(config, name, fields[i].key, 1, fields[i].most, fields[i].to, err));
    p->hash_layers = p->v41 ? 0 : 3;
    AFF_TRY(aff__json_int_opt(config, name, "num_hash_layers", 0, 1 << 12, &p->hash_layers, err));
    int64_t shared = 1;
    AFF_TRY(aff__json_int_opt(config, name, "n_shared_experts", 1, 1, &shared, err));
    if (p->heads * p->head_dim % p->o_groups)
        return aff__fail(err, AFF_E_FORMAT, "%s: key 'o_groups': %lld does not divide %lld heads of %lld", name,
                         (long long)p->o_groups, (long long)p->heads, (long long)p->head_dim);
    AFF_TRY(read_ratios(p, config, name, err));
    if (p->v41) AFF_TRY(read_v41(p, config, name, dspark, err));
    return dspark ? read_taps(p, config, name, err) : AFF_OK;
}

/* V4.1 keeps the fields of its text model in an object of their own. */
static aff_status read_model(aff_qplan *p, const json_t *config, const char *name, bool dspark, aff_error *err)
{
    const char *type;
    size_t len;
    if (!json_is_object(config)) return aff__fail(err, AFF_E_FORMAT, "%s: expected a JSON object", name);
    AFF_TRY(aff__json_str(config, name, "model_type", &type, &len, err));
    p->v41 = strcmp(type, "deepseek_v41") == 0;
    if (!p->v41 && strcmp(type, "deepseek_v4") != 0)
        return aff__fail(err, AFF_E_UNSUPPORTED,
                         "%s: key 'model_type': expected 'deepseek_v4' or 'deepseek_v41', got '%s'", name, type);
    const json_t *text = p->v41 ? json_object_get(config, "text_config") : config;
    if (!json_is_object(text)) return aff__fail(err, AFF_E_FORMAT, "%s: key 'text_config': expected an object", name);
    return read_fields(p, text, name, dspark, err);
}

aff_status aff__qplan_config(aff_qplan *p, const aff_quantize_options *o, aff_error *err)
{
    char path[4096];
    json_t *config;
    AFF_TRY(aff__path_join(path, sizeof path, o->src, "config.json", err));
    AFF_TRY(aff__read_file(path, 16 << 20, &p->config, &p->config_size, err));
    AFF_TRY(aff__json_parse(&config, p->config, p->config_size, path, false, err));
    aff_status s = read_model(p, config, path, o->dspark, err);
    json_decref(config);
    return s;
}
