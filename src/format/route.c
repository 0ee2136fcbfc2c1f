#include "format/route.h"
#include "base/file.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- writing ---- */

enum { BUFFER = 4 << 20, NUMBER = 24 };

struct aff_route_file {
    aff_outfile out;
    int layers, experts, picks;
    int64_t seq;
    uint64_t written;
    size_t used;
    aff_status status;
    aff_error err;
    char buf[BUFFER];
};

static void flush(aff_route_file *f)
{
    if (f->status == AFF_OK) f->status = aff__out_write(&f->out, f->buf, f->used, f->written, &f->err);
    f->written += f->used;
    f->used = 0;
}

static void put_text(aff_route_file *f, const char *s, size_t n)
{
    if (f->used + n > BUFFER) flush(f);
    memcpy(f->buf + f->used, s, n);
    f->used += n;
}

/* `before`, then the number. */
static void put(aff_route_file *f, char before, int64_t v)
{
    char t[NUMBER];
    size_t at = sizeof t;
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    do t[--at] = (char)('0' + u % 10);
    while (u /= 10);
    if (v < 0) t[--at] = '-';
    t[--at] = before;
    put_text(f, t + at, sizeof t - at);
}

static void put_list(aff_route_file *f, const int32_t *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) put(f, ' ', v[i]);
}

aff_status aff__route_create(aff_route_file **out, const char *path, int layers, int experts, int picks, aff_error *err)
{
    aff_route_file *f;
    char head[96];
    *out = NULL;
    AFF_TRY(aff__calloc(&f, 1, sizeof *f, "route trace", err));
    f->layers = layers;
    f->experts = experts;
    f->picks = picks;
    const aff_status s = aff__out_open(&f->out, path, err);
    if (s != AFF_OK) {
        free(f);
        return s;
    }
    put_text(
        f, head,
        (size_t)snprintf(head, sizeof head, "# aff-route-trace 1 layers=%d experts=%d k=%d\n", layers, experts, picks));
    *out = f;
    return AFF_OK;
}

void aff__route_resident(aff_route_file *f, int layer, const int32_t *ids, int n)
{
    put_text(f, "R", 1);
    put(f, ' ', layer);
    put_list(f, ids, n);
    put_text(f, "\n", 1);
}

void aff__route_scores(aff_route_file *f, int handle, const int *q)
{
    put_text(f, "G", 1);
    put(f, ' ', handle);
    for (int e = 0; e < f->experts; e++) put(f, ' ', q[e]);
    put_text(f, "\n", 1);
}

void aff__route_dispatch(aff_route_file *f, bool draft, int layer, int rows, const int32_t *picks, const int32_t *miss,
                         int n_miss)
{
    put_text(f, draft ? "S" : "D", 1);
    put(f, ' ', f->seq++);
    put(f, ' ', layer);
    put(f, ' ', rows);
    put_list(f, picks, (int64_t)rows * f->picks);
    put_text(f, " |", 2);
    put_list(f, miss, n_miss);
    put_text(f, "\n", 1);
}

aff_status aff__route_close(aff_route_file *f, bool keep, aff_error *err)
{
    if (!f) return AFF_OK;
    flush(f);
    aff_status s = f->status;
    if (s != AFF_OK && err) *err = f->err;
    if (s == AFF_OK && keep)
        s = aff__out_commit(&f->out, err);
    else
        aff__out_abort(&f->out);
    free(f);
    return s;
}

/* ---- reading ---- */

typedef struct {
    const char *at, *end, *name; /* of the line */
    int64_t line;
    int layers, experts, picks;
    int64_t seq;
    int32_t *value; /* numbers of a line */
    int64_t n, cap;
    uint8_t *mark; /* [experts] */
    aff_error *err;
} reader;

static aff_status wrong(const reader *r, const char *what)
{
    return aff__fail(r->err, AFF_E_FORMAT, "%s: line %lld: %s", r->name, (long long)r->line, what);
}

/* The next number of the line, blanks before it. False at the end of the line or at '|'. */
static bool number(reader *r, int64_t *v, aff_status *s)
{
    while (r->at < r->end && *r->at == ' ') r->at++;
    if (r->at == r->end || *r->at == '|') return false;
    int64_t n = 0;
    const char *from = r->at;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9' && r->at - from < 18) n = 10 * n + (*r->at++ - '0');
    if (r->at == from || (r->at < r->end && *r->at != ' ')) {
        *s = wrong(r, "expected numbers and blanks");
        return false;
    }
    *v = n;
    return true;
}

static aff_status one(reader *r, const char *what, int64_t below, int64_t *v)
{
    aff_status s = AFF_OK;
    if (number(r, v, &s) && *v < below) return AFF_OK;
    if (s != AFF_OK) return s;
    return aff__fail(r->err, AFF_E_FORMAT, "%s: line %lld: %s: expected a number below %lld", r->name,
                     (long long)r->line, what, (long long)below);
}

/* Numbers up to the end or '|', each below `below`, behind those that are there. */
static aff_status list(reader *r, int64_t below)
{
    aff_status s = AFF_OK;
    int64_t v;
    while (number(r, &v, &s)) {
        if (v >= below) return wrong(r, "a number is out of range");
        if (r->n == r->cap) {
            const int64_t cap = r->cap ? 2 * r->cap : 1024;
            AFF_TRY(aff__realloc(&r->value, (uint64_t)cap, sizeof *r->value, "route trace", r->err));
            r->cap = cap;
        }
        r->value[r->n++] = (int32_t)v;
    }
    return s;
}

static aff_status dispatch(reader *r, aff_route_record *x)
{
    int64_t layer, rows, chosen;
    AFF_TRY(one(r, "number of the dispatch", INT64_MAX, &x->seq));
    if (x->seq != r->seq++) return wrong(r, "dispatches are not counted from 0 without gaps");
    AFF_TRY(one(r, "layer", x->kind == 'D' ? r->layers : AFF_ROUTE_LAYERS, &layer));
    AFF_TRY(one(r, "rows", AFF_ROUTE_ROWS + 1, &rows));
    x->layer = (int)layer;
    x->rows = (int)rows;
    AFF_TRY(list(r, r->experts));
    chosen = r->n;
    if (chosen != rows * r->picks) return wrong(r, "expected k choices for every row");
    if (r->at == r->end) return wrong(r, "expected '|' and the misses after the choices");
    r->at++;
    AFF_TRY(list(r, r->experts));
    if (r->at != r->end) return wrong(r, "expected nothing after the misses");
    for (int64_t i = 0; i < chosen; i++)
        for (int64_t k = i - i % r->picks; k < i; k++)
            if (r->value[k] == r->value[i]) return wrong(r, "a row chooses an expert twice");
    memset(r->mark, 0, (size_t)r->experts);
    for (int64_t i = 0; i < chosen; i++) r->mark[r->value[i]] = 1;
    for (int64_t i = chosen; i < r->n; i++)
        if (!r->mark[r->value[i]] || (i > chosen && r->value[i] <= r->value[i - 1]))
            return wrong(r, "expected misses ascending and among the choices");
    x->n = (int)chosen;
    x->n_miss = (int)(r->n - chosen);
    return AFF_OK;
}

static aff_status record(reader *r, aff_route_record *x)
{
    int64_t layer;
    r->n = 0;
    *x = (aff_route_record){.kind = *r->at++};
    if (x->kind == 'D' || x->kind == 'S') {
        AFF_TRY(dispatch(r, x));
    } else if (x->kind == 'R' || x->kind == 'G') {
        AFF_TRY(one(r, "layer", x->kind == 'R' ? r->layers : r->layers + AFF_ROUTE_LAYERS, &layer));
        x->layer = (int)layer;
        AFF_TRY(list(r, x->kind == 'R' ? r->experts : 1001));
        if (r->at != r->end) return wrong(r, "expected numbers only");
        if (r->n > r->experts || (x->kind == 'G' && r->n != r->experts))
            return wrong(r, "expected a number for every expert");
        x->n = (int)r->n;
    } else {
        return wrong(r, "expected a record R, G, D or S");
    }
    x->id = r->value;
    x->miss = r->value ? r->value + x->n : NULL;
    return AFF_OK;
}

static aff_status head(reader *r)
{
    char line[96];
    const size_t n = (size_t)(r->end - r->at);
    int end = 0;
    if (n >= sizeof line) return wrong(r, "expected '# aff-route-trace 1 layers=L experts=E k=K'");
    memcpy(line, r->at, n);
    line[n] = 0;
    if (sscanf(line, "# aff-route-trace 1 layers=%5d experts=%6d k=%3d%n", &r->layers, &r->experts, &r->picks, &end) !=
            3 ||
        line[end])
        return wrong(r, "expected '# aff-route-trace 1 layers=L experts=E k=K'");
    if (r->layers < 1 || r->layers > AFF_ROUTE_LAYERS || r->experts < 1 || r->experts > AFF_ROUTE_EXPERTS ||
        r->picks < 1 || r->picks > AFF_ROUTE_PICKS || r->picks > r->experts)
        return wrong(r, "layers, experts or k out of range");
    return aff__calloc(&r->mark, (uint64_t)r->experts, 1, "route trace", r->err);
}

static aff_status parse(reader *r, const char *text, const char *all_end, const aff_route_reader *v)
{
    bool more = true;
    for (const char *at = text; at < all_end && more; at = r->end + 1) {
        const char *nl = memchr(at, '\n', (size_t)(all_end - at));
        r->at = at;
        r->end = nl ? nl : all_end;
        r->line++;
        if (!nl) return wrong(r, "the file ends within a line");
        if (r->line == 1) {
            AFF_TRY(head(r));
            if (v->head) v->head(v->ctx, r->layers, r->experts, r->picks);
        } else {
            aff_route_record x;
            if (r->at == r->end) return wrong(r, "an empty line");
            AFF_TRY(record(r, &x));
            more = !v->record || v->record(v->ctx, &x);
        }
    }
    return r->line ? AFF_OK : aff__fail(r->err, AFF_E_FORMAT, "%s: empty: expected a route trace", r->name);
}

aff_status aff__route_parse(const char *text, size_t size, const char *name, const aff_route_reader *v, aff_error *err)
{
    reader r = {.name = name, .err = err};
    const aff_status s = parse(&r, text, text + size, v);
    free(r.value);
    free(r.mark);
    return s;
}

aff_status aff__route_read(const char *path, const aff_route_reader *v, aff_error *err)
{
    aff_map m;
    AFF_TRY(aff__map_open(&m, path, err));
    const aff_status s = aff__route_parse((const char *)m.data, (size_t)m.size, path, v, err);
    aff__map_close(&m);
    return s;
}
