/* engine_internal.h - what the files of the scheduler share: jobs (requests), slots (sequences at work), the engine. */
#ifndef AFF_ENGINE_ENGINE_INTERNAL_H
#define AFF_ENGINE_ENGINE_INTERNAL_H
#include "engine/engine.h"
#include <pthread.h>

/* Where the status of a run goes when its job is gone. */
typedef struct aff_result {
    aff_status status;
    bool done;
    aff_outcome outcome;
    aff_error err;
} aff_result;

/* A request and its tokens so far. Belongs to the engine thread, but for `next` and `cancel` (under the engine's lock). */
typedef struct aff_job {
    struct aff_job *next;
    uint64_t id;
    bool cancel;
    aff_request r; /* prompt NULL: see ids; forced and bias point into `copies` */
    aff_events ev;
    aff_outcome out;
    uint64_t started, answering; /* clock: got its slot, prompt done */
    int32_t *ids;                /* [cap] prompt, then what was chosen */
    int64_t n, cap;
    int64_t promote; /* row of the prompt at which the state is published on the way; 0: none */
    int32_t *forced;
    aff_bias *bias;
    aff_occurrences seen; /* of ids[0..n), when a penalty is on */
    aff_matcher *matcher; /* NULL: no grammar */
    aff_match at;         /* after the answer so far */
    aff_result *result;
} aff_job;

/* A drafted block on its way to be scored against the text. */
typedef struct aff_guess {
    int64_t pos; /* of id[0] */
    int n, right; /* right < n: id[right] is the next to be compared */
    int32_t id[AFF_MAX_WIDTH];
    float conf[AFF_MAX_WIDTH];
} aff_guess;

typedef enum aff_phase { AFF_IDLE, AFF_PREFILL, AFF_ANSWER } aff_phase;

/* A sequence. While it answers, all of job->ids but the last have run. */
typedef struct aff_slot {
    aff_job *job; /* written under the engine's lock */
    aff_phase phase;
    aff_seq *seq;
    uint64_t turn; /* when it last took part in a pass */
    /* Proposals for positions job->n .. of which the pass verifies `take`. */
    int drafted, take;
    int32_t draft[AFF_MAX_WIDTH];
    float conf[AFF_MAX_WIDTH];
    int32_t choice[AFF_MAX_WIDTH + 1]; /* of each row of the pass, -1: its logits are no distribution */
    aff_error choice_err;              /* of the first such row */
    const float *logits;               /* [1 + take][vocab] */
    aff_match at;                      /* with a grammar: of the row that is being chosen from */
    aff_guess guess[AFF_MAX_WIDTH + 1]; /* a block ends within AFF_MAX_WIDTH passes, so this many are open at most */
    int next_guess;
    aff_leaning own;
    /* Whether drafting pays: what the last drafts were worth, in tokens (a running mean); passes to go without. */
    double worth;
    int skip;
} aff_slot;

struct aff_engine {
    const aff_net *net;
    const aff_config *cfg;
    aff_engine_options o; /* zeros replaced by the defaults */
    int64_t context;
    aff_draft_kind draft; /* AFF_DRAFT_NONE too when o.propose is in its place */
    int block;            /* tokens that one draft gives */
    aff_runner *runner;
    aff_grower *grower;
    aff_sampler *sampler;
    float *rows;     /* [AFF_PASS_ROWS][vocab] of a decode pass */
    float *chunk;    /* [AFF_MAX_CHUNK][vocab], made when a caller first listens to a prompt's rows */
    float *adjusted; /* [vocab] */
    float *mtp;      /* [AFF_PASS_ROWS][vocab], MTP-1 only */
    int32_t *block_ids;
    float *block_conf; /* [AFF_MAX_DRAFTS][block] */
    aff_slot *slot;    /* [o.slots] */
    uint64_t turns;
    int owed; /* decode passes before the next chunk of a prompt */
    uint64_t chunk_ns;
    aff_calibration all;
    aff_draft_stats stats;
    double recent_tokens, recent_ns; /* fading sums; their quotient is the price of time */
    double worth;                    /* as in the slots, over all of them */
    int pause;                       /* passes without a draft after the next bad one */
    int64_t scored, right;           /* first places of drafts */
    double draft_ns; /* what drafting took in the pass at hand, by the tables */
    bool warned;
    aff_pass_counts passes;
    bool on_device;
    aff_device_view device;

    pthread_mutex_t lock; /* everything below, aff_job.next and cancel, the pointers slot[].job */
    pthread_cond_t wake;
    aff_job *head, *tail;
    int waiting;
    uint64_t last_id;
    bool stopped;
    bool broken; /* the device is; why */
    aff_error why;
    aff_snapshot view;
};

/* snapshot.c. Asks the device how it is (without the lock: a driver takes its time); then copies what displays see, under the lock. */
void aff__snapshot_look(aff_engine *e);
void aff__snapshot_publish(aff_engine *e);

/* Ends the slot's request and frees the slot. err NULL unless status says failure. */
void aff__slot_finish(aff_engine *e, aff_slot *s, aff_status status, aff_stop stop, const aff_error *err);
/* The token that follows ids[0..n) of the slot's text (drafted ones after job->ids counted in by the caller), from its row. */
aff_status aff__slot_choose(aff_engine *e, aff_slot *s, const float *logits, int64_t n, int32_t *id, aff_error *err);
/* job->ids += id, and its occurrences. */
aff_status aff__job_push(aff_job *j, int32_t id, aff_error *err);

/* decode.c: a pass over every running answer (those at the end of the context end first). */
void aff__decode_pass(aff_engine *e);
/* After a pass over rows of prompts (MTP-1): the draft's own layer over them. next[n]. The last row's proposal goes to the slot
 * if `propose`. */
aff_status aff__mtp_prompt(aff_engine *e, aff_slot *s, const int32_t *next, int n, bool propose, aff_error *err);
/* Forgets what the last request left in the slot. */
void aff__draft_reset(aff_engine *e, aff_slot *s);
#endif
