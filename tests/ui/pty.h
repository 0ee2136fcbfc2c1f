/* pty.h - a program on a terminal of its own: keys go in, what it draws is read off a screen that libvterm keeps. Nothing waits for
 * time: every wait is for something to appear on the screen, and fails after a minute. */
#ifndef AFF_TEST_UI_PTY_H
#define AFF_TEST_UI_PTY_H
#include "base/buf.h"
#include "base/clock.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <vterm.h>

typedef struct pty {
    int master, slave;
    pid_t pid;
    int rows, columns, status; /* status: of waitpid once it has ended */
    bool ended, alternate, cursor;
    VTerm *vt;
    VTermScreen *screen;
    aff_buf raw; /* every byte that came */
    struct termios modes; /* before the program was started */
} pty;

static int on_prop(VTermProp prop, VTermValue *v, void *ctx)
{
    pty *p = ctx;
    if (prop == VTERM_PROP_ALTSCREEN) p->alternate = v->boolean;
    if (prop == VTERM_PROP_CURSORVISIBLE) p->cursor = v->boolean;
    return 1;
}

static const VTermScreenCallbacks callbacks = {.settermprop = on_prop};

/* argv[0] is the program's path; env: NULL-terminated "NAME=VALUE". */
static pty *pty_start(int rows, int columns, char *const *argv, char *const *env)
{
    pty *p = calloc(1, sizeof *p);
    const struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    p->rows = rows;
    p->columns = columns;
    p->cursor = true;
    p->master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(p->master >= 0 && grantpt(p->master) == 0 && unlockpt(p->master) == 0);
    const char *name = ptsname(p->master);
    p->slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC); /* stays open: its modes are looked at in the end */
    assert_true(p->slave >= 0 && ioctl(p->slave, TIOCSWINSZ, &size) == 0 && tcgetattr(p->slave, &p->modes) == 0);
    p->vt = vterm_new(rows, columns);
    vterm_set_utf8(p->vt, 1);
    p->screen = vterm_obtain_screen(p->vt);
    vterm_screen_enable_altscreen(p->screen, 1);
    vterm_screen_set_callbacks(p->screen, &callbacks, p);
    vterm_screen_reset(p->screen, 1);
    p->pid = fork();
    assert_true(p->pid >= 0);
    if (p->pid == 0) {
        setsid();
        const int fd = open(name, O_RDWR); /* the first terminal of a session is its controlling one */
        for (int i = 0; i < 3; i++) dup2(fd, i);
        if (fd > 2) close(fd);
        execve(argv[0], argv, env);
        _exit(127);
    }
    return p;
}

__attribute__((unused)) static void pty_resize(pty *p, int rows, int columns)
{
    const struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    p->rows = rows;
    p->columns = columns;
    vterm_set_size(p->vt, rows, columns);
    assert_int_equal(ioctl(p->master, TIOCSWINSZ, &size), 0); /* the kernel tells the program */
}

/* One row of the screen as UTF-8, with one blank at its end. */
static void pty_row(pty *p, int row, char *out, size_t cap)
{
    size_t n = 0, end = 0;
    for (int x = 0; x < p->columns; x++) {
        VTermScreenCell cell;
        vterm_screen_get_cell(p->screen, (VTermPos){.row = row, .col = x}, &cell);
        uint32_t c = cell.chars[0] ? cell.chars[0] : ' ';
        if (c == (uint32_t)-1) continue; /* the right half of a wide one */
        if (n + 6 > cap) break;
        if (c < 0x80) {
            out[n++] = (char)c;
        } else if (c < 0x800) {
            out[n++] = (char)(0xC0 | c >> 6);
            out[n++] = (char)(0x80 | (c & 63));
        } else {
            out[n++] = (char)(0xE0 | (c >> 12 & 15));
            out[n++] = (char)(0x80 | (c >> 6 & 63));
            out[n++] = (char)(0x80 | (c & 63));
        }
        if (c != ' ') end = n;
    }
    out[end] = ' ';
    out[end + 1] = 0;
}

/* The first row that has the text; -1: none. */
static int pty_find(pty *p, const char *text)
{
    char row[2048];
    for (int y = 0; y < p->rows; y++) {
        pty_row(p, y, row, sizeof row);
        if (strstr(row, text)) return y;
    }
    return -1;
}

static void pty_dump(pty *p)
{
    char row[2048];
    for (int y = 0; y < p->rows; y++) {
        pty_row(p, y, row, sizeof row);
        fprintf(stderr, "|%s\n", row);
    }
}

/* Reads what there is, waiting for it at most `ms`; false: nothing came. */
static bool pty_read(pty *p, int ms)
{
    struct pollfd set = {p->master, POLLIN, 0};
    char part[4096];
    if (poll(&set, 1, ms) <= 0 || !(set.revents & POLLIN)) return false;
    const ssize_t n = read(p->master, part, sizeof part);
    if (n <= 0) return false;
    vterm_input_write(p->vt, part, (size_t)n);
    aff__buf_put(&p->raw, part, (size_t)n, NULL);
    char reply[256]; /* of the terminal to a question of the program */
    const size_t k = vterm_output_read(p->vt, reply, sizeof reply);
    if (k && write(p->master, reply, k) < 0) return false;
    return true;
}

static const uint64_t a_minute = 60000000000u;

static void pty_until(pty *p, const char *text)
{
    const uint64_t end = aff__now_ns() + a_minute;
    while (pty_find(p, text) < 0) {
        if (pty_read(p, 50)) continue;
        if (aff__now_ns() < end && !(p->ended = p->ended || waitpid(p->pid, &p->status, WNOHANG) == p->pid)) continue;
        while (pty_read(p, 0)) {
        }
        if (pty_find(p, text) >= 0) return;
        pty_dump(p);
        if (!p->ended) kill(p->pid, SIGKILL);
        fail_msg("'%s' did not appear", text);
    }
}

/* Until that row has the text. */
__attribute__((unused)) static void pty_until_at(pty *p, const char *text, int row)
{
    char got[2048];
    const uint64_t end = aff__now_ns() + a_minute;
    for (;;) {
        pty_row(p, row, got, sizeof got);
        if (strstr(got, text)) return;
        if (!pty_read(p, 50) && aff__now_ns() > end) {
            pty_dump(p);
            kill(p->pid, SIGKILL);
            fail_msg("'%s' did not appear in row %d", text, row);
        }
    }
}

/* Until the text is gone. */
__attribute__((unused)) static void pty_until_not(pty *p, const char *text)
{
    const uint64_t end = aff__now_ns() + a_minute;
    while (pty_find(p, text) >= 0)
        if (!pty_read(p, 50) && aff__now_ns() > end) {
            pty_dump(p);
            kill(p->pid, SIGKILL);
            fail_msg("'%s' did not go away", text);
        }
}

static void pty_send(pty *p, const char *keys)
{
    assert_int_equal(write(p->master, keys, strlen(keys)), strlen(keys));
}

/* Waits for the program's end; what it leaves is checked: its modes, its screen, its cursor. */
static void pty_end(pty *p)
{
    const uint64_t end = aff__now_ns() + a_minute;
    while (!p->ended) {
        pty_read(p, 20);
        p->ended = waitpid(p->pid, &p->status, WNOHANG) == p->pid;
        if (!p->ended && aff__now_ns() > end) {
            pty_dump(p);
            kill(p->pid, SIGKILL);
            fail_msg("the program did not end");
        }
    }
    while (pty_read(p, 0)) {
    }
    struct termios now;
    assert_int_equal(tcgetattr(p->slave, &now), 0);
    assert_int_equal(now.c_lflag, p->modes.c_lflag);
    assert_int_equal(now.c_iflag, p->modes.c_iflag);
    assert_int_equal(now.c_oflag, p->modes.c_oflag);
    assert_memory_equal(now.c_cc, p->modes.c_cc, sizeof now.c_cc);
    assert_false(p->alternate);
    assert_true(p->cursor);
}

static void pty_free(pty *p)
{
    close(p->master);
    close(p->slave);
    vterm_free(p->vt);
    aff__buf_free(&p->raw);
    free(p);
}

__attribute__((unused)) static bool pty_wrote(const pty *p, const char *bytes)
{
    return p->raw.n && strstr(p->raw.s, bytes) != NULL;
}
#endif
