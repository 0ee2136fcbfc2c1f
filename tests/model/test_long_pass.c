/* Passes longer than what the rings hold: the same bits for any division of a text into passes, beside neighbours, after a
 * rollback, a restore and a failed pass. On the CPU, and on the emulated card with fewer positions.
 * --device NAME: on that device instead. */
#include "backend/gpu/gpu.h"
#include "model/runner.h"
#include "state/states.h"

enum { LONG = 2304, AFTER = 12, LEAST_VOCAB = 160 }; /* V: the larger of both networks' */
static int32_t text[2][LONG + AFTER];
static const char *card; /* --device */

/* The network and a runner for passes of `rows` rows, on a device or (NULL) the CPU. */
typedef struct {
    aff_net *net;
    aff_runner *r;
    aff_seq *s[2];
} setup;

static setup open_setup(const char *ckpt, const char *device, int rows)
{
    setup u;
    char path[1024];
    if (card) device = card;
    snprintf(path, sizeof path, "%s/golden/v4-sim/%s", AFF_TESTS_DIR, ckpt);
    must(aff__net_open(&u.net, path, &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    if (device) {
        aff_device_spec spec;
        must(aff__device_parse(&spec, device, &err));
        must(aff__runner_on(&u.r, u.net, &spec, 1, &err));
    } else {
        must(aff__runner_create(&u.r, u.net, 2, &err));
    }
    must(aff__runner_chunk(u.r, rows, &err));
    for (int i = 0; i < 2; i++)
        must(aff__seq_open(&u.s[i], u.net, &(aff_seq_options){.size = 4096, .commit = 64, .margin = 512, .memory = aff__runner_memory(u.r)}, &err));
    return u;
}

static void close_setup(setup *u)
{
    for (int i = 0; i < 2; i++) aff__seq_free(u->s[i]);
    aff__runner_free(u->r);
    aff__net_close(u->net);
}

static void run(setup *u, int s, const int32_t *id, int n, int from, float *logits)
{
    must(aff__forward(u->r, &(aff_batch){.n = n, .id = id, .seq = u->s[s], .want_from = from, .logits = logits}, &err));
}

/* What later text depends on: state, the next rows, the draft. */
typedef struct {
    aff_hash state;
    float next[AFTER * V], draft[5 * V];
    int32_t ids[5];
} future;

static void see(setup *u, int s, const int32_t *after, future *f)
{
    memset(f, 0, sizeof *f);
    f->state = aff__seq_digest(u->s[s]);
    if (u->net->draft == AFF_DRAFT_DSPARK) must(aff__draft_block(u->r, u->s[s], 7, f->ids, NULL, f->draft, NULL, NULL, &err));
    run(u, s, after, AFTER, 0, f->next);
}

static void same_future(const future *a, const future *b)
{
    assert_true(same_hash(a->state, b->state));
    assert_memory_equal(a->next, b->next, sizeof a->next);
    assert_memory_equal(a->draft, b->draft, sizeof a->draft);
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
}

/* Passes of `rows` rows at most; the text in calls of these lengths (0 ends the list). */
typedef struct {
    int rows, call[8];
} division;

static void divided(const char *ckpt, const char *device, int total, const division *d, int n)
{
    float *want = calloc((size_t)total * V, sizeof *want), *got = calloc((size_t)total * V, sizeof *got);
    future a, b;
    assert_non_null(want);
    assert_non_null(got);
    setup u = open_setup(ckpt, device, AFF_MAX_CHUNK);
    const int64_t v = aff__net_config(u.net)->vocab;
    for (int at = 0; at < total; at += 100) run(&u, 0, text[0] + at, total - at < 100 ? total - at : 100, 0, want + at * v);
    see(&u, 0, text[0] + total, &a);
    close_setup(&u);
    for (; n--; d++) {
        u = open_setup(ckpt, device, d->rows);
        int at = 0;
        for (int i = 0; d->call[i]; at += d->call[i++]) run(&u, 0, text[0] + at, d->call[i], 0, got + at * v);
        assert_int_equal(at, total);
        for (int t = 0; t < total; t++)
            if (memcmp(want + t * v, got + t * v, (size_t)v * sizeof *want))
                fail_msg("%s: passes of %d rows, first call of %d: position %d differs", ckpt, d->rows, d->call[0], t);
        see(&u, 0, text[0] + total, &b);
        same_future(&a, &b);
        close_setup(&u);
    }
    free(want);
    free(got);
}

static void test_divisions(void **state)
{
    static const division d[] = {{2304, {2304}}, {512, {2304}}, {2304, {2047, 257}}, {2048, {2049, 255}}, {1024, {1, 511, 512, 513, 767}}};
    divided("ckpt-dspark", NULL, LONG, d, sizeof d / sizeof *d);
    divided("ckpt-mtp1", NULL, LONG, d, 2);
}

static void test_divisions_emulated(void **state)
{
    if (card) skip();
    static const division nv[] = {{300, {259}}}, amd[] = {{300, {257}}};
    divided("ckpt-dspark", "emu:256M", 259, nv, 1);
    divided("ckpt-dspark", "emu-amd:256M", 257, amd, 1);
}

/* Two sequences in one long pass, then rows of both again; against each by itself. */
static void neighbours(const char *device, int a, int b)
{
    future f[2], g[2];
    for (int alone = 0; alone < 2; alone++) {
        setup u = open_setup("ckpt-dspark", device, 2048);
        const aff_batch two[2] = {{.n = a, .id = text[0], .seq = u.s[0], .want_from = a}, {.n = b, .id = text[1], .seq = u.s[1], .want_from = b}};
        if (alone)
            for (int i = 0; i < 2; i++) must(aff__forward(u.r, &two[i], &err));
        else
            must(aff__forward_many(u.r, two, 2, &err));
        for (int i = 0; i < 2; i++) see(&u, i, text[i] + two[i].n, alone ? &g[i] : &f[i]);
        close_setup(&u);
    }
    for (int i = 0; i < 2; i++) same_future(&f[i], &g[i]);
}

static void test_neighbours(void **state)
{
    neighbours(NULL, 700, 1348);
    neighbours(NULL, 255, 257);
    neighbours(NULL, 1, 1025);
    neighbours("emu:256M", 30, 235);
}

/* A long pass, rolled back as far as it goes, and one restored from a snapshot. */
static void test_taken_back(void **state)
{
    setup u = open_setup("ckpt-dspark", NULL, 2048);
    future a, b;
    uint8_t *bytes;
    uint64_t size;
    run(&u, 0, text[0], 1500, 1500, NULL);
    must(aff__seq_snapshot(u.s[0], &bytes, &size, &err));
    see(&u, 0, text[0] + 1500, &a);
    must(aff__seq_restore(u.s[1], bytes, size, &err));
    see(&u, 1, text[0] + 1500, &b);
    same_future(&a, &b);
    aff__seq_reset(u.s[1]);
    run(&u, 1, text[0], 1508, 1508, NULL);
    must(aff__seq_rollback(u.s[1], 1500, &err));
    see(&u, 1, text[0] + 1500, &b);
    b.state = a.state; /* rings hold what was rolled back, too */
    same_future(&a, &b);
    free(bytes);
    close_setup(&u);
}

/* A router's choice that names an expert twice, in the last layer. */
static void spoil(void *ctx, const aff_route *route)
{
    const int *layer = ctx;
    if (!route->draft && route->layer == *layer) route->pick[0] = route->pick[1];
}

static void test_failed(void **state)
{
    if (card) skip(); /* routes are not replaced there */
    setup u = open_setup("ckpt-dspark", NULL, 2048), v = open_setup("ckpt-dspark", NULL, 2048);
    int last = aff__net_layers(u.net) - 1;
    future a, b;
    run(&u, 0, text[0], 301, 301, NULL);
    run(&v, 0, text[0], 301, 301, NULL);
    const aff_hash before = aff__seq_digest(u.s[0]);
    aff__runner_on_route(u.r, spoil, &last);
    assert_int_equal(aff__forward(u.r, &(aff_batch){.n = 1700, .id = text[0] + 301, .seq = u.s[0], .want_from = 1700}, &err), AFF_E_FORMAT);
    aff__runner_on_route(u.r, NULL, NULL);
    assert_int_equal(aff__seq_pos(u.s[0]), 301);
    assert_true(same_hash(before, aff__seq_digest(u.s[0])));
    run(&u, 0, text[0] + 301, 1700, 1700, NULL);
    run(&v, 0, text[0] + 301, 1700, 1700, NULL);
    see(&u, 0, text[0] + 2001, &a);
    see(&v, 0, text[0] + 2001, &b);
    same_future(&a, &b);
    close_setup(&u);
    close_setup(&v);
}

/* MTP-1 follows the rows of one long pass. */
static void test_mtp1(void **state)
{
    enum { ROWS = 700 };
    static float want[V], got[V];
    for (int rows = 256; rows <= 1024; rows += 768) {
        setup u = open_setup("ckpt-mtp1", NULL, rows);
        for (int at = 0; at < ROWS; at += rows) {
            const int n = ROWS - at < rows ? ROWS - at : rows;
            run(&u, 0, text[0] + at, n, n, NULL);
            must(aff__draft_mtp1(u.r, text[0] + at + 1, n, at + n == ROWS ? n - 1 : n, rows == 256 ? want : got, &err));
        }
        close_setup(&u);
    }
    assert_memory_equal(want, got, sizeof want);
}

static void test_limits(void **state)
{
    setup u = open_setup("ckpt-dspark", NULL, 300);
    assert_int_equal(aff__runner_chunk(u.r, AFF_MAX_CHUNK - 1, &err), AFF_E_INVALID);
    assert_int_equal(aff__runner_chunk(u.r, AFF_MAX_PASS + 1, &err), AFF_E_INVALID);
    const aff_batch two[2] = {{.n = 200, .id = text[0], .seq = u.s[0], .want_from = 200}, {.n = 101, .id = text[1], .seq = u.s[1], .want_from = 101}};
    assert_int_equal(aff__forward_many(u.r, two, 2, &err), AFF_E_INVALID);
    assert_int_equal(aff__seq_pos(u.s[0]), 0);
    close_setup(&u);
}

static int prepare(void **state)
{
    uint64_t seed = 23;
    for (int i = 0; i < 2; i++)
        for (int t = 0; t < LONG + AFTER; t++) text[i][t] = (int32_t)(aff__splitmix64(&seed) % LEAST_VOCAB);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--device")) card = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_divisions),  cmocka_unit_test(test_divisions_emulated),
        cmocka_unit_test(test_neighbours), cmocka_unit_test(test_taken_back),
        cmocka_unit_test(test_failed),     cmocka_unit_test(test_mtp1),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, prepare, NULL);
}
