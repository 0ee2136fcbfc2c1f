/* search with AVX2 and FMA: 8 entries, half a box, at once. */
#include "quant/search.h"
#if defined(__x86_64__)
#include <immintrin.h>

static inline __m256 distances(const aff_search_table *s, unsigned at, const __m256 t[4], const __m256 w[4])
{
    __m256 sum = _mm256_setzero_ps();
    for (int p = 0; p < 4; p++) {
        __m256 d = _mm256_sub_ps(_mm256_load_ps(s->c[p] + at), t[p]);
        sum = _mm256_fmadd_ps(_mm256_mul_ps(w[p], d), d, sum);
    }
    return sum;
}

static inline float least_of(__m256 v)
{
    __m128 a = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_min_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_min_ss(a, _mm_shuffle_ps(a, a, 1)));
}

/* Boxes whose bound is at most `most`. */
static inline uint64_t boxes_within(const aff_search_table *s, const __m256 t[4], const __m256 w[4], float most)
{
    uint64_t mask = 0;
    for (int b = 0; b < AFF_SEARCH_BOXES; b += 8) {
        __m256 sum = _mm256_setzero_ps();
        for (int p = 0; p < 4; p++) {
            __m256 under = _mm256_sub_ps(_mm256_load_ps(s->lo[p] + b), t[p]),
                   over = _mm256_sub_ps(t[p], _mm256_load_ps(s->hi[p] + b));
            __m256 d = _mm256_max_ps(_mm256_max_ps(under, over), _mm256_setzero_ps());
            sum = _mm256_fmadd_ps(_mm256_mul_ps(w[p], d), d, sum);
        }
        mask |= (uint64_t)(unsigned)_mm256_movemask_ps(_mm256_cmp_ps(sum, _mm256_set1_ps(most), _CMP_LE_OQ)) << b;
    }
    return mask;
}

float aff__search_avx2(const aff_search_table *s, const float *tt, const float *ww, const uint16_t *seed, int n,
                       float limit, uint16_t *pos)
{
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    float sum = 0;
    for (int q = 0; q < n; q++) {
        __m256 t[4], w[4];
        for (int p = 0; p < 4; p++) {
            t[p] = _mm256_set1_ps(tt[4 * q + p]);
            w[p] = _mm256_set1_ps(ww[4 * q + p]);
        }
        unsigned first = seed[q] / AFF_SEARCH_BOX * AFF_SEARCH_BOX;
        float bound = least_of(_mm256_min_ps(distances(s, first, t, w), distances(s, first + 8, t, w))),
              rest = limit - sum;
        __m256 best = _mm256_set1_ps(__builtin_inff());
        __m256i who = lanes;
        for (uint64_t mask = boxes_within(s, t, w, bound < rest ? bound : rest); mask; mask &= mask - 1) {
            unsigned at = (unsigned)__builtin_ctzll(mask) * AFF_SEARCH_BOX;
            for (unsigned half = 0; half < 2; half++, at += 8) {
                __m256 d = distances(s, at, t, w), less = _mm256_cmp_ps(d, best, _CMP_LT_OQ);
                best = _mm256_blendv_ps(best, d, less);
                who = _mm256_blendv_epi8(who, _mm256_add_epi32(lanes, _mm256_set1_epi32((int)at)),
                                         _mm256_castps_si256(less));
            }
        }
        float least = least_of(best);
        __m256i those = _mm256_castps_si256(_mm256_cmp_ps(best, _mm256_set1_ps(least), _CMP_EQ_OQ));
        /* Others become 2^31 - 1 and lose. */
        who = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fffffff), who, those);
        __m128i a = _mm_min_epi32(_mm256_castsi256_si128(who), _mm256_extracti128_si256(who, 1));
        a = _mm_min_epi32(a, _mm_shuffle_epi32(a, 0x4e));
        a = _mm_min_epi32(a, _mm_shuffle_epi32(a, 0xb1));
        pos[q] = (uint16_t)_mm_cvtsi128_si32(a);
        if (least > rest) return limit;
        sum += least;
    }
    return sum;
}
#endif
