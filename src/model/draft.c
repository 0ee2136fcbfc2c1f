/* The drafts (spec model-v4 section 13): DSpark's seeded block of B tokens, and June's MTP-1 layer. */
#include "model/runner.h"
#include <string.h>

void aff__draft_seed(aff_runner *r, aff_seq *seq, int from)
{
    aff_backend *B = r->b;
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    const int T = r->n - from;
    aff_rowset rs = {T, r->pos + from, r->first, r->state};
    r->trace_pos = r->pos[from];
    B->matmul(B, &n->main_proj, r->tap + (int64_t)from * c->n_taps * c->hidden, T, r->x);
    B->rmsnorm(B, r->x, n->main_norm, c->rms_eps, T, c->hidden, r->x);
    aff__trace(r, "mx", 0, r->x, T, c->hidden);
    for (int s = 0; s < n->stages; s++) {
        aff__set_state(r, &seq->stage[s]);
        B->matmul(B, &n->stage[s].wkv, r->x, T, r->kv);
        B->kv_finish(B, r->kv, T, c->head_dim, n->stage[s].kv_norm, c->rms_eps, &n->rope, rs.pos);
        aff__trace(r, "seed", s, r->kv, T, c->head_dim);
        B->raw_store(B, &rs, r->kv, c->head_dim);
    }
}

/* d[0..B-1] one after another: the Markov head adds a bias that depends on the token before (spec 13.2). */
static void markov_chain(aff_runner *r, int32_t prev, int32_t *ids, float *conf)
{
    aff_backend *B = r->b;
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    const int V = c->vocab, H = c->hidden, MR = c->draft_rank;
    float *e = r->markov, *he = e + (int64_t)c->draft_block * MR, *bias = he + (int64_t)c->draft_block * (H + MR);
    B->stream_mean(B, r->u, c->draft_block, 1, H, he, H + MR); /* h[b] beside the row that e will join */
    for (int b = 0; b < c->draft_block; b++) {
        float *lg = r->logits + (int64_t)b * V;
        B->embed(B, &n->markov_w1, &prev, 1, 1, e);
        B->matmul(B, &n->markov_w2, e, 1, bias);
        B->hc_post(B, bias, r->ones, r->ones, 1, 1, V, lg); /* lg = bias + lg */
        B->argmax(B, lg, 1, V, &ids[b]);
        B->stream_mean(B, e, 1, 1, MR, he + (int64_t)b * (H + MR) + H, MR);
        prev = ids[b];
    }
    if (conf) B->matmul(B, &n->confidence, he, c->draft_block, conf);
}

aff_status aff__draft_block(aff_runner *r, aff_seq *seq, int32_t id0, int32_t *ids, float *conf, float *logits, aff_trace_fn trace, void *trace_ctx,
                            aff_error *err)
{
    aff_backend *B = r->b;
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    int32_t in[64]; /* draft_block is at most 64 */
    if (n->draft != AFF_DRAFT_DSPARK) return aff__fail(err, AFF_E_INVALID, "draft block: no DSpark draft is loaded");
    if (seq->pos < 1) return aff__fail(err, AFF_E_INVALID, "draft block: the sequence is empty");
    if (id0 < 0 || id0 >= c->vocab) return aff__fail(err, AFF_E_INVALID, "draft block: id %d is outside the vocabulary 0..%d", (int)id0, c->vocab - 1);
    r->trace = trace;
    r->trace_ctx = trace_ctx;
    r->streams = NULL;
    for (int b = 0; b < c->draft_block; b++) in[b] = b ? c->draft_noise : id0;
    aff__set_rows(r, in, c->draft_block, seq->pos);
    B->embed(B, &n->embed, in, r->n, c->hc, r->X);
    for (int s = 0; s < n->stages; s++) {
        aff__set_state(r, &seq->stage[s]);
        AFF_TRY(aff__block(r, &n->stage[s], n->draft_experts, s, s, AFF_DRAFT, err));
    }
    B->hc_head(B, &n->draft_hc_head, r->X, r->n, c->hidden, r->u);
    aff__trace(r, "h", 0, r->u, r->n, c->hidden);
    B->rmsnorm(B, r->u, n->draft_norm, c->rms_eps, r->n, c->hidden, r->x);
    B->matmul(B, &n->head, r->x, r->n, r->logits);
    aff__trace(r, "base", 0, r->logits, r->n, c->vocab);
    markov_chain(r, id0, ids, conf);
    if (logits) memcpy(logits, r->logits, (size_t)r->n * (size_t)c->vocab * sizeof *logits);
    return AFF_OK;
}

aff_status aff__draft_mtp1(aff_runner *r, aff_seq *seq, const int32_t *next, int n, float *logits, aff_error *err)
{
    aff_backend *B = r->b;
    const aff_net *net = r->net;
    const aff_config *c = &net->cfg;
    const int H = c->hidden, N = c->hc;
    if (net->draft != AFF_DRAFT_MTP1) return aff__fail(err, AFF_E_INVALID, "MTP-1: no such draft is loaded");
    if (r->streams != seq || n != r->n || r->pos[0] + n != seq->pos)
        return aff__fail(err, AFF_E_INVALID, "MTP-1: %d rows ending at position %lld are not those of the last pass", n, (long long)seq->pos);
    for (int i = 0; i < n; i++)
        if (next[i] < 0 || next[i] >= c->vocab)
            return aff__fail(err, AFF_E_INVALID, "MTP-1: id %d is outside the vocabulary 0..%d", (int)next[i], c->vocab - 1);
    r->streams = NULL; /* used up */
    /* x_n = e_proj RMS(embed; enorm) + h_proj RMS(X_n; hnorm) */
    B->rmsnorm(B, r->X, net->hnorm, c->rms_eps, n * N, H, r->x);
    B->matmul(B, &net->h_proj, r->x, n * N, r->X);
    B->embed(B, &net->embed, next, n, 1, r->u);
    B->rmsnorm(B, r->u, net->enorm, c->rms_eps, n, H, r->u);
    B->matmul(B, &net->e_proj, r->u, n, r->f);
    B->hc_post(B, r->f, r->ones + (int64_t)AFF_MAX_CHUNK * N * N, r->ones, n, N, H, r->X);
    r->ids = next;
    aff__set_state(r, &seq->stage[0]);
    AFF_TRY(aff__block(r, &net->stage[0], net->draft_experts, 0, 0, AFF_CAUSAL, err));
    B->hc_head(B, &net->draft_hc_head, r->X, n, H, r->u);
    B->rmsnorm(B, r->u, net->draft_norm, c->rms_eps, n, H, r->x);
    B->matmul(B, &net->head, r->x, n, logits);
    return AFF_OK;
}
