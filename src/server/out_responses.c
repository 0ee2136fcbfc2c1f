/* out_responses.c - answers of /v1/responses. Items: reasoning, message, function_call; each complete one is kept in
 * g->items, as the closing event and the whole answer list them. */
#include "server/gen.h"
#include <inttypes.h>
#include <string.h>

enum { REASONING, MESSAGE, CALL };

static void event(aff_gen *g, const char *type)
{
    aff__jout_fmt(&g->out, "event: %s\ndata: {\"type\": \"%s\", \"sequence_number\": %" PRIu64, type, type,
                  g->number++);
}

static void item_id(const aff_choice *c, char *out, size_t cap)
{
    static const char *const prefix[] = {"rs_", "msg_", "fc_"};
    snprintf(out, cap, "%s%s_%d", prefix[c->block_kind], c->g->id + strlen("resp_"), c->block);
}

/* ", "item_id": ..., "output_index": ..." */
static void place(aff_choice *c)
{
    char id[80];
    item_id(c, id, sizeof id);
    aff__jout_fmt(&c->g->out, ", \"item_id\": \"%s\", \"output_index\": %d", id, c->block);
}

/* The text of the open item starts here. */
static const char *body_of(const aff_choice *c, size_t *n)
{
    const aff_buf *b = c->block_kind == REASONING ? &c->reasoning : &c->text;
    *n = b->n - c->block_from;
    return b->n ? b->s + c->block_from : "";
}

static void put_item(aff_choice *c, aff_jout *out, const aff_tool_call *call, const char *s, size_t n,
                     const char *status)
{
    char id[80];
    item_id(c, id, sizeof id);
    if (c->block_kind == REASONING) {
        aff__jout_fmt(out, "{\"type\": \"reasoning\", \"id\": \"%s\", \"summary\": [], \"content\": [", id);
        if (n) {
            aff__jout_raw(out, "{\"type\": \"reasoning_text\", \"text\": ");
            aff__jout_str(out, s, n);
            aff__jout_raw(out, "}");
        }
        aff__jout_raw(out, "], \"encrypted_content\": null");
    } else if (c->block_kind == MESSAGE) {
        aff__jout_fmt(out, "{\"type\": \"message\", \"id\": \"%s\", \"role\": \"assistant\", \"content\": [", id);
        if (n || strcmp(status, "in_progress") != 0) {
            aff__jout_raw(out, "{\"type\": \"output_text\", \"annotations\": [], \"logprobs\": [], \"text\": ");
            aff__jout_str(out, s, n);
            aff__jout_raw(out, "}");
        }
        aff__jout_raw(out, "]");
    } else {
        aff__jout_fmt(out, "{\"type\": \"function_call\", \"id\": \"%s\", \"call_id\": \"%s\", \"name\": ", id,
                      call->id);
        aff__jout_str(out, call->name.s, call->name.n);
        aff__jout_raw(out, ", \"arguments\": ");
        aff__jout_str(out, s, n);
    }
    aff__jout_fmt(out, ", \"status\": \"%s\"}", status);
}

/* ---- the response object ---- */

static void response(aff_gen *g, const char *status)
{
    aff_jout *out = &g->out;
    const aff_choice *c = &g->choice[0];
    aff__jout_fmt(
        out, "{\"id\": \"%s\", \"object\": \"response\", \"created_at\": %" PRIu64 ", \"status\": \"%s\", \"model\": ",
        g->id, g->created, status);
    aff__jout_cstr(out, g->sv->model);
    aff__jout_raw(out, ", \"error\": null, \"incomplete_details\": ");
    aff__jout_raw(out, strcmp(status, "incomplete") == 0 ? "{\"reason\": \"max_output_tokens\"}" : "null");
    aff__jout_raw(out, ", \"instructions\": null, \"metadata\": {}, \"tools\": [], \"tool_choice\": \"auto\", "
                       "\"previous_response_id\": null, \"store\": false");
    aff__jout_raw(out, g->ask.one_call ? ", \"parallel_tool_calls\": false" : ", \"parallel_tool_calls\": true");
    aff__jout_fmt(out, ", \"temperature\": %g, \"top_p\": %g, \"output\": [", g->ask.sampling.temperature,
                  g->ask.sampling.top_p);
    if (g->items.b.n) aff__jout_raw(out, g->items.b.s);
    aff__jout_raw(out, "], \"usage\": ");
    if (strcmp(status, "in_progress") == 0) {
        aff__jout_raw(out, "null}");
        return;
    }
    aff__jout_fmt(out,
                  "{\"input_tokens\": %" PRId64 ", \"input_tokens_details\": {\"cached_tokens\": %" PRId64
                  "}, \"output_tokens\": %" PRId64,
                  g->n_prompt, c->cached, c->tokens);
    aff__jout_fmt(out,
                  ", \"output_tokens_details\": {\"reasoning_tokens\": %" PRId64 "}, \"total_tokens\": %" PRId64 "}}",
                  c->reasoning_tokens, g->n_prompt + c->tokens);
}

static void state_event(aff_gen *g, const char *type, const char *status)
{
    event(g, type);
    aff__jout_raw(&g->out, ", \"response\": ");
    response(g, status);
    aff__jout_raw(&g->out, "}\n\n");
}

static void begin(aff_gen *g)
{
    g->choice[0].block_kind = -1;
    state_event(g, "response.created", "in_progress");
    state_event(g, "response.in_progress", "in_progress");
}

/* ---- items of a stream ---- */

static void part_event(aff_choice *c, const char *type, const char *s, size_t n)
{
    event(c->g, type);
    place(c);
    aff__jout_raw(&c->g->out, ", \"content_index\": 0, \"part\": {\"type\": \"output_text\", \"annotations\": [], "
                              "\"logprobs\": [], \"text\": ");
    aff__jout_str(&c->g->out, s, n);
    aff__jout_raw(&c->g->out, "}}\n\n");
}

static void done_text(aff_choice *c, const char *type, const char *field, const char *s, size_t n)
{
    event(c->g, type);
    place(c);
    if (c->block_kind != CALL) aff__jout_raw(&c->g->out, ", \"content_index\": 0");
    if (c->block_kind == MESSAGE) aff__jout_raw(&c->g->out, ", \"logprobs\": []");
    aff__jout_fmt(&c->g->out, ", \"%s\": ", field);
    aff__jout_str(&c->g->out, s, n);
    aff__jout_raw(&c->g->out, "}\n\n");
}

static void keep_item(aff_choice *c, const aff_tool_call *call, const char *s, size_t n, const char *status)
{
    if (c->g->items.b.n) aff__jout_raw(&c->g->items, ", ");
    put_item(c, &c->g->items, call, s, n, status);
    if (c->g->items.failed) c->g->out.failed = true;
}

static void close_item(aff_choice *c, const char *status)
{
    aff_gen *g = c->g;
    const aff_tool_call *call = c->n_calls ? &c->call[c->n_calls - 1] : NULL;
    size_t n;
    if (c->block < 0 || c->block_kind < 0) return;
    const char *s = body_of(c, &n);
    if (c->block_kind == CALL) {
        s = call->arguments.n ? call->arguments.s : "";
        n = call->arguments.n;
        done_text(c, "response.function_call_arguments.done", "arguments", s, n);
    } else if (c->block_kind == MESSAGE) {
        done_text(c, "response.output_text.done", "text", s, n);
        part_event(c, "response.content_part.done", s, n);
    } else {
        done_text(c, "response.reasoning_text.done", "text", s, n);
    }
    event(g, "response.output_item.done");
    aff__jout_fmt(&g->out, ", \"output_index\": %d, \"item\": ", c->block);
    put_item(c, &g->out, call, s, n, status);
    aff__jout_raw(&g->out, "}\n\n");
    if (c->block_kind != CALL || !call->dropped)
        keep_item(c, call, s, n, status); /* half a call is no part of the answer */
    c->block_kind = -1;
}

/* `before`: bytes of text or reasoning that belong to earlier items. */
static void open_item(aff_choice *c, int kind, const aff_tool_call *call, size_t before)
{
    if (c->block >= 0 && c->block_kind == kind && kind != CALL) return;
    close_item(c, "completed");
    c->block++;
    c->block_kind = kind;
    c->block_from = before;
    event(c->g, "response.output_item.added");
    aff__jout_fmt(&c->g->out, ", \"output_index\": %d, \"item\": ", c->block);
    put_item(c, &c->g->out, call, "", 0, "in_progress");
    aff__jout_raw(&c->g->out, "}\n\n");
    if (kind == MESSAGE) part_event(c, "response.content_part.added", "", 0);
}

static void delta(aff_choice *c, const char *type, const char *s, size_t n)
{
    event(c->g, type);
    place(c);
    if (c->block_kind != CALL) aff__jout_raw(&c->g->out, ", \"content_index\": 0");
    if (c->block_kind == MESSAGE) aff__jout_raw(&c->g->out, ", \"logprobs\": []");
    aff__jout_raw(&c->g->out, ", \"delta\": ");
    aff__jout_str(&c->g->out, s, n);
    aff__jout_raw(&c->g->out, "}\n\n");
}

static void on_event(aff_choice *c, aff_gen_kind kind, aff_tool_call *call, const char *s, size_t n)
{
    switch (kind) {
    case AFF_G_REASONING:
        open_item(c, REASONING, NULL, c->reasoning.n - n);
        delta(c, "response.reasoning_text.delta", s, n);
        break;
    case AFF_G_TEXT:
        open_item(c, MESSAGE, NULL, c->text.n - n);
        delta(c, "response.output_text.delta", s, n);
        break;
    case AFF_G_CALL:
        open_item(c, CALL, call, 0);
        break;
    case AFF_G_ARGS:
        delta(c, "response.function_call_arguments.delta", s, n);
        break;
    case AFF_G_CALL_END:
        close_item(c, "completed");
        break;
    case AFF_G_CALL_DROP:
        close_item(c, "incomplete");
        break;
    }
}

static void choice_done(aff_choice *c)
{
    const bool cut = c->finish == AFF_FIN_LENGTH;
    if (c->block < 0 && !cut) open_item(c, MESSAGE, NULL, 0);
    close_item(c, cut ? "incomplete" : "completed");
}

static void end(aff_gen *g)
{
    if (g->choice[0].finish == AFF_FIN_LENGTH)
        state_event(g, "response.incomplete", "incomplete");
    else
        state_event(g, "response.completed", "completed");
}

static void fail(aff_gen *g, const aff_error *err)
{
    event(g, "response.failed");
    aff__jout_fmt(&g->out,
                  ", \"response\": {\"id\": \"%s\", \"object\": \"response\", \"status\": \"failed\", \"output\": [], "
                  "\"error\": {\"code\": \"server_error\", \"message\": ",
                  g->id);
    aff__jout_cstr(&g->out, err->msg);
    aff__jout_raw(&g->out, "}}}\n\n");
}

/* ---- the whole answer ---- */

static void whole_item(aff_choice *c, int kind, const aff_tool_call *call, const aff_buf *b)
{
    const bool cut = c->finish == AFF_FIN_LENGTH && kind != CALL;
    c->block++;
    c->block_kind = kind;
    keep_item(c, call, b->n ? b->s : "", b->n, cut ? "incomplete" : "completed");
}

static void whole(aff_gen *g)
{
    aff_choice *c = &g->choice[0];
    if (c->reasoning.n) whole_item(c, REASONING, NULL, &c->reasoning);
    if (c->text.n || c->finish != AFF_FIN_CALLS) whole_item(c, MESSAGE, NULL, &c->text);
    for (size_t i = 0; i < c->n_calls; i++)
        if (!c->call[i].dropped && !c->call[i].open) whole_item(c, CALL, &c->call[i], &c->call[i].arguments);
    response(g, c->finish == AFF_FIN_LENGTH ? "incomplete" : "completed");
}

const aff_writer aff__responses_writer = {"\n", begin, on_event, choice_done, end, whole, fail};
