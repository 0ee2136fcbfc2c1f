/* A schema, then bytes that lead through it (after a NUL): first as tokens chosen from the masks, then as text. A
 * schema is refused with a reason or has answers; no mask is empty; what is complete is JSON that stays so when it is
 * read again. First byte: flags. */
#include "format/json.h"
#include "grammar/words.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok) abort();
}

static void check_json(const aff_buf *text)
{
    json_t *v = NULL;
    require(aff__json_parse_exact(&v, text->n ? text->s : "", text->n, "answer", false, 256, NULL) == AFF_OK);
    json_decref(v);
}

/* The k-th token of a mask, counted around. */
static int32_t nth(const aff_vocab *v, const uint64_t *w, uint32_t k)
{
    uint32_t n = 0;
    for (int i = 0; i < v->words; i++) n += (uint32_t)__builtin_popcountll(w[i]);
    require(n > 0);
    k %= n;
    for (int32_t id = 0; id < v->n; id++)
        if (in_mask(w, id) && !k--) return id;
    return -1;
}

static void lead(const aff_vocab *v, const aff_grammar *g, const uint8_t *s, size_t n, bool json)
{
    aff_matcher *m;
    aff_buf text = {0};
    aff_error err = {0};
    require(aff__matcher_create(&m, g, &err) == AFF_OK);
    aff_match at = aff__matcher_start(m);
    bool complete = false;
    for (size_t i = 0; i < n && i < 40; i++) {
        const uint64_t *w;
        size_t len;
        const aff_status st = aff__matcher_mask(m, at, s[i] < 128 ? 1 << 20 : (int64_t)(n - i), &w, &err);
        require(st == AFF_OK || st == AFF_E_LIMIT);
        if (st != AFF_OK) break;
        const int32_t id = nth(v, w, s[i] * 7u);
        if (id == v->eos) {
            require(aff__matcher_complete(m, at));
            complete = true;
            break;
        }
        at = aff__matcher_step(m, at, id);
        require(at != 0);
        const char *bytes = word(v, id, &len);
        require(aff__buf_put(&text, bytes, len, NULL) == AFF_OK);
    }
    if (complete && json) check_json(&text);
    at = aff__matcher_start(m);
    text.n = 0;
    for (size_t i = 0; i < n && at; i++) {
        at = aff__matcher_step(m, at, W_BYTES + s[i]);
        require(aff__buf_put(&text, (const char *)s + i, 1, NULL) == AFF_OK);
        if (at && json && aff__matcher_complete(m, at)) check_json(&text);
    }
    aff__buf_free(&text);
    aff__matcher_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static aff_vocab *v;
    json_t *schema = NULL;
    aff_grammar *g = NULL;
    aff_error err = {0};
    if (!v) v = words(true);
    if (size < 2 || size > 4096) return 0;
    const uint8_t *end = memchr(data + 1, 0, size - 1), flags = data[0];
    const size_t n = end ? (size_t)(end - data) - 1 : size - 1;
    if (aff__json_parse_exact(&schema, (const char *)data + 1, n, "schema", false, 64, NULL) != AFF_OK) return 0;
    json_t *tools = json_pack("[{s:s,s:{s:s,s:O},s:b}]", "type", "function", "function", "name", "f", "parameters",
                              schema, "strict", 1);
    const bool calls = flags & 1;
    const aff_grammar_request r = {.schema = calls ? NULL : schema,
                                   .calls = calls ? AFF_CALLS_REQUIRED : AFF_CALLS_NONE,
                                   .tools = tools,
                                   .thinking = flags & 2,
                                   .one_call = flags & 4,
                                   .v41 = flags & 8};
    const aff_status s = aff__grammar_compile(&g, v, &r, &err);
    require(s == AFF_OK || (s == AFF_E_INVALID && err.msg[0]));
    if (s == AFF_OK && end) lead(v, g, end + 1, size - n - 2, !calls && !r.thinking);
    aff__grammar_free(g);
    json_decref(tools);
    json_decref(schema);
    return 0;
}
