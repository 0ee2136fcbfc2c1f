/* rt_driver.h - what the CUDA driver and the HIP runtime have in common: nearly every call, under other names. rt_driver.c
 * implements the table of rt_internal.h over these pointers; rt_cuda.c and rt_hip.c find the library, fill them in and
 * describe devices. Types are the common denominator of both headers on 64-bit Linux: device addresses, handles and
 * sizes are 64 bits wide, enumerations are ints. */
#ifndef AFF_BACKEND_GPU_RT_DRIVER_H
#define AFF_BACKEND_GPU_RT_DRIVER_H
#include "backend/gpu/rt_internal.h"

typedef struct aff_mem_prop {
    int type, handles; /* 1: pinned device memory; 0 */
    int where, id;     /* 1: a device */
    void *win32;
    uint8_t flags[8];
} aff_mem_prop;

typedef struct aff_mem_access {
    int where, id, flags; /* flags 3: read and write */
} aff_mem_access;

typedef struct aff_cu_attribute {
    int id;
    char pad[4];
    union {
        int on;
        char room[64];
    } value;
} aff_cu_attribute;

typedef struct aff_cu_config {
    unsigned grid[3], block[3], smem;
    void *stream;
    aff_cu_attribute *attrs;
    unsigned n_attrs;
} aff_cu_config;

/* X(member, parameters, name in CUDA, name in HIP); a name that is NULL does not exist there. All return an error code, 0 is
 * success. */
#define AFF_DRIVER_CALLS(X)                                                                                            \
    X(init, (unsigned flags), "cuInit", "hipInit")                                                                     \
    X(version, (int *v), "cuDriverGetVersion", "hipDriverGetVersion")                                                  \
    X(count, (int *n), "cuDeviceGetCount", "hipGetDeviceCount")                                                        \
    X(device, (int *d, int ordinal), "cuDeviceGet", "hipDeviceGet")                                                    \
    X(name, (char *name, int len, int d), "cuDeviceGetName", "hipDeviceGetName")                                       \
    X(total, (size_t *bytes, int d), "cuDeviceTotalMem_v2", "hipDeviceTotalMem")                                       \
    X(attribute, (int *v, int attribute, int d), "cuDeviceGetAttribute", "hipDeviceGetAttribute")                      \
    X(pci, (char *id, int len, int d), "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId")                                  \
    X(retain, (void **ctx, int d), "cuDevicePrimaryCtxRetain", NULL)                                                   \
    X(release, (int d), "cuDevicePrimaryCtxRelease_v2", NULL)                                                          \
    X(set_context, (void *ctx), "cuCtxSetCurrent", NULL)                                                               \
    X(set_device, (int d), NULL, "hipSetDevice")                                                                       \
    X(load, (void **module, const void *image), "cuModuleLoadData", "hipModuleLoadData")                               \
    X(unload, (void *module), "cuModuleUnload", "hipModuleUnload")                                                     \
    X(function, (void **f, void *module, const char *name), "cuModuleGetFunction", "hipModuleGetFunction")             \
    X(set_function, (void *f, int attribute, int v), "cuFuncSetAttribute", NULL)                                       \
    X(function_attribute, (int *v, int attribute, void *f), "cuFuncGetAttribute", "hipFuncGetAttribute")               \
    X(occupancy, (int *blocks, void *f, int block, size_t smem), "cuOccupancyMaxActiveBlocksPerMultiprocessor",        \
      "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor")                                                            \
    X(alloc, (void **p, size_t bytes), "cuMemAlloc_v2", "hipMalloc")                                                   \
    X(free, (void *p), "cuMemFree_v2", "hipFree")                                                                      \
    X(info, (size_t * free, size_t *total), "cuMemGetInfo_v2", "hipMemGetInfo")                                        \
    X(host_alloc, (void **p, size_t bytes, unsigned flags), "cuMemHostAlloc", "hipHostMalloc")                         \
    X(host_free, (void *p), "cuMemFreeHost", "hipHostFree")                                                            \
    X(host_register, (void *p, size_t bytes, unsigned flags), "cuMemHostRegister_v2", "hipHostRegister")               \
    X(host_unregister, (void *p), "cuMemHostUnregister", "hipHostUnregister")                                          \
    X(host_pointer, (void **d, void *p, unsigned flags), "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer")    \
    X(reserve, (void **p, size_t bytes, size_t align, void *at, unsigned long long flags), "cuMemAddressReserve",      \
      "hipMemAddressReserve")                                                                                          \
    X(unreserve, (void *p, size_t bytes), "cuMemAddressFree", "hipMemAddressFree")                                     \
    X(create, (void **handle, size_t bytes, const aff_mem_prop *prop, unsigned long long flags), "cuMemCreate",        \
      "hipMemCreate")                                                                                                  \
    X(drop, (void *handle), "cuMemRelease", "hipMemRelease")                                                           \
    X(map, (void *p, size_t bytes, size_t off, void *handle, unsigned long long flags), "cuMemMap", "hipMemMap")       \
    X(unmap, (void *p, size_t bytes), "cuMemUnmap", "hipMemUnmap")                                                     \
    X(access, (void *p, size_t bytes, const aff_mem_access *a, size_t n), "cuMemSetAccess", "hipMemSetAccess")         \
    X(granularity, (size_t * bytes, const aff_mem_prop *prop, int option), "cuMemGetAllocationGranularity",            \
      "hipMemGetAllocationGranularity")                                                                                \
    X(copy, (void *to, const void *from, size_t bytes, void *stream), "cuMemcpyAsync", NULL)                           \
    X(copy_kind, (void *to, const void *from, size_t bytes, int kind, void *stream), NULL, "hipMemcpyAsync")           \
    X(fill, (void *p, unsigned char byte, size_t n, void *stream), "cuMemsetD8Async", "hipMemsetD8Async")              \
    X(stream_create, (void **s, unsigned flags), "cuStreamCreate", "hipStreamCreateWithFlags")                         \
    X(stream_destroy, (void *s), "cuStreamDestroy_v2", "hipStreamDestroy")                                             \
    X(sync, (void *s), "cuStreamSynchronize", "hipStreamSynchronize")                                                  \
    X(wait, (void *s, void *e, unsigned flags), "cuStreamWaitEvent", "hipStreamWaitEvent")                             \
    X(event_create, (void **e, unsigned flags), "cuEventCreate", "hipEventCreateWithFlags")                            \
    X(event_destroy, (void *e), "cuEventDestroy_v2", "hipEventDestroy")                                                \
    X(record, (void *e, void *s), "cuEventRecord", "hipEventRecord")                                                   \
    X(event_sync, (void *e), "cuEventSynchronize", "hipEventSynchronize")                                              \
    X(elapsed, (float *ms, void *from, void *to), "cuEventElapsedTime", "hipEventElapsedTime")                         \
    X(capture, (void *s, int mode), "cuStreamBeginCapture_v2", "hipStreamBeginCapture")                                \
    X(capture_end, (void *s, void **graph), "cuStreamEndCapture", "hipStreamEndCapture")                               \
    X(instantiate, (void **exec, void *graph, unsigned long long flags), "cuGraphInstantiateWithFlags",                \
      "hipGraphInstantiateWithFlags")                                                                                  \
    X(graph_launch, (void *exec, void *s), "cuGraphLaunch", "hipGraphLaunch")                                          \
    X(exec_destroy, (void *exec), "cuGraphExecDestroy", "hipGraphExecDestroy")                                         \
    X(graph_destroy, (void *graph), "cuGraphDestroy", "hipGraphDestroy")                                               \
    X(launch,                                                                                                          \
      (void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void *s,  \
       void **args, void **extra),                                                                                     \
      "cuLaunchKernel", "hipModuleLaunchKernel")                                                                       \
    X(launch_cooperative,                                                                                              \
      (void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void *s,  \
       void **args),                                                                                                   \
      "cuLaunchCooperativeKernel", "hipModuleLaunchCooperativeKernel")                                                 \
    X(launch_ex, (const aff_cu_config *c, void *f, void **args, void **extra), "cuLaunchKernelEx", NULL)

typedef struct aff_driver {
    bool hip;
#define AFF_DRIVER_MEMBER(member, parameters, cuda, hip) int(*member) parameters;
    AFF_DRIVER_CALLS(AFF_DRIVER_MEMBER)
#undef AFF_DRIVER_MEMBER
    int (*cuda_error_name)(int code, const char **text), (*cuda_error_text)(int code, const char **text);
    const char *(*hip_error_name)(int code), *(*hip_error_text)(int code);
    int devices;
    const char *why; /* there are none; NULL */
    char text[256];
} aff_driver;

/* Loads the first of `libraries` (ends with NULL) that exists, resolves every call, initialises, counts. Afterwards devices > 0
 * or why says what is missing. */
void aff__driver_load(aff_driver *d, const char *const *libraries, bool hip);
/* What both kinds have: name, memory, units, PCIe link (from sysfs), cooperative launches. */
aff_status aff__driver_describe(aff_driver *d, int index, int attr_units, int attr_cooperative, aff_rt_info *out, aff_error *err);
int aff__driver_attribute(const aff_driver *d, int attribute, int device); /* 0 when the call fails */
/* "0000:01:00.0" in lower case; empty on failure. */
void aff__driver_pci(const aff_driver *d, int device, char id[32]);
/* Opens the device of *info and loads `image`. */
aff_status aff__driver_open(aff_rt **out, aff_driver *d, const aff_rt_info *info, const void *image, aff_error *err);

/* The device code of this build (embed.S); size 0: it was not compiled. */
extern const unsigned char aff__cuda_image[], aff__gfx1200_image[], aff__gfx1201_image[];
extern const uint64_t aff__cuda_image_size, aff__gfx1200_image_size, aff__gfx1201_image_size;
#endif
