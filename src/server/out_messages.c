/* out_messages.c - answers of /v1/messages. */
#include "server/gen.h"
#include <inttypes.h>

enum { THINKING, TEXT, TOOL };

static const char *reason(const aff_choice *c)
{
    switch (c->finish) {
    case AFF_FIN_LENGTH:
        return "max_tokens";
    case AFF_FIN_CALLS:
        return "tool_use";
    case AFF_FIN_STOP_STRING:
        return "stop_sequence";
    default:
        return "end_turn";
    }
}

static void stop_fields(aff_choice *c)
{
    aff_jout *out = &c->g->out;
    aff__jout_fmt(out, "\"stop_reason\": \"%s\", \"stop_sequence\": ", reason(c));
    if (c->finish == AFF_FIN_STOP_STRING)
        aff__jout_str(out, c->stopped_by, c->n_stopped_by);
    else
        aff__jout_raw(out, "null");
}

static void usage(aff_gen *g, int64_t tokens)
{
    const int64_t cached = g->choice[0].cached; /* known at the end */
    aff__jout_fmt(&g->out,
                  "\"usage\": {\"input_tokens\": %" PRId64
                  ", \"cache_creation_input_tokens\": 0, \"cache_read_input_tokens\": %" PRId64
                  ", \"output_tokens\": %" PRId64 "}",
                  g->n_prompt - cached, cached, tokens);
}

static void head(aff_gen *g)
{
    aff__jout_fmt(&g->out, "{\"id\": \"%s\", \"type\": \"message\", \"role\": \"assistant\", \"model\": ", g->id);
    aff__jout_cstr(&g->out, g->sv->model);
    aff__jout_raw(&g->out, ", \"content\": [");
}

static void event(aff_gen *g, const char *type)
{
    aff__jout_fmt(&g->out, "event: %s\ndata: {\"type\": \"%s\"", type, type);
}

static void begin(aff_gen *g)
{
    event(g, "message_start");
    aff__jout_raw(&g->out, ", \"message\": ");
    head(g);
    aff__jout_raw(&g->out, "], \"stop_reason\": null, \"stop_sequence\": null, ");
    usage(g, 0);
    aff__jout_raw(&g->out, "}}\n\n");
}

/* Blocks follow one another: the open one is closed before the next begins. block counts them, block_kind is -1 between
 * two. */
static void close_block(aff_choice *c)
{
    if (c->block < 0 || c->block_kind < 0) return;
    if (c->block_kind == THINKING) {
        event(c->g, "content_block_delta");
        aff__jout_fmt(&c->g->out,
                      ", \"index\": %d, \"delta\": {\"type\": \"signature_delta\", \"signature\": \"affinity\"}}\n\n",
                      c->block);
    }
    event(c->g, "content_block_stop");
    aff__jout_fmt(&c->g->out, ", \"index\": %d}\n\n", c->block);
    c->block_kind = -1;
}

static void open_block(aff_choice *c, int kind, const aff_tool_call *call)
{
    aff_jout *out = &c->g->out;
    if (c->block >= 0 && c->block_kind == kind && kind != TOOL) return;
    close_block(c);
    c->block++;
    c->block_kind = kind;
    event(c->g, "content_block_start");
    aff__jout_fmt(out, ", \"index\": %d, \"content_block\": {\"type\": ", c->block);
    if (kind == THINKING) {
        aff__jout_raw(out, "\"thinking\", \"thinking\": \"\", \"signature\": \"\"");
    } else if (kind == TEXT) {
        aff__jout_raw(out, "\"text\", \"text\": \"\"");
    } else {
        aff__jout_fmt(out, "\"tool_use\", \"id\": \"%s\", \"name\": ", call->id);
        aff__jout_str(out, call->name.s, call->name.n);
        aff__jout_raw(out, ", \"input\": {}");
    }
    aff__jout_raw(out, "}}\n\n");
}

static void delta(aff_choice *c, const char *type, const char *field, const char *s, size_t n)
{
    event(c->g, "content_block_delta");
    aff__jout_fmt(&c->g->out, ", \"index\": %d, \"delta\": {\"type\": \"%s\", \"%s\": ", c->block, type, field);
    aff__jout_str(&c->g->out, s, n);
    aff__jout_raw(&c->g->out, "}}\n\n");
}

static void on_event(aff_choice *c, aff_gen_kind kind, aff_tool_call *call, const char *s, size_t n)
{
    switch (kind) {
    case AFF_G_REASONING:
        open_block(c, THINKING, NULL);
        delta(c, "thinking_delta", "thinking", s, n);
        break;
    case AFF_G_TEXT:
        open_block(c, TEXT, NULL);
        delta(c, "text_delta", "text", s, n);
        break;
    case AFF_G_CALL:
        open_block(c, TOOL, call);
        break;
    case AFF_G_ARGS:
        delta(c, "input_json_delta", "partial_json", s, n);
        break;
    case AFF_G_CALL_END:
    case AFF_G_CALL_DROP:
        close_block(c);
        break;
    }
}

static void choice_done(aff_choice *c)
{
    if (c->block < 0 || (c->block_kind == THINKING && c->finish != AFF_FIN_LENGTH))
        open_block(c, TEXT, NULL); /* an answer has a text */
    close_block(c);
    event(c->g, "message_delta");
    aff__jout_raw(&c->g->out, ", \"delta\": {");
    stop_fields(c);
    aff__jout_raw(&c->g->out, "}, ");
    usage(c->g, c->tokens);
    aff__jout_raw(&c->g->out, "}\n\n");
}

static void end(aff_gen *g)
{
    event(g, "message_stop");
    aff__jout_raw(&g->out, "}\n\n");
}

static void fail(aff_gen *g, const aff_error *err)
{
    aff__jout_raw(&g->out, "event: error\ndata: ");
    aff__put_error(&g->out, g->x, AFF_MESSAGES, 500, err->msg, NULL, NULL);
    aff__jout_raw(&g->out, "\n\n");
}

static void whole(aff_gen *g)
{
    aff_jout *out = &g->out;
    aff_choice *c = &g->choice[0];
    int n = 0;
    head(g);
    if (c->reasoning.n) {
        aff__jout_raw(out, "{\"type\": \"thinking\", \"thinking\": ");
        aff__jout_str(out, c->reasoning.s, c->reasoning.n);
        aff__jout_raw(out, ", \"signature\": \"affinity\"}");
        n++;
    }
    if (c->text.n || c->finish != AFF_FIN_CALLS) {
        aff__jout_raw(out, n++ ? ", {\"type\": \"text\", \"text\": " : "{\"type\": \"text\", \"text\": ");
        aff__jout_str(out, c->text.s, c->text.n);
        aff__jout_raw(out, "}");
    }
    for (size_t i = 0; i < c->n_calls; i++) {
        const aff_tool_call *t = &c->call[i];
        if (t->dropped || t->open) continue;
        aff__jout_fmt(out, "%s{\"type\": \"tool_use\", \"id\": \"%s\", \"name\": ", n++ ? ", " : "", t->id);
        aff__jout_str(out, t->name.s, t->name.n);
        aff__jout_raw(out, ", \"input\": ");
        aff__jout_raw(out, t->arguments.n ? t->arguments.s : "{}");
        aff__jout_raw(out, "}");
    }
    aff__jout_raw(out, "], ");
    stop_fields(c);
    aff__jout_raw(out, ", ");
    usage(g, c->tokens);
    aff__jout_raw(out, "}");
}

const aff_writer aff__messages_writer = {
    "event: ping\ndata: {\"type\": \"ping\"}\n\n", begin, on_event, choice_done, end, whole, fail};
