/* jout.h - JSON text to a growing buffer; the first failure (out of memory) sticks. */
#ifndef AFF_SERVER_JOUT_H
#define AFF_SERVER_JOUT_H
#include "base/buf.h"
#include <jansson.h>

typedef struct aff_jout {
    aff_buf b; /* aff__buf_free(&j.b) */
    bool failed;
} aff_jout;

void aff__jout_raw(aff_jout *j, const char *s);
void aff__jout_fmt(aff_jout *j, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* at most 511 bytes */
void aff__jout_str(aff_jout *j, const char *s, size_t n);                                    /* with quotes */
void aff__jout_cstr(aff_jout *j, const char *s);
void aff__jout_tail(aff_jout *j, const char *s, size_t n); /* a string's inside, without quotes */
void aff__jout_json(aff_jout *j, const json_t *v);
#endif
