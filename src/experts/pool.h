/* pool.h - memory for experts: slots of one size in one mapping (docs/placement.md). Which slot holds what is the
 * owner's affair (tiers.h). A slot is byte for byte what a slot of a card's slab and a staging slot is, so a kernel's
 * address may name any of them. */
#ifndef AFF_EXPERTS_POOL_H
#define AFF_EXPERTS_POOL_H
#include "base/status.h"
#include <stdint.h>

typedef struct aff_slots aff_slots;

/* `slots` slots of `pitch` bytes (a multiple of 4096), aligned to 4096; huge pages are asked for before anything is
 * touched. populate: all pages are there on return, which registering with a device needs (a machine that has too few
 * says so with AFF_E_NOMEM); else each page comes when it is first written. 0 slots are fine: base NULL. */
aff_status aff__slots_create(aff_slots **out, uint64_t pitch, int64_t slots, bool populate, aff_error *err);
void aff__slots_free(aff_slots *p);
uint8_t *aff__slots_at(const aff_slots *p, int64_t slot);
uint8_t *aff__slots_base(const aff_slots *p);
uint64_t aff__slots_pitch(const aff_slots *p);
uint64_t aff__slots_bytes(const aff_slots *p); /* of the mapping */
int64_t aff__slots_count(const aff_slots *p);
/* Bytes of the mapping that lie in huge pages, from /proc/self/smaps; 0 where the system does not say. */
uint64_t aff__slots_huge(const aff_slots *p);
#endif
