/* bench_kernels [threads] [filter] - speed of the CPU kernels at every level of this machine, each beside the machine's own limits
 * measured in turn with it (ceiling.h): the rate at which the same threads read memory, and the peak of bf16 dot products. Operands are
 * larger than the caches, as weights are in use. The best of several runs counts. */
#include "ceiling.h"
#include "backend/cpu/kernels.h"
#include "base/rng.h"

enum { RUNS = 10, READ = 64 << 20, ROWS = 8192, COLS = 4096, HIDDEN = 4096, INTER = 2048, EXPERTS = 12, HEADS = 64, HEAD_DIM = 512 };

static ceiling ceil_;
static aff_pool *pool; /* of it */
static const char *filter = "";
static double fp8_rate, expert_rate; /* bytes a second of one row, for the last lines */

static void *filled(size_t n)
{
    uint64_t *p = NULL, seed = n;
    aff_error err = {0};
    if (aff__calloc(&p, n / 8 + 1, 8, "benchmark operands", &err) != AFF_OK) {
        fprintf(stderr, "bench_kernels: %s\n", err.msg);
        exit(1);
    }
    for (size_t i = 0; i < n / 8 + 1; i++) p[i] = aff__splitmix64(&seed);
    return p;
}

static float *activations(size_t n)
{
    float *x = filled(n * sizeof *x);
    uint64_t seed = 9;
    for (size_t i = 0; i < n; i++) x[i] = (float)(int64_t)aff__splitmix64(&seed) * 0x1p-63f;
    return x;
}

/* Seconds of the fastest of RUNS calls, between which memory is read. */
static double best(void (*fn)(void *), void *ctx)
{
    uint64_t least = UINT64_MAX;
    ceiling_forget(&ceil_);
    for (int i = 0; i < RUNS; i++) {
        ceiling_read(&ceil_, READ);
        uint64_t t = ceiling_ns(&ceil_);
        fn(ctx);
        t = ceiling_ns(&ceil_) - t;
        least = t < least ? t : least;
        if (least > 300000000u && i > 1) break;
    }
    return (double)least * 1e-9;
}

/* work: what the kernel counts in (weights, multiplications); bytes: what it reads from memory. */
static void report(const char *name, int T, double seconds, double work, double bytes)
{
    printf("%-18s %-7s T=%-4d %9.3f ms %7.2f G/s %7.2f GB/s, %5.1f %% of memory's %5.1f", name, aff__cpu_level_name(aff__cpu_level()), T,
           seconds * 1e3, work / seconds * 1e-9, bytes / seconds * 1e-9, 100 * bytes / seconds / ceil_.dram, ceil_.dram * 1e-9);
    if (ceil_.bf16 > 0) printf(", %4.1f %% of bf16 peak", 100 * work / seconds / ceil_.bf16);
    printf("\n");
    fflush(stdout);
}

typedef struct product {
    aff_weight w;
    aff_numerics num;
    int T;
    float *x, *y;
} product;

static void run_product(void *ctx)
{
    product *p = ctx;
    aff__cpu_matmul(pool, &p->w, p->num, p->x, p->w.cols, p->T, p->y, p->w.rows);
}

static void bench_products(int level)
{
    static const struct {
        aff_dtype dtype;
        const char *name;
        int bytes;
    } kinds[] = {{AFF_F32, "matmul f32", 4},
                 {AFF_BF16, "matmul bf16", 2},
                 {AFF_FP8, "matmul fp8", 1},
                 {AFF_FP8_32, "matmul fp8 32x32", 1}};
    enum { MAX_T = 256 };
    float *x = activations((size_t)MAX_T * COLS), *y = activations((size_t)MAX_T * ROWS);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        if (!strstr(kinds[k].name, filter)) continue;
        size_t n = (size_t)ROWS * COLS * (size_t)kinds[k].bytes;
        uint8_t *data = filled(n), *scale = filled((size_t)ROWS * COLS / 1024);
        for (size_t i = 0; i < (size_t)ROWS * COLS / 1024; i++) scale[i] = (uint8_t)(120 + scale[i] % 8);
        if (k == 0) free(data), data = (uint8_t *)activations((size_t)ROWS * COLS);
        if (k > 1)
            for (size_t i = 0; i < n; i++) data[i] ^= (data[i] & 127) == 127;
        static const int widths[] = {1, 2, 4, 8, 16, MAX_T};
        for (size_t t = 0; t < sizeof widths / sizeof *widths; t++) {
            if (level == AFF_CPU_SCALAR && t > 0) continue;
            product p = {{kinds[k].dtype, ROWS, COLS, data, scale, false}, AFF_FAST, widths[t], x, y};
            const double sec = best(run_product, &p);
            report(kinds[k].name, p.T, sec, (double)ROWS * COLS * p.T, (double)n);
            if (kinds[k].dtype == AFF_FP8 && p.T == 1) fp8_rate = (double)n / sec;
        }
        free(data), free(scale);
    }
    free(x), free(y);
}

typedef struct routed {
    aff_moe_scratch *s;
    aff_expert_shape shape;
    aff_moe_plan plan;
    int T;
    float *x, *y;
} routed;

static void run_routed(void *ctx)
{
    routed *r = ctx;
    aff_error err = {0};
    if (aff__cpu_experts(pool, r->s, &r->shape, AFF_FAST, &r->plan, r->x, HIDDEN, r->T, 1, r->y, &err) != AFF_OK) {
        fprintf(stderr, "bench_kernels: %s\n", err.msg);
        exit(1);
    }
}

/* EXPERTS experts, T rows each (as separate entries of one tile), one pick per row so that y stays small. */
static void bench_experts(aff_dtype dtype, const char *name, int level)
{
    if (!strstr(name, filter)) return;
    static int16_t table[2][1024][4];
    for (int i = 0; i < 8192; i++)
        table[0][i / 4 % 1024][i % 4] = table[1][i / 4 % 1024][i % 4] = (int16_t)((8 + i % 8) << i % 7);
    size_t n = (size_t)HIDDEN * INTER, codes = dtype == AFF_MXFP4 ? n / 2 : n / 64 * 20,
           fields = dtype == AFF_MXFP4 ? n / 32 : n / 64 * 3;
    aff_moe_tile tile[EXPERTS];
    uint8_t *all = filled(EXPERTS * 3 * (codes + fields));
    uint8_t rscale[2 * HIDDEN];
    for (int i = 0; i < HIDDEN; i++) rscale[2 * i] = 0x80, rscale[2 * i + 1] = 0x3b;
    enum { MAX_T = 64 };
    static int row[EXPERTS * MAX_T], rank[EXPERTS * MAX_T];
    static float weight[EXPERTS * MAX_T];
    static const int widths[] = {1, 2, 4, 8, 32, 48, MAX_T};
    routed r = {.shape = {dtype, HIDDEN, INTER, 10.0f, table},
                .x = activations((size_t)MAX_T * HIDDEN),
                .y = activations((size_t)MAX_T * HIDDEN)};
    if (aff__moe_scratch_create(&r.s, aff__pool_threads(pool), NULL) != AFF_OK) exit(1);
    for (size_t t = 0; t < sizeof widths / sizeof *widths; t++) {
        r.T = widths[t];
        if (level == AFF_CPU_SCALAR && t > 0) continue;
        int experts = level == AFF_CPU_SCALAR ? 1 : EXPERTS, at = 0;
        for (int e = 0; e < experts; e++) {
            aff_expert_mat m[3];
            for (int i = 0; i < 3; i++) {
                uint8_t *p = all + (size_t)(e * 3 + i) * (codes + fields);
                if (dtype == AFF_MXFP4)
                    for (size_t b = 0; b < fields; b++) p[codes + b] = (uint8_t)(118 + p[codes + b] % 4);
                else /* block exponents 4..7, as the encoder gives nearly all blocks: bit 2 of each six */
                    for (size_t b = 0; b < fields; b++) p[codes + b] |= (uint8_t[]){0x04, 0x41, 0x10}[b % 3];
                m[i] = (aff_expert_mat){p, p + codes, rscale};
            }
            tile[e] = (aff_moe_tile){{m[0], m[1], m[2]}, e, at, r.T};
            for (int i = 0; i < r.T; i++, at++) row[at] = i, weight[at] = 0.5f;
        }
        r.plan = (aff_moe_plan){experts, at, tile, row, rank, weight};
        const double sec = best(run_routed, &r), bytes = 3.0 * (double)(codes + fields) * experts;
        report(name, r.T, sec, 3.0 * (double)n * experts * r.T, bytes);
        if (dtype == AFF_Q2P875G && r.T == 1) expert_rate = bytes / sec;
    }
    aff__moe_scratch_free(r.s);
    free(all), free(r.x), free(r.y);
}

typedef struct position {
    float *q, *k, *o, *sink, *w, *score;
    const float **key;
    int n, *sel, *scratch;
    aff_index_query query;
} position;

static void run_attend(void *ctx)
{
    position *p = ctx;
    aff__cpu_attend(p->q, HEADS, HEAD_DIM, p->key, p->n, p->sink, 0.044f, p->o);
}
static void run_index(void *ctx)
{
    position *p = ctx;
    aff__cpu_index_scores(&p->query, p->k, p->n, p->score);
}
static void run_topk(void *ctx)
{
    position *p = ctx;
    aff__cpu_topk(p->score, p->n, 512, p->sel, p->scratch);
}

static void bench_attention(void)
{
    enum { KEYS = 65536 };
    position p = {activations(HEADS * HEAD_DIM),
                  activations((size_t)KEYS * 128),
                  activations(HEADS * HEAD_DIM),
                  activations(HEADS),
                  activations(HEADS),
                  activations(KEYS),
                  filled(KEYS * sizeof(float *)),
                  640,
                  filled(KEYS * sizeof(int)),
                  filled(KEYS * sizeof(int))};
    for (int j = 0; j < p.n; j++) p.key[j] = p.k + (int64_t)j * HEAD_DIM;
    if (strstr("attend", filter))
        report("attend 64x512", p.n, best(run_attend, &p), 2.0 * p.n * HEADS * HEAD_DIM, (double)p.n * HEAD_DIM * 4);
    p.n = 4096;
    const aff_rowfmt f = aff__rowfmt_key(AFF_FAST, 128);
    void *buf = filled(aff__cpu_index_bytes(HEADS, &f));
    aff__cpu_index_prepare(&p.query, p.q, p.w, HEADS, &f, buf);
    if (strstr("index", filter))
        report("index 64x128", p.n, best(run_index, &p), (double)p.n * HEADS * 128, (double)p.n * f.bytes);
    free(buf);
    p.n = KEYS;
    if (strstr("topk", filter)) report("topk 512", p.n, best(run_topk, &p), p.n, (double)p.n * 4);
    free(p.q), free(p.k), free(p.o), free(p.sink), free(p.w), free(p.score), free(p.key), free(p.sel), free(p.scratch);
}

int main(int argc, char **argv)
{
    if (argc > 2) filter = argv[2];
    ceiling_open(&ceil_, argc > 1 ? atoi(argv[1]) : 1);
    pool = ceil_.pool;
    const double memory = ceil_.dram;
    int top = aff__cpu_level();
    for (int level = AFF_CPU_SCALAR; level <= top; level++) {
        aff__cpu_cap((aff_cpu_level)level);
        bench_products(level);
        bench_experts(AFF_Q2P875G, "experts 2.875 bit", level);
        bench_experts(AFF_MXFP4, "experts mxfp4", level);
        bench_attention();
    }
    const int threads = aff__pool_threads(pool);
    if (expert_rate > 0)
        printf("routed experts read %.2f GB/s a core at one row: %.1f cores of this kind would read all of the %.1f GB/s that memory gives %d\n",
               expert_rate / threads * 1e-9, memory / (expert_rate / threads), memory * 1e-9, threads);
    if (fp8_rate > 0) printf("FP8 matrices read %.2f GB/s a core at one row: %.1f cores\n", fp8_rate / threads * 1e-9, memory / (fp8_rate / threads));
    ceiling_close(&ceil_);
    return 0;
}
