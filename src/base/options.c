#define _GNU_SOURCE
#include "base/options.h"
#include "base/mem.h"
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ID_FIRST = 1000, ID_HELP = 500, ID_VERSION = 501, HELP_COLUMN = 28, WIDTH = 100 };

static int count_options(const aff_option *o)
{
    int n = 0;
    while (o[n].name || o[n].short_name) n++;
    return n;
}

static bool unlimited(const aff_option *o)
{
    return o->min == 0 && o->max == 0;
}

/* "--name" or "-x" as the user would write it. */
static const char *shown(const aff_option *o, char buf[80])
{
    if (o->name)
        snprintf(buf, 80, "--%s", o->name);
    else
        snprintf(buf, 80, "-%c", o->short_name);
    return buf;
}

static aff_status set_option(const aff_usage *u, const aff_option *o, const char *value, aff_error *err)
{
    char name[80], *end = NULL;
    errno = 0;
    switch (o->kind) {
    case AFF_OPT_FLAG:
        *(bool *)o->dest = true;
        return AFF_OK;
    case AFF_OPT_STR:
        *(const char **)o->dest = value;
        return AFF_OK;
    case AFF_OPT_INT: {
        long long v = strtoll(value, &end, 10);
        if (end == value || *end || errno)
            return aff__fail(err, AFF_E_INVALID, "%s: %s: expected an integer, got '%s'", u->program, shown(o, name),
                             value);
        if (!unlimited(o) && ((double)v < o->min || (double)v > o->max))
            return aff__fail(err, AFF_E_INVALID, "%s: %s: expected %.0f to %.0f, got %lld", u->program, shown(o, name),
                             o->min, o->max, v);
        *(int64_t *)o->dest = v;
        return AFF_OK;
    }
    case AFF_OPT_NUM: {
        double v = strtod(value, &end);
        if (end == value || *end || !isfinite(v))
            return aff__fail(err, AFF_E_INVALID, "%s: %s: expected a number, got '%s'", u->program, shown(o, name),
                             value);
        if (!unlimited(o) && (v < o->min || v > o->max))
            return aff__fail(err, AFF_E_INVALID, "%s: %s: expected %g to %g, got %s", u->program, shown(o, name),
                             o->min, o->max, value);
        *(double *)o->dest = v;
        return AFF_OK;
    }
    }
    return AFF_OK;
}

/* Fills getopt's two tables from ours. */
static void getopt_tables(const aff_option *table, int n, struct option *longs, char *shorts)
{
    int k = 0;
    char *s = shorts;
    *s++ = ':'; /* a missing argument is reported as ':' */
    *s++ = 'h';
    for (int i = 0; i < n; i++) {
        int has = table[i].kind == AFF_OPT_FLAG ? no_argument : required_argument;
        if (table[i].name) longs[k++] = (struct option){table[i].name, has, NULL, ID_FIRST + i};
        if (table[i].short_name) {
            *s++ = table[i].short_name;
            if (has == required_argument) *s++ = ':';
        }
    }
    *s = 0;
    longs[k++] = (struct option){"help", no_argument, NULL, ID_HELP};
    longs[k] = (struct option){"version", no_argument, NULL, ID_VERSION};
}

static const aff_option *by_id(const aff_option *table, int n, int id)
{
    if (id >= ID_FIRST && id < ID_FIRST + n) return &table[id - ID_FIRST];
    for (int i = 0; i < n; i++)
        if (table[i].short_name && table[i].short_name == id) return &table[i];
    return NULL;
}

static aff_status parse_loop(const aff_usage *u, int argc, char **argv, const struct option *longs, const char *shorts,
                             int *stop, aff_error *err)
{
    int n = count_options(u->options);
    char name[80];
    optind = 0; /* glibc: start afresh, so that a process may parse more than once */
    opterr = 0;
    for (;;) {
        int at = optind ? optind : 1;
        int id = getopt_long(argc, argv, shorts, longs, NULL);
        if (id < 0) return AFF_OK;
        if (id == 'h' || id == ID_HELP || id == ID_VERSION) {
            *stop = id == ID_VERSION ? 'v' : 'h';
            return AFF_OK;
        }
        const aff_option *o = by_id(u->options, n, id == ':' || id == '?' ? optopt : id);
        if (id == ':' && o)
            return aff__fail(err, AFF_E_INVALID, "%s: %s needs an argument %s", u->program, shown(o, name),
                             o->arg ? o->arg : "");
        if (id == '?' && o)
            return aff__fail(err, AFF_E_INVALID, "%s: %s takes no argument", u->program, shown(o, name));
        if (!o && optopt > 0 && optopt < ID_HELP)
            return aff__fail(err, AFF_E_INVALID, "%s: unknown option '-%c' (see --help)", u->program, optopt);
        if (!o) {
            const char *arg = optind > at && optind <= argc ? argv[optind - 1] : "?";
            return aff__fail(err, AFF_E_INVALID, "%s: unknown or ambiguous option '%s' (see --help)", u->program, arg);
        }
        AFF_TRY(set_option(u, o, optarg, err));
    }
}

aff_status aff__options_parse(const aff_usage *u, int argc, char **argv, int *first, int *stop, aff_error *err)
{
    int n = count_options(u->options);
    struct option *longs = NULL;
    char *shorts = NULL;
    *stop = 0;
    *first = argc;
    AFF_TRY(aff__calloc(&longs, (uint64_t)n + 3, sizeof *longs, u->program, err));
    aff_status s = aff__calloc(&shorts, (uint64_t)n * 2 + 3, 1, u->program, err);
    if (s == AFF_OK) {
        getopt_tables(u->options, n, longs, shorts);
        s = parse_loop(u, argc, argv, longs, shorts, stop, err);
    }
    free(longs);
    free(shorts);
    if (s != AFF_OK || *stop) return s;
    *first = optind;
    int got = argc - optind;
    if (got < u->min_operands)
        return aff__fail(err, AFF_E_INVALID, "%s: expected %s, got %d argument%s (see --help)", u->program, u->operands,
                         got, got == 1 ? "" : "s");
    if (got > u->max_operands)
        return aff__fail(err, AFF_E_INVALID, "%s: unexpected argument '%s' (see --help)", u->program,
                         argv[optind + u->max_operands]);
    return AFF_OK;
}

/* Prints `text` from column `at` on, wrapped at WIDTH, further lines indented to `indent`. */
static void wrapped(FILE *to, const char *text, int at, int indent)
{
    int col = at;
    for (const char *p = text; *p;) {
        int len = (int)strcspn(p, " ");
        bool first = p == text, fits = first || col + 1 + len <= WIDTH;
        if (!fits) fprintf(to, "\n%*s", indent, "");
        fprintf(to, "%s%.*s", first || !fits ? "" : " ", len, p);
        col = first ? col + len : fits ? col + 1 + len : indent + len;
        p += len;
        while (*p == ' ') p++;
    }
    fputc('\n', to);
}

static void print_option(FILE *to, const aff_option *o)
{
    char left[160], brief[8] = "    ";
    if (o->short_name) snprintf(brief, sizeof brief, "-%c%s", o->short_name, o->name ? ", " : "");
    int col = snprintf(left, sizeof left, "  %s%s%s%s%s", brief, o->name ? "--" : "", o->name ? o->name : "",
                       o->kind == AFF_OPT_FLAG ? "" : " ", o->kind == AFF_OPT_FLAG || !o->arg ? "" : o->arg);
    fputs(left, to);
    if (col >= HELP_COLUMN) {
        fputc('\n', to);
        col = 0;
    }
    fprintf(to, "%*s", HELP_COLUMN - col, "");
    wrapped(to, o->help ? o->help : "", HELP_COLUMN, HELP_COLUMN);
}

void aff__options_help(const aff_usage *u, FILE *to)
{
    static const aff_option common[] = {{"help", 'h', .help = "print this and exit"},
                                        {"version", 0, .help = "print the version and exit"}};
    fprintf(to, "Usage: %s [options]%s%s\n", u->program, *u->operands ? " " : "", u->operands);
    wrapped(to, u->summary, 0, 0);
    for (const aff_option *o = u->options; o->name || o->short_name; o++) {
        if (o->group)
            fprintf(to, "\n%s:\n", o->group);
        else if (o == u->options)
            fprintf(to, "\nOptions:\n");
        print_option(to, o);
    }
    fputc('\n', to);
    for (int i = 0; i < 2; i++) print_option(to, &common[i]);
}

int aff__options_main(const aff_usage *u, int argc, char **argv, int *first)
{
    aff_error err = {0};
    int stop;
    if (aff__options_parse(u, argc, argv, first, &stop, &err) != AFF_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 2;
    }
    if (stop == 'h') aff__options_help(u, stdout);
    if (stop == 'v') printf("%s %s\n", u->program, aff_version());
    return stop ? 0 : -1;
}
