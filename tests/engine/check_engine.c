/* The full form of the engine's checks on a model that says something (scripts/checks/engine and width):
 *
 *   check_engine matrix MODEL PROMPTS.jsonl TEXT COUNT TOKENS   every setting gives the same text and logits
 *   check_engine width  MODEL PROMPTS.jsonl TEXT COUNT TOKENS   adaptive width against every fixed one
 *
 * Prompts: the lines of PROMPTS.jsonl ("prompt", "kind"), and the beginnings of the lines of TEXT, kind prose. */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "engine/engine.h"
#include "engine/text.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 2000, LONGEST = 256, KINDS = 3 };
static const char *const kinds[KINDS] = {"code", "prose", "chat"};
static aff_error err;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "check_engine: %s\n", err.msg);
    exit(1);
}

typedef struct item {
    int kind, n_prompt;
    int32_t *prompt;
    /* What a run gave. */
    int n;
    int32_t got[LONGEST];
    uint64_t logits; /* of all rows */
} item;

static item items[MOST];
static int n_items, vocab, tokens;
static aff_net *net, *plain;

static uint64_t hash_floats(uint64_t h, const float *l, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, l + i, sizeof u);
        h = (h ^ u) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return h;
}

/* ---- prompts ---- */

static void add(const aff_tokenizer *t, const char *text, size_t n, int kind, bool bos)
{
    int32_t *ids;
    int64_t n_ids;
    if (n_items == MOST || !n) return;
    must(aff__prompt_ids(t, text, n, "prompt", &ids, &n_ids, &err));
    if (bos) memmove(ids, ids + 1, (size_t)--n_ids * sizeof *ids); /* the text has its own */
    items[n_items++] = (item){.kind = kind, .n_prompt = (int)n_ids, .prompt = ids};
}

static void read_prompts(const char *model, const char *jsonl, const char *text, int count)
{
    aff_tokenizer *t;
    char *data, line[4096];
    size_t size;
    must(aff__tokenizer_open_for(&t, model, aff__net_config(net), &err));
    FILE *f = fopen(jsonl, "r");
    if (!f) must(aff__fail_errno(&err, "%s: cannot open", jsonl));
    int left[KINDS] = {count / 3, 0, count / 3};
    while (fgets(line, sizeof line, f)) {
        json_t *j = json_loads(line, 0, NULL);
        const char *p = json_string_value(json_object_get(j, "prompt")), *k = json_string_value(json_object_get(j, "kind"));
        const int kind = k && strcmp(k, "code") == 0 ? 0 : 2;
        if (p && left[kind]-- > 0) add(t, p, strlen(p), kind, true);
        json_decref(j);
    }
    fclose(f);
    must(aff__read_file(text, 1 << 28, &data, &size, &err));
    for (char *at = data, *end; n_items < count && (end = memchr(at, '\n', size - (size_t)(at - data))); at = end + 1) {
        const char *cut = memchr(at, ' ', (size_t)(end - at)); /* a third of the line, up to a space */
        for (const char *c = at; c < at + (end - at) / 3 && cut; c++)
            if (*c == ' ') cut = c;
        if (cut && end - at > 40) add(t, at, (size_t)(cut - at), 1, false);
    }
    free(data);
    aff__tokenizer_free(t);
}

/* ---- a run over all prompts ---- */

static aff_status on_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *e)
{
    item *it = ctx;
    it->logits = hash_floats(it->logits, logits, (int64_t)rows * vocab);
    return AFF_OK;
}

static bool on_token(void *ctx, const aff_token *t)
{
    item *it = ctx;
    it->got[it->n++] = t->id;
    return true;
}

static void on_done(void *ctx, aff_status s, const aff_outcome *o, const aff_error *e)
{
    err = *e;
    must(s);
}

typedef struct setting {
    int width, slots; /* width -2: no draft loaded */
    int64_t chunk;
    bool hot, logits;
    int kind; /* only these prompts; -1: all */
    const aff_pass_times *times;
} setting;

static aff_draft_stats run(const setting *c)
{
    aff_engine *e;
    aff_draft_stats s;
    const aff_engine_options o = {.threads = 1, .slots = c->slots, .queue = MOST, .context = 1024, .chunk = c->chunk, .width = c->width == -2 ? 0 : c->width, .times = c->times};
    must(aff__engine_create(&e, c->width == -2 ? plain : net, &o, &err));
    for (int i = 0; i < n_items; i++) {
        uint64_t id;
        item *it = &items[i];
        it->n = 0;
        it->logits = 1;
        if (c->kind >= 0 && it->kind != c->kind) continue;
        aff_request r = {.prompt = it->prompt, .n_prompt = it->n_prompt, .n_predict = tokens, .sampling = {.top_p = 1}};
        if (c->hot) r.sampling = (aff_sampling){.temperature = 1, .top_p = 0.95, .seed = (uint64_t)i};
        must(aff__engine_submit(e, &r, &(aff_events){.ctx = it, .logits = c->logits ? on_logits : NULL, .token = on_token, .done = on_done}, &id, &err));
    }
    while (aff__engine_step(e)) continue;
    aff__engine_draft_stats(e, &s);
    aff__engine_free(e);
    return s;
}

/* ---- matrix ---- */

static int matrix(void)
{
    static const int64_t chunks[] = {1, 7, 128, 1408};
    static struct {
        int n;
        int32_t got[LONGEST];
        uint64_t logits;
    } want[MOST];
    int bad = 0, turn = 0;
    for (int hot = 0; hot < 2; hot++) {
        run(&(setting){.width = -2, .slots = 1, .chunk = 256, .hot = hot, .logits = true, .kind = -1});
        int64_t total = 0;
        for (int i = 0; i < n_items; i++) {
            want[i].n = items[i].n;
            want[i].logits = items[i].logits;
            memcpy(want[i].got, items[i].got, sizeof want[i].got);
            total += items[i].n;
        }
        printf("%s: reference (no draft, 1 slot, chunks of 256): %d prompts, %lld tokens\n", hot ? "temperature 1, top-p 0.95, seed = number of the prompt" : "greedy",
               n_items, (long long)total);
        for (int slots = 1; slots <= 4; slots += 3)
            for (int width = -2; width <= AFF_MAX_WIDTH; width++, turn++) {
                const int64_t chunk = chunks[(turn + hot) % 4];
                const aff_draft_stats s = run(&(setting){.width = width, .slots = slots, .chunk = chunk, .hot = hot, .logits = true, .kind = -1});
                int differ = 0;
                for (int i = 0; i < n_items; i++)
                    differ += items[i].n != want[i].n || items[i].logits != want[i].logits || memcmp(items[i].got, want[i].got, sizeof(int32_t) * (size_t)want[i].n) != 0;
                char w[8];
                snprintf(w, sizeof w, "%d", width);
                printf("  width %-4s %d slot%s chunk %4lld: %d of %d differ; %.2f tokens a pass of a sequence\n", width == -2 ? "none" : width == -1 ? "auto" : w, slots,
                       slots > 1 ? "s" : " ", (long long)chunk, differ, n_items, (double)s.tokens / (double)s.passes);
                fflush(stdout);
                bad += differ;
            }
    }
    printf("%s\n", bad ? "FAILED" : "all equal, bit for bit");
    return bad ? 1 : 0;
}

/* ---- width ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Times of a pass of 1 .. 6 rows and of a draft, the lower decile of `rounds` interleaved measurements (what else runs on
 * the machine only ever adds to them). */
static void measure(aff_pass_times *t, int rounds)
{
    aff_runner *r;
    aff_seq *s;
    static double v[7][500];
    int32_t ids[64], d[64];
    float *l = malloc(sizeof(float) * 8 * (size_t)vocab), conf[64];
    for (int i = 0; i < 64; i++) ids[i] = items[i % n_items].prompt[1];
    must(aff__runner_create(&r, net, 1, &err));
    must(aff__seq_create(&s, net, 128, &err));
    must(aff__forward(r, &(aff_batch){.n = 64, .id = ids, .seq = s, .want_from = 64}, &err));
    for (int i = 0; i < rounds; i++)
        for (int k = 0; k <= 6; k++) {
            const uint64_t start = aff__now_ns();
            if (k)
                must(aff__forward_many(r, &(aff_batch){.n = k, .id = ids + i % 32, .seq = s, .logits = l}, 1, &err));
            else
                must(aff__draft_block(r, s, ids[i % 64], d, conf, NULL, NULL, NULL, &err));
            v[k][i] = (double)(aff__now_ns() - start);
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
    for (int i = 1; i <= AFF_PASS_ROWS; i++) *ns += (double)s->rows[i] * aff__time_of(t->verify, i) + (double)s->drafts[i] * aff__time_of(t->draft, i);
    return (double)s->tokens / *ns * 1e6;
}

/* One table of times: every fixed width and auto on each kind. Returns 1 if auto is not good enough. */
static int compare(const char *name, const aff_pass_times *t, bool hot)
{
    double got[AFF_MAX_WIDTH + 2][KINDS], ns[KINDS], best_sum = 0, sum;
    int bad = 0;
    printf("\n%s, %s: V(1..6) =", name, hot ? "temperature 1, top-p 0.95" : "greedy");
    for (int k = 1; k <= 6; k++) printf(" %.3f", t->verify[k] / 1e6);
    printf(" ms, draft %.3f ms\nwidth   tokens per ms: code    prose     chat   all three   tokens a pass (code prose chat)   drafts per 100 passes\n", t->draft[1] / 1e6);
    for (int w = 0; w <= AFF_MAX_WIDTH + 1; w++) {
        int64_t all = 0;
        double time = 0, per_pass[KINDS], share[KINDS];
        for (int k = 0; k < KINDS; k++) {
            const aff_draft_stats s = run(&(setting){.width = w > AFF_MAX_WIDTH ? AFF_WIDTH_AUTO : w, .slots = 1, .chunk = 256, .hot = hot, .kind = k, .times = t});
            got[w][k] = speed(&s, t, &ns[k]);
            per_pass[k] = (double)s.tokens / (double)s.passes;
            share[k] = 100.0 * (double)s.blocks / (double)s.passes;
            all += s.tokens;
            time += ns[k];
        }
        sum = (double)all / time * 1e6;
        printf("%-5c %24.4f %8.4f %8.4f %11.4f   %.2f %.2f %.2f   %.1f %.1f %.1f\n", w > AFF_MAX_WIDTH ? 'a' : '0' + w, got[w][0], got[w][1], got[w][2], sum, per_pass[0], per_pass[1], per_pass[2], share[0],
               share[1], share[2]);
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
    aff_pass_times measured = {{0}, {0}};
    int bad = 0;
    measure(&measured, 200);
    for (int hot = 0; hot < 2; hot++) bad |= compare("measured here", &measured, hot);
    /* The same text under the times of another machine: where a pass costs little more with more rows. */
    const aff_pass_times flat = {{0, 4.0e6, 4.2e6, 4.4e6, 4.6e6, 4.8e6, 5.0e6}, {0, 0.4e6}};
    for (int hot = 0; hot < 2; hot++) bad |= compare("times of a card (assumed)", &flat, hot);
    printf("\n%s\n", bad ? "FAILED" : "passed");
    return bad;
}

int main(int argc, char **argv)
{
    if (argc != 7 || (strcmp(argv[1], "matrix") && strcmp(argv[1], "width"))) {
        fprintf(stderr, "usage: check_engine matrix|width MODEL PROMPTS.jsonl TEXT COUNT TOKENS\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    tokens = atoi(argv[6]);
    if (tokens < 1 || tokens > LONGEST) tokens = LONGEST;
    must(aff__net_open(&net, argv[2], &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    must(aff__net_open(&plain, argv[2], &(aff_net_options){.numerics = AFF_FAST}, &err));
    vocab = aff__net_config(net)->vocab;
    read_prompts(argv[2], argv[3], argv[4], atoi(argv[5]) < MOST ? atoi(argv[5]) : MOST);
    const int code = argv[1][0] == 'm' ? matrix() : width();
    for (int i = 0; i < n_items; i++) free(items[i].prompt);
    aff__net_close(net);
    aff__net_close(plain);
    return code;
}
