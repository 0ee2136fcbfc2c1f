#include "format/safetensors.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/json.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    unsigned size;
} st_types[] = {
    [AFF_ST_BOOL] = {"BOOL", 1},       [AFF_ST_U8] = {"U8", 1},           [AFF_ST_I8] = {"I8", 1},
    [AFF_ST_I16] = {"I16", 2},         [AFF_ST_U16] = {"U16", 2},         [AFF_ST_F16] = {"F16", 2},
    [AFF_ST_BF16] = {"BF16", 2},       [AFF_ST_I32] = {"I32", 4},         [AFF_ST_U32] = {"U32", 4},
    [AFF_ST_F32] = {"F32", 4},         [AFF_ST_F64] = {"F64", 8},         [AFF_ST_I64] = {"I64", 8},
    [AFF_ST_U64] = {"U64", 8},         [AFF_ST_F8_E4M3] = {"F8_E4M3", 1}, [AFF_ST_F8_E5M2] = {"F8_E5M2", 1},
    [AFF_ST_F8_E8M0] = {"F8_E8M0", 1},
};
enum { N_ST_TYPES = sizeof st_types / sizeof *st_types, MAX_SHARDS = 100000 };

typedef struct shard {
    char *path;
    aff_map map; /* of a file; empty when the bytes are the caller's */
} shard;

struct aff_ckpt {
    char *dir;
    shard *shards;
    int n_shards;
    aff_st_tensor *tensors; /* sorted by name once open; names are malloc'ed */
    uint64_t n, cap;
};

const char *aff__st_dtype_name(aff_st_dtype t)
{
    return (unsigned)t < N_ST_TYPES ? st_types[t].name : "?";
}
unsigned aff__st_dtype_size(aff_st_dtype t)
{
    return (unsigned)t < N_ST_TYPES ? st_types[t].size : 0;
}

static uint64_t le64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

/* ---- one tensor's entry of a header ---- */

static aff_status entry_dtype(const char *path, const char *name, const json_t *entry, aff_st_dtype *out,
                              aff_error *err)
{
    const json_t *v = json_object_get(entry, "dtype");
    const char *s = json_string_value(v);
    if (!s) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': its header entry has no dtype string", path, name);
    for (int t = 0; t < N_ST_TYPES; t++)
        if (strcmp(st_types[t].name, s) == 0) {
            *out = (aff_st_dtype)t;
            return AFF_OK;
        }
    return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': unknown dtype '%s'", path, name, s);
}

/* Shape and the byte size it implies. */
static aff_status entry_shape(const char *path, const json_t *entry, aff_st_tensor *t, uint64_t *bytes, aff_error *err)
{
    const json_t *v = json_object_get(entry, "shape");
    if (!json_is_array(v) || json_array_size(v) > 8)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected a shape of 0 to 8 dimensions, got %zu", path,
                         t->name, json_array_size(v));
    t->ndim = (int)json_array_size(v);
    *bytes = st_types[t->dtype].size;
    bool empty = false;
    for (int i = 0; i < t->ndim; i++) {
        const json_t *d = json_array_get(v, (size_t)i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': dimension %d is not a non-negative integer", path,
                             t->name, i);
        t->shape[i] = (uint64_t)json_integer_value(d);
        if (t->shape[i] == 0)
            empty = true;
        else if (!aff__mul_ok(*bytes, t->shape[i], bytes))
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': its shape overflows 64 bits", path, t->name);
    }
    if (empty) *bytes = 0;
    return AFF_OK;
}

static aff_status entry_extent(const char *path, const char *name, const json_t *entry, uint64_t *begin, uint64_t *end,
                               aff_error *err)
{
    const json_t *v = json_object_get(entry, "data_offsets");
    const json_t *a = json_array_get(v, 0), *b = json_array_get(v, 1);
    if (json_array_size(v) != 2 || !json_is_integer(a) || !json_is_integer(b) || json_integer_value(a) < 0 ||
        json_integer_value(b) < json_integer_value(a))
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': data_offsets are not two ascending integers", path, name);
    *begin = (uint64_t)json_integer_value(a);
    *end = (uint64_t)json_integer_value(b);
    return AFF_OK;
}

static aff_status add_tensor(aff_ckpt *c, int s, const uint8_t *data, uint64_t size, const char *name,
                             const json_t *entry, aff_error *err)
{
    const char *path = c->shards[s].path;
    aff_st_tensor t = {.name = name, .shard = s};
    uint64_t bytes = 0, begin = 0, end = 0;
    AFF_TRY(entry_dtype(path, name, entry, &t.dtype, err));
    AFF_TRY(entry_shape(path, entry, &t, &bytes, err));
    AFF_TRY(entry_extent(path, name, entry, &begin, &end, err));
    if (end > size)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: tensor '%s' ends at byte %" PRIu64 " of the data, which has %" PRIu64
                         ": the file is truncated or damaged",
                         path, name, end, size);
    if (end - begin != bytes)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: tensor '%s': expected %" PRIu64 " bytes for its shape and dtype %s, got %" PRIu64, path,
                         name, bytes, st_types[t.dtype].name, end - begin);
    t.data = data + begin;
    t.size = bytes;
    if (c->n == c->cap) {
        uint64_t cap = c->cap ? c->cap * 2 : 256;
        AFF_TRY(aff__realloc(&c->tensors, cap, sizeof *c->tensors, path, err));
        c->cap = cap;
    }
    char *own;
    AFF_TRY(aff__strndup(&own, name, strlen(name), err));
    t.name = own;
    c->tensors[c->n++] = t;
    return AFF_OK;
}

/* ---- one file ---- */

static int by_place(const void *a, const void *b)
{
    const aff_st_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->size < y->size ? -1 : x->size > y->size; /* empty ones first: they may lie on a boundary */
}

static aff_status check_overlaps(aff_ckpt *c, uint64_t from, const char *path, aff_error *err)
{
    if (c->n == from) return AFF_OK;
    qsort(c->tensors + from, (size_t)(c->n - from), sizeof *c->tensors, by_place);
    for (uint64_t i = from + 1; i < c->n; i++) {
        const aff_st_tensor *p = &c->tensors[i - 1], *t = &c->tensors[i];
        if (p->data + p->size > t->data)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensors '%s' and '%s' overlap", path, p->name, t->name);
    }
    return AFF_OK;
}

/* Parses the header in data[0..size) and adds every tensor of shard s. */
static aff_status read_shard(aff_ckpt *c, int s, const uint8_t *data, uint64_t size, aff_error *err)
{
    const char *path = c->shards[s].path;
    if (size < 8) return aff__fail(err, AFF_E_FORMAT, "%s: not a safetensors file: %" PRIu64 " bytes", path, size);
    uint64_t header = le64(data), from = c->n;
    if (header == 0 || header > size - 8)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: header of %" PRIu64 " bytes in a file of %" PRIu64
                         ": truncated, or not a safetensors file",
                         path, header, size);
    json_t *root;
    AFF_TRY(aff__json_parse(&root, (const char *)data + 8, (size_t)header, path, true, err));
    aff_status st = AFF_OK;
    if (!json_is_object(root)) st = aff__fail(err, AFF_E_FORMAT, "%s: its header is not a JSON object", path);
    for (void *it = st == AFF_OK ? json_object_iter(root) : NULL; it && st == AFF_OK;
         it = json_object_iter_next(root, it)) {
        const char *name = json_object_iter_key(it);
        if (strcmp(name, "__metadata__") != 0)
            st = add_tensor(c, s, data + 8 + header, size - 8 - header, name, json_object_iter_value(it), err);
    }
    json_decref(root);
    return st == AFF_OK ? check_overlaps(c, from, path, err) : st;
}

static aff_status add_shard(aff_ckpt *c, const char *path, aff_error *err)
{
    AFF_TRY(aff__realloc(&c->shards, (uint64_t)c->n_shards + 1, sizeof *c->shards, path, err));
    shard *s = &c->shards[c->n_shards];
    *s = (shard){0};
    AFF_TRY(aff__strndup(&s->path, path, strlen(path), err));
    c->n_shards++;
    return AFF_OK;
}

static aff_status map_shard(aff_ckpt *c, int s, aff_error *err)
{
    AFF_TRY(aff__map_open(&c->shards[s].map, c->shards[s].path, err));
    return read_shard(c, s, c->shards[s].map.data, c->shards[s].map.size, err);
}

/* ---- the whole checkpoint ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const aff_st_tensor *)a)->name, ((const aff_st_tensor *)b)->name);
}

static aff_status sort_by_name(aff_ckpt *c, aff_error *err)
{
    if (c->n > 1) qsort(c->tensors, (size_t)c->n, sizeof *c->tensors, by_name);
    for (uint64_t i = 1; i < c->n; i++)
        if (strcmp(c->tensors[i - 1].name, c->tensors[i].name) == 0)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' stands in both %s and %s", c->dir, c->tensors[i].name,
                             c->shards[c->tensors[i - 1].shard].path, c->shards[c->tensors[i].shard].path);
    return AFF_OK;
}

/* Collects the distinct file names of the index as shards, in order of appearance; `known` maps a file name to its
 * number. */
static aff_status shards_of_index(aff_ckpt *c, const char *index, const json_t *map, json_t *known, aff_error *err)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)map, name, v)
    {
        const char *file = json_string_value(v);
        if (!file || !*file || strlen(file) != json_string_length(v) || strchr(file, '/') || strcmp(file, "..") == 0)
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: tensor '%s': expected the name of a file in the same folder, got '%s'", index, name,
                             file ? file : "");
        if (json_object_get(known, file)) continue;
        if (c->n_shards >= MAX_SHARDS) return aff__fail(err, AFF_E_LIMIT, "%s: more than %d shards", index, MAX_SHARDS);
        char path[4096];
        AFF_TRY(aff__path_join(path, sizeof path, c->dir, file, err));
        if (json_object_set_new(known, file, json_integer(c->n_shards)) != 0)
            return aff__fail(err, AFF_E_NOMEM, "%s: out of memory", index);
        AFF_TRY(add_shard(c, path, err));
    }
    if (!c->n_shards) return aff__fail(err, AFF_E_FORMAT, "%s: its weight_map names no tensor", index);
    return AFF_OK;
}

/* Every tensor that the index names must be in the shard it names. */
static aff_status check_index(const aff_ckpt *c, const char *index, const json_t *map, const json_t *known,
                              aff_error *err)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)map, name, v)
    {
        int s = (int)json_integer_value(json_object_get(known, json_string_value(v)));
        const aff_st_tensor *t = aff__ckpt_find(c, name);
        if (!t || t->shard != s)
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is not in %s, where the index says it is", index, name,
                             c->shards[s].path);
    }
    return AFF_OK;
}

static aff_status open_indexed(aff_ckpt *c, const char *index, const json_t *root, json_t *known, aff_error *err)
{
    const json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) return aff__fail(err, AFF_E_FORMAT, "%s: key 'weight_map': expected an object", index);
    AFF_TRY(shards_of_index(c, index, map, known, err));
    for (int s = 0; s < c->n_shards; s++) AFF_TRY(map_shard(c, s, err));
    AFF_TRY(sort_by_name(c, err));
    return check_index(c, index, map, known, err);
}

static aff_status read_index(aff_ckpt *c, const char *index, aff_error *err)
{
    aff_map m;
    json_t *root = NULL;
    AFF_TRY(aff__map_open(&m, index, err));
    aff_status st = aff__json_parse(&root, (const char *)m.data, (size_t)m.size, index, true, err);
    aff__map_close(&m);
    AFF_TRY(st);
    json_t *known = json_object();
    st = known ? open_indexed(c, index, root, known, err) : aff__fail(err, AFF_E_NOMEM, "%s: out of memory", index);
    json_decref(known);
    json_decref(root);
    return st;
}

static aff_status new_ckpt(aff_ckpt **out, const char *dir, aff_error *err)
{
    *out = NULL;
    aff_ckpt *c;
    AFF_TRY(aff__calloc(&c, 1, sizeof *c, dir, err));
    aff_status st = aff__strndup(&c->dir, dir, strlen(dir), err);
    if (st != AFF_OK)
        aff__ckpt_close(c);
    else
        *out = c;
    return st;
}

/* Hands the checkpoint over, or takes it apart after a failure. */
static aff_status conclude(aff_ckpt **out, aff_status st)
{
    if (st != AFF_OK) {
        aff__ckpt_close(*out);
        *out = NULL;
    }
    return st;
}

static aff_status open_dir(aff_ckpt *c, aff_error *err)
{
    char path[4096];
    aff_map m;
    aff_error first = {0};
    AFF_TRY(aff__path_join(path, sizeof path, c->dir, "model.safetensors.index.json", err));
    if (aff__map_open(&m, path, &first) == AFF_OK) {
        aff__map_close(&m);
        return read_index(c, path, err);
    }
    AFF_TRY(aff__path_join(path, sizeof path, c->dir, "model.safetensors", err));
    if (aff__map_open(&m, path, NULL) != AFF_OK)
        return aff__fail(err, AFF_E_IO, "%s: no model.safetensors in that folder either", first.msg);
    aff__map_close(&m);
    AFF_TRY(add_shard(c, path, err));
    AFF_TRY(map_shard(c, 0, err));
    return sort_by_name(c, err);
}

aff_status aff__ckpt_open(aff_ckpt **out, const char *dir, aff_error *err)
{
    AFF_TRY(new_ckpt(out, dir, err));
    return conclude(out, open_dir(*out, err));
}

aff_status aff__ckpt_open_file(aff_ckpt **out, const char *path, aff_error *err)
{
    AFF_TRY(new_ckpt(out, path, err));
    aff_status st = add_shard(*out, path, err);
    if (st == AFF_OK) st = map_shard(*out, 0, err);
    if (st == AFF_OK) st = sort_by_name(*out, err);
    return conclude(out, st);
}

aff_status aff__ckpt_open_memory(aff_ckpt **out, const void *data, size_t size, const char *name, aff_error *err)
{
    AFF_TRY(new_ckpt(out, name, err));
    aff_status st = add_shard(*out, name, err);
    if (st == AFF_OK) st = read_shard(*out, 0, data, size, err);
    if (st == AFF_OK) st = sort_by_name(*out, err);
    return conclude(out, st);
}

void aff__ckpt_close(aff_ckpt *c)
{
    if (!c) return;
    for (uint64_t i = 0; i < c->n; i++) free((void *)(uintptr_t)c->tensors[i].name);
    for (int s = 0; s < c->n_shards; s++) {
        aff__map_close(&c->shards[s].map);
        free(c->shards[s].path);
    }
    free(c->tensors);
    free(c->shards);
    free(c->dir);
    free(c);
}

const char *aff__ckpt_dir(const aff_ckpt *c)
{
    return c->dir;
}

const aff_st_tensor *aff__ckpt_find(const aff_ckpt *c, const char *name)
{
    aff_st_tensor key = {.name = name};
    return c->n ? bsearch(&key, c->tensors, (size_t)c->n, sizeof *c->tensors, by_name) : NULL;
}

uint64_t aff__ckpt_count(const aff_ckpt *c)
{
    return c->n;
}
const aff_st_tensor *aff__ckpt_at(const aff_ckpt *c, uint64_t i)
{
    return i < c->n ? &c->tensors[i] : NULL;
}
int aff__ckpt_shards(const aff_ckpt *c)
{
    return c->n_shards;
}
const aff_map *aff__ckpt_shard_map(const aff_ckpt *c, int s)
{
    return &c->shards[s].map;
}
const char *aff__ckpt_shard_path(const aff_ckpt *c, int s)
{
    return s >= 0 && s < c->n_shards ? c->shards[s].path : NULL;
}
