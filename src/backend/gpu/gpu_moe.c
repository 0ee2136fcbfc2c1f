/* Router, routed experts, SwiGLU (spec model-v4 8). */
#include "backend/gpu/gpu_internal.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

static void route(aff_backend *b, const aff_router *r, const float *logits, const int32_t *ids, int T, int32_t *picks,
                  float *weights)
{
    aff_gpu *g = aff__gpu_of(b);
    aff_k_route a = {.logits = logits,
                           .bias = r->bias,
                           .hash = r->hash,
                           .ids = ids,
                           .picks = picks,
                           .weights = weights,
                           .scoring = (int32_t)r->scoring,
                           .experts = r->experts,
                           .picks_n = r->picks,
                           .T = T,
                           .scale = r->scale};
    if (T <= AFF_K_FEW && !g->fetch) {
        if (g->choice.picks) aff__gpu_flush(g);
        g->choice = a;
        g->choice_rows = T;
        return;
    }
    const aff_gpu_guess *w = g->fetch ? &g->fetch->guess : NULL;
    const bool guess = w && w->pending;
    if (guess) {
        a.guess_logits = w->logits;
        a.guess_bias = w->router.bias;
        a.guess_hash = w->router.hash;
        a.guess = g->fetch->guesses;
        a.guess_log = g->fetch->log + (int64_t)(g->moes < AFF_G_COUNTS ? g->moes : 0) * g->fetch->log_row;
    }
    aff__gpu_launch(g, AFF_K_route, guess ? 2 * T : T, 32, 8 * (uint64_t)r->experts, &a);
}

static void swiglu(aff_backend *b, float *a, const float *bb, float limit, int T, int n)
{
    aff_gpu *g = aff__gpu_of(b);
    const int64_t all = (int64_t)T * n;
    const aff_k_swiglu k = {.a = a, .b = bb, .f32 = a, .bf16 = aff__gpu_bf16(g, a), .n = all, .limit = limit};
    aff__gpu_wrote(g, a, all);
    if (T <= AFF_K_FEW)
        aff__gpu_small(g, AFF_K_JOB_SWIGLU, (all + 255) / 256, 0, a, a, all)->swiglu = k;
    else
        aff__gpu_launch(g, AFF_K_swiglu, (all + 255) / 256, 256, 0, &k);
    aff__gpu_has_form(g, a);
}

static uint64_t up16(uint64_t n)
{
    return (n + 15) & ~15ull;
}

/* int8 and scales of x[T][n] in scratch `which`. */
static void quantise(aff_gpu *g, const float *x, int T, int n, aff_gpu_scratch which, int8_t **q, float **s)
{
    const uint64_t codes = up16((uint64_t)T * (uint64_t)n);
    *q = aff__gpu_scratch(g, which, codes + (uint64_t)T * (uint64_t)((n + 127) / 128) * 4 + 16);
    *s = (float *)(void *)(*q + codes);
    if (which == AFF_G_XQ && g->q_of == x) return; /* a norm left it there */
    if (!x) return;                                /* room only */
    aff__gpu_launch(g, AFF_K_convert, T, 256, 0, &(aff_k_convert){.x = x, .ldx = n, .y.q = *q, .y.qs = *s, .n = n});
    if (which == AFF_G_XQ) g->q_of = x;
}

/* The plan's arrays in scratch; counts of each plan of the pass have a place of their own. */
static aff_k_moe plan_arrays(aff_gpu *g, uint64_t entries, uint64_t items)
{
    char *p = aff__gpu_scratch(g, AFF_G_PLAN, up16(items * sizeof(aff_k_item)) + 3 * up16(entries * 4));
    const int slot = g->moes < AFF_G_COUNTS ? g->moes++ : AFF_G_COUNTS - 1;
    aff_k_moe m = {.n = g->counts + AFF_K_PLAN_COUNTS * slot, .item = (aff_k_item *)(void *)p};
    p += up16(items * sizeof(aff_k_item));
    m.row = (int32_t *)(void *)p;
    m.rank = (int32_t *)(void *)(p + up16(entries * 4));
    m.weight = (float *)(void *)(p + 2 * up16(entries * 4));
    return m;
}

/* Copies of the codebook with which the streaming kernels run here; 0: they do not. */
static int32_t stream_copies(const aff_gpu *g, const aff_expert_shape *s)
{
    const int32_t widest = s->hidden > s->inter ? s->hidden : s->inter;
    if (s->dtype != AFF_Q2P875G) return 0;
    for (int32_t c = 8; c; c /= 2)
        if (aff__k_stream_smem(c, widest) <= (size_t)aff__rt_info(g->rt)->shared_bytes) return c;
    return 0;
}

/* A routed op on its way: its kernels' arguments. */
typedef struct {
    aff_gpu *g;
    aff_k_experts a;
    int n, up_tiles, down_tiles; /* entries; blocks of an item */
} work;

/* Many rows: items [lo, hi), entries [e0, e1). */
static void many(void *ctx, int lo, int hi, int e0, int e1)
{
    work *w = ctx;
    aff_gpu *g = w->g;
    aff_k_experts a = w->a;
    const bool hopper = g->hopper && aff__k_xw_fits(&a);
    const uint64_t smem = hopper ? AFF_K_XW_SMEM : aff__k_experts_many_smem(g->amd);
    const unsigned threads = hopper ? 384 : 256;
    const int64_t inter = a.inter, groups = (inter + 127) / 128, units = aff__rt_info(g->rt)->units, up = (int64_t)(hi - lo) * w->up_tiles,
                  down = (int64_t)(hi - lo) * w->down_tiles;
    a.item0 = lo;
    a.items = hi - lo;
    aff__gpu_launch(g, hopper ? AFF_K_experts_wg_up : AFF_K_experts_many_up, hopper && units < up ? units : up, threads, smem, &a);
    aff__gpu_launch(g, AFF_K_convert, e1 - e0, 256, 0,
                    &(aff_k_convert){.x = a.h + e0 * inter, .ldx = inter, .y.q = a.hq + e0 * inter, .y.qs = a.hs + e0 * groups, .n = a.inter});
    aff__gpu_launch(g, hopper ? AFF_K_experts_wg_down : AFF_K_experts_many_down, hopper && units < down ? units : down, threads, smem, &a);
}

static void few_rows(work *w, int items)
{
    aff_gpu *g = w->g;
    aff_k_experts *a = &w->a;
    const int units = aff__rt_info(g->rt)->units;
    if (a->copies) {
        /* Blocks wait for others of the launch: a block a multiprocessor, they run side by side. Emulated, so do those of a cooperative launch. */
        if (a->bring.slots && aff__rt_info(g->rt)->kind == AFF_RT_EMU)
            aff__gpu_launch_together(g, AFF_K_experts_stream_up, 2, 512, aff__k_stream_smem(a->copies, a->hidden), a);
        else
            aff__gpu_launch(g, AFF_K_experts_stream_up, units, 512, aff__k_stream_smem(a->copies, a->hidden), a);
        aff__gpu_launch(g, AFF_K_experts_stream_down, units, 512, aff__k_stream_smem(a->copies, a->inter), a);
    } else {
        aff__gpu_launch(g, AFF_K_experts_up, (int64_t)items * w->up_tiles, 128, aff__k_experts_smem(a->dtype, a->hidden) + 4096, a);
        aff__gpu_launch(g, AFF_K_experts_down, (int64_t)items * w->down_tiles, 128, aff__k_experts_smem(a->dtype, a->inter), a);
    }
}

static void place_fetch(aff_gpu *g, int row, aff_k_plan *p, aff_k_experts *a)
{
    aff_gpu_fetch *f = g->fetch;
    const aff_gpu_slab *s = g->slab;
    p->fetch = (aff_k_fetch){.plans = f->plans,
                             .progress = f->progress,
                             .begun = f->begun,
                             .ready = f->ready,
                             .at = (uint64_t)(uintptr_t)f->at,
                             .pitch = s->o.pitch,
                             .slots = f->slots,
                             .layer = row,
                             .last = f->last,
                             .entry = f->entry,
                             .head = f->head};
    a->fetched = f->ready;
    if (!f->guess.pending) return;
    p->fetch.guess = f->guesses;
    p->fetch.guess_base = s->table + (int64_t)f->guess.layer * s->o.experts;
    p->fetch.guess_layer = f->guess.layer;
    p->fetch.ahead = f->guess.ahead;
    g->moe[g->moes - 1].ahead = f->guess.ahead;
    f->guess.pending = false;
}

/* Experts that are not on the card are brought to the slots of the groups, which are for passes of many rows otherwise; where a record has gate and up
 * in front of down, and there are blocks for both. */
static void place_bring(aff_gpu *g, aff_k_plan *p, aff_k_experts *a)
{
    const aff_gpu_slab *s = g->slab;
    uint32_t down = UINT32_MAX, before = 0;
    for (int i = 0; i < 9; i++) {
        const uint32_t at = a->off[i / 3][i % 3];
        if (i >= 6 && at < down) down = at;
        if (i < 6 && at > before) before = at;
    }
    if (!g->groups.at || before >= down || down % 16 || aff__rt_info(g->rt)->units < 2) return;
    a->bring = (aff_k_bring){(uint64_t)(uintptr_t)g->groups.at, s->o.pitch, g->groups.arrived, (uint32_t)s->o.bytes, down, 2 * g->groups.each};
    p->arrived = g->groups.arrived;
    p->bring = a->bring.slots;
}

/* What the plan needs to know about where experts are, and the kernels after it: `away`, some may be elsewhere than on the card, `few` or many rows. */
static void place_plan(aff_gpu *g, int row, bool away, bool few, aff_k_plan *p, aff_k_experts *a)
{
    const aff_gpu_slab *s = g->slab;
    const aff_gpu_stage *t = g->stages;
    p->log = row < 0 ? NULL : aff__gpu_slab_log(g, g->moes - 1);
    if (row >= 0) p->ring = (aff_k_ring){.pitch = s->o.pitch, .layer = row};
    if (away && !few) p->group = (uint64_t)(uintptr_t)g->groups.at, p->group_slots = 2 * g->groups.each;
    if (few && row >= 0 && g->fetch) place_fetch(g, row, p, a);
    if (few && row >= 0 && a->copies) place_bring(g, p, a);
    if (!t || !few || row < 0) return;
    p->ring.last = t->last;
    p->ring.entry = t->entry;
    p->ring.head = t->head;
    p->ring.staging = (uint64_t)(uintptr_t)t->slots_at;
    p->ring.slots = a->ready_slots = t->slots;
    a->ready = t->ready;
}

/* Rows that chose each expert, by the plan that was just launched; NULL after an error. The array is the caller's. */
static int32_t *wait_counts(aff_gpu *g, int T, int K, int experts)
{
    aff_error err;
    int32_t *count = NULL;
    aff_status s = aff__calloc(&count, (uint64_t)experts, sizeof *count, "experts of a prompt", &err);
    if (s == AFF_OK) s = aff__rt_record(g->rt, g->groups.planned, g->s, &err);
    if (s == AFF_OK) s = aff__rt_event_sync(g->rt, g->groups.planned, &err);
    aff__gpu_note(g, s, &err);
    const int32_t *log = aff__gpu_slab_log(g, g->moes - 1);
    if (g->status != AFF_OK) {
        free(count);
        return NULL;
    }
    if (T > AFF_K_FEW)
        memcpy(count, log, (size_t)experts * sizeof *count);
    else
        for (int i = 0; i < T * K; i++)
            if (log[i] >= 0 && log[i] < experts) count[log[i]]++; /* else finish says so */
    return count;
}

static void routed(aff_backend *b, const aff_expert_shape *s, const aff_expert_table *e, int layer,
                   const int32_t *picks, const float *weights, const float *x, int T, int K, float *y)
{
    aff_gpu *g = aff__gpu_of(b);
    const int row = aff__gpu_slab_layer(g, e, layer);
    const bool away = row >= 0 && g->slab->away, few = T <= (away ? g->slab->few_rows : AFF_K_FEW);
    const int32_t batch = few ? AFF_K_ITEM_FEW : aff__k_item_many(g->amd),
                  items = aff__k_max_items(T, K, e->experts, batch), tile = few ? 128 : 64;
    const int n = T * K;
    work w = {.g = g, .n = n, .up_tiles = (s->inter + tile - 1) / tile, .down_tiles = (s->hidden + tile - 1) / tile};
    aff_k_experts *a = &w.a;
    *a = (aff_k_experts){.plan = plan_arrays(g, (uint64_t)n, (uint64_t)items),
                         .table = s->table ? s->table[0][0] : NULL,
                         .y = y,
                         .dtype = (int32_t)s->dtype,
                         .hidden = s->hidden,
                         .inter = s->inter,
                         .K = K,
                         .link = g->link_blocks,
                         .limit = s->swiglu_limit};
    memcpy(a->off, e->plane, sizeof a->off);
    if (row >= 0) g->moe[g->moes - 1] = (aff_gpu_moe){row, T, K, 0, few};
    int8_t *xq;
    float *xs;
    quantise(g, x, T, s->hidden, AFF_G_XQ, &xq, &xs);
    a->xq = xq;
    a->xs = xs;
    quantise(g, NULL, n, s->inter, AFF_G_HQ, &a->hq, &a->hs);
    const int ahead = g->fetch && e->experts < 992 ? 32 : 0; /* a warp without experts, for wishes */
    const unsigned threads = ((unsigned)((e->experts < 1024 ? e->experts : 1024) + 31) & ~31u) + (unsigned)ahead;
    aff_k_plan plan = {.picks = picks, .weights = weights, .base = e->base + (int64_t)layer * e->experts, .plan = a->plan, .T = T, .K = K, .experts = e->experts, .batch = batch};
    a->copies = few ? stream_copies(g, s) : 0;
    if (a->copies || !few) a->h = aff__gpu_scratch(g, AFF_G_H, (uint64_t)n * (uint64_t)s->inter * sizeof(float)); /* before the plan asks for anything */
    place_plan(g, row, away, few, &plan, a);
    if (g->choice.picks == picks && g->choice_rows == T && g->choice.experts == e->experts && g->choice.picks_n == K) {
        const aff_k_route route = g->choice;
        g->choice.picks = NULL;
        aff_k_job *job = aff__gpu_small(g, AFF_K_JOB_CHOOSE, 1, aff__k_choose_smem(e->experts), route.logits, weights, (int64_t)n);
        job->choose.route = route;
        job->choose.plan = plan;
        if (!few) aff__gpu_flush(g); /* somebody may wait for the counts */
    } else {
        aff__gpu_launch(g, few ? AFF_K_plan : AFF_K_plan_many, 1, few || threads > 256 ? threads : 256, few ? aff__k_plan_smem(e->experts) : aff__k_plan_many_smem(e->experts), &plan);
    }
    if (few) {
        few_rows(&w, items);
    } else if (away && g->slab->elsewhere[row]) {
        int32_t *count = wait_counts(g, T, K, e->experts);
        if (count) aff__gpu_groups_run(g, row, count, batch, many, &w);
        free(count);
    } else {
        many(&w, 0, items, 0, n);
    }
    aff__gpu_wrote(g, y, (int64_t)n * s->hidden);
}

void aff__gpu_moe_ops(aff_backend *b)
{
    b->route = route;
    b->swiglu = swiglu;
    b->routed = routed;
}
