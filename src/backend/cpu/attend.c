/* attend.c - attention of one position: dispatch and the scalar forms. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "backend/cpu/pairs.h"
#include "backend/mathfn.h"
#include "base/mem.h"
#include <string.h>

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

/* Columns that a row of bf16 is apart from the next: an odd number of cache lines, or rows would share a few sets of the first cache. */
static int64_t pair_columns(int D)
{
    return (D + 31) / 64 * 64 + 32;
}

uint64_t aff__cpu_attend_bytes(int D)
{
    const uint64_t wide = (uint64_t)AFF__KEY_CUT * (uint64_t)D * sizeof(float);
    const uint64_t pairs = (uint64_t)(AFF__KEY_CUT + HEADS_AT_ONCE) * (uint64_t)pair_columns(D) * sizeof(uint16_t);
    return aff__align_up(wide > pairs ? wide : pairs, 64);
}

/* n values as bf16, zeros behind them. */
static void narrow(const aff__cpu_inner *in, const float *x, int n, uint16_t *y)
{
    in->to_bf16(x, y, n);
    memset(y + n, 0, (size_t)(pair_columns(n) - n) * sizeof *y);
}

/* Keys at..at+n-1 of the list as rows of bf16, and zeros up to a multiple of 4 rows. */
static void fetch_pairs(const aff__cpu_inner *in, const aff_keyset *k, int at, int n, int D, uint16_t *key)
{
    const int64_t ld = pair_columns(D);
    for (int j = 0; j < n; j++, key += ld) {
        const uint8_t *row = stored_row(k, at + j);
        if (!row) {
            narrow(in, k->extra + (int64_t)(at + j - k->n_raw - k->n_comp) * D, D, key);
            continue;
        }
        in->row_pairs(k->row, row, key);
        memset(key + D, 0, (size_t)(ld - D) * sizeof *key);
    }
    memset(key, 0, (size_t)((4 - n % 4) % 4 * ld) * sizeof *key);
}

/* One cut for at most HEADS_AT_ONCE heads. */
static void one_cut(const aff__cpu_inner *in, const float *q, int heads, int D, const aff_keyset *k, int at, float scale, bool alone, float *buf,
                    float *M, float *Z, float *V)
{
    const int n = aff__min_int(AFF__KEY_CUT, k->n_raw + k->n_comp + k->n_extra - at);
    aff__ahead next;
    look_ahead(k, at + AFF__KEY_CUT, &next);
    if (aff__rows_pair(k->row)) {
        const int64_t ld = pair_columns(D);
        uint16_t *key = (uint16_t *)(void *)buf, *q16 = key + AFF__KEY_CUT * ld;
        fetch_pairs(in, k, at, n, D, key);
        for (int h = 0; h < heads && (alone || at == 0); h++) narrow(in, q + (int64_t)h * D, D, q16 + h * ld);
        in->attend_pairs(q16, ld, heads, D, key, ld, n, scale, alone, &next, M, Z, V);
        return;
    }
    const float *key[AFF__KEY_CUT];
    fetch_cut(in, k, at, n, D, buf, key);
    in->attend(q, heads, D, key, n, scale, alone, &next, M, Z, V);
}

void aff__cpu_attend_keys(const float *q, int heads, int D, const aff_keyset *k, const float *sink, float scale,
                          float *buf, float *o)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    const int n = k->n_raw + k->n_comp + k->n_extra;
    for (int h = 0; h < heads; h += HEADS_AT_ONCE) {
        float M[HEADS_AT_ONCE], Z[HEADS_AT_ONCE], *V = o + (int64_t)h * D;
        const int some = aff__min_int(HEADS_AT_ONCE, heads - h);
        begin_heads(some, D, sink + h, M, Z, V);
        for (int j = 0; j < n; j += AFF__KEY_CUT) one_cut(in, q + (int64_t)h * D, some, D, k, j, scale, false, buf, M, Z, V);
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

/* One head over one cut of keys in bf16 pairs. */
static void attend_cut_pairs(const uint16_t *q, int D, const uint16_t *key, int64_t ld, int n, float scale, bool alone, float *M, float *Z, float *V)
{
    float p[AFF__KEY_CUT] = {0}, sum[AFF__LANES] = {0}, a = 0.0f, b = 0.0f, m = -INFINITY;
    for (int j = 0; j < n; j++) {
        float lane[AFF__LANES] = {0};
        for (int d = 0; d < (D + 31) / 32 * 32; d += 2) {
            const uint16_t *x = q + d, *k = key + j * ld + d;
            lane[d / 2 % AFF__LANES] = aff__pair_dot(lane[d / 2 % AFF__LANES], aff__bf16_to_f32(k[0]), aff__bf16_to_f32(k[1]),
                                                     aff__bf16_to_f32(x[0]), aff__bf16_to_f32(x[1]));
        }
        p[j] = aff__fold_lanes(lane) * scale;
        m = p[j] > m ? p[j] : m;
    }
    for (int j = 0; j < n; j++) {
        p[j] = aff__round_bf16(aff__expf(p[j] - m));
        sum[j % AFF__LANES] += p[j];
    }
    const float z = aff__fold_lanes(sum);
    if (alone)
        *M = m, *Z = z;
    else
        merge_sums(m, z, M, Z, &a, &b);
    for (int d = 0; d < D; d++) {
        float v = 0.0f;
        for (int j = 0; j < (n + 3) / 4 * 4; j += 2)
            v = aff__pair_dot(v, p[j], p[j + 1], aff__bf16_to_f32(key[j * ld + d]), aff__bf16_to_f32(key[(j + 1) * ld + d]));
        V[d] = alone ? v : fmaf(V[d], a, v * b);
    }
}

void aff__attend_pairs_scalar(const uint16_t *q, int64_t ldq, int heads, int D, const uint16_t *key, int64_t ld, int n, float scale, bool alone,
                              aff__ahead *next, float *M, float *Z, float *V)
{
    (void)next;
    for (int h = 0; h < heads; h++) attend_cut_pairs(q + h * ldq, D, key, ld, n, scale, alone, &M[h], &Z[h], V + (int64_t)h * D);
}

void aff__row_pairs_scalar(const aff_rowfmt *f, const uint8_t *row, uint16_t *x)
{
    for (int i = 0; i < f->coded; i++) x[i] = aff__f32_to_bf16(aff__e4m3_to_f32(row[i]) * aff__e8m0_to_f32(row[f->scales + i / AFF__A8_GROUP]));
    memcpy(x + f->coded, row + f->tail, (size_t)f->bf16 * sizeof *x);
}

void aff__merge_scalar(int D, float a, float b, const float *v, float *V)
{
    for (int d = 0; d < D; d++) V[d] = fmaf(V[d], a, v[d] * b);
}

void aff__cpu_attend_cut(const float *q, int heads, int D, const aff_keyset *k, int cut, float scale, float *buf,
                         float *m, float *z, float *v)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    for (int h = 0; h < heads; h += HEADS_AT_ONCE)
        one_cut(in, q + (int64_t)h * D, aff__min_int(HEADS_AT_ONCE, heads - h), D, k, cut * AFF__KEY_CUT, scale, true, buf, m + h, z + h,
                v + (int64_t)h * D);
}

void aff__cpu_attend_merge(int D, float m, float z, const float *v, float *M, float *Z, float *V)
{
    float a, b;
    merge_sums(m, z, M, Z, &a, &b);
    aff__cpu_inner_now()->merge(D, a, b, v, V);
}
