#include "format/container_disk.h"
#include "base/mem.h"
#include <inttypes.h>
#include <math.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

static const char file_magic[8] = {'A', 'F', 'F', 'I', 'N', 'I', 'T', 'Y'};
/* At byte 160: without these eight bytes, 120..191 is what an older writer left there and means nothing. */
static const char additions_magic[8] = {'A', 'F', 'F', '+', 'H', 'A', 'S', 'H'};

void aff__put32(uint8_t *out, uint32_t v)
{
    for (int i = 0; i < 4; i++) out[i] = (uint8_t)(v >> 8 * i);
}

void aff__put64(uint8_t *out, uint64_t v)
{
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(v >> 8 * i);
}

uint32_t aff__get32(const uint8_t *in)
{
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

uint64_t aff__get64(const uint8_t *in)
{
    return (uint64_t)aff__get32(in) | (uint64_t)aff__get32(in + 4) << 32;
}

void aff__cheader_put(uint8_t out[AFF_C_HEADER], const aff_cheader *h)
{
    const uint64_t fixed[13] = {h->meta_off,        h->meta_size,        h->tensor_dir_off, h->tensor_count,
                                h->tensor_data_off, h->tensor_data_size, h->layer_dir_off,  h->layer_count,
                                h->pool_off,        h->pool_size,        h->profile_off,    h->profile_size,
                                h->file_size};
    const uint64_t ours[5] = {h->prov_off, h->prov_size, h->hash_off, h->hash_size, h->features};
    memset(out, 0, AFF_C_HEADER);
    memcpy(out, file_magic, 8);
    aff__put32(out + 8, h->version);
    aff__put32(out + 12, h->flags);
    for (int i = 0; i < 13; i++) aff__put64(out + 16 + 8 * i, fixed[i]);
    if (!h->extended) return;
    for (int i = 0; i < 5; i++) aff__put64(out + 120 + 8 * i, ours[i]);
    memcpy(out + 160, additions_magic, 8);
}

bool aff__cheader_get(aff_cheader *h, const uint8_t in[AFF_C_HEADER])
{
    *h = (aff_cheader){.version = aff__get32(in + 8), .flags = aff__get32(in + 12)};
    uint64_t *fixed[13] = {&h->meta_off,        &h->meta_size,        &h->tensor_dir_off, &h->tensor_count,
                           &h->tensor_data_off, &h->tensor_data_size, &h->layer_dir_off,  &h->layer_count,
                           &h->pool_off,        &h->pool_size,        &h->profile_off,    &h->profile_size,
                           &h->file_size};
    uint64_t *ours[5] = {&h->prov_off, &h->prov_size, &h->hash_off, &h->hash_size, &h->features};
    for (int i = 0; i < 13; i++) *fixed[i] = aff__get64(in + 16 + 8 * i);
    h->extended = memcmp(in + 160, additions_magic, 8) == 0;
    for (int i = 0; h->extended && i < 5; i++) *ours[i] = aff__get64(in + 120 + 8 * i);
    return memcmp(in, file_magic, 8) == 0;
}

static void matdesc_put(uint8_t *out, const aff_matdesc *m)
{
    const uint64_t v[6] = {m->data_off, m->data_size, m->scale_off, m->scale_size, m->rscale_off, m->rscale_size};
    aff__put64(out, m->rows);
    aff__put64(out + 8, m->cols);
    aff__put32(out + 16, m->quant);
    aff__put32(out + 20, 0);
    for (int i = 0; i < 6; i++) aff__put64(out + 24 + 8 * i, v[i]);
}

static void matdesc_get(const uint8_t *in, aff_matdesc *m)
{
    uint64_t *v[6] = {&m->data_off, &m->data_size, &m->scale_off, &m->scale_size, &m->rscale_off, &m->rscale_size};
    m->rows = aff__get64(in);
    m->cols = aff__get64(in + 8);
    m->quant = aff__get32(in + 16);
    for (int i = 0; i < 6; i++) *v[i] = aff__get64(in + 24 + 8 * i);
}

void aff__ctensor_put(uint8_t out[AFF_C_TENSOR], const char *name, const aff_matdesc *m, uint64_t blob_off)
{
    size_t n = strlen(name);
    memset(out, 0, AFF_C_NAME);
    memcpy(out, name, n < AFF_C_NAME ? n : AFF_C_NAME - 1);
    matdesc_put(out + 128, m);
    aff__put64(out + 200, blob_off);
}

void aff__ctensor_get(const uint8_t in[AFF_C_TENSOR], aff_matdesc *m, uint64_t *blob_off)
{
    matdesc_get(in + 128, m);
    *blob_off = aff__get64(in + 200);
}

void aff__clayer_put(uint8_t out[AFF_C_LAYER], uint32_t index, const aff_clayer *l)
{
    aff__put32(out, index);
    aff__put32(out + 4, l->n_experts);
    aff__put64(out + 8, l->base_off);
    aff__put64(out + 16, l->stride);
    matdesc_put(out + 24, &l->gate);
    matdesc_put(out + 96, &l->up);
    matdesc_put(out + 168, &l->down);
}

void aff__clayer_get(const uint8_t in[AFF_C_LAYER], uint32_t *index, aff_clayer *l)
{
    *index = aff__get32(in);
    l->n_experts = aff__get32(in + 4);
    l->base_off = aff__get64(in + 8);
    l->stride = aff__get64(in + 16);
    matdesc_get(in + 24, &l->gate);
    matdesc_get(in + 96, &l->up);
    matdesc_get(in + 168, &l->down);
}

/* No overflow below: a plane has at most 2^60 bytes (dtype.h), so nine of them and their gaps fit. */

bool aff__layout_blob(aff_matdesc *m, aff_dtype dtype, uint64_t rows, uint64_t cols, uint64_t *extent)
{
    const aff_dtype_info *info = aff__dtype_info(dtype);
    *m = (aff_matdesc){.rows = rows, .cols = cols, .quant = dtype};
    if (!info || !aff__dtype_sizes(info, rows, cols, &m->data_size, &m->scale_size, &m->rscale_size)) return false;
    m->scale_off = aff__align_up(m->data_size, AFF_C_PLANE_ALIGN);
    m->rscale_off = aff__align_up(m->scale_off + m->scale_size, AFF_C_PLANE_ALIGN);
    *extent = aff__align_up(m->rscale_off + m->rscale_size, AFF_C_PLANE_ALIGN);
    return true;
}

bool aff__layout_record(aff_clayer *l, aff_dtype dtype, uint64_t inter, uint64_t hidden)
{
    const aff_dtype_info *info = aff__dtype_info(dtype);
    aff_matdesc *m[3] = {&l->gate, &l->up, &l->down};
    uint64_t at = 0;
    for (int i = 0; i < 3; i++) {
        *m[i] = (aff_matdesc){.rows = i < 2 ? inter : hidden, .cols = i < 2 ? hidden : inter, .quant = dtype};
        if (!info ||
            !aff__dtype_sizes(info, m[i]->rows, m[i]->cols, &m[i]->data_size, &m[i]->scale_size, &m[i]->rscale_size))
            return false;
    }
    for (int plane = 0; plane < 3; plane++) {
        for (int i = 0; i < 3; i++) {
            uint64_t *off[3] = {&m[i]->data_off, &m[i]->scale_off, &m[i]->rscale_off};
            const uint64_t size[3] = {m[i]->data_size, m[i]->scale_size, m[i]->rscale_size};
            at = aff__align_up(at, AFF_C_PLANE_ALIGN);
            *off[plane] = at;
            at += size[plane];
        }
    }
    l->stride = aff__align_up(at, AFF_C_RECORD_ALIGN);
    return true;
}

aff_status aff__codebook_check(const char *path, uint32_t quant, const uint8_t *data, uint64_t n, aff_error *err)
{
    bool pairs = quant == AFF_Q2P875;
    uint64_t expected = pairs ? 256 * 4 : 2048 * 4;
    if (n != expected)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: tensor '__codebook': expected %" PRIu64 " bytes for experts of type %s, got %" PRIu64,
                         path, expected, aff__dtype_info(quant)->name, n);
    for (uint64_t i = 0; !pairs && i < n; i++) {
        unsigned e = data[i] >> 3 & 15;
        if (e < 1 || e > 7)
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: tensor '__codebook': byte %" PRIu64
                             " is 0x%02x: expected an E4M3 exponent field of 1 to 7, got %u",
                             path, i, data[i], e);
    }
    for (uint64_t i = 0; pairs && i < n; i += 4) {
        float f;
        memcpy(&f, data + i, 4);
        if (!isfinite(f))
            return aff__fail(err, AFF_E_FORMAT, "%s: tensor '__codebook': value %" PRIu64 " is not finite", path,
                             i / 4);
    }
    return AFF_OK;
}

uint64_t aff__front_hash(const uint8_t *front, uint64_t size, const void *prov, uint64_t prov_size)
{
    XXH3_state_t s;
    XXH3_64bits_reset(&s);
    XXH3_64bits_update(&s, front, (size_t)size);
    if (prov_size) XXH3_64bits_update(&s, prov, (size_t)prov_size);
    return XXH3_64bits_digest(&s);
}
