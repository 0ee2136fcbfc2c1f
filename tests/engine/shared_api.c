/* The public API as a program outside sees it: affinity.h and the shared library, on a small random checkpoint. */
#include "support/test.h"
#include <affinity.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CKPT AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark"
enum { VOCAB = 256, CONTEXT = 4096, PROMPT = 140, ANSWER = 12 };

static aff_model *model;
static int32_t prompt[PROMPT];

static int open_model(void **state)
{
    aff_error err = {0};
    for (int i = 0; i < PROMPT; i++) prompt[i] = (i * 37 + i * i) % VOCAB;
    if (aff_model_open(&model, CKPT, NULL, &err) == AFF_OK) return 0;
    fprintf(stderr, "%s\n", err.msg);
    return -1;
}

static int close_model(void **state)
{
    aff_model_free(model);
    return 0;
}

static aff_session *session(void)
{
    aff_session *s;
    aff_error err = {0};
    assert_int_equal(aff_session_create(&s, model, 512, &err), AFF_OK);
    return s;
}

/* Feeds the prompt `step` tokens at a time, then takes ANSWER tokens. */
static void answer(aff_session *s, int step, const aff_sampling *sp, int32_t *ids, float *logits)
{
    aff_error err = {0};
    for (int i = 0; i < PROMPT; i += step)
        assert_int_equal(aff_session_feed(s, prompt + i, i + step < PROMPT ? step : PROMPT - i, &err), AFF_OK);
    memcpy(logits, aff_session_logits(s), VOCAB * sizeof *logits);
    for (int i = 0; i < ANSWER; i++) {
        assert_int_equal(aff_session_position(s), PROMPT + i);
        assert_int_equal(aff_session_next(s, sp, &ids[i], &err), AFF_OK);
        assert_int_equal(aff_session_feed(s, &ids[i], 1, &err), AFF_OK);
    }
}

static void model_says_what_it_is(void **state)
{
    assert_int_equal(aff_model_vocab(model), VOCAB);
    assert_int_equal(aff_model_context(model), CONTEXT);
    assert_int_equal(aff_model_layers(model), 3);
    assert_int_equal(aff_model_bos(model), 0);
    assert_int_equal(aff_model_eos(model), 1);
    assert_string_equal(aff_version(), "0.1.0");
    assert_string_equal(aff_status_name(AFF_E_LIMIT), "limit");
}

static void steps_and_reuse_change_nothing(void **state)
{
    aff_sampling greedy, hot;
    aff_sampling_init(&greedy);
    aff_sampling_init(&hot);
    hot.temperature = 1;
    hot.top_p = 0.95;
    hot.seed = 7;
    const aff_sampling *modes[] = {NULL, &greedy, &hot};
    static int32_t first[3][ANSWER], again[ANSWER];
    static float l0[VOCAB], l[VOCAB];
    aff_session *a = session(), *b = session();
    for (int m = 0; m < 3; m++) {
        aff_session_reset(a);
        assert_int_equal(aff_session_position(a), 0);
        assert_null(aff_session_logits(a));
        answer(a, PROMPT, modes[m], first[m], l0);
        const int steps[] = {1, 9, 130};
        for (int i = 0; i < (m == 0 ? 1 : 3); i++) {
            aff_session_reset(b);
            answer(b, steps[i], modes[m], again, l);
            assert_memory_equal(l, l0, sizeof l);
            assert_memory_equal(again, first[m], sizeof again);
        }
        int best = 0;
        for (int v = 1; v < VOCAB; v++)
            if (l0[v] > l0[best]) best = v;
        if (m < 2) assert_int_equal(first[m][0], best);
    }
    assert_memory_equal(first[0], first[1], sizeof first[0]); /* NULL is greedy */
    assert_memory_not_equal(first[0], first[2], sizeof first[0]);
    aff_session_free(a);
    aff_session_free(b);
}

typedef struct job {
    aff_session *s;
    aff_sampling sp;
    int32_t ids[ANSWER];
    float logits[VOCAB];
} job;

static void *run_job(void *ctx)
{
    job *j = ctx;
    answer(j->s, 50, &j->sp, j->ids, j->logits);
    return NULL;
}

/* Sessions of one model in threads of their own do not disturb each other. */
static void threads_share_a_model(void **state)
{
    enum { THREADS = 2 };
    static job together[THREADS], alone[THREADS];
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++) {
        aff_sampling_init(&alone[i].sp);
        alone[i].sp.temperature = 1;
        alone[i].sp.seed = (uint64_t)i;
        together[i].sp = alone[i].sp;
        alone[i].s = session();
        together[i].s = session();
        run_job(&alone[i]);
    }
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&t[i], NULL, run_job, &together[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(t[i], NULL), 0);
        assert_memory_equal(together[i].ids, alone[i].ids, sizeof alone[i].ids);
        assert_memory_equal(together[i].logits, alone[i].logits, sizeof alone[i].logits);
        aff_session_free(together[i].s);
        aff_session_free(alone[i].s);
    }
    assert_memory_not_equal(alone[0].ids, alone[1].ids, sizeof alone[0].ids);
}

static void options_are_in_force(void **state)
{
    aff_error err = {0};
    aff_model_options o;
    aff_model_options_init(&o);
    assert_int_equal(o.numerics, AFF_FAST);
    static float l[3][VOCAB];
    for (int i = 0; i < 3; i++) {
        aff_model *m;
        aff_session *s;
        o = (aff_model_options){.numerics = i == 1 ? AFF_MATH : AFF_FAST, .max_layers = i == 2 ? 2 : 0, .threads = 2};
        assert_int_equal(aff_model_open(&m, CKPT, &o, &err), AFF_OK);
        assert_int_equal(aff_model_layers(m), i == 2 ? 2 : 3);
        assert_int_equal(aff_session_create(&s, m, 0, &err), AFF_OK);
        assert_int_equal(aff_session_feed(s, prompt, 20, &err), AFF_OK);
        memcpy(l[i], aff_session_logits(s), sizeof l[i]);
        aff_session_free(s);
        aff_model_free(m);
    }
    double worst = 0, scale = 0;
    for (int v = 0; v < VOCAB; v++) {
        double d = l[0][v] - l[1][v], a = l[1][v];
        if (d * d > worst) worst = d * d;
        if (a * a > scale) scale = a * a;
    }
    assert_true(worst > 0 && worst < 0.04 * scale); /* fast is not math, but near it */
    assert_memory_not_equal(l[0], l[2], sizeof l[0]);
}

static void mistakes_are_errors(void **state)
{
    aff_error err = {0};
    aff_model *m = (aff_model *)&err;
    assert_int_equal(aff_model_open(&m, NULL, NULL, &err), AFF_E_INVALID);
    assert_null(m);
    assert_int_not_equal(aff_model_open(&m, "/no/such.aff", NULL, &err), AFF_OK);
    assert_non_null(strstr(err.msg, "/no/such.aff"));
    assert_null(strchr(err.msg, '\n'));
    aff_model_options o = {.numerics = (aff_numerics)9};
    assert_int_equal(aff_model_open(&m, CKPT, &o, &err), AFF_E_INVALID);
    assert_int_not_equal(aff_model_open(&m, "/no/such.aff", NULL, NULL), AFF_OK);

    aff_session *s;
    assert_int_equal(aff_session_create(&s, model, CONTEXT + 1, &err), AFF_E_LIMIT);
    assert_null(s);
    assert_int_equal(aff_session_create(&s, model, 10, &err), AFF_OK);
    int32_t id;
    assert_int_equal(aff_session_next(s, NULL, &id, &err), AFF_E_INVALID);
    assert_int_equal(aff_session_feed(s, prompt, 11, &err), AFF_E_LIMIT);
    assert_int_equal(aff_session_feed(s, prompt, 0, &err), AFF_E_INVALID);
    const int32_t wrong[] = {3, VOCAB}, negative = -1;
    assert_int_equal(aff_session_feed(s, wrong, 2, &err), AFF_E_INVALID);
    assert_non_null(strstr(err.msg, "got 256"));
    assert_int_equal(aff_session_feed(s, &negative, 1, &err), AFF_E_INVALID);
    assert_int_equal(aff_session_position(s), 0);
    assert_int_equal(aff_session_feed(s, prompt, 10, &err), AFF_OK);
    assert_int_equal(aff_session_next(s, NULL, &id, &err),
                     AFF_OK); /* the token after the last position can be chosen */
    assert_int_equal(aff_session_feed(s, &id, 1, &err), AFF_E_LIMIT);
    aff_sampling sp = {.temperature = 1, .top_p = 2};
    assert_int_equal(aff_session_next(s, &sp, &id, &err), AFF_E_INVALID);
    aff_session_free(s);
    aff_session_free(NULL);
    aff_model_free(NULL);
    aff_tokenizer_free(NULL);
}

/* ---- Text: a tokenizer of single bytes and one merge, written here ---- */

/* Id of a byte: ids 3.. in ascending order of the characters that stand for bytes (spec text-and-serving 1.2). */
static int byte_id(int byte)
{
    int printable = 0, other = 0;
    for (int b = 0; b < 256; b++) {
        bool p = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        if (b == byte) return p ? 3 + printable : 3 + 188 + other;
        printable += p;
        other += !p;
    }
    return -1;
}

static void write_tokenizer(const char *path)
{
    static const char *const added[] = {"<\\uff5cbegin\\u2581of\\u2581sentence\\uff5c>",
                                        "<\\uff5cend\\u2581of\\u2581sentence\\uff5c>",
                                        "<\\uff5c\\u2581pad\\u2581\\uff5c>", "<think>"};
    static const char split[] =
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"%s\"},\"behavior\":\"Isolated\",\"invert\":false},";
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "{\"version\":\"1.0\",\"added_tokens\":[");
    for (int i = 0; i < 4; i++)
        fprintf(f,
                "%s{\"id\":%d,\"content\":\"%s\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"
                "\"normalized\":false,\"special\":%s}",
                i ? "," : "", i < 3 ? i : 260, added[i], i < 3 ? "true" : "false");
    fprintf(f, "],\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[]},\"pre_tokenizer\":{\"type\":\"Sequence\","
               "\"pretokenizers\":[");
    fprintf(f, split, "\\\\p{N}{1,3}");
    fprintf(f, split, "[\\u4e00-\\u9fa5\\u3040-\\u309f\\u30a0-\\u30ff]+");
    fprintf(f, split,
            "[!\\\"#$%&'()*+,\\\\-./"
            ":;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+|"
            " ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+");
    fprintf(f,
            "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}]},"
            "\"post_processor\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":false,\"use_regex\":"
            "true},"
            "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true},"
            "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
            "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"vocab\":{");
    for (int i = 0; i < 3; i++) fprintf(f, "\"%s\":%d,", added[i], i);
    int other = 0;
    for (int b = 0; b < 256; b++) {
        bool p = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        fprintf(f, "\"\\u%04x\":%d,", p ? b : 0x100 + other, byte_id(b));
        other += !p;
    }
    fprintf(f, "\"ab\":259},\"merges\":[\"a b\"]}}");
    assert_int_equal(fclose(f), 0);
}

static void text_goes_in_and_out(void **state)
{
    char dir[] = "/tmp/aff_api_XXXXXX", path[64];
    aff_error err = {0};
    aff_tokenizer *t;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    write_tokenizer(path);
    aff_status st = aff_tokenizer_open(&t, dir, NULL, &err); /* the folder will do */
    if (st != AFF_OK) fail_msg("%s", err.msg);

    static const char text[] = "cab<think>\xF0\x9F\x98\x80";
    const int32_t control[] = {byte_id('c'), 259, 260, byte_id(0xF0), byte_id(0x9F), byte_id(0x98), byte_id(0x80)};
    int32_t ids[32];
    size_t n = 99;
    assert_int_equal(aff_tokenizer_encode(t, text, sizeof text - 1, true, ids, 32, &n, &err), AFF_OK);
    assert_int_equal(n, 7);
    assert_memory_equal(ids, control, sizeof control);
    assert_int_equal(aff_tokenizer_encode(t, text, sizeof text - 1, false, NULL, 0, &n, &err), AFF_E_LIMIT);
    assert_int_equal(n, 13); /* <think> in seven pieces */
    assert_int_equal(aff_tokenizer_encode(t, "", 0, true, NULL, 0, &n, &err), AFF_OK);
    assert_int_equal(n, 0);
    const char *b = aff_tokenizer_bytes(t, 259, &n);
    assert_int_equal(n, 2);
    assert_memory_equal(b, "ab", 2);
    aff_tokenizer_bytes(t, -5, &n);
    assert_int_equal(n, 0);

    aff_text_stream s = {0};
    char out[128], all[128] = "";
    for (int i = 0; i < 7; i++) {
        size_t before = strlen(all);
        assert_int_equal(aff_tokenizer_decode(t, &s, control[i], out, sizeof out, &n, &err), AFF_OK);
        memcpy(all + before, out, n);
        all[before + n] = 0;
        if (i >= 3 && i < 6) assert_int_equal(n, 0); /* nothing before the character is whole */
    }
    assert_string_equal(all, text);
    assert_int_equal(aff_tokenizer_decode(t, &s, byte_id(0xF0), out, 2, &n, &err), AFF_E_LIMIT);
    assert_in_range(n, 3, 64);
    assert_int_equal(aff_tokenizer_decode(t, &s, byte_id(0xF0), out, n, &n, &err), AFF_OK);
    assert_int_equal(aff_tokenizer_decode(t, &s, -1, out, sizeof out, &n, &err), AFF_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(out, "\xEF\xBF\xBD", 3);
    aff_tokenizer_free(t);

    /* 261 ids do not fit a model of 256. */
    assert_int_not_equal(aff_tokenizer_open(&t, path, model, &err), AFF_OK);
    assert_null(t);
    assert_non_null(strstr(err.msg, "tokenizer.json"));
    assert_non_null(strstr(err.msg, "256"));
    assert_int_not_equal(aff_tokenizer_open(&t, "/no/such/tokenizer.json", NULL, &err), AFF_OK);
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(model_says_what_it_is), cmocka_unit_test(steps_and_reuse_change_nothing),
        cmocka_unit_test(options_are_in_force),  cmocka_unit_test(mistakes_are_errors),
        cmocka_unit_test(threads_share_a_model), cmocka_unit_test(text_goes_in_and_out),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
