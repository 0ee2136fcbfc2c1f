/* A context that grows while it is used gives what one does that had all its memory from the start (scripts/checks/growth).
 *
 *   growth FOLDER DEVICE [FROM TO MARGIN]
 *
 * The model of real row widths (written into FOLDER) reads TO random tokens twice: over a sequence backed for all of them,
 * and over one backed for FROM that grows by MARGIN with the growing thread. Passes of 256 rows, and single rows around every
 * boundary; the logits of every pass's last row are compared by bits. */
#include "backend/device.h"
#include "base/mem.h"
#include "base/rng.h"
#include "model/runner.h"
#include "state/grow.h"
#include "support/parity_model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 512, CHUNK = 256, AROUND = 4 };
static aff_error err;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "growth: %s\n", err.msg);
    exit(1);
}

static int32_t id_at(int64_t p)
{
    uint64_t seed = (uint64_t)p;
    return (int32_t)(aff__splitmix64(&seed) % VOCAB);
}

static void run(aff_runner *r, aff_seq *s, int n, float *last)
{
    int32_t id[CHUNK];
    for (int i = 0; i < n; i++) id[i] = id_at(aff__seq_pos(s) + i);
    must(aff__forward(r, &(aff_batch){.n = n, .id = id, .seq = s, .want_from = n - 1, .logits = last}, &err));
}

int main(int argc, char **argv)
{
    aff_device_spec spec;
    aff_net *net;
    aff_runner *r;
    aff_grower *g;
    aff_seq *whole, *grown;
    static float a[VOCAB], b[VOCAB];
    const int64_t from = argc > 3 ? atoll(argv[3]) : 65536, to = argc > 4 ? atoll(argv[4]) : 262144, margin = argc > 5 ? atoll(argv[5]) : 16384;
    if (argc < 3 || aff_test_write_parity_model("long", argv[1]) != 0) {
        fprintf(stderr, "usage: growth FOLDER DEVICE [FROM TO MARGIN]\n");
        return 2;
    }
    must(aff__device_parse(&spec, argv[2], &err));
    must(aff__net_open(&net, argv[1], &(aff_net_options){.numerics = AFF_FAST}, &err));
    must(spec.choice == AFF_DEVICE_RT ? aff__runner_on(&r, net, &spec, 0, &err) : aff__runner_create(&r, net, 0, &err));
    must(aff__grower_create(&g, &err));
    const aff_memory *mem = aff__runner_memory(r);
    must(aff__seq_open(&whole, net, &(aff_seq_options){.size = to, .commit = to, .memory = mem}, &err));
    must(aff__seq_open(&grown, net, &(aff_seq_options){.size = to, .commit = from, .margin = margin, .memory = mem, .grower = g}, &err));
    int64_t passes = 0, differ = 0, steps = 0, backed = aff__seq_backed(grown);
    while (aff__seq_pos(grown) < to) {
        const int64_t at = aff__seq_pos(grown), next = (at / margin + 1) * margin; /* the next boundary of a commit */
        int64_t n = next - at > CHUNK + AROUND ? CHUNK : next - at > AROUND ? next - at - AROUND : 1;
        if (at % margin < AROUND) n = 1;
        if (n > to - at) n = to - at;
        run(r, whole, (int)n, a);
        run(r, grown, (int)n, b);
        passes++;
        if (memcmp(a, b, sizeof a)) {
            if (!differ++) printf("first difference in the pass from position %lld\n", (long long)at);
        }
        if (aff__seq_backed(grown) != backed) steps++, backed = aff__seq_backed(grown);
    }
    printf("%s: %lld positions, backed from %lld in %lld steps of %lld, %lld passes: %lld differ\n", argv[2], (long long)to, (long long)from,
           (long long)steps, (long long)margin, (long long)passes, (long long)differ);
    aff__seq_free(grown);
    aff__seq_free(whole);
    aff__grower_free(g);
    aff__runner_free(r);
    aff__net_close(net);
    return differ || !steps;
}
