/* chat_internal.h - the parts of the chat encoder. */
#ifndef AFF_TEXT_CHAT_INTERNAL_H
#define AFF_TEXT_CHAT_INTERNAL_H
#include "base/buf.h"
#include "text/chat.h"

typedef enum chat_role {
    ROLE_SYSTEM,
    ROLE_USER, /* also tool results, which become blocks of a user turn */
    ROLE_ASSISTANT,
    ROLE_DEVELOPER,
    ROLE_REMINDER,
    ROLE_SEARCH, /* direct_search_results: survives dropping, cannot be printed */
    ROLE_TOOL,   /* before merging only */
    ROLE_OTHER
} chat_role;

/* One part of a user turn: the text of a user message or one tool result. content is NULL if the message had none. */
typedef struct chat_block {
    const json_t *content;
    const char *id; /* of the call it answers, "" if none; results only */
    size_t index;   /* of its message in the request */
    bool result;
} chat_block;

typedef struct chat_message {
    chat_role role;
    const json_t *json; /* the message itself, for every field not below */
    size_t index, first_block, n_blocks;
    const json_t *task, *tools, *response_format; /* NULL if absent or empty */
    bool wo_eos, no_reasoning, context;
} chat_message;

typedef struct chat_piece { /* text that ends at `end` and is of one kind */
    size_t end;
    bool added;
    size_t first_id, n_ids; /* of chat.ids; n_ids 0: it is tokenised */
} chat_piece;

typedef struct chat {
    const aff_chat_request *r;
    bool v41, thinking, drop; /* drop: the effective rule of spec 2.3 step 3 */
    int effort;               /* V4: 0 none, 1 text H, 2 text M; V4.1: the number */
    chat_message *m;
    size_t n, cap;
    chat_block *block;
    size_t n_block, cap_block;
    aff_buf text;
    chat_piece *piece;
    size_t n_piece, cap_piece;
    aff_ids ids;
    const char *exception;
    aff_error *err;
} chat;

/* chat_merge.c: request to the list of messages to print, after merging, ordering results and dropping. */
aff_status chat__prepare(chat *c);
/* Index of the last message that counts as a user's turn, -1 if none. */
int64_t chat__last_user(const chat *c);
/* Whether message i counts as one. */
bool chat__is_user(const chat *c, size_t i);

/* chat_calls.c: the call block of an assistant message. */
aff_status chat__calls(chat *c, const chat_message *m);

/* chat.c: output. chat__template replaces \1 \2 \3 by the names of the call tags; chat__content prints a content field.
 */
aff_status chat__template(chat *c, const char *s);
aff_status chat__caller(chat *c, const char *s, size_t n);
aff_status chat__json(chat *c, const json_t *v);

/* Fails with a line about message `index` and, for the reference, its exception. */
aff_status chat__refuse(chat *c, const char *exception, size_t index, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Fixed strings, chat_text.c. */
extern const char chat__effort_h[], chat__effort_m[], chat__tools_head[], chat__tools_tail[], chat__format_head[];
#endif
