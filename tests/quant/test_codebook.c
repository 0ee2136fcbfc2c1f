/* codebook: stored form, nearest entry against full scans, fit against the spec read naively. */
#include "support/test.h"
#include "quant/codebook.h"
#include "quant/quant_naive.h"
#include "base/mem.h"

static void stored_form(void **state)
{
    (void)state;
    assert_int_equal(aff__cb_round(0.0f), 0x08);
    assert_int_equal(aff__cb_round(-0.0f), 0x08);
    assert_int_equal(aff__cb_round(1.0f), 0x38);
    assert_int_equal(aff__cb_round(1.41421f), 0x3b);
    assert_int_equal(aff__cb_round(-1.41421f), 0xbb);
    assert_int_equal(aff__cb_round(9.0f), 0x3f);
    assert_int_equal(aff__cb_round(-9.0f), 0xbf);
    assert_int_equal(aff__cb_round(1.0625f), 0x38); /* a tie goes to the lower byte, not the even one */
    assert_int_equal(aff__cb_round(1.1875f), 0x39);
    assert_int_equal(aff__cb_round(-1.1875f), 0xb9);
    assert_int_equal(aff__cb_round(-0.001f), 0x88);

    static uint8_t cb[AFF_CB_BYTES];
    static aff_cb_table t[2];
    static int16_t ints[2][AFF_CB_ENTRIES][4];
    naive_table(1, cb);
    static const uint8_t entry[4] = {0x34, 0x2c, 0x28, 0xb0}; /* container 4.5 */
    memcpy(cb + (1024 + 7) * 4, entry, 4);
    assert_true(aff__cb_valid(cb));
    aff__cb_unpack(cb, t);
    aff__codebook_ints(cb, ints);
    static const float want[4] = {0.75f, 0.375f, 0.25f, -0.5f};
    static const int16_t want_int[4] = {384, 192, 128, -256};
    assert_memory_equal(t[1][7], want, 16);
    assert_memory_equal(ints[1][7], want_int, 8);
    uint8_t again[AFF_CB_BYTES];
    aff__cb_pack(t, again);
    assert_memory_equal(again, cb, AFF_CB_BYTES);
    for (int i = 0; i < 8192; i++) assert_true((float)(&ints[0][0][0])[i] == (&t[0][0][0])[i] * 512.0f);
    cb[5000] = 0x07;
    assert_false(aff__cb_valid(cb));
    cb[5000] = 0x40;
    assert_false(aff__cb_valid(cb));
}

static aff_cb_index *index_of(const uint8_t *cb, aff_cb_grid_kind kind)
{
    aff_error err = {0};
    aff_cb_index *ix;
    if (aff__cb_index_create(&ix, cb, kind, NULL, &err) != AFF_OK) fail_msg("%s", err.msg);
    return ix;
}

/* Points that lie anywhere, on edges of cells, beside the edge of the domain and on entries. */
static void random_point(uint64_t *rng, float (*cb)[4], float x[4])
{
    uint64_t kind = aff__splitmix64(rng) % 6;
    uint64_t e = aff__splitmix64(rng) % 1024;
    for (int p = 0; p < 4; p++) {
        float u = (float)(aff__splitmix64(rng) >> 40) * 0x1p-23f - 1.0f;
        int step = (int)(aff__splitmix64(rng) % 26);
        float edge = -2.5f + (float)step * 0.2f;
        if (kind == 0) x[p] = u;
        if (kind == 1) x[p] = 3.5f * u;
        if (kind == 2) x[p] = step & 1 ? edge : nextafterf(edge, u);
        if (kind == 3) x[p] = p == step % 4 ? -2.5f - 0.2f * fabsf(u) : 2.0f * u;
        if (kind == 4) x[p] = cb[e][p];
        if (kind == 5) x[p] = (cb[e][p] + cb[(e + 1) % 1024][p]) / 2; /* often a tie */
    }
}

static void nearest_is_the_nearest(void **state)
{
    (void)state;
    static uint8_t bytes[AFF_CB_BYTES];
    uint64_t rng = 11;
    for (int i = 0; i < AFF_CB_BYTES; i++) bytes[i] = aff__cb_round(naive_gauss(&rng)); /* out to the edges */
    memcpy(bytes + 4 * 900, bytes + 4 * 17, 4); /* equal entries: the lower one wins */
    aff_cb_index *exact = index_of(bytes, AFF_CB_GRID_EXACT), *compat = index_of(bytes, AFF_CB_GRID_COMPAT);
    for (int i = 0; i < 40000; i++) {
        int v = i & 1;
        float x[4], d0, d1, d2, d3;
        random_point(&rng, exact->cb[v], x);
        uint32_t scan = (uint32_t)naive_scan(exact->cb[v], x, &d0);
        assert_int_equal(aff__cb_grid_nearest(&exact->grid[v], x, &d1), scan);
        assert_true(d1 == d0);
        uint32_t like = (uint32_t)naive_compat(exact->cb[v], x, &d2);
        assert_int_equal(aff__cb_grid_nearest(&compat->grid[v], x, &d3), like);
        assert_true(d2 == d3);
    }
    float x[4], d;
    memcpy(x, exact->cb[0][900], 16);
    assert_int_equal(aff__cb_grid_nearest(&exact->grid[0], x, &d), 17);
    assert_true(d == 0);

    static const float odd[5] = {NAN, INFINITY, -INFINITY, 1e38f, -3e9f};
    for (int i = 0; i < 5; i++) {
        float far[4] = {0.5f, odd[i], 0, 0};
        assert_in_range(aff__cb_grid_nearest(&exact->grid[0], far, &d), 0, 1023);
        assert_in_range(aff__cb_grid_nearest(&compat->grid[0], far, &d), 0, 1023);
    }
    aff__cb_index_free(exact);
    aff__cb_index_free(compat);
}

/* A far entry that no point of the edge cell prefers, but a point beyond it does. */
static void truncation_is_copied_only_on_request(void **state)
{
    (void)state;
    static aff_cb_table t[2];
    uint8_t bytes[AFF_CB_BYTES];
    for (int e = 0; e < 1024; e++)
        for (int p = 0; p < 4; p++) t[0][e][p] = t[1][e][p] = p ? 0x1p-6f : -0.9375f;
    t[0][5][0] = -1.875f;
    t[0][5][1] = 1.625f;
    aff__cb_pack(t, bytes);
    aff_cb_index *exact = index_of(bytes, AFF_CB_GRID_EXACT), *compat = index_of(bytes, AFF_CB_GRID_COMPAT);
    const float beyond[4] = {-2.69f, 0.0999f, 0, 0}, outside[4] = {-2.71f, 0.0999f, 0, 0};
    float d;
    assert_int_equal(aff__cb_grid_nearest(&exact->grid[0], beyond, &d), 5);
    assert_int_equal(aff__cb_grid_nearest(&compat->grid[0], beyond, &d), 0);
    assert_int_equal(naive_compat(t[0], beyond, &d), 0);
    assert_int_equal(aff__cb_grid_nearest(&compat->grid[0], outside, &d), 5);
    aff__cb_index_free(exact);
    aff__cb_index_free(compat);
}

static void sample_rows(void **state)
{
    (void)state;
    aff_error err = {0};
    aff_cb_samples s = {0};
    /* 96 rows x 16384: every third row; row 3 is zero, block 1 of row 6 too. */
    uint64_t rows = 96, cols = 16384;
    float *w = malloc(rows * cols * sizeof *w);
    for (uint64_t i = 0; i < rows * cols; i++) w[i] = (float)(i / cols + 1) * (i % 16 == 5 ? -4.0f : 1.0f);
    memset(w + 3 * cols, 0, cols * sizeof *w);
    memset(w + 6 * cols + 16, 0, 16 * sizeof *w);
    assert_int_equal(aff__cb_samples_add(&s, w, rows, cols, &err), AFF_OK);
    assert_int_equal(s.blocks, 31 * 1024 - 1);
    for (uint64_t i = 0; i < s.blocks * 16; i++) assert_true(s.x[i] == (i % 16 == 5 ? -1.0f : 0.25f));
    assert_int_equal(aff__cb_samples_add(&s, w, 2, 64, &err), AFF_OK); /* small: every row, and it adds */
    assert_int_equal(s.blocks, 31 * 1024 - 1 + 8);
    aff__cb_samples_free(&s);
    free(w);
    uint8_t cb[AFF_CB_BYTES];
    assert_int_equal(aff__cb_fit(&s, NULL, cb, &err), AFF_E_FORMAT);
}

static void fill(aff_cb_samples *s, int rows, uint64_t seed, int levels)
{
    aff_error err = {0};
    float *w = malloc((size_t)rows * 64 * sizeof *w);
    for (int i = 0; i < rows * 64; i++) {
        w[i] = naive_gauss(&seed);
        if (levels) w[i] = rintf(w[i] * (float)levels) / (float)levels;
    }
    assert_int_equal(aff__cb_samples_add(s, w, (uint64_t)rows, 64, &err), AFF_OK);
    free(w);
}

static void fit_follows_the_text(void **state)
{
    (void)state;
    static const struct {
        int rows, levels;
    } cases[] = {{120, 0}, {100, 2}, {3, 0}}; /* plenty; many equal quads; fewer quads than entries */
    for (int i = 0; i < 3; i++) {
        aff_cb_samples s = {0};
        aff_error err = {0};
        fill(&s, cases[i].rows, (uint64_t)i + 40, cases[i].levels);
        uint8_t want[AFF_CB_BYTES], got[AFF_CB_BYTES];
        naive_fit(s.x, (int)s.blocks, want);
        assert_int_equal(aff__cb_fit(&s, NULL, got, &err), AFF_OK);
        assert_memory_equal(got, want, AFF_CB_BYTES);
        assert_true(aff__cb_valid(want));
        aff__cb_samples_free(&s);
    }
}

/* With several tasks for the pool, and every allocation failing once. */
static void fit_with_threads_and_without_memory(void **state)
{
    (void)state;
    aff_cb_samples s = {0};
    aff_error err = {0};
    aff_pool *pool;
    fill(&s, 1100, 77, 0);
    uint8_t one[AFF_CB_BYTES], three[AFF_CB_BYTES];
    assert_int_equal(aff__pool_create(&pool, 3, &err), AFF_OK);
    assert_int_equal(aff__cb_fit(&s, NULL, one, &err), AFF_OK);
    assert_int_equal(aff__cb_fit(&s, pool, three, &err), AFF_OK);
    assert_memory_equal(one, three, AFF_CB_BYTES);
    aff__pool_free(pool);
    for (unsigned k = 1; k <= 12; k++) {
        aff__alloc_fail_after(k);
        s.blocks = 40;
        assert_int_equal(aff__cb_fit(&s, NULL, three, &err), AFF_E_NOMEM);
    }
    for (unsigned k = 1; k <= 8; k++) {
        aff_cb_index *ix;
        aff__alloc_fail_after(k);
        assert_int_equal(aff__cb_index_create(&ix, one, AFF_CB_GRID_EXACT, NULL, &err), AFF_E_NOMEM);
        assert_null(ix);
    }
    aff__alloc_fail_after(0);
    aff__cb_samples_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_form),
        cmocka_unit_test(nearest_is_the_nearest),
        cmocka_unit_test(truncation_is_copied_only_on_request),
        cmocka_unit_test(sample_rows),
        cmocka_unit_test(fit_follows_the_text),
        cmocka_unit_test(fit_with_threads_and_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
