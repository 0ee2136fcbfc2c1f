/* search.h - the best codebook entry for a quad of MXFP4 weights, with and without column importance: what the default
 * encoder and the fit of its codebook stand on.
 *
 * A quad of E2M1 weights has 2^16 values, and with row scales that are powers of two its place in the codebook's space
 * is E2M1 * 2^j for a few j. So the nearest entries without importance are tabulated. With importance, entries stand in
 * 64 boxes of 16 (a k-d tree's leaves); boxes that cannot hold the best are skipped, the rest is compared 8 or 16 at
 * once.
 *
 * Distances: s = 0; for p ascending: d = c_p - t_p; s = fma(w_p * d, d, s), float32. The answer is the smallest
 * distance, of equals the lowest position in the order of boxes, on every path bit for bit: each rounding step is
 * monotone, so a box's bound, computed in the same steps, never exceeds the computed distance of an entry in it. */
#ifndef AFF_QUANT_SEARCH_H
#define AFF_QUANT_SEARCH_H
#include "base/cpu.h"
#include "quant/codebook.h"

enum { AFF_SEARCH_JMIN = -12, AFF_SEARCH_JMAX = 2, AFF_SEARCH_J = AFF_SEARCH_JMAX - AFF_SEARCH_JMIN + 1 };
enum { AFF_SEARCH_BOXES = 64, AFF_SEARCH_BOX = 16, AFF_QUADS = 65536 };

typedef struct aff_search_table {
    float c[4][AFF_CB_ENTRIES];                             /* entries in box order, by component */
    float lo[4][AFF_SEARCH_BOXES], hi[4][AFF_SEARCH_BOXES]; /* the boxes' bounds */
    uint16_t id[AFF_CB_ENTRIES];                            /* position -> number of the entry */
} aff_search_table;

/* Of n quads t [n][4] with weights w [n][4]: positions of the best entries; returns the sum of their distances,
 * q ascending. seed: positions that are likely good. Returns `limit` as soon as a quad's distance exceeds limit - sum
 * so far; pos is then unspecified. */
typedef float (*aff_search_fn)(const aff_search_table *s, const float *t, const float *w, const uint16_t *seed, int n,
                               float limit, uint16_t *pos);

typedef struct aff_search {
    aff_search_table table[AFF_CB_VARIANTS];
    float *rank;    /* [j][quad][variant][g]: distance of the nearest entry; g: bit 0 negated, bit 1 rotated by two */
    uint16_t *near; /* [j][variant][quad]: its position, g = 0 */
    aff_search_fn best;
} aff_search;

/* A quad is its four nibbles, the first lowest. */
static inline uint16_t aff__quad_turn(uint16_t q, unsigned g)
{
    q ^= g & 1 ? 0x8888 : 0;
    return g & 2 ? (uint16_t)(q >> 8 | q << 8) : q;
}
static inline const float *aff__search_rank(const aff_search *s, int j, uint16_t quad)
{
    return s->rank + ((size_t)(j - AFF_SEARCH_JMIN) * AFF_QUADS + quad) * 8;
}
static inline uint16_t aff__search_near(const aff_search *s, int j, unsigned v, uint16_t quad)
{
    return s->near[((size_t)(j - AFF_SEARCH_JMIN) * 2 + v) * AFF_QUADS + quad];
}

/* The tables of cb for j in [from, AFF_SEARCH_JMAX] (36 MiB for all); asking for others is a mistake. The path is that
 * of aff__cpu_level(). */
aff_status aff__search_create(aff_search **out, aff_cb_table cb[AFF_CB_VARIANTS], int from, aff_pool *pool,
                              aff_error *err);
void aff__search_free(aff_search *s);

/* The paths, for aff__search_path. */
float aff__search_scalar(const aff_search_table *s, const float *t, const float *w, const uint16_t *seed, int n,
                         float limit, uint16_t *pos);
float aff__search_avx2(const aff_search_table *s, const float *t, const float *w, const uint16_t *seed, int n,
                       float limit, uint16_t *pos);
float aff__search_avx512(const aff_search_table *s, const float *t, const float *w, const uint16_t *seed, int n,
                         float limit, uint16_t *pos);
aff_search_fn aff__search_path(aff_cpu_level level);
#endif
