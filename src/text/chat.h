/* chat.h - chat messages to a prompt, as DeepSeek's encoders write it (spec text-and-serving 2, model-v41 14). */
#ifndef AFF_TEXT_CHAT_H
#define AFF_TEXT_CHAT_H
#include "base/buf.h"
#include "base/status.h"
#include "text/tokenizer.h"
#include <jansson.h>

typedef enum aff_chat_format {
    AFF_CHAT_AUTO, /* only as a request; stands for 0731 where nothing says better */
    AFF_CHAT_V4,   /* first release, April 2026 */
    AFF_CHAT_0731, /* the effort levels of the 0731 release */
    AFF_CHAT_V41
} aff_chat_format;

/* "auto", "v4", "0731", "v4.1", and the names of the fixtures "v4-first", "v4-0731"; false if it is none of them. */
bool aff__chat_format_find(const char *name, aff_chat_format *format);

/* Asks for what the model itself wrote as an assistant message, up to the end of sequence: its text (valid UTF-8) and
 * its ids. `thinking`: the turn is opened inside reasoning. false: the message is to be rendered. */
typedef bool (*aff_chat_replay_fn)(void *ctx, const json_t *message, bool thinking, aff_buf *text, aff_ids *ids);

/* A conversation: jansson values as the chat API sends them, read only.
 *   messages         array of {role, content, reasoning_content | reasoning, tool_calls[].{id, function.{name,
 * arguments}}, tool_call_id, wo_eos | prefix}; content: a string, null, or a list of parts context          earlier
 * messages that were sent already: they take part in every rule but are not printed tools, response_format   as in the
 * API; they are printed with the first system message, or an empty one put in front effort           a name, an integer
 * 1 to 100 (V4.1), NULL or null `reference`: exactly what DeepSeek's encoder does, errors included, with its internal
 * roles and fields (developer, task, tools on a message). Otherwise the rules of docs/chat.md: every conversation that
 * makes sense gets a prompt that ends with an opened assistant turn. */
typedef struct aff_chat_request {
    aff_chat_format format;
    const json_t *messages, *context, *tools, *response_format, *effort;
    bool reference, thinking, keep_reasoning, no_bos;
    bool continue_final;       /* leave a last assistant message open (not with `reference`) */
    aff_chat_replay_fn replay; /* NULL: every message is rendered */
    void *replay_ctx;
} aff_chat_request;

/* The prompt: text[0..n), and the same bytes as segments, template text with control tokens recognised, caller text
 * without (spec 1.8). `thinking`: the opened turn starts inside reasoning. */
typedef struct aff_chat_prompt {
    char *text;
    size_t n;
    aff_segment *seg;
    size_t n_seg;
    bool thinking;
    aff_ids ids;           /* those of replayed segments */
    const char *exception; /* with `reference`, on an error: the exception of DeepSeek's encoder, e.g. "TypeError" */
} aff_chat_prompt;

/* AFF_E_INVALID names the message and field that is wrong. On an error only out->exception is set. */
aff_status aff__chat_render(aff_chat_prompt *out, const aff_chat_request *r, aff_error *err);
void aff__chat_prompt_free(aff_chat_prompt *p);
#endif
