/* predict.h - what the next layer will pick, from what a row has picked so far (spec runtime 21): a linear map fitted
 * to traces. The score of expert x in layer l is its bias plus the weights of the row's picks in layer l - 1 and of the
 * picks that the row before made in layer l, each a log-odds, so that scores order experts by how likely they are. */
#ifndef AFF_EXPERTS_PREDICT_H
#define AFF_EXPERTS_PREDICT_H
#include "experts/uses.h"
#include "format/profile.h"

/* score [experts] of layer >= 1. below, before: ids below `experts` (before NULL: not known). p must have maps. */
void aff__predict(const aff_profile *p, int layer, const int32_t *below, int n_below, const int32_t *before,
                  int n_before, float *score);
/* The `most` best, the best first, equal ones in ascending id; returns how many. O(experts x most). */
int aff__predict_top(const float *score, int experts, int most, int32_t *id);

typedef struct aff_fit {
    double halflife;       /* of the profile's counts, in rows before the last one; 0: all count alike */
    double prefill_weight; /* of a prompt's rows in it */
    int passes;            /* over the traces, for the maps; 0: none */
    double rate, shrink;   /* step, and what a weight loses in a pass */
    uint64_t from, to;     /* share of every trace's dispatches, in 2^-16: [from, to) is used */
    void (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *progress_ctx;
} aff_fit;
void aff__fit_init(aff_fit *f);
/* Profile (share of rows that picked the expert) and, with passes > 0, maps. All traces have the counts of the first.
 */
aff_status aff__fit_profile(aff_profile *out, const aff_uses *const *traces, int n, const aff_fit *f, aff_error *err);

/* How many of the picks were among the first `most` guesses of: */
typedef enum aff_guess {
    AFF_GUESS_POPULAR,
    AFF_GUESS_RECENT,
    AFF_GUESS_BEFORE,
    AFF_GUESS_COUNTS,
    AFF_GUESS_MAP,
    AFF_GUESSES
} aff_guess;
enum { AFF_GUESS_SIZES = 4 };
typedef struct aff_recall {
    int sizes[AFF_GUESS_SIZES]; /* guesses: picks, 8, 12, 16, at most the experts */
    int64_t picks;              /* per layer and in all */
    int64_t found[AFF_GUESSES][AFF_GUESS_SIZES];
} aff_recall;
/* recall [layers] (that of layer 0 stays empty), over rows of the share [from, to) of each trace, rows of all phases.
 * counts: conditional counts, learnt from `learn` over the share that the fit used; popular: p->use; recent: a decaying
 * count; before: what the row before picked, then the popular. */
aff_status aff__recall(aff_recall *recall, const aff_profile *p, const aff_uses *const *learn, int n_learn,
                       const aff_fit *learnt, const aff_uses *const *judge, int n_judge, uint64_t from, uint64_t to,
                       aff_error *err);
#endif
