/* NVIDIA devices: the CUDA driver, libcuda.so.1. */
#include "backend/gpu/rt_driver.h"
#include <pthread.h>
#include <stdio.h>

enum { UNITS = 16, MAJOR = 75, MINOR = 76, REGISTERED_SAME = 91, COOPERATIVE = 95, SHARED_OPTIN = 97, VIRTUAL_MEMORY = 102 };

static aff_driver driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void)
{
    static const char *const names[] = {"libcuda.so.1", NULL};
    if (aff__cuda_image_size == 0)
        driver.why = "this build holds no NVIDIA code (it was made without nvcc)";
    else
        aff__driver_load(&driver, names, false);
}

int aff__rt_cuda_count(const char **why)
{
    pthread_once(&once, load);
    *why = driver.why;
    return driver.devices;
}

aff_status aff__rt_cuda_describe(int index, aff_rt_info *out, aff_error *err)
{
    int dev;
    AFF_TRY(aff__driver_describe(&driver, index, UNITS, COOPERATIVE, out, err));
    if (driver.device(&dev, index)) return aff__fail(err, AFF_E_DEVICE, "cuda:%d: cuDeviceGet failed", index);
    const int major = aff__driver_attribute(&driver, MAJOR, dev), minor = aff__driver_attribute(&driver, MINOR, dev);
    snprintf(out->arch, sizeof out->arch, "sm_%d%d", major, minor);
    out->shared_bytes = aff__driver_attribute(&driver, SHARED_OPTIN, dev);
    out->fragment_columns = 8;
    out->programmatic = major >= 9;
    if (major < 8) return aff__fail(err, AFF_E_UNSUPPORTED, "cuda:%d (%s): %s is too old: expected sm_80 or newer", index, out->name, out->arch);
    if (!aff__driver_attribute(&driver, VIRTUAL_MEMORY, dev))
        return aff__fail(err, AFF_E_UNSUPPORTED, "cuda:%d (%s): the driver has no virtual memory management", index, out->name);
    if (!out->cooperative) return aff__fail(err, AFF_E_UNSUPPORTED, "cuda:%d (%s): the driver has no cooperative launches", index, out->name);
    if (!aff__driver_attribute(&driver, REGISTERED_SAME, dev))
        return aff__fail(err, AFF_E_UNSUPPORTED, "cuda:%d (%s): registered host memory would have another address", index, out->name);
    return AFF_OK;
}

aff_status aff__rt_cuda_open(aff_rt **out, int index, aff_error *err)
{
    aff_rt_info info;
    AFF_TRY(aff__rt_cuda_describe(index, &info, err));
    return aff__driver_open(out, &driver, &info, aff__cuda_image, err);
}
