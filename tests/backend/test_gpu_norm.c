/* Embedding, norms, quantisers and hyper-connections as device kernels: equal to the CPU in every bit. */
#include "backend/gpu_kernel_test.h"

/* rms norm: float32, bf16 and int8 forms. */
static void test_rmsnorm(void **state)
{
    (void)state;
    static const int width[] = {1, 15, 64, 129, 640, 1000, 4096};
    for (int round = 0; round < 7; round++) {
        const int n = width[round], T = draw_int(&seed, 1, 5), groups = (int)up(n, 128);
        float *x = uniform((int64_t)T * n, 3), *w = uniform(n, 2), *want = NEW(float, T * n);
        int8_t *wq = NEW(int8_t, T * n);
        float *ws = NEW(float, T * groups);
        if (round == 4) x[3] = NAN;
        cpu->rmsnorm(cpu, x, round == 2 ? NULL : w, 1e-6f, T, n, want);
        for (int t = 0; t < T; t++)
            for (int g = 0; g < groups; g++)
                ws[t * groups + g] = aff__cpu_inner_scalar.quantise(want + (int64_t)t * n + g * 128, n - g * 128 < 128 ? n - g * 128 : 128, wq + (int64_t)t * n + g * 128);
        EACH_LAYOUT
        {
            float *y = NEW(float, T * n), *qs = NEW(float, T * groups);
            uint16_t *b = NEW(uint16_t, T * n), *wb = NEW(uint16_t, T * n);
            int8_t *q = NEW(int8_t, T * n);
            const aff_k_rmsnorm a = {.x = x, .w = round == 2 ? NULL : w, .y = {y, b, q, qs}, .n = n, .eps = 1e-6f};
            launch("rmsnorm", (unsigned)T, 256, 4 * (size_t)n, &a);
            same_bits("rmsnorm", y, want, (int64_t)T * n);
            to_bf16(want, wb, (int64_t)T * n);
            same_bytes("rmsnorm bf16", b, wb, 2 * (int64_t)T * n);
            same_bytes("rmsnorm int8", q, wq, (int64_t)T * n);
            same_bits("rmsnorm scales", qs, ws, (int64_t)T * groups);
            free(y), free(qs), free(b), free(wb), free(q);
        }
        free(x), free(w), free(want), free(wq), free(ws);
    }
}

/* The quantiser's corners: zero, tiny, infinite groups. */
static void test_quantise(void **state)
{
    (void)state;
    const int n = 7 * 128 - 50, T = 3;
    float *x = floats((int64_t)T * (n + 8), true, &seed), *ws = NEW(float, T * 7);
    int8_t *wq = NEW(int8_t, T * n);
    for (int i = 0; i < 128; i++) x[i] = 0, x[128 + i] = ldexpf(x[128 + i], -120), x[256 + i] = draw_unit(&seed), x[384 + i] = (float)(i - 64);
    x[300] = -INFINITY;
    for (int t = 0; t < T; t++)
        for (int g = 0; g < 7; g++)
            ws[t * 7 + g] = aff__cpu_inner_scalar.quantise(x + t * (n + 8) + g * 128, g < 6 ? 128 : n - 768, wq + t * n + g * 128);
    EACH_LAYOUT
    {
        float *qs = NEW(float, T * 7);
        int8_t *q = NEW(int8_t, T * n);
        const aff_k_convert a = {.x = x, .ldx = n + 8, .y = {.q = q, .qs = qs}, .n = n};
        launch("convert", (unsigned)T, 256, 0, &a);
        same_bytes("codes", q, wq, (int64_t)T * n);
        same_bits("scales", qs, ws, (int64_t)T * 7);
        free(qs), free(q);
    }
    free(x), free(ws), free(wq);
}

static void test_embed(void **state)
{
    (void)state;
    for (int round = 0; round < 4; round++) {
        const int H = draw_int(&seed, 1, 700), T = draw_int(&seed, 1, 9), N = draw_int(&seed, 1, 4), V = 40;
        float *w = uniform((int64_t)V * H, 1), *want = NEW(float, T * N * H);
        uint16_t *wb = NEW(uint16_t, V * H);
        int32_t ids[9];
        for (int t = 0; t < T; t++) ids[t] = draw_int(&seed, 0, V - 1);
        to_bf16(w, wb, (int64_t)V * H);
        const aff_weight m = {.dtype = round & 1 ? AFF_BF16 : AFF_F32, .rows = V, .cols = H, .data = round & 1 ? (void *)wb : w};
        cpu->embed(cpu, &m, ids, T, N, want);
        EACH_LAYOUT
        {
            float *X = NEW(float, T * N * H);
            const aff_k_embed a = {.w = m.data, .ids = ids, .X = X, .T = T, .cols = H, .streams = N, .bf16 = round & 1};
            launch("embed", up((int64_t)T * H, 1024), 256, 0, &a);
            same_bits("embed", X, want, (int64_t)T * N * H);
            free(X);
        }
        free(w), free(want), free(wb);
    }
}

static void wide(const aff_k_wide *a, bool small)
{
    const unsigned tt = up(a->T, 8), ss = a->ss ? (unsigned)a->T : 0;
    launch(small ? "wide_small" : "wide_big", (small ? (unsigned)a->rows : up(a->rows, 4)) * tt + ss, small ? 32 * (unsigned)draw_int(&seed, 1, 16) : 128, aff__k_wide_smem(a->cols), a);
}

/* Within the order of summation of the CPU; small and big, one row or many: the same bits. */
static void test_wide(void **state)
{
    (void)state;
    static const int shape[][3] = {{24, 4096, 3}, {5, 1023, 17}, {256, 128, 2}, {7, 3, 1}, {9, 2056, 9}, {4, 16384, 2}};
    for (int round = 0; round < 6; round++) {
        const int rows = shape[round][0], cols = shape[round][1], T = shape[round][2], bf16 = round & 1, rounded = round == 4;
        const int ldx = cols + (round == 2 ? 4 : 0);
        float *w = uniform((int64_t)rows * cols, 1), *x = uniform((int64_t)T * ldx, 1), *want = NEW(float, T * rows), *ss = NEW(float, T);
        uint16_t *wb = NEW(uint16_t, rows * cols);
        to_bf16(w, wb, (int64_t)rows * cols);
        const aff_weight m = {.dtype = bf16 ? AFF_BF16 : AFF_F32, .rows = rows, .cols = cols, .data = bf16 ? (void *)wb : w, .wide = !rounded};
        aff__cpu_matmul(NULL, &m, AFF_FAST, x, ldx, T, want, rows);
        for (int t = 0; t < T; t++) ss[t] = aff__cpu_sumsq(x + t * ldx, cols);
        EACH_LAYOUT
        {
            float *y = NEW(float, T * rows), *z = NEW(float, T * rows), *s = NEW(float, T);
            aff_k_wide a = {.w = m.data, .x = x, .y = y, .ss = s, .ldx = ldx, .ldy = rows, .T = T, .rows = rows, .cols = cols, .bf16 = bf16, .round = rounded};
            wide(&a, true);
            near("wide", y, want, T, rows, 1e-5);
            near("wide sum of squares", s, ss, T, 1, 1e-6);
            float *sb = NEW(float, T);
            a.y = z, a.ss = sb;
            wide(&a, false);
            same_bits("wide, big", z, y, (int64_t)T * rows);
            same_bits("wide sum of squares, big", sb, s, T);
            free(sb);
            a.ss = NULL, a.T = 1, a.x = x + (T - 1) * ldx; /* the last row alone */
            wide(&a, true);
            same_bits("wide, alone", z, y + (T - 1) * rows, rows);
            free(y), free(z), free(s);
        }
        free(w), free(x), free(want), free(ss), free(wb);
    }
}

/* Mixes by cuts on the way of hc_post: the new streams by bits the CPU's, the mixes and the square those of the kernels for many rows; hc_pre of
 * them the same as of those. */
static void mixed(const aff_k_hc_pre *many, const aff_k_hc_post *post, const float *Xp)
{
    const int T = many->T, H = many->H, N = many->N, rows = (2 + N) * N, cuts = (int)up(N * H, 1024), groups = (int)up(H, 128);
    float *fn = uniform((int64_t)rows * N * H, 0.1f), *Xn = NEW(float, T * N * H), *Xo = NEW(float, T * N * H), *part = NEW(float, T * cuts * (rows + 1)), *m = NEW(float, T * rows), *ss = NEW(float, T);
    float *u[2], *y[2], *qs[2], *p[2], *c[2];
    uint16_t *b[2];
    int8_t *q[2];
    const aff_k_hc_mix k = {.p = *post, .w = {.w = fn, .rows = rows, .cols = N * H}, .Xn = Xn, .part = part};
    launch("hc_mix", (unsigned)(T * cuts * AFF_K_HC_SHARE), 256, 4096, &k);
    same_bits("hc_mix streams", Xn, Xp, (int64_t)T * N * H);
    const aff_k_wide mix = {.w = fn, .x = Xn, .y = m, .ss = ss, .ldx = N * H, .ldy = rows, .T = T, .rows = rows, .cols = N * H};
    wide(&mix, draw(&seed, 2) == 0);
    for (int i = 0; i < 2; i++) {
        u[i] = NEW(float, T * H), y[i] = NEW(float, T * H), qs[i] = NEW(float, T * groups), p[i] = NEW(float, T * N), c[i] = NEW(float, T * N * N), b[i] = NEW(uint16_t, T * H), q[i] = NEW(int8_t, T * H);
        aff_k_hc_pre a = *many;
        a.X = Xn, a.m = i ? part : m, a.ss = i ? NULL : ss, a.cuts = i ? cuts : 0, a.Xout = i ? Xo : NULL;
        a.u = u[i], a.y = (aff_k_forms){y[i], b[i], q[i], qs[i]}, a.post = p[i], a.comb = c[i];
        launch("hc_pre", 2 * (unsigned)T, i ? 512 : 256, aff__k_hc_smem(H), &a);
    }
    same_bits("streams carried over", Xo, Xn, (int64_t)T * N * H);
    same_bits("u by cuts", u[1], u[0], (int64_t)T * H);
    same_bits("norm by cuts", y[1], y[0], (int64_t)T * H);
    same_bits("post by cuts", p[1], p[0], (int64_t)T * N);
    same_bits("comb by cuts", c[1], c[0], (int64_t)T * N * N);
    same_bytes("bf16 by cuts", b[1], b[0], 2 * (int64_t)T * H);
    same_bytes("int8 by cuts", q[1], q[0], (int64_t)T * H);
    same_bits("scales by cuts", qs[1], qs[0], (int64_t)T * groups);
    for (int i = 0; i < 2; i++) free(u[i]), free(y[i]), free(qs[i]), free(p[i]), free(c[i]), free(b[i]), free(q[i]);
    free(fn), free(Xn), free(Xo), free(part), free(m), free(ss);
}

/* hc_pre through mixes that do not depend on an order of summation: the CPU's bits. */
static void test_hyper_connections(void **state)
{
    (void)state;
    static const int streams[] = {4, 1, 2, 8, 4, 4, 4, 8};
    for (int round = 0; round < 8; round++) {
        const int N = streams[round], H = round == 5 ? 128 : round == 6 ? 1280 : draw_int(&seed, 1, 300), T = draw_int(&seed, 1, 6), rows = (2 + N) * N;
        float *fn = NEW(float, rows * N * H), *base = uniform(rows, 1), *X = uniform((int64_t)T * N * H, 2), *w = uniform(H, 1);
        const float scale[3] = {1.1f, 0.9f, 1.3f};
        /* One weight a row: the mixes do not depend on the order of a sum. */
        for (int o = 0; o < rows; o++) fn[(int64_t)o * N * H + draw_int(&seed, 0, N * H - 1)] = draw_unit(&seed);
        const aff_hc h = {.fn = {.dtype = AFF_F32, .rows = rows, .cols = N * H, .data = fn, .wide = true}, .scale = scale, .base = base,
                          .streams = N, .iters = draw_int(&seed, 1, 20), .eps = 1e-3f, .rms_eps = 1e-6f};
        aff_hc head = h;
        head.fn.rows = N;
        float *u = NEW(float, T * H), *post = NEW(float, T * N), *comb = NEW(float, T * N * N), *y = NEW(float, T * H), *yh = NEW(float, T * H), *f = uniform((int64_t)T * H, 1);
        float *Xp = NEW(float, T * N * H), *tap = NEW(float, T * (H + 3)), *ey = uniform((int64_t)T * 3 * H, 1), *fs = NEW(float, T * H);
        aff__cpu_hc_pre(cpu, &h, X, T, H, u, post, comb);
        cpu->rmsnorm(cpu, u, w, 1e-5f, T, H, y);
        aff__cpu_hc_head(cpu, &head, X, T, H, yh);
        memcpy(Xp, X, sizeof *X * (size_t)(T * N * H));
        memcpy(fs, f, sizeof *f * (size_t)(T * H));
        cpu->sum_experts(cpu, ey, T, 3, H, fs);
        aff__cpu_hc_post(cpu, round >= 4 ? fs : f, post, comb, T, N, H, Xp);
        cpu->stream_mean(cpu, Xp, T, N, H, tap, H + 3);
        EACH_LAYOUT
        {
            float *m = NEW(float, T * rows), *ss = NEW(float, T), *du = NEW(float, T * H), *dy = NEW(float, T * H), *dpost = NEW(float, T * N), *dcomb = NEW(float, T * N * N);
            float *dX = NEW(float, T * N * H), *dtap = NEW(float, T * (H + 3));
            const aff_k_wide mix = {.w = fn, .x = X, .y = m, .ss = ss, .ldx = N * H, .ldy = rows, .T = T, .rows = rows, .cols = N * H};
            wide(&mix, true);
            for (int t = 0; t < T; t++) ss[t] = aff__cpu_sumsq(X + (int64_t)t * N * H, N * H);
            aff_k_hc_pre pre = {.X = X, .m = m, .ss = ss, .scale = scale, .base = base, .u = du, .w = w, .y = {.f32 = dy}, .post = dpost, .comb = dcomb,
                                .T = T, .H = H, .N = N, .iters = h.iters, .hc_eps = h.eps, .rms_eps = h.rms_eps, .norm_eps = 1e-5f};
            launch("hc_pre", 2 * (unsigned)T, draw(&seed, 2) ? 256 : 512, aff__k_hc_smem(H), &pre);
            same_bits("hc u", du, u, (int64_t)T * H);
            same_bits("hc post", dpost, post, (int64_t)T * N);
            same_bits("hc comb", dcomb, comb, (int64_t)T * N * N);
            same_bits("hc norm", dy, y, (int64_t)T * H);
            aff_k_wide mix_head = mix;
            mix_head.rows = N, mix_head.ldy = N;
            wide(&mix_head, false);
            pre.comb = NULL, pre.w = NULL, pre.u = NULL;
            for (int t = 0; t < T; t++) ss[t] = aff__cpu_sumsq(X + (int64_t)t * N * H, N * H);
            launch("hc_pre", (unsigned)T, 256, aff__k_hc_smem(H), &pre);
            same_bits("hc head", dy, yh, (int64_t)T * H);
            memcpy(dX, X, sizeof *X * (size_t)(T * N * H));
            aff_k_hc_post p = {.X = dX, .f = f, .y = round >= 4 ? ey : NULL, .post = dpost, .comb = dcomb, .tap = dtap, .ld_tap = H + 3, .T = T, .H = H, .N = N, .K = 3};
            launch("hc_post", up((int64_t)T * H, 256), 256, 0, &p);
            same_bits("hc_post", dX, Xp, (int64_t)T * N * H);
            aff_k_hc_post again = p;
            again.X = X, again.tap = NULL;
            pre.comb = dcomb, pre.w = w;
            mixed(&pre, &again, Xp);
            same_bits("tap", dtap, tap, (int64_t)T * (H + 3));
            memset(dtap, 0, sizeof *dtap * (size_t)(T * (H + 3)));
            const aff_k_stream_mean sm = {.X = dX, .tap = dtap, .ld_tap = H + 3, .T = T, .H = H, .N = N};
            launch("stream_mean", up((int64_t)T * H, 256), 256, 0, &sm);
            same_bits("stream_mean", dtap, tap, (int64_t)T * (H + 3));
            free(m), free(ss), free(du), free(dy), free(dpost), free(dcomb), free(dX), free(dtap);
        }
        free(fn), free(base), free(X), free(w), free(u), free(post), free(comb), free(y), free(yh), free(f), free(Xp), free(tap), free(ey), free(fs);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rmsnorm), cmocka_unit_test(test_quantise), cmocka_unit_test(test_embed),
                                       cmocka_unit_test(test_wide), cmocka_unit_test(test_hyper_connections)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
