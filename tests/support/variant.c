#include "support/variant.h"
#include "support/test.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static void write_config(const char *from, const char *dir, const variant *v)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/config.json", from);
    json_t *o = json_load_file(path, 0, NULL);
    assert_non_null(o);
    if (v->config_key && v->config_value) {
        json_t *x = json_loads(v->config_value, JSON_DECODE_ANY, NULL);
        assert_non_null(x);
        json_object_set_new(o, v->config_key, x);
    } else if (v->config_key) {
        json_object_del(o, v->config_key);
    }
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(json_dump_file(o, path, JSON_INDENT(1)), 0);
    json_decref(o);
}

static json_t *entry(const aff_st_tensor *t, const variant *v, bool mine, uint64_t at)
{
    json_t *shape = json_array(), *ends = json_array();
    for (int d = 0; d < t->ndim; d++) {
        const int from = mine && v->flip && t->ndim == 2 ? 1 - d : d;
        json_array_append_new(shape, json_integer((json_int_t)t->shape[from]));
    }
    if (mine && v->flip && t->ndim == 1) json_array_append_new(shape, json_integer(1));
    json_array_append_new(ends, json_integer((json_int_t)at));
    json_array_append_new(ends, json_integer((json_int_t)(at + t->size)));
    return json_pack("{s:s,s:o,s:o}", "dtype", mine && v->dtype ? v->dtype : aff__st_dtype_name(t->dtype), "shape",
                     shape, "data_offsets", ends);
}

void test_write_variant(const char *from, const char *dir, const variant *v)
{
    char path[1024];
    aff_error err = {0};
    aff_ckpt *c;
    bool met = !v->tensor;
    mkdir(dir, 0700);
    write_config(from, dir, v);
    if (aff__ckpt_open(&c, from, &err) != AFF_OK) fail_msg("%s", err.msg);
    json_t *head = json_object();
    uint64_t at = 0;
    for (uint64_t i = 0; i < aff__ckpt_count(c); i++) {
        const aff_st_tensor *t = aff__ckpt_at(c, i);
        const bool mine = v->tensor && strcmp(t->name, v->tensor) == 0;
        met |= mine;
        if (mine && v->drop) continue;
        json_object_set_new(head, t->name, entry(t, v, mine, at));
        at += t->size;
    }
    assert_true(met);
    char *text = json_dumps(head, JSON_COMPACT);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    const uint64_t size = strlen(text);
    assert_int_equal(fwrite(&size, 8, 1, f), 1);
    assert_int_equal(fwrite(text, 1, (size_t)size, f), size);
    for (uint64_t i = 0; i < aff__ckpt_count(c); i++) {
        const aff_st_tensor *t = aff__ckpt_at(c, i);
        const bool mine = v->tensor && strcmp(t->name, v->tensor) == 0;
        if (mine && v->drop) continue;
        uint8_t *copy = malloc((size_t)t->size);
        assert_non_null(copy);
        memcpy(copy, t->data, (size_t)t->size);
        if (mine && v->patch) {
            assert_true(v->patch_at + v->patch_size <= t->size);
            memcpy(copy + v->patch_at, v->patch, v->patch_size);
        }
        assert_int_equal(fwrite(copy, 1, (size_t)t->size, f), t->size);
        free(copy);
    }
    assert_int_equal(fclose(f), 0);
    free(text);
    json_decref(head);
    aff__ckpt_close(c);
}
