/* net.h - a loaded network: configuration and bound weights of the trunk and, if there is one, of the draft.
 * The source is a .aff container (with its draft companion) or a checkpoint folder in the release layout; after opening nothing
 * depends on which. Weights stay in the mapping where they can. */
#ifndef AFF_MODEL_NET_H
#define AFF_MODEL_NET_H
#include "backend/types.h"
#include "base/threads.h"
#include "model/config.h"

typedef struct aff_net aff_net;

typedef struct aff_net_options {
    aff_numerics numerics;  /* zero-initialised: AFF_MATH; the programs' default is AFF_FAST */
    int max_layers;         /* > 0: only the first layers (the text is not the model's) */
    bool draft;             /* load the draft: mtp.* of a checkpoint, or the companion container */
    bool draft_if_any;      /* with draft: none there, or none for max_layers, is no error (a damaged one is) */
    const char *draft_path; /* NULL: the container's path with its last extension replaced by .dspark.aff */
    const struct aff_synthetic *synthetic; /* instead of `path` (model/synthetic.h) */
    /* Only what a plan needs: configuration, draft, sizes. Every tensor is looked up and checked, none is read, converted or made. Such a
     * network serves aff__net_sizes, aff__seq_plan and what else plans; it cannot run. */
    bool outline;
} aff_net_options;

/* Bytes of the weights by where they are. */
typedef struct aff_net_sizes {
    uint64_t file[2];   /* dense, trunk and draft: used in the file's mapping */
    uint64_t memory[2]; /* dense, trunk and draft: converted on loading, or generated */
    uint64_t expert;    /* one routed expert */
    int64_t experts[2]; /* how many there are, trunk and draft */
    bool experts_in_file; /* else in memory */
    bool experts_copied;  /* row-major file: they are used in slots only */
    uint64_t slot;        /* bytes of an expert's slot */
} aff_net_sizes;

/* Opens `path`. Every tensor is checked for dtype and shape before it is bound; the error names tensor, expected and got. */
aff_status aff__net_open(aff_net **out, const char *path, const aff_net_options *opt, aff_error *err);
void aff__net_close(aff_net *n);
const aff_config *aff__net_config(const aff_net *n);
const char *aff__net_path(const aff_net *n);
int aff__net_layers(const aff_net *n); /* trunk layers in force (max_layers applied) */

typedef enum aff_draft_kind { AFF_DRAFT_NONE, AFF_DRAFT_DSPARK, AFF_DRAFT_MTP1 } aff_draft_kind;
aff_draft_kind aff__net_draft(const aff_net *n);
/* Where the routed experts of the trunk are, [layers][experts]; those used in the file's mapping by what the system has of it in memory. For
 * displays. Thread safe. */
void aff__net_tiers(const aff_net *n, uint8_t *tier);
int aff__net_stages(const aff_net *n); /* draft stages loaded: 0 without a draft */
aff_numerics aff__net_numerics(const aff_net *n);
aff_net_sizes aff__net_sizes(const aff_net *n);
/* The store of the trunk's or the draft's experts; NULL: there is none. */
struct aff_experts *aff__net_experts(const aff_net *n, bool draft);
/* Where its routed experts are kept, trunk and draft together (experts/tiers.h): in the file's mapping or, row-major ones, in slots for all of them,
 * until something else is said, which must be before there is a runner. A failure leaves a network that can only be closed. */
struct aff_tier_options;
aff_status aff__net_use_tiers(aff_net *n, const struct aff_tier_options *o, aff_error *err);
struct aff_tiers *aff__net_expert_tiers(const aff_net *n);
/* Popularity of the trunk's experts [layers][experts] as a container has it, NULL without. */
const float *aff__net_profile(const aff_net *n);
/* Takes `use` [layers][experts] (malloc'ed; may go on with the draft's) over, instead of the container's; NULL: the container's again. */
void aff__net_give_profile(aff_net *n, float *use);
/* A hash that tells networks apart: configuration, layers and draft in force, and samples from the ends of every dense tensor and
 * of three experts a layer (not the whole file: hashing 100 GB at every start would cost minutes). */
void aff__net_identity(const aff_net *n, uint64_t id[2]);
#endif
