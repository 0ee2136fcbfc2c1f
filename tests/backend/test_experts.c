/* Routed experts: the integer definition in plain loops, double precision for `math`, and the same bits over
 * instruction sets, threads and company. */
#include "support/test.h"
#include "backend/kernel_random.h"
#include "backend/cpu/inner.h"
#include "backend/cpu/kernels.h"
#include "backend/mathfn.h"
#include "base/mem.h"

static int16_t table[2][1024][4];

/* Every entry's quads are E4M3 values of exponent field 1..7 in units of 2^-9, so +-8..+-960. */
static void make_table(uint64_t *seed)
{
    for (int v = 0; v < 2; v++)
        for (int c = 0; c < 1024; c++)
            for (int p = 0; p < 4; p++) {
                int m = draw_int(seed, 8, 15) << draw_int(seed, 0, 6);
                table[v][c][p] = (int16_t)(draw(seed, 2) ? -m : m);
            }
}

typedef struct matrix {
    aff_expert_mat m;
    int32_t *w;    /* [rows][cols] integer weights (2^-9 or half units) before the scales of a block (MXFP4) or row */
    float *rscale; /* [rows] */
    const uint8_t *e8m0;
} matrix;

static unsigned bit(const uint8_t *p, int i)
{
    return p[i >> 3] >> (i & 7) & 1u;
}
static unsigned bits(const uint8_t *p, int at, int n)
{
    unsigned v = 0;
    for (int i = 0; i < n; i++) v |= bit(p, at + i) << i;
    return v;
}

static matrix random_q2p875(int rows, int cols, uint64_t *seed)
{
    int64_t groups = cols / 64;
    uint8_t *codes = bytes(groups * rows * 20, seed), *fields = bytes(groups * rows * 3, seed),
            *rs = bytes(rows * 2, seed);
    const int kind =
        draw_int(seed, 0, 3); /* block exponents: any; 2 and more, as quantised weights have; 0 and 1; a few of those */
    for (int64_t i = 0; i < groups * rows * 3 && kind; i++) {
        const uint8_t low[3] = {0x86, 0x61, 0x18},
                      high[3] = {0x04, 0x41, 0x10}; /* e's upper two bits, its top bit, of the four blocks */
        if (kind == 2 || (kind == 3 && draw(seed, 200) == 0))
            fields[i] &= (uint8_t)~low[i % 3];
        else
            fields[i] |= high[i % 3];
    }
    matrix m = {
        {codes, fields, rs}, malloc((size_t)rows * (size_t)cols * sizeof(int32_t)), floats(rows, false, seed), NULL};
    assert_non_null(m.w);
    for (int r = 0; r < rows; r++) {
        m.rscale[r] = r % 7 == 3 ? 0.0f : aff__round_bf16(ldexpf(1.5f + m.rscale[r] * 0.4f, -8));
        uint16_t h = aff__f32_to_bf16(m.rscale[r]);
        rs[2 * r] = (uint8_t)h, rs[2 * r + 1] = (uint8_t)(h >> 8);
        for (int c = 0; c < cols; c++) {
            const uint8_t *code = codes + ((int64_t)(c / 64) * rows + r) * 20,
                          *field = fields + ((int64_t)(c / 64) * rows + r) * 3;
            unsigned f = bits(field, c % 64 / 16 * 6, 6), k = bits(code, c % 64 / 4 * 10, 10);
            int rot = f >> 4 & 1 ? 2 : 0;
            int32_t v = table[f >> 5][k][(c % 4 + rot) % 4] * (1 << (f & 7));
            m.w[(int64_t)r * cols + c] = f >> 3 & 1 ? -v : v;
        }
    }
    return m;
}

static matrix random_mxfp4(int rows, int cols, uint64_t *seed)
{
    static const int value[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    uint8_t *codes = bytes((int64_t)rows * cols / 2, seed), *e8m0 = bytes((int64_t)rows * cols / 32, seed);
    matrix m = {{codes, e8m0, NULL}, malloc((size_t)rows * (size_t)cols * sizeof(int32_t)), NULL, e8m0};
    assert_non_null(m.w);
    for (int64_t i = 0; i < (int64_t)rows * cols / 32; i++) e8m0[i] = (uint8_t)(116 + e8m0[i] % 8);
    for (int64_t i = 0; i < (int64_t)rows * cols; i++) {
        int nibble = codes[i / 2] >> (i % 2 * 4) & 15;
        m.w[i] = nibble & 8 ? -value[nibble & 7] : value[nibble & 7];
    }
    return m;
}

static void free_matrix(matrix *m)
{
    free((void *)(uintptr_t)m->m.codes), free((void *)(uintptr_t)m->m.fields), free((void *)(uintptr_t)m->m.rscale);
    free(m->w), free(m->rscale);
}

static double weight_value(const matrix *m, int cols, int r, int c)
{
    double w = m->w[(int64_t)r * cols + c];
    return m->e8m0 ? w * ldexp(1.0, m->e8m0[(int64_t)r * (cols / 32) + c / 32] - 128)
                   : ldexp(w, -9) * (double)m->rscale[r];
}

/* The quantiser by its words, with the C library's rint. */
static void ref_quantise(const float *x, int n, int *q, float *s)
{
    for (int k0 = 0; k0 < n; k0 += 128) {
        int k1 = k0 + 128 < n ? k0 + 128 : n;
        float amax = 0;
        for (int k = k0; k < k1; k++) amax = fmaxf(amax, fabsf(x[k]));
        s[k0 / 128] = amax / 127.0f;
        for (int k = k0; k < k1; k++) q[k] = amax > 0 ? (int)fminf(127, fmaxf(-127, rintf(x[k] * (127.0f / amax)))) : 0;
    }
}

static float ref_row(const matrix *m, int cols, int r, const int *q, const float *s)
{
    const int32_t *w = m->w + (int64_t)r * cols;
    float acc = 0;
    int cut = m->e8m0 ? 32 : 128;
    for (int k0 = 0; k0 < cols; k0 += cut) {
        int64_t sum = 0;
        for (int k = k0; k < k0 + cut && k < cols; k++) sum += (int64_t)w[k] * q[k];
        assert_true(sum <= INT32_MAX && sum >= -INT32_MAX);
        float scale = s[k0 / 128];
        if (m->e8m0) scale *= (float)ldexp(1.0, m->e8m0[(int64_t)r * (cols / 32) + k0 / 32] - 128);
        acc = fmaf((float)sum, scale, acc);
    }
    return m->e8m0 ? acc : acc * 0x1p-9f * m->rscale[r];
}

typedef struct experts {
    aff_expert_shape shape;
    int count;
    matrix gate[6], up[6], down[6];
} experts;

static experts random_experts(aff_dtype dtype, int hidden, int inter, uint64_t *seed)
{
    matrix (*make)(int, int, uint64_t *) = dtype == AFF_MXFP4 ? random_mxfp4 : random_q2p875;
    experts e = {.shape = {dtype, hidden, inter, draw(seed, 2) ? 0.7f : 0.0f, table}, .count = 6};
    for (int i = 0; i < e.count; i++) {
        e.gate[i] = make(inter, hidden, seed);
        e.up[i] = make(inter, hidden, seed);
        e.down[i] = make(hidden, inter, seed);
    }
    return e;
}

static void free_experts(experts *e)
{
    for (int i = 0; i < e->count; i++) free_matrix(&e->gate[i]), free_matrix(&e->up[i]), free_matrix(&e->down[i]);
}

enum { MAX_ENTRIES = 400 };
typedef struct plan {
    aff_moe_plan p;
    aff_moe_tile tile[6];
    int row[MAX_ENTRIES], rank[MAX_ENTRIES], expert[MAX_ENTRIES];
    float weight[MAX_ENTRIES];
} plan;

/* K distinct experts for each of T rows. */
static void random_plan(plan *p, const experts *e, int T, int K, uint64_t *seed)
{
    bool pick[64][6] = {{false}};
    for (int t = 0; t < T; t++)
        for (int k = 0; k < K;) {
            int id = draw_int(seed, 0, e->count - 1);
            if (!pick[t][id]) pick[t][id] = true, k++;
        }
    int n = 0, tiles = 0;
    for (int id = 0; id < e->count; id++) {
        int first = n;
        for (int t = 0; t < T; t++) {
            if (!pick[t][id]) continue;
            int rank = 0;
            for (int j = 0; j < id; j++) rank += pick[t][j];
            p->row[n] = t, p->rank[n] = rank, p->expert[n] = id, p->weight[n++] = 0.6f + 0.5f * draw_unit(seed);
        }
        if (n > first)
            p->tile[tiles++] = (aff_moe_tile){{e->gate[id].m, e->up[id].m, e->down[id].m}, id, first, n - first};
    }
    p->p = (aff_moe_plan){tiles, n, p->tile, p->row, p->rank, p->weight};
}

static void fast_is_the_integer_definition(void **state)
{
    (void)state;
    uint64_t seed = 11;
    make_table(&seed);
    aff_moe_scratch *s = NULL;
    assert_int_equal(aff__moe_scratch_create(&s, 1, NULL), AFF_OK);
    for (int round = 0; round < 28; round++) {
        bool mx = round % 2;
        int unit = mx ? 32 : 64, hidden = unit * draw_int(&seed, 1, 6), inter = unit * draw_int(&seed, 1, 5);
        if (round >= 20) hidden = 384, inter = 256;
        int T = draw_int(&seed, 1, round == 26 || round == 27 ? 60 : 9), K = draw_int(&seed, 1, 3);
        experts e = random_experts(mx ? AFF_MXFP4 : AFF_Q2P875G, hidden, inter, &seed);
        plan p;
        random_plan(&p, &e, T, K, &seed);
        int64_t ldx = hidden + draw_int(&seed, 0, 7);
        float *x = floats(T * ldx, false, &seed), *y = floats((int64_t)T * K * hidden, false, &seed),
              *want = floats((int64_t)T * K * hidden, false, &seed), *h = floats(inter, false, &seed), xs[8], hs[8];
        if (round % 5 == 0)
            for (int i = 0; i < hidden / 2; i++) x[i] = 0.0f;
        int *q = malloc((size_t)(hidden + inter) * sizeof(int)), *qh = q + hidden;
        for (int i = 0; i < p.p.n_entries; i++) {
            int id = p.expert[i];
            ref_quantise(x + p.row[i] * ldx, hidden, q, xs);
            for (int r = 0; r < inter; r++) {
                float a = ref_row(&e.gate[id], hidden, r, q, xs), b = ref_row(&e.up[id], hidden, r, q, xs),
                      c = e.shape.swiglu_limit;
                if (c > 0) a = fminf(a, c), b = fmaxf(-c, fminf(b, c));
                h[r] = p.weight[i] * ((a * aff__sigmoid(a)) * b);
            }
            ref_quantise(h, inter, qh, hs);
            for (int r = 0; r < hidden; r++)
                want[((int64_t)p.row[i] * K + p.rank[i]) * hidden + r] = ref_row(&e.down[id], inter, r, qh, hs);
        }
        EACH_LEVEL(l)
        {
            memset(y, 0xff, (size_t)T * (size_t)K * (size_t)hidden * sizeof *y);
            assert_int_equal(aff__cpu_experts(NULL, s, &e.shape, AFF_FAST, &p.p, x, ldx, T, K, y, NULL), AFF_OK);
            assert_int_equal(first_difference(y, want, (int64_t)T * K * hidden), -1);
        }
        free(x), free(y), free(want), free(h), free(q), free_experts(&e);
    }
    aff__moe_scratch_free(s);
}

static void math_agrees_with_double_precision(void **state)
{
    (void)state;
    uint64_t seed = 12;
    make_table(&seed);
    aff_moe_scratch *s = NULL;
    assert_int_equal(aff__moe_scratch_create(&s, 1, NULL), AFF_OK);
    for (int round = 0; round < 8; round++) {
        int hidden = 64 * draw_int(&seed, 1, 5), inter = 64 * draw_int(&seed, 1, 3), T = draw_int(&seed, 1, 6), K = 2;
        experts e = random_experts(round % 2 ? AFF_MXFP4 : AFF_Q2P875G, hidden, inter, &seed);
        plan p;
        random_plan(&p, &e, T, K, &seed);
        float *x = floats((int64_t)T * hidden, false, &seed), *y = floats((int64_t)T * K * hidden, false, &seed),
              *first = floats((int64_t)T * K * hidden, false, &seed);
        double *h = malloc((size_t)inter * sizeof *h);
        EACH_LEVEL(l)
        {
            assert_int_equal(
                aff__cpu_experts(NULL, s, &e.shape, l % 2 ? AFF_SIM : AFF_MATH, &p.p, x, hidden, T, K, y, NULL),
                AFF_OK);
            if (l == AFF_CPU_SCALAR) memcpy(first, y, (size_t)T * (size_t)K * (size_t)hidden * sizeof *y);
            assert_int_equal(first_difference(y, first, (int64_t)T * K * hidden), -1);
        }
        for (int i = 0; i < p.p.n_entries; i++) {
            int id = p.expert[i];
            for (int r = 0; r < inter; r++) {
                double a = 0, b = 0, c = (double)e.shape.swiglu_limit;
                for (int k = 0; k < hidden; k++) {
                    double v = (double)x[(int64_t)p.row[i] * hidden + k];
                    a += weight_value(&e.gate[id], hidden, r, k) * v, b += weight_value(&e.up[id], hidden, r, k) * v;
                }
                if (c > 0) a = fmin(a, c), b = fmax(-c, fmin(b, c));
                h[r] = (double)p.weight[i] * a / (1 + exp(-a)) * b;
            }
            for (int r = 0; r < hidden; r++) {
                double want = 0, mag = 0;
                for (int k = 0; k < inter; k++) {
                    double v = weight_value(&e.down[id], inter, r, k) * h[k];
                    want += v, mag += fabs(v);
                }
                double got = (double)y[((int64_t)p.row[i] * K + p.rank[i]) * hidden + r];
                if (!(fabs(got - want) <= 3e-6 * mag))
                    fail_msg("round %d, row %d: %.9g, expected %.9g", round, r, got, want);
            }
        }
        free(x), free(y), free(first), free(h), free_experts(&e);
    }
    aff__moe_scratch_free(s);
}

static void threads_and_company_change_nothing(void **state)
{
    (void)state;
    uint64_t seed = 13;
    make_table(&seed);
    aff_pool *pool = NULL;
    aff_moe_scratch *s = NULL;
    assert_int_equal(aff__pool_create(&pool, 3, NULL), AFF_OK);
    assert_int_equal(aff__moe_scratch_create(&s, 3, NULL), AFF_OK);
    for (int round = 0; round < 8; round++) {
        int hidden = 320, inter = 192, T = 40, K = 3;
        experts e = random_experts(round % 2 ? AFF_MXFP4 : AFF_Q2P875G, hidden, inter, &seed);
        aff_numerics num = round < 4 ? AFF_FAST : AFF_MATH;
        plan p;
        random_plan(&p, &e, T, K, &seed);
        float *x = floats(T * hidden, false, &seed), *y = floats(T * K * hidden, false, &seed),
              *one = floats(hidden, false, &seed);
        EACH_LEVEL(l)
        {
            assert_int_equal(aff__cpu_experts(pool, s, &e.shape, num, &p.p, x, hidden, T, K, y, NULL), AFF_OK);
            for (int i = 0; i < p.p.n_entries; i += 5) {
                int zero = 0, id = p.expert[i];
                aff_moe_tile tile = {{e.gate[id].m, e.up[id].m, e.down[id].m}, id, 0, 1};
                aff_moe_plan alone = {1, 1, &tile, &zero, &zero, p.weight + i};
                assert_int_equal(
                    aff__cpu_experts(NULL, s, &e.shape, num, &alone, x + p.row[i] * hidden, hidden, 1, 1, one, NULL),
                    AFF_OK);
                assert_int_equal(first_difference(y + (p.row[i] * K + p.rank[i]) * hidden, one, hidden), -1);
            }
        }
        free(x), free(y), free(one), free_experts(&e);
    }
    aff__moe_scratch_free(s);
    aff__pool_free(pool);
}

/* Spec container 4.5: codes 1, 2, 3, 1023 in all blocks; fields 45, 7, 0, 18; code 1 is (0.75, 0.375, 0.25, -0.5). */
static void the_worked_block_decodes(void **state)
{
    (void)state;
    static int16_t t[2][1024][4];
    const int16_t quad[4] = {384, 192, 128, -256};
    memcpy(t[0][1], quad, sizeof quad);
    memcpy(t[1][1], quad, sizeof quad);
    for (int p = 0; p < 4; p++) t[1][1023][p] = (int16_t)(64 << p);
    uint8_t codes[20], fields[3] = {0xed, 0x01, 0x48}, rscale[2] = {0x80, 0x3f};
    for (int i = 0; i < 4; i++) memcpy(codes + 5 * i, "\x01\x08\x30\xc0\xff", 5);
    aff_expert_mat m = {codes, fields, rscale};
    const struct {
        int col;
        float want;
    } check[] = {{0, -24}, {1, -12}, {2, -8},   {3, 16},   {48, 1},  {49, -2},    {50, 3}, {51, 1.5f},
                 {12, -4}, {13, -8}, {14, -16}, {15, -32}, {16, 96}, {32, 0.75f}, {4, 0}};
    EACH_LEVEL(l)
    for (size_t i = 0; i < sizeof check / sizeof *check; i++) {
        int8_t unit[64] = {0};
        unit[check[i].col] = 1;
        const int8_t *q = unit;
        float one = 1.0f, y, *out = &y;
        const float *s = &one;
        aff__cpu_inner_now()->q2p875(&m, t, 1, 64, 0, 1, &q, &s, 1, &out);
        assert_true(y == check[i].want);
    }
}

static void the_largest_sum_does_not_overflow(void **state)
{
    (void)state;
    static int16_t t[2][1024][4];
    for (int i = 0; i < 2 * 1024 * 4; i++) t[0][i / 4 % 1024][i % 4] = t[1][i / 4 % 1024][i % 4] = 960;
    uint8_t codes[40] = {0}, fields[6], rscale[2] = {0x80, 0x3f};
    memcpy(fields, "\xf7\x7d\xdf\xf7\x7d\xdf", 6); /* e 7, plus, rotated, variant 1 in all blocks */
    aff_expert_mat m = {codes, fields, rscale};
    int8_t q[128];
    memset(q, 127, sizeof q);
    const int8_t *qp = q;
    float one = 1.0f, y, *out = &y;
    const float *s = &one;
    EACH_LEVEL(l)
    {
        aff__cpu_inner_now()->q2p875(&m, t, 1, 128, 0, 1, &qp, &s, 1, &out);
        assert_true(y == (float)1997537280 * 0x1p-9f);
    }
}

static void the_quantiser_keeps_bad_values_visible(void **state)
{
    (void)state;
    float x[128];
    int8_t q[128];
    EACH_LEVEL(l)
    {
        const aff__cpu_inner *in = aff__cpu_inner_now();
        for (int bad = 0; bad < 3; bad++)
            for (int n = 1; n <= 128; n += 42) {
                for (int i = 0; i < 128; i++) x[i] = 1.0f, q[i] = 99;
                x[n - 1] = bad == 0 ? NAN : bad == 1 ? -INFINITY : INFINITY;
                assert_true(isnan(in->quantise(x, n, q)));
                for (int i = 0; i < n; i++) assert_int_equal(q[i], 0);
                if (n < 128) assert_int_equal(q[n], 99);
            }
        for (int i = 0; i < 128; i++) x[i] = ldexpf((float)(i - 64), -140);
        assert_true(in->quantise(x, 128, q) == 0.0f);
        assert_int_equal(q[0], 0);
        for (int i = 0; i < 128; i++) x[i] = ldexpf((float)(i * 2 - 127) / 127.0f, 120);
        assert_true(in->quantise(x, 128, q) == 0x1p120f / 127.0f);
        assert_int_equal(q[0], -127);
        assert_int_equal(q[64], 1);
        assert_int_equal(q[127], 127);
        /* ties go to even: amax 127 makes q = rint(x) */
        x[0] = 127, x[1] = 0.5f, x[2] = 1.5f, x[3] = 2.5f, x[4] = -0.5f, x[5] = -1.5f;
        assert_true(in->quantise(x, 6, q) == 1.0f);
        const int8_t want[6] = {127, 0, 2, 2, 0, -2};
        assert_memory_equal(q, want, 6);
    }
    aff__cpu_cap(AFF_CPU_AVX512);
    uint64_t seed = 14;
    for (int round = 0; round < 400; round++) {
        int n = draw_int(&seed, 1, 128), ref[128];
        float s;
        fill(x, n, false, &seed);
        ref_quantise(x, n, ref, &s);
        EACH_LEVEL(l)
        {
            assert_true(aff__cpu_inner_now()->quantise(x, n, q) == s);
            for (int i = 0; i < n; i++) assert_int_equal(q[i], ref[i]);
        }
    }
}

/* x * (127/amax) is rounded to float32 before rint: x for which that matters, against an exact product. */
static void the_quantiser_rounds_twice(void **state)
{
    (void)state;
    uint64_t seed = 16;
    int found = 0;
    for (int round = 0; round < 4000; round++) {
        float x[2] = {0.5f + fabsf(draw_unit(&seed)), 0};
        float inv = 127.0f / x[0];
        x[1] = ((float)draw_int(&seed, 20, 120) + 0.5f) / inv;
        float v = x[1] * inv;
        if (fabsf(x[1]) >= x[0] || rint((double)x[1] * (double)inv) == (double)rintf(v)) continue;
        found++;
        int8_t q[2];
        EACH_LEVEL(l)
        {
            aff__cpu_inner_now()->quantise(x, 2, q);
            assert_int_equal(q[1], (int)rintf(v));
        }
    }
    assert_true(found > 20);
}

static void swiglu_has_one_value(void **state)
{
    (void)state;
    uint64_t seed = 15;
    for (int round = 0; round < 200; round++) {
        int n = draw_int(&seed, 1, 70);
        float g[70], u[70], want[70], got[70], limit = round % 3 == 0 ? 0.0f : 7.0f;
        for (int i = 0; i < n; i++) g[i] = draw_unit(&seed) * (i % 5 ? 12.0f : 120.0f), u[i] = draw_unit(&seed) * 12.0f;
        if (round % 10 == 9) g[n / 2] = NAN, u[0] = INFINITY;
        for (int i = 0; i < n; i++) {
            float a = g[i], b = u[i];
            if (limit > 0 && a > limit) a = limit;
            if (limit > 0 && fabsf(b) > limit) b = copysignf(limit, b);
            want[i] = 0.37f * ((a * aff__sigmoid(a)) * b);
        }
        EACH_LEVEL(l)
        {
            memcpy(got, g, sizeof got);
            aff__cpu_inner_now()->swiglu(got, u, 0.37f, limit, n);
            assert_int_equal(first_difference(got, want, n), -1);
        }
    }
}

static void nonsense_is_refused(void **state)
{
    (void)state;
    aff_error err = {0};
    aff_moe_scratch *s = NULL;
    assert_int_equal(aff__moe_scratch_create(&s, 1, &err), AFF_OK);
    aff_expert_shape shape = {AFF_Q2P875G, 64, 32, 0, table};
    int row = 0, rank = 0;
    float w = 1, x[64] = {0}, y[64];
    aff_moe_tile tile = {.count = 1};
    aff_moe_plan p = {1, 1, &tile, &row, &rank, &w};
    assert_int_equal(aff__cpu_experts(NULL, s, &shape, AFF_FAST, &p, x, 64, 1, 1, y, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "32"));
    shape.inter = 64, shape.dtype = AFF_FP8;
    assert_int_equal(aff__cpu_experts(NULL, s, &shape, AFF_FAST, &p, x, 64, 1, 1, y, &err), AFF_E_UNSUPPORTED);
    shape.dtype = AFF_Q2P875G, row = 1;
    assert_int_equal(aff__cpu_experts(NULL, s, &shape, AFF_FAST, &p, x, 64, 1, 1, y, &err), AFF_E_INVALID);
    row = 0, tile.count = 2;
    assert_int_equal(aff__cpu_experts(NULL, s, &shape, AFF_FAST, &p, x, 64, 1, 1, y, &err), AFF_E_INVALID);
    tile.count = 1;
    aff__alloc_fail_after(1);
    assert_int_equal(aff__cpu_experts(NULL, s, &shape, AFF_FAST, &p, x, 64, 1, 1, y, &err), AFF_E_NOMEM);
    aff__alloc_fail_after(0);
    aff__moe_scratch_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_is_the_integer_definition),
        cmocka_unit_test(math_agrees_with_double_precision),
        cmocka_unit_test(threads_and_company_change_nothing),
        cmocka_unit_test(the_worked_block_decodes),
        cmocka_unit_test(the_largest_sum_does_not_overflow),
        cmocka_unit_test(the_quantiser_keeps_bad_values_visible),
        cmocka_unit_test(the_quantiser_rounds_twice),
        cmocka_unit_test(swiglu_has_one_value),
        cmocka_unit_test(nonsense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
