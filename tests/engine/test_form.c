/* engine: answers held to a form, on a pretend network. What single steps choose under the masks is what the engine
 * chooses, with drafts of every width, good, bad and refused ones, beside others; budgets end in complete values. */
#include "support/test.h"
#include "grammar/words.h"
#define FAKE_VOCAB W_N, EOS = W_EOS
#include "engine/fake_net.h"
#include "format/json.h"

enum { JOBS = 6, BUDGET = 90, PROMPT = 8 };
static aff_vocab *vocab;
static aff_error err;

static const char *const schemas[] = {
    "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}, \"age\": {\"type\": \"integer\"}, "
    "\"l\": {\"type\": \"array\", \"items\": {\"type\": \"string\", \"maxLength\": 5}}}, \"required\": [\"name\", "
    "\"l\"], \"additionalProperties\": false}",
    "true", "{\"type\": \"array\", \"items\": {\"enum\": [\"abc\", \"abd\", 12]}, \"minItems\": 3}"};

typedef struct job {
    aff_request r;
    int32_t prompt[PROMPT], want[BUDGET], got[BUDGET];
    int n_want, n;
    bool done;
    aff_stop stop;
} job;
static job jobs[JOBS];
static aff_grammar *grammars[JOBS];

static int setup(void **state)
{
    vocab = words(true);
    fake_reset();
    fake_eos = true;
    for (int i = 0; i < JOBS; i++) {
        json_t *schema = NULL;
        const char *text = schemas[i % 3];
        if (aff__json_parse(&schema, text, strlen(text), "schema", true, &err) != AFF_OK) return -1;
        const aff_grammar_request r = {.schema = schema, .thinking = i == 4};
        const aff_status s = aff__grammar_compile(&grammars[i], vocab, &r, &err);
        json_decref(schema);
        if (s != AFF_OK) return -1;
    }
    return 0;
}

static int teardown(void **state)
{
    for (int i = 0; i < JOBS; i++) aff__grammar_free(grammars[i]);
    aff__vocab_free(vocab);
    return 0;
}

/* The answer by definition. */
static void answer(job *j)
{
    float l[VOCAB], adjusted[VOCAB];
    int32_t all[VOCAB] = {0}, output[VOCAB] = {0};
    uint64_t hash = 0;
    aff_sampler *s;
    aff_matcher *m = NULL;
    aff_match at = 0;
    assert_int_equal(aff__sampler_create(&s, VOCAB, &err), AFF_OK);
    if (j->r.grammar) {
        assert_int_equal(aff__matcher_create(&m, j->r.grammar, &err), AFF_OK);
        at = aff__matcher_start(m);
    }
    int64_t pos = 0;
    for (; pos < PROMPT; pos++) {
        hash = fake_hash(hash, pos, j->prompt[pos]);
        all[j->prompt[pos]]++;
    }
    for (int n = 0; n < j->r.n_predict; n++) {
        const uint64_t *w;
        int32_t id;
        fake_logits(hash, pos, l);
        aff__adjust_logits(&j->r.adjust, &(aff_occurrences){all, output}, l, VOCAB, adjusted);
        if (m) assert_int_equal(aff__matcher_mask(m, at, j->r.n_predict - n, &w, &err), AFF_OK);
        for (int v = 0; m && v < VOCAB; v++)
            if (!in_mask(w, v)) adjusted[v] = -INFINITY;
        assert_int_equal(aff__sampler_next(s, adjusted, &j->r.sampling, pos, &id, &err), AFF_OK);
        j->want[j->n_want++] = id;
        if (id == EOS) break;
        if (m) assert_true(at = aff__matcher_step(m, at, id));
        all[id]++;
        output[id]++;
        hash = fake_hash(hash, pos++, id);
    }
    aff__matcher_free(m);
    aff__sampler_free(s);
}

static void make_jobs(void)
{
    static const aff_bias bias[] = {{W_BYTES + '"', -0.5f}, {W_BYTES + ',', 0.4f}};
    for (int i = 0; i < JOBS; i++) {
        job *j = &jobs[i];
        *j = (job){.r = {.prompt = j->prompt,
                         .n_prompt = PROMPT,
                         .n_predict = BUDGET - i,
                         .grammar = i == 5 ? NULL : grammars[i]}};
        for (int k = 0; k < PROMPT; k++) j->prompt[k] = (int32_t)(aff__mix64((uint64_t)(i * 1000 + k)) % VOCAB);
        j->r.sampling = (aff_sampling){.temperature = i % 2 ? 0.8 : 0, .top_p = 0.9, .seed = (uint64_t)i};
        if (i >= 2)
            j->r.adjust = (aff_adjust){.repetition = 1.1, .presence = 0.2, .frequency = 0.1, .bias = bias, .n_bias = 2};
        answer(j);
    }
}

static bool on_token(void *ctx, const aff_token *t)
{
    job *j = ctx;
    j->got[j->n++] = t->id;
    return true;
}

static void on_done(void *ctx, aff_status status, const aff_outcome *o, const aff_error *e)
{
    job *j = ctx;
    if (status != AFF_OK) fail_msg("%s", e->msg);
    j->done = true;
    j->stop = o->stop;
}

/* Proposes what the answer will be, with a lie at some places: any token, mostly one that the form refuses. */
static int lies;
static int propose(void *ctx, const int32_t *ids, int64_t n, int32_t *draft, float *conf)
{
    for (int i = 0; i < JOBS; i++) {
        const job *j = &jobs[i];
        if (memcmp(ids, j->prompt, sizeof j->prompt) != 0) continue;
        for (int k = 0; k < AFF_MAX_WIDTH; k++) {
            const int64_t at = n - PROMPT + k;
            const uint64_t h = aff__mix64((uint64_t)(at * 31 + i));
            draft[k] = at < j->n_want && (int)(h % 100) >= lies ? j->want[at] : (int32_t)((h >> 20) % VOCAB);
            conf[k] = 1;
        }
        return AFF_MAX_WIDTH;
    }
    return 0;
}

static void widths(void **state)
{
    for (int width = 0; width <= AFF_MAX_WIDTH; width++)
        for (lies = 0; lies <= 60; lies += 30) {
            aff_engine *e;
            aff_draft_stats stats;
            int64_t accepted = 0;
            const aff_engine_options o = {
                .threads = 1, .slots = 3, .context = CONTEXT, .width = width, .propose = propose};
            make_jobs();
            if (aff__engine_create(&e, &fake_net, &o, &err) != AFF_OK) fail_msg("%s", err.msg);
            for (int i = 0; i < JOBS; i++) {
                uint64_t id;
                const aff_events ev = {.ctx = &jobs[i], .token = on_token, .done = on_done};
                if (aff__engine_submit(e, &jobs[i].r, &ev, &id, &err) != AFF_OK) fail_msg("%s", err.msg);
            }
            while (aff__engine_step(e)) {
            }
            aff__engine_draft_stats(e, &stats);
            for (int k = 0; k < AFF_MAX_WIDTH; k++) accepted += stats.accepted[k];
            if (width) assert_true(accepted > 20);
            for (int i = 0; i < JOBS; i++) {
                assert_true(jobs[i].done);
                assert_int_equal(jobs[i].n, jobs[i].n_want);
                assert_memory_equal(jobs[i].got, jobs[i].want, (size_t)jobs[i].n * sizeof(int32_t));
                if (jobs[i].r.grammar) assert_int_equal(jobs[i].stop, AFF_STOP_EOS);
            }
            aff__engine_free(e);
        }
}

/* Whatever the budget, as long as it is enough for the least value. */
static void budgets(void **state)
{
    aff_engine *e;
    const aff_engine_options o = {.threads = 1, .slots = 1, .context = 100};
    assert_int_equal(aff__engine_create(&e, &fake_net, &o, &err), AFF_OK);
    for (int i = 0; i < 5; i++) {
        aff_matcher *m;
        make_jobs();
        assert_int_equal(aff__matcher_create(&m, grammars[i], &err), AFF_OK);
        const int need = (int)aff__matcher_need(m, aff__matcher_start(m));
        aff__matcher_free(m);
        assert_in_range(need, 2, 60);
        for (int budget = need; budget < need + 20; budget++) {
            aff_outcome out;
            job *j = &jobs[i];
            const aff_events ev = {.ctx = j, .token = on_token};
            aff_buf text = {0};
            json_t *v = NULL;
            j->n = 0;
            j->r.n_predict = budget;
            if (aff__engine_run(e, &j->r, &ev, &out, &err) != AFF_OK) fail_msg("%s", err.msg);
            assert_int_equal(out.stop, AFF_STOP_EOS);
            for (int k = 0; k + 1 < j->n; k++) {
                size_t n;
                const char *s = word(vocab, j->got[k], &n);
                assert_int_equal(aff__buf_put(&text, s, n, NULL), AFF_OK);
            }
            const char *value = text.s, *thought = strstr(text.s, "</think>");
            if (thought) value = thought + 8;
            if (aff__json_parse_exact(&v, value, strlen(value), "answer", false, 256, &err) != AFF_OK)
                fail_msg("%s: %s", text.s, err.msg);
            json_decref(v);
            aff__buf_free(&text);
        }
    }
    /* The context is a budget too. */
    job *j = &jobs[0];
    aff_outcome out;
    const aff_events ev = {.ctx = j, .token = on_token};
    j->n = 0;
    j->r.n_predict = 1000;
    j->r.n_prompt = 8;
    assert_int_equal(aff__engine_run(e, &j->r, &ev, &out, &err), AFF_OK);
    assert_int_equal(out.stop, AFF_STOP_EOS);
    j->r.ignore_eos = true;
    assert_int_equal(aff__engine_check(e, &j->r, &err), AFF_E_INVALID);
    aff__engine_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(widths), cmocka_unit_test(budgets)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
