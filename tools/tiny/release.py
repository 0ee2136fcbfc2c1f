"""Reader and writer of the DeepSeek-V4 release checkpoint layout (config.json, sharded safetensors, index).

Needs numpy only. What it offers:

  number formats   e4m3_*, e8m0_*, e2m1_*, bf16_* encode/decode; round_fp8 / round_fp4 (value after storage)
  block formats    quant_fp8 / dequant_fp8 (128x128 tiles), quant_fp4 / dequant_fp4 (32 columns), pack_fp4 / unpack_fp4
  tensor list      tensor_specs(config): every logical tensor of the layout with its kind and shape
  files            save_safetensors, read_safetensors, write_checkpoint, Checkpoint
  names            hf_to_release, release_to_hf (transformers' DeepseekV4ForCausalLM state_dict)
  one step export  export(tensors, config, directory)

A *logical* tensor is named as in the release, without the companion scale: `layers.0.attn.wq_a.weight` stands for
that name and `layers.0.attn.wq_a.scale`. Its kind says how it is stored: "bf16", "f32", "i64", "fp8", "fp4".
A *stored* tensor is a `Stored(dtype, shape, data)` with the safetensors dtype string and raw little-endian data.
"""

import json
import os
import re
import struct
from typing import NamedTuple

import numpy as np

ITEM_SIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
             "F8_E4M3": 1, "F8_E8M0": 1}
NUMPY = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "BF16": "<u2", "F16": "<f2", "I16": "<i2", "I8": "i1",
         "U8": "u1", "BOOL": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1"}
TILE = 128      # FP8 weights: one scale per TILE x TILE
GROUP = 32      # FP4 weights: one scale per GROUP columns of a row
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Stored(NamedTuple):
    """A tensor as it lies in a file. `data` is a numpy array of the raw codes (BF16 as uint16, F8_* as uint8)."""
    dtype: str
    shape: tuple
    data: np.ndarray


# ---------------------------------------------------------------------------------------------- number formats

def bf16_encode(x):
    """float32 -> bf16 bits (uint16), round to nearest even; NaN stays a quiet NaN."""
    x = np.ascontiguousarray(x, np.float32)
    b = x.view(np.uint32)
    r = ((b.astype(np.uint64) + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), r)


def bf16_decode(bits):
    """bf16 bits -> float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def bf16_round(x):
    return bf16_decode(bf16_encode(x))


def e8m0_decode(b):
    """Scale byte -> float32: 2^(b-127); 255 is NaN, 0 is the subnormal 2^-127."""
    table = np.ldexp(np.float32(1), np.arange(255) - 127)
    return np.append(table, np.nan).astype(np.float32)[np.asarray(b, np.uint8)]


def e8m0_encode(s):
    """Power of two -> scale byte. Refuses anything else."""
    m, e = np.frexp(np.asarray(s, np.float64))
    if not np.all(m == 0.5):
        raise ValueError("e8m0_encode: not a positive power of two")
    e = e - 1 + 127
    if np.any(e < 0) or np.any(e > 254):
        raise ValueError("e8m0_encode: out of range")
    return e.astype(np.uint8)


def _e4m3_table():
    c = np.arange(256)
    e, m = (c >> 3) & 15, c & 7
    v = np.where(e == 0, np.ldexp(m / 8.0, -6), np.ldexp(1 + m / 8.0, e - 7))
    v = np.where((c & 127) == 127, np.nan, v)
    return np.where(c & 128, -v, v).astype(np.float32)


E4M3 = _e4m3_table()


def e4m3_decode(code):
    """F8_E4M3 (FN: no infinity, 0x7F/0xFF NaN) -> float32."""
    return E4M3[np.asarray(code, np.uint8)]


def e4m3_encode(x):
    """-> F8_E4M3 code: nearest, ties to the even mantissa, saturating at 448. NaN gives 0x7F."""
    x = np.asarray(x, np.float64)
    nan = np.isnan(x)
    a = np.minimum(np.abs(np.where(nan, 0, x)), 448.0)
    e = np.maximum(np.frexp(np.maximum(a, 2.0**-9))[1] - 1, -6)     # a = 1.m * 2^e; below 2^-6 the step stays 2^-9
    q = np.rint(np.ldexp(a, 3 - e))                     # mantissa in steps of 2^(e-3): 8..16, or 0..8 at the bottom
    code = ((e + 6) * 8 + q).astype(np.int64)
    code = np.minimum(code, 0x7E) | np.where(np.signbit(x), 0x80, 0)
    return np.where(nan, 0x7F, code).astype(np.uint8)


def e2m1_decode(code):
    """E2M1 nibble (bit 3 sign) -> float32."""
    return E2M1[np.asarray(code, np.uint8) & 15]


def e2m1_encode(x):
    """-> E2M1 nibble: nearest, ties to the even code, saturating at 6."""
    x = np.asarray(x, np.float64)
    a = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for k, edge in enumerate([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]):      # edge between code k and k+1
        code += (a > edge) if k % 2 == 0 else (a >= edge)
    return code | (np.signbit(x).astype(np.uint8) << 3)


def pow2_scale(amax, m):
    """2^ceil(log2(amax/m)) as the quantisers compute it: amax times the rounded reciprocal of m in float32, then the
    exponent, plus one unless the mantissa is zero. amax must be a normal positive float32 after that product."""
    y = np.asarray(amax, np.float32) * (np.float32(1) / np.float32(m))
    bits = np.ascontiguousarray(y, np.float32).view(np.uint32)
    e = (bits >> 23).astype(np.int32) - 127 + ((bits & 0x7FFFFF) != 0)
    return np.ldexp(np.float32(1), e).astype(np.float32)


# ----------------------------------------------------------------------------------------------- block formats

def _tiles(rows, cols):
    return -(-rows // TILE), -(-cols // TILE)


def quant_fp8(w):
    """float32 [out, in] -> (codes uint8 [out, in], scale bytes uint8 [ceil(out/128), ceil(in/128)]).
    An all-zero tile gets scale 1."""
    w = np.asarray(w, np.float32)
    rows, cols = w.shape
    tr, tc = _tiles(rows, cols)
    pad = np.zeros((tr * TILE, tc * TILE), np.float32)
    pad[:rows, :cols] = np.abs(w)
    amax = pad.reshape(tr, TILE, tc, TILE).max(axis=(1, 3))
    scale = np.where(amax > 0, pow2_scale(np.maximum(amax, 1e-30), 448), np.float32(1))
    return e4m3_encode(w / _spread(scale, rows, cols)), e8m0_encode(scale)


def _spread(scale, rows, cols):
    """Tile scales -> one scale per element."""
    return np.repeat(np.repeat(scale, TILE, 0)[:rows], TILE, 1)[:, :cols]


def dequant_fp8(codes, scale):
    """-> float32 [out, in]. The product is exact."""
    rows, cols = codes.shape
    if scale.shape != _tiles(rows, cols):
        raise ValueError(f"FP8 scale grid {scale.shape}, expected {_tiles(rows, cols)}")
    return e4m3_decode(codes) * _spread(e8m0_decode(scale), rows, cols)


def pack_fp4(codes):
    """Nibbles [out, in] -> int8 [out, in/2]; the even column is the low nibble."""
    codes = np.asarray(codes, np.uint8)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.int8)


def unpack_fp4(packed):
    """int8 [out, in/2] -> nibbles uint8 [out, in]."""
    p = np.ascontiguousarray(packed).view(np.uint8)
    out = np.empty((p.shape[0], 2 * p.shape[1]), np.uint8)
    out[:, 0::2], out[:, 1::2] = p & 15, p >> 4
    return out


def quant_fp4(w):
    """float32 [out, in] -> (packed int8 [out, in/2], scale bytes uint8 [out, in/32]). A zero group gets scale 1."""
    w = np.asarray(w, np.float32)
    rows, cols = w.shape
    g = w.reshape(rows, cols // GROUP, GROUP)
    amax = np.abs(g).max(axis=2)
    scale = np.where(amax > 0, pow2_scale(np.maximum(amax, 1e-30), 6), np.float32(1))
    return pack_fp4(e2m1_encode(g / scale[:, :, None]).reshape(rows, cols)), e8m0_encode(scale)


def dequant_fp4(packed, scale):
    """-> float32 [out, in]. The product is exact."""
    codes = unpack_fp4(packed)
    rows, cols = codes.shape
    if scale.shape != (rows, cols // GROUP) or cols % GROUP:
        raise ValueError(f"FP4 scales {scale.shape} do not fit {codes.shape}")
    return e2m1_decode(codes) * np.repeat(e8m0_decode(scale), GROUP, 1)


def round_fp8(w):
    """float32 weights as they come back from FP8 storage."""
    return dequant_fp8(*quant_fp8(w))


def round_fp4(w):
    """float32 weights as they come back from FP4 storage."""
    return dequant_fp4(*quant_fp4(w))


# ------------------------------------------------------------------------------------------------- tensor list

def draft_stages(config):
    """Number of draft stages: the entries of compress_ratios behind the trunk. (Not num_nextn_predict_layers.)"""
    return len(config["compress_ratios"]) - config["num_hidden_layers"]


def _block_specs(c, p, ratio, hashed):
    """Logical tensors of one trunk layer or draft stage with name prefix p."""
    h, n, d, e, i = c["hidden_size"], c["hc_mult"], c["head_dim"], c["n_routed_experts"], c["moe_intermediate_size"]
    nh, qr, g, rank = c["num_attention_heads"], c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    mix = (2 + n) * n
    yield p + "attn_norm.weight", "bf16", (h,)
    yield p + "ffn_norm.weight", "bf16", (h,)
    for s in ("attn", "ffn"):
        yield f"{p}hc_{s}_fn", "f32", (mix, n * h)
        yield f"{p}hc_{s}_base", "f32", (mix,)
        yield f"{p}hc_{s}_scale", "f32", (3,)
    yield p + "attn.wq_a.weight", "fp8", (qr, h)
    yield p + "attn.q_norm.weight", "bf16", (qr,)
    yield p + "attn.wq_b.weight", "fp8", (nh * d, qr)
    yield p + "attn.wkv.weight", "fp8", (d, h)
    yield p + "attn.kv_norm.weight", "bf16", (d,)
    yield p + "attn.attn_sink", "f32", (nh,)
    yield p + "attn.wo_a.weight", "fp8", (g * rank, nh * d // g)
    yield p + "attn.wo_b.weight", "fp8", (h, g * rank)
    if ratio:
        yield from _compressor_specs(p + "attn.compressor.", ratio, d, h)
    if ratio == 4:
        ih, idim = c["index_n_heads"], c["index_head_dim"]
        yield p + "attn.indexer.wq_b.weight", "fp8", (ih * idim, qr)
        yield p + "attn.indexer.weights_proj.weight", "bf16", (ih, h)
        yield from _compressor_specs(p + "attn.indexer.compressor.", ratio, idim, h)
    yield p + "ffn.gate.weight", "bf16", (e, h)
    if hashed:
        yield p + "ffn.gate.tid2eid", "i64", (c["vocab_size"], c["num_experts_per_tok"])
    else:
        yield p + "ffn.gate.bias", "f32", (e,)
    for x in range(e):
        for w in ("w1", "w2", "w3"):
            yield f"{p}ffn.experts.{x}.{w}.weight", "fp4", (h, i) if w == "w2" else (i, h)
    for w in ("w1", "w2", "w3"):
        yield f"{p}ffn.shared_experts.{w}.weight", "fp8", (h, i) if w == "w2" else (i, h)


def _compressor_specs(p, ratio, dim, hidden):
    coff = 2 if ratio == 4 else 1
    yield p + "ape", "f32", (ratio, coff * dim)
    yield p + "wkv.weight", "bf16", (coff * dim, hidden)
    yield p + "wgate.weight", "bf16", (coff * dim, hidden)
    yield p + "norm.weight", "bf16", (dim,)


def _head_specs(c, p):
    h, n = c["hidden_size"], c["hc_mult"]
    yield p + "norm.weight", "bf16", (h,)
    yield p + "hc_head_fn", "f32", (n, n * h)
    yield p + "hc_head_base", "f32", (n,)
    yield p + "hc_head_scale", "f32", (1,)


def tensor_specs(config, draft=None):
    """Yield (logical name, kind, shape) of every tensor, in file order.

    draft: "dspark", "mtp1", "" for none; default: dspark if config has dspark_block_size, else mtp1 if
    compress_ratios has entries behind the trunk."""
    c = config
    h, v, layers, stages = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"], draft_stages(c)
    if draft is None:
        draft = ("dspark" if "dspark_block_size" in c else "mtp1") if stages else ""
    yield "embed.weight", "bf16", (v, h)
    yield "head.weight", "bf16", (v, h)
    yield from _head_specs(c, "")
    for l in range(layers):
        yield from _block_specs(c, f"layers.{l}.", c["compress_ratios"][l], l < c["num_hash_layers"])
    for s in range(stages if draft else 0):
        p, last = f"mtp.{s}.", s == stages - 1
        yield from _block_specs(c, p, 0, False)
        if draft == "mtp1":
            yield p + "e_proj.weight", "fp8", (h, h)
            yield p + "h_proj.weight", "fp8", (h, h)
            yield p + "enorm.weight", "bf16", (h,)
            yield p + "hnorm.weight", "bf16", (h,)
            yield from _head_specs(c, p)
            continue
        if s == 0:
            yield p + "main_proj.weight", "fp8", (h, len(c["dspark_target_layer_ids"]) * h)
            yield p + "main_norm.weight", "bf16", (h,)
        if last:
            r = c["dspark_markov_rank"]
            yield from _head_specs(c, p)
            yield p + "markov_head.markov_w1.weight", "bf16", (v, r)
            yield p + "markov_head.markov_w2.weight", "bf16", (v, r)
            yield p + "confidence_head.proj.weight", "bf16", (1, h + r)


def scale_name(name):
    return name[: -len("weight")] + "scale"


def stored_specs(name, kind, shape):
    """The stored tensors of one logical tensor: [(name, dtype, shape)]."""
    if kind == "fp8":
        return [(name, "F8_E4M3", shape), (scale_name(name), "F8_E8M0", _tiles(*shape))]
    if kind == "fp4":
        return [(name, "I8", (shape[0], shape[1] // 2)), (scale_name(name), "F8_E8M0", (shape[0], shape[1] // GROUP))]
    return [(name, {"bf16": "BF16", "f32": "F32", "i64": "I64"}[kind], shape)]


def store(name, kind, value):
    """Float (or integer) array of a logical tensor -> {stored name: Stored}, rounding to the stored format."""
    specs = stored_specs(name, kind, tuple(value.shape))
    if kind == "fp8":
        arrays = quant_fp8(value)
    elif kind == "fp4":
        arrays = quant_fp4(value)
    elif kind == "bf16":
        arrays = (bf16_encode(value),)
    else:
        arrays = (np.ascontiguousarray(value, NUMPY[specs[0][1]]),)
    return {n: Stored(t, s, a) for (n, t, s), a in zip(specs, arrays)}


# ------------------------------------------------------------------------------------------------------- files

def save_safetensors(path, tensors, metadata=None):
    """Write {name: Stored} in iteration order, but wider item sizes first so that every tensor is aligned.

    Same bytes for the same input: compact JSON, header padded with spaces to a multiple of 8."""
    names = sorted(tensors, key=lambda n: -ITEM_SIZE[tensors[n].dtype])     # stable
    header, pos = {"__metadata__": metadata or {"format": "pt"}}, 0
    for n in names:
        t = tensors[n]
        size = int(np.prod(t.shape, dtype=np.int64)) * ITEM_SIZE[t.dtype]
        header[n] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [pos, pos + size]}
        pos += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for n in names:
            data = np.ascontiguousarray(tensors[n].data, NUMPY[tensors[n].dtype]).tobytes()
            if len(data) != header[n]["data_offsets"][1] - header[n]["data_offsets"][0]:
                raise ValueError(f"{n}: {len(data)} bytes do not fit dtype and shape")
            f.write(data)


def read_safetensors(path):
    """-> {name: Stored}, memory mapped."""
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(size))
    blob = np.memmap(path, np.uint8, "r", offset=8 + size) if os.path.getsize(path) > 8 + size else np.zeros(0, np.uint8)
    header.pop("__metadata__", None)
    out = {}
    for name, t in header.items():
        a, b = t["data_offsets"]
        data = np.frombuffer(blob[a:b].tobytes() if a % ITEM_SIZE[t["dtype"]] else blob[a:b], NUMPY[t["dtype"]])
        out[name] = Stored(t["dtype"], tuple(t["shape"]), data.reshape(t["shape"]))
    return out


def write_checkpoint(directory, config, tensors, shard_of=None, shards=2):
    """Write config.json, model-0000k-of-0000n.safetensors and model.safetensors.index.json.

    tensors: {stored name: Stored} in file order. shard_of(name) -> 0-based shard; default: cut the list into `shards`
    parts of about equal size, never between a weight and its scale."""
    os.makedirs(directory, exist_ok=True)
    if shard_of is None:
        total, pos, where = sum(t.data.nbytes for t in tensors.values()), 0, {}
        for n, t in tensors.items():
            w = n[: -len("scale")] + "weight" if n.endswith(".scale") else n
            where[n] = where[w] if w in where else min(shards - 1, pos * shards // max(total, 1))
            pos += t.data.nbytes
        shard_of = where.get
    parts = {}
    for n in tensors:
        parts.setdefault(shard_of(n), []).append(n)
    index = {}
    for k in sorted(parts):
        file = f"model-{k + 1:05d}-of-{len(parts):05d}.safetensors"
        save_safetensors(os.path.join(directory, file), {n: tensors[n] for n in parts[k]})
        index.update({n: file for n in parts[k]})
    meta = {"metadata": {"total_size": sum(t.data.nbytes for t in tensors.values())},
            "weight_map": {n: index[n] for n in tensors}}
    _write_json(os.path.join(directory, "model.safetensors.index.json"), meta)
    _write_json(os.path.join(directory, "config.json"), config)


def _write_json(path, value):
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps(value, indent=2) + "\n")


class Checkpoint:
    """A release directory opened for reading."""

    def __init__(self, directory):
        self.directory = directory
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as f:
            self.config = json.load(f)
        with open(os.path.join(directory, "model.safetensors.index.json"), encoding="utf-8") as f:
            self.index = json.load(f)["weight_map"]
        self.tensors = {}
        for file in sorted(set(self.index.values())):
            self.tensors.update(read_safetensors(os.path.join(directory, file)))
        if set(self.tensors) != set(self.index):
            raise ValueError(f"{directory}: index and shards name different tensors")

    def __contains__(self, name):
        return name in self.tensors

    def names(self):
        """Logical names: everything but the companion scales."""
        return [n for n in self.tensors if not (n.endswith(".scale") and n[: -len("scale")] + "weight" in self.tensors)]

    def stored(self, name):
        return self.tensors[name]

    def array(self, name):
        """Logical tensor as float32 (dequantised, exact) or int64."""
        t = self.tensors[name]
        if t.dtype == "F8_E4M3":
            return dequant_fp8(t.data, self.tensors[scale_name(name)].data)
        if t.dtype == "I8":
            return dequant_fp4(t.data, self.tensors[scale_name(name)].data)
        if t.dtype == "BF16":
            return bf16_decode(t.data)
        return np.array(t.data)

    def draft_kind(self):
        if "mtp.0.main_proj.weight" in self.tensors:
            return "dspark"
        return "mtp1" if "mtp.0.e_proj.weight" in self.tensors else ""

    def check(self):
        """Raise unless names, dtypes and shapes are exactly those of tensor_specs."""
        want = {n: (t, tuple(s)) for spec in tensor_specs(self.config, self.draft_kind())
                for n, t, s in stored_specs(*spec)}
        have = {n: (t.dtype, t.shape) for n, t in self.tensors.items()}
        if want != have:
            bad = [f"{n}: {have.get(n)} expected {want.get(n)}" for n in sorted(set(want) | set(have))
                   if want.get(n) != have.get(n)]
            raise ValueError(f"{self.directory}: {len(bad)} tensors differ: " + "; ".join(bad[:5]))


def export(tensors, config, directory, shards=2):
    """Round float32 logical tensors (release names, numpy) to their stored formats and write a release directory.

    tensors must hold exactly the names of tensor_specs(config)."""
    specs = list(tensor_specs(config))
    missing = {n for n, _, _ in specs} ^ set(tensors)
    if missing:
        raise ValueError(f"missing or surplus tensors: {sorted(missing)[:8]}")
    out = {}
    for name, kind, shape in specs:
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(f"{name}: shape {tensors[name].shape}, expected {shape}")
        out.update(store(name, kind, tensors[name]))
    write_checkpoint(directory, config, out, shards=shards)


# ------------------------------------------------------------------------------------------------------- names

_GLOBAL = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight",
           "norm.weight": "model.norm.weight", "hc_head_fn": "model.hc_head.hc_fn",
           "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale"}

_LAYER = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
          "attn.wq_a.weight": "self_attn.q_a_proj.weight", "attn.q_norm.weight": "self_attn.q_a_norm.weight",
          "attn.wq_b.weight": "self_attn.q_b_proj.weight", "attn.wkv.weight": "self_attn.kv_proj.weight",
          "attn.kv_norm.weight": "self_attn.kv_norm.weight", "attn.wo_a.weight": "self_attn.o_a_proj.weight",
          "attn.wo_b.weight": "self_attn.o_b_proj.weight", "attn.attn_sink": "self_attn.sinks",
          "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
          "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
          "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
          "ffn.gate.tid2eid": "mlp.gate.tid2eid",
          "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
          "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
          "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight"}
for _s in ("attn", "ffn"):
    for _x in ("fn", "base", "scale"):
        _LAYER[f"hc_{_s}_{_x}"] = f"{_s}_hc.{_x}"
for _r, _h in (("attn.compressor.", "self_attn.compressor."),
               ("attn.indexer.compressor.", "self_attn.compressor.indexer.")):
    for _x, _y in (("wkv.weight", "kv_proj.weight"), ("wgate.weight", "gate_proj.weight"),
                   ("norm.weight", "kv_norm.weight"), ("ape", "position_bias")):
        _LAYER[_r + _x] = _h + _y
_LAYER_BACK = {h: r for r, h in _LAYER.items()}
_GLOBAL_BACK = {h: r for r, h in _GLOBAL.items()}
_ALIAS = {"self_attn.compressor.indexer.weights_proj.weight": "attn.indexer.weights_proj.weight"}   # older transformers


def release_name_to_hf(name):
    """Release name of a trunk tensor -> HF name, or None (draft tensors, routed experts)."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    m = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"model.layers.{m[1]}.{_LAYER[m[2]]}" if m and m[2] in _LAYER else None


def release_to_hf(tensors):
    """{release name: array} (numpy or torch) -> {HF state_dict name: array}. Draft tensors are left out; the routed
    experts of a layer are stacked into gate_up_proj [E, 2I, H] (rows 0..I-1 are w1) and down_proj [E, H, I]."""
    out, experts = {}, {}
    for name, value in tensors.items():
        m = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight", name)
        if m:
            experts.setdefault(int(m[1]), {})[int(m[2]), m[3]] = value
        elif not name.startswith("mtp."):
            hf = release_name_to_hf(name)
            if hf is None:
                raise KeyError(name)
            out[hf] = value
    for l, part in experts.items():
        n = 1 + max(e for e, _ in part)
        as_np = [[np.asarray(part[e, w]) for w in ("w1", "w3", "w2")] for e in range(n)]
        out[f"model.layers.{l}.mlp.experts.gate_up_proj"] = np.stack([np.concatenate(w[:2]) for w in as_np])
        out[f"model.layers.{l}.mlp.experts.down_proj"] = np.stack([w[2] for w in as_np])
    return out


def hf_to_release(state_dict):
    """{HF name: array} -> {release name: array}. Buffers that are no weights (rotary tables) are dropped."""
    out = {}
    for name, value in state_dict.items():
        if name in _GLOBAL_BACK:
            out[_GLOBAL_BACK[name]] = value
            continue
        m = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if m is None or "inv_freq" in name:
            if "inv_freq" in name or "rotary" in name:
                continue
            raise KeyError(name)
        p, tail = f"layers.{m[1]}.", m[2]
        if tail == "mlp.experts.gate_up_proj":
            half = value.shape[1] // 2
            for e in range(value.shape[0]):
                out[f"{p}ffn.experts.{e}.w1.weight"] = value[e][:half]
                out[f"{p}ffn.experts.{e}.w3.weight"] = value[e][half:]
        elif tail == "mlp.experts.down_proj":
            for e in range(value.shape[0]):
                out[f"{p}ffn.experts.{e}.w2.weight"] = value[e]
        elif tail in _LAYER_BACK:
            out[p + _LAYER_BACK[tail]] = value
        elif tail in _ALIAS:
            out[p + _ALIAS[tail]] = value
        else:
            raise KeyError(name)
    return out
