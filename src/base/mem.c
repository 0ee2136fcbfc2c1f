#include "base/mem.h"
#include "base/pages.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static unsigned fail_after;
static _Atomic uint64_t total;

uint64_t aff__alloc_total(void) { return atomic_load(&total); }

void aff__alloc_fail_after(unsigned n) { fail_after = n; }

static bool planned_failure(void) { return fail_after && --fail_after == 0; }

aff_status aff__calloc(void *out, uint64_t count, uint64_t size, const char *what, aff_error *err)
{
    uint64_t n;
    void *p = NULL;
    if (!aff__mul_ok(count, size, &n) || n > SIZE_MAX - 64)
        return aff__fail(err, AFF_E_NOMEM, "%s: %llu x %llu bytes overflow", what, (unsigned long long)count,
                         (unsigned long long)size);
    n = aff__align_up(n ? n : 1, 64);
    if (planned_failure() || !(p = aligned_alloc(64, (size_t)n)))
        return aff__fail(err, AFF_E_NOMEM, "%s: cannot allocate %llu bytes", what, (unsigned long long)n);
    aff__pages_prepare(p, n);
    memset(p, 0, (size_t)n);
    memcpy(out, &p, sizeof p);
    atomic_fetch_add_explicit(&total, n, memory_order_relaxed);
    return AFF_OK;
}

aff_status aff__realloc(void *ptr, uint64_t count, uint64_t size, const char *what, aff_error *err)
{
    uint64_t n;
    void *p;
    memcpy(&p, ptr, sizeof p);
    if (!aff__mul_ok(count, size, &n) || n > SIZE_MAX)
        return aff__fail(err, AFF_E_NOMEM, "%s: %llu x %llu bytes overflow", what, (unsigned long long)count,
                         (unsigned long long)size);
    void *q = planned_failure() ? NULL : realloc(p, n ? (size_t)n : 1);
    if (!q) return aff__fail(err, AFF_E_NOMEM, "%s: cannot allocate %llu bytes", what, (unsigned long long)n);
    memcpy(ptr, &q, sizeof q);
    return AFF_OK;
}

aff_status aff__strndup(char **out, const char *s, size_t n, aff_error *err)
{
    char *p = NULL;
    AFF_TRY(aff__realloc(&p, (uint64_t)n + 1, 1, "string", err));
    memcpy(p, s, n);
    p[n] = 0;
    *out = p;
    return AFF_OK;
}
