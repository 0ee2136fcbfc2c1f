/* check.h - every op of a backend against the CPU's on random operands with tails. */
#ifndef AFF_BACKEND_GPU_CHECK_H
#define AFF_BACKEND_GPU_CHECK_H
#include "backend/backend.h"

typedef struct aff_check_row {
    const char *op;
    int cases;
    int64_t values, differ; /* compared; not the same bits */
    double error;           /* worst max|a - b| / max|b| of a row */
    double allowed;         /* of `error`; 0: bits */
    bool ok;
    char note[160]; /* the first case that is not within it, or what failed */
} aff_check_row;

typedef void (*aff_check_fn)(void *ctx, const aff_check_row *row);

/* Calls `report` once for each op; cpu and dev are both `fast`. rounds: random cases of each op. An error is a device
 * that fails altogether; results that are wrong are in the rows. */
aff_status aff__check_ops(aff_backend *cpu, aff_backend *dev, int rounds, uint64_t seed, aff_check_fn report, void *ctx,
                          aff_error *err);
/* Decoding of every code, by bits: products with one-hot activations over all E4M3 bytes and E8M0 scales, and experts
 * whose codes run through all of both layouts. */
aff_status aff__check_decode(aff_backend *cpu, aff_backend *dev, uint64_t seed, aff_check_fn report, void *ctx,
                             aff_error *err);
#endif
