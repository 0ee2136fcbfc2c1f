/* The runtime table on emulated devices: device names, memory, streams, events, graphs, launches by number. */
#include "support/test.h"
#include "backend/gpu/rt_driver.h"
#include <math.h>
#include <string.h>

static aff_rt *open_emu(const char *text, int index)
{
    aff_device_spec spec;
    aff_rt *rt;
    assert_int_equal(aff__device_parse(&spec, text, NULL), AFF_OK);
    spec.index = index;
    assert_int_equal(aff__rt_open(&rt, &spec, NULL), AFF_OK);
    return rt;
}

static void test_names(void **state)
{
    static const char *const bad[] = {"",       "gpu",    "cuda:",  "cuda:x",    "cuda:1024", "hip:0:1",
                                      "emu:",   "emu:0M", "emu:2x", "emu:17x1M", "emu:512Q",  "emu:99999999999M",
                                      "emulate"};
    aff_device_spec s;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        aff_error e;
        assert_int_equal(aff__device_parse(&s, bad[i], &e), AFF_E_INVALID);
        assert_non_null(strstr(e.msg, "expected auto, cpu, cuda:N"));
    }
    assert_int_equal(aff__device_parse(&s, "auto", NULL), AFF_OK);
    assert_int_equal(s.choice, AFF_DEVICE_AUTO);
    assert_int_equal(aff__device_parse(&s, "cpu", NULL), AFF_OK);
    assert_int_equal(s.choice, AFF_DEVICE_CPU);
    assert_int_equal(aff__device_parse(&s, "hip:3", NULL), AFF_OK);
    assert_true(s.choice == AFF_DEVICE_RT && s.kind == AFF_RT_HIP && s.index == 3);
    assert_int_equal(aff__device_parse(&s, "emu:2x512M", NULL), AFF_OK);
    assert_true(s.kind == AFF_RT_EMU && s.count == 2 && s.bytes == 512u << 20 && !s.amd);
    assert_int_equal(aff__device_parse(&s, "emu-amd:3G", NULL), AFF_OK);
    assert_true(s.kind == AFF_RT_EMU && s.count == 1 && s.bytes == 3ull << 30 && s.amd);
}

/* Lists of cards, and how many: what is wrong with them is said, and that a model runs on one. */
static void several_cards(void **state)
{
    static const struct {
        const char *text, *says;
        aff_status status;
    } lists[] = {{"cuda:0,cuda:1", "2 cards: this version runs a model on one card", AFF_E_UNSUPPORTED},
                 {"hip:0,hip:1,hip:2", "3 cards: this version", AFF_E_UNSUPPORTED},
                 {"cuda:0,cpu", "expected cards only in a list, got cpu", AFF_E_INVALID},
                 {"cuda:0,", "behind every comma", AFF_E_INVALID},
                 {"cuda:0,cuda:x", "--device cuda:x: expected auto", AFF_E_INVALID},
                 {"emu:1M,fault=0", "expected auto", AFF_E_INVALID},
                 {"emu:1M,fault", "expected auto", AFF_E_INVALID},
                 {"emu:1M,taken=", "expected auto", AFF_E_INVALID}};
    aff_device_spec s;
    aff_error e;
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        assert_int_equal(aff__device_parse(&s, lists[i].text, &e), lists[i].status);
        if (!strstr(e.msg, lists[i].says)) fail_msg("%s: %s", lists[i].text, e.msg);
    }
    assert_int_equal(aff__device_parse(&s, "emu:3x2M,taken=5K,fault=7", NULL), AFF_OK);
    assert_true(s.count == 3 && s.bytes == 2 << 20 && s.taken == 5 << 10 && s.fault == 7);
    assert_int_equal(aff__device_gpus(&s, 4, &e), AFF_E_INVALID);
    assert_string_equal(e.msg, "--gpus 4: expected at most 3, so many emu cards there are");
    assert_int_equal(aff__device_gpus(&s, 2, &e), AFF_E_UNSUPPORTED);
    assert_non_null(strstr(e.msg, "one card"));
    assert_int_equal(aff__device_gpus(&s, 1, NULL), AFF_OK);
    s.choice = AFF_DEVICE_CPU;
    assert_int_equal(aff__device_gpus(&s, 1, &e), AFF_E_INVALID);
}

/* No library, one without the calls: what is missing has a name. */
static void drivers(void **state)
{
    static const char *const none[] = {"libno-such-driver.so.1", NULL}, *const old[] = {"libm.so.6", NULL};
    aff_driver d = {0};
    aff__driver_load(&d, none, false);
    assert_int_equal(d.devices, 0);
    assert_string_equal(d.why, "libno-such-driver.so.1 is not installed (no NVIDIA driver)");
    d = (aff_driver){0};
    aff__driver_load(&d, none, true);
    assert_string_equal(d.why, "libno-such-driver.so.1 is not installed (no AMD driver)");
    d = (aff_driver){0};
    aff__driver_load(&d, old, false);
    assert_int_equal(d.devices, 0);
    assert_string_equal(d.why, "libm.so.6 has no cuInit: the driver is too old");
    d = (aff_driver){0};
    aff__driver_load(&d, old, true);
    assert_string_equal(d.why, "libm.so.6 has no hipInit: the driver is too old");
}

/* Another program takes memory after it was asked what is free: the allocation says what it was for, and how much there
 * is. */
static void memory_that_others_take(void **state)
{
    aff_rt *rt = open_emu("emu:8M,taken=5M", 0);
    uint64_t bytes, use[AFF_USES];
    void *p;
    aff_error e;
    assert_int_equal(aff__rt_free_memory(rt, &bytes, NULL), AFF_OK);
    assert_int_equal(bytes, 8 << 20);
    assert_int_equal(aff__rt_alloc(rt, &p, 4 << 20, "dense weights", &e), AFF_E_NOMEM);
    assert_string_equal(e.msg, "emu:0: out of memory: dense weights needs 4194304 bytes, 3145728 of 8388608 are free");
    assert_int_equal(aff__rt_alloc(rt, &p, 2 << 20, "dense weights", &e), AFF_OK);
    assert_int_equal(aff__rt_free_memory(rt, &bytes, NULL), AFF_OK);
    assert_int_equal(bytes, 1 << 20);
    aff__rt_uses(rt, use);
    assert_int_equal(use[AFF_USE_WEIGHTS], 2 << 20);
    assert_int_equal(use[AFF_USE_STATE] + use[AFF_USE_EXPERTS] + use[AFF_USE_BUFFERS], 0);
    aff__rt_free(rt, p);
    aff__rt_uses(rt, use);
    assert_int_equal(use[AFF_USE_WEIGHTS], 0);
    aff__rt_close(rt);
}

static void norm(const char *device, int T, int n, bool weighted, uint32_t seed, float *y)
{
    float x[4 * 700], w[700], *dx, *dw, *dy;
    aff_rt *rt = open_emu(device, 0);
    aff_stream *s;
    const uint64_t bytes = (uint64_t)(T * n) * 4, wide = (uint64_t)n * 4;
    for (int i = 0; i < T * n; i++) x[i] = (float)((i * 37) % 101 - 50) * 0.13f;
    for (int i = 0; i < n; i++) w[i] = 0.5f + (float)(i % 7);
    aff__rt_emu_seed(seed);
    assert_int_equal(aff__rt_stream_create(rt, &s, NULL), AFF_OK);
    assert_int_equal(aff__rt_alloc(rt, (void **)&dx, bytes, "x", NULL), AFF_OK);
    assert_int_equal(aff__rt_alloc(rt, (void **)&dw, wide, "w", NULL), AFF_OK);
    assert_int_equal(aff__rt_alloc(rt, (void **)&dy, bytes, "y", NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, s, dx, x, bytes, NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, s, dw, w, wide, NULL), AFF_OK);
    const aff_k_rmsnorm a = {.x = dx, .w = weighted ? dw : NULL, .y = {.f32 = dy}, .n = n, .eps = 1e-6f};
    assert_int_equal(aff__rt_launch(rt, s, AFF_K_rmsnorm, (unsigned)T, 96, 4 * (size_t)n, 0, &a, NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, s, y, dy, bytes, NULL), AFF_OK);
    assert_int_equal(aff__rt_sync(rt, s, NULL), AFF_OK);
    for (int t = 0; t < T; t++) {
        double q = 0;
        for (int i = 0; i < n; i++) q += (double)x[t * n + i] * x[t * n + i];
        for (int i = 0; i < n; i++) {
            const double want = x[t * n + i] / sqrt(q / n + 1e-6) * (weighted ? w[i] : 1.0);
            assert_true(fabs(y[t * n + i] - want) <= 4e-7 * (1 + fabs(want)));
        }
    }
    aff__rt_free(rt, dx);
    aff__rt_free(rt, dw);
    aff__rt_free(rt, dy);
    aff__rt_stream_free(rt, s);
    aff__rt_close(rt);
}

static void test_rmsnorm(void **state)
{
    static const int widths[] = {1, 31, 33, 96, 500, 700};
    float a[4 * 700], b[4 * 700];
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        const int n = widths[i];
        norm("emu:8M", 4, n, i & 1, 0, a);
        norm("emu:8M", 4, n, i & 1, 1234, b);
        assert_memory_equal(a, b, (size_t)(4 * n) * 4);
        norm("emu-amd:8M", 4, n, i & 1, 99, b);
        assert_memory_equal(a, b, (size_t)(4 * n) * 4);
    }
}

static void test_memory(void **state)
{
    aff_rt *rt = open_emu("emu:1M", 0);
    aff_error e;
    void *p, *q;
    uint64_t left;
    const uint64_t page = aff__rt_info(rt)->page;
    assert_int_equal(aff__rt_alloc(rt, &p, 600 << 10, "first", NULL), AFF_OK);
    assert_int_equal(aff__rt_alloc(rt, &q, 600 << 10, "second", &e), AFF_E_NOMEM);
    assert_string_equal(e.msg, "emu:0: out of memory: second needs 614400 bytes, 434176 of 1048576 are free");
    assert_int_equal(aff__rt_reserve(rt, &q, 64 * page, "rows", NULL), AFF_OK); /* more address space than memory */
    assert_int_equal(aff__rt_commit(rt, q, page, "rows", NULL), AFF_OK);
    assert_int_equal(aff__rt_commit(rt, (char *)q + page, page, "rows", NULL), AFF_OK);
    memset(q, 1, 2 * page);
    assert_int_equal(aff__rt_free_memory(rt, &left, NULL), AFF_OK);
    assert_int_equal(left, 434176 - 2 * page);
    assert_int_equal(aff__rt_commit(rt, (char *)q + 2 * page, 8 * page, "rows", &e), AFF_E_NOMEM);
    aff__rt_decommit(rt, (char *)q + page, page);
    aff__rt_decommit(rt, q, page);
    aff__rt_unreserve(rt, q, 64 * page);
    aff__rt_free(rt, p);
    assert_int_equal(aff__rt_free_memory(rt, &left, NULL), AFF_OK);
    assert_int_equal(left, 1 << 20);
    aff__rt_close(rt);
}

/* Two streams, one event: with it the order holds under every seed, without it some seed shows the other one. */
static int second_sees(uint32_t seed, bool ordered)
{
    aff_rt *rt = open_emu("emu:1M", 0);
    aff_stream *a, *b;
    aff_event *e;
    int from = 7, dev = 0, seen = 0;
    aff__rt_emu_seed(seed);
    assert_int_equal(aff__rt_stream_create(rt, &a, NULL), AFF_OK);
    assert_int_equal(aff__rt_stream_create(rt, &b, NULL), AFF_OK);
    assert_int_equal(aff__rt_event_create(rt, &e, NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, a, &dev, &from, 4, NULL), AFF_OK);
    assert_int_equal(aff__rt_record(rt, e, a, NULL), AFF_OK);
    if (ordered) assert_int_equal(aff__rt_wait(rt, b, e, NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, b, &seen, &dev, 4, NULL), AFF_OK);
    assert_int_equal(aff__rt_sync(rt, b, NULL), AFF_OK);
    assert_int_equal(aff__rt_event_sync(rt, e, NULL), AFF_OK);
    assert_int_equal(dev, 7);
    aff__rt_event_free(rt, e);
    aff__rt_stream_free(rt, a);
    aff__rt_stream_free(rt, b);
    aff__rt_close(rt);
    return seen;
}

static void test_events(void **state)
{
    int late = 0;
    for (uint32_t seed = 1; seed <= 16; seed++) {
        assert_int_equal(second_sees(seed, true), 7);
        late += second_sees(seed, false) == 0;
    }
    assert_true(late > 0 && late < 16);
}

static void test_graph(void **state)
{
    aff_rt *rt = open_emu("emu:1M", 0);
    aff_stream *s;
    aff_graph *g;
    float x[40], y[40], *d;
    assert_int_equal(aff__rt_stream_create(rt, &s, NULL), AFF_OK);
    assert_int_equal(aff__rt_alloc(rt, (void **)&d, sizeof x, "x", NULL), AFF_OK);
    memset(y, 0, sizeof y);
    assert_int_equal(aff__rt_capture_begin(rt, s, NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, s, d, x, sizeof x, NULL), AFF_OK);
    const aff_k_rmsnorm a = {.x = d, .y = {.f32 = d}, .n = 40};
    assert_int_equal(aff__rt_launch(rt, s, AFF_K_rmsnorm, 1, 32, 160, 0, &a, NULL), AFF_OK);
    assert_int_equal(aff__rt_copy(rt, s, y, d, sizeof y, NULL), AFF_OK);
    assert_int_equal(aff__rt_capture_end(rt, s, &g, NULL), AFF_OK);
    assert_int_equal(aff__rt_sync(rt, s, NULL), AFF_OK);
    assert_true(y[0] == 0); /* recorded, not run */
    for (int round = 1; round < 4; round++) {
        for (int i = 0; i < 40; i++) x[i] = i % 2 ? (float)round : (float)-round;
        assert_int_equal(aff__rt_graph_launch(rt, g, s, NULL), AFF_OK);
        assert_int_equal(aff__rt_sync(rt, s, NULL), AFF_OK);
        for (int i = 0; i < 40; i++) assert_true(y[i] == (i % 2 ? 1.0f : -1.0f));
    }
    aff__rt_graph_free(rt, g);
    aff__rt_free(rt, d);
    aff__rt_stream_free(rt, s);
    aff__rt_close(rt);
}

static void test_bad_launches(void **state)
{
    aff_rt *rt = open_emu("emu-amd:1M", 0);
    aff_stream *s;
    aff_error e;
    const aff_k_rmsnorm a = {.n = 1};
    assert_int_equal(aff__rt_stream_create(rt, &s, NULL), AFF_OK);
    assert_int_equal(aff__rt_launch(rt, s, AFF_K_rmsnorm, 1, 1024, 0, 0, &a, &e), AFF_E_INVALID);
    assert_int_equal(aff__rt_launch(rt, s, AFF_K_rmsnorm, 0, 32, 0, 0, &a, &e), AFF_E_INVALID);
    assert_int_equal(aff__rt_launch(rt, s, AFF_K_rmsnorm, 1, 32, 65537, 0, &a, &e), AFF_E_INVALID);
    assert_int_equal(aff__rt_launch(rt, s, AFF_K_rmsnorm, 9, 32, 0, AFF_LAUNCH_COOPERATIVE, &a, &e), AFF_E_INVALID);
    aff__rt_stream_free(rt, s);
    aff__rt_close(rt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),        cmocka_unit_test(several_cards),
        cmocka_unit_test(drivers),           cmocka_unit_test(memory_that_others_take),
        cmocka_unit_test(test_rmsnorm),      cmocka_unit_test(test_memory),
        cmocka_unit_test(test_events),       cmocka_unit_test(test_graph),
        cmocka_unit_test(test_bad_launches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
