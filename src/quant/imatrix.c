#define _GNU_SOURCE
#include "quant/imatrix.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/gguf.h"
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

enum { PARTS = 3, MAX_ENTRIES = 1 << 20 };

/* One (layer, part): sums [experts][cols], counts [experts] or a single divisor. */
typedef struct entry {
    const uint8_t *sums;   /* float32, any alignment; NULL: not in the file */
    const uint8_t *counts; /* float32 [n_counts]; NULL: `divisor` */
    uint64_t n_counts;     /* experts, or 1: converted from a legacy file */
    float divisor;
} entry;

struct aff_imatrix {
    char *path;
    aff_map map;
    aff_gguf *gguf;
    aff_im_shape shape;
    aff_im_info info;
    entry *entries;          /* [layers][PARTS] */
    const uint8_t **moments; /* [layers][2], gate and up, down; NULL: none */
    unsigned char *empty;    /* [layers][experts] bit per part: no statistics */
    float *profile;          /* [layers][experts] */
};

static float f32_at(const uint8_t *p, uint64_t i)
{
    float f;
    memcpy(&f, p + i * 4, 4);
    return f;
}

static uint64_t columns(const aff_im_shape *s, int part)
{
    return part == AFF_IM_DOWN ? s->inter : s->hidden;
}

/* ---- names ---- */

/* "blk.<layer>.ffn_<kind>_exps.weight": *parts receives a bit per part it stands for. False: not of routed experts. */
static bool parse_name(const char *s, size_t n, uint64_t *layer, unsigned *parts)
{
    static const struct {
        const char *name;
        unsigned parts;
    } kinds[] = {{".ffn_gate_exps.weight", 1},
                 {".ffn_up_exps.weight", 2},
                 {".ffn_down_exps.weight", 4},
                 {".ffn_gate_up_exps.weight", 3}};
    size_t i = 4;
    if (n < 5 || memcmp(s, "blk.", 4) != 0) return false;
    for (*layer = 0; i < n && i < 14 && s[i] >= '0' && s[i] <= '9'; i++) *layer = *layer * 10 + (uint64_t)(s[i] - '0');
    if (i == 4) return false;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        if (n - i == strlen(kinds[k].name) && memcmp(s + i, kinds[k].name, n - i) == 0) {
            *parts = kinds[k].parts;
            return true;
        }
    return false;
}

/* ---- one entry ---- */

typedef struct named {
    const aff_imatrix *m;
    const char *name;
    size_t n;
} named;

static aff_status __attribute__((format(printf, 3, 4))) bad(const named *e, aff_error *err, const char *fmt, ...)
{
    char why[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    return aff__fail(err, AFF_E_FORMAT, "%s: entry '%.*s': %s", e->m->path, (int)e->n, e->name, why);
}

static aff_status check_row(const named *n, const entry *e, uint64_t row, uint64_t cols, float divisor, bool *empty,
                            aff_error *err)
{
    const uint8_t *p = e->sums + row * cols * 4;
    double mean = 0, most = 0;
    bool same = true;
    for (uint64_t j = 0; j < cols; j++) {
        const float f = f32_at(p, j);
        if (!(f >= 0) || isinf(f))
            return bad(n, err, "expert %" PRIu64 ", column %" PRIu64 ": expected a sum of squares, got %g", row, j,
                       (double)f);
        same = same && f == f32_at(p, 0);
        const double v = (double)f / (double)divisor;
        most = v > most ? v : most;
        mean += v;
    }
    mean /= (double)cols;
    /* Legacy files fill the rows of unseen experts with one number. */
    *empty = !(mean > 0) || (!e->counts && same) || (e->n_counts == 1 && n->m->shape.experts > 1 && same);
    if (!*empty &&
        (!isfinite((float)most) || !isfinite((float)most * (float)(1 / mean)) || !isfinite((float)(1 / mean))))
        return bad(n, err, "expert %" PRIu64 ": its sums (mean %g a token) do not fit float32", row, mean);
    return AFF_OK;
}

static float divisor_of(const entry *e, uint64_t expert)
{
    const float c = e->counts ? f32_at(e->counts, e->n_counts == 1 ? 0 : expert) : e->divisor;
    return c > 0 ? c : 1;
}

static aff_status check_counts(const named *n, const entry *e, aff_error *err)
{
    for (uint64_t i = 0; e->counts && i < e->n_counts; i++) {
        const float c = f32_at(e->counts, i);
        if (!(c >= 0) || isinf(c))
            return bad(n, err, "counts: expert %" PRIu64 ": expected a number of tokens, got %g", i, (double)c);
    }
    return AFF_OK;
}

/* Checks an entry and files it under its layer and parts. */
static aff_status add(aff_imatrix *m, const char *name, size_t len, uint64_t layer, unsigned parts, const entry *e,
                      uint64_t nval, aff_error *err)
{
    const named n = {m, name, len};
    const uint64_t E = m->shape.experts, cols = columns(&m->shape, parts == 4 ? AFF_IM_DOWN : AFF_IM_GATE);
    if (layer >= m->shape.layers)
        return bad(&n, err, "the model has layers 0 to %u: this is the imatrix of another model", m->shape.layers - 1);
    if (nval != E * cols)
        return bad(&n, err,
                   "expected %" PRIu64 " values (%" PRIu64 " experts of %" PRIu64 " columns), got %" PRIu64
                   ": this is the imatrix of another model",
                   E * cols, E, cols, nval);
    AFF_TRY(check_counts(&n, e, err));
    for (int p = 0; p < PARTS; p++)
        if ((parts >> p & 1) && m->entries[layer * PARTS + (uint64_t)p].sums)
            return bad(&n, err, "layer %" PRIu64 " has its %s twice", layer, p == 0 ? "gate" : p == 1 ? "up" : "down");
    for (uint64_t x = 0; x < E; x++) {
        bool empty;
        AFF_TRY(check_row(&n, e, x, cols, divisor_of(e, x), &empty, err));
        const bool unused = e->counts && e->n_counts == E && f32_at(e->counts, x) == 0;
        if (unused && !empty) return bad(&n, err, "expert %" PRIu64 ": counts says 0 tokens, in_sum2 is not 0", x);
        if (empty) m->empty[layer * E + x] |= (unsigned char)parts;
    }
    for (int p = 0; p < PARTS; p++)
        if (parts >> p & 1) m->entries[layer * PARTS + (uint64_t)p] = *e;
    if (parts & 1) {
        if (e->counts && e->n_counts == E)
            for (uint64_t x = 0; x < E; x++) m->profile[layer * E + x] = f32_at(e->counts, x);
        else
            m->info.has_counts = false;
    }
    return AFF_OK;
}

/* ---- GGUF ---- */

static bool ends_with(const char *s, size_t n, const char *tail)
{
    const size_t t = strlen(tail);
    return n > t && memcmp(s + n - t, tail, t) == 0;
}

static aff_status float_tensor(const aff_imatrix *m, const aff_gguf_tensor *t, aff_error *err)
{
    if (t->type == AFF_GGML_F32) return AFF_OK;
    return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s': expected float32 (type 0), got type %u", m->path, t->name,
                     t->type);
}

/* The sums' tensor and its counts. dims: [cols][experts] with [1][experts], or [experts*cols] with [1] as converters of
 * legacy files write it. */
static aff_status gguf_entry(aff_imatrix *m, const aff_gguf_tensor *sums, size_t len, uint64_t layer, unsigned parts,
                             aff_error *err)
{
    char name[128];
    const named n = {m, sums->name, len};
    snprintf(name, sizeof name, "%.*s.counts", (int)len, sums->name);
    const aff_gguf_tensor *counts = aff__gguf_find(m->gguf, name);
    if (!counts) return bad(&n, err, "has in_sum2 and no counts");
    AFF_TRY(float_tensor(m, sums, err));
    AFF_TRY(float_tensor(m, counts, err));
    const uint64_t E = m->shape.experts, cols = columns(&m->shape, parts == 4 ? AFF_IM_DOWN : AFF_IM_GATE);
    const uint64_t nval = sums->size / 4, n_counts = counts->size / 4;
    const bool flat = sums->dims[0] == E * cols && n_counts == 1;
    if (!flat && (sums->dims[0] != cols || sums->dims[1] != E || nval != cols * E))
        return bad(&n, err,
                   "in_sum2: expected %" PRIu64 " columns x %" PRIu64 " experts, got %" PRIu64 " x %" PRIu64
                   ": this is the imatrix of another model",
                   cols, E, sums->dims[0], nval / sums->dims[0]);
    if (!flat && (counts->dims[0] != 1 || n_counts != E))
        return bad(&n, err, "counts: expected 1 x %" PRIu64 ", got %" PRIu64 " x %" PRIu64, E, counts->dims[0],
                   n_counts / counts->dims[0]);
    return add(m, sums->name, len, layer, parts,
               &(entry){.sums = sums->data, .counts = counts->data, .n_counts = n_counts}, nval, err);
}

static uint64_t triangle(uint64_t n)
{
    return n * (n + 1) / 2;
}

/* Upper triangles row by row: one for gate and up, one an expert for down. */
static aff_status check_moments(const named *n, const uint8_t *p, uint64_t cols, uint64_t count, aff_error *err)
{
    for (uint64_t x = 0; x < count; x++)
        for (uint64_t i = 0; i < cols; i++)
            for (uint64_t j = i; j < cols; j++, p += 4) {
                const float f = f32_at(p, 0);
                if (!isfinite(f) || (i == j && f < 0))
                    return bad(n, err,
                               "in_cov: matrix %" PRIu64 ", row %" PRIu64 ", column %" PRIu64
                               ": expected a finite moment, got %g",
                               x, i, j, (double)f);
            }
    return AFF_OK;
}

static aff_status moments_entry(aff_imatrix *m, const aff_gguf_tensor *t, size_t len, uint64_t layer, unsigned parts,
                                aff_error *err)
{
    const named n = {m, t->name, len};
    const bool down = parts == 4;
    const uint64_t cols = columns(&m->shape, down ? AFF_IM_DOWN : AFF_IM_GATE), count = down ? m->shape.experts : 1;
    if (parts != 1 && !down) return bad(&n, err, "in_cov: expected that of ffn_gate_exps or ffn_down_exps");
    if (layer >= m->shape.layers)
        return bad(&n, err, "in_cov: the model has layers 0 to %u: this is the imatrix of another model",
                   m->shape.layers - 1);
    AFF_TRY(float_tensor(m, t, err));
    if (t->dims[0] != triangle(cols) || t->dims[1] != count || t->size != triangle(cols) * count * 4)
        return bad(&n, err,
                   "in_cov: expected %" PRIu64 " x %" PRIu64 " values, got %" PRIu64 " x %" PRIu64
                   ": this is the imatrix of another model",
                   triangle(cols), count, t->dims[0], t->dims[1]);
    AFF_TRY(check_moments(&n, t->data, cols, count, err));
    m->moments[2 * layer + down] = t->data;
    return AFF_OK;
}

static aff_status read_gguf(aff_imatrix *m, const uint8_t *data, uint64_t size, aff_error *err)
{
    static const char sum_tail[] = ".in_sum2", count_tail[] = ".counts", moment_tail[] = ".in_cov";
    AFF_TRY(aff__gguf_open_memory(&m->gguf, data, (size_t)size, m->path, err));
    for (uint64_t i = 0; i < aff__gguf_tensors(m->gguf); i++) {
        const aff_gguf_tensor *t = aff__gguf_tensor(m->gguf, i);
        const size_t n = strlen(t->name);
        uint64_t layer;
        unsigned parts;
        char name[128];
        const bool is_sum = ends_with(t->name, n, sum_tail), is_count = ends_with(t->name, n, count_tail);
        const size_t len = n - (is_sum ? sizeof sum_tail - 1 : is_count ? sizeof count_tail - 1 : 0);
        if (ends_with(t->name, n, moment_tail) && parse_name(t->name, n - (sizeof moment_tail - 1), &layer, &parts))
            AFF_TRY(moments_entry(m, t, n - (sizeof moment_tail - 1), layer, parts, err));
        if ((!is_sum && !is_count) || !parse_name(t->name, len, &layer, &parts)) continue;
        snprintf(name, sizeof name, "%.*s.in_sum2", (int)len, t->name);
        if (is_sum)
            AFF_TRY(gguf_entry(m, t, len, layer, parts, err));
        else if (!aff__gguf_find(m->gguf, name))
            return bad(&(named){m, t->name, len}, err, "has counts and no in_sum2");
    }
    return AFF_OK;
}

/* ---- legacy .dat: i32 entries; i32 name length, name, i32 calls, i32 values, float32 values; a tail that nothing here
 * needs ---- */

static bool take_i32(const uint8_t *data, uint64_t size, uint64_t *at, int32_t *v)
{
    if (!aff__range_ok(*at, 4, size)) return false;
    memcpy(v, data + *at, 4);
    *at += 4;
    return true;
}

static aff_status truncated(const aff_imatrix *m, int32_t i, int32_t n, uint64_t at, aff_error *err)
{
    return aff__fail(err, AFF_E_FORMAT,
                     "%s: entry %d of %d at byte %" PRIu64 ": its lengths are negative or pass the end of the file",
                     m->path, i + 1, n, at);
}

static aff_status read_legacy(aff_imatrix *m, const uint8_t *data, uint64_t size, aff_error *err)
{
    uint64_t at = 0;
    int32_t n, name_len, calls, nval;
    if (!take_i32(data, size, &at, &n) || n < 1 || n > MAX_ENTRIES)
        return aff__fail(err, AFF_E_FORMAT, "%s: neither a GGUF file nor a legacy imatrix", m->path);
    m->info.has_counts = false;
    m->info.legacy = true;
    for (int32_t i = 0; i < n; i++) {
        const uint64_t start = at;
        if (!take_i32(data, size, &at, &name_len) || name_len < 1 || name_len > 65535 ||
            !aff__range_ok(at, (uint64_t)name_len, size))
            return i ? truncated(m, i, n, start, err)
                     : aff__fail(err, AFF_E_FORMAT, "%s: neither a GGUF file nor a legacy imatrix", m->path);
        const char *name = (const char *)data + at;
        at += (uint64_t)name_len;
        if (!take_i32(data, size, &at, &calls) || !take_i32(data, size, &at, &nval) || calls < 0 || nval < 1 ||
            !aff__range_ok(at, (uint64_t)nval * 4, size))
            return truncated(m, i, n, start, err);
        uint64_t layer;
        unsigned parts;
        if (parse_name(name, (size_t)name_len, &layer, &parts))
            AFF_TRY(add(m, name, (size_t)name_len, layer, parts, &(entry){.sums = data + at, .divisor = (float)calls},
                        (uint64_t)nval, err));
        at += (uint64_t)nval * 4;
    }
    return AFF_OK;
}

/* ---- opening ---- */

static aff_status check_shape(const aff_im_shape *s, aff_error *err)
{
    uint64_t n;
    const uint64_t wide = s->hidden > s->inter ? s->hidden : s->inter;
    if (s->layers && s->experts && s->hidden && s->inter && aff__mul_ok(wide, s->experts, &n) && n < UINT64_MAX / 8)
        return AFF_OK;
    return aff__fail(err, AFF_E_INVALID, "imatrix: a model of %u layers, %u experts, widths %" PRIu64 " and %" PRIu64,
                     s->layers, s->experts, s->hidden, s->inter);
}

static void summarise(aff_imatrix *m)
{
    const uint64_t E = m->shape.experts;
    for (uint64_t i = 0; i < (uint64_t)m->shape.layers * PARTS; i++) m->info.present += m->entries[i].sums != NULL;
    for (uint64_t l = 0; l < m->shape.layers; l++) {
        m->info.moments_down += m->moments[2 * l + 1] != NULL;
        m->info.moments += (m->moments[2 * l] != NULL) + (m->moments[2 * l + 1] != NULL);
    }
    m->info.missing = (uint64_t)m->shape.layers * PARTS - m->info.present;
    for (uint64_t i = 0; i < m->shape.layers * E; i++) m->info.unseen += m->empty[i] != 0;
}

static aff_status load(aff_imatrix *m, const uint8_t *data, uint64_t size, aff_error *err)
{
    const uint64_t pairs = (uint64_t)m->shape.layers * m->shape.experts;
    AFF_TRY(aff__calloc(&m->entries, (uint64_t)m->shape.layers * PARTS, sizeof *m->entries, "imatrix", err));
    AFF_TRY(aff__calloc(&m->moments, m->shape.layers, 2 * sizeof *m->moments, "imatrix", err));
    AFF_TRY(aff__calloc(&m->empty, pairs, 1, "imatrix", err));
    AFF_TRY(aff__calloc(&m->profile, pairs, sizeof *m->profile, "imatrix", err));
    m->info.has_counts = true;
    if (size >= 4 && memcmp(data, "GGUF", 4) == 0)
        AFF_TRY(read_gguf(m, data, size, err));
    else
        AFF_TRY(read_legacy(m, data, size, err));
    summarise(m);
    if (!m->info.present)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: no entry is of routed experts: expected names like 'blk.0.ffn_gate_exps.weight'",
                         m->path);
    m->info.hash = XXH3_64bits(data, (size_t)size);
    /* The checks and the hash have read all of it, and moments are gigabytes; the pages come back when they are needed.
     */
    if (m->map.data) (void)madvise((void *)(uintptr_t)m->map.data, (size_t)m->map.size, MADV_DONTNEED);
    return AFF_OK;
}

static aff_status open_bytes(aff_imatrix **out, aff_map map, const uint8_t *data, uint64_t size, const char *name,
                             const aff_im_shape *shape, aff_error *err)
{
    aff_imatrix *m = NULL;
    aff_status s = aff__calloc(&m, 1, sizeof *m, name, err);
    if (s != AFF_OK) {
        aff__map_close(&map);
        return s;
    }
    *m = (aff_imatrix){.map = map, .shape = *shape};
    s = check_shape(shape, err);
    if (s == AFF_OK) s = aff__strndup(&m->path, name, strlen(name), err);
    if (s == AFF_OK) s = load(m, data, size, err);
    if (s != AFF_OK) {
        aff__imatrix_close(m);
        return s;
    }
    *out = m;
    return AFF_OK;
}

aff_status aff__imatrix_open(aff_imatrix **out, const char *path, const aff_im_shape *shape, aff_error *err)
{
    aff_map map;
    *out = NULL;
    AFF_TRY(aff__map_open(&map, path, err));
    return open_bytes(out, map, map.data, map.size, path, shape, err);
}

aff_status aff__imatrix_open_memory(aff_imatrix **out, const void *data, size_t size, const char *name,
                                    const aff_im_shape *shape, aff_error *err)
{
    *out = NULL;
    return open_bytes(out, (aff_map){0}, data, size, name, shape, err);
}

void aff__imatrix_close(aff_imatrix *m)
{
    if (!m) return;
    aff__gguf_close(m->gguf);
    aff__map_close(&m->map);
    free(m->entries);
    free((void *)m->moments);
    free(m->empty);
    free(m->profile);
    free(m->path);
    free(m);
}

const aff_im_info *aff__imatrix_info(const aff_imatrix *m)
{
    return &m->info;
}
const float *aff__imatrix_profile(const aff_imatrix *m)
{
    return m->info.has_counts ? m->profile : NULL;
}

bool aff__imatrix_weights(const aff_imatrix *m, uint32_t layer, uint32_t expert, aff_im_part part, float *out)
{
    const uint64_t cols = columns(&m->shape, part);
    const entry *e = layer < m->shape.layers && expert < m->shape.experts
                         ? &m->entries[(uint64_t)layer * PARTS + (uint64_t)part]
                         : NULL;
    if (!e || !e->sums || (m->empty[(uint64_t)layer * m->shape.experts + expert] >> part & 1)) {
        for (uint64_t j = 0; j < cols; j++) out[j] = 1;
        return false;
    }
    const uint8_t *p = e->sums + (uint64_t)expert * cols * 4;
    const double n = (double)divisor_of(e, expert);
    double sum = 0;
    for (uint64_t j = 0; j < cols; j++) {
        const double v = (double)f32_at(p, j) / n;
        out[j] = (float)v;
        sum += v;
    }
    const float scale = (float)(1 / (sum / (double)cols));
    for (uint64_t j = 0; j < cols; j++) out[j] *= scale;
    return true;
}

const uint8_t *aff__imatrix_moments(const aff_imatrix *m, uint32_t layer, uint32_t expert, aff_im_part part)
{
    const bool down = part == AFF_IM_DOWN;
    const uint64_t cols = columns(&m->shape, part), at = down ? (uint64_t)expert * triangle(cols) * 4 : 0;
    const uint8_t *p = layer < m->shape.layers && expert < m->shape.experts ? m->moments[2 * layer + down] : NULL;
    if (!p) return NULL;
    for (uint64_t i = 0, on = 0; i < cols; on += cols - i, i++)
        if (f32_at(p + at, on) > 0) return p + at;
    return NULL; /* an expert that was never used: zeros */
}
