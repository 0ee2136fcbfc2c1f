/* The reader of prefix cache files over any bytes. The input is what a file holds, zeros added up to whole pages as a
 * disk would; the first byte chooses whether the two hashes are made right first, so that what lies behind them is
 * reached. */
#include "state/prefix_file.h"
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void repair(uint8_t *buf, uint64_t size)
{
    aff_pfx_entry e;
    if (!aff__pfx_head(&e, buf, size, size)) return;
    int32_t *id = malloc(4 * (size_t)e.n + 4);
    if (!id) abort();
    for (uint32_t i = 0; i < e.n; i++) memcpy(&id[i], buf + AFF_PFX_HEAD + 4 * (size_t)i, 4);
    aff__pfx_seal(&e, id, buf);
    if (!aff__pfx_check(&e, buf, size) || !aff__pfx_same_ids(&e, buf, id)) abort(); /* what was written is read */
    free(id);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1) return 0;
    const bool mend = data[0] & 1;
    data++;
    size--;
    const uint64_t whole = (size + AFF_PFX_PAGE - 1) / AFF_PFX_PAGE * AFF_PFX_PAGE;
    uint8_t *buf = calloc((size_t)whole + 1, 1);
    if (!buf) abort();
    memcpy(buf, data, size);
    aff_pfx_entry e;
    if (mend) repair(buf, whole);
    aff__pfx_head(&e, buf, whole < AFF_PFX_PAGE ? whole : AFF_PFX_PAGE, whole);
    if (aff__pfx_check(&e, buf, whole)) {
        int32_t *id = malloc(4 * (size_t)e.n + 4);
        if (!id) abort();
        memset(id, 0, 4 * (size_t)e.n + 4);
        (void)aff__pfx_same_ids(&e, buf, id);
        if (aff__pfx_size(&e) != whole) abort();
        free(id);
    }
    free(buf);
    return 0;
}
