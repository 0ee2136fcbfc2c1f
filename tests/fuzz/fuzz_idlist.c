/* A list of token ids: what parses prints and parses to the same ids. */
#include "engine/idlist.h"
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int32_t *id, *again;
    int64_t n, m;
    aff_error err = {0};
    if (aff__idlist_parse((const char *)data, size, "fuzz", &id, &n, &err) != AFF_OK) {
        if (id || n || err.code == AFF_OK || !err.msg[0]) abort();
        return 0;
    }
    char *text = malloc((size_t)n * 12);
    size_t len = 0;
    for (int64_t i = 0; i < n; i++) len += (size_t)sprintf(text + len, "%s%d", i ? "," : "", id[i]);
    if (aff__idlist_parse(text, len, "fuzz", &again, &m, &err) != AFF_OK || m != n) abort();
    for (int64_t i = 0; i < n; i++)
        if (again[i] != id[i] || id[i] < 0) abort();
    free(text);
    free(id);
    free(again);
    return 0;
}
