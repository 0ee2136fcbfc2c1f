/* args.h - the arguments of every kernel and the list of kernels, shared by device code and host (plain C). A pointer
 * is a device address; comments give shapes. AFF_GPU_KERNELS(X): X(name, most threads of a block); the argument struct
 * of k_name is aff_k_name, at most 4 KB. */
#ifndef AFF_BACKEND_GPU_KERNELS_ARGS_H
#define AFF_BACKEND_GPU_KERNELS_ARGS_H
#include <stdint.h>

#define AFF_GPU_KERNELS(X) X(rmsnorm, 256)

/* y[t] = w x[t] / rms(x[t]), one block a row; w NULL: no weight. y may be x. Shared memory: 32 floats. */
typedef struct aff_k_rmsnorm {
    const float *x; /* [T][n] */
    const float *w; /* [n] */
    float *y;       /* [T][n] */
    int32_t n;
    float eps;
} aff_k_rmsnorm;
#endif
