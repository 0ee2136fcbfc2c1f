/* store.h - where the routed experts of a model lie, and in which layout kernels see them (design 2: one layout).
 *
 * This version keeps experts in host memory: in the file's mapping when the file has the kernels' layout (container dtypes 34 and
 * 40, checkpoints), in a permuted copy made at use when it is row-major (dtype 33). Copies are bounded: the least recently used one
 * that nobody holds makes room for the next. */
#ifndef AFF_EXPERTS_STORE_H
#define AFF_EXPERTS_STORE_H
#include "backend/types.h"
#include "experts/placement.h"
#include "format/container.h"
#include "format/safetensors.h"

typedef struct aff_experts aff_experts;

/* Layers of a container; it must outlive the store. All layers must have one dtype, shape and the `experts` count given;
 * codebook: the 8192 bytes of `__codebook` (needed for 33 and 34). */
aff_status aff__experts_from_container(aff_experts **out, const aff_container *c, int layers, int experts, int hidden, int inter, const uint8_t *codebook,
                                       aff_error *err);
/* "PREFIX<l>.ffn.experts.<e>.{w1,w3,w2}.{weight,scale}" of a checkpoint. */
aff_status aff__experts_from_checkpoint(aff_experts **out, const aff_ckpt *c, const char *prefix, int layers, int experts, int hidden, int inter,
                                        aff_error *err);
/* `layers` layers of l->n_experts records in memory, one after another, each laid out as `l` says (dtype 34). Takes `records` (malloc'ed)
 * over, also when it fails. */
aff_status aff__experts_from_records(aff_experts **out, const aff_clayer *l, int layers, int hidden, int inter, const uint8_t *codebook, uint8_t *records,
                                     aff_error *err);
void aff__experts_free(aff_experts *s);
/* Bytes of one expert; whether they are copied on use (row-major). */
uint64_t aff__experts_bytes(const aff_experts *s);
bool aff__experts_copied(const aff_experts *s);
/* Whether e is in memory in the kernels' layout now: false for a row-major one without a copy. */
bool aff__experts_resident(aff_experts *s, int layer, int e);
/* Shape for the kernels; swiglu_limit is the caller's to set. */
aff_expert_shape aff__experts_shape(const aff_experts *s);
/* Addresses of expert e of layer l, valid until aff__experts_put gives it back. Thread safe. */
aff_status aff__experts_get(aff_experts *s, int layer, int e, aff_expert *out, aff_error *err);
void aff__experts_put(aff_experts *s, int layer, int e);

/* Copies of row-major experts. 0 bytes each where the file has the kernels' layout. */
typedef struct aff_expert_copies {
    uint64_t each;         /* bytes of one */
    uint64_t limit;        /* bytes in all, UINT64_MAX: no bound */
    int64_t held, most;    /* copies now; at the worst moment */
    int64_t made, evicted; /* so far */
} aff_expert_copies;
aff_expert_copies aff__experts_copies(aff_experts *s);
/* Bounds the copies. Those in use at a time (the experts of one layer's pass) are kept even if they need more. */
void aff__experts_limit(aff_experts *s, uint64_t bytes);
/* Where an expert's bytes are at this moment: a file's page that the system has dropped counts as on disk. Only the first page of the
 * expert is asked for, with a call of the system: for displays, not for the token path. Thread safe. */
aff_tier aff__experts_tier(aff_experts *s, int layer, int e);
#endif
