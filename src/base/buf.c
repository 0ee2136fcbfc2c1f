#include "base/buf.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

void aff__buf_free(aff_buf *b)
{
    free(b->s);
    *b = (aff_buf){0};
}

aff_status aff__buf_put(aff_buf *b, const char *s, size_t n, aff_error *err)
{
    if (n > SIZE_MAX / 4 - b->n) return aff__fail(err, AFF_E_LIMIT, "a text of more than %zu bytes", SIZE_MAX / 4);
    if (b->n + n + 1 > b->cap) {
        size_t cap = b->cap * 2 > b->n + n + 1 ? b->cap * 2 : b->n + n + 64;
        AFF_TRY(aff__realloc(&b->s, cap, 1, "text", err));
        b->cap = cap;
    }
    if (n) memcpy(b->s + b->n, s, n);
    b->n += n;
    b->s[b->n] = 0;
    return AFF_OK;
}

aff_status aff__buf_puts(aff_buf *b, const char *s, aff_error *err)
{
    return aff__buf_put(b, s, strlen(s), err);
}
