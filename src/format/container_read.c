/* Opening a container: everything that a later reader relies on is checked here, once. */
#include "base/file.h"
#include "base/mem.h"
#include "format/container_disk.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

struct aff_container {
    char *path;
    aff_map map; /* empty when the bytes are the caller's */
    const uint8_t *data;
    uint64_t size;
    aff_cheader h;
    aff_clayer *layers;
    aff_ctensor *tensors;
    const aff_ctensor **by_name;
    uint64_t records; /* experts of all layers */
    float *profile;   /* a copy; NULL without one */
};

#define BAD(...) aff__fail(err, AFF_E_FORMAT, __VA_ARGS__)

/* ---- header and regions ---- */

static aff_status check_header(aff_container *c, aff_error *err)
{
    if (c->size < AFF_C_HEADER)
        return BAD("%s: not a container: %" PRIu64 " bytes, its header alone has %d", c->path, c->size, AFF_C_HEADER);
    if (!aff__cheader_get(&c->h, c->data))
        return BAD("%s: not a container: it does not begin with 'AFFINITY'", c->path);
    if (c->h.version != 1)
        return BAD("%s: container version %" PRIu32 ", this program reads version 1", c->path, c->h.version);
    if (c->h.file_size != c->size)
        return BAD("%s: its header says %" PRIu64 " bytes, the file has %" PRIu64
                   ": truncated, or one of several parts that must be joined",
                   c->path, c->h.file_size, c->size);
    if (c->h.features & ~AFF_C_KNOWN_FEATURES)
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: needs features 0x%" PRIx64 " that this version does not have",
                         c->path, c->h.features & ~AFF_C_KNOWN_FEATURES);
    return AFF_OK;
}

static aff_status check_regions(const aff_container *c, aff_error *err)
{
    const aff_cheader *h = &c->h;
    const struct {
        const char *name;
        uint64_t off, count, unit, align;
    } regions[] = {
        {"metadata", h->meta_off, h->meta_size, 1, 1},
        {"layer directory", h->layer_dir_off, h->layer_count, AFF_C_LAYER, 8},
        {"tensor directory", h->tensor_dir_off, h->tensor_count, AFF_C_TENSOR, 8},
        {"tensor data", h->tensor_data_off, h->tensor_data_size, 1, AFF_C_PLANE_ALIGN},
        {"expert pool", h->pool_off, h->pool_size, 1, AFF_C_POOL_ALIGN},
        {"profile", h->profile_off, h->profile_size, 1, 1},
        {"provenance", h->prov_off, h->prov_size, 1, 1},
        {"hash table", h->hash_off, h->hash_size, 1, 8},
    };
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        uint64_t bytes = 0;
        if (!aff__mul_ok(regions[i].count, regions[i].unit, &bytes) || !aff__range_ok(regions[i].off, bytes, c->size))
            return BAD("%s: %s at %" PRIu64 " with %" PRIu64 " entries of %" PRIu64
                       " bytes lies outside the file of %" PRIu64 " bytes",
                       c->path, regions[i].name, regions[i].off, regions[i].count, regions[i].unit, c->size);
        if (regions[i].off % regions[i].align)
            return BAD("%s: %s at %" PRIu64 ": expected a multiple of %" PRIu64, c->path, regions[i].name,
                       regions[i].off, regions[i].align);
    }
    if (h->layer_count == 0 || h->layer_count > UINT32_MAX)
        return BAD("%s: %" PRIu64 " layers: expected at least one", c->path, h->layer_count);
    if (!h->extended && h->pool_off + h->pool_size != c->size)
        return BAD(
            "%s: %" PRIu64
            " bytes follow the expert pool and the header does not say what they are: damaged, or of a later version",
            c->path, c->size - h->pool_off - h->pool_size);
    return AFF_OK;
}

/* ---- matrices ---- */

typedef struct span {
    uint64_t off, size;
} span;

/* One matrix inside an owner of `room` bytes; appends its planes that are not empty to used[]. */
static aff_status check_matrix(const char *path, const char *what, const aff_matdesc *m, uint64_t room, span *used,
                               int *n_used, aff_error *err)
{
    const aff_dtype_info *info = aff__dtype_info(m->quant);
    uint64_t size[3] = {0, 0, 0};
    if (!info) return BAD("%s: %s: unknown dtype code %" PRIu32, path, what, m->quant);
    if (!aff__dtype_sizes(info, m->rows, m->cols, &size[0], &size[1], &size[2]))
        return BAD("%s: %s: %" PRIu64 " x %" PRIu64 " does not suit dtype %s (rows a multiple of %u, columns of %u)",
                   path, what, m->rows, m->cols, info->name, info->row_multiple, info->col_multiple);
    const struct {
        const char *name;
        uint64_t off, got;
    } planes[3] = {{"data", m->data_off, m->data_size},
                   {"scales", m->scale_off, m->scale_size},
                   {"row scales", m->rscale_off, m->rscale_size}};
    for (int i = 0; i < 3; i++) {
        if (planes[i].got != size[i])
            return BAD("%s: %s: %s: expected %" PRIu64 " bytes for %" PRIu64 " x %" PRIu64 " %s, got %" PRIu64, path,
                       what, planes[i].name, size[i], m->rows, m->cols, info->name, planes[i].got);
        if (planes[i].off % AFF_C_PLANE_ALIGN)
            return BAD("%s: %s: %s at %" PRIu64 ": expected a multiple of %d", path, what, planes[i].name,
                       planes[i].off, AFF_C_PLANE_ALIGN);
        if (!aff__range_ok(planes[i].off, size[i], room))
            return BAD("%s: %s: %s at %" PRIu64 " with %" PRIu64 " bytes end past the %" PRIu64 " bytes there are",
                       path, what, planes[i].name, planes[i].off, size[i], room);
        if (!size[i]) continue; /* checked all the same: readers form pointers to empty planes too */
        for (int k = 0; k < *n_used; k++)
            if (planes[i].off < used[k].off + used[k].size && used[k].off < planes[i].off + size[i])
                return BAD("%s: %s: %s at %" PRIu64 " overlap another plane", path, what, planes[i].name,
                           planes[i].off);
        used[(*n_used)++] = (span){planes[i].off, size[i]};
    }
    return AFF_OK;
}

/* ---- layers ---- */

static aff_status check_layer(const aff_container *c, uint32_t l, const aff_clayer *y, const aff_clayer *first,
                              aff_error *err)
{
    uint64_t bytes = 0;
    if (y->n_experts == 0) return BAD("%s: layer %" PRIu32 ": no experts", c->path, l);
    if (y->stride % AFF_C_RECORD_ALIGN || y->base_off % AFF_C_RECORD_ALIGN)
        return BAD("%s: layer %" PRIu32 ": stride %" PRIu64 " and base %" PRIu64 ": expected multiples of %d", c->path,
                   l, y->stride, y->base_off, AFF_C_RECORD_ALIGN);
    if (!aff__mul_ok(y->n_experts, y->stride, &bytes) || !aff__range_ok(y->base_off, bytes, c->h.pool_size))
        return BAD("%s: layer %" PRIu32 ": %" PRIu32 " experts of %" PRIu64 " bytes at %" PRIu64
                   " end past the expert pool of %" PRIu64 " bytes",
                   c->path, l, y->n_experts, y->stride, y->base_off, c->h.pool_size);
    const aff_matdesc *m[3] = {&y->gate, &y->up, &y->down};
    static const char *const names[3] = {"gate", "up", "down"};
    span used[9];
    int n = 0;
    for (int i = 0; i < 3; i++) {
        char what[64];
        snprintf(what, sizeof what, "layer %" PRIu32 ": %s", l, names[i]);
        AFF_TRY(check_matrix(c->path, what, m[i], y->stride, used, &n, err));
    }
    if (y->up.rows != y->gate.rows || y->up.cols != y->gate.cols || y->down.rows != y->gate.cols ||
        y->down.cols != y->gate.rows)
        return BAD("%s: layer %" PRIu32 ": gate %" PRIu64 "x%" PRIu64 ", up %" PRIu64 "x%" PRIu64 ", down %" PRIu64
                   "x%" PRIu64 ": expected up like gate and down transposed",
                   c->path, l, y->gate.rows, y->gate.cols, y->up.rows, y->up.cols, y->down.rows, y->down.cols);
    if (y->up.quant != y->gate.quant || y->down.quant != y->gate.quant)
        return BAD("%s: layer %" PRIu32 ": gate, up and down have dtypes %" PRIu32 ", %" PRIu32 ", %" PRIu32
                   ": expected one",
                   c->path, l, y->gate.quant, y->up.quant, y->down.quant);
    if (y->gate.quant != first->gate.quant || y->n_experts != first->n_experts)
        return BAD("%s: layer %" PRIu32 ": %" PRIu32 " experts of dtype %" PRIu32 ", layer 0 has %" PRIu32
                   " of dtype %" PRIu32,
                   c->path, l, y->n_experts, y->gate.quant, first->n_experts, first->gate.quant);
    return AFF_OK;
}

static aff_status read_layers(aff_container *c, aff_error *err)
{
    AFF_TRY(aff__calloc(&c->layers, c->h.layer_count, sizeof *c->layers, c->path, err));
    for (uint32_t l = 0; l < c->h.layer_count; l++) {
        uint32_t index;
        aff__clayer_get(c->data + c->h.layer_dir_off + (uint64_t)l * AFF_C_LAYER, &index, &c->layers[l]);
        if (c->layers[l].stride == 0)
            return BAD("%s: layer %" PRIu32 " has no records: the file was never finished", c->path, l);
        if (index != l)
            return BAD("%s: entry %" PRIu32 " of the layer directory says layer %" PRIu32, c->path, l, index);
        AFF_TRY(check_layer(c, l, &c->layers[l], &c->layers[0], err));
        c->records += c->layers[l].n_experts; /* < 2^64: both are 32-bit */
    }
    return AFF_OK;
}

/* ---- tensors ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const aff_ctensor *const *)a)->name, (*(const aff_ctensor *const *)b)->name);
}

static aff_status check_tensor(const aff_container *c, uint64_t i, aff_ctensor *t, aff_error *err)
{
    const uint8_t *entry = c->data + c->h.tensor_dir_off + i * AFF_C_TENSOR;
    const char *end = memchr(entry, 0, AFF_C_NAME);
    uint64_t blob_off;
    t->name = (const char *)entry;
    if (!end || end == t->name)
        return BAD("%s: tensor %" PRIu64 ": its name is %s", c->path, i,
                   end ? "empty" : "not terminated within 128 bytes");
    for (const char *p = t->name; p < end; p++)
        if (*p < 0x21 || *p > 0x7E)
            return BAD("%s: tensor %" PRIu64 ": its name has byte 0x%02x", c->path, i, (unsigned char)*p);
    aff__ctensor_get(entry, &t->m, &blob_off);
    char what[AFF_C_NAME + 16];
    snprintf(what, sizeof what, "tensor '%s'", t->name);
    if (blob_off % AFF_C_PLANE_ALIGN || blob_off > c->h.tensor_data_size)
        return BAD("%s: %s at %" PRIu64 ": expected a multiple of %d within the %" PRIu64 " bytes of tensor data",
                   c->path, what, blob_off, AFF_C_PLANE_ALIGN, c->h.tensor_data_size);
    t->blob = c->data + c->h.tensor_data_off + blob_off;
    span used[3];
    int n = 0;
    return check_matrix(c->path, what, &t->m, c->h.tensor_data_size - blob_off, used, &n, err);
}

static aff_status read_tensors(aff_container *c, aff_error *err)
{
    uint64_t n = c->h.tensor_count;
    AFF_TRY(aff__calloc(&c->tensors, n, sizeof *c->tensors, c->path, err));
    AFF_TRY(aff__calloc(&c->by_name, n, sizeof *c->by_name, c->path, err));
    for (uint64_t i = 0; i < n; i++) {
        AFF_TRY(check_tensor(c, i, &c->tensors[i], err));
        c->by_name[i] = &c->tensors[i];
    }
    if (n > 1) qsort(c->by_name, (size_t)n, sizeof *c->by_name, by_name);
    for (uint64_t i = 1; i < n; i++)
        if (by_name(&c->by_name[i - 1], &c->by_name[i]) == 0)
            return BAD("%s: tensor '%s' is in the directory twice", c->path, c->by_name[i]->name);
    uint32_t quant = c->layers[0].gate.quant;
    if (!aff__dtype_has_codebook(quant)) return AFF_OK;
    const aff_ctensor *book = aff__container_find(c, "__codebook");
    if (!book)
        return BAD("%s: tensor '__codebook' is missing: experts of type %s need it", c->path,
                   aff__dtype_info(quant)->name);
    if (book->m.quant != AFF_F32)
        return BAD("%s: tensor '__codebook': expected dtype f32, got %s", c->path,
                   aff__dtype_info(book->m.quant)->name);
    return aff__codebook_check(c->path, quant, book->blob + book->m.data_off, book->m.data_size, err);
}

static aff_status read_profile(aff_container *c, aff_error *err)
{
    if (!(c->h.flags & AFF_C_FLAG_PROFILE)) return AFF_OK;
    if (c->h.profile_size / 4 != c->records || c->h.profile_size % 4)
        return BAD("%s: profile of %" PRIu64 " bytes: expected 4 for each of %" PRIu64 " experts", c->path,
                   c->h.profile_size, c->records);
    AFF_TRY(aff__calloc(&c->profile, c->records, 4, c->path, err));
    memcpy(c->profile, c->data + c->h.profile_off, (size_t)c->h.profile_size);
    for (uint64_t i = 0; i < c->records; i++)
        if (!isfinite(c->profile[i])) return BAD("%s: profile value %" PRIu64 " is not finite", c->path, i);
    return AFF_OK;
}

static aff_status check_hash_table(const aff_container *c, aff_error *err)
{
    if (!c->h.extended) return AFF_OK;
    if (c->h.prov_size ? c->h.prov_off < c->h.pool_off + c->h.pool_size : c->h.prov_off != 0)
        return BAD("%s: provenance at %" PRIu64 " with %" PRIu64 " bytes: expected it behind the expert pool", c->path,
                   c->h.prov_off, c->h.prov_size);
    uint64_t rest = c->h.hash_size - AFF_C_HASH_HEAD - 8;
    if (c->h.hash_size < AFF_C_HASH_HEAD + 8 || rest % 8 || rest / 8 < c->records ||
        rest / 8 - c->records != c->h.tensor_count)
        return BAD("%s: hash table of %" PRIu64 " bytes: expected one for %" PRIu64 " tensors and %" PRIu64 " experts",
                   c->path, c->h.hash_size, c->h.tensor_count, c->records);
    if (c->h.hash_off + c->h.hash_size != c->size)
        return BAD("%s: hash table ends at %" PRIu64 ": expected the end of the file, %" PRIu64, c->path,
                   c->h.hash_off + c->h.hash_size, c->size);
    const uint8_t *t = c->data + c->h.hash_off;
    if (memcmp(t, AFF_C_HASH_MAGIC, 8) != 0 || aff__get32(t + 8) != 1 || aff__get32(t + 12) != 0 ||
        aff__get64(t + 16) != c->h.tensor_count || aff__get64(t + 24) != c->records)
        return BAD("%s: damaged hash table: its head does not say XXH3-64 of %" PRIu64 " tensors and %" PRIu64
                   " experts",
                   c->path, c->h.tensor_count, c->records);
    return AFF_OK;
}

/* ---- open and close ---- */

static aff_status check_all(aff_container *c, aff_error *err)
{
    AFF_TRY(check_header(c, err));
    AFF_TRY(check_regions(c, err));
    AFF_TRY(read_layers(c, err));
    AFF_TRY(read_tensors(c, err));
    AFF_TRY(read_profile(c, err));
    return check_hash_table(c, err);
}

static aff_status new_container(aff_container **out, const char *path, aff_error *err)
{
    aff_container *c;
    *out = NULL;
    AFF_TRY(aff__calloc(&c, 1, sizeof *c, path, err));
    aff_status s = aff__strndup(&c->path, path, strlen(path), err);
    if (s != AFF_OK)
        aff__container_close(c);
    else
        *out = c;
    return s;
}

static aff_status conclude(aff_container **out, aff_status s)
{
    if (s != AFF_OK) {
        aff__container_close(*out);
        *out = NULL;
    }
    return s;
}

aff_status aff__container_open(aff_container **out, const char *path, aff_error *err)
{
    AFF_TRY(new_container(out, path, err));
    aff_status s = aff__map_open(&(*out)->map, path, err);
    (*out)->data = (*out)->map.data;
    (*out)->size = (*out)->map.size;
    if (s == AFF_OK) s = check_all(*out, err);
    return conclude(out, s);
}

aff_status aff__container_open_memory(aff_container **out, const void *data, size_t size, const char *name,
                                      aff_error *err)
{
    AFF_TRY(new_container(out, name, err));
    (*out)->data = data;
    (*out)->size = size;
    return conclude(out, check_all(*out, err));
}

void aff__container_close(aff_container *c)
{
    if (!c) return;
    aff__map_close(&c->map);
    free(c->profile);
    free((void *)(uintptr_t)c->by_name);
    free(c->tensors);
    free(c->layers);
    free(c->path);
    free(c);
}

const char *aff__container_path(const aff_container *c)
{
    return c->path;
}
const aff_map *aff__container_file(const aff_container *c)
{
    return c->map.data ? &c->map : NULL;
}
uint64_t aff__container_size(const aff_container *c)
{
    return c->size;
}

void aff__container_meta(const aff_container *c, const char **text, size_t *size)
{
    *text = (const char *)c->data + c->h.meta_off;
    *size = (size_t)c->h.meta_size;
}

void aff__container_provenance(const aff_container *c, const char **text, size_t *size)
{
    *text = (const char *)c->data + c->h.prov_off;
    *size = (size_t)c->h.prov_size;
}

uint64_t aff__container_tensors(const aff_container *c)
{
    return c->h.tensor_count;
}
const aff_ctensor *aff__container_tensor(const aff_container *c, uint64_t i)
{
    return i < c->h.tensor_count ? &c->tensors[i] : NULL;
}

const aff_ctensor *aff__container_find(const aff_container *c, const char *name)
{
    const aff_ctensor key = {.name = name}, *k = &key;
    if (!c->h.tensor_count) return NULL;
    const aff_ctensor **hit = bsearch(&k, c->by_name, (size_t)c->h.tensor_count, sizeof *c->by_name, by_name);
    return hit ? *hit : NULL;
}

uint32_t aff__container_layers(const aff_container *c)
{
    return (uint32_t)c->h.layer_count;
}
const aff_clayer *aff__container_layer(const aff_container *c, uint32_t l)
{
    return l < c->h.layer_count ? &c->layers[l] : NULL;
}

uint64_t aff__container_expert_offset(const aff_container *c, uint32_t l, uint32_t e)
{
    return c->h.pool_off + c->layers[l].base_off + e * c->layers[l].stride;
}

const uint8_t *aff__container_expert(const aff_container *c, uint32_t l, uint32_t e)
{
    return c->data + aff__container_expert_offset(c, l, e);
}

const float *aff__container_profile(const aff_container *c)
{
    return c->profile;
}
bool aff__container_has_hashes(const aff_container *c)
{
    return c->h.extended;
}
const uint8_t *aff__container_map(const aff_container *c)
{
    return c->data;
}
const aff_cheader *aff__container_header(const aff_container *c)
{
    return &c->h;
}

/* ---- verification ---- */

typedef struct verifier {
    const aff_container *c;
    void (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
    uint64_t done;
} verifier;

/* XXH3-64 of a range, with progress. */
static uint64_t hash_range(verifier *v, uint64_t off, uint64_t size)
{
    const uint64_t step = 16 << 20;
    XXH3_state_t s;
    XXH3_64bits_reset(&s);
    for (uint64_t at = 0; at < size;) {
        uint64_t n = size - at < step ? size - at : step;
        XXH3_64bits_update(&s, v->c->data + off + at, (size_t)n);
        at += n;
        v->done += n;
        if (v->progress) v->progress(v->ctx, v->done, v->c->size);
    }
    return XXH3_64bits_digest(&s);
}

/* The bytes between two regions; the writer leaves them zero. */
static aff_status check_gap(const aff_container *c, uint64_t from, uint64_t to, const char *before, aff_error *err)
{
    if (from > to) return BAD("%s: %s does not lie where this format's writer puts it", c->path, before);
    const uint8_t *p = c->data + from;
    uint64_t n = to - from;
    if (n && (p[0] || memcmp(p, p + 1, (size_t)n - 1) != 0)) /* each byte equals the one before */
        return BAD("%s: damaged: the gap before the %s is not zero", c->path, before);
    return AFF_OK;
}

static aff_status mismatch(const aff_container *c, const char *what, uint64_t got, uint64_t expected, aff_error *err)
{
    return BAD("%s: damaged: %s: expected hash %016" PRIx64 ", got %016" PRIx64, c->path, what, expected, got);
}

static aff_status verify_tensors(verifier *v, const uint8_t *hashes, aff_error *err)
{
    const aff_container *c = v->c;
    uint64_t at = 0;
    for (uint64_t i = 0; i < c->h.tensor_count; i++) {
        const aff_ctensor *t = &c->tensors[i];
        aff_matdesc m;
        uint64_t extent = 0;
        char what[AFF_C_NAME + 16];
        snprintf(what, sizeof what, "tensor '%s'", t->name);
        /* The file checks as a whole only if the blobs lie back to back in the writer's layout. */
        if (!aff__layout_blob(&m, t->m.quant, t->m.rows, t->m.cols, &extent) ||
            !aff__range_ok(at, extent, c->h.tensor_data_size) || t->blob != c->data + c->h.tensor_data_off + at)
            return BAD("%s: %s does not lie where this format's writer puts it", c->path, what);
        uint64_t got = hash_range(v, c->h.tensor_data_off + at, extent), expected = aff__get64(hashes + 8 * i);
        if (got != expected) return mismatch(c, what, got, expected, err);
        at += extent;
    }
    return at == c->h.tensor_data_size
               ? AFF_OK
               : BAD("%s: tensor data has %" PRIu64 " bytes that no tensor uses", c->path, c->h.tensor_data_size - at);
}

static aff_status verify_experts(verifier *v, const uint8_t *hashes, aff_error *err)
{
    const aff_container *c = v->c;
    uint64_t at = 0, k = 0;
    for (uint32_t l = 0; l < c->h.layer_count; l++) {
        const aff_clayer *y = &c->layers[l];
        if (y->base_off != at)
            return BAD("%s: layer %" PRIu32 " does not lie where this format's writer puts it", c->path, l);
        for (uint32_t e = 0; e < y->n_experts; e++, k++) {
            uint64_t got = hash_range(v, aff__container_expert_offset(c, l, e), y->stride),
                     expected = aff__get64(hashes + 8 * k);
            char what[64];
            snprintf(what, sizeof what, "layer %" PRIu32 " expert %" PRIu32, l, e);
            if (got != expected) return mismatch(c, what, got, expected, err);
        }
        at += y->n_experts * y->stride;
    }
    return at == c->h.pool_size
               ? AFF_OK
               : BAD("%s: the expert pool has %" PRIu64 " bytes that no expert uses", c->path, c->h.pool_size - at);
}

aff_status aff__container_verify(const aff_container *c, void (*progress)(void *ctx, uint64_t done, uint64_t total),
                                 void *ctx, aff_error *err)
{
    const aff_cheader *h = &c->h;
    verifier v = {c, progress, ctx, 0};
    if (!h->extended)
        return aff__fail(err, AFF_E_UNSUPPORTED,
                         "%s: has no hashes to check: written by an earlier tool or in compatible form", c->path);
    const uint8_t *table = c->data + h->hash_off, *hashes = table + AFF_C_HASH_HEAD;
    uint64_t expected = aff__get64(table + h->hash_size - 8), got = XXH3_64bits(table, (size_t)h->hash_size - 8);
    if (got != expected) return mismatch(c, "hash table", got, expected, err);
    const uint64_t ends[4] = {h->meta_off + h->meta_size, h->tensor_dir_off + h->tensor_count * AFF_C_TENSOR,
                              h->layer_dir_off + h->layer_count * AFF_C_LAYER, h->profile_off + h->profile_size};
    for (int i = 0; i < 4; i++)
        if (ends[i] > h->tensor_data_off)
            return BAD("%s: its directories do not lie where this format's writer puts them", c->path);
    got = aff__front_hash(c->data, h->tensor_data_off, c->data + h->prov_off, h->prov_size);
    expected = aff__get64(table + 32);
    if (got != expected) return mismatch(c, "header, metadata, directories, profile or provenance", got, expected, err);
    uint64_t data_end = h->tensor_data_off + h->tensor_data_size, pool_end = h->pool_off + h->pool_size;
    AFF_TRY(check_gap(c, data_end, h->pool_off, "expert pool", err));
    AFF_TRY(check_gap(c, pool_end, h->prov_size ? h->prov_off : h->hash_off, "provenance", err));
    if (h->prov_size) AFF_TRY(check_gap(c, h->prov_off + h->prov_size, h->hash_off, "hash table", err));
    v.done = h->tensor_data_off + h->prov_size;
    AFF_TRY(verify_tensors(&v, hashes, err));
    return verify_experts(&v, hashes + 8 * h->tensor_count, err);
}
