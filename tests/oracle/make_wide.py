#!/usr/bin/env python3
"""A checkpoint with layers of the full width of DeepSeek-V4-Flash or V4.1-Flash and few of them, random, and an importance matrix
with second moments for it: for measuring memory and speed of aff-quantize. Needs numpy.

    make_wide.py v4|v41 FOLDER [--layers 2] [--experts 256 or 384]

writes FOLDER/config.json, FOLDER/model.safetensors and FOLDER/imatrix.gguf."""
import argparse
import json
import os
import struct

import numpy as np

ap = argparse.ArgumentParser(description=__doc__)
ap.add_argument("shape", choices=["v4", "v41"])
ap.add_argument("folder")
ap.add_argument("--layers", type=int, default=2)
ap.add_argument("--experts", type=int)
a = ap.parse_args()
v41 = a.shape == "v41"
L, E = a.layers, a.experts or (384 if v41 else 256)
H, I, QR, IH, V = (5120, 2304, 1280, 32, 129280) if v41 else (4096, 2048, 1024, 64, 129280)
HEADS, D, GROUPS, OR, HC, ID = 64, 512, 8, 1024, 4, 128
TILE = 32 if v41 else 128
rng = np.random.default_rng(1)
tensors = []  # name, dtype, shape


def add(name, dtype, *shape):
    tensors.append((name, dtype, shape))


def fp8(name, rows, cols):
    add(name + ".weight", "F8_E4M3", rows, cols)
    add(name + ".scale", "F8_E8M0", rows // TILE, cols // TILE)


def block(p, layer):
    for n, s in [("attn_norm.weight", H), ("ffn_norm.weight", H), ("attn.q_norm.weight", QR), ("attn.kv_norm.weight", D)]:
        add(p + n, "BF16", s)
    add(p + "attn.attn_sink", "F32", HEADS)
    fp8(p + "attn.wq_a", QR, H)
    fp8(p + "attn.wq_b", HEADS * D, QR)
    fp8(p + "attn.wkv", D, H)
    fp8(p + "attn.wo_a", GROUPS * OR, HEADS * D // GROUPS)
    fp8(p + "attn.wo_b", H, GROUPS * OR)
    add(p + "ffn.gate.weight", "BF16", E, H)
    if v41:
        add(p + "ffn.gate.bias", "F32", E)
        add(p + "ffn.gate.bias_vl", "F32", E)
    else:
        add(p + "ffn.gate.tid2eid", "I64", V, 6)
    for w, r, c in [("w1", I, H), ("w3", I, H), ("w2", H, I)]:
        fp8(p + "ffn.shared_experts." + w, r, c)
        for e in range(E):
            add(f"{p}ffn.experts.{e}.{w}.weight", "I8", r, c // 2)
            add(f"{p}ffn.experts.{e}.{w}.scale", "F8_E8M0", r, c // 32)
    for s in ["hc_attn_", "hc_ffn_"]:
        add(p + s + "fn", "F32", (2 + HC) * HC, HC * H)
        add(p + s + "base", "F32", (2 + HC) * HC)
        add(p + s + "scale", "F32", 3)
    if v41 and layer == 1:
        fp8(p + "engram.wkv", (HC + 1) * H, 6144)
        add(p + "engram.q_weight", "BF16", HC, H)
        add(p + "engram.k_weight", "BF16", HC, H)


add("embed.weight", "BF16", V, H)
add("head.weight", "BF16", V, H)
add("norm.weight", "BF16", H)
if not v41:
    add("hc_head_fn", "F32", HC, HC * H)
    add("hc_head_base", "F32", HC)
    add("hc_head_scale", "F32", 1)
for l in range(L):
    block(f"layers.{l}.", l)

SIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
header, at = {}, 0
for name, dtype, shape in tensors:
    n = int(np.prod(shape)) * SIZE[dtype]
    header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
    at += n
text = json.dumps(header, separators=(",", ":")).encode()
os.makedirs(a.folder, exist_ok=True)
with open(f"{a.folder}/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for name, dtype, shape in tensors:
        n = int(np.prod(shape))
        if dtype == "F8_E8M0":
            x = rng.integers(117, 121, n, dtype=np.uint8)
        elif dtype == "F8_E4M3":
            x = rng.integers(0, 127, n, dtype=np.uint8)
        elif dtype == "I8":
            x = rng.integers(0, 256, n, dtype=np.uint8)
        elif dtype == "I64":
            x = rng.integers(0, E, n, dtype=np.int64)
        elif dtype == "F32":
            x = rng.standard_normal(n, dtype=np.float32)
        else:
            x = (rng.integers(0x3C00, 0x3D00, n, dtype=np.uint16)) | (rng.integers(0, 2, n, dtype=np.uint16) << 15)
        f.write(x.tobytes())

config = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": L, "num_attention_heads": HEADS, "head_dim": D,
          "q_lora_rank": QR, "o_groups": GROUPS, "o_lora_rank": OR, "index_n_heads": IH, "index_head_dim": ID,
          "n_routed_experts": E, "num_experts_per_tok": 6, "moe_intermediate_size": I, "hc_mult": HC,
          "compress_ratios": [0] * L, "num_hash_layers": 0 if v41 else L}
if v41:
    config.update(kv_source_layer_ids=[], index_source_layer_ids=[], engram_layer_ids=[1] if L > 1 else [],
                  engram_max_ngram_size=4, engram_n_heads=8, engram_head_dim=256)
    config = {"model_type": "deepseek_v41", "text_config": config}
else:
    config["model_type"] = "deepseek_v4"
json.dump(config, open(f"{a.folder}/config.json", "w"))


def gguf(path, items):
    """items: name, dims (fastest first), function that returns the data"""
    infos, at = b"", 0
    for name, dims, _ in items:
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        infos += struct.pack("<IQ", 0, at)
        at = (at + int(np.prod(dims)) * 4 + 31) // 32 * 32
    key = b"general.type"
    head = b"GGUF" + struct.pack("<IQQ", 3, len(items), 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 7) + b"imatrix"
    with open(path, "wb") as f:
        f.write(head + infos)
        f.write(b"\0" * (-f.tell() % 32))
        for _, _, data in items:
            f.write(data().astype("<f4").tobytes())
            f.write(b"\0" * (-f.tell() % 32))


def moments():
    x = rng.standard_normal((256, H), dtype=np.float32) * np.exp(rng.standard_normal(H, dtype=np.float32) / 2)
    return (x.T @ x)[np.triu_indices(H)]


items = []
for l in range(L):
    for part, cols in [("gate", H), ("up", H), ("down", I)]:
        n = f"blk.{l}.ffn_{part}_exps.weight"
        items.append((n + ".in_sum2", [cols, E], lambda cols=cols: np.exp(rng.standard_normal(E * cols, dtype=np.float32))))
        items.append((n + ".counts", [1, E], lambda: np.full(E, 100)))
    items.append((f"blk.{l}.ffn_gate_exps.weight.in_cov", [H * (H + 1) // 2, 1], moments))
gguf(f"{a.folder}/imatrix.gguf", items)
