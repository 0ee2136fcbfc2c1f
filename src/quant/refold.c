#include "quant/refold.h"

enum { FINE = 32, TILE = 128, PER = TILE / FINE };

uint8_t aff__refold_code(uint8_t code, int d)
{
    const int e = code >> 3 & 15, m = code & 7;
    if (d == 0 || (code & 0x7f) == 0 || (code & 0x7f) == 0x7f) return code;
    if (e > d) return (uint8_t)(code - (d << 3));
    const uint32_t n = e ? (uint32_t)(8 + m) << (e - 1) : (uint32_t)m; /* in units of 2^-9 */
    if (d >= 31) return 0;
    uint32_t q = n >> d;
    const uint32_t rest = n - (q << d), half = 1u << (d - 1);
    if (rest > half || (rest == half && (q & 1))) q++;
    return (uint8_t)(q ? (code & 0x80u) | q : 0);
}

void aff__refold_fp8(const uint8_t *src, const uint8_t *scale, uint64_t rows, uint64_t cols, uint8_t *out,
                     uint8_t *out_scale)
{
    const uint64_t tiles = cols / TILE, fine = cols / FINE;
    for (uint64_t t = 0; t < rows / TILE * tiles; t++) {
        uint8_t most = 0;
        for (uint64_t i = 0; i < PER * PER; i++) {
            const uint8_t s = scale[(t / tiles * PER + i / PER) * fine + t % tiles * PER + i % PER];
            most = s > most ? s : most;
        }
        out_scale[t] = most;
    }
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < cols; c++)
            out[r * cols + c] = aff__refold_code(src[r * cols + c], out_scale[r / TILE * tiles + c / TILE] -
                                                                        scale[r / FINE * fine + c / FINE]);
}
