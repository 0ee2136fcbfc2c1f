/* chat.h - an interactive conversation on a terminal: docs/cli.md. */
#ifndef AFF_UI_CHAT_H
#define AFF_UI_CHAT_H
#include "ui/talk.h"

/* Standard input, output and error are a terminal; aff__line_signals was called before the engine's threads were started. The caller sets
 * the talk's engine, net, tok, keep, format, sampling and n_predict. Returns when the person leaves. */
aff_status aff__chat_run(aff_talk *t, const char *name, aff_error *err);
#endif
