#include "text/chat_internal.h"
#include "base/mem.h"
#include "format/json.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool aff__chat_format_find(const char *name, aff_chat_format *format)
{
    static const struct {
        const char *name;
        aff_chat_format format;
    } names[] = {{"auto", AFF_CHAT_AUTO}, {"v4", AFF_CHAT_V4},        {"v4-first", AFF_CHAT_V4},
                 {"0731", AFF_CHAT_0731}, {"v4-0731", AFF_CHAT_0731}, {"v4.1", AFF_CHAT_V41}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i].name) != 0) continue;
        *format = names[i].format;
        return true;
    }
    return false;
}

aff_status chat__refuse(chat *c, const char *exception, size_t index, const char *fmt, ...)
{
    char what[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    if (c->r->reference) c->exception = exception;
    return aff__fail(c->err, AFF_E_INVALID, "messages[%zu]: %s", index, what);
}

/* ---- output ---- */

static aff_status put(chat *c, const char *s, size_t n, bool added)
{
    if (n == 0) return AFF_OK;
    AFF_TRY(aff__buf_put(&c->text, s, n, c->err));
    if (c->n_piece == 0 || c->piece[c->n_piece - 1].added != added || c->piece[c->n_piece - 1].n_ids) {
        if (c->n_piece == c->cap_piece) {
            AFF_TRY(aff__realloc(&c->piece, c->cap_piece * 2 + 32, sizeof *c->piece, "prompt", c->err));
            c->cap_piece = c->cap_piece * 2 + 32;
        }
        c->piece[c->n_piece++] = (chat_piece){.added = added};
    }
    c->piece[c->n_piece - 1].end = c->text.n;
    return AFF_OK;
}

aff_status chat__caller(chat *c, const char *s, size_t n)
{
    return put(c, s, n, false);
}

aff_status chat__template(chat *c, const char *s)
{
    static const char *const names[2][3] = {{"tool_calls", "invoke", "parameter"}, {" calls", " invoke", " parameter"}};
    while (*s) {
        size_t n = strcspn(s, "\1\2\3");
        AFF_TRY(put(c, s, n, true));
        s += n;
        if (!*s) break;
        const char *name = names[c->v41][*s++ - 1];
        AFF_TRY(put(c, name, strlen(name), true));
    }
    return AFF_OK;
}

aff_status chat__json(chat *c, const json_t *v)
{
    aff_buf b = {0};
    aff_status s = aff__json_dump_python(&b, v, c->err);
    if (s == AFF_OK) s = chat__caller(c, b.s, b.n);
    aff__buf_free(&b);
    return s;
}

/* ---- content fields ---- */

typedef enum content_kind { CONTENT_PLAIN, CONTENT_USER, CONTENT_RESULT, CONTENT_REMINDER } content_kind;

static bool is_text_part(const json_t *part, const char *type)
{
    return json_is_string(part) || strcmp(type, "text") == 0 || strcmp(type, "input_text") == 0 ||
           strcmp(type, "output_text") == 0;
}

/* Text parts joined by an empty line; for other parts a note, which tool results of V4.1 go without. */
static aff_status parts(chat *c, size_t index, const json_t *list, content_kind kind)
{
    json_t *part;
    size_t i;
    bool first = true;
    json_array_foreach(list, i, part)
    {
        const json_t *t = json_object_get(part, "type"),
                     *text = json_is_string(part) ? part : json_object_get(part, "text");
        const char *type = json_is_string(t) ? json_string_value(t) : "None";
        bool is_text = is_text_part(part, type);
        if (!json_is_object(part) && (!json_is_string(part) || c->r->reference))
            return chat__refuse(c, "AttributeError", index, "content[%zu]: expected an object with type and text", i);
        if (!is_text && kind == CONTENT_RESULT && c->v41 && !strstr(type, "image")) continue;
        if (is_text && text && !json_is_null(text) && !aff__json_is_text(text))
            return chat__refuse(c, "TypeError", index, "content[%zu].text: expected a string", i);
        if (!first) AFF_TRY(chat__template(c, "\n\n"));
        first = false;
        if (is_text) {
            AFF_TRY(chat__caller(c, json_string_value(text), json_string_length(text)));
        } else {
            AFF_TRY(chat__template(c, "[Unsupported "));
            AFF_TRY(chat__caller(c, type, strlen(type)));
            AFF_TRY(chat__template(c, "]"));
        }
    }
    return AFF_OK;
}

/* v is NULL if the field is absent. */
static aff_status content(chat *c, size_t index, const char *name, const json_t *v, content_kind kind)
{
    bool reference = c->r->reference;
    if (!v) return AFF_OK;
    if (aff__json_is_text(v)) return chat__caller(c, json_string_value(v), json_string_length(v));
    if (json_is_null(v)) {
        if (!reference || kind == CONTENT_PLAIN) return AFF_OK;
        if (kind == CONTENT_USER) return chat__refuse(c, "TypeError", index, "%s: null", name);
        return chat__caller(c, "None", 4);
    }
    if (!json_is_array(v)) return chat__refuse(c, "TypeError", index, "%s: expected a string or a list of parts", name);
    if (reference && !c->v41 && kind == CONTENT_USER) return chat__refuse(c, "TypeError", index, "%s: a list", name);
    if (reference && !c->v41 && kind != CONTENT_RESULT)
        return chat__refuse(c, "Unsupported", index, "%s: a list, which the encoder prints as Python would", name);
    return parts(c, index, v, kind);
}

/* ---- messages ---- */

static aff_status effort_prefix(chat *c)
{
    char text[128];
    if (c->v41) {
        snprintf(text, sizeof text,
                 "<｜System｜>Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the "
                 "reasoning)\n\n",
                 c->effort);
        return chat__template(c, text);
    }
    return chat__template(c, c->effort == 2 ? chat__effort_m : c->effort == 1 ? chat__effort_h : "");
}

static aff_status tools_block(chat *c, const chat_message *m)
{
    json_t *tool;
    size_t i;
    bool first = true;
    if (!m->tools) return AFF_OK;
    if (!json_is_array(m->tools)) return chat__refuse(c, "TypeError", m->index, "tools: expected an array");
    AFF_TRY(chat__template(c, "\n\n"));
    AFF_TRY(chat__template(c, chat__tools_head));
    json_array_foreach(m->tools, i, tool)
    {
        const json_t *f = json_object_get(tool, "function");
        if (!f && !c->r->reference && json_is_string(json_object_get(tool, "name"))) f = tool;
        if (!f) return chat__refuse(c, "KeyError", m->index, "tools[%zu]: expected {\"function\": {...}}", i);
        if (!first) AFF_TRY(chat__template(c, "\n"));
        first = false;
        AFF_TRY(chat__json(c, f));
    }
    return chat__template(c, chat__tools_tail);
}

/* What follows the content of a system or developer message. */
static aff_status additions(chat *c, const chat_message *m)
{
    AFF_TRY(tools_block(c, m));
    if (!m->response_format) return AFF_OK;
    AFF_TRY(chat__template(c, "\n\n"));
    AFF_TRY(chat__template(c, chat__format_head));
    return chat__json(c, m->response_format);
}

static aff_status user_turn(chat *c, const chat_message *m)
{
    AFF_TRY(chat__template(c, "<｜User｜>"));
    for (size_t i = 0; i < m->n_blocks; i++) {
        const chat_block *b = &c->block[m->first_block + i];
        if (i) AFF_TRY(chat__template(c, "\n\n"));
        if (b->result) AFF_TRY(chat__template(c, "<tool_result>"));
        AFF_TRY(content(c, b->index, "content", b->content, b->result ? CONTENT_RESULT : CONTENT_USER));
        if (b->result) AFF_TRY(chat__template(c, "</tool_result>"));
    }
    return AFF_OK;
}

/* Message i as the model wrote it, if that is known and it stands right behind an opener. */
static aff_status replayed(chat *c, const chat_message *m, size_t i, int64_t last_user, bool *found)
{
    aff_buf text = {0};
    const size_t first = c->ids.n;
    *found = false;
    if (!c->r->replay || m->wo_eos || i == 0 || !chat__is_user(c, i - 1) || c->m[i - 1].task) return AFF_OK;
    const bool think = c->thinking && (!c->drop || (int64_t)i - 1 >= last_user);
    *found = c->r->replay(c->r->replay_ctx, m->json, think, &text, &c->ids) && text.n && c->ids.n > first;
    aff_status s = AFF_OK;
    if (*found) {
        /* a piece of its own: no other kind of text may join it */
        if (c->n_piece) s = put(c, text.s, text.n, !c->piece[c->n_piece - 1].added);
        if (s == AFF_OK) {
            c->piece[c->n_piece - 1].first_id = first;
            c->piece[c->n_piece - 1].n_ids = c->ids.n - first;
        }
    } else {
        c->ids.n = first;
    }
    aff__buf_free(&text);
    return s;
}

static aff_status assistant_turn(chat *c, const chat_message *m, size_t i, int64_t last_user)
{
    const json_t *reasoning = json_object_get(m->json, "reasoning_content");
    if (!c->r->reference && (!reasoning || json_is_null(reasoning))) reasoning = json_object_get(m->json, "reasoning");
    bool after_task = i > 0 && c->m[i - 1].task, found;
    AFF_TRY(replayed(c, m, i, last_user, &found));
    if (found) return chat__template(c, "<｜end▁of▁sentence｜>");
    if (c->thinking && !after_task && (!c->drop || (int64_t)i > last_user)) {
        if (!m->no_reasoning) AFF_TRY(content(c, m->index, "reasoning_content", reasoning, CONTENT_PLAIN));
        AFF_TRY(chat__template(c, "</think>"));
    }
    AFF_TRY(content(c, m->index, "content", json_object_get(m->json, "content"), CONTENT_PLAIN));
    AFF_TRY(chat__calls(c, m));
    return m->wo_eos ? AFF_OK : chat__template(c, "<｜end▁of▁sentence｜>");
}

static aff_status opener(chat *c, bool think)
{
    AFF_TRY(chat__template(c, "<｜Assistant｜>"));
    return chat__template(c, think ? "<think>" : "</think>");
}

static aff_status task(chat *c, const chat_message *m)
{
    static const char *const names[] = {"action", "query", "authority", "domain", "title", "read_url"};
    const char *name = json_is_string(m->task) ? json_string_value(m->task) : "";
    char token[32];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        if (i == 0) AFF_TRY(opener(c, c->thinking));
        snprintf(token, sizeof token, "<｜%s｜>", name);
        return chat__template(c, token);
    }
    return chat__refuse(c, "AssertionError", m->index, "task: '%.40s' is none", name);
}

/* What leads from message i to the next one. */
static aff_status transition(chat *c, size_t i, int64_t last_user)
{
    if (i + 1 < c->n && c->m[i + 1].role != ROLE_ASSISTANT && c->m[i + 1].role != ROLE_REMINDER) return AFF_OK;
    if (c->m[i].task) return task(c, &c->m[i]);
    if (!chat__is_user(c, i)) return AFF_OK;
    return opener(c, c->thinking && (!c->drop || (int64_t)i >= last_user));
}

static aff_status message(chat *c, size_t i, int64_t last_user)
{
    const chat_message *m = &c->m[i];
    if (i == 0 && c->thinking) AFF_TRY(effort_prefix(c));
    switch (m->role) {
    case ROLE_SYSTEM:
        if (c->v41 && (i > 0 || !c->thinking)) AFF_TRY(chat__template(c, "<｜System｜>"));
        AFF_TRY(content(c, m->index, "content", json_object_get(m->json, "content"), CONTENT_PLAIN));
        AFF_TRY(additions(c, m));
        break;
    case ROLE_DEVELOPER:
        AFF_TRY(chat__template(c, "<｜User｜>"));
        AFF_TRY(content(c, m->index, "content", json_object_get(m->json, "content"), CONTENT_PLAIN));
        AFF_TRY(additions(c, m));
        break;
    case ROLE_USER:
        AFF_TRY(user_turn(c, m));
        break;
    case ROLE_REMINDER:
        AFF_TRY(chat__template(c, "<｜latest_reminder｜>"));
        AFF_TRY(content(c, m->index, "content", json_object_get(m->json, "content"), CONTENT_REMINDER));
        break;
    case ROLE_ASSISTANT:
        AFF_TRY(assistant_turn(c, m, i, last_user));
        break;
    case ROLE_SEARCH:
    case ROLE_TOOL:
    case ROLE_OTHER:
        return chat__refuse(c, "NotImplementedError", m->index, "a role that cannot be printed");
    }
    return transition(c, i, last_user);
}

/* ---- request ---- */

/* Effort as DeepSeek's encoders take it (spec 2.1, model-v41 14). */
static aff_status effort_reference(chat *c, const char *name)
{
    const json_t *v = c->r->effort;
    int level = !name                       ? -1
                : strcmp(name, "low") == 0  ? 0
                : strcmp(name, "high") == 0 ? 1
                : strcmp(name, "max") == 0  ? 2
                                            : -1;
    bool ok = false;
    if (c->v41) {
        static const int number[] = {50, 75, 100};
        json_int_t i = json_is_integer(v) ? json_integer_value(v) : 0;
        c->effort = !v ? 75 : level >= 0 ? number[level] : i >= 1 && i <= 100 ? (int)i : 0;
        ok = c->effort != 0;
    } else if (c->r->format == AFF_CHAT_V4) {
        ok = !v || level > 0;
        c->effort = level == 2;
    } else {
        ok = !v || level >= 0 || (name && !*name);
        c->effort = level > 0 ? level : 0;
    }
    if (ok) return AFF_OK;
    c->exception = "AssertionError";
    return aff__fail(c->err, AFF_E_INVALID, "reasoning_effort: not one that this encoder knows");
}

/* Effort as the API takes it. */
static aff_status effort_server(chat *c, const char *name)
{
    static const struct {
        const char *name;
        int level; /* -1: no thinking */
    } names[] = {{"none", -1}, {"minimal", 0}, {"low", 0}, {"medium", 1},
                 {"high", 1},  {"xhigh", 1},   {"max", 2}, {"ultra", 2}};
    static const int v41[] = {50, 75, 100};
    const json_t *v = c->r->effort;
    if (c->v41) c->effort = 75;
    if (!v || (name && !*name)) return AFF_OK;
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++) {
        int level = names[i].level;
        if (strcmp(name, names[i].name) != 0) continue;
        if (level < 0)
            c->thinking = false;
        else
            c->effort = c->v41 ? v41[level] : c->r->format == AFF_CHAT_V4 ? level == 2 : level;
        return AFF_OK;
    }
    if (c->v41 && json_is_integer(v) && json_integer_value(v) >= 1 && json_integer_value(v) <= 100) {
        c->effort = (int)json_integer_value(v);
        return AFF_OK;
    }
    return aff__fail(c->err, AFF_E_INVALID,
                     "reasoning_effort: expected none, minimal, low, medium, high, xhigh, max or ultra%s%s%.40s%s",
                     c->v41 ? ", or an integer from 1 to 100" : "", name ? ", got '" : "", name ? name : "",
                     name ? "'" : "");
}

/* Whether the prompt so far ends with an assistant turn that was opened. */
static bool opened(const chat *c)
{
    size_t i = c->n;
    while (i > 0 && c->m[i - 1].role == ROLE_REMINDER) i--;
    return i > 0 && chat__is_user(c, i - 1);
}

/* The last message, if it is the assistant's and to be continued, stays without EOS. */
static aff_status final_message(chat *c)
{
    chat_message *last = &c->m[c->n - 1];
    if (last->role == ROLE_ASSISTANT) {
        if (c->r->continue_final || json_is_true(json_object_get(last->json, "prefix"))) last->wo_eos = true;
    } else if (c->r->continue_final) {
        return chat__refuse(c, "", last->index, "role: expected assistant, to be continued");
    }
    return AFF_OK;
}

static aff_status render(chat *c)
{
    const json_t *e = c->r->effort;
    const char *name = aff__json_is_text(e) ? json_string_value(e) : NULL;
    bool first = true;
    if (!json_is_array(c->r->messages) || (c->r->context && !json_is_array(c->r->context)))
        return aff__fail(c->err, AFF_E_INVALID, "messages: expected an array");
    AFF_TRY(c->r->reference ? effort_reference(c, name) : effort_server(c, name));
    if (!c->r->reference && json_array_size(c->r->messages) == 0)
        return aff__fail(c->err, AFF_E_INVALID, "messages: expected at least one message, got none");
    AFF_TRY(chat__prepare(c));
    if (!c->r->reference) AFF_TRY(final_message(c));
    if (!c->r->no_bos && !(c->r->context && json_array_size(c->r->context)))
        AFF_TRY(chat__template(c, "<｜begin▁of▁sentence｜>"));
    int64_t last_user = chat__last_user(c);
    for (size_t i = 0; i < c->n; i++) {
        if (c->m[i].context) continue;
        AFF_TRY(message(c, i, last_user));
        first = false;
    }
    if (c->r->reference || first) return AFF_OK;
    if (c->m[c->n - 1].wo_eos || opened(c)) return AFF_OK;
    return opener(c, c->thinking);
}

static aff_status hand_over(chat *c, aff_chat_prompt *out)
{
    static const char think[] = "<think>";
    aff_segment *seg;
    size_t start = 0, k = sizeof think - 1;
    AFF_TRY(aff__calloc(&seg, c->n_piece, sizeof *seg, "prompt", c->err));
    AFF_TRY(aff__buf_put(&c->text, "", 0, c->err));
    for (size_t i = 0; i < c->n_piece; i++) {
        seg[i] = (aff_segment){c->text.s + start, c->piece[i].end - start, c->piece[i].added,
                               c->piece[i].n_ids ? c->ids.id + c->piece[i].first_id : NULL, c->piece[i].n_ids};
        start = c->piece[i].end;
    }
    *out = (aff_chat_prompt){.text = c->text.s, .n = c->text.n, .seg = seg, .n_seg = c->n_piece, .ids = c->ids};
    const aff_segment *last = c->n_piece ? &seg[c->n_piece - 1] : NULL;
    out->thinking = last && last->added && last->n >= k && memcmp(last->text + last->n - k, think, k) == 0;
    c->text = (aff_buf){0};
    c->ids = (aff_ids){0};
    return AFF_OK;
}

aff_status aff__chat_render(aff_chat_prompt *out, const aff_chat_request *r, aff_error *err)
{
    aff_chat_request own = *r;
    if (own.format == AFF_CHAT_AUTO) own.format = AFF_CHAT_0731;
    if (json_is_null(own.effort)) own.effort = NULL;
    if (json_is_null(own.context)) own.context = NULL;
    chat c = {.r = &own, .v41 = own.format == AFF_CHAT_V41, .thinking = own.thinking, .err = err};
    *out = (aff_chat_prompt){0};
    aff_status s = render(&c);
    if (s == AFF_OK) s = hand_over(&c, out);
    if (s != AFF_OK) out->exception = c.exception;
    free(c.m);
    free(c.block);
    free(c.piece);
    aff__buf_free(&c.text);
    aff__ids_free(&c.ids);
    return s;
}

void aff__chat_prompt_free(aff_chat_prompt *p)
{
    free(p->text);
    free(p->seg);
    aff__ids_free(&p->ids);
    *p = (aff_chat_prompt){0};
}
