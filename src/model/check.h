/* check.h - a device's layers against the CPU's, each fed the CPU's input. */
#ifndef AFF_MODEL_CHECK_H
#define AFF_MODEL_CHECK_H
#include "backend/gpu/check.h"
#include "model/net.h"

/* Opens `path`, or with `synthetic` (else NULL) a network without a file, in fast, and runs `rows` positions of random ids layer by layer on the CPU and on `dev` (taken over), in
 * passes of few and of many rows. Rows of the table: what spec model-v4 16.2 names; routed experts by bits on the CPU's
 * picks; at the end free-running logits. */
struct aff_synthetic;
aff_status aff__check_model(const char *path, const struct aff_synthetic *synthetic, aff_backend *dev, int rows, int threads, uint64_t seed,
                            aff_check_fn report, void *ctx, aff_error *err);
#endif
