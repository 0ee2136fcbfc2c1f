/* synthetic.h - networks without a file, for measuring speed and memory: the geometry and number formats of a real
 * model, weights from a generator. Behind aff__net_open (aff_net_options.synthetic), so everything after it sees a
 * network like any other. The text is noise; values are of a size that keeps activations finite through any number of
 * layers (every product has gain about 1).
 *
 * Weights depend on seed, tensor name and expert number alone. */
#ifndef AFF_MODEL_SYNTHETIC_H
#define AFF_MODEL_SYNTHETIC_H
#include "experts/store.h"
#include "model/config.h"

typedef struct aff_synthetic {
    const char *geometry; /* "flash": V4-Flash (hidden 4096, 43 layers, 256 experts); "tiny": that of models/tiny-v4 */
    int layers;           /* the first of them; 0: all */
    int experts;          /* routed experts a layer, at least the number of picks; 0: all */
    uint64_t seed;
    bool on_demand;          /* routed experts are made when they are asked for and used in slots only (experts/store.h) */
    const char *expert_file; /* not NULL: the trunk's experts are written there and used from there, as if they were a container's */
} aff_synthetic;

/* config.json of such a network, malloc'ed. AFF_E_INVALID for an unknown geometry or counts outside it. */
aff_status aff__synthetic_config(const aff_synthetic *s, char **json, aff_error *err);
/* Stages of the DSpark draft that the geometry has. */
enum { AFF_SYNTHETIC_STAGES = 3 };
/* The number format a release keeps the matrix of that name in. */
aff_dtype aff__synthetic_dtype(const char *name);
/* data of w->rows x w->cols in w->dtype; scale: FP8's tiles, else unused. */
void aff__synthetic_matrix(uint64_t seed, const char *name, const aff_weight *w, void *data, uint8_t *scale);
/* A small tensor: norms and scales 1, position biases random, the rest 0. */
void aff__synthetic_floats(uint64_t seed, const char *name, uint64_t n, float *out);
/* K distinct experts below E for every token. */
void aff__synthetic_hash(uint64_t seed, const char *name, const aff_config *c, int32_t *out);
/* Bytes of one routed expert (dtype 34), and `layers` layers of c->experts of them in memory. */
aff_status aff__synthetic_expert_bytes(const aff_config *c, uint64_t *bytes, aff_error *err);
aff_status aff__synthetic_experts(aff_experts **out, uint64_t seed, const char *prefix, int layers, const aff_config *c,
                                  aff_error *err);
/* The same made on demand, at the speed of memory: there is one record of random bits, and every expert has its planes turned round by a
 * distance of its own. */
aff_status aff__synthetic_experts_on_demand(aff_experts **out, uint64_t seed, const char *prefix, int layers, const aff_config *c, aff_error *err);
/* The same in a file, which is written anew, a layer at a time. */
aff_status aff__synthetic_experts_file(aff_experts **out, uint64_t seed, const char *prefix, int layers, const aff_config *c,
                                       const char *path, aff_error *err);
#endif
