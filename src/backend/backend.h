/* backend.h - the op table: what a device must compute for the forward pass. model/ calls nothing else.
 *
 * All arrays are float32 in the backend's memory (`mem`), row-major, T rows unless said otherwise; weights are where `place` put
 * them; the arrays of a rowset are the host's. An op computes each row from that row's inputs alone, in an order that depends on
 * shapes only (design 3, promises 0 and 2). Ops cannot fail once their operands were checked at load, except those that return a
 * status; what goes wrong on a device comes out of `finish`. Nothing between `begin` and `finish` waits for a device. */
#ifndef AFF_BACKEND_BACKEND_H
#define AFF_BACKEND_BACKEND_H
#include "backend/device.h"
#include "backend/memory.h"
#include "backend/types.h"
#include "base/status.h"

typedef struct aff_backend aff_backend;

/* Hyper-connection weights of one sublayer or of a head (spec 6). */
typedef struct aff_hc {
    aff_weight fn; /* [(2+N)N][N*H], head: [N][N*H] */
    const float *scale, *base;
    int streams, iters;
    float eps, rms_eps;
} aff_hc;

/* Rotary table: pairs = R/2 frequencies (spec 7.1). */
typedef struct aff_rope {
    const float *freq;
    int pairs;
} aff_rope;

/* A compressor (spec 7.3): groups of `ratio` tokens; overlap: ratio 4's second look-back group. */
typedef struct aff_compressor {
    int ratio, dim;
    bool overlap, index; /* index: Hadamard + A4 instead of A8, and the indexer's share of the state */
    const float *ape, *norm;
    float eps;
} aff_compressor;

typedef struct aff_compression {
    const aff_compressor *k;
    const float *c;
    float *z;
} aff_compression;

typedef struct aff_router {
    aff_scoring scoring;
    int experts, picks;
    float scale;
    const float *bias;   /* [experts]; NULL on hash layers */
    const int32_t *hash; /* [vocab][picks]; NULL on other layers */
} aff_router;

/* ---- experts of which a device holds a part (docs/placement.md): backends that plan their own work ---- */

struct aff_card; /* experts/tiers.h */
struct aff_load; /* experts/loader.h */
struct aff_tier_counters;

typedef struct aff_slab_options {
    uint64_t pitch, bytes;      /* from slot to slot, a multiple of 256; of an expert in it */
    uint32_t plane[3][3];       /* in a slot (aff_expert_table) */
    int layers, experts, picks; /* of the table: the trunk's layers, then the draft's stages */
    int scratch;                /* slots for experts fetched ahead of their layer; 0: none. Only where not all experts fit */
    int ahead;                  /* with them: layers from where experts are predicted to where they are used, at least 1 */
    int64_t spare;              /* slots beyond one an expert, for moves; only where not all experts fit */
    uint64_t most;              /* bytes of the slab, at most */
    uint64_t keep;              /* bytes of the device that stay free; UINT64_MAX: 0.8 % of all */
    void (*warn)(void *ctx, const char *line); /* NULL allowed */
    void *warn_ctx;
} aff_slab_options;

/* What the device asks of whoever knows where the experts are. */
typedef struct aff_slab_host {
    void *ctx;
    /* Begins to bring expert l->expert of layer l->layer to l->to; l->done is called when it is there, or cannot be had. */
    void (*fetch)(void *ctx, struct aff_load *l);
    /* The slab loses its slots from `slots` on: on return nothing is in them and the table says so. Between passes. NULL: it cannot. */
    aff_status (*resize)(void *ctx, int64_t slots, aff_error *err);
    uint8_t *staging; /* slots for experts on disk, in memory that was attached; at least `picks` if an expert can be on disk */
    int64_t staging_slots;
} aff_slab_host;

/* What one mixture of experts of the last pass used. */
typedef struct aff_experts_used {
    int layer, rows, picks;
    const int32_t *pick;  /* [rows][picks]; NULL for passes of many rows, which give */
    const int32_t *count; /* [experts] rows that chose each */
} aff_experts_used;

struct aff_backend {
    const char *name;
    aff_numerics numerics;
    const aff_memory *mem;

    /* Puts bytes of a weight where the ops read them and changes *p; NULL: weights are read where they lie. */
    aff_status (*place)(aff_backend *b, const void **p, uint64_t bytes, const char *what, aff_error *err);
    /* Room for experts, as much as the options and free memory allow: fills in the card's side and the table, where everything is on disk at
     * first. After every other memory of the device was taken; once. Then slab_host, before any pass (NULL: nothing will be asked any more). */
    aff_status (*slab)(aff_backend *b, const aff_slab_options *o, struct aff_card *card, aff_expert_table *table, aff_error *err);
    aff_status (*slab_host)(aff_backend *b, const aff_slab_host *h, aff_error *err);
    /* Number i of the mixtures of the pass that finish ended, in their order; false: there were no more. */
    bool (*used)(aff_backend *b, int i, aff_experts_used *out);
    /* After a pass that failed with AFF_E_NOMEM and was given up: true if there is now room for what it missed. NULL: never. */
    bool (*make_room)(aff_backend *b);
    /* Adds the fields marked (card) of experts/tiers.h since the last call. */
    void (*counted)(aff_backend *b, struct aff_tier_counters *out);
    /* Experts fetched ahead of their layer, in passes of up to repeat_rows rows; NULL where that is not done. After begin: the pass will use these of a
     * trunk layer (or is likely to). Before a layer's route: what `r`, from its logits [T][experts] or its table, chooses is likely to be what `layer`
     * uses, `ahead` mixtures further on. Neither changes a result. */
    void (*expect)(aff_backend *b, int layer, const int32_t *experts, int n);
    void (*predict)(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int layer, int ahead);
    int repeat_rows; /* most rows of a pass that repeat is for: as many as find room for experts on disk */
    /* Rows of the pass to come: every rowset until the next begin is these or the last of these. NULL allowed, as is finish. */
    aff_status (*begin)(aff_backend *b, const aff_rowset *rs, aff_error *err);
    aff_status (*finish)(aff_backend *b, aff_error *err);
    /* Runs `ops`, which calls ops of this table alone, between begin and finish. Calls with one key give the same ops on the same arrays;
     * only what those arrays and the rows of the pass hold differs. So a device may record them once and repeat the record. NULL: just call. */
    aff_status (*repeat)(aff_backend *b, uint64_t key, aff_status (*ops)(void *ctx, aff_error *err), void *ctx, aff_error *err);

    /* X[T][N][H] = embed[ids[t]] in every stream; ids in the backend's memory. */
    void (*embed)(aff_backend *b, const aff_weight *w, const int32_t *ids, int T, int streams, float *X);
    /* u[T][H], post[T][N], comb[T][N][N] from the streams; x = RMS norm of u with weight `norm`. */
    void (*hc_pre)(aff_backend *b, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps, float *u, float *x, float *post, float *comb);
    /* X'[k] = post[k] f + sum_j comb[j][k] X[j], in place; with y[T][K][H] (else NULL) f is what sum_experts makes of it. f itself may change. */
    void (*hc_post)(aff_backend *b, float *f, const float *y, int K, const float *post, const float *comb, int T, int streams, int H, float *X);
    void (*hc_head)(aff_backend *b, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps, float *u, float *x);
    /* y = w x / rms(x); y may be x. */
    void (*rmsnorm)(aff_backend *b, const float *x, const float *w, float eps, int T, int n, float *y);
    /* Products that do not depend on each other, in any order. */
    void (*products)(aff_backend *b, const aff_product *p, int count, int T);
    /* q[n][heads][D]: per-head RMS without weight, then rope of the tail. */
    void (*q_finish)(aff_backend *b, const aff_rowset *rs, float *q, int heads, int D, float eps, const aff_rope *rope);
    /* kv[n][D]: RMS with weight, rope, A8(64) on the head (not in math), bf16 tail (fast); `store`: into the raw rings. */
    void (*kv_finish)(aff_backend *b, const aff_rowset *rs, float *kv, int D, const float *norm, float eps, const aff_rope *rope, bool store);
    /* Adds ape to z, forms every group that these rows complete, then appends c and z to the history. c, z: [T][coff*dim]; one or two
     * compressors (a layer's and its indexer's), whose c and z are their own. */
    void (*compress)(aff_backend *b, const aff_compression *k, int count, const aff_rope *rope, const aff_rowset *rs);
    /* Indexer queries iq[n][heads][dim]: rope, then Hadamard and A4 (not in math). */
    void (*index_query)(aff_backend *b, const aff_rowset *rs, float *iq, int heads, int dim, const aff_rope *rope);
    /* sel[T][topk]: min(topk, (pos+1)/ratio) best groups, ascending; w[T][heads] is scaled by 1/sqrt(dim*heads). score: NULL or [T][ld]
     * to receive the scores. Rows with no more than topk groups select all of them without scoring. */
    aff_status (*index_select)(aff_backend *b, const aff_rowset *rs, const float *iq, const float *w, int heads, int dim, int ratio, int topk,
                               int *sel, aff_error *err);
    /* o[n][heads][D] (spec 7.5), then inverse rope of each head's tail. */
    aff_status (*attend)(aff_backend *b, const aff_rowset *rs, const aff_view *v, const float *q, int heads, int D, const float *sink, const aff_rope *rope,
                         float *o, aff_error *err);
    /* picks[T][K] (order of choice) and weights[T][K] from the router logits[T][E]; ids in the backend's memory. */
    void (*route)(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int T, int32_t *picks, float *weights);
    /* y[T][K][H], unsummed. Either over the host's plan, or (`routed`, not NULL where the backend plans itself) over picks and weights. */
    aff_status (*experts)(aff_backend *b, const aff_expert_shape *s, const aff_moe_plan *p, const float *x, int T, int K, float *y, aff_error *err);
    void (*routed)(aff_backend *b, const aff_expert_shape *s, const aff_expert_table *e, int layer, const int32_t *picks, const float *weights,
                   const float *x, int T, int K, float *y);
    /* a = clamp, silu(a) * clamp(b). a, bb: [T][n]. */
    void (*swiglu)(aff_backend *b, float *a, const float *bb, float limit, int T, int n);
    /* f[T][H] += sum_k y[T][k][H] first, the value of f (the shared expert) last. */
    void (*sum_experts)(aff_backend *b, const float *y, int T, int K, int H, float *f);
    /* tap[t*ld .. +H] = mean over streams. */
    void (*stream_mean)(aff_backend *b, const float *X, int T, int streams, int H, float *tap, int64_t ld);
    /* id[t] = the lowest index of the largest of x[t][0..n). */
    void (*argmax)(aff_backend *b, const float *x, int T, int n, int32_t *id);
    /* The device; on the thread that runs the passes. NULL: it is the host. */
    void (*view)(aff_backend *b, aff_device_view *out);
    void (*free)(aff_backend *b);
};

static inline void aff__matmul(aff_backend *b, const aff_weight *w, const float *x, int T, float *y)
{
    b->products(b, &(aff_product){.w = w, .x = x, .y = y}, 1, T);
}

/* The CPU. threads <= 0: one per allowed CPU. */
aff_status aff__cpu_backend(aff_backend **out, aff_numerics num, int threads, aff_error *err);
/* The most memory that it takes for passes of `rows` rows: widths, router picks, the largest number of groups that an indexer scores. */
typedef struct aff_backend_need {
    int rows, hidden, inter, picks, head_dim, rope_dim, index_heads;
    int64_t groups;
} aff_backend_need;
uint64_t aff__cpu_backend_bytes(aff_numerics num, int threads, const aff_backend_need *n);
#endif
