/* refold.h - FP8 with scales on 32 x 32 tiles to scales on 128 x 128 tiles (spec quantiser 3). */
#ifndef AFF_QUANT_REFOLD_H
#define AFF_QUANT_REFOLD_H
#include <stdint.h>

/* E4M3 `code` times 2^-d: exact while it stays a normal number, else rounded to nearest even; NaN and zeros stay. */
uint8_t aff__refold_code(uint8_t code, int d);
/* src [rows][cols] with scale [rows/32][cols/32] to out and out_scale [rows/128][cols/128]; rows and cols multiples of
 * 128. A tile takes the largest of its scales. */
void aff__refold_fp8(const uint8_t *src, const uint8_t *scale, uint64_t rows, uint64_t cols, uint8_t *out,
                     uint8_t *out_scale);
#endif
