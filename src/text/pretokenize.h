/* pretokenize.h - cuts plain text into the pieces that BPE works in (spec text-and-serving 1.5). */
#ifndef AFF_TEXT_PRETOKENIZE_H
#define AFF_TEXT_PRETOKENIZE_H
#include <stddef.h>
#include <stdint.h>

/* Length of the first piece of s[0..n), n >= 1: valid UTF-8 that starts where the text starts or a piece ended. Every
 * byte belongs to one piece. */
size_t aff__piece_end(const uint8_t *s, size_t n);
#endif
