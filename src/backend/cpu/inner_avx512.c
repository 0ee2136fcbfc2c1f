/* The kernels over simd16.h, compiled for AVX-512. */
#if defined(__x86_64__)
#include "backend/cpu/inner_scalar.h"
#include "backend/cpu/rows_simd.h"
#include "backend/cpu/attend_simd.h"
#include "backend/cpu/index_simd.h"
#include "backend/cpu/experts_wide.h"
#include "backend/cpu/attend_pairs_simd.h"
#include "backend/cpu/vec_simd.h"

const aff__cpu_inner aff__cpu_inner_avx512 = {
    .matmul = matmul_simd,
    .pairs = pairs_simd,
    .to_bf16 = to_bf16_simd,
    .q2p875 = q2p875_simd,
    .mxfp4 = mxfp4_simd,
    .dot = dot_simd,
    .axpy = axpy_simd,
    .scale = scale_simd,
    .round_bf16 = round_bf16_simd,
    .attend = attend_simd,
    .attend_pairs = attend_pairs_simd,
    .merge = merge_simd,
    .index_codes = index_codes_simd,
    .index_floats = index_floats_simd,
    .row = row_simd,
    .row_pairs = row_pairs_simd,
    .swiglu = swiglu_simd,
    .quantise = quantise_simd,
};
#endif
