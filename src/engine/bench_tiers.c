#include "engine/bench_tiers.h"
#include "base/mem.h"
#include "base/rng.h"
#include "experts/hitgen.h"
#include <stdlib.h>

aff_status aff__bench_rates(const char *flag, const char *list, aff_bench_rates *out, aff_error *err)
{
    *out = (aff_bench_rates){0};
    for (const char *p = list; *p;) {
        char *end;
        const double v = strtod(p, &end);
        if (end == p || (*end && *end != ',') || (*end == ',' && !end[1]) || !(v >= 0 && v <= 1))
            return aff__fail(err, AFF_E_INVALID, "%s: expected numbers of 0 to 1 with commas between them, got '%s'", flag, list);
        if (out->n == AFF_BENCH_RATES) return aff__fail(err, AFF_E_INVALID, "%s: expected at most %d numbers", flag, AFF_BENCH_RATES);
        out->rate[out->n++] = v;
        p = *end ? end + 1 : end;
    }
    if (!out->n) return aff__fail(err, AFF_E_INVALID, "%s: expected a number of 0 to 1, got nothing", flag);
    return AFF_OK;
}

typedef struct {
    const aff_bench_tiers *b;
    int layers, experts, picks;
    int64_t vocab;
    int32_t *prompt, *forced; /* [context] [tokens] */
    uint8_t *tier;            /* [layers][experts] */
    int32_t *table, *guess;   /* [layers][vocab][picks], device */
    double all;               /* ms a token with every pick in the fastest tier */
} work;

typedef struct {
    double ms;                 /* a token */
    int64_t picks[AFF_TIERS];  /* of all tokens */
    aff_tier_counters n;       /* device */
} result;

static const double UNPREDICTED = -1; /* as a recall */

static aff_status make(work *w, aff_error *err)
{
    const aff_bench_tiers *b = w->b;
    const aff_config *c = aff__net_config(b->net);
    uint64_t seed = b->seed;
    w->layers = aff__net_layers(b->net);
    w->experts = c->experts;
    w->picks = c->picks;
    w->vocab = c->vocab;
    AFF_TRY(aff__calloc(&w->prompt, (uint64_t)b->context, sizeof *w->prompt, "tokens", err));
    AFF_TRY(aff__calloc(&w->forced, (uint64_t)b->tokens, sizeof *w->forced, "tokens", err));
    for (int64_t i = 0; i < b->context; i++) w->prompt[i] = (int32_t)(aff__splitmix64(&seed) % (uint64_t)w->vocab);
    for (int64_t i = 0; i < b->tokens; i++) w->forced[i] = (int32_t)(aff__splitmix64(&seed) % (uint64_t)w->vocab);
    AFF_TRY(aff__calloc(&w->tier, (uint64_t)w->layers, (uint64_t)w->experts, "tiers", err));
    if (!b->device) {
        aff__net_tiers(b->net, w->tier);
        return AFF_OK;
    }
    aff__engine_tiers(b->engine, w->tier);
    const uint64_t rows = (uint64_t)w->layers * (uint64_t)w->vocab, row = (uint64_t)w->picks * sizeof *w->table;
    AFF_TRY(aff__calloc(&w->table, rows, row, "forced routes", err));
    return aff__calloc(&w->guess, rows, row, "forced routes", err);
}

/* Tiers of the picks of the passes that made the answer: their tokens are the prompt's last and the forced ones but the last. Keys are tokens on a device,
 * positions on the CPU. */
static void count(const work *w, const aff_hitgen *g, result *r)
{
    int32_t pick[AFF_HITGEN_PICKS];
    for (int64_t i = 0; i < w->b->tokens; i++) {
        const int32_t id = i ? w->forced[i - 1] : w->prompt[w->b->context - 1];
        const int64_t key = w->b->device ? id : w->b->context - 1 + i;
        for (int l = 0; l < w->layers; l++) {
            aff__hitgen_pick(g, l, (uint64_t)key, pick);
            for (int k = 0; k < w->picks; k++) r->picks[w->tier[l * w->experts + pick[k]]]++;
        }
    }
}

static aff_status answer(work *w, const aff_hitgen *g, int64_t tokens, result *r, aff_error *err)
{
    const aff_bench_tiers *b = w->b;
    aff_outcome o;
    aff_request q = {.prompt = w->prompt, .n_prompt = b->context, .n_predict = tokens, .ignore_eos = true, .forced = w->forced, .n_forced = b->tokens};
    aff_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    b->routes->by_tier = b->device ? NULL : g;
    aff_snapshot before, after;
    aff__engine_snapshot(b->engine, &before, NULL);
    AFF_TRY(aff__engine_run(b->engine, &q, &(aff_events){0}, &o, err));
    aff__engine_snapshot(b->engine, &after, NULL);
    r->n = after.tiers;
    r->n.link_bytes -= before.tiers.link_bytes;
    r->n.prefetch_bytes -= before.tiers.prefetch_bytes;
    r->n.prefetch_asked -= before.tiers.prefetch_asked;
    r->n.prefetch_used -= before.tiers.prefetch_used;
    r->n.prefetch_wasted -= before.tiers.prefetch_wasted;
    r->n.prefetch_cancelled -= before.tiers.prefetch_cancelled;
    r->ms = (double)o.decode_ns / 1e6 / (double)o.decoded;
    count(w, g, r);
    return AFF_OK;
}

/* One rate: shares of the tiers, a short answer that is not counted, the one that is. */
static aff_status at_rate(work *w, double hits, double disk, double recall, result *r, aff_error *err)
{
    const aff_bench_tiers *b = w->b;
    aff_hitgen *g;
    aff_hitgen_options o = {.layers = w->layers, .experts = w->experts, .picks = w->picks, .tier = w->tier, .seed = b->seed};
    *r = (result){0};
    if (b->device) {
        o.share[AFF_TIER_CARD] = hits;
        o.share[AFF_TIER_HOST] = 1 - hits > disk ? 1 - hits - disk : 0;
    } else {
        o.share[AFF_TIER_HOST] = hits;
    }
    AFF_TRY(aff__hitgen_create(&g, &o, err));
    aff_status s = AFF_OK;
    result warm = {0};
    if (b->device) {
        const aff_forced f = {w->table, recall >= 0 ? w->guess : NULL, b->ahead};
        s = aff__hitgen_tables(g, w->vocab, recall, w->table, recall >= 0 ? w->guess : NULL, err);
        if (s == AFF_OK) s = aff__engine_force(b->engine, &f, err);
    }
    if (s == AFF_OK) s = answer(w, g, b->tokens < 4 ? b->tokens : 4, &warm, err);
    if (s == AFF_OK) s = answer(w, g, b->tokens, r, err);
    b->routes->by_tier = NULL;
    aff__hitgen_free(g);
    return s;
}

static void print_head(FILE *to)
{
    fputs("hit_rate,disk_rate,tokens,ms_tok,tok_s,picks_card,picks_host,picks_disk,link_mb_tok,wait_ms,link_gbs,memory_ms,link_ms,no_overlap_ms,of_no_overlap,"
          "overlap_ms,of_overlap,predict_recall,kernel_link_mb_tok,prefetch_mb_tok,prefetch_asked,prefetch_used,prefetch_wasted,prefetch_cancelled,wait_of_unpredicted\n",
          to);
}

/* alone: `wait_ms` of the same share of hits without predictions. */
static void print_line(const work *w, double hits, double disk, double recall, double alone, const result *r)
{
    const aff_bench_tiers *b = w->b;
    const double n = (double)b->tokens, expert = (double)aff__net_sizes(b->net).expert;
    const double near = (double)(b->device ? r->picks[AFF_TIER_CARD] : r->picks[AFF_TIER_HOST]), far = (double)(b->device ? r->picks[AFF_TIER_HOST] : 0);
    const double memory = ((double)aff__bench_dense(b->net, false) + (double)aff__bench_state(b->net, b->context, NULL) + near / n * expert) / b->memory_rate / 1e6,
                 link = b->link_rate > 0 ? far / n * expert / b->link_rate / 1e6 : 0, wait = r->ms - w->all, most = memory > link ? memory : link;
    fprintf(b->csv, "%.3f,%.3f,%lld,%.4f,%.3f,%.2f,%.2f,%.2f,%.3f,%.4f,", hits, disk, (long long)b->tokens, r->ms, 1000 / r->ms, (double)r->picks[AFF_TIER_CARD] / n,
            (double)r->picks[AFF_TIER_HOST] / n, (double)r->picks[AFF_TIER_DISK] / n, far / n * expert / 1e6, wait);
    if (far > 0 && wait > 0) fprintf(b->csv, "%.2f", far / n * expert / 1e6 / wait);
    fprintf(b->csv, ",%.4f,%.4f,%.4f,%.4f,%.4f,%.4f,", memory, link, memory + link, (memory + link) / r->ms, most, most / r->ms);
    if (recall >= 0) fprintf(b->csv, "%.3f", recall);
    fprintf(b->csv, ",%.3f,%.3f,%.2f,%.2f,%.2f,%.2f,", (double)r->n.link_bytes / 1e6 / n, (double)r->n.prefetch_bytes / 1e6 / n, (double)r->n.prefetch_asked / n,
            (double)r->n.prefetch_used / n, (double)r->n.prefetch_wasted / n, (double)r->n.prefetch_cancelled / n);
    if (recall >= 0 && alone > 0) fprintf(b->csv, "%.4f", wait / alone);
    fputc('\n', b->csv);
    fflush(b->csv);
}

static aff_status run(work *w, aff_error *err)
{
    const aff_bench_tiers *b = w->b;
    result r;
    print_head(b->csv);
    AFF_TRY(at_rate(w, 1, 0, UNPREDICTED, &r, err));
    w->all = r.ms;
    print_line(w, 1, 0, UNPREDICTED, 0, &r);
    for (int i = 0; i < b->hits.n; i++) {
        const double hits = b->hits.rate[i], disk = b->disk < 1 - hits ? b->disk : 1 - hits;
        AFF_TRY(at_rate(w, hits, disk, UNPREDICTED, &r, err));
        print_line(w, hits, b->device ? disk : 1 - hits, UNPREDICTED, 0, &r);
        const double alone = r.ms - w->all;
        for (int k = 0; k < b->recall.n; k++) {
            AFF_TRY(at_rate(w, hits, disk, b->recall.rate[k], &r, err));
            print_line(w, hits, disk, b->recall.rate[k], alone, &r);
        }
    }
    return AFF_OK;
}

aff_status aff__bench_tiers_run(const aff_bench_tiers *b, aff_error *err)
{
    work w = {.b = b};
    aff_status s = make(&w, err);
    if (s == AFF_OK) s = run(&w, err);
    void *const all[] = {w.prompt, w.forced, w.tier, w.table, w.guess};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return s;
}
