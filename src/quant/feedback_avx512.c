/* feedback with AVX-512: a panel's 16 columns at once, for 16 rows. */
#include "quant/feedback.h"
#if defined(__x86_64__)
#include <immintrin.h>

enum { AT_ONCE = 16 };

void aff__feedback_avx512(const float *panel, const float *d, uint64_t n, uint64_t rows, float *out)
{
    for (uint64_t r0 = 0; r0 < rows; r0 += AT_ONCE) {
        __m512 sum[AT_ONCE];
        for (int r = 0; r < AT_ONCE; r++) sum[r] = _mm512_setzero_ps();
        for (uint64_t j = 0; j < n; j++) {
            const __m512 m = _mm512_loadu_ps(panel + j * AFF_FEEDBACK_COLS);
            const float *x = d + j * AFF_FEEDBACK_ROWS + r0;
            for (int r = 0; r < AT_ONCE; r++) sum[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x[r]), sum[r]);
        }
        for (uint64_t r = 0; r < AT_ONCE && r0 + r < rows; r++)
            _mm512_storeu_ps(out + (r0 + r) * AFF_FEEDBACK_COLS, sum[r]);
    }
}
#endif
