/* profile.h - how often every routed expert is used, and what the next layer will use: the file of --expert-profile
 * (spec runtime 13; docs/placement.md has the bytes). All numbers little-endian.
 *
 *   affprof1, u32 layers, u32 experts, f32 [layers][experts]
 * and, if the file goes on, maps from what is known to what the next layer picks:
 *   affpred1, u64 bytes that follow this field, u32 picks a row, u32 0,
 *   for each layer but the first: f32 bias [experts]; bf16 below [experts][experts]; bf16 before [experts][experts]
 *   u64 XXH3-64 of the file up to here
 */
#ifndef AFF_FORMAT_PROFILE_H
#define AFF_FORMAT_PROFILE_H
#include "base/status.h"
#include <stddef.h>
#include <stdint.h>

typedef struct aff_profile {
    int layers, experts;
    float *use; /* [layers][experts] the higher, the more it is used; finite, >= 0 */
    int picks;  /* of a row, with maps; 0: there are none */
    /* Maps to layer l at index l - 1; NULL without. Their sums over the picks of a row, with the bias, rank the
     * experts. */
    float *bias; /* [layers - 1][experts] */
    uint16_t *below,
        *before; /* [layers - 1][picked][experts] of the row's picks in layer l - 1; of the row before in layer l */
} aff_profile;

static inline float aff__profile_weight(uint16_t bf16)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)bf16 << 16};
    return v.f;
}

/* Room for a profile, zeroed. */
aff_status aff__profile_create(aff_profile *p, int layers, int experts, int picks, aff_error *err);
void aff__profile_free(aff_profile *p);
/* layers, experts: those of the model, any other count is an error; 0: whatever the file has. A file made for another
 * model of the same counts cannot be told. */
aff_status aff__profile_parse(aff_profile *p, const uint8_t *data, size_t size, const char *name, int layers,
                              int experts, aff_error *err);
aff_status aff__profile_read(aff_profile *p, const char *path, int layers, int experts, aff_error *err);
/* The file appears whole or not at all. */
aff_status aff__profile_write(const aff_profile *p, const char *path, aff_error *err);
#endif
