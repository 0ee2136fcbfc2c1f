/* search with AVX-512: 16 entries, one box, at once. */
#include "quant/search.h"
#if defined(__x86_64__)
#include <immintrin.h>

static inline __m512 distances(const aff_search_table *s, unsigned box, const __m512 t[4], const __m512 w[4])
{
    __m512 sum = _mm512_setzero_ps();
    for (int p = 0; p < 4; p++) {
        __m512 d = _mm512_sub_ps(_mm512_load_ps(s->c[p] + box * AFF_SEARCH_BOX), t[p]);
        sum = _mm512_fmadd_ps(_mm512_mul_ps(w[p], d), d, sum);
    }
    return sum;
}

/* Boxes whose bound is at most `most`. */
static inline uint64_t boxes_within(const aff_search_table *s, const __m512 t[4], const __m512 w[4], float most)
{
    uint64_t mask = 0;
    for (int b = 0; b < AFF_SEARCH_BOXES; b += 16) {
        __m512 sum = _mm512_setzero_ps();
        for (int p = 0; p < 4; p++) {
            __m512 under = _mm512_sub_ps(_mm512_load_ps(s->lo[p] + b), t[p]),
                   over = _mm512_sub_ps(t[p], _mm512_load_ps(s->hi[p] + b));
            __m512 d = _mm512_max_ps(_mm512_max_ps(under, over), _mm512_setzero_ps());
            sum = _mm512_fmadd_ps(_mm512_mul_ps(w[p], d), d, sum);
        }
        mask |= (uint64_t)_mm512_cmp_ps_mask(sum, _mm512_set1_ps(most), _CMP_LE_OQ) << b;
    }
    return mask;
}

float aff__search_avx512(const aff_search_table *s, const float *tt, const float *ww, const uint16_t *seed, int n,
                         float limit, uint16_t *pos)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    float sum = 0;
    for (int q = 0; q < n; q++) {
        __m512 t[4], w[4];
        for (int p = 0; p < 4; p++) {
            t[p] = _mm512_set1_ps(tt[4 * q + p]);
            w[p] = _mm512_set1_ps(ww[4 * q + p]);
        }
        float bound = _mm512_reduce_min_ps(distances(s, seed[q] / AFF_SEARCH_BOX, t, w)), rest = limit - sum;
        __m512 best = _mm512_set1_ps(__builtin_inff());
        __m512i who = lanes;
        for (uint64_t mask = boxes_within(s, t, w, bound < rest ? bound : rest); mask; mask &= mask - 1) {
            unsigned box = (unsigned)__builtin_ctzll(mask);
            __m512 d = distances(s, box, t, w);
            __mmask16 less = _mm512_cmp_ps_mask(d, best, _CMP_LT_OQ);
            best = _mm512_mask_mov_ps(best, less, d);
            who = _mm512_mask_add_epi32(who, less, lanes, _mm512_set1_epi32((int)(box * AFF_SEARCH_BOX)));
        }
        float least = _mm512_reduce_min_ps(best);
        __mmask16 those = _mm512_cmp_ps_mask(best, _mm512_set1_ps(least), _CMP_EQ_OQ);
        pos[q] = (uint16_t)_mm512_mask_reduce_min_epu32(those, who);
        if (least > rest) return limit;
        sum += least;
    }
    return sum;
}
#endif
