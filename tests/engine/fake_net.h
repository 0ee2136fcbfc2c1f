/* fake_net.h - a pretend network for tests of the scheduler. Its logits are a hash of all tokens run so far, so a token that is
 * skipped, run twice, out of order, at a wrong position or not taken back changes every later one. The functions of net.h, seq.h
 * and forward.h that the scheduler calls are defined here and take the place of the library's. Included by one file a program. */
#include "engine/engine.h"
#include "base/mem.h"
#include "base/rng.h"
#include "state/grow.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_VOCAB
#define FAKE_VOCAB 50, EOS = 3
#endif
enum { CONTEXT = 512, VOCAB = FAKE_VOCAB };

struct aff_net {
    aff_config cfg;
};
struct aff_seq {
    int64_t pos, high, capacity;
    uint64_t hash[CONTEXT + 1]; /* after so many tokens */
};
struct aff_runner {
    int threads;
};

static aff_net fake_net = {.cfg = {.vocab = VOCAB, .max_positions = CONTEXT, .bos = 0, .eos = EOS}};
static int fake_calls, fake_rows, fake_largest, fake_logit_rows, fake_fail_at, fake_most_sequences;
static aff_status fake_status = AFF_E_IO; /* of the pass that fails */
static int32_t fake_favourite[CONTEXT + 1]; /* > 0: this token wins after that many tokens */
static bool fake_nan[CONTEXT + 1];          /* the logits after that many tokens are NaN */
static bool fake_flat;                      /* the logits do not depend on the tokens */
static bool fake_eos;                       /* EOS is a token like others; else it never wins */

__attribute__((unused)) static void fake_reset(void)
{
    fake_calls = fake_rows = fake_largest = fake_logit_rows = fake_fail_at = fake_most_sequences = 0;
    fake_status = AFF_E_IO;
    memset(fake_favourite, 0, sizeof fake_favourite);
    memset(fake_nan, 0, sizeof fake_nan);
    fake_eos = fake_flat = false;
}

const aff_config *aff__net_config(const aff_net *n) { return &n->cfg; }
const char *aff__net_path(const aff_net *n) { return "fake.aff"; }
aff_draft_kind aff__net_draft(const aff_net *n) { return AFF_DRAFT_NONE; }

aff_status aff__seq_open(aff_seq **out, const aff_net *net, const aff_seq_options *o, aff_error *err)
{
    *out = calloc(1, sizeof **out);
    (*out)->capacity = o->size;
    return AFF_OK;
}
aff_status aff__seq_plan(aff_seq_plan *out, const aff_net *net, int64_t positions, aff_error *err)
{
    *out = (aff_seq_plan){.positions = positions};
    return AFF_OK;
}
aff_status aff__seq_grow(aff_seq *s, int64_t positions, aff_error *err) { return AFF_OK; }
uint64_t aff__seq_handle_bytes(void) { return sizeof(aff_seq); }
aff_runner_bytes aff__runner_plan(const aff_net *net, int threads, int64_t positions, int rows) { return (aff_runner_bytes){0}; }
aff_status aff__runner_chunk(aff_runner *r, int rows, aff_error *err) { return AFF_OK; }
void aff__runner_on_route(aff_runner *r, aff_route_fn fn, void *ctx) {}
aff_status aff__grower_create(aff_grower **out, aff_error *err) { return *out = NULL, AFF_OK; }
void aff__grower_free(aff_grower *g) {}
void aff__seq_free(aff_seq *s) { free(s); }
void aff__seq_reset(aff_seq *s) { s->pos = s->high = 0; }
int64_t aff__seq_pos(const aff_seq *s) { return s->pos; }
int64_t aff__seq_capacity(const aff_seq *s) { return s->capacity; }
aff_status aff__seq_rollback(aff_seq *s, int64_t keep, aff_error *err)
{
    assert_in_range(keep, s->high > 8 ? s->high - 8 : 0, s->pos);
    s->pos = keep;
    return AFF_OK;
}
aff_status aff__runner_create(aff_runner **out, const aff_net *net, int threads, aff_error *err)
{
    *out = calloc(1, sizeof **out);
    (*out)->threads = threads;
    return AFF_OK;
}
void aff__runner_free(aff_runner *r) { free(r); }
/* No device in these tests. */
aff_status aff__runner_on_bare(aff_runner **out, const aff_net *net, const aff_device_spec *spec, int threads, aff_error *e)
{
    *out = NULL;
    return AFF_E_UNSUPPORTED;
}
const aff_memory *aff__runner_memory(const aff_runner *r) { return NULL; }
bool aff__runner_device(aff_runner *r, aff_device_view *out) { return false; }
void aff__net_tiers(const aff_net *n, uint8_t *tier) {}
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
int aff__net_layers(const aff_net *n) { return 0; }
uint64_t aff__seq_committed(const aff_seq *s) { return 1000; }

/* What the pretend network says after a sequence with this hash, of `n` tokens. */
static void fake_logits(uint64_t hash, int64_t n, float *l)
{
    if (fake_flat) hash = 77;
    for (int v = 0; v < VOCAB; v++) l[v] = (float)(aff__mix64(hash + (uint64_t)v) >> 40) / (1 << 22);
    if (!fake_eos) l[EOS] = -1;
    if (fake_favourite[n] > 0) l[fake_favourite[n]] = 100;
    if (fake_nan[n]) l[VOCAB / 2] = NAN;
}

static uint64_t fake_hash(uint64_t hash, int64_t pos, int32_t id)
{
    return aff__mix64(hash * 31 + (uint64_t)pos * 1000 + (uint64_t)id + 1);
}

static void fake_batch(const aff_batch *b)
{
    aff_seq *s = b->seq;
    assert_true(b->n >= 1 && s->pos + b->n <= s->capacity);
    for (int i = 0; i < b->n; i++) {
        assert_in_range(b->id[i], 0, VOCAB - 1);
        s->hash[s->pos + 1] = fake_hash(s->pos ? s->hash[s->pos] : 0, s->pos, b->id[i]);
        s->pos++;
        if (i >= b->want_from) {
            fake_logits(s->hash[s->pos], s->pos, b->logits + (i - b->want_from) * VOCAB);
            fake_logit_rows++;
        }
    }
    if (s->high < s->pos) s->high = s->pos;
}

aff_status aff__forward_many(aff_runner *r, const aff_batch *b, int count, aff_error *err)
{
    int rows = 0;
    for (int i = 0; i < count; i++) rows += b[i].n;
    fake_calls++;
    fake_rows += rows;
    if (rows > fake_largest) fake_largest = rows;
    if (count > fake_most_sequences) fake_most_sequences = count;
    if (fake_fail_at && fake_calls == fake_fail_at) return aff__fail(err, fake_status, "shard 2: cannot read");
    for (int i = 0; i < count; i++) fake_batch(&b[i]);
    return AFF_OK;
}
aff_status aff__forward(aff_runner *r, const aff_batch *b, aff_error *err) { return aff__forward_many(r, b, 1, err); }
aff_status aff__draft_many(aff_runner *r, const aff_draft_request *d, int count, aff_trace_fn trace, void *trace_ctx, aff_error *err)
{
    return aff__fail(err, AFF_E_INVALID, "no draft here");
}
aff_status aff__draft_mtp1(aff_runner *r, const int32_t *next, int n, int want_from, float *logits, aff_error *err)
{
    return aff__fail(err, AFF_E_INVALID, "no draft here");
}

/* The continuation of a request by definition: no loop, no chunks, no drafts. Returns the number of tokens, up to n_predict,
 * the context's end, EOS or a NaN. */
__attribute__((unused)) static int fake_answer(const aff_request *r, int64_t context, int32_t *out)
{
    float l[VOCAB], adjusted[VOCAB];
    uint64_t hash = 0;
    int64_t pos = 0;
    int n = 0;
    aff_sampler *s;
    aff_error err = {0};
    int32_t all[VOCAB] = {0}, output[VOCAB] = {0};
    assert_int_equal(aff__sampler_create(&s, VOCAB, &err), AFF_OK);
    for (; pos < r->n_prompt; pos++) {
        hash = fake_hash(hash, pos, r->prompt[pos]);
        all[r->prompt[pos]]++;
    }
    while (n < r->n_predict && pos <= context && !fake_nan[pos]) {
        fake_logits(hash, pos, l);
        aff__adjust_logits(&r->adjust, &(aff_occurrences){all, output}, l, VOCAB, adjusted);
        int32_t id;
        assert_int_equal(aff__sampler_next(s, adjusted, &r->sampling, pos, &id, &err), AFF_OK);
        if (r->n_forced) id = r->forced[n % r->n_forced];
        out[n++] = id;
        all[id]++;
        output[id]++;
        if (id == EOS && !r->ignore_eos && !r->n_forced) break;
        hash = fake_hash(hash, pos++, id);
    }
    aff__sampler_free(s);
    return n;
}

/* A draft that knows the answer of the pretend network (greedy, no penalties) and lies with the given chance. */
typedef struct fake_drafter {
    uint64_t random;
    int lies, of; /* chance of a wrong token at each place */
    int64_t calls, proposed;
    bool honest_confidence;
} fake_drafter;

__attribute__((unused)) static int fake_propose(void *ctx, const int32_t *ids, int64_t n, int32_t *draft, float *conf)
{
    fake_drafter *d = ctx;
    uint64_t hash = 0;
    float l[VOCAB];
    d->calls++;
    for (int64_t i = 0; i < n; i++) hash = fake_hash(hash, i, ids[i]);
    int k = 0;
    for (; k < AFF_MAX_WIDTH && n + k <= CONTEXT; k++) {
        fake_logits(hash, n + k, l);
        int32_t id = 0;
        if (aff__argmax(l, VOCAB, &id, NULL) != AFF_OK) break;
        const bool lie = (int)(aff__splitmix64(&d->random) % (uint64_t)d->of) < d->lies;
        if (lie) id = (id + 1 + (int32_t)(aff__splitmix64(&d->random) % (VOCAB - 1))) % VOCAB;
        draft[k] = id;
        conf[k] = d->honest_confidence ? lie ? -4 : 4 : 0;
        hash = fake_hash(hash, n + k, id);
    }
    d->proposed += k;
    return k;
}
