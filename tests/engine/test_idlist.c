/* engine/idlist: the forms of a list of token ids, and what is not one. */
#include "support/test.h"
#include "engine/idlist.h"
#include <stdlib.h>
#include <string.h>

static void forms_are_equal(void **state)
{
    static const char *const forms[] = {"1,20,2147483647", "1 20 2147483647\n", " 1 , 20,\n2147483647 ",
                                        "\t1\r\n20,2147483647", "001,20 02147483647"};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        aff_error err = {0};
        int32_t *id;
        int64_t n;
        assert_int_equal(aff__idlist_parse(forms[i], strlen(forms[i]), "x", &id, &n, &err), AFF_OK);
        assert_int_equal(n, 3);
        assert_int_equal(id[0], 1);
        assert_int_equal(id[1], 20);
        assert_int_equal(id[2], 2147483647);
        free(id);
    }
}

static void long_lists_are_whole(void **state)
{
    enum { N = 100000 };
    char *text = malloc(N * 7);
    size_t len = 0;
    for (int i = 0; i < N; i++) len += (size_t)sprintf(text + len, "%d%c", i, i % 3 == 1 ? ',' : ' ');
    aff_error err = {0};
    int32_t *id;
    int64_t n;
    assert_int_equal(aff__idlist_parse(text, len, "x", &id, &n, &err), AFF_OK);
    assert_int_equal(n, N);
    for (int i = 0; i < N; i++) assert_int_equal(id[i], i);
    free(id);
    free(text);
}

static void errors_name_item_and_byte(void **state)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"", "x: item 1 at byte 0: expected a token id (0 to 2147483647), got the end"},
        {" \n", "x: item 1 at byte 2: expected a token id (0 to 2147483647), got the end"},
        {"1,,2", "x: item 2 at byte 2: expected a token id (0 to 2147483647), got a comma"},
        {",1", "x: item 1 at byte 0: expected a token id (0 to 2147483647), got a comma"},
        {"1,2,", "x: item 3 at byte 4: expected a token id (0 to 2147483647), got the end"},
        {"5,-1", "x: item 2 at byte 2: expected a token id (0 to 2147483647), got '-1'"},
        {"5 2147483648", "x: item 2 at byte 2: expected a token id (0 to 2147483647), got '2147483648'"},
        {"99999999999999999999999",
         "x: item 1 at byte 0: expected a token id (0 to 2147483647), got '99999999999999999999999'"},
        {"1;2", "x: item 1 at byte 0: expected a token id (0 to 2147483647), got '1;2'"},
        {"0x10", "x: item 1 at byte 0: expected a token id (0 to 2147483647), got '0x10'"},
        {"3 caf\xc3\xa9", "x: item 2 at byte 2: expected a token id (0 to 2147483647), got 'caf\?\?'"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        aff_error err = {0};
        int32_t *id;
        int64_t n;
        assert_int_equal(aff__idlist_parse(bad[i].text, strlen(bad[i].text), "x", &id, &n, &err), AFF_E_INVALID);
        assert_string_equal(err.msg, bad[i].says);
        assert_null(id);
        assert_int_equal(n, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms_are_equal),
        cmocka_unit_test(long_lists_are_whole),
        cmocka_unit_test(errors_name_item_and_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
