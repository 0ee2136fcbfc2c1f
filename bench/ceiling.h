/* ceiling.h - what the machine can do, measured by loops that do nothing else: reading memory, multiplying in
 * registers. The programs of bench/ measure their kernels and these in turn, so that other work on the machine meets
 * both alike, and keep the best of each.
 *
 * One thread is timed by its own processor clock, several by the wall clock. */
#ifndef AFF_BENCH_CEILING_H
#define AFF_BENCH_CEILING_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise: this file is included first */
#endif
#include "base/cpu.h"
#include "base/mem.h"
#include "base/threads.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CEIL_BYTES = 256 << 20, CEIL_PIECE = 1 << 20, CEIL_RUNS = 8 };

typedef struct ceiling {
    aff_pool *pool;
    uint8_t *data;     /* [CEIL_BYTES] */
    uint64_t sink[64]; /* so that no loop is for nothing */
    double dram;       /* bytes a second, the best since ceiling_forget */
    double bf16, fma;  /* multiplications a second; 0: this machine has no such instruction */
} ceiling;

static inline uint64_t ceiling_ns(const ceiling *c)
{
    struct timespec t;
    clock_gettime(aff__pool_threads(c->pool) == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static uint64_t ceiling_read_wide(const uint8_t *p)
{
    __m512i s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm512_setzero_si512();
    for (int i = 0; i < CEIL_PIECE; i += 512)
        for (int k = 0; k < 8; k++) s[k] = _mm512_xor_si512(s[k], _mm512_loadu_si512(p + i + 64 * k));
    for (int i = 1; i < 8; i++) s[0] = _mm512_xor_si512(s[0], s[i]);
    return (uint64_t)_mm512_reduce_add_epi64(s[0]);
}

enum { CEIL_LOOPS = 200000, CEIL_CHAINS = 12 };

/* Twelve chains, each in a register of its own: an array of them would live in memory. */
#define CEIL_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define CEIL_SET(i)  __m512 s##i = _mm512_setzero_ps();
#define CEIL_KEEP(i) __asm__ volatile("" : "+v"(s##i));
#define CEIL_DOT(i)  s##i = _mm512_dpbf16_ps(s##i, a, b);
#define CEIL_FMA(i)  s##i = _mm512_fmadd_ps(a, b, s##i);
#define CEIL_SUM(i)  sum = _mm512_add_ps(sum, s##i);

__attribute__((target("avx512f,avx512bf16"))) static void ceiling_bf16_task(void *ctx, int64_t task, int thread)
{
    (void)task;
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = (__m512bh)_mm512_set1_epi32(0x33803380);
    __m512 sum = _mm512_setzero_ps();
    CEIL_EACH(CEIL_SET)
    for (int n = 0; n < CEIL_LOOPS; n++) {
        CEIL_EACH(CEIL_DOT)
        CEIL_EACH(CEIL_KEEP)
    }
    CEIL_EACH(CEIL_SUM)
    ((ceiling *)ctx)->sink[thread % 64] += (uint64_t)_mm512_reduce_add_ps(sum);
}

__attribute__((target("avx512f"))) static void ceiling_fma_task(void *ctx, int64_t task, int thread)
{
    (void)task;
    __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-7f), sum = _mm512_setzero_ps();
    CEIL_EACH(CEIL_SET)
    for (int n = 0; n < CEIL_LOOPS; n++) {
        CEIL_EACH(CEIL_FMA)
        CEIL_EACH(CEIL_KEEP)
    }
    CEIL_EACH(CEIL_SUM)
    ((ceiling *)ctx)->sink[thread % 64] += (uint64_t)_mm512_reduce_add_ps(sum);
}

/* Multiplications a second of all threads; lanes: of one instruction. */
static double ceiling_peak(ceiling *c, void (*task)(void *, int64_t, int), int lanes)
{
    double best = 0;
    const int threads = aff__pool_threads(c->pool);
    for (int i = 0; i < CEIL_RUNS; i++) {
        const uint64_t t = ceiling_ns(c);
        aff__pool_run(c->pool, task, c, threads);
        const double rate = (double)lanes * CEIL_LOOPS * CEIL_CHAINS * threads / (double)(ceiling_ns(c) - t) * 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}
#endif

static void ceiling_read_task(void *ctx, int64_t task, int thread)
{
    ceiling *c = ctx;
    const uint8_t *p = c->data + task * CEIL_PIECE;
    uint64_t s = 0;
#if defined(__x86_64__)
    if (aff__cpu_level() == AFF_CPU_AVX512) {
        c->sink[thread % 64] += ceiling_read_wide(p);
        return;
    }
#endif
    for (int i = 0; i < CEIL_PIECE; i += 8) s += *(const uint64_t *)(const void *)(p + i);
    c->sink[thread % 64] += s;
}

/* One more measurement of the memory's read rate, over `bytes` of the buffer. */
static void ceiling_read(ceiling *c, int64_t bytes)
{
    const uint64_t t = ceiling_ns(c);
    aff__pool_run(c->pool, ceiling_read_task, c, bytes / CEIL_PIECE);
    const double rate = (double)(bytes / CEIL_PIECE * CEIL_PIECE) / (double)(ceiling_ns(c) - t) * 1e9;
    c->dram = rate > c->dram ? rate : c->dram;
}

static inline void ceiling_forget(ceiling *c)
{
    c->dram = 0;
}

static void ceiling_open(ceiling *c, int threads)
{
    aff_error err = {0};
    memset(c, 0, sizeof *c);
    c->data = mmap(NULL, CEIL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->data == MAP_FAILED || aff__pool_create(&c->pool, threads, &err) != AFF_OK) {
        fprintf(stderr, "bench: %s\n", c->data == MAP_FAILED ? "cannot map memory to read" : err.msg);
        exit(1);
    }
    madvise(c->data, CEIL_BYTES, MADV_HUGEPAGE);
    for (int64_t i = 0; i < CEIL_BYTES; i += 8) *(uint64_t *)(void *)(c->data + i) = (uint64_t)i * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < CEIL_RUNS; i++) ceiling_read(c, CEIL_BYTES);
#if defined(__x86_64__)
    if (aff__cpu_level() == AFF_CPU_AVX512) {
        c->bf16 = ceiling_peak(c, ceiling_bf16_task, 32);
        c->fma = ceiling_peak(c, ceiling_fma_task, 16);
    }
#endif
    printf("ceilings, %d threads: memory read %.1f GB/s", aff__pool_threads(c->pool), c->dram * 1e-9);
    if (c->bf16 > 0) printf(", bf16 %.0f GFLOP/s (VDPBF16PS), float32 %.0f GFLOP/s", 2e-9 * c->bf16, 2e-9 * c->fma);
    printf("\n");
}

static void ceiling_close(ceiling *c)
{
    aff__pool_free(c->pool);
    munmap(c->data, CEIL_BYTES);
}
#endif
