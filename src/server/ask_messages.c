/* ask_messages.c - /v1/messages to the form of chat completions. */
#include "format/json.h"
#include "server/ask_internal.h"
#include <stdio.h>
#include <string.h>

static bool type_is(const json_t *block, const char *type)
{
    const json_t *t = json_object_get(block, "type");
    return json_is_string(t) && strcmp(json_string_value(t), type) == 0;
}

/* The content of a tool result or of the system field, as a message's: a string or text parts. */
static aff_status content(aff_ask *a, json_t *v, const char *at, json_t **out, aff_error *err)
{
    size_t i;
    json_t *b;
    if (!v || json_is_null(v)) v = NULL;
    if (v && !aff__json_is_text(v) && !json_is_array(v))
        return ask__bad(a, err, at, "expected a string or an array of blocks");
    json_array_foreach(
        v, i,
        b) if (!json_is_object(b) ||
               (type_is(b, "text") &&
                !aff__json_is_text(json_object_get(
                    b, "text")))) return ask__bad(a, err, at,
                                                  "block %zu: expected an object with a type, text blocks with a text",
                                                  i);
    *out = v ? json_incref(v) : json_string("");
    return *out ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "request: out of memory");
}

static aff_status put_text(aff_buf *to, const json_t *v, aff_error *err)
{
    return aff__buf_put(to, json_string_value(v), json_string_length(v), err);
}

/* Flushes the parts of a user's turn gathered so far. */
static aff_status flush_user(aff_ask *a, json_t **parts, aff_error *err)
{
    json_t *p = *parts;
    *parts = NULL;
    return p ? ask__append(a->messages, json_pack("{s:s,s:o}", "role", "user", "content", p), err) : AFF_OK;
}

/* A user's blocks in their order: results become tool messages, the rest user messages. */
static aff_status user_blocks(aff_ask *a, json_t *list, const char *at, json_t **parts, aff_error *err)
{
    size_t i;
    json_t *b;
    json_array_foreach(list, i, b)
    {
        if (!json_is_object(b)) return ask__bad(a, err, at, "block %zu: expected an object", i);
        if (type_is(b, "tool_result")) {
            json_t *c = NULL;
            const json_t *id = json_object_get(b, "tool_use_id");
            if (!aff__json_is_text(id)) return ask__bad(a, err, at, "block %zu: expected a tool_use_id", i);
            AFF_TRY(flush_user(a, parts, err));
            AFF_TRY(content(a, json_object_get(b, "content"), at, &c, err));
            AFF_TRY(ask__append(a->messages,
                                json_pack("{s:s,s:O,s:o}", "role", "tool", "tool_call_id", id, "content", c), err));
            continue;
        }
        if (type_is(b, "text") && !aff__json_is_text(json_object_get(b, "text")))
            return ask__bad(a, err, at, "block %zu: expected a text", i);
        if (!*parts) *parts = json_array();
        if (!*parts) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
        AFF_TRY(ask__append(*parts, json_incref(b), err));
    }
    return AFF_OK;
}

typedef struct turn {
    aff_buf text, thinking;
    json_t *calls;
} turn;

static aff_status assistant_block(aff_ask *a, const json_t *b, const char *at, turn *t, aff_error *err)
{
    const json_t *text = json_object_get(b, "text"), *thinking = json_object_get(b, "thinking");
    if (type_is(b, "text"))
        return aff__json_is_text(text) ? put_text(&t->text, text, err)
                                       : ask__bad(a, err, at, "expected a text in a text block");
    if (type_is(b, "thinking"))
        return aff__json_is_text(thinking) ? put_text(&t->thinking, thinking, err)
                                           : ask__bad(a, err, at, "expected thinking in a thinking block");
    if (!type_is(b, "tool_use")) return json_is_object(b) ? AFF_OK : ask__bad(a, err, at, "expected an object");
    const json_t *id = json_object_get(b, "id"), *name = json_object_get(b, "name"),
                 *input = json_object_get(b, "input");
    if (!aff__json_is_text(id) || !aff__json_is_text(name))
        return ask__bad(a, err, at, "expected id and name in a tool_use block");
    aff_buf args = {0};
    aff_status s = json_is_object(input) ? aff__json_dump_python(&args, input, err) : aff__buf_puts(&args, "{}", err);
    if (s == AFF_OK)
        s = ask__append(t->calls,
                        json_pack("{s:O,s:s,s:{s:O,s:s%}}", "id", id, "type", "function", "function", "name", name,
                                  "arguments", args.s, args.n),
                        err);
    aff__buf_free(&args);
    return s;
}

static aff_status assistant_blocks(aff_ask *a, json_t *list, const char *at, aff_error *err)
{
    turn t = {.calls = json_array()};
    size_t i;
    json_t *b;
    aff_status s = t.calls ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    json_array_foreach(list, i, b) if (s == AFF_OK) s = assistant_block(a, b, at, &t, err);
    if (s == AFF_OK)
        s = ask__append(a->messages,
                        json_pack("{s:s,s:s%,s:s%,s:O}", "role", "assistant", "content", t.text.n ? t.text.s : "",
                                  t.text.n, "reasoning_content", t.thinking.n ? t.thinking.s : "", t.thinking.n,
                                  "tool_calls", t.calls),
                        err);
    json_decref(t.calls);
    aff__buf_free(&t.text);
    aff__buf_free(&t.thinking);
    return s;
}

static aff_status message(aff_ask *a, json_t *m, size_t i, bool last, aff_error *err)
{
    char at[48];
    snprintf(at, sizeof at, "messages[%zu]", i);
    const json_t *role = json_object_get(m, "role");
    json_t *c = json_object_get(m, "content"), *parts = NULL;
    const char *name = json_is_string(role) ? json_string_value(role) : "";
    const bool assistant = strcmp(name, "assistant") == 0;
    if (!assistant && strcmp(name, "user") != 0 && strcmp(name, "system") != 0)
        return ask__bad(a, err, at, "role: expected user, assistant or system");
    if (!aff__json_is_text(c) && !json_is_array(c))
        return ask__bad(a, err, at, "content: expected a string or an array of blocks");
    if (last && assistant) a->continue_final = true; /* the API's prefill */
    if (aff__json_is_text(c)) return ask__append(a->messages, json_pack("{s:O,s:O}", "role", role, "content", c), err);
    if (assistant) return assistant_blocks(a, c, at, err);
    if (strcmp(name, "system") == 0) {
        AFF_TRY(content(a, c, at, &parts, err));
        return ask__append(a->messages, json_pack("{s:s,s:o}", "role", "system", "content", parts), err);
    }
    aff_status s = user_blocks(a, c, at, &parts, err);
    if (s == AFF_OK && json_array_size(c) == 0)
        s = ask__append(a->messages, json_pack("{s:s,s:s}", "role", "user", "content", ""), err);
    if (s == AFF_OK) return flush_user(a, &parts, err);
    json_decref(parts);
    return s;
}

static aff_status tool(aff_ask *a, json_t *v, size_t i, aff_error *err)
{
    char at[48];
    snprintf(at, sizeof at, "tools[%zu]", i);
    const json_t *type = json_object_get(v, "type"), *name = json_object_get(v, "name");
    if (!json_is_object(v)) return ask__bad(a, err, at, "expected an object");
    if (json_is_string(type) && strcmp(json_string_value(type), "custom") != 0) return ask__ignore(a, at, err);
    if (!ask__is_name(name)) return ask__bad(a, err, at, "expected a name (without NUL)");
    json_t *f = json_pack("{s:O}", "name", name), *d = ask__get(v, "description"),
           *schema = ask__get(v, "input_schema");
    if (!f || (d && json_object_set(f, "description", d) != 0) ||
        (schema && json_object_set(f, "parameters", schema) != 0)) {
        json_decref(f);
        return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    }
    return ask__append(a->tools,
                       json_pack("{s:s,s:o,s:b}", "type", "function", "function", f, "strict",
                                 json_is_true(json_object_get(v, "strict"))),
                       err);
}

static aff_status tools(aff_ask *a, aff_error *err)
{
    json_t *list, *choice, *v;
    bool single = false, hide;
    size_t i;
    AFF_TRY(ask__array(a, a->root, "tools", &list, err));
    AFF_TRY(ask__object(a, a->root, "tool_choice", &choice, err));
    AFF_TRY(ask__choice(a, choice, &hide, err));
    AFF_TRY(ask__bool(a, choice, "disable_parallel_tool_use", &single, err));
    a->one_call = single;
    if (!(a->tools = json_array())) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    json_array_foreach(list, i, v) AFF_TRY(tool(a, v, i, err));
    if (hide) json_array_clear(a->tools);
    return AFF_OK;
}

static const aff_field fields[] = {{"messages", 0},
                                   {"model", 0},
                                   {"system", 0},
                                   {"max_tokens", 0},
                                   {"temperature", 0},
                                   {"top_p", 0},
                                   {"top_k", 0},
                                   {"min_p", 0},
                                   {"seed", 0},
                                   {"stream", 0},
                                   {"stop_sequences", 0},
                                   {"tools", 0},
                                   {"tool_choice", 0},
                                   {"thinking", 0},
                                   {"output_config", 0},
                                   {"logit_bias", 0},
                                   {"presence_penalty", 0},
                                   {"frequency_penalty", 0},
                                   {"repetition_penalty", 0},
                                   {"ignore_eos", 0},
                                   {"metadata", AFF_F_HARMLESS},
                                   {"service_tier", AFF_F_HARMLESS},
                                   {"inference_geo", AFF_F_HARMLESS},
                                   {"context_management", AFF_F_HARMLESS},
                                   {"output_format", 0},
                                   {"container", AFF_F_REFUSED},
                                   {"mcp_servers", AFF_F_REFUSED},
                                   {0}};

aff_status ask__messages(aff_ask *a, int vocab, aff_error *err)
{
    json_t *list, *o, *v, *c = NULL;
    const char *type;
    size_t i;
    AFF_TRY(ask__fields(a, a->root, fields, err));
    AFF_TRY(ask__sampling(a, vocab, 2, err));
    AFF_TRY(ask__stops(a, "stop_sequences", err));
    AFF_TRY(ask__int(a, a->root, "max_tokens", 1, INT64_MAX, &a->max_tokens, err));
    AFF_TRY(ask__object(a, a->root, "thinking", &o, err));
    AFF_TRY(ask__text(a, o, "type", &type, err));
    if (o &&
        (!type || (strcmp(type, "enabled") != 0 && strcmp(type, "disabled") != 0 && strcmp(type, "adaptive") != 0)))
        return ask__bad(a, err, "thinking.type", "expected enabled, disabled or adaptive");
    a->thinking = type && strcmp(type, "disabled") != 0;
    AFF_TRY(ask__object(a, a->root, "output_config", &o, err));
    AFF_TRY(ask__effort(a, ask__get(o, "effort"), "output_config.effort", err));
    AFF_TRY(ask__format(a, ask__get(o, "format"), "output_config.format", err));
    AFF_TRY(ask__format(a, ask__get(a->root, "output_format"), "output_format", err));
    AFF_TRY(tools(a, err));
    AFF_TRY(ask__array(a, a->root, "messages", &list, err));
    if (!json_array_size(list)) return ask__bad(a, err, "messages", "expected at least one message");
    if (!(a->messages = json_array())) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    if (ask__get(a->root, "system")) {
        AFF_TRY(content(a, ask__get(a->root, "system"), "system", &c, err));
        AFF_TRY(ask__append(a->messages, json_pack("{s:s,s:o}", "role", "system", "content", c), err));
    }
    json_array_foreach(list, i, v) AFF_TRY(message(a, v, i, i + 1 == json_array_size(list), err));
    return AFF_OK;
}
