/* text/utf8: whole characters only, at every way of cutting the bytes (spec text-and-serving 1.7). */
#include "support/test.h"
#include "text/tokenizer.h"
#include "text/utf8.h"
#include <string.h>

#define FFFD "\xEF\xBF\xBD"

static const struct {
    const char *bytes, *text;
} cases[] = {
    {"plain", "plain"},
    {"a\xF0\x9F\x98\x80z", "a\xF0\x9F\x98\x80z"},
    {"\xC3\xA9\xE4\xBD\xA0", "\xC3\xA9\xE4\xBD\xA0"},
    {"\x80", FFFD},
    {"\xFF\xFE", FFFD FFFD},
    {"\xC0\xAF", FFFD FFFD},          /* overlong */
    {"\xE0\x80\xAF", FFFD FFFD FFFD}, /* overlong: E0 80 is no head */
    {"\xE0\xA0", FFFD},               /* a held tail is one */
    {"\xE0\xA0z", FFFD "z"},          /* and so is a cut character inside */
    {"\xED\xA0\x80", FFFD FFFD FFFD}, /* surrogate */
    {"\xED\x9F\xBF", "\xED\x9F\xBF"}, /* U+D7FF */
    {"\xF0\x9F\x98", FFFD},
    {"\xF0\x9F\x98\xF0\x9F\x98\x80", FFFD "\xF0\x9F\x98\x80"},
    {"\xF0\x80\x80\x80", FFFD FFFD FFFD FFFD}, /* overlong */
    {"\xF4\x90\x80\x80", FFFD FFFD FFFD FFFD}, /* above U+10FFFF */
    {"\xF4\x8F\xBF\xBF", "\xF4\x8F\xBF\xBF"},
    {"\xF5\x80", FFFD FFFD},
    {"\xE2\x82\xE2\x82\xAC", FFFD "\xE2\x82\xAC"},
    {"\xC3\xC3\xA9", FFFD "\xC3\xA9"},
    {"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64",
     "a" FFFD FFFD FFFD "b" FFFD "c" FFFD FFFD "d"}, /* Unicode table 3-8 */
};

static void every_cut_gives_the_whole_text(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        size_t n = strlen(cases[c].bytes);
        for (unsigned cuts = 0; cuts < 1u << (n - 1); cuts++) { /* bit i: cut after byte i */
            aff_utf8_stream s = {0};
            char out[80];
            size_t w = 0, from = 0;
            for (size_t i = 0; i < n; i++) {
                if (i + 1 < n && !(cuts >> i & 1)) continue;
                w += aff__utf8_push(&s, cases[c].bytes + from, i + 1 - from, out + w);
                from = i + 1;
            }
            w += aff__utf8_flush(&s, out + w);
            assert_int_equal(w, strlen(cases[c].text));
            assert_memory_equal(out, cases[c].text, w);
        }
    }
}

static void text_is_held_no_longer_than_needed(void **state)
{
    (void)state;
    aff_utf8_stream s = {0};
    char out[32];
    assert_int_equal(aff__utf8_push(&s, "a\xF0\x9F\x98", 4, out), 1); /* the head of an emoji waits */
    assert_int_equal(aff__utf8_push(&s, "", 0, out), 0);
    assert_int_equal(aff__utf8_push(&s, "\x80!", 2, out), 5);
    assert_memory_equal(out, "\xF0\x9F\x98\x80!", 5);
    assert_int_equal(aff__utf8_flush(&s, out), 0);
    assert_int_equal(aff__utf8_push(&s, "\xBF", 1, out), 3); /* what continues nothing does not */
    assert_int_equal(aff__utf8_push(&s, "\xE0\x80", 2, out), 6);
    assert_int_equal(aff__utf8_push(&s, "\xE0", 1, out), 0);
    assert_int_equal(aff__utf8_push(&s, "\x9F", 1, out), 6); /* E0 9F can become nothing */
    assert_int_equal(s.n, 0);
}

static void first_and_prefix(void **state)
{
    (void)state;
    size_t len;
    assert_int_equal(aff__utf8_first((const uint8_t *)"\xF0\x9F\x98q", 4, &len), AFF_UTF8_INVALID);
    assert_int_equal(len, 3);
    assert_int_equal(aff__utf8_first((const uint8_t *)"\xF0\x9F\x98", 3, &len), AFF_UTF8_INCOMPLETE);
    assert_int_equal(len, 3);
    assert_int_equal(aff__utf8_first((const uint8_t *)"\0", 1, &len), AFF_UTF8_CHAR);
    assert_int_equal(aff__utf8_valid_prefix((const uint8_t *)"a\xC3\xA9\xE2\x82", 5), 3);
    assert_int_equal(aff__utf8_decode((const uint8_t *)"\xF0\x9F\x98\x80", &len), 0x1F600);
    assert_int_equal(len, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_cut_gives_the_whole_text),
        cmocka_unit_test(text_is_held_no_longer_than_needed),
        cmocka_unit_test(first_and_prefix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
