#include "ui/guard.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static const int deadly[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL};
enum { DEADLY = sizeof deadly / sizeof deadly[0], FIRST_FAULT = 4 };
static struct sigaction before[DEADLY];

static struct {
    volatile sig_atomic_t open;
    int tty, err, log;
    struct termios modes;
    char restore[128];
    size_t n_restore;
} guard = {.err = -1, .log = -1};

/* What cannot be written is lost: there is nobody to tell. */
static void write_all(int fd, const char *s, size_t n)
{
    while (n) {
        const ssize_t k = write(fd, s, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return;
        s += k;
        n -= (size_t)k;
    }
}

void aff__guard_restore(void)
{
    if (guard.open) {
        guard.open = 0;
        write_all(guard.tty, guard.restore, guard.n_restore);
        tcsetattr(guard.tty, TCSANOW, &guard.modes);
        if (guard.err >= 0) {
            char part[512];
            ssize_t n;
            fcntl(guard.log, F_SETFL, O_NONBLOCK);
            while ((n = read(guard.log, part, sizeof part)) > 0) write_all(guard.err, part, (size_t)n);
        }
    }
}

void aff__guard_die(int sig)
{
    aff__guard_restore();
    signal(sig, SIG_DFL);
    raise(sig);
}

void aff__guard_open(int tty, const char *restore, size_t n)
{
    struct sigaction die = {.sa_handler = aff__guard_die};
    guard.tty = tty;
    guard.n_restore = n < sizeof guard.restore ? n : sizeof guard.restore;
    memcpy(guard.restore, restore, guard.n_restore);
    guard.open = tcgetattr(tty, &guard.modes) == 0;
    for (int i = 0; i < DEADLY; i++) {
        sigaction(deadly[i], NULL, &before[i]);
        if (before[i].sa_handler == SIG_DFL) sigaction(deadly[i], &die, NULL);
    }
}

void aff__guard_errors(int real, int pipe)
{
    guard.err = real;
    guard.log = pipe;
}

void aff__guard_close(void)
{
    if (guard.open) tcsetattr(guard.tty, TCSADRAIN, &guard.modes);
    guard.open = 0;
    for (int i = 0; i < DEADLY; i++) {
        struct sigaction now;
        sigaction(deadly[i], NULL, &now);
        if (now.sa_handler == aff__guard_die) sigaction(deadly[i], &before[i], NULL);
    }
}

void aff__guard_block(int but)
{
    sigset_t all;
    sigfillset(&all);
    for (int i = FIRST_FAULT; i < DEADLY; i++) sigdelset(&all, deadly[i]);
    if (but) sigdelset(&all, but);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
}
