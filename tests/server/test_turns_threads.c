/* Turns kept token by token: a conversation that comes back is the sequence that was run, in every dialect and after a
 * restart; what a client changed is rendered. */
#define _XOPEN_SOURCE 700 /* nftw, mkdtemp */
#include "support/test.h"
#include "server/client.h"
#include "base/file.h"
#include "server/replay.h"
#include "state/prefix.h"
#include <ftw.h>
#include <sys/stat.h>

#define CHAT "/v1/chat/completions"
static char root[] = "/tmp/aff-turns-XXXXXX";

/* ---- the store by itself ---- */

static const uint32_t some_ids[] = {300, 301, 5, 300, 77};

static aff_turn turn_of(const aff_turn_call *call, size_t n_calls, const char *reasoning, const char *text,
                        const uint32_t *ids, size_t n_ids)
{
    return (aff_turn){.thinking = true,
                      .reasoning = reasoning,
                      .n_reasoning = strlen(reasoning),
                      .text = text,
                      .n_text = strlen(text),
                      .call = call,
                      .n_calls = n_calls,
                      .ids = ids,
                      .n_ids = n_ids};
}

static aff_turn_call call_of(const char *id, const char *name, const char *arguments)
{
    return (aff_turn_call){id, name, arguments, strlen(id), strlen(name), strlen(arguments)};
}

/* Whether the message finds a turn, which must have these ids. */
static bool finds(aff_replay *r, const char *message, bool thinking, const uint32_t *want, size_t n)
{
    json_t *v = json_loads(message, 0, NULL);
    aff_buf text = {0}, same = {0};
    aff_ids ids = {0};
    assert_non_null(v);
    const bool found = aff__replay_find(r, v, thinking, &text, &ids);
    if (found) {
        assert_int_equal(ids.n, n);
        assert_memory_equal(ids.id, want, n * sizeof *want);
        for (size_t i = 0; i < n; i++) {
            size_t k;
            const char *s = aff__tokenizer_bytes(the_tok, want[i], &k);
            assert_int_equal(aff__buf_put(&same, s, k, NULL), AFF_OK);
        }
        assert_int_equal(text.n, same.n);
        assert_memory_equal(text.s, same.s, same.n);
    }
    json_decref(v);
    aff__buf_free(&text);
    aff__buf_free(&same);
    aff__ids_free(&ids);
    return found;
}

#define CALL_(id, name, args) "{\"id\": \"" id "\", \"function\": {\"name\": \"" name "\", \"arguments\": " args "}}"
#define MESSAGE(text, reasoning, calls)                                                                                \
    "{\"content\": " text ", \"reasoning_content\": " reasoning ", \"tool_calls\": [" calls "]}"

static void what_is_the_same(void **state)
{
    static const struct {
        const char *message;
        bool thinking, found;
    } rows[] = {
        {MESSAGE("\"t\"", "\"why\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2.0, {\\\"c\\\": 3}]}\"")),
         true, true},
        {MESSAGE("\"t\\n\"", "\" why \"", CALL_("call_1", "f", "\"{\\\"b\\\":[2,{\\\"c\\\":3}],\\\"a\\\":1}\"")), true,
         true},
        {MESSAGE("[{\"type\": \"text\", \"text\": \"t\"}]", "null",
                 CALL_("call_1", "f", "{\"a\": 1, \"b\": [2.0, {\"c\": 3}]}")),
         true, true},
        {MESSAGE("\"t\"", "\"\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 4}]}\"")), true,
         false},
        {MESSAGE("\"t\"", "\"\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1}\"")), true, false},
        {MESSAGE("\"t\"", "\"\"", CALL_("call_1", "f", "\"{broken\"")), true, false},
        {MESSAGE("\"t\"", "\"\"", CALL_("call_1", "g", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 3}]}\"")), true,
         false},
        {MESSAGE("\"t\"", "\"\"", CALL_("call_2", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 3}]}\"")), true,
         false},
        {MESSAGE("\"t\"", "\"\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 3}]}\"")), false,
         false},
        {MESSAGE("\"t2\"", "\"\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 3}]}\"")), true,
         false},
        {MESSAGE("\"t\"", "\"other\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 3}]}\"")),
         true, false},
        {MESSAGE("\"t\"", "\"why\"", CALL_("call_1", "f", "\"{\\\"a\\\": 1, \\\"b\\\": [2, {\\\"c\\\": 3}]}\"") ", {}"),
         true, false},
        {MESSAGE("7", "\"why\"", ""), true, false},
        {MESSAGE("\"t\"", "\"why\"", "{\"id\": 7}"), true, false}};
    aff_replay *r;
    const aff_turn_call call = call_of("call_1", "f", "{\"a\": 1, \"b\": [2.0, {\"c\": 3}]}");
    const aff_turn t = turn_of(&call, 1, "why", "t", some_ids, 5);
    assert_int_equal(aff__replay_open(&r, the_tok, NULL, 0, NULL, NULL, NULL), AFF_OK);
    aff__replay_put(r, &t);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (finds(r, rows[i].message, rows[i].thinking, some_ids, 5) != rows[i].found) fail_msg("row %zu", i);
    aff__replay_free(r);
}

static void turns_without_calls(void **state)
{
    aff_replay *r;
    const uint32_t other[] = {9, 8};
    const aff_turn t = turn_of(NULL, 0, "why", "answer\n", some_ids, 5), u = turn_of(NULL, 0, "", "answer", other, 2);
    assert_int_equal(aff__replay_open(&r, the_tok, NULL, 0, NULL, NULL, NULL), AFF_OK);
    aff__replay_put(r, &t);
    assert_true(finds(r, MESSAGE("\"answer\"", "\"why\"", ""), true, some_ids, 5));
    assert_false(finds(r, MESSAGE("\"answer\"", "\"\"", ""), true, NULL, 0)); /* nobody's reasoning is handed out */
    aff__replay_put(r, &u);
    assert_true(finds(r, MESSAGE("\" answer\"", "null", ""), true, other, 2));
    aff__replay_put(r, &u); /* again: nothing new */
    assert_int_equal(aff__replay_count(r), 2);
    aff__replay_free(r);
}

static void bound(void **state)
{
    aff_replay *r;
    char id[16], message[256];
    assert_int_equal(aff__replay_open(&r, the_tok, NULL, 2000, NULL, NULL, NULL), AFF_OK);
    for (int i = 0; i < 100; i++) {
        snprintf(id, sizeof id, "call_%d", i);
        const aff_turn_call call = call_of(id, "f", "{}");
        const aff_turn t = turn_of(&call, 1, "", "", some_ids, 5);
        aff__replay_put(r, &t);
        assert_true(
            finds(r, MESSAGE("null", "null", CALL_("call_0", "f", "\"{}\"")), true, some_ids, 5)); /* stays in use */
    }
    assert_in_range(aff__replay_count(r), 15, 30); /* of records of 71 to 73 bytes and 12 of head */
    snprintf(message, sizeof message, MESSAGE("null", "null", CALL_("call_%d", "f", "\"{}\"")), 1);
    assert_false(finds(r, message, true, NULL, 0));
    aff__replay_free(r);
}

static void file(void **state)
{
    char dir[64], path[80], *bytes;
    size_t n;
    struct stat st;
    aff_replay *r;
    const aff_turn_call call[] = {call_of("call_1", "f", "{}"), call_of("call_2", "g", "{\"x\": \"\\u0000\"}")};
    const aff_turn t = turn_of(call, 2, "why", "", some_ids, 5), u = turn_of(NULL, 0, "r", "x", some_ids, 2);
    snprintf(dir, sizeof dir, "%s/file", root);
    snprintf(path, sizeof path, "%s/turns", dir);
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(aff__replay_open(&r, the_tok, dir, 0, NULL, NULL, NULL), AFF_OK);
    aff__replay_put(r, &t);
    aff__replay_put(r, &u);
    aff__replay_free(r);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(aff__read_file(path, 1 << 20, &bytes, &n, NULL), AFF_OK);
    for (size_t cut = n % 5; cut <= n; cut += 5) { /* as a killed process leaves it, with the last byte changed or not */
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        assert_int_equal(fwrite(bytes, 1, cut, f), cut);
        fclose(f);
        assert_int_equal(aff__replay_open(&r, the_tok, dir, 0, NULL, NULL, NULL), AFF_OK);
        const size_t want = cut == n ? 2 : aff__replay_count(r);
        assert_int_equal(aff__replay_count(r), want);
        assert_true(cut < n || finds(r, MESSAGE("\"x\"", "\"r\"", ""), true, some_ids, 2));
        assert_true(want == 0 || finds(r,
                                       MESSAGE("\"\"", "null",
                                               CALL_("call_1", "f", "\"{}\"") ", " CALL_(
                                                   "call_2", "g", "\"{\\\"x\\\": \\\"\\\\u0000\\\"}\"")),
                                       true, some_ids, 5));
        aff__replay_free(r);
    }
    for (size_t i = 0; i < n; i += 5) { /* a byte changed */
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        bytes[i] ^= 1;
        assert_int_equal(fwrite(bytes, 1, n, f), n);
        bytes[i] ^= 1;
        fclose(f);
        assert_int_equal(aff__replay_open(&r, the_tok, dir, 0, NULL, NULL, NULL), AFF_OK);
        assert_true(aff__replay_count(r) < 2);
        aff__replay_free(r);
    }
    free(bytes);
}

/* ---- conversations ---- */

static aff_status restore(void *ctx, aff_seq *seq, const int32_t *ids, int64_t n, int64_t most, int64_t *matched, aff_error *err)
{
    int64_t restored;
    return aff__prefix_restore(ctx, seq, ids, n, most, &restored, matched, err);
}

static void publish(void *ctx, const aff_seq *seq, const int32_t *ids)
{
    aff__prefix_publish(ctx, seq, ids, NULL);
    aff__prefix_flush(ctx);
}

typedef struct cached_server {
    aff_prefix *cache;
    aff_server *s;
    char dir[64];
} cached_server;

static void start(cached_server *c, const char *name, bool persistent)
{
    aff_error err = {0};
    snprintf(c->dir, sizeof c->dir, "%s/%s", root, name);
    const aff_prefix_options po = {.dir = c->dir, .bytes = UINT64_C(1) << 30, .block = 64, .persistent = persistent};
    if (aff__prefix_open(&c->cache, the_net, &po, &err) != AFF_OK) fail_msg("%s", err.msg);
    c->s = serve((aff_server_options){.engine = {.cache = {c->cache, restore, publish}},
                                      .replay_dir = persistent ? c->dir : NULL});
}

static void stop(cached_server *c)
{
    aff__server_stop(c->s, 0);
    aff__prefix_close(c->cache);
}

static answer post_json(const aff_server *s, const char *path, json_t *v)
{
    char *body = json_dumps(v, 0);
    answer a = post(s, path, body);
    free(body);
    if (a.status != 200) fail_msg("%s: %s", path, a.body);
    return a;
}

/* A question that is answered with a call: n-th line of the tool set, with or without thinking. */
static json_t *question(int n, bool thinking)
{
    FILE *f = fopen(AFF_SOURCE_DIR "/tools/tiny/eval/tools.jsonl", "r");
    char line[8192];
    json_t *r = NULL;
    assert_non_null(f);
    for (int i = 0; i <= n; i++) assert_non_null(fgets(line, sizeof line, f));
    fclose(f);
    json_t *row = json_loads(line, 0, NULL);
    r = tool_request(row, false);
    json_decref(row);
    json_object_set_new(json_object_get(r, "thinking"), "type", json_string(thinking ? "enabled" : "disabled"));
    return r;
}

/* The second request of a conversation, with the answer's message as `change` leaves it; cached tokens. */
static long long second_turn(const aff_server *s, const json_t *first, const json_t *message, const char *change)
{
    json_t *r = json_deep_copy(first), *m = json_deep_copy(message), *call_ = at(m, "tool_calls.0"),
           *f = at(call_, "function");
    json_t *args = json_loads(text_at(f, "arguments"), 0, NULL);
    json_t *list = at(r, "messages");
    if (strcmp(change, "spelling") == 0) {
        char *compact = json_dumps(args, JSON_COMPACT | JSON_SORT_KEYS);
        json_object_set_new(f, "arguments", json_string(compact));
        json_object_set_new(m, "content", json_string("\n"));
        free(compact);
    }
    if (strcmp(change, "value") == 0) json_object_set_new(f, "arguments", json_string("{\"edited\": true}"));
    if (strcmp(change, "id") == 0) json_object_set_new(call_, "id", json_string("call_0"));
    if (strcmp(change, "reasoning") == 0 || strcmp(change, "id") == 0) json_object_del(m, "reasoning_content");
    const char *id = text_at(call_, "id");
    static int number; /* each prompt ends in another way, so that none is known beyond the answer */
    char result[16];
    snprintf(result, sizeof result, "%d", number++);
    json_array_append_new(list, json_pack("{s:s,s:s,s:s}", "role", "tool", "tool_call_id", id, "content", result));
    json_array_insert(list, json_array_size(list) - 1, m);
    json_object_set_new(r, "max_tokens", json_integer(2));
    answer b = post_json(s, CHAT, r);
    const long long cached = int_at(b.json, "usage.prompt_tokens_details.cached_tokens");
    assert_int_equal(int_at(b.json, "usage.prompt_cache_hit_tokens"), cached);
    assert_int_equal(int_at(b.json, "usage.prompt_cache_hit_tokens") + int_at(b.json, "usage.prompt_cache_miss_tokens"),
                     int_at(b.json, "usage.prompt_tokens"));
    done_with(&b);
    json_decref(m);
    json_decref(r);
    json_decref(args);
    return cached;
}

/* All that was run: the last token of an answer is not. */
static long long run_so_far(const answer *a)
{
    return int_at(a->json, "usage.prompt_tokens") + int_at(a->json, "usage.completion_tokens") - 1;
}

static void chat_turns(void **state)
{
    cached_server c;
    start(&c, "chat", false);
    for (int thinking = 0; thinking < 2; thinking++) {
        for (int single = 0; single < 2; single++) { /* one call at most: stopped behind it, the block is completed */
            json_t *r = question(thinking + 2 * single, thinking); /* nothing of it was run before */
            json_object_set_new(r, "parallel_tool_calls", json_boolean(!single));
            answer a = post_json(c.s, CHAT, r);
            const json_t *m = at(a.json, "choices.0.message");
            const long long all = run_so_far(&a);
            assert_string_equal(text_at(a.json, "choices.0.finish_reason"), "tool_calls");
            assert_int_equal(second_turn(c.s, r, m, ""), all);
            assert_int_equal(second_turn(c.s, r, m, "spelling"), all);
            assert_int_equal(second_turn(c.s, r, m, "reasoning"), all);
            assert_true(second_turn(c.s, r, m, "value") < all);
            if (thinking) assert_true(second_turn(c.s, r, m, "id") < all); /* and thus without its reasoning */
            done_with(&a);
            json_decref(r);
        }
    }
    stop(&c);
}

/* The same conversation once more: all of its prompt but the token whose logits are needed. */
static void asking_again(void **state)
{
    cached_server c;
    json_t *r = question(6, false);
    start(&c, "again", false);
    answer a = post_json(c.s, CHAT, r), b = post_json(c.s, CHAT, r);
    assert_int_equal(int_at(a.json, "usage.prompt_cache_hit_tokens"), 0);
    assert_int_equal(int_at(b.json, "usage.prompt_cache_hit_tokens"), int_at(a.json, "usage.prompt_tokens") - 1);
    assert_string_equal(text_at(a.json, "choices.0.message.tool_calls.0.function.arguments"),
                        text_at(b.json, "choices.0.message.tool_calls.0.function.arguments"));
    stop(&c);
    done_with(&a);
    done_with(&b);
    json_decref(r);
}

/* A client that left while its prompt was read, and comes back: what was read is not read again. */
static void coming_back(void **state)
{
    cached_server c;
    aff_buf got = {0};
    json_t *r = question(7, false);
    start(&c, "back", false);
    json_object_set_new(r, "ignore_eos", json_true());
    json_object_set_new(r, "stream", json_true());
    char *body = json_dumps(r, 0);
    close(begin_at(c.s, CHAT, body, "\"tool_calls\"", &got));
    aff__server_wait_idle(c.s);
    json_object_del(r, "ignore_eos");
    json_object_del(r, "stream");
    answer a = post_json(c.s, CHAT, r);
    assert_int_equal(int_at(a.json, "usage.prompt_cache_hit_tokens"), int_at(a.json, "usage.prompt_tokens") - 1);
    assert_int_equal(metric(c.s, "affinity_choices_cancelled_total"), 1);
    stop(&c);
    done_with(&a);
    aff__buf_free(&got);
    free(body);
    json_decref(r);
}

static void after_a_restart(void **state)
{
    cached_server c;
    json_t *r = question(2, true);
    start(&c, "restart", true);
    answer a = post_json(c.s, CHAT, r);
    stop(&c);
    start(&c, "restart", true);
    assert_int_equal(second_turn(c.s, r, at(a.json, "choices.0.message"), "reasoning"), run_so_far(&a));
    assert_true(metric(c.s, "affinity_turns_kept") >= 1);
    stop(&c);
    done_with(&a);
    json_decref(r);
}

/* The same in the other dialects, with the answer's content or items as they came. */
static void messages_turns(void **state)
{
    cached_server c;
    start(&c, "messages", false);
    for (int thinking = 0; thinking < 2; thinking++) {
        json_t *q = question(3, thinking), *tools = json_array(), *t;
        size_t i;
        json_array_foreach(at(q, "tools"), i, t) json_array_append_new(
            tools, json_pack("{s:O,s:O,s:O}", "name", at(t, "function.name"), "description",
                             at(t, "function.description"), "input_schema", at(t, "function.parameters")));
        json_t *r = json_pack("{s:O,s:[O],s:o,s:i,s:i,s:{s:s,s:i}}", "system", at(q, "messages.0.content"), "messages",
                              at(q, "messages.1"), "tools", tools, "temperature", 0, "max_tokens", 2000, "thinking",
                              "type", thinking ? "enabled" : "disabled", "budget_tokens", 1024);
        answer a = post_json(c.s, "/v1/messages", r);
        assert_string_equal(text_at(a.json, "stop_reason"), "tool_use");
        const json_t *content = at(a.json, "content"), *last = json_array_get(content, json_array_size(content) - 1);
        const long long all = int_at(a.json, "usage.input_tokens") + int_at(a.json, "usage.cache_read_input_tokens") +
                              int_at(a.json, "usage.output_tokens") - 1;
        json_array_append_new(at(r, "messages"), json_pack("{s:s,s:O}", "role", "assistant", "content", content));
        json_array_append_new(at(r, "messages"),
                              json_pack("{s:s,s:[{s:s,s:O,s:s}]}", "role", "user", "content", "type", "tool_result",
                                        "tool_use_id", at(last, "id"), "content", "42"));
        json_object_set_new(r, "max_tokens", json_integer(2));
        answer b = post_json(c.s, "/v1/messages", r);
        assert_int_equal(int_at(b.json, "usage.cache_read_input_tokens"), all);
        done_with(&a);
        done_with(&b);
        json_decref(r);
        json_decref(q);
    }
    stop(&c);
}

static void responses_turns(void **state)
{
    cached_server c;
    start(&c, "responses", false);
    for (int thinking = 0; thinking < 2; thinking++) {
        json_t *q = question(4, thinking), *tools = json_array(), *t, *item;
        size_t i;
        json_array_foreach(at(q, "tools"), i, t)
        {
            json_t *flat = json_copy(at(t, "function"));
            json_object_set_new(flat, "type", json_string("function"));
            json_array_append_new(tools, flat);
        }
        json_t *r = json_pack("{s:O,s:[O],s:o,s:i,s:{s:s}}", "instructions", at(q, "messages.0.content"), "input",
                              at(q, "messages.1"), "tools", tools, "temperature", 0, "reasoning", "effort",
                              thinking ? "high" : "none");
        answer a = post_json(c.s, "/v1/responses", r);
        const char *id = NULL;
        json_array_foreach(at(a.json, "output"), i, item)
        {
            json_array_append(at(r, "input"), item);
            if (strcmp(text_at(item, "type"), "function_call") == 0) id = text_at(item, "call_id");
        }
        assert_non_null(id);
        const long long all = int_at(a.json, "usage.input_tokens") + int_at(a.json, "usage.output_tokens") - 1;
        json_array_append_new(
            at(r, "input"), json_pack("{s:s,s:s,s:s}", "type", "function_call_output", "call_id", id, "output", "42"));
        json_object_set_new(r, "max_output_tokens", json_integer(2));
        answer b = post_json(c.s, "/v1/responses", r);
        assert_int_equal(int_at(b.json, "usage.input_tokens_details.cached_tokens"), all);
        done_with(&a);
        done_with(&b);
        json_decref(r);
        json_decref(q);
    }
    stop(&c);
}

/* ---- */

static int set_up(void **state)
{
    return mkdtemp(root) ? open_model(state) : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *w)
{
    return remove(path);
}

static int tear_down(void **state)
{
    nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    return close_model(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_the_same),
                                       cmocka_unit_test(turns_without_calls),
                                       cmocka_unit_test(bound),
                                       cmocka_unit_test(file),
                                       cmocka_unit_test(chat_turns),
                                       cmocka_unit_test(asking_again),
                                       cmocka_unit_test(coming_back),
                                       cmocka_unit_test(after_a_restart),
                                       cmocka_unit_test(messages_turns),
                                       cmocka_unit_test(responses_turns)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
