/* Output parsers: DeepSeek's strict one line by line, ours by its rules and over every split. */
#include "support/test.h"
#include "support/chat_fixtures.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

#define EOS "<｜end▁of▁sentence｜>"
#define O   "<｜DSML｜"
#define C   "</｜DSML｜"

static json_t *parsed(const char *text)
{
    json_t *v = NULL;
    aff_error e = {0};
    if (aff__json_parse_exact(&v, text, strlen(text), "test", true, 256, &e) != AFF_OK) fail_msg("%s: %s", text, e.msg);
    return v;
}

/* ---- the strict parser ---- */

static void equal_text(const char *id, const char *what, const json_t *want, const aff_buf *got)
{
    size_t n = json_string_length(want);
    if (n != got->n || (n && memcmp(json_string_value(want), got->s, n) != 0))
        fail_msg("%s: %s: expected '%s', got '%.*s'", id, what, json_string_value(want), (int)got->n,
                 got->s ? got->s : "");
}

static void strict(void **state)
{
    json_t *lines = aff_test_chat_lines("parse.jsonl"), *line;
    size_t i, k;
    assert_int_equal(json_array_size(lines), 173);
    json_array_foreach(lines, i, line)
    {
        const char *id = json_string_value(json_object_get(line, "id"));
        const json_t *text = json_object_get(line, "completion"), *want = json_object_get(line, "expected"),
                     *calls = json_object_get(want, "tool_calls");
        const char *mode = json_string_value(json_object_get(json_object_get(line, "options"), "thinking_mode")),
                   *error = json_string_value(json_object_get(line, "error"));
        bool v41 = strcmp(json_string_value(json_object_get(line, "model")), "v4.1") == 0;
        aff_strict r;
        json_t *call;
        assert_int_equal(aff__parse_strict(&r, json_string_value(text), json_string_length(text),
                                           strcmp(mode, "chat") != 0, v41, NULL),
                         AFF_OK);
        if (error ? !r.exception || strcmp(error, r.exception) != 0 : r.exception != NULL)
            fail_msg("%s: expected %s, got %s", id, error ? error : "no error", r.exception ? r.exception : "none");
        if (!error) {
            equal_text(id, "content", json_object_get(want, "content"), &r.content);
            equal_text(id, "reasoning", json_object_get(want, "reasoning_content"), &r.reasoning);
            assert_int_equal(r.n_calls, json_array_size(calls));
            json_array_foreach(calls, k, call)
            {
                equal_text(id, "name", json_object_get(call, "name"), &r.call[k].name);
                equal_text(id, "arguments", json_object_get(call, "arguments"), &r.call[k].arguments);
            }
        }
        aff__strict_free(&r);
    }
    json_decref(lines);
}

/* ---- the tolerant one ---- */

/* Events of s[0..n), cut at a and b. */
static void run(aff_test_log *log, bool thinking, const json_t *tools, const char *s, size_t n, size_t a, size_t b,
                bool eos)
{
    aff_parser *p;
    aff_error e = {0};
    *log = (aff_test_log){0};
    assert_int_equal(aff__parser_create(&p, thinking, tools, aff_test_log_event, log, &e), AFF_OK);
    assert_int_equal(aff__parser_feed(p, s, a, &e), AFF_OK);
    assert_int_equal(aff__parser_feed(p, s + a, b - a, &e), AFF_OK);
    assert_int_equal(aff__parser_feed(p, s + b, n - b, &e), AFF_OK);
    assert_int_equal(aff__parser_end(p, eos, &e), AFF_OK);
    aff__parser_free(p);
    assert_false(log->wrong);
    assert_false(log->open);
}

/* The arguments of every complete call are JSON objects. */
static void arguments_are_json(const char *id, const aff_test_log *log)
{
    for (const char *p = log->text.s; p && (p = strstr(p, "\x01"
                                                          "A:")) != NULL;) {
        const char *end = strchr(p += 3, 1);
        assert_non_null(end);
        json_t *v = NULL;
        aff_error e = {0};
        if (strncmp(end + 1, "END", 3) != 0) continue;
        if (aff__json_parse_exact(&v, p, (size_t)(end - p), id, false, 256, &e) != AFF_OK || !json_is_object(v))
            fail_msg("%s: arguments '%.*s': %s", id, (int)(end - p), p, e.msg);
        json_decref(v);
    }
}

static const char tools_json[] = "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":"
                                 "\"object\",\"properties\":{\"s\":{\"type\":\"string\"},"
                                 "\"n\":{\"type\":\"integer\"}},\"required\":[\"s\"]}}},{\"name\":\"ping\"}]";

static const struct {
    const char *name, *tools; /* NULL: any; "T": those above; "[]": none */
    bool chat, cut;           /* cut: no end of sequence came */
    const char *text, *events;
} cases[] = {
    {"plain", NULL, false, false, "think</think>answer", "\1R:think\1T:answer"},
    {"nothing is trimmed", NULL, false, false, "\n a \n</think>\n\nb\n\n", "\1R:\n a \n\1T:\n\nb\n\n"},
    {"held text is released", "T", true, false, "2 <", "\1T:2 <"},
    {"held newlines are released", "T", true, false, "a\r\n\r\n\r\n\n\r", "\1T:a\r\n\r\n\r\n\n\r"},
    {"a part of a mark is text", "T", true, false, "a</thin b<think c<", "\1T:a</thin b<think c<"},
    {"a cut mark does not leak", "T", true, true, "a\n\n<｜DSML｜tool_", "\1T:a"},
    {"a cut control token does not leak", NULL, true, true, "a<｜end▁of", "\1T:a"},
    {"doubled closers", NULL, false, false, "a</think></think>b</think>c", "\1R:a\1T:bc"},
    {"opener at the start only", NULL, false, false, "<think>a</think><think>b <think> c", "\1R:a\1T:b <think> c"},
    {"control tokens", NULL, false, false, "a<｜User｜>b</think>c<｜Assistant｜>d<｜foo｜>" EOS,
     "\1R:ab\1T:cd<｜foo｜>"},
    {"a call", "T", true, false,
     "x\n\n" O "tool_calls>\n" O "invoke name=\"f\">\n" O "parameter name=\"s\" string=\"true\">a\"b\n" C
     "parameter>\n" O "parameter name=\"n\" string=\"false\">7" C "parameter>\n" C "invoke>\n" C "tool_calls>",
     "\1T:x\1"
     "CALL:f\1"
     "A:{\"s\": \"a\\\"b\\n\", \"n\": 7}\1"
     "END"},
    {"V4.1's tags", "T", true, false,
     "x\n\n" O " calls>\n" O " invoke name=\"f\">\n" O " parameter name=\"s\" string=\"true\">a" C " parameter>\n" C
     " invoke>\n" C " calls>",
     "\1T:x\1"
     "CALL:f\1"
     "A:{\"s\": \"a\"}\1"
     "END"},
    {"without tools the markup is text", "[]", true, false, "\n\n" O "tool_calls>\n" O "invoke name=\"f\">",
     "\1T:\n\n" O "tool_calls>\n" O "invoke name=\"f\">"},
    {"a call ends the reasoning", "T", false, false,
     "hm\n\n" O "tool_calls>\n" O "invoke name=\"ping\">\n" C "invoke>\n" C "tool_calls>",
     "\1R:hm\1"
     "CALL:ping\1"
     "A:{}\1"
     "END"},
    {"misspelled opener", "T", true, false, O "toolcalls>" O "invoke name=\"ping\">" C "invoke>",
     "\1"
     "CALL:ping\1"
     "A:{}\1"
     "END"},
    {"opener without its end", "T", true, false,
     "a" O "tool_calls\n" O "invoke name=\"ping\"\n" C "invoke\n" C "tool_calls>",
     "\1T:a\1"
     "CALL:ping\1"
     "A:{}\1"
     "END"},
    {"an unknown function in a block", "T", true, false, O "tool_calls>" O "invoke name=\"g\">" C "invoke>",
     "\1"
     "CALL:g\1"
     "A:{}\1"
     "END"},
    {"no block, known function", "T", true, false,
     "x\n" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\">v" C "parameter>" C "invoke>\n" O
     "invoke name=\"ping\">" C "invoke>y",
     "\1T:x\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END\1"
     "CALL:ping\1"
     "A:{}\1"
     "END\1T:y"},
    {"no block, unknown function", "T", true, false,
     "x\n" O "invoke name=\"g\">" O "parameter name=\"s\" string=\"true\">v" C "parameter>" C "invoke> y" C "invoke>",
     "\1T:x\n" O "invoke name=\"g\">" O "parameter name=\"s\" string=\"true\">v" C "parameter>" C "invoke> y"},
    {"no block, never closed", "T", true, false, "x" O "invoke name=\"f\"> and so on",
     "\1T:x" O "invoke name=\"f\"> and so on"},
    {"no block, in the reasoning", "T", false, false, "x" O "invoke name=\"ping\">" C "invoke>",
     "\1R:x\1"
     "CALL:ping\1"
     "A:{}\1"
     "END"},
    {"a next parameter ends a value", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\">v\n" O
       "parameter name=\"n\" string=\"false\">1" C "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\", \"n\": 1}\1"
     "END"},
    {"any closing tag ends a value", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\">v" C "x>" O
       "parameter name=\"n\" string=\"false\">1\n" C "tool_calls>z",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\", \"n\": 1}\1"
     "END\1T:z"},
    {"a next call ends a call", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\">v\n" O "invoke name=\"ping\">" C
       "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END\1"
     "CALL:ping\1"
     "A:{}\1"
     "END"},
    {"other markup in a value stays", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\"><p></think>" EOS O "x</p>" C
       "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"<p></think>" EOS O "x</p>\"}\1"
     "END"},
    {"false that is no JSON", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"n\" string=\"false\">NaN" C "parameter>" O
       "parameter name=\"s\" string=\"false\">a\tb" C "parameter>" O
       "parameter name=\"z\" string=\"false\">18446744073709551616" C "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"n\": \"NaN\", \"s\": \"a\\tb\", \"z\": 18446744073709551616}\1"
     "END"},
    {"the schema where nothing is said", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"n\">7" C "parameter>" O "parameter name=\"s\">7" C
       "parameter>" O "parameter name=\"q\">7" C "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"n\": 7, \"s\": \"7\", \"q\": \"7\"}\1"
     "END"},
    {"attributes in any order", "T", true, false,
     O "tool_calls>" O "invoke id=\"3\" name=\"f\" x=\"y\">" O "parameter string=\"false\" name=\"n\">7" C
       "parameter>" O "parameter name=\"s\" string=\"true\" t=\"u\">7" C "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"n\": 7, \"s\": \"7\"}\1"
     "END"},
    {"the end in a call, complete", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\">v",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END"},
    {"the end in a call, lacking", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"n\" string=\"false\">1" C "parameter>",
     "\1"
     "CALL:f\1"
     "A:{\"n\": 1\1"
     "DROP"},
    {"cut in a call", "T", true, true,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"true\">v" C "parameter>\n",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"\1"
     "DROP"},
    {"cut behind a call", "T", true, true, O "tool_calls>" O "invoke name=\"ping\">\n" C "invoke",
     "\1"
     "CALL:ping\1"
     "A:{}\1"
     "END"},
    {"arguments as JSON", "T", true, false, O "tool_calls>" O "invoke name=\"f\">\n{\"s\": \"v\"}\n" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END"},
    {"text between parameters", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">hm " O "parameter name=\"s\" string=\"true\">v" C "parameter> so\n" C
       "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END\1T:hm  so"},
    {"invented markup is returned", "T", true, false,
     "a\n\n" O "tool_calls>\n<function=f>\n  {}\n</function>\n" C "tool_calls>",
     "\1T:a<function=f>\n  {}\n</function>"},
    {"a malformed name", "T", true, false,
     O "tool_calls>\n" O "invoke name=\"get\n" O "invoke>\n" O "invoke name=\"\">" C "invoke>",
     "\1T:name=\"getname=\"\""},
    {"a name with quotes", "T", true, false,
     O "tool_calls>" O "invoke name=\"a\"b\">" O "parameter name=\"c\"d\" string=\"true\">v" C "parameter>" C "invoke>",
     "\1"
     "CALL:a\"b\1"
     "A:{\"c\\\"d\": \"v\"}\1"
     "END"},
    {"text after a block", "T", true, false,
     O "tool_calls>" O "invoke name=\"ping\">" C "invoke>" C "tool_calls>\n\nbye" C "tool_calls>",
     "\1"
     "CALL:ping\1"
     "A:{}\1"
     "END\1T:bye"},
    {"CRLF", "T", true, false,
     "x\r\n\r\n" O "tool_calls>\r\n" O "invoke name=\"f\">\r\n" O "parameter name=\"s\" string=\"true\">v\r\n" C
     "parameter>\r\n" C "invoke>\r\n" C "tool_calls>\r\n",
     "\1T:x\1"
     "CALL:f\1"
     "A:{\"s\": \"v\\r\\n\"}\1"
     "END"},
    {"all parameters in one called arguments", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"arguments\" string=\"false\">{\"s\": \"v\"}" C
       "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END"},
    {"the same as a string, ended in it", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"arguments\" string=\"true\">{\"s\": \"v\"}",
     "\1"
     "CALL:f\1"
     "A:{\"s\": \"v\"}\1"
     "END"},
    {"the same without what is required", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"arguments\" string=\"true\">{\"n\": 1}",
     "\1"
     "CALL:f\1"
     "A:{\"arguments\": \"{\\\"n\\\": 1}\"\1"
     "DROP"},
    {"arguments among others", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"arguments\" string=\"false\">{\"q\": 1}" C
       "parameter>" O "parameter name=\"s\" string=\"true\">v" C "parameter>" C "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"arguments\": {\"q\": 1}, \"s\": \"v\"}\1"
     "END"},
    {"arguments that are no object", "T", true, false,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"arguments\" string=\"true\">7" C "parameter>" C
       "invoke>",
     "\1"
     "CALL:f\1"
     "A:{\"arguments\": \"7\"}\1"
     "END"},
    {"cut in a value", "T", true, true,
     O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"n\" string=\"false\">12",
     "\1"
     "CALL:f\1"
     "A:{\"n\": 12\1"
     "DROP"},
    {"bytes that are no UTF-8", "T", true, false, "a\xFF\xE4\xBD", "\1T:a\xEF\xBF\xBD\xEF\xBF\xBD"},
};

static void rules(void **state)
{
    json_t *known = parsed(tools_json), *none = json_array();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        aff_test_log log;
        const json_t *tools = !cases[i].tools ? NULL : cases[i].tools[0] == 'T' ? known : none;
        size_t n = strlen(cases[i].text);
        run(&log, !cases[i].chat, tools, cases[i].text, n, 0, n, !cases[i].cut);
        if (strcmp(log.text.s ? log.text.s : "", cases[i].events) != 0)
            print_error("%s:\n   expected %s\n   got      %s\n", cases[i].name, cases[i].events, log.text.s);
        assert_string_equal(log.text.s ? log.text.s : "", cases[i].events);
        arguments_are_json(cases[i].name, &log);
        aff__buf_free(&log.text);
    }
    json_decref(known);
    json_decref(none);
}

/* Lines of the fixtures that the strict parser takes and ours reads differently; docs/chat.md says why. */
static bool differs(const char *id)
{
    static const char *const ids[] = {"bad-json-false/", "cut-083/v4-0731", "cut-150/v4-0731", "cut-214/v4-0731",
                                      "cut-080/v4.1",    "cut-149/v4.1",    "cut-215/v4.1"};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (strncmp(id, ids[i], strlen(ids[i])) == 0) return true;
    return false;
}

/* The log that a line's "expected" stands for. */
static aff_buf expected_log(const json_t *want)
{
    aff_test_log log = {0};
    const char *r = json_string_value(json_object_get(want, "reasoning_content")),
               *c = json_string_value(json_object_get(want, "content"));
    json_t *call;
    size_t i;
    if (*r) aff_test_log_event(&log, &(aff_parse_event){AFF_PARSE_REASONING, 0, r, strlen(r)}, NULL);
    if (*c) aff_test_log_event(&log, &(aff_parse_event){AFF_PARSE_TEXT, 0, c, strlen(c)}, NULL);
    json_array_foreach(json_object_get(want, "tool_calls"), i, call)
    {
        const char *n = json_string_value(json_object_get(call, "name")),
                   *a = json_string_value(json_object_get(call, "arguments"));
        aff_test_log_event(&log, &(aff_parse_event){AFF_PARSE_CALL, i, n, strlen(n)}, NULL);
        aff_test_log_event(&log, &(aff_parse_event){AFF_PARSE_ARGS, i, a, strlen(a)}, NULL);
        aff_test_log_event(&log, &(aff_parse_event){AFF_PARSE_CALL_END, i, NULL, 0}, NULL);
    }
    return log.text;
}

/* The text without the end-of-sequence token that a generation stops at. */
static bool without_eos(const char *s, size_t *n)
{
    size_t k = sizeof EOS - 1;
    if (*n < k || memcmp(s + *n - k, EOS, k) != 0) return false;
    *n -= k;
    return true;
}

static void fixtures(void **state)
{
    json_t *lines = aff_test_chat_lines("parse.jsonl"), *line;
    size_t i, same = 0;
    json_array_foreach(lines, i, line)
    {
        const char *id = json_string_value(json_object_get(line, "id")),
                   *s = json_string_value(json_object_get(line, "completion"));
        const json_t *want = json_object_get(line, "expected");
        size_t n = strlen(s);
        aff_test_log log;
        bool thinking =
            strcmp(json_string_value(json_object_get(json_object_get(line, "options"), "thinking_mode")), "chat") != 0;
        bool eos = without_eos(s, &n);
        run(&log, thinking, NULL, s, n, 0, n, eos);
        arguments_are_json(id, &log);
        if (want) {
            aff_buf w = expected_log(want);
            bool equal = log.text.n == w.n && (w.n == 0 || memcmp(log.text.s, w.s, w.n) == 0);
            if (equal == differs(id)) fail_msg("%s: got %s", id, log.text.s ? log.text.s : "");
            same += equal;
            aff__buf_free(&w);
        }
        aff__buf_free(&log.text);
    }
    assert_int_equal(same, 54);
    json_decref(lines);
}

/* ---- splits ---- */

typedef struct splits {
    size_t transcripts, runs;
} splits;

static void same_log(const aff_test_log *whole, aff_test_log *part, const char *s, size_t n, size_t a, size_t b)
{
    if (part->text.n != whole->text.n || (whole->text.n && memcmp(part->text.s, whole->text.s, whole->text.n) != 0))
        fail_msg("'%.*s' cut at %zu and %zu: expected %s, got %s", (int)n, s, a, b, whole->text.s, part->text.s);
    aff__buf_free(&part->text);
}

/* Every cut, every pair of cuts (in long texts: those within 24 bytes, more than any hold-back decides on at once, and
 * one far one each), byte by byte. */
static void all_splits(splits *c, bool thinking, const json_t *tools, const char *s, size_t n, bool eos)
{
    enum { SHORT = 90, NEAR = 24 };
    aff_test_log whole, part;
    aff_parser *p;
    run(&whole, thinking, tools, s, n, n, n, eos);
    for (size_t a = 0; a <= n; a++) {
        for (size_t b = a; b <= n && (n <= SHORT || b <= a + NEAR); b++, c->runs++) {
            run(&part, thinking, tools, s, n, a, b, eos);
            same_log(&whole, &part, s, n, a, b);
        }
        run(&part, thinking, tools, s, n, a, (a + n + 1) / 2, eos);
        same_log(&whole, &part, s, n, a, n);
    }
    part = (aff_test_log){0};
    assert_int_equal(aff__parser_create(&p, thinking, tools, aff_test_log_event, &part, NULL), AFF_OK);
    for (size_t i = 0; i < n; i++) assert_int_equal(aff__parser_feed(p, s + i, 1, NULL), AFF_OK);
    assert_int_equal(aff__parser_end(p, eos, NULL), AFF_OK);
    aff__parser_free(p);
    same_log(&whole, &part, s, n, 1, 1);
    aff__buf_free(&whole.text);
    c->transcripts++;
}

static void every_split(void **state)
{
    json_t *lines = aff_test_chat_lines("parse.jsonl"), *known = parsed(tools_json), *none = json_array(), *line;
    splits c = {0};
    size_t i;
    json_array_foreach(lines, i, line)
    {
        const char *s = json_string_value(json_object_get(line, "completion"));
        size_t n = strlen(s);
        bool thinking =
            strcmp(json_string_value(json_object_get(json_object_get(line, "options"), "thinking_mode")), "chat") != 0;
        bool eos = without_eos(s, &n);
        all_splits(&c, thinking, NULL, s, n, eos);
        if (n <= 200) all_splits(&c, thinking, i % 2 ? known : none, s, n, !eos);
    }
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        const json_t *tools = !cases[i].tools ? NULL : cases[i].tools[0] == 'T' ? known : none;
        all_splits(&c, !cases[i].chat, tools, cases[i].text, strlen(cases[i].text), !cases[i].cut);
        all_splits(&c, !cases[i].chat, tools, cases[i].text, strlen(cases[i].text), cases[i].cut);
    }
    print_message("%zu transcripts, %zu runs\n", c.transcripts, c.runs);
    assert_true(c.transcripts >= 300);
    json_decref(lines);
    json_decref(known);
    json_decref(none);
}

/* ---- streaming and bounds ---- */

typedef struct seen {
    size_t n[6], bytes[6];
} seen;

static aff_status count(void *ctx, const aff_parse_event *e, aff_error *err)
{
    seen *s = ctx;
    s->n[e->kind]++;
    s->bytes[e->kind] += e->n;
    return AFF_OK;
}

static void feed(aff_parser *p, const char *s)
{
    assert_int_equal(aff__parser_feed(p, s, strlen(s), NULL), AFF_OK);
}

static void streams(void **state)
{
    json_t *tools = parsed(tools_json);
    aff_parser *p;
    seen s = {0};
    assert_int_equal(aff__parser_create(&p, true, tools, count, &s, NULL), AFF_OK);
    feed(p, "abc");
    assert_int_equal(s.bytes[AFF_PARSE_REASONING], 3); /* at once */
    feed(p, "</think>x");
    assert_int_equal(s.bytes[AFF_PARSE_TEXT], 1);
    feed(p, "\n\n" O "tool_calls>\n" O "invoke name=\"f\">");
    assert_int_equal(s.n[AFF_PARSE_CALL], 1); /* as soon as the name is there */
    feed(p, O "parameter name=\"s\" string=\"true\">long");
    assert_int_equal(s.bytes[AFF_PARSE_ARGS], strlen("{\"s\": \"long"));
    feed(p, "er");
    assert_int_equal(s.bytes[AFF_PARSE_ARGS], strlen("{\"s\": \"longer"));
    feed(p, "<" O "x");
    assert_int_equal(s.bytes[AFF_PARSE_ARGS], strlen("{\"s\": \"longer<" O "x"));
    feed(p, C "parameter>" O "parameter name=\"n\" string=\"false\">123");
    assert_int_equal(s.bytes[AFF_PARSE_ARGS], strlen("{\"s\": \"longer<" O "x\", \"n\": "));
    feed(p, C "parameter>" C "invoke>");
    assert_int_equal(s.n[AFF_PARSE_CALL_END], 1);
    assert_int_equal(aff__parser_end(p, true, NULL), AFF_OK);
    aff__parser_free(p);
    json_decref(tools);
}

/* Feeds `head`, n times 'x', `tail`, and the end. */
static seen long_text(const char *head, size_t n, const char *tail)
{
    json_t *tools = parsed(tools_json);
    aff_parser *p;
    seen s = {0};
    char *x = malloc(n);
    assert_non_null(x);
    memset(x, 'x', n);
    assert_int_equal(aff__parser_create(&p, false, tools, count, &s, NULL), AFF_OK);
    feed(p, head);
    assert_int_equal(aff__parser_feed(p, x, n, NULL), AFF_OK);
    feed(p, tail);
    assert_int_equal(aff__parser_end(p, true, NULL), AFF_OK);
    aff__parser_free(p);
    json_decref(tools);
    free(x);
    return s;
}

static void bounds(void **state)
{
    seen s = long_text(O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"s\" string=\"false\">", 9 << 20,
                       C "invoke>");
    assert_int_equal(s.bytes[AFF_PARSE_ARGS], (9 << 20) + strlen("{\"s\": \"\"}")); /* too long to be JSON: a string */
    assert_int_equal(s.n[AFF_PARSE_CALL_END], 1);
    s = long_text(O "tool_calls>" O "invoke name=\"f\">", 70000, C "invoke>");
    assert_int_equal(s.n[AFF_PARSE_CALL_DROP], 1);
    assert_int_equal(s.bytes[AFF_PARSE_TEXT], 70000);
    s = long_text(O "invoke name=\"f\">", 2 << 20, C "invoke>");
    assert_int_equal(s.n[AFF_PARSE_CALL], 0);
    assert_int_equal(s.bytes[AFF_PARSE_TEXT], (2 << 20) + strlen(O "invoke name=\"f\">" C "invoke>"));
    s = long_text(O "tool_calls>" O "invoke name=\"f\">" O "parameter name=\"", 5000,
                  "\" string=\"true\">v" C "parameter>" C "invoke>");
    assert_int_equal(s.n[AFF_PARSE_CALL], 1);
    assert_true(s.bytes[AFF_PARSE_TEXT] > 5000); /* no key is that long */
    s = long_text(O "tool_calls", 600, ">");
    assert_int_equal(s.bytes[AFF_PARSE_TEXT], strlen("tool_calls") + 601); /* no tag is that long */
}

/* Every allocation may fail. */
static void out_of_memory(void **state)
{
    static const char text[] = "r</think>x\n\n" O "tool_calls>\n" O "invoke name=\"f\">" O
                               "parameter name=\"s\" string=\"false\">v" C "parameter>" C "invoke>";
    json_t *tools = parsed(tools_json);
    aff_status s = AFF_E_NOMEM;
    unsigned n = 0;
    while (s != AFF_OK) {
        aff_parser *p = NULL;
        seen c = {0};
        aff__alloc_fail_after(++n);
        s = aff__parser_create(&p, true, tools, count, &c, NULL);
        if (s == AFF_OK) s = aff__parser_feed(p, text, sizeof text - 1, NULL);
        if (s == AFF_OK) s = aff__parser_end(p, true, NULL);
        aff__alloc_fail_after(0);
        if (s != AFF_OK) assert_int_equal(s, AFF_E_NOMEM);
        aff__parser_free(p);
    }
    assert_true(n > 3);
    json_decref(tools);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(strict),       cmocka_unit_test(rules),
                                       cmocka_unit_test(fixtures),     cmocka_unit_test(every_split),
                                       cmocka_unit_test(streams),      cmocka_unit_test(bounds),
                                       cmocka_unit_test(out_of_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
