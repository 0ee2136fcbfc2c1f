/* kernel_random.h - random operands for kernel tests, and comparison of bits. */
#ifndef AFF_TESTS_KERNEL_RANDOM_H
#define AFF_TESTS_KERNEL_RANDOM_H
#include "base/cpu.h"
#include "base/rng.h"
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline uint64_t draw(uint64_t *seed, uint64_t n)
{
    return aff__splitmix64(seed) % n;
}
static inline int draw_int(uint64_t *seed, int lo, int hi)
{
    return lo + (int)draw(seed, (uint64_t)(hi - lo + 1));
}
/* Uniform in [-1, 1). */
static inline float draw_unit(uint64_t *seed)
{
    return (float)((double)(aff__splitmix64(seed) >> 11) * 0x1p-52 - 1.0);
}

/* tame: uniform in [-1, 1). wild: any exponent from subnormals to 2^100, with zeros of both signs. */
static inline void fill(float *x, int64_t n, bool wild, uint64_t *seed)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = draw_unit(seed);
        if (!wild) continue;
        int kind = draw_int(seed, 0, 9);
        if (kind == 0)
            x[i] = x[i] < 0 ? -0.0f : 0.0f;
        else if (kind == 1)
            x[i] = x[i] * 0x1p-130f;
        else if (kind == 2)
            x[i] = ldexpf(x[i], draw_int(seed, -140, 100));
    }
}

/* A malloc'ed array of n floats. */
static inline float *floats(int64_t n, bool wild, uint64_t *seed)
{
    float *x = n < 0 ? NULL : malloc((size_t)(n ? n : 1) * sizeof *x);
    if (!x) abort();
    fill(x, n, wild, seed);
    return x;
}

static inline void *bytes(int64_t n, uint64_t *seed)
{
    uint8_t *x = n < 0 ? NULL : malloc((size_t)(n ? n : 1));
    if (!x) abort();
    for (int64_t i = 0; i < n; i++) x[i] = (uint8_t)aff__splitmix64(seed);
    return x;
}

/* Index of the first difference in bits (any NaN equals any NaN), or -1. */
static inline int64_t first_difference(const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) && !(a[i] != a[i] && b[i] != b[i])) {
            fprintf(stderr, "[%lld]: %a and %a at level %s\n", (long long)i, (double)a[i], (double)b[i],
                    aff__cpu_level_name(aff__cpu_level()));
            return i;
        }
    return -1;
}

/* for (each level that this machine has, scalar first) */
#define EACH_LEVEL(l)                                                                                                  \
    for (int l = AFF_CPU_SCALAR, l##_top = (aff__cpu_cap(AFF_CPU_AVX512), (int)aff__cpu_level());                      \
         l <= l##_top && (aff__cpu_cap((aff_cpu_level)l), true); l++)
#endif
