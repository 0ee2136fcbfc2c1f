#define _GNU_SOURCE
#include "base/file.h"
#include "base/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static void stamp(const struct stat *st, aff_stamp *s)
{
    *s = (aff_stamp){.dev = (uint64_t)st->st_dev,
                     .ino = (uint64_t)st->st_ino,
                     .size = (uint64_t)st->st_size,
                     .sec = (int64_t)st->st_mtim.tv_sec,
                     .nsec = (int64_t)st->st_mtim.tv_nsec};
}

bool aff__stamp_of(int fd, aff_stamp *s)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return false;
    stamp(&st, s);
    return true;
}

bool aff__stamp_at(const char *path, aff_stamp *s)
{
    struct stat st;
    if (stat(path, &st) != 0) return false;
    stamp(&st, s);
    return true;
}

aff_status aff__map_open(aff_map *m, const char *path, aff_error *err)
{
    *m = (aff_map){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO without a writer would wait for one */
    if (fd < 0) return aff__fail_errno(err, "%s: cannot open", path);
    struct stat st;
    aff_status s = AFF_OK;
    if (fstat(fd, &st) != 0) {
        s = aff__fail_errno(err, "%s: cannot stat", path);
    } else if (!S_ISREG(st.st_mode)) {
        s = aff__fail(err, AFF_E_IO, "%s: not a regular file", path);
    } else if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            s = aff__fail_errno(err, "%s: cannot map %lld bytes", path, (long long)st.st_size);
        } else {
            m->data = p;
            m->size = (uint64_t)st.st_size;
            stamp(&st, &m->stamp);
        }
    }
    close(fd);
    return s;
}

void aff__map_close(aff_map *m)
{
    if (m->data) munmap((void *)(uintptr_t)m->data, (size_t)m->size);
    *m = (aff_map){0};
}

aff_status aff__read_file(const char *path, uint64_t limit, char **data, size_t *size, aff_error *err)
{
    bool in = strcmp(path, "-") == 0;
    int fd = in ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return aff__fail_errno(err, "%s: cannot open", path);
    char *buf = NULL;
    size_t n = 0, cap = 0;
    aff_status s = AFF_OK;
    for (;;) {
        if (n + 1 >= cap) {
            cap = cap ? cap * 2 : 65536;
            if ((s = aff__realloc(&buf, cap, 1, path, err)) != AFF_OK) break;
        }
        ssize_t r = read(fd, buf + n, cap - 1 - n);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) {
            s = aff__fail_errno(err, "%s: cannot read", path);
            break;
        }
        if (r == 0) break;
        n += (size_t)r;
        if (n > limit) {
            s = aff__fail(err, AFF_E_LIMIT, "%s: larger than the limit of %llu bytes", path, (unsigned long long)limit);
            break;
        }
    }
    if (!in) close(fd);
    if (s != AFF_OK) {
        free(buf);
        return s;
    }
    buf[n] = 0;
    *data = buf;
    *size = n;
    return AFF_OK;
}

aff_status aff__out_open(aff_outfile *o, const char *path, aff_error *err)
{
    *o = (aff_outfile){.fd = -1};
    size_t n = strlen(path);
    AFF_TRY(aff__strndup(&o->path, path, n, err));
    aff_status s = aff__realloc(&o->tmp, n + 16, 1, path, err);
    if (s == AFF_OK) {
        snprintf(o->tmp, n + 16, "%s.tmp.XXXXXX", path);
        o->fd = mkostemp(o->tmp, O_CLOEXEC);
        if (o->fd < 0) {
            s = aff__fail_errno(err, "%s: cannot create", o->tmp);
            o->tmp[0] = 0;
        } else if (fchmod(o->fd, 0644) != 0) {
            s = aff__fail_errno(err, "%s: cannot set its mode", o->tmp);
        }
    }
    if (s != AFF_OK) aff__out_abort(o);
    return s;
}

aff_status aff__out_open_named(aff_outfile *o, const char *path, const char *suffix, bool keep, aff_error *err)
{
    *o = (aff_outfile){.fd = -1};
    size_t n = strlen(path), k = strlen(suffix);
    AFF_TRY(aff__strndup(&o->path, path, n, err));
    aff_status s = aff__realloc(&o->tmp, n + k + 1, 1, path, err);
    if (s == AFF_OK) {
        snprintf(o->tmp, n + k + 1, "%s%s", path, suffix);
        o->fd = open(o->tmp, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | (keep ? 0 : O_TRUNC), 0644);
        if (o->fd < 0) {
            s = aff__fail_errno(err, "%s: cannot create", o->tmp);
            o->tmp[0] = 0;
        }
    }
    if (s != AFF_OK) aff__out_abort(o);
    return s;
}

aff_status aff__out_write(aff_outfile *o, const void *data, uint64_t n, uint64_t off, aff_error *err)
{
    const uint8_t *p = data;
    while (n) {
        ssize_t w = pwrite(o->fd, p, n > 1u << 30 ? 1u << 30 : (size_t)n, (off_t)off);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return aff__fail_errno(err, "%s: cannot write at byte %llu", o->tmp, (unsigned long long)off);
        p += w;
        off += (uint64_t)w;
        n -= (uint64_t)w;
    }
    return AFF_OK;
}

static aff_status sync_folder_of(const char *path, aff_error *err)
{
    const char *slash = strrchr(path, '/');
    char *dir = NULL;
    if (slash)
        AFF_TRY(aff__strndup(&dir, path, slash == path ? 1 : (size_t)(slash - path), err));
    else
        AFF_TRY(aff__strndup(&dir, ".", 1, err));
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    aff_status s = AFF_OK;
    if (fd < 0 || (fsync(fd) != 0 && errno != EINVAL)) s = aff__fail_errno(err, "%s: cannot sync the folder", dir);
    if (fd >= 0) close(fd);
    free(dir);
    return s;
}

aff_status aff__out_commit(aff_outfile *o, aff_error *err)
{
    aff_status s = AFF_OK;
    if (fsync(o->fd) != 0) s = aff__fail_errno(err, "%s: cannot sync", o->tmp);
    if (s == AFF_OK && rename(o->tmp, o->path) != 0) s = aff__fail_errno(err, "%s: cannot rename to %s", o->tmp, o->path);
    if (s == AFF_OK) {
        o->tmp[0] = 0; /* it exists under its own name now */
        s = sync_folder_of(o->path, err);
    }
    aff__out_abort(o);
    return s;
}

void aff__out_abort(aff_outfile *o)
{
    if (o->fd >= 0) close(o->fd);
    if (o->tmp && o->tmp[0]) unlink(o->tmp);
    free(o->tmp);
    free(o->path);
    *o = (aff_outfile){.fd = -1};
}

bool aff__is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool aff__file_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

aff_status aff__make_dir(const char *path, aff_error *err)
{
    if (mkdir(path, 0755) == 0 || aff__is_dir(path)) return AFF_OK;
    return aff__fail_errno(err, "%s: cannot create the folder", path);
}

aff_status aff__path_join(char *buf, size_t cap, const char *dir, const char *name, aff_error *err)
{
    size_t n = strlen(dir);
    int w = snprintf(buf, cap, "%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name);
    if (w < 0 || (size_t)w >= cap) return aff__fail(err, AFF_E_LIMIT, "%s/%s: path too long", dir, name);
    return AFF_OK;
}
