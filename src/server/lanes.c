#include "server/lanes.h"
#include "base/mem.h"
#include <pthread.h>
#include <stdlib.h>

typedef struct item {
    struct item *next;
    aff_exchange *x;
} item;

typedef struct lane {
    aff_lanes *all;
    pthread_t thread;
    bool started;
    item *first, **last;
} lane;

struct aff_lanes {
    void (*work)(void *ctx, aff_exchange *x);
    void *ctx;
    pthread_mutex_t lock;
    pthread_cond_t more;
    bool stop;
    lane lane[AFF_LANES];
};

/* The next request of a lane; NULL: it is over. */
static aff_exchange *take(lane *l)
{
    aff_lanes *all = l->all;
    aff_exchange *x = NULL;
    pthread_mutex_lock(&all->lock);
    while (!l->first && !all->stop) pthread_cond_wait(&all->more, &all->lock);
    item *i = l->first;
    if (i) {
        l->first = i->next;
        if (!l->first) l->last = &l->first;
        x = i->x;
    }
    pthread_mutex_unlock(&all->lock);
    free(i);
    return x;
}

static void *run(void *arg)
{
    lane *l = arg;
    for (aff_exchange *x; (x = take(l));) {
        if (!aff__x_is_gone(x)) l->all->work(l->all->ctx, x);
        aff__x_unref(x);
    }
    return NULL;
}

aff_status aff__lanes_start(aff_lanes **out, void (*work)(void *ctx, aff_exchange *x), void *ctx, aff_error *err)
{
    aff_lanes *l = NULL;
    aff_status s = AFF_OK;
    *out = NULL;
    AFF_TRY(aff__calloc(&l, 1, sizeof *l, "server", err));
    l->work = work;
    l->ctx = ctx;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->more, NULL);
    for (int i = 0; i < AFF_LANES && s == AFF_OK; i++) {
        l->lane[i].all = l;
        l->lane[i].last = &l->lane[i].first;
        l->lane[i].started = pthread_create(&l->lane[i].thread, NULL, run, &l->lane[i]) == 0;
        if (!l->lane[i].started) s = aff__fail(err, AFF_E_NOMEM, "server: cannot start a thread");
    }
    if (s == AFF_OK)
        *out = l;
    else
        aff__lanes_stop(l);
    return s;
}

bool aff__lanes_put(aff_lanes *l, aff_exchange *x)
{
    item *i = NULL;
    if (aff__calloc(&i, 1, sizeof *i, "request", NULL) != AFF_OK) return false;
    aff__x_ref(x);
    *i = (item){.x = x};
    lane *to = &l->lane[aff__x_body(x)->n > AFF_LANE_BORDER ? AFF_LANE_LARGE : AFF_LANE_SMALL];
    pthread_mutex_lock(&l->lock);
    *to->last = i;
    to->last = &i->next;
    pthread_cond_broadcast(&l->more);
    pthread_mutex_unlock(&l->lock);
    return true;
}

void aff__lanes_stop(aff_lanes *l)
{
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->more);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; i < AFF_LANES; i++)
        if (l->lane[i].started) pthread_join(l->lane[i].thread, NULL);
    pthread_cond_destroy(&l->more);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
