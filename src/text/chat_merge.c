/* From the request to the messages that are printed (spec text-and-serving 2.3, 8). */
#include "text/chat_internal.h"
#include "base/mem.h"
#include "format/json.h"
#include <stdlib.h>
#include <string.h>

static bool truthy(const json_t *v)
{
    switch (v ? json_typeof(v) : JSON_NULL) {
    case JSON_OBJECT:
        return json_object_size(v) > 0;
    case JSON_ARRAY:
        return json_array_size(v) > 0;
    case JSON_STRING:
        return json_string_length(v) > 0;
    case JSON_INTEGER:
        return json_integer_value(v) != 0;
    case JSON_REAL:
        return json_real_value(v) != 0;
    case JSON_TRUE:
        return true;
    case JSON_FALSE:
    case JSON_NULL:
        break;
    }
    return false;
}

static const json_t *field(const json_t *m, const char *key)
{
    const json_t *v = json_object_get(m, key);
    return truthy(v) ? v : NULL;
}

static aff_status role_of(chat *c, const json_t *m, size_t index, chat_role *role)
{
    static const struct {
        const char *name;
        chat_role reference, server;
    } roles[] = {{"system", ROLE_SYSTEM, ROLE_SYSTEM},
                 {"user", ROLE_USER, ROLE_USER},
                 {"assistant", ROLE_ASSISTANT, ROLE_ASSISTANT},
                 {"tool", ROLE_TOOL, ROLE_TOOL},
                 {"function", ROLE_OTHER, ROLE_TOOL},
                 {"developer", ROLE_DEVELOPER, ROLE_SYSTEM},
                 {"latest_reminder", ROLE_REMINDER, ROLE_REMINDER},
                 {"direct_search_results", ROLE_SEARCH, ROLE_OTHER}};
    *role = ROLE_OTHER;
    if (!json_is_object(m)) return chat__refuse(c, "AttributeError", index, "expected an object");
    const json_t *v = json_object_get(m, "role");
    const char *name = json_is_string(v) ? json_string_value(v) : "";
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(name, roles[i].name) == 0) *role = c->r->reference ? roles[i].reference : roles[i].server;
    if (*role == ROLE_DEVELOPER && c->v41) *role = ROLE_OTHER;
    if (*role == ROLE_OTHER && !c->r->reference)
        return chat__refuse(c, "", index,
                            "role: expected system, developer, user, assistant, tool or latest_reminder, got '%.40s'",
                            name);
    return AFF_OK;
}

static aff_status add_message(chat *c, chat_message m)
{
    if (c->n == c->cap) {
        AFF_TRY(aff__realloc(&c->m, c->cap * 2 + 16, sizeof *c->m, "messages", c->err));
        c->cap = c->cap * 2 + 16;
    }
    c->m[c->n++] = m;
    return AFF_OK;
}

static aff_status add_block(chat *c, chat_block b)
{
    if (c->n_block == c->cap_block) {
        AFF_TRY(aff__realloc(&c->block, c->cap_block * 2 + 16, sizeof *c->block, "messages", c->err));
        c->cap_block = c->cap_block * 2 + 16;
    }
    c->block[c->n_block++] = b;
    c->m[c->n - 1].n_blocks++;
    return AFF_OK;
}

/* Adds one message of a list that starts at `start`: earlier ones take no blocks from it. */
static aff_status add(chat *c, const json_t *json, size_t index, size_t start, bool context)
{
    chat_message m = {.json = json, .index = index, .first_block = c->n_block};
    const json_t *id = json_object_get(json, "tool_call_id");
    AFF_TRY(role_of(c, json, index, &m.role));
    bool reference = c->r->reference, result = m.role == ROLE_TOOL;
    if (reference && !result && !json_is_null(json_object_get(json, "task"))) m.task = json_object_get(json, "task");
    if (!result && (m.role != ROLE_USER || (reference && c->v41))) {
        m.tools = field(json, "tools");
        m.response_format = field(json, "response_format");
    }
    m.wo_eos = m.role == ROLE_ASSISTANT && field(json, "wo_eos");
    m.context = context;
    if (m.role != ROLE_USER && !result) return add_message(c, m);
    m.role = ROLE_USER;
    chat_message *last = c->n > start ? &c->m[c->n - 1] : NULL;
    if (!last || last->role != ROLE_USER || (last->task && !result)) AFF_TRY(add_message(c, m));
    chat_block b = {json_object_get(json, "content"), aff__json_is_text(id) ? json_string_value(id) : "", index,
                    result};
    return add_block(c, b);
}

/* A list of the request. tools and response_format go to its first system message if `attach`. */
static aff_status add_list(chat *c, const json_t *list, bool attach)
{
    const json_t *tools = attach && truthy(c->r->tools) ? c->r->tools : NULL,
                 *format = attach && truthy(c->r->response_format) ? c->r->response_format : NULL;
    size_t start = c->n, i, first = SIZE_MAX;
    json_t *m;
    if (!list) return AFF_OK;
    json_array_foreach(list, i, m)
    {
        chat_role role;
        AFF_TRY(role_of(c, m, i, &role));
        if (role == ROLE_SYSTEM && first == SIZE_MAX) first = i;
    }
    if ((tools || format) && first == SIZE_MAX)
        AFF_TRY(add_message(c, (chat_message){.role = ROLE_SYSTEM, .tools = tools, .response_format = format}));
    json_array_foreach(list, i, m)
    {
        AFF_TRY(add(c, m, i, start, !attach));
        if (i != first) continue;
        if (tools) c->m[c->n - 1].tools = tools;
        if (format) c->m[c->n - 1].response_format = format;
    }
    return AFF_OK;
}

/* ---- tool results in the order of the calls ---- */

/* Positions of the calls of an assistant message by id; an empty object if none has an id. */
static json_t *call_order(const json_t *calls)
{
    json_t *order = json_object(), *call;
    size_t i;
    json_array_foreach(calls, i, call)
    {
        const json_t *id = json_object_get(call, "id");
        if (!truthy(id)) id = json_object_get(json_object_get(call, "function"), "id");
        if (!aff__json_is_text(id) || !json_string_length(id)) continue;
        if (json_object_set_new(order, json_string_value(id), json_integer((json_int_t)i)) == 0) continue;
        json_decref(order);
        return NULL;
    }
    return order;
}

typedef struct placed {
    chat_block b;
    json_int_t position;
    size_t slot;
} placed;

static int by_position(const void *x, const void *y)
{
    const placed *a = x, *b = y;
    if (a->position != b->position) return a->position < b->position ? -1 : 1;
    return a->slot < b->slot ? -1 : a->slot > b->slot;
}

static aff_status order_results(chat *c, const chat_message *m, const json_t *order)
{
    chat_block *b = c->block + m->first_block;
    size_t n = 0, k = 0;
    placed *p;
    for (size_t i = 0; i < m->n_blocks; i++) n += b[i].result;
    if (n < 2) return AFF_OK;
    AFF_TRY(aff__calloc(&p, n, sizeof *p, "tool results", c->err));
    for (size_t i = 0; i < m->n_blocks; i++) {
        if (!b[i].result) continue;
        p[k] = (placed){b[i], json_integer_value(json_object_get(order, b[i].id)), k};
        k++;
    }
    qsort(p, n, sizeof *p, by_position);
    k = 0;
    for (size_t i = 0; i < m->n_blocks; i++)
        if (b[i].result) b[i] = p[k++].b;
    free(p);
    return AFF_OK;
}

static aff_status order_all(chat *c)
{
    json_t *order = NULL;
    aff_status s = AFF_OK;
    for (size_t i = 0; i < c->n && s == AFF_OK; i++) {
        const chat_message *m = &c->m[i];
        const json_t *calls = m->role == ROLE_ASSISTANT ? field(m->json, "tool_calls") : NULL;
        if (calls) {
            json_decref(order);
            order = call_order(calls);
            if (!order) s = aff__fail(c->err, AFF_E_NOMEM, "messages: out of memory");
        } else if (m->role == ROLE_USER && json_object_size(order)) {
            s = order_results(c, m, order);
        }
    }
    json_decref(order);
    return s;
}

/* ---- dropping ---- */

bool chat__is_user(const chat *c, size_t i)
{
    chat_role role = c->m[i].role;
    return role == ROLE_USER || role == ROLE_DEVELOPER || (role == ROLE_SYSTEM && c->v41 && i > 0);
}

int64_t chat__last_user(const chat *c)
{
    size_t i = c->n;
    while (i > 0 && !chat__is_user(c, i - 1)) i--;
    return (int64_t)i - 1;
}

static void drop(chat *c)
{
    int64_t u = chat__last_user(c);
    size_t n = 0;
    for (size_t i = 0; i < c->n; i++) {
        chat_message m = c->m[i];
        if ((int64_t)i < u) {
            if (m.role == ROLE_DEVELOPER || m.role == ROLE_OTHER) continue;
            if (m.role == ROLE_ASSISTANT) m.no_reasoning = true;
        }
        c->m[n++] = m;
    }
    c->n = n;
}

aff_status chat__prepare(chat *c)
{
    AFF_TRY(add_list(c, c->r->context, false));
    AFF_TRY(add_list(c, c->r->messages, true));
    AFF_TRY(order_all(c));
    c->drop = !c->r->keep_reasoning;
    for (size_t i = 0; i < c->n; i++)
        if (c->m[i].tools) c->drop = false;
    if (c->thinking && c->drop) drop(c);
    return AFF_OK;
}
