/* schema.c - keywords, references and combinations to a list of alternatives. */
#include "grammar/schema.h"
#include "base/mem.h"
#include "format/json.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ALTERNATIVES = 256, MOST_DEPTH = 64, MOST_WORK = 100000, MOST_PROPERTIES = 1000, MOST_PREFIX = 100 };

/* ---- errors ---- */

static bool find(const json_t *at, const json_t *what, char *path, size_t n, size_t cap)
{
    const char *key;
    json_t *v;
    size_t i;
    path[n] = 0;
    if (at == what) return true;
    json_object_foreach((json_t *)(uintptr_t)at, key, v)
    {
        size_t m = n;
        if (m + 1 < cap) path[m++] = '/';
        for (const char *k = key; *k && m + 2 < cap; k++) {
            if (*k == '~' || *k == '/') {
                path[m++] = '~';
                path[m++] = *k == '~' ? '0' : '1';
            } else {
                path[m++] = *k;
            }
        }
        if ((json_is_object(v) || json_is_array(v)) && find(v, what, path, m, cap)) return true;
    }
    json_array_foreach(at, i, v)
    {
        if (n + 12 < cap && (json_is_object(v) || json_is_array(v)) &&
            find(v, what, path, n + (size_t)snprintf(path + n, cap - n, "/%zu", i), cap))
            return true;
    }
    path[n] = 0;
    return false;
}

uint32_t schema_bad(schema_set *s, const json_t *schema, const char *keyword, const char *fmt, ...)
{
    char path[256], what[200];
    va_list ap;
    if (s->b->status != AFF_OK) return G_FAIL;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    if (!find(s->root, schema, path, 0, sizeof path)) *path = 0;
    return g_fail(s->b, AFF_E_INVALID, "%s: '%.60s' at #%s: %s", s->name, keyword, path, what);
}

static json_t *keep(schema_set *s, json_t *v)
{
    if (v && json_array_append_new(s->made, v) == 0) return v;
    g_fail(s->b, AFF_E_NOMEM, "schema: out of memory");
    return json_true();
}

/* ---- lists ---- */

void schema_free(flat_list *l)
{
    free(l->f);
    *l = (flat_list){0};
}

static void append(schema_set *s, flat_list *l, const flat *f)
{
    if (s->b->status != AFF_OK) return;
    if (l->n == MOST_ALTERNATIVES) {
        g_fail(s->b, AFF_E_INVALID, "%s: more than %d alternatives in one place: make the schema simpler", s->name,
               MOST_ALTERNATIVES);
        return;
    }
    s->b->status = aff__realloc(&l->f, l->n + 1, sizeof *l->f, "schema", s->b->err);
    if (s->b->status == AFF_OK) l->f[l->n++] = *f;
}

/* ---- both at once ---- */

/* A schema for what both say; either may be NULL: any. */
static json_t *both(schema_set *s, json_t *a, json_t *b)
{
    if (!a || json_is_true(a) || a == b) return b;
    if (!b || json_is_true(b)) return a;
    if (json_is_false(a) || json_is_false(b)) return json_false();
    return keep(s, json_pack("{s:[O,O]}", "allOf", a, b));
}

static json_t *property(const flat *f, const char *key)
{
    json_t *v = json_object_get(f->properties, key);
    return v ? v : f->additional;
}

static void merge_objects(schema_set *s, flat *o, const flat *a, const flat *b)
{
    const char *key;
    json_t *v;
    if (a->properties || b->properties) {
        json_t *p = keep(s, json_object());
        json_object_foreach(a->properties, key, v)
        {
            v = both(s, v, property(b, key));
            json_object_set(p, key, v ? v : json_true());
        }
        json_object_foreach(b->properties, key, v)
        {
            if (json_object_get(p, key)) continue;
            v = both(s, a->additional, v);
            json_object_set(p, key, v ? v : json_true());
        }
        o->properties = p;
    }
    if (a->required && b->required) {
        o->required = keep(s, json_copy(a->required));
        json_object_update(o->required, b->required);
    } else if (b->required) {
        o->required = b->required;
    }
    o->additional = both(s, a->additional, b->additional);
}

static void merge_arrays(schema_set *s, flat *o, const flat *a, const flat *b)
{
    const size_t na = json_array_size(a->prefix), nb = json_array_size(b->prefix), n = na > nb ? na : nb;
    if (n) o->prefix = keep(s, json_array());
    for (size_t i = 0; i < n; i++) {
        json_t *v =
            both(s, i < na ? json_array_get(a->prefix, i) : a->items, i < nb ? json_array_get(b->prefix, i) : b->items);
        json_array_append(o->prefix, v ? v : json_true());
    }
    o->items = both(s, a->items, b->items);
    if (b->min_items > o->min_items) o->min_items = b->min_items;
    if (b->max_items < o->max_items) o->max_items = b->max_items;
}

static void tighten(dec *a, const dec *b, int direction)
{
    const int c = a->given && b->given ? dec_compare(a, b) * direction : 0;
    if (!b->given || c > 0) return;
    const bool exclusive = a->given && c == 0 && a->exclusive;
    *a = *b;
    a->exclusive |= exclusive;
}

/* false: nothing fits both. */
static bool merge(schema_set *s, const json_t *schema, const flat *a, const flat *b, flat *o)
{
    *o = *a;
    o->types &= b->types;
    if (!o->types || s->b->status != AFF_OK) return false;
    if (a->values && b->values) {
        o->values = keep(s, json_array());
        for (size_t i = 0; i < json_array_size(a->values); i++)
            for (size_t k = 0; k < json_array_size(b->values); k++)
                if (json_equal(json_array_get(a->values, i), json_array_get(b->values, k))) {
                    json_array_append(o->values, json_array_get(a->values, i));
                    break;
                }
        if (!json_array_size(o->values)) return false;
    } else if (b->values) {
        o->values = b->values;
    }
    tighten(&o->low, &b->low, 1);
    tighten(&o->high, &b->high, -1);
    if (b->min_length > o->min_length) o->min_length = b->min_length;
    if (b->max_length < o->max_length) o->max_length = b->max_length;
    const bool text_a = a->pattern || a->format, text_b = b->pattern || b->format;
    if (text_b && (o->types & T_STRING)) {
        const bool same = text_a && (!a->pattern || (b->pattern && strcmp(a->pattern, b->pattern) == 0)) &&
                          (a->pattern != NULL) == (b->pattern != NULL) && (a->format != NULL) == (b->format != NULL) &&
                          (!a->format || strcmp(a->format, b->format) == 0);
        if (text_a && !same) {
            schema_bad(s, schema, "pattern", "two patterns or formats for one string cannot be followed at once");
            return false;
        }
        o->pattern = b->pattern;
        o->format = b->format;
    }
    merge_arrays(s, o, a, b);
    merge_objects(s, o, a, b);
    return s->b->status == AFF_OK;
}

/* *list becomes what fits an entry of it and one of `with`. */
static void cross(schema_set *s, const json_t *schema, flat_list *list, const flat_list *with)
{
    flat_list out = {0};
    for (size_t i = 0; i < list->n; i++)
        for (size_t k = 0; k < with->n && s->b->status == AFF_OK; k++) {
            flat f;
            if (++s->work > MOST_WORK) g_fail(s->b, AFF_E_INVALID, "%s: the schema is too complex", s->name);
            if (merge(s, schema, &list->f[i], &with->f[k], &f)) append(s, &out, &f);
        }
    schema_free(list);
    *list = out;
}

/* ---- single keywords ---- */

static unsigned type_bits(const char *t)
{
    static const struct {
        const char *name;
        unsigned bits;
    } names[] = {{"null", T_NULL},     {"boolean", T_BOOL}, {"integer", T_INT},   {"number", T_NUMBER},
                 {"string", T_STRING}, {"array", T_ARRAY},  {"object", T_OBJECT}, {"any", T_ANY}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(t, names[i].name) == 0) return names[i].bits;
    return 0;
}

static void take_type(schema_set *s, const json_t *schema, const json_t *v, flat *f)
{
    unsigned bits = 0;
    const size_t n = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *t = json_is_array(v) ? json_array_get(v, i) : v;
        const unsigned one = aff__json_is_text(t) ? type_bits(json_string_value(t)) : 0;
        if (!one)
            schema_bad(s, schema, "type",
                       "expected null, boolean, integer, number, string, array, object or a list of them");
        bits |= one;
    }
    f->types &= bits;
}

/* Counts that matter are small; what is beyond 2^30 is as good as endless. */
static uint32_t take_count(schema_set *s, const json_t *schema, const char *key, const json_t *v)
{
    size_t n;
    const char *literal = aff__json_literal(v, &n);
    if (literal && *literal != '-' && !memchr(literal, '.', n) && !memchr(literal, 'e', n)) return 1u << 30;
    const double d = json_is_number(v) ? json_number_value(v) : -1;
    if (!(d >= 0) || d != (double)(int64_t)(d < 1e18 ? d : 1e18)) {
        schema_bad(s, schema, key, "expected an integer of 0 or more");
        return 0;
    }
    return d > 1 << 30 ? 1u << 30 : (uint32_t)d;
}

static void take_bound(schema_set *s, const json_t *schema, const char *key, const json_t *v, dec *to, int direction)
{
    dec d = {0};
    if (!dec_read(&d, v)) {
        schema_bad(s, schema, key, "expected a number of at most %d digits", DEC_DIGITS);
        return;
    }
    d.given = true;
    d.exclusive = strncmp(key, "exclusive", 9) == 0;
    tighten(to, &d, direction);
}

static bool is_schema(const json_t *v)
{
    return json_is_object(v) || json_is_boolean(v);
}

static json_t *take_schema(schema_set *s, const json_t *schema, const char *key, json_t *v)
{
    if (is_schema(v)) return v;
    schema_bad(s, schema, key, "expected a schema (an object, true or false)");
    return NULL;
}

static void take_properties(schema_set *s, const json_t *schema, json_t *v, flat *f)
{
    const char *key;
    json_t *p;
    if (!json_is_object(v)) {
        schema_bad(s, schema, "properties", "expected an object");
        return;
    }
    if (json_object_size(v) > MOST_PROPERTIES)
        schema_bad(s, schema, "properties", "expected at most %d, got %zu", MOST_PROPERTIES, json_object_size(v));
    json_object_foreach(v, key, p)
    {
        if (!is_schema(p)) schema_bad(s, v, key, "expected a schema (an object, true or false)");
    }
    f->properties = v;
}

static void take_required(schema_set *s, const json_t *schema, const json_t *v, flat *f)
{
    const json_t *name;
    size_t i;
    f->required = keep(s, json_object());
    if (!json_is_array(v) || json_array_size(v) > MOST_PROPERTIES) {
        if (!json_is_boolean(v))
            schema_bad(s, schema, "required", "expected an array of at most %d names", MOST_PROPERTIES);
        return; /* draft 3 had true or false on the property itself */
    }
    json_array_foreach(v, i, name)
    {
        if (aff__json_is_text(name) && strlen(json_string_value(name)) == json_string_length(name))
            json_object_set_new(f->required, json_string_value(name), json_true());
        else
            schema_bad(s, schema, "required", "expected names");
    }
}

static void take_items(schema_set *s, const json_t *schema, const char *key, json_t *v, flat *f)
{
    json_t *one;
    size_t i;
    if (!json_is_array(v)) {
        f->items = take_schema(s, schema, key, v);
        return;
    }
    if (json_array_size(v) > MOST_PREFIX)
        schema_bad(s, schema, key, "expected at most %d schemas, got %zu", MOST_PREFIX, json_array_size(v));
    json_array_foreach(v, i, one) take_schema(s, schema, key, one);
    f->prefix = v;
}

static void take_format(schema_set *s, const json_t *schema, const json_t *v, flat *f)
{
    if (!aff__json_is_text(v)) {
        schema_bad(s, schema, "format", "expected a string");
        return;
    }
    const char *pattern = regex_format(json_string_value(v));
    if (!pattern) schema_bad(s, schema, "format", "'%.40s' is not supported", json_string_value(v));
    if (pattern && *pattern) f->format = pattern;
}

static bool is_one(const json_t *v)
{
    return json_is_number(v) && json_number_value(v) == 1;
}

/* Keywords that may stand there as long as they say nothing. */
static bool says_nothing(const json_t *schema, const char *key, const json_t *v)
{
    static const char *const empty[] = {"patternProperties", "dependentRequired", "dependentSchemas", "dependencies"};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if (strcmp(key, empty[i]) == 0) return json_is_object(v) && json_object_size(v) == 0;
    if (strcmp(key, "uniqueItems") == 0) return json_is_false(v);
    if (strcmp(key, "unevaluatedProperties") == 0 || strcmp(key, "unevaluatedItems") == 0) return json_is_true(v);
    if (strcmp(key, "propertyNames") == 0) return json_is_true(v) || (json_is_object(v) && json_object_size(v) == 0);
    if (strcmp(key, "minProperties") == 0)
        return json_is_integer(v) &&
               json_integer_value(v) <= (json_int_t)json_array_size(json_object_get(schema, "required"));
    if (strcmp(key, "maxProperties") == 0)
        return json_is_integer(v) && json_is_false(json_object_get(schema, "additionalProperties")) &&
               json_integer_value(v) >= (json_int_t)json_object_size(json_object_get(schema, "properties"));
    return false;
}

static bool annotation(const char *key)
{
    static const char *const names[] = {
        "title",   "description", "default",        "examples",         "example",         "$schema",
        "$id",     "id",          "$comment",       "deprecated",       "readOnly",        "writeOnly",
        "$defs",   "definitions", "discriminator",  "contentMediaType", "contentEncoding", "externalDocs",
        "$anchor", "nullable",    "additionalItems"};
    if (strncmp(key, "x-", 2) == 0) return true;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(key, names[i]) == 0) return true;
    return false;
}

/* One keyword of a schema but for combinations; false: it is not known. */
static bool take(schema_set *s, const json_t *o, const char *key, json_t *v, flat *f)
{
    const bool tuple = json_is_array(json_object_get(o, "items"));
    if (strcmp(key, "type") == 0)
        take_type(s, o, v, f);
    else if (strcmp(key, "enum") == 0)
        json_is_array(v) ? (void)(f->values = v) : (void)schema_bad(s, o, key, "expected an array");
    else if (strcmp(key, "const") == 0)
        f->values = keep(s, json_pack("[O]", v));
    else if (strcmp(key, "properties") == 0)
        take_properties(s, o, v, f);
    else if (strcmp(key, "required") == 0)
        take_required(s, o, v, f);
    else if (strcmp(key, "additionalProperties") == 0)
        f->additional = take_schema(s, o, key, v);
    else if (strcmp(key, "items") == 0 || strcmp(key, "prefixItems") == 0)
        take_items(s, o, key, v, f);
    else if (strcmp(key, "additionalItems") == 0 && tuple)
        f->items = take_schema(s, o, key, v);
    else if (strcmp(key, "minItems") == 0)
        f->min_items = take_count(s, o, key, v);
    else if (strcmp(key, "maxItems") == 0)
        f->max_items = take_count(s, o, key, v);
    else if (strcmp(key, "minLength") == 0)
        f->min_length = take_count(s, o, key, v);
    else if (strcmp(key, "maxLength") == 0)
        f->max_length = take_count(s, o, key, v);
    else if (strcmp(key, "pattern") == 0)
        aff__json_is_text(v) && strlen(json_string_value(v)) == json_string_length(v)
            ? (void)(f->pattern = json_string_value(v))
            : (void)schema_bad(s, o, key, "expected a string");
    else if (strcmp(key, "format") == 0)
        take_format(s, o, v, f);
    else if (strcmp(key, "multipleOf") == 0 && is_one(v))
        f->types &= ~(unsigned)T_REAL;
    else if ((strcmp(key, "exclusiveMinimum") == 0 || strcmp(key, "exclusiveMaximum") == 0) && json_is_boolean(v))
        return true; /* draft 4: looked at with the bound */
    else if (strcmp(key, "minimum") == 0 || strcmp(key, "exclusiveMinimum") == 0)
        take_bound(s, o, key, v, &f->low, 1);
    else if (strcmp(key, "maximum") == 0 || strcmp(key, "exclusiveMaximum") == 0)
        take_bound(s, o, key, v, &f->high, -1);
    else
        return says_nothing(o, key, v) || annotation(key);
    return true;
}

/* ---- references and combinations ---- */

static const json_t *look_up(const json_t *at, const char *pointer)
{
    char name[512];
    while (at && *pointer) {
        size_t n = 0;
        if (*pointer++ != '/') return NULL;
        for (; *pointer && *pointer != '/'; pointer++) {
            char c = *pointer;
            if (c == '~' && (pointer[1] == '0' || pointer[1] == '1')) c = *++pointer == '0' ? '~' : '/';
            if (c == '%' && pointer[1] && pointer[2]) {
                char *end, two[3] = {pointer[1], pointer[2], 0};
                const long code = strtol(two, &end, 16);
                if (*end || !code) return NULL;
                c = (char)code;
                pointer += 2;
            }
            if (n + 1 == sizeof name) return NULL;
            name[n++] = c;
        }
        name[n] = 0;
        if (json_is_array(at)) {
            char *end;
            const unsigned long i = strtoul(name, &end, 10);
            at = n && !*end ? json_array_get(at, i) : NULL;
        } else {
            at = json_object_get(at, name);
        }
    }
    return at;
}

/* Whether no value can fit both; said only where it is certain. */
static bool apart(schema_set *s, const flat *a, const flat *b)
{
    const char *key;
    json_t *v;
    if (!(a->types & b->types)) return true;
    if (a->values && b->values) {
        for (size_t i = 0; i < json_array_size(a->values); i++)
            for (size_t k = 0; k < json_array_size(b->values); k++)
                if (json_equal(json_array_get(a->values, i), json_array_get(b->values, k))) return false;
        return true;
    }
    if ((a->types & b->types) != T_OBJECT) return false;
    bool found = false;
    json_object_foreach(a->required, key, v)
    {
        const json_t *pa = property(a, key), *pb = property(b, key);
        flat_list la = {0}, lb = {0};
        found = found || json_is_false(pb);
        if (found || !pa || !pb || !json_object_get(b->required, key)) continue;
        schema_flatten(s, pa, &la);
        schema_flatten(s, pb, &lb);
        found = s->b->status == AFF_OK;
        for (size_t i = 0; i < la.n; i++)
            for (size_t k = 0; k < lb.n && found; k++)
                found = !(la.f[i].types & lb.f[k].types) ||
                        (la.f[i].values && lb.f[k].values && apart(s, &la.f[i], &lb.f[k]));
        schema_free(&la);
        schema_free(&lb);
    }
    return found;
}

static void take_any_of(schema_set *s, const json_t *o, const char *key, flat_list *list)
{
    const json_t *v = json_object_get(o, key), *one;
    const bool exactly_one = strcmp(key, "oneOf") == 0;
    flat_list all = {0};
    size_t i;
    if (!v) return;
    if (!json_is_array(v) || !json_array_size(v)) schema_bad(s, o, key, "expected an array of schemas");
    json_array_foreach(v, i, one)
    {
        flat_list l = {0};
        schema_flatten(s, one, &l);
        for (size_t k = 0; exactly_one && k < all.n; k++)
            for (size_t m = 0; m < l.n && s->b->status == AFF_OK; m++)
                if (!apart(s, &all.f[k], &l.f[m]) && !apart(s, &l.f[m], &all.f[k]))
                    schema_bad(s, o, key,
                               "one value may fit two of its schemas as far as this server can tell: use anyOf");
        for (size_t k = 0; k < l.n; k++) append(s, &all, &l.f[k]);
        schema_free(&l);
    }
    cross(s, o, list, &all);
    schema_free(&all);
}

static void take_combinations(schema_set *s, const json_t *o, flat_list *list)
{
    const json_t *ref = json_object_get(o, "$ref"), *all = json_object_get(o, "allOf"), *one;
    size_t i;
    if (ref) {
        flat_list l = {0};
        const char *text = aff__json_is_text(ref) ? json_string_value(ref) : "";
        const json_t *to = *text == '#' ? look_up(s->root, text + 1) : NULL;
        if (!to)
            schema_bad(s, o, "$ref", "expected a pointer into this schema such as #/$defs/NAME, got '%.80s'", text);
        if (to) schema_flatten(s, to, &l);
        cross(s, o, list, &l);
        schema_free(&l);
    }
    if (all && (!json_is_array(all) || !json_array_size(all)))
        schema_bad(s, o, "allOf", "expected an array of schemas");
    json_array_foreach(all, i, one)
    {
        flat_list l = {0};
        schema_flatten(s, one, &l);
        cross(s, o, list, &l);
        schema_free(&l);
    }
    take_any_of(s, o, "anyOf", list);
    take_any_of(s, o, "oneOf", list);
}

static bool combination(const char *key)
{
    return strcmp(key, "$ref") == 0 || strcmp(key, "allOf") == 0 || strcmp(key, "anyOf") == 0 ||
           strcmp(key, "oneOf") == 0;
}

static void flatten(schema_set *s, const json_t *schema, flat_list *out)
{
    flat f = {.types = T_ANY, .max_length = G_INF, .max_items = G_INF};
    const char *key;
    json_t *v;
    if (json_is_false(schema)) return;
    if (!is_schema(schema)) {
        schema_bad(s, schema, "schema", "expected an object, true or false");
        return;
    }
    json_object_foreach((json_t *)(uintptr_t)schema, key, v)
    {
        if (!combination(key) && !take(s, schema, key, v, &f))
            schema_bad(s, schema, key, "not supported (docs/server.md lists what is)");
    }
    if (json_is_true(json_object_get(schema, "exclusiveMinimum"))) f.low.exclusive = true;
    if (json_is_true(json_object_get(schema, "exclusiveMaximum"))) f.high.exclusive = true;
    append(s, out, &f);
    take_combinations(s, schema, out);
    if (!json_is_true(json_object_get(schema, "nullable")) || s->b->status != AFF_OK) return;
    flat null = {.types = T_NULL, .max_length = G_INF, .max_items = G_INF};
    append(s, out, &null);
}

void schema_flatten(schema_set *s, const json_t *schema, flat_list *out)
{
    *out = (flat_list){0};
    if (s->b->status != AFF_OK) return;
    if (++s->work > MOST_WORK) g_fail(s->b, AFF_E_INVALID, "%s: the schema is too complex", s->name);
    if (s->depth == MOST_DEPTH)
        schema_bad(s, schema, "$ref", "it refers to itself, or combinations are nested too deep");
    s->depth++;
    if (s->b->status == AFF_OK) flatten(s, schema, out);
    s->depth--;
    if (s->b->status != AFF_OK) schema_free(out);
}
