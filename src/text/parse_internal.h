/* parse_internal.h - the states of the tolerant parser. */
#ifndef AFF_TEXT_PARSE_INTERNAL_H
#define AFF_TEXT_PARSE_INTERNAL_H
#include "text/parse.h"
#include "text/tokenizer.h"

enum {
    VALUE_LIMIT = 8 << 20, /* of a value that is kept until it closes */
    JUNK_LIMIT = 64 << 10, /* of text between the parameters of a call */
    BARE_LIMIT = 1 << 20,  /* of a call whose block was not opened */
    HEADER_LIMIT = 4096,   /* of the tag of a parameter */
    TAG_LIMIT = 512        /* of any other tag */
};

typedef enum parse_state {
    REASONING,
    CONTENT, /* the answer, before and after blocks */
    CALLS,   /* in a block, between calls */
    ARGS,    /* in a call, between parameters */
    VALUE,
    TAG, /* behind "<|DSML|" or "</|DSML|" */
    BARE /* in a call outside of a block: all of it is kept until it closes */
} parse_state;

struct aff_parser {
    parse_state state, from; /* from: the state a tag stands in */
    aff_parse_fn fn;
    void *ctx;
    aff_error *err;
    aff_utf8_stream utf8;
    bool tools;       /* markup of calls is looked for */
    json_t *declared; /* name to function; NULL: any */

    char hold[128]; /* bytes that may be markup */
    size_t n_hold;
    bool start; /* nothing of the reasoning or answer was seen yet */
    bool after; /* a block has just closed: newlines do not count */

    aff_buf tag; /* a tag without its "<|DSML|" */
    bool closing;
    char ends[8]; /* line ends that stood before it */
    size_t n_ends;

    bool in_call, quoting; /* quoting: a call's markup was left as text, so is its closing tag */
    size_t call, n_calls, n_params;
    const json_t *properties; /* schemas of the call's parameters, NULL if unknown */
    json_t *missing;          /* its required parameters that have not come */

    bool string; /* the value is one */
    aff_buf value;
    /* A first parameter `arguments` that the function does not have: kept, as it may be all of them in one object. */
    enum { WRAP_NONE, WRAP_OPEN, WRAP_HELD } wrap;

    aff_buf junk; /* text between parameters */
    char space[64];
    size_t n_space;
    bool junk_begun;

    aff_buf bare;
    parse_state bare_from;

    aff_parse_kind out_kind; /* of what is in out, not yet sent */
    aff_buf out;
};

extern const char parse__open[12], parse__close[13]; /* "<|DSML|", "</|DSML|" with full-width bars */

/* parse.c */
aff_status parse__byte(aff_parser *p, char c);
aff_status parse__text(aff_parser *p, char c); /* one byte that is text for certain */
aff_status parse__put(aff_parser *p, aff_parse_kind kind, const char *s, size_t n);
aff_status parse__mark(aff_parser *p, aff_parse_kind kind, const char *s, size_t n);
aff_status parse__flush(aff_parser *p);

/* parse_calls.c: calls and their values */
aff_status parse__begin_call(aff_parser *p, const char *name, size_t n);
aff_status parse__end_call(aff_parser *p, bool complete);
typedef enum parse_type { TYPE_STRING, TYPE_JSON, TYPE_UNSAID } parse_type;
aff_status parse__begin_value(aff_parser *p, const char *key, size_t n, parse_type type);
aff_status parse__value(aff_parser *p, const char *s, size_t n);
aff_status parse__end_value(aff_parser *p);
bool parse__has_required(const aff_parser *p); /* all of the call's required parameters have come */

/* parse_tags.c: tags */
aff_status parse__tag_byte(aff_parser *p, char c);
aff_status parse__end_tag(aff_parser *p); /* the output ends inside a tag */
aff_status parse__bare_byte(aff_parser *p, char c);
aff_status parse__give_up_bare(aff_parser *p);
#endif
