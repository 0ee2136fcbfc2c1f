/* api.c - the public functions of affinity.h over network, tokenizer and sampler. A session is one sequence that its caller feeds:
 * it needs no scheduler. */
#include "engine/engine.h"
#include "engine/text.h"
#include "base/mem.h"
#include "text/tokenizer.h"
#include <stdlib.h>
#include <string.h>

struct aff_model {
    aff_net *net;
    int threads;
};

struct aff_session {
    const aff_config *cfg;
    aff_runner *runner;
    aff_seq *seq;
    aff_sampler *sampler;
    float *logits; /* [vocab] of the last row */
};

void aff_model_options_init(aff_model_options *o)
{
    *o = (aff_model_options){.numerics = AFF_FAST};
}

void aff_sampling_init(aff_sampling *s)
{
    *s = (aff_sampling){.top_p = 1};
}

aff_status aff_model_open(aff_model **out, const char *path, const aff_model_options *opt, aff_error *err)
{
    aff_model_options o;
    *out = NULL;
    aff_model_options_init(&o);
    if (opt) o = *opt;
    if (!path) return aff__fail(err, AFF_E_INVALID, "model: expected a path, got NULL");
    if (o.numerics != AFF_MATH && o.numerics != AFF_SIM && o.numerics != AFF_FAST)
        return aff__fail(err, AFF_E_INVALID, "model: numerics: expected AFF_MATH, AFF_SIM or AFF_FAST, got %d",
                         (int)o.numerics);
    aff_model *m = NULL;
    AFF_TRY(aff__calloc(&m, 1, sizeof *m, "model", err));
    m->threads = o.threads;
    aff_status s =
        aff__net_open(&m->net, path, &(aff_net_options){.numerics = o.numerics, .max_layers = o.max_layers}, err);
    if (s != AFF_OK) {
        free(m);
        return s;
    }
    *out = m;
    return AFF_OK;
}

void aff_model_free(aff_model *m)
{
    if (!m) return;
    aff__net_close(m->net);
    free(m);
}

int aff_model_vocab(const aff_model *m)
{
    return aff__net_config(m->net)->vocab;
}

int64_t aff_model_context(const aff_model *m)
{
    return aff__net_config(m->net)->max_positions;
}

int aff_model_layers(const aff_model *m)
{
    return aff__net_layers(m->net);
}

int32_t aff_model_bos(const aff_model *m)
{
    return (int32_t)aff__net_config(m->net)->bos;
}

int32_t aff_model_eos(const aff_model *m)
{
    return (int32_t)aff__net_config(m->net)->eos;
}

aff_status aff_tokenizer_open(aff_tokenizer **out, const char *path, const aff_model *m, aff_error *err)
{
    *out = NULL;
    if (!path) return aff__fail(err, AFF_E_INVALID, "tokenizer: expected a path, got NULL");
    return aff__tokenizer_open_for(out, path, m ? aff__net_config(m->net) : NULL, err);
}

void aff_tokenizer_free(aff_tokenizer *t)
{
    aff__tokenizer_free(t);
}

aff_status aff_tokenizer_encode(const aff_tokenizer *t, const char *text, size_t n, bool control, int32_t *ids,
                                size_t cap, size_t *n_ids, aff_error *err)
{
    aff_ids found = {0};
    *n_ids = 0;
    aff_status s = aff__tokenizer_encode(t, text, n, control, &found, err);
    if (s == AFF_OK) {
        *n_ids = found.n;
        if (found.n > cap)
            s = aff__fail(err, AFF_E_LIMIT, "encode: expected room for %zu ids, got %zu", found.n, cap);
        else
            for (size_t i = 0; i < found.n; i++) ids[i] = (int32_t)found.id[i];
    }
    aff__ids_free(&found);
    return s;
}

const char *aff_tokenizer_bytes(const aff_tokenizer *t, int32_t id, size_t *n)
{
    *n = 0;
    return id < 0 ? NULL : aff__tokenizer_bytes(t, (uint32_t)id, n);
}

aff_status aff_tokenizer_decode(const aff_tokenizer *t, aff_text_stream *s, int32_t id, char *out, size_t cap,
                                size_t *n, aff_error *err)
{
    size_t len;
    const char *bytes = aff_tokenizer_bytes(t, id, &len);
    if (s->n < 0 || s->n > 4) return aff__fail(err, AFF_E_INVALID, "decode: the stream was not zero-initialised");
    *n = 3 * (len + 4); /* worst case: every byte becomes U+FFFD */
    if (cap < *n) return aff__fail(err, AFF_E_LIMIT, "decode: expected room for %zu bytes, got %zu", *n, cap);
    aff_utf8_stream u = {.n = s->n};
    memcpy(u.held, s->held, sizeof u.held);
    *n = id == -1 ? aff__utf8_flush(&u, out) : aff__utf8_push(&u, bytes, len, out);
    memcpy(s->held, u.held, sizeof u.held);
    s->n = u.n;
    return AFF_OK;
}

aff_status aff_session_create(aff_session **out, const aff_model *m, int64_t context, aff_error *err)
{
    *out = NULL;
    aff_session *s = NULL;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "session", err));
    s->cfg = aff__net_config(m->net);
    aff_status st = aff__sampler_create(&s->sampler, s->cfg->vocab, err);
    if (st == AFF_OK) st = aff__calloc(&s->logits, (uint64_t)s->cfg->vocab, sizeof(float), "logits", err);
    if (st == AFF_OK) st = aff__seq_create(&s->seq, m->net, context > 0 ? context : s->cfg->max_positions, err);
    if (st == AFF_OK) st = aff__runner_create(&s->runner, m->net, m->threads, err);
    if (st != AFF_OK) {
        aff_session_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

void aff_session_free(aff_session *s)
{
    if (!s) return;
    aff__runner_free(s->runner);
    aff__seq_free(s->seq);
    aff__sampler_free(s->sampler);
    free(s->logits);
    free(s);
}

aff_status aff_session_feed(aff_session *s, const int32_t *ids, int64_t n, aff_error *err)
{
    AFF_TRY(aff__check_tokens("feed", ids, n, aff__seq_pos(s->seq), aff__seq_capacity(s->seq), s->cfg->vocab, err));
    const aff_batch b = {.n = (int)n, .id = ids, .seq = s->seq, .want_from = n - 1, .logits = s->logits};
    return aff__forward(s->runner, &b, err);
}

aff_status aff_session_next(aff_session *s, const aff_sampling *sp, int32_t *id, aff_error *err)
{
    aff_sampling p;
    aff_sampling_init(&p);
    if (sp) p = *sp;
    if (!aff__seq_pos(s->seq)) return aff__fail(err, AFF_E_INVALID, "next token: expected tokens to be fed first, got none");
    return aff__sampler_next(s->sampler, s->logits, &p, aff__seq_pos(s->seq), id, err);
}

const float *aff_session_logits(const aff_session *s)
{
    return aff__seq_pos(s->seq) ? s->logits : NULL;
}

int64_t aff_session_position(const aff_session *s)
{
    return aff__seq_pos(s->seq);
}

void aff_session_reset(aff_session *s)
{
    aff__seq_reset(s->seq);
}
