/* inner_scalar.h - the scalar forms, for the table and for SIMD code that hands over a tail. */
#ifndef AFF_BACKEND_CPU_INNER_SCALAR_H
#define AFF_BACKEND_CPU_INNER_SCALAR_H
#include "backend/cpu/inner.h"

void aff__matmul_scalar(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y);
/* The same with x rounded to bf16 on the way; in bf16 pairs unless the weights are float32. */
void aff__matmul_rounding(const aff_weight *w, int r0, int r1, const float *const *x, int n, float *const *y);
void aff__pairs_scalar(const aff_weight *w, int r0, int r1, const uint16_t *const *x, int n, float *const *y);
void aff__to_bf16_scalar(const float *x, uint16_t *y, int n);
void aff__q2p875_scalar(const aff_expert_mat *m, const int16_t (*table)[1024][4], int rows, int cols, int r0, int r1,
                        const int8_t *const *xq, const float *const *xs, int n, float *const *y);
void aff__mxfp4_scalar(const aff_expert_mat *m, int rows, int cols, int r0, int r1, const int8_t *const *xq,
                       const float *const *xs, int n, float *const *y);
/* Row r of an expert matrix [rows][cols] as float32. */
void aff__expert_row(const aff_expert_shape *shape, const aff_expert_mat *m, int rows, int cols, int r, float *out);
float aff__dot_scalar(const float *a, const float *b, int n);
void aff__axpy_scalar(float *y, float a, const float *x, int n);
void aff__scale_scalar(float *y, float a, int n);
void aff__round_bf16_scalar(const float *x, float *y, int n);
void aff__attend_scalar(const float *q, int heads, int D, const float *const *key, int n, float scale, bool alone,
                        aff__ahead *next, float *M, float *Z, float *V);
void aff__attend_pairs_scalar(const uint16_t *q, int64_t ldq, int heads, int D, const uint16_t *key, int64_t ld, int n, float scale, bool alone,
                              aff__ahead *next, float *M, float *Z, float *V);
void aff__row_pairs_scalar(const aff_rowfmt *f, const uint8_t *row, uint16_t *x);
void aff__merge_scalar(int D, float a, float b, const float *v, float *V);
void aff__index_codes_scalar(const aff_index_query *q, const uint8_t *ik, int n, float *score);
void aff__index_floats_scalar(const aff_index_query *q, const uint8_t *ik, int n, float *score);
void aff__swiglu_scalar(float *g, const float *u, float weight, float limit, int n);
float aff__quantise_scalar(const float *x, int n, int8_t *q);
#endif
