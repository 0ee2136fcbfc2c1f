/* foresee.c - a later layer's router on the present streams. Diagnosis; uses planes that the pass writes anew before it
 * reads them. */
#include "model/runner.h"
#include <math.h>

double aff__rank_value(aff_scoring scoring, double logit, double bias)
{
    switch (scoring) {
    case AFF_SQRTSOFTPLUS: return sqrt(logit > 30 ? logit : log1p(exp(logit))) + bias;
    case AFF_SIGMOID: return 1 / (1 + exp(-logit)) + bias;
    default: return logit + bias;
    }
}

const float *aff__runner_foresee(aff_runner *r, int l)
{
    const aff_net *n = r->net;
    const aff_config *c = &n->cfg;
    if (l < 0 || l >= n->layers || !n->layer[l].router.bias || !r->b->mem->host) return NULL;
    aff_backend *B = r->b;
    const aff_block *b = &n->layer[l];
    const int T = r->n, E = c->experts;
    B->hc_pre(B, &b->hc_ffn, r->X, T, c->hidden, b->ffn_norm, c->rms_eps, r->u, r->x, r->post, r->comb);
    aff__matmul(B, &b->gate, r->x, T, r->route);
    for (int64_t i = 0; i < (int64_t)T * E; i++)
        r->route[i] = (float)aff__rank_value(b->router.scoring, (double)r->route[i], (double)b->router.bias[i % E]);
    return r->route;
}
