/* aff-chat from the outside: the fixtures in, the same results out; bad lines, bad flags, help. */
#define _GNU_SOURCE
#include "support/test.h"
#include "support/chat_fixtures.h"
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define FIXTURES AFF_TESTS_DIR "/text/chat-fixtures/"

typedef struct output {
    int code;
    aff_buf text;
} output;

/* Runs aff-chat ARGS through the shell. */
static output aff_chat(const char *args)
{
    char command[2048], buf[4096];
    output o = {0};
    size_t n;
    snprintf(command, sizeof command, "'%s/aff-chat' %s", AFF_BIN_DIR, args);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    while ((n = fread(buf, 1, sizeof buf, f)) > 0) assert_int_equal(aff__buf_put(&o.text, buf, n, NULL), AFF_OK);
    int status = pclose(f);
    assert_true(WIFEXITED(status));
    o.code = WEXITSTATUS(status);
    assert_int_equal(aff__buf_put(&o.text, "", 0, NULL), AFF_OK);
    return o;
}

static void same_results(const char *args, const char *file)
{
    output o = aff_chat(args);
    json_t *lines = aff_test_chat_lines(file), *line;
    const char *p = o.text.s;
    size_t i;
    assert_int_equal(o.code, 0);
    json_array_foreach(lines, i, line)
    {
        const json_t *expected = json_object_get(line, "expected"), *error = json_object_get(line, "error");
        json_t *got = NULL, *want = json_pack("{s:O}", "id", json_object_get(line, "id"));
        const char *lf = strchr(p, '\n');
        aff_error e = {0};
        assert_non_null(lf);
        if (expected) json_object_set(want, "expected", (json_t *)(uintptr_t)expected);
        if (error) json_object_set(want, "error", (json_t *)(uintptr_t)error);
        assert_int_equal(aff__json_parse_exact(&got, p, (size_t)(lf - p), "output", true, 64, &e), AFF_OK);
        if (!json_equal(got, want))
            fail_msg("%s: got %.*s", json_string_value(json_object_get(line, "id")), (int)(lf - p), p);
        json_decref(got);
        json_decref(want);
        p = lf + 1;
    }
    assert_int_equal(*p, 0);
    json_decref(lines);
    aff__buf_free(&o.text);
}

static void fixtures(void **state)
{
    same_results("render --reference " FIXTURES "encode.jsonl", "encode.jsonl");
    same_results("parse --reference <" FIXTURES "parse.jsonl", "parse.jsonl");
}

static void prints(const char *args, int code, const char *text)
{
    output o = aff_chat(args);
    assert_int_equal(o.code, code);
    assert_string_equal(o.text.s, text);
    aff__buf_free(&o.text);
}

static void lines(void **state)
{
    prints("render <<'X'\n{\"id\":1,\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n\n"
           "{\"id\":\"b\",\"messages\":[]}\nX\n",
           0,
           "{\"id\": 1, \"expected\": \"<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>\"}\n"
           "{\"id\": \"b\", \"error\": \"messages: expected at least one message, got none\"}\n");
    prints("render --chat-format v4.1 "
           "<<'X'\n{\"model\":\"v4-first\",\"messages\":[{\"role\":\"system\",\"content\":\"a\"}],\"options\":{"
           "\"thinking_mode\":\"chat\"}}\nX\n",
           0, "{\"id\": null, \"expected\": \"<｜begin▁of▁sentence｜><｜System｜>a<｜Assistant｜></think>\"}\n");
    prints("render "
           "<<'X'\n{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"}],\"options\":{\"thinking_mode\":\"chat\","
           "\"continue_final_message\":true}}\nX\n",
           0, "{\"id\": null, \"expected\": \"<｜begin▁of▁sentence｜>a\"}\n");
    prints("parse - <<'X'\n{\"id\":1,\"completion\":\"a</think>b\",\"tools\":[]}\n{\"id\":2}\nX\n", 0,
           "{\"id\": 1, \"expected\": {\"content\": \"b\", \"reasoning_content\": \"a\", \"tool_calls\": []}}\n"
           "{\"id\": 2, \"error\": \"completion: expected a string\"}\n");
    /* A line that is no object is answered too, and seen in the exit code. */
    prints("parse 2>&1 >/dev/null <<'X'\n{\"id\":1,\nX\n", 1,
           "aff-chat: line 1 of the input: line 1 column 8: string or '}' expected near end of file\n");
    prints("parse 2>/dev/null <<'X'\n[]\n{\"id\":2,\"completion\":\"</think>\"}\nX\n", 1,
           "{\"id\": null, \"error\": \"line 1 of the input: expected an object\"}\n"
           "{\"id\": 2, \"expected\": {\"content\": \"\", \"reasoning_content\": \"\", \"tool_calls\": []}}\n");
}

static void usage(void **state)
{
    output o = aff_chat("--help");
    assert_int_equal(o.code, 0);
    assert_non_null(strstr(o.text.s, "--reference"));
    assert_non_null(strstr(o.text.s, "--chat-format"));
    aff__buf_free(&o.text);
    prints("translate 2>&1", 2, "aff-chat: expected render or parse, got 'translate'\n");
    prints("render --chat-format v5 2>&1 </dev/null", 2,
           "aff-chat: --chat-format: expected auto, v4, 0731 or v4.1, got 'v5'\n");
    prints("render </dev/null", 0, "");
    o = aff_chat("2>/dev/null");
    assert_int_equal(o.code, 2);
    aff__buf_free(&o.text);
    o = aff_chat("render /nonexistent/x 2>&1");
    assert_int_equal(o.code, 1);
    assert_non_null(strstr(o.text.s, "/nonexistent/x"));
    aff__buf_free(&o.text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(fixtures), cmocka_unit_test(lines), cmocka_unit_test(usage)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
