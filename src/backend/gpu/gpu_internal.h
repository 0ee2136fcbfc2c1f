/* gpu_internal.h - the device backend's own state, shared by its files. */
#ifndef AFF_BACKEND_GPU_GPU_INTERNAL_H
#define AFF_BACKEND_GPU_GPU_INTERNAL_H
#include "backend/gpu/gpu.h"
#include "state/seq.h" /* AFF_MAX_ROLLBACK */

/* Memory of the backend that grows to what is asked of it and is never read across ops of different layers. */
typedef enum aff_gpu_scratch {
    AFF_G_MIXES, /* [T][(2+N)N] and sums of squares */
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
    int moes;           /* plans in it */
} aff_gpu_record;

enum { AFF_G_RECORDS = 64 };

enum { AFF_G_ROWS = 8192 /* of a pass */, AFF_G_FORMS = 32, AFF_G_STAGE = 1 << 20, AFF_G_COUNTS = 160, AFF_G_BEST = 32 };

typedef struct aff_gpu {
    aff_backend base;
    aff_memory mem; /* base.mem */
    char results[64];
    aff_rt *rt;
    aff_stream *s;
    bool amd;
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
    struct {
        void *p;
        uint64_t bytes;
    } scratch[AFF_G_SCRATCHES];
} aff_gpu;

static inline aff_gpu *aff__gpu_of(aff_backend *b)
{
    return (aff_gpu *)b;
}

/* Notes the first failure. */
void aff__gpu_note(aff_gpu *g, aff_status s, const aff_error *err);
void aff__gpu_launch(aff_gpu *g, aff_kernel k, int64_t grid, unsigned block, uint64_t smem, const void *args);
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

/* gpu_ops.c: fills in the table. gpu_moe.c, gpu_attention.c: ops of those names. */
void aff__gpu_ops(aff_backend *b);
void aff__gpu_attention_ops(aff_backend *b);
void aff__gpu_moe_ops(aff_backend *b);
#endif
