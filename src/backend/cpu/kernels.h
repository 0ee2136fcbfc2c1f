/* kernels.h - the CPU's inner loops: matrix products, routed experts, attention. Each has a scalar form that reads like its
 * definition here, and AVX2 / AVX-512 forms that give the same bits; aff__cpu_level() chooses at each call.
 *
 * Definition of a dense product y[r] = sum_k W[r][k] x[k] (promise 0).
 *
 * Float32 products: `math` and `sim`, `wide` weights, F32 weights (for which `fast` rounds x to bf16 first). K is dealt to 16 lanes, lane i
 * taking k = i mod 16.
 *   F32, BF16: each lane is one chain acc = fmaf(w, x, acc) from zero in ascending k.
 *   FP8: K is cut at the tile edges (128 or 32 columns). Inside a cut a lane's partial is such a chain over the E4M3 values; then
 *        acc = fmaf(partial, scale, acc) per lane, cuts in ascending order.
 * Pair products: `fast` with BF16 and FP8 weights. x is rounded to bf16 (nearest even), an FP8 weight is E4M3 times its scale, which bf16
 * holds (or infinite beyond the largest float). K is padded with zeros to a multiple of 32; lane i takes the pairs (k, k+1), k = 2i mod 32, in
 * ascending order from zero: acc = fmaf(w[k+1], x[k+1], acc), then acc = fmaf(w[k], x[k], acc), each rounded to nearest even, where subnormal
 * operands count as zeros of their sign and results below 2^-126 after rounding to 24 bits become zeros of theirs (pairs.h). That is what
 * VDPBF16PS does, by its manual and by test; AVX2 does it in two fused steps with subnormals off.
 * At the end the lanes fold in a fixed tree of plain float32 sums: a[i] += a[i+8], then +4, +2, +1. Weights are exact in every mode.
 * So a row's result does not depend on the number of rows, threads or the instruction set. "The same bits" means the same value
 * and sign of zero; which NaN comes out where a NaN goes in is left open. */
#ifndef AFF_BACKEND_CPU_KERNELS_H
#define AFF_BACKEND_CPU_KERNELS_H
#include "backend/types.h"
#include "base/threads.h"

/* y[t*ldy + r] for T rows x[t*ldx .. +cols). Work is split over the pool (NULL allowed). Needs no scratch from the caller and
 * cannot fail: `fast` makes a rounded copy of x and, without memory for it, rounds on the way. y must not overlap x. */
void aff__cpu_matmul(aff_pool *pool, const aff_weight *w, aff_numerics num, const float *x, int64_t ldx, int T, float *y, int64_t ldy);

/* Block-diagonal product for wo_a: w is [groups*out][in]; y[t][g*out + r] = W[g*out + r] . x[t*ldx + g*in ...]. */
void aff__cpu_matmul_grouped(aff_pool *pool, const aff_weight *w, aff_numerics num, int groups, const float *x, int64_t ldx, int T, float *y, int64_t ldy);

/* Lane-wise vector primitives, 16-lane definition as above. */
float aff__cpu_dot(const float *a, const float *b, int n);        /* lanes of fmaf chains, folded */
float aff__cpu_sumsq(const float *a, int n);
void aff__cpu_axpy(float *y, float a, const float *x, int n);     /* y = fmaf(a, x, y), elementwise */
void aff__cpu_scale(float *y, float a, int n);                    /* y *= a */

/* Attention of one query position (spec 7.5, promise 0). q[heads][D], key j is the row key[j][D] (also the value), j = 0..n-1 in
 * the order given (window ascending, then selected ascending). Cut every 64 keys from the start; each cut gives per head
 * m = max s, z = sum exp(s-m) in ascending order, v = sum exp(s-m) k in ascending order (v[d] = fmaf(p, k[d], v[d])). Cuts merge in ascending
 * order into a running (M, Z, V) that starts from (sink, 1, 0): M' = max(M, m); a = exp(M-M'), b = exp(m-M');
 * Z = fmaf(Z, a, z*b); V[d] = fmaf(V[d], a, v[d]*b). o = V / Z. scores s = dot(q, k) * scale. n may be 0 (o = 0). */
void aff__cpu_attend(const float *q, int heads, int D, const float *const *key, int n, const float *sink, float scale, float *o);
/* The same over a key list as stored. buf: aff__cpu_attend_bytes(D), 64-byte aligned; each cut's rows go there once for all heads.
 * Rows that bf16 holds (`fast`: E4M3 codes and a bf16 tail, nothing else; extra rows then are such values too) take part as bf16 pairs:
 * q is rounded to bf16; s = scale * the pair product of q and key; p = bf16(exp(s - m)), zero behind the last key;
 * z sums these p in 16 lanes, lane i taking j = i mod 16, folded; v[d] is one chain over pairs of keys (2i, 2i+1), the odd one first.
 * z sums the rounded p, so that the weights p/z add up to 1: rounding moves the result half as far as it would otherwise. */
uint64_t aff__cpu_attend_bytes(int D);
void aff__cpu_attend_keys(const float *q, int heads, int D, const aff_keyset *keys, const float *sink, float scale, float *buf, float *o);

/* The parts of the same, for work spread over cuts: (m, z, v) of cut number `cut` for each head, m[heads], z[heads], v[heads][D]; and one
 * head's merge of a cut into (M, Z, V), which starts from (sink, 1, 0). */
void aff__cpu_attend_cut(const float *q, int heads, int D, const aff_keyset *keys, int cut, float scale, float *buf, float *m, float *z, float *v);
void aff__cpu_attend_merge(int D, float m, float z, const float *v, float *M, float *Z, float *V);

/* Index scores of one query (spec 7.4): score[g] = sum_h w[h] * max(0, dot(iq[h], ik[g])), h ascending, fmaf; a NaN dot counts
 * as 0. ik: n rows in format f, f->n values each.
 *   float32 rows: dot is the vector primitive above.
 *   coded rows (f->coded == f->n: E2M1 codes and a scale per 32 columns): the query is encoded in the same format, which loses nothing
 *     after A4. Per block of 32 the integer sum of (2 q)(2 k) over the codes, at most 4,608; then
 *     d = fmaf((float)sum, (scale_q * 1/4) * scale_k, d) from zero, blocks ascending. */
typedef struct aff_index_query {
    const float *x, *w; /* [heads][f->n], [heads] */
    int heads;
    const aff_rowfmt *f;
    /* Coded rows: doubled codes [heads][f->n], scales / 4 [heads][blocks], and what undoes the keys' offset [heads][blocks]. */
    const int8_t *q;
    const float *scale;
    const int32_t *start;
} aff_index_query;
/* Bytes of buf, which is 64-byte aligned and must live as long as the query. */
uint64_t aff__cpu_index_bytes(int heads, const aff_rowfmt *f);
void aff__cpu_index_prepare(aff_index_query *out, const float *iq, const float *w, int heads, const aff_rowfmt *f, void *buf);
void aff__cpu_index_scores(const aff_index_query *q, const void *ik, int n, float *score);

/* The top k of score[0..n) as ascending indices; ties go to the lower index; n <= k selects all. Returns the count. NaN counts
 * as the lowest value. scratch: n ints. */
int aff__cpu_topk(const float *score, int n, int k, int *sel, int *scratch);

/* Routed experts: for every plan entry y[row][rank][hidden] = down . (weight * silu(gate.x) * up.x), unsummed (spec 8).
 *   math, sim: weights decoded to float32, products by the dense F32 definition, float32 activations.
 *   fast: exact integers (design 5). x is quantised once per row to int8 per 128 columns: amax over the group, scale s = amax/127
 *     (float32), q = rint(x * (127/amax)) to nearest even, clamped to +-127. amax < 2^-100 gives s = 0, q = 0 (127/amax could
 *     overflow); an infinity or NaN in the group gives s = NaN, q = 0, so that it is not hidden. Group of a tail shorter than
 *     128 columns is that tail.
 *     AFF_Q2P875G: int32 partial over 16 columns of table value (2^-9 units, signed, rotated) times q, shifted left by e, summed in
 *       int32 inside 128 columns; then acc = fmaf((float)sum, s, acc), groups ascending; y = (acc * 2^-9) * row_scale.
 *     AFF_MXFP4: int32 partial over 32 columns of 2*e2m1 times q; acc = fmaf((float)sum, s * 2^(b-128), acc), blocks ascending (b = 255 is NaN).
 * In every mode h = weight * ((a * sigmoid(a)) * b) in float32 with a = min(gate, limit), b = clamp(up, +-limit); in `fast` it is
 * quantised the same way in front of down. hidden and inter are multiples of 64 (AFF_MXFP4: 32).
 * T rows of x [T][ldx]; y is [T][K][hidden] (K = picks per row); places without an entry are left alone. Work is spread over the pool.
 * Errors: AFF_E_INVALID (widths, plan out of range), AFF_E_UNSUPPORTED (dtype), AFF_E_NOMEM. */
typedef struct aff_moe_scratch aff_moe_scratch; /* grows as needed, reused between calls */
aff_status aff__moe_scratch_create(aff_moe_scratch **out, int threads, aff_error *err); /* threads: of the pool to come */
/* The most it grows to for `rows` rows of `picks` picks. */
uint64_t aff__moe_scratch_bytes(aff_numerics num, int threads, int rows, int picks, int hidden, int inter);
void aff__moe_scratch_free(aff_moe_scratch *s);
aff_status aff__cpu_experts(aff_pool *pool, aff_moe_scratch *s, const aff_expert_shape *shape, aff_numerics num, const aff_moe_plan *plan,
                            const float *x, int64_t ldx, int T, int K, float *y, aff_error *err);
#endif
