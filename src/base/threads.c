/* The pool is one generation counter. A run publishes (fn, ctx, n), resets the task counter and raises the generation; workers
 * see it change, draw task numbers with fetch_add until none is left, and count themselves out. The caller draws too, then
 * waits for the count. A worker that saw nothing new for a while sleeps on the generation word itself, so a wake-up cannot be
 * lost: futex_wait returns at once if the word has moved. */
#define _GNU_SOURCE
#include "base/threads.h"
#include "base/mem.h"
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Looks before a sleep. Every YIELD_EVERY the processor is offered to others: where there are more threads than free processors, the
 * one waited for may need this one. */
enum { SPINS = 2000, YIELD_EVERY = 64 };

typedef struct worker {
    struct aff_pool *pool;
    pthread_t thread;
    int index;
} worker;

struct aff_pool {
    _Alignas(64) atomic_uint gen;
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_uint busy; /* workers that have not finished this generation */
    atomic_uint sleepers;
    atomic_bool stop;
    void (*fn)(void *, int64_t, int);
    void *ctx;
    int64_t n;
    int threads, started;
    worker *workers;
};

static void futex_wait(atomic_uint *w, unsigned seen) { syscall(SYS_futex, w, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void futex_wake(atomic_uint *w) { syscall(SYS_futex, w, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0); }

static void relax(int look)
{
    if (look % YIELD_EVERY == YIELD_EVERY - 1) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Returns once *w != seen. */
static void wait_change(atomic_uint *w, unsigned seen, atomic_uint *sleepers)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(w, memory_order_acquire) != seen) return;
        relax(i);
    }
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(w) == seen) futex_wait(w, seen);
    atomic_fetch_sub(sleepers, 1);
}

static void draw_tasks(aff_pool *p, int thread)
{
    for (;;) {
        long long t = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (t >= p->n) return;
        p->fn(p->ctx, t, thread);
    }
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    aff_pool *p = w->pool;
    unsigned seen = 0;
    for (;;) {
        wait_change(&p->gen, seen, &p->sleepers);
        seen = atomic_load_explicit(&p->gen, memory_order_acquire);
        if (atomic_load(&p->stop)) return NULL;
        draw_tasks(p, w->index);
        if (atomic_fetch_sub_explicit(&p->busy, 1, memory_order_acq_rel) == 1) futex_wake(&p->busy);
    }
}

int aff__pool_size(int n)
{
    cpu_set_t set;
    if (n > 0) return n;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

aff_status aff__pool_create(aff_pool **out, int n, aff_error *err)
{
    aff_pool *p;
    *out = NULL;
    n = aff__pool_size(n);
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "thread pool", err));
    p->threads = n;
    aff_status s = aff__calloc(&p->workers, (uint64_t)n, sizeof *p->workers, "thread pool", err);
    for (int i = 1; s == AFF_OK && i < n; i++) {
        p->workers[i] = (worker){.pool = p, .index = i};
        if (pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i]) != 0)
            s = aff__fail(err, AFF_E_IO, "thread pool: cannot start thread %d of %d", i + 1, n);
        else
            p->started++;
    }
    if (s != AFF_OK) {
        aff__pool_free(p);
        return s;
    }
    *out = p;
    return AFF_OK;
}

uint64_t aff__pool_bytes(int threads)
{
    return aff__align_up(sizeof(aff_pool), 64) + aff__align_up((uint64_t)threads * sizeof(worker), 64);
}

static void publish(aff_pool *p)
{
    atomic_fetch_add(&p->gen, 1);
    if (atomic_load(&p->sleepers)) futex_wake(&p->gen);
}

void aff__pool_free(aff_pool *p)
{
    if (!p) return;
    atomic_store(&p->stop, true);
    publish(p);
    for (int i = 1; i <= p->started; i++) pthread_join(p->workers[i].thread, NULL);
    free(p->workers);
    free(p);
}

int aff__pool_threads(const aff_pool *p) { return p ? p->threads : 1; }

void aff__pool_run(aff_pool *p, void (*fn)(void *, int64_t, int), void *ctx, int64_t n)
{
    if (!p || p->threads == 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++) fn(ctx, i, 0);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n = n;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_store_explicit(&p->busy, (unsigned)p->started, memory_order_relaxed);
    publish(p);
    draw_tasks(p, 0);
    for (int i = 0;; i++) {
        unsigned left = atomic_load_explicit(&p->busy, memory_order_acquire);
        if (!left) return;
        if (i < SPINS)
            relax(i);
        else
            futex_wait(&p->busy, left);
    }
}
