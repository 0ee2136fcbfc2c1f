/* prefix.h - sequence states on disk, found by the tokens that led to them: a request that begins like an earlier one
 * starts where that one ended (spec runtime 12, model-v4 10.5).
 *
 * Two kinds of entries, a file each:
 *   block       the growing rows of `block` tokens; shared by everything that begins with the same tokens
 *   checkpoint  the tail (snapshot.h) at one position, and the rows since the last whole block
 * An entry's key is XXH3-128 of (fingerprint, key of the block before, its tokens), so a key names the whole history; a
 * hit is believed only after the entry's own token ids have been compared, for every entry of the chain, and its
 * checksum holds. A file that is torn, truncated or altered is a miss and is unlinked. XXH3 is no cryptographic hash:
 * one cache serves users who trust each other. Files have mode 0600; they hold what was said.
 *
 * Files are written under temporary names by a thread of the cache, past the page cache where the file system allows it
 * (O_DIRECT), and renamed when complete. The least recently used go when the bound is reached; a chain is touched from
 * its end, so what is nearest to the root, and shared most, goes last. A folder may hold entries of other models or
 * versions: they are never read, they count, and they go first. One process at a time uses a folder.
 *
 * One thread at a time calls these functions (the engine's). */
#ifndef AFF_STATE_PREFIX_H
#define AFF_STATE_PREFIX_H
#include "state/snapshot.h"

typedef struct aff_prefix_options {
    const char *dir; /* --prefix-cache-dir: made if its parent exists */
    uint64_t bytes;  /* --prefix-cache-gib: bound on the files, 0: a quarter of what is free there, at most 64 GiB */
    int block;       /* --prefix-cache-block: tokens a block, 0: 512 */
    const char *results; /* of the sequences' memory; NULL: the CPU's */
    bool persistent; /* --persistent-prefix-cache: what is there serves the next process; else files go at close, and
                      * what a killed process left goes at the next open */
    bool verify; /* --prefix-cache-verify: checkpoints carry a digest of the whole state, and a restore must reproduce
                    it */
    bool no_direct, no_uring;                  /* tests: as if the system refused them */
    void (*warn)(void *ctx, const char *line); /* one loud line a kind of trouble (full, read-only, damaged); from any
                                                  thread, under the cache's lock; NULL: none */
    void *warn_ctx;
} aff_prefix_options;

typedef struct aff_prefix aff_prefix;
/* The most memory that a cache takes: tables, entries on their way to and from the disk. The network may be an outline. */
uint64_t aff__prefix_memory(const aff_net *net, const aff_prefix_options *o);
/* Errors: folder that cannot be made, written or locked (another process uses it), bound too small for a checkpoint and
 * 8 blocks. */
aff_status aff__prefix_open(aff_prefix **out, const aff_net *net, const aff_prefix_options *o, aff_error *err);
void aff__prefix_close(aff_prefix *p); /* waits for what is being written */

/* Brings `s` (whatever it held) to the longest known beginning of id[0..n), no further than `most` positions (a
 * request's last token must be run to get its logits: most = n - 1). *restored: its position afterwards, 0 if nothing
 * was found. *matched: tokens covered by known blocks: if that is well beyond *restored, running to it and publishing
 * there makes a checkpoint others can use. Trouble with files is a miss; errors are those of aff__seq_grow, and then
 * `s` is empty. */
aff_status aff__prefix_restore(aff_prefix *p, aff_seq *s, const int32_t *id, int64_t n, int64_t most, int64_t *restored,
                               int64_t *matched, aff_error *err);
/* Makes the state of `s`, which came from the tokens id[0..pos), known: its whole blocks where they are not yet, and a
 * checkpoint at pos. Call it when nothing that may yet be rejected has been run. Copies into memory, at most 64 MiB or
 * one entry in waiting, and returns; trouble with writing is counted and warned of, never an error. */
aff_status aff__prefix_publish(aff_prefix *p, const aff_seq *s, const int32_t *id, aff_error *err);
void aff__prefix_flush(aff_prefix *p); /* returns when all that was published has been written or given up */

typedef struct aff_prefix_stats {
    uint64_t entries, bytes, limit;          /* now */
    uint64_t lookups, hits, tokens_restored; /* so far */
    uint64_t blocks_written, checkpoints_written, evicted, damaged, write_failures;
    bool direct, uring; /* in force */
} aff_prefix_stats;
/* From any thread. */
aff_prefix_stats aff__prefix_stats(aff_prefix *p);
#endif
