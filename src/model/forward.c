/* The forward pass of DeepSeek-V4, to be read beside spec/model-v4.md: the numbers in comments are its sections. Every line that
 * computes is an op of backend.h; this file holds only their order. */
#include "model/runner.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

/* ---- 7: attention ---- */

static aff_rowset rowset(const aff_runner *r) { return (aff_rowset){r->n, r->pos, r->first, r->state}; }

/* 7.3: both series of projections, the rows of the groups they complete, history. */
static void compress(aff_runner *r, const aff_weight *wkv, const aff_weight *wgate, const aff_compressor *c)
{
    const aff_rowset rs = rowset(r);
    r->b->matmul(r->b, wkv, r->x, r->n, r->c);
    r->b->matmul(r->b, wgate, r->x, r->n, r->z);
    r->b->compress(r->b, c, &r->net->rope_compressed, &rs, r->c, r->z);
}

/* 7.4: which compressed rows each query of a ratio-4 layer sees. */
static aff_status select_rows(aff_runner *r, const aff_block *b, int layer, aff_error *err)
{
    const aff_config *c = &r->net->cfg;
    const aff_rowset rs = rowset(r);
    r->b->matmul(r->b, &b->idx_wq_b, r->qa, r->n, r->iq);
    r->b->index_query(r->b, r->iq, r->n, c->index_heads, c->index_dim, &r->net->rope_compressed, r->pos);
    r->b->matmul(r->b, &b->idx_proj, r->x, r->n, r->iw);
    AFF_TRY(r->b->index_select(r->b, &rs, r->iq, r->iw, c->index_heads, c->index_dim, b->ratio, c->index_topk, r->sel, err));
    if (r->trace)
        for (int t = 0; t < r->n; t++) { /* one call a row: rows differ in width */
            const int64_t groups = (r->pos[t] + 1) / b->ratio;
            r->trace(r->trace_ctx, "sel", layer, (int)r->pos[t], r->sel + (int64_t)t * c->index_topk, 1, groups < c->index_topk ? (int)groups : c->index_topk);
        }
    return AFF_OK;
}

/* 7.5: the key list of every row. */
static void key_lists(aff_runner *r, const aff_block *b, aff_reach reach)
{
    const aff_config *c = &r->net->cfg;
    const int64_t W = c->window;
    for (int t = 0; t < r->n; t++) {
        const aff_layer_state *s = r->state[t];
        const int64_t end = reach == AFF_DRAFT ? r->pos[r->first[t]] : r->pos[t] + 1; /* one past the last ring row */
        const int64_t lo = end > W ? end - W : 0;
        aff_keyset *k = &r->keys[t];
        *k = (aff_keyset){.row = s->row, .raw = s->raw, .raw_size = s->raw_size, .lo = lo, .n_raw = (int)(end - lo)};
        if (reach == AFF_DRAFT) {
            k->extra = r->kv + (int64_t)r->first[t] * c->head_dim;
            k->n_extra = c->draft_block;
        } else if (b->ratio) {
            k->comp = s->comp;
            k->n_comp = (int)((r->pos[t] + 1) / b->ratio);
            if (b->ratio == 4 && k->n_comp > c->index_topk) {
                k->n_comp = c->index_topk;
                k->sel = r->sel + (int64_t)t * c->index_topk;
            }
        }
    }
}

/* Row g of stored rows, for the trace: r->c is free by then. */
static void trace_row(aff_runner *r, const char *what, int layer, const aff_rowfmt *f, const void *rows, int64_t g)
{
    aff__row_decode(f, (const uint8_t *)rows + g * f->bytes, r->c);
    r->trace(r->trace_ctx, what, layer, (int)g, r->c, 1, f->n);
}

static void trace_compressed(aff_runner *r, const aff_block *b, int layer)
{
    for (int t = 0; r->trace && t < r->n; t++) {
        const aff_layer_state *s = r->state[t];
        if ((r->pos[t] + 1) % b->ratio) continue;
        trace_row(r, "comp", layer, s->row, s->comp, r->pos[t] / b->ratio);
        if (b->ratio == 4) trace_row(r, "ikey", layer, s->key, s->ikey, r->pos[t] / b->ratio);
    }
}

aff_status aff__attention(aff_runner *r, const aff_block *b, int layer, aff_reach reach, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int T = r->n, NH = c->heads, D = c->head_dim;
    const aff_rope *rope = b->ratio ? &r->net->rope_compressed : &r->net->rope;
    const aff_rowset rs = rowset(r);
    /* 7.2 queries and the raw KV row */
    B->matmul(B, &b->wq_a, r->x, T, r->qa);
    B->rmsnorm(B, r->qa, b->q_norm, c->rms_eps, T, c->q_rank, r->qa);
    B->matmul(B, &b->wq_b, r->qa, T, r->q);
    B->q_finish(B, r->q, T, NH, D, c->rms_eps, rope, r->pos);
    B->matmul(B, &b->wkv, r->x, T, r->kv);
    B->kv_finish(B, r->kv, T, D, b->kv_norm, c->rms_eps, rope, r->pos);
    aff__trace(r, "kv", layer, r->kv, T, D);
    if (reach == AFF_CAUSAL) B->raw_store(B, &rs, r->kv, D);
    /* 7.3, 7.4 compressed rows and their selection */
    if (b->ratio) {
        compress(r, &b->comp_wkv, &b->comp_wgate, &b->comp);
        if (b->ratio == 4) {
            compress(r, &b->idx_comp_wkv, &b->idx_comp_wgate, &b->idx_comp);
            AFF_TRY(select_rows(r, b, layer, err));
        }
        trace_compressed(r, b, layer);
    }
    /* 7.5 the core, 7.6 grouped output */
    key_lists(r, b, reach);
    AFF_TRY(B->attend(B, r->q, T, NH, D, r->keys, b->sink, rope, r->pos, r->o, err));
    B->matmul_grouped(B, &b->wo_a, c->o_groups, r->o, T, r->low);
    B->matmul(B, &b->wo_b, r->low, T, r->f);
    return AFF_OK;
}

/* ---- 8: mixture of experts ---- */

aff_status aff__moe(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int T = r->n, K = c->picks;
    const aff_moe_plan *plan;
    aff_expert_shape shape = aff__experts_shape(experts);
    shape.swiglu_limit = c->swiglu_limit;
    B->matmul(B, &b->gate, r->x, T, r->route);
    B->route(B, &b->router, r->route, r->ids, T, r->picks, r->weights);
    if (r->on_route)
        r->on_route(r->route_ctx, &(aff_route){.draft = experts == r->net->draft_experts,
                                               .layer = store_layer,
                                               .rows = T,
                                               .picks = K,
                                               .experts = c->experts,
                                               .pos = r->pos,
                                               .store = experts,
                                               .logits = r->route,
                                               .bias = b->router.bias,
                                               .scoring = b->router.scoring,
                                               .scale = b->router.scale,
                                               .pick = r->picks,
                                               .weight = r->weights});
    aff__trace(r, "router_ids", layer, r->picks, T, K);
    aff__trace(r, "router_weights", layer, r->weights, T, K);
    if (experts == r->net->experts) aff__heat_note(&r->heat, layer, r->picks, T * K);
    AFF_TRY(aff__plan_build(r->plan, experts, store_layer, r->picks, r->weights, T, K, &plan, err));
    aff_moe_plan work = *plan;
    work.h = r->h;
    const aff_status st = B->experts(B, &shape, &work, r->x, T, K, r->y, err);
    if (st == AFF_OK && r->watch) r->watch(r->watch_ctx, layer, &work, r->x);
    aff__plan_done(r->plan);
    AFF_TRY(st);
    B->matmul(B, &b->sh_gate, r->x, T, r->sa);
    B->matmul(B, &b->sh_up, r->x, T, r->sb);
    B->swiglu(B, r->sa, r->sb, c->swiglu_limit, (int64_t)T * c->inter);
    B->matmul(B, &b->sh_down, r->sa, T, r->f);
    B->sum_experts(B, r->y, T, K, c->hidden, r->f);
    return AFF_OK;
}

/* ---- 5: the block and the trunk ---- */

aff_status aff__block(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_reach reach, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int T = r->n, H = c->hidden, N = c->hc;
    B->hc_pre(B, &b->hc_attn, r->X, T, H, r->u, r->post, r->comb);
    B->rmsnorm(B, r->u, b->attn_norm, c->rms_eps, T, H, r->x);
    aff__trace(r, "attn_in", layer, r->x, T, H);
    AFF_TRY(aff__attention(r, b, layer, reach, err));
    aff__trace(r, "attn_out", layer, r->f, T, H);
    B->hc_post(B, r->f, r->post, r->comb, T, N, H, r->X);

    B->hc_pre(B, &b->hc_ffn, r->X, T, H, r->u, r->post, r->comb);
    B->rmsnorm(B, r->u, b->ffn_norm, c->rms_eps, T, H, r->x);
    aff__trace(r, "ffn_in", layer, r->x, T, H);
    AFF_TRY(aff__moe(r, b, experts, store_layer, layer, err));
    aff__trace(r, "ffn_out", layer, r->f, T, H);
    B->hc_post(B, r->f, r->post, r->comb, T, N, H, r->X);
    aff__trace(r, "x", layer, r->X, T, N * H);
    return AFF_OK;
}

/* The rows of the pass through all layers. r->X holds the streams afterwards, r->tap the draft's input. */
static aff_status trunk(aff_runner *r, aff_error *err)
{
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    const int H = c->hidden;
    r->b->embed(r->b, &n->embed, r->ids, r->n, c->hc, r->X);
    for (int l = 0, tap = 0; l < n->layers; l++) {
        aff__use_layer(r, l);
        AFF_TRY(aff__block(r, &n->layer[l], n->experts, l, l, AFF_CAUSAL, err));
        if (tap < c->n_taps && c->tap[tap] == l) r->b->stream_mean(r->b, r->X, r->n, c->hc, H, r->tap + (int64_t)tap++ * H, (int64_t)c->n_taps * H);
    }
    if (n->draft == AFF_DRAFT_DSPARK) aff__trace(r, "tap", 0, r->tap, r->n, c->n_taps * H);
    return AFF_OK;
}

/* 9: logits of n rows from row `from`. */
void aff__head(aff_runner *r, int from, int n, float *logits)
{
    aff_backend *B = r->b;
    const aff_net *net = r->net;
    const int H = net->cfg.hidden;
    B->hc_head(B, &net->hc_head, r->X + (int64_t)from * net->cfg.hc * H, n, H, r->u);
    B->rmsnorm(B, r->u, net->norm, net->cfg.rms_eps, n, H, r->x);
    B->matmul(B, &net->head, r->x, n, logits);
}

static aff_status check(const aff_runner *r, const aff_batch *b, aff_error *err)
{
    const int64_t pos = b->seq->pos;
    if (b->n < 1 || b->want_from < 0 || b->want_from > b->n || (!b->logits && b->want_from < b->n))
        return aff__fail(err, AFF_E_INVALID, "forward pass: %d rows, logits from row %lld", b->n, (long long)b->want_from);
    if (b->seq->net != r->net) return aff__fail(err, AFF_E_INVALID, "forward pass: the sequence belongs to another network");
    if (b->n > b->seq->capacity - pos)
        return aff__fail(err, AFF_E_LIMIT, "context full: %d tokens after position %lld, room for %lld", b->n, (long long)pos, (long long)b->seq->capacity);
    for (int i = 0; i < b->n; i++)
        if (b->id[i] < 0 || b->id[i] >= r->net->cfg.vocab)
            return aff__fail(err, AFF_E_INVALID, "token %d of the input: id %d is outside the vocabulary 0..%d", i, (int)b->id[i], r->net->cfg.vocab - 1);
    return AFF_OK;
}

/* Rows at..at+n-1 of each batch in one pass (several batches: all of their rows). */
static aff_status pass(aff_runner *r, const aff_batch *b, int count, int at, aff_error *err)
{
    const int vocab = r->net->cfg.vocab;
    aff__rows_begin(r, b->trace, b->trace_ctx);
    for (int i = 0; i < count; i++) {
        const int left = b[i].n - at;
        aff__rows_add(r, b[i].seq, b[i].id + at, left < AFF_MAX_CHUNK ? left : AFF_MAX_CHUNK, b[i].seq->pos);
    }
    AFF_TRY(trunk(r, err));
    for (int i = 0, row = 0; i < count; i++) {
        const int n = count > 1 ? b[i].n : r->n, from = b[i].want_from > at ? (int)b[i].want_from - at : 0;
        if (from < n) aff__head(r, row + from, n - from, b[i].logits + (at + from - b[i].want_from) * vocab);
        row += n;
    }
    /* The draft looks back one window from where it stands, and a rollback may move it back a little. */
    if (r->net->draft == AFF_DRAFT_DSPARK) {
        const int skip = count > 1 ? 0 : b->n - at - r->net->cfg.window - AFF_MAX_ROLLBACK;
        if (skip < r->n) aff__draft_seed(r, skip > 0 ? skip : 0);
    }
    for (int t = 0; t < r->n; t++) r->seq[t]->pos++;
    return AFF_OK;
}

static aff_status forward(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    aff_status s = AFF_OK;
    r->streams = false;
    for (int i = 0; i < count; i++) AFF_TRY(aff__seq_grow(b[i].seq, b[i].seq->pos + b[i].n, err));
    for (int i = 0; i < count; i++) aff__seq_begin(b[i].seq, b[i].n);
    for (int at = 0; s == AFF_OK && at < b->n; at += AFF_MAX_CHUNK) s = pass(r, b, count, at, err);
    for (int i = 0; s != AFF_OK && i < count; i++) aff__seq_undo(b[i].seq);
    r->streams = s == AFF_OK;
    return s;
}

aff_status aff__forward(aff_runner *r, const aff_batch *b, aff_error *err)
{
    AFF_TRY(check(r, b, err));
    return forward(r, b, 1, err);
}

aff_status aff__forward_many(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    int rows = 0;
    for (int i = 0; i < count; i++) {
        AFF_TRY(check(r, &b[i], err));
        for (int k = 0; k < i; k++)
            if (b[k].seq == b[i].seq) return aff__fail(err, AFF_E_INVALID, "forward pass: batches %d and %d are of one sequence", k, i);
        rows += b[i].n; /* each at most the capacity, and the sum is checked as it grows */
        if (rows > AFF_MAX_CHUNK) return aff__fail(err, AFF_E_INVALID, "forward pass: more than %d rows of several sequences", AFF_MAX_CHUNK);
    }
    return count ? forward(r, b, count, err) : AFF_OK;
}

/* ---- rows, trace, memory ---- */

void aff__rows_begin(aff_runner *r, aff_trace_fn trace, void *trace_ctx)
{
    r->n = 0;
    r->trace = trace;
    r->trace_ctx = trace_ctx;
}

void aff__rows_add(aff_runner *r, aff_seq *seq, const int32_t *ids, int n, int64_t pos0)
{
    if (r->n == 0) r->trace_pos = pos0;
    for (int i = 0, first = r->n; i < n; i++, r->n++) {
        r->ids[r->n] = ids[i];
        r->pos[r->n] = pos0 + i;
        r->first[r->n] = first;
        r->seq[r->n] = seq;
    }
}

void aff__use_layer(aff_runner *r, int l)
{
    for (int t = 0; t < r->n; t++) r->state[t] = &r->seq[t]->layer[l];
}

void aff__use_stage(aff_runner *r, int l)
{
    for (int t = 0; t < r->n; t++) r->state[t] = &r->seq[t]->stage[l];
}

void aff__trace(aff_runner *r, const char *what, int layer, const void *data, int rows, int width)
{
    if (r->trace) r->trace(r->trace_ctx, what, layer, (int)r->trace_pos, data, rows, width);
}

/* Adds up sizes when base is NULL, hands out pointers otherwise. */
static uint64_t carve(aff_runner *r, char *base)
{
    const aff_config *c = &r->net->cfg;
    const uint64_t Q = AFF_MAX_CHUNK, H = (uint64_t)c->hidden, N = (uint64_t)c->hc, D = (uint64_t)c->head_dim, NHD = (uint64_t)c->heads * D;
    const uint64_t ID = (uint64_t)c->index_dim, IH = (uint64_t)c->index_heads, K = (uint64_t)c->picks, I = (uint64_t)c->inter, V = (uint64_t)c->vocab;
    const uint64_t width = 2 * (D > ID ? D : ID), B = (uint64_t)c->draft_block, MR = (uint64_t)c->draft_rank, S = AFF_MAX_DRAFTS;
    uint64_t used = 0;
#define PLANE(field, count) (r->field = base ? (void *)(base + used) : NULL, used += aff__align_up((uint64_t)(count) * sizeof *r->field, 64))
    PLANE(X, Q * N * H);
    PLANE(u, Q * H);
    PLANE(x, Q * N * H); /* MTP-1 normalises all streams at once */
    PLANE(f, Q * N * H);
    PLANE(post, Q * N);
    PLANE(comb, Q * N * N);
    PLANE(qa, Q * (uint64_t)c->q_rank);
    PLANE(q, Q * NHD);
    PLANE(kv, Q * D);
    PLANE(o, Q * NHD);
    PLANE(low, Q * (uint64_t)c->o_groups * (uint64_t)c->o_rank);
    PLANE(c, Q * width);
    PLANE(z, Q * width);
    PLANE(iq, Q * IH * ID);
    PLANE(iw, Q * IH);
    PLANE(sel, Q * (uint64_t)c->index_topk);
    PLANE(keys, Q);
    PLANE(route, Q * (uint64_t)c->experts);
    PLANE(weights, Q * K);
    PLANE(y, Q * K * H);
    PLANE(picks, Q * K);
    PLANE(sa, Q * I);
    PLANE(sb, Q * I);
    PLANE(tap, Q * (uint64_t)c->n_taps * H);
    PLANE(logits, S * B * V);
    PLANE(markov, S * MR + S * B * (H + MR) + S * V);
    PLANE(ones, Q * N * N + Q * N);
#undef PLANE
    return used;
}

aff_runner_bytes aff__runner_plan(const aff_net *net, int threads, int64_t positions)
{
    const aff_config *c = &net->cfg;
    aff_runner r = {.net = net};
    int ratio = 0; /* of the layers with an index */
    for (int l = 0; l < net->layers; l++)
        if (c->ratio[l] == 4) ratio = 4;
    const aff_backend_need need = {.rows = AFF_MAX_CHUNK,
                                   .hidden = c->hidden,
                                   .inter = c->inter,
                                   .picks = c->picks,
                                   .head_dim = c->head_dim,
                                   .rope_dim = c->rope_dim,
                                   .index_heads = c->index_heads,
                                   .groups = ratio ? positions / ratio : 0};
    return (aff_runner_bytes){.planes = aff__align_up(sizeof r, 64) + aff__align_up(carve(&r, NULL), 64),
                              .plan = aff__plan_bytes(AFF_MAX_CHUNK, c->picks, c->experts),
                              .backend = aff__cpu_backend_bytes(net->numerics, aff__pool_size(threads), &need)};
}

void aff__runner_on_route(aff_runner *r, aff_route_fn fn, void *ctx)
{
    r->on_route = fn;
    r->route_ctx = ctx;
}

aff_status aff__runner_create(aff_runner **out, const aff_net *net, int threads, aff_error *err)
{
    aff_runner *r;
    const aff_config *c = &net->cfg;
    AFF_TRY(aff__calloc(&r, 1, sizeof *r, "runner", err));
    r->net = net;
    aff_status s = aff__cpu_backend(&r->b, net->numerics, threads, err);
    if (s == AFF_OK) s = aff__plan_create(&r->plan, AFF_MAX_CHUNK, c->picks, c->experts, err);
    if (s == AFF_OK) s = aff__heat_create(&r->heat, net->layers, c->experts, err);
    if (s == AFF_OK) s = aff__calloc(&r->memory, carve(r, NULL), 1, "pass buffers", err);
    if (s != AFF_OK) {
        aff__runner_free(r);
        return s;
    }
    carve(r, r->memory);
    float *one = r->ones + (int64_t)AFF_MAX_CHUNK * c->hc * c->hc;
    for (int i = 0; i < AFF_MAX_CHUNK * c->hc; i++) {
        r->ones[(int64_t)i * c->hc + i % c->hc] = 1;
        one[i] = 1;
    }
    *out = r;
    return AFF_OK;
}

const aff_heat *aff__runner_heat(const aff_runner *r)
{
    return &r->heat;
}

void aff__runner_free(aff_runner *r)
{
    if (!r) return;
    if (r->b) r->b->free(r->b);
    aff__plan_free(r->plan);
    aff__heat_free(&r->heat);
    free(r->memory);
    free(r);
}
