/* index_simd.h - index scores over simd16.h, included once per instruction set.
 *
 * Coded keys: the keys are the lanes. A few keys' rows are turned so that a vector holds four neighbouring columns of
 * each, as bytes 2 * E2M1 + 12 >= 0; then every head multiplies them with a broadcast of its four columns, and a
 * block's integers are in place for the float chain without a sum across lanes. Blocks are outside and heads inside, so that
 * the columns of a block stay in registers for all heads. */
#include "backend/cpu/simd16.h"

enum { IX_HEADS = 4, IX_AHEAD = 6528, IX_BLOCKS = AFF__HADAMARD_MAX / AFF__A4_GROUP, IX_MANY = 64 };

#if defined(__AVX512F__)
enum { IX_KEYS = 16, IX_SETS = 2 };
typedef __m512i ix_int;
typedef __m512 ix_float;

/* Two rows' blocks first, first + 1 of those that are there. */
AFF__INLINE __m512i ix_two(const uint8_t *a, const uint8_t *b, int first, int blocks)
{
    if (first + 2 <= blocks)
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)(a + 16 * first))),
                                  _mm256_loadu_si256((const __m256i *)(const void *)(b + 16 * first)), 1);
    if (first == blocks) return _mm512_setzero_si512();
    return _mm512_inserti32x4(_mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(a + 16 * first))),
                              _mm_loadu_si128((const __m128i *)(const void *)(b + 16 * first)), 2);
}

/* Dword d of row j to lane j of column[d]; rows of 4 * blocks dwords, at most 16, `apart` bytes apart. */
AFF__INLINE void ix_turn(const uint8_t *row, int64_t apart, int blocks, __m512i column[16])
{
    __m512i v[4][4]; /* v[b][i]: block b of rows i, 4 + i, 8 + i, 12 + i */
    for (int i = 0; i < 4; i++)
        for (int b = 0; b < 4; b += 2) {
            const uint8_t *r = row + i * apart;
            const __m512i p = ix_two(r, r + 4 * apart, b < blocks ? b : blocks, blocks),
                          q = ix_two(r + 8 * apart, r + 12 * apart, b < blocks ? b : blocks, blocks);
            v[b][i] = _mm512_shuffle_i32x4(p, q, 0x88), v[b + 1][i] = _mm512_shuffle_i32x4(p, q, 0xdd);
        }
    for (int b = 0; b < blocks; b++) {
        const __m512i l01 = _mm512_unpacklo_epi32(v[b][0], v[b][1]), h01 = _mm512_unpackhi_epi32(v[b][0], v[b][1]);
        const __m512i l23 = _mm512_unpacklo_epi32(v[b][2], v[b][3]), h23 = _mm512_unpackhi_epi32(v[b][2], v[b][3]);
        column[4 * b] = _mm512_unpacklo_epi64(l01, l23), column[4 * b + 1] = _mm512_unpackhi_epi64(l01, l23);
        column[4 * b + 2] = _mm512_unpacklo_epi64(h01, h23), column[4 * b + 3] = _mm512_unpackhi_epi64(h01, h23);
    }
}

/* Low nibbles as bytes 2 * E2M1 + 12; what the upper bits of a byte hold does not matter. */
AFF__INLINE __m512i ix_bytes(__m512i code)
{
    return _mm512_permutexvar_epi8(code, _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)aff__key_bytes)));
}
AFF__INLINE __m512i ix_shift(__m512i v, int by)
{
    return _mm512_srli_epi32(v, (unsigned)by);
}

AFF__INLINE __m512 ix_scale(__m512i byte)
{
    byte = _mm512_and_si512(byte, _mm512_set1_epi32(255));
    __m512i s = _mm512_slli_epi32(byte, 23);
    s = _mm512_mask_set1_epi32(s, _mm512_cmpeq_epi32_mask(byte, _mm512_setzero_si512()), 0x00400000);
    return _mm512_castsi512_ps(
        _mm512_mask_set1_epi32(s, _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(255)), 0x7fc00000));
}

/* Whether no byte is 0 (subnormal) or 255 (NaN); then byte i is the exponent of a scale. */
AFF__INLINE bool ix_plain(__m512i v)
{
    return (_mm512_testn_epi8_mask(v, v) | _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)0xff))) == 0;
}
AFF__INLINE __m512 ix_exponent(__m512i v, int i)
{
    v = i < 3 ? _mm512_slli_epi32(v, (unsigned)(23 - 8 * i)) : _mm512_srli_epi32(v, 1);
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0x7f800000)));
}

/* sum + four columns of keys times four of a query. */
AFF__INLINE __m512i ix_four(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}
AFF__INLINE __m512i ix_dot(__m512i sum, __m512i key, __m512i four)
{
    return _mm512_dpbusd_epi32(sum, key, four);
}
AFF__INLINE __m512i ix_begin(int32_t start)
{
    return _mm512_set1_epi32(start);
}
AFF__INLINE ix_float ix_total(__m512i sum, int32_t start)
{
    (void)start; /* it began there */
    return _mm512_cvtepi32_ps(sum);
}
AFF__INLINE ix_float ix_fma(ix_float sum, float q, ix_float k, ix_float d)
{
    return _mm512_fmadd_ps(sum, _mm512_mul_ps(_mm512_set1_ps(q), k), d);
}
AFF__INLINE ix_float ix_add_head(float w, ix_float d, ix_float s)
{
    return _mm512_fmadd_ps(_mm512_set1_ps(w), _mm512_max_ps(d, _mm512_setzero_ps()), s);
}
AFF__INLINE ix_float ix_zero(void)
{
    return _mm512_setzero_ps();
}
AFF__INLINE void ix_store(float *p, ix_float s, int live)
{
    _mm512_mask_storeu_ps(p, m16_first(live), s);
}

#else
enum { IX_KEYS = 8, IX_SETS = 1 };
typedef __m256i ix_int;
typedef __m256 ix_float;

AFF__INLINE void ix_turn(const uint8_t *row, int64_t apart, int blocks, __m256i column[16])
{
    __m256i a[8], b[8];
    for (int half = 0; half < blocks; half += 2) {
        const __m256i in = blocks - half > 1 ? _mm256_set1_epi32(-1) : _mm256_setr_epi32(-1, -1, -1, -1, 0, 0, 0, 0);
        for (int j = 0; j < 8; j++)
            a[j] = _mm256_maskload_epi32((const int *)(const void *)(row + j * apart + 16 * half), in);
        for (int j = 0; j < 8; j += 2) {
            b[j] = _mm256_unpacklo_epi32(a[j], a[j + 1]);
            b[j + 1] = _mm256_unpackhi_epi32(a[j], a[j + 1]);
        }
        for (int j = 0; j < 8; j += 4) {
            a[j] = _mm256_unpacklo_epi64(b[j], b[j + 2]);
            a[j + 1] = _mm256_unpackhi_epi64(b[j], b[j + 2]);
            a[j + 2] = _mm256_unpacklo_epi64(b[j + 1], b[j + 3]);
            a[j + 3] = _mm256_unpackhi_epi64(b[j + 1], b[j + 3]);
        }
        for (int i = 0; i < 4; i++) {
            column[4 * half + i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
            column[4 * half + 4 + i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
        }
    }
}

AFF__INLINE __m256i ix_bytes(__m256i code)
{
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)aff__key_bytes));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(code, _mm256_set1_epi8(15)));
}
AFF__INLINE __m256i ix_shift(__m256i v, int by)
{
    return _mm256_srli_epi32(v, by);
}

AFF__INLINE __m256 ix_scale(__m256i byte)
{
    byte = _mm256_and_si256(byte, _mm256_set1_epi32(255));
    __m256i s = _mm256_slli_epi32(byte, 23);
    s = _mm256_or_si256(
        s, _mm256_and_si256(_mm256_cmpeq_epi32(byte, _mm256_setzero_si256()), _mm256_set1_epi32(0x00400000)));
    return _mm256_castsi256_ps(_mm256_or_si256(
        s, _mm256_and_si256(_mm256_cmpeq_epi32(byte, _mm256_set1_epi32(255)), _mm256_set1_epi32(0x7fc00000))));
}

AFF__INLINE bool ix_plain(__m256i v)
{
    const __m256i odd = _mm256_or_si256(_mm256_cmpeq_epi8(v, _mm256_setzero_si256()), _mm256_cmpeq_epi8(v, _mm256_set1_epi8((char)0xff)));
    return _mm256_testz_si256(odd, odd);
}
AFF__INLINE __m256 ix_exponent(__m256i v, int i)
{
    v = i < 3 ? _mm256_slli_epi32(v, 23 - 8 * i) : _mm256_srli_epi32(v, 1);
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0x7f800000)));
}

/* The sums of a block's 16 pairs stay below 8 * 2 * 24 * 12 in 16 bits. */
AFF__INLINE __m256i ix_four(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, 4);
    return _mm256_set1_epi32(four);
}
AFF__INLINE __m256i ix_dot(__m256i sum, __m256i key, __m256i four)
{
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(key, four));
}
AFF__INLINE __m256i ix_begin(int32_t start)
{
    (void)start;
    return _mm256_setzero_si256();
}
AFF__INLINE ix_float ix_total(__m256i sum, int32_t start)
{
    sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(sum, _mm256_set1_epi32(start)));
}
AFF__INLINE ix_float ix_fma(ix_float sum, float q, ix_float k, ix_float d)
{
    return _mm256_fmadd_ps(sum, _mm256_mul_ps(_mm256_set1_ps(q), k), d);
}
AFF__INLINE ix_float ix_add_head(float w, ix_float d, ix_float s)
{
    return _mm256_fmadd_ps(_mm256_set1_ps(w), _mm256_max_ps(d, _mm256_setzero_ps()), s);
}
AFF__INLINE ix_float ix_zero(void)
{
    return _mm256_setzero_ps();
}
AFF__INLINE void ix_store(float *p, ix_float s, int live)
{
    _mm256_maskstore_ps(p, _mm256_castps_si256(v16_first(live).l), s);
}
#endif

enum { IX_ROWS = IX_KEYS * IX_SETS };

/* IX_KEYS keys, turned: the codes of their blocks, four dwords each, and the scales. */
typedef struct ix_keys {
    ix_int code[IX_BLOCKS * 4];
    ix_float scale[IX_BLOCKS];
} ix_keys;

AFF__INLINE void ix_fetch(const aff_rowfmt *f, const uint8_t *row, int blocks, ix_keys *k)
{
    for (int b = 0; b < blocks; b += 4) {
        const int some = aff__min_int(4, blocks - b);
        int32_t byte[IX_KEYS];
        ix_turn(row + b * 16, f->bytes, some, k->code + 4 * b);
        for (int j = 0; j < IX_KEYS; j++) memcpy(&byte[j], row + (int64_t)j * f->bytes + f->scales + b, 4); /* padded to whole fours */
        ix_int scales;
        memcpy(&scales, byte, sizeof scales);
        if (some == 4 && ix_plain(scales))
            for (int i = 0; i < 4; i++) k->scale[b + i] = ix_exponent(scales, i);
        else
            for (int i = 0; i < some; i++) k->scale[b + i] = ix_scale(ix_shift(scales, 8 * i));
    }
}

/* Block b's part of the dot products d of H heads from h on (d[0] is head h's). */
AFF__INLINE void ix_heads(const aff_index_query *q, int H, int h, const ix_keys *k, ix_int (*column)[8], int b, int blocks, ix_float (*d)[IX_SETS])
{
    ix_int sum[IX_HEADS][IX_SETS];
    const int64_t at = (int64_t)h * blocks + b;
    for (int i = 0; i < H; i++)
        for (int g = 0; g < IX_SETS; g++) sum[i][g] = ix_begin(q->start[at + i * blocks]);
    for (int c = 0; c < 8; c++)
        for (int i = 0; i < H; i++) {
            const ix_int four = ix_four(q->q + (at + i * blocks) * AFF__A4_GROUP + 4 * c);
            for (int g = 0; g < IX_SETS; g++) sum[i][g] = ix_dot(sum[i][g], column[g][c], four);
        }
    for (int i = 0; i < H; i++)
        for (int g = 0; g < IX_SETS; g++)
            d[i][g] = ix_fma(ix_total(sum[i][g], q->start[at + i * blocks]), q->scale[at + i * blocks], k[g].scale[b], b ? d[i][g] : ix_zero());
}

/* Scores of IX_ROWS rows; the first `live` are wanted. */
AFF__INLINE void ix_rows(const aff_index_query *q, const uint8_t *row, int blocks, int live, float *score)
{
    ix_keys k[IX_SETS];
    ix_float s[IX_SETS], d[IX_MANY][IX_SETS];
    for (int g = 0; g < IX_SETS; g++) {
        ix_fetch(q->f, row + (int64_t)g * IX_KEYS * q->f->bytes, blocks, &k[g]);
        s[g] = ix_zero();
    }
    for (int h0 = 0; h0 < q->heads; h0 += IX_MANY) {
        const int heads = aff__min_int(IX_MANY, q->heads - h0);
        for (int b = 0; b < blocks; b++) {
            ix_int column[IX_SETS][8];
            for (int g = 0; g < IX_SETS; g++)
                for (int c = 0; c < 4; c++) {
                    column[g][c] = ix_bytes(k[g].code[4 * b + c]);
                    column[g][4 + c] = ix_bytes(ix_shift(k[g].code[4 * b + c], 4));
                }
            int h = 0;
            for (; h + IX_HEADS <= heads; h += IX_HEADS) ix_heads(q, IX_HEADS, h0 + h, k, column, b, blocks, d + h);
            for (; h < heads; h++) ix_heads(q, 1, h0 + h, k, column, b, blocks, d + h);
        }
        for (int h = 0; h < heads; h++)
            for (int g = 0; g < IX_SETS; g++) s[g] = ix_add_head(q->w[h0 + h], d[h][g], s[g]);
    }
    for (int g = 0; g < IX_SETS && live > g * IX_KEYS; g++)
        ix_store(score + g * IX_KEYS, s[g], aff__min_int(IX_KEYS, live - g * IX_KEYS));
}

/* Keys are asked for IX_AHEAD bytes early: their rows straddle cache lines, and without that half the time goes in
 * waiting. */
AFF__INLINE void ix_all(const aff_index_query *q, const uint8_t *ik, int n, int blocks, float *score)
{
    const int64_t bytes = q->f->bytes;
    int g = 0;
    for (; g + IX_ROWS <= n; g += IX_ROWS) {
        const uint8_t *p = ik + g * bytes;
        for (int64_t b = 0; b < IX_ROWS * bytes; b += 64) _mm_prefetch((const char *)p + IX_AHEAD + b, _MM_HINT_T0);
        ix_rows(q, p, blocks, IX_ROWS, score + g);
    }
    if (g == n) return;
    uint8_t rest[IX_ROWS * (AFF__HADAMARD_MAX / 2 + IX_BLOCKS)]; /* the last rows, and any behind them */
    memset(rest, 0, (size_t)(IX_ROWS * bytes));
    memcpy(rest, ik + g * bytes, (size_t)((n - g) * bytes));
    ix_rows(q, rest, blocks, n - g, score + g);
}

static void index_codes_simd(const aff_index_query *q, const uint8_t *ik, int n, float *score)
{
    const int blocks = q->f->coded / AFF__A4_GROUP;
    if (blocks == 4) /* the published width, its loops unrolled */
        ix_all(q, ik, n, 4, score);
    else
        ix_all(q, ik, n, blocks, score);
}

/* Sixteen keys g at a time are the lanes of the sum over heads. */
static void index_floats_simd(const aff_index_query *q, const uint8_t *ik, int n, float *score)
{
    const int D = q->f->n;
    for (int g = 0; g < n; g += 16) {
        int live = aff__min_int(16, n - g), h = 0;
        const float *key[16];
        for (int j = 0; j < 16; j++)
            key[j] = (const float *)(const void *)(ik + (int64_t)(g + aff__min_int(j, live - 1)) * q->f->bytes);
        v16 s = v16_zero();
        for (; h < q->heads; h += AT_HEADS) {
            float dots[AT_HEADS][16];
            int some = aff__min_int(AT_HEADS, q->heads - h);
            const float *x = q->x + (int64_t)h * D;
            for (int j = 0; j < live; j += AT_KEYS) {
                if (some == AT_HEADS)
                    at_dots(AT_HEADS, AT_KEYS, x, D, key + j, D, &dots[0][j], 16);
                else
                    for (int i = 0; i < some; i++)
                        at_dots(1, AT_KEYS, x + (int64_t)i * D, D, key + j, D, &dots[i][j], 16);
            }
            for (int i = 0; i < some; i++)
                s = v16_fma(v16_set1(q->w[h + i]), v16_max(v16_load_part(dots[i], live), v16_zero()), s);
        }
        v16_store_part(score + g, s, live);
    }
}
