/* Calls and their values: the arguments as one JSON object, built as they come. */
#include "text/parse_internal.h"
#include "format/json.h"
#include <string.h>

static aff_status args(aff_parser *p, const char *s)
{
    return parse__put(p, AFF_PARSE_ARGS, s, strlen(s));
}

aff_status parse__begin_call(aff_parser *p, const char *name, size_t n)
{
    const json_t *f = p->declared ? json_object_getn(p->declared, name, n) : NULL,
                 *parameters = json_object_get(f, "parameters"), *required, *key;
    size_t i;
    if (!parameters) parameters = json_object_get(f, "input_schema");
    p->properties = json_object_get(parameters, "properties");
    json_decref(p->missing);
    p->missing = json_object();
    required = json_object_get(parameters, "required");
    json_array_foreach(required, i, key)
    {
        if (aff__json_is_text(key)) (void)json_object_set_new(p->missing, json_string_value(key), json_true());
    }
    p->call = p->n_calls++;
    p->n_params = 0;
    p->wrap = WRAP_NONE;
    p->in_call = true;
    p->junk.n = 0;
    p->state = ARGS;
    return parse__mark(p, AFF_PARSE_CALL, name, n);
}

/* Whether the text is one JSON object or, unless `object`, any JSON value. */
static bool is_json(const aff_buf *b, bool object)
{
    json_t *v = NULL;
    bool ok = b->n && aff__json_parse_exact(&v, b->s, b->n, "value", false, 256, NULL) == AFF_OK;
    if (ok && object) ok = json_is_object(v);
    json_decref(v);
    return ok;
}

static const char wrapped[] = "arguments";
static aff_status release_wrap(aff_parser *p);

static bool wants_string(const json_t *schema)
{
    const json_t *type = json_object_get(schema, "type");
    return !schema || !type || (aff__json_is_text(type) && strcmp(json_string_value(type), "string") == 0);
}

/* `{"KEY": ` or `, "KEY": `, and the quote of a string. */
static aff_status put_key(aff_parser *p, const char *key, size_t n)
{
    aff_buf k = {0};
    aff_status s = aff__json_put_string(&k, key, n, p->err);
    if (s == AFF_OK) s = args(p, p->n_params++ ? ", " : "{");
    if (s == AFF_OK) s = parse__put(p, AFF_PARSE_ARGS, k.s, k.n);
    if (s == AFF_OK) s = args(p, p->string ? ": \"" : ": ");
    aff__buf_free(&k);
    return s;
}

/* A part of a string, escaped. */
static aff_status put_escaped(aff_parser *p, const char *s, size_t n)
{
    aff_buf b = {0};
    aff_status st = aff__json_put_string(&b, s, n, p->err);
    if (st == AFF_OK) st = parse__put(p, AFF_PARSE_ARGS, b.s + 1, b.n - 2);
    aff__buf_free(&b);
    return st;
}

aff_status parse__begin_value(aff_parser *p, const char *key, size_t n, parse_type type)
{
    AFF_TRY(release_wrap(p));
    const json_t *schema = json_object_getn(p->properties, key, n);
    p->string = type == TYPE_STRING || (type == TYPE_UNSAID && wants_string(schema));
    if (json_object_getn(p->missing, key, n)) (void)json_object_deln(p->missing, key, n);
    p->value.n = 0;
    p->state = VALUE;
    if (p->n_params || schema || !p->properties || n != sizeof wrapped - 1 || memcmp(key, wrapped, n) != 0)
        return put_key(p, key, n);
    p->wrap = WRAP_OPEN;
    return AFF_OK;
}

aff_status parse__value(aff_parser *p, const char *s, size_t n)
{
    if (p->wrap == WRAP_OPEN) {
        if (p->value.n + n <= VALUE_LIMIT) return aff__buf_put(&p->value, s, n, p->err);
        p->wrap = WRAP_NONE;
        AFF_TRY(put_key(p, wrapped, sizeof wrapped - 1));
        if (p->string) AFF_TRY(put_escaped(p, p->value.s, p->value.n));
    }
    if (!p->string && p->value.n + n > VALUE_LIMIT) { /* too long to be judged whole */
        p->string = true;
        AFF_TRY(args(p, "\""));
        AFF_TRY(put_escaped(p, p->value.s, p->value.n));
    }
    return p->string ? put_escaped(p, s, n) : aff__buf_put(&p->value, s, n, p->err);
}

static aff_status put_value(aff_parser *p)
{
    bool json = is_json(&p->value, false);
    if (json) return parse__put(p, AFF_PARSE_ARGS, p->value.s, p->value.n);
    AFF_TRY(args(p, "\""));
    AFF_TRY(put_escaped(p, p->value.s, p->value.n));
    return args(p, "\"");
}

aff_status parse__end_value(aff_parser *p)
{
    p->state = ARGS;
    if (p->wrap == WRAP_OPEN) {
        p->wrap = WRAP_HELD;
        return AFF_OK;
    }
    return p->string ? args(p, "\"") : put_value(p);
}

/* The held parameter is one like any other. */
static aff_status release_wrap(aff_parser *p)
{
    if (p->wrap != WRAP_HELD) return AFF_OK;
    p->wrap = WRAP_NONE;
    AFF_TRY(put_key(p, wrapped, sizeof wrapped - 1));
    if (!p->string) return put_value(p);
    AFF_TRY(put_escaped(p, p->value.s, p->value.n));
    return args(p, "\"");
}

bool parse__has_required(const aff_parser *p)
{
    json_t *v = NULL;
    const char *key;
    json_t *x;
    if (p->wrap != WRAP_HELD || aff__json_parse_exact(&v, p->value.s, p->value.n, "value", false, 256, NULL) != AFF_OK)
        return json_object_size(p->missing) == 0;
    bool all = true;
    json_object_foreach(p->missing, key, x) all = all && json_object_get(v, key);
    json_decref(v);
    return all;
}

/* Text between the tags becomes part of the answer, unless the call has no parameters and it is an object of them. */
aff_status parse__end_call(aff_parser *p, bool complete)
{
    bool unwrap = complete && p->wrap == WRAP_HELD && is_json(&p->value, true);
    while (p->junk.n && strchr(" \n\r\t", p->junk.s[p->junk.n - 1])) p->junk.n--;
    if (!unwrap) AFF_TRY(release_wrap(p));
    if (unwrap) {
        AFF_TRY(parse__put(p, AFF_PARSE_ARGS, p->value.s, p->value.n));
    } else if (complete && p->n_params == 0) {
        bool object = is_json(&p->junk, true);
        AFF_TRY(object ? parse__put(p, AFF_PARSE_ARGS, p->junk.s, p->junk.n) : args(p, "{}"));
        if (object) p->junk.n = 0;
    } else if (complete) {
        AFF_TRY(args(p, "}"));
    }
    AFF_TRY(parse__mark(p, complete ? AFF_PARSE_CALL_END : AFF_PARSE_CALL_DROP, NULL, 0));
    p->in_call = false;
    AFF_TRY(parse__put(p, AFF_PARSE_TEXT, p->junk.s, p->junk.n));
    p->junk.n = 0;
    return AFF_OK;
}
