/* feedback: the factors give the moments back, every path pulls the same, and what the encoder does with them lowers
 * the cost they describe. */
#include "support/test.h"
#include "base/mem.h"
#include "quant/encode.h"
#include "quant/quant_naive.h"

enum { N = 192, ROWS = 40, TOKENS = 600, RECORD = 8192 };

static float triangle[N * (N + 1) / 2];
static double moments[N][N];

/* Inputs that share a few directions, with columns of unlike size; one column is always zero. */
static int set_up(void **state)
{
    static float mix[N][6], size[N];
    uint64_t rng = 21;
    (void)state;
    for (int i = 0; i < N; i++) {
        size[i] = i == 50 ? 0 : expf(naive_gauss(&rng) * 0.5f);
        for (int k = 0; k < 6; k++) mix[i][k] = naive_gauss(&rng);
    }
    for (int t = 0; t < TOKENS; t++) {
        float z[6], x[N];
        for (int k = 0; k < 6; k++) z[k] = naive_gauss(&rng);
        for (int i = 0; i < N; i++) {
            x[i] = naive_gauss(&rng);
            for (int k = 0; k < 6; k++) x[i] += mix[i][k] * z[k];
            x[i] *= size[i];
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) moments[i][j] += (double)x[i] * (double)x[j];
    }
    for (int i = 0, at = 0; i < N; i++)
        for (int j = i; j < N; j++) triangle[at++] = (float)moments[i][j];
    return 0;
}

static aff_feedback *factors(aff_cpu_level level, aff_pool *pool)
{
    aff_error err = {0};
    aff_feedback *f;
    aff__cpu_cap(level);
    if (aff__feedback_create(&f, N, &err) != AFF_OK ||
        aff__feedback_factor(f, N, (const uint8_t *)triangle, pool, &err) != AFF_OK)
        fail_msg("%s", err.msg);
    aff__cpu_cap(AFF_CPU_AVX512);
    return f;
}

/* M_kj by the panels; the identity inside a quad. */
static double entry(const aff_feedback *f, int k, int j)
{
    if (k / 4 == j / 4) return k == j;
    return k < j ? 0 : (double)aff__feedback_panel(f, (uint64_t)k / 16)[j * 16 + k % 16];
}

/* H = M^T D M: with S = M^-T H M^-1 block-diagonal. Checked as M^T D M against H, D taken from H itself from the last
 * quad up: D_q = H_qq - sum over later quads r of M_rq^T D_r M_rq. */
static void factors_give_the_moments(void **state)
{
    static double d[N][4], mean, got, worst;
    aff_feedback *f = factors(AFF_CPU_AVX512, NULL);
    (void)state;
    for (int i = 0; i < N; i++) mean += moments[i][i] / N;
    for (int q = N - 4; q >= 0; q -= 4)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                double s = moments[q + i][q + j] + (i == j ? 0.3 * mean : 0);
                for (int k = q + 4; k < N; k++)
                    for (int l = 0; l < 4; l++) s -= entry(f, k, q + i) * d[k][l] * entry(f, k / 4 * 4 + l, q + j);
                d[q + i][j] = s;
            }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            got = 0;
            for (int k = 0; k < N; k++)
                for (int l = 0; l < 4; l++) got += entry(f, k, i) * d[k][l] * entry(f, k / 4 * 4 + l, j);
            const double off = fabs(got - moments[i][j] - (i == j ? 0.3 * mean : 0));
            worst = off > worst ? off : worst;
        }
    if (!(worst < 1e-5 * mean)) fail_msg("M^T D M is off by %g of %g", worst, mean);
    double sum = 0;
    for (int i = 0; i < N; i++) sum += d[i][i % 4] / N;
    for (int i = 0; i < N; i++)
        if (!(fabs((double)f->metric[i] - d[i][i % 4] / sum) < 1e-4))
            fail_msg("metric %d: %g, expected %g", i, (double)f->metric[i], d[i][i % 4] / sum);
    aff__feedback_free(f);
}

static void threads_and_reuse_change_nothing(void **state)
{
    static float other[64 * 65 / 2];
    aff_error err = {0};
    aff_pool *pool;
    (void)state;
    for (int i = 0, at = 0; i < 64; at += 64 - i, i++) other[at] = (float)(i + 1);
    assert_int_equal(aff__pool_create(&pool, 3, &err), AFF_OK);
    aff_feedback *a = factors(AFF_CPU_AVX512, NULL), *b = factors(AFF_CPU_AVX512, pool);
    for (int k = 0; k < 2; k++) {
        assert_memory_equal(a->metric, b->metric, N * sizeof(float));
        assert_memory_equal(a->panels, b->panels, N / 16 * (N / 16 + 1) / 2 * 256 * sizeof(float));
        assert_int_equal(aff__feedback_factor(b, 64, (const uint8_t *)other, pool, &err), AFF_OK); /* another size */
        assert_int_equal(aff__feedback_factor(b, N, (const uint8_t *)triangle, pool, &err), AFF_OK);
    }
    assert_int_equal(aff__feedback_factor(b, N + 16, (const uint8_t *)triangle, pool, &err), AFF_E_INVALID);
    assert_int_equal(aff__feedback_factor(b, 24, (const uint8_t *)triangle, pool, &err), AFF_E_INVALID);
    aff__feedback_free(a);
    aff__feedback_free(b);
    aff__pool_free(pool);
}

static void not_positive_definite(void **state)
{
    aff_error err = {0};
    aff_feedback *f;
    float bad[16 * 17 / 2];
    (void)state;
    assert_int_equal(aff__feedback_create(&f, 16, &err), AFF_OK);
    for (int i = 0, at = 0; i < 16; i++)
        for (int j = i; j < 16; j++) bad[at++] = i == j || (i == 5 && j == 6) ? 1.0f : 0;
    assert_int_equal(aff__feedback_factor(f, 16, (const uint8_t *)bad, NULL, &err), AFF_OK);
    bad[5 * 16 - 10 + 1] = 1.4f; /* moment (5, 6) larger than the damped 1.3 of both */
    assert_int_equal(aff__feedback_factor(f, 16, (const uint8_t *)bad, NULL, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "columns 4 to 7"));
    memset(bad, 0, sizeof bad);
    assert_int_equal(aff__feedback_factor(f, 16, (const uint8_t *)bad, NULL, &err), AFF_E_FORMAT);
    aff__feedback_free(f);
}

static void every_path_pulls_the_same(void **state)
{
    static float panel[100 * 16], d[100 * AFF_FEEDBACK_ROWS], want[AFF_FEEDBACK_ROWS * 16], got[AFF_FEEDBACK_ROWS * 16];
    uint64_t rng = 4;
    (void)state;
    for (size_t i = 0; i < sizeof panel / sizeof *panel; i++) panel[i] = naive_gauss(&rng);
    for (size_t i = 0; i < sizeof d / sizeof *d; i++) d[i] = naive_gauss(&rng);
    for (uint64_t rows = 1; rows <= AFF_FEEDBACK_ROWS; rows += rows < 4 ? 1 : 7)
        for (uint64_t n = 0; n <= 100; n += 20) {
            for (uint64_t r = 0; r < rows; r++)
                for (uint64_t c = 0; c < 16; c++) {
                    float s = 0;
                    for (uint64_t j = 0; j < n; j++) s = fmaf(panel[j * 16 + c], d[j * AFF_FEEDBACK_ROWS + r], s);
                    want[r * 16 + c] = s;
                }
            for (int level = 0; level <= (int)aff__cpu_level(); level++) {
                memset(got, 0x7f, sizeof got);
                aff__feedback_path((aff_cpu_level)level)(panel, d, n, rows, got);
                assert_memory_equal(got, want, rows * 16 * sizeof(float));
                for (uint64_t i = rows * 16; i < AFF_FEEDBACK_ROWS * 16; i++)
                    assert_int_equal(((uint8_t *)&got[i])[0], 0x7f);
            }
        }
}

/* ---- the encoder ---- */

static uint8_t codes[ROWS * N / 2], scales[ROWS * N / 32], book[AFF_CB_BYTES];
static float w[ROWS * N];

/* Gaussian rows; a row of zeros; a row of one large block, blocks far below others, the least and the largest scales.
 */
static aff_mxfp4 source(void)
{
    uint64_t rng = 8;
    const aff_mxfp4 m = {codes, scales, ROWS, N};
    for (int b = 0; b < ROWS * N / 32; b++) {
        const int row = b / (N / 32);
        scales[b] = (uint8_t)(118 + aff__splitmix64(&rng) % 2);
        for (int i = 0; i < 16; i++)
            codes[b * 16 + i] =
                (uint8_t)(aff__f32_to_e2m1(naive_gauss(&rng) * 2.5f) | aff__f32_to_e2m1(naive_gauss(&rng) * 2.5f) << 4);
        if (row == 4) memset(codes + b * 16, 0x80, 16);
        if (row == 7) scales[b] = (uint8_t)(100 + b % 6 * 4);
        if (row == 8) scales[b] = (uint8_t)(b % 2);
        if (row == 9) scales[b] = 252;
        if (row == 11) scales[b] = b % 6 ? 60 : 120;
    }
    assert_int_equal(aff__mxfp4_decode(&m, w, NULL), AFF_OK);
    return m;
}

static aff_matdesc layout(void)
{
    aff_matdesc m = {.rows = ROWS, .cols = N, .quant = AFF_Q2P875G};
    m.data_size = ROWS * N * 5 / 16;
    m.scale_off = aff__align_up(m.data_size, 256);
    m.scale_size = ROWS * N * 3 / 64;
    m.rscale_off = aff__align_up(m.scale_off + m.scale_size, 256);
    m.rscale_size = ROWS * 2;
    return m;
}

static void encode(aff_cpu_level level, bool feedback, uint8_t *record)
{
    aff_cb_table t[AFF_CB_VARIANTS];
    aff_encode_space *sp;
    aff_search *s;
    aff_error err = {0};
    aff_qerror e = {0}, check = {0};
    const aff_matdesc m = layout();
    const aff_mxfp4 src = source();
    aff_feedback *f = feedback ? factors(level, NULL) : NULL;
    naive_table(3, book);
    aff__cb_unpack(book, t);
    aff__cpu_cap(level);
    assert_int_equal(aff__search_create(&s, t, AFF_SEARCH_JMIN, NULL, &err), AFF_OK);
    assert_int_equal(aff__encode_space_create(&sp, N, &err), AFF_OK);
    memset(record, 0, RECORD);
    aff__encode_matrix(s, sp, &m, &src, NULL, f, record, &e);
    assert_int_equal(aff__expert_matrix_error(&m, record, book, w, NULL, &check), AFF_OK);
    assert_true(isfinite(check.err2) && fabs(check.err2 - e.err2) <= 1e-12 * check.err2);
    aff__encode_space_free(sp);
    aff__search_free(s);
    aff__feedback_free(f);
    aff__cpu_cap(AFF_CPU_AVX512);
}

/* sum over rows from..to of d H d^T over that of w H w^T */
static double cost(const uint8_t *record, int from, int to)
{
    static float y[ROWS * N];
    const aff_matdesc m = layout();
    double lost = 0, all = 0;
    assert_int_equal(aff__expert_matrix_decode(&m, record, book, y), AFF_OK);
    for (int r = from; r < to; r++)
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) {
                const double wi = (double)w[r * N + i], wj = (double)w[r * N + j];
                lost += (wi - (double)y[r * N + i]) * moments[i][j] * (wj - (double)y[r * N + j]);
                all += wi * moments[i][j] * wj;
            }
    return lost / all;
}

static void feedback_lowers_the_cost(void **state)
{
    static uint8_t plain[RECORD], fed[RECORD], again[RECORD];
    (void)state;
    encode(AFF_CPU_AVX512, false, plain);
    encode(AFF_CPU_AVX512, true, fed);
    const double a = cost(plain, 12, ROWS), b = cost(fed, 12, ROWS);
    print_message("cost without %.5f, with %.5f\n", a, b);
    assert_true(b < 0.5 * a); /* six shared directions carry most of the inputs, and errors can avoid them */
    for (int level = 0; level <= (int)aff__cpu_level(); level++) {
        encode((aff_cpu_level)level, true, again);
        assert_memory_equal(again, fed, RECORD);
    }
    float row[N];
    const aff_matdesc m = layout();
    assert_int_equal(aff__expert_row_decode(&m, fed, book, 4, row), AFF_OK);
    for (int i = 0; i < N; i++) assert_true(row[i] == 0);
    assert_true(cost(fed, 8, 9) < 0.5 && cost(fed, 9, 10) < 0.5); /* scales at both ends */
}

static void out_of_memory(void **state)
{
    aff_error err = {0};
    aff_feedback *f;
    (void)state;
    for (int n = 1; n <= 5; n++) {
        aff__alloc_fail_after(n);
        assert_int_equal(aff__feedback_create(&f, 64, &err), AFF_E_NOMEM);
        assert_null(f);
    }
    aff__alloc_fail_after(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(factors_give_the_moments), cmocka_unit_test(threads_and_reuse_change_nothing),
        cmocka_unit_test(not_positive_definite),    cmocka_unit_test(every_path_pulls_the_same),
        cmocka_unit_test(feedback_lowers_the_cost), cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
