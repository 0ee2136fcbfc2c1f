/* setup.h - what the programs that run a model have in common before it runs: the flags of state, prefix cache and
 * memory plan, and the steps from a model's path to a network that fits. */
#ifndef AFF_ENGINE_SETUP_H
#define AFF_ENGINE_SETUP_H
#include "base/options.h"
#include "engine/cache.h"
#include "engine/memplan.h"
#include "experts/placement_flags.h"

enum { AFF_SETUP_COPIES = 17 }; /* one more than the loader takes, which says so */

/* Numbers: -1 is not given. */
typedef struct aff_setup {
    int64_t kv_size, kv_commit, kv_margin, memory; /* memory in MiB */
    int64_t host_pool, host_reserve, gpu, gpu_headroom; /* MiB */
    aff_placement_flags placement;
    const char *expert_copies, *expert_profile, *dspark_placement, *prefetch;
    int64_t prefetch_ahead;
    aff_card_options card; /* made by aff__setup_card, with the tiers' options it names */
    aff_tier_options card_tiers;
    char copy_list[4096];
    const char *copy[AFF_SETUP_COPIES];
    const char *cache_dir, *machine, *device;
    int64_t cache_gib, cache_block, gpus; /* 0: not given */
    bool cache_stays, cache_verify, plan, plan_json;
} aff_setup;
#define AFF_SETUP_NOTHING \
    {.kv_size = -1, .kv_commit = -1, .kv_margin = -1, .host_pool = -1, .host_reserve = -1, .gpu = -1, .gpu_headroom = -1, .memory = -1, \
     .placement = AFF_PLACEMENT_FLAGS_INIT}

/* Entries of a program's option table. */
#define AFF_SETUP_OPTIONS(s) AFF_SETUP_DEVICE(s), AFF_SETUP_MEMORY(s), AFF_SETUP_EXPERTS(s), AFF_SETUP_CACHE(s)
#define AFF_SETUP_DEVICE(s) \
    {"device", 0, AFF_OPT_STR, &(s)->device, "NAME", \
     "Where the model runs: cpu, cuda:N, hip:N, or an emulated card, emu:SIZE; auto is the CPU [auto].", "Device"}, \
    {"gpus", 0, AFF_OPT_INT, &(s)->gpus, "N", "Cards to use; 1 takes the first one if --device names none.", NULL, 1, 1024}
#define AFF_SETUP_MEMORY(s) \
    {"kv-size", 0, AFF_OPT_INT, &(s)->kv_size, "N", "Positions of a sequence, prompt and answer: address space [what is needed, the model's at most].", "Memory", 1, 1e9}, \
    {"kv-commit", 0, AFF_OPT_INT, &(s)->kv_commit, "N", "Positions that have memory from the start, all sequences together [65536].", .max = 1e9}, \
    {"kv-margin", 0, AFF_OPT_INT, &(s)->kv_margin, "N", "Positions that get memory at a time after that [16384].", NULL, 1, 1e9}, \
    {"memory", 0, AFF_OPT_INT, &(s)->memory, "MIB", "Plan with so much memory instead of what the system says is available.", NULL, 1, 1e9}, \
    {"plan", 0, AFF_OPT_FLAG, &(s)->plan, NULL, "Print the memory plan with a verdict and exit: 0 fits, 3 does not."}, \
    {"plan-json", 0, AFF_OPT_FLAG, &(s)->plan_json, NULL, "The same as JSON."}, \
    {"machine", 0, AFF_OPT_STR, &(s)->machine, "SPEC", "With --plan: for a machine you do not have, as 2x32G,ram=64G,pcie=27 (cards, memory, GB/s of a card's link)."}
#define AFF_SETUP_EXPERTS(s) \
    {"host-pool-mib", 0, AFF_OPT_INT, &(s)->host_pool, "N", \
     "Memory for routed experts; the others stay on disk and are read as they are used. 0: as little as goes [the file's mapping if all fit, else what is left].", "Experts", 0, 1e9}, \
    {"gpu-mib", 0, AFF_OPT_INT, &(s)->gpu, "N", "Memory of the card for routed experts, at most [what is left of it].", NULL, 0, 1e9}, \
    {"gpu-headroom-mib", 0, AFF_OPT_INT, &(s)->gpu_headroom, "N", "Memory of the card that stays free [0.8 % of it].", NULL, 0, 1e9}, \
    {"dspark-placement", 0, AFF_OPT_STR, &(s)->dspark_placement, "WHERE", "The draft's experts: vram, before all others, or ram, off the card [vram]."}, \
    {"prefetch", 0, AFF_OPT_STR, &(s)->prefetch, "on|off", "Bring experts to the card before their layer: what the tokens say of the first layers, what its router guesses of others [on]."}, \
    {"prefetch-ahead", 0, AFF_OPT_INT, &(s)->prefetch_ahead, "N", "Guess so many layers ahead [1].", NULL, 1, 16}, \
    {"host-pool-reserve-mib", 0, AFF_OPT_INT, &(s)->host_reserve, "N", "Memory that the pool leaves free [1536].", NULL, 0, 1e9}, \
    {"expert-copies", 0, AFF_OPT_STR, &(s)->expert_copies, "FILES", "Further copies of the model's file on other disks, separated by commas: reads are dealt over all of them."}, \
    {"expert-profile", 0, AFF_OPT_STR, &(s)->expert_profile, "FILE", "How often every expert is used (aff-profile): the pool begins with the most used ones, read at the start [the container's]."}, \
    AFF_PLACEMENT_OPTIONS(&(s)->placement)
#define AFF_SETUP_CACHE(s) \
    {"prefix-cache-dir", 0, AFF_OPT_STR, &(s)->cache_dir, "DIR", \
     "Keep beginnings of texts in files there; a request that begins like an earlier one starts where that ended [no cache].", "Prefix cache"}, \
    {"prefix-cache-gib", 0, AFF_OPT_INT, &(s)->cache_gib, "N", "Bound on those files [a quarter of what is free, at most 64].", NULL, 1, 1000000}, \
    {"prefix-cache-block", 0, AFF_OPT_INT, &(s)->cache_block, "N", "Tokens of a block that beginnings share [512].", NULL, 1, 1000000}, \
    {"persistent-prefix-cache", 0, AFF_OPT_FLAG, &(s)->cache_stays, NULL, "The files serve the next process too."}, \
    {"prefix-cache-verify", 0, AFF_OPT_FLAG, &(s)->cache_verify, NULL, "Compare a digest of the whole state after every restore."}

enum { AFF_EXIT_DOES_NOT_FIT = 3 };

/* Which flags go together. AFF_E_INVALID. */
aff_status aff__setup_check(const aff_setup *s, aff_error *err);
/* The engine's options that the flags are about. `needed`: positions if --kv-size is not given, 0: the model's. */
void aff__setup_engine(const aff_setup *s, int64_t needed, aff_engine_options *o); /* after aff__setup_check */
/* With a device: sets o->card, which points into *s. After the plan. */
aff_status aff__setup_card(aff_setup *s, const aff_memplan *p, void (*warn)(void *ctx, const char *line), aff_engine_options *o, aff_error *err);
/* The plan of an outline, judged. */
aff_status aff__setup_plan(const aff_setup *s, const aff_net *outline, const aff_engine_options *o,
                           bool listens_to_prompts, aff_memplan *p, aff_error *err);
/* --plan or --plan-json: the plan on standard output. Returns the exit code. */
int aff__setup_answer(const aff_setup *s, const aff_memplan *p);
/* --host-pool-mib, --expert-copies, --placement-...: keeps the network's experts as the plan says. Before there is an engine. On a card nothing is done. */
aff_status aff__setup_tiers(const aff_setup *s, const aff_memplan *p, aff_net *net, void (*warn)(void *ctx, const char *line), aff_error *err);
/* The placement that the flags ask for. */
aff_status aff__setup_placement(const aff_setup *s, aff_placement_options *o, aff_error *err);
/* --prefix-cache-dir: opens it and sets o->cache; *cache NULL without the flag. Its troubles go to
 * `warn`. */
aff_status aff__setup_cache(const aff_setup *s, const aff_net *net, void (*warn)(void *ctx, const char *line),
                            aff_engine_options *o, aff_prefix **cache, aff_error *err);
#endif
