// (1) Does the order of k inside one mma.sync m16n8k16 (bf16) matter? (2) wgmma m64nNk16 against mma.sync, N = 8..256.
// (3) register-only rates.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
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
__device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ uint64_t desc(const void *p, int lbo, int sbo)
{
    uint32_t a = (uint32_t)__cvta_generic_to_shared(p);
    return (uint64_t)((a & 0x3FFFF) >> 4) | ((uint64_t)((lbo & 0x3FFFF) >> 4) << 16) |
           ((uint64_t)((sbo & 0x3FFFF) >> 4) << 32);
}
// perm: position j of the instruction takes column perm[j]
__global__ void plain(const uint16_t *A, const uint16_t *B, int K, const int *perm, float *o)
{
    int l = threadIdx.x, g = l >> 2, q = (l & 3) * 2;
    float d[4] = {0, 0, 0, 0};
    for (int k0 = 0; k0 < K; k0 += 16) {
        auto ld = [&](const uint16_t *r, int j) {
            return (uint32_t)r[k0 + perm[j]] | (uint32_t)r[k0 + perm[j + 1]] << 16;
        };
        uint32_t a[4] = {ld(A + g * K, q), ld(A + (g + 8) * K, q), ld(A + g * K, q + 8), ld(A + (g + 8) * K, q + 8)};
        mma(d, a, ld(B + g * K, q), ld(B + g * K, q + 8));
    }
    for (int j = 0; j < 4; j++) o[(g + (j >> 1) * 8) * 8 + q + (j & 1)] = d[j];
}
// wgmma with A and B from shared memory without swizzle: core matrices of 8 rows x 16 bytes
template <int N> struct W;
#define D8(i)                                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
template <> struct W<8> {
    static __device__ void go(float *d, uint64_t a, uint64_t b, int s)
    {
        asm volatile("{.reg .pred p; setp.ne.b32 p,%6,0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3},%4,%5,p,1,1,0,0;}"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "l"(a), "l"(b), "r"(s));
    }
};
template <> struct W<64> {
    static __device__ void go(float *d, uint64_t a, uint64_t b, int s)
    {
        asm volatile("{.reg .pred p; setp.ne.b32 p,%34,0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%"
                     "26,%27,%28,%29,%30,%31},%32,%33,p,1,1,0,0;}"
                     : D8(0), D8(8), D8(16), D8(24)
                     : "l"(a), "l"(b), "r"(s));
    }
};
template <> struct W<128> {
    static __device__ void go(float *d, uint64_t a, uint64_t b, int s)
    {
        asm volatile("{.reg .pred p; setp.ne.b32 p,%66,0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%"
                     "26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%"
                     "50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},%64,%65,p,1,1,0,0;}"
                     : D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)
                     : "l"(a), "l"(b), "r"(s));
    }
};
// A [64][K], B [N][K] in global; out [64][N]
template <int N> __global__ void wg(const uint16_t *A, const uint16_t *B, int K, float *o)
{
    __shared__ __align__(128) uint16_t sa[64 * 16], sb[N * 16];
    int t = threadIdx.x, w = t >> 5, l = t & 31;
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    for (int k0 = 0; k0 < K; k0 += 16) {
        __syncthreads();
        for (int i = t; i < 64 * 16; i += 128) {
            int r = i / 16, c = i % 16;
            sa[(c / 8) * 64 * 8 + r * 8 + c % 8] = A[r * K + k0 + c];
        }
        for (int i = t; i < N * 16; i += 128) {
            int r = i / 16, c = i % 16;
            sb[(c / 8) * N * 8 + r * 8 + c % 8] = B[r * K + k0 + c];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        W<N>::go(d, desc(sa, 64 * 16, 128), desc(sb, N * 16, 128), k0 > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < N / 2; i++) {
        int c = (i / 4) * 8 + (l & 3) * 2 + (i & 1), r = w * 16 + (l >> 2) + ((i >> 1) & 1) * 8;
        o[r * N + c] = d[i];
    }
}
__global__ void ratem(float *o, int it)
{
    float d[8][4];
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) d[i][j] = 0;
    uint32_t a[4] = {threadIdx.x, threadIdx.x * 3u, 5, 7};
    for (int i = 0; i < it; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) mma(d[j], a, threadIdx.x + j, i);
    }
    float s = 0;
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) s += d[i][j];
    if (s == 1.5f) o[0] = s;
}
template <int N> __global__ __launch_bounds__(256) void ratew(float *o, int it)
{
    __shared__ __align__(128) uint16_t sa[64 * 16 * 2], sb[N * 16];
    for (int i = threadIdx.x; i < 2048; i += 256) sa[i] = i * 77;
    for (int i = threadIdx.x; i < N * 16; i += 256) sb[i] = i * 31;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    for (int i = 0; i < it; i++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int j = 0; j < 4; j++)
            W<N>::go(d, desc(sa + (threadIdx.x >> 7) * 1024, 64 * 16, 128), desc(sb, N * 16, 128), 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float s = 0;
    for (int i = 0; i < N / 2; i++) s += d[i];
    if (s == 1.5f) o[0] = s;
}
template <int N> void cmp(int K)
{
    long bad = 0, tot = 0;
    uint16_t *dA, *dB;
    float *d0, *d1;
    int *dp;
    CK(cudaMalloc(&dA, 64 * K * 2));
    CK(cudaMalloc(&dB, N * K * 2));
    CK(cudaMalloc(&d0, 64 * N * 4));
    CK(cudaMalloc(&d1, 64 * N * 4));
    CK(cudaMalloc(&dp, 64));
    int id[16];
    for (int i = 0; i < 16; i++) id[i] = i;
    CK(cudaMemcpy(dp, id, 64, cudaMemcpyHostToDevice));
    for (int it = 0; it < 400; it++) {
        std::vector<uint16_t> A(64 * K), B(N * K);
        auto rnd = [&]() {
            float f = (rand() / (float)RAND_MAX - .5f) * 2;
            int s = it % 4 == 0 ? 0 : it % 4 == 1 ? rand() % 8 - 4 : it % 4 == 2 ? rand() % 24 - 12 : rand() % 40 - 20;
            f = ldexpf(f, s);
            uint32_t u;
            memcpy(&u, &f, 4);
            return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
        };
        for (auto &v : A) v = rnd();
        for (auto &v : B) v = rnd();
        CK(cudaMemcpy(dA, A.data(), A.size() * 2, cudaMemcpyHostToDevice));
        CK(cudaMemcpy(dB, B.data(), B.size() * 2, cudaMemcpyHostToDevice));
        wg<N><<<1, 128>>>(dA, dB, K, d0);
        std::vector<float> h0(64 * N), h1(128);
        CK(cudaMemcpy(h0.data(), d0, 64 * N * 4, cudaMemcpyDeviceToHost));
        for (int r = 0; r < 64; r += 16)
            for (int c = 0; c < N; c += 8) {
                plain<<<1, 32>>>(dA + r * K, dB + c * K, K, dp, d1);
                CK(cudaMemcpy(h1.data(), d1, 512, cudaMemcpyDeviceToHost));
                for (int i = 0; i < 16; i++)
                    for (int j = 0; j < 8; j++) {
                        tot++;
                        bad += memcmp(&h0[(r + i) * N + c + j], &h1[i * 8 + j], 4) != 0;
                    }
                if (it > 20 && (c > 8 || r)) break;
            }
    }
    printf("wgmma m64n%dk16 against mma.sync, K %d: %ld of %ld differ\n", N, K, bad, tot);
}
int main()
{
    srand(3);
    int K = 128;
    long bad[3] = {0, 0, 0}, tot = 0;
    uint16_t *dA, *dB;
    float *d;
    int *dp;
    CK(cudaMalloc(&dA, 16 * K * 2));
    CK(cudaMalloc(&dB, 8 * K * 2));
    CK(cudaMalloc(&d, 512));
    CK(cudaMalloc(&dp, 64));
    for (int it = 0; it < 2000; it++) {
        std::vector<uint16_t> A(16 * K), B(8 * K);
        auto rnd = [&]() {
            float f = (rand() / (float)RAND_MAX - .5f) * 2;
            int s = it % 4 == 0 ? 0 : it % 4 == 1 ? rand() % 8 - 4 : it % 4 == 2 ? rand() % 24 - 12 : rand() % 40 - 20;
            f = ldexpf(f, s);
            uint32_t u;
            memcpy(&u, &f, 4);
            return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
        };
        for (auto &v : A) v = rnd();
        for (auto &v : B) v = rnd();
        CK(cudaMemcpy(dA, A.data(), A.size() * 2, cudaMemcpyHostToDevice));
        CK(cudaMemcpy(dB, B.data(), B.size() * 2, cudaMemcpyHostToDevice));
        float h[4][128];
        for (int p = 0; p < 4; p++) {
            int m[16];
            for (int i = 0; i < 16; i++) m[i] = i;
            if (p == 1)
                for (int q = 0; q < 4; q++) {
                    m[2 * q] = 4 * q;
                    m[2 * q + 1] = 4 * q + 1;
                    m[2 * q + 8] = 4 * q + 2;
                    m[2 * q + 9] = 4 * q + 3;
                }
            if (p == 2)
                for (int i = 0; i < 8; i++) {
                    int a = rand() % 8, b = rand() % 8, x = m[a];
                    m[a] = m[b];
                    m[b] = x;
                }
            if (p == 3)
                for (int i = 0; i < 32; i++) {
                    int a = rand() % 16, b = rand() % 16, x = m[a];
                    m[a] = m[b];
                    m[b] = x;
                }
            CK(cudaMemcpy(dp, m, 64, cudaMemcpyHostToDevice));
            plain<<<1, 32>>>(dA, dB, K, dp, d);
            CK(cudaMemcpy(h[p], d, 512, cudaMemcpyDeviceToHost));
        }
        for (int i = 0; i < 128; i++) {
            tot++;
            for (int p = 1; p < 4; p++) bad[p - 1] += memcmp(&h[0][i], &h[p][i], 4) != 0;
        }
    }
    printf("k relabelled inside an instruction: quads %ld, within halves %ld, any %ld of %ld differ\n", bad[0], bad[1],
           bad[2], tot);
    cmp<8>(128);
    cmp<64>(128);
    cmp<128>(128);
    float *o;
    CK(cudaMalloc(&o, 4));
    cudaEvent_t e0, e1;
    cudaEventCreate(&e0);
    cudaEventCreate(&e1);
    float ms;
    for (int r = 0; r < 3; r++) {
        cudaEventRecord(e0);
        ratem<<<264, 512>>>(o, 4000);
        cudaEventRecord(e1);
        CK(cudaEventSynchronize(e1));
        cudaEventElapsedTime(&ms, e0, e1);
    }
    printf("mma.sync bf16: %.0f TFLOP/s\n", 264. * 16 * 4000 * 8 * 4096 / ms / 1e9);
    for (int r = 0; r < 3; r++) {
        cudaEventRecord(e0);
        ratew<128><<<264, 256>>>(o, 4000);
        cudaEventRecord(e1);
        CK(cudaEventSynchronize(e1));
        cudaEventElapsedTime(&ms, e0, e1);
    }
    printf("wgmma m64n128: %.0f TFLOP/s\n", 264. * 2 * 4000 * 4 * 2 * 64 * 128 * 16 / ms / 1e9);
    for (int r = 0; r < 3; r++) {
        cudaEventRecord(e0);
        ratew<64><<<264, 256>>>(o, 4000);
        cudaEventRecord(e1);
        CK(cudaEventSynchronize(e1));
        cudaEventElapsedTime(&ms, e0, e1);
    }
    printf("wgmma m64n64: %.0f TFLOP/s\n", 264. * 2 * 4000 * 4 * 2 * 64 * 64 * 16 / ms / 1e9);
    return 0;
}
