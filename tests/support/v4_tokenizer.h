/* v4_tokenizer.h - the full-size DeepSeek-V4-Flash tokenizer for tests, rebuilt from tests/text/v4_merges.bin and
 * v4_added.txt (format: tests/text/make_v4_merges.py), and a small one. */
#ifndef AFF_TEST_V4_TOKENIZER_H
#define AFF_TEST_V4_TOKENIZER_H
#include "text/tokenizer.h"

/* A growing string; free(s). */
typedef struct aff_test_text {
    char *s;
    size_t n, cap;
} aff_test_text;
void aff_test_add(aff_test_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The text of its tokenizer.json. merge_pairs: merges as arrays of two rather than strings. */
aff_test_text aff_test_v4_json(bool merge_pairs);
/* The loaded tokenizer; ends the process with a message if that fails. */
aff_tokenizer *aff_test_v4_tokenizer(void);

/* A tokenizer.json of the same make with 261 ordinary tokens (bytes, "ab", "abc", ids 259 and 260) and 4 added ones:
 * ids 0-2
 * "<s>", "</s>", "<pad>" (special; 0 also in vocab), 261 "<\xEF\xBD\x9C" "x\xEF\xBD\x9C>". */
aff_test_text aff_test_small_json(void);
#endif
