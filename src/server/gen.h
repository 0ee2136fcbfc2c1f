/* gen.h - a request at work: its prompt, its choices in the engine, and the events that a dialect writes.
 *
 * Every event is called with the generation's lock held, on the engine's thread (begin: on the one that submits). */
#ifndef AFF_SERVER_GEN_H
#define AFF_SERVER_GEN_H
#include "engine/engine.h"
#include "server/ask.h"
#include "server/http.h"
#include "server/jout.h"
#include "server/replay.h"
#include "text/parse.h"
#include <pthread.h>

/* What a server is: its model, its engine, its counts. */
typedef struct aff_gen aff_gen;
typedef struct aff_serving {
    const aff_net *net;
    const aff_config *cfg;
    aff_engine *engine;
    const aff_tokenizer *tok;
    const aff_vocab *vocab; /* of tok, for forms of answers */
    aff_chat_format format;
    aff_replay *replay;
    const char *model; /* its name for clients */
    int64_t floor;     /* --max-tokens-floor */
    int slots;
    int32_t think_end; /* the token </think>, -1 */
    uint64_t started;  /* wall clock, seconds */
    /* Order of locks: this one, a generation's, count_lock and those of the engine and of HTTP. */
    pthread_mutex_t lock;
    pthread_cond_t idle; /* `live` became NULL */
    aff_gen *live;       /* list of all at work */
    pthread_mutex_t count_lock;
    struct {
        uint64_t requests, refused, failed, cancelled, empty, prompt_tokens, cached_tokens, cached_prompts, tokens,
            prefill_ns, decode_ns;
    } count;
    int at_work;     /* sequences submitted and not done; under count_lock */
    char fault[256]; /* why the engine cannot work, "" if it can; under count_lock */
} aff_serving;

typedef struct aff_tool_call {
    char id[48];
    aff_buf name, arguments;
    size_t number; /* of the parser */
    bool open, dropped;
    int index; /* in the answer: how many came before, dropped ones included where they were announced */
} aff_tool_call;

typedef enum aff_finish { AFF_FIN_NONE, AFF_FIN_STOP, AFF_FIN_STOP_STRING, AFF_FIN_LENGTH, AFF_FIN_CALLS } aff_finish;

typedef struct aff_choice {
    aff_gen *g;
    int index;
    uint64_t id;                  /* of the engine */
    bool submitted, done, halted; /* halted: nothing that comes now is the answer's */
    aff_parser *parser;
    aff_utf8_stream utf8;
    aff_ids ids; /* chosen, for aff_replay */
    aff_buf text, reasoning;
    aff_tool_call *call;
    size_t n_calls;
    aff_buf held; /* text that may begin a stop string */
    const char *stopped_by;
    size_t n_stopped_by;
    aff_finish finish;
    aff_status status;
    aff_error err;
    int64_t tokens, reasoning_tokens, prefilled; /* chosen; until reasoning ended; rows run */
    int64_t cached;                              /* prompt rows that a cache had */
    bool reasoning_over;
    aff_jout probs, reasoning_probs,
        pending; /* entries of log-probabilities: of text that was sent, of reasoning, not yet settled */
    size_t probs_sent, reasoning_probs_sent; /* bytes of them that are out */
    /* for the writers */
    int block; /* messages, responses: number of the open block; -1: none opened yet */
    int block_kind;
    size_t block_from; /* responses: where its text begins */
} aff_choice;

typedef enum aff_gen_kind {
    AFF_G_REASONING,
    AFF_G_TEXT,
    AFF_G_CALL,
    AFF_G_ARGS,
    AFF_G_CALL_END,
    AFF_G_CALL_DROP
} aff_gen_kind;

/* A dialect's answer. event and choice_done only when it streams. */
typedef struct aff_writer {
    const char *heartbeat; /* what follows the comment line that tells of progress */
    void (*begin)(aff_gen *g);
    void (*event)(aff_choice *c, aff_gen_kind kind, aff_tool_call *call, const char *s, size_t n);
    void (*choice_done)(aff_choice *c);
    void (*end)(aff_gen *g);                        /* of a stream */
    void (*whole)(aff_gen *g);                      /* all at once */
    void (*fail)(aff_gen *g, const aff_error *err); /* in a stream */
} aff_writer;

struct aff_gen {
    aff_gen *next, *prev; /* in aff_serving */
    aff_serving *sv;
    aff_exchange *x;
    const aff_writer *w;
    aff_ask ask;
    pthread_mutex_t lock;
    int refs; /* choices in the engine, and the one who makes it */
    bool abandoned;
    char id[48];
    uint64_t created; /* wall clock, seconds */
    int64_t n_prompt;
    bool thinking; /* the prompt ended inside reasoning */
    aff_grammar *grammar; /* the answer's form; NULL: none */
    bool literal;         /* the answer is text of that form and nothing else: what looks like markup in it is none */
    aff_choice *choice;
    int n_done;
    int place;       /* in the queue, 1: the next; 0: not in it */
    uint64_t number; /* of responses' events */
    aff_jout out;    /* scratch of the writers */
    aff_jout items;  /* responses: items that are complete */
    int n_items;
};

extern const aff_writer aff__chat_writer, aff__completion_writer, aff__messages_writer, aff__responses_writer;

/* Takes `ask` (also when it fails) and answers x, at once or later. Errors are answered too. */
void aff__gen_start(aff_serving *sv, aff_exchange *x, aff_ask *ask);
/* The prompt of a request as ids. */
aff_status aff__gen_prompt(const aff_serving *sv, const aff_ask *ask, int32_t **ids, int64_t *n, bool *thinking,
                           aff_error *err);
/* "call_" or another prefix and 128 random bits. */
void aff__random_id(char *out, size_t cap, const char *prefix);
/* Sends what is in g->out and empties it; a failure abandons the request. */
void aff__gen_flush(aff_gen *g);
/* An error in the shape of a dialect, by its path. `code` NULL allowed. */
void aff__answer_error(aff_exchange *x, aff_dialect d, int status, const char *message, const char *param,
                       const char *code);
void aff__put_error(aff_jout *j, const aff_exchange *x, aff_dialect d, int status, const char *message,
                    const char *param, const char *code);
#endif
