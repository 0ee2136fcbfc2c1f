/* engine: several requests at once, drafts, cancelling, on a pretend network. --full: 10,000 rejections instead of some hundred. */
#include "support/test.h"
#include "engine/fake_net.h"

static bool full;
enum { MOST = 64 };

/* A request, what it should give and what it gave. */
typedef struct job {
    aff_request r;
    int32_t prompt[CONTEXT];
    uint64_t id;
    int32_t want[CONTEXT], got[CONTEXT];
    int n_want, n, done, stop_after, progress;
    bool check_logits;
    uint64_t hash; /* of the tokens whose logits have come */
    int64_t rows;
    aff_status status;
    aff_outcome out;
    aff_error err;
} job;

static job jobs[MOST];
static aff_error err;

static bool on_token(void *ctx, const aff_token *t)
{
    job *j = ctx;
    assert_int_equal(j->done, 0);
    assert_int_equal(t->pos, j->r.n_prompt + j->n);
    j->got[j->n++] = t->id;
    return j->n != j->stop_after;
}

/* Rows come in order, each once, with the bits of single steps. */
static aff_status on_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *e)
{
    job *j = ctx;
    float want[VOCAB];
    for (int i = 0; i < rows; i++) {
        assert_int_equal(pos + i, j->rows);
        const int64_t p = j->rows++;
        j->hash = fake_hash(j->hash, p, p < j->r.n_prompt ? j->prompt[p] : j->got[p - j->r.n_prompt]);
        fake_logits(j->hash, p + 1, want);
        assert_memory_equal(logits + (int64_t)i * VOCAB, want, sizeof want);
    }
    return AFF_OK;
}

static bool on_progress(void *ctx, int64_t done, int64_t total)
{
    job *j = ctx;
    assert_in_range(done, 1, total);
    j->progress++;
    return true;
}

static void on_done(void *ctx, aff_status status, const aff_outcome *o, const aff_error *e)
{
    job *j = ctx;
    j->done++;
    j->status = status;
    j->out = *o;
    j->err = *e;
    assert_int_equal(o->decoded, j->n);
}

/* Job i: a prompt of its own, of n tokens, n_predict to follow. */
static job *make(int i, int n, int n_predict, const aff_sampling *sp)
{
    job *j = &jobs[i];
    *j = (job){0};
    for (int k = 0; k < n; k++) j->prompt[k] = (int32_t)(aff__mix64((uint64_t)(i * 1000 + k)) % VOCAB);
    j->r = (aff_request){.prompt = j->prompt, .n_prompt = n, .n_predict = n_predict, .sampling = *sp};
    return j;
}

static aff_status submit(aff_engine *e, job *j)
{
    const aff_events ev = {j, on_progress, j->check_logits ? on_logits : NULL, on_token, on_done};
    if (!j->n_want) j->n_want = fake_answer(&j->r, aff__engine_context(e), j->want);
    return aff__engine_submit(e, &j->r, &ev, &j->id, &err);
}

static void right(const job *j)
{
    assert_int_equal(j->done, 1);
    assert_int_equal(j->status, AFF_OK);
    assert_int_equal(j->n, j->n_want);
    assert_memory_equal(j->got, j->want, sizeof(int32_t) * (size_t)j->n_want);
}

static aff_engine *engine(const aff_engine_options *o)
{
    aff_engine *e;
    if (aff__engine_create(&e, &fake_net, o, &err) != AFF_OK) fail_msg("%s", err.msg);
    return e;
}

static int reset(void **state)
{
    fake_reset();
    return 0;
}

static const aff_sampling greedy = {.top_p = 1}, hot = {.temperature = 0.8, .top_p = 0.95, .seed = 5};

/* Widths, slots, chunks, lies, sampling, penalties, in all combinations of the first two and a spread of the rest. */
static void drafts_and_neighbours_change_nothing(void **state)
{
    static const int chunks[] = {1, 7, 128, 1408}, lies[] = {0, 1, 3, 5};
    int turn = 0;
    for (int width = -1; width <= AFF_MAX_WIDTH; width++)
        for (int slots = 1; slots <= 20; slots += slots == 1 ? 3 : 16, turn++) {
            fake_drafter d = {.random = (uint64_t)turn, .lies = lies[turn % 4], .of = 5, .honest_confidence = turn % 3 == 0};
            aff_engine *e = engine(&(aff_engine_options){.slots = slots, .chunk = chunks[turn % 4], .width = width, .propose = fake_propose, .propose_ctx = &d});
            const int n = slots == 1 ? 3 : slots + 3;
            for (int i = 0; i < n; i++) {
                job *j = make(i, 1 + (i * 29) % 90, 40 + i, i % 2 ? &hot : &greedy);
                j->check_logits = i % 3 != 1;
                if ((i + turn) % 4 == 0) j->r.adjust = (aff_adjust){.repetition = 1.3, .presence = 0.2, .frequency = 0.1};
                assert_int_equal(submit(e, j), AFF_OK);
            }
            while (aff__engine_step(e)) continue;
            for (int i = 0; i < n; i++) {
                right(&jobs[i]);
                assert_int_equal(jobs[i].out.stop, AFF_STOP_LENGTH);
            }
            aff_draft_stats s;
            aff__engine_draft_stats(e, &s);
            for (int k = 0; k < AFF_MAX_WIDTH; k++) {
                assert_true(s.accepted[k] <= s.marginal[k] && s.marginal[k] <= s.offered[k]);
                if (width >= 0 && k >= width) assert_int_equal(s.offered[k], 0);
            }
            if (width > 0) assert_true(s.offered[0] > 0);
            if (width > 0 && d.lies == 0 && slots == 1) assert_true(s.tokens > s.passes * 3 / 2);
            aff__engine_free(e);
        }
}

static void rejections(void **state)
{
    fake_drafter d = {.random = 1, .lies = 1, .of = 3};
    aff_engine *e = engine(&(aff_engine_options){.slots = 4, .width = 5, .propose = fake_propose, .propose_ctx = &d});
    aff_draft_stats s;
    int64_t rejected = 0;
    for (int round = 0; rejected < (full ? 10000 : 500); round++) {
        for (int i = 0; i < 6; i++) {
            job *j = make(i, 3 + i, 300, round % 2 ? &hot : &greedy);
            j->check_logits = true;
            j->r.sampling.seed = (uint64_t)round;
            assert_int_equal(submit(e, j), AFF_OK);
        }
        while (aff__engine_step(e)) continue;
        for (int i = 0; i < 6; i++) right(&jobs[i]);
        aff__engine_draft_stats(e, &s);
        rejected = 0; /* passes whose block was cut short */
        for (int k = 0; k < AFF_MAX_WIDTH; k++) rejected += (k ? s.accepted[k - 1] : s.offered[0]) - s.accepted[k];
    }
    if (full) printf("%lld rejected blocks, %lld tokens, all as without drafts\n", (long long)rejected, (long long)s.tokens);
    aff__engine_free(e);
}

/* 100,000 draws through the speculative path from one distribution of 50 tokens: chi-square stays below its 0.1 % point. */
static void draws_follow_the_distribution(void **state)
{
    fake_flat = true;
    fake_drafter d = {.random = 3, .lies = 1, .of = 2};
    aff_engine *e = engine(&(aff_engine_options){.slots = 4, .width = 5, .propose = fake_propose, .propose_ctx = &d});
    static int64_t seen[VOCAB];
    int64_t draws = 0;
    float l[VOCAB];
    fake_logits(0, 0, l);
    for (int round = 0; draws < 100000; round++) {
        for (int i = 0; i < 4; i++) {
            job *j = make(i, 2, 500, &(aff_sampling){.temperature = 1.5, .top_p = 1, .min_p = 0.02, .seed = (uint64_t)(round * 4 + i)});
            j->n_want = 1;
            j->r.ignore_eos = true;
            assert_int_equal(submit(e, j), AFF_OK);
        }
        while (aff__engine_step(e)) continue;
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < jobs[i].n; k++, draws++) seen[jobs[i].got[k]]++;
    }
    aff_draft_stats s;
    aff__engine_draft_stats(e, &s);
    assert_true(s.accepted[0] > 1000); /* it did go that way */
    double p[VOCAB], sum = 0, top = 0, chi = 0;
    int df = -1;
    for (int v = 0; v < VOCAB; v++) top = fmax(top, p[v] = exp((double)l[v] / 1.5));
    for (int v = 0; v < VOCAB; v++) sum += p[v] = p[v] < 0.02 * top ? 0 : p[v];
    for (int v = 0; v < VOCAB; v++) {
        const double expected = p[v] / sum * (double)draws;
        if (expected == 0)
            assert_int_equal(seen[v], 0);
        else
            chi += ((double)seen[v] - expected) * ((double)seen[v] - expected) / expected;
        df += expected > 0;
    }
    if (full) printf("%lld draws, %lld of them accepted drafts of place 1: chi-square %.1f at %d degrees of freedom\n", (long long)draws, (long long)s.accepted[0], chi, df);
    assert_in_range(df, 30, 49);
    assert_true(chi < df + 3.29 * sqrt(2.0 * df) + 4); /* about the 0.1 % point */
    aff__engine_free(e);
}

static void an_end_inside_a_block(void **state)
{
    for (int at = 0; at < 8; at++)
        for (int how = 0; how < 3; how++) {
            fake_reset();
            fake_eos = true;
            fake_drafter d = {.of = 1};
            aff_engine *e = engine(&(aff_engine_options){.slots = 1, .width = 5, .propose = fake_propose, .propose_ctx = &d});
            job *j = make(0, 10, how == 1 ? at + 1 : 100, &greedy);
            j->check_logits = true;
            j->r.ignore_eos = how != 0;
            if (how == 0) fake_favourite[10 + at] = EOS;
            if (how == 2) j->stop_after = at + 1;
            assert_int_equal(submit(e, j), AFF_OK);
            while (aff__engine_step(e)) continue;
            assert_int_equal(j->n, at + 1);
            assert_memory_equal(j->got, j->want, sizeof(int32_t) * (size_t)(at + 1));
            assert_int_equal(j->out.stop, how == 0 ? AFF_STOP_EOS : how == 1 ? AFF_STOP_LENGTH : AFF_STOP_CALLER);
            assert_int_equal(j->rows, 10 + at); /* nothing of the rows behind the end */
            aff__engine_free(e);
        }
}

static void the_context_ends_inside_a_block(void **state)
{
    for (int context = 20; context < 28; context++) {
        fake_drafter d = {.of = 1};
        aff_engine *e = engine(&(aff_engine_options){.slots = 2, .context = context, .width = 5, .propose = fake_propose, .propose_ctx = &d});
        job *j = make(0, 10, 100, &greedy), *k = make(1, context, 100, &greedy);
        assert_int_equal(submit(e, j), AFF_OK);
        assert_int_equal(submit(e, k), AFF_OK);
        assert_int_equal(submit(e, make(2, context + 1, 1, &greedy)), AFF_E_LIMIT);
        while (aff__engine_step(e)) continue;
        right(j);
        right(k);
        assert_int_equal(j->n, context - 10 + 1);
        assert_int_equal(k->n, 1);
        assert_int_equal(j->out.stop, AFF_STOP_CONTEXT);
        aff__engine_free(e);
    }
}

/* A row without a distribution ends its request with an error that names the position, wherever in a block it falls. The others go
 * on; so does the slot. */
static void nan_is_an_error_of_one_request(void **state)
{
    for (int width = 0; width <= 5; width++)
        for (int at = 0; at < 7; at++) {
            fake_reset();
            fake_drafter d = {.of = 1};
            aff_engine *e = engine(&(aff_engine_options){.slots = 2, .width = width, .propose = fake_propose, .propose_ctx = &d});
            fake_nan[30 + at] = true;
            job *j = make(0, 30, 50, &hot), *k = make(1, 60, 50, &hot);
            char place[32];
            assert_int_equal(submit(e, j), AFF_OK);
            assert_int_equal(submit(e, k), AFF_OK);
            while (aff__engine_step(e)) continue;
            right(k);
            assert_int_equal(j->done, 1);
            assert_int_equal(j->status, AFF_E_INVALID);
            snprintf(place, sizeof place, "position %d: ", 30 + at);
            assert_non_null(strstr(j->err.msg, place));
            assert_non_null(strstr(j->err.msg, "nan"));
            assert_int_equal(j->n, at);
            assert_memory_equal(j->got, j->want, sizeof(int32_t) * (size_t)at);
            fake_nan[30 + at] = false;
            j = make(0, 30, 50, &hot);
            assert_int_equal(submit(e, j), AFF_OK);
            while (aff__engine_step(e)) continue;
            right(j);
            aff__engine_free(e);
        }
}

static int warnings;
static void on_warn(void *ctx, const char *line)
{
    warnings++;
    assert_non_null(strstr(line, "shard 2: cannot read"));
}

/* A device's fault in one pass ends what is in it, what is beside it and what waits, and is told once. */
static void a_broken_device_ends_everything(void **state)
{
    aff_engine *e = engine(&(aff_engine_options){.context = CONTEXT, .slots = 2, .chunk = 8, .warn = on_warn});
    aff_error why = {0};
    warnings = 0;
    for (int i = 0; i < 5; i++) assert_int_equal(submit(e, make(i, 5 + 20 * (i == 1), 6, &greedy)), AFF_OK);
    aff__engine_step(e);
    assert_false(aff__engine_broken(e, &why));
    fake_fail_at = fake_calls + 2;
    fake_status = AFF_E_DEVICE;
    assert_true(aff__engine_step(e));
    assert_false(aff__engine_step(e)); /* nothing is left */
    assert_true(aff__engine_broken(e, &why));
    assert_non_null(strstr(why.msg, "shard 2: cannot read"));
    for (int i = 0; i < 5; i++) {
        assert_int_equal(jobs[i].done, 1);
        assert_int_equal(jobs[i].status, AFF_E_DEVICE);
        assert_non_null(strstr(jobs[i].err.msg, "shard 2: cannot read"));
    }
    assert_int_equal(submit(e, make(5, 5, 6, &greedy)), AFF_E_DEVICE);
    assert_non_null(strstr(err.msg, "the device failed: shard 2: cannot read"));
    assert_int_equal(warnings, 1);
    aff__engine_free(e);
}

static void a_failed_pass_ends_its_requests_only(void **state)
{
    aff_engine *e = engine(&(aff_engine_options){.slots = 2});
    for (int i = 0; i < 3; i++) assert_int_equal(submit(e, make(i, 5, 20, &greedy)), AFF_OK);
    for (int i = 0; i < 6; i++) aff__engine_step(e);
    fake_fail_at = fake_calls + 1;
    while (aff__engine_step(e)) continue;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(jobs[i].done, 1);
        assert_int_equal(jobs[i].status, AFF_E_IO);
        assert_string_equal(jobs[i].err.msg, "shard 2: cannot read");
        assert_true(jobs[i].n > 0);
    }
    right(&jobs[2]);
    aff__engine_free(e);
}

/* The request is cancelled after so many steps: in the queue, in its prompt, in its answer, after its end. */
static void cancelled_anywhere(void **state)
{
    bool in_queue = false, in_prompt = false, in_answer = false, after = false;
    for (int when = 0; !after; when++) {
        fake_drafter d = {.of = 4, .lies = 1};
        aff_engine *e = engine(&(aff_engine_options){.slots = 2, .chunk = 5, .width = 3, .propose = fake_propose, .propose_ctx = &d});
        int order[] = {1, 2, 0, 3}; /* job 0 waits for a slot first */
        for (int i = 0; i < 4; i++) assert_int_equal(submit(e, make(order[i], 22, 12, i % 2 ? &hot : &greedy)), AFF_OK);
        for (int i = 0; i < when; i++) aff__engine_step(e);
        job *j = &jobs[0];
        const bool done = j->done;
        const int calls = j->n;
        if (done) after = true;
        in_queue |= !j->progress;
        in_prompt |= j->progress && !j->n;
        in_answer |= j->n && !done;
        aff__engine_cancel(e, j->id);
        aff__engine_cancel(e, 12345); /* no such request */
        aff__engine_step(e);
        assert_int_equal(j->done, 1); /* within one step */
        assert_int_equal(j->n, calls);
        assert_int_equal(j->status, AFF_OK);
        if (!done) assert_int_equal(j->out.stop, AFF_STOP_CALLER);
        while (aff__engine_step(e)) continue;
        for (int i = 1; i < 4; i++) right(&jobs[i]);
        assert_int_equal(j->done, 1);
        aff__engine_free(e);
    }
    assert_true(in_queue && in_prompt && in_answer);
}

static void a_full_queue_refuses(void **state)
{
    aff_engine *e = engine(&(aff_engine_options){.slots = 1, .queue = 2});
    assert_int_equal(submit(e, make(0, 5, 9, &greedy)), AFF_OK);
    aff__engine_step(e); /* it has the slot */
    assert_int_equal(submit(e, make(1, 5, 9, &greedy)), AFF_OK);
    assert_int_equal(submit(e, make(2, 5, 9, &greedy)), AFF_OK);
    assert_int_equal(submit(e, make(3, 5, 9, &greedy)), AFF_E_LIMIT);
    assert_non_null(strstr(err.msg, "2 wait already for one of 1 slots"));
    while (aff__engine_step(e)) continue;
    for (int i = 0; i < 3; i++) right(&jobs[i]);
    assert_int_equal(jobs[3].done, 0);
    assert_int_equal(submit(e, make(3, 5, 9, &greedy)), AFF_OK);
    assert_int_equal(submit(e, make(4, 5, 9, &greedy)), AFF_OK);
    aff__engine_step(e);
    aff__engine_free(e); /* one in the slot, one in the queue: both end */
    for (int i = 3; i < 5; i++) {
        assert_int_equal(jobs[i].done, 1);
        assert_int_equal(jobs[i].status, AFF_OK);
        assert_int_equal(jobs[i].out.stop, AFF_STOP_CALLER);
    }
    e = engine(&(aff_engine_options){.slots = 1});
    aff__engine_stop(e);
    assert_false(aff__engine_wait(e));
    assert_int_equal(submit(e, make(0, 5, 9, &greedy)), AFF_E_CANCELLED);
    aff__engine_free(e);
    aff_engine *none;
    assert_int_equal(aff__engine_create(&none, &fake_net, &(aff_engine_options){.slots = AFF_MAX_SLOTS + 1}, &err), AFF_E_INVALID);
    assert_int_equal(aff__engine_create(&none, &fake_net, &(aff_engine_options){.width = 6}, &err), AFF_E_INVALID);
    assert_null(none);
}

/* Two long prompts come while an answer runs: between two of their chunks there are 1 to 16 passes of the answer, and the chunks
 * take turns. */
static void a_long_prompt_starves_no_one(void **state)
{
    aff_engine *e = engine(&(aff_engine_options){.slots = 3, .chunk = 4});
    job *answer = make(0, 4, 400, &greedy), *a = make(1, 200, 5, &greedy), *b = make(2, 200, 5, &greedy);
    answer->r.ignore_eos = true;
    assert_int_equal(submit(e, answer), AFF_OK);
    for (int i = 0; i < 5; i++) aff__engine_step(e);
    assert_int_equal(submit(e, a), AFF_OK);
    assert_int_equal(submit(e, b), AFF_OK);
    int between = 0, chunks = 0;
    while (a->n == 0 && b->n == 0) {
        const int n = answer->n, p = a->progress + b->progress;
        aff__engine_step(e);
        assert_int_equal((answer->n > n) + (a->progress + b->progress > p), 1);
        assert_in_range(a->progress - b->progress + 1, 0, 2);
        if (answer->n > n) {
            assert_in_range(++between, 1, 16);
        } else {
            if (chunks++) assert_in_range(between, 1, 16);
            between = 0;
        }
    }
    assert_true(chunks >= 90);
    while (aff__engine_step(e)) continue;
    for (int i = 0; i < 3; i++) right(&jobs[i]);
    aff__engine_free(e);
}

/* 40 answers, 16 rows: no pass is larger, no answer gets two turns ahead of another; with drafts the rows are filled. */
static void many_answers_take_turns(void **state)
{
    for (int live = 3; live <= 40; live += live < 12 ? 3 : 28) {
        fake_reset();
        fake_drafter d = {.of = 1};
        aff_engine *e = engine(&(aff_engine_options){.slots = live, .width = 5, .propose = fake_propose, .propose_ctx = &d});
        for (int i = 0; i < live; i++) {
            job *j = make(i, 1, 100, &greedy);
            j->r.ignore_eos = true;
            assert_int_equal(submit(e, j), AFF_OK);
        }
        for (int s = 0; s < 10; s++) {
            aff__engine_step(e);
            int least = 1000, most = 0;
            for (int i = 0; i < live; i++) {
                if (jobs[i].n < least) least = jobs[i].n;
                if (jobs[i].n > most) most = jobs[i].n;
            }
            if (live > 16) assert_true(most - least <= 1);
        }
        aff_draft_stats st;
        aff__engine_draft_stats(e, &st);
        assert_int_equal(st.rows[AFF_PASS_ROWS], live > 16 ? 10 : 9); /* the first pass has no draft: nothing has run */
        while (aff__engine_step(e)) continue;
        assert_true(fake_largest <= AFF_PASS_ROWS && fake_most_sequences == (live < 16 ? live : 16));
        for (int i = 0; i < live; i++) right(&jobs[i]);
        aff__engine_free(e);
    }
}

/* Forced tokens are what runs, whatever the draft says. */
static void forced_tokens_with_drafts(void **state)
{
    static const int32_t forced[] = {7, EOS, 11, 0};
    for (int width = -1; width <= 5; width++) {
        fake_drafter d = {.of = 2, .lies = 1};
        aff_engine *e = engine(&(aff_engine_options){.slots = 2, .width = width, .propose = fake_propose, .propose_ctx = &d});
        for (int i = 0; i < 2; i++) {
            job *j = make(i, 12, 50, &greedy);
            j->check_logits = true;
            j->r.forced = forced;
            j->r.n_forced = 4;
            assert_int_equal(submit(e, j), AFF_OK);
        }
        while (aff__engine_step(e)) continue;
        for (int i = 0; i < 2; i++) right(&jobs[i]);
        aff__engine_free(e);
    }
}

static int lying(void *ctx, const int32_t *ids, int64_t n, int32_t *draft, float *conf)
{
    fake_drafter d = {.of = 1, .lies = 1, .random = (uint64_t)n};
    return fake_propose(&d, ids, n, draft, conf);
}

static void on_warning(void *ctx, const char *line)
{
    ++*(int *)ctx;
    assert_null(strchr(line, '\n'));
    assert_non_null(strstr(line, "not one drafted token"));
}

/* A draft that is never right is reported once; auto stops asking it, but for probes. */
static void a_useless_draft_is_loud(void **state)
{
    for (int width = -1; width <= 5; width += 6) {
        int warned = 0;
        aff_engine *e = engine(&(aff_engine_options){.slots = 1, .width = width, .propose = lying, .warn = on_warning, .warn_ctx = &warned});
        aff_draft_stats s;
        for (int round = 0; round < 3; round++) {
            job *j = make(0, 4, 400, &greedy);
            j->r.ignore_eos = true;
            assert_int_equal(submit(e, j), AFF_OK);
            while (aff__engine_step(e)) continue;
            right(j);
        }
        aff__engine_draft_stats(e, &s);
        assert_int_equal(s.tokens, s.passes);
        if (width > 0) assert_int_equal(warned, 1);
        if (width > 0) assert_int_equal(s.skipped, 0);
        assert_int_equal(s.accepted[0], 0);
        aff__engine_free(e);
    }
}

typedef struct logged {
    int n;
    float lp[64], top[64][3];
    int32_t id[64], top_id[64][3];
} logged;

static bool on_logged(void *ctx, const aff_token *t)
{
    logged *g = ctx;
    assert_int_equal(t->n_top, 3);
    g->id[g->n] = t->id;
    g->lp[g->n] = t->logprob;
    memcpy(g->top[g->n], t->top_logprob, sizeof g->top[0]);
    memcpy(g->top_id[g->n], t->top, sizeof g->top_id[0]);
    g->n++;
    return true;
}

/* Log-probabilities are of the model's own logits: by definition, with and without drafts. */
static void log_probabilities(void **state)
{
    static logged g[2];
    memset(g, 0, sizeof g);
    for (int i = 0; i < 2; i++) {
        fake_drafter d = {.of = 3, .lies = 1};
        aff_engine *e = engine(&(aff_engine_options){.slots = 1, .width = i ? 5 : 0, .propose = fake_propose, .propose_ctx = &d});
        job *j = make(0, 6, 40, &hot);
        j->r.logprobs = true;
        j->r.top_logprobs = 3;
        j->r.adjust.frequency = 0.5;
        uint64_t id;
        aff_outcome out;
        assert_int_equal(aff__engine_submit(e, &j->r, &(aff_events){.ctx = &g[i], .token = on_logged}, &id, &err), AFF_OK);
        while (aff__engine_step(e)) continue;
        j->r.top_logprobs = AFF_MAX_TOP_LOGPROBS + 1;
        assert_int_equal(aff__engine_run(e, &j->r, NULL, &out, &err), AFF_E_INVALID);
        aff__engine_free(e);
    }
    assert_int_equal(g[0].n, 40);
    assert_memory_equal(&g[0], &g[1], sizeof g[0]);
    uint64_t hash = 0;
    float l[VOCAB];
    for (int p = 0; p < 6; p++) hash = fake_hash(hash, p, jobs[0].prompt[p]);
    for (int i = 0; i < 40; i++) {
        double sum = 0;
        fake_logits(hash, 6 + i, l);
        for (int v = 0; v < VOCAB; v++) sum += exp((double)l[v]);
        assert_true(fabs((double)l[g[0].id[i]] - log(sum) - (double)g[0].lp[i]) < 1e-6);
        for (int k = 0; k < 3; k++) {
            assert_true(fabs((double)l[g[0].top_id[i][k]] - log(sum) - (double)g[0].top[i][k]) < 1e-6);
            if (k) assert_true(g[0].top[i][k] <= g[0].top[i][k - 1]);
        }
        hash = fake_hash(hash, 6 + i, g[0].id[i]);
    }
}

int main(int argc, char **argv)
{
    full = argc > 1 && strcmp(argv[1], "--full") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(drafts_and_neighbours_change_nothing, reset),
        cmocka_unit_test_setup(rejections, reset),
        cmocka_unit_test_setup(draws_follow_the_distribution, reset),
        cmocka_unit_test_setup(an_end_inside_a_block, reset),
        cmocka_unit_test_setup(the_context_ends_inside_a_block, reset),
        cmocka_unit_test_setup(nan_is_an_error_of_one_request, reset),
        cmocka_unit_test_setup(a_broken_device_ends_everything, reset),
        cmocka_unit_test_setup(a_failed_pass_ends_its_requests_only, reset),
        cmocka_unit_test_setup(cancelled_anywhere, reset),
        cmocka_unit_test_setup(a_full_queue_refuses, reset),
        cmocka_unit_test_setup(a_long_prompt_starves_no_one, reset),
        cmocka_unit_test_setup(many_answers_take_turns, reset),
        cmocka_unit_test_setup(forced_tokens_with_drafts, reset),
        cmocka_unit_test_setup(a_useless_draft_is_loud, reset),
        cmocka_unit_test_setup(log_probabilities, reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
