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

/* The one part of a plan whose experts lie in the checkpoint's files. */
static aff_status in_place(void *ctx, const aff_moe_plan *m, aff_error *e)
{
    char name[64];
    ++*(int *)ctx;
    assert_int_equal(m->n_tiles, 5);
    assert_int_equal(m->n_entries, 9);
    for (int i = 0; i < m->n_tiles; i++) {
        snprintf(name, sizeof name, "layers.7.ffn.experts.%d.w2.weight", m->tile[i].id);
        assert_ptr_equal(m->tile[i].expert.down.codes, aff__ckpt_find(ckpt, name)->data);
        snprintf(name, sizeof name, "layers.7.ffn.experts.%d.w1.scale", m->tile[i].id);
        assert_ptr_equal(m->tile[i].expert.gate.fields, aff__ckpt_find(ckpt, name)->data);
    }
    return AFF_OK;
}

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
    aff_tiers *tiers;
    aff_tier_options mapped = {.mapped = true};
    aff__placement_options_init(&mapped.placement);
    must(aff__tiers_create(&tiers, s, NULL, &mapped, &err));
    must(aff__plan_create(&p, 3, 3, EXPERTS, &err));
    for (int again = 0; again < 2; again++) {
        must(aff__plan_build(p, 7, picks, weights, 3, 3, &m, &err));
        assert_int_equal(m->n_tiles, 5);
        assert_int_equal(m->n_entries, 9);
        int at = 0;
        for (int i = 0; i < 5; i++) {
            assert_int_equal(m->tile[i].id, want_id[i]);
            assert_int_equal(m->tile[i].first, at);
            assert_int_equal(m->tile[i].count, want_count[i]);
            at += want_count[i];
        }
        assert_memory_equal(m->row, want_row, sizeof want_row);
        assert_memory_equal(m->rank, want_rank, sizeof want_rank);
        assert_memory_equal(m->weight, want_weight, sizeof want_weight);
        int parts = 0;
        must(aff__plan_each(p, tiers, 7, in_place, &parts, &err));
        assert_int_equal(parts, 1);
    }
    static const int32_t twice[] = {1, 2, 1}, high[] = {0, 1, 16}, low[] = {0, -1, 2};
    assert_int_equal(aff__plan_build(p, 0, twice, weights, 1, 3, &m, &err), AFF_E_FORMAT);
    assert_int_equal(aff__plan_build(p, 0, high, weights, 1, 3, &m, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "16"));
    assert_int_equal(aff__plan_build(p, 0, low, weights, 1, 3, &m, &err), AFF_E_FORMAT);
    assert_int_equal(aff__plan_build(p, 0, picks, weights, 5, 3, &m, &err), AFF_E_INVALID);
    must(aff__plan_build(p, 0, picks, weights, 3, 3, &m, &err)); /* still works */
    aff__plan_free(p);
    aff__plan_free(NULL);
    aff__tiers_free(tiers);
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
    const aff_slot_layout layout = aff__experts_layout(x), other = aff__experts_layout(y);
    assert_memory_equal(layout.plane, other.plane, sizeof layout.plane);
    assert_int_equal(layout.pitch % 4096, 0);
    assert_true(layout.bytes <= layout.pitch && !aff__experts_in_place(x) && aff__experts_in_place(y));
    uint8_t *slot = malloc(layout.pitch), *same = malloc(layout.pitch);
    for (int i = LAYERS * EXPERTS - 1; i >= 0; i -= 5) {
        aff__experts_copy(x, i / EXPERTS, i % EXPERTS, slot);
        aff__experts_copy(y, i / EXPERTS, i % EXPERTS, same);
        e = aff__slot_expert(&layout, slot);
        f = aff__experts_at(y, i / EXPERTS, i % EXPERTS);
        assert_memory_equal(e.gate.codes, f.gate.codes, HIDDEN / 64 * INTER * 20);
        assert_memory_equal(e.up.fields, f.up.fields, HIDDEN / 64 * INTER * 3);
        assert_memory_equal(e.down.codes, f.down.codes, INTER / 64 * HIDDEN * 20);
        assert_memory_equal(e.down.rscale, f.down.rscale, HIDDEN * 2);
        f = aff__slot_expert(&other, same);
        assert_memory_equal(e.up.codes, f.up.codes, HIDDEN / 64 * INTER * 20);
        assert_memory_equal(e.down.fields, f.down.fields, INTER / 64 * HIDDEN * 3);
    }
    free(slot);
    free(same);
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
        e = aff__experts_at(x, i / EXPERTS, i % EXPERTS);
        f = aff__experts_at(y, i / EXPERTS, i % EXPERTS);
        assert_memory_equal(e.up.codes, f.up.codes, INTER * HIDDEN / 2);
        assert_memory_equal(e.up.fields, f.up.fields, INTER * HIDDEN / 32);
        assert_memory_equal(e.down.codes, f.down.codes, HIDDEN * INTER / 2);
    }
    aff__experts_free(x);
    aff__experts_free(y);
    aff__experts_free(NULL);
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
                                                                      cmocka_unit_test(test_checkpoint_errors)};
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
