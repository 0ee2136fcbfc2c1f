/* DeepSeek's strict parser of completions (spec text-and-serving 2.7, 8): searches for the next of a few stop strings
 * and compares what stands before it with what must. */
#define _GNU_SOURCE
#include "text/parse.h"
#include "base/mem.h"
#include "format/json.h"
#include <stdlib.h>
#include <string.h>

#define EOS "<｜end▁of▁sentence｜>"

typedef struct span {
    const char *s;
    size_t n;
} span;

typedef struct strict {
    aff_strict *out;
    const char *text;
    size_t n, at;
    char start[32], end[32], invoke[32], invoke_end[32], parameter[32], parameter_end[32];
    size_t cap_calls;
    aff_error *err;
} strict;

/* Reads to the first of the stop strings (NULLs are skipped) and over it; the text before it goes to *before. Returns
 * the stop string's number, -1 at the end of the text. */
static int read_until(strict *p, const char *const stop[2], span *before)
{
    size_t best = p->n, over = 0;
    int which = -1;
    for (int i = 0; i < 2; i++) {
        const char *hit = stop[i] ? memmem(p->text + p->at, p->n - p->at, stop[i], strlen(stop[i])) : NULL;
        if (!hit || (size_t)(hit - p->text) >= best) continue;
        best = (size_t)(hit - p->text);
        over = strlen(stop[i]);
        which = i;
    }
    *before = (span){p->text + p->at, best - p->at};
    p->at = best + over;
    return which;
}

static bool equals(span a, const char *s)
{
    return a.n == strlen(s) && memcmp(a.s, s, a.n) == 0;
}
static bool has(span a, const char *s)
{
    return memmem(a.s, a.n, s, strlen(s)) != NULL;
}
static bool skip(span *a, const char *s)
{
    size_t n = strlen(s);
    if (a->n < n || memcmp(a->s, s, n) != 0) return false;
    a->s += n;
    a->n -= n;
    return true;
}

static aff_status raise(strict *p, const char *exception)
{
    p->out->exception = exception;
    return AFF_OK;
}

/* Length of one character that Python's \s takes at s[0..n), 0 if there is none. */
static size_t python_space(const char *s, size_t n)
{
    static const char *const wide[] = {"\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\x80", "\xE2\x80\x81",
                                       "\xE2\x80\x82", "\xE2\x80\x83", "\xE2\x80\x84", "\xE2\x80\x85", "\xE2\x80\x86",
                                       "\xE2\x80\x87", "\xE2\x80\x88", "\xE2\x80\x89", "\xE2\x80\x8A", "\xE2\x80\xA8",
                                       "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80"};
    if (n && (*s == ' ' || (*s >= '\t' && *s <= '\r') || (*s >= 0x1C && *s <= 0x1F))) return 1;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (n >= strlen(wide[i]) && memcmp(s, wide[i], strlen(wide[i])) == 0) return strlen(wide[i]);
    return 0;
}

/* ^\s*name="(.*?)">\n$ where $ may stand before one more LF. */
static bool invoke_header(span h, span *name)
{
    for (size_t n; (n = python_space(h.s, h.n)) > 0; h.s += n, h.n -= n) {
    }
    if (!skip(&h, "name=\"")) return false;
    size_t tail = h.n >= 4 && memcmp(h.s + h.n - 4, "\">\n\n", 4) == 0 ? 4
                  : h.n >= 3 && memcmp(h.s + h.n - 3, "\">\n", 3) == 0 ? 3
                                                                       : 0;
    *name = (span){h.s, h.n - tail};
    return tail > 0;
}

/* ^ name="(.*?)" string="(true|false)">(.*?)<$ */
static bool parameter_text(span t, span *key, bool *string, span *value)
{
    static const char middle[] = "\" string=\"";
    if (!skip(&t, " name=\"")) return false;
    span rest = t;
    for (;;) {
        const char *hit = memmem(rest.s, rest.n, middle, sizeof middle - 1);
        if (!hit) return false;
        *key = (span){t.s, (size_t)(hit - t.s)};
        rest.n -= (size_t)(hit - rest.s) + sizeof middle - 1;
        rest.s = hit + sizeof middle - 1;
        span v = rest;
        *string = skip(&v, "true\">");
        if (!*string && !skip(&v, "false\">")) continue;
        size_t tail = v.n >= 1 && v.s[v.n - 1] == '<' ? 1 : v.n >= 2 && memcmp(v.s + v.n - 2, "<\n", 2) == 0 ? 2 : 0;
        if (!tail) return false;
        *value = (span){v.s, v.n - tail};
        return true;
    }
}

/* The parameters of one call, whose header has been read up to `stop`. */
static aff_status call_parameters(strict *p, int stop, aff_buf *arguments, json_t *seen)
{
    const char *const more[2] = {p->parameter, p->invoke_end}, *const close[2] = {p->parameter_end, NULL};
    bool first = true, string;
    span text, key, value;
    AFF_TRY(aff__buf_puts(arguments, "{", p->err));
    while (stop == 0) {
        (void)read_until(p, close, &text);
        if (!parameter_text(text, &key, &string, &value)) return raise(p, "ValueError");
        aff_buf k = {0};
        aff_status s = aff__json_put_string(&k, key.s, key.n, p->err);
        bool twice = s == AFF_OK && json_object_get(seen, k.s);
        if (s == AFF_OK && !twice && json_object_set_new_nocheck(seen, k.s, json_true()) != 0)
            s = aff__fail(p->err, AFF_E_NOMEM, "completion: out of memory");
        if (s == AFF_OK && !first) s = aff__buf_puts(arguments, ", ", p->err);
        if (s == AFF_OK) s = aff__buf_put(arguments, k.s, k.n, p->err);
        if (s == AFF_OK) s = aff__buf_puts(arguments, ": ", p->err);
        if (s == AFF_OK)
            s = string ? aff__json_put_string(arguments, value.s, value.n, p->err)
                       : aff__buf_put(arguments, value.s, value.n, p->err);
        aff__buf_free(&k);
        AFF_TRY(s);
        if (twice) return raise(p, "ValueError");
        first = false;
        stop = read_until(p, more, &text);
        if (!equals(text, ">\n")) return raise(p, "ValueError");
    }
    return aff__buf_puts(arguments, "}", p->err);
}

static aff_status one_call(strict *p)
{
    const char *const more[2] = {p->parameter, p->invoke_end};
    span header, name;
    int stop = read_until(p, more, &header);
    if (!invoke_header(header, &name)) return raise(p, "ValueError");
    aff_strict *o = p->out;
    if (o->n_calls == p->cap_calls) {
        AFF_TRY(aff__realloc(&o->call, p->cap_calls * 2 + 4, sizeof *o->call, "calls", p->err));
        p->cap_calls = p->cap_calls * 2 + 4;
    }
    aff_strict_call *c = &o->call[o->n_calls++];
    *c = (aff_strict_call){0};
    AFF_TRY(aff__buf_put(&c->name, name.s, name.n, p->err));
    json_t *seen = json_object();
    aff_status s = call_parameters(p, stop, &c->arguments, seen);
    json_decref(seen);
    return s;
}

static aff_status calls(strict *p)
{
    const char *const next[2] = {p->invoke, p->end};
    span before;
    while (p->at < p->n && !p->out->exception) {
        int stop = read_until(p, next, &before);
        if (!equals(before, ">\n") || stop < 0) return raise(p, "ValueError");
        if (stop == 1) break;
        AFF_TRY(one_call(p));
    }
    return AFF_OK;
}

static aff_status completion(strict *p, bool thinking)
{
    static const char *const stray[] = {"<｜begin▁of▁sentence｜>", EOS, "<think>", "</think>", "｜DSML｜"};
    const char *const reasoning_end[2] = {"</think>", p->start}, *const content_end[2] = {EOS, p->start},
                      *const eos[2] = {EOS, NULL};
    span reasoning = {"", 0}, content, after;
    if (thinking && read_until(p, reasoning_end, &reasoning) != 0) return raise(p, "AssertionError");
    int stop = read_until(p, content_end, &content);
    if (stop < 0) return raise(p, "AssertionError");
    AFF_TRY(aff__buf_put(&p->out->reasoning, reasoning.s, reasoning.n, p->err));
    AFF_TRY(aff__buf_put(&p->out->content, content.s, content.n, p->err));
    if (stop == 1) {
        AFF_TRY(calls(p));
        if (p->out->exception) return AFF_OK;
        (void)read_until(p, eos, &after);
        if (after.n) return raise(p, "AssertionError");
    }
    if (p->at != p->n) return raise(p, "AssertionError");
    for (size_t i = 0; i < sizeof stray / sizeof *stray; i++)
        if (has(content, stray[i]) || has(reasoning, stray[i])) return raise(p, "AssertionError");
    return AFF_OK;
}

aff_status aff__parse_strict(aff_strict *out, const char *text, size_t n, bool thinking, bool v41, aff_error *err)
{
    strict p = {.out = out, .text = text, .n = n, .err = err};
    const char *space = v41 ? " " : "";
    *out = (aff_strict){0};
    snprintf(p.start, sizeof p.start, "\n\n<｜DSML｜%s", v41 ? " calls" : "tool_calls");
    snprintf(p.end, sizeof p.end, "</｜DSML｜%s>", v41 ? " calls" : "tool_calls");
    snprintf(p.invoke, sizeof p.invoke, "<｜DSML｜%sinvoke", space);
    snprintf(p.invoke_end, sizeof p.invoke_end, "</｜DSML｜%sinvoke", space);
    snprintf(p.parameter, sizeof p.parameter, "<｜DSML｜%sparameter", space);
    snprintf(p.parameter_end, sizeof p.parameter_end, "/｜DSML｜%sparameter", space);
    return completion(&p, thinking);
}

void aff__strict_free(aff_strict *s)
{
    for (size_t i = 0; i < s->n_calls; i++) {
        aff__buf_free(&s->call[i].name);
        aff__buf_free(&s->call[i].arguments);
    }
    free(s->call);
    aff__buf_free(&s->content);
    aff__buf_free(&s->reasoning);
    *s = (aff_strict){0};
}
