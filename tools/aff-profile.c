/* aff-profile - what route traces say about where experts should lie. docs/placement.md explains every figure. */
#include "base/file.h"
#include "base/mem.h"
#include "base/options.h"
#include "experts/placement_flags.h"
#include "experts/predict.h"
#include "experts/routegen.h"
#include "experts/simulate.h"
#include "format/route.h"
#include "ui/progress.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *fit, *generate, *slab, *pool, *profile, *out, *by;
    bool maps, recall, simulate, sweep, inclusive, exclusive;
    int64_t passes, hold_out, land, copies, expert_bytes, near;
    int64_t layers, experts, picks, tokens, rows, prompt, seed;
    double halflife, prefill_weight, skew, locality;
    aff_placement_flags placement;
    double credit, prefill_credit, prefill_plane, prefill_decay, near_credit;
} f = {.passes = 8,
       .land = 2,
       .copies = 2,
       .expert_bytes = 9060352,
       .near = 10,
       .by = "link",
       .layers = 43,
       .experts = 256,
       .picks = 6,
       .tokens = 1000,
       .rows = 1,
       .prefill_weight = 1,
       .skew = 0.8,
       .locality = 0.5,
       .placement = AFF_PLACEMENT_FLAGS_INIT,
       .credit = -1,
       .prefill_credit = -1,
       .prefill_plane = -1,
       .prefill_decay = -1,
       .near_credit = -1};

static const aff_option options[] = {
    {"fit", 0, AFF_OPT_STR, &f.fit, "FILE",
     "Write a profile (--expert-profile of the other programs): the share of rows that picked each expert.", "Fitting"},
    {"maps", 0, AFF_OPT_FLAG, &f.maps, NULL, "Put maps from a layer's picks to those of the next into it."},
    {"half-life", 0, AFF_OPT_NUM, &f.halflife, "ROWS",
     "A row counts half as much as one that comes ROWS later [all alike].", NULL, 1, 1e12},
    {"prefill-weight", 0, AFF_OPT_NUM, &f.prefill_weight, "W",
     "What a row of a prompt counts against one of an answer [1].", NULL, 0, 1000},
    {"passes", 0, AFF_OPT_INT, &f.passes, "N", "Passes over the traces for the maps [8].", NULL, 1, 1000},
    {"recall", 0, AFF_OPT_FLAG, &f.recall, NULL,
     "How many of a layer's picks are among the best guesses made from the layer before, on traces that the guesses "
     "were not fitted to.",
     "Prediction"},
    {"hold-out", 0, AFF_OPT_INT, &f.hold_out, "N", "The last N traces are those [the last fifth of every trace].", NULL,
     1, 100000},
    {"simulate", 0, AFF_OPT_FLAG, &f.simulate, NULL, "Play the traces against every strategy: hits, moves and bytes.",
     "Simulation"},
    {"sweep", 0, AFF_OPT_FLAG, &f.sweep, NULL, "Find the best knobs of heat, one after another until none helps."},
    {"by", 0, AFF_OPT_STR, &f.by, "WHAT",
     "What the sweep makes best: link (experts over the link for a token) or hits (in the slab while decoding) "
     "[link]."},
    {"slab", 0, AFF_OPT_STR, &f.slab, "SIZE",
     "Slots of the card: a number, a share as 45%, or a size as 20GiB or 900MiB [45%]."},
    {"pool", 0, AFF_OPT_STR, &f.pool, "SIZE", "The same of host memory [100%, inclusive]."},
    {"inclusive", 0, AFF_OPT_FLAG, &f.inclusive, NULL,
     "Host memory keeps a copy of what is on the card [if everything fits it]."},
    {"exclusive", 0, AFF_OPT_FLAG, &f.exclusive, NULL, "It does not."},
    {"expert-bytes", 0, AFF_OPT_INT, &f.expert_bytes, "N", "Of an expert, for sizes [9060352].", NULL, 1, 1e12},
    {"profile", 0, AFF_OPT_STR, &f.profile, "FILE", "What lies where at first [every layer alike]."},
    {"land", 0, AFF_OPT_INT, &f.land, "N",
     "Passes of a layer until a copy has arrived, and again until its old place is free [2].", NULL, 1, 100000},
    {"copies", 0, AFF_OPT_INT, &f.copies, "N", "Copies that can arrive during a pass of a layer [2].", NULL, 1, 100000},
    {"near", 0, AFF_OPT_INT, &f.near, "N", "Near misses of the router taken from the trace [10].", NULL, 0, 10},
    AFF_PLACEMENT_OPTIONS(&f.placement),
    {"credit", 0, AFF_OPT_NUM, &f.credit, "C", "Most that an expert gains in a pass [8].",
     "Placement, not in the other programs", 0, 1e6},
    {"near-credit", 0, AFF_OPT_NUM, &f.near_credit, "C", "What a near miss gains [0.1].", NULL, 0, 1000},
    {"prefill-credit", 0, AFF_OPT_NUM, &f.prefill_credit, "C", "Most that an expert gains in a prompt's chunk [100].",
     NULL, 0, 1e6},
    {"prefill-plane", 0, AFF_OPT_NUM, &f.prefill_plane, "W", "What heat from prompts counts [0.05].", NULL, 0, 1000},
    {"prefill-decay", 0, AFF_OPT_NUM, &f.prefill_decay, "D", "What it is multiplied by at every chunk [0.5].", NULL, 0,
     1},
    {"generate", 0, AFF_OPT_STR, &f.generate, "FILE", "Write a made-up trace (docs/bench.md) and do nothing else.",
     "Made-up traces"},
    {"layers", 0, AFF_OPT_INT, &f.layers, "N", "Its layers [43].", NULL, 1, 4096},
    {"experts", 0, AFF_OPT_INT, &f.experts, "N", "Its experts a layer [256].", NULL, 1, 65536},
    {"picks", 0, AFF_OPT_INT, &f.picks, "N", "Its picks a row [6].", NULL, 1, 64},
    {"prompt", 0, AFF_OPT_INT, &f.prompt, "N", "Rows of a prompt at its beginning, one pass [0].", NULL, 0, 65536},
    {"tokens", 0, AFF_OPT_INT, &f.tokens, "N", "Tokens after it [1000].", NULL, 0, 1e9},
    {"rows", 0, AFF_OPT_INT, &f.rows, "N",
     "Rows of a pass of them, as with speculation whose drafts are all right [1].", NULL, 1, 16},
    {"skew", 0, AFF_OPT_NUM, &f.skew, "S", "The expert of rank r is chosen in proportion to 1/(r+1)^S [0.8].", NULL, 0,
     10},
    {"locality", 0, AFF_OPT_NUM, &f.locality, "L", "Share of a token's experts kept from the one before [0.5].", NULL,
     0, 0.999},
    {"seed", 0, AFF_OPT_INT, &f.seed, "N", "Another trace for every number [0].", NULL, 0, 1e15},
    {"out", 'o', AFF_OPT_STR, &f.out, "FILE", "Write the figures of --recall, --simulate or --sweep there as CSV.",
     "Output"},
    {0}};

static const aff_usage usage = {"aff-profile",
                                "[TRACE ...]",
                                "Reads route traces (--route-trace of affinity and aff-bench) and says what they hold; "
                                "fits profiles and predictors to them; plays them against "
                                "placement strategies. Needs no model and no card. Exit code 0: done, 1: a file cannot "
                                "be read or written, 2: wrong usage.",
                                options,
                                0,
                                100000};

typedef struct app {
    int n;
    aff_uses *trace;      /* [n] */
    const aff_uses **all; /* [n] */
    char **name;          /* [n] */
    aff_profile given;    /* --profile */
    aff_placement_shape shape;
    aff_placement_options o;
    aff_progress progress;
    FILE *csv;
} app;

/* ---- input ---- */

/* "45%", "1000", "20GiB", "900MiB" of `all` experts. */
static aff_status slots(const char *text, const char *flag, int64_t all, int64_t *out, aff_error *err)
{
    char *end;
    const double v = strtod(text, &end);
    double n = NAN;
    if (end != text && isfinite(v) && v >= 0) {
        if (!strcmp(end, "%") && v <= 100) n = floor(v / 100 * (double)all + 1e-9);
        if (!strcmp(end, "")) n = floor(v);
        if (!strcmp(end, "MiB")) n = floor(v * 1048576 / (double)f.expert_bytes);
        if (!strcmp(end, "GiB")) n = floor(v * 1073741824 / (double)f.expert_bytes);
    }
    if (!(n >= 0 && n <= 1e15))
        return aff__fail(err, AFF_E_INVALID,
                         "--%s: expected a number of slots, a share of 0%% to 100%%, MiB or GiB, got '%s'", flag, text);
    *out = (int64_t)n;
    return AFF_OK;
}

/* What goes on from here: another count, another clock. */
static void begin(app *a, const char *what, const char *unit)
{
    aff__progress_clear(&a->progress);
    aff__progress_start(&a->progress, stderr, what);
    a->progress.unit = unit;
}

static aff_status read_traces(app *a, char **names, int n, aff_error *err)
{
    AFF_TRY(aff__calloc(&a->trace, (uint64_t)n, sizeof *a->trace, "traces", err));
    AFF_TRY(aff__calloc(&a->all, (uint64_t)n, sizeof *a->all, "traces", err));
    a->name = names;
    begin(a, "reading", "traces");
    for (int i = 0; i < n; i++) {
        AFF_TRY(aff__uses_read(&a->trace[i], names[i], (int)f.near, err));
        a->n = i + 1;
        a->all[i] = &a->trace[i];
        const aff_uses *u = a->all[i], *w = a->all[0];
        if (u->layers != w->layers || u->experts != w->experts || u->picks != w->picks)
            return aff__fail(err, AFF_E_INVALID,
                             "%s: %d layers of %d experts, %d picks: expected those of %s, %d of %d, %d", names[i],
                             u->layers, u->experts, u->picks, names[0], w->layers, w->experts, w->picks);
        if (u->n == 0)
            return aff__fail(err, AFF_E_FORMAT, "%s: no dispatch of the trunk in it: expected at least one", names[i]);
        aff__progress_update(&a->progress, (uint64_t)i + 1, (uint64_t)n);
    }
    aff__progress_clear(&a->progress);
    return AFF_OK;
}

static aff_status make_shape(app *a, aff_error *err)
{
    const aff_uses *u = a->all[0];
    const int64_t all = (int64_t)u->layers * u->experts;
    aff_placement_shape *s = &a->shape;
    *s = (aff_placement_shape){.layers = u->layers, .experts = u->experts, .pool_spare = 8};
    AFF_TRY(slots(f.slab ? f.slab : "45%", "slab", all, &s->slab_slots, err));
    AFF_TRY(slots(f.pool ? f.pool : "100%", "pool", all, &s->pool_slots, err));
    if (f.inclusive && f.exclusive)
        return aff__fail(err, AFF_E_INVALID, "--inclusive and --exclusive: expected one of them");
    s->inclusive = f.inclusive || (!f.exclusive && s->pool_slots >= all);
    if (s->inclusive && s->pool_slots < s->slab_slots)
        return aff__fail(err, AFF_E_INVALID, "--inclusive: expected a pool of at least the slab's slots");
    aff__placement_options_init(&a->o);
    a->o.credit = f.credit;
    a->o.near = f.near_credit;
    a->o.prefill_credit = f.prefill_credit;
    a->o.prefill_weight = f.prefill_plane;
    a->o.prefill_decay = f.prefill_decay;
    return aff__placement_flags_apply(&f.placement, &a->o, err);
}

static void summary(const app *a)
{
    printf("%-32s %8s %8s %10s %8s %10s %8s\n", "trace", "prompt", "answer", "dispatches", "drafts", "distinct",
           "again");
    for (int i = 0; i < a->n; i++) {
        const aff_uses *u = a->all[i];
        int64_t again = 0, of = 0;
        const aff_dispatch **last = calloc((size_t)u->layers, sizeof *last);
        for (int64_t k = 0; last && k < u->n; k++) {
            const aff_dispatch *d = &u->dispatch[k], *b = last[d->layer];
            for (int e = 0, o = 0; b && d->phase == AFF_USE_DECODE && e < d->n; e++, of++) {
                while (o < b->n && u->id[b->id + o] < u->id[d->id + e]) o++;
                again += o < b->n && u->id[b->id + o] == u->id[d->id + e];
            }
            last[d->layer] = d;
        }
        free(last);
        printf("%-32s %8" PRId64 " %8" PRId64 " %10" PRId64 " %8" PRId64 " %10.2f %7.1f%%\n", a->name[i], u->tokens[1],
               u->tokens[0], u->n, u->drafts, (double)u->requests / (double)u->n,
               of ? 100.0 * (double)again / (double)of : 0);
    }
    printf("%d layers of %d experts, %d picks a row. distinct: experts of a dispatch; again: share of an answer's that "
           "the layer's last pass used\n",
           a->all[0]->layers, a->all[0]->experts, a->all[0]->picks);
}

/* ---- fitting ---- */

static void show_progress(void *ctx, uint64_t done, uint64_t total)
{
    aff__progress_update(ctx, done, total);
}

static aff_status fit(app *a, aff_error *err)
{
    aff_fit o;
    begin(a, "fitting", "passes over traces");
    aff__fit_init(&o);
    o.halflife = f.halflife;
    o.prefill_weight = f.prefill_weight;
    o.passes = f.maps ? (int)f.passes : 0;
    o.progress = show_progress;
    o.progress_ctx = &a->progress;
    aff_profile p;
    AFF_TRY(aff__fit_profile(&p, a->all, a->n, &o, err));
    aff__progress_clear(&a->progress);
    const aff_status s = aff__profile_write(&p, f.fit, err);
    if (s == AFF_OK)
        printf("%s: %d layers of %d experts%s\n", f.fit, p.layers, p.experts,
               p.picks ? ", with maps to the next layer" : "");
    aff__profile_free(&p);
    return s;
}

static const char *const guess_name[AFF_GUESSES] = {"popular", "recent", "before", "counts", "map"};

static void print_recall(const app *a, const aff_recall *r, int layers)
{
    aff_recall sum = r[0];
    printf("\n%-6s %-8s", "layer", "guess");
    for (int z = 0; z < AFF_GUESS_SIZES; z++) printf(" %6s%-2d", "at ", r[0].sizes[z]);
    printf("\n");
    if (a->csv) fprintf(a->csv, "layer,guess,size,recall,picks\n");
    for (int l = 1; l <= layers; l++) {
        const aff_recall *x = l < layers ? &r[l] : &sum;
        char name[16];
        snprintf(name, sizeof name, l < layers ? "%d" : "all", l);
        for (int g = 0; g < AFF_GUESSES; g++) {
            printf("%-6s %-8s", name, guess_name[g]);
            for (int z = 0; z < AFF_GUESS_SIZES; z++) {
                const double v = x->picks ? (double)x->found[g][z] / (double)x->picks : 0;
                printf(" %8.4f", v);
                if (a->csv)
                    fprintf(a->csv, "%s,%s,%d,%.5f,%" PRId64 "\n", name, guess_name[g], x->sizes[z], v, x->picks);
                if (l < layers) sum.found[g][z] += x->found[g][z];
            }
            printf("\n");
        }
        if (l < layers) sum.picks += x->picks;
    }
}

static aff_status recall(app *a, aff_error *err)
{
    aff_fit o;
    aff_profile p;
    aff_recall *r;
    begin(a, "fitting", "passes over traces");
    aff__fit_init(&o);
    o.halflife = f.halflife;
    o.prefill_weight = f.prefill_weight;
    o.passes = (int)f.passes;
    o.progress = show_progress;
    o.progress_ctx = &a->progress;
    if (f.hold_out >= a->n)
        return aff__fail(err, AFF_E_INVALID, "--hold-out: expected fewer than the %d traces, got %" PRId64, a->n,
                         f.hold_out);
    const uint64_t whole = o.to, from = f.hold_out ? 0 : whole * 4 / 5;
    const int learnt = f.hold_out ? a->n - (int)f.hold_out : a->n, first = f.hold_out ? learnt : 0;
    if (!f.hold_out) o.to = from;
    AFF_TRY(aff__calloc(&r, (uint64_t)a->all[0]->layers, sizeof *r, "recall", err));
    aff_status s = aff__fit_profile(&p, a->all, learnt, &o, err);
    if (s == AFF_OK) {
        s = aff__recall(r, &p, a->all, learnt, &o, a->all + first, a->n - first, from, whole, err);
        aff__progress_clear(&a->progress);
        if (s == AFF_OK) print_recall(a, r, p.layers);
        aff__profile_free(&p);
    }
    free(r);
    return s;
}

/* ---- simulation ---- */

static double mib(double experts)
{
    return experts * (double)f.expert_bytes / 1048576;
}

static void print_head(app *a)
{
    printf("\n%-22s %-20s|%8s %8s %8s %8s %9s %9s|%8s %8s %8s|%9s %9s %9s\n", "", "", "answer:", "in slab", "moves",
           "link", "MiB", "disk MiB", "prompt:", "in slab", "link", "refused", "starved", "readmits");
    printf("%-22s %-20s|%8s %8s %8s %8s %9s %9s|%8s %8s %8s|%9s %9s %9s\n", "trace", "strategy", "in slab", "or pool",
           "/token", "/token", "/token", "/token", "in slab", "or pool", "/token", "", "", "");
    if (!a->csv) return;
    fprintf(a->csv, "trace,strategy,slab_slots,pool_slots,inclusive,decay,hysteresis,min_gain,near");
    for (int p = 0; p < 2; p++) {
        const char *w = p ? "prompt" : "answer";
        fprintf(a->csv, ",%s_tokens,%s_slab,%s_pool,%s_moves_token,%s_link_token,%s_link_mib_token,%s_disk_mib_token",
                w, w, w, w, w, w, w);
    }
    fprintf(a->csv,
            ",promotions,demotions,loads,evictions,refused,starved_up,starved_down,no_supply,readmits,distinct\n");
}

static double per_token(const aff_sim_result *r, int phase, int64_t n)
{
    return r->tokens[phase] ? (double)n / (double)r->tokens[phase] : 0;
}

static void print_csv(app *a, const char *trace, const char *name, const aff_sim *s, const aff_sim_result *r)
{
    const aff_placement_options o = aff__placement_options_resolve(&s->o, s->shape.inclusive);
    const aff_placement_counts *n = &r->n;
    fprintf(a->csv, "%s,%s,%" PRId64 ",%" PRId64 ",%d,", trace, name, s->shape.slab_slots, s->shape.pool_slots,
            s->shape.inclusive);
    if (s->kind == AFF_SIM_PLACEMENT)
        fprintf(a->csv, "%g,%g,%g,%g", o.decay, o.hysteresis, o.min_gain, o.near);
    else
        fprintf(a->csv, ",,,");
    for (int p = 0; p < 2; p++) {
        const aff_use_phase phase = (aff_use_phase)p;
        const double link = aff__sim_link(r, phase);
        fprintf(a->csv, ",%" PRId64 ",%.5f,%.5f,%.4f,%.4f,%.3f,%.3f", r->tokens[p],
                aff__sim_hits(r, phase, AFF_TIER_CARD), aff__sim_hits(r, phase, AFF_TIER_HOST),
                per_token(r, p, r->moves[p]), link, mib(link), mib(aff__sim_disk(r, phase)));
    }
    const int64_t all[] = {n->promotions[0],
                           n->demotions[0],
                           n->promotions[1],
                           n->demotions[1],
                           n->refused[0] + n->refused[1],
                           n->starved_up[0] + n->starved_up[1],
                           n->starved_down[0] + n->starved_down[1],
                           n->no_supply[0] + n->no_supply[1],
                           n->readmits[0] + n->readmits[1],
                           n->distinct[0] + n->distinct[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fprintf(a->csv, ",%" PRId64, all[i]);
    fprintf(a->csv, "\n");
}

static void print_result(app *a, const char *trace, const char *name, const aff_sim *s, const aff_sim_result *r)
{
    const aff_placement_counts *n = &r->n;
    const double link = aff__sim_link(r, AFF_USE_DECODE);
    printf("%-22.22s %-20s|%7.2f%% %7.2f%% %8.2f %8.2f %9.1f %9.1f|%7.2f%% %7.2f%% %8.2f|%9" PRId64 " %9" PRId64
           " %9" PRId64 "\n",
           trace, name, 100 * aff__sim_hits(r, AFF_USE_DECODE, AFF_TIER_CARD),
           100 * aff__sim_hits(r, AFF_USE_DECODE, AFF_TIER_HOST),
           per_token(r, AFF_USE_DECODE, r->moves[AFF_USE_DECODE]), link, mib(link),
           mib(aff__sim_disk(r, AFF_USE_DECODE)), 100 * aff__sim_hits(r, AFF_USE_PREFILL, AFF_TIER_CARD),
           100 * aff__sim_hits(r, AFF_USE_PREFILL, AFF_TIER_HOST), aff__sim_link(r, AFF_USE_PREFILL),
           n->refused[0] + n->refused[1], n->starved_up[0] + n->starved_down[0] + n->starved_up[1] + n->starved_down[1],
           n->readmits[0] + n->readmits[1]);
    if (a->csv) print_csv(a, trace, name, s, r);
}

static aff_sim simulation(const app *a, aff_sim_kind kind)
{
    return (aff_sim){.kind = kind,
                     .shape = a->shape,
                     .o = a->o,
                     .profile = a->given.use,
                     .land = (int)f.land,
                     .copies = (int)f.copies};
}

static aff_status one(app *a, const char *trace, const char *name, const aff_sim *s, const aff_uses *const *u, int n,
                      aff_sim_result *r, aff_error *err)
{
    aff_sim_result own;
    if (!r) r = &own;
    AFF_TRY(aff__simulate(r, s, u, n, err));
    aff__progress_clear(&a->progress);
    print_result(a, trace, name, s, r);
    return AFF_OK;
}

/* Every strategy on traces one after another. */
static aff_status every_strategy(app *a, const char *trace, const aff_uses *const *u, int n, aff_error *err)
{
    aff_sim s = simulation(a, AFF_SIM_PLACEMENT);
    aff_sim_result heat, r;
    s.o.strategy = AFF_PLACE_HEAT;
    AFF_TRY(one(a, trace, "heat", &s, u, n, &heat, err));
    s.o.strategy = AFF_PLACE_DEMAND;
    AFF_TRY(one(a, trace, "demand", &s, u, n, NULL, err));
    s.o.strategy = AFF_PLACE_STATIC;
    AFF_TRY(one(a, trace, a->given.use ? "static profile" : "static", &s, u, n, NULL, err));
    aff_fit o;
    aff_profile p;
    aff__fit_init(&o);
    AFF_TRY(aff__fit_profile(&p, u, n, &o, err));
    s.profile = p.use;
    const aff_status st = one(a, trace, "static hindsight", &s, u, n, NULL, err);
    aff__profile_free(&p);
    AFF_TRY(st);
    if (!a->shape.slab_slots) return AFF_OK;
    s = simulation(a, AFF_SIM_LRU);
    AFF_TRY(one(a, trace, "LRU", &s, u, n, NULL, err));
    s.kind = AFF_SIM_LFU;
    AFF_TRY(one(a, trace, "LFU", &s, u, n, NULL, err));
    s.kind = AFF_SIM_BELADY;
    AFF_TRY(one(a, trace, "Belady", &s, u, n, NULL, err));
    s.kind = AFF_SIM_GAIN;
    for (s.gain = 1; s.gain < 1 << 20; s.gain += 1 + s.gain / 4) {
        AFF_TRY(aff__simulate(&r, &s, u, n, err));
        if (r.moves[0] <= heat.moves[0]) break;
    }
    print_result(a, trace, "Belady heat's moves", &s, &r);
    return AFF_OK;
}

static aff_status simulate(app *a, aff_error *err)
{
    begin(a, "simulating", "traces");
    print_head(a);
    for (int i = 0; i < a->n; i++) {
        const char *slash = strrchr(a->name[i], '/');
        AFF_TRY(every_strategy(a, slash ? slash + 1 : a->name[i], &a->all[i], 1, err));
        aff__progress_update(&a->progress, (uint64_t)i + 1, (uint64_t)a->n);
    }
    aff__progress_clear(&a->progress);
    return a->n > 1 ? every_strategy(a, "all one after another", a->all, a->n, err) : AFF_OK;
}

/* ---- sweep ---- */

typedef struct knob {
    const char *name;
    size_t at;
    int n;
    double v[9];
} knob;

static const knob knobs[] = {
    {"decay", offsetof(aff_placement_options, decay), 8, {0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1}},
    {"hysteresis", offsetof(aff_placement_options, hysteresis), 6, {1, 1.1, 1.25, 1.5, 2, 3}},
    {"min_gain", offsetof(aff_placement_options, min_gain), 8, {0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3}},
    {"near", offsetof(aff_placement_options, near), 6, {0, 0.025, 0.05, 0.1, 0.2, 0.4}},
    {"credit", offsetof(aff_placement_options, credit), 4, {1, 2, 4, 8}},
    {"prefill_credit", offsetof(aff_placement_options, prefill_credit), 5, {1, 8, 25, 50, 100}},
    {"prefill_weight", offsetof(aff_placement_options, prefill_weight), 6, {0, 0.05, 0.1, 0.25, 0.5, 1}},
    {"prefill_decay", offsetof(aff_placement_options, prefill_decay), 4, {0.2, 0.5, 0.7, 0.9}},
    {"disk_hysteresis", offsetof(aff_placement_options, disk_hysteresis), 4, {1, 1.1, 1.25, 1.5}},
    {"disk_min_gain", offsetof(aff_placement_options, disk_min_gain), 5, {0, 0.25, 0.5, 1, 1.5}}};

static double *value_of(aff_placement_options *o, const knob *k)
{
    return (void *)((char *)o + k->at);
}

/* The more, the better: hits of answers, or bytes not moved, where one from the disk counts for five over the link. */
static double worth(const aff_sim_result *r, bool by_hits)
{
    double link = 0;
    for (int p = 0; p < 2; p++)
        link += (aff__sim_link(r, (aff_use_phase)p) + 5 * aff__sim_disk(r, (aff_use_phase)p)) * (double)r->tokens[p];
    return by_hits ? aff__sim_hits(r, AFF_USE_DECODE, AFF_TIER_CARD) : -link;
}

static aff_status sweep(app *a, aff_error *err)
{
    enum { KNOBS = sizeof knobs / sizeof *knobs, ROUNDS = 4 };
    const bool by_hits = !strcmp(f.by, "hits");
    aff_sim s = simulation(a, AFF_SIM_PLACEMENT);
    aff_sim_result r, best;
    uint64_t done = 0, total = 0;
    begin(a, "a round of knobs", "values");
    for (int k = 0; k < (int)KNOBS; k++) total += (uint64_t)knobs[k].n;
    s.o.strategy = AFF_PLACE_HEAT;
    s.o = aff__placement_options_resolve(&s.o, s.shape.inclusive);
    print_head(a);
    AFF_TRY(one(a, "all", "heat as given", &s, a->all, a->n, &best, err));
    bool better = true;
    for (int round = 0; better && round < ROUNDS; round++) {
        better = false;
        for (int k = 0; k < (int)KNOBS; k++) {
            const double was = *value_of(&s.o, &knobs[k]);
            double keep = was;
            for (int i = 0; i < knobs[k].n; i++) {
                aff__progress_update(&a->progress, done++ % total, total);
                if (knobs[k].v[i] == was) continue;
                *value_of(&s.o, &knobs[k]) = knobs[k].v[i];
                AFF_TRY(aff__simulate(&r, &s, a->all, a->n, err));
                if (worth(&r, by_hits) <= worth(&best, by_hits)) continue;
                best = r;
                keep = knobs[k].v[i];
                better = true;
            }
            *value_of(&s.o, &knobs[k]) = keep;
            if (keep == was) continue;
            char name[48];
            snprintf(name, sizeof name, "%.9s %g", knobs[k].name, keep);
            aff__progress_clear(&a->progress);
            print_result(a, "all", name, &s, &best);
        }
    }
    aff__progress_clear(&a->progress);
    printf("\nbest by %s:", f.by);
    for (int k = 0; k < (int)KNOBS; k++)
        printf(" %s %g%s", knobs[k].name, *value_of(&s.o, &knobs[k]), k + 1 < (int)KNOBS ? "," : "\n");
    return AFF_OK;
}

/* ---- made-up traces ---- */

static aff_status pass(aff_route_file *t, const aff_routegen *g, int64_t pos, int rows, int32_t *picks)
{
    for (int l = 0; l < (int)f.layers; l++) {
        for (int i = 0; i < rows; i++) aff__routegen_pick(g, l, pos + i, picks + i * f.picks);
        aff__route_dispatch(t, false, l, rows, picks, NULL, 0);
    }
    return AFF_OK;
}

static aff_status generate(app *a, aff_error *err)
{
    aff_routegen *g;
    aff_route_file *t = NULL;
    int32_t *picks = NULL;
    begin(a, "making up", "tokens");
    const aff_routegen_options o = {(int)f.layers, (int)f.experts, (int)f.picks, f.skew, f.locality, (uint64_t)f.seed};
    AFF_TRY(aff__routegen_create(&g, &o, err));
    aff_status s = aff__calloc(&picks, (uint64_t)(f.prompt > f.rows ? f.prompt : f.rows) * (uint64_t)f.picks,
                               sizeof *picks, "routes", err);
    if (s == AFF_OK) s = aff__route_create(&t, f.generate, o.layers, o.experts, o.picks, err);
    if (s == AFF_OK && f.prompt) s = pass(t, g, 0, (int)f.prompt, picks);
    for (int64_t i = 0; s == AFF_OK && i < f.tokens; i += f.rows) {
        s = pass(t, g, f.prompt + i, (int)(f.rows < f.tokens - i ? f.rows : f.tokens - i), picks);
        aff__progress_update(&a->progress, (uint64_t)i, (uint64_t)f.tokens);
    }
    aff__progress_clear(&a->progress);
    aff__routegen_free(g);
    free(picks);
    const aff_status closed = aff__route_close(t, s == AFF_OK, s == AFF_OK ? err : NULL);
    return s != AFF_OK ? s : closed;
}

/* ---- */

static aff_status work(app *a, char **names, int n, aff_error *err)
{
    if (strcmp(f.by, "link") && strcmp(f.by, "hits"))
        return aff__fail(err, AFF_E_INVALID, "--by: expected link or hits, got '%s'", f.by);
    if (f.generate && n) return aff__fail(err, AFF_E_INVALID, "--generate: expected no traces beside it, got %d", n);
    if (f.generate) return generate(a, err);
    if (!n) return aff__fail(err, AFF_E_INVALID, "expected at least one route trace, got none");
    if (f.maps && !f.fit) return aff__fail(err, AFF_E_INVALID, "--maps: expected --fit FILE beside it");
    if (f.recall + f.simulate + f.sweep > 1)
        return aff__fail(err, AFF_E_INVALID, "--recall, --simulate, --sweep: expected at most one of them");
    if (f.out && !(f.recall || f.simulate || f.sweep))
        return aff__fail(err, AFF_E_INVALID, "--out: expected --recall, --simulate or --sweep beside it");
    AFF_TRY(read_traces(a, names, n, err));
    AFF_TRY(make_shape(a, err));
    if (f.profile) AFF_TRY(aff__profile_read(&a->given, f.profile, a->all[0]->layers, a->all[0]->experts, err));
    if (f.fit) AFF_TRY(fit(a, err));
    if (f.recall) return recall(a, err);
    if (f.simulate) return simulate(a, err);
    if (f.sweep) return sweep(a, err);
    if (!f.fit) summary(a);
    return AFF_OK;
}

int main(int argc, char **argv)
{
    static app a;
    aff_error err = {0};
    aff_outfile out = {.fd = -1};
    int first;
    const int code = aff__options_main(&usage, argc, argv, &first);
    if (code >= 0) return code;
    a.progress.to = stderr;
    aff_status s = f.out ? aff__out_open(&out, f.out, &err) : AFF_OK;
    const bool opened = f.out && s == AFF_OK;
    if (opened && !(a.csv = fdopen(dup(out.fd), "w"))) s = aff__fail_errno(&err, "%s: cannot open", f.out);
    if (s == AFF_OK) s = work(&a, argv + first, argc - first, &err);
    if (a.csv && fclose(a.csv) != 0 && s == AFF_OK) s = aff__fail_errno(&err, "%s: cannot write", f.out);
    if (opened && s == AFF_OK)
        s = aff__out_commit(&out, &err);
    else if (opened)
        aff__out_abort(&out);
    if (s == AFF_OK && fflush(stdout) != 0) s = aff__fail_errno(&err, "standard output: cannot write");
    for (int i = 0; i < a.n; i++) aff__uses_free(&a.trace[i]);
    free(a.trace);
    free(a.all);
    aff__profile_free(&a.given);
    if (s == AFF_OK) return 0;
    fprintf(stderr, "aff-profile: %s\n", err.msg);
    return s == AFF_E_INVALID ? 2 : 1;
}
