/* route.h - traces of which experts were used: text, one line a record (spec runtime 13; docs/bench.md).
 *
 *   # aff-route-trace 1 layers=L experts=E k=K
 *   R layer e...                       experts in fast memory when the trace begins
 *   G handle q0 ... q(E-1)             what the router said of every expert, summed over the rows and scaled to 0..1000
 * over the line; before the dispatch it belongs to. handle: the layer; L + stage for a draft D seq layer rows e... |
 * miss...    rows*K choices, row after row; then, ascending, those that were not in fast memory S seq stage rows e... |
 * miss...    the same of a draft
 *
 * seq counts all dispatches from 0. */
#ifndef AFF_FORMAT_ROUTE_H
#define AFF_FORMAT_ROUTE_H
#include "base/status.h"
#include <stddef.h>
#include <stdint.h>

typedef struct aff_route_file aff_route_file;
/* An output that appears when it is closed (base/file.h), with a buffer of 4 MiB and no allocation after this. */
aff_status aff__route_create(aff_route_file **out, const char *path, int layers, int experts, int picks,
                             aff_error *err);
void aff__route_resident(aff_route_file *f, int layer, const int32_t *ids, int n);
void aff__route_scores(aff_route_file *f, int handle, const int *q);
void aff__route_dispatch(aff_route_file *f, bool draft, int layer, int rows, const int32_t *picks, const int32_t *miss,
                         int n_miss);
/* Frees f in every case; the first error of any write. keep false: leaves nothing behind. */
aff_status aff__route_close(aff_route_file *f, bool keep, aff_error *err);

enum { AFF_ROUTE_LAYERS = 4096, AFF_ROUTE_EXPERTS = 65536, AFF_ROUTE_PICKS = 64, AFF_ROUTE_ROWS = 1 << 20 };

typedef struct aff_route_record {
    char kind;         /* 'R', 'G', 'D' or 'S' */
    int layer, rows;   /* layer: or handle, or stage */
    int64_t seq;       /* D, S */
    const int32_t *id; /* R: experts; G: values; D, S: [rows][k] */
    int n;
    const int32_t *miss; /* [n_miss] */
    int n_miss;
} aff_route_record;

typedef struct aff_route_reader {
    void *ctx;
    void (*head)(void *ctx, int layers, int experts, int picks);
    bool (*record)(void *ctx, const aff_route_record *r); /* false: enough, AFF_OK */
} aff_route_reader;
/* Every line is checked: ids in range, a row's choices distinct, counts, seq, misses ascending and among the choices.
 * The error names file and line. */
aff_status aff__route_parse(const char *text, size_t size, const char *name, const aff_route_reader *r, aff_error *err);
aff_status aff__route_read(const char *path, const aff_route_reader *r, aff_error *err);
#endif
