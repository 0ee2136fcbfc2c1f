/* Tokenizes records from standard input, for comparison with other tokenizers (check_random.py).
 *
 *   tokenize_lines TOKENIZER.JSON [VOCAB_SIZE] < RECORDS > ANSWERS
 *   tokenize_lines --write-v4 FILE     writes the rebuilt V4 tokenizer.json
 *
 * A record is a letter, a uint32 count and its items. 'a': that many bytes of text, control tokens recognised; 'p': the
 * same, not recognised; 'c': text of which the lengths of its pieces are asked; 'd': that many ids to decode. The
 * answer is a uint32 count and that many ids or lengths, or for 'd' bytes (invalid UTF-8 as U+FFFD). Numbers are in the
 * machine's order. */
#include "support/test.h"
#include "support/v4_tokenizer.h"
#include "base/file.h"
#include "base/mem.h"
#include "text/pretokenize.h"
#include <stdlib.h>
#include <string.h>

static int report(const aff_error *err)
{
    fprintf(stderr, "tokenize_lines: %s\n", err->msg);
    return 1;
}

static int write_v4(const char *path)
{
    aff_error err = {0};
    aff_outfile o;
    aff_test_text t = aff_test_v4_json(false);
    if (aff__out_open(&o, path, &err) != AFF_OK) return report(&err);
    if (aff__out_write(&o, t.s, t.n, 0, &err) != AFF_OK || aff__out_commit(&o, &err) != AFF_OK) return report(&err);
    free(t.s);
    return 0;
}

static aff_status decode(const aff_tokenizer *t, const uint32_t *id, size_t n, aff_test_text *out, aff_error *err)
{
    aff_utf8_stream s = {0};
    out->n = 0;
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *bytes = aff__tokenizer_bytes(t, id[i], &len);
        if (out->cap < out->n + 3 * (len + 8)) {
            out->cap = (out->n + 3 * (len + 8)) * 2;
            AFF_TRY(aff__realloc(&out->s, out->cap, 1, "decoded text", err));
        }
        out->n += aff__utf8_push(&s, bytes, len, out->s + out->n);
    }
    if (n > 0) out->n += aff__utf8_flush(&s, out->s + out->n);
    return AFF_OK;
}

static aff_status cut(const char *text, size_t n, aff_ids *lengths, aff_error *err)
{
    for (size_t i = 0, len; i < n; i += len) {
        len = aff__piece_end((const uint8_t *)text + i, n - i);
        AFF_TRY(aff__ids_push(lengths, (uint32_t)len, err));
    }
    return AFF_OK;
}

int main(int argc, char **argv)
{
    aff_error err = {0};
    aff_tokenizer *t = NULL;
    if (argc == 3 && strcmp(argv[1], "--write-v4") == 0) return write_v4(argv[2]);
    if (argc < 2) return fprintf(stderr, "usage: tokenize_lines TOKENIZER.JSON [VOCAB_SIZE] < RECORDS\n"), 2;
    if (aff__tokenizer_open(&t, argv[1], argc > 2 ? atoll(argv[2]) : 0, &err) != AFF_OK) return report(&err);
    char kind, *in = NULL;
    uint32_t n, count;
    aff_ids ids = {0};
    aff_test_text text = {0};
    while (fread(&kind, 1, 1, stdin) == 1 && fread(&n, 4, 1, stdin) == 1) {
        size_t size = kind == 'd' ? 4 : 1;
        if (aff__realloc(&in, n, size, "record", &err) != AFF_OK) return report(&err);
        if (fread(in, size, n, stdin) != n) return fprintf(stderr, "tokenize_lines: short record\n"), 1;
        ids.n = 0;
        aff_status s;
        if (kind == 'd')
            s = decode(t, (const uint32_t *)(const void *)in, n, &text, &err);
        else if (kind == 'c')
            s = cut(in, n, &ids, &err);
        else
            s = aff__tokenizer_encode(t, in, n, kind == 'a', &ids, &err);
        if (s != AFF_OK) return report(&err);
        count = (uint32_t)(kind == 'd' ? text.n : ids.n);
        fwrite(&count, 4, 1, stdout);
        if (kind == 'd')
            fwrite(text.s, 1, text.n, stdout);
        else
            fwrite(ids.id, 4, ids.n, stdout);
    }
    free(in);
    free(text.s);
    aff__ids_free(&ids);
    aff__tokenizer_free(t);
    return 0;
}
