/* Random parity checkpoints for tests, written at test time.
 *
 * The checkpoints are pure functions of integers (rule: head of tools/tiny/parity_models.py, which writes the same
 * bytes); tests/golden/parity-models.sha256 holds the hashes of all files. Golden data for them lies in tests/golden/.
 */
#ifndef AFF_TEST_PARITY_MODEL_H
#define AFF_TEST_PARITY_MODEL_H

#include <stddef.h>
#include <stdint.h>

/* Writes model `name` ("toy", "toy-clamp", "kernel"; "long": layers 0, 4, 128 with real row widths and 1,048,576
 * positions, no golden data) as a release directory: config.json, three shards, index.
 * `dir` is created if its parent exists; files in it are replaced. About 15 MB (toy) or 30 MB (kernel).
 * Returns 0, or -1 with a line on stderr. */
int aff_test_write_parity_model(const char *name, const char *dir);

/* Output number i of the generator named by `key`: u(i) of the rule. */
uint64_t aff_test_stream(const char *key, uint64_t i);

/* n(i) of the rule: about normal, mean 0, standard deviation 37837, in -131070 .. 131070. */
int32_t aff_test_noise(const char *key, uint64_t i);

#endif
