/* ui/talk: the file of a conversation, on what is wrong with it. Turns are in test_terminal. */
#include "support/test.h"
#include "base/file.h"
#include "ui/talk.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static aff_talk talk(void)
{
    aff_talk t = {0};
    aff_error err = {0};
    assert_int_equal(aff__talk_init(&t, &err), AFF_OK);
    return t;
}

static void a_saved_conversation_is_the_same(void **state)
{
    static const char text[] = "{\"system\": \"Be \\u00e4 \\\"b\\\".\", \"messages\": [{\"role\": \"user\", \"content\": \"a\\nb\"}, "
                               "{\"role\": \"assistant\", \"content\": \"\", \"reasoning_content\": \"r\"}]}\n";
    char path[] = "/tmp/aff-talk-XXXXXX", *got;
    size_t n;
    aff_error err = {0};
    aff_talk a = talk(), b = talk();
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(aff__talk_parse(&a, text, strlen(text), "x", &err), AFF_OK);
    assert_string_equal(a.system, "Be ä \"b\".");
    assert_int_equal(aff__talk_save(&a, path, &err), AFF_OK);
    assert_int_equal(aff__read_file(path, 4096, &got, &n, &err), AFF_OK);
    assert_string_equal(got, "{\"system\": \"Be ä \\\"b\\\".\", \"messages\": [{\"role\": \"user\", \"content\": \"a\\nb\"}, "
                             "{\"role\": \"assistant\", \"content\": \"\", \"reasoning_content\": \"r\"}]}\n");
    assert_int_equal(aff__talk_load(&b, path, &err), AFF_OK);
    assert_true(json_equal(a.messages, b.messages));
    assert_string_equal(a.system, b.system);
    free(got);
    unlink(path);
    aff__talk_free(&a);
    aff__talk_free(&b);
}

static void wrong_files_change_nothing(void **state)
{
    static const struct {
        const char *text, *says;
    } bad[] = {{"", "f:"},
               {"[]", "messages: expected an array"},
               {"{\"messages\": {}}", "messages: expected an array"},
               {"{\"messages\": [1]}", "message 1: role: expected user or assistant, got none"},
               {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"tool\", \"content\": \"a\"}]}",
                "message 2: role: expected user or assistant, got tool"},
               {"{\"messages\": [{\"role\": \"user\"}]}", "message 1: content"},
               {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\", \"reasoning_content\": 1}]}", "expected text"},
               {"{\"messages\": [], \"system\": 5}", "system: expected a text or null"}};
    aff_talk t = talk();
    aff_error err = {0};
    static const char good[] = "{\"system\": \"s\", \"messages\": [{\"role\": \"user\", \"content\": \"kept\"}]}";
    assert_int_equal(aff__talk_parse(&t, good, strlen(good), "f", &err), AFF_OK);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        err = (aff_error){0};
        assert_int_equal(aff__talk_parse(&t, bad[i].text, strlen(bad[i].text), "f", &err), AFF_E_FORMAT);
        if (!strstr(err.msg, bad[i].says)) fail_msg("'%s': %s", bad[i].text, err.msg);
        assert_string_equal(json_string_value(json_object_get(json_array_get(t.messages, 0), "content")), "kept");
        assert_string_equal(t.system, "s");
    }
    aff__talk_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_saved_conversation_is_the_same), cmocka_unit_test(wrong_files_change_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
