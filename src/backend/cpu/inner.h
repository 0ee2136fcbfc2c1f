/* inner.h - the functions that exist once per instruction set, behind one table each. All levels give the same bits.
 * Rows of activations and results come as arrays of pointers, so that routed rows need not be gathered: at most AFF__BATCH_MAX of them,
 * AFF__ROWS_MAX in float32 products. */
#ifndef AFF_BACKEND_CPU_INNER_H
#define AFF_BACKEND_CPU_INNER_H
#include "backend/cpu/kernels.h"
#include "quant/numbers.h"
#include "quant/rows.h"

enum { AFF__LANES = 16, AFF__ROWS_MAX = 32, AFF__BATCH_MAX = 64, AFF__KEY_CUT = 64, AFF__QUANT_GROUP = 128 };
enum { AFF__KEY_OFFSET = 12 }; /* makes doubled E2M1 values bytes without sign */
static const uint8_t aff__key_bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}; /* by code */

/* Whether bf16 holds every value of such rows. */
static inline bool aff__rows_pair(const aff_rowfmt *f)
{
    return f->tail == f->floats && (!f->coded || f->group == AFF__A8_GROUP);
}

/* Stored rows that will be needed soon. */
typedef struct aff__ahead {
    const uint8_t *row[AFF__KEY_CUT];
    int n, bytes;
    int at, step; /* for who asks: how many were, how many more at a time */
} aff__ahead;

typedef struct aff__cpu_inner {
    /* y[t][r - r0] = W[r] . x[t] for rows r0 <= r < r1 and t < n; x is used as it is. */
    void (*matmul)(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y);
    /* The same in bf16 pairs (BF16 and FP8 weights); x: bf16, zeros up to the next multiple of 32 columns. */
    void (*pairs)(const aff_weight *w, int r0, int r1, const uint16_t *const *x, int n, float *const *y);
    void (*to_bf16)(const float *x, uint16_t *y, int n);
    /* The exact integer product of one expert matrix [rows][cols]: xq[t][cols] int8, xs[t][ceil(cols/128)] scales;
     * y[t][r - r0] as above. */
    void (*q2p875)(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0, int r1,
                   const int8_t *const *xq, const float *const *xs, int n, float *const *y);
    void (*mxfp4)(const aff_expert_mat *m, int rows, int cols, int r0, int r1, const int8_t *const *xq,
                  const float *const *xs, int n, float *const *y);
    float (*dot)(const float *a, const float *b, int n);
    void (*axpy)(float *y, float a, const float *x, int n);
    void (*scale)(float *y, float a, int n);
    /* y = x rounded to bf16 (nearest even), as float32. */
    void (*round_bf16)(const float *x, float *y, int n);
    /* One cut of n <= AFF__KEY_CUT keys for every head, merged into (M, Z, V) or (alone) written there: M[heads], Z[heads],
     * V[heads][D]. next: NULL, or what the next cut will read. */
    void (*attend)(const float *q, int heads, int D, const float *const *key, int n, float scale, bool alone,
                   aff__ahead *next, float *M, float *Z, float *V);
    /* The same in bf16 pairs: q[heads][ldq], key[AFF__KEY_CUT][ld]; columns up to a multiple of 32 and rows from n up to a multiple of 4 are zeros. */
    void (*attend_pairs)(const uint16_t *q, int64_t ldq, int heads, int D, const uint16_t *key, int64_t ld, int n, float scale, bool alone,
                         aff__ahead *next, float *M, float *Z, float *V);
    /* V[d] = fmaf(V[d], a, v[d] * b) */
    void (*merge)(int D, float a, float b, const float *v, float *V);
    /* Keys are rows in format q->f: coded ones, and float32. */
    void (*index_codes)(const aff_index_query *q, const uint8_t *ik, int n, float *score);
    void (*index_floats)(const aff_index_query *q, const uint8_t *ik, int n, float *score);
    /* A row of a sequence's state as float32. */
    void (*row)(const aff_rowfmt *f, const uint8_t *row, float *x);
    /* The same as bf16, for rows of which aff__rows_pair() holds. */
    void (*row_pairs)(const aff_rowfmt *f, const uint8_t *row, uint16_t *x);
    /* g[i] = weight * ((a * sigmoid(a)) * b), a = min(g[i], limit), b = u[i] clamped to +-limit; limit <= 0: no clamp.
     */
    void (*swiglu)(float *g, const float *u, float weight, float limit, int n);
    /* int8 codes and one scale for n <= 128 columns, as defined in kernels.h. */
    float (*quantise)(const float *x, int n, int8_t *q);
} aff__cpu_inner;

extern const aff__cpu_inner aff__cpu_inner_scalar;
#if defined(__x86_64__)
extern const aff__cpu_inner aff__cpu_inner_avx2, aff__cpu_inner_avx512;
#endif

/* The table for aff__cpu_level(). */
const aff__cpu_inner *aff__cpu_inner_now(void);

static inline int aff__min_int(int a, int b)
{
    return a < b ? a : b;
}
static inline int aff__ceil_div(int a, int b)
{
    return a / b + (a % b != 0);
}

/* 2^(b-128), the E8M0 scale of weights that are kept doubled; NaN for 255. */
static inline float aff__half_e8m0(uint8_t b)
{
    return aff__bits_f32(b == 255 ? 0x7fc00000u : b >= 2 ? (uint32_t)(b - 1) << 23 : 0x00200000u << b);
}

static inline float aff__row_scale(const aff_expert_mat *m, int r)
{
    return aff__bf16_to_f32((uint16_t)(m->rscale[2 * (int64_t)r] | m->rscale[2 * (int64_t)r + 1] << 8));
}

/* The fixed tree over the lanes. */
static inline float aff__fold_lanes(float a[AFF__LANES])
{
    for (int half = AFF__LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
#endif
