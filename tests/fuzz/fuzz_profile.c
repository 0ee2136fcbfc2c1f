/* Expert profiles: any bytes give finite numbers of the counts in their head, or an error. The first byte chooses the
 * model: any, or of 2 layers and 3 experts. Since nobody guesses a hash, the right one is put at the end of every
 * second input. */
#include "format/profile.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_profile p;
    aff_error err = {0};
    if (size < 1) return 0;
    const uint8_t mode = data[0];
    uint8_t *copy = malloc(size); /* exact, so that a read past the end shows */
    if (!copy) return 0;
    memcpy(copy, data + 1, size - 1);
    if (mode & 2 && size > 9) {
        const uint64_t hash = XXH3_64bits(copy, size - 9);
        memcpy(copy + size - 9, &hash, 8);
    }
    uint8_t *exact = realloc(copy, size > 1 ? size - 1 : 1);
    if (exact) copy = exact;
    if (aff__profile_parse(&p, copy, size - 1, "fuzz", mode & 1 ? 2 : 0, mode & 1 ? 3 : 0, &err) == AFF_OK) {
        if (mode & 1 && (p.layers != 2 || p.experts != 3)) abort();
        for (int64_t i = 0; i < (int64_t)p.layers * p.experts; i++)
            if (!(p.use[i] >= 0 && isfinite(p.use[i]))) abort();
        for (int64_t i = 0; p.picks && i < (int64_t)(p.layers - 1) * p.experts * p.experts; i++)
            if (!isfinite(aff__profile_weight(p.below[i])) || !isfinite(aff__profile_weight(p.before[i]))) abort();
        aff__profile_free(&p);
    } else if (!err.msg[0] || p.use) {
        abort();
    }
    free(copy);
    return 0;
}
