/* gk_cuda.h - gk.h for nvcc. */
#ifndef AFF_BACKEND_GPU_GK_CUDA_H
#define AFF_BACKEND_GPU_GK_CUDA_H

#define GK_KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads) name
/* blocks: that a multiprocessor should hold at once; registers are dealt out accordingly. */
#define GK_KERNEL_AT(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#define GK_ARG(type)             const __grid_constant__ type
#define GK_DEV                   static __device__ __forceinline__
#define GK_CONST                 static __device__ const
#define GK_UNROLL                _Pragma("unroll")
#define gk_tid()                 threadIdx.x
#define gk_ntid()                blockDim.x
#define gk_bid()                 blockIdx.x
#define gk_nbid()                gridDim.x
#define gk_sync()                __syncthreads()
#define gk_syncwarp()            __syncwarp()

enum { GK_N = 8, GK_BR = 2, GK_CV = 4 };
typedef struct {
    uint32_t r[4];
} gk_a;
typedef struct {
    uint32_t r[2];
} gk_b;
typedef struct {
    float v[4];
} gk_c;
typedef struct {
    int32_t v[4];
} gk_ic;
typedef struct __align__(16)
{
    uint32_t x, y, z, w;
}
gk_u4;
typedef struct __align__(8)
{
    uint32_t x, y;
}
gk_u2;

extern __shared__ __align__(128) char gk_smem_area[];
GK_DEV char *gk_smem(void)
{
    return gk_smem_area;
}

GK_DEV uint32_t gk_fbits(float f)
{
    return __float_as_uint(f);
}
GK_DEV float gk_bitsf(uint32_t u)
{
    return __uint_as_float(u);
}
GK_DEV float gk_fma(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}
GK_DEV float gk_sqrt(float x)
{
    return __fsqrt_rn(x);
}
GK_DEV float gk_rint(float x)
{
    return rintf(x);
}
/* Bytes i and i+1 of v (i = 0 or 2) as the high bytes of two halves. */
GK_DEV uint32_t gk_high_bytes(uint32_t v, int i)
{
    return __byte_perm(v, 0, i ? 0x3424 : 0x1404);
}
/* Two bf16 values times 2^120, exact for subnormals too. */
GK_DEV uint32_t gk_bf16x2_up120(uint32_t v)
{
    uint32_t r;
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(v), "r"(0x7b807b80u), "r"(0x80008000u));
    return r;
}
/* Two bf16 values times 2^(e-127), NaN for e = 255. */
GK_DEV uint32_t gk_bf16x2_scale(uint32_t v, uint32_t e)
{
    const uint32_t s = e == 255 ? 0x7fc0u : e ? e << 7 : 0x40u;
    uint32_t r;
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(v), "r"(s | s << 16), "r"(0x80008000u));
    return r;
}
/* v rotated right by n < 32. */
GK_DEV uint32_t gk_rotr(uint32_t v, unsigned n)
{
    return __funnelshift_r(v, v, n);
}
/* The low word of hi:lo shifted right by n < 32. */
GK_DEV uint32_t gk_shr64(uint32_t hi, uint32_t lo, unsigned n)
{
    return __funnelshift_r(lo, hi, n);
}
GK_DEV int gk_clz(uint32_t x)
{
    return __clz((int)x);
}
GK_DEV int gk_popc(uint32_t x)
{
    return __popc(x);
}

GK_DEV float gk_shfl_xor_f(float v, unsigned m)
{
    return __shfl_xor_sync(0xffffffffu, v, (int)m, 32);
}
GK_DEV uint32_t gk_shfl_xor_u(uint32_t v, unsigned m)
{
    return __shfl_xor_sync(0xffffffffu, v, (int)m, 32);
}
GK_DEV float gk_shfl_idx_f(float v, unsigned l)
{
    return __shfl_sync(0xffffffffu, v, (int)l, 32);
}
GK_DEV uint32_t gk_shfl_idx_u(uint32_t v, unsigned l)
{
    return __shfl_sync(0xffffffffu, v, (int)l, 32);
}
GK_DEV uint32_t gk_ballot(int p)
{
    return __ballot_sync(0xffffffffu, p);
}

/* Old value. */
GK_DEV uint32_t gk_atomic_add_u32(uint32_t *p, uint32_t v)
{
    return atomicAdd(p, v);
}
GK_DEV uint32_t gk_atomic_max_u32(uint32_t *p, uint32_t v)
{
    return atomicMax(p, v);
}
/* Orders this thread's memory operations for the whole device, or the whole system. */
GK_DEV void gk_fence(void)
{
    __threadfence();
}
GK_DEV void gk_fence_system(void)
{
    __threadfence_system();
}
/* Flags in device memory or mapped host memory. */
GK_DEV uint32_t gk_load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
GK_DEV void gk_store_release(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
/* Called in every loop that waits on memory. */
GK_DEV void gk_spin(void)
{
    __nanosleep(40);
}

/* 16 bytes, read once: streams past L1. p is 16-byte aligned and nobody writes there during the kernel. */
GK_DEV gk_u4 gk_ld128(const void *p)
{
    gk_u4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
GK_DEV void gk_prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* Asks for n bytes, a multiple of 16 from such an address, to be brought to the L2 cache. */
GK_DEV void gk_prefetch(const void *p, uint32_t n)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(p), "r"(n) : "memory");
#else
    for (uint32_t i = 0; i < n; i += 128) gk_prefetch_l2((const char *)p + i);
#endif
}

/* 16 bytes from device memory to shared memory behind the thread's back; groups complete in order, gk_cp_wait(n) leaves
 * at most n (a literal) open. A gk_sync makes them visible to the block. */
GK_DEV void gk_cp16(void *smem, const void *p)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"((uint32_t)__cvta_generic_to_shared(smem)), "l"(p)
                 : "memory");
}
GK_DEV void gk_cp_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
#define gk_cp_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")

/* Programmatic dependent launch: wait for the kernel before; let the one after start. Nothing where it does not exist.
 */
GK_DEV void gk_pdl_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
GK_DEV void gk_pdl_launch(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* c + the four products of signed bytes. */
GK_DEV int32_t gk_dp4a(uint32_t a, uint32_t b, int32_t c)
{
    return __dp4a((int)a, (int)b, c);
}

GK_DEV int gk_c_row(unsigned lane, int j)
{
    return (int)(lane >> 2) + ((j & 2) ? 8 : 0);
}
GK_DEV int gk_c_col(unsigned lane, int j)
{
    return (int)((lane & 3) * 2) + (j & 1);
}
GK_DEV void gk_mma(gk_c *c, const gk_a *a, const gk_b *b, int live)
{
    (void)live;
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c->v[0]), "+f"(c->v[1]), "+f"(c->v[2]), "+f"(c->v[3])
        : "r"(a->r[0]), "r"(a->r[1]), "r"(a->r[2]), "r"(a->r[3]), "r"(b->r[0]), "r"(b->r[1]));
}
GK_DEV void gk_imma(gk_ic *c, const gk_a *a, const gk_b *b, int live)
{
    (void)live;
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c->v[0]), "+r"(c->v[1]), "+r"(c->v[2]), "+r"(c->v[3])
                 : "r"(a->r[0]), "r"(a->r[1]), "r"(a->r[2]), "r"(a->r[3]), "r"(b->r[0]), "r"(b->r[1]));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* ---- Hopper: warpgroups (gk.h) ---- */
#define GK_WG 1
enum { GK_RING = 4 };
GK_DEV uint32_t gk_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
GK_DEV void gk_bar_init(uint64_t *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(gk_shared_address(b)), "r"(count) : "memory");
}
GK_DEV void gk_bar_arrive(uint64_t *b)
{
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s,[%0];}" ::"r"(gk_shared_address(b)) : "memory");
}
GK_DEV void gk_bar_expect(uint64_t *b, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0],%1;" ::"r"(gk_shared_address(b)), "r"(bytes) : "memory");
}
GK_DEV void gk_bar_wait(uint64_t *b, uint32_t parity)
{
    asm volatile("{.reg .pred p;\nagain_%=: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@!p bra again_%=;}" ::"r"(gk_shared_address(b)), "r"(parity)
                 : "memory");
}
GK_DEV void gk_bulk(void *to, const void *from, uint32_t bytes, uint64_t *b)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(gk_shared_address(to)), "l"(from), "r"(bytes),
                 "r"(gk_shared_address(b))
                 : "memory");
}
GK_DEV void gk_proxy_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Of 64,512 registers of a block of 384 threads, 200 a thread of two warpgroups and 104 of the third. */
#define gk_regs_more() asm volatile("setmaxnreg.inc.sync.aligned.u32 200;")
#define gk_regs_less() asm volatile("setmaxnreg.dec.sync.aligned.u32 104;")
GK_DEV void gk_wg_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
GK_DEV void gk_wg_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
#define gk_wg_wait(n) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory")
GK_DEV uint64_t gk_wg_tile_at(const char *p, uint32_t half)
{
    return (uint64_t)((gk_shared_address(p) & 0x3ffff) >> 4) | (uint64_t)(half >> 4) << 16 | (uint64_t)(128 >> 4) << 32;
}
GK_DEV uint64_t gk_wg_tile_next(uint64_t t, uint32_t bytes)
{
    return t + (bytes >> 4);
}
#define GK_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
GK_DEV void gk_wg_bf16_128(float *d, const uint32_t *a, uint64_t b, int add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p,%69,0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"
                 "%62,%63},{%64,%65,%66,%67},%68,p,1,1,0;}"
                 : GK_D8(0), GK_D8(8), GK_D8(16), GK_D8(24), GK_D8(32), GK_D8(40), GK_D8(48), GK_D8(56)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
GK_DEV void gk_wg_f16_64(float *d, const uint32_t *a, uint64_t b, int add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p,%37,0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 "{%32,%33,%34,%35},%36,p,1,1,0;}"
                 : GK_D8(0), GK_D8(8), GK_D8(16), GK_D8(24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
#undef GK_D8
GK_DEV uint32_t gk_h2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r;
    asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
GK_DEV uint32_t gk_h2_sub(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
GK_DEV uint32_t gk_h2_of(int lo, int hi)
{
    uint32_t r;
    asm("{.reg .f16 l,h; cvt.rn.f16.s32 l,%1; cvt.rn.f16.s32 h,%2; mov.b32 %0,{l,h};}" : "=r"(r) : "r"(lo), "r"(hi));
    return r;
}
/* Bytes i and i+1 of v (i = 0 or 2) as the low bytes of two halves. */
GK_DEV uint32_t gk_low_bytes(uint32_t v, int i)
{
    return __byte_perm(v, 0, i ? 0x4342 : 0x4140);
}
/* hi:lo shifted by n < 32: the low word of a shift right, the high word of one left. */
GK_DEV uint32_t gk_funnel_r(uint32_t lo, uint32_t hi, unsigned n)
{
    return __funnelshift_r(lo, hi, n);
}
GK_DEV uint32_t gk_funnel_l(uint32_t lo, uint32_t hi, unsigned n)
{
    return __funnelshift_l(lo, hi, n);
}
#endif
#endif
