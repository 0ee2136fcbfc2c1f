/* text/pretokenize: the cuts of the three patterns (spec text-and-serving 1.5) as the tokenizers package makes them. */
#include "support/test.h"
#include "text/pretokenize.h"
#include "text/unicode.h"
#include <string.h>

/* The pieces of a text, which is their concatenation. */
static const char *const cuts[][8] = {
    {"123", "456", "7"},
    {"½１２", "x", "3"},
    {"フ", "\343\202\240"},
    {"っ", "\343\201\200あ"},
    {"カ", "・", "カ", "・・", "\n"},
    {"か\343\202\231き\343\202\231"},
    {"\343\202\231か"},
    {"・", "\n\n"},
    {"中", "・", "a"},
    {"中", "\343\200\200", "文"},
    {"\343\200\200 ", "中"},
    {"don", "'t"},
    {"(a", ")b"},
    {"_ab", "_c"},
    {"!!", "a", "\r\n\n", "b"},
    {"a", " ", " b"},
    {"a", "   ", "1"},
    {"  \n \n", " ", " x"},
    {" \t", "中"},
    {"\n\n", "\314\201a"},
    {"\314\201\314\201"},
    {" \314\201"},
    {"\001", "\002a", "\001"},
    {"\342\200\213\342\200\213", "!"},
    {"a", "\302\240b"},
    {" …\r\n\n"},
    {"\r", "!\n"},
    {"\ta"},
    {"\343\200\200a", "\343\200\200", "\343\200\200b"},
    {"1", "\n\n", "2", " "},
    {"é", "!", "É"},
    {"＃", "ab"},
    {"𠮷", "野家"},
    {"e\314\201", "!e"},
};

static void pieces(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
        char text[64] = "";
        for (size_t p = 0; cuts[c][p]; p++) strcat(text, cuts[c][p]);
        size_t n = strlen(text), at = 0;
        for (size_t p = 0; cuts[c][p]; p++) {
            size_t len = aff__piece_end((const uint8_t *)text + at, n - at);
            if (len != strlen(cuts[c][p])) print_error("\"%s\": piece %zu has %zu bytes\n", text, p, len);
            assert_int_equal(len, strlen(cuts[c][p]));
            at += len;
        }
        assert_int_equal(at, n);
    }
}

/* Sizes of the categories in Unicode 16.0; older tables have fewer. */
static void unicode_16(void **state)
{
    (void)state;
    int n[8] = {0}, cjk = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        n[aff__char_class(c) & 7]++;
        cjk += (aff__char_class(c) & AFF_CHAR_CJK) != 0;
    }
    assert_int_equal(n[AFF_CHAR_NUMBER], 1911);
    assert_int_equal(n[AFF_CHAR_MARK], 2501);
    assert_int_equal(n[AFF_CHAR_SYMBOL], 855 + 8514);
    assert_int_equal(n[AFF_CHAR_SPACE], 25);
    assert_int_equal(n[6] + n[7], 0);
    assert_int_equal(cjk, 0x9FA5 - 0x4E00 + 1 + 192);
    assert_int_equal(aff__char_class(0x10D40), AFF_CHAR_NUMBER); /* Garay, new in 16.0 */
    assert_int_equal(aff__char_class(0x10FFFF), AFF_CHAR_OTHER);
    assert_int_equal(aff__char_class(0xE01EF), AFF_CHAR_MARK);
    assert_int_equal(aff__char_class(0x30FB), AFF_CHAR_SYMBOL + AFF_CHAR_CJK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces),
        cmocka_unit_test(unicode_16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
