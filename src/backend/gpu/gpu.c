/* The device backend: opening, the pass's rows, errors. */
#include "backend/gpu/gpu_internal.h"
#include "base/clock.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_NS 1000000000ull

void aff__gpu_note(aff_gpu *g, aff_status s, const aff_error *err)
{
    if (g->status != AFF_OK || s == AFF_OK) return;
    g->status = s;
    g->err = *err;
}

static void launch(aff_gpu *g, aff_kernel k, int64_t grid, unsigned block, uint64_t smem, const void *args)
{
    aff_error err;
    if (g->status != AFF_OK) return;
    aff__gpu_note(g, aff__rt_launch(g->rt, g->s, k, (unsigned)grid, block, (unsigned)smem,
                                     aff__rt_info(g->rt)->programmatic ? AFF_LAUNCH_PROGRAMMATIC : 0, args, &err), &err);
}

void aff__gpu_launch(aff_gpu *g, aff_kernel k, int64_t grid, unsigned block, uint64_t smem, const void *args)
{
    aff__gpu_flush(g);
    launch(g, k, grid, block, smem, args);
}

void aff__gpu_flush(aff_gpu *g)
{
    aff_k_small *s = &g->small;
    if (g->choice.picks) { /* nobody plans yet */
        const aff_k_route a = g->choice;
        g->choice.picks = NULL;
        aff__gpu_small(g, AFF_K_JOB_ROUTE, g->choice_rows, 8 * (uint64_t)a.experts, a.logits, a.weights, (int64_t)g->choice_rows * a.picks_n)->route = a;
    }
    if (s->count) launch(g, AFF_K_small, s->end[s->count - 1], 256, g->small_smem, s);
    s->count = 0;
    g->small_smem = 0;
    const aff_k_hc_post *p = &g->post;
    if (p->X) launch(g, AFF_K_hc_post, ((int64_t)p->T * p->H + 255) / 256, 256, 0, p);
    g->post.X = NULL;
}

aff_k_job *aff__gpu_small(aff_gpu *g, int kind, int64_t blocks, uint64_t smem, const float *in, const float *out, int64_t n)
{
    aff_k_small *s = &g->small;
    bool after = s->count == AFF_K_JOBS || g->post.X;
    for (int i = 0; i < s->count; i++) after |= (in >= g->small_io[i].out && in < g->small_io[i].out + g->small_io[i].n) || (g->small_io[i].in >= out && g->small_io[i].in < out + n);
    if (after) aff__gpu_flush(g);
    const int i = s->count++;
    s->kind[i] = kind;
    s->end[i] = (i ? s->end[i - 1] : 0) + (int32_t)blocks;
    if (smem > g->small_smem) g->small_smem = smem;
    g->small_io[i].in = in;
    g->small_io[i].out = out;
    g->small_io[i].n = n;
    return &s->job[i];
}

void aff__gpu_launch_together(aff_gpu *g, aff_kernel k, int64_t grid, unsigned block, uint64_t smem, const void *args)
{
    aff_error err;
    aff__gpu_flush(g);
    if (g->status != AFF_OK) return;
    aff__gpu_note(g, aff__rt_launch(g->rt, g->s, k, (unsigned)grid, block, (unsigned)smem, AFF_LAUNCH_COOPERATIVE, args, &err), &err);
}

void aff__gpu_drop_records(aff_gpu *g)
{
    for (int i = 0; i < g->n_records; i++) {
        aff__rt_graph_free(g->rt, g->record[i].graph);
        free(g->record[i].moe);
    }
    g->n_records = 0;
}

void *aff__gpu_scratch(aff_gpu *g, aff_gpu_scratch which, uint64_t bytes)
{
    aff_error err;
    if (g->status == AFF_OK && bytes > g->scratch[which].bytes) {
        if (g->recording) { /* the same ops ran before under this key: they had enough */
            aff__gpu_note(g, aff__fail(&err, AFF_E_INVALID, "recording a pass: its working memory grew"), &err);
            return NULL;
        }
        if (!aff__gpu_may_take(g, bytes, g->scratch[which].bytes)) { /* the slab gives way between passes: the pass is run again */
            g->scratch[which].wish = bytes;
            aff__gpu_note(g, aff__fail(&err, AFF_E_NOMEM, "working memory of the pass: %llu bytes more than the experts on the card leave", (unsigned long long)bytes), &err);
            return NULL;
        }
        aff__gpu_flush(g);
        aff_status s = aff__rt_sync(g->rt, g->s, &err); /* kernels in flight may use the old one */
        aff__gpu_drop_records(g);                                /* they hold the old address */
        aff__rt_free(g->rt, g->scratch[which].p);
        g->scratch[which].p = NULL;
        g->scratch[which].bytes = 0;
        if (s == AFF_OK) s = aff__rt_alloc(g->rt, &g->scratch[which].p, bytes, "working memory of the pass", &err);
        if (s == AFF_OK) g->scratch[which].bytes = bytes;
        aff__gpu_note(g, s, &err);
    }
    return g->status == AFF_OK ? g->scratch[which].p : NULL;
}

/* Working memory that the last pass found no room for. */
static bool make_room(aff_backend *b)
{
    aff_gpu *g = aff__gpu_of(b);
    aff_error err;
    bool any = false;
    for (int i = 0; i < AFF_G_SCRATCHES; i++) {
        const uint64_t bytes = g->scratch[i].wish;
        if (!bytes) continue;
        g->scratch[i].wish = 0;
        aff__gpu_drop_records(g);
        aff__rt_sync(g->rt, g->s, NULL);
        aff__rt_free(g->rt, g->scratch[i].p);
        g->scratch[i].p = NULL;
        g->scratch[i].bytes = 0;
        aff__gpu_make_room(g, bytes);
        if (aff__rt_alloc(g->rt, &g->scratch[i].p, bytes, "working memory of the pass", &err) != AFF_OK) return false;
        g->scratch[i].bytes = bytes;
        any = true;
    }
    return any;
}

/* A context's length enters grids and strides: passes of few rows round it up, so that a record serves until it has
 * doubled. */
static int64_t bucket(int64_t pos)
{
    int64_t p = 512;
    while (p <= pos) p *= 2;
    return p - 1;
}

static aff_status begin(aff_backend *b, const aff_rowset *rs, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    const aff_memory *m = b->mem;
    if (rs->n > AFF_G_ROWS)
        return aff__fail(err, AFF_E_INVALID, "pass of %d rows: at most %d", rs->n, AFF_G_ROWS);
    aff__gpu_flush(g); /* of a pass that failed: nothing */
    g->owner = pthread_self();
    if (g->status != AFF_OK) { /* the pass before failed and was left: nobody wants its results */
        AFF_TRY(aff__rt_sync(g->rt, g->s, err));
        g->status = AFF_OK;
        g->staged = 0;
    }
    g->n = rs->n;
    g->n_forms = 0;
    g->q_of = NULL;
    g->moes = 0;
    g->max_pos = 0;
    g->few_each = true;
    for (int t = 0; t < rs->n; t++) {
        if (rs->pos[t] > g->max_pos) g->max_pos = rs->pos[t];
        if (t - rs->first[t] >= AFF_MAX_ROLLBACK) g->few_each = false;
    }
    if (rs->n <= AFF_K_FEW) g->max_pos = bucket(g->max_pos);
    const uint64_t n = (uint64_t)rs->n;
    AFF_TRY(aff__gpu_stage_begin(g, err));
    aff__gpu_fetch_begin(g);
    AFF_TRY(m->write(m, g->pos, rs->pos, n * sizeof *g->pos, err));
    AFF_TRY(m->write(m, g->first, rs->first, n * sizeof *g->first, err));
    return m->write(m, g->table, rs->table, n * sizeof *g->table, err);
}

static aff_gpu_record *find_record(aff_gpu *g, uint64_t key)
{
    aff_gpu_record *oldest = g->record;
    for (int i = 0; i < g->n_records; i++) {
        if (g->record[i].key == key) return &g->record[i];
        if (g->record[i].used < oldest->used) oldest = &g->record[i];
    }
    if (g->n_records < AFF_G_RECORDS) {
        g->record[g->n_records] = (aff_gpu_record){0};
        return &g->record[g->n_records++];
    }
    aff__rt_graph_free(g->rt, oldest->graph);
    free(oldest->moe);
    *oldest = (aff_gpu_record){0};
    return oldest;
}

static aff_status record(aff_gpu *g, aff_gpu_record *r, aff_status (*ops)(void *ctx, aff_error *err), void *ctx,
                         aff_error *err)
{
    AFF_TRY(aff__rt_capture_begin(g->rt, g->s, err));
    g->recording = true;
    aff_status s = ops(ctx, err);
    aff__gpu_flush(g);
    g->recording = false;
    if (s == AFF_OK && g->status != AFF_OK) {
        s = g->status;
        if (err) *err = g->err;
    }
    const aff_status end = aff__rt_capture_end(g->rt, g->s, &r->graph, s == AFF_OK ? err : NULL);
    if (s == AFF_OK && end == AFF_OK) s = aff__calloc(&r->moe, (uint64_t)g->moes, sizeof *r->moe, "record of a pass", err);
    if (s == AFF_OK && end == AFF_OK) {
        r->moes = g->moes;
        memcpy(r->moe, g->moe, (size_t)g->moes * sizeof *r->moe);
        return AFF_OK;
    }
    if (end == AFF_OK) aff__rt_graph_free(g->rt, r->graph);
    r->graph = NULL;
    return s == AFF_OK ? end : s;
}

static aff_status repeat(aff_backend *b, uint64_t key, aff_status (*ops)(void *ctx, aff_error *err), void *ctx,
                         aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    uint64_t log = 0;
    while (g->max_pos >> log) log++;
    key = (key << 7 | log) << 2 | (uint64_t)g->few_each << 1 | 1; /* no key is 0 */
    aff_gpu_record *r = find_record(g, key);
    const bool seen = r->key == key;
    r->key = key;
    r->used = ++g->passes;
    if (!seen) return ops(ctx, err);
    if (!r->graph) AFF_TRY(record(g, r, ops, ctx, err));
    g->moes = r->moes;
    g->repeated++;
    memcpy(g->moe, r->moe, (size_t)r->moes * sizeof *r->moe);
    g->n_forms = 0; /* what the record leaves is not known here */
    g->q_of = NULL;
    return aff__rt_graph_launch(g->rt, r->graph, g->s, err);
}

static aff_status finish(aff_backend *b, aff_error *err)
{
    aff_gpu *g = aff__gpu_of(b);
    aff__gpu_flush(g);
    aff_status s = g->status;
    if (s != AFF_OK && err) *err = g->err;
    g->status = AFF_OK;
    if (s == AFF_OK && g->moes)
        s = aff__rt_copy(g->rt, g->s, g->host_counts, g->counts, (uint64_t)g->moes * AFF_K_PLAN_COUNTS * sizeof *g->counts, err);
    const aff_status through = aff__rt_sync(g->rt, g->s, s == AFF_OK ? err : NULL); /* a pass that failed too: its kernels may wait for what is still to come */
    if (s == AFF_OK) s = through;
    if (s != AFF_OK && g->groups.copies) aff__rt_sync(g->rt, g->groups.copies, NULL);
    g->staged = 0;
    const aff_status read = aff__gpu_stage_end(g, s == AFF_OK ? err : NULL);
    if (s == AFF_OK) s = read;
    const aff_status ahead = aff__gpu_fetch_end(g, s == AFF_OK ? err : NULL);
    if (s == AFF_OK) s = ahead;
    for (int i = 0; s == AFF_OK && i < g->moes; i++)
        if (g->host_counts[AFF_K_PLAN_COUNTS * i + AFF_K_BAD])
            s = aff__fail(err, AFF_E_FORMAT,
                          "mixture of experts %d of the pass: %d picks name no expert (NaN in the weights?)", i,
                          (int)g->host_counts[AFF_K_PLAN_COUNTS * i + AFF_K_BAD]);
    if (s == AFF_OK) aff__gpu_slab_finish(g);
    g->used_moes = s == AFF_OK ? g->moes : 0;
    g->moes = 0;
    return s;
}

static void view(aff_backend *b, aff_device_view *out)
{
    static const char *const kinds[AFF_RT_KINDS] = {"cuda", "hip", "emu"};
    aff_gpu *g = aff__gpu_of(b);
    const aff_rt_info *i = aff__rt_info(g->rt);
    const uint64_t now = aff__now_ns();
    if (!g->looked || now - g->looked > LOOK_NS) { /* a call of the driver: not with every pass */
        if (aff__rt_free_memory(g->rt, &g->free_memory, NULL) != AFF_OK) g->free_memory = 0;
        g->looked = now;
    }
    *out = (aff_device_view){.memory = i->memory,
                             .free = g->free_memory,
                             .link_gen = i->link_gen,
                             .link_width = i->link_width,
                             .link_rate = i->link_rate,
                             .records = 0,
                             .passes = g->passes,
                             .repeated = g->repeated};
    snprintf(out->id, sizeof out->id, "%s:%d", kinds[i->kind], i->index);
    snprintf(out->name, sizeof out->name, "%s", i->name);
    snprintf(out->arch, sizeof out->arch, "%s", i->arch);
    aff__rt_uses(g->rt, out->use);
    for (int k = 0; k < g->n_records; k++) out->records += g->record[k].graph != NULL;
}

static void destroy(aff_backend *b)
{
    aff_gpu *g = aff__gpu_of(b);
    if (g->s) aff__rt_sync(g->rt, g->s, NULL);
    if (g->rt) {
        aff__gpu_slab_free(g);
        aff__gpu_drop_records(g);
        for (int i = 0; i < AFF_G_SCRATCHES; i++) aff__rt_free(g->rt, g->scratch[i].p);
        aff__gpu_memory_free(g);
        aff__rt_free(g->rt, g->pos);
        aff__rt_free(g->rt, g->first);
        aff__rt_free(g->rt, (void *)g->table);
        aff__rt_free(g->rt, g->counts);
        aff__rt_free(g->rt, g->best);
        aff__rt_host_free(g->rt, g->host_counts);
        aff__rt_stream_free(g->rt, g->s);
        aff__rt_close(g->rt);
    }
    free(g);
}

static aff_status open_parts(aff_gpu *g, const aff_device_spec *spec, aff_error *err)
{
    const uint64_t Q = AFF_G_ROWS, counts = AFF_G_COUNTS * AFF_K_PLAN_COUNTS * sizeof(int32_t);
    AFF_TRY(aff__rt_open(&g->rt, spec, err));
    AFF_TRY(aff__device_results(spec, g->results, err));
    g->amd = aff__rt_info(g->rt)->fragment_columns == 16;
    g->link_blocks = (aff__rt_info(g->rt)->units + 7) / 8; /* 17 of 132: more do not read faster (docs/benchmarks.md) */
    g->hopper = aff__rt_info(g->rt)->kind == AFF_RT_CUDA && !strcmp(aff__rt_info(g->rt)->arch, "sm_90");
    AFF_TRY(aff__rt_stream_create(g->rt, &g->s, err));
    AFF_TRY(aff__gpu_memory_init(g, err));
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&g->pos, Q * sizeof *g->pos, "rows of a pass", err));
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&g->first, Q * sizeof *g->first, "rows of a pass", err));
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&g->table, Q * sizeof *g->table, "rows of a pass", err));
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&g->counts, counts, "plan counts", err));
    AFF_TRY(aff__rt_alloc(g->rt, (void **)&g->best, Q * (3 * AFF_G_BEST + 1) * sizeof *g->best, "argmax", err));
    AFF_TRY(aff__rt_fill(g->rt, g->s, g->best, 0, Q * sizeof *g->best, err));
    return aff__rt_host_alloc(g->rt, (void **)&g->host_counts, counts, "plan counts", err);
}

aff_status aff__gpu_backend(aff_backend **out, const aff_device_spec *spec, aff_numerics num, aff_error *err)
{
    aff_gpu *g;
    *out = NULL;
    if (num != AFF_FAST)
        return aff__fail(err, AFF_E_UNSUPPORTED, "--numerics %s: a device computes in fast only; use --device cpu",
                         num == AFF_MATH ? "math" : "sim");
    AFF_TRY(aff__calloc(&g, 1, sizeof *g, "device backend", err));
    g->base.name = "gpu";
    g->base.numerics = num;
    g->base.begin = begin;
    g->base.finish = finish;
    g->base.repeat = repeat;
    g->base.make_room = make_room;
    g->base.place = aff__gpu_place;
    g->base.view = view;
    g->base.free = destroy;
    aff__gpu_ops(&g->base);
    aff__gpu_attention_ops(&g->base);
    aff__gpu_moe_ops(&g->base);
    aff__gpu_slab_ops(&g->base);
    const aff_status s = open_parts(g, spec, err);
    if (s != AFF_OK) {
        destroy(&g->base);
        return s;
    }
    *out = &g->base;
    return AFF_OK;
}

const aff_rt_info *aff__gpu_info(const aff_backend *b)
{
    return aff__rt_info(((const aff_gpu *)b)->rt);
}
