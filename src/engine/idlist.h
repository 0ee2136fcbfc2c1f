/* idlist.h - token ids written as text. */
#ifndef AFF_ENGINE_IDLIST_H
#define AFF_ENGINE_IDLIST_H
#include "base/status.h"

/* Decimal ids of text[0..n), separated by white space, by one comma, or by both. *ids is malloc'ed, *n_ids its length;
 * an empty list is an error, as is a number above 2^31-1. `name` is the flag or file named in errors (AFF_E_INVALID).
 */
aff_status aff__idlist_parse(const char *text, size_t n, const char *name, int32_t **ids, int64_t *n_ids,
                             aff_error *err);
#endif
