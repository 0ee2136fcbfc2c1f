/* The forward pass against tests/golden/v4-sim: DeepSeek's own inference code on two tiny checkpoints (its README has
 * the gates). -v prints the table of docs/parity.md. */
#include "model/runner.h"
#include "support/golden.h"
#include "support/record.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 2, ROWS = 512 };
static const char DSPARK[] = "v4-dspark", MTP1[] = "v4-mtp1";

/* What the README expects of a float32 engine. kv: single KV rows; ids: error below which a gap decides nothing. */
typedef struct gates {
    const char *mode;
    aff_numerics num;
    double median, worst, kv, conf, tie;
} gates;
static const gates MATH = {"math", AFF_MATH, 1e-5, 1e-5, 2e-5, 1e-4, 1e-5},
                   SIM = {"sim", AFF_SIM, 1e-3, 2e-2, 2e-2, 3e-2, 1e-3};

typedef struct fixture {
    aff_net *net;
    aff_runner *r;
    aff_seq *seq;
    record *rec;
    aff_ckpt *g;
    const gates *m;
    const char *model;
    int V, H;
} fixture;

static void must(aff_status s, const aff_error *err)
{
    if (s != AFF_OK) fail_msg("%s", err->msg);
}

static fixture setup(const char *ckpt, const char *model, const gates *m)
{
    fixture f = {.m = m, .model = model};
    char path[1024];
    aff_error err = {0};
    const aff_net_options o = {.numerics = m->num, .draft = true};
    snprintf(path, sizeof path, "%s/golden/v4-sim/%s", AFF_TESTS_DIR, ckpt);
    must(aff__net_open(&f.net, path, &o, &err), &err);
    must(aff__runner_create(&f.r, f.net, THREADS, &err), &err);
    must(aff__seq_create(&f.seq, f.net, 4096, &err), &err);
    f.g = golden_open("v4-sim/golden.safetensors");
    f.rec = record_new(ROWS, aff__net_config(f.net)->index_topk);
    f.V = aff__net_config(f.net)->vocab;
    f.H = aff__net_config(f.net)->hidden;
    return f;
}

static void teardown(fixture *f)
{
    record_free(f->rec);
    aff__ckpt_close(f->g);
    aff__seq_free(f->seq);
    aff__runner_free(f->r);
    aff__net_close(f->net);
}

/* Rows pos .. to-1 of ids in one call; logits of all of them land at logits + pos*V (NULL: none). */
static void run(fixture *f, const int32_t *ids, int64_t to, float *logits)
{
    aff_error err = {0};
    const int64_t at = aff__seq_pos(f->seq);
    if (at == to) return;
    const aff_batch b = {.n = (int)(to - at),
                         .id = ids + at,
                         .seq = f->seq,
                         .want_from = logits ? 0 : to - at,
                         .logits = logits ? logits + at * f->V : NULL,
                         .trace = record_trace,
                         .trace_ctx = f->rec};
    must(aff__forward(f->r, &b, &err), &err);
}

static const char *named(const fixture *f, const char *suffix)
{
    static char name[96];
    snprintf(name, sizeof name, "%s.%s", f->m->mode, suffix);
    return name;
}

static const float *floats(const fixture *f, const char *suffix, size_t expect)
{
    size_t n;
    const float *v = golden_f32(f->g, named(f, suffix), &n);
    if (n != expect) fail_msg("%s: %zu values, expected %zu", named(f, suffix), n, expect);
    return v;
}

static void judge(const fixture *f, errors *e, const char *tensor)
{
    errors_judge(e, f->model, f->m->mode, tensor, f->m->median, f->m->worst);
}

/* Traced rows of one tensor against golden rows at positions pos[0], pos[step], ... */
static void rows(const fixture *f, errors *e, const char *what, int layer, const int32_t *pos, size_t n, size_t step,
                 const float *want, size_t width)
{
    for (size_t i = 0; i < n; i += step)
        errors_add(e, row_error(record_row(f->rec, what, layer, pos[i]), want + i / step * width, width));
}

static int top_of(const float *v, int n, double *gap)
{
    int a = 0;
    double second = -INFINITY, most = 0;
    for (int i = 1; i < n; i++)
        if (v[i] > v[a]) a = i;
    for (int i = 0; i < n; i++) {
        if (i != a && (double)v[i] > second) second = (double)v[i];
        if (fabs((double)v[i]) > most) most = fabs((double)v[i]);
    }
    *gap = ((double)v[a] - second) / most;
    return a;
}

static void logits_at(const fixture *f, const char *tensor, const float *got, const int32_t *pos, size_t n,
                      const float *want)
{
    errors e = {0};
    int64_t wrong = 0, near = 0;
    for (size_t i = 0; i < n; i++) {
        const float *a = got + (int64_t)pos[i] * f->V, *b = want + (int64_t)i * f->V;
        double gap, gap_a;
        const double err = row_error(a, b, (size_t)f->V);
        errors_add(&e, err);
        if (top_of(b, f->V, &gap) == top_of(a, f->V, &gap_a)) continue;
        if (gap > 2 * err)
            wrong++;
        else
            near++;
    }
    judge(f, &e, tensor);
    char name[64];
    snprintf(name, sizeof name, "%s argmax", tensor);
    counts_judge(f->model, f->m->mode, name, (int64_t)n, wrong, near);
}

/* ---- trunk ---- */

static void picks(const fixture *f, const int32_t *pos, size_t n_pos)
{
    size_t n, n_gap;
    const int K = 3, T = 420, L = 3;
    int32_t *want = golden_ints(f->g, named(f, "router_ids"), &n);
    const float *gap = golden_f32(f->g, named(f, "router_gap"), &n_gap);
    assert_int_equal(n, L * T * K);
    assert_int_equal(n_gap, L * T);
    int64_t wrong = 0, near = 0;
    for (int i = 0; i < L * T; i++) {
        if (same_set(want + (int64_t)i * K, record_ids(f->rec, "router_ids", i / T, i % T), K)) continue;
        if ((double)gap[i] > f->m->tie)
            wrong++;
        else
            near++;
    }
    counts_judge(f->model, f->m->mode, "router ids", L * T, wrong, near);
    if (f->m->num == AFF_SIM) { /* weights in the order of the picks */
        const float *w = floats(f, "router_weights", (size_t)L * n_pos * (size_t)K);
        errors e = {0};
        for (int l = 0; l < L; l++)
            for (size_t i = 0; i < n_pos; i++) {
                const int32_t *a = record_ids(f->rec, "router_ids", l, pos[i]),
                              *b = want + ((int64_t)l * T + pos[i]) * K;
                if (memcmp(a, b, (size_t)K * sizeof *a)) continue;
                errors_add(&e, row_error(record_row(f->rec, "router_weights", l, pos[i]),
                                         w + ((size_t)l * n_pos + i) * (size_t)K, (size_t)K));
            }
        assert_true(e.n * 100 >= 95 * (size_t)L * n_pos);
        judge(f, &e, "router weights");
    }
    free(want);
}

static void selections(const fixture *f)
{
    size_t n;
    const int K = 24, T = 420;
    int32_t *want = golden_ints(f->g, named(f, "sel.1"), &n);
    const float *gap = floats(f, "sel_gap.1", (size_t)T);
    assert_int_equal(n, T * K);
    int64_t wrong = 0, near = 0, ties = 0;
    for (int t = 3; t < T; t++) { /* no group is complete before */
        ties += gap[t] == 0;
        if (!memcmp(want + (int64_t)t * K, record_ids(f->rec, "sel", 1, t), (size_t)K * sizeof *want)) continue;
        /* An exact tie (gap 0: scores that ReLU makes zero) is decided by the rule. */
        if (gap[t] == 0 || (double)gap[t] > f->m->tie)
            wrong++;
        else
            near++;
    }
    counts_judge(f->model, f->m->mode, "selections", T - 3, wrong, near);
    if (f->m->num == AFF_SIM) assert_int_equal(ties, 17);
    free(want);
}

/* Raw, compressed and indexer rows: where one element falls on the other side of a rounding it moves by up to 1/16. */
static void cached_rows(const fixture *f, const int32_t *pos, size_t n_pos)
{
    char name[32];
    errors kv = {0}, comp = {0}, ikey = {0};
    for (int l = 0; l < 3; l++) {
        snprintf(name, sizeof name, "kv.%d", l);
        rows(f, &kv, "kv", l, pos, n_pos, 2, floats(f, name, 11 * 512), 512);
    }
    size_t n1, n2;
    const int32_t *g1 = golden_i32(f->g, "sim.comp_g.1", &n1), *g2 = golden_i32(f->g, "sim.comp_g.2", &n2);
    rows(f, &comp, "comp", 1, g1, n1, 1, floats(f, "comp.1", n1 * 512), 512);
    rows(f, &comp, "comp", 2, g2, n2, 1, floats(f, "comp.2", n2 * 512), 512);
    rows(f, &ikey, "ikey", 1, g1, n1, 1, floats(f, "ikey.1", n1 * 128), 128);
    errors_judge_loose(&kv, f->model, f->m->mode, "kv rows", f->m->median, 2e-2, 10, 1.0 / 14);
    errors_judge_loose(&comp, f->model, f->m->mode, "compressed rows", f->m->median, 2e-2, 10, 1.0 / 14);
    errors_judge_loose(&ikey, f->model, f->m->mode, "indexer keys", f->m->median, 2e-2, 10, 0.34);
}

static void sublayers(const fixture *f, const int32_t *pos, size_t n_pos)
{
    static const char *const what[] = {"attn_in", "attn_out", "ffn_in", "ffn_out"};
    for (int k = 0; k < 4; k++) {
        errors e = {0};
        for (int l = 0; l < 3; l++) {
            char name[32];
            snprintf(name, sizeof name, "%s.%d", what[k], l);
            rows(f, &e, what[k], l, pos, n_pos, 1, floats(f, name, n_pos * (size_t)f->H), (size_t)f->H);
        }
        judge(f, &e, what[k]);
    }
}

static void streams(const fixture *f, const int32_t *pos, size_t n_pos)
{
    const size_t width = 4 * (size_t)f->H, step = f->m->num == AFF_MATH ? 2 : 1, stored = n_pos / step;
    const float *x = floats(f, "x", 3 * stored * width);
    errors e = {0};
    for (int l = 0; l < 3; l++) rows(f, &e, "x", l, pos, n_pos, step, x + (size_t)l * stored * width, width);
    judge(f, &e, "streams");
}

/* ---- drafts ---- */

typedef struct blocks {
    const int32_t *n, *in; /* committed positions, input ids */
    size_t count;
    int32_t *ids, *top_ids, *router; /* owned */
    const float *conf, *top, *mx, *seed, *h, *full_logits, *full_base, *full_x, *gap;
    const int32_t *full_block;
    size_t full;
} blocks;

static blocks blocks_open(const fixture *f, const char *prefix)
{
    blocks b = {0};
    char name[64];
#define NAME(s) (snprintf(name, sizeof name, "%s." s, prefix), named(f, name))
    b.n = golden_i32(f->g, NAME("n"), &b.count);
    b.in = golden_i32(f->g, NAME("in_ids"), NULL);
    b.ids = golden_ints(f->g, NAME("ids"), NULL);
    b.top_ids = golden_ints(f->g, NAME("top_ids"), NULL);
    b.router = golden_ints(f->g, NAME("router_ids"), NULL);
    b.gap = golden_f32(f->g, NAME("router_gap"), NULL);
    b.conf = golden_f32(f->g, NAME("conf"), NULL);
    b.top = golden_f32(f->g, NAME("top_logits"), NULL);
    b.mx = golden_f32(f->g, NAME("mx"), NULL);
    b.seed = golden_f32(f->g, NAME("seed_row"), NULL);
    b.h = golden_f32(f->g, NAME("h"), NULL);
    b.full_logits = golden_f32(f->g, NAME("full_logits"), NULL);
    b.full_base = golden_f32(f->g, NAME("full_base"), NULL);
    b.full_x = golden_f32(f->g, NAME("full_x"), NULL);
    b.full_block = golden_i32(f->g, NAME("full_block"), &b.full);
#undef NAME
    return b;
}

typedef struct draft_errors {
    errors logits, full, base, x, h, mx, seed, conf;
    int64_t ids, ids_wrong, picks, picks_wrong;
} draft_errors;

enum { B = 5, STAGES = 3, K = 3, D = 512 };

/* Block i, right after its n positions were committed. */
static void draft_block(fixture *f, const blocks *b, size_t i, draft_errors *d)
{
    aff_error err = {0};
    int32_t ids[B];
    float conf[B], *lg = malloc(sizeof(float) * B * (size_t)f->V);
    const int64_t P = b->n[i];
    const size_t H = (size_t)f->H, V = (size_t)f->V;
    assert_int_equal(aff__seq_pos(f->seq), P);
    errors_add(&d->mx, row_error(record_row(f->rec, "mx", 0, P - 1), b->mx + i * H, H));
    for (int s = 0; s < STAGES; s++)
        errors_add(&d->seed,
                   row_error(record_row(f->rec, "seed", s, P - 1), b->seed + (i * STAGES + (size_t)s) * D, D));
    must(aff__draft_block(f->r, f->seq, b->in[i * B], ids, conf, lg, record_trace, f->rec, &err), &err);
    assert_int_equal(aff__seq_pos(f->seq), P);
    for (int s = 0; s < STAGES; s++)
        for (int k = 0; k < B; k++) {
            const size_t at = (i * STAGES + (size_t)s) * B + (size_t)k;
            if ((double)b->gap[at] <= f->m->tie) continue;
            d->picks++;
            d->picks_wrong += !same_set(record_ids(f->rec, "router_ids", s, P + k), b->router + at * K, K);
        }
    const int32_t *want = b->ids + i * B;
    size_t full = b->full;
    for (size_t k = 0; k < b->full; k++)
        if ((size_t)b->full_block[k] == i) full = k;
    for (int k = 0; k < B; k++) {
        const float *top = b->top + (i * B + (size_t)k) * 20;
        float got[20];
        for (int j = 0; j < 20; j++) got[j] = lg[k * f->V + b->top_ids[(i * B + (size_t)k) * 20 + (size_t)j]];
        errors_add(&d->logits, row_error(got, top, 20));
        errors_add(&d->conf, fabs((double)conf[k] - (double)b->conf[i * B + (size_t)k]));
        errors_add(&d->h, row_error(record_row(f->rec, "h", 0, P + k), b->h + (i * B + (size_t)k) * H, H));
        d->ids++;
        d->ids_wrong += ids[k] != want[k]; /* the smallest margin of all slots is 2.8e-2 of 9 */
        if (full == b->full) continue;
        errors_add(&d->full, row_error(lg + (size_t)k * V, b->full_logits + (full * B + (size_t)k) * V, V));
        errors_add(&d->base,
                   row_error(record_row(f->rec, "base", 0, P + k), b->full_base + (full * B + (size_t)k) * V, V));
        for (int s = 0; s < STAGES && full == b->full - 1; s++)
            errors_add(&d->x, row_error(record_row(f->rec, "x", s, P + k),
                                        b->full_x + ((size_t)s * B + (size_t)k) * 4 * H, 4 * H));
    }
    free(lg);
}

static void draft_judge(const fixture *f, draft_errors *d, const char *prefix)
{
    char name[64];
#define NAME(s) (snprintf(name, sizeof name, "%s " s, prefix), name)
    judge(f, &d->logits, NAME("top logits"));
    judge(f, &d->full, NAME("logits"));
    judge(f, &d->base, NAME("base logits"));
    judge(f, &d->x, NAME("streams"));
    judge(f, &d->h, NAME("h"));
    judge(f, &d->mx, NAME("mx"));
    errors_judge_loose(&d->seed, f->model, f->m->mode, NAME("seed rows"), f->m->median, f->m->kv,
                       f->m->num == AFF_SIM ? 20 : 0, 1.0 / 14);
    errors_judge(&d->conf, f->model, f->m->mode, NAME("confidence (abs)"), f->m->conf, f->m->conf);
    counts_judge(f->model, f->m->mode, NAME("proposals"), d->ids, d->ids_wrong, 0);
    counts_judge(f->model, f->m->mode, NAME("router ids"), d->picks, d->picks_wrong, 0);
#undef NAME
}

static void blocks_close(blocks *b)
{
    free(b->ids);
    free(b->top_ids);
    free(b->router);
}

/* ---- whole sequences ---- */

/* Prompt, single steps, and each block where its turn comes; the draft is seeded by the engine's own trunk. */
static void long_sequence(const gates *m)
{
    fixture f = setup("ckpt-dspark", DSPARK, m);
    size_t n_ids, n_pos, n_lp;
    const int32_t *ids = golden_i32(f.g, "ids", &n_ids), *pos = golden_i32(f.g, "pos", &n_pos);
    const int32_t *lp = golden_i32(f.g, m->num == AFF_MATH ? "logits_pos_few" : "logits_pos", &n_lp);
    const int T = 420, prompt = *golden_i32(f.g, "prompt_len", NULL);
    assert_int_equal(n_ids, T + 1);
    float *logits = malloc(sizeof(float) * (size_t)T * (size_t)f.V);
    run(&f, ids, prompt, logits);
    while (aff__seq_pos(f.seq) < T) run(&f, ids, aff__seq_pos(f.seq) + 1, logits);
    logits_at(&f, "logits", logits, lp, n_lp, floats(&f, "logits", n_lp * (size_t)f.V));
    streams(&f, pos, n_pos);
    picks(&f, pos, n_pos);
    selections(&f);
    if (m->num == AFF_MATH) {
        const int from = *golden_i32(f.g, "taps_from", NULL);
        const float *taps = floats(&f, "taps", (size_t)(T - from) * 3 * (size_t)f.H);
        errors e = {0};
        for (int t = from; t < T; t++)
            errors_add(&e, row_error(record_row(f.rec, "tap", 0, t), taps + (t - from) * 3 * f.H, 3 * (size_t)f.H));
        judge(&f, &e, "taps");
    } else {
        cached_rows(&f, pos, n_pos);
        sublayers(&f, pos, n_pos);
    }
    /* A second run for the drafts: their traces would stand in the way of the trunk's. */
    aff__seq_reset(f.seq);
    blocks b = blocks_open(&f, "draft");
    const float *tap = floats(&f, "draft.tap", b.count * 3 * (size_t)f.H);
    draft_errors d = {0};
    errors e = {0};
    for (size_t i = 0; i < b.count; i++) {
        if (aff__seq_pos(f.seq) < prompt) run(&f, ids, prompt, NULL);
        while (aff__seq_pos(f.seq) < b.n[i]) run(&f, ids, aff__seq_pos(f.seq) + 1, NULL);
        errors_add(&e, row_error(record_row(f.rec, "tap", 0, b.n[i] - 1), tap + i * 3 * (size_t)f.H, 3 * (size_t)f.H));
        draft_block(&f, &b, i, &d);
    }
    judge(&f, &e, "draft tap");
    draft_judge(&f, &d, "draft");
    blocks_close(&b);
    free(logits);
    teardown(&f);
}

static void test_long_math(void **state)
{
    long_sequence(&MATH);
}
static void test_long_sim(void **state)
{
    long_sequence(&SIM);
}

/* Fewer committed positions than the window. */
static void short_sequence(const gates *m)
{
    fixture f = setup("ckpt-dspark", DSPARK, m);
    const int32_t *ids = golden_i32(f.g, "short_ids", NULL);
    const int T = 9, prompt = *golden_i32(f.g, "short_prompt_len", NULL);
    int32_t pos[9];
    float *logits = malloc(sizeof(float) * (size_t)T * (size_t)f.V);
    blocks b = blocks_open(&f, "short.draft");
    draft_errors d = {0};
    for (size_t i = 0; i < b.count; i++) {
        if (aff__seq_pos(f.seq) < prompt) run(&f, ids, prompt, logits);
        while (aff__seq_pos(f.seq) < b.n[i]) run(&f, ids, aff__seq_pos(f.seq) + 1, logits);
        draft_block(&f, &b, i, &d);
    }
    while (aff__seq_pos(f.seq) < T) run(&f, ids, aff__seq_pos(f.seq) + 1, logits);
    for (int i = 0; i < T; i++) pos[i] = i;
    logits_at(&f, "short logits", logits, pos, (size_t)T, floats(&f, "short.logits", (size_t)(T * f.V)));
    errors e = {0};
    rows(&f, &e, "tap", 0, pos, (size_t)T, 1, floats(&f, "short.taps", (size_t)T * 3 * (size_t)f.H), 3 * (size_t)f.H);
    judge(&f, &e, "short taps");
    draft_judge(&f, &d, "short draft");
    blocks_close(&b);
    free(logits);
    teardown(&f);
}

static void test_short_math(void **state)
{
    short_sequence(&MATH);
}
static void test_short_sim(void **state)
{
    short_sequence(&SIM);
}

/* The draft alone: seeded from stored taps of positions from.. on, block after block. */
static void stored_taps(const gates *m, const char *taps_name, int from, const char *prefix, const char *label)
{
    fixture f = setup("ckpt-dspark", DSPARK, m);
    const size_t width = 3 * (size_t)f.H;
    size_t n;
    const float *taps = golden_f32(f.g, named(&f, taps_name), &n);
    const int32_t *ids = golden_i32(f.g, "ids", NULL); /* not read by seeding */
    blocks b = blocks_open(&f, prefix);
    draft_errors d = {0};
    f.seq->pos = from;
    for (size_t i = 0; i < b.count; i++) {
        while (f.seq->pos < b.n[i]) {
            const int rows_now = b.n[i] - f.seq->pos < 100 ? (int)(b.n[i] - f.seq->pos) : 100;
            aff__rows_begin(f.r, record_trace, f.rec);
            aff__rows_add(f.r, f.seq, ids, rows_now, f.seq->pos);
            memcpy(f.r->tap, taps + (size_t)(f.seq->pos - from) * width, sizeof(float) * width * (size_t)rows_now);
            aff__draft_seed(f.r, 0);
            f.seq->pos += rows_now;
        }
        assert_true((size_t)(f.seq->pos - from) * width <= n);
        draft_block(&f, &b, i, &d);
    }
    draft_judge(&f, &d, label);
    blocks_close(&b);
    teardown(&f);
}

static void test_stored_taps(void **state)
{
    aff_ckpt *g = golden_open("v4-sim/golden.safetensors");
    const int from = *golden_i32(g, "taps_from", NULL);
    aff__ckpt_close(g);
    stored_taps(&MATH, "taps", from, "draft", "draft/taps");
    stored_taps(&MATH, "short.taps", 0, "short.draft", "short draft/taps");
    stored_taps(&SIM, "short.taps", 0, "short.draft", "short draft/taps");
}

/* ---- MTP-1 ---- */

static void mtp1(const gates *m)
{
    fixture f = setup("ckpt-mtp1", MTP1, m);
    size_t n_lp, n_pos;
    const int32_t *ids = golden_i32(f.g, "mtp1.ids", NULL), *lp = golden_i32(f.g, "mtp1.logits_pos", &n_lp),
                  *pos = golden_i32(f.g, "mtp1.pos", &n_pos);
    const int T = 80, prompt = *golden_i32(f.g, "mtp1.prompt_len", NULL);
    float *logits = malloc(sizeof(float) * (size_t)T * (size_t)f.V),
          *draft = malloc(sizeof(float) * (size_t)T * (size_t)f.V);
    record *trunk = f.rec, *stage = record_new(ROWS, 1);
    char name[64];
    aff_error err = {0};
    assert_int_equal(aff__net_draft(f.net), AFF_DRAFT_MTP1);
    while (aff__seq_pos(f.seq) < T) {
        const int64_t at = aff__seq_pos(f.seq), to = at < prompt ? prompt : at + 1;
        run(&f, ids, to, logits);
        f.r->trace_ctx = stage;
        must(aff__draft_mtp1(f.r, ids + at + 1, (int)(to - at), 0, draft + at * f.V, &err), &err);
    }
    /* The streams were used up; they belong to that sequence and to the last rows only. */
    assert_int_equal(aff__draft_mtp1(f.r, ids + T, 1, 0, draft, &err), AFF_E_INVALID);
    run(&f, ids, T + 1, NULL);
    assert_int_equal(aff__draft_mtp1(f.r, ids + T, 2, 0, draft, &err), AFF_E_INVALID);
    must(aff__seq_rollback(f.seq, T, &err), &err);
    assert_int_equal(aff__draft_mtp1(f.r, ids + T, 1, 0, draft, &err), AFF_E_INVALID);
#define NAME(s) (snprintf(name, sizeof name, "mtp1.%s." s, m->mode), name)
    logits_at(&f, "trunk logits", logits, lp, n_lp, golden_f32(f.g, NAME("logits"), NULL));
    logits_at(&f, "MTP-1 logits", draft, lp, n_lp, golden_f32(f.g, NAME("draft_logits"), NULL));
    errors e = {0};
    rows(&f, &e, "x", 0, pos, n_pos, 1, golden_f32(f.g, NAME("x_in"), NULL), 4 * (size_t)f.H);
    judge(&f, &e, "streams in");
    f.rec = stage;
    rows(&f, &e, "x", 0, pos, n_pos, 1, golden_f32(f.g, NAME("x_out"), NULL), 4 * (size_t)f.H);
    judge(&f, &e, "streams out");
    int32_t *want = golden_ints(f.g, NAME("router_ids"), NULL);
    int64_t wrong = 0;
    for (int t = 0; t < T; t++) wrong += !same_set(want + 2 * (int64_t)t, record_ids(stage, "router_ids", 0, t), 2);
    counts_judge(f.model, m->mode, "MTP-1 router ids", T, wrong, 0);
#undef NAME
    f.rec = trunk;
    free(want);
    free(logits);
    free(draft);
    record_free(stage);
    teardown(&f);
}

static void test_mtp1_math(void **state)
{
    mtp1(&MATH);
}
static void test_mtp1_sim(void **state)
{
    mtp1(&SIM);
}

/* ---- one attention sublayer at a time, and the rope tables ---- */

static void test_attention_units(void **state)
{
    fixture f = setup("ckpt-dspark", DSPARK, &SIM);
    aff_error err = {0};
    size_t n_pos;
    const int U = 264, H = f.H;
    const aff_st_tensor *in = aff__ckpt_find(f.g, "unit.x");
    const int32_t *pos = golden_i32(f.g, "unit.pos", &n_pos), *ids = golden_i32(f.g, "ids", NULL);
    float *out = malloc(sizeof(float) * (size_t)(U * H));
    errors e = {0};
    assert_non_null(in);
    assert_int_equal(in->dtype, AFF_ST_BF16);
    assert_int_equal(in->size, U * H * 2);
    for (int l = 0; l < 3; l++) {
        char name[32];
        for (int at = 0; at < U; at += AFF_MAX_CHUNK) {
            const int n = U - at < AFF_MAX_CHUNK ? U - at : AFF_MAX_CHUNK;
            aff__rows_begin(f.r, record_trace, f.rec);
            aff__rows_add(f.r, f.seq, ids, n, at);
            aff__use_layer(f.r, l);
            for (int i = 0; i < n * H; i++) {
                uint16_t h;
                memcpy(&h, in->data + 2 * (at * H + i), 2);
                const uint32_t u = (uint32_t)h << 16;
                memcpy(&f.r->x[i], &u, 4);
            }
            must(aff__attention(f.r, &f.net->layer[l], l, AFF_CAUSAL, &err), &err);
            memcpy(out + at * H, f.r->f, sizeof(float) * (size_t)(n * H));
        }
        snprintf(name, sizeof name, "unit.attn_out.%d", l);
        const float *want = golden_f32(f.g, name, NULL);
        for (size_t i = 0; i < n_pos; i++)
            errors_add(&e, row_error(out + (int64_t)pos[i] * H, want + i * (size_t)H, (size_t)H));
        snprintf(name, sizeof name, "unit.kv.%d", l);
        rows(&f, &e, "kv", l, pos, n_pos, 3, golden_f32(f.g, name, NULL), 512);
        if (!l) continue;
        const int ratio = l == 1 ? 4 : 128, groups = U / ratio, step = groups / 8 > 1 ? groups / 8 : 1;
        size_t n;
        snprintf(name, sizeof name, "unit.comp.%d", l);
        want = golden_f32(f.g, name, &n);
        for (size_t i = 0; i < n / 512; i++) {
            const aff_layer_state *ls = &f.seq->layer[l];
            float row[512];
            aff__row_decode(ls->row, (const uint8_t *)ls->comp + (int64_t)i * step * ls->row->bytes, row);
            errors_add(&e, row_error(row, want + i * 512, 512));
        }
    }
    assert_int_equal(e.n, 3 * 16 + 3 * 6 + 9 + 2);
    errors_judge_loose(&e, DSPARK, "sim", "attention units", 1e-5, 1e-5, 2, 1e-2);
    int32_t *sel = golden_ints(f.g, "unit.sel.1", NULL);
    int64_t wrong = 0, compared = 0;
    for (size_t i = 0; i < n_pos; i++) {
        if (pos[i] < 3) continue;
        compared++;
        wrong += memcmp(sel + i * 24, record_ids(f.rec, "sel", 1, pos[i]), 24 * sizeof *sel) != 0;
    }
    counts_judge(DSPARK, "sim", "unit selections", compared, wrong, 0);
    free(sel);
    free(out);
    teardown(&f);
}

static void test_rope_tables(void **state)
{
    fixture f = setup("ckpt-dspark", DSPARK, &MATH);
    assert_int_equal(f.net->rope.pairs, 32);
    assert_memory_equal(f.net->rope.freq, golden_f32(f.g, "rope.freq_base", NULL), 32 * sizeof(float));
    assert_memory_equal(f.net->rope_compressed.freq, golden_f32(f.g, "rope.freq_yarn", NULL), 32 * sizeof(float));
    teardown(&f);
}

int main(int argc, char **argv)
{
    record_arguments(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_tables), cmocka_unit_test(test_attention_units), cmocka_unit_test(test_long_math),
        cmocka_unit_test(test_long_sim),    cmocka_unit_test(test_short_math),      cmocka_unit_test(test_short_sim),
        cmocka_unit_test(test_stored_taps), cmocka_unit_test(test_mtp1_math),       cmocka_unit_test(test_mtp1_sim),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
