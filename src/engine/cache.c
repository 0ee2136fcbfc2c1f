#include "engine/cache.h"

static aff_status restore(void *ctx, aff_seq *seq, const int32_t *ids, int64_t n, int64_t most, int64_t *matched,
                          aff_error *err)
{
    int64_t restored;
    return aff__prefix_restore(ctx, seq, ids, n, most, &restored, matched, err);
}

static void publish(void *ctx, const aff_seq *seq, const int32_t *ids)
{
    aff__prefix_publish(ctx, seq, ids, NULL); /* trouble is counted and warned of there */
}

aff_engine_cache aff__engine_cache_on(aff_prefix *p)
{
    return (aff_engine_cache){p, restore, publish};
}
