/* The index is the grid of spec quantiser 6. Which entries a cell must list follows from two bounds: the nearest point
 * of the cell to an entry gives the least distance it can have, the farthest the most; an entry whose least exceeds the
 * smallest most is never the nearest. Squared distances split by axis, so both come from small per-axis tables. */
#include "quant/codebook.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>

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
    float best_d = FLT_MAX;
    for (uint32_t i = 0; i < AFF_CB_ENTRIES; i++) {
        float d = aff__cb_distance(cb[i], x);
        if (d < best_d) {
            best_d = d;
            best = i;
        }
    }
    *dist = best_d;
    return best;
}

uint32_t aff__cb_grid_nearest(const aff_cb_grid *g, const float x[4], float *dist)
{
    uint32_t cell = 0;
    for (int p = 0; p < 4; p++) {
        float c = (x[p] - g->lo) * g->per_step;
        if (!(c >= g->first && c < (float)g->cells)) return aff__cb_scan_nearest(g->cb, x, dist);
        cell = cell * (uint32_t)g->cells + (uint32_t)(int)c;
    }
    const uint16_t *it = g->items + g->start[cell], *end = g->items + g->start[cell + 1];
    uint32_t best = *it;
    float best_d = aff__cb_distance(g->cb[best], x);
    while (++it < end) {
        float d = aff__cb_distance(g->cb[*it], x);
        if (d < best_d) {
            best_d = d;
            best = *it;
        }
    }
    *dist = best_d;
    return best;
}

/* Lists of all cells with the same first coordinate. */
typedef struct slice {
    uint16_t *items;
    uint32_t count, cap;
    aff_status status;
    aff_error err;
} slice;

typedef struct build {
    aff_cb_grid *g;
    float slack; /* relative; 0 copies the earlier tool's lists */
    /* [axis][cell][entry]: squared distance of the cell's nearest and farthest point to the entry */
    float *near, *far;
    slice *slices;
} build;

enum { N = AFF_CB_ENTRIES };

static float *axis_row(float *t, const aff_cb_grid *g, int axis, int cell)
{
    return t + ((size_t)axis * (size_t)g->cells + (size_t)cell) * N;
}

static void axis_tables(build *b, float step)
{
    const aff_cb_grid *g = b->g;
    for (int axis = 0; axis < 4; axis++) {
        for (int i = 0; i < g->cells; i++) {
            float from = g->lo + (float)i * step, to = from + step;
            float *near = axis_row(b->near, g, axis, i), *far = axis_row(b->far, g, axis, i);
            for (int e = 0; e < N; e++) {
                float c = g->cb[e][axis], d0 = from - c, d1 = to - c;
                float lo = c < from ? d0 : c > to ? d1 : 0.0f;
                near[e] = lo * lo;
                far[e] = d0 * d0 > d1 * d1 ? d0 * d0 : d1 * d1;
            }
        }
    }
}

static void add_rows(float *restrict out, const float *restrict a, const float *restrict b)
{
    for (int e = 0; e < N; e++) out[e] = a[e] + b[e];
}

static float least_sum(const float *restrict a, const float *restrict b)
{
    float m[8];
    for (int k = 0; k < 8; k++) m[k] = a[k] + b[k];
    for (int e = 8; e < N; e += 8) {
        for (int k = 0; k < 8; k++) {
            float s = a[e + k] + b[e + k];
            m[k] = s < m[k] ? s : m[k];
        }
    }
    for (int k = 1; k < 8; k++) m[0] = m[k] < m[0] ? m[k] : m[0];
    return m[0];
}

/* Entries whose a[e] + b[e] is at most bound, ascending. */
static uint32_t list_cell(uint16_t out[N], const float *restrict a, const float *restrict b, float bound)
{
    uint32_t n = 0;
    for (int e = 0; e < N; e += 16) {
        int any = 0;
        for (int k = 0; k < 16; k++) any |= a[e + k] + b[e + k] <= bound;
        if (!any) continue;
        for (int k = 0; k < 16; k++)
            if (a[e + k] + b[e + k] <= bound) out[n++] = (uint16_t)(e + k);
    }
    return n;
}

static void build_slice(void *ctx, int64_t i0, int thread)
{
    (void)thread;
    build *b = ctx;
    const aff_cb_grid *g = b->g;
    slice *sl = &b->slices[i0];
    float near1[N], far1[N], near2[N], far2[N];
    uint16_t list[N];
    uint32_t cells = (uint32_t)g->cells, *start = g->start + (size_t)i0 * cells * cells * cells;
    for (int i1 = 0; i1 < g->cells; i1++) {
        add_rows(near1, axis_row(b->near, g, 0, (int)i0), axis_row(b->near, g, 1, i1));
        add_rows(far1, axis_row(b->far, g, 0, (int)i0), axis_row(b->far, g, 1, i1));
        for (int i2 = 0; i2 < g->cells; i2++) {
            add_rows(near2, near1, axis_row(b->near, g, 2, i2));
            add_rows(far2, far1, axis_row(b->far, g, 2, i2));
            for (int i3 = 0; i3 < g->cells; i3++) {
                float bound = least_sum(far2, axis_row(b->far, g, 3, i3));
                bound += bound * b->slack;
                uint32_t n = list_cell(list, near2, axis_row(b->near, g, 3, i3), bound);
                if (sl->count + n > sl->cap) {
                    sl->cap = sl->cap * 2 + 65536;
                    sl->status = aff__realloc(&sl->items, sl->cap, sizeof *sl->items, "codebook index", &sl->err);
                    if (sl->status != AFF_OK) return;
                }
                for (uint32_t k = 0; k < n; k++) sl->items[sl->count + k] = list[k];
                sl->count += n;
                *start++ = n;
            }
        }
    }
}

/* Counts to offsets, slices to one array. */
static aff_status join_slices(build *b, aff_error *err)
{
    aff_cb_grid *g = b->g;
    uint64_t total = 0;
    for (int i = 0; i < g->cells; i++) {
        if (b->slices[i].status != AFF_OK) {
            if (err) *err = b->slices[i].err;
            return b->slices[i].status;
        }
        total += b->slices[i].count;
    }
    if (total > UINT32_MAX)
        return aff__fail(err, AFF_E_LIMIT, "codebook index: %llu list entries", (unsigned long long)total);
    AFF_TRY(aff__realloc(&g->items, total, sizeof *g->items, "codebook index", err));
    uint32_t at = 0;
    for (int i = 0; i < g->cells; i++) {
        memcpy(g->items + at, b->slices[i].items, b->slices[i].count * sizeof *g->items);
        at += b->slices[i].count;
    }
    size_t cells = (size_t)g->cells * (size_t)g->cells * (size_t)g->cells * (size_t)g->cells;
    at = 0;
    for (size_t c = 0; c <= cells; c++) {
        uint32_t n = c < cells ? g->start[c] : 0;
        g->start[c] = at;
        at += n;
    }
    return AFF_OK;
}

static aff_status grid_build(aff_cb_grid *g, const float (*cb)[4], int cells, float lo, float step, float slack,
                             aff_pool *pool, aff_error *err)
{
    *g = (aff_cb_grid){.cells = cells, .lo = lo, .per_step = 1.0f / step, .cb = cb};
    build b = {.g = g, .slack = slack};
    size_t n = (size_t)cells;
    aff_status s = aff__calloc(&b.near, 4 * n * N, sizeof(float), "codebook index", err);
    if (s == AFF_OK) s = aff__calloc(&b.far, 4 * n * N, sizeof(float), "codebook index", err);
    if (s == AFF_OK) s = aff__calloc(&b.slices, n, sizeof(slice), "codebook index", err);
    if (s == AFF_OK) s = aff__calloc(&g->start, n * n * n * n + 1, sizeof(uint32_t), "codebook index", err);
    if (s == AFF_OK) {
        axis_tables(&b, step);
        aff__pool_run(pool, build_slice, &b, cells);
        s = join_slices(&b, err);
        for (int i = 0; i < cells; i++) free(b.slices[i].items);
    }
    free(b.near);
    free(b.far);
    free(b.slices);
    if (s != AFF_OK) aff__cb_grid_free(g);
    return s;
}

void aff__cb_grid_free(aff_cb_grid *g)
{
    free(g->start);
    free(g->items);
    g->start = NULL;
    g->items = NULL;
}

/* Covers the rounding of distances (a few 2^-24), of the bounds, and of a query that stands on a cell's edge. */
#define SLACK 1e-4f

aff_status aff__cb_grid_build_unit(aff_cb_grid *g, const aff_cb_table cb, aff_pool *pool, aff_error *err)
{
    /* Reaches a little past 1, so that 1 itself lies inside the last cell. */
    return grid_build(g, cb, 10, -1.001f, 0.2002f, SLACK, pool, err);
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
        s = grid_build(&ix->grid[v], ix->cb[v], 25, -2.5f, 5.0f / 25.0f, compat ? 0.0f : SLACK, pool, err);
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
