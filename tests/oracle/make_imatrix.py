#!/usr/bin/env python3
"""Writes tests/golden/imatrix/*: small importance matrices as llama.cpp lays them out, through the gguf package (PyPI) and struct.

Model: 2 layers, 3 experts, hidden 4, inter 2. v4.gguf has every entry, fused.gguf gate and up as one, converted.gguf is what a
converter makes of legacy.dat (counts lost), legacy.dat the older format. Needs: pip install gguf==0.19.0
"""
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

GATE = [[2, 4, 6, 4], [1, 1, 1, 0], [0, 0, 0, 0]]  # sums of squares; counts 2, 3, 0
DOWN = [[8, 24], [1, 3], [0, 0]]
COUNTS = [2, 3, 0]
NAMES = {"gate": GATE, "up": GATE, "down": DOWN}


def entry(w, name, sums, counts):
    w.add_tensor(f"{name}.in_sum2", np.array(sums, np.float32))
    w.add_tensor(f"{name}.counts", np.array(counts, np.float32).reshape(-1, 1))


def writer(path):
    w = gguf.GGUFWriter(path, arch="")
    w.add_type("imatrix")
    w.add_array("imatrix.datasets", ["sample.txt"])
    w.add_uint32("imatrix.chunk_count", 1)
    w.add_uint32("imatrix.chunk_size", 512)
    return w


def close(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main(out):
    w = writer(out / "v4.gguf")
    for l in range(2):
        for part, sums in NAMES.items():
            entry(w, f"blk.{l}.ffn_{part}_exps.weight", sums, [c + 10 * l if c else 0 for c in COUNTS])
        entry(w, f"blk.{l}.attn_q_a.weight", [[1, 2, 3, 4]], [5])  # of no expert: skipped
    close(w)
    w = writer(out / "fused.gguf")
    entry(w, "blk.1.ffn_gate_up_exps.weight", GATE, COUNTS)
    close(w)
    w = writer(out / "converted.gguf")
    w.add_tensor("blk.0.ffn_gate_exps.weight.in_sum2", np.array([[2, 4, 6, 4, 1, 1, 1, 0, 9, 9, 9, 9]], np.float32))
    w.add_tensor("blk.0.ffn_gate_exps.weight.counts", np.array([[512]], np.float32))
    close(w)
    data = struct.pack("<i", 2)
    for name, values in (("blk.0.attn_q_a.weight", [1, 2, 3, 4]), ("blk.0.ffn_down_exps.weight", [2, 6, 4, 4, 3, 0])):
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 2, len(values))
        data += struct.pack(f"<{len(values)}f", *values)
    data += struct.pack("<ii", 7, 3) + b"abc"
    (out / "legacy.dat").write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "golden" / "imatrix"))
