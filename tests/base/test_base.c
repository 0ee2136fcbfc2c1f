/* base/: checked arithmetic, files that appear whole or not at all, the pool. */
#include "support/test.h"
#include "base/mem.h"
#include "base/file.h"
#include "base/threads.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <glob.h>

static void ranges_do_not_wrap(void **state)
{
    (void)state;
    assert_true(aff__range_ok(0, 0, 0));
    assert_true(aff__range_ok(4, 6, 10));
    assert_false(aff__range_ok(4, 7, 10));
    assert_false(aff__range_ok(11, 0, 10));
    assert_false(aff__range_ok(UINT64_MAX, 2, 10));
    assert_false(aff__range_ok(2, UINT64_MAX, 10));
    uint64_t v;
    assert_false(aff__mul_ok(1ull << 33, 1ull << 31, &v));
    assert_true(aff__mul_ok(1ull << 32, 1ull << 31, &v));
    assert_int_equal(v, 1ull << 63);
}

static void huge_allocation_is_an_error(void **state)
{
    (void)state;
    aff_error err = {0};
    void *p = NULL;
    assert_int_equal(aff__calloc(&p, 1ull << 40, 1ull << 40, "table", &err), AFF_E_NOMEM);
    assert_non_null(strstr(err.msg, "table"));
    aff__alloc_fail_after(1);
    assert_int_equal(aff__calloc(&p, 1, 1, "x", &err), AFF_E_NOMEM);
    assert_int_equal(aff__calloc(&p, 3, 5, "x", &err), AFF_OK);
    assert_int_equal((uintptr_t)p % 64, 0);
    free(p);
}

static void outputs_are_all_or_nothing(void **state)
{
    (void)state;
    aff_error err = {0};
    char dir[] = "/tmp/aff_base_XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    assert_int_equal(aff__path_join(path, sizeof path, dir, "out", &err), AFF_OK);
    aff_outfile o;
    assert_int_equal(aff__out_open(&o, path, &err), AFF_OK);
    assert_int_equal(aff__out_write(&o, "abc", 3, 2, &err), AFF_OK);
    assert_int_not_equal(access(path, F_OK), 0);
    aff__out_abort(&o);
    glob_t g;
    char pat[72];
    snprintf(pat, sizeof pat, "%s/*", dir);
    assert_int_equal(glob(pat, 0, NULL, &g), GLOB_NOMATCH);
    assert_int_equal(aff__out_open(&o, path, &err), AFF_OK);
    assert_int_equal(aff__out_write(&o, "abc", 3, 2, &err), AFF_OK);
    assert_int_equal(aff__out_commit(&o, &err), AFF_OK);
    char *data;
    size_t n;
    assert_int_equal(aff__read_file(path, 100, &data, &n, &err), AFF_OK);
    assert_int_equal(n, 5);
    assert_memory_equal(data, "\0\0abc", 6);
    free(data);
    assert_int_equal(aff__read_file(path, 4, &data, &n, &err), AFF_E_LIMIT);
    aff_map m;
    assert_int_equal(aff__map_open(&m, path, &err), AFF_OK);
    assert_int_equal(m.size, 5);
    aff__map_close(&m);
    assert_int_equal(aff__map_open(&m, dir, &err), AFF_E_IO);
    char fifo[sizeof dir + 16];
    snprintf(fifo, sizeof fifo, "%s/fifo", dir);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    alarm(20); /* waiting for a writer fails the test */
    assert_int_equal(aff__map_open(&m, fifo, &err), AFF_E_IO);
    alarm(0);
    assert_non_null(strstr(err.msg, "not a regular file"));
    unlink(fifo);
    assert_int_equal(aff__out_open(&o, "/nonexistent-folder/x", &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "/nonexistent-folder/x"));
    unlink(path);
    rmdir(dir);
}

typedef struct {
    atomic_int hits[1000];
    atomic_int threads_seen;
} hits_ctx;

static void hit(void *ctx, int64_t i, int thread)
{
    hits_ctx *c = ctx;
    atomic_fetch_add(&c->hits[i], 1);
    atomic_fetch_or(&c->threads_seen, 1 << thread);
}

static void pool_runs_every_task_once(void **state)
{
    (void)state;
    aff_error err = {0};
    aff_pool *p;
    assert_int_equal(aff__pool_create(&p, 4, &err), AFF_OK);
    assert_int_equal(aff__pool_threads(p), 4);
    static hits_ctx c;
    for (int rep = 1; rep <= 300; rep++) {
        aff__pool_run(p, hit, &c, 1000);
        for (int i = 0; i < 1000; i++) assert_int_equal(atomic_load(&c.hits[i]), rep);
    }
    assert_int_equal(atomic_load(&c.threads_seen) & ~15, 0);
    aff__pool_run(NULL, hit, &c, 1);
    assert_int_equal(atomic_load(&c.hits[0]), 301);
    aff__pool_free(p);
}

/* A line with a path longer than the room: beginning and end of the path, all of the reason. */
static void long_paths_keep_the_reason(void **state)
{
    char path[3000], *at = path;
    aff_error err;
    while (at < path + sizeof path - 12) at += sprintf(at, "/f\xC3\xBClder");
    strcpy(at, "/x.aff");
    aff__fail(&err, AFF_E_FORMAT, "%s: tensor 'blk.7.attn_q_a': expected %d rows, got %d", path, 1024, 7);
    assert_true(strlen(err.msg) < sizeof err.msg && strlen(err.msg) > sizeof err.msg - 8);
    assert_memory_equal(err.msg, "/f\xC3\xBClder/f\xC3\xBClder", 16);
    const char *end = "/x.aff: tensor 'blk.7.attn_q_a': expected 1024 rows, got 7";
    assert_string_equal(err.msg + strlen(err.msg) - strlen(end), end);
    const char *dots = strstr(err.msg, "...");
    assert_non_null(dots);
    assert_int_not_equal((unsigned char)dots[3] & 0xC0, 0x80); /* no half characters */
    assert_int_not_equal((unsigned char)dots[-1], 0xC3);
    errno = ENOENT;
    aff__fail_errno(&err, "cannot open '%s' for the draft", path);
    end = "/x.aff' for the draft: No such file or directory";
    assert_string_equal(err.msg + strlen(err.msg) - strlen(end), end);
    assert_memory_equal(err.msg, "cannot open '/f", 15);
    /* No path to shorten: the middle goes. */
    memset(path, 'a', sizeof path - 1);
    path[sizeof path - 1] = 0;
    aff__fail(&err, AFF_E_INVALID, "--name: got %s, expected less", path);
    assert_string_equal(err.msg + strlen(err.msg) - 15, ", expected less");
    aff__fail(&err, AFF_E_INVALID, "%.507s", path);
    assert_int_equal(strlen(err.msg), 507);
    assert_null(strchr(err.msg, '.'));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_do_not_wrap),
        cmocka_unit_test(huge_allocation_is_an_error),
        cmocka_unit_test(outputs_are_all_or_nothing),
        cmocka_unit_test(long_paths_keep_the_reason),
        cmocka_unit_test(pool_runs_every_task_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
