#include "engine/engine.h"
#include "base/clock.h"
#include "base/mem.h"
#include <stdlib.h>

struct aff_engine {
    const aff_config *cfg;
    aff_runner *runner;
    aff_seq *seq;
    aff_sampler *sampler;
    int64_t chunk;
    float *logits; /* [vocab] of the last row run, if have_logits */
    bool have_logits;
    float *rows; /* [AFF_MAX_CHUNK][vocab], made when a caller first listens to every row */
};

aff_status aff__engine_create(aff_engine **out, const aff_net *net, const aff_engine_options *o, aff_error *err)
{
    *out = NULL;
    const aff_config *cfg = aff__net_config(net);
    if (o->chunk < 0)
        return aff__fail(err, AFF_E_INVALID, "prefill chunk: expected 1 or more, got %lld", (long long)o->chunk);
    if (o->context > cfg->max_positions)
        return aff__fail(err, AFF_E_LIMIT, "%s: context: expected at most %lld positions, got %lld", aff__net_path(net),
                         (long long)cfg->max_positions, (long long)o->context);
    aff_engine *e = NULL;
    AFF_TRY(aff__calloc(&e, 1, sizeof *e, "engine", err));
    e->cfg = cfg;
    e->chunk = o->chunk ? o->chunk : AFF_MAX_CHUNK;
    aff_status s = aff__sampler_create(&e->sampler, cfg->vocab, err);
    if (s == AFF_OK) s = aff__calloc(&e->logits, (uint64_t)cfg->vocab, sizeof(float), "logits", err);
    if (s == AFF_OK) s = aff__seq_create(&e->seq, net, o->context > 0 ? o->context : cfg->max_positions, err);
    if (s == AFF_OK) s = aff__runner_create(&e->runner, net, o->threads, err);
    if (s != AFF_OK) {
        aff__engine_free(e);
        return s;
    }
    *out = e;
    return AFF_OK;
}

void aff__engine_free(aff_engine *e)
{
    if (!e) return;
    aff__runner_free(e->runner);
    aff__seq_free(e->seq);
    aff__sampler_free(e->sampler);
    free(e->logits);
    free(e->rows);
    free(e);
}

void aff__engine_reset(aff_engine *e)
{
    aff__seq_reset(e->seq);
    e->have_logits = false;
}

int64_t aff__engine_pos(const aff_engine *e)
{
    return aff__seq_pos(e->seq);
}

int64_t aff__engine_context(const aff_engine *e)
{
    return aff__seq_capacity(e->seq);
}

const float *aff__engine_logits(const aff_engine *e)
{
    return e->have_logits ? e->logits : NULL;
}

static aff_status check_ids(const aff_engine *e, const char *what, const int32_t *ids, int64_t n, aff_error *err)
{
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= e->cfg->vocab)
            return aff__fail(err, AFF_E_INVALID, "%s: token %lld of %lld: expected an id of 0 to %d, got %d", what,
                             (long long)i + 1, (long long)n, e->cfg->vocab - 1, ids[i]);
    return AFF_OK;
}

static aff_status check_tokens(const aff_engine *e, const char *what, const int32_t *ids, int64_t n, aff_error *err)
{
    int64_t room = aff__engine_context(e) - aff__engine_pos(e);
    if (n < 1) return aff__fail(err, AFF_E_INVALID, "%s: expected at least 1 token, got %lld", what, (long long)n);
    if (n > room)
        return aff__fail(
            err, AFF_E_LIMIT, "%s: expected at most %lld tokens (context %lld, %lld in use), got %lld: shorten it",
            what, (long long)room, (long long)aff__engine_context(e), (long long)aff__engine_pos(e), (long long)n);
    return check_ids(e, what, ids, n, err);
}

/* One forward call over n rows: all their logits to the listener if there is one, the last row's kept if wanted. */
static aff_status pass(aff_engine *e, const int32_t *ids, int n, bool want_logits, const aff_events *ev, aff_error *err)
{
    bool every = ev && ev->logits;
    int64_t pos = aff__seq_pos(e->seq);
    if (every && !e->rows)
        AFF_TRY(
            aff__calloc(&e->rows, (uint64_t)e->cfg->vocab * AFF_MAX_CHUNK, sizeof(float), "logits of a chunk", err));
    aff_batch b = {.n = n, .id = ids, .seq = e->seq, .want_from = every ? 0 : want_logits ? n - 1 : n};
    b.logits = every ? e->rows : e->logits;
    e->have_logits = false;
    AFF_TRY(aff__forward(e->runner, &b, err));
    if (every) {
        const float *last = e->rows + (size_t)(n - 1) * (size_t)e->cfg->vocab;
        for (int v = 0; v < e->cfg->vocab; v++) e->logits[v] = last[v];
    }
    e->have_logits = every || want_logits;
    return every ? ev->logits(ev->ctx, pos, n, e->rows, err) : AFF_OK;
}

/* Runs checked tokens in chunks. *run counts the rows that did. */
static aff_status feed(aff_engine *e, const int32_t *ids, int64_t n, bool want_logits, const aff_events *ev,
                       int64_t *run, aff_error *err)
{
    int64_t most = e->chunk;
    if (most > AFF_MAX_CHUNK && ev && ev->logits) most = AFF_MAX_CHUNK; /* the size of the row buffer */
    if (most > 1 << 20) most = 1 << 20;
    for (*run = 0; *run < n;) {
        int64_t rows = n - *run < most ? n - *run : most;
        AFF_TRY(pass(e, ids + *run, (int)rows, want_logits && *run + rows == n, ev, err));
        *run += rows;
        if (ev && ev->progress && !ev->progress(ev->ctx, *run, n))
            return aff__fail(err, AFF_E_CANCELLED, "stopped after %lld of %lld tokens", (long long)*run, (long long)n);
    }
    return AFF_OK;
}

aff_status aff__engine_feed(aff_engine *e, const int32_t *ids, int64_t n, bool want_logits, const aff_events *ev,
                            aff_error *err)
{
    int64_t run;
    AFF_TRY(check_tokens(e, "feed", ids, n, err));
    return feed(e, ids, n, want_logits, ev, &run, err);
}

aff_status aff__engine_choose(aff_engine *e, const aff_sampling *p, int32_t *id, aff_error *err)
{
    if (!e->have_logits)
        return aff__fail(err, AFF_E_INVALID, "next token: nothing to go on, expected tokens to be fed first");
    return aff__sampler_next(e->sampler, e->logits, p, aff__engine_pos(e), id, err);
}

/* From the last prompt token on: run one token, choose the next. */
static aff_status decode(aff_engine *e, const aff_request *r, const aff_events *ev, aff_outcome *out, aff_error *err)
{
    int32_t id = r->prompt[r->n_prompt - 1];
    out->stop = AFF_STOP_LENGTH;
    while (out->decoded < r->n_predict) {
        if (aff__engine_pos(e) == aff__engine_context(e)) {
            out->stop = AFF_STOP_CONTEXT;
            break;
        }
        AFF_TRY(pass(e, &id, 1, true, ev, err));
        if (r->n_forced)
            id = r->forced[out->decoded % r->n_forced];
        else
            AFF_TRY(aff__engine_choose(e, &r->sampling, &id, err));
        out->decoded++;
        if (ev && ev->token && !ev->token(ev->ctx, aff__engine_pos(e), id)) {
            out->stop = AFF_STOP_CALLER;
            break;
        }
        if (id == e->cfg->eos && !r->ignore_eos && !r->n_forced) {
            out->stop = AFF_STOP_EOS;
            break;
        }
    }
    return AFF_OK;
}

aff_status aff__engine_check(const aff_engine *e, const aff_request *r, aff_error *err)
{
    if (r->n_predict < 0)
        return aff__fail(err, AFF_E_INVALID, "tokens to predict: expected 0 or more, got %lld",
                         (long long)r->n_predict);
    AFF_TRY(aff__sampling_check(&r->sampling, err));
    AFF_TRY(check_ids(e, "forced tokens", r->forced, r->n_forced, err));
    return check_tokens(e, "prompt", r->prompt, r->n_prompt, err);
}

aff_status aff__engine_run(aff_engine *e, const aff_request *r, const aff_events *ev, aff_outcome *out, aff_error *err)
{
    *out = (aff_outcome){.stop = AFF_STOP_LENGTH};
    AFF_TRY(aff__engine_check(e, r, err));
    uint64_t start = aff__now_ns();
    int64_t n = r->n_predict ? r->n_prompt - 1 : r->n_prompt;
    aff_status s = feed(e, r->prompt, n, r->n_predict == 0, ev, &out->prefilled, err);
    uint64_t middle = aff__now_ns();
    out->prefill_ns = middle - start;
    if (s == AFF_E_CANCELLED && ev && ev->progress) { /* the caller's wish, not a failure */
        out->stop = AFF_STOP_CALLER;
        return AFF_OK;
    }
    AFF_TRY(s);
    s = decode(e, r, ev, out, err);
    out->decode_ns = aff__now_ns() - middle;
    return s;
}
