/* gk_hip.h - gk.h for clang's HIP mode without HIP headers, gfx12 (RDNA4), wave32. Sizes that HIP passes in hidden
 * arguments (block and grid) come from the dispatch packet's own fields. */
#ifndef AFF_BACKEND_GPU_GK_HIP_H
#define AFF_BACKEND_GPU_GK_HIP_H

#define GK_KERNEL(name, threads)                                                                                       \
    extern "C" __attribute__((global, visibility("protected"), amdgpu_flat_work_group_size(1, threads))) void name
#define GK_KERNEL_AT(name, threads, blocks) GK_KERNEL(name, threads)
#define GK_ARG(type) const type
#define GK_DEV       static __attribute__((device, always_inline)) inline
#define GK_CONST     static __attribute__((device)) const
#define GK_UNROLL    _Pragma("unroll")
/* The host's declarations of these are for the host; the builtins are for both. */
#define memcpy __builtin_memcpy
#define fmaf   __builtin_fmaf
#define fma    __builtin_fma
#define sqrtf  __builtin_sqrtf

enum { GK_N = 16, GK_BR = 4, GK_CV = 8 };
typedef struct {
    uint32_t r[4];
} gk_a;
typedef struct {
    uint32_t r[4];
} gk_b;
typedef struct {
    float v[8];
} gk_c;
typedef struct {
    int32_t v[8];
} gk_ic;
typedef struct __attribute__((aligned(16))) {
    uint32_t x, y, z, w;
} gk_u4;
typedef struct __attribute__((aligned(8))) {
    uint32_t x, y;
} gk_u2;

#define gk_tid()  ((unsigned)__builtin_amdgcn_workitem_id_x())
#define gk_bid()  ((unsigned)__builtin_amdgcn_workgroup_id_x())
#define gk_ntid() ((unsigned)__builtin_amdgcn_workgroup_size_x())
#define gk_nbid() ((unsigned)__builtin_amdgcn_grid_size_x() / (unsigned)__builtin_amdgcn_workgroup_size_x())
/* Device memory written before is ordered too: kernels exchange through it inside a block. */
#define gk_sync()                                                                                                      \
    do {                                                                                                               \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                                                         \
        __builtin_amdgcn_s_barrier();                                                                                  \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");                                                         \
    } while (0)
#define gk_syncwarp() __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront")

extern __attribute__((shared, aligned(128))) char gk_smem_area[];
GK_DEV char *gk_smem(void)
{
    return gk_smem_area;
}

GK_DEV uint32_t gk_fbits(float f)
{
    return __builtin_bit_cast(uint32_t, f);
}
GK_DEV float gk_bitsf(uint32_t u)
{
    return __builtin_bit_cast(float, u);
}
GK_DEV float gk_fma(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}
GK_DEV float gk_sqrt(float x)
{
    return __builtin_sqrtf(x);
}
GK_DEV float gk_rint(float x)
{
    return __builtin_rintf(x);
}
/* Bytes i and i+1 of v (i = 0 or 2) as the high bytes of two halves. */
GK_DEV uint32_t gk_high_bytes(uint32_t v, int i)
{
    return i ? (v >> 8 & 0xff00u) | (v & 0xff000000u) : (v & 0xffu) << 8 | (v & 0xff00u) << 16;
}
/* Two bf16 values times 2^120, exact for subnormals too. */
GK_DEV uint32_t gk_bf16x2_up120(uint32_t v)
{
    return gk_fbits(gk_bitsf(v << 16) * 0x1p120f) >> 16 | (gk_fbits(gk_bitsf(v & 0xffff0000u) * 0x1p120f) & 0xffff0000u);
}
GK_DEV uint32_t gk_bf16x2_scale(uint32_t v, uint32_t e)
{
    const float s = gk_bitsf(e == 255 ? 0x7fc00000u : e ? e << 23 : 0x00400000u);
    return gk_fbits(gk_bitsf(v << 16) * s) >> 16 | (gk_fbits(gk_bitsf(v & 0xffff0000u) * s) & 0xffff0000u);
}
/* v rotated right by n < 32. */
GK_DEV uint32_t gk_rotr(uint32_t v, unsigned n)
{
    return __builtin_amdgcn_alignbit(v, v, n);
}
GK_DEV uint32_t gk_shr64(uint32_t hi, uint32_t lo, unsigned n)
{
    return __builtin_amdgcn_alignbit(hi, lo, n);
}
GK_DEV int gk_clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}
GK_DEV int gk_popc(uint32_t x)
{
    return __builtin_popcount(x);
}

GK_DEV unsigned gk_lane_(void)
{
    return __builtin_amdgcn_mbcnt_lo(~0u, 0u);
}
GK_DEV uint32_t gk_shfl_idx_u(uint32_t v, unsigned l)
{
    return (uint32_t)__builtin_amdgcn_ds_bpermute((int)(l << 2), (int)v);
}
GK_DEV uint32_t gk_shfl_xor_u(uint32_t v, unsigned m)
{
    return gk_shfl_idx_u(v, gk_lane_() ^ m);
}
GK_DEV float gk_shfl_idx_f(float v, unsigned l)
{
    return gk_bitsf(gk_shfl_idx_u(gk_fbits(v), l));
}
GK_DEV float gk_shfl_xor_f(float v, unsigned m)
{
    return gk_bitsf(gk_shfl_xor_u(gk_fbits(v), m));
}
GK_DEV uint32_t gk_ballot(int p)
{
    return __builtin_amdgcn_ballot_w32(p != 0);
}

GK_DEV uint32_t gk_atomic_add_u32(uint32_t *p, uint32_t v)
{
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
GK_DEV uint32_t gk_atomic_max_u32(uint32_t *p, uint32_t v)
{
    return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
GK_DEV void gk_fence(void)
{
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");
}
GK_DEV void gk_fence_system(void)
{
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
}
GK_DEV uint32_t gk_load_acquire(const uint32_t *p)
{
    return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
GK_DEV void gk_store_release(uint32_t *p, uint32_t v)
{
    __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
GK_DEV void gk_spin(void)
{
    __builtin_amdgcn_s_sleep(1);
}

typedef uint32_t gk_u4v_ __attribute__((ext_vector_type(4)));
/* Addresses from tables are of global memory too: said so, or the compiler keeps them generic. */
GK_DEV gk_u4 gk_ld128(const void *p)
{
    const gk_u4v_ v = __builtin_nontemporal_load((const __attribute__((address_space(1))) gk_u4v_ *)(uintptr_t)p);
    gk_u4 u;
    u.x = v.x, u.y = v.y, u.z = v.z, u.w = v.w;
    return u;
}
GK_DEV void gk_prefetch_l2(const void *p)
{
    (void)p;
}

GK_DEV void gk_cp16(void *smem, const void *p)
{
    *(gk_u4 *)smem = *(const gk_u4 *)p;
}
GK_DEV void gk_prefetch(const void *p, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 128) gk_prefetch_l2((const char *)p + i);
}
GK_DEV void gk_cp_commit(void) {}
#define gk_cp_wait(n) ((void)(n))
GK_DEV void gk_pdl_wait(void) {}
GK_DEV void gk_pdl_launch(void) {}

GK_DEV int32_t gk_dp4a(uint32_t a, uint32_t b, int32_t c)
{
    return __builtin_amdgcn_sudot4(true, (int)a, true, (int)b, c, false);
}

typedef short gk_s8_ __attribute__((ext_vector_type(8)));
typedef float gk_f8_ __attribute__((ext_vector_type(8)));
typedef int gk_i8_ __attribute__((ext_vector_type(8)));
typedef int gk_i2_ __attribute__((ext_vector_type(2)));
GK_DEV int gk_c_row(unsigned lane, int j)
{
    return (int)(lane >> 4) * 8 + j;
}
GK_DEV int gk_c_col(unsigned lane, int j)
{
    (void)j;
    return (int)(lane & 15);
}
GK_DEV void gk_mma(gk_c *c, const gk_a *a, const gk_b *b, int live)
{
    (void)live;
    *c = __builtin_bit_cast(gk_c, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(__builtin_bit_cast(gk_s8_, *a),
                                                                                    __builtin_bit_cast(gk_s8_, *b),
                                                                                    __builtin_bit_cast(gk_f8_, *c)));
}
GK_DEV void gk_imma(gk_ic *c, const gk_a *a, const gk_b *b, int live)
{
    (void)live;
    gk_i8_ v = __builtin_bit_cast(gk_i8_, *c);
    for (int h = 0; h < 4; h += 2) {
        const gk_i2_ av = {(int)a->r[h], (int)a->r[h + 1]}, bv = {(int)b->r[h], (int)b->r[h + 1]};
        v = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, av, true, bv, v, false);
    }
    *c = __builtin_bit_cast(gk_ic, v);
}
#endif
