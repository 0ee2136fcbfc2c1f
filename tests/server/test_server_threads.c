/* server: a real one on tiny-v4, seen through its socket. Clients wait for what the server says or does, never for
 * time. */
#include "support/test.h"
#include "server/client.h"
#include <pthread.h>

#define PARIS                                                                                                          \
    "\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"temperature\": 0"
#define PLAIN PARIS ", \"thinking\": {\"type\": \"disabled\"}"
#define CHAT  "/v1/chat/completions"
static const char paris[] = "The capital of France is Paris.";

/* An answer that goes on until someone stops it. */
#define ENDLESS "{" PLAIN ", \"stream\": true, \"ignore_eos\": true}"

/* ---- answers ---- */

static void chat_whole(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer a = post(s, CHAT, "{" PLAIN ", \"unheard_of\": 1, \"user\": \"u\"}");
    assert_int_equal(a.status, 200);
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "stop");
    assert_string_equal(text_at(a.json, "object"), "chat.completion");
    assert_int_equal(int_at(a.json, "usage.prompt_tokens"), 11);
    assert_int_equal(int_at(a.json, "usage.completion_tokens"), 8); /* seven of text and the end */
    assert_int_equal(int_at(a.json, "usage.total_tokens"), 19);
    assert_non_null(strstr(a.head, "x-affinity-ignored: unheard_of\r\n"));
    assert_non_null(strstr(a.head, "x-request-id: req_"));
    done_with(&a);
    a = post(s, CHAT, "{" PARIS "}"); /* thinking is on unless it is turned off */
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    assert_true(strlen(text_at(a.json, "choices.0.message.reasoning_content")) > 5);
    const long long reasoning = int_at(a.json, "usage.completion_tokens_details.reasoning_tokens");
    assert_int_equal(int_at(a.json, "usage.completion_tokens"), reasoning + 8);
    done_with(&a);
    a = post(s, CHAT, "{" PLAIN ", \"max_tokens\": 3}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), "The capital of");
    assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "length");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void chat_stream(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer a = post(s, CHAT, "{" PLAIN ", \"stream\": true, \"stream_options\": {\"include_usage\": true}}");
    char text[256] = "";
    int i = 0;
    json_t *e = event_at(a.body, i++);
    assert_non_null(strstr(a.head, "Content-Type: text/event-stream"));
    assert_string_equal(text_at(e, "choices.0.delta.role"), "assistant");
    for (; json_array_size(json_object_get(e, "choices")); json_decref(e), e = event_at(a.body, i++)) {
        const json_t *content = json_object_get(at(e, "choices.0.delta"), "content");
        at(e, "choices.0.finish_reason"); /* is there, null or not */
        assert_string_equal(text_at(e, "object"), "chat.completion.chunk");
        if (content) strcat(text, json_string_value(content));
        if (json_is_string(at(e, "choices.0.finish_reason")))
            assert_string_equal(text_at(e, "choices.0.finish_reason"), "stop");
    }
    assert_string_equal(text, paris);
    assert_int_equal(int_at(e, "usage.completion_tokens"), 8);
    json_decref(e);
    assert_int_equal(i, 1 + 7 + 1 + 1); /* role, seven tokens, finish, usage */
    assert_string_equal(a.body + strlen(a.body) - 14, "data: [DONE]\n\n");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void check_call(const json_t *row, const char *name, const char *args)
{
    json_t *v = json_loads(args, 0, NULL);
    assert_string_equal(name, text_at(row, "call.name"));
    assert_true(json_equal(v, at(row, "call.arguments")));
    json_decref(v);
}

static void tool_calls(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    FILE *f = fopen(AFF_SOURCE_DIR "/tools/tiny/eval/tools.jsonl", "r");
    char line[8192], last_id[64] = "";
    assert_non_null(f);
    for (int n = 0; n < 4 && fgets(line, sizeof line, f); n++) {
        json_t *row = json_loads(line, 0, NULL), *r = tool_request(row, n % 2), *e;
        char *body = json_dumps(r, 0);
        answer a = post(s, CHAT, body);
        if (n % 2 == 0) {
            assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "tool_calls");
            assert_true(json_is_null(at(a.json, "choices.0.message.content")));
            check_call(row, text_at(a.json, "choices.0.message.tool_calls.0.function.name"),
                       text_at(a.json, "choices.0.message.tool_calls.0.function.arguments"));
            assert_string_not_equal(text_at(a.json, "choices.0.message.tool_calls.0.id"), last_id);
            snprintf(last_id, sizeof last_id, "%s", text_at(a.json, "choices.0.message.tool_calls.0.id"));
        } else {
            char args[512] = "", name[64] = "", finish[32] = "";
            for (int i = 0; (e = event_at(a.body, i)); i++, json_decref(e)) {
                const json_t *delta = at(e, "choices.0.delta"), *call_ = json_object_get(delta, "tool_calls");
                if (json_is_string(at(e, "choices.0.finish_reason")))
                    snprintf(finish, sizeof finish, "%s", text_at(e, "choices.0.finish_reason"));
                if (!call_) continue;
                assert_int_equal(int_at(call_, "0.index"), 0);
                if (json_object_get(at(call_, "0"), "id"))
                    snprintf(name, sizeof name, "%s", text_at(call_, "0.function.name"));
                strcat(args, text_at(call_, "0.function.arguments"));
            }
            assert_string_equal(finish, "tool_calls");
            check_call(row, name, args);
        }
        assert_null(strstr(a.body, "DSML"));
        done_with(&a);
        free(body);
        json_decref(r);
        json_decref(row);
    }
    fclose(f);
    aff__server_stop(s, 0);
}

static void stops(void **state)
{
    static const struct {
        const char *stop, *text;
    } rows[] = {{"\"nce is\"", "The capital of Fra"}, /* begins and ends inside tokens */
                {"[\"is Paris\", \"of Fran\"]", "The capital "},
                {"[\"Paris!\", \"is Paris.x\"]", "The capital of France is Paris."}, /* held back, then let go */
                {"[\"T\"]", ""}};
    aff_server *s = serve((aff_server_options){0});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char body[512];
        snprintf(body, sizeof body, "{" PLAIN ", \"stop\": %s}", rows[i].stop);
        answer a = post(s, CHAT, body);
        assert_string_equal(text_at(a.json, "choices.0.message.content"), rows[i].text);
        assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "stop");
        done_with(&a);
    }
    answer a = post(s, CHAT, "{" PARIS ", \"stop\": [\"know\", \"is Par\"]}"); /* not looked for in reasoning */
    assert_string_equal(text_at(a.json, "choices.0.message.content"), "The capital of France ");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void sampling(void **state)
{
    static const char warm[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"thinking\": "
                               "{\"type\": \"disabled\"}, \"temperature\": 2, \"top_p\": 1, "
                               "\"max_tokens\": 12, \"seed\": 7, \"n\": 2}";
    aff_server *s = serve((aff_server_options){0});
    answer a = post(s, CHAT, warm), b = post(s, CHAT, warm);
    for (int i = 0; i < 2; i++) {
        char path[64];
        snprintf(path, sizeof path, "choices.%d.message.content", i);
        assert_string_equal(text_at(a.json, path), text_at(b.json, path));
    }
    assert_string_not_equal(text_at(a.json, "choices.0.message.content"), text_at(a.json, "choices.1.message.content"));
    done_with(&a);
    done_with(&b);
    a = post(s, "/tokenize", "{\"content\": \" Paris\"}");
    char body[512];
    assert_int_equal(json_array_size(at(a.json, "tokens")), 1);
    snprintf(body, sizeof body, "{" PLAIN ", \"logit_bias\": {\"%lld\": -100}}", int_at(a.json, "tokens.0"));
    done_with(&a);
    a = post(s, CHAT, body);
    assert_null(strstr(text_at(a.json, "choices.0.message.content"), " Paris"));
    done_with(&a);
    a = post(s, CHAT, "{" PLAIN ", \"logprobs\": true, \"top_logprobs\": 3}");
    assert_int_equal(json_array_size(at(a.json, "choices.0.logprobs.content")), 7);
    assert_string_equal(text_at(a.json, "choices.0.logprobs.content.5.token"), " Paris");
    assert_int_equal(json_array_size(at(a.json, "choices.0.logprobs.content.5.top_logprobs")), 3);
    assert_true(json_number_value(at(a.json, "choices.0.logprobs.content.5.logprob")) <= 0);
    assert_string_equal(text_at(a.json, "choices.0.logprobs.content.5.top_logprobs.0.token"),
                        " Paris"); /* temperature 0 */
    assert_int_equal(json_array_size(at(a.json, "choices.0.logprobs.reasoning_content")), 0);
    done_with(&a);
    aff__server_stop(s, 0);
}

static void completions(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer t = post(s, "/tokenize", "{\"content\": \"The capital of\", \"add_special\": true}");
    answer a = post(s, "/v1/completions", "{\"prompt\": \"The capital of\", \"temperature\": 0, \"max_tokens\": 6}");
    json_t *r = json_pack("{s:O,s:i,s:i}", "prompt", at(t.json, "tokens"), "temperature", 0, "max_tokens", 6);
    char *body = json_dumps(r, 0);
    answer b = post(s, "/v1/completions", body);
    assert_string_equal(text_at(a.json, "object"), "text_completion");
    assert_string_equal(text_at(a.json, "choices.0.text"), text_at(b.json, "choices.0.text"));
    assert_int_equal(int_at(a.json, "usage.prompt_tokens"), 4); /* begin of sequence and three words */
    answer d = post(s, "/detokenize", "{\"tokens\": [0, 1]}");
    assert_string_equal(text_at(d.json, "content"), "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜>");
    answer e = post(s, "/v1/completions",
                    "{\"prompt\": [\"The capital of\"], \"temperature\": 0, \"max_tokens\": 6, \"echo\": true}");
    assert_int_equal(strncmp(text_at(e.json, "choices.0.text"), "The capital of", 14), 0);
    assert_string_equal(text_at(e.json, "choices.0.text") + 14, text_at(a.json, "choices.0.text"));
    json_decref(r);
    free(body);
    done_with(&t);
    done_with(&a);
    done_with(&b);
    done_with(&d);
    done_with(&e);
    aff__server_stop(s, 0);
}

static void messages(void **state)
{
    static const char *const order[] = {"message_start",      "content_block_start", "content_block_delta",
                                        "content_block_stop", "content_block_start", "content_block_delta",
                                        "content_block_stop", "message_delta",       "message_stop"};
    aff_server *s = serve((aff_server_options){0});
    answer a =
        post(s, "/v1/messages?beta=true",
             "{" PARIS
             ", \"max_tokens\": 99, \"stream\": true, \"thinking\": {\"type\": \"enabled\", \"budget_tokens\": 1024}}");
    size_t k = 0;
    char text[256] = "";
    json_t *e;
    for (int i = 0; (e = event_at(a.body, i)); i++, json_decref(e)) {
        const char *type = text_at(e, "type");
        if (strcmp(type, "ping") == 0) continue; /* a slow machine */
        if (k && strcmp(type, "content_block_delta") == 0) {
            const json_t *t = json_object_get(at(e, "delta"), "text");
            if (t) strcat(text, json_string_value(t));
            if (strcmp(order[k - 1], type) == 0) continue; /* more of the same */
        }
        assert_true(k < sizeof order / sizeof *order);
        assert_string_equal(type, order[k++]);
        if (strcmp(type, "message_delta") == 0) assert_string_equal(text_at(e, "delta.stop_reason"), "end_turn");
    }
    assert_int_equal(k, sizeof order / sizeof *order);
    assert_string_equal(text, paris);
    done_with(&a);
    a = post(s, "/v1/messages",
             "{" PARIS ", \"max_tokens\": 99, \"stop_sequences\": [\"nce is\"]}"); /* no thinking unless asked for */
    assert_string_equal(text_at(a.json, "content.0.text"), "The capital of Fra");
    assert_string_equal(text_at(a.json, "stop_reason"), "stop_sequence");
    assert_string_equal(text_at(a.json, "stop_sequence"), "nce is");
    answer c = post(s, "/v1/messages/count_tokens", "{" PARIS "}");
    assert_int_equal(int_at(c.json, "input_tokens"), int_at(a.json, "usage.input_tokens"));
    done_with(&c);
    done_with(&a);
    a = post(s, "/v1/messages", "{\"messages\": 3}");
    assert_int_equal(a.status, 400);
    assert_string_equal(text_at(a.json, "type"), "error");
    assert_string_equal(text_at(a.json, "error.type"), "invalid_request_error");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void responses(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    answer a = post(s, "/v1/responses",
                    "{\"input\": \"What is the capital of France?\", \"temperature\": 0, \"stream\": true, "
                    "\"reasoning\": {\"effort\": \"none\"}, "
                    "\"tools\": [{\"type\": \"web_search\"}]}");
    char text[256] = "";
    json_t *e, *last = NULL;
    for (int i = 0; (e = event_at(a.body, i)); i++) {
        assert_int_equal(int_at(e, "sequence_number"), i);
        if (strcmp(text_at(e, "type"), "response.output_text.delta") == 0) strcat(text, text_at(e, "delta"));
        json_decref(last);
        last = e;
    }
    assert_string_equal(text, paris);
    assert_string_equal(text_at(last, "type"), "response.completed");
    assert_string_equal(text_at(last, "response.output.0.content.0.text"), paris);
    assert_int_equal(int_at(last, "response.usage.output_tokens"), 8);
    assert_non_null(strstr(a.head, "x-affinity-ignored: tools[0]\r\n"));
    json_decref(last);
    done_with(&a);
    a = post(s, "/v1/responses",
             "{\"input\": [{\"role\": \"user\", \"content\": [{\"type\": \"input_text\", \"text\": \"What is the "
             "capital of France?\"}]}], "
             "\"temperature\": 0}");
    assert_string_equal(text_at(a.json, "output.0.type"), "reasoning");
    assert_string_equal(text_at(a.json, "output.1.content.0.text"), paris);
    assert_string_equal(text_at(a.json, "status"), "completed");
    done_with(&a);
    aff__server_stop(s, 0);
}

/* ---- bad input ---- */

static void bad_fields(void **state)
{
    static const struct {
        const char *path, *body, *param;
    } rows[] = {
        {CHAT, "", NULL},
        {CHAT, "{", NULL},
        {CHAT, "[]", NULL},
        {CHAT, "{\"messages\": [{\"role\": \"user\", \"content\": \"\\x\"}]}", NULL},
        {CHAT, "{\"a\\u0000b\": 1, " PLAIN "}", NULL},
        {CHAT, "{" PLAIN ", \"stop\": \"a\", \"st\\u006fp\": \"b\"}", NULL},
        {CHAT, "{}", "messages"},
        {CHAT, "{\"messages\": []}", "messages"},
        {CHAT, "{\"messages\": \"x\"}", "messages"},
        {CHAT, "{\"messages\": [7]}", ""},
        {CHAT, "{" PLAIN ", \"stream\": \"yes\"}", "stream"},
        {CHAT, "{" PLAIN ", \"max_tokens\": 0}", "max_tokens"},
        {CHAT, "{" PLAIN ", \"max_tokens\": 1.5}", "max_tokens"},
        {CHAT, "{" PLAIN ", \"max_tokens\": 18446744073709551615}", "max_tokens"},
        {CHAT, "{" PLAIN ", \"top_p\": 1.01}", "top_p"},
        {CHAT, "{" PLAIN ", \"top_logprobs\": 21, \"logprobs\": true}", "top_logprobs"},
        {CHAT, "{" PLAIN ", \"top_logprobs\": 2}", "top_logprobs"},
        {CHAT, "{" PLAIN ", \"logit_bias\": {\"x\": 1}}", "logit_bias"},
        {CHAT, "{" PLAIN ", \"logit_bias\": {\"5\": 101}}", "logit_bias"},
        {CHAT, "{" PLAIN ", \"n\": 17}", "n"},
        {CHAT, "{" PLAIN ", \"stop\": [\"\"]}", "stop"},
        {CHAT, "{" PLAIN ", \"stop\": 3}", "stop"},
        {CHAT, "{" PLAIN ", \"response_format\": {\"type\": \"xml\"}}", "response_format"},
        {CHAT, "{" PLAIN ", \"tool_choice\": \"required\"}", "tool_choice"},
        {CHAT, "{" PLAIN ", \"tool_choice\": {\"type\": \"function\", \"function\": {\"name\": \"f\"}}}",
         "tool_choice"},
        {CHAT, "{" PLAIN ", \"tools\": [{\"type\": \"function\"}]}", "tools[0]"},
        {CHAT, "{" PLAIN ", \"grammar\": \"root ::= x\"}", "grammar"},
        {CHAT, "{" PLAIN ", \"reasoning_effort\": \"huge\"}", "reasoning_effort"},
        {"/v1/completions", "{\"prompt\": [1, 99999]}", "prompt"},
        {"/v1/completions", "{\"prompt\": [\"a\", \"b\"]}", "prompt"},
        {"/v1/completions", "{\"prompt\": \"a\", \"suffix\": \"b\"}", "suffix"},
        {"/v1/responses", "{\"input\": \"a\", \"previous_response_id\": \"r\"}", "previous_response_id"},
        {"/v1/responses", "{\"input\": \"a\", \"text\": {\"format\": {\"type\": \"json_schema\"}}}", "text.format"},
        {"/v1/responses", "{\"input\": [{\"type\": \"function_call\"}]}", "input[0]"},
        {"/tokenize", "{\"content\": 1}", NULL},
        {"/detokenize", "{\"tokens\": [-1]}", NULL},
    };
    aff_server *s = serve((aff_server_options){0});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        answer a = post(s, rows[i].path, rows[i].body);
        if (a.status != 400) fail_msg("%s %s: status %d", rows[i].path, rows[i].body, a.status);
        assert_string_equal(text_at(a.json, "error.type"), "invalid_request_error");
        assert_true(strlen(text_at(a.json, "error.message")) > 5);
        if (rows[i].param && *rows[i].param) assert_string_equal(text_at(a.json, "error.param"), rows[i].param);
        done_with(&a);
    }
    answer a = post(s, CHAT,
                    "{" PLAIN ", \"tool_choice\": \"none\", \"tools\": [{\"type\": \"function\", \"function\": "
                    "{\"name\": \"f\", \"parameters\": "
                    "{\"maximum\": 18446744073709551615}}}], \"response_format\": {\"type\": \"text\"}, \"stop\": [], "
                    "\"user\": \"\\ud800\"}");
    assert_int_equal(a.status, 200);
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    assert_int_equal(metric(s, "affinity_requests_running"), 0);
    aff__server_stop(s, 0);
}

static void bad_http(void **state)
{
#define POST_ "POST " CHAT " HTTP/1.1\r\nHost: x\r\n"
    static const struct {
        const char *bytes;
        int status;
    } rows[] = {{POST_ "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ", 400},
                {POST_ "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400},
                {POST_ "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400},
                {POST_ "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400},
                {POST_ "Content-Length: 33554433\r\n\r\n", 413},
                {POST_ "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
                 400}, /* arrives; no messages */
                {"GET " CHAT " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405},
                {"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404},
                {"GET /health HTTP/1.1\nHost: x\nConnection: close\n\n", 200}};
    aff_server *s = serve((aff_server_options){.http = {.max_header = 16384}});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        answer a = parse_answer(exchange(s, rows[i].bytes, strlen(rows[i].bytes)));
        if (a.status != rows[i].status) fail_msg("row %zu: status %d", i, a.status);
        done_with(&a);
    }
    char *large =
        repeat("GET /health HTTP/1.1\r\nHost: x\r\nX: ", 'a', 60000, "\r\n\r\n"); /* the library answers, or closes */
    answer a = parse_answer(exchange(s, large, strlen(large)));
    assert_true(a.status != 200);
    done_with(&a);
    free(large);
    large = repeat("{\"messages\": ", '[', 70, "");
    a = post(s, CHAT, large);
    assert_int_equal(a.status, 400);
    done_with(&a);
    free(large);
    a = call(s, "HEAD", "/health", "", "");
    assert_int_equal(a.status, 200);
    assert_string_equal(a.body, "");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void slow_clients(void **state)
{
    aff_server *s = serve((aff_server_options){.http = {.header_ms = 50, .body_ms = 50}});
    static const char *const starts[] = {"", "GET /hea", POST_ "Content-Length: 100\r\n\r\n{"};
    for (int i = 0; i < 3; i++) { /* each is closed by the server, which is all that ends the read */
        char *got = exchange(s, starts[i], strlen(starts[i]));
        assert_null(strstr(got, " 200 "));
        free(got);
    }
    aff__server_stop(s, 0);
}

static void keys(void **state)
{
    aff_server *s = serve((aff_server_options){.api_key = "secret", .cors = "https://a.example,https://b.example"});
    static const struct {
        const char *header;
        int status;
    } rows[] = {{"", 401},
                {"Authorization: Bearer secre\r\n", 401},
                {"Authorization: Bearer secretsecret\r\n", 401},
                {"Authorization: secret\r\n", 401},
                {"x-api-key: Secret\r\n", 401},
                {"Authorization: Bearer secret\r\n", 200},
                {"x-api-key: secret\r\n", 200}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        answer a = call(s, "GET", "/v1/models", rows[i].header, "");
        if (a.status != rows[i].status) fail_msg("row %zu: status %d", i, a.status);
        done_with(&a);
    }
    answer a = call(s, "GET", "/health", "Origin: https://b.example\r\n", "");
    assert_int_equal(a.status, 200);
    assert_non_null(strstr(a.head, "Access-Control-Allow-Origin: https://b.example\r\n"));
    done_with(&a);
    a = call(s, "GET", "/health", "Origin: https://b.example.evil\r\n", "");
    assert_null(strstr(a.head, "Access-Control"));
    done_with(&a);
    a = call(s, "POST", "/v1/messages", "", "{}");
    assert_string_equal(text_at(a.json, "error.type"), "authentication_error");
    done_with(&a);
    aff__server_stop(s, 0);
}

static void too_long(void **state)
{
    aff_server *s = serve((aff_server_options){.engine = {.context = 64}});
    char *text = repeat("{\"max_tokens\": 5, \"messages\": [{\"role\": \"user\", \"content\": \"", '7', 300, "\"}]}");
    answer a = post(s, CHAT, text);
    assert_int_equal(a.status, 400);
    assert_string_equal(text_at(a.json, "error.code"), "context_length_exceeded");
    assert_int_equal(int_at(a.json, "error.n_ctx"), 64);
    assert_true(int_at(a.json, "error.n_prompt_tokens") > 64);
    done_with(&a);
    a = post(s, "/v1/messages", text);
    assert_int_equal(a.status, 400);
    assert_int_equal(strncmp(text_at(a.json, "error.message"), "prompt is too long", 18), 0);
    done_with(&a);
    a = post(s, CHAT, "{" PLAIN ", \"max_tokens\": 1000, \"ignore_eos\": true}"); /* ends where the context does */
    assert_int_equal(int_at(a.json, "usage.total_tokens"), 64);
    assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "length");
    done_with(&a);
    free(text);
    aff__server_stop(s, 0);
    s = serve((aff_server_options){.max_tokens_floor = 100}); /* raises what clients ask for */
    a = post(s, CHAT, "{" PLAIN ", \"max_tokens\": 3}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    aff__server_stop(s, 0);
}

/* ---- queue, leaving, stopping ---- */

static int begin_stream(const aff_server *s, const char *body, const char *until, aff_buf *got)
{
    return begin_at(s, CHAT, body, until, got);
}

static void queue_and_cancel(void **state)
{
    aff_server *s = serve((aff_server_options){.engine = {.slots = 1, .queue = 1}, .http = {.heartbeat_ms = 20}});
    aff_buf got[2] = {0};
    const int first = begin_stream(s, ENDLESS, "\"The\"", &got[0]),          /* has the slot */
        second = begin_stream(s, ENDLESS, ": queued, place 1\n\n", &got[1]); /* waits, and hears from the server */
    assert_null(strstr(got[1].s, "\"The\""));
    answer a = post(s, CHAT, "{" PLAIN "}");
    assert_int_equal(a.status, 429);
    assert_non_null(strstr(a.head, "Retry-After: "));
    assert_string_equal(text_at(a.json, "error.type"), "rate_limit_error");
    done_with(&a);
    assert_int_equal(metric(s, "affinity_requests_running"), 1);
    assert_int_equal(metric(s, "affinity_requests_queued"), 1);
    a = call(s, "GET", "/slots", "", "");
    assert_true(json_is_true(at(a.json, "0.is_processing")));
    done_with(&a);
    close(second); /* leaves from the queue */
    close(first);  /* and this one while it is answered */
    aff__server_wait_idle(s);
    assert_int_equal(metric(s, "affinity_choices_cancelled_total"), 2);
    a = post(s, CHAT, "{" PLAIN "}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    a = call(s, "GET", "/slots", "", "");
    assert_true(json_is_false(at(a.json, "0.is_processing")));
    done_with(&a);
    aff__buf_free(&got[0]);
    aff__buf_free(&got[1]);
    aff__server_stop(s, 0);
}

static void leaves_without_a_stream(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    aff_buf b = {0};
    put_request(&b, "POST", CHAT, "", "{" PLAIN ", \"ignore_eos\": true}");
    for (int i = 0; i < 3; i++) {
        const int fd = dial(s);
        send_all(fd, b.s, b.n);
        while (metric(s, "affinity_requests_total") < i + 1) {
        }
        if (i == 1) shutdown(fd, SHUT_WR); /* half closed counts as left */
        if (i != 1) close(fd);
        aff__server_wait_idle(s);
        if (i == 1) close(fd);
    }
    assert_int_equal(metric(s, "affinity_choices_cancelled_total"), 3);
    aff__buf_free(&b);
    aff__server_stop(s, 0);
}

static void leaves_in_the_prompt(void **state)
{
    aff_server *s = serve((aff_server_options){.engine = {.slots = 1, .chunk = 8}});
    char *body = repeat("{\"stream\": true, \"ignore_eos\": true, \"messages\": [{\"role\": \"user\", \"content\": \"",
                        '7', 4000, "\"}]}");
    aff_buf got = {0};
    close(begin_stream(s, body, "assistant", &got)); /* thousands of tokens are still to be read */
    aff__server_wait_idle(s);
    assert_int_equal(metric(s, "affinity_choices_cancelled_total"), 1);
    assert_null(strstr(got.s, "finish_reason\": \""));
    answer a = post(s, CHAT, "{" PLAIN "}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    aff__buf_free(&got);
    free(body);
    aff__server_stop(s, 0);
}

static void *stopper(void *s)
{
    aff__server_stop(s, 600000);
    return NULL;
}

static void draining(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    aff_buf got = {0};
    pthread_t t;
    int fd =
        begin_stream(s, "{" PLAIN ", \"stream\": true, \"ignore_eos\": true, \"max_tokens\": 60}", "\"The\"", &got);
    assert_int_equal(pthread_create(&t, NULL, stopper, s), 0);
    assert_true(read_until(fd, &got, "[DONE]")); /* is answered to its end */
    pthread_join(t, NULL);
    close(fd);
    got.n = 0;
    s = serve((aff_server_options){0});
    fd = begin_stream(s, ENDLESS, "\"The\"", &got);
    aff__server_stop(s, 0); /* no time for it */
    assert_true(read_until(fd, &got, NULL));
    assert_null(strstr(got.s, "[DONE]"));
    close(fd);
    aff__buf_free(&got);
}

typedef struct client {
    const aff_server *s;
    int i;
    char text[2][1024];
} client;

static void ask_one(const aff_server *s, int i, char *text, size_t cap)
{
    static const char *const cities[] = {"France", "Oman", "Italy", "Japan"};
    char body[512];
    snprintf(body, sizeof body,
             "{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of %s?\"}], \"seed\": %d, "
             "\"temperature\": %s, \"max_tokens\": 24}",
             cities[i % 4], i, i % 2 ? "1.5" : "0");
    answer a = post(s, CHAT, body);
    assert_int_equal(a.status, 200);
    const json_t *r = json_object_get(at(a.json, "choices.0.message"), "reasoning_content");
    snprintf(text, cap, "%s|%s", r ? json_string_value(r) : "", text_at(a.json, "choices.0.message.content"));
    done_with(&a);
}

static void *run_client(void *ctx)
{
    client *c = ctx;
    ask_one(c->s, c->i, c->text[1], sizeof c->text[1]);
    return NULL;
}

static void parallel(void **state)
{
    enum { CLIENTS = 6 };
    aff_server *s = serve((aff_server_options){.engine = {.slots = 3}});
    client c[CLIENTS];
    pthread_t t[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        c[i] = (client){.s = s, .i = i};
        ask_one(s, i, c[i].text[0], sizeof c[i].text[0]);
    }
    for (int i = 0; i < CLIENTS; i++) assert_int_equal(pthread_create(&t[i], NULL, run_client, &c[i]), 0);
    for (int i = 0; i < CLIENTS; i++) pthread_join(t[i], NULL);
    for (int i = 0; i < CLIENTS; i++) assert_string_equal(c[i].text[0], c[i].text[1]);
    assert_string_not_equal(c[0].text[0], c[2].text[0]);
    aff__server_stop(s, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(chat_whole),
                                       cmocka_unit_test(chat_stream),
                                       cmocka_unit_test(tool_calls),
                                       cmocka_unit_test(stops),
                                       cmocka_unit_test(sampling),
                                       cmocka_unit_test(completions),
                                       cmocka_unit_test(messages),
                                       cmocka_unit_test(responses),
                                       cmocka_unit_test(bad_fields),
                                       cmocka_unit_test(bad_http),
                                       cmocka_unit_test(slow_clients),
                                       cmocka_unit_test(keys),
                                       cmocka_unit_test(too_long),
                                       cmocka_unit_test(parallel),
                                       cmocka_unit_test(queue_and_cancel),
                                       cmocka_unit_test(leaves_without_a_stream),
                                       cmocka_unit_test(leaves_in_the_prompt),
                                       cmocka_unit_test(draining)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
