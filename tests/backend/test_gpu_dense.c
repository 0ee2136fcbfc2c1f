/* Dense products on the matrix unit: the CPU's result within the order of summation; one row, 16 rows and the big tiles, in every bit
 * the same. */
#include "backend/gpu_kernel_test.h"

typedef struct {
    aff_weight w;
    int groups, T;
    uint8_t *scale;
    void *data;
    float *x, *want; /* [T][groups*cols], [T][rows] */
    uint16_t *xb;
} product;

static product make(aff_dtype d, int rows, int cols, int groups, int T)
{
    product p = {.w = {.dtype = d, .rows = rows * groups, .cols = cols}, .groups = groups, .T = T};
    const int64_t n = (int64_t)rows * groups * cols, width = (int64_t)groups * cols;
    const int tile = d == AFF_FP8_32 ? 32 : 128;
    if (d == AFF_BF16) {
        float *f = uniform(n, 1);
        p.data = NEW(uint16_t, n);
        to_bf16(f, p.data, n);
        free(f);
    } else {
        uint8_t *b = p.data = NEW(uint8_t, n);
        for (int64_t i = 0; i < n; i++)
            do b[i] = (uint8_t)draw(&seed, 256);
            while ((b[i] & 0x7f) == 0x7f);
        const int tiles = (int)(up(rows * groups, tile) * up(cols, tile));
        p.scale = NEW(uint8_t, tiles);
        for (int i = 0; i < tiles; i++) p.scale[i] = (uint8_t)draw_int(&seed, 116, 124);
    }
    p.w.data = p.data, p.w.scale = p.scale;
    p.x = uniform(T * width, 1);
    p.xb = NEW(uint16_t, T * width);
    to_bf16(p.x, p.xb, T * width);
    p.want = NEW(float, (int64_t)T * rows * groups);
    aff__cpu_matmul_grouped(NULL, &p.w, AFF_FAST, groups, p.x, width, T, p.want, p.w.rows);
    return p;
}
static void drop(product *p)
{
    free(p->data), free(p->scale), free(p->x), free(p->want), free(p->xb);
}
static aff_k_matrix matrix(const product *p, float *y, uint16_t *yb)
{
    return (aff_k_matrix){.data = p->data, .scale = p->scale, .x = p->xb, .y = y, .yb = yb, .ldx = (int64_t)p->groups * p->w.cols, .ldy = p->w.rows,
                          .rows = p->w.rows, .cols = p->w.cols, .dtype = p->w.dtype, .group_rows = p->w.rows / p->groups};
}
static bool finite = true; /* no NaN in FP8 weights */
static void run(aff_k_dense *a, bool few)
{
    a->stages = draw_int(&seed, 1, 2);
    const int unit = few ? 16 : aff__k_many_rows(layout_amd);
    int tiles = 0;
    for (int i = 0; i < a->count; i++) {
        a->m[i].tile0 = tiles;
        tiles += aff__k_dense_tiles(&a->m[i], unit);
    }
    bool stream = few && finite && draw(&seed, 3) > 0;
    for (int i = 0; i < a->count; i++) stream &= aff__k_ds_fits(&a->m[i]);
    a->tiles = tiles;
    bool wg = finite && !layout_amd;
    for (int i = 0; i < a->count; i++) wg &= aff__k_wg_fits(&a->m[i]);
    if (stream) {
        aff__k_ds_solo(a, draw(&seed, 2) ? 0 : 1 << 20);
        const size_t smem = aff__k_ds_smem(a, draw(&seed, 2) ? 1 << 20 : 8 * 2048 * AFF_K_DS_STAGES + (64 * (size_t)a->T + 4) * (size_t)(a->m[0].cols / 128));
        launch("dense_stream", (unsigned)draw_int(&seed, 1, tiles < 5 ? tiles : 5), 256, smem ? smem : aff__k_ds_smem(a, 1 << 20), a);
    } else if (few)
        launch("dense_few", (unsigned)tiles, 256, 8192, a);
    else if (wg && draw(&seed, 3))
        launch("dense_wg", (unsigned)draw_int(&seed, 1, 5), 384, AFF_K_WG_SMEM_EMU, a);
    else
        launch("dense_many", (unsigned)tiles * up(a->T, 128), 256, aff__k_many_smem(layout_amd, a->stages), a);
}

static void check(aff_dtype d, int rows, int cols, int groups, int T)
{
    product p = make(d, rows, cols, groups, T);
    const int64_t n = (int64_t)T * p.w.rows;
    EACH_LAYOUT
    {
        float *y = NEW(float, n), *z = NEW(float, n), *one = NEW(float, n);
        uint16_t *yb = NEW(uint16_t, n), *wb = NEW(uint16_t, n);
        aff_k_dense a = {.m = {matrix(&p, y, yb)}, .count = 1, .T = T};
        run(&a, false);
        near("dense", y, p.want, T, p.w.rows, 2e-5);
        to_bf16(y, wb, n);
        same_bytes("dense as bf16", yb, wb, 2 * n);
        for (int t = 0, step; t < T; t += step) { /* blocks of 1..16 rows */
            step = t == 0 ? 1 : draw_int(&seed, 1, 16);
            step = step < T - t ? step : T - t;
            a.T = step;
            a.m[0].x = p.xb + t * a.m[0].ldx, a.m[0].y = z + (int64_t)t * p.w.rows, a.m[0].yb = NULL;
            run(&a, true);
        }
        same_bits("dense, few and many rows", z, y, n);
        free(y), free(z), free(one), free(yb), free(wb);
    }
    drop(&p);
}

static void test_shapes(void **state)
{
    (void)state;
    static const struct {
        aff_dtype d;
        int rows, cols, groups, T;
    } s[] = {{AFF_FP8, 128, 512, 1, 6},  {AFF_FP8, 200, 1280, 1, 17}, {AFF_FP8, 17, 133, 1, 3},    {AFF_FP8, 1, 8, 1, 1},      {AFF_FP8, 64, 192, 4, 19},
             {AFF_FP8, 24, 256, 3, 5},   {AFF_BF16, 130, 384, 1, 16}, {AFF_BF16, 40, 77, 1, 2},    {AFF_BF16, 33, 1096, 2, 7}, {AFF_FP8_32, 96, 256, 1, 9},
             {AFF_FP8_32, 45, 232, 1, 3}, {AFF_FP8_32, 70, 39, 2, 20}, {AFF_FP8_32, 8, 32, 1, 130}, {AFF_BF16, 3, 64, 1, 140}, {AFF_FP8, 300, 64, 1, 33},
             {AFF_FP8, 160, 1152, 1, 20}, {AFF_FP8, 32, 256, 3, 21},  {AFF_BF16, 48, 1280, 1, 18}, {AFF_BF16, 16, 128, 2, 35}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) check(s[i].d, s[i].rows, s[i].cols, s[i].groups, s[i].T);
}

/* Four matrices of different kinds in one launch. */
static void test_several(void **state)
{
    (void)state;
    product p[4] = {make(AFF_FP8, 50, 256, 1, 6), make(AFF_BF16, 20, 256, 1, 6), make(AFF_FP8, 16, 128, 3, 6), make(AFF_FP8_32, 33, 64, 1, 6)};
    product q[3] = {make(AFF_FP8, 48, 2048, 1, 6), make(AFF_BF16, 32, 384, 1, 6), make(AFF_FP8, 16, 128, 3, 6)};
    EACH_LAYOUT
    {
        aff_k_dense a = {.count = 3, .T = 6};
        float *y[3];
        for (int i = 0; i < 3; i++) a.m[i] = matrix(&q[i], y[i] = NEW(float, 6 * q[i].w.rows), NULL);
        run(&a, true);
        for (int i = 0; i < 3; i++) near("several, streamed", y[i], q[i].want, 6, q[i].w.rows, 2e-5), free(y[i]);
    }
    for (int i = 0; i < 3; i++) drop(&q[i]);
    EACH_LAYOUT
        for (int few = 0; few < 2; few++) {
            aff_k_dense a = {.count = 4, .T = 6};
            float *y[4];
            for (int i = 0; i < 4; i++) a.m[i] = matrix(&p[i], y[i] = NEW(float, 6 * p[i].w.rows), NULL);
            run(&a, few);
            for (int i = 0; i < 4; i++) near("several", y[i], p[i].want, 6, p[i].w.rows, 2e-5), free(y[i]);
        }
    for (int i = 0; i < 4; i++) drop(&p[i]);
}

/* Every E4M3 code against a unit vector, scales at both ends; NaN codes and a NaN scale come out as NaN. */
static void test_codes(void **state)
{
    (void)state;
    finite = false;
    product p = make(AFF_FP8, 256, 128, 1, 1);
    uint8_t *b = p.data;
    for (int i = 0; i < 256 * 128; i++) b[i] = 0;
    for (int i = 0; i < 256; i++) b[i * 128 + 37] = (uint8_t)i;
    memset(p.xb, 0, 256);
    p.xb[37] = 0x3f80;
    p.scale[0] = 3, p.scale[1] = 240;
    EACH_LAYOUT
        for (int few = 0; few < 2; few++) {
            float y[256], want[256];
            aff_k_dense a = {.m = {matrix(&p, y, NULL)}, .count = 1, .T = 1};
            run(&a, few);
            for (int i = 0; i < 256; i++) want[i] = aff__e4m3_to_f32((uint8_t)i) * aff__e8m0_to_f32(p.scale[i / 128]);
            for (int i = 0; i < 256; i++)
                if (!(y[i] == want[i] || (y[i] != y[i] && want[i] != want[i]))) fail_msg("code %d: %a, expected %a", i, (double)y[i], (double)want[i]);
        }
    finite = true;
    drop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes), cmocka_unit_test(test_several), cmocka_unit_test(test_codes)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
