/* memory.h - where the arrays of a pass and of a sequence lie: the host's memory, or a device's. */
#ifndef AFF_BACKEND_MEMORY_H
#define AFF_BACKEND_MEMORY_H
#include "base/status.h"

/* Work on a device's memory is ordered with the ops of its backend. Errors name `what`. */
typedef struct aff_memory aff_memory;
struct aff_memory {
    bool host;           /* the arrays can be read and written where they are */
    const char *results; /* whose results lie there (device.h); "" the CPU's */
    uint64_t page;       /* granularity of commit and decommit */
    /* Zeroed, 64-byte aligned. */
    aff_status (*alloc)(const aff_memory *m, void **p, uint64_t bytes, const char *what, aff_error *err);
    void (*free)(const aff_memory *m, void *p);
    /* Address space without memory, whole pages; memory for parts of it (contents undefined); back to none. A decommit
     * covers whole commits. release: of the range of one reserve, committed parts included. */
    aff_status (*reserve)(const aff_memory *m, void **p, uint64_t bytes, const char *what, aff_error *err);
    aff_status (*commit)(const aff_memory *m, void *p, uint64_t bytes, const char *what, aff_error *err);
    void (*decommit)(const aff_memory *m, void *p, uint64_t bytes);
    void (*release)(const aff_memory *m, void *p, uint64_t bytes);
    /* From the host, to the host, within. `from` of a write may be reused at once; a read is done on return. */
    aff_status (*write)(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err);
    aff_status (*read)(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err);
    aff_status (*copy)(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err);
};

extern const aff_memory aff__host_memory;
#endif
