#include "engine/width.h"
#include <math.h>

/* Weights, in tokens of even chance (a quarter each): what the prior counts, and the bound. */
static const double PLACE_PRIOR = 2, PLACE_MOST = 40, OWN_PRIOR = 2, OWN_MOST = 20, SLOPE_PRIOR = 20, SLOPE_MOST = 400;
static const double SURE = 6; /* confidences beyond are cut */

static double cut(float conf)
{
    return conf >= -SURE ? (conf < SURE ? (double)conf : SURE) : -SURE; /* NaN: the lowest */
}

double aff__calibration_chance(const aff_calibration *c, const aff_leaning *own, int place, float conf)
{
    return 1 / (1 + exp(-((1 + c->slope) * cut(conf) + c->place[place] + own->shift)));
}

static void step(double *value, double *weight, double prior, double most, double error, double w)
{
    *weight = fmin(*weight + w, most);
    *value += error / (prior + *weight);
}

void aff__calibration_note(aff_calibration *c, aff_leaning *own, int place, float conf, bool right)
{
    const double p = aff__calibration_chance(c, own, place, conf), x = cut(conf), error = (right ? 1 : 0) - p;
    const double w = p * (1 - p) + 0.02; /* a token that was almost certain says little, but not nothing */
    step(&own->shift, &own->weight, OWN_PRIOR, OWN_MOST, error, w);
    step(&c->place[place], &c->place_weight[place], PLACE_PRIOR, PLACE_MOST, error, w);
    step(&c->slope, &c->slope_weight, SLOPE_PRIOR, SLOPE_MOST, error * x, w * x * x);
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
