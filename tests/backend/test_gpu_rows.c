/* Queries, KV rows and both compressors as device kernels, over passes of several sequences: rows, rings and histories equal to the
 * CPU's in every bit. */
#include "backend/gpu_kernel_test.h"

enum { SEQS = 3, LAYERS = 2, WINDOW = 6, MAX_ROWS = 40 };

typedef struct {
    int D, R, ID, ratio, hist;
    bool overlap;
    aff_rowfmt row, key;
    int64_t capacity;
} shape;

typedef struct {
    aff_layer_state layer[LAYERS];
    int64_t pos;
} sequence;

static int coff(const shape *s)
{
    return s->overlap ? 2 : 1;
}
static void open_sequence(sequence *q, const shape *s)
{
    memset(q, 0, sizeof *q);
    for (int l = 0; l < LAYERS; l++) {
        aff_layer_state *y = &q->layer[l];
        *y = (aff_layer_state){.row = &s->row, .key = &s->key, .raw_size = WINDOW + MAX_ROWS, .hist_size = s->hist};
        y->raw = NEW(uint8_t, y->raw_size * s->row.bytes);
        y->comp = NEW(uint8_t, (s->capacity / s->ratio + 1) * s->row.bytes);
        y->ikey = NEW(uint8_t, (s->capacity / s->ratio + 1) * s->key.bytes);
        const int64_t w = (int64_t)s->hist * coff(s) * s->D, iw = (int64_t)s->hist * coff(s) * s->ID;
        y->hist_c = NEW(float, w), y->hist_z = NEW(float, w), y->ihist_c = NEW(float, iw), y->ihist_z = NEW(float, iw);
    }
}
static void close_sequence(sequence *q)
{
    for (int l = 0; l < LAYERS; l++) {
        aff_layer_state *y = &q->layer[l];
        free(y->raw), free(y->comp), free(y->ikey), free(y->hist_c), free(y->hist_z), free(y->ihist_c), free(y->ihist_z);
    }
}
static void same_state(const sequence *a, const sequence *b, const shape *s)
{
    for (int l = 0; l < LAYERS; l++) {
        const aff_layer_state *x = &a->layer[l], *y = &b->layer[l];
        const int64_t groups = s->capacity / s->ratio;
        same_bytes("raw ring", x->raw, y->raw, (int64_t)x->raw_size * s->row.bytes);
        same_bytes("compressed rows", x->comp, y->comp, groups * s->row.bytes);
        same_bytes("index keys", x->ikey, y->ikey, groups * s->key.bytes);
        same_bits("history c", x->hist_c, y->hist_c, (int64_t)s->hist * coff(s) * s->D);
        same_bits("history z", x->hist_z, y->hist_z, (int64_t)s->hist * coff(s) * s->D);
        same_bits("index history c", x->ihist_c, y->ihist_c, (int64_t)s->hist * coff(s) * s->ID);
        same_bits("index history z", x->ihist_z, y->ihist_z, (int64_t)s->hist * coff(s) * s->ID);
    }
}

static void frequencies(float *f, int pairs)
{
    for (int i = 0; i < pairs; i++) f[i] = (float)pow(10000, -(double)i / pairs);
}

/* One pass over all sequences on the CPU and on both emulated devices. */
static void pass(const shape *s, sequence *host, sequence dev[2][SEQS], int rows, bool small)
{
    const int T = rows, D = s->D, w = coff(s) * D, iw = coff(s) * s->ID, pairs = s->R / 2, layer = draw_int(&seed, 0, LAYERS - 1);
    int64_t pos[MAX_ROWS];
    int first[MAX_ROWS], who[MAX_ROWS];
    aff_layer_state *state[MAX_ROWS];
    float freq[64];
    frequencies(freq, pairs);
    for (int t = 0, q = 0, f = 0; t < T; t++) {
        if (t > 0 && q + 1 < SEQS && (t - f == AFF_MAX_HC || draw(&seed, 7) == 0)) q++, f = t;
        who[t] = q, first[t] = f, pos[t] = host[q].pos + t - f, state[t] = &host[q].layer[layer];
    }
    float *kv = uniform((int64_t)T * D, 2), *norm = uniform(D, 1), *inorm = uniform(s->ID, 1), *c = uniform((int64_t)T * w, 1), *z = uniform((int64_t)T * w, 2);
    float *ic = uniform((int64_t)T * iw, 1), *iz = uniform((int64_t)T * iw, 2), *ape = uniform((int64_t)s->ratio * w, 1), *iape = uniform((int64_t)s->ratio * iw, 1);
    float *kvc = NEW(float, T * D), *zc = NEW(float, T * w), *izc = NEW(float, T * iw);
    memcpy(kvc, kv, sizeof *kv * (size_t)(T * D)), memcpy(zc, z, sizeof *z * (size_t)(T * w)), memcpy(izc, iz, sizeof *iz * (size_t)(T * iw));
    const aff_rope rope = {freq, pairs};
    const aff_rowset rs = {T, pos, first, state};
    const aff_compressor cc = {s->ratio, D, s->overlap, false, ape, norm, 1e-6f}, ci = {s->ratio, s->ID, s->overlap, true, iape, inorm, 1e-6f};
    aff__cpu_kv_finish(cpu, kvc, T, D, norm, 1e-6f, &rope, pos);
    aff__cpu_raw_store(cpu, &rs, kvc, D);
    aff__cpu_compress(cpu, &cc, &rope, &rs, c, zc);
    aff__cpu_compress(cpu, &ci, &rope, &rs, ic, izc);
    EACH_LAYOUT
    {
        const aff_layer_state *seq[MAX_ROWS];
        float *out = NEW(float, T * D);
        uint16_t *bf = NEW(uint16_t, T * D), *wb = NEW(uint16_t, T * D);
        for (int t = 0; t < T; t++) seq[t] = dev[layout_amd][who[t]].layer;
        const aff_k_rows kr = {pos, first, seq, T, layer};
        const aff_k_kv k = {.rows = kr, .kv = kv, .norm = norm, .f32 = out, .bf16 = bf, .freq = freq, .fmt = s->row, .D = D, .pairs = pairs, .store = 1, .eps = 1e-6f};
        launch("kv", (unsigned)T, 256, (size_t)(4 * D + 8 * pairs), &k);
        same_bits("kv", out, kvc, (int64_t)T * D);
        to_bf16(kvc, wb, (int64_t)T * D);
        same_bytes("kv bf16", bf, wb, 2 * (int64_t)T * D);
        const aff_k_compress a = {.rows = kr,
                                  .c = {{c, z, ape, norm, 0, s->row, s->ratio, D, s->overlap, 0, 1e-6f},
                                        {ic, iz, iape, inorm, 1 / sqrt((double)s->ID), s->key, s->ratio, s->ID, s->overlap, 1, 1e-6f}},
                                  .freq = freq, .count = 2, .pairs = pairs, .append = small};
        launch("compress", 2 * (unsigned)T, 512, (size_t)(48 * s->ratio + 12 * (D > s->ID ? D : s->ID) + 8 * pairs), &a);
        if (!small) launch("history", 2 * (unsigned)T, 256, 0, &a);
        free(out), free(bf), free(wb);
    }
    for (int t = 0; t < T; t++) {
        const int64_t next = pos[t] + 1;
        host[who[t]].pos = next, dev[0][who[t]].pos = next, dev[1][who[t]].pos = next;
    }
    free(kv), free(norm), free(inorm), free(c), free(z), free(ic), free(iz), free(ape), free(iape), free(kvc), free(zc), free(izc);
}

static int pow2_at_least(int n)
{
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

static void test_state(void **state)
{
    (void)state;
    static const int s[][5] = {{128, 64, 64, 4, 1}, {64, 16, 32, 4, 1}, {96, 32, 64, 8, 0}, {72, 8, 16, 2, 0}, {192, 64, 128, 16, 0}, {512, 64, 128, 4, 1}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        shape h = {.D = s[i][0], .R = s[i][1], .ID = s[i][2], .ratio = s[i][3], .overlap = s[i][4], .capacity = 220};
        h.hist = pow2_at_least(coff(&h) * h.ratio + 8);
        h.row = aff__rowfmt_kv(AFF_FAST, h.D, h.R), h.key = aff__rowfmt_key(AFF_FAST, h.ID);
        sequence host[SEQS], dev[2][SEQS];
        for (int q = 0; q < SEQS; q++) open_sequence(&host[q], &h), open_sequence(&dev[0][q], &h), open_sequence(&dev[1][q], &h);
        for (int round = 0; round < (i == 5 ? 5 : 10); round++) {
            const bool small = round & 1;
            pass(&h, host, dev, small ? draw_int(&seed, 1, 8) : draw_int(&seed, 1, i == 5 ? 20 : MAX_ROWS), small);
            EACH_LAYOUT
                for (int q = 0; q < SEQS; q++) same_state(&dev[layout_amd][q], &host[q], &h);
        }
        for (int q = 0; q < SEQS; q++) close_sequence(&host[q]), close_sequence(&dev[0][q]), close_sequence(&dev[1][q]);
    }
}

static void test_queries(void **state)
{
    (void)state;
    static const int s[][4] = {{512, 64, 9, 0}, {64, 16, 4, 0}, {70, 6, 1, 0}, {128, 64, 64, 1}, {32, 16, 3, 1}, {16, 4, 5, 1}, {256, 64, 2, 1}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        const int D = s[i][0], pairs = s[i][1] / 2, heads = s[i][2], index = s[i][3], T = draw_int(&seed, 1, 4);
        const int64_t n = (int64_t)T * heads * D, pos[4] = {0, 5, 1048575, 77777};
        float *q = uniform(n, 3), *want = NEW(float, n), freq[64];
        frequencies(freq, pairs);
        const aff_rope rope = {freq, pairs};
        memcpy(want, q, sizeof *q * (size_t)n);
        if (i == 3) want[40] = q[40] = NAN, want[900] = q[900] = 0;
        if (index)
            aff__cpu_index_query(cpu, want, T, heads, D, &rope, pos);
        else
            aff__cpu_q_finish(cpu, want, T, heads, D, 1e-6f, &rope, pos);
        EACH_LAYOUT
        {
            float *y = NEW(float, n);
            uint16_t *b = NEW(uint16_t, n), *wb = NEW(uint16_t, n);
            memcpy(y, q, sizeof *q * (size_t)n);
            const aff_k_query a = {.q = y, .f32 = y, .bf16 = b, .freq = freq, .pos = pos, .had = 1 / sqrt((double)D), .heads = heads, .D = D, .pairs = pairs, .index = index, .eps = 1e-6f};
            launch("query", (unsigned)T * up(heads, 8), 256, (size_t)((index ? 96 : 32) * D + 8 * pairs), &a);
            same_bits("query", y, want, n);
            to_bf16(want, wb, n);
            if (i != 3) same_bytes("query bf16", b, wb, 2 * n);
            free(y), free(b), free(wb);
        }
        free(q), free(want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_queries), cmocka_unit_test(test_state)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
