/* container_disk.h - the bytes of a .aff file: records on disk and the layout rules that reader and writer share.
 * Internal to src/format; spec container 1 to 4, docs/container.md for our additions. */
#ifndef AFF_FORMAT_CONTAINER_DISK_H
#define AFF_FORMAT_CONTAINER_DISK_H
#include "format/container.h"

enum {
    AFF_C_HEADER = 192,
    AFF_C_NAME = 128,
    AFF_C_TENSOR = 208, /* one entry of the tensor directory */
    AFF_C_LAYER = 240,  /* one entry of the layer directory */
    AFF_C_PLANE_ALIGN = 256,
    AFF_C_RECORD_ALIGN = 4096,
    AFF_C_POOL_ALIGN = 2097152,
    AFF_C_FLAG_PROFILE = 1,
    AFF_C_HASH_HEAD = 40 /* bytes of the hash table before the blobs' hashes; 8 more follow the records' */
};

/* Bits of the required-features mask that this version understands: none is defined yet. */
#define AFF_C_KNOWN_FEATURES UINT64_C(0)

typedef struct aff_cheader {
    uint32_t version, flags;
    uint64_t meta_off, meta_size, tensor_dir_off, tensor_count, tensor_data_off, tensor_data_size, layer_dir_off,
        layer_count, pool_off, pool_size, profile_off, profile_size, file_size;
    bool extended; /* the mark of our additions is there; else the five below are 0 whatever the bytes say */
    uint64_t prov_off, prov_size, hash_off, hash_size, features;
} aff_cheader;

void aff__cheader_put(uint8_t out[AFF_C_HEADER], const aff_cheader *h);
/* False when the magic is not there; nothing else is checked. */
bool aff__cheader_get(aff_cheader *h, const uint8_t in[AFF_C_HEADER]);
void aff__ctensor_put(uint8_t out[AFF_C_TENSOR], const char *name, const aff_matdesc *m, uint64_t blob_off);
void aff__ctensor_get(const uint8_t in[AFF_C_TENSOR], aff_matdesc *m, uint64_t *blob_off); /* the name is in[0..128) */
void aff__clayer_put(uint8_t out[AFF_C_LAYER], uint32_t index, const aff_clayer *l);
void aff__clayer_get(const uint8_t in[AFF_C_LAYER], uint32_t *index, aff_clayer *l);
void aff__put64(uint8_t *out, uint64_t v);
uint64_t aff__get64(const uint8_t *in);
void aff__put32(uint8_t *out, uint32_t v);
uint32_t aff__get32(const uint8_t *in);

/* Offsets and sizes of a dense blob; *extent is its length up to the next blob. False if the shape does not suit the
 * dtype. */
bool aff__layout_blob(aff_matdesc *m, aff_dtype dtype, uint64_t rows, uint64_t cols, uint64_t *extent);
/* Descriptors and stride of an expert record. */
bool aff__layout_record(aff_clayer *l, aff_dtype dtype, uint64_t inter, uint64_t hidden);

/* The codebook of a file with experts of type `quant`, n bytes: a wrong size, an E4M3 exponent field outside 1..7 or a
 * number that is not finite is an error. */
aff_status aff__codebook_check(const char *path, uint32_t quant, const uint8_t *data, uint64_t n, aff_error *err);

/* The header of an open container (programs that print it). */
const aff_cheader *aff__container_header(const aff_container *c);
/* Byte 0 of the file. */
const uint8_t *aff__container_map(const aff_container *c);

/* The hash table: magic, algorithm, counts, hash of the front, then one hash per blob and per record and one of the
 * table. */
#define AFF_C_HASH_MAGIC "AFFHASH1"
static inline uint64_t aff__hash_table_size(uint64_t blobs, uint64_t records)
{
    return AFF_C_HASH_HEAD + 8 * (blobs + records) + 8;
}
/* XXH3-64 of the front: file bytes [0, tensor_data_off), then the provenance. */
uint64_t aff__front_hash(const uint8_t *front, uint64_t size, const void *prov, uint64_t prov_size);
#endif
