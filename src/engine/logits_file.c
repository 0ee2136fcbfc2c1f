#include "engine/logits_file.h"
#include "base/file.h"
#include "base/mem.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

enum { HEADER = 80, ROW_HEAD = 24, CHECKED = 72, DATA_HASH = 56 };

static uint64_t row_bytes(const aff_logits_head *h)
{
    return h->top ? ROW_HEAD + 8 * (uint64_t)h->top : 4 * (uint64_t)h->vocab;
}

/* The machine is little-endian, like every file format here. */
static void header_put(uint8_t b[HEADER], const aff_logits_head *h, uint64_t data_hash)
{
    const uint32_t version = 1;
    memset(b, 0, HEADER);
    memcpy(b, "AFFLOGIT", 8);
    memcpy(b + 8, &version, 4);
    memcpy(b + 12, &h->vocab, 4);
    memcpy(b + 16, &h->positions, 8);
    memcpy(b + 24, &h->top, 4);
    memcpy(b + 28, &h->chunk, 4);
    memcpy(b + 32, &h->text, 8);
    memcpy(b + 40, &h->model, 8);
    memcpy(b + 48, &h->numerics, 4);
    memcpy(b + 52, &h->bos, 4);
    memcpy(b + DATA_HASH, &data_hash, 8);
    const uint64_t own = XXH3_64bits(b, CHECKED);
    memcpy(b + CHECKED, &own, 8);
}

static void header_get(aff_logits_head *h, const uint8_t *b)
{
    memcpy(&h->vocab, b + 12, 4);
    memcpy(&h->positions, b + 16, 8);
    memcpy(&h->top, b + 24, 4);
    memcpy(&h->chunk, b + 28, 4);
    memcpy(&h->text, b + 32, 8);
    memcpy(&h->model, b + 40, 8);
    memcpy(&h->numerics, b + 48, 4);
    memcpy(&h->bos, b + 52, 4);
}

/* ---- writing ---- */

struct aff_logits_out {
    aff_outfile file;
    bool open;
    aff_logits_head head;
    uint64_t done;
    uint8_t *row;
    int32_t *ids;
    XXH3_state_t *hash;
};

aff_status aff__logits_create(aff_logits_out **out, const char *path, const aff_logits_head *h, aff_error *err)
{
    aff_logits_out *o;
    *out = NULL;
    if (!h->vocab || h->vocab > INT32_MAX || !h->positions ||
        (h->top && (h->top < AFF_LOGITS_TOP_MIN || h->top > AFF_LOGITS_TOP_MAX || h->top > h->vocab)))
        return aff__fail(err, AFF_E_INVALID,
                         "%s: %u logits a row: expected 0 (all) or %d to %d, at most the vocabulary (%u)", path, h->top,
                         AFF_LOGITS_TOP_MIN, AFF_LOGITS_TOP_MAX, h->vocab);
    AFF_TRY(aff__calloc(&o, 1, sizeof *o, path, err));
    o->head = *h;
    aff_status s = aff__calloc(&o->row, row_bytes(h), 1, path, err);
    if (s == AFF_OK) s = aff__calloc(&o->ids, h->top, sizeof *o->ids, path, err);
    if (s == AFF_OK && !(o->hash = XXH3_createState()))
        s = aff__fail(err, AFF_E_NOMEM, "%s: cannot allocate a hash state", path);
    if (s == AFF_OK) s = aff__out_open(&o->file, path, err);
    if (s == AFF_OK)
        o->open = true;
    else
        aff__logits_abort(o), o = NULL;
    if (o) XXH3_64bits_reset(o->hash);
    *out = o;
    return s;
}

/* A row with its N largest. The mass of the others is summed over them, not taken as 1 less the listed. */
static aff_status pack_top(aff_logits_out *o, const float *l, int32_t target, aff_error *err)
{
    const uint32_t N = o->head.top;
    double lse, rest = 0;
    uint8_t *p = o->row;
    AFF_TRY(aff__eval_lse(l, (int)o->head.vocab, &lse, err));
    aff__eval_top(l, (int)o->head.vocab, (int)N, o->ids);
    const int32_t last = o->ids[N - 1];
    for (int32_t v = 0; v < (int32_t)o->head.vocab; v++)
        if (l[v] < l[last] || (l[v] == l[last] && v > last)) rest += exp((double)l[v] - lse);
    memcpy(p, &lse, 8);
    memcpy(p + 8, &rest, 8);
    memcpy(p + 16, &l[target], 4);
    memset(p + 20, 0, 4);
    memcpy(p + ROW_HEAD, o->ids, 4 * (size_t)N);
    for (uint32_t i = 0; i < N; i++) memcpy(p + ROW_HEAD + 4 * (size_t)(N + i), &l[o->ids[i]], 4);
    return AFF_OK;
}

aff_status aff__logits_put(aff_logits_out *o, const float *l, int32_t target, aff_error *err)
{
    const uint64_t n = row_bytes(&o->head);
    if (o->done == o->head.positions || target < 0 || (uint32_t)target >= o->head.vocab)
        return aff__fail(err, AFF_E_INVALID, "%s: row %" PRIu64 " of %" PRIu64 ", token %d of %u", o->file.path,
                         o->done, o->head.positions, target, o->head.vocab);
    if (o->head.top)
        AFF_TRY(pack_top(o, l, target, err));
    else
        memcpy(o->row, l, (size_t)n);
    XXH3_64bits_update(o->hash, o->row, (size_t)n);
    return aff__out_write(&o->file, o->row, n, HEADER + o->done++ * n, err);
}

aff_status aff__logits_finish(aff_logits_out *o, aff_error *err)
{
    uint8_t b[HEADER];
    aff_status s = AFF_OK;
    if (o->done != o->head.positions)
        s = aff__fail(err, AFF_E_INVALID, "%s: %" PRIu64 " of %" PRIu64 " rows", o->file.path, o->done,
                      o->head.positions);
    header_put(b, &o->head, XXH3_64bits_digest(o->hash));
    if (s == AFF_OK) s = aff__out_write(&o->file, b, HEADER, 0, err);
    if (s == AFF_OK) {
        o->open = false;
        s = aff__out_commit(&o->file, err);
    }
    aff__logits_abort(o);
    return s;
}

void aff__logits_abort(aff_logits_out *o)
{
    if (!o) return;
    if (o->open) aff__out_abort(&o->file);
    XXH3_freeState(o->hash);
    free(o->row);
    free(o->ids);
    free(o);
}

/* ---- reading ---- */

struct aff_logits_in {
    char *path;
    aff_map map;
    const uint8_t *data;
    uint64_t size;
    aff_logits_head head;
};

static aff_status check_header(const aff_logits_in *f, bool check_all, aff_error *err)
{
    uint32_t version;
    uint64_t own, bytes, want;
    const aff_logits_head *h = &f->head;
    memcpy(&version, f->data + 8, 4);
    memcpy(&own, f->data + CHECKED, 8);
    if (version != 1) return aff__fail(err, AFF_E_UNSUPPORTED, "%s: expected version 1, got %u", f->path, version);
    if (own != XXH3_64bits(f->data, CHECKED))
        return aff__fail(err, AFF_E_FORMAT, "%s: its header is damaged (checksum)", f->path);
    if (!h->vocab || h->vocab > INT32_MAX || !h->positions || h->numerics > 2 ||
        (h->top && (h->top < AFF_LOGITS_TOP_MIN || h->top > AFF_LOGITS_TOP_MAX || h->top > h->vocab)))
        return aff__fail(err, AFF_E_FORMAT, "%s: header: vocabulary %u, %" PRIu64 " positions, top %u make no sense",
                         f->path, h->vocab, h->positions, h->top);
    if (!aff__mul_ok(h->positions, row_bytes(h), &bytes) || !aff__add_ok(bytes, HEADER, &bytes) || bytes != f->size)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: expected %" PRIu64 " rows of %" PRIu64 " bytes after %d, got a file of %" PRIu64, f->path,
                         h->positions, row_bytes(h), HEADER, f->size);
    memcpy(&want, f->data + DATA_HASH, 8);
    if (check_all && want != XXH3_64bits(f->data + HEADER, (size_t)(f->size - HEADER)))
        return aff__fail(err, AFF_E_FORMAT, "%s: its rows are damaged (checksum)", f->path);
    return AFF_OK;
}

static aff_status open_bytes(aff_logits_in **out, aff_map map, const uint8_t *data, uint64_t size, const char *name,
                             bool check_all, aff_error *err)
{
    aff_logits_in *f = NULL;
    aff_status s = aff__calloc(&f, 1, sizeof *f, name, err);
    if (s != AFF_OK) {
        aff__map_close(&map);
        return s;
    }
    *f = (aff_logits_in){.map = map, .data = data, .size = size};
    s = aff__strndup(&f->path, name, strlen(name), err);
    if (s == AFF_OK && (size < HEADER || memcmp(data, "AFFLOGIT", 8) != 0))
        s = aff__fail(err, AFF_E_FORMAT, "%s: not a file of saved logits", name);
    if (s == AFF_OK) {
        header_get(&f->head, data);
        s = check_header(f, check_all, err);
    }
    if (s != AFF_OK) {
        aff__logits_close(f);
        return s;
    }
    *out = f;
    return AFF_OK;
}

aff_status aff__logits_open(aff_logits_in **out, const char *path, bool check_all, aff_error *err)
{
    aff_map map;
    *out = NULL;
    AFF_TRY(aff__map_open(&map, path, err));
    return open_bytes(out, map, map.data, map.size, path, check_all, err);
}

aff_status aff__logits_open_memory(aff_logits_in **out, const void *data, size_t size, const char *name, bool check_all,
                                   aff_error *err)
{
    *out = NULL;
    return open_bytes(out, (aff_map){0}, data, size, name, check_all, err);
}

void aff__logits_close(aff_logits_in *f)
{
    if (!f) return;
    aff__map_close(&f->map);
    free(f->path);
    free(f);
}

const aff_logits_head *aff__logits_head(const aff_logits_in *f)
{
    return &f->head;
}

static aff_status unpack_top(const aff_logits_in *f, const uint8_t *p, uint64_t i, float *logit, int32_t *id,
                             aff_eval_ref *r, aff_error *err)
{
    const uint32_t N = f->head.top;
    *r = (aff_eval_ref){.n = (int)N, .id = id, .logit = logit};
    memcpy(&r->lse, p, 8);
    memcpy(&r->rest, p + 8, 8);
    memcpy(&r->target, p + 16, 4);
    memcpy(id, p + ROW_HEAD, 4 * (size_t)N);
    memcpy(logit, p + ROW_HEAD + 4 * (size_t)N, 4 * (size_t)N);
    bool ok = isfinite(r->lse) && r->rest >= 0 && r->rest <= 1 && isfinite(r->target);
    for (uint32_t k = 0; k < N && ok; k++) {
        ok = id[k] >= 0 && (uint32_t)id[k] < f->head.vocab && isfinite(logit[k]);
        if (ok && k) ok = logit[k] < logit[k - 1] || (logit[k] == logit[k - 1] && id[k] > id[k - 1]);
    }
    if (!ok)
        return aff__fail(err, AFF_E_FORMAT, "%s: row %" PRIu64 ": numbers out of range or out of order", f->path, i);
    return AFF_OK;
}

aff_status aff__logits_get(const aff_logits_in *f, uint64_t i, int32_t target, float *logit, int32_t *id,
                           aff_eval_ref *r, aff_error *err)
{
    if (i >= f->head.positions || target < 0 || (uint32_t)target >= f->head.vocab)
        return aff__fail(err, AFF_E_INVALID, "%s: row %" PRIu64 " of %" PRIu64 ", token %d of %u", f->path, i,
                         f->head.positions, target, f->head.vocab);
    const uint8_t *p = f->data + HEADER + i * row_bytes(&f->head);
    if (f->head.top) return unpack_top(f, p, i, logit, id, r, err);
    memcpy(logit, p, (size_t)row_bytes(&f->head));
    aff_error why = {0};
    const aff_status s = aff__eval_full(logit, (int)f->head.vocab, target, r, &why);
    return s == AFF_OK ? s : aff__fail(err, s, "%s: row %" PRIu64 ": %s", f->path, i, why.msg);
}
