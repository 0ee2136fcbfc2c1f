/* rows.h - how the rows of a sequence's state lie in memory (spec model-v4 10.2).
 *
 * KV and compressed rows are on an E4M3 grid per 64 values after A8, indexer keys on an E2M1 grid per 32 after Hadamard
 * and A4, so codes with one power of two a group hold them without loss. A row is
 *   codes   [groups of 64] one E4M3 byte a value, or [groups of 32] one E2M1 nibble a value: byte j of a group of 32
 *           holds value j (low) and value j + 16 (high)
 *   scales  one E8M0 byte a group, padded with zeros to a multiple of 4
 *   float32 what no group covers, except
 *   bf16    the rope tail in `fast`, padded to a multiple of 4
 * Flash: 448 + 8 + 128 = 584 bytes a KV row in `fast`, 712 in `sim` (whose tail is float32), 68 an indexer key. */
#ifndef AFF_QUANT_ROWS_H
#define AFF_QUANT_ROWS_H
#include "affinity.h" /* aff_numerics */
#include <stdint.h>

enum { AFF__A8_GROUP = 64, AFF__A4_GROUP = 32 };

typedef struct aff_rowfmt {
    int n;                    /* values */
    int coded;                /* values in front that are codes, a multiple of group */
    int group;                /* AFF__A8_GROUP (E4M3), AFF__A4_GROUP (E2M1), or 0 when nothing is coded */
    int bf16;                 /* values at the end that are bf16 */
    int scales, floats, tail; /* byte offsets of those parts */
    int bytes;                /* of a row */
} aff_rowfmt;

/* Plain float32. */
aff_rowfmt aff__rowfmt_f32(int n);
/* KV rows of n values with a rope tail of `rope`; indexer keys of n values. `math` has plain float32. */
aff_rowfmt aff__rowfmt_kv(aff_numerics num, int n, int rope);
aff_rowfmt aff__rowfmt_key(aff_numerics num, int n);

/* A row that has been through the format's quantiser survives encode and decode bit for bit (a NaN as some NaN; a group
 * with an infinity becomes NaN, since codes have none). Other values are rounded to the grid. */
void aff__row_encode(const aff_rowfmt *f, const float *x, uint8_t *row);
void aff__row_decode(const aff_rowfmt *f, const uint8_t *row, float *x);
#endif
