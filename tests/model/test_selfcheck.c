/* The engine against itself (spec model-v4 16.2): chunking, rejections and reuse must not change a bit of logits or
 * state. Without arguments a selection; --full runs the matrix of scripts/checks/selfcheck, --only NAME one test of it, --pick N one configuration,
 * -v prints a line per configuration. */
#include "base/cpu.h"
#include "base/rng.h"
#include "model/net_internal.h"
#include "model/forward.h"
#include "state/seq_internal.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct range {
    int lo, hi;
} range;
/* index_topk is 16: at position 64 the indexer begins to choose. */
static const range TINY[] = {{1, 5}, {64, 65}, {0, 0}}, SHORT[] = {{1, 9}, {17, 17}, {64, 66}, {0, 0}},
                   ALL[] = {{1, 9}, {62, 70}, {126, 130}, {254, 262}, {510, 518}, {2046, 2054}, {0, 0}};

typedef struct config {
    const char *model;
    int experts; /* an aff_dtype: AFF_MXFP4 is the checkpoint itself */
    aff_numerics num;
    int threads;
    aff_cpu_level level;
    const range *lengths;
    bool steps_only; /* just the reference: its hash is what is wanted */
} config;

static const char *const num_name[] = {"math", "sim", "fast"};
static bool verbose, full;
static int pick = -1; /* --pick N: configuration N of the matrix alone */
static char root[] = "/tmp/aff-selfcheck-XXXXXX";
enum { CAPACITY = 2304, TAIL = 14, VOCAB = 512, DRAFT = 5 };

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* ---- states ---- */

/* Rows of a ring that holds position p in slot p mod size, at positions lo .. hi-1. */
static void same_ring(const char *what, int layer, const void *va, const void *vb, int size, int width, int64_t lo,
                      int64_t hi)
{
    const uint8_t *a = va, *b = vb;
    for (int64_t p = lo < 0 ? 0 : lo; p < hi; p++)
        if (memcmp(a + p % size * width, b + p % size * width, (size_t)width))
            fail_msg("%s of layer %d differs at position %lld (of %lld)", what, layer, (long long)p, (long long)hi);
}

static void same_rows(const char *what, int layer, const void *va, const void *vb, int64_t rows, int width)
{
    const uint8_t *a = va, *b = vb;
    for (int64_t g = 0; g < rows; g++)
        if (memcmp(a + g * width, b + g * width, (size_t)width))
            fail_msg("%s of layer %d differs at row %lld of %lld", what, layer, (long long)g, (long long)rows);
}

/* All of the state that the future can depend on. */
static void same_state(const aff_seq *a, const aff_seq *b)
{
    const aff_config *c = aff__net_config(a->net);
    const int64_t P = a->pos;
    assert_int_equal(a->pos, b->pos);
    for (int l = 0; l < a->n_layers + a->n_stages; l++) {
        const bool stage = l >= a->n_layers;
        const aff_layer_state *s = stage ? &a->stage[l - a->n_layers] : &a->layer[l],
                              *t = stage ? &b->stage[l - a->n_layers] : &b->layer[l];
        const int ratio = stage ? 0 : c->ratio[l], coff = ratio == 4 ? 2 : 1;
        same_ring(stage ? "draft ring" : "raw ring", l, s->raw, t->raw, s->raw_size, s->row->bytes, P - c->window, P);
        if (!ratio) continue;
        const int64_t back = (P / ratio - (coff - 1)) * ratio; /* the open group and, with overlap, the one before */
        same_rows("compressed rows", l, s->comp, t->comp, P / ratio, s->row->bytes);
        same_ring("history c", l, s->hist_c, t->hist_c, s->hist_size, coff * c->head_dim * 4, back, P);
        same_ring("history z", l, s->hist_z, t->hist_z, s->hist_size, coff * c->head_dim * 4, back, P);
        if (ratio != 4) continue;
        same_rows("indexer keys", l, s->ikey, t->ikey, P / ratio, s->key->bytes);
        same_ring("indexer history c", l, s->ihist_c, t->ihist_c, s->hist_size, 2 * c->index_dim * 4, back, P);
        same_ring("indexer history z", l, s->ihist_z, t->ihist_z, s->hist_size, 2 * c->index_dim * 4, back, P);
    }
}

static void clone(aff_seq *to, const aff_seq *from)
{
    assert_int_equal(to->region_size, from->region_size);
    assert_int_equal(to->backed, from->backed);
    memcpy(to->region, from->region, (size_t)from->fixed_size);
    for (int i = 0; i < from->n_spans; i++)
        memcpy((char *)to->region + from->span[i].off, (const char *)from->region + from->span[i].off,
               (size_t)from->span[i].row_bytes * (size_t)(from->backed / from->span[i].ratio));
    to->pos = from->pos;
    to->high = from->high;
}

/* ---- one configuration ---- */

typedef struct bench {
    const config *c;
    aff_net *net;
    aff_runner *r;
    aff_seq *walk, *a, *b, *c1, *c2; /* walk: single steps, the reference */
    int32_t ids[CAPACITY];
    float *logits; /* [CAPACITY][VOCAB] of the walk */
    float *buf;    /* the same size, for whatever is checked */
    uint64_t seed;
    int64_t checks;
} bench;

static int below(bench *t, int n)
{
    return (int)(aff__splitmix64(&t->seed) % (uint64_t)n);
}

static void run(bench *t, aff_seq *s, const int32_t *ids, int n, float *logits)
{
    const aff_batch b = {.n = n, .id = ids, .seq = s, .want_from = logits ? 0 : n, .logits = logits};
    must(aff__forward(t->r, &b, &err));
}

static void same_logits(bench *t, const char *what, const float *got, int64_t pos, int n)
{
    for (int i = 0; i < n; i++)
        if (memcmp(got + (int64_t)i * VOCAB, t->logits + (pos + i) * VOCAB, VOCAB * sizeof *got))
            fail_msg("%s %s %d: %s: logits differ at position %lld", t->c->model, num_name[t->c->num], t->c->experts,
                     what, (long long)(pos + i));
    t->checks += n;
}

/* (a) one call, then random chunks; (c) over a sequence that held something else. */
static void check_prefill(bench *t, int n)
{
    /* The quick form runs a long prompt again from its start only now and then. */
    if (!full && n > 130 && n % (n > 262 ? 9 : 3)) return;
    if (t->a->pos) run(t, t->a, t->ids + 7, 1 + below(t, 40), NULL); /* leaves other rows wherever they fall */
    aff__seq_reset(t->a);
    run(t, t->a, t->ids, n, t->buf);
    same_logits(t, "one call", t->buf, 0, n);
    same_state(t->walk, t->a);
    aff__seq_reset(t->a);
    for (int at = 0, k; at < n; at += k) {
        k = 1 + below(t, below(t, 2) ? 12 : 300);
        if (k > n - at) k = n - at;
        run(t, t->a, t->ids + at, k, t->buf);
        same_logits(t, "chunks", t->buf, at, k);
    }
    same_state(t->walk, t->a);
}

/* The draft of two sequences at one position. */
static void same_draft(bench *t, aff_seq *a, aff_seq *b)
{
    int32_t x[DRAFT], y[DRAFT];
    float cx[DRAFT], cy[DRAFT], *lx = t->buf, *ly = t->buf + DRAFT * VOCAB;
    const int32_t id0 = t->ids[a->pos];
    must(aff__draft_block(t->r, a, id0, x, cx, lx, NULL, NULL, &err));
    must(aff__draft_block(t->r, b, id0, y, cy, ly, NULL, NULL, &err));
    assert_memory_equal(x, y, sizeof x);
    assert_memory_equal(cx, cy, sizeof cx);
    assert_memory_equal(lx, ly, sizeof(float) * DRAFT * VOCAB);
    t->checks += DRAFT;
}

/* (b) blocks of 1..6 of which some rows are wrong guesses; b: the same positions in single steps. */
static void check_rejections(bench *t)
{
    int32_t block[6];
    clone(t->a, t->walk);
    clone(t->b, t->walk);
    const int64_t end = t->walk->pos + TAIL;
    while (t->a->pos < end) {
        const int64_t P = t->a->pos;
        const int m = 1 + below(t, 6), keep = 1 + below(t, m);
        for (int i = 0; i < m; i++) block[i] = i < keep ? t->ids[P + i] : below(t, VOCAB);
        run(t, t->a, block, m, t->buf);
        must(aff__seq_rollback(t->a, P + keep, &err));
        for (int i = 0; i < keep; i++) {
            float one[VOCAB];
            run(t, t->b, t->ids + P + i, 1, one);
            if (memcmp(one, t->buf + (int64_t)i * VOCAB, sizeof one))
                fail_msg("after rejections: logits differ at position %lld", (long long)(P + i));
            t->checks++;
        }
        same_state(t->a, t->b);
        same_draft(t, t->a, t->b);
    }
}

/* Rows of two sequences in one pass, and their drafts in one pass: as if each had been alone. */
static void check_neighbours(bench *t)
{
    enum { ROWS = 5, OTHER = 9 };
    const int32_t *ids = t->ids + t->walk->pos, *other = t->ids + 300;
    float *alone = t->buf, *both = t->buf + 4 * ROWS * VOCAB;
    clone(t->a, t->walk);
    clone(t->c1, t->walk);
    aff__seq_reset(t->b);
    run(t, t->b, other, OTHER, NULL);
    clone(t->c2, t->b);
    run(t, t->c1, ids, ROWS, alone);
    run(t, t->c2, other + OTHER, 2, alone + ROWS * VOCAB);
    const aff_batch b[] = {{.n = ROWS, .id = ids, .seq = t->a, .logits = both},
                           {.n = 2, .id = other + OTHER, .seq = t->b, .logits = both + ROWS * VOCAB}};
    must(aff__forward_many(t->r, b, 2, &err));
    assert_memory_equal(alone, both, sizeof(float) * (ROWS + 2) * VOCAB);
    same_state(t->a, t->c1);
    same_state(t->b, t->c2);
    int32_t x[2][DRAFT], y[2][DRAFT];
    float cx[2][DRAFT], cy[2][DRAFT], *lx = t->buf, *ly = t->buf + 2 * DRAFT * VOCAB;
    aff_draft_request d[2];
    for (int i = 0; i < 2; i++) {
        aff_seq *s = i ? t->b : t->a;
        must(aff__draft_block(t->r, s, t->ids[i], x[i], cx[i], lx + i * DRAFT * VOCAB, NULL, NULL, &err));
        d[i] = (aff_draft_request){s, t->ids[i], y[i], cy[i], ly + i * DRAFT * VOCAB};
    }
    must(aff__draft_many(t->r, d, 2, NULL, NULL, &err));
    assert_memory_equal(x, y, sizeof x);
    assert_memory_equal(cx, cy, sizeof cx);
    assert_memory_equal(lx, ly, sizeof(float) * 2 * DRAFT * VOCAB);
    t->checks += ROWS + 2 + 2 * DRAFT;
}

/* The folder or container of a configuration, written once. */
static void model_path(const config *c, char *path, size_t cap)
{
    struct stat st;
    char ckpt[256];
    snprintf(ckpt, sizeof ckpt, "%s/%s", root, c->model);
    if (stat(ckpt, &st) != 0) assert_int_equal(aff_test_write_parity_model(c->model, ckpt), 0);
    snprintf(path, cap, "%s", ckpt);
    if (c->experts == AFF_MXFP4) return;
    snprintf(path, cap, "%s/%s-%d.aff", root, c->model, c->experts);
    if (stat(path, &st) != 0) test_write_container(ckpt, path, (aff_dtype)c->experts, 42, 1);
}

static bool listed(const range *r, int64_t n)
{
    for (; r->lo; r++)
        if (n >= r->lo && n <= r->hi) return true;
    return false;
}

static uint64_t run_config(const config *c)
{
    char path[512];
    bench *t = calloc(1, sizeof *t);
    assert_non_null(t);
    t->c = c;
    t->seed = 0x1234u + (uint64_t)c->experts * 7 + (uint64_t)c->num * 131 + (uint64_t)c->threads;
    uint64_t stream = 99; /* the same text for every configuration */
    for (int i = 0; i < CAPACITY; i++) t->ids[i] = (int32_t)(aff__splitmix64(&stream) % VOCAB);
    model_path(c, path, sizeof path);
    aff__cpu_cap(c->level);
    const aff_net_options o = {.numerics = c->num, .draft = true};
    must(aff__net_open(&t->net, path, &o, &err));
    assert_int_equal(aff__net_config(t->net)->vocab, VOCAB);
    must(aff__runner_create(&t->r, t->net, c->threads, &err));
    aff_seq **const seqs[] = {&t->walk, &t->a, &t->b, &t->c1, &t->c2};
    for (int i = 0; i < 5; i++) must(aff__seq_create(seqs[i], t->net, CAPACITY, &err));
    t->logits = malloc(sizeof(float) * CAPACITY * VOCAB);
    t->buf = malloc(sizeof(float) * CAPACITY * VOCAB);
    assert_non_null(t->logits);
    assert_non_null(t->buf);
    int last = 0;
    for (const range *r = c->lengths; r->lo; r++) last = r->hi;
    uint64_t hash = 0xcbf29ce484222325u;
    while (t->walk->pos < last) {
        const int64_t P = t->walk->pos;
        run(t, t->walk, t->ids + P, 1, t->logits + P * VOCAB);
        for (int i = 0; P < 70 && i < VOCAB; i++) {
            uint32_t u;
            memcpy(&u, t->logits + P * VOCAB + i, 4);
            hash = (hash ^ u) * 0x100000001b3u;
        }
        if (c->steps_only || !listed(c->lengths, P + 1)) continue;
        check_prefill(t, (int)P + 1);
        check_rejections(t);
        check_neighbours(t);
    }
    if (c->steps_only) t->checks = last;
    if (verbose)
        printf("%-10s %-8s %-5s %d threads %-7s  lengths to %4d: %6lld rows%s\n", c->model,
               c->experts == AFF_MXFP4      ? "mxfp4"
               : c->experts == AFF_Q2P875Q4 ? "33"
                                            : "34",
               num_name[c->num], c->threads, aff__cpu_level_name(aff__cpu_level()), last, (long long)t->checks,
               c->steps_only ? " hashed" : " bit-equal");
    fflush(stdout);
    free(t->logits);
    free(t->buf);
    for (int i = 0; i < 5; i++) aff__seq_free(*seqs[i]);
    aff__runner_free(t->r);
    aff__net_close(t->net);
    free(t);
    aff__cpu_cap(AFF_CPU_AVX512);
    return hash;
}

/* Every pair of (model, experts, numerics) with threads and instruction set in turn. */
static void test_selection(void **state)
{
    static const config quick[] = {
        {"toy", AFF_MXFP4, AFF_MATH, 1, AFF_CPU_AVX512, TINY},
        {"toy", AFF_Q2P875Q4, AFF_SIM, 2, AFF_CPU_AVX2, SHORT},
        {"toy", AFF_Q2P875G, AFF_FAST, 3, AFF_CPU_SCALAR, TINY},
        {"kernel", AFF_MXFP4, AFF_FAST, 2, AFF_CPU_AVX512, TINY},
        {"kernel", AFF_Q2P875G, AFF_SIM, 3, AFF_CPU_AVX512, TINY},
    };
    for (size_t i = 0; i < sizeof quick / sizeof *quick; i++) run_config(&quick[i]);
}

/* Threads, instruction sets and the expert layout (33 or 34) leave every bit alone. */
static void test_same_everywhere(void **state)
{
    const range few[] = {{full ? 66 : 17, full ? 70 : 17}, {0, 0}};
    static const char *const models[] = {"toy", "kernel"};
    for (int m = 0; m < (full ? 2 : 1); m++)
        for (int num = 0; num < 3; num++) {
            uint64_t first[2] = {0};
            for (int k = 0; k < 9; k++) {
                static const int experts[] = {AFF_MXFP4, AFF_Q2P875Q4, AFF_Q2P875G};
                const int e = full ? k / 3 : k % 3, threads = 1 + k % 3, level = full ? -1 : k / 3;
                for (int lv = 0; lv < 3; lv++) {
                    if (level >= 0 && lv != level) continue;
                    const config c = {models[m], experts[e], (aff_numerics)num, threads, (aff_cpu_level)lv, few, true};
                    const uint64_t h = run_config(&c);
                    uint64_t *want = &first[experts[e] != AFF_MXFP4];
                    if (!*want) *want = h;
                    if (*want != h)
                        fail_msg("%s %s experts %d, %d threads, level %d: other logits", models[m], num_name[num],
                                 experts[e], threads, lv);
                }
            }
        }
}

static void test_matrix(void **state)
{
    static const int experts[] = {AFF_MXFP4, AFF_Q2P875Q4, AFF_Q2P875G};
    static const char *const models[] = {"toy", "kernel"};
    int turn = 0;
    for (int m = 0; m < 2; m++)
        for (int e = 0; e < 3; e++)
            for (int num = 0; num < 3; num++, turn++) {
                if (pick >= 0 && pick != turn) continue;
                const config c = {
                    models[m], experts[e], (aff_numerics)num, 1 + turn % 3, (aff_cpu_level)(2 - turn / 3 % 3), ALL};
                run_config(&c);
            }
}

static int make_root(void **state)
{
    return mkdtemp(root) ? 0 : -1;
}
static int remove_root(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        verbose |= strcmp(argv[i], "-v") == 0;
        full |= strcmp(argv[i], "--full") == 0;
        if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) cmocka_set_test_filter(argv[++i]);
        else if (strcmp(argv[i], "--pick") == 0 && i + 1 < argc)
            pick = atoi(argv[++i]);
    }
    const struct CMUnitTest quick[] = {cmocka_unit_test(test_selection), cmocka_unit_test(test_same_everywhere)};
    const struct CMUnitTest all[] = {cmocka_unit_test(test_matrix), cmocka_unit_test(test_same_everywhere)};
    return full ? cmocka_run_group_tests(all, make_root, remove_root)
                : cmocka_run_group_tests(quick, make_root, remove_root);
}
