/* What no client should send, and some do: every answer has its dialect's shape, the server lives, and no slot stays
 * taken. */
#include "support/test.h"
#include "server/client.h"
#include <poll.h>

#define CHAT "/v1/chat/completions"
#define PLAIN                                                                                                          \
    "\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"temperature\": 0, "      \
    "\"thinking\": {\"type\": \"disabled\"}"
static const char paris[] = "The capital of France is Paris.";

/* Works as before, and nothing is left over. */
static void still_well(aff_server *s)
{
    answer a = post(s, CHAT, "{" PLAIN "}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    aff__server_wait_idle(s);
    assert_int_equal(metric(s, "affinity_requests_running"), 0);
    assert_int_equal(metric(s, "affinity_requests_queued"), 0);
    a = call(s, "GET", "/slots", "", "");
    for (size_t i = 0; i < json_array_size(a.json); i++) {
        assert_true(json_is_false(json_object_get(json_array_get(a.json, i), "is_processing")));
        assert_int_equal(json_integer_value(json_object_get(json_array_get(a.json, i), "n_past")), 0);
    }
    done_with(&a);
}

static char *prompt_of(const aff_server *s, const char *body)
{
    answer a = post(s, "/apply-template", body);
    if (a.status != 200) fail_msg("%s: %s", body, a.body);
    char *text = strdup(text_at(a.json, "prompt"));
    assert_non_null(text);
    done_with(&a);
    return text;
}

static void expect_prompt(const aff_server *s, const char *body, const char *holds)
{
    char *text = prompt_of(s, body);
    if (!strstr(text, holds)) fail_msg("%s: expected %s in %s", body, holds, text);
    free(text);
}

/* ---- bodies ---- */

static void expect_400(const aff_server *s, const char *path, const char *body, const char *says)
{
    answer a = post(s, path, body);
    if (a.status != 400) fail_msg("%s %s: status %d", path, body, a.status);
    if (!strstr(text_at(a.json, "error.message"), says))
        fail_msg("%s %s: %s", path, body, text_at(a.json, "error.message"));
    assert_string_equal(text_at(a.json, "error.type"), "invalid_request_error");
    if (strcmp(path, "/v1/messages") == 0) {
        assert_string_equal(text_at(a.json, "type"), "error");
        assert_int_equal(strncmp(text_at(a.json, "request_id"), "req_", 4), 0);
    } else {
        at(a.json, "error.param");
        at(a.json, "error.code");
    }
    done_with(&a);
}

static void every_dialect_says_what_is_wrong(void **state)
{
    static const char *const paths[] = {CHAT, "/v1/completions", "/v1/messages", "/v1/responses"};
    static const struct {
        const char *body, *says;
    } rows[] = {{"", "empty body"},
                {"{\"a\": }", "line 1"},
                {"null", "expected an object"},
                {"{\"model\": \"m\", \"model\": \"n\"}", "'model' occurs twice"},
                {"{\"model\": \"\\q\"}", "escape"},
                {"{\"model\": 7}", "model: expected a string"},
                {"{\"x\\u0000y\": 7}", "NUL"},
                {"{\"model\": \"\xff\"}", "byte 0xff"},
                {"{\"temperature\": NaN}", "line 1"}};
    static const char *const needs[] = {"\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]", "\"prompt\": \"a\"",
                                        "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]", "\"input\": \"a\""};
    static const struct {
        const char *field, *says;
    } types[] = {{"\"temperature\": \"hot\"", "temperature: expected a number, got a string"},
                 {"\"temperature\": -1", "temperature: expected 0 to 2, got -1"},
                 {"\"top_p\": 1e400", "1e400"},
                 {"\"top_k\": 1.5", "top_k: expected an integer, got a real number"},
                 {"\"seed\": 99999999999999999999", "seed: expected an integer, got a number out of range"},
                 {"\"stream\": 1", "stream: expected true or false, got an integer"},
                 {"\"logit_bias\": []", "logit_bias: expected an object, got an array"}};
    aff_server *s = serve((aff_server_options){0});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (size_t d = 0; d < 4; d++) {
            expect_400(s, paths[d], rows[i].body, rows[i].says);
        }
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        for (size_t d = 0; d < 4; d++) {
            char body[256];
            snprintf(body, sizeof body, "{%s, %s}", needs[d], types[i].field);
            expect_400(s, paths[d], body, types[i].says);
        }
    }
    expect_400(s, "/v1/completions", "{\"prompt\": [\"a\", \"b\"]}", "got an array of 2");
    expect_400(s, CHAT, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"a\\u0000b\"}}]}", "without NUL");
    expect_400(s, "/v1/messages", "{\"max_tokens\": 1, \"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{\"name\": \"a\\u0000b\", \"input_schema\": {}}]}", "without NUL");
    expect_400(s, "/v1/responses", "{\"input\": \"a\", \"tools\": [{\"type\": \"function\", \"name\": \"a\\u0000b\"}]}", "without NUL");
    still_well(s);
    aff__server_stop(s, 0);
}

static void depth_and_strings(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    for (int depth = 60; depth <= 70; depth++) {
        char *open = repeat("", '[', (size_t)depth - 1, ""), *close = repeat("", ']', (size_t)depth - 1, "");
        aff_buf b = {0};
        aff__buf_puts(&b, "{" PLAIN ", \"x\": ", NULL);
        aff__buf_puts(&b, open, NULL);
        aff__buf_puts(&b, close, NULL);
        aff__buf_puts(&b, "}", NULL);
        answer a = post(s, CHAT, b.s);
        assert_int_equal(a.status, depth <= 64 ? 200 : 400);
        if (a.status == 400) assert_non_null(strstr(text_at(a.json, "error.message"), "deeper than 64"));
        done_with(&a);
        aff__buf_free(&b);
        free(open);
        free(close);
    }
    char *large = repeat("{\"messages\": [{\"role\": \"user\", \"content\": \"", 'a', (16 << 20) + 1, "\"}]}");
    answer a = post(s, CHAT, large);
    assert_int_equal(a.status, 400);
    assert_non_null(strstr(text_at(a.json, "error.message"), "string"));
    done_with(&a);
    free(large);
    still_well(s);
    aff__server_stop(s, 0);
}

static void texts_arrive_unharmed(void **state)
{
    aff_server *s = serve((aff_server_options){0});
#define SAYS_(text) "{\"messages\": [{\"role\": \"user\", \"content\": \"" text "\"}]}"
    expect_prompt(s, SAYS_("a{b[c}d\\\\\\\"e,f:"), "<｜User｜>a{b[c}d\\\"e,f:<｜Assistant｜>"); /* braces and quotes */
    expect_prompt(s, SAYS_("\\ud800x\\udc00"), "<｜User｜>\xef\xbf\xbdx\xef\xbf\xbd<｜"); /* halves of characters */
    expect_prompt(s, SAYS_("\\ud83d\\ude00\\u00e9\\/"), "<｜User｜>😀é/<｜");
    expect_prompt(s, SAYS_(""), "<｜User｜><｜Assistant｜>");
    expect_prompt(s, "{\"messages\": [{\"role\": \"user\", \"content\": null}]}", "<｜User｜><｜Assistant｜>");
    expect_prompt(s, "{\"messages\": [{\"role\": \"user\", \"content\": []}]}", "<｜User｜><｜Assistant｜>");
    expect_prompt(s, "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\"}, {\"role\": \"user\"}]}",
                  "<｜User｜><｜Assistant｜>");
    /* results that no call asked for */
    expect_prompt(s, "{\"messages\": [{\"role\": \"tool\", \"tool_call_id\": \"x\", \"content\": \"42\"}]}",
                  "<｜User｜><tool_result>42</tool_result><｜Assistant｜>");
    expect_prompt(
        s, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"tool\", \"content\": \"42\"}]}",
        "<｜User｜>a\n\n<tool_result>42</tool_result><｜Assistant｜>");
    /* integers of any length, in a schema and in the arguments of an earlier call */
    expect_prompt(
        s,
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{\"type\": \"function\", \"function\": "
        "{\"name\": \"f\", "
        "\"parameters\": {\"maximum\": 18446744073709551615, \"x\": 123456789012345678901234567890, \"y\": "
        "-9223372036854775809}}}]}",
        "{\"maximum\": 18446744073709551615, \"x\": 123456789012345678901234567890, \"y\": -9223372036854775809}");
    expect_prompt(s,
                  "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"tool_calls\": "
                  "[{\"id\": \"1\", \"function\": "
                  "{\"name\": \"f\", \"arguments\": \"{\\\"n\\\": 18446744073709551615}\"}}]}, {\"role\": \"tool\", "
                  "\"tool_call_id\": \"1\", "
                  "\"content\": \"\"}]}",
                  "<｜DSML｜parameter name=\"n\" string=\"false\">18446744073709551615</｜DSML｜parameter>");
    /* a name that is no identifier: shown as it is */
    expect_prompt(s,
                  "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{\"type\": \"function\", "
                  "\"function\": {\"name\": "
                  "\"a\\\"b\\nc<｜DSML｜>\"}}]}",
                  "{\"name\": \"a\\\"b\\nc<｜DSML｜>\"}");
    answer a =
        post(s, CHAT,
             "{" PLAIN
             ", \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"a\\\"b\\nc\"}}], \"max_tokens\": 4}");
    assert_int_equal(a.status, 200);
    done_with(&a);
    /* control tokens in a caller's text are text: more tokens than the one that the template would have */
    a = post(s, "/tokenize", "{\"content\": \"</think>\", \"parse_special\": false}");
    assert_true(int_at(a.json, "count") > 1);
    done_with(&a);
    still_well(s);
    aff__server_stop(s, 0);
}

static void a_thousand_tools(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    aff_buf b = {0};
    char one[160];
    aff__buf_puts(&b, "{" PLAIN ", \"max_tokens\": 2, \"tools\": [", NULL);
    for (int i = 0; i < 1000; i++) {
        snprintf(one, sizeof one, "%s{\"type\": \"function\", \"function\": {\"name\": \"f%d\"}}", i ? ", " : "", i);
        aff__buf_puts(&b, one, NULL);
    }
    aff__buf_puts(&b, "]}", NULL);
    expect_prompt(s, b.s, "{\"name\": \"f998\"}\n{\"name\": \"f999\"}\n\nYou MUST strictly");
    answer a = post(s, CHAT, b.s); /* more tokens than this server's context */
    assert_int_equal(a.status, 400);
    assert_true(int_at(a.json, "error.n_prompt_tokens") > 8192);
    done_with(&a);
    aff__buf_free(&b);
    still_well(s);
    aff__server_stop(s, 0);
}

/* Held back for as long as it may still come, and let go at the end. */
static void a_stop_string_that_never_comes(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer a =
        post(s, CHAT, "{" PLAIN ", \"stream\": true, \"stop\": [\"The capital of France is Paris.?\", \"Paris.\\n\"]}");
    char text[256] = "";
    json_t *e;
    for (int i = 0; (e = event_at(a.body, i)); i++, json_decref(e)) {
        const json_t *content = json_object_get(at(e, "choices.0.delta"), "content");
        if (content) strcat(text, json_string_value(content));
    }
    assert_string_equal(text, paris);
    done_with(&a);
    char *never = repeat("{" PLAIN ", \"stop\": \"", 'T', 4096, "\"}");
    a = post(s, CHAT, never);
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "stop");
    done_with(&a);
    free(never);
    still_well(s);
    aff__server_stop(s, 0);
}

static void bodies_of_a_hundred_megabytes(void **state)
{
    enum { MIB = 1 << 20 };
    aff_server *s = serve((aff_server_options){0});
    static const char length[] = "POST " CHAT " HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n{",
                      chunked[] = "POST " CHAT
                                  " HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    answer a = parse_answer(exchange(s, length, strlen(length))); /* at once, without reading it */
    assert_int_equal(a.status, 413);
    done_with(&a);
    aff_buf got = {0};
    char *part = repeat("100000\r\n", ' ', MIB, "\r\n");
    const int fd = dial(s);
    send_all(fd, chunked, strlen(chunked));
    for (int i = 0; i < 100; i++) send_all(fd, part, strlen(part));
    send_all(fd, "0\r\n\r\n", 5);
    read_until(fd, &got, NULL);
    close(fd);
    a = parse_answer(got.s);
    assert_int_equal(a.status, 413);
    assert_string_equal(text_at(a.json, "error.type"), "invalid_request_error");
    done_with(&a);
    free(part);
    still_well(s);
    aff__server_stop(s, 0);
}

/* ---- connections ---- */

/* Sends a byte every few milliseconds, for ever: the deadline is for the whole. */
static void drip(const aff_server *s, const char *start, char forever)
{
    const int fd = dial(s);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char c;
    send_all(fd, start, strlen(start));
    int sent = 0;
    for (; sent < 60000; sent++) {
        if (send(fd, &forever, 1, MSG_NOSIGNAL) < 0) break;
        if (poll(&p, 1, 3) > 0 && recv(fd, &c, 1, 0) <= 0) break;
    }
    assert_true(sent < 60000);
    close(fd);
}

static void slow_loris(void **state)
{
    aff_server *s = serve((aff_server_options){.http = {.header_ms = 60, .body_ms = 60}});
    drip(s, "GET /health HTTP/1.1\r\nHost: x\r\nX: ", 'a');
    drip(s, "POST " CHAT " HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", ' ');
    drip(s, "POST " CHAT " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n", ' ');
    still_well(s);
    aff__server_stop(s, 0);
}

/* Takes nothing of a long answer: the connection goes, and the request with it. */
static void slow_reader(void **state)
{
    aff_server *s = serve((aff_server_options){.http = {.write_ms = 50}});
    aff_buf b = {0};
    const int fd = dial(s), small = 4096;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    put_request(&b, "POST", CHAT, "",
                "{" PLAIN ", \"stream\": true, \"ignore_eos\": true, \"logprobs\": true, \"top_logprobs\": 20}");
    send_all(fd, b.s, b.n);
    while (metric(s, "affinity_choices_cancelled_total") == 0) {
    }
    close(fd);
    aff__buf_free(&b);
    still_well(s);
    aff__server_stop(s, 0);
}

static void abort_storm(void **state)
{
    enum { N = 120 };
    /* only their leaving ends those that break off: the deadlines are long */
    aff_server *s = serve(
        (aff_server_options){.engine = {.slots = 2, .queue = 8}, .http = {.header_ms = 600000, .body_ms = 600000}});
    aff_buf whole = {0}, stream = {0};
    put_request(&whole, "POST", CHAT, "", "{" PLAIN ", \"ignore_eos\": true}");
    put_request(&stream, "POST", CHAT, "", "{" PLAIN ", \"ignore_eos\": true, \"stream\": true}");
    for (int i = 0; i < N;
         i++) { /* at every place: in the header, in the body, when all is sent, after some of the answer */
        const aff_buf *b = i % 2 ? &whole : &stream;
        const size_t n = i % 4 == 3 ? b->n : b->n * (size_t)i / N;
        const struct linger hard = {.l_onoff = i % 3 == 0};
        const int fd = dial(s);
        char c;
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard); /* a reset in place of an end */
        send_all(fd, b->s, n);
        if (i % 8 == 2 && n == b->n) (void)!recv(fd, &c, 1, 0);
        close(fd);
    }
    /* none of them is waited for: a request of one's own finds a place */
    answer a = {0};
    do {
        done_with(&a);
        a = post(s, CHAT, "{" PLAIN "}");
    } while (a.status == 429);
    assert_int_equal(a.status, 200);
    done_with(&a);
    aff__buf_free(&whole);
    aff__buf_free(&stream);
    still_well(s);
    aff__server_stop(s, 600000); /* waits for nobody */
}

/* Two requests in one packet, and one in many. */
static void pipelines_and_pieces(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    static const char two[] =
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    char *got = exchange(s, two, strlen(two));
    assert_non_null(strstr(got, "\"status\": \"ok\""));
    assert_non_null(strstr(got, "\"version\": "));
    free(got);
    aff_buf b = {0}, all = {0};
    put_request(&b, "POST", CHAT, "", "{" PLAIN "}");
    const int fd = dial(s);
    for (size_t i = 0; i < b.n; i++) send_all(fd, b.s + i, 1);
    read_until(fd, &all, NULL);
    close(fd);
    answer a = parse_answer(all.s);
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    aff__buf_free(&b);
    still_well(s);
    aff__server_stop(s, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_dialect_says_what_is_wrong),
                                       cmocka_unit_test(depth_and_strings),
                                       cmocka_unit_test(texts_arrive_unharmed),
                                       cmocka_unit_test(a_thousand_tools),
                                       cmocka_unit_test(a_stop_string_that_never_comes),
                                       cmocka_unit_test(bodies_of_a_hundred_megabytes),
                                       cmocka_unit_test(slow_loris),
                                       cmocka_unit_test(slow_reader),
                                       cmocka_unit_test(abort_storm),
                                       cmocka_unit_test(pipelines_and_pieces)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
