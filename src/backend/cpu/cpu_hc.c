/* Hyper-connections (spec model-v4 section 6), embedding, norms. */
#include "backend/cpu/cpu.h"
#include "backend/mathfn.h"
#include "quant/numbers.h"
#include <math.h>
#include <string.h>

enum { MAX_MIX = (2 + AFF_MAX_HC) * AFF_MAX_HC, MIX_ROWS = 64 };

typedef struct {
    const aff_weight *w;
    const int32_t *ids;
    int streams;
    float *X;
} embed_job;

static void embed_row(void *ctx, int64_t t, int thread)
{
    const embed_job *j = ctx;
    const int H = j->w->cols;
    float *x = j->X + t * j->streams * H;
    const size_t at = (size_t)j->ids[t] * (size_t)H;
    if (j->w->dtype == AFF_F32)
        memcpy(x, (const float *)j->w->data + at, (size_t)H * sizeof *x);
    else
        for (int d = 0; d < H; d++) x[d] = aff__bf16_to_f32(((const uint16_t *)j->w->data)[at + (size_t)d]);
    for (int n = 1; n < j->streams; n++) memcpy(x + (size_t)n * (size_t)H, x, (size_t)H * sizeof *x);
}

void aff__cpu_embed(aff_backend *b, const aff_weight *w, const int32_t *ids, int T, int streams, float *X)
{
    embed_job j = {w, ids, streams, X};
    aff__pool_run(aff__cpu_of(b)->pool, embed_row, &j, T);
}

void aff__cpu_rms_row(const float *x, const float *w, float eps, int n, float *y)
{
    const float r = 1.0f / sqrtf(aff__cpu_sumsq(x, n) / (float)n + eps);
    if (w)
        for (int i = 0; i < n; i++) y[i] = w[i] * (x[i] * r);
    else
        for (int i = 0; i < n; i++) y[i] = x[i] * r;
}

void aff__cpu_rmsnorm(aff_backend *b, const float *x, const float *w, float eps, int T, int n, float *y)
{
    for (int t = 0; t < T; t++) aff__cpu_rms_row(x + (int64_t)t * n, w, eps, n, y + (int64_t)t * n);
}

/* C: softmax of each row plus eps, one column pass, then iters-1 times rows and columns. */
static void sinkhorn(float *C, int N, int iters, float eps)
{
    for (int j = 0; j < N; j++) {
        float *row = C + j * N, m = row[0], z = 0;
        for (int k = 1; k < N; k++) m = row[k] > m ? row[k] : m;
        for (int k = 0; k < N; k++) z += row[k] = aff__expf(row[k] - m);
        for (int k = 0; k < N; k++) row[k] = row[k] / z + eps;
    }
    for (int it = 0; it < iters; it++) {
        for (int j = 0; it > 0 && j < N; j++) {
            float z = 0;
            for (int k = 0; k < N; k++) z += C[j * N + k];
            for (int k = 0; k < N; k++) C[j * N + k] /= z + eps;
        }
        for (int k = 0; k < N; k++) {
            float z = 0;
            for (int j = 0; j < N; j++) z += C[j * N + k];
            for (int j = 0; j < N; j++) C[j * N + k] /= z + eps;
        }
    }
}

typedef struct {
    const aff_hc *h;
    const float *X, *m; /* streams; mixes [T][fn.rows] */
    int H, N;
    float *u, *post, *comb;
} hc_job;

/* The mixes of one row over the row's rms. */
static void scaled_mixes(const hc_job *j, int64_t t, float *m)
{
    const int n = j->h->fn.cols, rows = j->h->fn.rows;
    const float r = 1.0f / sqrtf(aff__cpu_sumsq(j->X + t * n, n) / (float)n + j->h->rms_eps);
    for (int o = 0; o < rows; o++) m[o] = j->m[t * rows + o] * r;
}

/* y = sum_n w[n] X[n] */
static void collapse(const float *x, const float *w, int N, int H, float *y)
{
    for (int d = 0; d < H; d++) {
        float s = w[0] * x[d];
        for (int n = 1; n < N; n++) s = fmaf(w[n], x[n * H + d], s);
        y[d] = s;
    }
}

static void pre_row(void *ctx, int64_t t, int thread)
{
    const hc_job *j = ctx;
    const int N = j->N, H = j->H;
    const float *scale = j->h->scale, *base = j->h->base;
    float m[MAX_MIX], pre[AFF_MAX_HC], *C = j->comb + t * N * N;
    scaled_mixes(j, t, m);
    for (int k = 0; k < N; k++) pre[k] = aff__sigmoid(m[k] * scale[0] + base[k]) + j->h->eps;
    for (int k = 0; k < N; k++) j->post[t * N + k] = 2.0f * aff__sigmoid(m[N + k] * scale[1] + base[N + k]);
    for (int k = 0; k < N * N; k++) C[k] = m[2 * N + k] * scale[2] + base[2 * N + k];
    sinkhorn(C, N, j->h->iters, j->h->eps);
    collapse(j->X + t * N * H, pre, N, H, j->u + t * H);
}

static void head_row(void *ctx, int64_t t, int thread)
{
    const hc_job *j = ctx;
    float m[MAX_MIX];
    scaled_mixes(j, t, m);
    for (int n = 0; n < j->N; n++) m[n] = aff__sigmoid(m[n] * j->h->scale[0] + j->h->base[n]) + j->h->eps;
    collapse(j->X + t * j->N * j->H, m, j->N, j->H, j->u + t * j->H);
}

/* Runs row() over T rows with their mixes, a block of rows at a time. */
static void with_mixes(aff_backend *b, hc_job j, int T, void (*row)(void *, int64_t, int))
{
    float m[MIX_ROWS * MAX_MIX];
    const int64_t x = j.h->fn.cols, N = j.N;
    j.m = m;
    for (int t = 0; t < T; t += MIX_ROWS) {
        const int n = T - t < MIX_ROWS ? T - t : MIX_ROWS;
        aff__cpu_matmul(aff__cpu_of(b)->pool, &j.h->fn, b->numerics, j.X, x, n, m, j.h->fn.rows);
        aff__pool_run(aff__cpu_of(b)->pool, row, &j, n);
        j.X += n * x;
        j.u += (int64_t)n * j.H;
        if (j.post) j.post += n * N;
        if (j.comb) j.comb += n * N * N;
    }
}

void aff__cpu_hc_pre(aff_backend *b, const aff_hc *h, const float *X, int T, int H, float *u, float *post, float *comb)
{
    with_mixes(b, (hc_job){.h = h, .X = X, .H = H, .N = h->streams, .u = u, .post = post, .comb = comb}, T, pre_row);
}

void aff__cpu_hc_head(aff_backend *b, const aff_hc *h, const float *X, int T, int H, float *y)
{
    with_mixes(b, (hc_job){.h = h, .X = X, .H = H, .N = h->streams, .u = y}, T, head_row);
}

typedef struct {
    const float *f, *post, *comb;
    int H, N;
    float *X;
} post_job;

static void post_row(void *ctx, int64_t t, int thread)
{
    const post_job *j = ctx;
    const int N = j->N, H = j->H;
    const float *f = j->f + t * H, *post = j->post + t * N, *C = j->comb + t * N * N;
    float *X = j->X + t * N * H;
    for (int d = 0; d < H; d++) {
        float old[AFF_MAX_HC];
        for (int n = 0; n < N; n++) old[n] = X[n * H + d];
        for (int k = 0; k < N; k++) {
            float s = post[k] * f[d];
            for (int n = 0; n < N; n++) s = fmaf(C[n * N + k], old[n], s); /* the first index: C transposed */
            X[k * H + d] = s;
        }
    }
}

void aff__cpu_hc_post(aff_backend *b, const float *f, const float *post, const float *comb, int T, int streams, int H, float *X)
{
    post_job j = {f, post, comb, H, streams, X};
    aff__pool_run(aff__cpu_of(b)->pool, post_row, &j, T);
}

void aff__cpu_stream_mean(aff_backend *b, const float *X, int T, int streams, int H, float *tap, int64_t ld)
{
    for (int t = 0; t < T; t++)
        for (int d = 0; d < H; d++) {
            const float *x = X + (int64_t)t * streams * H + d;
            float s = x[0];
            for (int n = 1; n < streams; n++) s += x[(int64_t)n * H];
            tap[t * ld + d] = s / (float)streams;
        }
}
