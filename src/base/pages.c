#define _GNU_SOURCE
#include "base/pages.h"
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { HUGE = 2 << 20, WORTH_IT = 4 << 20, PAGE = 4096, INTERLEAVE = 3 /* MPOL_INTERLEAVE of linux/mempolicy.h */ };

/* The first line of a small file of /sys; false if there is none. */
static bool read_line(const char *path, char *out, int cap)
{
    FILE *f = fopen(path, "r");
    if (!f) return false;
    const bool ok = fgets(out, cap, f) != NULL;
    fclose(f);
    return ok;
}

aff_huge aff__huge_setting(const char *setting)
{
    if (!setting || !strchr(setting, '[')) return AFF_HUGE_UNKNOWN;
    return strstr(setting, "[never]") ? AFF_HUGE_DENIED : AFF_HUGE_GIVEN;
}

int aff__node_list(const char *text, uint64_t mask[AFF_NODE_WORDS])
{
    int n = 0;
    memset(mask, 0, AFF_NODE_WORDS * sizeof *mask);
    while (*text && *text != '\n') {
        char *end;
        const long from = strtol(text, &end, 10);
        if (end == text) return 0;
        text = end;
        long to = from;
        if (*text == '-') {
            to = strtol(text + 1, &end, 10);
            if (end == text + 1) return 0;
            text = end;
        }
        if (from < 0 || to < from || to >= AFF_NODE_WORDS * 64 || (*text && *text != ',' && *text != '\n')) return 0;
        text += *text == ',';
        for (long i = from; i <= to; i++) {
            n += !(mask[i / 64] >> (i % 64) & 1);
            mask[i / 64] |= 1ull << (i % 64);
        }
    }
    return n;
}

static uint64_t all_nodes[AFF_NODE_WORDS];
static int node_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find_nodes(void)
{
    char line[4096];
    node_count =
        read_line("/sys/devices/system/node/has_memory", line, sizeof line) ? aff__node_list(line, all_nodes) : 0;
    if (node_count) return;
    node_count = 1;
    all_nodes[0] = 1;
}

int aff__numa_nodes(uint64_t mask[AFF_NODE_WORDS])
{
    pthread_once(&once, find_nodes);
    memcpy(mask, all_nodes, sizeof all_nodes);
    return node_count;
}

bool aff__pages_deal(void *p, uint64_t bytes, const uint64_t mask[AFF_NODE_WORDS])
{
    const uintptr_t from = ((uintptr_t)p + PAGE - 1) / PAGE * PAGE, to = ((uintptr_t)p + bytes) / PAGE * PAGE;
    return to > from &&
           syscall(SYS_mbind, from, to - from, INTERLEAVE, mask, (unsigned long)AFF_NODE_WORDS * 64 + 1, 0) == 0;
}

void aff__pages_prepare(void *p, uint64_t bytes)
{
    uint64_t mask[AFF_NODE_WORDS];
    if (bytes < WORTH_IT) return;
    const uintptr_t from = ((uintptr_t)p + HUGE - 1) / HUGE * HUGE, to = ((uintptr_t)p + bytes) / HUGE * HUGE;
    if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
    if (aff__numa_nodes(mask) > 1) aff__pages_deal(p, bytes, mask);
}

void aff__pages_line(char *out, size_t cap)
{
    char setting[128];
    uint64_t mask[AFF_NODE_WORDS];
    const bool known = read_line("/sys/kernel/mm/transparent_hugepage/enabled", setting, sizeof setting);
    const aff_huge huge = aff__huge_setting(known ? setting : NULL);
    const int nodes = aff__numa_nodes(mask);
    int n = snprintf(
        out, cap, "%s",
        huge == AFF_HUGE_GIVEN ? "huge pages for what is in memory; weights used in the file's mapping have small ones"
        : huge == AFF_HUGE_DENIED
            ? "NO huge pages: the system's setting is 'never', so long contexts and weights in memory are read more "
              "slowly; as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            : "huge pages: this system does not say whether it has them");
    if (nodes > 1 && n > 0 && (size_t)n < cap)
        snprintf(out + n, cap - (size_t)n, "; memory is dealt over %d nodes", nodes);
}
