/* matmul.c - dense products: rounding of the activations, and the split of the work into tasks of some rows by some
 * tokens. A task computes whole results, so the split changes nothing. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <stdlib.h>
#include <string.h>

enum {
    TASK_WEIGHTS = 1 << 16, /* a task's weights: enough to hide the pool's cost, small enough to share out */
    ALONE = 1 << 15         /* multiplications below which waking the pool costs more than it saves */
};

typedef struct job {
    const aff_weight *w;
    const aff__cpu_inner *in;
    int group_rows; /* rows that share one slice of x */
    const float *x;
    int64_t ldx;
    int T;
    float *y;
    int64_t ldy;
    int block, blocks; /* rows of a task, tasks per group */
    int groups, batch; /* batch: activation rows of a task */
    bool round;      /* x is to be rounded on the way */
    void *copy;      /* x rounded: [T][groups][slice] bf16 for pairs, zeros behind a slice's columns; else [T][groups * cols] float32; */
    int64_t ldc;     /* rows of it are ldc elements apart */
    int slice;       /* columns of a slice of bf16, 0: no pairs */
} job;

/* Rows a whole number of pages apart would share a few sets of the first cache. This far apart, a panel of columns of 32 rows fills it evenly.
 * size: bytes of an element; panel: its elements. */
static int64_t apart(int64_t width, int size, int panel)
{
    const int page = 4096 / size;
    return (width + page - 1 - panel) / page * page + panel;
}

static void round_task(void *ctx, int64_t t, int thread)
{
    (void)thread;
    const job *j = ctx;
    const float *x = j->x + t * j->ldx;
    if (!j->slice) {
        j->in->round_bf16(x, (float *)j->copy + t * j->ldc, j->groups * j->w->cols);
        return;
    }
    for (int g = 0; g < j->groups; g++) {
        uint16_t *to = (uint16_t *)j->copy + t * j->ldc + (int64_t)g * j->slice;
        j->in->to_bf16(x + (int64_t)g * j->w->cols, to, j->w->cols);
        memset(to + j->w->cols, 0, (size_t)(j->slice - j->w->cols) * sizeof *to);
    }
}

static void run_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const job *j = ctx;
    int per_pass = j->blocks * j->groups;
    int t0 = (int)(task / per_pass) * j->batch, g = (int)(task % per_pass) / j->blocks;
    int n = aff__min_int(j->batch, j->T - t0);
    int r0 = (int)(task % j->blocks) * j->block, r1 = aff__min_int(r0 + j->block, j->group_rows);
    r0 += g * j->group_rows, r1 += g * j->group_rows;
    const float *x[AFF__BATCH_MAX];
    const uint16_t *pair[AFF__BATCH_MAX];
    float *y[AFF__BATCH_MAX];
    for (int t = 0; t < n; t++) {
        if (j->slice)
            pair[t] = (const uint16_t *)j->copy + (t0 + t) * j->ldc + (int64_t)g * j->slice;
        else
            x[t] = j->x + (t0 + t) * j->ldx + (int64_t)g * j->w->cols;
        y[t] = j->y + (t0 + t) * j->ldy + r0;
    }
    if (j->round)
        aff__matmul_rounding(j->w, r0, r1, x, n, y);
    else if (j->slice)
        j->in->pairs(j->w, r0, r1, pair, n, y);
    else
        j->in->matmul(j->w, r0, r1, x, n, y);
}

/* Rows of a task: with many activation rows up to MANY, which share the way that those take through the caches, while every thread keeps
 * a few tasks. */
static int task_rows(const job *j, int threads)
{
    enum { MANY = 64, LEAST = 8 };
    int block = TASK_WEIGHTS / (j->w->cols > 0 ? j->w->cols : 1) / 8 * 8;
    block = block < 8 ? 8 : aff__min_int(block, 256);
    const int64_t rows_in_all = (int64_t)j->group_rows * j->groups * aff__ceil_div(j->T, j->batch);
    while (j->T >= LEAST && block < MANY && rows_in_all / (2 * block) >= 4 * threads) block *= 2;
    return block;
}

static void run_job(aff_pool *pool, job *j)
{
    j->block = task_rows(j, aff__pool_threads(pool));
    j->blocks = aff__ceil_div(j->group_rows, j->block);
    if ((int64_t)j->w->rows * j->w->cols * j->T < ALONE) pool = NULL;
    aff__pool_run(pool, run_task, j, (int64_t)j->blocks * j->groups * aff__ceil_div(j->T, j->batch));
}

void aff__cpu_matmul_grouped(aff_pool *pool, const aff_weight *w, aff_numerics num, int groups, const float *x,
                             int64_t ldx, int T, float *y, int64_t ldy)
{
    if (w->rows <= 0 || groups <= 0 || T <= 0) return;
    job j = {.w = w,
             .in = aff__cpu_inner_now(),
             .group_rows = w->rows / groups,
             .groups = groups,
             .x = x,
             .ldx = ldx,
             .T = T,
             .batch = AFF__ROWS_MAX,
             .y = y,
             .ldy = ldy};
    if (num != AFF_FAST || w->wide) {
        run_job(pool, &j);
        return;
    }
    /* One rounded copy for the whole call; without memory for it the scalar form rounds as it goes, to the same bits. */
    const int slice = w->dtype == AFF_F32 ? 0 : aff__ceil_div(w->cols, 32) * 32;
    const int64_t width = (int64_t)groups * (slice ? slice : w->cols);
    const uint64_t size = slice ? sizeof(uint16_t) : sizeof(float);
    j.ldc = slice ? apart(width, 2, 1056) : apart(width, 4, 128);
    if (aff__realloc(&j.copy, (uint64_t)T * (uint64_t)j.ldc, size, "rounded activations", NULL) == AFF_OK) {
        j.slice = slice;
        if (slice) j.batch = AFF__BATCH_MAX;
        aff__pool_run(T * width < ALONE ? NULL : pool, round_task, &j, T);
        if (!slice) j.x = j.copy, j.ldx = j.ldc;
    } else
        j.round = true;
    run_job(pool, &j);
    free(j.copy);
}

void aff__cpu_matmul(aff_pool *pool, const aff_weight *w, aff_numerics num, const float *x, int64_t ldx, int T,
                     float *y, int64_t ldy)
{
    aff__cpu_matmul_grouped(pool, w, num, 1, x, ldx, T, y, ldy);
}
