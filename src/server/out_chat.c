/* out_chat.c - answers of /v1/chat/completions and /v1/completions. */
#include "server/gen.h"
#include <inttypes.h>

static const char *finish_name(aff_finish f)
{
    return f == AFF_FIN_LENGTH ? "length" : f == AFF_FIN_CALLS ? "tool_calls" : "stop";
}

static bool is_chat(const aff_gen *g)
{
    return g->ask.dialect == AFF_CHAT_COMPLETIONS;
}

static void head(aff_gen *g, const char *object)
{
    aff__jout_fmt(&g->out, "{\"id\": \"%s\", \"object\": \"%s\", \"created\": %" PRIu64 ", \"model\": ", g->id, object,
                  g->created);
    aff__jout_cstr(&g->out, g->sv->model);
    aff__jout_raw(&g->out, ", \"choices\": [");
}

static void usage(aff_gen *g)
{
    int64_t tokens = 0, reasoning = 0, cached = g->choice[0].cached; /* of a prompt that counts once */
    for (int i = 0; i < g->ask.n; i++) {
        tokens += g->choice[i].tokens;
        reasoning += g->choice[i].reasoning_tokens;
    }
    aff__jout_fmt(&g->out,
                  "\"usage\": {\"prompt_tokens\": %" PRId64 ", \"completion_tokens\": %" PRId64
                  ", \"total_tokens\": %" PRId64,
                  g->n_prompt, tokens, g->n_prompt + tokens);
    aff__jout_fmt(&g->out, ", \"prompt_tokens_details\": {\"cached_tokens\": %" PRId64 "}", cached);
    aff__jout_fmt(&g->out, ", \"completion_tokens_details\": {\"reasoning_tokens\": %" PRId64 "}", reasoning);
    aff__jout_fmt(&g->out, ", \"prompt_cache_hit_tokens\": %" PRId64 ", \"prompt_cache_miss_tokens\": %" PRId64 "}",
                  cached, g->n_prompt - cached);
}

/* ---- log-probabilities ---- */

/* The entries of a list not sent yet (all: of all). */
static void prob_list(aff_jout *out, const aff_jout *list, size_t *sent, bool all)
{
    size_t from = all ? 0 : *sent;
    *sent = list->b.n;
    if (from && from < list->b.n) from += 2; /* the comma before it */
    aff__jout_raw(out, "[");
    if (from < list->b.n) aff__jout_raw(out, list->b.s + from);
    aff__jout_raw(out, "]");
}

static void probs(aff_choice *c, bool all)
{
    aff_jout *out = &c->g->out;
    aff__jout_raw(out, ", \"logprobs\": ");
    if (!c->g->ask.logprobs ||
        (!all && c->probs_sent == c->probs.b.n && c->reasoning_probs_sent == c->reasoning_probs.b.n)) {
        aff__jout_raw(out, "null");
        return;
    }
    aff__jout_raw(out, "{\"content\": ");
    prob_list(out, &c->probs, &c->probs_sent, all);
    if (is_chat(c->g)) {
        aff__jout_raw(out, ", \"reasoning_content\": ");
        prob_list(out, &c->reasoning_probs, &c->reasoning_probs_sent, all);
    }
    aff__jout_raw(out, "}");
}

/* ---- streams ---- */

static void chunk_begin(aff_choice *c)
{
    aff__jout_raw(&c->g->out, "data: ");
    head(c->g, is_chat(c->g) ? "chat.completion.chunk" : "text_completion");
    aff__jout_fmt(&c->g->out, "{\"index\": %d, %s", c->index, is_chat(c->g) ? "\"delta\": {" : "\"text\": ");
}

static void chunk_end(aff_choice *c, const char *finish)
{
    aff_jout *out = &c->g->out;
    if (is_chat(c->g)) aff__jout_raw(out, "}");
    probs(c, false);
    if (finish)
        aff__jout_fmt(out, ", \"finish_reason\": \"%s\"}]", finish);
    else
        aff__jout_raw(out, ", \"finish_reason\": null}]");
    aff__jout_raw(out, c->g->ask.usage ? ", \"usage\": null}\n\n" : "}\n\n");
}

static void chat_begin(aff_gen *g)
{
    for (int i = 0; i < g->ask.n; i++) {
        chunk_begin(&g->choice[i]);
        aff__jout_raw(&g->out, "\"role\": \"assistant\", \"content\": \"\"");
        chunk_end(&g->choice[i], NULL);
    }
}

static void chat_event(aff_choice *c, aff_gen_kind kind, aff_tool_call *call, const char *s, size_t n)
{
    aff_jout *out = &c->g->out;
    if (kind == AFF_G_CALL_END || kind == AFF_G_CALL_DROP) return;
    chunk_begin(c);
    if (kind == AFF_G_CALL) {
        aff__jout_fmt(
            out, "\"tool_calls\": [{\"index\": %d, \"id\": \"%s\", \"type\": \"function\", \"function\": {\"name\": ",
            call->index, call->id);
        aff__jout_str(out, s, n);
        aff__jout_raw(out, ", \"arguments\": \"\"}}]");
    } else if (kind == AFF_G_ARGS) {
        aff__jout_fmt(out, "\"tool_calls\": [{\"index\": %d, \"function\": {\"arguments\": ", call->index);
        aff__jout_str(out, s, n);
        aff__jout_raw(out, "}}]");
    } else {
        aff__jout_raw(out, kind == AFF_G_REASONING ? "\"reasoning_content\": " : "\"content\": ");
        aff__jout_str(out, s, n);
    }
    chunk_end(c, NULL);
}

static void chat_choice_done(aff_choice *c)
{
    chunk_begin(c);
    if (!is_chat(c->g)) aff__jout_raw(&c->g->out, "\"\"");
    chunk_end(c, finish_name(c->finish));
}

static void end(aff_gen *g)
{
    if (g->ask.usage) {
        aff__jout_raw(&g->out, "data: ");
        head(g, is_chat(g) ? "chat.completion.chunk" : "text_completion");
        aff__jout_raw(&g->out, "], ");
        usage(g);
        aff__jout_raw(&g->out, "}\n\n");
    }
    aff__jout_raw(&g->out, "data: [DONE]\n\n");
}

static void fail(aff_gen *g, const aff_error *err)
{
    aff__jout_raw(&g->out, "data: ");
    aff__put_error(&g->out, g->x, g->ask.dialect, 500, err->msg, NULL, NULL);
    aff__jout_raw(&g->out, "\n\ndata: [DONE]\n\n");
}

static void completion_event(aff_choice *c, aff_gen_kind kind, aff_tool_call *call, const char *s, size_t n)
{
    chunk_begin(c);
    aff__jout_str(&c->g->out, s, n);
    chunk_end(c, NULL);
}

static void completion_begin(aff_gen *g)
{
    for (int i = 0; i < g->ask.n && g->ask.echo; i++)
        completion_event(&g->choice[i], AFF_G_TEXT, NULL, g->ask.prompt, g->ask.n_prompt);
}

/* ---- whole answers ---- */

static void calls(aff_choice *c)
{
    aff_jout *out = &c->g->out;
    int n = 0;
    for (size_t i = 0; i < c->n_calls; i++) {
        const aff_tool_call *t = &c->call[i];
        if (t->dropped || t->open) continue;
        aff__jout_raw(out, n++ ? ", " : ", \"tool_calls\": [");
        aff__jout_fmt(out, "{\"id\": \"%s\", \"type\": \"function\", \"function\": {\"name\": ", t->id);
        aff__jout_str(out, t->name.s, t->name.n);
        aff__jout_raw(out, ", \"arguments\": ");
        aff__jout_str(out, t->arguments.s, t->arguments.n);
        aff__jout_raw(out, "}}");
    }
    if (n) aff__jout_raw(out, "]");
}

static void whole(aff_gen *g)
{
    aff_jout *out = &g->out;
    head(g, is_chat(g) ? "chat.completion" : "text_completion");
    for (int i = 0; i < g->ask.n; i++) {
        aff_choice *c = &g->choice[i];
        aff__jout_fmt(out, "%s{\"index\": %d, ", i ? ", " : "", i);
        if (is_chat(g)) {
            aff__jout_raw(out, "\"message\": {\"role\": \"assistant\", \"content\": ");
            if (!c->text.n && c->finish == AFF_FIN_CALLS)
                aff__jout_raw(out, "null");
            else
                aff__jout_str(out, c->text.s, c->text.n);
            if (c->reasoning.n) {
                aff__jout_raw(out, ", \"reasoning_content\": ");
                aff__jout_str(out, c->reasoning.s, c->reasoning.n);
            }
            calls(c);
            aff__jout_raw(out, "}");
        } else {
            aff__jout_raw(out, "\"text\": \"");
            if (g->ask.echo) aff__jout_tail(out, g->ask.prompt, g->ask.n_prompt);
            aff__jout_tail(out, c->text.s, c->text.n);
            aff__jout_raw(out, "\"");
        }
        probs(c, true);
        aff__jout_fmt(out, ", \"finish_reason\": \"%s\"}", finish_name(c->finish));
    }
    aff__jout_raw(out, "], ");
    usage(g);
    aff__jout_raw(out, "}");
}

static const char beat[] = "\n";
const aff_writer aff__chat_writer = {beat, chat_begin, chat_event, chat_choice_done, end, whole, fail};
const aff_writer aff__completion_writer = {beat, completion_begin, completion_event, chat_choice_done, end, whole,
                                           fail};
