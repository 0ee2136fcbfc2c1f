/* ask_responses.c - /v1/responses to the form of chat completions. */
#include "format/json.h"
#include "server/ask_internal.h"
#include <stdio.h>
#include <string.h>

static bool is(const json_t *v, const char *s)
{
    return json_is_string(v) && strcmp(json_string_value(v), s) == 0;
}

/* The assistant's turn that is being put together: reasoning, text and calls are items of their own here. */
typedef struct turn {
    json_t *message;
    aff_buf text, reasoning;
} turn;

static aff_status flush(aff_ask *a, turn *t, aff_error *err)
{
    if (!t->message) return AFF_OK;
    json_t *m = t->message;
    t->message = NULL;
    json_object_set_new(m, "content", json_stringn(t->text.n ? t->text.s : "", t->text.n));
    if (t->reasoning.n) json_object_set_new(m, "reasoning_content", json_stringn(t->reasoning.s, t->reasoning.n));
    t->text.n = t->reasoning.n = 0;
    return ask__append(a->messages, m, err);
}

static aff_status open_turn(turn *t, aff_error *err)
{
    if (!t->message) t->message = json_pack("{s:s,s:[]}", "role", "assistant", "tool_calls");
    return t->message ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "request: out of memory");
}

static bool has_calls(const turn *t)
{
    return t->message && json_array_size(json_object_get(t->message, "tool_calls"));
}

/* The texts of a list of parts, or a string, appended. */
static aff_status texts(aff_ask *a, const json_t *v, const char *at, aff_buf *to, aff_error *err)
{
    if (aff__json_is_text(v)) return aff__buf_put(to, json_string_value(v), json_string_length(v), err);
    if (v && !json_is_array(v) && !json_is_null(v))
        return ask__bad(a, err, at, "expected a string or an array of parts");
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *p = json_array_get(v, i), *text = json_object_get(p, "text"),
                     *refusal = json_object_get(p, "refusal");
        if (!json_is_object(p)) return ask__bad(a, err, at, "part %zu: expected an object", i);
        if (!text) text = refusal;
        if (text && !aff__json_is_text(text)) return ask__bad(a, err, at, "part %zu: expected a text", i);
        if (text)
            AFF_TRY(aff__buf_put(to, json_string_value(text), json_string_length(text), err));
        else
            AFF_TRY(aff__buf_puts(to, "[Unsupported part]", err));
    }
    return AFF_OK;
}

static aff_status plain(aff_ask *a, const json_t *role, const json_t *content, const char *at, aff_error *err)
{
    aff_buf b = {0};
    aff_status s = texts(a, content, at, &b, err);
    if (s == AFF_OK)
        s = ask__append(a->messages, json_pack("{s:O,s:s%}", "role", role, "content", b.n ? b.s : "", b.n), err);
    aff__buf_free(&b);
    return s;
}

static aff_status call(aff_ask *a, turn *t, const json_t *v, const char *at, aff_error *err)
{
    const json_t *id = json_object_get(v, "call_id"), *name = json_object_get(v, "name"),
                 *args = json_object_get(v, "arguments");
    if (!aff__json_is_text(id) || !aff__json_is_text(name) || !aff__json_is_text(args))
        return ask__bad(a, err, at, "expected call_id, name and arguments");
    AFF_TRY(open_turn(t, err));
    return ask__append(
        json_object_get(t->message, "tool_calls"),
        json_pack("{s:O,s:s,s:{s:O,s:O}}", "id", id, "type", "function", "function", "name", name, "arguments", args),
        err);
}

static aff_status result(aff_ask *a, turn *t, const json_t *v, const char *at, aff_error *err)
{
    const json_t *id = json_object_get(v, "call_id");
    aff_buf b = {0};
    if (!aff__json_is_text(id)) return ask__bad(a, err, at, "expected a call_id");
    AFF_TRY(flush(a, t, err));
    aff_status s = texts(a, json_object_get(v, "output"), at, &b, err);
    if (s == AFF_OK)
        s = ask__append(a->messages,
                        json_pack("{s:s,s:O,s:s%}", "role", "tool", "tool_call_id", id, "content", b.n ? b.s : "", b.n),
                        err);
    aff__buf_free(&b);
    return s;
}

static aff_status item(aff_ask *a, turn *t, const json_t *v, size_t i, aff_error *err)
{
    char at[48];
    snprintf(at, sizeof at, "input[%zu]", i);
    const json_t *type = json_object_get(v, "type"), *role = json_object_get(v, "role");
    if (!json_is_object(v)) return ask__bad(a, err, at, "expected an object");
    if (is(type, "reasoning")) {
        if (has_calls(t) || t->text.n) AFF_TRY(flush(a, t, err));
        AFF_TRY(open_turn(t, err));
        const json_t *c = ask__get(v, "content");
        return texts(a, c && json_array_size(c) ? c : ask__get(v, "summary"), at, &t->reasoning, err);
    }
    if (is(type, "function_call")) return call(a, t, v, at, err);
    if (is(type, "function_call_output")) return result(a, t, v, at, err);
    if (type && !is(type, "message")) return ask__ignore(a, at, err);
    if (!is(role, "user") && !is(role, "assistant") && !is(role, "system") && !is(role, "developer"))
        return ask__bad(a, err, at, "role: expected user, assistant, system or developer");
    if (is(role, "assistant")) {
        if (has_calls(t)) AFF_TRY(flush(a, t, err));
        AFF_TRY(open_turn(t, err));
        return texts(a, json_object_get(v, "content"), at, &t->text, err);
    }
    AFF_TRY(flush(a, t, err));
    return plain(a, role, json_object_get(v, "content"), at, err);
}

static aff_status input(aff_ask *a, const json_t *v, aff_error *err)
{
    turn t = {0};
    aff_status s = AFF_OK;
    if (aff__json_is_text(v))
        return ask__append(a->messages, json_pack("{s:s,s:O}", "role", "user", "content", v), err);
    if (!json_is_array(v) || !json_array_size(v))
        return ask__bad(a, err, "input", "expected a string or an array of items");
    for (size_t i = 0; i < json_array_size(v) && s == AFF_OK; i++) s = item(a, &t, json_array_get(v, i), i, err);
    if (s == AFF_OK) s = flush(a, &t, err);
    json_decref(t.message);
    aff__buf_free(&t.text);
    aff__buf_free(&t.reasoning);
    return s;
}

static aff_status tools(aff_ask *a, aff_error *err)
{
    json_t *list, *v;
    size_t i;
    bool parallel = true, hide;
    const json_t *choice = ask__get(a->root, "tool_choice");
    AFF_TRY(ask__array(a, a->root, "tools", &list, err));
    AFF_TRY(ask__bool(a, a->root, "parallel_tool_calls", &parallel, err));
    a->one_call = !parallel;
    AFF_TRY(ask__choice(a, choice, &hide, err));
    if (!(a->tools = json_array())) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    json_array_foreach(list, i, v)
    {
        char at[48];
        snprintf(at, sizeof at, "tools[%zu]", i);
        if (!json_is_object(v)) return ask__bad(a, err, at, "expected an object");
        if (!is(json_object_get(v, "type"), "function")) {
            AFF_TRY(ask__ignore(a, at, err));
            continue;
        }
        if (!ask__is_name(json_object_get(v, "name"))) return ask__bad(a, err, at, "expected a name (without NUL)");
        json_t *f = json_copy(v);
        json_object_del(f, "type");
        json_object_del(f, "strict");
        const bool strict = json_is_true(json_object_get(v, "strict"));
        if (!hide)
            AFF_TRY(ask__append(a->tools,
                                json_pack("{s:s,s:o,s:b}", "type", "function", "function", f, "strict", strict), err));
        else
            json_decref(f);
    }
    return AFF_OK;
}

static const aff_field fields[] = {{"input", 0},
                                   {"instructions", 0},
                                   {"model", 0},
                                   {"max_output_tokens", 0},
                                   {"temperature", 0},
                                   {"top_p", 0},
                                   {"top_k", 0},
                                   {"min_p", 0},
                                   {"seed", 0},
                                   {"stream", 0},
                                   {"tools", 0},
                                   {"tool_choice", 0},
                                   {"parallel_tool_calls", 0},
                                   {"reasoning", 0},
                                   {"text", 0},
                                   {"logit_bias", 0},
                                   {"presence_penalty", 0},
                                   {"frequency_penalty", 0},
                                   {"repetition_penalty", 0},
                                   {"ignore_eos", 0},
                                   {"stop", 0},
                                   {"store", AFF_F_HARMLESS},
                                   {"metadata", AFF_F_HARMLESS},
                                   {"user", AFF_F_HARMLESS},
                                   {"include", AFF_F_HARMLESS},
                                   {"service_tier", AFF_F_HARMLESS},
                                   {"prompt_cache_key", AFF_F_HARMLESS},
                                   {"prompt_cache_retention", AFF_F_HARMLESS},
                                   {"safety_identifier", AFF_F_HARMLESS},
                                   {"stream_options", AFF_F_HARMLESS},
                                   {"truncation", AFF_F_HARMLESS},
                                   {"client_metadata", AFF_F_HARMLESS},
                                   {"previous_response_id", AFF_F_REFUSED},
                                   {"conversation", AFF_F_REFUSED},
                                   {"background", AFF_F_REFUSED},
                                   {"prompt", AFF_F_REFUSED},
                                   {"max_tool_calls", AFF_F_REFUSED},
                                   {"top_logprobs", AFF_F_REFUSED},
                                   {0}};

aff_status ask__responses(aff_ask *a, int vocab, aff_error *err)
{
    json_t *o;
    const json_t *truncation = ask__get(a->root, "truncation");
    const char *text;
    AFF_TRY(ask__fields(a, a->root, fields, err));
    AFF_TRY(ask__sampling(a, vocab, 2, err));
    AFF_TRY(ask__stops(a, "stop", err));
    AFF_TRY(ask__int(a, a->root, "max_output_tokens", 1, INT64_MAX, &a->max_tokens, err));
    if (truncation && !is(truncation, "disabled"))
        return ask__bad(a, err, "truncation", "expected disabled: this server shortens no conversation");
    AFF_TRY(ask__object(a, a->root, "reasoning", &o, err));
    AFF_TRY(ask__effort(a, ask__get(o, "effort"), "reasoning.effort", err));
    AFF_TRY(ask__object(a, a->root, "text", &o, err));
    AFF_TRY(ask__format(a, ask__get(o, "format"), "text.format", err));
    AFF_TRY(tools(a, err));
    if (!(a->messages = json_array())) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    AFF_TRY(ask__text(a, a->root, "instructions", &text, err));
    if (text)
        AFF_TRY(ask__append(
            a->messages, json_pack("{s:s,s:O}", "role", "system", "content", json_object_get(a->root, "instructions")),
            err));
    return input(a, ask__get(a->root, "input"), err);
}
