/* rt.h - one C interface over the CUDA driver, the HIP runtime and the emulated device. Vendor libraries are found at
 * run time; a program starts on a machine with either, both or none.
 *
 * Order: work on a stream runs in the order given; streams run side by side and are ordered by events only. What a copy
 * reads or writes must stay in place until the stream is through it. Every call returns a status; the error names the
 * call, its code and its text. A fault of the device (a kernel's bad address, a deadlock of the emulated device) comes
 * out of the next call that meets it, and of every call after it. Calls on one device may come from several threads.
 * Device addresses are valid in kernels of that device only, pinned and registered host memory in kernels of all
 * devices too, at the same address. */
#ifndef AFF_BACKEND_GPU_RT_H
#define AFF_BACKEND_GPU_RT_H
#include "backend/device.h"
#include "backend/gpu/kernels/args.h"
#include "base/status.h"
#include <stddef.h>

#define AFF_GPU_ENUM(name, threads) AFF_K_##name,
typedef enum aff_kernel { AFF_GPU_KERNELS(AFF_GPU_ENUM) AFF_K_COUNT } aff_kernel;
#undef AFF_GPU_ENUM

typedef struct aff_rt_info {
    aff_rt_kind kind;
    int index;                      /* among the devices of its kind */
    char name[96], arch[32];        /* "NVIDIA H200", "sm_90"; "gfx1201"; "emu", "nv" or "amd" (the fragment layout) */
    uint64_t memory;                /* bytes in all */
    int units;                      /* multiprocessors, compute units */
    int shared_bytes;               /* most dynamic shared memory a block can have */
    int fragment_columns;           /* GK_N: 8 or 16 */
    bool cooperative, programmatic; /* cooperative launches; programmatic dependent launch */
    int link_gen, link_width;       /* PCIe; 0 when unknown */
    uint64_t link_rate;             /* bytes a second one way, 0 when unknown */
    uint64_t page;                  /* granularity of aff__rt_commit */
} aff_rt_info;

/* ---- devices ---- */

/* Devices of a kind. Without its library, driver or a card the count is 0 and *why says so in one line (valid for ever;
 * NULL when there are devices). Not for AFF_RT_EMU, which has as many as are asked for. */
int aff__rt_count(aff_rt_kind kind, const char **why);
aff_status aff__rt_describe(aff_rt_kind kind, int index, aff_rt_info *out, aff_error *err);

typedef struct aff_rt aff_rt;
typedef struct aff_stream aff_stream;
typedef struct aff_event aff_event;
typedef struct aff_graph aff_graph;

/* Opens device spec->index (emulated: number `index` of the spec's) and loads the kernels. */
aff_status aff__rt_open(aff_rt **out, const aff_device_spec *spec, aff_error *err);
void aff__rt_close(aff_rt *rt); /* NULL allowed; frees nothing that was allocated on it and is still held */
const aff_rt_info *aff__rt_info(const aff_rt *rt);
aff_status aff__rt_free_memory(aff_rt *rt, uint64_t *bytes, aff_error *err);
/* What memory is for by its `what`: one with "expert" in it is for experts, "weight" for weights, "context" for state, all else for buffers. */
aff_device_use aff__rt_use(const char *what);
/* Bytes of device memory that are held through this rt. */
void aff__rt_uses(aff_rt *rt, uint64_t use[AFF_USES]);

/* ---- memory ---- */

/* Device memory, 256-byte aligned, contents undefined. `what` names the consumer in an error. */
aff_status aff__rt_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err);
void aff__rt_free(aff_rt *rt, void *p);
/* Address space without memory; then memory for parts of it (offsets and sizes in multiples of info.page). */
aff_status aff__rt_reserve(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err);
aff_status aff__rt_commit(aff_rt *rt, void *p, uint64_t bytes, const char *what, aff_error *err);
/* Gives back every commit that lies in the range. */
void aff__rt_decommit(aff_rt *rt, void *p, uint64_t bytes);
void aff__rt_unreserve(aff_rt *rt, void *p, uint64_t bytes); /* after everything in it was decommitted */
/* Pinned host memory that kernels may use at the same address. */
aff_status aff__rt_host_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err);
void aff__rt_host_free(aff_rt *rt, void *p);
/* Makes existing host memory (whole pages) such memory. */
aff_status aff__rt_host_register(aff_rt *rt, void *p, uint64_t bytes, aff_error *err);
void aff__rt_host_unregister(aff_rt *rt, void *p);

/* ---- streams and events ---- */

aff_status aff__rt_stream_create(aff_rt *rt, aff_stream **out, aff_error *err);
void aff__rt_stream_free(aff_rt *rt, aff_stream *s);
aff_status aff__rt_sync(aff_rt *rt, aff_stream *s, aff_error *err);
aff_status aff__rt_event_create(aff_rt *rt, aff_event **out, aff_error *err);
void aff__rt_event_free(aff_rt *rt, aff_event *e);
aff_status aff__rt_record(aff_rt *rt, aff_event *e, aff_stream *s, aff_error *err);
aff_status aff__rt_wait(aff_rt *rt, aff_stream *s, aff_event *e, aff_error *err); /* s goes on when e is reached */
aff_status aff__rt_event_sync(aff_rt *rt, aff_event *e, aff_error *err);
/* Milliseconds between two reached events. */
aff_status aff__rt_elapsed(aff_rt *rt, aff_event *from, aff_event *to, float *ms, aff_error *err);

/* ---- work ---- */

aff_status aff__rt_copy(aff_rt *rt, aff_stream *s, void *to, const void *from, uint64_t bytes, aff_error *err);
/* Bytes that aff__rt_copy was given for a stream so far, recorded ones once: what counters elsewhere are compared with. */
uint64_t aff__rt_copied(const aff_rt *rt, const aff_stream *s);
aff_status aff__rt_fill(aff_rt *rt, aff_stream *s, void *p, uint8_t byte, uint64_t bytes, aff_error *err);

enum { AFF_LAUNCH_COOPERATIVE = 1, AFF_LAUNCH_PROGRAMMATIC = 2 };
/* args: the kernel's aff_k_ struct; copied. */
aff_status aff__rt_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem,
                          unsigned flags, const void *args, aff_error *err);

typedef struct aff_kernel_info {
    int registers, spill_bytes, max_threads; /* 0 when unknown */
    int blocks_per_unit;                     /* resident at once with this block and smem */
} aff_kernel_info;
aff_status aff__rt_kernel_info(aff_rt *rt, aff_kernel k, unsigned block, unsigned smem, aff_kernel_info *out,
                               aff_error *err);
const char *aff__kernel_name(aff_kernel k);

/* ---- graphs ---- */

/* What is given to s (and to streams that wait for its events) between begin and end is recorded, not run. */
aff_status aff__rt_capture_begin(aff_rt *rt, aff_stream *s, aff_error *err);
aff_status aff__rt_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *err);
aff_status aff__rt_graph_launch(aff_rt *rt, aff_graph *g, aff_stream *s, aff_error *err);
void aff__rt_graph_free(aff_rt *rt, aff_graph *g);

/* Emulated devices: the seed of thread order and stream order from now on (0: ascending). */
void aff__rt_emu_seed(uint32_t seed);
#endif
