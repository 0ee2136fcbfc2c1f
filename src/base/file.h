/* file.h - whole-file reads, read-only maps, and outputs that appear complete or not at all. */
#ifndef AFF_BASE_FILE_H
#define AFF_BASE_FILE_H
#include "base/status.h"

/* What tells that a file is another one, or was written to. */
typedef struct aff_stamp {
    uint64_t dev, ino, size;
    int64_t sec, nsec; /* of its last change */
} aff_stamp;
/* Of an open file; false: the system does not say. */
bool aff__stamp_of(int fd, aff_stamp *s);
/* Of a name. */
bool aff__stamp_at(const char *path, aff_stamp *s);
static inline bool aff__stamp_same_file(const aff_stamp *a, const aff_stamp *b) { return a->dev == b->dev && a->ino == b->ino; }
static inline bool aff__stamp_same_content(const aff_stamp *a, const aff_stamp *b)
{
    return a->size == b->size && a->sec == b->sec && a->nsec == b->nsec;
}

/* A read-only shared mapping of a regular file. data is NULL when size is 0. */
typedef struct aff_map {
    const uint8_t *data;
    uint64_t size;
    aff_stamp stamp; /* as it was opened */
} aff_map;
aff_status aff__map_open(aff_map *m, const char *path, aff_error *err);
void aff__map_close(aff_map *m);

/* Reads all of `path` (a file, a pipe or "-" for standard input) into a malloc'ed buffer with a NUL after the last byte;
 * more than `limit` bytes is an error. */
aff_status aff__read_file(const char *path, uint64_t limit, char **data, size_t *size, aff_error *err);

/* An output file under a temporary name beside `path`. Write through fd (pwrite), then commit (fsync, rename, fsync of the
 * folder) or abort (close, unlink). Either call frees what the struct holds. */
typedef struct aff_outfile {
    int fd;
    char *path, *tmp;
} aff_outfile;
aff_status aff__out_open(aff_outfile *o, const char *path, aff_error *err);
/* The same under the fixed temporary name `path` + suffix, which must be the caller's alone (a lock); keep: an existing file is
 * opened as it is instead of emptied. */
aff_status aff__out_open_named(aff_outfile *o, const char *path, const char *suffix, bool keep, aff_error *err);
aff_status aff__out_commit(aff_outfile *o, aff_error *err);
void aff__out_abort(aff_outfile *o);
/* pwrite of all n bytes at off. */
aff_status aff__out_write(aff_outfile *o, const void *data, uint64_t n, uint64_t off, aff_error *err);

bool aff__is_dir(const char *path);
bool aff__file_exists(const char *path); /* anything of that name */
aff_status aff__make_dir(const char *path, aff_error *err); /* unless it is one already */
/* "dir/name" into buf; an error if it does not fit. */
aff_status aff__path_join(char *buf, size_t cap, const char *dir, const char *name, aff_error *err);
#endif
