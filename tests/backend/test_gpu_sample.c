/* Argmax, adjustments, the sampler and acceptance as device kernels: the host's tokens. */
#include "engine/logits.h"
#include "engine/sampler.h"
#include "backend/gpu_kernel_test.h"

static void argmax(const float *x, int64_t ld, int T, int n, int parts, int32_t *id, int32_t *bad)
{
    uint32_t *part = NEW(uint32_t, T * 3 * parts), *count = NEW(uint32_t, T);
    const aff_k_argmax a = {.x = x, .id = id, .bad = bad, .part = part, .count = count, .ld = ld, .n = n, .parts = parts};
    for (int twice = 0; twice < 2; twice++) launch("argmax", (unsigned)(T * parts), 256, 96, &a);
    free(part), free(count);
}

static void test_argmax(void **state)
{
    (void)state;
    for (int round = 0; round < 8; round++) {
        const int n = round == 0 ? 1 : draw_int(&seed, 1, 5000), T = draw_int(&seed, 1, 4), ld = n + round;
        float *x = floats((int64_t)T * ld, round & 1, &seed), *packed = NEW(float, T * n);
        int32_t want[4], id[4], bad[4];
        for (int i = 0; round == 2 && i < T * ld; i++) x[i] = (float)draw_int(&seed, -3, 3); /* ties */
        for (int i = 0; round > 4 && i < T * ld; i++) x[i] = round == 5 || draw(&seed, 4) == 0 ? NAN : round == 6 ? -INFINITY : x[i];
        for (int t = 0; t < T; t++) memcpy(packed + t * n, x + t * ld, sizeof *x * (size_t)n);
        cpu->argmax(cpu, packed, T, n, want);
        EACH_LAYOUT
        {
            argmax(x, ld, T, n, n < 7 ? 1 : 7, id, bad);
            same_bytes("argmax", id, want, 4 * T);
            for (int t = 0; t < T; t++) {
                int32_t v;
                assert_int_equal(bad[t], aff__argmax(packed + t * n, n, &v, NULL) != AFF_OK);
            }
        }
        free(x), free(packed);
    }
}

static void test_adjust(void **state)
{
    (void)state;
    enum { V = 700, T = 3 };
    float *x = uniform(T * V, 5), *want = NEW(float, T * V), bias[4] = {1.5f, -0.3f, 100, 0x1p-20f};
    int32_t *all = NEW(int32_t, V), *out = NEW(int32_t, V), id[4] = {3, 699, 3, 3};
    uint32_t mask[22];
    for (int v = 0; v < V; v++) all[v] = draw_int(&seed, 0, 2), out[v] = draw_int(&seed, 0, 3);
    for (int i = 0; i < 22; i++) mask[i] = (uint32_t)aff__splitmix64(&seed);
    aff_bias b[4];
    for (int i = 0; i < 4; i++) b[i] = (aff_bias){id[i], bias[i]};
    const aff_adjust a[T] = {{1.3, 0.25, -0.75, b, 4}, {0, 0, 0.1, b, 1}, {0.7, 0, 0, NULL, 0}};
    const aff_occurrences o = {all, out};
    for (int t = 0; t < T; t++) aff__adjust_logits(&a[t], &o, x + t * V, V, want + t * V);
    for (int v = 0; v < V; v++)
        if (!(mask[v / 32] >> (v % 32) & 1)) want[2 * V + v] = -INFINITY;
    EACH_LAYOUT
    {
        float *y = NEW(float, T * V);
        aff_k_adjustment r[T];
        for (int t = 0; t < T; t++) r[t] = (aff_k_adjustment){a[t].repetition, a[t].presence, a[t].frequency, all, out, id, bias, t == 2 ? mask : NULL, a[t].n_bias};
        const aff_k_adjust k = {.x = x, .y = y, .row = r, .ld = V, .vocab = V};
        launch("adjust", T * up(V, 256), 256, 0, &k);
        same_bits("adjust", y, want, T * V);
        free(y);
    }
    free(x), free(want), free(all), free(out);
}

static void test_sampler(void **state)
{
    (void)state;
    enum { T = 8 };
    for (int round = 0; round < 6; round++) {
        const int V = round == 0 ? 1 : round == 1 ? 40 : draw_int(&seed, 300, 3000);
        float *x = uniform((int64_t)T * V, round == 3 ? 40 : 6);
        aff_sampling p[T];
        int64_t pos[T];
        aff_k_draw d[T];
        int32_t want[T];
        aff_sampler *s;
        aff_error err;
        if (round == 4)
            for (int i = 0; i < T * V; i++) x[i] = (float)draw_int(&seed, 0, 3); /* ties at every threshold */
        if (round == 5) x[V + 3] = NAN, x[2 * V + 5] = INFINITY, x[7] = -INFINITY;
        assert_int_equal(aff__sampler_create(&s, V, &err), AFF_OK);
        for (int t = 0; t < T; t++) {
            static const double temperature[] = {1, 0.6, 1.5, 0, 1, 0.01, 1, 3}, top_p[] = {1, 0.95, 0.5, 1, 0, 0.9, 1, 0.99}, min_p[] = {0, 0, 0, 0, 0, 0.05, 0.3, 1e-4};
            static const int64_t top_k[] = {0, 0, 20, 0, 0, 1, 7, 100};
            p[t] = (aff_sampling){temperature[t], top_k[t], top_p[t], min_p[t], 77 + (uint64_t)round, (uint32_t)t / 3};
            pos[t] = draw_int(&seed, 0, 100000);
            d[t] = (aff_k_draw){p[t].temperature, p[t].top_k, (uint64_t)ceil(p[t].top_p * 0x1p53), (uint64_t)ceil(p[t].min_p * 0x1p44), p[t].seed, p[t].choice};
            if (aff__sampler_next(s, x + (int64_t)t * V, &p[t], pos[t] + 1, &want[t], &err) != AFF_OK) want[t] = -1;
        }
        assert_int_equal(want[1] == -1, round == 5);
        EACH_LAYOUT
        {
            int32_t top[T], bad[T], id[T];
            uint64_t *w = NEW(uint64_t, T * V);
            argmax(x, V, T, V, 1, top, bad);
            const aff_k_sampler k = {.x = x, .draw = d, .top = top, .bad = bad, .pos = pos, .w = w, .id = id, .ld = V, .vocab = V};
            launch("weights", T * up(V, 256), 256, 0, &k);
            launch("sample", T, 1024, 4608, &k);
            same_bytes("sample", id, want, sizeof want);
            free(w);
        }
        aff__sampler_free(s);
        free(x);
    }
}

static void test_accept(void **state)
{
    (void)state;
    const int32_t start[] = {0, 3, 4, 10}, ids[] = {5, 7, 9, 1, 2, 4, 4, 8, 8, 8}, chosen[] = {7, 9, 6, 3, 4, 4, 9, 8, 8, 1};
    EACH_LAYOUT
    {
        int32_t kept[3], next[3];
        const aff_k_accept a = {start, ids, chosen, kept, next, 3};
        launch("accept", 1, 256, 0, &a);
        assert_int_equal(kept[0], 3), assert_int_equal(next[0], 6); /* all right */
        assert_int_equal(kept[1], 1), assert_int_equal(next[1], 3); /* no draft */
        assert_int_equal(kept[2], 3), assert_int_equal(next[2], 9); /* the third draft is wrong */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_argmax), cmocka_unit_test(test_adjust), cmocka_unit_test(test_sampler), cmocka_unit_test(test_accept)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
