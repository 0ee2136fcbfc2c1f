/* matcher.c - the automaton of a grammar, made deterministic as far as texts go.
 *
 * A node is a place in the program, the count of its frame and the frame to return to; nodes are unique, so frames form
 * a tree that all stacks share. A state is a set of nodes that read a byte (or may end), unique too: what a state does
 * with a class of bytes is found out once. The mask of a state is a walk over the vocabulary's trie; within running
 * text the tokens that are nothing but characters are known beforehand, so that only the others are walked. */
#include "grammar/program.h"
#include "base/mem.h"
#include "base/rng.h"
#include <stdlib.h>
#include <string.h>

enum {
    MOST_NODES = 1 << 22, /* within one pass */
    MOST_STATES = 1 << 17,
    MOST_CELLS = 1 << 24,   /* transitions */
    MOST_MEMBERS = 1 << 22, /* of sets */
    KEEP_STATES = 1 << 14,  /* and more are forgotten after a pass */
    KEEP_CELLS = 1 << 20,
    MASKS = 48, /* kept */
    UNKNOWN = 0xFFFFFFFF
};

typedef struct node {
    uint32_t pc, count, parent, need;
    uint32_t depth;
} node;

typedef struct state {
    uint32_t first, n;  /* nodes in `member` */
    uint32_t need, row; /* row: in `cell`, UNKNOWN: none yet */
    bool complete;
    uint8_t free; /* G_FREE, G_LOOSE; 0: none of it is free text */
} state;

typedef struct table { /* open addressing; slots hold index + 1 */
    uint32_t *slot, mask, n;
} table;

typedef struct mask {
    aff_match state;
    uint32_t most; /* need of the tokens in it, the most */
    uint64_t used, *words;
} mask;

struct aff_matcher {
    const aff_grammar *g;
    node *node;
    uint32_t n_node, cap_node;
    state *state; /* 0: none */
    uint32_t n_state, cap_state;
    uint32_t *member, n_member, cap_member;
    uint32_t *cell, n_cell, cap_cell;
    table nodes, states;
    uint32_t *set, n_set, cap_set; /* nodes of a state in the making */
    node *todo;                    /* of the closure */
    uint32_t n_todo, cap_todo;
    uint32_t *path; /* [longest + 1] states of a walk */
    mask mask[MASKS];
    uint64_t *work; /* [words] */
    uint64_t clock;
    aff_match start;
    aff_status status; /* of the first failure */
    aff_error err;
};

static void fail(aff_matcher *m, aff_status s)
{
    m->status = m->status == AFF_OK ? s : m->status;
}

static bool room(aff_matcher *m, void *array, uint32_t n, uint32_t more, uint32_t *cap, size_t size, uint32_t most)
{
    if (m->status != AFF_OK) return false;
    if (n + more <= *cap) return true;
    if (n + more > most) {
        fail(m, aff__fail(&m->err, AFF_E_LIMIT,
                          "the form of the answer is too complex for this text: make its schema simpler"));
        return false;
    }
    uint32_t c = *cap ? *cap * 2 : 1024;
    if (c < n + more) c = n + more;
    fail(m, aff__realloc(array, c, size, "grammar states", &m->err));
    if (m->status == AFF_OK) *cap = c;
    return m->status == AFF_OK;
}

static bool table_grow(aff_matcher *m, table *t)
{
    const uint32_t n = t->slot ? (t->mask + 1) * 2 : 1024;
    free(t->slot);
    t->slot = NULL;
    fail(m, aff__calloc(&t->slot, n, sizeof *t->slot, "grammar states", &m->err));
    t->mask = t->slot ? n - 1 : 0;
    return t->slot != NULL;
}

/* ---- nodes ---- */

static uint32_t hash_node(uint32_t pc, uint32_t count, uint32_t parent)
{
    return (uint32_t)aff__mix64(aff__mix64((uint64_t)pc << 32 | count) ^ parent);
}

static void put_node(aff_matcher *m, uint32_t i)
{
    uint32_t at = hash_node(m->node[i].pc, m->node[i].count, m->node[i].parent) & m->nodes.mask;
    while (m->nodes.slot[at]) at = (at + 1) & m->nodes.mask;
    m->nodes.slot[at] = i + 1;
}

/* Node 0 is the bottom, below every stack. */
static uint32_t node_of(aff_matcher *m, uint32_t pc, uint32_t count, uint32_t parent)
{
    if (m->status != AFF_OK) return 0;
    if (m->n_node * 2 >= m->nodes.mask) {
        if (!table_grow(m, &m->nodes)) return 0;
        for (uint32_t i = 1; i < m->n_node; i++) put_node(m, i);
    }
    for (uint32_t at = hash_node(pc, count, parent) & m->nodes.mask; m->nodes.slot[at]; at = (at + 1) & m->nodes.mask) {
        const uint32_t i = m->nodes.slot[at] - 1;
        if (m->node[i].pc == pc && m->node[i].count == count && m->node[i].parent == parent) return i;
    }
    if (!room(m, &m->node, m->n_node, 1, &m->cap_node, sizeof *m->node, MOST_NODES)) return 0;
    const node *p = &m->node[parent];
    m->node[m->n_node] = (node){pc, count, parent, g_sum(g_cost(m->g, pc, count), parent ? p->need : 0), p->depth + 1};
    put_node(m, m->n_node);
    return m->n_node++;
}

/* ---- closures ---- */

static void push(aff_matcher *m, uint32_t pc, uint32_t count, uint32_t parent)
{
    if (m->g->cost[pc] == G_INF || m->node[parent].depth + m->g->height[pc] >= G_DEPTH) return;
    if (room(m, &m->todo, m->n_todo, 1, &m->cap_todo, sizeof *m->todo, MOST_NODES))
        m->todo[m->n_todo++] = (node){.pc = pc, .count = count, .parent = parent};
}

/* The frame that a call returns to; a call at the end of a rule returns where that does. */
static uint32_t frame(aff_matcher *m, uint32_t pc, uint32_t count, uint32_t parent)
{
    return pc == G_RET ? parent : node_of(m, pc, count, parent);
}

static void add(aff_matcher *m, node x)
{
    const uint32_t id = node_of(m, x.pc, x.count, x.parent);
    for (uint32_t i = m->n_set; i-- > 0;)
        if (m->set[i] == id) return;
    if (room(m, &m->set, m->n_set, 1, &m->cap_set, sizeof *m->set, 1 << 14)) m->set[m->n_set++] = id;
}

static void expand(aff_matcher *m, node x)
{
    const g_instr *i = &m->g->ins[x.pc];
    switch ((g_op)i->op) {
    case OP_RET:
        push(m, m->node[x.parent].pc, m->node[x.parent].count, m->node[x.parent].parent);
        return;
    case OP_SPLIT:
        push(m, i->next, x.count, x.parent);
        push(m, i->a, x.count, x.parent);
        return;
    case OP_CALL:
        push(m, m->g->rule[i->a], 0, frame(m, i->next, x.count, x.parent));
        return;
    case OP_LOOP:
        if (x.count >= i->min) push(m, i->next, 0, x.parent);
        if (x.count < i->max)
            push(m, m->g->rule[i->a], 0,
                 node_of(m, x.pc, i->max == G_INF && x.count >= i->min ? x.count : x.count + 1, x.parent));
        return;
    case OP_TEXT:
        if (x.count >= i->min) push(m, i->next, 0, x.parent);
        if (i->a != G_FAIL) push(m, i->a, x.count, x.parent);
        if (x.count < i->max) add(m, x);
        return;
    case OP_TICK:
        if (x.count < i->max) push(m, i->next, x.count + 1, x.parent);
        return;
    case OP_LEAST:
        if (x.count >= i->min) push(m, i->next, 0, x.parent);
        return;
    case OP_SET:
    case OP_ACCEPT:
    case OP_OPEN:
        add(m, x);
        return;
    }
}

static void close_over(aff_matcher *m, uint32_t pc, uint32_t count, uint32_t parent)
{
    push(m, pc, count, parent);
    while (m->n_todo && m->status == AFF_OK) expand(m, m->todo[--m->n_todo]);
    m->n_todo = 0;
}

/* ---- states ---- */

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t hash_set(const uint32_t *s, uint32_t n)
{
    uint64_t h = n;
    for (uint32_t i = 0; i < n; i++) h = aff__mix64(h ^ s[i]) + 0x9E3779B97F4A7C15u;
    return (uint32_t)h;
}

static void put_state(aff_matcher *m, uint32_t i)
{
    uint32_t at = hash_set(m->member + m->state[i].first, m->state[i].n) & m->states.mask;
    while (m->states.slot[at]) at = (at + 1) & m->states.mask;
    m->states.slot[at] = i + 1;
}

static void describe(aff_matcher *m, state *s)
{
    s->need = G_INF;
    for (uint32_t i = 0; i < s->n; i++) {
        const node *x = &m->node[m->member[s->first + i]];
        if (x->need < s->need) s->need = x->need;
        s->complete |= x->pc == G_ACCEPT || x->pc == G_OPEN;
        const g_instr *in = &m->g->ins[x->pc];
        if (in->op == OP_SET && in->kind > s->free) s->free = in->kind;
    }
}

/* The state of the nodes in m->set; 0 if there are none. */
static aff_match state_of(aff_matcher *m)
{
    if (m->status != AFF_OK || !m->n_set) return 0;
    if (m->n_set > 1) qsort(m->set, m->n_set, sizeof *m->set, by_number);
    if (m->n_state * 2 >= m->states.mask) {
        if (!table_grow(m, &m->states)) return 0;
        for (uint32_t i = 1; i < m->n_state; i++) put_state(m, i);
    }
    for (uint32_t at = hash_set(m->set, m->n_set) & m->states.mask; m->states.slot[at];
         at = (at + 1) & m->states.mask) {
        const state *s = &m->state[m->states.slot[at] - 1];
        if (s->n == m->n_set && memcmp(m->member + s->first, m->set, m->n_set * sizeof *m->set) == 0)
            return m->states.slot[at] - 1;
    }
    if (!room(m, &m->state, m->n_state, 1, &m->cap_state, sizeof *m->state, MOST_STATES) ||
        !room(m, &m->member, m->n_member, m->n_set, &m->cap_member, sizeof *m->member, MOST_MEMBERS))
        return 0;
    memcpy(m->member + m->n_member, m->set, m->n_set * sizeof *m->set);
    state *s = &m->state[m->n_state];
    *s = (state){.first = m->n_member, .n = m->n_set, .row = UNKNOWN};
    m->n_member += m->n_set;
    describe(m, s);
    put_state(m, m->n_state);
    return m->n_state++;
}

static void advance(aff_matcher *m, node x, int c)
{
    const g_instr *i = &m->g->ins[x.pc];
    if (i->op == OP_SET && g_set_has(m->g->set[i->a], (uint8_t)c)) close_over(m, i->next, x.count, x.parent);
    if (i->op != OP_TEXT) return;
    const uint32_t to = m->g->text[i->kind][c], count = i->max == G_INF && x.count >= i->min ? x.count : x.count + 1;
    if (to == G_TEXT_SAME)
        close_over(m, x.pc, count, x.parent);
    else if (to != G_TEXT_STOP)
        close_over(m, to, 0, node_of(m, x.pc, count, x.parent));
}

static aff_match new_step(aff_matcher *m, aff_match from, int c)
{
    m->n_set = 0;
    for (uint32_t k = 0; k < m->state[from].n; k++) advance(m, m->node[m->member[m->state[from].first + k]], c);
    const aff_match to = state_of(m);
    if (m->status != AFF_OK) return 0;
    if (m->state[from].row == UNKNOWN) {
        const uint32_t n = (uint32_t)m->g->n_class;
        if (!room(m, &m->cell, m->n_cell, n, &m->cap_cell, sizeof *m->cell, MOST_CELLS)) return 0;
        memset(m->cell + m->n_cell, 0xFF, n * sizeof *m->cell);
        m->state[from].row = m->n_cell;
        m->n_cell += n;
    }
    m->cell[m->state[from].row + (uint32_t)c] = to;
    return to;
}

static inline aff_match step(aff_matcher *m, aff_match from, uint8_t byte)
{
    const int c = m->g->class_of[byte];
    const uint32_t row = m->state[from].row;
    const aff_match to = row == UNKNOWN ? UNKNOWN : m->cell[row + (uint32_t)c];
    return to == UNKNOWN ? new_step(m, from, c) : to;
}

aff_match aff__matcher_step(aff_matcher *m, aff_match s, int32_t id)
{
    size_t n;
    const aff_vocab *v = m->g->vocab;
    if (id < 0 || id >= v->n || !s) return 0;
    if (id == v->eos) return m->state[s].complete ? s : 0;
    const uint8_t *b = aff__vocab_bytes(v, id, &n);
    if (!n || ((v->control[id >> 6] >> (id & 63) & 1) && !m->state[s].free)) return 0;
    for (size_t i = 0; i < n && s; i++) s = step(m, s, b[i]);
    return s;
}

aff_match aff__matcher_start(const aff_matcher *m)
{
    return m->start;
}
bool aff__matcher_complete(const aff_matcher *m, aff_match s)
{
    return m->state[s].complete;
}
uint32_t aff__matcher_need(const aff_matcher *m, aff_match s)
{
    return m->state[s].need;
}

/* ---- masks ---- */

typedef struct walk {
    uint32_t bound;       /* tokens after which more is needed are left out */
    uint32_t most, least; /* need after the tokens that are in; and after those that are not */
} walk;

static void take(aff_matcher *m, walk *w, aff_match to, int32_t id)
{
    const uint32_t need = m->state[to].need;
    if (need > w->bound) {
        if (need < w->least) w->least = need;
        return;
    }
    if (need > w->most) w->most = need;
    m->work[id >> 6] |= 1ull << (id & 63);
}

/* Tokens of nodes [i, end) that have more than `beyond` bytes. */
static void take_out(aff_matcher *m, const aff_trie *t, uint32_t i, uint32_t end, uint32_t beyond)
{
    for (; i < end; i++)
        if (t->node[i].token >= 0 && t->node[i].depth > beyond)
            m->work[t->node[i].token >> 6] &= ~(1ull << (t->node[i].token & 63));
}

/* The tokens that may follow; of those with up to `beyond` bytes (less than 255) m->work says it already. */
static void walk_trie(aff_matcher *m, const aff_trie *t, aff_match from, uint32_t beyond, walk *w)
{
    m->path[0] = from;
    for (uint32_t i = 0; i < t->n;) {
        const aff_trie_node *x = &t->node[i];
        if (x->reach <= beyond) {
            i = x->skip;
            continue;
        }
        const aff_match to = step(m, m->path[x->depth - 1], x->byte);
        if (!to) {
            if (m->status != AFF_OK) return;
            if (beyond) take_out(m, t, i, x->skip, beyond);
            i = x->skip;
            continue;
        }
        if (x->token >= 0 && x->depth > beyond) take(m, w, to, x->token);
        m->path[x->depth] = to;
        i++;
    }
}

static bool is_text(const aff_matcher *m, uint32_t id)
{
    return m->g->ins[m->node[id].pc].op == OP_TEXT;
}

/* Running text from node x: characters, and what is left of the vocabulary from the state of that node and of what may
 * follow. */
static void mask_text(aff_matcher *m, uint32_t id, walk *w)
{
    const node x = m->node[id];
    const g_instr *i = &m->g->ins[x.pc];
    const aff_vocab *v = m->g->vocab;
    const uint32_t left = i->max == G_INF ? G_INF : i->max - x.count;
    const int k = left < (uint32_t)v->most[i->kind] ? (int)left : v->most[i->kind];
    /* Characters bring the end no farther, and by no more than they are. */
    if (x.need <= w->bound) {
        for (int j = 0; j < v->words; j++) m->work[j] |= v->plain[i->kind][k][j];
        if (x.need > w->most) w->most = x.need;
    }
    m->n_set = 0;
    add(m, x);
    const aff_match alone = state_of(m);
    if (alone) walk_trie(m, x.need <= w->bound ? &v->rest[i->kind] : &v->all, alone, 0, w);
}

static void mask_state(aff_matcher *m, aff_match s, walk *w)
{
    const aff_vocab *v = m->g->vocab;
    uint32_t others = 0;
    memset(m->work, 0, (size_t)v->words * sizeof *m->work);
    if (m->state[s].complete) m->work[v->eos >> 6] |= 1ull << (v->eos & 63);
    if (m->state[s].free == G_LOOSE && !v->spelled && m->state[s].need <= w->bound && m->g->free_cost <= w->bound) {
        const bool eos = m->state[s].complete;
        memset(m->work, 0xFF, (size_t)v->words * sizeof *m->work);
        if (v->n & 63) m->work[v->words - 1] = (1ull << (v->n & 63)) - 1;
        for (int32_t id = 0; id < v->n; id++)
            if (v->offset[id] == v->offset[id + 1]) m->work[id >> 6] &= ~(1ull << (id & 63));
        if (!eos) m->work[v->eos >> 6] &= ~(1ull << (v->eos & 63));
        w->most = m->g->free_cost > m->state[s].need ? m->g->free_cost : m->state[s].need;
        return;
    }
    for (uint32_t k = 0; k < m->state[s].n && m->status == AFF_OK; k++) {
        const uint32_t id = m->member[m->state[s].first + k];
        if (is_text(m, id)) mask_text(m, id, w);
    }
    m->n_set = 0;
    for (uint32_t k = 0; k < m->state[s].n && m->status == AFF_OK; k++) {
        const uint32_t id = m->member[m->state[s].first + k];
        if (is_text(m, id)) continue;
        others++;
        add(m, m->node[id]);
    }
    const aff_match rest = others == m->state[s].n ? s : state_of(m);
    if (!rest) return;
    walk_trie(m, &v->all, rest, 0, w);
    for (int32_t id = 0; id < v->n && m->state[rest].free && m->status == AFF_OK; id++) {
        if (!(v->control[id >> 6] >> (id & 63) & 1)) continue;
        const aff_match to = aff__matcher_step(m, rest, id);
        if (to) take(m, w, to, id);
    }
}

static mask *oldest(aff_matcher *m)
{
    mask *found = &m->mask[0];
    for (int i = 1; i < MASKS; i++)
        if (m->mask[i].used < found->used) found = &m->mask[i];
    return found;
}

static mask *kept(aff_matcher *m, aff_match s)
{
    for (int i = 0; i < MASKS; i++)
        if (m->mask[i].state == s && m->mask[i].used) {
            m->mask[i].used = ++m->clock;
            return &m->mask[i];
        }
    return NULL;
}

/* Keeps m->work as the mask of s; NULL after a failure. */
static mask *keep_mask(aff_matcher *m, aff_match s, uint32_t most)
{
    mask *k = oldest(m);
    k->used = 0;
    if (m->status == AFF_OK && !k->words)
        fail(m, aff__calloc(&k->words, (uint64_t)m->g->vocab->words, sizeof *k->words, "token mask", &m->err));
    if (m->status != AFF_OK) return NULL;
    memcpy(k->words, m->work, (size_t)m->g->vocab->words * sizeof *m->work);
    k->state = s;
    k->most = most;
    k->used = ++m->clock;
    return k;
}

/* ---- masks of patterns with a length ----
 *
 * A pattern with a length is in a new state at every character, but as long as the length is far from its bounds these
 * states take the same tokens. So the mask of one of them serves for all, and only tokens that are longer than what is
 * left until the bounds matter are walked again. */

enum { LEAST_LEFT = 4 }; /* with less there is nothing to be saved */

static const g_alike *find_alike(const aff_grammar *g, uint32_t pc)
{
    uint32_t lo = 0, hi = g->n_alike;
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (g->alike[mid].pc < pc)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < g->n_alike && g->alike[lo].pc == pc ? &g->alike[lo] : NULL;
}

/* The node that stands for all that are alike; `id` itself if it is in no such pattern. */
static uint32_t alike_node(aff_matcher *m, uint32_t id, uint32_t *left, uint32_t *spread)
{
    node above[4]; /* a rule for one character, and one that it may call */
    uint32_t n = 0;
    for (uint32_t i = id; i && n < 4; i = m->node[i].parent) {
        const node x = m->node[i];
        const g_alike *a = find_alike(m->g, x.pc);
        if (!a) {
            above[n++] = x;
            continue;
        }
        if (a->left < *left) *left = a->left;
        if (m->g->spread[a->run] > *spread) *spread = m->g->spread[a->run];
        uint32_t to = node_of(m, a->to, x.count, x.parent);
        while (n--) to = node_of(m, above[n].pc, above[n].count, to);
        return to;
    }
    return id;
}

/* The mask of s by that of the state it is like, NULL: there is none such, or it would not help. */
static mask *mask_by_alike(aff_matcher *m, aff_match s)
{
    const aff_vocab *v = m->g->vocab;
    uint32_t left = G_INF, spread = 0;
    m->n_set = 0;
    for (uint32_t k = 0; k < m->state[s].n && m->status == AFF_OK; k++) {
        const uint32_t id = alike_node(m, m->member[m->state[s].first + k], &left, &spread);
        add(m, m->node[id]);
    }
    const aff_match like = left == G_INF || left < LEAST_LEFT ? s : state_of(m);
    if (!like || like == s || m->status != AFF_OK) return NULL;
    walk w = {.bound = G_INF - 1, .least = G_INF};
    const mask *k = kept(m, like);
    if (!k) {
        mask_state(m, like, &w);
        k = keep_mask(m, like, w.most);
        if (!k) return NULL;
    }
    w.most = g_sum(k->most, spread);
    memcpy(m->work, k->words, (size_t)v->words * sizeof *m->work);
    if (left < v->longest) walk_trie(m, &v->all, s, left < 254 ? left : 254, &w);
    return keep_mask(m, s, w.most);
}

aff_status aff__matcher_mask(aff_matcher *m, aff_match s, int64_t left, const uint64_t **words, aff_error *err)
{
    const uint32_t bound = left < 1 ? 0 : left - 1 >= G_INF ? G_INF - 1 : (uint32_t)(left - 1);
    *words = m->work;
    mask *k = kept(m, s);
    if (!k && m->g->n_alike) k = mask_by_alike(m, s);
    if (!k) {
        walk w = {.bound = G_INF - 1, .least = G_INF};
        mask_state(m, s, &w);
        k = keep_mask(m, s, w.most);
        if (!k) return aff__fail(err, m->status, "%s", m->err.msg);
    }
    *words = k->words;
    if (k->most <= bound) return AFF_OK;
    walk w = {.bound = bound, .least = G_INF};
    mask_state(m, s, &w);
    bool any = false;
    for (int i = 0; i < m->g->vocab->words; i++) any |= m->work[i] != 0;
    if (!any && w.least < G_INF) { /* it cannot be done: as near as it gets */
        w = (walk){.bound = w.least, .least = G_INF};
        mask_state(m, s, &w);
    }
    if (m->status != AFF_OK) return aff__fail(err, m->status, "%s", m->err.msg);
    *words = m->work;
    return AFF_OK;
}

/* ---- life ---- */

static void forget_masks(aff_matcher *m)
{
    for (int i = 0; i < MASKS; i++) m->mask[i].used = 0;
}

static void empty(aff_matcher *m)
{
    m->n_node = m->n_state = 1;
    m->n_member = m->n_cell = 0;
    if (m->nodes.slot) memset(m->nodes.slot, 0, ((size_t)m->nodes.mask + 1) * sizeof *m->nodes.slot);
    if (m->states.slot) memset(m->states.slot, 0, ((size_t)m->states.mask + 1) * sizeof *m->states.slot);
    forget_masks(m);
}

/* Node i of the old tables in the new ones. */
static uint32_t copy_node(aff_matcher *m, const node *old, uint32_t i)
{
    uint32_t chain[G_DEPTH + 2], n = 0, to = 0;
    for (; i && n < G_DEPTH + 2; i = old[i].parent) chain[n++] = i;
    while (n--) to = node_of(m, old[chain[n]].pc, old[chain[n]].count, to);
    return to;
}

aff_status aff__matcher_keep(aff_matcher *m, aff_match *s, aff_error *err)
{
    node *old = NULL;
    uint32_t *keep = NULL;
    const uint32_t n = m->state[*s].n;
    if (m->status != AFF_OK) return aff__fail(err, m->status, "%s", m->err.msg);
    if (m->n_state < KEEP_STATES && m->n_cell < KEEP_CELLS && m->n_member < KEEP_CELLS) return AFF_OK;
    aff_status st = aff__realloc(&old, m->n_node, sizeof *old, "grammar states", err);
    if (st == AFF_OK) st = aff__realloc(&keep, n, sizeof *keep, "grammar states", err);
    if (st == AFF_OK) {
        memcpy(old, m->node, m->n_node * sizeof *old);
        memcpy(keep, m->member + m->state[*s].first, n * sizeof *keep);
        empty(m);
        m->start = 0;
        m->n_set = 0;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t id = copy_node(m, old, keep[i]);
            if (room(m, &m->set, m->n_set, 1, &m->cap_set, sizeof *m->set, 1 << 14)) m->set[m->n_set++] = id;
        }
        *s = state_of(m);
        if (m->status != AFF_OK) st = aff__fail(err, m->status, "%s", m->err.msg);
    }
    free(old);
    free(keep);
    return st;
}

aff_status aff__matcher_create(aff_matcher **out, const aff_grammar *g, aff_error *err)
{
    aff_matcher *m = NULL;
    *out = NULL;
    AFF_TRY(aff__calloc(&m, 1, sizeof *m, "grammar states", err));
    m->g = g;
    fail(m, aff__calloc(&m->work, (uint64_t)g->vocab->words, sizeof *m->work, "token mask", &m->err));
    fail(m, aff__calloc(&m->path, g->vocab->longest + 2, sizeof *m->path, "grammar states", &m->err));
    if (room(m, &m->node, 0, 1, &m->cap_node, sizeof *m->node, MOST_NODES)) m->node[0] = (node){0};
    if (room(m, &m->state, 0, 1, &m->cap_state, sizeof *m->state, MOST_STATES)) m->state[0] = (state){.row = UNKNOWN};
    empty(m);
    close_over(m, g->root, 0, 0);
    m->start = state_of(m);
    if (m->status != AFF_OK) {
        const aff_status s = aff__fail(err, m->status, "%s", m->err.msg);
        aff__matcher_free(m);
        return s;
    }
    *out = m;
    return AFF_OK;
}

void aff__matcher_free(aff_matcher *m)
{
    if (!m) return;
    for (int i = 0; i < MASKS; i++) free(m->mask[i].words);
    free(m->node);
    free(m->state);
    free(m->member);
    free(m->cell);
    free(m->nodes.slot);
    free(m->states.slot);
    free(m->set);
    free(m->todo);
    free(m->path);
    free(m->work);
    free(m);
}
