#define _GNU_SOURCE /* ppoll's relatives, pipe2 */
#define NCURSES_WIDECHAR 1
#include "base/clock.h"
#include "base/mem.h"
#include "ui/dash_internal.h"
#include "ui/guard.h"
#include "ui/locale.h"
#include <errno.h>
#include <fcntl.h>
#include <ncurses.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <term.h>
#include <unistd.h>

enum { FRAME_MS = 100, SAMPLE_MS = 250, TIERS_MS = 2000, LINE_BYTES = 4096 };

struct aff_dash {
    pthread_t thread;
    pthread_mutex_t lock; /* of all below but what the thread alone uses */
    aff_dash_view view;
    aff_engine *engine;
    const aff_net *net;
    bool open_line; /* the newest line has no newline yet, and is an answer's */
    /* The thread's. */
    SCREEN *screen;
    FILE *in, *out;
    uint64_t sampled, tiers_at;
    uint64_t cpu_ns; /* of the last sample */
    aff_buf err_line; /* begun on standard error */
    int wake[2];
};

/* While the dashboard is open: the real standard error, and the pipe in its place; -1: it was not taken. */
static int real_err = -1, log_pipe = -1;
static struct sigaction before_stop;

/* ---- whether ---- */

bool aff__ui_find(const char *name, aff_ui *ui)
{
    static const char *const names[] = {"auto", "dash", "plain"};
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) {
            *ui = (aff_ui)i;
            return true;
        }
    return false;
}

aff_status aff__ui_decide(aff_ui ui, bool *dash, aff_error *err)
{
    const char *term = getenv("TERM"), *missing = NULL;
    int e;
    *dash = false;
    if (ui == AFF_UI_PLAIN) return AFF_OK;
    if (isatty(STDIN_FILENO) != 1 || isatty(STDOUT_FILENO) != 1)
        missing = "a terminal as standard input and output, got none";
    else if (!term || !*term)
        missing = "the terminal's type in TERM, got nothing";
    else if (setupterm(term, STDOUT_FILENO, &e) != OK)
        missing = "a TERM that terminfo knows, got another one";
    else {
        const char *cup = tigetstr((char *)(uintptr_t)"cup");
        if (!cup || (uintptr_t)cup == UINTPTR_MAX) missing = "a terminal that can address its cells, got one that cannot";
        del_curterm(cur_term);
    }
    if (missing && ui == AFF_UI_DASH) return aff__fail(err, AFF_E_INVALID, "--ui dash: expected %s: use --ui plain", missing);
    *dash = !missing;
    return AFF_OK;
}

/* The strings that undo what a screen does, without the padding that no terminal of today needs. */
static size_t way_back(char *out, size_t cap)
{
    static const char *const names[] = {"sgr0", "cnorm", "rmkx", "rmcup"};
    size_t n = 0;
    for (int i = 0; i < 4; i++) {
        const char *s = tigetstr((char *)(uintptr_t)names[i]);
        if (!s || (uintptr_t)s == UINTPTR_MAX) continue;
        while (*s && n < cap) {
            if (s[0] == '$' && s[1] == '<' && strchr(s, '>'))
                s = strchr(s, '>') + 1;
            else
                out[n++] = *s++;
        }
    }
    return n;
}

/* ---- lines ---- */

static aff_dash_line *add_line(aff_dash_view *v, bool log)
{
    aff_dash_line *l = &v->line[v->n_lines++ % AFF_DASH_LINES];
    l->text.n = 0;
    l->log = log;
    return l;
}

/* A line that has no memory is shown shorter. */
static void add_log(aff_dash *d, const char *s, size_t n)
{
    aff_dash_line *l = add_line(&d->view, true);
    (void)aff__buf_put(&l->text, s, n, NULL);
    d->open_line = false;
}

void aff__dash_text(aff_dash *d, const char *s, size_t n)
{
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    aff_dash_view *v = &d->view;
    while (n) {
        const char *nl = memchr(s, '\n', n);
        const size_t k = nl ? (size_t)(nl - s) : n;
        aff_dash_line *l = d->open_line ? &v->line[(v->n_lines - 1) % AFF_DASH_LINES] : add_line(v, false);
        d->open_line = !nl;
        if (l->text.n + k < LINE_BYTES * 16) (void)aff__buf_put(&l->text, s, k, NULL);
        s += k + (nl != NULL);
        n -= k + (nl != NULL);
    }
    pthread_mutex_unlock(&d->lock);
}

/* What standard error got, cut into lines. */
static void read_errors(aff_dash *d)
{
    char part[4096];
    ssize_t n;
    while ((n = read(log_pipe, part, sizeof part)) > 0) {
        const char *s = part;
        pthread_mutex_lock(&d->lock);
        for (size_t left = (size_t)n; left;) {
            const char *nl = memchr(s, '\n', left);
            const size_t k = nl ? (size_t)(nl - s) : left;
            (void)aff__buf_put(&d->err_line, s, k, NULL);
            if (nl || d->err_line.n > LINE_BYTES) {
                add_log(d, d->err_line.n ? d->err_line.s : "", d->err_line.n);
                d->err_line.n = 0;
            }
            s += k + (nl != NULL);
            left -= k + (nl != NULL);
        }
        pthread_mutex_unlock(&d->lock);
    }
}

/* ---- what is drawn ---- */

void aff__dash_stage(aff_dash *d, const char *stage, bool ready)
{
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    snprintf(d->view.stage, sizeof d->view.stage, "%s", stage);
    d->view.ready = ready;
    pthread_mutex_unlock(&d->lock);
}

void aff__dash_watch(aff_dash *d, aff_engine *e, const aff_net *net)
{
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    aff_dash_view *v = &d->view;
    d->engine = NULL;
    d->net = net;
    v->watching = false;
    free(v->heat);
    free(v->tier);
    v->heat = NULL;
    v->tier = NULL;
    if (e) {
        aff__engine_snapshot(e, &v->s, NULL);
        v->before = v->s;
        const uint64_t n = (uint64_t)v->s.layers * (uint64_t)v->s.experts;
        if (aff__calloc(&v->heat, n, sizeof *v->heat, "plane", NULL) == AFF_OK && aff__calloc(&v->tier, n, 1, "plane", NULL) == AFF_OK) {
            d->engine = e;
            v->draft = aff__net_draft(net);
            aff__engine_tiers(e, v->tier);
            d->tiers_at = aff__now_ns();
            v->watching = true;
        }
    }
    pthread_mutex_unlock(&d->lock);
}

static void push(aff_dash_view *v, float decode, float prompt)
{
    if (v->n == AFF_DASH_SAMPLES) {
        memmove(v->decode, v->decode + 1, (AFF_DASH_SAMPLES - 1) * sizeof v->decode[0]);
        memmove(v->prompt, v->prompt + 1, (AFF_DASH_SAMPLES - 1) * sizeof v->prompt[0]);
        v->n--;
    }
    v->decode[v->n] = decode;
    v->prompt[v->n++] = prompt;
}

static double per_second(int64_t tokens, uint64_t ns)
{
    return tokens > 0 && ns ? (double)tokens * 1e9 / (double)ns : 0;
}

/* Under the lock. Rates are of the time in passes, so a pause between requests is a gap, not a slow one. */
static void sample(aff_dash *d)
{
    aff_dash_view *v = &d->view;
    const uint64_t now = v->now, cpu = d->cpu_ns;
    aff__host_read(&v->host);
    if (d->sampled) v->cpus_busy = (double)(v->host.cpu_ns - cpu) / (double)(now - d->sampled);
    d->cpu_ns = v->host.cpu_ns;
    d->sampled = now;
    if (!v->watching) return;
    const aff_pass_counts *a = &v->before.passes, *b = &v->s.passes;
    const double decode = per_second(b->tokens - a->tokens, b->decode_ns - a->decode_ns);
    const double prompt = per_second(b->prompt_rows - a->prompt_rows, b->prompt_ns - a->prompt_ns);
    push(v, (float)decode, (float)prompt);
    if (decode > 0) v->decode_now = v->decode_now > 0 ? 0.7 * v->decode_now + 0.3 * decode : decode;
    if (prompt > 0) v->prompt_now = prompt;
    v->before = v->s;
    if (now - d->tiers_at < TIERS_MS * 1000000ull) return;
    d->tiers_at = now;
    aff__engine_tiers(d->engine, v->tier);
}

static void frame(aff_dash *d)
{
    aff_dash_view *v = &d->view;
    pthread_mutex_lock(&d->lock);
    v->now = aff__now_ns();
    if (d->engine) aff__engine_snapshot(d->engine, &v->s, v->heat);
    if (!d->sampled || v->now - d->sampled >= SAMPLE_MS * 1000000ull) sample(d);
    aff__dash_draw(v);
    pthread_mutex_unlock(&d->lock);
}

/* ---- the thread ---- */

static void keys(aff_dash *d)
{
    for (int k; (k = getch()) != ERR;) {
        if (k == 'q' || k == 'Q') kill(getpid(), SIGTERM); /* the way a person asks from outside */
        pthread_mutex_lock(&d->lock);
        if (k >= '1' && k < '1' + AFF_DASH_TABS) d->view.pane = (aff_dash_tab)(k - '1');
        if (k == '\t') d->view.pane = (aff_dash_tab)((d->view.pane + 1) % AFF_DASH_TABS);
        pthread_mutex_unlock(&d->lock);
    }
}

static void *run(void *ctx)
{
    aff_dash *d = ctx;
    aff__guard_block(SIGWINCH);
    bool stop = false;
    for (uint64_t next = 0; !stop;) {
        struct pollfd set[] = {{d->wake[0], POLLIN, 0}, {STDOUT_FILENO, POLLIN, 0}, {log_pipe, POLLIN, 0}};
        const uint64_t now = aff__now_ns();
        poll(set, log_pipe >= 0 ? 3 : 2, now < next ? (int)((next - now) / 1000000 + 1) : 0);
        stop = set[0].revents != 0;
        if (log_pipe >= 0) read_errors(d);
        keys(d);
        if (aff__now_ns() < next && !stop) continue;
        frame(d);
        next = aff__now_ns() + FRAME_MS * 1000000ull;
    }
    return NULL;
}

/* ---- opening and closing ---- */

/* From now on whatever ends the program puts the terminal back. Before the screen is opened, so that curses leaves the signals alone. */
static void enter(void)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    char restore[128];
    int e;
    size_t n = 0;
    if (setupterm(NULL, STDOUT_FILENO, &e) == OK) {
        n = way_back(restore, sizeof restore);
        del_curterm(cur_term);
    }
    aff__guard_open(STDOUT_FILENO, restore, n);
    sigaction(SIGTSTP, &ignore, &before_stop); /* a stopped program would leave the shell with a drawn screen */
}

static void leave(void)
{
    aff__guard_close();
    sigaction(SIGTSTP, &before_stop, NULL);
}

/* From now on standard error is a pipe that the thread reads. */
static aff_status take_errors(aff_error *err)
{
    int p[2];
    if (isatty(STDERR_FILENO) != 1) return AFF_OK;
    fflush(stderr);
    if (pipe2(p, O_CLOEXEC) != 0) return aff__fail_errno(err, "dashboard: pipe");
    real_err = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
    if (real_err < 0 || fcntl(p[0], F_SETFL, O_NONBLOCK) != 0 || dup2(p[1], STDERR_FILENO) < 0) {
        const aff_status s = aff__fail_errno(err, "dashboard: standard error");
        close(p[0]);
        close(p[1]);
        if (real_err >= 0) close(real_err);
        real_err = -1;
        return s;
    }
    close(p[1]);
    log_pipe = p[0];
    aff__guard_errors(real_err, log_pipe);
    return AFF_OK;
}

static void give_errors_back(void)
{
    if (real_err < 0) return;
    fflush(stderr);
    aff__guard_errors(-1, -1);
    dup2(real_err, STDERR_FILENO);
    close(real_err);
    close(log_pipe);
    real_err = log_pipe = -1;
}

static aff_status open_screen(aff_dash *d, aff_error *err)
{
    const int in = dup(STDIN_FILENO), out = dup(STDOUT_FILENO);
    d->in = in >= 0 ? fdopen(in, "r") : NULL;
    d->out = out >= 0 ? fdopen(out, "w") : NULL;
    if (!d->in || !d->out) return aff__fail_errno(err, "dashboard: terminal");
    d->screen = newterm(NULL, d->out, d->in);
    if (!d->screen) return aff__fail(err, AFF_E_UNSUPPORTED, "dashboard: the terminal '%s' could not be opened", getenv("TERM"));
    cbreak();
    noecho();
    nonl();
    keypad(stdscr, TRUE);
    nodelay(stdscr, TRUE);
    curs_set(0);
    aff__dash_colours();
    return AFF_OK;
}

static void close_screen(aff_dash *d)
{
    if (d->screen) {
        endwin();
        delscreen(d->screen);
    }
    if (d->in) fclose(d->in);
    if (d->out) fclose(d->out);
}

static void free_dash(aff_dash *d)
{
    for (int i = 0; i < AFF_DASH_LINES; i++) aff__buf_free(&d->view.line[i].text);
    aff__buf_free(&d->err_line);
    free(d->view.heat);
    free(d->view.tier);
    for (int i = 0; i < 2; i++)
        if (d->wake[i] >= 0) close(d->wake[i]);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

aff_status aff__dash_open(aff_dash **out, const char *name, aff_error *err)
{
    aff_dash *d = NULL;
    *out = NULL;
    aff__use_utf8();
    AFF_TRY(aff__calloc(&d, 1, sizeof *d, "dashboard", err));
    pthread_mutex_init(&d->lock, NULL);
    d->wake[0] = d->wake[1] = -1;
    d->view.started = aff__now_ns();
    snprintf(d->view.name, sizeof d->view.name, "%s", name);
    snprintf(d->view.stage, sizeof d->view.stage, "starting");
    fflush(stdout);
    enter();
    aff_status s = pipe2(d->wake, O_CLOEXEC) == 0 ? AFF_OK : aff__fail_errno(err, "dashboard: pipe");
    if (s == AFF_OK) s = take_errors(err);
    if (s == AFF_OK) s = open_screen(d, err);
    if (s == AFF_OK && pthread_create(&d->thread, NULL, run, d) != 0) s = aff__fail(err, AFF_E_NOMEM, "dashboard: cannot start a thread");
    if (s != AFF_OK) {
        close_screen(d);
        give_errors_back();
        leave();
        free_dash(d);
        return s;
    }
    *out = d;
    return AFF_OK;
}

void aff__dash_close(aff_dash *d)
{
    if (!d) return;
    fflush(stderr);
    while (write(d->wake[1], "x", 1) < 0 && errno == EINTR) {
    }
    pthread_join(d->thread, NULL);
    close_screen(d);
    if (log_pipe >= 0) read_errors(d); /* what came since the thread's last look */
    const bool taken = real_err >= 0;
    give_errors_back();
    leave();
    const aff_dash_view *v = &d->view;
    for (uint64_t i = v->n_lines > AFF_DASH_LINES ? v->n_lines - AFF_DASH_LINES : 0; taken && i < v->n_lines; i++) {
        const aff_dash_line *l = &v->line[i % AFF_DASH_LINES];
        if (l->log) fprintf(stderr, "%s\n", l->text.n ? l->text.s : "");
    }
    if (taken && d->err_line.n) fprintf(stderr, "%s", d->err_line.s);
    free_dash(d);
}
