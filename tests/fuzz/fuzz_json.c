/* The JSON reader: what it accepts must be within its bounds, and must survive being written and read again. */
#include "format/json.h"
#include <stdlib.h>
#include <string.h>

static int depth(const json_t *v)
{
    int most = 0;
    const char *key;
    json_t *x;
    size_t i;
    json_object_foreach((json_t *)(uintptr_t)v, key, x)
    {
        int d = depth(x);
        if (d > most) most = d;
    }
    json_array_foreach(v, i, x)
    {
        int d = depth(x);
        if (d > most) most = d;
    }
    return most + (json_is_object(v) || json_is_array(v));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The exact reader: what it takes is printed as it will be read again. */
static void exact(const char *text, size_t size, bool python)
{
    json_t *v = NULL, *again = NULL;
    aff_buf a = {0}, b = {0};
    if (aff__json_parse_exact(&v, text, size, "fuzz", python, 200, NULL) != AFF_OK) return;
    if (depth(v) > 200 || aff__json_dump_python(&a, v, NULL) != AFF_OK) abort();
    if (aff__json_parse_exact(&again, a.s, a.n, "again", python, 200, NULL) != AFF_OK || !json_equal(v, again)) abort();
    if (aff__json_dump_python(&b, again, NULL) != AFF_OK || a.n != b.n || memcmp(a.s, b.s, a.n) != 0) abort();
    aff__buf_free(&a);
    aff__buf_free(&b);
    json_decref(v);
    json_decref(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    exact((const char *)data, size, false);
    exact((const char *)data, size, true);
    for (int unique = 0; unique < 2; unique++) {
        json_t *v = NULL, *again = NULL;
        aff_error err = {0};
        if (aff__json_parse(&v, (const char *)data, size, "fuzz", unique != 0, &err) != AFF_OK) continue;
        if (depth(v) > 256) abort();
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
        if (!text) abort();
        size_t n = 0;
        while (text[n]) n++;
        if (aff__json_parse(&again, text, n, "again", true, &err) != AFF_OK || !json_equal(v, again)) abort();
        free(text);
        json_decref(again);
        json_decref(v);
    }
    return 0;
}
