#include "quant/feedback.h"
#include "base/mem.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { QUAD = 4, COLS = AFF_FEEDBACK_COLS, LINES = 16 }; /* LINES: of the matrix, a task */

#define DAMPING 0.3

aff_status aff__feedback_create(aff_feedback **out, uint64_t n, aff_error *err)
{
    static const char what[] = "error feedback";
    aff_feedback *f;
    uint64_t blocks = n / COLS;
    *out = NULL;
    AFF_TRY(aff__calloc(&f, 1, sizeof *f, what, err));
    f->cap = n;
    f->pull = aff__feedback_path(aff__cpu_level());
    aff_status st = aff__calloc(&f->metric, n, sizeof *f->metric, what, err);
    if (st == AFF_OK) st = aff__calloc(&f->panels, blocks * (blocks + 1) / 2, 256 * sizeof(float), what, err);
    if (st == AFF_OK) st = aff__calloc(&f->work, n, n * sizeof(double), what, err);
    if (st == AFF_OK) st = aff__calloc(&f->m, n, sizeof *f->m, what, err);
    if (st == AFF_OK)
        *out = f;
    else
        aff__feedback_free(f);
    return st;
}

void aff__feedback_free(aff_feedback *f)
{
    if (!f) return;
    free(f->metric);
    free(f->panels);
    free(f->work);
    free(f->m);
    free(f);
}

/* ---- factors ---- */

/* Inverse of a symmetric positive definite 4 x 4 by Cholesky; false if it is not. */
static bool invert(const double a[QUAD][QUAD], double out[QUAD][QUAD])
{
    double l[QUAD][QUAD] = {{0}}, v[QUAD][QUAD] = {{0}};
    for (int i = 0; i < QUAD; i++)
        for (int j = 0; j <= i; j++) {
            double s = a[i][j];
            for (int k = 0; k < j; k++) s -= l[i][k] * l[j][k];
            if (i == j && !(s > 0)) return false;
            l[i][j] = i == j ? sqrt(s) : s / l[j][j];
        }
    for (int c = 0; c < QUAD; c++)
        for (int i = c; i < QUAD; i++) {
            double s = i == c ? 1 : 0;
            for (int k = c; k < i; k++) s -= l[i][k] * v[k][c];
            v[i][c] = s / l[i][i];
        }
    for (int i = 0; i < QUAD; i++)
        for (int j = 0; j < QUAD; j++) {
            out[i][j] = 0;
            for (int k = i > j ? i : j; k < QUAD; k++) out[i][j] += v[k][i] * v[k][j];
        }
    return true;
}

typedef struct step {
    aff_feedback *f;
    uint64_t q; /* first column of the quad */
} step;

/* Takes the quad's share out of the columns before it. */
static void eliminate(void *ctx, int64_t task, int thread)
{
    const step *t = ctx;
    const uint64_t n = t->f->n, from = (uint64_t)task * LINES;
    const double *a = t->f->work + t->q * n, *b = a + n, *c = b + n, *d = c + n;
    (void)thread;
    for (uint64_t j = from; j < from + LINES && j < t->q; j++) {
        const double *m = t->f->m[j];
        double *restrict row = t->f->work + j * n;
        for (uint64_t k = 0; k <= j; k++) row[k] -= (m[0] * a[k] + m[1] * b[k]) + (m[2] * c[k] + m[3] * d[k]);
    }
}

/* M_qj = D_q^-1 S_qj for the columns j before the quad, into its panel and f->m. */
static void solve(aff_feedback *f, uint64_t q, double inverse[QUAD][QUAD])
{
    float *panel = f->panels + (size_t)(aff__feedback_panel(f, q / COLS) - f->panels);
    const double *s = f->work + q * f->n;
    for (uint64_t j = 0; j < q; j++)
        for (uint64_t i = 0; i < QUAD; i++) {
            double v = 0;
            for (uint64_t k = 0; k < QUAD; k++) v += inverse[i][k] * s[k * f->n + j];
            f->m[j][i] = v;
            panel[j * COLS + q % COLS + i] = (float)v;
        }
}

/* The lower triangle of H, damped. */
static void spread_out(aff_feedback *f, const uint8_t *moments)
{
    const uint64_t n = f->n;
    double trace = 0;
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t j = i; j < n; j++, moments += 4) {
            float v;
            memcpy(&v, moments, 4);
            f->work[j * n + i] = (double)v;
            if (i == j) trace += (double)v;
        }
    for (uint64_t i = 0; i < n; i++) f->work[i * n + i] += DAMPING * (trace / (double)n);
}

aff_status aff__feedback_factor(aff_feedback *f, uint64_t n, const uint8_t *moments, aff_pool *pool, aff_error *err)
{
    const uint64_t blocks = n / COLS;
    double sum = 0;
    if (!n || n % COLS || n > f->cap)
        return aff__fail(err, AFF_E_INVALID,
                         "error feedback: %" PRIu64 " columns, expected a multiple of 16 up to %" PRIu64, n, f->cap);
    f->n = n;
    memset(f->panels, 0, (size_t)(blocks * (blocks + 1) / 2) * 256 * sizeof(float));
    spread_out(f, moments);
    for (uint64_t q = n; q > 0;) {
        double d[QUAD][QUAD], inverse[QUAD][QUAD];
        q -= QUAD;
        for (uint64_t i = 0; i < QUAD; i++) {
            for (uint64_t j = 0; j <= i; j++) d[i][j] = d[j][i] = f->work[(q + i) * n + q + j];
            sum += d[i][i];
        }
        if (!invert(d, inverse))
            return aff__fail(err, AFF_E_FORMAT,
                             "second moments: not positive definite at columns %" PRIu64 " to %" PRIu64, q, q + 3);
        for (uint64_t i = 0; i < QUAD; i++) f->metric[q + i] = (float)d[i][i];
        solve(f, q, inverse);
        aff__pool_run(pool, eliminate, &(step){f, q}, (int64_t)((q + LINES - 1) / LINES));
    }
    for (uint64_t i = 0; i < n; i++) f->metric[i] = (float)((double)f->metric[i] / (sum / (double)n));
    return AFF_OK;
}

/* ---- feedback ---- */

void aff__feedback_scalar(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out)
{
    for (uint64_t r = 0; r < rows; r++)
        for (int c = 0; c < COLS; c++) {
            float s = 0;
            for (uint64_t j = 0; j < n; j++) s = fmaf(panel[j * COLS + (uint64_t)c], d[j * AFF_FEEDBACK_ROWS + r], s);
            out[r * COLS + (uint64_t)c] = s;
        }
}

aff_feedback_fn aff__feedback_path(aff_cpu_level level)
{
#if defined(__x86_64__)
    if (level >= AFF_CPU_AVX512) return aff__feedback_avx512;
    if (level >= AFF_CPU_AVX2) return aff__feedback_avx2;
#endif
    (void)level;
    return aff__feedback_scalar;
}
