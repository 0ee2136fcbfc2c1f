/* engine: several threads submit and cancel while one steps. Every request gets exactly one end, and its own text. */
#include "support/test.h"
#include "engine/fake_net.h"
#include <pthread.h>

enum { CLIENTS = 4, ROUNDS = 40 };

/* One request of a client. Written by the engine thread until `done`, which the client waits for. */
typedef struct call {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
    aff_outcome out;
    aff_status status;
    int n;
    int32_t got[CONTEXT];
} call;

static aff_engine *engine;

static bool on_token(void *ctx, const aff_token *t)
{
    call *c = ctx;
    c->got[c->n++] = t->id;
    return true;
}

static void on_done(void *ctx, aff_status status, const aff_outcome *o, const aff_error *err)
{
    call *c = ctx;
    pthread_mutex_lock(&c->lock);
    assert_false(c->done);
    c->done = true;
    c->status = status;
    c->out = *o;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->lock);
}

static void *client(void *ctx)
{
    uint64_t seed = (uint64_t)(uintptr_t)ctx;
    int cancelled = 0;
    for (int round = 0; round < ROUNDS; round++) {
        call c = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
        int32_t prompt[64], want[CONTEXT];
        aff_error err = {0};
        uint64_t id = 0;
        const int n = 1 + (int)(aff__splitmix64(&seed) % 64);
        for (int i = 0; i < n; i++) prompt[i] = (int32_t)(aff__splitmix64(&seed) % VOCAB);
        const aff_request r = {.prompt = prompt,
                               .n_prompt = n,
                               .n_predict = 1 + (int64_t)(aff__splitmix64(&seed) % 60),
                               .sampling = {.temperature = round % 2, .top_p = 0.9, .seed = seed},
                               .adjust = {.presence = round % 3 ? 0 : 0.3}};
        const int n_want = fake_answer(&r, CONTEXT, want);
        aff_status s;
        while ((s = aff__engine_submit(engine, &r, &(aff_events){.ctx = &c, .token = on_token, .done = on_done}, &id, &err)) == AFF_E_LIMIT) continue; /* the queue is full */
        assert_int_equal(s, AFF_OK);
        memset(prompt, 0, sizeof prompt); /* the request was copied */
        const bool cancel = aff__splitmix64(&seed) % 3 == 0;
        if (cancel) aff__engine_cancel(engine, id);
        aff_draft_stats stats;
        aff__engine_draft_stats(engine, &stats);
        pthread_mutex_lock(&c.lock);
        while (!c.done) pthread_cond_wait(&c.ended, &c.lock);
        pthread_mutex_unlock(&c.lock);
        assert_int_equal(c.status, AFF_OK);
        assert_int_equal(c.out.decoded, c.n);
        if (c.out.stop == AFF_STOP_CALLER) {
            assert_true(cancel);
            cancelled++;
        } else {
            assert_int_equal(c.n, n_want);
        }
        assert_memory_equal(c.got, want, sizeof(int32_t) * (size_t)c.n);
    }
    return (void *)(uintptr_t)cancelled;
}

static void *stepper(void *ctx)
{
    while (aff__engine_wait(engine)) aff__engine_step(engine);
    return NULL;
}

static void clients_and_an_engine(void **state)
{
    fake_drafter d = {.of = 4, .lies = 1};
    aff_error err = {0};
    pthread_t engine_thread, thread[CLIENTS];
    assert_int_equal(aff__engine_create(&engine, &fake_net,
                                        &(aff_engine_options){.slots = 3, .queue = 2, .chunk = 9, .width = 3, .propose = fake_propose, .propose_ctx = &d}, &err),
                     AFF_OK);
    assert_int_equal(pthread_create(&engine_thread, NULL, stepper, NULL), 0);
    for (int i = 0; i < CLIENTS; i++) assert_int_equal(pthread_create(&thread[i], NULL, client, (void *)(uintptr_t)(i + 1)), 0);
    for (int i = 0; i < CLIENTS; i++) assert_int_equal(pthread_join(thread[i], NULL), 0);
    aff__engine_stop(engine);
    assert_int_equal(pthread_join(engine_thread, NULL), 0);
    aff__engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(clients_and_an_engine)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
