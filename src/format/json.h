/* json.h - JSON from outside: jansson behind a scan that bounds size, depth and string length (toolchain 4). */
#ifndef AFF_FORMAT_JSON_H
#define AFF_FORMAT_JSON_H
#include "base/status.h"
#include <jansson.h>

/* Parses exactly one value. `name` is the file or field that errors name; they give line, column and what was wrong.
 * Bounds: 256 MiB of text, strings of 16 MiB, depth 256; duplicates in objects are an error when `unique_keys`. \u0000
 * is allowed in strings, a lone surrogate escape becomes U+FFFD, integers beyond int64 are an error. The caller owns
 * *out (json_decref). */
aff_status aff__json_parse(json_t **out, const char *text, size_t size, const char *name, bool unique_keys,
                           aff_error *err);

/* Typed look-ups in an object; a missing or mistyped key is an error "NAME: key 'k': expected an integer, got ...".
 * The _opt forms leave *out alone when the key is absent (null counts as absent), and still refuse a wrong type. */
aff_status aff__json_int(const json_t *obj, const char *name, const char *key, int64_t min, int64_t max, int64_t *out,
                         aff_error *err);
aff_status aff__json_int_opt(const json_t *obj, const char *name, const char *key, int64_t min, int64_t max,
                             int64_t *out, aff_error *err);
aff_status aff__json_num(const json_t *obj, const char *name, const char *key, double *out, aff_error *err);
aff_status aff__json_num_opt(const json_t *obj, const char *name, const char *key, double *out, aff_error *err);
aff_status aff__json_str(const json_t *obj, const char *name, const char *key, const char **out, size_t *len,
                         aff_error *err);
#endif
