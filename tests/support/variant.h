/* variant.h - a checkpoint folder that differs from another in one place, for tests of what the loader refuses. */
#ifndef AFF_TEST_VARIANT_H
#define AFF_TEST_VARIANT_H
#include "format/safetensors.h"

typedef struct variant {
    const char *tensor; /* the tensor concerned; NULL: none */
    bool drop;          /* leave it out */
    const char *dtype;  /* declare another dtype of the same element size, e.g. "F16" for BF16 */
    bool flip;          /* declare the shape [n, 1] for [1, n] or a vector, [cols, rows] for a matrix */
    const void *patch;  /* bytes to put at patch_at */
    size_t patch_size, patch_at;
    const char *config_key, *config_value; /* a key of config.json and its new value as JSON; value NULL removes it */
} variant;

/* Writes DIR/config.json and DIR/model.safetensors from the folder `from`. Fails the test on any error. */
void test_write_variant(const char *from, const char *dir, const variant *v);
#endif
