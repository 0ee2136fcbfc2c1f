#include "engine/logits.h"
#include <math.h>
#include <string.h>

static bool repeats(const aff_adjust *a) { return a->repetition != 0 && a->repetition != 1; }

aff_status aff__adjust_check(const aff_adjust *a, int vocab, aff_error *err)
{
    if (!(a->repetition >= 0 && a->repetition <= 100))
        return aff__fail(err, AFF_E_INVALID, "repetition penalty: expected above 0 to 100 (1 is off), got %g", a->repetition);
    if (!(fabs(a->presence) <= 100)) return aff__fail(err, AFF_E_INVALID, "presence penalty: expected -100 to 100, got %g", a->presence);
    if (!(fabs(a->frequency) <= 100)) return aff__fail(err, AFF_E_INVALID, "frequency penalty: expected -100 to 100, got %g", a->frequency);
    if (a->n_bias < 0 || a->n_bias > AFF_MAX_BIAS)
        return aff__fail(err, AFF_E_INVALID, "logit bias: expected at most %d entries, got %d", AFF_MAX_BIAS, a->n_bias);
    for (int i = 0; i < a->n_bias; i++) {
        if (a->bias[i].id < 0 || a->bias[i].id >= vocab)
            return aff__fail(err, AFF_E_INVALID, "logit bias: entry %d: expected an id of 0 to %d, got %d", i + 1, vocab - 1, (int)a->bias[i].id);
        if (!(fabsf(a->bias[i].bias) <= 1e6f))
            return aff__fail(err, AFF_E_INVALID, "logit bias: token %d: expected -1e6 to 1e6, got %g", (int)a->bias[i].id, (double)a->bias[i].bias);
    }
    return AFF_OK;
}

bool aff__adjust_off(const aff_adjust *a) { return !repeats(a) && a->presence == 0 && a->frequency == 0 && !a->n_bias; }

void aff__adjust_logits(const aff_adjust *a, const aff_occurrences *o, const float *logits, int vocab, float *out)
{
    memcpy(out, logits, (size_t)vocab * sizeof *out);
    for (int i = 0; i < a->n_bias; i++) out[a->bias[i].id] += a->bias[i].bias;
    if (repeats(a))
        for (int v = 0; v < vocab; v++)
            if (o->all[v]) out[v] = (float)(out[v] > 0 ? (double)out[v] / a->repetition : (double)out[v] * a->repetition);
    if (a->frequency == 0 && a->presence == 0) return;
    for (int v = 0; v < vocab; v++)
        if (o->output[v]) out[v] = (float)((double)out[v] - a->frequency * o->output[v] - a->presence);
}

void aff__logprobs(const float *logits, int vocab, const int32_t *id, int n, float *out)
{
    double m = -INFINITY, sum = 0;
    for (int v = 0; v < vocab; v++)
        if (logits[v] > m) m = (double)logits[v];
    for (int v = 0; v < vocab; v++) sum += exp((double)logits[v] - m);
    const double ln = m + log(sum);
    for (int i = 0; i < n; i++) out[i] = (float)((double)logits[id[i]] - ln);
}
