/* loader.h - reads experts from their files into slots, in the kernels' layout: a thread over base/aio.h, past the page
 * cache (O_DIRECT) where the file system can. A record that lies in its file as in a slot goes straight into the slot;
 * row-major records (dtype 33) are permuted and a checkpoint's planes gathered on their way, on the loader's thread.
 * Reads are cut into pieces and many are in flight, of one expert or several.
 *
 * What goes wrong is tried three times; then the request fails with one line that names layer, expert, file and offset.
 * A file that was written to since the model was opened (size, time of change) fails every request after that; one that
 * was replaced under its name is still read, as it was opened, and a line says so once. */
#ifndef AFF_EXPERTS_LOADER_H
#define AFF_EXPERTS_LOADER_H
#include "experts/store.h"

typedef struct aff_loader aff_loader;

/* A request. The caller's memory; untouched by the caller from submit until it is done. */
typedef struct aff_load {
    int layer, expert;                /* draft stages follow the trunk's layers */
    uint8_t *to;                      /* a slot: aff_slot_layout.pitch bytes, aligned to 4096 */
    void (*done)(struct aff_load *l); /* on the loader's thread; NULL: nobody is told (aff__loader_wait) */
    void *ctx;
    aff_status status; /* out */
    aff_error err;
    struct {
        struct aff_load *next;
        uint8_t *bounce; /* what is not read straight into the slot */
        int left;        /* pieces under way */
        bool cut, over;  /* all pieces were given out; it is done */
        int error, file; /* errno of the first piece that failed for good, where */
        uint64_t off;
    } own; /* the loader's */
} aff_load;

enum { AFF_LOAD_NOW, AFF_LOAD_LATER }; /* LATER: only while nothing of the other kind waits */

typedef struct aff_loader_options {
    bool threads_only; /* no io_uring */
    bool buffered;     /* no O_DIRECT */
    const char *const
        *copies; /* [n_copies] further copies of the trunk's file, byte for byte: reads are dealt over all of them */
    int n_copies;
    /* Tests: this share of all pieces fails, as an error of the disk or ends early, in an order that the seed gives; of
     * one piece at most so many tries in a row, 0: any. */
    double inject;
    int inject_most;
    uint64_t inject_seed;
    void (*warn)(void *ctx, const char *line); /* NULL allowed; on any thread */
    void *warn_ctx;
} aff_loader_options;

/* Experts of `trunk` and (not NULL) `draft`, which must outlive the loader. The files are opened here. */
aff_status aff__loader_create(aff_loader **out, aff_experts *trunk, aff_experts *draft, const aff_loader_options *o,
                              aff_error *err);
/* Waits for what was submitted. */
void aff__loader_free(aff_loader *l);
/* Any thread. */
void aff__loader_submit(aff_loader *l, aff_load *r, int urgency);
/* Takes back a request that was not begun: true, and it will not be done. False: it is done, or will be. */
bool aff__loader_cancel(aff_loader *l, aff_load *r);
/* Of a request without `done`: returns when it is, with its status. */
aff_status aff__loader_wait(aff_loader *l, aff_load *r, aff_error *err);

typedef struct aff_loader_counts {
    int64_t requests, failed; /* that are over */
    uint64_t bytes;           /* read from files, second tries included */
    int64_t retries;          /* pieces that were read again */
    uint64_t busy_ns;         /* with at least one request under way */
    bool uring, direct;       /* in force */
} aff_loader_counts;
aff_loader_counts aff__loader_counts_now(aff_loader *l);
/* Tests: requests are taken but not begun while it is on. */
void aff__loader_stall(aff_loader *l, bool on);
/* Changes the injection of errors. */
void aff__loader_inject(aff_loader *l, double share);
#endif
