/* The writer of gguf.h: keys and tensor entries collect in memory, data goes to its place in the file. */
#include "format/gguf.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 32 };

typedef struct bytes {
    uint8_t *p;
    uint64_t n, cap;
} bytes;

typedef struct declared {
    uint64_t offset, size; /* of its data, from the start of the data */
    char *name;
    bool written;
} declared;

struct aff_gguf_out {
    aff_outfile file;
    bool open;
    char *path;
    bytes keys, infos;
    uint64_t n_keys, n_tensors, cap_tensors, end; /* end: of the data declared so far */
    declared *tensor;
    uint64_t base; /* where the data starts in the file; 0 before begin */
};

static aff_status put(bytes *b, const void *data, uint64_t n, aff_error *err)
{
    if (n > b->cap - b->n) {
        const uint64_t cap = (b->cap + n) * 2;
        AFF_TRY(aff__realloc(&b->p, cap, 1, "head of a GGUF file", err));
        b->cap = cap;
    }
    if (n) memcpy(b->p + b->n, data, (size_t)n);
    b->n += n;
    return AFF_OK;
}

static aff_status put_number(bytes *b, uint64_t v, int n, aff_error *err)
{
    uint8_t le[8];
    for (int i = 0; i < n; i++) le[i] = (uint8_t)(v >> 8 * i);
    return put(b, le, (uint64_t)n, err);
}

static aff_status put_string(bytes *b, const char *s, aff_error *err)
{
    const uint64_t n = strlen(s);
    AFF_TRY(put_number(b, n, 8, err));
    return put(b, s, n, err);
}

aff_status aff__gguf_out_create(aff_gguf_out **out, const char *path, aff_error *err)
{
    aff_gguf_out *o;
    *out = NULL;
    AFF_TRY(aff__calloc(&o, 1, sizeof *o, path, err));
    const aff_status s = aff__strndup(&o->path, path, strlen(path), err);
    if (s != AFF_OK) {
        aff__gguf_out_abort(o);
        return s;
    }
    *out = o;
    return AFF_OK;
}

static aff_status put_key(aff_gguf_out *o, const char *key, aff_gguf_type type, aff_error *err)
{
    o->n_keys++;
    AFF_TRY(put_string(&o->keys, key, err));
    return put_number(&o->keys, (uint64_t)type, 4, err);
}

aff_status aff__gguf_out_u32(aff_gguf_out *o, const char *key, uint32_t v, aff_error *err)
{
    AFF_TRY(put_key(o, key, AFF_GGUF_U32, err));
    return put_number(&o->keys, v, 4, err);
}

aff_status aff__gguf_out_string(aff_gguf_out *o, const char *key, const char *s, aff_error *err)
{
    AFF_TRY(put_key(o, key, AFF_GGUF_STRING, err));
    return put_string(&o->keys, s, err);
}

aff_status aff__gguf_out_strings(aff_gguf_out *o, const char *key, const char *const *s, uint64_t n, aff_error *err)
{
    AFF_TRY(put_key(o, key, AFF_GGUF_ARRAY, err));
    AFF_TRY(put_number(&o->keys, AFF_GGUF_STRING, 4, err));
    AFF_TRY(put_number(&o->keys, n, 8, err));
    for (uint64_t i = 0; i < n; i++) AFF_TRY(put_string(&o->keys, s[i], err));
    return AFF_OK;
}

aff_status aff__gguf_out_tensor(aff_gguf_out *o, const char *name, int ndim, const uint64_t *dims, uint64_t *index,
                                aff_error *err)
{
    uint64_t size = sizeof(float);
    for (int i = 0; i < ndim; i++)
        if (!aff__mul_ok(size, dims[i], &size) || size > UINT64_MAX / 4)
            return aff__fail(err, AFF_E_LIMIT, "%s: tensor '%s': its size overflows", o->path, name);
    if (o->n_tensors == o->cap_tensors) {
        const uint64_t cap = o->cap_tensors ? 2 * o->cap_tensors : 64;
        AFF_TRY(aff__realloc(&o->tensor, cap, sizeof *o->tensor, o->path, err));
        o->cap_tensors = cap;
    }
    declared *t = &o->tensor[o->n_tensors];
    *t = (declared){.offset = o->end, .size = size};
    AFF_TRY(aff__strndup(&t->name, name, strlen(name), err));
    *index = o->n_tensors++;
    o->end += aff__align_up(size, ALIGN);
    AFF_TRY(put_string(&o->infos, name, err));
    AFF_TRY(put_number(&o->infos, (uint64_t)ndim, 4, err));
    for (int i = 0; i < ndim; i++) AFF_TRY(put_number(&o->infos, dims[i], 8, err));
    AFF_TRY(put_number(&o->infos, AFF_GGML_F32, 4, err));
    return put_number(&o->infos, t->offset, 8, err);
}

aff_status aff__gguf_out_begin(aff_gguf_out *o, aff_error *err)
{
    bytes head = {0};
    static const uint8_t zero[ALIGN];
    aff_status s = put(&head, "GGUF\3\0\0\0", 8, err);
    if (s == AFF_OK) s = put_number(&head, o->n_tensors, 8, err);
    if (s == AFF_OK) s = put_number(&head, o->n_keys, 8, err);
    if (s == AFF_OK) s = put(&head, o->keys.p, o->keys.n, err);
    if (s == AFF_OK) s = put(&head, o->infos.p, o->infos.n, err);
    if (s == AFF_OK) s = put(&head, zero, aff__align_up(head.n, ALIGN) - head.n, err);
    if (s == AFF_OK) s = aff__out_open(&o->file, o->path, err);
    if (s == AFF_OK) {
        o->open = true;
        o->base = head.n;
        s = aff__out_write(&o->file, head.p, head.n, 0, err);
    }
    free(head.p);
    return s;
}

aff_status aff__gguf_out_data(aff_gguf_out *o, uint64_t index, const float *data, aff_error *err)
{
    static const uint8_t zero[ALIGN];
    declared *t = &o->tensor[index];
    AFF_TRY(aff__out_write(&o->file, data, t->size, o->base + t->offset, err));
    AFF_TRY(
        aff__out_write(&o->file, zero, aff__align_up(t->size, ALIGN) - t->size, o->base + t->offset + t->size, err));
    t->written = true;
    return AFF_OK;
}

aff_status aff__gguf_out_finish(aff_gguf_out *o, aff_error *err)
{
    aff_status s = AFF_OK;
    for (uint64_t i = 0; i < o->n_tensors && s == AFF_OK; i++)
        if (!o->tensor[i].written)
            s = aff__fail(err, AFF_E_INVALID, "%s: tensor '%s' was never written", o->path, o->tensor[i].name);
    if (s == AFF_OK) {
        o->open = false;
        s = aff__out_commit(&o->file, err);
    }
    aff__gguf_out_abort(o);
    return s;
}

void aff__gguf_out_abort(aff_gguf_out *o)
{
    if (!o) return;
    if (o->open) aff__out_abort(&o->file);
    for (uint64_t i = 0; i < o->n_tensors; i++) free(o->tensor[i].name);
    free(o->tensor);
    free(o->keys.p);
    free(o->infos.p);
    free(o->path);
    free(o);
}
