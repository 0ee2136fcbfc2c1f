/* aff-bench - speed of a model at growing contexts, as CSV. docs/bench.md describes every flag and column. */
#include "base/clock.h"
#include "base/cpu.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "engine/bench_tiers.h"
#include "engine/foresight.h"
#include "engine/setup.h"
#include "engine/text.h"
#include "model/synthetic.h"
#include "state/snapshot.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct flags {
    const char *model, *synthetic, *expert_file, *tokenizer, *text, *numerics, *dspark, *dspark_model, *width, *cpu_path, *out,
        *trace, *hits, *recall;
    int64_t layers, experts, seed, threads, chunk, from, most, decode;
    double skew, locality, rate, link_rate, disk;
    bool foresight;
    aff_setup setup;
} flags;

typedef struct app {
    flags f;
    aff_net *net;
    aff_engine *engine;
    aff_engine_options o;
    aff_synthetic synthetic;
    aff_bench_routes routes;
    aff_bench_rates recall, hits; /* n > 0: measure by tiers */
    aff_routegen *gen;
    int32_t *ids; /* [f.most] */
    double rate;  /* GB/s */
    FILE *csv;
    /* The state at the end of the last frontier's prompt: the next one goes on from there. */
    uint8_t *state;
    uint64_t state_size;
    int64_t state_pos;
    uint64_t outside_ns; /* spent on it */
} app;

static int complain(const aff_error *err, int code)
{
    fprintf(stderr, "aff-bench: %s\n", err->msg);
    return code;
}

static int parse(flags *f, int argc, char **argv)
{
    int first;
    *f = (flags){.numerics = "fast",
                 .width = "auto",
                 .from = 2048,
                 .decode = 64,
                 .skew = -1,
                 .locality = -1,
                 .setup = AFF_SETUP_NOTHING};
    const aff_option table[] = {
        {"model", 'm', AFF_OPT_STR, &f->model, "PATH", "Container (.aff) or checkpoint folder.", "Model"},
        {"synthetic", 0, AFF_OPT_STR, &f->synthetic, "flash|tiny",
         "Weights of that geometry made in memory instead; the text is noise."},
        {"layers", 0, AFF_OPT_INT, &f->layers, "N", "Of a synthetic model: the first N layers [all].", NULL, 1,
         AFF_MAX_LAYERS},
        {"experts", 0, AFF_OPT_INT, &f->experts, "N", "Of a synthetic model: routed experts a layer [all].", NULL, 1,
         65536},
        {"expert-file", 0, AFF_OPT_STR, &f->expert_file, "FILE",
         "Of a synthetic model: write its experts there and use them from there, as a container's."},
        {"seed", 0, AFF_OPT_INT, &f->seed, "N", "Of weights, routes and random tokens [0].", .max = 1e15},
        {"dspark", 0, AFF_OPT_STR, &f->dspark, "on|off",
         "Draft tokens ahead [on, if the model has a draft; off for synthetic ones].", "Speculation"},
        {"dspark-model", 0, AFF_OPT_STR, &f->dspark_model, "FILE", "The draft of a container [MODEL.dspark.aff]."},
        {"dspark-width", 0, AFF_OPT_STR, &f->width, "K", "Drafted tokens verified in a pass: 0 to 5, or auto [auto]."},
        {"ctx-min", 0, AFF_OPT_INT, &f->from, "N", "First context [2048].", "Measurement", 1, 1e9},
        {"ctx-max", 0, AFF_OPT_INT, &f->most, "N", "Last context; those between double [16384, the model's at most].",
         NULL, 1, 1e9},
        {"n-predict", 'n', AFF_OPT_INT, &f->decode, "N", "Tokens decoded at every context [64].", NULL, 1, 1e6},
        {"text", 0, AFF_OPT_STR, &f->text, "FILE", "A text to read, repeated as needed [random tokens]."},
        {"tokenizer", 0, AFF_OPT_STR, &f->tokenizer, "FILE", "For --text [the model's folder]."},
        {"out", 'o', AFF_OPT_STR, &f->out, "FILE", "Write the CSV there [standard output]."},
        {"memory-rate", 0, AFF_OPT_NUM, &f->rate, "GBS", "GB/s of the memory, for the floor [measured at the start].",
         NULL, 0.1, 1e6},
        {"numerics", 0, AFF_OPT_STR, &f->numerics, "MODE", "math, sim or fast [fast].", "Running"},
        {"prefill-chunk-size", 0, AFF_OPT_INT, &f->chunk, "N", "Prompt tokens per pass, 1 to 8192 [256, on a device 2048].", NULL, 1, AFF_MAX_PASS},
        {"threads", 0, AFF_OPT_INT, &f->threads, "N", "Threads [one per CPU].", NULL, 1, 4096},
        {"cpu-path", 0, AFF_OPT_STR, &f->cpu_path, "SET", "Use at most this instruction set: scalar, avx2 or avx512."},
        {"route-skew", 0, AFF_OPT_NUM, &f->skew, "S",
         "Force made-up routes: the expert of rank r is chosen in proportion to 1/(r+1)^S.", "Routes", 0, 10},
        {"route-locality", 0, AFF_OPT_NUM, &f->locality, "L",
         "Force made-up routes: the share of a token's experts that it keeps from the one before.", NULL, 0, 0.999},
        {"hit-rate", 0, AFF_OPT_STR, &f->hits, "H,..",
         "Force routes by where experts are: the share of picks that falls on the card (on the CPU: in memory); one line for each H."},
        {"disk-rate", 0, AFF_OPT_NUM, &f->disk, "D", "With --hit-rate and a card: the share on disk; the rest is in memory [0].", NULL, 0, 1},
        {"predict-recall", 0, AFF_OPT_STR, &f->recall, "R,..",
         "With --hit-rate and a card: predictions that are right with probability R, for fetching ahead; one line for each R, and one without."},
        {"link-rate", 0, AFF_OPT_NUM, &f->link_rate, "GBS", "With --hit-rate and a card: GB/s of its link, for the bounds.", NULL, 0.1, 1e6},
        {"route-trace", 0, AFF_OPT_STR, &f->trace, "FILE", "Write which experts every layer of every pass used."},
        {"foresight", 0, AFF_OPT_FLAG, &f->foresight, NULL,
         "Instead: how many of a layer's picks its router foretells from the streams of the layer before, over --ctx-max tokens of the text."},
        AFF_SETUP_DEVICE(&f->setup),
        AFF_SETUP_MEMORY(&f->setup),
        AFF_SETUP_EXPERTS(&f->setup),
        {0}};
    const aff_usage usage = {"aff-bench", "", "Measures prefill and decode of a DeepSeek-V4 model at growing contexts.",
                             table,       0,  0};
    return aff__options_main(&usage, argc, argv, &first);
}

static int index_of(const char *value, const char *const *names)
{
    for (int i = 0; names[i]; i++)
        if (strcmp(value, names[i]) == 0) return i;
    return -1;
}

static void warn(void *ctx, const char *line)
{
    fprintf(stderr, "aff-bench: %s\n", line);
}

static aff_status check_hits(app *a, bool device, aff_error *err)
{
    const flags *f = &a->f;
    if (!f->hits) {
        if (f->recall) return aff__fail(err, AFF_E_INVALID, "--predict-recall: expected --hit-rate with it");
        if (f->disk > 0 || f->link_rate > 0) return aff__fail(err, AFF_E_INVALID, "--disk-rate, --link-rate: expected --hit-rate with them");
        return AFF_OK;
    }
    if (f->skew >= 0 || f->locality >= 0 || f->trace)
        return aff__fail(err, AFF_E_INVALID, "--hit-rate: expected no other --route flag with it");
    if (f->dspark && strcmp(f->dspark, "on") == 0) return aff__fail(err, AFF_E_INVALID, "--hit-rate: expected --dspark off: it decodes forced tokens");
    if (device && (!f->rate || !f->link_rate))
        return aff__fail(err, AFF_E_INVALID, "--hit-rate on a card: expected --memory-rate and --link-rate, the GB/s of its memory and of its link");
    if (!device && (f->disk > 0 || f->link_rate > 0))
        return aff__fail(err, AFF_E_INVALID, "--disk-rate, --link-rate: expected a card (--device): on the CPU all that is no hit is on disk");
    if (f->recall && (!device || (f->setup.prefetch && strcmp(f->setup.prefetch, "off") == 0)))
        return aff__fail(err, AFF_E_INVALID, "--predict-recall: expected a card (--device) and no --prefetch off");
    if (f->recall) AFF_TRY(aff__bench_rates("--predict-recall", f->recall, &a->recall, err));
    return aff__bench_rates("--hit-rate", f->hits, &a->hits, err);
}

static aff_status check_flags(app *a, aff_net_options *no, aff_error *err)
{
    flags *f = &a->f;
    static const char *const modes[] = {"math", "sim", "fast", NULL},
                             *const paths[] = {"scalar", "avx2", "avx512", NULL},
                             *const switches[] = {"on", "off", NULL}, *const widths[] = {"0", "1", "2",    "3",
                                                                                         "4", "5", "auto", NULL};
    const int mode = index_of(f->numerics, modes), width = index_of(f->width, widths),
              path = f->cpu_path ? index_of(f->cpu_path, paths) : 0;
    AFF_TRY(aff__setup_check(&f->setup, err));
    if (!f->model == !f->synthetic)
        return aff__fail(err, AFF_E_INVALID, "expected a model: -m PATH or --synthetic flash|tiny, got %s",
                         f->model ? "both" : "none");
    if (!f->synthetic && (f->layers || f->experts || f->expert_file))
        return aff__fail(err, AFF_E_INVALID, "--layers, --experts, --expert-file: expected --synthetic with them");
    if (f->text && f->synthetic)
        return aff__fail(err, AFF_E_INVALID,
                         "--text and --synthetic: expected one of them: a synthetic model has no tokenizer");
    if (mode < 0) return aff__fail(err, AFF_E_INVALID, "--numerics: expected math, sim or fast, got '%s'", f->numerics);
    if (width < 0) return aff__fail(err, AFF_E_INVALID, "--dspark-width: expected 0 to 5 or auto, got '%s'", f->width);
    if (f->dspark && index_of(f->dspark, switches) < 0)
        return aff__fail(err, AFF_E_INVALID, "--dspark: expected on or off, got '%s'", f->dspark);
    if (path < 0)
        return aff__fail(err, AFF_E_INVALID, "--cpu-path: expected scalar, avx2 or avx512, got '%s'", f->cpu_path);
    if (f->cpu_path) aff__cpu_cap(path == 0 ? AFF_CPU_SCALAR : path == 1 ? AFF_CPU_AVX2 : AFF_CPU_AVX512);
    if (f->most && f->most < f->from)
        return aff__fail(err, AFF_E_INVALID, "--ctx-max: expected at least --ctx-min %lld, got %lld",
                         (long long)f->from, (long long)f->most);
    aff_device_spec device = {0};
    if (f->setup.device) AFF_TRY(aff__device_parse(&device, f->setup.device, err));
    const bool card = device.choice == AFF_DEVICE_RT;
    AFF_TRY(check_hits(a, card, err));
    if (f->synthetic) {
        a->synthetic = (aff_synthetic){.geometry = f->synthetic,
                                       .layers = (int)f->layers,
                                       .experts = (int)f->experts,
                                       .seed = (uint64_t)f->seed,
                                       .expert_file = f->expert_file,
                                       .on_demand = card && !f->expert_file};
        no->synthetic = &a->synthetic;
    }
    no->numerics = mode == 0 ? AFF_MATH : mode == 1 ? AFF_SIM : AFF_FAST;
    no->draft = f->dspark ? strcmp(f->dspark, "on") == 0 : !f->synthetic && !f->hits;
    no->draft_if_any = !f->dspark && !f->dspark_model;
    no->draft_path = f->dspark_model;
    a->o = (aff_engine_options){.threads = (int)f->threads,
                                .slots = 1,
                                .chunk = f->chunk,
                                .width = width > AFF_MAX_WIDTH ? AFF_WIDTH_AUTO : width};
    return AFF_OK;
}

/* ---- state between frontiers ---- */

static aff_status restore(void *ctx, aff_seq *seq, const int32_t *ids, int64_t n, int64_t most, int64_t *matched,
                          aff_error *err)
{
    app *a = ctx;
    const uint64_t start = aff__now_ns();
    *matched = 0;
    aff__seq_reset(seq);
    aff_status s = AFF_OK;
    if (a->state && a->state_pos <= most) s = aff__seq_restore(seq, a->state, a->state_size, err);
    a->outside_ns = aff__now_ns() - start;
    return s;
}

/* Called at the end of the prompt, and of the answer, which is of no use. */
static void publish(void *ctx, const aff_seq *seq, const int32_t *ids)
{
    app *a = ctx;
    const uint64_t start = aff__now_ns();
    if (!a->routes.counting) {
        free(a->state);
        a->state = NULL;
        if (aff__seq_snapshot(seq, &a->state, &a->state_size, NULL) == AFF_OK) a->state_pos = aff__seq_pos(seq);
        a->outside_ns += aff__now_ns() - start;
    }
    a->routes.counting = true; /* what follows is the answer */
}

/* ---- measuring ---- */

static aff_status fill_ids(app *a, aff_error *err)
{
    const flags *f = &a->f;
    aff_tokenizer *t = NULL;
    char *text = NULL, *beside = NULL;
    int32_t *from = NULL;
    int64_t n = 0;
    size_t size;
    AFF_TRY(aff__calloc(&a->ids, (uint64_t)f->most, sizeof *a->ids, "tokens", err));
    uint64_t seed = (uint64_t)f->seed;
    const int vocab = aff__net_config(a->net)->vocab;
    for (int64_t i = 0; i < f->most; i++) a->ids[i] = (int32_t)(aff__splitmix64(&seed) % (uint64_t)vocab);
    if (!f->text) return AFF_OK;
    aff_status s = AFF_OK;
    if (!f->tokenizer) s = aff__tokenizer_beside(f->model, &beside, err);
    if (s == AFF_OK && !f->tokenizer && !beside)
        s = aff__fail(err, AFF_E_INVALID, "%s: expected a tokenizer.json beside it, found none: give --tokenizer FILE",
                      f->model);
    if (s == AFF_OK)
        s = aff__tokenizer_open_for(&t, f->tokenizer ? f->tokenizer : beside, aff__net_config(a->net), err);
    if (s == AFF_OK) s = aff__read_file(f->text, 1 << 30, &text, &size, err);
    if (s == AFF_OK) s = aff__prompt_ids(t, text, size, f->text, &from, &n, err);
    for (int64_t i = 0; s == AFF_OK && i < f->most; i++) a->ids[i] = from[i % n];
    free(from);
    free(text);
    free(beside);
    aff__tokenizer_free(t);
    return s;
}

static void print_head(FILE *to)
{
    fputs("context,prefill_tokens,prefill_s,prefill_tok_s,decode_tokens,decode_s,decode_tok_s,passes,tokens_per_pass,"
          "rows_per_pass,drafts,"
          "accept_1,accept_2,accept_3,accept_4,accept_5,experts_per_pass_layer,hit_rate,dense_mb_tok,experts_mb_tok,"
          "state_mb_tok,mb_tok,floor_tok_s,of_floor\n",
          to);
}

/* One frontier's line. before, after: counts around it. */
static void print_line(const app *a, int64_t context, const aff_outcome *o, const aff_draft_stats *before,
                       const aff_draft_stats *after)
{
    const aff_bench_routes *r = &a->routes;
    const double tokens = (double)(after->tokens - before->tokens), expert = (double)aff__net_sizes(a->net).expert,
                 mb = 1e6 * tokens;
    double passes = 0, rows = 0, drafts = 0;
    for (int i = 1; i <= AFF_PASS_ROWS; i++) {
        passes += (double)(after->rows[i] - before->rows[i]);
        rows += (double)(after->rows[i] - before->rows[i]) * i;
        drafts += (double)(after->drafts[i] - before->drafts[i]);
    }
    const double dense =
                     passes * (double)aff__bench_dense(a->net, false) + drafts * (double)aff__bench_dense(a->net, true),
                 experts = (double)(r->used[0] + r->used[1]) * expert,
                 state = rows * (double)aff__bench_state(a->net, context, NULL), all = dense + experts + state;
    const double prefill_s = (double)(o->prefill_ns - a->outside_ns) / 1e9, decode_s = (double)o->decode_ns / 1e9,
                 floor_rate = a->rate * 1e9 * tokens / all;
    fprintf(a->csv, "%lld,%lld,%.4f,%.2f,%lld,%.4f,%.3f,%.0f,%.3f,%.3f,%.0f", (long long)context,
            (long long)o->prefilled, prefill_s, (double)o->prefilled / prefill_s, (long long)o->decoded, decode_s,
            tokens / decode_s, passes, tokens / passes, rows / passes, drafts);
    for (int i = 0; i < AFF_MAX_WIDTH; i++) {
        const int64_t offered = after->offered[i] - before->offered[i];
        if (offered)
            fprintf(a->csv, ",%.3f", (double)(after->accepted[i] - before->accepted[i]) / (double)offered);
        else
            fputs(",", a->csv);
    }
    const double used = (double)(r->used[0] + r->used[1]), hits = (double)(r->hits[0] + r->hits[1]);
    fprintf(a->csv, ",%.2f,%.4f,%.3f,%.3f,%.3f,%.3f,%.3f,%.4f\n",
            (double)r->used[0] / (passes * aff__net_layers(a->net)), used > 0 ? hits / used : 1, dense / mb,
            experts / mb, state / mb, all / mb, floor_rate, tokens / decode_s / floor_rate);
    fflush(a->csv);
}

/* A device's first passes of a kind are recorded, which takes a multiple of their time: tokens before the clock starts. */
enum { WARM = 4 };
typedef struct warming {
    const app *a;
    aff_draft_stats *before;
    int tokens;
    uint64_t at;
} warming;

static bool warmed(void *ctx, const aff_token *t)
{
    warming *w = ctx;
    if (++w->tokens == WARM) {
        aff__engine_draft_stats(w->a->engine, w->before);
        w->at = aff__now_ns();
    }
    return true;
}

static aff_status frontier(app *a, int64_t context, aff_error *err)
{
    aff_draft_stats before, after;
    aff_outcome o;
    const bool device = a->o.device.choice == AFF_DEVICE_RT;
    warming w = {.a = a, .before = &before};
    aff_request r = {.prompt = a->ids, .n_prompt = context, .n_predict = a->f.decode, .ignore_eos = true};
    aff_sampling_init(&r.sampling);
    r.sampling.temperature = 0;
    a->routes.counting = false;
    memset(a->routes.used, 0, sizeof a->routes.used);
    memset(a->routes.hits, 0, sizeof a->routes.hits);
    aff__engine_draft_stats(a->engine, &before);
    if (device) r.n_predict += WARM;
    AFF_TRY(aff__engine_run(a->engine, &r, &(aff_events){.ctx = &w, .token = device ? warmed : NULL}, &o, err));
    aff__engine_draft_stats(a->engine, &after);
    if (device && w.at) {
        o.decode_ns = aff__now_ns() - w.at;
        o.decoded -= WARM;
        before.tokens = after.tokens - o.decoded;
    }
    print_line(a, context, &o, &before, &after);
    return AFF_OK;
}

static aff_status make_routes(app *a, aff_error *err)
{
    const flags *f = &a->f;
    const aff_config *c = aff__net_config(a->net);
    if (f->skew >= 0 || f->locality >= 0) {
        const aff_routegen_options g = {aff__net_layers(a->net),
                                        c->experts,
                                        c->picks,
                                        f->skew >= 0 ? f->skew : 0,
                                        f->locality >= 0 ? f->locality : 0,
                                        (uint64_t)f->seed};
        AFF_TRY(aff__routegen_create(&a->gen, &g, err));
        a->routes.force = a->gen;
        fprintf(stderr, "aff-bench: routes are made up (skew %g, locality %g): the text is not the model's\n", g.skew,
                g.locality);
    }
    if (f->trace) AFF_TRY(aff__route_trace_open(&a->routes.trace, f->trace, a->net, err));
    if (a->o.device.choice == AFF_DEVICE_RT && a->hits.n) return AFF_OK;
    if (a->o.device.choice == AFF_DEVICE_RT && !a->gen && !f->trace) {
        fprintf(stderr, "aff-bench: a device's routes are not seen: the columns about experts and the floor leave them out\n");
        return AFF_OK;
    }
    a->o.route = aff__bench_route;
    a->o.route_ctx = &a->routes;
    return AFF_OK;
}

static aff_status by_tiers(app *a, aff_error *err)
{
    const flags *f = &a->f;
    fprintf(stderr, "aff-bench: routes are dealt to the tiers: the text is not the model's\n");
    return aff__bench_tiers_run(&(aff_bench_tiers){.net = a->net,
                                                   .engine = a->engine,
                                                   .routes = &a->routes,
                                                   .device = a->o.device.choice == AFF_DEVICE_RT,
                                                   .hits = a->hits,
                                                   .disk = f->disk,
                                                   .recall = a->recall,
                                                   .ahead = f->setup.prefetch_ahead ? (int)f->setup.prefetch_ahead : 1,
                                                   .context = f->from,
                                                   .tokens = f->decode,
                                                   .seed = (uint64_t)f->seed,
                                                   .memory_rate = a->rate,
                                                   .link_rate = f->link_rate,
                                                   .csv = a->csv},
                                err);
}

static aff_status prepare(app *a, const aff_memplan *p, aff_error *err)
{
    const flags *f = &a->f;
    AFF_TRY(make_routes(a, err));
    a->rate = f->rate;
    if (!f->rate)
        AFF_TRY(aff__bench_memory_rate((int)f->threads,
                                       p->available / 8 > UINT64_C(1) << 29 ? UINT64_C(1) << 29 : p->available / 8,
                                       &a->rate, err));
    a->o.cache = (aff_engine_cache){a, restore, publish};
    return aff__engine_create(&a->engine, a->net, &a->o, err);
}

static aff_status frontiers(app *a, aff_error *err)
{
    const flags *f = &a->f;
    fprintf(a->csv, "# %s; %s; %d threads; memory %.2f GB/s%s\n", aff__net_path(a->net),
            aff__cpu_level_name(aff__cpu_level()), aff__pool_size((int)f->threads), a->rate,
            f->rate ? " (given)" : " (measured)");
    if (a->hits.n) return by_tiers(a, err);
    print_head(a->csv);
    for (int64_t n = f->from; n <= f->most; n = n < f->most && 2 * n > f->most ? f->most : 2 * n)
        AFF_TRY(frontier(a, n, err));
    return AFF_OK;
}

static aff_status measure(app *a, const aff_memplan *p, aff_error *err)
{
    const flags *f = &a->f;
    AFF_TRY(fill_ids(a, err));
    if (!f->foresight) AFF_TRY(prepare(a, p, err));
    a->csv = stdout;
    aff_outfile out;
    if (f->out) {
        AFF_TRY(aff__out_open(&out, f->out, err));
        a->csv = fdopen(dup(out.fd), "w");
    }
    aff_status s = a->csv ? AFF_OK : aff__fail_errno(err, "%s: cannot open", f->out);
    if (s == AFF_OK) s = f->foresight ? aff__foresight(a->net, (int)f->threads, a->ids, f->most, a->csv, err) : frontiers(a, err);
    aff_snapshot view = {0};
    if (a->engine) aff__engine_snapshot(a->engine, &view, NULL);
    if (s == AFF_OK && view.tiered) {
        char line[640];
        aff__tier_counters_line(&view.tiers, line, sizeof line);
        fprintf(stderr, "aff-bench: %s\n", line);
    }
    if (a->csv && (fflush(a->csv) != 0 || ferror(a->csv)) && s == AFF_OK)
        s = aff__fail_errno(err, "%s: cannot write", f->out ? f->out : "standard output");
    if (!f->out) return s;
    if (a->csv) fclose(a->csv);
    if (s == AFF_OK) return aff__out_commit(&out, err);
    aff__out_abort(&out);
    return s;
}

/* The memory plan of the largest context; then, unless it was asked for alone, the network. *code >= 0: answered. */
static aff_status load(app *a, aff_net_options no, aff_memplan *p, int *code, aff_error *err)
{
    flags *f = &a->f;
    *code = -1;
    no.outline = true;
    AFF_TRY(aff__net_open(&a->net, f->model, &no, err));
    const int64_t positions = aff__net_config(a->net)->max_positions;
    if (!f->most) f->most = positions - f->decode < 16384 ? positions - f->decode : 16384;
    if (f->most + f->decode > positions)
        return aff__fail(err, AFF_E_INVALID, "--ctx-max: expected at most %lld (the model's context less -n), got %lld",
                         (long long)(positions - f->decode), (long long)f->most);
    if (f->from > f->most) f->from = f->most;
    const int64_t room = f->most + f->decode + WARM;
    aff__setup_engine(&f->setup, room < positions ? room : positions, &a->o);
    AFF_TRY(aff__setup_plan(&f->setup, a->net, &a->o, false, p, err));
    aff_seq_plan s;
    AFF_TRY(aff__seq_plan(&s, a->net, f->most, err));
    aff__memplan_add(p, AFF_PLACE_MEMORY, true, s.total, "state between contexts", "a snapshot");
    aff__memplan_judge(p);
    aff__net_close(a->net);
    a->net = NULL;
    if (f->setup.plan || f->setup.plan_json) {
        *code = aff__setup_answer(&f->setup, p);
        return AFF_OK;
    }
    aff__memplan_print(p, stderr);
    AFF_TRY(aff__memplan_check(p, err));
    no.outline = false;
    const uint64_t start = aff__now_ns();
    AFF_TRY(aff__net_open(&a->net, f->model, &no, err));
    AFF_TRY(aff__setup_tiers(&f->setup, p, a->net, warn, err));
    AFF_TRY(aff__setup_card(&f->setup, p, warn, &a->o, err));
    fprintf(stderr, "  loaded in %.2f s\n", (double)(aff__now_ns() - start) / 1e9);
    return AFF_OK;
}

int main(int argc, char **argv)
{
    static app a;
    aff_error err = {0};
    aff_net_options no = {0};
    aff_memplan p;
    int code = parse(&a.f, argc, argv);
    if (code >= 0) return code;
    aff_status s = check_flags(&a, &no, &err);
    if (s != AFF_OK) return complain(&err, 2);
    s = load(&a, no, &p, &code, &err);
    if (s == AFF_OK && code < 0) s = measure(&a, &p, &err);
    aff_error late = {0};
    aff__engine_free(a.engine);
    const aff_status closed = aff__route_trace_close(a.routes.trace, s == AFF_OK, &late);
    aff__routegen_free(a.gen);
    aff__net_close(a.net);
    free(a.ids);
    free(a.state);
    if (s != AFF_OK) return complain(&err, s == AFF_E_INVALID ? 2 : s == AFF_E_NOMEM ? AFF_EXIT_DOES_NOT_FIT : 1);
    if (closed != AFF_OK) return complain(&late, 1);
    return code >= 0 ? code : 0;
}
