/* bench.h - what a run cost: bytes that its passes must read, from the routes and the state, and the rate at which this
 * machine's memory gives them. tools/aff-bench.c prints it. */
#ifndef AFF_ENGINE_BENCH_H
#define AFF_ENGINE_BENCH_H
#include "engine/engine.h"
#include "engine/route_trace.h"
#include "experts/hitgen.h"
#include "experts/routegen.h"

/* An aff_route_fn with memory: replaces routes by made-up ones, traces them, counts experts. */
typedef struct aff_bench_routes {
    const aff_routegen *force; /* NULL: the router's own */
    const aff_hitgen *by_tier; /* before `force`; keys are positions. NULL: none */
    aff_route_trace *trace;    /* NULL: none */
    bool counting;             /* decode passes are counted, others not */
    /* Distinct experts of decode passes, trunk and draft, and of those, in memory when asked for. */
    int64_t used[2], hits[2];
    uint8_t seen[65536];
} aff_bench_routes;
void aff__bench_route(void *routes, const aff_route *r);

/* Bytes that one pass reads beside the experts: all dense weights of the trunk but the embedding's (rows of it are), or
 * of the draft and the head. */
uint64_t aff__bench_dense(const aff_net *net, bool draft);
/* Bytes of the state that a row at position pos reads: window, compressed rows chosen, all indexer keys. */
uint64_t aff__bench_state(const aff_net *net, int64_t pos, aff_error *err);
/* GB/s at which `threads` threads read memory that no cache holds: the best of a few rounds over `bytes`. */
aff_status aff__bench_memory_rate(int threads, uint64_t bytes, double *gbs, aff_error *err);
#endif
