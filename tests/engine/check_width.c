/* Adaptive draft width against every fixed one on the demonstration model (scripts/checks/width): accepted tokens are
 * counted in runs of the engine, times of passes come from a table measured beforehand, so that what else the machine
 * does counts for no one.
 *
 *   check_width tuned|measured [TOKENS]
 *
 * `tuned` are the prompts that the policy's constants were chosen on, `measured` those that played no part in it; a
 * third each of code (generated functions, library source), prose (dictionary lines) and chat (questions, tool
 * requests). */
#include "engine/prompts.h"
#include <time.h>

enum { LONGEST = 256 };
static const char *const kinds[KINDS] = {"code", "prose", "chat"};
static int vocab, tokens;
static aff_net *net;

/* Even lines, or odd ones and others. */
static void read_prompts(bool measured)
{
    aff_tokenizer *t;
    must(aff__tokenizer_open_for(&t, MODEL, aff__net_config(net), &err));
    const int odd = measured;
    add_lines(t, EVAL "draft.jsonl", "code", CODE, odd, 2, 20);
    add_lines(t, EVAL "draft.jsonl", "python", CODE, odd, 2, 5);
    add_lines(t, EVAL "draft.jsonl", "prose", PROSE, odd, 2, 8);
    add_beginnings(t, EVAL "heldout.txt", odd ? 3 : 0, 7, 22);
    add_lines(t, EVAL "draft.jsonl", "chat", CHAT, odd, 2, 20);
    add_lines(t, EVAL "facts-chat.jsonl", NULL, CHAT, odd, 2, 10);
    add_lines(t, EVAL "tools.jsonl", NULL, CHAT, odd, 10, 10);
    aff__tokenizer_free(t);
}

static void on_done(void *ctx, aff_status s, const aff_outcome *o, const aff_error *e)
{
    err = *e;
    must(s);
}

static aff_draft_stats run(int width, int kind, bool hot, const aff_pass_times *times)
{
    aff_engine *e;
    aff_draft_stats s;
    must(aff__engine_create(&e, net,
                            &(aff_engine_options){.threads = 1,
                                                  .slots = 1,
                                                  .queue = MOST_PROMPTS,
                                                  .context = 4096,
                                                  .kv_commit = -1,
                                                  .width = width,
                                                  .times = times},
                            &err));
    for (int i = 0; i < n_prompts; i++) {
        uint64_t id;
        if (prompts[i].kind != (prompt_kind)kind) continue;
        aff_request r = {
            .prompt = prompts[i].ids, .n_prompt = prompts[i].n, .n_predict = tokens, .sampling = {.top_p = 1}};
        if (hot) r.sampling = (aff_sampling){.temperature = 1, .top_p = 0.95, .seed = (uint64_t)i};
        must(aff__engine_submit(e, &r, &(aff_events){.done = on_done}, &id, &err));
    }
    while (aff__engine_step(e)) continue;
    aff__engine_draft_stats(e, &s);
    aff__engine_free(e);
    return s;
}

/* ---- width ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The thread's own time: other work on the machine does not count. */
static uint64_t thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Times of a pass of 1 .. 6 rows and of a draft, the lower decile of `rounds` interleaved measurements. */
static void measure(aff_pass_times *t, int rounds)
{
    aff_runner *r;
    aff_seq *s;
    static double v[7][500];
    int32_t ids[64], d[64];
    float *l = malloc(sizeof(float) * 8 * (size_t)vocab), conf[64];
    for (int i = 0; i < 64; i++) ids[i] = prompts[i % n_prompts].ids[1];
    must(aff__runner_create(&r, net, 1, &err));
    must(aff__seq_create(&s, net, 128, &err));
    must(aff__forward(r, &(aff_batch){.n = 64, .id = ids, .seq = s, .want_from = 64}, &err));
    for (int i = 0; i < rounds; i++)
        for (int k = 0; k <= 6; k++) {
            const uint64_t start = thread_ns();
            if (k)
                must(aff__forward_many(r, &(aff_batch){.n = k, .id = ids + i % 32, .seq = s, .logits = l}, 1, &err));
            else
                must(aff__draft_block(r, s, ids[i % 64], d, conf, NULL, NULL, NULL, &err));
            v[k][i] = (double)(thread_ns() - start);
            must(aff__seq_rollback(s, 64, &err));
        }
    for (int k = 0; k <= 6; k++) {
        qsort(v[k], (size_t)rounds, sizeof(double), by_value);
        *(k ? &t->verify[k] : &t->draft[1]) = v[k][rounds / 10];
    }
    free(l);
    aff__seq_free(s);
    aff__runner_free(r);
}

/* Tokens per ms of one run by the table: what it counted, at the table's times. */
static double speed(const aff_draft_stats *s, const aff_pass_times *t, double *ns)
{
    *ns = 0;
    for (int i = 1; i <= AFF_PASS_ROWS; i++)
        *ns += (double)s->rows[i] * aff__time_of(t->verify, i) + (double)s->drafts[i] * aff__time_of(t->draft, i);
    return (double)s->tokens / *ns * 1e6;
}

/* One table of times: every fixed width and auto on each kind. Returns 1 if auto is not good enough. */
static int compare(const char *name, const aff_pass_times *t, bool hot)
{
    double got[AFF_MAX_WIDTH + 2][KINDS], ns[KINDS], best_sum = 0, sum;
    int bad = 0;
    printf("\n%s, %s: V(1..6) =", name, hot ? "temperature 1, top-p 0.95" : "greedy");
    for (int k = 1; k <= 6; k++) printf(" %.3f", t->verify[k] / 1e6);
    printf(" ms, draft %.3f ms\nwidth   tokens per ms: code    prose     chat   all three   tokens a pass (code prose "
           "chat)   drafts per 100 passes\n",
           t->draft[1] / 1e6);
    for (int w = 0; w <= AFF_MAX_WIDTH + 1; w++) {
        int64_t all = 0;
        double time = 0, per_pass[KINDS], share[KINDS];
        for (int k = 0; k < KINDS; k++) {
            const aff_draft_stats s = run(w > AFF_MAX_WIDTH ? AFF_WIDTH_AUTO : w, k, hot, t);
            got[w][k] = speed(&s, t, &ns[k]);
            per_pass[k] = (double)s.tokens / (double)s.passes;
            share[k] = 100.0 * (double)s.blocks / (double)s.passes;
            all += s.tokens;
            time += ns[k];
        }
        sum = (double)all / time * 1e6;
        printf("%-5c %24.4f %8.4f %8.4f %11.4f   %.2f %.2f %.2f   %.1f %.1f %.1f\n", w > AFF_MAX_WIDTH ? 'a' : '0' + w,
               got[w][0], got[w][1], got[w][2], sum, per_pass[0], per_pass[1], per_pass[2], share[0], share[1],
               share[2]);
        if (w <= AFF_MAX_WIDTH && sum > best_sum) best_sum = sum;
    }
    for (int k = 0; k < KINDS; k++) {
        double best = 0;
        for (int w = 0; w <= AFF_MAX_WIDTH; w++)
            if (got[w][k] > best) best = got[w][k];
        const double ratio = got[AFF_MAX_WIDTH + 1][k] / best;
        printf("auto / best fixed width, %s: %.4f %s\n", kinds[k], ratio, ratio >= 0.97 ? "" : "(below 0.97)");
        bad |= ratio < 0.97;
    }
    printf("auto / best single width on all three: %.4f %s\n", sum / best_sum, sum > best_sum ? "" : "(not above)");
    return bad | (sum <= best_sum);
}

static int width(void)
{
    aff_pass_times measured = {.verify = {0}};
    int bad = 0;
    measure(&measured, 200);
    for (int hot = 0; hot < 2; hot++) bad |= compare("measured here", &measured, hot);
    /* The same text under the times of another machine: where a pass costs little more with more rows. */
    const aff_pass_times flat = {.verify = {0, 4.0e6, 4.2e6, 4.4e6, 4.6e6, 4.8e6, 5.0e6}, .draft = {0, 0.4e6}};
    for (int hot = 0; hot < 2; hot++) bad |= compare("times of a card (assumed)", &flat, hot);
    printf("\n%s\n", bad ? "FAILED" : "passed");
    return bad;
}

int main(int argc, char **argv)
{
    const bool measured = argc > 1 && strcmp(argv[1], "measured") == 0;
    if (argc < 2 || argc > 3 || (!measured && strcmp(argv[1], "tuned"))) {
        fprintf(stderr, "usage: check_width tuned|measured [TOKENS]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    tokens = argc > 2 ? atoi(argv[2]) : 96;
    if (tokens < 1 || tokens > LONGEST) tokens = LONGEST;
    must(aff__net_open(&net, MODEL, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    vocab = aff__net_config(net)->vocab;
    read_prompts(measured);
    int n[KINDS] = {0};
    for (int i = 0; i < n_prompts; i++) n[prompts[i].kind]++;
    printf("prompts the policy was %s: %d code, %d prose, %d chat, up to %d tokens each\n",
           measured ? "not tuned on" : "tuned on", n[CODE], n[PROSE], n[CHAT], tokens);
    const int code = width();
    free_prompts();
    aff__net_close(net);
    return code;
}
