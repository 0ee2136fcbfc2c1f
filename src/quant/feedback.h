/* feedback.h - error feedback: what the rounding of earlier columns asks of later ones.
 *
 * A row that is off by d costs d H d^T where H = E[x x^T] are the second moments of what the matrix multiplies. With
 * quads of columns in ascending order, H = M^T D M: D block-diagonal of 4 x 4, M unit lower triangular in quads. The
 * cost is then a sum over quads q of e_q^T D_q e_q with e_q = d_q + sum_{j<q} M_qj d_j: aiming at w_q + sum_{j<q} M_qj
 * d_j, a quad cancels what the ones before it left. */
#ifndef AFF_QUANT_FEEDBACK_H
#define AFF_QUANT_FEEDBACK_H
#include "base/cpu.h"
#include "base/threads.h"

enum { AFF_FEEDBACK_ROWS = 32, AFF_FEEDBACK_COLS = 16 }; /* rows at a time; columns of a panel */

/* out [rows][16] = sum over j < n of panel [n][16] by d [n][32]: fma(panel[j][c], d[j][r], sum), j ascending from 0, on
 * every path. */
typedef void (*aff_feedback_fn)(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out);

typedef struct aff_feedback {
    uint64_t n, cap;
    float *metric; /* [n] diagonals of the D_q, mean 1: what squared errors of the columns count */
    float *panels; /* of 16 columns: rows j = 0 .. first column + 15, M's entries, 0 unless j lies in an earlier quad */
    double *work;  /* [n][n] */
    double (*m)[4];
    aff_feedback_fn pull;
} aff_feedback;

/* Room for the factors of up to n columns, a multiple of 16. */
aff_status aff__feedback_create(aff_feedback **out, uint64_t n, aff_error *err);
void aff__feedback_free(aff_feedback *f);
/* Factors second moments of n columns: their upper triangle row by row, n(n+1)/2 float32 of any alignment, with 0.3 of
 * the mean of their diagonal added to it - the inputs of a quantised model are not those that were measured.
 * AFF_E_FORMAT if that is not positive definite. The result does not depend on the pool. */
aff_status aff__feedback_factor(aff_feedback *f, uint64_t n, const uint8_t *moments, aff_pool *pool, aff_error *err);

static inline const float *aff__feedback_panel(const aff_feedback *f, uint64_t block)
{
    return f->panels + block * (block + 1) / 2 * 256;
}

/* The paths, for aff__feedback_path. */
void aff__feedback_scalar(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out);
void aff__feedback_avx2(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out);
void aff__feedback_avx512(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out);
aff_feedback_fn aff__feedback_path(aff_cpu_level level);
#endif
