/* safetensors.h - checkpoints: a folder with config.json and sharded safetensors files (spec quantiser 2).
 *
 * File: u64 little-endian header length, JSON header, data; offsets count from the end of the header. Every extent is
 * verified before use; shards are mapped read-only and stay mapped until close. */
#ifndef AFF_FORMAT_SAFETENSORS_H
#define AFF_FORMAT_SAFETENSORS_H
#include "base/status.h"

typedef enum aff_st_dtype {
    AFF_ST_BOOL,
    AFF_ST_U8,
    AFF_ST_I8,
    AFF_ST_I16,
    AFF_ST_U16,
    AFF_ST_F16,
    AFF_ST_BF16,
    AFF_ST_I32,
    AFF_ST_U32,
    AFF_ST_F32,
    AFF_ST_F64,
    AFF_ST_I64,
    AFF_ST_U64,
    AFF_ST_F8_E4M3,
    AFF_ST_F8_E5M2,
    AFF_ST_F8_E8M0
} aff_st_dtype;
const char *aff__st_dtype_name(aff_st_dtype t);
unsigned aff__st_dtype_size(aff_st_dtype t);

typedef struct aff_st_tensor {
    const char *name; /* owned by the checkpoint */
    aff_st_dtype dtype;
    int ndim; /* 0..8 */
    uint64_t shape[8];
    const uint8_t *data; /* into the mapping, not necessarily aligned */
    uint64_t size;       /* bytes = product of shape * element size, checked */
    int shard;           /* index for aff__ckpt_shard_path */
} aff_st_tensor;

typedef struct aff_ckpt aff_ckpt;

/* Opens DIR: model.safetensors.index.json with its shards, or a single model.safetensors. Errors: missing or truncated
 * shard, header past the end, unknown dtype, overflowing shape, byte size unlike shape, overlapping extents or
 * duplicate names, index naming a tensor that its shard lacks. Tensors of a shard that the index does not mention are
 * offered too; holes between extents are allowed. */
aff_status aff__ckpt_open(aff_ckpt **out, const char *dir, aff_error *err);
/* A single safetensors file (golden data, tests). */
aff_status aff__ckpt_open_file(aff_ckpt **out, const char *path, aff_error *err);
/* The same from memory (fuzzing); data must outlive the checkpoint. */
aff_status aff__ckpt_open_memory(aff_ckpt **out, const void *data, size_t size, const char *name, aff_error *err);
void aff__ckpt_close(aff_ckpt *c);

const char *aff__ckpt_dir(const aff_ckpt *c);
/* By exact name, NULL if absent. */
const aff_st_tensor *aff__ckpt_find(const aff_ckpt *c, const char *name);
/* All tensors, sorted by name. */
uint64_t aff__ckpt_count(const aff_ckpt *c);
const aff_st_tensor *aff__ckpt_at(const aff_ckpt *c, uint64_t i);
int aff__ckpt_shards(const aff_ckpt *c);
const char *aff__ckpt_shard_path(const aff_ckpt *c, int shard);
const struct aff_map *aff__ckpt_shard_map(const aff_ckpt *c, int shard); /* base/file.h; data NULL over bytes of the caller */
#endif
