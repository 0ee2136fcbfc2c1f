#include "server/ask_internal.h"
#include "base/mem.h"
#include "format/json.h"
#include "text/utf8.h"
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

/* ---- shared ---- */

aff_status ask__bad(aff_ask *a, aff_error *err, const char *param, const char *fmt, ...)
{
    char what[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    snprintf(a->param, sizeof a->param, "%s", param);
    return aff__fail(err, AFF_E_INVALID, "%s: %s", param, what);
}

static const char *kind_of(const json_t *v)
{
    static const char *const names[] = {"an object",     "an array", "a string", "an integer",
                                        "a real number", "true",     "false",    "null"};
    return aff__json_literal(v, &(size_t){0}) ? "a number out of range" : names[json_typeof(v)];
}

json_t *ask__get(const json_t *obj, const char *key)
{
    json_t *v = json_object_get(obj, key);
    return json_is_null(v) ? NULL : v;
}

aff_status ask__ignore(aff_ask *a, const char *name, aff_error *err)
{
    char clean[64];
    size_t n = 0;
    if (a->ignored.n > 1024) return AFF_OK;
    for (; *name && n < sizeof clean - 1; name++) clean[n++] = *name > ' ' && *name < 127 && *name != ',' ? *name : '?';
    clean[n] = 0;
    if (a->ignored.n) AFF_TRY(aff__buf_puts(&a->ignored, ", ", err));
    return aff__buf_puts(&a->ignored, clean, err);
}

aff_status ask__fields(aff_ask *a, const json_t *obj, const aff_field *known, aff_error *err)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)obj, key, v)
    {
        const aff_field *f = known;
        while (f->name && strcmp(f->name, key) != 0) f++;
        if (!f->name)
            AFF_TRY(ask__ignore(a, key, err));
        else if (f->kind == AFF_F_REFUSED && !json_is_null(v) && !json_is_false(v))
            return ask__bad(a, err, key, "not supported by this server; leave it out");
    }
    return AFF_OK;
}

aff_status ask__bool(aff_ask *a, const json_t *obj, const char *key, bool *out, aff_error *err)
{
    const json_t *v = ask__get(obj, key);
    if (!v) return AFF_OK;
    if (!json_is_boolean(v)) return ask__bad(a, err, key, "expected true or false, got %s", kind_of(v));
    *out = json_is_true(v);
    return AFF_OK;
}

aff_status ask__int(aff_ask *a, const json_t *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                    aff_error *err)
{
    const json_t *v = ask__get(obj, key);
    if (!v) return AFF_OK;
    if (json_is_integer(v) && json_integer_value(v) >= min && json_integer_value(v) <= max) {
        *out = json_integer_value(v);
        return AFF_OK;
    }
    if (json_is_integer(v))
        return ask__bad(a, err, key, "expected %" PRId64 " to %" PRId64 ", got %" PRId64, min, max,
                        (int64_t)json_integer_value(v));
    return ask__bad(a, err, key, "expected an integer, got %s", kind_of(v));
}

aff_status ask__num(aff_ask *a, const json_t *obj, const char *key, double min, double max, double *out, aff_error *err)
{
    const json_t *v = ask__get(obj, key);
    if (!v) return AFF_OK;
    if (!json_is_number(v)) return ask__bad(a, err, key, "expected a number, got %s", kind_of(v));
    const double d = json_number_value(v);
    if (!(d >= min && d <= max)) return ask__bad(a, err, key, "expected %g to %g, got %g", min, max, d);
    *out = d;
    return AFF_OK;
}

static aff_status typed(aff_ask *a, const json_t *obj, const char *key, json_type type, json_t **out, aff_error *err)
{
    json_t *v = ask__get(obj, key);
    *out = v;
    if (!v || json_typeof(v) == type) return AFF_OK;
    return ask__bad(a, err, key, "expected %s, got %s", type == JSON_OBJECT ? "an object" : "an array", kind_of(v));
}

aff_status ask__object(aff_ask *a, const json_t *obj, const char *key, json_t **out, aff_error *err)
{
    return typed(a, obj, key, JSON_OBJECT, out, err);
}

aff_status ask__array(aff_ask *a, const json_t *obj, const char *key, json_t **out, aff_error *err)
{
    return typed(a, obj, key, JSON_ARRAY, out, err);
}

aff_status ask__text(aff_ask *a, const json_t *obj, const char *key, const char **out, aff_error *err)
{
    const json_t *v = ask__get(obj, key);
    *out = NULL;
    if (!v) return AFF_OK;
    if (!aff__json_is_text(v)) return ask__bad(a, err, key, "expected a string, got %s", kind_of(v));
    *out = json_string_value(v);
    return AFF_OK;
}

aff_status ask__append(json_t *array, json_t *v, aff_error *err)
{
    return v && json_array_append_new(array, v) == 0 ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "request: out of memory");
}

/* ---- the body ---- */

static aff_status unescaped_key(const char *s, size_t n, char **out, aff_error *err)
{
    json_t *v = NULL;
    AFF_TRY(aff__json_parse(&v, s, n, "key", false, err));
    const aff_status st = aff__strndup(out, json_string_value(v), json_string_length(v), err);
    json_decref(v);
    return st;
}

/* A key twice in the outermost object: which of the two is meant is anybody's guess. `s` is valid JSON. */
static aff_status unique_top(const char *s, size_t n, aff_error *err)
{
    json_t *seen = json_object();
    aff_status st = seen ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    bool key = true;
    int depth = 0;
    for (size_t i = 0; i < n && st == AFF_OK; i++) {
        if (s[i] == '{' || s[i] == '[') depth++;
        if (s[i] == '}' || s[i] == ']') depth--;
        if (s[i] == ',' && depth == 1) key = true;
        if (s[i] != '"') continue;
        const size_t from = i++;
        while (i < n && s[i] != '"') i += s[i] == '\\' ? 2 : 1;
        if (depth != 1 || !key) continue;
        key = false;
        char *name = NULL;
        st = unescaped_key(s + from, i + 1 - from, &name, err);
        if (st == AFF_OK && json_object_get(seen, name))
            st = aff__fail(err, AFF_E_INVALID, "request: key '%.100s' occurs twice", name);
        if (st == AFF_OK && json_object_set_new(seen, name, json_true()) != 0)
            st = aff__fail(err, AFF_E_NOMEM, "request: out of memory");
        free(name);
    }
    json_decref(seen);
    return st;
}

aff_status aff__ask_object(json_t **out, const char *body, size_t n, aff_error *err)
{
    *out = NULL;
    if (!n) return aff__fail(err, AFF_E_INVALID, "request: expected a JSON object, got an empty body");
    aff_status s = aff__json_parse_exact(out, body, n, "request", false, MAX_DEPTH, err);
    if (s == AFF_OK && !json_is_object(*out))
        s = aff__fail(err, AFF_E_INVALID, "request: expected an object, got %s", kind_of(*out));
    if (s == AFF_OK) s = unique_top(body, n, err);
    if (s == AFF_OK) return AFF_OK;
    json_decref(*out);
    *out = NULL;
    return s == AFF_E_NOMEM ? s : AFF_E_INVALID;
}

void aff__ask_free(aff_ask *a)
{
    json_decref(a->messages);
    json_decref(a->tools);
    json_decref(a->effort);
    json_decref(a->schema);
    json_decref(a->root);
    free(a->ids);
    free(a->bias);
    free(a->stop);
    aff__buf_free(&a->ignored);
    const aff_dialect d = a->dialect;
    *a = (aff_ask){.dialect = d};
}

aff_status aff__ask_render(const aff_ask *a, aff_chat_format format, aff_chat_prompt *out, aff_error *err)
{
    const aff_chat_request r = {.format = format,
                                .messages = a->messages,
                                .tools = a->tools,
                                .response_format = a->schema,
                                .effort = a->effort,
                                .thinking = a->thinking,
                                .continue_final = a->continue_final,
                                .replay = a->replay,
                                .replay_ctx = a->replay_ctx};
    return aff__chat_render(out, &r, err);
}

/* ---- sampling ---- */

static aff_status logit_bias(aff_ask *a, int vocab, aff_error *err)
{
    json_t *o, *v;
    const char *key;
    AFF_TRY(ask__object(a, a->root, "logit_bias", &o, err));
    if (json_object_size(o) > AFF_MAX_BIAS)
        return ask__bad(a, err, "logit_bias", "expected at most %d tokens, got %zu", AFF_MAX_BIAS, json_object_size(o));
    AFF_TRY(aff__calloc(&a->bias, json_object_size(o), sizeof *a->bias, "logit bias", err));
    json_object_foreach(o, key, v)
    {
        char *end;
        const long id = strtol(key, &end, 10);
        if (*key < '0' || *key > '9' || *end || id >= vocab)
            return ask__bad(a, err, "logit_bias", "expected token ids below %d as keys, got '%.40s'", vocab, key);
        const double d = json_is_number(v) ? json_number_value(v) : NAN;
        if (!(d >= -100 && d <= 100)) return ask__bad(a, err, "logit_bias", "expected -100 to 100 for token %ld", id);
        a->bias[a->adjust.n_bias++] = (aff_bias){(int32_t)id, (float)d};
    }
    a->adjust.bias = a->bias;
    return AFF_OK;
}

aff_status ask__sampling(aff_ask *a, int vocab, double max_temperature, aff_error *err)
{
    const json_t *o = a->root;
    int64_t seed = -1;
    a->adjust.repetition = 1;
    AFF_TRY(ask__num(a, o, "temperature", 0, max_temperature, &a->sampling.temperature, err));
    AFF_TRY(ask__num(a, o, "top_p", 0, 1, &a->sampling.top_p, err));
    AFF_TRY(ask__int(a, o, "top_k", -1, INT32_MAX, &a->sampling.top_k, err));
    if (a->sampling.top_k < 0) a->sampling.top_k = 0; /* -1: off, as others write it */
    AFF_TRY(ask__num(a, o, "min_p", 0, 1, &a->sampling.min_p, err));
    AFF_TRY(ask__int(a, o, "seed", INT64_MIN, INT64_MAX, &seed, err));
    a->seeded = ask__get(o, "seed") != NULL;
    a->sampling.seed = (uint64_t)seed;
    AFF_TRY(ask__num(a, o, "presence_penalty", -2, 2, &a->adjust.presence, err));
    AFF_TRY(ask__num(a, o, "frequency_penalty", -2, 2, &a->adjust.frequency, err));
    AFF_TRY(ask__num(a, o, "repetition_penalty", 0.01, 100, &a->adjust.repetition, err));
    AFF_TRY(ask__bool(a, o, "ignore_eos", &a->ignore_eos, err));
    AFF_TRY(ask__bool(a, o, "stream", &a->stream, err));
    return logit_bias(a, vocab, err);
}

aff_status ask__stops(aff_ask *a, const char *key, aff_error *err)
{
    json_t *v = ask__get(a->root, key);
    if (!v) return AFF_OK;
    const size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > AFF_MAX_STOPS) return ask__bad(a, err, key, "expected at most %d strings, got %zu", AFF_MAX_STOPS, n);
    AFF_TRY(aff__calloc(&a->stop, n, sizeof *a->stop, "stop strings", err));
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        if (!aff__json_is_text(s))
            return ask__bad(a, err, key, "expected a string or an array of strings, got %s", kind_of(s));
        if (!json_string_length(s)) return ask__bad(a, err, key, "an empty string stops nothing");
        if (json_string_length(s) > AFF_MAX_STOP_BYTES)
            return ask__bad(a, err, key, "expected strings of at most %d bytes", AFF_MAX_STOP_BYTES);
        a->stop[a->n_stop++] = (aff_stop_string){json_string_value(s), json_string_length(s)};
    }
    return AFF_OK;
}

aff_status ask__effort(aff_ask *a, const json_t *effort, const char *param, aff_error *err)
{
    static const char *const names[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra", ""};
    if (!effort || json_is_null(effort)) return AFF_OK;
    bool ok = json_is_integer(effort);
    for (size_t i = 0; i < sizeof names / sizeof *names && json_is_string(effort); i++)
        ok = ok || strcmp(json_string_value(effort), names[i]) == 0;
    if (!ok) return ask__bad(a, err, param, "expected none, minimal, low, medium, high, xhigh, max or ultra");
    json_decref(a->effort);
    a->effort = json_incref((json_t *)(uintptr_t)effort);
    if (json_is_string(effort) && strcmp(json_string_value(effort), "none") == 0) a->thinking = false;
    return AFF_OK;
}

/* ---- chat completions and completions ---- */

/* thinking, in every spelling that clients use; the first that is given counts. */
static aff_status chat_thinking(aff_ask *a, aff_error *err)
{
    json_t *o, *kw;
    const char *mode;
    AFF_TRY(ask__effort(a, ask__get(a->root, "reasoning_effort"), "reasoning_effort", err));
    AFF_TRY(ask__object(a, a->root, "chat_template_kwargs", &kw, err));
    AFF_TRY(ask__effort(a, ask__get(kw, "reasoning_effort"), "chat_template_kwargs.reasoning_effort", err));
    AFF_TRY(ask__object(a, a->root, "reasoning", &o, err));
    AFF_TRY(ask__effort(a, ask__get(o, "effort"), "reasoning.effort", err));
    AFF_TRY(ask__bool(a, kw, "enable_thinking", &a->thinking, err));
    AFF_TRY(ask__bool(a, kw, "thinking", &a->thinking, err));
    AFF_TRY(ask__bool(a, a->root, "enable_thinking", &a->thinking, err));
    AFF_TRY(ask__bool(a, a->root, "think", &a->thinking, err));
    AFF_TRY(ask__text(a, a->root, "thinking_mode", &mode, err));
    if (mode) a->thinking = strcmp(mode, "chat") != 0;
    AFF_TRY(ask__object(a, a->root, "thinking", &o, err));
    AFF_TRY(ask__text(a, o, "type", &mode, err));
    if (o &&
        (!mode || (strcmp(mode, "enabled") != 0 && strcmp(mode, "disabled") != 0 && strcmp(mode, "adaptive") != 0)))
        return ask__bad(a, err, "thinking.type", "expected enabled, disabled or adaptive");
    if (mode) a->thinking = strcmp(mode, "disabled") != 0;
    return AFF_OK;
}

bool ask__is_name(const json_t *v)
{
    return aff__json_is_text(v) && json_string_length(v) && strlen(json_string_value(v)) == json_string_length(v);
}

/* Tools that are no functions are left out and named. */
static aff_status chat_tools(aff_ask *a, aff_error *err)
{
    json_t *list, *v;
    bool hide;
    size_t i;
    AFF_TRY(ask__array(a, a->root, "tools", &list, err));
    AFF_TRY(ask__choice(a, ask__get(a->root, "tool_choice"), &hide, err));
    a->tools = json_array();
    if (!a->tools) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    json_array_foreach(list, i, v)
    {
        char at[48];
        const json_t *type = json_object_get(v, "type"), *f = json_object_get(v, "function");
        snprintf(at, sizeof at, "tools[%zu]", i);
        if (!json_is_object(v)) return ask__bad(a, err, at, "expected an object, got %s", kind_of(v));
        if (json_is_string(type) && strcmp(json_string_value(type), "function") != 0) {
            AFF_TRY(ask__ignore(a, at, err));
            continue;
        }
        if (!f) f = v;
        if (!json_is_object(f) || !ask__is_name(json_object_get(f, "name")))
            return ask__bad(a, err, at, "expected a function with a name (without NUL)");
        if (!hide) AFF_TRY(ask__append(a->tools, json_incref(v), err));
    }
    return AFF_OK;
}

static aff_status common(aff_ask *a, int vocab, aff_error *err)
{
    json_t *o;
    int64_t n = 1, best = 1;
    AFF_TRY(ask__sampling(a, vocab, 2, err));
    AFF_TRY(ask__stops(a, "stop", err));
    AFF_TRY(ask__int(a, a->root, "n", 1, AFF_MAX_CHOICES, &n, err));
    AFF_TRY(ask__int(a, a->root, "best_of", 1, AFF_MAX_CHOICES, &best, err));
    if (ask__get(a->root, "best_of") && best != n) return ask__bad(a, err, "best_of", "expected the same as n");
    a->n = (int)n;
    AFF_TRY(ask__int(a, a->root, "max_tokens", 1, INT64_MAX, &a->max_tokens, err));
    AFF_TRY(ask__int(a, a->root, "max_completion_tokens", 1, INT64_MAX, &a->max_tokens, err));
    AFF_TRY(ask__object(a, a->root, "stream_options", &o, err));
    AFF_TRY(ask__bool(a, o, "include_usage", &a->usage, err));
    return ask__format(a, ask__get(a->root, "response_format"), "response_format", err);
}

static const aff_field chat_fields[] = {{"messages", 0},
                                        {"model", 0},
                                        {"max_tokens", 0},
                                        {"max_completion_tokens", 0},
                                        {"temperature", 0},
                                        {"top_p", 0},
                                        {"top_k", 0},
                                        {"min_p", 0},
                                        {"seed", 0},
                                        {"n", 0},
                                        {"best_of", 0},
                                        {"stream", 0},
                                        {"stream_options", 0},
                                        {"stop", 0},
                                        {"tools", 0},
                                        {"tool_choice", 0},
                                        {"parallel_tool_calls", 0},
                                        {"response_format", 0},
                                        {"reasoning_effort", 0},
                                        {"reasoning", 0},
                                        {"thinking_mode", 0},
                                        {"thinking", 0},
                                        {"think", 0},
                                        {"enable_thinking", 0},
                                        {"chat_template_kwargs", 0},
                                        {"logprobs", 0},
                                        {"top_logprobs", 0},
                                        {"logit_bias", 0},
                                        {"presence_penalty", 0},
                                        {"frequency_penalty", 0},
                                        {"repetition_penalty", 0},
                                        {"ignore_eos", 0},
                                        {"continue_final_message", 0},
                                        {"add_generation_prompt", AFF_F_HARMLESS},
                                        {"user", AFF_F_HARMLESS},
                                        {"metadata", AFF_F_HARMLESS},
                                        {"store", AFF_F_HARMLESS},
                                        {"service_tier", AFF_F_HARMLESS},
                                        {"safety_identifier", AFF_F_HARMLESS},
                                        {"prompt_cache_key", AFF_F_HARMLESS},
                                        {"prompt_cache_retention", AFF_F_HARMLESS},
                                        {"prediction", AFF_F_HARMLESS},
                                        {"modalities", AFF_F_HARMLESS},
                                        {"functions", AFF_F_REFUSED},
                                        {"function_call", AFF_F_REFUSED},
                                        {"audio", AFF_F_REFUSED},
                                        {"web_search_options", AFF_F_REFUSED},
                                        {"grammar", AFF_F_REFUSED},
                                        {"json_schema", AFF_F_REFUSED},
                                        {"guided_json", AFF_F_REFUSED},
                                        {"guided_regex", AFF_F_REFUSED},
                                        {"guided_choice", AFF_F_REFUSED},
                                        {"guided_grammar", AFF_F_REFUSED},
                                        {"structured_outputs", AFF_F_REFUSED},
                                        {"min_tokens", AFF_F_REFUSED},
                                        {"bad_words", AFF_F_REFUSED},
                                        {"allowed_token_ids", AFF_F_REFUSED},
                                        {"stop_token_ids", AFF_F_REFUSED},
                                        {"typical_p", AFF_F_REFUSED},
                                        {"mirostat", AFF_F_REFUSED},
                                        {"length_penalty", AFF_F_REFUSED},
                                        {"use_beam_search", AFF_F_REFUSED},
                                        {"echo", AFF_F_REFUSED},
                                        {"verbosity", AFF_F_REFUSED},
                                        {0}};

static aff_status chat(aff_ask *a, int vocab, aff_error *err)
{
    json_t *list;
    int64_t top = 0;
    bool parallel = true;
    AFF_TRY(ask__fields(a, a->root, chat_fields, err));
    AFF_TRY(ask__array(a, a->root, "messages", &list, err));
    if (!json_array_size(list)) return ask__bad(a, err, "messages", "expected at least one message");
    a->messages = json_incref(list);
    AFF_TRY(common(a, vocab, err));
    AFF_TRY(chat_thinking(a, err));
    AFF_TRY(chat_tools(a, err));
    AFF_TRY(ask__bool(a, a->root, "parallel_tool_calls", &parallel, err));
    a->one_call = !parallel;
    AFF_TRY(ask__bool(a, a->root, "continue_final_message", &a->continue_final, err));
    AFF_TRY(ask__bool(a, a->root, "logprobs", &a->logprobs, err));
    AFF_TRY(ask__int(a, a->root, "top_logprobs", 0, AFF_MAX_TOP_LOGPROBS, &top, err));
    if (top && !a->logprobs) return ask__bad(a, err, "top_logprobs", "expected logprobs to be true with it");
    a->top_logprobs = (int)top;
    return AFF_OK;
}

static aff_status prompt_ids(aff_ask *a, const json_t *list, int vocab, aff_error *err)
{
    if (json_array_size(list) > 1 && !json_is_number(json_array_get(list, 0)))
        return ask__bad(a, err, "prompt", "expected one text or one array of token ids, got an array of %zu; send a request for each", json_array_size(list));
    AFF_TRY(aff__calloc(&a->ids, json_array_size(list), sizeof *a->ids, "prompt", err));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= vocab)
            return ask__bad(a, err, "prompt", "expected token ids below %d, token %zu is none", vocab, i);
        a->ids[a->n_ids++] = (int32_t)json_integer_value(v);
    }
    return AFF_OK;
}

static const aff_field completion_fields[] = {{"prompt", 0},
                                              {"model", 0},
                                              {"max_tokens", 0},
                                              {"max_completion_tokens", 0},
                                              {"temperature", 0},
                                              {"top_p", 0},
                                              {"top_k", 0},
                                              {"min_p", 0},
                                              {"seed", 0},
                                              {"n", 0},
                                              {"best_of", 0},
                                              {"stream", 0},
                                              {"stream_options", 0},
                                              {"stop", 0},
                                              {"response_format", 0},
                                              {"logprobs", 0},
                                              {"logit_bias", 0},
                                              {"presence_penalty", 0},
                                              {"frequency_penalty", 0},
                                              {"repetition_penalty", 0},
                                              {"ignore_eos", 0},
                                              {"echo", 0},
                                              {"user", AFF_F_HARMLESS},
                                              {"metadata", AFF_F_HARMLESS},
                                              {"store", AFF_F_HARMLESS},
                                              {"suffix", AFF_F_REFUSED},
                                              {"grammar", AFF_F_REFUSED},
                                              {"json_schema", AFF_F_REFUSED},
                                              {"guided_json", AFF_F_REFUSED},
                                              {"guided_regex", AFF_F_REFUSED},
                                              {"guided_choice", AFF_F_REFUSED},
                                              {"guided_grammar", AFF_F_REFUSED},
                                              {"structured_outputs", AFF_F_REFUSED},
                                              {"min_tokens", AFF_F_REFUSED},
                                              {"stop_token_ids", AFF_F_REFUSED},
                                              {"typical_p", AFF_F_REFUSED},
                                              {"mirostat", AFF_F_REFUSED},
                                              {0}};

static aff_status completions(aff_ask *a, int vocab, aff_error *err)
{
    int64_t top = -1;
    const json_t *p = ask__get(a->root, "prompt");
    AFF_TRY(ask__fields(a, a->root, completion_fields, err));
    AFF_TRY(common(a, vocab, err));
    AFF_TRY(ask__bool(a, a->root, "echo", &a->echo, err));
    AFF_TRY(ask__int(a, a->root, "logprobs", 0, AFF_MAX_TOP_LOGPROBS, &top, err));
    a->logprobs = top >= 0;
    a->top_logprobs = top > 0 ? (int)top : 0;
    if (a->echo && a->logprobs) return ask__bad(a, err, "echo", "not supported with logprobs");
    if (json_is_array(p) && json_array_size(p) == 1 && !json_is_integer(json_array_get(p, 0))) p = json_array_get(p, 0);
    if (json_is_array(p) && json_array_size(p)) return prompt_ids(a, p, vocab, err);
    if (!p || !aff__json_is_text(p))
        return ask__bad(a, err, "prompt", "expected a string, an array of one string, or an array of token ids");
    a->prompt = json_string_value(p);
    a->n_prompt = json_string_length(p);
    return AFF_OK;
}

aff_status aff__ask_decode(aff_ask *a, aff_dialect dialect, const char *body, size_t n, int vocab, aff_error *err)
{
    const char *model;
    *a = (aff_ask){.dialect = dialect,
                   .thinking = dialect != AFF_MESSAGES && dialect != AFF_COMPLETIONS,
                   .n = 1,
                   .max_tokens = -1};
    aff_sampling_init(&a->sampling);
    a->sampling.temperature = 1;
    a->sampling.top_p = 0.95;
    AFF_TRY(aff__ask_object(&a->root, body, n, err));
    AFF_TRY(ask__text(a, a->root, "model", &model, err));
    switch (dialect) {
    case AFF_CHAT_COMPLETIONS:
        AFF_TRY(chat(a, vocab, err));
        break;
    case AFF_COMPLETIONS:
        AFF_TRY(completions(a, vocab, err));
        break;
    case AFF_MESSAGES:
        AFF_TRY(ask__messages(a, vocab, err));
        break;
    case AFF_RESPONSES:
        AFF_TRY(ask__responses(a, vocab, err));
        break;
    }
    AFF_TRY(ask__form(a, err));
    if (a->thinking && !a->effort && dialect != AFF_COMPLETIONS && !(a->effort = json_string("high")))
        return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    return AFF_OK;
}
