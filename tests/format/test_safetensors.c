/* safetensors: hand-made files, shards with an index, and everything that must be refused. */
#define _GNU_SOURCE
#include "support/test.h"
#include "format/safetensors.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[64];

static int group_setup(void **state)
{
    snprintf(dir, sizeof dir, "/tmp/aff_safetensors_XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int group_teardown(void **state)
{
    return rmdir(dir);
}

/* header text and n bytes 0, 1, 2, ... of data as one malloc'ed file of exact size. */
static uint8_t *image(const char *header, size_t data, size_t *n)
{
    size_t h = strlen(header);
    *n = 8 + h + data;
    uint8_t *p = malloc(*n);
    assert_non_null(p);
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(h >> 8 * i);
    memcpy(p + 8, header, h);
    for (size_t i = 0; i < data; i++) p[8 + h + i] = (uint8_t)i;
    return p;
}

static void put(const char *name, const void *data, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void put_image(const char *name, const char *header, size_t data)
{
    size_t n;
    uint8_t *p = image(header, data, &n);
    put(name, p, n);
    free(p);
}

static void clear(void)
{
    static const char *const names[] = {"a.safetensors", "b.safetensors", "model.safetensors",
                                        "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
}

static void one_file(void **state)
{
    size_t n;
    aff_ckpt *c;
    aff_error e = {0};
    uint8_t *p = image("{\"__metadata__\":{\"format\":\"pt\"},"
                       "\"z\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                       "\"a.weight\":{\"dtype\":\"F8_E8M0\",\"shape\":[5],\"data_offsets\":[13,18]},"
                       "\"none\":{\"dtype\":\"F32\",\"shape\":[4,0,7],\"data_offsets\":[12,12]},"
                       "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[18,26]}}",
                       30, &n);
    if (aff__ckpt_open_memory(&c, p, n, "mem", &e) != AFF_OK) fail_msg("%s", e.msg);
    assert_int_equal(aff__ckpt_count(c), 4);
    static const char *const sorted[] = {"a.weight", "none", "scalar", "z"};
    for (uint64_t i = 0; i < 4; i++) assert_string_equal(aff__ckpt_at(c, i)->name, sorted[i]);
    assert_null(aff__ckpt_at(c, 4));
    const aff_st_tensor *t = aff__ckpt_find(c, "z");
    assert_int_equal(t->dtype, AFF_ST_BF16);
    assert_int_equal(t->ndim, 2);
    assert_int_equal(t->shape[0], 2);
    assert_int_equal(t->shape[1], 3);
    assert_int_equal(t->size, 12);
    assert_int_equal(t->data[11], 11);
    assert_int_equal(aff__ckpt_find(c, "a.weight")->data[0], 13);
    assert_int_equal(aff__ckpt_find(c, "scalar")->size, 8);
    assert_int_equal(aff__ckpt_find(c, "none")->size, 0);
    assert_null(aff__ckpt_find(c, "z "));
    assert_null(aff__ckpt_find(c, "__metadata__"));
    aff__ckpt_close(c);
    free(p);
}

static void element_types(void **state)
{
    static const struct {
        const char *name;
        unsigned size;
    } types[] = {{"BOOL", 1}, {"U8", 1},      {"I8", 1},      {"I16", 2},    {"U16", 2}, {"F16", 2},
                 {"BF16", 2}, {"I32", 4},     {"U32", 4},     {"F32", 4},    {"F64", 8}, {"I64", 8},
                 {"U64", 8},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        char header[128];
        size_t n;
        aff_ckpt *c;
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%u]}}",
                 types[i].name, 3 * types[i].size);
        uint8_t *p = image(header, 24, &n);
        assert_int_equal(aff__ckpt_open_memory(&c, p, n, "mem", NULL), AFF_OK);
        assert_string_equal(aff__st_dtype_name(aff__ckpt_at(c, 0)->dtype), types[i].name);
        assert_int_equal(aff__st_dtype_size(aff__ckpt_at(c, 0)->dtype), types[i].size);
        aff__ckpt_close(c);
        free(p);
    }
    assert_int_equal(aff__st_dtype_size((aff_st_dtype)99), 0);
}

static void refused_headers(void **state)
{
    static const struct {
        const char *header, *message;
    } cases[] = {
        {"[]", "not a JSON object"},
        {"{\"t\":1}", "tensor 't': its header entry has no dtype"},
        {"{\"t\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]}}", "tensor 't': unknown dtype 'F4'"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[11],\"data_offsets\":[0,11]}}",
         "tensor 't' ends at byte 11 of the data, which has 10"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[0,4]}}",
         "expected 3 bytes for its shape and dtype I8, got 4"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[4,1]}}",
         "data_offsets are not two ascending integers"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[-3,0]}}", "data_offsets"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[0,3,4]}}", "data_offsets"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[3]}}", "data_offsets"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[3.0],\"data_offsets\":[0,3]}}", "dimension 0 is not"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[-1],\"data_offsets\":[0,3]}}", "dimension 0 is not"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":3,\"data_offsets\":[0,3]}}", "expected a shape"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", "0 to 8 dimensions, got 9"},
        {"{\"t\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904,2],\"data_offsets\":[0,0]}}", "overflows 64 bits"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", "overflows 64 bits"},
        {"{\"t\":{\"dtype\":\"I8\",\"shape\":[9223372036854775808],\"data_offsets\":[0,0]}}", "too big integer"},
        {"{\"a\":{\"dtype\":\"I8\",\"shape\":[5],\"data_offsets\":[0,5]},\"b\":{\"dtype\":\"I8\",\"shape\":[5],\"data_"
         "offsets\":[4,9]}}",
         "tensors 'a' and 'b' overlap"},
        {"{\"a\":{\"dtype\":\"I8\",\"shape\":[5],\"data_offsets\":[0,5]},\"b\":{\"dtype\":\"I8\",\"shape\":[5],\"data_"
         "offsets\":[0,5]}}",
         "overlap"},
        {"{\"a\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"I8\",\"shape\":[1],\"data_"
         "offsets\":[1,2]}}",
         "duplicate"},
        {"{\"a\\nb\":{\"dtype\":\"?\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         "tensor 'a?b'"}, /* messages are one line */
        {"{", "line 1 column 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n;
        aff_ckpt *c = (aff_ckpt *)1;
        aff_error e = {0};
        uint8_t *p = image(cases[i].header, 10, &n);
        if (aff__ckpt_open_memory(&c, p, n, "mem", &e) == AFF_OK) fail_msg("accepted: %s", cases[i].header);
        assert_null(c);
        if (!strstr(e.msg, cases[i].message)) fail_msg("'%s' lacks '%s'", e.msg, cases[i].message);
        assert_int_equal(strncmp(e.msg, "mem: ", 5), 0);
        free(p);
    }
}

static void cut_and_lying_lengths(void **state)
{
    static const char header[] = "{\"t\":{\"dtype\":\"I8\",\"shape\":[10],\"data_offsets\":[0,10]}}";
    size_t n;
    aff_ckpt *c;
    uint8_t *p = image(header, 10, &n);
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *q = malloc(cut ? cut : 1);
        memcpy(q, p, cut);
        if (aff__ckpt_open_memory(&c, q, cut, "mem", NULL) == AFF_OK) fail_msg("cut at %zu: accepted", cut);
        free(q);
    }
    static const uint64_t lies[] = {0, 1, 8, UINT64_MAX, UINT64_MAX - 7, 1ull << 63, sizeof header + 9};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        for (int b = 0; b < 8; b++) p[b] = (uint8_t)(lies[i] >> 8 * b);
        assert_int_not_equal(aff__ckpt_open_memory(&c, p, n, "mem", NULL), AFF_OK);
    }
    free(p);
}

#define T(name, from, to) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" #from "," #to "]}"

static void put_index(const char *map)
{
    char text[512];
    int n = snprintf(text, sizeof text, "{\"metadata\":{},\"weight_map\":{%s}}", map);
    put("model.safetensors.index.json", text, (size_t)n);
}

static void shards(void **state)
{
    aff_ckpt *c;
    aff_error e = {0};
    put_image("b.safetensors", "{" T("x", 0, 2) "," T("extra", 2, 4) "}", 4);
    put_image("a.safetensors", "{" T("y", 1, 3) "}", 3);
    put_index("\"x\":\"b.safetensors\",\"y\":\"a.safetensors\"");
    if (aff__ckpt_open(&c, dir, &e) != AFF_OK) fail_msg("%s", e.msg);
    assert_string_equal(aff__ckpt_dir(c), dir);
    assert_int_equal(aff__ckpt_shards(c), 2);
    assert_int_equal(aff__ckpt_count(c), 3);
    const aff_st_tensor *y = aff__ckpt_find(c, "y");
    assert_int_equal(y->data[0], 1);
    assert_non_null(strstr(aff__ckpt_shard_path(c, y->shard), "/a.safetensors"));
    assert_non_null(strstr(aff__ckpt_shard_path(c, aff__ckpt_find(c, "x")->shard), "/b.safetensors"));
    assert_null(aff__ckpt_shard_path(c, 2));
    aff__ckpt_close(c);
    clear();
}

static void refuse_dir(const char *message)
{
    aff_ckpt *c = (aff_ckpt *)1;
    aff_error e = {0};
    if (aff__ckpt_open(&c, dir, &e) == AFF_OK) fail_msg("accepted; expected '%s'", message);
    assert_null(c);
    if (!strstr(e.msg, message)) fail_msg("'%s' lacks '%s'", e.msg, message);
}

static void refused_folders(void **state)
{
    refuse_dir("no model.safetensors in that folder either");
    put_image("a.safetensors", "{" T("y", 0, 2) "}", 2);
    put_index("\"y\":\"a.safetensors\",\"z\":\"b.safetensors\"");
    refuse_dir("b.safetensors: cannot open: No such file");
    put_image("b.safetensors", "{" T("w", 0, 2) "}", 2);
    refuse_dir("tensor 'z' is not in ");
    put_image("b.safetensors", "{" T("z", 0, 2) "," T("y", 2, 4) "}", 4);
    refuse_dir("tensor 'y' stands in both");
    put_image("b.safetensors", "{" T("z", 0, 2) "}", 1);
    refuse_dir("truncated or damaged");
    put_index("\"y\":\"../a.safetensors\"");
    refuse_dir("tensor 'y': expected the name of a file in the same folder, got '../a.safetensors'");
    put_index("\"y\":\"a.safe\\u0000tensors\"");
    refuse_dir("expected the name of a file");
    put_index("\"y\":7");
    refuse_dir("expected the name of a file");
    put_index("");
    refuse_dir("names no tensor");
    put("model.safetensors.index.json", "{}", 2);
    refuse_dir("key 'weight_map': expected an object");
    put("model.safetensors.index.json", "", 0);
    refuse_dir("line 1 column 0");
    clear();
}

static void single_file_folder(void **state)
{
    aff_ckpt *c;
    char path[128];
    put_image("model.safetensors", "{" T("x", 0, 2) "}", 2);
    assert_int_equal(aff__ckpt_open(&c, dir, NULL), AFF_OK);
    assert_int_equal(aff__ckpt_count(c), 1);
    aff__ckpt_close(c);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(aff__ckpt_open_file(&c, path, NULL), AFF_OK);
    assert_non_null(aff__ckpt_find(c, "x"));
    aff__ckpt_close(c);
    clear();
}

/* A real checkpoint: 152 and 233 tensors in two shards, written by another program. */
static void golden_checkpoint(void **state)
{
    aff_ckpt *c;
    aff_error e = {0};
    if (aff__ckpt_open(&c, AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark", &e) != AFF_OK) fail_msg("%s", e.msg);
    assert_int_equal(aff__ckpt_count(c), 385);
    assert_int_equal(aff__ckpt_shards(c), 2);
    const aff_st_tensor *t = aff__ckpt_find(c, "layers.0.hc_attn_fn");
    assert_non_null(t);
    assert_int_equal(t->dtype, AFF_ST_F32);
    assert_int_equal(t->shape[0], 24);
    assert_int_equal(t->shape[1], 512);
    assert_int_equal(t->size, 115200 - 66048);
    const uint8_t *first = aff__ckpt_find(c, "embed.weight")->data; /* at 0; the other at 66048 */
    assert_int_equal(t->data - first, 66048);
    aff__ckpt_close(c);
}

/* Every allocation may fail: an error, no leak, no crash. */
static void out_of_memory(void **state)
{
    aff_ckpt *c;
    aff_status s = AFF_E_NOMEM;
    put_image("b.safetensors", "{" T("x", 0, 2) "}", 2);
    put_image("a.safetensors", "{" T("y", 0, 2) "}", 2);
    put_index("\"x\":\"b.safetensors\",\"y\":\"a.safetensors\"");
    for (unsigned k = 1; s != AFF_OK; k++) {
        assert_in_range(k, 1, 100);
        aff__alloc_fail_after(k);
        s = aff__ckpt_open(&c, dir, NULL);
        assert_true(s == AFF_OK || s == AFF_E_NOMEM);
    }
    aff__alloc_fail_after(0);
    aff__ckpt_close(c);
    clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_file),
                                       cmocka_unit_test(element_types),
                                       cmocka_unit_test(refused_headers),
                                       cmocka_unit_test(cut_and_lying_lengths),
                                       cmocka_unit_test(shards),
                                       cmocka_unit_test(refused_folders),
                                       cmocka_unit_test(single_file_folder),
                                       cmocka_unit_test(golden_checkpoint),
                                       cmocka_unit_test(out_of_memory)};
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
