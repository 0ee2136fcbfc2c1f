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
            in->attend(q + (int64_t)h * D, some, D, key + j, aff__min_int(AFF__KEY_CUT, n - j), scale, false, NULL, M,
                       Z, V);
        end_heads(some, D, Z, V);
    }
}

/* Row number i of the list as stored; NULL: one of the extra rows. */
static const uint8_t *stored_row(const aff_keyset *k, int i)
{
    if (i < k->n_raw) return (const uint8_t *)k->raw + (k->lo + i) % k->raw_size * k->row->bytes;
    i -= k->n_raw;
    return i < k->n_comp ? (const uint8_t *)k->comp + (int64_t)(k->sel ? k->sel[i] : i) * k->row->bytes : NULL;
}

/* Keys at..at+n-1 of the list as float32: where they lie if they are, else in buf. */
static void fetch_cut(const aff__cpu_inner *in, const aff_keyset *k, int at, int n, int D, float *buf,
                      const float **key)
{
    const bool decode = k->row->coded || k->row->bf16;
    for (int j = 0; j < n; j++) {
        const uint8_t *row = stored_row(k, at + j);
        if (!row) {
            key[j] = k->extra + (int64_t)(at + j - k->n_raw - k->n_comp) * D;
            continue;
        }
        if (decode) in->row(k->row, row, buf + (int64_t)j * D);
        key[j] = decode ? buf + (int64_t)j * D : (const float *)(const void *)row;
    }
}

/* The stored rows of the cut that begins at `at`. Rows lie anywhere: no hardware foresees them. */
static void look_ahead(const aff_keyset *k, int at, aff__ahead *next)
{
    next->bytes = k->row->bytes, next->at = next->step = 0;
    next->n = aff__min_int(AFF__KEY_CUT, k->n_raw + k->n_comp - at);
    for (int j = 0; j < next->n; j++) next->row[j] = stored_row(k, at + j);
}

void aff__cpu_attend_keys(const float *q, int heads, int D, const aff_keyset *k, const float *sink, float scale,
                          float *buf, float *o)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    const int n = k->n_raw + k->n_comp + k->n_extra;
    for (int h = 0; h < heads; h += HEADS_AT_ONCE) {
        float M[HEADS_AT_ONCE], Z[HEADS_AT_ONCE], *V = o + (int64_t)h * D;
        const float *key[AFF__KEY_CUT];
        aff__ahead next;
        const int some = aff__min_int(HEADS_AT_ONCE, heads - h);
        begin_heads(some, D, sink + h, M, Z, V);
        for (int j = 0; j < n; j += AFF__KEY_CUT) {
            const int keys = aff__min_int(AFF__KEY_CUT, n - j);
            fetch_cut(in, k, j, keys, D, buf, key);
            look_ahead(k, j + AFF__KEY_CUT, &next);
            in->attend(q + (int64_t)h * D, some, D, key, keys, scale, false, &next, M, Z, V);
        }
        end_heads(some, D, Z, V);
    }
}

/* M and Z move on by a cut; *a, *b: the factors of the vectors. */
static void merge_sums(float m, float z, float *M, float *Z, float *a, float *b)
{
    const float top = m > *M ? m : *M;
    *a = aff__expf(*M - top), *b = aff__expf(m - top);
    *M = top;
    *Z = fmaf(*Z, *a, z * *b);
}

/* One head over one cut of keys. */
static void attend_cut(const float *q, int D, const float *const *key, int n, float scale, bool alone, float *M,
                       float *Z, float *V)
{
    float p[AFF__KEY_CUT] = {0}, a = 0.0f, b = 0.0f;
    for (int j = 0; j < n; j++) p[j] = aff__dot_scalar(q, key[j], D) * scale;
    float m = p[0], z = 0.0f;
    for (int j = 1; j < n; j++) m = p[j] > m ? p[j] : m;
    for (int j = 0; j < n; j++) {
        p[j] = aff__expf(p[j] - m);
        z += p[j];
    }
    if (alone)
        *M = m, *Z = z;
    else
        merge_sums(m, z, M, Z, &a, &b);
    for (int d = 0; d < D; d++) {
        float v = 0.0f;
        for (int j = 0; j < n; j++) v = fmaf(p[j], key[j][d], v);
        V[d] = alone ? v : fmaf(V[d], a, v * b);
    }
}

void aff__attend_scalar(const float *q, int heads, int D, const float *const *key, int n, float scale, bool alone,
                        aff__ahead *next, float *M, float *Z, float *V)
{
    (void)next;
    for (int h = 0; h < heads; h++)
        attend_cut(q + (int64_t)h * D, D, key, n, scale, alone, &M[h], &Z[h], V + (int64_t)h * D);
}

void aff__merge_scalar(int D, float a, float b, const float *v, float *V)
{
    for (int d = 0; d < D; d++) V[d] = fmaf(V[d], a, v[d] * b);
}

void aff__cpu_attend_cut(const float *q, int heads, int D, const aff_keyset *k, int cut, float scale, float *buf,
                         float *m, float *z, float *v)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    const float *key[AFF__KEY_CUT];
    aff__ahead next;
    const int at = cut * AFF__KEY_CUT, n = aff__min_int(AFF__KEY_CUT, k->n_raw + k->n_comp + k->n_extra - at);
    fetch_cut(in, k, at, n, D, buf, key);
    look_ahead(k, at + AFF__KEY_CUT, &next);
    in->attend(q, heads, D, key, n, scale, true, &next, m, z, v);
}

void aff__cpu_attend_merge(int D, float m, float z, const float *v, float *M, float *Z, float *V)
{
    float a, b;
    merge_sums(m, z, M, Z, &a, &b);
    aff__cpu_inner_now()->merge(D, a, b, v, V);
}
