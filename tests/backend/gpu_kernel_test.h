/* gpu_kernel_test.h - device kernels on the emulated device, beside the CPU backend's ops (numerics `fast`).
 *
 * Every test runs with either fragment layout and a thread order of its own: the CPU's result is computed once, what the layouts give
 * is compared with it, by bits where the definition fixes the order and by max |a - b| / max |b| where only the order of a sum
 * differs. */
#ifndef AFF_TESTS_GPU_KERNEL_TEST_H
#define AFF_TESTS_GPU_KERNEL_TEST_H
#include "backend/cpu/cpu.h"
#include "backend/cpu/inner.h"
#include "backend/gpu/emu.h"
#include "backend/gpu/kernels/args.h"
#include "backend/kernel_random.h"
#include "quant/numbers.h"
#include "support/test.h"

static uint64_t seed = 6;
static int layout_amd; /* which of the two tables launch() takes */

/* for (both layouts) */
#define EACH_LAYOUT for (layout_amd = 0; layout_amd < 2; layout_amd++)

static inline void launch(const char *name, unsigned grid, unsigned block, size_t smem, const void *args)
{
    const aff_emu_kernel *k = layout_amd ? aff__emu_kernels_amd : aff__emu_kernels_nv;
    aff_emu_launch *l;
    aff_error err;
    while (k->name && strcmp(k->name, name)) k++;
    if (!k->name) fail_msg("no kernel %s", name);
    if (aff__emu_launch_create(&l, k, grid, block, smem, false, args, (uint32_t)draw(&seed, 1u << 30) + 1, &err) != AFF_OK)
        fail_msg("%s", err.msg);
    const aff_emu_state s = aff__emu_launch_run(l);
    if (s != AFF_EMU_DONE) fail_msg("%s: %s", name, aff__emu_launch_text(l));
    aff__emu_launch_free(l);
}

static inline void *zeros(int64_t n, size_t size)
{
    void *p = NULL;
    if (n < 0 || posix_memalign(&p, 64, (size_t)(n + 1) * size)) abort();
    memset(p, 0, (size_t)(n + 1) * size);
    return p;
}
#define NEW(type, n) ((type *)zeros((n), sizeof(type)))

/* Uniform in [-s, s). */
static inline float *uniform(int64_t n, float s)
{
    float *x = NEW(float, n);
    for (int64_t i = 0; i < n; i++) x[i] = s * draw_unit(&seed);
    return x;
}

static inline void same_bits(const char *what, const float *a, const float *b, int64_t n)
{
    const int64_t i = first_difference(a, b, n);
    if (i >= 0) fail_msg("%s, layout %d: element %lld of %lld: %a, expected %a", what, layout_amd, (long long)i, (long long)n, (double)a[i], (double)b[i]);
}
static inline void same_bytes(const char *what, const void *a, const void *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (((const uint8_t *)a)[i] != ((const uint8_t *)b)[i])
            fail_msg("%s, layout %d: byte %lld of %lld: %d, expected %d", what, layout_amd, (long long)i, (long long)n, ((const uint8_t *)a)[i], ((const uint8_t *)b)[i]);
}

/* max |a - b| / max |b|, rows apart; the worst is remembered for the report. */
static inline double row_error(const float *a, const float *b, int64_t rows, int64_t n)
{
    double worst = 0;
    for (int64_t t = 0; t < rows; t++) {
        double e = 0, m = 0;
        for (int64_t i = t * n; i < (t + 1) * n; i++) {
            const double d = fabs((double)a[i] - (double)b[i]);
            e = d > e || d != d ? d : e;
            m = fabs((double)b[i]) > m ? fabs((double)b[i]) : m;
        }
        if (e > 0 && !(e / m <= worst)) worst = e / m;
    }
    return worst;
}
static inline void near(const char *what, const float *a, const float *b, int64_t rows, int64_t n, double tol)
{
    const double e = row_error(a, b, rows, n);
    if (getenv("AFF_TEST_ERRORS")) printf("  %-28s layout %d rows %lld n %lld: %.3g\n", what, layout_amd, (long long)rows, (long long)n, e);
    if (!(e <= tol)) fail_msg("%s, layout %d: error %g, at most %g expected", what, layout_amd, e, tol);
}

static aff_backend *cpu;
static inline int cpu_up(void **state)
{
    aff_error err;
    (void)state;
    return aff__cpu_backend(&cpu, AFF_FAST, 1, &err) != AFF_OK;
}
static inline int cpu_down(void **state)
{
    (void)state;
    cpu->free(cpu);
    return 0;
}

static inline unsigned up(int64_t a, int64_t b)
{
    return (unsigned)((a + b - 1) / b);
}
static inline void to_bf16(const float *x, uint16_t *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = aff__f32_to_bf16(x[i]);
}
#endif
