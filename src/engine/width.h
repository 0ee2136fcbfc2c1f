/* width.h - how many drafted tokens a pass verifies. Nothing here touches results: only time.
 *
 * A drafted token helps if it and all before it are accepted. Its chance is the draft's own confidence, corrected by
 * what came of it: a logistic curve whose slope and shifts (one for every place of a block, one for the sequence) are
 * fitted as the text appears. Every draft is scored against the text, however few of its tokens were verified, so the
 * fit does not depend on the widths chosen.
 *
 * A pass of R rows takes V(R), measured. With the rate at which tokens come (tokens per ns so far, lately) as the price
 * of time, the best number of drafted rows maximises expected accepted tokens - price * V(R): the rule that maximises
 * tokens per time in the long run. What a draft pass costs, D, is spent by the time one chooses the width; whether to
 * draft at all is decided from what the drafts before were worth beyond that. */
#ifndef AFF_ENGINE_WIDTH_H
#define AFF_ENGINE_WIDTH_H
#include <stdbool.h>
#include <stdint.h>

enum { AFF_MAX_WIDTH = 5, AFF_PASS_ROWS = 16 };

/* chance = 1 / (1 + exp(-((1 + slope) conf + place[j] + own.shift))), conf cut to +-6. All zeros: the confidence as it
 * is. Each parameter moves by the error over the weight of what it has seen (a Newton step of its likelihood, the prior
 * counted in); weights are bounded, so that old text is forgotten. */
typedef struct aff_calibration {
    double slope, place[AFF_MAX_WIDTH], slope_weight, place_weight[AFF_MAX_WIDTH];
} aff_calibration; /* of all sequences */
typedef struct aff_leaning {
    double shift, weight;
} aff_leaning; /* of one sequence */
/* Place j was drafted with confidence conf, all before it were right, and it was `right`. */
void aff__calibration_note(aff_calibration *c, aff_leaning *own, int place, float conf, bool right);
double aff__calibration_chance(const aff_calibration *c, const aff_leaning *own, int place,
                               float conf); /* conf: a logit, NaN counts as the lowest */

/* Measured times, ns: verify[R] of a pass of R rows, draft[S] of a draft of S sequences, upkeep[S] of what a draft
 * needs even in a pass without proposals (MTP-1's own layer; 0 for others); 0: not measured yet. */
typedef struct aff_pass_times {
    double verify[AFF_PASS_ROWS + 1], draft[AFF_PASS_ROWS + 1], upkeep[AFF_PASS_ROWS + 1];
} aff_pass_times;
void aff__time_note(double *table, int n, double ns);
/* table[n], from its neighbours if that was never measured: on a line between two, or the nearest below (so that what
 * was never tried looks cheap and gets tried), else the nearest above. 0 when nothing was measured. */
double aff__time_of(const double *table, int n);

/* One sequence's drafted block: chance[j] as above; take: how many of its tokens to verify (out). */
typedef struct aff_offer {
    int n; /* 0 .. AFF_MAX_WIDTH */
    double chance[AFF_MAX_WIDTH];
    int take;
} aff_offer;
/* Gives at most `spare` rows to the offers, the likeliest to be accepted first. verify NULL: all of them; else as many
 * as are worth their time at `price` (tokens per ns). Returns the rows given. */
int aff__share_rows(aff_offer *o, int count, int spare, const double *verify, double price);
/* Expected accepted tokens of the first `take`. */
double aff__offer_gain(const aff_offer *o, int take);
#endif
