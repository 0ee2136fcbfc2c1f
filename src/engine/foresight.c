#include "engine/foresight.h"
#include "base/mem.h"
#include "experts/predict.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { ATTENTION, END, END_BEFORE, WAYS, SIZES = 4, MOST = 64 };
static const char *const way_name[WAYS] = {"attention", "end", "end before"};

typedef struct foresight {
    aff_runner *runner;
    int layers, experts, picks, sizes[SIZES];
    int32_t *guess;      /* [WAYS][layers][AFF_MAX_CHUNK][MOST] */
    int *known;          /* [WAYS][layers] rows guessed of this pass */
    int64_t *found, *of; /* [WAYS][layers][SIZES], [WAYS][layers] */
} foresight;

static int32_t *guesses(const foresight *f, int way, int layer)
{
    return f->guess + ((int64_t)way * f->layers + layer) * AFF_MAX_CHUNK * MOST;
}

static void guess(foresight *f, int way, int layer, int rows)
{
    const float *value = aff__runner_foresee(f->runner, layer);
    if (!value) return;
    for (int t = 0; t < rows; t++)
        aff__predict_top(value + (int64_t)t * f->experts, f->experts, f->sizes[SIZES - 1],
                         guesses(f, way, layer) + t * MOST);
    f->known[way * f->layers + layer] = rows;
}

static void judge(foresight *f, int layer, const int32_t *picks, int rows)
{
    for (int way = 0; way < WAYS; way++) {
        const int at = way * f->layers + layer;
        if (f->known[at] != rows) continue;
        for (int t = 0; t < rows; t++)
            for (int i = 0; i < f->sizes[SIZES - 1]; i++)
                for (int k = 0; k < f->picks; k++)
                    for (int z = 0; guesses(f, way, layer)[t * MOST + i] == picks[t * f->picks + k] && z < SIZES; z++)
                        f->found[at * SIZES + z] += i < f->sizes[z];
        f->of[at] += (int64_t)rows * f->picks;
        f->known[at] = 0;
    }
}

static void watch(void *ctx, const char *what, int layer, int row0, const void *data, int rows, int width)
{
    foresight *f = ctx;
    if (!strcmp(what, "x_attn")) {
        guess(f, ATTENTION, layer + 1, rows);
    } else if (!strcmp(what, "x")) {
        guess(f, END, layer + 1, rows);
        guess(f, END_BEFORE, layer + 2, rows);
    } else if (!strcmp(what, "router_ids")) {
        judge(f, layer, data, rows);
    }
}

static void print(const foresight *f, FILE *csv)
{
    fprintf(csv, "layer,when,guesses,recall,picks\n");
    for (int way = 0; way < WAYS; way++) {
        int64_t all[SIZES] = {0}, of = 0;
        for (int l = 0; l < f->layers; l++) {
            const int at = way * f->layers + l;
            if (!f->of[at]) continue;
            of += f->of[at];
            for (int z = 0; z < SIZES; z++) {
                all[z] += f->found[at * SIZES + z];
                fprintf(csv, "%d,%s,%d,%.5f,%" PRId64 "\n", l, way_name[way], f->sizes[z],
                        (double)f->found[at * SIZES + z] / (double)f->of[at], f->of[at]);
            }
        }
        for (int z = 0; of && z < SIZES; z++)
            fprintf(csv, "all,%s,%d,%.5f,%" PRId64 "\n", way_name[way], f->sizes[z], (double)all[z] / (double)of, of);
    }
}

static aff_status read_all(foresight *f, const aff_net *net, const int32_t *ids, int64_t n, aff_error *err)
{
    aff_seq *seq;
    AFF_TRY(aff__seq_create(&seq, net, n, err));
    aff_status s = AFF_OK;
    for (int64_t at = 0; at < n && s == AFF_OK; at += AFF_MAX_CHUNK) {
        const int rows = n - at < AFF_MAX_CHUNK ? (int)(n - at) : AFF_MAX_CHUNK;
        s = aff__forward(
            f->runner,
            &(aff_batch){.n = rows, .id = ids + at, .seq = seq, .want_from = rows, .trace = watch, .trace_ctx = f},
            err);
    }
    aff__seq_free(seq);
    return s;
}

aff_status aff__foresight(const aff_net *net, int threads, const int32_t *ids, int64_t n, FILE *csv, aff_error *err)
{
    const aff_config *c = aff__net_config(net);
    foresight f = {.layers = aff__net_layers(net), .experts = c->experts, .picks = c->picks};
    const int sizes[SIZES] = {c->picks, 8, 12, 16};
    for (int z = 0; z < SIZES; z++) {
        const int least = sizes[z] < c->picks ? c->picks : sizes[z];
        f.sizes[z] = least < c->experts ? least : c->experts;
    }
    if (c->picks > MOST)
        return aff__fail(err, AFF_E_UNSUPPORTED, "foresight: %d picks a row: expected at most %d", c->picks, MOST);
    const uint64_t cells = (uint64_t)WAYS * (uint64_t)f.layers;
    aff_status s = aff__runner_create(&f.runner, net, threads, err);
    if (s == AFF_OK) s = aff__calloc(&f.guess, cells * AFF_MAX_CHUNK * MOST, sizeof *f.guess, "foresight", err);
    if (s == AFF_OK) s = aff__calloc(&f.known, cells, sizeof *f.known, "foresight", err);
    if (s == AFF_OK) s = aff__calloc(&f.found, cells * SIZES, sizeof *f.found, "foresight", err);
    if (s == AFF_OK) s = aff__calloc(&f.of, cells, sizeof *f.of, "foresight", err);
    if (s == AFF_OK) s = read_all(&f, net, ids, n, err);
    if (s == AFF_OK) print(&f, csv);
    aff__runner_free(f.runner);
    free(f.guess);
    free(f.known);
    free(f.found);
    free(f.of);
    return s;
}
