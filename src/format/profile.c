#include "format/profile.h"
#include "base/file.h"
#include "base/mem.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* The machine is little-endian, like every file format here. */
enum { HEAD = 16, MAP_HEAD = 24, HASH = 8, MOST_LAYERS = 4096, MOST_EXPERTS = 65536, MOST_PICKS = 64 };

static uint64_t uses(const aff_profile *p)
{
    return (uint64_t)p->layers * (uint64_t)p->experts;
}
static uint64_t biases(const aff_profile *p)
{
    return (uint64_t)(p->layers - 1) * (uint64_t)p->experts;
}
static uint64_t weights(const aff_profile *p)
{
    return biases(p) * (uint64_t)p->experts;
}
static uint64_t one_map(const aff_profile *p)
{
    return (uint64_t)p->experts * 4 + 4 * (uint64_t)p->experts * (uint64_t)p->experts;
}
static uint64_t map_bytes(const aff_profile *p)
{
    return 8 + (uint64_t)(p->layers - 1) * one_map(p) + HASH;
}

aff_status aff__profile_create(aff_profile *p, int layers, int experts, int picks, aff_error *err)
{
    static const char what[] = "expert profile";
    *p = (aff_profile){.layers = layers, .experts = experts, .picks = picks};
    if (layers < 1 || layers > MOST_LAYERS || experts < 1 || experts > MOST_EXPERTS || picks < 0 || picks > experts ||
        picks > MOST_PICKS)
        return aff__fail(err, AFF_E_INVALID, "expert profile: %d layers of %d experts, %d picks: out of range", layers,
                         experts, picks);
    aff_status s = aff__calloc(&p->use, uses(p), sizeof *p->use, what, err);
    if (s == AFF_OK && picks) s = aff__calloc(&p->bias, biases(p), sizeof *p->bias, what, err);
    if (s == AFF_OK && picks) s = aff__calloc(&p->below, weights(p), sizeof *p->below, what, err);
    if (s == AFF_OK && picks) s = aff__calloc(&p->before, weights(p), sizeof *p->before, what, err);
    if (s != AFF_OK) aff__profile_free(p);
    return s;
}

void aff__profile_free(aff_profile *p)
{
    free(p->use);
    free(p->bias);
    free(p->below);
    free(p->before);
    *p = (aff_profile){0};
}

/* ---- reading ---- */

static uint32_t u32_at(const uint8_t *b)
{
    uint32_t v;
    memcpy(&v, b, sizeof v);
    return v;
}
static uint64_t u64_at(const uint8_t *b)
{
    uint64_t v;
    memcpy(&v, b, sizeof v);
    return v;
}

static aff_status damaged(aff_error *err, const char *name, const char *what)
{
    return aff__fail(err, AFF_E_FORMAT, "%s: expert profile: %s", name, what);
}

/* The section of maps: its head and length, and that nothing comes behind it. */
static aff_status check_maps(const aff_profile *shape, const uint8_t *data, uint64_t at, uint64_t size,
                             const char *name, int *picks, aff_error *err)
{
    if (size - at < MAP_HEAD || memcmp(data + at, "affpred1", 8))
        return damaged(err, name, "expected its end or a section affpred1 after the numbers");
    const uint64_t bytes = u64_at(data + at + 8), want = map_bytes(shape);
    const uint32_t k = u32_at(data + at + 16);
    if (bytes != want || size - at - 16 != want)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: expert profile: maps of %d layers and %d experts: expected %llu bytes, got %llu, of "
                         "which %llu are there",
                         name, shape->layers, shape->experts, (unsigned long long)want, (unsigned long long)bytes,
                         (unsigned long long)(size - at - 16));
    if (k < 1 || k > MOST_PICKS || k > (uint32_t)shape->experts || u32_at(data + at + 20))
        return damaged(err, name, "picks of a row, or the field after them, out of range");
    if (u64_at(data + size - HASH) != XXH3_64bits(data, (size_t)(size - HASH)))
        return damaged(err, name, "its hash is not that of its bytes: damaged");
    *picks = (int)k;
    return AFF_OK;
}

static aff_status check_weights(const aff_profile *p, const char *name, aff_error *err)
{
    for (uint64_t i = 0; i < biases(p); i++)
        if (!isfinite(p->bias[i])) return damaged(err, name, "a bias is not finite");
    for (uint64_t i = 0; i < weights(p); i++)
        if ((p->below[i] & 0x7f80) == 0x7f80 || (p->before[i] & 0x7f80) == 0x7f80)
            return damaged(err, name, "a weight is not finite");
    return AFF_OK;
}

static void copy_maps(aff_profile *p, const uint8_t *at)
{
    const uint64_t E = (uint64_t)p->experts;
    for (uint64_t l = 0; l + 1 < (uint64_t)p->layers; l++) {
        memcpy(p->bias + l * E, at, E * 4);
        memcpy(p->below + l * E * E, at + E * 4, E * E * 2);
        memcpy(p->before + l * E * E, at + E * 4 + E * E * 2, E * E * 2);
        at += one_map(p);
    }
}

aff_status aff__profile_parse(aff_profile *p, const uint8_t *data, size_t size, const char *name, int layers,
                              int experts, aff_error *err)
{
    *p = (aff_profile){0};
    if (size < HEAD || memcmp(data, "affprof1", 8))
        return damaged(err, name, "expected a file that begins with affprof1");
    const uint32_t L = u32_at(data + 8), E = u32_at(data + 12);
    if (L < 1 || L > MOST_LAYERS || E < 1 || E > MOST_EXPERTS)
        return damaged(err, name, "layers or experts out of range");
    if ((layers && L != (uint32_t)layers) || (experts && E != (uint32_t)experts))
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: expert profile of another model: expected %d layers of %d experts, got %u of %u", name,
                         layers, experts, L, E);
    aff_profile shape = {.layers = (int)L, .experts = (int)E};
    const uint64_t end = HEAD + 4 * uses(&shape);
    if (size < end)
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: expert profile of %u layers and %u experts: expected %llu bytes, got %zu", name, L, E,
                         (unsigned long long)end, size);
    int picks = 0;
    if (size > end) AFF_TRY(check_maps(&shape, data, end, size, name, &picks, err));
    AFF_TRY(aff__profile_create(p, (int)L, (int)E, picks, err));
    memcpy(p->use, data + HEAD, (size_t)(4 * uses(p)));
    aff_status s = AFF_OK;
    for (uint64_t i = 0; i < uses(p) && s == AFF_OK; i++)
        if (!(p->use[i] >= 0 && isfinite(p->use[i])))
            s = aff__fail(err, AFF_E_FORMAT,
                          "%s: expert profile: layer %d, expert %d: expected a finite number of at least 0, got %g",
                          name, (int)(i / E), (int)(i % E), (double)p->use[i]);
    if (s == AFF_OK && picks) {
        copy_maps(p, data + end + MAP_HEAD);
        s = check_weights(p, name, err);
    }
    if (s != AFF_OK) aff__profile_free(p);
    return s;
}

aff_status aff__profile_read(aff_profile *p, const char *path, int layers, int experts, aff_error *err)
{
    aff_map m;
    *p = (aff_profile){0};
    AFF_TRY(aff__map_open(&m, path, err));
    const aff_status s = aff__profile_parse(p, m.data, (size_t)m.size, path, layers, experts, err);
    aff__map_close(&m);
    return s;
}

/* ---- writing ---- */

static void put(uint8_t **at, const void *data, uint64_t bytes)
{
    memcpy(*at, data, (size_t)bytes);
    *at += bytes;
}

static void put_maps(const aff_profile *p, uint8_t *start, uint8_t *at)
{
    const uint64_t E = (uint64_t)p->experts, bytes = map_bytes(p);
    const uint32_t k[2] = {(uint32_t)p->picks, 0};
    put(&at, "affpred1", 8);
    put(&at, &bytes, 8);
    put(&at, k, 8);
    for (uint64_t l = 0; l + 1 < (uint64_t)p->layers; l++) {
        put(&at, p->bias + l * E, E * 4);
        put(&at, p->below + l * E * E, E * E * 2);
        put(&at, p->before + l * E * E, E * E * 2);
    }
    const uint64_t hash = XXH3_64bits(start, (size_t)(at - start));
    put(&at, &hash, 8);
}

aff_status aff__profile_write(const aff_profile *p, const char *path, aff_error *err)
{
    const uint64_t size = HEAD + 4 * uses(p) + (p->picks ? 16 + map_bytes(p) : 0);
    const uint32_t counts[2] = {(uint32_t)p->layers, (uint32_t)p->experts};
    uint8_t *all, *at;
    AFF_TRY(aff__calloc(&all, size, 1, path, err));
    at = all;
    put(&at, "affprof1", 8);
    put(&at, counts, 8);
    put(&at, p->use, 4 * uses(p));
    if (p->picks) put_maps(p, all, at);
    aff_outfile out;
    aff_status s = aff__out_open(&out, path, err);
    if (s == AFF_OK) {
        s = aff__out_write(&out, all, size, 0, err);
        if (s == AFF_OK)
            s = aff__out_commit(&out, err);
        else
            aff__out_abort(&out);
    }
    free(all);
    return s;
}
