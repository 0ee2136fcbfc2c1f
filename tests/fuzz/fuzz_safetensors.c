/* A safetensors file from memory: every byte of every tensor that it offers must be readable, and found by its name. */
#include "format/safetensors.h"
#include <stdlib.h>

static volatile uint64_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_ckpt *c;
    aff_error err = {0};
    if (aff__ckpt_open_memory(&c, data, size, "fuzz", &err) != AFF_OK) return 0;
    uint64_t sum = 0, bytes = 0;
    for (uint64_t i = 0; i < aff__ckpt_count(c); i++) {
        const aff_st_tensor *t = aff__ckpt_at(c, i);
        uint64_t n = aff__st_dtype_size(t->dtype);
        for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
        if (n != t->size || aff__ckpt_find(c, t->name) != t) abort();
        for (uint64_t k = 0; k < n; k++) sum += t->data[k];
        bytes += n;
    }
    if (bytes > size) abort(); /* they would overlap */
    sink = sum;
    aff__ckpt_close(c);
    return 0;
}
