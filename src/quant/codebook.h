/* codebook.h - the 2 x 1024 table of 4-vectors that routed experts are coded with (spec quantiser 5, 6; container 4.3).
 *
 * Packed form, as stored: 2 variants x 1024 entries x 4 E4M3 bytes, component 0 first. Every byte has an exponent field
 * of 1..7, so that adding a block's exponent (0..7) to it never carries. */
#ifndef AFF_QUANT_CODEBOOK_H
#define AFF_QUANT_CODEBOOK_H
#include "base/status.h"
#include "base/threads.h"

enum { AFF_CB_VARIANTS = 2, AFF_CB_ENTRIES = 1024, AFF_CB_BYTES = AFF_CB_VARIANTS * AFF_CB_ENTRIES * 4 };

typedef float aff_cb_table[AFF_CB_ENTRIES][4]; /* one variant, unpacked */

/* ---- the stored form ---- */

/* Nearest E4M3 byte with exponent field 1..7; a tie goes to the lower byte (spec 5.4). */
uint8_t aff__cb_round(float f);
void aff__cb_pack(aff_cb_table cb[AFF_CB_VARIANTS], uint8_t out[AFF_CB_BYTES]);
void aff__cb_unpack(const uint8_t in[AFF_CB_BYTES], aff_cb_table out[AFF_CB_VARIANTS]);
/* True if every byte has an exponent field of 1..7. */
bool aff__cb_valid(const uint8_t in[AFF_CB_BYTES]);
/* The same table as integers in units of 2^-9 for kernels: [variant][entry][4], magnitudes 8..960. */
void aff__codebook_ints(const uint8_t cb[AFF_CB_BYTES], int16_t out[AFF_CB_VARIANTS][AFF_CB_ENTRIES][4]);

/* ---- nearest entry ---- */

/* A uniform grid over [lo, lo + cells*step]^4; each cell lists, ascending, every entry that can be the nearest of a
 * point in it. A query outside the grid scans the whole table. */
typedef struct aff_cb_grid {
    int cells; /* per axis */
    float lo, per_step;
    float first; /* queries are inside from this cell coordinate on: 0, or just above -1 where truncation is copied */
    const float (*cb)[4]; /* [AFF_CB_ENTRIES], not owned */
    struct {
        uint32_t at, n;
    } * lists;       /* [cells^4] into items */
    uint16_t *items; /* [total] */
    uint32_t total;
} aff_cb_grid;

typedef enum aff_cb_grid_kind {
    AFF_CB_GRID_EXACT, /* 25 cells over [-2.5, 2.5]: the answer is that of a full scan everywhere */
    AFF_CB_GRID_COMPAT /* the same with the earlier tool's truncation: points just outside use the edge cell (spec 6) */
} aff_cb_grid_kind;

typedef struct aff_cb_index {
    aff_cb_table cb[AFF_CB_VARIANTS];
    aff_cb_grid grid[AFF_CB_VARIANTS];
} aff_cb_index;

aff_status aff__cb_index_create(aff_cb_index **out, const uint8_t cb[AFF_CB_BYTES], aff_cb_grid_kind kind,
                                aff_pool *pool, aff_error *err);
void aff__cb_index_free(aff_cb_index *ix);

/* ((c0-x0)^2 + (c1-x1)^2) + ... in float, p ascending. */
static inline float aff__cb_distance(const float c[4], const float x[4])
{
    float s = 0;
    for (int p = 0; p < 4; p++) {
        float d = c[p] - x[p];
        s += d * d;
    }
    return s;
}

/* Lowest-numbered entry of the smallest distance, which goes to *dist. */
uint32_t aff__cb_grid_nearest(const aff_cb_grid *g, const float x[4], float *dist);
/* The same without the grid. */
uint32_t aff__cb_scan_nearest(const aff_cb_table cb, const float x[4], float *dist);

/* ---- fit ---- */

/* Normalised 16-weight blocks drawn from checkpoint matrices. */
typedef struct aff_cb_samples {
    float *x; /* [blocks][16] */
    uint64_t blocks, cap;
} aff_cb_samples;

/* Adds the sample rows of one matrix w [rows x cols] (spec 5.1); cols a multiple of 16. */
aff_status aff__cb_samples_add(aff_cb_samples *s, const float *w, uint64_t rows, uint64_t cols, aff_error *err);
void aff__cb_samples_free(aff_cb_samples *s);

/* Fits both variants (spec 5.2, 5.3) and rounds them (5.4). A pure function of the samples: the pool only shares out
 * the nearest-entry searches, every sum runs in sample order. No samples is an error. */
aff_status aff__cb_fit(const aff_cb_samples *s, aff_pool *pool, uint8_t out[AFF_CB_BYTES], aff_error *err);

/* For the fit: a grid over [-1, 1]^4 whose answers are those of a full scan. Free with aff__cb_grid_free. */
aff_status aff__cb_grid_build_unit(aff_cb_grid *g, const aff_cb_table cb, aff_pool *pool, aff_error *err);
void aff__cb_grid_free(aff_cb_grid *g);
#endif
