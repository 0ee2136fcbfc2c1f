/* Output parsers. The first byte: 1 thinking, 2 ended by the model, 4 and 8 which tools; the next two where to cut. In
 * the text, bytes 80 to 8F stand for markup. Whole, cut in three and byte by byte give the same events; they come in
 * order, hold whole characters, and complete arguments are JSON objects. The strict parser takes the same text. */
#include "support/chat_fixtures.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok) abort();
}

static const char *const markup[16] = {"<｜DSML｜",
                                       "</｜DSML｜",
                                       "<｜DSML｜tool_calls>\n",
                                       "</｜DSML｜tool_calls>",
                                       "<｜DSML｜invoke name=\"f\">\n",
                                       "</｜DSML｜invoke>\n",
                                       "<｜DSML｜parameter name=\"s\" string=\"true\">",
                                       "</｜DSML｜parameter>\n",
                                       "\n\n<｜DSML｜ calls>\n",
                                       "invoke name=\"",
                                       "parameter name=\"",
                                       "\" string=\"false\">",
                                       "</think>",
                                       "<think>",
                                       "<｜end▁of▁sentence｜>",
                                       "\r\n"};

static aff_buf text_of(const uint8_t *d, size_t n)
{
    aff_buf b = {0};
    for (size_t i = 0; i < n; i++) {
        char c = (char)d[i];
        require((d[i] >> 4 == 8 ? aff__buf_puts(&b, markup[d[i] & 15], NULL) : aff__buf_put(&b, &c, 1, NULL)) ==
                AFF_OK);
    }
    require(aff__buf_put(&b, "", 0, NULL) == AFF_OK);
    return b;
}

/* Cut at a and b; step > 0: into pieces of that size instead. */
static aff_test_log run(const aff_buf *t, unsigned flags, const json_t *tools, size_t a, size_t b, size_t step)
{
    aff_test_log log = {0};
    aff_parser *p;
    require(aff__parser_create(&p, flags & 1, tools, aff_test_log_event, &log, NULL) == AFF_OK);
    if (step) {
        for (size_t i = 0; i < t->n; i += step)
            require(aff__parser_feed(p, t->s + i, t->n - i < step ? t->n - i : step, NULL) == AFF_OK);
    } else {
        require(aff__parser_feed(p, t->s, a, NULL) == AFF_OK);
        require(aff__parser_feed(p, t->s + a, b - a, NULL) == AFF_OK);
        require(aff__parser_feed(p, t->s + b, t->n - b, NULL) == AFF_OK);
    }
    require(aff__parser_end(p, flags & 2, NULL) == AFF_OK);
    aff__parser_free(p);
    require(!log.wrong && !log.open);
    return log;
}

static void same(const aff_test_log *whole, aff_test_log part)
{
    require(part.text.n == whole->text.n && (part.text.n == 0 || memcmp(part.text.s, whole->text.s, part.text.n) == 0));
    aff__buf_free(&part.text);
}

/* Collects the arguments of one call after the other. */
static aff_status check(void *ctx, const aff_parse_event *e, aff_error *err)
{
    aff_buf *args = ctx;
    if (e->kind == AFF_PARSE_CALL) args->n = 0;
    if (e->kind == AFF_PARSE_ARGS) return aff__buf_put(args, e->s, e->n, err);
    if (e->kind != AFF_PARSE_CALL_END) return AFF_OK;
    json_t *v = NULL;
    aff_error mine = {0};
    aff_status s = aff__json_parse_exact(&v, args->s, args->n, "arguments", false, 256, &mine);
    require(s == AFF_OK ? json_is_object(v) : strstr(mine.msg, "deeper") || strstr(mine.msg, "NUL byte in object key"));
    json_decref(v);
    return AFF_OK;
}

static void arguments(const aff_buf *t, unsigned flags, const json_t *tools)
{
    aff_buf args = {0};
    aff_parser *p;
    require(aff__parser_create(&p, flags & 1, tools, check, &args, NULL) == AFF_OK);
    require(aff__parser_feed(p, t->s, t->n, NULL) == AFF_OK);
    require(aff__parser_end(p, flags & 2, NULL) == AFF_OK);
    aff__parser_free(p);
    aff__buf_free(&args);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static json_t *known, *none;
    if (!known) {
        known = json_loads("[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},"
                           "\"n\":{\"type\":\"integer\"}},"
                           "\"required\":[\"s\"]}}}]",
                           0, NULL);
        none = json_array();
        require(known && none);
    }
    if (size < 3) return 0;
    unsigned flags = data[0];
    const json_t *tools = flags & 4 ? known : flags & 8 ? none : NULL;
    aff_buf t = text_of(data + 3, size - 3);
    size_t a = data[1] * t.n / 255, b = a + data[2] * (t.n - a) / 255;
    aff_test_log whole = run(&t, flags, tools, t.n, t.n, 0);
    same(&whole, run(&t, flags, tools, a, b, 0));
    same(&whole, run(&t, flags, tools, 0, 0, 1));
    same(&whole, run(&t, flags, tools, 0, 0, 1 + data[1] % 16));
    aff__buf_free(&whole.text);
    arguments(&t, flags, tools);
    for (int v41 = 0; v41 < 2; v41++) {
        aff_strict s;
        require(aff__parse_strict(&s, t.s, t.n, flags & 1, v41, NULL) == AFF_OK);
        aff__strict_free(&s);
    }
    aff__buf_free(&t);
    return 0;
}
