/* Encoding derives each group's scale from the values again. It may come out smaller than the one the quantiser used
 * (448.5 needs 2, but what it is rounded to, 448, needs 1). The codes then grow by the same power of two, and they fit:
 * the scale was chosen for the largest of them, and a code times a power of two that stays in range is a code. */
#include "quant/rows.h"
#include "quant/numbers.h"
#include <math.h>

static int up4(int n)
{
    return (n + 3) / 4 * 4;
}

static aff_rowfmt lay_out(int n, int coded, int group, int bf16)
{
    aff_rowfmt f = {.n = n, .coded = coded, .group = coded ? group : 0, .bf16 = bf16};
    f.scales = group == AFF__A4_GROUP ? coded / 2 : coded;
    f.floats = f.scales + (coded ? up4(coded / group) : 0);
    f.tail = f.floats + 4 * (n - coded - bf16);
    f.bytes = f.tail + up4(2 * bf16);
    return f;
}

aff_rowfmt aff__rowfmt_f32(int n)
{
    return lay_out(n, 0, 0, 0);
}

aff_rowfmt aff__rowfmt_kv(aff_numerics num, int n, int rope)
{
    if (num == AFF_MATH) return aff__rowfmt_f32(n);
    return lay_out(n, (n - rope) / AFF__A8_GROUP * AFF__A8_GROUP, AFF__A8_GROUP, num == AFF_FAST ? rope : 0);
}

aff_rowfmt aff__rowfmt_key(aff_numerics num, int n)
{
    return num == AFF_MATH ? aff__rowfmt_f32(n) : lay_out(n, n / AFF__A4_GROUP * AFF__A4_GROUP, AFF__A4_GROUP, 0);
}

/* The largest magnitude above `floor`; *nan: there is a value that is none. */
static float amax_of(const float *x, int n, float floor, int *nan)
{
    float m = floor;
    *nan = 0;
    for (int i = 0; i < n; i++) {
        m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
        *nan |= x[i] != x[i];
    }
    return m;
}

static uint8_t exponent(float s)
{
    return (uint8_t)(aff__f32_bits(s) >> 23);
}

static void encode_a8(const float *x, uint8_t *code, uint8_t *scale)
{
    int nan;
    float s = aff__pow2_scale(amax_of(x, AFF__A8_GROUP, 1e-4f, &nan), 1.0f / 448.0f);
    *scale = exponent(s);
    for (int i = 0; i < AFF__A8_GROUP; i++) code[i] = aff__f32_to_e4m3(x[i] / s);
}

/* E2M1 has no NaN, E8M0 has: A4 makes either no value of a group NaN or all. */
static void encode_a4(const float *x, uint8_t *code, uint8_t *scale)
{
    int nan;
    float s = aff__pow2_scale(amax_of(x, AFF__A4_GROUP, 6.0f * 0x1p-126f, &nan), 1.0f / 6.0f);
    *scale = nan ? 255 : exponent(s);
    for (int i = 0; i < AFF__A4_GROUP / 2; i++)
        code[i] = (uint8_t)(aff__f32_to_e2m1(x[i] / s) | aff__f32_to_e2m1(x[i + 16] / s) << 4);
}

void aff__row_encode(const aff_rowfmt *f, const float *x, uint8_t *row)
{
    memset(row + f->scales, 0, (size_t)(f->floats - f->scales));
    for (int i = 0; f->group == AFF__A8_GROUP && i < f->coded; i += AFF__A8_GROUP)
        encode_a8(x + i, row + i, row + f->scales + i / AFF__A8_GROUP);
    for (int i = 0; f->group == AFF__A4_GROUP && i < f->coded; i += AFF__A4_GROUP)
        encode_a4(x + i, row + i / 2, row + f->scales + i / AFF__A4_GROUP);
    memcpy(row + f->floats, x + f->coded, (size_t)(f->tail - f->floats));
    if (!f->bf16) return;
    memset(row + f->bytes - 4, 0, 4);
    for (int i = 0; i < f->bf16; i++) {
        uint16_t h = aff__f32_to_bf16(x[f->n - f->bf16 + i]);
        memcpy(row + f->tail + 2 * i, &h, 2);
    }
}

void aff__row_decode(const aff_rowfmt *f, const uint8_t *row, float *x)
{
    for (int i = 0; f->group == AFF__A8_GROUP && i < f->coded; i++)
        x[i] = aff__e4m3_to_f32(row[i]) * aff__e8m0_to_f32(row[f->scales + i / AFF__A8_GROUP]);
    for (int i = 0; f->group == AFF__A4_GROUP && i < f->coded; i++) {
        const uint8_t pair = row[i / AFF__A4_GROUP * 16 + i % 16];
        x[i] = aff__e2m1_table[i % AFF__A4_GROUP < 16 ? pair & 15 : pair >> 4] *
               aff__e8m0_to_f32(row[f->scales + i / AFF__A4_GROUP]);
    }
    memcpy(x + f->coded, row + f->floats, (size_t)(f->tail - f->floats));
    for (int i = 0; i < f->bf16; i++) {
        uint16_t h;
        memcpy(&h, row + f->tail + 2 * i, 2);
        x[f->n - f->bf16 + i] = aff__bf16_to_f32(h);
    }
}
