/* Experts fetched ahead: scratch slots on the card, wishes for coming layers (args.h, aff_k_fetch), and the thread that copies what is wished for from the
 * pool with the copy engine.
 *
 * Wishes come from the plans of passes, through a ring in pinned memory, and from the host at a pass's beginning. Each is for one plan; at most two copies
 * are in flight, so that a wish whose plan has begun is dropped before it costs anything, and the next is the one that is due first. */
#include "backend/gpu/gpu_internal.h"
#include "base/mem.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = 8 }; /* sources of flags: more than two copies need */

/* Whether plan `due` has begun when `progress` was the last. */
static bool begun(uint32_t due, uint32_t progress)
{
    return (int32_t)(progress - due) >= 0;
}

static uint32_t progress_of(const aff_gpu_fetch *f)
{
    return __atomic_load_n(f->progress, __ATOMIC_ACQUIRE);
}

/* ---- wishes; under the lock ---- */

static void wish(aff_gpu_fetch *f, uint32_t number, uint32_t due)
{
    for (int i = 0; i < f->n; i++)
        if (f->wish[i].number == number && f->wish[i].due == due) return;
    for (int i = 0; i < f->slots; i++)
        if (f->slot[i].number == number + 1 && f->slot[i].due == due) return;
    f->asked++;
    if (f->n == AFF_G_WISHES) {
        f->cancelled++;
        return;
    }
    f->wish[f->n++] = (aff_gpu_wish){number, due};
}

static void take_ring(aff_gpu_fetch *f, uint32_t progress)
{
    const uint32_t head = __atomic_load_n(f->head, __ATOMIC_ACQUIRE);
    if (head - f->seen > AFF_K_FETCH_RING) f->seen = head - AFF_K_FETCH_RING;
    while (f->seen != head) {
        const uint32_t k = ++f->seen;
        const uint64_t w = __atomic_load_n(&f->entry[k % AFF_K_FETCH_RING], __ATOMIC_RELAXED);
        if (w >> 40 != (k & 0xffffffu)) continue; /* written over */
        const uint32_t due = progress + (uint32_t)(int32_t)(int16_t)(uint16_t)((uint32_t)(w >> 24) - progress);
        wish(f, (uint32_t)w & 0xffffffu, due);
    }
}

static void drop_late(aff_gpu_fetch *f, uint32_t progress)
{
    int kept = 0;
    for (int i = 0; i < f->n; i++)
        if (!begun(f->wish[i].due, progress)) f->wish[kept++] = f->wish[i];
    f->cancelled += f->n - kept;
    f->n = kept;
}

/* The slot for a wish: one that has the expert already, else the one that was free first; -1: none is free. */
static int slot_for(const aff_gpu_fetch *f, const aff_gpu_wish *w, uint32_t progress)
{
    int best = -1;
    for (int i = 0; i < f->slots; i++) {
        const aff_gpu_wish *s = &f->slot[i];
        if (s->number && !begun(s->due + 1, progress) && !begun(s->due, f->idle)) continue; /* its plan's kernels may read it */
        if (s->number == w->number + 1) return i;
        if (best < 0 || (int32_t)(s->due - f->slot[best].due) < 0) best = i;
    }
    return best;
}

/* The wish that is due first; of those the first. */
static int first_wish(const aff_gpu_fetch *f)
{
    int best = 0;
    for (int i = 1; i < f->n; i++)
        if ((int32_t)(f->wish[i].due - f->wish[best].due) < 0) best = i;
    return best;
}

/* ---- the thread ---- */

/* Queues flag, expert (unless it is there) and flag. */
static void issue(aff_gpu *g, int slot, const aff_gpu_wish *w, const uint8_t *from)
{
    aff_gpu_fetch *f = g->fetch;
    aff_error err;
    const int k = f->issued % WORDS;
    aff_status s = f->issued >= 2 ? aff__rt_event_sync(g->rt, f->done[f->issued % 2], &err) : AFF_OK;
    f->word[2 * k] = (uint64_t)w->due << 32 | (w->number + 1);
    f->word[2 * k + 1] = w->due;
    if (s == AFF_OK) s = aff__rt_copy(g->rt, f->copies, &f->begun[slot], &f->word[2 * k], sizeof *f->begun, &err);
    if (s == AFF_OK && from) s = aff__rt_copy(g->rt, f->copies, f->at + (uint64_t)slot * g->slab->o.pitch, from, g->slab->o.bytes, &err);
    if (s == AFF_OK) s = aff__rt_copy(g->rt, f->copies, &f->ready[slot], &f->word[2 * k + 1], sizeof *f->ready, &err);
    if (s == AFF_OK) s = aff__rt_record(g->rt, f->done[f->issued % 2], f->copies, &err);
    f->issued++;
    if (s == AFF_OK) return;
    pthread_mutex_lock(&f->lock);
    if (f->status == AFF_OK) f->status = s, f->err = err;
    pthread_mutex_unlock(&f->lock);
}

/* One wish at most; false: there was nothing to do. With the lock, which it gives up meanwhile. */
static bool step(aff_gpu *g)
{
    aff_gpu_fetch *f = g->fetch;
    const uint32_t progress = progress_of(f);
    take_ring(f, progress);
    drop_late(f, progress);
    if (!f->n || f->status != AFF_OK) return false;
    const int i = first_wish(f);
    const aff_gpu_wish w = f->wish[i];
    const int slot = slot_for(f, &w, progress);
    if (slot < 0) return false;
    f->wish[i] = f->wish[--f->n];
    const uint64_t word = g->slab->mirror[w.number];
    const bool there = f->slot[slot].number == w.number + 1;
    if (!(word & AFF_BASE_HOST)) { /* it went elsewhere since it was wished for */
        f->cancelled++;
        return true;
    }
    f->slot[slot] = (aff_gpu_wish){w.number + 1, w.due};
    f->served++;
    f->copied += !there;
    f->busy = true;
    pthread_mutex_unlock(&f->lock);
    issue(g, slot, &w, there ? NULL : (const uint8_t *)(uintptr_t)(word & ~(uint64_t)AFF_BASE_TAGS));
    pthread_mutex_lock(&f->lock);
    f->busy = false;
    pthread_cond_broadcast(&f->wake);
    return true;
}

static void *run(void *arg)
{
    aff_gpu *g = arg;
    aff_gpu_fetch *f = g->fetch;
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        if (!f->pass) {
            pthread_cond_wait(&f->wake, &f->lock);
            continue;
        }
        if (step(g)) continue;
        pthread_mutex_unlock(&f->lock);
        sched_yield(); /* a pass is short, and a wish is worth having at once */
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* ---- a pass ---- */

void aff__gpu_fetch_begin(aff_gpu *g)
{
    aff_gpu_fetch *f = g->fetch;
    if (!f) return;
    pthread_mutex_lock(&f->lock);
    f->idle = progress_of(f); /* nothing runs */
    f->pass = true;
    pthread_cond_broadcast(&f->wake);
    pthread_mutex_unlock(&f->lock);
}

static void expect(aff_backend *b, int layer, const int32_t *experts, int n)
{
    aff_gpu *g = aff__gpu_of(b);
    aff_gpu_fetch *f = g->fetch;
    const int E = g->slab->o.experts;
    pthread_mutex_lock(&f->lock);
    for (int i = 0; i < n; i++) {
        const uint32_t number = (uint32_t)(layer * E + experts[i]);
        if (experts[i] >= 0 && experts[i] < E && g->slab->mirror[number] & AFF_BASE_HOST) wish(f, number, f->idle + 1 + (uint32_t)layer);
    }
    pthread_mutex_unlock(&f->lock);
}

static void predict(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int layer, int ahead)
{
    aff_gpu *g = aff__gpu_of(b);
    g->fetch->guess = (aff_gpu_guess){.router = *r, .logits = logits, .ids = ids, .layer = layer, .ahead = ahead, .pending = true};
}

aff_status aff__gpu_fetch_end(aff_gpu *g, aff_error *err)
{
    aff_gpu_fetch *f = g->fetch;
    if (!f) return AFF_OK;
    pthread_mutex_lock(&f->lock);
    f->pass = false;
    take_ring(f, progress_of(f));
    f->cancelled += f->n;
    f->n = 0;
    const aff_status s = f->status;
    if (s != AFF_OK && err) *err = f->err;
    f->status = AFF_OK;
    aff_tier_counters *c = &g->slab->count;
    c->prefetch_asked += f->asked;
    c->prefetch_cancelled += f->cancelled;
    c->prefetch_bytes += (uint64_t)f->copied * g->slab->o.bytes;
    c->prefetch_wasted += f->served; /* less those that plans took */
    f->asked = f->cancelled = f->copied = f->served = 0;
    pthread_mutex_unlock(&f->lock);
    return s;
}

void aff__gpu_fetch_drain(aff_gpu *g)
{
    aff_gpu_fetch *f = g->fetch;
    if (!f) return;
    pthread_mutex_lock(&f->lock);
    while (f->busy) pthread_cond_wait(&f->wake, &f->lock);
    pthread_mutex_unlock(&f->lock);
    aff__rt_sync(g->rt, f->copies, NULL);
}

void aff__gpu_fetch_used(aff_gpu *g, int taken)
{
    g->slab->count.prefetch_used += taken;
    g->slab->count.prefetch_wasted -= taken;
}

/* Right guesses of the pass: each is compared with what its layer chose. */
void aff__gpu_fetch_recall(aff_gpu *g)
{
    aff_gpu_fetch *f = g->fetch;
    for (int i = 0; f && i < g->moes; i++) {
        const aff_gpu_moe *m = &g->moe[i], *of = m->ahead && i + m->ahead < g->moes ? &g->moe[i + m->ahead] : NULL;
        if (!of || of->T != m->T || of->K != m->K) continue;
        const int32_t *guess = f->log + (int64_t)i * f->log_row, *pick = aff__gpu_slab_log(g, i + m->ahead);
        for (int k = 0; k < m->T * m->K; k++)
            for (int j = k / m->K * m->K; j < (k / m->K + 1) * m->K; j++) g->slab->count.guess_right += pick[k] == guess[j];
        g->slab->count.guess_picks += m->T * m->K;
    }
}

/* ---- beginning and end ---- */

static aff_status open_fetch(aff_gpu *g, aff_error *err)
{
    static const char what[] = "slots for experts fetched ahead";
    aff_gpu_fetch *f = g->fetch;
    char *p;
    f->slots = g->slab->o.scratch < AFF_K_SCRATCH ? g->slab->o.scratch : AFF_K_SCRATCH;
    f->log_row = AFF_K_FEW * g->slab->o.picks;
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&f->at, (uint64_t)f->slots * g->slab->o.pitch + 256, what, err));
    const uint64_t flags = AFF_K_SCRATCH * (sizeof *f->begun + sizeof *f->ready) + 64;
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&f->begun, flags, what, err));
    AFF_TRY(aff__rt_fill(g->rt, g->s, f->begun, 0, flags, err));
    f->ready = (uint32_t *)(void *)(f->begun + AFF_K_SCRATCH);
    f->plans = f->ready + AFF_K_SCRATCH;
    f->last = f->plans + 1;
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&f->guesses, (uint64_t)f->log_row * sizeof *f->guesses, what, err));
    const uint64_t ring = AFF_K_FETCH_RING * sizeof *f->entry, words = 2 * WORDS * sizeof *f->word;
    AFF_TRY(aff__rt_host_alloc(g->rt, (void **)&p, ring + words + 128 + (uint64_t)AFF_G_COUNTS * (uint64_t)f->log_row * sizeof *f->log, what, err));
    f->entry = (uint64_t *)(void *)p;
    memset(p, 0, ring + words + 128);
    f->word = f->entry + AFF_K_FETCH_RING;
    f->head = (uint32_t *)(void *)(p + ring + words);
    f->progress = f->head + 16; /* a line of its own */
    f->log = (int32_t *)(void *)(p + ring + words + 128);
    AFF_TRY(aff__rt_stream_create(g->rt, &f->copies, err));
    for (int i = 0; i < 2; i++) AFF_TRY(aff__rt_event_create(g->rt, &f->done[i], err));
    AFF_TRY(aff__rt_sync(g->rt, g->s, err));
    if (pthread_create(&f->thread, NULL, run, g)) return aff__fail(err, AFF_E_NOMEM, "%s: no thread", what);
    f->running = true;
    return AFF_OK;
}

aff_status aff__gpu_fetch_open(aff_gpu *g, aff_error *err)
{
    AFF_TRY(aff__calloc(&g->fetch, 1, sizeof *g->fetch, "experts fetched ahead", err));
    pthread_mutex_init(&g->fetch->lock, NULL);
    pthread_cond_init(&g->fetch->wake, NULL);
    const aff_status s = open_fetch(g, err);
    if (s != AFF_OK) {
        aff__gpu_fetch_free(g);
        return s;
    }
    g->base.expect = expect;
    g->base.predict = predict;
    return AFF_OK;
}

void aff__gpu_fetch_free(aff_gpu *g)
{
    aff_gpu_fetch *f = g->fetch;
    if (!f) return;
    g->base.expect = NULL;
    g->base.predict = NULL;
    pthread_mutex_lock(&f->lock);
    f->stop = true;
    pthread_cond_broadcast(&f->wake);
    pthread_mutex_unlock(&f->lock);
    if (f->running) pthread_join(f->thread, NULL);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->wake);
    if (f->copies) {
        aff__rt_sync(g->rt, f->copies, NULL);
        aff__rt_stream_free(g->rt, f->copies);
    }
    for (int i = 0; i < 2; i++)
        if (f->done[i]) aff__rt_event_free(g->rt, f->done[i]);
    aff__rt_free(g->rt, f->at);
    aff__rt_free(g->rt, f->begun);
    aff__rt_free(g->rt, f->guesses);
    aff__rt_host_free(g->rt, f->entry);
    free(f);
    g->fetch = NULL;
}
