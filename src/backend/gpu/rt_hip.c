#include "backend/gpu/rt_internal.h"

int aff__rt_hip_count(const char **why)
{
    *why = "this build holds no AMD code";
    return 0;
}

aff_status aff__rt_hip_describe(int index, aff_rt_info *out, aff_error *err)
{
    return aff__fail(err, AFF_E_UNSUPPORTED, "this build holds no AMD code");
}

aff_status aff__rt_hip_open(aff_rt **out, int index, aff_error *err)
{
    return aff__fail(err, AFF_E_UNSUPPORTED, "this build holds no AMD code");
}
