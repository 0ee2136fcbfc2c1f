/* Fibers, barriers, warp collectives and matrix fragments of the emulated device.
 *
 * All fibers of the blocks at work form one ring. A fiber that must wait hands over to the next one in the ring; a
 * collective is computed by the last lane to arrive, which leaves every lane's result in that lane's own slot, so one
 * rendezvous is enough. `idle` counts the hand-overs since something last moved: when it exceeds the ring twice,
 * nothing can move. */
#include "backend/gpu/emu.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

enum { STACK = 128 * 1024, STAGGER = 320, SLOT_WORDS = 16 };

typedef enum { OP_NONE, OP_SYNC, OP_SHUFFLE, OP_BALLOT, OP_MMA, OP_IMMA } op_kind;

typedef struct {
    unsigned live, arrived, gen;
} barrier;

typedef struct {
    barrier bar;
    op_kind op;
    int amd, columns;
    uint32_t in[32][SLOT_WORDS], out[32][8];
    unsigned lanes; /* that arrived, a mask */
} warp;

typedef struct {
    unsigned bid, alive;
    barrier bar;
    warp *w;
    char *smem;
} block;

typedef struct {
#ifdef __x86_64__
    void *sp;
#else
    ucontext_t ctx;
#endif
    char *stack;
    block *b;
    uint16_t tid;
    bool spinning;
    unsigned next, prev; /* in the ring */
    void *fake;
} fiber;

struct aff_emu_launch {
    const aff_emu_kernel *k;
    void *args;
    unsigned grid, ntid, resident, done; /* blocks: in all, side by side, finished or under way */
    size_t smem;
    uint32_t seed;
    fiber *f; /* [resident * ntid] */
    char *stacks;
    block *blk; /* [resident] */
    unsigned cur, alive;
    unsigned idle;
    aff_emu_state state;
    fiber home;
    char text[256];
    aff_emu_launch *next_free;
};

aff_emu_now aff__emu_now;
static aff_emu_launch *now; /* the launch at work */

/* ---- switching ---- */

#ifdef __x86_64__
void aff__emu_switch(void **save, void *load);
__asm__(".text\n.globl aff__emu_switch\n.hidden aff__emu_switch\n.type aff__emu_switch,@function\naff__emu_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size aff__emu_switch,.-aff__emu_switch\n");
#endif

#ifdef EMU_ASAN
static const void *home_bottom;
static size_t home_size;
#endif

/* `ends`: the fiber that leaves will not run again (what only ASan wants to know). */
static void go(fiber *from, fiber *to, bool ends)
{
#ifdef EMU_ASAN
    if (to == &now->home)
        __sanitizer_start_switch_fiber(ends ? NULL : &from->fake, home_bottom, home_size);
    else
        __sanitizer_start_switch_fiber(ends ? NULL : &from->fake, to->stack, STACK);
#endif
#ifdef __x86_64__
    aff__emu_switch(&from->sp, to->sp);
#else
    swapcontext(&from->ctx, &to->ctx);
#endif
#ifdef EMU_ASAN
    if (from == &now->home)
        __sanitizer_finish_switch_fiber(from->fake, NULL, NULL);
    else
        __sanitizer_finish_switch_fiber(from->fake, &home_bottom, &home_size);
#endif
}

static void show(const fiber *f)
{
    aff__emu_now = (aff_emu_now){f->b->smem, f->tid, now->ntid, f->b->bid, now->grid};
}

/* To the next fiber of the ring; home when nothing has moved for two rounds. */
static void hand_over(void)
{
    aff_emu_launch *l = now;
    fiber *me = &l->f[l->cur];
    if (++l->idle > 2 * l->alive + 2) {
        l->state = AFF_EMU_STALLED;
        go(me, &l->home, false);
    } else if (me->next != l->cur) {
        l->cur = me->next;
        show(&l->f[l->cur]);
        go(me, &l->f[l->cur], false);
    }
}

static void fault(const char *what)
{
    aff_emu_launch *l = now;
    const fiber *f = &l->f[l->cur];
    snprintf(l->text, sizeof l->text, "kernel %s, block %u, thread %u: %s", l->k->name, f->b->bid, f->tid, what);
    l->state = AFF_EMU_FAULT;
    go(&l->f[l->cur], &l->home, true);
}

static void open_barrier(barrier *b)
{
    b->arrived = 0;
    b->gen++;
}

static void wait_for(barrier *b, unsigned gen)
{
    while (*(volatile unsigned *)&b->gen == gen) hand_over();
}

/* ---- what kernels call ---- */

void aff__emu_sync(void)
{
    barrier *b = &now->f[now->cur].b->bar;
    const unsigned gen = b->gen;
    now->idle = 0;
    if (++b->arrived == b->live)
        open_barrier(b);
    else
        wait_for(b, gen);
}

void aff__emu_spin(void)
{
    now->f[now->cur].spinning = true;
    hand_over();
    now->f[now->cur].spinning = false;
}

static void compute(warp *w);

/* Arrives with w->in[lane] filled; afterwards w->out[lane] holds the result. */
static void meet(warp *w, op_kind op)
{
    const unsigned gen = w->bar.gen, lane = aff__emu_now.tid & 31;
    now->idle = 0;
    if (w->bar.arrived && w->op != op) fault("the lanes of its warp are in different collectives");
    w->op = op;
    w->lanes |= 1u << lane;
    if (++w->bar.arrived == w->bar.live) {
        compute(w);
        w->lanes = 0;
        open_barrier(&w->bar);
    } else {
        wait_for(&w->bar, gen);
    }
}

static warp *my_warp(void)
{
    return &now->f[now->cur].b->w[aff__emu_now.tid >> 5];
}

void aff__emu_syncwarp(void)
{
    meet(my_warp(), OP_SYNC);
}

uint32_t aff__emu_shuffle(uint32_t v, unsigned lane)
{
    warp *w = my_warp();
    const unsigned me = aff__emu_now.tid & 31;
    w->in[me][0] = v;
    w->in[me][1] = lane;
    meet(w, OP_SHUFFLE);
    return w->out[me][0];
}

uint32_t aff__emu_ballot(int p)
{
    warp *w = my_warp();
    const unsigned me = aff__emu_now.tid & 31;
    w->in[me][0] = p != 0;
    meet(w, OP_BALLOT);
    return w->out[me][0];
}

static void matrix(op_kind op, int amd, void *c, const uint32_t *a, const uint32_t *b, int live)
{
    warp *w = my_warp();
    const unsigned me = aff__emu_now.tid & 31;
    const size_t nb = amd ? 4 : 2, nc = amd ? 8 : 4;
    w->amd = amd;
    w->columns = live;
    memcpy(w->in[me], a, 16);
    memcpy(w->in[me] + 4, b, nb * 4);
    memcpy(w->in[me] + 8, c, nc * 4);
    meet(w, op);
    memcpy(c, w->out[me], nc * 4);
}

void aff__emu_mma(int amd, float *c, const uint32_t *a, const uint32_t *b, int live)
{
    matrix(OP_MMA, amd, c, a, b, live);
}

void aff__emu_imma(int amd, int32_t *c, const uint32_t *a, const uint32_t *b, int live)
{
    matrix(OP_IMMA, amd, c, a, b, live);
}

/* ---- matrix fragments ---- */

static int c_row(int amd, int lane, int j)
{
    return amd ? (lane >> 4) * 8 + j : (lane >> 2) + (j & 2 ? 8 : 0);
}

static int c_col(int amd, int lane, int j)
{
    return amd ? lane & 15 : (lane & 3) * 2 + (j & 1);
}

/* Where register r of a lane lies in A (16 rows): its row and the first of its `per` k. */
static void a_place(int amd, int per, int lane, int r, int *row, int *k)
{
    if (!amd) {
        *row = (lane >> 2) + (r & 1 ? 8 : 0);
        *k = (lane & 3) * per + (r & 2 ? 4 * per : 0);
    } else {
        *row = lane & 15;
        *k = per == 2 ? 8 * (lane >> 4) + 2 * r : 16 * (r >> 1) + 8 * (lane >> 4) + 4 * (r & 1);
    }
}

static void b_place(int amd, int per, int lane, int r, int *col, int *k)
{
    if (!amd) {
        *col = lane >> 2;
        *k = (lane & 3) * per + (r ? 4 * per : 0);
    } else {
        a_place(amd, per, lane, r, col, k);
    }
}

static float bf16(uint32_t h)
{
    float f;
    h <<= 16;
    memcpy(&f, &h, 4);
    return f;
}

static void compute_mma(warp *w)
{
    float A[16][16], B[16][16], C[16][16];
    const int amd = w->amd, nb = amd ? 4 : 2, nc = amd ? 8 : 4, N = amd ? 16 : 8;
    for (int l = 0; l < 32; l++) {
        for (int r = 0, row, k; r < 4; r++) {
            a_place(amd, 2, l, r, &row, &k);
            A[row][k] = bf16(w->in[l][r] & 0xffff);
            A[row][k + 1] = bf16(w->in[l][r] >> 16);
        }
        for (int r = 0, col, k; r < nb; r++) {
            b_place(amd, 2, l, r, &col, &k);
            B[k][col] = bf16(w->in[l][4 + r] & 0xffff);
            B[k + 1][col] = bf16(w->in[l][4 + r] >> 16);
        }
        for (int j = 0; j < nc; j++) memcpy(&C[c_row(amd, l, j)][c_col(amd, l, j)], &w->in[l][8 + j], 4);
    }
    const int live = w->columns < N ? w->columns : N, wide = (live + 3) & ~3; /* whole vectors */
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int c = 0; c < wide; c++) C[row][c] += A[row][k] * B[k][c];
    for (int l = 0; l < 32; l++)
        for (int j = 0; j < nc; j++) {
            if (c_col(amd, l, j) < live)
                memcpy(&w->out[l][j], &C[c_row(amd, l, j)][c_col(amd, l, j)], 4);
            else
                w->out[l][j] = w->in[l][8 + j];
        }
}

static void compute_imma(warp *w)
{
    int16_t A[16][32], B[32][16];
    int32_t C[16][16];
    const int amd = w->amd, nb = amd ? 4 : 2, nc = amd ? 8 : 4, N = amd ? 16 : 8;
    for (int l = 0; l < 32; l++) {
        for (int r = 0, row, k; r < 4; r++) {
            a_place(amd, 4, l, r, &row, &k);
            for (int i = 0; i < 4; i++) A[row][k + i] = (int8_t)(w->in[l][r] >> (8 * i) & 255);
        }
        for (int r = 0, col, k; r < nb; r++) {
            b_place(amd, 4, l, r, &col, &k);
            for (int i = 0; i < 4; i++) B[k + i][col] = (int8_t)(w->in[l][4 + r] >> (8 * i) & 255);
        }
        for (int j = 0; j < nc; j++) C[c_row(amd, l, j)][c_col(amd, l, j)] = (int32_t)w->in[l][8 + j];
    }
    const int live = w->columns < N ? w->columns : N;
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 32; k++)
            for (int c = 0; c < live; c++)
                C[row][c] =
                    (int32_t)((uint32_t)C[row][c] + (uint32_t)(A[row][k] * B[k][c])); /* wraps, as the unit does */
    for (int l = 0; l < 32; l++)
        for (int j = 0; j < nc; j++) w->out[l][j] = (uint32_t)C[c_row(amd, l, j)][c_col(amd, l, j)];
}

static void compute(warp *w)
{
    uint32_t mask = 0;
    switch (w->op) {
    case OP_SHUFFLE: /* from a lane that has ended: the lane's own value */
        for (unsigned l = 0; l < 32; l++) w->out[l][0] = w->in[w->lanes >> w->in[l][1] & 1 ? w->in[l][1] : l][0];
        break;
    case OP_BALLOT:
        for (unsigned l = 0; l < 32; l++) mask |= (w->lanes >> l & w->in[l][0] & 1) << l;
        for (unsigned l = 0; l < 32; l++) w->out[l][0] = mask;
        break;
    case OP_MMA:
    case OP_IMMA:
        if (w->lanes != ~0u) fault("a matrix instruction without all 32 lanes");
        w->op == OP_MMA ? compute_mma(w) : compute_imma(w);
        break;
    case OP_NONE:
    case OP_SYNC:
        break;
    }
}

/* ---- launches ---- */

static void leave(barrier *b, warp *w)
{
    if (--b->live && b->arrived == b->live) {
        if (w) {
            compute(w);
            w->lanes = 0;
        }
        open_barrier(b);
    }
}

static void start_block(aff_emu_launch *l, unsigned slot);

/* A thread's end: it counts at barriers no more. The block's last thread starts the next block in its place. */
static void thread_ends(void)
{
    aff_emu_launch *l = now;
    const unsigned k = l->cur;
    fiber *me = &l->f[k];
    block *b = me->b;
    const unsigned next = me->next;
    l->idle = 0;
    l->alive--;
    l->f[me->prev].next = next;
    l->f[next].prev = me->prev;
    leave(&b->bar, NULL);
    leave(&b->w[me->tid >> 5].bar, &b->w[me->tid >> 5]);
    if (--b->alive == 0 && l->alive == 0) {
        l->state = AFF_EMU_DONE;
        go(me, &l->home, true);
    }
    l->cur = next;
    show(&l->f[next]);
    go(me, &l->f[next], true);
}

static void fiber_main(void)
{
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(NULL, &home_bottom, &home_size);
#endif
    now->k->entry(now->args);
    thread_ends();
    abort(); /* an ended thread is never continued */
}

static void start_fiber(aff_emu_launch *l, fiber *f, unsigned n)
{
    f->spinning = false;
    f->fake = NULL;
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(f->stack, STACK);
#endif
#ifdef __x86_64__
    void **sp =
        (void **)(void *)(f->stack + STACK - 64 - STAGGER * (n & 63)); /* tops apart: not all in one cache set */
    *--sp = NULL;
    union {
        void (*fn)(void);
        void *p;
    } entry = {fiber_main};
    *--sp = entry.p;
    for (int i = 0; i < 6; i++) *--sp = NULL;
    f->sp = sp;
#else
    getcontext(&f->ctx);
    f->ctx.uc_stack.ss_sp = f->stack;
    f->ctx.uc_stack.ss_size = STACK;
    f->ctx.uc_link = NULL;
    makecontext(&f->ctx, fiber_main, 0);
#endif
}

/* The threads of the next block, in the seed's order. */
static void start_block(aff_emu_launch *l, unsigned slot)
{
    block *b = &l->blk[slot];
    fiber *f = l->f + (size_t)slot * l->ntid;
    b->bid = l->done++;
    b->alive = l->ntid;
    b->bar = (barrier){l->ntid, 0, 0};
    memset(b->smem, 0xff, l->smem);
    for (unsigned t = 0; t < l->ntid; t++) {
        const unsigned left = l->ntid - (t & ~31u);
        if (!(t & 31)) b->w[t >> 5] = (warp){.bar = {left < 32 ? left : 32, 0, 0}};
        f[t].b = b;
        f[t].tid = (uint16_t)t;
        start_fiber(l, &f[t], t);
    }
    if (l->seed)
        for (unsigned t = l->ntid - 1, r = l->seed + b->bid; t; t--) {
            r = r * 1664525u + 1013904223u;
            const unsigned j = (r >> 8) % (t + 1);
            const uint16_t x = f[t].tid;
            f[t].tid = f[j].tid;
            f[j].tid = x;
        }
    l->alive += l->ntid;
}

static void start_ring(aff_emu_launch *l, unsigned blocks)
{
    const unsigned n = blocks * l->ntid;
    for (unsigned i = 0; i < blocks; i++) start_block(l, i);
    for (unsigned i = 0; i < n; i++) {
        l->f[i].next = i + 1 < n ? i + 1 : 0;
        l->f[i].prev = i ? i - 1 : n - 1;
    }
    l->cur = 0;
    l->idle = 0;
}

aff_status aff__emu_launch_create(aff_emu_launch **out, const aff_emu_kernel *k, unsigned grid, unsigned ntid,
                                  size_t smem, bool coop, const void *args, uint32_t seed, aff_error *err)
{
    aff_emu_launch *l;
    if (!grid || !ntid || ntid > k->max_threads || ntid > AFF_EMU_THREADS)
        return aff__fail(err, AFF_E_INVALID, "kernel %s: %u blocks of %u threads, expected 1 to %u threads", k->name,
                         grid, ntid, k->max_threads);
    if (coop && grid > AFF_EMU_COOP)
        return aff__fail(err, AFF_E_INVALID, "kernel %s: a cooperative launch of %u blocks, expected at most %d",
                         k->name, grid, AFF_EMU_COOP);
    AFF_TRY(aff__calloc(&l, 1, sizeof *l, "emulated launch", err));
    l->k = k;
    l->grid = grid;
    l->ntid = ntid;
    l->resident = coop ? grid : 1;
    l->smem = smem;
    l->seed = seed;
    const uint64_t warps = (ntid + 31) / 32;
    aff_status s = aff__calloc(&l->args, k->args_size, 1, "emulated launch", err);
    if (s == AFF_OK) s = aff__calloc(&l->f, (uint64_t)l->resident * ntid, sizeof *l->f, "emulated threads", err);
    if (s == AFF_OK) s = aff__calloc(&l->blk, l->resident, sizeof *l->blk, "emulated blocks", err);
    for (unsigned i = 0; s == AFF_OK && i < l->resident; i++) {
        s = aff__calloc(&l->blk[i].w, warps, sizeof *l->blk[i].w, "emulated warps", err);
        if (s == AFF_OK) s = aff__calloc(&l->blk[i].smem, smem, 1, "emulated shared memory", err);
    }
    if (s != AFF_OK) {
        aff__emu_launch_free(l);
        return s;
    }
    memcpy(l->args, args, k->args_size);
    *out = l;
    return AFF_OK;
}

/* Stacks are kept between launches: touching fresh pages is the dear part. One set serves every launch that is not
 * stalled. */
static char *spare;
static unsigned spare_fibers;

static bool take_stacks(aff_emu_launch *l)
{
    const unsigned n = l->resident * l->ntid;
    if (spare && spare_fibers >= n) {
        l->stacks = spare;
        spare = NULL;
    } else {
        const unsigned most = n > AFF_EMU_THREADS ? n : AFF_EMU_THREADS;
        l->stacks = aligned_alloc(4096, (size_t)most * STACK);
        if (!l->stacks) return false;
    }
    for (unsigned i = 0; i < n; i++) l->f[i].stack = l->stacks + (size_t)i * STACK;
    return true;
}

static void give_stacks(aff_emu_launch *l)
{
    if (!l->stacks) return;
    if (!spare && l->resident * l->ntid <= AFF_EMU_THREADS) {
        spare = l->stacks;
        spare_fibers = AFF_EMU_THREADS;
    } else {
        free(l->stacks);
    }
    l->stacks = NULL;
}

static void stalled_text(aff_emu_launch *l, bool *spins)
{
    unsigned at_spin = 0, first = l->cur, i = l->cur;
    do {
        if (l->f[i].spinning) {
            if (!at_spin++) first = i;
        }
        i = l->f[i].next;
    } while (i != l->cur);
    *spins = at_spin > 0;
    snprintf(l->text, sizeof l->text,
             "kernel %s, block %u: %u threads wait on memory, %u at a barrier (first: thread %u)", l->k->name,
             l->f[first].b->bid, at_spin, l->alive - at_spin, l->f[first].tid);
}

aff_emu_state aff__emu_launch_run(aff_emu_launch *l)
{
    aff_emu_launch *outer = now;
    now = l;
    if (!l->stacks && !take_stacks(l)) {
        snprintf(l->text, sizeof l->text, "kernel %s: no memory for %u thread stacks", l->k->name,
                 l->resident * l->ntid);
        l->state = AFF_EMU_FAULT;
    } else {
        do {
            if (!l->alive) start_ring(l, l->resident);
            l->idle = 0;
            show(&l->f[l->cur]);
            go(&l->home, &l->f[l->cur], false);
        } while (l->state == AFF_EMU_DONE && l->done < l->grid);
    }
    bool spins = false;
    if (l->state == AFF_EMU_STALLED) {
        stalled_text(l, &spins);
        if (!spins) l->state = AFF_EMU_FAULT; /* only barriers: nothing from outside can help */
    }
    if (l->state == AFF_EMU_DONE) give_stacks(l);
    now = outer;
    return l->state;
}

const char *aff__emu_launch_text(const aff_emu_launch *l)
{
    return l->text;
}

void aff__emu_launch_free(aff_emu_launch *l)
{
    if (!l) return;
    give_stacks(l);
    for (unsigned i = 0; l->blk && i < l->resident; i++) {
        free(l->blk[i].w);
        free(l->blk[i].smem);
    }
    free(l->blk);
    free(l->f);
    free(l->args);
    free(l);
}
