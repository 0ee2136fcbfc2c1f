/* The drafts (spec model-v4 section 13): DSpark's seeded block of B tokens, and June's MTP-1 layer. */
#include "model/runner.h"
#include <string.h>

enum { MOST_BLOCK = 64 }; /* of config.c */

void aff__draft_seed(aff_runner *r, int from)
{
    aff_backend *B = r->b;
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    const int T = r->n - from;
    r->trace_pos = r->pos[from];
    aff__matmul(B, &n->main_proj, r->tap + (int64_t)from * c->n_taps * c->hidden, T, r->x);
    B->rmsnorm(B, r->x, n->main_norm, c->rms_eps, T, c->hidden, r->x);
    aff__trace(r, "mx", 0, r->x, T, c->hidden);
    for (int s = 0; s < n->stages; s++) {
        aff__use_stage(r, s);
        aff__matmul(B, &n->stage[s].wkv, r->x, T, r->kv);
        for (int at = 0; at < T; at += AFF_MAX_CHUNK) { /* no more at once than the ring holds */
            const aff_rowset rs = aff__rows_part(r, from + at, T - at < AFF_MAX_CHUNK ? T - at : AFF_MAX_CHUNK);
            B->kv_finish(B, &rs, r->kv + (int64_t)at * c->head_dim, c->head_dim, n->stage[s].kv_norm, c->rms_eps, &n->rope, true);
        }
        aff__trace(r, "seed", s, r->kv, T, c->head_dim);
    }
}

/* The tokens of every block, one place after another: the Markov head adds a bias that depends on the token before (spec 13.2).
 * Row i*B + b of r->u (h) and r->logits (base) belongs to place b of block i. */
static void markov_chain(aff_runner *r, int count)
{
    aff_backend *B = r->b;
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    const int64_t V = c->vocab, H = c->hidden, MR = c->draft_rank, block = c->draft_block;
    float *e = r->markov, *he = e + AFF_MAX_DRAFTS * MR, *bias = he + AFF_MAX_DRAFTS * block * (H + MR);
    B->stream_mean(B, r->u, r->n, 1, (int)H, he, H + MR); /* h beside the place that e will take */
    for (int b = 0; b < block; b++) {
        int32_t *next = r->drafts + (b + 1) * AFF_MAX_DRAFTS;
        B->embed(B, &n->markov_w1, next - AFF_MAX_DRAFTS, count, 1, e);
        aff__matmul(B, &n->markov_w2, e, count, bias);
        for (int i = 0; i < count; i++) {
            const int64_t row = i * block + b;
            B->hc_post(B, bias + i * V, NULL, 0, r->ones, r->ones, 1, 1, (int)V, r->logits + row * V); /* base + bias */
            B->argmax(B, r->logits + row * V, 1, (int)V, next + i);
            B->stream_mean(B, e + i * MR, 1, 1, (int)MR, he + row * (H + MR) + H, MR);
        }
    }
    aff__matmul(B, &n->confidence, he, (int)(count * block), r->conf);
}

/* To the callers' arrays. */
static aff_status read_drafts(aff_runner *r, const aff_draft_request *d, int count, aff_error *err)
{
    const aff_memory *m = r->b->mem;
    const int block = r->net->cfg.draft_block;
    const uint64_t row = (uint64_t)block * (uint64_t)r->net->cfg.vocab;
    int32_t ids[(MOST_BLOCK + 1) * AFF_MAX_DRAFTS];
    AFF_TRY(m->read(m, ids, r->drafts, (uint64_t)(block + 1) * AFF_MAX_DRAFTS * sizeof *ids, err));
    for (int i = 0; i < count; i++) {
        for (int b = 0; b < block; b++) d[i].ids[b] = ids[(b + 1) * AFF_MAX_DRAFTS + i];
        if (d[i].conf) AFF_TRY(m->read(m, d[i].conf, r->conf + i * block, (uint64_t)block * sizeof *d[i].conf, err));
        if (d[i].logits) AFF_TRY(m->read(m, d[i].logits, r->logits + (uint64_t)i * row, row * sizeof *r->logits, err));
    }
    return AFF_OK;
}

static aff_status check_drafts(const aff_runner *r, const aff_draft_request *d, int count, aff_error *err)
{
    const aff_config *c = &r->net->cfg;
    if (r->net->draft != AFF_DRAFT_DSPARK) return aff__fail(err, AFF_E_INVALID, "draft block: no DSpark draft is loaded");
    if (count < 0 || count > AFF_MAX_DRAFTS || count * c->draft_block > AFF_MAX_CHUNK)
        return aff__fail(err, AFF_E_INVALID, "draft block: %d sequences at once, expected at most %d", count, AFF_MAX_DRAFTS);
    for (int i = 0; i < count; i++) {
        if (d[i].seq->net != r->source) return aff__fail(err, AFF_E_INVALID, "draft block: the sequence belongs to another network");
        if (d[i].seq->pos < 1) return aff__fail(err, AFF_E_INVALID, "draft block: the sequence is empty");
        if (d[i].id0 < 0 || d[i].id0 >= c->vocab)
            return aff__fail(err, AFF_E_INVALID, "draft block: id %d is outside the vocabulary 0..%d", (int)d[i].id0, c->vocab - 1);
    }
    return AFF_OK;
}

/* The stages over the rows of the pass, and the tokens. */
static aff_status draft_blocks(void *ctx, aff_error *err)
{
    aff_runner *r = ctx;
    aff_backend *B = r->b;
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    B->embed(B, &n->embed, r->dids, r->n, c->hc, r->X);
    for (int s = 0; s < n->stages; s++) {
        aff__use_stage(r, s);
        AFF_TRY(aff__block(r, &n->stage[s], n->draft_experts, s, s, AFF_DRAFT, err));
    }
    B->hc_head(B, &n->draft_hc_head, r->X, r->n, c->hidden, n->draft_norm, c->rms_eps, r->u, r->x);
    aff__trace(r, "h", 0, r->u, r->n, c->hidden);
    aff__matmul(B, &n->head, r->x, r->n, r->logits);
    aff__trace(r, "base", 0, r->logits, r->n, c->vocab);
    markov_chain(r, r->n / c->draft_block);
    return AFF_OK;
}

static aff_status draft_once(aff_runner *r, const aff_draft_request *d, int count, aff_trace_fn trace, void *trace_ctx, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_config *c = &r->net->cfg;
    int32_t first[AFF_MAX_DRAFTS];
    AFF_TRY(check_drafts(r, d, count, err));
    r->streams = false;
    aff__rows_begin(r, trace, trace_ctx);
    for (int i = 0; i < count; i++)
        for (int b = 0; b < c->draft_block; b++) {
            const int32_t id = b ? c->draft_noise : d[i].id0;
            aff__rows_add(r, d[i].seq, &id, 1, d[i].seq->pos + b);
            r->first[r->n - 1] = i * c->draft_block;
        }
    if (!count) return AFF_OK;
    for (int i = 0; i < count; i++) first[i] = d[i].id0;
    AFF_TRY(aff__rows_ready(r, err));
    AFF_TRY(B->mem->write(B->mem, r->drafts, first, (uint64_t)count * sizeof *first, err));
    if (B->repeat && !trace && r->n <= B->repeat_rows)
        AFF_TRY(B->repeat(B, aff__pass_key(AFF_PASS_DRAFT, count), draft_blocks, r, err));
    else
        AFF_TRY(draft_blocks(r, err));
    AFF_TRY(read_drafts(r, d, count, err));
    return aff__rows_done(r, err);
}

aff_status aff__draft_many(aff_runner *r, const aff_draft_request *d, int count, aff_trace_fn trace, void *trace_ctx, aff_error *err)
{
    aff_status s;
    do {
        s = draft_once(r, d, count, trace, trace_ctx, err);
        if (s != AFF_OK && r->tiers) aff__residency_abandon(r);
    } while (s == AFF_E_NOMEM && r->tiers && r->b->make_room(r->b));
    return s;
}

aff_status aff__draft_block(aff_runner *r, aff_seq *seq, int32_t id0, int32_t *ids, float *conf, float *logits, aff_trace_fn trace, void *trace_ctx,
                            aff_error *err)
{
    return aff__draft_many(r, &(aff_draft_request){seq, id0, ids, conf, logits}, 1, trace, trace_ctx, err);
}

/* Whether the rows of the last pass are still the last rows of their sequences. */
static bool rows_are_last(const aff_runner *r)
{
    for (int t = 0; t < r->n; t++) {
        const bool last = t + 1 == r->n || r->first[t + 1] != r->first[t];
        if (last && r->pos[t] + 1 != r->seq[t]->pos) return false;
    }
    return true;
}

aff_status aff__draft_mtp1(aff_runner *r, const int32_t *next, int n, int want_from, float *logits, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_net *net = r->net;
    const aff_config *c = &net->cfg;
    const int H = c->hidden, N = c->hc;
    if (net->draft != AFF_DRAFT_MTP1) return aff__fail(err, AFF_E_INVALID, "MTP-1: no such draft is loaded");
    if (!r->streams || n != r->n || want_from < 0 || want_from > n || !rows_are_last(r))
        return aff__fail(err, AFF_E_INVALID, "MTP-1: %d rows, logits from row %d: not the rows of the last pass", n, want_from);
    for (int i = 0; i < n; i++)
        if (next[i] < 0 || next[i] >= c->vocab)
            return aff__fail(err, AFF_E_INVALID, "MTP-1: id %d is outside the vocabulary 0..%d", (int)next[i], c->vocab - 1);
    r->streams = false; /* used up */
    /* x_n = e_proj RMS(embed; enorm) + h_proj RMS(X_n; hnorm) */
    B->rmsnorm(B, r->X, net->hnorm, c->rms_eps, n * N, H, r->x);
    aff__matmul(B, &net->h_proj, r->x, n * N, r->X);
    memcpy(r->ids, next, (size_t)n * sizeof *next);
    AFF_TRY(aff__rows_ready(r, err));
    B->embed(B, &net->embed, r->dids, n, 1, r->u);
    B->rmsnorm(B, r->u, net->enorm, c->rms_eps, n, H, r->u);
    aff__matmul(B, &net->e_proj, r->u, n, r->f);
    B->hc_post(B, r->f, NULL, 0, r->ones + (int64_t)r->chunk * N * N, r->ones, n, N, H, r->X);
    aff__use_stage(r, 0);
    AFF_TRY(aff__block(r, &net->stage[0], net->draft_experts, 0, 0, AFF_CAUSAL, err));
    const int rows = n - want_from;
    if (rows) AFF_TRY(aff__logits(r, &net->draft_hc_head, net->draft_norm, r->X + (int64_t)want_from * N * H, rows, logits, err));
    return aff__rows_done(r, err);
}
