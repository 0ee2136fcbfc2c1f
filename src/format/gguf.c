#include "format/gguf.h"
#include "base/mem.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 32, MIN_KV = 13, MIN_TENSOR = 24 }; /* bytes of the shortest key and tensor entries */

typedef struct gguf_kv {
    char *key;
    uint32_t type;
    const uint8_t *value; /* of a string: its bytes */
    uint64_t size;
} gguf_kv;

struct aff_gguf {
    char *path;
    aff_map map; /* of a file; empty when the bytes are the caller's */
    const uint8_t *bytes;
    uint64_t size;
    gguf_kv *kv; /* sorted by key once open */
    uint64_t n_kv;
    aff_gguf_tensor *tensor; /* sorted by name once open; data holds the offset's place until then */
    uint64_t n_tensors;
};

/* ---- bytes ---- */

/* Where the reader stands; what: the part of the file that it is in, for errors. */
typedef struct cursor {
    const aff_gguf *g;
    uint64_t at;
    const char *what;
} cursor;

static aff_status need(const cursor *c, uint64_t n, aff_error *err)
{
    if (aff__range_ok(c->at, n, c->g->size)) return AFF_OK;
    return aff__fail(err, AFF_E_FORMAT,
                     "%s: %s at byte %" PRIu64 ": expected %" PRIu64 " more bytes, the file has %" PRIu64, c->g->path,
                     c->what, c->at, n, c->g->size);
}

static uint64_t little(const uint8_t *p, int n)
{
    uint64_t v = 0;
    while (n--) v = v << 8 | p[n];
    return v;
}

static aff_status get32(cursor *c, uint32_t *v, aff_error *err)
{
    AFF_TRY(need(c, 4, err));
    *v = (uint32_t)little(c->g->bytes + c->at, 4);
    c->at += 4;
    return AFF_OK;
}

static aff_status get64(cursor *c, uint64_t *v, aff_error *err)
{
    AFF_TRY(need(c, 8, err));
    *v = little(c->g->bytes + c->at, 8);
    c->at += 8;
    return AFF_OK;
}

/* A name: printable, so that it can stand in an error, and NUL-terminated. */
static aff_status get_name(cursor *c, char **out, aff_error *err)
{
    uint64_t n;
    AFF_TRY(get64(c, &n, err));
    if (n == 0 || n > 65535)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: %s at byte %" PRIu64 ": expected a name of 1 to 65535 bytes, got %" PRIu64, c->g->path,
                         c->what, c->at - 8, n);
    AFF_TRY(need(c, n, err));
    for (uint64_t i = 0; i < n; i++)
        if (c->g->bytes[c->at + i] < ' ' || c->g->bytes[c->at + i] == 127)
            return aff__fail(err, AFF_E_FORMAT, "%s: %s at byte %" PRIu64 ": its name has a control character",
                             c->g->path, c->what, c->at + i);
    AFF_TRY(aff__strndup(out, (const char *)c->g->bytes + c->at, (size_t)n, err));
    c->at += n;
    return AFF_OK;
}

/* ---- keys ---- */

static unsigned value_size(uint32_t type)
{
    static const unsigned char sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof sizes ? sizes[type] : 0;
}

static aff_status skip_string(cursor *c, aff_error *err)
{
    uint64_t n;
    AFF_TRY(get64(c, &n, err));
    AFF_TRY(need(c, n, err));
    c->at += n;
    return AFF_OK;
}

static aff_status bad_type(const cursor *c, const char *key, uint32_t type, aff_error *err)
{
    return aff__fail(err, AFF_E_FORMAT, "%s: key '%s': value type %u is unknown or not supported here", c->g->path, key,
                     type);
}

static aff_status skip_array(cursor *c, const char *key, aff_error *err)
{
    uint32_t type;
    uint64_t n, bytes;
    AFF_TRY(get32(c, &type, err));
    AFF_TRY(get64(c, &n, err));
    if (type == AFF_GGUF_STRING) {
        for (; n; n--) AFF_TRY(skip_string(c, err)); /* each is at least 8 bytes long: ends with the file */
        return AFF_OK;
    }
    if (!value_size(type)) return bad_type(c, key, type, err);
    if (!aff__mul_ok(n, value_size(type), &bytes)) bytes = UINT64_MAX;
    AFF_TRY(need(c, bytes, err));
    c->at += bytes;
    return AFF_OK;
}

static aff_status get_kv(cursor *c, gguf_kv *kv, aff_error *err)
{
    AFF_TRY(get_name(c, &kv->key, err));
    AFF_TRY(get32(c, &kv->type, err));
    uint64_t start = c->at;
    if (kv->type == AFF_GGUF_STRING) {
        AFF_TRY(skip_string(c, err));
        start += 8;
    } else if (kv->type == AFF_GGUF_ARRAY) {
        AFF_TRY(skip_array(c, kv->key, err));
    } else {
        if (!value_size(kv->type)) return bad_type(c, kv->key, kv->type, err);
        AFF_TRY(need(c, value_size(kv->type), err));
        c->at += value_size(kv->type);
    }
    kv->value = c->g->bytes + start;
    kv->size = c->at - start;
    return AFF_OK;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const gguf_kv *)a)->key, ((const gguf_kv *)b)->key);
}

static const gguf_kv *find_kv(const aff_gguf *g, const char *key)
{
    gguf_kv want = {.key = (char *)(uintptr_t)key};
    return g->n_kv ? bsearch(&want, g->kv, (size_t)g->n_kv, sizeof *g->kv, by_key) : NULL;
}

static aff_status read_keys(aff_gguf *g, cursor *c, uint64_t n, aff_error *err)
{
    if (n > (g->size - c->at) / MIN_KV)
        return aff__fail(err, AFF_E_FORMAT, "%s: %" PRIu64 " keys announced, the file has %" PRIu64 " bytes", g->path,
                         n, g->size);
    AFF_TRY(aff__calloc(&g->kv, n, sizeof *g->kv, g->path, err));
    c->what = "key";
    while (g->n_kv < n) {
        const aff_status s = get_kv(c, &g->kv[g->n_kv], err);
        if (g->kv[g->n_kv].key) g->n_kv++; /* to be freed */
        AFF_TRY(s);
    }
    if (n) qsort(g->kv, (size_t)n, sizeof *g->kv, by_key);
    for (uint64_t i = 1; i < n; i++)
        if (by_key(&g->kv[i - 1], &g->kv[i]) == 0)
            return aff__fail(err, AFF_E_FORMAT, "%s: key '%s' is there twice", g->path, g->kv[i].key);
    return AFF_OK;
}

/* ---- tensors ---- */

/* Bytes of an element of ggml's plain types; 0 for the block formats, which nothing here reads. */
static unsigned element_size(uint32_t type)
{
    switch (type) {
    case 0:
        return 4; /* F32 */
    case 1:
        return 2; /* F16 */
    case 24:
        return 1; /* I8 */
    case 25:
        return 2; /* I16 */
    case 26:
        return 4; /* I32 */
    case 27:
        return 8; /* I64 */
    case 28:
        return 8; /* F64 */
    case 30:
        return 2; /* BF16 */
    default:
        return 0;
    }
}

/* *offset: where its data starts, from the start of the data. */
static aff_status get_tensor(cursor *c, aff_gguf_tensor *t, uint64_t *offset, aff_error *err)
{
    uint32_t n;
    char *name = NULL;
    const char *path = c->g->path;
    AFF_TRY(get_name(c, &name, err));
    t->name = name;
    AFF_TRY(get32(c, &n, err));
    if (n > 4)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected at most 4 dimensions, got %u", path, name, n);
    t->ndim = (int)n;
    t->size = 1;
    for (uint32_t i = 0; i < 4; i++) {
        t->dims[i] = 1;
        if (i < n) AFF_TRY(get64(c, &t->dims[i], err));
        if (t->dims[i] == 0 || !aff__mul_ok(t->size, t->dims[i], &t->size))
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': dimension %u is 0 or the product overflows", path,
                             name, i);
    }
    AFF_TRY(get32(c, &t->type, err));
    AFF_TRY(get64(c, offset, err));
    if (!aff__mul_ok(t->size, element_size(t->type), &t->size))
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': its size overflows", path, name);
    return AFF_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const aff_gguf_tensor *)a)->name, ((const aff_gguf_tensor *)b)->name);
}

static int by_place(const void *a, const void *b)
{
    const aff_gguf_tensor *x = a, *y = b;
    return x->data != y->data ? (x->data > y->data) - (x->data < y->data) : (x->size > y->size) - (x->size < y->size);
}

/* Turns offsets into addresses once it is known where the data starts. */
static aff_status place(aff_gguf *g, const uint64_t *offset, uint64_t base, uint64_t align, aff_error *err)
{
    const uint64_t room = base < g->size ? g->size - base : 0;
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        aff_gguf_tensor *t = &g->tensor[i];
        if (offset[i] % align)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': offset %" PRIu64 " is no multiple of %" PRIu64,
                             g->path, t->name, offset[i], align);
        if (!aff__range_ok(offset[i], t->size, room))
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: tensor '%s': %" PRIu64 " bytes at %" PRIu64 " pass the end of the data (%" PRIu64 ")",
                             g->path, t->name, t->size, offset[i], room);
        t->data = t->size ? g->bytes + base + offset[i] : NULL;
    }
    return AFF_OK;
}

static aff_status check_tensors(aff_gguf *g, aff_error *err)
{
    if (!g->n_tensors) return AFF_OK;
    qsort(g->tensor, (size_t)g->n_tensors, sizeof *g->tensor, by_place);
    const aff_gguf_tensor *t = g->tensor;
    for (uint64_t i = 1; i < g->n_tensors; i++)
        if (t[i - 1].size && t[i].data < t[i - 1].data + t[i - 1].size)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensors '%s' and '%s' overlap", g->path, t[i - 1].name, t[i].name);
    qsort(g->tensor, (size_t)g->n_tensors, sizeof *g->tensor, by_name);
    for (uint64_t i = 1; i < g->n_tensors; i++)
        if (by_name(&t[i - 1], &t[i]) == 0)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is there twice", g->path, t[i].name);
    return AFF_OK;
}

static aff_status read_tensors(aff_gguf *g, cursor *c, uint64_t n, aff_error *err)
{
    uint64_t *offset, align = ALIGN;
    if (find_kv(g, "general.alignment") &&
        (!aff__gguf_uint(g, "general.alignment", &align) || !align || (align & (align - 1)) || align > 1u << 30))
        return aff__fail(err, AFF_E_FORMAT, "%s: key 'general.alignment': expected a power of two", g->path);
    if (n > (g->size - c->at) / MIN_TENSOR)
        return aff__fail(err, AFF_E_FORMAT, "%s: %" PRIu64 " tensors announced, the file has %" PRIu64 " bytes",
                         g->path, n, g->size);
    AFF_TRY(aff__calloc(&g->tensor, n, sizeof *g->tensor, g->path, err));
    AFF_TRY(aff__calloc(&offset, n, sizeof *offset, g->path, err));
    c->what = "tensor";
    aff_status s = AFF_OK;
    for (uint64_t i = 0; i < n && s == AFF_OK; i++) {
        s = get_tensor(c, &g->tensor[i], &offset[i], err);
        if (g->tensor[i].name) g->n_tensors++;
    }
    if (s == AFF_OK) s = place(g, offset, aff__align_up(c->at, align), align, err);
    free(offset);
    return s == AFF_OK ? check_tensors(g, err) : s;
}

/* ---- opening ---- */

static aff_status read_all(aff_gguf *g, aff_error *err)
{
    cursor c = {g, 0, "head"};
    uint32_t magic, version;
    uint64_t tensors, keys;
    AFF_TRY(get32(&c, &magic, err));
    AFF_TRY(get32(&c, &version, err));
    if (magic != 0x46554747u) return aff__fail(err, AFF_E_FORMAT, "%s: not a GGUF file", g->path);
    if (version != 3)
        return aff__fail(err, AFF_E_FORMAT, "%s: expected GGUF version 3, got %s%u", g->path,
                         version == 3u << 24 ? "big-endian, " : "", version);
    AFF_TRY(get64(&c, &tensors, err));
    AFF_TRY(get64(&c, &keys, err));
    AFF_TRY(read_keys(g, &c, keys, err));
    return read_tensors(g, &c, tensors, err);
}

static aff_status open_bytes(aff_gguf **out, aff_map map, const uint8_t *data, uint64_t size, const char *name,
                             aff_error *err)
{
    aff_gguf *g = NULL;
    aff_status s = aff__calloc(&g, 1, sizeof *g, name, err);
    if (s != AFF_OK) {
        aff__map_close(&map);
        return s;
    }
    *g = (aff_gguf){.map = map, .bytes = data, .size = size};
    s = aff__strndup(&g->path, name, strlen(name), err);
    if (s == AFF_OK) s = read_all(g, err);
    if (s != AFF_OK) {
        aff__gguf_close(g);
        return s;
    }
    *out = g;
    return AFF_OK;
}

aff_status aff__gguf_open(aff_gguf **out, const char *path, aff_error *err)
{
    aff_map map;
    *out = NULL;
    AFF_TRY(aff__map_open(&map, path, err));
    return open_bytes(out, map, map.data, map.size, path, err);
}

aff_status aff__gguf_open_memory(aff_gguf **out, const void *data, size_t size, const char *name, aff_error *err)
{
    *out = NULL;
    return open_bytes(out, (aff_map){0}, data, size, name, err);
}

void aff__gguf_close(aff_gguf *g)
{
    if (!g) return;
    for (uint64_t i = 0; i < g->n_kv; i++) free(g->kv[i].key);
    for (uint64_t i = 0; i < g->n_tensors; i++) free((char *)(uintptr_t)g->tensor[i].name);
    free(g->kv);
    free(g->tensor);
    free(g->path);
    aff__map_close(&g->map);
    free(g);
}

uint64_t aff__gguf_tensors(const aff_gguf *g)
{
    return g->n_tensors;
}
const aff_gguf_tensor *aff__gguf_tensor(const aff_gguf *g, uint64_t i)
{
    return i < g->n_tensors ? &g->tensor[i] : NULL;
}

const aff_gguf_tensor *aff__gguf_find(const aff_gguf *g, const char *name)
{
    aff_gguf_tensor want = {.name = name};
    return g->n_tensors ? bsearch(&want, g->tensor, (size_t)g->n_tensors, sizeof *g->tensor, by_name) : NULL;
}

bool aff__gguf_uint(const aff_gguf *g, const char *key, uint64_t *out)
{
    const gguf_kv *kv = find_kv(g, key);
    if (!kv) return false;
    const bool is_signed =
        kv->type == AFF_GGUF_I8 || kv->type == AFF_GGUF_I16 || kv->type == AFF_GGUF_I32 || kv->type == AFF_GGUF_I64;
    const bool is_unsigned =
        kv->type == AFF_GGUF_U8 || kv->type == AFF_GGUF_U16 || kv->type == AFF_GGUF_U32 || kv->type == AFF_GGUF_U64;
    if (!is_signed && !is_unsigned) return false;
    if (is_signed && kv->value[kv->size - 1] & 0x80) return false;
    *out = little(kv->value, (int)kv->size);
    return true;
}

bool aff__gguf_string(const aff_gguf *g, const char *key, const char **s, size_t *n)
{
    const gguf_kv *kv = find_kv(g, key);
    if (!kv || kv->type != AFF_GGUF_STRING) return false;
    *s = (const char *)kv->value;
    *n = (size_t)kv->size;
    return true;
}
