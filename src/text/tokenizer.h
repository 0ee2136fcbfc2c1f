/* tokenizer.h - byte-level BPE with DeepSeek-V4's pre-tokenizer, exact (spec text-and-serving 1). */
#ifndef AFF_TEXT_TOKENIZER_H
#define AFF_TEXT_TOKENIZER_H
#include "base/status.h"

typedef struct aff_tokenizer aff_tokenizer;

/* Loads tokenizer.json (`path` may be the file or a folder that holds it). Checks structure and counts: dense ids,
 * every byte present, merges name known tokens, merge i gives id 259+i, pre-tokenizer patterns as known. A vocab_size
 * above 0 is the model's count and must be the file's; the fixed numbers of spec 1.2 are asserted when it is 129280.
 * A tokenizer is read-only: any number of threads may use it. */
aff_status aff__tokenizer_open(aff_tokenizer **out, const char *path, int64_t vocab_size, aff_error *err);
aff_status aff__tokenizer_open_memory(aff_tokenizer **out, const char *json, size_t size, const char *name,
                                      int64_t vocab_size, aff_error *err);
void aff__tokenizer_free(aff_tokenizer *t);

typedef struct aff_ids { /* growing array of token ids; zero-initialise; free with aff__ids_free */
    uint32_t *id;
    size_t n, cap;
} aff_ids;
void aff__ids_free(aff_ids *ids);
aff_status aff__ids_push(aff_ids *ids, uint32_t id, aff_error *err);

/* Appends the ids of text[0..n). added: control-token strings in the text become their ids (the reference's behaviour);
 * false: all of it is ordinary text. Invalid UTF-8: each maximal invalid subpart counts as U+FFFD. No BOS is added. On
 * an error *out is as before. */
aff_status aff__tokenizer_encode(const aff_tokenizer *t, const char *text, size_t n, bool added, aff_ids *out,
                                 aff_error *err);

/* A text of segments, each template (control tokens recognised) or caller text (not recognised); adjacent plain text of
 * both kinds is tokenised as one span (spec 1.8). A segment ends between characters: one cut by a border counts as
 * invalid on either side. One that has ids already (what a model wrote) is not tokenised again. */
typedef struct aff_segment {
    const char *text;
    size_t n;
    bool added;
    const uint32_t *ids; /* [n_ids], NULL: the text is tokenised */
    size_t n_ids;
} aff_segment;
aff_status aff__tokenizer_encode_segments(const aff_tokenizer *t, const aff_segment *seg, size_t n_seg, aff_ids *out,
                                          aff_error *err);

/* The bytes of one id (not NUL-terminated, owned by t); *n = 0 for an id that is not in the vocabulary. */
const char *aff__tokenizer_bytes(const aff_tokenizer *t, uint32_t id, size_t *n);
int64_t aff__tokenizer_size(const aff_tokenizer *t);                          /* highest id + 1 */
int64_t aff__tokenizer_find(const aff_tokenizer *t, const char *added_token); /* id of an added token by content, -1 */
bool aff__tokenizer_is_special(const aff_tokenizer *t, uint32_t id);          /* added token with special = true */

/* Streaming decode (spec 1.7): feed token bytes, take complete UTF-8. Zero-initialise at the prompt's end. */
typedef struct aff_utf8_stream {
    uint8_t held[4];
    int n;
} aff_utf8_stream;
/* Writes to out (capacity >= 3*(n+4)) everything that is complete, invalid bytes as U+FFFD; returns bytes written. */
size_t aff__utf8_push(aff_utf8_stream *s, const char *bytes, size_t n, char *out);
size_t aff__utf8_flush(aff_utf8_stream *s, char *out); /* a held tail as one U+FFFD */
#endif
