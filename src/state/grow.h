/* grow.h - the one thread that gives sequences memory ahead of their position, so that a pass seldom waits for it. */
#ifndef AFF_STATE_GROW_H
#define AFF_STATE_GROW_H
#include "state/seq.h"

aff_status aff__grower_create(aff_grower **out, aff_error *err);
/* After all its sequences were freed. NULL allowed. */
void aff__grower_free(aff_grower *g);

/* s is to have memory for `positions` positions (at most its capacity); returns at once. If the system refuses, nothing is
 * tried again before a pass needs the memory and asks for it itself. */
void aff__grower_ask(aff_grower *g, aff_seq *s, int64_t positions);
/* Takes s out; returns when the thread no longer works on it. */
void aff__grower_leave(aff_grower *g, aff_seq *s);
/* Returns when nothing is left to do. */
void aff__grower_wait(aff_grower *g);
#endif
