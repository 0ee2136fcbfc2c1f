#include "ui/talk.h"
#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/json.h"
#include "text/parse.h"
#include <stdlib.h>
#include <string.h>

static const uint64_t file_limit = 256u << 20;

aff_status aff__talk_init(aff_talk *t, aff_error *err)
{
    t->messages = json_array();
    return t->messages ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "conversation: out of memory");
}

void aff__talk_free(aff_talk *t)
{
    json_decref(t->messages);
    free(t->system);
    free(t->ids);
}

void aff__talk_reset(aff_talk *t)
{
    json_array_clear(t->messages);
    t->covered = 0;
}

/* ---- the prompt ---- */

static aff_status push_ids(aff_talk *t, const uint32_t *id, size_t n, aff_error *err)
{
    if (t->n_ids + (int64_t)n > t->cap_ids) {
        const int64_t cap = t->n_ids + (int64_t)n + t->cap_ids / 2 + 256;
        AFF_TRY(aff__realloc(&t->ids, (uint64_t)cap, sizeof *t->ids, "tokens of the conversation", err));
        t->cap_ids = cap;
    }
    for (size_t i = 0; i < n; i++) t->ids[t->n_ids++] = (int32_t)id[i];
    return AFF_OK;
}

static bool thinks(const aff_talk *t)
{
    return strcmp(t->effort, "none") != 0;
}

/* The messages as the encoder gets them: [0, from) as context, the rest to be printed. References to the talk's own. */
static aff_status split(const aff_talk *t, size_t from, json_t *context, json_t *rest, aff_error *err)
{
    json_t *system = NULL, *m;
    size_t i;
    int failed = 0;
    if (t->system) {
        system = json_pack("{s:s, s:s}", "role", "system", "content", t->system);
        failed |= !system || json_array_append_new(from ? context : rest, system) != 0;
    }
    json_array_foreach(t->messages, i, m) failed |= json_array_append(i < from ? context : rest, m) != 0;
    return failed ? aff__fail(err, AFF_E_NOMEM, "conversation: out of memory") : AFF_OK;
}

static aff_status render(aff_talk *t, size_t from, aff_chat_prompt *p, aff_error *err)
{
    json_t *context = json_array(), *rest = json_array(), *effort = thinks(t) ? json_string(t->effort) : NULL;
    aff_status s = context && rest ? split(t, from, context, rest, err) : aff__fail(err, AFF_E_NOMEM, "conversation: out of memory");
    if (s == AFF_OK) {
        const aff_chat_request r = {.format = t->format,
                                    .messages = rest,
                                    .context = from ? context : NULL,
                                    .effort = effort,
                                    .thinking = thinks(t),
                                    .no_bos = from > 0};
        s = aff__chat_render(p, &r, err);
    }
    json_decref(context);
    json_decref(rest);
    json_decref(effort);
    return s;
}

/* The prompt's tokens to t->ids. Where the last turns are in them as they were sampled, and the encoder would print them so (no
 * reasoning to be left out, the same effort), only what is new is added; else all of it is rendered again, and the tokens that turn
 * out the same are found by the state that was kept. */
static aff_status make_prompt(aff_talk *t, bool *thinking, aff_error *err)
{
    const bool goes_on = t->covered && !thinks(t) && strcmp(t->covered_effort, t->effort) == 0;
    const uint32_t eos = (uint32_t)aff__net_config(t->net)->eos;
    aff_chat_prompt p = {0};
    aff_ids ids = {0};
    AFF_TRY(render(t, goes_on ? t->covered : 0, &p, err));
    aff_status s = aff__tokenizer_encode_segments(t->tok, p.seg, p.n_seg, &ids, err);
    if (!goes_on) t->n_ids = 0;
    if (s == AFF_OK && goes_on && t->ids[t->n_ids - 1] != (int32_t)eos) s = push_ids(t, &eos, 1, err);
    if (s == AFF_OK) s = push_ids(t, ids.id, ids.n, err);
    *thinking = p.thinking;
    aff__chat_prompt_free(&p);
    aff__ids_free(&ids);
    return s;
}

/* ---- the answer ---- */

typedef struct answer {
    aff_talk *t;
    aff_parser *parser;
    aff_buf reasoning, text;
    bool dim, progress, ended; /* ended: by the end of sequence */
    char last;                 /* byte that was printed last */
    aff_status status;
    aff_error err;
} answer;

/* The model's text must not drive the terminal: control characters but newline and tab are left out. */
static void print(answer *a, const char *s, size_t n)
{
    FILE *f = a->t->out;
    for (size_t i = 0; i < n; i++) {
        const uint8_t c = (uint8_t)s[i], next = i + 1 < n ? (uint8_t)s[i + 1] : 0;
        if (c == 0xC2 && next >= 0x80 && next < 0xA0) { /* U+0080 to U+009F */
            i++;
            continue;
        }
        if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7F) continue;
        fputc(c, f);
        a->last = (char)c;
    }
}

static void set_dim(answer *a, bool dim)
{
    if (a->dim == dim) return;
    a->dim = dim;
    if (a->t->colour) fputs(dim ? "\033[2m" : "\033[0m", a->t->out);
    if (dim) return;
    print(a, "\n", a->last != '\n');
    print(a, "\n", 1);
}

static aff_status on_event(void *ctx, const aff_parse_event *e, aff_error *err)
{
    answer *a = ctx;
    const bool reasoning = e->kind == AFF_PARSE_REASONING;
    if (!reasoning && e->kind != AFF_PARSE_TEXT) return AFF_OK; /* there are no tools, so there are no calls */
    aff_buf *to = reasoning ? &a->reasoning : &a->text;
    const char *s = e->s;
    size_t n = e->n;
    AFF_TRY(aff__buf_put(to, s, n, err));
    if (to->n == n) /* newlines in front are the template's, not worth a line */
        while (n && (*s == '\n' || *s == '\r')) s++, n--;
    if (!n) return AFF_OK;
    set_dim(a, reasoning);
    print(a, s, n);
    return AFF_OK;
}

static bool on_progress(void *ctx, int64_t done, int64_t total)
{
    answer *a = ctx;
    if (a->t->colour && (a->progress || done < total)) {
        fprintf(a->t->out, done < total ? "\r\033[K\033[2mprompt, %lld of %lld tokens\033[0m" : "\r\033[K", (long long)done, (long long)total);
        a->progress = done < total;
        fflush(a->t->out);
    }
    return !a->t->interrupted();
}

static aff_status take(answer *a, int32_t id)
{
    size_t n;
    const uint32_t u = (uint32_t)id;
    AFF_TRY(push_ids(a->t, &u, 1, &a->err));
    if (id == aff__net_config(a->t->net)->eos) {
        a->ended = true;
        return AFF_OK;
    }
    const char *bytes = aff__tokenizer_bytes(a->t->tok, u, &n);
    return aff__parser_feed(a->parser, bytes, n, &a->err);
}

static bool on_token(void *ctx, const aff_token *tok)
{
    answer *a = ctx;
    a->status = take(a, tok->id);
    fflush(a->t->out);
    return a->status == AFF_OK && !a->t->interrupted();
}

static aff_status run(answer *a, aff_error *err)
{
    aff_talk *t = a->t;
    const int64_t room = aff__engine_context(t->engine) - t->n_ids;
    if (room < 1)
        return aff__fail(err, AFF_E_LIMIT, "the conversation has %lld tokens, and the context room for %lld: /reset begins another one",
                         (long long)t->n_ids, (long long)aff__engine_context(t->engine));
    const aff_request r = {.prompt = t->ids,
                           .n_prompt = t->n_ids,
                           .n_predict = t->n_predict && t->n_predict < room ? t->n_predict : room,
                           .sampling = t->sampling};
    AFF_TRY(aff__engine_run(t->engine, &r, &(aff_events){.ctx = a, .progress = on_progress, .token = on_token}, &t->last, err));
    if (a->status != AFF_OK) {
        *err = a->err;
        return a->status;
    }
    return aff__parser_end(a->parser, a->ended, err);
}

static aff_status keep_answer(answer *a, aff_error *err)
{
    aff_talk *t = a->t;
    json_t *m = json_object();
    int failed = !m || json_object_set_new(m, "role", json_string("assistant")) != 0 ||
                 json_object_set_new(m, "content", json_stringn(a->text.n ? a->text.s : "", a->text.n)) != 0;
    if (!failed && a->reasoning.n) failed = json_object_set_new(m, "reasoning_content", json_stringn(a->reasoning.s, a->reasoning.n)) != 0;
    if (failed || json_array_append(t->messages, m) != 0) {
        json_decref(m);
        return aff__fail(err, AFF_E_NOMEM, "conversation: out of memory");
    }
    json_decref(m);
    t->covered = json_array_size(t->messages);
    snprintf(t->covered_effort, sizeof t->covered_effort, "%s", t->effort);
    return AFF_OK;
}

static aff_status turn(answer *a, aff_error *err)
{
    aff_talk *t = a->t;
    bool thinking = false;
    json_t *none = json_array();
    if (!none) return aff__fail(err, AFF_E_NOMEM, "conversation: out of memory");
    aff_status s = make_prompt(t, &thinking, err);
    if (s == AFF_OK) s = aff__parser_create(&a->parser, thinking, none, on_event, a, err);
    if (s == AFF_OK) s = run(a, err);
    if (a->progress) fputs("\r\033[K", t->out);
    if (a->dim && t->colour) fputs("\033[0m", t->out);
    if (a->last && a->last != '\n') fputc('\n', t->out);
    fflush(t->out);
    aff__parser_free(a->parser);
    if (s == AFF_OK) s = keep_answer(a, err);
    json_decref(none);
    return s;
}

aff_status aff__talk_send(aff_talk *t, const char *text, size_t n, aff_error *err)
{
    const size_t had = json_array_size(t->messages);
    answer a = {.t = t};
    json_t *content = json_stringn(text, n), *m = json_object();
    int failed = !content || !m || json_object_set_new(m, "role", json_string("user")) != 0 || json_object_set(m, "content", content) != 0 ||
                 json_array_append(t->messages, m) != 0;
    json_decref(content);
    json_decref(m);
    if (failed) return aff__fail(err, AFF_E_INVALID, "the message is not UTF-8, or there is no memory for it");
    const aff_status s = turn(&a, err);
    if (s != AFF_OK) { /* the tokens may hold part of a turn that is none */
        while (json_array_size(t->messages) > had) json_array_remove(t->messages, had);
        t->covered = 0;
    }
    aff__buf_free(&a.reasoning);
    aff__buf_free(&a.text);
    return s;
}

/* ---- files ---- */

aff_status aff__talk_save(const aff_talk *t, const char *path, aff_error *err)
{
    aff_outfile out;
    aff_buf text = {0};
    json_t *o = json_object();
    int failed = !o || json_object_set_new(o, "system", t->system ? json_string(t->system) : json_null()) != 0 ||
                 json_object_set(o, "messages", t->messages) != 0;
    aff_status s = failed ? aff__fail(err, AFF_E_NOMEM, "conversation: out of memory") : aff__json_dump_python(&text, o, err);
    if (s == AFF_OK) s = aff__buf_put(&text, "\n", 1, err);
    if (s == AFF_OK) s = aff__out_open(&out, path, err);
    if (s == AFF_OK) {
        s = aff__out_write(&out, text.s, text.n, 0, err);
        if (s == AFF_OK)
            s = aff__out_commit(&out, err);
        else
            aff__out_abort(&out);
    }
    aff__buf_free(&text);
    json_decref(o);
    return s;
}

static aff_status check_messages(const json_t *list, const char *name, aff_error *err)
{
    size_t i;
    json_t *m;
    if (!json_is_array(list)) return aff__fail(err, AFF_E_FORMAT, "%s: messages: expected an array", name);
    json_array_foreach(list, i, m) {
        const char *role = json_string_value(json_object_get(m, "role"));
        const json_t *reasoning = json_object_get(m, "reasoning_content");
        if (!role || (strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0))
            return aff__fail(err, AFF_E_FORMAT, "%s: message %zu: role: expected user or assistant, got %s", name, i + 1, role ? role : "none");
        if (!aff__json_is_text(json_object_get(m, "content")) || (reasoning && !aff__json_is_text(reasoning)))
            return aff__fail(err, AFF_E_FORMAT, "%s: message %zu: content and reasoning_content: expected text", name, i + 1);
    }
    return AFF_OK;
}

aff_status aff__talk_parse(aff_talk *t, const char *text, size_t n, const char *name, aff_error *err)
{
    json_t *o = NULL;
    char *system = NULL;
    AFF_TRY(aff__json_parse(&o, text, n, name, false, err));
    json_t *list = json_object_get(o, "messages");
    const json_t *sys = json_object_get(o, "system");
    aff_status s = check_messages(list, name, err);
    if (s == AFF_OK && sys && !json_is_null(sys) && !aff__json_is_text(sys))
        s = aff__fail(err, AFF_E_FORMAT, "%s: system: expected a text or null", name);
    if (s == AFF_OK && json_is_string(sys)) s = aff__strndup(&system, json_string_value(sys), json_string_length(sys), err);
    if (s == AFF_OK) {
        json_decref(t->messages);
        t->messages = json_incref(list);
        free(t->system);
        t->system = system;
        t->covered = 0;
    }
    json_decref(o);
    return s;
}

aff_status aff__talk_load(aff_talk *t, const char *path, aff_error *err)
{
    char *text;
    size_t n;
    AFF_TRY(aff__read_file(path, file_limit, &text, &n, err));
    const aff_status s = aff__talk_parse(t, text, n, path, err);
    free(text);
    return s;
}
