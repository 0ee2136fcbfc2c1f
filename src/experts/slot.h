/* slot.h - the one layout of an expert outside files (backend/types.h, aff_expert_slot; design 2). */
#ifndef AFF_EXPERTS_SLOT_H
#define AFF_EXPERTS_SLOT_H
#include "backend/types.h"

/* Bytes of a plane: matrix 0 gate, 1 up, 2 down; plane 0 codes, 1 fields, 2 rscale (0 bytes for MXFP4). */
uint64_t aff__slot_plane(const aff_expert_shape *s, int matrix, int plane);
/* That of a container's record (spec container 4.1): codes, fields, rscales, each at a multiple of 256; the stride is one of 4096. */
aff_expert_slot aff__slot_layout(const aff_expert_shape *s);
/* Copies an expert's planes into the slot at `to`, stride bytes. */
void aff__slot_gather(const aff_expert_shape *s, const aff_expert_slot *l, const aff_expert *e, uint8_t *to);
#endif
