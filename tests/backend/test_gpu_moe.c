/* Router, plan and routed experts as device kernels: the CPU's picks, weights and results in every bit, by the small kernels and by
 * the matrix unit's. */
#include "backend/gpu_kernel_test.h"
#include "base/mem.h"
#include "experts/store.h"

static void route(aff_scoring scoring, int E, int K, int T, bool bias, bool hash, bool odd)
{
    float *l = uniform((int64_t)T * E, 6), *b = uniform(E, 0.3f), *want = NEW(float, T * K);
    int32_t *table = NEW(int32_t, 50 * K), *ids = NEW(int32_t, T), *wp = NEW(int32_t, T * K);
    for (int i = 0; i < 50 * K; i++) table[i] = (i * 7 + i / K) % E;
    for (int t = 0; t < T; t++) ids[t] = draw_int(&seed, 0, 49);
    for (int i = 0; odd && i < T * E; i++) l[i] = draw(&seed, 3) ? (float)draw_int(&seed, -2, 2) : draw(&seed, 9) ? l[i] : NAN; /* ties */
    const aff_router r = {scoring, E, K, 1.5f, bias ? b : NULL, hash ? table : NULL};
    cpu->route(cpu, &r, l, ids, T, wp, want);
    EACH_LAYOUT
    {
        int32_t *picks = NEW(int32_t, T * K);
        float *w = NEW(float, T * K);
        const aff_k_route a = {.logits = l, .bias = r.bias, .hash = r.hash, .ids = ids, .picks = picks, .weights = w, .scoring = scoring, .experts = E, .picks_n = K, .T = T, .scale = 1.5f};
        launch("route", (unsigned)T, 32, 8 * (size_t)E, &a);
        same_bytes("picks", picks, wp, 4 * (int64_t)T * K);
        same_bits("weights", w, want, (int64_t)T * K);
        free(picks), free(w);
    }
    free(l), free(b), free(want), free(table), free(ids), free(wp);
}
static void test_route(void **state)
{
    (void)state;
    route(AFF_SQRTSOFTPLUS, 256, 6, 5, true, false, false);
    route(AFF_SQRTSOFTPLUS, 256, 6, 5, false, true, false);
    route(AFF_SIGMOID, 17, 4, 3, true, false, false);
    route(AFF_SOFTMAX, 70, 8, 3, false, false, false);
    route(AFF_SQRTSOFTPLUS, 16, 16, 4, true, false, true);
    route(AFF_SIGMOID, 1024, 3, 2, false, false, true);
}

typedef struct {
    int32_t *n, *row, *rank;
    float *weight;
    aff_k_item *item;
    int max;
} plan;

/* plan_many makes the same plan. */
static void same_by_many(const aff_k_plan *a, const plan *p)
{
    aff_k_plan b = *a;
    const int n = a->T * a->K;
    plan q = {NEW(int32_t, AFF_K_PLAN_COUNTS), NEW(int32_t, n), NEW(int32_t, n), NEW(float, n), NEW(aff_k_item, p->max), p->max};
    int32_t *log = a->log ? NEW(int32_t, a->T > AFF_K_FEW ? a->experts : n) : NULL;
    b.plan = (aff_k_moe){q.n, q.item, q.row, q.rank, q.weight};
    b.log = log;
    launch("plan_many", 1, 32 * (unsigned)draw_int(&seed, 1, 9), aff__k_plan_many_smem(a->experts), &b);
    assert_memory_equal(p->n, q.n, AFF_K_PLAN_COUNTS * sizeof *q.n);
    for (int i = 0; i < q.n[AFF_K_ITEMS]; i++) {
        const aff_k_item *x = &p->item[i], *y = &q.item[i];
        assert_true(x->base == y->base && x->where == y->where && x->expert == y->expert && x->first == y->first && x->count == y->count);
    }
    const int entries = n - q.n[AFF_K_BAD];
    assert_memory_equal(p->row, q.row, (size_t)entries * sizeof *q.row);
    assert_memory_equal(p->rank, q.rank, (size_t)entries * sizeof *q.rank);
    assert_memory_equal(p->weight, q.weight, (size_t)entries * sizeof *q.weight);
    if (log) assert_memory_equal(a->log, log, (size_t)(a->T > AFF_K_FEW ? a->experts : n) * sizeof *log);
    free(q.n), free(q.row), free(q.rank), free(q.weight), free(q.item), free(log);
}

/* base: where the experts are; NULL: on the card. log: NULL, or what the plan writes there. */
static plan device_plan(const int32_t *picks, const float *w, int T, int K, int E, int batch, const uint64_t *base, int32_t *log, aff_k_moe *m)
{
    plan p = {NEW(int32_t, AFF_K_PLAN_COUNTS), NEW(int32_t, T * K), NEW(int32_t, T * K), NEW(float, T * K), NULL, aff__k_max_items(T, K, E, batch)};
    p.item = NEW(aff_k_item, p.max);
    *m = (aff_k_moe){p.n, p.item, p.row, p.rank, p.weight};
    uint64_t *card = NEW(uint64_t, E);
    for (int e = 0; e < E; e++) card[e] = 256 * (uint64_t)(e + 1) | AFF_BASE_CARD;
    const aff_k_plan a = {.picks = picks, .weights = w, .base = base ? base : card, .plan = *m, .log = log, .T = T, .K = K, .experts = E, .batch = batch};
    launch("plan", 1, 32 * up(E < 1024 ? E : 1024, 32), aff__k_plan_smem(E), &a);
    same_by_many(&a, &p);
    free(card);
    return p;
}
static void free_plan(plan *p)
{
    free(p->n), free(p->row), free(p->rank), free(p->weight), free(p->item);
}

static void distinct_picks(int32_t *picks, int T, int K, int E)
{
    for (int t = 0; t < T; t++)
        for (int k = 0; k < K; k++) {
            bool again;
            do {
                picks[t * K + k] = draw(&seed, 3) ? draw_int(&seed, 0, E - 1) : draw_int(&seed, 0, (E < 3 * K ? E : 3 * K) - 1);
                again = false;
                for (int i = 0; i < k; i++) again |= picks[t * K + i] == picks[t * K + k];
            } while (again);
        }
}

static void test_plan(void **state)
{
    (void)state;
    static const int s[][4] = {{1, 6, 256, 8}, {37, 4, 16, 8}, {20, 3, 300, 1}, {256, 6, 256, 64}, {9, 5, 5, 4}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        const int T = s[i][0], K = s[i][1], E = s[i][2], batch = s[i][3];
        int32_t *picks = NEW(int32_t, T * K);
        float *w = uniform((int64_t)T * K, 1);
        distinct_picks(picks, T, K, E);
        layout_amd = 0;
        aff_k_moe m;
        uint64_t *base = NEW(uint64_t, E);
        int32_t *log = NEW(int32_t, T * K > E ? T * K : E), where[3] = {0};
        for (int e = 0; e < E; e++) base[e] = (uint64_t[]){256 * (uint64_t)e | AFF_BASE_CARD | AFF_BASE_HOST, 256 * (uint64_t)e | AFF_BASE_HOST, 0}[draw(&seed, 3)];
        plan p = device_plan(picks, w, T, K, E, batch, base, log, &m);
        int at = 0, item = 0;
        for (int c = 0; c < AFF_K_CLASSES; c++) /* classes ascending, experts ascending in each, and their rows */
            for (int e = 0; e < E; e++) {
                const int first = at;
                if ((base[e] & AFF_BASE_CARD ? AFF_K_CARD : base[e] ? AFF_K_HOST : AFF_K_DISK) != c) continue;
                for (int t = 0; t < T; t++)
                    for (int k = 0; k < K; k++) {
                        if (picks[t * K + k] != e) continue;
                        int rank = 0;
                        for (int j = 0; j < K; j++) rank += picks[t * K + j] < e;
                        assert_int_equal(p.row[at], t);
                        assert_int_equal(p.rank[at], rank);
                        assert_true(p.weight[at] == w[t * K + k]);
                        at++;
                    }
                if (T > AFF_K_FEW) assert_int_equal(log[e], at - first);
                for (int f = first; f < at; f += batch, item++, where[c]++) {
                    assert_int_equal(p.item[item].expert, e);
                    assert_int_equal(p.item[item].where, c);
                    assert_true(c == AFF_K_DISK || p.item[item].base == 256 * (uint64_t)e);
                    assert_int_equal(p.item[item].first, f);
                    assert_int_equal(p.item[item].count, at - f < batch ? at - f : batch);
                }
            }
        if (T <= AFF_K_FEW) same_bytes("log", log, picks, 4 * (int64_t)T * K);
        assert_int_equal(p.n[AFF_K_ITEMS], item);
        assert_int_equal(p.n[AFF_K_BAD], 0);
        assert_int_equal(p.n[AFF_K_ON_CARD], where[AFF_K_CARD]);
        assert_int_equal(p.n[AFF_K_ON_DISK], where[AFF_K_DISK]);
        assert_true(item <= p.max);
        free_plan(&p), free(picks), free(w), free(base), free(log);
    }
    int32_t bad[4] = {1, 7, -3, 0};
    float w[4] = {0};
    aff_k_moe m;
    plan p = device_plan(bad, w, 2, 2, 4, 8, NULL, NULL, &m);
    assert_int_equal(p.n[1], 2);
    free_plan(&p);
}

/* Experts on disk ask for themselves: tickets one after another over plans, staging slots by ticket; with a group, everything that is not on the
 * card has a slot of it in turn, and nothing is asked. */
static void test_requests(void **state)
{
    (void)state;
    enum { T = 4, K = 3, E = 40, SLOTS = 17, PITCH = 512 };
    uint64_t base[E], entry[SLOTS] = {0};
    uint32_t last = 5, head = 5;
    int32_t picks[T * K];
    float w[T * K] = {0};
    for (int round = 0; round < 6; round++) {
        for (int e = 0; e < E; e++) base[e] = (uint64_t[]){256 * (uint64_t)(e + 1) | AFF_BASE_CARD, 256 * (uint64_t)(e + 1) | AFF_BASE_HOST, 0, 0}[draw(&seed, 4)];
        base[E - 1] = 0;
        distinct_picks(picks, T, K, E);
        if (round & 1) picks[0] = E - 1, picks[1] = 0, picks[2] = 1; /* the last expert counts too */
        for (int group = 0; group < 2; group++) {
            aff_k_moe m;
            plan p = {NEW(int32_t, AFF_K_PLAN_COUNTS), NEW(int32_t, T * K), NEW(int32_t, T * K), NEW(float, T * K), NEW(aff_k_item, T * K), T * K};
            m = (aff_k_moe){p.n, p.item, p.row, p.rank, p.weight};
            const uint32_t before = last;
            aff_k_plan a = {.picks = picks, .weights = w, .base = base, .plan = m, .T = T, .K = K, .experts = E, .batch = 1 << 20};
            a.ring = (aff_k_ring){&last, entry, &head, 1 << 20, PITCH, SLOTS, 3};
            if (group) a.group = 1 << 24, a.group_slots = 4;
            launch("plan", 1, 64, aff__k_plan_smem(E), &a);
            if (group) same_by_many(&a, &p);
            uint32_t asked = 0, away = 0;
            for (int i = 0; i < p.n[AFF_K_ITEMS]; i++) {
                const aff_k_item *x = &p.item[i];
                if (x->where == AFF_K_CARD) {
                    assert_true(x->base == (base[x->expert] & ~255ull));
                } else if (group) {
                    assert_true(x->base == (1 << 24) + away++ % 4 * PITCH);
                } else if (x->where == AFF_K_HOST) {
                    assert_true(x->base == (base[x->expert] & ~255ull));
                } else {
                    const uint32_t ticket = before + ++asked;
                    assert_int_equal(x->ticket, ticket);
                    assert_true(x->base == (1 << 20) + ticket % SLOTS * PITCH);
                    assert_true(entry[ticket % SLOTS] == ((uint64_t)ticket << 32 | (uint32_t)(3 * E + x->expert)));
                }
                assert_true(x->ticket == 0 || (x->where == AFF_K_DISK && !group));
            }
            assert_int_equal(last, before + asked);
            assert_int_equal(head, last);
            free_plan(&p);
        }
    }
}

static int16_t table[2][1024][4];
static void make_table(void)
{
    for (int i = 0; i < 2 * 1024 * 4; i++) {
        const int m = draw_int(&seed, 8, 15) << draw_int(&seed, 0, 6);
        (&table[0][0][0])[i] = (int16_t)(draw(&seed, 2) ? -m : m);
    }
    table[0][5][0] = 960, table[1][1023][3] = -960;
}

static aff_expert_mat random_matrix(aff_dtype d, int rows, int cols)
{
    const int64_t n = (int64_t)rows * cols;
    const bool mx = d == AFF_MXFP4;
    uint8_t *codes = NEW(uint8_t, mx ? n / 2 : n / 64 * 20), *fields = NEW(uint8_t, mx ? n / 32 : n / 64 * 3), *rs = NEW(uint8_t, 2 * rows);
    for (int64_t i = 0; i < (mx ? n / 2 : n / 64 * 20); i++) codes[i] = (uint8_t)draw(&seed, 256);
    for (int64_t i = 0; i < (mx ? n / 32 : n / 64 * 3); i++) fields[i] = (uint8_t)(mx ? draw_int(&seed, 114, 124) : draw_int(&seed, 0, 255));
    for (int r = 0; r < rows; r++) {
        const uint16_t h = aff__f32_to_bf16(r % 7 == 3 ? 0.0f : ldexpf(1.5f + 0.4f * draw_unit(&seed), -14));
        rs[2 * r] = (uint8_t)h, rs[2 * r + 1] = (uint8_t)(h >> 8);
    }
    return (aff_expert_mat){codes, fields, rs};
}
static void free_matrix(aff_expert_mat *m)
{
    free((void *)(uintptr_t)m->codes), free((void *)(uintptr_t)m->fields), free((void *)(uintptr_t)m->rscale);
}

static void experts(aff_dtype d, int hidden, int inter, int E, int K, int T, float limit)
{
    aff_expert *e = NEW(aff_expert, E);
    for (int i = 0; i < E; i++) e[i] = (aff_expert){random_matrix(d, inter, hidden), random_matrix(d, inter, hidden), random_matrix(d, hidden, inter)};
    const int64_t n = (int64_t)T * K * hidden;
    const int gx = (int)up(hidden, 128), gh = (int)up(inter, 128);
    float *x = uniform((int64_t)T * hidden, 2), *w = uniform((int64_t)T * K, 1), *want = NEW(float, n), *xs = NEW(float, T * gx);
    int32_t *picks = NEW(int32_t, T * K);
    int8_t *xq = NEW(int8_t, T * hidden);
    x[0] = 1000, x[hidden / 2] = T > 1 ? 0 : x[1];
    distinct_picks(picks, T, K, E);
    layout_amd = 0;
    aff_k_moe m;
    plan p = device_plan(picks, w, T, K, E, 1 << 20, NULL, NULL, &m); /* an item an expert: the CPU's tiles */
    aff_moe_tile *tile = NEW(aff_moe_tile, E);
    for (int i = 0; i < p.n[0]; i++) tile[i] = (aff_moe_tile){e[p.item[i].expert], p.item[i].expert, p.item[i].first, p.item[i].count};
    const aff_moe_plan host = {.n_tiles = p.n[0], .n_entries = T * K, .tile = tile, .row = p.row, .rank = p.rank, .weight = p.weight};
    const aff_expert_shape shape = {d, hidden, inter, limit, table};
    const aff_slot_layout slot = aff__slot_layout(d, hidden, inter);
    uint8_t *slots = NEW(uint8_t, (int64_t)slot.pitch * E + 256), *at = (uint8_t *)aff__align_up((uintptr_t)slots, 256);
    uint64_t *base = NEW(uint64_t, E);
    for (int i = 0; i < E; i++) {
        aff__slot_gather(&slot, &e[i], at + (uint64_t)i * slot.pitch);
        base[i] = (uintptr_t)(at + (uint64_t)i * slot.pitch) | (draw(&seed, 2) ? AFF_BASE_CARD : AFF_BASE_HOST);
    }
    aff_error err;
    assert_int_equal(cpu->experts(cpu, &shape, &host, x, T, K, want, &err), AFF_OK);
    EACH_LAYOUT
        for (int form = 0; form < 4; form++) {
            const bool wg = form == 3, many = form == 1 || wg, stream = form == 2;
            if ((form >= 2 && d == AFF_MXFP4) || (wg && (layout_amd || hidden % 128 || inter % 128))) continue;
            const int batch = many ? aff__k_item_many(layout_amd) : AFF_K_ITEM_FEW;
            plan q = device_plan(picks, w, T, K, E, batch, base, NULL, &m);
            float *y = NEW(float, n), *h = NEW(float, T * K * inter), *hs = NEW(float, T * K * gh);
            int8_t *hq = NEW(int8_t, T * K * inter);
            const aff_k_convert cx = {.x = x, .ldx = hidden, .y = {.q = xq, .qs = xs}, .n = hidden};
            launch("convert", (unsigned)T, 256, 0, &cx);
            aff_k_experts a = {.plan = m, .table = &table[0][0][0], .xq = xq, .xs = xs, .h = h, .hq = hq, .hs = hs, .y = y,
                                     .dtype = d, .hidden = hidden, .inter = inter, .K = K, .limit = limit, .link = draw_int(&seed, 1, 4)};
            for (int i = 0; i < 9; i++) a.off[i / 3][i % 3] = (uint32_t)slot.plane[i / 3][i % 3];
            const unsigned items = (unsigned)q.max;
            a.items = q.max;
            if (wg) {
                assert_true(aff__k_xw_fits(&a));
                launch("experts_wg_up", (unsigned)draw_int(&seed, 1, 5), 384, AFF_K_XW_SMEM_EMU, &a);
                const aff_k_convert ch = {.x = h, .ldx = inter, .y = {.q = hq, .qs = hs}, .n = inter};
                launch("convert", (unsigned)(T * K), 256, 0, &ch);
                launch("experts_wg_down", (unsigned)draw_int(&seed, 1, 5), 384, AFF_K_XW_SMEM_EMU, &a);
            } else if (many) {
                launch("experts_many_up", items * up(inter, 64), 256, aff__k_experts_many_smem(layout_amd), &a);
                const aff_k_convert ch = {.x = h, .ldx = inter, .y = {.q = hq, .qs = hs}, .n = inter};
                launch("convert", (unsigned)(T * K), 256, 0, &ch);
                launch("experts_many_down", items * up(hidden, 64), 256, aff__k_experts_many_smem(layout_amd), &a);
            } else if (stream) {
                aff_k_experts s = a;
                s.copies = 1 << draw(&seed, 4);
                launch("experts_stream_up", (unsigned)draw_int(&seed, 1, 5), 512, aff__k_stream_smem(s.copies, hidden), &s);
                launch("experts_stream_down", (unsigned)draw_int(&seed, 1, 5), 512, aff__k_stream_smem(s.copies, inter), &s);
            } else {
                launch("experts_up", items * up(inter, 128), 128, aff__k_experts_smem(d, hidden) + 4096, &a);
                launch("experts_down", items * up(hidden, 128), 128, aff__k_experts_smem(d, inter), &a);
            }
            same_bits(many ? "experts, many" : stream ? "experts, streamed" : "experts, few", y, want, n);
            free(y), free(h), free(hs), free(hq), free_plan(&q);
        }
    for (int i = 0; i < E; i++) free_matrix(&e[i].gate), free_matrix(&e[i].up), free_matrix(&e[i].down);
    free(e), free(x), free(w), free(want), free(xs), free(picks), free(xq), free(tile), free(slots), free(base), free_plan(&p);
}

static void test_experts(void **state)
{
    (void)state;
    make_table();
    experts(AFF_Q2P875G, 256, 128, 8, 4, 3, 10);
    experts(AFF_Q2P875G, 384, 256, 3, 2, 70, 10);
    experts(AFF_Q2P875G, 192, 320, 5, 2, 40, 0.5f);
    experts(AFF_Q2P875G, 64, 64, 2, 1, 90, 0);
    experts(AFF_MXFP4, 256, 128, 6, 3, 5, 10);
    experts(AFF_MXFP4, 96, 224, 3, 2, 37, 0.5f);
    experts(AFF_MXFP4, 32, 32, 4, 4, 2, 0);
}

static void test_swiglu(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        const int64_t n = draw_int(&seed, 1, 2000);
        const float limit = round == 0 ? 0 : round == 1 ? 0.5f : 10;
        float *a = floats(n, true, &seed), *b = floats(n, true, &seed), *want = NEW(float, n);
        a[0] = NAN;
        memcpy(want, a, sizeof *a * (size_t)n);
        aff__cpu_swiglu(cpu, want, b, limit, n);
        EACH_LAYOUT
        {
            float *y = NEW(float, n);
            const aff_k_swiglu k = {.a = a, .b = b, .f32 = y, .n = n, .limit = limit};
            launch("swiglu", up(n, 256), 256, 0, &k);
            same_bits("swiglu", y, want, n);
            free(y);
        }
        free(a), free(b), free(want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_route), cmocka_unit_test(test_plan), cmocka_unit_test(test_requests), cmocka_unit_test(test_experts), cmocka_unit_test(test_swiglu)};
    return cmocka_run_group_tests(tests, cpu_up, cpu_down);
}
