/* GGUF: the writer gives the bytes of the gguf package (tests/oracle/make_imatrix.py); the reader bounds everything. */
#define _GNU_SOURCE
#include "support/test.h"
#include "format/gguf.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[64];

static int setup(void **state)
{
    snprintf(dir, sizeof dir, "/tmp/aff_gguf_XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    return rmdir(dir);
}

static void writer_matches_package(void **state)
{
    static const float sums[12] = {2, 4, 6, 4, 1, 1, 1, 0}, counts[3] = {2, 3, 0};
    char path[512], golden[512], *a, *b;
    size_t na, nb;
    uint64_t is, ic;
    aff_gguf_out *o;
    aff_error e = {0};
    snprintf(path, sizeof path, "%s/a.gguf", dir);
    snprintf(golden, sizeof golden, "%s/golden/imatrix/fused.gguf", AFF_TESTS_DIR);
    assert_int_equal(aff__gguf_out_create(&o, path, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_string(o, "general.type", "imatrix", &e), AFF_OK);
    assert_int_equal(aff__gguf_out_strings(o, "imatrix.datasets", (const char *const[]){"sample.txt"}, 1, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_u32(o, "imatrix.chunk_count", 1, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_u32(o, "imatrix.chunk_size", 512, &e), AFF_OK);
    assert_int_equal(
        aff__gguf_out_tensor(o, "blk.1.ffn_gate_up_exps.weight.in_sum2", 2, (const uint64_t[]){4, 3}, &is, &e), AFF_OK);
    assert_int_equal(
        aff__gguf_out_tensor(o, "blk.1.ffn_gate_up_exps.weight.counts", 2, (const uint64_t[]){1, 3}, &ic, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_begin(o, &e), AFF_OK);
    assert_int_equal(access(path, F_OK), -1); /* not under its own name yet */
    assert_int_equal(aff__gguf_out_data(o, ic, counts, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_data(o, is, sums, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_finish(o, &e), AFF_OK);
    assert_int_equal(aff__read_file(path, 1 << 20, &a, &na, &e), AFF_OK);
    assert_int_equal(aff__read_file(golden, 1 << 20, &b, &nb, &e), AFF_OK);
    assert_int_equal(na, nb);
    assert_memory_equal(a, b, na);
    free(a);
    free(b);

    /* A tensor without data: no file. */
    assert_int_equal(unlink(path), 0);
    assert_int_equal(aff__gguf_out_create(&o, path, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_tensor(o, "t", 1, (const uint64_t[]){1}, &is, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_begin(o, &e), AFF_OK);
    assert_int_equal(aff__gguf_out_finish(o, &e), AFF_E_INVALID);
    assert_non_null(strstr(e.msg, "'t'"));
}

/* ---- hand-made files ---- */

typedef struct image {
    uint8_t p[1024];
    size_t n;
} image;

static void num(image *b, uint64_t v, int n)
{
    assert_true(b->n + 8 <= sizeof b->p);
    for (int i = 0; i < n; i++) b->p[b->n++] = (uint8_t)(v >> 8 * i);
}

static void str(image *b, const char *s)
{
    num(b, strlen(s), 8);
    memcpy(b->p + b->n, s, strlen(s));
    b->n += strlen(s);
}

static void head(image *b, uint64_t tensors, uint64_t keys)
{
    *b = (image){0};
    memcpy(b->p, "GGUF", 4);
    b->n = 4;
    num(b, 3, 4);
    num(b, tensors, 8);
    num(b, keys, 8);
}

static void tensor(image *b, const char *name, uint32_t type, uint64_t d0, uint64_t d1, uint64_t offset)
{
    str(b, name);
    num(b, 2, 4);
    num(b, d0, 8);
    num(b, d1, 8);
    num(b, type, 4);
    num(b, offset, 8);
}

static aff_status open_exact(const image *b, aff_gguf **g, uint8_t **copy, aff_error *e)
{
    *copy = malloc(b->n);
    assert_non_null(*copy);
    memcpy(*copy, b->p, b->n);
    return aff__gguf_open_memory(g, *copy, b->n, "mem", e);
}

static void refused(const image *b, const char *word)
{
    aff_gguf *g;
    uint8_t *copy;
    aff_error e = {0};
    assert_int_equal(open_exact(b, &g, &copy, &e), AFF_E_FORMAT);
    assert_null(g);
    if (!strstr(e.msg, word)) fail_msg("'%s' does not say '%s'", e.msg, word);
    free(copy);
}

static void pad(image *b, size_t to, size_t extra)
{
    b->n = (b->n + to - 1) / to * to + extra;
    assert_true(b->n <= sizeof b->p);
}

static void keys(void **state)
{
    image b;
    aff_gguf *g;
    uint8_t *copy;
    uint64_t v;
    const char *s;
    size_t n;
    aff_error e = {0};
    head(&b, 1, 6);
    str(&b, "u8"), num(&b, AFF_GGUF_U8, 4), num(&b, 200, 1);
    str(&b, "i64"), num(&b, AFF_GGUF_I64, 4), num(&b, (uint64_t)-1, 8);
    str(&b, "i16"), num(&b, AFF_GGUF_I16, 4), num(&b, 300, 2);
    str(&b, "general.alignment"), num(&b, AFF_GGUF_U32, 4), num(&b, 64, 4);
    str(&b, "list"), num(&b, AFF_GGUF_ARRAY, 4), num(&b, AFF_GGUF_U16, 4), num(&b, 3, 8), num(&b, 0x010203040506, 6);
    str(&b, "text"), num(&b, AFF_GGUF_STRING, 4), str(&b, "abc");
    tensor(&b, "t", AFF_GGML_F32, 2, 1, 64);
    pad(&b, 64, 64 + 8);
    b.p[b.n - 8] = 7;
    if (open_exact(&b, &g, &copy, &e) != AFF_OK) fail_msg("%s", e.msg);
    assert_true(aff__gguf_uint(g, "u8", &v) && v == 200);
    assert_true(aff__gguf_uint(g, "i16", &v) && v == 300);
    assert_false(aff__gguf_uint(g, "i64", &v)); /* negative */
    assert_false(aff__gguf_uint(g, "text", &v));
    assert_false(aff__gguf_uint(g, "absent", &v));
    assert_true(aff__gguf_string(g, "text", &s, &n) && n == 3 && memcmp(s, "abc", 3) == 0);
    assert_false(aff__gguf_string(g, "u8", &s, &n));
    const aff_gguf_tensor *t = aff__gguf_find(g, "t");
    assert_non_null(t);
    assert_int_equal(t->size, 8);
    assert_int_equal(t->data - copy, b.n - 8);
    assert_int_equal(t->data[0], 7);
    assert_null(aff__gguf_find(g, "u"));
    assert_int_equal(aff__gguf_tensors(g), 1);
    aff__gguf_close(g);
    free(copy);
}

static void hostile(void **state)
{
    image b;
    head(&b, 0, 0), b.p[4] = 2, refused(&b, "version 3");
    head(&b, 0, 0), b.p[4] = 0, b.p[7] = 3, refused(&b, "big-endian");
    head(&b, 0, 0), b.p[0] = 'H', refused(&b, "not a GGUF");
    head(&b, UINT64_MAX, 0), refused(&b, "announced");
    head(&b, 0, UINT64_MAX / 2), refused(&b, "announced");
    head(&b, 0, 1), num(&b, UINT64_MAX, 8), num(&b, 0, 8), refused(&b, "65535");
    head(&b, 0, 1), str(&b, "k"), num(&b, 13, 4), num(&b, 0, 8), refused(&b, "value type 13");
    head(&b, 0, 1), str(&b, "k"), num(&b, AFF_GGUF_ARRAY, 4), num(&b, AFF_GGUF_ARRAY, 4), num(&b, 1, 8),
        refused(&b, "value type 9");
    head(&b, 0, 1), str(&b, "k"), num(&b, AFF_GGUF_ARRAY, 4), num(&b, AFF_GGUF_U64, 4), num(&b, UINT64_MAX / 4, 8),
        refused(&b, "more bytes");
    head(&b, 0, 1), str(&b, "k"), num(&b, AFF_GGUF_STRING, 4), num(&b, UINT64_MAX - 4, 8), refused(&b, "more bytes");
    head(&b, 0, 2);
    for (int i = 0; i < 2; i++) str(&b, "same"), num(&b, AFF_GGUF_U8, 4), num(&b, 1, 1);
    refused(&b, "twice");
    head(&b, 0, 1), str(&b, "general.alignment"), num(&b, AFF_GGUF_U32, 4), num(&b, 48, 4), refused(&b, "power of two");
    head(&b, 1, 0), tensor(&b, "t", 0, 1ull << 32, 1ull << 32, 0), pad(&b, 32, 32), refused(&b, "overflows");
    head(&b, 1, 0), tensor(&b, "t", 0, 1ull << 62, 1, 0), pad(&b, 32, 32), refused(&b, "overflows");
    head(&b, 1, 0), tensor(&b, "t", 0, 0, 4, 0), pad(&b, 32, 32), refused(&b, "dimension 0");
    head(&b, 1, 0), tensor(&b, "t", 0, 9, 1, 0), pad(&b, 32, 32), refused(&b, "pass the end");
    head(&b, 1, 0), tensor(&b, "t", 0, 1, 1, UINT64_MAX - 31), pad(&b, 32, 32), refused(&b, "pass the end");
    head(&b, 1, 0), tensor(&b, "t", 0, 1, 1, 4), pad(&b, 32, 32), refused(&b, "no multiple");
    head(&b, 2, 0), tensor(&b, "a", 0, 9, 1, 0), tensor(&b, "b", 0, 1, 1, 32), pad(&b, 32, 64), refused(&b, "overlap");
    head(&b, 2, 0), tensor(&b, "a", 0, 1, 1, 0), tensor(&b, "a", 0, 1, 1, 32), pad(&b, 32, 64), refused(&b, "twice");
    head(&b, 1, 0), str(&b, "t"), num(&b, 5, 4), num(&b, 0, 8), num(&b, 0, 8), refused(&b, "at most 4");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(writer_matches_package), cmocka_unit_test(keys),
                                       cmocka_unit_test(hostile)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
