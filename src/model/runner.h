/* runner.h - the working memory of a pass and the pieces of the forward pass that more than one file uses. */
#ifndef AFF_MODEL_RUNNER_H
#define AFF_MODEL_RUNNER_H
#include "experts/plan.h"
#include "model/forward.h"
#include "model/net_internal.h"
#include "model/sweep.h"
#include "state/seq_internal.h"

/* Planes for Q = chunk rows; P = AFF_MAX_CHUNK: of one piece of attention. */
struct aff_runner {
    const aff_net *source; /* the network as opened: what sequences refer to */
    const aff_net *net;    /* the same, or `placed` */
    aff_net *placed;       /* with weights where the backend reads them */
    aff_expert_table experts, draft_experts; /* placed only */
    const int16_t (*shape_table)[1024][4];
    int ahead;       /* layers that experts are predicted ahead of their use, 0: none (backend.h, predict) */
    float *route2;                    /* [AFF_LOGIT_ROWS][E] a later layer's router */
    int32_t *forced, *guess; /* [layers][vocab][picks] in the backend's memory, of aff__runner_force; NULL: none */
    const int32_t *guess_host; /* the caller's; NULL: predictions are the routers' */
    bool can_fetch;            /* the device has room for experts fetched ahead */
    aff_backend *b;
    int chunk; /* most rows of a pass */
    aff_plan *plan;
    float *X;                         /* [Q][N][H] streams */
    float *u, *x, *f;                 /* [Q][H] collapsed, normalised, sublayer output; x and f with MTP-1: [Q][N][H] */
    float *post, *comb;               /* [Q][N] [Q][N][N] */
    float *qa, *q, *kv, *o, *low;     /* [Q][QR] [P][NH*D] [Q][D] [P][NH*D] [Q][G*OR] */
    float *c, *z, *ic, *iz;           /* [Q][2*D] compressor projections; [Q][2*ID] the indexer's */
    float *iq, *iw;                   /* [Q][IH*ID] [Q][IH] */
    int *sel;                         /* [Q][topk] */
    int32_t *dids;                    /* [Q] ids of the pass */
    float *route, *weights, *y;       /* [Q][E] [Q][K] [Q][K][H] */
    int32_t *picks;                   /* [Q][K] */
    float *sa, *sb;                   /* [Q][I] shared expert */
    float *tap;                       /* [Q][taps*H] */
    float *logits;                    /* [S*B][V] draft, S = AFF_MAX_DRAFTS; on a device at least [AFF_LOGIT_ROWS][V] */
    int32_t *drafts;                  /* [1+B][S] draft: ids before each place of the blocks, and the last ones */
    float *conf;                      /* [S*B] */
    float *markov;                    /* [S][MR], [S*B][H+MR], [S][V] */
    float *ones;                      /* [Q][N*N] identity matrices, then [Q][N] ones: hc_post as a plain sum */
    void *memory;                     /* all of the above */
    /* The rows of the pass in progress. */
    int n;
    int32_t *ids; /* [Q], as all of these */
    int64_t *pos;
    int *first; /* first row of the same sequence */
    aff_seq **seq;
    aff_layer_state **state;       /* the sequence's state of the layer at work */
    const aff_layer_state **table; /* and of all layers, in device memory */
    void *rows;                    /* memory of these */
    int layer;
    void *bounce; /* host copy of what is traced */
    uint64_t bounce_bytes;
    aff_trace_fn trace;
    void *trace_ctx;
    int64_t trace_pos; /* position of row 0 */
    aff_watch_fn watch; /* with h; else NULL */
    void *watch_ctx;
    float *h; /* [Q*K][I] what the experts' down multiplies, for watch; the watcher's */
    aff_route_fn on_route;
    void *route_ctx;
    /* On a device: the tiers behind its slab (residency.c); NULL: all experts were placed for good. */
    aff_tiers *tiers;
    bool in_pass;
    int32_t *used_id, *used_count; /* [E] scratch */
    bool streams; /* X holds the last layer's output of the last pass's rows */
};

/* How a block's queries see keys. */
typedef enum aff_reach {
    AFF_CAUSAL, /* window up to the row itself, selected compressed rows; rows are stored */
    AFF_DRAFT   /* the last W committed rows and all rows of the block (spec 13.2); nothing is stored */
} aff_reach;

enum { AFF_LOGIT_ROWS = 16, AFF__TRACED_ROW = 1024 };
/* The bytes of an array of the backend's memory in the host's, valid until the next call; NULL if they cannot be had. */
const void *aff__host_view(aff_runner *r, const void *data, uint64_t bytes);
/* place.c: r->placed; all experts, and their tables. */
aff_status aff__place(aff_runner *r, aff_error *err);
aff_status aff__place_experts(aff_runner *r, aff_error *err);
/* Room on the device for as many experts as fit (backend.h, slab; the sizes and shapes in `o` are filled in here). The card's side is for the owner
 * of the tiers, the trunk's layers and then the draft's stages. */
aff_status aff__runner_slab(aff_runner *r, const aff_slab_options *o, struct aff_card *card, aff_error *err);
/* residency.c: the tiers' pass around the backend's, nothing without them; a pass that was begun and failed is given up. */
aff_status aff__residency_begin(aff_runner *r, aff_error *err);
aff_status aff__residency_end(aff_runner *r, aff_error *err);
void aff__residency_abandon(aff_runner *r);
void aff__residency_free(aff_runner *r);
void aff__trace(aff_runner *r, const char *what, int layer, const void *data, int rows, int width);
/* r->x -> r->f: attention of one block for the rows of the pass (spec 7). */
aff_status aff__attention(aff_runner *r, const aff_block *b, int layer, aff_reach reach, aff_error *err);
/* r->x -> r->y: routed experts, unsummed; r->f: the shared one (spec 8). */
aff_status aff__moe(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_error *err);
/* Both sublayers with their hyper-connections: r->X in place (spec 5). */
aff_status aff__block(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_reach reach, aff_error *err);
/* Empties the pass; then adds n rows of a sequence at positions pos0... */
void aff__rows_begin(aff_runner *r, aff_trace_fn trace, void *trace_ctx);
void aff__rows_add(aff_runner *r, aff_seq *seq, const int32_t *ids, int n, int64_t pos0);
typedef enum aff_pass_kind { AFF_PASS_ROWS_FEW, AFF_PASS_DRAFT } aff_pass_kind;
uint64_t aff__pass_key(aff_pass_kind kind, int n);
/* After the last row was added, and before anybody relies on results. */
aff_status aff__rows_ready(aff_runner *r, aff_error *err);
aff_status aff__rows_done(aff_runner *r, aff_error *err);
/* Rows at..at+n-1 of the pass. */
aff_rowset aff__rows_part(const aff_runner *r, int at, int n);
/* r->state of every row: its sequence's layer l, or draft stage l. */
void aff__use_layer(aff_runner *r, int l);
void aff__use_stage(aff_runner *r, int l);
/* Logits [n][V] of rows from..from+n-1 of r->X (spec 9), in the host's memory. */
aff_status aff__head(aff_runner *r, int from, int n, float *logits, aff_error *err);
/* The same of streams X[n][N][H] by any head. */
aff_status aff__logits(aff_runner *r, const aff_hc *h, const float *norm, const float *X, int n, float *logits, aff_error *err);
/* Seeds the draft with r->tap rows from..n-1 (spec 13.2). */
void aff__draft_seed(aff_runner *r, int from);
#endif
