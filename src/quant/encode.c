#include "quant/encode.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, GROUP = 64, CHOICES = 24, HEADROOM = 6, RETRIED = 4, LEAST_ROW = -126, MOST_ROW = 127 - 7 };

float aff__encode_weight(float importance)
{
    return importance > 0x1p-10f ? importance : 0x1p-10f;
}

struct aff_encode_space {
    float *x, *y;  /* [cols] a row and what its codes decode to, in units of its power of two */
    float *weight; /* [cols] floored importance */
};

aff_status aff__encode_space_create(aff_encode_space **out, uint64_t cols, aff_error *err)
{
    aff_encode_space *s;
    *out = NULL;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "encoder", err));
    aff_status st = aff__calloc(&s->x, cols, sizeof(float), "encoder", err);
    if (st == AFF_OK) st = aff__calloc(&s->y, cols, sizeof(float), "encoder", err);
    if (st == AFF_OK) st = aff__calloc(&s->weight, cols, sizeof(float), "encoder", err);
    if (st == AFF_OK)
        *out = s;
    else
        aff__encode_space_free(s);
    return st;
}

void aff__encode_space_free(aff_encode_space *s)
{
    if (!s) return;
    free(s->x);
    free(s->y);
    free(s->weight);
    free(s);
}

/* ---- one block ---- */

/* Largest magnitude code of the block's nibbles. */
static unsigned top_code(const aff_block *b)
{
    unsigned most = 0;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k += 4) {
            unsigned c = b->quad[i] >> k & 7;
            most = c > most ? c : most;
        }
    return most;
}

/* ceil(log2 |E2M1|) of a magnitude code. */
static const int top_of_code[8] = {INT_MIN, -1, 0, 1, 1, 2, 2, 3};

int aff__block_top(const aff_block *b)
{
    int t = top_of_code[top_code(b)];
    return t == INT_MIN ? t : t + b->exponent;
}

typedef float v4f __attribute__((vector_size(16)));

static v4f load4(const float *p)
{
    v4f v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Errors of the eight (variant, sign, rotation) at one scale, importance of a quad being that of its mean. */
static void rank_scale(const aff_search *s, const aff_block *b, int j, float size, const float mean[4], float out[8])
{
    v4f a = {0}, c = {0};
    for (int q = 0; q < 4; q++) {
        const float *r = aff__search_rank(s, j, b->quad[q]);
        a += load4(r) * mean[q];
        c += load4(r + 4) * mean[q];
    }
    a *= size;
    c *= size;
    memcpy(out, &a, sizeof a);
    memcpy(out + 4, &c, sizeof c);
}

static int clamp_j(int j)
{
    return j < AFF_SEARCH_JMIN ? AFF_SEARCH_JMIN : j > AFF_SEARCH_JMAX ? AFF_SEARCH_JMAX : j;
}

static int least_of(const float *err, int n)
{
    int at = 0;
    for (int i = 1; i < n; i++)
        if (err[i] < err[at]) at = i;
    return at;
}

/* The choice's quads in the codebook's units, and the weights in the same places. */
static void place_quads(const aff_block *b, const aff_choice *c, const float *weight, float t[BLOCK], float w[BLOCK])
{
    float size = ldexpf(c->g & 1 ? -1.0f : 1.0f, c->j);
    for (int i = 0; i < BLOCK; i++) {
        int from = c->g & 2 ? i ^ 2 : i;
        t[i] = aff__e2m1_table[b->quad[i / 4] >> (4 * (from & 3)) & 15] * size;
        w[i] = weight[from];
    }
}

static void nearest_codes(const aff_search *s, const aff_block *b, aff_choice *c)
{
    for (int q = 0; q < 4; q++) c->pos[q] = aff__search_near(s, c->j, c->v, aff__quad_turn(b->quad[q], c->g));
}

/* Codes of the first RETRIED choices under the columns' own weights; the best of them. */
static aff_choice retry(const aff_search *s, const aff_block *b, float *err, int n, int from, const int *js,
                        const float *sizes, const float *weight)
{
    aff_choice best = {0};
    float least = FLT_MAX;
    for (int k = 0; k < RETRIED && k < n; k++) {
        int i = least_of(err, n);
        err[i] = FLT_MAX;
        float t[BLOCK], w[BLOCK], size = sizes[i / 8];
        uint16_t pos[4];
        aff_choice c = {.e = from + i / 8, .j = js[i / 8], .v = (unsigned)i / 4 & 1, .g = (unsigned)i & 3};
        place_quads(b, &c, weight, t, w);
        nearest_codes(s, b, &c);
        float d = s->best(&s->table[c.v], t, w, c.pos, 4, least / size, pos) * size;
        if (d < least) {
            least = d;
            best = c;
            memcpy(best.pos, pos, sizeof pos);
        }
    }
    return best;
}

aff_choice aff__choose(const aff_search *s, const aff_block *b, int row, const float *weight)
{
    int top = aff__block_top(b), mid = top == INT_MIN ? INT_MIN : top - row;
    int from = mid > 1 ? mid - 1 : 0, to = mid == INT_MIN || mid < 0 ? 0 : mid < 7 ? mid + 1 : 7;
    float err[CHOICES], mean[4] = {1, 1, 1, 1}, sizes[3];
    int js[3], n = (to - from + 1) * 8;
    for (int q = 0; q < 4 && weight; q++)
        mean[q] = ((weight[4 * q] + weight[4 * q + 1]) + weight[4 * q + 2]) + weight[4 * q + 3];
    for (int i = 0; i <= to - from; i++) {
        js[i] = clamp_j(b->exponent - row - from - i);
        sizes[i] = (float)(1 << (2 * i));
        rank_scale(s, b, js[i], sizes[i], mean, err + 8 * i);
    }
    if (weight) return retry(s, b, err, n, from, js, sizes, weight);
    int i = least_of(err, n);
    aff_choice c = {.e = from + i / 8, .j = js[i / 8], .v = (unsigned)i / 4 & 1, .g = (unsigned)i & 3};
    nearest_codes(s, b, &c);
    return c;
}

/* ---- rows ---- */

void aff__mxfp4_block(const aff_mxfp4 *src, uint64_t row, uint64_t block, aff_block *b)
{
    memcpy(b->quad, src->codes + row * (src->cols / 2) + block * 8, 8); /* little-endian, like the host */
    b->exponent = (int)src->scales[row * (src->cols / 32) + block / 2] - 127;
}

/* The power of two of the row scale: the largest block gets scale 6 of 0..7, and 7 stays for trying. INT_MIN: the row
 * is zero. */
static int row_exponent(const aff_mxfp4 *src, uint64_t row)
{
    int top = INT_MIN;
    for (uint64_t k = 0; k < src->cols / BLOCK; k++) {
        aff_block b;
        aff__mxfp4_block(src, row, k, &b);
        int t = aff__block_top(&b);
        top = t > top ? t : top;
    }
    if (top == INT_MIN) return top;
    int at = top - HEADROOM;
    /* No subnormal row scales, which kernels may flush, and no block scales beyond float32. */
    return at < LEAST_ROW ? LEAST_ROW : at > MOST_ROW ? MOST_ROW : at;
}

static void put_le(uint8_t *p, uint64_t v, int n)
{
    for (int i = 0; i < n; i++) p[i] = (uint8_t)(v >> (8 * i));
}

/* The block's weights and what its codes give, in units of 2^row. */
static void decode_choice(const aff_search *s, const aff_block *b, const aff_choice *c, int row, float *x, float *y)
{
    const aff_search_table *t = &s->table[c->v];
    float unit = ldexpf(1.0f, b->exponent - row), size = (float)(1 << c->e) * (c->g & 1 ? -1.0f : 1.0f);
    for (int i = 0; i < BLOCK; i++) {
        int p = (c->g & 2 ? i ^ 2 : i) & 3;
        x[i] = aff__e2m1_table[b->quad[i / 4] >> (4 * (i & 3)) & 15] * unit;
        y[i] = t->c[p][c->pos[i / 4]] * size;
    }
}

/* Eight sums side by side, so that compilers may use vectors without changing the result. */
enum { LANES = 8 };

static double total(const double v[LANES])
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* The row scale as bf16: least squares if it is better than the power of two. */
static uint16_t fit_row_scale(const float *x, const float *y, const float *weight, uint64_t n, int row)
{
    double xy[LANES] = {0}, yy[LANES] = {0};
    for (uint64_t i = 0; i < n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            double w = weight ? (double)weight[i + (uint64_t)k] : 1, b = (double)y[i + (uint64_t)k];
            xy[k] += w * (double)x[i + (uint64_t)k] * b;
            yy[k] += w * b * b;
        }
    }
    double a = total(xy), b = total(yy);
    float scale = ldexpf(1.0f, row);
    /* At the least exponent a factor below 1 would make the scale subnormal. */
    if (row == LEAST_ROW || !(b > 0) || !(a > 0.5 * b) || !(a < 2 * b)) return aff__f32_to_bf16(scale);
    /* The error is a parabola in the factor: of two candidates the one nearer to a/b is better. */
    uint16_t near = aff__f32_to_bf16((float)(a / b));
    double factor = (double)aff__bf16_to_f32(near);
    return aff__f32_to_bf16(fabs(factor - a / b) < fabs(1 - a / b) ? (float)factor * scale : scale);
}

static void add_error(const float *x, const float *y, const float *weight, uint64_t n, float unit, double factor,
                      aff_qerror *e)
{
    double err[LANES] = {0}, size[LANES] = {0}, werr[LANES] = {0}, wsize[LANES] = {0}, max[LANES] = {0};
    for (uint64_t i = 0; i < n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            uint64_t c = i + (uint64_t)k;
            double d = (double)x[c] - factor * (double)y[c], w = weight ? (double)weight[c] : 0;
            double d2 = d * d, x2 = (double)x[c] * (double)x[c];
            err[k] += d2;
            size[k] += x2;
            werr[k] += w * d2;
            wsize[k] += w * x2;
            max[k] = d2 > max[k] ? d2 : max[k];
        }
    }
    double u2 = (double)unit * (double)unit, most = 0;
    for (int k = 0; k < LANES; k++) most = max[k] > most ? max[k] : most;
    e->err2 += total(err) * u2;
    e->w2 += total(size) * u2;
    e->werr2 += total(werr) * u2;
    e->ww2 += total(wsize) * u2;
    most = sqrt(most) * (double)unit;
    e->max = most > e->max ? most : e->max;
}

static void encode_row(const aff_search *s, aff_encode_space *sp, const aff_matdesc *m, const aff_mxfp4 *src,
                       uint64_t r, int row, const float *weight, uint8_t *record)
{
    for (uint64_t g = 0; g < m->cols / GROUP; g++) {
        uint32_t fields = 0;
        uint8_t *codes = record + aff__group_codes_at(m, r, g);
        for (uint64_t k = 0; k < GROUP / BLOCK; k++) {
            uint64_t c0 = g * GROUP + k * BLOCK, bits = 0;
            aff_block b;
            aff__mxfp4_block(src, r, c0 / BLOCK, &b);
            aff_choice c = aff__choose(s, &b, row, weight ? sp->weight + c0 : NULL);
            for (int q = 0; q < 4; q++) bits |= (uint64_t)s->table[c.v].id[c.pos[q]] << (10 * q);
            put_le(codes + k * 5, bits, 5);
            fields |= ((uint32_t)c.e | c.g << 3 | c.v << 5) << (6 * k);
            decode_choice(s, &b, &c, row, sp->x + c0, sp->y + c0);
        }
        put_le(record + aff__group_fields_at(m, r, g), fields, 3);
    }
}

void aff__encode_matrix(const aff_search *s, aff_encode_space *sp, const aff_matdesc *m, const aff_mxfp4 *src,
                        const float *weight, uint8_t *record, aff_qerror *e)
{
    for (uint64_t c = 0; c < m->cols && weight; c++) sp->weight[c] = aff__encode_weight(weight[c]);
    for (uint64_t r = 0; r < m->rows; r++) {
        int row = row_exponent(src, r);
        uint16_t scale = 0;
        if (row == INT_MIN) {
            for (uint64_t g = 0; g < m->cols / GROUP; g++) {
                memset(record + aff__group_codes_at(m, r, g), 0, 20);
                memset(record + aff__group_fields_at(m, r, g), 0, 3);
            }
        } else {
            encode_row(s, sp, m, src, r, row, weight, record);
            scale = fit_row_scale(sp->x, sp->y, weight ? sp->weight : NULL, m->cols, row);
            float unit = ldexpf(1.0f, row);
            add_error(sp->x, sp->y, weight, m->cols, unit, (double)aff__bf16_to_f32(scale) / (double)unit, e);
        }
        put_le(record + m->rscale_off + r * 2, scale, 2);
    }
}
