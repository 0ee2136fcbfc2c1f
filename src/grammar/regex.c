/* regex.c - patterns made deterministic, combined with the length, and written as instructions. Deterministic
 * beforehand, so that a pattern that explodes is refused with the request. */
#include "grammar/regex.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
            const int n =
                hit ? snprintf(text, sizeof text, "\\%c", *hit) : snprintf(text, sizeof text, "\\u%04x", (unsigned)lo);
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
        b->g->rule[rule] = start;
        i = p->n_arms++;
        p->arms[i] = (arm){d, to, rule, p->first[d]};
        p->first[d] = i;
    }
    return b->status == AFF_OK ? g_call(b, p->arms[i].rule, next) : G_FAIL;
}

static uint32_t longer(const product *p, uint32_t c)
{
    return c + 1 < p->lengths ? c + 1 : p->max == G_INF ? c : G_INF;
}

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

static void write_state(g_builder *b, const regex *r, const regex_request *q, product *p, uint32_t d, uint32_t c,
                        uint32_t next)
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

/* Lengths in a row that can go on and end in the same states: while a text stays among them it does not matter how long
 * it is. */
static void find_alike(g_builder *b, const regex_request *q, const product *p)
{
    const size_t row = p->n * sizeof *p->good;
    for (uint32_t from = 0, to; from < p->lengths; from = to) {
        for (to = from + 1; to < p->lengths && (to >= q->min) == (from >= q->min); to++)
            if (memcmp(p->good + (size_t)from * p->n, p->good + (size_t)to * p->n, row) != 0) break;
        if (to - from >= LEAST_ALIKE) g_alike_run(b, p->place + (size_t)from * p->n, to - from, p->n);
    }
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
        find_alike(b, q, &p);
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
    const piece p = regex_parse(r, q->pattern);
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

#define MONTH_DAY                                                                                                      \
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
#define LEAP  "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[13579][26]|[2468]0)00)-02-29"
#define DATE  "(([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(" MONTH_DAY ")|" LEAP ")"
#define TIME  "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
#define HOST  LABEL "(\\." LABEL "){0,3}"
#define BYTE  "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define H16   "[0-9a-fA-F]{1,4}"

const char *regex_format(const char *format)
{
    static const struct {
        const char *name, *pattern;
    } formats[] = {{"date", "^" DATE "$"},
                   {"time", "^" TIME "$"},
                   {"date-time", "^" DATE "T" TIME "$"},
                   {"duration", "^P([0-9]{1,4}Y([0-9]{1,2}M([0-9]{1,2}D)?)?|[0-9]{1,2}M([0-9]{1,2}D)?|[0-9]{1,4}D|[0-9]"
                                "{1,3}W|([0-9]{1,3}D)?T([0-9]{1,3}H|[0-9]{1,3}M|[0-9]{1,3}S))$"},
                   {"uuid", "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"},
                   {"email", "^[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@" HOST "$"},
                   {"hostname", "^" HOST "$"},
                   {"ipv4", "^" BYTE "(\\." BYTE "){3}$"},
                   {"ipv6", "^(" H16 "(:" H16 "){7}|::(" H16 "(:" H16 "){0,5})?|" H16 "(:" H16 "){0,4}::" H16 ")$"},
                   {"uri", "^[A-Za-z][A-Za-z0-9+.-]*://" HOST
                           "(:[1-9][0-9]{0,3})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(\\?[A-Za-z0-9._~!$&'()*+,;=:@/"
                           "?-]*)?(#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?$"},
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
