/* imatrix.h - importance of input columns per expert: which columns of a matrix see large inputs (spec quantiser 8).
 *
 * Read from llama.cpp's GGUF imatrix (`blk.<l>.ffn_{gate,up,down,gate_up}_exps.weight.{in_sum2,counts}`) or its older
 * .dat. The file must be of the model it is used for: an entry for routed experts that does not fit is an error that
 * names it. Files of our own may hold whole second moments of the inputs besides (engine/collect.h). */
#ifndef AFF_QUANT_IMATRIX_H
#define AFF_QUANT_IMATRIX_H
#include "base/status.h"

typedef enum aff_im_part { AFF_IM_GATE, AFF_IM_UP, AFF_IM_DOWN } aff_im_part; /* w1, w3, w2: the order of aff_qmatrix */

/* The model's, from config.json: all its trunk layers even where fewer are quantised. */
typedef struct aff_im_shape {
    uint32_t layers, experts;
    uint64_t hidden, inter; /* columns of gate and up; of down */
} aff_im_shape;

typedef struct aff_im_info {
    bool legacy;                    /* a .dat */
    bool has_counts;                /* false: legacy, or converted from it: how often an expert was used is lost */
    uint64_t hash;                  /* XXH3-64 of the file's bytes */
    uint64_t present;               /* of layers*3 (layer, part) pairs: those the file has */
    uint64_t missing;               /* the others: weight 1 */
    uint64_t moments, moments_down; /* layers with second moments: of gate and up or down in all, of down */
    uint64_t unseen;                /* (layer, expert) pairs that the file covers but has no statistics for: weight 1 */
} aff_im_info;

typedef struct aff_imatrix aff_imatrix;

/* Maps `path` and checks every number. Errors (AFF_E_FORMAT, the entry named): damaged file, wrong length, NaN,
 * infinity, negative, in_sum2 without counts or the reverse, an entry given twice (also through the fused name), a
 * layer the model does not have; a file without any entry for this model's experts. */
aff_status aff__imatrix_open(aff_imatrix **out, const char *path, const aff_im_shape *shape, aff_error *err);
/* The same over bytes of the caller, which stay as they are until close. */
aff_status aff__imatrix_open_memory(aff_imatrix **out, const void *data, size_t size, const char *name,
                                    const aff_im_shape *shape, aff_error *err);
void aff__imatrix_close(aff_imatrix *m);
const aff_im_info *aff__imatrix_info(const aff_imatrix *m);
/* Importance of the columns of one matrix, out[hidden] (gate, up) or out[inter] (down), finite, >= 0, mean 1, in the
 * operation order of spec 8.1. False: no statistics (missing or never seen), out is all 1. Any thread. */
bool aff__imatrix_weights(const aff_imatrix *m, uint32_t layer, uint32_t expert, aff_im_part part, float *out);
/* Second moments of what one matrix multiplies, as aff__feedback_factor takes them; gate and up of a layer's experts
 * share one. NULL: none, or the expert was never used. Any thread. */
const uint8_t *aff__imatrix_moments(const aff_imatrix *m, uint32_t layer, uint32_t expert, aff_im_part part);
/* Popularity [layers][experts] (spec 8.4): the raw counts of gate, 0 for layers without. NULL without has_counts. */
const float *aff__imatrix_profile(const aff_imatrix *m);
#endif
