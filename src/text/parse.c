#include "text/parse_internal.h"
#include "base/mem.h"
#include "format/json.h"
#include <stdlib.h>
#include <string.h>

#define BAR "\xEF\xBD\x9C" /* U+FF5C */

const char parse__open[] = "<" BAR "DSML" BAR, parse__close[] = "</" BAR "DSML" BAR;

/* Control tokens that may show up as text; none of them is part of an answer (spec 1.3). */
#define T(name) "<" BAR name BAR ">"
static const char *const control[] = {T("begin▁of▁sentence"),
                                      T("end▁of▁sentence"),
                                      T("▁pad▁"),
                                      T("User"),
                                      T("Assistant"),
                                      T("System"),
                                      T("latest_reminder"),
                                      T("action"),
                                      T("query"),
                                      T("authority"),
                                      T("domain"),
                                      T("task"),
                                      T("political"),
                                      T("entity"),
                                      T("title"),
                                      T("safety"),
                                      T("answer"),
                                      T("search"),
                                      T("begin▁sys"),
                                      T("end▁sys"),
                                      T("tool▁calls▁begin"),
                                      T("tool▁calls▁end"),
                                      T("tool▁call▁begin"),
                                      T("tool▁call▁end"),
                                      T("tool▁outputs▁begin"),
                                      T("tool▁outputs▁end"),
                                      T("tool▁output▁begin"),
                                      T("tool▁output▁end"),
                                      T("tool▁sep"),
                                      T("fim▁hole"),
                                      T("fim▁begin"),
                                      T("fim▁end"),
                                      T("begin▁of▁repo▁name"),
                                      T("end▁of▁repo▁name"),
                                      T("begin▁of▁file▁name"),
                                      T("end▁of▁file▁name"),
                                      T("begin▁of▁file"),
                                      T("end▁of▁file"),
                                      T("place▁holder▁for▁copy"),
                                      T("search▁begin"),
                                      T("search▁end"),
                                      T("extracted_url"),
                                      T("read_url"),
                                      T("end_of_query"),
                                      T("place▁holder▁for▁pointer▁replace")};
#undef T

/* ---- events ---- */

static aff_status emit(aff_parser *p, aff_parse_kind kind, const char *s, size_t n)
{
    return p->fn(p->ctx, &(aff_parse_event){kind, p->call, s, n}, p->err);
}

aff_status parse__flush(aff_parser *p)
{
    aff_status s = p->out.n ? emit(p, p->out_kind, p->out.s, p->out.n) : AFF_OK;
    p->out.n = 0;
    return s;
}

aff_status parse__put(aff_parser *p, aff_parse_kind kind, const char *s, size_t n)
{
    if (p->out.n && p->out_kind != kind) AFF_TRY(parse__flush(p));
    p->out_kind = kind;
    return aff__buf_put(&p->out, s, n, p->err);
}

aff_status parse__mark(aff_parser *p, aff_parse_kind kind, const char *s, size_t n)
{
    AFF_TRY(parse__flush(p));
    return emit(p, kind, s, n);
}

/* ---- what stands in the hold ---- */

typedef enum token { NONE, MORE, OPEN, CLOSE, THINK, END_THINK, CONTROL } token;

/* s[0..n) against one string: NONE, MORE if it is its beginning, `whole` if it is it. */
static token against(const char *s, size_t n, const char *full, token whole)
{
    size_t k = strlen(full);
    if (memcmp(s, full, n < k ? n : k) != 0) return NONE;
    return n >= k ? whole : MORE;
}

static token control_token(const char *s, size_t n)
{
    token t = NONE;
    if (n > 1 && s[1] != BAR[0]) return NONE;
    for (size_t i = 0; i < sizeof control / sizeof *control && t == NONE; i++) t = against(s, n, control[i], CONTROL);
    return t;
}

/* What s[0..n), which starts with '<', is or may become in the present state. */
static token markup(const aff_parser *p, const char *s, size_t n)
{
    token t = NONE;
    if (p->tools) {
        t = against(s, n, parse__close, CLOSE);
        if (t == NONE) t = against(s, n, parse__open, OPEN);
    }
    if (t == NONE) t = against(s, n, "</think>", END_THINK);
    if (t == NONE && p->start) t = against(s, n, "<think>", THINK);
    return t == NONE ? control_token(s, n) : t;
}

/* The same inside a value, which only tags of calls end: any closing one, and the opening ones that cannot be meant. */
static token value_markup(const char *s, size_t n)
{
#define OPENING "<" BAR "DSML" BAR
    static const char *const next[] = {
        OPENING "parameter name=", OPENING " parameter name=", OPENING "invoke name=", OPENING " invoke name="};
#undef OPENING
    token t = against(s, n, parse__close, CLOSE);
    for (size_t i = 0; i < 4 && t == NONE; i++) t = against(s, n, next[i], OPEN);
    return t;
}

/* The hold: line ends that belong to markup if any follows (two before a block, one after a value), then the markup. */
static token classify(const aff_parser *p, size_t *ends)
{
    const char *s = p->hold;
    size_t n = p->n_hold, lines = p->state == VALUE ? 1 : p->tools ? 2 : 0, k = 0;
    for (*ends = 0; lines > 0 && k < n; lines--, *ends = k) {
        if (s[k] == '\r') k++;
        if (k == n) return MORE;
        if (s[k++] != '\n') break;
    }
    k = *ends;
    if (k == n) return k ? MORE : NONE;
    if (s[k] != '<') return NONE;
    if (p->state == VALUE) return value_markup(s + k, n - k);
    return k ? against(s + k, n - k, parse__open, OPEN) : markup(p, s, n);
}

/* ---- text ---- */

/* Text inside a block but outside of values. White space around it is layout. */
static aff_status junk(aff_parser *p, char c)
{
    bool space = c == ' ' || c == '\n' || c == '\r' || c == '\t';
    if (p->state == ARGS) {
        if (space && p->junk.n == 0) return AFF_OK;
        if (p->junk.n < JUNK_LIMIT) return aff__buf_put(&p->junk, &c, 1, p->err);
        AFF_TRY(parse__end_call(p, false));
        p->state = CALLS;
        p->junk_begun = true;
    }
    if (space) {
        if (p->junk_begun && p->n_space < sizeof p->space) p->space[p->n_space++] = c;
        return AFF_OK;
    }
    AFF_TRY(parse__put(p, AFF_PARSE_TEXT, p->space, p->n_space));
    p->n_space = 0;
    p->junk_begun = true;
    return parse__put(p, AFF_PARSE_TEXT, &c, 1);
}

aff_status parse__text(aff_parser *p, char c)
{
    switch (p->state) {
    case VALUE:
        return parse__value(p, &c, 1);
    case CALLS:
    case ARGS:
        return junk(p, c);
    case REASONING:
    case CONTENT:
    case TAG:
    case BARE:
        break;
    }
    if (p->after && (c == '\n' || c == '\r' || c == ' ')) return AFF_OK;
    p->after = p->start = false;
    return parse__put(p, p->state == REASONING ? AFF_PARSE_REASONING : AFF_PARSE_TEXT, &c, 1);
}

static aff_status enter_tag(aff_parser *p, bool closing, size_t ends, size_t tag_length)
{
    const char *word = p->hold + ends + tag_length;
    p->tag.n = 0;
    AFF_TRY(aff__buf_put(&p->tag, word, p->n_hold - ends - tag_length, p->err));
    p->from = p->state;
    p->state = TAG;
    p->closing = closing;
    p->n_ends = ends;
    memcpy(p->ends, p->hold, ends);
    p->n_hold = 0;
    return AFF_OK;
}

/* Takes from the hold all that is decided. */
static aff_status settle(aff_parser *p)
{
    while (p->n_hold) {
        size_t ends;
        switch (classify(p, &ends)) {
        case MORE:
            return AFF_OK;
        case OPEN:
            return enter_tag(p, false, ends, sizeof parse__open - 1);
        case CLOSE:
            return enter_tag(p, true, ends, sizeof parse__close - 1);
        case END_THINK:
            if (p->state == REASONING) {
                p->state = CONTENT;
                p->start = true;
            }
            p->n_hold = 0;
            return AFF_OK;
        case THINK:
        case CONTROL:
            p->n_hold = 0;
            return AFF_OK;
        case NONE:
            AFF_TRY(parse__text(p, p->hold[0]));
            memmove(p->hold, p->hold + 1, --p->n_hold);
        }
    }
    return AFF_OK;
}

aff_status parse__byte(aff_parser *p, char c)
{
    if (p->state == TAG) return parse__tag_byte(p, c);
    if (p->state == BARE) return parse__bare_byte(p, c);
    p->hold[p->n_hold++] = c;
    return settle(p);
}

/* How much of s[0..n) is plain text of the present state for certain. */
static size_t plain_run(const aff_parser *p, const char *s, size_t n)
{
    if (p->n_hold || p->after || (p->state != REASONING && p->state != CONTENT && p->state != VALUE)) return 0;
    const char *lt = memchr(s, '<', n);
    if (lt) n = (size_t)(lt - s);
    const char *lf = memchr(s, '\n', n);
    if (lf) n = (size_t)(lf - s);
    const char *cr = memchr(s, '\r', n);
    return cr ? (size_t)(cr - s) : n;
}

static aff_status feed_text(aff_parser *p, const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t run = plain_run(p, s + i, n - i);
        if (run && p->state == VALUE) {
            AFF_TRY(parse__value(p, s + i, run));
        } else if (run) {
            p->start = false;
            AFF_TRY(parse__put(p, p->state == REASONING ? AFF_PARSE_REASONING : AFF_PARSE_TEXT, s + i, run));
        } else {
            AFF_TRY(parse__byte(p, s[i]));
            run = 1;
        }
        i += run;
    }
    return AFF_OK;
}

aff_status aff__parser_feed(aff_parser *p, const char *bytes, size_t n, aff_error *err)
{
    enum { STEP = 4096 };
    char text[3 * (STEP + 4)];
    p->err = err;
    for (size_t i = 0; i < n; i += STEP) {
        size_t k = aff__utf8_push(&p->utf8, bytes + i, n - i < STEP ? n - i : STEP, text);
        AFF_TRY(feed_text(p, text, k));
    }
    return parse__flush(p);
}

/* ---- the end ---- */

/* What is still held is text, unless it is the beginning of markup beyond doubt. */
static aff_status release_hold(aff_parser *p)
{
    char rest[sizeof p->hold];
    size_t n = p->n_hold, k = 0;
    memcpy(rest, p->hold, n);
    p->n_hold = 0;
    while (k < n && (rest[k] == '\n' || rest[k] == '\r')) k++;
    if (k < n && (p->state == CALLS || p->state == ARGS || p->after)) return AFF_OK;
    bool bar = (n - k >= 4 && memcmp(rest + k, "<" BAR, 4) == 0) || (n - k >= 5 && memcmp(rest + k, "</" BAR, 5) == 0);
    if (bar) return AFF_OK;
    for (size_t i = 0; i < n; i++) AFF_TRY(parse__text(p, rest[i]));
    return AFF_OK;
}

aff_status aff__parser_end(aff_parser *p, bool eos, aff_error *err)
{
    char text[8];
    p->err = err;
    AFF_TRY(feed_text(p, text, aff__utf8_flush(&p->utf8, text)));
    if (p->state == BARE) AFF_TRY(parse__give_up_bare(p));
    if (p->state == TAG) AFF_TRY(parse__end_tag(p));
    AFF_TRY(release_hold(p));
    if (p->in_call) {
        if (p->state == VALUE) AFF_TRY(parse__end_value(p));
        bool whole = eos && parse__has_required(p);
        AFF_TRY(parse__end_call(p, whole));
    }
    return parse__flush(p);
}

/* ---- life ---- */

aff_status aff__parser_create(aff_parser **out, bool thinking, const json_t *tools, aff_parse_fn fn, void *ctx,
                              aff_error *err)
{
    json_t *tool;
    size_t i;
    *out = NULL;
    aff_parser *p;
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "output parser", err));
    p->state = thinking ? REASONING : CONTENT;
    p->start = true;
    p->fn = fn;
    p->ctx = ctx;
    p->tools = !tools || json_array_size(tools) > 0;
    p->declared = tools ? json_object() : NULL;
    json_array_foreach(tools, i, tool)
    {
        json_t *f = json_object_get(tool, "function");
        if (!f) f = tool;
        const json_t *name = json_object_get(f, "name");
        if (!aff__json_is_text(name)) continue;
        if (json_object_set(p->declared, json_string_value(name), f) == 0) continue;
        aff__parser_free(p);
        return aff__fail(err, AFF_E_NOMEM, "output parser: out of memory");
    }
    *out = p;
    return AFF_OK;
}

void aff__parser_free(aff_parser *p)
{
    if (!p) return;
    json_decref(p->declared);
    json_decref(p->missing);
    aff__buf_free(&p->out);
    aff__buf_free(&p->tag);
    aff__buf_free(&p->value);
    aff__buf_free(&p->junk);
    aff__buf_free(&p->bare);
    free(p);
}
