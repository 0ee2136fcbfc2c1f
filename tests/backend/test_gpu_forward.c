/* The whole forward pass on the emulated device against the CPU: every layer fed the CPU's input, then promises by
 * bits. --device NAME: all of it on that device instead. */
#include "backend/gpu/gpu_internal.h"
#include "model/runner.h"
#include "state/states.h"
#include <math.h>

static const char *card; /* --device */

static aff_runner *open_runner(const aff_net *net, const char *device)
{
    aff_device_spec spec;
    aff_backend *b;
    aff_runner *r;
    must(aff__device_parse(&spec, card ? card : device, &err));
    must(aff__gpu_backend(&b, &spec, AFF_FAST, &err));
    must(aff__runner_open(&r, net, b, &err));
    return r;
}

static aff_seq *open_on(const aff_net *n, const aff_runner *r)
{
    aff_seq *s;
    must(aff__seq_open(
        &s, n, &(aff_seq_options){.size = 512, .commit = 64, .margin = 32, .memory = aff__runner_memory(r)}, &err));
    return s;
}

static void close_on(aff_runner *r, aff_seq *s)
{
    aff__seq_free(s);
    aff__runner_free(r);
}

static double worst(const float *a, const float *b, int64_t n)
{
    double e = 0, m = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(a[i])) return INFINITY;
        e = fmax(e, fabs((double)a[i] - (double)b[i]));
        m = fmax(m, fabs((double)b[i]));
    }
    return e / m;
}

/* Layer by layer: streams in from the CPU, streams out compared. */
static void layers(const char *device, int rows)
{
    aff_net *net = open_net(AFF_FAST);
    const aff_config *c = aff__net_config(net);
    const int64_t width = (int64_t)c->hc * c->hidden;
    aff_runner *cpu, *gpu = open_runner(net, device);
    must(aff__runner_create(&cpu, net, 1, &err));
    aff_seq *a = open_on(net, cpu), *b = open_on(net, gpu);
    float *X = malloc(sizeof *X * (size_t)(rows * width));
    must(aff__seq_grow(a, 256, &err));
    must(aff__seq_grow(b, 256, &err));
    int64_t wrong = 0, total = 0;
    for (int at = 0; at + rows <= 160; at += rows) {
        for (int i = 0; i < 2; i++) {
            aff_runner *r = i ? gpu : cpu;
            aff__rows_begin(r, NULL, NULL);
            aff__rows_add(r, i ? b : a, ids[0] + at, rows, at);
            must(aff__rows_ready(r, &err));
            r->b->embed(r->b, &r->net->embed, r->dids, rows, c->hc, r->X);
        }
        for (int l = 0; l < aff__net_layers(net); l++) {
            must(gpu->b->mem->write(gpu->b->mem, gpu->X, cpu->X, (uint64_t)(rows * width) * 4, &err));
            aff__use_layer(cpu, l);
            aff__use_layer(gpu, l);
            must(aff__block(cpu, &cpu->net->layer[l], cpu->net->experts, l, l, AFF_CAUSAL, &err));
            must(aff__block(gpu, &gpu->net->layer[l], gpu->net->experts, l, l, AFF_CAUSAL, &err));
            must(gpu->b->mem->read(gpu->b->mem, X, gpu->X, (uint64_t)(rows * width) * 4, &err));
            for (int t = 0; t < rows; t++, total++) {
                const double e = worst(X + t * width, cpu->X + t * width, width);
                if (e > 3e-2) wrong++; /* a pick or a code on the other side of a tie */
                if (e > 0.5) fail_msg("%s: layer %d, position %d: error %.3g", device, l, at + t, e);
            }
        }
        must(aff__rows_done(gpu, &err));
    }
    print_message("%s, %d rows: %lld of %lld (row, layer) above 3e-2\n", device, rows, (long long)wrong,
                  (long long)total);
    assert_true(wrong * 50 <= total);
    free(X);
    close_on(cpu, a);
    close_on(gpu, b);
    aff__net_close(net);
}

static void test_layers_few(void **state)
{
    layers("emu:64M", 5);
}

static void test_layers_many(void **state)
{
    layers("emu:64M", 40);
}

static void test_layers_amd(void **state)
{
    layers("emu-amd:64M", 16);
}

/* Promise 2: the same bits in one chunk, in pieces of any width, after a restore; and after a rollback. */
static void same_in_pieces(const char *device, const int *piece, int n_pieces)
{
    enum { TO = 150 };
    aff_net *net = open_net(AFF_FAST);
    aff_runner *r = open_runner(net, device);
    aff_seq *a = open_on(net, r), *b = open_on(net, r);
    float *la = malloc(sizeof *la * TO * V), *lb = malloc(sizeof *lb * TO * V);
    must(aff__forward(r, &(aff_batch){.n = TO, .id = ids[0], .seq = a, .logits = la}, &err));
    for (int at = 0, i = 0, n; at < TO; at += n, i++) {
        n = piece[i % n_pieces] < TO - at ? piece[i % n_pieces] : TO - at;
        aff__rt_emu_seed((uint32_t)(i * 77));
        must(aff__forward(r, &(aff_batch){.n = n, .id = ids[0] + at, .seq = b, .logits = lb + at * V}, &err));
    }
    aff__rt_emu_seed(0);
    for (int t = 0; t < TO; t++)
        if (memcmp(la + t * V, lb + t * V, V * sizeof *la)) fail_msg("%s: position %d differs", device, t);
    assert_true(same_hash(aff__seq_digest(a), aff__seq_digest(b)));
    /* Widths that came again were recorded and repeated. */
    const aff_gpu *g = aff__gpu_of(r->b);
    int recorded = 0;
    for (int i = 0; i < g->n_records; i++) recorded += g->record[i].graph != NULL;
    assert_true(recorded > 0 || n_pieces == 4 || n_pieces == 16);
    /* Restored, and rolled back: the future is the same. */
    uint8_t *bytes;
    uint64_t size;
    must(aff__seq_snapshot(a, &bytes, &size, &err));
    aff__seq_reset(b);
    must(aff__seq_restore(b, bytes, size, &err));
    assert_true(same_hash(aff__seq_digest(a), aff__seq_digest(b)));
    must(aff__forward(r, &(aff_batch){.n = 4, .id = ids[1], .seq = b, .want_from = 4}, &err));
    must(aff__seq_rollback(b, TO, &err));
    int32_t da[5], db[5];
    float ca[5], cb[5];
    must(aff__draft_block(r, a, 9, da, ca, la, NULL, NULL, &err));
    must(aff__draft_block(r, b, 9, db, cb, lb, NULL, NULL, &err));
    assert_memory_equal(da, db, sizeof da);
    assert_memory_equal(ca, cb, sizeof ca);
    assert_memory_equal(la, lb, 5 * V * sizeof *la);
    must(aff__forward(r, &(aff_batch){.n = 20, .id = ids[0] + TO, .seq = a, .logits = la}, &err));
    must(aff__forward(r, &(aff_batch){.n = 20, .id = ids[0] + TO, .seq = b, .logits = lb}, &err));
    assert_memory_equal(la, lb, 20 * V * sizeof *la);
    /* Neighbours (promise 2): both in one pass. */
    aff__seq_reset(b);
    must(aff__forward(r, &(aff_batch){.n = 30, .id = ids[3], .seq = b, .want_from = 30}, &err));
    const aff_batch two[2] = {{.n = 3, .id = ids[0] + TO + 20, .seq = a, .logits = la},
                              {.n = 5, .id = ids[3] + 30, .seq = b, .logits = lb}};
    must(aff__forward_many(r, two, 2, &err));
    must(aff__seq_rollback(a, TO + 20, &err));
    must(aff__forward(r, &(aff_batch){.n = 3, .id = ids[0] + TO + 20, .seq = a, .logits = lb}, &err));
    assert_memory_equal(la, lb, 3 * V * sizeof *la);
    free(bytes);
    free(la);
    free(lb);
    aff__seq_free(a);
    close_on(r, b);
    aff__net_close(net);
}

static void test_promises(void **state)
{
    static const int few[] = {1, 2, 7, 16, 3}, many[] = {17, 64, 5, 33};
    same_in_pieces("emu:64M", few, 5);
    same_in_pieces("emu:64M", many, 4);
}

/* Every width of a decode pass, one after another. */
static void test_widths(void **state)
{
    static const int all[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
    same_in_pieces("emu:64M", all, 16);
}

static void test_promises_amd(void **state)
{
    static const int mixed[] = {1, 30, 16, 4, 8};
    same_in_pieces("emu-amd:64M", mixed, 5);
}

static int prepare(void **state)
{
    make_ids();
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--device")) card = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layers_few), cmocka_unit_test(test_layers_many), cmocka_unit_test(test_layers_amd),
        cmocka_unit_test(test_promises),   cmocka_unit_test(test_widths),      cmocka_unit_test(test_promises_amd),
    };
    return cmocka_run_group_tests(tests, prepare, NULL);
}
