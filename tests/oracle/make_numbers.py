#!/usr/bin/env python3
"""Writes tests/golden/numbers.bin: what the ml_dtypes package (PyPI) says of the small number formats. Little-endian, in this order:
  float32[256] value of each E4M3FN byte, float32[256] of each E8M0 byte, float32[16] of each E2M1 code,
  float32[256] value of the bf16 patterns k * 257 (k = 0..255),
  float32[16] midpoints between neighbouring E2M1 codes and their negatives (7 + 7, and +-5.5 beyond the last), u8[16] what they round to,
  float32[512] inputs and u8[512] their E4M3FN bytes; float32[512] inputs and u16[512] their bf16 patterns.
Needs: pip install ml-dtypes==0.6.0 numpy
"""
import sys

import ml_dtypes
import numpy as np

f32 = np.float32


def values(dtype, codes):
    return np.asarray(codes, np.uint8).view(dtype).astype(f32)


def main(path):
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(f32)
    positive = e2m1[:8]
    mid = (positive[:-1] + positive[1:]) / 2
    mid = np.concatenate([mid, [5.5], -mid, [-5.5]]).astype(f32)
    rng = np.random.default_rng(1)
    x8 = np.concatenate([rng.normal(0, 1, 256) * 2.0 ** rng.integers(-10, 9, 256), np.arange(256) * 2.0**-10 * 1.0]).astype(f32)
    x8 = np.clip(x8, -448, 448).astype(f32)
    x16 = np.concatenate([rng.normal(0, 1, 256), (1 + np.arange(256) * 2.0**-9)]).astype(f32)
    patterns = (np.arange(256, dtype=np.uint32) * 257).astype(np.uint16)
    with open(path, "wb") as f:
        for a in (
            values(ml_dtypes.float8_e4m3fn, range(256)),
            values(ml_dtypes.float8_e8m0fnu, range(256)),
            e2m1,
            patterns.view(ml_dtypes.bfloat16).astype(f32),
            mid,
            mid.astype(ml_dtypes.float4_e2m1fn).view(np.uint8),
            x8,
            x8.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
            x16,
            x16.astype(ml_dtypes.bfloat16).view(np.uint16),
        ):
            f.write(np.ascontiguousarray(a).tobytes())


main(sys.argv[1])
