/* A trace of routes against the routes themselves, and forced routes: the same for every chunk and width. */
#include "engine/bench.h"
#include "engine/engine.h"
#include "format/route.h"
#include "model/synthetic.h"
#include "support/test.h"
#include <stdlib.h>
#include <string.h>

static char root[] = "/tmp/aff-routes-XXXXXX";
static aff_error err;
enum { MOST = 200000, TOKENS = 24, PROMPT = 70 };

static void must(aff_status s)
{
    if (s != AFF_OK) fail_msg("%s", err.msg);
}

/* What the hook saw, as numbers. */
typedef struct log {
    int32_t v[MOST];
    int n;
} log;
static void add(log *l, int32_t v)
{
    assert_true(l->n < MOST);
    l->v[l->n++] = v;
}

static log direct, read_back;
static int layers_of_head;

typedef struct both {
    aff_route_trace *trace;
} both;
static void hook(void *ctx, const aff_route *r)
{
    aff__route_trace_note(((both *)ctx)->trace, r);
    add(&direct, r->draft ? 'S' : 'D');
    add(&direct, r->layer);
    add(&direct, r->rows);
    for (int i = 0; i < r->rows * r->picks; i++) add(&direct, r->pick[i]);
    /* The highest logit of one row has the highest score, where scores are monotonous and there is no bias. */
    if (r->rows == 1 && !r->bias && !r->draft) {
        int best = 0;
        for (int e = 1; e < r->experts; e++)
            if (r->logits[e] > r->logits[best]) best = e;
        add(&direct, -1 - best);
    } else {
        add(&direct, -1000);
    }
}

static int top_of_line; /* of the last G line */
static void head(void *ctx, int layers, int experts, int picks)
{
    layers_of_head = layers;
}
static bool record(void *ctx, const aff_route_record *r)
{
    if (r->kind == 'G') {
        top_of_line = 0;
        int zeros = 0;
        for (int e = 0; e < r->n; e++) {
            if (r->id[e] > r->id[top_of_line]) top_of_line = e;
            zeros += r->id[e] == 0;
        }
        assert_int_equal(r->id[top_of_line], 1000);
        assert_true(zeros > 0);
    }
    if (r->kind != 'D' && r->kind != 'S') return true;
    assert_int_equal(r->n_miss, 0); /* all experts are in memory */
    add(&read_back, r->kind);
    add(&read_back, r->layer);
    add(&read_back, r->rows);
    for (int i = 0; i < r->n; i++) add(&read_back, r->id[i]);
    const int at = read_back.n;
    add(&read_back, direct.v[at] == -1000 ? -1000 : -1 - top_of_line);
    return true;
}

static void test_trace(void **state)
{
    char path[64];
    aff_net *net;
    aff_engine *e;
    aff_outcome o;
    both b;
    int32_t prompt[PROMPT];
    snprintf(path, sizeof path, "%s/trace", root);
    must(aff__net_open(&net, AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark",
                       &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    must(aff__route_trace_open(&b.trace, path, net, &err));
    must(aff__engine_create(
        &e, net,
        &(aff_engine_options){
            .threads = 1, .slots = 1, .context = 200, .width = 3, .chunk = 32, .route = hook, .route_ctx = &b},
        &err));
    for (int i = 0; i < PROMPT; i++) prompt[i] = 2 + i * 17 % 200;
    must(aff__engine_run(e,
                         &(aff_request){.prompt = prompt, .n_prompt = PROMPT, .n_predict = TOKENS, .ignore_eos = true},
                         &(aff_events){0}, &o, &err));
    aff__engine_free(e);
    must(aff__route_trace_close(b.trace, true, &err));
    must(aff__route_read(path, &(aff_route_reader){NULL, head, record}, &err));
    assert_int_equal(layers_of_head, aff__net_layers(net));
    assert_true(direct.n > 1000);
    assert_int_equal(read_back.n, direct.n);
    assert_memory_equal(read_back.v, direct.v, (size_t)direct.n * sizeof *direct.v);
    aff__net_close(net);
}

static bool on_token(void *ctx, const aff_token *t)
{
    add(ctx, t->id);
    return true;
}

static void test_forced(void **state)
{
    aff_net *net;
    aff_routegen *g;
    static log want, got;
    static aff_bench_routes routes;
    int32_t prompt[PROMPT];
    must(aff__net_open(&net, AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark",
                       &(aff_net_options){.numerics = AFF_FAST, .draft = true}, &err));
    const aff_config *c = aff__net_config(net);
    must(aff__routegen_create(&g, &(aff_routegen_options){aff__net_layers(net), c->experts, c->picks, 0.7, 0.5, 9},
                              &err));
    for (int i = 0; i < PROMPT; i++) prompt[i] = 2 + i * 17 % 200;
    for (int i = 0; i < 5; i++) {
        static const int width[] = {0, 0, 3, 5, 0}, chunk[] = {256, 7, 64, 256, 256};
        aff_engine *e;
        aff_outcome o;
        got.n = 0;
        routes = (aff_bench_routes){.force = i < 4 ? g : NULL, .counting = true};
        must(aff__engine_create(&e, net,
                                &(aff_engine_options){.threads = 1,
                                                      .slots = 1,
                                                      .context = 200,
                                                      .width = width[i],
                                                      .chunk = chunk[i],
                                                      .route = aff__bench_route,
                                                      .route_ctx = &routes},
                                &err));
        must(aff__engine_run(
            e, &(aff_request){.prompt = prompt, .n_prompt = PROMPT, .n_predict = TOKENS, .ignore_eos = true},
            &(aff_events){.ctx = &got, .token = on_token}, &o, &err));
        aff__engine_free(e);
        if (i == 0) want = got;
        if (i < 4)
            assert_memory_equal(&got, &want, sizeof got);
        else
            assert_memory_not_equal(&got, &want, sizeof got); /* the router's own give another text */
        assert_true(routes.used[0] > 0 && routes.hits[0] == routes.used[0]);
        assert_true((routes.used[1] > 0) == (width[i] > 0));
    }
    aff__routegen_free(g);
    aff__net_close(net);
}

/* Bytes of a pass, by hand for this network's shapes. */
static void test_bytes(void **state)
{
    aff_net *net;
    aff_seq_plan p;
    const aff_synthetic flash = {.geometry = "flash"};
    must(aff__net_open(&net, NULL, &(aff_net_options){.numerics = AFF_FAST, .synthetic = &flash, .outline = true},
                       &err));
    must(aff__seq_plan(&p, net, 1, &err));
    /* At position 99,999: 128 window rows everywhere; 21 layers choose 512 of 25,000 rows and read all keys; 20 layers
     * have 781 rows. */
    const uint64_t want = (43 * 128 + 21 * 512 + 20 * 781) * p.row_bytes + 21 * 25000 * p.key_bytes;
    assert_int_equal(aff__bench_state(net, 99999, &err), want);
    assert_int_equal(aff__bench_state(net, 9, &err), (43 * 10 + 21 * 2) * p.row_bytes);
    /* Spec runtime 1 and design 7: about 7.7 GB of dense weights and head a token. */
    assert_in_range(aff__bench_dense(net, false), UINT64_C(7300000000), UINT64_C(7900000000));
    aff__net_close(net);
    double rate;
    must(aff__bench_memory_rate(1, 8 << 20, &rate, &err));
    assert_true(rate > 0);
}

static int setup(void **state)
{
    return mkdtemp(root) ? 0 : -1;
}
static int teardown(void **state)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", root);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_trace), cmocka_unit_test(test_forced),
                                       cmocka_unit_test(test_bytes)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
