/* aff-chat - writes prompts for conversations and reads completions, without a model: JSON Lines in, JSON Lines out. */
#define _GNU_SOURCE
#include "base/file.h"
#include "base/options.h"
#include "format/json.h"
#include "text/chat.h"
#include "text/parse.h"
#include <stdlib.h>
#include <string.h>

#define EOS "<｜end▁of▁sentence｜>"

static struct {
    bool reference;
    const char *format;
} opt = {.format = "auto"};

static const aff_option options[] = {
    {"reference", 'r', AFF_OPT_FLAG, &opt.reference, NULL,
     "behave as DeepSeek's encoder and strict parser, errors (by the name of their exception) included; otherwise as "
     "the server",
     "Behaviour"},
    {"chat-format", 0, AFF_OPT_STR, &opt.format, "FORMAT",
     "auto, v4 (first release), 0731 or v4.1; auto, the default, is what a line's \"model\" says, else 0731"},
    {0}};

static const aff_usage usage = {
    "aff-chat",
    "render|parse [FILE]",
    "Encodes conversations as prompts (render) or takes completions apart (parse). Reads JSON Lines from FILE or "
    "standard "
    "input. render: {\"id\", \"messages\", optional \"tools\", \"response_format\", \"options\": {\"thinking_mode\", "
    "\"reasoning_effort\", \"drop_thinking\", \"add_bos\", \"context\", \"continue_final_message\"}}. parse: {\"id\", "
    "\"completion\", optional \"tools\", \"options\": {\"thinking_mode\"}}. Writes one line per line: {\"id\", "
    "\"expected\"} "
    "or {\"id\", \"error\"}. Exit code 0: every line was read, 1: a line was no JSON object or a file failed, 2: wrong "
    "usage.",
    options,
    1,
    2};

/* One line of input and what becomes of it. */
typedef struct job {
    const json_t *line, *options;
    aff_chat_format format;
    aff_buf result;    /* JSON text of "expected" */
    const char *error; /* or of "error": an exception's name, "" for the message in err */
    aff_error err;
} job;

static aff_chat_format format_of(const json_t *line)
{
    aff_chat_format f = AFF_CHAT_AUTO;
    (void)aff__chat_format_find(opt.format, &f);
    const char *model = json_string_value(json_object_get(line, "model"));
    if (f == AFF_CHAT_AUTO && model) (void)aff__chat_format_find(model, &f);
    return f == AFF_CHAT_AUTO ? AFF_CHAT_0731 : f;
}

/* options.thinking_mode: "thinking", which is the default, or "chat". */
static aff_status thinking_of(job *j, bool *thinking)
{
    const json_t *v = json_object_get(j->options, "thinking_mode");
    const char *mode = v ? json_string_value(v) : "thinking";
    *thinking = mode && strcmp(mode, "thinking") == 0;
    if (mode && (*thinking || strcmp(mode, "chat") == 0)) return AFF_OK;
    j->error = opt.reference ? "AssertionError" : "";
    return aff__fail(&j->err, AFF_E_INVALID, "options.thinking_mode: expected thinking or chat, got '%.40s'",
                     mode ? mode : "");
}

static aff_status render(job *j)
{
    const json_t *o = j->options;
    aff_chat_request r = {.format = j->format,
                          .messages = json_object_get(j->line, "messages"),
                          .context = json_object_get(o, "context"),
                          .tools = json_object_get(j->line, "tools"),
                          .response_format = json_object_get(j->line, "response_format"),
                          .effort = json_object_get(o, "reasoning_effort"),
                          .reference = opt.reference,
                          .keep_reasoning = json_is_false(json_object_get(o, "drop_thinking")),
                          .no_bos = json_is_false(json_object_get(o, "add_bos")),
                          .continue_final = json_is_true(json_object_get(o, "continue_final_message"))};
    aff_chat_prompt p;
    AFF_TRY(thinking_of(j, &r.thinking));
    aff_status s = aff__chat_render(&p, &r, &j->err);
    j->error = p.exception ? p.exception : "";
    if (s == AFF_OK) s = aff__json_put_string(&j->result, p.text, p.n, &j->err);
    aff__chat_prompt_free(&p);
    return s;
}

/* ---- parse ---- */

typedef struct answer {
    aff_buf content, reasoning, name, args, calls; /* calls: JSON text of the complete ones */
} answer;

static aff_status put_call(aff_buf *out, const aff_buf *name, const aff_buf *args, aff_error *err)
{
    AFF_TRY(aff__buf_puts(out, out->n ? ", {\"name\": " : "{\"name\": ", err));
    AFF_TRY(aff__json_put_string(out, name->s, name->n, err));
    AFF_TRY(aff__buf_puts(out, ", \"arguments\": ", err));
    AFF_TRY(aff__json_put_string(out, args->s, args->n, err));
    return aff__buf_puts(out, "}", err);
}

static aff_status put_answer(job *j, const answer *a)
{
    AFF_TRY(aff__buf_puts(&j->result, "{\"content\": ", &j->err));
    AFF_TRY(aff__json_put_string(&j->result, a->content.s, a->content.n, &j->err));
    AFF_TRY(aff__buf_puts(&j->result, ", \"reasoning_content\": ", &j->err));
    AFF_TRY(aff__json_put_string(&j->result, a->reasoning.s, a->reasoning.n, &j->err));
    AFF_TRY(aff__buf_puts(&j->result, ", \"tool_calls\": [", &j->err));
    AFF_TRY(aff__buf_put(&j->result, a->calls.s, a->calls.n, &j->err));
    return aff__buf_puts(&j->result, "]}", &j->err);
}

static aff_status collect(void *ctx, const aff_parse_event *e, aff_error *err)
{
    answer *a = ctx;
    switch (e->kind) {
    case AFF_PARSE_REASONING:
        return aff__buf_put(&a->reasoning, e->s, e->n, err);
    case AFF_PARSE_TEXT:
        return aff__buf_put(&a->content, e->s, e->n, err);
    case AFF_PARSE_CALL:
        a->name.n = a->args.n = 0;
        return aff__buf_put(&a->name, e->s, e->n, err);
    case AFF_PARSE_ARGS:
        return aff__buf_put(&a->args, e->s, e->n, err);
    case AFF_PARSE_CALL_END:
        return put_call(&a->calls, &a->name, &a->args, err);
    case AFF_PARSE_CALL_DROP:
        break;
    }
    return AFF_OK;
}

/* As the server sees it: the token that ends the text is no part of it. */
static aff_status parse_tolerant(job *j, answer *a, const char *s, size_t n, bool thinking)
{
    const json_t *tools = json_object_get(j->line, "tools");
    size_t k = sizeof EOS - 1;
    bool eos = n >= k && memcmp(s + n - k, EOS, k) == 0;
    aff_parser *p;
    AFF_TRY(aff__parser_create(&p, thinking, json_is_array(tools) ? tools : NULL, collect, a, &j->err));
    aff_status st = aff__parser_feed(p, s, eos ? n - k : n, &j->err);
    if (st == AFF_OK) st = aff__parser_end(p, eos, &j->err);
    aff__parser_free(p);
    return st;
}

static aff_status parse_reference(job *j, answer *a, const char *s, size_t n, bool thinking)
{
    aff_strict r;
    aff_status st = aff__parse_strict(&r, s, n, thinking, j->format == AFF_CHAT_V41, &j->err);
    if (st == AFF_OK && r.exception) {
        j->error = r.exception;
        st = aff__fail(&j->err, AFF_E_FORMAT, "completion: %s", r.exception);
    }
    if (st == AFF_OK) st = aff__buf_put(&a->content, r.content.s, r.content.n, &j->err);
    if (st == AFF_OK) st = aff__buf_put(&a->reasoning, r.reasoning.s, r.reasoning.n, &j->err);
    for (size_t i = 0; i < r.n_calls && st == AFF_OK; i++)
        st = put_call(&a->calls, &r.call[i].name, &r.call[i].arguments, &j->err);
    aff__strict_free(&r);
    return st;
}

static aff_status parse(job *j)
{
    const json_t *text = json_object_get(j->line, "completion");
    answer a = {0};
    bool thinking;
    if (!aff__json_is_text(text)) return aff__fail(&j->err, AFF_E_INVALID, "completion: expected a string");
    AFF_TRY(thinking_of(j, &thinking));
    aff_status s = (opt.reference ? parse_reference : parse_tolerant)(j, &a, json_string_value(text),
                                                                      json_string_length(text), thinking);
    if (s == AFF_OK) s = put_answer(j, &a);
    aff__buf_free(&a.content);
    aff__buf_free(&a.reasoning);
    aff__buf_free(&a.name);
    aff__buf_free(&a.args);
    aff__buf_free(&a.calls);
    return s;
}

/* ---- lines ---- */

static aff_status print(const job *j, aff_status s, aff_error *err)
{
    const json_t *id = json_object_get(j->line, "id");
    const char *error = j->error && *j->error ? j->error : j->err.msg;
    aff_buf b = {0};
    aff_status st = aff__buf_puts(&b, "{\"id\": ", err);
    if (st == AFF_OK) st = id ? aff__json_dump_python(&b, id, err) : aff__buf_puts(&b, "null", err);
    if (st == AFF_OK) st = aff__buf_puts(&b, s == AFF_OK ? ", \"expected\": " : ", \"error\": ", err);
    if (st == AFF_OK)
        st = s == AFF_OK ? aff__buf_put(&b, j->result.s, j->result.n, err)
                         : aff__json_put_string(&b, error, strlen(error), err);
    if (st == AFF_OK) st = aff__buf_puts(&b, "}\n", err);
    if (st == AFF_OK && fwrite(b.s, 1, b.n, stdout) != b.n) st = aff__fail_errno(err, "standard output");
    aff__buf_free(&b);
    return st;
}

/* One line; *bad is set if it is no JSON object. */
static aff_status do_line(bool rendering, const char *s, size_t n, const char *name, bool *bad, aff_error *err)
{
    json_t *line = NULL;
    job j = {.err = {0}};
    aff_status st = aff__json_parse_exact(&line, s, n, name, opt.reference, 256, &j.err), printed;
    if (st == AFF_OK && !json_is_object(line)) st = aff__fail(&j.err, AFF_E_FORMAT, "%s: expected an object", name);
    if (st != AFF_OK) {
        *bad = true;
        fprintf(stderr, "aff-chat: %s\n", j.err.msg);
    } else {
        j.line = line;
        j.options = json_object_get(line, "options");
        j.format = format_of(line);
        st = rendering ? render(&j) : parse(&j);
    }
    printed = print(&j, st, err);
    aff__buf_free(&j.result);
    json_decref(line);
    return printed;
}

static aff_status do_file(bool rendering, const char *path, bool *bad, aff_error *err)
{
    char *data, name[64];
    size_t size, number = 0;
    AFF_TRY(aff__read_file(path, (uint64_t)1 << 30, &data, &size, err));
    aff_status s = AFF_OK;
    for (const char *p = data, *end = data + size; p < end && s == AFF_OK;) {
        const char *lf = memchr(p, '\n', (size_t)(end - p));
        size_t n = (size_t)((lf ? lf : end) - p);
        snprintf(name, sizeof name, "line %zu of the input", ++number);
        if (n) s = do_line(rendering, p, n, name, bad, err);
        p += n + 1;
    }
    free(data);
    if (s == AFF_OK && fflush(stdout) != 0) s = aff__fail_errno(err, "standard output");
    return s;
}

int main(int argc, char **argv)
{
    int first, rc = aff__options_main(&usage, argc, argv, &first);
    aff_error err = {0};
    aff_chat_format f;
    bool bad = false;
    if (rc >= 0) return rc;
    const char *what = argv[first], *path = first + 1 < argc ? argv[first + 1] : "-";
    if (strcmp(what, "render") != 0 && strcmp(what, "parse") != 0) {
        fprintf(stderr, "aff-chat: expected render or parse, got '%s'\n", what);
        return 2;
    }
    if (!aff__chat_format_find(opt.format, &f)) {
        fprintf(stderr, "aff-chat: --chat-format: expected auto, v4, 0731 or v4.1, got '%s'\n", opt.format);
        return 2;
    }
    if (do_file(strcmp(what, "render") == 0, path, &bad, &err) != AFF_OK) {
        fprintf(stderr, "aff-chat: %s\n", err.msg);
        return 1;
    }
    return bad ? 1 : 0;
}
