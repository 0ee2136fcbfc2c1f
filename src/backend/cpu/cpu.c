#include "backend/cpu/cpu.h"
#include "backend/cpu/inner.h"
#include "base/mem.h"
#include <stdlib.h>

/* Enough for every op whose need the limits of config.h bound: router scores, rope tables, a compressor's candidates. */
enum { BOUNDED_SCRATCH = 1 << 20 };

/* Scratch of a thread for a request of `bytes`. */
static uint64_t with_reserve(uint64_t bytes) { return aff__align_up(bytes + bytes / 4, 64); /* contexts grow: not a new block at every step */ }

aff_status aff__cpu_reserve(aff_cpu *c, uint64_t bytes, aff_error *err)
{
    if (bytes <= c->scratch_bytes) return AFF_OK;
    char *p;
    bytes = with_reserve(bytes);
    AFF_TRY(aff__calloc(&p, bytes, (uint64_t)aff__pool_threads(c->pool), "CPU scratch", err));
    free(c->scratch);
    c->scratch = p;
    c->scratch_bytes = bytes;
    return AFF_OK;
}

uint64_t aff__cpu_backend_bytes(aff_numerics num, int threads, const aff_backend_need *n)
{
    const uint64_t keys = ((uint64_t)AFF__KEY_CUT * (uint64_t)n->head_dim + (uint64_t)n->rope_dim) * sizeof(float),
                   scores = (uint64_t)n->groups * 8 + (uint64_t)n->index_heads * 4;
    uint64_t scratch = BOUNDED_SCRATCH;
    if (keys > scratch) scratch = keys;
    if (scores > scratch) scratch = scores;
    const uint64_t old = scratch > BOUNDED_SCRATCH ? with_reserve(BOUNDED_SCRATCH) : 0; /* both are there while it grows */
    return aff__align_up(sizeof(aff_cpu), 64) + (uint64_t)threads * (with_reserve(scratch) + old) + aff__pool_bytes(threads) +
           aff__moe_scratch_bytes(num, threads, n->rows, n->picks, n->hidden, n->inter);
}

static void matmul(aff_backend *b, const aff_weight *w, const float *x, int T, float *y)
{
    aff__cpu_matmul(aff__cpu_of(b)->pool, w, b->numerics, x, w->cols, T, y, w->rows);
}

static void matmul_grouped(aff_backend *b, const aff_weight *w, int groups, const float *x, int T, float *y)
{
    aff__cpu_matmul_grouped(aff__cpu_of(b)->pool, w, b->numerics, groups, x, (int64_t)groups * w->cols, T, y, w->rows);
}

static aff_status experts(aff_backend *b, const aff_expert_shape *s, const aff_moe_plan *p, const float *x, int T, int K, float *y, aff_error *err)
{
    aff_cpu *c = aff__cpu_of(b);
    return aff__cpu_experts(c->pool, c->moe, s, b->numerics, p, x, s->hidden, T, K, y, err);
}

static void destroy(aff_backend *b)
{
    if (!b) return;
    aff_cpu *c = aff__cpu_of(b);
    aff__moe_scratch_free(c->moe);
    aff__pool_free(c->pool);
    free(c->scratch);
    free(c);
}

aff_status aff__cpu_backend(aff_backend **out, aff_numerics num, int threads, aff_error *err)
{
    aff_cpu *c;
    AFF_TRY(aff__calloc(&c, 1, sizeof *c, "CPU backend", err));
    c->base = (aff_backend){
        .name = "cpu",
        .numerics = num,
        .embed = aff__cpu_embed,
        .hc_pre = aff__cpu_hc_pre,
        .hc_post = aff__cpu_hc_post,
        .hc_head = aff__cpu_hc_head,
        .rmsnorm = aff__cpu_rmsnorm,
        .matmul = matmul,
        .matmul_grouped = matmul_grouped,
        .q_finish = aff__cpu_q_finish,
        .kv_finish = aff__cpu_kv_finish,
        .raw_store = aff__cpu_raw_store,
        .compress = aff__cpu_compress,
        .index_query = aff__cpu_index_query,
        .index_select = aff__cpu_index_select,
        .attend = aff__cpu_attend_rows,
        .route = aff__cpu_route,
        .experts = experts,
        .swiglu = aff__cpu_swiglu,
        .sum_experts = aff__cpu_sum_experts,
        .stream_mean = aff__cpu_stream_mean,
        .argmax = aff__cpu_argmax,
        .free = destroy,
    };
    aff_status s = aff__pool_create(&c->pool, threads, err);
    if (s == AFF_OK) s = aff__cpu_reserve(c, BOUNDED_SCRATCH, err);
    if (s == AFF_OK) s = aff__moe_scratch_create(&c->moe, aff__pool_threads(c->pool), err);
    if (s != AFF_OK) {
        destroy(&c->base);
        return s;
    }
    *out = &c->base;
    return AFF_OK;
}
