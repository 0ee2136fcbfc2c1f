#include "quant/encode.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, GROUP = 64, CHOICES = 24, HEADROOM = 6, RETRIED = 4, LEAST_ROW = -126, MOST_ROW = 127 - 7 };
enum { ROWS = AFF_FEEDBACK_ROWS };

float aff__encode_weight(float importance)
{
    return importance > 0x1p-10f ? importance : 0x1p-10f;
}

struct aff_encode_space {
    float *x, *y;  /* [ROWS][cols] rows and what their codes decode to, in units of the row's power of two */
    float *d;      /* [cols][ROWS] x - y, for the feedback */
    float *weight; /* [cols] floored importance */
};

aff_status aff__encode_space_create(aff_encode_space **out, uint64_t cols, aff_error *err)
{
    aff_encode_space *s;
    *out = NULL;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "encoder", err));
    aff_status st = aff__calloc(&s->x, cols, ROWS * sizeof(float), "encoder", err);
    if (st == AFF_OK) st = aff__calloc(&s->y, cols, ROWS * sizeof(float), "encoder", err);
    if (st == AFF_OK) st = aff__calloc(&s->d, cols, ROWS * sizeof(float), "encoder", err);
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
    free(s->d);
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

/* ---- one block with error feedback ---- */

typedef struct goal {
    float t[BLOCK];      /* what the block aims at, without its own feedback, in units of 2^row */
    const float *metric; /* [BLOCK] */
    const float *panel;  /* [BLOCK][BLOCK]: the block's own rows of its panel */
} goal;

/* The nearest quads of E2M1, for the ranking. False: the block aims at zeros. */
static bool round_goal(const goal *g, int row, aff_block *b, int *top)
{
    float most = 0;
    for (int i = 0; i < BLOCK; i++) most = fabsf(g->t[i]) > most ? fabsf(g->t[i]) : most;
    *b = (aff_block){.exponent = row};
    if (!(most > 0)) return false;
    const bool high = frexpf(most, top) > 7.0f / 8;
    const int unit = *top - (high ? 2 : 3); /* the largest becomes 3.5 to 7 of it */
    for (int i = 0; i < BLOCK; i++)
        b->quad[i / 4] |= (uint16_t)(aff__f32_to_e2m1(ldexpf(g->t[i], -unit)) << (4 * (i & 3)));
    b->exponent = row + unit;
    return true;
}

/* The quad's aim once its block's earlier quads are off by d, in the choice's order and the codebook's units. */
static void aim(const goal *g, int q, const aff_choice *c, float inverse, const float *d, float t[4], float w[4])
{
    for (int p = 0; p < 4; p++) {
        const int i = 4 * q + (c->g & 2 ? p ^ 2 : p);
        float x = g->t[i];
        for (int j = 0; j < 4 * q; j++) x = fmaf(g->panel[j * BLOCK + i], d[j], x);
        t[p] = x * inverse;
        w[p] = g->metric[i];
    }
}

/* Codes under one choice, quad after quad; false once its cost reaches *least, which it lowers otherwise. */
static bool follow(const aff_search *s, const goal *g, aff_choice *c, float *least)
{
    const aff_search_table *t = &s->table[c->v];
    const float size = ldexpf(c->g & 1 ? -1.0f : 1.0f, c->e), most = *least / (size * size);
    float d[BLOCK], sum = 0;
    for (int q = 0; q < 4; q++) {
        float x[4], w[4];
        aim(g, q, c, 1 / size, d, x, w);
        sum += s->best(t, x, w, &c->pos[q], 1, INFINITY, &c->pos[q]);
        if (!(sum < most)) return false;
        for (int p = 0; p < 4; p++) {
            const int i = 4 * q + (c->g & 2 ? p ^ 2 : p);
            d[i] = g->t[i] - t->c[p][c->pos[q]] * size;
        }
    }
    *least = sum * (size * size);
    return true;
}

/* As aff__choose, for aims anywhere: choices are ranked by the aims' nearest E2M1 quads. */
static aff_choice choose_aimed(const aff_search *s, const goal *g, int row)
{
    aff_block b;
    aff_choice best = {0};
    float err[CHOICES], mean[4], sizes[3], least = FLT_MAX;
    int js[3], mid = 0;
    const bool any = round_goal(g, row, &b, &mid);
    const int from = mid < 2 ? 0 : mid < 8 ? mid - 1 : 6, to = !any || mid < 0 ? 0 : mid < 7 ? mid + 1 : 7;
    const int n = (to - from + 1) * 8;
    for (int q = 0; q < 4; q++)
        mean[q] = ((g->metric[4 * q] + g->metric[4 * q + 1]) + g->metric[4 * q + 2]) + g->metric[4 * q + 3];
    for (int i = 0; i <= to - from; i++) {
        js[i] = clamp_j(b.exponent - row - from - i);
        sizes[i] = (float)(1 << (2 * i));
        rank_scale(s, &b, js[i], sizes[i], mean, err + 8 * i);
    }
    for (int k = 0; k < RETRIED && k < n; k++) {
        int i = least_of(err, n);
        err[i] = FLT_MAX;
        aff_choice c = {.e = from + i / 8, .j = js[i / 8], .v = (unsigned)i / 4 & 1, .g = (unsigned)i & 3};
        nearest_codes(s, &b, &c);
        if (follow(s, g, &c, &least)) best = c;
    }
    return best;
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

/* The block's weights, and what codes give, in units of 2^row. */
static void block_weights(const aff_block *b, int row, float *x)
{
    float unit = ldexpf(1.0f, b->exponent - row);
    for (int i = 0; i < BLOCK; i++) x[i] = aff__e2m1_table[b->quad[i / 4] >> (4 * (i & 3)) & 15] * unit;
}

static void block_decode(const aff_search *s, const aff_choice *c, float *y)
{
    const aff_search_table *t = &s->table[c->v];
    float size = (float)(1 << c->e) * (c->g & 1 ? -1.0f : 1.0f);
    for (int i = 0; i < BLOCK; i++) y[i] = t->c[(c->g & 2 ? i ^ 2 : i) & 3][c->pos[i / 4]] * size;
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

/* Rows r0 .. r0 + n - 1, which go through the columns together. */
typedef struct rows {
    const aff_search *s;
    aff_encode_space *sp;
    const aff_matdesc *m;
    const aff_mxfp4 *src;
    const float *weight; /* NULL, or the space's */
    const aff_feedback *f;
    uint8_t *record;
    uint64_t r0, n;
    int row[ROWS]; /* exponents of their scales; INT_MIN: zeros */
} rows;

static void put_choice(const rows *g, uint64_t r, uint64_t block, const aff_choice *c)
{
    const uint64_t group = block / 4, k = block % 4;
    uint8_t *field = g->record + aff__group_fields_at(g->m, g->r0 + r, group);
    uint32_t fields = ((uint32_t)c->e | c->g << 3 | c->v << 5) << (6 * k);
    uint64_t bits = 0;
    for (int q = 0; q < 4; q++) bits |= (uint64_t)g->s->table[c->v].id[c->pos[q]] << (10 * q);
    put_le(g->record + aff__group_codes_at(g->m, g->r0 + r, group) + k * 5, bits, 5);
    if (k) fields |= (uint32_t)field[0] | (uint32_t)field[1] << 8 | (uint32_t)field[2] << 16;
    put_le(field, fields, 3);
}

static void encode_block(const rows *g, uint64_t r, uint64_t block, const float *pulled)
{
    const uint64_t c0 = block * BLOCK;
    float *x = g->sp->x + r * g->m->cols + c0, *y = g->sp->y + r * g->m->cols + c0;
    aff_block b;
    aff_choice c;
    aff__mxfp4_block(g->src, g->r0 + r, block, &b);
    block_weights(&b, g->row[r], x);
    if (g->f) {
        goal aimed = {.metric = g->f->metric + c0, .panel = aff__feedback_panel(g->f, block) + c0 * BLOCK};
        for (int i = 0; i < BLOCK; i++) aimed.t[i] = x[i] + pulled[i];
        c = choose_aimed(g->s, &aimed, g->row[r]);
    } else {
        c = aff__choose(g->s, &b, g->row[r], g->weight ? g->weight + c0 : NULL);
    }
    block_decode(g->s, &c, y);
    put_choice(g, r, block, &c);
    for (uint64_t i = 0; i < BLOCK && g->f; i++) g->sp->d[(c0 + i) * ROWS + r] = x[i] - y[i];
}

static void zero_row(const rows *g, uint64_t r)
{
    for (uint64_t k = 0; k < g->m->cols / GROUP; k++) {
        memset(g->record + aff__group_codes_at(g->m, g->r0 + r, k), 0, 20);
        memset(g->record + aff__group_fields_at(g->m, g->r0 + r, k), 0, 3);
    }
    for (uint64_t c = 0; c < g->m->cols; c++) g->sp->d[c * ROWS + r] = 0;
}

static void encode_rows(rows *g)
{
    float pulled[ROWS * BLOCK];
    for (uint64_t r = 0; r < g->n; r++) {
        g->row[r] = row_exponent(g->src, g->r0 + r);
        if (g->row[r] == INT_MIN) zero_row(g, r);
    }
    for (uint64_t k = 0; k < g->m->cols / BLOCK; k++) {
        if (g->f) g->f->pull(aff__feedback_panel(g->f, k), g->sp->d, k * BLOCK, g->n, pulled);
        for (uint64_t r = 0; r < g->n; r++)
            if (g->row[r] != INT_MIN) encode_block(g, r, k, pulled + r * BLOCK);
    }
}

static uint16_t finish_row(const rows *g, uint64_t r, const float *weight, aff_qerror *e)
{
    const float *x = g->sp->x + r * g->m->cols, *y = g->sp->y + r * g->m->cols;
    if (g->row[r] == INT_MIN) return 0;
    float unit = ldexpf(1.0f, g->row[r]);
    uint16_t scale = g->f ? aff__f32_to_bf16(unit) : fit_row_scale(x, y, g->weight, g->m->cols, g->row[r]);
    add_error(x, y, weight, g->m->cols, unit, (double)aff__bf16_to_f32(scale) / (double)unit, e);
    return scale;
}

void aff__encode_matrix(const aff_search *s, aff_encode_space *sp, const aff_matdesc *m, const aff_mxfp4 *src,
                        const float *weight, const aff_feedback *f, uint8_t *record, aff_qerror *e)
{
    rows g = {.s = s, .sp = sp, .m = m, .src = src, .weight = weight ? sp->weight : NULL, .f = f, .record = record};
    for (uint64_t c = 0; c < m->cols && weight; c++) sp->weight[c] = aff__encode_weight(weight[c]);
    for (g.r0 = 0; g.r0 < m->rows; g.r0 += ROWS) {
        g.n = m->rows - g.r0 < ROWS ? m->rows - g.r0 : ROWS;
        encode_rows(&g);
        for (uint64_t r = 0; r < g.n; r++)
            put_le(record + m->rscale_off + (g.r0 + r) * 2, finish_row(&g, r, weight, e), 2);
    }
}

/* ---- by somebody else ---- */

static uint64_t get_le(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* What the record's block decodes to, as encode_block leaves it. pos: of every entry's number. */
static void read_block(const rows *g, uint64_t block, const uint16_t (*pos)[AFF_CB_ENTRIES], float *x, float *y)
{
    const uint64_t group = block / 4, k = block % 4;
    const uint32_t field = (uint32_t)(get_le(g->record + aff__group_fields_at(g->m, g->r0, group), 3) >> (6 * k)) & 63;
    const uint64_t bits = get_le(g->record + aff__group_codes_at(g->m, g->r0, group) + k * 5, 5);
    aff_choice c = {.e = (int)(field & 7), .g = field >> 3 & 3, .v = field >> 5};
    aff_block b;
    for (int q = 0; q < 4; q++) c.pos[q] = pos[c.v][bits >> (10 * q) & 1023];
    aff__mxfp4_block(g->src, g->r0, block, &b);
    block_weights(&b, g->row[0], x);
    block_decode(g->s, &c, y);
}

aff_status aff__encode_matrix_by(const aff_encoder *by, const aff_search *s, aff_encode_space *sp, const aff_matdesc *m,
                                 const aff_mxfp4 *src, const float *weight, uint8_t *record, aff_qerror *e, aff_error *err)
{
    rows g = {.s = s, .sp = sp, .m = m, .src = src, .weight = weight ? sp->weight : NULL, .record = record, .n = 1};
    uint16_t pos[AFF_CB_VARIANTS][AFF_CB_ENTRIES];
    for (uint64_t c = 0; c < m->cols && weight; c++) sp->weight[c] = aff__encode_weight(weight[c]);
    AFF_TRY(by->choose(by->ctx, m, src, g.weight, record, err));
    for (int v = 0; v < AFF_CB_VARIANTS; v++)
        for (uint16_t i = 0; i < AFF_CB_ENTRIES; i++) pos[v][s->table[v].id[i]] = i;
    for (g.r0 = 0; g.r0 < m->rows; g.r0++) {
        g.row[0] = row_exponent(src, g.r0);
        for (uint64_t k = 0; g.row[0] != INT_MIN && k < m->cols / BLOCK; k++)
            read_block(&g, k, (const uint16_t(*)[AFF_CB_ENTRIES])pos, sp->x + k * BLOCK, sp->y + k * BLOCK);
        put_le(record + m->rscale_off + g.r0 * 2, finish_row(&g, 0, weight, e), 2);
    }
    return AFF_OK;
}
