/* One pass in place of the three regular expressions of tokenizer.json, each of which cuts what the one before left.
 * The first two part the text into segments of numbers, of CJK and of everything else; the third cuts these, CJK ones
 * too (its punctuation, U+30FB say, is a piece of its own), and knows nothing beyond them: a segment's end is the end
 * of the text. Rules A-F are those of the spec. */
#include "text/pretokenize.h"
#include "text/unicode.h"
#include "text/utf8.h"
#include <stdbool.h>

typedef struct scan {
    const uint8_t *s;
    size_t n;
    unsigned cjk; /* AFF_CHAR_CJK in a segment of CJK, else 0 */
} scan;

enum { END = AFF_CHAR_SPACE + 1 };

/* Class of the character at i and the start of the next one; END where the segment ends. */
static inline unsigned class_at(const scan *t, size_t i, size_t *next)
{
    *next = i;
    if (i >= t->n) return END;
    size_t len;
    unsigned c = aff__char_class(aff__utf8_decode(t->s + i, &len));
    if (c == AFF_CHAR_NUMBER || (c & AFF_CHAR_CJK) != t->cjk) return END;
    *next = i + len;
    return c & ~(unsigned)AFF_CHAR_CJK;
}

/* These two are never CJK, nor in a segment of it. */
static bool is_newline(const scan *t, size_t i)
{
    return !t->cjk && i < t->n && (t->s[i] == '\n' || t->s[i] == '\r');
}

static bool is_ascii_letter(const scan *t, size_t i)
{
    return !t->cjk && i < t->n && (unsigned)(t->s[i] | 32) - 'a' < 26;
}

/* End of the run from i of characters whose class is in the set of bits `classes`. */
static size_t run_end(const scan *t, size_t i, unsigned classes)
{
    size_t next;
    while (classes >> class_at(t, i, &next) & 1) i = next;
    return i;
}

/* Rules D, E and F at a space: up to the last newline of the run; else the run at the end of the segment; else all but
 * its last character; else that character. */
static size_t match_spaces(const scan *t, size_t i)
{
    size_t end = i, last = i, next, after_newline = 0;
    unsigned c;
    while ((c = class_at(t, end, &next)) == AFF_CHAR_SPACE) {
        if (is_newline(t, end)) after_newline = next;
        last = end;
        end = next;
    }
    if (after_newline) return after_newline;
    return c == END || last == i ? end : last;
}

/* End of the match of the third pattern at i, or i if there is none. */
static size_t match_at(const scan *t, size_t i)
{
    size_t next, j, k;
    unsigned c = class_at(t, i, &next);
    if (c == AFF_CHAR_SYMBOL && t->s[i] < 0x80 && is_ascii_letter(t, next)) { /* A */
        for (k = next; is_ascii_letter(t, k);) k++;
        return k;
    }
    bool lead = c != AFF_CHAR_LETTER && c != AFF_CHAR_SYMBOL && !is_newline(t, i); /* B */
    j = lead ? next : i;
    k = run_end(t, j, 1u << AFF_CHAR_LETTER | 1u << AFF_CHAR_MARK);
    if (k > j) return k;
    if (lead && c == AFF_CHAR_MARK) return next;
    j = t->s[i] == ' ' ? next : i; /* C */
    k = run_end(t, j, 1u << AFF_CHAR_SYMBOL);
    if (k > j) {
        while (is_newline(t, k)) k++;
        return k;
    }
    return c == AFF_CHAR_SPACE ? match_spaces(t, i) : i; /* D, E, F */
}

static size_t number_end(const uint8_t *s, size_t n)
{
    size_t end = 0, len;
    for (int digits = 0; digits < 3 && end < n; digits++, end += len)
        if (aff__char_class(aff__utf8_decode(s + end, &len)) != AFF_CHAR_NUMBER) break;
    return end;
}

size_t aff__piece_end(const uint8_t *s, size_t n)
{
    size_t len, end = 0, next;
    unsigned c = aff__char_class(aff__utf8_decode(s, &len));
    if (c == AFF_CHAR_NUMBER) return number_end(s, n);
    for (scan t = {s, n, c & AFF_CHAR_CJK}; class_at(&t, end, &next) != END; end = next) {
        size_t match = match_at(&t, end);
        if (match > end) return end > 0 ? end : match; /* what no rule matched is a piece of its own */
    }
    return end;
}
