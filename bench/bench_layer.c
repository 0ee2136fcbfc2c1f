/* bench_layer [threads] [layers] [experts] - whole tokens and whole prompts on full-width layers of V4-Flash (synthetic
 * weights, the first `layers` of them [4: two of plain window attention, one of ratio 4, one of 128], `experts` routed
 * experts a layer [32]), beside the machine's limits measured in turn with them (ceiling.h).
 *
 *   a token    bytes that it must read (dense weights, the routed experts it uses, state) a second, against the
 * memory's read rate a prompt   multiplications by weights a second over passes of 256 rows, against the peak of bf16
 * dot products The embedding is left out of both; the head, which one row of a prompt needs, is in the first only. */
#include "ceiling.h"
#include "base/rng.h"
#include "engine/bench.h"
#include "experts/store.h"
#include "model/forward.h"
#include "model/synthetic.h"
#include "state/seq.h"

enum { CONTEXT = 512, TOKENS = 40, PASSES = 6, READ = 64 << 20 };
static aff_error err;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "bench_layer: %s\n", err.msg);
    exit(1);
}

/* Weights that every row of a prompt multiplies with. */
static double weights_of_row(const aff_net *net)
{
    const aff_config *c = aff__net_config(net);
    const double H = c->hidden, D = c->head_dim, NHD = (double)c->heads * D, low = (double)c->o_groups * c->o_rank;
    double n = 0;
    for (int l = 0; l < aff__net_layers(net); l++) {
        n += H * c->q_rank + c->q_rank * NHD + H * D + NHD * c->o_rank + low * H; /* attention */
        n += 3.0 * H * c->inter * (c->picks + 1) + H * c->experts;                /* experts, the shared one, router */
        n += 2.0 * (2 + c->hc) * c->hc * c->hc * H;                               /* hyper-connections */
        if (c->ratio[l]) n += 2 * H * (c->ratio[l] == 4 ? 2 : 1) * D;             /* compressor */
        if (c->ratio[l] == 4)
            n += c->q_rank * (double)c->index_heads * c->index_dim + 4 * H * c->index_dim + H * c->index_heads;
    }
    return n;
}

static void run(aff_runner *r, aff_seq *s, int n, uint64_t *seed, float *logits)
{
    int32_t id[AFF_MAX_CHUNK];
    for (int i = 0; i < n; i++) id[i] = (int32_t)(aff__splitmix64(seed) % 100000);
    const aff_batch b = {.n = n, .id = id, .seq = s, .want_from = logits ? n - 1 : n, .logits = logits};
    must(aff__forward(r, &b, &err));
}

/* The shortest time of `count` passes of n rows, each followed by a measurement of the memory. */
static double best_pass(ceiling *c, aff_runner *r, aff_seq *s, int n, int count, uint64_t *seed, float *logits)
{
    uint64_t least = UINT64_MAX;
    ceiling_forget(c);
    for (int i = 0; i < count; i++) {
        uint64_t t = ceiling_ns(c);
        run(r, s, n, seed, logits);
        t = ceiling_ns(c) - t;
        least = t < least ? t : least;
        ceiling_read(c, READ);
    }
    return (double)least * 1e-9;
}

int main(int argc, char **argv)
{
    const int threads = argc > 1 ? atoi(argv[1]) : 1;
    const aff_synthetic made = {
        .geometry = "flash", .layers = argc > 2 ? atoi(argv[2]) : 4, .experts = argc > 3 ? atoi(argv[3]) : 32};
    aff_net *net;
    aff_runner *r;
    aff_seq *s;
    ceiling c;
    uint64_t seed = 1, expert;
    ceiling_open(&c, threads);
    must(aff__net_open(&net, NULL, &(aff_net_options){.numerics = AFF_FAST, .synthetic = &made}, &err));
    const aff_config *cf = aff__net_config(net);
    must(aff__synthetic_expert_bytes(cf, &expert, &err));
    must(aff__runner_create(&r, net, threads, &err));
    must(aff__seq_create(&s, net, CONTEXT + PASSES * AFF_MAX_CHUNK + TOKENS, &err));
    float *logits = malloc((size_t)cf->vocab * sizeof *logits);
    if (!logits) return 1;
    for (int i = 0; i < CONTEXT; i += AFF_MAX_CHUNK) run(r, s, AFF_MAX_CHUNK, &seed, NULL);
    const int layers = aff__net_layers(net);
    printf("V4-Flash, %d layers, %d experts a layer, context %d\n", layers, cf->experts, CONTEXT);

    const double dense = (double)aff__bench_dense(net, false), routed = (double)expert * cf->picks * layers,
                 state = (double)aff__bench_state(net, CONTEXT, &err), bytes = dense + routed + state;
    double sec = best_pass(&c, r, s, 1, TOKENS, &seed, logits);
    printf("a token   %8.2f ms: %7.1f MB (dense %.1f, experts %.1f, state %.1f) at %6.2f GB/s, %5.1f %% of memory's "
           "%.1f\n",
           sec * 1e3, bytes * 1e-6, dense * 1e-6, routed * 1e-6, state * 1e-6, bytes / sec * 1e-9,
           100 * bytes / sec / c.dram, c.dram * 1e-9);

    const double work = weights_of_row(net) * AFF_MAX_CHUNK;
    sec = best_pass(&c, r, s, AFF_MAX_CHUNK, PASSES, &seed, NULL);
    printf("a prompt  %8.2f ms a pass of %d rows: %6.1f GFLOP/s", sec * 1e3, AFF_MAX_CHUNK, 2e-9 * work / sec);
    if (c.bf16 > 0) printf(", %5.1f %% of the bf16 peak of %.0f", 100 * work / sec / c.bf16, 2e-9 * c.bf16);
    printf(" (%.1f rows an expert)\n", (double)AFF_MAX_CHUNK * cf->picks / cf->experts);
    free(logits);
    aff__seq_free(s);
    aff__runner_free(r);
    aff__net_close(net);
    ceiling_close(&c);
    return 0;
}
