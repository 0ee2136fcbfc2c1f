/* bpe: pieces longer than a chunk against the definition, applied rule by rule, under made-up rules: few letters and
 * long tokens, so that a merge at one end of a piece may depend on the other end. */
#include "support/test.h"
#include "base/rng.h"
#include "text/bpe.h"
#include <stdlib.h>
#include <string.h>

enum { RULES = 60, MOST = 9000 };

/* Random rules over `letters` letters; rule i makes the id 256 + i of two earlier ones. */
static void make_rules(aff_merges *m, uint64_t *rng, unsigned letters, bool doubling)
{
    assert_int_equal(aff__merges_init(m, RULES, NULL), AFF_OK);
    for (uint32_t i = 0; i < RULES; i++) {
        uint32_t a, b;
        do {
            const uint32_t n = letters + i;
            a = (uint32_t)(aff__splitmix64(rng) % n);
            b = doubling && i ? n - 1 : (uint32_t)(aff__splitmix64(rng) % n);
            if (doubling && i < 12) a = b;
            a = a < letters ? 'a' + a : 256 + a - letters;
            b = b < letters ? 'a' + b : 256 + b - letters;
            if (doubling && i >= 12) b = (uint32_t)('a' + aff__splitmix64(rng) % letters);
        } while (aff__merges_find(m, a, b) != AFF_NO_ID);
        aff__merges_add(m, a, b, 256 + i);
    }
}

/* The lowest rule, the leftmost of equals, until none applies. */
static size_t by_definition(const aff_merges *m, uint32_t *id, size_t n)
{
    for (;;) {
        uint32_t best = AFF_NO_ID;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const uint32_t r = aff__merges_find(m, id[i], id[i + 1]);
            if (r < best) {
                best = r;
                at = i;
            }
        }
        if (best == AFF_NO_ID) return n;
        /* the others of this rule, left to right: none of lower rank can come of them before */
        size_t to = at;
        const uint32_t left = id[at], right = id[at + 1];
        bool lower = false;
        for (size_t i = at; i < n;) {
            const bool here = !lower && i + 1 < n && id[i] == left && id[i + 1] == right;
            id[to++] = here ? best : id[i];
            i += here ? 2 : 1;
            if (here && to > 1 && aff__merges_find(m, id[to - 2], best) < best) lower = true;
            if (here && i < n && aff__merges_find(m, best, id[i]) < best) lower = true;
        }
        n = to;
    }
}

static void check(const aff_merges *m, uint64_t *rng, unsigned letters, size_t n)
{
    static uint8_t s[MOST];
    static uint32_t want[MOST];
    uint32_t byte_id[256];
    aff_bpe b = {0};
    aff_ids got = {0};
    for (uint32_t i = 0; i < 256; i++) byte_id[i] = i;
    const unsigned kind = (unsigned)(aff__splitmix64(rng) % 3), period = 1 + (unsigned)(aff__splitmix64(rng) % 7);
    for (size_t i = 0; i < n; i++) {
        s[i] = (uint8_t)('a' + aff__splitmix64(rng) % letters);
        if (kind == 1 && i >= period) s[i] = s[i - period];              /* one pattern again and again */
        if (kind == 2 && i && aff__splitmix64(rng) % 8) s[i] = s[i - 1]; /* runs */
        want[i] = s[i];
    }
    const size_t k = by_definition(m, want, n);
    assert_int_equal(aff__bpe_encode(&b, m, byte_id, s, n, &got, NULL), AFF_OK);
    assert_int_equal(got.n, k);
    assert_memory_equal(got.id, want, k * sizeof *want);
    aff__ids_free(&got);
    aff__bpe_free(&b);
}

static void long_pieces(void **state)
{
    uint64_t rng = 1;
    for (int i = 0; i < 300; i++) {
        aff_merges m;
        const unsigned letters = 1 + (unsigned)(i % 4);
        make_rules(&m, &rng, letters, i % 3 == 0 || letters == 1);
        check(&m, &rng, letters, 2049 + (size_t)(aff__splitmix64(&rng) % (MOST - 2049)));
        check(&m, &rng, letters, 2040 + (size_t)(i % 20));
        check(&m, &rng, letters, 30 + (size_t)(i % 20));
        aff__merges_free(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(long_pieces)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
