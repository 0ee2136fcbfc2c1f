/* A process that fills a prefix cache is killed at random points; what it leaves never gives a wrong state.
 * Arguments: number of kills (6), seed (1), folder (/tmp). The full form is scripts/check prefix. */
#include "state/prefix.h"
#include "state/states.h"
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[512];
static const char *where = "/tmp";
static int kills = 6;
static uint64_t seed = 1;

static aff_prefix_options options(void)
{
    return (aff_prefix_options){.dir = root, .bytes = UINT64_C(24) << 20, .block = 20, .persistent = true};
}

/* Publishes random beginnings for ever, a byte to `out` before each. */
static void fill(uint64_t s, int out)
{
    aff_net *net = open_net(AFF_SIM);
    aff_runner *r;
    aff_prefix *p;
    aff_prefix_options o = options();
    o.no_uring = s % 3 == 0;
    o.no_direct = s % 4 == 0;
    aff_seq *seq = open_seq(net);
    must(aff__runner_create(&r, net, 1, &err));
    must(aff__prefix_open(&p, net, &o, &err));
    for (;;) {
        const int family = (int)(aff__splitmix64(&s) % FAMILIES);
        int64_t at, matched;
        const int64_t n = 1 + (int64_t)(aff__splitmix64(&s) % (N - 1));
        must(aff__prefix_restore(p, seq, ids[family], n, n, &at, &matched, &err));
        run_to(r, seq, ids[family], n, 64, &s, NULL);
        if (write(out, "x", 1) != 1) _exit(1);
        must(aff__prefix_publish(p, seq, ids[family], &err));
    }
}

static void kill_once(uint64_t s)
{
    int ends[2];
    char byte;
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (!child) {
        close(ends[0]);
        fill(s, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    /* After some publications have begun, and a random while into the work that follows. */
    for (int n = 1 + (int)(aff__splitmix64(&s) % 12); n && read(ends[0], &byte, 1) == 1; n--) {
    }
    volatile uint64_t spin = aff__splitmix64(&s) % 40000000;
    while (spin) spin--;
    kill(child, SIGKILL);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    close(ends[0]);
}

/* Whether a file had been begun when the process died. */
static int half_written(void)
{
    int n = 0;
    DIR *d = opendir(root);
    assert_non_null(d);
    for (struct dirent *x; (x = readdir(d));) n += strncmp(x->d_name, "tmp-", 4) == 0;
    closedir(d);
    return n > 0;
}

static void test_kills(void **state)
{
    static aff_hash want[FAMILIES][N + 1];
    static float logits[FAMILIES][N + 1]; /* the first of each row */
    aff_net *net = open_net(AFF_SIM);
    aff_runner *r;
    aff_seq *seq = open_seq(net);
    uint64_t s = seed, hits = 0, lookups = 0, tokens = 0;
    int torn = 0;
    must(aff__runner_create(&r, net, 1, &err)); /* one thread: nothing else runs when fork is called */
    for (int f = 0; f < FAMILIES; f++) {
        aff__seq_reset(seq);
        for (int i = 0; i < N; i++) {
            float row[V];
            run_to(r, seq, ids[f], i + 1, 1, &s, row);
            want[f][i + 1] = aff__seq_digest(seq);
            logits[f][i + 1] = row[0];
        }
    }
    want[0][0] = want[1][0] = want[2][0] = want[3][0] = (aff_hash){0};
    for (int k = 0; k < kills; k++) {
        kill_once(seed * 1000 + (uint64_t)k);
        aff_prefix *p;
        const aff_prefix_options o = options();
        torn += half_written();
        must(aff__prefix_open(&p, net, &o, &err));
        assert_int_equal(half_written(), 0);
        for (int f = 0; f < FAMILIES; f++)
            for (int64_t n = N; n > 0; n -= 1 + (int64_t)(aff__splitmix64(&s) % 60)) {
                int64_t at, matched;
                float row[V];
                must(aff__prefix_restore(p, seq, ids[f], n, n, &at, &matched, &err));
                assert_int_equal(aff__seq_pos(seq), at);
                lookups++;
                hits += at > 0;
                tokens += (uint64_t)at;
                if (at && !same_hash(aff__seq_digest(seq), want[f][at]))
                    fail_msg("kill %d: family %d at %d: a wrong state", k, f, (int)at);
                if (at == 0 || at == N) continue;
                run_to(r, seq, ids[f], at + 1, 1, &s, row);
                assert_memory_equal(&row[0], &logits[f][at + 1], sizeof(float));
            }
        aff__prefix_close(p);
    }
    assert_true(hits > 0);
    print_message("%d kills, %d in the middle of a file: %llu look-ups, %llu hits, %llu tokens restored, none wrong\n",
                  kills, torn, (unsigned long long)lookups, (unsigned long long)hits, (unsigned long long)tokens);
    aff__seq_free(seq);
    aff__runner_free(r);
    aff__net_close(net);
}

static int setup(void **state)
{
    make_ids();
    snprintf(root, sizeof root, "%s/aff-prefix-kill-XXXXXX", where);
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[600];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(int argc, char **argv)
{
    if (argc > 1) kills = atoi(argv[1]);
    if (argc > 2) seed = strtoull(argv[2], NULL, 10);
    if (argc > 3) where = argv[3];
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kills)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
