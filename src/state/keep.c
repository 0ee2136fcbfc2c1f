#include "state/keep.h"
#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

typedef struct mark {
    int64_t pos, low;
    uint8_t *rows, *tail; /* of the positions since the mark before; NULL: not kept any more */
    uint64_t rows_bytes, tail_bytes;
} mark;

struct aff_keep {
    mark *mark; /* ascending */
    int n, cap;
    int32_t *id; /* [pos of the last mark] */
};

aff_status aff__keep_create(aff_keep **out, aff_error *err)
{
    return aff__calloc(out, 1, sizeof **out, "kept beginnings", err);
}

/* Keeps the first n marks. */
static void cut(aff_keep *k, int n)
{
    while (k->n > n) {
        mark *m = &k->mark[--k->n];
        free(m->rows);
        free(m->tail);
    }
}

void aff__keep_free(aff_keep *k)
{
    if (!k) return;
    cut(k, 0);
    free(k->mark);
    free(k->id);
    free(k);
}

uint64_t aff__keep_bytes(const aff_keep *k)
{
    uint64_t sum = 0;
    for (int i = 0; i < k->n; i++) sum += k->mark[i].rows_bytes + (k->mark[i].tail ? k->mark[i].tail_bytes : 0);
    return sum;
}

/* How far id[0..n) is the kept text. */
static int64_t common(const aff_keep *k, const int32_t *id, int64_t n)
{
    const int64_t most = k->n && k->mark[k->n - 1].pos < n ? k->mark[k->n - 1].pos : k->n ? n : 0;
    int64_t i = 0;
    while (i < most && k->id[i] == id[i]) i++;
    return i;
}

/* Into s the state at mark m. */
static aff_status load(const aff_keep *k, aff_seq *s, int m, aff_error *err)
{
    for (int i = 0; i <= m; i++)
        AFF_TRY(aff__seq_rows_load(s, i ? k->mark[i - 1].pos : 0, k->mark[i].pos, k->mark[i].rows, err));
    return aff__seq_tail_load(s, k->mark[m].pos, k->mark[m].low, k->mark[m].tail, err);
}

aff_status aff__keep_restore(aff_keep *k, aff_seq *s, const int32_t *id, int64_t n, int64_t most, aff_error *err)
{
    int64_t same = common(k, id, n), best = 0;
    int from = -1;
    if (same > most) same = most;
    for (int i = 0; i < k->n; i++) {
        const mark *m = &k->mark[i];
        const int64_t reach = m->pos < same ? m->pos : same;
        if (!m->tail || same < m->low || reach <= best || m->pos > aff__seq_capacity(s)) continue;
        best = reach;
        from = i;
    }
    if (from < 0) return AFF_OK;
    aff_status st = aff__seq_grow(s, k->mark[from].pos, err);
    if (st == AFF_OK) st = load(k, s, from, err);
    if (st == AFF_OK && best < k->mark[from].pos) st = aff__seq_rollback(s, best, err);
    if (st != AFF_OK) aff__seq_reset(s);
    cut(k, best < k->mark[from].pos ? from : from + 1);
    return st;
}

/* A mark's bytes, all or nothing. */
static bool save(mark *m, const aff_seq *s, int64_t from)
{
    m->rows_bytes = aff__seq_rows_bytes(s, from, m->pos);
    m->tail_bytes = aff__seq_tail_bytes(s, m->pos, m->low);
    if (aff__realloc(&m->rows, m->rows_bytes + 1, 1, "kept rows", NULL) == AFF_OK &&
        aff__realloc(&m->tail, m->tail_bytes + 1, 1, "kept tail", NULL) == AFF_OK &&
        aff__seq_rows_save(s, from, m->pos, m->rows, NULL) == AFF_OK && aff__seq_tail_save(s, m->tail, NULL) == AFF_OK)
        return true;
    free(m->rows);
    free(m->tail);
    return false;
}

void aff__keep_publish(aff_keep *k, const aff_seq *s, const int32_t *id)
{
    mark m = {.pos = aff__seq_pos(s), .low = aff__seq_low(s)};
    const int64_t same = common(k, id, m.pos);
    int n = k->n;
    while (n && k->mark[n - 1].pos > same) n--;
    cut(k, n);
    const int64_t from = n ? k->mark[n - 1].pos : 0;
    if (m.pos == from) return;
    if (k->n == k->cap) {
        if (aff__realloc(&k->mark, (uint64_t)k->cap + 16, sizeof *k->mark, "kept beginnings", NULL) != AFF_OK) return;
        k->cap += 16;
    }
    if (aff__realloc(&k->id, (uint64_t)m.pos, sizeof *k->id, "kept beginnings", NULL) != AFF_OK || !save(&m, s, from)) return;
    memcpy(k->id + from, id + from, (size_t)(m.pos - from) * sizeof *id);
    k->mark[k->n++] = m;
    if (k->n > AFF_KEEP_TAILS) {
        mark *old = &k->mark[k->n - 1 - AFF_KEEP_TAILS];
        free(old->tail);
        old->tail = NULL;
    }
}
