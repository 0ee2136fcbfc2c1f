#include "backend/gpu/rt_internal.h"

int aff__rt_cuda_count(const char **why)
{
    *why = "this build holds no NVIDIA code";
    return 0;
}

aff_status aff__rt_cuda_describe(int index, aff_rt_info *out, aff_error *err)
{
    return aff__fail(err, AFF_E_UNSUPPORTED, "this build holds no NVIDIA code");
}

aff_status aff__rt_cuda_open(aff_rt **out, int index, aff_error *err)
{
    return aff__fail(err, AFF_E_UNSUPPORTED, "this build holds no NVIDIA code");
}
