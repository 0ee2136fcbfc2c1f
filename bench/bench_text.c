/* bench_text TOKENIZER [FILE ...] - speed of the tokenizer on one core, by its CPU clock: English (held-out text of
 * models/tiny-v4), code (this project's sources), Chinese, base64, one piece of 10 MB, each repeated or made up to 10
 * MB; then the files. TOKENIZER: a tokenizer.json (build/tests/tokenize_lines --write-v4 writes the full-size one). Run
 * it in the repository's root. */
#include "base/buf.h"
#include "base/file.h"
#include "base/rng.h"
#include "text/tokenizer.h"
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SIZE = 10000000, RUNS = 3 };

static void die(const char *what)
{
    fprintf(stderr, "bench_text: %s\n", what);
    exit(1);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void add(aff_buf *b, const char *s, size_t n)
{
    if (aff__buf_put(b, s, n, NULL) != AFF_OK) die("out of memory");
}

static void add_file(aff_buf *b, const char *path)
{
    char *data;
    size_t n;
    aff_error err = {0};
    if (aff__read_file(path, 1 << 30, &data, &n, &err) != AFF_OK) die(err.msg);
    add(b, data, n);
    free(data);
}

static void add_files(aff_buf *b, const char *pattern)
{
    glob_t g;
    if (glob(pattern, 0, NULL, &g) != 0) return;
    for (size_t i = 0; i < g.gl_pathc; i++) add_file(b, g.gl_pathv[i]);
    globfree(&g);
}

/* Whole copies of what is there, up to SIZE. */
static void fill_up(aff_buf *b)
{
    const size_t n = b->n;
    char *copy = malloc(n ? n : 1);
    if (!n || !copy) die("an empty text");
    memcpy(copy, b->s, n);
    while (b->n + n <= SIZE) add(b, copy, n);
    free(copy);
}

/* Characters of one script by a made-up distribution: common ones often. */
static void add_chinese(aff_buf *b)
{
    uint64_t s = 1;
    while (b->n < SIZE) {
        const uint64_t r = aff__splitmix64(&s);
        const unsigned c = 0x4E00 + (unsigned)((r & 0xFFFF) * (r >> 16 & 0xFFFF) >> 18) % 0x51A6;
        const char u[3] = {(char)(0xE0 | c >> 12), (char)(0x80 | (c >> 6 & 63)), (char)(0x80 | (c & 63))};
        add(b, u, 3);
        if (r >> 32 & 15) continue;
        add(b, r >> 36 & 3 ? "，" : "。\n", r >> 36 & 3 ? 3 : 4);
    }
}

static void add_base64(aff_buf *b, size_t line)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint64_t s = 2;
    for (size_t i = 1; b->n < SIZE; i++) {
        add(b, &digits[aff__splitmix64(&s) & 63], 1);
        if (line && i % line == 0) add(b, "\n", 1);
    }
}

static void add_letters(aff_buf *b)
{
    uint64_t s = 3;
    while (b->n < SIZE) {
        const char c = (char)('a' + aff__splitmix64(&s) % 26);
        add(b, &c, 1);
    }
}

static void measure(const aff_tokenizer *t, const char *name, aff_buf *b)
{
    double best = 1e9;
    size_t n_ids = 0;
    for (int i = 0; i < RUNS; i++) {
        aff_ids ids = {0};
        aff_error err = {0};
        const double from = cpu_seconds();
        if (aff__tokenizer_encode(t, b->s, b->n, true, &ids, &err) != AFF_OK) die(err.msg);
        const double s = cpu_seconds() - from;
        if (s < best) best = s;
        n_ids = ids.n;
        aff__ids_free(&ids);
    }
    printf("%-28s %8.1f MB/s   %zu bytes, %zu tokens, %.3f s\n", name, (double)b->n / best / 1e6, b->n, n_ids, best);
    fflush(stdout);
    aff__buf_free(b);
}

int main(int argc, char **argv)
{
    aff_tokenizer *t;
    aff_error err = {0};
    aff_buf b = {0};
    if (argc < 2) die("usage: bench_text TOKENIZER [FILE ...]");
    if (aff__tokenizer_open(&t, argv[1], 0, &err) != AFF_OK) die(err.msg);
    add_file(&b, "tools/tiny/eval/heldout.txt");
    fill_up(&b);
    measure(t, "English", &b);
    add_files(&b, "docs/*.md");
    fill_up(&b);
    measure(t, "documentation", &b);
    add_files(&b, "src/*/*.[ch]");
    fill_up(&b);
    measure(t, "code, C", &b);
    add_files(&b, "tools/tiny/*.py");
    fill_up(&b);
    measure(t, "code, Python", &b);
    add_chinese(&b);
    measure(t, "Chinese", &b);
    add_base64(&b, 76);
    measure(t, "base64, lines of 76", &b);
    add_base64(&b, 0);
    measure(t, "base64, no lines", &b);
    add_letters(&b);
    measure(t, "one piece of 10 MB, letters", &b);
    for (b = (aff_buf){0}; b.n < SIZE;) add(&b, "\xe4\xb8\xad", 3);
    measure(t, "one piece of 10 MB, CJK", &b);
    for (b = (aff_buf){0}; b.n < SIZE;) add(&b, "=", 1);
    measure(t, "one piece of 10 MB, signs", &b);
    for (int i = 2; i < argc; i++) {
        add_file(&b, argv[i]);
        measure(t, argv[i], &b);
    }
    aff__tokenizer_free(t);
    return 0;
}
