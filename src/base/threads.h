/* threads.h - the CPU thread pool: a parallel for over task numbers; workers spin briefly, then sleep on a futex. */
#ifndef AFF_BASE_THREADS_H
#define AFF_BASE_THREADS_H
#include "base/status.h"
#include <stdint.h>

typedef struct aff_pool aff_pool;

/* n threads in all, the caller's included (n <= 0: one per allowed CPU). */
aff_status aff__pool_create(aff_pool **out, int n, aff_error *err);
void aff__pool_free(aff_pool *p);
int aff__pool_size(int n); /* threads of aff__pool_create(.., n, ..) */
uint64_t aff__pool_bytes(int threads); /* of aff__calloc; stacks are the system's */
int aff__pool_threads(const aff_pool *p);
/* Calls fn(ctx, task, thread) once for each task 0..n-1, tasks handed out in ascending order to whichever thread is free, and
 * returns when all are done. thread is 0..threads-1 (for scratch). One caller at a time; fn must not call it again. p may be
 * NULL: everything runs on the caller. Results must not depend on which thread runs what. */
void aff__pool_run(aff_pool *p, void (*fn)(void *ctx, int64_t task, int thread), void *ctx, int64_t n);
#endif
