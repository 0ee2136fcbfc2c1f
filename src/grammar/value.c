/* value.c - schemas to rules. */
#include "grammar/schema.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/json.h"
#include <stdlib.h>
#include <string.h>

/* ---- one rule a schema ---- */

static uint32_t slot_of(const compiler *c, const json_t *schema, value_mode mode)
{
    uint32_t at = (uint32_t)aff__mix64((uint64_t)(uintptr_t)schema * 4 + mode) & c->mask;
    while (c->slot[at] && (c->rules[c->slot[at] - 1].schema != schema || c->rules[c->slot[at] - 1].mode != mode))
        at = (at + 1) & c->mask;
    return at;
}

static void grow_slots(compiler *c)
{
    const uint32_t n = c->slot ? (c->mask + 1) * 2 : 256;
    free(c->slot);
    c->slot = NULL;
    c->b.status = aff__calloc(&c->slot, n, sizeof *c->slot, "grammar", c->b.err);
    c->mask = n - 1;
    for (size_t i = 0; i < c->n && c->b.status == AFF_OK; i++)
        c->slot[slot_of(c, c->rules[i].schema, c->rules[i].mode)] = (uint32_t)i + 1;
}

uint32_t value_rule_of(compiler *c, const json_t *schema, value_mode mode)
{
    if (!schema || (json_is_object(schema) && !json_object_size(schema))) schema = json_true();
    if (c->b.status == AFF_OK && (!c->slot || c->n * 2 > c->mask)) grow_slots(c);
    if (c->b.status != AFF_OK) return 0;
    const uint32_t at = slot_of(c, schema, mode);
    if (c->slot[at]) return c->rules[c->slot[at] - 1].rule;
    if (c->n == c->cap) {
        const size_t cap = c->cap ? c->cap * 2 : 64;
        c->b.status = aff__realloc(&c->rules, cap, sizeof *c->rules, "grammar", c->b.err);
        if (c->b.status != AFF_OK) return 0;
        c->cap = cap;
    }
    const uint32_t rule = g_rule_new(&c->b);
    if (c->b.status != AFF_OK) return 0;
    c->rules[c->n++] = (value_rule){schema, mode, rule};
    c->slot[at] = (uint32_t)c->n;
    return rule;
}

/* ---- keys ---- */

/* Characters of a key that is none of the schema's: as they stand, without escapes, so that it differs from them for
 * certain. */
static bool key_plain(bool tags, unsigned c)
{
    if (c >= 0x80) return true;
    return c >= 0x20 && c != '"' && c != '\\' && !(tags && (c == '<' || c == '>'));
}

typedef struct keys {
    g_builder *b;
    const char **key; /* sorted */
    bool tags;
    uint32_t rest;  /* a key that differs from all others already: more of it */
    uint32_t other; /* a character beyond ASCII, then rest */
    uint32_t next;
} keys;

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Ways on that are no key's, from within a character: `due` more bytes, the next lo to hi but for those taken. */
static uint32_t leave_inside(keys *k, const bool *taken, int due, uint8_t lo, uint8_t hi)
{
    uint64_t set[4] = {0};
    uint32_t rest = k->rest;
    for (unsigned c = lo; c <= hi; c++)
        if (!taken[c]) g_set_add(set, (uint8_t)c);
    for (int i = 1; i < due; i++) rest = g_range(k->b, 0x80, 0xBF, rest);
    return g_set(k->b, set, rest);
}

static uint32_t leave(keys *k, const bool *taken, bool beyond_ascii)
{
    uint64_t set[4] = {0};
    for (unsigned c = 0; c < 0x80; c++)
        if (!taken[c] && key_plain(k->tags, c)) g_set_add(set, (uint8_t)c);
    uint32_t at = g_set(k->b, set, k->rest);
    if (!beyond_ascii) return g_or(k->b, at, k->other);
    for (unsigned c = 0xC2; c <= 0xF4; c++) {
        static const bool none[256];
        const int more = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : 1;
        if (taken[c]) continue;
        const uint8_t lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80, hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
        at = g_or(k->b, at, g_range(k->b, (uint8_t)c, (uint8_t)c, leave_inside(k, none, more, lo, hi)));
    }
    return at;
}

/* Keys that begin with the first `depth` bytes of keys [from, to) and are none of them. Within a character `due` bytes
 * of it are to come, the next lo to hi. */
static uint32_t other_keys(keys *k, size_t from, size_t to, size_t depth, int due, uint8_t lo, uint8_t hi)
{
    bool taken[256] = {false}, ended = false, beyond_ascii = false;
    uint32_t at = G_FAIL;
    for (; from < to && !k->key[from][depth]; from++) ended = true;
    for (size_t i = from, j; i < to && k->b->status == AFF_OK; i = j) {
        const uint8_t c = (uint8_t)k->key[i][depth];
        for (j = i; j < to && (uint8_t)k->key[j][depth] == c;) j++;
        taken[c] = true;
        beyond_ascii |= c >= 0x80;
        if (!due && !key_plain(k->tags, c)) continue;
        const int more = due ? due - 1 : c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : c >= 0xC0 ? 1 : 0;
        const uint8_t next_lo = due         ? 0x80
                                : c == 0xE0 ? 0xA0
                                : c == 0xF0 ? 0x90
                                            : 0x80,
                      next_hi = due         ? 0xBF
                                : c == 0xED ? 0x9F
                                : c == 0xF4 ? 0x8F
                                            : 0xBF;
        at = g_or(k->b, at, g_range(k->b, c, c, other_keys(k, i, j, depth + 1, more, next_lo, next_hi)));
    }
    if (due) return g_or(k->b, at, leave_inside(k, taken, due, lo, hi));
    at = g_or(k->b, at, leave(k, taken, beyond_ascii));
    return ended ? at : g_or(k->b, at, k->next);
}

/* A key that is not in `known`, and what closes it. */
static uint32_t other_key(compiler *c, const json_t *known, bool tags, uint32_t next)
{
    g_builder *b = &c->b;
    keys k = {.b = b, .tags = tags, .next = next};
    const char *key;
    json_t *v;
    size_t n = 0;
    uint32_t at = G_FAIL;
    if (tags) {
        uint64_t set[4] = {0};
        for (unsigned x = 0; x < 0x80; x++)
            if (key_plain(true, x)) g_set_add(set, (uint8_t)x);
        k.rest = g_hub(b);
        g_define(b, k.rest, g_or(b, next, g_or(b, g_set(b, set, k.rest), g_utf8(b, 0x80, 0x10FFFF, k.rest))));
    } else {
        k.rest = g_chars(b, AFF_TEXT_JSON, 0, G_INF, G_FAIL, next);
    }
    if (!json_object_size(known)) return k.rest;
    k.other = g_utf8(b, 0x80, 0x10FFFF, k.rest);
    if (b->status == AFF_OK) b->status = aff__calloc(&k.key, json_object_size(known), sizeof *k.key, "schema", b->err);
    if (b->status == AFF_OK) {
        json_object_foreach((json_t *)(uintptr_t)known, key, v) k.key[n++] = key;
        qsort(k.key, n, sizeof *k.key, by_text);
        at = other_keys(&k, 0, n, 0, 0, 0, 0);
    }
    free(k.key);
    return at;
}

/* ---- objects ---- */

/* The value of a member, in JSON or with the tag's end in front. */
static uint32_t member_value(compiler *c, const json_t *schema, const member_form *form, uint32_t next)
{
    g_builder *b = &c->b;
    if (!form->tags) return g_ws(b, g_call(b, value_rule_of(c, schema, VALUE_JSON), next));
    const uint32_t close = g_closing(b, form->parameter, next);
    const uint32_t string = g_text(b, "true\">", g_call(b, value_rule_of(c, schema, VALUE_RAW), close));
    const uint32_t rest = g_text(b, "false\">", g_call(b, value_rule_of(c, schema, VALUE_REST), close));
    return g_or(b, string, rest);
}

static uint32_t key_open(g_builder *b, const member_form *form, uint32_t next)
{
    return form->tags ? g_opening(b, form->parameter, g_text(b, " name=\"", next)) : g_text(b, "\"", next);
}

static uint32_t member(compiler *c, const char *key, const json_t *schema, const member_form *form, uint32_t next)
{
    aff_buf text = {0};
    g_builder *b = &c->b;
    if (b->status != AFF_OK) return G_FAIL;
    const uint32_t value = member_value(c, schema, form, next);
    if (form->tags) return key_open(b, form, g_text(b, key, g_text(b, "\" string=\"", value)));
    if (b->status == AFF_OK) b->status = aff__json_put_string(&text, key, strlen(key), b->err);
    const uint32_t at = g_literal(b, text.s, text.n, g_text(b, ":", value));
    aff__buf_free(&text);
    return at;
}

/* Members that the schema does not name. */
static uint32_t other_member(compiler *c, const json_t *known, const json_t *schema, const member_form *form,
                             uint32_t next)
{
    g_builder *b = &c->b;
    const uint32_t value = member_value(c, schema, form, next);
    const uint32_t after = g_text(b, form->tags ? "\" string=\"" : "\":", value);
    return key_open(b, form, other_key(c, known, form->tags, after));
}

enum { MOST_KEY = 512 };

static void check_key(compiler *c, const char *key, bool tags)
{
    const bool odd = tags && (strpbrk(key, "\"<>\n\r") || !*key);
    if (strlen(key) <= MOST_KEY && !odd) return;
    g_fail(&c->b, AFF_E_INVALID, "%s: property '%.40s': expected a name of at most %d bytes%s", c->s.name, key,
           MOST_KEY, tags ? " without quotes, angle brackets and line ends" : "");
}

/* Where a list of members may go on; built from its end. `more`: places where another member follows. */
uint32_t value_members(compiler *c, const flat *f, const member_form *form, uint32_t next)
{
    g_builder *b = &c->b;
    const char *key, **order = NULL;
    json_t *known = json_object(), *v;
    size_t n = 0;
    if (!known || json_array_append_new(c->s.made, known) != 0) return g_fail(b, AFF_E_NOMEM, "schema: out of memory");
    json_object_foreach(f->properties, key, v) json_object_set(known, key, v);
    json_object_foreach(f->required, key, v)
    {
        if (!json_object_get(known, key)) json_object_set(known, key, f->additional ? f->additional : json_true());
    }
    if (b->status == AFF_OK) b->status = aff__calloc(&order, json_object_size(known), sizeof *order, "schema", b->err);
    if (b->status != AFF_OK) return G_FAIL;
    json_object_foreach(known, key, v)
    {
        check_key(c, key, form->tags);
        order[n++] = key;
    }
    const uint32_t empty = g_text(b, form->close, next), close = form->tags ? empty : g_ws(b, empty);
    uint32_t more = G_FAIL, after = close;
    bool may_end = true;
    if (!json_is_false(f->additional)) {
        after = g_hub(b);
        more = other_member(c, known, f->additional, form, after);
    }
    if (more != G_FAIL) {
        const uint32_t again = form->tags ? more : g_ws(b, more);
        g_define(b, after, g_or(b, close, g_text(b, form->separator, again)));
    }
    for (size_t i = n; i-- > 0 && b->status == AFF_OK;) {
        const uint32_t this = member(c, order[i], json_object_get(known, order[i]), form, after);
        const bool required = json_object_get(f->required, order[i]) != NULL;
        more = required ? this : g_or(b, this, more);
        may_end &= !required;
        if (!i) break;
        const uint32_t again = g_text(b, form->separator, form->tags ? more : g_ws(b, more));
        after = may_end ? g_or(b, close, again) : again;
    }
    free(order);
    const uint32_t start = may_end ? g_or(b, empty, more) : more;
    return g_text(b, form->open, form->tags ? start : g_ws(b, start));
}

/* ---- arrays ---- */

static uint32_t array(compiler *c, const flat *f, uint32_t next)
{
    g_builder *b = &c->b;
    const uint32_t size = (uint32_t)json_array_size(f->prefix), end = g_text(b, "]", next), close = g_ws(b, end);
    uint32_t most = json_is_false(f->items) && size < f->max_items ? size : f->max_items, n = size < most ? size : most;
    uint32_t at;
    if (f->min_items > most) return G_FAIL;
    if (!most) return g_text(b, "[", g_ws(b, end));
    if (most > n) { /* items beyond the prefix */
        const uint32_t item = value_rule_of(c, f->items, VALUE_JSON), again = g_rule_new(b);
        const uint32_t body = g_text(b, ",", g_ws(b, g_call(b, item, G_RET)));
        if (b->status == AFF_OK) b->g->rule[again] = body;
        const uint32_t first = n ? n : 1, min = f->min_items > first ? f->min_items - first : 0;
        at = g_loop(b, again, min, most == G_INF ? G_INF : most - first, close);
        if (!n) at = g_call(b, item, at);
    } else {
        at = close;
    }
    for (uint32_t i = n; i-- > 0;) {
        at = g_call(b, value_rule_of(c, json_array_get(f->prefix, i), VALUE_JSON), at);
        if (!i) break;
        at = g_text(b, ",", g_ws(b, at));
        if (i >= f->min_items) at = g_or(b, close, at);
    }
    if (!f->min_items) at = g_or(b, end, at);
    return g_text(b, "[", g_ws(b, at));
}

/* ---- strings and numbers ---- */

/* A string's characters up to `next`. */
static uint32_t string_body(compiler *c, const json_t *schema, const flat *f, bool raw, uint32_t next)
{
    g_builder *b = &c->b;
    const char *why = NULL;
    if (f->min_length > f->max_length) return G_FAIL;
    if (f->pattern && f->format)
        return schema_bad(&c->s, schema, "format", "together with a pattern it cannot be followed");
    if (!f->pattern && !f->format)
        return raw ? g_raw_text(b, f->min_length, f->max_length, next)
                   : g_chars(b, AFF_TEXT_JSON, f->min_length, f->max_length, G_FAIL, next);
    const regex_request q = {f->pattern ? f->pattern : f->format, f->min_length, f->max_length, raw};
    const uint32_t at = regex_compile(b, &q, next, &why);
    return why ? schema_bad(&c->s, schema, f->pattern ? "pattern" : "format", "%s", why) : at;
}

enum { LONG_INT = 64, LONG_FRAC = 32 };

static uint32_t number(compiler *c, const flat *f, uint32_t next)
{
    g_builder *b = &c->b;
    const bool integer = !(f->types & T_REAL);
    if (f->low.given || f->high.given) return number_range(b, &f->low, &f->high, integer, next);
    uint32_t at = next;
    if (!integer) {
        uint64_t sign[4] = {0}, e[4] = {0};
        g_set_add(sign, '+');
        g_set_add(sign, '-');
        g_set_add(e, 'e');
        g_set_add(e, 'E');
        const uint32_t power = g_digits(b, 1, 2, next), exponent = g_set(b, e, g_or(b, power, g_set(b, sign, power)));
        at = g_or(b, next, exponent);
        at = g_or(b, at, g_text(b, ".", g_digits(b, 1, LONG_FRAC, at)));
    }
    at = g_or(b, g_text(b, "0", at), g_range(b, '1', '9', g_digits(b, 0, LONG_INT - 1, at)));
    return g_or(b, at, g_text(b, "-", at));
}

/* ---- listed values ---- */

static unsigned type_of(const json_t *v)
{
    size_t n;
    const char *literal = aff__json_literal(v, &n);
    if (literal) return memchr(literal, '.', n) || memchr(literal, 'e', n) || memchr(literal, 'E', n) ? T_REAL : T_INT;
    static const unsigned types[] = {T_OBJECT, T_ARRAY, T_STRING, T_INT, T_REAL, T_TRUE, T_FALSE, T_NULL};
    if (json_is_real(v) &&
        json_real_value(v) ==
            (double)(int64_t)(json_real_value(v) > -9e15 && json_real_value(v) < 9e15 ? json_real_value(v) : 0.5))
        return T_INT;
    return types[json_typeof(v)];
}

/* Whether a listed value fits the other keywords, as far as can be told; lists of objects and arrays stand without
 * others. */
static bool fits(compiler *c, const json_t *schema, const flat *f, const json_t *v)
{
    const unsigned type = type_of(v);
    dec d = {0};
    if (!(f->types & type)) return false;
    if ((type == T_STRING && (f->pattern || f->format)) ||
        (type == T_OBJECT && (f->properties || f->required || f->additional)) ||
        (type == T_ARRAY && (f->prefix || f->items || f->min_items || f->max_items != G_INF))) {
        schema_bad(&c->s, schema, "enum", "listed values together with keywords about their parts are not supported");
        return false;
    }
    if (type == T_STRING) {
        uint32_t chars = 0;
        for (const char *s = json_string_value(v), *end = s + json_string_length(v); s < end; s++)
            chars += ((uint8_t)*s & 0xC0) != 0x80;
        return chars >= f->min_length && chars <= f->max_length;
    }
    if (!(type & T_NUMBER) || (!f->low.given && !f->high.given)) return true;
    if (!dec_read(&d, v)) return false;
    const int low = f->low.given ? dec_compare(&d, &f->low) : 1, high = f->high.given ? dec_compare(&d, &f->high) : -1;
    return (low > 0 || (low == 0 && !f->low.exclusive)) && (high < 0 || (high == 0 && !f->high.exclusive));
}

static uint32_t listed(compiler *c, const json_t *schema, const flat *f, value_mode mode, uint32_t next)
{
    g_builder *b = &c->b;
    uint32_t at = G_FAIL;
    for (size_t i = 0; i < json_array_size(f->values) && b->status == AFF_OK; i++) {
        const json_t *v = json_array_get(f->values, i);
        const bool string = type_of(v) == T_STRING;
        aff_buf text = {0};
        if ((mode == VALUE_RAW && !string) || (mode == VALUE_REST && string) || !fits(c, schema, f, v)) continue;
        if (mode == VALUE_RAW) {
            const char *s = json_string_value(v);
            if (strstr(s, "\xEF\xBD\x9C") || strlen(s) != json_string_length(v))
                schema_bad(&c->s, schema, "enum", "a value holds a character that parameters of tools may not have");
            else
                at = g_or(b, at, g_text(b, s, next));
            continue;
        }
        b->status = aff__json_dump_python(&text, v, b->err);
        if (b->status == AFF_OK) at = g_or(b, at, g_literal(b, text.s, text.n, next));
        aff__buf_free(&text);
    }
    return at;
}

/* ---- all of it ---- */

static uint32_t one_value(compiler *c, const json_t *schema, const flat *f, value_mode mode, uint32_t next)
{
    static const member_form object = {",", "{", "}", false, NULL};
    g_builder *b = &c->b;
    const unsigned types = mode == VALUE_RAW    ? f->types & T_STRING
                           : mode == VALUE_REST ? f->types & ~(unsigned)T_STRING
                                                : f->types;
    uint32_t at = G_FAIL;
    if (f->values) return listed(c, schema, f, mode, next);
    if (mode == VALUE_RAW) return types ? string_body(c, schema, f, true, next) : G_FAIL;
    if (types & T_NULL) at = g_or(b, at, g_text(b, "null", next));
    if (types & T_FALSE) at = g_or(b, at, g_text(b, "false", next));
    if (types & T_TRUE) at = g_or(b, at, g_text(b, "true", next));
    if (types & T_NUMBER) at = g_or(b, at, number(c, f, next));
    if (types & T_STRING) at = g_or(b, at, g_text(b, "\"", string_body(c, schema, f, false, g_text(b, "\"", next))));
    if (types & T_ARRAY) at = g_or(b, at, array(c, f, next));
    if (types & T_OBJECT) at = g_or(b, at, value_members(c, f, &object, next));
    return at;
}

void value_compile_all(compiler *c)
{
    while (c->done < c->n && c->b.status == AFF_OK) {
        const value_rule r = c->rules[c->done++];
        flat_list l = {0};
        uint32_t at = G_FAIL;
        g_part(&c->b);
        schema_flatten(&c->s, r.schema, &l);
        for (size_t i = 0; i < l.n; i++) at = g_or(&c->b, at, one_value(c, r.schema, &l.f[i], r.mode, G_RET));
        schema_free(&l);
        if (c->b.status == AFF_OK) c->b.g->rule[r.rule] = at;
    }
}
