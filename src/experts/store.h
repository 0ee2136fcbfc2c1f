/* store.h - where the routed experts of a model come from, and in which layout kernels see them (design 2: one layout). Experts of a file that has the
 * kernels' layout (container dtypes 34 and 40, checkpoints) can be used in its mapping, as can those in memory; row-major ones (dtype 33) only
 * in slots, into which they are permuted. Which are in slots is the affair of tiers.h. A store does not change once it is made. */
#ifndef AFF_EXPERTS_STORE_H
#define AFF_EXPERTS_STORE_H
#include "backend/types.h"
#include "base/file.h"
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
/* The same records in a file that has nothing else, used in its mapping. */
aff_status aff__experts_from_file(aff_experts **out, const aff_clayer *l, int layers, int hidden, int inter, const uint8_t *codebook, const char *path,
                                  aff_error *err);
/* Experts that are made when they are asked for, into slots, and kept nowhere else: laid out as `l` says (dtype 34). `make` writes the record, l->stride
 * bytes, on any thread and the same at every call; `free`, NULL allowed, frees ctx with the store, or at once when this fails. */
typedef struct aff_expert_source {
    void *ctx;
    void (*make)(void *ctx, int layer, int e, uint8_t *record);
    void (*free)(void *ctx);
} aff_expert_source;
aff_status aff__experts_from_source(aff_experts **out, const aff_clayer *l, int layers, int hidden, int inter, const uint8_t *codebook,
                                    const aff_expert_source *from, aff_error *err);
void aff__experts_free(aff_experts *s);
/* Bytes of one expert. */
uint64_t aff__experts_bytes(const aff_experts *s);
/* Shape for the kernels; swiglu_limit is the caller's to set. */
aff_expert_shape aff__experts_shape(const aff_experts *s);
/* ---- slots: memory of this program that holds one expert in the kernels' layout ---- */

/* One for all experts of a store. */
typedef struct aff_slot_layout {
    aff_dtype dtype;      /* AFF_Q2P875G or AFF_MXFP4 */
    uint64_t bytes;       /* of a record */
    uint64_t pitch;       /* from slot to slot: bytes rounded up to 4096 */
    uint64_t plane[3][3]; /* where in the slot: gate, up, down; codes, fields, row scales (0 for MXFP4, which has none) */
    uint64_t size[3][3];  /* bytes of each */
} aff_slot_layout;
aff_slot_layout aff__experts_layout(const aff_experts *s);
aff_expert aff__slot_expert(const aff_slot_layout *y, const uint8_t *slot);
/* The layout of a record (spec container 4.1) for experts that have no file: planes in that order at multiples of 256. */
aff_slot_layout aff__slot_layout(aff_dtype dtype, int hidden, int inter);
/* Copies an expert's planes into a slot. */
void aff__slot_gather(const aff_slot_layout *y, const aff_expert *e, uint8_t *slot);

/* Experts can be used where they lie, in the file's mapping or in memory: all but row-major ones. */
bool aff__experts_in_place(const aff_experts *s);
/* Where that is; only then. */
aff_expert aff__experts_at(const aff_experts *s, int layer, int e);
/* Copies an expert into a slot (layout.bytes) by way of the mapping. For few experts: it fills the page cache. */
void aff__experts_copy(const aff_experts *s, int layer, int e, uint8_t *slot);

/* What an expert's slot is made of: bytes [off, off+bytes) of a file stand at `at` in the slot, or, of a row-major store (one piece), in a record
 * that aff__experts_arrange then turns into a slot. */
enum { AFF_MAX_PIECES = 9 };
typedef struct aff_piece {
    int file; /* aff__experts_file */
    uint64_t off, bytes, at;
} aff_piece;
int aff__experts_pieces(const aff_experts *s, int layer, int e, aff_piece out[AFF_MAX_PIECES]); /* 0: it is in memory only */
bool aff__experts_row_major(const aff_experts *s);
void aff__experts_arrange(const aff_experts *s, int layer, uint8_t *slot, const uint8_t *record);
/* Files that pieces are of: none when everything is in memory. */
typedef struct aff_expert_file {
    const char *path;
    const aff_map *map; /* as it was opened */
} aff_expert_file;
int aff__experts_files(const aff_experts *s);
aff_expert_file aff__experts_file(const aff_experts *s, int i);
int aff__experts_layers(const aff_experts *s);
int aff__experts_per_layer(const aff_experts *s);

/* Where the bytes of an expert that is used in place are at this moment: a file's page that the system has dropped counts as on disk. Only the
 * first page of the expert is asked for, with a call of the system: for displays, not for the token path. Thread safe. */
aff_tier aff__experts_tier(aff_experts *s, int layer, int e);
#endif
