#include "engine/eval.h"
#include "base/mem.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

aff_status aff__eval_lse(const float *l, int n, double *lse, aff_error *err)
{
    float most = l[0];
    double sum = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(l[i]))
            return aff__fail(err, AFF_E_FORMAT, "logit of id %d: expected a finite number, got %g", i, (double)l[i]);
        most = l[i] > most ? l[i] : most;
    }
    for (int i = 0; i < n; i++) sum += exp((double)l[i] - (double)most);
    *lse = (double)most + log(sum);
    return AFF_OK;
}

/* a stands before b in the order of aff__eval_top. */
static bool before(const float *l, int32_t a, int32_t b)
{
    return l[a] > l[b] || (l[a] == l[b] && a < b);
}

/* Lets the entry at i sink in a heap whose root is the one that stands last. */
static void sink(const float *l, int32_t *heap, int n, int i)
{
    for (int c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && before(l, heap[c], heap[c + 1])) c++;
        if (!before(l, heap[i], heap[c])) return;
        const int32_t t = heap[i];
        heap[i] = heap[c];
        heap[c] = t;
    }
}

void aff__eval_top(const float *l, int n, int k, int32_t *ids)
{
    for (int i = 0; i < k; i++) ids[i] = i;
    for (int i = k / 2 - 1; i >= 0; i--) sink(l, ids, k, i);
    for (int32_t i = k; i < n; i++)
        if (before(l, i, ids[0])) {
            ids[0] = i;
            sink(l, ids, k, 0);
        }
    for (int m = k - 1; m > 0; m--) { /* the last in order goes behind the others */
        const int32_t t = ids[0];
        ids[0] = ids[m];
        ids[m] = t;
        sink(l, ids, m, 0);
    }
}

aff_status aff__eval_full(const float *l, int vocab, int32_t target, aff_eval_ref *out, aff_error *err)
{
    *out = (aff_eval_ref){.n = vocab, .logit = l, .target = l[target]};
    return aff__eval_lse(l, vocab, &out->lse, err);
}

/* sum p log(p/q) over the listed ids and the others as one. */
static double divergence(const aff_eval_ref *r, const float *l, int vocab, double lse, uint8_t *used)
{
    double kl = 0, rest = 0;
    for (int i = 0; i < r->n; i++) {
        const int32_t id = r->id ? r->id[i] : i;
        const double lp = (double)r->logit[i] - r->lse, lq = (double)l[id] - lse;
        kl += exp(lp) * (lp - lq);
        if (r->id) used[id] = 1;
    }
    if (!r->id) return kl;
    for (int i = 0; i < vocab; i++)
        if (!used[i]) rest += exp((double)l[i] - lse);
    for (int i = 0; i < r->n; i++) used[r->id[i]] = 0;
    if (r->rest > 0 && rest > 0) kl += r->rest * (log(r->rest) - log(rest));
    return kl;
}

/* The reference's most likely ids in order. */
static int ref_top(const aff_eval_ref *r, int32_t ids[5])
{
    const int k = r->n < 5 ? r->n : 5;
    aff__eval_top(r->logit, r->n, k, ids); /* lists keep the order of ids among equals */
    for (int i = 0; r->id && i < k; i++) ids[i] = r->id[ids[i]];
    return k;
}

aff_status aff__eval_compare(const aff_eval_ref *ref, const float *l, int vocab, int32_t target, uint8_t *used,
                             aff_eval_row *out, aff_error *err)
{
    double lse = 0;
    int32_t mine[5], theirs[5];
    const int k = vocab < 5 ? vocab : 5;
    AFF_TRY(aff__eval_lse(l, vocab, &lse, err));
    aff__eval_top(l, vocab, k, mine);
    *out = (aff_eval_row){.nll = lse - (double)l[target], .top = mine[0], .ref_top = -1};
    if (!ref) return AFF_OK;
    const int rk = ref_top(ref, theirs);
    out->ref_nll = ref->lse - (double)ref->target;
    out->ref_top = theirs[0];
    for (int i = 0; i < rk; i++)
        for (int j = 0; j < k; j++) out->common5 += theirs[i] == mine[j];
    const double kl = divergence(ref, l, vocab, lse, used);
    out->kl = kl > 0 ? kl : 0; /* rounding may leave -1e-17 where the two are equal */
    return AFF_OK;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

aff_status aff__eval_stat(const double *v, int64_t n, aff_eval_stat *out, aff_error *err)
{
    double *s, sum = 0, dev = 0;
    AFF_TRY(aff__calloc(&s, (uint64_t)n, sizeof *s, "figures to sort", err));
    memcpy(s, v, (size_t)n * sizeof *s);
    qsort(s, (size_t)n, sizeof *s, ascending);
    for (int64_t i = 0; i < n; i++) sum += v[i];
    *out = (aff_eval_stat){
        .n = n, .mean = sum / (double)n, .median = s[(n - 1) / 2], .p99 = s[(99 * n + 99) / 100 - 1], .max = s[n - 1]};
    for (int64_t i = 0; i < n; i++) dev += (v[i] - out->mean) * (v[i] - out->mean);
    if (n > 1) out->se = sqrt(dev / (double)(n - 1) / (double)n);
    free(s);
    return AFF_OK;
}

void aff__eval_share(int64_t hits, int64_t n, double *share, double *se)
{
    *share = (double)hits / (double)n;
    *se = sqrt(*share * (1 - *share) / (double)n);
}

typedef struct gathered {
    double *v;
    int64_t n, hits;
} gathered;

enum { NLL, REF_NLL, DELTA, KL, TOP5 };

/* One figure of every row that counts. */
static void gather(gathered *g, const aff_eval_row *row, int64_t n, int64_t chunk, int64_t skip, int what, int of5)
{
    g->n = g->hits = 0;
    for (int64_t i = 0; i < n; i++) {
        const aff_eval_row *r = &row[i];
        if (i % chunk < skip) continue;
        g->hits += r->top == r->ref_top;
        g->v[g->n++] = what == NLL       ? r->nll
                       : what == REF_NLL ? r->ref_nll
                       : what == DELTA   ? r->nll - r->ref_nll
                       : what == KL      ? r->kl
                                         : (double)r->common5 / of5;
    }
}

aff_status aff__eval_summarise(const aff_eval_row *row, int64_t n, int64_t chunk, int64_t skip, bool with_ref, int of5,
                               aff_eval_summary *out, aff_error *err)
{
    aff_eval_stat top5 = {0}, *stat[] = {&out->nll, &out->ref_nll, &out->delta, &out->kl, &top5};
    gathered g = {0};
    *out = (aff_eval_summary){0};
    AFF_TRY(aff__calloc(&g.v, (uint64_t)n, sizeof *g.v, "figures", err));
    aff_status s = AFF_OK;
    for (int what = NLL; what <= (with_ref ? TOP5 : NLL) && s == AFF_OK; what++) {
        gather(&g, row, n, chunk, skip, what, of5);
        s = g.n ? aff__eval_stat(g.v, g.n, stat[what], err)
                : aff__fail(err, AFF_E_INVALID, "no position is left after the first %lld of every sequence",
                            (long long)skip);
    }
    free(g.v);
    if (s != AFF_OK) return s;
    out->positions = g.n;
    if (with_ref) aff__eval_share(g.hits, g.n, &out->top1, &out->top1_se);
    out->top5 = top5.mean;
    out->top5_se = top5.se;
    return AFF_OK;
}
