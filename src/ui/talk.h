/* talk.h - a conversation with the model: messages to a prompt, the answer as it comes to a stream, the state kept between turns. */
#ifndef AFF_UI_TALK_H
#define AFF_UI_TALK_H
#include "engine/engine.h"
#include "state/keep.h"
#include "text/chat.h"
#include <stdio.h>

/* Everything but `messages` and below is the caller's to change between turns. */
typedef struct aff_talk {
    aff_engine *engine;
    const aff_net *net;
    const aff_tokenizer *tok;
    aff_keep *keep; /* behind the engine's cache: of this conversation */
    aff_chat_format format;
    aff_sampling sampling;
    bool random_seed; /* chat.h: sampling.seed is drawn anew every turn */
    int64_t n_predict; /* most tokens of an answer, 0: as many as the context has room for */
    const char *effort; /* "none", "low", "high" or "max" */
    char *system;       /* malloc'ed, NULL: none */
    FILE *out;
    bool colour;                /* reasoning is dimmed */
    bool (*interrupted)(void);  /* asked after every chunk and token */

    json_t *messages; /* as the chat API has them; without the system prompt */
    /* The tokens of the last prompt and its answer, and what they were made of: while that holds, the next prompt begins with them. */
    int32_t *ids;
    int64_t n_ids, cap_ids;
    size_t covered; /* messages in ids; 0: ids do not count */
    char covered_effort[8];
    aff_outcome last; /* of the last answer */
} aff_talk;

aff_status aff__talk_init(aff_talk *t, aff_error *err); /* messages; the rest is set already */
void aff__talk_free(aff_talk *t);
void aff__talk_reset(aff_talk *t); /* no messages */
/* One turn: runs the prompt, prints the answer (control characters left out) and keeps both messages. After an error the
 * conversation is as it was. An interrupted answer is kept as far as it came. */
aff_status aff__talk_send(aff_talk *t, const char *text, size_t n, aff_error *err);

/* {"system", "messages"} as a file that appears whole; and back, checked: AFF_E_FORMAT names the message that is wrong, the
 * conversation is then as it was. */
aff_status aff__talk_save(const aff_talk *t, const char *path, aff_error *err);
aff_status aff__talk_load(aff_talk *t, const char *path, aff_error *err);
/* The same from memory; `name` for errors. */
aff_status aff__talk_parse(aff_talk *t, const char *text, size_t n, const char *name, aff_error *err);
#endif
