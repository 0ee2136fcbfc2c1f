/* State of a million positions: bytes against the plan, resident memory against both, the time of a token against the
 * bytes that it reads. Usage: long_context FOLDER [threads]; the model is written into FOLDER.
 *
 * A few thousand tokens are run; the rows of later groups are copies of theirs, so that any position can be reached at
 * once. What a token costs does not depend on what the rows hold. */
#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/threads.h"
#include "model/forward.h"
#include "state/seq_internal.h"
#include "support/parity_model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { VOCAB = 512, RUN = 4096, TOKENS = 81 };
static aff_error err;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "long_context: %s\n", err.msg);
    exit(1);
}

static uint64_t resident(void)
{
    long long size, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%lld %lld", &size, &pages) != 2) exit(1);
    fclose(f);
    return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Moves a sequence on to `pos` without running anything. */
static void stretch(aff_seq *s, int64_t pos)
{
    must(aff__seq_grow(s, pos, &err));
    for (int i = 0; i < s->n_spans; i++) {
        const aff_span *sp = &s->span[i];
        uint8_t *rows = (uint8_t *)s->region + sp->off;
        const int64_t have = s->pos / sp->ratio, want = pos / sp->ratio;
        for (int64_t g = have; g < want; g++)
            memcpy(rows + (uint64_t)g * sp->row_bytes, rows + (uint64_t)(g % have) * sp->row_bytes, sp->row_bytes);
    }
    s->pos = s->high = pos;
}

static int by_time(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* One thread is timed by its own processor clock, so that other work on the machine disturbs less; several by the wall
 * clock. */
static bool alone;
static uint64_t time_ns(void)
{
    struct timespec t;
    clock_gettime(alone ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

typedef struct {
    const uint64_t *p;
    int64_t n;
    uint64_t sum[64];
} sweep;

static void sum_task(void *ctx, int64_t task, int thread)
{
    sweep *w = ctx;
    uint64_t s[8] = {0};
    const uint64_t *p = w->p + task * w->n;
    for (int64_t i = 0; i < w->n; i += 8)
        for (int k = 0; k < 8; k++) s[k] += p[i + k];
    for (int k = 0; k < 8; k++) w->sum[thread % 64] += s[k];
}

enum { TASKS = 64, WORDS = 1 << 17 };
static aff_pool *pool;
static uint64_t *memory; /* [TASKS * WORDS], more than the caches hold */
static double rate;      /* GB/s of reading it with all threads, the best so far */

static void read_memory(void)
{
    sweep w = {.p = memory, .n = WORDS};
    const uint64_t at = time_ns();
    aff__pool_run(pool, sum_task, &w, TASKS);
    const double now = (double)TASKS * WORDS * 8 / (double)(time_ns() - at);
    rate = now > rate ? now : rate;
}

/* The best time of a token, in ms, with measurements of the memory in between: other work on the machine only adds, and
 * meets both. */
static double token_ms(aff_runner *r, aff_seq *s, uint64_t *seed)
{
    uint64_t t[TOKENS];
    float logits[VOCAB];
    for (int i = 0; i < TOKENS; i++) {
        const int32_t id = (int32_t)(aff__splitmix64(seed) % VOCAB);
        const aff_batch b = {.n = 1, .id = &id, .seq = s, .want_from = 0, .logits = logits};
        if (i % 8 == 7) read_memory();
        const uint64_t at = time_ns();
        must(aff__forward(r, &b, &err));
        t[i] = time_ns() - at;
    }
    qsort(t, TOKENS, sizeof *t, by_time);
    printf("  %d tokens to %lld: best %.3f ms, median %.3f ms\n", TOKENS, (long long)aff__seq_pos(s),
           (double)t[0] * 1e-6, (double)t[TOKENS / 2] * 1e-6);
    return (double)t[0] * 1e-6;
}

/* Bytes of rows that a token at `pos` reads. */
static double bytes_read(const aff_seq *s, const aff_config *c, int64_t pos)
{
    double n = 0;
    for (int l = 0; l < s->n_layers; l++) {
        const int ratio = c->ratio[l];
        if (!ratio) continue;
        const double groups = (double)(pos / ratio);
        n += (ratio == 4 ? (double)c->index_topk : groups) * s->row.bytes + (ratio == 4 ? groups * s->key.bytes : 0);
    }
    return n;
}

static int failures;
static void verdict(const char *what, bool ok)
{
    printf("%-64s %s\n", what, ok ? "ok" : "FAILED");
    failures += !ok;
}

int main(int argc, char **argv)
{
    const int threads = argc > 2 ? atoi(argv[2]) : 0;
    alone = threads == 1;
    const int64_t million = 1048576, some = 65536;
    uint64_t seed = 1;
    if (argc < 2 || aff_test_write_parity_model("long", argv[1]) != 0) {
        fprintf(stderr, "usage: long_context FOLDER [threads]\n");
        return 2;
    }
    aff_net *net;
    aff_runner *r;
    aff_seq *s;
    aff_seq_plan plan;
    must(aff__net_open(&net, argv[1], &(aff_net_options){.numerics = AFF_FAST}, &err));
    const aff_config *c = aff__net_config(net);
    must(aff__runner_create(&r, net, threads, &err));
    must(aff__seq_plan(&plan, net, million, &err));
    must(aff__pool_create(&pool, threads, &err));
    must(aff__calloc(&memory, (uint64_t)TASKS * WORDS, sizeof *memory, "memory to read", &err));
    memset(memory, 1, (size_t)TASKS * WORDS * sizeof *memory);
    printf("%d threads%s\n", aff__pool_threads(pool), alone ? ", times by its processor clock" : "");
    printf("hidden %d, ratios %d %d %d, head_dim %d, %d heads, %d index heads of %d, top-k %d\n", c->hidden,
           c->ratio[0], c->ratio[1], c->ratio[2], c->head_dim, c->heads, c->index_heads, c->index_dim, c->index_topk);
    printf("plan at %lld positions, bytes: raw rings %llu, histories %llu, copy of the rings %llu, compressed rows "
           "%llu, indexer keys %llu, total %llu\n",
           (long long)million, (unsigned long long)plan.raw, (unsigned long long)plan.history,
           (unsigned long long)plan.copy, (unsigned long long)plan.rows, (unsigned long long)plan.keys,
           (unsigned long long)plan.total);
    printf("bytes a position %.4f (row %llu, key %llu)\n", plan.per_position, (unsigned long long)plan.row_bytes,
           (unsigned long long)plan.key_bytes);
    aff_seq *other; /* touches weights and scratch first, so that what grows below is the state */
    must(aff__seq_create(&other, net, 512, &err));
    const aff_batch touch = {.n = 256, .id = calloc(256, sizeof(int32_t)), .seq = other, .want_from = 256};
    must(aff__forward(r, &touch, &err));
    aff__seq_free(other);
    const uint64_t before = resident();
    must(aff__seq_open(&s, net, &(aff_seq_options){0}, &err));
    for (int at = 0; at < RUN; at += 256) {
        int32_t id[256];
        for (int i = 0; i < 256; i++) id[i] = (int32_t)(aff__splitmix64(&seed) % VOCAB);
        const aff_batch b = {.n = 256, .id = id, .seq = s, .want_from = 256};
        must(aff__forward(r, &b, &err));
    }
    stretch(s, some - TOKENS);
    token_ms(r, s, &seed); /* warm */
    must(aff__seq_rollback(s, some - AFF_MAX_ROLLBACK, &err));
    s->pos = s->high = some - TOKENS;
    const double t64 = token_ms(r, s, &seed);
    stretch(s, million - TOKENS);
    must(aff__seq_grow(s, million, &err));
    const uint64_t grown = resident() - before; /* before the scores of a million positions take scratch */
    const double t1m = token_ms(r, s, &seed);
    const uint64_t committed = aff__seq_committed(s);
    const double added = bytes_read(s, c, million) - bytes_read(s, c, some);
    const double limit = 1.2 * (t64 + added / rate * 1e-6);
    printf("committed %llu, resident memory grew by %llu (%+.2f %% of the plan)\n", (unsigned long long)committed,
           (unsigned long long)grown, 100 * ((double)grown / (double)plan.total - 1));
    printf(
        "a token: %.3f ms at %lld, %.3f ms at %lld; %.2f MB more are read; memory reads at %.1f GB/s; limit %.3f ms\n",
        t64, (long long)some, t1m, (long long)million, added * 1e-6, rate, limit);
    verdict("state bytes equal the plan", committed == plan.total && aff__seq_backed(s) == million);
    verdict("resident memory within 2 %",
            (double)grown < 1.02 * (double)plan.total && (double)grown > 0.98 * (double)plan.total);
    verdict("a token at 1M within 1.2 x (time at 64K + added bytes / rate)", t1m <= limit);
    aff__seq_free(s);
    aff__runner_free(r);
    aff__net_close(net);
    aff__pool_free(pool);
    free(memory);
    return failures != 0;
}
