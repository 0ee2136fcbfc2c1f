/* sweep.h - a long text cut into sequences and run layer by layer: all rows pass through a layer before the next one is
 * touched, so each weight is read once however long the text is. A model larger than the memory streams from its file
 * through the page cache.
 *
 * The bits are those of aff__forward (a row's result depends on its own sequence only). No draft. */
#ifndef AFF_MODEL_SWEEP_H
#define AFF_MODEL_SWEEP_H
#include "model/net.h"

/* Sees the inputs of a layer's routed experts: entry i of the plan has x[plan->row[i]] (rows of [hidden], of gate and
 * up) and plan->h[i] (rows of [inter], of down). Changes no result. */
typedef void (*aff_watch_fn)(void *ctx, int layer, const aff_moe_plan *plan, const float *x);

typedef struct aff_sweep_options {
    int threads;        /* <= 0: one per CPU */
    int64_t chunk;      /* rows of a sequence, 1 .. max_positions; the last one may be shorter */
    int64_t rows;       /* most rows of one run; each takes 4 * streams * hidden bytes */
    int pass;           /* rows at a time, 1 .. AFF_MAX_CHUNK; 0: that. Changes no result */
    aff_watch_fn watch; /* NULL: none */
    void *ctx;          /* of watch and progress */
    bool (*progress)(void *ctx, int layer, int layers); /* `layer` layers are done; false stops. NULL: none */
} aff_sweep_options;

typedef struct aff_sweep aff_sweep;
/* `net` is borrowed and must outlive the sweep. */
aff_status aff__sweep_create(aff_sweep **out, const aff_net *net, const aff_sweep_options *o, aff_error *err);
void aff__sweep_free(aff_sweep *s);
/* Runs rows ids[0..n): sequences of `chunk` rows, each from position 0. Replaces the rows of the run before.
 * AFF_E_CANCELLED when `progress` said so. */
aff_status aff__sweep_run(aff_sweep *s, const int32_t *ids, int64_t n, aff_error *err);
/* Logits [count][vocab] of rows from .. from+count-1 of the last run. */
aff_status aff__sweep_logits(aff_sweep *s, int64_t from, int64_t count, float *logits, aff_error *err);

/* A number that tells models apart without reading all of them: XXH3-64 of geometry, the layers' norms and samples of
 * the experts' codes. Containers of dtypes 33 and 34 with the same weights have the same. */
aff_status aff__net_fingerprint(const aff_net *net, uint64_t *hash, aff_error *err);
#endif
