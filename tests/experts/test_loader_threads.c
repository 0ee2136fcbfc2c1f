/* The loader: every expert of every kind of file arrives as the mapping has it, by every way of reading; errors are
 * tried again and then named; files that were written to or replaced; copies; requests taken back. */
#include "base/mem.h"
#include "base/rng.h"
#include "experts/loader.h"
#include "support/container_model.h"
#include "support/parity_model.h"
#include "support/test.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LAYERS = 8, EXPERTS = 16, HIDDEN = 256, INTER = 128, ALL = LAYERS * EXPERTS };
static char root[] = "/tmp/aff-loader-XXXXXX";
static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* A store of one kind: a container of a dtype, or the checkpoint. */
typedef struct source {
    char path[96];
    aff_container *c;
    aff_ckpt *ckpt;
    aff_experts *store;
} source;

static void open_source(source *s, int dtype, const char *name)
{
    char dir[64];
    *s = (source){0};
    snprintf(dir, sizeof dir, "%s/toy", root);
    snprintf(s->path, sizeof s->path, "%s/%s.aff", root, name);
    if (!dtype) {
        must(aff__ckpt_open(&s->ckpt, dir, &err));
        must(aff__experts_from_checkpoint(&s->store, s->ckpt, "layers.", LAYERS, EXPERTS, HIDDEN, INTER, &err));
        return;
    }
    test_write_container(dir, s->path, (aff_dtype)dtype, 11, 1);
    must(aff__container_open(&s->c, s->path, &err));
    const aff_ctensor *t = aff__container_find(s->c, "__codebook");
    must(aff__experts_from_container(&s->store, s->c, LAYERS, EXPERTS, HIDDEN, INTER,
                                     t ? t->blob + t->m.data_off : NULL, &err));
}

static void close_source(source *s)
{
    aff__experts_free(s->store);
    aff__container_close(s->c);
    aff__ckpt_close(s->ckpt);
}

static uint8_t *slots_for(const aff_slot_layout *y, int n)
{
    void *p;
    assert_int_equal(posix_memalign(&p, 4096, (size_t)y->pitch * (size_t)n), 0);
    memset(p, 0xEE, (size_t)y->pitch * (size_t)n);
    return p;
}

/* The planes of a slot; between them anything may stand. */
static void same_planes(const aff_slot_layout *y, const uint8_t *a, const uint8_t *b)
{
    for (int i = 0; i < 9; i++)
        assert_memory_equal(a + y->plane[i / 3][i % 3], b + y->plane[i / 3][i % 3], y->size[i / 3][i % 3]);
}

static void check(const source *s, int layer, int e, const uint8_t *slot)
{
    const aff_slot_layout y = aff__experts_layout(s->store);
    uint8_t *want = slots_for(&y, 1);
    aff__experts_copy(s->store, layer, e, want);
    same_planes(&y, slot, want);
    free(want);
}

static void read_all(const source *s, const aff_loader_options *o)
{
    const aff_slot_layout y = aff__experts_layout(s->store);
    uint8_t *slots = slots_for(&y, ALL);
    aff_load *load = calloc(ALL, sizeof *load);
    aff_loader *l;
    must(aff__loader_create(&l, s->store, NULL, o, &err));
    for (int i = 0; i < ALL; i++) {
        load[i] = (aff_load){.layer = i / EXPERTS, .expert = i % EXPERTS, .to = slots + (uint64_t)i * y.pitch};
        aff__loader_submit(l, &load[i], i % 3 ? AFF_LOAD_NOW : AFF_LOAD_LATER);
    }
    for (int i = 0; i < ALL; i++) must(aff__loader_wait(l, &load[i], &err));
    for (int i = 0; i < ALL; i++) check(s, i / EXPERTS, i % EXPERTS, load[i].to);
    const aff_loader_counts n = aff__loader_counts_now(l);
    assert_int_equal(n.requests, ALL);
    assert_int_equal(n.failed, 0);
    assert_true(n.bytes >= ALL * aff__experts_bytes(s->store));
    aff__loader_free(l);
    free(slots);
    free(load);
}

static void test_every_kind(void **state)
{
    static const int dtypes[] = {AFF_Q2P875Q4, AFF_Q2P875G, AFF_MXFP4, 0};
    for (int i = 0; i < 4; i++) {
        source s;
        open_source(&s, dtypes[i], "kind");
        for (int way = 0; way < 4; way++)
            read_all(&s, &(aff_loader_options){.threads_only = way & 1, .buffered = way & 2});
        read_all(&s, &(aff_loader_options){.inject = 0.5, .inject_most = 2, .inject_seed = 7});
        close_source(&s);
    }
}

static void test_errors(void **state)
{
    source s;
    aff_loader *l;
    open_source(&s, AFF_Q2P875G, "errors");
    const aff_slot_layout y = aff__experts_layout(s.store);
    uint8_t *slot = slots_for(&y, 1);
    must(aff__loader_create(&l, s.store, NULL, &(aff_loader_options){.inject = 1}, &err));
    aff_load r = {.layer = 5, .expert = 9, .to = slot};
    aff__loader_submit(l, &r, AFF_LOAD_NOW);
    assert_int_equal(aff__loader_wait(l, &r, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "layer 5, expert 9"));
    assert_non_null(strstr(err.msg, s.path));
    char at[64];
    aff_piece p[AFF_MAX_PIECES];
    assert_int_equal(aff__experts_pieces(s.store, 5, 9, p), 1);
    snprintf(at, sizeof at, "at byte %llu", (unsigned long long)p[0].off);
    assert_non_null(strstr(err.msg, at));
    assert_int_equal(aff__loader_counts_now(l).retries, 2);
    aff__loader_inject(l, 0); /* the disk is well again */
    aff__loader_submit(l, &r, AFF_LOAD_NOW);
    must(aff__loader_wait(l, &r, &err));
    check(&s, 5, 9, slot);
    aff__loader_free(l);
    free(slot);
    close_source(&s);
}

static char said[600];
static int times;
static void hear(void *ctx, const char *line)
{
    snprintf(said, sizeof said, "%s", line);
    times++;
}

static void test_other_files(void **state)
{
    source s;
    aff_loader *l;
    char moved[128], copy[128];
    open_source(&s, AFF_Q2P875G, "file");
    const aff_slot_layout y = aff__experts_layout(s.store);
    uint8_t *slot = slots_for(&y, 1);
    must(aff__loader_create(&l, s.store, NULL, &(aff_loader_options){.warn = hear}, &err));
    aff_load r = {.layer = 1, .expert = 2, .to = slot};
    /* Another file of that name: the one that was opened is read on, and that is said once. */
    snprintf(moved, sizeof moved, "%s.old", s.path);
    assert_int_equal(rename(s.path, moved), 0);
    FILE *f = fopen(s.path, "w");
    fputs("something else", f);
    fclose(f);
    times = 0;
    for (int i = 0; i < 3; i++) {
        aff__loader_submit(l, &r, AFF_LOAD_NOW);
        must(aff__loader_wait(l, &r, &err));
        check(&s, 1, 2, slot);
    }
    assert_int_equal(times, 1);
    assert_non_null(strstr(said, s.path));
    /* A loader made now would read the wrong one. */
    aff_loader *no;
    assert_int_equal(aff__loader_create(&no, s.store, NULL, &(aff_loader_options){0}, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "replaced"));
    assert_int_equal(rename(moved, s.path), 0);
    /* A copy that is one, and copies that are none. */
    char cmd[400];
    snprintf(copy, sizeof copy, "%s.copy", s.path);
    snprintf(cmd, sizeof cmd, "cp '%s' '%s'", s.path, copy);
    assert_int_equal(system(cmd), 0);
    const char *copies[] = {copy};
    read_all(&s, &(aff_loader_options){.copies = copies, .n_copies = 1});
    const int fd = open(copy, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "x", 1, 100), 1);
    assert_int_equal(
        aff__loader_create(&no, s.store, NULL, &(aff_loader_options){.copies = copies, .n_copies = 1}, &err),
        AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "beginning"));
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(
        aff__loader_create(&no, s.store, NULL, &(aff_loader_options){.copies = copies, .n_copies = 1}, &err),
        AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, copy));
    close(fd);
    copies[0] = "/nowhere";
    assert_int_equal(
        aff__loader_create(&no, s.store, NULL, &(aff_loader_options){.copies = copies, .n_copies = 1}, &err), AFF_E_IO);
    /* Written to while it is in use: nothing is read from it any more. */
    const int same = open(s.path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(same, "AFFINITY", 8, 0), 8); /* even the same bytes */
    assert_int_equal(futimens(same, (const struct timespec[2]){{1000000000, 0}, {1000000000, 0}}), 0);
    close(same);
    aff__loader_submit(l, &r, AFF_LOAD_NOW);
    assert_int_equal(aff__loader_wait(l, &r, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "written to"));
    assert_non_null(strstr(err.msg, "layer 1, expert 2"));
    aff__loader_free(l);
    free(slot);
    close_source(&s);
}

static void test_taken_back(void **state)
{
    enum { N = 12 };
    source s;
    aff_loader *l;
    open_source(&s, AFF_Q2P875Q4, "back");
    const aff_slot_layout y = aff__experts_layout(s.store);
    uint8_t *slots = slots_for(&y, N);
    aff_load load[N];
    must(aff__loader_create(&l, s.store, NULL, &(aff_loader_options){0}, &err));
    aff__loader_stall(l, true);
    for (int i = 0; i < N; i++) {
        load[i] = (aff_load){.layer = 0, .expert = i, .to = slots + (uint64_t)i * y.pitch};
        aff__loader_submit(l, &load[i], i & 1);
    }
    for (int i = 0; i < N; i += 3) assert_true(aff__loader_cancel(l, &load[i]));
    for (int i = 0; i < N; i += 3) assert_false(aff__loader_cancel(l, &load[i]));
    aff__loader_stall(l, false);
    for (int i = 0; i < N; i++)
        if (i % 3) must(aff__loader_wait(l, &load[i], &err));
    for (int i = 0; i < N; i++) {
        if (i % 3) check(&s, 0, i, load[i].to);
        if (i % 3 == 0) assert_int_equal(load[i].to[0], 0xEE);
    }
    assert_int_equal(aff__loader_counts_now(l).requests, N - N / 3);
    assert_false(aff__loader_cancel(l, &load[1])); /* done */
    aff__loader_free(l);
    free(slots);
    close_source(&s);
}

/* Many threads ask at a time, with errors on the way. */
typedef struct asker {
    aff_loader *l;
    const source *s;
    uint64_t seed;
    int failed;
} asker;

static void *ask(void *arg)
{
    asker *a = arg;
    const aff_slot_layout y = aff__experts_layout(a->s->store);
    uint8_t *slot = slots_for(&y, 1), *want = slots_for(&y, 1);
    for (int i = 0; i < 60; i++) {
        const int k = (int)(aff__splitmix64(&a->seed) % ALL);
        aff_load r = {.layer = k / EXPERTS, .expert = k % EXPERTS, .to = slot};
        aff__loader_submit(a->l, &r, (int)(aff__splitmix64(&a->seed) & 1));
        if (aff__splitmix64(&a->seed) % 8 == 0 && aff__loader_cancel(a->l, &r)) continue;
        if (aff__loader_wait(a->l, &r, NULL) != AFF_OK) {
            a->failed++;
            continue;
        }
        aff__experts_copy(a->s->store, k / EXPERTS, k % EXPERTS, want);
        for (int p = 0; p < 9; p++)
            if (memcmp(slot + y.plane[p / 3][p % 3], want + y.plane[p / 3][p % 3], (size_t)y.size[p / 3][p % 3]) != 0)
                abort();
    }
    free(slot);
    free(want);
    return NULL;
}

static void test_threads(void **state)
{
    enum { N = 4 };
    source s;
    for (int way = 0; way < 2; way++) {
        aff_loader *l;
        asker a[N];
        pthread_t t[N];
        int failed = 0;
        open_source(&s, way ? AFF_Q2P875Q4 : AFF_Q2P875G, "threads");
        must(aff__loader_create(&l, s.store, NULL,
                                &(aff_loader_options){.threads_only = way, .inject = 0.3, .inject_seed = 5}, &err));
        for (int i = 0; i < N; i++) {
            a[i] = (asker){.l = l, .s = &s, .seed = (uint64_t)i + 1};
            assert_int_equal(pthread_create(&t[i], NULL, ask, &a[i]), 0);
        }
        for (int i = 0; i < N; i++) {
            pthread_join(t[i], NULL);
            failed += a[i].failed;
        }
        assert_true(failed > 0); /* 0.3^3 of some 210 */
        assert_int_equal(aff__loader_counts_now(l).failed, failed);
        aff__loader_free(l);
        close_source(&s);
    }
}

static int setup(void **state)
{
    char dir[64];
    if (!mkdtemp(root)) return -1;
    snprintf(dir, sizeof dir, "%s/toy", root);
    return aff_test_write_parity_model("toy", dir);
}
static int teardown(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_kind), cmocka_unit_test(test_errors),
                                       cmocka_unit_test(test_other_files), cmocka_unit_test(test_taken_back),
                                       cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
