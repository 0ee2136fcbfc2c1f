/* attend.c - attention of one position and index scores: dispatch and the scalar forms. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "backend/mathfn.h"

void aff__cpu_attend(const float *q, int heads, int D, const float *const *key, int n, const float *sink, float scale,
                     float *o)
{
    aff__cpu_inner_now()->attend(q, heads, D, key, n, sink, scale, o);
}

void aff__cpu_index_scores(const float *iq, const float *w, int heads, int D, const float *ik, int64_t ld_ik, int n,
                           float *score)
{
    aff__cpu_inner_now()->index_scores(iq, w, heads, D, ik, ld_ik, n, score);
}

/* One head over one cut of keys, merged into (M, Z, V). */
static void attend_cut(const float *q, int D, const float *const *key, int n, float scale, float *M, float *Z, float *V)
{
    float p[AFF__KEY_CUT] = {0};
    for (int j = 0; j < n; j++) p[j] = aff__dot_scalar(q, key[j], D) * scale;
    float m = p[0], z = 0.0f;
    for (int j = 1; j < n; j++) m = p[j] > m ? p[j] : m;
    for (int j = 0; j < n; j++) {
        p[j] = aff__expf(p[j] - m);
        z += p[j];
    }
    float top = m > *M ? m : *M;
    float a = aff__expf(*M - top), b = aff__expf(m - top);
    *M = top;
    *Z = fmaf(*Z, a, z * b);
    for (int d = 0; d < D; d++) {
        float v = 0.0f;
        for (int j = 0; j < n; j++) v = fmaf(p[j], key[j][d], v);
        V[d] = fmaf(V[d], a, v * b);
    }
}

void aff__attend_scalar(const float *q, int heads, int D, const float *const *key, int n, const float *sink,
                        float scale, float *o)
{
    for (int h = 0; h < heads; h++) {
        float M = sink[h], Z = 1.0f, *V = o + (int64_t)h * D;
        for (int d = 0; d < D; d++) V[d] = 0.0f;
        for (int j = 0; j < n; j += AFF__KEY_CUT)
            attend_cut(q + (int64_t)h * D, D, key + j, aff__min_int(AFF__KEY_CUT, n - j), scale, &M, &Z, V);
        for (int d = 0; d < D; d++) V[d] /= Z;
    }
}

void aff__index_scores_scalar(const float *iq, const float *w, int heads, int D, const float *ik, int64_t ld_ik, int n,
                              float *score)
{
    for (int g = 0; g < n; g++) {
        float s = 0.0f;
        for (int h = 0; h < heads; h++) {
            float d = aff__dot_scalar(iq + (int64_t)h * D, ik + g * ld_ik, D);
            s = fmaf(w[h], d > 0.0f ? d : 0.0f, s);
        }
        score[g] = s;
    }
}
