/* experts/heat, base/host: what displays draw. */
#include "support/test.h"
#include "base/host.h"
#include "experts/heat.h"

/* Spec runtime 5.2: decay, then credit; at most AFF_HEAT_CREDIT a dispatch; other layers stay as they are. */
static void heat_decays_and_gains(void **state)
{
    aff_heat h;
    aff_error err = {0};
    assert_int_equal(aff__heat_create(&h, 2, 4, &err), AFF_OK);
    aff__heat_note(&h, 1, (const int32_t[]){2, 0, 2, 3}, 4);
    aff__heat_note(&h, 1, (const int32_t[]){2, 3}, 2);
    const float want[8] = {0, 0, 0, 0, 0.98f, 0, 2 * 0.98f + 1, 0.98f + 1};
    for (int i = 0; i < 8; i++) assert_float_equal(h.v[i], want[i], 1e-6);
    int32_t many[100] = {0};
    aff__heat_note(&h, 0, many, 100);
    assert_float_equal(h.v[0], AFF_HEAT_CREDIT, 0);
    assert_float_equal(h.v[4], 0.98f, 1e-6);
    aff__heat_free(&h);
}

static void proc_lines(void **state)
{
    const char *text = "MemTotal:       24605520 kB\nMemFree:   12 kB\nVmRSS:\t 99999999999999999999 kB\nlast";
    assert_int_equal(aff__proc_bytes(text, "MemTotal:"), 24605520ull * 1024);
    assert_int_equal(aff__proc_bytes(text, "MemFree:"), 12 * 1024);
    assert_int_equal(aff__proc_bytes(text, "VmRSS:"), 0); /* no such size */
    assert_int_equal(aff__proc_bytes(text, "Free:"), 0);  /* only where a line begins */
    assert_int_equal(aff__proc_bytes("", "x"), 0);
    aff_host h;
    aff__host_read(&h);
    assert_true(h.total > h.available && h.available > 0 && h.peak >= h.rss && h.rss > 0 && h.cpus >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(heat_decays_and_gains), cmocka_unit_test(proc_lines)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
