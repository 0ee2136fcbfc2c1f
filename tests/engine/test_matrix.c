/* The engine's promise on a model that says something: every setting gives the same text and the same logits, bit for
 * bit.
 *
 * Settings: draft not loaded, auto, 1 .. 5 verified tokens; 1 slot, or 4 that are all busy; chunks of 1, 7, 128, 1408;
 * prompt recomputed, or its beginning restored from a prefix cache on disk; greedy, and sampled at temperature 1, top-p
 * 0.95 with the prompt's number as seed. 28 rows hold every pair of the first four, each with both ways of sampling;
 * every prompt runs in several rows, spread so that every row gets its share. The reference is one slot, no draft,
 * chunks of 256, no cache.
 *
 * Then answers at many lengths: a note in the middle of a text, and words to repeat after one, at every length of a
 * range that covers all residues mod 128; four consecutive lengths also token by token.
 *
 *   test_matrix                                   a few prompts and lengths (ctest)
 *   test_matrix --full [PROMPTS TOKENS ROWS]      500 prompts, 48 tokens, 6 rows each (scripts/check engine)
 *
 * --only NAME runs one test; before it --greedy or --sampled half of the matrix; before that --part I/N the prompts i with i mod N = I, for
 * several processes. */
#include "base/rng.h"
#include "engine/cache.h"
#include "engine/prompts.h"
#include "support/test.h"
#include <unistd.h>

enum { LONGEST = 256, WIDTHS = 7, CHUNKS = 4, ROWS = WIDTHS * CHUNKS, NO_DRAFT = -2 };
static const int widths[WIDTHS] = {NO_DRAFT, AFF_WIDTH_AUTO, 1, 2, 3, 4, 5};
static const int64_t chunks[CHUNKS] = {1, 7, 128, 1408};
static char root[] = "/tmp/aff-matrix-XXXXXX";
static bool full;
static int from_hot = 0, to_hot = 2, part = 0, parts = 1;
static int count = 24, tokens = 12, each = 2, threads = 1, vocab;
static aff_net *net, *plain;
static aff_tokenizer *tok;

typedef struct setting {
    int width, slots;
    int64_t chunk;
    bool restored;
} setting;

/* Every pair of values of two factors is in some row. */
static setting row_of(int r)
{
    const int w = r / CHUNKS, c = r % CHUNKS;
    return (setting){widths[w], (w + c) % 2 ? 4 : 1, chunks[c], (w + c / 2) % 2};
}

typedef struct run {
    int n;
    int32_t got[LONGEST];
    uint64_t rows[2]; /* hashes of the logits: of the prompt's rows but the last, of the others */
    int n_prompt;
    int64_t restored;
    bool done;
} run;

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

static aff_status on_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *e)
{
    run *x = ctx;
    for (int i = 0; i < rows; i++) {
        uint64_t *h = &x->rows[pos + i >= x->n_prompt - 1];
        *h = hash_floats(*h, logits + (int64_t)i * vocab, vocab);
    }
    return AFF_OK;
}
static bool on_token(void *ctx, const aff_token *t)
{
    run *x = ctx;
    if (x->n == LONGEST) return false;
    x->got[x->n++] = t->id;
    return true;
}
static void on_done(void *ctx, aff_status s, const aff_outcome *o, const aff_error *e)
{
    run *x = ctx;
    if (s != AFF_OK) fail_msg("%s", e->msg);
    x->restored = o->restored;
    x->done = true;
}

static aff_engine *make_engine(const setting *c, aff_prefix *cache, int64_t context)
{
    aff_engine *e;
    aff_engine_options o = {.threads = threads,
                            .slots = c->slots,
                            .queue = 2 * MOST_PROMPTS,
                            .context = context,
                            .chunk = c->chunk,
                            .width = c->width == NO_DRAFT ? 0 : c->width,
                            .kv_margin = 256};
    if (cache) o.cache = aff__engine_cache_on(cache);
    must(aff__engine_create(&e, c->width == NO_DRAFT ? plain : net, &o, &err));
    return e;
}

static aff_prefix *make_cache(const char *name, const aff_net *n)
{
    aff_prefix *p;
    char dir[128];
    snprintf(dir, sizeof dir, "%s/%s", root, name);
    must(aff__prefix_open(&p, n, &(aff_prefix_options){.dir = dir, .bytes = UINT64_C(1) << 30, .block = 48}, &err));
    return p;
}

static void ask(aff_engine *e, const int32_t *ids, int n, int predict, bool hot, uint64_t seed, int64_t from, run *x)
{
    uint64_t id;
    *x = (run){.n_prompt = n, .rows = {1, 1}};
    aff_request r = {.prompt = ids, .n_prompt = n, .n_predict = predict, .logits_from = from, .sampling = {.top_p = 1}};
    if (hot) r.sampling = (aff_sampling){.temperature = 1, .top_p = 0.95, .seed = seed};
    must(aff__engine_submit(e, &r, &(aff_events){.ctx = x, .logits = on_logits, .token = on_token, .done = on_done},
                            &id, &err));
}

/* ---- the matrix ---- */

static bool mine(int i) { return i % parts == part; }

static bool runs_in(int i, int r)
{
    for (int k = 0; k < each; k++)
        if ((i * 11 + k * ROWS / each + k) % ROWS == r) return true;
    return each == ROWS;
}

/* The prompts of one row. Returns how many differ from `want`. */
static int run_row(int r, bool hot, const run *want, int64_t counts[3])
{
    static run got[MOST_PROMPTS], before;
    const setting c = row_of(r);
    char name[32];
    int differ = 0;
    snprintf(name, sizeof name, "row-%d-%d", r, hot);
    aff_prefix *cache = c.restored ? make_cache(name, c.width == NO_DRAFT ? plain : net) : NULL;
    aff_engine *e = make_engine(&c, cache, 4096);
    for (int i = 0; cache && i < n_prompts; i++)
        if (mine(i) && runs_in(i, r) && prompts[i].n > 1) { /* a beginning of any length, not of a group or a block */
            ask(e, prompts[i].ids, 1 + (i * 7919 + r) % (prompts[i].n - 1), 0, false, 0, INT64_MAX, &before);
            while (aff__engine_step(e)) continue;
        }
    for (int i = 0; i < n_prompts; i++)
        if (mine(i) && runs_in(i, r))
            ask(e, prompts[i].ids, prompts[i].n, tokens, hot, (uint64_t)i, i % 2 || c.restored ? prompts[i].n - 1 : 0,
                &got[i]);
    while (aff__engine_step(e)) continue;
    for (int i = 0; i < n_prompts; i++) {
        if (!mine(i) || !runs_in(i, r)) continue;
        const run *w = &want[i], *g = &got[i];
        const bool all_rows = !(i % 2) && !c.restored;
        if (!g->done) fail_msg("prompt %d did not end", i);
        if (c.restored && prompts[i].n > 1 && g->restored < 1) fail_msg("prompt %d was not restored", i);
        differ += g->n != w->n || memcmp(g->got, w->got, sizeof(int32_t) * (size_t)w->n) != 0 ||
                  g->rows[1] != w->rows[1] || (all_rows && g->rows[0] != w->rows[0]);
        counts[0]++;
        counts[1] += g->n;
        counts[2] += g->restored;
    }
    aff__engine_free(e);
    if (cache) aff__prefix_close(cache);
    return differ;
}

/* Every pair of values of width, slots, chunk and restoring is run with at least `least` prompts. Returns that number.
 */
static int covered_pairs(void)
{
    int per_row[ROWS] = {0}, least = MOST_PROMPTS;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < n_prompts; i++) per_row[r] += runs_in(i, r);
    for (int a = 0; a < 4; a++)
        for (int b = a + 1; b < 4; b++) {
            int n[7][7] = {{0}};
            static const int values[4] = {WIDTHS, 2, CHUNKS, 2};
            for (int r = 0; r < ROWS; r++) {
                const setting c = row_of(r);
                const int v[4] = {r / CHUNKS, c.slots == 4, r % CHUNKS, c.restored};
                n[v[a]][v[b]] += per_row[r];
            }
            for (int x = 0; x < values[a]; x++)
                for (int y = 0; y < values[b]; y++)
                    if (n[x][y] < least) least = n[x][y];
        }
    return least;
}

static void read_prompts(void)
{
    add_lines(tok, EVAL "facts.jsonl", NULL, OTHER, 0, full ? 1 : 6, count / 12);
    add_lines(tok, EVAL "facts-chat.jsonl", NULL, OTHER, 0, full ? 1 : 6, count / 12);
    add_lines(tok, EVAL "draft.jsonl", NULL, OTHER, 0, full ? 1 : 9, count / 3);
    add_lines(tok, EVAL "tools.jsonl", NULL, OTHER, 0, full ? 5 : 50, count / 25);
    add_lines(tok, EVAL "needles.jsonl", NULL, OTHER, 0, full ? 6 : 70, count / 50);
    add_beginnings(tok, EVAL "heldout.txt", 0, 1, count - n_prompts);
}

static void test_matrix(void **state)
{
    static run want[MOST_PROMPTS];
    int64_t all[3] = {0};
    int bad = 0;
    read_prompts();
    const int least = covered_pairs();
    assert_true(least > 0);
    if (full)
        printf("%d prompts (part %d of %d) of up to %d tokens, each in %d of %d rows, %s; every pair of settings with at least %d "
               "prompts\n",
               n_prompts, part, parts, tokens, each, ROWS,
               to_hot == 1 ? "greedy"
               : from_hot  ? "sampled"
                           : "greedy and sampled",
               least);
    for (int hot = from_hot; hot < to_hot; hot++) {
        aff_engine *e = make_engine(&(setting){NO_DRAFT, 1, 256, false}, NULL, 4096);
        int64_t n = 0, rows = 0;
        for (int i = 0; i < n_prompts; i++)
            if (mine(i)) ask(e, prompts[i].ids, prompts[i].n, tokens, hot, (uint64_t)i, 0, &want[i]);
        while (aff__engine_step(e)) continue;
        aff__engine_free(e);
        for (int i = 0; i < n_prompts; i++) {
            n += mine(i) ? want[i].n : 0;
            rows += mine(i) ? prompts[i].n : 0;
        }
        if (full)
            printf("%s: reference: %lld prompt tokens, %lld tokens of text\n",
                   hot ? "temperature 1, top-p 0.95" : "greedy", (long long)rows, (long long)n);
        for (int r = 0; r < ROWS; r++) {
            const setting c = row_of(r);
            char w[8];
            int64_t counts[3] = {0};
            const int differ = run_row(r, hot, want, counts);
            snprintf(w, sizeof w, "%d", c.width);
            if (full || differ)
                printf("  width %-4s %d slot%s chunk %4lld %-10s: %d of %lld differ (%lld tokens, %lld restored)\n",
                       c.width == NO_DRAFT ? "none"
                       : c.width < 0       ? "auto"
                                           : w,
                       c.slots, c.slots > 1 ? "s" : " ", (long long)c.chunk, c.restored ? "restored" : "recomputed",
                       differ, (long long)counts[0], (long long)counts[1], (long long)counts[2]);
            for (int k = 0; k < 3; k++) all[k] += counts[k];
            bad += differ;
        }
    }
    if (full)
        printf("%lld runs, %lld tokens, %lld prompt tokens restored: %d differ\n", (long long)all[0], (long long)all[1],
               (long long)all[2], bad);
    free_prompts();
    assert_int_equal(bad, 0);
}

/* ---- answers at many lengths ---- */

/* A note in a text, and the question for it; or words and the request to copy them. Sizes: 128 lengths from each on. */
typedef struct task {
    const char *head, *note, *question, *answer;
    int sizes[3];
} task;

static const task tasks[] = {
    {"You are a helpful assistant.<｜User｜>",
     "\nThe owner of the calm door is busy flute.\n",
     "\n\nWho is the owner of the calm door?<｜Assistant｜></think>",
     "The owner of the calm door is busy flute.",
     {320, 704, 1344}},
    {"Words:",
     " planet mouse large Ivan train slow southern happy frog Karl",
     "\nCopy:",
     " planet mouse large Ivan train slow southern happy frog Karl",
     {48, 176, 304}},
};

/* Words that the model copies. */
static char *random_words(int n)
{
    static const char *const words[] = {
        "ship",    "ant",   "plain",   "silver", "drum",    "hunter", "basket", "tower",  "sailor", "ancient", "sharp",
        "wooden",  "Tara",  "rich",    "weak",   "red",     "green",  "mirror", "nearby", "river",  "shoe",    "bread",
        "kitchen", "table", "library", "baker",  "curtain", "frog",   "happy",  "slow",   "train",  "mouse"};
    uint64_t seed = 3;
    char *text = malloc((size_t)n * 10), *at = text;
    for (int i = 0; i < n; i++)
        at += sprintf(at, " %s", words[aff__splitmix64(&seed) % (sizeof words / sizeof *words)]);
    return text;
}

/* A prompt of exactly n tokens: head, filler, note, filler, question; the note a third of the way, words to copy at the
 * front. */
static int build(const task *t, const int32_t *filler, int n, int32_t *out)
{
    int32_t *head, *note, *question;
    const int h = ids_of(tok, t->head, strlen(t->head), true, &head),
              m = ids_of(tok, t->note, strlen(t->note), false, &note),
              q = ids_of(tok, t->question, strlen(t->question), false, &question);
    const int room = n - h - m - q, first = t->note[0] == ' ' ? 0 : room / 3;
    assert_true(room > 0);
    int32_t *at = out;
    memcpy(at, head, sizeof *at * (size_t)h), at += h;
    memcpy(at, filler, sizeof *at * (size_t)first), at += first;
    memcpy(at, note, sizeof *at * (size_t)m), at += m;
    memcpy(at, filler + first, sizeof *at * (size_t)(room - first)), at += room - first;
    memcpy(at, question, sizeof *at * (size_t)q), at += q;
    free(head);
    free(note);
    free(question);
    return (int)(at - out);
}

/* Whether the tokens begin with the answer. */
static bool says(const run *x, const char *answer)
{
    char text[2048];
    size_t n = 0, len;
    for (int i = 0; i < x->n; i++) {
        const char *b = aff__tokenizer_bytes(tok, (uint32_t)x->got[i], &len);
        if (n + len >= sizeof text) break;
        memcpy(text + n, b, len);
        n += len;
    }
    return n >= strlen(answer) && memcmp(text, answer, strlen(answer)) == 0;
}

/* One task at 128 lengths from `size` on, `step` apart. */
static void lengths(const task *t, const char *name, const int32_t *filler, int size, int step)
{
    static run a, b, c;
    static int32_t ids[4096];
    int right = 0, differ = 0, n_lengths = 0;
    aff_prefix *cache = make_cache(name, net);
    aff_engine *fresh = make_engine(&(setting){AFF_WIDTH_AUTO, 1, 256, false}, cache, 4096),
               *again = make_engine(&(setting){5, 1, 100, true}, cache, 4096),
               *slow = make_engine(&(setting){NO_DRAFT, 1, 1, false}, NULL, 4096);
    for (int r = 0; r < 128; r += step, n_lengths++) {
        const int n = build(t, filler, size + r, ids);
        assert_int_equal(n, size + r);
        ask(fresh, ids, n, 16, false, 0, n - 1, &a);
        while (aff__engine_step(fresh)) continue;
        ask(again, ids, n, 16, false, 0, n - 1, &b); /* all of it restored, at this residue */
        while (aff__engine_step(again)) continue;
        assert_int_equal(b.restored, n - 1);
        differ += a.n != b.n || memcmp(a.got, b.got, sizeof *a.got * (size_t)a.n) != 0 || a.rows[1] != b.rows[1];
        if (r < 4 || !full) {
            ask(slow, ids, n, 16, false, 0, n - 1, &c);
            while (aff__engine_step(slow)) continue;
            differ += a.n != c.n || memcmp(a.got, c.got, sizeof *a.got * (size_t)a.n) != 0 || a.rows[1] != c.rows[1];
        }
        right += says(&a, t->answer);
    }
    aff__engine_free(fresh);
    aff__engine_free(again);
    aff__engine_free(slow);
    aff__prefix_close(cache);
    if (full || differ || right < n_lengths)
        printf("%d to %d tokens: %d of %d answers are \"%s\"; %d differ between fresh, restored and token by token\n",
               size, size + 127, right, n_lengths, t->answer, differ);
    assert_int_equal(differ, 0);
    assert_int_equal(right, n_lengths);
}

static void test_lengths(void **state)
{
    char *text, *words = random_words(600);
    size_t size;
    int32_t *filler[2];
    must(aff__read_file(EVAL "heldout.txt", 1 << 28, &text, &size, &err));
    ids_of(tok, text, size < 20000 ? size : 20000, false, &filler[0]);
    ids_of(tok, words, strlen(words), false, &filler[1]);
    for (size_t k = 0; k < sizeof tasks / sizeof *tasks; k++)
        for (int s = 0; s < (full ? 3 : 1); s++) {
            char name[32];
            snprintf(name, sizeof name, "lengths-%zu-%d", k, s);
            lengths(&tasks[k], name, filler[tasks[k].note[0] == ' '], full ? tasks[k].sizes[s] : 64 + 80 * (int)(1 - k),
                    full ? 1 : 43);
        }
    free(filler[0]);
    free(filler[1]);
    free(text);
    free(words);
}

static int setup(void **state)
{
    must(aff__net_open(&net, MODEL, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    must(aff__net_open(&plain, MODEL, &(aff_net_options){.numerics = AFF_FAST}, &err));
    must(aff__tokenizer_open_for(&tok, MODEL, aff__net_config(net), &err));
    vocab = aff__net_config(net)->vocab;
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[64];
    aff__net_close(net);
    aff__net_close(plain);
    aff__tokenizer_free(tok);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[argc - 2], "--only") == 0) {
        cmocka_set_test_filter(argv[argc - 1]);
        argc -= 2;
    }
    if (argc > 1 && strcmp(argv[argc - 1], "--greedy") == 0) to_hot = 1, argc--;
    if (argc > 1 && strcmp(argv[argc - 1], "--sampled") == 0) from_hot = 1, argc--;
    const bool cut = argc > 2 && strcmp(argv[argc - 2], "--part") == 0;
    if (cut) {
        char *end;
        part = (int)strtol(argv[argc - 1], &end, 10);
        parts = *end == '/' ? atoi(end + 1) : 0;
        argc -= 2;
    }
    full = argc > 1 && strcmp(argv[1], "--full") == 0;
    if (full) {
        count = argc > 2 ? atoi(argv[2]) : 500;
        tokens = argc > 3 ? atoi(argv[3]) : 48;
        each = argc > 4 ? atoi(argv[4]) : 6;
        setvbuf(stdout, NULL, _IOLBF, 0);
    }
    if ((cut && (parts < 1 || part < 0 || part >= parts)) || count < 12 || count > MOST_PROMPTS || tokens < 1 || tokens > LONGEST || each < 1 || each > ROWS) {
        fprintf(stderr, "usage: test_matrix [--full [PROMPTS [TOKENS [ROWS]]]] [--part I/N] [--greedy | --sampled] [--only NAME]\n");
        return 2;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_matrix), cmocka_unit_test(test_lengths)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
