/* JSON from outside: bounds, positions in errors, typed look-ups. */
#include "support/test.h"
#include "format/json.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

static json_t *parsed(const char *text, size_t n)
{
    json_t *v = NULL;
    aff_error e = {0};
    if (aff__json_parse(&v, text, n, "t", true, &e) != AFF_OK) fail_msg("%.60s: %s", text, e.msg);
    return v;
}

static void refused(const char *text, size_t n, bool unique, const char *message)
{
    json_t *v = (json_t *)1;
    aff_error e = {0};
    aff_status s = aff__json_parse(&v, text, n, "t", unique, &e);
    if (s == AFF_OK) fail_msg("%.60s: accepted", text);
    assert_null(v);
    assert_int_equal(e.code, s);
    if (!strstr(e.msg, message)) fail_msg("'%s' lacks '%s'", e.msg, message);
    assert_int_equal(strncmp(e.msg, "t: ", 3), 0);
}

static void is_string(const char *text, const char *want, size_t n)
{
    json_t *v = parsed(text, strlen(text));
    assert_int_equal(json_string_length(v), n);
    assert_memory_equal(json_string_value(v), want, n);
    json_decref(v);
}

static void strings(void **state)
{
    is_string("\"a\\u0000b\"", "a\0b", 3);
    is_string("\"\\ud800\"", "\xEF\xBF\xBD", 3);                               /* high alone */
    is_string("\"\\udc00x\"", "\xEF\xBF\xBDx", 4);                             /* low alone */
    is_string("\"\\ud83d\\ude00\"", "\xF0\x9F\x98\x80", 4);                    /* a pair */
    is_string("\"\\uD800\\uD83D\\uDE00\"", "\xEF\xBF\xBD\xF0\x9F\x98\x80", 7); /* alone, then a pair */
    is_string("\"\\ud800\\u0041\"",
              "\xEF\xBF\xBD"
              "A",
              4);
    is_string("\"\\\\ud800\"", "\\ud800", 6); /* no escape at all */
    is_string("\"\\\"\\ud800\\\"\"", "\"\xEF\xBF\xBD\"", 5);
    refused("\"\\ud80\"", 7, true, "line 1");
    refused("\"\\ud800", 7, true, "line 1");
    refused("\"\\", 2, true, "line 1");
    refused("\"\\u", 3, true, "line 1");
    refused("\"\xFF\"", 3, true, "unable to decode byte 0xff");
}

static void numbers(void **state)
{
    json_t *v = parsed("[9223372036854775807,-9223372036854775808,1.5]", 46);
    assert_true(json_integer_value(json_array_get(v, 0)) == INT64_MAX);
    assert_true(json_integer_value(json_array_get(v, 1)) == INT64_MIN);
    json_decref(v);
    refused("9223372036854775808", 19, true, "too big integer");
    refused("1e999", 5, true, "overflow");
    refused("01", 2, true, "line 1");
    refused("NaN", 3, true, "line 1");
}

static void positions(void **state)
{
    refused("{\"a\": 1,\n \"b\": }", 16, true, "line 2 column 7");
    refused("1 2", 3, true, "line 1 column 3");
    refused("", 0, true, "line 1 column 0");
    refused("[1]\0", 4, true, "line 1 column 4");
    refused("{\"a\":1,\"a\":2}", 13, true, "duplicate");
    json_t *v = NULL;
    assert_int_equal(aff__json_parse(&v, "{\"a\":1,\"a\":2}", 13, "t", false, NULL), AFF_OK);
    assert_int_equal(json_integer_value(json_object_get(v, "a")), 2);
    json_decref(v);
}

static void bounds(void **state)
{
    char deep[600];
    memset(deep, '[', 257);
    refused(deep, 257, true, "line 1 column 257: nested deeper than 256 levels");
    memset(deep, '[', 256);
    memset(deep + 256, ']', 256);
    json_decref(parsed(deep, 512));
    memset(deep, ' ', 600); /* brackets in strings do not count */
    memset(deep + 1, '[', 500);
    deep[0] = '"', deep[501] = '"';
    json_decref(parsed(deep, 600));
    size_t n = (16 << 20) + 16;
    char *text = malloc(n);
    assert_non_null(text);
    memset(text, 'a', n);
    memcpy(text, "[\n \"", 4);
    memcpy(text + n - 2, "\"]", 2);
    refused(text, n, true, "line 2 column 2: string longer than 16777216 bytes");
    n -= 16;
    memcpy(text + n - 2, "\"]", 2);
    json_decref(parsed(text, n));
    refused(text, (size_t)256 * 1024 * 1024 + 1, true,
            "at most 268435456 are accepted"); /* refused before it is read */
    free(text);
}

static void look_ups(void **state)
{
    static const char text[] = "{\"i\":5,\"r\":2.5,\"s\":\"x\\u0000y\",\"n\":null,\"a\":[]}";
    json_t *o = parsed(text, strlen(text));
    aff_error e = {0};
    int64_t i = 77;
    double d = 0;
    const char *s;
    size_t n;
    assert_int_equal(aff__json_int(o, "cfg", "i", 0, 5, &i, &e), AFF_OK);
    assert_int_equal(i, 5);
    assert_int_equal(aff__json_int(o, "cfg", "i", 0, 4, &i, &e), AFF_E_FORMAT);
    assert_string_equal(e.msg, "cfg: key 'i': expected 0 to 4, got 5");
    assert_int_equal(aff__json_int(o, "cfg", "x", 0, 4, &i, &e), AFF_E_FORMAT);
    assert_string_equal(e.msg, "cfg: key 'x' is missing: expected an integer");
    assert_int_equal(aff__json_int(o, "cfg", "r", 0, 4, &i, &e), AFF_E_FORMAT);
    assert_string_equal(e.msg, "cfg: key 'r': expected an integer, got a real number");
    assert_int_equal(aff__json_int(o, "cfg", "n", 0, 4, &i, &e), AFF_E_FORMAT);
    assert_string_equal(e.msg, "cfg: key 'n': expected an integer, got null");
    i = 77;
    assert_int_equal(aff__json_int_opt(o, "cfg", "x", 0, 4, &i, &e), AFF_OK);
    assert_int_equal(aff__json_int_opt(o, "cfg", "n", 0, 4, &i, &e), AFF_OK);
    assert_int_equal(i, 77);
    assert_int_equal(aff__json_int_opt(o, "cfg", "a", 0, 4, &i, &e), AFF_E_FORMAT);
    assert_int_equal(aff__json_num(o, "cfg", "i", &d, &e), AFF_OK);
    assert_true(d == 5.0);
    assert_int_equal(aff__json_num_opt(o, "cfg", "r", &d, &e), AFF_OK);
    assert_true(d == 2.5);
    assert_int_equal(aff__json_num_opt(o, "cfg", "x", &d, &e), AFF_OK);
    assert_int_equal(aff__json_num(o, "cfg", "s", &d, &e), AFF_E_FORMAT);
    assert_string_equal(e.msg, "cfg: key 's': expected a number, got a string");
    assert_int_equal(aff__json_str(o, "cfg", "s", &s, &n, &e), AFF_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(s, "x\0y", 3);
    assert_int_equal(aff__json_str(o, "cfg", "i", &s, &n, &e), AFF_E_FORMAT);
    assert_int_equal(aff__json_str(json_array_get(o, 0), "cfg", "i", &s, &n, &e), AFF_E_FORMAT);
    json_decref(o);
}

/* ---- exact values, and Python's spelling ---- */

static void dumps_as(const char *text, const char *want)
{
    json_t *v = NULL;
    aff_error e = {0};
    aff_buf b = {0};
    if (aff__json_parse_exact(&v, text, strlen(text), "t", true, 256, &e) != AFF_OK) fail_msg("%s: %s", text, e.msg);
    assert_int_equal(aff__json_dump_python(&b, v, &e), AFF_OK);
    assert_string_equal(b.s, want);
    aff__buf_free(&b);
    json_decref(v);
}

static void not_exact(const char *text, bool python, int depth, const char *message)
{
    json_t *v = (json_t *)1;
    aff_error e = {0};
    assert_int_equal(aff__json_parse_exact(&v, text, strlen(text), "t", python, depth, &e), AFF_E_FORMAT);
    assert_null(v);
    if (!strstr(e.msg, message)) fail_msg("'%s' lacks '%s'", e.msg, message);
}

static void long_numbers(void **state)
{
    json_t *v = NULL;
    size_t n = 0;
    dumps_as("[9223372036854775807,9223372036854775808,-9223372036854775808,-9223372036854775809]",
             "[9223372036854775807, 9223372036854775808, -9223372036854775808, -9223372036854775809]");
    dumps_as("{\"a\":18446744073709551616,\"b\":[1000000000000000000000000]}",
             "{\"a\": 18446744073709551616, \"b\": [1000000000000000000000000]}");
    dumps_as("[NaN,Infinity,-Infinity,1e400,-1e400,1e-400]", "[NaN, Infinity, -Infinity, Infinity, -Infinity, 0.0]");
    dumps_as("99999999999999999999", "99999999999999999999");
    /* No string passes for such a number. */
    dumps_as("[\"\\u00009\",\"\\u0000\",\"\\u0000\\u0000\",1e999,\"x\\u00001\"]",
             "[\"\\u00009\", \"\\u0000\", \"\\u0000\\u0000\", Infinity, \"x\\u00001\"]");
    assert_int_equal(aff__json_parse_exact(&v, "{\"k\":9223372036854775808}", 25, "t", false, 64, NULL), AFF_OK);
    const json_t *k = json_object_get(v, "k");
    assert_memory_equal(aff__json_literal(k, &n), "9223372036854775808", 20);
    assert_int_equal(n, 19);
    assert_false(aff__json_is_text(k));
    aff_error e = {0};
    const char *s;
    assert_int_equal(aff__json_str(v, "t", "k", &s, NULL, &e), AFF_E_FORMAT);
    assert_string_equal(e.msg, "t: key 'k': expected a string, got a number out of range");
    json_decref(v);
    not_exact("NaN", false, 64, "line 1");
    not_exact("[1e400]", false, 64, "overflow");
    not_exact("[123456789012345678901,]", true, 64, "line 1");
    not_exact("012345678901234567890", true, 64, "line 1");
    not_exact("[[[1]]]", true, 2, "nested deeper than 2 levels");
    not_exact("{\"a\":\n12345678901234567890\n1}", true, 64, "line 3");
    not_exact("{\"\\u0000\":1}", true, 64, "NUL");
}

static void python_spelling(void **state)
{
    dumps_as(" { \"b\" :1 , \"a\":[ ] ,\"c\":{ },\"b\":null}", "{\"b\": null, \"a\": [], \"c\": {}}");
    dumps_as("[true,false,-0,-0.0,0.0]", "[true, false, 0, -0.0, 0.0]");
    dumps_as("\"\\u00e9\\/\\\"\\\\\\n\\r\\t\\b\\f\\u0001\\u001f\\u007f\\u2028\\ud83d\\ude80\\ud800\"",
             "\"\xC3\xA9/\\\"\\\\\\n\\r\\t\\b\\f\\u0001\\u001f\x7F\xE2\x80\xA8\xF0\x9F\x9A\x80\xEF\xBF\xBD\"");
    dumps_as("[1.0,1.50,1E5,1e-7,1e16,1e15,123456789012345680.0,0.0001,0.00001,1.5e-5]",
             "[1.0, 1.5, 100000.0, 1e-07, 1e+16, 1000000000000000.0, 1.2345678901234568e+17, 0.0001, 1e-05, 1.5e-05]");
    dumps_as(
        "[5e-324,1.7976931348623157e308,2.2250738585072014e-308,0.1,0.30000000000000004,1e22,1e23,1e100]",
        "[5e-324, 1.7976931348623157e+308, 2.2250738585072014e-308, 0.1, 0.30000000000000004, 1e+22, 1e+23, 1e+100]");
    /* Powers of two, where the nearest decimal of 16 digits does not read back but its neighbour does. */
    dumps_as("[5.684341886080801486968994140625e-14,9007199254740992.0,9007199254740994.0]",
             "[5.684341886080802e-14, 9007199254740992.0, 9007199254740994.0]");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(strings),      cmocka_unit_test(numbers),
                                       cmocka_unit_test(long_numbers), cmocka_unit_test(python_spelling),
                                       cmocka_unit_test(positions),    cmocka_unit_test(bounds),
                                       cmocka_unit_test(look_ups)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
