/* bench_gpu - kernels of the device at the sizes of DeepSeek-V4-Flash, each launched over several sets of weights inside one graph, with
 * the bytes it must read over its time beside the rate of a large copy on the same device.
 *     bench_gpu [cuda:0 | hip:0 | emu [many]]      many: of prompts only
 */
#include "backend/gpu/rt.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SETS = 8, REPS = 5, ROUNDS = 4, HIDDEN = 4096, INTER = 2048, PICKS = 6 };

static aff_rt *rt;
static aff_stream *stream;
static double copy_rate; /* bytes a second, read and written together */
static aff_error err;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "bench_gpu: %s\n", err.msg);
    exit(1);
}

static void *device(uint64_t bytes)
{
    void *p;
    must(aff__rt_alloc(rt, &p, bytes, "bench", &err));
    return p;
}

static void put(void *to, const void *from, uint64_t bytes)
{
    must(aff__rt_copy(rt, stream, to, from, bytes, &err));
    must(aff__rt_sync(rt, stream, &err));
}

/* Pseudo-random bytes with these bits free and those set, the same block repeated. */
static void *bytes_of(uint64_t bytes, uint8_t mask, uint8_t set)
{
    static uint8_t block[1000012]; /* no multiple of a row */
    uint32_t x = 12345;
    for (size_t i = 0; i < sizeof block; i++) x = x * 1664525u + 1013904223u, block[i] = ((uint8_t)(x >> 24) & mask) | set;
    char *p = device(bytes);
    for (uint64_t at = 0; at < bytes; at += sizeof block) must(aff__rt_copy(rt, stream, p + at, block, bytes - at < sizeof block ? bytes - at : sizeof block, &err));
    must(aff__rt_sync(rt, stream, &err));
    return p;
}

static void *noise(uint64_t bytes, uint8_t mask) { return bytes_of(bytes, mask, 0); }

static void launch(aff_kernel k, unsigned grid, unsigned block, unsigned smem, const void *args)
{
    must(aff__rt_launch(rt, stream, k, grid, block, smem, aff__rt_info(rt)->programmatic ? AFF_LAUNCH_PROGRAMMATIC : 0, args, &err));
}

typedef void (*launch_fn)(void *ctx, int set);

/* Microseconds of one launch. */
static double time_of(launch_fn f, void *ctx)
{
    aff_graph *g;
    aff_event *a, *b;
    float best = 1e30f, ms;
    for (int i = 0; i < SETS; i++) f(ctx, i); /* scratch, modules */
    must(aff__rt_sync(rt, stream, &err));
    must(aff__rt_capture_begin(rt, stream, &err));
    for (int i = 0; i < SETS * ROUNDS; i++) f(ctx, i % SETS);
    must(aff__rt_capture_end(rt, stream, &g, &err));
    must(aff__rt_event_create(rt, &a, &err));
    must(aff__rt_event_create(rt, &b, &err));
    for (int i = 0; i < REPS; i++) {
        must(aff__rt_record(rt, a, stream, &err));
        must(aff__rt_graph_launch(rt, g, stream, &err));
        must(aff__rt_record(rt, b, stream, &err));
        must(aff__rt_event_sync(rt, b, &err));
        must(aff__rt_elapsed(rt, a, b, &ms, &err));
        best = ms < best ? ms : best;
    }
    aff__rt_graph_free(rt, g);
    aff__rt_event_free(rt, a);
    aff__rt_event_free(rt, b);
    return 1000.0 * best / (SETS * ROUNDS);
}

static void report(const char *what, int T, double us, double bytes, double flop)
{
    printf("%-28s T %5d %9.2f us %8.1f MB %7.2f TB/s %5.1f %% of the copy's", what, T, us, bytes / 1e6, bytes / us / 1e6, 100 * bytes / us * 1e6 / copy_rate);
    if (flop > 0) printf(" %7.1f TFLOP/s", flop / us / 1e6);
    printf("\n");
    fflush(stdout);
}

/* ---- a large copy ---- */

typedef struct copy_job {
    char *from, *to;
    uint64_t bytes;
} copy_job;

static void copy_launch(void *ctx, int set)
{
    const copy_job *j = ctx;
    must(aff__rt_copy(rt, stream, j->to, j->from, j->bytes, &err));
}

/* ---- dense ---- */

typedef struct dense_job {
    aff_k_dense d[SETS];
    int T;
    unsigned grid, smem; /* smem: of the streaming kernel, 0: the others */
    bool few, wg;
} dense_job;

static void dense_launch(void *ctx, int set)
{
    const dense_job *j = ctx;
    const bool amd = aff__rt_info(rt)->fragment_columns == 16;
    if (j->smem)
        launch(AFF_K_dense_stream, j->grid, 256, j->smem, &j->d[set]);
    else if (j->wg)
        launch(AFF_K_dense_wg, j->grid < (unsigned)aff__rt_info(rt)->units ? j->grid : (unsigned)aff__rt_info(rt)->units, 384, AFF_K_WG_SMEM, &j->d[set]);
    else if (j->few)
        launch(AFF_K_dense_few, j->grid, 256, 8192, &j->d[set]);
    else
        launch(AFF_K_dense_many, j->grid, 256, (unsigned)aff__k_many_smem(amd, j->d[set].stages), &j->d[set]);
}

static bool hopper(void) { return aff__rt_info(rt)->kind == AFF_RT_CUDA && !strcmp(aff__rt_info(rt)->arch, "sm_90"); }

/* How many of n floats differ in any bit. */
static uint64_t differing(const float *a, const float *b, uint64_t n)
{
    uint32_t *x = malloc(n * 4), *y = malloc(n * 4);
    uint64_t wrong = 0;
    must(aff__rt_copy(rt, stream, x, a, n * 4, &err));
    must(aff__rt_copy(rt, stream, y, b, n * 4, &err));
    must(aff__rt_sync(rt, stream, &err));
    for (uint64_t i = 0; i < n; i++) wrong += x[i] != y[i];
    free(x);
    free(y);
    return wrong;
}

/* `count` matrices of rows x cols (groups of `groups`) that read the same x. */
static void dense(const char *what, int count, int rows, int cols, int groups, aff_dtype dtype, int T)
{
    static dense_job j;
    const bool amd = aff__rt_info(rt)->fragment_columns == 16, bf16 = dtype == AFF_BF16;
    const uint64_t bytes = (uint64_t)rows * (uint64_t)cols * (bf16 ? 2 : 1), scales = (uint64_t)(rows / 128 + 1) * (uint64_t)(cols / 128 + 1);
    uint16_t *x = noise((uint64_t)T * (uint64_t)cols * (uint64_t)groups * 2, 0xbf);
    const uint64_t results = (uint64_t)T * (uint64_t)rows * (uint64_t)count;
    float *y = device(results * 4), *z = NULL;
    void *kept[SETS * 2 * AFF_K_MATRICES];
    int n = 0;
    j = (dense_job){.T = T, .few = T <= AFF_K_FEW};
    for (int s = 0; s < SETS; s++) {
        int32_t tiles = 0;
        j.d[s].count = count, j.d[s].T = T;
        for (int i = 0; i < count; i++) {
            aff_k_matrix *m = &j.d[s].m[i];
            *m = (aff_k_matrix){.data = noise(bytes, 0xbf), .scale = bytes_of(scales, 3, 0x7c), .x = x, .y = y + (uint64_t)i * (uint64_t)T * (uint64_t)rows, .ldx = (int64_t)cols * groups, .ldy = rows,
                                .rows = rows, .cols = cols, .dtype = (int32_t)dtype, .group_rows = rows / groups, .tile0 = tiles};
            tiles += aff__k_dense_tiles(m, j.few ? 16 : aff__k_many_rows(amd));
            kept[n++] = (void *)(uintptr_t)m->data;
            kept[n++] = (void *)(uintptr_t)m->scale;
        }
        j.d[s].tiles = tiles;
        j.d[s].stages = aff__k_many_smem(amd, 2) <= (size_t)aff__rt_info(rt)->shared_bytes ? 2 : 1;
        j.grid = (unsigned)tiles * (j.few ? 1u : (unsigned)((T + 127) / 128));
        if (j.few && aff__k_ds_fits(&j.d[s].m[0])) {
            aff__k_ds_solo(&j.d[s], aff__rt_info(rt)->units);
            const size_t room = (size_t)aff__rt_info(rt)->shared_bytes, two = aff__k_ds_smem(&j.d[s], room / 2);
            const unsigned blocks = (unsigned)aff__rt_info(rt)->units * (two ? 2 : 1);
            j.smem = (unsigned)(two ? two : aff__k_ds_smem(&j.d[s], room));
            j.grid = blocks < j.grid ? blocks : j.grid;
        }
    }
    report(what, T, time_of(dense_launch, &j), (double)bytes * count, 2.0 * rows * cols * count * T);
    if (!j.few && hopper()) {
        z = device(results * 4);
        must(aff__rt_fill(rt, stream, z, 0xff, results * 4, &err));
        for (int s = 0; s < SETS; s++)
            for (int i = 0; i < count; i++) j.d[s].m[i].y = z + (uint64_t)i * (uint64_t)T * (uint64_t)rows;
        j.wg = true;
        report("  by warpgroups", T, time_of(dense_launch, &j), (double)bytes * count, 2.0 * rows * cols * count * T);
        printf("  differ: %llu of %llu\n", (unsigned long long)differing(y, z, results < 20000000 ? results : 20000000), (unsigned long long)results);
    }
    while (n) aff__rt_free(rt, kept[--n]);
    aff__rt_free(rt, x);
    aff__rt_free(rt, y);
    aff__rt_free(rt, z);
}

/* ---- routed experts ---- */

typedef struct expert_job {
    aff_k_experts a[SETS];
    int which; /* 0: up, 1: down, of the streaming kernels; 2, 3: of the plain ones; 4, 5: many; 6, 7: many by warpgroups */
    int items;
} expert_job;

static void expert_launch(void *ctx, int set)
{
    const expert_job *j = ctx;
    const aff_k_experts *a = &j->a[set];
    const bool amd = aff__rt_info(rt)->fragment_columns == 16;
    const unsigned units = (unsigned)aff__rt_info(rt)->units, items = (unsigned)j->items;
    if (j->which == 0) launch(AFF_K_experts_stream_up, units, 512, (unsigned)aff__k_stream_smem(a->copies, HIDDEN), a);
    if (j->which == 1) launch(AFF_K_experts_stream_down, units, 512, (unsigned)aff__k_stream_smem(a->copies, INTER), a);
    if (j->which == 2) launch(AFF_K_experts_up, items * INTER / 128, 128, (unsigned)aff__k_experts_smem(a->dtype, HIDDEN) + 4096, a);
    if (j->which == 3) launch(AFF_K_experts_down, items * HIDDEN / 128, 128, (unsigned)aff__k_experts_smem(a->dtype, INTER), a);
    if (j->which == 4) launch(AFF_K_experts_many_up, items * INTER / 64, 256, (unsigned)aff__k_experts_many_smem(amd), a);
    if (j->which >= 6) launch(j->which == 6 ? AFF_K_experts_wg_up : AFF_K_experts_wg_down, units, 384, AFF_K_XW_SMEM, a);
    if (j->which == 5) launch(AFF_K_experts_many_down, items * HIDDEN / 64, 256, (unsigned)aff__k_experts_many_smem(amd), a);
}

/* T rows that choose 6 of `experts` experts. */
static void experts(int T, int n)
{
    static expert_job j;
    const uint64_t weights = (uint64_t)HIDDEN * INTER, codes = weights / 64 * 20, fields = weights / 64 * 3;
    const bool few = T <= AFF_K_FEW, amd = aff__rt_info(rt)->fragment_columns == 16;
    const int batch = few ? AFF_K_ITEM_FEW : aff__k_item_many(amd), K = PICKS, E = n;
    int16_t table[8192];
    for (int i = 0; i < 8192; i++) table[i] = (int16_t)((i * 2654435761u >> 22) % 961 & ~63u) * (i & 1 ? -1 : 1);
    int16_t *dt = device(sizeof table);
    put(dt, table, sizeof table);
    int32_t *picks = malloc(sizeof(int32_t) * (size_t)(T * K));
    float *w = malloc(sizeof(float) * (size_t)(T * K));
    for (int i = 0; i < T * K; i++) picks[i] = (i % K * (E / K) + i / K * 7 % (E / K)) % E, w[i] = 0.1f;
    int32_t *dp = device((uint64_t)(T * K) * 4);
    float *dw = device((uint64_t)(T * K) * 4);
    put(dp, picks, (uint64_t)(T * K) * 4);
    put(dw, w, (uint64_t)(T * K) * 4);
    int used = 0;
    for (int e = 0; e < E; e++)
        for (int i = 0; i < T * K; i++)
            if (picks[i] == e) {
                used++;
                break;
            }
    const int max = aff__k_max_items(T, K, E, batch);
    int8_t *xq = noise((uint64_t)T * HIDDEN, 0xff), *hq = noise((uint64_t)(T * K) * INTER, 0xff);
    float *xs = (float *)noise((uint64_t)T * 32 * 4, 0x3f), *hs = (float *)noise((uint64_t)(T * K) * 16 * 4, 0x3f), *h = device((uint64_t)(T * K) * INTER * 4), *y = device((uint64_t)(T * K) * HIDDEN * 4);
    must(aff__rt_fill(rt, stream, h, 0x3c, (uint64_t)(T * K) * INTER * 4, &err));
    const uint64_t scales = 2 * (HIDDEN + 2 * INTER), slot = (codes + fields) * 3 + scales;
    uint64_t *word = malloc(sizeof *word * (size_t)E);
    const int sets = few ? SETS : 1;
    char *slab = noise(slot * (uint64_t)E * (uint64_t)sets, 0xff);
    void *rows = bytes_of(scales, 0x3f, 0);
    for (int i = 0; i < E * sets; i++) must(aff__rt_copy(rt, stream, slab + slot * (uint64_t)(i + 1) - scales, rows, scales, &err));
    must(aff__rt_sync(rt, stream, &err));
    for (int s = 0; s < SETS; s++) {
        aff_k_moe m = {device(4 * AFF_K_PLAN_COUNTS), device(sizeof(aff_k_item) * (uint64_t)max), device((uint64_t)(T * K) * 4), device((uint64_t)(T * K) * 4),
                       device((uint64_t)(T * K) * 4)};
        for (int e = 0; e < E; e++) word[e] = (uint64_t)(uintptr_t)(slab + slot * (uint64_t)(s % sets * E + e)) | AFF_BASE_CARD;
        uint64_t *base = device(sizeof *word * (uint64_t)E);
        put(base, word, sizeof *word * (uint64_t)E);
        const aff_k_plan pl = {.picks = dp, .weights = dw, .base = base, .plan = m, .T = T, .K = K, .experts = E, .batch = batch};
        launch(AFF_K_plan, 1, (unsigned)((E < 1024 ? E : 1024) + 31) & ~31u, (unsigned)aff__k_plan_smem(E), &pl);
        j.a[s] = (aff_k_experts){.plan = m, .table = dt, .xq = xq, .xs = xs, .h = h, .hq = hq, .hs = hs, .y = y, .dtype = AFF_Q2P875G, .hidden = HIDDEN, .inter = INTER, .K = K, .copies = 8, .items = max, .limit = 10};
        for (uint32_t k = 0; k < 3; k++) {
            const uint32_t at = (uint32_t)(codes + fields) * k;
            j.a[s].off[k][0] = at, j.a[s].off[k][1] = at + (uint32_t)codes, j.a[s].off[k][2] = (uint32_t)(codes + fields) * 3 + 2 * INTER * k;
        }
    }
    while (j.a[0].copies && aff__k_stream_smem(j.a[0].copies, HIDDEN) > (size_t)aff__rt_info(rt)->shared_bytes)
        for (int s = 0; s < SETS; s++) j.a[s].copies /= 2;
    j.items = max;
    const double bytes = (double)(codes + fields) * used, flop = 2.0 * (double)weights * T * K;
    float *const kept = few ? NULL : device((uint64_t)(T * K) * HIDDEN * 4);
    for (j.which = few ? j.a[0].copies ? 0 : 2 : 4; j.which < (few ? 4 : hopper() ? 8 : 6); j.which++) {
        static const char *const name[] = {"experts up, streamed", "experts down, streamed", "experts up", "experts down", "experts up, many", "experts down, many", "  up, by warpgroups", "  down, by warpgroups"};
        const bool down = j.which & 1;
        const uint64_t results = (uint64_t)(T * K) * (down ? HIDDEN : INTER);
        if (j.which >= 6) {
            j.which -= 2;
            expert_launch(&j, 0);
            j.which += 2;
            must(aff__rt_copy(rt, stream, kept, down ? y : h, results * 4, &err));
            must(aff__rt_fill(rt, stream, down ? y : h, 0xff, results * 4, &err));
        }
        report(name[j.which], T, time_of(expert_launch, &j), bytes * (down ? 1 : 2), flop * (down ? 1 : 2));
        if (j.which >= 6) printf("  differ: %llu of %llu\n", (unsigned long long)differing(kept, down ? y : h, results), (unsigned long long)results);
    }
    aff__rt_free(rt, slab);
    free(word);
}

int main(int argc, char **argv)
{
    aff_device_spec spec;
    const bool only = argc == 3 && !strcmp(argv[2], "many");
    if ((argc > 2 && !only) || (argc == 2 && argv[1][0] == '-')) {
        printf("usage: bench_gpu [cuda:0 | hip:0 | emu [many]]\n");
        return argc == 2 && !strcmp(argv[1], "--help") ? 0 : 2;
    }
    must(aff__device_parse(&spec, argc > 1 ? argv[1] : "cuda:0", &err));
    must(aff__rt_open(&rt, &spec, &err));
    must(aff__rt_stream_create(rt, &stream, &err));
    printf("%s, %s, %d units\n", aff__rt_info(rt)->name, aff__rt_info(rt)->arch, aff__rt_info(rt)->units);
    copy_job c = {device(1ull << 30), device(1ull << 30), 1ull << 30};
    must(aff__rt_fill(rt, stream, c.from, 0x35, c.bytes, &err));
    copy_rate = 1;
    for (int i = 0; i < 3; i++) copy_rate = 2.0 * (double)c.bytes / time_of(copy_launch, &c) * 1e6;
    printf("copy of 1 GiB: %.2f TB/s read and written\n", copy_rate / 1e12);
    aff__rt_free(rt, c.from);
    aff__rt_free(rt, c.to);
    static const int few[] = {1, 2, 6, 16}, many[] = {100, 256, 2048};
    for (size_t i = 0; !only && i < sizeof few / sizeof *few; i++) experts(few[i], 48);
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) experts(many[i], 256);
    for (size_t i = only ? 4 : 0; i < 7; i++) {
        const int T = i < 4 ? few[i] : many[i - 4];
        dense("wq_a, wkv (1536 x 4096)", 1, 1536, HIDDEN, 1, AFF_FP8, T);
        dense("wq_b (32768 x 1024)", 1, 32768, 1024, 1, AFF_FP8, T);
        dense("wo_a (8 x 1024 x 4096)", 1, 8192, HIDDEN, 8, AFF_FP8, T);
        dense("wo_b (4096 x 8192)", 1, HIDDEN, 8192, 1, AFF_FP8, T);
        dense("shared gate, up", 2, INTER, HIDDEN, 1, AFF_FP8, T);
        dense("shared down", 1, HIDDEN, INTER, 1, AFF_FP8, T);
        dense("compressor (2 x 1024 x 4096)", 2, 1024, HIDDEN, 1, AFF_BF16, T);
        if (T <= 16) dense("head (129280 x 4096)", 1, 129280, HIDDEN, 1, AFF_BF16, T);
    }
    aff__rt_stream_free(rt, stream);
    aff__rt_close(rt);
    return 0;
}
