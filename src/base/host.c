#define _GNU_SOURCE /* sched_getaffinity */
#include "base/host.h"
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

uint64_t aff__proc_bytes(const char *text, const char *name)
{
    const size_t n = strlen(name);
    for (const char *line = text; *line;) {
        if (strncmp(line, name, n) == 0) {
            const unsigned long long kib = strtoull(line + n, NULL, 10);
            return kib > UINT64_MAX / 1024 ? 0 : (uint64_t)kib * 1024;
        }
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    return 0;
}

/* The file's beginning, as a string. */
static void slurp(const char *path, char *buf, size_t cap)
{
    size_t n = 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t k;
        while (n + 1 < cap && (k = read(fd, buf + n, cap - 1 - n)) > 0) n += (size_t)k;
        close(fd);
    }
    buf[n] = 0;
}

void aff__host_read(aff_host *h)
{
    char text[8192];
    struct timespec t;
    cpu_set_t set;
    *h = (aff_host){0};
    slurp("/proc/meminfo", text, sizeof text);
    h->total = aff__proc_bytes(text, "MemTotal:");
    h->available = aff__proc_bytes(text, "MemAvailable:");
    slurp("/proc/self/status", text, sizeof text);
    h->rss = aff__proc_bytes(text, "VmRSS:");
    h->peak = aff__proc_bytes(text, "VmHWM:");
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) == 0) h->cpu_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    h->cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}
