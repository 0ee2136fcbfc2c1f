/* Promise 1, the standing test: where the routed experts are, and what moves them, changes no bit of any logits. One line per configuration.
 *
 *     placement_invariance                     the quick form: small models, 24 tokens
 *     placement_invariance --device NAME ...   the configurations of a card on that one, as emu:64M or cuda:0, instead of those of the CPU
 *     placement_invariance TOKENS MODEL...     the same configurations over models of one's own (scripts/check placement); MODEL: a path, or
 *                                              synthetic:FOLDER, whose experts are then written to a file in that folder
 *
 * A configuration names a device, how much of the experts has a slot of the pool, a strategy, and what disturbs it. A text is a prompt of several
 * passes and TOKENS chosen ones, each the first of the largest logits; with a draft, its proposals are compared too. */
#include "backend/gpu/rt.h"
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

/* Of a card: how many percent of the experts have a slot of its slab, -1: one of them; and of the pool. The rest is on disk. */
typedef struct card_config {
    const char *name;
    int slab, pool;
    aff_placement_strategy strategy;
    bool errors, stall, draft_in_memory, quick;
} card_config;

static const card_config cards[] = {
    {"all on the card", 100, 0, AFF_PLACE_STATIC, false, false, false, true}, /* to compare with */
    {"slab 45 %, pool of all", 45, 100, AFF_PLACE_HEAT, false, false, true, true},
    {"slab 45 %, pool of all", 45, 100, AFF_PLACE_DEMAND, false, false, false, false},
    {"slab 45 %, pool of all", 45, 100, AFF_PLACE_STATIC, false, false, true, false},
    {"slab 45 %, pool of the rest", 45, 65, AFF_PLACE_DEMAND, false, false, true, true},
    {"slab 45 %, pool of the rest", 45, 65, AFF_PLACE_HEAT, false, true, true, false},
    {"slab 45 %, pool 20 % + SSD", 45, 20, AFF_PLACE_HEAT, true, false, true, true},
    {"slab 5 %, pool of all", 5, 100, AFF_PLACE_HEAT, false, false, true, false},
    {"slab 5 %, pool 10 % + SSD", 5, 10, AFF_PLACE_DEMAND, true, false, true, false},
    {"slab 5 % + SSD", 5, 0, AFF_PLACE_HEAT, false, false, true, false},
    {"one slot, pool of all", -1, 100, AFF_PLACE_HEAT, false, false, true, false},
    {"one slot, pool 10 % + SSD", -1, 10, AFF_PLACE_DEMAND, false, false, true, true},
    {"pool of all", 0, 100, AFF_PLACE_HEAT, false, false, true, false},
    {"pool 10 % + SSD", 0, 10, AFF_PLACE_HEAT, true, false, true, false},
    {"pool 10 % + SSD", 0, 10, AFF_PLACE_DEMAND, false, true, true, false},
    {"pool 10 % + SSD", 0, 10, AFF_PLACE_STATIC, false, false, true, false},
    {"SSD only", 0, 0, AFF_PLACE_STATIC, true, false, true, true},
};

enum { PROMPT = 150, CARD_PROMPT = 60 };

/* Everything that a run computed. */
typedef struct result {
    float *logits; /* [tokens][vocab] */
    int32_t *id;   /* [tokens] */
    int32_t *draft;
} result;

static void run_text(aff_net *net, aff_runner *runner, int prompt_rows, int tokens, result *r)
{
    const aff_config *c = aff__net_config(net);
    const int block = aff__net_draft(net) == AFF_DRAFT_DSPARK ? c->draft_block : 0;
    const int first = prompt_rows * 2 / 3, most = prompt_rows - prompt_rows / 15; /* the prompt: 100 rows of 150, 40, 10 */
    aff_seq *seq;
    int32_t prompt[PROMPT];
    must(aff__calloc(&r->logits, (uint64_t)tokens * (uint64_t)c->vocab, sizeof *r->logits, "logits", &err));
    must(aff__calloc(&r->id, (uint64_t)tokens, sizeof *r->id, "ids", &err));
    must(aff__calloc(&r->draft, (uint64_t)tokens * (uint64_t)(block + 1), sizeof *r->draft, "drafts", &err));
    must(aff__seq_open(&seq, net, &(aff_seq_options){.size = prompt_rows + tokens, .memory = aff__runner_memory(runner)}, &err));
    for (int i = 0; i < prompt_rows; i++) prompt[i] = (int32_t)((i * 7919 + 13) % c->vocab);
    for (int t = 0, at = 0; t < tokens; t++) {
        float *row = r->logits + (uint64_t)t * (uint64_t)c->vocab;
        /* The prompt in three passes, then a token a pass. */
        const int n = !at ? first : at < most ? most - at : at < prompt_rows ? prompt_rows - at : 1;
        const bool last = at >= most;
        if (!last) t--;
        must(aff__forward(runner, &(aff_batch){.n = n, .id = at < prompt_rows ? prompt + at : &r->id[t - 1], .seq = seq, .want_from = n - last, .logits = row}, &err));
        at += n;
        if (at < prompt_rows) continue;
        int best = 0;
        for (int v = 1; v < c->vocab; v++)
            if (row[v] > row[best]) best = v;
        r->id[t] = best;
        if (block) must(aff__draft_block(runner, seq, best, r->draft + (uint64_t)t * (uint64_t)block, NULL, NULL, NULL, NULL, &err));
    }
    aff__seq_free(seq);
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
        aff_runner *runner;
        must(aff__runner_create(&runner, net, 2, &err));
        run_text(net, runner, PROMPT, tokens, &got);
        aff__runner_free(runner);
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

static aff_runner *open_card(const aff_net *net, const aff_device_spec *spec, const card_config *k)
{
    const aff_net_sizes z = aff__net_sizes(net);
    const int64_t all = z.experts[0] + z.experts[1], picks = aff__net_config(net)->picks, pitch = (int64_t)z.slot;
    aff_runner *r;
    aff_tier_options t = {0};
    aff__placement_options_init(&t.placement);
    t.placement.strategy = k->strategy;
    t.placement.shadow = 2;
    t.placement.min_gain = t.placement.disk_min_gain = 0;
    t.placement.hysteresis = t.placement.disk_hysteresis = 1;
    if (k->errors) t.loader = (aff_loader_options){.inject = 0.3, .inject_most = 2, .inject_seed = 17};
    must(aff__runner_on_bare(&r, net, spec, 2, &err));
    const aff_card_options o = {.gpu_bytes = k->slab == 100 ? -1 : k->slab < 0 ? 2 * pitch - 1 : k->slab ? all * k->slab / 100 * pitch + 65536 : 0,
                                .headroom = -1,
                                .host_bytes = (uint64_t)((all * k->pool / 100 + (k->pool == 100 ? picks : 3 * picks)) * pitch),
                                .draft_in_memory = k->draft_in_memory,
                                .tiers = &t};
    must(aff__runner_experts(r, &o, &err));
    aff__tiers_stall(aff__runner_tiers(r), k->stall);
    return r;
}

/* One model through a card's configurations. */
static int run_cards(const char *name, const char *path, const aff_synthetic *y, const char *device, bool all, int tokens)
{
    int wrong = 0;
    result want = {0};
    aff_net *net;
    aff_device_spec spec;
    must(aff__device_parse(&spec, device, &err));
    must(aff__net_open(&net, path, &(aff_net_options){.numerics = AFF_FAST, .draft = true, .draft_if_any = !y, .synthetic = y}, &err));
    const aff_config *c = aff__net_config(net);
    const int block = aff__net_draft(net) == AFF_DRAFT_DSPARK ? c->draft_block : 0;
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        const card_config *k = &cards[i];
        result got = {0};
        if (!all && !k->quick) continue;
        aff_runner *r = open_card(net, &spec, k);
        aff__rt_emu_seed((uint32_t)i * 977); /* another order of threads and streams for each */
        run_text(net, r, CARD_PROMPT, tokens, &got);
        aff_tiers *t = aff__runner_tiers(r);
        aff__tiers_stall(t, false);
        aff__tiers_settle(t);
        must(aff__tiers_check(t, &err));
        const aff_tier_counters n = aff__tiers_counters(t);
        const bool first = !want.logits, same = first || (memcmp(got.logits, want.logits, (size_t)tokens * (size_t)c->vocab * sizeof(float)) == 0 &&
                                                          memcmp(got.id, want.id, (size_t)tokens * sizeof *got.id) == 0 &&
                                                          memcmp(got.draft, want.draft, (size_t)tokens * (size_t)block * sizeof *got.draft) == 0);
        printf("%-14s %s %-29s %-6s card %6" PRId64 " memory %6" PRId64 " disk %6" PRId64 " staged %6" PRId64 " moves %5" PRId64 "/%5" PRId64 " retries %4" PRId64 "  %s\n", name, device,
               k->name, strategies[k->strategy], n.picks[0][AFF_TIER_CARD] + n.picks[1][AFF_TIER_CARD], n.picks[0][AFF_TIER_HOST] + n.picks[1][AFF_TIER_HOST],
               n.picks[0][AFF_TIER_DISK] + n.picks[1][AFF_TIER_DISK], n.staged, n.promotions[0] + n.promotions[1], n.demotions[0] + n.demotions[1], n.disk_retries,
               first  ? "to compare with"
               : same ? "logits identical"
                      : "LOGITS DIFFER");
        fflush(stdout);
        wrong += !same;
        aff__runner_free(r);
        if (first)
            want = got;
        else
            free_result(&got);
    }
    free_result(&want);
    aff__net_close(net);
    aff__rt_emu_seed(0);
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
    wrong += run_cards("synthetic", NULL, &(aff_synthetic){.geometry = "tiny", .layers = 3, .experts = 12, .seed = 5, .expert_file = file}, "emu:64M", false, 24);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd) != 0 ? 1 : wrong;
}

int main(int argc, char **argv)
{
    int wrong = 0;
    const char *device = NULL;
    if (argc < 2) return quick() != 0;
    if (argc > 3 && strcmp(argv[1], "--device") == 0) {
        device = argv[2];
        argv += 2;
        argc -= 2;
    }
    const int tokens = atoi(argv[1]);
    if (tokens < 1) {
        fprintf(stderr, "usage: placement_invariance [[--device NAME] TOKENS MODEL...]\n");
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        const char *slash = strrchr(argv[i], '/'), *name = slash ? slash + 1 : argv[i];
        char file[4096];
        if (strncmp(argv[i], "synthetic:", 10) != 0) {
            wrong += device ? run_cards(name, argv[i], NULL, device, true, tokens) : run_model(name, argv[i], NULL, tokens);
            continue;
        }
        snprintf(file, sizeof file, "%s/synthetic.experts", argv[i] + 10);
        const aff_synthetic y = {.geometry = "tiny", .seed = 5, .expert_file = file};
        wrong += device ? run_cards("synthetic", NULL, &y, device, true, tokens) : run_model("synthetic", NULL, &y, tokens);
        unlink(file);
    }
    printf("%d configuration%s differ\n", wrong, wrong == 1 ? "" : "s");
    return wrong != 0;
}
