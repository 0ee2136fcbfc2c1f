/* Plans and the expert store: order, ranks, what is refused; row-major and grouped records give one result. */
#include "base/mem.h"
#include "experts/plan.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[] = "/tmp/aff-store-XXXXXX";
static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

enum { LAYERS = 8, EXPERTS = 16, HIDDEN = 256, INTER = 128 };
static aff_ckpt *ckpt;

static void test_plan(void **state)
{
    /* Three rows, picks in order of choice. */
    static const int32_t picks[] = {9, 2, 5, 2, 15, 0, 5, 9, 2};
    static const float weights[] = {.9f, .2f, .5f, 1.2f, 1.15f, 1.0f, 2.5f, 2.9f, 2.2f};
    static const int want_id[] = {0, 2, 5, 9, 15}, want_count[] = {1, 3, 2, 2, 1};
    static const int want_row[] = {1, 0, 1, 2, 0, 2, 0, 2, 1}, want_rank[] = {0, 0, 1, 0, 1, 1, 2, 2, 2};
    static const float want_weight[] = {1.0f, .2f, 1.2f, 2.2f, .5f, 2.5f, .9f, 2.9f, 1.15f};
    aff_experts *s;
    aff_plan *p;
    const aff_moe_plan *m;
    must(aff__experts_from_checkpoint(&s, ckpt, "layers.", LAYERS, EXPERTS, HIDDEN, INTER, &err));
    must(aff__plan_create(&p, 3, 3, EXPERTS, &err));
    for (int again = 0; again < 2; again++) {
        must(aff__plan_build(p, s, 7, picks, weights, 3, 3, &m, &err));
        assert_int_equal(m->n_tiles, 5);
        assert_int_equal(m->n_entries, 9);
        int at = 0;
        for (int i = 0; i < 5; i++) {
            assert_int_equal(m->tile[i].id, want_id[i]);
            assert_int_equal(m->tile[i].first, at);
            assert_int_equal(m->tile[i].count, want_count[i]);
            at += want_count[i];
            char name[64];
            snprintf(name, sizeof name, "layers.7.ffn.experts.%d.w2.weight", want_id[i]);
            assert_ptr_equal(m->tile[i].expert.down.codes, aff__ckpt_find(ckpt, name)->data);
            snprintf(name, sizeof name, "layers.7.ffn.experts.%d.w1.scale", want_id[i]);
            assert_ptr_equal(m->tile[i].expert.gate.fields, aff__ckpt_find(ckpt, name)->data);
        }
        assert_memory_equal(m->row, want_row, sizeof want_row);
        assert_memory_equal(m->rank, want_rank, sizeof want_rank);
        assert_memory_equal(m->weight, want_weight, sizeof want_weight);
        aff__plan_done(p);
    }
    static const int32_t twice[] = {1, 2, 1}, high[] = {0, 1, 16}, low[] = {0, -1, 2};
    assert_int_equal(aff__plan_build(p, s, 0, twice, weights, 1, 3, &m, &err), AFF_E_FORMAT);
    assert_int_equal(aff__plan_build(p, s, 0, high, weights, 1, 3, &m, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "16"));
    assert_int_equal(aff__plan_build(p, s, 0, low, weights, 1, 3, &m, &err), AFF_E_FORMAT);
    assert_int_equal(aff__plan_build(p, s, 0, picks, weights, 5, 3, &m, &err), AFF_E_INVALID);
    must(aff__plan_build(p, s, 0, picks, weights, 3, 3, &m, &err)); /* still works */
    aff__plan_done(p);
    aff__plan_free(p);
    aff__plan_free(NULL);
    aff__experts_free(s);
}

/* Two containers with the same weights, 33 row-major and 34 grouped: every byte the kernels see is equal. */
static void test_layouts(void **state)
{
    char dir[64], a_path[64], b_path[64];
    aff_container *a, *b;
    aff_experts *x, *y;
    snprintf(dir, sizeof dir, "%s/toy", root);
    snprintf(a_path, sizeof a_path, "%s/a.aff", root);
    snprintf(b_path, sizeof b_path, "%s/b.aff", root);
    test_write_container(dir, a_path, AFF_Q2P875Q4, 11, 1);
    test_write_container(dir, b_path, AFF_Q2P875G, 11, 1);
    must(aff__container_open(&a, a_path, &err));
    must(aff__container_open(&b, b_path, &err));
    const aff_ctensor *t = aff__container_find(a, "__codebook");
    const uint8_t *codebook = t->blob + t->m.data_off;
    must(aff__experts_from_container(&x, a, LAYERS, EXPERTS, HIDDEN, INTER, codebook, &err));
    must(aff__experts_from_container(&y, b, LAYERS, EXPERTS, HIDDEN, INTER, codebook, &err));
    assert_int_equal(aff__experts_shape(x).dtype, AFF_Q2P875G);
    assert_int_equal(aff__experts_shape(y).dtype, AFF_Q2P875G);
    aff_expert e, f;
    for (int i = LAYERS * EXPERTS - 1; i >= 0; i -= 5) {
        must(aff__experts_get(x, i / EXPERTS, i % EXPERTS, &e, &err));
        must(aff__experts_get(y, i / EXPERTS, i % EXPERTS, &f, &err));
        assert_memory_equal(e.gate.codes, f.gate.codes, HIDDEN / 64 * INTER * 20);
        assert_memory_equal(e.up.fields, f.up.fields, HIDDEN / 64 * INTER * 3);
        assert_memory_equal(e.down.codes, f.down.codes, INTER / 64 * HIDDEN * 20);
        assert_memory_equal(e.down.rscale, f.down.rscale, HIDDEN * 2);
        aff_expert again;
        must(aff__experts_get(x, i / EXPERTS, i % EXPERTS, &again, &err));
        assert_memory_equal(&again, &e, sizeof e); /* addresses stay */
    }
    aff__experts_free(x);
    /* Without memory for the copy: an error, and fine afterwards. */
    must(aff__experts_from_container(&x, a, LAYERS, EXPERTS, HIDDEN, INTER, codebook, &err));
    aff__alloc_fail_after(1);
    assert_int_equal(aff__experts_get(x, 3, 3, &e, &err), AFF_E_NOMEM);
    must(aff__experts_get(x, 3, 3, &e, &err));
    assert_non_null(e.gate.codes);
    aff__experts_free(x);
    aff__experts_free(y);
    assert_int_equal(aff__experts_from_container(&x, a, LAYERS, EXPERTS, HIDDEN, INTER, NULL, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "__codebook"));
    assert_int_equal(aff__experts_from_container(&x, a, LAYERS + 1, EXPERTS, HIDDEN, INTER, codebook, &err),
                     AFF_E_FORMAT);
    assert_int_equal(aff__experts_from_container(&x, a, LAYERS, EXPERTS + 1, HIDDEN, INTER, codebook, &err),
                     AFF_E_FORMAT);
    assert_int_equal(aff__experts_from_container(&x, a, LAYERS, EXPERTS, HIDDEN, 2 * INTER, codebook, &err),
                     AFF_E_FORMAT);
    aff__container_close(a);
    aff__container_close(b);
    /* The lossless container: the checkpoint's own bytes. */
    test_write_container(dir, a_path, AFF_MXFP4, 0, 1);
    must(aff__container_open(&a, a_path, &err));
    must(aff__experts_from_container(&x, a, LAYERS, EXPERTS, HIDDEN, INTER, NULL, &err));
    must(aff__experts_from_checkpoint(&y, ckpt, "layers.", LAYERS, EXPERTS, HIDDEN, INTER, &err));
    assert_int_equal(aff__experts_shape(x).dtype, AFF_MXFP4);
    for (int i = 0; i < LAYERS * EXPERTS; i += 7) {
        must(aff__experts_get(x, i / EXPERTS, i % EXPERTS, &e, &err));
        must(aff__experts_get(y, i / EXPERTS, i % EXPERTS, &f, &err));
        assert_memory_equal(e.up.codes, f.up.codes, INTER * HIDDEN / 2);
        assert_memory_equal(e.up.fields, f.up.fields, INTER * HIDDEN / 32);
        assert_memory_equal(e.down.codes, f.down.codes, HIDDEN * INTER / 2);
    }
    aff__experts_free(x);
    aff__experts_free(y);
    aff__experts_free(NULL);
    aff__container_close(a);
}

/* Copies of a row-major file within a bound: the least recently used goes, what is held stays, bytes are right after coming back. */
static void test_copies(void **state)
{
    char dir[64], path[64];
    aff_container *a;
    aff_experts *x;
    aff_expert first, e;
    enum { SIZE = HIDDEN / 64 * INTER * 20 };
    static uint8_t want[EXPERTS][SIZE];
    snprintf(dir, sizeof dir, "%s/toy", root);
    snprintf(path, sizeof path, "%s/copies.aff", root);
    test_write_container(dir, path, AFF_Q2P875Q4, 11, 1);
    must(aff__container_open(&a, path, &err));
    const aff_ctensor *t = aff__container_find(a, "__codebook");
    must(aff__experts_from_container(&x, a, LAYERS, EXPERTS, HIDDEN, INTER, t->blob + t->m.data_off, &err));
    const uint64_t each = aff__experts_copies(x).each;
    assert_int_equal(each, aff__container_layer(a, 0)->stride);
    for (int i = 0; i < EXPERTS; i++) {
        must(aff__experts_get(x, 1, i, &e, &err));
        memcpy(want[i], e.gate.codes, SIZE);
        aff__experts_put(x, 1, i);
    }
    assert_int_equal(aff__experts_copies(x).held, EXPERTS); /* no bound so far */
    aff__experts_limit(x, 3 * each + each / 2);
    assert_int_equal(aff__experts_copies(x).held, 3); /* the last three used */
    const int64_t made = aff__experts_copies(x).made;
    for (int i = EXPERTS - 3; i < EXPERTS; i++) {
        must(aff__experts_get(x, 1, i, &e, &err));
        aff__experts_put(x, 1, i);
    }
    assert_int_equal(aff__experts_copies(x).made, made);
    /* One held through it all keeps its address and bytes; all others come and go. */
    must(aff__experts_get(x, 1, 4, &first, &err));
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < EXPERTS; i++) {
            must(aff__experts_get(x, 1, i, &e, &err));
            assert_memory_equal(e.gate.codes, want[i], SIZE);
            if (i == 4) assert_ptr_equal(e.gate.codes, first.gate.codes);
            aff__experts_put(x, 1, i);
            assert_true(aff__experts_copies(x).held <= 3);
        }
    assert_memory_equal(first.gate.codes, want[4], SIZE);
    aff__experts_put(x, 1, 4);
    /* More held at a time than the bound: kept, and given back down to it afterwards. */
    for (int i = 0; i < EXPERTS; i++) must(aff__experts_get(x, 2, i, &e, &err));
    assert_int_equal(aff__experts_copies(x).held, EXPERTS);
    assert_int_equal(aff__experts_copies(x).most, EXPERTS);
    for (int i = 0; i < EXPERTS; i++) aff__experts_put(x, 2, i);
    assert_int_equal(aff__experts_copies(x).held, 3);
    /* A plan that fails half way gives back what it had. */
    aff_plan *p;
    const aff_moe_plan *m;
    static const int32_t picks[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const float weights[8];
    must(aff__plan_create(&p, 1, 8, EXPERTS, &err));
    aff__experts_limit(x, 0);
    aff__alloc_fail_after(5);
    assert_int_equal(aff__plan_build(p, x, 3, picks, weights, 1, 8, &m, &err), AFF_E_NOMEM);
    aff__alloc_fail_after(0);
    assert_int_equal(aff__experts_copies(x).held, 0);
    must(aff__plan_build(p, x, 3, picks, weights, 1, 8, &m, &err));
    assert_int_equal(aff__experts_copies(x).held, 8);
    aff__plan_done(p);
    assert_int_equal(aff__experts_copies(x).held, 0);
    aff__plan_free(p);
    aff__experts_free(x);
    aff__container_close(a);
}

static void test_checkpoint_errors(void **state)
{
    aff_experts *s;
    assert_int_equal(aff__experts_from_checkpoint(&s, ckpt, "layers.", LAYERS, EXPERTS + 1, HIDDEN, INTER, &err),
                     AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "layers.0.ffn.experts.16.w1.weight"));
    assert_int_equal(aff__experts_from_checkpoint(&s, ckpt, "layers.", LAYERS, EXPERTS, HIDDEN, 2 * INTER, &err),
                     AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "[256, 128]"));
    assert_int_equal(aff__experts_from_checkpoint(&s, ckpt, "layers.", LAYERS, EXPERTS, HIDDEN + 16, INTER, &err),
                     AFF_E_UNSUPPORTED);
}

static int make_root(void **state)
{
    char dir[64];
    if (!mkdtemp(root)) return -1;
    snprintf(dir, sizeof dir, "%s/toy", root);
    if (aff_test_write_parity_model("toy", dir) != 0) return -1;
    return aff__ckpt_open(&ckpt, dir, &err) == AFF_OK ? 0 : -1;
}
static int remove_root(void **state)
{
    char cmd[64];
    aff__ckpt_close(ckpt);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_plan), cmocka_unit_test(test_layouts),
                                       cmocka_unit_test(test_copies),
                                       cmocka_unit_test(test_checkpoint_errors)};
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
