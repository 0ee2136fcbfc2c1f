/* sampler.h - from a row of logits to a token (design 3.3; spec text-and-serving 5).
 *
 * The token at position p is a pure function of the bits of the logits that predict it, the parameters, and one uniform
 * keyed on (seed, choice, p). There is no state: speculation, batching or a restored session cannot shift the draws.
 *
 * Definition, with m the largest logit l(v) and T the temperature:
 *
 *   T <= 0   the lowest id with l(v) = m. Otherwise:
 *   weights  w(v) = exp((l(v) - m) / T) * 2^44 rounded to an integer: the softmax up to its common factor. exp is a
 *            fixed sequence of double operations; what is below 2^-45 of the mode is 0 and never drawn.
 *   top-k    0 < k < vocab: keep w(v) >= the k-th largest weight.
 *   top-p    p < 1: of the mass that top-k left, keep the heaviest tokens until they hold at least p of it; the
 *            token that crosses is kept (so p = 0 keeps the mode).
 *   min-p    > 0: keep w(v) >= min_p * w(mode). Relative to the mode, so its place among the filters is free.
 *   draw     W = sum of the kept weights, in any order (integers are exact); r = floor(u * W / 2^53) with the 53-bit
 *            uniform u; the token is the first, in ascending id, at which the sum of kept weights exceeds r.
 *
 * Every filter is a threshold on the weight, so tied tokens stay or go together. Since r < W always, no draw can run
 * past the last kept token. */
#ifndef AFF_ENGINE_SAMPLER_H
#define AFF_ENGINE_SAMPLER_H
#include "base/rng.h"
#include "base/status.h"

/* Vocabularies up to this size keep every sum of weights below 2^63. */
enum { AFF_SAMPLER_MAX_VOCAB = 1 << 19 };

/* The uniform of (seed, choice, position) as an integer below 2^53; u / 2^53 is the uniform in [0, 1). position is that
 * of the token drawn (the first token of a sequence is at 0). Three rounds of the splitmix64 finaliser, each a
 * bijection, so two positions of one stream never share their 64 bits. */
static inline uint64_t aff__sampler_uniform(uint64_t seed, uint32_t choice, int64_t position)
{
    const uint64_t g = 0x9E3779B97F4A7C15u;
    uint64_t h = aff__mix64(seed + g);
    h = aff__mix64((h ^ choice) + g);
    h = aff__mix64((h ^ (uint64_t)position) + g);
    return h >> 11;
}

/* Working memory for one vocabulary size; one thread at a time. */
typedef struct aff_sampler aff_sampler;
aff_status aff__sampler_create(aff_sampler **out, int vocab, aff_error *err);
uint64_t aff__sampler_bytes(int vocab); /* that it takes */
void aff__sampler_free(aff_sampler *s);

/* A filtered distribution: token v has probability weight[v] / total if weight[v] >= keep, else 0. */
typedef struct aff_dist {
    const uint64_t *weight; /* [vocab], owned by the sampler until its next call */
    int vocab;
    uint64_t keep; /* at least 1 */
    uint64_t total;
} aff_dist;

/* The distribution of logits [vocab] at p->temperature > 0 after all filters. Errors (AFF_E_INVALID): a parameter out
 * of its range, a logit that is NaN or +inf, all logits -inf. */
aff_status aff__sampler_filter(aff_sampler *s, const float *logits, const aff_sampling *p, aff_dist *out,
                               aff_error *err);
/* The draw with uniform u / 2^53. */
int32_t aff__dist_draw(const aff_dist *d, uint64_t u);
/* The token at `position`: argmax or draw, as above. */
aff_status aff__sampler_next(aff_sampler *s, const float *logits, const aff_sampling *p, int64_t position, int32_t *id,
                             aff_error *err);

/* Checks ranges: temperature and min_p finite, top_k >= 0, top_p and min_p in [0, 1]. */
aff_status aff__sampling_check(const aff_sampling *p, aff_error *err);
/* Lowest id of the largest logit; the same errors as above. */
aff_status aff__argmax(const float *logits, int vocab, int32_t *id, aff_error *err);
/* The k largest logits in descending order, lowest id first among equals: ids to id[k]; k <= vocab. */
aff_status aff__top_logits(const float *logits, int vocab, int k, int32_t *id, aff_error *err);
#endif
