/* state/prefix: what is restored equals what a fresh run computes, and damage of any kind is a miss that leaves no
 * trace. */
#include "state/prefix.h"
#include "base/file.h"
#include "model/net_internal.h"
#include "state/prefix_file.h"
#include "state/states.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/aff-prefix-XXXXXX";
static aff_net *net;
static aff_runner *runner;
static aff_seq *seq, *fresh;
static uint64_t seed = 9;
static int warnings;
static char last_warning[512];

static void note(void *ctx, const char *line)
{
    warnings++;
    snprintf(last_warning, sizeof last_warning, "%s", line);
}

static aff_prefix_options options(const char *name)
{
    static char dir[128];
    snprintf(dir, sizeof dir, "%s/%s", root, name);
    return (aff_prefix_options){.dir = dir, .bytes = UINT64_C(1) << 30, .block = 20, .persistent = true, .warn = note};
}

static aff_prefix *open_cache(const aff_prefix_options *o)
{
    aff_prefix *p;
    must(aff__prefix_open(&p, net, o, &err));
    return p;
}

/* A run of `n` tokens of a family, published at its end. */
static void publish(aff_prefix *p, int family, int64_t n)
{
    aff__seq_reset(seq);
    run_to(runner, seq, ids[family], n, 50, &seed, NULL);
    must(aff__prefix_publish(p, seq, ids[family], &err));
}

/* Restores and compares with a run that knows no cache, state and what follows. */
static int64_t restore(aff_prefix *p, int family, int64_t n, int64_t most, int64_t *matched)
{
    int64_t at, m;
    float a[V], b[V];
    must(aff__prefix_restore(p, seq, ids[family], n, most, &at, &m, &err));
    assert_int_equal(aff__seq_pos(seq), at);
    assert_true(at <= most && at <= n);
    aff__seq_reset(fresh);
    run_to(runner, fresh, ids[family], at, 50, &seed, NULL);
    assert_true(same_hash(aff__seq_digest(seq), aff__seq_digest(fresh)));
    run_to(runner, fresh, ids[family], at + 9, 50, &seed, a);
    run_to(runner, seq, ids[family], at + 9, 50, &seed, b);
    assert_memory_equal(a, b, sizeof a);
    assert_true(same_hash(aff__seq_digest(seq), aff__seq_digest(fresh)));
    if (matched) *matched = m;
    return at;
}

/* Files of the cache whose names end in `end`; the i-th into path. */
static int files(const char *dir, const char *end, int want, char *path, size_t size)
{
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *x; d && (x = readdir(d));) {
        const size_t len = strlen(x->d_name);
        if (len < 5 || strcmp(x->d_name + len - strlen(end), end) != 0) continue;
        if (n++ == want && path) snprintf(path, size, "%s/%s", dir, x->d_name);
    }
    if (d) closedir(d);
    return n;
}

static void hits_and_misses(bool uring, bool direct, bool persistent)
{
    aff_prefix_options o = options("plain");
    o.no_uring = !uring;
    o.no_direct = !direct;
    o.persistent = persistent;
    o.verify = uring;
    aff_prefix *p = open_cache(&o);
    int64_t matched;
    assert_int_equal(restore(p, 0, 100, 99, &matched), 0);
    assert_int_equal(matched, 0);
    publish(p, 0, 135); /* in the middle of a group of 4, and of 128 */
    assert_int_equal(restore(p, 0, 200, 199, &matched), 135);
    assert_int_equal(matched, 120);
    assert_int_equal(restore(p, 0, 135, 134, &matched), 134); /* a checkpoint at the end, one token back */
    assert_int_equal(restore(p, 0, 135, 128, &matched), 128);
    assert_int_equal(restore(p, 0, 135, 126, &matched), 0); /* further than a rollback goes */
    assert_int_equal(matched, 120);
    assert_int_equal(restore(p, 0, 134, 134, &matched), 0); /* a checkpoint is good for those who have all its tokens */
    publish(p, 2, 97);                                      /* family 2 leaves at 97: its checkpoint is at the fork */
    publish(p, 2, 240);
    publish(p, 3, 260);
    assert_int_equal(restore(p, 1, 250, 249, &matched), 0); /* leaves at 40: two blocks known, no checkpoint */
    assert_int_equal(matched, 40);
    assert_int_equal(restore(p, 0, 110, 109, &matched), 97);
    assert_int_equal(restore(p, 2, 250, 249, &matched), 240);
    assert_int_equal(restore(p, 3, 250, 249, &matched), 135);
    assert_int_equal(matched, 240);
    assert_int_equal(restore(p, 3, 300 - 9, 280, &matched), 260);
    /* Publishing what is there writes nothing. */
    aff__prefix_flush(p);
    aff_prefix_stats s = aff__prefix_stats(p);
    publish(p, 3, 260);
    aff__prefix_flush(p);
    const aff_prefix_stats t = aff__prefix_stats(p);
    assert_int_equal(t.blocks_written, s.blocks_written);
    assert_int_equal(t.checkpoints_written, s.checkpoints_written);
    assert_int_equal(t.checkpoints_written, 4);
    assert_int_equal(t.blocks_written,
                     6 + 8 + 7); /* 0: 120 tokens; 2: 240, the first 80 shared; 3: 260, the first 120 shared */
    assert_int_equal(t.damaged, 0);
    assert_int_equal(t.write_failures, 0);
    assert_int_equal(t.entries, t.blocks_written + t.checkpoints_written);
    assert_true(uring || !t.uring);
    assert_true(direct || !t.direct);
    /* Files are the user's alone, and there are as many bytes as counted. */
    char path[512];
    uint64_t bytes = 0;
    struct stat st;
    char dir[160];
    snprintf(dir, sizeof dir, "%s%s", o.dir, persistent ? "" : "/session");
    const int n = files(dir, ".blk", -1, NULL, 0), c = files(dir, ".ckp", -1, NULL, 0);
    assert_int_equal((uint64_t)(n + c), t.entries);
    for (int i = 0; i < n + c; i++) {
        files(dir, i < n ? ".blk" : ".ckp", i < n ? i : i - n, path, sizeof path);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 0777, 0600);
        bytes += (uint64_t)st.st_size;
    }
    assert_int_equal(bytes, t.bytes);
    aff__prefix_close(p);
    /* The next process finds it all, or nothing. */
    p = open_cache(&o);
    assert_int_equal(aff__prefix_stats(p).entries, persistent ? t.entries : 0);
    assert_int_equal(restore(p, 2, 250, 249, &matched), persistent ? 240 : 0);
    aff__prefix_close(p);
    char cmd[200];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", o.dir);
    assert_int_equal(system(cmd), 0);
}

static void test_uring(void **state)
{
    hits_and_misses(true, true, true);
}
static void test_threads(void **state)
{
    hits_and_misses(false, true, true);
}
static void test_buffered(void **state)
{
    hits_and_misses(true, false, false);
}

/* Each round does another kind of damage. TSan looks at the threads, which are the same in every round, and is slow. */
#ifdef __SANITIZE_THREAD__
enum { DAMAGE_ROUNDS = 2 };
#else
enum { DAMAGE_ROUNDS = 24 };
#endif

/* Truncated, altered, emptied, exchanged: a miss, the file is gone, and the rest still serves. */
static void test_damage(void **state)
{
    const aff_prefix_options o = options("damage");
    for (int round = 0; round < DAMAGE_ROUNDS; round++) {
        aff_prefix *p = open_cache(&o);
        publish(p, 0, 60);
        publish(p, 0, 95);
        publish(p, 0, 130);
        aff__prefix_flush(p);
        const uint64_t whole = aff__prefix_stats(p).entries;
        assert_int_equal(whole, 6 + 3);
        const bool reopen = round % 2; /* found when opening, or while in use */
        if (reopen) aff__prefix_close(p);
        char path[512], other[512];
        struct stat st;
        const char *end = round / 2 % 2 ? ".blk" : ".ckp";
        const int n = files(o.dir, end, 0, NULL, 0), victim = (int)(aff__splitmix64(&seed) % (uint64_t)n);
        files(o.dir, end, victim, path, sizeof path);
        files(o.dir, end, (victim + 1) % n, other, sizeof other);
        assert_int_equal(stat(path, &st), 0);
        const int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        uint8_t byte;
        off_t at = (off_t)(aff__splitmix64(&seed) % (uint64_t)st.st_size);
        switch (round / 4) {
        case 0:
            at = 8 + at % 200;
            __attribute__((fallthrough)); /* header and ids */
        case 1:
            assert_int_equal(pread(fd, &byte, 1, at), 1);
            byte ^= (uint8_t)(1 << round % 8);
            assert_int_equal(pwrite(fd, &byte, 1, at), 1);
            break;
        case 2:
            assert_int_equal(ftruncate(fd, at / 4096 * 4096), 0);
            break;
        case 3:
            assert_int_equal(ftruncate(fd, st.st_size + 4096), 0);
            break;
        case 4: /* torn: the last page never reached the disk */
            assert_int_equal(ftruncate(fd, st.st_size - 4096), 0);
            assert_int_equal(ftruncate(fd, st.st_size), 0);
            break;
        default: /* another entry's bytes under this name */
            unlink(path);
            assert_int_equal(link(other, path), 0);
        }
        close(fd);
        if (reopen) p = open_cache(&o);
        const int64_t a = restore(p, 0, 60, 59, NULL), b = restore(p, 0, 95, 94, NULL),
                      c = restore(p, 0, 150, 149, NULL);
        assert_true((a == 59 || a == 0) && (b == 94 || b == 59 || b == 60 || b == 0));
        assert_true(c == 130 || c == 95 || c == 60 || c == 0);
        const aff_prefix_stats s = aff__prefix_stats(p);
        /* The padding of a torn page may hold what it held; else exactly one entry was thrown out, and its file. */
        assert_true(s.damaged == 1 || (round / 4 == 4 && s.damaged == 0));
        assert_int_equal(s.entries, whole - s.damaged);
        assert_int_equal((uint64_t)(files(o.dir, ".blk", -1, NULL, 0) + files(o.dir, ".ckp", -1, NULL, 0)), s.entries);
        if (s.damaged) {
            publish(p, 0, 60);
            publish(p, 0, 95);
            publish(p, 0, 130);
            assert_int_equal(restore(p, 0, 150, 149, NULL), 130);
            assert_int_equal(restore(p, 0, 95, 94, NULL), 94);
        }
        aff__prefix_close(p);
        char cmd[200];
        snprintf(cmd, sizeof cmd, "rm -rf '%s'", o.dir);
        assert_int_equal(system(cmd), 0);
    }
}

/* The bound holds; what goes first is the end of what was not used for longest. */
static void test_eviction(void **state)
{
    aff_prefix_options o = options("small");
    aff_seq_plan plan;
    must(aff__seq_plan(&plan, net, 1, &err));
    o.bytes = 4096;
    aff_prefix *p;
    assert_int_equal(aff__prefix_open(&p, net, &o, &err), AFF_E_LIMIT);
    o.bytes = plan.raw + plan.history + plan.draft + 64 * 12288;
    p = open_cache(&o);
    for (int i = 0; i < 40; i++) {
        const int family = (int)(aff__splitmix64(&seed) % FAMILIES);
        publish(p, family, 200 + (int64_t)(aff__splitmix64(&seed) % 90));
        restore(p, 0, 120, 119, NULL);
        assert_true(aff__prefix_stats(p).bytes <= o.bytes);
    }
    aff__prefix_flush(p);
    const aff_prefix_stats s = aff__prefix_stats(p);
    assert_true(s.evicted > 0 && s.write_failures == 0 && s.bytes <= o.bytes);
    /* The beginning, which everything shares, is still there. */
    int64_t matched;
    restore(p, 0, 40, 39, &matched);
    assert_int_equal(matched, 40);
    aff__prefix_close(p);
    /* A smaller bound at the next start. */
    const uint64_t was = s.bytes;
    o.bytes = plan.raw + plan.history + plan.draft + 16 * 12288;
    p = open_cache(&o);
    assert_true(aff__prefix_stats(p).bytes <= o.bytes && was > o.bytes / 2);
    aff__prefix_close(p);
}

/* Entries of another model, another numerics, another block length: not read, counted, first to go. */
static void test_other_versions(void **state)
{
    aff_prefix_options o = options("versions");
    aff_prefix *p = open_cache(&o);
    publish(p, 0, 100);
    aff__prefix_close(p);
    const int n = files(o.dir, ".blk", -1, NULL, 0) + files(o.dir, ".ckp", -1, NULL, 0);
    aff_net *sim = net, *other = open_net(AFF_FAST);
    assert_false(same_hash(aff__seq_fingerprint(sim, NULL), aff__seq_fingerprint(other, NULL)));
    o.block = 24;
    p = open_cache(&o);
    assert_int_equal(restore(p, 0, 100, 99, NULL), 0);
    assert_int_equal(aff__prefix_stats(p).entries, (uint64_t)n);
    assert_int_equal(aff__prefix_stats(p).damaged, 0);
    aff__prefix_close(p);
    o.block = 20;
    net = other;
    p = open_cache(&o);
    int64_t at, matched;
    aff_seq *s = open_seq(other);
    must(aff__prefix_restore(p, s, ids[0], 100, 99, &at, &matched, &err));
    assert_int_equal(at, 0);
    assert_int_equal(matched, 0);
    aff__seq_free(s);
    aff__prefix_close(p);
    aff__net_close(other);
    net = sim;
    p = open_cache(&o);
    assert_int_equal(restore(p, 0, 101, 100, NULL), 100);
    aff__prefix_close(p);
    /* Same weights opened again: the same fingerprint. */
    aff_net *again = open_net(AFF_SIM);
    assert_true(same_hash(aff__seq_fingerprint(sim, NULL), aff__seq_fingerprint(again, NULL)));
    aff__net_close(again);
}

static void test_folders(void **state)
{
    aff_prefix_options o = options("folder");
    aff_prefix *p = open_cache(&o), *q;
    assert_int_equal(aff__prefix_open(&q, net, &o, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "another process"));
    aff__prefix_close(p);
    o.dir = "/proc/affinity";
    assert_int_equal(aff__prefix_open(&q, net, &o, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "/proc/affinity"));
    o.dir = "/proc"; /* exists, cannot be written */
    assert_int_equal(aff__prefix_open(&q, net, &o, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "cannot write"));
    o.dir = "";
    assert_int_equal(aff__prefix_open(&q, net, &o, &err), AFF_E_INVALID);
    o = options("folder");
    o.block = -1;
    assert_int_equal(aff__prefix_open(&q, net, &o, &err), AFF_E_INVALID);
    /* A folder that vanishes: misses and one warning, no error. */
    o.block = 20;
    p = open_cache(&o);
    publish(p, 0, 50);
    aff__prefix_flush(p);
    char cmd[200];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", o.dir);
    assert_int_equal(system(cmd), 0);
    warnings = 0;
    assert_int_equal(restore(p, 0, 60, 59, NULL), 0);
    publish(p, 1, 80);
    aff__prefix_flush(p);
    assert_int_equal(restore(p, 1, 90, 89, NULL), 0);
    assert_true(aff__prefix_stats(p).write_failures > 0);
    assert_int_equal(warnings, 2);
    aff__prefix_close(p);
}

/* The disk takes only the first pages of a file. */
static void test_refused_writes(void **state)
{
    aff_prefix_options o = options("refused");
    struct rlimit was, now;
    aff_prefix *p = open_cache(&o);
    publish(p, 0, 50);
    aff__prefix_flush(p);
    assert_int_equal(aff__prefix_stats(p).write_failures, 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    signal(SIGXFSZ, SIG_IGN);
    now = was;
    now.rlim_cur = 4096;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &now), 0);
    warnings = 0;
    publish(p, 1, 100);
    aff__prefix_flush(p);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    const aff_prefix_stats s = aff__prefix_stats(p);
    assert_true(s.write_failures > 0);
    assert_int_equal(warnings, 1);
    assert_non_null(strstr(last_warning, "cannot write"));
    assert_int_equal(files(o.dir, "", -1, NULL, 0),
                     (int)s.entries); /* no temporary files (`lock` is too short a name) */
    assert_int_equal(restore(p, 1, 110, 109, NULL), 0);
    assert_int_equal(restore(p, 0, 60, 59, NULL), 50);
    publish(p, 1, 100);
    assert_int_equal(restore(p, 1, 110, 109, NULL), 100);
    aff__prefix_close(p);
}

static int setup(void **state)
{
    make_ids();
    net = open_net(AFF_SIM);
    must(aff__runner_create(&runner, net, 1, &err));
    seq = open_seq(net);
    fresh = open_seq(net);
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[64];
    aff__seq_free(seq);
    aff__seq_free(fresh);
    aff__runner_free(runner);
    aff__net_close(net);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_uring),    cmocka_unit_test(test_threads),
                                       cmocka_unit_test(test_buffered), cmocka_unit_test(test_damage),
                                       cmocka_unit_test(test_eviction), cmocka_unit_test(test_other_versions),
                                       cmocka_unit_test(test_folders),  cmocka_unit_test(test_refused_writes)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
