#include "support/record.h"
#include "support/golden.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct plane {
    char what[24];
    int layer, width;
    uint8_t *seen; /* [rows] */
    char *v;       /* [rows][width] of 4 bytes */
} plane;

struct record {
    int rows, topk, n;
    plane p[512];
};

bool record_verbose;

void record_arguments(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) record_verbose |= strcmp(argv[i], "-v") == 0;
    if (record_verbose)
        printf("%-10s %-6s %-32s %10s %10s %7s  gates\n", "model", "mode", "tensor", "median", "worst", "rows");
}

record *record_new(int rows, int topk)
{
    record *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->rows = rows;
    r->topk = topk;
    return r;
}

void record_free(record *r)
{
    for (int i = 0; i < r->n; i++) {
        free(r->p[i].v);
        free(r->p[i].seen);
    }
    free(r);
}

static plane *find(const record *r, const char *what, int layer)
{
    for (int i = 0; i < r->n; i++)
        if (r->p[i].layer == layer && strcmp(r->p[i].what, what) == 0) return (plane *)&r->p[i];
    return NULL;
}

void record_trace(void *ctx, const char *what, int layer, int row0, const void *data, int rows, int width)
{
    record *r = ctx;
    plane *p = find(r, what, layer);
    const bool sel = strcmp(what, "sel") == 0;
    if (!p) {
        assert_true(r->n < 512);
        p = &r->p[r->n++];
        snprintf(p->what, sizeof p->what, "%s", what);
        p->layer = layer;
        p->width = sel ? r->topk : width;
        p->v = malloc((size_t)r->rows * (size_t)(p->width ? p->width : 1) * 4);
        p->seen = calloc((size_t)r->rows, 1);
        assert_non_null(p->v);
        assert_non_null(p->seen);
    }
    assert_true(row0 >= 0 && row0 + rows <= r->rows);
    assert_true(sel ? width <= p->width && rows == 1 : width == p->width);
    char *to = p->v + (size_t)row0 * (size_t)p->width * 4;
    if (sel) memset(to, 0xff, (size_t)p->width * 4);
    memcpy(to, data, (size_t)rows * (size_t)width * 4);
    memset(p->seen + row0, 1, (size_t)rows);
}

static const void *row_of(const record *r, const char *what, int layer, int64_t row)
{
    const plane *p = find(r, what, layer);
    if (!p || row < 0 || row >= r->rows || !p->seen[row])
        fail_msg("'%s' of layer %d, row %lld was not traced", what, layer, (long long)row);
    return p->v + (size_t)row * (size_t)p->width * 4;
}

const float *record_row(const record *r, const char *what, int layer, int64_t row)
{
    return row_of(r, what, layer, row);
}
const int32_t *record_ids(const record *r, const char *what, int layer, int64_t row)
{
    return row_of(r, what, layer, row);
}

void errors_add(errors *s, double e)
{
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 256;
        s->e = realloc(s->e, s->cap * sizeof *s->e);
        assert_non_null(s->e);
    }
    s->e[s->n++] = e;
}

void errors_judge_loose(errors *s, const char *model, const char *mode, const char *tensor, double median_gate,
                        double gate, double loose, double loose_gate)
{
    double worst = 0, mid;
    size_t above = 0;
    if (!s->n) fail_msg("%s %s %s: nothing was compared", model, mode, tensor);
    for (size_t i = 0; i < s->n; i++) {
        worst = s->e[i] > worst ? s->e[i] : worst;
        above += s->e[i] > gate;
    }
    mid = median(s->e, s->n);
    if (record_verbose)
        printf("%-10s %-6s %-32s %10.2e %10.2e %7zu  %.0e %.0e\n", model, mode, tensor, mid, worst, s->n, median_gate,
               loose > 0 ? loose_gate : gate);
    const size_t n = s->n;
    free(s->e);
    *s = (errors){0};
    if (!(mid <= median_gate)) fail_msg("%s %s %s: median error %g, gate %g", model, mode, tensor, mid, median_gate);
    if (!(worst <= (loose > 0 ? loose_gate : gate)) || (double)above > loose / 100 * (double)n)
        fail_msg("%s %s %s: worst error %g, %zu of %zu rows above %g", model, mode, tensor, worst, above, n, gate);
}

void errors_judge(errors *s, const char *model, const char *mode, const char *tensor, double median_gate, double gate)
{
    errors_judge_loose(s, model, mode, tensor, median_gate, gate, 0, gate);
}

void counts_judge(const char *model, const char *mode, const char *tensor, int64_t compared, int64_t wrong,
                  int64_t near)
{
    if (record_verbose)
        printf("%-10s %-6s %-32s %10s %10lld %7lld  equal%s\n", model, mode, tensor,
               "differ:", (long long)(wrong + near), (long long)compared, near ? " (near ties or flips)" : "");
    if (!compared) fail_msg("%s %s %s: nothing was compared", model, mode, tensor);
    if (wrong) fail_msg("%s %s %s: %lld of %lld differ", model, mode, tensor, (long long)wrong, (long long)compared);
}

bool same_set(const int32_t *a, const int32_t *b, int n)
{
    for (int i = 0; i < n; i++) {
        int in_a = 0, in_b = 0;
        for (int j = 0; j < n; j++) in_a += a[j] == a[i], in_b += b[j] == a[i];
        if (in_a != in_b) return false;
    }
    return true;
}
