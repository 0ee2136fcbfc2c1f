/* regex_parse.c - patterns to a nondeterministic automaton over characters. */
#include "grammar/regex.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

static uint32_t nfa_new(regex *r)
{
    if (r->n_nfa == MOST_NFA) {
        r->why = "too large";
        return 0;
    }
    r->nfa[r->n_nfa] = (nfa_state){{G_INF, G_INF}, G_INF, G_INF};
    return r->n_nfa++;
}

static void arrow(regex *r, uint32_t from, uint32_t to)
{
    nfa_state *s = &r->nfa[from];
    if (s->eps[0] == G_INF)
        s->eps[0] = to;
    else
        s->eps[1] = to;
}

/* ---- classes ---- */

/* Characters that no text may have. */
static const span banned[] = {{0, 0}, {0xD800, 0xDFFF}};

static void add_span(regex *r, span *list, uint32_t *n, uint32_t lo, uint32_t hi)
{
    if (*n >= 1024) {
        r->why = "a class has too many parts";
        return;
    }
    list[(*n)++] = (span){lo, hi};
}

static int by_lo(const void *a, const void *b)
{
    const span *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Sorted, joined, inverted if asked, without what is banned. */
static uint32_t new_class(regex *r, span *list, uint32_t n, bool invert)
{
    span out[2050];
    uint32_t k = 0, at = 0;
    qsort(list, n, sizeof *list, by_lo);
    for (uint32_t i = 0; i < n && !r->why; i++) {
        if (k && list[i].lo <= out[k - 1].hi + 1) {
            if (list[i].hi > out[k - 1].hi) out[k - 1].hi = list[i].hi;
        } else {
            out[k++] = list[i];
        }
    }
    if (r->n_cls == MOST_CLASSES || r->n_range + 2 * k + 8 > MOST_RANGES) {
        r->why = "too many classes";
        return 0;
    }
    r->cls[r->n_cls].first = r->n_range;
    for (uint32_t i = 0; i <= k; i++) { /* the gap before each part, or the part */
        uint32_t lo = invert  ? at
                      : i < k ? out[i].lo
                              : 1,
                 hi = invert  ? (i < k ? out[i].lo - 1 : 0x10FFFF)
                      : i < k ? out[i].hi
                              : 0;
        const bool none = invert ? i < k && out[i].lo == at : false;
        if (i < k) at = out[i].hi + 1;
        if (none || lo > hi || lo > 0x10FFFF) continue;
        for (size_t b = 0; b < 2 && lo <= hi; b++) {
            if (banned[b].hi < lo || banned[b].lo > hi) continue;
            if (banned[b].lo > lo) r->range[r->n_range++] = (span){lo, banned[b].lo - 1};
            lo = banned[b].hi + 1;
        }
        if (lo <= hi) r->range[r->n_range++] = (span){lo, hi};
    }
    const uint32_t count = r->n_range - r->cls[r->n_cls].first;
    for (uint32_t i = 0; i < r->n_cls; i++) {
        if (r->cls[i].n != count ||
            memcmp(r->range + r->cls[i].first, r->range + r->cls[r->n_cls].first, count * sizeof(span)) != 0)
            continue;
        r->n_range -= count;
        return i;
    }
    r->cls[r->n_cls].n = count;
    return r->n_cls++;
}

static void add_spans(regex *r, span *list, uint32_t *n, const span *more, size_t n_more)
{
    for (size_t i = 0; i < n_more; i++) add_span(r, list, n, more[i].lo, more[i].hi);
}

/* The characters of \d and others. Where readers of patterns differ beyond ASCII it is what all of them take;
 * `inverted`: what any of them takes, as it is to be left out. */
static void add_named(regex *r, char c, bool inverted, span *list, uint32_t *n)
{
    static const span beyond[] = {{0x80, 0x10FFFF}},
                      spaces[] = {{28, 31},         {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
                                  {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                  {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    static const span digit[] = {{'0', '9'}}, not_digit[] = {{1, '0' - 1}, {'9' + 1, 0x7F}},
                      word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                      not_word[] = {{1, '0' - 1}, {'9' + 1, 'A' - 1}, {'Z' + 1, '_' - 1}, {'`', '`'}, {'z' + 1, 0x7F}},
                      space[] = {{9, 13}, {' ', ' '}},
                      not_space[] = {{1, 8},           {14, 27},         {33, 0x84},       {0x86, 0x9F},
                                     {0xA1, 0x167F},   {0x1681, 0x1FFF}, {0x200B, 0x2027}, {0x202A, 0x202E},
                                     {0x2030, 0x205E}, {0x2060, 0x2FFF}, {0x3001, 0xFEFE}, {0xFF00, 0x10FFFF}};
    static const struct {
        char c;
        const span *s;
        size_t n;
    } named[] = {{'d', digit, 1},    {'D', not_digit, 2}, {'w', word, 4},
                 {'W', not_word, 5}, {'s', space, 2},     {'S', not_space, 12}};
    for (size_t i = 0; i < 6; i++)
        if (named[i].c == c) add_spans(r, list, n, named[i].s, named[i].n);
    if (inverted && c != 's') add_spans(r, list, n, beyond, 1);
    if (inverted && c == 's') add_spans(r, list, n, spaces, sizeof spaces / sizeof *spaces);
    if (inverted && c >= 'A' && c <= 'Z') r->why = "\\D, \\W and \\S in an inverted class are not supported";
}

static uint32_t hex_number(regex *r, int n)
{
    uint32_t v = 0;
    for (int i = 0; i < n; i++) {
        const char c = r->s < r->end ? *r->s : 0;
        const int d = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
        if (d < 0) {
            r->why = "expected hexadecimal digits";
            return 0;
        }
        v = v * 16 + (uint32_t)d;
        r->s++;
    }
    return v;
}

static uint32_t unicode_escape(regex *r)
{
    uint32_t v;
    if (r->s < r->end && *r->s == '{') {
        const char *close = memchr(r->s, '}', (size_t)(r->end - r->s));
        r->s++;
        if (!close || close - r->s < 1 || close - r->s > 6) {
            r->why = "expected \\u{...}";
            return 0;
        }
        v = hex_number(r, (int)(close - r->s));
        r->s = close + 1;
    } else {
        v = hex_number(r, 4);
        if (v >= 0xD800 && v < 0xDC00 && r->end - r->s >= 6 && r->s[0] == '\\' && r->s[1] == 'u') {
            r->s += 2;
            const uint32_t low = hex_number(r, 4);
            v = low < 0xDC00 || low > 0xDFFF ? UINT32_MAX : 0x10000 + ((v - 0xD800) << 10) + (low - 0xDC00);
        }
    }
    if (v > 0x10FFFF) r->why = "expected a character";
    return v;
}

/* One character, or (*named) a class such as \d, behind a backslash. */
static uint32_t escaped(regex *r, char *named)
{
    const char c = r->s < r->end ? *r->s++ : 0;
    *named = 0;
    switch (c) {
    case 'd':
    case 'D':
    case 'w':
    case 'W':
    case 's':
    case 'S':
        *named = c;
        return 0;
    case 't':
        return '\t';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 'f':
        return '\f';
    case 'v':
        return '\v';
    case 'x':
        return hex_number(r, 2);
    case 'u':
        return unicode_escape(r);
    default:
        break;
    }
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || !c || (uint8_t)c >= 0x80)
        r->why = c == 'b' || c == 'B'   ? "\\b is not supported"
                 : c == 'p' || c == 'P' ? "\\p is not supported"
                                        : "an escape that is not supported";
    return (uint8_t)c;
}

static uint32_t character(regex *r)
{
    size_t n;
    const uint32_t c = aff__utf8_decode((const uint8_t *)r->s, &n);
    r->s += n;
    return c;
}

static uint32_t class_of(regex *r)
{
    span list[1024];
    uint32_t n = 0;
    const bool invert = r->s < r->end && *r->s == '^';
    if (invert) r->s++;
    while (!r->why) {
        char named = 0;
        if (r->s == r->end) {
            r->why = "a class is not closed";
            break;
        }
        if (*r->s == ']') break;
        uint32_t lo, hi;
        if (*r->s == '\\') {
            r->s++;
            if (r->s < r->end && *r->s == 'b') {
                r->s++;
                lo = '\b';
            } else {
                lo = escaped(r, &named);
            }
        } else {
            lo = character(r);
        }
        hi = lo;
        if (named) {
            add_named(r, named, invert, list, &n);
            continue;
        }
        if (r->end - r->s >= 2 && *r->s == '-' && r->s[1] != ']') {
            r->s++;
            if (*r->s == '\\') {
                r->s++;
                hi = escaped(r, &named);
            } else {
                hi = character(r);
            }
            if (named || hi < lo) r->why = "a range in a class is the wrong way round";
        }
        add_span(r, list, &n, lo, hi);
    }
    if (!r->why) r->s++;
    return r->why ? 0 : new_class(r, list, n, invert);
}

static uint32_t single(regex *r, uint32_t c)
{
    span one = {c, c};
    return new_class(r, &one, 1, false);
}

static uint32_t dot(regex *r, bool all)
{
    span line[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}, {0x85, 0x85}};
    return new_class(r, line, all ? 0 : 4, true);
}

/* ---- expressions ---- */

static piece alternatives(regex *r);

static piece reads(regex *r, uint32_t cls)
{
    const piece p = {nfa_new(r), nfa_new(r)};
    r->nfa[p.in].cls = cls;
    r->nfa[p.in].to = p.out;
    return p;
}

static piece group(regex *r)
{
    if (r->end - r->s >= 2 && r->s[0] == '?') {
        if (r->s[1] == ':') {
            r->s += 2;
        } else if (r->s[1] == '<' && r->end - r->s > 2 && r->s[2] != '=' && r->s[2] != '!') {
            const char *close = memchr(r->s, '>', (size_t)(r->end - r->s));
            if (!close) r->why = "a group is not closed";
            r->s = close ? close + 1 : r->end;
        } else {
            r->why = "look-around and flags are not supported";
        }
    }
    if (++r->nest > MOST_NEST) r->why = "nested too deep";
    const piece p = r->why ? (piece){0, 0} : alternatives(r);
    r->nest--;
    if (!r->why && (r->s == r->end || *r->s != ')')) r->why = "a group is not closed";
    if (!r->why) r->s++;
    return p;
}

static piece atom(regex *r)
{
    const char c = *r->s;
    char named = 0;
    if (c == '(') {
        r->s++;
        return group(r);
    }
    if (c == '[') {
        r->s++;
        return reads(r, class_of(r));
    }
    if (c == '.') {
        r->s++;
        return reads(r, dot(r, false));
    }
    if (c == '\\') {
        r->s++;
        const uint32_t ch = escaped(r, &named);
        if (r->why) return (piece){0, 0};
        if (!named) return reads(r, single(r, ch));
        span list[16];
        uint32_t n = 0;
        add_named(r, named, false, list, &n);
        return reads(r, new_class(r, list, n, false));
    }
    if (c == '^' || c == '$') r->why = "^ and $ are supported at the pattern's ends only";
    if (c == '*' || c == '+' || c == '?') r->why = "there is nothing to repeat";
    return reads(r, single(r, character(r)));
}

/* {m}, {m,} or {m,n} at r->s; false: it is text. */
static bool braces(regex *r, uint32_t *min, uint32_t *max)
{
    const char *s = r->s + 1;
    uint32_t v[2] = {0, 0};
    int have[2] = {0, 0}, k = 0;
    for (; s < r->end && *s != '}'; s++) {
        if (*s == ',' && k == 0)
            k = 1;
        else if (*s >= '0' && *s <= '9' && v[k] < 100000)
            v[k] = v[k] * 10 + (uint32_t)(*s - '0'), have[k] = 1;
        else
            return false;
    }
    if (s == r->end || !have[0]) return false;
    *min = v[0];
    *max = k == 0 ? v[0] : have[1] ? v[1] : G_INF;
    r->s = s + 1;
    return true;
}

static bool quantifier(regex *r, uint32_t *min, uint32_t *max)
{
    const char c = r->s < r->end ? *r->s : 0;
    *min = c == '+';
    *max = c == '?' ? 1 : G_INF;
    if (c == '{') {
        if (!braces(r, min, max)) return false;
    } else if (c == '*' || c == '+' || c == '?') {
        r->s++;
    } else {
        return false;
    }
    if (r->s < r->end && *r->s == '?') r->s++; /* lazy: the same texts */
    if (*min > *max) r->why = "a repetition is the wrong way round";
    return true;
}

/* An atom with its repetition; copies are made by reading it again. */
static piece repeated(regex *r)
{
    const char *from = r->s;
    uint32_t min, max;
    const piece first = atom(r);
    const char *body = r->s;
    if (r->why || !quantifier(r, &min, &max) || r->why) return first;
    const char *after = r->s, *end = r->end;
    piece all = {nfa_new(r), 0};
    uint32_t at = all.in;
    if (min > MOST_NFA || (max != G_INF && max > MOST_NFA)) r->why = "too large";
    r->end = body;
    for (uint32_t i = 0; !r->why && i < (max == G_INF ? min + 1 : max); i++) {
        r->s = from;
        const piece p = i ? atom(r) : first;
        if (r->why) break;
        const uint32_t join = nfa_new(r);
        arrow(r, at, p.in);
        if (i >= min) arrow(r, at, join);
        if (max == G_INF && i == min) {
            arrow(r, p.out, at); /* again, or on through `at` */
        } else {
            arrow(r, p.out, join);
        }
        at = join;
    }
    r->end = end;
    r->s = after;
    all.out = at;
    return all;
}

static piece sequence(regex *r)
{
    piece p = {nfa_new(r), 0};
    p.out = p.in;
    while (!r->why && r->s < r->end && *r->s != '|' && *r->s != ')') {
        const piece next = repeated(r);
        if (r->why) break;
        arrow(r, p.out, next.in);
        p.out = next.out;
    }
    return p;
}

static piece alternatives(regex *r)
{
    piece p = sequence(r);
    while (!r->why && r->s < r->end && *r->s == '|') {
        r->s++;
        const piece q = sequence(r), all = {nfa_new(r), nfa_new(r)};
        if (r->why) break;
        arrow(r, all.in, p.in);
        arrow(r, all.in, q.in);
        arrow(r, p.out, all.out);
        arrow(r, q.out, all.out);
        p = all;
    }
    return p;
}

static piece anything(regex *r)
{
    const piece p = reads(r, dot(r, true)), all = {nfa_new(r), nfa_new(r)};
    if (r->why) return all;
    arrow(r, all.in, p.in);
    arrow(r, all.in, all.out);
    arrow(r, p.out, all.in);
    return all;
}

/* One alternative of the whole pattern: anchored or not at either end. */
static piece branch(regex *r, const char *from, const char *to)
{
    bool begin = from < to && *from == '^', end = false;
    int slashes = 0;
    if (to > from + begin && to[-1] == '$') {
        for (const char *s = to - 2; s >= from && *s == '\\'; s--) slashes++;
        end = slashes % 2 == 0;
    }
    r->s = from + begin;
    r->end = to - end;
    piece p = sequence(r);
    if (!r->why && r->s != r->end) r->why = "a group is closed that was not opened";
    if (!begin && !r->why) {
        const piece any = anything(r);
        arrow(r, any.out, p.in);
        p.in = any.in;
    }
    if (!end && !r->why) {
        const piece any = anything(r);
        arrow(r, p.out, any.in);
        p.out = any.out;
    }
    return p;
}

piece regex_parse(regex *r, const char *s)
{
    const char *end = s + strlen(s), *from = s;
    piece all = {0, 0};
    bool first = true, in_class = false;
    int depth = 0;
    for (const char *c = s; c <= end && !r->why; c++) {
        if (c < end && *c == '\\') {
            if (++c == end) r->why = "it ends in a backslash";
            continue;
        }
        if (c < end) {
            if (in_class)
                in_class = *c != ']';
            else if (*c == '[')
                in_class = true;
            else
                depth += (*c == '(') - (*c == ')');
        }
        if (c < end && (*c != '|' || in_class || depth > 0)) continue;
        const piece p = branch(r, from, c);
        from = c + 1;
        if (r->why) break;
        if (first) {
            all = p;
        } else {
            const piece both = {nfa_new(r), nfa_new(r)};
            arrow(r, both.in, all.in);
            arrow(r, both.in, p.in);
            arrow(r, all.out, both.out);
            arrow(r, p.out, both.out);
            all = both;
        }
        first = false;
    }
    return all;
}
