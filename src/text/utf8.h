/* utf8.h - UTF-8, strict (no overlong forms, no surrogates, nothing above U+10FFFF). */
#ifndef AFF_TEXT_UTF8_H
#define AFF_TEXT_UTF8_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* U+FFFD, which stands for each maximal invalid subpart (Unicode 16, 3.9 "U+FFFD Substitution of Maximal Subparts"). */
#define AFF_UTF8_REPLACEMENT "\xEF\xBF\xBD"

typedef enum aff_utf8_kind {
    AFF_UTF8_CHAR,      /* a character */
    AFF_UTF8_INVALID,   /* a maximal subpart of no character */
    AFF_UTF8_INCOMPLETE /* all of s is the head of a character */
} aff_utf8_kind;

/* What s[0..n) starts with, n >= 1; its length goes to *len (1-4). */
aff_utf8_kind aff__utf8_first(const uint8_t *s, size_t n, size_t *len);
/* Length of the longest prefix of s[0..n) that is whole characters. */
size_t aff__utf8_valid_prefix(const uint8_t *s, size_t n);

/* The character at s, which must be a valid one; its length goes to *len. */
static inline uint32_t aff__utf8_decode(const uint8_t *s, size_t *len)
{
    if (s[0] < 0x80) return *len = 1, s[0];
    if (s[0] < 0xE0) return *len = 2, (s[0] & 0x1Fu) << 6 | (s[1] & 0x3Fu);
    if (s[0] < 0xF0) return *len = 3, (s[0] & 0x0Fu) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
    return *len = 4, (s[0] & 0x07u) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 | (s[3] & 0x3Fu);
}
#endif
