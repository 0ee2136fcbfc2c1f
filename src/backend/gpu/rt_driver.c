/* The runtime table over a vendor's driver. Every call that returns a code is checked. */
#include "backend/gpu/rt_driver.h"
#include "base/mem.h"
#include <ctype.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_MEMORY = 2, NO_BINARY = 209 }; /* the same numbers in both */
enum { FN_SHARED_LIMIT = 8, FN_LOCAL = 3, FN_REGISTERS = 4, FN_THREADS = 0 };
enum { ATTR_PROGRAMMATIC = 6, CAPTURE_THREAD_LOCAL = 1, NON_BLOCKING = 1, PORTABLE_MAPPED = 3, COPY_DEFAULT = 4 };

typedef struct mapping {
    struct mapping *next;
    char *p;
    uint64_t bytes;
    void *handle;
} mapping;

typedef struct device {
    aff_rt rt;
    aff_driver *d;
    int dev;
    void *ctx, *module;
    void *fn[AFF_K_COUNT];
    pthread_mutex_t lock; /* of mappings */
    mapping *mappings;
} device;

struct aff_graph {
    void *graph, *exec;
};

static device *of(aff_rt *rt)
{
    return (device *)rt;
}

/* ---- errors ---- */

static void code_text(const aff_driver *d, int code, const char **name, const char **text)
{
    *name = *text = "?";
    if (d->hip) {
        *name = d->hip_error_name(code);
        *text = d->hip_error_text(code);
    } else {
        d->cuda_error_name(code, name);
        d->cuda_error_text(code, text);
    }
}

static aff_status failed(device *v, const char *call, int code, aff_error *err)
{
    const char *name, *text;
    code_text(v->d, code, &name, &text);
    return aff__fail(err, code == OUT_OF_MEMORY ? AFF_E_NOMEM : AFF_E_DEVICE, "%s:%d (%s): %s: %s (%d): %s",
                     v->d->hip ? "hip" : "cuda", v->rt.info.index, v->rt.info.name, call, name, code, text);
}

static const char *const call_names[2][64] = {
#define NAME(member, parameters, cuda, hip) cuda,
    {AFF_DRIVER_CALLS(NAME)},
#undef NAME
#define NAME(member, parameters, cuda, hip) hip,
    {AFF_DRIVER_CALLS(NAME)},
#undef NAME
};
typedef enum {
#define NUMBER(member, parameters, cuda, hip) CALL_##member,
    AFF_DRIVER_CALLS(NUMBER) CALLS
#undef NUMBER
} call_number;
_Static_assert(CALLS <= 64, "call_names has room for every call");

/* Makes a call of device v and leaves the function with its error. */
#define TRY(v, member, ...)                                                                                            \
    do {                                                                                                               \
        const int code_ = (v)->d->member(__VA_ARGS__);                                                                 \
        if (code_) return failed((v), call_names[(v)->d->hip][CALL_##member], code_, err);                             \
    } while (0)

/* Every thread that calls must have the device current. */
static int enter(const device *v)
{
    return v->d->hip ? v->d->set_device(v->dev) : v->d->set_context(v->ctx);
}
#define ENTER(v)                                                                                                       \
    do {                                                                                                               \
        const int code_ = enter(v);                                                                                    \
        if (code_) return failed((v), (v)->d->hip ? "hipSetDevice" : "cuCtxSetCurrent", code_, err);                   \
    } while (0)

/* ---- loading ---- */

static bool resolve(void *lib, const char *name, void *pointer)
{
    void *p = dlsym(lib, name);
    memcpy(pointer, &p, sizeof p);
    return p != NULL;
}

static const char *resolve_all(aff_driver *d, void *lib)
{
#define RESOLVE(member, parameters, cuda, hipname)                                                                     \
    {                                                                                                                  \
        const char *name = d->hip ? hipname : cuda;                                                                    \
        if (name && !resolve(lib, name, &d->member)) return name;                                                      \
    }
    AFF_DRIVER_CALLS(RESOLVE)
#undef RESOLVE
    if (d->hip) {
        if (!resolve(lib, "hipGetErrorName", &d->hip_error_name)) return "hipGetErrorName";
        if (!resolve(lib, "hipGetErrorString", &d->hip_error_text)) return "hipGetErrorString";
    } else {
        if (!resolve(lib, "cuGetErrorName", &d->cuda_error_name)) return "cuGetErrorName";
        if (!resolve(lib, "cuGetErrorString", &d->cuda_error_text)) return "cuGetErrorString";
    }
    return NULL;
}

static void none(aff_driver *d, const char *call, int code)
{
    const char *name, *text;
    code_text(d, code, &name, &text);
    snprintf(d->text, sizeof d->text, "%s: %s (%d): %s", call, name, code, text);
    d->why = d->text;
}

void aff__driver_load(aff_driver *d, const char *const *libraries, bool hip)
{
    void *lib = NULL;
    const char *const *l = libraries;
    d->hip = hip;
    for (; *l && !lib; l++) lib = dlopen(*l, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(d->text, sizeof d->text, "%s is not installed (no %s driver)", libraries[0], hip ? "AMD" : "NVIDIA");
        d->why = d->text;
        return;
    }
    const char *missing = resolve_all(d, lib);
    if (missing) {
        snprintf(d->text, sizeof d->text, "%s has no %s: the driver is too old", l[-1], missing);
        d->why = d->text;
        return;
    }
    int code = d->init(0), n = 0;
    if (code) {
        none(d, hip ? "hipInit" : "cuInit", code);
        return;
    }
    code = d->count(&n);
    if (code) {
        none(d, hip ? "hipGetDeviceCount" : "cuDeviceGetCount", code);
    } else if (n < 1) {
        d->why = "the driver reports no device";
    } else {
        d->devices = n;
    }
}

/* ---- description ---- */

int aff__driver_attribute(const aff_driver *d, int attribute, int dev)
{
    int v = 0;
    return d->attribute(&v, attribute, dev) ? 0 : v;
}

void aff__driver_pci(const aff_driver *d, int dev, char id[32])
{
    if (d->pci(id, 32, dev)) id[0] = 0;
    for (char *p = id; *p; p++) *p = (char)tolower((unsigned char)*p);
}

static double sysfs_number(const char *pci, const char *file)
{
    char path[128];
    double v = 0;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/%s", pci, file);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    if (fscanf(f, "%lf", &v) != 1) v = 0;
    fclose(f);
    return v;
}

/* What the slot and the card can do: the current speed falls when the card is idle. */
static void link_speed(const char *pci, aff_rt_info *out)
{
    static const double gts[] = {0, 2.5, 5, 8, 16, 32, 64};
    const double speed = sysfs_number(pci, "max_link_speed");
    double width = sysfs_number(pci, "current_link_width");
    if (width <= 0) width = sysfs_number(pci, "max_link_width");
    for (int g = 1; g <= 6; g++)
        if (speed >= gts[g]) out->link_gen = g;
    if (!out->link_gen || width < 1 || width > 32) {
        out->link_gen = 0;
        return;
    }
    out->link_width = (int)width;
    out->link_rate = (uint64_t)(gts[out->link_gen] * 1e9 / 8 * width * (out->link_gen < 3 ? 0.8 : 128.0 / 130));
}

aff_status aff__driver_describe(aff_driver *d, int index, int attr_units, int attr_cooperative, aff_rt_info *out,
                                aff_error *err)
{
    device v = {.d = d, .rt.info = {.kind = d->hip ? AFF_RT_HIP : AFF_RT_CUDA, .index = index, .name = "?"}};
    char pci[32];
    size_t bytes;
    TRY(&v, device, &v.dev, index);
    TRY(&v, name, v.rt.info.name, (int)sizeof v.rt.info.name, v.dev);
    TRY(&v, total, &bytes, v.dev);
    v.rt.info.memory = bytes;
    v.rt.info.units = aff__driver_attribute(d, attr_units, v.dev);
    v.rt.info.cooperative = aff__driver_attribute(d, attr_cooperative, v.dev) != 0;
    aff__driver_pci(d, v.dev, pci);
    if (*pci) link_speed(pci, &v.rt.info);
    *out = v.rt.info;
    return AFF_OK;
}

/* ---- opening ---- */

static aff_mem_prop prop_of(const device *v)
{
    return (aff_mem_prop){.type = 1, .where = 1, .id = v->dev};
}

static aff_status load_kernels(device *v, const void *image, aff_error *err)
{
    const int code = v->d->load(&v->module, image);
    if (code == NO_BINARY)
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s:%d (%s): this build holds no kernels for %s",
                         v->d->hip ? "hip" : "cuda", v->rt.info.index, v->rt.info.name, v->rt.info.arch);
    if (code) return failed(v, call_names[v->d->hip][CALL_load], code, err);
    for (int k = 0; k < AFF_K_COUNT; k++) {
        TRY(v, function, &v->fn[k], v->module, aff__kernel_table[k].symbol);
        if (!v->d->hip) TRY(v, set_function, v->fn[k], FN_SHARED_LIMIT, v->rt.info.shared_bytes);
    }
    return AFF_OK;
}

static void drv_close(aff_rt *rt)
{
    device *v = of(rt);
    if (enter(v) == 0 && v->module) v->d->unload(v->module);
    if (v->ctx) v->d->release(v->dev);
    while (v->mappings) {
        mapping *next = v->mappings->next;
        free(v->mappings);
        v->mappings = next;
    }
    pthread_mutex_destroy(&v->lock);
    free(v);
}

static aff_status start(device *v, const void *image, aff_error *err)
{
    size_t page;
    TRY(v, device, &v->dev, v->rt.info.index);
    if (!v->d->hip) TRY(v, retain, &v->ctx, v->dev);
    ENTER(v);
    const aff_mem_prop prop = prop_of(v);
    TRY(v, granularity, &page, &prop, 0);
    v->rt.info.page = page;
    return load_kernels(v, image, err);
}

static const aff_rt_ops ops;

aff_status aff__driver_open(aff_rt **out, aff_driver *d, const aff_rt_info *info, const void *image, aff_error *err)
{
    device *v;
    AFF_TRY(aff__calloc(&v, 1, sizeof *v, "device", err));
    v->rt.ops = &ops;
    v->rt.info = *info;
    v->d = d;
    pthread_mutex_init(&v->lock, NULL);
    const aff_status s = start(v, image, err);
    if (s != AFF_OK) {
        drv_close(&v->rt);
        return s;
    }
    *out = &v->rt;
    return AFF_OK;
}

/* ---- memory ---- */

static aff_status drv_free_memory(aff_rt *rt, uint64_t *bytes, aff_error *err)
{
    device *v = of(rt);
    size_t left, total;
    ENTER(v);
    TRY(v, info, &left, &total);
    *bytes = left;
    return AFF_OK;
}

/* Out of memory, with what was asked for and what there is. */
static aff_status no_room(device *v, call_number call, int code, uint64_t bytes, const char *what, aff_error *err)
{
    size_t left = 0, total = 0;
    if (code != OUT_OF_MEMORY || v->d->info(&left, &total)) return failed(v, call_names[v->d->hip][call], code, err);
    return aff__fail(err, AFF_E_NOMEM, "%s:%d (%s): out of memory: %s needs %llu bytes, %llu of %llu are free",
                     v->d->hip ? "hip" : "cuda", v->rt.info.index, v->rt.info.name, what, (unsigned long long)bytes,
                     (unsigned long long)left, (unsigned long long)total);
}

static aff_status drv_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    device *v = of(rt);
    *p = NULL;
    ENTER(v);
    const int code = v->d->alloc(p, bytes);
    return code ? no_room(v, CALL_alloc, code, bytes, what, err) : AFF_OK;
}

static void drv_free(aff_rt *rt, void *p)
{
    if (enter(of(rt)) == 0) of(rt)->d->free(p);
}

static aff_status drv_reserve(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    device *v = of(rt);
    *p = NULL;
    ENTER(v);
    TRY(v, reserve, p, bytes, 0, NULL, 0);
    return AFF_OK;
}

static aff_status map_pages(device *v, mapping *m, uint64_t bytes, aff_error *err)
{
    const aff_mem_access a = {.where = 1, .id = v->dev, .flags = 3};
    TRY(v, map, m->p, bytes, 0, m->handle, 0);
    const int code = v->d->access(m->p, bytes, &a, 1);
    if (!code) return AFF_OK;
    v->d->unmap(m->p, bytes);
    return failed(v, call_names[v->d->hip][CALL_access], code, err);
}

static aff_status drv_commit(aff_rt *rt, void *p, uint64_t bytes, const char *what, aff_error *err)
{
    device *v = of(rt);
    mapping *m;
    ENTER(v);
    AFF_TRY(aff__calloc(&m, 1, sizeof *m, what, err));
    const aff_mem_prop prop = prop_of(v);
    m->p = p;
    m->bytes = bytes;
    const int code = v->d->create(&m->handle, bytes, &prop, 0);
    aff_status s = code ? no_room(v, CALL_create, code, bytes, what, err) : map_pages(v, m, bytes, err);
    if (s != AFF_OK) {
        if (!code) v->d->drop(m->handle);
        free(m);
        return s;
    }
    pthread_mutex_lock(&v->lock);
    m->next = v->mappings;
    v->mappings = m;
    pthread_mutex_unlock(&v->lock);
    return AFF_OK;
}

static void drv_decommit(aff_rt *rt, void *p, uint64_t bytes)
{
    device *v = of(rt);
    const bool ok = enter(v) == 0;
    pthread_mutex_lock(&v->lock);
    for (mapping **q = &v->mappings; *q;) {
        mapping *m = *q;
        if (m->p < (char *)p || m->p >= (char *)p + bytes) {
            q = &m->next;
            continue;
        }
        *q = m->next;
        if (ok) {
            v->d->unmap(m->p, m->bytes);
            v->d->drop(m->handle);
        }
        free(m);
    }
    pthread_mutex_unlock(&v->lock);
}

static void drv_unreserve(aff_rt *rt, void *p, uint64_t bytes)
{
    if (enter(of(rt)) == 0) of(rt)->d->unreserve(p, bytes);
}

static aff_status drv_host_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    device *v = of(rt);
    *p = NULL;
    ENTER(v);
    const int code = v->d->host_alloc(p, bytes, PORTABLE_MAPPED);
    if (code == OUT_OF_MEMORY)
        return aff__fail(err, AFF_E_NOMEM, "%s: the driver refuses %llu bytes of pinned host memory", what,
                         (unsigned long long)bytes);
    return code ? failed(v, call_names[v->d->hip][CALL_host_alloc], code, err) : AFF_OK;
}

static void drv_host_free(aff_rt *rt, void *p)
{
    if (enter(of(rt)) == 0) of(rt)->d->host_free(p);
}

static aff_status drv_host_register(aff_rt *rt, void *p, uint64_t bytes, aff_error *err)
{
    device *v = of(rt);
    void *there;
    ENTER(v);
    TRY(v, host_register, p, bytes, PORTABLE_MAPPED);
    const int code = v->d->host_pointer(&there, p, 0);
    if (!code && there == p) return AFF_OK;
    v->d->host_unregister(p);
    if (code) return failed(v, call_names[v->d->hip][CALL_host_pointer], code, err);
    return aff__fail(err, AFF_E_UNSUPPORTED, "%s: registered host memory has another address on the device",
                     v->rt.info.name);
}

static void drv_host_unregister(aff_rt *rt, void *p)
{
    if (enter(of(rt)) == 0) of(rt)->d->host_unregister(p);
}

/* ---- streams and events: the vendor's handles ---- */

static aff_status drv_stream_create(aff_rt *rt, aff_stream **out, aff_error *err)
{
    device *v = of(rt);
    void *s;
    ENTER(v);
    TRY(v, stream_create, &s, NON_BLOCKING);
    *out = s;
    return AFF_OK;
}

static void drv_stream_free(aff_rt *rt, aff_stream *s)
{
    if (enter(of(rt)) == 0) of(rt)->d->stream_destroy(s);
}

static aff_status drv_sync(aff_rt *rt, aff_stream *s, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, sync, s);
    return AFF_OK;
}

static aff_status drv_event_create(aff_rt *rt, aff_event **out, aff_error *err)
{
    device *v = of(rt);
    void *e;
    ENTER(v);
    TRY(v, event_create, &e, 0);
    *out = e;
    return AFF_OK;
}

static void drv_event_free(aff_rt *rt, aff_event *e)
{
    if (enter(of(rt)) == 0) of(rt)->d->event_destroy(e);
}

static aff_status drv_record(aff_rt *rt, aff_event *e, aff_stream *s, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, record, e, s);
    return AFF_OK;
}

static aff_status drv_wait(aff_rt *rt, aff_stream *s, aff_event *e, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, wait, s, e, 0);
    return AFF_OK;
}

static aff_status drv_event_sync(aff_rt *rt, aff_event *e, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, event_sync, e);
    return AFF_OK;
}

static aff_status drv_elapsed(aff_rt *rt, aff_event *from, aff_event *to, float *ms, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, elapsed, ms, from, to);
    return AFF_OK;
}

/* ---- work ---- */

static aff_status drv_copy(aff_rt *rt, aff_stream *s, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    if (v->d->hip)
        TRY(v, copy_kind, to, from, bytes, COPY_DEFAULT, s);
    else
        TRY(v, copy, to, from, bytes, s);
    return AFF_OK;
}

static aff_status drv_fill(aff_rt *rt, aff_stream *s, void *p, uint8_t byte, uint64_t bytes, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, fill, p, byte, bytes, s);
    return AFF_OK;
}

static int launch_programmatic(device *v, void *f, unsigned grid, unsigned block, unsigned smem, aff_stream *s,
                               void **args)
{
    aff_cu_attribute a = {.id = ATTR_PROGRAMMATIC, .value.on = 1};
    const aff_cu_config c = {
        .grid = {grid, 1, 1}, .block = {block, 1, 1}, .smem = smem, .stream = s, .attrs = &a, .n_attrs = 1};
    return v->d->launch_ex(&c, f, args, NULL);
}

static aff_status drv_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem,
                             unsigned flags, const void *args, aff_error *err)
{
    device *v = of(rt);
    void *list[1] = {(void *)(uintptr_t)args}, *f = v->fn[k];
    int code;
    ENTER(v);
    if (flags & AFF_LAUNCH_COOPERATIVE)
        code = v->d->launch_cooperative(f, grid, 1, 1, block, 1, 1, smem, s, list);
    else if (flags & AFF_LAUNCH_PROGRAMMATIC)
        code = launch_programmatic(v, f, grid, block, smem, s, list);
    else
        code = v->d->launch(f, grid, 1, 1, block, 1, 1, smem, s, list, NULL);
    if (!code) return AFF_OK;
    char call[96];
    snprintf(call, sizeof call, "launch of %s (%u x %u threads, %u bytes shared)", aff__kernel_name(k), grid, block,
             smem);
    return failed(v, call, code, err);
}

static aff_status drv_kernel_info(aff_rt *rt, aff_kernel k, unsigned block, unsigned smem, aff_kernel_info *out,
                                  aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    *out = (aff_kernel_info){0};
    TRY(v, function_attribute, &out->registers, FN_REGISTERS, v->fn[k]);
    TRY(v, function_attribute, &out->spill_bytes, FN_LOCAL, v->fn[k]);
    TRY(v, function_attribute, &out->max_threads, FN_THREADS, v->fn[k]);
    TRY(v, occupancy, &out->blocks_per_unit, v->fn[k], (int)block, smem);
    return AFF_OK;
}

/* ---- graphs ---- */

static aff_status drv_capture_begin(aff_rt *rt, aff_stream *s, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, capture, s, CAPTURE_THREAD_LOCAL);
    return AFF_OK;
}

static void drv_graph_free(aff_rt *rt, aff_graph *g)
{
    if (enter(of(rt)) == 0) {
        if (g->exec) of(rt)->d->exec_destroy(g->exec);
        if (g->graph) of(rt)->d->graph_destroy(g->graph);
    }
    free(g);
}

static aff_status drv_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *err)
{
    device *v = of(rt);
    aff_graph *g;
    *out = NULL;
    ENTER(v);
    AFF_TRY(aff__calloc(&g, 1, sizeof *g, "graph", err));
    int code = v->d->capture_end(s, &g->graph);
    const bool captured = !code;
    if (captured) code = v->d->instantiate(&g->exec, g->graph, 0);
    if (code) {
        const aff_status st =
            failed(v, call_names[v->d->hip][captured ? CALL_instantiate : CALL_capture_end], code, err);
        drv_graph_free(rt, g);
        return st;
    }
    *out = g;
    return AFF_OK;
}

static aff_status drv_graph_launch(aff_rt *rt, aff_graph *g, aff_stream *s, aff_error *err)
{
    device *v = of(rt);
    ENTER(v);
    TRY(v, graph_launch, g->exec, s);
    return AFF_OK;
}

static const aff_rt_ops ops = {
    .close = drv_close,
    .free_memory = drv_free_memory,
    .alloc = drv_alloc,
    .free = drv_free,
    .reserve = drv_reserve,
    .commit = drv_commit,
    .decommit = drv_decommit,
    .unreserve = drv_unreserve,
    .host_alloc = drv_host_alloc,
    .host_free = drv_host_free,
    .host_register = drv_host_register,
    .host_unregister = drv_host_unregister,
    .stream_create = drv_stream_create,
    .stream_free = drv_stream_free,
    .sync = drv_sync,
    .event_create = drv_event_create,
    .event_free = drv_event_free,
    .record = drv_record,
    .wait = drv_wait,
    .event_sync = drv_event_sync,
    .elapsed = drv_elapsed,
    .copy = drv_copy,
    .fill = drv_fill,
    .launch = drv_launch,
    .kernel_info = drv_kernel_info,
    .capture_begin = drv_capture_begin,
    .capture_end = drv_capture_end,
    .graph_launch = drv_graph_launch,
    .graph_free = drv_graph_free,
};
