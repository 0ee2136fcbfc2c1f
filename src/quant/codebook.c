/* The index is the grid of spec quantiser 6. Which entries a cell must list follows from two bounds: the nearest point
 * of the cell to an entry gives the least distance it can have, the farthest the most; an entry whose least exceeds the
 * smallest most is never the nearest. Squared distances split by axis, so both come from small per-axis tables. */
#include "quant/codebook.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the stored form ---- */

static bool in_range(uint8_t b)
{
    return (b >> 3 & 15) >= 1 && (b >> 3 & 15) <= 7;
}

uint8_t aff__cb_round(float f)
{
    int best = 0x08;
    float best_d = fabsf(f - aff__e4m3_to_f32(0x08));
    for (int b = 0x09; b < 256; b++) {
        if (!in_range((uint8_t)b)) continue;
        float d = fabsf(f - aff__e4m3_to_f32((uint8_t)b));
        if (d < best_d) {
            best_d = d;
            best = b;
        }
    }
    return (uint8_t)best;
}

void aff__cb_pack(aff_cb_table cb[AFF_CB_VARIANTS], uint8_t out[AFF_CB_BYTES])
{
    for (int v = 0; v < AFF_CB_VARIANTS; v++)
        for (int i = 0; i < AFF_CB_ENTRIES; i++)
            for (int p = 0; p < 4; p++) out[(v * AFF_CB_ENTRIES + i) * 4 + p] = aff__cb_round(cb[v][i][p]);
}

void aff__cb_unpack(const uint8_t in[AFF_CB_BYTES], aff_cb_table out[AFF_CB_VARIANTS])
{
    for (int v = 0; v < AFF_CB_VARIANTS; v++)
        for (int i = 0; i < AFF_CB_ENTRIES; i++)
            for (int p = 0; p < 4; p++) out[v][i][p] = aff__e4m3_to_f32(in[(v * AFF_CB_ENTRIES + i) * 4 + p]);
}

bool aff__cb_valid(const uint8_t in[AFF_CB_BYTES])
{
    for (int i = 0; i < AFF_CB_BYTES; i++)
        if (!in_range(in[i])) return false;
    return true;
}

void aff__codebook_ints(const uint8_t cb[AFF_CB_BYTES], int16_t out[AFF_CB_VARIANTS][AFF_CB_ENTRIES][4])
{
    for (int v = 0; v < AFF_CB_VARIANTS; v++)
        for (int i = 0; i < AFF_CB_ENTRIES; i++)
            for (int p = 0; p < 4; p++)
                out[v][i][p] = (int16_t)(aff__e4m3_to_f32(cb[(v * AFF_CB_ENTRIES + i) * 4 + p]) * 512.0f);
}

/* ---- grid ---- */

uint32_t aff__cb_scan_nearest(const aff_cb_table cb, const float x[4], float *dist)
{
    uint32_t best = 0;
    float best_d = aff__cb_distance(cb[0], x);
    for (uint32_t i = 1; i < AFF_CB_ENTRIES; i++) {
        float d = aff__cb_distance(cb[i], x);
        if (d < best_d) {
            best_d = d;
            best = i;
        }
    }
    *dist = best_d;
    return best;
}

typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));

static v4f load4(const float c[4])
{
    v4f v;
    memcpy(&v, c, sizeof v);
    return v;
}

static v4f pick(v4i mask, v4f a, v4f b)
{
    return (v4f)(((v4i)a & mask) | ((v4i)b & ~mask));
}

/* The nearest of n listed entries, n a multiple of 4: four at a time, each distance summed in the order of
 * aff__cb_distance. Of equals a lane keeps the first it met, and the lanes' bests are settled by number. */
static uint32_t best_listed(const float (*cb)[4], const uint16_t *list, uint32_t n, const float x[4], float *dist)
{
    v4f best = {FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX};
    v4i who = {0};
    for (uint32_t k = 0; k < n; k += 4) {
        v4f a = load4(cb[list[k]]), b = load4(cb[list[k + 1]]), c = load4(cb[list[k + 2]]), d = load4(cb[list[k + 3]]);
        v4f ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
        v4f t0 = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) - x[0],
            t1 = __builtin_shufflevector(ab, cd, 2, 3, 6, 7) - x[1];
        ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        v4f t2 = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) - x[2],
            t3 = __builtin_shufflevector(ab, cd, 2, 3, 6, 7) - x[3];
        v4f s = ((t0 * t0 + t1 * t1) + t2 * t2) + t3 * t3;
        v4i less = s < best, number = {list[k], list[k + 1], list[k + 2], list[k + 3]};
        best = pick(less, s, best);
        who = (number & less) | (who & ~less);
    }
    int at = 0;
    for (int i = 1; i < 4; i++)
        if (best[i] < best[at] || (best[i] == best[at] && who[i] < who[at])) at = i;
    *dist = best[at];
    return (uint32_t)who[at];
}

uint32_t aff__cb_grid_nearest(const aff_cb_grid *g, const float x[4], float *dist)
{
    uint32_t cell = 0;
    for (int p = 0; p < 4; p++) {
        float c = (x[p] - g->lo) * g->per_step;
        if (!(c >= g->first && c < (float)g->cells)) return aff__cb_scan_nearest(g->cb, x, dist);
        cell = cell * (uint32_t)g->cells + (uint32_t)(int)c;
    }
    return best_listed(g->cb, g->items + g->lists[cell].at, g->lists[cell].n, x, dist);
}

/* Building goes through coarse cells of SPLIT^4 cells each: an entry that a coarse cell rules out is ruled out in all
 * cells of it (its least distance only grows, the bound only shrinks, and rounding is monotone, so this holds bit for
 * bit), and the few that are left are tried in each cell. */

enum { N = AFF_CB_ENTRIES, MAX_SPLIT = 5 };

/* Bounds of the four axes: [axis][cell][entry], the squared distance of the cell's nearest and farthest point to the
 * entry. */
typedef struct bounds {
    int cells;
    float *near, *far;
} bounds;

/* Lists of all cells in one row of coarse cells, and what building them needs. */
typedef struct slice {
    uint16_t *items;
    uint32_t count, cap;
    aff_status status;
    aff_error err;
    float near1[N], far1[N], near2[N], far2[N];
    /* of the entries a coarse cell leaves: [axis][cell in it][entry] */
    float near[4][MAX_SPLIT][N], far[4][MAX_SPLIT][N];
    uint16_t coarse[N], fine[N];
} slice;

typedef struct build {
    aff_cb_grid *g;
    int split;   /* cells of a coarse cell along an axis; divides g->cells */
    float slack; /* relative; 0 copies the earlier tool's lists */
    bounds b, coarse;
    slice *slices;
} build;

static float *near_row(const bounds *b, int axis, int cell)
{
    return b->near + ((size_t)axis * (size_t)b->cells + (size_t)cell) * N;
}
static float *far_row(const bounds *b, int axis, int cell)
{
    return b->far + ((size_t)axis * (size_t)b->cells + (size_t)cell) * N;
}

static aff_status make_bounds(bounds *b, const aff_cb_grid *g, float step, int split, aff_error *err)
{
    b->cells = g->cells / split;
    AFF_TRY(aff__calloc(&b->near, 4 * (uint64_t)b->cells * N, sizeof(float), "codebook index", err));
    AFF_TRY(aff__calloc(&b->far, 4 * (uint64_t)b->cells * N, sizeof(float), "codebook index", err));
    for (int axis = 0; axis < 4; axis++) {
        for (int i = 0; i < b->cells; i++) {
            float from = g->lo + (float)(i * split) * step, to = g->lo + (float)(i * split + split - 1) * step + step;
            float *near = near_row(b, axis, i), *far = far_row(b, axis, i);
            for (int e = 0; e < N; e++) {
                float c = g->cb[e][axis], d0 = from - c, d1 = to - c;
                float lo = c < from ? d0 : c > to ? d1 : 0.0f;
                near[e] = lo * lo;
                far[e] = d0 * d0 > d1 * d1 ? d0 * d0 : d1 * d1;
            }
        }
    }
    return AFF_OK;
}

/* The next three work on the first n entries, n a multiple of 8. */

static void add_rows(float *restrict out, const float *restrict a, const float *restrict b, uint32_t n)
{
    for (uint32_t e = 0; e < n; e++) out[e] = a[e] + b[e];
}

static float least_sum(const float *restrict a, const float *restrict b, uint32_t n)
{
    float m[8];
    for (int k = 0; k < 8; k++) m[k] = a[k] + b[k];
    for (uint32_t e = 8; e < n; e += 8) {
        for (int k = 0; k < 8; k++) {
            float s = a[e + (uint32_t)k] + b[e + (uint32_t)k];
            m[k] = s < m[k] ? s : m[k];
        }
    }
    for (int k = 1; k < 8; k++) m[0] = m[k] < m[0] ? m[k] : m[0];
    return m[0];
}

/* Places whose a + b is at most bound, ascending. */
static uint32_t list_cell(uint16_t out[N], const float *restrict a, const float *restrict b, uint32_t n, float bound)
{
    uint32_t found = 0;
    for (uint32_t e = 0; e < n; e += 8) {
        int any = 0;
        for (uint32_t k = 0; k < 8; k++) any |= a[e + k] + b[e + k] <= bound;
        if (!any) continue;
        for (uint32_t k = 0; k < 8; k++)
            if (a[e + k] + b[e + k] <= bound) out[found++] = (uint16_t)(e + k);
    }
    return found;
}

/* Entries that can be the nearest of a point in the cell whose bounds are a + b, summed over three axes and of the
 * last. */
static uint32_t cell_entries(const build *b, uint16_t out[N], const float *near3, const float *near, const float *far3,
                             const float *far, uint32_t n)
{
    float bound = least_sum(far3, far, n);
    bound += bound * b->slack;
    return list_cell(out, near3, near, n, bound);
}

/* Copies the bounds of the n listed entries in the cells of coarse cell c; fills up to a multiple of 8 with entries
 * that are never the nearest. */
static uint32_t gather(const build *b, slice *sl, const int c[4], uint32_t n)
{
    uint32_t padded = (n + 7) / 8 * 8;
    for (int axis = 0; axis < 4; axis++) {
        for (int k = 0; k < b->split; k++) {
            const float *near = near_row(&b->b, axis, c[axis] * b->split + k),
                        *far = far_row(&b->b, axis, c[axis] * b->split + k);
            for (uint32_t i = 0; i < padded; i++) {
                sl->near[axis][k][i] = i < n ? near[sl->coarse[i]] : INFINITY;
                sl->far[axis][k][i] = i < n ? far[sl->coarse[i]] : INFINITY;
            }
        }
    }
    return padded;
}

static void add_list(const build *b, slice *sl, size_t cell, uint32_t n)
{
    /* Up to a multiple of 4 with the last one again. */
    for (; n % 4; n++) sl->fine[n] = sl->fine[n - 1];
    if (sl->count + n > sl->cap) {
        sl->cap = sl->cap * 2 + 65536;
        sl->status = aff__realloc(&sl->items, sl->cap, sizeof *sl->items, "codebook index", &sl->err);
        if (sl->status != AFF_OK) return;
    }
    for (uint32_t k = 0; k < n; k++) sl->items[sl->count + k] = sl->coarse[sl->fine[k]];
    b->g->lists[cell].at = sl->count;
    b->g->lists[cell].n = n;
    sl->count += n;
}

/* The cells of one coarse cell; n entries are listed in sl->coarse. */
static void build_coarse(const build *b, slice *sl, const int c[4], uint32_t n)
{
    size_t cells = (size_t)b->g->cells, split = (size_t)b->split;
    float near2[N], far2[N], near3[N], far3[N];
    n = gather(b, sl, c, n);
    for (size_t k = 0; k < split * split * split * split && sl->status == AFF_OK; k++) {
        size_t k0 = k / (split * split * split), k1 = k / (split * split) % split, k2 = k / split % split,
               k3 = k % split;
        if (k2 == 0 && k3 == 0) {
            add_rows(near2, sl->near[0][k0], sl->near[1][k1], n);
            add_rows(far2, sl->far[0][k0], sl->far[1][k1], n);
        }
        if (k3 == 0) {
            add_rows(near3, near2, sl->near[2][k2], n);
            add_rows(far3, far2, sl->far[2][k2], n);
        }
        size_t at[4] = {(size_t)c[0] * split + k0, (size_t)c[1] * split + k1, (size_t)c[2] * split + k2,
                        (size_t)c[3] * split + k3};
        uint32_t found = cell_entries(b, sl->fine, near3, sl->near[3][k3], far3, sl->far[3][k3], n);
        add_list(b, sl, ((at[0] * cells + at[1]) * cells + at[2]) * cells + at[3], found);
    }
}

static void build_slice(void *ctx, int64_t c0, int thread)
{
    (void)thread;
    build *b = ctx;
    slice *sl = &b->slices[c0];
    const bounds *q = &b->coarse;
    int c[4] = {(int)c0, 0, 0, 0};
    for (c[1] = 0; c[1] < q->cells; c[1]++) {
        add_rows(sl->near1, near_row(q, 0, c[0]), near_row(q, 1, c[1]), N);
        add_rows(sl->far1, far_row(q, 0, c[0]), far_row(q, 1, c[1]), N);
        for (c[2] = 0; c[2] < q->cells; c[2]++) {
            add_rows(sl->near2, sl->near1, near_row(q, 2, c[2]), N);
            add_rows(sl->far2, sl->far1, far_row(q, 2, c[2]), N);
            for (c[3] = 0; c[3] < q->cells; c[3]++)
                build_coarse(
                    b, sl, c,
                    cell_entries(b, sl->coarse, sl->near2, near_row(q, 3, c[3]), sl->far2, far_row(q, 3, c[3]), N));
        }
    }
}

/* Slices to one array. */
static aff_status join_slices(build *b, aff_error *err)
{
    aff_cb_grid *g = b->g;
    uint64_t total = 0;
    for (int i = 0; i < b->coarse.cells; i++) {
        if (b->slices[i].status != AFF_OK) {
            if (err) *err = b->slices[i].err;
            return b->slices[i].status;
        }
        total += b->slices[i].count;
    }
    if (total > UINT32_MAX)
        return aff__fail(err, AFF_E_LIMIT, "codebook index: %llu list entries", (unsigned long long)total);
    AFF_TRY(aff__realloc(&g->items, total, sizeof *g->items, "codebook index", err));
    size_t cells = (size_t)g->cells, per_slice = (size_t)b->split * cells * cells * cells;
    g->total = 0;
    for (size_t i = 0; i < (size_t)b->coarse.cells; i++) {
        memcpy(g->items + g->total, b->slices[i].items, b->slices[i].count * sizeof *g->items);
        for (size_t c = i * per_slice; c < (i + 1) * per_slice; c++) g->lists[c].at += g->total;
        g->total += b->slices[i].count;
    }
    return AFF_OK;
}

static aff_status grid_build(aff_cb_grid *g, const float (*cb)[4], int cells, int split, float lo, float step,
                             float slack, aff_pool *pool, aff_error *err)
{
    *g = (aff_cb_grid){.cells = cells, .lo = lo, .per_step = 1.0f / step, .cb = cb};
    build b = {.g = g, .split = split, .slack = slack};
    uint64_t n = (uint64_t)cells;
    aff_status s = make_bounds(&b.b, g, step, 1, err);
    if (s == AFF_OK) s = make_bounds(&b.coarse, g, step, split, err);
    if (s == AFF_OK) s = aff__calloc(&b.slices, (uint64_t)b.coarse.cells, sizeof(slice), "codebook index", err);
    if (s == AFF_OK) s = aff__calloc(&g->lists, n * n * n * n, sizeof *g->lists, "codebook index", err);
    if (s == AFF_OK) {
        aff__pool_run(pool, build_slice, &b, b.coarse.cells);
        s = join_slices(&b, err);
        for (int i = 0; i < b.coarse.cells; i++) free(b.slices[i].items);
    }
    free(b.b.near);
    free(b.b.far);
    free(b.coarse.near);
    free(b.coarse.far);
    free(b.slices);
    if (s != AFF_OK) aff__cb_grid_free(g);
    return s;
}

void aff__cb_grid_free(aff_cb_grid *g)
{
    free(g->lists);
    free(g->items);
    g->lists = NULL;
    g->items = NULL;
}

/* Covers the rounding of distances (a few 2^-24), of the bounds, and of a query that stands on a cell's edge. */
#define SLACK 1e-4f

aff_status aff__cb_grid_build_unit(aff_cb_grid *g, const aff_cb_table cb, aff_pool *pool, aff_error *err)
{
    /* Reaches a little past 1, so that 1 itself lies inside the last cell. */
    return grid_build(g, cb, 10, 2, -1.001f, 0.2002f, SLACK, pool, err);
}

aff_status aff__cb_index_create(aff_cb_index **out, const uint8_t cb[AFF_CB_BYTES], aff_cb_grid_kind kind,
                                aff_pool *pool, aff_error *err)
{
    *out = NULL;
    aff_cb_index *ix;
    AFF_TRY(aff__calloc(&ix, 1, sizeof *ix, "codebook index", err));
    aff__cb_unpack(cb, ix->cb);
    bool compat = kind == AFF_CB_GRID_COMPAT;
    aff_status s = AFF_OK;
    for (int v = 0; v < AFF_CB_VARIANTS && s == AFF_OK; v++) {
        s = grid_build(&ix->grid[v], ix->cb[v], 25, 5, -2.5f, 5.0f / 25.0f, compat ? 0.0f : SLACK, pool, err);
        ix->grid[v].per_step = 5.0f;
        if (compat) ix->grid[v].first = nextafterf(-1.0f, 0.0f);
    }
    if (s != AFF_OK) {
        aff__cb_index_free(ix);
        return s;
    }
    *out = ix;
    return AFF_OK;
}

void aff__cb_index_free(aff_cb_index *ix)
{
    if (!ix) return;
    for (int v = 0; v < AFF_CB_VARIANTS; v++) aff__cb_grid_free(&ix->grid[v]);
    free(ix);
}
