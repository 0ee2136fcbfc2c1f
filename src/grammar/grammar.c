/* grammar.c - a request to a grammar: reasoning, an answer of a form, calls in their markup (spec
 * text-and-serving 2.2, 2.7). */
#include "grammar/schema.h"
#include "base/mem.h"
#include "format/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tags {
    const char *calls, *invoke, *parameter; /* names, with the space that V4.1 puts in front */
} tags;

/* ---- calls ---- */

static const json_t *function_of(const json_t *tool)
{
    const json_t *f = json_object_get(tool, "function");
    return f ? f : tool;
}

static bool strict(const json_t *tool)
{
    return json_is_true(json_object_get(function_of(tool), "strict")) || json_is_true(json_object_get(tool, "strict"));
}

static const json_t *parameters_of(const json_t *tool)
{
    const json_t *f = function_of(tool), *p = json_object_get(f, "parameters");
    if (!p) p = json_object_get(f, "input_schema");
    return p && !json_is_null(p) ? p : NULL;
}

/* The parameters of one call up to its closing tag. */
static uint32_t parameters(compiler *c, const tags *t, const json_t *schema, uint32_t next)
{
    g_builder *b = &c->b;
    const flat any = {.types = T_ANY};
    flat_list l = {0};
    uint32_t at = G_FAIL;
    const member_form form = {"\n", "", "", true, t->parameter};
    next = g_text(b, "\n", g_closing(b, t->invoke, next));
    if (!schema) return value_members(c, &any, &form, next);
    schema_flatten(&c->s, schema, &l);
    for (size_t i = 0; i < l.n && b->status == AFF_OK; i++) {
        if (l.f[i].values && (l.f[i].types & T_OBJECT))
            schema_bad(&c->s, schema, "enum", "not supported for all parameters at once");
        if (l.f[i].types & T_OBJECT) at = g_or(b, at, value_members(c, &l.f[i], &form, next));
    }
    schema_free(&l);
    return at;
}

/* The grammar of one tool alone, to see whether its schema can be followed. */
static bool can_follow(const aff_vocab *v, const json_t *schema, const tags *t)
{
    aff_error ignored = {0};
    compiler c = {0};
    bool ok = false;
    if (g_begin(&c.b, v, &ignored) == AFF_OK && (c.s.made = json_array())) {
        c.s.b = &c.b;
        c.s.root = schema;
        c.s.name = "";
        const uint32_t at = parameters(&c, t, schema, G_ACCEPT);
        value_compile_all(&c);
        ok = g_finish(&c.b, at) == AFF_OK;
    }
    aff__grammar_free(c.b.g);
    json_decref(c.s.made);
    free(c.rules);
    free(c.slot);
    return ok;
}

static uint32_t invoke(compiler *c, const aff_grammar_request *r, const tags *t, const json_t *tool, const char *name,
                       uint32_t next)
{
    char where[160];
    const json_t *schema = parameters_of(tool);
    if (strpbrk(name, "\"<>\n\r"))
        return g_fail(&c->b, AFF_E_INVALID,
                      "tool '%.60s': expected a name without quotes, angle brackets and line ends", name);
    snprintf(where, sizeof where, "parameters of tool '%.60s'", name);
    if (!schema) schema = c->empty; /* no parameters */
    if (!strict(tool) && !can_follow(c->b.g->vocab, schema, t)) schema = NULL;
    c->s.root = schema;
    c->s.name = where;
    const uint32_t at = parameters(c, t, schema, next);
    value_compile_all(c); /* while its schema is the one that references are looked up in */
    c->s.name = r->name;
    return g_opening(&c->b, t->invoke, g_text(&c->b, " name=\"", g_text(&c->b, name, g_text(&c->b, "\">\n", at))));
}

/* A block of calls behind its opening "<" and marker. */
static uint32_t block(compiler *c, const aff_grammar_request *r, const tags *t)
{
    g_builder *b = &c->b;
    const json_t *tool;
    size_t i;
    const uint32_t after = g_hub(b);
    uint32_t calls = G_FAIL;
    json_array_foreach(r->tools, i, tool)
    {
        const json_t *name = json_object_get(function_of(tool), "name");
        if (!aff__json_is_text(name) || !json_string_length(name) ||
            strlen(json_string_value(name)) != json_string_length(name))
            continue;
        if (r->only && strcmp(r->only, json_string_value(name)) != 0) continue;
        calls = g_or(b, calls, invoke(c, r, t, tool, json_string_value(name), after));
    }
    const uint32_t end = g_text(b, "\n", g_closing(b, t->calls, G_ACCEPT));
    g_define(b, after, r->one_call ? end : g_or(b, end, g_text(b, "\n", calls)));
    return g_text(b, t->calls, g_text(b, ">\n", calls));
}

/* ---- free text ---- */

/* Text that goes on until one of the two strings, each with '<' at its beginning and nowhere else, has come; then at
 * their targets. The marker counts as itself and spelled. `at_end`: what else may come at any place, G_OPEN or G_FAIL.
 */
typedef struct stop_string {
    const char *s;
    uint32_t to;
} stop_string;

static uint32_t free_text(g_builder *b, const stop_string *stop, int n_stop, uint32_t at_end)
{
    enum { MOST = 64 };
    uint32_t place[MOST] = {0}; /* of a prefix of one or more of the strings */
    const char *text[MOST] = {0};
    int length[MOST] = {0}, n = 0;
    for (int i = 0; i < n_stop; i++)
        for (int k = 0; stop[i].s[k] && n < MOST; k++) {
            bool known = false;
            for (int j = 0; j < n; j++) known |= length[j] == k && memcmp(text[j], stop[i].s, (size_t)k) == 0;
            if (known) continue;
            place[n] = g_hub(b);
            text[n] = stop[i].s;
            length[n++] = k;
        }
    if (b->status != AFF_OK) return G_FAIL;
    for (int j = 0; j < n; j++) {
        uint32_t at = at_end, to[256];
        for (int c = 0; c < 256; c++) to[c] = place[0];
        for (int k = 1; k < n; k++)
            if (length[k] == 1) to['<'] = place[k];
        for (int k = 0; k < n; k++)
            if (length[k] == length[j] + 1 && memcmp(text[k], text[j], (size_t)length[j]) == 0)
                to[(uint8_t)text[k][length[j]]] = place[k];
        for (int i = 0; i < n_stop; i++)
            if ((int)strlen(stop[i].s) == length[j] + 1 && memcmp(stop[i].s, text[j], (size_t)length[j]) == 0)
                to[(uint8_t)stop[i].s[length[j]]] = stop[i].to;
        for (int c = 0; c < 256; c++) {
            uint64_t set[4] = {0};
            bool before = false;
            for (int k = 0; k < c; k++) before |= to[k] == to[c];
            if (before) continue;
            for (int k = c; k < 256; k++)
                if (to[k] == to[c]) g_set_add(set, (uint8_t)k);
            const uint32_t arm = g_set(b, set, to[c]);
            if (b->status == AFF_OK && arm != G_FAIL)
                b->g->ins[arm].kind = j == 0 && to[c] == place[0] ? G_LOOSE : G_FREE;
            at = g_or(b, at, arm);
        }
        g_define(b, place[j], at);
    }
    return place[0];
}

/* ---- the whole ---- */

static uint32_t root_of(compiler *c, const aff_grammar_request *r, uint32_t *inside, uint32_t *answer)
{
    static const tags v4 = {"tool_calls", "invoke", "parameter"}, v41 = {" calls", " invoke", " parameter"};
    g_builder *b = &c->b;
    *inside = *answer = G_FAIL;
    if (r->schema) {
        const uint32_t rule = value_rule_of(c, r->schema, VALUE_JSON);
        value_compile_all(c);
        *answer = g_call(b, rule, G_ACCEPT);
    }
    if (r->calls != AFF_CALLS_NONE) {
        *inside = block(c, r, r->v41 ? &v41 : &v4);
        *answer = g_or(b, *answer, g_text(b, "\n\n<", g_mark(b, *inside)));
    }
    const bool form = r->schema || r->calls == AFF_CALLS_REQUIRED;
    const int marked = b->g->vocab->marked; /* else no token is a byte 0xFF */
    const stop_string stop[] = {{"</think>", *answer}, {"<" AFF_VOCAB_MARKER, *inside}, {"<\xFF", *inside}};
    if (!form) return free_text(b, stop + 1, 1 + marked, G_OPEN);
    if (!r->thinking) return *answer;
    return free_text(b, stop, r->calls == AFF_CALLS_NONE ? 1 : 2 + marked, G_FAIL);
}

aff_status aff__grammar_compile(aff_grammar **out, const aff_vocab *v, const aff_grammar_request *r, aff_error *err)
{
    compiler c = {0};
    uint32_t inside, answer;
    *out = NULL;
    aff_status s = g_begin(&c.b, v, err);
    if (s == AFF_OK && (!(c.s.made = json_array()) ||
                        !(c.empty = json_pack("{s:s,s:b}", "type", "object", "additionalProperties", 0))))
        s = aff__fail(err, AFF_E_NOMEM, "grammar: out of memory");
    if (s == AFF_OK) {
        c.s.b = &c.b;
        c.s.root = r->schema;
        c.s.name = r->name ? r->name : "schema";
        const uint32_t root = root_of(&c, r, &inside, &answer);
        s = g_finish(&c.b, root);
    }
    if (s == AFF_OK && (r->thinking || (!r->schema && r->calls == AFF_CALLS_FREE))) {
        const uint32_t a = inside == G_FAIL ? 0 : c.b.g->cost[inside], z = answer == G_FAIL ? 0 : c.b.g->cost[answer];
        c.b.g->free_cost = (a > z ? a : z) + 1;
    }
    if (s == AFF_OK) {
        *out = c.b.g;
        c.b.g = NULL;
    }
    aff__grammar_free(c.b.g);
    json_decref(c.empty);
    json_decref(c.s.made);
    free(c.rules);
    free(c.slot);
    return s;
}

int aff__grammar_vocab(const aff_grammar *g)
{
    return g->vocab->n;
}
