/* Experts that are not on the card in passes of many rows: each crosses the link once, by the copy engine, into one of two groups of slots on the card;
 * while one group computes the other is filled. The host waits for the plan's counts first, so only what the rows chose is copied. What
 * is on disk is read into the staging slots ahead of its group, as far as there are slots. */
#include "backend/gpu/gpu_internal.h"
#include <stdlib.h>
#include <string.h>

aff_status aff__gpu_groups_open(aff_gpu *g, aff_error *err)
{
    aff_gpu_groups *w = &g->groups;
    const uint64_t pitch = g->slab->o.pitch, few = aff__rt_info(g->rt)->memory / 512 / pitch;
    w->each = few < 1 ? 1 : few > 16 ? 16 : (int)few;
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&w->at, 2 * (uint64_t)w->each * pitch + 256, "slots that experts pass through", err));
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&w->arrived, 2 * (uint64_t)w->each * sizeof *w->arrived, "slots that experts pass through", err));
    AFF_TRY(aff__rt_stream_create(g->rt, &w->copies, err));
    AFF_TRY(aff__rt_event_create(g->rt, &w->planned, err));
    for (int i = 0; i < 2; i++) {
        AFF_TRY(aff__rt_event_create(g->rt, &w->copied[i], err));
        AFF_TRY(aff__rt_event_create(g->rt, &w->used[i], err));
    }
    return AFF_OK;
}

void aff__gpu_groups_free(aff_gpu *g)
{
    aff_gpu_groups *w = &g->groups;
    if (w->copies) {
        aff__rt_sync(g->rt, w->copies, NULL);
        aff__rt_stream_free(g->rt, w->copies);
    }
    if (w->planned) aff__rt_event_free(g->rt, w->planned);
    for (int i = 0; i < 2; i++) {
        if (w->copied[i]) aff__rt_event_free(g->rt, w->copied[i]);
        if (w->used[i]) aff__rt_event_free(g->rt, w->used[i]);
    }
    aff__rt_free(g->rt, w->at);
    aff__rt_free(g->rt, w->arrived);
    memset(w, 0, sizeof *w);
}

/* One layer's experts on their way. */
typedef struct {
    aff_gpu *g;
    int layer;
    const int32_t *id; /* those that are elsewhere, in item order */
    int n, host;       /* of them those in memory come first */
    /* On disk: asked for, copied, known to be copied, numbered from 0. */
    int asked, copied, safe;
} way;

static void arrived(aff_load *l)
{
    aff_gpu_stage *t = ((aff_gpu *)l->ctx)->stages;
    pthread_mutex_lock(&t->lock);
    t->open--;
    t->ticket[l - t->load] = 1;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
}

/* Asks for as much as there are slots. */
static void ask(way *w)
{
    aff_gpu_stage *t = w->g->stages;
    for (; w->asked < w->n - w->host && w->asked - w->safe < (int)t->slots; w->asked++) {
        const int i = w->asked % (int)t->slots;
        pthread_mutex_lock(&t->lock);
        t->open++;
        w->g->slab->count.staged++;
        t->ticket[i] = 0; /* 1: it is there */
        pthread_mutex_unlock(&t->lock);
        t->load[i] = (aff_load){.layer = w->layer, .expert = w->id[w->host + w->asked], .to = t->slots_at + (uint64_t)i * w->g->slab->o.pitch, .done = arrived, .ctx = w->g};
        w->g->slab->host.fetch(w->g->slab->host.ctx, &t->load[i]);
    }
}

/* The next expert of the disk's, in its staging slot; NULL after an error. */
static const uint8_t *from_disk(way *w, int parity)
{
    aff_gpu *g = w->g;
    aff_gpu_stage *t = g->stages;
    aff_error err;
    if (!t) {
        aff__gpu_note(g, aff__fail(&err, AFF_E_INVALID, "an expert of layer %d is on disk, and there are no staging slots", w->layer), &err);
        return NULL;
    }
    if (w->copied == w->asked) { /* every slot waits for its copy */
        aff_status s = aff__rt_record(g->rt, g->groups.copied[parity], g->groups.copies, &err);
        if (s == AFF_OK) s = aff__rt_event_sync(g->rt, g->groups.copied[parity], &err);
        aff__gpu_note(g, s, &err);
        w->safe = w->copied;
        ask(w);
    }
    const int i = w->copied++ % (int)t->slots;
    pthread_mutex_lock(&t->lock);
    while (!t->ticket[i]) pthread_cond_wait(&t->wake, &t->lock);
    pthread_mutex_unlock(&t->lock);
    aff__gpu_note(g, t->load[i].status, &t->load[i].err);
    return t->load[i].to;
}

/* Copies of group number k are queued; g->s waits for them. */
static void bring(way *w, int k)
{
    aff_gpu *g = w->g;
    aff_gpu_groups *q = &g->groups;
    const uint64_t pitch = g->slab->o.pitch, bytes = g->slab->o.bytes, *word = g->slab->mirror + (int64_t)w->layer * g->slab->o.experts;
    const int p = k & 1, end = (k + 1) * q->each < w->n ? (k + 1) * q->each : w->n;
    aff_error err;
    if (q->busy[p]) aff__gpu_note(g, aff__rt_wait(g->rt, q->copies, q->used[p], &err), &err);
    for (int i = k * q->each; i < end && g->status == AFF_OK; i++) {
        const uint8_t *from = i < w->host ? (const uint8_t *)(uintptr_t)(word[w->id[i]] & ~(uint64_t)AFF_BASE_TAGS) : from_disk(w, p);
        if (g->status != AFF_OK) return;
        aff__gpu_note(g, aff__rt_copy(g->rt, q->copies, q->at + (uint64_t)(i % (2 * q->each)) * pitch, from, bytes, &err), &err);
        g->slab->count.stream_bytes += bytes;
    }
    aff_status s = aff__rt_record(g->rt, q->copied[p], q->copies, &err);
    if (s == AFF_OK) s = aff__rt_wait(g->rt, g->s, q->copied[p], &err);
    aff__gpu_note(g, s, &err);
}

/* Items and entries of experts id[0..n), behind those already counted in *hi and *e1. */
static void extend(const int32_t *count, const int32_t *id, int n, int batch, int *hi, int *e1)
{
    for (int i = 0; i < n; i++) {
        *hi += (count[id[i]] + batch - 1) / batch;
        *e1 += count[id[i]];
    }
}

void aff__gpu_groups_run(aff_gpu *g, int layer, const int32_t *count, int batch, void (*run)(void *ctx, int lo, int hi, int e0, int e1), void *ctx)
{
    const uint64_t *word = g->slab->mirror + (int64_t)layer * g->slab->o.experts;
    const int E = g->slab->o.experts, each = g->groups.each;
    int32_t *id = malloc((size_t)E * sizeof *id);
    aff_error err;
    if (!id) {
        aff__gpu_note(g, aff__fail(&err, AFF_E_NOMEM, "experts of a prompt: no memory"), &err);
        return;
    }
    int n = 0, lo = 0, hi = 0, e0 = 0, e1 = 0;
    for (int e = 0; e < E; e++)
        if (count[e] && word[e] & AFF_BASE_CARD) extend(count, &e, 1, batch, &hi, &e1);
    for (int e = 0; e < E; e++)
        if (count[e] && !(word[e] & AFF_BASE_CARD) && word[e] & AFF_BASE_HOST) id[n++] = e;
    way w = {.g = g, .layer = layer, .id = id, .host = n};
    for (int e = 0; e < E; e++)
        if (count[e] && !(word[e] & AFF_BASE_TAGS)) id[n++] = e;
    w.n = n;
    if (g->stages) ask(&w);
    if (n) bring(&w, 0);
    if (hi > 0) run(ctx, 0, hi, 0, e1);
    for (int k = 0; k * each < n && g->status == AFF_OK; k++) {
        const int from = k * each, m = n - from < each ? n - from : each;
        if (k) bring(&w, k);
        lo = hi, e0 = e1;
        extend(count, id + from, m, batch, &hi, &e1);
        run(ctx, lo, hi, e0, e1);
        aff__gpu_note(g, aff__rt_record(g->rt, g->groups.used[k & 1], g->s, &err), &err);
        g->groups.busy[k & 1] = true;
    }
    free(id);
}
