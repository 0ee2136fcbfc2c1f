/* The default codebook: what the encoder will do with it is what it is fitted for. Starting from the plain fit (blocks
 * scaled by powers of two), every sample is encoded - scale, variant, sign, rotation and codes, under its importance -
 * and each entry moves to the weighted mean of the quads that chose it, all turned into its frame. In the later rounds
 * entries stand on the E4M3 grid while codes are chosen. Sums run in sample order on one thread. */
#include "base/mem.h"
#include "quant/encode.h"
#include "quant/numbers.h"
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLE_LOG = 18, FREE_ROUNDS = 24, GRID_ROUNDS = 8, CHUNK = 1024, ROW = -4, START_BLOCKS = 1 << 16 };

aff_status aff__fit_samples_add(aff_fit_samples *s, const aff_mxfp4 *m, const float *weight, aff_error *err)
{
    uint64_t step = m->rows * m->cols >> SAMPLE_LOG;
    if (step < 1) step = 1;
    uint64_t most = s->n + (m->rows + step - 1) / step * (m->cols / 16), first = s->n;
    double energy = 0;
    if (most > s->cap) {
        AFF_TRY(aff__realloc(&s->block, most, sizeof *s->block, "codebook samples", err));
        AFF_TRY(aff__realloc(&s->weight, most, sizeof *s->weight, "codebook samples", err));
        s->cap = most;
    }
    for (uint64_t r = 0; r < m->rows; r += step) {
        for (uint64_t k = 0; k < m->cols / 16; k++) {
            aff_block *b = &s->block[s->n];
            float *w = s->weight[s->n];
            aff__mxfp4_block(m, r, k, b);
            if (aff__block_top(b) == INT_MIN) continue;
            for (int i = 0; i < 16; i++) {
                w[i] = weight ? aff__encode_weight(weight[k * 16 + (uint64_t)i]) : 1;
                double x = ldexp((double)aff__e2m1_table[b->quad[i / 4] >> (4 * (i & 3)) & 15], b->exponent);
                energy += (double)w[i] * x * x;
            }
            s->n++;
        }
    }
    if (weight) s->weighted = true;
    /* Every matrix counts alike, whatever its size: the weights become shares of its energy. The block's own scale goes
     * in later. */
    s->energy += energy > 0;
    for (uint64_t i = first; i < s->n; i++) s->block[i].share = energy > 0 ? 1 / energy : 0;
    return AFF_OK;
}

void aff__fit_samples_free(aff_fit_samples *s)
{
    free(s->block);
    free(s->weight);
    *s = (aff_fit_samples){0};
}

/* Rounds that lower the squared error by less than this share are the last of their kind. */
#define LEAST_GAIN 1e-3

typedef struct joint {
    const aff_fit_samples *s;
    aff_search *search;
    aff_choice *choice; /* [n] */
} joint;

static void choose_some(void *ctx, int64_t task, int thread)
{
    (void)thread;
    joint *f = ctx;
    uint64_t to = ((uint64_t)task + 1) * CHUNK;
    for (uint64_t i = (uint64_t)task * CHUNK; i < to && i < f->s->n; i++) {
        const aff_block *b = &f->s->block[i];
        f->choice[i] = aff__choose(f->search, b, aff__block_top(b) + ROW, f->s->weighted ? f->s->weight[i] : NULL);
    }
}

/* Moves the entries of cb to the means of their quads; returns the mean relative squared error before. */
static double move_entries(const joint *f, aff_cb_table cb[AFF_CB_VARIANTS])
{
    double sum[AFF_CB_VARIANTS][AFF_CB_ENTRIES][4] = {{{0}}}, mass[AFF_CB_VARIANTS][AFF_CB_ENTRIES][4] = {{{0}}};
    double err = 0;
    for (uint64_t i = 0; i < f->s->n; i++) {
        const aff_block *b = &f->s->block[i];
        const aff_choice *c = &f->choice[i];
        const aff_search_table *t = &f->search->table[c->v];
        double unit = b->share * ldexp(1.0, 2 * (aff__block_top(b) + ROW + c->e));
        double size = ldexp(c->g & 1 ? -1.0 : 1.0, c->j);
        for (int k = 0; k < 16; k++) {
            int from = c->g & 2 ? k ^ 2 : k, p = k & 3;
            double x = (double)aff__e2m1_table[b->quad[k / 4] >> (4 * (from & 3)) & 15] * size;
            double w = (double)f->s->weight[i][from] * unit, d = x - (double)t->c[p][c->pos[k / 4]];
            sum[c->v][t->id[c->pos[k / 4]]][p] += w * x;
            mass[c->v][t->id[c->pos[k / 4]]][p] += w;
            err += w * d * d;
        }
    }
    for (int v = 0; v < AFF_CB_VARIANTS; v++)
        for (int e = 0; e < AFF_CB_ENTRIES; e++)
            for (int p = 0; p < 4; p++)
                if (mass[v][e][p] > 0) cb[v][e][p] = (float)(sum[v][e][p] / mass[v][e][p]);
    return f->s->energy ? err / (double)f->s->energy : 0;
}

static aff_status round_once(joint *f, aff_cb_table cb[AFF_CB_VARIANTS], aff_pool *pool, double *err2, aff_error *err)
{
    AFF_TRY(aff__search_create(&f->search, cb, -4, pool, err));
    aff__pool_run(pool, choose_some, f, (int64_t)((f->s->n + CHUNK - 1) / CHUNK));
    *err2 = move_entries(f, cb);
    aff__search_free(f->search);
    return AFF_OK;
}

/* Blocks from all over the samples, in units of the power of two above their largest weight. */
static aff_status plain_start(const aff_fit_samples *s, aff_pool *pool, uint8_t out[AFF_CB_BYTES], aff_error *err)
{
    uint64_t step = (s->n + START_BLOCKS - 1) / START_BLOCKS;
    aff_cb_samples plain = {0};
    AFF_TRY(aff__calloc(&plain.x, s->n, 16 * sizeof(float), "codebook samples", err));
    for (uint64_t i = 0; i < s->n; i += step) {
        const aff_block *b = &s->block[i];
        float *x = plain.x + 16 * plain.blocks++;
        for (int k = 0; k < 16; k++)
            x[k] = ldexpf(aff__e2m1_table[b->quad[k / 4] >> (4 * (k & 3)) & 15], b->exponent - aff__block_top(b));
    }
    aff_status st = aff__cb_fit(&plain, pool, out, err);
    aff__cb_samples_free(&plain);
    return st;
}

aff_status aff__cb_fit_joint(const aff_fit_samples *s, aff_pool *pool, uint8_t out[AFF_CB_BYTES], aff_error *err)
{
    joint f = {.s = s};
    aff_cb_table cb[AFF_CB_VARIANTS];
    double least = INFINITY, before = INFINITY, err2 = 0;
    uint8_t bytes[AFF_CB_BYTES];
    AFF_TRY(plain_start(s, pool, bytes, err));
    memcpy(out, bytes, AFF_CB_BYTES);
    AFF_TRY(aff__calloc(&f.choice, s->n, sizeof *f.choice, "codebook fit", err));
    aff__cb_unpack(bytes, cb);
    aff_status st = AFF_OK;
    for (int round = 0, free_rounds = FREE_ROUNDS; round < free_rounds + GRID_ROUNDS && st == AFF_OK; round++) {
        bool grid = round >= free_rounds;
        if (grid) {
            aff__cb_pack(cb, bytes);
            aff__cb_unpack(bytes, cb);
        }
        st = round_once(&f, cb, pool, &err2, err);
        if (!grid && err2 > before * (1 - LEAST_GAIN)) free_rounds = round + 1;
        if (grid && err2 < least) {
            least = err2;
            memcpy(out, bytes, AFF_CB_BYTES);
        } else if (grid && st == AFF_OK) {
            break;
        }
        before = err2;
    }
    free(f.choice);
    return st;
}
