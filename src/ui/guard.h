/* guard.h - the terminal is put back whatever ends the program. One at a time. */
#ifndef AFF_UI_GUARD_H
#define AFF_UI_GUARD_H
#include <stddef.h>
#include <termios.h>

/* Remembers the modes of the terminal `tty` and the bytes that undo what a screen did to it, and catches the signals that would end
 * the program while their disposition is the default. */
void aff__guard_open(int tty, const char *restore, size_t n);
/* While the guard is open, standard error is a pipe whose reading end is `pipe`: what stands in it when a signal ends the program goes to
 * `real`. -1, -1: not any more. */
void aff__guard_errors(int real, int pipe);
/* Puts the modes back and releases the signals. */
void aff__guard_close(void);
/* Puts screen and modes back at once, without closing anything: for what ends the program by _exit. Safe in a handler. */
void aff__guard_restore(void);
/* A handler: puts the terminal back if a guard is open, then lets the signal do what it does by default. */
void aff__guard_die(int sig);
/* In a thread: blocks every signal but the faults and `but`. */
void aff__guard_block(int but);
#endif
