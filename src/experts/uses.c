#include "experts/uses.h"
#include "base/mem.h"
#include "experts/near.h"
#include "format/route.h"
#include <stdlib.h>
#include <string.h>

void aff__uses_init(aff_uses *u, int layers, int experts, int picks)
{
    *u = (aff_uses){.layers = layers, .experts = experts, .picks = picks};
}

void aff__uses_free(aff_uses *u)
{
    free(u->dispatch);
    free(u->pick);
    free(u->id);
    free(u->count);
    free(u->near);
    free(u->score);
    *u = (aff_uses){0};
}

/* Room for `more` beyond what array group g is filled with. */
static aff_status grow(aff_uses *u, int g, int64_t more, aff_error *err)
{
    static const char what[] = "route trace";
    if (u->cap[g] - u->filled[g] >= more) return AFF_OK;
    const uint64_t cap = (uint64_t)(2 * u->cap[g] + more + 1024);
    if (g == 0) AFF_TRY(aff__realloc(&u->dispatch, cap, sizeof *u->dispatch, what, err));
    if (g == 1) AFF_TRY(aff__realloc(&u->pick, cap, sizeof *u->pick, what, err));
    if (g == 1) AFF_TRY(aff__realloc(&u->id, cap, sizeof *u->id, what, err));
    if (g == 1) AFF_TRY(aff__realloc(&u->count, cap, sizeof *u->count, what, err));
    if (g == 2) AFF_TRY(aff__realloc(&u->near, cap, sizeof *u->near, what, err));
    if (g == 2) AFF_TRY(aff__realloc(&u->score, cap, sizeof *u->score, what, err));
    u->cap[g] = (int64_t)cap;
    return AFF_OK;
}

static int by_id(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts a copy of n picks and folds equal ones: ids and counts. */
static int distinct(const int32_t *picks, int n, int32_t *id, int32_t *count)
{
    int found = 0;
    if (n) memcpy(id, picks, (size_t)n * sizeof *id);
    qsort(id, (size_t)n, sizeof *id, by_id);
    for (int i = 0; i < n; i++) {
        if (found && id[found - 1] == id[i]) {
            count[found - 1]++;
        } else {
            id[found] = id[i];
            count[found++] = 1;
        }
    }
    return found;
}

aff_status aff__uses_add(aff_uses *u, int layer, int rows, const int32_t *picks, const float *value, int near,
                         aff_error *err)
{
    const int n = rows * u->picks;
    AFF_TRY(grow(u, 0, 1, err));
    AFF_TRY(grow(u, 1, n, err));
    AFF_TRY(grow(u, 2, AFF_NEAR_MOST, err));
    aff_dispatch d = {.layer = layer,
                      .rows = rows,
                      .phase = rows > AFF_DECODE_ROWS ? AFF_USE_PREFILL : AFF_USE_DECODE,
                      .pick = u->filled[1],
                      .id = u->filled[1],
                      .near = u->filled[2]};
    if (n) memcpy(u->pick + d.pick, picks, (size_t)n * sizeof *picks);
    d.n = distinct(picks, n, u->id + d.id, u->count + d.id);
    if (value && near > 0)
        d.n_near = aff__near_misses(value, u->experts, u->id + d.id, d.n, near, u->near + d.near, u->score + d.near);
    u->dispatch[u->n++] = d;
    u->filled[0] = u->n;
    u->filled[1] += n;
    u->filled[2] += d.n_near;
    u->requests += d.n;
    if (layer == 0) u->tokens[d.phase] += rows;
    return AFF_OK;
}

typedef struct {
    aff_uses *u;
    float *value; /* [experts] of the last line of them */
    int value_of, near;
    aff_status s;
    aff_error *err;
} loading;

static void head(void *ctx, int layers, int experts, int picks)
{
    loading *x = ctx;
    aff__uses_init(x->u, layers, experts, picks);
    x->s = aff__calloc(&x->value, (uint64_t)experts, sizeof *x->value, "route trace", x->err);
}

static bool record(void *ctx, const aff_route_record *r)
{
    loading *x = ctx;
    if (x->s != AFF_OK) return false;
    if (r->kind == 'G') {
        for (int e = 0; e < r->n; e++) x->value[e] = (float)r->id[e];
        x->value_of = r->layer;
    } else if (r->kind == 'D') {
        x->s =
            aff__uses_add(x->u, r->layer, r->rows, r->id, x->value_of == r->layer ? x->value : NULL, x->near, x->err);
        x->value_of = -1;
    } else if (r->kind == 'S') {
        x->u->drafts++;
    }
    return x->s == AFF_OK;
}

aff_status aff__uses_read(aff_uses *u, const char *path, int near, aff_error *err)
{
    loading x = {.u = u, .value_of = -1, .near = near, .err = err};
    *u = (aff_uses){0};
    aff_status s = aff__route_read(path, &(aff_route_reader){&x, head, record}, err);
    if (s == AFF_OK) s = x.s;
    free(x.value);
    if (s != AFF_OK) aff__uses_free(u);
    return s;
}

aff_placement_use aff__uses_at(const aff_uses *u, int64_t i)
{
    const aff_dispatch *d = &u->dispatch[i];
    return (aff_placement_use){.layer = d->layer,
                               .phase = d->phase,
                               .n = d->n,
                               .id = u->id + d->id,
                               .count = u->count + d->id,
                               .n_near = d->n_near,
                               .near = u->near + d->near,
                               .score = u->score + d->near};
}
