/* uses.h - a route trace (format/route.h) in memory, dispatch by dispatch as the policy sees it. Drafts' dispatches are
 * counted and left out. */
#ifndef AFF_EXPERTS_USES_H
#define AFF_EXPERTS_USES_H
#include "experts/placement.h"

typedef struct aff_dispatch {
    int layer, rows;
    aff_use_phase phase;
    int n, n_near;
    int64_t pick; /* in pick[]: rows x picks choices */
    int64_t id;   /* in id[] and count[]: n distinct experts, ascending */
    int64_t near; /* in near[] and score[] */
} aff_dispatch;

typedef struct aff_uses {
    int layers, experts, picks;
    int64_t n, drafts;
    aff_dispatch *dispatch; /* [n] */
    int32_t *pick, *id, *count, *near;
    float *score;
    int64_t tokens[2];         /* rows of layer 0 by phase */
    int64_t requests;          /* distinct experts of all dispatches */
    int64_t cap[3], filled[3]; /* of dispatch; of pick, id, count; of near, score */
} aff_uses;

enum { AFF_DECODE_ROWS = 16 }; /* dispatches of more rows are a prompt's */
/* near: how many near misses to take from the router's values where the trace has them, at most AFF_NEAR_MOST. */
aff_status aff__uses_read(aff_uses *u, const char *path, int near, aff_error *err);
/* An empty one that takes dispatches: `picks` [rows][picks], value [experts] or NULL. */
void aff__uses_init(aff_uses *u, int layers, int experts, int picks);
aff_status aff__uses_add(aff_uses *u, int layer, int rows, const int32_t *picks, const float *value, int near,
                         aff_error *err);
void aff__uses_free(aff_uses *u);
aff_placement_use aff__uses_at(const aff_uses *u, int64_t i);
#endif
