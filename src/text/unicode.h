/* unicode.h - character classes of the pre-tokenizer, Unicode 16.0 (spec text-and-serving 1.5). */
#ifndef AFF_TEXT_UNICODE_H
#define AFF_TEXT_UNICODE_H
#include <stdint.h>

/* Each code point has exactly one class. */
typedef enum aff_char_class {
    AFF_CHAR_OTHER,  /* controls, format characters, private use, unassigned */
    AFF_CHAR_NUMBER, /* N */
    AFF_CHAR_LETTER, /* L */
    AFF_CHAR_MARK,   /* M */
    AFF_CHAR_SYMBOL, /* P or S */
    AFF_CHAR_SPACE   /* the 25 code points of \s */
} aff_char_class;
/* Added to the class in U+4E00-9FA5 and U+3040-30FF. */
enum { AFF_CHAR_CJK = 8 };

/* Two-stage table: page number of each 128 code points below aff__unicode_end, then two classes a byte. */
extern const uint32_t aff__unicode_end;
extern const uint8_t aff__unicode_page[];
extern const uint8_t aff__unicode_class[];

/* Class and AFF_CHAR_CJK of a code point. */
static inline unsigned aff__char_class(uint32_t c)
{
    if (c >= aff__unicode_end) return AFF_CHAR_OTHER;
    unsigned pair = aff__unicode_class[aff__unicode_page[c >> 7] * 64u + ((c & 127) >> 1)];
    return c & 1 ? pair >> 4 : pair & 15;
}
#endif
