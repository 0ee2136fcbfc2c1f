/* memplan.h - what a run will take and whether it fits, before anything is allocated (design 4). The plan is a list of
 * lines, each a consumer, a place and bytes, made from an outline of the network (model/net.h), the engine's options
 * and the machine. What is allocated equals it: state to the byte (state/seq.h), buffers as aff__engine_plan says
 * (tests/engine/test_memplan.c).
 *
 * Places are this machine's memory, files (weights used in their mapping: the system drops and reads them again as it
 * needs), the disk (experts that are read into memory of ours as they are used), and cards. Rooms that know of more consumers add their lines between _make and _judge. */
#ifndef AFF_ENGINE_MEMPLAN_H
#define AFF_ENGINE_MEMPLAN_H
#include "base/machine.h"
#include "engine/engine.h"
#include "experts/tiers.h"
#include <stdio.h>

enum { AFF_PLACE_MEMORY, AFF_PLACE_FILE, AFF_PLACE_DISK, AFF_PLACE_CARD }; /* AFF_PLACE_CARD + i: card i */
enum { AFF_MEMPLAN_LINES = 48, AFF_MEMPLAN_PLACES = AFF_PLACE_CARD + AFF_MAX_CARDS };

typedef struct aff_memplan_line {
    int place;
    uint64_t bytes;
    bool later; /* not taken at the start; the most that may be added */
    char what[48], note[80];
} aff_memplan_line;

typedef struct aff_memplan {
    aff_machine machine;
    char model[160];
    aff_memplan_line line[AFF_MEMPLAN_LINES];
    int lines;
    uint64_t total[AFF_MEMPLAN_PLACES]; /* at the start */
    uint64_t later[AFF_MEMPLAN_PLACES];
    uint64_t available; /* memory */
    /* What the state is made of, for advice. */
    int slots;
    int64_t context, commit; /* of one sequence */
    uint64_t slot_fixed;     /* one sequence without its positions */
    double per_position;
    /* Where the routed experts are kept (experts/tiers.h), for aff__setup_tiers. On a card it decides itself. */
    bool experts_mapped;
    int64_t expert_slots, expert_staging; /* slots of memory, those of them for experts on their way; staging 0: as aff__tiers_split says */
    aff_tier_split expert_split;
    uint64_t card_host; /* with a card: bytes of memory for what it does not hold, at most */
    /* By aff__memplan_judge. */
    bool fits;
    char verdict[400]; /* one line; when it does not fit, what would */
} aff_memplan;

typedef struct aff_memplan_input {
    const aff_net *net; /* an outline will do */
    const aff_engine_options *engine;
    const aff_machine *machine;
    uint64_t prefix_cache;   /* memory of the prefix cache (aff__prefix_memory), 0: none */
    int64_t host_pool;       /* bytes for experts in slots; < 0: where they are used in the file they stay there if the machine has room for
                                all of them, otherwise slots take what is left; 0: the fewest slots, all experts stay on disk (--host-pool-mib) */
    int64_t host_reserve;    /* bytes that slots leave free; < 0: 1.5 GiB (--host-pool-reserve-mib) */
    bool listens_to_prompts; /* somebody takes the logits of prompt rows */
} aff_memplan_input;

/* The lines of weights, engine and state. */
aff_status aff__memplan_make(aff_memplan *p, const aff_memplan_input *in, aff_error *err);
/* One more line. AFF_MEMPLAN_LINES are enough for all that is known; further ones are added up in the last. */
void aff__memplan_add(aff_memplan *p, int place, bool later, uint64_t bytes, const char *what, const char *note_format,
                      ...) __attribute__((format(printf, 6, 7)));
/* Totals and verdict. */
void aff__memplan_judge(aff_memplan *p);
/* AFF_E_NOMEM with the verdict unless it fits. */
aff_status aff__memplan_check(const aff_memplan *p, aff_error *err);
void aff__memplan_print(const aff_memplan *p, FILE *to);
aff_status aff__memplan_json(const aff_memplan *p, FILE *to, aff_error *err);
#endif
