/* The call block of an assistant message (spec text-and-serving 2.2, 8; model-v41 14). */
#include "text/chat_internal.h"
#include "format/json.h"
#include <string.h>

/* Python refuses to read longer integers. */
enum { PYTHON_INT_DIGITS = 4300 };

static bool python_reads(const json_t *v)
{
    size_t n = 0, i;
    const char *s = aff__json_literal(v, &n), *key;
    json_t *x;
    if (s) return n - (*s == '-') <= PYTHON_INT_DIGITS;
    json_object_foreach((json_t *)(uintptr_t)v, key, x)
    {
        if (!python_reads(x)) return false;
    }
    json_array_foreach(v, i, x)
    {
        if (!python_reads(x)) return false;
    }
    return true;
}

/* Reads an argument string as JSON; *out NULL if it is not. */
static aff_status decode(chat *c, json_t **out, const json_t *text)
{
    aff_error e = {0};
    aff_status s =
        aff__json_parse_exact(out, json_string_value(text), json_string_length(text), "arguments", true, 256, &e);
    if (s == AFF_E_NOMEM) return aff__fail(c->err, s, "%s", e.msg);
    if (s == AFF_OK && c->r->reference && !python_reads(*out)) {
        json_decref(*out);
        *out = NULL;
    }
    return AFF_OK;
}

static aff_status parameter(chat *c, bool first, const char *key, const json_t *v)
{
    bool text = aff__json_is_text(v);
    if (!first) AFF_TRY(chat__template(c, "\n"));
    AFF_TRY(chat__template(c, "<｜DSML｜\3 name=\""));
    AFF_TRY(chat__caller(c, key, strlen(key)));
    AFF_TRY(chat__template(c, text ? "\" string=\"true\">" : "\" string=\"false\">"));
    AFF_TRY(text ? chat__caller(c, json_string_value(v), json_string_length(v)) : chat__json(c, v));
    return chat__template(c, "</｜DSML｜\3>");
}

static aff_status parameters(chat *c, const json_t *object)
{
    json_t *o = (json_t *)(uintptr_t)object; /* jansson's iterators take no const */
    bool first = true;
    for (void *it = json_object_iter(o); it; it = json_object_iter_next(o, it)) {
        AFF_TRY(parameter(c, first, json_object_iter_key(it), json_object_iter_value(it)));
        first = false;
    }
    return AFF_OK;
}

/* V4's encoder: a string is read as JSON, an object sent as such is not seen for what it is. */
static aff_status arguments_v4(chat *c, const json_t *v, size_t index)
{
    json_t *decoded = NULL;
    if (!v) return chat__refuse(c, "KeyError", index, "a call without arguments");
    if (aff__json_is_text(v)) AFF_TRY(decode(c, &decoded, v));
    if (!decoded) return parameter(c, true, "arguments", v);
    aff_status s = json_is_object(decoded)
                       ? parameters(c, decoded)
                       : chat__refuse(c, "AttributeError", index, "arguments: JSON, but not an object");
    json_decref(decoded);
    return s;
}

/* V4.1's encoder: objects as they are, strings read as JSON up to twice, anything else as one parameter. */
static aff_status arguments_v41(chat *c, const json_t *v)
{
    json_t *once = NULL, *twice = NULL;
    if ((!v || json_is_null(v)) && !c->r->reference) return AFF_OK;
    if (!v) return chat__refuse(c, "KeyError", 0, "a call without arguments");
    if (json_is_object(v)) return parameters(c, v);
    aff_status s = aff__json_is_text(v) ? decode(c, &once, v) : AFF_OK;
    if (s == AFF_OK && once && aff__json_is_text(once)) s = decode(c, &twice, once);
    if (s == AFF_OK && json_is_object(once))
        s = parameters(c, once);
    else if (s == AFF_OK && json_is_object(twice))
        s = parameters(c, twice);
    else if (s == AFF_OK)
        s = parameter(c, true, "arguments", v);
    json_decref(once);
    json_decref(twice);
    return s;
}

aff_status chat__calls(chat *c, const chat_message *m)
{
    const json_t *calls = json_object_get(m->json, "tool_calls");
    json_t *call;
    size_t i;
    if (!calls || json_is_null(calls)) return AFF_OK;
    if (!json_is_array(calls)) return chat__refuse(c, "TypeError", m->index, "tool_calls: expected an array");
    if (json_array_size(calls) == 0) return AFF_OK;
    AFF_TRY(chat__template(c, "\n\n<｜DSML｜\1>\n"));
    json_array_foreach(calls, i, call)
    {
        const json_t *f = json_object_get(call, "function"), *name = json_object_get(f, "name");
        if (!aff__json_is_text(name))
            return chat__refuse(c, "KeyError", m->index, "tool_calls[%zu]: expected {\"function\": {\"name\": ...}}",
                                i);
        AFF_TRY(chat__template(c, i ? "\n<｜DSML｜\2 name=\"" : "<｜DSML｜\2 name=\""));
        AFF_TRY(chat__caller(c, json_string_value(name), json_string_length(name)));
        AFF_TRY(chat__template(c, "\">\n"));
        const json_t *a = json_object_get(f, "arguments");
        AFF_TRY(c->r->reference && !c->v41 ? arguments_v4(c, a, m->index) : arguments_v41(c, a));
        AFF_TRY(chat__template(c, "\n</｜DSML｜\2>"));
    }
    return chat__template(c, "\n</｜DSML｜\1>");
}
