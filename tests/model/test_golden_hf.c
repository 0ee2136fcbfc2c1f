/* The forward pass against transformers in float32 (tests/golden/README.md): toy, toy-clamp, kernel, and the
 * demonstration model. -v prints the table of docs/parity.md; -l lists near ties. */
#include "base/file.h"
#include "model/net_internal.h"
#include "model/forward.h"
#include "support/golden.h"
#include "support/parity_model.h"
#include "support/record.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One row per model. dir: folder under the source tree, NULL: written by the parity generator. near: gap up to which a
 * pick, a selection or an argmax may differ, at most NEAR_MOST of them per model. */
/* flips: rows in a hundred that `sim` may change where a value falls on the other side of a rounding boundary: an indexer code
 * then moves a selection, and the row's logits with it (tests/golden/README.md, "Noise, gates"). */
typedef struct model {
    const char *name, *dir;
    double flips;
} model;
static const model models[] = {
    {"toy", NULL, 0},
    {"toy-clamp", NULL, 0},
    {"kernel", NULL, 0},
    {"tiny-v4", "models/tiny-v4", 1},
};
enum { MODELS = sizeof models / sizeof *models, NEAR_MOST = 5, THREADS = 2, POS = 24, PROJ = 8 };
static const double NEAR_GAP = 1e-6, STREAMS = 1e-4, LOGITS = 2e-4, SIM_MEDIAN = 1e-3, SIM_WORST = 2e-2, FLIP_WORST = 0.5;

typedef struct fixture {
    const model *m;
    const char *mode;
    aff_net *net;
    aff_runner *r;
    aff_seq *seq;
    record *rec;
    aff_ckpt *g;
    const int32_t *ids, *pos;
    int T, n_pos;
    int64_t near; /* near ties used up */
} fixture;

static void must(aff_status s, const aff_error *err)
{
    if (s != AFF_OK) fail_msg("%s", err->msg);
}

static char root[] = "/tmp/aff-parity-XXXXXX";

/* The model's folder: written once per program. */
static void model_path(const model *m, char *path, size_t cap)
{
    struct stat st;
    if (m->dir) {
        snprintf(path, cap, "%s/%s", AFF_SOURCE_DIR, m->dir);
        return;
    }
    snprintf(path, cap, "%s/%s", root, m->name);
    if (stat(path, &st) != 0) assert_int_equal(aff_test_write_parity_model(m->name, path), 0);
}

static fixture setup(const model *m, aff_numerics num, bool draft)
{
    fixture f = {.m = m, .mode = num == AFF_MATH ? "math" : "sim"};
    char path[1024];
    aff_error err = {0};
    size_t n;
    snprintf(path, sizeof path, "%s.safetensors", m->name);
    f.g = golden_open(path);
    model_path(m, path, sizeof path);
    const aff_net_options o = {.numerics = num, .draft = draft};
    must(aff__net_open(&f.net, path, &o, &err), &err);
    f.ids = golden_i32(f.g, "ids", &n);
    f.T = (int)n;
    f.pos = golden_i32(f.g, "pos", &n);
    f.n_pos = (int)n;
    must(aff__runner_create(&f.r, f.net, THREADS, &err), &err);
    must(aff__seq_create(&f.seq, f.net, f.T + 64, &err), &err);
    f.rec = record_new(f.T + 64, f.net->cfg.index_topk);
    return f;
}

static void teardown(fixture *f)
{
    if (f->near > NEAR_MOST)
        fail_msg("%s %s: %lld near ties, at most %d are allowed", f->m->name, f->mode, (long long)f->near, NEAR_MOST);
    record_free(f->rec);
    aff__ckpt_close(f->g);
    aff__seq_free(f->seq);
    aff__runner_free(f->r);
    aff__net_close(f->net);
}

static void run(fixture *f, int64_t to, float *logits)
{
    aff_error err = {0};
    const int64_t at = aff__seq_pos(f->seq);
    const aff_batch b = {.n = (int)(to - at),
                         .id = f->ids + at,
                         .seq = f->seq,
                         .want_from = logits ? 0 : to - at,
                         .logits = logits,
                         .trace = record_trace,
                         .trace_ctx = f->rec};
    if (b.n) must(aff__forward(f->r, &b, &err), &err);
}

/* In `sim` the arrays carry a prefix. */
static const char *named(const fixture *f, const char *suffix)
{
    static char name[96];
    snprintf(name, sizeof name, "%s%s", strcmp(f->mode, "sim") ? "" : "sim.", suffix);
    return name;
}

/* ---- projections ---- */

static uint8_t *signs; /* bit j of signs[i]: s(i, j) is -1 */
enum { SIGNS = 1 << 16 };

static void make_signs(void)
{
    if (signs) return;
    signs = malloc(SIGNS);
    assert_non_null(signs);
    assert_true(aff_test_stream("projection", 0) == 0x81bbbda958d61bc2u);
    for (uint64_t i = 0; i < SIGNS; i++) signs[i] = (uint8_t)aff_test_stream("projection", i);
}

static double projection_error(const float *v, size_t n, const float *want, float max)
{
    double p[PROJ] = {0}, e = 0;
    make_signs();
    assert_true(n <= SIGNS);
    for (size_t i = 0; i < n; i++)
        for (int j = 0; j < PROJ; j++) p[j] += signs[i] >> j & 1 ? -(double)v[i] : (double)v[i];
    for (int j = 0; j < PROJ; j++) {
        const double d = fabs(p[j] - (double)want[j]);
        if (!(d <= e)) e = d;
    }
    return e / (sqrt((double)n) * (double)max);
}

/* ---- what is compared ---- */

/* A difference is a near tie if the oracle's own gap is below NEAR_GAP; it is listed. */
static bool near_tie(fixture *f, const char *what, int layer, int64_t at, double gap)
{
    if (!(gap > 0 && gap < NEAR_GAP)) return false;
    if (record_verbose)
        printf("%-10s %-6s near tie: %s of layer %d, position %lld, gap %.1e\n", f->m->name, f->mode, what, layer,
               (long long)at, gap);
    f->near++;
    return true;
}

static double flips(const fixture *f) { return strcmp(f->mode, "sim") == 0 ? f->m->flips : 0; }

/* Judges differing choices; in sim the model's share of flips is forgiven. */
static void judge_choices(const fixture *f, const char *what, int64_t compared, int64_t wrong, int64_t near)
{
    const bool forgiven = wrong > 0 && (double)wrong <= flips(f) / 100 * (double)compared;
    counts_judge(f->m->name, f->mode, what, compared, forgiven ? 0 : wrong, near + (forgiven ? wrong : 0));
}

static void compare_logits(fixture *f, const float *lg, double median_gate, double gate)
{
    const int V = f->net->cfg.vocab;
    errors e = {0}, p = {0};
    const float *want = golden_f32(f->g, named(f, "logits"), NULL);
    for (int i = 0; i < f->n_pos; i++)
        errors_add(&e, row_error(lg + (int64_t)f->pos[i] * V, want + (int64_t)i * V, (size_t)V));
    errors_judge_loose(&e, f->m->name, f->mode, "logits", median_gate, gate, 4 * flips(f), FLIP_WORST);
    if (golden_has(f->g, named(f, "logits.proj"))) {
        const float *proj = golden_f32(f->g, named(f, "logits.proj"), NULL),
                    *max = golden_f32(f->g, named(f, "logits.max"), NULL);
        for (int t = 0; t < f->T; t++)
            errors_add(&p, projection_error(lg + (int64_t)t * V, (size_t)V, proj + t * PROJ, max[t]));
        errors_judge_loose(&p, f->m->name, f->mode, "logits, projected", median_gate, gate, flips(f), FLIP_WORST);
    }
    const int32_t *top = golden_i32(f->g, named(f, "argmax"), NULL);
    const float *gap = golden_f32(f->g, named(f, "argmax_gap"), NULL);
    int64_t wrong = 0, near = 0;
    for (int t = 0; t < f->T; t++) {
        const float *v = lg + (int64_t)t * V;
        int a = 0;
        for (int i = 1; i < V; i++)
            if (v[i] > v[a]) a = i;
        if (a == top[t]) continue;
        if (near_tie(f, "argmax", -1, t, (double)gap[t]))
            near++;
        else
            wrong++;
    }
    judge_choices(f, "argmax", f->T, wrong, near);
}

static void compare_streams(const fixture *f)
{
    const aff_config *c = &f->net->cfg;
    const size_t width = (size_t)c->hc * (size_t)c->hidden, H = (size_t)c->hidden;
    errors x = {0}, p = {0}, a = {0}, o = {0};
    for (int l = 0; l < c->layers; l++) {
        char name[32];
        snprintf(name, sizeof name, "x.%d", l);
        if (golden_has(f->g, name)) {
            const float *want = golden_f32(f->g, name, NULL);
            for (int i = 0; i < f->n_pos; i++)
                errors_add(&x, row_error(record_row(f->rec, "x", l, f->pos[i]), want + (size_t)i * width, width));
        }
        snprintf(name, sizeof name, "x.%d.proj", l);
        if (golden_has(f->g, name)) {
            const float *proj = golden_f32(f->g, name, NULL);
            snprintf(name, sizeof name, "x.%d.max", l);
            const float *max = golden_f32(f->g, name, NULL);
            for (int t = 0; t < f->T; t++)
                errors_add(&p, projection_error(record_row(f->rec, "x", l, t), width, proj + t * PROJ, max[t]));
        }
        for (int k = 0; k < 2; k++) {
            const char *what = k ? "ffn_out" : "attn_out";
            size_t n;
            snprintf(name, sizeof name, "%s.%d", what, l);
            if (!golden_has(f->g, name)) continue;
            const float *want = golden_f32(f->g, name, &n);
            const int step = (size_t)f->n_pos * H == n ? 1 : 2; /* every entry of pos, or every second one */
            assert_int_equal(n, (size_t)(f->n_pos / step) * H);
            for (int i = 0; i < f->n_pos; i += step)
                errors_add(k ? &o : &a,
                           row_error(record_row(f->rec, what, l, f->pos[i]), want + (size_t)(i / step) * H, H));
        }
    }
    if (x.n) errors_judge(&x, f->m->name, f->mode, "streams", STREAMS, STREAMS);
    if (p.n) errors_judge(&p, f->m->name, f->mode, "streams, projected", STREAMS, STREAMS);
    if (a.n) errors_judge(&a, f->m->name, f->mode, "attention out", STREAMS, STREAMS);
    if (o.n) errors_judge(&o, f->m->name, f->mode, "MoE out", STREAMS, STREAMS);
}

static void sorted(const int32_t *in, int n, int32_t *out)
{
    for (int i = 0; i < n; i++) {
        int k = i;
        for (; k > 0 && out[k - 1] > in[i]; k--) out[k] = out[k - 1];
        out[k] = in[i];
    }
}

/* router_weights come in the order of ascending experts; the engine's in the order of choice. */
static void compare_weights(const fixture *f)
{
    const aff_config *c = &f->net->cfg;
    const int K = c->picks;
    if (!golden_has(f->g, "router_weights")) return;
    const float *want = golden_f32(f->g, "router_weights", NULL);
    errors e = {0};
    for (int l = 0; l < c->layers; l++)
        for (int i = 0; i < f->n_pos; i++) {
            const int32_t *id = record_ids(f->rec, "router_ids", l, f->pos[i]);
            const float *w = record_row(f->rec, "router_weights", l, f->pos[i]);
            int32_t order[64];
            float got[64];
            sorted(id, K, order);
            for (int k = 0; k < K; k++)
                for (int j = 0; j < K; j++)
                    if (id[j] == order[k]) got[k] = w[j];
            errors_add(&e, row_error(got, want + ((int64_t)l * f->n_pos + i) * K, (size_t)K));
        }
    errors_judge(&e, f->m->name, f->mode, "router weights", STREAMS, STREAMS);
}

static void compare_picks(fixture *f)
{
    const aff_config *c = &f->net->cfg;
    size_t n;
    int32_t *want = golden_ints(f->g, named(f, "router_ids"), &n);
    const float *gap = golden_f32(f->g, named(f, "router_gap"), NULL);
    int64_t wrong = 0, near = 0;
    assert_int_equal(n, (size_t)c->layers * (size_t)f->T * (size_t)c->picks);
    for (int l = 0; l < c->layers; l++)
        for (int t = 0; t < f->T; t++) {
            const int64_t at = (int64_t)l * f->T + t;
            if (same_set(want + at * c->picks, record_ids(f->rec, "router_ids", l, t), c->picks)) continue;
            if (near_tie(f, "router picks", l, t, (double)gap[at]))
                near++;
            else
                wrong++;
        }
    judge_choices(f, "router ids", (int64_t)c->layers * f->T, wrong, near);
    free(want);
}

static void compare_selections(fixture *f)
{
    const aff_config *c = &f->net->cfg;
    int64_t wrong = 0, near = 0, compared = 0;
    for (int l = 0; l < c->layers; l++) {
        char name[32];
        if (c->ratio[l] != 4) continue;
        snprintf(name, sizeof name, "sel.%d", l);
        int32_t *want = golden_ints(f->g, named(f, name), NULL);
        snprintf(name, sizeof name, "sel_gap.%d", l);
        const float *gap = golden_f32(f->g, named(f, name), NULL);
        for (int t = 3; t < f->T; t++) {
            compared++;
            if (!memcmp(want + (int64_t)t * c->index_topk, record_ids(f->rec, "sel", l, t),
                        (size_t)c->index_topk * sizeof *want))
                continue;
            if (near_tie(f, "selection", l, t, (double)gap[t]))
                near++;
            else
                wrong++;
        }
        free(want);
    }
    judge_choices(f, "selections", compared, wrong, near);
}

/* The whole sequence in one call from position 0. */
static void trunk(const model *m, aff_numerics num)
{
    fixture f = setup(m, num, false);
    float *lg = malloc(sizeof(float) * (size_t)f.T * (size_t)f.net->cfg.vocab);
    assert_non_null(lg);
    run(&f, f.T, lg);
    compare_logits(&f, lg, num == AFF_MATH ? LOGITS : SIM_MEDIAN, num == AFF_MATH ? LOGITS : SIM_WORST);
    compare_picks(&f);
    compare_selections(&f);
    if (num == AFF_MATH) {
        compare_streams(&f);
        compare_weights(&f);
    }
    free(lg);
    teardown(&f);
}

/* ---- draft blocks ---- */

typedef struct draft_golden {
    char mode[8];
    const aff_ckpt *g;
} draft_golden;

static const char *draft_name(const draft_golden *d, const char *suffix)
{
    static char name[64];
    snprintf(name, sizeof name, "%s.draft.%s", d->mode, suffix);
    return name;
}

static void drafts(const model *m, aff_numerics num)
{
    fixture f = setup(m, num, true);
    const aff_config *c = &f.net->cfg;
    draft_golden d = {.g = f.g};
    snprintf(d.mode, sizeof d.mode, "%s", f.mode);
    const size_t B = (size_t)c->draft_block, V = (size_t)c->vocab, H = (size_t)c->hidden, D = (size_t)c->head_dim,
                 S = (size_t)f.net->stages, K = (size_t)c->picks;
    const double logit_gate = num == AFF_MATH ? LOGITS : SIM_WORST, gate = num == AFF_MATH ? STREAMS : SIM_WORST,
                 mid = num == AFF_MATH ? STREAMS : SIM_MEDIAN;
    size_t blocks;
    const int32_t *n = golden_i32(f.g, draft_name(&d, "n"), &blocks),
                  *in = golden_i32(f.g, draft_name(&d, "in_ids"), NULL);
    const int32_t *want = golden_i32(f.g, draft_name(&d, "ids"), NULL);
    int32_t *router = golden_ints(f.g, draft_name(&d, "router_ids"), NULL), ids[64];
    const float *proj = golden_f32(f.g, draft_name(&d, "logits.proj"), NULL),
                *max = golden_f32(f.g, draft_name(&d, "logits.max"), NULL);
    const float *conf = golden_f32(f.g, draft_name(&d, "conf"), NULL),
                *mx = golden_f32(f.g, draft_name(&d, "mx"), NULL);
    const float *seed = golden_f32(f.g, draft_name(&d, "seed_row"), NULL),
                *h = golden_f32(f.g, draft_name(&d, "h"), NULL);
    const float *rgap = golden_f32(f.g, draft_name(&d, "router_gap"), NULL),
                *gap = golden_f32(f.g, draft_name(&d, "gap"), NULL);
    errors lp = {0}, whole = {0}, x = {0}, cf = {0}, em = {0}, es = {0}, eh = {0};
    int64_t wrong = 0, picks = 0, picks_wrong = 0, slots = 0;
    float *lg = malloc(sizeof(float) * B * V), got[64];
    aff_error err = {0};
    for (size_t i = 0; i < blocks; i++) {
        const int64_t P = n[i];
        run(&f, P, NULL);
        errors_add(&em, row_error(record_row(f.rec, "mx", 0, P - 1), mx + i * H, H));
        for (size_t s = 0; s < S; s++)
            errors_add(&es, row_error(record_row(f.rec, "seed", (int)s, P - 1), seed + (i * S + s) * D, D));
        must(aff__draft_block(f.r, f.seq, in[i * B], ids, got, lg, record_trace, f.rec, &err), &err);
        for (size_t b = 0; b < B; b++) {
            slots++;
            if (ids[b] != want[i * B + b]) { /* the rest of the block is meaningless */
                if (!near_tie(&f, "proposal", (int)b, P, (double)gap[i * B + b])) wrong++;
                break;
            }
            errors_add(&lp, projection_error(lg + b * V, V, proj + (i * B + b) * PROJ, max[i * B + b]));
            errors_add(&cf, fabs((double)got[b] - (double)conf[i * B + b]));
            errors_add(&eh, row_error(record_row(f.rec, "h", 0, P + (int64_t)b), h + (i * B + b) * H, H));
            for (size_t s = 0; s < S; s++) {
                const size_t at = (i * S + s) * B + b;
                picks++;
                picks_wrong +=
                    !same_set(record_ids(f.rec, "router_ids", (int)s, P + (int64_t)b), router + at * K, (int)K) &&
                    !((double)rgap[at] < 1e-5);
            }
            if (i + 1 < blocks) continue;
            errors_add(&whole, row_error(lg + b * V, golden_f32(f.g, draft_name(&d, "last_logits"), NULL) + b * V, V));
            for (size_t s = 0; s < S; s++)
                errors_add(&x,
                           row_error(record_row(f.rec, "x", (int)s, P + (int64_t)b),
                                     golden_f32(f.g, draft_name(&d, "last_x"), NULL) + (s * B + b) * (size_t)c->hc * H,
                                     (size_t)c->hc * H));
        }
    }
    errors_judge(&lp, m->name, f.mode, "draft logits, projected", logit_gate, logit_gate);
    errors_judge(&whole, m->name, f.mode, "draft logits", logit_gate, logit_gate);
    errors_judge(&x, m->name, f.mode, "draft streams", mid, gate);
    errors_judge(&eh, m->name, f.mode, "draft h", mid, gate);
    errors_judge(&em, m->name, f.mode, "draft mx", mid, gate);
    errors_judge_loose(&es, m->name, f.mode, "draft seed rows", mid, gate, num == AFF_MATH ? 0 : 20, 1.0 / 14);
    errors_judge(&cf, m->name, f.mode, "draft confidence (abs)", num == AFF_MATH ? 1e-3 : 3e-2,
                 num == AFF_MATH ? 1e-3 : 3e-2);
    counts_judge(m->name, f.mode, "draft proposals", slots, wrong, 0);
    counts_judge(m->name, f.mode, "draft router ids", picks, picks_wrong, 0);
    free(router);
    free(lg);
    teardown(&f);
}

/* ---- */

static void rope_tables(const model *m)
{
    fixture f = setup(m, AFF_MATH, false);
    const size_t bytes = (size_t)f.net->rope.pairs * sizeof(float);
    errors e = {0};
    for (int k = 0; k < 2; k++) {
        const float *want = golden_f32(f.g, k ? "rope.freq_yarn" : "rope.freq_base", NULL),
                    *got = k ? f.net->rope_compressed.freq : f.net->rope.freq;
        for (size_t i = 0; i < bytes / sizeof(float); i++) errors_add(&e, fabs((double)got[i] / (double)want[i] - 1));
    }
    errors_judge(&e, m->name, "math", "rope frequencies", 1.2e-7, 1.2e-7); /* one unit in the last place */
    teardown(&f);
}

static void test_model(void **state)
{
    const model *m = *state;
    rope_tables(m);
    trunk(m, AFF_MATH);
    aff_ckpt *g;
    char name[64];
    snprintf(name, sizeof name, "%s.safetensors", m->name);
    g = golden_open(name);
    const bool math_draft = golden_has(g, "math.draft.n"), sim_draft = golden_has(g, "sim.draft.n"),
               sim = golden_has(g, "sim.logits");
    aff__ckpt_close(g);
    if (math_draft) drafts(m, AFF_MATH);
    if (sim) trunk(m, AFF_SIM);
    if (sim_draft) drafts(m, AFF_SIM);
}

static int make_root(void **state)
{
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    char cmd[sizeof root + 16];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    free(signs);
    return system(cmd);
}

int main(int argc, char **argv)
{
    record_arguments(argc, argv);
    struct CMUnitTest tests[MODELS];
    for (int i = 0; i < MODELS; i++)
        tests[i] = (struct CMUnitTest){
            .name = models[i].name, .test_func = test_model, .initial_state = (void *)(uintptr_t)&models[i]};
    return _cmocka_run_group_tests("golden_hf", tests, MODELS, make_root, remove_root);
}
