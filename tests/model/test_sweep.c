/* model/sweep and engine/collect: layer by layer gives the bits of the forward pass, watched or not; the importance
 * matrix is what an independent sum over traced activations and decoded weights gives. */
#define _GNU_SOURCE
#include "support/test.h"
#include "base/mem.h"
#include "engine/collect.h"
#include "engine/compare.h"
#include "format/gguf.h"
#include "format/safetensors.h"
#include "model/forward.h"
#include "quant/imatrix.h"
#include "quant/expert.h"
#include "support/record.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N = 83, CHUNK = 30 }; /* 30, 30 and 23 rows */
static const char *const ckpt = AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark";
static aff_error err;
static int32_t ids[N];

static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static int setup(void **state)
{
    for (int i = 0; i < N; i++) ids[i] = (i * i * 7 + i * 3 + 2) % 256;
    return 0;
}

static aff_net *open_net(aff_numerics num)
{
    aff_net *net;
    must(aff__net_open(&net, ckpt, &(aff_net_options){.numerics = num}, &err));
    return net;
}

/* Logits of all rows by the forward pass, a fresh sequence per chunk; NULL or a record per chunk. */
static float *forward_logits(const aff_net *net, const int32_t *rows, record **rec)
{
    const int vocab = aff__net_config(net)->vocab;
    float *l = malloc((size_t)N * (size_t)vocab * sizeof *l);
    aff_runner *r;
    aff_seq *seq;
    assert_non_null(l);
    must(aff__runner_create(&r, net, 2, &err));
    must(aff__seq_create(&seq, net, CHUNK, &err));
    for (int at = 0; at < N; at += CHUNK) {
        const int n = N - at < CHUNK ? N - at : CHUNK;
        const aff_batch b = {.n = n,
                             .id = rows + at,
                             .seq = seq,
                             .logits = l + (size_t)at * (size_t)vocab,
                             .trace = rec ? record_trace : NULL,
                             .trace_ctx = rec ? rec[at / CHUNK] : NULL};
        aff__seq_reset(seq);
        must(aff__forward(r, &b, &err));
    }
    aff__seq_free(seq);
    aff__runner_free(r);
    return l;
}

static int watched;
static void count_entries(void *ctx, int layer, const aff_moe_plan *plan, const float *x)
{
    watched += plan->n_entries;
}

static void same_bits(void **state)
{
    for (int num = AFF_MATH; num <= AFF_FAST; num++) {
        aff_net *net = open_net((aff_numerics)num);
        const int vocab = aff__net_config(net)->vocab;
        float *want = forward_logits(net, ids, NULL), *got = malloc((size_t)N * (size_t)vocab * sizeof *got);
        assert_non_null(got);
        static const struct {
            int pass, threads, rows;
            bool watch;
        } ways[] = {{0, 2, N, false}, {7, 1, N, true}, {0, 3, 2 * CHUNK, true}, {1, 1, CHUNK, false}};
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) {
            aff_sweep *s;
            watched = 0;
            const aff_sweep_options o = {.threads = ways[k].threads,
                                         .chunk = CHUNK,
                                         .rows = ways[k].rows,
                                         .pass = ways[k].pass,
                                         .watch = ways[k].watch ? count_entries : NULL};
            must(aff__sweep_create(&s, net, &o, &err));
            for (int at = 0; at < N; at += ways[k].rows) {
                const int n = N - at < ways[k].rows ? N - at : ways[k].rows;
                must(aff__sweep_run(s, ids + at, n, &err));
                must(aff__sweep_logits(s, 3, n - 3, got + (size_t)(at + 3) * (size_t)vocab, &err));
                must(aff__sweep_logits(s, 0, 3, got + (size_t)at * (size_t)vocab, &err));
            }
            if (memcmp(got, want, (size_t)N * (size_t)vocab * sizeof *got) != 0)
                fail_msg("numerics %d, way %zu: other bits", num, k);
            assert_int_equal(watched, ways[k].watch ? N * aff__net_config(net)->picks * aff__net_layers(net) : 0);
            aff__sweep_free(s);
        }
        free(want);
        free(got);
        aff__net_close(net);
    }
}

static bool stop_at_two(void *ctx, int layer, int layers)
{
    assert_int_equal(layers, 3);
    return layer < 2;
}

static void refusals(void **state)
{
    aff_net *net = open_net(AFF_FAST);
    aff_sweep *s;
    const int32_t bad[2] = {5, 256};
    float l[256];
    assert_int_equal(aff__sweep_create(&s, net, &(aff_sweep_options){.chunk = 0, .rows = 1}, &err), AFF_E_INVALID);
    assert_int_equal(aff__sweep_create(&s, net, &(aff_sweep_options){.chunk = 4097, .rows = 1}, &err), AFF_E_INVALID);
    assert_int_equal(
        aff__sweep_create(&s, net, &(aff_sweep_options){.chunk = 1, .rows = 1, .pass = AFF_MAX_CHUNK + 1}, &err),
        AFF_E_INVALID);
    must(aff__sweep_create(&s, net, &(aff_sweep_options){.chunk = 8, .rows = 16, .progress = stop_at_two}, &err));
    assert_int_equal(aff__sweep_run(s, ids, 17, &err), AFF_E_INVALID);
    assert_int_equal(aff__sweep_run(s, bad, 2, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "256"));
    assert_int_equal(aff__sweep_run(s, ids, 16, &err), AFF_E_CANCELLED);
    assert_int_equal(aff__sweep_logits(s, 0, 1, l, &err), AFF_E_INVALID); /* nothing has run */
    aff__sweep_free(s);
    aff__net_close(net);
}

static void fingerprints(void **state)
{
    uint64_t a, b, c;
    aff_net *x = open_net(AFF_FAST), *y = open_net(AFF_MATH), *z;
    must(aff__net_open(&z, AFF_TESTS_DIR "/golden/v4-sim/ckpt-mtp1", &(aff_net_options){.numerics = AFF_FAST}, &err));
    must(aff__net_fingerprint(x, &a, &err));
    must(aff__net_fingerprint(y, &b, &err));
    must(aff__net_fingerprint(z, &c, &err));
    assert_true(a == b); /* of the weights, not of the arithmetic */
    assert_true(a != c);
    aff__net_close(x);
    aff__net_close(y);
    aff__net_close(z);
}

/* ---- the importance matrix ---- */

typedef struct weights {
    float *w[3]; /* w1, w3 [inter][hidden], w2 [hidden][inter] */
} weights;

static weights expert(const aff_ckpt *c, int layer, int e)
{
    weights x;
    for (int i = 0; i < 3; i++) {
        static const char *const part[] = {"w1", "w3", "w2"};
        char name[96];
        snprintf(name, sizeof name, "layers.%d.ffn.experts.%d.%s.weight", layer, e, part[i]);
        const aff_st_tensor *t = aff__ckpt_find(c, name);
        snprintf(name, sizeof name, "layers.%d.ffn.experts.%d.%s.scale", layer, e, part[i]);
        const aff_st_tensor *s = aff__ckpt_find(c, name);
        assert_non_null(t);
        assert_non_null(s);
        const aff_mxfp4 m = {t->data, s->data, t->shape[0], t->shape[1] * 2};
        x.w[i] = malloc((size_t)(m.rows * m.cols) * sizeof(float));
        assert_non_null(x.w[i]);
        must(aff__mxfp4_decode(&m, x.w[i], &err));
    }
    return x;
}

/* h[j]^2 of one row added to sum, in double: silu(min(w1 x, L)) clamp(w3 x, L) times the router's weight. */
static void add_h(const weights *x, const float *in, double weight, double limit, int hidden, int inter, double *sum)
{
    for (int j = 0; j < inter; j++) {
        double a = 0, b = 0;
        for (int k = 0; k < hidden; k++) {
            a += (double)x->w[0][j * hidden + k] * (double)in[k];
            b += (double)x->w[1][j * hidden + k] * (double)in[k];
        }
        a = a > limit ? limit : a;
        b = b > limit ? limit : b < -limit ? -limit : b;
        const double h = a / (1 + exp(-a)) * b * weight;
        sum[j] += h * h;
    }
}

/* Sums of one (layer, expert) from the traces of all chunks. */
static int64_t independent(record **rec, const aff_net *net, const weights *x, int layer, int e, double *sx, double *sh)
{
    const aff_config *g = aff__net_config(net);
    int64_t count = 0;
    memset(sx, 0, (size_t)g->hidden * sizeof *sx);
    memset(sh, 0, (size_t)g->inter * sizeof *sh);
    for (int i = 0; i < N; i++) {
        const record *r = rec[i / CHUNK];
        const int32_t *picks = record_ids(r, "router_ids", layer, i % CHUNK);
        for (int k = 0; k < g->picks; k++) {
            if (picks[k] != e) continue;
            const float *in = record_row(r, "ffn_in", layer, i % CHUNK);
            for (int j = 0; j < g->hidden; j++) sx[j] += (double)in[j] * (double)in[j];
            add_h(x, in, (double)record_row(r, "router_weights", layer, i % CHUNK)[k], (double)g->swiglu_limit,
                  g->hidden, g->inter, sh);
            count++;
        }
    }
    return count;
}

static float f32_at(const aff_gguf_tensor *t, uint64_t i)
{
    float f;
    memcpy(&f, t->data + 4 * i, 4);
    return f;
}

static const aff_gguf_tensor *tensor(const aff_gguf *g, int layer, const char *part, const char *what)
{
    char name[96];
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.%s", layer, part, what);
    const aff_gguf_tensor *t = aff__gguf_find(g, name);
    if (!t) fail_msg("'%s' is missing", name);
    return t;
}

static double moment(const aff_gguf_tensor *t, int n, int of, int i, int j)
{
    return (double)f32_at(t, (uint64_t)of * (uint64_t)(n * (n + 1) / 2) + (uint64_t)(i * n - i * (i - 1) / 2 + j - i));
}

/* Second moments against the sums of squares, which are checked above: every row counts once for gate and up, so the diagonal
 * times the picks is the sum over the experts; and a moment is at most the root of the product of two squares. */
static void check_moments(const aff_gguf *f, const aff_config *g, int l)
{
    const aff_gguf_tensor *x2 = tensor(f, l, "gate", "in_sum2"), *h2 = tensor(f, l, "down", "in_sum2");
    const aff_gguf_tensor *xx = tensor(f, l, "gate", "in_cov"), *hh = tensor(f, l, "down", "in_cov");
    const int H = g->hidden, I = g->inter, E = g->experts;
    assert_int_equal(xx->dims[0], H * (H + 1) / 2);
    assert_int_equal(xx->dims[1], 1);
    assert_int_equal(hh->dims[0], I * (I + 1) / 2);
    assert_int_equal(hh->dims[1], E);
    double off = 0;
    for (int i = 0; i < H; i++) {
        double all = 0;
        for (int e = 0; e < E; e++) all += (double)f32_at(x2, (uint64_t)(e * H + i));
        assert_true(fabs(moment(xx, H, 0, i, i) * g->picks - all) <= 1e-5 * all);
        for (int j = i; j < H; j++) {
            const double both = sqrt(moment(xx, H, 0, i, i) * moment(xx, H, 0, j, j));
            assert_true(fabs(moment(xx, H, 0, i, j)) <= both * (1 + 1e-5));
            if (j > i) off += fabs(moment(xx, H, 0, i, j)) / both;
        }
    }
    assert_true(off > 0); /* not only a diagonal */
    for (int e = 0; e < E; e++)
        for (int i = 0; i < I; i++) {
            const double want = (double)f32_at(h2, (uint64_t)(e * I + i));
            assert_true(fabs(moment(hh, I, e, i, i) - want) <= 1e-5 * want);
        }
}

/* tolerance 0: the sums of x are the same additions. h is float32 in the engine; in `fast` its products are of rounded
 * activations. */
static void check_file(const char *path, const aff_net *net, record **rec, double h_tolerance)
{
    const aff_config *g = aff__net_config(net);
    aff_gguf *f;
    aff_ckpt *c;
    double *sx = malloc((size_t)g->hidden * sizeof *sx), *sh = malloc((size_t)g->inter * sizeof *sh);
    assert_true(sx && sh);
    must(aff__gguf_open(&f, path, &err));
    must(aff__ckpt_open(&c, ckpt, &err));
    for (int l = 0; l < aff__net_layers(net); l++)
        for (int e = 0; e < g->experts; e++) {
            weights w = expert(c, l, e);
            const int64_t n = independent(rec, net, &w, l, e, sx, sh);
            double worst = 0, norm = 0;
            for (int p = 0; p < 3; p++) {
                static const char *const part[] = {"gate", "up", "down"};
                const aff_gguf_tensor *s = tensor(f, l, part[p], "in_sum2"), *k = tensor(f, l, part[p], "counts");
                const int cols = p == 2 ? g->inter : g->hidden;
                assert_int_equal(s->dims[0], cols);
                assert_int_equal(s->dims[1], g->experts);
                assert_int_equal(k->dims[0], 1);
                assert_int_equal(k->dims[1], g->experts);
                assert_true(f32_at(k, (uint64_t)e) == (float)n);
                for (int j = 0; j < cols; j++) {
                    const float got = f32_at(s, (uint64_t)e * (uint64_t)cols + (uint64_t)j);
                    if (p < 2) assert_true(got == (float)sx[j]);
                    if (p == 2) worst = fmax(worst, fabs((double)got - sh[j])), norm = fmax(norm, sh[j]);
                }
            }
            if (!(worst <= h_tolerance * norm))
                fail_msg("layer %d expert %d: sums of h are off by %g of %g", l, e, worst, norm);
            for (int i = 0; i < 3; i++) free(w.w[i]);
        }
    for (int l = 0; l < aff__net_layers(net); l++) check_moments(f, g, l);
    free(sx);
    free(sh);
    aff__ckpt_close(c);
    aff__gguf_close(f);
}

static void importance(void **state)
{
    char dir[] = "/tmp/aff_collect_XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/own.gguf", dir);
    for (int num = AFF_MATH; num <= AFF_FAST; num += AFF_FAST - AFF_MATH) {
        aff_net *net = open_net((aff_numerics)num);
        const aff_config *g = aff__net_config(net);
        record *rec[3];
        int32_t *rows;
        for (int i = 0; i < 3; i++) rec[i] = record_new(CHUNK, g->index_topk);
        must(aff__text_rows(ids, N, CHUNK, 9, &rows, &err));
        for (int i = 0; i < N; i++) assert_int_equal(rows[i], i % CHUNK ? ids[i - 1] : 9);
        free(forward_logits(net, rows, rec));
        aff_collected out;
        /* memory 1: one sequence at a time; plenty: all at once */
        for (int k = 0; k < 2; k++) {
            const aff_collect c = {.net = net,
                                   .id = ids,
                                   .n = N,
                                   .chunk = CHUNK,
                                   .bos = 9,
                                   .threads = 1 + k,
                                   .memory = k ? 1 << 30 : 1,
                                   .dataset = "text"};
            must(aff__collect_imatrix(&c, path, &out, &err));
            check_file(path, net, rec, num == AFF_MATH ? 1e-5 : 0.05);
            assert_int_equal(out.pairs, g->layers * g->experts);
        }
        /* It is an importance matrix for this model, and for no other. */
        aff_im_shape shape = {(uint32_t)g->layers, (uint32_t)g->experts, (uint64_t)g->hidden, (uint64_t)g->inter};
        aff_imatrix *m;
        must(aff__imatrix_open(&m, path, &shape, &err));
        const aff_im_info *info = aff__imatrix_info(m);
        assert_int_equal(info->present, 3 * g->layers);
        assert_int_equal(info->unseen, out.unseen);
        double total = 0;
        for (int i = 0; i < g->experts; i++) total += (double)aff__imatrix_profile(m)[i];
        assert_true(total == (double)N * g->picks);
        aff__imatrix_close(m);
        shape.inter *= 2;
        assert_int_equal(aff__imatrix_open(&m, path, &shape, &err), AFF_E_FORMAT);
        for (int i = 0; i < 3; i++) record_free(rec[i]);
        free(rows);
        aff__net_close(net);
        unlink(path);
    }
    assert_int_equal(rmdir(dir), 0); /* nothing else is left */
}

/* ---- comparison ---- */

static void comparison(void **state)
{
    aff_net *fast = open_net(AFF_FAST), *sim = open_net(AFF_SIM);
    const int vocab = aff__net_config(fast)->vocab;
    aff_eval_row a[N], b[N];
    aff_compare c = {.model = {.net = fast, .threads = 1},
                     .ref = {.net = sim, .threads = 2},
                     .id = ids,
                     .n = N,
                     .chunk = CHUNK,
                     .bos = 9,
                     .memory = 1};
    must(aff__compare(&c, a, &err));
    c.memory = 1 << 30; /* in one wave, in other passes, on another path */
    c.model.pass = 11;
    c.model.capped = true;
    c.model.level = AFF_CPU_SCALAR;
    must(aff__compare(&c, b, &err));
    for (int i = 0; i < N; i++)
        if (memcmp(&a[i].nll, &b[i].nll, 3 * sizeof(double)) != 0) fail_msg("position %d differs", i);
    /* Against figures from whole rows of logits. */
    int32_t *rows;
    must(aff__text_rows(ids, N, CHUNK, 9, &rows, &err));
    float *lf = forward_logits(fast, rows, NULL), *ls = forward_logits(sim, rows, NULL);
    for (int i = 0; i < N; i++) {
        aff_eval_ref r;
        aff_eval_row want;
        must(aff__eval_full(ls + i * vocab, vocab, ids[i], &r, &err));
        must(aff__eval_compare(&r, lf + i * vocab, vocab, ids[i], NULL, &want, &err));
        assert_true(want.kl == a[i].kl && want.nll == a[i].nll && want.ref_nll == a[i].ref_nll && want.top == a[i].top);
    }
    c.ref = c.model = (aff_compare_side){.net = fast, .threads = 1};
    c.ref.pass = 1;
    must(aff__compare(&c, b, &err));
    for (int i = 0; i < N; i++) assert_true(b[i].kl == 0 && b[i].nll == b[i].ref_nll && b[i].nll == a[i].nll);
    c.n = 0;
    assert_int_equal(aff__compare(&c, b, &err), AFF_E_INVALID);
    free(lf);
    free(ls);
    free(rows);
    aff__net_close(fast);
    aff__net_close(sim);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),  cmocka_unit_test(refusals),   cmocka_unit_test(fingerprints),
        cmocka_unit_test(importance), cmocka_unit_test(comparison),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
