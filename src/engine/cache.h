/* cache.h - the prefix cache on disk (state/prefix.h) as the engine's cache. */
#ifndef AFF_ENGINE_CACHE_H
#define AFF_ENGINE_CACHE_H
#include "engine/engine.h"
#include "state/prefix.h"

/* `p` must outlive the engine. */
aff_engine_cache aff__engine_cache_on(aff_prefix *p);
#endif
