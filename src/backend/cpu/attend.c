/* attend.c - attention of one position: dispatch and the scalar forms. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "backend/mathfn.h"

enum { HEADS_AT_ONCE = 64 };

static void begin_heads(int heads, int D, const float *sink, float *M, float *Z, float *V)
{
    for (int h = 0; h < heads; h++) M[h] = sink[h], Z[h] = 1.0f;
    for (int64_t d = 0; d < (int64_t)heads * D; d++) V[d] = 0.0f;
}

static void end_heads(int heads, int D, const float *Z, float *V)
{
    for (int h = 0; h < heads; h++)
        for (int d = 0; d < D; d++) V[(int64_t)h * D + d] /= Z[h];
}

void aff__cpu_attend(const float *q, int heads, int D, const float *const *key, int n, const float *sink, float scale,
                     float *o)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    for (int h = 0; h < heads; h += HEADS_AT_ONCE) {
        float M[HEADS_AT_ONCE], Z[HEADS_AT_ONCE], *V = o + (int64_t)h * D;
        const int some = aff__min_int(HEADS_AT_ONCE, heads - h);
        begin_heads(some, D, sink + h, M, Z, V);
        for (int j = 0; j < n; j += AFF__KEY_CUT)
            in->attend(q + (int64_t)h * D, some, D, key + j, aff__min_int(AFF__KEY_CUT, n - j), scale, M, Z, V);
        end_heads(some, D, Z, V);
    }
}

/* Keys at..at+n-1 of the list as float32: where they lie if they are, else in buf. */
static void fetch_cut(const aff__cpu_inner *in, const aff_keyset *k, int at, int n, int D, float *buf,
                      const float **key)
{
    for (int j = 0; j < n; j++) {
        int i = at + j;
        const uint8_t *row;
        if (i < k->n_raw) {
            row = (const uint8_t *)k->raw + (k->lo + i) % k->raw_size * k->row->bytes;
        } else if ((i -= k->n_raw) < k->n_comp) {
            row = (const uint8_t *)k->comp + (int64_t)(k->sel ? k->sel[i] : i) * k->row->bytes;
        } else {
            key[j] = k->extra + (int64_t)(i - k->n_comp) * D;
            continue;
        }
        if (k->row->coded || k->row->bf16) in->row(k->row, row, buf + (int64_t)j * D);
        key[j] = k->row->coded || k->row->bf16 ? buf + (int64_t)j * D : (const float *)(const void *)row;
    }
}

void aff__cpu_attend_keys(const float *q, int heads, int D, const aff_keyset *k, const float *sink, float scale,
                          float *buf, float *o)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    const int n = k->n_raw + k->n_comp + k->n_extra;
    for (int h = 0; h < heads; h += HEADS_AT_ONCE) {
        float M[HEADS_AT_ONCE], Z[HEADS_AT_ONCE], *V = o + (int64_t)h * D;
        const float *key[AFF__KEY_CUT];
        const int some = aff__min_int(HEADS_AT_ONCE, heads - h);
        begin_heads(some, D, sink + h, M, Z, V);
        for (int j = 0; j < n; j += AFF__KEY_CUT) {
            const int keys = aff__min_int(AFF__KEY_CUT, n - j);
            fetch_cut(in, k, j, keys, D, buf, key);
            in->attend(q + (int64_t)h * D, some, D, key, keys, scale, M, Z, V);
        }
        end_heads(some, D, Z, V);
    }
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

void aff__attend_scalar(const float *q, int heads, int D, const float *const *key, int n, float scale, float *M,
                        float *Z, float *V)
{
    for (int h = 0; h < heads; h++) attend_cut(q + (int64_t)h * D, D, key, n, scale, &M[h], &Z[h], V + (int64_t)h * D);
}
