/* Promise 1, the standing test: where the routed experts are, and what moves them, changes no bit of any logits. One line per configuration.
 *
 *     placement_invariance                     the quick form: small models, 24 tokens
 *     placement_invariance TOKENS MODEL...     the same configurations over models of one's own (scripts/check placement); MODEL: a path, or
 *                                              synthetic:FOLDER, whose experts are then written to a file in that folder
 *
 * A configuration names a device, how much of the experts has a slot of the pool, a strategy, and what disturbs it. A text is a prompt of several
 * passes and TOKENS chosen ones, each the first of the largest logits; with a draft, its proposals are compared too. */
#include "base/mem.h"
#include "experts/tiers.h"
#include "model/forward.h"
#include "model/synthetic.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static aff_error err;
static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "placement_invariance: %s\n", err.msg);
    exit(1);
}

typedef struct config {
    const char *name;
    int share; /* percent of the experts that have a pool slot; 100: all; 0: staging only; -1: used in place, the one to compare with */
    aff_placement_strategy strategy;
    bool fill, errors, threads_only, stall, tight; /* tight: as few staging slots as go */
} config;

static const config configs[] = {
    {"in place", -1, AFF_PLACE_STATIC, false, false, false, false, false},
    {"pool of all, as used", 100, AFF_PLACE_HEAT, false, false, false, false, false},
    {"pool of all, filled", 100, AFF_PLACE_STATIC, true, false, false, false, false},
    {"pool of all, disk errors", 100, AFF_PLACE_DEMAND, false, true, false, false, false},
    {"pool 45 %", 45, AFF_PLACE_HEAT, false, false, false, false, false},
    {"pool 45 %", 45, AFF_PLACE_DEMAND, false, false, true, false, false},
    {"pool 45 %, filled", 45, AFF_PLACE_STATIC, true, false, false, false, false},
    {"pool 45 %, mover stalled", 45, AFF_PLACE_HEAT, true, false, false, true, false},
    {"pool 10 % + SSD", 10, AFF_PLACE_HEAT, false, false, false, false, false},
    {"pool 10 % + SSD, disk errors", 10, AFF_PLACE_HEAT, true, true, false, false, true},
    {"pool 10 % + SSD", 10, AFF_PLACE_DEMAND, false, false, false, false, true},
    {"pool 10 % + SSD, filled", 10, AFF_PLACE_STATIC, true, false, true, false, false},
    {"SSD only", 0, AFF_PLACE_HEAT, false, false, false, false, false},
    {"SSD only, fewest slots", 0, AFF_PLACE_DEMAND, false, true, false, false, true},
    {"SSD only, fewest slots", 0, AFF_PLACE_STATIC, false, false, true, false, true},
};

enum { PROMPT = 150 };

/* Everything that a run computed. */
typedef struct result {
    float *logits; /* [tokens][vocab] */
    int32_t *id;   /* [tokens] */
    int32_t *draft;
} result;

static void run_text(aff_net *net, int tokens, result *r)
{
    const aff_config *c = aff__net_config(net);
    const int block = aff__net_draft(net) == AFF_DRAFT_DSPARK ? c->draft_block : 0;
    aff_runner *runner;
    aff_seq *seq;
    int32_t prompt[PROMPT];
    must(aff__calloc(&r->logits, (uint64_t)tokens * (uint64_t)c->vocab, sizeof *r->logits, "logits", &err));
    must(aff__calloc(&r->id, (uint64_t)tokens, sizeof *r->id, "ids", &err));
    must(aff__calloc(&r->draft, (uint64_t)tokens * (uint64_t)(block + 1), sizeof *r->draft, "drafts", &err));
    must(aff__runner_create(&runner, net, 2, &err));
    must(aff__seq_create(&seq, net, PROMPT + tokens, &err));
    for (int i = 0; i < PROMPT; i++) prompt[i] = (int32_t)((i * 7919 + 13) % c->vocab);
    for (int t = 0, at = 0; t < tokens; t++) {
        float *row = r->logits + (uint64_t)t * (uint64_t)c->vocab;
        /* The prompt in passes of 100, 40 and the rest, then a token a pass. */
        const int n = at < 140 ? (at ? 40 : 100) : at < PROMPT ? PROMPT - at : 1;
        if (at < 140) t--;
        must(aff__forward(runner, &(aff_batch){.n = n, .id = at < PROMPT ? prompt + at : &r->id[t - 1], .seq = seq, .want_from = n - (at >= 140), .logits = row}, &err));
        at += n;
        if (at < PROMPT) continue;
        int best = 0;
        for (int v = 1; v < c->vocab; v++)
            if (row[v] > row[best]) best = v;
        r->id[t] = best;
        if (block) must(aff__draft_block(runner, seq, best, r->draft + (uint64_t)t * (uint64_t)block, NULL, NULL, NULL, NULL, &err));
    }
    aff__seq_free(seq);
    aff__runner_free(runner);
}

static void free_result(result *r)
{
    free(r->logits);
    free(r->id);
    free(r->draft);
}

static void use(aff_net *net, const config *k)
{
    const aff_net_sizes z = aff__net_sizes(net);
    const int64_t all = z.experts[0] + z.experts[1];
    const int picks = aff__net_config(net)->picks;
    aff_tier_options o = {.fill = k->fill, .staging = k->tight ? picks : 3 * picks, .loader = {.threads_only = k->threads_only}};
    aff__placement_options_init(&o.placement);
    o.placement.strategy = k->strategy;
    o.placement.disk_min_gain = 0; /* all that may move does */
    o.placement.disk_hysteresis = 1;
    o.slots = o.staging + all * k->share / 100;
    if (k->errors) o.loader = (aff_loader_options){.inject = 0.3, .inject_most = 2, .inject_seed = 17};
    must(aff__net_use_tiers(net, &o, &err));
    aff__tiers_stall(aff__net_expert_tiers(net), k->stall);
}

static bool row_major(const aff_net *net)
{
    return aff__net_sizes(net).experts_copied;
}

static const char *const strategies[] = {"heat", "demand", "static"};

/* One model through all configurations; how many differ. */
static int run_model(const char *name, const char *path, const aff_synthetic *y, int tokens)
{
    int wrong = 0;
    result want = {0};
    aff_net *net;
    aff_net_options o = {.numerics = AFF_FAST, .draft = true, .draft_if_any = !y, .synthetic = y};
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        const config *k = &configs[i];
        result got = {0};
        must(aff__net_open(&net, path, &o, &err));
        if (k->share >= 0) use(net, k); /* a row-major model's first run: as it was opened, with a slot for every expert */
        run_text(net, tokens, &got);
        const aff_config *c = aff__net_config(net);
        const int block = aff__net_draft(net) == AFF_DRAFT_DSPARK ? c->draft_block : 0;
        aff_tiers *t = aff__net_expert_tiers(net);
        aff__tiers_stall(t, false);
        aff__tiers_settle(t);
        must(aff__tiers_check(t, &err));
        const aff_tier_counters n = aff__tiers_counters(t);
        const bool first = !want.logits;
        const bool same = first || (memcmp(got.logits, want.logits, (size_t)tokens * (size_t)c->vocab * sizeof(float)) == 0 &&
                                    memcmp(got.id, want.id, (size_t)tokens * sizeof *got.id) == 0 &&
                                    memcmp(got.draft, want.draft, (size_t)tokens * (size_t)block * sizeof *got.draft) == 0);
        printf("%-14s cpu %-29s %-6s memory %6" PRId64 " disk %6" PRId64 " staged %6" PRId64 " again %5" PRId64 " moves %5" PRId64 "/%5" PRId64 " retries %4" PRId64 "  %s\n", name,
               first && row_major(net) ? "pool of all" : k->name, strategies[k->strategy], n.picks[0][AFF_TIER_HOST] + n.picks[1][AFF_TIER_HOST],
               n.picks[0][AFF_TIER_DISK] + n.picks[1][AFF_TIER_DISK], n.staged, n.staged_again, n.promotions[1], n.demotions[1], n.disk_retries,
               first  ? "to compare with"
               : same ? "logits identical"
                      : "LOGITS DIFFER");
        fflush(stdout);
        wrong += !same;
        aff__net_close(net);
        if (first)
            want = got;
        else
            free_result(&got);
    }
    free_result(&want);
    return wrong;
}

static int quick(void)
{
    char root[] = "/tmp/aff-invariance-XXXXXX", dir[64], path[64], file[64], cmd[80];
    int wrong = 0;
    if (!mkdtemp(root)) return 1;
    snprintf(dir, sizeof dir, "%s/toy", root);
    snprintf(path, sizeof path, "%s/m.aff", root);
    snprintf(file, sizeof file, "%s/experts", root);
    if (aff_test_write_parity_model("toy", dir) != 0) return 1;
    test_write_container(dir, path, AFF_Q2P875G, 11, 1);
    wrong += run_model("grouped (34)", path, NULL, 24);
    test_write_container(dir, path, AFF_Q2P875Q4, 11, 1);
    wrong += run_model("row-major (33)", path, NULL, 24);
    wrong += run_model("checkpoint", dir, NULL, 24);
    wrong += run_model("synthetic", NULL, &(aff_synthetic){.geometry = "tiny", .layers = 4, .seed = 5, .expert_file = file}, 24);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd) != 0 ? 1 : wrong;
}

int main(int argc, char **argv)
{
    int wrong = 0;
    if (argc < 2) return quick() != 0;
    const int tokens = atoi(argv[1]);
    if (tokens < 1) {
        fprintf(stderr, "usage: placement_invariance [TOKENS MODEL...]\n");
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        const char *slash = strrchr(argv[i], '/'), *name = slash ? slash + 1 : argv[i];
        char file[4096];
        if (strncmp(argv[i], "synthetic:", 10) != 0) {
            wrong += run_model(name, argv[i], NULL, tokens);
            continue;
        }
        snprintf(file, sizeof file, "%s/synthetic.experts", argv[i] + 10);
        wrong += run_model("synthetic", NULL, &(aff_synthetic){.geometry = "tiny", .seed = 5, .expert_file = file}, tokens);
        unlink(file);
    }
    printf("%d configuration%s differ\n", wrong, wrong == 1 ? "" : "s");
    return wrong != 0;
}
