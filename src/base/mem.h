/* mem.h - checked arithmetic and allocation. Out of memory is an error like any other. */
#ifndef AFF_BASE_MEM_H
#define AFF_BASE_MEM_H
#include "base/status.h"

/* *out = a op b; false on overflow (then *out is unspecified). */
static inline bool aff__add_ok(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_add_overflow(a, b, out); }
static inline bool aff__mul_ok(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_mul_overflow(a, b, out); }
/* off <= size and len <= size - off: the only right way to ask whether [off, off+len) lies inside size bytes. */
static inline bool aff__range_ok(uint64_t off, uint64_t len, uint64_t size) { return off <= size && len <= size - off; }
static inline uint64_t aff__align_up(uint64_t v, uint64_t a) { return (v + a - 1) / a * a; }

/* count*size bytes, 64-byte aligned and zeroed; *out receives it. Large blocks are prepared as pages.h says. `what` names the consumer in the error. count*size of 0
 * gives a valid pointer. Free with free(). */
aff_status aff__calloc(void *out, uint64_t count, uint64_t size, const char *what, aff_error *err);
/* realloc to count*size bytes through *ptr (plain malloc alignment); *ptr keeps its old value on failure. */
aff_status aff__realloc(void *ptr, uint64_t count, uint64_t size, const char *what, aff_error *err);
/* malloc'ed copy of n bytes plus a NUL. */
aff_status aff__strndup(char **out, const char *s, size_t n, aff_error *err);

/* Bytes that aff__calloc has given out so far, freed or not: what a part of the program takes is a difference. */
uint64_t aff__alloc_total(void);

/* Tests only: the n-th allocation from now fails (0 = never). Not thread safe. */
void aff__alloc_fail_after(unsigned n);
#endif
