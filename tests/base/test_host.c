/* base/host: what displays draw. */
#include "support/test.h"
#include "base/host.h"

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
    const struct CMUnitTest tests[] = {cmocka_unit_test(proc_lines)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
