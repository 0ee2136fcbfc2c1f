"""Write the random parity checkpoints (`toy`, `toy-clamp`, `kernel`) in the release layout.

    parity_models.py NAME DIRECTORY          write one model
    parity_models.py --hashes                print SHA-256 of every file of every model

They are test inputs that are too large to keep in the tree, so every byte is a pure function of integers, and
tests/support/parity_model.c writes the identical files. The rule, for tensor NAME of a model with key KEY:

    h     = FNV-1a-64 over the bytes of KEY, "/", NAME
    u(i)  = splitmix64 output number i of a generator started at h:
            z = h + (i+1) * 0x9E3779B97F4A7C15;  z = (z ^ z>>30) * 0xBF58476D1CE4E5B9;
            z = (z ^ z>>27) * 0x94D049BB133111EB;  z ^ z>>31                            (all modulo 2^64)
    n(i)  = the four 16-bit parts of u(i) added up, minus 131070: about normal, standard deviation 37837
    b(j)  = byte j of u(0), u(1), ... taken little-endian

    float tensors   element i = (A + B*n(i)) * 2^-S rounded to float32, for BF16 then to bf16 (A, B, S: table FLOATS)
    F8_E4M3         code j = b(j); a NaN code (low seven bits all ones) has its lowest bit cleared
    I8 (FP4 pairs)  byte j = b(j)
    F8_E8M0         byte j = base + b(j) mod 3 - 1, base = 120 (FP8) or 125 (FP4) minus (floor(log2 in) + 1) div 2,
                    `in` the number of columns of the weight: weights of about unit gain, so nothing overflows
    tid2eid         row r: the first K entries of a Fisher-Yates shuffle of 0..E-1, step k swapping with
                    k + u(r*K + k) mod (E - k)

NAME is the stored name (`X.scale` has a stream of its own). `toy-clamp` has the weights of `toy` (same KEY) and
swiglu_limit 0.5, so that the clamps bind.
"""

import hashlib
import os
import sys
import tempfile

import numpy as np

import release

COMMON = dict(
    vocab_size=512, hidden_size=256, num_hidden_layers=8, compress_ratios=[0, 0, 4, 128, 4, 128, 4, 0, 0, 0, 0],
    num_hash_layers=2, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, num_attention_heads=8,
    o_groups=4, sliding_window=16, index_topk=16, swiglu_limit=10.0)
MODELS = {
    "toy": dict(COMMON, key="toy.7", head_dim=64, qk_rope_head_dim=16, q_lora_rank=64, o_lora_rank=32, index_n_heads=4,
                index_head_dim=32),
    "kernel": dict(COMMON, key="kernel.11", head_dim=512, qk_rope_head_dim=64, q_lora_rank=128, o_lora_rank=64,
                   index_n_heads=8, index_head_dim=128, num_hash_layers=3),
}
MODELS["toy-clamp"] = dict(MODELS["toy"], swiglu_limit=0.5)

# First match of the name's end decides: (A, B, S).
FLOATS = [
    ("norm.weight", (1 << 21, 6, 21)),                  # 1 + 0.11 N
    ("embed.weight", (0, 7, 18)),                       # N(0, 1)
    ("head.weight", (0, 7, 21)),                        # N(0, 1/8)
    ("_fn", (0, 7, 23)),                                # N(0, 1/32)
    ("_base", (0, 7, 19)),                              # N(0, 0.5)
    ("_scale", (1 << 21, 6, 21)),
    ("attn_sink", (0, 7, 18)),
    ("ape", (0, 7, 19)),
    ("gate.bias", (0, 6, 21)),                          # N(0, 0.11)
    ("gate.weight", (0, 7, 21)),
    ("markov_w1.weight", (0, 7, 18)),
    ("markov_w2.weight", (0, 7, 21)),
    ("weight", (0, 7, 22)),                             # N(0, 1/16): compressor, index weights, confidence head
]


def config(name):
    """config.json of a model, as a dict in file order."""
    m = MODELS[name]
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "vocab_size": m["vocab_size"], "hidden_size": m["hidden_size"], "num_hidden_layers": m["num_hidden_layers"],
        "num_attention_heads": m["num_attention_heads"], "num_key_value_heads": 1, "head_dim": m["head_dim"],
        "qk_rope_head_dim": m["qk_rope_head_dim"], "q_lora_rank": m["q_lora_rank"], "o_groups": m["o_groups"],
        "o_lora_rank": m["o_lora_rank"], "sliding_window": m["sliding_window"],
        "compress_ratios": m["compress_ratios"], "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
                         "beta_slow": 1},
        "max_position_embeddings": 65536, "index_n_heads": m["index_n_heads"], "index_head_dim": m["index_head_dim"],
        "index_topk": m["index_topk"], "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "rms_norm_eps": 1e-06,
        "n_routed_experts": m["n_routed_experts"], "num_experts_per_tok": m["num_experts_per_tok"],
        "n_shared_experts": 1, "moe_intermediate_size": m["moe_intermediate_size"], "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "topk_method": "noaux_tc",
        "num_hash_layers": m["num_hash_layers"], "swiglu_limit": m["swiglu_limit"], "hidden_act": "silu",
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
                                "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": 1, "num_nextn_predict_layers": 1, "dspark_block_size": 5, "dspark_noise_token_id": 509,
        "dspark_target_layer_ids": [3, 5, 7], "dspark_markov_rank": 64,
    }


# ---------------------------------------------------------------------------------------------------- generator

def fnv1a64(text):
    h = 0xCBF29CE484222325
    for b in text.encode():
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def stream(key, count):
    """u(0) .. u(count-1) of the generator named by the string key."""
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a64(key)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def noise(key, count):
    """n(0) .. n(count-1) as int64."""
    return stream(key, count).view("<u2").reshape(-1, 4).astype(np.int64).sum(1) - 131070


def octets(key, count):
    """b(0) .. b(count-1)."""
    return stream(key, -(-count // 8)).astype("<u8").view(np.uint8)[:count]


def floats(key, count, a, b, s):
    """float32 (a + b*n(i)) * 2^-s. The integer stays below 2^24 for every entry of FLOATS: nothing is rounded."""
    return np.ldexp((a + b * noise(key, count)).astype(np.float64), -s).astype(np.float32)


def hash_table(key, vocab, experts, k):
    u = stream(key, vocab * k).reshape(vocab, k)
    order = np.tile(np.arange(experts, dtype=np.int64), (vocab, 1))
    rows = np.arange(vocab)
    for i in range(k):
        j = i + (u[:, i] % np.uint64(experts - i)).astype(np.int64)
        order[rows, i], order[rows, j] = order[rows, j].copy(), order[rows, i].copy()
    return order[:, :k].copy()


def tensors(name):
    """{stored name: Stored} of a model, in file order."""
    cfg, key, out = config(name), MODELS[name]["key"], {}
    for spec in release.tensor_specs(cfg):
        kind, columns = spec[1], spec[2][-1]
        for tensor, dtype, shape in release.stored_specs(*spec):
            stream_key, count = f"{key}/{tensor}", int(np.prod(shape))
            if dtype == "I64":
                data = hash_table(stream_key, cfg["vocab_size"], cfg["n_routed_experts"], cfg["num_experts_per_tok"])
            elif dtype in ("F32", "BF16"):
                data = floats(stream_key, count, *next(v for end, v in FLOATS if tensor.endswith(end)))
                data = data if dtype == "F32" else release.bf16_encode(data)
            else:
                data = octets(stream_key, count)
                if dtype == "F8_E4M3":
                    data = np.where((data & 0x7F) == 0x7F, data & 0xFE, data)
                elif dtype == "F8_E8M0":
                    base = (120 if kind == "fp8" else 125) - columns.bit_length() // 2
                    data = (base - 1 + data % 3).astype(np.uint8)
                else:
                    data = data.view(np.int8)
            out[tensor] = release.Stored(dtype, shape, np.ascontiguousarray(data).reshape(shape))
    return out


def shard(name, half):
    """Shard 0: globals and the lower half of the trunk; 1: the upper half; 2: the draft."""
    part = name.split(".")
    return 2 if part[0] == "mtp" else int(part[0] == "layers" and int(part[1]) >= half)


def write(name, directory):
    cfg = config(name)
    half = cfg["num_hidden_layers"] // 2
    release.write_checkpoint(directory, cfg, tensors(name), shard_of=lambda n: shard(n, half))


def hashes(name, directory):
    """sha256sum lines of the model's files in `directory`."""
    for file in sorted(os.listdir(directory)):
        with open(os.path.join(directory, file), "rb") as f:
            yield f"{hashlib.sha256(f.read()).hexdigest()}  {name}/{file}"


def main(argv):
    if argv == ["--hashes"]:
        for name in MODELS:
            with tempfile.TemporaryDirectory() as d:
                write(name, d)
                print("\n".join(hashes(name, d)))
    elif len(argv) == 2 and argv[0] in MODELS:
        write(*argv)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
