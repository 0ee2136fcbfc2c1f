/* cpu.h - the CPU backend's own state and the ops of its files. */
#ifndef AFF_BACKEND_CPU_CPU_H
#define AFF_BACKEND_CPU_CPU_H
#include "backend/backend.h"
#include "backend/cpu/kernels.h"

typedef struct aff_cpu {
    aff_backend base;
    aff_pool *pool;
    aff_moe_scratch *moe;
    /* Per-thread scratch, grown before a parallel loop starts. */
    char *scratch;
    uint64_t scratch_bytes; /* of one thread */
} aff_cpu;

static inline aff_cpu *aff__cpu_of(aff_backend *b) { return (aff_cpu *)b; }
/* Makes sure that every thread has `bytes` of scratch. */
aff_status aff__cpu_reserve(aff_cpu *c, uint64_t bytes, aff_error *err);
static inline void *aff__cpu_scratch(aff_cpu *c, int thread) { return c->scratch + (uint64_t)thread * c->scratch_bytes; }

/* cpu_hc.c */
void aff__cpu_embed(aff_backend *b, const aff_weight *w, const int32_t *ids, int T, int streams, float *X);
void aff__cpu_hc_pre(aff_backend *b, const aff_hc *h, const float *X, int T, int H, float *u, float *post, float *comb);
void aff__cpu_hc_post(aff_backend *b, const float *f, const float *post, const float *comb, int T, int streams, int H, float *X);
void aff__cpu_hc_head(aff_backend *b, const aff_hc *h, const float *X, int T, int H, float *y);
void aff__cpu_stream_mean(aff_backend *b, const float *X, int T, int streams, int H, float *tap, int64_t ld);
void aff__cpu_rmsnorm(aff_backend *b, const float *x, const float *w, float eps, int T, int n, float *y);
/* y = w x / rms(x) for one row; w NULL: no weight. y may be x. */
void aff__cpu_rms_row(const float *x, const float *w, float eps, int n, float *y);

/* cpu_attention.c */
void aff__cpu_q_finish(aff_backend *b, float *q, int T, int heads, int D, float eps, const aff_rope *rope, const int64_t *pos);
void aff__cpu_kv_finish(aff_backend *b, float *kv, int T, int D, const float *norm, float eps, const aff_rope *rope, const int64_t *pos);
void aff__cpu_raw_store(aff_backend *b, const aff_rowset *rs, const float *kv, int D);
void aff__cpu_compress(aff_backend *b, const aff_compressor *c, const aff_rope *rope, const aff_rowset *rs, const float *cp, float *zp);
void aff__cpu_index_query(aff_backend *b, float *iq, int T, int heads, int dim, const aff_rope *rope, const int64_t *pos);
aff_status aff__cpu_index_select(aff_backend *b, const aff_rowset *rs, const float *iq, const float *w, int heads, int dim, int ratio, int topk,
                                 int *sel, aff_error *err);
aff_status aff__cpu_attend_rows(aff_backend *b, const float *q, int T, int heads, int D, const aff_keyset *keys, const float *sink, const aff_rope *rope,
                                const int64_t *pos, float *o, aff_error *err);

/* cpu_moe.c */
void aff__cpu_route(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int T, int32_t *picks, float *weights);
void aff__cpu_swiglu(aff_backend *b, float *a, const float *bb, float limit, int64_t n);
void aff__cpu_argmax(aff_backend *b, const float *x, int T, int n, int32_t *id);
void aff__cpu_sum_experts(aff_backend *b, const float *y, int T, int K, int H, float *f);
#endif
