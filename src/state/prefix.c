/* The index is in memory and made from the folder at open, so there is no index file that could disagree with the
 * files. An entry is in one of three states: being written (in the index, so that it is not published twice, but not to
 * be read), there, or gone. Only the engine's thread adds entries; it and the writer remove them; all of it under one
 * lock, file reads outside of it with the entries pinned, so that they are not evicted meanwhile. */
#define _GNU_SOURCE
#include "state/prefix.h"
#include "base/aio.h"
#include "base/file.h"
#include "base/mem.h"
#include "state/prefix_file.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { BUCKETS = 1 << 16, NAME = 80, DEFAULT_BLOCK = 512, MIN_BLOCKS = 8, BATCH = 16 };
static const uint64_t waiting_limit = UINT64_C(64) << 20, default_limit = UINT64_C(64) << 30;
static const aff_hash root = {0, 0};

typedef struct entry {
    aff_pfx_entry e; /* kind 0: a file of another model or version */
    char name[NAME];
    uint64_t size;
    bool writing, dead; /* dead: could not be written; goes with its last pin */
    int pins;
    struct entry *next_key, *next_parent; /* chains of the two tables; by parent: checkpoints only */
    struct entry *newer, *older;
} entry;

typedef struct job {
    entry *entry;
    uint8_t *buf;
    struct job *next;
} job;

typedef enum { WARN_FULL, WARN_WRITE, WARN_DAMAGED, WARN_SMALL, WARN_KINDS } warning;

struct aff_prefix {
    aff_prefix_options o;
    char *dir; /* where the entries are: the folder, or its `session` */
    char *lock_dir;
    int dirfd, lockfd, block;
    aff_hash fingerprint;
    aff_aio *reader, *io; /* the engine's, the writer's */
    pthread_t thread;
    bool started;

    pthread_mutex_t lock;
    pthread_cond_t work, done; /* for the writer; from the writer */
    entry **by_key, **by_parent;
    entry *newest, *oldest;
    job *first, **last;
    bool busy, stop, direct, warned[WARN_KINDS];
    uint64_t waiting; /* bytes of jobs */
    uint64_t temporary;
    aff_prefix_stats stats;
};

static bool same(aff_hash a, aff_hash b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

static void warn(aff_prefix *p, warning kind, const char *what, int error)
{
    char line[512];
    if (p->warned[kind] || !p->o.warn) return;
    p->warned[kind] = true;
    snprintf(line, sizeof line, "prefix cache %s: %s%s%s", p->dir, what, error ? ": " : "",
             error ? strerror(error) : "");
    p->o.warn(p->o.warn_ctx, line);
}

uint64_t aff__prefix_memory(const aff_net *net, const aff_prefix_options *o)
{
    const int block = o->block ? o->block : DEFAULT_BLOCK;
    aff_seq_plan s;
    if (aff__seq_plan(&s, net, block < aff__net_config(net)->max_positions ? block : aff__net_config(net)->max_positions, NULL) != AFF_OK) return 0;
    const uint64_t entry_bytes = s.total + (uint64_t)block * 4 + 2 * AFF_PFX_PAGE; /* a checkpoint: rings, and the rows of a block */
    const uint64_t waiting = entry_bytes > waiting_limit ? entry_bytes : waiting_limit;
    return 2 * BUCKETS * sizeof(entry *) + 2 * waiting + 2 * entry_bytes;
}

/* ---- index ---- */

static entry **key_chain(aff_prefix *p, aff_hash key)
{
    return &p->by_key[key.lo % BUCKETS];
}
static entry **parent_chain(aff_prefix *p, aff_hash parent)
{
    return &p->by_parent[(parent.lo ^ parent.hi) % BUCKETS];
}

static entry *find(aff_prefix *p, aff_hash key)
{
    entry *e = *key_chain(p, key);
    while (e && !same(e->e.key, key)) e = e->next_key;
    return e;
}

static void age_out(aff_prefix *p, entry *e)
{
    *(e->newer ? &e->newer->older : &p->newest) = e->older;
    *(e->older ? &e->older->newer : &p->oldest) = e->newer;
    e->newer = e->older = NULL;
}

static void make_newest(aff_prefix *p, entry *e)
{
    e->older = p->newest;
    *(p->newest ? &p->newest->newer : &p->oldest) = e;
    p->newest = e;
}

static void insert(aff_prefix *p, entry *e)
{
    make_newest(p, e);
    p->stats.entries++;
    p->stats.bytes += e->size;
    if (!e->e.kind) return;
    entry **k = key_chain(p, e->e.key);
    e->next_key = *k;
    *k = e;
    if (e->e.kind != AFF_PFX_CHECKPOINT) return;
    k = parent_chain(p, e->e.parent);
    e->next_parent = *k;
    *k = e;
}

/* Out of the index, and the file unlinked. */
static void drop(aff_prefix *p, entry *e)
{
    age_out(p, e);
    p->stats.entries--;
    p->stats.bytes -= e->size;
    if (e->e.kind) {
        entry **k = key_chain(p, e->e.key);
        while (*k != e) k = &(*k)->next_key;
        *k = e->next_key;
    }
    if (e->e.kind == AFF_PFX_CHECKPOINT) {
        entry **k = parent_chain(p, e->e.parent);
        while (*k != e) k = &(*k)->next_parent;
        *k = e->next_parent;
    }
    unlinkat(p->dirfd, e->name, 0);
    free(e);
}

/* Evicts until `bytes` more fit; false if what is left is in use. */
static bool make_room(aff_prefix *p, uint64_t bytes, uint64_t limit)
{
    for (entry *e = p->oldest, *next; e && (p->stats.bytes > limit || limit - p->stats.bytes < bytes); e = next) {
        next = e->newer;
        if (e->pins || e->writing) continue;
        drop(p, e);
        p->stats.evicted++;
    }
    return p->stats.bytes <= limit && limit - p->stats.bytes >= bytes;
}

static void touch(aff_prefix *p, entry *e)
{
    age_out(p, e);
    make_newest(p, e);
    struct timespec t[2];
    if (!p->o.persistent || e->writing || clock_gettime(CLOCK_REALTIME, &t[1]) != 0) return;
    t[0] = t[1];
    utimensat(p->dirfd, e->name, t, 0); /* a later process finds the order in the files' times */
}

static void unpin(aff_prefix *p, entry *e)
{
    if (--e->pins == 0 && e->dead) drop(p, e);
}

/* ---- writer ---- */

/* 0 or errno. */
static int write_file(aff_prefix *p, const job *j, bool direct)
{
    char tmp[NAME];
    snprintf(tmp, sizeof tmp, "tmp-%llu", (unsigned long long)p->temporary++);
    const int fd = openat(p->dirfd, tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600);
    if (fd < 0) {
        const int error = errno;
        if (error == EINVAL) unlinkat(p->dirfd, tmp, 0); /* some file systems refuse O_DIRECT after making the file */
        return error;
    }
    aff_io io = {.fd = fd, .buf = j->buf, .len = j->entry->size};
    aff__aio_run(p->io, &io, 1, true);
    int error = io.error;
    if (!error && fdatasync(fd) != 0) error = errno;
    if (!error && !direct) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* experts need the page cache more */
    if (close(fd) != 0 && !error) error = errno;
    if (!error && renameat(p->dirfd, tmp, p->dirfd, j->entry->name) != 0) error = errno;
    if (error) unlinkat(p->dirfd, tmp, 0);
    return error;
}

static int write_entry(aff_prefix *p, const job *j)
{
    pthread_mutex_lock(&p->lock);
    bool direct = p->direct;
    pthread_mutex_unlock(&p->lock);
    int error = write_file(p, j, direct);
    if (error == EINVAL && direct) { /* a file system without O_DIRECT */
        error = write_file(p, j, false);
        if (!error) {
            pthread_mutex_lock(&p->lock);
            p->direct = direct = false;
            pthread_mutex_unlock(&p->lock);
        }
    }
    if (error != ENOSPC && error != EDQUOT) return error;
    pthread_mutex_lock(&p->lock);
    warn(p, WARN_FULL, "the disk is full, old entries make room", 0);
    const uint64_t keep = p->stats.bytes > 2 * j->entry->size ? p->stats.bytes - 2 * j->entry->size : 0;
    make_room(p, 0, keep);
    pthread_mutex_unlock(&p->lock);
    return write_file(p, j, direct);
}

static void *writer(void *arg)
{
    aff_prefix *p = arg;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->first && !p->stop) pthread_cond_wait(&p->work, &p->lock);
        job *j = p->first;
        if (!j) break;
        p->first = j->next;
        if (!p->first) p->last = &p->first;
        p->busy = true;
        pthread_mutex_unlock(&p->lock);
        const int error = write_entry(p, j);
        free(j->buf);
        pthread_mutex_lock(&p->lock);
        p->waiting -= j->entry->size;
        j->entry->writing = false;
        if (error) {
            p->stats.write_failures++;
            warn(p, WARN_WRITE, "cannot write an entry", error);
            j->entry->dead = true;
        } else {
            (*(j->entry->e.kind == AFF_PFX_BLOCK ? &p->stats.blocks_written : &p->stats.checkpoints_written))++;
        }
        unpin(p, j->entry);
        free(j);
        p->busy = false;
        pthread_cond_broadcast(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void wait_idle(aff_prefix *p)
{
    while (p->first || p->busy) pthread_cond_wait(&p->done, &p->lock);
}

void aff__prefix_flush(aff_prefix *p)
{
    pthread_mutex_lock(&p->lock);
    wait_idle(p);
    pthread_mutex_unlock(&p->lock);
}

/* ---- open and close ---- */

static void name_of(const aff_pfx_entry *e, char name[NAME])
{
    snprintf(name, NAME, "%016llx-%016llx%016llx.%s", (unsigned long long)e->fingerprint.lo,
             (unsigned long long)e->key.hi, (unsigned long long)e->key.lo, e->kind == AFF_PFX_BLOCK ? "blk" : "ckp");
}

static bool is_entry_name(const char *name)
{
    const size_t n = strlen(name);
    return n == 16 + 1 + 32 + 4 && strspn(name, "0123456789abcdef") == 16 && name[16] == '-' &&
           strspn(name + 17, "0123456789abcdef") == 32 &&
           (strcmp(name + 49, ".blk") == 0 || strcmp(name + 49, ".ckp") == 0);
}

/* The header of a file that is there; false if it is none of ours. */
static bool read_head(aff_prefix *p, const char *name, aff_pfx_entry *e, uint64_t size)
{
    uint8_t *page = NULL;
    const int fd = openat(p->dirfd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    bool ok = false;
    if (fd >= 0 && aff__calloc(&page, AFF_PFX_PAGE, 1, "cache entry", NULL) == AFF_OK &&
        pread(fd, page, AFF_PFX_PAGE, 0) == AFF_PFX_PAGE)
        ok = aff__pfx_head(e, page, AFF_PFX_PAGE, size);
    free(page);
    if (fd >= 0) close(fd);
    return ok;
}

typedef struct {
    entry *e;
    struct timespec used;
} aged;

static int by_age(const void *pa, const void *pb)
{
    const aged *a = pa, *b = pb;
    const bool fa = a->e->e.kind == 0, fb = b->e->e.kind == 0; /* what cannot be used goes first */
    if (fa != fb) return fa ? -1 : 1;
    if (a->used.tv_sec != b->used.tv_sec) return a->used.tv_sec < b->used.tv_sec ? -1 : 1;
    return a->used.tv_nsec < b->used.tv_nsec ? -1 : a->used.tv_nsec > b->used.tv_nsec;
}

/* One name of the folder: ours, another's, leavings, or nothing of the cache's. */
static aff_status scan_name(aff_prefix *p, const char *name, aged **list, size_t *n, size_t *cap, aff_error *err)
{
    struct stat st;
    char own[24], want[NAME];
    if (strncmp(name, "tmp-", 4) == 0) unlinkat(p->dirfd, name, 0);
    if (!is_entry_name(name) || fstatat(p->dirfd, name, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode))
        return AFF_OK;
    aff_pfx_entry head = {0};
    snprintf(own, sizeof own, "%016llx-", (unsigned long long)p->fingerprint.lo);
    if (strncmp(name, own, 17) == 0) {
        const bool ok = read_head(p, name, &head, (uint64_t)st.st_size) && same(head.fingerprint, p->fingerprint);
        if (ok) name_of(&head, want);
        if (!ok || strcmp(want, name) != 0) {
            unlinkat(p->dirfd, name, 0);
            p->stats.damaged++;
            return AFF_OK;
        }
    }
    if (*n == *cap) {
        *cap = *cap ? 2 * *cap : 1024;
        AFF_TRY(aff__realloc(list, *cap, sizeof **list, "cache index", err));
    }
    aged a = {.used = st.st_mtim};
    AFF_TRY(aff__calloc(&a.e, 1, sizeof *a.e, "cache index", err));
    a.e->e = head;
    a.e->size = (uint64_t)st.st_size;
    snprintf(a.e->name, NAME, "%s", name);
    (*list)[(*n)++] = a;
    return AFF_OK;
}

static aff_status scan(aff_prefix *p, aff_error *err)
{
    DIR *d = opendir(p->dir);
    if (!d) return aff__fail_errno(err, "prefix cache %s: cannot list the folder", p->dir);
    aged *list = NULL;
    size_t n = 0, cap = 0;
    aff_status s = AFF_OK;
    for (struct dirent *x; s == AFF_OK && (x = readdir(d));) s = scan_name(p, x->d_name, &list, &n, &cap, err);
    closedir(d);
    if (n) qsort(list, n, sizeof *list, by_age);
    for (size_t i = 0; i < n; i++) {
        if (s == AFF_OK && !(list[i].e->e.kind && find(p, list[i].e->e.key)))
            insert(p, list[i].e);
        else
            free(list[i].e);
    }
    free(list);
    if (s == AFF_OK) make_room(p, 0, p->stats.limit);
    return s;
}

/* Files of a session that is over. */
static void clear_session(aff_prefix *p)
{
    DIR *d = opendir(p->dir);
    if (!d) return;
    for (struct dirent *x; (x = readdir(d));)
        if (is_entry_name(x->d_name) || strncmp(x->d_name, "tmp-", 4) == 0) unlinkat(dirfd(d), x->d_name, 0);
    closedir(d);
}

static aff_status take_folder(aff_prefix *p, aff_error *err)
{
    const char *dir = p->o.dir;
    if (!dir || !*dir) return aff__fail(err, AFF_E_INVALID, "prefix cache: expected a folder");
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return aff__fail_errno(err, "prefix cache %s: cannot make the folder", dir);
    char path[4096];
    AFF_TRY(aff__path_join(path, sizeof path, dir, "lock", err));
    p->lockfd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (p->lockfd < 0) return aff__fail_errno(err, "prefix cache %s: cannot write there", dir);
    if (flock(p->lockfd, LOCK_EX | LOCK_NB) != 0)
        return errno == EWOULDBLOCK
                   ? aff__fail(err, AFF_E_IO, "prefix cache %s: another process uses this folder: give each its own",
                               dir)
                   : aff__fail_errno(err, "prefix cache %s: cannot lock", dir);
    AFF_TRY(aff__path_join(path, sizeof path, dir, "session", err));
    if (!p->o.persistent && mkdir(path, 0700) != 0 && errno != EEXIST)
        return aff__fail_errno(err, "prefix cache %s: cannot make the folder", path);
    const char *use = p->o.persistent ? dir : path;
    AFF_TRY(aff__strndup(&p->dir, use, strlen(use), err));
    p->dirfd = open(p->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (p->dirfd < 0) return aff__fail_errno(err, "prefix cache %s: cannot open the folder", p->dir);
    if (!p->o.persistent) clear_session(p);
    const int probe = openat(p->dirfd, "tmp-probe", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (probe < 0) return aff__fail_errno(err, "prefix cache %s: cannot write there", p->dir);
    close(probe);
    unlinkat(p->dirfd, "tmp-probe", 0);
    return AFF_OK;
}

static aff_status set_limit(aff_prefix *p, const aff_net *net, aff_error *err)
{
    struct statvfs v;
    aff_seq_plan plan;
    AFF_TRY(aff__seq_plan(&plan, net, 1, err));
    p->stats.limit = p->o.bytes;
    if (!p->stats.limit) {
        if (fstatvfs(p->dirfd, &v) != 0)
            return aff__fail_errno(err, "prefix cache %s: cannot ask for its free space", p->dir);
        p->stats.limit = (uint64_t)v.f_bavail * v.f_frsize / 4;
        if (p->stats.limit > default_limit) p->stats.limit = default_limit;
    }
    const uint64_t block = (uint64_t)(plan.per_position * p->block) + 2 * AFF_PFX_PAGE;
    const uint64_t least = plan.raw + plan.history + plan.draft + (MIN_BLOCKS + 1) * block;
    if (p->stats.limit < least)
        return aff__fail(err, AFF_E_LIMIT,
                         "prefix cache %s: bound of %llu bytes: expected %llu at least, for one checkpoint and %d "
                         "blocks of %d tokens",
                         p->dir, (unsigned long long)p->stats.limit, (unsigned long long)least, MIN_BLOCKS, p->block);
    return AFF_OK;
}

static aff_status start(aff_prefix *p, const aff_net *net, aff_error *err)
{
    AFF_TRY(aff__calloc(&p->by_key, BUCKETS, sizeof *p->by_key, "cache index", err));
    AFF_TRY(aff__calloc(&p->by_parent, BUCKETS, sizeof *p->by_parent, "cache index", err));
    AFF_TRY(take_folder(p, err));
    AFF_TRY(set_limit(p, net, err));
    AFF_TRY(scan(p, err));
    AFF_TRY(aff__aio_create(&p->reader, !p->o.no_uring, err));
    AFF_TRY(aff__aio_create(&p->io, !p->o.no_uring, err));
    if (pthread_create(&p->thread, NULL, writer, p) != 0)
        return aff__fail(err, AFF_E_IO, "prefix cache: cannot start its thread");
    p->started = true;
    return AFF_OK;
}

aff_status aff__prefix_open(aff_prefix **out, const aff_net *net, const aff_prefix_options *o, aff_error *err)
{
    aff_prefix *p;
    *out = NULL;
    if (o->block < 0 || o->block > AFF_PFX_MAX_TOKENS)
        return aff__fail(err, AFF_E_INVALID, "prefix cache: tokens a block: expected 1 to %d, got %d",
                         (int)AFF_PFX_MAX_TOKENS, o->block);
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "prefix cache", err));
    p->o = *o;
    p->block = o->block ? o->block : DEFAULT_BLOCK;
    p->direct = !o->no_direct;
    p->dirfd = p->lockfd = -1;
    p->last = &p->first;
    p->fingerprint = aff__seq_fingerprint(net, o->results);
    p->fingerprint.lo ^=
        (uint64_t)p->block * UINT64_C(0x9E3779B97F4A7C15); /* blocks of another length are another layout */
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    const aff_status s = start(p, net, err);
    if (s != AFF_OK) {
        aff__prefix_close(p);
        return s;
    }
    *out = p;
    return AFF_OK;
}

void aff__prefix_close(aff_prefix *p)
{
    if (!p) return;
    if (p->started) {
        pthread_mutex_lock(&p->lock);
        p->stop = true;
        pthread_cond_signal(&p->work);
        pthread_mutex_unlock(&p->lock);
        pthread_join(p->thread, NULL);
    }
    for (entry *e = p->newest, *next; e; e = next) {
        next = e->older;
        free(e);
    }
    if (p->dir && !p->o.persistent) {
        clear_session(p);
        rmdir(p->dir);
    }
    if (p->dirfd >= 0) close(p->dirfd);
    if (p->lockfd >= 0) close(p->lockfd);
    aff__aio_free(p->reader);
    aff__aio_free(p->io);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    free(p->by_key);
    free(p->by_parent);
    free(p->dir);
    free(p);
}

aff_prefix_stats aff__prefix_stats(aff_prefix *p)
{
    pthread_mutex_lock(&p->lock);
    aff_prefix_stats s = p->stats;
    s.direct = p->direct;
    s.uring = aff__aio_uring(p->io);
    pthread_mutex_unlock(&p->lock);
    return s;
}

/* ---- restore ---- */

/* A chain of entries that lead to one checkpoint, pinned. */
typedef struct {
    entry **block;   /* [n] from the root */
    int64_t n, used; /* blocks known; of them before the checkpoint */
    entry *ckpt;
} chain;

static void unpin_chain(aff_prefix *p, chain *c)
{
    for (int64_t i = 0; i < c->n; i++) unpin(p, c->block[i]);
    if (c->ckpt) unpin(p, c->ckpt);
    c->n = 0;
    c->ckpt = NULL;
}

static entry *best_checkpoint(aff_prefix *p, aff_hash parent, const int32_t *id, int64_t n, int64_t most,
                              int64_t capacity)
{
    entry *best = NULL;
    for (entry *e = *parent_chain(p, parent); e; e = e->next_parent) {
        if (!same(e->e.parent, parent) || e->writing || (int64_t)e->e.n > n || e->e.low > most || e->e.pos > capacity)
            continue;
        if (best && best->e.n >= e->e.n) continue;
        if (same(aff__pfx_key(p->fingerprint, AFF_PFX_CHECKPOINT, parent, id, e->e.n), e->e.key)) best = e;
    }
    return best;
}

/* Under the lock. c->block has room for n / block + 1. */
static void look_up(aff_prefix *p, const int32_t *id, int64_t n, int64_t most, int64_t capacity, chain *c,
                    aff_hash *keys)
{
    keys[0] = root;
    for (c->n = 0; (c->n + 1) * p->block <= n; c->n++) {
        const aff_hash key =
            aff__pfx_key(p->fingerprint, AFF_PFX_BLOCK, keys[c->n], id + c->n * p->block, (uint32_t)p->block);
        entry *e = find(p, key);
        if (!e || e->writing) break;
        e->pins++;
        c->block[c->n] = e;
        keys[c->n + 1] = key;
    }
    for (c->used = c->n; c->used >= 0; c->used--) {
        const int64_t at = c->used * p->block;
        if ((c->ckpt = best_checkpoint(p, keys[c->used], id + at, n - at, most, capacity))) {
            c->ckpt->pins++;
            return;
        }
    }
    c->used = 0;
}

/* Reads a batch of whole files into buf[i] (aligned, of the entries' sizes). False at the first that cannot be read:
 * *bad. */
static bool read_files(aff_prefix *p, entry *const *e, int n, uint8_t *const *buf, bool direct, int *bad)
{
    aff_io io[BATCH];
    bool ok = true;
    for (int i = 0; i < n; i++) {
        struct stat st;
        io[i] = (aff_io){.buf = buf[i], .len = e[i]->size};
        io[i].fd = openat(p->dirfd, e[i]->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | (direct ? O_DIRECT : 0));
        if (io[i].fd < 0 && errno == EINVAL && direct)
            io[i].fd = openat(p->dirfd, e[i]->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (ok && (io[i].fd < 0 || fstat(io[i].fd, &st) != 0 || (uint64_t)st.st_size != e[i]->size)) {
            ok = false;
            *bad = i;
        }
    }
    if (ok) aff__aio_run(p->reader, io, n, false);
    for (int i = 0; i < n; i++) {
        if (ok && io[i].error) {
            ok = false;
            *bad = i;
        }
        if (io[i].fd >= 0) {
            if (!direct) posix_fadvise(io[i].fd, 0, 0, POSIX_FADV_DONTNEED);
            close(io[i].fd);
        }
    }
    return ok;
}

/* The entry is what the index says, whole, and of these tokens. */
static bool believe(const aff_prefix *p, const entry *e, const uint8_t *buf, const int32_t *id)
{
    aff_pfx_entry f;
    return aff__pfx_check(&f, buf, e->size) && f.kind == e->e.kind && f.n == e->e.n && f.pos == e->e.pos &&
           f.low == e->e.low && same(f.fingerprint, p->fingerprint) && same(f.key, e->e.key) &&
           same(f.parent, e->e.parent) && aff__pfx_same_ids(&f, buf, id);
}

typedef enum { LOADED, DAMAGED, FAILED } outcome;

static outcome load_block(aff_seq *s, const entry *e, const uint8_t *buf, int64_t from, aff_status *st, aff_error *err)
{
    if (e->e.payload != aff__seq_rows_bytes(s, from, from + e->e.n)) return DAMAGED;
    *st = aff__seq_rows_load(s, from, from + e->e.n, buf + aff__pfx_payload_at(e->e.n), err);
    return *st == AFF_OK ? LOADED : FAILED;
}

static outcome load_checkpoint(aff_prefix *p, aff_seq *s, const entry *e, const uint8_t *buf, aff_status *st,
                               aff_error *err)
{
    const int64_t from = e->e.pos - e->e.n;
    if (e->e.pos - e->e.low > AFF_MAX_ROLLBACK) return DAMAGED;
    const uint64_t rows = aff__seq_rows_bytes(s, from, e->e.pos), tail = aff__seq_tail_bytes(s, e->e.pos, e->e.low);
    const uint8_t *payload = buf + aff__pfx_payload_at(e->e.n);
    if (e->e.payload != rows + tail) return DAMAGED;
    *st = aff__seq_rows_load(s, from, e->e.pos, payload, err);
    if (*st == AFF_OK) *st = aff__seq_tail_load(s, e->e.pos, e->e.low, payload + rows, err);
    if (*st != AFF_OK) return FAILED;
    const bool known = e->e.state.lo || e->e.state.hi;
    return p->o.verify && known && !same(aff__seq_digest(s), e->e.state) ? DAMAGED : LOADED;
}

/* The chain's files into the sequence; *bad: the entry that is no good. */
static outcome load_chain(aff_prefix *p, aff_seq *s, const int32_t *id, const chain *c, entry **bad, aff_status *st,
                          aff_error *err)
{
    uint8_t *buf[BATCH] = {0};
    outcome out = LOADED;
    pthread_mutex_lock(&p->lock);
    const bool direct = p->direct;
    pthread_mutex_unlock(&p->lock);
    for (int64_t at = 0; out == LOADED && at <= c->used;) {
        entry *e[BATCH];
        int n = 0, broken = 0;
        uint64_t bytes = 0;
        for (; n < BATCH && at + n <= c->used && (n == 0 || bytes < waiting_limit); n++) {
            e[n] = at + n < c->used ? c->block[at + n] : c->ckpt;
            bytes += e[n]->size;
            buf[n] = aligned_alloc(AFF_PFX_PAGE, (size_t)e[n]->size);
            if (!buf[n]) {
                *st = aff__fail(err, AFF_E_NOMEM, "prefix cache: out of memory for an entry of %llu bytes",
                                (unsigned long long)e[n]->size);
                out = FAILED;
                n++;
                break;
            }
        }
        if (out == LOADED && !read_files(p, e, n, buf, direct, &broken)) {
            *bad = e[broken];
            out = DAMAGED;
        }
        for (int i = 0; out == LOADED && i < n; i++) {
            const int64_t from = (at + i) * p->block;
            *bad = e[i];
            out = !believe(p, e[i], buf[i], id + from) ? DAMAGED
                  : at + i < c->used                   ? load_block(s, e[i], buf[i], from, st, err)
                                                       : load_checkpoint(p, s, e[i], buf[i], st, err);
        }
        for (int i = 0; i < n; i++) free(buf[i]);
        at += n;
    }
    return out;
}

static void touch_chain(aff_prefix *p, const chain *c)
{
    for (int64_t i = c->n - 1; i >= c->used; i--) touch(p, c->block[i]);
    if (c->ckpt) touch(p, c->ckpt);
    for (int64_t i = c->used - 1; i >= 0; i--) touch(p, c->block[i]);
}

/* Under the lock: what cannot be used goes, with a digest that does not fit everything under it. */
static void condemn(aff_prefix *p, chain *c, entry *bad)
{
    const bool all = bad == c->ckpt && p->o.verify;
    const int64_t used = c->used;
    unpin_chain(p, c);
    for (int64_t i = 0; all && i < used; i++) drop(p, c->block[i]);
    drop(p, bad);
    p->stats.damaged += all ? (uint64_t)used + 1 : 1;
    warn(p, WARN_DAMAGED, "a damaged entry was removed", 0);
}

aff_status aff__prefix_restore(aff_prefix *p, aff_seq *s, const int32_t *id, int64_t n, int64_t most, int64_t *restored,
                               int64_t *matched, aff_error *err)
{
    chain c = {0};
    aff_hash *keys = NULL;
    outcome out = LOADED;
    aff_status st;
    *restored = *matched = 0;
    aff__seq_reset(s);
    if (n < 0 || most < 0)
        return aff__fail(err, AFF_E_INVALID, "prefix cache: %lld tokens, at most %lld", (long long)n, (long long)most);
    AFF_TRY(aff__calloc(&c.block, (uint64_t)(n / p->block) + 1, sizeof *c.block, "cache look-up", err));
    st = aff__calloc(&keys, (uint64_t)(n / p->block) + 2, sizeof *keys, "cache look-up", err);
    if (most > aff__seq_capacity(s)) most = aff__seq_capacity(s);
    pthread_mutex_lock(&p->lock);
    wait_idle(p);
    p->stats.lookups++;
    while (st == AFF_OK) {
        entry *bad = NULL;
        look_up(p, id, n, most, aff__seq_capacity(s), &c, keys);
        *matched = c.n * p->block;
        if (!c.ckpt) break;
        pthread_mutex_unlock(&p->lock);
        out = load_chain(p, s, id, &c, &bad, &st, err);
        if (out == LOADED && aff__seq_pos(s) > most) st = aff__seq_rollback(s, most, err);
        if (out != LOADED || st != AFF_OK) aff__seq_reset(s);
        pthread_mutex_lock(&p->lock);
        if (out != DAMAGED) break;
        condemn(p, &c, bad);
    }
    if (st == AFF_OK && c.ckpt) {
        touch_chain(p, &c);
        p->stats.hits++;
        *restored = aff__seq_pos(s);
        p->stats.tokens_restored += (uint64_t)*restored;
    }
    unpin_chain(p, &c);
    pthread_mutex_unlock(&p->lock);
    free(c.block);
    free(keys);
    return st;
}

/* ---- publish ---- */

/* Under the lock: place in the index and in the writer's queue. False: no room. */
static bool enqueue(aff_prefix *p, const aff_pfx_entry *x, uint8_t *buf, entry **out)
{
    const uint64_t size = aff__pfx_size(x);
    job *j = NULL;
    entry *e = NULL;
    while (p->waiting && p->waiting + size > waiting_limit) pthread_cond_wait(&p->done, &p->lock);
    if (!make_room(p, size, p->stats.limit)) {
        warn(p, WARN_SMALL, "the bound is too small for a context of this length", 0);
        return false;
    }
    if (aff__calloc(&j, 1, sizeof *j, "cache entry", NULL) != AFF_OK ||
        aff__calloc(&e, 1, sizeof *e, "cache entry", NULL) != AFF_OK) {
        free(j);
        return false;
    }
    *e = (entry){.e = *x, .size = size, .writing = true, .pins = 2}; /* the writer's and the publisher's */
    name_of(x, e->name);
    insert(p, e);
    *j = (job){.entry = e, .buf = buf};
    *p->last = j;
    p->last = &j->next;
    p->waiting += size;
    pthread_cond_signal(&p->work);
    *out = e;
    return true;
}

/* An entry's file in memory, made outside the lock; NULL without memory, or when a device does not give the state. */
static uint8_t *compose(aff_pfx_entry *x, const aff_seq *s, const int32_t *id)
{
    const int64_t from = x->pos - x->n;
    uint8_t *buf = aligned_alloc(AFF_PFX_PAGE, (size_t)aff__pfx_size(x)),
            *payload = buf ? buf + aff__pfx_payload_at(x->n) : NULL;
    if (!buf) return NULL;
    aff_status st = aff__seq_rows_save(s, from, x->pos, payload, NULL);
    if (st == AFF_OK && x->kind == AFF_PFX_CHECKPOINT) st = aff__seq_tail_save(s, payload + aff__seq_rows_bytes(s, from, x->pos), NULL);
    if (st != AFF_OK) {
        free(buf);
        return NULL;
    }
    aff__pfx_seal(x, id + from, buf);
    return buf;
}

/* The entry, pinned: found or made. NULL if it cannot be made. */
static entry *provide(aff_prefix *p, aff_pfx_entry *x, const aff_seq *s, const int32_t *id)
{
    pthread_mutex_lock(&p->lock);
    entry *e = find(p, x->key);
    if (e) e->pins++;
    pthread_mutex_unlock(&p->lock);
    if (e) return e;
    if (x->kind == AFF_PFX_CHECKPOINT && p->o.verify) x->state = aff__seq_digest(s);
    uint8_t *buf = compose(x, s, id);
    pthread_mutex_lock(&p->lock);
    if (!buf || !enqueue(p, x, buf, &e)) {
        free(buf);
        p->stats.write_failures++;
        e = NULL;
    }
    pthread_mutex_unlock(&p->lock);
    return e;
}

aff_status aff__prefix_publish(aff_prefix *p, const aff_seq *s, const int32_t *id, aff_error *err)
{
    const int64_t pos = aff__seq_pos(s), blocks = pos / p->block;
    chain c = {0};
    aff_hash parent = root;
    if (pos == 0) return AFF_OK;
    AFF_TRY(aff__calloc(&c.block, (uint64_t)blocks + 1, sizeof *c.block, "cache entries", err));
    for (c.n = 0; c.n <= blocks; c.n++) {
        const bool last = c.n == blocks;
        const int64_t from = c.n * p->block, to = last ? pos : from + p->block;
        aff_pfx_entry x = {.kind = last ? AFF_PFX_CHECKPOINT : AFF_PFX_BLOCK,
                           .n = (uint32_t)(to - from),
                           .fingerprint = p->fingerprint,
                           .parent = parent};
        x.pos = to;
        x.low = last ? aff__seq_low(s) : 0;
        x.key = parent = aff__pfx_key(p->fingerprint, x.kind, parent, id + from, x.n);
        x.payload = aff__seq_rows_bytes(s, from, to) + (last ? aff__seq_tail_bytes(s, pos, x.low) : 0);
        entry *e = provide(p, &x, s, id);
        if (!e) break;
        c.block[c.n] = e;
    }
    pthread_mutex_lock(&p->lock);
    c.used = c.n;
    touch_chain(p, &c); /* from the checkpoint down to the root */
    unpin_chain(p, &c);
    pthread_mutex_unlock(&p->lock);
    free(c.block);
    return AFF_OK;
}
