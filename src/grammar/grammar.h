/* grammar.h - answers held to a form: JSON, a JSON Schema, calls of tools (docs/server.md has the supported subset).
 *
 * A grammar is compiled once a request and does not change; a matcher follows one answer through it and says which
 * tokens may come next. Reasoning in front of an answer is free text that the grammar reads over. */
#ifndef AFF_GRAMMAR_GRAMMAR_H
#define AFF_GRAMMAR_GRAMMAR_H
#include "grammar/vocab.h"
#include <jansson.h>

typedef enum aff_calls {
    AFF_CALLS_NONE,
    AFF_CALLS_FREE,    /* the answer may be text or calls; calls follow the grammar */
    AFF_CALLS_REQUIRED /* it is calls */
} aff_calls;

typedef struct aff_grammar_request {
    const json_t *schema; /* of the answer, json_true(): any JSON value; NULL: no form. Besides, with AFF_CALLS_FREE, it
                             may be calls */
    const char *name;     /* of the schema's field, for errors */
    aff_calls calls;
    const json_t
        *tools;       /* as in chat completions; schemas of tools that are not strict are followed where they can be */
    const char *only; /* the one that must be called; NULL: any */
    bool one_call;
    bool v41;      /* tags of V4.1 */
    bool thinking; /* the prompt ends inside reasoning */
} aff_grammar_request;

typedef struct aff_grammar aff_grammar;
/* The vocabulary is borrowed, nothing of the request is kept. AFF_E_INVALID: a keyword that is not supported, or a
 * schema that nothing fits; the line names it with its JSON pointer. Bounded in time and memory whatever the schema. */
aff_status aff__grammar_compile(aff_grammar **out, const aff_vocab *v, const aff_grammar_request *r, aff_error *err);
void aff__grammar_free(aff_grammar *g);
int aff__grammar_vocab(const aff_grammar *g); /* tokens of its vocabulary */

/* Follows one answer. A state stands for the text so far; 0 is none. One thread at a time. */
typedef struct aff_matcher aff_matcher;
typedef uint32_t aff_match;
/* The grammar is borrowed. */
aff_status aff__matcher_create(aff_matcher **out, const aff_grammar *g, aff_error *err);
void aff__matcher_free(aff_matcher *m);
aff_match aff__matcher_start(const aff_matcher *m);
/* The state after one more token, 0: the grammar refuses it (or a limit was reached, which the next mask reports). The
 * end of sequence does not change a state that allows it. */
aff_match aff__matcher_step(aff_matcher *m, aff_match s, int32_t id);
/* Whether the answer may end here. */
bool aff__matcher_complete(const aff_matcher *m, aff_match s);
/* Tokens that are enough to complete the answer, the end of sequence included; 0 where it may also end at length. */
uint32_t aff__matcher_need(const aff_matcher *m, aff_match s);
/* The tokens that may come next when `left` may still be chosen, this one included: those after which the rest is
 * enough to complete the answer; if there is none, those after which the least is missing. words[vocab->words], bit id
 * & 63 of word id >> 6; valid until the next call. */
aff_status aff__matcher_mask(aff_matcher *m, aff_match s, int64_t left, const uint64_t **words, aff_error *err);
/* Forgets all states but s, which may get another number, once they have become many. Between passes. */
aff_status aff__matcher_keep(aff_matcher *m, aff_match *s, aff_error *err);
#endif
