/* logits.h - what happens to a row of logits before the sampler, and log-probabilities. All of it is a function of the row and
 * of the tokens before it.
 *
 * Order (that of vLLM): bias, repetition, then frequency and presence.
 *   bias         l(v) += bias(v)
 *   repetition   r, over prompt and output: l(v) > 0 ? l(v) / r : l(v) * r, for every token that occurs there
 *   frequency    f, over the output alone: l(v) -= f * (number of times v occurs there)
 *   presence     p, over the output alone: l(v) -= p, if v occurs there
 * A grammar then takes out what it refuses (engine.h), and the sampler sees what is left. Log-probabilities are of the logits as
 * the model gave them. */
#ifndef AFF_ENGINE_LOGITS_H
#define AFF_ENGINE_LOGITS_H
#include "base/status.h"

enum { AFF_MAX_TOP_LOGPROBS = 20, AFF_MAX_BIAS = 1024 };

typedef struct aff_bias {
    int32_t id;
    float bias;
} aff_bias;

typedef struct aff_adjust {
    double repetition;          /* 1 (or 0): off; above 0 and at most 100 */
    double presence, frequency; /* 0: off; -100 .. 100 */
    const aff_bias *bias;       /* [n_bias] finite, -1e6 .. 1e6; one id may occur several times: they add up */
    int n_bias;
} aff_adjust;

/* How often each token occurs; [vocab] each. */
typedef struct aff_occurrences {
    int32_t *all, *output;
} aff_occurrences;

aff_status aff__adjust_check(const aff_adjust *a, int vocab, aff_error *err);
bool aff__adjust_off(const aff_adjust *a);
/* out[vocab] = logits after a; `o` is not read when no penalty is on. NaN stays NaN. */
void aff__adjust_logits(const aff_adjust *a, const aff_occurrences *o, const float *logits, int vocab, float *out);

/* Log-probabilities (natural) of n ids under softmax(logits), temperature 1: l(id) - m - ln(sum exp(l - m)), the sum in double
 * in ascending id. The row must hold no NaN and no +inf. */
void aff__logprobs(const float *logits, int vocab, const int32_t *id, int n, float *out);
#endif
