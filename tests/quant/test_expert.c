/* expert: bytes against the spec's worked block and a naive encoder, decoding, order of planes, errors. */
#include "support/test.h"
#include "quant/expert.h"
#include "quant/quant_naive.h"
#include "base/mem.h"

/* A record holding one matrix: codes, fields, row scales, each 256-aligned. */
static aff_matdesc layout(uint32_t quant, uint64_t rows, uint64_t cols, uint64_t from)
{
    aff_matdesc m = {.rows = rows, .cols = cols, .quant = quant, .data_off = from};
    bool fp4 = quant == AFF_MXFP4;
    m.data_size = fp4 ? rows * cols / 2 : rows * cols * 5 / 16;
    m.scale_off = aff__align_up(m.data_off + m.data_size, 256);
    m.scale_size = fp4 ? rows * cols / 32 : rows * cols * 3 / 64;
    m.rscale_off = aff__align_up(m.scale_off + m.scale_size, 256);
    m.rscale_size = fp4 ? 0 : rows * 2;
    return m;
}

static uint64_t end_of(const aff_matdesc *m)
{
    return aff__align_up(m->rscale_off + m->rscale_size, 256);
}

static void worked_block(void **state)
{
    (void)state;
    static const uint8_t codes[5] = {0x01, 0x08, 0x30, 0xc0, 0xff}, fields[3] = {0xed, 0x01, 0x48};
    static const uint8_t entry[4] = {0x34, 0x2c, 0x28, 0xb0};
    static uint8_t cb[AFF_CB_BYTES];
    memset(cb, 0x38, sizeof cb);
    /* Field 45: e 5, sign, variant 1. Codes 1, 2, 3, 1023 of it are told apart by their last component. */
    static const int at[4] = {1, 2, 3, 1023};
    for (int i = 0; i < 4; i++) {
        memcpy(cb + (1024 + at[i]) * 4, entry, 4);
        cb[(1024 + at[i]) * 4 + 3] = (uint8_t)(0xb0 + i);
    }
    memcpy(cb + 1 * 4, entry, 4);
    aff_matdesc m = layout(AFF_Q2P875Q4, 1, 64, 0);
    uint8_t record[1024] = {0};
    for (int b = 0; b < 4; b++) memcpy(record + b * 5, codes, 5);
    memcpy(record + m.scale_off, fields, 3);
    record[m.rscale_off] = 0x00; /* row scale 0.5 */
    record[m.rscale_off + 1] = 0x3f;
    float w[64];
    assert_int_equal(aff__expert_row_decode(&m, record, cb, 0, w), AFF_OK);
    static const float last[4] = {-0.5f, -0.5625f, -0.625f, -0.6875f};
    for (int i = 0; i < 4; i++) {
        assert_true(w[4 * i] == -12.0f && w[4 * i + 1] == -6.0f && w[4 * i + 2] == -4.0f);
        assert_true(w[4 * i + 3] == last[i] * -16.0f);
    }
    assert_true(w[16] == 48.0f && w[28] == 64.0f && w[32] == 0.375f); /* e 7; e 7 of ones; field 0 */
    /* Field 18: e 2, rotated, variant 0: (1, -2, 3, 1.5) in units of the row scale. */
    static const float rotated[4] = {0.5f, -1.0f, 1.5f, 0.75f};
    assert_memory_equal(w + 48, rotated, 16);
}

typedef struct case_matrix {
    int rows, cols;
    float *w;
} case_matrix;

/* Gaussian rows of very different size; zero rows, zero blocks, one large weight among small ones, lone quads. */
static case_matrix awkward(uint64_t seed)
{
    case_matrix c = {24, 192, NULL};
    c.w = malloc((size_t)(c.rows * c.cols) * sizeof *c.w);
    for (int r = 0; r < c.rows; r++) {
        float size = ldexpf(1.0f, (r % 7 - 3) * (r == 9 ? 30 : 4));
        for (int i = 0; i < c.cols; i++) c.w[r * c.cols + i] = naive_gauss(&seed) * size;
    }
    memset(c.w + 4 * c.cols, 0, (size_t)c.cols * sizeof *c.w);
    memset(c.w + 6 * c.cols + 32, 0, 16 * sizeof *c.w);
    c.w[7 * c.cols + 3] = 500.0f;
    for (int i = 0; i < c.cols; i++) c.w[8 * c.cols + i] = i == 100 ? -1.0f : 0.0f;
    for (int i = 0; i < c.cols; i++) c.w[10 * c.cols + i] *= 1e-38f;                        /* subnormal row scale */
    for (int i = 0; i < c.cols; i++) c.w[11 * c.cols + i] = i % 5 ? 0x1p-149f : -0x1p-149f; /* row scale rounds to 0 */
    for (int i = 0; i < c.cols; i++) c.w[12 * c.cols + i] = 2.0f;
    return c;
}

static void bytes_are_those_of_the_text(void **state)
{
    (void)state;
    static uint8_t cb[AFF_CB_BYTES];
    static aff_cb_table t[2];
    aff_error err = {0};
    naive_table(3, cb);
    aff__cb_unpack(cb, t);
    case_matrix c = awkward(21);
    for (int compat = 0; compat < 2; compat++) {
        aff_matdesc m = layout(AFF_Q2P875Q4, (uint64_t)c.rows, (uint64_t)c.cols, 256);
        uint8_t *got = calloc(1, end_of(&m)), *want = calloc(1, end_of(&m));
        aff_cb_index *ix;
        assert_int_equal(aff__cb_index_create(&ix, cb, compat ? AFF_CB_GRID_COMPAT : AFF_CB_GRID_EXACT, NULL, &err),
                         AFF_OK);
        aff__expert_matrix_encode(ix, &m, c.w, NULL, got);
        naive_encode(t, compat, c.w, c.rows, c.cols, want + m.data_off, want + m.scale_off,
                     (uint16_t *)(void *)(want + m.rscale_off));
        assert_memory_equal(got + m.rscale_off, want + m.rscale_off, m.rscale_size);
        assert_memory_equal(got + m.scale_off, want + m.scale_off, m.scale_size);
        assert_memory_equal(got + m.data_off, want + m.data_off, m.data_size);
        assert_memory_equal(got, want, end_of(&m)); /* nothing beside the planes */
        aff__cb_index_free(ix);
        free(got);
        free(want);
    }
    free(c.w);
}

/* Three matrices as in a record, both orders. */
static aff_clayer layer_of(uint32_t quant, uint64_t inter, uint64_t hidden)
{
    aff_clayer l = {.n_experts = 1};
    l.gate = layout(quant, inter, hidden, 0);
    l.up = layout(quant, inter, hidden, end_of(&l.gate));
    l.down = layout(quant, hidden, inter, end_of(&l.up));
    l.stride = aff__align_up(end_of(&l.down), 4096);
    return l;
}

static void random_mxfp4(uint64_t *rng, uint64_t rows, uint64_t cols, uint8_t *codes, uint8_t *scales)
{
    for (uint64_t i = 0; i < rows * cols / 2; i++) codes[i] = (uint8_t)aff__splitmix64(rng);
    for (uint64_t i = 0; i < rows * cols / 32; i++) scales[i] = (uint8_t)(117 + aff__splitmix64(rng) % 5);
}

/* The three matrices one after the other, with the earlier tool's encoder. */
static aff_qerror encode_three(const aff_clayer *l, const aff_cb_index *ix, const uint8_t *cb, const aff_mxfp4 src[3],
                               float *scratch, uint8_t *record)
{
    const aff_matdesc *m[3] = {&l->gate, &l->up, &l->down};
    aff_qerror e = {0};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(aff__mxfp4_decode(&src[i], scratch, NULL), AFF_OK);
        if (m[i]->quant == AFF_MXFP4) {
            memcpy(record + m[i]->data_off, src[i].codes, m[i]->data_size);
            memcpy(record + m[i]->scale_off, src[i].scales, m[i]->scale_size);
        } else {
            aff__expert_matrix_encode(ix, m[i], scratch, NULL, record);
        }
        assert_int_equal(aff__expert_matrix_error(m[i], record, cb, scratch, NULL, &e), AFF_OK);
    }
    return e;
}

static void group_order(void **state)
{
    (void)state;
    enum { INTER = 64, HIDDEN = 192, N = INTER * HIDDEN };
    static uint8_t cb[AFF_CB_BYTES], codes[3][N / 2], scales[3][N / 32];
    static float scratch[N], a[N], b[N];
    aff_error err = {0};
    uint64_t rng = 8;
    naive_table(4, cb);
    aff_mxfp4 src[3];
    for (int i = 0; i < 3; i++) {
        src[i] = (aff_mxfp4){codes[i], scales[i], i == 2 ? HIDDEN : INTER, i == 2 ? INTER : HIDDEN};
        random_mxfp4(&rng, src[i].rows, src[i].cols, codes[i], scales[i]);
    }
    aff_cb_index *ix;
    assert_int_equal(aff__cb_index_create(&ix, cb, AFF_CB_GRID_EXACT, NULL, &err), AFF_OK);
    aff_clayer rows = layer_of(AFF_Q2P875Q4, INTER, HIDDEN), groups = layer_of(AFF_Q2P875G, INTER, HIDDEN);
    uint8_t *r = calloc(1, rows.stride), *g = calloc(1, rows.stride), *moved = calloc(1, rows.stride);
    aff_qerror er = encode_three(&rows, ix, cb, src, scratch, r), eg = encode_three(&groups, ix, cb, src, scratch, g);
    /* [group][row]: the bytes of row 5, group 2 of the gate. */
    assert_memory_equal(g + groups.gate.data_off + (2 * INTER + 5) * 20, r + rows.gate.data_off + (5 * 3 + 2) * 20, 20);
    assert_memory_equal(g + groups.gate.scale_off + (2 * INTER + 5) * 3, r + rows.gate.scale_off + (5 * 3 + 2) * 3, 3);
    aff__expert_record_permute(&rows, moved, r, true);
    assert_memory_equal(moved, g, rows.stride);
    memset(moved, 0, rows.stride);
    aff__expert_record_permute(&rows, moved, g, false);
    assert_memory_equal(moved, r, rows.stride);
    assert_memory_not_equal(r, g, rows.stride);
    assert_int_equal(aff__expert_matrix_decode(&rows.up, r, cb, a), AFF_OK);
    assert_int_equal(aff__expert_matrix_decode(&groups.up, g, cb, b), AFF_OK);
    assert_memory_equal(a, b, sizeof a);
    assert_memory_equal(&er, &eg, sizeof er);
    /* Uniform nibbles are harder than weights; still far better than noise. */
    assert_true(aff__qerror_relative(&er) > 0.1 && aff__qerror_relative(&er) < 0.3);
    aff__cb_index_free(ix);
    free(r);
    free(g);
    free(moved);
}

static void mxfp4_is_lossless(void **state)
{
    (void)state;
    enum { INTER = 32, HIDDEN = 96, N = INTER * HIDDEN };
    static uint8_t codes[3][N / 2], scales[3][N / 32];
    static float scratch[N], w[N];
    aff_error err = {0};
    uint64_t rng = 80;
    aff_mxfp4 src[3];
    for (int i = 0; i < 3; i++) {
        src[i] = (aff_mxfp4){codes[i], scales[i], i == 2 ? HIDDEN : INTER, i == 2 ? INTER : HIDDEN};
        random_mxfp4(&rng, src[i].rows, src[i].cols, codes[i], scales[i]);
    }
    aff_clayer l = layer_of(AFF_MXFP4, INTER, HIDDEN);
    uint8_t *rec = calloc(1, l.stride);
    aff_qerror e = encode_three(&l, NULL, NULL, src, scratch, rec);
    assert_true(e.err2 == 0 && e.max == 0 && e.w2 > 0);
    assert_int_equal(aff__expert_matrix_decode(&l.down, rec, NULL, w), AFF_OK);
    static const float val[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int i = 0; i < N; i++) {
        int nib = i & 1 ? codes[2][i / 2] >> 4 : codes[2][i / 2] & 15;
        assert_true(w[i] == ldexpf(nib & 8 ? -val[nib & 7] : val[nib & 7], scales[2][i / 32] - 127));
    }
    assert_memory_equal(rec + l.up.data_off, codes[1], N / 2);
    scales[1][40] = 252;
    assert_int_equal(aff__mxfp4_check(&src[1], &err), AFF_OK);
    scales[1][40] = 253;
    assert_int_equal(aff__mxfp4_check(&src[1], &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "scale byte 40"));
    free(rec);
}

static void pair_codes_decode(void **state)
{
    (void)state;
    static float table[4][32][2];
    for (int v = 0; v < 4; v++)
        for (int c = 0; c < 32; c++)
            for (int j = 0; j < 2; j++) table[v][c][j] = (float)(v * 100 + c) + (j ? 0.5f : 0.0f);
    aff_matdesc m = layout(AFF_Q2P875, 2, 64, 0);
    uint8_t rec[1024] = {0};
    for (uint64_t k = 0; k < 64; k++) naive_put_bits(rec, k * 5, (unsigned)k % 32, 5);
    for (uint64_t b = 0; b < 8; b++) naive_put_bits(rec + m.scale_off, b * 6, (unsigned)((b + 1) | (b % 4) << 4), 6);
    for (int r = 0; r < 2; r++) rec[m.rscale_off + (uint64_t)r * 2 + 1] = 0x40; /* 2.0 */
    float w[128];
    assert_int_equal(aff__expert_matrix_decode(&m, rec, (const uint8_t *)table, w), AFF_OK);
    for (int c = 0; c < 128; c++) {
        int b = c / 16;
        assert_true(w[c] == 2.0f * (float)(b + 1) * table[b % 4][c / 2 % 32][c & 1]);
    }
    m.quant = AFF_Q8_0;
    assert_int_equal(aff__expert_matrix_decode(&m, rec, (const uint8_t *)table, w), AFF_E_UNSUPPORTED);
}

static void error_figures(void **state)
{
    (void)state;
    /* All codes 0 with entry (1, 1, 1, 1), e 0, row scale 1: decodes to ones. */
    static uint8_t cb[AFF_CB_BYTES];
    memset(cb, 0x38, sizeof cb);
    aff_matdesc m = layout(AFF_Q2P875Q4, 1, 64, 0);
    uint8_t rec[1024] = {0};
    rec[m.rscale_off] = 0x80;
    rec[m.rscale_off + 1] = 0x3f;
    float w[64], weight[64];
    for (int i = 0; i < 64; i++) {
        w[i] = i < 16 ? 3.0f : 1.0f;
        weight[i] = i < 16 ? 1.0f : 0.0f;
    }
    w[63] = -1.5f;
    aff_qerror e = {0};
    assert_int_equal(aff__expert_matrix_error(&m, rec, cb, w, weight, &e), AFF_OK);
    assert_true(e.err2 == 16 * 4 + 6.25 && e.w2 == 16 * 9 + 47 + 2.25);
    assert_true(e.werr2 == 64 && e.ww2 == 144 && e.max == 2.5);
    assert_true(aff__qerror_weighted(&e) == 8.0 / 12.0);
    aff_qerror none = {0};
    assert_true(aff__qerror_relative(&none) == 0 && aff__qerror_weighted(&none) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worked_block),      cmocka_unit_test(bytes_are_those_of_the_text),
        cmocka_unit_test(group_order),       cmocka_unit_test(mxfp4_is_lossless),
        cmocka_unit_test(pair_codes_decode), cmocka_unit_test(error_figures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
