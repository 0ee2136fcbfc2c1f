/* grammar: texts that a schema allows and refuses. Each text is fed byte by byte. */
#include "support/test.h"
#include "format/json.h"
#include "words.h"

static aff_vocab *vocab;

static int setup(void **state)
{
    vocab = words(true);
    return 0;
}

static int teardown(void **state)
{
    aff__vocab_free(vocab);
    return 0;
}

static json_t *parse(const char *text)
{
    json_t *v = NULL;
    aff_error err = {0};
    if (aff__json_parse_exact(&v, text, strlen(text), "schema", false, 64, &err) != AFF_OK)
        fail_msg("%s: %s", text, err.msg);
    return v;
}

static aff_grammar *compile(const aff_grammar_request *r)
{
    aff_grammar *g;
    aff_error err = {0};
    if (aff__grammar_compile(&g, vocab, r, &err) != AFF_OK) fail_msg("%s", err.msg);
    return g;
}

/* Whether the whole text is an answer. */
static bool accepts(const aff_grammar *g, const char *text)
{
    aff_matcher *m;
    aff_error err = {0};
    if (aff__matcher_create(&m, g, &err) != AFF_OK) fail_msg("%s", err.msg);
    const aff_match s = follow(m, aff__matcher_start(m), text, strlen(text), true);
    const bool ok = s && aff__matcher_complete(m, s);
    aff__matcher_free(m);
    return ok;
}

/* Texts up to NULL. */
static void check(const char *schema, const char *const *yes, const char *const *no)
{
    json_t *v = parse(schema);
    const aff_grammar_request r = {.schema = v};
    aff_grammar *g = compile(&r);
    for (; *yes; yes++)
        if (!accepts(g, *yes)) fail_msg("%s: refuses %s", schema, *yes);
    for (; *no; no++)
        if (accepts(g, *no)) fail_msg("%s: accepts %s", schema, *no);
    aff__grammar_free(g);
    json_decref(v);
}
#define YES(...)                                                                                                       \
    (const char *const[])                                                                                              \
    {                                                                                                                  \
        __VA_ARGS__, NULL                                                                                              \
    }
#define NO(...)                                                                                                        \
    (const char *const[])                                                                                              \
    {                                                                                                                  \
        __VA_ARGS__, NULL                                                                                              \
    }

static void any_json(void **state)
{
    check("true",
          YES("null", "true", "false", "0", "-0", "-12.5e-7", "1E+9", "\"\"", "[]", "{}", "[ ]", "{ }",
              "[1, \"a\", [null], {}]", "{\"a\": {\"b\": [1,2]}, \"\": 3}", "{\n  \"a\":1,\n  \"a\": 2\n}",
              "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00\"", "\"\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80\x7F\"",
              "123456789012345678901234567890", "1e99"),
          NO("", " 1", "1 ", "01", "1.", ".5", "+1", "- 1", "1e", "tru", "True", "\"", "\"\n\"", "\"\t\"", "'a'",
             "[1,]", "[,1]", "{,}", "{\"a\"}", "{\"a\":}", "{a: 1}", "[1 2]", "\"\\x\"", "\"\\u12\"", "\"\\ud83d\"",
             "\"\\ud83dx\"", "\"\\ude00\"", "\"\\u0000\"", "\"\xC3\"", "\"\xC0\x80\"", "\"\xED\xA0\x80\"",
             "\"\xF4\x90\x80\x80\"", "\"\xFF\"", "nullnull", "1e100", "NaN", "[1]]", "/**/1"));
    check("{\"type\": \"object\"}", YES("{}", "{\"x\": [1, {\"y\": null}]}"), NO("[]", "1", "null"));
}

static void objects(void **state)
{
    check("{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}, \"age\": {\"type\": "
          "\"integer\"}}, \"required\": [\"name\"], \"additionalProperties\": false}",
          YES("{\"name\": \"a\"}", "{\"name\":\"a\",\"age\":3}", "{ \"name\": \"\", \"age\": -7 }",
              "{\n    \"name\": \"x\",\n    \"age\": 1\n}"),
          NO("{}", "{\"age\": 3}", "{\"age\": 3, \"name\": \"a\"}", "{\"name\": 1}", "{\"name\": \"a\", \"x\": 1}",
             "{\"name\": \"a\", \"name\": \"b\"}", "{\"name\": \"a\",}", "{\"name\": \"a\", \"age\": 1.5}"));
    check("{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"null\"}, \"b\": {}, \"ab\": {\"type\": "
          "\"null\"}}, \"required\": [\"b\"], \"additionalProperties\": {\"type\": \"integer\"}}",
          YES("{\"b\": \"x\"}", "{\"a\": null, \"b\": []}", "{\"b\": 1, \"c\": 1}",
              "{\"b\": 1, \"ab\": null, \"abc\": 1, \"\": 2}", "{\"b\": 1, \"\xC3\xA9\": 1}",
              "{\"b\": 1, \"c\\u0041\": 1}"),
          NO("{\"a\": null}", "{\"b\": 1, \"a\": 1}", "{\"b\": 1, \"ab\": 1}", "{\"b\": 1, \"c\": null}",
             "{\"b\": 1, \"\\u0061b\": 1}", "{\"c\": 1, \"b\": 1}", "{\"b\": 1, \"\xC3\": 1}"));
    check("{\"type\": \"object\", \"required\": [\"z\"], \"properties\": {\"\xC3\xA9\": true, \"\xC3\xA8x\": true}}",
          YES("{\"z\": 1}", "{\"\xC3\xA9\": 2, \"z\": 1, \"\xC3\xAA\": 1, \"\xC3\xA9y\": 1, \"\xC4\xA9\": 1}"),
          NO("{}", "{\"z\": 1, \"\xC3\xA9\": 2}", "{\"z\": 1, \"\xC3\xA8x\": 2}"));
    check("{\"type\": \"object\", \"properties\": {\"q\\\"\\\\\\n\": {\"const\": 1}}, \"additionalProperties\": false}",
          YES("{}", "{\"q\\\"\\\\\\n\": 1}"), NO("{\"q\": 1}"));
    check("{\"properties\": {\"no\": false, \"a\": {\"const\": 1}}, \"type\": \"object\", \"additionalProperties\": "
          "false}",
          YES("{}", "{\"a\": 1}"), NO("{\"no\": 1}"));
}

static void arrays(void **state)
{
    check("{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"minItems\": 2, \"maxItems\": 3}",
          YES("[true, false]", "[true,true,\n true]"), NO("[]", "[true]", "[true, true, true, true]", "[1, 2]"));
    check("{\"type\": \"array\", \"prefixItems\": [{\"const\": 1}, {\"const\": \"b\"}], \"items\": {\"type\": "
          "\"null\"}, \"minItems\": 1}",
          YES("[1]", "[1, \"b\"]", "[1, \"b\", null, null]"), NO("[]", "[\"b\"]", "[1, null]", "[1, \"b\", 2]"));
    check("{\"type\": \"array\", \"prefixItems\": [{\"const\": 1}, {\"const\": 2}], \"items\": false}",
          YES("[]", "[1]", "[1, 2]"), NO("[1, 2, 3]", "[2]"));
    check("{\"type\": \"array\", \"maxItems\": 0}", YES("[]", "[ ]"), NO("[1]"));
    check("{\"type\": \"array\", \"items\": [{\"const\": 1}], \"additionalItems\": {\"const\": 2}, \"maxItems\": 2, "
          "\"minItems\": 2}",
          YES("[1, 2]"), NO("[1]", "[1, 1]", "[1, 2, 2]"));
}

static void numbers(void **state)
{
    check("{\"type\": \"integer\"}", YES("0", "-5", "18446744073709551615", "340282366920938463463374607431768211456"),
          NO("1.0", "1e3", "00", "-"));
    check("{\"type\": \"integer\", \"minimum\": -12, \"maximum\": 105}",
          YES("-12", "-1", "0", "9", "10", "99", "100", "105"), NO("-13", "106", "-0", "1000", "-20", "110", "007"));
    check("{\"type\": \"integer\", \"exclusiveMinimum\": 99, \"exclusiveMaximum\": 1000}", YES("100", "999"),
          NO("99", "1000", "5"));
    check("{\"type\": \"integer\", \"minimum\": 18446744073709551615, \"maximum\": 18446744073709551617}",
          YES("18446744073709551615", "18446744073709551617"),
          NO("18446744073709551614", "18446744073709551618", "2", "28446744073709551615"));
    check("{\"type\": \"integer\", \"minimum\": 1}", YES("1", "9", "10", "123456"), NO("0", "-1"));
    check("{\"type\": \"integer\", \"maximum\": -1}", YES("-1", "-10", "-99999"), NO("0", "1", "-0"));
    check("{\"type\": \"integer\", \"minimum\": 2.5, \"maximum\": 3.5}", YES("3"), NO("2", "4", "3.0"));
    check("{\"type\": \"integer\", \"minimum\": -3.5, \"exclusiveMaximum\": 0}", YES("-3", "-1"), NO("-4", "0"));
    check("{\"type\": \"number\", \"minimum\": -0.5, \"maximum\": 1.25}",
          YES("0", "1", "1.25", "1.2", "1.24999", "-0.5", "-0.1", "0.75", "1.250"),
          NO("1.26", "1.251", "-0.51", "2", "-1", "1e0", "."));
    check("{\"type\": \"number\", \"exclusiveMinimum\": 0, \"exclusiveMaximum\": 1}", YES("0.1", "0.01", "0.999"),
          NO("0", "1", "0.0", "-0.5", "1.0"));
    check("{\"type\": \"number\", \"minimum\": 10}", YES("10", "10.0", "10.5", "11", "99.9", "1000"),
          NO("9", "9.99", "-10", "1"));
    check("{\"type\": \"number\", \"minimum\": 1e3, \"maximum\": 2.5e3}", YES("1000", "1999.5", "2500"),
          NO("999", "2500.1", "3000"));
    check("{\"type\": \"number\", \"minimum\": 5, \"exclusiveMinimum\": true}", YES("6", "5.1"), NO("5", "5.0"));
    check("{\"type\": \"number\", \"multipleOf\": 1}", YES("3"), NO("3.5"));
}

static void strings(void **state)
{
    check("{\"type\": \"string\", \"minLength\": 2, \"maxLength\": 3}",
          YES("\"ab\"", "\"abc\"", "\"\xC3\xA9\xE4\xBD\xA0\"", "\"\\n\\u00e9\"", "\"\\ud83d\\ude00x\"",
              "\"\xF0\x9F\x98\x80\xF0\x9F\x98\x80\""),
          NO("\"\"", "\"a\"", "\"abcd\"", "\"\\ud83d\\ude00\""));
    check("{\"type\": \"string\", \"pattern\": \"^[a-c]+-\\\\d{2,3}$\"}", YES("\"abc-12\"", "\"a-123\""),
          NO("\"-12\"", "\"a-1\"", "\"a-1234\"", "\"d-12\"", "\" a-12\""));
    check("{\"type\": \"string\", \"pattern\": \"b\"}",
          YES("\"b\"", "\"abc\"",
              "\"\xC3\xA9"
              "b\\n\""),
          NO("\"a\"", "\"\""));
    check("{\"type\": \"string\", \"pattern\": \"^a|b$\"}", YES("\"a\"", "\"ax\"", "\"xb\""), NO("\"xa\"", "\"bx\""));
    check("{\"type\": \"string\", \"pattern\": \"^(?:x\\\"|\\\\\\\\|\\\\t)*$\"}",
          YES("\"\"", "\"x\\\"\"", "\"\\\\\"", "\"\\t\\\\\""), NO("\"x\"", "\"\\u0009\""));
    check("{\"type\": \"string\", \"pattern\": \"^[^a-z\\\\s]?.$\", \"minLength\": 2}", YES("\"Ax\"", "\"\xC3\xA9z\""),
          NO("\"x\"", "\"ax\"", "\" x\""));
    check("{\"type\": \"string\", \"pattern\": \"^(ab)+$\", \"minLength\": 3, \"maxLength\": 5}", YES("\"abab\""),
          NO("\"ab\"", "\"ababab\""));
    check("{\"type\": \"string\", \"pattern\": \"^[\\u4e00-\\u9fff]{1,2}$\"}",
          YES("\"\xE4\xBD\xA0\"", "\"\xE4\xBD\xA0\xE5\xA5\xBD\""), NO("\"a\"", "\"\xE3\x81\x82\""));
    check("{\"type\": \"string\", \"pattern\": \"^a{0}b{2}c{1,}d??$\"}", YES("\"bbc\"", "\"bbccd\""),
          NO("\"abbc\"", "\"bb\"", "\"bbcdd\""));
    check("{\"type\": \"string\", \"format\": \"date\"}", YES("\"2024-02-29\"", "\"2000-02-29\"", "\"1999-12-31\""),
          NO("\"2023-02-29\"", "\"1900-02-29\"", "\"2024-13-01\"", "\"2024-04-31\"", "\"0000-01-01\""));
    check("{\"type\": \"string\", \"format\": \"date-time\"}",
          YES("\"2024-02-29T23:59:59Z\"", "\"2024-01-01T00:00:00.5+01:00\""),
          NO("\"2024-01-01\"", "\"2024-01-01T24:00:00Z\"", "\"2024-01-01T00:00:00\""));
    check("{\"type\": \"string\", \"format\": \"uuid\"}", YES("\"123e4567-e89b-12d3-a456-426614174000\""),
          NO("\"123e4567e89b12d3a456426614174000\""));
    check("{\"type\": \"string\", \"format\": \"email\"}", YES("\"a.b@example.com\""),
          NO("\"a\"", "\"@b.c\"", "\"a@\"", "\"a b@c.d\""));
    check("{\"type\": \"string\", \"format\": \"ipv4\"}", YES("\"255.0.10.1\""),
          NO("\"256.0.0.1\"", "\"1.2.3\"", "\"01.2.3.4\""));
    check("{\"type\": \"string\", \"format\": \"uri\"}", YES("\"https://example.com/a?b=c#d\""),
          NO("\"example\"", "\"http://a b\""));
}

static void combinations(void **state)
{
    check("{\"type\": [\"string\", \"null\"]}", YES("\"a\"", "null"), NO("1"));
    check("{\"type\": \"string\", \"nullable\": true}", YES("\"a\"", "null"), NO("1"));
    check("{\"enum\": [\"a\\\"b\", 1, null, {\"k\": [1, 2]}, 18446744073709551616, 1.5]}",
          YES("\"a\\\"b\"", "1", "null", "{\"k\": [1, 2]}", "18446744073709551616", "1.5"),
          NO("\"a\"", "2", "{\"k\": [1]}", "18446744073709551617"));
    check("{\"type\": \"integer\", \"enum\": [1, 2, \"x\", 30], \"maximum\": 10}", YES("1", "2"), NO("30", "\"x\""));
    check("{\"const\": \"on\"}", YES("\"on\""), NO("\"off\"", "on"));
    check("{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}}, \"required\": "
          "[\"a\"], \"additionalProperties\": false}, {\"type\": \"object\", \"properties\": {\"a\": {\"type\": "
          "\"string\"}, \"b\": {\"type\": \"null\"}}, \"required\": [\"a\"], \"additionalProperties\": false}]}",
          YES("{\"a\": 1}", "{\"a\": \"x\"}", "{\"a\": \"x\", \"b\": null}"),
          NO("{}", "{\"a\": 1, \"b\": null}", "{\"a\": null}"));
    check("{\"oneOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"x\"}, \"v\": {\"type\": "
          "\"integer\"}}, \"required\": [\"k\", \"v\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": "
          "\"y\"}}, \"required\": [\"k\"]}, {\"type\": \"null\"}]}",
          YES("{\"k\": \"x\", \"v\": 1}", "{\"k\": \"y\", \"v\": \"z\"}", "null"),
          NO("{\"k\": \"x\"}", "{\"k\": \"z\"}"));
    check("{\"allOf\": [{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\", \"minimum\": 0}}}, "
          "{\"properties\": {\"a\": {\"maximum\": 5}, \"b\": {\"type\": \"null\"}}, \"required\": [\"b\"]}]}",
          YES("{\"a\": 5, \"b\": null}", "{\"b\": null}"),
          NO("{\"a\": 6, \"b\": null}", "{\"a\": -1, \"b\": null}", "{\"a\": 1}"));
    check("{\"type\": \"object\", \"properties\": {\"a\": true, \"b\": true}, \"additionalProperties\": false, "
          "\"anyOf\": [{\"required\": [\"a\"]}, {\"required\": [\"b\"]}]}",
          YES("{\"a\": 1}", "{\"b\": 1}", "{\"a\": 1, \"b\": 2}"), NO("{}"));
    check("{\"$defs\": {\"n\": {\"type\": \"object\", \"properties\": {\"v\": {\"type\": \"integer\"}, \"next\": "
          "{\"anyOf\": [{\"$ref\": \"#/$defs/n\"}, {\"type\": \"null\"}]}}, \"required\": [\"v\", \"next\"], "
          "\"additionalProperties\": false}}, \"$ref\": \"#/$defs/n\"}",
          YES("{\"v\": 1, \"next\": null}", "{\"v\": 1, \"next\": {\"v\": 2, \"next\": {\"v\": 3, \"next\": null}}}"),
          NO("{\"v\": 1}", "{\"v\": 1, \"next\": {}}", "{\"v\": 1, \"next\": {\"v\": 2, \"next\": null}"));
    check("{\"type\": \"array\", \"items\": {\"$ref\": \"#\"}}", YES("[]", "[[], [[]]]"), NO("[1]", "[[]"));
    check("{\"definitions\": {\"a b/c~\": {\"const\": 1}}, \"$ref\": \"#/definitions/a%20b~1c~0\"}", YES("1"), NO("2"));
}

static void depth(void **state)
{
    /* Deep, but not without end; the way down is refused only where no way up would be left. */
    json_t *v = parse("{\"$defs\": {\"n\": {\"type\": \"array\", \"items\": {\"$ref\": \"#/$defs/n\"}, \"maxItems\": "
                      "1}}, \"$ref\": \"#/$defs/n\"}");
    const aff_grammar_request r = {.schema = v};
    aff_grammar *g = compile(&r);
    aff_matcher *m;
    aff_error err = {0};
    assert_int_equal(aff__matcher_create(&m, g, &err), AFF_OK);
    aff_match s = aff__matcher_start(m), next;
    int n = 0;
    for (; (next = aff__matcher_step(m, s, W_BYTES + '[')); n++) s = next;
    assert_in_range(n, 64, 256);
    for (int i = 0; i < n; i++) assert_true(s = aff__matcher_step(m, s, W_BYTES + ']'));
    assert_true(aff__matcher_complete(m, s));
    aff__matcher_free(m);
    aff__grammar_free(g);
    json_decref(v);
}

static void refused(void **state)
{
    static const struct {
        const char *schema, *says;
    } cases[] = {
        {"{\"type\": \"object\", \"properties\": {\"a/b\": {\"not\": {}}}}", "'not' at #/properties/a~1b"},
        {"{\"type\": \"array\", \"items\": {\"type\": \"array\", \"uniqueItems\": true}}", "'uniqueItems' at #/items"},
        {"{\"anyOf\": [{\"type\": \"null\"}, {\"if\": {}}]}", "'if' at #/anyOf/1"},
        {"{\"type\": \"object\", \"patternProperties\": {\"a\": {}}}", "'patternProperties' at #:"},
        {"{\"frobnicate\": 1}", "'frobnicate' at #:"},
        {"{\"type\": \"strin\"}", "'type' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"(?=a)\"}", "'pattern' at #: look-around"},
        {"{\"type\": \"string\", \"pattern\": \"a\\\\b\"}", "'pattern' at #: \\b"},
        {"{\"type\": \"string\", \"pattern\": \"[a\"}", "'pattern' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"(a\"}", "'pattern' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"a)\"}", "'pattern' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"(a\\\\1)\"}", "'pattern' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"a\\\\\"}", "'pattern' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"*\"}", "'pattern' at #:"},
        {"{\"type\": \"string\", \"pattern\": \"(a|b)*a(a|b){20}\"}", "'pattern' at #: too complex"},
        {"{\"type\": \"string\", \"pattern\": \"((a{50}){50}){50}\"}", "'pattern' at #: too large"},
        {"{\"type\": \"string\", \"format\": \"iri\"}", "'format' at #: 'iri'"},
        {"{\"oneOf\": [{\"type\": \"integer\"}, {\"type\": \"number\"}]}", "'oneOf' at #: one value"},
        {"{\"$ref\": \"#/$defs/a\"}", "'$ref' at #:"},
        {"{\"$ref\": \"https://example.com/a\"}", "'$ref' at #:"},
        {"{\"$ref\": \"#\"}", "refers to itself"},
        {"{\"anyOf\": [{\"$ref\": \"#\"}, {\"type\": \"null\"}]}", "refers to itself"},
        {"{\"type\": \"object\", \"properties\": {\"a\": {\"$ref\": \"#\"}}, \"required\": [\"a\"]}", "no value fits"},
        {"false", "no value fits"},
        {"{\"type\": \"integer\", \"minimum\": 3, \"maximum\": 2}", "no value fits"},
        {"{\"type\": \"string\", \"minLength\": 3, \"maxLength\": 2}", "no value fits"},
        {"{\"type\": \"number\", \"multipleOf\": 0.01}", "'multipleOf' at #:"},
        {"{\"type\": \"string\", \"minLength\": -1}", "'minLength' at #:"},
        {"{\"type\": \"string\", \"minLength\": 1.5}", "'minLength' at #:"},
        {"{\"enum\": 3}", "'enum' at #:"},
        {"{\"properties\": []}", "'properties' at #:"},
        {"{\"properties\": {\"a\": 3}}", "'a' at #/properties:"},
        {"{\"items\": 3}", "'items' at #:"},
        {"{\"allOf\": []}", "'allOf' at #:"},
        {"{\"allOf\": [{\"pattern\": \"a\"}, {\"pattern\": \"b\"}]}", "'pattern'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *v = parse(cases[i].schema);
        aff_error err = {0};
        aff_grammar *g;
        const aff_grammar_request r = {.schema = v, .name = "format"};
        if (aff__grammar_compile(&g, vocab, &r, &err) != AFF_E_INVALID) fail_msg("%s: not refused", cases[i].schema);
        if (!strstr(err.msg, cases[i].says)) fail_msg("%s: %s", cases[i].schema, err.msg);
        assert_null(g);
        json_decref(v);
    }
}

/* Large, but not without end: what is refused is so at once. */
static void large(void **state)
{
    static char text[1 << 20];
    size_t n = 0;
    json_t *v;
    aff_grammar *g;
    aff_error err = {0};
    n = (size_t)sprintf(text, "{\"$ref\": \"#/$defs/d0\", \"$defs\": {\"d1000\": {}");
    for (int i = 0; i < 1000; i++)
        n += (size_t)sprintf(
            text + n, ", \"d%d\": {\"type\": \"array\", \"items\": {\"$ref\": \"#/$defs/d%d\"}, \"minItems\": 1}", i,
            i + 1);
    strcpy(text + n, "}}");
    v = parse(text);
    assert_int_equal(aff__grammar_compile(&g, vocab, &(aff_grammar_request){.schema = v}, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "too deep"));
    json_decref(v);
    n = (size_t)sprintf(text, "{\"type\": \"object\", \"additionalProperties\": false, \"properties\": {\"a\": true");
    for (int i = 0; i < 999; i++) n += (size_t)sprintf(text + n, ", \"property %d\": {\"type\": \"integer\"}", i);
    strcpy(text + n, "}}");
    check(text,
          YES("{}", "{\"a\": 1, \"property 998\": 1}", "{\"property 7\": 1, \"property 77\": 2, \"property 777\": 3}"),
          NO("{\"property 999\": 1}", "{\"property 7\": 1, \"property 6\": 2}"));
    n -= 1;
    strcpy(text + n, "}, \"b\": true}}");
    v = parse(text);
    assert_int_equal(aff__grammar_compile(&g, vocab, &(aff_grammar_request){.schema = v}, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "'properties' at #: expected at most 1000, got 1001"));
    json_decref(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_json), cmocka_unit_test(objects), cmocka_unit_test(arrays),
        cmocka_unit_test(numbers),  cmocka_unit_test(strings), cmocka_unit_test(combinations),
        cmocka_unit_test(depth),    cmocka_unit_test(refused), cmocka_unit_test(large)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
