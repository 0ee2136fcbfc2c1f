/* gk_emu.h - gk.h for the emulated device (emu.h): a thread is a fiber, collectives are calls that switch fibers.
 * Compiled once with the NVIDIA and once with the AMD fragment layout (GK_LAYOUT_AMD). */
#ifndef AFF_BACKEND_GPU_GK_EMU_H
#define AFF_BACKEND_GPU_GK_EMU_H
#include "backend/gpu/emu.h"

/* Shared memory is cut up by casts of a char pointer. */
#pragma GCC diagnostic ignored "-Wcast-align"

#define GK_KERNEL(name, threads) static void name
#define GK_KERNEL_AT(name, threads, blocks) GK_KERNEL(name, threads)
#define GK_ARG(type)             const type
#define GK_DEV                   static inline __attribute__((unused))
#define GK_CONST                 static const
#define GK_UNROLL
#define gk_tid()      (aff__emu_now.tid)
#define gk_ntid()     (aff__emu_now.ntid)
#define gk_bid()      (aff__emu_now.bid)
#define gk_nbid()     (aff__emu_now.nbid)
#define gk_sync()     aff__emu_sync()
#define gk_syncwarp() aff__emu_syncwarp()

#ifdef GK_LAYOUT_AMD
enum { GK_N = 16, GK_BR = 4, GK_CV = 8, GK_AMD_ = 1 };
#else
enum { GK_N = 8, GK_BR = 2, GK_CV = 4, GK_AMD_ = 0 };
#endif
typedef struct {
    uint32_t r[4];
} gk_a;
typedef struct {
    uint32_t r[GK_BR];
} gk_b;
typedef struct {
    float v[GK_CV];
} gk_c;
typedef struct {
    int32_t v[GK_CV];
} gk_ic;
typedef struct {
    _Alignas(16) uint32_t x;
    uint32_t y, z, w;
} gk_u4;
typedef struct {
    _Alignas(8) uint32_t x;
    uint32_t y;
} gk_u2;

GK_DEV char *gk_smem(void)
{
    return aff__emu_now.smem;
}

GK_DEV uint32_t gk_fbits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
GK_DEV float gk_bitsf(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
GK_DEV float gk_fma(float a, float b, float c)
{
    return fmaf(a, b, c);
}
GK_DEV float gk_sqrt(float x)
{
    return sqrtf(x);
}
GK_DEV float gk_rint(float x)
{
    return rintf(x);
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
    return v >> n | v << (-n & 31);
}
GK_DEV uint32_t gk_shr64(uint32_t hi, uint32_t lo, unsigned n)
{
    return (uint32_t)(((uint64_t)hi << 32 | lo) >> n);
}
GK_DEV int gk_clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}
GK_DEV int gk_popc(uint32_t x)
{
    return __builtin_popcount(x);
}

GK_DEV uint32_t gk_shfl_xor_u(uint32_t v, unsigned m)
{
    return aff__emu_shuffle(v, (gk_tid() & 31) ^ m);
}
GK_DEV uint32_t gk_shfl_idx_u(uint32_t v, unsigned l)
{
    return aff__emu_shuffle(v, l & 31);
}
GK_DEV float gk_shfl_xor_f(float v, unsigned m)
{
    return gk_bitsf(gk_shfl_xor_u(gk_fbits(v), m));
}
GK_DEV float gk_shfl_idx_f(float v, unsigned l)
{
    return gk_bitsf(gk_shfl_idx_u(gk_fbits(v), l));
}
GK_DEV uint32_t gk_ballot(int p)
{
    return aff__emu_ballot(p);
}

GK_DEV uint32_t gk_atomic_add_u32(uint32_t *p, uint32_t v)
{
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
GK_DEV uint32_t gk_atomic_max_u32(uint32_t *p, uint32_t v)
{
    const uint32_t old = *p;
    *p = v > old ? v : old;
    return old;
}
GK_DEV void gk_fence(void) {}
GK_DEV void gk_fence_system(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
GK_DEV uint32_t gk_load_acquire(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
GK_DEV void gk_store_release(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
GK_DEV void gk_spin(void)
{
    aff__emu_spin();
}

/* An address that is not aligned traps on a device; here the sanitizer sees it. */
GK_DEV gk_u4 gk_ld128(const void *p)
{
    return *(const gk_u4 *)p;
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
    for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i & 255) * (int8_t)(b >> i & 255);
    return c;
}

#ifdef GK_LAYOUT_AMD
GK_DEV int gk_c_row(unsigned lane, int j)
{
    return (int)(lane >> 4) * 8 + j;
}
GK_DEV int gk_c_col(unsigned lane, int j)
{
    (void)j;
    return (int)(lane & 15);
}
#else
GK_DEV int gk_c_row(unsigned lane, int j)
{
    return (int)(lane >> 2) + ((j & 2) ? 8 : 0);
}
GK_DEV int gk_c_col(unsigned lane, int j)
{
    return (int)((lane & 3) * 2) + (j & 1);
}
#endif
GK_DEV void gk_mma(gk_c *c, const gk_a *a, const gk_b *b, int live)
{
    aff__emu_mma(GK_AMD_, c->v, a->r, b->r, live);
}
GK_DEV void gk_imma(gk_ic *c, const gk_a *a, const gk_b *b, int live)
{
    aff__emu_imma(GK_AMD_, c->v, a->r, b->r, live);
}

#ifndef GK_LAYOUT_AMD
/* ---- Hopper: warpgroups (gk.h). A warp's share of a product is its own, so it is made by the warp; copies are done at once. ---- */
#define GK_WG 1
enum { GK_RING = 2 };
typedef struct {
    uint8_t count, pending, phase, unused;
    int32_t bytes;
} gk_bar_state;
GK_DEV void gk_bar_settle(uint64_t *b, int arrived, int32_t bytes)
{
    gk_bar_state *s = (gk_bar_state *)(void *)b;
    s->pending = (uint8_t)(s->pending - arrived);
    s->bytes += bytes;
    if (s->pending || s->bytes) return;
    s->pending = s->count;
    s->phase ^= 1;
}
GK_DEV void gk_bar_init(uint64_t *b, uint32_t count)
{
    const gk_bar_state s = {(uint8_t)count, (uint8_t)count, 0, 0, 0};
    memcpy(b, &s, sizeof s);
}
GK_DEV void gk_bar_arrive(uint64_t *b)
{
    gk_bar_settle(b, 1, 0);
}
GK_DEV void gk_bar_expect(uint64_t *b, uint32_t bytes)
{
    gk_bar_settle(b, 0, (int32_t)bytes);
}
GK_DEV void gk_bar_wait(uint64_t *b, uint32_t parity)
{
    while (((const volatile gk_bar_state *)(void *)b)->phase == parity) gk_spin();
}
GK_DEV void gk_bulk(void *to, const void *from, uint32_t bytes, uint64_t *b)
{
    for (uint32_t i = 0; i < bytes; i += 16) gk_cp16((char *)to + i, (const char *)from + i);
    gk_bar_settle(b, 0, -(int32_t)bytes);
}
GK_DEV void gk_proxy_fence(void) {}
#define gk_regs_more() ((void)0)
#define gk_regs_less() ((void)0)
GK_DEV void gk_wg_fence(void) {}
GK_DEV void gk_wg_commit(void) {}
#define gk_wg_wait(n) ((void)(n))
GK_DEV uint64_t gk_wg_tile_at(const char *p, uint32_t half)
{
    return (uint64_t)(uintptr_t)p | (uint64_t)half << 48;
}
GK_DEV uint64_t gk_wg_tile_next(uint64_t t, uint32_t bytes)
{
    return t + bytes;
}
/* The lane's words of column n of the tile: its two halves of 8 k. */
GK_DEV void gk_wg_column(uint64_t tile, unsigned n, unsigned q, uint32_t *w)
{
    const char *p = (const char *)(uintptr_t)(tile & 0xffffffffffffull) + 16 * n + 4 * q;
    memcpy(&w[0], p, 4);
    memcpy(&w[1], p + (tile >> 48), 4);
}
GK_DEV void gk_wg_bf16_128(float *d, const uint32_t *a, uint64_t b, int add)
{
    for (unsigned j = 0; j < 16; j++) {
        gk_c c;
        gk_a f;
        gk_b g;
        memcpy(f.r, a, sizeof f.r);
        for (int i = 0; i < 4; i++) c.v[i] = add ? d[4 * j + (unsigned)i] : 0.0f;
        gk_wg_column(b, 8 * j + (gk_tid() >> 2 & 7), gk_tid() & 3, g.r);
        gk_mma(&c, &f, &g, 8);
        memcpy(d + 4 * j, c.v, sizeof c.v);
    }
}
GK_DEV float gk_h_value(uint32_t h)
{
    const uint16_t u = (uint16_t)h;
    _Float16 f;
    memcpy(&f, &u, 2);
    return (float)f;
}
/* The products' sums are exact where this is used. */
GK_DEV void gk_wg_f16_64(float *d, const uint32_t *a, uint64_t b, int add)
{
    uint32_t r[4][4]; /* of the four lanes that share rows g and g+8 */
    for (unsigned q = 0; q < 4; q++)
        for (int i = 0; i < 4; i++) r[q][i] = gk_shfl_idx_u(a[i], (gk_tid() & 28) | q);
    for (unsigned j = 0; j < 32; j++) {
        float s = add ? d[j] : 0.0f;
        for (unsigned q = 0; q < 4; q++) {
            uint32_t w[2];
            gk_wg_column(b, 8 * (j >> 2) + 2 * (gk_tid() & 3) + (j & 1), q, w);
            for (int h = 0; h < 2; h++) {
                const uint32_t v = r[q][2 * h + (int)(j >> 1 & 1)];
                s += gk_h_value(v) * gk_h_value(w[h]);
                s += gk_h_value(v >> 16) * gk_h_value(w[h] >> 16);
            }
        }
        d[j] = s;
    }
}
GK_DEV uint32_t gk_h_of(double x)
{
    const _Float16 f = (_Float16)x;
    uint16_t u;
    memcpy(&u, &f, 2);
    return u;
}
GK_DEV uint32_t gk_h2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    const double lo = (double)gk_h_value(a) * (double)gk_h_value(b) + (double)gk_h_value(c);
    const double hi = (double)gk_h_value(a >> 16) * (double)gk_h_value(b >> 16) + (double)gk_h_value(c >> 16);
    return gk_h_of(lo) | gk_h_of(hi) << 16;
}
GK_DEV uint32_t gk_h2_sub(uint32_t a, uint32_t b)
{
    return gk_h_of((double)gk_h_value(a) - (double)gk_h_value(b)) | gk_h_of((double)gk_h_value(a >> 16) - (double)gk_h_value(b >> 16)) << 16;
}
GK_DEV uint32_t gk_h2_of(int lo, int hi)
{
    return gk_h_of(lo) | gk_h_of(hi) << 16;
}
GK_DEV uint32_t gk_low_bytes(uint32_t v, int i)
{
    return (v >> (8 * i) & 255) | (v >> (8 * i + 8) & 255) << 16;
}
GK_DEV uint32_t gk_funnel_r(uint32_t lo, uint32_t hi, unsigned n)
{
    return (uint32_t)(((uint64_t)hi << 32 | lo) >> n);
}
GK_DEV uint32_t gk_funnel_l(uint32_t lo, uint32_t hi, unsigned n)
{
    return (uint32_t)((((uint64_t)hi << 32 | lo) << n) >> 32);
}
#endif
#endif
