/* engine with a prefix cache: a conversation that grows turn by turn, answered with and without the cache, with drafts
 * of several widths and several requests at once: the same tokens, and rows restored instead of run. */
#include "base/rng.h"
#include "engine/cache.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CONTEXT = 512, TURNS = 5, TALKS = 3, SAY = 31, ANSWER = 24 };
static char root[] = "/tmp/aff-engine-cache-XXXXXX";
static aff_error err;

static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* What was said and answered, and the last answer's end. */
typedef struct talk {
    int32_t ids[CONTEXT];
    int n, from; /* answers of this turn begin at `from` */
    int64_t restored, prefilled;
    bool done;
} talk;

static bool on_token(void *ctx, const aff_token *t)
{
    talk *k = ctx;
    assert_int_equal(t->pos, k->n);
    k->ids[k->n++] = t->id;
    return true;
}
static void on_done(void *ctx, aff_status s, const aff_outcome *o, const aff_error *e)
{
    talk *k = ctx;
    if (s != AFF_OK) fail_msg("%s", e->msg);
    k->restored += o->restored;
    k->prefilled += o->prefilled;
    k->done = true;
}

/* All talks, turn by turn, their turns at once. */
static void converse(const aff_net *net, int width, int64_t chunk, aff_prefix *cache, talk *k)
{
    aff_engine *e;
    aff_engine_options o = {.threads = 1, .slots = 2, .context = CONTEXT, .chunk = chunk, .width = width};
    if (cache) o.cache = aff__engine_cache_on(cache);
    must(aff__engine_create(&e, net, &o, &err));
    uint64_t seed = 4;
    memset(k, 0, TALKS * sizeof *k);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < TALKS; i++) {
            for (int w = 0; w < SAY + turn; w++)
                k[i].ids[k[i].n++] = turn == 0 && i ? k[0].ids[w] : 2 + (int32_t)(aff__splitmix64(&seed) % 150);
            k[i].from = k[i].n;
            k[i].done = false;
            aff_request r = {.prompt = k[i].ids, .n_prompt = k[i].n, .n_predict = ANSWER, .ignore_eos = true};
            if (i) r.sampling = (aff_sampling){.temperature = 1, .top_p = 0.95f, .seed = (uint64_t)i};
            const aff_events ev = {.ctx = &k[i], .token = on_token, .done = on_done};
            uint64_t id;
            must(aff__engine_submit(e, &r, &ev, &id, &err));
        }
        while (aff__engine_step(e)) {
        }
        for (int i = 0; i < TALKS; i++) assert_true(k[i].done && k[i].n == k[i].from + ANSWER);
    }
    aff__engine_free(e);
}

static void test_conversations(void **state)
{
    static const struct {
        const char *model;
        int width;
        int64_t chunk;
    } setting[] = {
        {"ckpt-dspark", 0, 7}, {"ckpt-dspark", 5, 256}, {"ckpt-dspark", AFF_WIDTH_AUTO, 64}, {"ckpt-mtp1", 1, 50}};
    static talk plain[TALKS], cached[TALKS], again[TALKS];
    for (int i = 0; i < 4; i++) {
        char dir[256];
        aff_net *net;
        aff_prefix *p;
        snprintf(dir, sizeof dir, "%s/golden/v4-sim/%s", AFF_TESTS_DIR, setting[i].model);
        must(aff__net_open(&net, dir, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
        must(aff__prefix_open(
            &p, net, &(aff_prefix_options){.dir = root, .bytes = UINT64_C(1) << 30, .block = 24, .verify = true},
            &err));
        converse(net, setting[i].width, setting[i].chunk, NULL, plain);
        converse(net, setting[i].width, setting[i].chunk, p, cached);
        converse(net, setting[i].width, setting[i].chunk, p, again);
        for (int k = 0; k < TALKS; k++) {
            assert_memory_equal(plain[k].ids, cached[k].ids, sizeof plain[k].ids);
            assert_memory_equal(plain[k].ids, again[k].ids, sizeof plain[k].ids);
            assert_int_equal(plain[k].restored, 0);
            /* A turn begins where the one before ended, but for the answer's last token; repeated, it begins at the
             * prompt's end. */
            int64_t prompts = 0, ends = 0;
            for (int turn = 0, n = 0; turn < TURNS; turn++) {
                n += SAY + turn;
                prompts += n - 1;
                n += ANSWER;
                if (turn + 1 < TURNS) ends += n - 1;
            }
            assert_true(cached[k].restored >= ends);
            assert_int_equal(cached[k].restored + cached[k].prefilled, prompts);
            assert_int_equal(again[k].restored, prompts);
            assert_int_equal(again[k].prefilled, 0);
        }
        aff__prefix_close(p);
        aff__net_close(net);
    }
}

/* Two prompts with a long common beginning: the third that has it starts at the block boundary where they part, because the second
 * published there on its way. Not for a prompt that ends soon after. */
static void test_promotion(void **state)
{
    enum { COMMON = 24 * 8 + 5, BLOCK = 24, LONG = COMMON + 140 };
    aff_net *net;
    aff_prefix *p;
    aff_engine *e;
    static int32_t ids[4][LONG];
    static const int length[4] = {COMMON + 60, LONG, LONG, COMMON + 60};
    must(aff__net_open(&net, AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark", &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    for (int soon = 0; soon < 2; soon++) {
        char dir[64];
        snprintf(dir, sizeof dir, "%s/promotion-%d", root, soon);
        must(aff__prefix_open(&p, net, &(aff_prefix_options){.dir = dir, .bytes = UINT64_C(1) << 30, .block = BLOCK, .verify = true}, &err));
        must(aff__engine_create(&e, net, &(aff_engine_options){.threads = 1, .slots = 1, .context = CONTEXT, .chunk = 100, .cache = aff__engine_cache_on(p)}, &err));
        for (int i = 0; i < 3; i++) {
            aff_outcome out;
            talk k = {.n = soon ? length[3] : length[i]};
            for (int w = 0; w < LONG; w++) ids[i][w] = w < COMMON ? 2 + w * 37 % 150 : 2 + (w * 11 + i * 5) % 150;
            must(aff__engine_run(e, &(aff_request){.prompt = ids[i], .n_prompt = k.n, .n_predict = 4, .ignore_eos = true}, &(aff_events){.ctx = &k, .token = on_token}, &out, &err));
            if (i < 2) assert_int_equal(out.restored, 0); /* blocks are known to the second, but no state */
            if (i == 2) assert_int_equal(out.restored, soon ? 0 : COMMON / BLOCK * BLOCK);
            assert_int_equal(out.restored + out.prefilled, (soon ? length[3] : length[i]) - 1);
        }
        aff__engine_free(e);
        aff__prefix_close(p);
    }
    aff__net_close(net);
}

/* Without O_DIRECT and io_uring, and on a file system in memory: answers are the same, and restored. */
static void test_poor_systems(void **state)
{
    static talk plain[TALKS], cached[TALKS];
    static const char *const dirs[] = {"/dev/shm", root};
    aff_net *net;
    aff_prefix *p;
    must(aff__net_open(&net, AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark", &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    converse(net, 5, 64, NULL, plain);
    for (int i = 0; i < 2; i++) {
        char dir[96];
        snprintf(dir, sizeof dir, "%s/aff-poor-%d", dirs[i], (int)getpid());
        must(aff__prefix_open(&p, net, &(aff_prefix_options){.dir = dir, .bytes = UINT64_C(1) << 30, .block = 24, .no_direct = i == 1, .no_uring = i == 1}, &err));
        converse(net, 5, 64, p, cached);
        for (int k = 0; k < TALKS; k++) assert_memory_equal(plain[k].ids, cached[k].ids, sizeof plain[k].ids);
        assert_true(aff__prefix_stats(p).hits > 0);
        aff__prefix_close(p);
        char lock[128];
        snprintf(lock, sizeof lock, "%s/lock", dir);
        unlink(lock);
        assert_int_equal(rmdir(dir), 0); /* nothing else is left */
    }
    aff__net_close(net);
}

static int setup(void **state)
{
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_conversations), cmocka_unit_test(test_promotion), cmocka_unit_test(test_poor_systems)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
