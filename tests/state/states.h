/* states.h - a small network with a draft, token ids, and the digest of the state after every position: what snapshots
 * and the prefix cache must reproduce. */
#ifndef AFF_TESTS_STATES_H
#define AFF_TESTS_STATES_H
#include "base/rng.h"
#include "model/forward.h"
#include "state/snapshot.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>

enum { V = 256, N = 300, FAMILIES = 4 };
static aff_error err;
static inline void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* Family 0 is random; the others leave it at positions 40, 97 and 200. */
static int32_t ids[FAMILIES][N];
static inline void make_ids(void)
{
    static const int leaves[FAMILIES] = {0, 40, 97, 200};
    uint64_t seed = 11;
    for (int f = 0; f < FAMILIES; f++)
        for (int i = 0; i < N; i++) ids[f][i] = i < leaves[f] ? ids[0][i] : (int32_t)(aff__splitmix64(&seed) % V);
}

static inline aff_net *open_net(aff_numerics num)
{
    char ckpt[1024];
    aff_net *n;
    snprintf(ckpt, sizeof ckpt, "%s/golden/v4-sim/ckpt-dspark", AFF_TESTS_DIR);
    must(aff__net_open(&n, ckpt, &(aff_net_options){.numerics = num, .draft = true}, &err));
    return n;
}

static inline aff_seq *open_seq(const aff_net *n)
{
    aff_seq *s;
    must(aff__seq_open(&s, n, &(aff_seq_options){.size = 512, .commit = 64, .margin = 32}, &err));
    return s;
}

/* Runs tokens up to position `to`, in chunks of up to `most` rows; logits of the last row if wanted. */
static inline void run_to(aff_runner *r, aff_seq *s, const int32_t *id, int64_t to, int most, uint64_t *seed,
                          float *last)
{
    while (aff__seq_pos(s) < to) {
        const int64_t at = aff__seq_pos(s), left = to - at,
                      some = 1 + (int64_t)(aff__splitmix64(seed) % (uint64_t)most);
        const int n = (int)(some < left ? some : left);
        const aff_batch b = {
            .n = n, .id = id + at, .seq = s, .want_from = last && n == left ? n - 1 : n, .logits = last};
        must(aff__forward(r, &b, &err));
    }
}

static inline bool same_hash(aff_hash a, aff_hash b)
{
    return a.lo == b.lo && a.hi == b.hi;
}
#endif
