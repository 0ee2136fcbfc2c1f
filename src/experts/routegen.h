/* routegen.h - made-up routes with the two properties that decide how well a part of the experts serves: skew (some are
 * chosen more often than others) and locality (a token chooses what the one before it chose). For forcing the routes of
 * synthetic networks and for feeding placement offline.
 *
 * A choice depends on seed, layer, position and place alone, so that chunks, drafts and slots do not change routes.
 * Place k of position p is kept from position p - 1 with probability `locality`; else it is drawn anew, expert of rank
 * r (an order of its own in every layer) with probability proportional to 1 / (r + 1)^skew. A place whose expert
 * another place has already draws again. skew 0: all experts are alike; 1 gives the ten most popular of 256 about half
 * of the choices. locality l: the share of a token's experts that the token before used is about l. */
#ifndef AFF_EXPERTS_ROUTEGEN_H
#define AFF_EXPERTS_ROUTEGEN_H
#include "base/status.h"
#include <stdint.h>

typedef struct aff_routegen aff_routegen;
typedef struct aff_routegen_options {
    int layers, experts, picks; /* picks <= experts */
    double skew;                /* 0 .. 10 */
    double locality;            /* 0 .. 0.999 */
    uint64_t seed;
} aff_routegen_options;
aff_status aff__routegen_create(aff_routegen **out, const aff_routegen_options *o, aff_error *err);
void aff__routegen_free(aff_routegen *g);
/* out[picks]: distinct. */
void aff__routegen_pick(const aff_routegen *g, int layer, int64_t pos, int32_t *out);
#endif
