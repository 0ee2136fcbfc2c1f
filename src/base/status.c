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

aff_status aff__fail(aff_error *err, aff_status code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->code = code;
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
        one_line(err->msg);
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
        int n = vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
        if (n > 0 && (size_t)n < sizeof err->msg)
            snprintf(err->msg + n, sizeof err->msg - (size_t)n, ": %s", strerror(e));
        one_line(err->msg);
    }
    return AFF_E_IO;
}
