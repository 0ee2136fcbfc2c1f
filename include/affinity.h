/* affinity.h - the public C API of libaffinity: open a model, make a session, feed tokens, get tokens.
 *
 *     aff_model *m;  aff_session *s;  aff_error err = {0};  int32_t id;
 *     aff_sampling sp;
 *     aff_sampling_init(&sp);
 *     if (aff_model_open(&m, path, NULL, &err) || aff_session_create(&s, m, 0, &err)) ...
 *     aff_session_feed(s, prompt, n, &err);
 *     while (aff_session_next(s, &sp, &id, &err) == AFF_OK && id != aff_model_eos(m))
 *         aff_session_feed(s, &id, 1, &err);
 *
 * Every function that can fail returns an aff_status and, when `err` is not NULL, writes one line into it that names
 * file, item, expected and got. Handles are opaque; each is freed by its own function, NULL allowed. A model or a
 * tokenizer may be shared by threads; a session is used by one thread at a time. On failure *out is NULL. */
#ifndef AFFINITY_H
#define AFFINITY_H
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define AFF_API __attribute__((visibility("default")))
#else
#define AFF_API
#endif

#define AFF_VERSION_MAJOR 0
#define AFF_VERSION_MINOR 1
#define AFF_VERSION_PATCH 0

typedef enum aff_status {
    AFF_OK = 0,
    AFF_E_INVALID,     /* an argument or a flag that makes no sense */
    AFF_E_IO,          /* the operating system refused a read, write, map, rename ... */
    AFF_E_FORMAT,      /* a file's bytes are not what the format says */
    AFF_E_UNSUPPORTED, /* well formed, but not something this build can do */
    AFF_E_NOMEM,       /* out of memory */
    AFF_E_LIMIT,       /* a bound was reached: context length, size, depth */
    AFF_E_CANCELLED,   /* stopped on request */
    AFF_E_DEVICE       /* a card, its driver or a kernel on it failed */
} aff_status;

/* One error: the code and a one-line message, NUL-terminated. Zero-initialise before first use. */
typedef struct aff_error {
    aff_status code;
    char msg[508];
} aff_error;

/* "0.1.0"; static storage. */
AFF_API const char *aff_version(void);
/* Short name of a status, e.g. "format"; static storage. */
AFF_API const char *aff_status_name(aff_status s);

/* ---- Model ---- */

/* How much of the published arithmetic is reproduced; see docs/architecture.md.
 *   math  float32 everywhere, no quantiser simulation
 *   sim   math plus the simulated quantisers of KV rows and indexer
 *   fast  the production definition: bf16 activations into FP8 and bf16 matrices, exact integer routed experts */
typedef enum aff_numerics { AFF_MATH, AFF_SIM, AFF_FAST } aff_numerics;

typedef struct aff_model_options {
    aff_numerics numerics;
    int threads;    /* of each session; <= 0: one per CPU this process may use */
    int max_layers; /* > 0: run only the first layers. The text is then not the model's */
} aff_model_options;
AFF_API void aff_model_options_init(aff_model_options *o); /* AFF_FAST, 0, 0 */

typedef struct aff_model aff_model;
/* Opens a .aff container or a checkpoint folder in the release layout. opt NULL: the defaults. */
AFF_API aff_status aff_model_open(aff_model **out, const char *path, const aff_model_options *opt, aff_error *err);
/* Sessions of the model must have been freed before. */
AFF_API void aff_model_free(aff_model *m);
AFF_API int aff_model_vocab(const aff_model *m);       /* token ids are 0 .. vocab-1 */
AFF_API int64_t aff_model_context(const aff_model *m); /* positions a sequence can have */
AFF_API int aff_model_layers(const aff_model *m);      /* layers in force */
AFF_API int32_t aff_model_bos(const aff_model *m);     /* begin of sequence: a text prompt starts with it */
AFF_API int32_t aff_model_eos(const aff_model *m);     /* end of sequence */

/* ---- Text ---- */

typedef struct aff_tokenizer aff_tokenizer;
/* Loads tokenizer.json from `path`, the file or a folder that holds it. With a model (NULL allowed) the two must fit:
 * vocabulary size, begin and end of sequence. */
AFF_API aff_status aff_tokenizer_open(aff_tokenizer **out, const char *path, const aff_model *m, aff_error *err);
AFF_API void aff_tokenizer_free(aff_tokenizer *t);
/* Ids of text[0..n) (any bytes; invalid UTF-8 counts as U+FFFD), without a begin-of-sequence token. control: the text's
 * control-token strings ("<think>") become their ids; false: they are ordinary text. *n_ids receives the count; when it is
 * more than cap the result is AFF_E_LIMIT and ids (NULL allowed for cap 0) holds nothing of use. */
AFF_API aff_status aff_tokenizer_encode(const aff_tokenizer *t, const char *text, size_t n, bool control, int32_t *ids,
                                        size_t cap, size_t *n_ids, aff_error *err);
/* The bytes of one id, not NUL-terminated, owned by t; *n = 0 for an id outside the vocabulary. */
AFF_API const char *aff_tokenizer_bytes(const aff_tokenizer *t, int32_t id, size_t *n);

/* Streaming decode: a token may end inside a character. Zero-initialise where the text starts. */
typedef struct aff_text_stream {
    uint8_t held[4];
    int n;
} aff_text_stream;
/* Writes the complete characters that id adds to the stream, invalid bytes as U+FFFD, to out; *n is their length in bytes.
 * id -1 ends the text: an incomplete character is written as U+FFFD. AFF_E_LIMIT when cap is too small: *n is then the cap
 * that is enough and the stream has not moved (1024 does for every token of DeepSeek-V4). */
AFF_API aff_status aff_tokenizer_decode(const aff_tokenizer *t, aff_text_stream *s, int32_t id, char *out, size_t cap,
                                        size_t *n, aff_error *err);

/* ---- Session: one sequence ---- */

/* How a token is chosen; docs/cli.md has the exact definition. The token at a position depends on the logits, these
 * values and the position alone. */
typedef struct aff_sampling {
    double temperature; /* <= 0: the most likely token */
    int64_t top_k;      /* 0: off */
    double top_p;       /* 1: off */
    double min_p;       /* 0: off */
    uint64_t seed;
    uint32_t choice; /* number of the answer among several to one prompt, with one seed */
} aff_sampling;
AFF_API void aff_sampling_init(aff_sampling *s); /* greedy: 0, 0, 1, 0, 0, 0 */

typedef struct aff_session aff_session;
/* Room for `context` positions (<= 0: all that the model has; memory is taken as it is used). */
AFF_API aff_status aff_session_create(aff_session **out, const aff_model *m, int64_t context, aff_error *err);
AFF_API void aff_session_free(aff_session *s);
/* Runs n >= 1 tokens after those before. An id out of range or more tokens than the context has room for is an error
 * that changes nothing. */
AFF_API aff_status aff_session_feed(aff_session *s, const int32_t *ids, int64_t n, aff_error *err);
/* Chooses the token that follows; it becomes part of the sequence when it is fed. sp NULL: greedy. AFF_E_INVALID before
 * anything was fed. */
AFF_API aff_status aff_session_next(aff_session *s, const aff_sampling *sp, int32_t *id, aff_error *err);
/* Logits [vocab] after the last token fed, until the session's next call; NULL before anything was fed. */
AFF_API const float *aff_session_logits(const aff_session *s);
AFF_API int64_t aff_session_position(const aff_session *s); /* tokens in the sequence */
AFF_API void aff_session_reset(aff_session *s);             /* empty, as new */

#ifdef __cplusplus
}
#endif
#endif
