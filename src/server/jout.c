#include "server/jout.h"
#include "format/json.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void note(aff_jout *j, aff_status s)
{
    if (s != AFF_OK) j->failed = true;
}

void aff__jout_raw(aff_jout *j, const char *s)
{
    note(j, aff__buf_puts(&j->b, s, NULL));
}

void aff__jout_fmt(aff_jout *j, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    aff__jout_raw(j, line);
}

void aff__jout_str(aff_jout *j, const char *s, size_t n)
{
    note(j, aff__json_put_string(&j->b, n ? s : "", n, NULL));
}
void aff__jout_cstr(aff_jout *j, const char *s)
{
    aff__jout_str(j, s, strlen(s));
}

void aff__jout_tail(aff_jout *j, const char *s, size_t n)
{
    aff_buf quoted = {0};
    note(j, aff__json_put_string(&quoted, n ? s : "", n, NULL));
    if (quoted.n > 2) note(j, aff__buf_put(&j->b, quoted.s + 1, quoted.n - 2, NULL));
    aff__buf_free(&quoted);
}

void aff__jout_json(aff_jout *j, const json_t *v)
{
    note(j, aff__json_dump_python(&j->b, v, NULL));
}
