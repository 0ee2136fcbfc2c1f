/* buf.h - a growing run of bytes. */
#ifndef AFF_BASE_BUF_H
#define AFF_BASE_BUF_H
#include "base/status.h"

/* s[0..n), always followed by a NUL once something was put; zero-initialise, free with aff__buf_free. */
typedef struct aff_buf {
    char *s;
    size_t n, cap;
} aff_buf;

void aff__buf_free(aff_buf *b);
aff_status aff__buf_put(aff_buf *b, const char *s, size_t n, aff_error *err); /* s may not point into b */
aff_status aff__buf_puts(aff_buf *b, const char *s, aff_error *err);
#endif
