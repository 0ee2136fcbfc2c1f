/* gpu_emu_body.h - the emulated device: threads, barriers, collectives, fragments. Included once per fragment layout.
 */
#include "support/test.h"
#include "backend/gpu/gk.h"
#include <stdlib.h>

static uint32_t rng_state = 7;
static uint32_t rng(void)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return rng_state >> 8;
}

static aff_emu_launch *launch(void (*entry)(const void *), unsigned grid, unsigned block, size_t smem, bool coop,
                              const void *args, size_t size, uint32_t seed)
{
    static aff_emu_kernel k;
    aff_emu_launch *l;
    k = (aff_emu_kernel){"test", entry, size, 1024};
    assert_int_equal(aff__emu_launch_create(&l, &k, grid, block, smem, coop, args, seed, NULL), AFF_OK);
    return l;
}

static void run(void (*entry)(const void *), unsigned grid, unsigned block, size_t smem, bool coop, const void *args,
                size_t size, uint32_t seed)
{
    aff_emu_launch *l = launch(entry, grid, block, smem, coop, args, size, seed);
    assert_int_equal(aff__emu_launch_run(l), AFF_EMU_DONE);
    aff__emu_launch_free(l);
}

/* ---- barriers: a block reverses an array through shared memory, over and over ---- */

typedef struct {
    uint32_t *x;
    int rounds;
    bool barrier;
} turn_args;

static void turn(const void *p)
{
    const turn_args *a = p;
    const unsigned t = gk_tid(), n = gk_ntid();
    uint32_t *s = (uint32_t *)(void *)gk_smem(), v = a->x[gk_bid() * n + t];
    for (int i = 0; i < a->rounds; i++) {
        s[t] = v + 1;
        if (a->barrier) gk_sync();
        v = s[n - 1 - t];
        if (a->barrier) gk_sync();
    }
    a->x[gk_bid() * n + t] = v;
}

static int turn_wrong(unsigned grid, unsigned block, bool barrier, uint32_t seed)
{
    uint32_t x[4 * 200];
    int wrong = 0;
    for (unsigned i = 0; i < grid * block; i++) x[i] = i * 10;
    turn_args a = {x, 3, barrier};
    run(turn, grid, block, block * 4, false, &a, sizeof a, seed);
    for (unsigned b = 0; b < grid; b++)
        for (unsigned t = 0; t < block; t++) wrong += x[b * block + t] != (b * block + block - 1 - t) * 10 + 3;
    return wrong;
}

static void test_barriers(void **state)
{
    for (uint32_t seed = 0; seed < 6; seed++)
        for (unsigned block = 1; block <= 200; block += 33) assert_int_equal(turn_wrong(4, block, true, seed), 0);
}

static void test_a_missing_barrier_shows(void **state)
{
    for (uint32_t seed = 0; seed < 6; seed++) assert_true(turn_wrong(1, 64, false, seed) > 0);
}

/* ---- collectives ---- */

typedef struct {
    uint32_t *xor5, *idx, *votes;
} lanes_args;

static void lanes(const void *p)
{
    const lanes_args *a = p;
    const unsigned t = gk_tid(), at = gk_bid() * gk_ntid() + t;
    a->xor5[at] = gk_shfl_xor_u(1000 + t, 5);
    a->idx[at] = gk_shfl_idx_u(1000 + t, 31 - (t & 31));
    a->votes[at] = gk_ballot(t % 3 == 0);
    gk_syncwarp();
}

static void test_collectives(void **state)
{
    uint32_t x[192], i[192], v[192];
    lanes_args a = {x, i, v};
    run(lanes, 2, 96, 0, false, &a, sizeof a, 5);
    for (unsigned n = 0; n < 192; n++) {
        const unsigned t = n % 96, w = t & ~31u;
        uint32_t mask = 0;
        for (unsigned l = 0; l < 32; l++) mask |= (uint32_t)((w + l) % 3 == 0) << l;
        assert_int_equal(x[n], 1000 + (t ^ 5));
        assert_int_equal(i[n], 1000 + w + 31 - (t & 31));
        assert_int_equal(v[n], mask);
    }
}

static void apart(const void *p)
{
    if (gk_tid() & 1)
        gk_ballot(1);
    else
        gk_syncwarp();
}

static void half_waits(const void *p)
{
    if (gk_tid() < 32) gk_sync();
    if (gk_tid() >= 32) gk_shfl_xor_u(1, gk_tid() == 40 ? (gk_sync(), 1u) : 1u);
}

static void test_faults(void **state)
{
    const int none = 0;
    aff_emu_launch *l = launch(apart, 1, 32, 0, false, &none, sizeof none, 0);
    assert_int_equal(aff__emu_launch_run(l), AFF_EMU_FAULT);
    assert_non_null(strstr(aff__emu_launch_text(l), "different collectives"));
    aff__emu_launch_free(l);
    l = launch(half_waits, 1, 64, 0, false, &none, sizeof none, 0);
    assert_int_equal(aff__emu_launch_run(l), AFF_EMU_FAULT);
    assert_non_null(strstr(aff__emu_launch_text(l), "at a barrier"));
    aff__emu_launch_free(l);
}

/* ---- waiting on memory ---- */

typedef struct {
    uint32_t *count, *flag;
    uint32_t *out; /* [blocks] */
} grid_args;

/* Every block adds one, then waits for all; then for the host's flag. */
static void grid_wait(const void *p)
{
    const grid_args *a = p;
    if (gk_tid() == 0) {
        gk_atomic_add_u32(a->count, 1);
        while (gk_load_acquire(a->count) < gk_nbid()) gk_spin();
    }
    gk_sync();
    if (gk_tid() == 0)
        while (!gk_load_acquire(a->flag)) gk_spin();
    gk_sync();
    if (gk_tid() == 1) a->out[gk_bid()] = *a->flag + *a->count;
}

static void test_waits(void **state)
{
    uint32_t count = 0, flag = 0, out[8] = {0};
    grid_args a = {&count, &flag, out};
    aff_emu_launch *l = launch(grid_wait, 8, 40, 0, true, &a, sizeof a, 3);
    assert_int_equal(aff__emu_launch_run(l), AFF_EMU_STALLED);
    assert_int_equal(count, 8);
    assert_int_equal(aff__emu_launch_run(l), AFF_EMU_STALLED);
    flag = 100;
    assert_int_equal(aff__emu_launch_run(l), AFF_EMU_DONE);
    aff__emu_launch_free(l);
    for (int b = 0; b < 8; b++) assert_int_equal(out[b], 108);
}

/* ---- fragments ---- */

typedef struct {
    const uint16_t *A, *B; /* [16][16], [GK_N][16] */
    float *C;              /* [16][GK_N] */
    int live;
} mma_args;

/* The layout as written at the head of gk.h. */
static void mma(const void *p)
{
    const mma_args *m = p;
    const unsigned l = gk_tid(), h = l >> 4, g = l >> 2, q = l & 3;
    gk_a a;
    gk_b b;
    gk_c c;
#define PAIR(M, row, k) ((uint32_t)(M)[(row)*16 + (k)] | (uint32_t)(M)[(row)*16 + (k) + 1] << 16)
    if (GK_N == 16) {
        for (unsigned r = 0; r < 4; r++) a.r[r] = PAIR(m->A, l & 15, 8 * h + 2 * r);
        for (unsigned r = 0; r < GK_BR; r++) b.r[r] = PAIR(m->B, l & 15, 8 * h + 2 * r);
    } else {
        a.r[0] = PAIR(m->A, g, 2 * q), a.r[1] = PAIR(m->A, g + 8, 2 * q);
        a.r[2] = PAIR(m->A, g, 2 * q + 8), a.r[3] = PAIR(m->A, g + 8, 2 * q + 8);
        b.r[0] = PAIR(m->B, g, 2 * q), b.r[1] = PAIR(m->B, g, 2 * q + 8);
    }
    gk_c_zero(&c);
    gk_mma(&c, &a, &b, m->live);
    gk_mma(&c, &a, &b, m->live);
    for (int j = 0; j < GK_CV; j++) m->C[gk_c_row(l, j) * GK_N + gk_c_col(l, j)] = c.v[j];
}

static void test_mma(void **state)
{
    uint16_t A[256], B[16 * GK_N];
    float C[16 * GK_N];
    for (int live = 1; live <= GK_N; live++) {
        for (int i = 0; i < 256; i++)
            A[i] = (uint16_t)gk_f_to_bf16((float)((int)(rng() % 65) - 32)); /* small integers: sums are exact */
        for (int i = 0; i < 16 * GK_N; i++) B[i] = (uint16_t)gk_f_to_bf16((float)((int)(rng() % 65) - 32));
        mma_args a = {A, B, C, live};
        run(mma, 1, 32, 0, false, &a, sizeof a, 9);
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < GK_N; c++) {
                float want = 0;
                for (int k = 0; k < 16; k++) want += 2 * gk_bf16_to_f(A[r * 16 + k]) * gk_bf16_to_f(B[c * 16 + k]);
                assert_true(C[r * GK_N + c] == (c < live ? want : 0.0f));
            }
    }
}

typedef struct {
    const int8_t *A, *B; /* [16][32], [GK_N][32] */
    int32_t *C;
} imma_args;

static uint32_t quad(const int8_t *m, unsigned row, unsigned k)
{
    uint32_t u;
    memcpy(&u, m + row * 32 + k, 4);
    return u;
}

static void imma(const void *p)
{
    const imma_args *m = p;
    const unsigned l = gk_tid(), h = l >> 4, g = l >> 2, q = l & 3;
    gk_a a;
    gk_b b;
    gk_ic c;
    if (GK_N == 16) {
        for (unsigned r = 0; r < 4; r++) a.r[r] = quad(m->A, l & 15, 16 * (r >> 1) + 8 * h + 4 * (r & 1));
        for (unsigned r = 0; r < GK_BR; r++) b.r[r] = quad(m->B, l & 15, 16 * (r >> 1) + 8 * h + 4 * (r & 1));
    } else {
        a.r[0] = quad(m->A, g, 4 * q), a.r[1] = quad(m->A, g + 8, 4 * q);
        a.r[2] = quad(m->A, g, 4 * q + 16), a.r[3] = quad(m->A, g + 8, 4 * q + 16);
        b.r[0] = quad(m->B, g, 4 * q), b.r[1] = quad(m->B, g, 4 * q + 16);
    }
    gk_ic_zero(&c);
    gk_imma(&c, &a, &b, GK_N);
    for (int j = 0; j < GK_CV; j++) m->C[gk_c_row(l, j) * GK_N + gk_c_col(l, j)] = c.v[j];
}

static void test_imma(void **state)
{
    int8_t A[512], B[32 * GK_N];
    int32_t C[16 * GK_N];
    for (int i = 0; i < 512; i++) A[i] = (int8_t)(rng() & 255);
    for (int i = 0; i < 32 * GK_N; i++) B[i] = (int8_t)(rng() & 255);
    imma_args a = {A, B, C};
    run(imma, 1, 32, 0, false, &a, sizeof a, 2);
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < GK_N; c++) {
            int32_t want = 0;
            for (int k = 0; k < 32; k++) want += A[r * 32 + k] * B[c * 32 + k];
            assert_int_equal(C[r * GK_N + c], want);
        }
}

static void test_dp4a(void **state)
{
    assert_int_equal(gk_dp4a(0x80ff7f01u, 0x7f800203u, 5), 5 + 3 + 127 * 2 + 128 - 128 * 127);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_barriers),    cmocka_unit_test(test_a_missing_barrier_shows),
        cmocka_unit_test(test_collectives), cmocka_unit_test(test_faults),
        cmocka_unit_test(test_waits),       cmocka_unit_test(test_mma),
        cmocka_unit_test(test_imma),        cmocka_unit_test(test_dp4a),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
