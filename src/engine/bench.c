#include "engine/bench.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/threads.h"
#include "experts/tiers.h"
#include <stdlib.h>
#include <string.h>

void aff__bench_route(void *routes, const aff_route *r)
{
    aff_bench_routes *b = routes;
    const int n = r->rows * r->picks;
    if (b->by_tier && !r->draft)
        for (int i = 0; i < r->rows; i++) {
            aff__hitgen_pick(b->by_tier, r->layer, (uint64_t)r->pos[i], r->pick + i * r->picks);
            for (int k = 0; k < r->picks; k++) r->weight[i * r->picks + k] = r->scale / (float)r->picks;
        }
    else if (b->force && !r->draft)
        for (int i = 0; i < r->rows; i++) {
            aff__routegen_pick(b->force, r->layer, r->pos[i], r->pick + i * r->picks);
            for (int k = 0; k < r->picks; k++) r->weight[i * r->picks + k] = r->scale / (float)r->picks;
        }
    if (b->counting) {
        memset(b->seen, 0, (size_t)r->experts);
        for (int i = 0; i < n; i++) {
            const int32_t e = r->pick[i];
            if (e < 0 || e >= r->experts || b->seen[e]) continue;
            b->seen[e] = 1;
            b->used[r->draft]++;
            b->hits[r->draft] += aff__tiers_tier(r->tiers, r->tier_layer, e) != AFF_TIER_DISK;
        }
    }
    if (b->trace) aff__route_trace_note(b->trace, r);
}

uint64_t aff__bench_dense(const aff_net *net, bool draft)
{
    const aff_net_sizes z = aff__net_sizes(net);
    const aff_config *c = aff__net_config(net);
    const uint64_t head =
        (uint64_t)c->vocab * (uint64_t)c->hidden * 2; /* embedding and head: bf16, as in every release */
    const uint64_t tables =
        draft ? 0 : (uint64_t)c->hash_layers * (uint64_t)c->vocab * (uint64_t)c->picks * 4; /* rows of them are read */
    const uint64_t all = z.file[draft] + z.memory[draft];
    if (draft) return all + head;
    return all > head + tables ? all - head - tables : 0;
}

uint64_t aff__bench_state(const aff_net *net, int64_t pos, aff_error *err)
{
    aff_seq_plan p;
    const aff_config *c = aff__net_config(net);
    uint64_t bytes = 0;
    if (aff__seq_plan(&p, net, 1, err) != AFF_OK) return 0;
    for (int l = 0; l < aff__net_layers(net); l++) {
        const int64_t window = pos + 1 < c->window ? pos + 1 : c->window,
                      groups = c->ratio[l] ? (pos + 1) / c->ratio[l] : 0;
        const int64_t rows = c->ratio[l] == 4 && groups > c->index_topk ? c->index_topk : groups;
        bytes += (uint64_t)(window + rows) * p.row_bytes;
        if (c->ratio[l] == 4 && groups > c->index_topk) bytes += (uint64_t)groups * p.key_bytes;
    }
    return bytes;
}

/* ---- memory ---- */

enum { PIECE = 1 << 20 };

typedef struct {
    const uint64_t *data;
    uint64_t *sum; /* [threads] a line each */
} reading;

static void read_piece(void *ctx, int64_t task, int thread)
{
    const reading *r = ctx;
    const uint64_t *p = r->data + (uint64_t)task * (PIECE / 8);
    uint64_t s[8] = {0};
    for (int i = 0; i < PIECE / 8; i += 8)
        for (int k = 0; k < 8; k++) s[k] ^= p[i + k];
    for (int k = 0; k < 8; k++) r->sum[8 * thread] ^= s[k];
}

aff_status aff__bench_memory_rate(int threads, uint64_t bytes, double *gbs, aff_error *err)
{
    aff_pool *pool;
    reading r;
    uint64_t *data = NULL;
    *gbs = 0;
    AFF_TRY(aff__pool_create(&pool, threads, err));
    aff_status s = aff__calloc(&data, bytes, 1, "memory to read", err);
    if (s == AFF_OK)
        s = aff__calloc(&r.sum, (uint64_t)aff__pool_threads(pool) * 8, sizeof *r.sum, "memory to read", err);
    if (s == AFF_OK) {
        r.data = data;
        for (uint64_t i = 0; i < bytes / 8; i += 512) data[i] = i;
        for (int i = 0; i < 5; i++) {
            const uint64_t start = aff__now_ns();
            aff__pool_run(pool, read_piece, &r, (int64_t)(bytes / PIECE));
            const double rate = (double)(bytes / PIECE * PIECE) / (double)(aff__now_ns() - start);
            if (rate > *gbs) *gbs = rate;
        }
        free(r.sum);
    }
    free(data);
    aff__pool_free(pool);
    return s;
}
