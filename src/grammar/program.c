#include "grammar/program.h"
#include "base/mem.h"
#include "base/rng.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_INSTRUCTIONS = 400000, MOST_RULES = 100000, MOST_SETS = 20000, SLOTS = 1 << 16, INDENT = 32 };
enum { MOST_WORK = 100000000 }; /* instructions looked at for costs */

uint32_t g_fail(g_builder *b, aff_status s, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    if (b->status != AFF_OK) return G_FAIL;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    b->status = aff__fail(b->err, s, "%s", line);
    return G_FAIL;
}

static uint32_t too_large(g_builder *b)
{
    return g_fail(b, AFF_E_INVALID, "the schema is too large: make it smaller or less deep");
}

uint32_t g_emit(g_builder *b, g_instr i)
{
    aff_grammar *g = b->g;
    if (b->status != AFF_OK) return G_FAIL;
    if (g->n == MOST_INSTRUCTIONS) return too_large(b);
    if (g->n == g->cap) {
        const uint32_t cap = g->cap ? g->cap * 2 : 1024;
        b->status = aff__realloc(&g->ins, cap, sizeof *g->ins, "grammar", b->err);
        if (b->status != AFF_OK) return G_FAIL;
        g->cap = cap;
    }
    g->ins[g->n] = i;
    return g->n++;
}

uint32_t g_set(g_builder *b, const uint64_t set[4], uint32_t next)
{
    aff_grammar *g = b->g;
    if (b->status != AFF_OK || next == G_FAIL || !(set[0] | set[1] | set[2] | set[3])) return G_FAIL;
    uint64_t h = 0;
    for (int i = 0; i < 4; i++) h = aff__mix64(h ^ set[i]) + 0x9E3779B97F4A7C15u;
    uint32_t at = (uint32_t)h & (SLOTS - 1);
    while (g->set_slot[at] && memcmp(g->set[g->set_slot[at] - 1], set, sizeof g->set[0]) != 0)
        at = (at + 1) & (SLOTS - 1);
    if (!g->set_slot[at]) {
        if (g->n_set == MOST_SETS) return too_large(b);
        if (g->n_set == g->cap_set) {
            const uint32_t cap = g->cap_set ? g->cap_set * 2 : 64;
            b->status = aff__realloc(&g->set, cap, sizeof *g->set, "grammar", b->err);
            if (b->status != AFF_OK) return G_FAIL;
            g->cap_set = cap;
        }
        memcpy(g->set[g->n_set], set, sizeof g->set[0]);
        g->set_slot[at] = ++g->n_set;
    }
    return g_emit(b, (g_instr){.op = OP_SET, .a = g->set_slot[at] - 1, .next = next});
}

uint32_t g_range(g_builder *b, uint8_t lo, uint8_t hi, uint32_t next)
{
    uint64_t set[4] = {0};
    for (int c = lo; c <= hi; c++) g_set_add(set, (uint8_t)c);
    return g_set(b, set, next);
}

uint32_t g_literal(g_builder *b, const char *s, size_t n, uint32_t next)
{
    while (n--) next = g_range(b, (uint8_t)s[n], (uint8_t)s[n], next);
    return next;
}

uint32_t g_text(g_builder *b, const char *s, uint32_t next)
{
    return g_literal(b, s, strlen(s), next);
}

uint32_t g_or(g_builder *b, uint32_t x, uint32_t y)
{
    if (x == G_FAIL) return y;
    return y == G_FAIL || x == y ? x : g_emit(b, (g_instr){.op = OP_SPLIT, .a = x, .next = y});
}

uint32_t g_call(g_builder *b, uint32_t rule, uint32_t next)
{
    return next == G_FAIL ? G_FAIL : g_emit(b, (g_instr){.op = OP_CALL, .a = rule, .next = next});
}

uint32_t g_loop(g_builder *b, uint32_t rule, uint32_t min, uint32_t max, uint32_t next)
{
    if (min > max || next == G_FAIL) return G_FAIL;
    return max ? g_emit(b, (g_instr){.op = OP_LOOP, .a = rule, .min = min, .max = max, .next = next}) : next;
}

uint32_t g_chars(g_builder *b, aff_text_kind kind, uint32_t min, uint32_t max, uint32_t side, uint32_t next)
{
    if (min > max || next == G_FAIL) return G_FAIL;
    return g_emit(b, (g_instr){.op = OP_TEXT, .kind = (uint8_t)kind, .a = side, .min = min, .max = max, .next = next});
}

uint32_t g_hub(g_builder *b)
{
    return g_emit(b, (g_instr){.op = OP_SPLIT, .a = G_FAIL, .next = G_FAIL});
}

void g_define(g_builder *b, uint32_t hub, uint32_t target)
{
    if (b->status == AFF_OK) b->g->ins[hub].next = target;
}

uint32_t g_rule_new(g_builder *b)
{
    aff_grammar *g = b->g;
    if (b->status != AFF_OK) return 0;
    if (g->n_rule == MOST_RULES) {
        too_large(b);
        return 0;
    }
    if (g->n_rule == g->cap_rule) {
        const uint32_t cap = g->cap_rule ? g->cap_rule * 2 : 64;
        b->status = aff__realloc(&g->rule, cap, sizeof *g->rule, "grammar", b->err);
        if (b->status != AFF_OK) return 0;
        g->cap_rule = cap;
    }
    g->rule[g->n_rule] = G_FAIL;
    return g->n_rule++;
}

void g_part(g_builder *b)
{
    aff_grammar *g = b->g;
    if (b->status == AFF_OK && g->n_part == g->cap_part) {
        const uint32_t cap = g->cap_part ? g->cap_part * 2 : 64;
        b->status = aff__realloc(&g->part, cap, sizeof *g->part, "grammar", b->err);
        if (b->status == AFF_OK) g->cap_part = cap;
    }
    if (b->status == AFF_OK) g->part[g->n_part++] = g->n;
}

void g_alike_run(g_builder *b, const uint32_t *place, uint32_t lengths, uint32_t n)
{
    aff_grammar *g = b->g;
    if (b->status == AFF_OK)
        b->status = aff__realloc(&g->alike, g->n_alike + (uint64_t)lengths * n, sizeof *g->alike, "pattern", b->err);
    if (b->status != AFF_OK) return;
    for (uint32_t c = 0; c < lengths; c++)
        for (uint32_t d = 0; d < n; d++)
            if (place[(size_t)c * n + d])
                g->alike[g->n_alike++] = (g_alike){place[(size_t)c * n + d], place[d], lengths - 1 - c, g->n_run};
    g->n_run++;
}

/* ---- common pieces ---- */

uint32_t g_digits(g_builder *b, uint32_t min, uint32_t max, uint32_t next)
{
    return g_loop(b, b->digit, min, max, next);
}
uint32_t g_ws(g_builder *b, uint32_t next)
{
    return g_or(b, next, g_call(b, b->ws, next));
}

uint32_t g_mark(g_builder *b, uint32_t next)
{
    return g_text(b, b->g->vocab->marked ? "\xFF" : AFF_VOCAB_MARKER, next);
}

uint32_t g_opening(g_builder *b, const char *tag, uint32_t next)
{
    return g_text(b, "<", g_mark(b, g_text(b, tag, next)));
}

uint32_t g_closing(g_builder *b, const char *tag, uint32_t next)
{
    return g_text(b, "</", g_mark(b, g_text(b, tag, g_text(b, ">", next))));
}

/* Bytes lo[0..n) to hi[0..n), the same length of UTF-8. */
static uint32_t utf8_span(g_builder *b, const uint8_t *lo, const uint8_t *hi, int n, uint32_t next)
{
    static const uint8_t least[4] = {0x80, 0x80, 0x80, 0x80}, most[4] = {0xBF, 0xBF, 0xBF, 0xBF};
    if (n == 1) return g_range(b, lo[0], hi[0], next);
    if (lo[0] == hi[0]) return g_range(b, lo[0], lo[0], utf8_span(b, lo + 1, hi + 1, n - 1, next));
    uint32_t at = g_range(b, lo[0], lo[0], utf8_span(b, lo + 1, most, n - 1, next));
    if (lo[0] + 1 < hi[0])
        at =
            g_or(b, at, g_range(b, (uint8_t)(lo[0] + 1), (uint8_t)(hi[0] - 1), utf8_span(b, least, most, n - 1, next)));
    return g_or(b, at, g_range(b, hi[0], hi[0], utf8_span(b, least, hi + 1, n - 1, next)));
}

static int utf8_put(uint32_t c, uint8_t *s)
{
    if (c < 0x800) {
        s[0] = (uint8_t)(0xC0 | c >> 6);
        s[1] = (uint8_t)(0x80 | (c & 63));
        return 2;
    }
    const int n = c < 0x10000 ? 3 : 4;
    s[0] = (uint8_t)(n == 3 ? 0xE0 | c >> 12 : 0xF0 | c >> 18);
    for (int i = 1; i < n; i++) s[i] = (uint8_t)(0x80 | (c >> 6 * (n - 1 - i) & 63));
    return n;
}

uint32_t g_utf8(g_builder *b, uint32_t lo, uint32_t hi, uint32_t next)
{
    static const uint32_t end[] = {0x7FF, 0xD7FF, 0xFFFF, 0x10FFFF}, begin[] = {0x80, 0x800, 0xE000, 0x10000};
    uint32_t at = G_FAIL;
    for (int i = 0; i < 4; i++) {
        const uint32_t from = lo > begin[i] ? lo : begin[i], to = hi < end[i] ? hi : end[i];
        uint8_t x[4], y[4];
        if (from > to) continue;
        const int n = utf8_put(from, x);
        utf8_put(to, y);
        at = g_or(b, at, utf8_span(b, x, y, n, next));
    }
    return at;
}

static uint32_t rule_at(g_builder *b, uint32_t start)
{
    const uint32_t r = g_rule_new(b);
    if (b->status == AFF_OK) b->g->rule[r] = start;
    return r;
}

static uint32_t hex(g_builder *b, const char *digits, uint32_t next)
{
    uint64_t set[4] = {0};
    for (; *digits; digits++) g_set_add(set, (uint8_t)*digits);
    return g_set(b, set, next);
}

#define HEX "0123456789abcdefABCDEF"
/* What may follow a backslash in a JSON string; NUL and surrogates on their own may not. */
static uint32_t escape(g_builder *b)
{
    const uint32_t h1 = hex(b, HEX, G_RET), h2 = hex(b, HEX, h1), h3 = hex(b, HEX, h2);
    const uint32_t low = g_text(b, "\\u", hex(b, "dD", hex(b, "cdefCDEF", h2)));
    uint32_t four = hex(b, "123456789abcefABCEF", h3);
    four =
        g_or(b, four, hex(b, "dD", g_or(b, hex(b, "01234567", h2), hex(b, "89abAB", hex(b, HEX, hex(b, HEX, low))))));
    const char *nonzero = "123456789abcdefABCDEF";
    const uint32_t zeros =
        g_or(b, hex(b, nonzero, h2), hex(b, "0", g_or(b, hex(b, nonzero, h1), hex(b, "0", hex(b, nonzero, G_RET)))));
    four = g_or(b, four, hex(b, "0", zeros));
    return g_or(b, hex(b, "\"\\/bfnrt", G_RET), hex(b, "u", four));
}

static void fill_text(g_builder *b)
{
    const uint32_t c1 = g_range(b, 0x80, 0xBF, G_RET), c2 = g_range(b, 0x80, 0xBF, c1), c3 = g_range(b, 0x80, 0xBF, c2);
    const uint32_t e0 = g_range(b, 0xA0, 0xBF, c1), ed = g_range(b, 0x80, 0x9F, c1), f0 = g_range(b, 0x90, 0xBF, c2),
                   f4 = g_range(b, 0x80, 0x8F, c2), esc = escape(b);
    for (int k = 0; k < AFF_TEXT_KINDS && b->status == AFF_OK; k++)
        for (unsigned c = 0; c < 256; c++) {
            uint32_t to = G_TEXT_STOP;
            if (c < 0x80 && aff__text_plain((aff_text_kind)k, (uint8_t)c)) to = G_TEXT_SAME;
            if (c == '\\' && k == AFF_TEXT_JSON) to = esc;
            if (c >= 0xC2 && c <= 0xDF) to = c1;
            if (c >= 0xE0 && c <= 0xEF) to = c == 0xE0 ? e0 : c == 0xED ? ed : c2;
            if (c >= 0xF0 && c <= 0xF4) to = c == 0xF0 ? f0 : c == 0xF4 ? f4 : c3;
            b->g->text[k][c] = to;
        }
}

/* The text before may have ended in '<': another '<', a '/' or any character but the marker's bar follows, or the end.
 */
uint32_t g_raw_text(g_builder *b, uint32_t min, uint32_t max, uint32_t next)
{
    const bool counted = min > 0 || max != G_INF;
    uint64_t other[4] = {0}, slash[4] = {0}, lt[4] = {0};
    for (int c = 0; c < 0x80; c++)
        if (aff__text_plain(AFF_TEXT_RAW, (uint8_t)c) && c != '/') g_set_add(other, (uint8_t)c);
    g_set_add(slash, '/');
    g_set_add(lt, '<');
    const uint32_t side = g_hub(b), back = g_hub(b), after = g_hub(b), after_slash = g_hub(b);
    const uint32_t end = counted ? g_emit(b, (g_instr){.op = OP_LEAST, .min = min, .next = next}) : next;
#define ONE(place) (counted ? g_emit(b, (g_instr){.op = OP_TICK, .max = max, .next = (place)}) : (place))
    uint32_t others = g_set(b, other, back);
    others = g_or(b, others, g_utf8(b, 0x80, 0xFF5B, back));
    others = g_or(b, others, g_utf8(b, 0xFF5D, 0x10FFFF, back));
    const uint32_t again = g_set(b, lt, after);
    g_define(b, side, ONE(again));
    others = g_or(b, again, others);
    g_define(b, after_slash, g_or(b, end, ONE(g_or(b, others, g_set(b, slash, back)))));
    g_define(b, after, g_or(b, end, ONE(g_or(b, others, g_set(b, slash, after_slash)))));
#undef ONE
    const uint32_t at = g_chars(b, AFF_TEXT_RAW, min, max, side, next);
    g_define(b, back, at);
    return at;
}

aff_status g_begin(g_builder *b, const aff_vocab *v, aff_error *err)
{
    *b = (g_builder){.err = err};
    AFF_TRY(aff__calloc(&b->g, 1, sizeof *b->g, "grammar", err));
    b->g->vocab = v;
    b->status = aff__calloc(&b->g->set_slot, SLOTS, sizeof *b->g->set_slot, "grammar", err);
    g_emit(b, (g_instr){.op = OP_RET});
    g_emit(b, (g_instr){.op = OP_ACCEPT});
    g_emit(b, (g_instr){.op = OP_OPEN});
    g_emit(b, (g_instr){.op = OP_SPLIT, .a = G_FAIL, .next = G_FAIL});
    b->digit = rule_at(b, g_range(b, '0', '9', G_RET));
    uint64_t blank[4] = {0};
    g_set_add(blank, ' ');
    g_set_add(blank, '\t');
    const uint32_t indent = rule_at(b, g_set(b, blank, G_RET));
    b->ws = rule_at(b, g_or(b, g_text(b, " ", G_RET), g_text(b, "\n", g_loop(b, indent, 0, INDENT, G_RET))));
    fill_text(b);
    return b->status;
}

void aff__grammar_free(aff_grammar *g)
{
    if (!g) return;
    free(g->ins);
    free(g->set);
    free(g->set_slot);
    free(g->rule);
    free(g->part);
    free(g->cost);
    free(g->height);
    free(g->alike);
    free(g->spread);
    free(g);
}

/* ---- costs ---- */

static uint32_t times(uint32_t n, uint32_t cost)
{
    return cost == G_INF ? n ? G_INF : 0 : (uint64_t)n * cost >= G_INF ? G_INF : n * cost;
}

uint32_t g_cost(const aff_grammar *g, uint32_t pc, uint32_t count)
{
    const g_instr *i = &g->ins[pc];
    const uint32_t missing = i->min > count ? i->min - count : 0;
    if (i->op == OP_LOOP) return g_sum(times(missing, g->cost[g->rule[i->a]]), g->cost[i->next]);
    if (i->op == OP_TEXT || i->op == OP_LEAST) return g_sum(missing, g->cost[i->next]);
    return g->cost[pc];
}

static uint32_t height_of(const aff_grammar *g, const g_instr *i)
{
    const uint32_t next = g->height[i->next];
    uint32_t h = 0;
    switch (i->op) {
    case OP_RET:
    case OP_ACCEPT:
    case OP_OPEN:
        return 0;
    case OP_SPLIT:
        return g->height[i->a] < next ? g->height[i->a] : next;
    case OP_CALL:
        h = g_sum(1, g->height[g->rule[i->a]]);
        break;
    case OP_LOOP:
        h = i->min ? g_sum(1, g->height[g->rule[i->a]]) : 0;
        break;
    case OP_TEXT:
        h = i->min ? 1 : 0;
        break;
    default:
        break;
    }
    return h > next ? h : next;
}

/* Bytes of a set if it has only one, else -1. */
static int only_byte(const uint64_t set[4])
{
    int found = -1;
    for (int w = 0; w < 4; w++) {
        if (!set[w]) continue;
        if (found >= 0 || (set[w] & (set[w] - 1))) return -1;
        found = w * 64 + __builtin_ctzll(set[w]);
    }
    return found;
}

/* Runs of single bytes cost the tokens that spell them: end[pc] is where the run ends, run[pc] how many that takes. */
static void spell_runs(const aff_grammar *g, uint32_t *run, uint32_t *end)
{
    const aff_vocab *v = g->vocab;
    for (uint32_t pc = 0; pc < g->n; pc++) {
        end[pc] = pc;
        if (g->ins[pc].op != OP_SET) continue;
        const int c = only_byte(g->set[g->ins[pc].a]);
        const uint32_t next = g->ins[pc].next;
        if (c < 0 || next >= pc) continue;
        end[pc] = end[next];
        run[pc] = 1 + run[next];
        uint32_t node = v->first[c], at = next;
        if (node == v->all.n) continue;
        for (uint32_t last = v->all.node[node].skip; at != end[pc];) {
            const int want = only_byte(g->set[g->ins[at].a]);
            uint32_t child = node + 1;
            while (child < last && v->all.node[child].byte != want) child = v->all.node[child].skip;
            if (child >= last || v->all.node[child].depth != v->all.node[node].depth + 1) break;
            node = child;
            last = v->all.node[child].skip;
            at = g->ins[at].next;
            if (v->all.node[node].token >= 0 && 1 + run[at] < run[pc]) run[pc] = 1 + run[at];
        }
    }
}

static uint32_t new_cost(const aff_grammar *g, uint32_t pc, const uint32_t *run, const uint32_t *end)
{
    const g_instr *i = &g->ins[pc];
    switch (i->op) {
    case OP_RET:
    case OP_OPEN:
        return 0;
    case OP_ACCEPT:
        return 1;
    case OP_SET:
        return end[pc] == pc ? g_sum(1, g->cost[i->next]) : g_sum(run[pc], g->cost[end[pc]]);
    case OP_SPLIT:
        return g->cost[i->a] < g->cost[i->next] ? g->cost[i->a] : g->cost[i->next];
    case OP_CALL:
        return g_sum(g->cost[g->rule[i->a]], g->cost[i->next]);
    case OP_TICK:
        return g->cost[i->next];
    default:
        return g_cost(g, pc, 0);
    }
}

static aff_status find_costs(aff_grammar *g, const uint32_t *run, const uint32_t *end, aff_error *err)
{
    uint64_t work = 0;
    memset(g->cost, 0xFF, g->n * sizeof *g->cost);
    memset(g->height, 0xFF, g->n * sizeof *g->height);
    for (bool changed = true; changed;) {
        changed = false;
        work += g->n;
        if (work > MOST_WORK) return aff__fail(err, AFF_E_INVALID, "the schema is too complex: make it less deep");
        for (uint32_t p = g->n_part + 1, end_of = g->n; p-- > 0;) {
            const uint32_t begin = p ? g->part[p - 1] : 0;
            for (uint32_t pc = begin; pc < end_of; pc++) {
                if (pc == G_FAIL) continue;
                const uint32_t cost = new_cost(g, pc, run, end), height = height_of(g, &g->ins[pc]);
                changed |= cost != g->cost[pc] || height != g->height[pc];
                g->cost[pc] = cost;
                g->height[pc] = height;
            }
            end_of = begin;
        }
    }
    return AFF_OK;
}

/* Bytes that no set and no running text tells apart are one class. */
static void find_classes(aff_grammar *g)
{
    uint32_t text[AFF_TEXT_KINDS][256];
    g->n_class = 1;
    memset(g->class_of, 0, sizeof g->class_of);
    for (uint32_t s = 0; s < g->n_set + AFF_TEXT_KINDS * 256 && g->n_class < 256; s++) {
        int other[256];
        memset(other, 0xFF, sizeof other);
        /* The first byte of a class keeps its number, those that differ from it get a new one. */
        bool first[256], seen[256] = {false};
        for (int c = 0; c < 256; c++) {
            const int k = g->class_of[c];
            bool in;
            if (s < g->n_set)
                in = g_set_has(g->set[s], (uint8_t)c);
            else
                in = g->text[(s - g->n_set) / 256][c] == g->text[(s - g->n_set) / 256][(s - g->n_set) % 256];
            if (!seen[k]) {
                seen[k] = true;
                first[k] = in;
            } else if (in != first[k]) {
                if (other[k] < 0) other[k] = g->n_class++;
                g->class_of[c] = (uint8_t)other[k];
            }
        }
    }
    memcpy(text, g->text, sizeof text);
    for (uint32_t s = 0; s < g->n_set; s++) {
        uint64_t by_class[4] = {0};
        for (int c = 0; c < 256; c++)
            if (g_set_has(g->set[s], (uint8_t)c)) g_set_add(by_class, g->class_of[c]);
        memcpy(g->set[s], by_class, sizeof by_class);
    }
    for (int k = 0; k < AFF_TEXT_KINDS; k++)
        for (int c = 0; c < 256; c++) g->text[k][g->class_of[c]] = text[k][c];
}

static aff_status find_spreads(aff_grammar *g, aff_error *err)
{
    if (!g->n_run) return AFF_OK;
    AFF_TRY(aff__calloc(&g->spread, g->n_run, sizeof *g->spread, "grammar", err));
    for (uint32_t i = 0; i < g->n_alike; i++) {
        const g_alike *x = &g->alike[i];
        const uint32_t a = g->cost[x->pc], c = g->cost[x->to], by = a > c ? a - c : c - a;
        if (by > g->spread[x->run]) g->spread[x->run] = by;
    }
    return AFF_OK;
}

aff_status g_finish(g_builder *b, uint32_t root)
{
    aff_grammar *g = b->g;
    uint32_t *run = NULL, *end = NULL;
    if (b->status != AFF_OK) return b->status;
    g->root = root;
    aff_status s = aff__calloc(&run, g->n, sizeof *run, "grammar", b->err);
    if (s == AFF_OK) s = aff__calloc(&end, g->n, sizeof *end, "grammar", b->err);
    if (s == AFF_OK) s = aff__calloc(&g->cost, g->n, sizeof *g->cost, "grammar", b->err);
    if (s == AFF_OK) s = aff__calloc(&g->height, g->n, sizeof *g->height, "grammar", b->err);
    if (s == AFF_OK) {
        spell_runs(g, run, end);
        s = find_costs(g, run, end, b->err);
    }
    if (s == AFF_OK) s = find_spreads(g, b->err);
    free(run);
    free(end);
    if (s != AFF_OK) return s;
    find_classes(g);
    free(g->set_slot);
    g->set_slot = NULL;
    if (g->cost[root] == G_INF) return aff__fail(b->err, AFF_E_INVALID, "no value fits the schema");
    if (g->height[root] + 1 >= G_DEPTH)
        return aff__fail(b->err, AFF_E_INVALID, "no value fits the schema without being nested too deep");
    return AFF_OK;
}
