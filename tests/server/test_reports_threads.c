/* The field reports of spec text-and-serving 4.4, one test each, through the whole server: the network is a pretence
 * that writes what a test tells it to, token by token, and remembers what it was given. docs/conformance.md lists them.
 * Reports that other tests show are listed there with those. */
#include "support/test.h"
#include "server/client.h"
#include "server/ask.h"
#include "support/scripted_net.h"

#define CHAT "/v1/chat/completions"
#define D_   "<｜DSML｜"
#define C_   "</｜DSML｜"

static aff_server *server;

static int set_up(void **state)
{
    aff_error err = {0};
    if (aff__tokenizer_open(&the_tok, AFF_SOURCE_DIR "/models/tiny-v4", 4096, &err) != AFF_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return -1;
    }
    scripted.cfg.vocab = (int)aff__tokenizer_size(the_tok);
    scripted.cfg.eos = (int)aff__tokenizer_find(the_tok, "<｜end▁of▁sentence｜>");
    scripted.cfg.bos = (int)aff__tokenizer_find(the_tok, "<｜begin▁of▁sentence｜>");
    scripted.cfg.max_positions = SCRIPTED_KEEPS;
    the_net = &scripted;
    server = serve((aff_server_options){0});
    return 0;
}

static int tear_down(void **state)
{
    aff__server_stop(server, 0);
    aff__ids_free(&script);
    aff__tokenizer_free(the_tok);
    return 0;
}

/* ---- asking ---- */

#define TOOLS_                                                                                                         \
    "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\", "     \
    "\"properties\": {\"s\": "                                                                                         \
    "{\"type\": \"string\"}, \"n\": {\"type\": \"integer\"}, \"b\": {\"type\": \"boolean\"}}}}}, {\"type\": "          \
    "\"function\", \"function\": {\"name\": \"ping\"}}]"
#define USER_         "\"messages\": [{\"role\": \"user\", \"content\": \"go\"}]"
#define PLAIN_        USER_ ", \"thinking\": {\"type\": \"disabled\"}"
#define BLOCK_(calls) "\n\n" D_ "tool_calls>\n" calls C_ "tool_calls>"
#define PING_         D_ "invoke name=\"ping\">\n\n" C_ "invoke>\n"

static void writes(const char *text)
{
    aff_error err = {0};
    script.n = 0;
    if (aff__tokenizer_encode(the_tok, text, strlen(text), true, &script, &err) != AFF_OK) fail_msg("%s", err.msg);
}

/* A chat's answer, of a stream or not. */
typedef struct said {
    char content[8192], reasoning[2048], name[4][64], arguments[4][4096], id[4][64], finish[32];
    int calls, content_chunks, argument_chunks;
    long long tokens, reasoning_tokens;
    char *raw;
} said;

static void whole_answer(const answer *a, said *r)
{
    const json_t *m = at(a->json, "choices.0.message"), *c = json_object_get(m, "content"),
                 *t = json_object_get(m, "reasoning_content"), *calls = json_object_get(m, "tool_calls");
    if (json_is_string(c)) strcpy(r->content, json_string_value(c));
    if (json_is_string(t)) strcpy(r->reasoning, json_string_value(t));
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *k = json_array_get(calls, i);
        strcpy(r->name[i], text_at(k, "function.name"));
        strcpy(r->arguments[i], text_at(k, "function.arguments"));
        strcpy(r->id[i], text_at(k, "id"));
        r->calls++;
    }
    strcpy(r->finish, text_at(a->json, "choices.0.finish_reason"));
    r->tokens = int_at(a->json, "usage.completion_tokens");
    r->reasoning_tokens = int_at(a->json, "usage.completion_tokens_details.reasoning_tokens");
}

static void delta(const json_t *d, said *r)
{
    const json_t *c = json_object_get(d, "content"), *t = json_object_get(d, "reasoning_content"),
                 *calls = json_object_get(d, "tool_calls");
    if (json_string_length(c)) {
        strcat(r->content, json_string_value(c));
        r->content_chunks++;
    }
    if (json_is_string(t)) strcat(r->reasoning, json_string_value(t));
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *k = json_array_get(calls, i), *id = json_object_get(k, "id");
        const long long n = int_at(k, "index");
        assert_in_range(n, 0, 3);
        if (id) {
            assert_int_equal(n, r->calls);
            r->calls++;
            strcpy(r->id[n], json_string_value(id));
            strcpy(r->name[n], text_at(k, "function.name"));
            assert_string_equal(text_at(k, "type"), "function");
        }
        strcat(r->arguments[n], text_at(k, "function.arguments"));
        r->argument_chunks += *text_at(k, "function.arguments") != 0;
    }
}

static void stream_answer(const answer *a, said *r)
{
    json_t *e;
    for (int i = 0; (e = event_at(a->body, i)); i++, json_decref(e)) {
        if (!json_array_size(at(e, "choices"))) {
            r->tokens = int_at(e, "usage.completion_tokens");
            r->reasoning_tokens = int_at(e, "usage.completion_tokens_details.reasoning_tokens");
            continue;
        }
        const json_t *f = at(e, "choices.0.finish_reason"); /* is there in every chunk (report 35) */
        assert_true(json_is_null(f) || json_is_string(f));
        if (json_is_string(f)) strcpy(r->finish, json_string_value(f));
        delta(at(e, "choices.0.delta"), r);
    }
    assert_non_null(strstr(a->body, "data: [DONE]\n\n"));
}

static said chat(const char *fields, bool stream)
{
    said r = {0};
    char body[8192];
    snprintf(body, sizeof body,
             "{%s, \"temperature\": 0, \"stream\": %s, \"stream_options\": {\"include_usage\": true}}", fields,
             stream ? "true" : "false");
    answer a = post(server, CHAT, body);
    if (a.status != 200) fail_msg("%s: %s", fields, a.body);
    r.raw = strdup(a.body);
    assert_non_null(r.raw);
    if (stream)
        stream_answer(&a, &r);
    else
        whole_answer(&a, &r);
    done_with(&a);
    return r;
}

/* What the same output is, streamed or not. Markup never shows. */
static void expect(const char *fields, const char *reasoning, const char *content, const char *name,
                   const char *arguments, const char *finish)
{
    for (int stream = 0; stream < 2; stream++) {
        said r = chat(fields, stream);
        assert_string_equal(r.reasoning, reasoning);
        assert_string_equal(r.content, content);
        assert_int_equal(r.calls, name != NULL);
        if (name) {
            assert_string_equal(r.name[0], name);
            assert_string_equal(r.arguments[0], arguments);
        }
        assert_string_equal(r.finish, finish);
        if (!strstr(content, "DSML")) assert_null(strstr(r.raw, "DSML"));
        free(r.raw);
    }
}

/* The prompt that the network was given, as text. */
static char *seen(void)
{
    aff_buf b = {0};
    for (int64_t i = 0; i < n_given; i++) {
        size_t n;
        const char *s = aff__tokenizer_bytes(the_tok, (uint32_t)given[i], &n);
        assert_int_equal(aff__buf_put(&b, s, n, NULL), AFF_OK);
    }
    return b.s;
}

static void expect_seen(const char *fields, const char *holds, const char *lacks)
{
    writes("x");
    said r = chat(fields, false);
    char *text = seen();
    if (holds && !strstr(text, holds)) fail_msg("expected %s in %s", holds, text);
    if (lacks && strstr(text, lacks)) fail_msg("expected no %s in %s", lacks, text);
    free(text);
    free(r.raw);
}

/* ---- the reports ---- */

static void report_01_no_fragments_in_content(void **state)
{
    writes("Text." BLOCK_(PING_));
    expect(PLAIN_ ", " TOOLS_, "", "Text.", "ping", "{}", "tool_calls");
    writes("a < b <｜ c </｜DSM d");
    expect(PLAIN_ ", " TOOLS_, "", "a < b <｜ c </｜DSM d", NULL, NULL, "stop");
}

static void report_02_no_markup_in_arguments(void **state)
{
    writes(BLOCK_(D_ "invoke name=\"f\">\n" D_ "parameter name=\"s\" string=\"true\">v\n" D_
                     "parameter name=\"n\" string=\"false\">1" C_ "parameter>\n" C_ "invoke>\n"));
    expect(PLAIN_ ", " TOOLS_, "", "", "f", "{\"s\": \"v\", \"n\": 1}", "tool_calls");
}

static void report_03_misspelled_opener(void **state)
{
    writes("\n\n" D_ "toolcalls>\n" PING_ C_ "toolcalls>");
    expect(PLAIN_ ", " TOOLS_, "", "", "ping", "{}", "tool_calls");
}

static void report_04_opener_left_out(void **state)
{
    writes("So.\n\n" PING_);
    expect(PLAIN_ ", " TOOLS_, "", "So.", "ping", "{}", "tool_calls");
    expect(PLAIN_, "", "So.\n\n" PING_, NULL, NULL, "stop"); /* without tools it is prose that quotes the markup */
    writes("So.\n\n" D_ "invoke name=\"unknown\">\n" C_ "invoke>");
    expect(PLAIN_ ", " TOOLS_, "", "So.\n\n" D_ "invoke name=\"unknown\">\n" C_ "invoke>", NULL, NULL, "stop");
    writes("So.\n\n" D_ "invoke name=\"ping\">\n is how one would");
    expect(PLAIN_ ", " TOOLS_, "", "So.\n\n" D_ "invoke name=\"ping\">\n is how one would", NULL, NULL, "stop");
}

static void report_05_06_call_inside_reasoning(void **state)
{
    writes("I need it." BLOCK_(PING_));
    expect(USER_ ", " TOOLS_, "I need it.", "", "ping", "{}", "tool_calls");
}

static void report_07_reasoning_without_tools(void **state)
{
    writes("Hm.</think>Answer.");
    expect(USER_, "Hm.", "Answer.", NULL, NULL, "stop");
}

static void report_08_answers_are_not_held_back(void **state)
{
    writes("Hm.</think>one two three four five six seven eight nine ten");
    said r = chat(USER_ ", " TOOLS_, true);
    assert_string_equal(r.content, "one two three four five six seven eight nine ten");
    assert_true(r.content_chunks >= 10);
    free(r.raw);
}

static void report_09_invented_markup(void **state)
{
    writes("a\n\n" D_ "tool_calls>\n<function=f>\n{}\n</function>\n" C_ "tool_calls>");
    expect(PLAIN_ ", " TOOLS_, "", "a<function=f>\n{}\n</function>", NULL, NULL, "stop");
}

static void report_10_held_text_is_let_go(void **state)
{
    writes("1 < 2 and 2 <");
    expect(PLAIN_ ", " TOOLS_, "", "1 < 2 and 2 <", NULL, NULL, "stop");
    expect(PLAIN_ ", " TOOLS_ ", \"stop\": [\"2 <!\"]", "", "1 < 2 and 2 <", NULL, NULL, "stop");
}

static void report_11_long_strings_stream(void **state)
{
    writes(BLOCK_(
        D_ "invoke name=\"f\">\n" D_
           "parameter name=\"s\" string=\"true\">one two three four five six seven eight nine ten\neleven \"twelve\"" C_
           "parameter>\n" C_ "invoke>\n"));
    said r = chat(PLAIN_ ", " TOOLS_, true);
    assert_string_equal(r.arguments[0],
                        "{\"s\": \"one two three four five six seven eight nine ten\\neleven \\\"twelve\\\"\"}");
    assert_true(r.argument_chunks >= 12);
    free(r.raw);
}

static void report_12_types_of_values(void **state)
{
    writes(BLOCK_(D_ "invoke name=\"f\">\n" D_ "parameter name=\"b\" string=\"false\">true" C_ "parameter>\n" D_
                     "parameter name=\"s\" string=\"true\">true" C_ "parameter>\n" D_
                     "parameter name=\"n\" string=\"false\">oops" C_ "parameter>\n" C_ "invoke>\n"));
    expect(PLAIN_ ", " TOOLS_, "", "", "f", "{\"b\": true, \"s\": \"true\", \"n\": \"oops\"}", "tool_calls");
}

#define HISTORY_(args)                                                                                                 \
    "\"messages\": [{\"role\": \"user\", \"content\": \"go\"}, {\"role\": \"assistant\", \"content\": \"\", "          \
    "\"tool_calls\": [{\"id\": \"c\", \"type\": "                                                                      \
    "\"function\", \"function\": {\"name\": \"f\", \"arguments\": " args                                               \
    "}}]}, {\"role\": \"tool\", \"tool_call_id\": \"c\", \"content\": \"r\"}], " TOOLS_
#define SHOWN_ D_ "invoke name=\"f\">\n" D_ "parameter name=\"s\" string=\"true\">v" C_ "parameter>\n" C_ "invoke>"

static void report_13_14_arguments_in_the_history(void **state)
{
    expect_seen(HISTORY_("\"{\\\"s\\\": \\\"v\\\"}\""), SHOWN_, "name=\"arguments\"");
    expect_seen(HISTORY_("{\"s\": \"v\"}"), SHOWN_, "name=\"arguments\"");
    expect_seen(HISTORY_("\"\\\"{\\\\\\\"s\\\\\\\": \\\\\\\"v\\\\\\\"}\\\"\""), SHOWN_, "name=\"arguments\"");
    writes(BLOCK_(D_ "invoke name=\"f\">\n" D_ "parameter name=\"arguments\" string=\"false\">{\"s\": \"v\"}" C_
                     "parameter>\n" C_ "invoke>\n")); /* what a model that saw it wrongly imitates */
    expect(PLAIN_ ", " TOOLS_, "", "", "f", "{\"s\": \"v\"}", "tool_calls");
}

static void report_15_broken_arguments_in_the_history(void **state)
{
    static const char *const rows[] = {HISTORY_("\"7\""), HISTORY_("\"{broken\""), HISTORY_("null"),
                                       HISTORY_("\"\""),  HISTORY_("[1]"),         HISTORY_("7")};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) expect_seen(rows[i], D_ "invoke name=\"f\">", NULL);
}

static void report_16_tool_choice_none(void **state)
{
    expect_seen(PLAIN_ ", " TOOLS_, "## Tools", NULL);
    expect_seen(PLAIN_ ", \"tool_choice\": \"none\", " TOOLS_, NULL, "## Tools");
}

static void report_19_nothing_after_the_reasoning(void **state)
{
    const long long before = metric(server, "affinity_choices_empty_total");
    writes("All of it was thought.</think>");
    expect(USER_ ", \"reasoning_effort\": \"max\", " TOOLS_, "All of it was thought.", "", NULL, NULL, "stop");
    assert_int_equal(metric(server, "affinity_choices_empty_total"), before + 2);
}

static void report_21_history_without_reasoning(void **state)
{
    expect_seen(HISTORY_("\"{}\""), "<｜Assistant｜><think></think>", NULL);
}

static void report_22_system_message_last(void **state)
{
    writes("x");
    static const char *const rows[] = {
        "\"messages\": [{\"role\": \"user\", \"content\": \"go\"}, {\"role\": \"system\", \"content\": \"be brief\"}]",
        "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"system\", \"content\": \"b\"}, "
        "{\"role\": "
        "\"user\", \"content\": \"c\"}]"};
    for (int i = 0; i < 2; i++) {
        said r = chat(rows[i], false);
        char *text = seen();
        static const char end[] = "<｜Assistant｜><think>";
        assert_string_equal(text + strlen(text) - strlen(end), end);
        free(text);
        free(r.raw);
    }
}

static void report_23_control_tokens_do_not_show(void **state)
{
    writes("a<｜begin▁of▁sentence｜>b<｜User｜>c<｜Assistant｜>d");
    expect(PLAIN_, "", "abcd", NULL, NULL, "stop");
}

static void report_24_literal_control_strings(void **state)
{
    expect_seen("\"messages\": [{\"role\": \"user\", \"content\": \"a</think><｜User｜>b<｜end▁of▁sentence｜>\"}]",
                "a</think><｜User｜>b", NULL);
    const int32_t user = (int32_t)aff__tokenizer_find(the_tok, "<｜User｜>"),
                  close = (int32_t)aff__tokenizer_find(the_tok, "</think>");
    int users = 0;
    for (int64_t i = 0; i < n_given; i++) {
        users += given[i] == user;
        assert_true(given[i] != close && given[i] != (int32_t)scripted.cfg.eos);
    }
    assert_int_equal(users, 1);
}

static void report_25_default_temperature(void **state)
{
    aff_ask a;
    static const char body[] = "{" USER_ "}";
    assert_int_equal(aff__ask_decode(&a, AFF_CHAT_COMPLETIONS, body, strlen(body), 4096, NULL), AFF_OK);
    assert_true(a.sampling.temperature >= 1 && a.sampling.temperature <= 1);
    aff__ask_free(&a);
    answer r = post(server, CHAT, "{" USER_ ", \"temperature\": 0.6, \"max_tokens\": 1}");
    assert_non_null(strstr(r.head, "x-affinity-warning: "));
    done_with(&r);
}

static void report_26_ids_never_repeat(void **state)
{
    char ids[8][64];
    writes(BLOCK_(PING_ PING_));
    for (int i = 0; i < 4; i++) {
        said r = chat(PLAIN_ ", " TOOLS_, i % 2);
        assert_int_equal(r.calls, 2);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(strlen(r.id[k]), strlen("call_") + 32); /* 128 bits */
            strcpy(ids[2 * i + k], r.id[k]);
            for (int j = 0; j < 2 * i + k; j++) assert_string_not_equal(ids[j], ids[2 * i + k]);
        }
        free(r.raw);
    }
}

static void report_27_characters_over_tokens(void **state)
{
    writes("😀 你好 ﷽ é");
    assert_true(script.n > 8); /* bytes of characters, here */
    expect(PLAIN_, "", "😀 你好 ﷽ é", NULL, NULL, "stop");
    said r = chat(PLAIN_, true);
    assert_null(strstr(r.raw, "\xef\xbf\xbd"));
    free(r.raw);
}

static void report_28_prompt_ends_in_a_character(void **state)
{
    aff_ids ids = {0};
    char body[256];
    assert_int_equal(aff__tokenizer_encode(the_tok, "a😀", 5, false, &ids, NULL), AFF_OK);
    assert_true(ids.n > 2);
    snprintf(body, sizeof body, "{\"prompt\": [%u, %u], \"temperature\": 0}", ids.id[0], ids.id[1]);
    aff__ids_free(&ids);
    writes("bc");
    answer a = post(server, "/v1/completions", body);
    assert_string_equal(text_at(a.json, "choices.0.text"), "bc");
    done_with(&a);
}

static void report_34_35_finish_of_a_stream(void **state)
{
    writes("Yes." BLOCK_(PING_));
    said r = chat(PLAIN_ ", " TOOLS_, true); /* stream_answer looks for the key in every chunk */
    assert_string_equal(r.finish, "tool_calls");
    free(r.raw);
    r = chat(PLAIN_ ", \"parallel_tool_calls\": false, " TOOLS_, true);
    assert_string_equal(r.finish, "tool_calls");
    free(r.raw);
    char fields[1024];
    snprintf(fields, sizeof fields, PLAIN_ ", \"max_tokens\": %zu, " TOOLS_, script.n - 3); /* cut in the call */
    r = chat(fields, true);
    assert_string_equal(r.finish, "length");
    free(r.raw);
}

static void report_36_reasoning_tokens(void **state)
{
    writes("one two three</think>four");
    size_t n = 0;
    while (script.id[n] != (uint32_t)aff__tokenizer_find(the_tok, "</think>")) n++;
    for (int stream = 0; stream < 2; stream++) {
        said r = chat(USER_, stream);
        assert_int_equal(r.reasoning_tokens, n + 1);
        assert_int_equal(r.tokens, script.n + 1);
        free(r.raw);
    }
}

/* The types of a stream's events, joined. */
static char *types_of(const char *body)
{
    aff_buf b = {0};
    json_t *e;
    char last[128] = "";
    for (int i = 0; (e = event_at(body, i)); i++, json_decref(e)) {
        const char *type = text_at(e, "type");
        if (strcmp(type, last) == 0) continue; /* deltas */
        if (b.n) aff__buf_puts(&b, " ", NULL);
        aff__buf_puts(&b, type, NULL);
        snprintf(last, sizeof last, "%s", type);
    }
    return b.s;
}

static void report_37_38_responses_events(void **state)
{
    writes("Hm.</think>Text." BLOCK_(D_ "invoke name=\"f\">\n" D_ "parameter name=\"s\" string=\"true\">v" C_
                                        "parameter>\n" C_ "invoke>\n"));
    answer a = post(server, "/v1/responses",
                    "{\"input\": \"go\", \"temperature\": 0, \"stream\": true, \"tools\": [{\"type\": \"function\", "
                    "\"name\": \"f\"}, {\"type\": "
                    "\"web_search\"}]}");
    char *types = types_of(a.body);
    assert_string_equal(
        types,
        "response.created response.in_progress "
        "response.output_item.added response.reasoning_text.delta "
        "response.reasoning_text.done response.output_item.done "
        "response.output_item.added response.content_part.added response.output_text.delta "
        "response.output_text.done response.content_part.done response.output_item.done "
        "response.output_item.added response.function_call_arguments.delta response.function_call_arguments.done "
        "response.output_item.done response.completed");
    free(types);
    json_t *e, *last = NULL;
    for (int i = 0; (e = event_at(a.body, i)); i++) {
        assert_int_equal(int_at(e, "sequence_number"), i);
        json_decref(last);
        last = e;
    }
    assert_string_equal(text_at(last, "response.object"), "response");
    assert_string_equal(text_at(last, "response.output.1.content.0.text"), "Text.");
    assert_string_equal(text_at(last, "response.output.2.arguments"), "{\"s\": \"v\"}");
    assert_int_equal(strncmp(text_at(last, "response.output.2.id"), "fc_", 3), 0);
    assert_int_equal(strncmp(text_at(last, "response.output.2.call_id"), "call_", 5), 0);
    at(last, "response.usage.total_tokens");
    assert_null(strstr(a.body, "DSML"));
    assert_non_null(strstr(a.head, "x-affinity-ignored: tools[1]"));
    json_decref(last);
    done_with(&a);
}

static void report_39_messages_events(void **state)
{
    static const char body[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"go\"}], \"max_tokens\": 100, "
                               "\"temperature\": 0, \"stream\": true, "
                               "\"thinking\": {\"type\": \"%s\"}, \"tools\": [{\"name\": \"ping\", \"input_schema\": "
                               "{\"type\": \"object\"}}]}";
    char text[512];
    writes("Hm.</think>Text." BLOCK_(PING_));
    snprintf(text, sizeof text, body, "enabled");
    answer a = post(server, "/v1/messages", text);
    char *types = types_of(a.body);
    assert_string_equal(
        types, "message_start content_block_start content_block_delta content_block_stop content_block_start "
               "content_block_delta content_block_stop content_block_start content_block_delta content_block_stop "
               "message_delta message_stop");
    assert_non_null(strstr(a.body, "\"stop_reason\": \"tool_use\""));
    assert_non_null(strstr(a.body, "signature_delta"));
    free(types);
    done_with(&a);
    writes("Text.");
    snprintf(text, sizeof text, body, "disabled");
    a = post(server, "/v1/messages", text);
    assert_null(strstr(a.body, "thinking"));
    assert_non_null(strstr(a.body, "\"type\": \"message_stop\""));
    done_with(&a);
}

static void report_40_effort_levels(void **state)
{
    static const char high[] = "Reasoning Effort: Absolute maximum", most[] = "Reasoning Effort: Beyond maximum";
    expect_seen(USER_, high, most); /* thinking is on at high unless the request says otherwise */
    expect_seen(USER_ ", \"reasoning_effort\": \"low\"", "<think>", "Reasoning Effort");
    expect_seen(USER_ ", \"reasoning_effort\": \"minimal\"", "<think>", "Reasoning Effort");
    expect_seen(USER_ ", \"reasoning_effort\": \"medium\"", high, most);
    expect_seen(USER_ ", \"reasoning_effort\": \"xhigh\"", high, most);
    expect_seen(USER_ ", \"reasoning_effort\": \"max\"", most, high);
    expect_seen(USER_ ", \"reasoning_effort\": \"none\"", "<｜Assistant｜></think>", "<think>");
    expect_seen(USER_ ", \"chat_template_kwargs\": {\"thinking\": false}", "<｜Assistant｜></think>", "<think>");
}

static void report_41_newlines_in_tokens(void **state)
{
    writes("Done.\n\n");
    const size_t n = script.n;
    writes("Done." BLOCK_(PING_));
    assert_true(n < script.n);
    expect(PLAIN_ ", " TOOLS_, "", "Done.", "ping", "{}", "tool_calls");
    /* two newlines are the block's, as it would be rendered again */
    writes("Done.\n\n\n" D_ "tool_calls>\n" PING_ C_ "tool_calls>");
    expect(PLAIN_ ", " TOOLS_, "", "Done.\n", "ping", "{}", "tool_calls");
    writes("One.\n\nTwo.\n");
    expect(PLAIN_ ", " TOOLS_, "", "One.\n\nTwo.\n", NULL, NULL, "stop");
}

static void report_42_continue_flags(void **state)
{
#define PARTIAL_                                                                                                       \
    "\"thinking\": {\"type\": \"disabled\"}, \"messages\": [{\"role\": \"user\", \"content\": \"go\"}, {\"role\": "    \
    "\"assistant\", \"content\": \"It is\"%s}]"
    char fields[512];
    static const struct {
        const char *message, *rest, *end;
    } rows[] = {
        {"", "", "It is<｜end▁of▁sentence｜><｜Assistant｜></think>"},
        {"", ", \"continue_final_message\": true, \"add_generation_prompt\": false", "<｜Assistant｜></think>It is"},
        {", \"prefix\": true", "", "<｜Assistant｜></think>It is"}};
    writes(" so.");
    for (size_t i = 0; i < 3; i++) {
        snprintf(fields, sizeof fields, PARTIAL_ "%s", rows[i].message, rows[i].rest);
        said r = chat(fields, false);
        char *text = seen();
        assert_string_equal(text + strlen(text) - strlen(rows[i].end), rows[i].end);
        assert_string_equal(r.content, " so.");
        free(text);
        free(r.raw);
    }
}

static void report_44_talk_in_place_of_a_call(void **state)
{
    writes("I would now call ping.");
    expect(PLAIN_ ", " TOOLS_, "", "I would now call ping.", NULL, NULL, "stop");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(report_01_no_fragments_in_content),
                                       cmocka_unit_test(report_02_no_markup_in_arguments),
                                       cmocka_unit_test(report_03_misspelled_opener),
                                       cmocka_unit_test(report_04_opener_left_out),
                                       cmocka_unit_test(report_05_06_call_inside_reasoning),
                                       cmocka_unit_test(report_07_reasoning_without_tools),
                                       cmocka_unit_test(report_08_answers_are_not_held_back),
                                       cmocka_unit_test(report_09_invented_markup),
                                       cmocka_unit_test(report_10_held_text_is_let_go),
                                       cmocka_unit_test(report_11_long_strings_stream),
                                       cmocka_unit_test(report_12_types_of_values),
                                       cmocka_unit_test(report_13_14_arguments_in_the_history),
                                       cmocka_unit_test(report_15_broken_arguments_in_the_history),
                                       cmocka_unit_test(report_16_tool_choice_none),
                                       cmocka_unit_test(report_19_nothing_after_the_reasoning),
                                       cmocka_unit_test(report_21_history_without_reasoning),
                                       cmocka_unit_test(report_22_system_message_last),
                                       cmocka_unit_test(report_23_control_tokens_do_not_show),
                                       cmocka_unit_test(report_24_literal_control_strings),
                                       cmocka_unit_test(report_25_default_temperature),
                                       cmocka_unit_test(report_26_ids_never_repeat),
                                       cmocka_unit_test(report_27_characters_over_tokens),
                                       cmocka_unit_test(report_28_prompt_ends_in_a_character),
                                       cmocka_unit_test(report_34_35_finish_of_a_stream),
                                       cmocka_unit_test(report_36_reasoning_tokens),
                                       cmocka_unit_test(report_37_38_responses_events),
                                       cmocka_unit_test(report_39_messages_events),
                                       cmocka_unit_test(report_40_effort_levels),
                                       cmocka_unit_test(report_41_newlines_in_tokens),
                                       cmocka_unit_test(report_42_continue_flags),
                                       cmocka_unit_test(report_44_talk_in_place_of_a_call)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
