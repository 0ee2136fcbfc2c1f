/* Copies between a sequence's arrays and flat bytes. One walk over the parts (`walk_tail`) serves size, save, load and
 * digest, so the four cannot disagree about the order. */
#include "state/snapshot.h"
#include "base/mem.h"
#include "state/seq_internal.h"
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

typedef enum { SIZE, SAVE, LOAD, DIGEST } mode;

typedef struct {
    mode mode;
    const aff_memory *mem;
    uint8_t *at; /* LOAD: only read through */
    uint64_t size;
    XXH3_state_t *hash;
    aff_status status; /* of the first transfer that failed (a device's) */
    aff_error err;
} cursor;

/* The bytes of an array of a device, piece by piece. */
static void digest(cursor *c, const uint8_t *mine, uint64_t n)
{
    uint8_t piece[8192];
    while (n && c->status == AFF_OK) {
        const uint64_t m = n < sizeof piece ? n : sizeof piece;
        c->status = c->mem->read(c->mem, piece, mine, m, &c->err);
        XXH3_128bits_update(c->hash, piece, (size_t)m);
        mine += m;
        n -= m;
    }
}

static void part(cursor *c, void *mine, uint64_t n)
{
    c->size += n;
    if (c->mode == SIZE || !n) return;
    if (c->mode == DIGEST) {
        if (c->mem->host)
            XXH3_128bits_update(c->hash, mine, (size_t)n);
        else
            digest(c, mine, n);
        return;
    }
    if (c->status == AFF_OK)
        c->status = c->mode == SAVE ? c->mem->read(c->mem, c->at, mine, n, &c->err)
                                    : c->mem->write(c->mem, mine, c->at, n, &c->err);
    c->at += n;
}

static aff_status done(const cursor *c, aff_error *err)
{
    if (c->status != AFF_OK && err) *err = c->err;
    return c->status;
}

/* Slots of positions lo..hi-1, at most two runs. */
static void ring(cursor *c, void *base, int slots, uint64_t row_bytes, int64_t lo, int64_t hi)
{
    while (lo < hi) {
        const int64_t slot = lo % slots, run = hi - lo < slots - slot ? hi - lo : slots - slot;
        part(c, (uint8_t *)base + (uint64_t)slot * row_bytes, (uint64_t)run * row_bytes);
        lo += run;
    }
}

static void walk_tail(cursor *c, const aff_seq *s, int64_t pos, int64_t low)
{
    const aff_config *cf = aff__net_config(s->net);
    const uint64_t row = (uint64_t)s->row.bytes;
    const int64_t raw_from = low > cf->window ? low - cf->window : 0;
    for (int l = 0; l < s->n_layers; l++) {
        const aff_layer_state *y = &s->layer[l];
        const int ratio = cf->ratio[l];
        ring(c, y->raw, y->raw_size, row, raw_from, pos);
        if (!ratio) continue;
        const int64_t from = aff__history_from(low, ratio);
        const uint64_t width = (ratio == 4 ? 2 : 1) * (uint64_t)cf->head_dim * sizeof(float),
                       iwidth = 2 * (uint64_t)cf->index_dim * sizeof(float);
        ring(c, y->hist_c, y->hist_size, width, from, pos);
        ring(c, y->hist_z, y->hist_size, width, from, pos);
        if (ratio != 4) continue;
        ring(c, y->ihist_c, y->hist_size, iwidth, from, pos);
        ring(c, y->ihist_z, y->hist_size, iwidth, from, pos);
    }
    for (int i = 0; i < s->n_stages; i++) ring(c, s->stage[i].raw, s->stage[i].raw_size, row, raw_from, pos);
}

static void walk_rows(cursor *c, const aff_seq *s, int64_t from, int64_t to)
{
    for (int i = 0; i < s->n_spans; i++) {
        const aff_span *sp = &s->span[i];
        const uint64_t a = (uint64_t)(from / sp->ratio) * sp->row_bytes, b = (uint64_t)(to / sp->ratio) * sp->row_bytes;
        part(c, (uint8_t *)s->region + sp->off + a, b - a);
    }
}

uint64_t aff__seq_rows_bytes(const aff_seq *s, int64_t from, int64_t to)
{
    cursor c = {.mode = SIZE, .mem = s->mem};
    walk_rows(&c, s, from, to);
    return c.size;
}

aff_status aff__seq_rows_save(const aff_seq *s, int64_t from, int64_t to, uint8_t *out, aff_error *err)
{
    cursor c = {.mode = SAVE, .mem = s->mem, .at = out};
    walk_rows(&c, s, from, to);
    return done(&c, err);
}

aff_status aff__seq_rows_load(aff_seq *s, int64_t from, int64_t to, const uint8_t *in, aff_error *err)
{
    AFF_TRY(aff__seq_grow(s, to, err));
    cursor c = {.mode = LOAD, .mem = s->mem, .at = (uint8_t *)(uintptr_t)in};
    walk_rows(&c, s, from, to);
    return done(&c, err);
}

uint64_t aff__seq_tail_bytes(const aff_seq *s, int64_t pos, int64_t low)
{
    cursor c = {.mode = SIZE, .mem = s->mem};
    walk_tail(&c, s, pos, low);
    return c.size;
}

aff_status aff__seq_tail_save(const aff_seq *s, uint8_t *out, aff_error *err)
{
    cursor c = {.mode = SAVE, .mem = s->mem, .at = out};
    walk_tail(&c, s, s->pos, aff__seq_low(s));
    return done(&c, err);
}

aff_status aff__seq_tail_load(aff_seq *s, int64_t pos, int64_t low, const uint8_t *in, aff_error *err)
{
    if (low < 0 || low > pos || pos - low > AFF_MAX_ROLLBACK || pos > s->capacity)
        return aff__fail(err, AFF_E_INVALID, "restore at position %lld, down to %lld: expected at most %lld, %d apart",
                         (long long)pos, (long long)low, (long long)s->capacity, AFF_MAX_ROLLBACK);
    AFF_TRY(aff__seq_grow(s, pos, err));
    cursor c = {.mode = LOAD, .mem = s->mem, .at = (uint8_t *)(uintptr_t)in};
    walk_tail(&c, s, pos, low);
    AFF_TRY(done(&c, err));
    s->pos = s->high = pos;
    s->floor = low;
    return AFF_OK;
}

/* ---- digest, fingerprint ---- */

aff_hash aff__seq_digest(const aff_seq *s)
{
    XXH3_state_t h;
    cursor c = {.mode = DIGEST, .mem = s->mem, .hash = &h};
    XXH3_INITSTATE(&h);
    XXH3_128bits_reset(&h);
    XXH3_128bits_update(&h, &s->pos, sizeof s->pos);
    walk_rows(&c, s, 0, s->pos);
    walk_tail(&c, s, s->pos, s->pos);
    const XXH128_hash_t d = XXH3_128bits_digest(&h);
    return (aff_hash){d.low64, d.high64};
}

enum { STATE_VERSION = 2 }; /* to be raised when the bytes of a state or the numerics behind them change */

aff_hash aff__seq_fingerprint(const aff_net *n, const char *results)
{
    const aff_config *c = aff__net_config(n);
    const aff_rowfmt row = aff__rowfmt_kv(aff__net_numerics(n), c->head_dim, c->rope_dim),
                     key = aff__rowfmt_key(aff__net_numerics(n), c->index_dim);
    const int32_t fixed[] = {STATE_VERSION, AFF_MAX_ROLLBACK, (int32_t)aff__net_numerics(n),
                             row.bytes,     row.coded,        row.bf16,
                             key.bytes,     key.coded,        c->window};
    uint64_t id[2];
    uint8_t bytes[sizeof id + sizeof fixed + 32 + 64] = {0}; /* of the CPU's states the last 64 are not hashed */
    aff__net_identity(n, id);
    memcpy(bytes, id, sizeof id);
    memcpy(bytes + sizeof id, fixed, sizeof fixed);
    strncpy((char *)bytes + sizeof id + sizeof fixed, aff_version(), 31);
    const bool device = results && *results;
    if (device) strncpy((char *)bytes + sizeof id + sizeof fixed + 32, results, 63);
    const XXH128_hash_t d = XXH3_128bits(bytes, sizeof bytes - (device ? 0 : 64));
    return (aff_hash){d.low64, d.high64};
}

/* ---- one piece ---- */

typedef struct {
    char magic[8];
    aff_hash fingerprint, sum; /* sum: of this head with a sum of 0, and the payload */
    int64_t pos, low;
    uint64_t payload;
} snapshot_head;

static const char snapshot_magic[8] = {'A', 'F', 'F', 'S', 'N', 'A', 'P', '1'};

static aff_hash sum_of(snapshot_head h, const uint8_t *payload)
{
    XXH3_state_t x;
    h.sum = (aff_hash){0};
    XXH3_INITSTATE(&x);
    XXH3_128bits_reset(&x);
    XXH3_128bits_update(&x, &h, sizeof h);
    XXH3_128bits_update(&x, payload, (size_t)h.payload);
    const XXH128_hash_t d = XXH3_128bits_digest(&x);
    return (aff_hash){d.low64, d.high64};
}

static bool same_hash(aff_hash a, aff_hash b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

aff_status aff__seq_snapshot(const aff_seq *s, uint8_t **out, uint64_t *size, aff_error *err)
{
    const uint64_t rows = aff__seq_rows_bytes(s, 0, s->pos), tail = aff__seq_tail_bytes(s, s->pos, aff__seq_low(s));
    snapshot_head h = {
        .fingerprint = aff__seq_fingerprint(s->net, s->mem->results), .pos = s->pos, .low = aff__seq_low(s), .payload = rows + tail};
    uint8_t *p;
    memcpy(h.magic, snapshot_magic, sizeof h.magic);
    AFF_TRY(aff__calloc(&p, sizeof h + h.payload, 1, "snapshot", err));
    aff_status st = aff__seq_rows_save(s, 0, s->pos, p + sizeof h, err);
    if (st == AFF_OK) st = aff__seq_tail_save(s, p + sizeof h + rows, err);
    if (st != AFF_OK) {
        free(p);
        return st;
    }
    h.sum = sum_of(h, p + sizeof h);
    memcpy(p, &h, sizeof h);
    *out = p;
    *size = sizeof h + h.payload;
    return AFF_OK;
}

aff_status aff__seq_restore(aff_seq *s, const uint8_t *in, uint64_t size, aff_error *err)
{
    snapshot_head h;
    if (size < sizeof h)
        return aff__fail(err, AFF_E_FORMAT, "snapshot: expected at least %zu bytes, got %llu", sizeof h,
                         (unsigned long long)size);
    memcpy(&h, in, sizeof h);
    if (memcmp(h.magic, snapshot_magic, sizeof h.magic) || !same_hash(h.fingerprint, aff__seq_fingerprint(s->net, s->mem->results)))
        return aff__fail(err, AFF_E_FORMAT, "snapshot: of another model, layout or numerics");
    if (h.pos < 0 || h.pos > s->capacity || h.low < 0 || h.low > h.pos || h.pos - h.low > AFF_MAX_ROLLBACK)
        return aff__fail(err, AFF_E_LIMIT, "snapshot: at position %lld, expected at most %lld", (long long)h.pos,
                         (long long)s->capacity);
    const uint64_t rows = aff__seq_rows_bytes(s, 0, h.pos), tail = aff__seq_tail_bytes(s, h.pos, h.low);
    if (h.payload != rows + tail || size - sizeof h != h.payload || !same_hash(h.sum, sum_of(h, in + sizeof h)))
        return aff__fail(err, AFF_E_FORMAT, "snapshot: damaged: %llu bytes, expected %llu and their checksum",
                         (unsigned long long)size, (unsigned long long)(sizeof h + rows + tail));
    AFF_TRY(aff__seq_grow(s, h.pos, err));
    AFF_TRY(aff__seq_rows_load(s, 0, h.pos, in + sizeof h, err));
    return aff__seq_tail_load(s, h.pos, h.low, in + sizeof h + rows, err);
}
