/* line.h - a line from a person on a terminal: editing and history by libedit. Standard input and output must be the terminal, the
 * character set UTF-8 (locale.h). SIGINT, SIGWINCH and SIGCONT must be blocked and their handlers installed (aff__line_signals): they
 * are let in only while a key is waited for. */
#ifndef AFF_UI_LINE_H
#define AFF_UI_LINE_H
#include "base/buf.h"

typedef struct aff_line aff_line;
/* Before any thread is started, which inherit it: from now on these signals only set flags. */
void aff__line_signals(void);
/* Whether SIGINT came since the last call; asks with the signal let in. */
bool aff__line_interrupted(void);

/* `history`: a file, made with mode 0600, that earlier lines come from and new ones go to; NULL: none. */
aff_status aff__line_open(aff_line **out, const char *history, aff_error *err);
void aff__line_close(aff_line *l);
typedef enum aff_line_end { AFF_LINE_OK, AFF_LINE_EOF, AFF_LINE_INTERRUPTED } aff_line_end;
/* text: the line without its newline. INTERRUPTED: the person gave the line up. */
aff_line_end aff__line_read(aff_line *l, const char *prompt, aff_buf *text);
void aff__line_remember(aff_line *l, const char *text);

/* "$XDG_STATE_HOME/affinity/history", or in ~/.local/state; its folders are made (0700). False: there is no such place. */
bool aff__history_path(char *out, size_t cap);
#endif
