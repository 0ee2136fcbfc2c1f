/* text/tokenizer_load: what a tokenizer.json may be, and what each broken one is refused with. */
#include "support/test.h"
#include "support/v4_tokenizer.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The small file with its first `from` replaced by `to`. */
static aff_test_text edited(const char *from, const char *to)
{
    aff_test_text t = aff_test_small_json(), out = {0};
    char *at = strstr(t.s, from);
    if (!at) print_error("the small file has no %s\n", from);
    assert_non_null(at);
    aff_test_add(&out, "%.*s%s%s", (int)(at - t.s), t.s, to, at + strlen(from));
    free(t.s);
    return out;
}

static aff_status open_text(aff_tokenizer **t, const aff_test_text *json, int64_t vocab_size, aff_error *err)
{
    *err = (aff_error){0};
    *t = NULL;
    return aff__tokenizer_open_memory(t, json->s, json->n, "small.json", vocab_size, err);
}

static void expect(const aff_tokenizer *t, const char *text, const uint32_t *id, size_t n)
{
    aff_ids ids = {0};
    aff_error err = {0};
    assert_int_equal(aff__tokenizer_encode(t, text, strlen(text), true, &ids, &err), AFF_OK);
    assert_int_equal(ids.n, n);
    assert_memory_equal(ids.id, id, n * sizeof *id);
    aff__ids_free(&ids);
}

#define EXPECT(t, text, ...)                                                                                           \
    do {                                                                                                               \
        static const uint32_t id_[] = {__VA_ARGS__};                                                                   \
        expect(t, text, id_, sizeof id_ / sizeof *id_);                                                                \
    } while (0)

static void small_vocabularies_load(void **state)
{
    (void)state;
    aff_test_text json = aff_test_small_json();
    aff_tokenizer *t;
    aff_error err;
    assert_int_equal(open_text(&t, &json, 262, &err), AFF_OK);
    assert_int_equal(aff__tokenizer_size(t), 262);
    EXPECT(t, "<s>abcab a<｜x｜></s>", 0, 260, 259, 223, 67, 261, 1);
    EXPECT(t, "cab", 69, 259);
    aff__tokenizer_free(t);
    assert_int_equal(open_text(&t, &json, 262, &err), AFF_OK);
    aff__tokenizer_free(t);
    free(json.s);
    aff__tokenizer_free(NULL);
}

/* In V4 no added token is the head of another, and no two of different passes overlap; in a file they may. */
static void added_tokens_longest_first_then_second_pass(void **state)
{
    (void)state;
    aff_test_text json =
        edited("],\"normalizer\"", ",{\"id\":262,\"content\":\"<s>!\",\"special\":true},"
                                   "{\"id\":263,\"content\":\"q<<\",\"normalized\":true},"
                                   "{\"id\":264,\"content\":\"q<\",\"normalized\":true}],\"normalizer\"");
    aff_tokenizer *t;
    aff_error err;
    assert_int_equal(open_text(&t, &json, 0, &err), AFF_OK);
    EXPECT(t, "<s>!<s>?", 262, 0, 33);
    EXPECT(t, "q<<q<", 263, 264);
    EXPECT(t, "q<<s>", 264, 0); /* <s> is found in the first pass, though q<< starts further left */
    assert_int_equal(aff__tokenizer_find(t, "q<"), 264);
    aff_segment seg[] = {{"<s>", 3, true}, {"!", 1, false}};
    aff_ids ids = {0};
    assert_int_equal(aff__tokenizer_encode_segments(t, seg, 2, &ids, &err), AFF_OK);
    assert_int_equal(ids.n, 2);
    assert_int_equal(ids.id[0], 0); /* the longer one is not all template */
    assert_int_equal(ids.id[1], 3);
    aff__ids_free(&ids);
    aff__tokenizer_free(t);
    free(json.s);
}

static void refuse(const aff_test_text *json, int64_t vocab_size, const char *message)
{
    aff_tokenizer *t;
    aff_error err;
    aff_status s = open_text(&t, json, vocab_size, &err);
    if (!strstr(err.msg, message)) print_error("expected \"%s\"\n     got \"%s\"\n", message, err.msg);
    assert_int_equal(s, AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, message));
    assert_memory_equal(err.msg, "small.json: ", 12);
    assert_null(strchr(err.msg, '\n'));
    assert_null(t);
}

static const struct {
    const char *from, *to, *message;
    int64_t vocab_size;
} broken[] = {
    {"\"vocab\":{", "\"vocab\":3,\"x\":{", "model.vocab: expected an object, got an integer", 0},
    {"\"merges\":[", "\"merged\":[", "model.merges: expected an array, got nothing", 0},
    {"\"added_tokens\":[", "\"added_tokens\":null,\"x\":[", "added_tokens: expected an array, got null", 0},
    {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model.type: expected \"BPE\", got \"Unigram\"", 0},
    {"\"byte_fallback\":false", "\"byte_fallback\":true", "model.byte_fallback: this option is not known", 0},
    {"\"dropout\":null", "\"dropout\":0.1", "model.dropout: this option is not known", 0},
    {"\"normalizers\":[]", "\"normalizers\":[{\"type\":\"NFC\"}]", "normalizer.normalizers: this option is not known",
     0},
    {"{\"type\":\"Sequence\",\"normalizers\":[]}", "{\"type\":\"NFC\"}",
     "normalizer.type: expected \"Sequence\", got \"NFC\"", 0},
    {"\\\\p{N}{1,3}", "\\\\p{N}{1,2}", "pretokenizers[0].Regex: expected \"\\p{N}{1,3}\", got \"\\p{N}{1,2}\"", 0},
    {"{\"Regex\":\"[\\u4e00", "{\"String\":\"[\\u4e00", "pretokenizers[1].Regex: expected \"[", 0},
    {"\"Isolated\"", "\"Removed\"", "pretokenizers[0].behavior: expected \"Isolated\", got \"Removed\"", 0},
    {"\"invert\":false", "\"invert\":true", "pretokenizers[0].invert: this option is not known", 0},
    {"{\"type\":\"Split\"", "{\"type\":\"Digits\"", "pretokenizers[0].type: expected \"Split\", got \"Digits\"", 0},
    {"{\"type\":\"Sequence\",\"pretok", "{\"type\":\"Whitespace\",\"pretok",
     "pre_tokenizer.type: expected \"Sequence\"", 0},
    {"\"pretokenizers\":[", "\"pretokenizers\":[{},", "expected 3 Split and a ByteLevel, got 5 steps", 0},
    {"\"trim_offsets\":true,\"use_regex\":false", "\"trim_offsets\":true",
     "pretokenizers[3].use_regex: expected false, got nothing", 0},
    {"\"add_prefix_space\":false", "\"add_prefix_space\":true",
     "pretokenizers[3].add_prefix_space: expected false, got true", 0},
    {"\"post_processor\":{\"type\":\"ByteLevel\"", "\"post_processor\":{\"type\":\"TemplateProcessing\"",
     "post_processor.type: expected \"ByteLevel\"", 0},
    {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"Fuse\"",
     "decoder.type: expected \"ByteLevel\", got \"Fuse\"", 0},
    {"\"!\":3", "\"!\":\"3\"", "token \"!\": expected an integer id, got a string", 0},
    {"\"!\":3", "\"!\":-3", "token \"!\": expected an id in 0..262 (the file has 263 tokens), got -3", 0},
    {"\"!\":3", "\"!\":9000000000", "token \"!\": expected an id in 0..262 (the file has 263 tokens), got 9000000000",
     0},
    {"\"!\":3", "\"!\":4", "id 4 twice: ", 0},
    {"\"!\":3", "\"!\":262", "no token has id 3; expected every id from 0 to 262", 0},
    {"\"!\":3", "\"!!\":3", "expected a token for each byte, got none for 0x21", 0},
    {"\"!\":3", "\"\\u1234\":3", "(id 3): U+1234 stands for no byte, and it is not an added token", 0},
    {"\"!\":3", "\"\\n\":3", "model.vocab: \"?\" (id 3): U+000A stands for no byte", 0},
    {"\"id\":261", "\"id\":260", "id 260 twice: \"abc\" and \"<｜x｜>\"", 0},
    {"\"id\":261", "\"id\":2", "added_tokens[3]: id 2 twice: \"<pad>\" and \"<｜x｜>\"", 0},
    {"\"id\":261", "\"id\":false", "token \"<｜x｜>\": expected an integer id, got false", 0},
    {"\"<s>\":0", "\"<s>\":261", "added_tokens[0]: \"<s>\": expected id 261 as in model.vocab, got 0", 0},
    {"\"content\":\"</s>\"", "\"content\":\"<pad>\"", "added_tokens: \"<pad>\" twice, with ids 1 and 2", 0},
    {"\"content\":\"</s>\"", "\"content\":\"\"", "added_tokens[1].content: expected a string that is not empty", 0},
    {"\"lstrip\":false", "\"lstrip\":true", "added_tokens[0].lstrip: this option is not known", 0},
    {"\"a b\",\"ab c\"", "\"a b\"",
     "model.merges: expected 2 merges (vocabulary of 259 without 1 control tokens and 256 bytes), got 1", 0},
    {"\"a b\",\"ab c\"", "\"ab c\",\"a b\"", "model.merges[0]: expected \"ab\" + \"c\" to make id 259, which is \"ab\"",
     0},
    {"\"a b\",\"ab c\"", "\"a b\",\"abd c\"", "model.merges[1]: \"abd\" is not in model.vocab", 0},
    {"\"a b\",\"ab c\"", "\"a b\",\"ab\"", "model.merges[1]: expected two tokens and one space, got \"ab\"", 0},
    {"\"a b\",\"ab c\"", "\"a b\",\"ab c d\"", "model.merges[1]: expected two tokens and one space, got \"ab c d\"", 0},
    {"\"a b\",\"ab c\"", "\"a b\",[\"ab\"]",
     "model.merges[1]: expected \"left right\" or [\"left\", \"right\"], got an array", 0},
    {"\"a b\",\"ab c\"", "\"a b\",\"<s> c\"", "model.merges[1]: \"<s>\" is an added token", 0},
    {"\"version\"", "\"version\"", "token \"<｜x｜>\": expected an id below the model's vocab_size 261, got 261", 261},
    {"\"version\"", "\"version\"", "expected 263 tokens as the model's vocab_size says, got 262", 263},
    {"\"version\"", "\"version\"", "entries of model.vocab: expected 128000 for a vocab_size of 129280, got 259",
     129280},
};

static void broken_files_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        aff_test_text json = edited(broken[i].from, broken[i].to);
        refuse(&json, broken[i].vocab_size, broken[i].message);
        free(json.s);
    }
}

static void truncated_files_are_refused(void **state)
{
    (void)state;
    aff_test_text json = aff_test_small_json();
    for (size_t n = 0; n < json.n; n += 37) {
        aff_test_text cut = {json.s, n, 0};
        refuse(&cut, 0, "small.json");
    }
    free(json.s);
}

/* A released file with one id off: spec 1.2. */
static void full_size_numbers_are_asserted(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to, *message;
    } swaps[] = {
        {"\"<think>\"", "\"<thonk>\"", "\"<think>\": expected id 128821 for a vocab_size of 129280, got -1"},
        {"\"<｜User｜>\"", "\"<｜user｜>\"", "\"<｜User｜>\": expected id 128803"},
    };
    for (size_t i = 0; i < sizeof swaps / sizeof *swaps; i++) {
        aff_test_text json = aff_test_v4_json(false);
        char *at = strstr(json.s, swaps[i].from);
        assert_non_null(at);
        memcpy(at, swaps[i].to, strlen(swaps[i].to));
        refuse(&json, 129280, swaps[i].message);
        free(json.s);
    }
}

static void files_and_folders(void **state)
{
    (void)state;
    char dir[] = "/tmp/aff_tokenizer_XXXXXX", path[64];
    aff_test_text json = aff_test_small_json();
    aff_tokenizer *t = NULL;
    aff_error err = {0};
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    assert_int_equal(aff__tokenizer_open(&t, dir, 0, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, path));
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(json.s, 1, json.n, f), json.n);
    fclose(f);
    assert_int_equal(aff__tokenizer_open(&t, dir, 262, &err), AFF_OK);
    aff__tokenizer_free(t);
    assert_int_equal(aff__tokenizer_open(&t, path, 262, &err), AFF_OK);
    aff__tokenizer_free(t);
    assert_int_equal(truncate(path, (off_t)json.n / 2), 0);
    assert_int_equal(aff__tokenizer_open(&t, path, 262, &err), AFF_E_FORMAT);
    assert_memory_equal(err.msg, path, strlen(path));
    unlink(path);
    rmdir(dir);
    free(json.s);
}

/* Every allocation may fail; then the call says so and leaves `out` as it was. */
static void out_of_memory_is_an_error(void **state)
{
    (void)state;
    aff_test_text json = aff_test_small_json();
    aff_tokenizer *t = NULL;
    aff_error err;
    aff_status s = AFF_E_NOMEM;
    unsigned n = 0;
    while (s == AFF_E_NOMEM) {
        aff__alloc_fail_after(++n);
        s = open_text(&t, &json, 0, &err);
    }
    aff__alloc_fail_after(0);
    assert_int_equal(s, AFF_OK);
    assert_true(n > 8);
    char text[200] = "<s>\xFF";
    memset(text + 4, 'z', sizeof text - 4);
    aff_segment seg[] = {{text, sizeof text, true}, {"abc", 3, false}};
    aff_ids ids = {0};
    assert_int_equal(aff__ids_push(&ids, 5, &err), AFF_OK);
    n = 0;
    for (s = AFF_E_NOMEM; s == AFF_E_NOMEM;) {
        assert_int_equal(ids.n, 1);
        aff__alloc_fail_after(++n);
        s = aff__tokenizer_encode_segments(t, seg, 2, &ids, &err);
    }
    aff__alloc_fail_after(0);
    assert_int_equal(s, AFF_OK);
    assert_true(n > 4);
    assert_int_equal(ids.n, 1 + 1 + 3 + 196 + 1); /* the one before, <s>, U+FFFD in bytes, z's, abc */
    assert_int_equal(ids.id[ids.n - 1], 260);
    aff__ids_free(&ids);
    aff__tokenizer_free(t);
    free(json.s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_vocabularies_load),        cmocka_unit_test(added_tokens_longest_first_then_second_pass),
        cmocka_unit_test(broken_files_are_refused),       cmocka_unit_test(truncated_files_are_refused),
        cmocka_unit_test(full_size_numbers_are_asserted), cmocka_unit_test(files_and_folders),
        cmocka_unit_test(out_of_memory_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
