/* ask.h - the body of a request, of any dialect, to what is to be generated (docs/server.md). */
#ifndef AFF_SERVER_ASK_H
#define AFF_SERVER_ASK_H
#include "base/buf.h"
#include "engine/logits.h"
#include "grammar/grammar.h"
#include "text/chat.h"

typedef enum aff_dialect { AFF_CHAT_COMPLETIONS, AFF_COMPLETIONS, AFF_MESSAGES, AFF_RESPONSES } aff_dialect;
enum { AFF_MAX_CHOICES = 16, AFF_MAX_STOPS = 256, AFF_MAX_STOP_BYTES = 4096 };

typedef struct aff_stop_string {
    const char *s;
    size_t n;
} aff_stop_string;

/* Strings and values point into root or are counted references of their own. */
typedef struct aff_ask {
    aff_dialect dialect;
    json_t *root;
    json_t *messages, *tools; /* in the form of chat completions; tools NULL: none */
    json_t *effort;
    bool thinking, continue_final;
    aff_chat_replay_fn replay; /* for aff__ask_render, set by its caller: what the model wrote; NULL: not asked */
    void *replay_ctx;
    const char *prompt; /* completions: text[0..n_prompt), or ids */
    size_t n_prompt;
    int32_t *ids;
    int64_t n_ids;
    aff_sampling sampling;
    bool seeded; /* sampling.seed was given */
    aff_adjust adjust;
    aff_bias *bias;
    aff_stop_string *stop;
    int n_stop, n, top_logprobs;
    bool logprobs, stream, usage, one_call, ignore_eos, echo;
    int64_t max_tokens; /* -1: not given */
    json_t *schema;         /* of the answer; NULL: it has no form */
    aff_calls calls;        /* held to the tools' schemas */
    const char *only;       /* the function that must be called; NULL: any */
    const char *form_param; /* the field to name when the form cannot be followed */
    aff_buf ignored;    /* names of fields nobody here knows, separated by commas */
    char param[96];     /* after an error: the field */
} aff_ask;

/* AFF_E_INVALID: the request is wrong, ask->param and *err say where and why. Call aff__ask_free in every case. */
aff_status aff__ask_decode(aff_ask *ask, aff_dialect dialect, const char *body, size_t n, int vocab, aff_error *err);
void aff__ask_free(aff_ask *ask);
/* The body as an object, nothing of it looked at (tokenize and others); the same errors. */
aff_status aff__ask_object(json_t **out, const char *body, size_t n, aff_error *err);
/* The prompt of a conversation. */
aff_status aff__ask_render(const aff_ask *ask, aff_chat_format format, aff_chat_prompt *out, aff_error *err);
#endif
