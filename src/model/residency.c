/* The experts of a runner on a device: the card's slab and the tiers behind it (experts/tiers.h), and what every pass tells them. */
#include "base/mem.h"
#include "model/runner.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what the card asks ---- */

/* An expert that the card cannot read where it is. In memory that could not be pinned, or on disk: the device's table and the tiers' are the same
 * while a pass runs. */
static void fetch(void *ctx, aff_load *l)
{
    const aff_runner *r = ctx;
    const aff_tier_place p = aff__tiers_place(r->tiers, l->layer, l->expert);
    if (p.tier != AFF_TIER_HOST || !p.host) {
        aff__loader_submit(aff__tiers_loader(r->tiers), l, AFF_LOAD_NOW);
        return;
    }
    memcpy(l->to, p.host, (size_t)aff__tiers_layout(r->tiers).bytes);
    l->status = AFF_OK;
    l->done(l);
}

static aff_status resize(void *ctx, int64_t slots, aff_error *err)
{
    return aff__tiers_resize(((const aff_runner *)ctx)->tiers, slots, err);
}

/* ---- how memory is dealt ---- */

enum { SCRATCH = 32 }; /* experts fetched ahead */
enum { SPARE = 8, LOADING = 16 }; /* free pool slots where there is a disk below it (tiers.c); staging slots that keep a disk busy */

/* Of host slots: the pool, all experts if there is room for that, else those that are not on the card; staging, where some are on disk or may have
 * to go there. */
static void deal(int64_t host, int64_t total, int64_t card, int64_t spare, int picks, aff_tier_options *o)
{
    const int64_t least = 2 * picks > LOADING ? 2 * picks : LOADING, most = AFF_LOGIT_ROWS * picks < AFF_MOST_STAGING ? AFF_LOGIT_ROWS * picks : AFF_MOST_STAGING;
    const bool fits = card >= total;
    int64_t staging = fits ? least : most > least ? most : least;
    if (staging > host / 2) staging = host / 2;
    if (staging < picks) staging = picks;
    o->inclusive = !fits && host >= total + picks;
    if (o->inclusive) { /* nothing is ever on disk */
        o->staging = picks;
        o->slots = total + picks;
        return;
    }
    const int64_t rest = fits ? 0 : total - card + spare + SPARE, pool = host - staging < rest ? host - staging : rest;
    o->staging = staging;
    o->slots = staging + (pool > 0 ? pool : 0);
}

/* [layers + stages][experts]: the trunk's by the caller's or the container's figures; the draft's before or behind all of them. */
static aff_status make_profile(const aff_net *n, const aff_card_options *o, int stages, float **out, aff_error *err)
{
    const int64_t trunk = (int64_t)n->layers * n->cfg.experts, all = trunk + (int64_t)stages * n->cfg.experts;
    const float *from = o->tiers ? o->tiers->profile : NULL;
    float *v, most = 0;
    if (!from) from = aff__net_profile(n);
    AFF_TRY(aff__calloc(&v, (uint64_t)all, sizeof *v, "profile of the experts", err));
    for (int64_t i = 0; i < trunk; i++) {
        v[i] = from ? from[i] : 0;
        most = v[i] > most ? v[i] : most;
    }
    for (int64_t i = trunk; i < all; i++) v[i] = o->draft_in_memory ? -1 : most + 1;
    *out = v;
    return AFF_OK;
}

static void say(const aff_card_options *o, const aff_runner *r, int64_t card, int64_t total, const aff_tier_options *t)
{
    const double gib = (double)aff__experts_layout(r->net->experts).pitch / (1 << 30);
    char line[256];
    if (!o->warn || card >= total) return;
    snprintf(line, sizeof line, "experts: %lld of %lld on the card (%.1f GiB), pool of %lld in memory (%.1f GiB%s), %lld staging slots", (long long)card, (long long)total, (double)card * gib,
             (long long)(t->slots - t->staging), (double)(t->slots - t->staging) * gib, t->inclusive ? ", all of them" : "", (long long)t->staging);
    o->warn(o->warn_ctx, line);
}

aff_status aff__runner_experts(aff_runner *r, const aff_card_options *o, aff_error *err)
{
    const aff_net *n = r->source;
    const int stages = n->draft == AFF_DRAFT_NONE ? 0 : n->stages, E = n->cfg.experts;
    const int64_t total = (int64_t)(n->layers + stages) * E;
    aff_card card;
    aff_tier_options t = {.fill = true, .picks = n->cfg.picks};
    if (o->tiers) {
        t.placement = o->tiers->placement;
        t.loader = o->tiers->loader;
        t.progress = o->tiers->progress;
        t.progress_ctx = o->tiers->progress_ctx;
    } else {
        aff__placement_options_init(&t.placement);
    }
    const aff_placement_options used = aff__placement_options_resolve(&t.placement, false);
    const int64_t spare = used.strategy == AFF_PLACE_STATIC ? 0 : used.shadow;
    const aff_slab_options s = {.spare = spare,
                                .scratch = o->prefetch > 0 ? SCRATCH : 0,
                                .ahead = o->prefetch,
                                .most = o->gpu_bytes < 0 ? UINT64_MAX : (uint64_t)o->gpu_bytes,
                                .keep = o->headroom < 0 ? UINT64_MAX : (uint64_t)o->headroom,
                                .warn = o->warn,
                                .warn_ctx = o->warn_ctx};
    AFF_TRY(aff__runner_slab(r, &s, &card, err));
    deal((int64_t)(o->host_bytes / aff__experts_layout(n->experts).pitch), total, card.slots, spare, t.picks, &t);
    say(o, r, card.slots, total, &t);
    t.card = &card;
    float *profile = NULL;
    AFF_TRY(make_profile(n, o, stages, &profile, err));
    t.profile = profile;
    const aff_status st = aff__tiers_create(&r->tiers, n->experts, stages ? n->draft_experts : NULL, &t, err);
    free(profile);
    AFF_TRY(st);
    for (int64_t i = (int64_t)n->layers * E; i < total; i++) aff__tiers_pin(r->tiers, (int)(i / E), (int)(i % E), true);
    AFF_TRY(aff__calloc(&r->used_id, (uint64_t)E, sizeof *r->used_id, "use of a layer's experts", err));
    AFF_TRY(aff__calloc(&r->used_count, (uint64_t)E, sizeof *r->used_count, "use of a layer's experts", err));
    const aff_slab_host host = {.ctx = r,
                                .fetch = fetch,
                                .resize = resize,
                                .staging = aff__slots_at(aff__tiers_pool(r->tiers), 0),
                                .staging_slots = t.inclusive ? 0 : t.staging};
    return r->b->slab_host(r->b, &host, err);
}

void aff__residency_free(aff_runner *r)
{
    if (r->tiers && r->b->slab_host) r->b->slab_host(r->b, NULL, NULL);
    aff__tiers_free(r->tiers);
    free(r->used_id);
    free(r->used_count);
    r->tiers = NULL;
}

/* ---- a pass ---- */

void aff__residency_abandon(aff_runner *r)
{
    if (!r->in_pass) return;
    r->b->finish(r->b, NULL); /* whatever runs still names the slots of now */
    aff__tiers_end(r->tiers);
    r->in_pass = false;
}

aff_status aff__residency_begin(aff_runner *r, aff_error *err)
{
    if (!r->tiers) return AFF_OK;
    aff__residency_abandon(r);
    AFF_TRY(aff__tiers_begin(r->tiers, err));
    r->in_pass = true;
    return AFF_OK;
}

static aff_status note(aff_runner *r, const aff_experts_used *u, aff_error *err)
{
    const aff_use_phase phase = u->rows > AFF_LOGIT_ROWS ? AFF_USE_PREFILL : AFF_USE_DECODE;
    int n = 0;
    if (u->pick) return aff__tiers_note_picks(r->tiers, u->layer, phase, u->pick, u->rows, u->picks, NULL, err);
    for (int e = 0; e < r->source->cfg.experts; e++)
        if (u->count[e]) {
            r->used_id[n] = e;
            r->used_count[n++] = u->count[e];
        }
    return aff__tiers_note(r->tiers, &(aff_placement_use){.layer = u->layer, .phase = phase, .n = n, .id = r->used_id, .count = r->used_count}, err);
}

aff_status aff__residency_end(aff_runner *r, aff_error *err)
{
    aff_experts_used u;
    aff_tier_counters c = {0};
    aff_status s = AFF_OK;
    if (!r->tiers) return AFF_OK;
    for (int i = 0; s == AFF_OK && r->b->used(r->b, i, &u); i++) s = note(r, &u, err);
    r->b->counted(r->b, &c);
    aff__tiers_count(r->tiers, &c);
    aff__tiers_end(r->tiers);
    r->in_pass = false;
    return s;
}
