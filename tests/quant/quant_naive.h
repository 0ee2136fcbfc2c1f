/* quant_naive.h - the codebook fit and the encoder read straight from spec quantiser 5-7: full scans, one bit at a
 * time. What the library's fast forms are compared with. Included by the tests of this room. */
#ifndef AFF_QUANT_NAIVE_H
#define AFF_QUANT_NAIVE_H
#include "base/rng.h"
#include "quant/codebook.h"
#include "quant/numbers.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static inline float naive_distance(const float *c, const float *x)
{
    float s = 0;
    for (int p = 0; p < 4; p++) s += (c[p] - x[p]) * (c[p] - x[p]);
    return s;
}

static inline int naive_scan(float (*cb)[4], const float *x, float *dist)
{
    int best = 0;
    for (int e = 1; e < 1024; e++)
        if (naive_distance(cb[e], x) < naive_distance(cb[best], x)) best = e;
    *dist = naive_distance(cb[best], x);
    return best;
}

/* Section 6 with the truncation of the earlier tool: a point just below -2.5 sees only what the edge cell lists. */
static inline int naive_compat(float (*cb)[4], const float *x, float *dist)
{
    int cell[4], edge = 0;
    for (int p = 0; p < 4; p++) {
        float t = (x[p] + 2.5f) * 5.0f;
        if (!(fabsf(t) < 1e6f)) return naive_scan(cb, x, dist);
        cell[p] = (int)t;
        if (cell[p] < 0 || cell[p] > 24) return naive_scan(cb, x, dist);
        edge |= t < 0;
    }
    if (!edge) return naive_scan(cb, x, dist);
    float least[1024], bound = INFINITY;
    for (int e = 0; e < 1024; e++) {
        float lo[4], hi[4];
        for (int p = 0; p < 4; p++) {
            float a = -2.5f + (float)cell[p] * 0.2f, b = a + 0.2f, c = cb[e][p];
            float near = c < a ? a - c : c > b ? c - b : 0, far = fmaxf(fabsf(c - a), fabsf(c - b));
            lo[p] = near * near;
            hi[p] = far * far;
        }
        least[e] = ((lo[0] + lo[1]) + lo[2]) + lo[3];
        float most = ((hi[0] + hi[1]) + hi[2]) + hi[3];
        if (most < bound) bound = most;
    }
    int best = -1;
    for (int e = 0; e < 1024; e++) {
        if (least[e] > bound) continue;
        if (best < 0 || naive_distance(cb[e], x) < naive_distance(cb[best], x)) best = e;
    }
    *dist = naive_distance(cb[best], x);
    return best;
}

static inline void naive_put_bits(uint8_t *plane, uint64_t at, unsigned value, int bits)
{
    for (int i = 0; i < bits; i++, at++)
        if (value >> i & 1) plane[at >> 3] |= (uint8_t)(1u << (at & 7));
}

/* Section 7, dtype 33: zeroed planes codes [rows*cols*5/16], fields [rows*cols*3/64], row scales [rows]. */
static inline void naive_encode(float (*cb)[1024][4], int compat, const float *w, int rows, int cols, uint8_t *codes,
                                uint8_t *fields, uint16_t *scales)
{
    int (*nearest)(float(*)[4], const float *, float *) = compat ? naive_compat : naive_scan;
    for (int r = 0; r < rows; r++) {
        const float *row = w + r * cols;
        float rmax = 0;
        for (int c = 0; c < cols; c++) rmax = fmaxf(rmax, fabsf(row[c]));
        uint32_t u = aff__f32_bits((float)ldexp((double)rmax, -7));
        scales[r] = rmax > 0 ? (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16) : 0;
        float rs = aff__bits_f32((uint32_t)scales[r] << 16), d;
        for (int b = 0; b < cols / 16; b++) {
            const float *x = row + b * 16;
            float bmax = 0;
            for (int i = 0; i < 16; i++) bmax = fmaxf(bmax, fabsf(x[i]));
            unsigned field = 0;
            if (bmax > 0 && rs > 0) {
                double ideal = (double)bmax / (double)rs, best = INFINITY;
                int mid = 0;
                for (int e = 0; e < 8; e++)
                    if (fabs(exp2(e) - ideal) < fabs(exp2(mid) - ideal)) mid = e;
                for (unsigned v = 0; v < 2; v++) {
                    for (int e = mid - 1; e <= mid + 1; e++) {
                        if (e < 0 || e > 7) continue;
                        for (unsigned g = 0; g < 4; g++) {
                            float bs = rs * (float)(1 << e), inv = 1.0f / bs, s = g & 1 ? -inv : inv, acc = 0;
                            for (int i = 0; i < 4; i++) {
                                float t[4];
                                for (int p = 0; p < 4; p++) t[p] = x[4 * i + (p + (g & 2 ? 2 : 0)) % 4] * s;
                                nearest(cb[v], t, &d);
                                acc += d;
                            }
                            double err = (double)acc * (double)bs * (double)bs;
                            if (err < best) best = err, field = (unsigned)e | g << 3 | v << 5;
                        }
                    }
                }
            }
            naive_put_bits(fields, ((uint64_t)r * (uint64_t)(cols / 16) + (uint64_t)b) * 6, field, 6);
            float bs = rs * (float)(1 << (field & 7));
            for (int i = 0; i < 4 && bs > 0; i++) {
                float t[4];
                for (int p = 0; p < 4; p++) t[p] = x[4 * i + (p + (field & 16 ? 2 : 0)) % 4] / (field & 8 ? -bs : bs);
                unsigned code = (unsigned)nearest(cb[field >> 5], t, &d);
                naive_put_bits(codes, ((uint64_t)r * (uint64_t)(cols / 4) + (uint64_t)(b * 4 + i)) * 10, code, 10);
            }
        }
    }
}

/* Sections 5.2 to 5.4 over blocks of 16 normalised weights. */
static inline void naive_lloyd(const float *x, int blocks, const uint8_t *member, int v, float (*cb)[4], int iterations)
{
    double(*sum)[4] = malloc(1024 * sizeof *sum);
    int *count = malloc(1024 * sizeof *count);
    for (int it = 0; it < iterations; it++) {
        memset(sum, 0, 1024 * sizeof *sum);
        memset(count, 0, 1024 * sizeof *count);
        for (int q = 0; q < blocks * 4; q++) {
            float d;
            if (member[q / 4] != v) continue;
            int e = naive_scan(cb, x + q * 4, &d);
            for (int p = 0; p < 4; p++) sum[e][p] += (double)x[q * 4 + p];
            count[e]++;
        }
        double moved = 0;
        for (int e = 0; e < 1024; e++) {
            for (int p = 0; p < 4 && count[e]; p++) {
                float c = (float)(sum[e][p] / count[e]);
                moved += (double)fabsf(c - cb[e][p]);
                cb[e][p] = c;
            }
        }
        if (moved < 1e-7) break;
    }
    free(sum);
    free(count);
}

static inline void naive_fit(const float *x, int blocks, uint8_t out[8192])
{
    static float cb[2][1024][4];
    int quads = blocks * 4;
    double *d2 = malloc((size_t)quads * sizeof *d2);
    uint8_t *member = calloc((size_t)blocks, 1);
    for (int q = 0; q < quads; q++) d2[q] = DBL_MAX;
    memcpy(cb[0][0], x, 16);
    uint64_t state = 1;
    for (int c = 1; c < 1024; c++) {
        double tot = 0, run = 0;
        for (int q = 0; q < quads; q++) {
            double d = 0;
            for (int p = 0; p < 4; p++)
                d +=
                    ((double)x[q * 4 + p] - (double)cb[0][c - 1][p]) * ((double)x[q * 4 + p] - (double)cb[0][c - 1][p]);
            if (d < d2[q]) d2[q] = d;
            tot += d2[q];
        }
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        double target = (double)(z % 1000000) / 1e6 * tot;
        int pick = quads - 1;
        for (int q = 0; q < quads; q++) {
            run += d2[q];
            if (run >= target) {
                pick = q;
                break;
            }
        }
        memcpy(cb[0][c], x + pick * 4, 16);
    }
    naive_lloyd(x, blocks, member, 0, cb[0], 50);
    for (int e = 0; e < 1024; e++)
        for (int p = 0; p < 4; p++) cb[1][e][p] = cb[0][e][p] * (float)exp2(0.5);
    int before = -1;
    for (int round = 0; round < 12; round++) {
        int second = 0;
        for (int b = 0; b < blocks; b++) {
            double err[2] = {0, 0};
            for (int v = 0; v < 2; v++) {
                for (int q = 4 * b; q < 4 * b + 4; q++) {
                    float d;
                    naive_scan(cb[v], x + q * 4, &d);
                    err[v] += (double)d;
                }
            }
            member[b] = err[1] < err[0];
            second += member[b];
        }
        for (int v = 0; v < 2; v++) {
            if (second != (v ? 0 : blocks)) {
                naive_lloyd(x, blocks, member, v, cb[v], 6);
                continue;
            }
            double sq = 0;
            for (int i = 0; i < blocks * 16; i++) sq += (double)x[i] * (double)x[i];
            float g = (float)(0.25 * (v + 1) * sqrt(sq / (blocks * 16)) / sqrt(1024.0));
            for (int e = 0; e < 1024; e++)
                for (int p = 0; p < 4; p++) cb[v][e][p] = p ? cb[0][e][p] - g : cb[0][e][p] + g;
        }
        if (second == before) break;
        before = second;
    }
    for (int i = 0; i < 8192; i++) {
        float f = cb[i / 4096][i / 4 % 1024][i % 4];
        int best = -1;
        for (int b = 0; b < 256; b++) {
            if ((b & 0x78) < 0x08 || (b & 0x78) > 0x38) continue;
            if (best < 0 || fabsf(aff__e4m3_table[b] - f) < fabsf(aff__e4m3_table[best] - f)) best = b;
        }
        out[i] = (uint8_t)best;
    }
    free(d2);
    free(member);
}

/* About normal, from a sum of uniforms. */
static inline float naive_gauss(uint64_t *rng)
{
    double a = 0;
    for (int i = 0; i < 12; i++) a += (double)(aff__splitmix64(rng) >> 11) * 0x1p-53;
    return (float)(a - 6);
}

/* A table like a fitted one: gaussian entries, the second variant half an octave up. */
static inline void naive_table(uint64_t seed, uint8_t out[8192])
{
    for (int i = 0; i < 8192; i++) out[i] = aff__cb_round(naive_gauss(&seed) * (i < 4096 ? 0.4f : 0.57f));
}
#endif
