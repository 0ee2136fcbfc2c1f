/* bench_pass - where a device's pass of few rows spends its time: the launches of one recorded pass, by kernel and shape, with the time
 * that the whole graph loses when they are left out of it, and what they take among themselves.
 *     bench_pass [--layers N] [--experts N] [--context N] [--rows N] [--list] [--tiny] [cuda:0 | hip:0 | emu]
 * Weights of V4-Flash's geometry (--tiny: of tiny-v4's) are made up (model/synthetic.h). Launches are seen by wrapping aff__rt_launch at link time. */
#include "backend/gpu/rt_internal.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "model/runner.h"
#include "model/synthetic.h"
#include "backend/backend.h"
#include "state/seq.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8192, GROUPS = 64, REPS = 12 };

typedef struct shot {
    aff_kernel k;
    unsigned grid, block, smem, flags;
    void *args;
    int group;
} shot;

typedef struct group {
    char name[96];
    double bytes;
    int count;
} group;

static aff_error err;
static shot shots[MOST];
static group groups[GROUPS];
static int n_shots, n_groups;
static bool watching;
static aff_rt *the_rt;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "bench_pass: %s\n", err.msg);
    exit(1);
}

/* ---- watching ---- */

aff_status __real_aff__rt_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem, unsigned flags, const void *args, aff_error *e);
aff_status __wrap_aff__rt_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem, unsigned flags, const void *args, aff_error *e);
aff_status __real_aff__rt_capture_begin(aff_rt *rt, aff_stream *s, aff_error *e);
aff_status __wrap_aff__rt_capture_begin(aff_rt *rt, aff_stream *s, aff_error *e);
aff_status __real_aff__rt_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *e);
aff_status __wrap_aff__rt_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *e);

aff_status __wrap_aff__rt_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem, unsigned flags, const void *args, aff_error *e)
{
    if (watching && n_shots < MOST) {
        const size_t n = aff__kernel_table[k].args_size;
        shot *x = &shots[n_shots++];
        *x = (shot){k, grid, block, smem, flags, malloc(n), 0};
        if (!x->args) exit(1);
        memcpy(x->args, args, n);
    }
    return __real_aff__rt_launch(rt, s, k, grid, block, smem, flags, args, e);
}

aff_status __wrap_aff__rt_capture_begin(aff_rt *rt, aff_stream *s, aff_error *e)
{
    n_shots = 0;
    watching = true;
    the_rt = rt;
    return __real_aff__rt_capture_begin(rt, s, e);
}

aff_status __wrap_aff__rt_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *e)
{
    watching = false;
    return __real_aff__rt_capture_end(rt, s, out, e);
}

/* ---- groups ---- */

static void describe(shot *x)
{
    char name[96];
    double bytes = 0;
    snprintf(name, sizeof name, "%s", aff__kernel_name(x->k));
    if (x->k == AFF_K_dense_stream || x->k == AFF_K_dense_few || x->k == AFF_K_dense_many) {
        const aff_k_dense *d = x->args;
        int32_t rows = 0;
        for (int i = 0; i < d->count; i++) {
            rows += d->m[i].rows;
            bytes += (double)d->m[i].rows * d->m[i].cols * (d->m[i].dtype == AFF_BF16 ? 2 : 1);
        }
        snprintf(name, sizeof name, "%s %dx%d (%d)", aff__kernel_name(x->k), rows, d->m[0].cols, d->count);
    } else if (x->k == AFF_K_wide_small || x->k == AFF_K_wide_big) {
        const aff_k_wide *w = x->args;
        bytes = (double)w->rows * w->cols * (w->bf16 ? 2 : 4);
        snprintf(name, sizeof name, "%s %dx%d", aff__kernel_name(x->k), w->rows, w->cols);
    } else if (x->k == AFF_K_query) {
        const aff_k_query *q = x->args;
        snprintf(name, sizeof name, "query%s", q->index ? " (index)" : "");
    } else if (x->k == AFF_K_attend_cut) {
        const aff_k_attend *a = x->args;
        snprintf(name, sizeof name, "attend_cut, ratio %d", a->ratio);
    } else if (x->k == AFF_K_small) {
        static const char *const kinds[] = {"norm", "query", "kv", "compress", "swiglu", "route", "choose"};
        const aff_k_small *m = x->args;
        int at = snprintf(name, sizeof name, "small:");
        for (int i = 0; i < m->count; i++) at += snprintf(name + at, sizeof name - (size_t)at, " %s", kinds[m->kind[i]]);
    } else if (x->k == AFF_K_experts_stream_up || x->k == AFF_K_experts_stream_down) {
        const aff_k_experts *a = x->args;
        bytes = (double)a->hidden * a->inter / 64 * 23 * a->K * (x->k == AFF_K_experts_stream_up ? 2 : 1);
    }
    int g = 0;
    while (g < n_groups && strcmp(groups[g].name, name)) g++;
    if (g == n_groups) {
        if (n_groups == GROUPS) exit(1);
        snprintf(groups[n_groups++].name, sizeof groups->name, "%s", name);
    }
    groups[g].count++;
    groups[g].bytes += bytes;
    x->group = g;
}

/* Microseconds of a pass without group `without`, or with nothing but `only`; -1: all. */
static double time_of(aff_rt *rt, aff_stream *s, int without, int only)
{
    aff_graph *g;
    aff_event *a, *b;
    float best = 1e30f, ms;
    must(__real_aff__rt_capture_begin(rt, s, &err));
    for (int i = 0; i < n_shots; i++) {
        const shot *x = &shots[i];
        if (x->group == without || (only >= 0 && x->group != only)) continue;
        must(__real_aff__rt_launch(rt, s, x->k, x->grid, x->block, x->smem, x->flags, x->args, &err));
    }
    must(__real_aff__rt_capture_end(rt, s, &g, &err));
    must(aff__rt_event_create(rt, &a, &err));
    must(aff__rt_event_create(rt, &b, &err));
    for (int i = 0; i < REPS; i++) {
        must(aff__rt_record(rt, a, s, &err));
        must(aff__rt_graph_launch(rt, g, s, &err));
        must(aff__rt_record(rt, b, s, &err));
        must(aff__rt_event_sync(rt, b, &err));
        must(aff__rt_elapsed(rt, a, b, &ms, &err));
        best = ms < best ? ms : best;
    }
    aff__rt_event_free(rt, a);
    aff__rt_event_free(rt, b);
    aff__rt_graph_free(rt, g);
    return 1000.0 * (double)best;
}

/* ---- the pass ---- */

static void run(aff_runner *r, aff_seq *s, int n, float *logits)
{
    static uint64_t seed = 1;
    int32_t id[AFF_MAX_CHUNK];
    for (int i = 0; i < n; i++) id[i] = (int32_t)(aff__splitmix64(&seed) % 4000);
    const aff_batch b = {.n = n, .id = id, .seq = s, .want_from = logits ? n - 1 : n, .logits = logits};
    must(aff__forward(r, &b, &err));
}

static void table(int layers, int list)
{
    aff_stream *s;
    for (int i = 0; i < n_shots; i++) describe(&shots[i]);
    for (int i = 0; list && i < n_shots; i++) printf("%4d %-44s %6u x %4u, %6u B\n", i, groups[shots[i].group].name, shots[i].grid, shots[i].block, shots[i].smem);
    must(aff__rt_stream_create(the_rt, &s, &err));
    time_of(the_rt, s, -1, -1);
    const double all = time_of(the_rt, s, -1, -1);
    printf("%d launches, %.1f us by the graph alone\n", n_shots, all);
    printf("%-44s %5s %9s %9s %9s %8s %7s\n", "", "count", "us each,", "us each,", "us a", "MB each", "TB/s");
    printf("%-44s %5s %9s %9s %9s\n", "", "", "left out", "alone", "layer");
    for (int g = 0; g < n_groups; g++) {
        const double n = groups[g].count, lost = all - time_of(the_rt, s, g, -1), alone = time_of(the_rt, s, -1, g), mb = groups[g].bytes / n / 1e6;
        printf("%-44s %5d %9.2f %9.2f %9.2f %8.2f %7.2f\n", groups[g].name, groups[g].count, lost / n, alone / n, lost / layers, mb, lost > 0 ? mb * n / lost : 0.0);
        fflush(stdout);
    }
    printf("again, all: %.1f us\n", time_of(the_rt, s, -1, -1));
    aff__rt_stream_free(the_rt, s);
}

int main(int argc, char **argv)
{
    int layers = 11, experts = 16, context = 2048, rows = 1, list = 0, tiny = 0, i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        const char *f = argv[i];
        if (!strcmp(f, "--list") || !strcmp(f, "--tiny")) {
            *(f[2] == 'l' ? &list : &tiny) = 1;
            continue;
        }
        int *v = !strcmp(f, "--layers") ? &layers : !strcmp(f, "--experts") ? &experts : !strcmp(f, "--context") ? &context : !strcmp(f, "--rows") ? &rows : NULL;
        if (!v || i + 1 == argc) {
            printf("usage: bench_pass [--layers N] [--experts N] [--context N] [--rows N] [--list] [--tiny] [cuda:0 | hip:0 | emu]\n");
            return strcmp(f, "--help") ? 2 : 0;
        }
        *v = atoi(argv[++i]);
    }
    const aff_synthetic made = {.geometry = tiny ? "tiny" : "flash", .layers = layers, .experts = experts};
    aff_device_spec spec;
    aff_net *net;
    aff_runner *r;
    aff_seq *s;
    must(aff__device_parse(&spec, i < argc ? argv[i] : "cuda:0", &err));
    must(aff__net_open(&net, NULL, &(aff_net_options){.numerics = AFF_FAST, .synthetic = &made}, &err));
    must(aff__runner_on(&r, net, &spec, 0, &err));
    must(aff__seq_open(&s, net, &(aff_seq_options){.size = context + 256, .commit = context + 256, .margin = 32, .memory = aff__runner_memory(r)}, &err));
    float *logits = malloc(sizeof *logits * (size_t)aff__net_config(net)->vocab);
    if (!logits) return 1;
    for (int at = 0, n; at < context; at += n) run(r, s, n = context - at < AFF_MAX_CHUNK ? context - at : AFF_MAX_CHUNK, NULL);
    uint64_t least = UINT64_MAX;
    for (int k = 0; k < 16; k++) {
        const uint64_t t = aff__now_ns();
        run(r, s, rows, logits);
        const uint64_t d = aff__now_ns() - t;
        least = d < least ? d : least;
    }
    printf("V4-Flash, %d layers, context %d, %d rows: %.1f us a pass with logits read\n", aff__net_layers(net), context, rows, 1e-3 * (double)least);
    table(aff__net_layers(net), list);
    free(logits);
    aff__seq_free(s);
    aff__runner_free(r);
    aff__net_close(net);
    return 0;
}
