/* Importance matrices: files made by the gguf package (tests/oracle/make_imatrix.py), the numbers of spec quantiser 8.1
 * by hand, and everything that must be refused by name. */
#include "support/test.h"
#include "quant/imatrix.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/gguf.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const aff_im_shape shape = {.layers = 2, .experts = 3, .hidden = 4, .inter = 2};

typedef struct blob {
    char *p;
    size_t n;
} blob;

static blob load(const char *name)
{
    char path[512];
    blob b;
    aff_error e = {0};
    snprintf(path, sizeof path, "%s/golden/imatrix/%s", AFF_TESTS_DIR, name);
    if (aff__read_file(path, 1 << 20, &b.p, &b.n, &e) != AFF_OK) fail_msg("%s", e.msg);
    return b;
}

static aff_imatrix *open_or_fail(const blob *b)
{
    aff_imatrix *m;
    aff_error e = {0};
    if (aff__imatrix_open_memory(&m, b->p, b->n, "mem", &shape, &e) != AFF_OK) fail_msg("%s", e.msg);
    return m;
}

static void expect_row(const aff_imatrix *m, uint32_t layer, uint32_t expert, aff_im_part part, bool known, int n,
                       const float *want)
{
    float got[4];
    assert_int_equal(aff__imatrix_weights(m, layer, expert, part, got), known);
    for (int i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], 4) != 0)
            fail_msg("layer %u expert %u part %d column %d: expected %.9g, got %.9g", layer, expert, (int)part, i,
                     (double)want[i], (double)got[i]);
}

static const float ones[4] = {1, 1, 1, 1};

static void v4_gguf(void **state)
{
    char path[512];
    snprintf(path, sizeof path, "%s/golden/imatrix/v4.gguf", AFF_TESTS_DIR);
    aff_imatrix *m;
    aff_error e = {0};
    if (aff__imatrix_open(&m, path, &shape, &e) != AFF_OK) fail_msg("%s", e.msg);
    const aff_im_info *i = aff__imatrix_info(m);
    assert_false(i->legacy);
    assert_true(i->has_counts);
    assert_int_equal(i->present, 6);
    assert_int_equal(i->missing, 0);
    assert_int_equal(i->unseen, 2); /* expert 2 of both layers */
    /* [2 4 6 4]/2 = [1 2 3 2], mean 2. [1 1 1 0]/3: mean 0.25 exactly, so 4 * (float)(1/3). [8 24]/2: mean 8. [1 3]/3:
     * mean 2/3. */
    for (uint32_t part = 0; part < 2; part++) {
        expect_row(m, 0, 0, part, true, 4, (const float[]){0.5f, 1, 1.5f, 1});
        expect_row(m, 0, 1, part, true, 4, (const float[]){0x1.555556p0f, 0x1.555556p0f, 0x1.555556p0f, 0});
        expect_row(m, 0, 2, part, false, 4, ones);
    }
    expect_row(m, 0, 0, AFF_IM_DOWN, true, 2, (const float[]){0.5f, 1.5f});
    expect_row(m, 0, 1, AFF_IM_DOWN, true, 2, (const float[]){0.5f, 1.5f});
    expect_row(m, 1, 0, AFF_IM_DOWN, true, 2, (const float[]){0.5f, 1.5f}); /* another count, the same ratio */
    expect_row(m, 2, 0, AFF_IM_GATE, false, 4, ones);                       /* no such layer */
    const float *p = aff__imatrix_profile(m), want[] = {2, 3, 0, 12, 13, 0};
    assert_non_null(p);
    assert_memory_equal(p, want, sizeof want);
    const uint64_t hash = i->hash;
    aff__imatrix_close(m);

    blob b = load("v4.gguf"); /* a padding byte counts too: it is the hash of the file */
    m = open_or_fail(&b);
    assert_int_equal(aff__imatrix_info(m)->hash, hash);
    aff__imatrix_close(m);
    b.p[b.n - 1] ^= 1;
    m = open_or_fail(&b);
    assert_int_not_equal(aff__imatrix_info(m)->hash, hash);
    aff__imatrix_close(m);
    free(b.p);
}

static void fused_gguf(void **state)
{
    blob b = load("fused.gguf");
    aff_imatrix *m = open_or_fail(&b);
    const aff_im_info *i = aff__imatrix_info(m);
    assert_int_equal(i->present, 2);
    assert_int_equal(i->missing, 4);
    assert_int_equal(i->unseen, 1);
    expect_row(m, 1, 0, AFF_IM_GATE, true, 4, (const float[]){0.5f, 1, 1.5f, 1});
    expect_row(m, 1, 0, AFF_IM_UP, true, 4, (const float[]){0.5f, 1, 1.5f, 1});
    expect_row(m, 1, 0, AFF_IM_DOWN, false, 2, ones);
    expect_row(m, 0, 0, AFF_IM_GATE, false, 4, ones);
    const float want[] = {0, 0, 0, 2, 3, 0};
    assert_memory_equal(aff__imatrix_profile(m), want, sizeof want);
    aff__imatrix_close(m);
    free(b.p);
}

/* Spec 8.3 (a): all experts in one row, one count. */
static void converted_gguf(void **state)
{
    blob b = load("converted.gguf");
    aff_imatrix *m = open_or_fail(&b);
    assert_false(aff__imatrix_info(m)->has_counts);
    assert_null(aff__imatrix_profile(m));
    assert_int_equal(aff__imatrix_info(m)->unseen, 1); /* expert 2: constant filling */
    expect_row(m, 0, 0, AFF_IM_GATE, true, 4, (const float[]){0.5f, 1, 1.5f, 1});
    expect_row(m, 0, 2, AFF_IM_GATE, false, 4, ones);
    aff__imatrix_close(m);
    free(b.p);
}

static void legacy(void **state)
{
    blob b = load("legacy.dat");
    aff_imatrix *m = open_or_fail(&b);
    assert_true(aff__imatrix_info(m)->legacy);
    assert_false(aff__imatrix_info(m)->has_counts);
    assert_int_equal(aff__imatrix_info(m)->present, 1);
    assert_int_equal(aff__imatrix_info(m)->unseen, 1);
    expect_row(m, 0, 0, AFF_IM_DOWN, true, 2, (const float[]){0.5f, 1.5f});
    expect_row(m, 0, 1, AFF_IM_DOWN, false, 2, ones);
    expect_row(m, 0, 2, AFF_IM_DOWN, true, 2, (const float[]){2, 0});
    aff__imatrix_close(m);
    for (size_t n = 0; n < b.n; n++) { /* cut anywhere; the tail of 11 bytes says nothing about weights */
        char *exact = malloc(n ? n : 1);
        aff_error e = {0};
        assert_non_null(exact);
        memcpy(exact, b.p, n);
        const aff_status s = aff__imatrix_open_memory(&m, exact, n, "mem", &shape, &e);
        assert_int_equal(s, n < b.n - 11 ? AFF_E_FORMAT : AFF_OK);
        aff__imatrix_close(m);
        free(exact);
    }
    free(b.p);
}

static void cut_gguf(void **state)
{
    blob b = load("v4.gguf");
    for (size_t n = 0; n + 32 < b.n; n++) {
        char *exact = malloc(n ? n : 1);
        aff_imatrix *m;
        aff_error e = {0};
        assert_non_null(exact);
        memcpy(exact, b.p, n);
        assert_int_equal(aff__imatrix_open_memory(&m, exact, n, "mem", &shape, &e), AFF_E_FORMAT);
        assert_null(m);
        free(exact);
    }
    free(b.p);
}

/* ---- what must be refused ---- */

static void expect_refused(const blob *b, const aff_im_shape *s, const char *const *words, const char *what)
{
    aff_imatrix *m;
    aff_error e = {0};
    if (aff__imatrix_open_memory(&m, b->p, b->n, "mem", s, &e) != AFF_E_FORMAT)
        fail_msg("%s: accepted, or another error: %s", what, e.msg);
    for (; *words; words++)
        if (!strstr(e.msg, *words)) fail_msg("%s: '%s' does not say '%s'", what, e.msg, *words);
}

/* One float of a tensor. */
static void bad_numbers(void **state)
{
    static const struct {
        const char *tensor;
        size_t index;
        float value;
        const char *words[4];
    } cases[] = {
        {"blk.1.ffn_up_exps.weight.in_sum2", 6, -1, {"blk.1.ffn_up_exps.weight", "expert 1", "column 2", NULL}},
        {"blk.0.ffn_gate_exps.weight.in_sum2", 0, NAN, {"blk.0.ffn_gate_exps.weight", "expert 0", "nan", NULL}},
        {"blk.0.ffn_down_exps.weight.in_sum2", 3, INFINITY, {"blk.0.ffn_down_exps.weight", "expert 1", "inf", NULL}},
        {"blk.0.ffn_down_exps.weight.counts", 1, NAN, {"blk.0.ffn_down_exps.weight", "counts", "expert 1", NULL}},
        {"blk.0.ffn_down_exps.weight.counts", 0, -2, {"blk.0.ffn_down_exps.weight", "counts", "-2", NULL}},
        {"blk.0.ffn_gate_exps.weight.counts", 0, 0, {"blk.0.ffn_gate_exps.weight", "expert 0", "0 tokens", NULL}},
        {"blk.0.ffn_gate_exps.weight.counts", 0, 1e-38f, {"blk.0.ffn_gate_exps.weight", "expert 0", "float32", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        blob b = load("v4.gguf");
        aff_gguf *g;
        aff_error e = {0};
        assert_int_equal(aff__gguf_open_memory(&g, b.p, b.n, "mem", &e), AFF_OK);
        const aff_gguf_tensor *t = aff__gguf_find(g, cases[i].tensor);
        assert_non_null(t);
        const size_t at = (size_t)(t->data - (const uint8_t *)b.p) + 4 * cases[i].index;
        aff__gguf_close(g);
        memcpy(b.p + at, &cases[i].value, 4);
        expect_refused(&b, &shape, cases[i].words, cases[i].tensor);
        free(b.p);
    }
}

/* The first occurrence of `from` becomes `to`, of the same length. */
static void edit(blob *b, const char *from, const char *to)
{
    const size_t n = strlen(from);
    assert_int_equal(n, strlen(to));
    for (size_t i = 0; i + n <= b->n; i++)
        if (memcmp(b->p + i, from, n) == 0) {
            memcpy(b->p + i, to, n);
            return;
        }
    fail_msg("'%s' is not in the file", from);
}

static void bad_names(void **state)
{
    static const struct {
        const char *from, *to, *words[4];
    } cases[] = {
        {"blk.1.ffn_up_exps.weight.in_sum2",
         "blk.1.ffn_up_exps.weight.in_sumX",
         {"blk.1.ffn_up_exps.weight'", "counts and no in_sum2", NULL}},
        {"blk.1.ffn_up_exps.weight.counts",
         "blk.1.ffn_up_exps.weight.countX",
         {"blk.1.ffn_up_exps.weight'", "in_sum2 and no counts", NULL}},
        {"blk.1.ffn_up_exps.weight.counts", "blk.1.ffn_up_exps.weigh\n.counts", {"control character", NULL}},
        {"blk.0.ffn_up_exps.weight.in_sum2",
         "blk.1.ffn_up_exps.weight.in_sum2",
         {"blk.1.ffn_up_exps.weight.in_sum2", "twice", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        blob b = load("v4.gguf");
        edit(&b, cases[i].from, cases[i].to);
        expect_refused(&b, &shape, cases[i].words, cases[i].to);
        free(b.p);
    }
    blob b = load("v4.gguf"); /* layer 7 of a model with 2 */
    edit(&b, "blk.1.ffn_down_exps.weight.in_sum2", "blk.7.ffn_down_exps.weight.in_sum2");
    edit(&b, "blk.1.ffn_down_exps.weight.counts", "blk.7.ffn_down_exps.weight.counts");
    expect_refused(&b, &shape,
                   (const char *const[]){"blk.7.ffn_down_exps.weight", "layers 0 to 1", "another model", NULL},
                   "layer 7");
    free(b.p);
    b = load("legacy.dat"); /* gate twice would be a duplicate; here: nothing of experts is left */
    edit(&b, "blk.0.ffn_down_exps.weight", "blk.0.ffn_down_shex.weight");
    expect_refused(&b, &shape, (const char *const[]){"no entry is of routed experts", NULL}, "nothing matches");
    free(b.p);
}

/* ---- second moments ---- */

/* One tensor `name` of rank 2; what opening says. */
static aff_status open_moments(const char *name, uint64_t a, uint64_t b, const float *data, aff_imatrix **m, aff_error *e)
{
    static const char path[] = "/tmp/aff-moments.gguf";
    char own[64];
    uint64_t index[3];
    aff_gguf_out *o;
    snprintf(own, sizeof own, "%s.%d", path, (int)getpid());
    assert_int_equal(aff__gguf_out_create(&o, own, e), AFF_OK);
    assert_int_equal(aff__gguf_out_tensor(o, "blk.0.ffn_down_exps.weight.in_sum2", 2, (const uint64_t[]){2, 3}, &index[0], e), AFF_OK);
    assert_int_equal(aff__gguf_out_tensor(o, "blk.0.ffn_down_exps.weight.counts", 2, (const uint64_t[]){1, 3}, &index[1], e), AFF_OK);
    assert_int_equal(aff__gguf_out_tensor(o, name, 2, (const uint64_t[]){a, b}, &index[2], e), AFF_OK);
    assert_int_equal(aff__gguf_out_begin(o, e), AFF_OK);
    assert_int_equal(aff__gguf_out_data(o, index[0], (const float[]){1, 2, 3, 4, 5, 6}, e), AFF_OK);
    assert_int_equal(aff__gguf_out_data(o, index[1], (const float[]){1, 1, 1}, e), AFF_OK);
    assert_int_equal(aff__gguf_out_data(o, index[2], data, e), AFF_OK);
    assert_int_equal(aff__gguf_out_finish(o, e), AFF_OK);
    const aff_status s = aff__imatrix_open(m, own, &shape, e);
    unlink(own);
    return s;
}

static void second_moments(void **state)
{
    float ten[12] = {4, 1, 2, 0, 5, -1, 1, 3, 0, 2, 0, 0}, nine[9] = {1, 0.5f, 2, 0, 0, 0, 0, 0, 3};
    aff_imatrix *m;
    aff_error e = {0};
    (void)state;
    assert_int_equal(open_moments("blk.0.ffn_gate_exps.weight.in_cov", 10, 1, ten, &m, &e), AFF_OK);
    assert_int_equal(aff__imatrix_info(m)->moments, 1);
    assert_int_equal(aff__imatrix_info(m)->moments_down, 0);
    for (int part = 0; part < 2; part++)
        for (uint32_t x = 0; x < 3; x++)
            assert_memory_equal(aff__imatrix_moments(m, 0, x, (aff_im_part)part), ten, 40);
    assert_null(aff__imatrix_moments(m, 0, 0, AFF_IM_DOWN));
    assert_null(aff__imatrix_moments(m, 1, 0, AFF_IM_GATE));
    assert_null(aff__imatrix_moments(m, 2, 0, AFF_IM_GATE));
    aff__imatrix_close(m);
    assert_int_equal(open_moments("blk.1.ffn_down_exps.weight.in_cov", 3, 3, nine, &m, &e), AFF_OK);
    assert_int_equal(aff__imatrix_info(m)->moments_down, 1);
    assert_memory_equal(aff__imatrix_moments(m, 1, 0, AFF_IM_DOWN), nine, 12);
    assert_null(aff__imatrix_moments(m, 1, 1, AFF_IM_DOWN)); /* never seen */
    assert_memory_equal(aff__imatrix_moments(m, 1, 2, AFF_IM_DOWN), nine + 6, 12);
    assert_null(aff__imatrix_moments(m, 1, 3, AFF_IM_DOWN));
    aff__imatrix_close(m);

    const struct {
        const char *name;
        uint64_t a, b;
        int at;
        float value;
        const char *words;
    } cases[] = {
        {"blk.0.ffn_gate_exps.weight.in_cov", 10, 1, 1, NAN, "row 0, column 1"},
        {"blk.0.ffn_gate_exps.weight.in_cov", 10, 1, 4, -5, "row 1, column 1"},
        {"blk.0.ffn_gate_exps.weight.in_cov", 10, 1, 9, INFINITY, "row 3, column 3"},
        {"blk.0.ffn_gate_exps.weight.in_cov", 3, 1, 0, 1, "expected 10 x 1 values, got 3 x 1"},
        {"blk.0.ffn_down_exps.weight.in_cov", 3, 2, 0, 1, "expected 3 x 3 values, got 3 x 2"},
        {"blk.0.ffn_up_exps.weight.in_cov", 10, 1, 0, 1, "ffn_gate_exps or ffn_down_exps"},
        {"blk.2.ffn_gate_exps.weight.in_cov", 10, 1, 0, 1, "layers 0 to 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float bad[12];
        memcpy(bad, ten, sizeof bad);
        bad[cases[i].at] = cases[i].value;
        assert_int_equal(open_moments(cases[i].name, cases[i].a, cases[i].b, bad, &m, &e), AFF_E_FORMAT);
        if (!strstr(e.msg, cases[i].words) || !strstr(e.msg, "in_cov")) fail_msg("'%s' does not say '%s'", e.msg, cases[i].words);
    }
}

static void other_models(void **state)
{
    static const struct {
        const char *file;
        aff_im_shape shape;
        const char *words[4];
    } cases[] = {
        {"v4.gguf", {1, 3, 4, 2}, {"blk.1.", "layers 0 to 0", "another model", NULL}},
        {"v4.gguf", {2, 4, 4, 2}, {"x 4 experts", "x 3", "another model", NULL}},
        {"v4.gguf", {2, 3, 8, 2}, {"ffn_gate_exps", "8 columns", "another model", NULL}},
        {"v4.gguf", {2, 3, 4, 4}, {"ffn_down_exps", "4 columns", "another model", NULL}},
        {"v4.gguf", {2, 2, 6, 3}, {"another model", NULL}}, /* the same number of values */
        {"converted.gguf", {2, 3, 2, 2}, {"blk.0.ffn_gate_exps.weight", "another model", NULL}},
        {"legacy.dat", {2, 3, 4, 3}, {"blk.0.ffn_down_exps.weight", "expected 9 values", "got 6", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        blob b = load(cases[i].file);
        expect_refused(&b, &cases[i].shape, cases[i].words, cases[i].file);
        free(b.p);
    }
    aff_imatrix *m;
    aff_error e = {0};
    assert_int_equal(aff__imatrix_open(&m, "/nonexistent/imatrix", &shape, &e), AFF_E_IO);
    assert_int_equal(aff__imatrix_open_memory(&m, "", 0, "mem", &(aff_im_shape){0}, &e), AFF_E_INVALID);
}

/* A legacy file with one entry twice, the second time with negative calls or a NaN. */
static void bad_legacy(void **state)
{
    blob b = load("legacy.dat");
    const size_t head = 4 + 4 + 21 + 8 + 16, entry = 4 + 26 + 8 + 24;
    char *two = malloc(b.n + entry);
    assert_non_null(two);
    memcpy(two, b.p, head + entry);
    memcpy(two + head + entry, b.p + head, b.n - head);
    two[0] = 3;
    blob x = {two, b.n + entry};
    expect_refused(&x, &shape, (const char *const[]){"blk.0.ffn_down_exps.weight", "layer 0", "down twice", NULL},
                   "duplicate");
    const float nan = NAN;
    memcpy(b.p + head + 4 + 26 + 8 + 4, &nan, 4);
    expect_refused(&b, &shape, (const char *const[]){"blk.0.ffn_down_exps.weight", "expert 0", "column 1", NULL},
                   "NaN");
    b.p[head + 4 + 26 + 3] = (char)0x80; /* calls < 0 */
    expect_refused(&b, &shape, (const char *const[]){"entry 2 of 2", NULL}, "calls");
    free(two);
    free(b.p);
}

static void out_of_memory(void **state)
{
    blob b = load("v4.gguf");
    aff_status s = AFF_E_NOMEM;
    for (unsigned n = 1; s == AFF_E_NOMEM; n++) {
        aff_imatrix *m;
        aff_error e = {0};
        assert_in_range(n, 1, 500);
        aff__alloc_fail_after(n);
        s = aff__imatrix_open_memory(&m, b.p, b.n, "mem", &shape, &e);
        aff__alloc_fail_after(0);
        aff__imatrix_close(m);
    }
    assert_int_equal(s, AFF_OK);
    free(b.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(v4_gguf),       cmocka_unit_test(fused_gguf),   cmocka_unit_test(converted_gguf),
        cmocka_unit_test(legacy),        cmocka_unit_test(cut_gguf),     cmocka_unit_test(bad_numbers),
        cmocka_unit_test(bad_names),     cmocka_unit_test(second_moments), cmocka_unit_test(other_models), cmocka_unit_test(bad_legacy),
        cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
