/* experts/uses, near, simulate: hits and moves on traces small enough to work out, Belady's bound against every
 * possible cache. */
#include "support/test.h"
#include "base/rng.h"
#include "experts/near.h"
#include "experts/routegen.h"
#include "experts/simulate.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static void near_misses(void **state)
{
    const float v[] = {5, 1, 9, 7, 3, 3, 8}; /* used: 2 and 6, the least of them 8, the least of all 1 */
    int32_t id[AFF_NEAR_MOST];
    float score[AFF_NEAR_MOST];
    assert_int_equal(aff__near_misses(v, 7, (int32_t[]){2, 6}, 2, 4, id, score), 4);
    assert_memory_equal(id, ((int32_t[]){3, 0, 4, 5}), 16);
    assert_float_equal(score[0], 6.0 / 7, 1e-6);
    assert_float_equal(score[3], 2.0 / 7, 1e-6);
    assert_int_equal(aff__near_misses(v, 7, (int32_t[]){1, 2}, 2, 4, id, score),
                     0); /* the least is used: nothing is near */
    assert_int_equal(aff__near_misses(v, 7, (int32_t[]){4}, 1, 99, id, score), 6);
    assert_float_equal(score[0], 1, 0); /* a sum over rows may rank others above */
    assert_int_equal(aff__near_misses((float[]){1, NAN, 2}, 3, (int32_t[]){2}, 1, 4, id, score), 0);
    assert_int_equal(aff__near_misses((float[]){1, INFINITY, 2}, 3, (int32_t[]){2}, 1, 4, id, score), 0);
    assert_int_equal(aff__near_misses((float[]){1, 1, 1}, 3, (int32_t[]){2}, 1, 4, id, score), 0);
}

static void traces_are_read(void **state)
{
    static const char text[] =
        "# aff-route-trace 1 layers=2 experts=4 k=2\nR 0 0\nG 0 0 500 1000 400\nD 0 0 1 2 1 |\nG 1 0 1 2 3\nD 1 0 2 0 "
        "1 1 3 |\n"
        "S 2 0 1 0 1 |\nD 3 1 17 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 2 3 |\n";
    char path[64];
    snprintf(path, sizeof path, "/tmp/aff-uses-%d", (int)getpid());
    FILE *t = fopen(path, "w");
    assert_non_null(t);
    fputs(text, t);
    fclose(t);
    aff_uses u;
    must(aff__uses_read(&u, path, 10, &err));
    assert_int_equal(u.n, 3);
    assert_int_equal(u.drafts, 1);
    assert_int_equal(u.tokens[0], 3);
    assert_int_equal(u.requests, 2 + 3 + 4);
    aff_placement_use x = aff__uses_at(&u, 0);
    assert_int_equal(x.n, 2);
    assert_memory_equal(x.id, ((int32_t[]){1, 2}), 8);
    assert_int_equal(x.n_near, 2);
    assert_memory_equal(x.near, ((int32_t[]){3, 0}), 8);
    assert_float_equal(x.score[0], 0.8, 1e-6);
    x = aff__uses_at(&u, 1);
    assert_int_equal(x.n_near, 0); /* the values before it are another layer's */
    assert_memory_equal(x.id, ((int32_t[]){0, 1, 3}), 12);
    assert_memory_equal(x.count, ((int32_t[]){1, 2, 1}), 12);
    x = aff__uses_at(&u, 2);
    assert_int_equal(x.phase, AFF_USE_PREFILL);
    assert_memory_equal(x.count, ((int32_t[]){16, 16, 1, 1}), 16);
    aff__uses_free(&u);
    t = fopen(path, "w");
    fputs("# aff-route-trace 1 layers=2 experts=4 k=2\nD 0 0 1 2 1 |\nD 7\n", t);
    fclose(t);
    assert_int_equal(aff__uses_read(&u, path, 10, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "line 3"));
    assert_null(u.dispatch);
    unlink(path);
    assert_int_equal(aff__uses_read(&u, path, 10, &err), AFF_E_IO);
}

/* A trace of one layer whose rows pick one expert each. */
static void sequence(aff_uses *u, int experts, const char *ids)
{
    aff__uses_init(u, 1, experts, 1);
    for (; *ids; ids++) {
        const int32_t e = *ids - '0';
        must(aff__uses_add(u, 0, 1, &e, NULL, 0, &err));
    }
}

static int64_t hits(const aff_uses *u, aff_sim_kind kind, int slab, int gain, int64_t *moves)
{
    aff_sim_result r;
    const aff_sim s = {
        .kind = kind, .shape = {1, u->experts, slab, u->experts, 0, true}, .land = 1, .copies = 1, .gain = gain};
    must(aff__simulate(&r, &s, &u, 1, &err));
    assert_int_equal(r.used[0][0] + r.used[0][1], u->requests);
    assert_int_equal(r.tokens[0], u->n);
    if (moves) *moves = r.moves[0];
    return r.used[0][0];
}

/* By hand; each begins with 0 and 1 in the slab. */
static void caches_by_hand(void **state)
{
    aff_uses u;
    int64_t moves;
    sequence(&u, 4, "000121210");
    assert_int_equal(hits(&u, AFF_SIM_LRU, 2, 0, &moves), 7); /* 2 for 0, then 0 for 2 */
    assert_int_equal(moves, 2);
    assert_int_equal(hits(&u, AFF_SIM_LFU, 2, 0, &moves), 5); /* 0 stays; 2 for 1, 1 for 2, 2 for 1, 1 for 2 */
    assert_int_equal(moves, 4);
    assert_int_equal(hits(&u, AFF_SIM_BELADY, 2, 0, &moves), 7);
    assert_int_equal(moves, 1);                                /* what is not used again stays out */
    assert_int_equal(hits(&u, AFF_SIM_GAIN, 2, 2, &moves), 7); /* 2 would come for one more use */
    assert_int_equal(moves, 0);
    aff__uses_free(&u);
}

/* The most hits of any cache that takes in nothing but what is asked for now, or not even that. */
static int most_hits(const int32_t *ask, int n, unsigned in, int slots)
{
    if (!n) return 0;
    const unsigned bit = 1u << *ask;
    if (in & bit) return 1 + most_hits(ask + 1, n - 1, in, slots);
    int best = most_hits(ask + 1, n - 1, in, slots);
    if (__builtin_popcount(in) < slots) {
        const int h = most_hits(ask + 1, n - 1, in | bit, slots);
        return h > best ? h : best;
    }
    for (int e = 0; e < 8; e++)
        if (in & 1u << e) {
            const int h = most_hits(ask + 1, n - 1, (in & ~(1u << e)) | bit, slots);
            best = h > best ? h : best;
        }
    return best;
}

static void belady_is_the_best_of_all(void **state)
{
    uint64_t seed = 1;
    for (int round = 0; round < 300; round++) {
        aff_uses u;
        const int slots = 1 + (int)(aff__splitmix64(&seed) % 3), n = 10;
        int32_t ask[10];
        int64_t moves, fewer;
        aff__uses_init(&u, 1, 5, 1);
        for (int i = 0; i < n; i++) {
            ask[i] = (int32_t)(aff__splitmix64(&seed) % 5);
            must(aff__uses_add(&u, 0, 1, &ask[i], NULL, 0, &err));
        }
        const int64_t best = hits(&u, AFF_SIM_BELADY, slots, 0, &moves);
        assert_int_equal(best, most_hits(ask, n, (1u << slots) - 1, slots));
        assert_true(hits(&u, AFF_SIM_LRU, slots, 0, NULL) <= best && hits(&u, AFF_SIM_LFU, slots, 0, NULL) <= best);
        assert_int_equal(hits(&u, AFF_SIM_GAIN, slots, 1, &fewer),
                         best); /* what is needed sooner is used at least once more */
        assert_int_equal(fewer, moves);
        assert_true(hits(&u, AFF_SIM_GAIN, slots, 2, &fewer) <= best && fewer <= moves);
        assert_int_equal(hits(&u, AFF_SIM_BELADY, 5, 0, &moves), n);
        assert_int_equal(moves, 0);
        aff__uses_free(&u);
    }
}

/* What the policy does in time: an expert asked for again and again comes up once, some dispatches later. */
static void moves_take_time(void **state)
{
    aff_uses u;
    sequence(&u, 8, "77777777777777777777");
    const aff_uses *one = &u;
    for (int land = 1; land <= 4; land++) {
        aff_sim_result r;
        aff_sim s = {.kind = AFF_SIM_PLACEMENT, .shape = {1, 8, 1, 8, 0, true}, .land = land, .copies = 1};
        aff__placement_options_init(&s.o);
        must(aff__simulate(&r, &s, &one, 1, &err));
        /* Its one slot is emptied first, which takes until it is landed and released, then the copy lands. */
        assert_int_equal(r.used[0][1], 3 * land);
        assert_int_equal(r.moves[0], 1);
        assert_int_equal(r.up[0], 1);
        assert_int_equal(r.down[0], 0); /* inclusive */
        assert_float_equal(aff__sim_link(&r, AFF_USE_DECODE), (1.0 + 3 * land) / 20, 1e-9);
        assert_float_equal(aff__sim_hits(&r, AFF_USE_DECODE, AFF_TIER_CARD), (20.0 - 3 * land) / 20, 1e-9);
        assert_float_equal(aff__sim_hits(&r, AFF_USE_DECODE, AFF_TIER_HOST), 1, 0);
        s.o.strategy = AFF_PLACE_STATIC;
        must(aff__simulate(&r, &s, &one, 1, &err));
        assert_int_equal(r.used[0][0], 0);
    }
    aff_sim_result r;
    aff_sim disk = {.kind = AFF_SIM_PLACEMENT, .shape = {1, 8, 0, 2, 0, false}, .land = 1, .copies = 1};
    aff__placement_options_init(&disk.o);
    must(aff__simulate(&r, &disk, &one, 1, &err));
    assert_int_equal(r.loads[0], 1);
    assert_true(r.used[0][2] > 0 && r.used[0][1] > r.used[0][2]);
    assert_float_equal(aff__sim_disk(&r, AFF_USE_DECODE), (double)(1 + r.used[0][2]) / 20, 1e-9);
    aff_sim bad = disk;
    bad.land = 0;
    assert_int_equal(aff__simulate(&r, &bad, &one, 1, &err), AFF_E_INVALID);
    bad = disk;
    bad.shape.experts = 9;
    assert_int_equal(aff__simulate(&r, &bad, &one, 1, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "1 layers of 8 experts: expected 1 of 9"));
    aff__uses_free(&u);
}

/* On made-up routes with locality: heat by its defaults is within 3 points of the best of the others, and none beats
 * the bound. */
static void heat_is_near_the_best(void **state)
{
    static const double skew[] = {0, 0.4, 0.8, 1.1}, locality[] = {0.6, 0.7, 0.5, 0.5};
    for (int t = 0; t < 4; t++) {
        aff_uses u;
        aff_routegen *g;
        int32_t pick[6];
        aff__uses_init(&u, 8, 256, 6);
        must(aff__routegen_create(&g, &(aff_routegen_options){8, 256, 6, skew[t], locality[t], 1}, &err));
        for (int pos = 0; pos < 600; pos++)
            for (int l = 0; l < 8; l++) {
                aff__routegen_pick(g, l, pos, pick);
                must(aff__uses_add(&u, l, 1, pick, NULL, 0, &err));
            }
        aff__routegen_free(g);
        const aff_uses *one = &u;
        double best = 0, heat = 0, bound = 0;
        for (int k = 0; k < 6; k++) {
            aff_sim_result r;
            aff_sim s = {.kind = k < 3 ? AFF_SIM_PLACEMENT : (aff_sim_kind)(k - 2),
                         .shape = {8, 256, 922, 2048, 0, true},
                         .land = 2,
                         .copies = 2};
            aff__placement_options_init(&s.o);
            if (k < 3) s.o.strategy = (aff_placement_strategy)k;
            must(aff__simulate(&r, &s, &one, 1, &err));
            const double v = aff__sim_hits(&r, AFF_USE_DECODE, AFF_TIER_CARD);
            if (k == 0) heat = v;
            if (k < 5) best = fmax(best, v);
            bound = v;
        }
        assert_true(heat > 0.6 && heat >= best - 0.03);
        assert_true(best <= bound && bound < 1);
        aff__uses_free(&u);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(near_misses),     cmocka_unit_test(traces_are_read),
                                       cmocka_unit_test(caches_by_hand),  cmocka_unit_test(belady_is_the_best_of_all),
                                       cmocka_unit_test(moves_take_time), cmocka_unit_test(heat_is_near_the_best)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
