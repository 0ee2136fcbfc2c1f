/* scripted_net.h - a pretended network that writes what it is told to, token by token, and remembers what it was given.
 * The functions of net.h, seq.h and forward.h that the engine calls are defined here and take the place of the
 * library's (link with
 * --allow-multiple-definition). Included by one file a program. */
#ifndef AFF_TEST_SCRIPTED_NET_H
#define AFF_TEST_SCRIPTED_NET_H
#include "base/mem.h"
#include "engine/engine.h"
#include "text/tokenizer.h"
#include <stdlib.h>
#include <string.h>

enum { SCRIPTED_KEEPS = 8192 };
struct aff_net {
    aff_config cfg;
};
struct aff_seq {
    int64_t pos, capacity, answer_at;
    int32_t id[SCRIPTED_KEEPS + 1]; /* the first ones */
};
struct aff_runner {
    int threads;
};
static aff_net scripted;                  /* set vocab, eos, bos, max_positions */
static aff_ids script;                    /* what it writes; then the end of sequence */
static bool script_again;                 /* or all of it once more */
static int32_t given[SCRIPTED_KEEPS + 1]; /* the last prompt */
static int64_t n_given;

const aff_config *aff__net_config(const aff_net *n)
{
    return &n->cfg;
}
const char *aff__net_path(const aff_net *n)
{
    return "scripted";
}
aff_draft_kind aff__net_draft(const aff_net *n)
{
    return AFF_DRAFT_NONE;
}
aff_status aff__seq_open(aff_seq **out, const aff_net *n, const aff_seq_options *o, aff_error *err)
{
    AFF_TRY(aff__calloc(out, 1, sizeof **out, "sequence", err));
    (*out)->answer_at = -1;
    (*out)->capacity = o->size;
    return AFF_OK;
}
aff_status aff__seq_plan(aff_seq_plan *out, const aff_net *n, int64_t positions, aff_error *err)
{
    *out = (aff_seq_plan){.positions = positions};
    return AFF_OK;
}
aff_status aff__seq_grow(aff_seq *s, int64_t positions, aff_error *err)
{
    return AFF_OK;
}
uint64_t aff__seq_handle_bytes(void)
{
    return sizeof(aff_seq);
}
aff_runner_bytes aff__runner_plan(const aff_net *n, int threads, int64_t positions, int rows)
{
    return (aff_runner_bytes){0};
}
aff_status aff__runner_chunk(aff_runner *r, int rows, aff_error *err)
{
    return AFF_OK;
}
void aff__runner_on_route(aff_runner *r, aff_route_fn fn, void *ctx) {}
void aff__seq_free(aff_seq *s)
{
    free(s);
}
void aff__seq_reset(aff_seq *s)
{
    s->pos = 0;
    s->answer_at = -1;
}
int64_t aff__seq_pos(const aff_seq *s)
{
    return s->pos;
}
int64_t aff__seq_capacity(const aff_seq *s)
{
    return s->capacity;
}
aff_status aff__seq_rollback(aff_seq *s, int64_t keep, aff_error *err)
{
    s->pos = keep;
    return AFF_OK;
}
aff_status aff__runner_create(aff_runner **out, const aff_net *n, int threads, aff_error *err)
{
    return aff__calloc(out, 1, sizeof **out, "runner", err);
}
void aff__runner_free(aff_runner *r)
{
    free(r);
}

struct aff_tiers *aff__net_expert_tiers(const aff_net *n)
{
    return NULL;
}
struct aff_tiers *aff__runner_tiers(const aff_runner *r)
{
    return NULL;
}
aff_status aff__runner_experts(aff_runner *r, const aff_card_options *o, aff_error *e)
{
    return AFF_E_UNSUPPORTED;
}
bool aff__runner_device(aff_runner *r, aff_device_view *out)
{
    return false;
}
uint64_t aff__seq_committed(const aff_seq *s)
{
    return 0;
}

static void scripted_logits(aff_seq *s, float *l)
{
    if (s->answer_at < 0) {
        s->answer_at = n_given = s->pos;
        if (n_given > SCRIPTED_KEEPS) n_given = SCRIPTED_KEEPS;
        memcpy(given, s->id, (size_t)n_given * sizeof *given);
    }
    size_t at = (size_t)(s->pos - s->answer_at);
    if (script_again) at %= script.n;
    memset(l, 0, (size_t)scripted.cfg.vocab * sizeof *l);
    l[at < script.n ? script.id[at] : (uint32_t)scripted.cfg.eos] = 1000;
}

aff_status aff__forward_many(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    for (int k = 0; k < count; k++) {
        aff_seq *s = b[k].seq;
        for (int i = 0; i < b[k].n; i++) {
            if (s->pos < SCRIPTED_KEEPS) s->id[s->pos] = b[k].id[i];
            s->pos++;
            if (i >= b[k].want_from)
                scripted_logits(s, b[k].logits + (size_t)(i - b[k].want_from) * (size_t)scripted.cfg.vocab);
        }
    }
    return AFF_OK;
}
aff_status aff__forward(aff_runner *r, const aff_batch *b, aff_error *err)
{
    return aff__forward_many(r, b, 1, err);
}
aff_status aff__draft_many(aff_runner *r, const aff_draft_request *d, int count, aff_trace_fn trace, void *trace_ctx,
                           aff_error *err)
{
    return aff__fail(err, AFF_E_INVALID, "no draft here");
}
aff_status aff__draft_mtp1(aff_runner *r, const int32_t *next, int n, int want_from, float *logits, aff_error *err)
{
    return aff__fail(err, AFF_E_INVALID, "no draft here");
}
#endif
