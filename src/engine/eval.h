/* eval.h - how far one model's predictions are from another's: the figures of one position, and their statistics.
 *
 * All sums are double, in ascending order, so the figures are a pure function of the logits. Natural logarithms. */
#ifndef AFF_ENGINE_EVAL_H
#define AFF_ENGINE_EVAL_H
#include "base/status.h"

/* What is known of the reference's logits at one position: all of them (id NULL, n the vocabulary), or the n largest
 * and the mass of the others. */
typedef struct aff_eval_ref {
    int n;
    const int32_t *id;  /* [n] distinct; NULL: 0 .. n-1 */
    const float *logit; /* [n] */
    double lse;         /* log of the sum of exp over the whole vocabulary */
    double rest;        /* probability of the ids that are not listed, 0 if all are */
    float target;       /* logit of the token that followed */
} aff_eval_ref;

typedef struct aff_eval_row {
    double nll, ref_nll;  /* -log p(token that followed) */
    double kl;            /* sum p log(p / q), p the reference; ids not listed count as one: then a lower bound */
    int32_t top, ref_top; /* the most likely token, the lowest id among equals */
    int common5;          /* of the reference's five most likely, those that are among the other's five */
} aff_eval_row;

/* log sum exp of l[0..n). A logit that is not finite is an error. */
aff_status aff__eval_lse(const float *l, int n, double *lse, aff_error *err);
/* The k <= n ids of the largest logits, largest first, the lower id first among equals. k <= 4096. */
void aff__eval_top(const float *l, int n, int k, int32_t *ids);
/* A whole row as a reference. target: the token that followed. */
aff_status aff__eval_full(const float *l, int vocab, int32_t target, aff_eval_ref *out, aff_error *err);
/* ref NULL: only nll and top are set. used: vocab bytes of scratch, zero before and after; needed where ref->id is not
 * NULL. */
aff_status aff__eval_compare(const aff_eval_ref *ref, const float *l, int vocab, int32_t target, uint8_t *used,
                             aff_eval_row *out, aff_error *err);

typedef struct aff_eval_stat {
    int64_t n;
    double mean, se;         /* se: standard deviation (n-1) / sqrt(n), positions taken as independent; 0 for n = 1 */
    double median, p99, max; /* order statistics: the smallest value that at least half (99 %) of all do not exceed */
} aff_eval_stat;
/* n >= 1 finite values. */
aff_status aff__eval_stat(const double *v, int64_t n, aff_eval_stat *out, aff_error *err);
/* A share of n: mean and sqrt(p (1-p) / n). */
void aff__eval_share(int64_t hits, int64_t n, double *share, double *se);

/* The figures of a run. Agreement: the share of positions with the same most likely token; the mean share of the
 * reference's five most likely tokens that are among the other's five. */
typedef struct aff_eval_summary {
    int64_t positions;
    aff_eval_stat nll, ref_nll, delta, kl; /* delta: nll - ref_nll, position by position; perplexity is exp(nll.mean) */
    double top1, top1_se, top5, top5_se;
} aff_eval_summary;
/* Rows 0..n-1 in sequences of `chunk`, the first `skip` rows of each left out. with_ref: the figures that need a
 * reference too. of5: 5, or the vocabulary if that is smaller. At least one row must be left. */
aff_status aff__eval_summarise(const aff_eval_row *row, int64_t n, int64_t chunk, int64_t skip, bool with_ref, int of5,
                               aff_eval_summary *out, aff_error *err);
#endif
