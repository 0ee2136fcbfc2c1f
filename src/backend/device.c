#include "backend/device.h"
#include "backend/backend.h"
#include "backend/gpu/gpu.h"
#include <stdio.h>

const char *const aff__device_use_names[AFF_USES] = {"weights", "experts", "state", "buffers"};

aff_status aff__device_backend(aff_backend **out, const aff_device_spec *spec, aff_numerics num, int threads,
                               aff_error *err)
{
    return spec->choice == AFF_DEVICE_RT ? aff__gpu_backend(out, spec, num, err)
                                         : aff__cpu_backend(out, num, threads, err);
}

aff_status aff__device_results(const aff_device_spec *spec, char out[64], aff_error *err)
{
    aff_rt_info info;
    out[0] = 0;
    if (spec->choice != AFF_DEVICE_RT) return AFF_OK;
    if (spec->kind == AFF_RT_EMU) {
        snprintf(out, 64, "emu %s", spec->amd ? "amd" : "nv");
        return AFF_OK;
    }
    AFF_TRY(aff__rt_describe(spec->kind, spec->index, &info, err));
    snprintf(out, 64, "%s %s", spec->kind == AFF_RT_CUDA ? "cuda" : "hip", info.arch);
    return AFF_OK;
}
