/* Expert profiles: the bytes of the format, there and back, and every kind of damage by its name. */
#include "format/profile.h"
#include "support/test.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

static aff_error err;
static char path[64];
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

static size_t read_all(uint8_t *b, size_t cap)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    const size_t n = fread(b, 1, cap, f);
    fclose(f);
    return n;
}

/* Spec runtime 13: 8 bytes, two counts, layer-major floats. */
static void plain_bytes(void **state)
{
    aff_profile p, q;
    uint8_t b[256];
    must(aff__profile_create(&p, 2, 3, 0, &err));
    for (int i = 0; i < 6; i++) p.use[i] = (float)i;
    must(aff__profile_write(&p, path, &err));
    assert_int_equal(read_all(b, sizeof b), 16 + 24);
    static const uint8_t head[] = {'a', 'f', 'f', 'p', 'r', 'o', 'f', '1', 2,    0,    0, 0, 3, 0,
                                   0,   0,   0,   0,   0,   0,   0,   0,   0x80, 0x3f, 0, 0, 0, 0x40};
    assert_memory_equal(b, head, sizeof head);
    must(aff__profile_read(&q, path, 2, 3, &err));
    assert_memory_equal(p.use, q.use, 24);
    assert_int_equal(q.picks, 0);
    assert_null(q.below);
    aff__profile_free(&q);
    must(aff__profile_read(&q, path, 0, 0, &err));
    assert_int_equal(q.layers, 2);
    aff__profile_free(&q);
    assert_int_equal(aff__profile_read(&q, path, 3, 2, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "of another model: expected 3 layers of 2 experts, got 2 of 3"));
    assert_int_equal(aff__profile_read(&q, "/nonexistent", 0, 0, &err), AFF_E_IO);
    assert_int_equal(aff__profile_write(&p, "/nonexistent/x", &err), AFF_E_IO);
    aff__profile_free(&p);
}

static void maps_there_and_back(void **state)
{
    aff_profile p, q;
    uint8_t b[512];
    must(aff__profile_create(&p, 3, 2, 2, &err));
    for (int i = 0; i < 4; i++) p.bias[i] = (float)-i;
    for (int i = 0; i < 8; i++) p.below[i] = (uint16_t)(0x3f80 + i), p.before[i] = (uint16_t)(0xbf80 + i);
    must(aff__profile_write(&p, path, &err));
    const size_t n = read_all(b, sizeof b);
    assert_int_equal(n, 16 + 24 + 24 + 2 * (8 + 8 + 8) + 8);
    assert_memory_equal(b + 40, "affpred1", 8);
    assert_int_equal(b[48], 8 + 48 + 8);
    assert_int_equal(b[56], 2);
    must(aff__profile_read(&q, path, 3, 2, &err));
    assert_int_equal(q.picks, 2);
    assert_memory_equal(p.bias, q.bias, 16);
    assert_memory_equal(p.below, q.below, 16);
    assert_memory_equal(p.before, q.before, 16);
    assert_float_equal(aff__profile_weight(q.before[0]), -1, 0);
    aff__profile_free(&q);
    aff__profile_free(&p);
    for (size_t cut = 0; cut < n; cut++) { /* 40: a whole profile without maps */
        const aff_status s = aff__profile_parse(&q, b, cut, "cut", 0, 0, &err);
        assert_int_equal(s, cut == 40 ? AFF_OK : AFF_E_FORMAT);
        if (s == AFF_OK) aff__profile_free(&q);
    }
    for (size_t i = 0; i < n; i++) { /* one byte damaged: the hash sees it, if nothing before */
        b[i] ^= 0x40;
        assert_int_equal(aff__profile_parse(&q, b, n, "damaged", 0, 0, &err), AFF_E_FORMAT);
        b[i] ^= 0x40;
    }
}

static void refusals(void **state)
{
    static const struct {
        const char *what;
        size_t at, n;
        uint8_t bytes[8];
    } bad[] = {{"begins with affprof1", 7, 1, {'2'}},
               {"out of range", 8, 4, {0}},
               {"out of range", 8, 4, {1, 16}}, /* 4097 layers */
               {"out of range", 12, 4, {1, 0, 1}},
               {"expected 528 bytes", 8, 4, {128}},
               {"at least 0, got -1", 16, 4, {0, 0, 0x80, 0xbf}},
               {"at least 0, got nan", 20, 4, {0, 0, 0xc0, 0x7f}},
               {"at least 0, got inf", 16, 4, {0, 0, 0x80, 0x7f}},
               {"a section affpred1", 24, 1, {'x'}},
               {"expected 24 bytes, got 33", 32, 1, {33}},
               {"picks of a row", 40, 1, {0}},
               {"picks of a row", 40, 1, {3}},
               {"picks of a row", 44, 1, {1}},
               {"bias is not finite", 50, 2, {0x80, 0x7f}},
               {"weight is not finite", 52, 2, {0x80, 0xff}},
               {"weight is not finite", 54, 2, {0xc1, 0x7f}}};
    /* 2 layers of 1 expert, 1 pick: head, 2 floats; section of 24 + 4 + 2 + 2, hash. */
    uint8_t good[64] = "affprof1\2\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0affpred1\x18\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0", b[64];
    const size_t n = 24 + 24 + 8 + 8;
    aff_profile p;

    for (size_t i = 0; i <= sizeof bad / sizeof *bad; i++) {
        const bool sound = i == sizeof bad / sizeof *bad;
        memcpy(b, good, n);
        if (!sound) memcpy(b + bad[i].at, bad[i].bytes, bad[i].n);
        const uint64_t hash = XXH3_64bits(b, n - 8);
        memcpy(b + n - 8, &hash, 8);
        const aff_status s = aff__profile_parse(&p, b, n, "bad", 0, 0, &err);
        if (sound) {
            must(s);
            aff__profile_free(&p);
        } else {
            assert_int_equal(s, AFF_E_FORMAT);
            if (!strstr(err.msg, bad[i].what)) fail_msg("case %zu: %s", i, err.msg);
            assert_null(p.use);
        }
    }
    assert_int_equal(aff__profile_create(&p, 2, 3, 4, &err), AFF_E_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(plain_bytes), cmocka_unit_test(maps_there_and_back),
                                       cmocka_unit_test(refusals)};
    snprintf(path, sizeof path, "/tmp/aff-profile-%d", (int)getpid());
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
