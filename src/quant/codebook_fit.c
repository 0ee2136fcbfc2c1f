/* The fit: k-means++ and Lloyd for variant 0, then variant 1 seeded half an octave up and both refined by assigning
 * whole blocks to the better variant (spec quantiser 5). Its bytes are compared with those of other programs, so what
 * may run in parallel is only what has one right answer, the nearest entry of each quad; sums run in sample order on
 * one thread. */
#include "quant/codebook.h"
#include "base/mem.h"
#include "base/rng.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLE_ROWS_LOG = 19, LLOYD_FIRST = 50, EM_ROUNDS = 12, EM_LLOYD = 6, CHUNK = 4096 /* blocks a task */ };

aff_status aff__cb_samples_add(aff_cb_samples *s, const float *w, uint64_t rows, uint64_t cols, aff_error *err)
{
    uint64_t step = rows * cols >> SAMPLE_ROWS_LOG;
    if (step < 1) step = 1;
    uint64_t most = (rows + step - 1) / step * (cols / 16);
    if (s->blocks + most > s->cap) {
        AFF_TRY(aff__realloc(&s->x, s->blocks + most, 16 * sizeof(float), "codebook samples", err));
        s->cap = s->blocks + most;
    }
    for (uint64_t r = 0; r < rows; r += step) {
        for (uint64_t b = 0; b < cols / 16; b++) {
            const float *x = w + r * cols + b * 16;
            float *out = s->x + s->blocks * 16, bmax = 0;
            for (int i = 0; i < 16; i++) bmax = fabsf(x[i]) > bmax ? fabsf(x[i]) : bmax;
            if (bmax == 0) continue; /* covers rows of zeros too */
            for (int i = 0; i < 16; i++) out[i] = x[i] / bmax;
            s->blocks++;
        }
    }
    return AFF_OK;
}

void aff__cb_samples_free(aff_cb_samples *s)
{
    free(s->x);
    *s = (aff_cb_samples){0};
}

typedef struct fit {
    const float *x; /* [blocks][4 quads][4] */
    uint64_t blocks;
    aff_pool *pool;
    aff_cb_table cb[AFF_CB_VARIANTS];
    aff_cb_grid grid[AFF_CB_VARIANTS];
    uint16_t *nearest; /* [quads], of the variant being refined */
    uint8_t *variant;  /* [blocks] */
    double *d2;        /* [quads], k-means++ */
    int current;       /* variant, or last centroid chosen */
} fit;

static void over_chunks(fit *f, void (*fn)(void *, int64_t, int))
{
    aff__pool_run(f->pool, fn, f, (int64_t)((f->blocks + CHUNK - 1) / CHUNK));
}

static uint64_t chunk_end(const fit *f, int64_t task)
{
    uint64_t to = ((uint64_t)task + 1) * CHUNK;
    return to < f->blocks ? to : f->blocks;
}

/* ---- k-means++ ---- */

static void shrink_d2(void *ctx, int64_t task, int thread)
{
    (void)thread;
    fit *f = ctx;
    const float *c = f->cb[0][f->current];
    for (uint64_t i = (uint64_t)task * CHUNK * 4; i < chunk_end(f, task) * 4; i++) {
        double d = 0;
        for (int p = 0; p < 4; p++) {
            double t = (double)f->x[i * 4 + (uint64_t)p] - (double)c[p];
            d += t * t;
        }
        if (d < f->d2[i]) f->d2[i] = d;
    }
}

static aff_status seed_first(fit *f, aff_error *err)
{
    uint64_t quads = f->blocks * 4, rng = 1;
    AFF_TRY(aff__calloc(&f->d2, quads, sizeof(double), "codebook fit", err));
    for (uint64_t i = 0; i < quads; i++) f->d2[i] = DBL_MAX;
    memcpy(f->cb[0][0], f->x, sizeof f->cb[0][0]);
    for (int c = 1; c < AFF_CB_ENTRIES; c++) {
        f->current = c - 1;
        over_chunks(f, shrink_d2);
        double total = 0, run = 0;
        for (uint64_t i = 0; i < quads; i++) total += f->d2[i];
        double target = (double)(aff__splitmix64(&rng) % 1000000) / 1e6 * total;
        uint64_t pick = quads - 1;
        for (uint64_t i = 0; i < quads; i++) {
            run += f->d2[i];
            if (run >= target) {
                pick = i;
                break;
            }
        }
        memcpy(f->cb[0][c], f->x + pick * 4, sizeof f->cb[0][c]);
    }
    return AFF_OK;
}

/* ---- Lloyd ---- */

static void assign_quads(void *ctx, int64_t task, int thread)
{
    (void)thread;
    fit *f = ctx;
    for (uint64_t b = (uint64_t)task * CHUNK; b < chunk_end(f, task); b++) {
        if (f->variant[b] != f->current) continue;
        for (uint64_t i = b * 4; i < b * 4 + 4; i++) {
            float d;
            f->nearest[i] = (uint16_t)aff__cb_grid_nearest(&f->grid[f->current], f->x + i * 4, &d);
        }
    }
}

/* Moves every entry of variant v to the mean of the quads nearest to it; returns how far they moved in all. */
static double move_entries(fit *f, int v)
{
    double sum[AFF_CB_ENTRIES][4] = {{0}}, moved = 0;
    uint64_t count[AFF_CB_ENTRIES] = {0};
    for (uint64_t b = 0; b < f->blocks; b++) {
        if (f->variant[b] != v) continue;
        for (uint64_t i = b * 4; i < b * 4 + 4; i++) {
            for (int p = 0; p < 4; p++) sum[f->nearest[i]][p] += (double)f->x[i * 4 + (uint64_t)p];
            count[f->nearest[i]]++;
        }
    }
    for (int e = 0; e < AFF_CB_ENTRIES; e++) {
        if (!count[e]) continue;
        for (int p = 0; p < 4; p++) {
            float c = (float)(sum[e][p] / (double)count[e]);
            moved += (double)fabsf(c - f->cb[v][e][p]);
            f->cb[v][e][p] = c;
        }
    }
    return moved;
}

/* Lloyd iterations of variant v over the blocks that belong to it. */
static aff_status lloyd(fit *f, int v, int iterations, aff_error *err)
{
    for (int it = 0; it < iterations; it++) {
        AFF_TRY(aff__cb_grid_build_unit(&f->grid[v], f->cb[v], f->pool, err));
        f->current = v;
        over_chunks(f, assign_quads);
        aff__cb_grid_free(&f->grid[v]);
        if (move_entries(f, v) < 1e-7) break;
    }
    return AFF_OK;
}

/* ---- variants ---- */

static void choose_variants(void *ctx, int64_t task, int thread)
{
    (void)thread;
    fit *f = ctx;
    for (uint64_t b = (uint64_t)task * CHUNK; b < chunk_end(f, task); b++) {
        double err[AFF_CB_VARIANTS] = {0};
        for (int v = 0; v < AFF_CB_VARIANTS; v++) {
            for (uint64_t i = b * 4; i < b * 4 + 4; i++) {
                float d;
                aff__cb_grid_nearest(&f->grid[v], f->x + i * 4, &d);
                err[v] += (double)d;
            }
        }
        f->variant[b] = err[1] < err[0];
    }
}

static void reset_variant(fit *f, int v)
{
    double sq = 0;
    uint64_t n = f->blocks * 16;
    for (uint64_t i = 0; i < n; i++) sq += (double)f->x[i] * (double)f->x[i];
    float g = (float)(0.25 * (v + 1) * sqrt(sq / (double)n) / sqrt((double)AFF_CB_ENTRIES));
    for (int e = 0; e < AFF_CB_ENTRIES; e++)
        for (int p = 0; p < 4; p++) f->cb[v][e][p] = f->cb[0][e][p] + (p == 0 ? g : -g);
}

static aff_status refine_both(fit *f, aff_error *err)
{
    uint64_t before = UINT64_MAX;
    for (int round = 0; round < EM_ROUNDS; round++) {
        for (int v = 0; v < AFF_CB_VARIANTS; v++) AFF_TRY(aff__cb_grid_build_unit(&f->grid[v], f->cb[v], f->pool, err));
        over_chunks(f, choose_variants);
        for (int v = 0; v < AFF_CB_VARIANTS; v++) aff__cb_grid_free(&f->grid[v]);
        uint64_t in_second = 0;
        for (uint64_t b = 0; b < f->blocks; b++) in_second += f->variant[b];
        for (int v = 0; v < AFF_CB_VARIANTS; v++) {
            if (in_second == (v ? 0 : f->blocks))
                reset_variant(f, v);
            else
                AFF_TRY(lloyd(f, v, EM_LLOYD, err));
        }
        if (in_second == before) break;
        before = in_second;
    }
    return AFF_OK;
}

aff_status aff__cb_fit(const aff_cb_samples *s, aff_pool *pool, uint8_t out[AFF_CB_BYTES], aff_error *err)
{
    if (!s->blocks)
        return aff__fail(err, AFF_E_FORMAT, "codebook: every sampled expert weight is zero, nothing to fit");
    fit *f;
    AFF_TRY(aff__calloc(&f, 1, sizeof *f, "codebook fit", err));
    f->x = s->x;
    f->blocks = s->blocks;
    f->pool = pool;
    aff_status st = aff__calloc(&f->nearest, f->blocks * 4, sizeof *f->nearest, "codebook fit", err);
    if (st == AFF_OK) st = aff__calloc(&f->variant, f->blocks, 1, "codebook fit", err);
    if (st == AFF_OK) st = seed_first(f, err);
    if (st == AFF_OK) st = lloyd(f, 0, LLOYD_FIRST, err);
    if (st == AFF_OK) {
        float up = (float)exp2(0.5);
        for (int e = 0; e < AFF_CB_ENTRIES; e++)
            for (int p = 0; p < 4; p++) f->cb[1][e][p] = f->cb[0][e][p] * up;
        st = refine_both(f, err);
    }
    if (st == AFF_OK) aff__cb_pack(f->cb, out);
    for (int v = 0; v < AFF_CB_VARIANTS; v++) aff__cb_grid_free(&f->grid[v]);
    free(f->nearest);
    free(f->variant);
    free(f->d2);
    free(f);
    return st;
}
