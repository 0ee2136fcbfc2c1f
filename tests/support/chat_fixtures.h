/* chat_fixtures.h - the lines of tests/text/chat-fixtures, and parser events as one comparable text. */
#ifndef AFF_TEST_CHAT_FIXTURES_H
#define AFF_TEST_CHAT_FIXTURES_H
#include "format/json.h"
#include "text/parse.h"

/* All lines of a file as an array; ends the process with a message if it cannot be read. */
json_t *aff_test_chat_lines(const char *name);

/* Appends an event to *log: pieces of one kind are joined, so that the text is the same however they were cut. Zero-
 * initialise and free its buf. For use as aff_parse_fn with the log as ctx. */
typedef struct aff_test_log {
    aff_buf text;
    int last; /* kind + 1 of the last event */
    size_t calls;
    bool open;  /* inside a call */
    bool wrong; /* an event that may not come there, or text that is not UTF-8 */
} aff_test_log;
aff_status aff_test_log_event(void *log, const aff_parse_event *e, aff_error *err);
#endif
