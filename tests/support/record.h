/* record.h - keeps what a forward pass traces, and judges rows of results against golden ones. */
#ifndef AFF_TEST_RECORD_H
#define AFF_TEST_RECORD_H
#include "model/forward.h"

typedef struct record record;

/* Planes of `rows` rows each; `sel` rows are padded with -1 to topk entries. Fails the test without memory. */
record *record_new(int rows, int topk);
void record_free(record *r);
/* An aff_trace_fn; ctx is the record. A row that is traced again replaces the older one. */
void record_trace(void *ctx, const char *what, int layer, int row0, const void *data, int rows, int width);
/* Row `row` of a traced plane; fails the test if it was never traced. */
const float *record_row(const record *r, const char *what, int layer, int64_t row);
const int32_t *record_ids(const record *r, const char *what, int layer, int64_t row);

/* Errors of one tensor over rows, collected and then judged. */
typedef struct errors {
    double *e;
    size_t n, cap;
} errors;
void errors_add(errors *s, double e);
/* Prints the line of the parity table (if record_verbose), fails the test if the median or the worst is above its gate;
 * `loose` rows in a hundred may be up to loose_gate instead. Empties s; no rows at all fails too. */
void errors_judge(errors *s, const char *model, const char *mode, const char *tensor, double median_gate, double gate);
void errors_judge_loose(errors *s, const char *model, const char *mode, const char *tensor, double median_gate,
                        double gate, double loose, double loose_gate);
/* One line for a count of things that must be equal: fails if wrong != 0. near: allowed differences at ties, listed by
 * the caller. */
void counts_judge(const char *model, const char *mode, const char *tensor, int64_t compared, int64_t wrong,
                  int64_t near);

extern bool record_verbose;
/* Sets record_verbose from the argument -v; prints the head of the table. */
void record_arguments(int argc, char **argv);

/* True if a[0..n) and b[0..n) hold the same values in any order (n <= 64). */
bool same_set(const int32_t *a, const int32_t *b, int n);
#endif
