#include "state/grow.h"
#include "base/mem.h"
#include "state/seq_internal.h"
#include <pthread.h>
#include <stdlib.h>

struct aff_grower {
    pthread_t thread;
    pthread_mutex_t lock; /* everything below, and grow_next, grow_to of the sequences */
    pthread_cond_t work, done;
    aff_seq *first; /* those that wait; order does not matter */
    aff_seq *at;    /* the one at work */
    bool end;
};

static void *run(void *ctx)
{
    aff_grower *g = ctx;
    pthread_mutex_lock(&g->lock);
    while (!g->end) {
        aff_seq *s = g->first;
        if (!s) {
            pthread_cond_wait(&g->work, &g->lock);
            continue;
        }
        const int64_t to = s->grow_to;
        g->first = s->grow_next;
        s->grow_to = 0;
        g->at = s;
        pthread_mutex_unlock(&g->lock);
        aff__seq_ahead(s, to);
        pthread_mutex_lock(&g->lock);
        g->at = NULL;
        pthread_cond_broadcast(&g->done);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

aff_status aff__grower_create(aff_grower **out, aff_error *err)
{
    aff_grower *g;
    AFF_TRY(aff__calloc(&g, 1, sizeof *g, "growing thread", err));
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->work, NULL);
    pthread_cond_init(&g->done, NULL);
    const int e = pthread_create(&g->thread, NULL, run, g);
    if (e) {
        free(g);
        return aff__fail(err, AFF_E_NOMEM, "growing thread: the system gives no thread (error %d)", e);
    }
    *out = g;
    return AFF_OK;
}

void aff__grower_free(aff_grower *g)
{
    if (!g) return;
    pthread_mutex_lock(&g->lock);
    g->end = true;
    pthread_cond_signal(&g->work);
    pthread_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->work);
    pthread_cond_destroy(&g->done);
    free(g);
}

void aff__grower_ask(aff_grower *g, aff_seq *s, int64_t positions)
{
    pthread_mutex_lock(&g->lock);
    if (!s->grow_to) {
        s->grow_next = g->first;
        g->first = s;
    }
    if (positions > s->grow_to) s->grow_to = positions;
    pthread_cond_signal(&g->work);
    pthread_mutex_unlock(&g->lock);
}

void aff__grower_leave(aff_grower *g, aff_seq *s)
{
    pthread_mutex_lock(&g->lock);
    for (aff_seq **p = &g->first; *p; p = &(*p)->grow_next)
        if (*p == s) {
            *p = s->grow_next;
            break;
        }
    s->grow_to = 0;
    while (g->at == s) pthread_cond_wait(&g->done, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

void aff__grower_wait(aff_grower *g)
{
    pthread_mutex_lock(&g->lock);
    while (g->first || g->at) pthread_cond_wait(&g->done, &g->lock);
    pthread_mutex_unlock(&g->lock);
}
