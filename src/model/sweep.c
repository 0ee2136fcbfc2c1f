#include "model/sweep.h"
#include "base/mem.h"
#include "model/runner.h"
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

struct aff_sweep {
    const aff_net *net;
    aff_sweep_options o;
    aff_runner *runner;
    aff_seq *seq; /* one layer of one sequence is in use at a time */
    float *X;     /* [o.rows][N*H] the streams of all rows */
    int64_t n;    /* rows of the last run */
};

static uint64_t row_floats(const aff_net *net)
{
    return (uint64_t)net->cfg.hc * (uint64_t)net->cfg.hidden;
}

static aff_status check_options(const aff_net *net, const aff_sweep_options *o, aff_error *err)
{
    if (o->chunk < 1 || o->chunk > net->cfg.max_positions)
        return aff__fail(err, AFF_E_INVALID, "%s: rows of a sequence: expected 1 to %lld, got %lld", net->path,
                         (long long)net->cfg.max_positions, (long long)o->chunk);
    if (o->rows < 1 || o->pass < 0 || o->pass > AFF_MAX_CHUNK)
        return aff__fail(err, AFF_E_INVALID, "sweep: %lld rows in passes of %d: expected 1 or more, 0 to %d",
                         (long long)o->rows, o->pass, AFF_MAX_CHUNK);
    return AFF_OK;
}

aff_status aff__sweep_create(aff_sweep **out, const aff_net *net, const aff_sweep_options *o, aff_error *err)
{
    aff_sweep *s;
    *out = NULL;
    AFF_TRY(check_options(net, o, err));
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "sweep", err));
    *s = (aff_sweep){.net = net, .o = *o};
    if (!s->o.pass) s->o.pass = AFF_MAX_CHUNK;
    const int64_t longest = o->chunk < o->rows ? o->chunk : o->rows;
    aff_status st = aff__calloc(&s->X, (uint64_t)o->rows, row_floats(net) * sizeof(float), "streams of all rows", err);
    if (st == AFF_OK) st = aff__seq_create(&s->seq, net, longest, err);
    if (st == AFF_OK) st = aff__runner_create(&s->runner, net, o->threads, err);
    if (st == AFF_OK && o->watch)
        st = aff__calloc(&s->runner->h, (uint64_t)s->o.pass * (uint64_t)net->cfg.picks,
                         (uint64_t)net->cfg.inter * sizeof(float), "inputs of down", err);
    if (st != AFF_OK) {
        aff__sweep_free(s);
        return st;
    }
    s->runner->watch = o->watch;
    s->runner->watch_ctx = o->ctx;
    *out = s;
    return AFF_OK;
}

void aff__sweep_free(aff_sweep *s)
{
    if (!s) return;
    if (s->runner) free(s->runner->h);
    aff__runner_free(s->runner);
    aff__seq_free(s->seq);
    free(s->X);
    free(s);
}

/* One layer for the rows of one sequence (layer -1: the embedding). */
static aff_status layer_of_sequence(aff_sweep *s, int layer, const int32_t *ids, int64_t n, float *X, aff_error *err)
{
    aff_runner *r = s->runner;
    const aff_net *net = s->net;
    const uint64_t width = row_floats(net);
    for (int64_t at = 0; at < n; at += s->o.pass) {
        const int rows = n - at < s->o.pass ? (int)(n - at) : s->o.pass;
        float *x = X + (uint64_t)at * width;
        const size_t bytes = (size_t)((uint64_t)rows * width * sizeof(float));
        aff__rows_begin(r, NULL, NULL);
        aff__rows_add(r, s->seq, ids + at, rows, at);
        if (layer < 0) {
            AFF_TRY(aff__rows_ready(r, err));
            r->b->embed(r->b, &net->embed, r->dids, rows, net->cfg.hc, r->X);
        } else {
            memcpy(r->X, x, bytes);
            AFF_TRY(aff__rows_ready(r, err));
            aff__use_layer(r, layer);
            AFF_TRY(aff__block(r, &net->layer[layer], net->experts, layer, layer, AFF_CAUSAL, err));
        }
        memcpy(x, r->X, bytes);
    }
    return AFF_OK;
}

aff_status aff__sweep_run(aff_sweep *s, const int32_t *ids, int64_t n, aff_error *err)
{
    const aff_net *net = s->net;
    s->n = 0;
    if (n < 1 || n > s->o.rows)
        return aff__fail(err, AFF_E_INVALID, "sweep: expected 1 to %lld rows, got %lld", (long long)s->o.rows,
                         (long long)n);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= net->cfg.vocab)
            return aff__fail(err, AFF_E_INVALID, "token %lld of the input: id %d is outside the vocabulary 0..%d",
                             (long long)i, (int)ids[i], net->cfg.vocab - 1);
    for (int layer = -1; layer < net->layers; layer++) {
        for (int64_t at = 0; at < n; at += s->o.chunk) {
            const int64_t rows = n - at < s->o.chunk ? n - at : s->o.chunk;
            AFF_TRY(layer_of_sequence(s, layer, ids + at, rows, s->X + (uint64_t)at * row_floats(net), err));
        }
        if (s->o.progress && !s->o.progress(s->o.ctx, layer + 1, net->layers))
            return aff__fail(err, AFF_E_CANCELLED, "stopped after layer %d of %d", layer + 1, net->layers);
    }
    s->n = n;
    return AFF_OK;
}

aff_status aff__sweep_logits(aff_sweep *s, int64_t from, int64_t count, float *logits, aff_error *err)
{
    aff_runner *r = s->runner;
    const uint64_t width = row_floats(s->net);
    if (from < 0 || count < 0 || from > s->n || count > s->n - from)
        return aff__fail(err, AFF_E_INVALID, "sweep: rows %lld+%lld of %lld", (long long)from, (long long)count,
                         (long long)s->n);
    for (int64_t at = 0; at < count; at += AFF_MAX_CHUNK) {
        const int n = count - at < AFF_MAX_CHUNK ? (int)(count - at) : AFF_MAX_CHUNK;
        memcpy(r->X, s->X + (uint64_t)(from + at) * width, (size_t)((uint64_t)n * width * sizeof(float)));
        AFF_TRY(aff__head(r, 0, n, logits + at * s->net->cfg.vocab, err));
    }
    return AFF_OK;
}

/* ---- fingerprint ---- */

static void sample_matrix(XXH3_state_t *h, const aff_expert_mat *m, uint64_t bytes)
{
    XXH3_64bits_update(h, m->codes, (size_t)(bytes < 4096 ? bytes : 4096));
}

/* slot: room for a row-major expert, else NULL. */
static void fingerprint(const aff_net *net, XXH3_state_t *h, uint8_t *slot)
{
    const aff_slot_layout y = aff__experts_layout(net->experts);
    const aff_config *c = &net->cfg;
    const aff_expert_shape shape = aff__experts_shape(net->experts);
    const int32_t head[] = {c->vocab, c->hidden, net->layers, c->experts, c->inter, c->picks, (int32_t)shape.dtype};
    const uint64_t weights = (uint64_t)c->hidden * (uint64_t)c->inter,
                   bytes = shape.dtype == AFF_MXFP4 ? weights / 2 : weights / 64 * 20;
    XXH3_64bits_update(h, head, sizeof head);
    if (shape.table) XXH3_64bits_update(h, shape.table, 2 * sizeof *shape.table);
    for (int l = 0; l < net->layers; l++) {
        XXH3_64bits_update(h, net->layer[l].attn_norm, (size_t)c->hidden * sizeof(float));
        XXH3_64bits_update(h, net->layer[l].ffn_norm, (size_t)c->hidden * sizeof(float));
        for (int k = 0; k < 2; k++) {
            const int id = k ? c->experts - 1 : 0;
            if (slot) aff__experts_copy(net->experts, l, id, slot);
            const aff_expert e = slot ? aff__slot_expert(&y, slot) : aff__experts_at(net->experts, l, id);
            sample_matrix(h, &e.gate, bytes);
            sample_matrix(h, &e.up, bytes);
            sample_matrix(h, &e.down, bytes);
        }
    }
}

aff_status aff__net_fingerprint(const aff_net *net, uint64_t *hash, aff_error *err)
{
    XXH3_state_t *h = XXH3_createState();
    if (!h) return aff__fail(err, AFF_E_NOMEM, "fingerprint: cannot allocate its state");
    XXH3_64bits_reset(h);
    uint8_t *slot = NULL;
    const aff_status s = aff__experts_in_place(net->experts) ? AFF_OK : aff__calloc(&slot, 1, aff__experts_layout(net->experts).bytes, "fingerprint", err);
    if (s == AFF_OK) fingerprint(net, h, slot);
    free(slot);
    *hash = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return s;
}
