/* A sequence's arrays lie one after another in a single reserved range of address space. The kernel gives pages (zeroed) as they
 * are first written, so a context of a million positions costs what is used of it. Reset only moves the position back: no row is
 * read before it has been written in the new sequence (rings are read at positions >= 0 only, groups only when complete). */
#define _DEFAULT_SOURCE
#include "state/seq_internal.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int pow2_at_least(int n)
{
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

/* First pass (base NULL): adds up sizes. Second pass: hands out pointers. */
typedef struct {
    char *base;
    uint64_t used;
    bool overflow;
} carve;

static float *take(carve *c, int64_t rows, int64_t width)
{
    uint64_t bytes, end;
    if (!aff__mul_ok((uint64_t)rows, (uint64_t)width * sizeof(float), &bytes) || bytes > UINT64_MAX / 4 ||
        !aff__add_ok(c->used, aff__align_up(bytes, 4096), &end)) {
        c->overflow = true;
        return NULL;
    }
    float *p = c->base ? (float *)(void *)(c->base + c->used) : NULL;
    c->used = end;
    return p;
}

static void carve_rings(carve *c, aff_layer_state *s, const aff_config *cf, int ratio)
{
    s->raw_size = cf->window + AFF_MAX_CHUNK;
    s->raw = take(c, s->raw_size, cf->head_dim);
    if (!ratio) return;
    const int coff = ratio == 4 ? 2 : 1;
    s->hist_size = pow2_at_least(coff * ratio + AFF_MAX_ROLLBACK);
    s->hist_c = take(c, s->hist_size, (int64_t)coff * cf->head_dim);
    s->hist_z = take(c, s->hist_size, (int64_t)coff * cf->head_dim);
    if (ratio != 4) return;
    s->ihist_c = take(c, s->hist_size, 2 * (int64_t)cf->index_dim);
    s->ihist_z = take(c, s->hist_size, 2 * (int64_t)cf->index_dim);
}

static void carve_growing(carve *c, aff_layer_state *s, const aff_config *cf, int ratio, int64_t capacity)
{
    if (!ratio) return;
    s->comp = take(c, capacity / ratio + 1, cf->head_dim);
    if (ratio == 4) s->ikey = take(c, capacity / ratio + 1, cf->index_dim);
}

static void carve_all(carve *c, aff_seq *s, const aff_config *cf)
{
    for (int l = 0; l < s->n_layers; l++) carve_rings(c, &s->layer[l], cf, cf->ratio[l]);
    for (int i = 0; i < s->n_stages; i++) carve_rings(c, &s->stage[i], cf, 0);
    s->rings_size = c->used;
    for (int l = 0; l < s->n_layers; l++) carve_growing(c, &s->layer[l], cf, cf->ratio[l], s->capacity);
    s->saved = take(c, (int64_t)(s->rings_size / sizeof(float)), 1);
}

aff_status aff__seq_create(aff_seq **out, const aff_net *net, int64_t positions, aff_error *err)
{
    const aff_config *cf = aff__net_config(net);
    if (positions < 1 || positions > cf->max_positions)
        return aff__fail(err, AFF_E_LIMIT, "context of %lld positions: expected 1 to max_position_embeddings %lld", (long long)positions,
                         (long long)cf->max_positions);
    aff_seq *s;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "sequence", err));
    s->net = net;
    s->capacity = positions;
    s->n_layers = aff__net_layers(net);
    s->n_stages = aff__net_stages(net);
    carve c = {0};
    carve_all(&c, s, cf);
    void *p = c.overflow ? MAP_FAILED
                         : mmap(NULL, (size_t)c.used, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        free(s);
        return aff__fail(err, AFF_E_NOMEM, "context of %lld positions: cannot reserve %llu bytes of address space", (long long)positions,
                         (unsigned long long)c.used);
    }
    s->region = p;
    s->region_size = c.used;
    c = (carve){.base = p};
    carve_all(&c, s, cf);
    *out = s;
    return AFF_OK;
}

void aff__seq_free(aff_seq *s)
{
    if (!s) return;
    munmap(s->region, (size_t)s->region_size);
    free(s);
}

void aff__seq_reset(aff_seq *s) { s->pos = s->high = 0; }

void aff__seq_begin(aff_seq *s, int n)
{
    s->has_saved = n > AFF_MAX_ROLLBACK;
    s->saved_pos = s->pos;
    s->saved_high = s->high;
    if (s->has_saved) memcpy(s->saved, s->region, (size_t)s->rings_size);
    if (s->high < s->pos + n) s->high = s->pos + n;
}

void aff__seq_undo(aff_seq *s)
{
    s->pos = s->saved_pos;
    if (!s->has_saved) return; /* what was written stays in the rings, and `high` says so */
    memcpy(s->region, s->saved, (size_t)s->rings_size);
    s->high = s->saved_high;
}

int64_t aff__seq_pos(const aff_seq *s) { return s->pos; }
int64_t aff__seq_capacity(const aff_seq *s) { return s->capacity; }

aff_status aff__seq_rollback(aff_seq *s, int64_t keep, aff_error *err)
{
    if (keep < 0 || keep > s->pos || s->high - keep > AFF_MAX_ROLLBACK)
        return aff__fail(err, AFF_E_LIMIT, "rollback from %lld to %lld positions: expected %lld to %lld", (long long)s->pos, (long long)keep,
                         (long long)(s->high > AFF_MAX_ROLLBACK ? s->high - AFF_MAX_ROLLBACK : 0), (long long)s->pos);
    s->pos = keep;
    return AFF_OK;
}
