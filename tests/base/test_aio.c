/* base/aio: many requests of all sizes arrive whole, by io_uring and by threads; failures stay with their request. */
#define _GNU_SOURCE
#include "base/aio.h"
#include "base/rng.h"
#include "support/test.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static aff_error err;

static void transfers(bool uring)
{
    enum { FILES = 9, ROUNDS = 6 };
    aff_aio *a;
    uint64_t seed = 3;
    assert_int_equal(aff__aio_create(&a, uring, &err), AFF_OK);
    assert_true(uring || !aff__aio_uring(a));
    for (int round = 0; round < ROUNDS; round++) {
        aff_io io[FILES];
        uint8_t *in[FILES], *out[FILES];
        for (int i = 0; i < FILES; i++) {
            char path[] = "/tmp/aff-aio-XXXXXX";
            const uint64_t len = i == 0 ? 0 : i == 1 ? 5 << 20 : aff__splitmix64(&seed) % (3 << 20);
            in[i] = malloc(len + 1), out[i] = calloc(len + 1, 1);
            for (uint64_t k = 0; k < len; k++) in[i][k] = (uint8_t)(aff__splitmix64(&seed) >> 40);
            io[i] = (aff_io){.fd = mkostemp(path, O_CLOEXEC),
                             .buf = in[i],
                             .len = len,
                             .off = aff__splitmix64(&seed) % 10000,
                             .error = 99};
            assert_true(io[i].fd >= 0);
            unlink(path);
        }
        aff__aio_run(a, io, FILES, true);
        for (int i = 0; i < FILES; i++) {
            assert_int_equal(io[i].error, 0);
            io[i].buf = out[i];
        }
        /* One file ends early, one is closed to reading, one is no file. */
        const int wrong = open("/dev/null", O_WRONLY | O_CLOEXEC);
        assert_int_equal(ftruncate(io[1].fd, (off_t)io[1].off + (3 << 20)), 0);
        aff_io all[FILES + 2];
        memcpy(all, io, sizeof io);
        all[FILES] = (aff_io){.fd = wrong, .buf = out[1], .len = 100};
        all[FILES + 1] = (aff_io){.fd = -1, .buf = out[1], .len = 100};
        aff__aio_run(a, all, FILES + 2, false);
        for (int i = 0; i < FILES; i++) {
            assert_int_equal(all[i].error, i == 1 ? EIO : 0);
            if (i != 1) assert_memory_equal(out[i], in[i], io[i].len);
            close(io[i].fd);
            free(in[i]);
            free(out[i]);
        }
        assert_int_equal(all[FILES].error, EBADF);
        assert_int_equal(all[FILES + 1].error, EBADF);
        close(wrong);
    }
    aff__aio_run(a, NULL, 0, false);
    aff__aio_free(a);
    aff__aio_free(NULL);
}

static void test_uring(void **state)
{
    transfers(true);
}
static void test_threads(void **state)
{
    transfers(false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_uring), cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
