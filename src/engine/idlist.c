#include "engine/idlist.h"
#include "base/mem.h"
#include <stdlib.h>

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Error at byte `at`: what stands there, printable and short. */
static aff_status bad(const char *text, size_t n, size_t at, int64_t item, const char *name, aff_error *err)
{
    char got[24];
    size_t k = 0;
    while (at + k < n && k < sizeof got - 1 && text[at + k] != ',' && !is_space(text[at + k])) {
        got[k] = text[at + k] > ' ' && text[at + k] < 127 ? text[at + k] : '?';
        k++;
    }
    got[k] = 0;
    return aff__fail(err, AFF_E_INVALID, "%s: item %lld at byte %zu: expected a token id (0 to 2147483647), got %s%s%s",
                     name, (long long)item, at, k ? "'" : "",
                     k        ? got
                     : at < n ? "a comma"
                              : "the end",
                     k ? "'" : "");
}

static size_t skip_space(const char *text, size_t n, size_t i)
{
    while (i < n && is_space(text[i])) i++;
    return i;
}

/* One number at *at, which moves past it. */
static bool parse_id(const char *text, size_t n, size_t *at, int32_t *id)
{
    size_t i = *at;
    int64_t v = 0;
    while (i < n && text[i] >= '0' && text[i] <= '9' && v <= INT32_MAX) v = v * 10 + (text[i++] - '0');
    if (i == *at || v > INT32_MAX || (i < n && text[i] != ',' && !is_space(text[i]))) return false;
    *at = i;
    *id = (int32_t)v;
    return true;
}

static aff_status parse(const char *text, size_t n, const char *name, int32_t **ids, int64_t *n_ids, aff_error *err)
{
    int64_t cap = 0;
    size_t i = skip_space(text, n, 0);
    for (bool more = true; more;) {
        if (*n_ids == cap) {
            cap = cap ? cap * 2 : 256;
            AFF_TRY(aff__realloc(ids, (uint64_t)cap, sizeof **ids, name, err));
        }
        if (!parse_id(text, n, &i, &(*ids)[*n_ids])) return bad(text, n, i, *n_ids + 1, name, err);
        ++*n_ids;
        i = skip_space(text, n, i);
        more = i < n;
        if (more && text[i] == ',') i = skip_space(text, n, i + 1); /* then a number must follow */
    }
    return AFF_OK;
}

aff_status aff__idlist_parse(const char *text, size_t n, const char *name, int32_t **ids, int64_t *n_ids,
                             aff_error *err)
{
    *ids = NULL;
    *n_ids = 0;
    aff_status s = parse(text, n, name, ids, n_ids, err);
    if (s == AFF_OK) return AFF_OK;
    free(*ids);
    *ids = NULL;
    *n_ids = 0;
    return s;
}
