#define _GNU_SOURCE /* memmem */
/* Tags of calls, as the model writes them and as it misspells them. */
#include "text/parse_internal.h"
#include "format/json.h"
#include <string.h>

typedef enum tag_kind { TAG_INVOKE, TAG_PARAMETER, TAG_BLOCK } tag_kind;

static bool letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

/* The tag's first word, without the space that V4.1 puts before it. */
static const char *word_of(const aff_buf *tag, size_t *n)
{
    size_t i = 0;
    while (i < tag->n && tag->s[i] == ' ') i++;
    for (*n = 0; i + *n < tag->n && letter(tag->s[i + *n]);) ++*n;
    return tag->s ? tag->s + i : "";
}

static tag_kind kind_of(const aff_parser *p)
{
    size_t n;
    const char *w = word_of(&p->tag, &n);
    if (n >= 3 && strncmp(w, "inv", 3) == 0) return TAG_INVOKE;
    if (n >= 5 && strncmp(w, "param", 5) == 0) return TAG_PARAMETER;
    if (!p->closing || (n >= 4 && memmem(w, n, "call", 4))) return TAG_BLOCK;
    return TAG_PARAMETER; /* any closing tag ends a value */
}

static size_t quotes(const aff_buf *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->n; i++) n += b->s[i] == '"';
    return n;
}

/* ---- attributes ---- */

/* The text behind NAME=" in a tag; NULL if it is not there. */
static const char *attribute(const aff_buf *tag, const char *name)
{
    const char *hit = memmem(tag->s, tag->n, name, strlen(name));
    return hit ? hit + strlen(name) : NULL;
}

/* Length of an attribute's value: to the quote that is followed by another attribute or the tag's end, at the latest
 * the last one, so that a name may hold quotes. Without any quote, to the end. */
static size_t value_length(const char *v, const char *end)
{
    size_t last = (size_t)(end - v);
    for (const char *q = v; q < end; q++) {
        if (*q != '"') continue;
        last = (size_t)(q - v);
        const char *r = q + 1;
        while (r < end && *r == ' ') r++;
        if (r == end) return last;
        if (r == q + 1) continue;
        while (r < end && letter(*r)) r++;
        if (end - r >= 2 && r[0] == '=' && r[1] == '"') return last;
    }
    return last;
}

/* The header of a parameter: key and type. The exact form is ` name="KEY" string="true|false"`, KEY to the first place
 * where the rest fits, as the reference reads it. */
static bool parameter_header(const aff_buf *tag, const char **key, size_t *n, parse_type *type)
{
    static const char *const exact[2] = {"\" string=\"true\"", "\" string=\"false\""};
    const char *end = tag->s + tag->n, *string = attribute(tag, "string=\"");
    *key = attribute(tag, "name=\"");
    if (!*key) return false;
    for (int i = 0; i < 2; i++) {
        size_t k = strlen(exact[i]);
        if ((size_t)(end - *key) < k || memcmp(end - k, exact[i], k) != 0) continue;
        *n = (size_t)(end - *key) - k;
        *type = i ? TYPE_JSON : TYPE_STRING;
        return true;
    }
    *n = value_length(*key, end);
    char c = string && string < end ? *string : 0;
    *type = c == 't' || c == 'T' ? TYPE_STRING : c == 'f' || c == 'F' ? TYPE_JSON : TYPE_UNSAID;
    return true;
}

/* ---- what a tag does ---- */

static aff_status put_text(aff_parser *p, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) AFF_TRY(parse__text(p, s[i]));
    return AFF_OK;
}

/* The tag turns out to be text of the state it stands in. */
static aff_status as_text(aff_parser *p, const char *last)
{
    p->state = p->from;
    AFF_TRY(put_text(p, p->ends, p->n_ends));
    AFF_TRY(put_text(p, p->closing ? parse__close : parse__open, strlen(p->closing ? parse__close : parse__open)));
    AFF_TRY(put_text(p, p->tag.s, p->tag.n));
    return put_text(p, last, strlen(last));
}

static void enter_block(aff_parser *p)
{
    p->state = CALLS;
    p->junk_begun = false;
    p->n_space = 0;
}

static void leave_block(aff_parser *p)
{
    p->state = CONTENT;
    p->after = true;
    p->start = false;
}

/* What stood behind the name of a tag that was not closed by '>' is text, and so is a name that is too long for one. */
static aff_status rest_as_text(aff_parser *p)
{
    size_t n;
    const char *w = word_of(&p->tag, &n);
    const char *end = p->tag.s ? p->tag.s + p->tag.n : w;
    if (n <= 32) w += n;
    while (w < end && *w == ' ') w++;
    return put_text(p, w, (size_t)(end - w));
}

static bool declared(const aff_parser *p, const char *name, size_t n)
{
    return n && (!p->declared || json_object_getn(p->declared, name, n));
}

/* A call without its block: kept aside until it closes, if its name is one of the request's. */
static aff_status bare_call(aff_parser *p, const char *name, size_t n, const char *last)
{
    if (!declared(p, name, n)) {
        p->quoting = true;
        return as_text(p, last);
    }
    p->bare.n = 0;
    p->bare_from = p->from;
    p->state = BARE;
    AFF_TRY(aff__buf_put(&p->bare, p->ends, p->n_ends, p->err));
    AFF_TRY(aff__buf_puts(&p->bare, parse__open, p->err));
    AFF_TRY(aff__buf_put(&p->bare, p->tag.s, p->tag.n, p->err));
    return aff__buf_puts(&p->bare, last, p->err);
}

static aff_status opening(aff_parser *p, tag_kind kind, bool closed)
{
    bool outside = p->from == REASONING || p->from == CONTENT;
    const char *end = p->tag.s + p->tag.n, *name = attribute(&p->tag, "name=\"");
    bool named = name && memchr(name, '"', (size_t)(end - name)) && (closed || p->tag.n < TAG_LIMIT);
    size_t n = named ? value_length(name, end) : 0;
    parse_type type;
    if (kind == TAG_BLOCK) {
        if (outside)
            enter_block(p);
        else
            p->state = p->from;
        return closed ? AFF_OK : rest_as_text(p);
    }
    if (kind == TAG_INVOKE) {
        if (outside) return bare_call(p, name, n, closed ? ">" : "");
        if (p->from == VALUE) AFF_TRY(parse__end_value(p));
        if (p->in_call) AFF_TRY(parse__end_call(p, true));
        enter_block(p);
        return n ? parse__begin_call(p, name, n) : rest_as_text(p);
    }
    if (outside) return as_text(p, closed ? ">" : "");
    if (p->from == VALUE) AFF_TRY(parse__end_value(p));
    p->state = p->in_call ? ARGS : CALLS;
    if (!p->in_call || !closed || !parameter_header(&p->tag, &name, &n, &type))
        return closed ? AFF_OK : rest_as_text(p);
    return parse__begin_value(p, name, n, type);
}

static aff_status closing(aff_parser *p, tag_kind kind, bool closed)
{
    p->state = p->from;
    if (p->from == REASONING || p->from == CONTENT) {
        if (!p->quoting) return closed ? AFF_OK : rest_as_text(p);
        if (kind == TAG_INVOKE) p->quoting = false;
        return as_text(p, closed ? ">" : "");
    }
    if (p->from == VALUE) {
        if (kind == TAG_PARAMETER) AFF_TRY(parse__value(p, p->ends, p->n_ends));
        AFF_TRY(parse__end_value(p));
    }
    if (kind == TAG_PARAMETER) {
        p->state = p->in_call ? ARGS : CALLS;
        return closed ? AFF_OK : rest_as_text(p);
    }
    if (p->in_call) AFF_TRY(parse__end_call(p, true));
    if (kind == TAG_BLOCK)
        leave_block(p);
    else
        enter_block(p);
    return closed ? AFF_OK : rest_as_text(p);
}

static aff_status finish(aff_parser *p, bool closed)
{
    tag_kind kind = kind_of(p);
    return p->closing ? closing(p, kind, closed) : opening(p, kind, closed);
}

aff_status parse__tag_byte(aff_parser *p, char c)
{
    tag_kind kind = kind_of(p);
    bool header = !p->closing && kind != TAG_BLOCK, parameter = header && kind == TAG_PARAMETER;
    if (c == '>') {
        bool quoted = p->tag.n && p->tag.s[p->tag.n - 1] == '"';
        if (!header || quoted || quotes(&p->tag) % 2 == 0) return finish(p, true);
    }
    if (((c == '<' || c == '\n') && !parameter) || p->tag.n >= (parameter ? HEADER_LIMIT : TAG_LIMIT)) {
        AFF_TRY(finish(p, false));
        return parse__byte(p, c);
    }
    return aff__buf_put(&p->tag, &c, 1, p->err);
}

aff_status parse__end_tag(aff_parser *p)
{
    if (p->closing) return closing(p, kind_of(p), false);
    p->state = p->from;
    if (kind_of(p) != TAG_BLOCK) return AFF_OK;
    return opening(p, TAG_BLOCK, false);
}

/* ---- calls without a block ---- */

static bool ends_with(const aff_buf *b, const char *s)
{
    size_t n = strlen(s);
    return b->n >= n && memcmp(b->s + b->n - n, s, n) == 0;
}

aff_status parse__bare_byte(aff_parser *p, char c)
{
    AFF_TRY(aff__buf_put(&p->bare, &c, 1, p->err));
    if (p->bare.n > BARE_LIMIT) return parse__give_up_bare(p);
    if (c != '>' || !(ends_with(&p->bare, "</｜DSML｜invoke>") || ends_with(&p->bare, "</｜DSML｜ invoke>")))
        return AFF_OK;
    aff_buf whole = p->bare;
    aff_status s = AFF_OK;
    p->bare = (aff_buf){0};
    enter_block(p);
    for (size_t i = 0; i < whole.n && s == AFF_OK; i++) s = parse__byte(p, whole.s[i]);
    aff__buf_free(&whole);
    return s;
}

aff_status parse__give_up_bare(aff_parser *p)
{
    aff_buf whole = p->bare;
    p->bare = (aff_buf){0};
    p->state = p->bare_from;
    p->quoting = true;
    aff_status s = put_text(p, whole.s, whole.n);
    aff__buf_free(&whole);
    return s;
}
