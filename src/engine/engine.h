/* engine.h - the one loop that owns a model and serves sequences. Requests are submitted from any thread and wait in a bounded
 * queue; one thread, the engine thread, steps: each step is one pass of the network, either a chunk of one prompt or one row
 * (with drafted rows after it) of every running answer. What a token looks like as text, and where it goes, is the caller's
 * affair: the loop speaks in events, which it calls on the engine thread with no lock held.
 *
 *     engine thread:   while (aff__engine_wait(e)) aff__engine_step(e);
 *     other threads:   aff__engine_submit(e, &request, &events, &id, &err);   aff__engine_cancel(e, id);
 *     to end:          aff__engine_stop(e);  join the engine thread;  aff__engine_free(e);
 *
 * A program with one request calls aff__engine_run, which submits and steps. No result depends on slots, neighbours, chunks or
 * drafts: a row is a function of its sequence's tokens, and a token of its row's logits, the request and the position. */
#ifndef AFF_ENGINE_ENGINE_H
#define AFF_ENGINE_ENGINE_H
#include "backend/device.h"
#include "engine/logits.h"
#include "experts/tiers.h"
#include "engine/sampler.h"
#include "engine/width.h"
#include "grammar/grammar.h"
#include "model/forward.h"

enum { AFF_MAX_SLOTS = 64, AFF_WIDTH_AUTO = -1 };

/* Proposes up to AFF_MAX_WIDTH tokens to follow ids[0..n): returns how many, conf[] their confidence logits. Tests put one in the
 * place of the model's draft. */
typedef int (*aff_propose_fn)(void *ctx, const int32_t *ids, int64_t n, int32_t *draft, float *conf);

/* Where beginnings of texts are kept between requests (state/prefix.h behind it; functions, so that the engine can be tested without
 * files). On the engine thread. */
typedef struct aff_engine_cache {
    void *ctx;
    /* Empties the sequence and brings it to the longest known beginning of ids[0..n) of at most `most` positions. *matched: how far the
     * text is known without a state to start from there, at least the position reached; the engine publishes there on its way if the
     * prompt goes on for 128 more rows. An error ends the request. */
    aff_status (*restore)(void *ctx, aff_seq *seq, const int32_t *ids, int64_t n, int64_t most, int64_t *matched, aff_error *err);
    /* The sequence has run exactly ids[0..pos), none of which will be taken back. */
    void (*publish)(void *ctx, const aff_seq *seq, const int32_t *ids);
} aff_engine_cache;

typedef struct aff_engine_options {
    int threads;     /* <= 0: one per CPU */
    aff_device_spec device; /* zeros: auto, which is the CPU until a plan spreads a model over cards */
    int slots;       /* sequences held at a time, at most AFF_MAX_SLOTS; 0: 4 */
    int queue;       /* requests that may wait for a slot; 0: 64 */
    int64_t context; /* positions of a sequence; <= 0: the model's (--kv-size) */
    int64_t kv_commit; /* positions backed from the start, all sequences together; 0: 65,536 or all there are, -1: none */
    int64_t kv_margin; /* positions backed at a time beyond that; 0: 16,384 */
    int64_t chunk;   /* prompt rows per pass, 1 .. AFF_MAX_PASS; 0: AFF_MAX_CHUNK, on a device AFF_DEVICE_CHUNK. At most AFF_MAX_CHUNK while an answer runs */
    int width;       /* drafted tokens a pass and sequence, 0 .. AFF_MAX_WIDTH, or AFF_WIDTH_AUTO; without a draft: 0 */
    aff_propose_fn propose; /* NULL: the network's draft, if it has one */
    void *propose_ctx;
    aff_engine_cache cache; /* functions NULL: none */
    aff_route_fn route; /* sees every layer's routes (model/forward.h); NULL: none */
    void *route_ctx;
    const struct aff_card_options *card; /* with a device: where its experts go (model/forward.h), read by create only; NULL: on it as many as fit, the
                                            rest in what the machine has left, then on disk */
    const aff_pass_times *times; /* times to choose widths by, instead of measured ones; NULL: measure. For repeatable checks */
    void (*warn)(void *ctx, const char *line); /* one line that a person should see; NULL allowed. On the engine thread */
    void *warn_ctx;
} aff_engine_options;

typedef struct aff_engine aff_engine;
/* `net` is borrowed and must outlive the engine. */
aff_status aff__engine_create(aff_engine **out, const aff_net *net, const aff_engine_options *o, aff_error *err);

/* What aff__engine_create takes (and what grows afterwards, at its largest), of a network that may be an outline. */
typedef struct aff_engine_bytes {
    int slots, threads;
    int64_t context, commit; /* of one sequence: positions, those backed from the start */
    aff_seq_plan seq;        /* of one sequence, `commit` positions backed */
    uint64_t full;           /* one sequence with all its positions backed */
    int rows; /* of a pass */
    aff_runner_bytes runner;
    uint64_t logits, sampler, slot_table;
    uint64_t chunk_logits;   /* made when somebody listens to a prompt's rows */
} aff_engine_bytes;
aff_status aff__engine_plan(aff_engine_bytes *out, const aff_net *net, const aff_engine_options *o, aff_error *err);
/* Requests that have not ended end as cancelled. Not while another thread is in any function of the engine. */
void aff__engine_free(aff_engine *e);
int64_t aff__engine_context(const aff_engine *e); /* positions a sequence has room for */

typedef enum aff_stop { AFF_STOP_LENGTH, AFF_STOP_EOS, AFF_STOP_CONTEXT, AFF_STOP_CALLER } aff_stop;

typedef struct aff_outcome {
    aff_stop stop;
    int64_t prefilled, decoded; /* rows run as prompt; tokens chosen */
    int64_t restored;           /* prompt rows that came out of the cache instead */
    uint64_t prefill_ns, decode_ns; /* from its slot to the last prompt row, from there to the end */
} aff_outcome;

/* A chosen token. */
typedef struct aff_token {
    int64_t pos;
    int32_t id;
    float logprob;              /* of id, and below of the n_top most likely ones; when the request asked for it */
    int n_top;
    const int32_t *top;         /* [n_top] */
    const float *top_logprob;   /* [n_top] */
} aff_token;

/* Events of one request, in the order of positions; any may be NULL. */
typedef struct aff_events {
    void *ctx;
    /* A chunk of the prompt has run: `done` of `total` rows. false stops the request. */
    bool (*progress)(void *ctx, int64_t done, int64_t total);
    /* Logits [rows][vocab] of positions pos .. pos+rows-1, for every row from request.logits_from on that belongs to the text
     * (rejected drafts do not). A failure ends the request with it. */
    aff_status (*logits)(void *ctx, int64_t pos, int rows, const float *logits, aff_error *err);
    /* false stops the request after this token. */
    bool (*token)(void *ctx, const aff_token *t);
    /* The last event, exactly one for every request accepted. status AFF_OK: it went to o->stop (AFF_STOP_CALLER: cancelled, or an
     * event said so); else it failed, err says why. o counts as far as it came. */
    void (*done)(void *ctx, aff_status status, const aff_outcome *o, const aff_error *err);
} aff_events;

typedef struct aff_request {
    const int32_t *prompt; /* [n_prompt] */
    int64_t n_prompt;      /* >= 1 */
    int64_t n_predict;     /* >= 0 */
    aff_sampling sampling;
    aff_adjust adjust; /* penalties and bias, before the sampling (logits.h) */
    bool logprobs;     /* token events carry them */
    int top_logprobs;  /* 0 .. AFF_MAX_TOP_LOGPROBS, with logprobs */
    bool ignore_eos;
    /* Holds the answer to a form: tokens it refuses are taken out of a row after bias and penalties, before the sampling. Of this
     * model's vocabulary; must live until `done`. Not with ignore_eos or forced tokens. NULL: none. */
    const aff_grammar *grammar;
    /* [n_forced] chosen in turn, cyclically, instead of the model's tokens; the end of sequence does not stop then. */
    const int32_t *forced;
    int64_t n_forced;
    int64_t logits_from; /* first position whose row goes to the logits event */
} aff_request;

/* The trunk's experts by token, for measuring (model/forward.h, aff__runner_force). Before the first request, or between requests. */
aff_status aff__engine_force(aff_engine *e, const aff_forced *f, aff_error *err);

/* ---- any thread ---- */

/* Whether ids[0..n) are in the vocabulary; and whether there is at least one and room for them after `used` of `context` positions. `what`
 * names them in the error. */
aff_status aff__check_ids(const char *what, const int32_t *ids, int64_t n, int vocab, aff_error *err);
aff_status aff__check_tokens(const char *what, const int32_t *ids, int64_t n, int64_t used, int64_t context, int vocab, aff_error *err);
/* Whether a request would be refused, and why: ids outside the vocabulary, parameters outside their range, a prompt longer than
 * the context. */
aff_status aff__engine_check(const aff_engine *e, const aff_request *r, aff_error *err);
/* Queues a copy of the request (events are copied too; what ctx points to must live until `done`). *id is its number from now on.
 * AFF_E_LIMIT when the queue is full, AFF_E_CANCELLED after aff__engine_stop, and what aff__engine_check says. */
aff_status aff__engine_submit(aff_engine *e, const aff_request *r, const aff_events *ev, uint64_t *id, aff_error *err);
/* Ends a request within one step, wherever it is; an id that has ended already is fine. */
void aff__engine_cancel(aff_engine *e, uint64_t id);
/* Whether its device has failed: then all requests have ended with that error (`why`, NULL allowed), and those submitted from now on are
 * refused with it. It is told once, through `warn`. */
bool aff__engine_broken(aff_engine *e, aff_error *why);
/* Lets aff__engine_wait return false; requests in progress stay where they are. */
void aff__engine_stop(aff_engine *e);

/* Counts of the speculation since the engine was made, as after the last step. Places are those of a drafted block. */
typedef struct aff_draft_stats {
    int64_t passes;                  /* decode rows of one sequence that were not drafted: passes it took part in */
    int64_t tokens;                  /* chosen in them */
    int64_t blocks, unused, skipped; /* drafts made, of those none verified; passes that went without on purpose */
    int64_t offered[AFF_MAX_WIDTH];  /* verified */
    int64_t accepted[AFF_MAX_WIDTH]; /* of those: it and all before it are the text's */
    int64_t marginal[AFF_MAX_WIDTH]; /* of those: equal to the choice at its row, whatever came before */
    int64_t rows[AFF_PASS_ROWS + 1]; /* passes of so many rows */
    int64_t drafts[AFF_PASS_ROWS + 1]; /* draft passes for so many sequences */
    aff_pass_times times;
} aff_draft_stats;
void aff__engine_draft_stats(aff_engine *e, aff_draft_stats *out);

/* The engine after its last step, for displays: counts since it was made, slots, and how hot the routed experts are. */
typedef struct aff_slot_view {
    bool busy, answering; /* busy and not answering: its prompt runs */
    uint64_t id;
    int64_t past, prompt, tokens; /* positions run; tokens of the prompt; tokens chosen */
} aff_slot_view;
typedef struct aff_pass_counts {
    int64_t prompt_rows, tokens;    /* run as prompts; chosen */
    uint64_t prompt_ns, decode_ns;  /* time of the passes that did it */
} aff_pass_counts;
typedef struct aff_snapshot {
    uint64_t at_ns; /* aff__now_ns when it was taken */
    int64_t context;
    int slots, running, waiting;
    int layers, experts, picks; /* of the trunk; picks a row and layer */
    uint64_t state_bytes;       /* memory of all slots' attention state */
    aff_pass_counts passes;
    aff_draft_stats draft;
    bool tiered;             /* experts have slots; else they are used where they lie, and the counters say hits alone */
    aff_tier_counters tiers;
    bool on_device; /* the model runs on `device`, not on the host */
    aff_device_view device;
    aff_slot_view slot[AFF_MAX_SLOTS];
} aff_snapshot;
/* heat [layers][experts] (experts/placement.h), NULL allowed. */
void aff__engine_snapshot(aff_engine *e, aff_snapshot *out, float *heat);
/* Where the routed experts of the trunk are, aff_tier [layers][experts]; not with every frame: on the host it asks the system. */
void aff__engine_tiers(aff_engine *e, uint8_t *tier);

/* ---- the engine thread ---- */

/* Sleeps until there is something to do; false: aff__engine_stop was called. */
bool aff__engine_wait(aff_engine *e);
/* At most one pass. Returns whether requests remain. */
bool aff__engine_step(aff_engine *e);
/* Submits and steps until that request is done. Prefill is every prompt token but the last, which starts the decoding (its pass
 * gives the first token); with n_predict 0 it is the whole prompt. The last token chosen is not run. `out` is valid after a
 * failure too. ev->done is called as for any request. */
aff_status aff__engine_run(aff_engine *e, const aff_request *r, const aff_events *ev, aff_outcome *out, aff_error *err);
#endif
