#include "experts/predict.h"
#include "base/mem.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SHARE = 16 /* bits of a share */, CHECKED = 10 /* one in so many rows judges the maps */ };

void aff__predict(const aff_profile *p, int layer, const int32_t *below, int n_below, const int32_t *before,
                  int n_before, float *score)
{
    const int64_t E = p->experts, at = (int64_t)(layer - 1) * E;
    memcpy(score, p->bias + at, (size_t)E * sizeof *score);
    for (int k = 0; k < n_below + (before ? n_before : 0); k++) {
        const uint16_t *w = k < n_below ? p->below + (at + below[k]) * E : p->before + (at + before[k - n_below]) * E;
        for (int64_t e = 0; e < E; e++) score[e] += aff__profile_weight(w[e]);
    }
}

int aff__predict_top(const float *score, int experts, int most, int32_t *id)
{
    int n = 0;
    for (int e = 0; e < experts; e++) {
        int at = n;
        while (at > 0 && score[id[at - 1]] < score[e]) at--;
        if (at >= most) continue;
        if (n < most) n++;
        for (int i = n - 1; i > at; i--) id[i] = id[i - 1];
        id[at] = e;
    }
    return n;
}

/* ---- rows ---- */

/* A row of a trace as a learner sees it: picks of layer l, of the layer below for the same row, of the row before in
 * layer l (NULL: unknown). */
typedef struct row {
    int layer;
    aff_use_phase phase;
    const int32_t *pick, *below, *before;
} row;

typedef void (*row_fn)(void *ctx, const row *r);

/* Rows of dispatches [first, last) of a trace. A row's layers are one pass: dispatches of ascending layers with the
 * same number of rows. */
static void each_row(const aff_uses *u, int64_t first, int64_t last, const int32_t **tail, row_fn fn, void *ctx)
{
    const aff_dispatch *under = NULL;
    memset(tail, 0, (size_t)u->layers * sizeof *tail);
    for (int64_t i = 0; i < last; i++) {
        const aff_dispatch *d = &u->dispatch[i];
        const bool same = under && under->layer + 1 == d->layer && under->rows == d->rows;
        const int32_t *pick = u->pick + d->pick, *before = tail[d->layer];
        for (int t = 0; t < d->rows; t++, pick += u->picks) {
            if (i >= first)
                fn(ctx, &(row){d->layer, d->phase, pick, same ? u->pick + under->pick + (int64_t)t * u->picks : NULL,
                               before});
            before = pick;
        }
        tail[d->layer] = before;
        under = d;
    }
}

static int64_t share_of(const aff_uses *u, uint64_t share)
{
    return (int64_t)(((uint64_t)u->n * share) >> SHARE);
}

/* ---- profile ---- */

void aff__fit_init(aff_fit *f)
{
    *f = (aff_fit){.prefill_weight = 1, .rate = 0.3, .shrink = 3e-3, .to = UINT64_C(1) << SHARE};
}

typedef struct counting {
    aff_profile *p;
    const aff_fit *f;
    double *use, *total, fade; /* [layers][experts], [layers] */
    int picks;
} counting;

/* Later rows weigh more: instead of fading what is there, everything new grows. */
static void count_row(void *ctx, const row *r)
{
    counting *c = ctx;
    const int64_t at = (int64_t)r->layer * c->p->experts;
    double *use = c->use + at;
    if (c->f->halflife > 0) {
        for (int e = 0; e < c->p->experts; e++) use[e] *= c->fade;
        c->total[r->layer] *= c->fade;
    }
    const double w = r->phase == AFF_USE_PREFILL ? c->f->prefill_weight : 1;
    for (int k = 0; k < c->picks; k++) use[r->pick[k]] += w;
    c->total[r->layer] += w;
}

/* ---- maps ---- */

/* Logistic regression for every expert of a layer at once: p = 1 / (1 + exp(-score)). Steps are those of AdaGrad
 * (Duchi, Hazan, Singer 2011): each weight has its own, which shrinks as it is moved. */
typedef struct learner {
    const aff_fit *f;
    int experts, picks;
    float *weight, *moved; /* [layers - 1][1 + 2 experts][experts]: bias, below, before */
    float *best;           /* the same: of every layer those that guessed best in rows that were not learnt from */
    int64_t *found, *most; /* [layers] guesses of these and of the best so far */
    float *error;          /* [experts] */
    float *again; /* [layers] where the weight of an expert on itself begins, and is drawn back to; the others' is 0 */
    uint64_t done, total;
} learner;

static float *weights_of(float *all, const learner *l, int layer, int64_t input)
{
    return all + ((int64_t)(layer - 1) * (1 + 2 * (int64_t)l->experts) + input) * l->experts;
}

static int inputs(const learner *l, const row *r, int64_t *input)
{
    int n = 0;
    input[n++] = 0;
    for (int k = 0; k < l->picks; k++) input[n++] = 1 + r->below[k];
    for (int k = 0; k < l->picks && r->before; k++) input[n++] = 1 + (int64_t)l->experts + r->before[k];
    return n;
}

/* Scores into l->error. */
static void score_row(learner *l, const row *r, const int64_t *input, int n)
{
    memset(l->error, 0, (size_t)l->experts * sizeof *l->error);
    for (int i = 0; i < n; i++) {
        const float *w = weights_of(l->weight, l, r->layer, input[i]);
        for (int e = 0; e < l->experts; e++) l->error[e] += w[e];
    }
}

static void learn_row(void *ctx, const row *r)
{
    learner *l = ctx;
    int64_t input[1 + 2 * 64];
    if (!r->layer || !r->below) return;
    const int n = inputs(l, r, input), E = l->experts;
    score_row(l, r, input, n);
    for (int e = 0; e < E; e++) l->error[e] = -1 / (1 + expf(-l->error[e]));
    for (int k = 0; k < l->picks; k++) l->error[r->pick[k]] += 1;
    for (int i = 0; i < n; i++) {
        float *w = weights_of(l->weight, l, r->layer, input[i]), *m = weights_of(l->moved, l, r->layer, input[i]);
        const float rate = (float)l->f->rate, shrink = (float)l->f->shrink;
        const int64_t own = input[i] - 1 - E;
        if (own >= 0) w[own] -= l->again[r->layer];
        for (int e = 0; e < E; e++) {
            const float g = l->error[e] - shrink * w[e];
            m[e] += g * g;
            w[e] += rate * g / sqrtf(m[e] + 1);
        }
        if (own >= 0) w[own] += l->again[r->layer];
    }
}

static void check_row(void *ctx, const row *r)
{
    learner *l = ctx;
    int64_t input[1 + 2 * 64];
    int32_t top[64];
    if (!r->layer || !r->below) return;
    score_row(l, r, input, inputs(l, r, input));
    const int n = aff__predict_top(l->error, l->experts, l->picks, top);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < l->picks; k++) l->found[r->layer] += r->pick[k] == top[i];
}

/* Layer by layer, weights that guess better than any before are kept: more passes help where layers depend on each
 * other, and only learn the rows by heart where they do not. */
static void keep_best(learner *l, const aff_uses *const *traces, int n, int layers, const int32_t **tail)
{
    const uint64_t judged = l->f->to - (l->f->to - l->f->from) / CHECKED;
    memset(l->found, 0, (size_t)layers * sizeof *l->found);
    for (int t = 0; t < n; t++)
        each_row(traces[t], share_of(traces[t], judged), share_of(traces[t], l->f->to), tail, check_row, l);
    for (int layer = 1; layer < layers; layer++) {
        if (l->found[layer] <= l->most[layer]) continue;
        l->most[layer] = l->found[layer];
        memcpy(weights_of(l->best, l, layer, 0), weights_of(l->weight, l, layer, 0),
               (1 + 2 * (size_t)l->experts) * (size_t)l->experts * sizeof *l->best);
    }
}

static uint16_t to_bf16(float v)
{
    union {
        float f;
        uint32_t u;
    } x = {v};
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1)) >> 16);
}

static void keep_maps(aff_profile *p, learner *l)
{
    const int64_t E = p->experts;
    for (int layer = 1; layer < p->layers; layer++) {
        const float *w = weights_of(l->best, l, layer, 0);
        memcpy(p->bias + (layer - 1) * E, w, (size_t)E * sizeof *w);
        for (int64_t i = 0; i < E * E; i++) {
            p->below[(layer - 1) * E * E + i] = to_bf16(w[E + i]);
            p->before[(layer - 1) * E * E + i] = to_bf16(w[E + E * E + i]);
        }
    }
}

typedef struct persistence {
    int picks;
    int64_t *again, *of; /* [layers] */
} persistence;

static void count_again(void *ctx, const row *r)
{
    persistence *c = ctx;
    for (int b = 0; r->before && b < c->picks; b++) {
        c->of[r->layer]++;
        for (int k = 0; k < c->picks; k++) c->again[r->layer] += r->before[b] == r->pick[k];
    }
}

/* That an expert is picked twice running is the same for all of a layer, and known after few rows: the maps begin with
 * it. */
static aff_status start_from_before(learner *l, const aff_uses *const *traces, int n, int layers, const int32_t **tail,
                                    aff_error *err)
{
    persistence c = {.picks = l->picks};
    const double by_chance = (double)l->picks / l->experts;
    aff_status s = aff__calloc(&c.again, 2 * (uint64_t)layers, sizeof *c.again, "maps to the next layer", err);
    if (s != AFF_OK) return s;
    c.of = c.again + layers;
    for (int t = 0; t < n; t++)
        each_row(traces[t], share_of(traces[t], l->f->from), share_of(traces[t], l->f->to), tail, count_again, &c);
    for (int layer = 1; layer < layers; layer++) {
        const double q = ((double)c.again[layer] + by_chance) / ((double)c.of[layer] + 1),
                     w = q < 0.999 && by_chance < 0.999 ? log(q / (1 - q)) - log(by_chance / (1 - by_chance)) : 0;
        for (int e = 0; e < l->experts; e++) weights_of(l->weight, l, layer, 1 + (int64_t)l->experts + e)[e] = (float)w;
    }
    free(c.again);
    return AFF_OK;
}

static aff_status fit_maps(aff_profile *p, const aff_uses *const *traces, int n, const aff_fit *f, const int32_t **tail,
                           aff_error *err)
{
    learner l = {.f = f, .experts = p->experts, .picks = p->picks, .total = (uint64_t)f->passes * (uint64_t)n};
    const uint64_t E = (uint64_t)p->experts, all = (uint64_t)(p->layers - 1) * (1 + 2 * E) * E;
    aff_status s = aff__calloc(&l.weight, all, sizeof *l.weight, "maps to the next layer", err);
    if (s == AFF_OK) s = aff__calloc(&l.moved, all, sizeof *l.moved, "maps to the next layer", err);
    if (s == AFF_OK) s = aff__calloc(&l.error, E, sizeof *l.error, "maps to the next layer", err);
    if (s == AFF_OK) s = aff__calloc(&l.again, (uint64_t)p->layers, sizeof *l.again, "maps to the next layer", err);
    for (int layer = 1; layer < p->layers && s == AFF_OK; layer++) {
        float *bias = weights_of(l.weight, &l, layer, 0);
        for (uint64_t e = 0; e < E; e++) {
            const float q = fminf(fmaxf(p->use[(uint64_t)layer * E + e], 1e-3f), 0.999f);
            bias[e] = logf(q / (1 - q));
        }
    }
    if (s == AFF_OK) s = aff__calloc(&l.best, all, sizeof *l.best, "maps to the next layer", err);
    if (s == AFF_OK) s = aff__calloc(&l.found, (uint64_t)p->layers, sizeof *l.found, "maps to the next layer", err);
    if (s == AFF_OK) s = aff__calloc(&l.most, (uint64_t)p->layers, sizeof *l.most, "maps to the next layer", err);
    if (s == AFF_OK) s = start_from_before(&l, traces, n, p->layers, tail, err);
    if (s == AFF_OK) {
        memset(l.most, 0xff, (size_t)p->layers * sizeof *l.most);
        keep_best(&l, traces, n, p->layers, tail);
    }
    const uint64_t learnt = f->to - (f->to - f->from) / CHECKED;
    for (int pass = 0; pass < f->passes && s == AFF_OK; pass++) {
        for (int t = 0; t < n; t++) {
            each_row(traces[t], share_of(traces[t], f->from), share_of(traces[t], learnt), tail, learn_row, &l);
            if (f->progress) f->progress(f->progress_ctx, ++l.done, l.total);
        }
        keep_best(&l, traces, n, p->layers, tail);
    }
    if (s == AFF_OK) keep_maps(p, &l);
    free(l.weight);
    free(l.moved);
    free(l.error);
    free(l.again);
    free(l.best);
    free(l.found);
    free(l.most);
    return s;
}

static aff_status fit(aff_profile *p, counting *c, const aff_uses *const *traces, int n, const aff_fit *f,
                      const int32_t **tail, aff_error *err)
{
    const uint64_t all = (uint64_t)p->layers * (uint64_t)p->experts;
    AFF_TRY(aff__calloc(&c->use, all, sizeof *c->use, "expert profile", err));
    AFF_TRY(aff__calloc(&c->total, (uint64_t)p->layers, sizeof *c->total, "expert profile", err));
    for (int t = 0; t < n; t++)
        each_row(traces[t], share_of(traces[t], f->from), share_of(traces[t], f->to), tail, count_row, c);
    for (uint64_t i = 0; i < all; i++) {
        const double rows = c->total[i / (uint64_t)p->experts];
        p->use[i] = rows > 0 ? (float)(c->use[i] / rows) : 0;
    }
    return p->picks && p->layers > 1 ? fit_maps(p, traces, n, f, tail, err) : AFF_OK;
}

aff_status aff__fit_profile(aff_profile *out, const aff_uses *const *traces, int n, const aff_fit *f, aff_error *err)
{
    const aff_uses *u = traces[0];
    const int32_t **tail;
    for (int t = 1; t < n; t++)
        if (traces[t]->layers != u->layers || traces[t]->experts != u->experts || traces[t]->picks != u->picks)
            return aff__fail(err, AFF_E_INVALID,
                             "traces of different models: expected %d layers of %d experts, %d picks, got %d of %d, %d",
                             u->layers, u->experts, u->picks, traces[t]->layers, traces[t]->experts, traces[t]->picks);
    AFF_TRY(aff__profile_create(out, u->layers, u->experts, f->passes > 0 ? u->picks : 0, err));
    counting c = {.p = out, .f = f, .picks = u->picks, .fade = f->halflife > 0 ? exp2(-1 / f->halflife) : 1};
    aff_status s = aff__calloc(&tail, (uint64_t)u->layers, sizeof *tail, "expert profile", err);
    if (s == AFF_OK) s = fit(out, &c, traces, n, f, tail, err);
    free(tail);
    free(c.use);
    free(c.total);
    if (s != AFF_OK) aff__profile_free(out);
    return s;
}

/* ---- recall ---- */

typedef struct judging {
    aff_recall *recall;
    const aff_profile *p;
    int picks;
    float *score;           /* [experts] */
    float *recent;          /* [layers][experts] */
    float *counts, *totals; /* [layers - 1][experts][experts] of a pick below and a pick; [layers - 1][experts] */
    bool learning;
} judging;

static void tally(judging *j, const row *r, aff_guess g, const float *score)
{
    int32_t top[64];
    aff_recall *c = &j->recall[r->layer];
    const int n = aff__predict_top(score, j->p->experts, c->sizes[AFF_GUESS_SIZES - 1], top);
    for (int i = 0; i < n; i++) {
        bool is = false;
        for (int k = 0; k < j->picks; k++) is |= r->pick[k] == top[i];
        for (int z = 0; is && z < AFF_GUESS_SIZES; z++) c->found[g][z] += i < c->sizes[z];
    }
}

static void count_pairs(judging *j, const row *r)
{
    const int64_t E = j->p->experts, at = (int64_t)(r->layer - 1) * E;
    for (int b = 0; b < j->picks; b++) {
        j->totals[at + r->below[b]]++;
        for (int k = 0; k < j->picks; k++) j->counts[(at + r->below[b]) * E + r->pick[k]]++;
    }
}

/* The sum over the picks below of how often x followed them, smoothed by how popular x is. */
static void score_pairs(judging *j, const row *r)
{
    const int64_t E = j->p->experts, at = (int64_t)(r->layer - 1) * E;
    const float *use = j->p->use + (int64_t)r->layer * E;
    memset(j->score, 0, (size_t)E * sizeof *j->score);
    for (int b = 0; b < j->picks; b++)
        for (int64_t e = 0; e < E; e++)
            j->score[e] +=
                logf((j->counts[(at + r->below[b]) * E + e] + 4 * use[e] + 1e-3f) / (j->totals[at + r->below[b]] + 4));
}

static void judge_row(void *ctx, const row *r)
{
    judging *j = ctx;
    const int E = j->p->experts;
    const float *use = j->p->use + (int64_t)r->layer * E;
    float *recent = j->recent + (int64_t)r->layer * E;
    if (r->layer && r->below) {
        if (j->learning) {
            count_pairs(j, r);
            return;
        }
        j->recall[r->layer].picks += j->picks;
        tally(j, r, AFF_GUESS_POPULAR, use);
        for (int e = 0; e < E; e++) j->score[e] = recent[e] + 1e-3f * use[e];
        tally(j, r, AFF_GUESS_RECENT, j->score);
        memcpy(j->score, use, (size_t)E * sizeof *use);
        for (int k = 0; k < j->picks && r->before; k++) j->score[r->before[k]] += 2;
        tally(j, r, AFF_GUESS_BEFORE, j->score);
        score_pairs(j, r);
        tally(j, r, AFF_GUESS_COUNTS, j->score);
        if (j->p->picks) {
            aff__predict(j->p, r->layer, r->below, j->picks, r->before, j->picks, j->score);
            tally(j, r, AFF_GUESS_MAP, j->score);
        }
    }
    if (j->learning) return;
    for (int e = 0; e < E; e++) recent[e] *= 0.9f;
    for (int k = 0; k < j->picks; k++) recent[r->pick[k]] += 1;
}

static aff_status judge(judging *j, const aff_uses *const *learn, int n_learn, const aff_fit *learnt,
                        const aff_uses *const *seen, int n_seen, uint64_t from, uint64_t to, const int32_t ***tail,
                        aff_error *err)
{
    static const char what[] = "recall";
    const uint64_t L = (uint64_t)j->p->layers, E = (uint64_t)j->p->experts;
    AFF_TRY(aff__calloc(&j->score, E, sizeof *j->score, what, err));
    AFF_TRY(aff__calloc(&j->recent, L * E, sizeof *j->recent, what, err));
    AFF_TRY(aff__calloc(&j->counts, (L - 1) * E * E, sizeof *j->counts, what, err));
    AFF_TRY(aff__calloc(&j->totals, (L - 1) * E, sizeof *j->totals, what, err));
    AFF_TRY(aff__calloc(tail, L, sizeof **tail, what, err));
    j->learning = true;
    for (int t = 0; t < n_learn; t++)
        each_row(learn[t], share_of(learn[t], learnt->from), share_of(learn[t], learnt->to), *tail, judge_row, j);
    j->learning = false;
    for (int t = 0; t < n_seen; t++)
        each_row(seen[t], share_of(seen[t], from), share_of(seen[t], to), *tail, judge_row, j);
    return AFF_OK;
}

aff_status aff__recall(aff_recall *recall, const aff_profile *p, const aff_uses *const *learn, int n_learn,
                       const aff_fit *learnt, const aff_uses *const *seen, int n_seen, uint64_t from, uint64_t to,
                       aff_error *err)
{
    const int32_t **tail = NULL;
    judging j = {.recall = recall, .p = p, .picks = seen[0]->picks};
    const int sizes[AFF_GUESS_SIZES] = {j.picks, 8, 12, 16};
    for (int l = 0; l < p->layers; l++) {
        recall[l] = (aff_recall){0};
        for (int z = 0; z < AFF_GUESS_SIZES; z++) {
            const int least = sizes[z] < j.picks ? j.picks : sizes[z];
            recall[l].sizes[z] = least < p->experts ? least : p->experts;
        }
    }
    const aff_status s = judge(&j, learn, n_learn, learnt, seen, n_seen, from, to, &tail, err);
    free(j.score);
    free(j.recent);
    free(j.counts);
    free(j.totals);
    free(tail);
    return s;
}
