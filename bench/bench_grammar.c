/* bench_grammar TOKENIZER.json [tokens] - time of token masks: random walks through several schemas over a real
 * vocabulary. Prints what compiling and each mask take, by the thread's own clock; the floor is what a draw from a row
 * takes in any case, reading 4 bytes a token. */
#include "base/buf.h"
#include "base/rng.h"
#include "format/json.h"
#include "grammar/grammar.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t seed = 5;

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void die(const char *what)
{
    fprintf(stderr, "bench_grammar: %s\n", what);
    exit(1);
}

/* A random token of the mask; within text rather a longer one, quotes rarely, as texts are. */
static int32_t pick(const aff_vocab *v, const uint64_t *w)
{
    int32_t found = -1;
    uint64_t n = 0;
    for (int i = 0; i < v->words; i++)
        for (uint64_t bits = w[i]; bits; bits &= bits - 1)
            if (aff__splitmix64(&seed) % ++n == 0) found = i * 64 + __builtin_ctzll(bits);
    return found;
}

static void run(const aff_vocab *v, const char *name, const char *schema, int tokens)
{
    json_t *s = NULL;
    aff_error err = {0};
    aff_grammar *g;
    aff_matcher *m = NULL;
    double *us = calloc((size_t)tokens, sizeof *us), sum = 0;
    if (!us || aff__json_parse_exact(&s, schema, strlen(schema), "schema", false, 64, &err) != AFF_OK) die(err.msg);
    const double start = now_us();
    if (aff__grammar_compile(&g, v, &(aff_grammar_request){.schema = s}, &err) != AFF_OK) die(err.msg);
    const double compile = now_us() - start;
    aff_match at = 0;
    for (int i = 0; i < tokens; i++) {
        const uint64_t *w;
        if (!m) {
            if (aff__matcher_create(&m, g, &err) != AFF_OK) die(err.msg);
            at = aff__matcher_start(m);
        }
        const double t = now_us();
        if (aff__matcher_mask(m, at, 1 << 20, &w, &err) != AFF_OK) die(err.msg);
        us[i] = now_us() - t;
        const int32_t id = pick(v, w);
        if (id == v->eos) {
            aff__matcher_free(m);
            m = NULL;
            continue;
        }
        const double u = now_us();
        at = aff__matcher_step(m, at, id);
        if (!at || aff__matcher_keep(m, &at, &err) != AFF_OK) die("stuck");
        us[i] += now_us() - u;
    }
    qsort(us, (size_t)tokens, sizeof *us, by_value);
    for (int i = 0; i < tokens; i++) sum += us[i];
    printf("%-24s compile %8.0f us   mask: mean %7.1f  median %7.1f  99 %% %8.1f  most %8.1f us\n", name, compile,
           sum / tokens, us[tokens / 2], us[tokens * 99 / 100], us[tokens - 1]);
    aff__matcher_free(m);
    aff__grammar_free(g);
    json_decref(s);
    free(us);
}

int main(int argc, char **argv)
{
    aff_tokenizer *tok;
    aff_vocab *v;
    aff_error err = {0};
    const int tokens = argc > 2 ? atoi(argv[2]) : 2000;
    aff_buf wide = {0};
    char part[96];
    if (argc < 2 || tokens < 1) die("usage: bench_grammar TOKENIZER.json [tokens]");
    if (aff__tokenizer_open(&tok, argv[1], 0, &err) != AFF_OK) die(err.msg);
    const double start = now_us();
    if (aff__vocab_of(&v, tok, 1, &err) != AFF_OK) die(err.msg);
    printf("%d tokens, %u nodes; vocabulary %.0f ms\n", v->n, v->all.n, (now_us() - start) / 1e3);
    run(v, "any value", "true", tokens);
    run(v, "object",
        "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}, \"age\": {\"type\": \"integer\"}, "
        "\"tags\": {\"type\": \"array\", \"items\": {\"type\": \"string\"}}}, \"required\": [\"name\", \"age\"], "
        "\"additionalProperties\": false}",
        tokens);
    run(v, "bounded string", "{\"type\": \"string\", \"minLength\": 10, \"maxLength\": 5000}", tokens);
    run(v, "list of bounded strings",
        "{\"type\": \"array\", \"items\": {\"type\": \"string\", \"maxLength\": 40}, \"minItems\": 10, \"maxItems\": "
        "500}",
        tokens);
    run(v, "pattern, all characters",
        "{\"type\": \"array\", \"minItems\": 100, \"items\": {\"type\": \"string\", \"pattern\": \"^[^,]+(, "
        "[^,]+)*$\"}}",
        tokens);
    run(v, "pattern with a length",
        "{\"type\": \"array\", \"minItems\": 100, \"items\": {\"type\": \"string\", \"pattern\": \"^\\\\S+( "
        "\\\\S+)*$\", \"maxLength\": 200}}",
        tokens);
    run(v, "date-time, uuid, email",
        "{\"type\": \"array\", \"minItems\": 100, \"items\": {\"anyOf\": [{\"type\": \"string\", \"format\": "
        "\"date-time\"}, {\"type\": \"string\", \"format\": \"uuid\"}, {\"type\": \"string\", \"format\": "
        "\"email\"}]}}",
        tokens);
    if (aff__buf_puts(&wide, "{\"type\": \"object\", \"additionalProperties\": false, \"properties\": {", &err) !=
        AFF_OK)
        die(err.msg);
    for (int i = 0; i < 1000; i++) {
        snprintf(part, sizeof part, "%s\"property_%d\": {\"type\": \"string\"}", i ? ", " : "", i * 7919 % 1000);
        if (aff__buf_puts(&wide, part, &err) != AFF_OK) die(err.msg);
    }
    if (aff__buf_puts(&wide, "}}", &err) != AFF_OK) die(err.msg);
    run(v, "1,000 optional members", wide.s, tokens < 500 ? tokens : 500);
    aff__buf_free(&wide);
    aff__vocab_free(v);
    aff__tokenizer_free(tok);
    return 0;
}
