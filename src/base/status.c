#include "base/status.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define STR2(x) #x
#define STR(x)  STR2(x)

const char *aff_version(void)
{
    return STR(AFF_VERSION_MAJOR) "." STR(AFF_VERSION_MINOR) "." STR(AFF_VERSION_PATCH);
}

const char *aff_status_name(aff_status s)
{
    switch (s) {
    case AFF_OK: return "ok";
    case AFF_E_INVALID: return "invalid";
    case AFF_E_IO: return "io";
    case AFF_E_FORMAT: return "format";
    case AFF_E_UNSUPPORTED: return "unsupported";
    case AFF_E_NOMEM: return "out of memory";
    case AFF_E_LIMIT: return "limit";
    case AFF_E_CANCELLED: return "cancelled";
    case AFF_E_DEVICE: return "device";
    }
    return "unknown";
}

/* Messages quote names from files: one line, and nothing that a terminal would obey. */
static void one_line(char *msg)
{
    for (char *p = msg; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F) *p = '?';
}

/* The longest stretch of msg[0..n) that looks like a path: without a quote or ": ", with a slash. *len 0: none. */
static const char *longest_path(const char *msg, size_t n, size_t *len)
{
    const char *best = msg;
    *len = 0;
    for (size_t from = 0, i = 0; i <= n; i++) {
        const bool end = i == n || msg[i] == '\'' || (msg[i] == ':' && (i + 1 == n || msg[i + 1] == ' '));
        if (!end) continue;
        if (i - from > *len && memchr(msg + from, '/', i - from)) {
            best = msg + from;
            *len = i - from;
        }
        from = i + 1;
    }
    return best;
}

/* Whether p[0] is inside a UTF-8 character. */
static bool inside(const char *p) { return ((unsigned char)*p & 0xC0) == 0x80; }

/* full[0..n) into dst[cap]: as it is, or with the middle of its longest path left out, so that the reason, which comes last, stays. */
static void fit(char *dst, size_t cap, const char *full, size_t n)
{
    static const char dots[] = "...";
    if (n < cap) {
        memcpy(dst, full, n + 1);
        return;
    }
    const size_t cut = n - (cap - sizeof dots);
    size_t len;
    const char *path = longest_path(full, n, &len);
    if (len < cut) { /* nothing that could be spared: what is in the middle */
        path = full;
        len = n;
    }
    const char *from = path + (len - cut) / 2, *to = from + cut;
    while (from > full && inside(from)) from--;
    while (inside(to)) to++;
    snprintf(dst, cap, "%.*s%s%s", (int)(from - full), full, dots, to);
}

/* fmt, and ": " and `more` unless that is NULL, into err->msg. */
static void tell(aff_error *err, const char *fmt, va_list ap, const char *more)
{
    char full[8192];
    int n = vsnprintf(full, sizeof full, fmt, ap);
    if (n < 0) n = full[0] = 0;
    size_t at = (size_t)n < sizeof full ? (size_t)n : sizeof full - 1;
    if (more) at += (size_t)snprintf(full + at, sizeof full - at, ": %s", more);
    fit(err->msg, sizeof err->msg, full, at < sizeof full ? at : sizeof full - 1);
    one_line(err->msg);
}

aff_status aff__fail(aff_error *err, aff_status code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->code = code;
        tell(err, fmt, ap, NULL);
        va_end(ap);
    }
    return code;
}

aff_status aff__fail_errno(aff_error *err, const char *fmt, ...)
{
    int e = errno;
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->code = AFF_E_IO;
        tell(err, fmt, ap, strerror(e));
        va_end(ap);
    }
    return AFF_E_IO;
}
