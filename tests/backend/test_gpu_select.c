/* The indexer: scores and selection equal to the CPU's on keys and queries of the A4 grid; top k alone on hard cases. */
#include "backend/gpu_kernel_test.h"

static void select_rows(int heads, int dim, int ratio, int topk, int T, int64_t far, int bundle, unsigned blocks)
{
    enum { MAX = 40 };
    const aff_rowfmt f = aff__rowfmt_key(AFF_FAST, dim);
    aff_layer_state state[2], *of[MAX];
    const aff_layer_state *seq[MAX];
    int64_t pos[MAX];
    int first[MAX];
    const int64_t groups = far / ratio + T + 2, n = (int64_t)T * heads * dim;
    float x[128], *iq = uniform(n, 2), *w = uniform((int64_t)T * heads, 1);
    for (int q = 0; q < 2; q++) {
        state[q] = (aff_layer_state){.key = &f, .ikey = NEW(uint8_t, groups * f.bytes)};
        for (int64_t g = 0; g < groups; g++) {
            for (int d = 0; d < dim; d++) x[d] = draw_unit(&seed) * (1 + (float)(d / 32));
            if (g % 5 == 1) memset(x, 0, sizeof x); /* ties */
            aff__a4(x, dim);
            aff__row_encode(&f, x, (uint8_t *)state[q].ikey + g * f.bytes);
        }
    }
    for (int t = 0, q = 0, f0 = 0; t < T; t++) {
        if (t && !q && draw(&seed, 4) == 0) q = 1, f0 = t;
        pos[t] = t == f0 ? draw_int(&seed, (int)far / 2, (int)far) : pos[t - 1] + 1;
        first[t] = f0, of[t] = &state[q], seq[t] = &state[q];
    }
    for (int64_t i = 0; i < n; i += dim) aff__a4(iq + i, dim);
    uint16_t *qb = NEW(uint16_t, n);
    to_bf16(iq, qb, n);
    const aff_rowset rs = {.n = T, .pos = pos, .first = first, .state = of};
    int *want = NEW(int, T * topk);
    aff_error err;
    assert_int_equal(cpu->index_select(cpu, &rs, iq, w, heads, dim, ratio, topk, want, &err), AFF_OK);
    EACH_LAYOUT
    {
        const int64_t ld = groups;
        float *score = NEW(float, T * ld), *cs = NEW(float, ld), *cw = NEW(float, heads);
        char *buf = NEW(char, (int64_t)aff__cpu_index_bytes(heads, &f));
        int32_t *sel = NEW(int32_t, T * topk);
        const aff_k_rows rows = {pos, first, seq, T, 0};
        const float scale = 1.0f / sqrtf((float)dim * (float)heads);
        const aff_k_scores s = {.rows = rows, .iq = qb, .w = w, .score = score, .ld = ld, .fmt = f, .heads = heads, .dim = dim, .ratio = ratio, .topk = topk, .bundle = bundle, .scale = scale};
        const aff_k_topk k = {.rows = rows, .score = score, .sel = sel, .ld = ld, .ratio = ratio, .topk = topk};
        launch("scores", up(T, bundle) * blocks, 256, aff__k_scores_smem(layout_amd), &s);
        launch("topk", (unsigned)T, 1024, AFF_K_TOPK_SMEM, &k);
        for (int t = 0; t < T; t++) {
            const int m = (int)((pos[t] + 1) / ratio);
            for (int h = 0; h < heads; h++) cw[h] = w[t * heads + h] * scale;
            if (m > topk) {
                aff_index_query query;
                aff__cpu_index_prepare(&query, iq + (int64_t)t * heads * dim, cw, heads, &f, buf);
                aff__cpu_index_scores(&query, of[t]->ikey, m, cs);
                same_bits("score", score + t * ld, cs, m);
            }
            same_bytes("selection", sel + (int64_t)t * topk, want + (int64_t)t * topk, 4 * (m < topk ? m : topk));
        }
        free(score), free(cs), free(cw), free(sel), free(buf);
    }
    free(iq), free(w), free(qb), free(want), free(state[0].ikey), free(state[1].ikey);
}

static void test_selection(void **state)
{
    (void)state;
    select_rows(64, 128, 4, 64, 5, 1500, 1, 3);
    select_rows(4, 32, 4, 16, 20, 150, 16, 1);
    select_rows(9, 64, 4, 512, 9, 2100, 4, 7);
    select_rows(70, 96, 2, 7, 3, 200, 2, 2);
}

/* Ties, zeros of both signs, infinities, NaN, few distinct values, all equal. */
static void test_topk(void **state)
{
    (void)state;
    static const int size[][2] = {{5, 3}, {64, 63}, {1000, 1}, {4097, 512}, {20000, 512}, {33, 32}, {300, 7}, {2050, 512}};
    for (int round = 0; round < 24; round++) {
        const int n = size[round % 8][0], k = size[round % 8][1], kind = round / 8;
        float *score = NEW(float, n);
        int *want = NEW(int, k), *tmp = NEW(int, n);
        for (int i = 0; i < n; i++) {
            score[i] = kind == 0 ? draw_unit(&seed) : kind == 1 ? (float)draw_int(&seed, -2, 2) * -0.0f + (float)draw_int(&seed, 0, 3) : ldexpf(draw_unit(&seed), draw_int(&seed, -140, 120));
            if (kind == 2 && i % 11 == 3) score[i] = NAN;
            if (kind == 2 && i % 17 == 4) score[i] = i % 2 ? INFINITY : -INFINITY;
            if (round == 23) score[i] = 1.5f;
        }
        aff__cpu_topk(score, n, k, want, tmp);
        EACH_LAYOUT
        {
            int32_t *sel = NEW(int32_t, k);
            const int64_t pos = n - 1;
            const int first = 0;
            const aff_k_topk a = {.rows = {&pos, &first, NULL, 1, 0}, .score = score, .sel = sel, .ld = n, .ratio = 1, .topk = k};
            launch("topk", 1, 1024, AFF_K_TOPK_SMEM, &a);
            same_bytes("top k", sel, want, 4 * (int64_t)k);
            free(sel);
        }
        free(score), free(want), free(tmp);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_selection), cmocka_unit_test(test_topk)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
