/* foresight.h - how well a layer's router foretells what it will pick, asked too early (spec runtime 21): on the
 * streams after the attention of the layer before, at that layer's end, and at the end of the one before that.
 * Diagnosis, on the CPU. */
#ifndef AFF_ENGINE_FORESIGHT_H
#define AFF_ENGINE_FORESIGHT_H
#include "model/forward.h"
#include <stdio.h>

/* Reads n tokens and prints CSV: layer (or "all"), when ("attention", "end", "end before"), guesses (picks, 8, 12, 16,
 * at most all experts), recall, picks judged. Layers that choose by token are left out: they are known from the start.
 */
aff_status aff__foresight(const aff_net *net, int threads, const int32_t *ids, int64_t n, FILE *csv, aff_error *err);
#endif
