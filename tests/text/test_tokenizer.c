/* text/tokenizer: exact ids at full vocabulary size (spec text-and-serving 1). */
#include "support/test.h"
#include "support/v4_tokenizer.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static aff_tokenizer *v4;

/* Spec 1.10. */
static const struct {
    const char *text;
    size_t n;
    uint32_t id[26];
} golden[] = {
    {"Hello, world!", 4, {19923, 14, 2058, 3}},
    {"The capital of France is", 5, {671, 6102, 294, 8760, 344}},
    {"12345 67", 4, {6895, 1883, 223, 3186}},
    {"    int x = 10;\n\treturn x;\n", 10, {361, 688, 1527, 438, 223, 553, 510, 5562, 1527, 510}},
    {"\n  \n", 1, {67130}},
    {"a\n\n  \n  b", 5, {67, 271, 2143, 223, 291}},
    {"x \n y", 3, {90, 539, 383}},
    {"”,", 1, {3594}},
    {"…\n\n", 1, {7513}},
    {"，\n\n", 1, {8485}},
    {"。)", 1, {83806}},
    {"’;", 1, {77377}},
    {"“Hello” — she said…", 7, {428, 19923, 430, 2136, 1225, 1359, 1248}},
    {"price: €5.00", 6, {18785, 28, 21820, 23, 16, 504}},
    {"😀 hi", 3, {28927, 225, 19346}},
    {"café naïve", 4, {69, 2797, 619, 112752}},
    {"e\314\201", 2, {71, 17793}},
    {"Здравствуй, мир!", 8, {14829, 828, 8226, 17674, 1443, 14, 74779, 3}},
    {"½ cup", 2, {23951, 9778}},
    {"１２３４５", 4, {127167, 25081, 33095, 31953}},
    {"x\302\240y", 3, {90, 2162, 91}},
    {"a\342\200\213b", 3, {67, 35020, 68}},
    {"한국어 테스트.", 6, {5634, 17564, 9227, 78758, 45652, 16}},
    {"हिन्दी भाषा", 6, {18359, 112789, 8714, 32443, 101344, 3350}},
    {"你好，世界！", 4, {30594, 303, 3427, 1175}},
    {"日本語のテキスト、カタカナ。", 11, {88768, 1576, 17383, 20367, 24552, 410, 15961, 11767, 15961, 27071, 320}},
    {"مرحبا بالعالم", 6, {10393, 2212, 53067, 9254, 1183, 14059}},
    {"สวัสดีครับ", 5, {2952, 34189, 2952, 25581, 79813}},
    {"𠮷野家", 6, {175, 257, 109, 118, 6230, 817}},
    {"don't I'm", 4, {20385, 1664, 342, 4571}},
    {"foo_bar.baz(qux)", 8, {40897, 100869, 6229, 1521, 10, 403, 90, 11}},
    {"\r\n\r\nif (a) {\r\n", 11, {204, 201, 204, 201, 394, 343, 67, 11, 680, 204, 201}},
    {"  123", 2, {262, 6895}},
    {"a  1", 3, {67, 262, 19}},
    {"$100 + 5% = <tag>", 10, {6, 1457, 940, 223, 23, 7, 438, 818, 24164, 32}},
    {"\007;a", 2, {198, 78809}},
    {">;\n\n", 1, {92706}},
    {"Done.\n\n<｜DSML｜tool_calls>", 8, {68520, 339, 30, 128825, 72461, 4941, 12548, 32}},
    {"<think>\n\n</think>", 3, {128821, 271, 128822}},
    {"<｜User｜>你好<｜Assistant｜><think>推理</think>答案<｜end▁of▁sentence｜>",
     8,
     {128803, 30594, 128804, 128821, 36101, 128822, 7624, 1}},
    {"Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ", 26, {19923, 3,    223,   5464, 5008, 1175,  19,    940, 223,
                                                19,    438,  223,   20,   6113, 257,   76589, 131, 100,
                                                76032, 1628, 76589, 131,  108,  76589, 131,   98}},
};
enum { GOLDEN = sizeof golden / sizeof *golden };

static int load_v4(void **state)
{
    (void)state;
    v4 = aff_test_v4_tokenizer();
    return 0;
}

static int free_v4(void **state)
{
    (void)state;
    aff__tokenizer_free(v4);
    return 0;
}

static void expect_ids(const aff_ids *got, const uint32_t *id, size_t n)
{
    assert_int_equal(got->n, n);
    if (n) assert_memory_equal(got->id, id, n * sizeof *id);
}

/* Encodes and compares. */
static void expect(const char *text, size_t len, bool added, const uint32_t *id, size_t n)
{
    aff_ids ids = {0};
    aff_error err = {0};
    assert_int_equal(aff__tokenizer_encode(v4, text, len, added, &ids, &err), AFF_OK);
    expect_ids(&ids, id, n);
    aff__ids_free(&ids);
}

#define EXPECT(text, added, ...)                                                                                       \
    do {                                                                                                               \
        static const uint32_t id_[] = {__VA_ARGS__};                                                                   \
        expect(text, sizeof(text) - 1, added, id_, sizeof id_ / sizeof *id_);                                          \
    } while (0)

static void golden_vectors(void **state)
{
    (void)state;
    assert_int_equal(GOLDEN, 41);
    for (int i = 0; i < GOLDEN; i++) {
        expect(golden[i].text, strlen(golden[i].text), true, golden[i].id, golden[i].n);
        aff_test_text t = {0}; /* and back */
        for (size_t k = 0; k < golden[i].n; k++) {
            size_t n;
            const char *s = aff__tokenizer_bytes(v4, golden[i].id[k], &n);
            aff_test_add(&t, "%.*s", (int)n, s);
        }
        assert_string_equal(t.s, golden[i].text);
        free(t.s);
    }
    expect("", 0, true, NULL, 0);
    EXPECT("x\0y", true, 90, 191, 91);
}

static uint64_t fnv(const aff_ids *ids)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < ids->n; i++)
        for (int b = 0; b < 32; b += 8) h = (h ^ (ids->id[i] >> b & 255)) * 0x100000001b3u;
    return h;
}

static size_t put_char(char *out, uint32_t c)
{
    if (c < 0x80) return out[0] = (char)c, 1;
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    out[0] = (char)((0xF00u >> n) | c >> 6 * (n - 1));
    for (size_t i = 1; i < n; i++) out[i] = (char)(0x80 | (c >> 6 * (n - 1 - i) & 63));
    return n;
}

static void expect_bulk(const char *text, size_t len, size_t expected_len, size_t n, uint64_t hash)
{
    aff_ids ids = {0};
    aff_error err = {0};
    assert_int_equal(len, expected_len);
    assert_int_equal(aff__tokenizer_encode(v4, text, len, true, &ids, &err), AFF_OK);
    assert_int_equal(ids.n, n);
    assert_true(fnv(&ids) == hash);
    aff__ids_free(&ids);
}

static size_t fill(char *buf, uint32_t from, uint32_t to, const char *before, const char *after)
{
    size_t w = 0;
    for (uint32_t c = from; c <= to; c++) {
        if (c >= 0xD800 && c <= 0xDFFF) continue;
        w += (size_t)sprintf(buf + w, "%s", before);
        w += put_char(buf + w, c);
        w += (size_t)sprintf(buf + w, "%s", after);
    }
    return w;
}

static size_t repeat(char *buf, int times, const char *s)
{
    size_t w = 0;
    while (times-- > 0) w += (size_t)sprintf(buf + w, "%s", s);
    return w;
}

/* Spec 1.10, the table of bulk texts. */
static void bulk_texts(void **state)
{
    (void)state;
    char *b = malloc(400000);
    assert_non_null(b);
    expect_bulk(b, fill(b, 0, 0xFFFF, "", ""), 188288, 146755, 0x817fa36e29132e6fu);
    expect_bulk(b, fill(b, 0, 0xFFFF, "", "a"), 251776, 209706, 0xa29fc93ad52ed362u);
    expect_bulk(b, fill(b, 0, 0xFFFF, " ", "\n"), 315264, 251614, 0x7d60adcbfd68a24cu);
    expect_bulk(b, fill(b, 0, 0xFFFF, "x", "1"), 315264, 273805, 0x182d2803b1f143d2u);
    expect_bulk(b, fill(b, 0x10000, 0x1FFFF, "", " "), 327680, 288126, 0x14da2495b8fd4523u);
    expect_bulk(b, repeat(b, 10000, "a"), 10000, 1250, 0xaadce95031125a89u);
    expect_bulk(b, repeat(b, 5000, "中"), 15000, 5000, 0xd765ac303fb6c395u);
    expect_bulk(b, repeat(b, 3000, " "), 3000, 25, 0xac9acf8e02d207b4u);
    expect_bulk(b, repeat(b, 1000, "\n"), 1000, 63, 0xb881f4e10bb35478u);
    expect_bulk(b, repeat(b, 5000, "="), 5000, 78, 0xb7c10ef10271f51eu);
    expect_bulk(b, repeat(b, 300, "0123456789"), 3000, 1000, 0x3aa9a8d10b2edd55u);
    free(b);
}

/* Pieces of 1 MB; counts and hashes from the tokenizers package. Quadratic merging would take hours. */
static void long_pieces(void **state)
{
    (void)state;
    enum { LETTERS = 1 << 20, CHARS = 350000 };
    char *b = malloc(3 * CHARS);
    uint64_t seed = 1;
    size_t w = 0;
    assert_non_null(b);
    for (; w < LETTERS; w++) b[w] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[aff__splitmix64(&seed) % 52];
    expect_bulk(b, w, LETTERS, 667203, 0x51f560676a0a4ad1u);
    seed = 2;
    w = 0;
    for (int i = 0; i < CHARS; i++) w += put_char(b + w, (uint32_t)(0x4E00 + aff__splitmix64(&seed) % 0x51A6));
    expect_bulk(b, w, 3 * CHARS, 613397, 0xe86915865c04c70eu);
    free(b);
}

/* Random texts with the ids that the tokenizers package gives (check_random.py --sample). */
static void same_as_tokenizers_package(void **state)
{
    (void)state;
    char *data;
    size_t size, i, k;
    aff_error err = {0};
    json_t *row, *id;
    assert_int_equal(aff__read_file(AFF_TESTS_DIR "/text/hf_sample.json", 1 << 20, &data, &size, &err), AFF_OK);
    json_t *rows = json_loadb(data, size, JSON_ALLOW_NUL, NULL);
    assert_int_equal(json_array_size(rows), 2000);
    json_array_foreach(rows, i, row)
    {
        const json_t *text = json_array_get(row, 0), *list = json_array_get(row, 1);
        uint32_t ids[512];
        assert_true(json_array_size(list) <= 512);
        json_array_foreach(list, k, id) ids[k] = (uint32_t)json_integer_value(id);
        expect(json_string_value(text), json_string_length(text), true, ids, k);
    }
    json_decref(rows);
    free(data);
}

static void invalid_utf8_counts_as_replacement(void **state)
{
    (void)state;
    EXPECT("a\xFF"
           "b",
           true, 67, 2808, 68);
    EXPECT("\xE2\x82", true, 2808);
    EXPECT("a\xF0\x9F\x98\xC0", true, 67, 4341);
    EXPECT("\xED\xA0\x80", true, 29429);
    EXPECT("<think>\xFF</think>", true, 128821, 2808, 128822);
}

/* The third pattern cuts the runs of the second one too: punctuation and unassigned characters among kana stand alone.
 */
static void cuts_within_kana(void **state)
{
    (void)state;
    EXPECT("フ\xE3\x82\xA0", true, 15587, 665, 257);
    EXPECT("っ\xE3\x81\x80", true, 4964, 415, 225);
    EXPECT("フ\xE3\x82\x98ざ", true, 15587, 665, 249, 51060);
}

static void control_tokens_can_be_left_alone(void **state)
{
    (void)state;
    EXPECT("<think>", true, 128821);
    EXPECT("<think>", false, 30, 37947, 32);
    EXPECT("<｜User｜>", false, 30, 28217, 6756, 28217, 32);
    EXPECT("<｜DSML｜tool_calls>", false, 30, 28217, 10525, 7398, 28217, 72461, 4941, 12548, 32);
}

static void expect_segments(const aff_segment *seg, size_t n_seg, const uint32_t *id, size_t n)
{
    aff_ids ids = {0};
    aff_error err = {0};
    assert_int_equal(aff__ids_push(&ids, 7, &err), AFF_OK); /* they are appended */
    assert_int_equal(aff__tokenizer_encode_segments(v4, seg, n_seg, &ids, &err), AFF_OK);
    assert_int_equal(ids.n, n + 1);
    assert_int_equal(ids.id[0], 7);
    if (n) assert_memory_equal(ids.id + 1, id, n * sizeof *id);
    aff__ids_free(&ids);
}

#define T(s) {s, sizeof(s) - 1, true}  /* template */
#define C(s) {s, sizeof(s) - 1, false} /* caller */
#define SEGMENTS(...)                                                                                                  \
    (const aff_segment[]){__VA_ARGS__}, sizeof((const aff_segment[]){__VA_ARGS__}) / sizeof(aff_segment)
#define IDS(...) (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t)

static void control_text_of_callers_is_text(void **state)
{
    (void)state;
    expect_segments(SEGMENTS(T("<｜User｜>"), C("</think>"), T("<｜Assistant｜><think>")),
                    IDS(128803, 1718, 37947, 32, 128804, 128821));
    /* The seam moves no piece: ">\n\n" is one. */
    expect_segments(SEGMENTS(C("system</think>"), T("\n\n## Tools")), IDS(27824, 1718, 37947, 4697, 372, 27193));
    expect_segments(SEGMENTS(T("Hel"), C("lo, wor"), C("ld"), T("!")), IDS(19923, 14, 2058, 3));
    /* A marker is one only if all of it is the template's. */
    expect_segments(SEGMENTS(T("<thi"), C("nk>")), IDS(30, 37947, 32));
    expect_segments(SEGMENTS(C("<thi"), T("nk>")), IDS(30, 37947, 32));
    expect_segments(SEGMENTS(T("<thi"), C("n"), T("k>")), IDS(30, 37947, 32));
    expect_segments(SEGMENTS(T("<thi"), C(""), T("nk>")), IDS(128821));
    expect_segments(SEGMENTS(C("<"), T("｜DSML｜tool"), C("_calls>")), IDS(30, 128825, 72461, 4941, 12548, 32));
    expect_segments(SEGMENTS(C("a\xE2\x82"), C("\xAC"
                                               "b")),
                    IDS(67, 4341, 68)); /* a segment is a text of its own */
    expect_segments(NULL, 0, NULL, 0);
    expect_segments(SEGMENTS({NULL, 0, false}, {NULL, 0, true}), NULL, 0);
}

/* What has ids keeps them, whatever its text, and its neighbours are tokenised as if nothing stood beyond them. */
static void ids_that_are_there_stay(void **state)
{
    expect_segments(SEGMENTS(T("<｜User｜>"), {"Hello", 5, false, IDS(9, 8)}, T("</think>")),
                    IDS(128803, 9, 8, 128822));
    expect_segments(SEGMENTS(C("Hel"), {"x", 1, true, IDS(5)}, C("lo, wor"), C("ld")), IDS(14505, 5, 4979, 14, 2058));
    expect_segments(
        SEGMENTS({"</think>", 8, true, IDS(5)}, {"", 0, false, IDS(6)}, {"\xff", 1, false, IDS(7, 7, 7)}, C("!")),
        IDS(5, 6, 7, 7, 7, 3));
}

/* However a text is cut: template parts are as the whole, caller parts as the whole without control tokens. */
static void cuts_do_not_matter(void **state)
{
    (void)state;
    aff_ids plain = {0};
    aff_error err = {0};
    for (int g = 0; g < GOLDEN; g++) {
        const char *s = golden[g].text;
        size_t n = strlen(s);
        plain.n = 0;
        assert_int_equal(aff__tokenizer_encode(v4, s, n, false, &plain, &err), AFF_OK);
        for (size_t a = 0; a <= n; a++)
            for (size_t b = a; b <= n; b++) {
                if ((s[a] & 0xC0) == 0x80 || (s[b] & 0xC0) == 0x80) continue;
                aff_segment seg[3] = {{s, a, true}, {s + a, b - a, true}, {s + b, n - b, true}};
                expect_segments(seg, 3, golden[g].id, golden[g].n);
                seg[0].added = seg[1].added = seg[2].added = false;
                expect_segments(seg, 3, plain.id, plain.n);
            }
    }
    aff__ids_free(&plain);
}

static void lookups(void **state)
{
    (void)state;
    size_t n;
    assert_int_equal(aff__tokenizer_size(v4), 129280);
    assert_int_equal(aff__tokenizer_find(v4, "<｜end▁of▁sentence｜>"), 1);
    assert_int_equal(aff__tokenizer_find(v4, "<|EOT|>"), 128805);
    assert_int_equal(aff__tokenizer_find(v4, "</dsml:"), 128841);
    assert_int_equal(aff__tokenizer_find(v4, "<|place_holder_mm_span_0435|>"), 129261);
    assert_int_equal(aff__tokenizer_find(v4, "<think"), -1);
    assert_int_equal(aff__tokenizer_find(v4, "the"), -1);
    assert_int_equal(aff__tokenizer_find(v4, ""), -1);
    assert_true(aff__tokenizer_is_special(v4, 1));
    assert_true(aff__tokenizer_is_special(v4, 128846));
    assert_false(aff__tokenizer_is_special(v4, 128805));
    assert_false(aff__tokenizer_is_special(v4, 128821));
    assert_false(aff__tokenizer_is_special(v4, 19923));
    assert_false(aff__tokenizer_is_special(v4, 129280));
    assert_memory_equal(aff__tokenizer_bytes(v4, 28927, &n), "\xF0\x9F\x98", 3);
    assert_int_equal(n, 3);
    assert_memory_equal(aff__tokenizer_bytes(v4, 223, &n), " ", 1);
    assert_memory_equal(aff__tokenizer_bytes(v4, 191, &n), "\0", 1);
    assert_int_equal(n, 1);
    assert_memory_equal(aff__tokenizer_bytes(v4, 97, &n), "\xA1", 1);
    (void)aff__tokenizer_bytes(v4, 129280, &n);
    assert_int_equal(n, 0);
    (void)aff__tokenizer_bytes(v4, UINT32_MAX, &n);
    assert_int_equal(n, 0);
}

/* The newer form of the file, and a count that is not asserted. */
static void merges_as_pairs(void **state)
{
    (void)state;
    aff_test_text json = aff_test_v4_json(true);
    aff_tokenizer *kept = v4, *t;
    aff_error err = {0};
    assert_int_equal(aff__tokenizer_open_memory(&t, json.s, json.n, "v4", 0, &err), AFF_OK);
    free(json.s);
    v4 = t;
    for (int i = 0; i < GOLDEN; i++) expect(golden[i].text, strlen(golden[i].text), true, golden[i].id, golden[i].n);
    v4 = kept;
    aff__tokenizer_free(t);
}

static void encode_all_golden(void *ctx, int64_t task, int thread)
{
    aff_ids *ids = (aff_ids *)ctx + task;
    aff_error err = {0};
    for (int i = 0; i < GOLDEN; i++)
        (void)aff__tokenizer_encode(v4, golden[i].text, strlen(golden[i].text), true, ids, &err);
}

static void one_tokenizer_many_threads(void **state)
{
    (void)state;
    enum { TASKS = 16 };
    aff_ids ids[TASKS] = {0};
    aff_pool *pool;
    aff_error err = {0};
    assert_int_equal(aff__pool_create(&pool, 4, &err), AFF_OK);
    aff__pool_run(pool, encode_all_golden, ids, TASKS);
    aff__pool_free(pool);
    for (int i = 0; i < TASKS; i++) {
        size_t at = 0;
        for (int g = 0; g < GOLDEN; at += golden[g++].n)
            assert_memory_equal(ids[i].id + at, golden[g].id, golden[g].n * 4);
        assert_int_equal(ids[i].n, at);
        aff__ids_free(&ids[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_vectors),
        cmocka_unit_test(bulk_texts),
        cmocka_unit_test(long_pieces),
        cmocka_unit_test(same_as_tokenizers_package),
        cmocka_unit_test(invalid_utf8_counts_as_replacement),
        cmocka_unit_test(cuts_within_kana),
        cmocka_unit_test(control_tokens_can_be_left_alone),
        cmocka_unit_test(control_text_of_callers_is_text),
        cmocka_unit_test(ids_that_are_there_stay),
        cmocka_unit_test(cuts_do_not_matter),
        cmocka_unit_test(lookups),
        cmocka_unit_test(merges_as_pairs),
        cmocka_unit_test(one_tokenizer_many_threads),
    };
    return cmocka_run_group_tests(tests, load_v4, free_v4);
}
