#define _GNU_SOURCE /* MADV_POPULATE_WRITE */
#include "experts/pool.h"
#include "base/mem.h"
#include "base/pages.h"
#include "base/threads.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096, HUGE = 2 << 20 };
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct aff_slots {
    uint8_t *map; /* HUGE more than is needed, so that `base` can be aligned to it */
    uint8_t *base;
    uint64_t pitch, bytes, mapped;
    int64_t count;
};

/* All pages are there afterwards, brought by all processors together. Without MADV_POPULATE_WRITE (Linux before 5.14)
 * each is written to: where there is too little memory, that is the end of the process, so the caller has looked first.
 */
enum { STEP = 1 << 28 };

typedef struct {
    aff_slots *p;
    uint64_t there; /* MiB */
    int error;      /* the first */
} populating;

static void populate_step(void *ctx, int64_t task, int thread)
{
    populating *c = ctx;
    const uint64_t at = (uint64_t)task * STEP, n = c->p->bytes - at < STEP ? c->p->bytes - at : STEP;
    int none = 0;
    if (__atomic_load_n(&c->error, __ATOMIC_RELAXED)) return;
    while (madvise(c->p->base + at, n, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno == EINVAL) {
            for (uint64_t i = 0; i < n; i += PAGE) *(volatile uint8_t *)(c->p->base + at + i) = 0;
            break;
        }
        __atomic_compare_exchange_n(&c->error, &none, errno, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        return;
    }
    __atomic_fetch_add(&c->there, n >> 20, __ATOMIC_RELAXED);
}

static aff_status populate(aff_slots *p, aff_error *err)
{
    populating c = {.p = p};
    aff_pool *threads;
    AFF_TRY(aff__pool_create(&threads, 0, err));
    aff__pool_run(threads, populate_step, &c, (int64_t)((p->bytes + STEP - 1) / STEP));
    aff__pool_free(threads);
    if (!c.error) return AFF_OK;
    errno = c.error;
    return aff__fail_errno(err,
                           "expert pool: %" PRIu64 " MiB of %" PRIu64
                           " MiB are there, no more can be had: choose a smaller --host-pool-mib",
                           c.there, p->bytes >> 20);
}

aff_status aff__slots_create(aff_slots **out, uint64_t pitch, int64_t slots, bool now, aff_error *err)
{
    aff_slots *p;
    uint64_t bytes, mapped;
    *out = NULL;
    if (slots < 0 || !pitch || pitch % PAGE || !aff__mul_ok(pitch, (uint64_t)slots, &bytes) ||
        !aff__add_ok(bytes, HUGE, &mapped))
        return aff__fail(err, AFF_E_INVALID,
                         "expert pool: %" PRId64 " slots of %" PRIu64 " bytes: expected 0 or more of whole pages",
                         slots, pitch);
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "expert pool", err));
    *p = (aff_slots){.pitch = pitch, .bytes = bytes, .mapped = mapped, .count = slots};
    *out = p;
    if (!slots) return AFF_OK;
    void *m = mmap(NULL, (size_t)mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    aff_status s = AFF_OK;
    if (m == MAP_FAILED) {
        s = aff__fail(err, AFF_E_NOMEM, "expert pool: cannot map %" PRIu64 " MiB: choose a smaller --host-pool-mib",
                      mapped >> 20);
    } else {
        p->map = m;
        p->base = (uint8_t *)(((uintptr_t)m + HUGE - 1) / HUGE * HUGE);
        aff__pages_prepare(p->base, bytes);
        if (now) s = populate(p, err);
    }
    if (s != AFF_OK) {
        aff__slots_free(p);
        *out = NULL;
    }
    return s;
}

void aff__slots_free(aff_slots *p)
{
    if (!p) return;
    if (p->map) munmap(p->map, (size_t)p->mapped);
    free(p);
}

uint8_t *aff__slots_at(const aff_slots *p, int64_t slot)
{
    return p->base + (uint64_t)slot * p->pitch;
}
uint8_t *aff__slots_base(const aff_slots *p)
{
    return p->base;
}
uint64_t aff__slots_pitch(const aff_slots *p)
{
    return p->pitch;
}
uint64_t aff__slots_bytes(const aff_slots *p)
{
    return p->bytes;
}
int64_t aff__slots_count(const aff_slots *p)
{
    return p->count;
}

uint64_t aff__slots_huge(const aff_slots *p)
{
    char line[512];
    uint64_t sum = 0, from, to, kib;
    bool ours = false;
    FILE *f = p->base ? fopen("/proc/self/smaps", "r") : NULL;
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &from, &to) == 2)
            ours = from < (uintptr_t)p->base + p->bytes && to > (uintptr_t)p->base;
        else if (ours && sscanf(line, "AnonHugePages: %" SCNu64, &kib) == 1)
            sum += kib << 10;
    }
    fclose(f);
    return sum;
}
