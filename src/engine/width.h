/* width.h - how many drafted tokens a pass verifies. Nothing here touches results: only time.
 *
 * A drafted token helps if it and all before it are accepted. Its chance is measured: for every place of the block and every
 * range of the draft's confidence, how often it turned out to be the text's token. Every draft is scored against the text as
 * the text appears, however few of its tokens were verified, so the counts do not depend on the widths chosen. A sequence's own
 * counts are weighed against those of all sequences, and these against the confidence itself.
 *
 * A pass of R rows takes V(R), measured. With the rate at which tokens come (tokens per ns so far, lately) as the price of
 * time, the best number of drafted rows maximises expected accepted tokens - price * V(R): the rule that maximises tokens per
 * time in the long run. What a draft pass costs, D, is spent by the time one chooses the width; whether to draft at all is decided
 * from what the drafts before were worth beyond that. */
#ifndef AFF_ENGINE_WIDTH_H
#define AFF_ENGINE_WIDTH_H
#include <stdbool.h>
#include <stdint.h>

enum { AFF_MAX_WIDTH = 5, AFF_PASS_ROWS = 16, AFF_CONFIDENCES = 8 };

/* How often place j, drafted with a confidence in range c, was right when all before it were. Old counts fade. */
typedef struct aff_calibration {
    float tried[AFF_MAX_WIDTH][AFF_CONFIDENCES], right[AFF_MAX_WIDTH][AFF_CONFIDENCES];
} aff_calibration;
void aff__calibration_note(aff_calibration *c, int place, float conf, bool right);
/* The chance, by a sequence's own counts and those of all. conf: a logit, NaN counts as the lowest. */
double aff__calibration_chance(const aff_calibration *own, const aff_calibration *all, int place, float conf);

/* Measured times, ns: verify[R] of a pass of R rows, draft[S] of a draft of S sequences; 0: not measured yet. */
typedef struct aff_pass_times {
    double verify[AFF_PASS_ROWS + 1], draft[AFF_PASS_ROWS + 1];
} aff_pass_times;
void aff__time_note(double *table, int n, double ns);
/* table[n], from its neighbours if that was never measured: on a line between two, or the nearest below (so that what was never
 * tried looks cheap and gets tried), else the nearest above. 0 when nothing was measured. */
double aff__time_of(const double *table, int n);

/* One sequence's drafted block: chance[j] as above; take: how many of its tokens to verify (out). */
typedef struct aff_offer {
    int n; /* 0 .. AFF_MAX_WIDTH */
    double chance[AFF_MAX_WIDTH];
    int take;
} aff_offer;
/* Gives at most `spare` rows to the offers, the likeliest to be accepted first. verify NULL: all of them; else as many as are
 * worth their time at `price` (tokens per ns). Returns the rows given. */
int aff__share_rows(aff_offer *o, int count, int spare, const double *verify, double price);
/* Expected accepted tokens of the first `take`. */
double aff__offer_gain(const aff_offer *o, int take);
#endif
