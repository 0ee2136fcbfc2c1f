#include "experts/slot.h"
#include "base/mem.h"
#include <string.h>

enum { PLANE = 256, PAGE = 4096 };

uint64_t aff__slot_plane(const aff_expert_shape *s, int matrix, int plane)
{
    const uint64_t n = (uint64_t)s->hidden * (uint64_t)s->inter, rows = (uint64_t)(matrix == 2 ? s->hidden : s->inter);
    const bool four = s->dtype == AFF_MXFP4;
    if (plane == 0) return four ? n / 2 : n / 64 * 20;
    if (plane == 1) return four ? n / 32 : n / 64 * 3;
    return four ? 0 : 2 * rows;
}

aff_expert_slot aff__slot_layout(const aff_expert_shape *s)
{
    aff_expert_slot l = {0};
    for (int p = 0; p < 3; p++)
        for (int m = 0; m < 3; m++) {
            l.off[m][p] = (uint32_t)l.stride;
            l.stride += aff__align_up(aff__slot_plane(s, m, p), PLANE);
        }
    l.stride = aff__align_up(l.stride, PAGE);
    return l;
}

void aff__slot_gather(const aff_expert_shape *s, const aff_expert_slot *l, const aff_expert *e, uint8_t *to)
{
    const aff_expert_mat *const mat[] = {&e->gate, &e->up, &e->down};
    for (int m = 0; m < 3; m++) {
        const uint8_t *const from[] = {mat[m]->codes, mat[m]->fields, mat[m]->rscale};
        for (int p = 0; p < 3; p++)
            if (aff__slot_plane(s, m, p)) memcpy(to + l->off[m][p], from[p], aff__slot_plane(s, m, p));
    }
}
