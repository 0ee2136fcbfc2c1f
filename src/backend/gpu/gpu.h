/* gpu.h - the op table over a device of rt.h. Numerics: `fast` only. */
#ifndef AFF_BACKEND_GPU_GPU_H
#define AFF_BACKEND_GPU_GPU_H
#include "backend/backend.h"
#include "backend/gpu/rt.h"

/* Opens the device (AFF_DEVICE_RT specs only). Everything is resident: weights and experts are put into its memory by
 * `place`. */
aff_status aff__gpu_backend(aff_backend **out, const aff_device_spec *spec, aff_numerics num, aff_error *err);
const aff_rt_info *aff__gpu_info(const aff_backend *b);
#endif
