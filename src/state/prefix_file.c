#include "state/prefix_file.h"
#include "base/mem.h"
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

static const uint8_t magic[8] = {'A', 'F', 'F', 'P', 'F', 'X', '1', 0};
enum { SELF_AT = 120 };

static void put(uint8_t *p, uint64_t v, int n)
{
    for (int i = 0; i < n; i++) p[i] = (uint8_t)(v >> 8 * i);
}

static uint64_t get(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

static void put_hash(uint8_t *p, aff_hash h)
{
    put(p, h.lo, 8);
    put(p + 8, h.hi, 8);
}

static aff_hash get_hash(const uint8_t *p)
{
    return (aff_hash){get(p, 8), get(p + 8, 8)};
}

static aff_hash hash_of(XXH128_hash_t d)
{
    return (aff_hash){d.low64, d.high64};
}

uint64_t aff__pfx_payload_at(uint32_t n)
{
    return aff__align_up(AFF_PFX_HEAD + 4 * (uint64_t)n, AFF_PFX_PAGE);
}

uint64_t aff__pfx_size(const aff_pfx_entry *e)
{
    return aff__pfx_payload_at(e->n) + aff__align_up(e->payload, AFF_PFX_PAGE);
}

/* Of the header in front of its own place, and of all between it and the payload. */
static uint64_t self_hash(const uint8_t *buf, uint32_t n)
{
    XXH3_state_t h;
    XXH3_INITSTATE(&h);
    XXH3_64bits_reset(&h);
    XXH3_64bits_update(&h, buf, SELF_AT);
    XXH3_64bits_update(&h, buf + AFF_PFX_HEAD, (size_t)(aff__pfx_payload_at(n) - AFF_PFX_HEAD));
    return XXH3_64bits_digest(&h);
}

void aff__pfx_seal(aff_pfx_entry *e, const int32_t *id, uint8_t *buf)
{
    const uint64_t at = aff__pfx_payload_at(e->n), size = aff__pfx_size(e);
    memset(buf + at + e->payload, 0, (size_t)(size - at - e->payload));
    e->sum = hash_of(XXH3_128bits(buf + at, (size_t)(size - at)));
    memset(buf, 0, (size_t)at);
    memcpy(buf, magic, sizeof magic);
    put(buf + 8, e->kind, 4);
    put(buf + 12, e->n, 4);
    put_hash(buf + 16, e->fingerprint);
    put_hash(buf + 32, e->key);
    put_hash(buf + 48, e->parent);
    put(buf + 64, (uint64_t)e->pos, 8);
    put(buf + 72, (uint64_t)e->low, 8);
    put(buf + 80, e->payload, 8);
    put_hash(buf + 88, e->sum);
    put_hash(buf + 104, e->state);
    for (uint32_t i = 0; i < e->n; i++) put(buf + AFF_PFX_HEAD + 4 * (uint64_t)i, (uint32_t)id[i], 4);
    put(buf + SELF_AT, self_hash(buf, e->n), 8);
}

bool aff__pfx_head(aff_pfx_entry *e, const uint8_t *buf, uint64_t have, uint64_t size)
{
    *e = (aff_pfx_entry){0};
    if (have < AFF_PFX_PAGE || size < have || memcmp(buf, magic, sizeof magic) != 0) return false;
    const uint64_t kind = get(buf + 8, 4), pos = get(buf + 64, 8), low = get(buf + 72, 8);
    e->kind = kind == AFF_PFX_BLOCK ? AFF_PFX_BLOCK : AFF_PFX_CHECKPOINT;
    e->n = (uint32_t)get(buf + 12, 4);
    e->fingerprint = get_hash(buf + 16);
    e->key = get_hash(buf + 32);
    e->parent = get_hash(buf + 48);
    e->payload = get(buf + 80, 8);
    e->sum = get_hash(buf + 88);
    e->state = get_hash(buf + 104);
    if (kind != (uint64_t)e->kind || e->n > AFF_PFX_MAX_TOKENS || pos > INT64_MAX || low > pos || e->n > pos)
        return false;
    e->pos = (int64_t)pos;
    e->low = (int64_t)low;
    return e->payload <= size && aff__pfx_size(e) == size;
}

bool aff__pfx_check(aff_pfx_entry *e, const uint8_t *buf, uint64_t size)
{
    if (!aff__pfx_head(e, buf, size, size)) return false;
    const uint64_t at = aff__pfx_payload_at(e->n);
    if (self_hash(buf, e->n) != get(buf + SELF_AT, 8)) return false;
    const aff_hash sum = hash_of(XXH3_128bits(buf + at, (size_t)(size - at)));
    return sum.lo == e->sum.lo && sum.hi == e->sum.hi;
}

bool aff__pfx_same_ids(const aff_pfx_entry *e, const uint8_t *buf, const int32_t *id)
{
    for (uint32_t i = 0; i < e->n; i++)
        if (get(buf + AFF_PFX_HEAD + 4 * (uint64_t)i, 4) != (uint32_t)id[i]) return false;
    return true;
}

aff_hash aff__pfx_key(aff_hash fingerprint, aff_pfx_kind kind, aff_hash parent, const int32_t *id, uint32_t n)
{
    uint8_t head[40];
    XXH3_state_t h;
    put_hash(head, fingerprint);
    put_hash(head + 16, parent);
    put(head + 32, kind, 4);
    put(head + 36, n, 4);
    XXH3_INITSTATE(&h);
    XXH3_128bits_reset(&h);
    XXH3_128bits_update(&h, head, sizeof head);
    XXH3_128bits_update(&h, id, (size_t)n * sizeof *id);
    return hash_of(XXH3_128bits_digest(&h));
}
