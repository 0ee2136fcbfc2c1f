/* regex.c - patterns: parsed to a nondeterministic automaton over characters, made deterministic, combined with the length, and
 * written as instructions. Deterministic beforehand, so that a pattern that explodes is refused with the request. */
#include "grammar/schema.h"
#include "base/mem.h"
#include "base/rng.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

enum {
    MOST_PATTERN = 2000,
    MOST_NFA = 4000,
    MOST_CLASSES = 512,
    MOST_RANGES = 16384,
    MOST_DFA = 2000,
    MOST_PRODUCT = 60000,
    MOST_NEST = 32,
    MOST_REGEX_WORK = 20000000
};

typedef struct span {
    uint32_t lo, hi;
} span;

typedef struct nfa_state {
    uint32_t eps[2]; /* G_INF: none */
    uint32_t cls, to; /* cls G_INF: reads nothing */
} nfa_state;

typedef struct regex {
    const char *s, *end, *why;
    nfa_state nfa[MOST_NFA];
    uint32_t n_nfa;
    struct {
        uint32_t first, n;
    } cls[MOST_CLASSES];
    uint32_t n_cls;
    span range[MOST_RANGES];
    uint32_t n_range;
    int nest;
    /* atoms: stretches of characters that no class tells apart */
    uint32_t atom[2 * MOST_RANGES + 2], n_atom;
    /* the deterministic automaton */
    uint64_t *sets; /* [n_dfa][words] */
    uint32_t words, n_dfa, *edge; /* [n_dfa][n_atom], G_INF: none */
    bool *final;
    uint64_t work;
    bool raw;
} regex;

typedef struct piece {
    uint32_t in, out;
} piece;

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
        uint32_t lo = invert ? at : i < k ? out[i].lo : 1, hi = invert ? (i < k ? out[i].lo - 1 : 0x10FFFF) : i < k ? out[i].hi : 0;
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
        if (r->cls[i].n != count || memcmp(r->range + r->cls[i].first, r->range + r->cls[r->n_cls].first, count * sizeof(span)) != 0) continue;
        r->n_range -= count;
        return i;
    }
    r->cls[r->n_cls].n = count;
    return r->n_cls++;
}

static void add_named(regex *r, char c, span *list, uint32_t *n)
{
    /* Where readers of patterns differ beyond ASCII, what all of them take: \d, \w and their opposites stay within it. */
    static const span digit[] = {{'0', '9'}}, not_digit[] = {{1, '0' - 1}, {'9' + 1, 0x7F}},
                      word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                      not_word[] = {{1, '0' - 1}, {'9' + 1, 'A' - 1}, {'Z' + 1, '_' - 1}, {'`', '`'}, {'z' + 1, 0x7F}},
                      space[] = {{9, 13}, {' ', ' '}},
                      not_space[] = {{1, 8}, {14, 27}, {33, 0x84}, {0x86, 0x9F}, {0xA1, 0x167F}, {0x1681, 0x1FFF}, {0x200B, 0x2027}, {0x202A, 0x202E}, {0x2030, 0x205E}, {0x2060, 0x2FFF}, {0x3001, 0xFEFE}, {0xFF00, 0x10FFFF}};
    static const struct {
        char c;
        const span *s;
        size_t n;
    } named[] = {{'d', digit, 1}, {'D', not_digit, 2}, {'w', word, 4}, {'W', not_word, 5}, {'s', space, 2}, {'S', not_space, 12}};
    for (size_t i = 0; i < 6; i++)
        if (named[i].c == c)
            for (size_t k = 0; k < named[i].n; k++) add_span(r, list, n, named[i].s[k].lo, named[i].s[k].hi);
}

static uint32_t hex_number(regex *r, int n)
{
    uint32_t v = 0;
    for (int i = 0; i < n; i++) {
        const char c = r->s < r->end ? *r->s : 0;
        const int d = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
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
            v = 0x10000 + ((v - 0xD800) << 10) + (hex_number(r, 4) - 0xDC00);
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
        r->why = c == 'b' || c == 'B' ? "\\b is not supported" : c == 'p' || c == 'P' ? "\\p is not supported" : "an escape that is not supported";
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
            if (invert && named >= 'A' && named <= 'Z') r->why = "\\D, \\W and \\S in an inverted class are not supported";
            add_named(r, named, list, &n);
            /* in an inverted class, what any reader may count among it */
            if (invert && named != 's') add_span(r, list, &n, 0x80, 0x10FFFF);
            if (invert && named == 's') {
                static const span more[] = {{28, 31}, {0x85, 0x85}, {0xA0, 0xA0}, {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
                for (size_t i = 0; i < sizeof more / sizeof *more; i++) add_span(r, list, &n, more[i].lo, more[i].hi);
            }
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
        add_named(r, named, list, &n);
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

static piece whole(regex *r, const char *s)
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

/* ---- deterministic ---- */

static int by_value(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void find_atoms(regex *r)
{
    uint32_t n = 0, k = 0;
    for (uint32_t i = 0; i < r->n_range; i++) {
        r->atom[n++] = r->range[i].lo;
        r->atom[n++] = r->range[i].hi + 1;
    }
    qsort(r->atom, n, sizeof *r->atom, by_value);
    for (uint32_t i = 0; i < n; i++)
        if (!k || r->atom[k - 1] != r->atom[i]) r->atom[k++] = r->atom[i];
    r->n_atom = k ? k - 1 : 0; /* atom i: atom[i] .. atom[i + 1] - 1 */
}

static bool reads_atom(const regex *r, uint32_t cls, uint32_t atom)
{
    for (uint32_t i = 0; i < r->cls[cls].n; i++) {
        const span *s = &r->range[r->cls[cls].first + i];
        if (s->lo <= r->atom[atom] && r->atom[atom] <= s->hi) return true;
    }
    return false;
}

static void reach(regex *r, uint64_t *set, uint32_t from)
{
    uint32_t stack[2 * MOST_NFA + 2], n = 0;
    stack[n++] = from;
    while (n) {
        const uint32_t q = stack[--n];
        if (set[q >> 6] >> (q & 63) & 1) continue;
        set[q >> 6] |= 1ull << (q & 63);
        r->work++;
        for (int i = 0; i < 2; i++)
            if (r->nfa[q].eps[i] != G_INF) stack[n++] = r->nfa[q].eps[i];
    }
}

/* The number of a set, a new one if it is new. */
static uint32_t dfa_of(regex *r, const uint64_t *set, uint32_t out)
{
    for (uint32_t i = 0; i < r->n_dfa; i++)
        if (memcmp(r->sets + (size_t)i * r->words, set, r->words * sizeof *set) == 0) return i;
    r->work += r->n_dfa;
    if (r->n_dfa == MOST_DFA) {
        r->why = "too complex";
        return 0;
    }
    memcpy(r->sets + (size_t)r->n_dfa * r->words, set, r->words * sizeof *set);
    r->final[r->n_dfa] = set[out >> 6] >> (out & 63) & 1;
    return r->n_dfa++;
}

static aff_status determine(regex *r, piece p, aff_error *err)
{
    uint64_t set[MOST_NFA / 64 + 1] = {0};
    r->words = r->n_nfa / 64 + 1;
    find_atoms(r);
    if ((uint64_t)MOST_DFA * (r->n_atom + 1) > 4000000) {
        r->why = "too many different characters";
        return AFF_OK;
    }
    AFF_TRY(aff__calloc(&r->sets, (uint64_t)MOST_DFA * r->words, sizeof *r->sets, "pattern", err));
    AFF_TRY(aff__calloc(&r->edge, (uint64_t)MOST_DFA * (r->n_atom + 1), sizeof *r->edge, "pattern", err));
    AFF_TRY(aff__calloc(&r->final, MOST_DFA, sizeof *r->final, "pattern", err));
    reach(r, set, p.in);
    dfa_of(r, set, p.out);
    for (uint32_t d = 0; d < r->n_dfa && !r->why; d++)
        for (uint32_t a = 0; a < r->n_atom && !r->why; a++) {
            bool any = false;
            memset(set, 0, sizeof set);
            const uint64_t *from = r->sets + (size_t)d * r->words;
            for (uint32_t w = 0; w < r->words; w++)
                for (uint64_t bits = from[w]; bits; bits &= bits - 1) {
                    const nfa_state *q = &r->nfa[w * 64 + (uint32_t)__builtin_ctzll(bits)];
                    r->work += 1 + (q->cls == G_INF ? 0 : r->cls[q->cls].n);
                    if (q->cls == G_INF || !reads_atom(r, q->cls, a)) continue;
                    any = true;
                    reach(r, set, q->to);
                }
            r->edge[(size_t)d * r->n_atom + a] = any ? dfa_of(r, set, p.out) : G_INF;
            if (r->work > MOST_REGEX_WORK) r->why = "too complex";
        }
    return AFF_OK;
}

/* ---- with the length, as instructions ---- */

/* One character of the atoms that lead from d to `to`. */
static uint32_t one_character(g_builder *b, const regex *r, uint32_t d, uint32_t to, uint32_t next)
{
    uint64_t plain[4] = {0};
    uint32_t at = G_FAIL;
    const aff_text_kind kind = r->raw ? AFF_TEXT_RAW : AFF_TEXT_JSON;
    for (uint32_t a = 0; a < r->n_atom; a++) {
        if (r->edge[(size_t)d * r->n_atom + a] != to) continue;
        uint32_t lo = r->atom[a], hi = r->atom[a + 1] - 1;
        for (; lo <= hi && lo < 0x80; lo++) {
            char text[8];
            const char *names = "b\bt\tn\nf\fr\r\"\"\\\\", *hit = NULL;
            if (aff__text_plain(kind, (uint8_t)lo) || (r->raw && lo == '<')) {
                g_set_add(plain, (uint8_t)lo);
                continue;
            }
            if (r->raw) continue;
            for (const char *s = names; *s; s += 2)
                if ((uint32_t)s[1] == lo) hit = s;
            const int n = hit ? snprintf(text, sizeof text, "\\%c", *hit) : snprintf(text, sizeof text, "\\u%04x", (unsigned)lo);
            at = g_or(b, at, g_literal(b, text, (size_t)n, next));
        }
        while (a + 1 < r->n_atom && lo <= hi && r->edge[(size_t)d * r->n_atom + a + 1] == to) hi = r->atom[++a + 1] - 1;
        if (lo > hi) continue;
        if (r->raw && lo <= 0xFF5C && hi >= 0xFF5C) { /* the bar of the tags */
            if (lo < 0xFF5C) at = g_or(b, at, g_utf8(b, lo, 0xFF5B, next));
            lo = 0xFF5D;
        }
        if (lo <= hi) at = g_or(b, at, g_utf8(b, lo, hi, next));
    }
    return g_or(b, g_set(b, plain, next), at);
}

/* A character that leads from d to `to`, as a rule that every length can call. */
typedef struct arm {
    uint32_t d, to, rule, more; /* more: of the same d; G_INF: none */
} arm;

typedef struct product {
    uint32_t n, lengths, max; /* states: n * lengths; a length beyond the last counts as it where max is endless */
    uint32_t *place;          /* [n * lengths] */
    bool *good;               /* an end can be reached */
    arm *arms;
    uint32_t n_arms, *first; /* [n] */
} product;

static uint32_t through(g_builder *b, const regex *r, product *p, uint32_t d, uint32_t to, uint32_t next)
{
    if (p->lengths == 1) return one_character(b, r, d, to, next);
    uint32_t i = p->first[d];
    while (i != G_INF && p->arms[i].to != to) i = p->arms[i].more;
    if (i == G_INF && b->status == AFF_OK) {
        const uint32_t rule = g_rule_new(b), start = one_character(b, r, d, to, G_RET);
        if (b->status == AFF_OK) b->status = aff__realloc(&p->arms, p->n_arms + 1, sizeof *p->arms, "pattern", b->err);
        if (b->status != AFF_OK) return G_FAIL;
        b->g->rule[rule].start = start;
        i = p->n_arms++;
        p->arms[i] = (arm){d, to, rule, p->first[d]};
        p->first[d] = i;
    }
    return b->status == AFF_OK ? g_call(b, p->arms[i].rule, next) : G_FAIL;
}

static uint32_t longer(const product *p, uint32_t c) { return c + 1 < p->lengths ? c + 1 : p->max == G_INF ? c : G_INF; }

static void mark_good(regex *r, const regex_request *q, product *p)
{
    uint64_t work = 0;
    for (bool changed = true; changed && !r->why;) {
        changed = false;
        work += (uint64_t)p->lengths * p->n * r->n_atom;
        if (work > 10 * MOST_REGEX_WORK) r->why = "too complex";
        for (uint32_t c = p->lengths; c-- > 0;)
            for (uint32_t d = r->n_dfa; d-- > 0;) {
                bool *good = &p->good[(size_t)c * p->n + d];
                const uint32_t c2 = longer(p, c);
                if (*good) continue;
                *good = r->final[d] && c >= q->min;
                for (uint32_t a = 0; a < r->n_atom && !*good && c2 != G_INF; a++) {
                    const uint32_t to = r->edge[(size_t)d * r->n_atom + a];
                    *good = to != G_INF && p->good[(size_t)c2 * p->n + to];
                }
                changed |= *good;
            }
    }
}

static void write_state(g_builder *b, const regex *r, const regex_request *q, product *p, uint32_t d, uint32_t c, uint32_t next)
{
    bool seen[MOST_DFA] = {false};
    const uint32_t c2 = longer(p, c);
    uint32_t at = r->final[d] && c >= q->min ? next : G_FAIL;
    for (uint32_t a = 0; a < r->n_atom && c2 != G_INF; a++) {
        const uint32_t to = r->edge[(size_t)d * r->n_atom + a];
        if (to == G_INF || seen[to] || !p->good[(size_t)c2 * p->n + to]) continue;
        seen[to] = true;
        at = g_or(b, at, through(b, r, p, d, to, p->place[(size_t)c2 * p->n + to]));
    }
    g_define(b, p->place[(size_t)c * p->n + d], at);
}

static uint32_t write_all(g_builder *b, regex *r, const regex_request *q, uint32_t next)
{
    const uint64_t lengths = q->max != G_INF ? (uint64_t)q->max + 1 : (uint64_t)q->min + 1;
    product p = {.n = r->n_dfa, .max = q->max};
    uint32_t at = G_FAIL;
    if (lengths * r->n_dfa > MOST_PRODUCT) {
        r->why = "too complex together with the length";
        return G_FAIL;
    }
    p.lengths = (uint32_t)lengths;
    b->status = aff__calloc(&p.place, lengths * p.n, sizeof *p.place, "pattern", b->err);
    if (b->status == AFF_OK) b->status = aff__calloc(&p.good, lengths * p.n, sizeof *p.good, "pattern", b->err);
    if (b->status == AFF_OK) b->status = aff__calloc(&p.first, p.n, sizeof *p.first, "pattern", b->err);
    if (b->status == AFF_OK) {
        memset(p.first, 0xFF, p.n * sizeof *p.first);
        mark_good(r, q, &p);
        for (uint32_t i = 0; i < p.n * p.lengths; i++)
            if (p.good[i]) p.place[i] = g_hub(b);
        for (uint32_t c = 0; c < p.lengths; c++)
            for (uint32_t d = 0; d < p.n && b->status == AFF_OK; d++)
                if (p.good[(size_t)c * p.n + d]) write_state(b, r, q, &p, d, c, next);
        if (p.good[0]) at = p.place[0];
    }
    free(p.place);
    free(p.good);
    free(p.arms);
    free(p.first);
    return at;
}

uint32_t regex_compile(g_builder *b, const regex_request *q, uint32_t next, const char **why)
{
    regex *r = NULL;
    uint32_t at = G_FAIL;
    *why = NULL;
    if (b->status != AFF_OK) return G_FAIL;
    if (strlen(q->pattern) > MOST_PATTERN) {
        *why = "longer than 2,000 bytes";
        return G_FAIL;
    }
    b->status = aff__calloc(&r, 1, sizeof *r, "pattern", b->err);
    if (b->status != AFF_OK) return G_FAIL;
    r->raw = q->raw;
    const piece p = whole(r, q->pattern);
    if (!r->why) b->status = determine(r, p, b->err);
    if (!r->why && b->status == AFF_OK) at = write_all(b, r, q, next);
    *why = r->why;
    free(r->sets);
    free(r->edge);
    free(r->final);
    free(r);
    return at;
}

/* ---- formats ---- */

#define MONTH_DAY "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
#define LEAP "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[13579][26]|[2468]0)00)-02-29"
#define DATE "(([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(" MONTH_DAY ")|" LEAP ")"
#define TIME "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
#define HOST LABEL "(\\." LABEL "){0,3}"
#define BYTE "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define H16 "[0-9a-fA-F]{1,4}"

const char *regex_format(const char *format)
{
    static const struct {
        const char *name, *pattern;
    } formats[] = {{"date", "^" DATE "$"},
                   {"time", "^" TIME "$"},
                   {"date-time", "^" DATE "T" TIME "$"},
                   {"duration", "^P([0-9]{1,4}Y([0-9]{1,2}M([0-9]{1,2}D)?)?|[0-9]{1,2}M([0-9]{1,2}D)?|[0-9]{1,4}D|[0-9]{1,3}W|([0-9]{1,3}D)?T([0-9]{1,3}H|[0-9]{1,3}M|[0-9]{1,3}S))$"},
                   {"uuid", "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"},
                   {"email", "^[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@" HOST "$"},
                   {"hostname", "^" HOST "$"},
                   {"ipv4", "^" BYTE "(\\." BYTE "){3}$"},
                   {"ipv6", "^(" H16 "(:" H16 "){7}|::(" H16 "(:" H16 "){0,5})?|" H16 "(:" H16 "){0,4}::" H16 ")$"},
                   {"uri", "^[A-Za-z][A-Za-z0-9+.-]*://" HOST "(:[1-9][0-9]{0,3})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(\\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?$"},
                   {"int32", ""},
                   {"int64", ""},
                   {"uint32", ""},
                   {"uint64", ""},
                   {"float", ""},
                   {"double", ""},
                   {"decimal", ""},
                   {"password", ""},
                   {"byte", ""},
                   {"binary", ""},
                   {"string", ""},
                   {"regex", NULL}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, format) == 0) return formats[i].pattern;
    return NULL;
}
