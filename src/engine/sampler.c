/* sampler.c - thresholds on integer weights. Integers make every sum exact, so no result depends on the order of
 * addition, and a device kernel can take the same draw from the same logits. */
#include "engine/sampler.h"
#include "base/mem.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WEIGHT_BITS = 44, DIGIT_BITS = 9, DIGITS = 5 }; /* 5 digits of 9 bits hold 0 .. 2^44 */
#define WEIGHT_ONE (1ull << WEIGHT_BITS)

struct aff_sampler {
    int vocab;
    uint64_t *weight; /* [vocab] */
    uint64_t *work;   /* [vocab] what a threshold search has not decided yet */
};

aff_status aff__sampler_create(aff_sampler **out, int vocab, aff_error *err)
{
    *out = NULL;
    if (vocab < 1 || vocab > AFF_SAMPLER_MAX_VOCAB)
        return aff__fail(err, AFF_E_UNSUPPORTED, "sampler: expected a vocabulary of 1 to %d, got %d",
                         AFF_SAMPLER_MAX_VOCAB, vocab);
    aff_sampler *s = NULL;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "sampler", err));
    s->vocab = vocab;
    aff_status st = aff__calloc(&s->weight, (uint64_t)vocab, sizeof *s->weight, "sampler weights", err);
    if (st == AFF_OK) st = aff__calloc(&s->work, (uint64_t)vocab, sizeof *s->work, "sampler work", err);
    if (st != AFF_OK) {
        aff__sampler_free(s);
        return st;
    }
    *out = s;
    return AFF_OK;
}

uint64_t aff__sampler_bytes(int vocab)
{
    const aff_sampler *s;
    return aff__align_up(sizeof *s, 64) + aff__align_up((uint64_t)vocab * sizeof *s->weight, 64) + aff__align_up((uint64_t)vocab * sizeof *s->work, 64);
}

void aff__sampler_free(aff_sampler *s)
{
    if (!s) return;
    free(s->weight);
    free(s->work);
    free(s);
}

aff_status aff__sampling_check(const aff_sampling *p, aff_error *err)
{
    if (!isfinite(p->temperature))
        return aff__fail(err, AFF_E_INVALID, "sampling: temperature: expected a finite number, got %g", p->temperature);
    if (p->top_k < 0)
        return aff__fail(err, AFF_E_INVALID, "sampling: top_k: expected 0 (off) or more, got %lld",
                         (long long)p->top_k);
    if (!(p->top_p >= 0 && p->top_p <= 1))
        return aff__fail(err, AFF_E_INVALID, "sampling: top_p: expected 0 to 1, got %g", p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1))
        return aff__fail(err, AFF_E_INVALID, "sampling: min_p: expected 0 to 1, got %g", p->min_p);
    return AFF_OK;
}

aff_status aff__argmax(const float *logits, int vocab, int32_t *id, aff_error *err)
{
    int best = 0;
    for (int v = 0; v < vocab; v++) {
        if (!(logits[v] < INFINITY)) /* catches NaN too */
            return aff__fail(err, AFF_E_INVALID, "logits: token %d: expected a finite number or -inf, got %g", v,
                             (double)logits[v]);
        if (logits[v] > logits[best]) best = v;
    }
    if (!(logits[best] > -INFINITY)) return aff__fail(err, AFF_E_INVALID, "logits: all %d are -inf", vocab);
    *id = best;
    return AFF_OK;
}

/* exp(x) * 2^44 rounded to an integer (ties to even), for x <= 0. Cody-Waite reduction x = k ln 2 + r, |r| <= 0.35,
 * then the Taylor polynomial of degree 13 (remainder below 5e-18). Only + and * of doubles: the same bits on every
 * machine, unlike libm's exp. Adding 1.5 * 2^52 or 2^52 to a double rounds it and leaves the integer in its low bits;
 * no branches and no conversions, so that the compiler can do several at once. */
static inline uint64_t weight_of(double x)
{
    const double to_int = 0x1.8p52, log2e = 0x1.71547652b82fep0, ln2_hi = 0x1.62e42feep-1,
                 ln2_lo = 0x1.a39ef35793c76p-33;
    static const double inv_factorial[] = {
        1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
        1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
    x = x > -32 ? x : -32; /* exp(-32) * 2^44 = 0.22: nothing */
    double shifted = x * log2e + to_int, k = shifted - to_int;
    double r = (x - k * ln2_hi) - k * ln2_lo; /* ln2_hi has 31 bits: the first product is exact */
    double e = inv_factorial[13];
    for (int i = 12; i >= 0; i--) e = e * r + inv_factorial[i];
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023 + WEIGHT_BITS) << 52; /* 2^(44 + k): the shift drops all but the low bits, k */
    double scale, w;
    memcpy(&scale, &bits, sizeof scale);
    w = e * scale + 0x1p52;
    memcpy(&bits, &w, sizeof bits);
    return bits & ((1ull << 52) - 1);
}

static void weights(const float *logits, double m, double temperature, uint64_t *w, int n)
{
    for (int v = 0; v < n; v++) w[v] = weight_of(((double)logits[v] - m) / temperature);
}

/* The largest threshold t >= lowest such that the entries of w[0..n) that are >= t number (by_mass: weigh) at least
 * `need`; `lowest` >= 1 if all of them together do not. A radix search from the top digit; `work` has room for n
 * entries. */
static uint64_t threshold(const uint64_t *w, int n, uint64_t lowest, bool by_mass, uint64_t need, uint64_t *work)
{
    const uint64_t mask = (1 << DIGIT_BITS) - 1, *live = w; /* what is not decided yet */
    uint64_t above = 0, prefix = 0;
    for (int d = DIGITS - 1; d >= 0; d--) {
        uint64_t sum[1 << DIGIT_BITS] = {0}, digit = mask;
        int shift = d * DIGIT_BITS, kept = 0;
        for (int i = 0; i < n; i++) sum[live[i] >> shift & mask] += live[i] < lowest ? 0 : by_mass ? live[i] : 1;
        while (digit > 0 && above + sum[digit] < need) above += sum[digit--];
        for (int i = 0; i < n; i++) {
            work[kept] = live[i];
            kept += live[i] >= lowest && (live[i] >> shift & mask) == digit;
        }
        live = work;
        n = kept;
        prefix |= digit << shift;
    }
    return prefix > lowest ? prefix : lowest;
}

static uint64_t mass(const uint64_t *w, int n, uint64_t keep)
{
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) sum += w[i] >= keep ? w[i] : 0;
    return sum;
}

aff_status aff__sampler_filter(aff_sampler *s, const float *logits, const aff_sampling *p, aff_dist *out,
                               aff_error *err)
{
    int32_t mode = 0;
    AFF_TRY(aff__sampling_check(p, err));
    if (!(p->temperature > 0))
        return aff__fail(err, AFF_E_INVALID, "sampling: temperature: a distribution needs more than 0, got %g",
                         p->temperature);
    AFF_TRY(aff__argmax(logits, s->vocab, &mode, err));
    weights(logits, (double)logits[mode], p->temperature, s->weight, s->vocab);

    uint64_t keep = 1;
    if (p->top_k > 0 && p->top_k < s->vocab)
        keep = threshold(s->weight, s->vocab, keep, false, (uint64_t)p->top_k, s->work);
    if (p->top_p < 1) {
        /* Smallest integer with need * 2^53 >= top_p * 2^53 * mass: exact, and at least 1 so that the mode stays. */
        unsigned __int128 q = (unsigned __int128)(uint64_t)ceil(p->top_p * 0x1p53) * mass(s->weight, s->vocab, keep);
        uint64_t need = (uint64_t)((q + ((1ull << 53) - 1)) >> 53);
        keep = threshold(s->weight, s->vocab, keep, true, need ? need : 1, s->work);
    }
    uint64_t least = (uint64_t)ceil(p->min_p * (double)WEIGHT_ONE);
    if (least > keep) keep = least;
    *out = (aff_dist){.weight = s->weight, .vocab = s->vocab, .keep = keep, .total = mass(s->weight, s->vocab, keep)};
    return AFF_OK;
}

int32_t aff__dist_draw(const aff_dist *d, uint64_t u)
{
    uint64_t r = (uint64_t)((unsigned __int128)u * d->total >> 53), sum = 0;
    int32_t last = 0;
    for (int v = 0; v < d->vocab; v++) {
        if (d->weight[v] < d->keep) continue;
        sum += d->weight[v];
        last = v;
        if (sum > r) break;
    }
    return last;
}

aff_status aff__sampler_next(aff_sampler *s, const float *logits, const aff_sampling *p, int64_t position, int32_t *id,
                             aff_error *err)
{
    AFF_TRY(aff__sampling_check(p, err));
    if (!(p->temperature > 0)) return aff__argmax(logits, s->vocab, id, err);
    aff_dist d;
    AFF_TRY(aff__sampler_filter(s, logits, p, &d, err));
    *id = aff__dist_draw(&d, aff__sampler_uniform(p->seed, p->choice, position));
    return AFF_OK;
}

/* Whether token a stands before token b in a list of top logits. */
static bool before(const float *logits, int32_t a, int32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, int32_t *heap, int n, int i)
{
    for (;;) {
        int last = i, l = 2 * i + 1;
        if (l < n && before(logits, heap[last], heap[l])) last = l;
        if (l + 1 < n && before(logits, heap[last], heap[l + 1])) last = l + 1;
        if (last == i) return;
        int32_t t = heap[i];
        heap[i] = heap[last];
        heap[last] = t;
        i = last;
    }
}

aff_status aff__top_logits(const float *logits, int vocab, int k, int32_t *id, aff_error *err)
{
    int32_t mode = 0;
    AFF_TRY(aff__argmax(logits, vocab, &mode, err)); /* NaN has no place in an order */
    if (k > vocab) return aff__fail(err, AFF_E_INVALID, "top logits: expected at most %d, got %d", vocab, k);
    /* id[] is a heap whose root is the last of the best k so far; then heap sort. */
    for (int v = 0; v < k; v++) id[v] = v;
    for (int i = k / 2 - 1; i >= 0; i--) sift_down(logits, id, k, i);
    for (int v = k; v < vocab && k > 0; v++) {
        if (!before(logits, v, id[0])) continue;
        id[0] = v;
        sift_down(logits, id, k, 0);
    }
    for (int n = k - 1; n > 0; n--) {
        int32_t t = id[0];
        id[0] = id[n];
        id[n] = t;
        sift_down(logits, id, n, 0);
    }
    return AFF_OK;
}
