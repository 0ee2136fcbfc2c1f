/* args.h - the arguments of every kernel and the list of kernels, shared by device code and host (plain C). A pointer is a device
 * address; comments give shapes. AFF_GPU_KERNELS(X): X(name, most threads of a block); the argument struct of k_name is
 * aff_k_name, at most 4 KB. Above each struct: grid x block, dynamic shared memory in bytes, and what the kernel computes. */
#ifndef AFF_BACKEND_GPU_KERNELS_ARGS_H
#define AFF_BACKEND_GPU_KERNELS_ARGS_H
#include "backend/types.h"
#include <stdint.h>

#define AFF_GPU_KERNELS(X) \
    X(embed, 256)          \
    X(convert, 256)        \
    X(rmsnorm, 256)        \
    X(wide_small, 512)     \
    X(wide_big, 128)       \
    X(hc_mix, 256)         \
    X(wide_tile, 512)      \
    X(hc_pre, 512)         \
    X(hc_post, 256)        \
    X(stream_mean, 256)    \
    X(dense_few, 256)      \
    X(dense_stream, 256)   \
    X(dense_many, 256)     \
    X(dense_wg, 384)       \
    X(query, 256)          \
    X(kv, 256)             \
    X(compress, 512)       \
    X(history, 256)        \
    X(attend, 512)         \
    X(attend_cut, 256)     \
    X(attend_merge, 128)   \
    X(scores, 256)         \
    X(topk, 1024)          \
    X(route, 32)           \
    X(plan, 1024)          \
    X(plan_many, 1024)     \
    X(swiglu, 256)         \
    X(small, 256)          \
    X(experts_up, 128)     \
    X(experts_down, 128)   \
    X(experts_stream_up, 512) \
    X(experts_stream_down, 512) \
    X(experts_many_up, 256) \
    X(experts_many_down, 256) \
    X(experts_wg_up, 384)  \
    X(experts_wg_down, 384) \
    X(argmax, 256)         \
    X(sum_experts, 256)    \
    X(adjust, 256)         \
    X(weights, 256)        \
    X(sample, 1024)        \
    X(accept, 256)         \
    X(encode_rows, 256)    \
    X(encode, 256)

/* The rows of a pass (types.h, aff_rowset). The state of row t in layer l is seq[t][l]: one table of layers per sequence, device
 * pointers inside, uploaded once; row and key of aff_layer_state are not used on the device, formats come as arguments. */
typedef struct aff_k_rows {
    const int64_t *pos;                 /* [n] */
    const int32_t *first;               /* [n] */
    const aff_layer_state *const *seq;  /* [n] */
    int32_t n, layer;
} aff_k_rows;

/* Forms in which a row of activations is wanted; any pointer may be NULL. */
typedef struct aff_k_forms {
    float *f32;     /* [T][n] */
    uint16_t *bf16; /* [T][n] rounded to nearest even: what dense products read */
    int8_t *q;      /* [T][n] int8 per 128 columns: what routed experts read (backend/cpu/kernels.h) */
    float *qs;      /* [T][ceil(n/128)] */
} aff_k_forms;

/* ceil(T*cols / 1024) x 256, 0 B. X[t][s] = w[ids[t]] for every stream s. */
typedef struct aff_k_embed {
    const void *w; /* [vocab][cols] */
    const int32_t *ids;
    float *X; /* [T][streams][cols] */
    int32_t T, cols, streams, bf16; /* bf16: w is bf16, else float32 */
} aff_k_embed;

/* T x 256, 0 B. x in other forms. */
typedef struct aff_k_convert {
    const float *x; /* [T][ldx] */
    int64_t ldx;
    aff_k_forms y;
    int32_t n;
} aff_k_convert;

/* T x 256, 4*n B. y[t] = w (x[t] / rms(x[t])). y.f32 may be x. Bit-equal to the CPU. */
typedef struct aff_k_rmsnorm {
    const float *x, *w; /* [T][n]; [n] or NULL */
    aff_k_forms y;
    int32_t n;
    float eps;
} aff_k_rmsnorm;

/* Products in float32 (`wide` weights, and float32 weights in general). Definition: K is cut every 1,024 columns; inside a cut lane
 * i of 32 takes the columns k with (k/4) mod 32 = i as one fma chain from zero, ascending; the lanes fold in the xor tree 16, 8, 4, 2, 1;
 * cuts add up ascending.
 * wide_small: rows * ceil(T/8) + (ss ? T : 0) x up to 512, aff__k_wide_smem(cols). w aligned to 16 bytes. For few rows of x.
 * wide_big: ceil(rows/4) * ceil(T/8) + (ss ? T : 0) x 128, the same. The same bits.
 * wide_tile: ceil(rows / (4 row_groups)) * ceil(T / (8 token_groups)) x 32 row_groups token_groups, 0 B: no ss; cols and ldx multiples of 4. The same bits. */
typedef struct aff_k_wide {
    const void *w;  /* [rows][cols] */
    const float *x; /* [T][ldx] */
    float *y;       /* [T][ldy] */
    float *ss;      /* NULL, or [T]: sum of squares of x[t][0..cols): the product of x with itself */
    int64_t ldx, ldy;
    int32_t T, rows, cols;
    int32_t bf16;  /* w is bf16, else float32 */
    int32_t round; /* x is rounded to bf16 first (float32 weights that are not `wide`) */
    int32_t row_groups, token_groups; /* wide_tile: 4 rows, 8 tokens a warp */
} aff_k_wide;
typedef aff_k_wide aff_k_wide_small;
typedef aff_k_wide aff_k_wide_big;
typedef aff_k_wide aff_k_wide_tile;
static inline size_t aff__k_wide_smem(int32_t cols)
{
    return 128 * (((size_t)cols + 1023) / 1024);
}

/* T * (comb ? 2 : 1) x up to 512, aff__k_hc_smem(H). From the mixes m and the sums of squares: u = sum over the streams, then RMS norm with weight
 * w (NULL: u itself) into y; and post, comb (Sinkhorn) by the second T blocks. comb NULL: a head, N mixes (spec 6). */
typedef struct aff_k_hc_pre {
    const float *X;  /* [T][N][H] */
    float *Xout;     /* NULL, or where X goes too */
    const float *m;  /* [T][rows], rows = (2+N)N or N; with cuts [T][cuts][rows+1], the sum of squares last (hc_mix) */
    const float *ss; /* [T], without cuts */
    const float *scale, *base; /* of the hyper-connection */
    float *u;        /* NULL or [T][H] */
    const float *w;  /* NULL or [H] */
    aff_k_forms y;
    float *post, *comb; /* [T][N], [T][N][N] */
    int32_t T, H, N, iters, cuts;
    float hc_eps, rms_eps, norm_eps;
} aff_k_hc_pre;
enum { AFF_K_HC_GROUPS = 4 }; /* of four columns, most a thread has in registers */
static inline size_t aff__k_hc_smem(int32_t H) { return 4 * (size_t)(H > 64 ? H : 64) + 512; }

/* ceil(T*H / 256) x 256, 0 B. X'[k] = post[k] f + sum_j comb[j][k] X[j], in place. f is the attention's output, or with y the shared
 * expert's: then f = (y[0] + y[1] + ...) + f first (spec 8). tap: NULL, or the mean over the new streams. */
typedef struct aff_k_hc_post {
    float *X;              /* [T][N][H] */
    const float *f;        /* [T][H] */
    const float *y;        /* NULL or [T][K][H] */
    const float *post, *comb;
    float *tap;            /* NULL or [T][ld_tap] */
    int64_t ld_tap;
    int32_t T, H, N, K;
    int32_t plain; /* post = 1, comb = identity: X[k] += f (drafts) */
} aff_k_hc_post;

/* T * ceil(N*H / 1024) * AFF_K_HC_SHARE x 256, 4096 B. The mixes of few rows, cut by cut of their definition (aff_k_wide), for hc_pre to add up. With p.f hc_post
 * comes first (no tap, not plain), the new streams in Xn; without, X is taken as it is. */
enum { AFF_K_HC_SHARE = 2 };
typedef struct aff_k_hc_mix {
    aff_k_hc_post p; /* X, f, y, post, comb, T, H, N, K */
    aff_k_wide w;    /* w, rows, cols, bf16, round */
    float *Xn;       /* [T][N][H], not X */
    float *part;     /* [T][cuts][rows+1] */
} aff_k_hc_mix;

/* ceil(T*H / 256) x 256, 0 B. tap[t][d] = mean over streams. */
typedef struct aff_k_stream_mean {
    const float *X;
    float *tap;
    int64_t ld_tap;
    int32_t T, H, N;
} aff_k_stream_mean;

/* ceil(T*H / 256) x 256, 0 B. f = (y[0] + y[1] + ...) + f, as hc_post does on its way. */
typedef struct aff_k_sum_experts {
    const float *y; /* [T][K][H] */
    float *f;       /* [T][H] */
    int32_t T, K, H;
} aff_k_sum_experts;

/* ---- dense.inc ---- */

/* One matrix of a launch. */
typedef struct aff_k_matrix {
    const void *data;     /* [rows][cols], aligned to 8 bytes; dtype AFF_BF16, AFF_FP8 or AFF_FP8_32 */
    const uint8_t *scale; /* as aff_weight */
    const uint16_t *x;    /* [T][ldx] bf16, aligned to 16 bytes; group g reads columns g*cols.. */
    float *y;             /* NULL or [T][ldy] */
    uint16_t *yb;         /* NULL or [T][ldy]: the result as bf16 */
    int64_t ldx, ldy;
    int32_t rows, cols, dtype;
    int32_t group_rows;   /* rows that share one slice of x: rows, or for a grouped product rows/groups */
    int32_t tile0;        /* tiles of the matrices before this one, aff__k_dense_tiles */
} aff_k_matrix;

/* Several matrices in one launch, so that all products of one input are one node.
 * dense_few: (tiles of 16 rows) x 256, 8192 B; T <= 16.
 * dense_stream: any grid x 256, aff__k_ds_smem(&a, room): T <= 16, all matrices as aff__k_ds_fits says, no NaN in FP8 weights; tiles: of 16
 *   rows, all matrices together; solo and flip as aff__k_ds_solo and aff__k_ds_smem set them. The same bits, at the speed of memory.
 * dense_many: (tiles of aff__k_many_rows() rows) * ceil(T/128) x 256, aff__k_many_smem(amd, stages). The same bits as dense_few.
 * dense_wg: any grid x 384, AFF_K_WG_SMEM; sm_90 only: all matrices as aff__k_wg_fits says, no NaN in FP8 weights; tiles: of 128 rows, all
 *   matrices together. The same bits. */
enum { AFF_K_MATRICES = 8, AFF_K_FEW = 16, AFF_K_MANY_TOKENS = 128 };
typedef struct aff_k_dense {
    aff_k_matrix m[AFF_K_MATRICES];
    int32_t count, T;
    int32_t tiles, flip, solo, fp8; /* dense_stream (tiles: dense_wg, too); fp8: all matrices are */
    int32_t stages;            /* dense_many: buffers of x, 2 where its shared memory fits, else 1 */
} aff_k_dense;
typedef aff_k_dense aff_k_dense_few;
typedef aff_k_dense aff_k_dense_stream;
typedef aff_k_dense aff_k_dense_many;
typedef aff_k_dense aff_k_dense_wg;

/* Weight rows of a dense_many tile and its shared memory, by device kind. */
static inline int32_t aff__k_many_rows(bool amd) { return amd ? 64 : 128; }
static inline size_t aff__k_many_smem(bool amd, int32_t stages)
{
    const size_t pitch = amd ? 272 : 320, rows = (size_t)aff__k_many_rows(amd);
    return rows * pitch + (size_t)stages * AFF_K_MANY_TOKENS * pitch + 16 * rows;
}
/* Tiles of one matrix; rows_of_tile is 16 or aff__k_many_rows(). */
static inline int32_t aff__k_dense_tiles(const aff_k_matrix *m, int32_t rows_of_tile)
{
    return m->rows / m->group_rows * ((m->group_rows + rows_of_tile - 1) / rows_of_tile);
}

enum { AFF_K_WG_SMEM = 4 * (32768 + 16), AFF_K_WG_SMEM_EMU = 2 * (32768 + 16) };
static inline bool aff__k_wg_fits(const aff_k_matrix *m)
{
    return (m->dtype == AFF_FP8 || m->dtype == AFF_BF16) && m->cols % 128 == 0 && m->ldx % 8 == 0 && (m->group_rows % 128 == 0 || m->group_rows == m->rows);
}

enum { AFF_K_DS_STAGES = 5 };
static inline bool aff__k_ds_fits(const aff_k_matrix *m)
{
    return (m->dtype == AFF_FP8 || m->dtype == AFF_BF16) && m->cols % 128 == 0 && m->group_rows % 16 == 0 && m->ldx % 8 == 0;
}
/* Sets a->fp8 and a->solo: a tile a warp, for T <= 16 on `units` multiprocessors; a->tiles is set. */
static inline void aff__k_ds_solo(aff_k_dense *a, int32_t units)
{
    a->solo = a->tiles >= 8 * units;
    a->fp8 = 1;
    for (int i = 0; i < a->count; i++) {
        a->solo &= a->m[i].cols <= 32 * 128;
        a->fp8 &= a->m[i].dtype == AFF_FP8;
    }
}
/* Shared memory, at most `room`, and a->flip: floats between the two buffers of partials and scales, 0 if there is room for one only. 0: not even that. */
static inline size_t aff__k_ds_smem(aff_k_dense *a, size_t room)
{
    size_t cuts = 0;
    for (int i = 0; i < a->count && !a->solo; i++) cuts = (size_t)a->m[i].cols / 128 > cuts ? (size_t)a->m[i].cols / 128 : cuts;
    const size_t ring = 8 * AFF_K_DS_STAGES * 2048, part = cuts * ((size_t)a->T * 64 + 4);
    a->flip = ring + 2 * part <= room ? (int32_t)(part / 4) : 0;
    return ring + part > room ? 0 : a->flip ? ring + 2 * part : ring + part;
}

/* ---- rows.inc ---- */

/* T * ceil(heads/8) x 256, (index ? 96 : 32) * D + 8 * pairs B. Queries: per-head RMS norm without weight and rope (spec 7.2), or for
 * index rope, Hadamard and A4 (7.4). In place if f32 is q. D a power of two when index. */
typedef struct aff_k_query {
    const float *q; /* [T][heads][D] */
    float *f32;     /* NULL or [T][heads][D] */
    uint16_t *bf16; /* NULL or [T][heads][D] */
    const float *freq;
    const int64_t *pos; /* [T] */
    double had;         /* index: 1 / sqrt(D) */
    int32_t heads, D, pairs, index;
    float eps;
} aff_k_query;

/* T x 256, 4 * D + 8 * pairs B. KV rows: RMS norm with weight, rope, A8(64) on the head, bf16 on the tail (7.2); store: into the raw
 * ring of the row's state. In place if f32 is kv. */
typedef struct aff_k_kv {
    aff_k_rows rows;
    const float *kv;   /* [T][D] */
    const float *norm; /* [D] */
    float *f32;        /* NULL or [T][D] */
    uint16_t *bf16;    /* NULL or [T][D]: what attend reads as extra rows */
    const float *freq;
    aff_rowfmt fmt;
    int32_t D, pairs, store;
    float eps;
} aff_k_kv;

/* A compressor at work (backend.h); c, z: projections of this pass without ape. */
typedef struct aff_k_compressor {
    const float *c, *z;   /* [T][coff*dim] */
    const float *ape;     /* [ratio][coff*dim] */
    const float *norm;    /* [dim] */
    double had;           /* index: 1 / sqrt(dim) */
    aff_rowfmt fmt;       /* of comp, or with index of ikey */
    int32_t ratio, dim, overlap, index;
    float eps;
} aff_k_compressor;

/* compress: T * count x 512, 48 * ratio + 12 * dim + 8 * pairs B (of the largest). Forms every group that a row of the pass completes
 * (7.3), count = 2 with the indexer's. append: the histories too, in the same launch: only if no sequence has more than
 * AFF_MAX_ROLLBACK rows in the pass, else by history afterwards: T * count x 256, 0 B. */
typedef struct aff_k_compress {
    aff_k_rows rows;
    aff_k_compressor c[2];
    const float *freq;
    int32_t count, pairs, append;
} aff_k_compress;
typedef aff_k_compress aff_k_history;

/* ---- attend.inc ---- */

/* Attention of every row over its own list of keys, with inverse rope of the result (spec 7.5, 7.6). D <= 512, a multiple of 8.
 *   causal (draft 0): the window up to the row; of a layer with ratio, its (pos+1)/ratio compressed rows, or with topk > 0 and more
 *     than topk of them the groups sel[t]
 *   draft: the last `window` rows before pos[first], then the rows first .. first+draft-1 of `extra`
 * attend: T * ceil(heads/64) x 512, aff__k_attend_smem(amd, 64).
 * attend_cut: T * max_cuts * ceil(heads/AFF_K_CUT_HEADS) x 256, aff__k_attend_smem(amd, AFF_K_CUT_HEADS); then attend_merge: T * heads x 128, 8 * pairs B. The same
 * bits as attend. max_cuts: at least ceil(keys/64) of every row, aff__k_attend_cuts. */
enum { AFF_K_CUT_HEADS = 32 };
typedef struct aff_k_attend {
    aff_k_rows rows;
    const uint16_t *q;     /* [T][heads][D] bf16, aligned to 16 bytes */
    const float *sink;     /* [heads] */
    const int32_t *sel;    /* [T][topk] or NULL */
    const uint16_t *extra; /* [T][D] bf16 or NULL */
    const float *freq;
    float *o;              /* NULL or [T][heads][D] */
    uint16_t *ob;          /* NULL or [T][heads][D] */
    float *part_v;         /* attend_cut: [T][max_cuts][heads][D] */
    float *part_mz;        /* attend_cut: [T][max_cuts][heads][2] */
    aff_rowfmt fmt;
    int32_t heads, D, pairs, window, ratio, topk, draft, max_cuts;
    float scale; /* 1 / sqrt(D) */
} aff_k_attend;
typedef aff_k_attend aff_k_attend_cut;
typedef aff_k_attend aff_k_attend_merge;

/* heads: of a block, 64 (attend) or AFF_K_CUT_HEADS (attend_cut). */
static inline size_t aff__k_attend_smem(bool amd, int32_t heads)
{
    return 64 * (size_t)(amd ? 528 : 1056) + (size_t)heads * (144 + 4 * 68 + 24);
}
/* Cuts of a row at position pos. */
static inline int32_t aff__k_attend_cuts(int64_t pos, int32_t window, int32_t ratio, int32_t topk, int32_t draft)
{
    const int64_t raw = pos + 1 < window ? pos + 1 : window, comp = draft || !ratio ? 0 : (pos + 1) / ratio;
    return (int32_t)((raw + (topk && comp > topk ? topk : comp) + draft + 63) / 64);
}

/* ---- select.inc ---- */

/* ceil(T/bundle) * B x 256, aff__k_scores_smem(amd); any B >= 1, work for up to ceil(groups/64). Index scores of all groups of the rows
 * that have more than topk of them. dim <= 128, a multiple of 32. bundle: rows that share a staged piece of keys, 1 for few rows, 16 in prefill. */
typedef struct aff_k_scores {
    aff_k_rows rows;
    const uint16_t *iq; /* [T][heads][dim] bf16, aligned to 16 bytes */
    const float *w;     /* [T][heads] as projected */
    float *score;       /* [T][ld] */
    int64_t ld;
    aff_rowfmt fmt;     /* of the keys */
    int32_t heads, dim, ratio, topk, bundle;
    float scale;        /* of w: 1.0f / sqrtf((float)dim * (float)heads) */
} aff_k_scores;
static inline size_t aff__k_scores_smem(bool amd) { return 64 * (size_t)(amd ? 272 : 320) + 64 * 65 * 4 + 256; }

/* T x up to 1024, AFF_K_TOPK_SMEM. sel[t]: the min(topk, groups) best groups, ascending; ties to the lower. */
typedef struct aff_k_topk {
    aff_k_rows rows;
    const float *score; /* [T][ld] */
    int32_t *sel;       /* [T][topk] */
    int64_t ld;
    int32_t ratio, topk;
} aff_k_topk;
enum { AFF_K_TOPK_SMEM = 4 * (2048 + 8) * 4 + 4 * (64 + 4) };

/* ---- moe.inc ---- */

/* T x 32, 8 * experts B; with a guess 2 T blocks. The router of backend.h; experts <= 1024. Blocks from T on choose for a layer to come from its
 * router's logits or table, in the same way. */
typedef struct aff_k_route {
    const float *logits;  /* [T][experts] */
    const float *bias;    /* [experts] or NULL */
    const int32_t *hash;  /* [vocab][picks_n] or NULL */
    const int32_t *ids;   /* [T], for hash */
    int32_t *picks;       /* [T][picks_n] in the order of choice */
    float *weights;       /* [T][picks_n] */
    const float *guess_logits; /* [T][experts], of the other layer as the next two */
    const float *guess_bias;
    const int32_t *guess_hash;
    int32_t *guess, *guess_log; /* [T][picks_n] device, pinned; NULL: no guess */
    int32_t scoring, experts, picks_n, T;
    float scale;
} aff_k_route;

/* Where an expert is (the words of types.h, aff_expert_table). */
enum { AFF_K_CARD, AFF_K_HOST, AFF_K_DISK, AFF_K_CLASSES };

/* Entries of one expert that a block of the routed kernels takes together. */
typedef struct aff_k_item {
    uint64_t base; /* the expert's slot */
    int32_t expert, first, count, where;
    uint32_t ticket; /* not 0: the slot holds the expert once aff_k_ring's or (scratch) aff_k_fetch's `ready` has this number */
    int32_t scratch; /* 1 + number of a scratch slot on its way (AFF_K_HOST); 0: none */
    int32_t brought; /* 1 + number of the slot that the link's blocks bring the expert to (aff_k_bring); 0: it is read where it is */
    int32_t unused;
} aff_k_item;

/* Experts that are not on the card are brought to slots on it, once, by the blocks of stream_up that the link has, in long pieces: gate and up of all, then
 * down of all. What multiplies with them waits for `arrived`, which counts the blocks that have brought their share. */
typedef struct aff_k_bring {
    uint64_t at, pitch;
    uint32_t *arrived;    /* device [slots], 0 after the plan */
    uint32_t bytes, down; /* of an expert; where its down begins (a multiple of 16) */
    int32_t slots;        /* 0: none are brought */
} aff_k_bring;

/* Experts fetched ahead into scratch slots on the card. Plans that have this count from 1 on; a copy is for the plan of one number (`due`), and its slot is
 * not written again before a later plan has begun. Behind `begun` the copy engine writes the slot, behind the slot `ready`. */
enum { AFF_K_SCRATCH = 64, AFF_K_FETCH_RING = 1024 };
typedef struct aff_k_fetch {
    uint32_t *plans;       /* device: the number of the last plan; */
    uint32_t *progress;    /* pinned: the same, for the host */
    const uint64_t *begun; /* device [slots]: due << 32 | 1 + number of the expert in the table */
    const uint32_t *ready; /* device [slots]: due */
    uint64_t at, pitch;    /* the slots */
    int32_t slots;         /* 0: none; at most AFF_K_SCRATCH */
    int32_t layer;         /* of the table, of this plan */
    /* Wishes: guesses for the layer whose words are `guess_base`, `ahead` plans from here, those that are in host memory, each once, by rank. */
    const int32_t *guess; /* [T][K], NULL: none */
    const uint64_t *guess_base;
    int32_t guess_layer, ahead;
    uint32_t *last;  /* device: wishes so far */
    uint64_t *entry; /* pinned [AFF_K_FETCH_RING]: wish k at k mod the size: k << 40 | low half of due << 24 | number of the expert */
    uint32_t *head;  /* pinned: the last wish whose entry is there */
} aff_k_fetch;

/* Requests of a plan for experts on disk. Tickets count from 1; ticket k is answered in staging slot k mod slots, and ready[k mod slots] = k says that
 * the expert is there. A plan never asks for more than `slots`, and the kernels before it are done: so the slots it names are free. */
typedef struct aff_k_ring {
    uint32_t *last;   /* device memory: the last ticket that was given out */
    uint64_t *entry;  /* pinned [slots]: ticket << 32 | layer * experts + expert */
    uint32_t *head;   /* pinned: the last ticket whose entry is there */
    uint64_t staging; /* the first staging slot */
    uint64_t pitch;
    uint32_t slots; /* 0: there is no ring */
    int32_t layer;  /* of the table */
} aff_k_ring;

/* Work on experts (types.h, aff_moe_plan), in device memory. */
typedef struct aff_k_moe {
    int32_t *n;       /* [AFF_K_PLAN_COUNTS] */
    aff_k_item *item; /* [aff__k_max_items] */
    int32_t *row, *rank; /* [T*K] */
    float *weight;       /* [T*K] */
} aff_k_moe;

/* Counts of a plan: items; picks that name no expert (then the pass is void); of the items those of experts on the card, and those on
 * disk, which are the first and the last. Experts taken from scratch slots, those of them that were on their way; experts read over the link, and
 * how often. */
enum { AFF_K_ITEMS, AFF_K_BAD, AFF_K_ON_CARD, AFF_K_ON_DISK, AFF_K_TAKEN, AFF_K_WAITED, AFF_K_LINKED, AFF_K_READS, AFF_K_PLAN_COUNTS };

/* 1 x min(experts, 1024) rounded up to 32, aff__k_plan_smem(experts). Items of at most `batch` entries, and their entries in that order: by
 * class, in a class experts ascending, of an expert rows ascending. */
typedef struct aff_k_plan {
    const int32_t *picks;
    const float *weights; /* [T][K] */
    const uint64_t *base; /* [experts] words of aff_expert_table */
    aff_k_moe plan;
    aff_k_ring ring;
    aff_k_fetch fetch;
    uint32_t *arrived; /* aff_k_bring, with its number of slots */
    int32_t bring;
    uint64_t group;      /* not 0: slots (of ring.pitch) on the card that experts from elsewhere are brought to, the i-th in item order to slot i mod group_slots */
    int32_t group_slots;
    int32_t *log; /* NULL, or pinned memory: of T <= AFF_K_FEW rows the picks [T][K], else how many rows chose each expert [experts] */
    int32_t T, K, experts, batch;
} aff_k_plan;
static inline size_t aff__k_plan_smem(int32_t experts) { return 40 * (size_t)experts + 12 * AFF_K_SCRATCH; }
/* The same of many rows, fast, where no expert is on its way (ring.slots, fetch.slots and bring 0): 1 x as above, aff__k_plan_many_smem(experts). */
typedef aff_k_plan aff_k_plan_many;
#define AFF_K_PLAN_RUNS(experts) ((experts) <= 512 ? 8 : 4)
static inline size_t aff__k_plan_many_smem(int32_t experts) { return (36 + 4 * AFF_K_PLAN_RUNS(experts)) * (size_t)experts; }
static inline int32_t aff__k_max_items(int32_t T, int32_t K, int32_t experts, int32_t batch)
{
    const int32_t n = T * K;
    return (n < experts ? n : experts) + n / batch;
}

/* ceil(n/256) x 256, 0 B. silu(min(a, limit)) * clamp(b). */
typedef struct aff_k_swiglu {
    const float *a, *b;
    float *f32;     /* NULL or [n]; may be a */
    uint16_t *bf16; /* NULL or [n] */
    int64_t n;
    float limit;
} aff_k_swiglu;

/* small: jobs of few rows side by side, none of which reads what another writes. Job i has the blocks end[i-1] .. end[i]-1, as many as its
 * own kernel would have; x 256, the most shared memory that any of them wants. The same bits as the kernels by themselves. */
enum { AFF_K_JOB_NORM, AFF_K_JOB_QUERY, AFF_K_JOB_KV, AFF_K_JOB_COMPRESS, AFF_K_JOB_SWIGLU, AFF_K_JOB_ROUTE, AFF_K_JOB_CHOOSE, AFF_K_JOBS = 4 };
typedef union aff_k_job {
    aff_k_rmsnorm norm;
    aff_k_query query;
    aff_k_kv kv;
    aff_k_compress compress; /* append */
    aff_k_swiglu swiglu;
    aff_k_route route;
    struct {
        aff_k_route route;
        aff_k_plan plan; /* of its picks */
    } choose; /* one block, aff__k_choose_smem */
} aff_k_job;
static inline size_t aff__k_choose_smem(int32_t experts) /* the scores of eight rows, then the plan's */
{
    return 64 * (size_t)experts > aff__k_plan_smem(experts) ? 64 * (size_t)experts : aff__k_plan_smem(experts);
}
typedef struct aff_k_small {
    int32_t count, kind[AFF_K_JOBS], end[AFF_K_JOBS];
    aff_k_job job[AFF_K_JOBS];
} aff_k_small;

/* Routed experts (backend/cpu/kernels.h, `fast`): integers, the CPU's bits. hidden, inter: multiples of 64 (MXFP4: 32).
 * Few rows, a plan of batch AFF_K_ITEM_FEW:
 *   experts_up: items * ceil(inter/128) x 128, aff__k_experts_smem(dtype, hidden) + 4096 B: xq, xs -> hq, hs
 *   experts_down: items * ceil(hidden/128) x 128, aff__k_experts_smem(dtype, inter): hq, hs -> y
 * The same in format 34 where aff__k_stream_smem fits, for memory speed (stream.inc):
 *   experts_stream_up: one block a multiprocessor (any grid) x 512, aff__k_stream_smem(copies, hidden): xq, xs -> h
 *   experts_stream_down: the same with inter: h -> y; right behind experts_stream_up, not to be launched behind the plan itself
 * Many rows, a plan of batch aff__k_item_many(amd):
 *   experts_many_up: items * ceil(inter/64) x 256, aff__k_experts_many_smem(amd): xq, xs -> h; then convert h to hq, hs (T*K rows)
 *   experts_many_down: items * ceil(hidden/64) x 256, the same: hq, hs -> y
 *   The same in format 34 on sm_90, where aff__k_xw_fits: experts_wg_up, experts_wg_down: any grid x 384, AFF_K_XW_SMEM.
 * items: plan.n[0] or any number above, at most aff__k_max_items. */
enum { AFF_K_ITEM_FEW = 8 };
typedef struct aff_k_experts {
    aff_k_moe plan;
    const int16_t *table;     /* [2][1024][4], AFF_Q2P875G */
    const int8_t *xq;         /* [T][hidden] */
    const float *xs;          /* [T][ceil(hidden/128)] */
    float *h;                 /* [T*K][inter], stream and many */
    int8_t *hq;               /* [T*K][inter] */
    float *hs;                /* [T*K][ceil(inter/128)] */
    float *y;                 /* [T][K][hidden] */
    int32_t dtype, hidden, inter, K;
    int32_t copies; /* stream: of the codebook in shared memory, 1, 2, 4 or 8 */
    int32_t link;   /* stream: blocks that read experts outside the card's memory, if there are any */
    uint32_t off[3][3]; /* planes of a slot (types.h) */
    int32_t item0, items; /* many: the first item of the launch, and how many there are (or more) */
    uint32_t ready_slots;
    const uint32_t *ready; /* pinned [ready_slots] (aff_k_ring) */
    const uint32_t *fetched; /* device (aff_k_fetch.ready) */
    aff_k_bring bring;       /* stream */
    float limit;
} aff_k_experts;
typedef aff_k_experts aff_k_experts_up;
typedef aff_k_experts aff_k_experts_down;
typedef aff_k_experts aff_k_experts_stream_up;
typedef aff_k_experts aff_k_experts_stream_down;
typedef aff_k_experts aff_k_experts_many_up;
typedef aff_k_experts aff_k_experts_many_down;
typedef aff_k_experts aff_k_experts_wg_up;
typedef aff_k_experts aff_k_experts_wg_down;
enum { AFF_K_XW_STAGE = 128 * 64 * 2 + 4 * 64 * 23 + 64 * 4 + 16, AFF_K_XW_SMEM = 4 * AFF_K_XW_STAGE + 49152 + 8, AFF_K_XW_SMEM_EMU = 2 * AFF_K_XW_STAGE + 49152 + 8 };
static inline bool aff__k_xw_fits(const aff_k_experts *a)
{
    bool fits = a->dtype == AFF_Q2P875G && a->hidden % 128 == 0 && a->inter % 128 == 0;
    for (int i = 0; i < 3; i++) fits = fits && a->off[i][0] % 16 == 0 && a->off[i][1] % 16 == 0;
    return fits;
}
static inline size_t aff__k_experts_smem(int32_t dtype, int32_t cols)
{
    return (dtype == AFF_MXFP4 ? 0 : 16384) + AFF_K_ITEM_FEW * ((size_t)cols + 4 * (((size_t)cols + 127) / 128));
}
enum { AFF_K_STREAM_STAGES = 4, AFF_K_STREAM_BATCH = 2, AFF_K_STREAM_ARGS = (sizeof(aff_k_experts) + 15) / 16 * 16 };
static inline size_t aff__k_stream_smem(int32_t copies, int32_t cols)
{
    const size_t cuts = ((size_t)cols + 127) / 128, n = AFF_K_STREAM_BATCH;
    return 16384 * (size_t)copies + 16 * AFF_K_STREAM_STAGES * 736 + 2 * 2 * n * cuts * 128 + 2 * n * cuts * 4 + 64 * 80 + AFF_K_STREAM_ARGS + n * (size_t)cols;
}
static inline int32_t aff__k_item_many(bool amd) { return amd ? 32 : 64; }
static inline size_t aff__k_experts_many_smem(bool amd)
{
    const size_t n = (size_t)aff__k_item_many(amd);
    return (128 + n) * (amd ? 272 : 320) + 4 * n + 1024 + 16384;
}

/* ---- sample.inc ---- */

/* T * parts x 256, 96 B. id[t] = the lowest index of the largest of x[t]; a NaN counts as the lowest value. */
typedef struct aff_k_argmax {
    const float *x; /* [T][ld] */
    int32_t *id;    /* [T] */
    int32_t *bad;   /* NULL or [T]: the row has a NaN or +inf, or nothing above -inf: what the sampler refuses */
    uint32_t *part;  /* [T][3 * parts] */
    uint32_t *count; /* [T], zero before the first launch, and after each */
    int64_t ld;
    int32_t n, parts; /* blocks of a row, 1 .. n */
} aff_k_argmax;

/* How the logits of a row are adjusted (engine/logits.h), and a grammar's mask, which comes last. */
typedef struct aff_k_adjustment {
    double repetition, presence, frequency;
    const int32_t *all, *output; /* [vocab] occurrences */
    const int32_t *bias_id;      /* [n_bias], in the order given */
    const float *bias;
    const uint32_t *mask;        /* NULL or [ceil(vocab/32)]: a token without its bit becomes -inf */
    int32_t n_bias;
} aff_k_adjustment;
/* T * ceil(vocab/256) x 256, 0 B. y may be x. */
typedef struct aff_k_adjust {
    const float *x; /* [T][ld] */
    float *y;       /* [T][ld] */
    const aff_k_adjustment *row; /* [T] */
    int64_t ld;
    int32_t vocab;
} aff_k_adjust;

/* aff_sampling as the device needs it. */
typedef struct aff_k_draw {
    double temperature;
    int64_t top_k;
    uint64_t top_p; /* ceil(top_p * 2^53) */
    uint64_t least; /* ceil(min_p * 2^44) */
    uint64_t seed;
    uint32_t choice;
} aff_k_draw;
/* argmax first, with bad. weights: T * ceil(vocab/256) x 256, 0 B: w from the logits. sample: T x 1024, 4608 B: id[t] = the token at
 * position pos[t]+1, -1 where bad. */
typedef struct aff_k_sampler {
    const float *x;         /* [T][ld] logits */
    const aff_k_draw *draw; /* [T] */
    const int32_t *top, *bad; /* [T] from argmax */
    const int64_t *pos;     /* [T] */
    uint64_t *w;            /* [T][vocab] */
    int32_t *id;            /* [T] */
    int64_t ld;
    int32_t vocab;
} aff_k_sampler;
typedef aff_k_sampler aff_k_weights;
typedef aff_k_sampler aff_k_sample;

/* ceil(blocks/256) x 256, 0 B. Block i ran rows start[i] .. start[i+1]-1: a decided token, then a draft. kept[i]: rows that count, 1 at
 * least; next[i]: the token decided for the position after them. */
typedef struct aff_k_accept {
    const int32_t *start;  /* [blocks+1] */
    const int32_t *ids;    /* [T] as run */
    const int32_t *chosen; /* [T] */
    int32_t *kept, *next;  /* [blocks] */
    int32_t blocks;
} aff_k_accept;

/* quant/search.h, aff_search_table. */
typedef struct aff_k_search {
    float c[4][1024], lo[4][64], hi[4][64];
    uint16_t id[1024];
} aff_k_search;

/* ceil(rows/8) x 256, 0 B. row[r]: exponent of row r's scale, INT_MIN for zeros. */
typedef struct aff_k_encode_rows {
    const uint8_t *codes, *scales; /* [rows][cols/2] E2M1 pairs, [rows][cols/32] E8M0 */
    int32_t *row;
    int32_t rows, cols;
} aff_k_encode_rows;

/* any x 256, aff__k_encode_smem. Codes and fields of a matrix of routed experts (quant/encode.h). */
typedef struct aff_k_encode {
    const uint8_t *codes, *scales;
    const int32_t *row;
    const float *weight;       /* [cols] > 0, or NULL */
    const aff_k_search *table; /* [2] */
    const float *rank;         /* [15][65536][8] */
    const uint16_t *near;      /* [15][2][65536] */
    uint8_t *out_codes, *out_fields; /* 20 and 3 bytes a row and group of 64 columns, which stand so far apart: */
    int64_t code_row, code_group, field_row, field_group;
    int32_t rows, cols;
} aff_k_encode;
static inline size_t aff__k_encode_smem(void)
{
    return 2 * sizeof(aff_k_search);
}
#endif
