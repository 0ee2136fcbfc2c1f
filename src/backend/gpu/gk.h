/* gk.h - the one dialect in which device kernels are written (design 5). The same source goes through
 *   nvcc -x cu          NVIDIA, sm_80 and up
 *   clang -x hip        AMD gfx1200/gfx1201, no HIP headers
 *   gcc or clang, C17   the emulated device of emu.h, once with the fragment layout of either vendor
 * so it is written in what C17 and C++ share. Blocks and grids are one-dimensional, a warp is 32 threads, shared memory
 * is one dynamic area, 16-byte aligned. Contraction is off in every build; gk_fma is the fused operation. There are no
 * float atomics.
 *
 * A kernel takes one struct by value, declared in kernels/args.h, and is listed there:
 *     GK_KERNEL(k_name, threads) (GK_ARG(aff_k_name) a) { ... }        threads: most a block may have
 * Warp collectives (gk_shfl_*, gk_ballot, gk_syncwarp, gk_mma, gk_imma) are called by all live threads of a warp
 * together, gk_sync by all live threads of the block.
 *
 * The matrix unit. gk_a is a tile of 16 rows (weights) x 16 k in bf16, gk_b one of GK_N columns (tokens) x 16 k, gk_c
 * the float32 [16][GK_N] result. Which values a lane holds: NVIDIA (GK_N 8), g = lane/4, q = lane%4:  a.r[0] = (row g,
 * k 2q..2q+1), r[1] = (row g+8, the same k), r[2] = (row g, k 2q+8..), r[3] = (row g+8, k 2q+8..); b.r[0] = (column g,
 * k 2q..), r[1] = (column g, k 2q+8..); c.v[0..1] = (row g, columns 2q, 2q+1), c.v[2..3] = (row g+8, ...) AMD gfx12
 * (GK_N 16), h = lane/16:  a.r[0..3] = (row lane%16, k 8h..8h+7); b.r[0..3] = (column lane%16, k 8h..8h+7); c.v[j] =
 * (row 8h+j, column lane%16) The lower k of a pair lies in the low half. gk_imma is the same over 32 k of int8 with
 * int32 sums, 4 k a register: NVIDIA  a.r[0] = (row g, k 4q..4q+3), r[1] = (row g+8, ..), r[2] = (row g, k 4q+16..),
 * r[3] = (row g+8, k 4q+16..); b alike AMD     a.r[0..1] = (row lane%16, k 8h..8h+7), r[2..3] = (.., k 16+8h..); b
 * alike Any relabelling of k that A and B share is allowed. `live`: columns whose result is used; the hardware ignores
 * it. */
#ifndef AFF_BACKEND_GPU_GK_H
#define AFF_BACKEND_GPU_GK_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__) && !defined(__HIP__)
#include "backend/gpu/gk_cuda.h"
#elif defined(__HIP__)
#include "backend/gpu/gk_hip.h"
#else
#include "backend/gpu/gk_emu.h"
#endif

#define AFF__FN GK_DEV
#include "backend/mathfn.h"

/* bf16, round to nearest even; a NaN stays one. */
GK_DEV float gk_bf16_to_f(uint32_t h)
{
    return gk_bitsf(h << 16);
}

GK_DEV uint32_t gk_f_to_bf16(float f)
{
    const uint32_t u = gk_fbits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

GK_DEV float gk_round_bf16(float f)
{
    return gk_bitsf(gk_f_to_bf16(f) << 16);
}

/* Two values as one register of a gk_a or gk_b. */
GK_DEV uint32_t gk_pack_bf16(float lo, float hi)
{
    return gk_f_to_bf16(lo) | gk_f_to_bf16(hi) << 16;
}

GK_DEV void gk_c_zero(gk_c *c)
{
    for (int j = 0; j < GK_CV; j++) c->v[j] = 0.0f;
}

GK_DEV void gk_ic_zero(gk_ic *c)
{
    for (int j = 0; j < GK_CV; j++) c->v[j] = 0;
}

/* Sum over a warp in the fixed tree 16, 8, 4, 2, 1; every lane gets it. */
GK_DEV float gk_warp_sum(float v)
{
    for (unsigned m = 16; m; m >>= 1) v += gk_shfl_xor_f(v, m);
    return v;
}

GK_DEV float gk_warp_max(float v)
{
    for (unsigned m = 16; m; m >>= 1) {
        const float o = gk_shfl_xor_f(v, m);
        v = o > v ? o : v;
    }
    return v;
}
#endif
