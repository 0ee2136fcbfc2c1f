#define _GNU_SOURCE /* mincore */
#include "experts/store.h"
#include "base/mem.h"
#include "quant/codebook.h"
#include "quant/expert.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PLANE = 256 };

struct aff_experts {
    aff_expert_shape shape;
    int layers, experts;
    aff_expert *expert; /* [layers*experts]; of a row-major store all NULL */
    aff_slot_layout layout;
    const aff_container *container; /* NULL: of a checkpoint, or in memory */
    const aff_ckpt *ckpt;
    aff_map file; /* of aff__experts_from_file */
    char *path;
    bool row_major;
    int16_t (*table)[1024][4];
    uint8_t *records; /* of aff__experts_from_records */
    aff_expert_source source; /* of aff__experts_from_source */
    uint64_t bytes;   /* of one expert */
};

static aff_status create(aff_experts **out, int layers, int experts, int hidden, int inter, aff_dtype dtype,
                         aff_error *err)
{
    aff_experts *s;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "expert store", err));
    s->layers = layers;
    s->experts = experts;
    s->shape = (aff_expert_shape){.dtype = dtype, .hidden = hidden, .inter = inter};
    aff_status st =
        aff__calloc(&s->expert, (uint64_t)layers * (uint64_t)experts, sizeof *s->expert, "expert store", err);
    if (st != AFF_OK) {
        aff__experts_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

void aff__experts_free(aff_experts *s)
{
    if (!s) return;
    free(s->expert);
    free(s->records);
    if (s->source.free) s->source.free(s->source.ctx);
    aff__map_close(&s->file);
    free(s->path);
    free(s->table);
    free(s);
}

aff_expert_shape aff__experts_shape(const aff_experts *s)
{
    return s->shape;
}
uint64_t aff__experts_bytes(const aff_experts *s)
{
    return s->bytes;
}

static aff_expert_mat planes(const aff_matdesc *m, const uint8_t *record)
{
    return (aff_expert_mat){record + m->data_off, record + m->scale_off, record + m->rscale_off};
}

static aff_expert in_record(const aff_clayer *l, const uint8_t *record)
{
    return (aff_expert){planes(&l->gate, record), planes(&l->up, record), planes(&l->down, record)};
}

/* A slot is laid out as the first layer's records are. */
static aff_slot_layout layout_of(aff_dtype dtype, const aff_clayer *l)
{
    const aff_matdesc *m[3] = {&l->gate, &l->up, &l->down};
    aff_slot_layout y = {.dtype = dtype, .bytes = l->stride, .pitch = aff__align_up(l->stride, PAGE)};
    for (int i = 0; i < 3; i++) {
        const uint64_t off[3] = {m[i]->data_off, m[i]->scale_off, m[i]->rscale_off},
                       size[3] = {m[i]->data_size, m[i]->scale_size, m[i]->rscale_size};
        for (int k = 0; k < 3; k++) {
            y.plane[i][k] = size[k] ? off[k] : 0;
            y.size[i][k] = size[k];
        }
    }
    return y;
}

static bool same_layout(const aff_slot_layout *a, const aff_slot_layout *b)
{
    return a->dtype == b->dtype && a->bytes == b->bytes && memcmp(a->plane, b->plane, sizeof a->plane) == 0 && memcmp(a->size, b->size, sizeof a->size) == 0;
}

static aff_status check_layers(const aff_container *c, int layers, int experts, int hidden, int inter, aff_error *err)
{
    const char *path = aff__container_path(c);
    if ((uint32_t)layers > aff__container_layers(c))
        return aff__fail(err, AFF_E_FORMAT, "%s: %u expert layers, the model has %d", path, aff__container_layers(c),
                         layers);
    const uint32_t dtype = aff__container_layer(c, 0)->gate.quant;
    if (dtype != AFF_Q2P875Q4 && dtype != AFF_Q2P875G && dtype != AFF_MXFP4) {
        const aff_dtype_info *d = aff__dtype_info(dtype);
        return aff__fail(err, AFF_E_UNSUPPORTED,
                         "%s: experts are %s (dtype %u); this version computes q2p875q4, q2p875g and mxfp4", path,
                         d ? d->name : "unknown", dtype);
    }
    for (int l = 0; l < layers; l++) {
        const aff_clayer *y = aff__container_layer(c, (uint32_t)l);
        if (y->n_experts != (uint32_t)experts)
            return aff__fail(err, AFF_E_FORMAT, "%s: layer %d: expected %d experts, got %u", path, l, experts,
                             y->n_experts);
        if (y->gate.rows != (uint64_t)inter || y->gate.cols != (uint64_t)hidden)
            return aff__fail(err, AFF_E_FORMAT, "%s: layer %d: expected experts of %d x %d, got %llu x %llu", path, l,
                             inter, hidden, (unsigned long long)y->gate.rows, (unsigned long long)y->gate.cols);
        if (y->gate.quant != dtype)
            return aff__fail(err, AFF_E_FORMAT, "%s: layer %d: experts of dtype %u, layer 0 has %u", path, l,
                             y->gate.quant, dtype);
    }
    return AFF_OK;
}

aff_status aff__experts_from_container(aff_experts **out, const aff_container *c, int layers, int experts, int hidden,
                                       int inter, const uint8_t *codebook, aff_error *err)
{
    AFF_TRY(check_layers(c, layers, experts, hidden, inter, err));
    const aff_dtype stored = (aff_dtype)aff__container_layer(c, 0)->gate.quant;
    aff_experts *s;
    AFF_TRY(create(&s, layers, experts, hidden, inter, stored == AFF_MXFP4 ? AFF_MXFP4 : AFF_Q2P875G, err));
    s->bytes = aff__container_layer(c, 0)->stride;
    s->container = c;
    s->layout = layout_of(s->shape.dtype, aff__container_layer(c, 0));
    aff_status st = AFF_OK;
    if (stored != AFF_MXFP4) {
        st = codebook ? aff__calloc(&s->table, 2, sizeof *s->table, "codebook", err)
                      : aff__fail(err, AFF_E_FORMAT, "%s: tensor '__codebook' is missing", aff__container_path(c));
        if (st == AFF_OK) aff__codebook_ints(codebook, s->table);
        s->shape.table = (const int16_t(*)[1024][4])s->table;
    }
    if (st == AFF_OK && stored == AFF_Q2P875Q4) {
        s->row_major = true;
    } else if (st == AFF_OK) {
        for (int l = 0; l < layers; l++)
            for (int e = 0; e < experts; e++)
                s->expert[l * experts + e] =
                    in_record(aff__container_layer(c, (uint32_t)l), aff__container_expert(c, (uint32_t)l, (uint32_t)e));
    }
    if (st != AFF_OK) {
        aff__experts_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

/* records NULL: they are elsewhere. */
static aff_status use_records(aff_experts *s, const aff_clayer *l, const uint8_t *codebook, const uint8_t *records, aff_error *err)
{
    s->bytes = l->stride;
    s->layout = layout_of(AFF_Q2P875G, l);
    AFF_TRY(aff__calloc(&s->table, 2, sizeof *s->table, "codebook", err));
    aff__codebook_ints(codebook, s->table);
    s->shape.table = (const int16_t(*)[1024][4])s->table;
    for (int i = 0; records && i < s->layers * s->experts; i++) s->expert[i] = in_record(l, records + (uint64_t)i * l->stride);
    return AFF_OK;
}

aff_status aff__experts_from_source(aff_experts **out, const aff_clayer *l, int layers, int hidden, int inter, const uint8_t *codebook,
                                    const aff_expert_source *from, aff_error *err)
{
    aff_experts *s;
    aff_status st = create(&s, layers, (int)l->n_experts, hidden, inter, AFF_Q2P875G, err);
    if (st != AFF_OK) {
        if (from->free) from->free(from->ctx);
        return st;
    }
    s->source = *from;
    st = use_records(s, l, codebook, NULL, err);
    if (st != AFF_OK) {
        aff__experts_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

aff_status aff__experts_from_records(aff_experts **out, const aff_clayer *l, int layers, int hidden, int inter,
                                     const uint8_t *codebook, uint8_t *records, aff_error *err)
{
    aff_experts *s;
    aff_status st = create(&s, layers, (int)l->n_experts, hidden, inter, AFF_Q2P875G, err);
    if (st != AFF_OK) {
        free(records);
        return st;
    }
    s->records = records;
    st = use_records(s, l, codebook, records, err);
    if (st != AFF_OK) {
        aff__experts_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

aff_status aff__experts_from_file(aff_experts **out, const aff_clayer *l, int layers, int hidden, int inter, const uint8_t *codebook, const char *path,
                                  aff_error *err)
{
    aff_experts *s;
    AFF_TRY(create(&s, layers, (int)l->n_experts, hidden, inter, AFF_Q2P875G, err));
    const uint64_t want = (uint64_t)layers * l->n_experts * l->stride;
    aff_status st = aff__strndup(&s->path, path, strlen(path), err);
    if (st == AFF_OK) st = aff__map_open(&s->file, path, err);
    if (st == AFF_OK && s->file.size != want)
        st = aff__fail(err, AFF_E_FORMAT, "%s: expected %llu bytes of experts, got %llu", path, (unsigned long long)want, (unsigned long long)s->file.size);
    if (st == AFF_OK) st = use_records(s, l, codebook, s->file.data, err);
    if (st != AFF_OK) {
        aff__experts_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

aff_slot_layout aff__slot_layout(aff_dtype dtype, int hidden, int inter)
{
    const bool four = dtype == AFF_MXFP4;
    aff_slot_layout y = {.dtype = dtype};
    const uint64_t n = (uint64_t)hidden * (uint64_t)inter;
    for (int k = 0; k < (four ? 2 : 3); k++)
        for (int m = 0; m < 3; m++) {
            const uint64_t size[3] = {four ? n / 2 : n / 64 * 20, four ? n / 32 : n / 64 * 3, 2 * (uint64_t)(m == 2 ? hidden : inter)};
            y.size[m][k] = size[k];
            y.plane[m][k] = y.bytes;
            y.bytes = aff__align_up(y.bytes + y.size[m][k], PLANE);
        }
    y.pitch = aff__align_up(y.bytes, PAGE);
    return y;
}

/* One plane of a checkpoint's expert. */
static aff_status plane(const aff_ckpt *c, const char *name, aff_st_dtype a, aff_st_dtype b, int rows, int cols,
                        const uint8_t **out, aff_error *err)
{
    const aff_st_tensor *t = aff__ckpt_find(c, name);
    if (!t) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is missing", aff__ckpt_dir(c), name);
    if (t->dtype != a && t->dtype != b)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected %s, got %s", aff__ckpt_dir(c), name,
                         aff__st_dtype_name(a), aff__st_dtype_name(t->dtype));
    if (t->ndim != 2 || t->shape[0] != (uint64_t)rows || t->shape[1] != (uint64_t)cols)
        return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected shape [%d, %d], got %llu bytes in %d dimensions",
                         aff__ckpt_dir(c), name, rows, cols, (unsigned long long)t->size, t->ndim);
    *out = t->data;
    return AFF_OK;
}

static aff_status checkpoint_mat(const aff_ckpt *c, const char *stem, int rows, int cols, aff_expert_mat *m,
                                 aff_error *err)
{
    char name[256];
    snprintf(name, sizeof name, "%s.weight", stem);
    AFF_TRY(plane(c, name, AFF_ST_I8, AFF_ST_U8, rows, cols / 2, &m->codes, err));
    snprintf(name, sizeof name, "%s.scale", stem);
    return plane(c, name, AFF_ST_F8_E8M0, AFF_ST_U8, rows, cols / 32, &m->fields, err);
}

static aff_status bind_checkpoint(aff_experts *s, const aff_ckpt *c, const char *prefix, aff_error *err)
{
    const int H = s->shape.hidden, I = s->shape.inter;
    if (H % 32 || I % 32)
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: experts of %d x %d: FP4 needs multiples of 32", aff__ckpt_dir(c),
                         I, H);
    for (int i = 0; i < s->layers * s->experts; i++) {
        char stem[128];
        const int l = i / s->experts, e = i % s->experts;
        snprintf(stem, sizeof stem, "%s%d.ffn.experts.%d.w1", prefix, l, e);
        AFF_TRY(checkpoint_mat(c, stem, I, H, &s->expert[i].gate, err));
        snprintf(stem, sizeof stem, "%s%d.ffn.experts.%d.w3", prefix, l, e);
        AFF_TRY(checkpoint_mat(c, stem, I, H, &s->expert[i].up, err));
        snprintf(stem, sizeof stem, "%s%d.ffn.experts.%d.w2", prefix, l, e);
        AFF_TRY(checkpoint_mat(c, stem, H, I, &s->expert[i].down, err));
    }
    return AFF_OK;
}

aff_status aff__experts_from_checkpoint(aff_experts **out, const aff_ckpt *c, const char *prefix, int layers,
                                        int experts, int hidden, int inter, aff_error *err)
{
    aff_experts *s;
    AFF_TRY(create(&s, layers, experts, hidden, inter, AFF_MXFP4, err));
    s->bytes = 3 * (uint64_t)hidden * (uint64_t)inter / 32 * 17; /* 16 bytes of codes and a scale for 32 columns */
    s->ckpt = c;
    s->layout = aff__slot_layout(AFF_MXFP4, hidden, inter); /* gathered in the order of a record */
    aff_status st = bind_checkpoint(s, c, prefix, err);
    if (st != AFF_OK) {
        aff__experts_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

/* ---- slots ---- */

aff_slot_layout aff__experts_layout(const aff_experts *s)
{
    return s->layout;
}
int aff__experts_layers(const aff_experts *s)
{
    return s->layers;
}
int aff__experts_per_layer(const aff_experts *s)
{
    return s->experts;
}
bool aff__experts_row_major(const aff_experts *s)
{
    return s->row_major;
}
bool aff__experts_in_place(const aff_experts *s)
{
    return !s->row_major && !s->source.make;
}
aff_expert aff__experts_at(const aff_experts *s, int layer, int e)
{
    return s->expert[layer * s->experts + e];
}

aff_expert aff__slot_expert(const aff_slot_layout *y, const uint8_t *slot)
{
    aff_expert_mat m[3];
    for (int i = 0; i < 3; i++)
        m[i] = (aff_expert_mat){slot + y->plane[i][0], slot + y->plane[i][1], y->size[i][2] ? slot + y->plane[i][2] : NULL};
    return (aff_expert){m[0], m[1], m[2]};
}

/* The planes of an expert that lies somewhere, in the order of aff_slot_layout. */
static void planes_of(const aff_expert *e, const uint8_t *out[3][3])
{
    const aff_expert_mat *m[3] = {&e->gate, &e->up, &e->down};
    for (int i = 0; i < 3; i++) {
        out[i][0] = m[i]->codes;
        out[i][1] = m[i]->fields;
        out[i][2] = m[i]->rscale;
    }
}

void aff__experts_arrange(const aff_experts *s, int layer, uint8_t *slot, const uint8_t *record)
{
    const aff_clayer *l = aff__container_layer(s->container, (uint32_t)layer);
    const aff_slot_layout here = layout_of(s->shape.dtype, l);
    const bool same = same_layout(&here, &s->layout);
    if (same) aff__expert_record_permute(l, slot, record, true);
    for (int i = 0; i < 3 && !same; i++) {
        const aff_matdesc *m[3] = {&l->gate, &l->up, &l->down};
        aff__expert_plane_permute(slot + s->layout.plane[i][0], record + here.plane[i][0], m[i], false, true);
        aff__expert_plane_permute(slot + s->layout.plane[i][1], record + here.plane[i][1], m[i], true, true);
        memcpy(slot + s->layout.plane[i][2], record + here.plane[i][2], (size_t)here.size[i][2]);
    }
}

void aff__slot_gather(const aff_slot_layout *y, const aff_expert *e, uint8_t *slot)
{
    const uint8_t *from[3][3];
    planes_of(e, from);
    for (int i = 0; i < 9; i++)
        if (y->size[i / 3][i % 3]) memcpy(slot + y->plane[i / 3][i % 3], from[i / 3][i % 3], (size_t)y->size[i / 3][i % 3]);
}

void aff__experts_copy(const aff_experts *s, int layer, int e, uint8_t *slot)
{
    if (s->source.make) {
        s->source.make(s->source.ctx, layer, e, slot);
        return;
    }
    if (s->row_major) {
        aff__experts_arrange(s, layer, slot, aff__container_expert(s->container, (uint32_t)layer, (uint32_t)e));
        return;
    }
    aff__slot_gather(&s->layout, &s->expert[layer * s->experts + e], slot);
}

int aff__experts_files(const aff_experts *s)
{
    if (s->container) return aff__container_file(s->container) ? 1 : 0;
    if (s->path) return 1;
    return s->ckpt && aff__ckpt_shard_map(s->ckpt, 0)->data ? aff__ckpt_shards(s->ckpt) : 0;
}

aff_expert_file aff__experts_file(const aff_experts *s, int i)
{
    if (s->container) return (aff_expert_file){aff__container_path(s->container), aff__container_file(s->container)};
    return s->path ? (aff_expert_file){s->path, &s->file} : (aff_expert_file){aff__ckpt_shard_path(s->ckpt, i), aff__ckpt_shard_map(s->ckpt, i)};
}

/* The file whose mapping has the address. */
static aff_piece piece_at(const aff_experts *s, const uint8_t *data, uint64_t bytes, uint64_t at)
{
    aff_piece p = {.bytes = bytes, .at = at};
    for (int n = aff__experts_files(s); p.file < n; p.file++) {
        const aff_map *m = aff__experts_file(s, p.file).map;
        if (!m->data || (uintptr_t)data < (uintptr_t)m->data || (uintptr_t)data - (uintptr_t)m->data >= m->size) continue;
        p.off = (uint64_t)(data - m->data);
        return p;
    }
    return (aff_piece){0};
}

int aff__experts_pieces(const aff_experts *s, int layer, int e, aff_piece out[AFF_MAX_PIECES])
{
    int n = 0;
    const uint8_t *from[3][3];
    if (!aff__experts_files(s)) return 0;
    if (s->container) { /* a record as it stands, if slots are like it */
        const aff_clayer *l = aff__container_layer(s->container, (uint32_t)layer);
        const aff_slot_layout here = layout_of(s->shape.dtype, l);
        if (s->row_major || same_layout(&here, &s->layout)) {
            out[0] = piece_at(s, aff__container_expert(s->container, (uint32_t)layer, (uint32_t)e), l->stride, 0);
            return 1;
        }
    }
    if (s->path) {
        out[0] = piece_at(s, s->expert[layer * s->experts + e].gate.codes, s->layout.bytes, 0);
        return 1;
    }
    planes_of(&s->expert[layer * s->experts + e], from);
    for (int i = 0; i < 9; i++)
        if (s->layout.size[i / 3][i % 3]) out[n++] = piece_at(s, from[i / 3][i % 3], s->layout.size[i / 3][i % 3], s->layout.plane[i / 3][i % 3]);
    return n;
}

aff_tier aff__experts_tier(aff_experts *s, int layer, int e)
{
    const uint8_t *at = s->row_major ? aff__container_expert(s->container, (uint32_t)layer, (uint32_t)e) : s->expert[layer * s->experts + e].gate.codes;
    unsigned char resident = 1;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (mincore((void *)((uintptr_t)at / page * page), page, &resident) != 0) return AFF_TIER_HOST; /* nothing is known: as if it were */
    return resident & 1 ? AFF_TIER_HOST : AFF_TIER_DISK;
}
