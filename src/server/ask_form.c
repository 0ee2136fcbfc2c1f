/* ask_form.c - what a request says about the form of its answer: response formats, forced calls, strict tools. */
#include "format/json.h"
#include "server/ask_internal.h"
#include <stdio.h>
#include <string.h>

static bool is(const json_t *v, const char *s)
{
    return json_is_string(v) && strcmp(json_string_value(v), s) == 0;
}

aff_status ask__format(aff_ask *a, const json_t *v, const char *param, aff_error *err)
{
    if (!v) return AFF_OK;
    const json_t *type = json_object_get(v, "type"), *inner = json_object_get(v, "json_schema");
    if (!json_is_object(v)) return ask__bad(a, err, param, "expected an object");
    if (is(type, "text")) return AFF_OK;
    if (!is(type, "json_object") && !is(type, "json_schema"))
        return ask__bad(a, err, param, "expected type text, json_object or json_schema");
    if (a->schema) return ask__bad(a, err, param, "the answer's form is given twice");
    json_t *schema = json_object_get(json_is_object(inner) ? inner : v, "schema");
    if (schema && !json_is_object(schema) && !json_is_boolean(schema))
        return ask__bad(a, err, param, "expected a schema that is an object");
    if (!schema && is(type, "json_schema")) return ask__bad(a, err, param, "expected a schema with type json_schema");
    a->schema = schema ? json_incref(schema) : json_pack("{s:s}", "type", "object");
    if (!a->schema) return aff__fail(err, AFF_E_NOMEM, "request: out of memory");
    a->form_param = param;
    return AFF_OK;
}

aff_status ask__choice(aff_ask *a, const json_t *choice, bool *hide, aff_error *err)
{
    /* auto, none, required or any; or an object with one of these as its type, or with the name of a function. */
    const json_t *kind = json_is_object(choice) ? json_object_get(choice, "type") : choice;
    const json_t *f = json_object_get(choice, "function"), *name = json_object_get(f ? f : choice, "name");
    *hide = is(kind, "none");
    if (!choice || *hide || is(kind, "auto")) return AFF_OK;
    if (is(kind, "required") || is(kind, "any")) {
        a->calls = AFF_CALLS_REQUIRED;
        return AFF_OK;
    }
    if ((!is(kind, "function") && !is(kind, "tool")) || !aff__json_is_text(name))
        return ask__bad(a, err, "tool_choice", "expected auto, none, required or the name of a function");
    a->calls = AFF_CALLS_REQUIRED;
    a->only = json_string_value(name);
    return AFF_OK;
}

aff_status ask__form(aff_ask *a, aff_error *err)
{
    const json_t *tool, *f;
    bool found = false, strict = false;
    size_t i;
    json_array_foreach(a->tools, i, tool)
    {
        f = json_object_get(tool, "function");
        if (!f) f = tool;
        strict |= json_is_true(json_object_get(f, "strict")) || json_is_true(json_object_get(tool, "strict"));
        found |= !a->only || is(json_object_get(f, "name"), a->only);
    }
    if (a->calls == AFF_CALLS_NONE && strict) a->calls = AFF_CALLS_FREE;
    if (a->calls == AFF_CALLS_NONE && a->schema && json_array_size(a->tools)) a->calls = AFF_CALLS_FREE;
    if (a->calls == AFF_CALLS_REQUIRED && !found)
        return ask__bad(a, err, "tool_choice", a->only ? "'%.60s' is none of the tools" : "expected tools with it",
                        a->only ? a->only : "");
    if (a->calls == AFF_CALLS_REQUIRED) { /* no answer but calls */
        json_decref(a->schema);
        a->schema = NULL;
    }
    if (a->calls == AFF_CALLS_NONE && !a->schema) return AFF_OK;
    const char *param = a->schema ? a->form_param : a->calls == AFF_CALLS_REQUIRED ? "tool_choice" : "tools";
    if (a->ignore_eos) return ask__bad(a, err, "ignore_eos", "not together with %s", param);
    if (a->continue_final && (a->schema || a->calls == AFF_CALLS_REQUIRED))
        return ask__bad(a, err, param, "not together with an answer that is to be continued");
    a->form_param = a->schema ? param : "tools";
    return AFF_OK;
}
