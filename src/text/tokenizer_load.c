/* tokenizer.json to a tokenizer (spec text-and-serving 1.1-1.3). Everything comes from the file; what the code relies
 * on beyond that, and cannot see at use, is checked here. */
#include "base/file.h"
#include "base/mem.h"
#include "format/json.h"
#include "text/tokenizer_data.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

enum {
    FIRST_MERGE = 259,  /* merge i makes this id + i */
    FULL_SIZE = 129280, /* the released vocabulary, whose numbers are known */
    FULL_VOCAB = 128000,
    FULL_MERGES = 127741,
    FIRST_BYTE = 3
};

typedef struct entry {
    const char *text; /* as in the file, owned by the parsed JSON; NULL: no such id */
    size_t n;
    bool added, special, normalized;
} entry;

typedef struct loader {
    const char *name;
    int64_t vocab_size;
    aff_error *err;
    json_t *root, *vocab, *added, *merges;
    entry *entry;        /* [cap] by id */
    uint32_t cap, n;     /* ids possible, ids present */
    uint32_t n_reserved; /* entries of vocab that are added tokens too */
    aff_tokenizer *t;
} loader;

#define FAIL(l, ...) aff__fail((l)->err, AFF_E_FORMAT, __VA_ARGS__)

typedef struct quoted {
    char s[56];
} quoted;

/* The first bytes of a string from the file, fit for a one-line message. */
static quoted quote(const char *s, size_t n)
{
    quoted q;
    size_t take = aff__utf8_valid_prefix((const uint8_t *)s, n < 48 ? n : 48);
    for (size_t i = 0; i < take; i++) q.s[i] = (uint8_t)s[i] < 0x20 || s[i] == 0x7F ? '?' : s[i];
    memcpy(q.s + take, take < n ? "..." : "", take < n ? 4 : 1);
    return q;
}

static quoted quote_json(const json_t *s)
{
    return quote(json_string_value(s), json_string_length(s));
}

static const char *type_name(const json_t *v)
{
    static const char *const names[] = {"an object", "an array", "a string", "an integer",
                                        "a real",    "true",     "false",    "null"};
    return v ? names[json_typeof(v)] : "nothing";
}

/* The patterns of the three splits, spec 1.5. */
static const char *const patterns[3] = {
    "\\p{N}{1,3}", "[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
    "?[\\p{P}\\p{S}]+[\r\n]*|"
    "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"};

static bool is_text(const json_t *v, const char *text)
{
    return json_is_string(v) && json_string_length(v) == strlen(text) && strcmp(json_string_value(v), text) == 0;
}

/* obj[key] is `text`. `where` is the path of obj in the file. */
static aff_status expect_text(const loader *l, const json_t *obj, const char *where, const char *key, const char *text)
{
    const json_t *v = json_object_get(obj, key);
    if (is_text(v, text)) return AFF_OK;
    if (!json_is_string(v))
        return FAIL(l, "%s: %s.%s: expected \"%.60s\", got %s", l->name, where, key, text, type_name(v));
    return FAIL(l, "%s: %s.%s: expected \"%.60s\", got \"%s\"", l->name, where, key, text, quote_json(v).s);
}

/* Each key is absent, null, false or an empty string or array: an option that is not in use. */
static aff_status expect_unused(const loader *l, const json_t *obj, const char *where, const char *const *keys)
{
    for (; *keys; keys++) {
        const json_t *v = json_object_get(obj, *keys);
        if (!v || json_is_null(v) || json_is_false(v) || is_text(v, "") ||
            (json_is_array(v) && json_array_size(v) == 0))
            continue;
        return FAIL(l, "%s: %s.%s: this option is not known; expected null, false or empty, got %s", l->name, where,
                    *keys, type_name(v));
    }
    return AFF_OK;
}

static aff_status check_splits(const loader *l)
{
    const json_t *pre = json_object_get(l->root, "pre_tokenizer"), *list = json_object_get(pre, "pretokenizers");
    char where[48];
    AFF_TRY(expect_text(l, pre, "pre_tokenizer", "type", "Sequence"));
    if (json_array_size(list) != 4)
        return FAIL(l, "%s: pre_tokenizer.pretokenizers: expected 3 Split and a ByteLevel, got %zu steps", l->name,
                    json_array_size(list));
    for (size_t i = 0; i < 3; i++) {
        const json_t *split = json_array_get(list, i);
        snprintf(where, sizeof where, "pre_tokenizer.pretokenizers[%zu]", i);
        AFF_TRY(expect_text(l, split, where, "type", "Split"));
        AFF_TRY(expect_text(l, split, where, "behavior", "Isolated"));
        AFF_TRY(expect_unused(l, split, where, (const char *const[]){"invert", NULL}));
        AFF_TRY(expect_text(l, json_object_get(split, "pattern"), where, "Regex", patterns[i]));
    }
    const json_t *last = json_array_get(list, 3);
    AFF_TRY(expect_text(l, last, "pre_tokenizer.pretokenizers[3]", "type", "ByteLevel"));
    /* Both default to true. */
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "use_regex" : "add_prefix_space";
        const json_t *v = json_object_get(last, key);
        if (!json_is_false(v))
            return FAIL(l, "%s: pre_tokenizer.pretokenizers[3].%s: expected false, got %s", l->name, key, type_name(v));
    }
    return AFF_OK;
}

/* Everything beside vocabulary, merges and added tokens: only one pipeline is implemented. */
static aff_status check_pipeline(const loader *l)
{
    const json_t *v = json_object_get(l->root, "normalizer");
    if (v && !json_is_null(v)) {
        AFF_TRY(expect_text(l, v, "normalizer", "type", "Sequence"));
        AFF_TRY(expect_unused(l, v, "normalizer", (const char *const[]){"normalizers", NULL}));
    }
    AFF_TRY(check_splits(l));
    v = json_object_get(l->root, "post_processor");
    if (v && !json_is_null(v)) AFF_TRY(expect_text(l, v, "post_processor", "type", "ByteLevel"));
    AFF_TRY(expect_text(l, json_object_get(l->root, "decoder"), "decoder", "type", "ByteLevel"));
    const json_t *model = json_object_get(l->root, "model");
    AFF_TRY(expect_text(l, model, "model", "type", "BPE"));
    return expect_unused(l, model, "model",
                         (const char *const[]){"dropout", "unk_token", "continuing_subword_prefix",
                                               "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
                                               NULL});
}

static aff_status find_lists(loader *l)
{
    json_t *model = json_object_get(l->root, "model");
    l->vocab = json_object_get(model, "vocab");
    l->merges = json_object_get(model, "merges");
    l->added = json_object_get(l->root, "added_tokens");
    if (!json_is_object(l->vocab))
        return FAIL(l, "%s: model.vocab: expected an object, got %s", l->name, type_name(l->vocab));
    if (!json_is_array(l->merges))
        return FAIL(l, "%s: model.merges: expected an array, got %s", l->name, type_name(l->merges));
    if (!json_is_array(l->added))
        return FAIL(l, "%s: added_tokens: expected an array, got %s", l->name, type_name(l->added));
    size_t cap = json_object_size(l->vocab) + json_array_size(l->added);
    if (cap > UINT32_MAX / 8) return FAIL(l, "%s: %zu tokens; expected at most %u", l->name, cap, UINT32_MAX / 8);
    l->cap = (uint32_t)cap;
    return aff__calloc(&l->entry, l->cap, sizeof *l->entry, "token list", l->err);
}

/* The id of token `text` from the file: below the model's count and, as ids are dense, below the number of tokens. */
static aff_status read_id(const loader *l, const json_t *v, const char *text, size_t n, uint32_t *id)
{
    if (!json_is_integer(v))
        return FAIL(l, "%s: token \"%s\": expected an integer id, got %s", l->name, quote(text, n).s, type_name(v));
    long long got = json_integer_value(v);
    if (l->vocab_size > 0 && got >= l->vocab_size)
        return FAIL(l, "%s: token \"%s\": expected an id below the model's vocab_size %lld, got %lld", l->name,
                    quote(text, n).s, (long long)l->vocab_size, got);
    if (got < 0 || got >= l->cap)
        return FAIL(l, "%s: token \"%s\": expected an id in 0..%lld (the file has %u tokens), got %lld", l->name,
                    quote(text, n).s, (long long)l->cap - 1, l->cap, got);
    *id = (uint32_t)got;
    return AFF_OK;
}

static aff_status read_vocab(loader *l)
{
    const char *key;
    json_t *v;
    json_object_foreach(l->vocab, key, v)
    {
        uint32_t id;
        size_t n = strlen(key);
        AFF_TRY(read_id(l, v, key, n, &id));
        entry *e = &l->entry[id];
        if (e->text)
            return FAIL(l, "%s: model.vocab: id %u twice: \"%s\" and \"%s\"", l->name, id, quote(e->text, e->n).s,
                        quote(key, n).s);
        *e = (entry){.text = key, .n = n};
        if (id >= l->n) l->n = id + 1;
    }
    return AFF_OK;
}

static bool flag(const json_t *obj, const char *key)
{
    return json_is_true(json_object_get(obj, key));
}

static aff_status read_added_token(loader *l, size_t i, const json_t *v)
{
    const json_t *content = json_object_get(v, "content");
    char where[40];
    uint32_t id;
    snprintf(where, sizeof where, "added_tokens[%zu]", i);
    if (!json_is_string(content) || json_string_length(content) == 0)
        return FAIL(l, "%s: %s.content: expected a string that is not empty, got %s", l->name, where,
                    type_name(content));
    const char *text = json_string_value(content);
    size_t n = json_string_length(content);
    AFF_TRY(expect_unused(l, v, where, (const char *const[]){"single_word", "lstrip", "rstrip", NULL}));
    AFF_TRY(read_id(l, json_object_get(v, "id"), text, n, &id));
    entry *e = &l->entry[id];
    if (e->text && (e->added || e->n != n || memcmp(e->text, text, n) != 0))
        return FAIL(l, "%s: %s: id %u twice: \"%s\" and \"%s\"", l->name, where, id, quote(e->text, e->n).s,
                    quote(text, n).s);
    const json_t *same = strlen(text) == n ? json_object_get(l->vocab, text) : NULL;
    if (same && json_integer_value(same) != (json_int_t)id)
        return FAIL(l, "%s: %s: \"%s\": expected id %lld as in model.vocab, got %u", l->name, where, quote(text, n).s,
                    (long long)json_integer_value(same), id);
    l->n_reserved += e->text != NULL;
    *e = (entry){
        .text = text, .n = n, .added = true, .special = flag(v, "special"), .normalized = flag(v, "normalized")};
    if (id >= l->n) l->n = id + 1;
    l->t->n_added++;
    return AFF_OK;
}

static aff_status read_added(loader *l)
{
    size_t i;
    json_t *v;
    json_array_foreach(l->added, i, v) AFF_TRY(read_added_token(l, i, v));
    for (uint32_t id = 0; id < l->n; id++)
        if (!l->entry[id].text)
            return FAIL(l, "%s: no token has id %u; expected every id from 0 to %u, the highest", l->name, id,
                        l->n - 1);
    return AFF_OK;
}

/* GPT-2's bijection of bytes and characters (spec 1.6 c): the byte of a code point, or -1. */
static int byte_of_char(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF)) return (int)c;
    if (c < 0x100 || c > 0x143) return -1;
    c -= 0x100; /* 0-32, 127-160, 173 */
    return (int)(c <= 0x20 ? c : c <= 0x42 ? c - 0x21 + 0x7F : 0xAD);
}

/* Writes the bytes that vocabulary entry `id` stands for; returns their number through *n. */
static aff_status map_bytes(const loader *l, uint32_t id, char *out, size_t *n)
{
    const entry *e = &l->entry[id];
    *n = 0;
    for (size_t i = 0, len; i < e->n; i += len) {
        uint32_t c = aff__utf8_decode((const uint8_t *)e->text + i, &len);
        int b = byte_of_char(c);
        if (b < 0)
            return FAIL(l, "%s: model.vocab: \"%s\" (id %u): U+%04X stands for no byte, and it is not an added token",
                        l->name, quote(e->text, e->n).s, id, c);
        out[(*n)++] = (char)b;
    }
    return AFF_OK;
}

static aff_status build_bytes(loader *l)
{
    aff_tokenizer *t = l->t;
    uint64_t total = 0;
    t->n = l->n;
    for (uint32_t id = 0; id < l->n; id++) total += l->entry[id].n;
    AFF_TRY(aff__calloc(&t->bytes, total, 1, "token bytes", l->err));
    AFF_TRY(aff__calloc(&t->offset, (uint64_t)l->n + 1, sizeof *t->offset, "token offsets", l->err));
    AFF_TRY(aff__calloc(&t->special, l->n, 1, "token flags", l->err));
    for (int b = 0; b < 256; b++) t->byte_id[b] = AFF_NO_ID;
    for (uint32_t id = 0; id < l->n; id++) {
        const entry *e = &l->entry[id];
        char *out = t->bytes + t->offset[id];
        size_t n = e->n;
        if (e->added)
            memcpy(out, e->text, n);
        else
            AFF_TRY(map_bytes(l, id, out, &n));
        if (!e->added && n == 1) t->byte_id[(uint8_t)out[0]] = id;
        t->special[id] = e->special;
        t->offset[id + 1] = t->offset[id] + n;
    }
    for (int b = 0; b < 256; b++)
        if (t->byte_id[b] == AFF_NO_ID)
            return FAIL(l, "%s: model.vocab: expected a token for each byte, got none for 0x%02X", l->name, b);
    return AFF_OK;
}

/* A string without a NUL inside. */
static bool is_plain_string(const json_t *v)
{
    return json_is_string(v) && strlen(json_string_value(v)) == json_string_length(v);
}

/* The two sides of merge i: "left right" or ["left", "right"]. The string is copied to *copy, which the caller frees.
 */
static aff_status split_merge(const loader *l, size_t i, const json_t *v, char **copy, const char **left,
                              const char **right)
{
    const json_t *a = json_array_get(v, 0), *b = json_array_get(v, 1);
    if (json_array_size(v) == 2 && is_plain_string(a) && is_plain_string(b)) {
        *left = json_string_value(a);
        *right = json_string_value(b);
        return AFF_OK;
    }
    if (!is_plain_string(v))
        return FAIL(l, "%s: model.merges[%zu]: expected \"left right\" or [\"left\", \"right\"], got %s", l->name, i,
                    type_name(v));
    AFF_TRY(aff__strndup(copy, json_string_value(v), json_string_length(v), l->err));
    char *space = strchr(*copy, ' ');
    if (!space || strchr(space + 1, ' '))
        return FAIL(l, "%s: model.merges[%zu]: expected two tokens and one space, got \"%s\"", l->name, i,
                    quote_json(v).s);
    *space = 0;
    *left = *copy;
    *right = space + 1;
    return AFF_OK;
}

static aff_status merge_operand(const loader *l, size_t i, const char *text, uint32_t *id)
{
    const json_t *v = json_object_get(l->vocab, text);
    if (!v)
        return FAIL(l, "%s: model.merges[%zu]: \"%s\" is not in model.vocab", l->name, i, quote(text, strlen(text)).s);
    *id = (uint32_t)json_integer_value(v);
    if (l->entry[*id].added)
        return FAIL(l, "%s: model.merges[%zu]: \"%s\" is an added token; expected an ordinary one", l->name, i,
                    quote(text, strlen(text)).s);
    return AFF_OK;
}

/* Merge i joins two known tokens to id 259 + i. */
static aff_status add_merge(loader *l, size_t i, const char *left, const char *right)
{
    aff_tokenizer *t = l->t;
    uint32_t a, b;
    uint64_t id = FIRST_MERGE + (uint64_t)i;
    size_t na, nb, n;
    AFF_TRY(merge_operand(l, i, left, &a));
    AFF_TRY(merge_operand(l, i, right, &b));
    const char *sa = aff__tokenizer_bytes(t, a, &na), *sb = aff__tokenizer_bytes(t, b, &nb);
    const char *s = aff__tokenizer_bytes(t, id < t->n ? (uint32_t)id : AFF_NO_ID, &n);
    bool same = n == na + nb && memcmp(s, sa, na) == 0 && memcmp(s + na, sb, nb) == 0;
    if (!same || l->entry[id].added)
        return FAIL(l, "%s: model.merges[%zu]: expected \"%s\" + \"%s\" to make id %llu, which is \"%s\"", l->name, i,
                    quote(left, strlen(left)).s, quote(right, strlen(right)).s, (unsigned long long)id,
                    id < t->n ? quote(l->entry[id].text, l->entry[id].n).s : "not in the file");
    aff__merges_add(&t->merges, a, b, (uint32_t)id);
    return AFF_OK;
}

static aff_status read_merges(loader *l)
{
    size_t i, n = json_array_size(l->merges), made = json_object_size(l->vocab) - l->n_reserved - 256;
    json_t *v;
    if (n != made)
        return FAIL(l,
                    "%s: model.merges: expected %zu merges (vocabulary of %zu without %u control tokens and 256 "
                    "bytes), got %zu",
                    l->name, made, json_object_size(l->vocab), l->n_reserved, n);
    AFF_TRY(aff__merges_init(&l->t->merges, (uint32_t)n, l->err));
    json_array_foreach(l->merges, i, v)
    {
        char *copy = NULL;
        const char *left = "", *right = "";
        aff_status s = split_merge(l, i, v, &copy, &left, &right);
        if (s == AFF_OK) s = add_merge(l, i, left, right);
        free(copy);
        if (s != AFF_OK) return s;
    }
    return AFF_OK;
}

/* Sorting needs the bytes, which qsort's callback cannot reach through an id: it sorts these. */
typedef struct sortable {
    const char *s;
    size_t n;
    aff_added token;
} sortable;

static int by_bytes(const void *pa, const void *pb)
{
    const sortable *a = pa, *b = pb;
    int d = memcmp(a->s, b->s, a->n < b->n ? a->n : b->n);
    return d ? d : a->n < b->n ? -1 : a->n > b->n;
}

static aff_status sort_added(loader *l, sortable *list)
{
    aff_tokenizer *t = l->t;
    uint32_t n = 0;
    for (uint32_t id = 0; id < t->n; id++) {
        const entry *e = &l->entry[id];
        if (e->added) list[n++] = (sortable){e->text, e->n, {id, e->normalized}};
    }
    qsort(list, n, sizeof *list, by_bytes);
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0 && by_bytes(&list[i - 1], &list[i]) == 0)
            return FAIL(l, "%s: added_tokens: \"%s\" twice, with ids %u and %u", l->name, quote(list[i].s, list[i].n).s,
                        list[i - 1].token.id, list[i].token.id);
        t->added[i] = list[i].token;
        t->added_first[(uint8_t)list[i].s[0] + 1]++;
    }
    for (int b = 0; b < 256; b++) t->added_first[b + 1] += t->added_first[b];
    return AFF_OK;
}

static aff_status index_added(loader *l)
{
    sortable *list = NULL;
    AFF_TRY(aff__calloc(&l->t->added, l->t->n_added, sizeof *l->t->added, "added tokens", l->err));
    AFF_TRY(aff__calloc(&list, l->t->n_added, sizeof *list, "added tokens", l->err));
    aff_status s = sort_added(l, list);
    free(list);
    return s;
}

static aff_status expect_count(const loader *l, const char *what, size_t expected, size_t got)
{
    if (expected == got) return AFF_OK;
    return FAIL(l, "%s: %s: expected %zu for a vocab_size of %d, got %zu", l->name, what, expected, FULL_SIZE, got);
}

/* The released file: spec 1.2. */
static aff_status check_full_counts(const loader *l)
{
    AFF_TRY(expect_count(l, "entries of model.vocab", FULL_VOCAB, json_object_size(l->vocab)));
    AFF_TRY(expect_count(l, "model.merges", FULL_MERGES, json_array_size(l->merges)));
    return expect_count(l, "highest id", FULL_SIZE - 1, l->n - 1);
}

static aff_status check_full_ids(const loader *l)
{
    static const struct {
        const char *text;
        int id;
    } known[] = {{"<\xEF\xBD\x9C"
                  "begin\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
                  0},
                 {"<\xEF\xBD\x9C"
                  "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
                  1},
                 {"<\xEF\xBD\x9CUser\xEF\xBD\x9C>", 128803},
                 {"<\xEF\xBD\x9C"
                  "Assistant\xEF\xBD\x9C>",
                  128804},
                 {"<think>", 128821},
                 {"</think>", 128822},
                 {"\xEF\xBD\x9C"
                  "DSML\xEF\xBD\x9C",
                  128825}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int64_t got = aff__tokenizer_find(l->t, known[i].text);
        if (got != known[i].id)
            return FAIL(l, "%s: added_tokens: \"%s\": expected id %d for a vocab_size of %d, got %lld", l->name,
                        known[i].text, known[i].id, FULL_SIZE, (long long)got);
    }
    /* Bytes that print map to themselves and come first, in ascending order; then the others. */
    uint32_t id = FIRST_BYTE;
    for (uint32_t c = 0x21; c <= 0x143; c++) {
        int b = byte_of_char(c);
        if (b < 0) continue;
        if (l->t->byte_id[b] != id)
            return FAIL(l, "%s: model.vocab: byte 0x%02X: expected id %u for a vocab_size of %d, got %u", l->name, b,
                        id, FULL_SIZE, l->t->byte_id[b]);
        id++;
    }
    return AFF_OK;
}

static aff_status load(loader *l)
{
    bool full = l->vocab_size == FULL_SIZE;
    AFF_TRY(check_pipeline(l));
    AFF_TRY(find_lists(l));
    AFF_TRY(read_vocab(l));
    AFF_TRY(read_added(l));
    if (full) AFF_TRY(check_full_counts(l));
    if (l->vocab_size > 0 && l->n != l->vocab_size)
        return FAIL(l, "%s: expected %lld tokens as the model's vocab_size says, got %u", l->name,
                    (long long)l->vocab_size, l->n);
    AFF_TRY(build_bytes(l));
    AFF_TRY(read_merges(l));
    AFF_TRY(index_added(l));
    return full ? check_full_ids(l) : AFF_OK;
}

aff_status aff__tokenizer_open_memory(aff_tokenizer **out, const char *json, size_t size, const char *name,
                                      int64_t vocab_size, aff_error *err)
{
    loader l = {.name = name, .vocab_size = vocab_size, .err = err};
    AFF_TRY(aff__json_parse(&l.root, json, size, name, true, err));
    aff_status s = aff__calloc(&l.t, 1, sizeof *l.t, "tokenizer", err);
    if (s == AFF_OK) s = load(&l);
    free(l.entry);
    json_decref(l.root);
    if (s != AFF_OK)
        aff__tokenizer_free(l.t);
    else
        *out = l.t;
    return s;
}

aff_status aff__tokenizer_open(aff_tokenizer **out, const char *path, int64_t vocab_size, aff_error *err)
{
    enum { LIMIT = 256 << 20 };
    char file[4096], *json = NULL;
    size_t size = 0;
    if (aff__is_dir(path)) {
        AFF_TRY(aff__path_join(file, sizeof file, path, "tokenizer.json", err));
        path = file;
    }
    AFF_TRY(aff__read_file(path, LIMIT, &json, &size, err));
    aff_status s = aff__tokenizer_open_memory(out, json, size, path, vocab_size, err);
    free(json);
    return s;
}
