/* Writing a container: declarations, then the layout, then payload in any order, then directories (spec container 8).
 */
#define _GNU_SOURCE
#include "base/file.h"
#include "base/mem.h"
#include "format/container_disk.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

typedef struct wtensor {
    char name[AFF_C_NAME];
    aff_matdesc m;
    uint64_t off, extent; /* within tensor data, up to the next blob */
} wtensor;

enum { STATE_OPEN, STATE_CLAIMED, STATE_DONE };

struct aff_cwriter {
    char *path, *lock_path;
    int lock_fd;
    aff_outfile out, journal; /* the journal's fd is -1 without one */
    uint64_t key;
    double (*note)[5]; /* per record, with a journal */
    pthread_mutex_t journal_lock;
    uint64_t journal_end;
    bool compat, laid_out, begun;
    char *meta, *prov;
    uint64_t meta_size, prov_size;
    wtensor *tensors;
    aff_clayer *layers;
    uint64_t *first; /* per layer: number of its expert 0 among all records */
    uint64_t n_tensors, cap_tensors, n_layers, cap_layers, records;
    aff_cheader h;
    _Atomic uint8_t *state; /* per tensor, then per record */
    uint64_t *hash;         /* the same order as `state` */
    float *profile;         /* NULL until given */
};

#define INVALID(...) aff__fail(err, AFF_E_INVALID, __VA_ARGS__)

/* ---- creation and the lock ---- */

/* Locks path.lock and makes sure that the file locked is still the one of that name: its last owner may have unlinked
 * it between our open and our lock. */
static aff_status take_lock(aff_cwriter *w, aff_error *err)
{
    for (;;) {
        struct stat mine, named;
        int fd = open(w->lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0) return aff__fail_errno(err, "%s: cannot create", w->lock_path);
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            aff_status s = errno == EWOULDBLOCK
                               ? aff__fail(err, AFF_E_IO, "%s: another program is writing this file (it holds %s)",
                                           w->path, w->lock_path)
                               : aff__fail_errno(err, "%s: cannot lock", w->lock_path);
            close(fd);
            return s;
        }
        if (fstat(fd, &mine) == 0 && stat(w->lock_path, &named) == 0 && mine.st_ino == named.st_ino &&
            mine.st_dev == named.st_dev) {
            w->lock_fd = fd;
            return AFF_OK;
        }
        close(fd);
    }
}

/* What stands in the folder stays there. */
static void forget_files(aff_cwriter *w)
{
    if (w->out.tmp) w->out.tmp[0] = 0;
    if (w->journal.tmp) w->journal.tmp[0] = 0;
}

static void free_writer(aff_cwriter *w)
{
    if (w->lock_fd >= 0) { /* unlink while the lock is ours, never somebody else's */
        unlink(w->lock_path);
        close(w->lock_fd);
    }
    pthread_mutex_destroy(&w->journal_lock);
    free(w->note);
    free(w->profile);
    free(w->hash);
    free((void *)(uintptr_t)w->state);
    free(w->first);
    free(w->layers);
    free(w->tensors);
    free(w->prov);
    free(w->meta);
    free(w->lock_path);
    free(w->path);
    free(w);
}

void aff__cwriter_suspend(aff_cwriter *w)
{
    if (!w) return;
    if (w->journal.fd >= 0 && w->out.fd >= 0)
        for (uint64_t k = 0; k < w->records; k++)
            if (w->state[w->n_tensors + k] == STATE_DONE) {
                forget_files(w);
                break;
            }
    aff__cwriter_abort(w);
}

void aff__cwriter_abort(aff_cwriter *w)
{
    if (!w) return;
    aff__out_abort(&w->out);
    aff__out_abort(&w->journal);
    free_writer(w);
}

static aff_status set_up(aff_cwriter *w, const char *path, aff_error *err)
{
    size_t n = strlen(path);
    if (aff__is_dir(path))
        return aff__fail(err, AFF_E_IO, "%s: is a folder: expected the name of a file to write", path);
    AFF_TRY(aff__strndup(&w->path, path, n, err));
    AFF_TRY(aff__realloc(&w->lock_path, (uint64_t)n + 6, 1, path, err));
    memcpy(w->lock_path, path, n);
    memcpy(w->lock_path + n, ".lock", 6);
    return take_lock(w, err);
}

aff_status aff__cwriter_create(aff_cwriter **out, const char *path, bool compat, aff_error *err)
{
    aff_cwriter *w;
    *out = NULL;
    AFF_TRY(aff__calloc(&w, 1, sizeof *w, path, err));
    w->lock_fd = -1;
    w->out.fd = -1;
    w->journal.fd = -1;
    pthread_mutex_init(&w->journal_lock, NULL);
    w->compat = compat;
    aff_status s = set_up(w, path, err);
    if (s != AFF_OK)
        aff__cwriter_abort(w);
    else
        *out = w;
    return s;
}

/* ---- declarations ---- */

static aff_status must_be_open(const aff_cwriter *w, const char *what, aff_error *err)
{
    return w->laid_out ? INVALID("%s: %s after the layout was fixed", w->path, what) : AFF_OK;
}

static aff_status keep_text(char **to, uint64_t *to_size, const char *text, size_t size, aff_error *err)
{
    char *copy;
    AFF_TRY(aff__strndup(&copy, size ? text : "", size, err));
    free(*to);
    *to = copy;
    *to_size = size;
    return AFF_OK;
}

aff_status aff__cwriter_meta(aff_cwriter *w, const char *text, size_t size, aff_error *err)
{
    AFF_TRY(must_be_open(w, "metadata", err));
    return keep_text(&w->meta, &w->meta_size, text, size, err);
}

aff_status aff__cwriter_provenance(aff_cwriter *w, const char *json, size_t size, aff_error *err)
{
    AFF_TRY(must_be_open(w, "provenance", err));
    if (w->compat) return INVALID("%s: the compatible form has no provenance", w->path);
    return keep_text(&w->prov, &w->prov_size, json, size, err);
}

/* dtypes that may be written, at all and in the compatible form. */
static bool writable(const aff_cwriter *w, aff_dtype t)
{
    switch (t) {
    case AFF_F32:
    case AFF_F16:
    case AFF_BF16:
    case AFF_FP8:
    case AFF_Q2P875Q4:
        return true;
    case AFF_Q2P875G:
    case AFF_MXFP4:
    case AFF_FP8_32:
        return !w->compat;
    default:
        return false;
    }
}

static aff_status check_dtype(const aff_cwriter *w, const char *what, aff_dtype dtype, aff_error *err)
{
    const aff_dtype_info *info = aff__dtype_info(dtype);
    if (!info) return INVALID("%s: %s: unknown dtype code %d", w->path, what, (int)dtype);
    if (!writable(w, dtype))
        return INVALID("%s: %s: dtype %s is not written%s", w->path, what, info->name,
                       w->compat ? " in the compatible form" : "");
    return AFF_OK;
}

static aff_status check_name(const aff_cwriter *w, const char *name, aff_error *err)
{
    size_t n = strlen(name);
    if (n == 0 || n >= AFF_C_NAME)
        return INVALID("%s: tensor '%s': a name has 1 to %d characters, not %zu", w->path, name, AFF_C_NAME - 1, n);
    for (const char *p = name; *p; p++)
        if (*p < 0x21 || *p > 0x7E)
            return INVALID("%s: tensor '%s': a name is of printable ASCII characters", w->path, name);
    for (uint64_t i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensors[i].name, name) == 0) return INVALID("%s: tensor '%s' is declared twice", w->path, name);
    return AFF_OK;
}

aff_status aff__cwriter_declare(aff_cwriter *w, const char *name, aff_dtype dtype, uint64_t rows, uint64_t cols,
                                uint64_t *index, aff_error *err)
{
    AFF_TRY(must_be_open(w, "a tensor was declared", err));
    AFF_TRY(check_name(w, name, err));
    AFF_TRY(check_dtype(w, name, dtype, err));
    wtensor t = {{0}};
    if (!aff__layout_blob(&t.m, dtype, rows, cols, &t.extent))
        return INVALID("%s: tensor '%s': %" PRIu64 " x %" PRIu64 " does not suit dtype %s", w->path, name, rows, cols,
                       aff__dtype_info(dtype)->name);
    if (t.m.rscale_size)
        return INVALID("%s: tensor '%s': dtype %s is for experts only", w->path, name, aff__dtype_info(dtype)->name);
    memcpy(t.name, name, strlen(name));
    if (w->n_tensors == w->cap_tensors) {
        uint64_t cap = w->cap_tensors ? w->cap_tensors * 2 : 64;
        AFF_TRY(aff__realloc(&w->tensors, cap, sizeof *w->tensors, w->path, err));
        w->cap_tensors = cap;
    }
    w->tensors[w->n_tensors] = t;
    if (index) *index = w->n_tensors;
    w->n_tensors++;
    return AFF_OK;
}

aff_status aff__cwriter_layer(aff_cwriter *w, uint32_t n_experts, aff_dtype dtype, uint64_t inter, uint64_t hidden,
                              aff_error *err)
{
    aff_clayer l = {.n_experts = n_experts};
    AFF_TRY(must_be_open(w, "a layer was declared", err));
    AFF_TRY(check_dtype(w, "experts", dtype, err));
    if (n_experts == 0) return INVALID("%s: layer %" PRIu64 ": no experts", w->path, w->n_layers);
    if (!aff__layout_record(&l, dtype, inter, hidden))
        return INVALID("%s: layer %" PRIu64 ": experts of %" PRIu64 " x %" PRIu64 " do not suit dtype %s", w->path,
                       w->n_layers, inter, hidden, aff__dtype_info(dtype)->name);
    if (w->n_layers && (w->layers[0].gate.quant != (uint32_t)dtype || w->layers[0].n_experts != n_experts))
        return INVALID("%s: layer %" PRIu64 ": every layer has the same number and dtype of experts", w->path,
                       w->n_layers);
    if (w->n_layers == w->cap_layers) {
        uint64_t cap = w->cap_layers ? w->cap_layers * 2 : 64;
        AFF_TRY(aff__realloc(&w->layers, cap, sizeof *w->layers, w->path, err));
        w->cap_layers = cap;
    }
    w->layers[w->n_layers++] = l;
    return AFF_OK;
}

/* ---- layout ---- */

static aff_status check_codebook_declared(const aff_cwriter *w, aff_error *err)
{
    if (!aff__dtype_has_codebook(w->layers[0].gate.quant)) return AFF_OK;
    for (uint64_t i = 0; i < w->n_tensors; i++) {
        const wtensor *t = &w->tensors[i];
        if (strcmp(t->name, "__codebook") == 0 && t->m.quant == AFF_F32 && t->m.data_size == 2048 * 4) return AFF_OK;
    }
    return INVALID("%s: experts of type %s need a tensor '__codebook' of 1 x 2048 f32", w->path,
                   aff__dtype_info(w->layers[0].gate.quant)->name);
}

/* Offsets of blobs and layers; false when the file would exceed what an off_t holds. */
static bool place_payload(aff_cwriter *w)
{
    const uint64_t most = INT64_MAX / 4;
    aff_cheader *h = &w->h;
    for (uint64_t i = 0; i < w->n_tensors; i++) {
        w->tensors[i].off = h->tensor_data_size;
        if (!aff__add_ok(h->tensor_data_size, w->tensors[i].extent, &h->tensor_data_size) || h->tensor_data_size > most)
            return false;
    }
    for (uint64_t l = 0; l < w->n_layers; l++) {
        uint64_t bytes;
        w->layers[l].base_off = h->pool_size;
        w->first[l] = w->records;
        w->records += w->layers[l].n_experts;
        if (!aff__mul_ok(w->layers[l].n_experts, w->layers[l].stride, &bytes) ||
            !aff__add_ok(h->pool_size, bytes, &h->pool_size) || h->pool_size > most)
            return false;
    }
    return true;
}

aff_status aff__cwriter_layout(aff_cwriter *w, aff_error *err)
{
    if (w->laid_out) return AFF_OK;
    if (!w->n_layers) return INVALID("%s: a container has at least one layer of experts", w->path);
    AFF_TRY(check_codebook_declared(w, err));
    AFF_TRY(aff__calloc(&w->first, w->n_layers, sizeof *w->first, w->path, err));
    w->laid_out = true;
    aff_cheader *h = &w->h;
    *h = (aff_cheader){.version = 1,
                       .meta_off = AFF_C_HEADER,
                       .meta_size = w->meta_size,
                       .tensor_count = w->n_tensors,
                       .layer_count = w->n_layers};
    if (!place_payload(w)) return INVALID("%s: the file would be too large", w->path);
    h->tensor_dir_off = aff__align_up(h->meta_off + h->meta_size, 8);
    h->layer_dir_off = h->tensor_dir_off + AFF_C_TENSOR * h->tensor_count;
    h->profile_off = h->layer_dir_off + AFF_C_LAYER * h->layer_count;
    h->profile_size = 4 * w->records;
    h->tensor_data_off = aff__align_up(h->profile_off + h->profile_size, AFF_C_PLANE_ALIGN);
    h->pool_off = aff__align_up(h->tensor_data_off + h->tensor_data_size, AFF_C_POOL_ALIGN);
    h->file_size = h->pool_off + h->pool_size;
    if (!w->compat) {
        h->extended = true;
        h->prov_size = w->prov_size;
        h->prov_off = w->prov_size ? h->file_size : 0;
        h->hash_off = aff__align_up(h->file_size + h->prov_size, 8);
        h->hash_size = aff__hash_table_size(w->n_tensors, w->records);
        h->file_size = h->hash_off + h->hash_size;
    }
    AFF_TRY(aff__calloc(&w->state, w->n_tensors + w->records, 1, w->path, err));
    return aff__calloc(&w->hash, w->n_tensors + w->records, sizeof *w->hash, w->path, err);
}

uint64_t aff__cwriter_file_size(const aff_cwriter *w)
{
    return w->h.file_size;
}
const aff_clayer *aff__cwriter_layer_layout(const aff_cwriter *w, uint32_t l)
{
    return l < w->n_layers ? &w->layers[l] : NULL;
}

/* Size, space and header of the temporary file. */
static aff_status prepare_file(aff_cwriter *w, aff_error *err)
{
    w->begun = true;
    if (ftruncate(w->out.fd, (off_t)w->h.file_size) != 0)
        return aff__fail_errno(err, "%s: cannot make it %" PRIu64 " bytes long", w->out.tmp, w->h.file_size);
    /* Reserve the space now, so that a full disk shows here and not hours later; not every file system can. */
    if (fallocate(w->out.fd, 0, 0, (off_t)w->h.file_size) != 0 &&
        (errno == ENOSPC || errno == EFBIG || errno == EDQUOT))
        return aff__fail_errno(err, "%s: cannot reserve %" PRIu64 " bytes", w->out.tmp, w->h.file_size);
    uint8_t header[AFF_C_HEADER];
    aff__cheader_put(header, &w->h);
    return aff__out_write(&w->out, header, sizeof header, 0, err);
}

aff_status aff__cwriter_begin(aff_cwriter *w, aff_error *err)
{
    if (w->begun) return INVALID("%s: begun twice", w->path);
    AFF_TRY(aff__cwriter_layout(w, err));
    AFF_TRY(aff__out_open(&w->out, w->path, err));
    return prepare_file(w, err);
}

/* ---- journal ---- */

/* `AFFJRNL1`, u64 key; then entries: u64 record, u64 its XXH3-64, five doubles, u64 XXH3-64 of the entry so far seeded with the
 * key. A kill may leave the last entry incomplete. */
enum { JOURNAL_HEAD = 16, JOURNAL_ENTRY = 64 };
#define JOURNAL_MAGIC "AFFJRNL1"

static uint64_t entry_check(const aff_cwriter *w, const uint8_t e[JOURNAL_ENTRY])
{
    return XXH3_64bits_withSeed(e, JOURNAL_ENTRY - 8, (XXH64_hash_t)w->key);
}

static aff_status note_expert(aff_cwriter *w, uint64_t record, const double note[5], aff_error *err)
{
    uint8_t e[JOURNAL_ENTRY];
    aff__put64(e, record);
    aff__put64(e + 8, w->hash[w->n_tensors + record]);
    memcpy(e + 16, note, 40);
    aff__put64(e + 56, entry_check(w, e));
    memcpy(w->note[record], note, 40);
    pthread_mutex_lock(&w->journal_lock);
    aff_status s = aff__out_write(&w->journal, e, sizeof e, w->journal_end, err);
    w->journal_end += s == AFF_OK ? sizeof e : 0;
    pthread_mutex_unlock(&w->journal_lock);
    return s;
}

static uint64_t record_offset(const aff_cwriter *w, uint64_t record, uint64_t *stride)
{
    uint64_t l = w->n_layers - 1;
    while (w->first[l] > record) l--;
    *stride = w->layers[l].stride;
    return w->h.pool_off + w->layers[l].base_off + (record - w->first[l]) * w->layers[l].stride;
}

/* Takes over one entry if the record in the file has its hash. */
static void take_over(aff_cwriter *w, const aff_map *file, const uint8_t e[JOURNAL_ENTRY], uint64_t *kept)
{
    uint64_t record = aff__get64(e), hash = aff__get64(e + 8), stride;
    if (aff__get64(e + 56) != entry_check(w, e) || record >= w->records) return;
    uint64_t at = record_offset(w, record, &stride);
    if (w->state[w->n_tensors + record] == STATE_DONE || !aff__range_ok(at, stride, file->size)) return;
    if (XXH3_64bits(file->data + at, (size_t)stride) != hash) return;
    w->hash[w->n_tensors + record] = hash;
    w->state[w->n_tensors + record] = STATE_DONE;
    memcpy(w->note[record], e + 16, 40);
    ++*kept;
}

static aff_status read_journal(aff_cwriter *w, const char *data, size_t n, uint64_t *kept, aff_error *err)
{
    aff_map file;
    const uint8_t *p = (const uint8_t *)data;
    if (n < JOURNAL_HEAD) return AFF_OK; /* killed before there was anything to keep */
    if (memcmp(p, JOURNAL_MAGIC, 8) != 0)
        return aff__fail(err, AFF_E_FORMAT, "%s: is no journal; remove it to start anew", w->journal.tmp);
    if (aff__get64(p + 8) != w->key)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: that run had another checkpoint, codebook, imatrix, version or options; repeat it as it was, or leave "
                         "out --resume to start anew",
                         w->journal.tmp);
    AFF_TRY(aff__map_open(&file, w->out.tmp, err));
    for (size_t at = JOURNAL_HEAD; at + JOURNAL_ENTRY <= n; at += JOURNAL_ENTRY) take_over(w, &file, p + at, kept);
    aff__map_close(&file);
    return AFF_OK;
}

/* Writes the journal anew from what is known, so that nothing damaged stays in it. */
static aff_status restart_journal(aff_cwriter *w, aff_error *err)
{
    uint8_t head[JOURNAL_HEAD];
    if (ftruncate(w->journal.fd, 0) != 0) return aff__fail_errno(err, "%s: cannot empty", w->journal.tmp);
    memcpy(head, JOURNAL_MAGIC, 8);
    aff__put64(head + 8, w->key);
    w->journal_end = JOURNAL_HEAD;
    AFF_TRY(aff__out_write(&w->journal, head, sizeof head, 0, err));
    for (uint64_t k = 0; k < w->records; k++)
        if (w->state[w->n_tensors + k] == STATE_DONE) AFF_TRY(note_expert(w, k, w->note[k], err));
    return AFF_OK;
}

static aff_status take_over_all(aff_cwriter *w, uint64_t *kept, aff_error *err)
{
    char *data;
    size_t n;
    AFF_TRY(aff__out_open_named(&w->out, w->path, ".partial", true, err));
    AFF_TRY(aff__out_open_named(&w->journal, w->path, ".journal", true, err));
    AFF_TRY(aff__read_file(w->journal.tmp, 1ull << 30, &data, &n, err));
    aff_status s = read_journal(w, data, n, kept, err);
    free(data);
    return s;
}

aff_status aff__cwriter_begin_journal(aff_cwriter *w, uint64_t key, bool resume, uint64_t *kept, aff_error *err)
{
    *kept = 0;
    if (w->begun) return INVALID("%s: begun twice", w->path);
    AFF_TRY(aff__cwriter_layout(w, err));
    AFF_TRY(aff__calloc(&w->note, w->records, sizeof *w->note, w->path, err));
    w->key = key;
    if (resume) {
        aff_status s = take_over_all(w, kept, err);
        if (s != AFF_OK) {
            forget_files(w); /* what another run left is not ours to remove */
            return s;
        }
    } else {
        AFF_TRY(aff__out_open_named(&w->out, w->path, ".partial", false, err));
        AFF_TRY(aff__out_open_named(&w->journal, w->path, ".journal", false, err));
    }
    /* Records are known by their hashes; everything else in the file must not survive. */
    if (*kept == 0 && ftruncate(w->out.fd, 0) != 0) return aff__fail_errno(err, "%s: cannot empty", w->out.tmp);
    AFF_TRY(restart_journal(w, err));
    return prepare_file(w, err);
}

bool aff__cwriter_has_expert(const aff_cwriter *w, uint32_t l, uint32_t e, double note[5])
{
    uint64_t k = w->first[l] + e;
    if (w->state[w->n_tensors + k] != STATE_DONE) return false;
    if (note && w->note) memcpy(note, w->note[k], 40);
    return true;
}

/* ---- payload ---- */

/* Makes slot k ours; false when somebody has written it or is writing it. */
static bool claim(aff_cwriter *w, uint64_t k)
{
    uint8_t expected = STATE_OPEN;
    return atomic_compare_exchange_strong(&w->state[k], &expected, STATE_CLAIMED);
}

static aff_status settle(aff_cwriter *w, uint64_t k, aff_status s)
{
    atomic_store(&w->state[k], s == AFF_OK ? STATE_DONE : STATE_OPEN);
    return s;
}

/* Hash of a blob as it stands in the file, gaps of zeros included. */
static uint64_t blob_hash(const wtensor *t, const void *data, const void *scale)
{
    static const uint8_t zeros[AFF_C_PLANE_ALIGN];
    XXH3_state_t s;
    XXH3_64bits_reset(&s);
    XXH3_64bits_update(&s, data, (size_t)t->m.data_size);
    XXH3_64bits_update(&s, zeros, (size_t)(t->m.scale_off - t->m.data_size));
    if (t->m.scale_size) XXH3_64bits_update(&s, scale, (size_t)t->m.scale_size);
    XXH3_64bits_update(&s, zeros, (size_t)(t->extent - t->m.scale_off - t->m.scale_size));
    return XXH3_64bits_digest(&s);
}

static aff_status put_tensor(aff_cwriter *w, uint64_t i, const void *data, const void *scale, aff_error *err)
{
    const wtensor *t = &w->tensors[i];
    uint64_t at = w->h.tensor_data_off + t->off;
    if (strcmp(t->name, "__codebook") == 0 && aff__dtype_has_codebook(w->layers[0].gate.quant))
        AFF_TRY(aff__codebook_check(w->path, w->layers[0].gate.quant, data, t->m.data_size, err));
    AFF_TRY(aff__out_write(&w->out, data, t->m.data_size, at, err));
    if (t->m.scale_size) AFF_TRY(aff__out_write(&w->out, scale, t->m.scale_size, at + t->m.scale_off, err));
    if (!w->compat) w->hash[i] = blob_hash(t, data, scale);
    return AFF_OK;
}

aff_status aff__cwriter_tensor(aff_cwriter *w, uint64_t index, const void *data, uint64_t size, const void *scale,
                               uint64_t scale_size, aff_error *err)
{
    if (!w->begun) return INVALID("%s: payload before begin", w->path);
    if (index >= w->n_tensors) return INVALID("%s: tensor %" PRIu64 " of %" PRIu64, w->path, index, w->n_tensors);
    const wtensor *t = &w->tensors[index];
    if (size != t->m.data_size || scale_size != t->m.scale_size)
        return INVALID("%s: tensor '%s': expected %" PRIu64 " bytes and %" PRIu64 " of scales, got %" PRIu64
                       " and %" PRIu64,
                       w->path, t->name, t->m.data_size, t->m.scale_size, size, scale_size);
    if (!claim(w, index)) return INVALID("%s: tensor '%s' is written twice", w->path, t->name);
    return settle(w, index, put_tensor(w, index, data, scale, err));
}

static aff_status put_expert(aff_cwriter *w, uint32_t l, uint32_t e, const void *record, const double *note,
                             aff_error *err)
{
    if (!w->begun) return INVALID("%s: payload before begin", w->path);
    if (l >= w->n_layers || e >= w->layers[l].n_experts)
        return INVALID("%s: layer %" PRIu32 " expert %" PRIu32 ": there is no such expert", w->path, l, e);
    const aff_clayer *y = &w->layers[l];
    uint64_t k = w->n_tensors + w->first[l] + e;
    if (!claim(w, k)) return INVALID("%s: layer %" PRIu32 " expert %" PRIu32 " is written twice", w->path, l, e);
    if (!w->compat || note) w->hash[k] = XXH3_64bits(record, (size_t)y->stride);
    aff_status s = aff__out_write(&w->out, record, y->stride, w->h.pool_off + y->base_off + e * y->stride, err);
    if (s == AFF_OK && note) s = note_expert(w, k - w->n_tensors, note, err);
    return settle(w, k, s);
}

aff_status aff__cwriter_expert(aff_cwriter *w, uint32_t l, uint32_t e, const void *record, aff_error *err)
{
    return put_expert(w, l, e, record, NULL, err);
}

aff_status aff__cwriter_expert_noted(aff_cwriter *w, uint32_t l, uint32_t e, const void *record, const double note[5],
                                     aff_error *err)
{
    if (w->journal.fd < 0) return INVALID("%s: there is no journal", w->path);
    return put_expert(w, l, e, record, note, err);
}

aff_status aff__cwriter_profile(aff_cwriter *w, const float *p, uint64_t count, aff_error *err)
{
    AFF_TRY(aff__cwriter_layout(w, err));
    if (count != w->records)
        return INVALID("%s: profile of %" PRIu64 " values: expected one for each of %" PRIu64 " experts", w->path,
                       count, w->records);
    for (uint64_t i = 0; i < count; i++)
        if (!isfinite(p[i])) return INVALID("%s: profile value %" PRIu64 " is not finite", w->path, i);
    if (!w->profile) AFF_TRY(aff__calloc(&w->profile, count, 4, w->path, err));
    memcpy(w->profile, p, (size_t)count * 4);
    w->h.flags |= AFF_C_FLAG_PROFILE;
    return AFF_OK;
}

/* ---- finish ---- */

static aff_status check_complete(aff_cwriter *w, aff_error *err)
{
    uint64_t missing = 0;
    for (uint64_t i = 0; i < w->n_tensors; i++)
        if (w->state[i] != STATE_DONE) return INVALID("%s: tensor '%s' was never written", w->path, w->tensors[i].name);
    for (uint64_t k = 0; k < w->records; k++) missing += w->state[w->n_tensors + k] != STATE_DONE;
    for (uint32_t l = 0; missing && l < w->n_layers; l++)
        for (uint32_t e = 0; e < w->layers[l].n_experts; e++)
            if (w->state[w->n_tensors + w->first[l] + e] != STATE_DONE)
                return INVALID("%s: layer %" PRIu32 " expert %" PRIu32 " was never written (%" PRIu64
                               " experts are missing)",
                               w->path, l, e, missing);
    return AFF_OK;
}

/* Everything before the tensor data, as it will stand in the file. */
static void fill_front(const aff_cwriter *w, uint8_t *front)
{
    aff__cheader_put(front, &w->h);
    if (w->meta_size) memcpy(front + w->h.meta_off, w->meta, (size_t)w->meta_size);
    for (uint64_t i = 0; i < w->n_tensors; i++)
        aff__ctensor_put(front + w->h.tensor_dir_off + i * AFF_C_TENSOR, w->tensors[i].name, &w->tensors[i].m,
                         w->tensors[i].off);
    for (uint32_t l = 0; l < w->n_layers; l++)
        aff__clayer_put(front + w->h.layer_dir_off + (uint64_t)l * AFF_C_LAYER, l, &w->layers[l]);
    if (w->profile) memcpy(front + w->h.profile_off, w->profile, (size_t)w->h.profile_size);
}

static aff_status write_additions(aff_cwriter *w, const uint8_t *front, aff_error *err)
{
    uint8_t *t;
    uint64_t n = w->h.hash_size;
    if (w->compat) return AFF_OK;
    if (w->prov_size) AFF_TRY(aff__out_write(&w->out, w->prov, w->prov_size, w->h.prov_off, err));
    AFF_TRY(aff__calloc(&t, n, 1, w->path, err));
    memcpy(t, AFF_C_HASH_MAGIC, 8);
    aff__put32(t + 8, 1); /* XXH3-64 */
    aff__put64(t + 16, w->n_tensors);
    aff__put64(t + 24, w->records);
    aff__put64(t + 32, aff__front_hash(front, w->h.tensor_data_off, w->prov, w->prov_size));
    for (uint64_t k = 0; k < w->n_tensors + w->records; k++) aff__put64(t + AFF_C_HASH_HEAD + 8 * k, w->hash[k]);
    aff__put64(t + n - 8, XXH3_64bits(t, (size_t)n - 8));
    aff_status s = aff__out_write(&w->out, t, n, w->h.hash_off, err);
    free(t);
    return s;
}

static aff_status sync_now(aff_cwriter *w, aff_error *err)
{
    return fsync(w->out.fd) == 0 ? AFF_OK : aff__fail_errno(err, "%s: cannot sync", w->out.tmp);
}

/* The layer directory goes last: without it no reader takes the file for a whole one. */
static aff_status write_directories(aff_cwriter *w, const uint8_t *front, aff_error *err)
{
    uint64_t layers = w->h.layer_dir_off, behind = w->h.profile_off;
    AFF_TRY(sync_now(w, err));
    AFF_TRY(aff__out_write(&w->out, front, layers, 0, err));
    AFF_TRY(aff__out_write(&w->out, front + behind, w->h.tensor_data_off - behind, behind, err));
    AFF_TRY(write_additions(w, front, err));
    AFF_TRY(sync_now(w, err));
    AFF_TRY(aff__out_write(&w->out, front + layers, behind - layers, layers, err));
    aff_container *c;
    AFF_TRY(aff__container_open(&c, w->out.tmp, err));
    aff__container_close(c);
    return AFF_OK;
}

static aff_status finish(aff_cwriter *w, aff_error *err)
{
    uint8_t *front;
    if (!w->begun) return INVALID("%s: finished before begin", w->path);
    AFF_TRY(check_complete(w, err));
    AFF_TRY(aff__calloc(&front, w->h.tensor_data_off, 1, w->path, err));
    fill_front(w, front);
    aff_status s = write_directories(w, front, err);
    free(front);
    if (s == AFF_OK) s = aff__out_commit(&w->out, err); /* syncs, renames */
    return s;
}

aff_status aff__cwriter_finish(aff_cwriter *w, aff_error *err)
{
    aff_status s = finish(w, err);
    if (s == AFF_OK)
        aff__cwriter_abort(w); /* after the commit only the journal is left to remove */
    else
        aff__cwriter_suspend(w);
    return s;
}
