/* forward.h - one pass of the network over a batch of rows, and the drafts. */
#ifndef AFF_MODEL_FORWARD_H
#define AFF_MODEL_FORWARD_H
#include "experts/store.h"
#include "backend/device.h"
#include "model/net.h"
#include "state/seq.h"

/* Working memory of passes over one network: scratch planes and the thread pool. One thread at a time. */
typedef struct aff_runner aff_runner;
typedef struct aff_backend aff_backend;
aff_status aff__runner_create(aff_runner **out, const aff_net *net, int threads, aff_error *err); /* on the CPU; threads <= 0: one per CPU */
/* On any backend, which it takes over (also when it fails). Weights and experts are put into a device's memory. */
aff_status aff__runner_open(aff_runner **out, const aff_net *net, aff_backend *b, aff_error *err);
/* The same without the experts of a device, which aff__runner_experts brings before the first pass. */
aff_status aff__runner_open_bare(aff_runner **out, const aff_net *net, aff_backend *b, aff_error *err);
/* On what --device names. */
aff_status aff__runner_on(aff_runner **out, const aff_net *net, const aff_device_spec *spec, int threads, aff_error *err);
/* Where the experts of a device's runner go (docs/placement.md): the slab takes what its memory has left, so sequences come first. */
typedef struct aff_card_options {
    int64_t gpu_bytes;    /* of the slab, at most; -1: what is left */
    int64_t headroom;     /* bytes of the device that stay free; -1: 0.8 % */
    uint64_t host_bytes;  /* for the pool and staging slots, at most; a few slots in any case */
    bool draft_in_memory; /* the draft's experts stay off the card */
    int prefetch;         /* experts are fetched so many layers ahead of their use, by that layer's router; 0: not */
    const struct aff_tier_options *tiers; /* placement, loader, profile of the trunk, progress; the rest is decided here. NULL: defaults */
    void (*warn)(void *ctx, const char *line); /* NULL allowed */
    void *warn_ctx;
} aff_card_options;
aff_status aff__runner_experts(aff_runner *r, const aff_card_options *o, aff_error *err);
/* The device, without its experts. */
aff_status aff__runner_on_bare(aff_runner **out, const aff_net *net, const aff_device_spec *spec, int threads, aff_error *err);
/* Where the experts are: the device's tiers, else the network's. */
struct aff_tiers *aff__runner_tiers(const aff_runner *r);
/* The device it runs on; false: the host. On the thread that runs the passes. */
bool aff__runner_device(aff_runner *r, aff_device_view *out);
const aff_memory *aff__runner_memory(const aff_runner *r); /* where its sequences must lie */
/* Room for passes of up to `rows` rows, AFF_MAX_CHUNK .. AFF_MAX_PASS (at first: AFF_MAX_CHUNK); before the first pass. Changes no result. */
enum { AFF_MAX_PASS = 8192, AFF_DEVICE_CHUNK = 2048 /* what devices are given */ };
aff_status aff__runner_chunk(aff_runner *r, int rows, aff_error *err);
void aff__runner_free(aff_runner *r);
/* Memory of a runner for sequences of up to `positions` positions and passes of up to `rows` rows: planes of a pass, plan of its experts, and the most that the backend
 * grows to. The network may be an outline. */
typedef struct aff_runner_bytes {
    uint64_t planes, plan, backend;
} aff_runner_bytes;
aff_runner_bytes aff__runner_plan(const aff_net *net, int threads, int64_t positions, int rows);

/* Sees the router's choice of every layer and pass, before it is carried out, and may replace it: picks [T][K] (distinct, below the number
 * of experts) and weights [T][K]. logits [T][E] are the router's; `draft`: the layer is a draft stage. NULL: none. */
typedef struct aff_route {
    bool draft;
    int layer, rows, picks, experts; /* layer: of the trunk, or draft stage */
    const int64_t *pos;  /* [T] */
    struct aff_tiers *tiers; /* where the layer's experts are: layer tier_layer of experts/tiers.h */
    int tier_layer;
    const float *logits;
    const float *bias; /* [E] of the choice; NULL on hash layers */
    aff_scoring scoring;
    float scale;       /* what the weights of a row add up to */
    int32_t *pick;
    float *weight;
} aff_route;
/* What a logit ranks an expert by, bias included; for softmax the logit itself, whose order is the same. */
double aff__rank_value(aff_scoring scoring, double logit, double bias);
typedef void (*aff_route_fn)(void *ctx, const aff_route *r);
void aff__runner_on_route(aff_runner *r, aff_route_fn fn, void *ctx);
/* On a device, for measuring; the text is not the model's. From now on layer l of the trunk takes the experts that table[l][token][picks] says for a
 * row's token (as the hash layers do by themselves), weighted by the router. guess, the same shape: what is predicted, `ahead` layers ahead (NULL: nothing
 * is); it is read by every pass until the next call. First before any pass. */
typedef struct aff_forced {
    const int32_t *table, *guess;
    int ahead;
} aff_forced;
aff_status aff__runner_force(aff_runner *r, const aff_forced *f, aff_error *err);

/* Watches intermediate tensors (tests): called once per named tensor with rows x width float32 (or int32 for ids). */
typedef void (*aff_trace_fn)(void *ctx, const char *what, int layer, int row0, const void *data, int rows, int width);

/* From a trace's function, where "x_attn" (streams after a layer's attention) or "x" (at its end) is shown, on the CPU: what the router of layer l would say
 * if the streams changed no more before it (spec runtime 21). Ranking values [rows][experts], valid until the next pass's step; NULL for a layer
 * that chooses by token, or that is not there. */
const float *aff__runner_foresee(aff_runner *r, int l);

typedef struct aff_batch {
    int n;             /* rows, any number: passes of what the runner has room for are made inside */
    const int32_t *id; /* [n] token ids */
    aff_seq *seq;      /* rows are its positions pos .. pos+n-1 */
    int64_t want_from; /* logits for rows want_from .. n-1 (n-1: the last only; n: none; 0: all) */
    float *logits;     /* [n - want_from][vocab] */
    aff_trace_fn trace;
    void *trace_ctx;
} aff_batch;

/* Runs the rows and commits them: the sequence's position advances by n, and the draft, if loaded, is seeded with their taps.
 * After any error (ids out of range, positions beyond the capacity, no memory) the sequence is as it was before the call. */
aff_status aff__forward(aff_runner *r, const aff_batch *b, aff_error *err);

/* One pass over rows of several sequences, each in at most one of the batches; at most what the runner has room for in all. A row's result is
 * the same as in a pass of its own. Trace is that of batch 0 (rows of the whole pass). After an error every sequence is as it was. */
aff_status aff__forward_many(aff_runner *r, const aff_batch *b, int count, aff_error *err);

/* DSpark (spec 13.2): proposes B = draft_block tokens for positions P+1.. after the decided token id0 at position P = pos. conf[b] is
 * the confidence logit (NULL allowed), logits [B][vocab] after the Markov bias (NULL allowed). Changes no committed state. */
aff_status aff__draft_block(aff_runner *r, aff_seq *seq, int32_t id0, int32_t *ids, float *conf, float *logits, aff_trace_fn trace, void *trace_ctx,
                            aff_error *err);

/* The same for up to AFF_MAX_DRAFTS sequences in one pass. */
enum { AFF_MAX_DRAFTS = 16 };
typedef struct aff_draft_request {
    aff_seq *seq;
    int32_t id0;
    int32_t *ids;  /* [B] out */
    float *conf;   /* [B] out, or NULL */
    float *logits; /* [B][vocab] out, or NULL */
} aff_draft_request;
aff_status aff__draft_many(aff_runner *r, const aff_draft_request *d, int count, aff_trace_fn trace, void *trace_ctx, aff_error *err);

/* MTP-1 (spec 13.1): after aff__forward or aff__forward_many, next[i] the id that follows row i of that pass: logits
 * [n - want_from][vocab] of rows want_from .. n-1 (n: none) for the token after next. n: all rows of the last pass, several sequences' one
 * after another as in its batches; of an aff__forward call of several passes, those of its last one are there. The
 * sequences must be as that pass left them (a rollback comes afterwards; what rejected rows left is overwritten before it is read). */
aff_status aff__draft_mtp1(aff_runner *r, const int32_t *next, int n, int want_from, float *logits, aff_error *err);
#endif
