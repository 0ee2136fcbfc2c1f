/* bench_quant [experts] [rows [DEVICE]] - error and speed of the expert encoders on synthetic experts: gate and up 2048 x 4096,
 * down 4096 x 2048, weights N(0, 0.02) rounded to MXFP4 with scale 2^(floor(log2 amax) - 2), column importance exp(N(0,
 * 1)), seed 1; codebooks are fitted on seed 2. One line for each variant: relative Frobenius error, weighted by the
 * importance in the first run and not in the second, and experts a second of one core (by its CPU clock). Then error
 * feedback for gate and up, with inputs half of whose energy lies in 16 common directions: relative error of what the
 * matrix puts out. With a DEVICE: only how many experts a second it encodes. */
#include "backend/gpu/encode.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "quant/encode.h"
#include "quant/expert.h"
#include "quant/numbers.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HIDDEN = 4096, INTER = 2048 };

typedef struct expert {
    aff_mxfp4 m[3];
    float *weight[3];
    float *w[3]; /* decoded */
} expert;

static void fail(const char *what)
{
    fprintf(stderr, "bench_quant: %s\n", what);
    exit(1);
}

static void *zeroed(size_t n)
{
    void *p;
    if (aff__calloc(&p, n, 1, "benchmark", NULL) != AFF_OK) fail("out of memory");
    return p;
}

/* Box-Muller, both values used. */
static double gauss(uint64_t *rng)
{
    static double kept;
    static bool have;
    if (have) return have = false, kept;
    double u = ((double)(aff__splitmix64(rng) >> 11) + 1) * 0x1p-53, a = (double)(aff__splitmix64(rng) >> 11) * 0x1p-53;
    double r = sqrt(-2 * log(u));
    kept = r * sin(2 * 3.141592653589793 * a);
    have = true;
    return r * cos(2 * 3.141592653589793 * a);
}

static void make_matrix(uint64_t *rng, uint64_t rows, uint64_t cols, aff_mxfp4 *m)
{
    uint8_t *codes = zeroed(rows * cols / 2), *scales = zeroed(rows * cols / 32);
    for (uint64_t b = 0; b < rows * cols / 32; b++) {
        float w[32], amax = 0;
        for (int i = 0; i < 32; i++) {
            w[i] = (float)(0.02 * gauss(rng));
            amax = fabsf(w[i]) > amax ? fabsf(w[i]) : amax;
        }
        int e = ilogbf(amax) - 2;
        scales[b] = (uint8_t)(e + 127);
        for (int i = 0; i < 32; i++)
            codes[b * 16 + (uint64_t)i / 2] |= (uint8_t)(aff__f32_to_e2m1(ldexpf(w[i], -e)) << (i & 1 ? 4 : 0));
    }
    *m = (aff_mxfp4){codes, scales, rows, cols};
}

/* rows: of each matrix, so that a quick run is possible. */
static expert make_expert(uint64_t seed, uint64_t rows)
{
    expert x;
    uint64_t rng = seed;
    for (int i = 0; i < 3; i++) {
        uint64_t r = i == 2 ? HIDDEN : INTER, cols = i == 2 ? INTER : HIDDEN;
        r = r < rows ? r : rows;
        make_matrix(&rng, r, cols, &x.m[i]);
        x.weight[i] = zeroed(cols * 4);
        for (uint64_t c = 0; c < cols; c++) x.weight[i][c] = (float)exp(gauss(&rng));
        x.w[i] = zeroed(r * cols * 4);
        if (aff__mxfp4_decode(&x.m[i], x.w[i], NULL) != AFF_OK) fail("bad matrix");
    }
    return x;
}

static void free_expert(expert *x)
{
    for (int i = 0; i < 3; i++) {
        free((void *)x->m[i].codes);
        free((void *)x->m[i].scales);
        free(x->weight[i]);
        free(x->w[i]);
    }
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static aff_matdesc layout(uint64_t rows, uint64_t cols)
{
    aff_matdesc m = {.rows = rows, .cols = cols, .quant = AFF_Q2P875Q4};
    m.data_size = rows * cols / 16 * 5;
    m.scale_off = m.data_size;
    m.scale_size = rows * cols / 64 * 3;
    m.rscale_off = m.scale_off + m.scale_size;
    m.rscale_size = rows * 2;
    return m;
}

typedef struct variant {
    const char *name;
    bool compat;
    uint8_t cb[AFF_CB_BYTES];
    aff_cb_index *index;
    aff_search *search;
    double error, seconds, weights;
} variant;

static void encode(variant *v, expert *x, bool weighted)
{
    aff_encode_space *sp;
    aff_qerror e = {0}, check = {0};
    if (aff__encode_space_create(&sp, HIDDEN, NULL) != AFF_OK) fail("out of memory");
    for (int i = 0; i < 3; i++) {
        aff_matdesc m = layout(x->m[i].rows, x->m[i].cols);
        uint8_t *record = zeroed(m.rscale_off + m.rscale_size + 16);
        const float *weight = weighted ? x->weight[i] : NULL;
        double start = cpu_seconds();
        if (v->compat)
            aff__expert_matrix_encode(v->index, &m, x->w[i], weight, record);
        else
            aff__encode_matrix(v->search, sp, &m, &x->m[i], weight, NULL, record, &e);
        v->seconds += cpu_seconds() - start;
        v->weights += (double)(m.rows * m.cols);
        aff__expert_matrix_error(&m, record, v->cb, x->w[i], weight, &check);
        free(record);
    }
    v->error += weighted ? aff__qerror_weighted(&check) : aff__qerror_relative(&check);
    if (!v->compat && fabs(check.err2 - e.err2) > 1e-9 * check.err2) fail("the encoder's error is not the decoder's");
    aff__encode_space_free(sp);
}

static void fit(variant *v, uint64_t rows, bool weighted)
{
    aff_cb_samples plain = {0};
    aff_fit_samples joint = {0};
    aff_status st = AFF_OK;
    for (uint64_t seed = 101; seed < 103; seed++) {
        expert x = make_expert(seed, rows);
        for (int i = 0; i < 3; i++) {
            if (v->compat && st == AFF_OK) st = aff__cb_samples_add(&plain, x.w[i], x.m[i].rows, x.m[i].cols, NULL);
            if (!v->compat && st == AFF_OK)
                st = aff__fit_samples_add(&joint, &x.m[i], weighted ? x.weight[i] : NULL, NULL);
        }
        free_expert(&x);
    }
    double start = cpu_seconds();
    if (st == AFF_OK)
        st = v->compat ? aff__cb_fit(&plain, NULL, v->cb, NULL) : aff__cb_fit_joint(&joint, NULL, v->cb, NULL);
    if (st == AFF_OK && v->compat) st = aff__cb_index_create(&v->index, v->cb, AFF_CB_GRID_COMPAT, NULL, NULL);
    aff_cb_table t[AFF_CB_VARIANTS];
    aff__cb_unpack(v->cb, t);
    if (st == AFF_OK && !v->compat) st = aff__search_create(&v->search, t, AFF_SEARCH_JMIN, NULL, NULL);
    if (st != AFF_OK) fail("fit failed");
    fprintf(stderr, "codebook of %s: %.1f s\n", v->name, cpu_seconds() - start);
    aff__cb_samples_free(&plain);
    aff__fit_samples_free(&joint);
}

/* ---- error feedback ---- */

enum { SHARED = 16, JUDGED = 64 }; /* directions; rows of gate whose output error is taken */

/* H = S (1 + A A^T / SHARED) S: columns of unlike size s = exp(N(0, 1) / 2), A of N(0, 1). */
static float *make_moments(uint64_t n)
{
    float *h = zeroed(n * (n + 1) / 2 * 4), *a = zeroed(n * SHARED * 4), *s = zeroed(n * 4), *to = h;
    uint64_t rng = 55;
    for (uint64_t i = 0; i < n; i++) s[i] = (float)exp(gauss(&rng) / 2);
    for (uint64_t i = 0; i < n * SHARED; i++) a[i] = (float)gauss(&rng);
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t j = i; j < n; j++) {
            float v = 0;
            for (uint64_t k = 0; k < SHARED; k++) v += a[i * SHARED + k] * a[j * SHARED + k] / SHARED;
            *to++ = (v + (i == j ? 1.0f : 0)) * s[i] * s[j];
        }
    free(a);
    free(s);
    return h;
}

/* v H v^T */
static double quadratic(const float *v, const float *h, uint64_t n)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        double line = 0.5 * (double)h[0] * (double)v[i];
        for (uint64_t j = 1; j < n - i; j++) line += (double)h[j] * (double)v[i + j];
        sum += 2 * line * (double)v[i];
        h += n - i;
    }
    return sum;
}

static double output_error(const variant *v, const aff_matdesc *m, const uint8_t *record, const float *w,
                           const float *h)
{
    double lost = 0, all = 0;
    float *d = zeroed(m->cols * 4);
    for (uint64_t r = 0; r < JUDGED && r < m->rows; r++) {
        aff__expert_row_decode(m, record, v->cb, r, d);
        for (uint64_t c = 0; c < m->cols; c++) d[c] -= w[r * m->cols + c];
        lost += quadratic(d, h, m->cols);
        all += quadratic(w + r * m->cols, h, m->cols);
    }
    free(d);
    return sqrt(lost / all);
}

static void feedback(uint64_t rows)
{
    static variant v = {.name = "default"};
    float *h = make_moments(HIDDEN), weight[HIDDEN];
    aff_feedback *f;
    aff_encode_space *sp;
    const float *diagonal = h;
    for (uint64_t i = 0; i < HIDDEN; diagonal += HIDDEN - i, i++) weight[i] = *diagonal;
    double mean = 0, start = cpu_seconds();
    for (int i = 0; i < HIDDEN; i++) mean += (double)weight[i] / HIDDEN;
    for (int i = 0; i < HIDDEN; i++) weight[i] /= (float)mean;
    if (aff__feedback_create(&f, HIDDEN, NULL) != AFF_OK || aff__encode_space_create(&sp, HIDDEN, NULL) != AFF_OK)
        fail("out of memory");
    if (aff__feedback_factor(f, HIDDEN, (const uint8_t *)h, NULL, NULL) != AFF_OK) fail("factoring failed");
    printf("factors of %d x %d moments: %.1f s\n", HIDDEN, HIDDEN, cpu_seconds() - start);
    fit(&v, rows, false);
    expert x = make_expert(1, rows);
    for (int k = 0; k < 3; k++) {
        static const char *const name[] = {"unweighted", "weighted", "feedback"};
        aff_matdesc m = layout(x.m[0].rows, x.m[0].cols);
        uint8_t *record = zeroed(m.rscale_off + m.rscale_size + 16);
        aff_qerror e = {0};
        start = cpu_seconds();
        aff__encode_matrix(v.search, sp, &m, &x.m[0], k ? weight : NULL, k == 2 ? f : NULL, record, &e);
        const double took = cpu_seconds() - start;
        printf("gate, %-10s output error %.4f   weight error %.4f   %.3f matrices/s a core\n", name[k],
               output_error(&v, &m, record, x.w[0], h), aff__qerror_relative(&e),
               (double)(m.rows * m.cols) / took / ((double)HIDDEN * INTER));
        free(record);
    }
    free_expert(&x);
    aff__search_free(v.search);
    aff__encode_space_free(sp);
    aff__feedback_free(f);
    free(h);
}

/* Experts a second that a card chooses codes for, alone and with what the processor still does (one thread). */
static void on_device(const char *device, int experts)
{
    aff_device_spec spec;
    aff_encoder by;
    aff_error err = {0};
    aff_encode_space *sp;
    static variant v = {.name = "device"};
    if (aff__device_parse(&spec, device, &err) != AFF_OK || aff__gpu_encoder_create(&by, &spec, &err) != AFF_OK) fail(err.msg);
    fit(&v, 256, 1);
    if (by.begin(by.ctx, v.search, &err) != AFF_OK || aff__encode_space_create(&sp, HIDDEN, &err) != AFF_OK) fail(err.msg);
    expert x = make_expert(1, HIDDEN);
    uint8_t *record = zeroed((uint64_t)HIDDEN * INTER);
    for (int weighted = 1; weighted >= 0; weighted--) {
        double seconds[2] = {0};
        for (int n = -1; n < experts; n++) /* the first makes room */
            for (int i = 0; i < 3; i++)
                for (int k = 0; k < 2; k++) {
                    const aff_matdesc m = layout(x.m[i].rows, x.m[i].cols);
                    const float *w = weighted ? x.weight[i] : NULL;
                    aff_qerror e = {0};
                    const uint64_t at = aff__now_ns();
                    const aff_status s = k ? aff__encode_matrix_by(&by, v.search, sp, &m, &x.m[i], w, record, &e, &err) : by.choose(by.ctx, &m, &x.m[i], w, record, &err);
                    if (s != AFF_OK) fail(err.msg);
                    if (n >= 0) seconds[k] += (double)(aff__now_ns() - at) * 1e-9;
                }
        printf("%s %-10s %.1f experts/s chosen, %.2f with row scales and errors by one thread\n", device, weighted ? "weighted" : "unweighted", experts / seconds[0],
               experts / seconds[1]);
    }
    free(record);
    free_expert(&x);
    aff__encode_space_free(sp);
    aff__search_free(v.search);
    aff__gpu_encoder_free(&by);
}

int main(int argc, char **argv)
{
    if (argc > 3) {
        on_device(argv[3], atoi(argv[1]));
        return 0;
    }
    int experts = argc > 1 ? atoi(argv[1]) : 8;
    uint64_t rows = argc > 2 ? (uint64_t)atoi(argv[2]) : HIDDEN;
    for (int weighted = 1; weighted >= 0; weighted--) {
        static variant v[2];
        v[0] = (variant){.name = "default"};
        v[1] = (variant){.name = "compat", .compat = true};
        for (int k = 0; k < 2; k++) {
            fit(&v[k], rows, weighted);
            for (int e = 0; e < experts; e++) {
                expert x = make_expert((uint64_t)e + 1, rows);
                encode(&v[k], &x, weighted);
                free_expert(&x);
            }
            printf("%-8s %-10s error %.4f   %.3f experts/s a core (%s)\n", v[k].name,
                   weighted ? "weighted" : "unweighted", v[k].error / experts,
                   v[k].weights / v[k].seconds / (3.0 * HIDDEN * INTER), aff__cpu_level_name(aff__cpu_level()));
            fflush(stdout);
            aff__cb_index_free(v[k].index);
            aff__search_free(v[k].search);
        }
    }
    feedback(rows);
    return 0;
}
