/* schema.h - a JSON Schema brought to a list of alternatives without references and combinations, and from those to a
 * grammar. */
#ifndef AFF_GRAMMAR_SCHEMA_H
#define AFF_GRAMMAR_SCHEMA_H
#include "grammar/program.h"

enum {
    T_NULL = 1,
    T_FALSE = 2,
    T_TRUE = 4,
    T_INT = 8,
    T_REAL = 16, /* numbers that are written as reals */
    T_STRING = 32,
    T_ARRAY = 64,
    T_OBJECT = 128,
    T_BOOL = T_FALSE | T_TRUE,
    T_NUMBER = T_INT | T_REAL,
    T_ANY = 255
};

/* A decimal number: digits before the point without leading zeros, after it without trailing ones. */
enum { DEC_DIGITS = 64 };
typedef struct dec {
    bool given, exclusive, negative;
    int n, n_frac;
    char digit[DEC_DIGITS], frac[DEC_DIGITS];
} dec;

/* What all of a schema's keywords say together. Values are borrowed: of the schema or of schema_set.made. */
typedef struct flat {
    unsigned types;
    json_t *values; /* array of the only values allowed; NULL: no such list */
    dec low, high;
    uint32_t min_length, max_length;
    const char *pattern, *format;
    json_t *prefix, *items; /* NULL: none; NULL: any */
    uint32_t min_items, max_items;
    json_t *properties, *required; /* objects; required: name to true; NULL: none */
    json_t *additional;            /* NULL: any */
} flat;

typedef struct flat_list {
    flat *f;
    size_t n;
} flat_list;

typedef struct schema_set {
    g_builder *b;
    const json_t *root; /* references are looked up here */
    const char *name;   /* of it, for errors */
    json_t *made;       /* array: values made on the way */
    int work, depth;
} schema_set;

/* The alternatives of a schema; out->n 0 if nothing fits. Failures go to s->b. Free with schema_free. */
void schema_flatten(schema_set *s, const json_t *schema, flat_list *out);
void schema_free(flat_list *l);
/* Fails for a keyword of `schema` (found in the root, for its pointer). */
uint32_t schema_bad(schema_set *s, const json_t *schema, const char *keyword, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* ---- numbers (number.c) ---- */

/* From a JSON number; false: too long. */
bool dec_read(dec *d, const json_t *v);
int dec_compare(const dec *a, const dec *b); /* of the values */
/* Numbers between low and high. integer: written without point and exponent; else `both` says whether those are among
 * them. */
uint32_t number_range(g_builder *b, const dec *low, const dec *high, bool integer, uint32_t next);

/* ---- strings (regex.c) ---- */

typedef struct regex_request {
    const char *pattern;
    uint32_t min, max; /* characters */
    bool raw;          /* as it stands between tags; else within quotes, escaped */
} regex_request;
/* Text that matches; *why NULL or what is wrong with the pattern. Returns G_FAIL if nothing matches. */
uint32_t regex_compile(g_builder *b, const regex_request *r, uint32_t next, const char **why);
/* The pattern of a format, "" if it says nothing about the text, NULL: unknown. */
const char *regex_format(const char *format);

/* ---- values (value.c) ---- */

typedef enum value_mode {
    VALUE_JSON,
    VALUE_REST, /* JSON that is no string */
    VALUE_RAW   /* a string as it stands between tags */
} value_mode;

typedef struct value_rule {
    const json_t *schema;
    value_mode mode;
    uint32_t rule;
} value_rule;

typedef struct compiler {
    g_builder b;
    schema_set s;
    value_rule *rules; /* [n]; the first `done` are compiled */
    size_t n, cap, done;
    uint32_t *slot; /* hash table of them */
    uint32_t mask;
    json_t *empty; /* the schema of no parameters */
} compiler;

/* The rule of a schema's values; it is compiled by value_compile_all. */
uint32_t value_rule_of(compiler *c, const json_t *schema, value_mode mode);
void value_compile_all(compiler *c);
/* The members of an object, in the order of f->properties, then others. */
typedef struct member_form {
    const char *separator, *open, *close; /* between members; before and after the list */
    bool tags;                            /* parameters in tags rather than JSON */
    const char *parameter;                /* name of the tag */
} member_form;
uint32_t value_members(compiler *c, const flat *f, const member_form *form, uint32_t next);
#endif
