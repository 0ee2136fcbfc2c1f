// Routed GEMV of 6 experts' gate and up at one row, exact integers, against a pure read of the same bytes.
// V1: lane = row, two int8 limbs in an 8-byte table (8 copies), dp4a. V13: 4-byte E4M3 table (16 copies), cvt to f16,
// mma with masked x.
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <vector>
#include <cuda_runtime.h>
#define CK(x)                                                                                                          \
    do {                                                                                                               \
        cudaError_t e = (x);                                                                                           \
        if (e) {                                                                                                       \
            printf("ERR %s:%d %s %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e));                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
enum { ROWS = 2048, COLS = 4096, G = COLS / 64, NM = 12, WARPS = 16, ST = 4 };
struct Args {
    const uint8_t *codes[NM];
    const uint8_t *fields[NM];
    const uint32_t *tab;
    const uint2 *tab8;
    const uint16_t *xh;
    const uint32_t *xq;
    const float *xs;
    float *y;
};
__device__ __forceinline__ uint32_t sm32(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void bulk(uint32_t d, const void *s, uint32_t n, uint32_t b)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(d),
                 "l"(s), "r"(n), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void waitp(uint32_t b, uint32_t ph)
{
    asm volatile("{.reg .pred P;L:mbarrier.try_wait.parity.shared.b64 P,[%0],%1;@P bra D;bra L;D:}" ::"r"(b), "r"(ph)
                 : "memory");
}
__device__ __forceinline__ uint32_t lds(uint32_t a)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ uint2 lds2(uint32_t a)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
__device__ __forceinline__ uint4 lds4(uint32_t a)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
template <int B, int I> __device__ __forceinline__ uint32_t code6(const uint32_t *w)
{ // the code at bits 6..15
    constexpr int o = 40 * B + 10 * I, k = o / 32, r = o % 32;
    if (r < 6) return w[k] << (6 - r);
    if (r <= 22) return w[k] >> (r - 6);
    return __funnelshift_r(w[k], w[k + 1], r - 6);
}
// chunk: 32 rows x 64 columns = 640 B codes + 96 B fields, in a stage of 768 B
template <int V> __global__ __launch_bounds__(WARPS * 32, 1) void routed(const __grid_constant__ Args a)
{
    extern __shared__ __align__(128) char sm[];
    const int t = threadIdx.x, w = t >> 5, l = t & 31;
    char *tabp = sm, *ring = sm + 131072, *xp = ring + WARPS * ST * 768;
    int *part = (int *)(xp + 8192 + 256);
    uint64_t *bar = (uint64_t *)(xp + 8192 + 256 + 4 * 32 * 33); // x: 8 KB f16 (or 4 KB int8), zeros 256
    const int tasks = NM * (ROWS / 32);
    const int first = blockIdx.x;
    const int mine = first < tasks ? (tasks - first + gridDim.x - 1) / gridDim.x : 0;
    const int NC = mine * 4; // chunks of this warp: 4 a task
    uint32_t bw = sm32(bar + w * ST), rw = sm32(ring + w * ST * 768);
    if (l == 0) {
        for (int i = 0; i < ST; i++) asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(bw + 8 * i));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    auto issue = [&](int c) {
        int task = first + (c >> 2) * gridDim.x, m = task / (ROWS / 32), r0 = task % (ROWS / 32) * 32,
            g = w * 4 + (c & 3);
        uint32_t s = c % ST, b = bw + 8 * s;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(b), "r"(736));
        bulk(rw + s * 768, a.codes[m] + ((size_t)g * ROWS + r0) * 20, 640, b);
        bulk(rw + s * 768 + 640, a.fields[m] + ((size_t)g * ROWS + r0) * 3, 96, b);
    };
    if (l == 0)
        for (int i = 0; i < ST && i < NC; i++) issue(i);
    if (V == 1) {
        for (int i = t; i < 2048 * 8; i += WARPS * 32) ((uint2 *)tabp)[i] = a.tab8[i >> 3];
        for (int i = t; i < 1024; i += WARPS * 32) ((uint32_t *)xp)[i] = a.xq[i];
    } else {
        for (int i = t; i < 2048 * 16; i += WARPS * 32) ((uint32_t *)tabp)[i] = a.tab[i >> 4];
        for (int i = t; i < 2048; i += WARPS * 32) ((uint32_t *)xp)[i] = ((const uint32_t *)a.xh)[i];
        if (t < 64) ((uint32_t *)(xp + 8192))[t] = 0;
    }
    __syncthreads();
    const uint32_t tb = sm32(tabp) + (V == 1 ? (l & 7) * 8 : (l & 15) * 4), xb = sm32(xp);
    const int gp = l >> 2, qp = l & 3;
    const bool diag = (gp & 3) == qp;
    const uint32_t ae = diag && gp < 4 ? xb : xb + 8192, ao = diag && gp >= 4 ? xb : xb + 8192;
    const uint32_t se = diag && gp < 4 ? 128 : 0, so = diag && gp >= 4 ? 128 : 0;
    const uint32_t oe = se ? 0 : 0, oo = so ? 32 : 0;
    for (int it = 0; it < mine; it++) {
        for (int h = 0; h < 2; h++) {
            int sa = 0, sb = 0;
            for (int u = 0; u < 2; u++) {
                const int c = it * 4 + h * 2 + u, s = c % ST;
                waitp(bw + 8 * s, (c / ST) & 1);
                const uint32_t st = rw + s * 768;
                const int g = w * 4 + h * 2 + u;
                uint32_t wd[5];
                for (int j = 0; j < 5; j++) wd[j] = lds(st + l * 20 + 4 * j);
                const uint32_t fo = (3 * l) >> 2;
                uint32_t f24 = __funnelshift_r(lds(st + 640 + 4 * fo), lds(st + 640 + 4 * fo + 4), ((3 * l) & 3) * 8);
                __syncwarp();
                if (l == 0 && c + ST < NC) issue(c + ST);
                if (V == 1) {
#define BLK1(B)                                                                                                        \
    {                                                                                                                  \
        const uint32_t f = f24 >> (6 * B);                                                                             \
        const uint32_t vb = tb | 0, va = (f & 32) << 11;                                                               \
        const uint32_t sel = (f & 16) ? 0x1032 : 0x3210;                                                               \
        uint4 xv = lds4(xb + g * 64 + B * 16);                                                                         \
        int hi = 0, lo = 0;                                                                                            \
        {                                                                                                              \
            uint2 e = lds2(vb + va + ((code6<B, 0>(wd) & 0xffc0)));                                                    \
            uint32_t x = __byte_perm(xv.x, 0, sel);                                                                    \
            hi = __dp4a((int)e.x, (int)x, hi);                                                                         \
            lo = __dp4a((int)e.y, (int)x, lo);                                                                         \
        }                                                                                                              \
        {                                                                                                              \
            uint2 e = lds2(vb + va + ((code6<B, 1>(wd) & 0xffc0)));                                                    \
            uint32_t x = __byte_perm(xv.y, 0, sel);                                                                    \
            hi = __dp4a((int)e.x, (int)x, hi);                                                                         \
            lo = __dp4a((int)e.y, (int)x, lo);                                                                         \
        }                                                                                                              \
        {                                                                                                              \
            uint2 e = lds2(vb + va + ((code6<B, 2>(wd) & 0xffc0)));                                                    \
            uint32_t x = __byte_perm(xv.z, 0, sel);                                                                    \
            hi = __dp4a((int)e.x, (int)x, hi);                                                                         \
            lo = __dp4a((int)e.y, (int)x, lo);                                                                         \
        }                                                                                                              \
        {                                                                                                              \
            uint2 e = lds2(vb + va + ((code6<B, 3>(wd) & 0xffc0)));                                                    \
            uint32_t x = __byte_perm(xv.w, 0, sel);                                                                    \
            hi = __dp4a((int)e.x, (int)x, hi);                                                                         \
            lo = __dp4a((int)e.y, (int)x, lo);                                                                         \
        }                                                                                                              \
        int p = (hi * 16 + lo) << (f & 7);                                                                             \
        sa += (f & 8) ? -p : p;                                                                                        \
    }
                    BLK1(0) BLK1(1) BLK1(2) BLK1(3)
                } else {
                    float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
                    const uint32_t xe = ae + g * se, xo = ao + g * so + oo;
#define QUAD(B, I, X0, X1)                                                                                             \
    {                                                                                                                  \
        uint32_t e = lds((code6<B, I>(wd) & 0xffc0) + vb);                                                             \
        e = __funnelshift_l(e, e, rt);                                                                                 \
        uint32_t b0, b1;                                                                                               \
        asm("{.reg .b16 lo,hi; mov.b32 {lo,hi},%2; cvt.rn.f16x2.e4m3x2 %0,lo; cvt.rn.f16x2.e4m3x2 %1,hi;}"             \
            : "=r"(b0), "=r"(b1)                                                                                       \
            : "r"(e));                                                                                                 \
        asm volatile(                                                                                                  \
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"     \
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                                                   \
            : "r"(B < 2 ? X0 : 0u), "r"(B < 2 ? 0u : X0), "r"(B < 2 ? X1 : 0u), "r"(B < 2 ? 0u : X1), "r"(b0),         \
              "r"(b1));                                                                                                \
    }
#define BLK13(B)                                                                                                       \
    {                                                                                                                  \
        const uint32_t rt = (f24 >> (6 * B)) & 16;                                                                     \
        const uint32_t vb =                                                                                            \
            tb + ((6 * B + 5 <= 16 ? f24 << (11 - 6 * B > 0 ? 11 - 6 * B : 0) >> (6 * B - 11 > 0 ? 6 * B - 11 : 0)     \
                                   : f24 >> (6 * B - 11)) &                                                            \
                  0x10000);                                                                                            \
        const uint32_t xa = ((B & 1) ? xo : xe) + ((B & 2) ? 64 : 0);                                                  \
        uint4 xv = lds4(xa), xw = lds4(xa + 16);                                                                       \
        QUAD(B, 0, xv.x, xv.y) QUAD(B, 1, xv.z, xv.w) QUAD(B, 2, xw.x, xw.y) QUAD(B, 3, xw.z, xw.w)                    \
    }
                    BLK13(0) BLK13(1) BLK13(2) BLK13(3) const int ra = 8 * qp + (gp & 3);
                    uint32_t fa = __shfl_sync(~0u, f24, ra) >> (6 * (gp >> 2)),
                             fb = __shfl_sync(~0u, f24, ra + 4) >> (6 * (gp >> 2));
#define MUL(f) __uint_as_float(((((f) << 23) & 0x03800000u) + (136u << 23)) | (((f) << 28) & 0x80000000u))
                    sa += __float2int_rn(d0 * MUL(fa)) + __float2int_rn(d2 * MUL(fa >> 12));
                    sb += __float2int_rn(d1 * MUL(fb)) + __float2int_rn(d3 * MUL(fb >> 12));
                }
            }
            if (V == 1)
                part[(w * 2 + h) * 33 + l] = sa;
            else {
                sa += __shfl_xor_sync(~0u, sa, 16);
                sb += __shfl_xor_sync(~0u, sb, 16);
                const int ra = 8 * qp + (gp & 3);
                part[(w * 2 + h) * 33 + (gp < 4 ? ra : ra + 4)] = gp < 4 ? sa : sb;
            }
        }
        __syncthreads();
        if (w == 0) {
            const int task = first + it * gridDim.x;
            float acc = 0;
            for (int c = 0; c < 32; c++) acc = fmaf((float)part[c * 33 + l], a.xs[c], acc);
            a.y[(size_t)task * 32 + l] = acc;
        }
        __syncthreads();
    }
}
__global__ __launch_bounds__(WARPS * 32, 1) void rd(const __grid_constant__ Args a)
{ // the same copies, no arithmetic
    extern __shared__ __align__(128) char sm[];
    const int t = threadIdx.x, w = t >> 5, l = t & 31;
    char *ring = sm + 131072;
    uint64_t *bar = (uint64_t *)(ring + WARPS * ST * 768 + 16384);
    const int tasks = NM * (ROWS / 32);
    const int first = blockIdx.x;
    const int mine = first < tasks ? (tasks - first + gridDim.x - 1) / gridDim.x : 0;
    const int NC = mine * 4;
    uint32_t bw = sm32(bar + w * ST), rw = sm32(ring + w * ST * 768);
    if (l == 0) {
        for (int i = 0; i < ST; i++) asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(bw + 8 * i));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncwarp();
    auto issue = [&](int c) {
        int task = first + (c >> 2) * gridDim.x, m = task / (ROWS / 32), r0 = task % (ROWS / 32) * 32,
            g = w * 4 + (c & 3);
        uint32_t s = c % ST, b = bw + 8 * s;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(b), "r"(736));
        bulk(rw + s * 768, a.codes[m] + ((size_t)g * ROWS + r0) * 20, 640, b);
        bulk(rw + s * 768 + 640, a.fields[m] + ((size_t)g * ROWS + r0) * 3, 96, b);
    };
    if (l == 0)
        for (int i = 0; i < ST && i < NC; i++) issue(i);
    uint32_t x = 0;
    for (int c = 0; c < NC; c++) {
        const int s = c % ST;
        waitp(bw + 8 * s, (c / ST) & 1);
        x ^= lds(rw + s * 768 + l * 20);
        __syncwarp();
        if (l == 0 && c + ST < NC) issue(c + ST);
    }
    if (x == 0x12345) a.y[0] = 1;
}
static double tab[2048][4];
static int tabi[2048][4];
static uint8_t e4m3_of(int v)
{ // v in units 2^-9, exactly representable
    if (!v) return 0;
    int s = v < 0;
    int m = abs(v), e = 0;
    if (m < 8) return (s << 7) | m;
    while (m >= 16) {
        if (m & 1) return 0xff;
        m >>= 1;
        e++;
    }
    return (s << 7) | ((e + 1) << 3) | (m - 8);
}
int main()
{
    srand(7);
    const size_t CB = (size_t)G * ROWS * 20, FB = (size_t)G * ROWS * 3;
    const int SETS = 12; // rotate over sets: beyond L2
    std::vector<uint32_t> t4(2048);
    std::vector<uint2> t8(2048);
    for (int i = 0; i < 2048; i++) {
        uint32_t d = 0, hi = 0, lo = 0;
        for (int j = 0; j < 4; j++) {
            int e = rand() % 8, m = rand() % 8;
            int v = e ? (8 + m) << (e - 1) : m;
            if (rand() & 1) v = -v;
            tabi[i][j] = v;
            d |= (uint32_t)e4m3_of(v) << (8 * j);
            int h = (v + 8) >> 4;
            int lw = v - 16 * h;
            hi |= (uint32_t)(h & 255) << (8 * j);
            lo |= (uint32_t)(lw & 255) << (8 * j);
        }
        t4[i] = d;
        t8[i] = {hi, lo};
    }
    std::vector<uint8_t> codes(CB * NM), fields(FB * NM);
    for (auto &c : codes) c = rand() >> 7;
    for (auto &c : fields) c = rand() >> 7;
    std::vector<int8_t> x(COLS);
    std::vector<uint16_t> xh(COLS);
    std::vector<float> xs(COLS / 128);
    for (auto &v : x) v = rand() % 255 - 127;
    for (auto &v : xs) v = (rand() % 1000 + 1) * 1e-5f;
    for (int i = 0; i < COLS; i++) {
        float f = x[i];
        uint32_t u;
        memcpy(&u, &f, 4);
        uint32_t s = u >> 31, e = (u >> 23) & 255, m = u & 0x7fffff;
        xh[i] = x[i] == 0 ? 0 : (s << 15) | ((e - 112) << 10) | (m >> 13);
    }
    uint8_t *dc, *df;
    CK(cudaMalloc(&dc, CB * NM * SETS));
    CK(cudaMalloc(&df, FB * NM * SETS));
    for (int s = 0; s < SETS; s++) {
        CK(cudaMemcpy(dc + s * CB * NM, codes.data(), CB * NM, cudaMemcpyHostToDevice));
        CK(cudaMemcpy(df + s * FB * NM, fields.data(), FB * NM, cudaMemcpyHostToDevice));
    }
    Args a[SETS];
    uint32_t *d4;
    uint2 *d8;
    uint16_t *dxh;
    uint32_t *dxq;
    float *dxs, *dy;
    CK(cudaMalloc(&d4, 8192));
    CK(cudaMalloc(&d8, 16384));
    CK(cudaMalloc(&dxh, 8192));
    CK(cudaMalloc(&dxq, 4096));
    CK(cudaMalloc(&dxs, 128));
    CK(cudaMalloc(&dy, NM * ROWS * 4));
    CK(cudaMemcpy(d4, t4.data(), 8192, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(d8, t8.data(), 16384, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(dxh, xh.data(), 8192, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(dxq, x.data(), 4096, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(dxs, xs.data(), 128, cudaMemcpyHostToDevice));
    for (int s = 0; s < SETS; s++) {
        for (int m = 0; m < NM; m++) {
            a[s].codes[m] = dc + (s * (size_t)NM + m) * CB;
            a[s].fields[m] = df + (s * (size_t)NM + m) * FB;
        }
        a[s].tab = d4;
        a[s].tab8 = d8;
        a[s].xh = dxh;
        a[s].xq = dxq;
        a[s].xs = dxs;
        a[s].y = dy;
    }
    const int SM = 131072 + WARPS * ST * 768 + 8192 + 256 + 4 * 32 * 33 + WARPS * ST * 8 + 64;
    printf("smem %d\n", SM);
    CK(cudaFuncSetAttribute(routed<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, SM));
    CK(cudaFuncSetAttribute(routed<13>, cudaFuncAttributeMaxDynamicSharedMemorySize, SM));
    CK(cudaFuncSetAttribute(rd, cudaFuncAttributeMaxDynamicSharedMemorySize, SM + 16384));
    cudaStream_t st;
    cudaStreamCreate(&st);
    cudaEvent_t e0, e1;
    cudaEventCreate(&e0);
    cudaEventCreate(&e1);
    std::vector<float> y(NM * ROWS);
    std::vector<float> ref(NM * ROWS);
    for (int m = 0; m < NM; m++)
        for (int r = 0; r < ROWS; r += 37) {
            float acc = 0;
            for (int c = 0; c < 32; c++) {
                int sum = 0;
                for (int g = 2 * c; g < 2 * c + 2; g++) {
                    const uint8_t *cp = &codes[m * CB + ((size_t)g * ROWS + r) * 20],
                                  *fp = &fields[m * FB + ((size_t)g * ROWS + r) * 3];
                    for (int b = 0; b < 4; b++) {
                        uint32_t f = ((fp[0] | fp[1] << 8 | fp[2] << 16) >> (6 * b)) & 63;
                        uint64_t bits = 0;
                        for (int i = 0; i < 5; i++) bits |= (uint64_t)cp[5 * b + i] << (8 * i);
                        for (int k = 0; k < 16; k++) {
                            int v =
                                tabi[(f >> 5) * 1024 + ((bits >> (10 * (k / 4))) & 1023)][(k + ((f & 16) ? 2 : 0)) % 4];
                            v = ((f & 8) ? -v : v) * (1 << (f & 7));
                            sum += v * x[g * 64 + b * 16 + k];
                        }
                    }
                }
                acc = fmaf((float)sum, xs[c], acc);
            }
            ref[m * ROWS + r] = acc;
        }
    const bool prof = getenv("PROF") != 0;
    if (!prof)
        for (int i = 0; i < 20000; i++) rd<<<132, WARPS * 32, SM + 16384, st>>>(a[i % SETS]);
    CK(cudaDeviceSynchronize());
    for (int v = 0; v < 3; v++) {
        auto run = [&](int s) {
            if (v == 0)
                rd<<<132, WARPS * 32, SM + 16384, st>>>(a[s]);
            else if (v == 1)
                routed<1><<<132, WARPS * 32, SM, st>>>(a[s]);
            else
                routed<13><<<132, WARPS * 32, SM, st>>>(a[s]);
        };
        CK(cudaMemset(dy, 0xff, NM * ROWS * 4));
        run(0);
        CK(cudaGetLastError());
        CK(cudaDeviceSynchronize());
        if (v) {
            CK(cudaMemcpy(y.data(), dy, NM * ROWS * 4, cudaMemcpyDeviceToHost));
            int bad = 0, n = 0;
            for (int m = 0; m < NM; m++)
                for (int r = 0; r < ROWS; r += 37) {
                    n++;
                    if (memcmp(&y[m * ROWS + r], &ref[m * ROWS + r], 4)) {
                        if (bad < 3) printf("  m %d r %d got %g want %g\n", m, r, y[m * ROWS + r], ref[m * ROWS + r]);
                        bad++;
                    }
                }
            printf("V%d: %d of %d differ\n", v == 1 ? 1 : 13, bad, n);
        }
        if (prof) continue;
        cudaGraph_t g;
        cudaGraphExec_t ge;
        const int it = 48;
        CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeGlobal));
        for (int i = 0; i < it; i++) run(i % SETS);
        CK(cudaStreamEndCapture(st, &g));
        CK(cudaGraphInstantiate(&ge, g, 0));
        float best = 1e9, ms;
        for (int r = 0; r < 6; r++) {
            cudaEventRecord(e0, st);
            CK(cudaGraphLaunch(ge, st));
            cudaEventRecord(e1, st);
            CK(cudaEventSynchronize(e1));
            cudaEventElapsedTime(&ms, e0, e1);
            if (ms < best) best = ms;
        }
        double mb = (CB + FB) * NM / 1e6;
        printf("%s: %.2f us for %.1f MB, %.2f TB/s, %.2f Tweights/s\n",
               v == 0   ? "pure read"
               : v == 1 ? "V1 dp4a"
                        : "V13 mma",
               best * 1000 / it, mb, mb * it / best / 1e9, (double)NM * ROWS * COLS * it / best / 1e9);
    }
    return 0;
}
