/* encode.h - a card as the quantiser's encoder (quant/encode.h). */
#ifndef AFF_BACKEND_GPU_ENCODE_H
#define AFF_BACKEND_GPU_ENCODE_H
#include "backend/gpu/rt.h"
#include "quant/encode.h"

/* Opens the device; for aff_quantize_options.encoder. */
aff_status aff__gpu_encoder_create(aff_encoder *out, const aff_device_spec *spec, aff_error *err);
void aff__gpu_encoder_free(aff_encoder *e); /* also of zeros */
#endif
