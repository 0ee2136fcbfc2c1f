/* engine/eval and engine/logits_file: figures against values worked out by hand, files against themselves and against
 * damage. */
#define _GNU_SOURCE
#include "support/test.h"
#include "base/mem.h"
#include "engine/logits_file.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

static aff_error err;

static void close_to(double got, double want, const char *what)
{
    if (!(fabs(got - want) <= 1e-12 * (1 + fabs(want)))) fail_msg("%s: expected %.17g, got %.17g", what, want, got);
}

/* Probabilities as logits, shifted by a constant that must not matter. */
static void logits_of(const double *p, int n, double shift, float *l)
{
    for (int i = 0; i < n; i++) l[i] = (float)(log(p[i]) + shift);
}

/* Logits k * log 2 are inexact in float32; 0 against log 3 (rounded) is compared through the rounded value itself. */
static void two_tokens(void **state)
{
    const float ref[2] = {0, 0}, got[2] = {0, 1};
    aff_eval_ref r;
    aff_eval_row row;
    assert_int_equal(aff__eval_full(ref, 2, 1, &r, &err), AFF_OK);
    close_to(r.lse, log(2), "log-sum-exp of 0, 0");
    assert_int_equal(aff__eval_compare(&r, got, 2, 1, NULL, &row, &err), AFF_OK);
    /* q = (1, e) / (1 + e), p = (1/2, 1/2): KL = log(1 + e) - 1/2 - log 2. */
    close_to(row.kl, log(1 + exp(1)) - 0.5 - log(2), "KL");
    close_to(row.nll, log(1 + exp(1)) - 1, "nll");
    close_to(row.ref_nll, log(2), "reference nll");
    assert_int_equal(row.ref_top, 0); /* the lower id of equals */
    assert_int_equal(row.top, 1);
    assert_int_equal(row.common5, 2);
    assert_int_equal(aff__eval_compare(NULL, got, 2, 0, NULL, &row, &err), AFF_OK);
    close_to(row.nll, log(1 + exp(1)), "nll of the other token");
}

static void many_tokens(void **state)
{
    /* KL((1/2, 1/4, 1/8, 1/16, 1/32, 1/32), uniform over 6) = log 6 - H, H = (1/2 + 2/4 + 3/8 + 4/16 + 5/16) log 2. */
    const double p[6] = {0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125}, u[6] = {1, 1, 1, 1, 1, 1};
    float ref[6], got[6];
    aff_eval_ref r;
    aff_eval_row row;
    logits_of(p, 6, 3, ref);
    logits_of(u, 6, -200, got);
    assert_int_equal(aff__eval_full(ref, 6, 3, &r, &err), AFF_OK);
    assert_int_equal(aff__eval_compare(&r, got, 6, 3, NULL, &row, &err), AFF_OK);
    assert_true(fabs(row.kl - (log(6) - 1.9375 * log(2))) < 1e-6); /* logits are float32 */
    assert_true(fabs(row.nll - log(6)) < 1e-12);
    assert_true(fabs(row.ref_nll - 4 * log(2)) < 1e-6);
    assert_int_equal(row.common5, 5); /* equals are taken from the lowest id on: 0 to 4 both times */
    got[0] = -300;                    /* {1..5} against {0..4} */
    assert_int_equal(aff__eval_compare(&r, got, 6, 3, NULL, &row, &err), AFF_OK);
    assert_int_equal(row.common5, 4);
    assert_int_equal(row.top, 1);
    assert_int_equal(aff__eval_compare(&r, ref, 6, 3, NULL, &row, &err), AFF_OK);
    assert_true(row.kl == 0 && row.nll == row.ref_nll);
    got[2] = NAN;
    assert_int_equal(aff__eval_compare(&r, got, 6, 3, NULL, &row, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "id 2"));
}

/* The largest ids against a sort of all. */
static void largest(void **state)
{
    float l[97];
    for (int seed = 0; seed < 20; seed++) {
        int32_t all[97], top[97];
        for (int i = 0; i < 97; i++) {
            l[i] = (float)((i * 37 + seed * 11) % (seed + 3)); /* few values: many equals */
            all[i] = i;
        }
        for (int i = 1; i < 97; i++)
            for (int k = i; k > 0 && l[all[k]] > l[all[k - 1]]; k--) {
                const int32_t t = all[k];
                all[k] = all[k - 1];
                all[k - 1] = t;
            }
        static const int ks[] = {1, 2, 5, 96, 97};
        for (int k = 0; k < 5; k++) {
            aff__eval_top(l, 97, ks[k], top);
            assert_memory_equal(top, all, (size_t)ks[k] * sizeof *top);
        }
    }
}

static void statistics(void **state)
{
    aff_eval_stat s;
    const double four[] = {4, 1, 3, 2};
    assert_int_equal(aff__eval_stat(four, 4, &s, &err), AFF_OK);
    close_to(s.mean, 2.5, "mean");
    close_to(s.se, sqrt(5.0 / 3 / 4), "standard error"); /* variance 5/3 of 4 values */
    close_to(s.median, 2, "median");                     /* the lower middle */
    close_to(s.p99, 4, "p99");
    close_to(s.max, 4, "max");
    double v[1000];
    for (int i = 0; i < 1000; i++) v[i] = (i * 617) % 1000 + 1; /* 1 .. 1000 in some order */
    assert_int_equal(aff__eval_stat(v, 1000, &s, &err), AFF_OK);
    close_to(s.median, 500, "median of 1000");
    close_to(s.p99, 990, "p99 of 1000");
    close_to(s.max, 1000, "max of 1000");
    close_to(s.se, sqrt(1000.0 * 1001 / 12 / 1000), "standard error of 1..1000"); /* variance n(n+1)/12 */
    assert_int_equal(aff__eval_stat(four, 1, &s, &err), AFF_OK);
    close_to(s.se, 0, "standard error of one");
    double share, se;
    aff__eval_share(3, 4, &share, &se);
    close_to(share, 0.75, "share");
    close_to(se, sqrt(0.75 * 0.25 / 4), "its standard error");
}

static void summary(void **state)
{
    /* Sequences of 3, the first row of each left out: rows 1, 2, 4. */
    const aff_eval_row row[5] = {
        {9, 9, 9, 0, 1, 0}, {1, 0.5, 0.1, 2, 2, 5}, {2, 2, 0.2, 1, 2, 4}, {9, 9, 9, 0, 1, 0}, {3, 2, 0.6, 5, 5, 3}};
    aff_eval_summary s;
    assert_int_equal(aff__eval_summarise(row, 5, 3, 1, true, 5, &s, &err), AFF_OK);
    assert_int_equal(s.positions, 3);
    close_to(s.nll.mean, 2, "nll");
    close_to(s.ref_nll.mean, 1.5, "reference nll");
    close_to(s.delta.mean, 0.5, "difference");
    close_to(s.delta.se, sqrt(0.25 / 3), "its standard error"); /* 0.5, 0, 1 */
    close_to(s.kl.mean, 0.3, "KL");
    close_to(s.kl.max, 0.6, "largest KL");
    close_to(s.top1, 2.0 / 3, "top 1");
    close_to(s.top5, 12.0 / 15, "top 5");
    close_to(s.top5_se, sqrt(0.04 / 3), "its standard error"); /* 1, 0.8, 0.6 */
    assert_int_equal(aff__eval_summarise(row, 1, 3, 1, true, 5, &s, &err), AFF_E_INVALID);
}

/* ---- saved logits ---- */

enum { VOCAB = 40, ROWS = 7 };
static char dir[64], path[128];
static float rows[ROWS][VOCAB];
static const int32_t target[ROWS] = {0, 39, 7, 7, 20, 1, 30};

static int setup(void **state)
{
    snprintf(dir, sizeof dir, "/tmp/aff_eval_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/l", dir);
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VOCAB; v++)
            rows[i][v] = (float)((i * 91 + v * 57) % 23) * 0.25f - (float)i; /* with equals */
    return 0;
}

static int teardown(void **state)
{
    unlink(path);
    return rmdir(dir);
}

static aff_logits_head head_of(uint32_t top)
{
    return (aff_logits_head){.vocab = VOCAB,
                             .top = top,
                             .chunk = 4,
                             .numerics = AFF_FAST,
                             .bos = 3,
                             .positions = ROWS,
                             .text = 0x1122334455667788,
                             .model = 99};
}

static void save(uint32_t top)
{
    aff_logits_out *o;
    const aff_logits_head h = head_of(top);
    if (aff__logits_create(&o, path, &h, &err) != AFF_OK) fail_msg("%s", err.msg);
    for (int i = 0; i < ROWS; i++) assert_int_equal(aff__logits_put(o, rows[i], target[i], &err), AFF_OK);
    assert_int_equal(aff__logits_put(o, rows[0], 0, &err), AFF_E_INVALID); /* one too many */
    if (aff__logits_finish(o, &err) != AFF_OK) fail_msg("%s", err.msg);
}

static void saved_rows(void **state)
{
    static const uint32_t tops[] = {0, 5, 12, VOCAB};
    for (int k = 0; k < 4; k++) {
        aff_logits_in *f;
        float logit[VOCAB], other[VOCAB];
        int32_t id[VOCAB];
        uint8_t used[VOCAB] = {0};
        save(tops[k]);
        if (aff__logits_open(&f, path, true, &err) != AFF_OK) fail_msg("%s", err.msg);
        const aff_logits_head *h = aff__logits_head(f);
        assert_int_equal(h->vocab, VOCAB);
        assert_int_equal(h->top, tops[k]);
        assert_int_equal(h->chunk, 4);
        assert_int_equal(h->numerics, AFF_FAST);
        assert_int_equal(h->bos, 3);
        assert_int_equal(h->positions, ROWS);
        assert_true(h->text == 0x1122334455667788 && h->model == 99);
        for (int i = ROWS - 1; i >= 0; i--) {
            aff_eval_ref saved, whole;
            aff_eval_row a, b;
            for (int v = 0; v < VOCAB; v++) other[v] = rows[i][v] + (float)((v * 13) % 7) * 0.125f;
            assert_int_equal(aff__logits_get(f, (uint64_t)i, target[i], logit, id, &saved, &err), AFF_OK);
            assert_int_equal(aff__eval_full(rows[i], VOCAB, target[i], &whole, &err), AFF_OK);
            assert_int_equal(aff__eval_compare(&saved, other, VOCAB, target[i], used, &a, &err), AFF_OK);
            assert_int_equal(aff__eval_compare(&whole, other, VOCAB, target[i], used, &b, &err), AFF_OK);
            assert_true(a.nll == b.nll && a.ref_nll == b.ref_nll && a.top == b.top && a.ref_top == b.ref_top &&
                        a.common5 == b.common5);
            if (tops[k] == 0) assert_true(a.kl == b.kl);
            if (tops[k] == VOCAB) assert_true(fabs(a.kl - b.kl) < 1e-14);
            if (tops[k] == 5 || tops[k] == 12) assert_true(a.kl > 0 && a.kl < b.kl); /* a lower bound */
            for (int v = 0; v < VOCAB; v++) assert_int_equal(used[v], 0);
        }
        assert_int_equal(aff__logits_get(f, ROWS, 0, logit, id, &(aff_eval_ref){0}, &err), AFF_E_INVALID);
        assert_int_equal(aff__logits_get(f, 0, VOCAB, logit, id, &(aff_eval_ref){0}, &err), AFF_E_INVALID);
        aff__logits_close(f);
    }
}

/* Five of eight tokens listed, the rest as one: KL by hand. */
static void lumped(void **state)
{
    const int32_t id[5] = {4, 1, 0, 2, 3};
    const double p[8] = {0.125, 0.125, 0.0625, 0.0625, 0.5, 0.0625, 0.03125, 0.03125};
    float l[8], got[8] = {0}, listed[5];
    uint8_t used[8] = {0};
    aff_eval_row row;
    logits_of(p, 8, 0, l);
    for (int i = 0; i < 5; i++) listed[i] = l[id[i]];
    const aff_eval_ref r = {.n = 5, .id = id, .logit = listed, .lse = 0, .rest = 0.125, .target = l[7]};
    assert_int_equal(aff__eval_compare(&r, got, 8, 7, used, &row, &err), AFF_OK);
    /* sum p log p + log 8 over the listed, 1/8 log((1/8) / (3/8)) for the rest. */
    const double listed_kl = 0.5 * log(4) + 0 + 0 + 2 * 0.0625 * log(0.5);
    assert_true(fabs(row.kl - (listed_kl - 0.125 * log(3))) < 1e-6);
    assert_true(fabs(row.ref_nll - 5 * log(2)) < 1e-6);
}

static char *slurp(size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *p = malloc(8192);
    assert_non_null(p);
    *n = fread(p, 1, 8192, f);
    fclose(f);
    return p;
}

static void expect(const char *p, size_t n, aff_status want, const char *word)
{
    aff_logits_in *f;
    err = (aff_error){0};
    assert_int_equal(aff__logits_open_memory(&f, p, n, "mem", true, &err), want);
    assert_null(f);
    if (!strstr(err.msg, word)) fail_msg("'%s' does not say '%s'", err.msg, word);
}

/* Changes a header field and makes its checksum right again. */
static void patch(char *p, size_t at, uint64_t v, size_t n)
{
    memcpy(p + at, &v, n);
    const uint64_t h = XXH3_64bits(p, 72);
    memcpy(p + 72, &h, 8);
}

static void damaged(void **state)
{
    static const struct {
        size_t at;
        uint64_t value;
        size_t size;
        aff_status status;
        const char *word;
    } cases[] = {
        {8, 2, 4, AFF_E_UNSUPPORTED, "version 1"}, {12, 0, 4, AFF_E_FORMAT, "vocabulary 0"},
        {24, 6, 4, AFF_E_FORMAT, "rows"},          {12, UINT32_MAX, 4, AFF_E_FORMAT, "make no sense"},
        {16, 8, 8, AFF_E_FORMAT, "8 rows"},        {16, UINT64_MAX / 40, 8, AFF_E_FORMAT, "rows"},
        {16, 0, 8, AFF_E_FORMAT, "0 positions"},   {24, 41, 4, AFF_E_FORMAT, "top 41"},
        {24, 4, 4, AFF_E_FORMAT, "top 4"},         {48, 3, 4, AFF_E_FORMAT, "make no sense"},
    };
    size_t n;
    save(5);
    char *p = slurp(&n), *q = malloc(n);
    assert_non_null(q);
    assert_int_equal(n, 80 + ROWS * (24 + 5 * 8));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(q, p, n);
        patch(q, cases[i].at, cases[i].value, cases[i].size);
        expect(q, n, cases[i].status, cases[i].word);
    }
    memcpy(q, p, n);
    q[33] ^= 1;
    expect(q, n, AFF_E_FORMAT, "header is damaged");
    for (size_t cut = 0; cut < n; cut++) expect(p, cut, AFF_E_FORMAT, "mem");
    memcpy(q, p, n);
    q[80 + 64 + 24] ^= 1; /* an id of row 1 */
    expect(q, n, AFF_E_FORMAT, "rows are damaged");
    aff_logits_in *f;
    float logit[5];
    int32_t id[5];
    aff_eval_ref r;
    static const struct {
        size_t at;
        int32_t value;
    } bad[] = {{24, VOCAB},     {24, -1},         {44, 0x7fc00000}, {44, (int32_t)0xff7fffff},
               {4, 0x7ff00000}, {12, 0x40000000}, {16, 0x7f800000}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad;
         i++) { /* without the hash of all rows, a row still is not believed */
        memcpy(q, p, n);
        memcpy(q + 80 + 64 + bad[i].at, &bad[i].value, 4);
        assert_int_equal(aff__logits_open_memory(&f, q, n, "mem", false, &err), AFF_OK);
        assert_int_equal(aff__logits_get(f, 0, 0, logit, id, &r, &err), AFF_OK);
        if (aff__logits_get(f, 1, 0, logit, id, &r, &err) != AFF_E_FORMAT)
            fail_msg("byte %zu of a row: accepted", bad[i].at);
        assert_non_null(strstr(err.msg, "row 1"));
        aff__logits_close(f);
    }
    free(p);
    free(q);
}

static void unfinished(void **state)
{
    aff_logits_out *o;
    aff_logits_head h = head_of(0);
    unlink(path);
    assert_int_equal(aff__logits_create(&o, path, &h, &err), AFF_OK);
    assert_int_equal(aff__logits_put(o, rows[0], 0, &err), AFF_OK);
    assert_int_equal(aff__logits_finish(o, &err), AFF_E_INVALID);
    assert_int_equal(access(path, F_OK), -1);
    h.top = 4;
    assert_int_equal(aff__logits_create(&o, path, &h, &err), AFF_E_INVALID);
    h.top = VOCAB + 1;
    assert_int_equal(aff__logits_create(&o, path, &h, &err), AFF_E_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_tokens), cmocka_unit_test(many_tokens), cmocka_unit_test(largest),
        cmocka_unit_test(statistics), cmocka_unit_test(summary),     cmocka_unit_test(saved_rows),
        cmocka_unit_test(lumped),     cmocka_unit_test(damaged),     cmocka_unit_test(unfinished),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
