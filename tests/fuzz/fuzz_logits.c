/* Saved logits from memory. The header's checksum is put right first, so that the fuzzer gets behind it. */
#include "engine/logits_file.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_logits_in *f;
    aff_error err = {0};
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) return 0;
    if (size) memcpy(copy, data, size);
    if (size >= 80) {
        const uint64_t h = XXH3_64bits(copy, 72);
        memcpy(copy + 72, &h, 8);
    }
    if (aff__logits_open_memory(&f, copy, size, "fuzz", false, &err) == AFF_OK) {
        const aff_logits_head *h = aff__logits_head(f);
        const uint64_t width = aff__logits_width(h);
        if (h->vocab >
            1 << 16) { /* with top N, a vocabulary is any number: the program compares it with the model's first */
            aff__logits_close(f);
            free(copy);
            return 0;
        }
        float *logit = calloc(width, sizeof *logit), *l = calloc(h->vocab, sizeof *l);
        int32_t *id = calloc(width, sizeof *id);
        uint8_t *used = calloc(h->vocab, 1);
        for (uint64_t i = 0; logit && l && id && used && i < h->positions; i++) {
            aff_eval_ref r;
            aff_eval_row row;
            if (aff__logits_get(f, i, 0, logit, id, &r, &err) != AFF_OK) continue;
            if (aff__eval_compare(&r, l, (int)h->vocab, 0, used, &row, &err) != AFF_OK || isnan(row.kl)) abort();
        }
        free(logit), free(l), free(id), free(used);
        aff__logits_close(f);
    }
    free(copy);
    return 0;
}
