#include "format/dtype.h"
#include "base/mem.h"

static const aff_dtype_info infos[] = {
    {AFF_F32, "f32", 1, 4, 0, 0, 1, 1},
    {AFF_F16, "f16", 1, 2, 0, 0, 1, 1},
    {AFF_BF16, "bf16", 1, 2, 0, 0, 1, 1},
    {AFF_FP8, "fp8_e4m3", 16384, 16384, 1, 0, 128, 128},
    {AFF_Q8_0, "q8_0", 32, 32, 2, 0, 1, 1},
    {AFF_IQ2_KL, "iq2_kl", 256, 80, 6, 2, 1, 1},
    {AFF_IQ3_KS, "iq3_ks", 256, 96, 6, 2, 1, 1},
    {AFF_IQ4_KS, "iq4_ks", 256, 128, 8, 4, 1, 1},
    {AFF_IQ5_KS, "iq5_ks", 256, 160, 8, 4, 1, 1},
    {AFF_Q2P875, "q2p875", 256, 80, 12, 2, 1, 64},
    {AFF_Q2P875Q4, "q2p875q4", 256, 80, 12, 2, 1, 64},
    {AFF_Q2P875G, "q2p875g", 256, 80, 12, 2, 1, 64},
    {AFF_MXFP4, "mxfp4", 32, 16, 1, 0, 1, 32},
    {AFF_FP8_32, "fp8_e4m3_32", 1024, 1024, 1, 0, 32, 32},
};

const aff_dtype_info *aff__dtype_info(uint32_t code)
{
    for (size_t i = 0; i < sizeof infos / sizeof *infos; i++)
        if ((uint32_t)infos[i].dtype == code) return &infos[i];
    return NULL;
}

bool aff__dtype_sizes(const aff_dtype_info *info, uint64_t rows, uint64_t cols, uint64_t *data, uint64_t *scale,
                      uint64_t *rscale)
{
    const uint64_t most = 1ull << 60;
    uint64_t n;
    if (!rows || !cols || rows % info->row_multiple || cols % info->col_multiple) return false;
    if (!aff__mul_ok(rows, cols, &n)) return false;
    uint64_t blocks = n / info->block + (n % info->block != 0);
    return aff__mul_ok(blocks, info->data_bytes, data) && *data <= most &&
           aff__mul_ok(blocks, info->scale_bytes, scale) && *scale <= most &&
           aff__mul_ok(rows, info->row_bytes, rscale) && *rscale <= most;
}

bool aff__dtype_has_codebook(uint32_t code)
{
    return code == AFF_Q2P875 || code == AFF_Q2P875Q4 || code == AFF_Q2P875G;
}
