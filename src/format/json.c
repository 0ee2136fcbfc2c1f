#include "format/json.h"
#include "base/mem.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Bounds of what is accepted from outside. jansson's own depth limit (2048) is compiled in and too generous for callers
 * that recurse over the result. */
enum { MAX_DEPTH = 256, MAX_TEXT = 256 << 20, MAX_STRING = 16 << 20 };

/* Where in the text an error is: 1-based line, 1-based column in characters. */
static aff_status fail_at(const char *name, const char *text, size_t at, const char *what, aff_error *err)
{
    uint64_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        if (text[i] == '\n')
            line++, column = 1;
        else if (((unsigned char)text[i] & 0xC0) != 0x80)
            column++;
    }
    return aff__fail(err, AFF_E_FORMAT, "%s: line %" PRIu64 " column %" PRIu64 ": %s", name, line, column, what);
}

/* Value of the four hexadecimal digits at p, or -1. */
static int hex4(const char *p, const char *end)
{
    int v = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

/* p is behind "\u". A surrogate without its partner, which jansson would refuse, becomes U+FFFD in place (the escape
 * has the same length). Returns the position behind the escape or pair; malformed escapes are left for jansson to
 * report. */
static char *mend_escape(char *p, const char *end)
{
    int v = hex4(p, end);
    if (v < 0xD800 || v > 0xDFFF) return v < 0 ? p : p + 4;
    if (v < 0xDC00 && end - p >= 10 && p[4] == '\\' && p[5] == 'u') {
        int low = hex4(p + 6, end);
        if (low >= 0xDC00 && low <= 0xDFFF) return p + 10;
    }
    memcpy(p, "fffd", 4);
    return p + 4;
}

/* Bounds depth and string length and mends lone surrogates; everything else is jansson's to judge. */
static aff_status scan(char *text, size_t size, const char *name, aff_error *err)
{
    char *end = text + size;
    int depth = 0;
    for (char *p = text; p < end; p++) {
        if (*p == '[' || *p == '{') {
            if (++depth > MAX_DEPTH)
                return fail_at(name, text, (size_t)(p - text), "nested deeper than 256 levels", err);
        } else if (*p == ']' || *p == '}') {
            depth--;
        } else if (*p == '"') {
            char *start = p++;
            while (p < end && *p != '"') {
                if (*p != '\\') {
                    p++;
                } else if (end - p >= 2) {
                    p = p[1] == 'u' ? mend_escape(p + 2, end) : p + 2;
                } else {
                    p = end;
                }
                if (p - start > MAX_STRING)
                    return fail_at(name, text, (size_t)(start - text), "string longer than 16777216 bytes", err);
            }
        }
    }
    return AFF_OK;
}

aff_status aff__json_parse(json_t **out, const char *text, size_t size, const char *name, bool unique_keys,
                           aff_error *err)
{
    *out = NULL;
    if (size > MAX_TEXT)
        return aff__fail(err, AFF_E_LIMIT, "%s: JSON text of %zu bytes, at most %d are accepted", name, size, MAX_TEXT);
    char *copy = NULL;
    AFF_TRY(aff__strndup(&copy, size ? text : "", size, err));
    aff_status s = scan(copy, size, name, err);
    if (s == AFF_OK) {
        json_error_t je;
        size_t flags = JSON_ALLOW_NUL | JSON_DECODE_ANY | (unique_keys ? JSON_REJECT_DUPLICATES : 0);
        *out = json_loadb(copy, size, flags, &je);
        if (!*out && json_error_code(&je) == json_error_out_of_memory)
            s = aff__fail(err, AFF_E_NOMEM, "%s: out of memory while parsing JSON", name);
        else if (!*out)
            s = aff__fail(err, AFF_E_FORMAT, "%s: line %d column %d: %s", name, je.line, je.column, je.text);
    }
    free(copy);
    return s;
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a real number";
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    case JSON_NULL:
        return "null";
    }
    return "nothing";
}

/* The value of a key; NULL in *v when absent or null and `optional`. */
static aff_status look_up(const json_t *obj, const char *name, const char *key, const char *expected, bool optional,
                          const json_t **v, aff_error *err)
{
    *v = NULL;
    if (!json_is_object(obj)) return aff__fail(err, AFF_E_FORMAT, "%s: expected an object with key '%s'", name, key);
    *v = json_object_get(obj, key);
    if (optional && (!*v || json_is_null(*v))) *v = NULL;
    if (!optional && !*v)
        return aff__fail(err, AFF_E_FORMAT, "%s: key '%s' is missing: expected %s", name, key, expected);
    return AFF_OK;
}

static aff_status mistyped(const char *name, const char *key, const char *expected, const json_t *v, aff_error *err)
{
    return aff__fail(err, AFF_E_FORMAT, "%s: key '%s': expected %s, got %s", name, key, expected, type_name(v));
}

static aff_status get_int(const json_t *obj, const char *name, const char *key, int64_t min, int64_t max, bool optional,
                          int64_t *out, aff_error *err)
{
    const json_t *v;
    AFF_TRY(look_up(obj, name, key, "an integer", optional, &v, err));
    if (!v) return AFF_OK;
    if (!json_is_integer(v)) return mistyped(name, key, "an integer", v, err);
    int64_t i = json_integer_value(v);
    if (i < min || i > max)
        return aff__fail(err, AFF_E_FORMAT, "%s: key '%s': expected %" PRId64 " to %" PRId64 ", got %" PRId64, name,
                         key, min, max, i);
    *out = i;
    return AFF_OK;
}

aff_status aff__json_int(const json_t *obj, const char *name, const char *key, int64_t min, int64_t max, int64_t *out,
                         aff_error *err)
{
    return get_int(obj, name, key, min, max, false, out, err);
}

aff_status aff__json_int_opt(const json_t *obj, const char *name, const char *key, int64_t min, int64_t max,
                             int64_t *out, aff_error *err)
{
    return get_int(obj, name, key, min, max, true, out, err);
}

static aff_status get_num(const json_t *obj, const char *name, const char *key, bool optional, double *out,
                          aff_error *err)
{
    const json_t *v;
    AFF_TRY(look_up(obj, name, key, "a number", optional, &v, err));
    if (!v) return AFF_OK;
    if (!json_is_number(v)) return mistyped(name, key, "a number", v, err);
    *out = json_number_value(v);
    return AFF_OK;
}

aff_status aff__json_num(const json_t *obj, const char *name, const char *key, double *out, aff_error *err)
{
    return get_num(obj, name, key, false, out, err);
}

aff_status aff__json_num_opt(const json_t *obj, const char *name, const char *key, double *out, aff_error *err)
{
    return get_num(obj, name, key, true, out, err);
}

aff_status aff__json_str(const json_t *obj, const char *name, const char *key, const char **out, size_t *len,
                         aff_error *err)
{
    const json_t *v;
    AFF_TRY(look_up(obj, name, key, "a string", false, &v, err));
    if (!json_is_string(v)) return mistyped(name, key, "a string", v, err);
    *out = json_string_value(v);
    if (len) *len = json_string_length(v);
    return AFF_OK;
}
