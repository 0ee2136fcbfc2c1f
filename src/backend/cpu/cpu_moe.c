/* Router, SwiGLU, the sum over experts and argmax (spec model-v4 section 8). */
#include "backend/cpu/cpu.h"
#include "backend/mathfn.h"
#include <math.h>

static float score(aff_scoring kind, float l) { return kind == AFF_SIGMOID ? aff__sigmoid(l) : sqrtf(aff__softplus(l)); }

/* softmax over all experts, in place order-independent of picks */
static void softmax(const float *l, int n, float *p)
{
    float m = l[0], z = 0;
    for (int e = 1; e < n; e++) m = l[e] > m ? l[e] : m;
    for (int e = 0; e < n; e++) z += p[e] = aff__expf(l[e] - m);
    for (int e = 0; e < n; e++) p[e] /= z;
}

/* The best expert of key[] that is not among the first k picks; ties to the lower id. A NaN key is never preferred. */
static int best(const float *key, int n, const int32_t *picks, int k)
{
    int top = -1;
    for (int e = 0; e < n; e++) {
        bool used = false;
        for (int i = 0; i < k; i++) used |= picks[i] == e;
        if (!used && (top < 0 || key[e] > key[top] || (isnan(key[top]) && !isnan(key[e])))) top = e;
    }
    return top;
}

typedef struct {
    aff_cpu *cpu;
    const aff_router *r;
    const float *logits;
    const int32_t *ids;
    int32_t *picks;
    float *weights;
} route_job;

static void route_row(void *ctx, int64_t t, int thread)
{
    const route_job *j = ctx;
    const aff_router *r = j->r;
    const int E = r->experts, K = r->picks;
    const float *l = j->logits + t * E;
    int32_t *pick = j->picks + t * K;
    float *w = j->weights + t * K, sum = 0;
    float *sc = aff__cpu_scratch(j->cpu, thread), *key = sc + E;
    if (r->scoring == AFF_SOFTMAX)
        softmax(l, E, sc);
    else
        for (int e = 0; e < E; e++) sc[e] = score(r->scoring, l[e]);
    if (r->hash) {
        for (int k = 0; k < K; k++) pick[k] = r->hash[(int64_t)j->ids[t] * K + k];
    } else {
        for (int e = 0; e < E; e++) key[e] = sc[e] + (r->bias ? r->bias[e] : 0.0f);
        for (int k = 0; k < K; k++) pick[k] = best(key, E, pick, k);
    }
    for (int k = 0; k < K; k++) sum += w[k] = sc[pick[k]];
    for (int k = 0; k < K; k++) w[k] = (r->scoring == AFF_SOFTMAX ? w[k] : w[k] / sum) * r->scale;
}

void aff__cpu_route(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int T, int32_t *picks, float *weights)
{
    route_job j = {aff__cpu_of(b), r, logits, ids, picks, weights};
    aff__pool_run(aff__cpu_of(b)->pool, route_row, &j, T);
}

void aff__cpu_swiglu(aff_backend *b, float *a, const float *bb, float limit, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float g = a[i], u = bb[i];
        if (limit > 0) {
            g = g > limit ? limit : g; /* above only; a NaN stays one */
            u = u < -limit ? -limit : u > limit ? limit : u;
        }
        a[i] = g * aff__sigmoid(g) * u;
    }
}

void aff__cpu_sum_experts(aff_backend *b, const float *y, int T, int K, int H, float *f)
{
    for (int t = 0; t < T; t++)
        for (int d = 0; d < H; d++) {
            const float *yt = y + (int64_t)t * K * H + d;
            float s = yt[0];
            for (int k = 1; k < K; k++) s += yt[(int64_t)k * H];
            f[(int64_t)t * H + d] = s + f[(int64_t)t * H + d];
        }
}

void aff__cpu_argmax(aff_backend *b, const float *x, int T, int n, int32_t *id)
{
    for (int t = 0; t < T; t++) {
        const float *v = x + (int64_t)t * n;
        int top = 0;
        for (int i = 1; i < n; i++)
            if (v[i] > v[top] || (isnan(v[top]) && !isnan(v[i]))) top = i;
        id[t] = top;
    }
}
