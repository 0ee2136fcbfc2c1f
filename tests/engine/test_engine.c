/* engine/engine: one request at a time, on a pretend network. */
#include "support/test.h"
#include "engine/fake_net.h"

static const int32_t prompt[10] = {0, 17, 4, 4, 9, 22, 31, 8, 2, 40};

static aff_request request(int64_t n)
{
    return (aff_request){.prompt = prompt, .n_prompt = 10, .n_predict = n, .sampling = {.top_p = 1}};
}

/* Collects events. */
typedef struct record {
    int32_t id[CONTEXT];
    int64_t first_pos;
    int n, stop_after, progress_calls, progress_stop;
    float logits[CONTEXT][VOCAB];
    int64_t rows;
} record;

static bool on_token(void *ctx, const aff_token *t)
{
    record *r = ctx;
    if (r->n == 0) r->first_pos = t->pos;
    assert_int_equal(t->pos, r->first_pos + r->n);
    r->id[r->n++] = t->id;
    return r->n != r->stop_after;
}

static bool on_progress(void *ctx, int64_t done, int64_t total)
{
    record *r = ctx;
    assert_in_range(done, 1, total);
    return ++r->progress_calls != r->progress_stop;
}

static aff_status on_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *err)
{
    record *r = ctx;
    assert_int_equal(pos, r->rows);
    memcpy(r->logits[pos], logits, (size_t)rows * VOCAB * sizeof(float));
    r->rows += rows;
    return AFF_OK;
}

static aff_engine *engine(int64_t context, int64_t chunk)
{
    aff_engine *e;
    aff_error err = {0};
    assert_int_equal(aff__engine_create(&e, &fake_net, &(aff_engine_options){.context = context, .chunk = chunk}, &err),
                     AFF_OK);
    return e;
}

static int reset_fake(void **state)
{
    fake_reset();
    return 0;
}

static void text_does_not_depend_on_the_chunk(void **state)
{
    const aff_sampling modes[] = {{.top_p = 1}, {.temperature = 0.9, .top_k = 20, .top_p = 0.9, .seed = 5}};
    for (int m = 0; m < 2; m++) {
        int32_t want[20];
        aff_request r = request(20);
        r.sampling = modes[m];
        assert_int_equal(fake_answer(&r, CONTEXT, want), 20);
        for (int64_t chunk = 0; chunk <= 12; chunk++) {
            reset_fake(state);
            record rec = {0};
            aff_outcome out;
            aff_error err = {0};
            aff_engine *e = engine(0, chunk);
            assert_int_equal(aff__engine_run(e, &r, &(aff_events){.ctx = &rec, .token = on_token}, &out, &err), AFF_OK);
            assert_int_equal(rec.n, 20);
            assert_int_equal(rec.first_pos, 10);
            assert_memory_equal(rec.id, want, sizeof want);
            assert_int_equal(out.stop, AFF_STOP_LENGTH);
            assert_int_equal(out.prefilled, 9);
            assert_int_equal(out.decoded, 20);
            assert_int_equal(fake_rows, 29); /* the last token is not run */
            assert_int_equal(fake_largest, chunk == 0 || chunk > 9 ? 9 : chunk);
            assert_int_equal(fake_logit_rows, 20); /* no head work for the prompt */
            aff__engine_free(e);
        }
    }
}

static void every_row_reaches_the_listener(void **state)
{
    float want[VOCAB];
    for (int64_t n = 0; n < 3; n++)
        for (int64_t chunk = 1; chunk <= 11; chunk++) {
            static record rec;
            memset(&rec, 0, sizeof rec);
            aff_outcome out;
            aff_error err = {0};
            aff_engine *e = engine(0, chunk);
            aff_request r = request(n);
            aff_events ev = {.ctx = &rec, .token = on_token, .logits = on_logits};
            assert_int_equal(aff__engine_run(e, &r, &ev, &out, &err), AFF_OK);
            assert_int_equal(rec.rows, n ? 9 + n : 10);
            assert_int_equal(out.prefilled, n ? 9 : 10);
            uint64_t hash = 0;
            for (int64_t pos = 0; pos < rec.rows; pos++) {
                hash = fake_hash(hash, pos, pos < 10 ? prompt[pos] : rec.id[pos - 10]);
                fake_logits(hash, pos + 1, want);
                assert_memory_equal(rec.logits[pos], want, sizeof want);
            }
            aff__engine_free(e);
        }
}

static void stops_where_told(void **state)
{
    aff_error err = {0};
    aff_outcome out;
    record rec = {0};
    fake_favourite[14] = EOS; /* the fifth token of the answer */
    aff_engine *e = engine(0, 4);
    aff_request r = request(20);
    aff_events ev = {.ctx = &rec, .token = on_token};
    assert_int_equal(aff__engine_run(e, &r, &ev, &out, &err), AFF_OK);
    assert_int_equal(out.stop, AFF_STOP_EOS);
    assert_int_equal(out.decoded, 5);
    assert_int_equal(rec.id[4], EOS);
    assert_int_equal(fake_rows, 14); /* EOS itself has not run */

    rec = (record){0};
    r.ignore_eos = true;
    assert_int_equal(aff__engine_run(e, &r, &ev, &out, &err), AFF_OK);
    assert_int_equal(out.stop, AFF_STOP_LENGTH);
    assert_int_equal(rec.n, 20);
    assert_int_equal(rec.id[4], EOS);

    rec = (record){.stop_after = 3};
    assert_int_equal(aff__engine_run(e, &r, &ev, &out, &err), AFF_OK);
    assert_int_equal(out.stop, AFF_STOP_CALLER);
    assert_int_equal(out.decoded, 3);
    aff__engine_free(e);
}

/* The token at the position after the last one can still be chosen, but not run. */
static void the_context_ends_it(void **state)
{
    for (int64_t context = 10; context < 14; context++) {
        aff_error err = {0};
        aff_outcome out;
        record rec = {0};
        aff_engine *e = engine(context, 3);
        aff_request r = request(20);
        assert_int_equal(aff__engine_run(e, &r, &(aff_events){.ctx = &rec, .token = on_token}, &out, &err), AFF_OK);
        assert_int_equal(out.stop, AFF_STOP_CONTEXT);
        assert_int_equal(out.decoded, context - 9);
            r.n_predict = context - 9; /* exactly what fits is not cut */
        rec = (record){0};
        assert_int_equal(aff__engine_run(e, &r, &(aff_events){.ctx = &rec, .token = on_token}, &out, &err), AFF_OK);
        assert_int_equal(out.stop, AFF_STOP_LENGTH);
        aff__engine_free(e);
    }
}

static void forced_tokens_are_run(void **state)
{
    static const int32_t forced[] = {7, EOS, 11};
    aff_error err = {0};
    aff_outcome out;
    static record rec;
    memset(&rec, 0, sizeof rec);
    aff_engine *e = engine(0, 0);
    aff_request r = request(7);
    r.forced = forced;
    r.n_forced = 3;
    assert_int_equal(
        aff__engine_run(e, &r, &(aff_events){.ctx = &rec, .token = on_token, .logits = on_logits}, &out, &err), AFF_OK);
    static const int32_t want[] = {7, EOS, 11, 7, EOS, 11, 7};
    assert_memory_equal(rec.id, want, sizeof want);
    uint64_t hash = 0;
    for (int64_t pos = 0; pos < 16; pos++) hash = fake_hash(hash, pos, pos < 10 ? prompt[pos] : want[pos - 10]);
    float l[VOCAB];
    fake_logits(hash, 16, l);
    assert_memory_equal(rec.logits[15], l, sizeof l);
    aff__engine_free(e);
}

static void prefill_can_be_stopped(void **state)
{
    aff_error err = {0};
    aff_outcome out;
    record rec = {.progress_stop = 2};
    aff_engine *e = engine(0, 3);
    aff_request r = request(5);
    aff_events ev = {.ctx = &rec, .token = on_token, .progress = on_progress};
    assert_int_equal(aff__engine_run(e, &r, &ev, &out, &err), AFF_OK);
    assert_int_equal(out.stop, AFF_STOP_CALLER);
    assert_int_equal(out.prefilled, 6);
    assert_int_equal(out.decoded, 0);
    assert_int_equal(rec.n, 0);
    aff__engine_free(e);
}

static void bad_requests_change_nothing(void **state)
{
    aff_error err = {0};
    aff_outcome out;
    aff_engine *e = engine(9, 4);
    aff_request r = request(5);
    assert_int_equal(aff__engine_run(e, &r, NULL, &out, &err), AFF_E_LIMIT); /* 10 tokens, 9 positions */
    assert_non_null(strstr(err.msg, "at most 9"));
    assert_non_null(strstr(err.msg, "got 10"));
    r.n_prompt = 0;
    assert_int_equal(aff__engine_run(e, &r, NULL, &out, &err), AFF_E_INVALID);
    static const int32_t high[] = {1, VOCAB, 2}, low[] = {-1};
    r = (aff_request){.prompt = high, .n_prompt = 3, .sampling = {.top_p = 1}};
    assert_int_equal(aff__engine_run(e, &r, NULL, &out, &err), AFF_E_INVALID);
    assert_string_equal(err.msg, "prompt: token 2 of 3: expected an id of 0 to 49, got 50");
    r = (aff_request){
        .prompt = prompt, .n_prompt = 3, .n_predict = 1, .forced = low, .n_forced = 1, .sampling = {.top_p = 1}};
    assert_int_equal(aff__engine_run(e, &r, NULL, &out, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "forced"));
    r = (aff_request){.prompt = prompt, .n_prompt = 3, .n_predict = -1, .sampling = {.top_p = 1}};
    assert_int_equal(aff__engine_run(e, &r, NULL, &out, &err), AFF_E_INVALID);
    r = (aff_request){.prompt = prompt, .n_prompt = 3, .n_predict = 1, .sampling = {.top_p = 7}};
    assert_int_equal(aff__engine_run(e, &r, NULL, &out, &err), AFF_E_INVALID);
    assert_int_equal(fake_calls, 0);
    aff__engine_free(e);

    assert_int_equal(aff__engine_create(&e, &fake_net, &(aff_engine_options){.context = CONTEXT + 1}, &err),
                     AFF_E_LIMIT);
    assert_null(e);
    assert_int_equal(aff__engine_create(&e, &fake_net, &(aff_engine_options){.chunk = -1}, &err), AFF_E_INVALID);
}

static void a_failed_pass_is_reported(void **state)
{
    aff_error err = {0};
    aff_outcome out;
    record rec = {0};
    fake_fail_at = 5; /* 3 chunks of prefill, then the second step */
    aff_engine *e = engine(0, 3);
    aff_request r = request(5);
    assert_int_equal(aff__engine_run(e, &r, &(aff_events){.ctx = &rec, .token = on_token}, &out, &err), AFF_E_IO);
    assert_string_equal(err.msg, "shard 2: cannot read");
    assert_int_equal(out.prefilled, 9);
    assert_int_equal(out.decoded, 1);
    aff__engine_free(e);
}

static void out_of_memory_is_an_error(void **state)
{
    aff_error err = {0};
    aff_engine *e;
    unsigned n = 1;
    for (;; n++) {
        aff__alloc_fail_after(n);
        aff_status s = aff__engine_create(&e, &fake_net, &(aff_engine_options){0}, &err);
        aff__alloc_fail_after(0);
        if (s == AFF_OK) break;
        assert_int_equal(s, AFF_E_NOMEM);
        assert_null(e);
    }
    assert_in_range(n, 9, 20); /* engine, sampler and its two arrays, logits: each was refused once */
    aff_outcome out;
    static record rec;
    aff_request r = request(2);
    aff__alloc_fail_after(3); /* request, prompt, the buffer of a listener to every row */
    assert_int_equal(aff__engine_run(e, &r, &(aff_events){.ctx = &rec, .logits = on_logits}, &out, &err), AFF_E_NOMEM);
    aff__alloc_fail_after(0);
    assert_int_equal(fake_calls, 0);
    aff__engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(text_does_not_depend_on_the_chunk, reset_fake),
        cmocka_unit_test_setup(every_row_reaches_the_listener, reset_fake),
        cmocka_unit_test_setup(stops_where_told, reset_fake),
        cmocka_unit_test_setup(the_context_ends_it, reset_fake),
        cmocka_unit_test_setup(forced_tokens_are_run, reset_fake),
        cmocka_unit_test_setup(prefill_can_be_stopped, reset_fake),
        cmocka_unit_test_setup(bad_requests_change_nothing, reset_fake),
        cmocka_unit_test_setup(a_failed_pass_is_reported, reset_fake),
        cmocka_unit_test_setup(out_of_memory_is_an_error, reset_fake),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
