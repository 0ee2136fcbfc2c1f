#define _GNU_SOURCE
#include "support/test.h"
#include "base/options.h"
#include <stdlib.h>
#include <string.h>

static struct {
    bool verbose;
    const char *model;
    int64_t n;
    double temp;
} v;

static const aff_option table[] = {{"model", 'm', AFF_OPT_STR, &v.model, "FILE", "what to open", "Input"},
                                   {"n-predict", 'n', AFF_OPT_INT, &v.n, "N", "how many [7]", "Generation", -1, 1000},
                                   {"temp", 0, AFF_OPT_NUM, &v.temp, "T", "temperature", NULL, 0, 2},
                                   {NULL, 'v', AFF_OPT_FLAG, &v.verbose, NULL,
                                    "say more, in a help text so long that it has to be wrapped because no terminal of "
                                    "one hundred columns could ever show it"},
                                   {0}};
static const aff_usage usage = {"prog", "FILE...", "Does things.", table, 0, 2};

static aff_status parse(const char *line, int *first, int *stop, int *argc_out, aff_error *err)
{
    static char buf[256];
    static char *argv[32];
    int argc = 0;
    snprintf(buf, sizeof buf, "prog %s", line);
    for (char *t = strtok(buf, " "); t; t = strtok(NULL, " ")) argv[argc++] = t;
    argv[argc] = NULL;
    v.verbose = false;
    v.model = NULL;
    v.n = 7;
    v.temp = 1;
    *argc_out = argc;
    return aff__options_parse(&usage, argc, argv, first, stop, err);
}

static void values(void **state)
{
    aff_error e = {0};
    int first, stop, argc;
    assert_int_equal(parse("-m a.aff x -n -1 --temp=0.5 -v y", &first, &stop, &argc, &e), AFF_OK);
    assert_string_equal(v.model, "a.aff");
    assert_int_equal(v.n, -1);
    assert_true(v.temp == 0.5 && v.verbose && stop == 0);
    assert_int_equal(argc - first, 2);
    assert_int_equal(parse("--model b -m c", &first, &stop, &argc, &e), AFF_OK);
    assert_string_equal(v.model, "c");
    assert_int_equal(v.n, 7);
    assert_int_equal(parse("--bogus-is-not-reached --help", &first, &stop, &argc, &e), AFF_E_INVALID);
    assert_int_equal(parse("-h --bogus", &first, &stop, &argc, &e), AFF_OK);
    assert_int_equal(stop, 'h');
    assert_int_equal(parse("--version", &first, &stop, &argc, &e), AFF_OK);
    assert_int_equal(stop, 'v');
}

static void refused(void **state)
{
    static const struct {
        const char *line, *message;
    } cases[] = {
        {"--bogus", "prog: unknown or ambiguous option '--bogus' (see --help)"},
        {"-x", "prog: unknown option '-x' (see --help)"},
        {"--model", "prog: --model needs an argument FILE"},
        {"-n", "prog: --n-predict needs an argument N"},
        {"-n 7x", "prog: --n-predict: expected an integer, got '7x'"},
        {"-n 99999999999999999999", "prog: --n-predict: expected an integer, got '99999999999999999999'"},
        {"-n 1001", "prog: --n-predict: expected -1 to 1000, got 1001"},
        {"--temp nan", "prog: --temp: expected a number, got 'nan'"},
        {"--temp 2.5", "prog: --temp: expected 0 to 2, got 2.5"},
        {"a b c", "prog: unexpected argument 'c' (see --help)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        aff_error e = {0};
        int first, stop, argc;
        assert_int_equal(parse(cases[i].line, &first, &stop, &argc, &e), AFF_E_INVALID);
        assert_string_equal(e.msg, cases[i].message);
    }
}

static void help(void **state)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    aff__options_help(&usage, f);
    fclose(f);
    assert_string_equal(
        text, "Usage: prog [options] FILE...\n"
              "Does things.\n"
              "\n"
              "Input:\n"
              "  -m, --model FILE          what to open\n"
              "\n"
              "Generation:\n"
              "  -n, --n-predict N         how many [7]\n"
              "      --temp T              temperature\n"
              "  -v                        say more, in a help text so long that it has to be wrapped because no\n"
              "                            terminal of one hundred columns could ever show it\n"
              "\n"
              "  -h, --help                print this and exit\n"
              "      --version             print the version and exit\n");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(values), cmocka_unit_test(refused), cmocka_unit_test(help)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
