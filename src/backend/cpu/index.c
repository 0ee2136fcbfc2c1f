/* index.c - index scores: the query's form for coded keys, dispatch and the scalar forms. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "base/mem.h"
#include <math.h>
#include <string.h>

static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* 2 * E2M1 */

static int block_count(const aff_rowfmt *f)
{
    return f->coded / AFF__A4_GROUP;
}

uint64_t aff__cpu_index_bytes(int heads, const aff_rowfmt *f)
{
    return f->coded ? aff__align_up((uint64_t)heads * (uint64_t)f->coded, 64) +
                          (uint64_t)heads * (uint64_t)block_count(f) * (sizeof(float) + sizeof(int32_t))
                    : 0;
}

/* Codes of one head's query; q in the order of its values. */
static void query_codes(const float *x, const aff_rowfmt *f, int8_t *q, float *scale, int32_t *start)
{
    uint8_t row[AFF__HADAMARD_MAX];
    aff__row_encode(f, x, row);
    for (int b = 0; b < block_count(f); b++) {
        int32_t sum = 0;
        for (int i = 0; i < AFF__A4_GROUP; i++) {
            const uint8_t pair = row[b * 16 + i % 16];
            const int8_t v = twice[i < 16 ? pair & 15 : pair >> 4];
            q[b * AFF__A4_GROUP + i] = v;
            sum += v;
        }
        scale[b] = 0.25f * aff__e8m0_to_f32(row[f->scales + b]);
        start[b] = -AFF__KEY_OFFSET * sum;
    }
}

void aff__cpu_index_prepare(aff_index_query *out, const float *iq, const float *w, int heads, const aff_rowfmt *f,
                            void *buf)
{
    *out = (aff_index_query){.x = iq, .w = w, .heads = heads, .f = f};
    if (!f->coded) return;
    const int blocks = block_count(f);
    int8_t *q = buf;
    float *scale = (float *)(void *)((char *)buf + aff__align_up((uint64_t)heads * (uint64_t)f->coded, 64));
    int32_t *start = (int32_t *)(void *)(scale + (int64_t)heads * blocks);
    for (int h = 0; h < heads; h++)
        query_codes(iq + (int64_t)h * f->n, f, q + (int64_t)h * f->coded, scale + h * blocks, start + h * blocks);
    out->q = q, out->scale = scale, out->start = start;
}

void aff__cpu_index_scores(const aff_index_query *q, const void *ik, int n, float *score)
{
    const aff__cpu_inner *in = aff__cpu_inner_now();
    (q->f->coded ? in->index_codes : in->index_floats)(q, ik, n, score);
}

void aff__index_floats_scalar(const aff_index_query *q, const uint8_t *ik, int n, float *score)
{
    const int D = q->f->n;
    for (int g = 0; g < n; g++) {
        const float *key = (const float *)(const void *)(ik + (int64_t)g * q->f->bytes);
        float s = 0.0f;
        for (int h = 0; h < q->heads; h++) {
            float d = aff__dot_scalar(q->x + (int64_t)h * D, key, D);
            s = fmaf(q->w[h], d > 0.0f ? d : 0.0f, s);
        }
        score[g] = s;
    }
}

void aff__index_codes_scalar(const aff_index_query *q, const uint8_t *ik, int n, float *score)
{
    const int blocks = block_count(q->f);
    for (int g = 0; g < n; g++) {
        const uint8_t *key = ik + (int64_t)g * q->f->bytes;
        float s = 0.0f;
        for (int h = 0; h < q->heads; h++) {
            float d = 0.0f;
            for (int b = 0; b < blocks; b++) {
                const int8_t *x = q->q + (int64_t)h * q->f->coded + b * AFF__A4_GROUP;
                const uint8_t *code = key + b * 16;
                int32_t sum = 0;
                for (int i = 0; i < 16; i++) sum += twice[code[i] & 15] * x[i] + twice[code[i] >> 4] * x[i + 16];
                d = fmaf((float)sum, q->scale[h * blocks + b] * aff__e8m0_to_f32(key[q->f->scales + b]), d);
            }
            s = fmaf(q->w[h], d > 0.0f ? d : 0.0f, s);
        }
        score[g] = s;
    }
}
