/* sample.h - small containers in a folder of their own, for the tests of this room. */
#ifndef AFF_TESTS_FORMAT_SAMPLE_H
#define AFF_TESTS_FORMAT_SAMPLE_H
#include "support/test.h"
#include "base/file.h"
#include "format/container.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[64], path[96];

static inline int group_setup(void **state)
{
    snprintf(dir, sizeof dir, "/tmp/aff_container_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/t.aff", dir);
    return 0;
}

static inline int group_teardown(void **state)
{
    unlink(path);
    return rmdir(dir); /* fails if any test left a lock or a temporary file behind */
}

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        aff_error ok_err_ = {0}, *err = &ok_err_;                                                                      \
        if ((call) != AFF_OK) fail_msg("%s: %s", #call, ok_err_.msg);                                                  \
    } while (0)

/* The call must fail with a message that contains `text`. */
#define REFUSED(call, text)                                                                                            \
    do {                                                                                                               \
        aff_error re_ = {0}, *err = &re_;                                                                              \
        if ((call) == AFF_OK) fail_msg("%s: accepted", #call);                                                         \
        if (!strstr(re_.msg, text)) fail_msg("%s: '%s' lacks '%s'", #call, re_.msg, text);                             \
    } while (0)

static inline char *slurp(size_t *n)
{
    char *data = NULL;
    OK(aff__read_file(path, 1u << 30, &data, n, err));
    return data;
}

/* Byte i of the content of object k: nothing repeats in step with a plane or a record. */
static inline uint8_t pattern(uint64_t k, uint64_t i)
{
    return (uint8_t)((i * 2654435761u + k * 40503u) >> 11);
}

static inline void fill(uint8_t *p, uint64_t n, uint64_t k)
{
    for (uint64_t i = 0; i < n; i++) p[i] = pattern(k, i);
}

static inline void valid_codebook(uint8_t book[8192])
{
    for (int i = 0; i < 8192; i++)
        book[i] = (uint8_t)((pattern(7, (uint64_t)i) & 0x80) | (8 + pattern(9, (uint64_t)i) % 56));
}

/* The worked file of spec container 7. */
static inline aff_status write_worked(bool compat, const char *prov)
{
    static const char meta[] = "{\"num_hidden_layers\":1}";
    uint8_t book[8192], vec[16], mat[16384], record[8192], scale = 127;
    uint64_t i[3];
    aff_cwriter *w;
    valid_codebook(book);
    fill(vec, sizeof vec, 1);
    fill(mat, sizeof mat, 2);
    OK(aff__cwriter_create(&w, path, compat, err));
    OK(aff__cwriter_meta(w, meta, strlen(meta), err));
    OK(aff__cwriter_declare(w, "__codebook", AFF_F32, 1, 2048, &i[0], err));
    OK(aff__cwriter_declare(w, "n", AFF_F32, 1, 4, &i[1], err));
    OK(aff__cwriter_declare(w, "w", AFF_FP8, 128, 128, &i[2], err));
    OK(aff__cwriter_layer(w, 2, AFF_Q2P875Q4, 64, 64, err));
    if (prov) OK(aff__cwriter_provenance(w, prov, strlen(prov), err));
    OK(aff__cwriter_begin(w, err));
    assert_int_equal(aff__cwriter_layer_layout(w, 0)->stride, sizeof record);
    for (uint32_t e = 2; e-- > 0;) {
        fill(record, sizeof record, 10 + e);
        OK(aff__cwriter_expert(w, 0, e, record, err));
    }
    OK(aff__cwriter_tensor(w, i[2], mat, sizeof mat, &scale, 1, err));
    OK(aff__cwriter_tensor(w, i[1], vec, sizeof vec, NULL, 0, err));
    OK(aff__cwriter_tensor(w, i[0], book, sizeof book, NULL, 0, err));
    OK(aff__cwriter_finish(w, err));
    return AFF_OK;
}

/* ---- a small file without a codebook ---- */

enum { TINY_BLOBS = 256 + 1280, TINY_POOL = 2097152 };

/* 1 layer, 2 MXFP4 experts of 32 x 32; a vector of 3 and an FP8 matrix of 32 x 32 tiles. */
static inline aff_cwriter *tiny_begun(uint64_t i[2])
{
    aff_cwriter *w;
    OK(aff__cwriter_create(&w, path, false, err));
    OK(aff__cwriter_meta(w, "{}", 2, err));
    OK(aff__cwriter_declare(w, "v", AFF_F32, 1, 3, &i[0], err));
    OK(aff__cwriter_declare(w, "m", AFF_FP8_32, 32, 32, &i[1], err));
    OK(aff__cwriter_layer(w, 2, AFF_MXFP4, 32, 32, err));
    OK(aff__cwriter_provenance(w, "{\"a\":1}", 7, err));
    OK(aff__cwriter_begin(w, err));
    return w;
}

static inline void tiny_fill(aff_cwriter *w, const uint64_t i[2])
{
    uint8_t mat[1024], record[4096], scale = 120;
    float vec[3] = {1, 2, 3}, profile[2] = {0.25f, 0.75f};
    fill(mat, sizeof mat, 3);
    fill(record, sizeof record, 4);
    OK(aff__cwriter_tensor(w, i[0], vec, sizeof vec, NULL, 0, err));
    OK(aff__cwriter_tensor(w, i[1], mat, sizeof mat, &scale, 1, err));
    OK(aff__cwriter_expert(w, 0, 0, record, err));
    fill(record, sizeof record, 5);
    OK(aff__cwriter_expert(w, 0, 1, record, err));
    OK(aff__cwriter_profile(w, profile, 2, err));
}

static inline uint8_t *tiny(size_t *n)
{
    uint64_t i[2];
    aff_cwriter *w = tiny_begun(i);
    tiny_fill(w, i);
    OK(aff__cwriter_finish(w, err));
    return (uint8_t *)slurp(n);
}

#endif
