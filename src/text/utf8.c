#include "text/utf8.h"
#include "text/tokenizer.h"
#include <string.h>

aff_utf8_kind aff__utf8_first(const uint8_t *s, size_t n, size_t *len)
{
    uint8_t c = s[0], lo = 0x80, hi = 0xBF; /* bounds of the second byte */
    size_t need;
    *len = 1;
    if (c < 0x80) return AFF_UTF8_CHAR;
    if (c < 0xC2 || c > 0xF4) return AFF_UTF8_INVALID;
    need = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (c == 0xE0) lo = 0xA0; /* overlong */
    if (c == 0xED) hi = 0x9F; /* surrogates */
    if (c == 0xF0) lo = 0x90; /* overlong */
    if (c == 0xF4) hi = 0x8F; /* above U+10FFFF */
    for (; *len < need; ++*len) {
        if (*len == n) return AFF_UTF8_INCOMPLETE;
        if (s[*len] < lo || s[*len] > hi) return AFF_UTF8_INVALID;
        lo = 0x80;
        hi = 0xBF;
    }
    return AFF_UTF8_CHAR;
}

size_t aff__utf8_valid_prefix(const uint8_t *s, size_t n)
{
    size_t i = 0, len;
    while (i < n && aff__utf8_first(s + i, n - i, &len) == AFF_UTF8_CHAR) i += len;
    return i;
}

static size_t put(char *out, const void *bytes, size_t n)
{
    memcpy(out, bytes, n);
    return n;
}

size_t aff__utf8_push(aff_utf8_stream *s, const char *bytes, size_t n, char *out)
{
    size_t w = 0;
    for (size_t i = 0; i < n; i++) {
        s->held[s->n++] = (uint8_t)bytes[i];
        /* At most two rounds: an invalid subpart ends before the new byte, which then starts afresh. */
        while (s->n > 0) {
            size_t len, held = (size_t)s->n;
            aff_utf8_kind kind = aff__utf8_first(s->held, held, &len);
            if (kind == AFF_UTF8_INCOMPLETE) break;
            if (kind == AFF_UTF8_CHAR)
                w += put(out + w, s->held, len);
            else
                w += put(out + w, AFF_UTF8_REPLACEMENT, 3);
            s->n -= (int)len;
            memmove(s->held, s->held + len, held - len);
        }
    }
    return w;
}

size_t aff__utf8_flush(aff_utf8_stream *s, char *out)
{
    if (s->n == 0) return 0;
    s->n = 0;
    return put(out, AFF_UTF8_REPLACEMENT, 3);
}
