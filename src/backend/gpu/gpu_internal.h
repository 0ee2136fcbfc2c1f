/* gpu_internal.h - the device backend's own state, shared by its files. */
#ifndef AFF_BACKEND_GPU_GPU_INTERNAL_H
#define AFF_BACKEND_GPU_GPU_INTERNAL_H
#include "backend/gpu/gpu.h"
#include "experts/loader.h"
#include "experts/tiers.h"
#include "state/seq.h" /* AFF_MAX_CHUNK, AFF_MAX_ROLLBACK */
#include <pthread.h>

/* Memory of the backend that grows to what is asked of it and is never read across ops of different layers. */
typedef enum aff_gpu_scratch {
    AFF_G_MIXES, /* [T][(2+N)N] and sums of squares, or the cuts of both */
    AFF_G_STREAMS, /* [T][N][H] of few rows */
    AFF_G_XQ,    /* int8 of the experts' input, with scales */
    AFF_G_H,     /* [T*K][inter] float32 */
    AFF_G_HQ,    /* the same as int8, with scales */
    AFF_G_PLAN,  /* items, rows, ranks, weights */
    AFF_G_SCORE, /* [T][groups] */
    AFF_G_PART,  /* attention by cuts */
    AFF_G_SCRATCHES
} aff_gpu_scratch;

/* An allocation, and room for the bf16 form of every float in it: that of base[i] is bf16[i]. */
typedef struct aff_gpu_region {
    struct aff_gpu_region *next;
    float *base;
    uint16_t *bf16;
    uint64_t bytes;
} aff_gpu_region;

/* Ops recorded under a key; the first call of a key only runs them, so that all memory they need is there. */
typedef struct aff_gpu_record {
    uint64_t key, used; /* used: by the pass of that number */
    aff_graph *graph;   /* NULL: seen once */
    int moes;           /* plans in it, and their */
    struct aff_gpu_moe *moe;
} aff_gpu_record;

enum { AFF_G_RECORDS = 64 };

enum { AFF_G_ROWS = 8192 /* of a pass */, AFF_G_FORMS = 32, AFF_G_STAGE = 1 << 20, AFF_G_COUNTS = 160, AFF_G_BEST = 32 };

/* A plan of the pass: which layer's (of the slab's table), for how many rows and picks; ahead: it guessed for the plan so many further on. */
typedef struct aff_gpu_moe {
    int layer, T, K, ahead;
    bool few; /* by the kernels that read experts where they are */
} aff_gpu_moe;

/* gpu_slab.c: slots of experts in the device's memory, from 0 on as many as there are chunks committed for, and the table. */
typedef struct aff_gpu_slab {
    aff_slab_options o;
    char *range; /* reserved for one slot an expert and the spare ones */
    uint64_t range_bytes, chunk, committed, keep; /* keep: of the device's memory stay free */
    int64_t slots;
    uint64_t *table, *mirror; /* [layers][experts] device, host */
    int *elsewhere;           /* [layers] experts that are not on the card */
    int64_t away;             /* of all layers */
    int few_rows;             /* that the kernels of few rows take while some are: requests find room in the staging slots */
    aff_stream *moves;        /* the mover's copies */
    bool attached, pinned;    /* the pool is known; kernels can read it */
    aff_slab_host host;
    bool hosted;
    int32_t *log; /* pinned [AFF_G_COUNTS][log_row] */
    int log_row;
    aff_tier_counters count; /* since aff__gpu_slab_counts last */
} aff_gpu_slab;

/* gpu_stage.c: the host's end of the ring of requests for experts on disk (args.h, aff_k_ring). */
typedef struct aff_gpu_stage {
    uint8_t *slots_at, *own; /* staging slots; allocated here, or NULL */
    uint32_t slots;
    uint64_t *entry;              /* pinned, all three */
    uint32_t *ready, *head;
    uint32_t *last;               /* device */
    aff_load *load;               /* [slots] */
    uint32_t *ticket;             /* [slots] of the load */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool running, stop, pass; /* under the lock; pass: one is in flight, so the ring is polled */
    int open;                 /* loads under way */
    uint32_t seen;            /* under the lock: tickets up to this one were begun */
    aff_status status;        /* under the lock: the first load that failed since the last pass */
    aff_error err;
} aff_gpu_stage;

/* gpu_stream.c: slots on the card through which experts pass for the many rows of a prompt, in two groups. */
typedef struct aff_gpu_groups {
    char *at;          /* in passes of few rows, both groups: where experts are brought to (args.h, aff_k_bring) */
    uint32_t *arrived; /* [2 * each] of them */
    int each;          /* slots of a group */
    aff_stream *copies;
    aff_event *planned, *copied[2], *used[2];
    bool busy[2]; /* used[] was recorded */
} aff_gpu_groups;

/* gpu_fetch.c: slots on the card for experts fetched ahead of their layer, and the wishes for them (args.h, aff_k_fetch). */
typedef struct aff_gpu_wish {
    uint32_t number, due; /* layer * experts + expert (in a slot: plus 1, 0: none); the plan it is for */
} aff_gpu_wish;
typedef struct aff_gpu_guess {
    aff_router router;
    const float *logits;
    const int32_t *ids;
    int layer, ahead;
    bool pending; /* for the next route and plan */
} aff_gpu_guess;
enum { AFF_G_WISHES = 512 };
typedef struct aff_gpu_fetch {
    char *at; /* [slots] device */
    int slots;
    uint64_t *begun;                                 /* device, with */
    uint32_t *ready, *plans, *last;
    int32_t *guesses;                                /* device [AFF_K_FEW][picks] */
    uint64_t *entry, *word;                          /* pinned, with */
    uint32_t *head, *progress;
    int32_t *log;                                    /* [AFF_G_COUNTS][log_row] guesses of the pass's plans */
    int log_row;
    aff_gpu_guess guess;
    aff_stream *copies;
    aff_event *done[2];
    uint32_t seen, issued; /* the thread's */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* Under the lock. */
    bool running, stop, pass, busy;
    uint32_t idle; /* the last plan when the pass began */
    aff_gpu_wish wish[AFF_G_WISHES], slot[AFF_K_SCRATCH];
    int n; /* wishes */
    int64_t asked, cancelled, served, copied; /* since the last end; served: with or without a copy */
    aff_status status;
    aff_error err;
} aff_gpu_fetch;

typedef struct aff_gpu {
    aff_backend base;
    aff_memory mem; /* base.mem */
    char results[64];
    aff_rt *rt;
    aff_stream *s;
    bool amd;
    bool hopper; /* sm_90a code runs there */
    aff_status status; /* of the first call that failed since finish */
    aff_error err;
    aff_gpu_region *regions;
    /* Weights: chunks, filled one after another, each for one purpose. */
    struct aff_gpu_chunk *chunks;
    uint64_t chunk_bytes;
    /* Pinned memory through which small writes go, filled from the front. */
    char *stage;
    uint64_t staged;
    /* The pass. */
    int n;
    int64_t max_pos;
    bool few_each; /* no sequence has more than AFF_MAX_ROLLBACK rows */
    int64_t *pos;  /* [AFF_G_ROWS] device */
    int32_t *first;
    const aff_layer_state **table;
    int32_t *counts;      /* [AFF_G_COUNTS][AFF_K_PLAN_COUNTS] device */
    int32_t *host_counts; /* pinned */
    int moes;             /* plans made in the pass */
    aff_gpu_moe moe[AFF_G_COUNTS];
    int used_moes;        /* of the pass before, for `used` */
    int link_blocks;      /* of the streaming kernels that read experts over the link */
    pthread_t owner;      /* the thread that runs passes */
    aff_gpu_slab *slab;   /* NULL: experts are where `place` put them, all of them */
    aff_gpu_stage *stages;
    aff_gpu_groups groups;
    aff_gpu_fetch *fetch; /* NULL: nothing is fetched ahead */
    aff_gpu_record record[AFF_G_RECORDS];
    int n_records;
    uint64_t passes, repeated;
    bool recording;
    uint64_t looked, free_memory; /* clock of the last look at how much of the device's memory is free, and what it was */
    uint32_t *best;       /* argmax's own: counts [AFF_G_ROWS], zero between launches, and parts [AFF_G_ROWS][3 * AFF_G_BEST] */
    /* Float arrays whose bf16 form is in place. */
    const float *form[AFF_G_FORMS];
    int n_forms;
    const float *q_of; /* the array whose int8 form is in AFF_G_XQ */
    aff_k_hc_post post; /* of few rows, waits for the hc_pre that follows; X NULL: none */
    aff_k_route choice; /* of few rows, waits for the plan that follows; picks NULL: none */
    int choice_rows;
    /* Small jobs that wait for neighbours; any other launch or transfer sends them off first. */
    aff_k_small small;
    uint64_t small_smem;
    struct {
        const float *in, *out; /* what each reads, writes */
        int64_t n;             /* floats of out */
    } small_io[AFF_K_JOBS];
    struct {
        void *p;
        uint64_t bytes, wish; /* wish: more than there was room for */
    } scratch[AFF_G_SCRATCHES];
} aff_gpu;

static inline aff_gpu *aff__gpu_of(aff_backend *b)
{
    return (aff_gpu *)b;
}

/* Notes the first failure. */
void aff__gpu_note(aff_gpu *g, aff_status s, const aff_error *err);
void aff__gpu_launch(aff_gpu *g, aff_kernel k, int64_t grid, unsigned block, uint64_t smem, const void *args);
/* A small job of few rows: `blocks` blocks of 256 threads, that read `in` and write out[n]. Its arguments follow at the address returned, to be filled in at once. */
aff_k_job *aff__gpu_small(aff_gpu *g, int kind, int64_t blocks, uint64_t smem, const float *in, const float *out, int64_t n);
/* Sends off what waits. */
void aff__gpu_flush(aff_gpu *g);
/* All of its blocks run side by side. */
void aff__gpu_launch_together(aff_gpu *g, aff_kernel k, int64_t grid, unsigned block, uint64_t smem, const void *args);
/* Forgets recorded passes: an address in them is no longer what it was. */
void aff__gpu_drop_records(aff_gpu *g);
/* `bytes` of scratch; NULL after a failure was noted. */
void *aff__gpu_scratch(aff_gpu *g, aff_gpu_scratch which, uint64_t bytes);

/* gpu_forms.c. The bf16 form of x: where it is kept (NULL outside every allocation); noting that a kernel wrote it;
 * forgetting the forms of n floats from x that were written; and the form itself, converted if it is not in place. */
uint16_t *aff__gpu_bf16(aff_gpu *g, const float *x);
void aff__gpu_has_form(aff_gpu *g, const float *x);
void aff__gpu_wrote(aff_gpu *g, const float *x, int64_t n);
const uint16_t *aff__gpu_form(aff_gpu *g, const float *x, int T, int n);

/* gpu_memory.c */
aff_status aff__gpu_memory_init(aff_gpu *g, aff_error *err);
void aff__gpu_memory_free(aff_gpu *g);
aff_status aff__gpu_place(aff_backend *b, const void **p, uint64_t bytes, const char *what, aff_error *err);

/* gpu_slab.c */
void aff__gpu_slab_ops(aff_backend *b);
void aff__gpu_slab_free(aff_gpu *g);
/* Before an allocation between passes: the slab gives back what is missing, if it can (docs/placement.md). What stays free for the system is not used
 * up while the slab has something left. */
void aff__gpu_make_room(aff_gpu *g, uint64_t bytes);
/* Whether `bytes` in place of `old` leave free what is to stay free; without a slab that could give way they may always be tried. */
bool aff__gpu_may_take(aff_gpu *g, uint64_t bytes, uint64_t old);
/* Row of the slab's table that a layer of `e` is, -1 without a slab. */
int aff__gpu_slab_layer(const aff_gpu *g, const aff_expert_table *e, int layer);
/* The plan's log of the pass's plan number `i`. */
int32_t *aff__gpu_slab_log(const aff_gpu *g, int i);
void aff__gpu_slab_finish(aff_gpu *g);

/* gpu_stage.c */
aff_status aff__gpu_stage_open(aff_gpu *g, int64_t slots, aff_error *err);
void aff__gpu_stage_free(aff_gpu *g);
aff_status aff__gpu_stage_begin(aff_gpu *g, aff_error *err);
/* After the stream was waited for; the error of a load that failed. */
aff_status aff__gpu_stage_end(aff_gpu *g, aff_error *err);

/* gpu_stream.c: the routed experts of many rows, if some of the layer's are not on the card: `run` launches the plan's items [lo, hi), whose
 * entries are [e0, e1). count [experts]: rows that chose each. */
aff_status aff__gpu_groups_open(aff_gpu *g, aff_error *err);
void aff__gpu_groups_free(aff_gpu *g);
void aff__gpu_groups_run(aff_gpu *g, int layer, const int32_t *count, int batch, void (*run)(void *ctx, int lo, int hi, int e0, int e1), void *ctx);

/* gpu_fetch.c */
aff_status aff__gpu_fetch_open(aff_gpu *g, aff_error *err);
void aff__gpu_fetch_free(aff_gpu *g);
void aff__gpu_fetch_begin(aff_gpu *g); /* nothing runs on the device */
aff_status aff__gpu_fetch_end(aff_gpu *g, aff_error *err);
void aff__gpu_fetch_drain(aff_gpu *g); /* returns when no copy reads the pool; between passes */
void aff__gpu_fetch_used(aff_gpu *g, int taken);
void aff__gpu_fetch_recall(aff_gpu *g);

/* gpu_ops.c: fills in the table. gpu_moe.c, gpu_attention.c: ops of those names. */
void aff__gpu_ops(aff_backend *b);
void aff__gpu_attention_ops(aff_backend *b);
void aff__gpu_moe_ops(aff_backend *b);
#endif
