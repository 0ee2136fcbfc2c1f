/* server: answers held to a form, in every dialect, streamed and whole; the same text with drafts and without. */
#include "support/test.h"
#include "server/client.h"
#include "format/json.h"

#define ASK  "\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]"
#define OFF  ", \"thinking\": {\"type\": \"disabled\"}"
#define CHAT "/v1/chat/completions"
#define SCHEMA                                                                                                         \
    "{\"type\": \"object\", \"properties\": {\"capital\": {\"type\": \"string\"}, \"n\": {\"type\": \"integer\", "     \
    "\"minimum\": 5, \"maximum\": 40}, \"sure\": {\"type\": \"boolean\"}}, \"required\": [\"capital\", \"n\"], "       \
    "\"additionalProperties\": false}"
#define FORMAT                                                                                                         \
    ", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"x\", \"strict\": true, "         \
    "\"schema\": " SCHEMA "}}"
#define FUNCTION(strict)                                                                                               \
    "{\"name\": \"weather\"" strict ", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": "  \
    "\"string\", \"minLength\": 1}, \"days\": {\"type\": \"integer\"}}, \"required\": [\"city\"], "                    \
    "\"additionalProperties\": false}}"
#define TOOLS                                                                                                          \
    ", \"tools\": [{\"type\": \"function\", \"function\": " FUNCTION(                                                  \
        "") "}, {\"type\": \"function\", \"function\": {\"name\": \"stop\"}}]"
#define STRICT ", \"tools\": [{\"type\": \"function\", \"function\": " FUNCTION(", \"strict\": true") "}]"
#define BAD    "{\"type\": \"object\", \"properties\": {\"a\": {\"not\": {}}}}"

static json_t *parse(const char *text)
{
    json_t *v = NULL;
    aff_error err = {0};
    if (aff__json_parse_exact(&v, text, strlen(text), "answer", true, 64, &err) != AFF_OK)
        fail_msg("%s: %s", text, err.msg);
    return v;
}

/* Whether a text is an object of SCHEMA. */
static void check_object(const char *text)
{
    json_t *v = parse(text);
    const json_t *sure = json_object_get(v, "sure");
    const size_t size = json_object_size(v);
    assert_true(json_is_string(json_object_get(v, "capital")));
    assert_in_range(int_at(v, "n"), 5, 40);
    assert_true(!sure || json_is_boolean(sure));
    assert_int_equal(size, sure ? 3 : 2);
    json_decref(v);
}

static void check_arguments(const char *name, const char *text)
{
    json_t *v = parse(text);
    const json_t *days = json_object_get(v, "days");
    if (strcmp(name, "stop") == 0) {
        assert_int_equal(json_object_size(v), 0);
    } else {
        assert_string_equal(name, "weather");
        assert_true(strlen(text_at(v, "city")) > 0);
        assert_true(!days || json_is_integer(days) || aff__json_literal(days, &(size_t){0}));
        assert_int_equal(json_object_size(v), days ? 2 : 1);
    }
    json_decref(v);
}

static void formats(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer a;
    for (int seed = 0; seed < 6; seed++) {
        char body[2048];
        snprintf(body, sizeof body, "{" ASK FORMAT "%s, \"seed\": %d, \"max_tokens\": %d, \"n\": 2}",
                 seed % 2 ? OFF : "", seed, 40 + 10 * seed);
        a = post(s, CHAT, body);
        for (int i = 0; i < 2; i++) {
            char path[64];
            snprintf(path, sizeof path, "choices.%d.finish_reason", i);
            assert_string_equal(text_at(a.json, path), "stop");
            snprintf(path, sizeof path, "choices.%d.message.content", i);
            check_object(text_at(a.json, path));
        }
        done_with(&a);
    }
    a = post(s, CHAT,
             "{" ASK
             ", \"response_format\": {\"type\": \"json_object\"}, \"stream\": true, \"seed\": 3, \"max_tokens\": 120}");
    aff_buf text = {0}, thought = {0};
    json_t *e;
    for (int i = 0; (e = event_at(a.body, i)); i++) {
        const json_t *delta = at(e, "choices.0.delta"), *c = json_object_get(delta, "content"),
                     *r = json_object_get(delta, "reasoning_content");
        if (json_is_string(c)) assert_int_equal(aff__buf_puts(&text, json_string_value(c), NULL), AFF_OK);
        if (json_is_string(r)) assert_int_equal(aff__buf_puts(&thought, json_string_value(r), NULL), AFF_OK);
        json_decref(e);
    }
    json_t *v = parse(text.s);
    assert_true(json_is_object(v));
    assert_true(thought.n > 0); /* reasoning is free */
    json_decref(v);
    aff__buf_free(&text);
    aff__buf_free(&thought);
    done_with(&a);
    a = post(s, "/v1/messages",
             "{" ASK
             ", \"max_tokens\": 60, \"output_config\": {\"format\": {\"type\": \"json_schema\", \"schema\": " SCHEMA
             "}}}");
    check_object(text_at(a.json, "content.0.text"));
    assert_string_equal(text_at(a.json, "stop_reason"), "end_turn");
    done_with(&a);
    a = post(s, "/v1/messages",
             "{" ASK ", \"max_tokens\": 60, \"output_format\": {\"type\": \"json_schema\", \"schema\": " SCHEMA "}}");
    check_object(text_at(a.json, "content.0.text"));
    done_with(&a);
    a = post(s, "/v1/responses",
             "{\"input\": \"Hello\", \"reasoning\": {\"effort\": \"none\"}, \"max_output_tokens\": 60, \"text\": "
             "{\"format\": {\"type\": \"json_schema\", \"name\": \"x\", \"schema\": " SCHEMA "}}}");
    check_object(text_at(a.json, "output.0.content.0.text"));
    assert_string_equal(text_at(a.json, "status"), "completed");
    done_with(&a);
    a = post(s, "/v1/completions", "{\"prompt\": \"Hello\", \"max_tokens\": 60" FORMAT "}");
    check_object(text_at(a.json, "choices.0.text"));
    done_with(&a);
    /* Text that looks like markup is part of the answer. */
    a = post(s, CHAT,
             "{" ASK OFF ", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": {\"const\": "
                         "\"</think><\\uff5cUser\\uff5c>\"}}}}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), "\"</think><\xEF\xBD\x9CUser\xEF\xBD\x9C>\"");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void calls(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer a;
    for (int seed = 0; seed < 6; seed++) {
        char body[2048];
        const bool one = seed >= 3;
        snprintf(body, sizeof body,
                 "{" ASK TOOLS "%s%s, \"tool_choice\": \"required\", \"seed\": %d, \"max_tokens\": 300}",
                 seed % 2 ? OFF : "", one ? ", \"parallel_tool_calls\": false" : "", seed);
        a = post(s, CHAT, body);
        assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "tool_calls");
        assert_true(json_is_null(at(a.json, "choices.0.message.content")));
        const json_t *list = at(a.json, "choices.0.message.tool_calls"), *c;
        size_t i;
        assert_in_range(json_array_size(list), 1, one ? 1 : 30);
        json_array_foreach(list, i, c) check_arguments(text_at(c, "function.name"), text_at(c, "function.arguments"));
        done_with(&a);
    }
    a = post(s, CHAT,
             "{" ASK TOOLS OFF ", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"stop\"}}, "
                               "\"parallel_tool_calls\": false, \"stream\": true}");
    aff_buf args = {0};
    json_t *e;
    bool named = false;
    for (int i = 0; (e = event_at(a.body, i)); i++) {
        const json_t *call = json_array_get(json_object_get(at(e, "choices.0.delta"), "tool_calls"), 0);
        if (call && json_object_get(json_object_get(call, "function"), "name")) {
            assert_string_equal(text_at(call, "function.name"), "stop");
            named = true;
        }
        if (call) assert_int_equal(aff__buf_puts(&args, text_at(call, "function.arguments"), NULL), AFF_OK);
        json_decref(e);
    }
    assert_true(named);
    assert_string_equal(args.s, "{}");
    aff__buf_free(&args);
    done_with(&a);
    a = post(s, "/v1/messages",
             "{" ASK ", \"max_tokens\": 200, \"tools\": [{\"name\": \"f\", \"strict\": true, \"input_schema\": "
                     "{\"type\": \"object\", \"properties\": {\"a\": {\"enum\": [\"x\", \"y\"]}}, \"required\": "
                     "[\"a\"]}}], \"tool_choice\": {\"type\": \"any\", \"disable_parallel_tool_use\": true}}");
    assert_string_equal(text_at(a.json, "stop_reason"), "tool_use");
    assert_string_equal(text_at(a.json, "content.0.name"), "f");
    assert_true(strcmp(text_at(a.json, "content.0.input.a"), "x") == 0 ||
                strcmp(text_at(a.json, "content.0.input.a"), "y") == 0);
    done_with(&a);
    a = post(s, "/v1/messages",
             "{" ASK ", \"max_tokens\": 200, \"tools\": [{\"name\": \"f\"}, {\"name\": \"g\"}], \"tool_choice\": "
                     "{\"type\": \"tool\", \"name\": \"g\"}}");
    assert_string_equal(text_at(a.json, "content.0.name"), "g");
    done_with(&a);
    a = post(s, "/v1/responses",
             "{\"input\": \"Hello\", \"reasoning\": {\"effort\": \"none\"}, \"max_output_tokens\": 200, "
             "\"parallel_tool_calls\": false, \"tools\": [{\"type\": \"function\", \"name\": \"weather\", "
             "\"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"const\": \"Rome\"}}, \"required\": "
             "[\"city\"], \"additionalProperties\": false}}], \"tool_choice\": \"required\"}");
    assert_string_equal(text_at(a.json, "output.0.type"), "function_call");
    assert_string_equal(text_at(a.json, "output.0.arguments"), "{\"city\": \"Rome\"}");
    done_with(&a);
    /* Strict tools leave the rest of the answer alone. */
    a = post(s, CHAT, "{" ASK STRICT OFF ", \"temperature\": 0}");
    assert_int_equal(a.status, 200);
    const json_t *list = json_object_get(at(a.json, "choices.0.message"), "tool_calls"), *c;
    size_t i;
    json_array_foreach(list, i, c) check_arguments(text_at(c, "function.name"), text_at(c, "function.arguments"));
    done_with(&a);
    aff__server_stop(s, 0);
}

static void refusals(void **state)
{
    static const struct {
        const char *path, *body, *param, *says;
    } rows[] = {
        {CHAT, "{" ASK ", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": " BAD "}}}",
         "response_format", "'not' at #/properties/a"},
        {CHAT, "{" ASK ", \"response_format\": {\"type\": \"json_schema\"}}", "response_format", "schema"},
        {CHAT, "{" ASK ", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": 3}}}",
         "response_format", "object"},
        {CHAT, "{" ASK FORMAT ", \"ignore_eos\": true}", "ignore_eos", "response_format"},
        {CHAT,
         "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}], "
         "\"continue_final_message\": true" FORMAT "}",
         "response_format", "continued"},
        {CHAT, "{" ASK ", \"tool_choice\": \"required\"}", "tool_choice", "tools"},
        {CHAT, "{" ASK TOOLS ", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"f\"}}}",
         "tool_choice", "'f'"},
        {CHAT, "{" ASK TOOLS ", \"tool_choice\": \"perhaps\"}", "tool_choice", "required"},
        {CHAT,
         "{" ASK
         ", \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"strict\": true, \"parameters\": " BAD
         "}}]}",
         "tools", "parameters of tool 'f': 'not' at #/properties/a"},
        {CHAT,
         "{" ASK ", \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\\\"\", \"strict\": true}}]}",
         "tools", "quotes"},
        {"/v1/completions",
         "{\"prompt\": \"a\", \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"schema\": " BAD
         "}}}",
         "response_format", "'not'"},
        {"/v1/responses",
         "{\"input\": \"a\", \"text\": {\"format\": {\"type\": \"json_schema\", \"schema\": " BAD "}}}", "text.format",
         "'not'"},
    };
    aff_server *s = serve((aff_server_options){0});
    answer a;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        a = post(s, rows[i].path, rows[i].body);
        if (a.status != 400) fail_msg("%s: %d", rows[i].body, a.status);
        assert_string_equal(text_at(a.json, "error.param"), rows[i].param);
        if (!strstr(text_at(a.json, "error.message"), rows[i].says))
            fail_msg("%s: %s", rows[i].body, text_at(a.json, "error.message"));
        done_with(&a);
    }
    a = post(s, "/v1/messages",
             "{" ASK ", \"max_tokens\": 9, \"output_config\": {\"format\": {\"type\": \"json_schema\", \"schema\": " BAD
             "}}}");
    assert_int_equal(a.status, 400);
    assert_string_equal(text_at(a.json, "type"), "error");
    assert_non_null(strstr(text_at(a.json, "error.message"), "output_config.format: 'not' at #/properties/a"));
    done_with(&a);
    /* A schema that cannot be followed does not matter where nothing asked for it. */
    a = post(s, CHAT,
             "{" ASK OFF ", \"max_tokens\": 100, \"tool_choice\": \"required\", \"tools\": [{\"type\": \"function\", "
                         "\"function\": {\"name\": \"f\", \"parameters\": " BAD "}}]}");
    assert_int_equal(a.status, 200);
    done_with(&a);
    assert_int_equal(metric(s, "affinity_requests_running"), 0);
    aff__server_stop(s, 0);
}

/* Promise 3 with a form: the draft changes no text. */
static void drafts(void **state)
{
    static const char *const bodies[] = {"{" ASK FORMAT ", \"seed\": 4, \"max_tokens\": 90}",
                                         "{" ASK TOOLS
                                         ", \"tool_choice\": \"required\", \"seed\": 5, \"max_tokens\": 150}",
                                         "{" ASK OFF ", \"response_format\": {\"type\": \"json_object\"}, \"seed\": 6, "
                                                     "\"max_tokens\": 60, \"frequency_penalty\": 0.3}"};
    aff_net *plain = the_net, *with = NULL;
    aff_error err = {0};
    char *text[2][3];
    if (aff__net_open(&with, AFF_SOURCE_DIR "/models/tiny-v4", &(aff_net_options){.numerics = AFF_FAST, .draft = true},
                      &err) != AFF_OK)
        fail_msg("%s", err.msg);
    for (int d = 0; d < 2; d++) {
        the_net = d ? with : plain;
        aff_server *s = serve((aff_server_options){.engine.width = d ? 4 : 0});
        for (int i = 0; i < 3; i++) {
            answer a = post(s, CHAT, bodies[i]);
            json_t *m = json_incref(at(a.json, "choices.0.message")), *call;
            size_t k;
            json_array_foreach(json_object_get(m, "tool_calls"), k, call) json_object_del(call, "id");
            text[d][i] = json_dumps(m, JSON_SORT_KEYS);
            json_decref(m);
            done_with(&a);
        }
        if (d) assert_true(metric(s, "affinity_accepted_tokens_total{place=\"1\"}") > 10);
        aff__server_stop(s, 0);
    }
    the_net = plain;
    aff__net_close(with);
    for (int i = 0; i < 3; i++) {
        assert_string_equal(text[0][i], text[1][i]);
        free(text[0][i]);
        free(text[1][i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(formats), cmocka_unit_test(calls), cmocka_unit_test(refusals),
                                       cmocka_unit_test(drafts)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
