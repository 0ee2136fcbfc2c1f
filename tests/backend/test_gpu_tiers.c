/* Experts of which the card holds a part (promise 1): the same bits as with all of them on the card, wherever each lies, while others move beside the
 * passes, under permuted orders of threads and streams. The tiers are played by hand here: a source of all experts (the disk), a pool, a thread
 * that answers requests and one that moves. */
#include "backend/gpu/gpu_internal.h"
#include "model/runner.h"
#include "model/synthetic.h"
#include "support/test.h"
#include "base/mem.h"
#include "base/rng.h"
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static const char *card_name; /* --device */
static bool full;             /* --full: every configuration */

enum { PREFILL = 27, AGAIN = 18, MOVES = 6, DRAFTS = 1 };
static const int widths[] = {1, 5, 16, 1, 5, 2};

typedef struct {
    const char *name;
    int slab;    /* slots: per cent of all experts, -1: one slot */
    int pool;    /* per cent of the rest that are in host memory */
    bool moves, pinned;
    int staging; /* slots; 0: none are on disk */
    bool amd;
    bool only_full;
    int scratch, ahead; /* fetched ahead */
} config;

typedef struct request {
    struct request *next;
    aff_load *l;
} request;

typedef struct {
    const config *c;
    aff_runner *r;
    aff_card card;
    int layers, experts, n;
    uint64_t pitch;
    uint8_t *source, *pool, *memory; /* [n] slots each; memory: staging, then the pool */
    aff_tier *tier;                  /* [n] */
    int64_t *slab;                   /* [n] slot or -1 */
    int *who;                        /* [slots] expert of a slab slot, -1 */
    bool *quarantined;               /* [slots] left by a move that was published after the last pass */
    uint64_t seed;
    /* Moves under way: carried out beside the pass, published after it. */
    int moving[MOVES], n_moving;
    int64_t to[MOVES];
    /* The disk. */
    pthread_t disk;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    request *asked;
    bool stop;
    int served, fail_after; /* fail_after: requests until one fails, 0: none does */
} world;

static int draw(world *w, int n)
{
    return (int)(aff__splitmix64(&w->seed) % (uint64_t)n);
}

static uint8_t *at(const world *w, uint8_t *base, int i)
{
    return base + (uint64_t)i * w->pitch;
}

static void *disk(void *arg)
{
    world *w = arg;
    pthread_mutex_lock(&w->lock);
    while (!w->stop || w->asked) {
        request *q = w->asked;
        if (!q) {
            pthread_cond_wait(&w->wake, &w->lock);
            continue;
        }
        w->asked = q->next; /* the latest first: out of order */
        const bool fails = w->fail_after && --w->fail_after == 0;
        w->served++;
        pthread_mutex_unlock(&w->lock);
        q->l->status = AFF_OK;
        if (fails)
            q->l->status = aff__fail(&q->l->err, AFF_E_IO, "expert %d of layer %d: the disk is gone", q->l->expert, q->l->layer);
        else
            memcpy(q->l->to, at(w, w->source, q->l->layer * w->experts + q->l->expert), w->pitch);
        q->l->done(q->l);
        free(q);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static void fetch(void *ctx, aff_load *l)
{
    world *w = ctx;
    request *q = malloc(sizeof *q);
    q->l = l;
    pthread_mutex_lock(&w->lock);
    q->next = w->asked;
    w->asked = q;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

static aff_tier_change change(const world *w, int i)
{
    return (aff_tier_change){.layer = i / w->experts, .expert = i % w->experts,
                             .place = {.tier = w->tier[i], .slab = w->slab[i], .host = w->tier[i] == AFF_TIER_HOST ? at(w, w->pool, i) : NULL}};
}

static void publish(world *w, int i)
{
    const aff_tier_change c = change(w, i);
    must(w->card.publish(w->card.ctx, &c, 1, &err));
}

/* Where an expert goes that leaves the card. */
static aff_tier below(world *w)
{
    return draw(w, 100) < w->c->pool ? AFF_TIER_HOST : AFF_TIER_DISK;
}

static aff_status shrink(void *ctx, int64_t slots, aff_error *e)
{
    world *w = ctx;
    for (int64_t s = slots; s < w->card.slots; s++)
        if (w->who[s] >= 0) {
            const int i = w->who[s];
            w->who[s] = -1;
            w->slab[i] = -1;
            w->tier[i] = below(w);
            publish(w, i);
        }
    w->card.slots = slots;
    return AFF_OK;
}

static void open_world(world *w, const config *c, const aff_net *net)
{
    aff_device_spec spec;
    aff_backend *b;
    *w = (world){.c = c, .seed = 77};
    must(aff__device_parse(&spec, card_name ? card_name : c->amd ? "emu-amd:64M" : "emu:64M", &err));
    must(aff__gpu_backend(&b, &spec, AFF_FAST, &err));
    must(aff__runner_open_bare(&w->r, net, b, &err));
    w->layers = net->layers + net->stages;
    w->experts = net->cfg.experts;
    w->n = w->layers * w->experts;
    w->pitch = aff__experts_layout(net->experts).pitch;
    const int64_t slots = c->slab < 0 ? 1 : (int64_t)w->n * c->slab / 100;
    must(aff__runner_slab(w->r, &(aff_slab_options){.scratch = c->scratch, .ahead = c->ahead, .spare = 2, .most = slots ? (uint64_t)slots * w->pitch + b->mem->page : 0, .keep = UINT64_MAX}, &w->card, &err));
    assert_true(w->card.slots >= slots);
    assert_true(w->card.slots <= slots + (int64_t)(b->mem->page / w->pitch) + 1);
    must(aff__calloc(&w->source, (uint64_t)w->n, w->pitch, "source", &err));
    w->memory = aligned_alloc(4096, (size_t)((uint64_t)(w->n + c->staging) * w->pitch));
    memset(w->memory, 0xee, (size_t)((uint64_t)(w->n + c->staging) * w->pitch));
    w->pool = at(w, w->memory, c->staging);
    w->tier = calloc((size_t)w->n, sizeof *w->tier);
    w->slab = calloc((size_t)w->n, sizeof *w->slab);
    w->who = calloc((size_t)w->card.slots + 1, sizeof *w->who);
    w->quarantined = calloc((size_t)w->card.slots + 1, sizeof *w->quarantined);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    if (c->pinned)
        must(w->card.attach(w->card.ctx, w->memory, (uint64_t)(w->n + c->staging) * w->pitch, w->pitch, &err));
    for (int64_t s = 0; s < w->card.slots; s++) w->who[s] = -1;
    for (int i = 0; i < w->n; i++) {
        aff_experts *store = i / w->experts < net->layers ? net->experts : net->draft_experts;
        const int l = i / w->experts < net->layers ? i / w->experts : i / w->experts - net->layers;
        aff__experts_copy(store, l, i % w->experts, at(w, w->source, i));
        w->slab[i] = -1;
    }
    /* Every other slot of the slab is filled, so that the table is not in order. */
    for (int k = 0, i = 0; k < 2; k++)
        for (int64_t s = k; s < w->card.slots && i < w->n; s += 2, i++) {
            const int e = (int)((uint64_t)i * 7919 % (uint64_t)w->n);
            if (w->slab[e] >= 0) continue;
            w->slab[e] = s, w->who[s] = e;
            must(w->card.copy(w->card.ctx, &(aff_tier_copy){true, s, at(w, w->source, e)}, 1, &err));
        }
    for (int i = 0; i < w->n; i++) {
        w->tier[i] = w->slab[i] >= 0 ? AFF_TIER_CARD : below(w);
        if (w->tier[i] == AFF_TIER_HOST) memcpy(at(w, w->pool, i), at(w, w->source, i), w->pitch);
        publish(w, i);
    }
    assert_int_equal(pthread_create(&w->disk, NULL, disk, w), 0);
    must(b->slab_host(b, &(aff_slab_host){w, fetch, shrink, w->memory, c->staging}, &err));
}

static void close_world(world *w)
{
    aff_backend *b = w->r->b;
    must(b->slab_host(b, NULL, &err));
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->disk, NULL);
    if (w->c->pinned) w->card.detach(w->card.ctx, w->memory, (uint64_t)(w->n + w->c->staging) * w->pitch);
    aff__runner_free(w->r);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->wake);
    free(w->source), free(w->memory), free(w->tier), free(w->slab), free(w->who), free(w->quarantined);
}

/* Chooses moves up and down; their bytes travel beside the pass. */
static void choose_moves(world *w)
{
    w->n_moving = 0;
    memset(w->quarantined, 0, (size_t)w->card.slots); /* a pass has begun and ended since */
    for (int k = 0; w->c->moves && k < MOVES; k++) {
        const int i = draw(w, w->n);
        bool twice = false;
        for (int j = 0; j < w->n_moving; j++) twice |= w->moving[j] == i;
        if (twice) continue;
        int64_t to = -1;
        if (w->tier[i] != AFF_TIER_CARD)
            for (int64_t s = 0; s < w->card.slots && to < 0; s++) {
                bool spoken = w->who[s] >= 0 || w->quarantined[s];
                for (int j = 0; j < w->n_moving; j++) spoken |= w->to[j] == s;
                if (!spoken) to = s;
            }
        w->moving[w->n_moving] = i;
        w->to[w->n_moving++] = to;
    }
}

static void *mover(void *arg)
{
    world *w = arg;
    for (int k = 0; k < w->n_moving; k++) {
        const int i = w->moving[k];
        if (w->to[k] >= 0 && w->card.copy(w->card.ctx, &(aff_tier_copy){true, w->to[k], at(w, w->source, i)}, 1, NULL) != AFF_OK) return w;
        if (w->tier[i] == AFF_TIER_CARD && w->card.copy(w->card.ctx, &(aff_tier_copy){false, w->slab[i], at(w, w->pool, i)}, 1, NULL) != AFF_OK) return w;
    }
    return NULL;
}

static void publish_moves(world *w)
{
    for (int k = 0; k < w->n_moving; k++) {
        const int i = w->moving[k];
        if (w->to[k] >= 0) {
            w->tier[i] = AFF_TIER_CARD;
            w->slab[i] = w->to[k];
            w->who[w->to[k]] = i;
        } else if (w->tier[i] == AFF_TIER_CARD) {
            w->who[w->slab[i]] = -1;
            w->quarantined[w->slab[i]] = true;
            w->slab[i] = -1;
            w->tier[i] = below(w);
        }
        publish(w, i);
    }
}

/* n rows of a sequence; logits of all of them. */
static aff_status pass(world *w, aff_runner *r, aff_seq *s, const int32_t *id, int n, float *logits)
{
    pthread_t m;
    void *failed = NULL;
    if (w) {
        aff__rt_emu_seed((uint32_t)draw(w, 1 << 30));
        choose_moves(w);
        assert_int_equal(pthread_create(&m, NULL, mover, w), 0);
    }
    const aff_status st = aff__forward(r, &(aff_batch){.n = n, .id = id, .seq = s, .logits = logits}, &err);
    if (w) {
        assert_int_equal(pthread_join(m, &failed), 0);
        assert_null(failed);
        publish_moves(w);
    }
    return st;
}

/* What every pass used, by its own account. */
static void check_used(const world *w, int rows)
{
    aff_backend *b = w->r->b;
    const int K = w->r->net->cfg.picks;
    aff_experts_used u;
    int n = 0;
    for (; b->used(b, n, &u); n++) {
        int64_t sum = 0;
        assert_int_equal(u.layer, n);
        assert_int_equal(u.rows, rows);
        assert_int_equal(u.picks, K);
        assert_true((u.pick == NULL) == (rows > AFF_K_FEW));
        for (int i = 0; u.pick && i < rows * K; i++) assert_in_range(u.pick[i], 0, w->experts - 1);
        for (int e = 0; u.count && e < w->experts; e++) sum += u.count[e];
        if (u.count) assert_int_equal(sum, rows * K);
    }
    assert_int_equal(n, w->r->net->layers);
}

/* All passes of a text into out. */
static int64_t text(world *w, aff_runner *r, const aff_net *net, float *out)
{
    const int V = net->cfg.vocab;
    int32_t ids[400];
    int64_t at = 0;
    float *o = out;
    aff_seq *s;
    for (int i = 0; i < 400; i++) ids[i] = (int32_t)((uint64_t)i * 2654435761u % (uint64_t)V);
    must(aff__seq_open(&s, net, &(aff_seq_options){.size = 512, .commit = 64, .margin = 32, .memory = aff__runner_memory(r)}, &err));
    must(pass(w, r, s, ids, PREFILL, o));
    if (w) check_used(w, PREFILL);
    at += PREFILL, o += (int64_t)PREFILL * V;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        must(pass(w, r, s, ids + at, widths[i], o));
        if (w) check_used(w, widths[i]);
        at += widths[i], o += (int64_t)widths[i] * V;
        if (i != 3) continue;
        int32_t d[5];
        float conf[5];
        must(aff__draft_block(r, s, ids[at], d, conf, o, NULL, NULL, &err));
        o += 5 * (int64_t)V;
    }
    must(pass(w, r, s, ids + at, AGAIN, o));
    o += (int64_t)AGAIN * V;
    aff__seq_free(s);
    return o - out;
}

static aff_net *open_synthetic(void)
{
    aff_net *net;
    const aff_synthetic y = {.geometry = "tiny", .layers = 3, .experts = 12, .seed = 5};
    must(aff__net_open(&net, NULL, &(aff_net_options){.numerics = AFF_FAST, .draft = true, .synthetic = &y}, &err));
    return net;
}

/* The other number format: MXFP4, by the kernels that do not stream. */
static aff_net *open_mx(void)
{
    char path[1024];
    aff_net *net;
    snprintf(path, sizeof path, "%s/golden/v4-sim/ckpt-dspark", AFF_TESTS_DIR);
    must(aff__net_open(&net, path, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    return net;
}

static void same_text(aff_net *(*open)(void), const config *configs, int n)
{
    aff_net *net = open();
    const int V = net->cfg.vocab;
    int rows = PREFILL + AGAIN + 5 * DRAFTS;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) rows += widths[i];
    float *want = malloc(sizeof *want * (size_t)(rows * V)), *got = malloc(sizeof *got * (size_t)(rows * V));
    bool amd = !configs[0].amd;
    for (int i = 0; i < n; i++) {
        const config *c = &configs[i];
        if (!full && c->only_full) continue;
        if (c->amd != amd || i == 0) {
            aff_device_spec spec;
            aff_backend *b;
            aff_runner *all;
            amd = c->amd;
            must(aff__device_parse(&spec, card_name ? card_name : amd ? "emu-amd:64M" : "emu:64M", &err));
            must(aff__gpu_backend(&b, &spec, AFF_FAST, &err));
            must(aff__runner_open(&all, net, b, &err));
            assert_int_equal(text(NULL, all, net, want), rows * V);
            aff__runner_free(all);
        }
        world w;
        open_world(&w, c, net);
        memset(got, 0, sizeof *got * (size_t)(rows * V));
        assert_int_equal(text(&w, w.r, net, got), rows * V);
        int wrong = 0;
        for (int t = 0; t < rows; t++) wrong += memcmp(want + t * V, got + t * V, (size_t)V * sizeof *got) != 0;
        const aff_tier_counters k = aff__gpu_of(w.r->b)->slab->count;
        print_message("%s, %s%s: %lld slots of %d, %d rows differ; %lld experts over the link, %d from disk, %.1f MB streamed\n", c->name, c->amd ? "amd" : "nv",
                      c->moves ? ", moving" : "", (long long)w.card.slots, w.n, wrong, (long long)k.link_items, w.served, (double)k.stream_bytes * 1e-6);
        if (c->scratch)
            print_message("  fetched ahead: %lld asked, %lld used, %lld wasted, %lld cancelled, %.2f MB; %lld of %lld picks guessed rightly\n", (long long)k.prefetch_asked,
                          (long long)k.prefetch_used, (long long)k.prefetch_wasted, (long long)k.prefetch_cancelled, (double)k.prefetch_bytes * 1e-6,
                          (long long)k.guess_right, (long long)k.guess_picks);
        assert_true((k.prefetch_used > 0) == (c->scratch > 0));
        assert_int_equal(k.prefetch_asked, k.prefetch_used + k.prefetch_wasted + k.prefetch_cancelled);
        assert_true(k.prefetch_bytes <= (uint64_t)(k.prefetch_used + k.prefetch_wasted) * w.pitch);
        assert_int_equal(wrong, 0);
        assert_true((w.served > 0) == (c->staging > 0));
        assert_true(k.link_items > 0 || c->slab == 100 || c->pool == 0 || !c->pinned);
        close_world(&w);
    }
    free(want);
    free(got);
    aff__net_close(net);
    aff__rt_emu_seed(0);
}

static void test_places(void **state)
{
    static const config c[] = {
        {"all on the card", 100, 100, false, true, 0, false, true},
        {"45 %, rest in the pool", 45, 100, true, true, 0, false, false},
        {"5 %, rest in the pool", 5, 100, false, true, 0, false, true},
        {"one slot, rest in the pool", -1, 100, true, true, 0, false, false},
        {"pool only", 0, 100, false, true, 0, false, true},
        {"45 %, pool and disk", 45, 50, true, true, 64, false, true},
        {"no slab, pool 10 % and disk", 0, 10, false, true, 12, false, true},
        {"disk only", 0, 0, false, true, 4, false, true},
        {"one slot, disk", -1, 0, true, true, 20, false, true},
        {"45 %, pool and disk", 45, 50, true, true, 24, true, false},
        {"pool only", 0, 100, false, true, 0, true, true},
    };
    (void)state;
    same_text(open_synthetic, c, (int)(sizeof c / sizeof *c));
}

static aff_net *open_deep(void)
{
    aff_net *net;
    const aff_synthetic y = {.geometry = "tiny", .layers = 6, .experts = 12, .seed = 5};
    must(aff__net_open(&net, NULL, &(aff_net_options){.numerics = AFF_FAST, .draft = true, .synthetic = &y}, &err));
    return net;
}

/* Experts fetched ahead of their layers, of which three have tables and three are guessed for. */
static void test_fetched(void **state)
{
    static const config c[] = {
        {"45 %, rest in the pool, 8 fetched", 45, 100, true, true, 0, false, false, 8, 1},
        {"one slot, pool and disk, 1 fetched", -1, 60, true, true, 40, false, true, 1, 1},
        {"pool only, 64 fetched, 2 layers ahead", 0, 100, false, true, 0, true, true, 64, 2},
    };
    (void)state;
    same_text(open_deep, c, (int)(sizeof c / sizeof *c));
}

static void test_mx(void **state)
{
    static const config c[] = {{"45 %, pool and disk", 45, 50, true, true, 48, false, false}, {"disk only", 0, 0, false, true, 7, false, true}};
    (void)state;
    same_text(open_mx, c, 2);
}

/* ---- the same with the tiers themselves ---- */

typedef struct {
    const char *name;
    int slab, pool; /* per cent of all experts: slots of the slab, -1: one; of the pool; 100: inclusive */
    aff_placement_strategy strategy;
    bool draft_in_memory, errors, stalled, amd, only_full;
    int prefetch; /* layers ahead; 0: off */
} tiered;

static aff_runner *open_tiered(const aff_net *net, const tiered *c)
{
    aff_device_spec spec;
    aff_runner *r;
    const uint64_t pitch = aff__experts_layout(net->experts).pitch;
    const int64_t total = (int64_t)(net->layers + net->stages) * net->cfg.experts, picks = net->cfg.picks;
    aff_tier_options t = {0};
    aff__placement_options_init(&t.placement);
    t.placement.strategy = c->strategy;
    t.placement.shadow = 2;
    t.placement.hysteresis = t.placement.disk_hysteresis = 1;
    t.placement.min_gain = t.placement.disk_min_gain = 0; /* all that may move does */
    if (c->errors) t.loader = (aff_loader_options){.inject = 0.3, .inject_most = 2, .inject_seed = 3};
    must(aff__device_parse(&spec, card_name ? card_name : c->amd ? "emu-amd:64M" : "emu:64M", &err));
    must(aff__runner_on_bare(&r, net, &spec, 1, &err));
    const int64_t slots = c->slab < 0 ? 1 : total * c->slab / 100, pool = total * c->pool / 100;
    const aff_card_options o = {.gpu_bytes = slots ? slots * (int64_t)pitch + (int64_t)r->b->mem->page : 0,
                                .headroom = -1,
                                .host_bytes = (uint64_t)(pool + (c->pool == 100 ? picks : 2 * picks + 8)) * pitch,
                                .draft_in_memory = c->draft_in_memory,
                                .prefetch = c->prefetch,
                                .tiers = &t};
    must(aff__runner_experts(r, &o, &err));
    aff__tiers_stall(aff__runner_tiers(r), c->stalled);
    return r;
}

static void test_tiers(void **state)
{
    static const tiered configs[] = {
        {"slab 45 %, all in the pool", 45, 100, AFF_PLACE_HEAT, true, false, false, false, false, 1},
        {"slab 45 %, all in the pool", 45, 100, AFF_PLACE_DEMAND, false, false, false, false, true},
        {"slab 45 %, all in the pool", 45, 100, AFF_PLACE_STATIC, false, false, false, false, true},
        {"slab 45 %, the rest in the pool", 45, 60, AFF_PLACE_HEAT, true, false, false, true, false, 2},
        {"slab 45 %, the rest in the pool", 45, 60, AFF_PLACE_STATIC, true, false, false, false, true, 1},
        {"slab 45 %, pool 10 %", 45, 10, AFF_PLACE_DEMAND, false, true, false, false, false},
        {"slab 5 %, pool 60 %", 5, 60, AFF_PLACE_HEAT, true, true, false, false, true, 1},
        {"slab 5 %, no pool", 5, 0, AFF_PLACE_HEAT, false, false, false, false, true},
        {"one slot, pool 30 %", -1, 30, AFF_PLACE_DEMAND, false, false, false, true, true},
        {"slab 45 %, mover stalled", 45, 30, AFF_PLACE_HEAT, false, false, true, false, true},
        {"pool only", 0, 100, AFF_PLACE_HEAT, false, false, false, false, true, 1},
        {"no slab, pool 10 %", 0, 10, AFF_PLACE_HEAT, false, true, false, false, false},
        {"disk only", 0, 0, AFF_PLACE_STATIC, false, true, false, false, true},
        {"all on the card", 100, 0, AFF_PLACE_HEAT, false, false, false, false, true},
    };
    (void)state;
    aff_net *net = open_synthetic();
    const int V = net->cfg.vocab;
    int rows = PREFILL + AGAIN + 5 * DRAFTS;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) rows += widths[i];
    float *want = malloc(sizeof *want * (size_t)(rows * V)), *got = malloc(sizeof *got * (size_t)(rows * V));
    for (int amd = 0; amd < 2; amd++) {
        bool there = false;
        for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
            const tiered *c = &configs[i];
            if (c->amd != (amd == 1) || (!full && c->only_full)) continue;
            if (!there) {
                aff_device_spec spec;
                aff_runner *all;
                must(aff__device_parse(&spec, card_name ? card_name : amd ? "emu-amd:64M" : "emu:64M", &err));
                must(aff__runner_on(&all, net, &spec, 1, &err));
                assert_int_equal(text(NULL, all, net, want), rows * V);
                aff__runner_free(all);
                there = true;
            }
            aff_runner *r = open_tiered(net, c);
            aff__rt_emu_seed((uint32_t)(i * 7919 + 1));
            memset(got, 0, sizeof *got * (size_t)(rows * V));
            assert_int_equal(text(NULL, r, net, got), rows * V);
            int wrong = 0;
            for (int t = 0; t < rows; t++) wrong += memcmp(want + t * V, got + t * V, (size_t)V * sizeof *got) != 0;
            aff_tiers *t = aff__runner_tiers(r);
            aff__tiers_settle(t);
            must(aff__tiers_check(t, &err));
            const aff_tier_counters k = aff__tiers_counters(t);
            print_message("%s, %s, %s: %d rows differ; experts used on the card %lld, in memory %lld, on disk %lld; %lld promoted, %lld over the link, %lld fetched ahead, %lld staged\n", c->name,
                          aff__placement_strategy_name(c->strategy), amd ? "amd" : "nv", wrong, (long long)(k.picks[0][0] + k.picks[1][0]), (long long)(k.picks[0][1] + k.picks[1][1]),
                          (long long)(k.picks[0][2] + k.picks[1][2]), (long long)(k.promotions[0] + k.promotions[1]), (long long)k.link_items, (long long)k.prefetch_used,
                          (long long)k.staged);
            assert_int_equal(wrong, 0);
            /* What the policy saw is what the card did: experts elsewhere were read or brought, on disk they were staged. */
            assert_int_equal(k.staged, k.picks[0][AFF_TIER_DISK] + k.picks[1][AFF_TIER_DISK]);
            assert_int_equal(k.link_items + k.prefetch_used + (int64_t)(k.stream_bytes / aff__experts_layout(net->experts).bytes),
                             k.picks[0][AFF_TIER_HOST] + k.picks[1][AFF_TIER_HOST] + k.picks[0][AFF_TIER_DISK] + k.picks[1][AFF_TIER_DISK]);
            /* Bytes by the counters are those that went through the copy engine's streams. */
            aff_gpu *g = aff__gpu_of(r->b);
            assert_true(aff__rt_copied(g->rt, g->slab->moves) == k.up_bytes + k.down_bytes);
            assert_true(aff__rt_copied(g->rt, g->groups.copies) == k.stream_bytes);
            aff__gpu_fetch_drain(g);
            if (g->fetch) /* a flag of 8 bytes in front of each, one of 4 behind it */
                assert_true(aff__rt_copied(g->rt, g->fetch->copies) == k.prefetch_bytes + 12 * (uint64_t)(k.prefetch_used + k.prefetch_wasted));
            assert_int_equal(k.prefetch_asked, k.prefetch_used + k.prefetch_wasted + k.prefetch_cancelled);
            if (c->strategy == AFF_PLACE_STATIC) assert_int_equal(k.promotions[0] + k.promotions[1], 0);
            aff__runner_free(r);
        }
    }
    free(want);
    free(got);
    aff__net_close(net);
    aff__rt_emu_seed(0);
}

static void print_line(void *ctx, const char *line)
{
    (void)ctx;
    print_message("%s\n", line);
}

/* A context that grows takes its memory from the slab, and working memory of larger passes too: experts leave, the text stays. */
static void test_growth(void **state)
{
    enum { SEQS = 5, EACH = 24 };
    (void)state;
    if (card_name) skip(); /* a real card's memory cannot be filled to the page */
    aff_net *net = open_synthetic();
    const int V = net->cfg.vocab;
    const uint64_t pitch = aff__experts_layout(net->experts).pitch, total = (uint64_t)((net->layers + net->stages) * net->cfg.experts);
    float *want = malloc(sizeof *want * (size_t)(SEQS * EACH * V)), *got = malloc(sizeof *got * (size_t)(SEQS * EACH * V));
    int32_t ids[EACH];
    for (int i = 0; i < EACH; i++) ids[i] = (i * 37 + 5) % V;
    for (int tight = 0; tight < 2; tight++) {
        aff_device_spec spec;
        aff_runner *r;
        aff_seq *s[SEQS];
        must(aff__device_parse(&spec, card_name ? card_name : "emu:64M", &err));
        must(aff__runner_on_bare(&r, net, &spec, 1, &err));
        aff_gpu *g = aff__gpu_of(r->b);
        for (int i = 0; i < SEQS; i++)
            must(aff__seq_open(&s[i], net, &(aff_seq_options){.size = 512, .commit = -1, .margin = 32, .memory = aff__runner_memory(r)}, &err));
        void *filler = NULL;
        uint64_t there;
        must(aff__rt_free_memory(g->rt, &there, &err));
        if (tight) /* so that nearly nothing is free beside a slab of two thirds */
            must(aff__rt_alloc(g->rt, &filler, there - (total * 2 / 3 + (uint64_t)(2 * g->groups.each + 2)) * pitch - 2 * (1 << 18), "filler", &err));
        aff_tier_options t = {0};
        aff__placement_options_init(&t.placement);
        t.placement.shadow = 2;
        t.placement.hysteresis = 1, t.placement.min_gain = 0;
        must(aff__runner_experts(r, &(aff_card_options){.gpu_bytes = -1, .headroom = tight ? 0 : -1, .host_bytes = 30 * pitch, .tiers = &t, .draft_in_memory = true, .warn = print_line}, &err));
        const int64_t before = g->slab->slots;
        assert_true((before < (int64_t)total) == (tight == 1));
        float *o = tight ? got : want;
        for (int i = 0; i < SEQS; i++)
            for (int at = 0; at < EACH; at += at ? EACH - 1 : 1) /* a token, then the rest: each needs memory */
                must(aff__forward(r, &(aff_batch){.n = at ? EACH - 1 : 1, .id = ids + at, .seq = s[i], .logits = o + (i * EACH + at) * V}, &err));
        print_message("slab of %lld slots, %lld after %d contexts; %d records\n", (long long)before, (long long)g->slab->slots, SEQS, g->n_records);
        if (tight) assert_true(g->slab->slots < before);
        must(aff__tiers_check(aff__runner_tiers(r), &err));
        for (int i = 0; i < SEQS; i++) aff__seq_free(s[i]);
        if (tight) aff__rt_free(g->rt, filler);
        aff__runner_free(r);
    }
    assert_memory_equal(want, got, sizeof *want * (size_t)(SEQS * EACH * V));
    free(want);
    free(got);
    aff__net_close(net);
}

/* A disk that fails ends the pass with its error and the sequence where it was; then all goes on. */
static void test_disk_error(void **state)
{
    static const config c = {"", 20, 30, false, true, 24, false, false};
    (void)state;
    aff_net *net = open_synthetic();
    const int V = net->cfg.vocab;
    world w;
    int32_t ids[64];
    float *a = malloc(sizeof *a * (size_t)(40 * V)), *b = malloc(sizeof *b * (size_t)(40 * V));
    for (int i = 0; i < 64; i++) ids[i] = i % V;
    open_world(&w, &c, net);
    for (int n = 5; n <= 40; n += 35) {
        aff_seq *s;
        must(aff__seq_open(&s, net, &(aff_seq_options){.size = 128, .commit = 64, .memory = aff__runner_memory(w.r)}, &err));
        must(pass(&w, w.r, s, ids, n, a));
        aff__seq_reset(s);
        w.fail_after = 2;
        assert_int_equal(pass(&w, w.r, s, ids, n, b), AFF_E_IO);
        assert_non_null(strstr(err.msg, "the disk is gone"));
        assert_int_equal(w.fail_after, 0);
        assert_int_equal(aff__seq_pos(s), 0);
        must(pass(&w, w.r, s, ids, n, b));
        assert_memory_equal(a, b, sizeof *a * (size_t)(n * V));
        aff__seq_free(s);
    }
    close_world(&w);
    free(a), free(b);
    aff__net_close(net);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--full")) full = true;
        if (!strcmp(argv[i], "--only") && i + 1 < argc) cmocka_set_test_filter(argv[++i]);
        if (!strcmp(argv[i], "--device") && i + 1 < argc) card_name = argv[++i];
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_places), cmocka_unit_test(test_fetched), cmocka_unit_test(test_mx), cmocka_unit_test(test_disk_error), cmocka_unit_test(test_tiers), cmocka_unit_test(test_growth)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
