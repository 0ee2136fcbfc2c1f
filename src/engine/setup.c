#define _DEFAULT_SOURCE /* strsep */
#include "engine/setup.h"
#include "backend/gpu/rt.h"
#include "base/mem.h"
#include "format/profile.h"
#include <stdlib.h>
#include <string.h>

/* --gpus 1 without a card's name: the first one. */
static void first_card(aff_device_spec *d)
{
    if (d->choice != AFF_DEVICE_AUTO) return;
    *d = (aff_device_spec){.choice = AFF_DEVICE_RT, .kind = aff__rt_count(AFF_RT_CUDA, NULL) ? AFF_RT_CUDA : AFF_RT_HIP, .count = 1};
}

aff_status aff__setup_check(const aff_setup *s, aff_error *err)
{
    aff_machine m;
    aff_device_spec d = {.choice = AFF_DEVICE_AUTO};
    aff_placement_options placement;
    if (s->device) AFF_TRY(aff__device_parse(&d, s->device, err));
    if (s->gpus) {
        AFF_TRY(aff__device_gpus(&d, s->gpus, err));
        first_card(&d);
    }
    AFF_TRY(aff__setup_placement(s, &placement, err));
    if (s->dspark_placement && strcmp(s->dspark_placement, "vram") != 0 && strcmp(s->dspark_placement, "ram") != 0)
        return aff__fail(err, AFF_E_INVALID, "--dspark-placement: expected vram or ram, got '%s'", s->dspark_placement);
    if (s->prefetch && strcmp(s->prefetch, "on") != 0 && strcmp(s->prefetch, "off") != 0)
        return aff__fail(err, AFF_E_INVALID, "--prefetch: expected on or off, got '%s'", s->prefetch);
    if (d.choice != AFF_DEVICE_RT && (s->gpu >= 0 || s->gpu_headroom >= 0 || s->dspark_placement || s->prefetch || s->prefetch_ahead))
        return aff__fail(err, AFF_E_INVALID, "--gpu-mib, --gpu-headroom-mib, --dspark-placement, --prefetch: expected a card with them (--device)");
    if (s->machine) AFF_TRY(aff__machine_parse(&m, s->machine, err));
    if (!s->cache_dir && (s->cache_gib || s->cache_block || s->cache_stays || s->cache_verify))
        return aff__fail(err, AFF_E_INVALID,
                         "--prefix-cache-gib, --prefix-cache-block, --persistent-prefix-cache, --prefix-cache-verify: "
                         "expected --prefix-cache-dir with them");
    if (s->machine && !s->plan && !s->plan_json)
        return aff__fail(err, AFF_E_INVALID,
                         "--machine: expected --plan with it: nothing can run on a machine that is not there");
    if (s->machine && s->memory >= 0)
        return aff__fail(err, AFF_E_INVALID, "--machine and --memory: expected one of them, got both");
    if (s->kv_size >= 0 && s->kv_commit > s->kv_size * AFF_MAX_SLOTS)
        return aff__fail(err, AFF_E_INVALID, "--kv-commit: expected at most --kv-size %lld for each sequence, got %lld",
                         (long long)s->kv_size, (long long)s->kv_commit);
    return AFF_OK;
}

void aff__setup_engine(const aff_setup *s, int64_t needed, aff_engine_options *o)
{
    if (s->device) aff__device_parse(&o->device, s->device, NULL);
    if (s->gpus) first_card(&o->device);
    o->context = s->kv_size > 0 ? s->kv_size : needed;
    o->kv_commit = s->kv_commit == 0 ? -1 : s->kv_commit < 0 ? 0 : s->kv_commit;
    o->kv_margin = s->kv_margin < 0 ? 0 : s->kv_margin;
}

static aff_prefix_options prefix_options(const aff_setup *s)
{
    return (aff_prefix_options){.dir = s->cache_dir,
                                .bytes = (uint64_t)s->cache_gib << 30,
                                .block = (int)s->cache_block,
                                .persistent = s->cache_stays,
                                .verify = s->cache_verify};
}

aff_status aff__setup_plan(const aff_setup *s, const aff_net *outline, const aff_engine_options *o,
                           bool listens_to_prompts, aff_memplan *p, aff_error *err)
{
    aff_machine m;
    const aff_prefix_options po = prefix_options(s);
    if (s->machine) {
        AFF_TRY(aff__machine_parse(&m, s->machine, err));
    } else if (s->memory >= 0) {
        if (aff__machine_here(&m, "", NULL) != AFF_OK) m = (aff_machine){.limit = UINT64_MAX};
        m.free = (uint64_t)s->memory << 20;
        m.limit_free = UINT64_MAX;
        m.cgroup = 0;
    } else {
        AFF_TRY(aff__machine_here(&m, "", err));
    }
    const aff_memplan_input in = {.net = outline,
                                  .engine = o,
                                  .machine = &m,
                                  .prefix_cache = s->cache_dir ? aff__prefix_memory(outline, &po) : 0,
                                  .host_pool = s->host_pool < 0 ? -1 : s->host_pool << 20,
                                  .host_reserve = s->host_reserve < 0 ? -1 : s->host_reserve << 20,
                                  .listens_to_prompts = listens_to_prompts};
    AFF_TRY(aff__memplan_make(p, &in, err));
    aff__memplan_judge(p);
    return AFF_OK;
}

aff_status aff__setup_placement(const aff_setup *s, aff_placement_options *o, aff_error *err)
{
    aff__placement_options_init(o);
    return aff__placement_flags_apply(&s->placement, o, err);
}

/* --expert-profile becomes the network's. *use [trunk layers and draft stages][experts], to be freed, or NULL where nothing is known: a draft's experts
 * count as used evenly. */
static aff_status profile_of(const aff_setup *s, aff_net *net, float **use, aff_error *err)
{
    const aff_config *c = aff__net_config(net);
    const uint64_t E = (uint64_t)c->experts, trunk = (uint64_t)aff__net_layers(net) * E, all = trunk + (uint64_t)aff__net_stages(net) * E;
    aff_profile file = {0};
    double sum = 0;
    *use = NULL;
    if (s->expert_profile) {
        AFF_TRY(aff__profile_read(&file, s->expert_profile, aff__net_layers(net), c->experts, err));
        aff__net_set_profile(net, file.use);
        file.use = NULL;
        aff__profile_free(&file);
    }
    const float *known = aff__net_profile(net);
    if (!known) return AFF_OK;
    AFF_TRY(aff__calloc(use, all, sizeof **use, "profile of the experts", err));
    for (uint64_t i = 0; i < trunk; i++) sum += (double)((*use)[i] = known[i]);
    for (uint64_t i = trunk; i < all; i++) (*use)[i] = (float)(sum / (double)trunk);
    return AFF_OK;
}

/* The names of a list with commas, which is changed. */
static int split(char *list, const char **name, int most)
{
    int n = 0;
    for (char *rest = list, *one; rest && n < most && (one = strsep(&rest, ","));) name[n++] = one;
    return n;
}

aff_status aff__setup_card(aff_setup *s, const aff_memplan *p, void (*warn)(void *ctx, const char *line), aff_engine_options *o, aff_error *err)
{
    if (o->device.choice != AFF_DEVICE_RT) return AFF_OK;
    if (s->expert_copies && strlen(s->expert_copies) >= sizeof s->copy_list)
        return aff__fail(err, AFF_E_LIMIT, "--expert-copies: expected less than %zu characters", sizeof s->copy_list);
    strcpy(s->copy_list, s->expert_copies ? s->expert_copies : "");
    s->card_tiers = (aff_tier_options){.loader = {.warn = warn, .copies = s->copy, .n_copies = *s->copy_list ? split(s->copy_list, s->copy, AFF_SETUP_COPIES) : 0}};
    AFF_TRY(aff__setup_placement(s, &s->card_tiers.placement, err));
    s->card = (aff_card_options){.gpu_bytes = s->gpu < 0 ? -1 : s->gpu << 20,
                                 .headroom = s->gpu_headroom < 0 ? -1 : s->gpu_headroom << 20,
                                 .host_bytes = p->card_host,
                                 .draft_in_memory = s->dspark_placement && !strcmp(s->dspark_placement, "ram"),
                                 .prefetch = s->prefetch && !strcmp(s->prefetch, "off") ? 0 : s->prefetch_ahead ? (int)s->prefetch_ahead : 1,
                                 .tiers = &s->card_tiers,
                                 .warn = warn};
    o->card = &s->card;
    return AFF_OK;
}

aff_status aff__setup_tiers(const aff_setup *s, const aff_memplan *p, aff_net *net, void (*warn)(void *ctx, const char *line), aff_error *err)
{
    const char *name[AFF_SETUP_COPIES];
    char *list = NULL;
    float *profile = NULL;
    AFF_TRY(profile_of(s, net, &profile, err)); /* a wrong one is an error even where it is not used */
    if (p->experts_mapped) {
        if (s->expert_copies && !s->device && warn) warn(NULL, "--expert-copies: not used: all experts have room in memory");
        if (s->expert_profile && !s->device && warn) warn(NULL, "--expert-profile: not used: all experts have room in memory");
        free(profile);
        return AFF_OK;
    }
    aff_tier_options o = {.slots = p->expert_slots, .staging = p->expert_staging, .loader = {.warn = warn}};
    aff_status st = aff__setup_placement(s, &o.placement, err);
    o.fill = o.placement.strategy == AFF_PLACE_STATIC || s->expert_profile;
    o.profile = profile;
    if (st == AFF_OK && s->expert_copies) st = aff__strndup(&list, s->expert_copies, strlen(s->expert_copies), err);
    o.loader.copies = name;
    o.loader.n_copies = list ? split(list, name, AFF_SETUP_COPIES) : 0;
    if (st == AFF_OK) st = aff__net_use_tiers(net, &o, err);
    free(list);
    free(profile);
    return st;
}

int aff__setup_answer(const aff_setup *s, const aff_memplan *p)
{
    if (!s->plan_json)
        aff__memplan_print(p, stdout);
    else if (aff__memplan_json(p, stdout, NULL) != AFF_OK)
        return 1;
    return fflush(stdout) != 0 ? 1 : p->fits ? 0 : AFF_EXIT_DOES_NOT_FIT;
}

aff_status aff__setup_cache(const aff_setup *s, const aff_net *net, void (*warn)(void *ctx, const char *line),
                            aff_engine_options *o, aff_prefix **cache, aff_error *err)
{
    aff_prefix_options po = prefix_options(s);
    char results[64];
    po.warn = warn;
    *cache = NULL;
    if (!s->cache_dir) return AFF_OK;
    AFF_TRY(aff__device_results(&o->device, results, err));
    po.results = results;
    AFF_TRY(aff__prefix_open(cache, net, &po, err));
    o->cache = aff__engine_cache_on(*cache);
    return AFF_OK;
}
