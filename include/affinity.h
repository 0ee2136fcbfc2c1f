/* affinity.h - the public C API of libaffinity: open a model, make a session, feed tokens, get tokens.
 *
 * Every function that can fail returns an aff_status and, when `err` is not NULL, writes one line into it that names
 * file, item, expected and got. Handles are opaque; each is freed by its own function, NULL allowed. A model may be
 * shared by sessions; a session is used by one thread at a time. */
#ifndef AFFINITY_H
#define AFFINITY_H
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define AFF_API __attribute__((visibility("default")))
#else
#define AFF_API
#endif

#define AFF_VERSION_MAJOR 0
#define AFF_VERSION_MINOR 1
#define AFF_VERSION_PATCH 0

typedef enum aff_status {
    AFF_OK = 0,
    AFF_E_INVALID,     /* an argument or a flag that makes no sense */
    AFF_E_IO,          /* the operating system refused a read, write, map, rename ... */
    AFF_E_FORMAT,      /* a file's bytes are not what the format says */
    AFF_E_UNSUPPORTED, /* well formed, but not something this build can do */
    AFF_E_NOMEM,       /* out of memory */
    AFF_E_LIMIT,       /* a bound was reached: context length, size, depth */
    AFF_E_CANCELLED    /* stopped on request */
} aff_status;

/* One error: the code and a one-line message, NUL-terminated. Zero-initialise before first use. */
typedef struct aff_error {
    aff_status code;
    char msg[508];
} aff_error;

/* "0.1.0"; static storage. */
AFF_API const char *aff_version(void);
/* Short name of a status, e.g. "format"; static storage. */
AFF_API const char *aff_status_name(aff_status s);

#ifdef __cplusplus
}
#endif
#endif
