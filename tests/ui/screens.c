/* screens FOLDER: the dashboard and a conversation as HTML of what is on the terminal, for scripts/checks/page to photograph. */
#define _GNU_SOURCE
#include "support/test.h"
#include "ui/pty.h"

static void put_colour(FILE *f, pty *p, const char *what, VTermColor c, uint32_t otherwise)
{
    const bool given = !VTERM_COLOR_IS_DEFAULT_FG(&c) && !VTERM_COLOR_IS_DEFAULT_BG(&c);
    if (given) vterm_screen_convert_color_to_rgb(p->screen, &c);
    fprintf(f, "%s:#%06x;", what, given ? (unsigned)c.rgb.red << 16 | (unsigned)c.rgb.green << 8 | c.rgb.blue : otherwise);
}

static void put_cell(FILE *f, pty *p, int y, int x)
{
    VTermScreenCell c;
    vterm_screen_get_cell(p->screen, (VTermPos){.row = y, .col = x}, &c);
    const uint32_t ch = c.chars[0] && c.chars[0] != (uint32_t)-1 ? c.chars[0] : ' ';
    fputs("<b style=\"", f);
    put_colour(f, p, "color", c.fg, 0xd0d4d2);
    put_colour(f, p, "background", c.bg, 0x101413);
    fprintf(f, "%s\">&#%u;</b>", c.attrs.bold ? "font-weight:bold" : "", ch);
}

static void save(pty *p, const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s.html", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("<!doctype html><meta charset=utf-8><style>body{margin:0;background:#101413}div{font:14px/17px 'DejaVu Sans Mono',monospace;"
          "white-space:pre;padding:8px}b{font-weight:normal;display:inline-block;width:8.43px;height:17px;overflow:hidden;vertical-align:top}"
          "</style><div>", f);
    for (int y = 0; y < p->rows; y++) {
        for (int x = 0; x < p->columns; x++) put_cell(f, p, y, x);
        fputc('\n', f);
    }
    fputs("</div>", f);
    assert_int_equal(fclose(f), 0);
}

static char program[] = AFF_BIN_DIR "/affinity", model[] = AFF_SOURCE_DIR "/models/tiny-v4";
#define S(text) ((char *)(uintptr_t)(text))

/* A prompt that is continued long enough for a picture of it. */
static void dashboard(const char *folder)
{
    char *env[] = {S("TERM=xterm-256color"), S("HOME=/dev/null"), NULL};
    pty *p = pty_start(32, 110, (char *[]){program, S("-m"), model, S("-p"), S("The capital of France is"), S("-n"), S("30000"), S("--temp"), S("0.9"),
                                           S("--logit-bias"), S("0=-100,1=-100"), S("--ui"), S("dash"), NULL}, env);
    pty_until(p, "Decode, peak");
    for (int i = 0; i < 120; i++) assert_true(pty_read(p, 60000)); /* so many updates */
    pty_until(p, "q stop");
    save(p, folder, "dash");
    pty_send(p, "q");
    pty_end(p);
    pty_free(p);
}

/* A model on an emulated card: the planes of its experts, then the pane of the card once passes were repeated. */
static void on_a_card(const char *folder)
{
    char *env[] = {S("TERM=xterm-256color"), S("HOME=/dev/null"), NULL};
    pty *p = pty_start(32, 110, (char *[]){program, S("-m"), model, S("-p"), S("The capital of France is"), S("-n"), S("30000"), S("--temp"), S("0.9"),
                                           S("--logit-bias"), S("0=-100,1=-100"), S("--ui"), S("dash"), S("--device"), S("emu:512M"), S("--dspark"),
                                           S("off"), NULL}, env);
    pty_until(p, "Decode, peak");
    for (int i = 0; i < 20; i++) assert_true(pty_read(p, 60000));
    pty_send(p, "4");
    pty_until(p, "passes recorded 1");
    save(p, folder, "card");
    pty_send(p, "2");
    pty_until(p, "16 card");
    save(p, folder, "layers");
    pty_send(p, "q");
    pty_end(p);
    pty_free(p);
}

static void conversation(const char *folder)
{
    char *env[] = {S("TERM=xterm-256color"), S("HOME=/dev/null"), NULL};
    pty *p = pty_start(26, 96, (char *[]){program, S("-m"), model, S("--temp"), S("0"), NULL}, env);
    pty_until(p, "> ");
    pty_send(p, "What is the capital of France?\r");
    pty_until(p, "The capital of France is Paris.");
    pty_until_at(p, "The capital of France is Paris.", 4);
    pty_until_at(p, "> ", 5);
    pty_send(p, "/think off\r");
    pty_until(p, "answers at once");
    pty_send(p, "Write a Python function that returns the sum of a list.\r");
    pty_until(p, "return result");
    pty_until_at(p, "> ", pty_find(p, "return result") + 2);
    pty_send(p, "/stats\r");
    pty_until(p, "tokens a pass");
    save(p, folder, "chat");
    pty_send(p, "/quit\r");
    pty_end(p);
    pty_free(p);
}

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    dashboard(argv[1]);
    on_a_card(argv[1]);
    conversation(argv[1]);
    return 0;
}
