/* Every request is cut into pieces of 1 MiB, and up to DEPTH pieces are in flight: enough to keep a fast disk busy,
 * whatever the sizes. A piece that came back short is sent again for its rest. */
#define _GNU_SOURCE
#include "base/aio.h"
#include "base/mem.h"
#include "base/threads.h"
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { DEPTH = 32, PIECE = AFF_AIO_PIECE, THREADS = 4 };

struct aff_aio {
    bool uring;
    struct io_uring ring;
    aff_pool *pool;
};

typedef struct {
    aff_io *io;
    uint64_t at, len; /* within the request */
} piece;

typedef struct {
    aff_io *io;
    int n;
    bool write;
    int next_io; /* where the next piece comes from */
    uint64_t next_at;
    const aff_aio_source *source; /* instead of io[0..n): each a piece; NULL */
} pieces;

static bool next_piece(pieces *p, piece *out)
{
    if (p->source) {
        aff_io *io = p->source->next(p->source->ctx);
        if (!io) return false;
        io->error = 0;
        *out = (piece){io, 0, io->len};
        return true;
    }
    while (p->next_io < p->n && p->next_at >= p->io[p->next_io].len) p->next_io++, p->next_at = 0;
    if (p->next_io == p->n) return false;
    aff_io *io = &p->io[p->next_io];
    *out = (piece){io, p->next_at, io->len - p->next_at < PIECE ? io->len - p->next_at : PIECE};
    p->next_at += out->len;
    return true;
}

/* The piece by system calls. */
static void do_piece(piece p, bool write)
{
    while (p.len) {
        char *buf = (char *)p.io->buf + p.at;
        const off_t off = (off_t)(p.io->off + p.at);
        const ssize_t r = write ? pwrite(p.io->fd, buf, (size_t)p.len, off) : pread(p.io->fd, buf, (size_t)p.len, off);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) {
            p.io->error = r < 0 ? errno : EIO;
            return;
        }
        p.at += (uint64_t)r;
        p.len -= (uint64_t)r;
    }
}

/* ---- threads ---- */

/* A request a task: two pieces of one request must not both write its error. */
static void thread_task(void *ctx, int64_t task, int thread)
{
    const pieces *all = ctx;
    pieces one = {.io = all->io + task, .n = 1};
    piece p;
    while (next_piece(&one, &p) && !one.io->error) do_piece(p, all->write);
}

typedef struct {
    pieces *all;
    pthread_mutex_t lock; /* of the source */
} shared;

static void stream_task(void *ctx, int64_t task, int thread)
{
    shared *s = ctx;
    piece p;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        const bool more = next_piece(s->all, &p);
        pthread_mutex_unlock(&s->lock);
        if (!more) return;
        do_piece(p, s->all->write);
        pthread_mutex_lock(&s->lock);
        s->all->source->done(s->all->source->ctx, p.io);
        pthread_mutex_unlock(&s->lock);
    }
}

/* ---- io_uring ---- */

static void submit_piece(aff_aio *a, piece *p, bool write)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&a->ring); /* there is one: no more than DEPTH are in flight */
    char *buf = (char *)p->io->buf + p->at;
    if (write)
        io_uring_prep_write(sqe, p->io->fd, buf, (unsigned)p->len, p->io->off + p->at);
    else
        io_uring_prep_read(sqe, p->io->fd, buf, (unsigned)p->len, p->io->off + p->at);
    io_uring_sqe_set_data(sqe, p);
}

/* True when the piece must be sent again. */
static bool finish_piece(piece *p, int res, bool write)
{
    if (res == -EINTR || res == -EAGAIN) return true;
    if (res == -EINVAL || res == -EOPNOTSUPP ||
        res == -ENOSYS) { /* perhaps the operation, not the file: ask the system call */
        do_piece(*p, write);
        return false;
    }
    if (res <= 0) {
        p->io->error = res < 0 ? -res : EIO;
        return false;
    }
    p->at += (uint64_t)res;
    p->len -= (uint64_t)res;
    return p->len > 0;
}

static void run_uring(aff_aio *a, pieces *all)
{
    piece slot[DEPTH], *idle[DEPTH];
    int n_idle = DEPTH, flying = 0;
    for (int i = 0; i < DEPTH; i++) idle[i] = &slot[i];
    for (;;) {
        while (n_idle && next_piece(all, idle[n_idle - 1])) {
            submit_piece(a, idle[--n_idle], all->write);
            flying++;
        }
        if (!flying) return;
        (void)io_uring_submit_and_wait(&a->ring, 1); /* what it could not take stays queued for the next call */
        struct io_uring_cqe *cqe;
        while (io_uring_peek_cqe(&a->ring, &cqe) == 0) {
            piece *p = io_uring_cqe_get_data(cqe);
            const int res = cqe->res;
            io_uring_cqe_seen(&a->ring, cqe);
            if (finish_piece(p, res, all->write)) {
                submit_piece(a, p, all->write);
                continue;
            }
            flying--;
            if (all->source) all->source->done(all->source->ctx, p->io);
            idle[n_idle++] = p;
        }
    }
}

/* ---- */

aff_status aff__aio_create(aff_aio **out, bool uring, aff_error *err)
{
    aff_aio *a;
    *out = NULL;
    AFF_TRY(aff__calloc(&a, 1, sizeof *a, "file requests", err));
    a->uring = uring && io_uring_queue_init(DEPTH, &a->ring, 0) == 0;
    if (!a->uring) {
        aff_status s = aff__pool_create(&a->pool, THREADS, err);
        if (s != AFF_OK) {
            free(a);
            return s;
        }
    }
    *out = a;
    return AFF_OK;
}

void aff__aio_free(aff_aio *a)
{
    if (!a) return;
    if (a->uring) io_uring_queue_exit(&a->ring);
    aff__pool_free(a->pool);
    free(a);
}

bool aff__aio_uring(const aff_aio *a)
{
    return a->uring;
}

void aff__aio_run(aff_aio *a, aff_io *io, int n, bool write)
{
    pieces all = {.io = io, .n = n, .write = write};
    for (int i = 0; i < n; i++) io[i].error = 0;
    if (a->uring)
        run_uring(a, &all);
    else
        aff__pool_run(a->pool, thread_task, &all, n);
}

void aff__aio_stream(aff_aio *a, const aff_aio_source *s, bool write)
{
    pieces all = {.write = write, .source = s};
    if (a->uring) {
        run_uring(a, &all);
        return;
    }
    shared sh = {.all = &all};
    pthread_mutex_init(&sh.lock, NULL);
    aff__pool_run(a->pool, stream_task, &sh, THREADS);
    pthread_mutex_destroy(&sh.lock);
}
