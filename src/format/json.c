#include "format/json.h"
#include "base/mem.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
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
static aff_status scan(char *text, size_t size, const char *name, int max_depth, aff_error *err)
{
    char *end = text + size;
    int depth = 0;
    for (char *p = text; p < end; p++) {
        if (*p == '[' || *p == '{') {
            if (++depth > max_depth) {
                char what[48];
                snprintf(what, sizeof what, "nested deeper than %d levels", max_depth);
                return fail_at(name, text, (size_t)(p - text), what, err);
            }
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

/* ---- numbers that jansson cannot hold ----
 * Before parsing, such a number becomes a string that starts with one NUL, and a string that starts with NUL gets a
 * second one (NUL has one spelling in JSON, so no text can forge the first form). Afterwards both are taken back. */
static const char NUL_ESCAPE[] = "\\u0000";

/* Whether the number p[0..n) is an integer beyond int64. */
static bool too_long(const char *p, size_t n)
{
    size_t digits = n - (*p == '-');
    if (digits < 19) return false;
    if (digits > 19) return true;
    return strncmp(p + (*p == '-'), *p == '-' ? "9223372036854775808" : "9223372036854775807", 19) > 0;
}

/* Length of the JSON number at p, 0 if there is none; *real: it has a fraction or an exponent. */
static size_t number_at(const char *p, const char *end, bool *real)
{
    const char *q = p;
    *real = false;
    if (q < end && *q == '-') q++;
    if (q == end || *q < '0' || *q > '9') return 0;
    if (*q == '0')
        q++;
    else
        while (q < end && *q >= '0' && *q <= '9') q++;
    if (end - q > 1 && *q == '.' && q[1] >= '0' && q[1] <= '9') {
        *real = true;
        for (q++; q < end && *q >= '0' && *q <= '9';) q++;
    }
    if (q < end && (*q == 'e' || *q == 'E')) {
        const char *e = q + 1;
        if (e < end && (*e == '+' || *e == '-')) e++;
        if (e < end && *e >= '0' && *e <= '9') {
            *real = true;
            for (q = e; q < end && *q >= '0' && *q <= '9';) q++;
        }
    }
    return (size_t)(q - p);
}

/* If the token at p must be carried: its length, and in *shown[0..*n) what stands for it. text is NUL-terminated. */
static size_t carried_at(const char *p, const char *end, bool python, const char **shown, size_t *n)
{
    static const char *const names[] = {"NaN", "Infinity", "-Infinity"};
    bool real;
    size_t len = number_at(p, end, &real);
    *shown = p;
    *n = len;
    if (len && !real) return too_long(p, len) ? len : 0;
    if (!python) return 0;
    if (len) {
        if (!isinf(strtod(p, NULL))) return 0;
        *shown = *p == '-' ? "-Infinity" : "Infinity";
        *n = strlen(*shown);
        return len;
    }
    for (int i = 0; i < 3; i++) {
        size_t k = strlen(names[i]);
        if ((size_t)(end - p) < k || memcmp(p, names[i], k) != 0) continue;
        *n = k;
        return k;
    }
    return 0;
}

/* Length of the string literal at p (which is at a quote), to the end of the text if it does not close. */
static size_t literal_length(const char *p, const char *end)
{
    const char *q = p + 1;
    while (q < end && *q != '"') q += *q == '\\' && end - q > 1 ? 2 : 1;
    return (size_t)((q < end ? q + 1 : end) - p);
}

/* *changed: out holds the rewritten text, otherwise nothing had to be. */
static aff_status carry(aff_buf *out, const char *text, size_t size, bool python, bool *changed, aff_error *err)
{
    const char *p = text, *end = text + size, *kept = text;
    *changed = false;
    while (p < end) {
        const char *shown;
        size_t n, len;
        if (*p == '"') {
            len = literal_length(p, end);
            if (len > 6 && memcmp(p + 1, NUL_ESCAPE, 6) == 0) {
                AFF_TRY(aff__buf_put(out, kept, (size_t)(p + 1 - kept), err));
                AFF_TRY(aff__buf_puts(out, NUL_ESCAPE, err));
                kept = p + 1;
                *changed = true;
            }
            p += len;
        } else if (*p == '-' || *p == 'N' || *p == 'I' || (*p >= '0' && *p <= '9')) {
            bool real;
            len = carried_at(p, end, python, &shown, &n);
            if (len) {
                AFF_TRY(aff__buf_put(out, kept, (size_t)(p - kept), err));
                AFF_TRY(aff__buf_puts(out, "\"\\u0000", err));
                AFF_TRY(aff__buf_put(out, shown, n, err));
                AFF_TRY(aff__buf_puts(out, "\"", err));
                kept = p + len;
                *changed = true;
            } else {
                len = number_at(p, end, &real);
            }
            p += len ? len : 1;
        } else {
            p++;
        }
    }
    return *changed ? aff__buf_put(out, kept, (size_t)(end - kept), err) : AFF_OK;
}

/* Replaces *v, which the caller owns, by what it stands for; NULL without memory. */
static json_t *take_back(json_t *v)
{
    if (json_is_object(v)) {
        for (void *it = json_object_iter(v); it; it = json_object_iter_next(v, it)) {
            json_t *x = take_back(json_incref(json_object_iter_value(it)));
            if (!x || json_object_iter_set_new(v, it, x) != 0) return json_decref(v), NULL;
        }
    } else if (json_is_array(v)) {
        for (size_t i = 0; i < json_array_size(v); i++) {
            json_t *x = take_back(json_incref(json_array_get(v, i)));
            if (!x || json_array_set_new(v, i, x) != 0) return json_decref(v), NULL;
        }
    } else if (json_is_string(v) && json_string_length(v) && !json_string_value(v)[0]) {
        size_t n = json_string_length(v);
        bool doubled = n > 1 && !json_string_value(v)[1];
        char *s = malloc(n);
        json_t *x = NULL;
        if (s) {
            memcpy(s, json_string_value(v) + doubled, n - doubled);
            if (!doubled) s[0] = '\xFF';
            x = json_stringn_nocheck(s, n - doubled);
        }
        free(s);
        json_decref(v);
        return x;
    }
    return v;
}

static aff_status load(json_t **out, const char *text, size_t size, const char *name, bool unique_keys, bool columns,
                       aff_error *err)
{
    json_error_t je;
    size_t flags = JSON_ALLOW_NUL | JSON_DECODE_ANY | (unique_keys ? JSON_REJECT_DUPLICATES : 0);
    *out = json_loadb(text, size, flags, &je);
    if (*out) return AFF_OK;
    if (json_error_code(&je) == json_error_out_of_memory)
        return aff__fail(err, AFF_E_NOMEM, "%s: out of memory while parsing JSON", name);
    if (!columns) return aff__fail(err, AFF_E_FORMAT, "%s: line %d: %s", name, je.line, je.text);
    return aff__fail(err, AFF_E_FORMAT, "%s: line %d column %d: %s", name, je.line, je.column, je.text);
}

/* A copy that scan may write to, scanned. */
static aff_status scanned(char **copy, const char *text, size_t size, const char *name, int max_depth, aff_error *err)
{
    if (size > MAX_TEXT)
        return aff__fail(err, AFF_E_LIMIT, "%s: JSON text of %zu bytes, at most %d are accepted", name, size, MAX_TEXT);
    AFF_TRY(aff__strndup(copy, size ? text : "", size, err));
    aff_status s = scan(*copy, size, name, max_depth, err);
    if (s != AFF_OK) free(*copy);
    return s;
}

aff_status aff__json_parse(json_t **out, const char *text, size_t size, const char *name, bool unique_keys,
                           aff_error *err)
{
    char *copy;
    *out = NULL;
    AFF_TRY(scanned(&copy, text, size, name, MAX_DEPTH, err));
    aff_status s = load(out, copy, size, name, unique_keys, true, err);
    free(copy);
    return s;
}

aff_status aff__json_parse_exact(json_t **out, const char *text, size_t size, const char *name, bool python,
                                 int max_depth, aff_error *err)
{
    char *copy;
    aff_buf b = {0};
    bool changed;
    *out = NULL;
    AFF_TRY(scanned(&copy, text, size, name, max_depth < MAX_DEPTH ? max_depth : MAX_DEPTH, err));
    aff_status s = carry(&b, copy, size, python, &changed, err);
    if (s == AFF_OK && !changed) s = load(out, copy, size, name, false, true, err);
    if (s == AFF_OK && changed) {
        s = load(out, b.s, b.n, name, false, false, err);
        if (s == AFF_OK && !(*out = take_back(*out)))
            s = aff__fail(err, AFF_E_NOMEM, "%s: out of memory while parsing JSON", name);
    }
    free(copy);
    aff__buf_free(&b);
    return s;
}

const char *aff__json_literal(const json_t *v, size_t *n)
{
    if (!json_is_string(v) || (unsigned char)json_string_value(v)[0] != 0xFF) return NULL;
    *n = json_string_length(v) - 1;
    return json_string_value(v) + 1;
}

bool aff__json_is_text(const json_t *v)
{
    return json_is_string(v) && (unsigned char)json_string_value(v)[0] != 0xFF;
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return aff__json_is_text(v) ? "a string" : "a number out of range";
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
    if (!aff__json_is_text(v)) return mistyped(name, key, "a string", v, err);
    *out = json_string_value(v);
    if (len) *len = json_string_length(v);
    return AFF_OK;
}
