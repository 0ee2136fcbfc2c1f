/* How fast the disk gives experts while a layer computes, against the same requests alone (scripts/checks/disk).
 *
 *     disk_rate FOLDER [GIB [STEPS [THREADS]]]
 *
 * Experts of V4-Flash's width (9,060,352 bytes) are written to a file in FOLDER. Made-up uniform routes use PICKS of a
 * layer at a time; a filled pool that does not move has 80 % of them, so a fifth of the picks is on disk. Each step
 * plans, computes what is in memory while the reads run, and the rest as it arrives. Then the loader alone reads what
 * each step read, step by step. Rates are bytes over the time in which a read was under way, direct reads throughout;
 * both are done seven times in turn, and the median of the ratios counts. */
#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "experts/plan.h"
#include "model/synthetic.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXPERTS = 64, PICKS = 6, ROUNDS = 7 };
static aff_error err;
static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "disk_rate: %s\n", err.msg);
    exit(1);
}

typedef struct bench {
    aff_experts *store;
    aff_tiers *t;
    aff_backend *b;
    aff_expert_shape shape;
    int layers, steps;
    float *x, *y;
    int32_t (*read)[PICKS + 1]; /* [steps] experts that the step read: their number, then they */
} bench;

/* The picks of a step: distinct, by the step's number alone. */
static void picks_of(int step, int32_t picks[PICKS])
{
    uint64_t seed = (uint64_t)step * 7919 + 1;
    for (int k = 0; k < PICKS; k++) {
        bool again;
        do {
            picks[k] = (int32_t)(aff__splitmix64(&seed) % EXPERTS);
            again = false;
            for (int i = 0; i < k; i++) again |= picks[i] == picks[k];
        } while (again);
    }
}

static aff_status work(void *ctx, const aff_moe_plan *part, aff_error *e)
{
    bench *b = ctx;
    return b->b->experts(b->b, &b->shape, part, b->x, 1, PICKS, b->y, e);
}

typedef struct rate {
    uint64_t bytes, busy, wall, waited;
    int64_t used, missed;
} rate;
static double gbs(const rate *r)
{
    return r->busy ? (double)r->bytes / (double)r->busy : 0;
}

static rate with_work(bench *b)
{
    aff_plan *p;
    const aff_moe_plan *m;
    static const float weights[PICKS] = {0.2f, 0.2f, 0.2f, 0.2f, 0.1f, 0.1f};
    int32_t picks[PICKS];
    must(aff__plan_create(&p, 1, PICKS, EXPERTS, &err));
    const aff_tier_counters from = aff__tiers_counters(b->t);
    const uint64_t start = aff__now_ns();
    for (int s = 0; s < b->steps; s++) {
        const int layer = s % b->layers;
        picks_of(s, picks);
        int32_t *log = b->read[s];
        log[0] = 0;
        for (int k = 0; k < PICKS; k++)
            if (!aff__tiers_at_hand(b->t, layer, picks[k])) log[++log[0]] = picks[k];
        must(aff__plan_build(p, layer, picks, weights, 1, PICKS, &m, &err));
        must(aff__plan_each(p, b->t, layer, work, b, &err));
        must(aff__tiers_note_picks(b->t, layer, AFF_USE_DECODE, picks, 1, PICKS, NULL, &err));
    }
    const aff_tier_counters to = aff__tiers_counters(b->t);
    aff__plan_free(p);
    return (rate){to.disk_bytes - from.disk_bytes, to.disk_busy_ns - from.disk_busy_ns,
                  aff__now_ns() - start,           to.wait_disk_ns - from.wait_disk_ns,
                  (int64_t)b->steps * PICKS,       to.picks[0][AFF_TIER_DISK] - from.picks[0][AFF_TIER_DISK]};
}

static rate alone(bench *b)
{
    aff_loader *l;
    aff_load load[PICKS];
    uint8_t *slots;
    rate r = {0};
    const uint64_t pitch = aff__experts_layout(b->store).pitch;
    if (posix_memalign((void **)&slots, 4096, (size_t)pitch * PICKS) != 0) exit(1);
    memset(slots, 0, (size_t)pitch * PICKS);
    must(aff__loader_create(&l, b->store, NULL, &(aff_loader_options){0}, &err));
    const uint64_t start = aff__now_ns();
    for (int s = 0; s < b->steps; s++) {
        const int n = b->read[s][0];
        for (int k = 0; k < n; k++) {
            load[k] =
                (aff_load){.layer = s % b->layers, .expert = b->read[s][1 + k], .to = slots + (uint64_t)k * pitch};
            aff__loader_submit(l, &load[k], AFF_LOAD_NOW);
        }
        for (int k = 0; k < n; k++) must(aff__loader_wait(l, &load[k], &err));
    }
    const aff_loader_counts c = aff__loader_counts_now(l);
    r = (rate){.bytes = c.bytes, .busy = c.busy_ns, .wall = aff__now_ns() - start};
    aff__loader_free(l);
    free(slots);
    return r;
}

static int by_rate(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: disk_rate FOLDER [GIB [STEPS [THREADS]]]\n");
        return 2;
    }
    const double gib = argc > 2 ? atof(argv[2]) : 2;
    const int threads = argc > 4 ? atoi(argv[4]) : 2;
    char path[4096], *json;
    aff_config c;
    bench b = {.steps = argc > 3 ? atoi(argv[3]) : 100};
    b.layers = (int)(gib * 0x1p30 / (EXPERTS * 9060352.0));
    if (b.layers < 1) b.layers = 1;
    const aff_synthetic y = {.geometry = "flash", .layers = b.layers, .experts = EXPERTS, .seed = 1};
    must(aff__synthetic_config(&y, &json, &err));
    must(aff__config_parse(&c, json, strlen(json), "synthetic", &err));
    free(json);
    snprintf(path, sizeof path, "%s/disk_rate.experts", argv[1]);
    must(aff__synthetic_experts_file(&b.store, 1, "layers.", b.layers, &c, path, &err));
    aff_tier_options o = {.picks = PICKS, .staging = PICKS, .fill = true};
    aff__placement_options_init(&o.placement);
    o.placement.strategy = AFF_PLACE_STATIC;
    o.slots = o.staging + (int64_t)b.layers * EXPERTS * 8 / 10;
    must(aff__tiers_create(&b.t, b.store, NULL, &o, &err));
    must(aff__cpu_backend(&b.b, AFF_FAST, threads, &err));
    b.shape = aff__experts_shape(b.store);
    b.shape.swiglu_limit = 10;
    must(aff__calloc(&b.read, (uint64_t)b.steps, sizeof *b.read, "log", &err));
    must(aff__calloc(&b.x, (uint64_t)c.hidden, sizeof *b.x, "x", &err));
    must(aff__calloc(&b.y, PICKS * (uint64_t)c.hidden, sizeof *b.y, "y", &err));
    for (int i = 0; i < c.hidden; i++) b.x[i] = (float)((i * 37) % 101 - 50) / 50;
    double ratio[ROUNDS];
    for (int k = 0; k < ROUNDS; k++) {
        const rate w = with_work(&b), a = alone(&b);
        ratio[k] = gbs(&w) / gbs(&a);
        printf("%d layers of %d experts, %d steps, %.1f %% of %" PRId64
               " picks on disk: with work %.3f GB/s (%.3f GB, reading %.0f %% of the time, nothing to compute %.0f "
               "%%), alone %.3f GB/s (%.3f GB): %.2f\n",
               b.layers, EXPERTS, b.steps, 100.0 * (double)w.missed / (double)w.used, w.used, gbs(&w),
               (double)w.bytes / 1e9, 100.0 * (double)w.busy / (double)w.wall,
               100.0 * (double)w.waited / (double)w.wall, gbs(&a), (double)a.bytes / 1e9, ratio[k]);
        fflush(stdout);
    }
    qsort(ratio, ROUNDS, sizeof *ratio, by_rate);
    printf("median %.2f of the rate alone (bar 0.80)\n", ratio[ROUNDS / 2]);
    b.b->free(b.b);
    aff__tiers_free(b.t);
    aff__experts_free(b.store);
    free(b.read);
    free(b.x);
    free(b.y);
    unlink(path);
    return ratio[ROUNDS / 2] < 0.8;
}
