#define _DEFAULT_SOURCE /* strsep */
#include "base/machine.h"
#include "base/file.h"
#include "base/mem.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT = 1 << 20 };

/* A small file's text, NULL when it cannot be read. */
static char *text_of(const char *root, const char *path, const char *name)
{
    char full[4096], *text = NULL;
    size_t size;
    if (snprintf(full, sizeof full, "%s%s%s", root, path, name) >= (int)sizeof full) return NULL;
    return aff__read_file(full, TEXT, &text, &size, NULL) == AFF_OK ? text : NULL;
}

/* "KEY value" at the beginning of a line. */
static bool value_of(const char *text, const char *key, uint64_t *value)
{
    const size_t n = strlen(key);
    for (const char *at = text; at; at = strchr(at, '\n')) {
        at += *at == '\n';
        if (strncmp(at, key, n) == 0 && (at[n] == ' ' || at[n] == ':'))
            return sscanf(at + n + 1, "%" SCNu64, value) == 1;
        if (!*at) break;
    }
    return false;
}

/* A file of one number; "max" is UINT64_MAX. */
static bool number_in(const char *root, const char *dir, const char *name, uint64_t *value)
{
    char *text = text_of(root, dir, name);
    const bool ok = text && (sscanf(text, "%" SCNu64, value) == 1 || strncmp(text, "max", 3) == 0);
    if (ok && *text == 'm') *value = UINT64_MAX;
    free(text);
    return ok;
}

typedef struct {
    int version;
    const char *mount, *limit, *used, *stat[2]; /* stat: page cache, which goes when memory is needed */
} kind;
static const kind v2 = {2, "/sys/fs/cgroup", "/memory.max", "/memory.current", {"inactive_file", "active_file"}},
                  v1 = {1,
                        "/sys/fs/cgroup/memory",
                        "/memory.limit_in_bytes",
                        "/memory.usage_in_bytes",
                        {"total_inactive_file", "total_active_file"}};

/* The limit of one group, if it binds more than those so far. */
static void look_at(aff_machine *m, const char *root, const kind *k, const char *dir)
{
    uint64_t limit, used, cache = 0, n;
    if (!number_in(root, dir, k->limit, &limit) || limit > UINT64_C(1) << 60 || !number_in(root, dir, k->used, &used))
        return;
    char *stat = text_of(root, dir, "/memory.stat");
    for (int i = 0; stat && i < 2; i++)
        if (value_of(stat, k->stat[i], &n)) cache += n;
    free(stat);
    used = cache < used ? used - cache : 0;
    const uint64_t left = used < limit ? limit - used : 0;
    if (m->cgroup && left >= m->limit_free) return;
    m->cgroup = k->version;
    m->limit = limit;
    m->limit_free = left;
}

/* The group and all above it. In a container the path may be the host's and lead nowhere: then only the root is there.
 */
static void climb(aff_machine *m, const char *root, const kind *k, const char *path)
{
    char dir[4096];
    const int n = snprintf(dir, sizeof dir, "%s%s", k->mount, strcmp(path, "/") == 0 ? "" : path);
    if (n < 0 || n >= (int)sizeof dir) return;
    for (const size_t least = strlen(k->mount); strlen(dir) >= least;) {
        look_at(m, root, k, dir);
        char *slash = strrchr(dir, '/');
        if (strlen(dir) == least || !slash) break;
        *slash = 0;
    }
}

/* Lines "ID:CONTROLLERS:PATH". */
static void cgroups(aff_machine *m, const char *root)
{
    char *text = text_of(root, "/proc/self/cgroup", "");
    if (!text) return;
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n"))) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path || path[1] != '/') continue;
        *path++ = 0;
        controllers++;
        if (!*controllers)
            climb(m, root, &v2, path);
        else
            for (char *c = controllers, *next; c; c = next) {
                next = strchr(c, ',');
                if (next) *next++ = 0;
                if (strcmp(c, "memory") == 0) climb(m, root, &v1, path);
            }
    }
    free(text);
}

aff_status aff__machine_here(aff_machine *m, const char *root, aff_error *err)
{
    *m = (aff_machine){.limit = UINT64_MAX, .limit_free = UINT64_MAX};
    char *text = text_of(root, "/proc/meminfo", "");
    const bool ok = text && value_of(text, "MemTotal", &m->ram) && value_of(text, "MemAvailable", &m->free);
    free(text);
    if (!ok)
        return aff__fail(
            err, AFF_E_UNSUPPORTED,
            "%s/proc/meminfo: expected MemTotal and MemAvailable: say how much memory there is with --memory", root);
    m->ram *= 1024;
    m->free *= 1024;
    cgroups(m, root);
    return AFF_OK;
}

/* "32G", "512M"; false otherwise. */
static bool size_of(const char *text, uint64_t *bytes)
{
    char *end;
    const double v = strtod(text, &end);
    if (end == text || !isfinite(v) || v <= 0 || v > 1e6) return false;
    const double unit = (*end | 32) == 'g' ? 0x1p30 : (*end | 32) == 'm' ? 0x1p20 : 0;
    if (unit == 0 || end[1]) return false;
    *bytes = (uint64_t)(v * unit);
    return true;
}

static bool part_of(aff_machine *m, const char *part)
{
    char *end;
    uint64_t bytes;
    if (strncmp(part, "ram=", 4) == 0) return size_of(part + 4, &m->ram);
    if (strncmp(part, "pcie=", 5) == 0) {
        m->link = strtod(part + 5, &end);
        return end != part + 5 && !*end && isfinite(m->link) && m->link > 0;
    }
    const long n = strtol(part, &end, 10);
    if (end == part || *end != 'x' || n < 1 || n > AFF_MAX_CARDS - m->cards || !size_of(end + 1, &bytes)) return false;
    for (long i = 0; i < n; i++) m->card[m->cards++] = bytes;
    return true;
}

aff_status aff__machine_parse(aff_machine *m, const char *text, aff_error *err)
{
    char *copy = NULL, *rest, *part;
    *m = (aff_machine){.described = true, .limit = UINT64_MAX, .limit_free = UINT64_MAX};
    AFF_TRY(aff__strndup(&copy, text, strlen(text), err));
    bool ok = true;
    for (rest = copy; ok && (part = strsep(&rest, ","));) ok = part_of(m, part);
    free(copy);
    if (!ok || !m->ram)
        return aff__fail(err, AFF_E_INVALID,
                         "--machine: expected cards and memory as in 2x32G,ram=64G,pcie=27, or ram=64G alone, got '%s'",
                         text);
    const uint64_t system = m->ram / 32 > UINT64_C(3) << 29 ? m->ram / 32 : UINT64_C(3) << 29;
    m->free = m->ram > system ? m->ram - system : 0;
    return AFF_OK;
}

uint64_t aff__machine_available(const aff_machine *m)
{
    return m->free < m->limit_free ? m->free : m->limit_free;
}
