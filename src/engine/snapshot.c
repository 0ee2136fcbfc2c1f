/* snapshot.c - the engine as displays see it. */
#include "base/clock.h"
#include "engine/engine_internal.h"
#include "state/seq.h"
#include <stdlib.h>
#include <string.h>

void aff__snapshot_look(aff_engine *e)
{
    e->on_device = aff__runner_device(e->runner, &e->device);
}

/* Under the engine's lock, by its thread. */
void aff__snapshot_publish(aff_engine *e)
{
    aff_snapshot *s = &e->view;
    s->passes = e->passes;
    s->draft = e->stats;
    aff_tiers *t = aff__runner_tiers(e->runner);
    if (t) s->tiers = aff__tiers_counters(t);
    s->tiered = t && !aff__tiers_mapped(t);
    s->state_bytes = 0;
    for (int i = 0; i < e->o.slots; i++) {
        const aff_slot *from = &e->slot[i];
        s->slot[i] = (aff_slot_view){.busy = from->job != NULL};
        s->state_bytes += aff__seq_committed(from->seq);
        if (!from->job) continue;
        s->slot[i] = (aff_slot_view){.busy = true,
                                     .answering = from->phase == AFF_ANSWER,
                                     .id = from->job->id,
                                     .past = aff__seq_pos(from->seq),
                                     .prompt = from->job->r.n_prompt,
                                     .tokens = from->job->out.decoded};
    }
    s->on_device = e->on_device;
    if (s->on_device) s->device = e->device;
}

/* The trunk's part of the tiers, either NULL. */
static void look_at_tiers(const aff_engine *e, float *heat, uint8_t *tier)
{
    aff_tiers *t = aff__runner_tiers(e->runner);
    const size_t n = (size_t)e->view.layers * (size_t)e->view.experts, all = (size_t)aff__tiers_layers(t) * (size_t)aff__tiers_experts(t);
    float *h = malloc(all * sizeof *h);
    uint8_t *w = malloc(all);
    if (h && w) {
        aff__tiers_planes(t, h, w);
        if (heat) memcpy(heat, h, n * sizeof *h);
        if (tier) memcpy(tier, w, n);
    }
    free(h);
    free(w);
}

void aff__engine_snapshot(aff_engine *e, aff_snapshot *out, float *heat)
{
    pthread_mutex_lock(&e->lock);
    *out = e->view;
    out->waiting = e->waiting;
    out->running = 0;
    for (int i = 0; i < e->o.slots; i++) out->running += e->slot[i].job != NULL;
    pthread_mutex_unlock(&e->lock);
    if (heat && out->layers) look_at_tiers(e, heat, NULL);
    out->at_ns = aff__now_ns();
}

void aff__engine_tiers(aff_engine *e, uint8_t *tier)
{
    pthread_mutex_lock(&e->lock);
    const bool card = e->view.on_device;
    pthread_mutex_unlock(&e->lock);
    if (card)
        look_at_tiers(e, NULL, tier);
    else
        aff__net_tiers(e->net, tier);
}
