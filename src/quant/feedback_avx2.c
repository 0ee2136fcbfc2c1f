/* feedback with AVX2: half a panel's columns at once, for 8 rows. */
#include "quant/feedback.h"
#if defined(__x86_64__)
#include <immintrin.h>

enum { AT_ONCE = 8, WIDTH = 8 };

static void pull(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out)
{
    __m256 sum[AT_ONCE];
    for (int r = 0; r < AT_ONCE; r++) sum[r] = _mm256_setzero_ps();
    for (uint64_t j = 0; j < n; j++) {
        const __m256 m = _mm256_loadu_ps(panel + j * AFF_FEEDBACK_COLS);
        const float *x = d + j * AFF_FEEDBACK_ROWS;
        for (int r = 0; r < AT_ONCE; r++) sum[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(x[r]), sum[r]);
    }
    for (uint64_t r = 0; r < AT_ONCE && r < rows; r++) _mm256_storeu_ps(out + r * AFF_FEEDBACK_COLS, sum[r]);
}

void aff__feedback_avx2(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out)
{
    for (uint64_t r = 0; r < rows; r += AT_ONCE)
        for (int c = 0; c < AFF_FEEDBACK_COLS; c += WIDTH)
            pull(panel + c, d + r, n, rows - r, out + r * AFF_FEEDBACK_COLS + c);
}
#endif
