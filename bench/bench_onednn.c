/* bench_onednn [threads] - the dense products of bench_kernels by oneDNN, as a yardstick: bf16 weights in the layout
 * that it likes best, bf16 activations, float32 results, at the shapes of V4-Flash. Built where libdnnl is found.
 * Beside it our own product of the same bf16 matrix, measured in turn. */
#include "ceiling.h"
#include "backend/cpu/kernels.h"
#include "base/rng.h"
#include "quant/numbers.h"
#include <dnnl.h>
#include <unistd.h>

static ceiling c;

static void must(dnnl_status_t s, const char *what)
{
    if (s == dnnl_success) return;
    fprintf(stderr, "bench_onednn: %s: status %d\n", what, (int)s);
    exit(1);
}

/* A product y[T][rows] = x[T][cols] W', ready to run. */
typedef struct product {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_t run;
    dnnl_memory_t x, w, y;
} product;

static dnnl_memory_desc_t plain(int a, int b, dnnl_data_type_t type, dnnl_format_tag_t tag)
{
    dnnl_memory_desc_t d;
    const dnnl_dims_t dims = {a, b};
    must(dnnl_memory_desc_init_by_tag(&d, 2, dims, type, tag), "memory descriptor");
    return d;
}

static void reorder(const product *p, const dnnl_memory_desc_t *from, void *data)
{
    dnnl_memory_t src;
    dnnl_primitive_desc_t pd;
    dnnl_primitive_t run;
    const dnnl_memory_desc_t *to;
    must(dnnl_memory_create(&src, from, p->engine, data), "memory");
    must(dnnl_memory_get_memory_desc(p->w, &to), "memory");
    must(dnnl_reorder_primitive_desc_create(&pd, from, p->engine, to, p->engine, NULL), "reorder");
    must(dnnl_primitive_create(&run, pd), "reorder");
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, src}, {DNNL_ARG_TO, p->w}};
    must(dnnl_primitive_execute(run, p->stream, 2, args), "reorder");
    must(dnnl_stream_wait(p->stream), "reorder");
    dnnl_primitive_destroy(run), dnnl_primitive_desc_destroy(pd), dnnl_memory_destroy(src);
}

static void make(product *p, int rows, int cols, int T, void *weights, void *x, float *y)
{
    dnnl_matmul_desc_t d;
    dnnl_primitive_desc_t pd;
    must(dnnl_engine_create(&p->engine, dnnl_cpu, 0), "engine");
    must(dnnl_stream_create(&p->stream, p->engine, dnnl_stream_default_flags), "stream");
    const dnnl_memory_desc_t dx = plain(T, cols, dnnl_bf16, dnnl_ab), dy = plain(T, rows, dnnl_f32, dnnl_ab),
                             any = plain(cols, rows, dnnl_bf16, dnnl_format_tag_any),
                             ours = plain(cols, rows, dnnl_bf16, dnnl_ba);
    must(dnnl_matmul_desc_init(&d, &dx, &any, NULL, &dy), "matmul");
    must(dnnl_primitive_desc_create(&pd, &d, NULL, p->engine, NULL), "matmul");
    must(dnnl_primitive_create(&p->run, pd), "matmul");
    must(dnnl_memory_create(&p->x, &dx, p->engine, x), "memory");
    must(dnnl_memory_create(&p->y, &dy, p->engine, y), "memory");
    must(dnnl_memory_create(&p->w, dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0), p->engine,
                            DNNL_MEMORY_ALLOCATE),
         "memory");
    reorder(p, &ours, weights);
    dnnl_primitive_desc_destroy(pd);
}

static void discard(product *p)
{
    dnnl_primitive_destroy(p->run);
    dnnl_memory_destroy(p->x), dnnl_memory_destroy(p->w), dnnl_memory_destroy(p->y);
    dnnl_stream_destroy(p->stream), dnnl_engine_destroy(p->engine);
}

static uint64_t run(const product *p)
{
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, p->x}, {DNNL_ARG_WEIGHTS, p->w}, {DNNL_ARG_DST, p->y}};
    const uint64_t t = ceiling_ns(&c);
    must(dnnl_primitive_execute(p->run, p->stream, 3, args), "matmul");
    must(dnnl_stream_wait(p->stream), "matmul");
    return ceiling_ns(&c) - t;
}

static void compare(int rows, int cols, int T, uint16_t *weights, uint16_t *x, float *xf, float *y)
{
    product p;
    uint64_t theirs = UINT64_MAX, ours = UINT64_MAX;
    const aff_weight w = {.dtype = AFF_BF16, .rows = rows, .cols = cols, .data = weights};
    make(&p, rows, cols, T, weights, x, y);
    ceiling_forget(&c);
    for (int i = 0; i < CEIL_RUNS; i++) {
        const uint64_t a = run(&p), t = ceiling_ns(&c);
        aff__cpu_matmul(c.pool, &w, AFF_FAST, xf, cols, T, y, rows);
        const uint64_t b = ceiling_ns(&c) - t;
        theirs = a < theirs ? a : theirs, ours = b < ours ? b : ours;
        ceiling_read(&c, 64 << 20);
    }
    discard(&p);
    const double n = (double)rows * cols;
    printf("%6d x %-6d T=%-4d oneDNN %7.1f GFLOP/s %6.1f GB/s; ours %7.1f GFLOP/s %6.1f GB/s; memory %.1f GB/s\n", rows,
           cols, T, 2 * n * T / (double)theirs, 2 * n / (double)theirs, 2 * n * T / (double)ours, 2 * n / (double)ours,
           c.dram * 1e-9);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const int shapes[][2] = {{4096, 8192}, {32768, 1024}, {2048, 4096}, {4096, 2048}},
                     widths[] = {1, 4, 16, 256, 1024};
    enum { MOST = 32768 * 1024, WIDE = 32768, MAX_T = 1024 };
    const int threads = argc > 1 ? atoi(argv[1]) : 1;
    char text[16];
    snprintf(text, sizeof text, "%d", threads);
    const char *set = getenv("OMP_NUM_THREADS");
    if (!set || strcmp(set, text) != 0) { /* the library's threads are counted before main */
        setenv("OMP_NUM_THREADS", text, 1);
        execv("/proc/self/exe", argv);
    }
    ceiling_open(&c, threads);
    uint64_t seed = 3;
    uint16_t *weights = malloc(MOST * sizeof *weights), *x = malloc((size_t)MAX_T * WIDE * sizeof *x);
    float *xf = malloc((size_t)MAX_T * WIDE * sizeof *xf), *y = malloc((size_t)MAX_T * WIDE * sizeof *y);
    if (!weights || !x || !xf || !y) return 1;
    for (int i = 0; i < MOST; i++) weights[i] = (uint16_t)(0x3c00 | (aff__splitmix64(&seed) & 0x81ff));
    for (size_t i = 0; i < (size_t)MAX_T * WIDE; i++) {
        x[i] = (uint16_t)(0x3e00 | (aff__splitmix64(&seed) & 0x81ff));
        xf[i] = aff__bf16_to_f32(x[i]);
    }
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t t = 0; t < sizeof widths / sizeof *widths; t++)
            compare(shapes[s][0], shapes[s][1], widths[t], weights, x, xf, y);
    free(weights), free(x), free(xf), free(y);
    ceiling_close(&c);
    return 0;
}
