/* container_model.h - containers for tests: the dense tensors of a checkpoint under their container names, routed
 * experts made of pseudo-random codes (their values mean nothing; dtypes 33 and 34 with one seed hold the same
 * weights). */
#ifndef AFF_TEST_CONTAINER_MODEL_H
#define AFF_TEST_CONTAINER_MODEL_H
#include "format/dtype.h"
#include <stdint.h>

/* Writes `path` (NAME.aff) and its companion NAME.dspark.aff from the checkpoint folder. seed: of the codes; cb_seed:
 * of the companion's codebook (the main one has seed 1; another value makes a companion that does not fit: it
 * is of another checkpoint, too). Fails the
 * test on any error. */
void test_write_container(const char *ckpt, const char *path, aff_dtype experts, uint64_t seed, uint64_t cb_seed);
#endif
