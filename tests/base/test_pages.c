/* Huge pages and NUMA nodes: what the system's files mean, and what the system then says about the memory. */
#define _GNU_SOURCE
#include "support/test.h"
#include "base/mem.h"
#include "base/pages.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static void settings_are_understood(void **state)
{
    (void)state;
    assert_int_equal(aff__huge_setting("always [madvise] never\n"), AFF_HUGE_GIVEN);
    assert_int_equal(aff__huge_setting("[always] madvise never\n"), AFF_HUGE_GIVEN);
    assert_int_equal(aff__huge_setting("always madvise [never]\n"), AFF_HUGE_DENIED);
    assert_int_equal(aff__huge_setting("nonsense\n"), AFF_HUGE_UNKNOWN);
    assert_int_equal(aff__huge_setting(NULL), AFF_HUGE_UNKNOWN);
    char line[320];
    aff__pages_line(line, sizeof line);
    assert_non_null(strstr(line, "huge pages"));
    aff__pages_line(line, 8);
    assert_int_equal(strlen(line), 7);
}

static void node_lists_are_understood(void **state)
{
    (void)state;
    uint64_t m[AFF_NODE_WORDS];
    assert_int_equal(aff__node_list("0\n", m), 1);
    assert_int_equal(m[0], 1);
    assert_int_equal(aff__node_list("0-2,5,64-65", m), 6);
    assert_int_equal(m[0], 0x27);
    assert_int_equal(m[1], 3);
    assert_int_equal(aff__node_list("1,1,0-1", m), 2);
    assert_int_equal(aff__node_list("1023", m), 1);
    assert_true(m[15] == 1ull << 63);
    const char *bad[] = {"", "\n", "x", "1024", "3-1", "-1", "0-", "0;1", "0-99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_int_equal(aff__node_list(bad[i], m), 0);
}

/* Bytes of huge pages in the mapping that holds p. */
static long huge_bytes(const void *p)
{
    FILE *f = fopen("/proc/self/smaps", "r");
    if (!f) return -1;
    char line[512];
    bool here = false;
    long kib = -1;
    unsigned long from, to;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) here = (uintptr_t)p >= from && (uintptr_t)p < to;
        if (here && sscanf(line, "AnonHugePages: %ld", &kib) == 1) break;
    }
    fclose(f);
    return kib < 0 ? -1 : kib * 1024;
}

static void large_blocks_get_huge_pages(void **state)
{
    (void)state;
    enum { N = 16 << 20 };
    char setting[128] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    if (!f || !fgets(setting, sizeof setting, f) || aff__huge_setting(setting) != AFF_HUGE_GIVEN) {
        if (f) fclose(f);
        skip();
    }
    fclose(f);
    char *p = NULL;
    aff_error err = {0};
    assert_int_equal(aff__calloc(&p, N, 1, "block", &err), AFF_OK);
    for (int i = 0; i < N; i += 4096) assert_int_equal(p[i], 0);
    const long got = huge_bytes(p + N / 2);
    free(p);
    if (got == 0) skip(); /* memory in pieces too small: the system may decline */
    assert_true(got >= 2 << 20);
}

/* The policy of the page at p: mode in *mode. */
static bool policy(void *p, int *mode)
{
    uint64_t mask[AFF_NODE_WORDS];
    return syscall(SYS_get_mempolicy, mode, mask, (unsigned long)AFF_NODE_WORDS * 64, p, 2 /* MPOL_F_ADDR */) == 0;
}

static void pages_are_dealt_over_nodes(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    uint64_t nodes[AFF_NODE_WORDS];
    const int n = aff__numa_nodes(nodes);
    int found = 0, mode = -1;
    for (int i = 0; i < AFF_NODE_WORDS; i++) found += __builtin_popcountll(nodes[i]);
    assert_true(n >= 1 && n == found);
    char *p = mmap(NULL, N, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    if (aff__pages_deal(p, N, nodes)) {
        memset(p, 1, N);
        if (policy(p, &mode)) assert_int_equal(mode, 3); /* MPOL_INTERLEAVE */
    } else {
        assert_true(errno == ENOSYS || errno == EPERM); /* a kernel without NUMA, a container that forbids it */
    }
    munmap(p, N);
    /* Nodes that are not there, no whole page, nothing: declined, not a crash. */
    const uint64_t last[AFF_NODE_WORDS] = {[15] = 1ull << 63};
    char *q = mmap(NULL, N, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(q, MAP_FAILED);
    assert_false(aff__pages_deal(q, N, last));
    assert_false(aff__pages_deal(q + 1, 4096, nodes));
    assert_false(aff__pages_deal(q, 0, nodes));
    q[N - 1] = 1;
    munmap(q, N);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_are_understood),
        cmocka_unit_test(node_lists_are_understood),
        cmocka_unit_test(large_blocks_get_huge_pages),
        cmocka_unit_test(pages_are_dealt_over_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
