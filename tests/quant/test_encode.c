/* encode, search: every path against full scans, bytes the same at every level, choices against brute force, the fit.
 */
#include "support/test.h"
#include "backend/gpu/encode.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "quant/encode.h"
#include "quant/quant_naive.h"

static uint8_t bytes[AFF_CB_BYTES];
static aff_cb_table table[2];

static aff_search *search_of(aff_cpu_level level)
{
    aff_error err = {0};
    aff_search *s;
    aff__cpu_cap(level);
    if (aff__search_create(&s, table, AFF_SEARCH_JMIN, NULL, &err) != AFF_OK) fail_msg("%s", err.msg);
    return s;
}

static int set_up(void **state)
{
    (void)state;
    naive_table(3, bytes);
    memcpy(bytes + 4 * 900, bytes + 4 * 17, 4); /* twins: of equals one is fixed */
    aff__cb_unpack(bytes, table);
    return 0;
}

static float distance_of(const float *c, const float *t, const float *w)
{
    float s = 0;
    for (int p = 0; p < 4; p++) s = fmaf(w[p] * (c[p] - t[p]), c[p] - t[p], s);
    return s;
}

static void random_quads(uint64_t *rng, int kind, float t[16], float w[16])
{
    for (int i = 0; i < 16; i++) {
        t[i] = naive_gauss(rng) * (kind % 3 == 0 ? 0.4f : kind % 3 == 1 ? 2.0f : 0.01f);
        w[i] = kind % 2 ? expf(naive_gauss(rng) * 2) : 1;
        if (kind % 5 == 4) t[i] = table[0][(i * 37 + kind) % 1024][i & 3];
        if (kind % 7 == 6 && i % 3) w[i] = 0x1p-10f;
    }
}

static void every_path_finds_the_best(void **state)
{
    (void)state;
    int levels = aff__cpu_level();
    aff_search *s = search_of(AFF_CPU_SCALAR);
    uint64_t rng = 5;
    for (int n = 0; n < 3000; n++) {
        const aff_search_table *st = &s->table[n & 1];
        float t[16], w[16], want[4];
        uint16_t at[4] = {0}, seed[4];
        random_quads(&rng, n, t, w);
        for (int q = 0; q < 4; q++) {
            want[q] = INFINITY;
            for (unsigned i = 0; i < 1024; i++) {
                float d = distance_of(table[n & 1][st->id[i]], t + 4 * q, w + 4 * q);
                if (d < want[q]) want[q] = d, at[q] = (uint16_t)i;
            }
            seed[q] = (uint16_t)(aff__splitmix64(&rng) % 1024);
        }
        float sum = ((want[0] + want[1]) + want[2]) + want[3];
        for (int level = 0; level <= levels; level++) {
            aff_search_fn fn = aff__search_path((aff_cpu_level)level);
            uint16_t pos[4] = {0};
            assert_true(fn(st, t, w, seed, 4, INFINITY, pos) == sum);
            assert_memory_equal(pos, at, sizeof at);
            assert_true(fn(st, t, w, seed, 4, sum * 1.0001f, pos) == sum);
            if (want[3] > 0 && sum > 0) assert_true(fn(st, t, w, seed, 4, sum * 0.999f, pos) >= sum * 0.999f);
            float low = want[0] * 0.5f;
            if (low > 0) assert_true(fn(st, t, w, seed, 4, low, pos) == low);
        }
    }
    aff__search_free(s);
    aff__cpu_cap(AFF_CPU_AVX512);
}

static void tables_hold_the_nearest(void **state)
{
    (void)state;
    static const float one[4] = {1, 1, 1, 1};
    aff_search *s = search_of(AFF_CPU_AVX512);
    uint64_t rng = 6;
    for (int n = 0; n < 3000; n++) {
        uint16_t q = (uint16_t)aff__splitmix64(&rng);
        int j = AFF_SEARCH_JMIN + n % AFF_SEARCH_J;
        unsigned v = n & 1, g = (unsigned)n / 2 & 3;
        float t[4], best = INFINITY;
        /* the definition of g: t_p = +-w[(p + h) mod 4] */
        for (int p = 0; p < 4; p++)
            t[p] = ldexpf(aff__e2m1_table[q >> (4 * ((p + (g & 2 ? 2 : 0)) & 3)) & 15], j) * (g & 1 ? -1.0f : 1.0f);
        for (int i = 0; i < 1024; i++) best = fminf(best, distance_of(table[v][i], t, one));
        assert_true(aff__search_rank(s, j, q)[v * 4 + g] == best);
        uint16_t pos = aff__search_near(s, j, v, aff__quad_turn(q, g));
        assert_true(distance_of(table[v][s->table[v].id[pos]], t, one) == best);
    }
    aff__search_free(s);
}

enum { ROWS = 40, COLS = 192 };

typedef struct source {
    uint8_t codes[ROWS * COLS / 2], scales[ROWS * COLS / 32];
    float weight[COLS], w[ROWS * COLS];
    aff_mxfp4 m;
} source;

/* Gaussian rows, a zero row, zero blocks, blocks far below and above the others, the least and the greatest scales. */
static source *make_source(uint64_t seed)
{
    source *s = calloc(1, sizeof *s);
    for (int b = 0; b < ROWS * COLS / 32; b++) {
        int row = b / (COLS / 32);
        s->scales[b] = (uint8_t)(118 + aff__splitmix64(&seed) % 2);
        for (int i = 0; i < 16; i++)
            s->codes[b * 16 + i] = (uint8_t)(aff__f32_to_e2m1(naive_gauss(&seed) * 2.5f) |
                                             aff__f32_to_e2m1(naive_gauss(&seed) * 2.5f) << 4);
        if (row == 4 || (row == 5 && b % 3 == 0)) memset(s->codes + b * 16, row == 4 ? 0x80 : 0, 16);
        if (row == 6) memset(s->codes + b * 16 + 8, 0, 8);
        if (row == 7) s->scales[b] = (uint8_t)(100 + b % 6 * 4);
        if (row == 8) s->scales[b] = (uint8_t)(b % 2);
        if (row == 9) s->scales[b] = 252;
        if (row == 10) memset(s->codes + b * 16, 0x11, 16);
        if (row == 11) s->scales[b] = b % 6 ? 60 : 120;
    }
    for (int c = 0; c < COLS; c++) s->weight[c] = c % 50 == 7 ? 0 : expf(naive_gauss(&seed));
    s->m = (aff_mxfp4){s->codes, s->scales, ROWS, COLS};
    assert_int_equal(aff__mxfp4_decode(&s->m, s->w, NULL), AFF_OK);
    return s;
}

static aff_matdesc layout(uint32_t quant)
{
    aff_matdesc m = {.rows = ROWS, .cols = COLS, .quant = quant, .data_off = 256};
    m.data_size = ROWS * COLS * 5 / 16;
    m.scale_off = aff__align_up(m.data_off + m.data_size, 256);
    m.scale_size = ROWS * COLS * 3 / 64;
    m.rscale_off = aff__align_up(m.scale_off + m.scale_size, 256);
    m.rscale_size = ROWS * 2;
    return m;
}

enum { RECORD = 8192 };

static const char *card; /* --device: instead of the emulated ones */

static void same_bytes_on_a_card(void **state)
{
    (void)state;
    static const char *const devices[] = {"emu:128M", "emu-amd:128M"};
    static uint8_t want[RECORD], got[RECORD];
    aff_error err = {0};
    source *src = make_source(13);
    aff_encode_space *sp;
    aff_search *s = search_of(AFF_CPU_AVX512);
    assert_int_equal(aff__encode_space_create(&sp, COLS, NULL), AFF_OK);
    for (int n = 0; n < 8; n++) {
        const float *weight = n & 1 ? src->weight : NULL;
        aff_matdesc m = layout(n & 2 ? AFF_Q2P875G : AFF_Q2P875Q4);
        aff_device_spec spec;
        aff_encoder by;
        aff_qerror e = {0}, f = {0};
        memset(want, 0, RECORD);
        memset(got, 0xa5, RECORD);
        memset(got, 0, m.data_off);
        aff__encode_matrix(s, sp, &m, &src->m, weight, NULL, want, &e);
        if (aff__device_parse(&spec, card ? card : devices[n >> 2], &err) != AFF_OK || aff__gpu_encoder_create(&by, &spec, &err) != AFF_OK ||
            by.begin(by.ctx, s, &err) != AFF_OK || aff__encode_matrix_by(&by, s, sp, &m, &src->m, weight, got, &f, &err) != AFF_OK)
            fail_msg("%s", err.msg);
        assert_memory_equal(got + m.data_off, want + m.data_off, m.data_size);
        assert_memory_equal(got + m.scale_off, want + m.scale_off, m.scale_size);
        assert_memory_equal(got + m.rscale_off, want + m.rscale_off, m.rscale_size);
        assert_memory_equal(&e, &f, sizeof e); /* the sums too, to the bit */
        aff__gpu_encoder_free(&by);
    }
    aff__search_free(s);
    aff__encode_space_free(sp);
    free(src);
}

static void same_bytes_at_every_level(void **state)
{
    (void)state;
    source *src = make_source(12);
    int levels = aff__cpu_level();
    aff_encode_space *sp;
    assert_int_equal(aff__encode_space_create(&sp, COLS, NULL), AFF_OK);
    for (int weighted = 0; weighted < 2; weighted++) {
        static uint8_t first[RECORD], again[RECORD];
        const float *weight = weighted ? src->weight : NULL;
        for (int level = 0; level <= levels; level++) {
            aff_search *s = search_of((aff_cpu_level)level);
            aff_matdesc m = layout(AFF_Q2P875G);
            uint8_t *to = level ? again : first;
            aff_qerror e = {0}, check = {0};
            memset(to, 0, RECORD);
            aff__encode_matrix(s, sp, &m, &src->m, weight, NULL, to, &e);
            if (level) assert_memory_equal(first, again, RECORD);
            /* The figures are the decoder's. */
            assert_int_equal(aff__expert_matrix_error(&m, to, bytes, src->w, weight, &check), AFF_OK);
            assert_true(isfinite(check.err2));
            assert_true(fabs(check.err2 - e.err2) <= 1e-12 * check.err2 && fabs(check.w2 - e.w2) <= 1e-12 * check.w2);
            assert_true(fabs(check.werr2 - e.werr2) <= 1e-12 * check.werr2 &&
                        fabs(check.ww2 - e.ww2) <= 1e-12 * check.ww2);
            assert_true(fabs(check.max - e.max) <= 1e-12 * check.max);
            /* A zero row has scale 0 and decodes to zeros. */
            float row[COLS];
            assert_int_equal(aff__expert_row_decode(&m, to, bytes, 4, row), AFF_OK);
            for (int c = 0; c < COLS; c++) assert_true(row[c] == 0);
            /* Scales may be at the least E8M0 allows, yet are not subnormal. */
            assert_true((to[m.rscale_off + 16] | to[m.rscale_off + 17] << 8) >= 0x0080);
            aff__search_free(s);
        }
    }
    aff__encode_space_free(sp);
    free(src);
    aff__cpu_cap(AFF_CPU_AVX512);
}

/* Error of a block of 16 in row units, the codes of each quad by full scan. */
static double brute_block(const float *x, const float *weight, unsigned field, uint16_t *codes)
{
    double sum = 0, size = ldexp(field & 8 ? -1 : 1, (int)(field & 7));
    for (int q = 0; q < 4; q++) {
        double best = INFINITY;
        for (int i = 0; i < 1024; i++) {
            double d2 = 0;
            for (int p = 0; p < 4; p++) {
                double d = (double)x[4 * q + p] - size * (double)table[field >> 5][i][(p + (field & 16 ? 2 : 0)) & 3];
                d2 += (weight ? (double)weight[4 * q + p] : 1) * d * d;
            }
            if (d2 < best) best = d2, codes[q] = (uint16_t)i;
        }
        sum += best;
    }
    return sum;
}

static void choices_against_brute_force(void **state)
{
    (void)state;
    source *src = make_source(99);
    aff_search *s = search_of(AFF_CPU_AVX512);
    double first_of_four = 0, of_all = 0;
    for (int row = 0; row < 3; row++) {
        for (int b = 0; b < COLS / 16; b++) {
            aff_block block;
            float x[16], weight[16];
            aff__mxfp4_block(&src->m, (uint64_t)row, (uint64_t)b, &block);
            int r = aff__block_top(&block) - 4;
            for (int i = 0; i < 16; i++) {
                x[i] = ldexpf(src->w[row * COLS + b * 16 + i], -r);
                weight[i] = src->weight[b * 16 + i] + 0.01f;
            }
            for (int weighted = 0; weighted < 2; weighted++) {
                aff_choice c = aff__choose(s, &block, r, weighted ? weight : NULL);
                uint16_t codes[4];
                double best = INFINITY, got = 0;
                unsigned mine = (unsigned)c.e | c.g << 3 | c.v << 5;
                for (unsigned f = 0; f < 64; f++)
                    if ((f & 7) >= 3 && (f & 7) <= 5)
                        best = fmin(best, brute_block(x, weighted ? weight : NULL, f, codes));
                double same_field = brute_block(x, weighted ? weight : NULL, mine, codes);
                for (int q = 0; q < 4; q++)
                    for (int p = 0; p < 4; p++) {
                        double y = ldexp((double)s->table[c.v].c[(p + (c.g & 2 ? 2 : 0)) & 3][c.pos[q]], c.e) *
                                   (c.g & 1 ? -1 : 1);
                        double d = (double)x[4 * q + p] - y;
                        got += (weighted ? (double)weight[4 * q + p] : 1) * d * d;
                    }
                assert_true(fabs(got - same_field) <= 1e-5 * same_field); /* the best codes of its field */
                if (!weighted) assert_true(got <= best * (1 + 1e-5));     /* and the best field */
                if (weighted) first_of_four += got, of_all += best;
            }
        }
    }
    /* With importance four of 24 choices are tried in full; that costs little. */
    assert_true(first_of_four < of_all * 1.06);
    aff__search_free(s);
    free(src);
}

static void row_scale_is_least_squares(void **state)
{
    (void)state;
    source *src = make_source(7);
    aff_search *s = search_of(AFF_CPU_AVX512);
    aff_encode_space *sp;
    aff_matdesc m = layout(AFF_Q2P875Q4);
    static uint8_t record[RECORD];
    assert_int_equal(aff__encode_space_create(&sp, COLS, NULL), AFF_OK);
    aff_qerror e = {0};
    aff__encode_matrix(s, sp, &m, &src->m, src->weight, NULL, record, &e);
    uint8_t *scale = record + m.rscale_off + 2 * 2;
    int best = scale[0] | scale[1] << 8;
    double least = INFINITY;
    for (int delta = -8; delta <= 8; delta++) {
        double sum = 0;
        float row[COLS];
        scale[0] = (uint8_t)(best + delta);
        scale[1] = (uint8_t)((best + delta) >> 8);
        assert_int_equal(aff__expert_row_decode(&m, record, bytes, 2, row), AFF_OK);
        for (int c = 0; c < COLS; c++) {
            double d = (double)src->w[2 * COLS + c] - (double)row[c];
            sum += (double)fmaxf(src->weight[c], 0x1p-10f) * d * d;
        }
        if (delta == 0) least = sum;
    }
    for (int delta = -8; delta <= 8; delta++) {
        double sum = 0;
        float row[COLS];
        scale[0] = (uint8_t)(best + delta);
        scale[1] = (uint8_t)((best + delta) >> 8);
        assert_int_equal(aff__expert_row_decode(&m, record, bytes, 2, row), AFF_OK);
        for (int c = 0; c < COLS; c++) {
            double d = (double)src->w[2 * COLS + c] - (double)row[c];
            sum += (double)fmaxf(src->weight[c], 0x1p-10f) * d * d;
        }
        assert_true(sum >= least * (1 - 1e-9));
    }
    aff__encode_space_free(sp);
    aff__search_free(s);
    free(src);
}

/* A fit on such rows beats the same data under the plain codebook, whatever the threads; no samples is an error. */
static void fit_serves_the_encoder(void **state)
{
    (void)state;
    aff_error err = {0};
    aff_pool *pool;
    uint8_t one[AFF_CB_BYTES], three[AFF_CB_BYTES];
    aff_fit_samples none = {0}, samples = {0};
    assert_int_equal(aff__cb_fit_joint(&none, NULL, one, &err), AFF_E_FORMAT);
    source *src = make_source(31), *other = make_source(32);
    for (int k = 0; k < 150; k++) {
        source *more = make_source((uint64_t)k + 1000);
        more->m.rows = 4;
        assert_int_equal(aff__fit_samples_add(&samples, &more->m, more->weight, &err), AFF_OK);
        free(more);
    }
    assert_int_equal(samples.n, 150 * 4 * (COLS / 16));
    assert_int_equal(aff__pool_create(&pool, 3, &err), AFF_OK);
    assert_int_equal(aff__cb_fit_joint(&samples, NULL, one, &err), AFF_OK);
    assert_int_equal(aff__cb_fit_joint(&samples, pool, three, &err), AFF_OK);
    assert_memory_equal(one, three, AFF_CB_BYTES);
    assert_true(aff__cb_valid(one));
    aff_cb_table fitted[2];
    aff__cb_unpack(one, fitted);
    aff_search *s, *plain = search_of(AFF_CPU_AVX512);
    assert_int_equal(aff__search_create(&s, fitted, AFF_SEARCH_JMIN, pool, &err), AFF_OK);
    aff_encode_space *sp;
    assert_int_equal(aff__encode_space_create(&sp, COLS, NULL), AFF_OK);
    static uint8_t record[RECORD];
    aff_matdesc m = layout(AFF_Q2P875G);
    m.rows = 4;
    other->m.rows = 4;
    aff_qerror a = {0}, b = {0};
    aff__encode_matrix(s, sp, &m, &other->m, other->weight, NULL, record, &a);
    aff__encode_matrix(plain, sp, &m, &other->m, other->weight, NULL, record, &b);
    assert_true(aff__qerror_weighted(&a) < 0.9 * aff__qerror_weighted(&b));
    aff__encode_space_free(sp);
    aff__search_free(s);
    aff__search_free(plain);
    aff__pool_free(pool);
    aff__fit_samples_free(&samples);
    free(src);
    free(other);
}

static void out_of_memory(void **state)
{
    (void)state;
    for (unsigned k = 1; k <= 4; k++) {
        aff_error err = {0};
        aff_search *s;
        aff__alloc_fail_after(k);
        assert_int_equal(aff__search_create(&s, table, 2, NULL, &err), AFF_E_NOMEM);
        assert_null(s);
        aff_encode_space *sp;
        aff__alloc_fail_after(k);
        assert_int_equal(aff__encode_space_create(&sp, 64, &err), AFF_E_NOMEM);
        assert_null(sp);
    }
    aff__alloc_fail_after(0);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--device") == 0) card = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_path_finds_the_best),
        cmocka_unit_test(tables_hold_the_nearest),
        cmocka_unit_test(same_bytes_on_a_card),
        cmocka_unit_test(same_bytes_at_every_level),
        cmocka_unit_test(choices_against_brute_force),
        cmocka_unit_test(row_scale_is_least_squares),
        cmocka_unit_test(fit_serves_the_encoder),
        cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
