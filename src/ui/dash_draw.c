#define _GNU_SOURCE /* wcwidth */
#define NCURSES_WIDECHAR 1
#include "experts/store.h"
#include "ui/dash_internal.h"
#include <math.h>
#include <ncurses.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>
#include <wctype.h>

enum { MIN_ROWS = 16, MIN_COLUMNS = 64, GRAPH_ROWS = 5, LEVELS = 5 };
enum { P_PLANE = 16 };

/* ---- colours ---- */

/* Colour of a cell of the plane, 0: nothing there; else 1 + tier * LEVELS + level. */
static short plane_colour(int code)
{
    static const short wide[3][LEVELS] = {{22, 28, 34, 40, 46}, {58, 94, 136, 172, 214}, {52, 88, 124, 160, 196}};
    static const short few[3] = {COLOR_GREEN, COLOR_YELLOW, COLOR_RED};
    if (!code) return -1;
    return COLORS >= 256 ? wide[(code - 1) / LEVELS][(code - 1) % LEVELS] : few[(code - 1) / LEVELS];
}

/* The pair of two cells, one above the other. Where there are few colours there may be 64 pairs only, and levels have none. */
static short plane_pair(int top, int bottom)
{
    if (COLORS >= 256) return (short)(P_PLANE + top * 16 + bottom);
    return (short)(P_PLANE + (top + LEVELS - 1) / LEVELS * 4 + (bottom + LEVELS - 1) / LEVELS);
}

void aff__dash_colours(void)
{
    if (!has_colors()) return;
    start_color();
    use_default_colors();
    const bool wide = COLORS >= 256;
    init_pair(AFF_PAIR_QUIET, wide ? 245 : -1, -1);
    init_pair(AFF_PAIR_GOOD, wide ? 77 : COLOR_GREEN, -1);
    init_pair(AFF_PAIR_BUSY, wide ? 214 : COLOR_YELLOW, -1);
    init_pair(AFF_PAIR_BAR, wide ? 73 : COLOR_CYAN, -1);
    init_pair(AFF_PAIR_TITLE, wide ? 115 : COLOR_CYAN, -1);
    for (int top = 0; top < 16; top++)
        for (int bottom = 0; bottom < 16; bottom++)
            init_pair(plane_pair(top, bottom), plane_colour(top), plane_colour(bottom));
}

/* ---- pieces ---- */

/* Bytes of a program or a model to a cell's worth: its columns, 0 for what is not shown. */
static int next_char(const char **s, const char *end, wchar_t *c)
{
    mbstate_t state = {0};
    const size_t k = mbrtowc(c, *s, (size_t)(end - *s), &state);
    if (k == 0 || k > (size_t)(end - *s)) {
        *s += 1;
        *c = L'?';
        return 1;
    }
    *s += k;
    if (*c == L'\t') *c = L' ';
    const int w = iswprint((wint_t)*c) ? wcwidth(*c) : 0;
    return w < 0 ? 0 : w;
}

int aff__dash_put(int y, int x, int columns, const char *s)
{
    const char *end = s + strlen(s);
    int used = 0;
    move(y, x);
    while (s < end) {
        wchar_t c[2] = {0};
        const int w = next_char(&s, end, c);
        if (!w) continue;
        if (used + w > columns) break;
        addwstr(c);
        used += w;
    }
    return used;
}

void aff__dash_put_as(int y, int x, int columns, int pair, bool bold, const char *s)
{
    attr_set(bold ? A_BOLD : A_NORMAL, (short)pair, NULL);
    aff__dash_put(y, x, columns, s);
    attr_set(A_NORMAL, 0, NULL);
}

void aff__dash_rule(int y, int x, int columns, const char *title)
{
    attr_set(A_NORMAL, AFF_PAIR_QUIET, NULL);
    mvhline_set(y, x, WACS_HLINE, columns);
    attr_set(A_NORMAL, 0, NULL);
    char text[96];
    snprintf(text, sizeof text, " %s ", title);
    aff__dash_put_as(y, x + 2, columns - 4, AFF_PAIR_TITLE, true, text);
}

void aff__dash_bar(int y, int x, int columns, double part)
{
    static const wchar_t eighth[] = L" ▏▎▍▌▋▊▉█";
    const int fill = (int)lrint(8.0 * columns * fmin(1, fmax(0, part)));
    move(y, x);
    for (int i = 0; i < columns; i++) {
        const int e = fill - 8 * i < 0 ? 0 : fill - 8 * i > 8 ? 8 : fill - 8 * i;
        const wchar_t c[2] = {e ? eighth[e] : L'·', 0};
        attr_set(A_NORMAL, e ? AFF_PAIR_BAR : AFF_PAIR_QUIET, NULL);
        addwstr(c);
    }
    attr_set(A_NORMAL, 0, NULL);
}

void aff__dash_bytes(char *out, size_t cap, uint64_t n)
{
    if (n < 1ull << 30)
        snprintf(out, cap, "%.0f MiB", (double)n / (1 << 20));
    else
        snprintf(out, cap, "%.1f GiB", (double)n / (1 << 30));
}

static void rate(char *out, size_t cap, double v)
{
    if (v > 0)
        snprintf(out, cap, v >= 100 ? "%.0f" : "%.1f", v);
    else
        snprintf(out, cap, "-");
}

/* ---- panes ---- */

static void header(const aff_dash_view *v, int columns)
{
    char text[160], up[32], decode[16], prompt[16];
    const unsigned long long s = (v->now - v->started) / 1000000000u;
    aff__dash_rule(0, 0, columns, "AFFINITY");
    snprintf(up, sizeof up, " %02llu:%02llu:%02llu ", s / 3600, s / 60 % 60, s % 60);
    aff__dash_put_as(0, columns - 13, 12, AFF_PAIR_QUIET, false, up);
    snprintf(text, sizeof text, " %s ", v->name);
    aff__dash_put_as(0, 14, columns - 30, AFF_PAIR_QUIET, false, text);
    int w = 0;
    if (v->watching) {
        rate(decode, sizeof decode, v->decode_now);
        rate(prompt, sizeof prompt, v->prompt_now);
        int n = snprintf(text, sizeof text, "decode %s tok/s  ", decode);
        if (columns >= 100) n += snprintf(text + n, sizeof text - (size_t)n, "prompt %s tok/s  ", prompt);
        n += snprintf(text + n, sizeof text - (size_t)n, "slots %d/%d", v->s.running, v->s.slots);
        if (v->s.waiting) snprintf(text + n, sizeof text - (size_t)n, " +%d", v->s.waiting);
        w = (int)strlen(text) + 2;
        aff__dash_put(1, columns + 1 - w, w, text);
    }
    aff__dash_put_as(1, 1, columns - w - 1, v->ready ? AFF_PAIR_GOOD : AFF_PAIR_BUSY, true, v->stage);
}

static void host(const aff_dash_view *v, int y, int columns)
{
    const aff_host *h = &v->host;
    char text[80], a[24], b[24];
    const int w = columns >= 110 ? 16 : 8;
    const uint64_t used = h->total - h->available;
    aff__dash_put_as(y, 1, 8, AFF_PAIR_TITLE, true, "Host");
    int x = 7;
    snprintf(text, sizeof text, "CPU %4.1f of %d ", v->cpus_busy, h->cpus);
    x += aff__dash_put(y, x, columns - x, text);
    aff__dash_bar(y, x, w, h->cpus ? v->cpus_busy / h->cpus : 0);
    x += w + 2;
    aff__dash_bytes(a, sizeof a, used);
    aff__dash_bytes(b, sizeof b, h->total);
    snprintf(text, sizeof text, "memory %s of %s ", a, b);
    x += aff__dash_put(y, x, columns - x, text);
    if (x + w < columns) aff__dash_bar(y, x, w, h->total ? (double)used / (double)h->total : 0);
    x += w + 2;
    aff__dash_bytes(a, sizeof a, h->rss);
    aff__dash_bytes(b, sizeof b, h->peak);
    snprintf(text, sizeof text, "program %s, peak %s", a, b);
    if (x + (int)strlen(text) < columns) x += 2 + aff__dash_put(y, x, columns - x, text);
    aff__dash_bytes(a, sizeof a, v->s.state_bytes);
    snprintf(text, sizeof text, "contexts %s", a);
    if (v->watching && !v->s.on_device && x + (int)strlen(text) < columns) aff__dash_put(y, x, columns - x, text);
}

/* One line of the card; the pane 4 has more. */
static void card(const aff_dash_view *v, int y, int columns)
{
    const aff_device_view *d = &v->s.device;
    char text[160], a[24], b[24];
    const int w = columns >= 140 ? 16 : 8;
    uint64_t used = 0;
    for (int i = 0; i < AFF_USES; i++) used += d->use[i];
    aff__dash_put_as(y, 1, 8, AFF_PAIR_TITLE, true, "Card");
    snprintf(text, sizeof text, "%s %s  ", d->id, d->name);
    int x = 7 + aff__dash_put(y, 7, columns - 8, text);
    aff__dash_bytes(a, sizeof a, used);
    aff__dash_bytes(b, sizeof b, d->memory);
    snprintf(text, sizeof text, "memory %s of %s ", a, b);
    x += aff__dash_put(y, x, columns - x, text);
    if (x + w < columns) aff__dash_bar(y, x, w, d->memory ? (double)used / (double)d->memory : 0);
    x += w + 2;
    for (int i = 0; i < AFF_USES; i++) {
        aff__dash_bytes(a, sizeof a, d->use[i]);
        snprintf(text, sizeof text, "%s %s  ", aff__device_use_names[i], a);
        if (x + (int)strlen(text) < columns) x += aff__dash_put(y, x, columns - x, text);
    }
}

/* Samples as dots, 2 x 4 a cell, right-aligned. */
static void graph(int y, int x, int rows, int columns, const float *v, int n, float most)
{
    static const int dot[4][2] = {{0x40, 0x80}, {0x04, 0x20}, {0x02, 0x10}, {0x01, 0x08}}; /* from the bottom */
    attr_set(A_NORMAL, AFF_PAIR_BAR, NULL);
    for (int r = 0; r < rows; r++) {
        move(y + r, x);
        for (int c = 0; c < columns; c++) {
            int bits = 0;
            for (int half = 0; half < 2; half++) {
                const int i = n - 2 * columns + 2 * c + half;
                const int high = i >= 0 && v[i] > 0 ? (int)ceilf(v[i] / most * 4 * (float)rows) : 0;
                for (int k = 0; k < 4; k++)
                    if (high > 4 * (rows - 1 - r) + k) bits |= dot[k][half];
            }
            const wchar_t cell[2] = {bits ? (wchar_t)(0x2800 + bits) : L' ', 0};
            addwstr(cell);
        }
    }
    attr_set(A_NORMAL, 0, NULL);
}

static void decode_graph(const aff_dash_view *v, int y, int x, int columns)
{
    char title[80];
    float most = 0;
    for (int i = 0; i < v->n; i++)
        if (v->decode[i] > most) most = v->decode[i];
    snprintf(title, sizeof title, most > 0 ? "Decode, peak %.1f tok/s" : "Decode", (double)most);
    aff__dash_rule(y, x, columns, title);
    if (most > 0) graph(y + 1, x + 1, GRAPH_ROWS, columns - 2, v->decode, v->n, most);
}

static void places(const aff_dash_view *v, int y, int x, int columns)
{
    static const char *const kinds[] = {"Speculation: the model has no draft", "Speculation: DSpark", "Speculation: MTP-1"};
    const aff_draft_stats *d = &v->s.draft;
    char text[96];
    if (d->passes && v->draft != AFF_DRAFT_NONE)
        snprintf(text, sizeof text, "%s, %.2f tokens a pass", kinds[v->draft], (double)d->tokens / (double)d->passes);
    else
        snprintf(text, sizeof text, "%s", kinds[v->draft]);
    aff__dash_rule(y, x, columns, text);
    for (int i = 0; i < AFF_MAX_WIDTH && i < GRAPH_ROWS; i++) {
        if (!d->offered[i]) continue;
        const double part = (double)d->accepted[i] / (double)d->offered[i];
        snprintf(text, sizeof text, "%d  %3.0f %% ", i + 1, 100 * part);
        const int w = aff__dash_put(y + 1 + i, x + 1, columns - 2, text), left = columns - w - 14;
        if (left > 4) aff__dash_bar(y + 1 + i, x + 1 + w, left, part);
        snprintf(text, sizeof text, " of %lld", (long long)d->offered[i]);
        if (left > 4) aff__dash_put_as(y + 1 + i, x + 1 + w + left, 12, AFF_PAIR_QUIET, false, text);
    }
}

/* Worst tier and most heat of the experts [e0, e1) in the layers [l0, l1), as a code of plane_colour. */
static int plane_cell(const aff_dash_view *v, float most, int l0, int l1, int e0, int e1)
{
    int tier = 0;
    float heat = 0;
    if (l0 >= l1 || e0 >= e1) return 0;
    for (int l = l0; l < l1; l++)
        for (int e = e0; e < e1; e++) {
            const int i = l * v->s.experts + e;
            if (v->tier[i] > tier) tier = v->tier[i];
            if (v->heat[i] > heat) heat = v->heat[i];
        }
    const int level = most > 0 ? (int)(powf(heat / most, 0.7f) * (LEVELS - 0.01f)) : 0;
    return 1 + tier * LEVELS + (level < LEVELS ? level : LEVELS - 1);
}

/* Rows that the plane has at most: two layers a row. */
static int plane_rows(const aff_dash_view *v)
{
    return (v->s.layers + 1) / 2;
}

static void plane(const aff_dash_view *v, int y, int rows, int columns)
{
    char title[120];
    const int L = v->s.layers, E = v->s.experts, halves = 2 * rows, each = (L + halves - 1) / halves;
    const int group = (E + columns - 3) / (columns - 2), cells = (E + group - 1) / group;
    const int width = (columns - 2) / cells < 4 ? (columns - 2) / cells : 4;
    int count[3] = {0};
    float most = 0;
    for (int i = 0; i < L * E; i++) {
        count[v->tier[i]]++;
        if (v->heat[i] > most) most = v->heat[i];
    }
    snprintf(title, sizeof title, "Experts %d x %d: %d on cards, %d in host memory, %d on disk", L, E, count[AFF_TIER_CARD],
             count[AFF_TIER_HOST], count[AFF_TIER_DISK]);
    aff__dash_rule(y, 0, columns, title);
    for (int r = 0; r < rows; r++) {
        move(y + 1 + r, 1);
        for (int c = 0; c < cells; c++) {
            const int l0 = 2 * r * each, e0 = c * group, e1 = e0 + group < E ? e0 + group : E;
            const int l1 = l0 + each < L ? l0 + each : L, l2 = l1 + each < L ? l1 + each : L;
            const int top = plane_cell(v, most, l0, l1, e0, e1), bottom = plane_cell(v, most, l1, l2, e0, e1);
            cchar_t cell;
            setcchar(&cell, top ? L"▀" : L" ", A_NORMAL, has_colors() ? plane_pair(top, bottom) : (short)0, NULL);
            for (int k = 0; k < width; k++) add_wch(&cell);
        }
    }
}

/* Rows that a line takes when it is wrapped. */
static int height(const aff_buf *b, int columns)
{
    const char *s = b->n ? b->s : "", *end = s + b->n;
    int rows = 1, x = 0;
    while (s < end) {
        wchar_t c;
        const int w = next_char(&s, end, &c);
        if (x + w > columns) {
            rows++;
            x = 0;
        }
        x += w;
    }
    return rows;
}

static void wrapped(const aff_dash_line *l, int y, int skip, int rows, int columns)
{
    const char *s = l->text.n ? l->text.s : "", *end = s + l->text.n;
    int row = 0, x = 0;
    attr_set(A_NORMAL, l->log ? AFF_PAIR_QUIET : 0, NULL);
    while (s < end && row - skip < rows) {
        wchar_t c[2] = {0};
        const int w = next_char(&s, end, c);
        if (!w) continue;
        if (x + w > columns) {
            row++;
            x = 0;
        }
        if (row >= skip && row - skip < rows) mvaddwstr(y + row - skip, 1 + x, c);
        x += w;
    }
    attr_set(A_NORMAL, 0, NULL);
}

/* The newest lines, the last one at the bottom. */
static void log_pane(const aff_dash_view *v, int y, int rows, int columns)
{
    const uint64_t have = v->n_lines < AFF_DASH_LINES ? v->n_lines : AFF_DASH_LINES;
    int at = rows;
    aff__dash_rule(y, 0, columns, "Log");
    for (uint64_t i = 0; i < have && at > 0; i++) {
        const aff_dash_line *l = &v->line[(v->n_lines - 1 - i) % AFF_DASH_LINES];
        const int h = height(&l->text, columns - 2), skip = h > at ? h - at : 0;
        at -= h - skip;
        wrapped(l, y + 1 + at, skip, h - skip, columns - 2);
    }
}

void aff__dash_draw(const aff_dash_view *v)
{
    int rows, columns;
    getmaxyx(stdscr, rows, columns);
    erase();
    if (rows < MIN_ROWS || columns < MIN_COLUMNS) {
        char text[80];
        snprintf(text, sizeof text, "the window is %d x %d, %d x %d are needed", columns, rows, MIN_COLUMNS, MIN_ROWS);
        const int w = (int)strlen(text);
        aff__dash_put(rows / 2, columns > w ? (columns - w) / 2 : 0, columns, text);
        refresh();
        return;
    }
    int y = 3, left = rows - 4; /* without header, host and footer */
    header(v, columns);
    host(v, 2, columns);
    if (v->watching && v->s.on_device) {
        card(v, y++, columns);
        left--;
    }
    if (v->watching && left >= 1 + GRAPH_ROWS + 12) {
        decode_graph(v, y, 0, columns / 2);
        places(v, y, columns / 2, columns - columns / 2);
        y += 1 + GRAPH_ROWS;
        left -= 1 + GRAPH_ROWS;
    }
    int pr = !v->watching || !v->heat ? 0 : v->pane == AFF_TAB_EXPERTS ? plane_rows(v) : aff__dash_tab_rows(v, columns);
    if (pr > left - 6) pr = left - 6; /* two rules, four lines of the log */
    if (pr > 0) {
        if (v->pane == AFF_TAB_EXPERTS)
            plane(v, y, pr, columns);
        else
            aff__dash_tab(v, y, pr, columns);
        y += 1 + pr;
        left -= 1 + pr;
    }
    log_pane(v, y, left - 1, columns);
    aff__dash_put_as(rows - 1, 1, columns - 2, AFF_PAIR_QUIET, false, "q stop   q q stop at once   1 experts   2 layers   3 timing   4 card");
    move(rows - 1, columns - 1);
    refresh();
}
