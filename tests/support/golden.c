#include "support/golden.h"
#include "support/test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

aff_ckpt *golden_open(const char *name)
{
    char path[1024];
    aff_error err = {0};
    aff_ckpt *g = NULL;
    snprintf(path, sizeof path, "%s/golden/%s", AFF_TESTS_DIR, name);
    if (aff__ckpt_open_file(&g, path, &err) != AFF_OK) fail_msg("%s", err.msg);
    return g;
}

static const aff_st_tensor *get(const aff_ckpt *g, const char *name, aff_st_dtype dtype, size_t *n)
{
    const aff_st_tensor *t = aff__ckpt_find(g, name);
    if (!t) fail_msg("golden array '%s' is missing", name);
    if (t->dtype != dtype) fail_msg("golden array '%s' has type %s", name, aff__st_dtype_name(t->dtype));
    if (n) *n = (size_t)t->size / aff__st_dtype_size(dtype);
    return t;
}

/* safetensors promises no alignment: an array that lies askew is copied, and the copies live until the program ends. */
static void **copies;
static size_t n_copies;

static void free_copies(void)
{
    for (size_t i = 0; i < n_copies; i++) free(copies[i]);
    free(copies);
}

static const void *aligned(const aff_st_tensor *t)
{
    if ((uintptr_t)t->data % 4 == 0) return t->data;
    if (!n_copies) atexit(free_copies);
    copies = realloc(copies, (n_copies + 1) * sizeof *copies);
    assert_non_null(copies);
    void *p = malloc(t->size ? (size_t)t->size : 1);
    assert_non_null(p);
    memcpy(p, t->data, (size_t)t->size);
    copies[n_copies++] = p;
    return p;
}

const float *golden_f32(const aff_ckpt *g, const char *name, size_t *n) { return aligned(get(g, name, AFF_ST_F32, n)); }
const int32_t *golden_i32(const aff_ckpt *g, const char *name, size_t *n) { return aligned(get(g, name, AFF_ST_I32, n)); }
bool golden_has(const aff_ckpt *g, const char *name) { return aff__ckpt_find(g, name) != NULL; }

int32_t *golden_ints(const aff_ckpt *g, const char *name, size_t *n)
{
    const aff_st_tensor *t = aff__ckpt_find(g, name);
    if (!t) fail_msg("golden array '%s' is missing", name);
    const size_t size = aff__st_dtype_size(t->dtype), count = (size_t)t->size / size;
    int32_t *v = malloc((count + 1) * sizeof *v);
    assert_non_null(v);
    for (size_t i = 0; i < count; i++) {
        int16_t h;
        switch (t->dtype) {
        case AFF_ST_I8: v[i] = ((const int8_t *)t->data)[i]; break;
        case AFF_ST_U8: v[i] = t->data[i]; break;
        case AFF_ST_I16: memcpy(&h, t->data + 2 * i, 2); v[i] = h; break;
        case AFF_ST_I32: memcpy(&v[i], t->data + 4 * i, 4); break;
        default: fail_msg("golden array '%s' has type %s", name, aff__st_dtype_name(t->dtype));
        }
    }
    if (n) *n = count;
    return v;
}

double row_error(const float *a, const float *b, size_t n)
{
    double e = 0, m = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= INFINITY)) return INFINITY;
        if (isnan(d)) return INFINITY;
        e = d > e ? d : e;
        m = fabs((double)b[i]) > m ? fabs((double)b[i]) : m;
    }
    return m > 0 ? e / m : e > 0 ? INFINITY : 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(const double *v, size_t n)
{
    double *s = malloc((n ? n : 1) * sizeof *s);
    assert_non_null(s);
    memcpy(s, v, n * sizeof *s);
    qsort(s, n, sizeof *s, by_value);
    const double m = n ? s[n / 2] : 0;
    free(s);
    return m;
}
