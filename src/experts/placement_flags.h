/* placement_flags.h - the --placement- flags of a program's table of options (base/options.h). */
#ifndef AFF_EXPERTS_PLACEMENT_FLAGS_H
#define AFF_EXPERTS_PLACEMENT_FLAGS_H
#include "experts/placement.h"

typedef struct aff_placement_flags {
    const char *strategy;        /* NULL: heat */
    int64_t moves, lead, shadow; /* below 0: default */
    double decay, hysteresis, min_gain;
} aff_placement_flags;
#define AFF_PLACEMENT_FLAGS_INIT                                                                                       \
    {                                                                                                                  \
        NULL, -1, -1, -1, -1, -1, -1                                                                                   \
    }

/* Entries for a table; f: aff_placement_flags *. */
#define AFF_PLACEMENT_OPTIONS(f)                                                                                       \
    {"placement-strategy",                                                                                             \
     0,                                                                                                                \
     AFF_OPT_STR,                                                                                                      \
     &(f)->strategy,                                                                                                   \
     "S",                                                                                                              \
     "heat: the hottest experts move to faster memory; demand: those that were just missed; static: nothing moves "    \
     "[heat]. Changes no result.",                                                                                     \
     "Placement"},                                                                                                     \
        {"placement-moves",                                                                                            \
         0,                                                                                                            \
         AFF_OPT_INT,                                                                                                  \
         &(f)->moves,                                                                                                  \
         "N",                                                                                                          \
         "Swaps that a layer's pass may start [8].",                                                                   \
         NULL,                                                                                                         \
         0,                                                                                                            \
         4096},                                                                                                        \
        {"placement-decay",                                                                                            \
         0,                                                                                                            \
         AFF_OPT_NUM,                                                                                                  \
         &(f)->decay,                                                                                                  \
         "D",                                                                                                          \
         "What an expert's heat is multiplied by at every pass of its layer [0.98; 0.95 if host memory holds "         \
         "everything].",                                                                                               \
         NULL,                                                                                                         \
         0,                                                                                                            \
         1},                                                                                                           \
        {"placement-hysteresis",                                                                                       \
         0,                                                                                                            \
         AFF_OPT_NUM,                                                                                                  \
         &(f)->hysteresis,                                                                                             \
         "H",                                                                                                          \
         "An expert takes another's place if its heat is at least H times the other's plus the least gain [1.25; 1.1 " \
         "if host memory holds everything].",                                                                          \
         NULL,                                                                                                         \
         0,                                                                                                            \
         1000},                                                                                                        \
        {"placement-min-gain",                                                                                         \
         0,                                                                                                            \
         AFF_OPT_NUM,                                                                                                  \
         &(f)->min_gain,                                                                                               \
         "G",                                                                                                          \
         "That least gain, in uses [1.5; 0.5 if host memory holds everything].",                                       \
         NULL,                                                                                                         \
         0,                                                                                                            \
         1e6},                                                                                                         \
        {"placement-lead",                                                                                             \
         0,                                                                                                            \
         AFF_OPT_INT,                                                                                                  \
         &(f)->lead,                                                                                                   \
         "N",                                                                                                          \
         "Layers that the host may run ahead of a card while decoding; 0: any number [2].",                            \
         NULL,                                                                                                         \
         0,                                                                                                            \
         127},                                                                                                         \
    {                                                                                                                  \
        "placement-shadow", 0, AFF_OPT_INT, &(f)->shadow, "N",                                                         \
            "Slots of a card kept free for moves [32; an eighth of them where there are few].", NULL, 1, 4096          \
    }

/* Strategy and numbers into o, which may hold other settings; checked. Hysteresis and gain hold for both borders. */
aff_status aff__placement_flags_apply(const aff_placement_flags *f, aff_placement_options *o, aff_error *err);
#endif
