#include "model/check.h"
#include "base/mem.h"
#include "base/rng.h"
#include "model/runner.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is compared and within what (spec model-v4 16.2, a device against the CPU in the same numerics). A quantiser's
 * flip moves a whole code, so some rows may be above: a share. */
typedef struct {
    const char *what, *name;
    double allowed, share;
    enum { FLOATS, IDS, SELECTION } kind;
    aff_check_row row;
    int64_t rows, above;
} tally;

enum { TALLIES = 11, SEEN = 12 };
static const tally plan[TALLIES] = {
    {"attn_in", "layers: attention input", 5e-3, 0.02, FLOATS},
    {"kv", "layers: KV row", 1e-2, 0.03, FLOATS},
    {"comp", "layers: compressed row", 1e-2, 0.05, FLOATS},
    {"ikey", "layers: indexer row", 1e-2, 0.05, FLOATS},
    {"sel", "layers: selected rows", 0.01, 0.01, SELECTION},
    {"attn_out", "layers: attention output", 1e-2, 0.02, FLOATS},
    {"ffn_in", "layers: experts' input", 1e-2, 0.02, FLOATS},
    {"router_ids", "layers: picks", 0, 0.005, IDS},
    {"router_weights", "layers: weights of picks", 1e-2, 0.02, FLOATS},
    {"ffn_out", "layers: experts' output", 3e-2, 0.03, FLOATS},
    {"x", "layers: streams", 3e-2, 0.02, FLOATS},
};

/* The tensors of one block. */
typedef struct {
    const char *what;
    void *data;
    int rows, width;
} tensor;

typedef struct {
    tensor *t;
    int n, cap;
    bool full;
} record;

typedef struct {
    aff_net *net;
    aff_runner *cpu, *dev;
    aff_seq *a, *b;
    int32_t *ids;
    int rows;
    tally t[TALLIES];
    aff_check_row experts;
    record seen[2];
} job;

static void remember(void *ctx, const char *what, int layer, int row0, const void *data, int rows, int width)
{
    record *r = ctx;
    void *copy;
    (void)layer, (void)row0;
    if (r->n == r->cap) {
        const int cap = r->cap ? 2 * r->cap : 256;
        if (aff__realloc(&r->t, (uint64_t)cap, sizeof *r->t, "check", NULL) != AFF_OK) {
            r->full = true;
            return;
        }
        r->cap = cap;
    }
    if (aff__calloc(&copy, (uint64_t)rows * (uint64_t)width, 4, "check", NULL) != AFF_OK) {
        r->full = true;
        return;
    }
    memcpy(copy, data, (size_t)rows * (size_t)width * 4);
    r->t[r->n++] = (tensor){what, copy, rows, width};
}

static void forget(record *r)
{
    for (int i = 0; i < r->n; i++) free(r->t[i].data);
    r->n = 0;
}

static double error_of(const float *a, const float *b, int n, aff_check_row *row)
{
    double e = 0, m = 1e-30;
    for (int i = 0; i < n; i++) {
        row->differ += memcmp(&a[i], &b[i], 4) != 0;
        if (!isfinite(a[i])) return INFINITY;
        e = fmax(e, fabs((double)a[i] - (double)b[i]));
        m = fmax(m, fabs((double)b[i]));
    }
    return e / m;
}

/* Share of a's ids that b lacks; order does not count. */
static double missing(const int32_t *a, const int32_t *b, int n, aff_check_row *row)
{
    int lost = 0;
    for (int i = 0; i < n; i++) {
        bool there = false;
        for (int j = 0; j < n && !there; j++) there = a[i] == b[j];
        lost += !there;
    }
    row->differ += lost;
    return n ? (double)lost / n : 0;
}

static void tally_row(tally *t, const void *a, const void *b, int n)
{
    t->row.values += n;
    const double e = t->kind == FLOATS ? error_of(a, b, n, &t->row) : missing(a, b, n, &t->row);
    t->rows++;
    t->above += e > t->allowed;
    t->row.error = fmax(t->row.error, e);
}

static void compare(job *j)
{
    const record *a = &j->seen[0], *b = &j->seen[1];
    for (int i = 0; i < a->n && i < b->n; i++)
        for (int k = 0; k < TALLIES; k++) {
            if (strcmp(a->t[i].what, j->t[k].what) || strcmp(b->t[i].what, j->t[k].what)) continue;
            const int w = a->t[i].width;
            for (int r = 0; r < a->t[i].rows; r++)
                tally_row(&j->t[k], (const float *)b->t[i].data + (int64_t)r * w,
                          (const float *)a->t[i].data + (int64_t)r * w, w);
        }
}

/* The experts of a layer on the CPU's own input and picks. */
static aff_status routed(job *j, int layer, int rows, aff_error *err)
{
    const aff_config *c = &j->net->cfg;
    aff_runner *d = j->dev;
    const aff_memory *m = d->b->mem;
    const uint64_t T = (uint64_t)rows, K = (uint64_t)c->picks, n = T * K * (uint64_t)c->hidden;
    aff_expert_shape shape = aff__experts_shape(j->net->experts);
    float *y;
    shape.swiglu_limit = c->swiglu_limit;
    if (d->shape_table) shape.table = d->shape_table;
    AFF_TRY(m->write(m, d->x, j->cpu->x, T * (uint64_t)c->hidden * 4, err));
    AFF_TRY(m->write(m, d->picks, j->cpu->picks, T * K * 4, err));
    AFF_TRY(m->write(m, d->weights, j->cpu->weights, T * K * 4, err));
    d->b->routed(d->b, &shape, &d->experts, layer, d->picks, d->weights, d->x, rows, c->picks, d->y);
    AFF_TRY(aff__calloc(&y, n, sizeof *y, "check", err));
    const aff_status s = m->read(m, y, d->y, n * sizeof *y, err);
    for (uint64_t i = 0; s == AFF_OK && i < n; i++) {
        j->experts.values++;
        if (!memcmp(&y[i], &j->cpu->y[i], 4)) continue;
        if (!j->experts.differ++)
            snprintf(j->experts.note, sizeof j->experts.note, "layer %d, row %d: %a, expected %a", layer,
                     (int)(i / K / (uint64_t)c->hidden), (double)y[i], (double)j->cpu->y[i]);
    }
    j->experts.cases++;
    free(y);
    return s;
}

static aff_status block(job *j, aff_runner *r, int which, int layer, aff_error *err)
{
    r->trace = remember;
    r->trace_ctx = &j->seen[which];
    aff__use_layer(r, layer);
    return aff__block(r, &r->net->layer[layer], j->net->experts, layer, layer, AFF_CAUSAL, err);
}

/* Positions at .. at+rows-1 through every layer. */
static aff_status pass(job *j, int at, int rows, aff_error *err)
{
    const aff_config *c = &j->net->cfg;
    const uint64_t bytes = (uint64_t)rows * (uint64_t)c->hc * (uint64_t)c->hidden * 4;
    aff_runner *const r[2] = {j->cpu, j->dev};
    const aff_memory *m = j->dev->b->mem;
    for (int i = 0; i < 2; i++) {
        aff__rows_begin(r[i], NULL, NULL);
        aff__rows_add(r[i], i ? j->b : j->a, j->ids + at, rows, at);
        AFF_TRY(aff__rows_ready(r[i], err));
    }
    j->cpu->b->embed(j->cpu->b, &j->cpu->net->embed, j->cpu->dids, rows, c->hc, j->cpu->X);
    for (int l = 0; l < j->net->layers; l++) {
        AFF_TRY(m->write(m, j->dev->X, j->cpu->X, bytes, err));
        AFF_TRY(block(j, j->dev, 1, l, err));
        AFF_TRY(block(j, j->cpu, 0, l, err));
        compare(j);
        forget(&j->seen[0]);
        forget(&j->seen[1]);
        AFF_TRY(routed(j, l, rows, err));
        AFF_TRY(aff__rows_done(j->dev, err)); /* counts of plans, faults */
    }
    return AFF_OK;
}

static void report_tallies(job *j, aff_check_fn report, void *ctx)
{
    for (int k = 0; k < TALLIES; k++) {
        tally *t = &j->t[k];
        if (!t->rows) continue;
        t->row.op = t->name;
        t->row.cases = (int)t->rows;
        t->row.allowed = t->allowed;
        t->row.ok = (double)t->above <= t->share * (double)t->rows;
        snprintf(t->row.note, sizeof t->row.note, "%lld of %lld rows above, at most %.1f %% allowed",
                 (long long)t->above, (long long)t->rows, 100 * t->share);
        if (!t->above) *t->row.note = 0;
        report(ctx, &t->row);
    }
    j->experts.op = "layers: routed experts, by bits";
    j->experts.ok = !j->experts.differ;
    report(ctx, &j->experts);
}

/* ---- free-running ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int top_of(const float *x, int n)
{
    int top = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[top]) top = i;
    return top;
}

/* Both from the start over their own states: informative, for a random text has no confident next token. */
static aff_status free_running(job *j, aff_check_fn report, void *ctx, aff_error *err)
{
    const int V = j->net->cfg.vocab, n = j->rows;
    float *l[2];
    double *e;
    AFF_TRY(aff__calloc(&l[0], 2 * (uint64_t)n * (uint64_t)V, sizeof **l, "check", err));
    l[1] = l[0] + (int64_t)n * V;
    aff_status s = aff__calloc(&e, (uint64_t)n, sizeof *e, "check", err);
    for (int i = 0; s == AFF_OK && i < 2; i++) {
        aff__seq_reset(i ? j->b : j->a);
        s = aff__forward(i ? j->dev : j->cpu,
                         &(aff_batch){.n = n, .id = j->ids, .seq = i ? j->b : j->a, .logits = l[i]}, err);
    }
    if (s == AFF_OK) {
        aff_check_row row = {
            .op = "free-running logits", .cases = n, .values = (int64_t)n * V, .allowed = INFINITY, .ok = true};
        int same = 0;
        for (int t = 0; t < n; t++) {
            e[t] = error_of(l[1] + (int64_t)t * V, l[0] + (int64_t)t * V, V, &row);
            same += top_of(l[0] + (int64_t)t * V, V) == top_of(l[1] + (int64_t)t * V, V);
            row.ok = row.ok && isfinite(e[t]);
            row.error = fmax(row.error, e[t]);
        }
        qsort(e, (size_t)n, sizeof *e, by_value);
        snprintf(row.note, sizeof row.note,
                 "median error %.2g, 99th percentile %.2g; same argmax at %d of %d positions", e[n / 2],
                 e[n * 99 / 100], same, n);
        report(ctx, &row);
    }
    free(e);
    free(l[0]);
    return s;
}

static aff_status run(job *j, aff_check_fn report, void *ctx, aff_error *err)
{
    memcpy(j->t, plan, sizeof plan);
    AFF_TRY(aff__seq_grow(j->a, j->rows, err));
    AFF_TRY(aff__seq_grow(j->b, j->rows, err));
    static const int widths[] = {1, 6, 40, 16, 64, 3}; /* the kernels of few rows and of many */
    for (int at = 0, i = 0, n; at < j->rows; at += n, i++) {
        n = widths[i % 6] < j->rows - at ? widths[i % 6] : j->rows - at;
        AFF_TRY(pass(j, at, n, err));
    }
    if (j->seen[0].full || j->seen[1].full)
        return aff__fail(err, AFF_E_NOMEM, "check: no memory for the layers' tensors");
    report_tallies(j, report, ctx);
    return free_running(j, report, ctx, err);
}

aff_status aff__check_model(const char *path, const struct aff_synthetic *synthetic, aff_backend *dev, int rows, int threads, uint64_t seed,
                            aff_check_fn report, void *ctx, aff_error *err)
{
    job j = {.rows = rows};
    aff_status s = aff__net_open(&j.net, path, &(aff_net_options){.numerics = AFF_FAST, .synthetic = synthetic}, err);
    if (s != AFF_OK) {
        dev->free(dev);
        return s;
    }
    s = aff__runner_open(&j.dev, j.net, dev, err);
    if (s == AFF_OK) s = aff__runner_create(&j.cpu, j.net, threads, err);
    if (s == AFF_OK) s = aff__seq_create(&j.a, j.net, rows, err);
    if (s == AFF_OK)
        s = aff__seq_open(&j.b, j.net, &(aff_seq_options){.size = rows, .memory = aff__runner_memory(j.dev)}, err);
    if (s == AFF_OK) s = aff__calloc(&j.ids, (uint64_t)rows, sizeof *j.ids, "check", err);
    for (int i = 0; s == AFF_OK && i < rows; i++)
        j.ids[i] = (int32_t)(aff__splitmix64(&seed) % (uint64_t)j.net->cfg.vocab);
    if (s == AFF_OK) s = run(&j, report, ctx, err);
    for (int i = 0; i < 2; i++) {
        forget(&j.seen[i]);
        free(j.seen[i].t);
    }
    free(j.ids);
    aff__seq_free(j.b);
    aff__seq_free(j.a);
    aff__runner_free(j.cpu);
    aff__runner_free(j.dev);
    aff__net_close(j.net);
    return s;
}
