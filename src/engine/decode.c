/* decode.c - a pass over the running answers: drafts, the share of the 16 rows, the pass, what of it is the text's.
 *
 * A drafted token is accepted iff it is the token that the sampler chooses at its row; all rows of a sequence up to the first
 * that differs are therefore rows that single steps would have run, and the choice of each is the token single steps would
 * have chosen. Everything else is taken back by a rollback to the last token chosen, which has not run. */
#include "engine/engine_internal.h"
#include "base/clock.h"
#include <math.h>
#include <string.h>

/* Worth of a draft, in tokens, after a pause: one bad draft makes it negative. */
static const double HOPE = 0.02;
enum { FIRST_PAUSE = 4, WARN_AFTER = 64 };

void aff__draft_reset(aff_engine *e, aff_slot *s)
{
    s->drafted = s->take = s->next_guess = 0;
    memset(s->guess, 0, sizeof s->guess);
    memset(&s->own, 0, sizeof s->own);
    /* What drafts were worth to others is all that is known of this text. */
    s->worth = e->worth >= 0 ? e->worth : HOPE;
    s->skip = e->worth >= 0 ? 0 : e->pause;
}

static void note_time(aff_engine *e, double *table, int n, uint64_t since)
{
    if (!e->o.times) aff__time_note(table, n, (double)(aff__now_ns() - since));
}

/* ---- drafts ---- */

/* Drafted tokens of use to the slot: no more than may still be chosen after the next, and than the context holds. */
static int useful(const aff_engine *e, const aff_slot *s)
{
    const aff_job *j = s->job;
    int64_t n = e->o.width == AFF_WIDTH_AUTO ? AFF_MAX_WIDTH : e->o.width;
    if (n > j->r.n_predict - j->out.decoded - 1) n = j->r.n_predict - j->out.decoded - 1;
    if (n > e->context - j->n) n = e->context - j->n;
    return (int)n;
}

static void note_guess(aff_engine *e, aff_slot *s)
{
    aff_guess *g = &s->guess[s->next_guess];
    s->next_guess = (s->next_guess + 1) % (AFF_MAX_WIDTH + 1);
    e->stats.blocks++;
    g->pos = s->job->n;
    g->n = s->drafted;
    g->right = 0;
    memcpy(g->id, s->draft, sizeof g->id);
    memcpy(g->conf, s->conf, sizeof g->conf);
}

/* Proposals as they came from outside, up to what can be fed; nothing comes after the end, or after what a grammar refuses. */
static void take_draft(aff_engine *e, aff_slot *s, const int32_t *ids, const float *conf, int n)
{
    const aff_request *r = &s->job->r;
    const bool ends = !r->ignore_eos && !r->n_forced;
    aff_match at = s->job->at;
    s->drafted = 0;
    while (s->drafted < n && s->drafted < AFF_MAX_WIDTH && ids[s->drafted] >= 0 && ids[s->drafted] < e->cfg->vocab) {
        if (ends && ids[s->drafted] == e->cfg->eos) break;
        if (s->job->matcher && !(at = aff__matcher_step(s->job->matcher, at, ids[s->drafted]))) break;
        s->draft[s->drafted] = ids[s->drafted];
        s->conf[s->drafted] = conf[s->drafted];
        s->drafted++;
    }
    if (s->drafted) note_guess(e, s);
}

/* Whether the slot drafts for this pass. */
static bool wants_draft(aff_engine *e, aff_slot *s)
{
    if (!e->o.width || useful(e, s) < 1) return false;
    if (!s->skip) return true;
    s->skip--;
    e->stats.skipped++;
    return false;
}

/* New proposals for those of the slots that want them (MTP-1 has made its own after the pass before). */
static aff_status draft(aff_engine *e, aff_slot **list, int n, aff_error *err)
{
    aff_draft_request q[AFF_MAX_DRAFTS];
    aff_slot *who[AFF_MAX_DRAFTS];
    int count = 0, most = AFF_PASS_ROWS - n; /* a draft that gets no row is of no use */
    if (e->draft == AFF_DRAFT_DSPARK && most > AFF_MAX_CHUNK / e->block) most = AFF_MAX_CHUNK / e->block;
    if (e->draft == AFF_DRAFT_MTP1 || !e->o.width) return AFF_OK;
    for (int i = 0; i < n; i++) {
        aff_slot *s = list[i];
        s->drafted = 0;
        if (count == most || !wants_draft(e, s)) continue;
        who[count] = s;
        q[count] = (aff_draft_request){.seq = s->seq,
                                       .id0 = s->job->ids[s->job->n - 1],
                                       .ids = e->block_ids + count * e->block,
                                       .conf = e->block_conf + count * e->block};
        count += aff__seq_pos(s->seq) > 0; /* the first token of all has nothing before it */
    }
    if (!count) return AFF_OK;
    const uint64_t start = aff__now_ns();
    if (e->o.propose) {
        for (int i = 0; i < count; i++) {
            int32_t ids[AFF_MAX_WIDTH] = {0};
            float conf[AFF_MAX_WIDTH] = {0};
            const int k = e->o.propose(e->o.propose_ctx, who[i]->job->ids, who[i]->job->n, ids, conf);
            take_draft(e, who[i], ids, conf, k);
        }
    } else {
        AFF_TRY(aff__draft_many(e->runner, q, count, NULL, NULL, err));
        for (int i = 0; i < count; i++) take_draft(e, who[i], q[i].ids, q[i].conf, e->block);
    }
    note_time(e, e->stats.times.draft, count, start);
    e->draft_ns = aff__time_of(e->stats.times.draft, count);
    e->stats.drafts[count]++;
    return AFF_OK;
}

/* MTP-1's proposal from its logits; its confidence is the logit of its probability. */
static void mtp_propose(aff_engine *e, aff_slot *s, const float *logits)
{
    const int V = e->cfg->vocab;
    int32_t id;
    float lp, conf;
    s->drafted = 0;
    if (useful(e, s) < 1 || aff__argmax(logits, V, &id, NULL) != AFF_OK) return;
    aff__logprobs(logits, V, &id, 1, &lp);
    conf = lp - log1pf(-expf(lp));
    take_draft(e, s, &id, &conf, 1);
}

aff_status aff__mtp_prompt(aff_engine *e, aff_slot *s, const int32_t *next, int n, bool propose, aff_error *err)
{
    AFF_TRY(aff__draft_mtp1(e->runner, next, n, propose ? n - 1 : n, e->mtp, err));
    if (propose) mtp_propose(e, s, e->mtp);
    return AFF_OK;
}

/* MTP-1 after a decode pass, before the rollbacks: its layer runs over every row, with the row's choice as the id that follows, so
 * that the proposal of a sequence is at the row of its last accepted token. */
static aff_status mtp_after(aff_engine *e, aff_slot **list, int n, aff_error *err)
{
    int32_t next[AFF_PASS_ROWS];
    int rows = 0, wanted = 0;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k <= list[i]->take; k++) next[rows++] = list[i]->choice[k] < 0 ? 0 : list[i]->choice[k];
        const bool wants = wants_draft(e, list[i]);
        wanted += wants;
        list[i]->drafted = wants ? -1 : 0; /* proposed once the text is known */
    }
    const uint64_t start = aff__now_ns();
    AFF_TRY(aff__draft_mtp1(e->runner, next, rows, wanted ? 0 : rows, e->mtp, err));
    note_time(e, wanted ? e->stats.times.draft : e->stats.times.upkeep, n, start);
    e->draft_ns = aff__time_of(wanted ? e->stats.times.draft : e->stats.times.upkeep, n);
    e->stats.drafts[n] += wanted > 0;
    return AFF_OK;
}

/* ---- shares ---- */

/* What a draft was worth beyond its cost, in tokens. When that has been negative lately, the slot goes without for some passes, twice
 * as many each time, until trying costs about a hundredth of the time. */
static void judge_draft(aff_engine *e, aff_slot *s, const aff_offer *o, double row_ns, double draft_ns, double price)
{
    const double worth = aff__offer_gain(o, o->take) - price * (row_ns * o->take + draft_ns);
    if (worth < 0 && s->drafted < e->block) return; /* it ends where the answer does: that says nothing about other texts */
    s->worth += (worth - s->worth) / 16;
    e->worth += (worth - e->worth) / 32;
    if (e->worth >= 0) e->pause = FIRST_PAUSE;
    if (s->worth >= 0) return;
    const double longest = fmin(100 * price * draft_ns, 1000);
    s->skip = e->pause;
    s->worth = HOPE;
    e->pause = 2 * e->pause < longest ? 2 * e->pause : e->pause;
}

/* How many drafted tokens of each slot the pass verifies. */
static void share(aff_engine *e, aff_slot **list, int n)
{
    aff_offer o[AFF_PASS_ROWS];
    const bool adaptive = e->o.width == AFF_WIDTH_AUTO;
    const double price = e->recent_ns > 0 ? e->recent_tokens / e->recent_ns : 0;
    const double *V = e->stats.times.verify;
    int drafts = 0;
    for (int i = 0; i < n; i++) {
        const aff_slot *s = list[i];
        const int most = useful(e, s);
        o[i] = (aff_offer){.n = s->drafted < most ? s->drafted : most};
        for (int j = 0; j < o[i].n; j++) o[i].chance[j] = aff__calibration_chance(&e->all, &s->own, j, s->conf[j]);
        drafts += s->drafted > 0;
    }
    const int given = aff__share_rows(o, n, AFF_PASS_ROWS - n, adaptive ? V : NULL, price);
    const double row_ns = given ? (aff__time_of(V, n + given) - aff__time_of(V, n)) / given : 0;
    /* What going without would save. */
    const double draft_ns = drafts ? fmax(0, aff__time_of(e->stats.times.draft, drafts) - aff__time_of(e->stats.times.upkeep, drafts)) / drafts : 0;
    for (int i = 0; i < n; i++) {
        aff_slot *s = list[i];
        s->take = o[i].take;
        if (s->drafted && !s->take) e->stats.unused++;
        if (adaptive && s->drafted && o[i].n && price > 0) judge_draft(e, s, &o[i], row_ns, draft_ns, price);
    }
}

/* ---- the pass ---- */

/* Memory for each slot's rows. One that gets none for its drafts goes without them; one that gets none at all ends, with the reason, and
 * the others go on. Returns how many are left in the list. */
static int back_rows(aff_engine *e, aff_slot **list, int n)
{
    int kept = 0;
    for (int i = 0; i < n; i++) {
        aff_slot *s = list[i];
        aff_error err = {0};
        const int64_t next = aff__seq_pos(s->seq) + 1;
        aff_status st = aff__seq_grow(s->seq, next + s->take, &err);
        if (st != AFF_OK && s->take) {
            s->take = 0;
            st = aff__seq_grow(s->seq, next, &err);
        }
        if (st == AFF_OK)
            list[kept++] = s;
        else
            aff__slot_finish(e, s, st, AFF_STOP_CALLER, &err);
    }
    return kept;
}

/* Runs the rows of all slots; their logits lie in e->rows. */
static aff_status run_rows(aff_engine *e, aff_slot **list, int n, int *rows, aff_error *err)
{
    aff_batch b[AFF_PASS_ROWS];
    int32_t ids[AFF_PASS_ROWS];
    *rows = 0;
    for (int i = 0; i < n; i++) {
        aff_slot *s = list[i];
        s->logits = e->rows + (int64_t)*rows * e->cfg->vocab;
        b[i] = (aff_batch){.n = 1 + s->take, .id = ids + *rows, .seq = s->seq, .logits = e->rows + (int64_t)*rows * e->cfg->vocab};
        ids[(*rows)++] = s->job->ids[s->job->n - 1];
        for (int k = 0; k < s->take; k++) ids[(*rows)++] = s->draft[k];
        s->turn = ++e->turns;
    }
    return aff__forward_many(e->runner, b, n, err);
}

/* The choice of every row, rejected ones too: each as if the drafted tokens before it were the text. */
static void choose_rows(aff_engine *e, aff_slot *s)
{
    aff_occurrences *seen = &s->job->seen;
    s->choice_err = (aff_error){0};
    s->at = s->job->at;
    for (int k = 0; k <= s->take; k++) {
        aff_error err = {0};
        if (k && seen->all) {
            seen->all[s->draft[k - 1]]++;
            seen->output[s->draft[k - 1]]++;
        }
        if (k && s->job->matcher) s->at = aff__matcher_step(s->job->matcher, s->at, s->draft[k - 1]);
        if (aff__slot_choose(e, s, s->logits + (int64_t)k * e->cfg->vocab, s->job->n + k, &s->choice[k], &err) == AFF_OK) continue;
        s->choice[k] = -1;
        if (!s->choice_err.code) s->choice_err = err;
    }
    for (int k = 0; k < s->take && seen->all; k++) {
        seen->all[s->draft[k]]--;
        seen->output[s->draft[k]]--;
    }
}

static void count(aff_engine *e, const aff_slot *s)
{
    bool all = true;
    for (int k = 0; k < s->take; k++) {
        const bool equal = s->draft[k] == s->choice[k];
        all &= equal;
        e->stats.offered[k]++;
        e->stats.marginal[k] += equal;
        e->stats.accepted[k] += all;
    }
}

/* Compares open guesses with the token at `pos`. */
static void score(aff_engine *e, aff_slot *s, int64_t pos, int32_t id)
{
    for (int i = 0; i <= AFF_MAX_WIDTH; i++) {
        aff_guess *g = &s->guess[i];
        if (g->right >= g->n || g->pos + g->right != pos) continue;
        const bool right = g->id[g->right] == id;
        aff__calibration_note(&e->all, &s->own, g->right, g->conf[g->right], right);
        if (!g->right) {
            e->scored++;
            e->right += right;
        }
        g->right = right ? g->right + 1 : g->n;
    }
    if (e->scored < WARN_AFTER || e->right || e->warned) return;
    e->warned = true;
    if (e->o.warn)
        e->o.warn(e->o.warn_ctx, "WARNING: not one drafted token was accepted so far: this draft is not this model's, or damaged. Text is not affected, "
                                 "speed is: --dspark off");
}

/* Adds the choice of row k to the text and tells the caller. *stop when it was the last. */
static aff_status emit(aff_engine *e, aff_slot *s, int k, bool *end, aff_stop *stop, aff_error *err)
{
    aff_job *j = s->job;
    const float *row = s->logits + (int64_t)k * e->cfg->vocab;
    const int64_t pos = j->n; /* of the token; its logits are row pos - 1 */
    if (j->ev.logits && pos - 1 >= j->r.logits_from) AFF_TRY(j->ev.logits(j->ev.ctx, pos - 1, 1, row, err));
    if (s->choice[k] < 0) return aff__fail(err, s->choice_err.code, "position %lld: %s", (long long)pos, s->choice_err.msg);
    aff_token t = {.pos = pos, .id = s->choice[k]};
    int32_t top[AFF_MAX_TOP_LOGPROBS];
    float lp[AFF_MAX_TOP_LOGPROBS];
    if (j->r.logprobs) {
        t.n_top = j->r.top_logprobs;
        t.top = top;
        t.top_logprob = lp;
        AFF_TRY(aff__top_logits(row, e->cfg->vocab, t.n_top, top, err));
        aff__logprobs(row, e->cfg->vocab, top, t.n_top, lp);
        aff__logprobs(row, e->cfg->vocab, &t.id, 1, &t.logprob);
    }
    AFF_TRY(aff__job_push(j, t.id, err));
    if (j->matcher) j->at = aff__matcher_step(j->matcher, j->at, t.id);
    j->out.decoded++;
    e->stats.tokens++;
    e->passes.tokens++;
    score(e, s, pos, t.id);
    *end = true;
    *stop = AFF_STOP_CALLER;
    if (j->ev.token && !j->ev.token(j->ev.ctx, &t)) return AFF_OK;
    *stop = AFF_STOP_EOS;
    if (t.id == e->cfg->eos && !j->r.ignore_eos && !j->r.n_forced) return AFF_OK;
    *stop = AFF_STOP_LENGTH;
    *end = j->out.decoded == j->r.n_predict;
    return AFF_OK;
}

/* What of the slot's rows is the text's. Returns the tokens that came of it. */
static int settle(aff_engine *e, aff_slot *s)
{
    aff_error err = {0};
    aff_stop stop = AFF_STOP_LENGTH;
    bool end = false;
    int k = 0;
    const int64_t before = s->job->n;
    count(e, s);
    aff_status st = emit(e, s, k, &end, &stop, &err);
    while (st == AFF_OK && !end && k < s->take && s->draft[k] == s->choice[k]) st = emit(e, s, ++k, &end, &stop, &err);
    const int tokens = (int)(s->job->n - before);
    e->stats.passes++;
    if (st == AFF_OK && s->job->matcher && !end) st = aff__matcher_keep(s->job->matcher, &s->job->at, &err);
    if (st == AFF_OK) st = aff__seq_rollback(s->seq, s->job->n - 1, &err);
    if (st != AFF_OK)
        aff__slot_finish(e, s, st, AFF_STOP_CALLER, &err);
    else if (end)
        aff__slot_finish(e, s, AFF_OK, stop, NULL);
    else if (s->drafted < 0)
        mtp_propose(e, s, e->mtp + (s->logits - e->rows) + (int64_t)k * e->cfg->vocab);
    return tokens;
}

/* The answers for this pass, those whose turn was longest ago first. */
static int pick(aff_engine *e, aff_slot **list)
{
    int n = 0;
    for (int i = 0; i < e->o.slots; i++) {
        aff_slot *s = &e->slot[i];
        if (s->phase != AFF_ANSWER) continue;
        if (aff__seq_pos(s->seq) == e->context) {
            aff__slot_finish(e, s, AFF_OK, AFF_STOP_CONTEXT, NULL);
            continue;
        }
        int at = n < AFF_PASS_ROWS ? n++ : AFF_PASS_ROWS; /* an insertion sort that keeps the first */
        for (; at > 0 && list[at - 1]->turn > s->turn; at--)
            if (at < AFF_PASS_ROWS) list[at] = list[at - 1];
        if (at < AFF_PASS_ROWS) list[at] = s;
    }
    return n;
}

void aff__decode_pass(aff_engine *e)
{
    aff_slot *list[AFF_PASS_ROWS];
    aff_error err = {0};
    int rows = 0, tokens = 0;
    int n = pick(e, list);
    if (!n) return;
    e->draft_ns = 0;
    aff_status st = draft(e, list, n, &err);
    if (st == AFF_OK) {
        share(e, list, n);
        n = back_rows(e, list, n);
        if (!n) return;
        const uint64_t start = aff__now_ns();
        st = run_rows(e, list, n, &rows, &err);
        for (int i = 0; st == AFF_OK && i < n; i++) choose_rows(e, list[i]);
        if (st == AFF_OK) note_time(e, e->stats.times.verify, rows, start);
    }
    if (st == AFF_OK && e->draft == AFF_DRAFT_MTP1) st = mtp_after(e, list, n, &err);
    if (st != AFF_OK) { /* no one's fault in particular */
        for (int i = 0; i < n; i++) aff__slot_finish(e, list[i], st, AFF_STOP_CALLER, &err);
        return;
    }
    e->stats.rows[rows]++;
    for (int i = 0; i < n; i++) tokens += settle(e, list[i]);
    const double fade = 0.98;
    e->recent_tokens = fade * e->recent_tokens + tokens;
    e->recent_ns = fade * e->recent_ns + aff__time_of(e->stats.times.verify, rows) + e->draft_ns;
}
