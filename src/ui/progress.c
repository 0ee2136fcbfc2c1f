#include "ui/progress.h"
#include "base/clock.h"
#include <unistd.h>

enum { WIDTH = 78 };

void aff__progress_format(char *buf, size_t cap, const char *what, uint64_t done, uint64_t total, uint64_t elapsed_ns)
{
    const double mib = 1048576.0;
    double part = total ? (double)done / (double)total : 1.0, seconds = (double)elapsed_ns * 1e-9;
    bool giga = total >= 1ull << 30;
    double unit = giga ? 1024 * mib : mib;
    int n = snprintf(buf, cap, "%s: %.1f %%, %.2f of %.2f %s", what, 100 * part, (double)done / unit,
                     (double)total / unit, giga ? "GiB" : "MiB");
    if (n < 0 || (size_t)n >= cap || seconds < 1 || !done) return;
    uint64_t left = (uint64_t)(seconds * (1 / part - 1) + 0.5);
    snprintf(buf + n, cap - (size_t)n, ", %.1f MiB/s, %llu:%02u:%02u left", (double)done / seconds / mib,
             (unsigned long long)(left / 3600), (unsigned)(left / 60 % 60), (unsigned)(left % 60));
}

static void format_count(char *buf, size_t cap, const aff_progress *p, uint64_t done, uint64_t total, uint64_t elapsed_ns)
{
    const double seconds = (double)elapsed_ns * 1e-9;
    const int n = snprintf(buf, cap, "%s: %.1f %%, %llu of %llu %s", p->what, total ? 100 * (double)done / (double)total : 100.0, (unsigned long long)done,
                           (unsigned long long)total, p->unit);
    if (n < 0 || (size_t)n >= cap || seconds < 1 || !done) return;
    const uint64_t left = (uint64_t)(seconds * ((double)total / (double)done - 1) + 0.5);
    snprintf(buf + n, cap - (size_t)n, ", %llu:%02u:%02u left", (unsigned long long)(left / 3600), (unsigned)(left / 60 % 60), (unsigned)(left % 60));
}

void aff__progress_start(aff_progress *p, FILE *to, const char *what)
{
    *p = (aff_progress){.to = to, .what = what};
    p->terminal = isatty(fileno(to)) == 1;
}

void aff__progress_update(aff_progress *p, uint64_t done, uint64_t total)
{
    char line[160];
    uint64_t now = aff__now_ns(), every = p->terminal ? 100000000u : 5000000000u;
    if (!p->started) p->started = now;
    if (now - (p->shown ? p->shown : p->terminal ? 0 : p->started) < every) return;
    p->shown = now;
    if (p->unit)
        format_count(line, sizeof line, p, done, total, now - p->started);
    else
        aff__progress_format(line, sizeof line, p->what, done, total, now - p->started);
    if (p->terminal)
        fprintf(p->to, "\r%-*.*s", WIDTH, WIDTH, line);
    else
        fprintf(p->to, "%s\n", line);
    fflush(p->to);
    p->dirty = p->terminal;
}

void aff__progress_clear(aff_progress *p)
{
    if (!p->dirty) return;
    fprintf(p->to, "\r%*s\r", WIDTH, "");
    fflush(p->to);
    p->dirty = false;
}
