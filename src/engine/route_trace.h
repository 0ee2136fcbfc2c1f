/* route_trace.h - writes which experts a run used (format/route.h), as an aff_route_fn of the engine. Changes no
 * result. */
#ifndef AFF_ENGINE_ROUTE_TRACE_H
#define AFF_ENGINE_ROUTE_TRACE_H
#include "model/forward.h"

typedef struct aff_route_trace aff_route_trace;
/* The trace begins with what is in memory now. It appears at `path` when it is closed. */
aff_status aff__route_trace_open(aff_route_trace **out, const char *path, const aff_net *net, aff_error *err);
void aff__route_trace_note(void *trace, const aff_route *r); /* r as it will be carried out */
/* Frees it in every case. keep false: nothing is left. */
aff_status aff__route_trace_close(aff_route_trace *t, bool keep, aff_error *err);
#endif
