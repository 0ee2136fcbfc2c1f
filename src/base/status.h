/* status.h - how functions fail: an aff_status as return value, the story in an aff_error. */
#ifndef AFF_BASE_STATUS_H
#define AFF_BASE_STATUS_H
#include "affinity.h"

/* Writes `code` and the formatted line into *err (if not NULL) and returns `code`. A line that is too long loses the middle of its
 * longest path, not its end:
 *     return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected %zu bytes, got %zu", ...);  */
aff_status aff__fail(aff_error *err, aff_status code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* The same for a failed system call: appends ": " and the text of errno. */
aff_status aff__fail_errno(aff_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Leaves a function at the first failure. */
#define AFF_TRY(call)                                                                                                  \
    do {                                                                                                               \
        aff_status aff_try_status_ = (call);                                                                           \
        if (aff_try_status_ != AFF_OK) return aff_try_status_;                                                         \
    } while (0)
#endif
