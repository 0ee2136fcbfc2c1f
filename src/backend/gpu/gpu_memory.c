/* A device's memory behind aff_memory, and the chunks that weights go into. */
#include "backend/gpu/gpu_internal.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256, GUARD = 256 }; /* kernels may read whole vectors past the end of an array */

static aff_gpu *of(const aff_memory *m)
{
    return (aff_gpu *)((uintptr_t)m - offsetof(aff_gpu, mem));
}

/* ---- planes ---- */

static aff_status gpu_alloc(const aff_memory *m, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    aff_gpu *g = of(m);
    aff_gpu_region *r;
    *p = NULL;
    AFF_TRY(aff__calloc(&r, 1, sizeof *r, what, err));
    r->bytes = bytes;
    aff__gpu_make_room(g, bytes + bytes / 2 + 2 * GUARD);
    aff_status s = aff__rt_alloc(g->rt, (void **)&r->base, bytes + GUARD, what, err);
    if (s == AFF_OK) s = aff__rt_alloc(g->rt, (void **)&r->bf16, bytes / 2 + GUARD, what, err);
    if (s == AFF_OK) s = aff__rt_fill(g->rt, g->s, r->base, 0, bytes + GUARD, err);
    if (s == AFF_OK) s = aff__rt_fill(g->rt, g->s, r->bf16, 0, bytes / 2 + GUARD, err);
    if (s != AFF_OK) {
        aff__rt_free(g->rt, r->base);
        aff__rt_free(g->rt, r->bf16);
        free(r);
        return s;
    }
    r->next = g->regions;
    g->regions = r;
    *p = r->base;
    return AFF_OK;
}

static void gpu_free(const aff_memory *m, void *p)
{
    aff_gpu *g = of(m);
    aff__rt_sync(g->rt, g->s, NULL);
    aff__gpu_drop_records(g);
    for (aff_gpu_region **q = &g->regions; *q; q = &(*q)->next)
        if ((*q)->base == p) {
            aff_gpu_region *r = *q;
            *q = r->next;
            aff__rt_free(g->rt, r->base);
            aff__rt_free(g->rt, r->bf16);
            free(r);
            return;
        }
}

/* ---- ranges that grow ---- */

static aff_status gpu_reserve(const aff_memory *m, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    return aff__rt_reserve(of(m)->rt, p, aff__align_up(bytes, m->page), what, err);
}

static aff_status gpu_commit(const aff_memory *m, void *p, uint64_t bytes, const char *what, aff_error *err)
{
    aff__gpu_make_room(of(m), bytes);
    return aff__rt_commit(of(m)->rt, p, bytes, what, err);
}

static void gpu_decommit(const aff_memory *m, void *p, uint64_t bytes)
{
    aff__rt_sync(of(m)->rt, of(m)->s, NULL);
    aff__rt_decommit(of(m)->rt, p, bytes);
}

static void gpu_release(const aff_memory *m, void *p, uint64_t bytes)
{
    gpu_decommit(m, p, bytes);
    aff__rt_unreserve(of(m)->rt, p, aff__align_up(bytes, m->page));
}

/* ---- transfers ---- */

static aff_status gpu_write(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    aff_gpu *g = of(m);
    aff__gpu_flush(g);
    aff__gpu_wrote(g, to, (int64_t)(bytes / sizeof(float)));
    if (bytes > AFF_G_STAGE / 4) {
        AFF_TRY(aff__rt_copy(g->rt, g->s, to, from, bytes, err));
        return aff__rt_sync(g->rt, g->s, err);
    }
    if (g->staged + bytes > AFF_G_STAGE) {
        AFF_TRY(aff__rt_sync(g->rt, g->s, err));
        g->staged = 0;
    }
    char *p = g->stage + g->staged;
    g->staged = aff__align_up(g->staged + bytes, 64);
    memcpy(p, from, bytes);
    return aff__rt_copy(g->rt, g->s, to, p, bytes, err);
}

static aff_status gpu_read(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    aff_gpu *g = of(m);
    aff__gpu_flush(g);
    if (g->status != AFF_OK) { /* what would be read was not computed */
        if (err) *err = g->err;
        return g->status;
    }
    AFF_TRY(aff__rt_copy(g->rt, g->s, to, from, bytes, err));
    return aff__rt_sync(g->rt, g->s, err);
}

static aff_status gpu_copy(const aff_memory *m, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    aff__gpu_flush(of(m));
    aff__gpu_wrote(of(m), to, (int64_t)(bytes / sizeof(float)));
    return aff__rt_copy(of(m)->rt, of(m)->s, to, from, bytes, err);
}

/* ---- weights ---- */

typedef struct aff_gpu_chunk {
    struct aff_gpu_chunk *next;
    char *p;
    uint64_t bytes, used;
    aff_device_use use;
} chunk;

static aff_status new_chunk(aff_gpu *g, uint64_t bytes, const char *what, chunk **out, aff_error *err)
{
    chunk *c;
    AFF_TRY(aff__calloc(&c, 1, sizeof *c, what, err));
    const aff_status s = aff__rt_alloc(g->rt, (void **)&c->p, bytes, what, err);
    if (s != AFF_OK) {
        free(c);
        return s;
    }
    c->bytes = bytes;
    c->use = aff__rt_use(what);
    c->next = g->chunks;
    g->chunks = *out = c;
    return AFF_OK;
}

aff_status aff__gpu_place(aff_backend *b, const void **p, uint64_t bytes, const char *what, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    const uint64_t room = aff__align_up(bytes + GUARD, ALIGN);
    chunk *c = g->chunks;
    while (c && (c->bytes - c->used < room || c->use != aff__rt_use(what))) c = c->next;
    /* A large array has memory of its own, small ones share. */
    if (!c) AFF_TRY(new_chunk(g, room > g->chunk_bytes / 4 ? room : g->chunk_bytes, what, &c, err));
    char *to = c->p + c->used;
    c->used += room;
    AFF_TRY(b->mem->write(b->mem, to, *p, bytes, err));
    *p = to;
    return AFF_OK;
}

/* ---- beginning and end ---- */

aff_status aff__gpu_memory_init(aff_gpu *g, aff_error *err)
{
    const aff_rt_info *i = aff__rt_info(g->rt);
    g->mem = (aff_memory){.results = g->results,
                          .page = i->page,
                          .alloc = gpu_alloc,
                          .free = gpu_free,
                          .reserve = gpu_reserve,
                          .commit = gpu_commit,
                          .decommit = gpu_decommit,
                          .release = gpu_release,
                          .write = gpu_write,
                          .read = gpu_read,
                          .copy = gpu_copy};
    g->base.mem = &g->mem;
    g->chunk_bytes = i->memory / 128 < 1u << 20 ? 1u << 20 : i->memory / 128 > 1u << 28 ? 1u << 28 : i->memory / 128;
    return aff__rt_host_alloc(g->rt, (void **)&g->stage, AFF_G_STAGE, "staging memory", err);
}

void aff__gpu_memory_free(aff_gpu *g)
{
    while (g->regions) gpu_free(&g->mem, g->regions->base);
    while (g->chunks) {
        chunk *next = g->chunks->next;
        aff__rt_free(g->rt, g->chunks->p);
        free(g->chunks);
        g->chunks = next;
    }
    aff__rt_host_free(g->rt, g->stage);
}
