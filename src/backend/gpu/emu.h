/* emu.h - the emulated device: a block's threads are fibers, all on one OS thread at a time.
 *
 * What a kernel sees comes from aff__emu_now, set at every switch of fibers. Blocks of a plain launch run one after
 * another, those of a cooperative launch (at most AFF_EMU_COOP) side by side. Threads run in an order permuted by the
 * launch's seed, so a missing barrier shows. Shared memory starts as NaNs in every block. A launch that can go no
 * further on its own (every live thread waits in aff__emu_spin, or at a barrier behind one that does) returns
 * AFF_EMU_STALLED and is continued later; a barrier that can never be reached, or a warp whose lanes meet in different
 * collectives, is AFF_EMU_FAULT.
 *
 * Not thread safe: the caller serialises everything here (rt_emu.c does, under one lock). */
#ifndef AFF_BACKEND_GPU_EMU_H
#define AFF_BACKEND_GPU_EMU_H
#include "base/status.h"
#include <stddef.h>
#include <stdint.h>

enum { AFF_EMU_COOP = 8, AFF_EMU_THREADS = 1024 };

typedef struct aff_emu_now {
    char *smem;
    unsigned tid, ntid, bid, nbid;
} aff_emu_now;
extern aff_emu_now aff__emu_now;

/* ---- called by kernels (gk_emu.h) ---- */
void aff__emu_sync(void);
void aff__emu_syncwarp(void);
uint32_t aff__emu_shuffle(uint32_t v, unsigned lane);
uint32_t aff__emu_ballot(int p);
void aff__emu_spin(void);
/* c += A B by the lane layouts of gk.h; amd chooses. a: 4 registers, b: 2 (NVIDIA) or 4, c: 4 or 8 values. Columns at
 * and beyond `live` stay as they were. One float32 addition after another, k ascending. */
void aff__emu_mma(int amd, float *c, const uint32_t *a, const uint32_t *b, int live);
void aff__emu_imma(int amd, int32_t *c, const uint32_t *a, const uint32_t *b, int live);

/* ---- called by the runtime ---- */
typedef struct aff_emu_kernel {
    const char *name;
    void (*entry)(const void *args);
    size_t args_size;
    unsigned max_threads;
} aff_emu_kernel;
/* Kernels compiled with either layout, in the order of args.h. */
extern const aff_emu_kernel aff__emu_kernels_nv[], aff__emu_kernels_amd[];

typedef enum aff_emu_state { AFF_EMU_DONE, AFF_EMU_STALLED, AFF_EMU_FAULT } aff_emu_state;
typedef struct aff_emu_launch aff_emu_launch;
/* args is copied. seed 0: threads in ascending order. */
aff_status aff__emu_launch_create(aff_emu_launch **out, const aff_emu_kernel *k, unsigned grid, unsigned block,
                                  size_t smem, bool coop, const void *args, uint32_t seed, aff_error *err);
/* Runs until the end, a stall or a fault. After a fault the launch can only be freed. */
aff_emu_state aff__emu_launch_run(aff_emu_launch *l);
/* What went wrong, for a fault; where it waits, for a stall. Valid as long as the launch. */
const char *aff__emu_launch_text(const aff_emu_launch *l);
void aff__emu_launch_free(aff_emu_launch *l);
#endif
