/* The runtime table of emulated devices. Streams are queues; nothing runs until somebody waits. Then the heads of all
 * queues of all devices are tried in an order that a seed chooses, so work without an event between it runs in every
 * order sooner or later. A kernel that waits on memory steps back and others go on; when none can, the host's other
 * threads get a moment, and after DEADLOCK_NS the device has a fault. */
#define _GNU_SOURCE
#include "backend/gpu/emu.h"
#include "backend/gpu/rt_internal.h"
#include "base/clock.h"
#include "base/mem.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define DEADLOCK_NS 10000000000ull
enum { PAGE = 65536, SHARED_NV = 99 * 1024, SHARED_AMD = 64 * 1024 };

typedef enum { DO_COPY, DO_FILL, DO_LAUNCH, DO_RECORD, DO_WAIT } work_kind;

typedef struct work {
    struct work *next;
    work_kind kind;
    void *to;
    const void *from;
    uint64_t bytes;
    uint8_t byte;
    aff_event *event;
    uint64_t ticket; /* of the event */
    aff_kernel k;
    unsigned grid, block, smem, flags;
    aff_emu_launch *launch; /* once begun */
    unsigned char args[];
} work;

typedef struct piece {
    struct piece *next;
    void *p;
    uint64_t bytes;
} piece;

typedef struct device {
    aff_rt rt;
    const aff_emu_kernel *kernels;
    uint64_t used;
    piece *pieces, *commits;
    aff_stream *streams;
    aff_graph *capturing;
    uint64_t launches, fault_at, taken; /* device.h */
    bool broken;
    aff_error fault;
    struct device *next;
} device;

struct aff_stream {
    device *d;
    aff_stream *next;
    work *head, **tail;
    bool captured;
};

/* A record gives the event a new ticket when it is queued; the event is reached up to `reached`. */
struct aff_event {
    uint64_t ticket, reached, ns;
    const aff_graph *in; /* the capture it was recorded in: orders the captured streams, which are one queue here */
};

struct aff_graph {
    work *head, **tail;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static device *devices;
static uint32_t thread_seed, order = 1;
static int waiting; /* threads that want the lock to queue work: a pass goes on beside them, as on a device */

static device *of(aff_rt *rt)
{
    return (device *)rt;
}

void aff__rt_emu_seed(uint32_t seed)
{
    pthread_mutex_lock(&lock);
    thread_seed = seed;
    order = seed | 1;
    pthread_mutex_unlock(&lock);
}

static aff_status broken(const device *d, aff_error *err)
{
    if (err) *err = d->fault;
    return AFF_E_DEVICE;
}

/* ---- queues ---- */

static void free_works(work *w)
{
    while (w) {
        work *next = w->next;
        aff__emu_launch_free(w->launch);
        free(w);
        w = next;
    }
}

static aff_status add(aff_stream *s, const work *w, const void *args, size_t args_size, aff_error *err)
{
    work *n;
    __atomic_fetch_add(&waiting, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&lock);
    __atomic_fetch_sub(&waiting, 1, __ATOMIC_RELAXED);
    aff_status st =
        s->d->broken ? broken(s->d, err) : aff__calloc(&n, 1, sizeof *n + args_size, "emulated stream", err);
    if (st == AFF_OK) {
        *n = *w;
        if (args_size) memcpy(n->args, args, args_size);
        if (s->captured) {
            *s->d->capturing->tail = n;
            s->d->capturing->tail = &n->next;
        } else {
            *s->tail = n;
            s->tail = &n->next;
        }
    }
    pthread_mutex_unlock(&lock);
    return st;
}

static void set_fault(device *d, const char *what)
{
    d->broken = true;
    aff__fail(&d->fault, AFF_E_DEVICE, "emu:%d: %s", d->rt.info.index, what);
}

static aff_emu_state run_launch(aff_stream *s, work *w)
{
    device *d = s->d;
    aff_error e;
    if (!w->launch) {
        if (++d->launches == d->fault_at) {
            char text[160];
            snprintf(text, sizeof text, "kernel %s: a fault, as was asked for, in launch %llu", aff__kernel_name(w->k), (unsigned long long)d->launches);
            set_fault(d, text);
            return AFF_EMU_FAULT;
        }
        thread_seed = thread_seed ? thread_seed * 747796405u + 1 : 0;
        if (aff__emu_launch_create(&w->launch, &d->kernels[w->k], w->grid, w->block, w->smem,
                                   w->flags & AFF_LAUNCH_COOPERATIVE, w->args, thread_seed, &e) != AFF_OK) {
            set_fault(d, e.msg);
            return AFF_EMU_FAULT;
        }
    }
    const aff_emu_state st = aff__emu_launch_run(w->launch);
    if (st == AFF_EMU_FAULT) set_fault(d, aff__emu_launch_text(w->launch));
    return st;
}

/* Tries the head of a queue; true when it is through. */
static bool step(aff_stream *s)
{
    work *w = s->head;
    switch (w->kind) {
    case DO_COPY:
        memmove(w->to, w->from, w->bytes);
        break;
    case DO_FILL:
        memset(w->to, w->byte, w->bytes);
        break;
    case DO_LAUNCH:
        if (run_launch(s, w) != AFF_EMU_DONE) return false;
        break;
    case DO_RECORD:
        if (w->event->reached < w->ticket) w->event->reached = w->ticket;
        w->event->ns = aff__now_ns();
        break;
    case DO_WAIT:
        if (w->event->reached < w->ticket) return false;
        break;
    }
    s->head = w->next;
    if (!s->head) s->tail = &s->head;
    w->next = NULL;
    free_works(w);
    return true;
}

/* One step of some stream of some device; false when none can go on. */
static bool step_any(void)
{
    aff_stream *s[64];
    int n = 0;
    for (device *d = devices; d; d = d->next)
        for (aff_stream *t = d->broken ? NULL : d->streams; t && n < 64; t = t->next)
            if (t->head) s[n++] = t;
    while (n) {
        order = order * 1664525u + 1013904223u;
        const int i = (int)((order >> 8) % (unsigned)n);
        if (step(s[i])) return true;
        s[i] = s[--n];
    }
    return false;
}

static const char *stuck(const device *d)
{
    for (const aff_stream *s = d->streams; s; s = s->next)
        if (s->head && s->head->launch) return aff__emu_launch_text(s->head->launch);
    return "a stream waits for an event that nothing records";
}

/* Until s is empty or e has reached `ticket`. */
static aff_status run_until(device *d, const aff_stream *s, const aff_event *e, uint64_t ticket, aff_error *err)
{
    uint64_t since = 0;
    pthread_mutex_lock(&lock);
    while (!d->broken && (s ? s->head != NULL : e->reached < ticket)) {
        if (step_any()) {
            since = 0;
            if (!__atomic_load_n(&waiting, __ATOMIC_RELAXED)) continue;
            pthread_mutex_unlock(&lock);
            for (int i = 0; i < 100 && __atomic_load_n(&waiting, __ATOMIC_RELAXED); i++) nanosleep(&(struct timespec){0, 20000}, NULL);
            pthread_mutex_lock(&lock);
            continue;
        }
        const uint64_t t = aff__now_ns();
        if (!since) since = t;
        if (t - since > DEADLOCK_NS) {
            char text[320];
            snprintf(text, sizeof text, "deadlock: %s", stuck(d));
            set_fault(d, text);
            break;
        }
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, 50000}, NULL);
        pthread_mutex_lock(&lock);
    }
    const aff_status st = d->broken ? broken(d, err) : AFF_OK;
    pthread_mutex_unlock(&lock);
    return st;
}

/* ---- memory ---- */

/* Counts bytes of device memory; false when there are not that many. */
static bool charge(device *d, uint64_t bytes)
{
    d->used += d->taken < d->rt.info.memory - d->used ? d->taken : d->rt.info.memory - d->used; /* the other program was first */
    d->taken = 0;
    const bool ok = bytes <= d->rt.info.memory - d->used;
    if (ok) d->used += bytes;
    return ok;
}

static aff_status full(device *d, uint64_t bytes, const char *what, aff_error *err)
{
    return aff__fail(err, AFF_E_NOMEM, "emu:%d: out of memory: %s needs %llu bytes, %llu of %llu are free",
                     d->rt.info.index, what, (unsigned long long)bytes,
                     (unsigned long long)(d->rt.info.memory - d->used), (unsigned long long)d->rt.info.memory);
}

static aff_status emu_free_memory(aff_rt *rt, uint64_t *bytes, aff_error *err)
{
    pthread_mutex_lock(&lock);
    *bytes = rt->info.memory - of(rt)->used;
    pthread_mutex_unlock(&lock);
    return AFF_OK;
}

/* Device memory starts as NaNs. */
static aff_status emu_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    device *d = of(rt);
    piece *b = NULL;
    *p = NULL;
    pthread_mutex_lock(&lock);
    aff_status s = charge(d, bytes) ? AFF_OK : full(d, bytes, what, err);
    if (s == AFF_OK) {
        s = aff__calloc(&b, 1, sizeof *b, what, err);
        if (s == AFF_OK && posix_memalign(&b->p, 256, bytes) != 0)
            s = aff__fail(err, AFF_E_NOMEM, "emu:%d: the host has no %llu bytes for %s", rt->info.index,
                          (unsigned long long)bytes, what);
        if (s != AFF_OK) {
            free(b);
            d->used -= bytes;
        } else {
            memset(b->p, 0xff, bytes);
            b->bytes = bytes;
            b->next = d->pieces;
            d->pieces = b;
            *p = b->p;
        }
    }
    pthread_mutex_unlock(&lock);
    return s;
}

static void emu_free(aff_rt *rt, void *p)
{
    device *d = of(rt);
    pthread_mutex_lock(&lock);
    for (piece **q = &d->pieces; *q; q = &(*q)->next)
        if ((*q)->p == p) {
            piece *b = *q;
            *q = b->next;
            d->used -= b->bytes;
            free(b->p);
            free(b);
            break;
        }
    pthread_mutex_unlock(&lock);
}

static aff_status emu_reserve(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    void *q = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (q == MAP_FAILED)
        return aff__fail_errno(err, "emu:%d: reserving %llu bytes of address space for %s", rt->info.index,
                               (unsigned long long)bytes, what);
    *p = q;
    return AFF_OK;
}

static void uncharge(device *d, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    d->used -= bytes;
    pthread_mutex_unlock(&lock);
}

static aff_status emu_commit(aff_rt *rt, void *p, uint64_t bytes, const char *what, aff_error *err)
{
    device *d = of(rt);
    piece *c;
    AFF_TRY(aff__calloc(&c, 1, sizeof *c, what, err));
    pthread_mutex_lock(&lock);
    aff_status s = charge(d, bytes) ? AFF_OK : full(d, bytes, what, err);
    pthread_mutex_unlock(&lock);
    if (s == AFF_OK && mprotect(p, bytes, PROT_READ | PROT_WRITE) != 0) {
        s = aff__fail_errno(err, "emu:%d: committing %llu bytes for %s", rt->info.index, (unsigned long long)bytes,
                            what);
        uncharge(d, bytes);
    }
    if (s != AFF_OK) {
        free(c);
        return s;
    }
    memset(p, 0xff, bytes);
    pthread_mutex_lock(&lock);
    *c = (piece){d->commits, p, bytes};
    d->commits = c;
    pthread_mutex_unlock(&lock);
    return AFF_OK;
}

static void emu_decommit(aff_rt *rt, void *p, uint64_t bytes)
{
    device *d = of(rt);
    pthread_mutex_lock(&lock);
    for (piece **q = &d->commits; *q;) {
        piece *c = *q;
        if ((char *)c->p < (char *)p || (char *)c->p >= (char *)p + bytes) {
            q = &c->next;
            continue;
        }
        *q = c->next;
        d->used -= c->bytes;
        mmap(c->p, c->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        free(c);
    }
    pthread_mutex_unlock(&lock);
}

static void emu_unreserve(aff_rt *rt, void *p, uint64_t bytes)
{
    munmap(p, bytes);
}

static aff_status emu_host_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    return aff__calloc(p, bytes, 1, what, err);
}

static void emu_host_free(aff_rt *rt, void *p)
{
    free(p);
}

static aff_status emu_host_register(aff_rt *rt, void *p, uint64_t bytes, aff_error *err)
{
    return AFF_OK;
}

static void emu_host_unregister(aff_rt *rt, void *p) {}

/* ---- streams and events ---- */

static aff_status emu_stream_create(aff_rt *rt, aff_stream **out, aff_error *err)
{
    aff_stream *s;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "emulated stream", err));
    s->d = of(rt);
    s->tail = &s->head;
    pthread_mutex_lock(&lock);
    s->next = s->d->streams;
    s->d->streams = s;
    pthread_mutex_unlock(&lock);
    *out = s;
    return AFF_OK;
}

static void emu_stream_free(aff_rt *rt, aff_stream *s)
{
    run_until(of(rt), s, NULL, 0, NULL);
    pthread_mutex_lock(&lock);
    for (aff_stream **q = &s->d->streams; *q; q = &(*q)->next)
        if (*q == s) {
            *q = s->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    free_works(s->head);
    free(s);
}

static aff_status emu_sync(aff_rt *rt, aff_stream *s, aff_error *err)
{
    return run_until(of(rt), s, NULL, 0, err);
}

static aff_status emu_event_create(aff_rt *rt, aff_event **out, aff_error *err)
{
    return aff__calloc(out, 1, sizeof **out, "emulated event", err);
}

static void emu_event_free(aff_rt *rt, aff_event *e)
{
    free(e);
}

static aff_status emu_record(aff_rt *rt, aff_event *e, aff_stream *s, aff_error *err)
{
    pthread_mutex_lock(&lock);
    e->in = s->captured ? s->d->capturing : NULL;
    if (!e->in) e->ticket++;
    const work w = {.kind = DO_RECORD, .event = e, .ticket = e->ticket};
    const bool run = !e->in;
    pthread_mutex_unlock(&lock);
    return run ? add(s, &w, NULL, 0, err) : AFF_OK;
}

/* A wait for an event that was never recorded is none, as on the devices. */
static aff_status emu_wait(aff_rt *rt, aff_stream *s, aff_event *e, aff_error *err)
{
    pthread_mutex_lock(&lock);
    const bool joins = e->in && e->in == s->d->capturing;
    if (joins) s->captured = true;
    const work w = {.kind = DO_WAIT, .event = e, .ticket = e->ticket};
    pthread_mutex_unlock(&lock);
    return joins ? AFF_OK : add(s, &w, NULL, 0, err);
}

static aff_status emu_event_sync(aff_rt *rt, aff_event *e, aff_error *err)
{
    pthread_mutex_lock(&lock);
    const uint64_t ticket = e->ticket;
    pthread_mutex_unlock(&lock);
    return run_until(of(rt), NULL, e, ticket, err);
}

static aff_status emu_elapsed(aff_rt *rt, aff_event *from, aff_event *to, float *ms, aff_error *err)
{
    pthread_mutex_lock(&lock);
    *ms = (float)((double)(int64_t)(to->ns - from->ns) * 1e-6);
    pthread_mutex_unlock(&lock);
    return AFF_OK;
}

/* ---- work ---- */

static aff_status emu_copy(aff_rt *rt, aff_stream *s, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    return add(s, &(work){.kind = DO_COPY, .to = to, .from = from, .bytes = bytes}, NULL, 0, err);
}

static aff_status emu_fill(aff_rt *rt, aff_stream *s, void *p, uint8_t byte, uint64_t bytes, aff_error *err)
{
    return add(s, &(work){.kind = DO_FILL, .to = p, .byte = byte, .bytes = bytes}, NULL, 0, err);
}

static aff_status emu_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem,
                             unsigned flags, const void *args, aff_error *err)
{
    if (flags & AFF_LAUNCH_COOPERATIVE && grid > AFF_EMU_COOP)
        return aff__fail(err, AFF_E_INVALID, "emu:%d: kernel %s: %u blocks in a cooperative launch, at most %d",
                         rt->info.index, aff__kernel_name(k), grid, AFF_EMU_COOP);
    return add(s, &(work){.kind = DO_LAUNCH, .k = k, .grid = grid, .block = block, .smem = smem, .flags = flags}, args,
               aff__kernel_table[k].args_size, err);
}

static aff_status emu_kernel_info(aff_rt *rt, aff_kernel k, unsigned block, unsigned smem, aff_kernel_info *out,
                                  aff_error *err)
{
    *out = (aff_kernel_info){.max_threads = (int)aff__kernel_table[k].max_threads, .blocks_per_unit = 1};
    return AFF_OK;
}

/* ---- graphs ---- */

static aff_status emu_capture_begin(aff_rt *rt, aff_stream *s, aff_error *err)
{
    device *d = of(rt);
    aff_graph *g;
    if (d->capturing) return aff__fail(err, AFF_E_INVALID, "emu:%d: a capture is already under way", rt->info.index);
    AFF_TRY(aff__calloc(&g, 1, sizeof *g, "emulated graph", err));
    g->tail = &g->head;
    pthread_mutex_lock(&lock);
    d->capturing = g;
    s->captured = true;
    pthread_mutex_unlock(&lock);
    return AFF_OK;
}

static aff_status emu_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *err)
{
    device *d = of(rt);
    pthread_mutex_lock(&lock);
    *out = d->capturing;
    d->capturing = NULL;
    for (aff_stream *t = d->streams; t; t = t->next) t->captured = false;
    pthread_mutex_unlock(&lock);
    return *out ? AFF_OK : aff__fail(err, AFF_E_INVALID, "emu:%d: no capture is under way", rt->info.index);
}

static aff_status emu_graph_launch(aff_rt *rt, aff_graph *g, aff_stream *s, aff_error *err)
{
    for (const work *w = g->head; w; w = w->next) {
        work copy = *w; /* its arguments follow the struct, and are copied by add */
        copy.next = NULL;
        AFF_TRY(add(s, &copy, w->args, w->kind == DO_LAUNCH ? aff__kernel_table[w->k].args_size : 0, err));
    }
    return AFF_OK;
}

static void emu_graph_free(aff_rt *rt, aff_graph *g)
{
    free_works(g->head);
    free(g);
}

static void emu_close(aff_rt *rt)
{
    device *d = of(rt);
    pthread_mutex_lock(&lock);
    for (device **q = &devices; *q; q = &(*q)->next)
        if (*q == d) {
            *q = d->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (d->capturing) emu_graph_free(rt, d->capturing);
    free(d);
}

static const aff_rt_ops ops = {
    .close = emu_close,
    .free_memory = emu_free_memory,
    .alloc = emu_alloc,
    .free = emu_free,
    .reserve = emu_reserve,
    .commit = emu_commit,
    .decommit = emu_decommit,
    .unreserve = emu_unreserve,
    .host_alloc = emu_host_alloc,
    .host_free = emu_host_free,
    .host_register = emu_host_register,
    .host_unregister = emu_host_unregister,
    .stream_create = emu_stream_create,
    .stream_free = emu_stream_free,
    .sync = emu_sync,
    .event_create = emu_event_create,
    .event_free = emu_event_free,
    .record = emu_record,
    .wait = emu_wait,
    .event_sync = emu_event_sync,
    .elapsed = emu_elapsed,
    .copy = emu_copy,
    .fill = emu_fill,
    .launch = emu_launch,
    .kernel_info = emu_kernel_info,
    .capture_begin = emu_capture_begin,
    .capture_end = emu_capture_end,
    .graph_launch = emu_graph_launch,
    .graph_free = emu_graph_free,
};

aff_status aff__rt_emu_open(aff_rt **out, const aff_device_spec *spec, aff_error *err)
{
    device *d;
    if (spec->index >= spec->count)
        return aff__fail(err, AFF_E_INVALID, "--device emu: device %d of %d", spec->index, spec->count);
    AFF_TRY(aff__calloc(&d, 1, sizeof *d, "emulated device", err));
    d->rt.ops = &ops;
    d->fault_at = spec->fault;
    d->taken = spec->taken;
    d->kernels = spec->amd ? aff__emu_kernels_amd : aff__emu_kernels_nv;
    d->rt.info = (aff_rt_info){.kind = AFF_RT_EMU,
                               .index = spec->index,
                               .name = "emulated device",
                               .memory = spec->bytes,
                               .units = AFF_EMU_COOP,
                               .shared_bytes = spec->amd ? SHARED_AMD : SHARED_NV,
                               .fragment_columns = spec->amd ? 16 : 8,
                               .cooperative = true,
                               .page = PAGE};
    strcpy(d->rt.info.arch, spec->amd ? "amd" : "nv");
    pthread_mutex_lock(&lock);
    d->next = devices;
    devices = d;
    pthread_mutex_unlock(&lock);
    *out = &d->rt;
    return AFF_OK;
}
