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
    const uint64_t keys = aff__cpu_attend_bytes(n->head_dim) + (uint64_t)n->rope_dim * sizeof(float),
                   scores = (uint64_t)n->groups * 8 + (uint64_t)n->index_heads * 4;
    uint64_t scratch = BOUNDED_SCRATCH;
    if (keys > scratch) scratch = keys;
    if (scores > scratch) scratch = scores;
    const uint64_t old = scratch > BOUNDED_SCRATCH ? with_reserve(BOUNDED_SCRATCH) : 0; /* both are there while it grows */
    return aff__align_up(sizeof(aff_cpu), 64) + (uint64_t)threads * (with_reserve(scratch) + old) + aff__pool_bytes(threads) +
           aff__moe_scratch_bytes(num, threads, n->rows, n->picks, n->hidden, n->inter);
}

static void products(aff_backend *b, const aff_product *p, int count, int T)
{
    aff_pool *pool = aff__cpu_of(b)->pool;
    for (; count--; p++)
        if (p->groups > 1)
            aff__cpu_matmul_grouped(pool, p->w, b->numerics, p->groups, p->x, (int64_t)p->groups * p->w->cols, T, p->y, p->w->rows);
        else
            aff__cpu_matmul(pool, p->w, b->numerics, p->x, p->w->cols, T, p->y, p->w->rows);
}

static void q_finish(aff_backend *b, const aff_rowset *rs, float *q, int heads, int D, float eps, const aff_rope *rope)
{
    aff__cpu_q_finish(b, q, rs->n, heads, D, eps, rope, rs->pos);
}

static void kv_finish(aff_backend *b, const aff_rowset *rs, float *kv, int D, const float *norm, float eps, const aff_rope *rope, bool store)
{
    aff__cpu_kv_finish(b, kv, rs->n, D, norm, eps, rope, rs->pos);
    if (store) aff__cpu_raw_store(b, rs, kv, D);
}

static void index_query(aff_backend *b, const aff_rowset *rs, float *iq, int heads, int dim, const aff_rope *rope)
{
    aff__cpu_index_query(b, iq, rs->n, heads, dim, rope, rs->pos);
}

static void compress(aff_backend *b, const aff_compression *k, int count, const aff_rope *rope, const aff_rowset *rs)
{
    for (; count--; k++) aff__cpu_compress(b, k->k, rope, rs, k->c, k->z);
}

/* The key list of row t (promise 0). */
static aff_keyset keys_of(const aff_rowset *rs, const aff_view *v, int D, int t)
{
    const aff_layer_state *s = rs->state[t];
    const int64_t end = v->own ? rs->pos[rs->first[t] - rs->at] : rs->pos[t] + 1; /* one past the last ring row */
    const int64_t lo = end > v->window ? end - v->window : 0;
    aff_keyset k = {.row = s->row, .raw = s->raw, .raw_size = s->raw_size, .lo = lo, .n_raw = (int)(end - lo)};
    if (v->own) {
        k.extra = v->own + (int64_t)(rs->first[t] - rs->at) * D;
        k.n_extra = v->block;
    } else if (v->ratio) {
        k.comp = s->comp;
        k.n_comp = (int)((rs->pos[t] + 1) / v->ratio);
        if (v->ratio == 4 && k.n_comp > v->topk) {
            k.n_comp = v->topk;
            k.sel = v->sel + (int64_t)t * v->topk;
        }
    }
    return k;
}

static aff_status attend(aff_backend *b, const aff_rowset *rs, const aff_view *v, const float *q, int heads, int D, const float *sink, const aff_rope *rope,
                         float *o, aff_error *err)
{
    enum { ROWS = 64 };
    aff_keyset keys[ROWS];
    const int64_t width = (int64_t)heads * D;
    for (int at = 0; at < rs->n; at += ROWS) {
        const int n = rs->n - at < ROWS ? rs->n - at : ROWS;
        for (int t = 0; t < n; t++) keys[t] = keys_of(rs, v, D, at + t);
        AFF_TRY(aff__cpu_attend_rows(b, q + at * width, n, heads, D, keys, sink, rope, rs->pos + at, o + at * width, err));
    }
    return AFF_OK;
}

static void hc_pre(aff_backend *b, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps, float *u, float *x, float *post, float *comb)
{
    aff__cpu_hc_pre(b, h, X, T, H, u, post, comb);
    aff__cpu_rmsnorm(b, u, norm, eps, T, H, x);
}

static void hc_post(aff_backend *b, float *f, const float *y, int K, const float *post, const float *comb, int T, int streams, int H, float *X)
{
    if (y) aff__cpu_sum_experts(b, y, T, K, H, f);
    aff__cpu_hc_post(b, f, post, comb, T, streams, H, X);
}

static void hc_head(aff_backend *b, const aff_hc *h, const float *X, int T, int H, const float *norm, float eps, float *u, float *x)
{
    aff__cpu_hc_head(b, h, X, T, H, u);
    aff__cpu_rmsnorm(b, u, norm, eps, T, H, x);
}

static void swiglu(aff_backend *b, float *a, const float *bb, float limit, int T, int n)
{
    aff__cpu_swiglu(b, a, bb, limit, (int64_t)T * n);
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
        .mem = &aff__host_memory,
        .embed = aff__cpu_embed,
        .hc_pre = hc_pre,
        .hc_post = hc_post,
        .hc_head = hc_head,
        .rmsnorm = aff__cpu_rmsnorm,
        .products = products,
        .q_finish = q_finish,
        .kv_finish = kv_finish,
        .compress = compress,
        .index_query = index_query,
        .index_select = aff__cpu_index_select,
        .attend = attend,
        .route = aff__cpu_route,
        .experts = experts,
        .swiglu = swiglu,
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
