#include "backend/gpu/check.h"
#include "experts/store.h"
#include "backend/cpu/kernels.h"
#include "base/mem.h"
#include "base/rng.h"
#include "quant/codebook.h"
#include "quant/numbers.h"
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HELD = 64 };

/* One op under test. Host arrays and their copies on the device live until drop(). */
typedef struct {
    aff_backend *cpu, *dev;
    uint64_t seed;
    aff_check_row row;
    void *host[HELD], *there[HELD];
    int n_host, n_there;
    aff_status status;
    aff_error err;
    jmp_buf out;   /* ends the case: no memory for its operands */
    char what[96]; /* the case */
} check;

static int draw(check *c, int lo, int hi)
{
    return lo + (int)(aff__splitmix64(&c->seed) % (uint64_t)(hi - lo + 1));
}
static float unit(check *c)
{
    return (float)((double)(aff__splitmix64(&c->seed) >> 11) * 0x1p-52 - 1.0);
}

static void note_status(check *c, aff_status s)
{
    if (s != AFF_OK && c->status == AFF_OK) c->status = s;
}

/* Zeroed host memory. */
static void *host(check *c, int64_t n, size_t size)
{
    void *p = NULL;
    note_status(c, c->n_host == HELD ? aff__fail(&c->err, AFF_E_LIMIT, "check: more than %d arrays", HELD)
                                     : aff__calloc(&p, (uint64_t)n, size, "check", &c->err));
    if (!p) longjmp(c->out, 1);
    return c->host[c->n_host++] = p;
}

static float *uniform(check *c, int64_t n, float s)
{
    float *x = host(c, n, sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = s * unit(c);
    return x;
}

static void *bytes(check *c, int64_t n)
{
    uint8_t *x = host(c, n, 1);
    for (int64_t i = 0; i < n; i++) x[i] = (uint8_t)aff__splitmix64(&c->seed);
    return x;
}

/* n bytes of device memory, from x unless NULL. */
static void *there(check *c, const void *x, int64_t n)
{
    const aff_memory *m = c->dev->mem;
    void *p = NULL;
    if (c->status == AFF_OK && c->n_there < HELD) note_status(c, m->alloc(m, &p, (uint64_t)n, "check", &c->err));
    if (!p) longjmp(c->out, 1);
    c->there[c->n_there++] = p;
    if (x) note_status(c, m->write(m, p, x, (uint64_t)n, &c->err));
    return p;
}

static void drop(check *c)
{
    for (int i = 0; i < c->n_there; i++) c->dev->mem->free(c->dev->mem, c->there[i]);
    for (int i = 0; i < c->n_host; i++) free(c->host[i]);
    c->n_there = c->n_host = 0;
}

/* Rows [T][n] of the device against the host's. */
static void compare(check *c, const float *want, const float *dev, int T, int n)
{
    float *got = host(c, (int64_t)T * n, sizeof *got);
    if (c->status != AFF_OK) return;
    note_status(c, c->dev->mem->read(c->dev->mem, got, dev, (uint64_t)T * (uint64_t)n * sizeof *got, &c->err));
    for (int t = 0; t < T && c->status == AFF_OK; t++) {
        double e = 0, m = 0;
        for (int i = 0; i < n; i++) {
            const float a = got[(int64_t)t * n + i], b = want[(int64_t)t * n + i];
            const bool same = memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b));
            c->row.differ += !same;
            c->row.values++;
            if (isnan(a) != isnan(b) || (!same && isinf(b))) e = INFINITY;
            if (isfinite(a) && isfinite(b)) {
                e = fmax(e, fabs((double)a - (double)b));
                m = fmax(m, fabs((double)b));
            } else if (!same) {
                e = INFINITY;
            }
        }
        e = e == 0 ? 0 : e / (m > 0 ? m : 1e-30);
        c->row.error = fmax(c->row.error, e);
        const bool ok = c->row.allowed > 0 ? e <= c->row.allowed : c->row.differ == 0;
        if (!ok && !*c->row.note)
            snprintf(c->row.note, sizeof c->row.note, "%s, row %d of %d: error %.3g", c->what, t, T, e);
    }
}

static void compare_ids(check *c, const int32_t *want, const int32_t *dev, int T, int n)
{
    int32_t *got = host(c, (int64_t)T * n, sizeof *got);
    if (c->status != AFF_OK) return;
    note_status(c, c->dev->mem->read(c->dev->mem, got, dev, (uint64_t)T * (uint64_t)n * sizeof *got, &c->err));
    for (int64_t i = 0; i < (int64_t)T * n && c->status == AFF_OK; i++) {
        c->row.values++;
        if (got[i] == want[i]) continue;
        c->row.differ++;
        if (!*c->row.note)
            snprintf(c->row.note, sizeof c->row.note, "%s, row %d: %d, expected %d", c->what, (int)(i / n), (int)got[i],
                     (int)want[i]);
    }
}

/* ---- cases ---- */

static void do_embed(check *c)
{
    const int V = draw(c, 2, 50), H = 4 * draw(c, 1, 300), N = draw(c, 1, 4), T = draw(c, 1, 40);
    const bool bf16 = draw(c, 0, 1);
    const aff_weight w = {.dtype = bf16 ? AFF_BF16 : AFF_F32,
                          .rows = V,
                          .cols = H,
                          .data = bf16 ? bytes(c, 2 * (int64_t)V * H) : (void *)uniform(c, (int64_t)V * H, 1)};
    aff_weight d = w;
    int32_t *ids = host(c, T, sizeof *ids);
    float *X = host(c, (int64_t)T * N * H, 4), *dX = there(c, NULL, (int64_t)T * N * H * 4);
    for (int t = 0; t < T; t++) ids[t] = draw(c, 0, V - 1);
    d.data = there(c, w.data, (int64_t)V * H * (bf16 ? 2 : 4));
    snprintf(c->what, sizeof c->what, "%d x %d, %d streams", T, H, N);
    c->cpu->embed(c->cpu, &w, ids, T, N, X);
    c->dev->embed(c->dev, &d, there(c, ids, 4 * (int64_t)T), T, N, dX);
    compare(c, X, dX, T * N, H);
}

static void do_rmsnorm(check *c)
{
    const int T = draw(c, 1, 20), n = draw(c, 1, 5000);
    float *x = uniform(c, (int64_t)T * n, 3), *w = draw(c, 0, 3) ? uniform(c, n, 1) : NULL,
          *y = host(c, (int64_t)T * n, 4);
    float *dy = there(c, NULL, (int64_t)T * n * 4);
    snprintf(c->what, sizeof c->what, "%d x %d", T, n);
    c->cpu->rmsnorm(c->cpu, x, w, 1e-6f, T, n, y);
    c->dev->rmsnorm(c->dev, there(c, x, (int64_t)T * n * 4), w ? there(c, w, 4 * (int64_t)n) : NULL, 1e-6f, T, n, dy);
    compare(c, y, dy, T, n);
}

static void do_hyper(check *c)
{
    const int N = draw(c, 1, 4), H = 32 * draw(c, 1, 40), T = draw(c, 0, 1) ? draw(c, 1, 16) : draw(c, 17, 60),
              rows = (2 + N) * N;
    float *fn = uniform(c, (int64_t)rows * N * H, 0.05f), *base = uniform(c, rows, 1),
          *X = uniform(c, (int64_t)T * N * H, 2), *norm = uniform(c, H, 1);
    const float scale[3] = {1.1f, 0.9f, 1.3f};
    aff_hc h = {.fn = {.dtype = AFF_F32, .rows = rows, .cols = N * H, .data = fn, .wide = true},
                .scale = scale,
                .base = base,
                .streams = N,
                .iters = 20,
                .eps = 1e-6f,
                .rms_eps = 1e-6f},
           d = h;
    float *u = host(c, (int64_t)T * H, 4), *x = host(c, (int64_t)T * H, 4), *post = host(c, T * N, 4),
          *comb = host(c, T * N * N, 4);
    float *du = there(c, NULL, (int64_t)T * H * 4), *dx = there(c, NULL, (int64_t)T * H * 4),
          *dpost = there(c, NULL, T * N * 4), *dcomb = there(c, NULL, T * N * N * 4);
    const float *dX = there(c, X, (int64_t)T * N * H * 4), *dnorm = there(c, norm, 4 * (int64_t)H);
    d.fn.data = there(c, fn, (int64_t)rows * N * H * 4);
    d.base = there(c, base, 4 * rows);
    d.scale = there(c, scale, sizeof scale);
    snprintf(c->what, sizeof c->what, "%d rows, %d x %d", T, N, H);
    c->cpu->hc_pre(c->cpu, &h, X, T, H, norm, 1e-6f, u, x, post, comb);
    c->dev->hc_pre(c->dev, &d, dX, T, H, dnorm, 1e-6f, du, dx, dpost, dcomb);
    compare(c, u, du, T, H);
    compare(c, x, dx, T, H);
    compare(c, post, dpost, T, N);
    compare(c, comb, dcomb, T, N * N);
    h.fn.rows = d.fn.rows = N;
    c->cpu->hc_head(c->cpu, &h, X, T, H, norm, 1e-6f, u, x);
    c->dev->hc_head(c->dev, &d, dX, T, H, dnorm, 1e-6f, du, dx);
    compare(c, x, dx, T, H);
}

static void do_sums(check *c)
{
    const int N = draw(c, 1, 4), H = draw(c, 1, 1500), T = draw(c, 1, 30), K = draw(c, 1, 8),
              ld = 2 * H + draw(c, 0, 5);
    float *X = uniform(c, (int64_t)T * N * H, 2), *f = uniform(c, (int64_t)T * H, 1),
          *y = uniform(c, (int64_t)T * K * H, 1), *post = uniform(c, T * N, 1), *comb = uniform(c, T * N * N, 1);
    float *tap = host(c, (int64_t)(T + 1) * ld, 4), *dX = there(c, X, (int64_t)T * N * H * 4),
          *df = there(c, f, (int64_t)T * H * 4), *dy = there(c, y, (int64_t)T * K * H * 4);
    float *dpost = there(c, post, 4 * (int64_t)T * N), *dcomb = there(c, comb, 4 * (int64_t)T * N * N),
          *dtap = there(c, NULL, (int64_t)(T + 1) * ld * 4);
    const bool with = draw(c, 0, 1);
    snprintf(c->what, sizeof c->what, "%d rows, %d x %d, %d experts", T, N, H, with ? K : 0);
    c->dev->hc_post(c->dev, df, with ? dy : NULL, K, dpost, dcomb, T, N, H, dX);
    c->cpu->hc_post(c->cpu, f, with ? y : NULL, K, post, comb, T, N, H, X);
    compare(c, X, dX, T * N, H);
    c->cpu->stream_mean(c->cpu, X, T, N, H, tap + H, ld);
    if (c->dev->mem->host == false && dtap) c->dev->stream_mean(c->dev, dX, T, N, H, dtap + H, ld);
    compare(c, tap, dtap, T, ld);
    float *g = uniform(c, (int64_t)T * H, 1), *dg = there(c, g, (int64_t)T * H * 4);
    c->cpu->sum_experts(c->cpu, y, T, K, H, g);
    c->dev->sum_experts(c->dev, dy, T, K, H, dg);
    compare(c, g, dg, T, H);
}

/* A random matrix on both sides. */
static aff_weight matrix(check *c, aff_dtype dtype, int rows, int cols, bool wide, aff_weight *d)
{
    const int64_t n = (int64_t)rows * cols, tile = dtype == AFF_FP8 ? 128 : 32;
    aff_weight w = {.dtype = dtype, .rows = rows, .cols = cols, .wide = wide};
    int64_t size = n, scales = 0;
    if (dtype == AFF_F32) {
        w.data = uniform(c, n, 1);
        size = 4 * n;
    } else if (dtype == AFF_BF16) {
        uint16_t *x = host(c, n, 2);
        for (int64_t i = 0; i < n; i++) x[i] = aff__f32_to_bf16(unit(c));
        w.data = x;
        size = 2 * n;
    } else {
        uint8_t *x = bytes(c, n), *s;
        for (int64_t i = 0; i < n; i++) x[i] = (x[i] & 0x7f) == 0x7f ? 0 : x[i]; /* no NaN */
        scales = (rows + tile - 1) / tile * ((cols + tile - 1) / tile);
        s = host(c, scales, 1);
        for (int64_t i = 0; i < scales; i++) s[i] = (uint8_t)draw(c, 112, 122);
        w.data = x;
        w.scale = s;
    }
    *d = w;
    d->data = there(c, w.data, size);
    if (scales) d->scale = there(c, w.scale, scales);
    return w;
}

static void products_of(check *c, const aff_dtype *dtype, const bool *wide, int n, int groups, int T)
{
    aff_weight w[8], d[8];
    aff_product p[8], q[8];
    const int cols = 64 * draw(c, 1, 12), all = groups * cols;
    float *x = uniform(c, (int64_t)T * all, 1), *dx = there(c, x, (int64_t)T * all * 4);
    for (int i = 0; i < n; i++) {
        const int rows = groups * (groups > 1 ? 16 * draw(c, 1, 6) : draw(c, 1, 300));
        w[i] = matrix(c, dtype[i], rows, cols, wide[i], &d[i]);
        p[i] = (aff_product){&w[i], x, host(c, (int64_t)T * rows, 4), groups};
        q[i] = (aff_product){&d[i], dx, there(c, NULL, (int64_t)T * rows * 4), groups};
    }
    snprintf(c->what, sizeof c->what, "%d matrices, %d rows, K %d, %d groups, first dtype %d", n, T, cols, groups,
             (int)dtype[0]);
    c->cpu->products(c->cpu, p, n, T);
    c->dev->products(c->dev, q, n, T);
    for (int i = 0; i < n; i++) compare(c, p[i].y, q[i].y, T, w[i].rows);
}

static int rows_of_pass(check *c)
{
    return draw(c, 0, 1) ? draw(c, 1, 16) : draw(c, 17, 256);
}

static void do_bf16(check *c)
{
    products_of(c, (aff_dtype[]){AFF_BF16, AFF_BF16}, (bool[]){false, false}, draw(c, 1, 2), 1, rows_of_pass(c));
}
static void do_fp8(check *c)
{
    products_of(c, (aff_dtype[]){AFF_FP8, AFF_FP8, AFF_BF16, AFF_FP8_32}, (bool[]){false, false, false, false},
                draw(c, 1, 4), 1, rows_of_pass(c));
}
static void do_wide(check *c)
{
    products_of(c, (aff_dtype[]){AFF_F32, AFF_BF16, AFF_F32}, (bool[]){true, true, false}, 3, 1, draw(c, 1, 40));
}
static void do_grouped(check *c)
{
    products_of(c, (aff_dtype[]){draw(c, 0, 1) ? AFF_FP8 : AFF_BF16}, (bool[]){false}, 1, draw(c, 2, 8),
                rows_of_pass(c));
}

/* Promise 0 inside the device: any number of rows, the same bits. */
static void do_widths(check *c)
{
    const int cols = 64 * draw(c, 1, 20), rows = draw(c, 1, 200), T = draw(c, 2, 200);
    const aff_dtype dtype = (aff_dtype[]){AFF_BF16, AFF_FP8, AFF_FP8_32, AFF_F32}[draw(c, 0, 3)];
    aff_weight d;
    matrix(c, dtype, rows, cols, (dtype == AFF_F32 || dtype == AFF_BF16) && draw(c, 0, 1), &d);
    float *x = uniform(c, (int64_t)T * cols, 1), *all = there(c, NULL, (int64_t)T * rows * 4),
          *want = host(c, (int64_t)T * rows, 4);
    const float *dx = there(c, x, (int64_t)T * cols * 4);
    aff__matmul(c->dev, &d, dx, T, all);
    if (c->status == AFF_OK)
        note_status(c, c->dev->mem->read(c->dev->mem, want, all, (uint64_t)T * (uint64_t)rows * 4, &c->err));
    for (int round = 0; round < 3; round++) {
        const int at = draw(c, 0, T - 1), n = round ? draw(c, 1, T - at) : 1;
        float *part = there(c, NULL, (int64_t)n * rows * 4);
        snprintf(c->what, sizeof c->what, "rows %d..%d of %d, %d x %d, dtype %d", at, at + n - 1, T, rows, cols,
                 (int)dtype);
        if (c->status == AFF_OK)
            aff__matmul(c->dev, &d, there(c, x + (int64_t)at * cols, (int64_t)n * cols * 4), n, part);
        compare(c, want + (int64_t)at * rows, part, n, rows);
    }
}

static void do_route(check *c)
{
    const int E = draw(c, 8, 300), K = draw(c, 1, 8), T = draw(c, 1, 40), V = 50;
    const bool hash = draw(c, 0, 3) == 0;
    float *l = uniform(c, (int64_t)T * E, 6), *bias = uniform(c, E, 0.3f), *w = host(c, T * K, 4),
          *dw = there(c, NULL, 4 * (int64_t)T * K);
    int32_t *table = host(c, V * K, 4), *ids = host(c, T, 4), *picks = host(c, T * K, 4),
            *dpicks = there(c, NULL, 4 * (int64_t)T * K);
    for (int i = 0; i < V * K; i++) table[i] = (i / K * 5 + i % K) % E;
    for (int t = 0; t < T; t++) ids[t] = draw(c, 0, V - 1);
    const aff_router r = {(aff_scoring)draw(c, 0, 2), E, K, 1.5f, hash ? NULL : bias, hash ? table : NULL};
    aff_router d = r;
    d.bias = hash ? NULL : there(c, bias, 4 * (int64_t)E);
    d.hash = hash ? there(c, table, 4 * (int64_t)V * K) : NULL;
    snprintf(c->what, sizeof c->what, "%d rows, %d of %d", T, K, E);
    c->cpu->route(c->cpu, &r, l, ids, T, picks, w);
    c->dev->route(c->dev, &d, there(c, l, 4 * (int64_t)T * E), there(c, ids, 4 * (int64_t)T), T, dpicks, dw);
    compare_ids(c, picks, dpicks, T, K);
    compare(c, w, dw, T, K);
}

static void do_swiglu(check *c)
{
    const int T = draw(c, 1, 20), n = draw(c, 1, 2000);
    float *a = uniform(c, (int64_t)T * n, 20), *b = uniform(c, (int64_t)T * n, 20),
          *da = there(c, a, (int64_t)T * n * 4);
    const float limit = draw(c, 0, 1) ? 10.0f : 0.0f;
    snprintf(c->what, sizeof c->what, "%d x %d", T, n);
    c->dev->swiglu(c->dev, da, there(c, b, (int64_t)T * n * 4), limit, T, n);
    c->cpu->swiglu(c->cpu, a, b, limit, T, n);
    compare(c, a, da, T, n);
}

static void do_argmax(check *c)
{
    const int T = draw(c, 1, 6), n = draw(c, 1, 40000);
    float *x = uniform(c, (int64_t)T * n, 1);
    int32_t *id = host(c, T, 4), *did = there(c, NULL, 4 * T);
    for (int64_t i = 0; i < (int64_t)T * n; i++)
        x[i] = draw(c, 0, 3) ? rintf(x[i] * 8) : draw(c, 0, 9) ? x[i] : NAN; /* ties */
    snprintf(c->what, sizeof c->what, "%d x %d", T, n);
    c->cpu->argmax(c->cpu, x, T, n, id);
    c->dev->argmax(c->dev, there(c, x, (int64_t)T * n * 4), T, n, did);
    compare_ids(c, id, did, T, 1);
}

/* ---- routed experts ---- */

/* Random codes (all values are valid), or codes in order; scales near 1. */
static void expert_matrix(check *c, const aff_slot_layout *y, int which, uint64_t first, aff_expert_mat *w)
{
    const aff_dtype dtype = y->dtype;
    const uint8_t **const at[3] = {&w->codes, &w->fields, &w->rscale};
    for (int k = 0; k < 3; k++) {
        const uint64_t n = y->size[which][k];
        if (!n) continue;
        uint8_t *x = bytes(c, (int64_t)n);
        if (first && k == 0 && dtype != AFF_MXFP4) { /* 10-bit codes first, first+1, ... */
            memset(x, 0, n);
            for (uint64_t q = 0; q < n * 8 / 10; q++)
                for (int bit = 0; bit < 10; bit++)
                    x[(q * 10 + (uint64_t)bit) / 8] |=
                        (uint8_t)(((first + q) >> bit & 1) << ((q * 10 + (uint64_t)bit) % 8));
        }
        if (dtype == AFF_MXFP4 && k == 1)
            for (uint64_t i = 0; i < n; i++) x[i] = (uint8_t)(first ? i % 255 : (uint64_t)draw(c, 118, 130));
        if (k == 2)
            for (uint64_t r = 0; r < n / 2; r++) {
                const uint16_t v = aff__f32_to_bf16(0.001f * (1.5f + unit(c)));
                memcpy(x + 2 * r, &v, 2);
            }
        *at[k] = x;
    }
}

/* E experts of one shape, T rows with K picks each. x_at >= 0: activations one-hot, row t at column x_at + t. */
static void experts(check *c, aff_dtype dtype, int E, int H, int I, int T, int K, uint64_t first, bool one_hot)
{
    enum { MOST = 6 };
    aff_expert w[MOST];
    aff_moe_tile tile[MOST];
    int row[256 * MOST], rank[256 * MOST], n_tiles = 0, n = 0;
    float weight[256 * MOST];
    int16_t(*table)[1024][4] = host(c, 2, sizeof *table);
    uint8_t *book = bytes(c, 8192);
    for (int i = 0; i < 8192; i++)
        book[i] = (uint8_t)((book[i] & 0x80) | (8 + book[i] % 56)); /* E4M3, exponents 1 .. 7 */
    aff__codebook_ints(book, table);
    int32_t *picks = host(c, T * K, 4);
    float *pw = uniform(c, T * K, 1), *x = uniform(c, (int64_t)T * H, 1), *y = host(c, (int64_t)T * K * H, 4),
          *dy = there(c, NULL, (int64_t)T * K * H * 4);
    for (int t = 0; one_hot && t < T; t++)
        for (int i = 0; i < H; i++) x[(int64_t)t * H + i] = i % T == t ? 1.0f : 0.0f;
    const aff_expert_shape shape = {dtype, H, I, 10.0f, (const int16_t(*)[1024][4])table};
    const aff_slot_layout lay = aff__slot_layout(dtype, H, I);
    uint8_t *slots = host(c, E * (int64_t)lay.pitch, 1);
    uint64_t base[MOST];
    for (int e = 0; e < E; e++) {
        expert_matrix(c, &lay, 0, first, &w[e].gate);
        expert_matrix(c, &lay, 1, first ? first + 341 : 0, &w[e].up);
        expert_matrix(c, &lay, 2, first ? first + 682 : 0, &w[e].down);
        aff__slot_gather(&lay, &w[e], slots + (uint64_t)e * lay.pitch);
    }
    uint8_t *on_card = there(c, slots, E * (int64_t)lay.pitch);
    for (int e = 0; e < E; e++) base[e] = (uint64_t)(uintptr_t)(on_card + (uint64_t)e * lay.pitch) | AFF_BASE_CARD;
    for (int t = 0; t < T; t++) /* distinct picks */
        for (int k = 0; k < K; k++) picks[t * K + k] = (draw(c, 0, 1) + t + k) % E == 0 && k == 0 ? 0 : (t + k) % E;
    for (int t = 0; t < T; t++)
        for (int k = 0; k < K; k++) picks[t * K + k] = (t + k) % E;
    for (int e = 0; e < E; e++) {
        const int at = n;
        for (int t = 0; t < T; t++)
            for (int k = 0; k < K; k++) {
                if (picks[t * K + k] != e) continue;
                int r = 0;
                for (int j = 0; j < K; j++) r += picks[t * K + j] < e;
                row[n] = t, rank[n] = r, weight[n++] = pw[t * K + k];
            }
        if (n > at) tile[n_tiles++] = (aff_moe_tile){w[e], e, at, n - at};
    }
    aff_expert_shape there_shape = shape;
    there_shape.table = there(c, table, 2 * (int64_t)sizeof *table);
    const aff_moe_plan plan = {
        .n_tiles = n_tiles, .n_entries = n, .tile = tile, .row = row, .rank = rank, .weight = weight};
    aff_expert_table experts = {.base = there(c, base, E * (int64_t)sizeof *base), .layers = 1, .experts = E};
    for (int i = 0; i < 9; i++) experts.plane[i / 3][i % 3] = (uint32_t)lay.plane[i / 3][i % 3];
    snprintf(c->what, sizeof c->what, "dtype %d, %d x %d, %d rows of %d picks", (int)dtype, H, I, T, K);
    note_status(c, c->cpu->experts(c->cpu, &shape, &plan, x, T, K, y, &c->err));
    if (c->status == AFF_OK)
        c->dev->routed(c->dev, &there_shape, &experts, 0, there(c, picks, 4 * (int64_t)T * K),
                       there(c, pw, 4 * (int64_t)T * K), there(c, x, (int64_t)T * H * 4), T, K, dy);
    compare(c, y, dy, T * K, H);
}

static void do_experts_33(check *c)
{
    const int E = draw(c, 1, 3), T = draw(c, 0, 1) ? draw(c, 1, 16) : draw(c, 17, 90);
    experts(c, AFF_Q2P875G, E, 64 * draw(c, 1, 9), 64 * draw(c, 1, 6), T, draw(c, 1, E), 0, false);
}

static void do_experts_fp4(check *c)
{
    const int E = draw(c, 1, 3), T = draw(c, 0, 1) ? draw(c, 1, 16) : draw(c, 17, 90);
    experts(c, AFF_MXFP4, E, 32 * draw(c, 1, 18), 32 * draw(c, 1, 12), T, draw(c, 1, E), 0, false);
}

/* ---- decode ---- */

/* Row r, column k: byte (r + k) mod 256; a one-hot activation picks out a column. NaN bytes stay out: 0 * NaN would be
 * everywhere. */
static void do_decode_fp8(check *c)
{
    for (int k = 0; k < 2; k++) {
        const aff_dtype dtype = k ? AFF_FP8_32 : AFF_FP8;
        const int tile = k ? 32 : 128, rows = 256, cols = 256, T = 256;
        const int64_t tiles = (rows / tile) * (cols / tile);
        for (int s0 = 1; s0 < 254; s0 += k ? 64 : 4) {
            uint8_t *x = host(c, rows * cols, 1), *s = host(c, tiles, 1);
            float *hot = host(c, T * cols, 4), *y = host(c, T * rows, 4), *dy = there(c, NULL, T * rows * 4);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < cols; i++) x[r * cols + i] = ((r + i) & 0x7f) == 0x7f ? 0 : (uint8_t)(r + i);
            for (int64_t i = 0; i < tiles; i++) s[i] = (uint8_t)(s0 + i < 254 ? s0 + i : 254);
            for (int t = 0; t < T; t++) hot[t * cols + t] = 1;
            const aff_weight w = {.dtype = dtype, .rows = rows, .cols = cols, .data = x, .scale = s},
                             d = {.dtype = dtype,
                                  .rows = rows,
                                  .cols = cols,
                                  .data = there(c, x, rows * cols),
                                  .scale = there(c, s, tiles)};
            snprintf(c->what, sizeof c->what, "tiles of %d, scales from %d", tile, s0);
            for (int t = 0; t < T; t++)
                for (int r = 0; r < rows; r++)
                    y[t * rows + r] =
                        aff__e4m3_to_f32(x[r * cols + t]) * aff__e8m0_to_f32(s[r / tile * (cols / tile) + t / tile]) +
                        0.0f;
            (void)w;
            if (c->status == AFF_OK) aff__matmul(c->dev, &d, there(c, hot, T * cols * 4), T, dy);
            compare(c, y, dy, T, rows);
            drop(c);
        }
    }
}

static void do_decode_33(check *c)
{
    for (uint64_t first = 1; first < 1024; first += 300)
        for (int T = 5; T <= 40; T += 35) {
            experts(c, AFF_Q2P875G, 1, 512, 256, T, 1, first, true);
            drop(c);
        }
}

static void do_decode_fp4(check *c)
{
    for (int T = 5; T <= 40; T += 35) {
        experts(c, AFF_MXFP4, 1, 512, 256, T, 1, 0, true);
        drop(c);
    }
}

/* ---- running ---- */

typedef struct {
    const char *name;
    void (*run)(check *c);
    double allowed;
} op_case;

static void run_case(check *c, const op_case *op)
{
    if (!setjmp(c->out)) op->run(c);
}

static aff_status run_cases(const op_case *op, int n, aff_backend *cpu, aff_backend *dev, int rounds, uint64_t seed,
                            aff_check_fn report, void *ctx, aff_error *err)
{
    check *c;
    AFF_TRY(aff__calloc(&c, 1, sizeof *c, "check", err));
    aff_status s = AFF_OK;
    for (int i = 0; i < n && s == AFF_OK; i++) {
        *c = (check){.cpu = cpu,
                     .dev = dev,
                     .seed = seed + (uint64_t)i * 1000003,
                     .row = {.op = op[i].name, .allowed = op[i].allowed}};
        for (int r = 0; r < rounds && c->status == AFF_OK; r++) {
            static const int64_t pos[1] = {0};
            static const int first[1] = {0};
            const aff_layer_state *none[1] = {NULL};
            const aff_rowset rs = {.n = 1, .pos = pos, .first = first, .table = none};
            if (dev->begin) note_status(c, dev->begin(dev, &rs, &c->err)); /* forms of an earlier case are forgotten */
            if (c->status == AFF_OK) run_case(c, &op[i]);
            const aff_status f = dev->finish ? dev->finish(dev, c->status == AFF_OK ? &c->err : NULL) : AFF_OK;
            note_status(c, f);
            drop(c);
            c->row.cases++;
        }
        if (c->status != AFF_OK) snprintf(c->row.note, sizeof c->row.note, "%.150s", c->err.msg);
        c->row.ok = !*c->row.note;
        report(ctx, &c->row);
        if (c->status == AFF_E_DEVICE) { /* nothing after a fault means anything */
            s = c->status;
            if (err) *err = c->err;
        }
    }
    free(c);
    return s;
}

aff_status aff__check_ops(aff_backend *cpu, aff_backend *dev, int rounds, uint64_t seed, aff_check_fn report, void *ctx,
                          aff_error *err)
{
    static const op_case ops[] = {
        {"embed", do_embed, 0},
        {"rmsnorm", do_rmsnorm, 0},
        {"hc_pre, hc_head", do_hyper, 2e-4},
        {"hc_post, stream_mean, sum_experts", do_sums, 0},
        {"products bf16", do_bf16, 1e-5},
        {"products FP8", do_fp8, 1e-5},
        {"products float32", do_wide, 1e-5},
        {"products grouped", do_grouped, 1e-5},
        {"products, any width", do_widths, 0},
        {"route", do_route, 0},
        {"swiglu", do_swiglu, 0},
        {"experts q2p875", do_experts_33, 0},
        {"experts mxfp4", do_experts_fp4, 0},
        {"argmax", do_argmax, 0},
    };
    return run_cases(ops, (int)(sizeof ops / sizeof *ops), cpu, dev, rounds, seed, report, ctx, err);
}

aff_status aff__check_decode(aff_backend *cpu, aff_backend *dev, uint64_t seed, aff_check_fn report, void *ctx,
                             aff_error *err)
{
    static const op_case ops[] = {
        {"decode FP8", do_decode_fp8, 0}, {"decode q2p875", do_decode_33, 0}, {"decode mxfp4", do_decode_fp4, 0}};
    return run_cases(ops, 3, cpu, dev, 1, seed, report, ctx, err);
}
