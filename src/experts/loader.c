/* One thread takes requests from two queues and hands their pieces to aff__aio_stream, which keeps many in flight. A
 * piece that failed goes back in front, three times in all. With the last piece of a request the thread arranges its
 * bytes (if they were not read into the slot as they are) and tells whoever waits. */
#define _GNU_SOURCE /* O_DIRECT */
#include "experts/loader.h"
#include "base/aio.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PAGE = 4096, IN_FLIGHT = 32, TRIES = 3, MAX_COPIES = 16, KEPT = 4 };
enum { COMPARED = 1 << 20 }; /* bytes at both ends of a copy, where the tables and hashes are */

typedef struct piece {
    aff_io io; /* first: aff_aio knows this alone */
    aff_load *of;
    int file, copy, tries;
    uint64_t off; /* of the file */
    struct piece *next;
} piece;

/* A file of a store, and further copies of it. */
typedef struct file {
    const char *path;
    aff_stamp stamp;
    int direct[MAX_COPIES + 1], buffered[MAX_COPIES + 1]; /* -1: none */
    const char *copy[MAX_COPIES + 1];
    int n;
    bool replaced;
} file;

typedef struct queue {
    aff_load *head, *tail;
} queue;

struct aff_loader {
    aff_experts *store[2];
    int layers; /* of the trunk */
    file *file;
    int files, first_of_draft;
    aff_loader_options o;
    aff_aio *aio;
    uint64_t bounce_bytes;
    uint8_t *kept[KEPT]; /* bounces that nobody uses */
    int n_kept;

    /* The loader's thread only. */
    aff_load *cutting;
    aff_piece part[AFF_MAX_PIECES];
    int parts, at_part;
    uint64_t at, bounce_at; /* within the part; of the part in the bounce */
    unsigned turn;          /* of the copies */
    piece pieces[IN_FLIGHT], *idle, *again;
    uint64_t seed;

    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t wake, over;
    queue waiting[2];
    bool stop, stalled;
    int64_t under_way;
    uint64_t busy_since;
    double inject;
    aff_loader_counts counts;
};

/* ---- where bytes come from ---- */

static aff_experts *store_of(const aff_loader *l, int layer, int *own)
{
    const bool draft = layer >= l->layers;
    *own = draft ? layer - l->layers : layer;
    return l->store[draft];
}

/* Read straight into the slot: one part that begins on a page and whose last page is within the file. */
static bool straight(const aff_loader *l, const aff_experts *s, const aff_piece *p, int n, int number)
{
    return n == 1 && !aff__experts_row_major(s) && p->off % PAGE == 0 &&
           p->off + aff__align_up(p->bytes, PAGE) <= l->file[number].stamp.size;
}

/* The pages around a part. */
static uint64_t cover(const aff_piece *p)
{
    return aff__align_up(p->off % PAGE + p->bytes, PAGE);
}

static int file_number(const aff_loader *l, const aff_load *r, const aff_piece *p)
{
    return p->file + (r->layer >= l->layers ? l->first_of_draft : 0);
}

/* ---- requests; on the loader's thread ---- */

static void give_bounce(aff_loader *l, uint8_t *b)
{
    if (l->n_kept < KEPT)
        l->kept[l->n_kept++] = b;
    else
        free(b);
}

static void finish(aff_loader *l, aff_load *r)
{
    void (*const done)(aff_load *) = r->done;
    if (r->own.bounce) give_bounce(l, r->own.bounce);
    r->own.bounce = NULL;
    pthread_mutex_lock(&l->lock);
    l->counts.requests++;
    l->counts.failed += r->status != AFF_OK;
    if (--l->under_way == 0) l->counts.busy_ns += aff__now_ns() - l->busy_since;
    r->own.over = true; /* if it has no `done`, its owner may take the memory back from here on */
    pthread_cond_broadcast(&l->over);
    pthread_mutex_unlock(&l->lock);
    if (done) done(r);
}

static void say(aff_loader *l, const char *line)
{
    if (l->o.warn) l->o.warn(l->o.warn_ctx, line);
}

static aff_status check_files(aff_loader *l, aff_load *r)
{
    for (int i = 0; i < l->parts; i++) {
        file *f = &l->file[file_number(l, r, &l->part[i])];
        aff_stamp now, named;
        if (!aff__stamp_of(f->buffered[0], &now) || !aff__stamp_same_content(&now, &f->stamp))
            return aff__fail(
                &r->err, AFF_E_IO,
                "%s: the file was written to since it was opened (layer %d, expert %d is wanted): start again", f->path,
                r->layer, r->expert);
        if (f->replaced || (aff__stamp_at(f->path, &named) && aff__stamp_same_file(&named, &f->stamp))) continue;
        char line[4400];
        f->replaced = true;
        snprintf(line, sizeof line,
                 "%s: there is another file (or none) of that name now; the one that was opened is read on", f->path);
        say(l, line);
    }
    return AFF_OK;
}

static void arrange(aff_loader *l, aff_load *r)
{
    aff_piece p[AFF_MAX_PIECES];
    int own;
    const aff_experts *s = store_of(l, r->layer, &own);
    const int n = aff__experts_pieces(s, own, r->expert, p);
    uint64_t at = 0;
    for (int i = 0; i < n; i++) {
        const uint8_t *from = r->own.bounce + at + p[i].off % PAGE;
        if (aff__experts_row_major(s))
            aff__experts_arrange(s, own, r->to, from);
        else
            memcpy(r->to + p[i].at, from, (size_t)p[i].bytes);
        at += cover(&p[i]);
    }
}

/* All pieces of the request have been read or have failed. */
static void conclude(aff_loader *l, aff_load *r)
{
    if (r->own.error) {
        const file *f = &l->file[r->own.file];
        errno = r->own.error;
        r->status =
            aff__fail_errno(&r->err, "%s: layer %d, expert %d: cannot read at byte %" PRIu64 " (tried %d times)",
                            f->path, r->layer, r->expert, r->own.off, TRIES);
    } else if (r->status == AFF_OK && r->own.bounce) {
        arrange(l, r);
    }
    finish(l, r);
}

/* Begins to cut a request into pieces; false: it is done already (in memory, or failed). */
static bool begin(aff_loader *l, aff_load *r)
{
    int own;
    const aff_experts *s = store_of(l, r->layer, &own);
    l->parts = aff__experts_pieces(s, own, r->expert, l->part);
    l->at_part = 0;
    l->at = l->bounce_at = 0;
    if (!l->parts) {
        aff__experts_copy(s, own, r->expert, r->to);
        finish(l, r);
        return false;
    }
    r->status = check_files(l, r);
    if (r->status == AFF_OK && !straight(l, s, l->part, l->parts, file_number(l, r, l->part))) {
        if (l->n_kept)
            r->own.bounce = l->kept[--l->n_kept];
        else if (posix_memalign((void **)&r->own.bounce, PAGE, (size_t)l->bounce_bytes) != 0) {
            r->own.bounce = NULL;
            r->status =
                aff__fail(&r->err, AFF_E_NOMEM, "layer %d, expert %d: no memory to read it", r->layer, r->expert);
        }
    }
    if (r->status != AFF_OK) {
        finish(l, r);
        return false;
    }
    l->cutting = r;
    return true;
}

static aff_load *pop(aff_loader *l)
{
    aff_load *r = NULL;
    pthread_mutex_lock(&l->lock);
    for (int i = 0; i < 2 && !r && !l->stalled; i++) {
        queue *q = &l->waiting[i];
        if (!(r = q->head)) continue;
        q->head = r->own.next;
        if (!q->head) q->tail = NULL;
    }
    if (r && l->under_way++ == 0) l->busy_since = aff__now_ns();
    pthread_mutex_unlock(&l->lock);
    return r;
}

/* Which of its copies a piece is read from, and how: the last page of a file may not be whole, which direct reads do
 * not have. */
static void choose_copy(const aff_loader *l, piece *p, int copy)
{
    const file *f = &l->file[p->file];
    p->copy = copy % f->n;
    p->io.fd = f->direct[p->copy] >= 0 && p->io.len % PAGE == 0 ? f->direct[p->copy] : f->buffered[p->copy];
}

/* The next piece of the request that is being cut. */
static piece *cut(aff_loader *l)
{
    aff_load *r = l->cutting;
    const aff_piece *part = &l->part[l->at_part];
    const uint64_t from = part->off / PAGE * PAGE, all = cover(part), left = all - l->at,
                   n = left < AFF_AIO_PIECE ? left : AFF_AIO_PIECE;
    const int number = file_number(l, r, part);
    const file *f = &l->file[number];
    uint8_t *to = r->own.bounce ? r->own.bounce + l->bounce_at : r->to;
    piece *p = l->idle;
    l->idle = p->next;
    *p =
        (piece){.of = r, .file = number, .off = from + l->at, .io = {.buf = to + l->at, .len = n, .off = from + l->at}};
    if (p->off + n > f->stamp.size) p->io.len = f->stamp.size - p->off;
    choose_copy(l, p, (int)(l->turn++ & 0xFFFF));
    r->own.left++;
    l->at += n;
    if (l->at == all) {
        l->bounce_at += all;
        l->at = 0;
        if (++l->at_part == l->parts) {
            r->own.cut = true;
            l->cutting = NULL;
        }
    }
    return p;
}

static aff_io *next_io(void *ctx)
{
    aff_loader *l = ctx;
    piece *p = l->again;
    if (p) {
        l->again = p->next;
        return &p->io;
    }
    if (!l->idle) return NULL; /* aio has as many in flight as there are pieces */
    while (!l->cutting) {
        aff_load *r = pop(l);
        if (!r) return NULL;
        begin(l, r);
    }
    return &cut(l)->io;
}

/* Tests: now and then the disk fails, or a file ends early; what was read then is no expert. */
static void injected(aff_loader *l, piece *p)
{
    pthread_mutex_lock(&l->lock);
    const double share = l->inject;
    pthread_mutex_unlock(&l->lock);
    if (share <= 0 || (l->o.inject_most && p->tries >= l->o.inject_most) ||
        (double)(aff__splitmix64(&l->seed) >> 11) * 0x1p-53 >= share)
        return;
    p->io.error = EIO;
    const uint64_t keep = aff__splitmix64(&l->seed) & 1 ? p->io.len / 2 : 0;
    memset((char *)p->io.buf + keep, 0xA5, (size_t)(p->io.len - keep));
}

static void done_io(void *ctx, aff_io *io)
{
    aff_loader *l = ctx;
    piece *p = (piece *)io;
    aff_load *r = p->of;
    injected(l, p);
    pthread_mutex_lock(&l->lock);
    l->counts.bytes += p->io.error ? 0 : p->io.len;
    l->counts.retries += p->io.error && p->tries + 1 < TRIES;
    pthread_mutex_unlock(&l->lock);
    if (p->io.error && ++p->tries < TRIES) {
        choose_copy(l, p, p->copy + 1);
        p->next = l->again;
        l->again = p;
        return;
    }
    if (p->io.error && !r->own.error) {
        r->own.error = p->io.error;
        r->own.file = p->file;
        r->own.off = p->off;
    }
    p->next = l->idle;
    l->idle = p;
    if (--r->own.left == 0 && r->own.cut) conclude(l, r);
}

static void *thread_main(void *arg)
{
    aff_loader *l = arg;
    for (;;) {
        pthread_mutex_lock(&l->lock);
        while (l->stalled ? true : !l->waiting[0].head && !l->waiting[1].head && !l->stop)
            pthread_cond_wait(&l->wake, &l->lock);
        const bool end = l->stop && !l->waiting[0].head && !l->waiting[1].head;
        pthread_mutex_unlock(&l->lock);
        if (end) return NULL;
        aff__aio_stream(l->aio, &(aff_aio_source){l, next_io, done_io}, false);
    }
}

/* ---- making and freeing ---- */

static int open_as(const char *path, int flags)
{
    return open(path, O_RDONLY | O_CLOEXEC | flags);
}

/* The ends of two files, where tables and hashes are. */
static aff_status compare(const file *f, const char *path, int fd, aff_error *err)
{
    aff_stamp s;
    char *a = NULL;
    if (!aff__stamp_of(fd, &s) || s.size != f->stamp.size)
        return aff__fail(err, AFF_E_FORMAT, "%s: expected a copy of %s, %" PRIu64 " bytes, got %" PRIu64, path, f->path,
                         f->stamp.size, s.size);
    const uint64_t n = s.size < COMPARED ? s.size : COMPARED;
    AFF_TRY(aff__calloc(&a, 2, n, "comparing copies", err));
    aff_status st = AFF_OK;
    for (int end = 0; end < 2 && st == AFF_OK; end++) {
        const off_t at = end ? (off_t)(s.size - n) : 0;
        if (pread(f->buffered[0], a, (size_t)n, at) != (ssize_t)n || pread(fd, a + n, (size_t)n, at) != (ssize_t)n)
            st = aff__fail_errno(err, "%s: cannot be compared with %s", path, f->path);
        else if (memcmp(a, a + n, (size_t)n) != 0)
            st = aff__fail(err, AFF_E_FORMAT, "%s: expected a copy of %s, its %s differs", path, f->path,
                           end ? "end" : "beginning");
    }
    free(a);
    return st;
}

static aff_status open_one(aff_loader *l, file *f, const char *path, aff_error *err)
{
    const int k = f->n;
    f->direct[k] = f->buffered[k] = -1;
    f->copy[k] = path;
    f->n++;
    f->buffered[k] = open_as(path, 0);
    if (f->buffered[k] < 0) return aff__fail_errno(err, "%s: cannot open", path);
    if (l->o.buffered) return AFF_OK;
    f->direct[k] = open_as(path, O_DIRECT);
    if (f->direct[k] < 0) {
        char line[4400];
        l->counts.direct = false;
        snprintf(line, sizeof line,
                 "%s: its file system has no direct reads (O_DIRECT): experts go through the page cache, which takes "
                 "memory from the pool",
                 path);
        say(l, line);
    }
    return AFF_OK;
}

static aff_status open_files(aff_loader *l, aff_experts *s, aff_error *err)
{
    const int n = s ? aff__experts_files(s) : 0;
    for (int i = 0; i < n; i++) {
        const aff_expert_file e = aff__experts_file(s, i);
        file *f = &l->file[l->files++];
        aff_stamp now;
        *f = (file){.path = e.path, .stamp = e.map->stamp};
        AFF_TRY(open_one(l, f, e.path, err));
        if (!aff__stamp_of(f->buffered[0], &now) || !aff__stamp_same_file(&now, &f->stamp) ||
            !aff__stamp_same_content(&now, &f->stamp))
            return aff__fail(err, AFF_E_IO, "%s: the file was replaced while it was being opened: start again", e.path);
    }
    return AFF_OK;
}

static aff_status open_copies(aff_loader *l, aff_error *err)
{
    if (!l->o.n_copies) return AFF_OK;
    if (aff__experts_files(l->store[0]) != 1)
        return aff__fail(err, AFF_E_UNSUPPORTED, "--expert-copies: expected a model in one file");
    if (l->o.n_copies > MAX_COPIES)
        return aff__fail(err, AFF_E_LIMIT, "--expert-copies: expected at most %d, got %d", MAX_COPIES, l->o.n_copies);
    for (int i = 0; i < l->o.n_copies; i++) {
        AFF_TRY(open_one(l, &l->file[0], l->o.copies[i], err));
        AFF_TRY(compare(&l->file[0], l->o.copies[i], l->file[0].buffered[i + 1], err));
    }
    return AFF_OK;
}

/* The largest bounce that a request can need. */
static uint64_t bounce_bytes(const aff_loader *l)
{
    uint64_t most = PAGE;
    for (int i = 0; i < 2; i++)
        if (l->store[i]) {
            const uint64_t n = aff__experts_layout(l->store[i]).pitch + 2 * (uint64_t)PAGE * AFF_MAX_PIECES;
            if (n > most) most = n;
        }
    return most;
}

aff_status aff__loader_create(aff_loader **out, aff_experts *trunk, aff_experts *draft, const aff_loader_options *o,
                              aff_error *err)
{
    aff_loader *l;
    *out = NULL;
    AFF_TRY(aff__calloc(&l, 1, sizeof *l, "expert loader", err));
    l->store[0] = trunk;
    l->store[1] = draft;
    l->layers = aff__experts_layers(trunk);
    l->first_of_draft = aff__experts_files(trunk);
    l->o = *o;
    l->counts.direct = !o->buffered;
    l->inject = o->inject;
    l->seed = o->inject_seed;
    l->bounce_bytes = bounce_bytes(l);
    for (int i = 0; i < IN_FLIGHT; i++) l->pieces[i].next = i ? &l->pieces[i - 1] : NULL;
    l->idle = &l->pieces[IN_FLIGHT - 1];
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->wake, NULL);
    pthread_cond_init(&l->over, NULL);
    const uint64_t files = (uint64_t)aff__experts_files(trunk) + (draft ? (uint64_t)aff__experts_files(draft) : 0);
    aff_status s = aff__calloc(&l->file, files, sizeof *l->file, "expert loader", err);
    if (s == AFF_OK) s = open_files(l, trunk, err);
    if (s == AFF_OK) s = open_files(l, draft, err);
    if (s == AFF_OK) s = open_copies(l, err);
    if (s == AFF_OK) s = aff__aio_create(&l->aio, !o->threads_only, err);
    if (s == AFF_OK && pthread_create(&l->thread, NULL, thread_main, l) != 0)
        s = aff__fail(err, AFF_E_IO, "expert loader: cannot start its thread");
    if (s != AFF_OK) {
        aff__loader_free(l);
        return s;
    }
    l->started = true;
    l->counts.uring = aff__aio_uring(l->aio);
    *out = l;
    return AFF_OK;
}

void aff__loader_free(aff_loader *l)
{
    if (!l) return;
    if (l->started) {
        pthread_mutex_lock(&l->lock);
        l->stop = true;
        l->stalled = false;
        pthread_cond_signal(&l->wake);
        pthread_mutex_unlock(&l->lock);
        pthread_join(l->thread, NULL);
    }
    aff__aio_free(l->aio);
    for (int i = 0; l->file && i < l->files; i++)
        for (int k = 0; k < l->file[i].n; k++) {
            if (l->file[i].direct[k] >= 0) close(l->file[i].direct[k]);
            if (l->file[i].buffered[k] >= 0) close(l->file[i].buffered[k]);
        }
    free(l->file);
    while (l->n_kept) free(l->kept[--l->n_kept]);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->wake);
    pthread_cond_destroy(&l->over);
    free(l);
}

/* ---- any thread ---- */

void aff__loader_submit(aff_loader *l, aff_load *r, int urgency)
{
    r->status = AFF_OK;
    memset(&r->own, 0, sizeof r->own);
    pthread_mutex_lock(&l->lock);
    queue *q = &l->waiting[urgency == AFF_LOAD_LATER];
    if (q->tail)
        q->tail->own.next = r;
    else
        q->head = r;
    q->tail = r;
    pthread_cond_signal(&l->wake);
    pthread_mutex_unlock(&l->lock);
}

bool aff__loader_cancel(aff_loader *l, aff_load *r)
{
    bool found = false;
    pthread_mutex_lock(&l->lock);
    for (int i = 0; i < 2 && !found; i++) {
        queue *q = &l->waiting[i];
        aff_load *before = NULL;
        for (aff_load *at = q->head; at && !found; before = at, at = at->own.next) {
            if (at != r) continue;
            *(before ? &before->own.next : &q->head) = at->own.next;
            if (q->tail == at) q->tail = before;
            found = true;
        }
    }
    pthread_mutex_unlock(&l->lock);
    return found;
}

aff_status aff__loader_wait(aff_loader *l, aff_load *r, aff_error *err)
{
    pthread_mutex_lock(&l->lock);
    while (!r->own.over) pthread_cond_wait(&l->over, &l->lock);
    pthread_mutex_unlock(&l->lock);
    if (r->status != AFF_OK && err) *err = r->err;
    return r->status;
}

aff_loader_counts aff__loader_counts_now(aff_loader *l)
{
    pthread_mutex_lock(&l->lock);
    aff_loader_counts c = l->counts;
    if (l->under_way) c.busy_ns += aff__now_ns() - l->busy_since;
    pthread_mutex_unlock(&l->lock);
    return c;
}

void aff__loader_stall(aff_loader *l, bool on)
{
    pthread_mutex_lock(&l->lock);
    l->stalled = on;
    pthread_cond_signal(&l->wake);
    pthread_mutex_unlock(&l->lock);
}

void aff__loader_inject(aff_loader *l, double share)
{
    pthread_mutex_lock(&l->lock);
    l->inject = share;
    pthread_mutex_unlock(&l->lock);
}
