/* rt_internal.h - the table behind rt.h: one per kind of device. */
#ifndef AFF_BACKEND_GPU_RT_INTERNAL_H
#define AFF_BACKEND_GPU_RT_INTERNAL_H
#include "backend/gpu/rt.h"
#include <pthread.h>

enum { AFF_RT_COUNTED = 16 }; /* streams whose copies are counted: the first that copy */

/* Calls as in rt.h; `free` and its like report nothing. */
typedef struct aff_rt_ops {
    void (*close)(aff_rt *rt);
    aff_status (*free_memory)(aff_rt *rt, uint64_t *bytes, aff_error *err);
    aff_status (*alloc)(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err);
    void (*free)(aff_rt *rt, void *p);
    aff_status (*reserve)(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err);
    aff_status (*commit)(aff_rt *rt, void *p, uint64_t bytes, const char *what, aff_error *err);
    void (*decommit)(aff_rt *rt, void *p, uint64_t bytes);
    void (*unreserve)(aff_rt *rt, void *p, uint64_t bytes);
    aff_status (*host_alloc)(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err);
    void (*host_free)(aff_rt *rt, void *p);
    aff_status (*host_register)(aff_rt *rt, void *p, uint64_t bytes, aff_error *err);
    void (*host_unregister)(aff_rt *rt, void *p);
    aff_status (*stream_create)(aff_rt *rt, aff_stream **out, aff_error *err);
    void (*stream_free)(aff_rt *rt, aff_stream *s);
    aff_status (*sync)(aff_rt *rt, aff_stream *s, aff_error *err);
    aff_status (*event_create)(aff_rt *rt, aff_event **out, aff_error *err);
    void (*event_free)(aff_rt *rt, aff_event *e);
    aff_status (*record)(aff_rt *rt, aff_event *e, aff_stream *s, aff_error *err);
    aff_status (*wait)(aff_rt *rt, aff_stream *s, aff_event *e, aff_error *err);
    aff_status (*event_sync)(aff_rt *rt, aff_event *e, aff_error *err);
    aff_status (*elapsed)(aff_rt *rt, aff_event *from, aff_event *to, float *ms, aff_error *err);
    aff_status (*copy)(aff_rt *rt, aff_stream *s, void *to, const void *from, uint64_t bytes, aff_error *err);
    aff_status (*fill)(aff_rt *rt, aff_stream *s, void *p, uint8_t byte, uint64_t bytes, aff_error *err);
    aff_status (*launch)(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem,
                         unsigned flags, const void *args, aff_error *err);
    aff_status (*kernel_info)(aff_rt *rt, aff_kernel k, unsigned block, unsigned smem, aff_kernel_info *out,
                              aff_error *err);
    aff_status (*capture_begin)(aff_rt *rt, aff_stream *s, aff_error *err);
    aff_status (*capture_end)(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *err);
    aff_status (*graph_launch)(aff_rt *rt, aff_graph *g, aff_stream *s, aff_error *err);
    void (*graph_free)(aff_rt *rt, aff_graph *g);
} aff_rt_ops;

/* A piece of device memory that is held. */
typedef struct aff_rt_piece {
    char *p;
    uint64_t bytes;
    aff_device_use use;
} aff_rt_piece;

struct aff_rt {
    const aff_rt_ops *ops;
    aff_rt_info info;
    /* rt.c: what is held, allocated and committed. */
    pthread_mutex_t lock;
    aff_rt_piece *piece;
    uint64_t pieces, cap;
    uint64_t use[AFF_USES];
    struct { /* by aff__rt_copy, for aff__rt_copied; atomics */
        const aff_stream *s;
        uint64_t bytes;
    } copied[AFF_RT_COUNTED];
};

/* What rt.c knows of each kernel. */
typedef struct aff_kernel_desc {
    const char *name;   /* without k_ */
    const char *symbol; /* with */
    size_t args_size;
    unsigned max_threads;
} aff_kernel_desc;
extern const aff_kernel_desc aff__kernel_table[AFF_K_COUNT];

/* Each kind: count (why as in rt.h), description, opening. */
int aff__rt_cuda_count(const char **why);
aff_status aff__rt_cuda_describe(int index, aff_rt_info *out, aff_error *err);
aff_status aff__rt_cuda_open(aff_rt **out, int index, aff_error *err);
int aff__rt_hip_count(const char **why);
aff_status aff__rt_hip_describe(int index, aff_rt_info *out, aff_error *err);
aff_status aff__rt_hip_open(aff_rt **out, int index, aff_error *err);
aff_status aff__rt_emu_open(aff_rt **out, const aff_device_spec *spec, aff_error *err);
#endif
