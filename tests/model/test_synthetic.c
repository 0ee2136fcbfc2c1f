/* Networks without a file: the geometry is the real one's, weights depend on the seed, passes stay finite, outlines
 * have the same sizes. */
#include "model/synthetic.h"
#include "model/forward.h"
#include "model/net_internal.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static aff_net *make(const aff_synthetic *y, bool outline)
{
    aff_net *n;
    must(aff__net_open(
        &n, NULL, &(aff_net_options){.numerics = AFF_FAST, .draft = true, .synthetic = y, .outline = outline}, &err));
    return n;
}

/* Spec model-v4 2 and 10.2, runtime 1. */
static void test_flash(void **state)
{
    aff_net *n = make(&(aff_synthetic){.geometry = "flash"}, true);
    const aff_config *c = aff__net_config(n);
    assert_int_equal(c->layers, 43);
    assert_int_equal(c->hidden, 4096);
    assert_int_equal(c->inter, 2048);
    assert_int_equal(c->vocab, 129280);
    assert_int_equal(c->n_ratio, 46);
    int four = 0, many = 0;
    for (int l = 0; l < 46; l++) {
        four += c->ratio[l] == 4;
        many += c->ratio[l] == 128;
    }
    assert_int_equal(four, 21);
    assert_int_equal(many, 20);
    for (int i = 0; i < 3; i++) assert_int_equal(c->tap[i], 40 + i);
    aff_seq_plan p;
    must(aff__seq_plan(&p, n, 1 << 20, &err));
    assert_true(fabs(p.per_position - 3514.25) < 1e-9);
    const aff_net_sizes z = aff__net_sizes(n);
    assert_int_equal(z.expert, 9060352);
    assert_int_equal(z.experts[1], 3 * 256);
    assert_int_equal(z.file[0] + z.file[1], 0);
    /* About 6.2 GiB of FP8 and 2.0 of embedding and head, and the small rest. */
    assert_in_range(z.memory[0], UINT64_C(8) << 30, UINT64_C(9) << 30);
    aff__net_close(n);
    static const aff_synthetic bad[] = {{.geometry = "huge"},
                                        {.geometry = "flash", .layers = 44},
                                        {.geometry = "flash", .experts = 5},
                                        {.geometry = "tiny", .experts = 17}};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(aff__net_open(&n, NULL, &(aff_net_options){.synthetic = &bad[i], .outline = true}, &err),
                         AFF_E_INVALID);
        assert_non_null(strstr(err.msg, "synthetic"));
    }
}

static void test_seeds(void **state)
{
    uint64_t id[3][2];
    for (int i = 0; i < 3; i++) {
        aff_net *n =
            make(&(aff_synthetic){.geometry = "tiny", .layers = 5, .experts = 8, .seed = i == 2 ? 8 : 7}, false);
        aff__net_identity(n, id[i]);
        aff__net_close(n);
    }
    assert_memory_equal(id[0], id[1], sizeof id[0]);
    assert_memory_not_equal(id[0], id[2], sizeof id[0]);
}

/* Every product has gain about 1: streams neither die nor explode, the head gives a spread, no two experts are alike.
 */
static void test_passes(void **state)
{
    aff_net *n = make(&(aff_synthetic){.geometry = "tiny", .seed = 3}, false);
    const int V = aff__net_config(n)->vocab;
    aff_runner *r;
    aff_seq *s;
    int32_t ids[300], draft[5];
    float conf[5], *l = calloc((size_t)V * 2, sizeof *l);
    must(aff__runner_create(&r, n, 1, &err));
    must(aff__seq_create(&s, n, 400, &err));
    for (int i = 0; i < 300; i++) ids[i] = i * 911 % V;
    must(aff__forward(r, &(aff_batch){.n = 300, .id = ids, .seq = s, .want_from = 298, .logits = l}, &err));
    double mean = 0, square = 0, differ = 0;
    for (int v = 0; v < V; v++) {
        assert_true(isfinite(l[v]));
        mean += (double)l[v] / V;
        square += (double)l[v] * (double)l[v] / V;
        differ += fabs((double)(l[v] - l[V + v])) / V;
    }
    const double deviation = sqrt(square - mean * mean);
    if (!(deviation > 0.3 && deviation < 3)) fail_msg("deviation of the logits: %g", deviation);
    assert_true(differ > 0.1);
    must(aff__draft_block(r, s, 5, draft, conf, NULL, NULL, NULL, &err));
    for (int i = 0; i < 5; i++) assert_true(draft[i] >= 0 && draft[i] < V && isfinite(conf[i]));
    aff_expert a, b;
    a = aff__experts_at(n->experts, 2, 3);
    b = aff__experts_at(n->experts, 2, 4);
    assert_memory_not_equal(a.gate.codes, b.gate.codes, 64);
    assert_memory_not_equal(a.gate.codes, a.up.codes, 64);
    aff__seq_free(s);
    aff__runner_free(r);
    aff__net_close(n);
    free(l);
}

/* Experts on demand: the same at every call, none like another, block exponents of 4 and more as in the others. */
static void test_on_demand(void **state)
{
    aff_net *n = make(&(aff_synthetic){.geometry = "tiny", .seed = 3, .on_demand = true}, false);
    const aff_slot_layout y = aff__experts_layout(n->experts);
    uint8_t *a = malloc(y.pitch), *b = malloc(y.pitch);
    assert_false(aff__experts_in_place(n->experts));
    aff__experts_copy(n->experts, 2, 3, a);
    aff__experts_copy(n->experts, 2, 3, b);
    for (int i = 0; i < 9; i++) assert_memory_equal(a + y.plane[i / 3][i % 3], b + y.plane[i / 3][i % 3], y.size[i / 3][i % 3]);
    aff__experts_copy(n->experts, 2, 4, b);
    for (int m = 0; m < 3; m++) {
        assert_memory_not_equal(a + y.plane[m][0], b + y.plane[m][0], 4096);
        assert_memory_not_equal(a + y.plane[m][1], b + y.plane[m][1], 512);
        for (uint64_t i = 0; i + 3 <= y.size[m][1]; i += 3) {
            const uint8_t *f = b + y.plane[m][1] + i;
            assert_true((f[0] & 0x04) && (f[1] & 0x41) == 0x41 && (f[2] & 0x10));
        }
    }
    free(a);
    free(b);
    aff__net_close(n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_flash), cmocka_unit_test(test_seeds),
                                       cmocka_unit_test(test_passes), cmocka_unit_test(test_on_demand)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
