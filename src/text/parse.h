/* parse.h - what the model writes, to reasoning, text and tool calls (spec text-and-serving 2.7). */
#ifndef AFF_TEXT_PARSE_H
#define AFF_TEXT_PARSE_H
#include "base/buf.h"
#include <jansson.h>

typedef enum aff_parse_kind {
    AFF_PARSE_REASONING, /* more of the reasoning */
    AFF_PARSE_TEXT,      /* more of the answer; may also come between and after calls */
    AFF_PARSE_CALL,      /* a call begins, s is the name of the function */
    AFF_PARSE_ARGS,      /* more of its arguments; all of them together are one JSON object */
    AFF_PARSE_CALL_END,  /* it is complete */
    AFF_PARSE_CALL_DROP  /* it never was: to be forgotten, the text it had is in its AFF_PARSE_ARGS */
} aff_parse_kind;

/* s[0..n) is whole characters of valid UTF-8, valid during the call. Calls do not overlap; `call` counts them from 0,
 * dropped ones included, and is set in the four events of calls. */
typedef struct aff_parse_event {
    aff_parse_kind kind;
    size_t call;
    const char *s;
    size_t n;
} aff_parse_event;
typedef aff_status (*aff_parse_fn)(void *ctx, const aff_parse_event *event, aff_error *err);

/* A tolerant parser for the output of V4 and V4.1, fed with bytes as they come. However the bytes are split, the events
 * are the same but for where pieces of the same kind are cut. It holds back only what may be markup (below 100 bytes),
 * values that are not strings (8 MiB, longer ones turn into strings), text between parameters (64 KiB) and, where the
 * block's opening tag is missing, one call (1 MiB). docs/chat.md lists its rules.
 *   thinking   the prompt ended inside reasoning (aff_chat_prompt.thinking)
 *   tools      the request's tools, as in the API: their markup is looked for only if there are any, values whose
 *              type is not said follow their schemas. NULL: any function may be called. Kept by reference. */
typedef struct aff_parser aff_parser;
aff_status aff__parser_create(aff_parser **out, bool thinking, const json_t *tools, aff_parse_fn fn, void *ctx,
                              aff_error *err);
aff_status aff__parser_feed(aff_parser *p, const char *bytes, size_t n, aff_error *err);
/* The end of the output. eos: the model ended it, so that a call that only lacks its closing tags counts. */
aff_status aff__parser_end(aff_parser *p, bool eos, aff_error *err);
void aff__parser_free(aff_parser *p);

/* ---- DeepSeek's strict parser ---- */

typedef struct aff_strict_call {
    aff_buf name, arguments;
} aff_strict_call;
typedef struct aff_strict {
    aff_buf content, reasoning;
    aff_strict_call *call;
    size_t n_calls;
    const char *exception; /* NULL, or what the reference raises: "AssertionError", "ValueError" */
} aff_strict;

/* Parses a whole completion as the reference does: EOS included, tags of one generation (v41), nothing mended. A text
 * it refuses is no error here: out->exception says so. Free with aff__strict_free in every case. */
aff_status aff__parse_strict(aff_strict *out, const char *text, size_t n, bool thinking, bool v41, aff_error *err);
void aff__strict_free(aff_strict *s);
#endif
