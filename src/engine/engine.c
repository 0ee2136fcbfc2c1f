/* engine.c - the queue, the slots, prompts, and the order of passes. Decode passes are in decode.c.
 *
 * Order: while answers run and prompts wait, a chunk of a prompt (the one whose turn was longest ago) is followed by at least one
 * decode pass, and by as many as take about the time of the chunk, up to MOST_OWED: neither kind starves the other. */
#include "engine/engine_internal.h"
#include "state/grow.h"
#include "base/clock.h"
#include "base/machine.h"
#include "base/mem.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_SLOTS = 4, DEFAULT_QUEUE = 64, MOST_OWED = 16 };
enum { PROMOTE_BEYOND = 128 }; /* rows: for less the prompt's own end, which is published, is near enough */

/* ---- making and freeing ---- */

static aff_status check_options(const aff_net *net, const aff_engine_options *o, aff_error *err)
{
    const aff_config *cfg = aff__net_config(net);
    if (o->chunk < 0 || o->chunk > AFF_MAX_PASS)
        return aff__fail(err, AFF_E_INVALID, "prefill chunk: expected 1 to %d, got %lld", AFF_MAX_PASS, (long long)o->chunk);
    if (o->context > cfg->max_positions)
        return aff__fail(err, AFF_E_LIMIT, "%s: context: expected at most %lld positions, got %lld", aff__net_path(net),
                         (long long)cfg->max_positions, (long long)o->context);
    if (o->slots < 0 || o->slots > AFF_MAX_SLOTS)
        return aff__fail(err, AFF_E_INVALID, "slots: expected 1 to %d, got %d", AFF_MAX_SLOTS, o->slots);
    if (o->kv_commit < -1 || o->kv_margin < 0)
        return aff__fail(err, AFF_E_INVALID, "positions backed from the start and at a time: expected 0 or more, got %lld and %lld", (long long)o->kv_commit,
                         (long long)o->kv_margin);
    if (o->queue < 0) return aff__fail(err, AFF_E_INVALID, "queue: expected 1 or more, got %d", o->queue);
    if (o->width < AFF_WIDTH_AUTO || o->width > AFF_MAX_WIDTH)
        return aff__fail(err, AFF_E_INVALID, "drafted tokens a pass: expected auto or 0 to %d, got %d", AFF_MAX_WIDTH, o->width);
    return AFF_OK;
}

/* The options with their defaults in place of zeros. */
static void resolve(const aff_net *net, const aff_engine_options *o, aff_engine_options *use)
{
    *use = *o;
    if (!use->slots) use->slots = DEFAULT_SLOTS;
    if (!use->queue) use->queue = DEFAULT_QUEUE;
    if (!use->chunk) use->chunk = use->device.choice == AFF_DEVICE_RT ? AFF_DEVICE_CHUNK : AFF_MAX_CHUNK;
    if (use->context <= 0) use->context = aff__net_config(net)->max_positions;
}

/* Rows that the runner has room for in a pass. */
static int pass_rows(const aff_engine_options *o) { return o->chunk > AFF_MAX_CHUNK ? (int)o->chunk : AFF_MAX_CHUNK; }

/* --kv-commit is for all sequences; this is one's share. */
static aff_seq_options seq_options(const aff_engine_options *o)
{
    const int64_t all = o->kv_commit ? o->kv_commit : AFF_KV_COMMIT, share = (all + o->slots - 1) / o->slots;
    return (aff_seq_options){.size = o->context, .commit = all < 0 ? -1 : share < o->context ? share : o->context, .margin = o->kv_margin};
}

/* Tokens that one draft gives. */
static int block_of(const aff_net *net, aff_draft_kind draft)
{
    return draft == AFF_DRAFT_DSPARK ? aff__net_config(net)->draft_block : draft == AFF_DRAFT_MTP1 ? 1 : 0;
}

static aff_draft_kind draft_of(const aff_net *net, const aff_engine_options *o)
{
    return o->propose || !o->width ? AFF_DRAFT_NONE : aff__net_draft(net);
}

aff_status aff__engine_plan(aff_engine_bytes *out, const aff_net *net, const aff_engine_options *o, aff_error *err)
{
    aff_engine_options use;
    aff_seq_plan full;
    AFF_TRY(check_options(net, o, err));
    resolve(net, o, &use);
    const aff_seq_options s = seq_options(&use);
    const uint64_t row = (uint64_t)aff__net_config(net)->vocab * sizeof(float), rows = aff__align_up(row * AFF_PASS_ROWS, 64);
    const aff_draft_kind draft = draft_of(net, o);
    const uint64_t block = AFF_MAX_DRAFTS * ((uint64_t)block_of(net, draft) + 1) * sizeof(float);
    *out = (aff_engine_bytes){.slots = use.slots,
                              .threads = aff__pool_size(use.threads),
                              .context = use.context,
                              .commit = s.commit < 0 ? 0 : s.commit,
                              .rows = pass_rows(&use),
                              .runner = aff__runner_plan(net, use.threads, use.context, pass_rows(&use)),
                              .logits = rows + aff__align_up(row, 64) + (draft == AFF_DRAFT_MTP1 ? rows : 0) + 2 * aff__align_up(block, 64),
                              .sampler = aff__sampler_bytes(aff__net_config(net)->vocab),
                              .slot_table = aff__align_up(sizeof(aff_engine), 64) + aff__align_up((uint64_t)use.slots * sizeof(aff_slot), 64) +
                                            (uint64_t)use.slots * aff__seq_handle_bytes(),
                              .chunk_logits = aff__align_up(row * AFF_MAX_CHUNK, 64)};
    AFF_TRY(aff__seq_plan(&out->seq, net, out->commit, err));
    AFF_TRY(aff__seq_plan(&full, net, use.context, err));
    out->full = full.total;
    return AFF_OK;
}

static aff_status place_experts(aff_engine *e, aff_error *err)
{
    static const uint64_t reserve = UINT64_C(1536) << 20; /* of the machine's memory */
    aff_machine m;
    aff_card_options c = {.gpu_bytes = -1, .headroom = -1, .prefetch = 1, .warn = e->o.warn, .warn_ctx = e->o.warn_ctx};
    const aff_card_options *use = e->o.card;
    e->o.card = NULL; /* the caller's, for now only */
    if (!use) {
        const uint64_t there = aff__machine_here(&m, "", NULL) == AFF_OK ? aff__machine_available(&m) : 0;
        c.host_bytes = there > reserve ? there - reserve : 0;
        use = &c;
    }
    return aff__runner_experts(e->runner, use, err);
}

static aff_status make_parts(aff_engine *e, aff_error *err)
{
    const uint64_t vocab = (uint64_t)e->cfg->vocab;
    aff_seq_options so = seq_options(&e->o);
    AFF_TRY(aff__sampler_create(&e->sampler, e->cfg->vocab, err));
    AFF_TRY(aff__calloc(&e->rows, vocab * AFF_PASS_ROWS, sizeof(float), "logits of a pass", err));
    AFF_TRY(aff__calloc(&e->adjusted, vocab, sizeof(float), "adjusted logits", err));
    AFF_TRY(aff__calloc(&e->block_ids, AFF_MAX_DRAFTS * ((uint64_t)e->block + 1), sizeof *e->block_ids, "draft", err));
    AFF_TRY(aff__calloc(&e->block_conf, AFF_MAX_DRAFTS * ((uint64_t)e->block + 1), sizeof *e->block_conf, "draft", err));
    if (e->draft == AFF_DRAFT_MTP1) AFF_TRY(aff__calloc(&e->mtp, vocab * AFF_PASS_ROWS, sizeof(float), "logits of the draft", err));
    AFF_TRY(aff__calloc(&e->slot, (uint64_t)e->o.slots, sizeof *e->slot, "slots", err));
    if (e->o.device.choice == AFF_DEVICE_RT) {
        AFF_TRY(aff__runner_on_bare(&e->runner, e->net, &e->o.device, e->o.threads, err));
        so.memory = aff__runner_memory(e->runner);
    } else {
        AFF_TRY(aff__runner_create(&e->runner, e->net, e->o.threads, err));
    }
    AFF_TRY(aff__grower_create(&e->grower, err));
    so.grower = e->grower;
    for (int i = 0; i < e->o.slots; i++) AFF_TRY(aff__seq_open(&e->slot[i].seq, e->net, &so, err));
    AFF_TRY(aff__runner_chunk(e->runner, pass_rows(&e->o), err));
    if (e->o.device.choice == AFF_DEVICE_RT) AFF_TRY(place_experts(e, err)); /* the slab takes what the sequences leave */
    if (e->o.route) aff__runner_on_route(e->runner, e->o.route, e->o.route_ctx);
    const bool known = aff__runner_tiers(e->runner) != NULL; /* what displays show of the experts */
    e->view = (aff_snapshot){.context = e->context,
                             .slots = e->o.slots,
                             .layers = known ? aff__net_layers(e->net) : 0,
                             .experts = known ? e->cfg->experts : 0,
                             .picks = e->cfg->picks};
    aff__snapshot_look(e);
    aff__snapshot_publish(e);
    return AFF_OK;
}

/* A card that is too small: what is on it by now, and what takes less. */
static void advise_card(aff_engine *e, aff_status s, aff_error *err)
{
    aff_device_view v;
    if (s != AFF_E_NOMEM || !err || e->o.device.choice != AFF_DEVICE_RT) return;
    const aff_error why = *err;
    if (e->runner && aff__runner_device(e->runner, &v))
        aff__fail(err, s, "%.250s; the card holds %.1f MiB of weights, %.1f of experts, %.1f of state, %.1f of buffers: fewer --slots, a smaller --kv-commit and --prefill-chunk-size take less",
                  why.msg, (double)v.use[AFF_USE_WEIGHTS] / 1048576, (double)v.use[AFF_USE_EXPERTS] / 1048576,
                  (double)v.use[AFF_USE_STATE] / 1048576, (double)v.use[AFF_USE_BUFFERS] / 1048576);
    else
        aff__fail(err, s, "%.250s: weights and the buffers of a pass must fit on the card, only experts may be elsewhere", why.msg);
}

aff_status aff__engine_create(aff_engine **out, const aff_net *net, const aff_engine_options *o, aff_error *err)
{
    *out = NULL;
    AFF_TRY(check_options(net, o, err));
    aff_engine *e = NULL;
    AFF_TRY(aff__calloc(&e, 1, sizeof *e, "engine", err));
    e->net = net;
    e->cfg = aff__net_config(net);
    resolve(net, o, &e->o);
    e->worth = 0.15; /* until some drafts were made: as if they paid a little */
    e->pause = 4;
    if (o->times) e->stats.times = *o->times;
    e->context = e->o.context;
    e->draft = draft_of(net, o);
    e->block = block_of(net, e->draft);
    if (!o->propose && !e->block) e->o.width = 0;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    aff_status s = make_parts(e, err);
    if (s != AFF_OK) {
        advise_card(e, s, err);
        aff__engine_free(e);
        return s;
    }
    *out = e;
    return AFF_OK;
}

aff_status aff__engine_force(aff_engine *e, const aff_forced *f, aff_error *err)
{
    return aff__runner_force(e->runner, f, err);
}

static void free_job(aff_job *j)
{
    if (!j) return;
    free(j->ids);
    free(j->forced);
    free(j->bias);
    free(j->seen.all);
    free(j->seen.output);
    aff__matcher_free(j->matcher);
    free(j);
}

/* The last event of a job that no queue and no slot holds any more. */
static void end_job(aff_job *j, aff_status status, aff_stop stop, const aff_error *err)
{
    const uint64_t now = aff__now_ns();
    j->out.stop = stop;
    if (j->answering)
        j->out.decode_ns = now - j->answering;
    else if (j->started)
        j->out.prefill_ns = now - j->started;
    static const aff_error none;
    if (j->ev.done) j->ev.done(j->ev.ctx, status, &j->out, err ? err : &none);
    if (j->result) {
        *j->result = (aff_result){.status = status, .done = true, .outcome = j->out};
        if (err) j->result->err = *err;
    }
    free_job(j);
}

/* A device that had a fault runs nothing any more, whoever's pass it was. */
static void note_broken(aff_engine *e, const aff_error *err)
{
    char line[sizeof err->msg + 80];
    pthread_mutex_lock(&e->lock);
    const bool known = e->broken;
    e->broken = true;
    if (!known) e->why = *err;
    pthread_mutex_unlock(&e->lock);
    if (known || !e->o.warn) return;
    snprintf(line, sizeof line, "the device failed, nothing can run on it any more: %s", err->msg);
    e->o.warn(e->o.warn_ctx, line);
}

bool aff__engine_broken(aff_engine *e, aff_error *why)
{
    pthread_mutex_lock(&e->lock);
    const bool broken = e->broken;
    if (broken && why) *why = e->why;
    pthread_mutex_unlock(&e->lock);
    return broken;
}

void aff__slot_finish(aff_engine *e, aff_slot *s, aff_status status, aff_stop stop, const aff_error *err)
{
    aff_job *j = s->job;
    if (status == AFF_E_DEVICE) note_broken(e, err);
    /* Between passes all that has run is the text's: what was rejected has been rolled back. */
    if (status == AFF_OK && e->o.cache.publish && aff__seq_pos(s->seq) > 0) e->o.cache.publish(e->o.cache.ctx, s->seq, j->ids);
    pthread_mutex_lock(&e->lock);
    s->job = NULL;
    pthread_mutex_unlock(&e->lock);
    s->phase = AFF_IDLE;
    end_job(j, status, stop, err);
}

void aff__engine_free(aff_engine *e)
{
    if (!e) return;
    for (int i = 0; e->slot && i < e->o.slots; i++) {
        if (e->slot[i].job) aff__slot_finish(e, &e->slot[i], AFF_OK, AFF_STOP_CALLER, NULL);
        aff__seq_free(e->slot[i].seq);
    }
    for (aff_job *j = e->head, *next; j; j = next) {
        next = j->next;
        end_job(j, AFF_OK, AFF_STOP_CALLER, NULL);
    }
    aff__grower_free(e->grower);
    aff__runner_free(e->runner);
    aff__sampler_free(e->sampler);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->lock);
    free(e->slot);
    free(e->rows);
    free(e->chunk);
    free(e->adjusted);
    free(e->mtp);
    free(e->block_ids);
    free(e->block_conf);
    free(e);
}

int64_t aff__engine_context(const aff_engine *e) { return e->context; }

/* ---- any thread ---- */

aff_status aff__check_ids(const char *what, const int32_t *ids, int64_t n, int vocab, aff_error *err)
{
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return aff__fail(err, AFF_E_INVALID, "%s: token %lld of %lld: expected an id of 0 to %d, got %d", what,
                             (long long)i + 1, (long long)n, vocab - 1, ids[i]);
    return AFF_OK;
}

aff_status aff__check_tokens(const char *what, const int32_t *ids, int64_t n, int64_t used, int64_t context, int vocab, aff_error *err)
{
    if (n < 1) return aff__fail(err, AFF_E_INVALID, "%s: expected at least 1 token, got %lld", what, (long long)n);
    if (n > context - used)
        return aff__fail(err, AFF_E_LIMIT, "%s: expected at most %lld tokens (context %lld, %lld in use), got %lld: shorten it",
                         what, (long long)(context - used), (long long)context, (long long)used, (long long)n);
    return aff__check_ids(what, ids, n, vocab, err);
}

aff_status aff__engine_check(const aff_engine *e, const aff_request *r, aff_error *err)
{
    const int vocab = e->cfg->vocab;
    if (r->n_predict < 0)
        return aff__fail(err, AFF_E_INVALID, "tokens to predict: expected 0 or more, got %lld", (long long)r->n_predict);
    AFF_TRY(aff__sampling_check(&r->sampling, err));
    AFF_TRY(aff__adjust_check(&r->adjust, vocab, err));
    if (r->top_logprobs < 0 || r->top_logprobs > AFF_MAX_TOP_LOGPROBS || r->top_logprobs > vocab)
        return aff__fail(err, AFF_E_INVALID, "top log-probabilities: expected 0 to %d, got %d", AFF_MAX_TOP_LOGPROBS, r->top_logprobs);
    AFF_TRY(aff__check_ids("forced tokens", r->forced, r->n_forced, vocab, err));
    if (r->grammar && (r->ignore_eos || r->n_forced))
        return aff__fail(err, AFF_E_INVALID, "form of the answer: expected neither ignore_eos nor forced tokens with it");
    if (r->grammar && aff__grammar_vocab(r->grammar) != vocab)
        return aff__fail(err, AFF_E_INVALID, "form of the answer: expected a vocabulary of %d tokens, got %d", vocab, aff__grammar_vocab(r->grammar));
    return aff__check_tokens("prompt", r->prompt, r->n_prompt, 0, e->context, vocab, err);
}

static aff_status copy_ids(int32_t **out, const int32_t *ids, int64_t n, const char *what, aff_error *err)
{
    if (!n) return AFF_OK;
    AFF_TRY(aff__realloc(out, (uint64_t)n, sizeof **out, what, err));
    memcpy(*out, ids, (size_t)n * sizeof *ids);
    return AFF_OK;
}

static aff_status fill_job(aff_job *j, const aff_request *r, int vocab, aff_error *err)
{
    j->r = *r;
    AFF_TRY(copy_ids(&j->ids, r->prompt, r->n_prompt, "prompt", err));
    j->n = j->cap = r->n_prompt;
    AFF_TRY(copy_ids(&j->forced, r->forced, r->n_forced, "forced tokens", err));
    if (r->adjust.n_bias) {
        AFF_TRY(aff__realloc(&j->bias, (uint64_t)r->adjust.n_bias, sizeof *j->bias, "logit bias", err));
        memcpy(j->bias, r->adjust.bias, (size_t)r->adjust.n_bias * sizeof *j->bias);
    }
    if (r->grammar) {
        AFF_TRY(aff__matcher_create(&j->matcher, r->grammar, err));
        j->at = aff__matcher_start(j->matcher);
    }
    j->r.prompt = NULL;
    j->r.forced = j->forced;
    j->r.adjust.bias = j->bias;
    aff_adjust penalties = r->adjust;
    penalties.n_bias = 0;
    if (aff__adjust_off(&penalties)) return AFF_OK;
    AFF_TRY(aff__calloc(&j->seen.all, (uint64_t)vocab, sizeof(int32_t), "occurrences", err));
    AFF_TRY(aff__calloc(&j->seen.output, (uint64_t)vocab, sizeof(int32_t), "occurrences", err));
    for (int64_t i = 0; i < j->n; i++) j->seen.all[j->ids[i]]++;
    return AFF_OK;
}

static aff_status submit(aff_engine *e, const aff_request *r, const aff_events *ev, aff_result *result, uint64_t *id, aff_error *err)
{
    aff_job *j = NULL;
    AFF_TRY(aff__engine_check(e, r, err));
    AFF_TRY(aff__calloc(&j, 1, sizeof *j, "request", err));
    aff_status s = fill_job(j, r, e->cfg->vocab, err);
    if (s != AFF_OK) {
        free_job(j);
        return s;
    }
    if (ev) j->ev = *ev;
    j->result = result;
    pthread_mutex_lock(&e->lock);
    if (e->broken)
        s = aff__fail(err, AFF_E_DEVICE, "the device failed: %s", e->why.msg);
    else if (e->stopped)
        s = aff__fail(err, AFF_E_CANCELLED, "request: the engine is stopping");
    else if (e->waiting == e->o.queue)
        s = aff__fail(err, AFF_E_LIMIT, "request: %d wait already for one of %d slots, expected fewer: try again later", e->waiting, e->o.slots);
    else {
        *id = j->id = ++e->last_id;
        e->waiting++;
        if (e->tail)
            e->tail->next = j;
        else
            e->head = j;
        e->tail = j;
        pthread_cond_broadcast(&e->wake);
    }
    pthread_mutex_unlock(&e->lock);
    if (s != AFF_OK) free_job(j);
    return s;
}

aff_status aff__engine_submit(aff_engine *e, const aff_request *r, const aff_events *ev, uint64_t *id, aff_error *err)
{
    return submit(e, r, ev, NULL, id, err);
}

void aff__engine_cancel(aff_engine *e, uint64_t id)
{
    pthread_mutex_lock(&e->lock);
    for (aff_job *j = e->head; j; j = j->next)
        if (j->id == id) j->cancel = true;
    for (int i = 0; i < e->o.slots; i++)
        if (e->slot[i].job && e->slot[i].job->id == id) e->slot[i].job->cancel = true;
    pthread_mutex_unlock(&e->lock);
}

void aff__engine_stop(aff_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->stopped = true;
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void aff__engine_draft_stats(aff_engine *e, aff_draft_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->view.draft;
    pthread_mutex_unlock(&e->lock);
}

static bool busy(const aff_engine *e)
{
    for (int i = 0; i < e->o.slots; i++)
        if (e->slot[i].job) return true;
    return e->head != NULL;
}

bool aff__engine_wait(aff_engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (!e->stopped && !busy(e)) pthread_cond_wait(&e->wake, &e->lock);
    const bool go = !e->stopped;
    pthread_mutex_unlock(&e->lock);
    return go;
}

/* ---- tokens ---- */

aff_status aff__job_push(aff_job *j, int32_t id, aff_error *err)
{
    if (j->n == j->cap) {
        const int64_t cap = j->cap + j->cap / 2 + 64;
        AFF_TRY(aff__realloc(&j->ids, (uint64_t)cap, sizeof *j->ids, "tokens of a sequence", err));
        j->cap = cap;
    }
    j->ids[j->n++] = id;
    if (!j->seen.all) return AFF_OK;
    j->seen.all[id]++;
    j->seen.output[id]++;
    return AFF_OK;
}

/* The row without what the grammar refuses, in e->adjusted (where it may lie already). */
static aff_status keep_allowed(aff_engine *e, const aff_slot *s, const float *logits, int64_t n, aff_error *err)
{
    const aff_job *j = s->job;
    const uint64_t *words;
    int32_t mode;
    int64_t left = j->r.n_predict - j->out.decoded - (n - j->n);
    if (left > e->context - n + 1) left = e->context - n + 1;
    AFF_TRY(aff__argmax(logits, e->cfg->vocab, &mode, err)); /* a broken row is an error wherever it is broken */
    AFF_TRY(aff__matcher_mask(j->matcher, s->at, left, &words, err));
    for (int v = 0; v < e->cfg->vocab; v++) e->adjusted[v] = words[v >> 6] >> (v & 63) & 1 ? logits[v] : -INFINITY;
    return AFF_OK;
}

aff_status aff__slot_choose(aff_engine *e, aff_slot *s, const float *logits, int64_t n, int32_t *id, aff_error *err)
{
    const aff_request *r = &s->job->r;
    if (r->n_forced) {
        AFF_TRY(aff__argmax(logits, e->cfg->vocab, id, err)); /* broken logits are an error all the same */
        *id = r->forced[(n - r->n_prompt) % r->n_forced];
        return AFF_OK;
    }
    if (!aff__adjust_off(&r->adjust)) {
        aff__adjust_logits(&r->adjust, &s->job->seen, logits, e->cfg->vocab, e->adjusted);
        logits = e->adjusted;
    }
    if (s->job->matcher) {
        AFF_TRY(keep_allowed(e, s, logits, n, err));
        logits = e->adjusted;
    }
    return aff__sampler_next(e->sampler, logits, &r->sampling, n, id, err);
}

/* ---- prompts ---- */

/* Prompt rows to run before the answer. */
static int64_t prompt_rows(const aff_job *j) { return j->r.n_predict ? j->r.n_prompt - 1 : j->r.n_prompt; }

static void prompt_done(aff_engine *e, aff_slot *s)
{
    const uint64_t now = aff__now_ns();
    aff_job *j = s->job;
    j->out.prefill_ns = now - j->started;
    j->answering = now;
    /* The same prompt again, or another answer to it, can start here. */
    if (j->r.n_predict && j->out.prefilled && e->o.cache.publish) e->o.cache.publish(e->o.cache.ctx, s->seq, j->ids);
    if (j->r.n_predict)
        s->phase = AFF_ANSWER;
    else
        aff__slot_finish(e, s, AFF_OK, AFF_STOP_LENGTH, NULL);
}

/* Rows that a caller gets to see: NaN is an error here as it is for a row that a token is chosen from. */
static aff_status check_rows(const aff_engine *e, int64_t pos, int64_t n, aff_error *err)
{
    for (int64_t i = 0; i < n; i++) {
        aff_error why = {0};
        int32_t id;
        const aff_status s = aff__argmax(e->chunk + i * e->cfg->vocab, e->cfg->vocab, &id, &why);
        if (s != AFF_OK) return aff__fail(err, s, "%s: after position %lld: %s", aff__net_path(e->net), (long long)(pos + i), why.msg);
    }
    return AFF_OK;
}

/* The next rows of a prompt. *stop: an event said so. */
static aff_status run_chunk(aff_engine *e, aff_slot *s, int64_t most, bool *stop, aff_error *err)
{
    aff_job *j = s->job;
    const int64_t pos = aff__seq_pos(s->seq), total = prompt_rows(j);
    if (j->ev.logits && !e->chunk)
        AFF_TRY(aff__calloc(&e->chunk, (uint64_t)e->cfg->vocab * AFF_MAX_CHUNK, sizeof(float), "logits of a chunk", err));
    if (j->ev.logits) { /* no more wanted rows than that buffer holds */
        const int64_t first = j->r.logits_from > pos ? j->r.logits_from : pos;
        if (first < pos + most && most > first - pos + AFF_MAX_CHUNK) most = first - pos + AFF_MAX_CHUNK;
    }
    int n = (int)(total - pos < most ? total - pos : most);
    if (j->promote > pos && n > j->promote - pos) n = (int)(j->promote - pos);
    int64_t from = j->ev.logits ? j->r.logits_from - pos : n;
    from = from < 0 ? 0 : from < n ? from : n;
    const aff_batch b = {.n = n, .id = j->ids + pos, .seq = s->seq, .want_from = from, .logits = e->chunk};
    AFF_TRY(aff__forward(e->runner, &b, err));
    j->out.prefilled += n;
    e->passes.prompt_rows += n;
    /* The row after the prompt's last is known only if that one is not part of the prefill. */
    if (e->draft == AFF_DRAFT_MTP1 && j->r.n_predict)
        AFF_TRY(aff__mtp_prompt(e, s, j->ids + pos + 1, n, pos + n == total, err));
    AFF_TRY(check_rows(e, pos + from, n - from, err));
    if (from < n) AFF_TRY(j->ev.logits(j->ev.ctx, pos + from, (int)(n - from), e->chunk, err));
    /* Others have begun so and gone on otherwise: they and those to come can start here. */
    if (pos + n == j->promote && e->o.cache.publish) e->o.cache.publish(e->o.cache.ctx, s->seq, j->ids);
    *stop = j->ev.progress && !j->ev.progress(j->ev.ctx, pos + n, total);
    return AFF_OK;
}

static void prompt_pass(aff_engine *e, aff_slot *s, bool answers)
{
    aff_error err = {0};
    bool stop = false;
    const uint64_t start = aff__now_ns();
    s->turn = ++e->turns;
    const aff_status st = run_chunk(e, s, answers && e->o.chunk > AFF_MAX_CHUNK ? AFF_MAX_CHUNK : e->o.chunk, &stop, &err);
    e->chunk_ns = aff__now_ns() - start;
    e->passes.prompt_ns += e->chunk_ns;
    if (st != AFF_OK)
        aff__slot_finish(e, s, st, AFF_STOP_CALLER, &err);
    else if (stop)
        aff__slot_finish(e, s, AFF_OK, AFF_STOP_CALLER, NULL);
    else if (aff__seq_pos(s->seq) == prompt_rows(s->job))
        prompt_done(e, s);
    const double one = aff__time_of(e->stats.times.verify, 1), passes = one > 0 ? (double)e->chunk_ns / one : 1;
    e->owed = passes > MOST_OWED ? MOST_OWED : passes > 1 ? (int)passes : 1;
}

/* ---- a step ---- */

/* As much of the prompt as the cache knows, but no row that somebody wants to see. */
static aff_status restore(aff_engine *e, aff_slot *s, aff_error *err)
{
    aff_job *j = s->job;
    int64_t most = prompt_rows(j);
    if (j->ev.logits && j->r.logits_from < most) most = j->r.logits_from;
    if (!e->o.cache.restore || most < 1) return AFF_OK;
    int64_t matched = 0;
    AFF_TRY(e->o.cache.restore(e->o.cache.ctx, s->seq, j->ids, j->r.n_prompt, most, &matched, err));
    j->out.restored = aff__seq_pos(s->seq);
    if (matched > j->out.restored && prompt_rows(j) - matched >= PROMOTE_BEYOND) j->promote = matched;
    return AFF_OK;
}

static void start(aff_engine *e, aff_slot *s)
{
    aff_job *j = s->job;
    aff_error err = {0};
    aff__seq_reset(s->seq);
    aff__draft_reset(e, s);
    s->phase = AFF_PREFILL;
    s->turn = 0; /* a new request is the next in turn */
    j->started = aff__now_ns();
    const aff_status st = restore(e, s, &err);
    if (st != AFF_OK)
        aff__slot_finish(e, s, st, AFF_STOP_CALLER, &err);
    else if (aff__seq_pos(s->seq) == prompt_rows(j))
        prompt_done(e, s);
}

/* Takes a cancelled job out of the queue, NULL when there is none. */
static aff_job *take_cancelled(aff_engine *e)
{
    aff_job *found = NULL;
    pthread_mutex_lock(&e->lock);
    for (aff_job **at = &e->head, *last = NULL; *at; last = *at, at = &(*at)->next)
        if ((*at)->cancel) {
            found = *at;
            *at = found->next;
            if (e->tail == found) e->tail = last;
            e->waiting--;
            break;
        }
    pthread_mutex_unlock(&e->lock);
    return found;
}

/* What is cancelled ends; what waits gets the free slots, first come, first served. */
static void admit(aff_engine *e)
{
    for (aff_job *j; (j = take_cancelled(e));) end_job(j, AFF_OK, AFF_STOP_CALLER, NULL);
    for (int i = 0; i < e->o.slots; i++) {
        aff_slot *s = &e->slot[i];
        pthread_mutex_lock(&e->lock);
        const bool cancelled = s->job && s->job->cancel;
        pthread_mutex_unlock(&e->lock);
        if (cancelled) aff__slot_finish(e, s, AFF_OK, AFF_STOP_CALLER, NULL);
        if (s->job) continue;
        pthread_mutex_lock(&e->lock);
        aff_job *j = e->head;
        if (j) {
            e->head = j->next;
            if (!e->head) e->tail = NULL;
            e->waiting--;
            j->next = NULL;
            s->job = j;
        }
        pthread_mutex_unlock(&e->lock);
        if (j) start(e, s);
    }
}

/* After a fault of the device: what is at work and what waits ends with it. */
static void end_all(aff_engine *e)
{
    aff_error why;
    if (!aff__engine_broken(e, &why)) return;
    for (int i = 0; i < e->o.slots; i++)
        if (e->slot[i].job) aff__slot_finish(e, &e->slot[i], AFF_E_DEVICE, AFF_STOP_CALLER, &why);
    for (;;) {
        pthread_mutex_lock(&e->lock);
        aff_job *j = e->head;
        if (j) {
            e->head = j->next;
            if (!e->head) e->tail = NULL;
            e->waiting--;
        }
        pthread_mutex_unlock(&e->lock);
        if (!j) return;
        end_job(j, AFF_E_DEVICE, AFF_STOP_CALLER, &why);
    }
}

bool aff__engine_step(aff_engine *e)
{
    admit(e);
    aff_slot *prompt = NULL;
    bool answers = false;
    for (int i = 0; i < e->o.slots; i++) {
        aff_slot *s = &e->slot[i];
        answers |= s->phase == AFF_ANSWER;
        if (s->phase == AFF_PREFILL && (!prompt || s->turn < prompt->turn)) prompt = s;
    }
    if (prompt && (!answers || e->owed <= 0)) {
        prompt_pass(e, prompt, answers);
    } else if (answers) {
        const uint64_t start_ns = aff__now_ns();
        aff__decode_pass(e);
        e->passes.decode_ns += aff__now_ns() - start_ns;
        if (e->owed > 0) e->owed--;
    }
    end_all(e);
    aff__snapshot_look(e);
    pthread_mutex_lock(&e->lock);
    aff__snapshot_publish(e);
    const bool more = busy(e);
    pthread_mutex_unlock(&e->lock);
    return more;
}

aff_status aff__engine_run(aff_engine *e, const aff_request *r, const aff_events *ev, aff_outcome *out, aff_error *err)
{
    uint64_t id;
    aff_result result = {0};
    *out = (aff_outcome){.stop = AFF_STOP_LENGTH};
    AFF_TRY(submit(e, r, ev, &result, &id, err));
    while (!result.done) aff__engine_step(e);
    *out = result.outcome;
    return result.status == AFF_OK ? AFF_OK : aff__fail(err, result.status, "%s", result.err.msg);
}
