/* web.h - the page at `/` and what its view of the machine is drawn from. docs/server.md describes both. */
#ifndef AFF_SERVER_WEB_H
#define AFF_SERVER_WEB_H
#include "server/gen.h"

/* Answers with the page's file of x's path (they need no key, and are no secret). false: it has none of that path. */
bool aff__web_answer(aff_exchange *x);
/* GET /snapshot: the engine, its experts' tiers and heat, and the machine, as JSON. */
void aff__web_snapshot(aff_serving *sv, aff_exchange *x);
#endif
