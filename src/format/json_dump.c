/* JSON as Python's json.dumps(..., ensure_ascii=False) spells it. */
#include "format/json.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

aff_status aff__json_put_string(aff_buf *out, const char *s, size_t n, aff_error *err)
{
    static const char *const short_form[32] = {
        ['\b'] = "\\b", ['\t'] = "\\t", ['\n'] = "\\n", ['\f'] = "\\f", ['\r'] = "\\r"};
    size_t kept = 0;
    if (n == 0) return aff__buf_puts(out, "\"\"", err);
    AFF_TRY(aff__buf_put(out, "\"", 1, err));
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        char esc[8];
        if (c < 0x20 && short_form[c])
            snprintf(esc, sizeof esc, "%s", short_form[c]);
        else if (c < 0x20)
            snprintf(esc, sizeof esc, "\\u%04x", c);
        else
            snprintf(esc, sizeof esc, "\\%c", c);
        AFF_TRY(aff__buf_put(out, s + kept, i - kept, err));
        AFF_TRY(aff__buf_puts(out, esc, err));
        kept = i + 1;
    }
    AFF_TRY(aff__buf_put(out, s + kept, n - kept, err));
    return aff__buf_put(out, "\"", 1, err);
}

/* Digits and exponent of |v| at a precision: v = d.ddd * 10^*exp. %e uses the locale's decimal point, so only its
 * digits are taken. Returns how many. */
static int digits_of(double v, int precision, char digits[20], int *exp)
{
    char e[64];
    int n = 0;
    snprintf(e, sizeof e, "%.*e", precision - 1, v);
    char *p = e;
    for (; *p && *p != 'e'; p++)
        if (*p >= '0' && *p <= '9' && n < 18) digits[n++] = *p;
    *exp = *p ? atoi(p + 1) : 0;
    digits[n] = 0;
    return n;
}

/* Whether digits * 10^(exp-n+1) reads as v. */
static bool reads_as(const char *digits, int n, int exp, double v)
{
    char e[64];
    snprintf(e, sizeof e, "%se%d", digits, exp - n + 1);
    return strtod(e, NULL) == v;
}

/* Adds one to the last digit; false if that carries into a new digit. */
static bool next_decimal(char *digits, int n)
{
    for (int i = n - 1; i >= 0; i--) {
        if (digits[i] != '9') return digits[i]++, true;
        digits[i] = '0';
    }
    return false;
}

/* The shortest digits that read as v > 0. Beside the nearest decimal of each length its upper neighbour is tried: above
 * a power of two the interval of v reaches twice as far up as down. */
static int shortest(double v, char digits[20], int *exp)
{
    int n = 0;
    for (int precision = 1; precision <= 17; precision++) {
        n = digits_of(v, precision, digits, exp);
        if (reads_as(digits, n, *exp, v)) break;
        char up[20];
        memcpy(up, digits, sizeof up);
        if (next_decimal(up, n) && reads_as(up, n, *exp, v)) {
            memcpy(digits, up, sizeof up);
            break;
        }
    }
    while (n > 1 && digits[n - 1] == '0') digits[--n] = 0;
    return n;
}

static aff_status put_real(aff_buf *out, double v, aff_error *err)
{
    char digits[20], text[64];
    int exp, n;
    if (signbit(v)) AFF_TRY(aff__buf_put(out, "-", 1, err));
    if (v == 0) return aff__buf_puts(out, "0.0", err);
    n = shortest(fabs(v), digits, &exp);
    if (exp < -4 || exp >= 16)
        snprintf(text, sizeof text, "%c%s%se%c%02d", digits[0], n > 1 ? "." : "", digits + 1, exp < 0 ? '-' : '+',
                 abs(exp));
    else if (exp < 0)
        snprintf(text, sizeof text, "0.%.*s%s", -exp - 1, "000", digits);
    else if (n <= exp + 1)
        snprintf(text, sizeof text, "%s%.*s.0", digits, exp + 1 - n, "0000000000000000");
    else
        snprintf(text, sizeof text, "%.*s.%s", exp + 1, digits, digits + exp + 1);
    return aff__buf_puts(out, text, err);
}

static aff_status put_object(aff_buf *out, const json_t *v, aff_error *err)
{
    const char *between = "{";
    if (json_object_size(v) == 0) return aff__buf_puts(out, "{}", err);
    json_t *o = (json_t *)(uintptr_t)v; /* jansson's iterators take no const */
    for (void *it = json_object_iter(o); it; it = json_object_iter_next(o, it)) {
        const char *key = json_object_iter_key(it);
        AFF_TRY(aff__buf_puts(out, between, err));
        AFF_TRY(aff__json_put_string(out, key, strlen(key), err));
        AFF_TRY(aff__buf_puts(out, ": ", err));
        AFF_TRY(aff__json_dump_python(out, json_object_iter_value(it), err));
        between = ", ";
    }
    return aff__buf_put(out, "}", 1, err);
}

aff_status aff__json_dump_python(aff_buf *out, const json_t *v, aff_error *err)
{
    char number[32];
    const char *s;
    size_t n;
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return put_object(out, v, err);
    case JSON_ARRAY:
        AFF_TRY(aff__buf_put(out, "[", 1, err));
        for (size_t i = 0; i < json_array_size(v); i++) {
            if (i) AFF_TRY(aff__buf_puts(out, ", ", err));
            AFF_TRY(aff__json_dump_python(out, json_array_get(v, i), err));
        }
        return aff__buf_put(out, "]", 1, err);
    case JSON_STRING:
        s = aff__json_literal(v, &n);
        if (s) return aff__buf_put(out, s, n, err);
        return aff__json_put_string(out, json_string_value(v), json_string_length(v), err);
    case JSON_INTEGER:
        snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        return aff__buf_puts(out, number, err);
    case JSON_REAL:
        return put_real(out, json_real_value(v), err);
    case JSON_TRUE:
        return aff__buf_puts(out, "true", err);
    case JSON_FALSE:
        return aff__buf_puts(out, "false", err);
    case JSON_NULL:
        break;
    }
    return aff__buf_puts(out, "null", err);
}
