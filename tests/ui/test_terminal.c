/* The programs on a terminal: the conversation of `affinity -m`, the dashboard of -p and --serve. */
#define _GNU_SOURCE /* posix_openpt, the window's size */
#include "support/test.h"
#include "ui/pty.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static char folder[] = "/tmp/aff-terminal-XXXXXX", state_home[64], history[96];
static char program[] = AFF_BIN_DIR "/affinity", model[] = AFF_SOURCE_DIR "/models/tiny-v4";

static pty *start(int rows, int columns, const char *term, char *const *flags)
{
    char *argv[24] = {program, (char *)(uintptr_t)"-m", model, (char *)(uintptr_t)"--threads", (char *)(uintptr_t)"1"};
    char *env[8] = {state_home, folder, NULL}, type[64], home[80];
    int n = 5;
    while (*flags) argv[n++] = *flags++;
    snprintf(type, sizeof type, "TERM=%s", term);
    snprintf(home, sizeof home, "HOME=%s", folder);
    env[1] = type;
    env[2] = home;
    env[3] = getenv("ASAN_OPTIONS") ? (char *)(uintptr_t)"ASAN_OPTIONS=detect_leaks=0" : NULL; /* a signal ends some of them */
    return pty_start(rows, columns, argv, env);
}

#define FLAGS(...) \
    (char *[]) \
    { \
        __VA_ARGS__, NULL \
    }
#define S(text) ((char *)(uintptr_t)(text))

static int make_folder(void **state)
{
    if (!mkdtemp(folder)) return -1;
    snprintf(state_home, sizeof state_home, "XDG_STATE_HOME=%s", folder);
    snprintf(history, sizeof history, "%s/affinity/history", folder);
    return 0;
}

static int remove_folder(void **state)
{
    char sub[64];
    unlink(history);
    snprintf(sub, sizeof sub, "%s/affinity", folder);
    rmdir(sub);
    snprintf(sub, sizeof sub, "%s/talk.json", folder);
    unlink(sub);
    return rmdir(folder);
}

static void exited(pty *p, int code)
{
    pty_end(p);
    assert_true(WIFEXITED(p->status));
    assert_int_equal(WEXITSTATUS(p->status), code);
    pty_free(p);
}

/* ---- conversation ---- */

static void a_conversation(void **state)
{
    pty *p = start(40, 100, "xterm-256color", FLAGS(S("--temp"), S("0")));
    pty_until(p, "/help lists the commands");
    pty_until(p, "> ");
    pty_send(p, "What is the capital of France?\r");
    pty_until(p, "The capital of France is Paris.");
    assert_true(pty_wrote(p, "\033[2m"));                            /* the reasoning is dimmed */
    assert_true(strstr(p->raw.s, "\033[2mI know this.") != NULL);   /* this one */
    pty_send(p, "What is the capital of Japan?\r");
    pty_until(p, "The capital of Japan is Tokyo.");
    assert_false(pty_wrote(p, "\033[?1049h")); /* the screen stays the person's */
    pty_send(p, "/quit\r");
    exited(p, 0);

    struct stat st;
    assert_int_equal(stat(history, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
}

/* The number in front of `what` on the screen. */
static int number_before(pty *p, const char *what)
{
    char row[2048];
    pty_row(p, pty_find(p, what), row, sizeof row);
    char *at = strstr(row, what);
    while (at > row && (at[-1] == ' ' || (at[-1] >= '0' && at[-1] <= '9'))) at--;
    return atoi(at);
}

/* Only what is new is run: without reasoning everything but the new turn's own tokens, with it the last answer without its reasoning too. */
static void state_is_kept_between_turns(void **state)
{
    pty *p = start(40, 120, "xterm-256color", FLAGS(S("--temp"), S("0")));
    pty_until(p, "> ");
    pty_send(p, "/think off\r");
    pty_until(p, "answers at once");
    pty_send(p, "What is the capital of France?\r");
    pty_until(p, "France is Paris.");
    pty_send(p, "/stats\r");
    pty_until(p, "last turn: 0 tokens reused");
    pty_until(p, " of 65536 tokens");
    const int first = number_before(p, " of 65536 tokens");
    pty_send(p, "What is the capital of Japan?\r");
    pty_until(p, "Japan is Tokyo.");
    pty_send(p, "\f"); /* Ctrl-L clears the screen */
    pty_until_not(p, "tokens reused");
    pty_send(p, "/stats\r");
    pty_until(p, "tokens reused");
    pty_until(p, " of 65536 tokens");
    assert_int_equal(number_before(p, " tokens reused"), first - 1); /* the end of sequence was chosen, not run */
    pty_send(p, "/think high\r");
    pty_until(p, "thinks before it answers");
    pty_send(p, "/reset\r");
    pty_until(p, "is forgotten");
    pty_send(p, "What is the capital of France?\r");
    pty_until(p, "France is Paris.");
    pty_send(p, "What is the capital of Japan?\r");
    pty_until(p, "Japan is Tokyo.");
    pty_send(p, "\f");
    pty_until_not(p, "tokens reused");
    pty_send(p, "/stats\r");
    pty_until(p, "tokens reused");
    assert_true(number_before(p, " tokens reused") > 60); /* the effort's paragraph and the first question */
    pty_until(p, "tokens a pass");
    pty_until_at(p, "> ", pty_find(p, "tokens a pass") + 1); /* a line is waited for: the end counts only then */
    pty_send(p, "\004");
    exited(p, 0);
}

static void lines_are_edited(void **state)
{
    char path[80], key[128];
    snprintf(path, sizeof path, "%s/talk.json", folder);
    pty *p = start(30, 100, "xterm-256color", FLAGS(S("--temp"), S("0")));
    pty_until(p, "> ");
    pty_send(p, "/think o\xE2\x82\xACxff\033[D\033[D\x7F\x7F\r"); /* a euro and an x typed, and taken back */
    pty_until(p, "answers at once");
    pty_send(p, "\033[A\033[A\033[B"); /* up twice, down once */
    pty_until(p, "> /think off");
    pty_send(p, "\x15/set top-k 7\r");
    pty_until(p, "top-k 7");
    pty_send(p, "/set top-k -1\r");
    pty_until(p, "/set: expected");
    pty_send(p, "/nothing\r");
    pty_until(p, "no such command");
    pty_send(p, "given up\003");
    pty_until(p, "^C");
    pty_send(p, "What is the capital\\\r");
    pty_until(p, ". ");
    pty_send(p, "of France?\r");
    pty_until(p, "France is Paris.");
    snprintf(key, sizeof key, "/save %s\r", path);
    pty_send(p, key);
    pty_until(p, "saved");
    pty_send(p, "/reset\r");
    pty_until(p, "is forgotten");
    snprintf(key, sizeof key, "/load %s\r", path);
    pty_send(p, key);
    pty_until(p, "loaded, 2 messages");
    pty_send(p, "/load /nowhere/at/all\r");
    pty_until(p, "/nowhere/at/all:");
    pty_send(p, "/quit\r");
    exited(p, 0);
}

/* Temperature 5 writes without end; Ctrl-C ends the answer, not the program. */
static void ctrl_c_interrupts_an_answer(void **state)
{
    pty *p = start(30, 100, "xterm-256color", FLAGS(S("--temp"), S("5"), S("--top-p"), S("1"), S("--seed"), S("3")));
    pty_until(p, "> ");
    pty_send(p, "/think off\r");
    pty_until(p, "answers at once");
    const size_t before = p->raw.n;
    pty_send(p, "Write.\r");
    while (p->raw.n < before + 400) assert_true(pty_read(p, 60000));
    pty_send(p, "\003");
    pty_until(p, "[interrupted]");
    pty_send(p, "/set temp 0\r");
    pty_until(p, "temp 0");
    pty_send(p, "/reset\r");
    pty_until(p, "is forgotten");
    pty_send(p, "What is the capital of France?\r");
    pty_until(p, "France is Paris.");
    assert_int_equal(kill(p->pid, SIGTERM), 0); /* while a line is edited */
    pty_end(p);
    assert_true(WIFSIGNALED(p->status) && WTERMSIG(p->status) == SIGTERM);
    pty_free(p);
}

/* ---- dashboard ---- */

static int port_of(pty *p)
{
    char row[2048];
    pty_row(p, pty_find(p, "serving on http://127.0.0.1:"), row, sizeof row);
    return atoi(strstr(row, "127.0.0.1:") + 10);
}

static void ask(int port)
{
    static const char body[] = "{\"prompt\": \"The capital of France is\", \"max_tokens\": 16, \"temperature\": 0, \"ignore_eos\": true}";
    char text[512], part[512];
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    assert_int_equal(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
    const int n = snprintf(text, sizeof text, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s",
                           strlen(body), body);
    assert_int_equal(write(fd, text, (size_t)n), n);
    while (read(fd, part, sizeof part) > 0) {
    }
    close(fd);
}

static bool host_colour(const VTermColor *c)
{
    static const int ramp[] = {58, 94, 136, 172, 214};
    for (int i = 0; i < 5; i++)
        if (VTERM_COLOR_IS_INDEXED(c) && c->indexed.idx == ramp[i]) return true;
    return false;
}

/* Rows of the plane are half blocks whose two colours are those of host memory. Returns how many colours there are, 0 while it is not all there. */
static int look_at_plane(pty *p, int y)
{
    int seen[256] = {0}, colours = 0;
    for (int r = 1; r <= 3; r++)
        for (int x = 1; x <= 64; x++) {
            VTermScreenCell cell;
            vterm_screen_get_cell(p->screen, (VTermPos){.row = y + r, .col = x}, &cell);
            if (cell.chars[0] != 0x2580) return 0;
            assert_true(host_colour(&cell.fg) && host_colour(&cell.bg));
            colours += !seen[cell.fg.indexed.idx]++;
        }
    return colours;
}

static void the_servers_dashboard(void **state)
{
    char row[2048];
    pty *p = start(40, 120, "xterm-256color", FLAGS(S("--serve"), S("--port"), S("0"), S("--kv-size"), S("4096"), S("--max-tokens-floor"), S("0")));
    pty_until(p, "serving on http://127.0.0.1:");
    pty_until(p, "Experts 6 x 16");
    pty_until(p, "listening on"); /* a line of standard error, in the pane */
    assert_true(p->alternate);
    assert_false(p->cursor);
    assert_int_equal(pty_find(p, "AFFINITY"), 0);
    pty_until_at(p, "q stop", 39);
    pty_until(p, "slots 0/4");
    const int port = port_of(p);
    ask(port);
    pty_until(p, "POST /v1/completions 200");
    pty_until(p, "Decode, peak");
    pty_until(p, "Speculation: DSpark");
    pty_until_at(p, "▀", pty_find(p, "Experts 6 x 16") + 3);
    pty_send(p, "4");
    pty_until(p, "Card: none, the model runs on the host");
    pty_send(p, "\t");
    pty_until(p, "Experts 6 x 16");
    while (look_at_plane(p, pty_find(p, "Experts 6 x 16")) < 2) /* some are hotter */
        assert_true(pty_read(p, 60000));
    pty_until(p, "Host");
    pty_row(p, pty_find(p, "Host"), row, sizeof row);
    assert_non_null(strstr(row, "memory "));
    assert_non_null(strstr(row, "GiB"));

    pty_resize(p, 20, 70);
    pty_until_not(p, "Decode, peak"); /* no room for it */
    pty_until_at(p, "q stop", 19);
    assert_true(pty_find(p, "Experts 6 x 16") > 0);
    pty_resize(p, 10, 50);
    pty_until(p, "the window is 50 x 10, 64 x 16 are needed");
    pty_resize(p, 45, 140);
    pty_until(p, "Decode, peak");
    pty_until_at(p, "q stop", 44);

    pty_send(p, "q");
    pty_end(p);
    assert_true(WIFEXITED(p->status) && WEXITSTATUS(p->status) == 0);
    assert_true(pty_find(p, "listening on") >= 0); /* the log is written again */
    assert_true(pty_find(p, "stopping; answers") >= 0);
    pty_free(p);
}

/* The panes, of a model on an emulated card: all experts are on it. */
static void panes_of_a_card(void **state)
{
    char row[2048];
    pty *p = start(40, 120, "xterm-256color", FLAGS(S("--serve"), S("--port"), S("0"), S("--kv-size"), S("4096"), S("--device"), S("emu:512M")));
    pty_until(p, "Experts 6 x 16: 96 on cards, 0 in host memory, 0 on disk");
    pty_row(p, pty_find(p, "Card  emu:0 emulated device"), row, sizeof row);
    assert_non_null(strstr(row, " of 512 MiB"));
    assert_non_null(strstr(row, "weights "));
    assert_non_null(strstr(row, "experts "));
    assert_non_null(strstr(row, "state "));
    pty_send(p, "2");
    pty_until(p, "  5 ██████████  16 card   0 host   0 disk");
    assert_true(pty_find(p, "Experts 6 x 16") < 0);
    pty_send(p, "3");
    pty_until(p, "prompts           0 tokens");
    pty_send(p, "\t");
    pty_until(p, "Card emu:0: emulated device, nv");
    pty_until(p, "passes recorded 0, of 0 passes of few rows 0 repeated one");
    pty_row(p, pty_find(p, "other programs"), row, sizeof row);
    assert_non_null(strstr(row, " 0 MiB ")); /* the card's own count of what is taken is ours */
    pty_send(p, "1");
    pty_until(p, "Experts 6 x 16");
    pty_send(p, "q");
    exited(p, 0);
}

static void the_dashboard_of_a_prompt(void **state)
{
    pty *p = start(30, 100, "xterm-256color", FLAGS(S("-p"), S("The capital of France is"), S("-n"), S("3"), S("--ui"), S("dash")));
    pty_end(p);
    assert_true(WIFEXITED(p->status) && WEXITSTATUS(p->status) == 0);
    assert_true(pty_wrote(p, "\033[?1049h"));
    assert_true(pty_find(p, "The capital of France is Paris.") >= 0);
    assert_true(pty_find(p, "generated ids: ") > pty_find(p, "The capital of France is Paris."));
    pty_free(p);
}

static void plain_and_dumb(void **state)
{
    pty *p = start(30, 100, "xterm-256color", FLAGS(S("-p"), S("The capital of France is"), S("-n"), S("3"), S("--ui"), S("plain")));
    pty_end(p);
    assert_true(pty_find(p, "The capital of France is Paris.") >= 0);
    assert_false(pty_wrote(p, "\033[?1049h"));
    pty_free(p);
    p = start(30, 100, "dumb", FLAGS(S("-p"), S("The capital of France is"), S("-n"), S("3"))); /* auto */
    pty_end(p);
    assert_true(pty_find(p, "The capital of France is Paris.") >= 0);
    assert_false(pty_wrote(p, "\033["));
    pty_free(p);
    p = start(30, 100, "dumb", FLAGS(S("-p"), S("x"), S("--ui"), S("dash")));
    pty_until(p, "--ui dash: expected a terminal that can address its cells");
    exited(p, 2);
    p = start(30, 100, "no-such-terminal", FLAGS(S("-p"), S("x"), S("--ui"), S("dash")));
    pty_until(p, "--ui dash: expected a TERM that terminfo knows");
    exited(p, 2);
    p = start(30, 100, "xterm-256color", FLAGS(S("--ui"), S("dash")));
    pty_until(p, "a conversation has no dashboard");
    exited(p, 2);
}

/* A screen of eight colours has the plane too. */
static void few_colours(void **state)
{
    pty *p = start(30, 100, "linux", FLAGS(S("--serve"), S("--port"), S("0"), S("--kv-size"), S("4096")));
    pty_until(p, "Experts 6 x 16");
    pty_until_at(p, "▀", pty_find(p, "Experts 6 x 16") + 1);
    VTermScreenCell cell;
    vterm_screen_get_cell(p->screen, (VTermPos){.row = pty_find(p, "Experts 6 x 16") + 1, .col = 1}, &cell);
    assert_true(VTERM_COLOR_IS_INDEXED(&cell.fg));
    assert_int_equal(cell.fg.indexed.idx, 3);
    pty_send(p, "\003"); /* Ctrl-C as anywhere */
    pty_end(p);
    assert_true(WIFEXITED(p->status) && WEXITSTATUS(p->status) == 0);
    pty_free(p);
}

/* Signals that end the program: the terminal is as before, the log is not lost. */
static void killed_dashboards(void **state)
{
    static const int how[] = {SIGABRT, SIGHUP, SIGQUIT};
    for (int i = 0; i < 3; i++) {
        pty *p = start(30, 100, "xterm-256color", FLAGS(S("--serve"), S("--port"), S("0"), S("--kv-size"), S("4096")));
        pty_until(p, "serving on http://127.0.0.1:");
        assert_true(p->alternate);
        assert_int_equal(kill(p->pid, how[i]), 0);
        pty_end(p);
        assert_true(WIFSIGNALED(p->status));
        assert_int_equal(WTERMSIG(p->status), how[i]);
        pty_free(p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_conversation),       cmocka_unit_test(state_is_kept_between_turns),
        cmocka_unit_test(lines_are_edited),     cmocka_unit_test(ctrl_c_interrupts_an_answer),
        cmocka_unit_test(the_servers_dashboard), cmocka_unit_test(panes_of_a_card), cmocka_unit_test(the_dashboard_of_a_prompt),
        cmocka_unit_test(plain_and_dumb),       cmocka_unit_test(few_colours),
        cmocka_unit_test(killed_dashboards)};
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
