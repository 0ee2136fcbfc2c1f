/* Experts on disk in passes of few rows. The plan kernel posts what it needs to a ring in pinned memory, a thread here asks for it, and when an
 * expert is in its staging slot the slot's `ready` gets the ticket for which kernels wait (args.h, aff_k_ring). An expert that cannot be had
 * leaves zeros in its slot, so that nothing waits for ever, and its error is that of the pass. */
#include "backend/gpu/gpu_internal.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POLL_NS = 20000 };

static void done(aff_load *l)
{
    aff_gpu *g = l->ctx;
    aff_gpu_stage *t = g->stages;
    const int64_t i = l - t->load;
    if (l->status != AFF_OK) memset(l->to, 0, g->slab->o.pitch);
    pthread_mutex_lock(&t->lock);
    if (l->status != AFF_OK && t->status == AFF_OK) {
        t->status = l->status;
        t->err = l->err;
    }
    pthread_mutex_unlock(&t->lock);
    __atomic_store_n(&t->ready[i], t->ticket[i], __ATOMIC_RELEASE); /* from here on the slot may be asked for again */
    pthread_mutex_lock(&t->lock);
    t->open--;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
}

static void begin_load(aff_gpu *g, uint32_t ticket)
{
    aff_gpu_stage *t = g->stages;
    const uint32_t i = ticket % t->slots, which = (uint32_t)t->entry[i];
    const int E = g->slab->o.experts;
    t->ticket[i] = ticket;
    t->load[i] = (aff_load){.layer = (int)which / E, .expert = (int)which % E, .to = t->slots_at + i * g->slab->o.pitch, .done = done, .ctx = g};
    pthread_mutex_lock(&t->lock);
    t->open++;
    g->slab->count.staged++;
    pthread_mutex_unlock(&t->lock);
    g->slab->host.fetch(g->slab->host.ctx, &t->load[i]);
}

static void *run(void *arg)
{
    aff_gpu *g = arg;
    aff_gpu_stage *t = g->stages;
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        if (!t->pass) {
            pthread_cond_wait(&t->wake, &t->lock);
            continue;
        }
        const uint32_t head = __atomic_load_n(t->head, __ATOMIC_ACQUIRE);
        const bool idle = t->seen == head;
        pthread_mutex_unlock(&t->lock);
        if (idle) nanosleep(&(struct timespec){0, POLL_NS}, NULL);
        for (uint32_t next = t->seen; !idle && next != head;) {
            begin_load(g, ++next);
            pthread_mutex_lock(&t->lock);
            t->seen = next;
            pthread_mutex_unlock(&t->lock);
        }
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static aff_status open_stage(aff_gpu *g, int64_t slots, aff_error *err)
{
    aff_gpu_stage *t = g->stages;
    const uint64_t n = (uint64_t)slots;
    t->slots = (uint32_t)slots;
    t->slots_at = g->slab->host.staging;
    if (!g->slab->pinned) { /* kernels cannot read the pool's */
        AFF_TRY(aff__rt_host_alloc(g->rt, (void **)&t->own, n * g->slab->o.pitch, "staging slots", err));
        t->slots_at = t->own;
    }
    char *p;
    AFF_TRY(aff__rt_host_alloc(g->rt, (void **)&p, n * (sizeof *t->entry + sizeof *t->ready) + 64, "requests for experts", err));
    t->entry = (uint64_t *)(void *)p;
    memset(p, 0, n * (sizeof *t->entry + sizeof *t->ready) + 64);
    t->ready = (uint32_t *)(void *)(t->entry + n);
    t->head = t->ready + n;
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&t->last, sizeof *t->last, "requests for experts", err));
    AFF_TRY(aff__rt_fill(g->rt, g->s, t->last, 0, sizeof *t->last, err));
    AFF_TRY(aff__calloc(&t->load, n, sizeof *t->load, "requests for experts", err));
    AFF_TRY(aff__calloc(&t->ticket, n, sizeof *t->ticket, "requests for experts", err));
    if (pthread_create(&t->thread, NULL, run, g)) return aff__fail(err, AFF_E_NOMEM, "requests for experts: no thread");
    t->running = true;
    return AFF_OK;
}

aff_status aff__gpu_stage_open(aff_gpu *g, int64_t slots, aff_error *err)
{
    AFF_TRY(aff__calloc(&g->stages, 1, sizeof *g->stages, "requests for experts", err));
    pthread_mutex_init(&g->stages->lock, NULL);
    pthread_cond_init(&g->stages->wake, NULL);
    const aff_status s = open_stage(g, slots, err);
    if (s != AFF_OK) aff__gpu_stage_free(g);
    return s;
}

void aff__gpu_stage_free(aff_gpu *g)
{
    aff_gpu_stage *t = g->stages;
    if (!t) return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
    if (t->running) pthread_join(t->thread, NULL);
    pthread_mutex_lock(&t->lock);
    while (t->open) pthread_cond_wait(&t->wake, &t->lock);
    pthread_mutex_unlock(&t->lock);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->wake);
    aff__rt_host_free(g->rt, t->own);
    aff__rt_host_free(g->rt, t->entry);
    aff__rt_free(g->rt, t->last);
    free(t->load);
    free(t->ticket);
    free(t);
    g->stages = NULL;
}

aff_status aff__gpu_stage_begin(aff_gpu *g, aff_error *err)
{
    aff_gpu_stage *t = g->stages;
    if (!t) return AFF_OK;
    pthread_mutex_lock(&t->lock);
    const bool far = t->seen >= 1u << 31 && !t->pass;
    if (far) { /* tickets start again before they run over */
        t->seen = 0;
        *t->head = 0;
        memset(t->ready, 0, t->slots * sizeof *t->ready);
    }
    t->status = AFF_OK;
    t->pass = true;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
    return far ? aff__rt_fill(g->rt, g->s, t->last, 0, sizeof *t->last, err) : AFF_OK;
}

aff_status aff__gpu_stage_end(aff_gpu *g, aff_error *err)
{
    aff_gpu_stage *t = g->stages;
    if (!t) return AFF_OK;
    pthread_mutex_lock(&t->lock);
    while (t->seen != __atomic_load_n(t->head, __ATOMIC_ACQUIRE) || t->open) { /* after a pass that failed; slots are asked for again when they are at rest */
        pthread_mutex_unlock(&t->lock);
        nanosleep(&(struct timespec){0, POLL_NS}, NULL);
        pthread_mutex_lock(&t->lock);
    }
    t->pass = false;
    const aff_status s = t->status;
    if (s != AFF_OK && err) *err = t->err;
    pthread_mutex_unlock(&t->lock);
    return s;
}
