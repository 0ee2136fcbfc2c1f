/* lanes.h - threads that read requests (parse, render, tokenise), so that the thread that serves the sockets only moves
 * bytes. Each lane works in turn; large bodies have their own, so that they hold up each other and nobody else. */
#ifndef AFF_SERVER_LANES_H
#define AFF_SERVER_LANES_H
#include "server/http.h"

enum { AFF_LANE_SMALL, AFF_LANE_LARGE, AFF_LANES, AFF_LANE_BORDER = 256 << 10 };

typedef struct aff_lanes aff_lanes;
/* work(ctx, x) on a lane's thread for every request put, unless its client has left by then. */
aff_status aff__lanes_start(aff_lanes **out, void (*work)(void *ctx, aff_exchange *x), void *ctx, aff_error *err);
/* By the size of its body. Takes a reference until the work is done. false: no memory. */
bool aff__lanes_put(aff_lanes *l, aff_exchange *x);
/* Finishes what was put, then ends. NULL allowed. */
void aff__lanes_stop(aff_lanes *l);
#endif
