/* The forward pass of DeepSeek-V4, to be read beside spec/model-v4.md: the numbers in comments are its sections. Every line that
 * computes is an op of backend.h; this file holds only their order. */
#include "model/runner.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

/* ---- 7: attention ---- */

aff_rowset aff__rows_part(const aff_runner *r, int at, int n)
{
    return (aff_rowset){
        .n = n, .pos = r->pos + at, .first = r->first + at, .state = r->state + at, .at = at, .table = r->table + at, .layer = r->layer};
}

static void trace_selection(aff_runner *r, const aff_block *b, int layer)
{
    const int topk = r->net->cfg.index_topk;
    const int *sel = aff__host_view(r, r->sel, (uint64_t)r->n * (uint64_t)topk * sizeof *sel);
    for (int t = 0; sel && t < r->n; t++) { /* one call a row: rows differ in width */
        const int64_t groups = (r->pos[t] + 1) / b->ratio;
        r->trace(r->trace_ctx, "sel", layer, (int)r->pos[t], sel + (int64_t)t * topk, 1, groups < topk ? (int)groups : topk);
    }
}

/* Row g of stored rows. */
static void trace_row(aff_runner *r, const char *what, int layer, const aff_rowfmt *f, const void *rows, int64_t g)
{
    float x[AFF__TRACED_ROW];
    const uint8_t *row = aff__host_view(r, (const uint8_t *)rows + g * f->bytes, (uint64_t)f->bytes);
    if (!row || f->n > AFF__TRACED_ROW) return;
    aff__row_decode(f, row, x);
    r->trace(r->trace_ctx, what, layer, (int)g, x, 1, f->n);
}

static void trace_compressed(aff_runner *r, const aff_block *b, int layer)
{
    for (int t = 0; t < r->n; t++) {
        const aff_layer_state *s = r->state[t];
        if ((r->pos[t] + 1) % b->ratio) continue;
        trace_row(r, "comp", layer, s->row, s->comp, r->pos[t] / b->ratio);
        if (b->ratio == 4) trace_row(r, "ikey", layer, s->key, s->ikey, r->pos[t] / b->ratio);
    }
}

/* Rows at..at+n-1 from r->qa (all rows: from r->q) to r->low: what goes by the rings, which hold the window and AFF_MAX_CHUNK rows more. */
static aff_status attend_piece(aff_runner *r, const aff_block *b, aff_reach reach, const aff_rope *rope, int at, int n, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int NH = c->heads, D = c->head_dim, IH = c->index_heads, ID = c->index_dim;
    const aff_rowset rs = aff__rows_part(r, at, n);
    const int64_t row = at;
    int *sel = r->sel + row * c->index_topk;
    if (n < r->n) aff__matmul(B, &b->wq_b, r->qa + row * c->q_rank, n, r->q);
    B->q_finish(B, &rs, r->q, NH, D, c->rms_eps, rope);
    B->kv_finish(B, &rs, r->kv + row * D, D, b->kv_norm, c->rms_eps, rope, reach == AFF_CAUSAL);
    if (b->ratio == 4)
        AFF_TRY(B->index_select(B, &rs, r->iq + row * IH * ID, r->iw + row * IH, IH, ID, b->ratio, c->index_topk, sel, err));
    /* 7.5 the core, 7.6 grouped output */
    aff_view view = {.window = c->window, .ratio = b->ratio, .topk = c->index_topk, .sel = sel};
    if (reach == AFF_DRAFT) view = (aff_view){.window = c->window, .own = r->kv, .block = c->draft_block};
    AFF_TRY(B->attend(B, &rs, &view, r->q, NH, D, b->sink, rope, r->o, err));
    B->products(B, &(aff_product){&b->wo_a, r->o, r->low + row * b->wo_a.rows, c->o_groups}, 1, n);
    return AFF_OK;
}

aff_status aff__attention(aff_runner *r, const aff_block *b, int layer, aff_reach reach, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int T = r->n, IH = c->index_heads, ID = c->index_dim;
    const bool compressed = b->ratio != 0, indexed = b->ratio == 4;
    const aff_rope *rope = compressed ? &r->net->rope_compressed : &r->net->rope;
    const aff_rowset rs = aff__rows_part(r, 0, T);
    /* Everything that the layer's input is multiplied with: 7.2 queries, raw KV row; 7.3 both compressors; 7.4 weights of the indexer's heads. */
    const aff_product of_x[] = {{&b->wq_a, r->x, r->qa},         {&b->wkv, r->x, r->kv},          {&b->comp_wkv, r->x, r->c}, {&b->comp_wgate, r->x, r->z},
                                {&b->idx_comp_wkv, r->x, r->ic}, {&b->idx_comp_wgate, r->x, r->iz}, {&b->idx_proj, r->x, r->iw}};
    B->products(B, of_x, indexed ? 7 : compressed ? 4 : 2, T);
    B->rmsnorm(B, r->qa, b->q_norm, c->rms_eps, T, c->q_rank, r->qa);
    const aff_product of_q[] = {{&b->wq_b, r->qa, r->q}, {&b->idx_wq_b, r->qa, r->iq}};
    const int first = T > AFF_MAX_CHUNK, last = indexed ? 2 : 1; /* queries of a longer pass are made piece by piece */
    if (first < last) B->products(B, of_q + first, last - first, T);
    /* 7.3, 7.4 compressed rows: a row sees those of groups that end with it or before, whatever else is there */
    if (compressed) {
        const aff_compression k[] = {{&b->comp, r->c, r->z}, {&b->idx_comp, r->ic, r->iz}};
        B->compress(B, k, indexed ? 2 : 1, rope, &rs);
    }
    if (indexed) B->index_query(B, &rs, r->iq, IH, ID, rope);
    for (int at = 0; at < T; at += AFF_MAX_CHUNK)
        AFF_TRY(attend_piece(r, b, reach, rope, at, T - at < AFF_MAX_CHUNK ? T - at : AFF_MAX_CHUNK, err));
    aff__trace(r, "kv", layer, r->kv, T, c->head_dim);
    if (indexed && r->trace) trace_selection(r, b, layer);
    if (compressed && r->trace) trace_compressed(r, b, layer);
    aff__matmul(B, &b->wo_b, r->low, T, r->f);
    return AFF_OK;
}

/* ---- 8: mixture of experts ---- */

/* The layer's number in the tiers: stages of the draft follow the trunk. */
static int tier_layer(const aff_runner *r, const aff_experts *experts, int store_layer)
{
    return experts == r->net->experts ? store_layer : r->net->layers + store_layer;
}

/* A part of the layer's experts, on the host. */
typedef struct {
    aff_runner *r;
    const aff_expert_shape *shape;
} part_ctx;
static aff_status part(void *ctx, const aff_moe_plan *p, aff_error *err)
{
    const part_ctx *c = ctx;
    aff_moe_plan work = *p;
    work.h = c->r->h;
    return c->r->b->experts(c->r->b, c->shape, &work, c->r->x, c->r->n, c->r->net->cfg.picks, c->r->y, err);
}

/* What the router ranked by, summed over the rows, in place of the logits, which nobody needs any more. NULL where it says nothing: a choice by token, a prompt's
 * pass, experts that do not move. */
static const float *router_values(aff_runner *r, const aff_router *by)
{
    const int E = r->net->cfg.experts;
    if (!by->bias || r->n > AFF_LOGIT_ROWS || aff__tiers_mapped(r->net->tiers)) return NULL;
    for (int e = 0; e < E; e++) {
        double sum = 0;
        for (int t = 0; t < r->n; t++) sum += aff__rank_value(by->scoring, (double)r->route[(int64_t)t * E + e], (double)by->bias[e]);
        r->route[e] = (float)sum;
    }
    return r->route;
}

/* y of every (row, expert): on the host's plan, or the backend's own. */
static aff_status routed(aff_runner *r, const aff_router *by, aff_experts *experts, int store_layer, int layer, aff_error *err)
{
    aff_backend *B = r->b;
    const int T = r->n, K = r->net->cfg.picks;
    const aff_moe_plan *plan;
    aff_expert_shape shape = aff__experts_shape(experts);
    shape.swiglu_limit = r->net->cfg.swiglu_limit;
    if (B->routed) {
        const aff_expert_table *e = experts == r->net->experts ? &r->experts : &r->draft_experts;
        if (r->shape_table) shape.table = r->shape_table;
        B->routed(B, &shape, e, store_layer, r->picks, r->weights, r->x, T, K, r->y);
        return AFF_OK;
    }
    const int at = tier_layer(r, experts, store_layer);
    AFF_TRY(aff__plan_build(r->plan, store_layer, r->picks, r->weights, T, K, &plan, err));
    AFF_TRY(aff__plan_each(r->plan, r->net->tiers, at, part, &(part_ctx){r, &shape}, err));
    AFF_TRY(aff__tiers_note_picks(r->net->tiers, at, T > AFF_LOGIT_ROWS ? AFF_USE_PREFILL : AFF_USE_DECODE, r->picks, T, K, router_values(r, by), err));
    aff_moe_plan work = *plan;
    work.h = r->h;
    if (r->watch) r->watch(r->watch_ctx, layer, &work, r->x);
    return AFF_OK;
}

static aff_status show_route(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, aff_error *err)
{
    if (!r->on_route) return AFF_OK;
    if (!r->b->mem->host) return aff__fail(err, AFF_E_UNSUPPORTED, "routes cannot be watched or replaced on a device: use --device cpu");
    r->on_route(r->route_ctx, &(aff_route){.draft = experts == r->net->draft_experts,
                                           .layer = store_layer,
                                           .rows = r->n,
                                           .picks = r->net->cfg.picks,
                                           .experts = r->net->cfg.experts,
                                           .pos = r->pos,
                                           .tiers = r->net->tiers,
                                           .tier_layer = tier_layer(r, experts, store_layer),
                                           .logits = r->route,
                                           .bias = b->router.bias,
                                           .scoring = b->router.scoring,
                                           .scale = b->router.scale,
                                           .pick = r->picks,
                                           .weight = r->weights});
    return AFF_OK;
}

/* Layers from this one to the one whose experts are predicted here, so that they can be fetched: 0 for none. *gate: what its router is fed with, NULL if it
 * has a table. Layers with tables of their own need no prediction (expect_hashed). */
static int predicted(const aff_runner *r, const aff_experts *experts, int layer, aff_router *router, const aff_weight **gate)
{
    const int at = layer + r->ahead;
    *gate = NULL;
    if (!r->ahead || !r->b->predict || r->n > AFF_LOGIT_ROWS || r->n > r->b->repeat_rows || experts != r->net->experts || at >= r->net->layers) return 0;
    *router = r->net->layer[at].router;
    if (r->guess_host)
        router->hash = r->guess + (int64_t)at * r->net->cfg.vocab * r->net->cfg.picks;
    else if (router->hash)
        return 0;
    else
        *gate = &r->net->layer[at].gate;
    return r->ahead;
}

/* Layers whose experts follow from the tokens. */
static void expect_hashed(aff_runner *r)
{
    const int K = r->net->cfg.picks;
    if (!r->ahead || !r->b->expect || r->n > AFF_LOGIT_ROWS || r->n > r->b->repeat_rows) return;
    for (int l = 0; l < r->source->layers; l++) {
        const int32_t *hash = r->source->layer[l].router.hash; /* the host's */
        if (r->guess_host) hash = l < r->ahead ? r->guess_host + (int64_t)l * r->net->cfg.vocab * K : NULL;
        for (int t = 0; hash && t < r->n; t++) r->b->expect(r->b, l, hash + (int64_t)r->ids[t] * K, K);
    }
}

aff_status aff__moe(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int T = r->n, K = c->picks;
    aff_router later;
    const aff_weight *gate;
    const int ahead = predicted(r, experts, store_layer, &later, &gate);
    const aff_product of_x[] = {{&b->gate, r->x, r->route}, {&b->sh_gate, r->x, r->sa}, {&b->sh_up, r->x, r->sb}, {gate, r->x, r->route2}};
    B->products(B, of_x, gate ? 4 : 3, T);
    if (ahead) B->predict(B, &later, r->route2, r->dids, store_layer + ahead, ahead);
    B->swiglu(B, r->sa, r->sb, c->swiglu_limit, T, c->inter);
    B->route(B, &b->router, r->route, r->dids, T, r->picks, r->weights);
    AFF_TRY(show_route(r, b, experts, store_layer, err));
    aff__trace(r, "router_ids", layer, r->picks, T, K);
    aff__trace(r, "router_weights", layer, r->weights, T, K);
    AFF_TRY(routed(r, &b->router, experts, store_layer, layer, err));
    aff__matmul(B, &b->sh_down, r->sa, T, r->f);
    return AFF_OK;
}

/* ---- 5: the block and the trunk ---- */

aff_status aff__block(aff_runner *r, const aff_block *b, aff_experts *experts, int store_layer, int layer, aff_reach reach, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    const int T = r->n, H = c->hidden, N = c->hc;
    B->hc_pre(B, &b->hc_attn, r->X, T, H, b->attn_norm, c->rms_eps, r->u, r->x, r->post, r->comb);
    aff__trace(r, "attn_in", layer, r->x, T, H);
    AFF_TRY(aff__attention(r, b, layer, reach, err));
    aff__trace(r, "attn_out", layer, r->f, T, H);
    B->hc_post(B, r->f, NULL, 0, r->post, r->comb, T, N, H, r->X);
    aff__trace(r, "x_attn", layer, r->X, T, N * H);

    B->hc_pre(B, &b->hc_ffn, r->X, T, H, b->ffn_norm, c->rms_eps, r->u, r->x, r->post, r->comb);
    aff__trace(r, "ffn_in", layer, r->x, T, H);
    AFF_TRY(aff__moe(r, b, experts, store_layer, layer, err));
    if (r->trace) { /* the sum by itself: the same bits */
        B->sum_experts(B, r->y, T, c->picks, H, r->f);
        aff__trace(r, "ffn_out", layer, r->f, T, H);
    }
    B->hc_post(B, r->f, r->trace ? NULL : r->y, c->picks, r->post, r->comb, T, N, H, r->X);
    aff__trace(r, "x", layer, r->X, T, N * H);
    return AFF_OK;
}

/* The rows of the pass through all layers. r->X holds the streams afterwards, r->tap the draft's input. */
static aff_status trunk(aff_runner *r, aff_error *err)
{
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    const int H = c->hidden;
    r->b->embed(r->b, &n->embed, r->dids, r->n, c->hc, r->X);
    for (int l = 0, tap = 0; l < n->layers; l++) {
        aff__use_layer(r, l);
        AFF_TRY(aff__block(r, &n->layer[l], n->experts, l, l, AFF_CAUSAL, err));
        if (tap < c->n_taps && c->tap[tap] == l) r->b->stream_mean(r->b, r->X, r->n, c->hc, H, r->tap + (int64_t)tap++ * H, (int64_t)c->n_taps * H);
    }
    if (n->draft == AFF_DRAFT_DSPARK) aff__trace(r, "tap", 0, r->tap, r->n, c->n_taps * H);
    return AFF_OK;
}

/* Logits of a device go through a plane of its memory, some rows at a time. */
aff_status aff__logits(aff_runner *r, const aff_hc *h, const float *norm, const float *X, int n, float *logits, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_net *net = r->net;
    const aff_config *c = &net->cfg;
    const int some = B->mem->host ? n : AFF_LOGIT_ROWS;
    for (int at = 0; at < n; at += some) {
        const int m = n - at < some ? n - at : some;
        float *to = logits + (int64_t)at * c->vocab, *here = B->mem->host ? to : r->logits;
        B->hc_head(B, h, X + (int64_t)at * c->hc * c->hidden, m, c->hidden, norm, c->rms_eps, r->u, r->x);
        aff__matmul(B, &net->head, r->x, m, here);
        if (here != to) AFF_TRY(B->mem->read(B->mem, to, here, (uint64_t)m * (uint64_t)c->vocab * sizeof *to, err));
    }
    return AFF_OK;
}

/* 9: logits of n rows from row `from`. */
aff_status aff__head(aff_runner *r, int from, int n, float *logits, aff_error *err)
{
    const aff_net *net = r->net;
    return aff__logits(r, &net->hc_head, net->norm, r->X + (int64_t)from * net->cfg.hc * net->cfg.hidden, n, logits, err);
}

static aff_status check(const aff_runner *r, const aff_batch *b, aff_error *err)
{
    const int64_t pos = b->seq->pos;
    if (b->n < 1 || b->want_from < 0 || b->want_from > b->n || (!b->logits && b->want_from < b->n))
        return aff__fail(err, AFF_E_INVALID, "forward pass: %d rows, logits from row %lld", b->n, (long long)b->want_from);
    if (b->seq->net != r->source) return aff__fail(err, AFF_E_INVALID, "forward pass: the sequence belongs to another network");
    if (b->seq->mem != r->b->mem) return aff__fail(err, AFF_E_INVALID, "forward pass: the sequence's memory is not the runner's");
    if (b->n > b->seq->capacity - pos)
        return aff__fail(err, AFF_E_LIMIT, "context full: %d tokens after position %lld, room for %lld", b->n, (long long)pos, (long long)b->seq->capacity);
    for (int i = 0; i < b->n; i++)
        if (b->id[i] < 0 || b->id[i] >= r->net->cfg.vocab)
            return aff__fail(err, AFF_E_INVALID, "token %d of the input: id %d is outside the vocabulary 0..%d", i, (int)b->id[i], r->net->cfg.vocab - 1);
    return AFF_OK;
}

static aff_status commit_rows(aff_runner *r, aff_error *err)
{
    AFF_TRY(aff__rows_done(r, err));
    for (int t = 0; t < r->n; t++) r->seq[t]->pos++;
    return AFF_OK;
}

/* A pass of few rows on a device, as one piece that can be repeated: all layers, logits of all rows into r->logits, seeds of the draft. */
static aff_status few_rows(void *ctx, aff_error *err)
{
    aff_runner *r = ctx;
    const aff_net *net = r->net;
    AFF_TRY(trunk(r, err));
    r->b->hc_head(r->b, &net->hc_head, r->X, r->n, net->cfg.hidden, net->norm, net->cfg.rms_eps, r->u, r->x);
    aff__matmul(r->b, &net->head, r->x, r->n, r->logits);
    if (net->draft == AFF_DRAFT_DSPARK) aff__draft_seed(r, 0);
    return AFF_OK;
}

/* Keys of repeat: what is run, for how many rows or sequences. */
uint64_t aff__pass_key(aff_pass_kind kind, int n) { return (uint64_t)kind << 32 | (uint64_t)n; }

static aff_status repeated(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    const aff_memory *m = r->b->mem;
    const uint64_t vocab = (uint64_t)r->net->cfg.vocab;
    const uint64_t key = aff__pass_key(AFF_PASS_ROWS_FEW, r->n) | (uint64_t)r->ahead << 40 | (uint64_t)(r->guess_host != NULL) << 48;
    AFF_TRY(r->b->repeat(r->b, key, few_rows, r, err));
    for (int i = 0, row = 0; i < count; row += b[i++].n) {
        const int from = (int)b[i].want_from;
        if (from < b[i].n)
            AFF_TRY(m->read(m, b[i].logits, r->logits + (uint64_t)(row + from) * vocab, (uint64_t)(b[i].n - from) * vocab * sizeof(float), err));
    }
    return AFF_OK;
}

/* Rows at..at+n-1 of each batch in one pass (several batches: all of their rows). */
static aff_status pass(aff_runner *r, const aff_batch *b, int count, int at, aff_error *err)
{
    const int vocab = r->net->cfg.vocab;
    aff__rows_begin(r, b->trace, b->trace_ctx);
    for (int i = 0; i < count; i++) {
        const int left = b[i].n - at;
        aff__rows_add(r, b[i].seq, b[i].id + at, left < r->chunk ? left : r->chunk, b[i].seq->pos);
    }
    AFF_TRY(aff__rows_ready(r, err));
    expect_hashed(r);
    if (r->b->repeat && at == 0 && (count > 1 || b->n == r->n) && r->n <= AFF_LOGIT_ROWS && r->n <= r->b->repeat_rows && !r->trace) {
        AFF_TRY(repeated(r, b, count, err));
        return commit_rows(r, err);
    }
    AFF_TRY(trunk(r, err));
    for (int i = 0, row = 0; i < count; i++) {
        const int n = count > 1 ? b[i].n : r->n, from = b[i].want_from > at ? (int)b[i].want_from - at : 0;
        if (from < n) AFF_TRY(aff__head(r, row + from, n - from, b[i].logits + (at + from - b[i].want_from) * vocab, err));
        row += n;
    }
    /* The draft looks back one window from where it stands, and a rollback may move it back a little. */
    if (r->net->draft == AFF_DRAFT_DSPARK) {
        const int skip = count > 1 ? 0 : b->n - at - r->net->cfg.window - AFF_MAX_ROLLBACK;
        if (skip < r->n) aff__draft_seed(r, skip > 0 ? skip : 0);
    }
    return commit_rows(r, err);
}

static aff_status forward_once(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    aff_status s = AFF_OK;
    r->streams = false;
    for (int i = 0; i < count; i++) AFF_TRY(aff__seq_grow(b[i].seq, b[i].seq->pos + b[i].n, err));
    for (int i = 0; i < count; i++) AFF_TRY(aff__seq_begin(b[i].seq, b[i].n, err));
    for (int at = 0; s == AFF_OK && at < b->n; at += r->chunk) s = pass(r, b, count, at, err);
    if (s != AFF_OK) aff__residency_abandon(r);
    for (int i = 0; s != AFF_OK && i < count; i++) aff__seq_undo(b[i].seq);
    r->streams = s == AFF_OK;
    return s;
}

static aff_status forward(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    aff_status s;
    do s = forward_once(r, b, count, err);
    while (s == AFF_E_NOMEM && r->b->make_room && r->b->make_room(r->b));
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
        if (rows > r->chunk) return aff__fail(err, AFF_E_INVALID, "forward pass: more than %d rows of several sequences", r->chunk);
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
        r->table[r->n] = seq->table;
    }
}

aff_status aff__rows_ready(aff_runner *r, aff_error *err)
{
    const aff_rowset rs = aff__rows_part(r, 0, r->n);
    AFF_TRY(aff__residency_begin(r, err));
    AFF_TRY(r->b->mem->write(r->b->mem, r->dids, r->ids, (uint64_t)r->n * sizeof *r->ids, err));
    return r->b->begin ? r->b->begin(r->b, &rs, err) : AFF_OK;
}

aff_status aff__rows_done(aff_runner *r, aff_error *err)
{
    AFF_TRY(r->b->finish ? r->b->finish(r->b, err) : AFF_OK);
    return aff__residency_end(r, err);
}

void aff__use_layer(aff_runner *r, int l)
{
    r->layer = l;
    for (int t = 0; t < r->n; t++) r->state[t] = &r->seq[t]->layer[l];
}

void aff__use_stage(aff_runner *r, int l)
{
    r->layer = r->net->layers + l;
    for (int t = 0; t < r->n; t++) r->state[t] = &r->seq[t]->stage[l];
}

void aff__trace(aff_runner *r, const char *what, int layer, const void *data, int rows, int width)
{
    if (!r->trace) return;
    data = aff__host_view(r, data, (uint64_t)rows * (uint64_t)width * 4);
    if (data) r->trace(r->trace_ctx, what, layer, (int)r->trace_pos, data, rows, width);
}

const void *aff__host_view(aff_runner *r, const void *data, uint64_t bytes)
{
    const aff_memory *m = r->b->mem;
    if (m->host) return data;
    if (bytes > r->bounce_bytes) {
        if (aff__realloc(&r->bounce, bytes, 1, "trace", NULL) != AFF_OK) return NULL;
        r->bounce_bytes = bytes;
    }
    return m->read(m, r->bounce, data, bytes, NULL) == AFF_OK ? r->bounce : NULL;
}

/* Adds up sizes when base is NULL, hands out pointers otherwise. */
#define PLANE(field, count) (r->field = base ? (void *)(base + used) : NULL, used += aff__align_up((uint64_t)(count) * sizeof *r->field, 64))
static uint64_t carve_rows(aff_runner *r, char *base)
{
    const uint64_t Q = (uint64_t)r->chunk;
    uint64_t used = 0;
    PLANE(ids, Q);
    PLANE(pos, Q);
    PLANE(first, Q);
    PLANE(seq, Q);
    PLANE(state, Q);
    PLANE(table, Q);
    return used;
}

static uint64_t carve(aff_runner *r, char *base)
{
    const aff_config *c = &r->net->cfg;
    const uint64_t Q = (uint64_t)r->chunk, P = AFF_MAX_CHUNK, H = (uint64_t)c->hidden, N = (uint64_t)c->hc, D = (uint64_t)c->head_dim, NHD = (uint64_t)c->heads * D;
    const uint64_t ID = (uint64_t)c->index_dim, IH = (uint64_t)c->index_heads, K = (uint64_t)c->picks, I = (uint64_t)c->inter, V = (uint64_t)c->vocab;
    const uint64_t width = 2 * (D > ID ? D : ID), B = (uint64_t)c->draft_block, MR = (uint64_t)c->draft_rank, S = AFF_MAX_DRAFTS;
    const uint64_t rows = S * B < AFF_LOGIT_ROWS && r->b && !r->b->mem->host ? AFF_LOGIT_ROWS : S * B; /* of logits */
    const uint64_t lanes = r->net->draft == AFF_DRAFT_MTP1 ? N : 1; /* it normalises all streams at once */
    uint64_t used = 0;
    PLANE(X, Q * N * H);
    PLANE(u, Q * H);
    PLANE(x, Q * lanes * H);
    PLANE(f, Q * lanes * H);
    PLANE(post, Q * N);
    PLANE(comb, Q * N * N);
    PLANE(qa, Q * (uint64_t)c->q_rank);
    PLANE(q, P * NHD);
    PLANE(kv, Q * D);
    PLANE(o, P * NHD);
    PLANE(low, Q * (uint64_t)c->o_groups * (uint64_t)c->o_rank);
    PLANE(c, Q * width);
    PLANE(z, Q * width);
    PLANE(ic, Q * 2 * ID);
    PLANE(iz, Q * 2 * ID);
    PLANE(iq, Q * IH * ID);
    PLANE(iw, Q * IH);
    PLANE(sel, Q * (uint64_t)c->index_topk);
    PLANE(dids, Q);
    PLANE(route, Q * (uint64_t)c->experts);
    PLANE(route2, AFF_LOGIT_ROWS * (uint64_t)c->experts);
    PLANE(weights, Q * K);
    PLANE(y, Q * K * H);
    PLANE(picks, Q * K);
    PLANE(sa, Q * I);
    PLANE(sb, Q * I);
    PLANE(tap, Q * (uint64_t)c->n_taps * H);
    PLANE(logits, rows * V);
    PLANE(drafts, (B + 1) * S);
    PLANE(conf, S * B);
    PLANE(markov, S * MR + S * B * (H + MR) + S * V);
    PLANE(ones, Q * N * N + Q * N);
    return used;
}
#undef PLANE

aff_runner_bytes aff__runner_plan(const aff_net *net, int threads, int64_t positions, int rows)
{
    const aff_config *c = &net->cfg;
    aff_runner r = {.net = net, .chunk = rows};
    int ratio = 0; /* of the layers with an index */
    for (int l = 0; l < net->layers; l++)
        if (c->ratio[l] == 4) ratio = 4;
    const aff_backend_need need = {.rows = rows,
                                   .hidden = c->hidden,
                                   .inter = c->inter,
                                   .picks = c->picks,
                                   .head_dim = c->head_dim,
                                   .rope_dim = c->rope_dim,
                                   .index_heads = c->index_heads,
                                   .groups = ratio ? positions / ratio : 0};
    return (aff_runner_bytes){.planes = aff__align_up(sizeof r, 64) + aff__align_up(carve_rows(&r, NULL), 64) + aff__align_up(carve(&r, NULL), 64),
                              .plan = aff__plan_bytes(rows, c->picks, c->experts),
                              .backend = aff__cpu_backend_bytes(net->numerics, aff__pool_size(threads), &need)};
}

void aff__runner_on_route(aff_runner *r, aff_route_fn fn, void *ctx)
{
    r->on_route = fn;
    r->route_ctx = ctx;
}

/* hc_post as a plain sum: identity matrices and ones, into zeros. */
static aff_status fill_ones(aff_runner *r, aff_error *err)
{
    const aff_memory *m = r->b->mem;
    const int N = r->net->cfg.hc;
    const uint64_t n = (uint64_t)r->chunk * (uint64_t)N * (uint64_t)(N + 1);
    float *ones = r->ones;
    if (!m->host) AFF_TRY(aff__calloc(&ones, n, sizeof *ones, "pass buffers", err));
    float *one = ones + (int64_t)r->chunk * N * N;
    for (int i = 0; i < r->chunk * N; i++) {
        ones[(int64_t)i * N + i % N] = 1;
        one[i] = 1;
    }
    if (m->host) return AFF_OK;
    const aff_status s = m->write(m, r->ones, ones, n * sizeof *ones, err);
    free(ones);
    return s;
}

static aff_status make_planes(aff_runner *r, aff_error *err)
{
    const aff_config *c = &r->net->cfg;
    AFF_TRY(aff__plan_create(&r->plan, r->chunk, c->picks, c->experts, err));
    AFF_TRY(aff__calloc(&r->rows, carve_rows(r, NULL), 1, "rows of a pass", err));
    carve_rows(r, r->rows);
    AFF_TRY(r->b->mem->alloc(r->b->mem, &r->memory, carve(r, NULL), "pass buffers", err));
    carve(r, r->memory);
    return fill_ones(r, err);
}

static void free_planes(aff_runner *r)
{
    aff__plan_free(r->plan);
    if (r->memory) r->b->mem->free(r->b->mem, r->memory);
    free(r->rows);
    r->plan = NULL;
    r->memory = r->rows = NULL;
}

aff_status aff__runner_chunk(aff_runner *r, int rows, aff_error *err)
{
    if (rows < AFF_MAX_CHUNK || rows > AFF_MAX_PASS)
        return aff__fail(err, AFF_E_INVALID, "rows of a pass: expected %d to %d, got %d", AFF_MAX_CHUNK, AFF_MAX_PASS, rows);
    if (rows == r->chunk) return AFF_OK;
    free_planes(r);
    r->chunk = rows;
    return make_planes(r, err);
}

aff_status aff__runner_open_bare(aff_runner **out, const aff_net *net, aff_backend *b, aff_error *err)
{
    aff_runner *r;
    *out = NULL;
    aff_status s = aff__calloc(&r, 1, sizeof *r, "runner", err);
    if (s != AFF_OK) {
        b->free(b);
        return s;
    }
    r->source = r->net = net;
    r->b = b;
    r->chunk = AFF_MAX_CHUNK;
    if (b->place) s = aff__place(r, err);
    if (s == AFF_OK) s = make_planes(r, err);
    if (s != AFF_OK) {
        aff__runner_free(r);
        return s;
    }
    *out = r;
    return AFF_OK;
}

aff_status aff__runner_open(aff_runner **out, const aff_net *net, aff_backend *b, aff_error *err)
{
    AFF_TRY(aff__runner_open_bare(out, net, b, err));
    const aff_status s = b->place ? aff__place_experts(*out, err) : AFF_OK;
    if (s != AFF_OK) {
        aff__runner_free(*out);
        *out = NULL;
    }
    return s;
}

aff_status aff__runner_create(aff_runner **out, const aff_net *net, int threads, aff_error *err)
{
    aff_backend *b;
    AFF_TRY(aff__cpu_backend(&b, net->numerics, threads, err));
    return aff__runner_open(out, net, b, err);
}

aff_status aff__runner_on(aff_runner **out, const aff_net *net, const aff_device_spec *spec, int threads, aff_error *err)
{
    aff_backend *b;
    *out = NULL;
    AFF_TRY(aff__device_backend(&b, spec, net->numerics, threads, err));
    return aff__runner_open(out, net, b, err);
}

aff_status aff__runner_on_bare(aff_runner **out, const aff_net *net, const aff_device_spec *spec, int threads, aff_error *err)
{
    aff_backend *b;
    *out = NULL;
    AFF_TRY(aff__device_backend(&b, spec, net->numerics, threads, err));
    return aff__runner_open_bare(out, net, b, err);
}

aff_tiers *aff__runner_tiers(const aff_runner *r)
{
    return r->tiers ? r->tiers : r->source->tiers;
}

bool aff__runner_device(aff_runner *r, aff_device_view *out)
{
    if (r->b->view) r->b->view(r->b, out);
    return r->b->view != NULL;
}

const aff_memory *aff__runner_memory(const aff_runner *r) { return r->b->mem; }

void aff__runner_free(aff_runner *r)
{
    if (!r) return;
    aff__residency_free(r);
    free_planes(r);
    if (r->forced) r->b->mem->free(r->b->mem, r->forced);
    if (r->guess) r->b->mem->free(r->b->mem, r->guess);
    r->b->free(r->b);
    free(r->placed);
    free(r->bounce);
    free(r);
}
