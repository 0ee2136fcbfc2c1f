/* The tiers against a model of their table: random uses make random moves over a pretended card, whose kernels read
 * what the published table names while the mover copies; threads of the host that use layers side by side; errors,
 * stalls and famine. Run under ThreadSanitizer, a slot that is written while somebody may read it shows. */
#include "base/mem.h"
#include "base/rng.h"
#include "experts/tiers.h"
#include "support/test.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, EXPERTS = 16, ALL = LAYERS * EXPERTS, WIDE = 64, PICKS = 4 };
static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* ---- experts of which every word is their number ---- */

static void plane(uint64_t *at, uint64_t *off, uint64_t *size, uint64_t bytes)
{
    *off = *at;
    *size = bytes;
    *at = aff__align_up(*at + bytes, 256);
}

static aff_clayer layout(void)
{
    aff_clayer l = {.n_experts = EXPERTS};
    aff_matdesc *const m[3] = {&l.gate, &l.up, &l.down};
    for (int i = 0; i < 3; i++) {
        *m[i] = (aff_matdesc){.rows = WIDE, .cols = WIDE, .quant = AFF_Q2P875G};
        plane(&l.stride, &m[i]->data_off, &m[i]->data_size, WIDE * 20);
        plane(&l.stride, &m[i]->scale_off, &m[i]->scale_size, WIDE * 3);
        plane(&l.stride, &m[i]->rscale_off, &m[i]->rscale_size, WIDE * 2);
    }
    return l;
}

static aff_experts *make_store(void)
{
    static uint8_t codebook[8192];
    const aff_clayer l = layout();
    aff_experts *s;
    uint8_t *records;
    memset(codebook, 0x38, sizeof codebook);
    must(aff__calloc(&records, ALL, l.stride, "records", &err));
    for (uint64_t i = 0; i < ALL; i++)
        for (uint64_t k = 0; k < l.stride / 8; k++) memcpy(records + i * l.stride + 8 * k, &i, 8);
    must(aff__experts_from_records(&s, &l, LAYERS, WIDE, WIDE, codebook, records, &err));
    return s;
}

/* All planes are expert i's. */
static bool is_expert(const aff_slot_layout *y, const uint8_t *slot, uint64_t i)
{
    for (int p = 0; p < 9; p++)
        for (uint64_t k = 0; k < y->size[p / 3][p % 3]; k += 8)
            if (memcmp(slot + y->plane[p / 3][p % 3] + k, &i, 8) != 0) return false;
    return true;
}

/* ---- a pretended card ---- */

typedef struct fake {
    aff_slot_layout y;
    uint8_t *slab;
    aff_tier_place table[ALL];
    int64_t slots, copies, changes;
    bool broken, attached;
} fake;

static aff_status attach(void *ctx, uint8_t *base, uint64_t bytes, uint64_t pitch, aff_error *e)
{
    ((fake *)ctx)->attached = true;
    return bytes % pitch ? aff__fail(e, AFF_E_INVALID, "pool of %llu bytes", (unsigned long long)bytes) : AFF_OK;
}
static void detach(void *ctx, uint8_t *base, uint64_t bytes)
{
    ((fake *)ctx)->attached = false;
}
static aff_status copy(void *ctx, const aff_tier_copy *c, int n, aff_error *e)
{
    fake *f = ctx;
    if (f->broken) return aff__fail(e, AFF_E_DEVICE, "the card is gone");
    for (int i = 0; i < n; i++) {
        uint8_t *slab = f->slab + (uint64_t)c[i].slab * f->y.pitch;
        if (c[i].slab < 0 || c[i].slab >= f->slots)
            return aff__fail(e, AFF_E_INVALID, "slot %lld", (long long)c[i].slab);
        memcpy(c[i].up ? slab : c[i].host, c[i].up ? c[i].host : slab, (size_t)f->y.bytes);
    }
    f->copies += n;
    return AFF_OK;
}
static aff_status publish(void *ctx, const aff_tier_change *c, int n, aff_error *e)
{
    fake *f = ctx;
    for (int i = 0; i < n; i++) f->table[c[i].layer * EXPERTS + c[i].expert] = c[i].place;
    f->changes += n;
    return AFF_OK;
}

static aff_card card_of(fake *f, int64_t slots, const aff_slot_layout *y)
{
    *f = (fake){.y = *y, .slots = slots};
    f->slab = malloc((size_t)slots * y->pitch);
    assert_non_null(f->slab);
    return (aff_card){f, slots, attach, detach, copy, publish};
}

/* What a kernel sees of an expert. */
static void look(const fake *f, int i)
{
    const aff_tier_place *p = &f->table[i];
    if (p->tier == AFF_TIER_CARD && !is_expert(&f->y, f->slab + (uint64_t)p->slab * f->y.pitch, (uint64_t)i))
        fail_msg("slab slot %lld is not expert %d", (long long)p->slab, i);
    if (p->tier == AFF_TIER_HOST && !is_expert(&f->y, p->host, (uint64_t)i))
        fail_msg("pool slot %lld is not expert %d", (long long)p->pool, i);
}

/* The table as published: every slot is one expert's, and the tiers say the same. */
static void check_table(aff_tiers *t, const fake *f, bool inclusive)
{
    static int32_t slab[4 * ALL], pool[4 * ALL];
    memset(slab, 0, sizeof slab);
    memset(pool, 0, sizeof pool);
    for (int i = 0; i < ALL; i++) {
        const aff_tier_place *p = &f->table[i], now = aff__tiers_place(t, i / EXPERTS, i % EXPERTS);
        assert_true(p->tier == now.tier && p->slab == now.slab && p->pool == now.pool && p->host == now.host);
        assert_int_equal(p->slab >= 0, p->tier == AFF_TIER_CARD);
        assert_int_equal(p->pool >= 0, p->tier == AFF_TIER_HOST || (inclusive && p->tier == AFF_TIER_CARD));
        if (p->slab >= 0) assert_int_equal(slab[p->slab]++, 0);
        if (p->pool >= 0) assert_int_equal(pool[p->pool]++, 0);
    }
    must(aff__tiers_check(t, &err));
}

static void use(aff_tiers *t, uint64_t *seed, int layer)
{
    int32_t id[PICKS], near[1];
    const float score = 0.5f;
    int n = 0;
    for (int tries = 0; tries < PICKS; tries++) {
        const int32_t e = (int32_t)(aff__splitmix64(seed) % EXPERTS);
        bool known = false;
        for (int k = 0; k < n; k++) known |= id[k] == e;
        if (!known) id[n++] = e;
    }
    near[0] = (int32_t)(aff__splitmix64(seed) % EXPERTS);
    must(aff__tiers_note(t,
                         &(aff_placement_use){.layer = layer,
                                              .phase = aff__splitmix64(seed) % 4 ? AFF_USE_DECODE : AFF_USE_PREFILL,
                                              .n = n,
                                              .id = id,
                                              .n_near = 1,
                                              .near = near,
                                              .score = &score},
                         &err));
}

static aff_tier_options options(int64_t pool, int64_t staging)
{
    aff_tier_options o = {.slots = pool + staging, .staging = staging, .picks = PICKS};
    aff__placement_options_init(&o.placement);
    o.placement.hysteresis = o.placement.disk_hysteresis = 0;
    o.placement.min_gain = o.placement.disk_min_gain = 0;
    o.placement.decay = 0.7;
    o.placement.shadow = 4;
    return o;
}

static int64_t moves_wanted(void)
{
    const char *s = getenv("AFF_TIER_MOVES");
    return s ? atoll(s) : 40000;
}

/* Passes until so many moves have been made. */
static void with_card(int64_t slab, int64_t pool, bool inclusive, aff_placement_strategy strategy, int64_t want)
{
    aff_experts *store = make_store();
    const aff_slot_layout y = aff__experts_layout(store);
    fake f;
    const aff_card card = card_of(&f, slab, &y);
    aff_tiers *t;
    aff_tier_options o = options(pool, PICKS);
    uint64_t seed = (uint64_t)(slab * 1000 + pool);
    o.card = &card;
    o.inclusive = inclusive;
    o.placement.strategy = strategy;
    o.loader = (aff_loader_options){.inject = 0.02, .inject_seed = seed};
    must(aff__tiers_create(&t, store, NULL, &o, &err));
    assert_true(f.attached && f.changes == ALL);
    check_table(t, &f, inclusive);
    aff_tier_counters n;
    int64_t pass = 0;
    do {
        must(aff__tiers_begin(t, &err));
        if (pass % 64 == 0) {
            check_table(t, &f, inclusive);
            assert_int_equal(aff__tiers_begin(t, &err), AFF_E_INVALID); /* one is under way */
        }
        for (int l = 0; l < LAYERS; l++) {
            look(&f, l * EXPERTS + (int)(aff__splitmix64(&seed) % EXPERTS));
            use(t, &seed, l);
            look(&f, l * EXPERTS + (int)(aff__splitmix64(&seed) % EXPERTS));
        }
        aff__tiers_end(t);
        if (pass % 500 == 100) aff__tiers_stall(t, true);
        if (pass % 500 == 110) aff__tiers_stall(t, false);
        n = aff__tiers_counters(t);
        if (++pass % 16 == 0) aff__tiers_settle(t);
    } while (n.promotions[0] + n.promotions[1] + n.demotions[0] + n.demotions[1] < want);
    aff__tiers_stall(t, false);
    aff__tiers_settle(t);
    must(aff__tiers_begin(t, &err));
    check_table(t, &f, inclusive);
    for (int i = 0; i < ALL; i++) look(&f, i);
    aff__tiers_end(t);
    n = aff__tiers_counters(t);
    assert_int_equal(n.moves_in_flight, 0);
    assert_int_equal(n.quarantined, 0);
    assert_int_equal(n.up_bytes, n.up_copies * y.bytes);
    assert_int_equal(n.down_bytes, n.down_copies * y.bytes);
    assert_int_equal(n.up_copies + n.down_copies, (uint64_t)f.copies);
    if (inclusive) assert_int_equal(n.down_copies, 0); /* a pointer is turned back */
    aff__tiers_free(t);
    assert_false(f.attached);
    free(f.slab);
    aff__experts_free(store);
}

static void test_moves(void **state)
{
    const int64_t n = moves_wanted() / 6;
    with_card(16, 24, false, AFF_PLACE_HEAT, n);
    with_card(16, 32, true, AFF_PLACE_HEAT, n);
    with_card(24, 64, true, AFF_PLACE_HEAT, n); /* nothing on disk */
    with_card(24, 0, false, AFF_PLACE_HEAT, n); /* no pool */
    with_card(1, 1, false, AFF_PLACE_DEMAND, n / 4);
    with_card(8, 40, false, AFF_PLACE_DEMAND, n);
    with_card(16, 24, false, AFF_PLACE_STATIC, 0);
    with_card(0, 24, false, AFF_PLACE_HEAT, n / 4); /* a card without a slab */
}

/* The slab shrinks and grows between passes, down to nothing. */
static void test_resize(void **state)
{
    for (int way = 0; way < 3; way++) {
        aff_experts *store = make_store();
        const aff_slot_layout y = aff__experts_layout(store);
        fake f;
        const aff_card card = card_of(&f, 24, &y);
        aff_tiers *t;
        aff_tier_options o = options(way == 2 ? 0 : 30, PICKS);
        uint64_t seed = 5;
        o.card = &card;
        o.inclusive = way == 1;
        must(aff__tiers_create(&t, store, NULL, &o, &err));
        for (int round = 0; round < 120; round++) {
            const int64_t slots = (int64_t)(aff__splitmix64(&seed) % 24) + 1;
            must(aff__tiers_begin(t, &err));
            assert_int_equal(aff__tiers_resize(t, slots, &err), AFF_E_INVALID); /* not now */
            for (int l = 0; l < LAYERS; l++) use(t, &seed, l);
            aff__tiers_end(t);
            must(aff__tiers_resize(t, slots, &err));
            check_table(t, &f, o.inclusive);
            for (int i = 0; i < ALL; i++) {
                look(&f, i);
                assert_true(f.table[i].slab < slots);
            }
        }
        aff__tiers_free(t);
        free(f.slab);
        aff__experts_free(store);
    }
}

/* A card whose copies fail says so at the next pass, and nothing was lost. */
static void test_broken_card(void **state)
{
    aff_experts *store = make_store();
    const aff_slot_layout y = aff__experts_layout(store);
    fake f;
    const aff_card card = card_of(&f, 8, &y);
    aff_tiers *t;
    aff_tier_options o = options(64, PICKS);
    uint64_t seed = 1;
    o.card = &card;
    must(aff__tiers_create(&t, store, NULL, &o, &err));
    aff__tiers_stall(t, true);
    must(aff__tiers_begin(t, &err));
    for (int l = 0; l < LAYERS; l++) use(t, &seed, l);
    aff__tiers_end(t);
    f.broken = true;
    aff__tiers_stall(t, false);
    aff__tiers_settle(t);
    assert_int_equal(aff__tiers_begin(t, &err), AFF_E_DEVICE);
    assert_string_equal(err.msg, "the card is gone");
    assert_int_equal(aff__tiers_begin(t, &err), AFF_E_DEVICE);
    aff__tiers_free(t);
    free(f.slab);
    aff__experts_free(store);
}

/* ---- the host ---- */

typedef struct worker {
    aff_tiers *t;
    const aff_slot_layout *y;
    uint64_t seed;
    int rounds, failed;
    int64_t used;
} worker;

/* Uses layers and looks at every expert while it has it. */
static void *work(void *arg)
{
    worker *w = arg;
    aff_tier_use *u;
    int which[EXPERTS], id[EXPERTS], n;
    aff_expert at[EXPERTS];
    if (aff__tier_use_create(&u, EXPERTS, NULL) != AFF_OK) abort();
    for (int r = 0; r < w->rounds; r++) {
        const int layer = (int)(aff__splitmix64(&w->seed) % LAYERS);
        uint32_t wanted = (uint32_t)aff__splitmix64(&w->seed) & (uint32_t)aff__splitmix64(&w->seed) & 0xFFFF;
        int count = 0, seen = 0;
        aff_status s;
        if (r % 50 == 0) wanted = 0xFFFF; /* more than there are slots */
        for (int e = 0; e < EXPERTS; e++)
            if (wanted >> e & 1) id[count++] = e;
        if (aff__tiers_begin(w->t, NULL) != AFF_OK) abort();
        aff__tiers_open(w->t, u, layer, id, count);
        while ((s = aff__tiers_next(w->t, u, which, at, &n, NULL)) == AFF_OK && n) {
            for (int k = 0; k < n; k++) {
                const uint64_t i = (uint64_t)(layer * EXPERTS + id[which[k]]);
                const uint8_t *slot = at[k].gate.codes - w->y->plane[0][0];
                if (!is_expert(w->y, slot, i)) abort();
            }
            seen += n;
            if (aff__splitmix64(&w->seed) % 64 == 0) break; /* somebody gives up half way */
        }
        if (s == AFF_OK && n == 0 && seen != count) abort();
        aff__tiers_close(w->t, u);
        w->failed += s != AFF_OK;
        w->used += seen;
        int32_t picks[EXPERTS];
        for (int k = 0; k < count; k++) picks[k] = id[k];
        if (aff__tiers_note_picks(w->t, layer, AFF_USE_DECODE, picks, 1, count, NULL, NULL) != AFF_OK) abort();
        aff__tiers_end(w->t);
    }
    aff__tier_use_free(u);
    return NULL;
}

static void on_host(int64_t pool, int64_t staging, aff_placement_strategy strategy, const aff_loader_options *lo,
                    bool fill, int rounds)
{
    enum { N = 3 };
    aff_experts *store = make_store();
    const aff_slot_layout y = aff__experts_layout(store);
    aff_tiers *t;
    aff_tier_options o = options(pool, staging);
    worker w[N];
    pthread_t th[N];
    o.placement.strategy = strategy;
    o.loader = *lo;
    o.fill = fill;
    must(aff__tiers_create(&t, store, NULL, &o, &err));
    for (int i = 0; i < N; i++) {
        w[i] = (worker){.t = t, .y = &y, .seed = (uint64_t)(i + pool), .rounds = rounds};
        assert_int_equal(pthread_create(&th[i], NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(th[i], NULL);
        assert_true(w[i].used > rounds);
        assert_int_equal(w[i].failed, 0);
    }
    aff__tiers_settle(t);
    must(aff__tiers_check(t, &err));
    const aff_tier_counters n = aff__tiers_counters(t);
    assert_int_equal(n.quarantined, 0);
    assert_int_equal(n.moves_in_flight, 0);
    if (pool >= ALL) assert_int_equal(n.demotions[1], 0);
    if (strategy == AFF_PLACE_STATIC && fill) assert_int_equal(n.promotions[1], 0);
    aff__tiers_free(t);
    aff__experts_free(store);
}

static void test_host(void **state)
{
    const aff_loader_options plain = {0};
    const int rounds = (int)(moves_wanted() / 80);
    on_host(24, 6, AFF_PLACE_HEAT, &plain, false, rounds);
    on_host(24, PICKS, AFF_PLACE_DEMAND, &plain, true, rounds);
    on_host(24, 12, AFF_PLACE_STATIC, &plain, true, rounds);
    on_host(64, 8, AFF_PLACE_HEAT, &plain, false, rounds);
    on_host(0, PICKS, AFF_PLACE_HEAT, &plain, false, rounds); /* staging only, as few slots as go */
    on_host(1, PICKS, AFF_PLACE_DEMAND, &plain, false, rounds);
}

/* Experts of a file whose disk fails: the use ends with the expert's name, the next one goes on. */
static void test_errors(void **state)
{
    char path[] = "/tmp/aff-tiers-XXXXXX";
    const aff_clayer l = layout();
    static uint8_t codebook[8192], record[1 << 16];
    aff_clayer whole = l;
    whole.stride = aff__align_up(l.stride, 4096);
    memset(codebook, 0x38, sizeof codebook);
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "w");
    for (uint64_t i = 0; i < ALL; i++) {
        for (uint64_t k = 0; k < whole.stride; k += 8) memcpy(record + k, &i, 8);
        assert_int_equal(fwrite(record, (size_t)whole.stride, 1, f), 1);
    }
    fclose(f);
    aff_experts *store;
    must(aff__experts_from_file(&store, &whole, LAYERS, WIDE, WIDE, codebook, path, &err));
    const aff_slot_layout y = aff__experts_layout(store);
    aff_tiers *t;
    aff_tier_options o = options(12, 6);
    must(aff__tiers_create(&t, store, NULL, &o, &err));
    aff__loader_inject(aff__tiers_loader(t), 0.6);
    aff_tier_use *u;
    must(aff__tier_use_create(&u, EXPERTS, &err));
    int failed = 0, whole_ones = 0;
    for (int r = 0; r < 300; r++) {
        int id[EXPERTS], which[EXPERTS], n, seen = 0;
        aff_expert at[EXPERTS];
        aff_status s;
        if (r == 200) aff__loader_inject(aff__tiers_loader(t), 0);
        for (int e = 0; e < EXPERTS; e++) id[e] = e;
        aff__tiers_open(t, u, r % LAYERS, id, EXPERTS);
        while ((s = aff__tiers_next(t, u, which, at, &n, &err)) == AFF_OK && n) {
            for (int k = 0; k < n; k++)
                assert_true(
                    is_expert(&y, at[k].gate.codes - y.plane[0][0], (uint64_t)(r % LAYERS * EXPERTS + id[which[k]])));
            seen += n;
        }
        aff__tiers_close(t, u);
        char want[32];
        snprintf(want, sizeof want, "layer %d, expert", r % LAYERS);
        if (s != AFF_OK) assert_true(s == AFF_E_IO && strstr(err.msg, want) && strstr(err.msg, path));
        if (r >= 200) assert_int_equal(s, AFF_OK);
        failed += s != AFF_OK;
        whole_ones += s == AFF_OK && seen == EXPERTS;
        use(t, &(uint64_t){(uint64_t)r}, r % LAYERS);
        must(aff__tiers_check(t, &err));
    }
    assert_true(failed > 20 && whole_ones >= 100);
    aff__tier_use_free(u);
    aff__tiers_free(t);
    aff__experts_free(store);
    remove(path);
    /* The threads of the host, with errors that pass. */
    const aff_loader_options lo = {.inject = 0.3, .inject_most = 2, .inject_seed = 3};
    on_host(20, 5, AFF_PLACE_HEAT, &lo, false, (int)(moves_wanted() / 80));
}

static void test_split(void **state)
{
    aff_tier_split s;
    for (int64_t slots = 0; slots < 400; slots++) {
        const aff_status st = aff__tiers_split(slots, 0, 256, 6, 9060352, &s, &err);
        if (slots < 6) {
            assert_int_equal(st, AFF_E_INVALID);
            assert_non_null(strstr(err.msg, "--host-pool-mib 52")); /* 6 x 8.64 MiB */
            continue;
        }
        assert_int_equal(st, AFF_OK);
        assert_true(s.staging >= 6 && s.staging <= AFF_MOST_STAGING && s.pool >= 0 && s.pool <= 256 &&
                    s.pool + s.staging <= slots);
        assert_true(s.pool == 256 || s.pool + s.staging == slots);
    }
    assert_int_equal(aff__tiers_split(100, 5, 256, 6, 4096, &s, &err), AFF_E_INVALID);
    assert_int_equal(aff__tiers_split(100, 101, 256, 6, 4096, &s, &err), AFF_E_INVALID);
    must(aff__tiers_split(100, 100, 256, 6, 4096, &s, &err));
    assert_int_equal(s.pool, 0);
}

static void test_pool(void **state)
{
    aff_slots *p;
    for (int now = 0; now < 2; now++) {
        must(aff__slots_create(&p, 8192, 1000, now, &err));
        assert_int_equal((uintptr_t)aff__slots_base(p) % 4096, 0);
        assert_ptr_equal(aff__slots_at(p, 7), aff__slots_base(p) + 7 * 8192);
        assert_int_equal(aff__slots_bytes(p), 8192000);
        memset(aff__slots_base(p), 1, 8192000);
        assert_true(aff__slots_huge(p) <= 8192000 + (4 << 20));
        aff__slots_free(p);
    }
    must(aff__slots_create(&p, 4096, 0, true, &err));
    assert_null(aff__slots_base(p));
    aff__slots_free(p);
    assert_int_equal(aff__slots_create(&p, 4095, 1, false, &err), AFF_E_INVALID);
    assert_int_equal(aff__slots_create(&p, 4096, -1, false, &err), AFF_E_INVALID);
    assert_int_equal(aff__slots_create(&p, 4096, INT64_MAX, false, &err), AFF_E_INVALID);
    assert_int_equal(aff__slots_create(&p, 4096, INT64_C(1) << 46, false, &err), AFF_E_NOMEM);
    assert_null(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_split),       cmocka_unit_test(test_pool),
                                       cmocka_unit_test(test_moves),       cmocka_unit_test(test_resize),
                                       cmocka_unit_test(test_broken_card), cmocka_unit_test(test_host),
                                       cmocka_unit_test(test_errors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
