/* regex.h - a pattern on its way from text to an automaton; shared by regex_parse.c and regex.c. */
#ifndef AFF_GRAMMAR_REGEX_H
#define AFF_GRAMMAR_REGEX_H
#include "grammar/schema.h"

enum {
    MOST_PATTERN = 2000,
    MOST_NFA = 4000,
    MOST_CLASSES = 512,
    MOST_RANGES = 16384,
    MOST_DFA = 2000,
    MOST_PRODUCT = 60000,
    MOST_NEST = 32,
    LEAST_ALIKE = 8,
    MOST_REGEX_WORK = 20000000
};

typedef struct span {
    uint32_t lo, hi;
} span;

typedef struct nfa_state {
    uint32_t eps[2];  /* G_INF: none */
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
    uint64_t *sets;               /* [n_dfa][words] */
    uint32_t words, n_dfa, *edge; /* [n_dfa][n_atom], G_INF: none */
    bool *final;
    uint64_t work;
    bool raw;
} regex;

typedef struct piece {
    uint32_t in, out;
} piece;

/* The nondeterministic automaton of a pattern; r->why says what is wrong with it. */
piece regex_parse(regex *r, const char *pattern);
#endif
