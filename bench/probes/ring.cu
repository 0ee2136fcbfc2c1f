// Skeleton decode layer, persistent: a producer warp streams the weights of all steps through a shared-memory ring and
// does not stop at the grid barriers.
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cuda_runtime.h>
#define CK(x)                                                                                                          \
    do {                                                                                                               \
        cudaError_t e = (x);                                                                                           \
        if (e) {                                                                                                       \
            printf("ERR %s %s\n", #x, cudaGetErrorString(e));                                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
static const double MB[13] = {6.3, 33.5, 25.2, 1.0, 33.5, 33.5, 1.6, 2.0, 16.8, 8.4, 36.2, 18.1, 1.6};
struct Step {
    const char *p;
    int tiles;
    int wait;
}; // wait: the producer itself must see this many barriers (routed addresses)
__device__ __forceinline__ uint32_t sm32(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void waitp(uint32_t b, uint32_t ph)
{
    asm volatile("{.reg .pred P;L:mbarrier.try_wait.parity.shared.b64 P,[%0],%1;@P bra D;bra L;D:}" ::"r"(b), "r"(ph)
                 : "memory");
}
__device__ __forceinline__ unsigned acq(const unsigned *p)
{
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
template <int TB, int ST, int CW>
__global__ __launch_bounds__(CW * 32 + 32, 1) void ring(const Step *steps, int n, float *b0, float *b1, unsigned *bar,
                                                        int compute, int mode, int lim)
{
    extern __shared__ __align__(128) char sm[];
    __shared__ __align__(8) uint64_t full[ST], empty[ST];
    const int t = threadIdx.x, w = t >> 5, l = t & 31;
    if (t == 0) {
        for (int i = 0; i < ST; i++) {
            asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(sm32(&full[i])));
            asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(sm32(&empty[i])), "r"(CW));
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (w == CW) {
        if (l == 0) {
            int k = 0;
            for (int j = 0; j < n; j++) {
                Step s = steps[j];
                if (s.wait >= 0)
                    while (acq(bar) < (unsigned)s.wait * gridDim.x)
                        ; // offset so that short steps do not all land on the first SMs
                for (int i = (blockIdx.x + j * 37) % gridDim.x; i < ((mode & 4) ? 0 : s.tiles); i += gridDim.x, k++) {
                    int st = k % ST;
                    if (k >= ST) waitp(sm32(&empty[st]), (k / ST - 1) & 1);
                    if (lim < ST && k >= lim) {
                        int o = k - lim;
                        waitp(sm32(&full[o % ST]), (o / ST) & 1);
                    }
                    uint32_t f = sm32(&full[st]);
                    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(f), "r"(TB));
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                            sm32(sm + st * TB)),
                        "l"(s.p + (size_t)i * TB), "r"(TB), "r"(f)
                        : "memory");
                }
            }
        }
    } else {
        int k = 0;
        unsigned gen = 0;
        for (int j = 0; j < n; j++) {
            Step s = steps[j];
            const float *in = (j & 1) ? b1 : b0;
            float *out = (j & 1) ? b0 : b1;
            float x = 0;
            if (!(mode & 2))
                for (int q = 0; q < 4; q++) x += __ldcg(in + ((t + q * 256) & 4095));
            uint4 a = {0, 0, 0, 0};
            for (int i = (blockIdx.x + j * 37) % gridDim.x; i < ((mode & 4) ? 0 : s.tiles); i += gridDim.x, k++) {
                int st = k % ST;
                waitp(sm32(&full[st]), (k / ST) & 1);
                const uint4 *q = (const uint4 *)(sm + st * TB + w * (TB / CW));
#pragma unroll
                for (int c = 0; c < TB / CW / 512; c++) {
                    uint4 v = q[c * 32 + l];
                    for (int m = 0; m < compute; m++) {
                        v.x = v.x * 2654435761u + v.y;
                        v.y ^= v.z;
                        v.z += v.w;
                    }
                    a.x ^= v.x;
                    a.y ^= v.y;
                    a.z ^= v.z;
                    a.w ^= v.w;
                }
                __syncwarp();
                if (l == 0) asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(sm32(&empty[st])));
            }
            unsigned z = a.x ^ a.y ^ a.z ^ a.w;
            for (int m = 16; m; m >>= 1) z ^= __shfl_xor_sync(~0u, z, m);
            if (l == 0) out[(blockIdx.x * CW + w) & 4095] = x * 1e-9f + (z == 0x9e3779b9);
            if (mode & 1) continue;
            gen += gridDim.x;
            asm volatile("bar.sync 1,%0;" ::"n"(CW * 32) : "memory");
            if (t == 0) {
                asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(bar) : "memory");
                while (acq(bar) < gen)
                    ;
            }
            asm volatile("bar.sync 1,%0;" ::"n"(CW * 32) : "memory");
        }
    }
}
template <int TB, int ST, int CW>
void go(Step *d, Step *h, int n, float *b, unsigned *bar, double fl, int compute, cudaStream_t s, int L, int mode = 0,
        int lim = 1000)
{
    cudaEvent_t e0, e1;
    cudaEventCreate(&e0);
    cudaEventCreate(&e1);
    auto k = ring<TB, ST, CW>;
    CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, TB * ST));
    float *b0 = b, *b1 = b + 4096;
    void *a[] = {&d, &n, &b0, &b1, &bar, &compute, &mode, &lim};
    float best = 1e9, ms;
    for (int r = 0; r < 6; r++) {
        CK(cudaMemsetAsync(bar, 0, 4, s));
        cudaEventRecord(e0, s);
        CK(cudaLaunchCooperativeKernel((void *)k, 132, CW * 32 + 32, a, TB * ST, s));
        cudaEventRecord(e1, s);
        CK(cudaEventSynchronize(e1));
        cudaEventElapsedTime(&ms, e0, e1);
        if (ms < best) best = ms;
    }
    printf(
        "ring tile %d x %d, %d consumer warps, work %d, mode %d, in flight %d: %.1f us/layer, %.2f ms, %.0f%% of HBM\n",
        TB, ST, CW, compute, mode, lim, best * 1000 / L, best, 100 * fl * L / (best * 1000));
}
int main()
{
    int L = 43;
    size_t tot = 0;
    for (double m : MB) tot += (size_t)(m * 1e6) / 16384 * 16384;
    char *w;
    CK(cudaMalloc(&w, tot * L));
    CK(cudaMemset(w, 3, tot * L));
    float *b;
    CK(cudaMalloc(&b, 32768));
    CK(cudaMemset(b, 0, 32768));
    unsigned *bar;
    CK(cudaMalloc(&bar, 4));
    double fl = tot / 4.45e6;
    printf("layer %.0f MB, floor %.1f us\n", tot / 1e6, fl);
    cudaStream_t s;
    CK(cudaStreamCreate(&s));
    for (int tb : {8192, 4096})
        for (int dep = 0; dep < 2; dep++) {
            Step *h = (Step *)malloc(sizeof(Step) * 13 * L);
            size_t o = 0;
            for (int l = 0; l < L; l++)
                for (int k = 0; k < 13; k++) {
                    size_t bytes = (size_t)(MB[k] * 1e6) / 16384 * 16384;
                    h[l * 13 + k] = {w + o, (int)(bytes / tb), dep && k == 10 ? l * 13 + 9 : -1};
                    o += bytes;
                }
            Step *d;
            CK(cudaMalloc(&d, sizeof(Step) * 13 * L));
            CK(cudaMemcpy(d, h, sizeof(Step) * 13 * L, cudaMemcpyHostToDevice));
            printf("routed addresses after the router: %s\n", dep ? "yes" : "no");
            for (int i = 0; i < 30; i++) go<8192, 24, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, 8);
            if (tb == 8192) {
                // parts: 1 no barrier, 2 no activations, 3 neither: weights alone; 4, 6 no weights: barriers alone
                for (int m : {0, 1, 2, 3, 4, 6}) go<8192, 24, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, m);
                for (int lim : {4, 6, 8, 12, 24})
                    for (int m : {0, 1}) {
                        go<8192, 24, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, m, lim);
                    }
                for (int lim : {4, 6, 8}) go<8192, 24, 8>(d, h, 13 * L, b, bar, fl, 2, s, L, 0, lim);
                for (int lim : {4, 6, 8}) go<8192, 10, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, 0, lim);
                for (int lim : {4, 6}) go<8192, 8, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, 0, lim);
            }
            if (tb == 4096) {
                for (int lim : {8, 12, 16}) go<4096, 48, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, 0, lim);
                for (int lim : {8, 12, 16}) go<4096, 20, 8>(d, h, 13 * L, b, bar, fl, 0, s, L, 0, lim);
            }
        }
    return 0;
}
