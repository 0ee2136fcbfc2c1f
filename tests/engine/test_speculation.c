/* engine: promise 2 and 3 on real networks. Drafts of every width, slots, neighbours and chunks leave text and logits as single
 * steps of the forward pass make them, bit for bit; and the drafts themselves are those of a sequence that was never rolled back.
 * Without arguments: a selection that covers every pair of settings on small random checkpoints. --full: all combinations, and 10,000
 * rejections. */
#include "base/rng.h"
#include "engine/engine.h"
#include "engine/text.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>

enum { CONTEXT = 512, MOST_PROMPTS = 512, ANSWER = 16, MOST_ANSWER = 400 };
#define DSPARK AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark"
#define TINY AFF_SOURCE_DIR "/models/tiny-v4"
#define MTP1 AFF_TESTS_DIR "/golden/v4-sim/ckpt-mtp1"

static bool full;
static aff_error err;

static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static uint64_t hash_row(uint64_t h, const float *l, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, l + i, sizeof u);
        h = aff__mix64(h ^ u) + 0x9E3779B97F4A7C15u;
    }
    return h;
}

/* A prompt, and what single steps make of it. */
typedef struct text {
    int32_t prompt[CONTEXT], answer[MOST_ANSWER];
    int n_prompt, n_answer;
    uint64_t row[CONTEXT]; /* hash of the logits at each position */
    aff_sampling sampling;
    aff_adjust adjust;
    /* From a run. */
    int got;
    int64_t rows;
    bool done;
    uint64_t id;
} text;

typedef struct bench {
    aff_net *net, *plain; /* with and without its draft */
    aff_runner *r;        /* of net */
    aff_seq *seq;
    aff_sampler *sampler;
    int vocab, n;
    text *t;
} bench;

static void bench_open(bench *b, const char *dir, int n)
{
    *b = (bench){.n = n};
    must(aff__net_open(&b->net, dir, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    must(aff__net_open(&b->plain, dir, &(aff_net_options){.numerics = AFF_FAST}, &err));
    must(aff__runner_create(&b->r, b->net, full ? 2 : 1, &err));
    must(aff__seq_create(&b->seq, b->net, CONTEXT, &err));
    b->vocab = aff__net_config(b->net)->vocab;
    must(aff__sampler_create(&b->sampler, b->vocab, &err));
    b->t = calloc((size_t)n, sizeof *b->t);
    assert_non_null(b->t);
}

static void bench_close(bench *b)
{
    free(b->t);
    aff__sampler_free(b->sampler);
    aff__seq_free(b->seq);
    aff__runner_free(b->r);
    aff__net_close(b->net);
    aff__net_close(b->plain);
}

static void single_step(bench *b, int32_t id, float *logits)
{
    must(aff__forward(b->r, &(aff_batch){.n = 1, .id = &id, .seq = b->seq, .logits = logits}, &err));
}

/* Prompts in words, for the model that knows some. */
static int words(bench *b, int i, int32_t *ids)
{
    static const char *const prompt[] = {"<｜User｜>What is the capital of France?<｜Assistant｜></think>", "<｜User｜>Write a Python function that adds two numbers.<｜Assistant｜></think>",
                                         "The quick brown", "<｜User｜>Return a JSON object: item drum, count 15 and in_stock false.<｜Assistant｜></think>"};
    aff_tokenizer *t;
    int32_t *got;
    int64_t n;
    must(aff__tokenizer_open_for(&t, TINY, aff__net_config(b->net), &err));
    must(aff__prompt_ids(t, prompt[i % 4], strlen(prompt[i % 4]), "prompt", &got, &n, &err));
    memcpy(ids, got, sizeof *ids * (size_t)n);
    free(got);
    aff__tokenizer_free(t);
    return (int)n;
}

/* Text i by single steps: no engine. n_prompt 0: words. The end of sequence does not stop it. */
static void reference(bench *b, int i, int n_prompt, int n_answer, bool hot)
{
    text *t = &b->t[i];
    float *l = malloc(2 * sizeof *l * (size_t)b->vocab);
    int32_t *seen = calloc(2 * (size_t)b->vocab, sizeof *seen);
    const aff_occurrences o = {seen, seen + b->vocab};
    *t = (text){.n_prompt = n_prompt, .n_answer = n_answer, .sampling = {.top_p = 1}};
    const bool random = n_prompt > 0;
    if (!random) t->n_prompt = n_prompt = words(b, i, t->prompt);
    if (hot) t->sampling = (aff_sampling){.temperature = 1, .top_p = 0.95, .seed = (uint64_t)i};
    if (i % 4 == 3) t->adjust = (aff_adjust){.repetition = 1.2, .frequency = 0.1, .presence = 0.3};
    aff__seq_reset(b->seq);
    for (int p = 0; p + 1 < n_prompt + n_answer; p++) {
        if (p < n_prompt && random) t->prompt[p] = (int32_t)(aff__mix64((uint64_t)(i * 1000 + p)) % (uint64_t)b->vocab);
        const int32_t id = p < n_prompt ? t->prompt[p] : t->answer[p - n_prompt];
        seen[id]++;
        if (p >= n_prompt) seen[b->vocab + id]++;
        single_step(b, id, l);
        t->row[p] = hash_row(1, l, b->vocab);
        if (p + 1 < n_prompt) continue;
        aff__adjust_logits(&t->adjust, &o, l, b->vocab, l + b->vocab);
        must(aff__sampler_next(b->sampler, l + b->vocab, &t->sampling, p + 1, &t->answer[p + 1 - n_prompt], &err));
    }
    free(seen);
    free(l);
}

static int vocab_of_run;

static aff_status on_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *e)
{
    text *t = ctx;
    for (int i = 0; i < rows; i++) {
        assert_int_equal(t->rows, pos + i);
        if (hash_row(1, logits + (int64_t)i * vocab_of_run, vocab_of_run) != t->row[pos + i]) fail_msg("logits differ at position %lld", (long long)pos + i);
        t->rows++;
    }
    return AFF_OK;
}

static bool on_token(void *ctx, const aff_token *k)
{
    text *t = ctx;
    assert_int_equal(k->pos, t->n_prompt + t->got);
    if (k->id != t->answer[t->got]) fail_msg("position %lld: expected %d, got %d", (long long)k->pos, t->answer[t->got], k->id);
    t->got++;
    return true;
}

static void on_done(void *ctx, aff_status status, const aff_outcome *o, const aff_error *e)
{
    text *t = ctx;
    if (status != AFF_OK) fail_msg("%s", e->msg);
    assert_int_equal(o->stop, AFF_STOP_LENGTH);
    t->done = true;
}

/* A draft that knows the answers and errs one time in three. */
static int knowing(void *ctx, const int32_t *ids, int64_t n, int32_t *draft, float *conf)
{
    bench *b = ctx;
    static uint64_t random = 5;
    for (int i = 0; i < b->n; i++) {
        text *t = &b->t[i];
        if (n < t->n_prompt || t->done || memcmp(ids, t->prompt, sizeof *ids * (size_t)t->n_prompt) != 0) continue;
        int k = 0;
        for (; k < AFF_MAX_WIDTH && n - t->n_prompt + k < t->n_answer; k++) {
            const uint64_t u = aff__splitmix64(&random);
            draft[k] = u % 3 ? t->answer[n - t->n_prompt + k] : (int32_t)(u / 3 % (uint64_t)b->vocab);
            conf[k] = 0;
        }
        return k;
    }
    return 0;
}

enum { NO_DRAFT = -2 };
/* All texts through one engine; width NO_DRAFT: the network is opened without. Returns the statistics. */
static aff_draft_stats run_all(bench *b, int width, int slots, int64_t chunk, bool hook)
{
    aff_engine *e;
    aff_draft_stats s;
    const aff_engine_options o = {.threads = full ? 2 : 1, .slots = slots, .queue = MOST_PROMPTS, .context = CONTEXT, .chunk = chunk,
                                  .width = width == NO_DRAFT ? AFF_WIDTH_AUTO : width, .propose = hook ? knowing : NULL, .propose_ctx = b};
    must(aff__engine_create(&e, width == NO_DRAFT ? b->plain : b->net, &o, &err));
    vocab_of_run = b->vocab;
    for (int i = 0; i < b->n; i++) {
        text *t = &b->t[i];
        const aff_request r = {.prompt = t->prompt, .n_prompt = t->n_prompt, .n_predict = t->n_answer, .sampling = t->sampling, .adjust = t->adjust, .ignore_eos = true};
        t->got = 0;
        t->rows = 0;
        t->done = false;
        must(aff__engine_submit(e, &r, &(aff_events){.ctx = t, .logits = on_logits, .token = on_token, .done = on_done}, &t->id, &err));
    }
    while (aff__engine_step(e)) continue;
    for (int i = 0; i < b->n; i++) {
        assert_int_equal(b->t[i].got, b->t[i].n_answer);
        assert_int_equal(b->t[i].rows, b->t[i].n_prompt + b->t[i].n_answer - 1);
        assert_true(b->t[i].done);
    }
    aff__engine_draft_stats(e, &s);
    aff__engine_free(e);
    return s;
}

static const int CHUNKS[] = {1, 7, 128, 1408};

/* Widths x chunks, with slots, sampling and the draft's kind so that every pair of values of two settings occurs. */
static void matrix(const char *dir)
{
    static const int lengths[] = {20, 1, 133, 5, 64, 200};
    for (int hot = 0; hot < 2; hot++) {
        bench b;
        bench_open(&b, dir, full ? 6 : 4);
        const bool talks = strcmp(dir, TINY) == 0;
        for (int i = 0; i < b.n; i++) reference(&b, i, talks ? 0 : lengths[i], ANSWER, hot);
        for (int width = NO_DRAFT; width <= AFF_MAX_WIDTH; width++)
            for (int c = 0; c < 4; c++)
                for (int slots = 1; slots <= 4; slots += 3)
                    for (int hook = 0; hook < 2; hook++) {
                        const int w = width + 2;
                        if (!full && ((w + c + (slots > 1)) % 2 || (w + c / 2 + hot) % 2 || (w / 2 + c + hook) % 2)) continue;
                        run_all(&b, width, slots, CHUNKS[c], hook);
                    }
        bench_close(&b);
    }
}

static void matrix_dspark(void **state) { matrix(DSPARK); }
static void matrix_tiny(void **state) { matrix(TINY); }
static void matrix_mtp1(void **state) { matrix(MTP1); }

/* What the draft proposes after n tokens, by single steps (b->seq stands at n - 1 tokens run, the last is id0). */
static int propose(bench *b, const int32_t *all, int n, int32_t *d)
{
    if (aff__net_draft(b->net) == AFF_DRAFT_DSPARK) {
        must(aff__draft_block(b->r, b->seq, all[n - 1], d, NULL, NULL, NULL, NULL, &err));
        return aff__net_config(b->net)->draft_block;
    }
    return 1; /* made by the step before */
}

/* A text that the draft itself writes, except for a wrong word now and then: forced upon the engine, exactly those words must be
 * rejected. So every draft equals that of a sequence in which nothing was ever taken back, and which saw the prompt one by one. */
static void write_text(bench *b, int i, int width, int64_t *blocks, int64_t *offered, int64_t *accepted)
{
    text *t = &b->t[i];
    const bool mtp = aff__net_draft(b->net) == AFF_DRAFT_MTP1;
    float *l = malloc(2 * sizeof *l * (size_t)b->vocab);
    int32_t all[CONTEXT], d[64] = {0};
    uint64_t random = (uint64_t)i;
    int n = 0;
    *t = (text){.n_prompt = 20 + 50 * i, .n_answer = 150, .sampling = {.top_p = 1}};
    const int end = t->n_prompt + t->n_answer;
    aff__seq_reset(b->seq);
    for (; n < t->n_prompt; n++) all[n] = (int32_t)(aff__mix64((uint64_t)(i * 999 + n)) % (uint64_t)b->vocab);
    memcpy(t->prompt, all, sizeof *all * (size_t)n);
    int run = 0;
    while (n < end) {
        /* Everything but the last token has to have run. */
        for (; run < n - 1; run++) {
            single_step(b, all[run], l);
            if (mtp) must(aff__draft_mtp1(b->r, &all[run + 1], 1, 0, l + b->vocab, &err));
            t->row[run] = hash_row(1, l, b->vocab);
        }
        if (mtp) must(aff__argmax(l + b->vocab, b->vocab, d, &err));
        int k = propose(b, all, n, d), right = 0;
        if (k > width) k = width;
        if (k > end - n - 1) k = end - n - 1;
        const bool err_here = aff__splitmix64(&random) % 2;
        const int wrong = err_here ? (int)(aff__splitmix64(&random) % (uint64_t)(k + 1)) : k;
        for (; right < wrong; right++) all[n++] = d[right];
        all[n++] = wrong < k ? (d[wrong] + 1) % b->vocab : (int32_t)(aff__splitmix64(&random) % (uint64_t)b->vocab);
        *blocks += k > 0;
        *offered += k;
        *accepted += right;
    }
    for (; run < end - 1; run++) {
        single_step(b, all[run], l);
        t->row[run] = hash_row(1, l, b->vocab);
    }
    memcpy(t->answer, all + t->n_prompt, sizeof *all * (size_t)t->n_answer);
    free(l);
}

static void drafts_are_those_of_a_straight_run(const char *dir, int width, int slots, int64_t chunk)
{
    bench b;
    aff_engine *e;
    int64_t blocks = 0, offered = 0, accepted = 0, got_offered = 0, got_accepted = 0;
    bench_open(&b, dir, 3);
    for (int i = 0; i < b.n; i++) write_text(&b, i, width, &blocks, &offered, &accepted);
    must(aff__engine_create(&e, b.net, &(aff_engine_options){.threads = full ? 2 : 1, .slots = slots, .context = CONTEXT, .chunk = chunk, .width = width}, &err));
    vocab_of_run = b.vocab;
    for (int i = 0; i < b.n; i++) {
        text *t = &b.t[i];
        const aff_request r = {.prompt = t->prompt, .n_prompt = t->n_prompt, .n_predict = t->n_answer, .sampling = t->sampling, .forced = t->answer, .n_forced = t->n_answer};
        must(aff__engine_submit(e, &r, &(aff_events){.ctx = t, .logits = on_logits, .token = on_token, .done = on_done}, &t->id, &err));
    }
    while (aff__engine_step(e)) continue;
    aff_draft_stats s;
    aff__engine_draft_stats(e, &s);
    for (int k = 0; k < AFF_MAX_WIDTH; k++) {
        got_offered += s.offered[k];
        got_accepted += s.accepted[k];
    }
    assert_true(blocks > 20 && accepted > blocks / 3);
    assert_int_equal(s.tokens, 3 * 150);
    assert_int_equal(got_accepted, accepted);
    if (s.rows[AFF_PASS_ROWS] == 0) assert_int_equal(got_offered, offered); /* no block was cut for want of rows */
    aff__engine_free(e);
    bench_close(&b);
}

static void straight_dspark(void **state)
{
    drafts_are_those_of_a_straight_run(DSPARK, 5, 1, 256);
    drafts_are_those_of_a_straight_run(DSPARK, 3, 3, 7);
}

static void straight_mtp1(void **state)
{
    drafts_are_those_of_a_straight_run(MTP1, 1, 1, 256);
    drafts_are_those_of_a_straight_run(MTP1, 1, 3, 7);
    drafts_are_those_of_a_straight_run(MTP1, 5, 2, 128);
}

/* 10,000 blocks of a draft that errs at random. */
static void many_rejections(void **state)
{
    for (int m = 0; m < 2; m++) {
        bench b;
        int64_t rejected = 0, tokens = 0, target = full ? 5000 : 40;
        bench_open(&b, m ? MTP1 : DSPARK, 4);
        for (int i = 0; i < b.n; i++) reference(&b, i, 3 + 60 * i, full ? 300 : 60, i % 2);
        while (rejected < target) {
            const aff_draft_stats s = run_all(&b, 5, 4, 128, true);
            for (int k = 0; k < AFF_MAX_WIDTH; k++) rejected += (k ? s.accepted[k - 1] < s.offered[k] ? s.accepted[k - 1] : s.offered[k] : s.offered[0]) - s.accepted[k];
            tokens += s.tokens;
        }
        if (full) printf("%s: %lld rejected blocks, %lld tokens: text and logits as by single steps\n", m ? "ckpt-mtp1" : "ckpt-dspark", (long long)rejected, (long long)tokens);
        bench_close(&b);
    }
}

int main(int argc, char **argv)
{
    full = argc > 1 && strcmp(argv[1], "--full") == 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(matrix_dspark), cmocka_unit_test(matrix_mtp1), cmocka_unit_test(matrix_tiny), cmocka_unit_test(straight_dspark), cmocka_unit_test(straight_mtp1),
                                       cmocka_unit_test(many_rejections)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
