/* golden.h - golden arrays (a safetensors file) and the comparisons that tests make with them. */
#ifndef AFF_TEST_GOLDEN_H
#define AFF_TEST_GOLDEN_H
#include "format/safetensors.h"

/* Opens tests/golden/NAME, fails the test if it cannot. */
aff_ckpt *golden_open(const char *name);
/* The array of that name with its element count; fails the test if it is missing or has another type. */
const float *golden_f32(const aff_ckpt *g, const char *name, size_t *n);
const int32_t *golden_i32(const aff_ckpt *g, const char *name, size_t *n);
/* Any integer array (I8, I16, I32) widened into a malloc'ed int32 array. */
int32_t *golden_ints(const aff_ckpt *g, const char *name, size_t *n);
bool golden_has(const aff_ckpt *g, const char *name);

/* max|a-b| / max|b| over n values; a NaN anywhere counts as infinity. */
double row_error(const float *a, const float *b, size_t n);
/* Median of n values (sorts a copy). */
double median(const double *v, size_t n);
#endif
