/* progress.h - how far a long job is: one line rewritten in place on a terminal, a plain line every few seconds
 * elsewhere. */
#ifndef AFF_UI_PROGRESS_H
#define AFF_UI_PROGRESS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct aff_progress {
    FILE *to;
    const char *what;
    const char *unit;        /* NULL: done and total are bytes */
    bool terminal;
    bool dirty;              /* a line without its newline stands on the terminal */
    uint64_t started, shown; /* ns, 0 before the first update */
} aff_progress;

void aff__progress_start(aff_progress *p, FILE *to, const char *what);
/* done of total; the first call starts the clock. Prints at most ten times a second on a terminal, every five
 * seconds elsewhere. */
void aff__progress_update(aff_progress *p, uint64_t done, uint64_t total);
/* Clears the terminal's line, so that something else can be printed. */
void aff__progress_clear(aff_progress *p);

/* "what: 45.2 %, 1.23 of 2.71 GiB, 85.1 MiB/s, 0:12:34 left"; the rate and the rest are left out until a second has
 * passed. */
void aff__progress_format(char *buf, size_t cap, const char *what, uint64_t done, uint64_t total, uint64_t elapsed_ns);
#endif
