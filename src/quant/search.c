#include "quant/search.h"
#include "base/mem.h"
#include "quant/numbers.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 2048 }; /* quads a task */

/* ---- boxes ---- */

typedef struct entry {
    float c[4];
    uint16_t id;
} entry;

static int compare(const entry *a, const entry *b, int axis)
{
    if (a->c[axis] != b->c[axis]) return a->c[axis] < b->c[axis] ? -1 : 1;
    return a->id < b->id ? -1 : 1; /* a total order: qsort need not be stable */
}
static int by0(const void *a, const void *b)
{
    return compare(a, b, 0);
}
static int by1(const void *a, const void *b)
{
    return compare(a, b, 1);
}
static int by2(const void *a, const void *b)
{
    return compare(a, b, 2);
}
static int by3(const void *a, const void *b)
{
    return compare(a, b, 3);
}

/* Halves along the widest axis until a box is left. */
static void split(entry *e, int n)
{
    static int (*const by[4])(const void *, const void *) = {by0, by1, by2, by3};
    int widest = 0;
    float width = -1;
    if (n == AFF_SEARCH_BOX) return;
    for (int p = 0; p < 4; p++) {
        float lo = e[0].c[p], hi = lo;
        for (int i = 1; i < n; i++) {
            lo = e[i].c[p] < lo ? e[i].c[p] : lo;
            hi = e[i].c[p] > hi ? e[i].c[p] : hi;
        }
        if (hi - lo > width) {
            width = hi - lo;
            widest = p;
        }
    }
    qsort(e, (size_t)n, sizeof *e, by[widest]);
    split(e, n / 2);
    split(e + n / 2, n / 2);
}

static void make_boxes(aff_search_table *s, const aff_cb_table cb)
{
    entry e[AFF_CB_ENTRIES];
    for (int i = 0; i < AFF_CB_ENTRIES; i++) {
        memcpy(e[i].c, cb[i], sizeof e[i].c);
        e[i].id = (uint16_t)i;
    }
    split(e, AFF_CB_ENTRIES);
    for (int i = 0; i < AFF_CB_ENTRIES; i++) {
        int b = i / AFF_SEARCH_BOX;
        s->id[i] = e[i].id;
        for (int p = 0; p < 4; p++) {
            float c = s->c[p][i] = e[i].c[p];
            if (i % AFF_SEARCH_BOX == 0 || c < s->lo[p][b]) s->lo[p][b] = c;
            if (i % AFF_SEARCH_BOX == 0 || c > s->hi[p][b]) s->hi[p][b] = c;
        }
    }
}

/* ---- the path without special instructions ---- */

static float distance(const aff_search_table *s, unsigned i, const float *t, const float *w)
{
    float sum = 0;
    for (int p = 0; p < 4; p++) {
        float d = s->c[p][i] - t[p];
        sum = fmaf(w[p] * d, d, sum);
    }
    return sum;
}

static float box_bound(const aff_search_table *s, unsigned b, const float *t, const float *w)
{
    float sum = 0;
    for (int p = 0; p < 4; p++) {
        float under = s->lo[p][b] - t[p], over = t[p] - s->hi[p][b];
        float d = under > over ? under : over;
        d = d > 0 ? d : 0;
        sum = fmaf(w[p] * d, d, sum);
    }
    return sum;
}

float aff__search_scalar(const aff_search_table *s, const float *t, const float *w, const uint16_t *seed, int n,
                         float limit, uint16_t *pos)
{
    float sum = 0;
    for (int q = 0; q < n; q++, t += 4, w += 4) {
        float best = distance(s, seed[q], t, w), rest = limit - sum;
        unsigned at = seed[q];
        for (unsigned b = 0; b < AFF_SEARCH_BOXES; b++) {
            if (box_bound(s, b, t, w) > (best < rest ? best : rest)) continue;
            for (unsigned i = b * AFF_SEARCH_BOX; i < (b + 1) * AFF_SEARCH_BOX; i++) {
                float d = distance(s, i, t, w);
                if (d < best || (d == best && i < at)) {
                    best = d;
                    at = i;
                }
            }
        }
        if (best > rest) return limit;
        pos[q] = (uint16_t)at;
        sum += best;
    }
    return sum;
}

aff_search_fn aff__search_path(aff_cpu_level level)
{
#if defined(__x86_64__)
    if (level >= AFF_CPU_AVX512) return aff__search_avx512;
    if (level >= AFF_CPU_AVX2) return aff__search_avx2;
#endif
    (void)level;
    return aff__search_scalar;
}

/* ---- tables of quads without importance ---- */

typedef struct filling {
    aff_search *s;
    float (*dist)[AFF_CB_VARIANTS][AFF_QUADS]; /* [j] */
    int from;
} filling;

static void quad_values(uint16_t q, int j, float t[4])
{
    for (int p = 0; p < 4; p++) t[p] = ldexpf(aff__e2m1_table[q >> (4 * p) & 15], j);
}

static void find_nearest(void *ctx, int64_t task, int thread)
{
    (void)thread;
    static const float one[4] = {1, 1, 1, 1};
    filling *f = ctx;
    int per_j = AFF_QUADS / CHUNK, j = f->from + (int)(task / per_j);
    uint16_t seed = 0;
    for (unsigned v = 0; v < AFF_CB_VARIANTS; v++) {
        for (int q = (int)(task % per_j) * CHUNK; q < (int)(task % per_j + 1) * CHUNK; q++) {
            float t[4], d;
            uint16_t pos;
            quad_values((uint16_t)q, j, t);
            d = f->s->best(&f->s->table[v], t, one, &seed, 1, INFINITY, &pos);
            f->s->near[((size_t)(j - AFF_SEARCH_JMIN) * 2 + v) * AFF_QUADS + (size_t)q] = seed = pos;
            f->dist[j - f->from][v][q] = d;
        }
    }
}

static void fill_rank(void *ctx, int64_t task, int thread)
{
    (void)thread;
    filling *f = ctx;
    int per_j = AFF_QUADS / CHUNK, j = (int)(task / per_j);
    for (int q = (int)(task % per_j) * CHUNK; q < (int)(task % per_j + 1) * CHUNK; q++) {
        float *r = f->s->rank + ((size_t)(j + f->from - AFF_SEARCH_JMIN) * AFF_QUADS + (size_t)q) * 8;
        for (unsigned v = 0; v < 2; v++)
            for (unsigned g = 0; g < 4; g++) r[v * 4 + g] = f->dist[j][v][aff__quad_turn((uint16_t)q, g)];
    }
}

aff_status aff__search_create(aff_search **out, aff_cb_table cb[AFF_CB_VARIANTS], int from, aff_pool *pool,
                              aff_error *err)
{
    static const char what[] = "codebook search tables";
    aff_search *s;
    filling f = {.from = from};
    int64_t tasks = (int64_t)(AFF_SEARCH_JMAX - from + 1) * (AFF_QUADS / CHUNK);
    *out = NULL;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, what, err));
    aff_status st = aff__calloc(&s->rank, (uint64_t)AFF_SEARCH_J * AFF_QUADS * 8, sizeof(float), what, err);
    if (st == AFF_OK) st = aff__calloc(&s->near, (uint64_t)AFF_SEARCH_J * AFF_QUADS * 2, sizeof *s->near, what, err);
    if (st == AFF_OK) st = aff__calloc(&f.dist, (uint64_t)(AFF_SEARCH_JMAX - from + 1), sizeof *f.dist, what, err);
    if (st != AFF_OK) {
        aff__search_free(s);
        return st;
    }
    f.s = s;
    s->best = aff__search_path(aff__cpu_level());
    for (int v = 0; v < AFF_CB_VARIANTS; v++) make_boxes(&s->table[v], cb[v]);
    aff__pool_run(pool, find_nearest, &f, tasks);
    aff__pool_run(pool, fill_rank, &f, tasks);
    free(f.dist);
    *out = s;
    return AFF_OK;
}

void aff__search_free(aff_search *s)
{
    if (!s) return;
    free(s->rank);
    free(s->near);
    free(s);
}
