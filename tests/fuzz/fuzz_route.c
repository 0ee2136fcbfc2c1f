/* Route traces: any bytes give records within the bounds of their header, or an error. */
#include "format/route.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int layers, experts, picks;

static void head(void *ctx, int l, int e, int k)
{
    layers = l;
    experts = e;
    picks = k;
}

static bool record(void *ctx, const aff_route_record *r)
{
    int64_t sum = 0;
    if (r->kind == 'D' && (r->layer >= layers || r->n != r->rows * picks)) abort();
    for (int i = 0; i < r->n; i++) {
        if (r->kind != 'G' && r->id[i] >= experts) abort();
        sum += r->id[i];
    }
    for (int i = 0; i < r->n_miss; i++) {
        if (r->miss[i] >= experts) abort();
        sum += r->miss[i];
    }
    if (sum < 0) abort();
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_error err = {0};
    char *text = malloc(size + 1);
    if (!text) return 0;
    memcpy(text, data, size);
    const aff_status s =
        aff__route_parse(text, size, "trace", &(aff_route_reader){.head = head, .record = record}, &err);
    if (s != AFF_OK && !err.msg[0]) abort();
    free(text);
    return 0;
}
