/* dash_internal.h - what is drawn, between dash.c, which keeps it, and dash_draw.c, which draws it. */
#ifndef AFF_UI_DASH_INTERNAL_H
#define AFF_UI_DASH_INTERNAL_H
#include "base/buf.h"
#include "base/host.h"
#include "ui/dash.h"

enum { AFF_DASH_LINES = 600, AFF_DASH_SAMPLES = 512 };

typedef struct aff_dash_line {
    aff_buf text;
    bool log; /* else of an answer */
} aff_dash_line;

/* Panes of the lower half; keys 1 to 4, or tab. */
typedef enum aff_dash_tab { AFF_TAB_EXPERTS, AFF_TAB_LAYERS, AFF_TAB_TIMING, AFF_TAB_CARD, AFF_DASH_TABS } aff_dash_tab;

typedef struct aff_dash_view {
    aff_dash_tab pane;
    char name[80], stage[120];
    bool ready;
    uint64_t now, started; /* ns */
    bool watching;
    aff_draft_kind draft;
    aff_snapshot s, before; /* now, and when the last sample was taken */
    float *heat;            /* [layers][experts] */
    uint8_t *tier;
    aff_host host;
    double cpus_busy;
    /* Tokens a second of decode passes and of prompts, one value a sample; the newest is the last of n. */
    float decode[AFF_DASH_SAMPLES], prompt[AFF_DASH_SAMPLES];
    int n;
    double decode_now, prompt_now; /* over the last passes; 0: none lately */
    aff_dash_line line[AFF_DASH_LINES]; /* a ring; the newest is at (n_lines - 1) % AFF_DASH_LINES */
    uint64_t n_lines;
} aff_dash_view;

/* The colours, once after the terminal was opened. */
void aff__dash_colours(void);
/* Draws all of it and shows it. */
void aff__dash_draw(const aff_dash_view *v);
/* dash_tabs.c: the pane of v->pane, its title in row y. The rows that it can use at most, without the title. */
int aff__dash_tab_rows(const aff_dash_view *v, int columns);
void aff__dash_tab(const aff_dash_view *v, int y, int rows, int columns);

/* Pieces of dash_draw.c. */
enum { AFF_PAIR_QUIET = 1, AFF_PAIR_GOOD, AFF_PAIR_BUSY, AFF_PAIR_BAR, AFF_PAIR_TITLE };
/* At most `columns` of the text at (y, x); returns how many it took. */
int aff__dash_put(int y, int x, int columns, const char *s);
void aff__dash_put_as(int y, int x, int columns, int pair, bool bold, const char *s);
void aff__dash_rule(int y, int x, int columns, const char *title);
void aff__dash_bar(int y, int x, int columns, double part);
void aff__dash_bytes(char *out, size_t cap, uint64_t n);
#endif
