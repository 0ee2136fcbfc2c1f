#include "engine/width.h"
#include <math.h>

/* Width of a confidence range: probability in AFF_CONFIDENCES equal parts. */
static double probability(float conf) { return conf > -30 ? 1 / (1 + exp(-(double)conf)) : 0; /* NaN: 0 */ }

static int range_of(float conf)
{
    const int r = (int)(probability(conf) * AFF_CONFIDENCES);
    return r < AFF_CONFIDENCES ? r : AFF_CONFIDENCES - 1;
}

void aff__calibration_note(aff_calibration *c, int place, float conf, bool right)
{
    const int r = range_of(conf);
    if (c->tried[place][r] >= 512) { /* forget: the text changes */
        c->tried[place][r] /= 2;
        c->right[place][r] /= 2;
    }
    c->tried[place][r] += 1;
    c->right[place][r] += right;
}

double aff__calibration_chance(const aff_calibration *own, const aff_calibration *all, int place, float conf)
{
    enum { TRUST_CONFIDENCE = 1, TRUST_ALL = 16 }; /* counts that the broader estimate is worth */
    const int r = range_of(conf);
    const double shared = ((double)all->right[place][r] + TRUST_CONFIDENCE * probability(conf)) / ((double)all->tried[place][r] + TRUST_CONFIDENCE);
    return ((double)own->right[place][r] + TRUST_ALL * shared) / ((double)own->tried[place][r] + TRUST_ALL);
}

void aff__time_note(double *table, int n, double ns)
{
    const double old = table[n];
    if (old <= 0)
        table[n] = ns;
    else /* one slow pass (the machine did something else) moves it little */
        table[n] += ((ns < 2 * old ? ns : 2 * old) - old) / 8;
}

double aff__time_of(const double *table, int n)
{
    int lo = n, hi = n;
    while (lo > 0 && table[lo] <= 0) lo--;
    while (hi <= AFF_PASS_ROWS && table[hi] <= 0) hi++;
    const bool below = lo > 0, above = hi <= AFF_PASS_ROWS;
    if (below && above && hi > lo) return table[lo] + (table[hi] - table[lo]) * (n - lo) / (hi - lo);
    return below ? table[lo] : above ? table[hi] : 0;
}

double aff__offer_gain(const aff_offer *o, int take)
{
    double all = 1, gain = 0;
    for (int j = 0; j < take; j++) gain += all *= o->chance[j];
    return gain;
}

int aff__share_rows(aff_offer *o, int count, int spare, const double *verify, double price)
{
    double chain[AFF_PASS_ROWS], gain = 0, best = 0; /* chain: that all taken so far are accepted */
    int order[AFF_PASS_ROWS], given = 0, keep = 0;
    for (int i = 0; i < count; i++) {
        o[i].take = 0;
        chain[i] = 1;
    }
    const double base = verify ? aff__time_of(verify, count) : 0;
    while (given < spare) {
        int at = -1;
        double most = -1;
        for (int i = 0; i < count; i++) {
            if (o[i].take == o[i].n || chain[i] * o[i].chance[o[i].take] <= most) continue;
            at = i;
            most = chain[i] * o[i].chance[o[i].take];
        }
        if (at < 0) break;
        chain[at] = most;
        o[at].take++;
        order[given++] = at;
        gain += most;
        const double worth = verify ? gain - price * (aff__time_of(verify, count + given) - base) : given;
        if (worth > best) {
            best = worth;
            keep = given;
        }
    }
    while (given > keep) o[order[--given]].take--;
    return keep;
}
