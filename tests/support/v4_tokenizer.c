#include "support/test.h"
#include "support/v4_tokenizer.h"
#include "base/file.h"
#include <stdlib.h>
#include <string.h>

static void die(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(2);
}

static void grow(aff_test_text *t, size_t n)
{
    if (t->n + n < t->cap) return;
    t->cap = (t->n + n) * 2 + 64;
    t->s = realloc(t->s, t->cap);
    if (!t->s) die("test text", "out of memory");
}

void aff_test_add(aff_test_text *t, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    grow(t, (size_t)n + 1);
    vsnprintf(t->s + t->n, (size_t)n + 1, fmt, again);
    t->n += (size_t)n;
    va_end(again);
    va_end(ap);
}

/* The character of each byte (spec text-and-serving 1.6 c), as a JSON string's contents. */
static char byte_char[256][8];
static int byte_order[256]; /* bytes ascending by character */

static void add_byte_char(int *n, int byte, unsigned c)
{
    byte_order[(*n)++] = byte;
    if (c == '"' || c == '\\')
        snprintf(byte_char[byte], sizeof byte_char[byte], "\\%c", (char)c);
    else if (c < 0x80)
        snprintf(byte_char[byte], sizeof byte_char[byte], "%c", (char)c);
    else
        snprintf(byte_char[byte], sizeof byte_char[byte], "%c%c", (char)(0xC0 | c >> 6), (char)(0x80 | (c & 63)));
}

static bool prints(int b)
{
    return (b > 0x20 && b < 0x7F) || (b > 0xA0 && b != 0xAD);
}

static void make_byte_chars(void)
{
    int n = 0, others = 0;
    for (int b = 0; b < 256; b++)
        if (prints(b)) add_byte_char(&n, b, (unsigned)b);
    for (int b = 0; b < 256; b++)
        if (!prints(b)) add_byte_char(&n, b, 0x100u + (unsigned)others++);
}

static const char *split(const char *pattern_json)
{
    static char buf[512];
    snprintf(buf, sizeof buf,
             "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"%s\"},\"behavior\":\"Isolated\",\"invert\":false},",
             pattern_json);
    return buf;
}

/* Everything before the added tokens' list is filled. */
static void add_head(aff_test_text *t)
{
    aff_test_add(t, "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[");
}

static void add_pipeline(aff_test_text *t)
{
    aff_test_add(t, "],\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[]},"
                    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[");
    aff_test_add(t, "%s", split("\\\\p{N}{1,3}"));
    aff_test_add(t, "%s", split("[\\u4e00-\\u9fa5\\u3040-\\u309f\\u30a0-\\u30ff]+"));
    aff_test_add(
        t, "%s",
        split("[!\\\"#$%&'()*+,\\\\-./:;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|"
              "[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+| ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|"
              "\\\\s+(?!\\\\S)|\\\\s+"));
    aff_test_add(
        t, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}]},"
           "\"post_processor\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":false,\"use_regex\":"
           "true},"
           "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true},"
           "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
           "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"vocab\":{");
}

static void add_added(aff_test_text *t, const char *id, const char *content, const char *flags)
{
    aff_test_add(
        t,
        "%s{\"id\":%s,\"content\":\"%s\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":%s,"
        "\"special\":%s}",
        t->s[t->n - 1] == '[' ? "" : ",", id, content, strchr(flags, 'n') ? "true" : "false",
        strchr(flags, 's') ? "true" : "false");
}

/* The added tokens of v4_added.txt; the contents of the first three, which are in vocab too, go to first[]. */
static void add_v4_added(aff_test_text *t, char first[3][64])
{
    char *data, *line, *rest;
    size_t size;
    aff_error err = {0};
    if (aff__read_file(AFF_TESTS_DIR "/text/v4_added.txt", 1 << 20, &data, &size, &err) != AFF_OK)
        die("v4_added.txt", err.msg);
    int n = 0;
    for (line = strtok_r(data, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), n++) {
        char *fields, *id = strtok_r(line, "\t", &fields), *flags = strtok_r(NULL, "\t", &fields);
        const char *content = strtok_r(NULL, "\t", &fields);
        if (!id || !flags || !content) die("v4_added.txt", "a line without three fields");
        add_added(t, id, content, flags);
        if (n < 3) snprintf(first[n], 64, "%s", content);
    }
    free(data);
}

typedef struct bit_reader {
    const uint8_t *p;
    uint64_t size, at; /* bytes, bits */
} bit_reader;

static uint32_t take(bit_reader *r, int width)
{
    uint32_t v = 0;
    for (int i = 0; i < width; i++, r->at++) {
        if (r->at / 8 >= r->size) die("v4_merges.bin", "too short");
        v |= (uint32_t)(r->p[r->at / 8] >> (r->at % 8) & 1) << i;
    }
    return v;
}

static uint32_t take_id(bit_reader *r)
{
    static const int widths[] = {9, 12, 14, 17};
    return take(r, widths[take(r, 2)]);
}

/* Tokens as JSON string contents, one after the other: token i is at[i]..at[i+1] of text. */
typedef struct token_list {
    aff_test_text text;
    size_t at[128001];
    uint32_t n;
} token_list;

static void append(token_list *l, const char *s, size_t n)
{
    grow(&l->text, n + 1);
    memcpy(l->text.s + l->text.n, s, n);
    l->text.n += n;
}

static void append_token(token_list *l, uint32_t id)
{
    if (id >= l->n) die("v4_merges.bin", "a merge of a later token");
    size_t n = l->at[id + 1] - l->at[id];
    grow(&l->text, n + 1);
    append(l, l->text.s + l->at[id], n);
}

static void end_token(token_list *l)
{
    if (l->n == 128000) die("v4_merges.bin", "too many merges");
    l->at[++l->n] = l->text.n;
}

static void add_vocab_and_merges(aff_test_text *t, token_list *l, bool merge_pairs)
{
    aff_map map;
    aff_error err = {0};
    if (aff__map_open(&map, AFF_TESTS_DIR "/text/v4_merges.bin", &err) != AFF_OK) die("v4_merges.bin", err.msg);
    bit_reader r = {map.data, map.size, 0};
    uint32_t n = take(&r, 16);
    n |= take(&r, 16) << 16;
    uint32_t(*pair)[2] = calloc(n, sizeof *pair);
    if (!pair) die("v4_merges.bin", "out of memory");
    for (uint32_t i = 0; i < n; i++) {
        append_token(l, pair[i][0] = take_id(&r));
        append_token(l, pair[i][1] = take_id(&r));
        end_token(l);
    }
    aff__map_close(&map);
    for (uint32_t i = 0; i < l->n; i++)
        aff_test_add(t, "%s\"%.*s\":%u", i ? "," : "", (int)(l->at[i + 1] - l->at[i]), l->text.s + l->at[i], i);
    aff_test_add(t, "},\"merges\":[");
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = pair[i][0], b = pair[i][1];
        aff_test_add(t, merge_pairs ? "%s[\"%.*s\",\"%.*s\"]" : "%s\"%.*s %.*s\"", i ? "," : "",
                     (int)(l->at[a + 1] - l->at[a]), l->text.s + l->at[a], (int)(l->at[b + 1] - l->at[b]),
                     l->text.s + l->at[b]);
    }
    aff_test_add(t, "]}}");
    free(pair);
}

aff_test_text aff_test_v4_json(bool merge_pairs)
{
    aff_test_text t = {0};
    char first[3][64];
    token_list *l = calloc(1, sizeof *l);
    if (!l) die("v4 tokenizer", "out of memory");
    make_byte_chars();
    add_head(&t);
    add_v4_added(&t, first);
    add_pipeline(&t);
    for (int i = 0; i < 3; i++) {
        append(l, first[i], strlen(first[i]));
        end_token(l);
    }
    for (int i = 0; i < 256; i++) {
        append(l, byte_char[byte_order[i]], strlen(byte_char[byte_order[i]]));
        end_token(l);
    }
    add_vocab_and_merges(&t, l, merge_pairs);
    free(l->text.s);
    free(l);
    return t;
}

aff_tokenizer *aff_test_v4_tokenizer(void)
{
    aff_test_text t = aff_test_v4_json(false);
    aff_tokenizer *tok = NULL;
    aff_error err = {0};
    if (aff__tokenizer_open_memory(&tok, t.s, t.n, "v4", 129280, &err) != AFF_OK) die("v4 tokenizer", err.msg);
    free(t.s);
    return tok;
}

aff_test_text aff_test_small_json(void)
{
    aff_test_text t = {0};
    make_byte_chars();
    add_head(&t);
    add_added(&t, "0", "<s>", "s");
    add_added(&t, "1", "</s>", "s");
    add_added(&t, "2", "<pad>", "s");
    add_added(&t, "261", "<\xEF\xBD\x9Cx\xEF\xBD\x9C>", "n");
    add_pipeline(&t);
    aff_test_add(&t, "\"<s>\":0");
    for (int i = 0; i < 256; i++) aff_test_add(&t, ",\"%s\":%d", byte_char[byte_order[i]], 3 + i);
    aff_test_add(&t, ",\"ab\":259,\"abc\":260},\"merges\":[\"a b\",\"ab c\"]}}");
    return t;
}
