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

enum { AFF_AIO_PIECE = 1 << 20 };
/* Requests that come up while others are under way: `next` gives the next one (of at most AFF_AIO_PIECE bytes) or NULL for none at the moment, and is
 * asked whenever there is room and after every request that is done; `done` is told each one, whole or failed. Returns when nothing is under way and
 * next gave NULL. Never both at a time, but perhaps on other threads than the caller's. */
typedef struct aff_aio_source {
    void *ctx;
    aff_io *(*next)(void *ctx);
    void (*done)(void *ctx, aff_io *io);
} aff_aio_source;
void aff__aio_stream(aff_aio *a, const aff_aio_source *s, bool write);
#endif
