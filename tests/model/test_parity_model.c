/* The parity checkpoints are written byte for byte as tools/tiny/parity_models.py writes them: every file has the hash
 * of tests/golden/parity-models.sha256 (sha256sum lines "<hex>  <model>/<file>"). */
#include "support/test.h"
#include "support/parity_model.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------- SHA-256 (FIPS 180-4) */

static uint32_t rotate(uint32_t x, int n)
{
    return (x >> n) | (x << (32 - n));
}

static void sha256_block(uint32_t state[8], const unsigned char *p)
{
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    };
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3)) + w[i - 7] +
               (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10));
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
        uint32_t t1 = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
        uint32_t a = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
        uint32_t t2 = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

/* Hex digest of a file; -1 if it cannot be read. */
static int sha256_file(const char *path, char hex[65])
{
    uint32_t h[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    unsigned char block[64];
    uint64_t length = 0;
    size_t n;
    FILE *f = fopen(path, "rb");
    if (f == NULL) return -1;
    while ((n = fread(block, 1, sizeof block, f)) == sizeof block) {
        sha256_block(h, block);
        length += n;
    }
    int bad = ferror(f);
    fclose(f);
    length += n;
    block[n++] = 0x80;
    if (n > 56) {
        memset(block + n, 0, sizeof block - n);
        sha256_block(h, block);
        n = 0;
    }
    memset(block + n, 0, 56 - n);
    for (int i = 0; i < 8; i++) block[56 + i] = (unsigned char)(8 * length >> (56 - 8 * i));
    sha256_block(h, block);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)h[i]);
    return bad ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------ the tests */

static void generator(void **state)
{
    (void)state;
    assert_true(aff_test_stream("projection", 0) == 0x81bbbda958d61bc2u);
    assert_int_equal(aff_test_noise("projection", 2), -38399);
}

static void unknown_model(void **state)
{
    (void)state;
    assert_int_equal(aff_test_write_parity_model("no such model", "/nonexistent"), -1);
}

static void files_have_their_hashes(void **state)
{
    (void)state;
    char line[512], last[64] = "", name[64], file[256], want[65], got[65], dir[192], path[512];
    char root[] = "/tmp/aff-parity-XXXXXX";
    int files = 0;
    FILE *f = fopen(AFF_TESTS_DIR "/golden/parity-models.sha256", "r");
    assert_non_null(f);
    assert_non_null(mkdtemp(root));
    while (fgets(line, sizeof line, f) != NULL) {
        assert_int_equal(sscanf(line, "%64[0-9a-f]  %63[^/]/%255[^\n]", want, name, file), 3);
        snprintf(dir, sizeof dir, "%s/%s", root, name);
        snprintf(path, sizeof path, "%s/%s", dir, file);
        if (strcmp(name, last) != 0) assert_int_equal(aff_test_write_parity_model(name, dir), 0);
        memcpy(last, name, sizeof last);
        assert_int_equal(sha256_file(path, got), 0);
        assert_string_equal(got, want);
        assert_int_equal(unlink(path), 0);
        if (++files % 5 == 0) assert_int_equal(rmdir(dir), 0); /* five files a model, and nothing else in there */
    }
    fclose(f);
    assert_int_equal(files, 15);
    assert_int_equal(rmdir(root), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generator),
        cmocka_unit_test(unknown_model),
        cmocka_unit_test(files_have_their_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
