#include "backend/gpu/encode.h"
#include "base/mem.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(aff_k_search) == sizeof(aff_search_table), "one search table");

/* What one matrix at a time needs. `host` is pinned; `dev` has the same arrays at the same places, and room for exponents of rows. */
typedef struct lane {
    aff_stream *stream;
    char *host, *dev;
    uint64_t bytes;
    bool busy;
} lane;

enum { LANES = 4 };

typedef struct encoder {
    aff_rt *rt;
    char *tables; /* both search tables, rank, near */
    lane lane[LANES];
    pthread_mutex_t lock; /* of busy */
    pthread_cond_t freed;
} encoder;

enum { RANK_BYTES = AFF_SEARCH_J * AFF_QUADS * 8 * 4, NEAR_BYTES = AFF_SEARCH_J * AFF_QUADS * 2 * 2 };

static aff_status begin(void *ctx, const aff_search *s, aff_error *err)
{
    encoder *e = ctx;
    const uint64_t tables = sizeof s->table;
    aff_stream *st = e->lane[0].stream;
    AFF_TRY(aff__rt_alloc(e->rt, (void **)&e->tables, tables + RANK_BYTES + NEAR_BYTES, "search tables of the encoder", err));
    AFF_TRY(aff__rt_copy(e->rt, st, e->tables, s->table, tables, err));
    AFF_TRY(aff__rt_copy(e->rt, st, e->tables + tables, s->rank, RANK_BYTES, err));
    AFF_TRY(aff__rt_copy(e->rt, st, e->tables + tables + RANK_BYTES, s->near, NEAR_BYTES, err));
    return aff__rt_sync(e->rt, st, err);
}

static lane *take(encoder *e)
{
    lane *l = NULL;
    pthread_mutex_lock(&e->lock);
    while (!l) {
        for (int i = 0; i < LANES && !l; i++)
            if (!e->lane[i].busy) l = &e->lane[i];
        if (!l) pthread_cond_wait(&e->freed, &e->lock);
    }
    l->busy = true;
    pthread_mutex_unlock(&e->lock);
    return l;
}

static void give(encoder *e, lane *l)
{
    pthread_mutex_lock(&e->lock);
    l->busy = false;
    pthread_cond_signal(&e->freed);
    pthread_mutex_unlock(&e->lock);
}

/* Offsets in a lane's memory. */
typedef struct places {
    uint64_t codes, scales, weight, input; /* input: end of what goes up */
    uint64_t out_codes, out_fields, output, rows, all;
} places;

static places places_of(const aff_matdesc *m)
{
    places p = {.codes = 0};
    p.scales = aff__align_up(m->rows * (m->cols / 2), 256);
    p.weight = p.scales + aff__align_up(m->rows * (m->cols / 32), 256);
    p.input = p.weight + aff__align_up(m->cols * sizeof(float), 256);
    p.out_codes = p.input;
    p.out_fields = p.out_codes + aff__align_up(m->data_size, 256);
    p.output = p.out_fields + aff__align_up(m->scale_size, 256);
    p.rows = p.output;
    p.all = p.rows + m->rows * sizeof(int32_t);
    return p;
}

static aff_status room(encoder *e, lane *l, uint64_t bytes, aff_error *err)
{
    if (bytes <= l->bytes) return AFF_OK;
    aff__rt_host_free(e->rt, l->host);
    aff__rt_free(e->rt, l->dev);
    l->host = l->dev = NULL;
    l->bytes = 0;
    AFF_TRY(aff__rt_host_alloc(e->rt, (void **)&l->host, bytes, "matrices of the encoder", err));
    AFF_TRY(aff__rt_alloc(e->rt, (void **)&l->dev, bytes, "matrices of the encoder", err));
    l->bytes = bytes;
    return AFF_OK;
}

static aff_status run(encoder *e, lane *l, const aff_matdesc *m, bool weighted, aff_error *err)
{
    const places p = places_of(m);
    const uint8_t *codes = (const uint8_t *)l->dev + p.codes, *scales = (const uint8_t *)l->dev + p.scales;
    int32_t *row = (int32_t *)(void *)(l->dev + p.rows);
    const aff_k_encode_rows r = {codes, scales, row, (int32_t)m->rows, (int32_t)m->cols};
    const aff_k_encode k = {.codes = codes,
                            .scales = scales,
                            .row = row,
                            .weight = weighted ? (const float *)(const void *)(l->dev + p.weight) : NULL,
                            .table = (const aff_k_search *)(const void *)e->tables,
                            .rank = (const float *)(const void *)(e->tables + 2 * sizeof(aff_k_search)),
                            .near = (const uint16_t *)(const void *)(e->tables + 2 * sizeof(aff_k_search) + RANK_BYTES),
                            .out_codes = (uint8_t *)l->dev + p.out_codes,
                            .out_fields = (uint8_t *)l->dev + p.out_fields,
                            .code_row = (int64_t)(aff__group_codes_at(m, 1, 0) - m->data_off),
                            .code_group = (int64_t)(aff__group_codes_at(m, 0, 1) - m->data_off),
                            .field_row = (int64_t)(aff__group_fields_at(m, 1, 0) - m->scale_off),
                            .field_group = (int64_t)(aff__group_fields_at(m, 0, 1) - m->scale_off),
                            .rows = (int32_t)m->rows,
                            .cols = (int32_t)m->cols};
    const uint64_t tasks = (m->rows * (m->cols / 64) + 7) / 8, most = 5 * (uint64_t)aff__rt_info(e->rt)->units;
    AFF_TRY(aff__rt_copy(e->rt, l->stream, l->dev, l->host, p.input, err));
    AFF_TRY(aff__rt_launch(e->rt, l->stream, AFF_K_encode_rows, (unsigned)((m->rows + 7) / 8), 256, 0, 0, &r, err));
    AFF_TRY(aff__rt_launch(e->rt, l->stream, AFF_K_encode, (unsigned)(tasks < most ? tasks : most), 256, (unsigned)aff__k_encode_smem(), 0, &k, err));
    AFF_TRY(aff__rt_copy(e->rt, l->stream, l->host + p.out_codes, l->dev + p.out_codes, p.output - p.out_codes, err));
    return aff__rt_sync(e->rt, l->stream, err);
}

static aff_status choose(void *ctx, const aff_matdesc *m, const aff_mxfp4 *src, const float *weight, uint8_t *record, aff_error *err)
{
    encoder *e = ctx;
    const places p = places_of(m);
    if (m->rows > INT32_MAX / 2 || m->cols > INT32_MAX / 2)
        return aff__fail(err, AFF_E_UNSUPPORTED, "encoder on a device: a matrix of %llu x %llu", (unsigned long long)m->rows, (unsigned long long)m->cols);
    lane *l = take(e);
    aff_status s = room(e, l, p.all, err);
    if (s == AFF_OK) {
        memcpy(l->host + p.codes, src->codes, m->rows * (m->cols / 2));
        memcpy(l->host + p.scales, src->scales, m->rows * (m->cols / 32));
        if (weight) memcpy(l->host + p.weight, weight, m->cols * sizeof *weight);
        s = run(e, l, m, weight != NULL, err);
    }
    if (s == AFF_OK) {
        memcpy(record + m->data_off, l->host + p.out_codes, m->data_size);
        memcpy(record + m->scale_off, l->host + p.out_fields, m->scale_size);
    }
    give(e, l);
    return s;
}

aff_status aff__gpu_encoder_create(aff_encoder *out, const aff_device_spec *spec, aff_error *err)
{
    encoder *e;
    *out = (aff_encoder){0};
    AFF_TRY(aff__calloc(&e, 1, sizeof *e, "encoder", err));
    *out = (aff_encoder){e, begin, choose};
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->freed, NULL);
    aff_status s = aff__rt_open(&e->rt, spec, err);
    for (int i = 0; s == AFF_OK && i < LANES; i++) s = aff__rt_stream_create(e->rt, &e->lane[i].stream, err);
    if (s != AFF_OK) aff__gpu_encoder_free(out);
    return s;
}

void aff__gpu_encoder_free(aff_encoder *out)
{
    encoder *e = out->ctx;
    *out = (aff_encoder){0};
    if (!e) return;
    for (int i = 0; e->rt && i < LANES; i++) {
        aff__rt_host_free(e->rt, e->lane[i].host);
        aff__rt_free(e->rt, e->lane[i].dev);
        if (e->lane[i].stream) aff__rt_stream_free(e->rt, e->lane[i].stream);
    }
    if (e->rt) {
        aff__rt_free(e->rt, e->tables);
        aff__rt_close(e->rt);
    }
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->freed);
    free(e);
}
