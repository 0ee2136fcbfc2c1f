/* engine/foresight: a router asked in time says what it will choose; asking too early changes nothing and is counted
 * right. */
#include "support/test.h"
#include "base/mem.h"
#include "engine/foresight.h"
#include "experts/predict.h"
#include <stdlib.h>
#include <string.h>

static aff_error err;
static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

enum { ROWS = 70, EXPERTS = 16, PICKS = 4, LAYERS = 6, HASH = 2 };

typedef struct asking {
    aff_runner *runner;
    int32_t top[ROWS * PICKS];
    int layers, judged;
    bool early;
} asking;

static bool has(const int32_t *v, int32_t x)
{
    for (int k = 0; k < PICKS; k++)
        if (v[k] == x) return true;
    return false;
}

static void watch(void *ctx, const char *what, int layer, int row0, const void *data, int rows, int width)
{
    asking *a = ctx;
    if (!strcmp(what, "x_attn")) {
        a->layers++;
        if (a->early) aff__runner_foresee(a->runner, layer + 1);
        const float *v = aff__runner_foresee(a->runner, layer);
        assert_int_equal(v == NULL, layer < HASH);
        for (int t = 0; v && t < rows; t++) aff__predict_top(v + t * EXPERTS, EXPERTS, PICKS, a->top + t * PICKS);
    } else if (!strcmp(what, "x")) {
        if (a->early) aff__runner_foresee(a->runner, layer + 1);
        assert_null(aff__runner_foresee(a->runner, -1));
        assert_null(aff__runner_foresee(a->runner, LAYERS));
    } else if (!strcmp(what, "router_ids") && layer >= HASH) {
        const int32_t *picks = data;
        for (int i = 0; i < rows * PICKS; i++) assert_true(has(picks + i / PICKS * PICKS, a->top[i]));
        a->judged += rows;
    }
}

static void in_time_it_is_exact(void **state)
{
    aff_net *net;
    aff_runner *r;
    int32_t ids[ROWS];
    float *plain, *asked;
    for (int i = 0; i < ROWS; i++) ids[i] = (i * 37 + 11) % 4000;
    must(aff__net_open(&net, AFF_SOURCE_DIR "/models/tiny-v4", &(aff_net_options){0}, &err));
    must(aff__runner_create(&r, net, 1, &err));
    const uint64_t n = (uint64_t)ROWS * (uint64_t)aff__net_config(net)->vocab;
    must(aff__calloc(&plain, n, sizeof *plain, "test", &err));
    must(aff__calloc(&asked, n, sizeof *asked, "test", &err));
    for (int pass = 0; pass < 3; pass++) {
        aff_seq *seq;
        asking a = {.runner = r, .early = pass == 2};
        must(aff__seq_create(&seq, net, ROWS, &err));
        must(aff__forward(r,
                          &(aff_batch){.n = ROWS,
                                       .id = ids,
                                       .seq = seq,
                                       .logits = pass ? asked : plain,
                                       .trace = pass ? watch : NULL,
                                       .trace_ctx = &a},
                          &err));
        aff__seq_free(seq);
        if (!pass) continue;
        assert_int_equal(a.layers, LAYERS);
        assert_int_equal(a.judged, ROWS * (LAYERS - HASH));
        assert_memory_equal(plain, asked, n * sizeof *plain);
    }
    free(plain);
    free(asked);
    aff__runner_free(r);
    /* The whole measurement: every pick of the layers that route, for the two ways that know them and the one that
     * lacks a layer less. */
    FILE *csv = tmpfile();
    assert_non_null(csv);
    must(aff__foresight(net, 1, ids, ROWS, csv, &err));
    rewind(csv);
    char line[128];
    int lines = 0, alls = 0;
    double last = 0;
    assert_non_null(fgets(line, sizeof line, csv));
    assert_string_equal(line, "layer,when,guesses,recall,picks\n");
    while (fgets(line, sizeof line, csv)) {
        char layer[8], when[16];
        int guesses, picks;
        double recall;
        assert_int_equal(sscanf(line, "%7[^,],%15[^,],%d,%lf,%d", layer, when, &guesses, &recall, &picks), 5);
        assert_int_equal(picks, ROWS * PICKS * (strcmp(layer, "all") ? 1 : LAYERS - HASH));
        if (guesses == PICKS) last = 0;
        assert_true(recall >= last && recall <= 1);
        last = recall;
        if (guesses == EXPERTS) assert_float_equal(recall, 1, 0);
        if (guesses == PICKS && !strcmp(layer, "all")) {
            assert_true(recall > 0.4); /* chance: 4 of 16 */
            alls++;
        }
        lines++;
    }
    assert_int_equal(lines, 3 * 4 * (LAYERS - HASH + 1));
    assert_int_equal(alls, 3);
    fclose(csv);
    aff__net_close(net);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(in_time_it_is_exact)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
