/* Chat encoding: a line of the fixtures' form, by every format and both sets of rules. A prompt is valid UTF-8 and
 * exactly its segments; ours ends with an opened turn unless the last message is to be continued; rendering twice gives
 * the same. */
#include "format/json.h"
#include "text/chat.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok) abort();
}

static bool ends_with(const aff_chat_prompt *p, const char *s)
{
    size_t n = strlen(s);
    return p->n >= n && memcmp(p->text + p->n - n, s, n) == 0;
}

static void check_prompt(const aff_chat_prompt *p)
{
    size_t at = 0;
    for (size_t i = 0; i < p->n_seg; i++) {
        require(p->seg[i].n > 0 && p->seg[i].text == p->text + at);
        at += p->seg[i].n;
    }
    require(at == p->n && p->text[p->n] == 0);
    require(aff__utf8_valid_prefix((const uint8_t *)p->text, p->n) == p->n);
}

static void one(const json_t *line, const aff_chat_request *r)
{
    aff_chat_prompt p, again;
    aff_error err = {0};
    aff_status s = aff__chat_render(&p, r, &err);
    if (s != AFF_OK) {
        require(s == AFF_E_INVALID && err.msg[0] && !p.text && (r->reference || !p.exception));
        return;
    }
    check_prompt(&p);
    const json_t *last = json_array_get(r->messages, json_array_size(r->messages) - 1),
                 *role = json_object_get(last, "role");
    bool assistant = json_is_string(role) && strcmp(json_string_value(role), "assistant") == 0;
    bool reminder = json_is_string(role) && strcmp(json_string_value(role), "latest_reminder") == 0;
    if (!r->reference && !assistant && !reminder) require(ends_with(&p, p.thinking ? "<think>" : "</think>"));
    require(aff__chat_render(&again, r, &err) == AFF_OK && again.n == p.n && memcmp(again.text, p.text, p.n) == 0);
    aff__chat_prompt_free(&p);
    aff__chat_prompt_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *line = NULL;
    if (size < 1 ||
        aff__json_parse_exact(&line, (const char *)data + 1, size - 1, "fuzz", data[0] & 1, 64, NULL) != AFF_OK)
        return 0;
    const json_t *o = json_object_get(line, "options");
    for (int format = AFF_CHAT_AUTO; format <= AFF_CHAT_V41; format++) {
        for (int k = 0; k < 4; k++) {
            aff_chat_request r = {.format = (aff_chat_format)format,
                                  .messages = json_object_get(line, "messages"),
                                  .context = json_object_get(o, "context"),
                                  .tools = json_object_get(line, "tools"),
                                  .response_format = json_object_get(line, "response_format"),
                                  .effort = json_object_get(o, "reasoning_effort"),
                                  .reference = k & 1,
                                  .thinking = k & 2,
                                  .keep_reasoning = data[0] & 2,
                                  .no_bos = data[0] & 4,
                                  .continue_final = data[0] & 8};
            one(line, &r);
        }
    }
    json_decref(line);
    return 0;
}
