/* replay.h - what the model wrote, kept token by token, so that a conversation that comes back continues the very
 * sequence that is in the prefix cache (spec text-and-serving 2.8): rendering the client's JSON again gives other bytes
 * (spacing, order of keys, trimmed lines), and tokenising even the same bytes may give other tokens.
 *
 * A turn is found by the id of its first call, which has 128 random bits and so stands for the right to it; a turn
 * without calls by its text and reasoning. It is used only where the client's message says the same as what the client
 * was sent: ids, names and arguments of all calls (as JSON values), text and reasoning (apart from white space at their
 * ends). Reasoning may be missing in a turn with calls, as many clients drop it. Anything else was edited and is
 * rendered.
 *
 * Bounded in bytes, the least recently used go first. With a folder every turn is appended to the file `turns` there
 * (mode 0600) and is known to the next process; docs/state.md has its format. Any thread. */
#ifndef AFF_SERVER_REPLAY_H
#define AFF_SERVER_REPLAY_H
#include "base/buf.h"
#include "text/tokenizer.h"
#include <jansson.h>

typedef struct aff_turn_call {
    const char *id, *name, *arguments;
    size_t n_id, n_name, n_arguments;
} aff_turn_call;

/* As the client saw it, and its ids. */
typedef struct aff_turn {
    bool thinking; /* it began inside reasoning */
    const char *reasoning, *text;
    size_t n_reasoning, n_text;
    const aff_turn_call *call; /* [n_calls] */
    size_t n_calls;
    const uint32_t *ids; /* [n_ids], without the end of sequence */
    size_t n_ids;
} aff_turn;

typedef struct aff_replay aff_replay;
/* dir: NULL keeps nothing beyond the process. The caller holds whatever lock the folder has. A file that is damaged
 * counts up to the damage, one of another tokenizer not at all. bytes 0: 64 MiB. `warn` as in aff_engine_options. */
aff_status aff__replay_open(aff_replay **out, const aff_tokenizer *tok, const char *dir, uint64_t bytes,
                            void (*warn)(void *ctx, const char *line), void *warn_ctx, aff_error *err);
void aff__replay_free(aff_replay *r);

/* Trouble (no memory, a full disk) is no error: the turn will be rendered. */
void aff__replay_put(aff_replay *r, const aff_turn *t);
/* An assistant message in the form of chat completions. Appends to text (valid UTF-8) and ids. */
bool aff__replay_find(aff_replay *r, const json_t *message, bool thinking, aff_buf *text, aff_ids *ids);
size_t aff__replay_count(aff_replay *r);

/* ---- the file's records; for tests ---- */

/* Appends the record of a turn. */
aff_status aff__turn_write(aff_buf *out, const aff_turn *t, aff_error *err);
/* Reads the record at *at of bytes[0..n) and moves *at behind it; false: there is none, or it is damaged. The strings
 * point into bytes; call[] and ids[] are copies that aff__turn_free frees. */
bool aff__turn_read(aff_turn *t, const char *bytes, size_t n, size_t *at);
void aff__turn_free(aff_turn *t);
#endif
