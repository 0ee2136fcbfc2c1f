/* gguf.h - GGUF version 3: metadata and tensors of a file, and a small writer (spec quantiser 8.2).
 *
 * File: "GGUF", u32 version, u64 tensors, u64 keys; keys with typed values; tensor names, dimensions (fastest first),
 * types and offsets; the data, which starts at the next multiple of `general.alignment` (32 without that key).
 * Little-endian. */
#ifndef AFF_FORMAT_GGUF_H
#define AFF_FORMAT_GGUF_H
#include "base/file.h"

typedef enum aff_gguf_type { /* of a key's value */
                             AFF_GGUF_U8,
                             AFF_GGUF_I8,
                             AFF_GGUF_U16,
                             AFF_GGUF_I16,
                             AFF_GGUF_U32,
                             AFF_GGUF_I32,
                             AFF_GGUF_F32,
                             AFF_GGUF_BOOL,
                             AFF_GGUF_STRING,
                             AFF_GGUF_ARRAY,
                             AFF_GGUF_U64,
                             AFF_GGUF_I64,
                             AFF_GGUF_F64
} aff_gguf_type;

enum { AFF_GGML_F32 = 0 }; /* type of a tensor's elements; others are offered by number */

typedef struct aff_gguf_tensor {
    const char *name; /* NUL-terminated, owned by the file; printable */
    uint32_t type;
    int ndim;         /* 0..4 */
    uint64_t dims[4]; /* fastest first, 1 beyond ndim, never 0 */
    const uint8_t
        *data; /* checked to hold `size` bytes; any alignment. NULL for element types other than plain numbers */
    uint64_t size;
} aff_gguf_tensor;

typedef struct aff_gguf aff_gguf;

/* Maps and checks `path`. Errors: another version, counts or extents past the end, unknown value types, nested arrays,
 * duplicate keys or tensors, names that are empty or not printable, overlapping or misaligned tensors. */
aff_status aff__gguf_open(aff_gguf **out, const char *path, aff_error *err);
/* The same over bytes of the caller, which stay as they are until close. */
aff_status aff__gguf_open_memory(aff_gguf **out, const void *data, size_t size, const char *name, aff_error *err);
void aff__gguf_close(aff_gguf *g);
uint64_t aff__gguf_tensors(const aff_gguf *g);
const aff_gguf_tensor *aff__gguf_tensor(const aff_gguf *g, uint64_t i);     /* sorted by name */
const aff_gguf_tensor *aff__gguf_find(const aff_gguf *g, const char *name); /* NULL if absent */
/* A key's value: an unsigned or non-negative signed integer of any width, or a string (not NUL-terminated). False when
 * the key is absent or of another type. */
bool aff__gguf_uint(const aff_gguf *g, const char *key, uint64_t *out);
bool aff__gguf_string(const aff_gguf *g, const char *key, const char **s, size_t *n);

/* ---- writer: keys and tensors are declared, then begin, then the data of every tensor in any order, then finish. ----
 */
typedef struct aff_gguf_out aff_gguf_out;
aff_status aff__gguf_out_create(aff_gguf_out **out, const char *path, aff_error *err);
aff_status aff__gguf_out_u32(aff_gguf_out *o, const char *key, uint32_t v, aff_error *err);
aff_status aff__gguf_out_string(aff_gguf_out *o, const char *key, const char *s, aff_error *err);
aff_status aff__gguf_out_strings(aff_gguf_out *o, const char *key, const char *const *s, uint64_t n, aff_error *err);
/* A float32 tensor of ndim 1..4 dimensions, fastest first; *index is what aff__gguf_out_data takes. */
aff_status aff__gguf_out_tensor(aff_gguf_out *o, const char *name, int ndim, const uint64_t *dims, uint64_t *index,
                                aff_error *err);
aff_status aff__gguf_out_begin(aff_gguf_out *o, aff_error *err); /* the temporary file and its head */
aff_status aff__gguf_out_data(aff_gguf_out *o, uint64_t index, const float *data, aff_error *err);
/* Refuses if a tensor's data is missing; renames the file into place. Frees o in every case. */
aff_status aff__gguf_out_finish(aff_gguf_out *o, aff_error *err);
void aff__gguf_out_abort(aff_gguf_out *o);
#endif
