/* json.h - JSON from outside: jansson behind a scan that bounds size, depth and string length (toolchain 4). */
#ifndef AFF_FORMAT_JSON_H
#define AFF_FORMAT_JSON_H
#include "base/buf.h"
#include "base/status.h"
#include <jansson.h>

/* Parses exactly one value. `name` is the file or field that errors name; they give line, column and what was wrong.
 * Bounds: 256 MiB of text, strings of 16 MiB, depth 256; duplicates in objects are an error when `unique_keys`. \u0000
 * is allowed in strings, a lone surrogate escape becomes U+FFFD, integers beyond int64 are an error. The caller owns
 * *out (json_decref). */
aff_status aff__json_parse(json_t **out, const char *text, size_t size, const char *name, bool unique_keys,
                           aff_error *err);

/* For text that is shown again (chat messages, tool schemas): as aff__json_parse without unique_keys (a repeated key
 * keeps its first position and its last value), except that numbers jansson cannot hold are carried as strings, see
 * aff__json_literal: integers beyond int64 digit for digit and, with `python`, what Python's reader also takes: NaN,
 * Infinity, -Infinity and reals beyond double. An error in a text with such numbers has a line but no column.
 * max_depth: 1 to 256. */
aff_status aff__json_parse_exact(json_t **out, const char *text, size_t size, const char *name, bool python,
                                 int max_depth, aff_error *err);

/* The characters of a number that is carried as a string (its first byte, 0xFF, occurs in no other string); NULL for
 * every other value. The look-ups below take it for a number out of range. */
const char *aff__json_literal(const json_t *v, size_t *n);
bool aff__json_is_text(const json_t *v); /* a string that is one */

/* Appends v as Python's json.dumps(v, ensure_ascii=False) prints it (spec text-and-serving 2.5): ", " and ": ",
 * shortest round-trip reals, long integers digit for digit. aff__json_put_string: one string with its quotes. */
aff_status aff__json_dump_python(aff_buf *out, const json_t *v, aff_error *err);
aff_status aff__json_put_string(aff_buf *out, const char *s, size_t n, aff_error *err);

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
