/* The host's memory. Reserved ranges are backed page by page by lifting the protection of the pages and populating
 * them, so that what a plan says is resident and a refusal comes here, as an error, and not later as a signal. */
#define _GNU_SOURCE
#include "backend/memory.h"
#include "base/mem.h"
#include "base/pages.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE = 4096 };

static aff_status host_alloc(const aff_memory *m, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    return aff__calloc(p, bytes, 1, what, err);
}

static void host_free(const aff_memory *m, void *p)
{
    free(p);
}

static aff_status host_reserve(const aff_memory *m, void **out, uint64_t bytes, const char *what, aff_error *err)
{
    void *p = mmap(NULL, (size_t)bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return aff__fail(err, AFF_E_NOMEM, "%s: cannot reserve %llu bytes of address space", what,
                         (unsigned long long)bytes);
    aff__pages_prepare(p, bytes); /* before anything is backed; a huge page never reaches beyond what is */
    *out = p;
    return AFF_OK;
}

static bool populate(char *p, uint64_t bytes)
{
    if (madvise(p, (size_t)bytes, MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false; /* EINVAL: a kernel before 5.14 */
    for (uint64_t i = 0; i < bytes; i += PAGE) ((volatile char *)p)[i] = 0;
    return true;
}

static aff_status host_commit(const aff_memory *m, void *p, uint64_t bytes, const char *what, aff_error *err)
{
    if (mprotect(p, (size_t)bytes, PROT_READ | PROT_WRITE) == 0 && populate(p, bytes)) return AFF_OK;
    return aff__fail(err, AFF_E_NOMEM, "%s: the system refuses %llu bytes (%s)", what, (unsigned long long)bytes,
                     strerror(errno));
}

/* Mapping anew gives the pages back and drops their charge. */
static void host_decommit(const aff_memory *m, void *p, uint64_t bytes)
{
    if (mmap(p, (size_t)bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED) aff__pages_prepare(p, bytes);
}

static void host_release(const aff_memory *m, void *p, uint64_t bytes)
{
    munmap(p, (size_t)bytes);
}

static aff_status host_copy(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    memcpy(to, from, (size_t)bytes);
    return AFF_OK;
}

const aff_memory aff__host_memory = {.host = true,
                                     .results = "",
                                     .page = PAGE,
                                     .alloc = host_alloc,
                                     .free = host_free,
                                     .reserve = host_reserve,
                                     .commit = host_commit,
                                     .decommit = host_decommit,
                                     .release = host_release,
                                     .write = host_copy,
                                     .read = host_copy,
                                     .copy = host_copy};
