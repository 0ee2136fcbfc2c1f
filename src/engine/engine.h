/* engine.h - the one loop that runs a model: it owns the runner and the sequence, feeds the prompt in chunks, chooses
 * tokens, and decides when to stop. What a token looks like as text, and where it goes, is the caller's affair: the
 * loop speaks in events. */
#ifndef AFF_ENGINE_ENGINE_H
#define AFF_ENGINE_ENGINE_H
#include "engine/sampler.h"
#include "model/forward.h"

typedef struct aff_engine_options {
    int threads;     /* <= 0: one per CPU */
    int64_t context; /* positions; <= 0: the model's */
    int64_t chunk;   /* prompt rows per pass, >= 1; results do not depend on it (0: AFF_MAX_CHUNK) */
} aff_engine_options;

typedef struct aff_engine aff_engine;
/* `net` is borrowed and must outlive the engine. */
aff_status aff__engine_create(aff_engine **out, const aff_net *net, const aff_engine_options *o, aff_error *err);
void aff__engine_free(aff_engine *e);
void aff__engine_reset(aff_engine *e);            /* empty sequence, as new */
int64_t aff__engine_pos(const aff_engine *e);     /* tokens that have been run */
int64_t aff__engine_context(const aff_engine *e); /* positions there is room for */
/* Logits [vocab] after the last row of the last feed or run; NULL before that. */
const float *aff__engine_logits(const aff_engine *e);

/* Events, each in the order of positions; any may be NULL. */
typedef struct aff_events {
    void *ctx;
    /* A chunk of the prompt has run: `done` of `total` rows. false stops before the next chunk. */
    bool (*progress)(void *ctx, int64_t done, int64_t total);
    /* Logits [rows][vocab] of positions pos .. pos+rows-1, for every row that runs. A failure ends the run with it. */
    aff_status (*logits)(void *ctx, int64_t pos, int rows, const float *logits, aff_error *err);
    /* The token at `pos` has been chosen. false stops after it. */
    bool (*token)(void *ctx, int64_t pos, int32_t id);
} aff_events;

/* Runs n >= 1 tokens after those before, in chunks; with want_logits the last row's logits are kept. Ids out of range
 * and too little room are errors that change nothing. AFF_E_CANCELLED when `progress` said stop (the rows run so far
 * stay). */
aff_status aff__engine_feed(aff_engine *e, const int32_t *ids, int64_t n, bool want_logits, const aff_events *ev,
                            aff_error *err);
/* The token that follows the last one run, from its logits. Changes nothing. */
aff_status aff__engine_choose(aff_engine *e, const aff_sampling *p, int32_t *id, aff_error *err);

typedef struct aff_request {
    const int32_t *prompt; /* [n_prompt] */
    int64_t n_prompt;      /* >= 1 */
    int64_t n_predict;     /* >= 0 */
    aff_sampling sampling;
    bool ignore_eos;
    /* [n_forced] chosen in turn, cyclically, instead of the model's tokens; the end of sequence does not stop then. */
    const int32_t *forced;
    int64_t n_forced;
} aff_request;

typedef enum aff_stop { AFF_STOP_LENGTH, AFF_STOP_EOS, AFF_STOP_CONTEXT, AFF_STOP_CALLER } aff_stop;

typedef struct aff_outcome {
    aff_stop stop;
    int64_t prefilled, decoded; /* rows run as prompt; tokens chosen */
    uint64_t prefill_ns, decode_ns;
} aff_outcome;

/* Whether the run below would be refused before its first pass, and why. */
aff_status aff__engine_check(const aff_engine *e, const aff_request *r, aff_error *err);
/* Prompt, then up to n_predict tokens. Prefill is every prompt token but the last, which starts the decoding (its pass
 * gives the first token, so tokens decoded = passes made); with n_predict 0 it is the whole prompt. The last token
 * chosen is not run. `out` is valid after a failure too, as far as it came. */
aff_status aff__engine_run(aff_engine *e, const aff_request *r, const aff_events *ev, aff_outcome *out, aff_error *err);
#endif
