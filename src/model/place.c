/* Puts a network's weights where a backend reads them (backend.h, place): the runner's own copy of the bound network,
 * with addresses of the backend's memory in place of the host's. */
#include "base/mem.h"
#include "experts/tiers.h"
#include "model/runner.h"
#include <stdlib.h>
#include <string.h>

/* Changes a const pointer of any type. */
static aff_status array(aff_runner *r, void *pointer, uint64_t bytes, aff_error *err)
{
    const void **p = pointer;
    return *p ? r->b->place(r->b, p, bytes, "dense weights", err) : AFF_OK;
}

static aff_status floats(aff_runner *r, const float **p, int64_t n, aff_error *err)
{
    return array(r, p, (uint64_t)n * sizeof(float), err);
}

/* Device kernels take FP8 weights to be finite: eight codes at a time, 0x7f or 0xff is one whose low seven bits overflow. */
static aff_status finite(const aff_weight *w, uint64_t n, aff_error *err)
{
    const uint8_t *b = w->data;
    for (uint64_t i = 0, v; i < n; i += 8) {
        v = 0;
        memcpy(&v, b + i, n - i < 8 ? (size_t)(n - i) : 8);
        if (((v & 0x7f7f7f7f7f7f7f7full) + 0x0101010101010101ull) & 0x8080808080808080ull)
            return aff__fail(err, AFF_E_FORMAT, "FP8 matrix of %d x %d: NaN in row %llu, expected numbers: the file is damaged (aff-info --verify says where)", w->rows,
                             w->cols, (unsigned long long)(i / (uint64_t)w->cols));
    }
    return AFF_OK;
}

static aff_status weight(aff_runner *r, aff_weight *w, aff_error *err)
{
    const uint64_t rows = (uint64_t)w->rows, cols = (uint64_t)w->cols, tile = w->dtype == AFF_FP8 ? 128 : 32;
    const uint64_t size = w->dtype == AFF_F32 ? 4 : w->dtype == AFF_BF16 ? 2 : 1;
    if (w->data && (w->dtype == AFF_FP8 || w->dtype == AFF_FP8_32)) AFF_TRY(finite(w, rows * cols, err));
    AFF_TRY(array(r, &w->data, rows * cols * size, err));
    return array(r, &w->scale, (rows + tile - 1) / tile * ((cols + tile - 1) / tile), err);
}

static aff_status hyper(aff_runner *r, aff_hc *h, aff_error *err)
{
    AFF_TRY(weight(r, &h->fn, err));
    AFF_TRY(floats(r, &h->scale, h->fn.rows > h->streams ? 3 : 1, err));
    return floats(r, &h->base, h->fn.rows, err);
}

static aff_status compressor(aff_runner *r, aff_compressor *c, aff_error *err)
{
    AFF_TRY(floats(r, &c->ape, (int64_t)c->ratio * (c->overlap ? 2 : 1) * c->dim, err));
    return floats(r, &c->norm, c->dim, err);
}

static aff_status block(aff_runner *r, aff_block *b, aff_error *err)
{
    const aff_config *c = &r->source->cfg;
    aff_weight *const w[] = {&b->wq_a,           &b->wq_b,       &b->wkv,      &b->wo_a,     &b->wo_b,
                             &b->comp_wkv,       &b->comp_wgate, &b->idx_wq_b, &b->idx_proj, &b->idx_comp_wkv,
                             &b->idx_comp_wgate, &b->gate,       &b->sh_gate,  &b->sh_up,    &b->sh_down};
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) AFF_TRY(weight(r, w[i], err));
    AFF_TRY(hyper(r, &b->hc_attn, err));
    AFF_TRY(hyper(r, &b->hc_ffn, err));
    AFF_TRY(compressor(r, &b->comp, err));
    AFF_TRY(compressor(r, &b->idx_comp, err));
    AFF_TRY(floats(r, &b->attn_norm, c->hidden, err));
    AFF_TRY(floats(r, &b->ffn_norm, c->hidden, err));
    AFF_TRY(floats(r, &b->q_norm, c->q_rank, err));
    AFF_TRY(floats(r, &b->kv_norm, c->head_dim, err));
    AFF_TRY(floats(r, &b->sink, c->heads, err));
    AFF_TRY(floats(r, &b->router.bias, b->router.experts, err));
    return array(r, &b->router.hash, (uint64_t)c->vocab * (uint64_t)b->router.picks * sizeof(int32_t), err);
}

/* ---- routed experts ---- */

static aff_status place_experts(aff_runner *r, aff_experts *store, int layers, aff_expert_table *out, aff_error *err)
{
    const int experts = r->source->cfg.experts;
    const uint64_t n = (uint64_t)layers * (uint64_t)experts;
    const aff_slot_layout y = aff__experts_layout(store);
    uint64_t *base = NULL;
    uint8_t *slot = NULL;
    aff_status st = aff__calloc(&base, n, sizeof *base, "expert table", err);
    if (st == AFF_OK) st = aff__calloc(&slot, y.pitch, 1, "expert slot", err);
    for (int i = 0; st == AFF_OK && i < layers * experts; i++) {
        const void *p = slot;
        aff__experts_copy(store, i / experts, i % experts, slot);
        st = r->b->place(r->b, &p, y.bytes, "routed experts", err);
        base[i] = (uint64_t)(uintptr_t)p | AFF_BASE_CARD;
    }
    const void *p = base;
    if (st == AFF_OK) st = r->b->place(r->b, &p, n * sizeof *base, "expert table", err);
    free(slot);
    free(base);
    *out = (aff_expert_table){.base = p, .layers = layers, .experts = experts};
    for (int i = 0; i < 9; i++) out->plane[i / 3][i % 3] = (uint32_t)y.plane[i / 3][i % 3];
    return st;
}

/* ---- all of it ---- */

static aff_status draft(aff_runner *r, aff_net *n, aff_error *err)
{
    const aff_config *c = &n->cfg;
    aff_weight *const w[] = {&n->main_proj, &n->markov_w1, &n->markov_w2, &n->confidence, &n->e_proj, &n->h_proj};
    for (int i = 0; i < n->stages; i++) AFF_TRY(block(r, &n->stage[i], err));
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) AFF_TRY(weight(r, w[i], err));
    AFF_TRY(hyper(r, &n->draft_hc_head, err));
    AFF_TRY(floats(r, &n->draft_norm, c->hidden, err));
    AFF_TRY(floats(r, &n->main_norm, c->hidden, err));
    AFF_TRY(floats(r, &n->enorm, c->hidden, err));
    AFF_TRY(floats(r, &n->hnorm, c->hidden, err));
    return AFF_OK;
}

aff_status aff__place_experts(aff_runner *r, aff_error *err)
{
    const aff_net *n = r->net;
    AFF_TRY(place_experts(r, n->experts, n->layers, &r->experts, err));
    return n->draft == AFF_DRAFT_NONE ? AFF_OK : place_experts(r, n->draft_experts, n->stages, &r->draft_experts, err);
}

aff_status aff__place(aff_runner *r, aff_error *err)
{
    aff_net *n;
    AFF_TRY(aff__calloc(&n, 1, sizeof *n, "placed network", err));
    r->placed = n;
    *n = *r->source;
    r->net = n;
    for (int l = 0; l < n->layers; l++) AFF_TRY(block(r, &n->layer[l], err));
    AFF_TRY(weight(r, &n->embed, err));
    AFF_TRY(weight(r, &n->head, err));
    AFF_TRY(floats(r, &n->norm, n->cfg.hidden, err));
    AFF_TRY(hyper(r, &n->hc_head, err));
    AFF_TRY(floats(r, &n->rope.freq, n->rope.pairs, err));
    AFF_TRY(floats(r, &n->rope_compressed.freq, n->rope_compressed.pairs, err));
    const aff_expert_shape s = aff__experts_shape(n->experts);
    r->shape_table = s.table;
    if (s.table) AFF_TRY(array(r, &r->shape_table, 2 * sizeof *s.table, err));
    return n->draft == AFF_DRAFT_NONE ? AFF_OK : draft(r, n, err);
}

aff_status aff__runner_slab(aff_runner *r, const aff_slab_options *o, aff_card *card, aff_error *err)
{
    const aff_net *n = r->net;
    const int E = n->cfg.experts, stages = n->draft == AFF_DRAFT_NONE ? 0 : n->stages;
    const aff_slot_layout y = aff__experts_layout(n->experts);
    aff_expert_table t;
    aff_slab_options use = *o;
    if (!r->b->slab) return aff__fail(err, AFF_E_INVALID, "slab of experts: %s has no memory of its own for them", r->b->name);
    use.pitch = y.pitch;
    use.bytes = y.bytes;
    use.layers = n->layers + stages;
    use.experts = E;
    use.picks = n->cfg.picks;
    for (int i = 0; i < 9; i++) use.plane[i / 3][i % 3] = (uint32_t)y.plane[i / 3][i % 3];
    if (stages) {
        const aff_slot_layout d = aff__experts_layout(n->draft_experts);
        if (d.pitch != y.pitch || memcmp(d.plane, y.plane, sizeof d.plane) != 0)
            return aff__fail(err, AFF_E_UNSUPPORTED, "the draft's experts are laid out otherwise than the model's: expected %llu bytes each, got %llu",
                             (unsigned long long)y.pitch, (unsigned long long)d.pitch);
    }
    AFF_TRY(r->b->slab(r->b, &use, card, &t, err));
    r->can_fetch = r->b->predict != NULL;
    r->ahead = r->can_fetch ? use.ahead : 0;
    r->experts = r->draft_experts = t;
    r->experts.layers = n->layers;
    r->draft_experts.layers = stages;
    r->draft_experts.base += (int64_t)n->layers * E;
    return AFF_OK;
}

/* A table in the backend's memory, which is placed once. */
static aff_status force_table(aff_runner *r, const int32_t *table, int32_t **at, aff_error *err)
{
    const aff_config *c = &r->source->cfg;
    const uint64_t bytes = (uint64_t)r->source->layers * (uint64_t)c->vocab * (uint64_t)c->picks * sizeof *table;
    if (*at) return r->b->mem->write(r->b->mem, *at, table, bytes, err);
    return r->b->mem->alloc(r->b->mem, (void **)at, bytes, "forced routes", err) == AFF_OK ? r->b->mem->write(r->b->mem, *at, table, bytes, err) : AFF_E_NOMEM;
}

aff_status aff__runner_force(aff_runner *r, const aff_forced *f, aff_error *err)
{
    const int64_t each = (int64_t)r->source->cfg.vocab * r->source->cfg.picks;
    if (!r->placed) return aff__fail(err, AFF_E_UNSUPPORTED, "forced routes: on the CPU they are replaced as they are made");
    AFF_TRY(force_table(r, f->table, &r->forced, err));
    for (int l = 0; l < r->source->layers; l++) r->placed->layer[l].router.hash = r->forced + l * each;
    r->ahead = 0;
    r->guess_host = r->can_fetch ? f->guess : NULL;
    if (!r->guess_host) return AFF_OK;
    AFF_TRY(force_table(r, f->guess, &r->guess, err));
    r->ahead = f->ahead;
    return AFF_OK;
}
