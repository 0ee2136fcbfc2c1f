/* dash.h - the live dashboard on a terminal: throughput, acceptance, the machine, the expert plane, the log. It sees the engine's
 * snapshots and the lines that the program writes to standard error, nothing else. One thread of its own draws ten times a second.
 *
 * While it is open the terminal belongs to it: what goes to standard error (if that is a terminal too) appears in its log pane,
 * and is written again when it closes. The terminal is put back by aff__dash_close, and by guard.h on any signal that ends the
 * program. Layout: spec text-and-serving 6.2, in one column. */
#ifndef AFF_UI_DASH_H
#define AFF_UI_DASH_H
#include "engine/engine.h"

typedef enum aff_ui { AFF_UI_AUTO, AFF_UI_DASH, AFF_UI_PLAIN } aff_ui;
bool aff__ui_find(const char *name, aff_ui *ui); /* "auto", "dash", "plain" */
/* Whether a dashboard is to be drawn: AUTO where it can be, DASH always. It can be where standard input and output are a terminal
 * whose type is known and can address its cells; otherwise DASH is AFF_E_INVALID, and the line says what is missing. */
aff_status aff__ui_decide(aff_ui ui, bool *dash, aff_error *err);

typedef struct aff_dash aff_dash;
/* `name`: the model's, for the title. Only one can be open. */
aff_status aff__dash_open(aff_dash **out, const char *name, aff_error *err);
/* What the program is doing; ready: it is there, not on its way. NULL as dash is allowed here and below, and does nothing. */
void aff__dash_stage(aff_dash *d, const char *stage, bool ready);
/* From now on it draws that engine (NULL: none); both must live until it is told otherwise or closed. */
void aff__dash_watch(aff_dash *d, aff_engine *e, const aff_net *net);
/* Text of an answer, for the log pane; UTF-8 in any pieces. It is not written again at the end. */
void aff__dash_text(aff_dash *d, const char *s, size_t n);
void aff__dash_close(aff_dash *d);
#endif
