/* vocab.h - a vocabulary as the grammar sees it: every token a string of bytes, in a trie, so that the tokens a grammar
 * allows are found by walking the trie and the automaton together.
 *
 * The token that marks tool calls (the one spelled U+FF5C DSML U+FF5C) stands in it as one byte 0xFF, which no text
 * has: so markup is never mistaken for text that spells it, nor the other way round. Where a tokenizer has no such
 * token its spelling stands for it. Other control tokens are part of no grammar; only free text (reasoning, an answer
 * without a form) may hold them. */
#ifndef AFF_GRAMMAR_VOCAB_H
#define AFF_GRAMMAR_VOCAB_H
#include "text/tokenizer.h"

/* Kinds of running text: within a JSON string, and as it is between tags. */
typedef enum aff_text_kind { AFF_TEXT_JSON, AFF_TEXT_RAW, AFF_TEXT_KINDS } aff_text_kind;

#define AFF_VOCAB_MARKER                                                                                               \
    "\xEF\xBD\x9C"                                                                                                     \
    "DSML"                                                                                                             \
    "\xEF\xBD\x9C"

typedef struct aff_trie_node {
    uint32_t skip;  /* the first node that is not below this one */
    int32_t token;  /* that ends here, -1: none */
    uint16_t depth; /* 1: first byte */
    uint8_t byte;
    uint8_t reach; /* depth of the deepest token here or below, at most 255 */
} aff_trie_node;

/* Nodes in depth-first order, children ascending by byte; tokens of the same bytes are nodes of their own side by side.
 */
typedef struct aff_trie {
    aff_trie_node *node;
    uint32_t n;
} aff_trie;

typedef struct aff_vocab {
    int n, words; /* ids; 64-bit words of a mask */
    int32_t eos;
    bool marked;         /* 0xFF stands for the marker; else its spelling does */
    size_t longest;      /* bytes of a token */
    uint8_t *bytes;      /* of all ids, as the grammar sees them */
    uint32_t *offset;    /* [n + 1] */
    uint64_t *control;   /* [words] mask of control tokens but the marker and the end of sequence */
    bool spelled;        /* an ordinary token holds a whole spelled tag, so nothing may be assumed of free text */
    aff_trie all;        /* ordinary tokens and the marker */
    uint32_t first[256]; /* the first node of depth 1 with byte b; all.n: none */
    /* Tokens that are whole characters of plain running text, of which no byte ends it or means something else:
     * plain[kind][k] is the mask of those with at most k characters, k <= most[kind]. All others are in rest[kind]. */
    uint64_t **plain[AFF_TEXT_KINDS];
    int most[AFF_TEXT_KINDS];
    aff_trie rest[AFF_TEXT_KINDS];
} aff_vocab;

typedef struct aff_vocab_token {
    const char *s;
    size_t n;
    bool control;
} aff_vocab_token;

/* Token [n]; marker is the id of the marker or -1. Every single byte must be a token of its own. */
aff_status aff__vocab_create(aff_vocab **out, const aff_vocab_token *token, int n, int32_t eos, int32_t marker,
                             aff_error *err);
aff_status aff__vocab_of(aff_vocab **out, const aff_tokenizer *tok, int32_t eos, aff_error *err);
void aff__vocab_free(aff_vocab *v);

static inline const uint8_t *aff__vocab_bytes(const aff_vocab *v, int32_t id, size_t *n)
{
    *n = v->offset[id + 1] - v->offset[id];
    return v->bytes + v->offset[id];
}
/* Plain characters of running text: what stands in AFF_TEXT_JSON unescaped, in AFF_TEXT_RAW without a doubt. */
bool aff__text_plain(aff_text_kind kind, uint8_t c);
#endif
