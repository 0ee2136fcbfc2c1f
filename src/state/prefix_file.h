/* prefix_file.h - the bytes of a cache entry. Little-endian:
 *   0 "AFFPFX1\0" | 8 u32 kind | 12 u32 tokens n | 16 fingerprint | 32 key | 48 parent | 64 u64 pos | 72 u64 low | 80
 * u64 payload bytes | 88 checksum of the payload | 104 digest of the whole state (0: none) | 120 u64 XXH3-64 of bytes
 * 0..119 and the ids | 128 n ids u32, zeros to a multiple of 4096 | payload, zeros to a multiple of 4096. Hashes are 16
 * bytes, XXH3-128. */
#ifndef AFF_STATE_PREFIX_FILE_H
#define AFF_STATE_PREFIX_FILE_H
#include "state/snapshot.h"

enum { AFF_PFX_PAGE = 4096, AFF_PFX_HEAD = 128 };
enum { AFF_PFX_MAX_TOKENS = 1 << 20 };
typedef enum aff_pfx_kind { AFF_PFX_BLOCK = 1, AFF_PFX_CHECKPOINT = 2 } aff_pfx_kind;

typedef struct aff_pfx_entry {
    aff_pfx_kind kind;
    uint32_t n; /* tokens: of a block, or since the last whole block */
    aff_hash fingerprint, key, parent;
    int64_t pos, low; /* position at the entry's end; lowest rollback (checkpoints) */
    uint64_t payload;
    aff_hash sum, state;
} aff_pfx_entry;

/* Size of the whole file, and where the payload begins in it. */
uint64_t aff__pfx_payload_at(uint32_t n);
uint64_t aff__pfx_size(const aff_pfx_entry *e);
/* Fills buf[aff__pfx_size] around the payload, which must be in place; sets e->sum. */
void aff__pfx_seal(aff_pfx_entry *e, const int32_t *id, uint8_t *buf);
/* The header of a file of `size` bytes whose first `have` bytes (a page at least) are at buf: false if it cannot be
 * that of a whole entry. Hashes are for the next function. */
bool aff__pfx_head(aff_pfx_entry *e, const uint8_t *buf, uint64_t have, uint64_t size);
/* The whole file is there and nothing in it has changed. */
bool aff__pfx_check(aff_pfx_entry *e, const uint8_t *buf, uint64_t size);
/* Whether the entry's ids are id[0..n). The header must have been accepted. */
bool aff__pfx_same_ids(const aff_pfx_entry *e, const uint8_t *buf, const int32_t *id);
/* The key of an entry. */
aff_hash aff__pfx_key(aff_hash fingerprint, aff_pfx_kind kind, aff_hash parent, const int32_t *id, uint32_t n);
#endif
