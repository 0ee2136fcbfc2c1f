/* options.h - command lines of the programs: one table drives the parsing and prints --help. */
#ifndef AFF_BASE_OPTIONS_H
#define AFF_BASE_OPTIONS_H
#include "base/status.h"
#include <stdio.h>

typedef enum aff_option_kind {
    AFF_OPT_FLAG, /* no argument; sets *(bool *)dest */
    AFF_OPT_STR,  /* *(const char **)dest, pointing into argv */
    AFF_OPT_INT,  /* *(int64_t *)dest, decimal, within [min, max]; min == max == 0 means any */
    AFF_OPT_NUM   /* *(double *)dest, finite, within [min, max]; the same */
} aff_option_kind;

/* Repeated options: the last one wins. dest keeps its value (the default) when the option is absent. */
typedef struct aff_option {
    const char *name; /* long name without dashes; NULL if there is only a short one */
    char short_name;  /* 0 if none */
    aff_option_kind kind;
    void *dest;
    const char *arg;   /* name of the argument in the help; NULL for a flag */
    const char *help;  /* one sentence, with its default; wrapped when printed */
    const char *group; /* heading it stands under; NULL: that of the entry before */
    double min, max;
} aff_option;

/* One program. -h/--help and --version are added to the table by the functions below. */
typedef struct aff_usage {
    const char *program, *operands; /* operands: "FILE", "" if it takes none */
    const char *summary;            /* what it does, one sentence or paragraph */
    const aff_option *options;      /* ends with an entry without name and short_name */
    int min_operands, max_operands;
} aff_usage;

/* Parses argv (which getopt_long reorders): options into their dests, operands are argv[*first] ... argv[argc - 1]. An
 * unknown option, a missing or bad argument or a wrong number of operands is AFF_E_INVALID with a line that names it.
 * *stop: 'h' or 'v' when help or version was asked for (then nothing else is checked), else 0. */
aff_status aff__options_parse(const aff_usage *u, int argc, char **argv, int *first, int *stop, aff_error *err);
/* Usage line, summary and every option by group. */
void aff__options_help(const aff_usage *u, FILE *to);
/* What a main() calls: parses, prints help, version or the error where they belong. Returns -1 to go on, else the exit
 * code: 0 after help or version, 2 after an error. */
int aff__options_main(const aff_usage *u, int argc, char **argv, int *first);
#endif
