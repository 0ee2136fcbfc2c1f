/* words.h - a small vocabulary for tests of grammars: every byte, some longer tokens that cross the borders of JSON, of
 * characters and of tags, and control tokens. */
#ifndef AFF_TEST_GRAMMAR_WORDS_H
#define AFF_TEST_GRAMMAR_WORDS_H
#include "base/mem.h"
#include "grammar/grammar.h"
#include <stdlib.h>
#include <string.h>

#define BAR  "\xEF\xBD\x9C"
#define DSML BAR "DSML" BAR
enum { W_EOS = 1, W_USER = 2, W_THINK_END = 3, W_MARK = 4, W_BYTES = 8 };

static const char *const word_list[] = {
    "{\"",      "\": ",   "\":",   "\", \"", "\"}",      "}]",       "[]",           "{}",        "true",
    "false",    "null",   "tru",   "e,",     "12",       "123",      "00",           "-1",        "0.",
    ".5",       "e1",     "  ",    "\n  ",   ",\n",      ", ",       "[[",           "]]",        "name",
    "na",       "me\"",   "age",   "abc",    "ab",       "ba",       "\\n",          "\\u",       "\\\"",
    "00e9",     "d83d",   "\\ud8", "\xC3",   "\xC3\xA9", "\xE4\xBD", "\xE4\xBD\xA0", "\xA0\xE5",  "\xF0\x9F",
    "\x98\x80", "\x80\"", "<",     "</",     "<b>",      "/b>",      "tool",         "_calls",    "tool_calls",
    "invoke",   " name",  "=\"",   "\">",    "\">\n",    ">\n",      " string",      "parameter", "string=\"",
    "\n\n",     "\n\n<",  "\n</",  "think",  "a<",       "</think",  ">{",           "x\"y"};
enum { W_WORDS = sizeof word_list / sizeof *word_list, W_N = W_BYTES + 256 + W_WORDS };

/* Without its marker the tokenizer spells tags. */
static inline aff_vocab *words(bool marker)
{
    static aff_vocab_token t[W_N];
    static char byte[256];
    aff_vocab *v = NULL;
    aff_error err = {0};
    memset(t, 0, sizeof t);
    t[0] = (aff_vocab_token){"<s>", 3, true};
    t[W_EOS] = (aff_vocab_token){"</s>", 4, true};
    t[W_USER] = (aff_vocab_token){"<" BAR "User" BAR ">", 12, true};
    t[W_THINK_END] = (aff_vocab_token){"</think>", 8, true};
    if (marker) t[W_MARK] = (aff_vocab_token){DSML, sizeof DSML - 1, true};
    for (int i = 0; i < 256; i++) {
        byte[i] = (char)i;
        t[W_BYTES + i] = (aff_vocab_token){&byte[i], 1, false};
    }
    for (int i = 0; i < W_WORDS; i++)
        t[W_BYTES + 256 + i] = (aff_vocab_token){word_list[i], strlen(word_list[i]), false};
    if (aff__vocab_create(&v, t, W_N, W_EOS, marker ? W_MARK : -1, &err) != AFF_OK) {
        fprintf(stderr, "%s\n", err.msg);
        abort();
    }
    return v;
}

/* The bytes of a token as text. */
static inline const char *word(const aff_vocab *v, int32_t id, size_t *n)
{
    const uint8_t *s = aff__vocab_bytes(v, id, n);
    if (*n != 1 || *s != 0xFF || id != W_MARK) return (const char *)s;
    *n = sizeof DSML - 1;
    return DSML;
}

static inline bool in_mask(const uint64_t *w, int32_t id)
{
    return w[id >> 6] >> (id & 63) & 1;
}

/* Follows a text byte by byte, tags by their marker. 0: refused. */
static inline aff_match follow(aff_matcher *m, aff_match s, const char *text, size_t n, bool marker)
{
    for (size_t i = 0; i < n && s;) {
        if (marker && n - i >= sizeof DSML - 1 && memcmp(text + i, DSML, sizeof DSML - 1) == 0) {
            s = aff__matcher_step(m, s, W_MARK);
            i += sizeof DSML - 1;
        } else {
            s = aff__matcher_step(m, s, W_BYTES + (uint8_t)text[i++]);
        }
    }
    return s;
}
#endif
