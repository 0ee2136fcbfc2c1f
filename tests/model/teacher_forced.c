/* A device along the CPU's own text (scripts/checks/teacher): the CPU continues 200 prompts of the demonstration model
 * greedily; the device is fed prompt and continuation, and its choice at every position of the continuation is compared
 * with the CPU's.
 *
 *   teacher_forced DEVICE [PROMPTS [TOKENS]]
 *
 * Where the choices differ, the CPU's two best logits must lie within TOLERANCE of the row's largest magnitude, and
 * such positions may be at most SHARE of all (spec model-v4 16.2, 19). TOLERANCE is what logits of one position in a hundred
 * differ by: the activations' quantisers turn small differences into whole codes. Exit code 0: both hold. */
#include "engine/prompts.h"
#include "model/runner.h"
#include <math.h>

static const double TOLERANCE = 0.1, SHARE = 0.02;
enum { LONGEST = 1500 };

static aff_net *net;
static aff_runner *cpu, *dev;
static aff_seq *a, *b;
static int vocab;

static void read_prompts(int most)
{
    aff_tokenizer *t;
    must(aff__tokenizer_open_for(&t, MODEL, aff__net_config(net), &err));
    add_lines(t, EVAL "draft.jsonl", NULL, CHAT, 0, 1, most - n_prompts);
    add_lines(t, EVAL "facts.jsonl", NULL, OTHER, 0, 1, most - n_prompts);
    add_lines(t, EVAL "facts-chat.jsonl", NULL, CHAT, 0, 1, most - n_prompts);
    add_lines(t, EVAL "tools.jsonl", NULL, CHAT, 0, 5, (most - n_prompts) / 3);
    add_beginnings(t, EVAL "heldout.txt", 1, 5, most - n_prompts);
    aff__tokenizer_free(t);
}

static int best(const float *x, double *gap, double *large)
{
    int top = 0, second = -1;
    *large = fabs((double)x[0]);
    for (int i = 1; i < vocab; i++) {
        *large = fmax(*large, fabs((double)x[i]));
        if (x[i] > x[top])
            second = top, top = i;
        else if (second < 0 || x[i] > x[second])
            second = i;
    }
    *gap = (double)x[top] - (double)x[second];
    return top;
}

static int by_value(const void *p, const void *q)
{
    const double x = *(const double *)p, y = *(const double *)q;
    return x < y ? -1 : x > y;
}

/* Continues prompt p on the CPU: all ids in `ids`, the logits behind its last token and every new one in `rows`. */
static int continued(const prompt *p, int tokens, int32_t *ids, float *rows)
{
    double gap, large;
    int n = p->n;
    memcpy(ids, p->ids, (size_t)n * sizeof *ids);
    aff__seq_reset(a);
    for (int i = 0, at = 0; i < tokens; i++) {
        float *row = rows + (int64_t)i * vocab;
        must(aff__forward(cpu, &(aff_batch){.n = n - at, .id = ids + at, .seq = a, .want_from = n - at - 1, .logits = row}, &err));
        at = n;
        ids[n++] = best(row, &gap, &large);
        if (ids[n - 1] == aff__net_config(net)->eos) break;
    }
    return n;
}

int main(int argc, char **argv)
{
    aff_device_spec spec;
    if (argc < 2) {
        fprintf(stderr, "usage: teacher_forced DEVICE [PROMPTS [TOKENS]]\n");
        return 2;
    }
    const int most = argc > 2 ? atoi(argv[2]) : 200, tokens = argc > 3 ? atoi(argv[3]) : 48;
    must(aff__device_parse(&spec, argv[1], &err));
    must(aff__net_open(&net, MODEL, &(aff_net_options){.numerics = AFF_FAST}, &err));
    vocab = aff__net_config(net)->vocab;
    read_prompts(most);
    must(aff__runner_create(&cpu, net, 0, &err));
    must(aff__runner_on(&dev, net, &spec, 0, &err));
    must(aff__seq_create(&a, net, LONGEST + tokens, &err));
    must(aff__seq_open(&b, net, &(aff_seq_options){.size = LONGEST + tokens, .memory = aff__runner_memory(dev)}, &err));
    int32_t *ids = malloc((size_t)(LONGEST + tokens) * sizeof *ids);
    float *want = malloc((size_t)tokens * (size_t)vocab * 4), *got = malloc((size_t)tokens * (size_t)vocab * 4);
    double *error = malloc((size_t)n_prompts * (size_t)tokens * sizeof *error);
    int64_t positions = 0, differ = 0, beyond = 0;
    int used = 0;
    for (int i = 0; i < n_prompts; i++) {
        const prompt *p = &prompts[i];
        if (p->n > LONGEST) continue;
        const int n = continued(p, tokens, ids, want) - 1; /* the last new token is nobody's input */
        aff__seq_reset(b);
        must(aff__forward(dev, &(aff_batch){.n = n, .id = ids, .seq = b, .want_from = p->n - 1, .logits = got}, &err));
        used++;
        for (int t = 0; t <= n - p->n; t++) {
            const float *w = want + (int64_t)t * vocab, *g = got + (int64_t)t * vocab;
            double gap, large, e = 0, x, y;
            const int cpu_id = best(w, &gap, &large), dev_id = best(g, &x, &y);
            for (int v = 0; v < vocab; v++) e = fmax(e, isfinite(g[v]) ? fabs((double)g[v] - (double)w[v]) : INFINITY);
            error[positions++] = e / large;
            if (cpu_id == dev_id) continue;
            differ++;
            beyond += gap > TOLERANCE * large;
            printf("prompt %d, position %d: device %d, CPU %d, gap %.3g = %.2g of the largest logit%s\n", i, p->n + t, dev_id, cpu_id, gap, gap / large,
                   gap > TOLERANCE * large ? ": BEYOND THE TOLERANCE" : "");
        }
    }
    qsort(error, (size_t)positions, sizeof *error, by_value);
    printf("%s against the CPU's fast along its text: %d prompts, %lld positions, argmax differs at %lld (%.2f %%, allowed %.0f %%), %lld of them beyond "
           "the tolerance of %.2g; logits differ by %.2g (median), %.2g (99th percentile) of the row's largest\n",
           argv[1], used, (long long)positions, (long long)differ, 100.0 * (double)differ / (double)positions, 100 * SHARE, (long long)beyond, TOLERANCE,
           error[positions / 2], error[positions * 99 / 100]);
    free(error);
    free(got);
    free(want);
    free(ids);
    free_prompts();
    aff__seq_free(b);
    aff__seq_free(a);
    aff__runner_free(dev);
    aff__runner_free(cpu);
    aff__net_close(net);
    return beyond || (double)differ > SHARE * (double)positions;
}
