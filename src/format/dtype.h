/* dtype.h - element types of tensors as the engine and the container know them (spec container 3). */
#ifndef AFF_FORMAT_DTYPE_H
#define AFF_FORMAT_DTYPE_H
#include <stdbool.h>
#include <stdint.h>

typedef enum aff_dtype {
    AFF_F32 = 0,
    AFF_F16 = 1,
    AFF_BF16 = 2,
    AFF_FP8 = 3,  /* E4M3 bytes row-major + E8M0 per 128x128 tile */
    AFF_Q8_0 = 4, /* 4, 16..19: known geometry, never written, refused for binding */
    AFF_IQ2_KL = 16,
    AFF_IQ3_KS = 17,
    AFF_IQ4_KS = 18,
    AFF_IQ5_KS = 19,
    AFF_Q2P875 = 32,   /* old pair codes, read only */
    AFF_Q2P875Q4 = 33, /* quad codes, planes row-major */
    AFF_Q2P875G = 34,  /* format 33 with codes [group of 64 columns][row][20 B], fields [group][row][3 B] */
    AFF_MXFP4 = 40,    /* E2M1 nibbles (low first) + E8M0 per 32 columns, both row-major */
    AFF_FP8_32 = 41    /* E4M3 bytes row-major + E8M0 per 32x32 tile */
} aff_dtype;

/* Geometry of a dtype: sizes of n = rows*cols weights are data = ceil(n/block)*data_bytes, scale =
 * ceil(n/block)*scale_bytes, row scales = rows*row_bytes. NULL for an unknown code. */
typedef struct aff_dtype_info {
    aff_dtype dtype;
    const char *name;
    uint32_t block, data_bytes, scale_bytes, row_bytes;
    uint32_t row_multiple, col_multiple; /* rows and cols of a matrix in a container must be multiples of these */
} aff_dtype_info;
const aff_dtype_info *aff__dtype_info(uint32_t code);

/* Bytes of the three planes of a [rows x cols] matrix. False if a dimension is 0 or not a multiple as above, or if a
 * size exceeds 2^60 bytes. */
bool aff__dtype_sizes(const aff_dtype_info *info, uint64_t rows, uint64_t cols, uint64_t *data, uint64_t *scale,
                      uint64_t *rscale);
/* True for the formats whose weights are looked up in a codebook (32, 33, 34). */
bool aff__dtype_has_codebook(uint32_t code);
#endif
