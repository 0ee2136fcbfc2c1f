/* program.h - a grammar as instructions of a pushdown automaton over bytes, and the builder that writes them.
 *
 * Fragments are built from the end: a function gets the place to go on at (`next`) and returns the place to enter.
 * Rules are called and return; what a rule has counted (LOOP, TEXT) is kept in its frame. Every rule begins by reading
 * a byte, so that calls cannot go round without reading. */
#ifndef AFF_GRAMMAR_PROGRAM_H
#define AFF_GRAMMAR_PROGRAM_H
#include "grammar/grammar.h"

#define G_INF UINT32_MAX
enum { G_DEPTH = 192 }; /* frames; an object or array takes one or two */

enum {
    G_RET,    /* place 0: the end of a rule */
    G_ACCEPT, /* place 1: the answer is complete, only the end of sequence may follow */
    G_OPEN,   /* place 2: the answer may end here, or at length */
    G_FAIL,   /* place 3: no way on */
    G_PLACES
};

typedef enum g_op {
    OP_RET,
    OP_ACCEPT,
    OP_OPEN,
    OP_SET,   /* one byte of set `a`, then next */
    OP_SPLIT, /* a or next */
    OP_CALL,  /* rule `a`, then next */
    OP_LOOP,  /* rule `a` min to max times, then next */
    OP_TEXT,  /* min to max characters of running text, then next; or `a` (unless G_FAIL), which returns here with the
                 count kept */
    OP_TICK,  /* count one more, up to max */
    OP_LEAST  /* go on only if the count has reached min; forget it */
} g_op;

typedef struct g_instr {
    uint8_t op;
    uint8_t kind; /* TEXT: aff_text_kind; SET of free text: G_FREE, or G_LOOSE where any token may come */
    uint32_t a, next, min, max;
} g_instr;

/* Place pc (of a pattern with a length) takes the same texts of up to `left` characters as place `to`, which another
 * count of characters leads to. Sorted by pc. */
typedef struct g_alike {
    uint32_t pc, to, left, run;
} g_alike;

struct aff_grammar {
    const aff_vocab *vocab;
    g_instr *ins;
    uint32_t n, cap;
    uint64_t (*set)[4]; /* of bytes; after g_finish of byte classes */
    uint32_t n_set, cap_set;
    uint32_t *set_slot; /* hash table, while building */
    uint32_t *rule;     /* where each begins */
    uint32_t n_rule, cap_rule;
    uint32_t *part; /* beginnings of stretches of instructions; calls lead mostly to later ones */
    uint32_t n_part, cap_part;
    uint32_t *cost, *height; /* [n], from a place with count 0 to the end of its rule: fewest tokens, frames */
    /* What a byte class does in running text: the place of a rule that reads the rest of a character, or one of these.
     */
    uint32_t text[AFF_TEXT_KINDS][256];
    uint8_t class_of[256];
    int n_class;
    g_alike *alike;
    uint32_t n_alike, *spread, n_run; /* spread [n_run]: the most by which costs of one run's alike places differ */
    uint32_t root;
    uint32_t free_cost; /* the most that a token of free text can bring about */
};
enum { G_FREE = 1, G_LOOSE };
enum { G_TEXT_STOP = G_FAIL, G_TEXT_SAME = G_RET }; /* in text[]: not a character; a whole one */

typedef struct g_builder {
    aff_grammar *g;
    aff_status status; /* of the first failure: everything after it does nothing */
    aff_error *err;
    uint32_t ws, digit; /* rules: white space that is there, one digit */
} g_builder;

aff_status g_begin(g_builder *b, const aff_vocab *v, aff_error *err);
/* Sets the status; returns G_FAIL. */
uint32_t g_fail(g_builder *b, aff_status s, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

uint32_t g_emit(g_builder *b, g_instr i);
uint32_t g_set(g_builder *b, const uint64_t set[4], uint32_t next);
uint32_t g_range(g_builder *b, uint8_t lo, uint8_t hi, uint32_t next);
uint32_t g_literal(g_builder *b, const char *s, size_t n, uint32_t next);
uint32_t g_text(g_builder *b, const char *s, uint32_t next); /* a literal, NUL-terminated */
uint32_t g_or(g_builder *b, uint32_t x, uint32_t y);         /* G_FAIL is neutral */
uint32_t g_call(g_builder *b, uint32_t rule, uint32_t next);
uint32_t g_loop(g_builder *b, uint32_t rule, uint32_t min, uint32_t max, uint32_t next);
uint32_t g_chars(g_builder *b, aff_text_kind kind, uint32_t min, uint32_t max, uint32_t side, uint32_t next);
uint32_t g_hub(g_builder *b); /* a place to be defined later, for cycles */
void g_define(g_builder *b, uint32_t hub, uint32_t target);
uint32_t g_rule_new(g_builder *b);
/* place [lengths][n], 0 where there is none: texts of these places differ in nothing but the length that is left. */
void g_alike_run(g_builder *b, const uint32_t *place, uint32_t lengths, uint32_t n);
void g_part(g_builder *b);                  /* a new stretch begins */
uint32_t g_ws(g_builder *b, uint32_t next); /* optional white space */
uint32_t g_digits(g_builder *b, uint32_t min, uint32_t max, uint32_t next);
/* Tags of calls: "<" or "</", the marker, the name, for the closing one ">". */
uint32_t g_mark(g_builder *b, uint32_t next);
uint32_t g_opening(g_builder *b, const char *tag, uint32_t next);
uint32_t g_closing(g_builder *b, const char *tag, uint32_t next);
/* Characters lo..hi, 0x80 or above, without surrogates, as UTF-8. */
uint32_t g_utf8(g_builder *b, uint32_t lo, uint32_t hi, uint32_t next);
/* A string of running text to `next`, which begins with '<', and which the text cannot run into. */
uint32_t g_raw_text(g_builder *b, uint32_t min, uint32_t max, uint32_t next);

/* Costs, heights, byte classes. AFF_E_INVALID: there is no text at all that fits. */
aff_status g_finish(g_builder *b, uint32_t root);

/* Tokens that are enough from a place with this count to the end of its rule. */
uint32_t g_cost(const aff_grammar *g, uint32_t pc, uint32_t count);

static inline void g_set_add(uint64_t set[4], uint8_t c)
{
    set[c >> 6] |= 1ull << (c & 63);
}
static inline bool g_set_has(const uint64_t set[4], uint8_t c)
{
    return set[c >> 6] >> (c & 63) & 1;
}
static inline uint32_t g_sum(uint32_t a, uint32_t b)
{
    return a > G_INF - b ? G_INF : a + b;
}
#endif
