/* The growing thread: what it gives, what it leaves alone, and that nothing depends on when it comes. */
#include "state/grow.h"
#include "model/runner.h"
#include "state/seq_internal.h"
#include "state/states.h"

/* A pass asks for a step as soon as less than one is left; the thread gives it. */
static void test_ahead(void **state)
{
    aff_net *n = open_net(AFF_FAST);
    aff_grower *g;
    aff_runner *r;
    aff_seq *s;
    must(aff__grower_create(&g, &err));
    must(aff__runner_create(&r, n, 1, &err));
    must(aff__seq_open(&s, n, &(aff_seq_options){.size = 500, .commit = 100, .margin = 32, .grower = g}, &err));
    must(aff__seq_grow(s, 68, &err)); /* 32 are left */
    aff__grower_wait(g);
    assert_int_equal(aff__seq_backed(s), 100);
    must(aff__seq_grow(s, 69, &err));
    aff__grower_wait(g);
    assert_int_equal(aff__seq_backed(s), 132);
    must(aff__seq_grow(s, 490, &err)); /* far beyond: at once, then up to the end of the room */
    assert_true(aff__seq_backed(s) >= 490);
    aff__grower_wait(g);
    assert_int_equal(aff__seq_backed(s), 500);
    aff__seq_reset(s);
    assert_int_equal(aff__seq_backed(s), 100);
    aff__grower_ask(g, s, 400);
    aff__seq_free(s); /* whatever the thread is at */
    aff__grower_free(g);
    aff__grower_free(NULL);
    aff__runner_free(r);
    aff__net_close(n);
}

/* Several sequences that grow while they run, reset and are freed: the logits of one that was backed from the start. */
static void grows(const char *device, int top, int rounds)
{
    enum { SEQS = 2 };
    aff_net *n = open_net(AFF_FAST);
    aff_device_spec spec;
    aff_grower *g;
    aff_runner *r;
    aff_seq *whole, *s[SEQS];
    float want[V], got[V];
    uint64_t seed = 3;
    must(aff__device_parse(&spec, device, &err));
    must(aff__grower_create(&g, &err));
    must(spec.choice == AFF_DEVICE_RT ? aff__runner_on(&r, n, &spec, 1, &err) : aff__runner_create(&r, n, 1, &err));
    const aff_memory *m = aff__runner_memory(r);
    must(aff__seq_open(&whole, n, &(aff_seq_options){.size = 300, .commit = 300, .memory = m}, &err));
    for (int i = 0; i < SEQS; i++)
        must(aff__seq_open(&s[i], n, &(aff_seq_options){.size = 300, .commit = -1, .margin = 4 + 9 * i, .memory = m, .grower = g}, &err));
    for (int round = 0; round < rounds; round++) {
        for (int to = 20; to <= top; to += 20) {
            run_to(r, whole, ids[0], to, 9, &seed, want);
            for (int i = 0; i < SEQS; i++) {
                run_to(r, s[i], ids[0], to, 9, &seed, got);
                assert_memory_equal(got, want, sizeof got);
            }
        }
        aff__seq_reset(whole);
        for (int i = 0; i < SEQS; i++) aff__seq_reset(s[i]);
    }
    for (int i = 0; i < SEQS; i++) aff__seq_free(s[i]);
    aff__seq_free(whole);
    aff__grower_free(g);
    aff__runner_free(r);
    aff__net_close(n);
}

static void test_cpu(void **state)
{
    grows("cpu", 240, 2);
}

static void test_card(void **state)
{
    grows("emu:256M", 80, 1);
}

int main(void)
{
    make_ids();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ahead), cmocka_unit_test(test_cpu), cmocka_unit_test(test_card)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
