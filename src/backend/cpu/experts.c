/* experts.c - routed experts over a plan, in two rounds of tasks. The first computes 128 rows of gate and up for one
 * tile and, since 128 is also the quantiser's group, hands on finished (in `fast`: quantised) columns of h; the second
 * multiplies by down. A task is (tile, block of 128 rows); inside it entries go in batches. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

enum { BLOCK = AFF__QUANT_GROUP, DECODED = 8 /* rows decoded to float32 at a time */ };

typedef struct buffer {
    void *data;
    uint64_t bytes;
} buffer;

struct aff_moe_scratch {
    buffer xq, xs;  /* fast: int8 [T][hidden], float [T][groups(hidden)] */
    buffer h;       /* [entries][inter]: int8 in fast, float otherwise */
    buffer hs;      /* fast: float [entries][groups(inter)] */
    buffer decoded; /* math, sim: float [threads][DECODED][max(hidden, inter)] */
};

typedef struct moe {
    const aff__cpu_inner *in;
    const aff_expert_shape *shape;
    const aff_moe_plan *plan;
    bool fast;
    int batch; /* entries at a time */
    const float *x;
    int64_t ldx;
    int T, K;
    float *y;
    int8_t *xq, *hq;
    float *xs, *hs, *h, *decoded;
    int gx, gh; /* quantiser groups of hidden and inter */
    int blocks; /* tasks per tile in this round */
} moe;

aff_status aff__moe_scratch_create(aff_moe_scratch **out, int threads, aff_error *err)
{
    (void)threads;
    return aff__calloc(out, 1, sizeof **out, "expert scratch", err);
}

void aff__moe_scratch_free(aff_moe_scratch *s)
{
    if (!s) return;
    free(s->xq.data), free(s->xs.data), free(s->h.data), free(s->hs.data), free(s->decoded.data);
    free(s);
}

uint64_t aff__moe_scratch_bytes(aff_numerics num, int threads, int rows, int picks, int hidden, int inter)
{
    const uint64_t T = (uint64_t)rows, entries = T * (uint64_t)picks, H = (uint64_t)hidden, I = (uint64_t)inter;
    const uint64_t gx = (uint64_t)aff__ceil_div(hidden, BLOCK), gh = (uint64_t)aff__ceil_div(inter, BLOCK);
    uint64_t n = sizeof(aff_moe_scratch);
    if (num != AFF_FAST)
        n += aff__align_up(entries * I * sizeof(float), 64) + aff__align_up((uint64_t)threads * DECODED * (H > I ? H : I) * sizeof(float), 64);
    else
        n += aff__align_up(T * H, 64) + aff__align_up(T * gx * sizeof(float), 64) + aff__align_up(entries * I, 64) + aff__align_up(entries * gh * sizeof(float), 64);
    return aff__align_up(n, 64);
}

/* a*n elements of `size` bytes; contents are not kept. */
static aff_status reserve(buffer *b, uint64_t a, uint64_t n, uint64_t size, void *out, aff_error *err)
{
    uint64_t bytes;
    if (!aff__mul_ok(a, n, &bytes) || !aff__mul_ok(bytes, size, &bytes))
        return aff__fail(err, AFF_E_NOMEM, "expert scratch: %llu x %llu elements overflow; use a smaller batch",
                         (unsigned long long)a, (unsigned long long)n);
    if (bytes > b->bytes || !b->data) {
        free(b->data);
        b->data = NULL, b->bytes = 0;
        AFF_TRY(aff__calloc(&b->data, bytes, 1, "expert scratch", err));
        b->bytes = bytes;
    }
    memcpy(out, &b->data, sizeof b->data);
    return AFF_OK;
}

static void quantise_row(void *ctx, int64_t t, int thread)
{
    (void)thread;
    const moe *m = ctx;
    int hidden = m->shape->hidden;
    for (int k = 0; k < hidden; k += BLOCK)
        m->xs[t * m->gx + k / BLOCK] =
            m->in->quantise(m->x + t * m->ldx + k, aff__min_int(BLOCK, hidden - k), m->xq + t * hidden + k);
}

/* y[t][r - r0] for rows r0..r1 of one matrix; in is int8 rows with scales (fast) or float rows. */
static void product(const moe *m, const aff_expert_mat *w, int rows, int cols, int r0, int r1, const void *const *in,
                    const float *const *scales, int n, float *const *y, int thread)
{
    if (m->fast) {
        if (m->shape->dtype == AFF_MXFP4)
            m->in->mxfp4(w, rows, cols, r0, r1, (const int8_t *const *)in, scales, n, y);
        else
            m->in->q2p875(w, m->shape->table, rows, cols, r0, r1, (const int8_t *const *)in, scales, n, y);
        return;
    }
    int wide = m->shape->hidden > m->shape->inter ? m->shape->hidden : m->shape->inter;
    float *buf = m->decoded + (int64_t)thread * DECODED * wide;
    for (int r = r0; r < r1; r += DECODED) {
        int count = aff__min_int(DECODED, r1 - r);
        float *shifted[AFF__BATCH_MAX];
        for (int i = 0; i < count; i++) aff__expert_row(m->shape, w, rows, cols, r + i, buf + (int64_t)i * cols);
        for (int t = 0; t < n; t++) shifted[t] = y[t] + (r - r0);
        aff_weight dense = {.dtype = AFF_F32, .rows = count, .cols = cols, .data = buf};
        m->in->matmul(&dense, 0, count, (const float *const *)in, n, shifted);
    }
}

static void up_task(void *ctx, int64_t task, int thread)
{
    const moe *m = ctx;
    const aff_moe_plan *p = m->plan;
    const aff_moe_tile *tile = &p->tile[task / m->blocks];
    int hidden = m->shape->hidden, inter = m->shape->inter;
    int r0 = (int)(task % m->blocks) * BLOCK, r1 = aff__min_int(r0 + BLOCK, inter);
    float gate[AFF__BATCH_MAX][BLOCK], up[AFF__BATCH_MAX][BLOCK];
    for (int first = tile->first, end = tile->first + tile->count; first < end; first += m->batch) {
        int n = aff__min_int(m->batch, end - first);
        const void *in[AFF__BATCH_MAX];
        const float *scales[AFF__BATCH_MAX];
        float *yg[AFF__BATCH_MAX], *yu[AFF__BATCH_MAX];
        for (int t = 0; t < n; t++) {
            int64_t row = p->row[first + t];
            in[t] = m->fast ? (const void *)(m->xq + row * hidden) : (const void *)(m->x + row * m->ldx);
            scales[t] = m->fast ? m->xs + row * m->gx : NULL;
            yg[t] = gate[t], yu[t] = up[t];
        }
        product(m, &tile->expert.gate, inter, hidden, r0, r1, in, scales, n, yg, thread);
        product(m, &tile->expert.up, inter, hidden, r0, r1, in, scales, n, yu, thread);
        for (int t = 0; t < n; t++) {
            int64_t e = first + t;
            m->in->swiglu(gate[t], up[t], p->weight[e], m->shape->swiglu_limit, r1 - r0);
            if (p->h) memcpy(p->h + e * inter + r0, gate[t], (size_t)(r1 - r0) * sizeof(float));
            if (m->fast)
                m->hs[e * m->gh + r0 / BLOCK] = m->in->quantise(gate[t], r1 - r0, m->hq + e * inter + r0);
            else
                memcpy(m->h + e * inter + r0, gate[t], (size_t)(r1 - r0) * sizeof(float));
        }
    }
}

static void down_task(void *ctx, int64_t task, int thread)
{
    const moe *m = ctx;
    const aff_moe_plan *p = m->plan;
    const aff_moe_tile *tile = &p->tile[task / m->blocks];
    int hidden = m->shape->hidden, inter = m->shape->inter;
    int r0 = (int)(task % m->blocks) * BLOCK, r1 = aff__min_int(r0 + BLOCK, hidden);
    for (int first = tile->first, end = tile->first + tile->count; first < end; first += m->batch) {
        int n = aff__min_int(m->batch, end - first);
        const void *in[AFF__BATCH_MAX];
        const float *scales[AFF__BATCH_MAX];
        float *y[AFF__BATCH_MAX];
        for (int t = 0; t < n; t++) {
            int64_t e = first + t;
            in[t] = m->fast ? (const void *)(m->hq + e * inter) : (const void *)(m->h + e * inter);
            scales[t] = m->fast ? m->hs + e * m->gh : NULL;
            y[t] = m->y + ((int64_t)p->row[e] * m->K + p->rank[e]) * hidden + r0;
        }
        product(m, &tile->expert.down, hidden, inter, r0, r1, in, scales, n, y, thread);
    }
}

static aff_status check(const aff_expert_shape *s, const aff_moe_plan *p, int T, int K, aff_error *err)
{
    int unit = s->dtype == AFF_MXFP4 ? 32 : 64;
    if (s->dtype != AFF_MXFP4 && (s->dtype != AFF_Q2P875G || !s->table))
        return aff__fail(err, AFF_E_UNSUPPORTED, "routed experts: dtype %d: expected %d (with its table) or %d",
                         (int)s->dtype, AFF_Q2P875G, AFF_MXFP4);
    if (s->hidden <= 0 || s->inter <= 0 || s->hidden % unit || s->inter % unit)
        return aff__fail(err, AFF_E_INVALID, "routed experts: widths %d and %d: expected positive multiples of %d",
                         s->hidden, s->inter, unit);
    for (int i = 0; i < p->n_entries; i++)
        if (p->row[i] < 0 || p->row[i] >= T || p->rank[i] < 0 || p->rank[i] >= K)
            return aff__fail(err, AFF_E_INVALID, "routed experts: entry %d: row %d, rank %d: expected below %d and %d",
                             i, p->row[i], p->rank[i], T, K);
    for (int i = 0; i < p->n_tiles; i++)
        if (p->tile[i].first < 0 || p->tile[i].count < 0 || p->tile[i].count > p->n_entries - p->tile[i].first)
            return aff__fail(err, AFF_E_INVALID, "routed experts: tile %d: entries %d+%d: the plan has %d", i,
                             p->tile[i].first, p->tile[i].count, p->n_entries);
    return AFF_OK;
}

static aff_status prepare(moe *m, aff_moe_scratch *s, int threads, aff_error *err)
{
    uint64_t T = (uint64_t)m->T, entries = (uint64_t)m->plan->n_entries;
    uint64_t hidden = (uint64_t)m->shape->hidden, inter = (uint64_t)m->shape->inter;
    if (!m->fast) {
        uint64_t wide = hidden > inter ? hidden : inter;
        AFF_TRY(reserve(&s->h, entries, inter, sizeof(float), &m->h, err));
        return reserve(&s->decoded, (uint64_t)threads * DECODED, wide, sizeof(float), &m->decoded, err);
    }
    AFF_TRY(reserve(&s->xq, T, hidden, 1, &m->xq, err));
    AFF_TRY(reserve(&s->xs, T, (uint64_t)m->gx, sizeof(float), &m->xs, err));
    AFF_TRY(reserve(&s->h, entries, inter, 1, &m->hq, err));
    return reserve(&s->hs, entries, (uint64_t)m->gh, sizeof(float), &m->hs, err);
}

aff_status aff__cpu_experts(aff_pool *pool, aff_moe_scratch *s, const aff_expert_shape *shape, aff_numerics num,
                            const aff_moe_plan *plan, const float *x, int64_t ldx, int T, int K, float *y,
                            aff_error *err)
{
    AFF_TRY(check(shape, plan, T, K, err));
    moe m = {.in = aff__cpu_inner_now(),
             .shape = shape,
             .plan = plan,
             .fast = num == AFF_FAST,
             .batch = num == AFF_FAST ? AFF__BATCH_MAX : AFF__ROWS_MAX,
             .x = x,
             .ldx = ldx,
             .T = T,
             .K = K,
             .y = y,
             .gx = aff__ceil_div(shape->hidden, BLOCK),
             .gh = aff__ceil_div(shape->inter, BLOCK)};
    AFF_TRY(prepare(&m, s, pool ? aff__pool_threads(pool) : 1, err));
    if (m.fast) aff__pool_run(T > 1 ? pool : NULL, quantise_row, &m, T);
    m.blocks = m.gh;
    aff__pool_run(pool, up_task, &m, (int64_t)plan->n_tiles * m.blocks);
    m.blocks = m.gx;
    aff__pool_run(pool, down_task, &m, (int64_t)plan->n_tiles * m.blocks);
    return AFF_OK;
}
