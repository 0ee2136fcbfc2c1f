/* runner.h - the working memory of a pass and the pieces of the forward pass that more than one file uses. */
#ifndef AFF_MODEL_RUNNER_H
#define AFF_MODEL_RUNNER_H
#include "experts/heat.h"
#include "experts/plan.h"
#include "model/forward.h"
#include "model/net_internal.h"
#include "model/sweep.h"
#include "state/seq_internal.h"

/* Planes for Q = AFF_MAX_CHUNK rows. */
struct aff_runner {
    const aff_net *net;
    aff_backend *b;
    aff_plan *plan;
    aff_heat heat;                    /* of the trunk's experts */
    float *X;                         /* [Q][N][H] streams */
    float *u, *x, *f;                 /* [Q][H] collapsed, normalised, sublayer output */
    float *post, *comb;               /* [Q][N] [Q][N][N] */
    float *qa, *q, *kv, *o, *low;     /* [Q][QR] [Q][NH*D] [Q][D] [Q][NH*D] [Q][G*OR] */
    float *c, *z;                     /* [Q][2*D] compressor projections, the indexer's after the layer's own */
    float *iq, *iw;                   /* [Q][IH*ID] [Q][IH] */
    int *sel;                         /* [Q][topk] */
    aff_keyset *keys;                 /* [Q] */
    float *route, *weights, *y;       /* [Q][E] [Q][K] [Q][K][H] */
    int32_t *picks;                   /* [Q][K] */
    float *sa, *sb;                   /* [Q][I] shared expert */
    float *tap;                       /* [Q][taps*H] */
    float *logits;                    /* [S*B][V] draft, S = AFF_MAX_DRAFTS */
    float *markov;                    /* [S][MR], [S*B][H+MR], [S][V] */
    float *ones;                      /* [Q][N*N] identity matrices, then [Q][N] ones: hc_post as a plain sum */
    void *memory;                     /* all of the above */
    /* The rows of the pass in progress. */
    int n;
    int32_t ids[AFF_MAX_CHUNK];
    int64_t pos[AFF_MAX_CHUNK];
    int first[AFF_MAX_CHUNK]; /* first row of the same sequence */
    aff_seq *seq[AFF_MAX_CHUNK];
    aff_layer_state *state[AFF_MAX_CHUNK]; /* the sequence's state of the layer at work */
    aff_trace_fn trace;
    void *trace_ctx;
    int64_t trace_pos; /* position of row 0 */
    aff_watch_fn watch; /* with h; else NULL */
    void *watch_ctx;
    float *h; /* [Q*K][I] what the experts' down multiplies, for watch; the watcher's */
    aff_route_fn on_route;
    void *route_ctx;
    bool streams; /* X holds the last layer's output of the last pass's rows */
};

/* How a block's queries see keys. */
typedef enum aff_reach {
    AFF_CAUSAL, /* window up to the row itself, selected compressed rows; rows are stored */
    AFF_DRAFT   /* the last W committed rows and all rows of the block (spec 13.2); nothing is stored */
} aff_reach;

void aff__trace(aff_runner *r, const char *what, int layer, const void *data, int rows, int width);
/* r->x -> r->f: attention of one block for the rows of the pass (spec 7). */
aff_status aff__attention(aff_runner *r, const aff_block *b, int layer, aff_reach reach, aff_error *err);
/* r->x -> r->f: experts (spec 8). */
aff_status aff__moe(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_error *err);
/* Both sublayers with their hyper-connections: r->X in place (spec 5). */
aff_status aff__block(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_reach reach, aff_error *err);
/* Empties the pass; then adds n rows of a sequence at positions pos0... */
void aff__rows_begin(aff_runner *r, aff_trace_fn trace, void *trace_ctx);
void aff__rows_add(aff_runner *r, aff_seq *seq, const int32_t *ids, int n, int64_t pos0);
/* r->state of every row: its sequence's layer l, or draft stage l. */
void aff__use_layer(aff_runner *r, int l);
void aff__use_stage(aff_runner *r, int l);
/* Logits [n][V] of rows from..from+n-1 of r->X (spec 9). */
void aff__head(aff_runner *r, int from, int n, float *logits);
/* Seeds the draft with r->tap rows from..n-1 (spec 13.2). */
void aff__draft_seed(aff_runner *r, int from);
#endif
