/* Prompts: every line of the fixtures as DeepSeek's encoders write it, where our rules differ, ids of the spec's
 * examples. */
#include "support/test.h"
#include "support/chat_fixtures.h"
#include "support/v4_tokenizer.h"
#include "base/mem.h"
#include "text/chat.h"
#include <stdlib.h>
#include <string.h>

#define BOS "<｜begin▁of▁sentence｜>"
#define EOS "<｜end▁of▁sentence｜>"
#define U   "<｜User｜>"
#define A   "<｜Assistant｜>"
#define S   "<｜System｜>"

static json_t *parsed(const char *text)
{
    json_t *v = NULL;
    aff_error e = {0};
    if (aff__json_parse_exact(&v, text, strlen(text), "test", true, 256, &e) != AFF_OK) fail_msg("%s: %s", text, e.msg);
    return v;
}

static aff_chat_request request_of(const json_t *line, bool reference)
{
    const json_t *o = json_object_get(line, "options");
    const char *mode = json_string_value(json_object_get(o, "thinking_mode")),
               *model = json_string_value(json_object_get(line, "model"));
    aff_chat_request r = {.messages = json_object_get(line, "messages"),
                          .context = json_object_get(o, "context"),
                          .tools = json_object_get(line, "tools"),
                          .response_format = json_object_get(line, "response_format"),
                          .effort = json_object_get(o, "reasoning_effort"),
                          .reference = reference,
                          .thinking = !mode || strcmp(mode, "chat") != 0,
                          .keep_reasoning = json_is_false(json_object_get(o, "drop_thinking")),
                          .no_bos = json_is_false(json_object_get(o, "add_bos"))};
    assert_true(aff__chat_format_find(model ? model : "0731", &r.format));
    return r;
}

/* The segments are the text in order, none is empty, and kinds alternate. */
static void segments_make_text(const aff_chat_prompt *p)
{
    const char *at = p->text;
    for (size_t i = 0; i < p->n_seg; i++) {
        assert_ptr_equal(p->seg[i].text, at);
        assert_true(p->seg[i].n > 0);
        if (i) assert_true(p->seg[i].added != p->seg[i - 1].added);
        at += p->seg[i].n;
    }
    assert_ptr_equal(at, p->text + p->n);
}

static void reference(void **state)
{
    json_t *lines = aff_test_chat_lines("encode.jsonl"), *line;
    size_t i;
    assert_int_equal(json_array_size(lines), 253);
    json_array_foreach(lines, i, line)
    {
        const char *id = json_string_value(json_object_get(line, "id")),
                   *error = json_string_value(json_object_get(line, "error"));
        const json_t *want = json_object_get(line, "expected");
        aff_chat_request r = request_of(line, true);
        aff_chat_prompt p;
        aff_error e = {0};
        if (strncmp(id, "bad-mode/", 9) == 0) continue; /* a mode is an enumeration here; aff-chat refuses the name */
        aff_status s = aff__chat_render(&p, &r, &e);
        if (error && (s != AFF_E_INVALID || !p.exception || strcmp(p.exception, error) != 0))
            fail_msg("%s: expected %s, got %s %s", id, error, p.exception ? p.exception : "nothing", e.msg);
        if (!error && s != AFF_OK) fail_msg("%s: %s", id, e.msg);
        if (!error) {
            if (p.n != json_string_length(want) || memcmp(p.text, json_string_value(want), p.n) != 0)
                fail_msg("%s:\nexpected %s\ngot      %s", id, json_string_value(want), p.text);
            segments_make_text(&p);
        }
        aff__chat_prompt_free(&p);
    }
    json_decref(lines);
}

/* ---- our rules ---- */

typedef struct expectation {
    const char *id, *text; /* NULL text: as the reference */
} expectation;

#define CALL_V4(args)                                                                                                  \
    BOS "Use the gauge." U "Water?" A "</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"tide_height\">\n" args \
        "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>" EOS U "<tool_result>{\"cm\": 212}</tool_result>" A "<think>"
#define P(name, string, value)                                                                                         \
    "<｜DSML｜parameter name=\"" name "\" string=\"" string "\">" value "</｜DSML｜parameter>"
#define EFFORT_75 S "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
#define RESULT_V4(text)                                                                                                \
    BOS U "q" A "</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke "                                               \
          "name=\"a\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>" EOS U text A "<think>"

/* Every line of the fixtures that our rules render otherwise, with what they make of it; "" stands for an error. */
static const expectation different[] = {
    {"effort-low-sys/v4-first", BOS "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-xhigh-sys/v4-first", BOS "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-xhigh-sys/v4-0731", "H"},
    {"effort-xhigh-sys/v4.1",
     BOS EFFORT_75 "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-medium-sys/v4-first", BOS "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-medium-sys/v4-0731", "H"},
    {"effort-medium-sys/v4.1",
     BOS EFFORT_75 "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-none-sys/v4-first", BOS "You tend a lighthouse and answer briefly." U "Count the oars." A "</think>"},
    {"effort-none-sys/v4-0731", BOS "You tend a lighthouse and answer briefly." U "Count the oars." A "</think>"},
    {"effort-none-sys/v4.1", BOS S "You tend a lighthouse and answer briefly." U "Count the oars." A "</think>"},
    {"effort-empty-sys/v4-first", BOS "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-empty-sys/v4.1",
     BOS EFFORT_75 "You tend a lighthouse and answer briefly." U "Count the oars." A "<think>"},
    {"effort-low-nosys/v4-first", BOS U "Name a cloud that looks like bread." A "<think>"},
    {"effort-low-multi/v4-first", BOS "Short words." U "One?" A "</think>First." EOS U "Two?" A "<think>"},
    {"effort-int0/v4.1", ""},
    {"effort-int-on-v4/v4-first", ""},
    {"effort-int-on-v4/v4-0731", ""},
    {"empty-list/v4-first", ""},
    {"empty-list/v4-0731", ""},
    {"empty-list/v4.1", ""},
    {"sys-end/v4-0731", BOS U "Sing." A "<think>tune</think>La." EOS "Now hum instead." A "<think>"},
    {"user-null/v4-0731", BOS U A "<think>"},
    {"user-null/v4.1", BOS EFFORT_75 U A "<think>"},
    {"end-assistant/v4-0731", BOS U "Say when." A "<think>they ask for when</think>When." EOS A "<think>"},
    {"end-assistant/v4.1", BOS EFFORT_75 U "Say when." A "<think>they ask for when</think>When." EOS A "<think>"},
    {"drop-last-kept/v4-0731", BOS U "p" A "</think>q" EOS U "r" A "<think>new</think>s" EOS A "<think>"},
    {"drop-last-kept/v4.1", BOS EFFORT_75 U "p" A "</think>q" EOS U "r" A "<think>new</think>s" EOS A "<think>"},
    {"call-args-object/v4-0731", CALL_V4(P("pier", "true", "Oster") "\n" P("hour", "false", "9"))},
    {"call-args-list-json/v4-0731", CALL_V4(P("arguments", "true", "[1, 2]"))},
    {"call-args-number-json/v4-0731", CALL_V4(P("arguments", "true", "42"))},
    {"call-args-double-encoded/v4-0731", CALL_V4(P("pier", "true", "Oster"))},
    {"result-null/v4-0731", RESULT_V4("<tool_result></tool_result>")},
    {"result-null/v4.1", BOS EFFORT_75 U
     "q" A "</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"a\">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>" EOS U
     "<tool_result></tool_result>" A "<think>"},
    {"developer/v4-0731", BOS "Search desk: find a recipe." A "<think>"},
    {"developer/v4.1", BOS EFFORT_75 "Search desk: find a recipe." A "<think>"},
    {"developer-tools/v4-first", "tools"},
    {"developer-tools/v4-0731", "tools"},
    {"developer-dropped/v4-0731", BOS "Vanishes in drop mode.ok" EOS U "now me" A "<think>"},
    {"developer-dropped/v4.1", BOS EFFORT_75 "Vanishes in drop mode.ok" EOS U "now me" A "<think>"},
    {"developer-chat/v4-0731", BOS "Stays in chat mode.ok" EOS U "now me" A "</think>"},
    {"developer-chat/v4.1", BOS S "Stays in chat mode.ok" EOS U "now me" A "</think>"},
    {"reminder-middle/v4-0731", BOS U "a" A "</think>b" EOS "<｜latest_reminder｜>noon" U "c" A
                                      "<think><｜latest_reminder｜>oner2</think>d" EOS A "<think>"},
    {"reminder-middle/v4.1", BOS EFFORT_75 U "a" A "</think>b" EOS "<｜latest_reminder｜>noon" U "c" A
                                             "<think><｜latest_reminder｜>oner2</think>d" EOS A "<think>"},
    {"role-unknown/v4-0731", ""},
    {"role-unknown/v4.1", ""},
    {"task-action-think/v4-0731", BOS "Router." U "When does the market close?" A "<think>"},
    {"task-action-think/v4.1", BOS EFFORT_75 "Router." U "When does the market close?" A "<think>"},
    {"task-action-chat/v4-0731", BOS "Router." U "When does the market close?" A "</think>"},
    {"task-action-chat/v4.1", BOS S "Router." U "When does the market close?" A "</think>"},
    {"task-query-think/v4-0731", BOS "Router." U "When does the market close?" A "<think>"},
    {"task-query-think/v4.1", BOS EFFORT_75 "Router." U "When does the market close?" A "<think>"},
    {"task-query-chat/v4-0731", BOS "Router." U "When does the market close?" A "</think>"},
    {"task-query-chat/v4.1", BOS S "Router." U "When does the market close?" A "</think>"},
    {"task-title-think/v4-0731", BOS "Router." U "When does the market close?" A "<think>"},
    {"task-title-think/v4.1", BOS EFFORT_75 "Router." U "When does the market close?" A "<think>"},
    {"task-title-chat/v4-0731", BOS "Router." U "When does the market close?" A "</think>"},
    {"task-title-chat/v4.1", BOS S "Router." U "When does the market close?" A "</think>"},
    {"task-title-asst/v4-0731", BOS U "Tell me of eels." A "</think>Eels swim far." EOS A "</think>"},
    {"task-title-asst/v4.1", BOS U "Tell me of eels." A "</think>Eels swim far." EOS A "</think>"},
    {"task-answered/v4-0731", BOS U "Close time?" A "</think>Search" EOS U "And the open time?" A "<think>"},
    {"task-answered/v4.1", BOS EFFORT_75 U "Close time?" A "</think>Search" EOS U "And the open time?" A "<think>"},
    {"task-title-answered/v4-0731",
     BOS U "Tell me of newts." A "</think>Newts are small." EOS "Small newts" EOS A "</think>"},
    {"task-title-answered/v4.1",
     BOS U "Tell me of newts." A "</think>Newts are small." EOS "Small newts" EOS A "</think>"},
    {"task-then-user/v4-0731", BOS U "one\n\ntwo" A "<think>"},
    {"task-then-user/v4.1", BOS EFFORT_75 U "one\n\ntwo" A "<think>"},
    {"task-invalid/v4-0731", BOS U "one" A "<think>"},
    {"task-invalid/v4.1", BOS EFFORT_75 U "one" A "<think>"},
    {"parts-user-v4/v4-0731", BOS U "part one" A "<think>"},
};

static void check_different(const char *id, const char *want, aff_status s, const aff_chat_prompt *p)
{
    static const char h[] = BOS "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n",
                      tools[] = "{\"type\": \"json_object\"}r</think>ok" EOS U "more" A "<think>";
    if (!*want) {
        assert_int_equal(s, AFF_E_INVALID);
        assert_null(p->exception);
        return;
    }
    if (s != AFF_OK) fail_msg("%s: an error", id);
    if (strcmp(want, "H") == 0)
        assert_memory_equal(p->text, h, sizeof h - 1);
    else if (strcmp(want, "tools") == 0) /* as a system message: no turn, the answer follows */
        assert_string_equal(p->text + p->n - (sizeof tools - 1), tools);
    else
        assert_string_equal(p->text, want);
}

static void server(void **state)
{
    json_t *lines = aff_test_chat_lines("encode.jsonl"), *line;
    size_t i, found = 0, n = sizeof different / sizeof *different;
    json_array_foreach(lines, i, line)
    {
        const char *id = json_string_value(json_object_get(line, "id"));
        const json_t *want = json_object_get(line, "expected");
        const expectation *x = different;
        aff_chat_request r = request_of(line, false);
        aff_chat_prompt p;
        aff_error e = {0};
        if (strncmp(id, "bad-mode/", 9) == 0) continue;
        while (x < different + n && strcmp(x->id, id) != 0) x++;
        aff_status s = aff__chat_render(&p, &r, &e);
        if (x < different + n) {
            found++;
            check_different(id, x->text, s, &p);
        } else {
            if (s != AFF_OK || !want || strcmp(p.text, json_string_value(want)) != 0)
                fail_msg("%s:\nexpected %s\ngot      %s", id, json_string_value(want), s == AFF_OK ? p.text : e.msg);
        }
        if (s == AFF_OK) segments_make_text(&p);
        aff__chat_prompt_free(&p);
    }
    assert_int_equal(found, n);
    json_decref(lines);
}

/* Conversations beyond the fixtures; options stand in the line. "" stands for an error. */
static const struct {
    const char *line, *text;
    bool continued;
} more[] = {
    {"{'messages':[{'role':'user','content':'a'},{'role':'assistant','content':'b','reasoning':'r'}]}",
     BOS U "a" A "<think>r</think>b", true},
    {"{'messages':[{'role':'user','content':'a'},{'role':'assistant','content':'b','prefix':true}]}",
     BOS U "a" A "<think></think>b", false},
    {"{'messages':[{'role':'user','content':'a'}]}", "", true},
    {"{'messages':[{'role':'system','content':'s'}]}", BOS "s" A "<think>", false},
    {"{'model':'v4.1','messages':[{'role':'system','content':'s'}],'options':{'thinking_mode':'chat'}}",
     BOS S "s" A "</think>", false},
    {"{'messages':[{'role':'user','content':'a'},{'role':'latest_reminder','content':null}]}",
     BOS U "a" A "<think><｜latest_reminder｜>", false},
    {"{'messages':[{'role':'latest_reminder','content':'t'}]}", BOS "<｜latest_reminder｜>t" A "<think>", false},
    {"{'messages':[{'role':'function','content':['x',{'type':'text','text':'y'},{'type':'image_url'}]}]}",
     BOS U "<tool_result>x\n\ny\n\n[Unsupported image_url]</tool_result>" A "<think>", false},
    {"{'messages':[{'role':'user','content':[{'type':'image_url'},{'type':'input_text','text':'y'}]}]}",
     BOS U "[Unsupported image_url]\n\ny" A "<think>", false},
    {"{'messages':[{'role':'system','content':[{'type':'text','text':'p'},{'type':'text','text':null}]},{'role':'user',"
     "'content':'a'}]}",
     BOS "p\n\n" U "a" A "<think>", false},
    {"{'messages':[{'role':'user','content':7}]}", "", false},
    {"{'messages':[{'role':'user','content':18446744073709551616}]}", "", false},
    {"{'messages':[{'role':'user','content':[7]}]}", "", false},
    {"{'messages':[7]}", "", false},
    {"{'messages':[{'content':'a'}]}", "", false},
    {"{'messages':{}}", "", false},
    {"{'messages':[{'role':'user','content':'a'}],'tools':{'a':1}}", "", false},
    {"{'messages':[{'role':'user','content':'a'}],'tools':[7]}", "", false},
    {"{'messages':[{'role':'user','content':'a'}],'tools':[]}", BOS U "a" A "<think>", false},
    {"{'messages':[{'role':'user','content':'a'}],'response_format':{}}", BOS U "a" A "<think>", false},
    {"{'messages':[{'role':'assistant','tool_calls':[{'function':{'name':'f'}},{'function':{'name':'g','arguments':"
     "null}}]},{'role':'tool'}]}",
     BOS "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke "
         "name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>" EOS U "<tool_result></tool_result>" A "<think>",
     false},
    {"{'messages':[{'role':'assistant','tool_calls':[{'id':'x'}]}]}", "", false},
    {"{'messages':[{'role':'assistant','tool_calls':'x'}]}", "", false},
    {"{'messages':[{'role':'user','content':'a'}],'options':{'reasoning_effort':'hard'}}", "", false},
    {"{'model':'v4.1','messages':[{'role':'user','content':'a'}],'options':{'reasoning_effort':7}}",
     BOS S "Reasoning Effort: 7 (range 1-100, the higher the value, the more thorough the reasoning)\n\n" U "a" A
           "<think>",
     false},
    {"{'model':'v4.1','messages':[{'role':'user','content':'a'}],'options':{'reasoning_effort':true}}", "", false},
};

static json_t *quoted(const char *text)
{
    char *s = strdup(text);
    for (char *p = s; *p; p++)
        if (*p == '\'') *p = '"';
    json_t *v = parsed(s);
    free(s);
    return v;
}

static void conversations(void **state)
{
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        json_t *line = quoted(more[i].line);
        aff_chat_request r = request_of(line, false);
        aff_chat_prompt p;
        aff_error e = {0};
        r.continue_final = more[i].continued;
        aff_status s = aff__chat_render(&p, &r, &e);
        if ((s == AFF_OK) != (*more[i].text != 0) || (s == AFF_OK && strcmp(p.text, more[i].text) != 0))
            fail_msg("%s:\nexpected %s\ngot      %s", more[i].line, more[i].text, s == AFF_OK ? p.text : e.msg);
        if (s != AFF_OK) assert_int_equal(s, AFF_E_INVALID);
        aff__chat_prompt_free(&p);
        json_decref(line);
    }
}

/* The turn is opened inside reasoning or behind it. */
static void opened_turn(void **state)
{
    static const char *const texts[] = {
        "{'messages':[{'role':'user','content':'a'}]}",
        "{'messages':[{'role':'user','content':'a'}],'options':{'thinking_mode':'chat'}}",
        "{'messages':[{'role':'user','content':'a'}],'options':{'reasoning_effort':'none'}}",
        "{'messages':[{'role':'user','content':'a'},{'role':'assistant','content':'<think>','wo_eos':true}]}"};
    for (size_t i = 0; i < 4; i++) {
        json_t *line = quoted(texts[i]);
        aff_chat_request r = request_of(line, false);
        aff_chat_prompt p;
        assert_int_equal(aff__chat_render(&p, &r, NULL), AFF_OK);
        assert_int_equal(p.thinking, i == 0);
        aff__chat_prompt_free(&p);
        json_decref(line);
    }
}

/* A tool result finds its place among very many calls, and integers of any length pass. */
static void many(void **state)
{
    enum { N = 1000 };
    char digits[5001], id[16];
    json_t *messages = json_array(), *calls = json_array();
    memset(digits, '9', sizeof digits - 1);
    digits[sizeof digits - 1] = 0;
    for (int i = 0; i < N; i++) {
        char args[5100];
        snprintf(id, sizeof id, "c%d", i);
        snprintf(args, sizeof args, "{\"n\": %s}", i ? "1" : digits);
        json_array_append_new(calls,
                              json_pack("{s:s,s:{s:s,s:s}}", "id", id, "function", "name", "f", "arguments", args));
    }
    json_array_append_new(messages, json_pack("{s:s,s:o}", "role", "assistant", "tool_calls", calls));
    for (int i = N - 1; i >= 0; i--) {
        snprintf(id, sizeof id, "c%d", i);
        json_array_append_new(messages, json_pack("{s:s,s:s,s:s}", "role", "tool", "tool_call_id", id, "content", id));
    }
    aff_chat_request r = {.messages = messages};
    aff_chat_prompt p;
    assert_int_equal(aff__chat_render(&p, &r, NULL), AFF_OK);
    const char *at = p.text;
    for (int i = 0; i < N; i++) {
        char want[64];
        snprintf(want, sizeof want, "<tool_result>c%d</tool_result>", i);
        at = strstr(at, want);
        assert_non_null(at);
    }
    assert_non_null(strstr(p.text, "name=\"n\" string=\"false\">9999"));
    aff__chat_prompt_free(&p);
    r.reference = true; /* Python reads at most 4,300 digits: the text becomes one parameter */
    assert_int_equal(aff__chat_render(&p, &r, NULL), AFF_OK);
    assert_non_null(strstr(p.text, "name=\"arguments\" string=\"true\">{\"n\": 9999"));
    aff__chat_prompt_free(&p);
    json_decref(messages);
}

/* ---- ids (spec 2.6) ---- */

static aff_tokenizer *v4;

static aff_ids ids_of(const char *line, bool separate)
{
    json_t *v = quoted(line);
    aff_chat_request r = request_of(v, false);
    aff_chat_prompt p;
    aff_ids ids = {0};
    aff_error e = {0};
    if (aff__chat_render(&p, &r, &e) != AFF_OK) fail_msg("%s", e.msg);
    if (separate)
        assert_int_equal(aff__tokenizer_encode_segments(v4, p.seg, p.n_seg, &ids, &e), AFF_OK);
    else
        assert_int_equal(aff__tokenizer_encode(v4, p.text, p.n, true, &ids, &e), AFF_OK);
    aff__chat_prompt_free(&p);
    json_decref(v);
    return ids;
}

/* Both ways of tokenizing give n ids that end with want[0..n_want). */
static void ends_with_ids(const char *line, size_t n, const uint32_t *want, size_t n_want)
{
    for (int separate = 0; separate < 2; separate++) {
        aff_ids ids = ids_of(line, separate != 0);
        assert_int_equal(ids.n, n);
        assert_memory_equal(ids.id + n - n_want, want, n_want * sizeof *want);
        aff__ids_free(&ids);
    }
}
#define IDS(line, n, ...)                                                                                              \
    ends_with_ids(line, n, (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / 4)

#define SYS "{'role':'system','content':'You are a helpful assistant.'}"
#define WEATHER                                                                                                        \
    "'tools':[{'type':'function','function':{'name':'get_weather','description':'Get the weather','parameters':{"      \
    "'type':'object','properties':{'location':{'type':'string'},'days':{'type':'integer'}},'required':['location']}}}" \
    "]"

static void examples(void **state)
{
    IDS("{'messages':[" SYS ",{'role':'user','content':'What is 2+2?'}]}", 17, 0, 3476, 477, 260, 11502, 22896, 16,
        128803, 3085, 344, 223, 20, 13, 20, 33, 128804, 128821); /* E1 */
    IDS("{'messages':[" SYS ",{'role':'user','content':'What is 2+2?'}],'options':{'thinking_mode':'chat'}}", 17, 33,
        128804, 128822);
    IDS("{'messages':[{'role':'user','content':'Hello'},{'role':'assistant','content':'Hi "
        "there!','reasoning_content':'r'},{'role':'user','content':"
        "'What is the capital of France?'}]}",
        19, 0, 128803, 19923, 128804, 128822, 23166, 1031, 3, 1, 128803, 3085, 344, 270, 6102, 294, 8760, 33, 128804,
        128821); /* E3 */
    IDS("{'messages':[" SYS ",{'role':'user','content':'What is 2+2?'}],'options':{'reasoning_effort':'high'}}", 96, 33,
        128804, 128821); /* E4 */
    IDS("{'messages':[" SYS ",{'role':'user','content':'Weather in Beijing?'}]," WEATHER "}", 289, 128804, 128821);
    /* E5: arguments as an object, which is what its text in the spec says */
    IDS("{'messages':[" SYS ",{'role':'user','content':'Weather in "
        "Beijing?'},{'role':'assistant','reasoning_content':'Need the tool.','tool_calls':[{"
        "'id':'1','function':{'name':'get_weather','arguments':{'location':'Beijing','days':3}}}]},{'role':'tool','"
        "tool_call_id':'1','content':"
        "'{\\'temp\\': 22}'}]," WEATHER "}",
        371, 128822, 271, 30, 128825, 72461, 4941, 12548, 1018, 30, 128825, 40148, 5406, 2329, 1281, 1133, 65, 50219,
        3816, 30, 128825, 41523, 2329, 1281, 33182, 4, 3418, 1281, 11476, 3320, 121458, 1718, 128825, 41523, 1018, 30,
        128825, 41523, 2329, 1281, 28026, 4, 3418, 1281, 19836, 3320, 21, 1718, 128825, 41523, 1018, 1718, 128825,
        40148, 5406, 1018, 1718, 128825, 72461, 4941, 12548, 32, 1, 128803, 30, 72461, 46148, 32, 24313, 26343, 3362,
        223, 1302, 24568, 72461, 46148, 32, 128804, 128821);
}

/* E6 to E8 are given as text. */
static void example_texts(void **state)
{
    json_t *line = quoted("{'messages':[{'role':'assistant','tool_calls':[{'function':{'name':'a','arguments':{'x':'1',"
                          "'y':[1,2],'z':null}}},{'function':{"
                          "'name':'b','arguments':'{}'}}]},{'role':'tool','content':'r1'},{'role':'tool','content':'r2'"
                          "},{'role':'user','content':'and now?'}]}");
    aff_chat_request r = request_of(line, false);
    aff_chat_prompt p;
    assert_int_equal(aff__chat_render(&p, &r, NULL), AFF_OK);
    assert_string_equal(p.text,
                        BOS "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"a\">\n<｜DSML｜parameter name=\"x\" "
                            "string=\"true\">1</｜DSML｜parameter>\n<｜DSML｜parameter "
                            "name=\"y\" string=\"false\">[1, 2]</｜DSML｜parameter>\n<｜DSML｜parameter name=\"z\" "
                            "string=\"false\">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke "
                            "name=\"b\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>" EOS U
                            "<tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>\n\nand now?" A "<think>");
    aff__chat_prompt_free(&p);
    json_decref(line);
    line = quoted("{'messages':[{'role':'assistant','content':'x'},{'role':'user','content':'','task':'title'}]}");
    r = request_of(line, true);
    r.thinking = false;
    assert_int_equal(aff__chat_render(&p, &r, NULL), AFF_OK);
    assert_string_equal(p.text, BOS "x" EOS U "<｜title｜>");
    aff__chat_prompt_free(&p);
    json_decref(line);
}

/* Control tokens in what the caller wrote are ordinary text; their prices are those of DeepSeek's service (spec 1.8).
 */
static void caller_text(void **state)
{
    static const struct {
        const char *line;
        size_t price;
    } texts[] = {{"{'messages':[{'role':'user','content':'<think>'}]}", 3},
                 {"{'messages':[{'role':'user','content':'<｜User｜>'}]}", 5}};
    for (int k = 0; k < 2; k++) {
        aff_ids whole = ids_of(texts[k].line, false), apart = ids_of(texts[k].line, true);
        assert_int_equal(whole.n, 4 + 1);
        assert_int_equal(apart.n, 4 + texts[k].price);
        for (size_t i = 2; i < apart.n - 2; i++) assert_true(apart.id[i] < 128000 && apart.id[i] > 2);
        assert_int_equal(apart.id[0], 0);
        assert_int_equal(apart.id[1], 128803);
        aff__ids_free(&whole);
        aff__ids_free(&apart);
    }
}

static void out_of_memory(void **state)
{
    json_t *line = quoted("{'messages':[{'role':'user','content':'a'},{'role':'assistant','reasoning_content':'r','"
                          "tool_calls':[{'id':'1','function':{"
                          "'name':'f','arguments':'{}'}},{'id':'2','function':{'name':'f','arguments':{'n':[1,2.5]}}}]}"
                          ",{'role':'tool','tool_call_id':'2',"
                          "'content':'b'},{'role':'tool','tool_call_id':'1','content':'b'}]," WEATHER "}");
    aff_chat_request r = request_of(line, false);
    aff_status s = AFF_E_NOMEM;
    unsigned n = 0;
    while (s != AFF_OK) {
        aff_chat_prompt p;
        aff__alloc_fail_after(++n);
        s = aff__chat_render(&p, &r, NULL);
        aff__alloc_fail_after(0);
        if (s != AFF_OK) assert_int_equal(s, AFF_E_NOMEM);
        aff__chat_prompt_free(&p);
    }
    assert_true(n > 10);
    json_decref(line);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference),     cmocka_unit_test(server),      cmocka_unit_test(conversations),
        cmocka_unit_test(opened_turn),   cmocka_unit_test(many),        cmocka_unit_test(examples),
        cmocka_unit_test(example_texts), cmocka_unit_test(caller_text), cmocka_unit_test(out_of_memory)};
    v4 = aff_test_v4_tokenizer();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    aff__tokenizer_free(v4);
    return failed;
}
