/* The kernels for the emulated device, with the AMD fragment layout. */
#define GK_LAYOUT_AMD
#include "backend/gpu/kernels/all.inc"

#define ENTRY(name, threads)                                                                                           \
    static void e_##name(const void *args)                                                                             \
    {                                                                                                                  \
        k_##name(*(const aff_k_##name *)args);                                                                         \
    }
AFF_GPU_KERNELS(ENTRY)

#define ROW(name, threads) {#name, e_##name, sizeof(aff_k_##name), threads},
const aff_emu_kernel aff__emu_kernels_amd[] = {AFF_GPU_KERNELS(ROW){NULL, NULL, 0, 0}};
