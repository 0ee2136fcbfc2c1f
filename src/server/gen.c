#include "server/gen.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/text.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

void aff__random_id(char *out, size_t cap, const char *prefix)
{
    uint64_t r[2] = {0};
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r) r[1] = aff__now_ns();
    snprintf(out, cap, "%s%016" PRIx64 "%016" PRIx64, prefix, r[0], r[1]);
}

/* ---- errors ---- */

static const char *error_type(aff_dialect d, int status)
{
    const bool m = d == AFF_MESSAGES;
    switch (status) {
    case 401:
        return "authentication_error";
    case 404:
        return m ? "not_found_error" : "invalid_request_error";
    case 413:
        return m ? "request_too_large" : "invalid_request_error";
    case 429:
        return "rate_limit_error";
    case 503:
        return m ? "overloaded_error" : "unavailable_error";
    default:
        return status < 500 ? "invalid_request_error" : m ? "api_error" : "server_error";
    }
}

void aff__put_error(aff_jout *j, const aff_exchange *x, aff_dialect d, int status, const char *message,
                    const char *param, const char *code)
{
    aff__jout_raw(j, d == AFF_MESSAGES ? "{\"type\": \"error\", \"error\": {\"type\": " : "{\"error\": {\"type\": ");
    aff__jout_cstr(j, error_type(d, status));
    aff__jout_raw(j, ", \"message\": ");
    aff__jout_cstr(j, message);
    if (d == AFF_MESSAGES) {
        aff__jout_raw(j, "}, \"request_id\": ");
        aff__jout_cstr(j, aff__x_id(x));
        aff__jout_raw(j, "}");
        return;
    }
    aff__jout_raw(j, ", \"param\": ");
    if (param && *param)
        aff__jout_cstr(j, param);
    else
        aff__jout_raw(j, "null");
    aff__jout_raw(j, ", \"code\": ");
    if (code)
        aff__jout_cstr(j, code);
    else
        aff__jout_raw(j, "null");
    aff__jout_raw(j, "}}");
}

void aff__answer_error(aff_exchange *x, aff_dialect d, int status, const char *message, const char *param,
                       const char *code)
{
    aff_jout j = {0};
    aff__put_error(&j, x, d, status, message, param, code);
    aff__x_respond(x, status, "application/json", j.b.n ? j.b.s : "{}", j.b.n ? j.b.n : 2);
    aff__buf_free(&j.b);
}

/* ---- the end ---- */

static void free_choice(aff_choice *c)
{
    aff__parser_free(c->parser);
    aff__buf_free(&c->text);
    aff__buf_free(&c->reasoning);
    aff__buf_free(&c->held);
    aff__ids_free(&c->ids);
    aff__buf_free(&c->probs.b);
    aff__buf_free(&c->reasoning_probs.b);
    aff__buf_free(&c->pending.b);
    for (size_t i = 0; i < c->n_calls; i++) {
        aff__buf_free(&c->call[i].name);
        aff__buf_free(&c->call[i].arguments);
    }
    free(c->call);
}

/* Gives one reference back; the lock is held and let go. */
static void release(aff_gen *g)
{
    const bool last = --g->refs == 0;
    pthread_mutex_unlock(&g->lock);
    if (!last) return;
    aff_serving *sv = g->sv;
    aff_exchange *x = g->x;
    pthread_mutex_lock(&sv->lock);
    if (g->next) g->next->prev = g->prev;
    if (g->prev)
        g->prev->next = g->next;
    else
        sv->live = g->next;
    if (!sv->live) pthread_cond_broadcast(&sv->idle);
    pthread_mutex_unlock(&sv->lock);
    for (int i = 0; g->choice && i < g->ask.n; i++) free_choice(&g->choice[i]);
    free(g->choice);
    aff__grammar_free(g->grammar);
    aff__buf_free(&g->out.b);
    aff__buf_free(&g->items.b);
    aff__ask_free(&g->ask);
    pthread_mutex_destroy(&g->lock);
    free(g);
    aff__x_unref(x);
}

/* Nobody waits for the answer any more. */
static void abandon(aff_gen *g)
{
    g->abandoned = true;
    for (int i = 0; i < g->ask.n; i++)
        if (g->choice[i].submitted && !g->choice[i].done) aff__engine_cancel(g->sv->engine, g->choice[i].id);
}

/* The client has left; the reference is the one that was taken for this call. */
static void on_gone(void *user)
{
    aff_gen *g = user;
    pthread_mutex_lock(&g->lock);
    abandon(g);
    release(g);
}

void aff__gen_flush(aff_gen *g)
{
    if (!g->out.b.n && !g->out.failed) return;
    if (!g->abandoned && (g->out.failed || !aff__x_write(g->x, g->out.b.s, g->out.b.n))) abandon(g);
    g->out.b.n = 0;
}

/* ---- from tokens to events ---- */

static void emit(aff_choice *c, aff_gen_kind kind, aff_tool_call *call, const char *s, size_t n)
{
    if (c->g->ask.stream && !c->g->abandoned) c->g->w->event(c, kind, call, s, n);
}

static aff_status settle(aff_choice *c, aff_jout *to, aff_error *err)
{
    if (!c->pending.b.n) return AFF_OK;
    if (to->b.n) AFF_TRY(aff__buf_puts(&to->b, ", ", err));
    AFF_TRY(aff__buf_put(&to->b, c->pending.b.s, c->pending.b.n, err));
    c->pending.b.n = 0;
    return AFF_OK;
}

static aff_status send_text(aff_choice *c, const char *s, size_t n, aff_error *err)
{
    if (!n) return AFF_OK;
    AFF_TRY(aff__buf_put(&c->text, s, n, err));
    AFF_TRY(settle(c, &c->probs, err));
    emit(c, AFF_G_TEXT, NULL, s, n);
    return AFF_OK;
}

/* The earliest stop string in held; of two that begin at one place the shorter, which was complete first. */
static size_t find_stop(const aff_choice *c, const aff_stop_string **which)
{
    size_t best = SIZE_MAX;
    for (int i = 0; i < c->g->ask.n_stop; i++) {
        const aff_stop_string *st = &c->g->ask.stop[i];
        for (size_t at = 0; at + st->n <= c->held.n && at <= best; at++) {
            if (memcmp(c->held.s + at, st->s, st->n) != 0) continue;
            if (at < best || st->n < (*which)->n) {
                best = at;
                *which = st;
            }
            break;
        }
    }
    return best;
}

/* Bytes at the end of held that may begin a stop string. */
static size_t may_stop(const aff_choice *c)
{
    size_t most = 0;
    for (int i = 0; i < c->g->ask.n_stop; i++) {
        const aff_stop_string *st = &c->g->ask.stop[i];
        size_t n = st->n - 1 < c->held.n ? st->n - 1 : c->held.n;
        while (n > most && memcmp(c->held.s + c->held.n - n, st->s, n) != 0) n--;
        if (n > most) most = n;
    }
    return most;
}

/* Text of the answer passes here: stop strings are looked for, and what may begin one is kept back. */
static aff_status take_text(aff_choice *c, const char *s, size_t n, aff_error *err)
{
    if (!c->g->ask.n_stop) return send_text(c, s, n, err);
    const aff_stop_string *st = NULL;
    AFF_TRY(aff__buf_put(&c->held, s, n, err));
    const size_t at = find_stop(c, &st);
    if (at != SIZE_MAX) {
        AFF_TRY(send_text(c, c->held.s, at, err));
        c->stopped_by = st->s;
        c->n_stopped_by = st->n;
        c->held.n = 0;
        c->halted = true;
        return AFF_OK;
    }
    const size_t keep = may_stop(c), out = c->held.n - keep;
    AFF_TRY(send_text(c, c->held.s, out, err));
    memmove(c->held.s, c->held.s + out, keep);
    c->held.n = keep;
    return AFF_OK;
}

static aff_status flush_held(aff_choice *c, aff_error *err)
{
    const size_t n = c->held.n;
    c->held.n = 0;
    return n ? send_text(c, c->held.s, n, err) : AFF_OK;
}

static aff_status new_call(aff_choice *c, const aff_parse_event *e, aff_error *err)
{
    AFF_TRY(flush_held(c, err));
    AFF_TRY(aff__realloc(&c->call, c->n_calls + 1, sizeof *c->call, "calls", err));
    aff_tool_call *t = &c->call[c->n_calls];
    *t = (aff_tool_call){.number = e->call, .open = true, .index = (int)c->n_calls};
    c->n_calls++;
    aff__random_id(t->id, sizeof t->id, c->g->ask.dialect == AFF_MESSAGES ? "toolu_" : "call_");
    AFF_TRY(aff__buf_put(&t->name, e->s, e->n, err));
    c->pending.b.n = 0;
    emit(c, AFF_G_CALL, t, e->s, e->n);
    return AFF_OK;
}

static aff_status on_parsed(void *ctx, const aff_parse_event *e, aff_error *err)
{
    aff_choice *c = ctx;
    if (c->halted) return AFF_OK;
    if (e->kind != AFF_PARSE_REASONING) c->reasoning_over = true;
    aff_tool_call *t = c->n_calls ? &c->call[c->n_calls - 1] : NULL;
    switch (e->kind) {
    case AFF_PARSE_REASONING:
        AFF_TRY(aff__buf_put(&c->reasoning, e->s, e->n, err));
        emit(c, AFF_G_REASONING, NULL, e->s, e->n);
        return AFF_OK;
    case AFF_PARSE_TEXT:
        return take_text(c, e->s, e->n, err);
    case AFF_PARSE_CALL:
        return new_call(c, e, err);
    case AFF_PARSE_ARGS:
        AFF_TRY(aff__buf_put(&t->arguments, e->s, e->n, err));
        emit(c, AFF_G_ARGS, t, e->s, e->n);
        return AFF_OK;
    case AFF_PARSE_CALL_END:
        t->open = false;
        c->pending.b.n = 0;
        emit(c, AFF_G_CALL_END, t, NULL, 0);
        if (c->g->ask.one_call) c->halted = true;
        return AFF_OK;
    case AFF_PARSE_CALL_DROP:
        t->open = false;
        t->dropped = true;
        emit(c, AFF_G_CALL_DROP, t, NULL, 0);
        return AFF_OK;
    }
    return AFF_OK;
}

static void put_prob(const aff_serving *sv, aff_jout *j, int32_t id, float p)
{
    size_t n;
    const char *s = aff__tokenizer_bytes(sv->tok, (uint32_t)id, &n);
    char text[3 * 4 + 1024];
    aff_utf8_stream u = {0};
    size_t shown = n <= 256 ? aff__utf8_push(&u, s, n, text) : 0;
    shown += aff__utf8_flush(&u, text + shown);
    aff__jout_raw(j, "{\"token\": ");
    aff__jout_str(j, text, shown);
    aff__jout_fmt(j, ", \"logprob\": %.7g, \"bytes\": [", p < -9999 ? -9999.0 : (double)p); /* -infinity is no JSON */
    for (size_t i = 0; i < n; i++) aff__jout_fmt(j, i ? ", %d" : "%d", (uint8_t)s[i]);
    aff__jout_raw(j, "]");
}

static void keep_probs(aff_choice *c, const aff_token *t)
{
    aff_jout *j = &c->pending;
    if (j->b.n) aff__jout_raw(j, ", ");
    put_prob(c->g->sv, j, t->id, t->logprob);
    aff__jout_raw(j, ", \"top_logprobs\": [");
    for (int i = 0; i < t->n_top; i++) {
        if (i) aff__jout_raw(j, ", ");
        put_prob(c->g->sv, j, t->top[i], t->top_logprob[i]);
        aff__jout_raw(j, "}");
    }
    aff__jout_raw(j, "]}");
}

static aff_status raw_token(aff_choice *c, const char *s, size_t n, aff_error *err)
{
    char small[1024], *large = NULL;
    if (3 * (n + 4) > sizeof small) AFF_TRY(aff__realloc(&large, n + 4, 3, "text of a token", err));
    char *out = large ? large : small;
    const aff_status st = take_text(c, out, aff__utf8_push(&c->utf8, s, n, out), err);
    free(large);
    return st;
}

static aff_status take_token(aff_choice *c, const aff_token *t, aff_error *err)
{
    const aff_gen *g = c->g;
    size_t n;
    const char *s = aff__tokenizer_bytes(g->sv->tok, (uint32_t)t->id, &n);
    const bool reasoning = g->thinking && !c->reasoning_over;
    c->tokens++;
    if (reasoning) c->reasoning_tokens++;
    if (t->id == (int32_t)g->sv->cfg->eos) return AFF_OK;
    if (c->parser) AFF_TRY(aff__ids_push(&c->ids, (uint32_t)t->id, err));
    if (g->ask.logprobs) keep_probs(c, t);
    if (g->ask.dialect == AFF_COMPLETIONS || (g->literal && !reasoning))
        return aff__tokenizer_is_special(g->sv->tok, (uint32_t)t->id) ? AFF_OK : raw_token(c, s, n, err);
    if (reasoning) AFF_TRY(settle(c, &c->reasoning_probs, err));
    if (t->id == g->sv->think_end) c->reasoning_over = true;
    return aff__parser_feed(c->parser, s, n, err);
}

/* What the client hears of while nothing else is written. */
static void tell(aff_gen *g, int64_t done)
{
    char line[128];
    int64_t tokens = 0;
    if (!g->ask.stream) return;
    for (int i = 0; i < g->ask.n; i++) tokens += g->choice[i].tokens;
    if (tokens)
        snprintf(line, sizeof line, ": %" PRId64 " tokens\n%s", tokens, g->w->heartbeat);
    else if (g->place)
        snprintf(line, sizeof line, ": queued, place %d\n%s", g->place, g->w->heartbeat);
    else
        snprintf(line, sizeof line, ": prompt, %" PRId64 " of %" PRId64 " tokens\n%s", done, g->n_prompt,
                 g->w->heartbeat);
    aff__x_heartbeat(g->x, line);
}

static bool on_token(void *ctx, const aff_token *t)
{
    aff_choice *c = ctx;
    aff_gen *g = c->g;
    pthread_mutex_lock(&g->lock);
    if (!c->halted && c->status == AFF_OK) c->status = take_token(c, t, &c->err);
    tell(g, 0);
    aff__gen_flush(g);
    const bool more = !g->abandoned && !c->halted && c->status == AFF_OK;
    pthread_mutex_unlock(&g->lock);
    return more;
}

static bool on_progress(void *ctx, int64_t done, int64_t total)
{
    aff_choice *c = ctx;
    pthread_mutex_lock(&c->g->lock);
    c->prefilled = done;
    c->g->place = 0;
    tell(c->g, done);
    const bool more = !c->g->abandoned;
    pthread_mutex_unlock(&c->g->lock);
    return more;
}

/* ---- the end of a choice, and of all ---- */

static aff_status finish_text(aff_choice *c, bool eos, aff_error *err)
{
    char tail[8];
    if (c->halted) return AFF_OK;
    if (c->parser) AFF_TRY(aff__parser_end(c->parser, eos, err));
    if (!c->halted) AFF_TRY(take_text(c, tail, aff__utf8_flush(&c->utf8, tail), err));
    return c->halted ? AFF_OK : flush_held(c, err);
}

static aff_finish how_it_ended(const aff_choice *c, const aff_outcome *o)
{
    bool calls = false;
    for (size_t i = 0; i < c->n_calls; i++) calls = calls || (!c->call[i].dropped && !c->call[i].open);
    if (c->stopped_by) return AFF_FIN_STOP_STRING;
    if (!c->halted && (o->stop == AFF_STOP_LENGTH || o->stop == AFF_STOP_CONTEXT)) return AFF_FIN_LENGTH;
    return calls ? AFF_FIN_CALLS : AFF_FIN_STOP;
}

/* What is missing of the block of calls when the answer was stopped behind its first one. false: it is another text. */
static bool complete_block(aff_choice *c)
{
    static const char close[] = "</｜DSML｜";
    const bool v41 = c->g->sv->format == AFF_CHAT_V41;
    const char *whole = v41 ? "</｜DSML｜ invoke>\n</｜DSML｜ calls>" : "</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    aff_buf b = {0};
    const char *last = NULL;
    bool ok = true;
    for (size_t i = 0; i < c->ids.n && ok; i++) {
        size_t n;
        const char *s = aff__tokenizer_bytes(c->g->sv->tok, c->ids.id[i], &n);
        ok = aff__buf_put(&b, s, n, NULL) == AFF_OK;
    }
    for (const char *p = b.s; ok && p && (p = strstr(p, close)); p++) last = p;
    const size_t have = last ? strlen(last) : 0;
    ok = ok && have && have <= strlen(whole) && strncmp(last, whole, have) == 0 &&
         aff__tokenizer_encode(c->g->sv->tok, whole + have, strlen(whole) - have, true, &c->ids, NULL) == AFF_OK;
    aff__buf_free(&b);
    return ok;
}

/* Keeps an answer that ended by itself, for when the client sends it back. */
static void remember(aff_choice *c, const aff_outcome *o)
{
    const aff_gen *g = c->g;
    aff_turn_call *call = NULL;
    if (!c->parser || g->ask.continue_final || c->status != AFF_OK || g->abandoned || c->stopped_by || !c->ids.n)
        return;
    if (c->halted ? !complete_block(c) : o->stop != AFF_STOP_EOS) return;
    if (aff__calloc(&call, c->n_calls, sizeof *call, "turn", NULL) != AFF_OK) return;
    aff_turn t = {.thinking = g->thinking,
                  .reasoning = c->reasoning.n ? c->reasoning.s : "",
                  .n_reasoning = c->reasoning.n,
                  .text = c->text.n ? c->text.s : "",
                  .n_text = c->text.n,
                  .call = call,
                  .ids = c->ids.id,
                  .n_ids = c->ids.n};
    for (size_t i = 0; i < c->n_calls; i++) {
        const aff_tool_call *k = &c->call[i];
        if (k->dropped || k->open) continue;
        const bool none = !k->arguments.n;
        call[t.n_calls++] = (aff_turn_call){k->id,         k->name.s, none ? "{}" : k->arguments.s,
                                            strlen(k->id), k->name.n, none ? 2 : k->arguments.n};
    }
    aff__replay_put(g->sv->replay, &t);
    free(call);
}

static void count_choice(aff_serving *sv, const aff_choice *c, const aff_outcome *o)
{
    pthread_mutex_lock(&sv->count_lock);
    sv->count.prompt_tokens += (uint64_t)o->prefilled;
    sv->count.cached_tokens += (uint64_t)o->restored;
    sv->count.cached_prompts += o->restored > 0;
    sv->count.tokens += (uint64_t)o->decoded;
    sv->count.prefill_ns += o->prefill_ns;
    sv->count.decode_ns += o->decode_ns;
    if (c->g->abandoned) sv->count.cancelled++;
    if (c->status != AFF_OK) sv->count.failed++;
    if (c->status == AFF_OK && !c->g->abandoned && !c->text.n && !c->n_calls) sv->count.empty++;
    sv->at_work--;
    pthread_mutex_unlock(&sv->count_lock);
}

/* A failure of the machine, not of the request, is a fault until an answer succeeds again. */
static void note_fault(aff_serving *sv, aff_status s, const aff_error *err)
{
    const bool fault =
        s != AFF_OK && s != AFF_E_INVALID && s != AFF_E_LIMIT && s != AFF_E_NOMEM && s != AFF_E_CANCELLED;
    if (s != AFF_OK && !fault) return;
    pthread_mutex_lock(&sv->count_lock);
    snprintf(sv->fault, sizeof sv->fault, "%.250s", fault ? err->msg : "");
    pthread_mutex_unlock(&sv->count_lock);
}

/* Sequence `id` has ended: those behind it in the queue move up. */
static void move_up(aff_serving *sv, uint64_t id)
{
    pthread_mutex_lock(&sv->lock);
    for (aff_gen *g = sv->live; g; g = g->next) {
        pthread_mutex_lock(&g->lock);
        if (g->place && g->choice && g->choice[0].submitted && g->choice[0].id > id) {
            g->place--;
            tell(g, 0);
        }
        pthread_mutex_unlock(&g->lock);
    }
    pthread_mutex_unlock(&sv->lock);
}

static void all_done(aff_gen *g)
{
    const aff_error *err = NULL;
    for (int i = 0; i < g->ask.n && !err; i++)
        if (g->choice[i].status != AFF_OK) err = &g->choice[i].err;
    if (aff__x_forget_gone(g->x)) g->refs--; /* not the last one: the caller has its own */
    if (g->abandoned) {
    } else if (g->ask.stream) {
        if (err)
            g->w->fail(g, err);
        else
            g->w->end(g);
        aff__gen_flush(g);
    } else if (err) {
        aff__answer_error(g->x, g->ask.dialect, err->code == AFF_E_DEVICE ? 503 : 500, err->msg, NULL, NULL);
    } else {
        g->w->whole(g);
        if (g->out.failed)
            aff__answer_error(g->x, g->ask.dialect, 500, "out of memory", NULL, NULL);
        else
            aff__x_respond(g->x, 200, "application/json", g->out.b.s, g->out.b.n);
    }
    aff__x_end(g->x);
}

static void on_done(void *ctx, aff_status status, const aff_outcome *o, const aff_error *err)
{
    aff_choice *c = ctx;
    aff_gen *g = c->g;
    aff_serving *sv = g->sv;
    const uint64_t id = c->id;
    if (status != AFF_OK || o->decoded) note_fault(sv, status, err);
    pthread_mutex_lock(&g->lock);
    if (c->status == AFF_OK && status != AFF_OK) {
        c->status = status;
        c->err = *err;
    }
    if (c->status == AFF_OK && !g->abandoned) c->status = finish_text(c, o->stop == AFF_STOP_EOS, &c->err);
    c->finish = how_it_ended(c, o);
    c->cached = o->restored;
    c->done = true;
    if (c->status == AFF_OK && o->stop == AFF_STOP_CALLER && !c->halted && !g->abandoned) {
        c->status = aff__fail(&c->err, AFF_E_CANCELLED, "the server is stopping");
    }
    remember(c, o); /* before the client has all of it and can ask again */
    if (g->ask.stream && !g->abandoned && c->status == AFF_OK) g->w->choice_done(c);
    aff__gen_flush(g);
    count_choice(sv, c, o);
    if (++g->n_done == g->ask.n) all_done(g);
    release(g);
    move_up(sv, id);
}

/* ---- the beginning ---- */

static aff_status from_u32(const aff_ids *ids, int32_t **out, int64_t *n, aff_error *err)
{
    AFF_TRY(aff__calloc(out, ids->n, sizeof **out, "prompt", err));
    for (size_t i = 0; i < ids->n; i++) (*out)[i] = (int32_t)ids->id[i];
    *n = (int64_t)ids->n;
    return AFF_OK;
}

static bool replay(void *ctx, const json_t *message, bool thinking, aff_buf *text, aff_ids *ids)
{
    return aff__replay_find(ctx, message, thinking, text, ids);
}

aff_status aff__gen_prompt(const aff_serving *sv, const aff_ask *a, int32_t **ids, int64_t *n, bool *thinking,
                           aff_error *err)
{
    *thinking = false;
    if (a->ids) {
        AFF_TRY(aff__calloc(ids, (uint64_t)a->n_ids, sizeof **ids, "prompt", err));
        memcpy(*ids, a->ids, (size_t)a->n_ids * sizeof **ids);
        *n = a->n_ids;
        return AFF_OK;
    }
    aff_ids list = {0};
    aff_status s;
    if (a->dialect == AFF_COMPLETIONS) {
        s = aff__ids_push(&list, (uint32_t)sv->cfg->bos, err);
        if (s == AFF_OK) s = aff__tokenizer_encode(sv->tok, a->prompt, a->n_prompt, true, &list, err);
    } else {
        aff_chat_prompt p = {0};
        aff_ask mine = *a;
        mine.replay = replay;
        mine.replay_ctx = sv->replay;
        s = aff__ask_render(&mine, sv->format, &p, err);
        if (s == AFF_OK) {
            *thinking = p.thinking;
            s = aff__tokenizer_encode_segments(sv->tok, p.seg, p.n_seg, &list, err);
            aff__chat_prompt_free(&p);
        }
    }
    if (s == AFF_OK) s = from_u32(&list, ids, n, err);
    aff__ids_free(&list);
    return s;
}

/* Refuses a prompt that leaves no room for an answer. */
static bool too_long(aff_gen *g)
{
    const long long context = (long long)aff__engine_context(g->sv->engine), n = (long long)g->n_prompt;
    aff_jout j = {0};
    char line[256];
    if (n < context) return false;
    if (g->ask.dialect == AFF_MESSAGES) {
        snprintf(line, sizeof line, "prompt is too long: %lld tokens > %lld maximum", n, context - 1);
        aff__answer_error(g->x, AFF_MESSAGES, 400, line, NULL, NULL);
        return true;
    }
    aff__jout_fmt(&j,
                  "{\"error\": {\"message\": \"the prompt has %lld tokens, this server's context is %lld tokens: "
                  "shorten it\", \"type\": "
                  "\"invalid_request_error\", \"param\": \"%s\", \"code\": \"context_length_exceeded\", "
                  "\"n_prompt_tokens\": %lld, \"n_ctx\": %lld}}",
                  n, context,
                  g->ask.dialect == AFF_RESPONSES     ? "input"
                  : g->ask.dialect == AFF_COMPLETIONS ? "prompt"
                                                      : "messages",
                  n, context);
    aff__x_respond(g->x, 400, "application/json", j.b.s, j.b.n);
    aff__buf_free(&j.b);
    return true;
}

static int64_t budget(const aff_gen *g)
{
    const int64_t room = aff__engine_context(g->sv->engine) - g->n_prompt;
    int64_t asked = g->ask.max_tokens < 0 ? room : g->ask.max_tokens;
    if (asked < g->sv->floor) asked = g->sv->floor;
    return asked < room ? asked : room;
}

static aff_status make_choices(aff_gen *g, aff_error *err)
{
    AFF_TRY(aff__calloc(&g->choice, (uint64_t)g->ask.n, sizeof *g->choice, "choices", err));
    for (int i = 0; i < g->ask.n; i++) {
        aff_choice *c = &g->choice[i];
        c->g = g;
        c->index = i;
        c->block = -1;
        if (g->ask.dialect != AFF_COMPLETIONS)
            AFF_TRY(aff__parser_create(&c->parser, g->thinking, g->ask.tools, on_parsed, c, err));
    }
    return AFF_OK;
}

/* Seconds until a place in the queue may be free, from the requests so far. */
static int retry_after(aff_serving *sv)
{
    pthread_mutex_lock(&sv->count_lock);
    const double each = sv->count.requests
                            ? (double)(sv->count.prefill_ns + sv->count.decode_ns) / 1e9 / (double)sv->count.requests
                            : 1;
    pthread_mutex_unlock(&sv->count_lock);
    const double s = each / sv->slots;
    return s < 1 ? 1 : s > 60 ? 60 : (int)s;
}

static void refuse(aff_gen *g, aff_status s, const aff_error *err)
{
    char after[16];
    abandon(g);
    pthread_mutex_lock(&g->sv->count_lock);
    g->sv->count.refused++;
    pthread_mutex_unlock(&g->sv->count_lock);
    if (s == AFF_E_LIMIT) {
        snprintf(after, sizeof after, "%d", retry_after(g->sv));
        aff__x_header(g->x, "Retry-After", after);
        aff__answer_error(g->x, g->ask.dialect, 429, "the queue is full: try again later", NULL, "queue_full");
    } else if (s == AFF_E_CANCELLED) {
        aff__answer_error(g->x, g->ask.dialect, 503, "the server is stopping", NULL, NULL);
    } else if (s == AFF_E_INVALID) {
        aff__answer_error(g->x, g->ask.dialect, 400, err->msg, g->ask.param, NULL);
    } else {
        aff__answer_error(g->x, g->ask.dialect, s == AFF_E_DEVICE ? 503 : 500, err->msg, NULL, NULL);
    }
}

static aff_status submit_all(aff_gen *g, const int32_t *ids, aff_error *err)
{
    aff_request r = {.prompt = ids,
                     .n_prompt = g->n_prompt,
                     .n_predict = budget(g),
                     .sampling = g->ask.sampling,
                     .adjust = g->ask.adjust,
                     .logprobs = g->ask.logprobs,
                     .top_logprobs = g->ask.top_logprobs,
                     .ignore_eos = g->ask.ignore_eos,
                     .grammar = g->grammar};
    if (!g->ask.seeded && getrandom(&r.sampling.seed, sizeof r.sampling.seed, 0) != (ssize_t)sizeof r.sampling.seed)
        r.sampling.seed = aff__now_ns();
    for (int i = 0; i < g->ask.n; i++) {
        aff_choice *c = &g->choice[i];
        const aff_events ev = {.ctx = c, .progress = on_progress, .token = on_token, .done = on_done};
        r.sampling.choice = (uint32_t)i;
        pthread_mutex_lock(&g->sv->count_lock);
        const int before = g->sv->at_work++; /* counted first: it may end before submit returns */
        pthread_mutex_unlock(&g->sv->count_lock);
        const aff_status s = aff__engine_submit(g->sv->engine, &r, &ev, &c->id, err);
        if (s != AFF_OK) {
            pthread_mutex_lock(&g->sv->count_lock);
            g->sv->at_work--;
            pthread_mutex_unlock(&g->sv->count_lock);
            return s;
        }
        if (i == 0) g->place = before < g->sv->slots ? 0 : before - g->sv->slots + 1;
        c->submitted = true;
        g->refs++;
    }
    return AFF_OK;
}

static aff_status compile_form(aff_gen *g, aff_error *err)
{
    const aff_ask *a = &g->ask;
    const aff_grammar_request r = {.schema = a->schema,
                                   .name = a->form_param,
                                   .calls = a->calls,
                                   .tools = a->tools,
                                   .only = a->only,
                                   .one_call = a->one_call,
                                   .v41 = g->sv->format == AFF_CHAT_V41,
                                   .thinking = g->thinking};
    if (!a->schema && a->calls == AFF_CALLS_NONE) return AFF_OK;
    g->literal = a->calls == AFF_CALLS_NONE;
    snprintf(g->ask.param, sizeof g->ask.param, "%s", a->form_param);
    return aff__grammar_compile(&g->grammar, g->sv->vocab, &r, err);
}

static void enlist(aff_gen *g)
{
    aff_serving *sv = g->sv;
    pthread_mutex_lock(&sv->lock);
    g->next = sv->live;
    if (g->next) g->next->prev = g;
    sv->live = g;
    pthread_mutex_unlock(&sv->lock);
    pthread_mutex_lock(&sv->count_lock);
    sv->count.requests++;
    pthread_mutex_unlock(&sv->count_lock);
}

void aff__gen_start(aff_serving *sv, aff_exchange *x, aff_ask *ask)
{
    static const aff_writer *const writers[] = {&aff__chat_writer, &aff__completion_writer, &aff__messages_writer,
                                                &aff__responses_writer};
    static const char cold[] = "thinking at a temperature below 0.8 tends to repeat itself without end";
    static const char *const prefixes[] = {"chatcmpl-", "cmpl-", "msg_", "resp_"};
    aff_error err = {0};
    aff_gen *g = NULL;
    int32_t *ids = NULL;
    if (aff__calloc(&g, 1, sizeof *g, "request", &err) != AFF_OK) {
        aff__answer_error(x, ask->dialect, 500, err.msg, NULL, NULL);
        aff__ask_free(ask);
        return;
    }
    *g = (aff_gen){
        .sv = sv, .x = x, .w = writers[ask->dialect], .ask = *ask, .refs = 1, .created = (uint64_t)time(NULL)};
    *ask = (aff_ask){0};
    pthread_mutex_init(&g->lock, NULL);
    aff__random_id(g->id, sizeof g->id, prefixes[g->ask.dialect]);
    aff__x_ref(x);
    aff__x_release_body(x);
    if (g->ask.ignored.n) aff__x_header(x, "x-affinity-ignored", g->ask.ignored.s);
    aff_status s = aff__gen_prompt(sv, &g->ask, &ids, &g->n_prompt, &g->thinking, &err); /* long: no lock is held */
    if (g->thinking && g->ask.sampling.temperature < 0.8) aff__x_header(x, "x-affinity-warning", cold);
    enlist(g);
    pthread_mutex_lock(&g->lock);
    if (s == AFF_E_LIMIT) s = AFF_E_INVALID; /* one of the request; that of submit_all is the queue's */
    const bool answered = s == AFF_OK && too_long(g);
    if (answered) s = AFF_E_INVALID;
    if (s == AFF_OK) s = compile_form(g, &err);
    if (s == AFF_OK) s = make_choices(g, &err);
    if (s == AFF_OK) s = submit_all(g, ids, &err);
    if (s == AFF_OK) {
        if (aff__x_on_gone(x, on_gone, g))
            g->refs++;
        else
            abandon(g);
    }
    free(ids);
    if (s == AFF_OK && g->ask.stream) {
        aff__x_begin(x, 200, "text/event-stream");
        tell(g, 0);
        g->w->begin(g);
        aff__gen_flush(g);
    } else if (s != AFF_OK && !answered) {
        if (!g->choice) g->ask.n = 0;
        refuse(g, s, &err);
    }
    release(g);
}
