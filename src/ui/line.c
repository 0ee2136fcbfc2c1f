#include "ui/line.h"
#include "base/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

struct aff_line {
    EditLine *el;
    History *h;
    char *path;
    const char *prompt;
};

static volatile sig_atomic_t interrupted, resized, continued;

static void on_signal(int sig)
{
    if (sig == SIGINT) interrupted = 1;
    if (sig == SIGWINCH) resized = 1;
    if (sig == SIGCONT) continued = 1;
}

static void mask(int how)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGWINCH);
    sigaddset(&set, SIGCONT);
    pthread_sigmask(how, &set, NULL);
}

void aff__line_signals(void)
{
    struct sigaction act = {.sa_handler = on_signal};
    mask(SIG_BLOCK);
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGWINCH, &act, NULL);
    sigaction(SIGCONT, &act, NULL);
}

/* Signals that are pending arrive before this returns. */
static void let_in(void)
{
    mask(SIG_UNBLOCK);
    mask(SIG_BLOCK);
}

bool aff__line_interrupted(void)
{
    let_in();
    const bool yes = interrupted;
    interrupted = 0;
    return yes;
}

/* Waits for a byte with the signals let in. 1, 0 at the end, -1 when the line is given up or the terminal is gone. */
static int wait_byte(EditLine *el, char *byte)
{
    sigset_t open;
    pthread_sigmask(SIG_BLOCK, NULL, &open);
    sigdelset(&open, SIGINT);
    sigdelset(&open, SIGWINCH);
    sigdelset(&open, SIGCONT);
    for (;;) {
        fd_set set;
        let_in(); /* pselect does not where there is something to read */
        if (interrupted) return -1;
        FD_ZERO(&set);
        FD_SET(STDIN_FILENO, &set);
        const int ready = pselect(STDIN_FILENO + 1, &set, NULL, NULL, NULL, &open);
        if (interrupted) return -1;
        if (resized) {
            resized = 0;
            el_resize(el);
        }
        if (continued) { /* the shell had the terminal meanwhile */
            continued = 0;
            el_set(el, EL_PREP_TERM, 1);
            el_set(el, EL_REFRESH);
        }
        if (ready < 0 && errno != EINTR) return -1;
        if (ready <= 0) continue;
        const ssize_t n = read(STDIN_FILENO, byte, 1);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        return n < 0 ? -1 : (int)n;
    }
}

static int read_char(EditLine *el, wchar_t *out)
{
    mbstate_t state = {0};
    for (;;) {
        char byte;
        const int n = wait_byte(el, &byte);
        if (n != 1) return n;
        const size_t k = mbrtowc(out, &byte, 1, &state);
        if (k == (size_t)-2) continue; /* the character goes on */
        if (k != (size_t)-1) return 1;
        memset(&state, 0, sizeof state); /* no UTF-8: as if it had not been typed */
    }
}

static char *prompt_of(EditLine *el)
{
    aff_line *l = NULL;
    static char empty[1];
    el_get(el, EL_CLIENTDATA, (void *)&l);
    return l ? (char *)(uintptr_t)l->prompt : empty;
}

static aff_status open_history(aff_line *l, const char *path, aff_error *err)
{
    HistEvent ev;
    l->h = history_init();
    if (!l->h) return aff__fail(err, AFF_E_NOMEM, "history: out of memory");
    history(l->h, &ev, H_SETSIZE, 1000);
    history(l->h, &ev, H_SETUNIQUE, 1);
    el_set(l->el, EL_HIST, history, l->h);
    if (!path) return AFF_OK;
    const int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return AFF_OK; /* a history is a convenience */
    fchmod(fd, 0600);
    close(fd);
    AFF_TRY(aff__strndup(&l->path, path, strlen(path), err));
    history(l->h, &ev, H_LOAD, path);
    return AFF_OK;
}

aff_status aff__line_open(aff_line **out, const char *history_path, aff_error *err)
{
    aff_line *l = NULL;
    *out = NULL;
    AFF_TRY(aff__calloc(&l, 1, sizeof *l, "line editor", err));
    l->prompt = "";
    l->el = el_init("affinity", stdin, stdout, stderr);
    aff_status s = l->el ? AFF_OK : aff__fail(err, AFF_E_UNSUPPORTED, "line editor: the terminal could not be opened");
    if (s == AFF_OK) {
        el_set(l->el, EL_CLIENTDATA, l);
        el_set(l->el, EL_PROMPT, prompt_of);
        el_set(l->el, EL_EDITOR, "emacs");
        el_set(l->el, EL_SIGNAL, 0);
        el_set(l->el, EL_GETCFN, read_char);
        s = open_history(l, history_path, err);
    }
    if (s == AFF_OK) {
        el_set(l->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
        el_set(l->el, EL_BIND, "^W", "ed-delete-prev-word", NULL);
        el_source(l->el, NULL); /* ~/.editrc */
        *out = l;
    } else {
        aff__line_close(l);
    }
    return s;
}

void aff__line_close(aff_line *l)
{
    if (!l) return;
    if (l->el) el_end(l->el);
    if (l->h) history_end(l->h);
    free(l->path);
    free(l);
}

aff_line_end aff__line_read(aff_line *l, const char *prompt, aff_buf *text)
{
    int n = 0;
    text->n = 0;
    l->prompt = prompt;
    (void)aff__line_interrupted(); /* there was nothing to give up */
    el_set(l->el, EL_PREP_TERM, 1); /* before the prompt, after which a person may type */
    const char *s = el_gets(l->el, &n);
    if (!s) {
        const bool given_up = interrupted;
        interrupted = 0;
        fputs(given_up ? "^C\n" : "\n", stdout);
        fflush(stdout);
        return given_up ? AFF_LINE_INTERRUPTED : AFF_LINE_EOF;
    }
    while (n > 0 && (s[n - 1] == '\n' || s[n - 1] == '\r')) n--;
    return aff__buf_put(text, s, (size_t)n, NULL) == AFF_OK ? AFF_LINE_OK : AFF_LINE_EOF;
}

void aff__line_remember(aff_line *l, const char *text)
{
    HistEvent ev;
    if (!*text) return;
    history(l->h, &ev, H_ENTER, text);
    if (l->path) history(l->h, &ev, H_SAVE, l->path);
}

bool aff__history_path(char *out, size_t cap)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (state && *state == '/')
        n = snprintf(out, cap, "%s/affinity/history", state);
    else if (home && *home == '/')
        n = snprintf(out, cap, "%s/.local/state/affinity/history", home);
    if (n < 0 || (size_t)n >= cap) return false;
    for (char *p = out + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        const int made = mkdir(out, 0700);
        const bool ok = made == 0 || errno == EEXIST;
        *p = '/';
        if (!ok) return false;
    }
    return true;
}
