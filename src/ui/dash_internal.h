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

typedef struct aff_dash_view {
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
#endif
