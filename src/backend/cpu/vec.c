/* vec.c - the choice of instruction set, the vector primitives in scalar form, and top-k. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/inner_scalar.h"
#include "backend/mathfn.h"
#include "base/cpu.h"
#include "quant/numbers.h"
#include <math.h>

const aff__cpu_inner aff__cpu_inner_scalar = {
    .matmul = aff__matmul_scalar,
    .pairs = aff__pairs_scalar,
    .to_bf16 = aff__to_bf16_scalar,
    .q2p875 = aff__q2p875_scalar,
    .mxfp4 = aff__mxfp4_scalar,
    .dot = aff__dot_scalar,
    .axpy = aff__axpy_scalar,
    .scale = aff__scale_scalar,
    .round_bf16 = aff__round_bf16_scalar,
    .attend = aff__attend_scalar,
    .attend_pairs = aff__attend_pairs_scalar,
    .merge = aff__merge_scalar,
    .index_codes = aff__index_codes_scalar,
    .index_floats = aff__index_floats_scalar,
    .row = aff__row_decode,
    .row_pairs = aff__row_pairs_scalar,
    .swiglu = aff__swiglu_scalar,
    .quantise = aff__quantise_scalar,
};

const aff__cpu_inner *aff__cpu_inner_now(void)
{
#if defined(__x86_64__)
    aff_cpu_level level = aff__cpu_level();
    if (level == AFF_CPU_AVX512) return &aff__cpu_inner_avx512;
    if (level == AFF_CPU_AVX2) return &aff__cpu_inner_avx2;
#endif
    return &aff__cpu_inner_scalar;
}

float aff__dot_scalar(const float *a, const float *b, int n)
{
    float acc[AFF__LANES] = {0};
    for (int k = 0; k < n; k++) acc[k % AFF__LANES] = fmaf(a[k], b[k], acc[k % AFF__LANES]);
    return aff__fold_lanes(acc);
}

void aff__axpy_scalar(float *y, float a, const float *x, int n)
{
    for (int i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

void aff__scale_scalar(float *y, float a, int n)
{
    for (int i = 0; i < n; i++) y[i] *= a;
}

void aff__round_bf16_scalar(const float *x, float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = aff__round_bf16(x[i]);
}

void aff__to_bf16_scalar(const float *x, uint16_t *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = aff__f32_to_bf16(x[i]);
}

float aff__cpu_dot(const float *a, const float *b, int n)
{
    return aff__cpu_inner_now()->dot(a, b, n);
}
float aff__cpu_sumsq(const float *a, int n)
{
    return aff__cpu_inner_now()->dot(a, a, n);
}
void aff__cpu_axpy(float *y, float a, const float *x, int n)
{
    aff__cpu_inner_now()->axpy(y, a, x, n);
}
void aff__cpu_scale(float *y, float a, int n)
{
    aff__cpu_inner_now()->scale(y, a, n);
}

/* Unsigned integers in the order of the floats: NaN is 0, both zeros are one key. */
static uint32_t order_key(float f)
{
    if (f != f) return 0;
    uint32_t u = aff__f32_bits(f + 0.0f); /* -0 + 0 = +0 */
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The float with this key; of both zeros +0. */
static float key_value(uint32_t key)
{
    return aff__bits_f32(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

enum { HIGH_BITS = 11, LOW_SHIFT = 32 - HIGH_BITS, BINS = 1 << HIGH_BITS };

/* The bin that holds the want-th largest of the counted keys; *want becomes its place in that bin. */
static uint32_t bin_of(const int *count, int *want)
{
    uint32_t digit = BINS - 1;
    while (count[digit] < *want) *want -= count[digit--];
    return digit;
}

/* The leading bits of all keys. Four tables, so that equal neighbours do not wait for each other's count. */
static uint32_t high_digit(const float *score, int n, int *want)
{
    int count[4][BINS] = {0};
    for (int i = 0; i < n; i++) count[i & 3][order_key(score[i]) >> LOW_SHIFT]++;
    for (int i = 0; i < BINS; i++) count[0][i] += count[1][i] + count[2][i] + count[3][i];
    return bin_of(count[0], want);
}

/* Keys with those leading bits; blocks without any, nearly all, are passed over by comparing floats. */
static int gather(const float *score, int n, uint32_t digit, int *keys)
{
    const float lo = key_value(digit << LOW_SHIFT), hi = key_value(digit << LOW_SHIFT | ((1u << LOW_SHIFT) - 1));
    const bool compare = lo == lo && hi == hi; /* else NaN is among them */
    int m = 0;
    for (int i = 0; i < n; i += 16) {
        const int end = i + 16 < n ? i + 16 : n;
        int some = !compare;
        for (int j = i; j < end; j++) some |= (score[j] >= lo) & (score[j] <= hi);
        for (int j = i; some && j < end; j++) {
            const uint32_t u = order_key(score[j]);
            if (u >> LOW_SHIFT == digit) keys[m++] = (int)u;
        }
    }
    return m;
}

/* Radix selection: the key of the k-th largest is found 11 bits at a time, and only those that share the bits found so far are
 * looked at again. *want: k; on return how many of the keys equal to it are among the first k. 0 < k <= n; scratch: n ints. */
static uint32_t kth_key(const float *score, int n, int *want, int *scratch)
{
    uint32_t prefix = high_digit(score, n, want);
    int m = gather(score, n, prefix, scratch);
    for (int shift = LOW_SHIFT - 11; shift >= -1; shift -= 11) {
        const int bits = shift < 0 ? 10 : 11, down = shift < 0 ? 0 : shift;
        int count[BINS] = {0}, left = 0;
        for (int i = 0; i < m; i++) count[(uint32_t)scratch[i] >> down & ((1u << bits) - 1)]++;
        const uint32_t digit = bin_of(count, want);
        prefix = prefix << bits | digit;
        for (int i = 0; i < m; i++)
            if ((uint32_t)scratch[i] >> down == prefix) scratch[left++] = scratch[i];
        m = left;
    }
    return prefix;
}

/* Indices of the scores that are not below `least`; whole blocks of 16 without any are passed over. */
static int at_least(const float *score, int n, float least, int *index)
{
    int m = 0;
    for (int i = 0; i < n; i += 16) {
        const int end = i + 16 < n ? i + 16 : n;
        int some = 0;
        for (int j = i; j < end; j++) some |= score[j] >= least;
        for (int j = i; some && j < end; j++) {
            index[m] = j;
            m += score[j] >= least;
        }
    }
    return m;
}

enum { SAMPLE = 4096 };

/* Long lists: a value that a sample says is a little below the k-th largest leaves few candidates, in index. Their number, or 0 when
 * the sample misled (fewer than k, or more than n / 4). */
static int candidates(const float *score, int n, int k, int *index)
{
    if (n < 8 * SAMPLE || k > n / 64) return 0;
    float some[SAMPLE];
    int room[SAMPLE];
    const int stride = n / SAMPLE;
    for (int i = 0; i < SAMPLE; i++) some[i] = score[(int64_t)i * stride];
    int want = (int)((int64_t)2 * k * SAMPLE / n) + 16;
    const float least = key_value(kth_key(some, SAMPLE, &want, room));
    const int m = at_least(score, n, least, index);
    return m < k || m > n / 4 ? 0 : m;
}

/* The first k in the order of the keys among score[index[i]]; index NULL: score[i]. */
static int choose(const float *score, int n, const int *index, int k, int *sel, int *scratch)
{
    int want = k, got = 0;
    const uint32_t prefix = kth_key(score, n, &want, scratch);
    const float least = key_value(prefix);
    for (int i = 0; i < n && got < k; i += 16) {
        const int end = i + 16 < n ? i + 16 : n;
        int some = least != least;
        for (int j = i; j < end; j++) some |= score[j] >= least;
        for (int j = i; some && j < end && got < k; j++) {
            const uint32_t u = order_key(score[j]);
            if (u > prefix || (u == prefix && want > 0)) {
                sel[got++] = index ? index[j] : j;
                want -= u == prefix;
            }
        }
    }
    return got;
}

int aff__cpu_topk(const float *score, int n, int k, int *sel, int *scratch)
{
    if (n <= k || k <= 0) {
        int all = k <= 0 ? 0 : n;
        for (int i = 0; i < all; i++) sel[i] = i;
        return all;
    }
    const int m = candidates(score, n, k, scratch);
    if (!m) return choose(score, n, NULL, k, sel, scratch);
    float *few = (float *)(void *)(scratch + m); /* candidates, their scores, room: at most 3 n / 4 */
    for (int i = 0; i < m; i++) few[i] = score[scratch[i]];
    return choose(few, m, scratch, k, sel, scratch + 2 * m);
}
