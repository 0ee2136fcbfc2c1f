/* What the engine does when the system or the model refuses, with real networks: growth of the state in the middle of
 * an answer, logits that are no numbers. One request ends with one line that says why; its neighbours end as if nothing
 * had been. */
#include "engine/engine.h"
#include "support/test.h"
#include "support/variant.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { MOST = 400, PROMPT = 20, SLOTS = 3 };
static char root[] = "/tmp/aff-refusals-XXXXXX", from[256];
static aff_error err;
static struct rlimit was;

static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

typedef struct answer {
    int32_t ids[MOST];
    int n, refuse_at; /* after so many tokens the system gives no memory any more */
    aff_status status;
    aff_error err;
    aff_outcome out;
    bool done;
} answer;

static bool on_token(void *ctx, const aff_token *t)
{
    answer *a = ctx;
    a->ids[a->n++] = t->id;
    if (a->n == a->refuse_at) {
        const struct rlimit none = {4096, was.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_DATA, &none), 0);
    }
    return true;
}
static void on_done(void *ctx, aff_status s, const aff_outcome *o, const aff_error *e)
{
    answer *a = ctx;
    assert_false(a->done);
    a->done = true;
    a->status = s;
    a->out = *o;
    if (s != AFF_OK) a->err = *e;
}

static void ask(aff_engine *e, answer *a, int salt, int64_t n)
{
    int32_t prompt[PROMPT];
    uint64_t id;
    for (int i = 0; i < PROMPT; i++) prompt[i] = 2 + (i * 37 + salt * 11) % 200;
    must(aff__engine_submit(e,
                            &(aff_request){.prompt = prompt,
                                           .n_prompt = PROMPT,
                                           .n_predict = n,
                                           .ignore_eos = true,
                                           .sampling = {.temperature = 1, .top_p = 1, .seed = 5}},
                            &(aff_events){.ctx = a, .token = on_token, .done = on_done}, &id, &err));
}

/* Three answers, of which the long one meets the refusal; then, with memory, the same request again. */
static void test_growth_refused(void **state)
{
#ifdef __SANITIZE_ADDRESS__
    skip(); /* a bound on address space is not for a program whose shadow takes terabytes */
#endif
    static answer want[SLOTS], got[SLOTS], again;
    static const int64_t length[SLOTS] = {200, 30, 34};
    aff_net *net;
    must(aff__net_open(&net, from, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    assert_int_equal(getrlimit(RLIMIT_DATA, &was), 0);
    for (int width = 0; width <= 5; width += 5) {
        aff_engine *e;
        memset(want, 0, sizeof want);
        memset(got, 0, sizeof got);
        memset(&again, 0, sizeof again);
        for (int refused = 0; refused < 2; refused++) {
            answer *a = refused ? got : want;
            must(aff__engine_create(&e, net,
                                    &(aff_engine_options){.threads = 1,
                                                          .slots = SLOTS,
                                                          .context = 4000,
                                                          .kv_commit = SLOTS * 60,
                                                          .kv_margin = 40,
                                                          .width = width},
                                    &err));
            for (int i = 0; i < SLOTS; i++) ask(e, &a[i], i, length[i]);
            if (refused) a[0].refuse_at = 10;
            while (aff__engine_step(e)) continue;
            if (refused) {
                assert_int_equal(setrlimit(RLIMIT_DATA, &was), 0);
                ask(e, &again, 0, length[0]);
                while (aff__engine_step(e)) continue;
            }
            aff__engine_free(e);
        }
        /* The page that holds the last backed row may hold a few more. */
        assert_int_equal(got[0].status, AFF_E_NOMEM);
        assert_non_null(strstr(got[0].err.msg, "the system refuses memory for positions"));
        assert_true(got[0].n >= 60 - PROMPT && got[0].n < length[0]);
        assert_int_equal(got[0].out.decoded, got[0].n);
        assert_memory_equal(got[0].ids, want[0].ids, (size_t)got[0].n * sizeof(int32_t));
        for (int i = 1; i < SLOTS; i++) {
            assert_int_equal(got[i].status, AFF_OK);
            assert_int_equal(got[i].n, length[i]);
            assert_memory_equal(got[i].ids, want[i].ids, sizeof want[i].ids);
        }
        assert_int_equal(again.status, AFF_OK);
        assert_memory_equal(again.ids, want[0].ids, sizeof want[0].ids);
    }
    aff__net_close(net);
}

/* A weight that makes every logit NaN is found when loading only in small tensors; in a matrix it shows as an error of
 * the first row, with its position, never as a token. */
static void test_nan(void **state)
{
    const uint16_t nan = 0x7FC0;
    char dir[256];
    aff_net *net;
    aff_engine *e;
    static answer a;
    snprintf(dir, sizeof dir, "%s/nan", root);
    const variant v = {.tensor = "head.weight", .patch = &nan, .patch_size = 2};
    test_write_variant(from, dir, &v);
    must(aff__net_open(&net, dir, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    must(
        aff__engine_create(&e, net, &(aff_engine_options){.threads = 1, .slots = 1, .context = 100, .width = 5}, &err));
    ask(e, &a, 0, 5);
    while (aff__engine_step(e)) continue;
    assert_true(a.done);
    assert_int_not_equal(a.status, AFF_OK);
    assert_int_equal(a.n, 0);
    char where[32];
    snprintf(where, sizeof where, "position %d", PROMPT);
    assert_non_null(strstr(a.err.msg, where));
    aff__engine_free(e);
    aff__net_close(net);
}

static int setup(void **state)
{
    snprintf(from, sizeof from, "%s/golden/v4-sim/ckpt-dspark", AFF_TESTS_DIR);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_growth_refused), cmocka_unit_test(test_nan)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
