/* Ops on whole rows: embedding, hyper-connections, norms, products. Which arrays have their bf16 form in place is kept
 * here; a kernel that can writes it beside the float32 result, and a product converts what is missing. */
#include "backend/gpu/gpu_internal.h"

/* ---- forms ---- */

static const aff_gpu_region *region_of(const aff_gpu *g, const float *x)
{
    for (const aff_gpu_region *r = g->regions; r; r = r->next)
        if (x >= r->base && (uint64_t)((const char *)x - (const char *)r->base) < r->bytes) return r;
    return NULL;
}

uint16_t *aff__gpu_bf16(aff_gpu *g, const float *x)
{
    const aff_gpu_region *r = region_of(g, x);
    return r ? r->bf16 + (x - r->base) : NULL;
}

void aff__gpu_has_form(aff_gpu *g, const float *x)
{
    if (g->n_forms < AFF_G_FORMS) g->form[g->n_forms++] = x; /* no room: it will be converted again */
}

void aff__gpu_wrote(aff_gpu *g, const float *x, int64_t n)
{
    for (int i = 0; i < g->n_forms;)
        if (g->form[i] >= x && g->form[i] < x + n)
            g->form[i] = g->form[--g->n_forms];
        else
            i++;
    if (g->q_of >= x && g->q_of < x + n) g->q_of = NULL;
}

const uint16_t *aff__gpu_form(aff_gpu *g, const float *x, int T, int n)
{
    uint16_t *to = aff__gpu_bf16(g, x);
    for (int i = 0; i < g->n_forms; i++)
        if (g->form[i] == x) return to;
    aff__gpu_launch(g, AFF_K_convert, T, 256, 0, &(aff_k_convert){.x = x, .ldx = n, .y.bf16 = to, .n = n});
    aff__gpu_has_form(g, x);
    return to;
}

/* Forms for x[T][n] that a norm writes: float32, bf16, and int8 for the experts. */
static aff_k_forms all_forms(aff_gpu *g, float *x, int T, int n)
{
    const uint64_t codes = (uint64_t)T * (uint64_t)n;
    int8_t *q =
        aff__gpu_scratch(g, AFF_G_XQ, ((codes + 15) & ~15ull) + (uint64_t)T * (uint64_t)((n + 127) / 128) * 4 + 16);
    aff__gpu_wrote(g, x, (int64_t)codes);
    aff__gpu_has_form(g, x);
    g->q_of = x;
    return (aff_k_forms){x, aff__gpu_bf16(g, x), q, (float *)(void *)(q + ((codes + 15) & ~15ull))};
}

/* ---- products ---- */

static bool in_floats(const aff_weight *w)
{
    return w->wide || w->dtype == AFF_F32;
}

static void wide(aff_gpu *g, const aff_weight *w, const float *x, int T, float *y, float *ss)
{
    aff_k_wide a = {.w = w->data, .x = x, .y = y, .ss = ss, .ldx = w->cols, .ldy = w->rows, .T = T, .rows = w->rows, .cols = w->cols,
                          .bf16 = w->dtype == AFF_BF16, .round = !w->wide};
    const bool small = T <= AFF_K_FEW;
    if (!small && w->cols % 4 == 0) {
        const int32_t groups = (w->rows + 3) / 4;
        a.row_groups = groups < 8 ? groups : 8;
        a.token_groups = 16 / a.row_groups < 4 ? 16 / a.row_groups : 4;
        const int64_t down = (groups + a.row_groups - 1) / a.row_groups, across = (T + 8 * a.token_groups - 1) / (8 * a.token_groups);
        aff__gpu_launch(g, AFF_K_wide_tile, down * across, 32 * (unsigned)(a.row_groups * a.token_groups), 0, &a);
        if (!ss) return;
        a.rows = 0; /* the sums of squares are left */
        aff__gpu_launch(g, AFF_K_wide_big, T, 128, aff__k_wide_smem(w->cols), &a);
        return;
    }
    const int64_t rows = small ? w->rows : (w->rows + 3) / 4;
    const unsigned cuts = ((unsigned)w->cols + 1023) / 1024; /* a warp each */
    aff__gpu_launch(g, small ? AFF_K_wide_small : AFF_K_wide_big, rows * ((T + 7) / 8) + (ss ? T : 0), !small ? 128 : 32 * (cuts < 16 ? cuts : 16), aff__k_wide_smem(w->cols), &a);
}

/* The streaming kernel, if the matrices and the device are for it. */
static bool stream(aff_gpu *g, aff_k_dense *d, int32_t tiles)
{
    const aff_rt_info *info = aff__rt_info(g->rt);
    for (int i = 0; i < d->count; i++)
        if (!aff__k_ds_fits(&d->m[i])) return false;
    d->tiles = tiles;
    aff__k_ds_solo(d, info->units);
    const size_t half = aff__k_ds_smem(d, (size_t)info->shared_bytes / 2), smem = half ? half : aff__k_ds_smem(d, (size_t)info->shared_bytes);
    const int32_t blocks = info->units * (half ? 2 : 1);
    if (!smem) return false;
    aff__gpu_launch(g, AFF_K_dense_stream, tiles < blocks ? tiles : blocks, 256, smem, d);
    return true;
}

/* Hopper's kernel for many rows, if the matrices and the device are for it. */
static bool warpgroups(aff_gpu *g, aff_k_dense *d, int32_t tiles)
{
    const int64_t all = (int64_t)tiles * ((d->T + 127) / 128), units = aff__rt_info(g->rt)->units;
    if (!g->hopper) return false;
    for (int i = 0; i < d->count; i++)
        if (!aff__k_wg_fits(&d->m[i])) return false;
    d->tiles = tiles;
    aff__gpu_launch(g, AFF_K_dense_wg, all < units ? all : units, 384, AFF_K_WG_SMEM, d);
    return true;
}

static void dense(aff_gpu *g, aff_k_dense *d, int T)
{
    const int32_t rows = T <= AFF_K_FEW ? 16 : aff__k_many_rows(g->amd);
    int32_t tiles = 0;
    d->T = T;
    d->stages = aff__k_many_smem(g->amd, 2) <= (size_t)aff__rt_info(g->rt)->shared_bytes ? 2 : 1;
    for (int i = 0; i < d->count; i++) {
        d->m[i].tile0 = tiles;
        tiles += aff__k_dense_tiles(&d->m[i], rows);
    }
    if (T <= AFF_K_FEW && stream(g, d, tiles)) return;
    if (T > AFF_K_FEW && warpgroups(g, d, tiles)) return;
    if (T <= AFF_K_FEW)
        aff__gpu_launch(g, AFF_K_dense_few, tiles, 256, 8192, d);
    else
        aff__gpu_launch(g, AFF_K_dense_many, (int64_t)tiles * ((T + 127) / 128), 256, aff__k_many_smem(g->amd, d->stages), d);
}

static void products(aff_backend *b, const aff_product *p, int count, int T)
{
    aff_gpu *g = aff__gpu_of(b);
    aff_k_dense d = {.count = 0};
    for (int i = 0; i < count; i++) /* the short ones first: the others fetch weights meanwhile */
        if (in_floats(p[i].w)) wide(g, p[i].w, p[i].x, T, p[i].y, NULL);
    for (int i = 0; i < count; i++) {
        const aff_weight *w = p[i].w;
        const int groups = p[i].groups > 1 ? p[i].groups : 1;
        if (in_floats(w)) continue;
        aff_k_matrix m = {.data = w->data,
                          .scale = w->scale,
                          .y = p[i].y,
                          .ldx = (int64_t)groups * w->cols,
                          .ldy = w->rows,
                          .rows = w->rows,
                          .cols = w->cols,
                          .dtype = (int32_t)w->dtype,
                          .group_rows = w->rows / groups};
        m.x = aff__gpu_form(g, p[i].x, T, groups * w->cols);
        if (groups > 1) m.yb = aff__gpu_bf16(g, p[i].y); /* the next product reads it */
        d.m[d.count++] = m;
        if (d.count == AFF_K_MATRICES) {
            dense(g, &d, T);
            d.count = 0;
        }
    }
    if (d.count) dense(g, &d, T);
    for (int i = 0; i < count; i++) {
        aff__gpu_wrote(g, p[i].y, (int64_t)T * p[i].w->rows);
        if (!in_floats(p[i].w) && p[i].groups > 1) aff__gpu_has_form(g, p[i].y);
    }
}

/* ---- rows ---- */

static void embed(aff_backend *b, const aff_weight *w, const int32_t *ids, int T, int streams, float *X)
{
    aff_gpu *g = aff__gpu_of(b);
    const aff_k_embed a = {w->data, ids, X, T, w->cols, streams, w->dtype == AFF_BF16};
    aff__gpu_launch(g, AFF_K_embed, ((int64_t)T * w->cols + 1023) / 1024, 256, 0, &a);
    aff__gpu_wrote(g, X, (int64_t)T * streams * w->cols);
}

/* The mixes of few rows by cuts; the hc_post that waits for them goes along. */
static void mixes_of_few(aff_gpu *g, const aff_hc *h, const float *X, int T, int H, aff_k_hc_pre *a)
{
    const int N = h->streams, cuts = (N * H + 1023) / 1024, rows = h->fn.rows;
    aff_k_hc_mix k = {.p = {.X = (float *)(uintptr_t)X, .T = T, .H = H, .N = N},
                      .w = {.w = h->fn.data, .rows = rows, .cols = N * H, .bf16 = h->fn.dtype == AFF_BF16, .round = !h->fn.wide},
                      .Xn = aff__gpu_scratch(g, AFF_G_STREAMS, (uint64_t)AFF_K_FEW * (uint64_t)(N * H) * sizeof(float)),
                      .part = aff__gpu_scratch(g, AFF_G_MIXES, (uint64_t)AFF_K_FEW * (uint64_t)cuts * (uint64_t)(rows + 1) * sizeof(float))};
    if (g->post.X == X && g->post.T == T && g->post.N == N && g->post.H == H) {
        k.p = g->post;
        g->post.X = NULL;
        a->X = k.Xn;
        a->Xout = k.p.X;
    }
    aff__gpu_launch(g, AFF_K_hc_mix, (int64_t)T * cuts * AFF_K_HC_SHARE, 256, 4096, &k);
    a->m = k.part;
    a->cuts = cuts;
}

/* Both hc ops: mixes and sums of squares, then the rest. */
static void hc(aff_gpu *g, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps, float *u,
               float *x, float *post, float *comb)
{
    const int rows = h->fn.rows, N = h->streams;
    aff_k_hc_pre a = {.X = X, .scale = h->scale, .base = h->base, .u = u, .w = norm, .post = post, .comb = comb, .T = T, .H = H, .N = N,
                      .iters = h->iters, .hc_eps = h->eps, .rms_eps = h->rms_eps, .norm_eps = eps};
    if (T <= AFF_K_FEW) {
        mixes_of_few(g, h, X, T, H, &a);
    } else {
        float *m = aff__gpu_scratch(g, AFF_G_MIXES, (uint64_t)T * (uint64_t)(rows + 1) * sizeof(float));
        if (!m) return;
        a.m = m;
        a.ss = m + (int64_t)T * rows;
        wide(g, &h->fn, X, T, m, m + (int64_t)T * rows);
    }
    aff__gpu_wrote(g, u, (int64_t)T * H);
    a.y = all_forms(g, x, T, H);
    aff__gpu_launch(g, AFF_K_hc_pre, (int64_t)T * (comb ? 2 : 1), T <= AFF_K_FEW ? 512 : 256, aff__k_hc_smem(H), &a);
}

static void hc_pre(aff_backend *b, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps,
                   float *u, float *x, float *post, float *comb)
{
    hc(aff__gpu_of(b), h, X, T, H, norm, eps, u, x, post, comb);
}

static void hc_head(aff_backend *b, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps,
                    float *u, float *x)
{
    hc(aff__gpu_of(b), h, X, T, H, norm, eps, u, x, NULL, NULL);
}

static void hc_post(aff_backend *b, float *f, const float *y, int K, const float *post, const float *comb, int T,
                    int streams, int H, float *X)
{
    aff_gpu *g = aff__gpu_of(b);
    const aff_k_hc_post a = {.X = X, .f = f, .y = y, .post = post, .comb = comb, .T = T, .H = H, .N = streams, .K = K};
    aff__gpu_flush(g);
    if (T <= AFF_K_FEW)
        g->post = a;
    else
        aff__gpu_launch(g, AFF_K_hc_post, ((int64_t)T * H + 255) / 256, 256, 0, &a);
    aff__gpu_wrote(g, X, (int64_t)T * streams * H);
}

static void rmsnorm(aff_backend *b, const float *x, const float *w, float eps, int T, int n, float *y)
{
    aff_gpu *g = aff__gpu_of(b);
    aff__gpu_wrote(g, y, (int64_t)T * n);
    const aff_k_rmsnorm a = {x, w, {.f32 = y, .bf16 = aff__gpu_bf16(g, y)}, n, eps};
    if (T <= AFF_K_FEW)
        aff__gpu_small(g, AFF_K_JOB_NORM, T, 4 * (uint64_t)n, x, y, (int64_t)T * n)->norm = a;
    else
        aff__gpu_launch(g, AFF_K_rmsnorm, T, 256, 4 * (uint64_t)n, &a);
    aff__gpu_has_form(g, y);
}

static void stream_mean(aff_backend *b, const float *X, int T, int streams, int H, float *tap, int64_t ld)
{
    aff_gpu *g = aff__gpu_of(b);
    const aff_k_stream_mean a = {X, tap, ld, T, H, streams};
    aff__gpu_launch(g, AFF_K_stream_mean, ((int64_t)T * H + 255) / 256, 256, 0, &a);
    aff__gpu_wrote(g, tap - ld + H, (T + 1) * ld); /* whole rows, wherever in them this part lies */
}

static void argmax(aff_backend *b, const float *x, int T, int n, int32_t *id)
{
    aff_gpu *g = aff__gpu_of(b);
    const aff_k_argmax a = {.x = x, .id = id, .part = g->best + AFF_G_ROWS, .count = g->best, .ld = n, .n = n, .parts = n < AFF_G_BEST ? 1 : AFF_G_BEST};
    aff__gpu_launch(g, AFF_K_argmax, (int64_t)T * a.parts, 256, 96, &a);
}

static void sum_experts(aff_backend *b, const float *y, int T, int K, int H, float *f)
{
    aff_gpu *g = aff__gpu_of(b);
    aff__gpu_launch(g, AFF_K_sum_experts, ((int64_t)T * H + 255) / 256, 256, 0, &(aff_k_sum_experts){y, f, T, K, H});
    aff__gpu_wrote(g, f, (int64_t)T * H);
}

void aff__gpu_ops(aff_backend *b)
{
    b->embed = embed;
    b->hc_pre = hc_pre;
    b->hc_head = hc_head;
    b->hc_post = hc_post;
    b->rmsnorm = rmsnorm;
    b->products = products;
    b->stream_mean = stream_mean;
    b->argmax = argmax;
    b->sum_experts = sum_experts;
}
