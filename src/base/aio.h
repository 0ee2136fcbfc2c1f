/* aio.h - many reads or writes of files at once: io_uring where the system allows it, else threads with pread and
 * pwrite. */
#ifndef AFF_BASE_AIO_H
#define AFF_BASE_AIO_H
#include "base/status.h"

typedef struct aff_aio aff_aio;
/* One thread at a time uses an aff_aio. uring false: threads only. */
aff_status aff__aio_create(aff_aio **out, bool uring, aff_error *err);
void aff__aio_free(aff_aio *a);
bool aff__aio_uring(const aff_aio *a); /* io_uring is in force */

typedef struct aff_io {
    int fd;
    void *buf; /* O_DIRECT: buf, len and off are multiples of 4096 */
    uint64_t len, off;
    int error; /* out: 0, or errno; EIO for a file that ends early */
} aff_io;
/* Returns when all n are done, each whole or failed. */
void aff__aio_run(aff_aio *a, aff_io *io, int n, bool write);
#endif
