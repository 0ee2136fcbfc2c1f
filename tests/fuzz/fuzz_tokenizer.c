/* tokenizer: the first byte says what the rest is.
 *   0  a tokenizer.json
 *   1  edits of a small good one: (uint16 position, uint8 bytes to cut, uint8 bytes to put in, those bytes) each
 *   2  a text for the full-size tokenizer, led by two bytes that cut it into three segments and one with their kinds
 *   3  token bytes for the streaming decoder, led by the length of its portions */
#include "support/test.h"
#include "support/v4_tokenizer.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok) abort();
}

/* All bytes through the streaming decoder, `portion` at a time; free the result. */
static aff_test_text decode(const char *bytes, size_t n, size_t portion)
{
    aff_test_text out = {malloc(3 * n + 16), 0, 0};
    aff_utf8_stream s = {0};
    require(out.s != NULL);
    for (size_t i = 0; i < n; i += portion)
        out.n += aff__utf8_push(&s, bytes + i, n - i < portion ? n - i : portion, out.s + out.n);
    out.n += aff__utf8_flush(&s, out.s + out.n);
    require(out.n <= 3 * n);
    return out;
}

/* Ids to bytes; free the result. */
static aff_test_text bytes_of(const aff_tokenizer *t, const aff_ids *ids)
{
    aff_test_text out = {0};
    size_t n;
    for (size_t i = 0; i < ids->n; i++) {
        (void)aff__tokenizer_bytes(t, ids->id[i], &n);
        out.cap += n;
    }
    out.s = malloc(out.cap + 1);
    require(out.s != NULL);
    for (size_t i = 0; i < ids->n; i++, out.n += n) {
        const char *s = aff__tokenizer_bytes(t, ids->id[i], &n);
        memcpy(out.s + out.n, s, n);
    }
    return out;
}

/* The ids of valid text stand for exactly that text, whatever the tokenizer. */
static void round_trip(const aff_tokenizer *t, const char *text, size_t n, bool added)
{
    aff_ids ids = {0};
    aff_error err = {0};
    require(aff__tokenizer_encode(t, text, n, added, &ids, &err) == AFF_OK);
    aff_test_text valid = decode(text, n, n + 1), back = bytes_of(t, &ids);
    require(valid.n == back.n && memcmp(valid.s, back.s, back.n) == 0);
    free(valid.s);
    free(back.s);
    aff__ids_free(&ids);
}

static void load(const char *json, size_t n)
{
    static const char text[] = "abcab <s>!\xFF<\xEF\xBD\x9Cx\xEF\xBD\x9C>1234 \xE4\xBD\xA0\n\n  x <pad></s>";
    aff_tokenizer *t = NULL;
    aff_error err = {0};
    if (aff__tokenizer_open_memory(&t, json, n, "fuzz", 0, &err) != AFF_OK) {
        require(err.msg[0] && !strchr(err.msg, '\n') && !t);
        return;
    }
    round_trip(t, text, sizeof text - 1, true);
    round_trip(t, text, sizeof text - 1, false);
    round_trip(t, json, n, true);
    aff__tokenizer_free(t);
}

static void load_edited(const uint8_t *d, size_t size)
{
    aff_test_text t = aff_test_small_json();
    while (size >= 4) {
        size_t at = ((size_t)d[0] | (size_t)d[1] << 8) % (t.n + 1), cut = d[2], put = d[3];
        d += 4;
        size -= 4;
        if (cut > t.n - at) cut = t.n - at;
        if (put > size) put = size;
        char *s = malloc(t.n - cut + put + 1);
        require(s != NULL);
        memcpy(s, t.s, at);
        memcpy(s + at, d, put);
        memcpy(s + at + put, t.s + at + cut, t.n - at - cut);
        free(t.s);
        t.s = s;
        t.n = t.n - cut + put;
        d += put;
        size -= put;
    }
    load(t.s, t.n);
    free(t.s);
}

static void encode(const uint8_t *d, size_t size)
{
    static aff_tokenizer *v4;
    if (!v4) v4 = aff_test_v4_tokenizer();
    if (size < 3) return;
    const char *s = (const char *)d + 3;
    size_t n = size - 3, a = d[0] % (n + 1), b = a + d[1] % (n - a + 1);
    round_trip(v4, s, n, true);
    round_trip(v4, s, n, false);
    aff_segment seg[3] = {{s, a, d[2] & 1}, {s + a, b - a, d[2] & 2}, {s + b, n - b, d[2] & 4}};
    aff_ids ids = {0};
    aff_error err = {0};
    require(aff__tokenizer_encode_segments(v4, seg, 3, &ids, &err) == AFF_OK);
    aff_test_text back = bytes_of(v4, &ids), expected = {malloc(3 * n + 16), 0, 0};
    require(expected.s != NULL);
    for (int i = 0; i < 3; i++) {
        aff_test_text part = decode(seg[i].text, seg[i].n, seg[i].n + 1);
        memcpy(expected.s + expected.n, part.s, part.n);
        expected.n += part.n;
        free(part.s);
    }
    require(expected.n == back.n && memcmp(expected.s, back.s, back.n) == 0);
    free(expected.s);
    free(back.s);
    aff__ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const uint8_t *d = data + 1;
    size--;
    switch (data[0] & 3) {
    case 0:
        load((const char *)d, size);
        break;
    case 1:
        load_edited(d, size);
        break;
    case 2:
        encode(d, size);
        break;
    default: {
        aff_test_text one = decode((const char *)d + 1, size - 1, size),
                      many = decode((const char *)d + 1, size - 1, 1u + d[0]);
        require(one.n == many.n && memcmp(one.s, many.s, one.n) == 0);
        free(one.s);
        free(many.s);
    }
    }
    return 0;
}
