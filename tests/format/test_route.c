/* Route traces: what is written is what is read, to the byte of the format; every kind of damage is an error with its
 * line. */
#include "format/route.h"
#include "support/test.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[] = "/tmp/aff-route-XXXXXX";
static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

typedef struct seen {
    char text[4096];
    size_t n;
    int64_t records;
} seen;

static void head(void *ctx, int layers, int experts, int picks)
{
    seen *s = ctx;
    s->n = (size_t)sprintf(s->text, "%d/%d/%d;", layers, experts, picks);
}
static bool record(void *ctx, const aff_route_record *r)
{
    seen *s = ctx;
    s->records++;
    if (s->n > sizeof s->text - 600) return true;
    s->n += (size_t)sprintf(s->text + s->n, "%c%d:%d:%lld", r->kind, r->layer, r->rows, (long long)r->seq);
    for (int i = 0; i < r->n; i++) s->n += (size_t)sprintf(s->text + s->n, " %d", r->id[i]);
    for (int i = 0; i < r->n_miss; i++) s->n += (size_t)sprintf(s->text + s->n, " !%d", r->miss[i]);
    s->n += (size_t)sprintf(s->text + s->n, ";");
    return r->kind != 'S';
}

static void test_round_trip(void **state)
{
    char path[64];
    aff_route_file *f;
    seen s = {0};
    static const int32_t all[] = {0, 1, 2, 3}, picks[] = {0, 1, 3, 2}, miss[] = {1, 3};
    static const int q[] = {0, 500, 1000, 3};
    snprintf(path, sizeof path, "%s/t", root);
    must(aff__route_create(&f, path, 2, 4, 2, &err));
    aff__route_resident(f, 0, all, 4);
    aff__route_resident(f, 1, all, 0);
    aff__route_scores(f, 0, q);
    aff__route_dispatch(f, false, 0, 2, picks, miss, 2);
    aff__route_dispatch(f, true, 1, 1, picks + 2, NULL, 0);
    assert_int_not_equal(access(path, F_OK), 0); /* it appears when it is whole */
    must(aff__route_close(f, true, &err));
    FILE *t = fopen(path, "r");
    char text[256] = {0};
    assert_true(fread(text, 1, sizeof text - 1, t) > 0);
    fclose(t);
    assert_string_equal(text, "# aff-route-trace 1 layers=2 experts=4 k=2\nR 0 0 1 2 3\nR 1\nG 0 0 500 1000 3\nD 0 0 2 "
                              "0 1 3 2 | 1 3\nS 1 1 1 3 2 |\n");
    must(aff__route_read(path, &(aff_route_reader){&s, head, record}, &err));
    assert_string_equal(s.text, "2/4/2;R0:0:0 0 1 2 3;R1:0:0;G0:0:0 0 500 1000 3;D0:2:0 0 1 3 2 !1 !3;S1:1:1 3 2;");
    /* More than the buffer holds. */
    must(aff__route_create(&f, path, 2, 4, 2, &err));
    for (int i = 0; i < 400000; i++) aff__route_dispatch(f, false, i & 1, 2, picks, miss, i % 3 == 0 ? 2 : 0);
    must(aff__route_close(f, true, &err));
    s.records = 0;
    must(aff__route_read(path, &(aff_route_reader){&s, head, record}, &err));
    assert_int_equal(s.records, 400000);
    must(aff__route_create(&f, path, 2, 4, 2, &err));
    must(aff__route_close(f, false, &err)); /* gives up: the old one stays */
    must(aff__route_read(path, &(aff_route_reader){&s, head, record}, &err));
    assert_int_equal(aff__route_create(&f, "/nonexistent-folder/t", 2, 4, 2, &err), AFF_E_IO);
    assert_int_equal(aff__route_read("/nonexistent", &(aff_route_reader){0}, &err), AFF_E_IO);
}

static void test_damage(void **state)
{
#define HEAD "# aff-route-trace 1 layers=2 experts=4 k=2\n"
    static const struct {
        const char *text, *line, *what;
    } bad[] = {
        {"", "empty", "expected a route trace"},
        {"# aff-route-trace 2 layers=2 experts=4 k=2\n", "line 1", "expected '# aff-route-trace 1"},
        {"# aff-route-trace 1 layers=2 experts=4 k=2 more\n", "line 1", "expected"},
        {"# aff-route-trace 1 layers=0 experts=4 k=2\n", "line 1", "out of range"},
        {"# aff-route-trace 1 layers=2 experts=4 k=5\n", "line 1", "out of range"},
        {HEAD "D 0 0 1 0 1 |", "line 2", "ends within a line"},
        {HEAD "\n", "line 2", "empty line"},
        {HEAD "X 0\n", "line 2", "expected a record"},
        {HEAD "D 1 0 1 0 1 |\n", "line 2", "without gaps"},
        {HEAD "D 0 0 1 0 1 |\nD 0 0 1 0 1 |\n", "line 3", "without gaps"},
        {HEAD "D 0 2 1 0 1 |\n", "line 2", "layer"},
        {HEAD "D 0 0 1 0 4 |\n", "line 2", "out of range"},
        {HEAD "D 0 0 1 0 1 2 |\n", "line 2", "k choices"},
        {HEAD "D 0 0 2 0 1 |\n", "line 2", "k choices"},
        {HEAD "D 0 0 1 1 1 |\n", "line 2", "twice"},
        {HEAD "D 0 0 1 0 1\n", "line 2", "expected '|'"},
        {HEAD "D 0 0 1 0 1 | 2\n", "line 2", "among the choices"},
        {HEAD "D 0 0 1 0 1 | 1 0\n", "line 2", "ascending"},
        {HEAD "D 0 0 1 0 1 | 0 | 1\n", "line 2", "nothing after"},
        {HEAD "D 0 0 1 0 x |\n", "line 2", "numbers and blanks"},
        {HEAD "D 0 0 1 0 -1 |\n", "line 2", "numbers and blanks"},
        {HEAD "D 0 0 99999999999999999999 |\n", "line 2", "numbers and blanks"},
        {HEAD "R 0 1 2 3 0 1\n", "line 2", "every expert"},
        {HEAD "R 2\n", "line 2", "layer"},
        {HEAD "G 0 0 0 0\n", "line 2", "every expert"},
        {HEAD "G 0 0 0 0 1001\n", "line 2", "out of range"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(aff__route_parse(bad[i].text, strlen(bad[i].text), "trace.txt", &(aff_route_reader){0}, &err),
                         AFF_E_FORMAT);
        if (!strstr(err.msg, bad[i].line) || !strstr(err.msg, bad[i].what) || !strstr(err.msg, "trace.txt"))
            fail_msg("%zu: %s", i, err.msg);
    }
}

static int setup(void **state)
{
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trip), cmocka_unit_test(test_damage)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
