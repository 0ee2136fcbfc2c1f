/* bench_tiers.h - what missing experts cost: decode passes whose picks a generator deals to the tiers (experts/hitgen.h), as CSV. tools/aff-bench.c with
 * --hit-rate; docs/bench.md describes every column. */
#ifndef AFF_ENGINE_BENCH_TIERS_H
#define AFF_ENGINE_BENCH_TIERS_H
#include "engine/bench.h"
#include "engine/engine.h"
#include <stdio.h>

enum { AFF_BENCH_RATES = 16 };

typedef struct aff_bench_rates {
    int n;
    double rate[AFF_BENCH_RATES]; /* 0 .. 1 */
} aff_bench_rates;
/* "0.6,0.8": numbers of 0 to 1 with commas between them. `flag` names them in an error. */
aff_status aff__bench_rates(const char *flag, const char *list, aff_bench_rates *out, aff_error *err);

typedef struct aff_bench_tiers {
    const aff_net *net;
    aff_engine *engine;       /* made with aff__bench_route over `routes`, on the CPU; its context holds `context` + tokens */
    aff_bench_routes *routes;
    bool device;
    aff_bench_rates hits;     /* share of picks that fall on the fastest tier there is */
    double disk;              /* share of picks on disk */
    aff_bench_rates recall;   /* device: of predictions, each with every share of hits beside the run without; none: no predictions */
    int ahead;                /* layers from a prediction to its use */
    int64_t context, tokens;  /* of the prompt; decoded at each rate */
    uint64_t seed;
    double memory_rate, link_rate; /* GB/s: of the memory that experts are best in, and (device) of its link, for the bounds */
    FILE *csv;
} aff_bench_tiers;
aff_status aff__bench_tiers_run(const aff_bench_tiers *b, aff_error *err);
#endif
