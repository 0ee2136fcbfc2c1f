/* setup.h - what the programs that run a model have in common before it runs: the flags of state, prefix cache and
 * memory plan, and the steps from a model's path to a network that fits. */
#ifndef AFF_ENGINE_SETUP_H
#define AFF_ENGINE_SETUP_H
#include "base/options.h"
#include "engine/cache.h"
#include "engine/memplan.h"

/* Numbers: -1 is not given. */
typedef struct aff_setup {
    int64_t kv_size, kv_commit, kv_margin, host_pool, memory; /* host_pool and memory in MiB */
    const char *cache_dir, *machine, *device;
    int64_t cache_gib, cache_block;
    bool cache_stays, cache_verify, plan, plan_json;
} aff_setup;
#define AFF_SETUP_NOTHING {.kv_size = -1, .kv_commit = -1, .kv_margin = -1, .host_pool = -1, .memory = -1}

/* Entries of a program's option table. */
#define AFF_SETUP_OPTIONS(s) AFF_SETUP_DEVICE(s), AFF_SETUP_MEMORY(s), AFF_SETUP_CACHE(s)
#define AFF_SETUP_DEVICE(s) \
    {"device", 0, AFF_OPT_STR, &(s)->device, "NAME", \
     "Where the model runs, all of it in that memory: cpu, cuda:N, hip:N, or an emulated card, emu:SIZE; auto is the CPU [auto].", "Device"}
#define AFF_SETUP_MEMORY(s) \
    {"kv-size", 0, AFF_OPT_INT, &(s)->kv_size, "N", "Positions of a sequence, prompt and answer: address space [what is needed, the model's at most].", "Memory", 1, 1e9}, \
    {"kv-commit", 0, AFF_OPT_INT, &(s)->kv_commit, "N", "Positions that have memory from the start, all sequences together [65536].", .max = 1e9}, \
    {"kv-margin", 0, AFF_OPT_INT, &(s)->kv_margin, "N", "Positions that get memory at a time after that [16384].", NULL, 1, 1e9}, \
    {"host-pool-mib", 0, AFF_OPT_INT, &(s)->host_pool, "N", "Bound on copies of experts that lie row by row in the file (dtype 33) [what is left].", .max = 1e9}, \
    {"memory", 0, AFF_OPT_INT, &(s)->memory, "MIB", "Plan with so much memory instead of what the system says is available.", NULL, 1, 1e9}, \
    {"plan", 0, AFF_OPT_FLAG, &(s)->plan, NULL, "Print the memory plan with a verdict and exit: 0 fits, 3 does not."}, \
    {"plan-json", 0, AFF_OPT_FLAG, &(s)->plan_json, NULL, "The same as JSON."}, \
    {"machine", 0, AFF_OPT_STR, &(s)->machine, "SPEC", "With --plan: for a machine you do not have, as 2x32G,ram=64G,pcie=27 (cards, memory, GB/s of a card's link)."}
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
/* The plan of an outline, judged. */
aff_status aff__setup_plan(const aff_setup *s, const aff_net *outline, const aff_engine_options *o,
                           bool listens_to_prompts, aff_memplan *p, aff_error *err);
/* --plan or --plan-json: the plan on standard output. Returns the exit code. */
int aff__setup_answer(const aff_setup *s, const aff_memplan *p);
/* --prefix-cache-dir: opens it and sets o->cache; *cache NULL without the flag. Its troubles go to
 * `warn`. */
aff_status aff__setup_cache(const aff_setup *s, const aff_net *net, void (*warn)(void *ctx, const char *line),
                            aff_engine_options *o, aff_prefix **cache, aff_error *err);
#endif
