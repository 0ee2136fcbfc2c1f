/* Routed experts of one layer at a time with some of them in host memory: the rate at which kernels read them over the link, and what that costs those on
 * the card; then the copy engine's rate. Weights are noise.
 *
 *     bench_experts [--pool-gib N] [--layers N] DEVICE        V4-Flash's experts: 4096 x 2048, 256 a layer, 6 picks */
#include "backend/gpu/gpu_internal.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 4096, I = 2048, K = 6, E = 256, CARD = 64, REPS = 40 };
static aff_error err;
static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "bench_experts: %s\n", err.msg);
    exit(1);
}

static aff_backend *b;
static aff_card card;
static aff_expert_table table;
static aff_slots *pool;
static int16_t (*book)[1024][4];
static float *x, *y, *weights;
static int32_t *picks;
static int layers;

static void *there(const void *from, uint64_t bytes)
{
    void *p;
    must(b->mem->alloc(b->mem, &p, bytes, "bench", &err));
    if (from) must(b->mem->write(b->mem, p, from, bytes, &err));
    return p;
}

/* T rows: every row's picks; `away` of the distinct experts are in the pool. Milliseconds a layer. */
static double layer_time(int T, int distinct, int away, uint64_t *seed)
{
    int64_t pos[16] = {0};
    int first[16] = {0};
    aff_layer_state *none[16] = {0};
    const aff_layer_state *nt[16] = {0};
    const aff_rowset rs = {.n = T, .pos = pos, .first = first, .state = none, .table = nt};
    const aff_expert_shape shape = {AFF_Q2P875G, H, I, 10.0f, (const int16_t(*)[1024][4])(const void *)book};
    static int32_t p[REPS][16 * K];
    for (int r = 0; r < REPS; r++)
        for (int t = 0; t < T; t++)
            for (int k = 0; k < K; k++) { /* experts 0 .. CARD-1 are on the card; those in the pool never come twice in a round */
                const int i = (t * K + k) % distinct, far = i < away;
                p[r][t * K + k] = far ? CARD + (int)(((uint64_t)r * 16 + (uint64_t)i) % (E - CARD)) : (i + r * 7) % CARD;
            }
    must(b->mem->write(b->mem, picks, p, sizeof p, &err));
    double best = 1e9;
    for (int round = 0; round < 3; round++) {
        must(b->begin(b, &rs, &err));
        must(aff__rt_sync(aff__gpu_of(b)->rt, aff__gpu_of(b)->s, &err));
        const uint64_t from = aff__now_ns();
        for (int r = 0; r < REPS; r++)
            b->routed(b, &shape, &table, (int)((aff__splitmix64(seed) >> 8) % (uint64_t)layers), picks + (int64_t)r * 16 * K, weights, x, T, K, y);
        must(b->finish(b, &err));
        const double ms = (double)(aff__now_ns() - from) * 1e-6 / REPS;
        best = ms < best ? ms : best;
    }
    return best;
}

static void copies(void)
{
    const aff_slot_layout l = aff__slot_layout(AFF_Q2P875G, H, I);
    aff_tier_copy c[CARD];
    for (int up = 1; up >= 0; up--)
        for (int n = 1; n <= CARD; n *= 8) {
            double best = 1e9;
            for (int i = 0; i < n; i++) c[i] = (aff_tier_copy){up, i, aff__slots_at(pool, i * 3)};
            for (int r = 0; r < 5; r++) {
                const uint64_t from = aff__now_ns();
                must(card.copy(card.ctx, c, n, &err));
                const double s = (double)(aff__now_ns() - from) * 1e-9;
                best = s < best ? s : best;
            }
            printf("copy engine, %s, %d at a time: %.1f GB/s\n", up ? "up" : "down", n, (double)n * (double)l.bytes / best * 1e-9);
        }
}

int main(int argc, char **argv)
{
    const char *name = "cuda:0";
    int64_t gib = 4;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--pool-gib") && i + 1 < argc)
            gib = atoll(argv[++i]);
        else
            name = argv[i];
    }
    aff_device_spec spec;
    const aff_slot_layout l = aff__slot_layout(AFF_Q2P875G, H, I);
    uint64_t seed = 1;
    must(aff__device_parse(&spec, name, &err));
    must(aff__gpu_backend(&b, &spec, AFF_FAST, &err));
    aff_gpu *g = aff__gpu_of(b);
    const int64_t slots = (gib << 30) / (int64_t)l.pitch;
    layers = (int)(slots / (E - CARD));
    if (layers < 1) layers = 1;
    uint64_t t0 = aff__now_ns();
    must(aff__slots_create(&pool, l.pitch, slots > E ? slots : E, true, &err));
    printf("pool of %.1f GiB: populated in %.1f s", (double)aff__slots_bytes(pool) / (1 << 30), (double)(aff__now_ns() - t0) * 1e-9);
    aff_slab_options o = {.pitch = l.pitch, .bytes = l.bytes, .layers = layers, .experts = E, .picks = K, .spare = 0, .most = (CARD + 1) * l.pitch, .keep = UINT64_MAX};
    for (int i = 0; i < 9; i++) o.plane[i / 3][i % 3] = (uint32_t)l.plane[i / 3][i % 3];
    must(b->slab(b, &o, &card, &table, &err));
    t0 = aff__now_ns();
    must(card.attach(card.ctx, aff__slots_base(pool), aff__slots_bytes(pool), l.pitch, &err));
    printf(", pinned in %.1f s (%s), %.1f GiB of it in huge pages\n", (double)(aff__now_ns() - t0) * 1e-9, g->slab->pinned ? "yes" : "REFUSED", (double)aff__slots_huge(pool) / (1 << 30));
    for (int64_t i = 0; i < aff__slots_count(pool); i++) { /* codes of any kind will do, scales near 1 */
        uint8_t *s = aff__slots_at(pool, i);
        if (i >= 2) {
            memcpy(s, aff__slots_at(pool, i & 1), 65536);
            continue;
        }
        for (uint64_t k = 0; k < l.bytes; k += 8) {
            const uint64_t v = aff__splitmix64(&seed);
            memcpy(s + k, &v, 8);
        }
    }
    aff_tier_change *c = calloc((size_t)(layers * E), sizeof *c);
    for (int i = 0; i < layers * E; i++) {
        const int e = i % E;
        c[i] = (aff_tier_change){i / E, e, {.tier = e < CARD ? AFF_TIER_CARD : AFF_TIER_HOST, .slab = e, .host = e < CARD ? NULL : aff__slots_at(pool, (i / E) * (E - CARD) + e - CARD)}};
    }
    for (int i = 0; i < CARD; i++) must(card.copy(card.ctx, &(aff_tier_copy){true, i, aff__slots_at(pool, i & 1)}, 1, &err));
    must(card.publish(card.ctx, c, layers * E, &err));
    must(b->slab_host(b, &(aff_slab_host){.ctx = NULL}, &err));
    float *ones = calloc(16 * H, sizeof *ones);
    for (int i = 0; i < 16 * H; i++) ones[i] = (float)((int64_t)(aff__splitmix64(&seed) % 2001) - 1000) * 1e-3f;
    int16_t *bk = calloc(2 * 1024 * 4, sizeof *bk);
    for (int i = 0; i < 2 * 1024 * 4; i++) bk[i] = (int16_t)((int)(aff__splitmix64(&seed) % 1921) - 960);
    book = there(bk, 2 * 1024 * 4 * sizeof *bk);
    x = there(ones, 16 * H * 4), weights = there(ones, 16 * K * 4), y = there(NULL, 16ull * K * H * 4), picks = there(NULL, REPS * 16 * K * 4);
    const double mb = (double)l.bytes * 1e-6;
    const int default_link = g->link_blocks;
    for (int links = 8; links <= 64; links *= 2) {
        g->link_blocks = links;
        const double t = layer_time(1, 6, 6, &seed);
        printf("1 row, 6 of 6 over the link, %d blocks: %.3f ms, %.1f GB/s\n", links, t, 6 * mb / t);
    }
    g->link_blocks = default_link;
    for (int away = 0; away <= 6; away++) {
        const double t = layer_time(1, 6, away, &seed);
        printf("1 row, %d of 6 over the link: %.3f ms a layer, link %.1f GB/s, all %.1f GB/s\n", away, t, away * mb / t, 6 * mb / t);
    }
    for (int away = 0; away <= 6; away += 2) {
        const double t = layer_time(6, 19, away, &seed);
        printf("6 rows, 19 experts, %d over the link: %.3f ms a layer, link %.1f GB/s, all %.1f GB/s\n", away, t, away * mb / t, 19 * mb / t);
    }
    copies();
    must(b->slab_host(b, NULL, &err));
    card.detach(card.ctx, aff__slots_base(pool), aff__slots_bytes(pool));
    b->free(b);
    aff__slots_free(pool);
    return 0;
}
