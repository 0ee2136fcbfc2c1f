#include "support/chat_fixtures.h"
#include "support/test.h"
#include "base/file.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

json_t *aff_test_chat_lines(const char *name)
{
    char path[512], *data;
    size_t n;
    aff_error e = {0};
    json_t *lines = json_array();
    snprintf(path, sizeof path, "%s/text/chat-fixtures/%s", AFF_TESTS_DIR, name);
    if (aff__read_file(path, 1 << 24, &data, &n, &e) != AFF_OK) fail_msg("%s", e.msg);
    for (char *p = data, *lf; (lf = memchr(p, '\n', (size_t)(data + n - p))) != NULL; p = lf + 1) {
        json_t *line = NULL;
        if (aff__json_parse_exact(&line, p, (size_t)(lf - p), path, true, 256, &e) != AFF_OK) fail_msg("%s", e.msg);
        json_array_append_new(lines, line);
    }
    free(data);
    return lines;
}

aff_status aff_test_log_event(void *ctx, const aff_parse_event *e, aff_error *err)
{
    static const char *const marks[] = {"\x01R:",
                                        "\x01T:",
                                        "\x01"
                                        "CALL:",
                                        "\x01"
                                        "A:",
                                        "\x01"
                                        "END",
                                        "\x01"
                                        "DROP"};
    aff_test_log *log = ctx;
    bool text = e->kind == AFF_PARSE_REASONING || e->kind == AFF_PARSE_TEXT, begins = e->kind == AFF_PARSE_CALL;
    if (text && log->open) log->wrong = true;
    if (!text && log->open == begins) log->wrong = true;
    if (begins) log->open = true, log->calls++;
    if (!text && e->call + 1 != log->calls) log->wrong = true;
    if (e->kind == AFF_PARSE_CALL_END || e->kind == AFF_PARSE_CALL_DROP) log->open = false;
    if (e->n && aff__utf8_valid_prefix((const uint8_t *)e->s, e->n) != e->n) log->wrong = true;
    if (begins || log->last != (int)e->kind + 1) AFF_TRY(aff__buf_puts(&log->text, marks[e->kind], err));
    log->last = (int)e->kind + 1;
    return aff__buf_put(&log->text, e->s, e->n, err);
}
