/* Attention on the matrix unit: near the CPU's (weights are rounded to bf16), one block a query and one block a cut in every bit
 * the same, and a row the same beside any others. */
#include "backend/gpu_kernel_test.h"

typedef struct {
    int heads, D, R, window, ratio, topk, draft, raw_size;
    aff_rowfmt row;
} shape;

/* Rows that a KV row's quantiser has been through. */
static void fill_rows(uint8_t *rows, int64_t n, const aff_rowfmt *f, int R)
{
    float x[1024];
    for (int64_t i = 0; i < n; i++) {
        const float s = 0.2f + 2 * fabsf(draw_unit(&seed));
        for (int d = 0; d < f->n; d++) x[d] = s * draw_unit(&seed);
        aff__a8(x, (f->n - R) / 64 * 64, 64);
        for (int d = f->n - R; d < f->n; d++) x[d] = aff__round_bf16(x[d]);
        aff__row_encode(f, x, rows + i * f->bytes);
    }
}

typedef struct {
    const shape *s;
    int T;
    int64_t pos[32];
    int first[32];
    aff_layer_state state[3], *of[32];
    const aff_layer_state *seq[32];
    int32_t *sel;
    float *q, *sink, *extra, *want, freq[64];
    uint16_t *qb, *xb;
    aff_keyset keys[32];
} attention;

static attention *make(const shape *s, int T, int64_t far)
{
    attention *a = NEW(attention, 1);
    const int64_t n = (int64_t)T * s->heads * s->D;
    a->s = s, a->T = T;
    for (int q = 0; q < 3; q++) {
        aff_layer_state *y = &a->state[q];
        *y = (aff_layer_state){.row = &s->row, .raw_size = s->raw_size};
        y->raw = NEW(uint8_t, s->raw_size * s->row.bytes);
        fill_rows(y->raw, s->raw_size, &s->row, s->R);
        if (!s->ratio) continue;
        const int64_t groups = (far + T + 1) / s->ratio + 1;
        y->comp = NEW(uint8_t, groups * s->row.bytes);
        fill_rows(y->comp, groups, &s->row, s->R);
    }
    for (int t = 0, who = 0, f = 0; t < T; t++) {
        const bool next = s->draft ? t % s->draft == 0 : draw(&seed, 3) == 0;
        if (t == 0 || (next && who < 2)) {
            if (t) who++;
            f = t;
            a->pos[t] = t == 0 ? far : draw_int(&seed, s->draft ? 1 : 0, (int)far);
        } else {
            a->pos[t] = a->pos[t - 1] + 1;
        }
        a->first[t] = f, a->of[t] = &a->state[who], a->seq[t] = &a->state[who];
    }
    if (s->draft) /* whole blocks */
        for (int t = 0; t < T; t++) a->first[t] = t / s->draft * s->draft, a->pos[t] = a->pos[a->first[t]] + t % s->draft, a->of[t] = a->of[a->first[t]], a->seq[t] = a->of[t];
    a->sel = NEW(int32_t, T * (s->topk + 1));
    a->q = uniform(n, 1), a->sink = uniform(s->heads, 1), a->extra = uniform((int64_t)T * s->D, 1);
    for (int64_t i = 0; i < (int64_t)T * s->D; i++) a->extra[i] = aff__round_bf16(a->extra[i]);
    a->qb = NEW(uint16_t, n), a->xb = NEW(uint16_t, T * s->D), a->want = NEW(float, n);
    to_bf16(a->q, a->qb, n), to_bf16(a->extra, a->xb, (int64_t)T * s->D);
    for (int i = 0; i < s->R / 2; i++) a->freq[i] = (float)pow(10000, -2.0 * i / s->R);
    for (int t = 0; t < T; t++) { /* as forward.c's key_lists */
        const aff_layer_state *y = a->of[t];
        const int64_t end = s->draft ? a->pos[a->first[t]] : a->pos[t] + 1, lo = end > s->window ? end - s->window : 0;
        aff_keyset *k = &a->keys[t];
        *k = (aff_keyset){.row = &s->row, .raw = y->raw, .raw_size = y->raw_size, .lo = lo, .n_raw = (int)(end - lo)};
        if (s->draft) {
            k->extra = a->extra + (int64_t)a->first[t] * s->D, k->n_extra = s->draft;
        } else if (s->ratio) {
            k->comp = y->comp, k->n_comp = (int)((a->pos[t] + 1) / s->ratio);
            if (s->topk && k->n_comp > s->topk) {
                int32_t *sel = a->sel + (int64_t)t * s->topk;
                for (int i = 0, g = 0; i < s->topk; g++)
                    if (draw(&seed, (uint64_t)(k->n_comp - g)) < (uint64_t)(s->topk - i)) sel[i++] = g;
                k->n_comp = s->topk, k->sel = sel;
            }
        }
    }
    const aff_rope rope = {a->freq, s->R / 2};
    aff_error err;
    assert_int_equal(aff__cpu_attend_rows(cpu, a->q, T, s->heads, s->D, a->keys, a->sink, &rope, a->pos, a->want, &err), AFF_OK);
    return a;
}
static void drop(attention *a)
{
    for (int q = 0; q < 3; q++) free(a->state[q].raw), free(a->state[q].comp);
    free(a->sel), free(a->q), free(a->sink), free(a->extra), free(a->qb), free(a->xb), free(a->want), free(a);
}

/* Rows t0..t0+n-1 by one of the two ways. */
static void run(const attention *a, int t0, int n, bool cuts, float *o, uint16_t *ob)
{
    const shape *s = a->s;
    int max = 1;
    for (int t = t0; t < t0 + n; t++) {
        const int c = aff__k_attend_cuts(a->pos[t], s->window, s->ratio, s->topk, s->draft);
        max = c > max ? c : max;
    }
    aff_k_attend k = {.rows = {a->pos + t0, a->first, a->seq + t0, n, 0}, .q = a->qb + (int64_t)t0 * s->heads * s->D, .sink = a->sink,
                      .sel = a->sel + (int64_t)t0 * s->topk, .extra = a->xb, .freq = a->freq, .o = o, .ob = ob, .fmt = s->row, .heads = s->heads, .D = s->D,
                      .pairs = s->R / 2, .window = s->window, .ratio = s->ratio, .topk = s->topk, .draft = s->draft, .max_cuts = max, .scale = (float)(1 / sqrt((double)s->D))};
    if (!cuts) {
        launch("attend", (unsigned)n * up(s->heads, 64), 512, aff__k_attend_smem(layout_amd, 64), &k);
        return;
    }
    k.part_v = NEW(float, (int64_t)n * max * s->heads * s->D), k.part_mz = NEW(float, (int64_t)n * max * s->heads * 2);
    launch("attend_cut", (unsigned)(n * max) * up(s->heads, AFF_K_CUT_HEADS), 256, aff__k_attend_smem(layout_amd, AFF_K_CUT_HEADS), &k);
    launch("attend_merge", (unsigned)(n * s->heads), 128, (size_t)(8 * k.pairs), &k);
    free(k.part_v), free(k.part_mz);
}

static void check(const shape *s, int T, int64_t far, double tol)
{
    attention *a = make(s, T, far);
    const int64_t n = (int64_t)T * s->heads * s->D, width = (int64_t)s->heads * s->D;
    EACH_LAYOUT
    {
        float *o = NEW(float, n), *p = NEW(float, n);
        uint16_t *ob = NEW(uint16_t, n), *wb = NEW(uint16_t, n);
        run(a, 0, T, false, o, ob);
        near("attend", o, a->want, (int64_t)T * s->heads, s->D, tol);
        to_bf16(o, wb, n);
        same_bytes("attend bf16", ob, wb, 2 * n);
        run(a, 0, T, true, p, NULL);
        same_bits("attend, by cuts", p, o, n);
        if (!s->draft && a->first[T - 1] == 0) {
            run(a, T - 1, 1, true, p, NULL);
            same_bits("attend, alone", p, o + (T - 1) * width, width);
        }
        free(o), free(p), free(ob), free(wb);
    }
    drop(a);
}

static void test_shapes(void **state)
{
    (void)state;
    static const struct {
        int heads, D, R, window, ratio, topk, draft, T;
        int64_t far;
    } c[] = {{8, 64, 16, 16, 0, 0, 0, 3, 100},   {64, 512, 64, 128, 4, 96, 0, 2, 700}, {9, 512, 64, 128, 128, 0, 0, 1, 9000}, {5, 192, 64, 16, 4, 16, 0, 5, 90},
             {70, 128, 32, 20, 2, 0, 0, 2, 37},  {8, 512, 64, 128, 0, 0, 5, 10, 300},  {16, 72, 8, 7, 0, 0, 3, 6, 2},         {4, 320, 64, 64, 8, 5, 0, 1, 63},
             {3, 64, 16, 128, 4, 512, 0, 2, 1}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        const shape s = {c[i].heads, c[i].D, c[i].R, c[i].window, c[i].ratio, c[i].topk, c[i].draft, c[i].window + 32, aff__rowfmt_kv(AFF_FAST, c[i].D, c[i].R)};
        check(&s, c[i].T, c[i].far, 1e-2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
