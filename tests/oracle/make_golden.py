"""Golden data of a release-layout checkpoint from transformers' DeepseekV4ForCausalLM, float32, eager.

    make_golden.py CHECKPOINT --out FILE.safetensors [options]

      CHECKPOINT        a release directory, or toy | toy-clamp | kernel (written to a temporary directory)
      --length N        number of positions (default: enough to pass every boundary of the config)
      --text FILE       encode this text with CHECKPOINT/tokenizer.json; default: ids from the integer generator
      --brief           logits, argmax, picks and selections only
      --draft           add DSpark blocks from v4_numpy.py (the checkpoint must have the stages)
      --sim             add a trunk run, and with --draft blocks, of v4_numpy.py in mode sim

Every array is described in tests/golden/README.md. The program also runs v4_numpy.py (float64) on the same input and
prints how far the two are apart: that is the noise a float32 engine may show.

transformers leaves ties at a top-k boundary open; here torch.topk is replaced by a stable sort: lower index first.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile

import numpy as np
import torch

import v4_numpy             # puts tools/tiny on the path
import parity_models
import release
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

PROJECTIONS = 8


# ------------------------------------------------------------------------------------------------ transformers

@contextlib.contextmanager
def stable_topk():
    """Lower index first among equal values, best value first."""
    def topk(x, k, dim=-1, largest=True, sorted=True):
        assert largest and dim in (-1, x.ndim - 1)
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))
    saved = torch.topk, torch.Tensor.topk
    torch.topk = torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = saved


def load_transformers(ckpt):
    """Release checkpoint -> DeepseekV4ForCausalLM with the stored weights as exact float32 values."""
    fields = {k: v for k, v in ckpt.config.items() if k not in ("quantization_config", "torch_dtype")}
    config = DeepseekV4Config(**fields)
    scaled = config.rope_parameters["compress"]
    if ckpt.config.get("rope_scaling"):
        assert scaled["rope_type"] == "yarn" and scaled["attention_factor"] == 1.0, scaled
        assert scaled["factor"] == ckpt.config["rope_scaling"]["factor"], scaled
    assert config.rope_parameters["main"]["rope_type"] == "default"
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager", experts_implementation="eager",
                                               dtype=torch.float32)
    weights = release.release_to_hf({n: ckpt.array(n) for n in ckpt.names() if not n.startswith("mtp.")})
    model.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in weights.items()}, strict=True)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return model.eval()


def run_transformers(model, ids):
    """One forward pass over the whole sequence. -> dict in the form of v4_numpy.V4.trunk."""
    seen = {}

    def keep(key, pick):
        def hook(_module, args, output):
            seen[key] = pick(args, output)
        return hook

    first = lambda args, out: out[0] if isinstance(out, tuple) else out
    handles = []
    for l, layer in enumerate(model.model.layers):
        handles += [layer.register_forward_hook(keep(("x", l), first)),
                    layer.self_attn.register_forward_hook(keep(("attn_out", l), first)),
                    layer.mlp.register_forward_hook(keep(("ffn_out", l), first)),
                    layer.mlp.gate.register_forward_hook(keep(("gate", l), lambda args, out: out))]
        compressor = layer.self_attn.compressor
        if hasattr(compressor, "indexer"):
            handles += [compressor.indexer.scorer.register_forward_hook(keep(("score", l), first)),
                        compressor.indexer.register_forward_hook(keep(("sel", l), first))]
    with torch.no_grad(), stable_topk():
        out = model(torch.tensor(ids)[None], use_cache=False)
    for h in handles:
        h.remove()
    f64 = lambda t: t.detach().double().numpy()
    r = {"logits": f64(out.logits[0]), "x": [], "layers": []}
    for l, layer in enumerate(model.model.layers):
        r["x"].append(f64(seen["x", l][0]))
        rec = {"attn_out": f64(seen["attn_out", l][0]), "ffn_out": f64(seen["ffn_out", l][0])}
        logits, weights, picks = seen["gate", l]
        rec["router_ids"], rec["router_weights"] = picks.numpy(), f64(weights)
        if not layer.mlp.is_hash:
            gate = layer.mlp.gate
            biased = f64(gate.score_fn(logits) + gate.e_score_correction_bias)
            best = -np.sort(-biased, axis=1)
            rec["router_gap"] = best[:, gate.top_k - 1] - best[:, gate.top_k]
            rec["router_max"] = np.abs(biased).max(1)
        if ("score", l) in seen:
            rec["index_score"] = mask_future(f64(seen["score", l][0]))
            rec["sel"] = selection_mask(seen["sel", l][0].numpy(), rec["index_score"].shape[1])
        r["layers"].append(rec)
    taps = sorted(getattr(model.config, "dspark_target_layer_ids", None) or [])
    r["taps"] = np.concatenate([r["x"][l].mean(1) for l in taps], -1) if taps else None
    return r


def mask_future(score):
    t, g = np.indices(score.shape)
    return np.where(g < (t + 1) // 4, score, np.nan)


def selection_mask(picks, groups):
    mask = np.zeros((len(picks), groups + 1), bool)
    np.put_along_axis(mask, np.where(picks < 0, groups, picks), True, 1)
    return mask[:, :groups]


# ------------------------------------------------------------------------------------------------- what is kept

def whole_positions(config, length):
    """24 positions around every boundary of the config; the rest of the 24 spread evenly."""
    w, k = config["sliding_window"], config["index_topk"]
    want = [0, 2, 3, 4, length - 1, 127, 128, 4 * k + 2, 4 * k + 3, w - 1, w, w + 1, 255, 256, 7, 126, 4 * k + 7, 383, 384,
            length - 2, 511, 512, 639, 640]
    want = list(dict.fromkeys(p for p in want if 0 <= p < length))[:24]
    spread = iter(np.linspace(0, length - 1, 97).astype(int))
    while len(want) < min(24, length):
        p = int(next(spread))
        want += [p] if p not in want else []
    return np.array(sorted(want), np.int32)


def signs(n):
    """[8, n] of +-1: bit j of u(i) of the stream "projection" says whether entry i of projection j is -1."""
    u = parity_models.stream("projection", n)
    return 1 - 2 * ((u[None] >> np.arange(PROJECTIONS, dtype=np.uint64)[:, None]) & np.uint64(1)).astype(np.float64)


def add_projections(out, name, value, row_axes=1):
    """Projections and maximum of every row; a row is everything behind the first row_axes axes."""
    flat = value.reshape(*value.shape[:row_axes], -1)
    out[name + ".proj"] = (flat @ signs(flat.shape[-1]).T).astype(np.float32)
    out[name + ".max"] = np.abs(flat).max(-1).astype(np.float32)


def add_tensor(out, name, value, pos):
    """value [T, ...]: whole at `pos`, projections everywhere."""
    out[name] = value[pos].astype(np.float32)
    add_projections(out, name, value)


def relative(gap, top):
    """gap / top; infinite gaps (nothing was left out) stay infinite."""
    return (gap / np.where(np.isinf(gap), 1, top)).astype(np.float32)


def add_trunk(out, model, r, pos, brief):
    """Arrays of one trunk run; model is the numpy oracle (for select). brief: see --brief."""
    c = model.c
    logits = r["logits"]
    best = -np.sort(-logits, axis=1)[:, :2]
    add_tensor(out, "logits", logits, pos)
    out["argmax"] = logits.argmax(1).astype(np.int32)
    out["argmax_gap"] = relative(best[:, 0] - best[:, 1], np.abs(logits).max(1))
    ids = np.array([rec["router_ids"] for rec in r["layers"]])
    order = np.argsort(ids, -1)
    out["router_ids"] = np.take_along_axis(ids, order, -1).astype(np.int8 if c["n_routed_experts"] <= 128 else np.int16)
    weights = np.take_along_axis(np.array([rec["router_weights"] for rec in r["layers"]]), order, -1)
    none = np.full(len(logits), np.inf)
    out["router_gap"] = np.array([relative(rec.get("router_gap", none), rec.get("router_max", none))
                                  for rec in r["layers"]])
    for l, rec in enumerate(r["layers"]):
        if "sel" in rec:
            mask, gap = model.select(rec["index_score"])
            assert (mask == rec["sel"]).all(), f"layer {l}: selection is not the stable top-k of the scores"
            rows = np.full((len(mask), c["index_topk"]), -1, np.int16)
            for t, m in enumerate(mask):
                rows[t, :m.sum()] = np.nonzero(m)[0]
            out[f"sel.{l}"], out[f"sel_gap.{l}"] = rows, gap.astype(np.float32)
    if brief:
        return
    out["router_weights"] = weights[:, pos].astype(np.float32)
    for l, rec in enumerate(r["layers"]):
        add_tensor(out, f"x.{l}", r["x"][l], pos)
        for name in ("attn_out", "ffn_out"):
            out[f"{name}.{l}"] = rec[name][pos[::2]].astype(np.float32)
        if "index_score" in rec:
            out[f"index_score.{l}"] = rec["index_score"][pos].astype(np.float32)


def draft_blocks(config, length):
    """Numbers of committed positions at which a block is drafted: below, at and above the window, and the end."""
    w = config["sliding_window"]
    return np.array(sorted({1, 4, w - 1, w, w + 1, 2 * w + 3, length - 1} & set(range(1, length))), np.int32)


def add_draft(out, prefix, model, taps, ids):
    """DSpark blocks; the decided token of a block is the sequence's own next id."""
    n = draft_blocks(model.c, len(ids))
    blocks = [model.draft(taps, int(p), int(ids[p])) for p in n]
    col = lambda key: np.array([b[key] for b in blocks])
    logits = col("logits")
    best = -np.sort(-logits, axis=-1)[..., :2]
    out[prefix + "n"], out[prefix + "in_ids"] = n, col("in_ids").astype(np.int32)
    out[prefix + "ids"] = col("ids").astype(np.int32)
    add_projections(out, prefix + "logits", logits, 2)
    out[prefix + "last_logits"], out[prefix + "last_x"] = [np.array(blocks[-1][k], np.float32) for k in ("logits", "x")]
    out[prefix + "gap"] = relative(best[..., 0] - best[..., 1], np.abs(logits).max(-1))
    out[prefix + "conf"] = col("conf").astype(np.float32)
    order = np.sort(col("router_ids"), -1)
    out[prefix + "router_ids"], out[prefix + "router_gap"] = order.astype(np.int8), col("router_gap").astype(np.float32)
    for key in ("mx", "seed_row", "h"):
        out[prefix + key] = col(key).astype(np.float32)


def add_sim(out, directory, freqs, ids, pos, draft):
    """The numpy oracle in mode sim; prints what float32 arithmetic would change."""
    exact, single = (v4_numpy.V4(directory, "sim", freqs, t) for t in (np.float64, np.float32))
    r, noisy, part = exact.trunk(ids), single.trunk(ids), {}
    print_noise("sim in float32 numpy", noisy, r)
    add_trunk(part, exact, r, pos, brief=True)
    out.update({"sim." + n: a for n, a in part.items()})
    if draft:
        add_draft(out, "sim.draft.", exact, r["taps"], ids)
        add_draft(part, "sim.draft.", single, noisy["taps"], ids)
        print_draft_noise(part, out)


# --------------------------------------------------------------------------------------------------------- main

def row_error(a, b):
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return np.abs(a - b).max(1) / np.abs(b).max(1)


def print_noise(title, r, exact):
    """How far the trunk run r is from the exact one."""
    print(f"{title:28} {'median':>9} {'worst':>9}")
    line = lambda name, e: print(f"  {name:26} {np.median(e):9.2e} {e.max():9.2e}")
    for l, x in enumerate(r["x"]):
        line(f"x.{l}", row_error(x, exact["x"][l]))
    line("logits", row_error(r["logits"], exact["logits"]))
    differ = sum((np.sort(a["router_ids"]) != np.sort(b["router_ids"])).any(1).sum()
                 for a, b in zip(r["layers"], exact["layers"]))
    chosen = sum((a["sel"] != b["sel"]).any(1).sum() for a, b in zip(r["layers"], exact["layers"]) if "sel" in a)
    print(f"  rows that differ: picks {differ}, selections {chosen}, argmax "
          f"{(r['logits'].argmax(1) != exact['logits'].argmax(1)).sum()}")


def print_draft_noise(part, out):
    e = np.abs(part["sim.draft.logits.proj"] - out["sim.draft.logits.proj"]).max(-1)
    e = e / (np.sqrt(part["sim.draft.last_logits"].shape[-1]) * out["sim.draft.logits.max"])
    conf = np.abs(part["sim.draft.conf"] - out["sim.draft.conf"])
    print(f"  draft logits (projections) {np.median(e):9.2e} {e.max():9.2e}\n"
          f"  draft conf (absolute)      {np.median(conf):9.2e} {conf.max():9.2e}\n"
          f"  draft ids that differ: {(part['sim.draft.ids'] != out['sim.draft.ids']).sum()} of {conf.size}, smallest gap "
          f"{out['sim.draft.gap'].min():.1e}")


def print_gaps(out):
    for name, limit in [("router_gap", 1e-5), ("argmax_gap", 1e-5)] + [(n, 1e-5) for n in out if n.startswith("sel_gap")]:
        g = out[name]
        print(f"{name:12} smallest {np.min(g):.2e}, below {limit:g}: {(g < limit).sum()}, exact ties: {(g == 0).sum()}")


def make_ids(args, directory, config, length):
    if args.text:
        from tokenizers import Tokenizer
        with open(args.text, encoding="utf-8") as f:
            ids = Tokenizer.from_file(os.path.join(directory, "tokenizer.json")).encode(f.read()).ids
        if len(ids) < length:
            sys.exit(f"{args.text}: {len(ids)} tokens, {length} needed")
        return np.array(ids[:length])
    return (parity_models.stream("ids", length) % np.uint64(config["vocab_size"])).astype(np.int64)


def file_hashes(ckpt):
    """Of config.json and the shards: a golden file belongs to exactly these."""
    def digest(name):
        with open(os.path.join(ckpt.directory, name), "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()
    return {name: digest(name) for name in ["config.json"] + sorted(set(ckpt.index.values()))}


def make(args, directory):
    ckpt = release.Checkpoint(directory)
    ckpt.check()
    c = ckpt.config
    length = args.length or max(4 * c["index_topk"] + 128 + 4, 420)
    ids = make_ids(args, directory, c, length)
    model = load_transformers(ckpt)
    r = run_transformers(model, ids)
    rotary = model.model.rotary_emb
    freqs = rotary.main_inv_freq.numpy(), rotary.compress_inv_freq.numpy()
    numpy_model = v4_numpy.V4(directory, "math", freqs)
    print_noise("transformers, float32", r, numpy_model.trunk(ids))
    pos = whole_positions(c, length)
    out = {"ids": ids.astype(np.int32), "pos": pos, "rope.freq_base": freqs[0], "rope.freq_yarn": freqs[1]}
    add_trunk(out, numpy_model, r, pos, args.brief)
    print_gaps(out)
    if args.draft:
        add_draft(out, "math.draft.", numpy_model, r["taps"], ids)
    if args.sim:
        add_sim(out, directory, freqs, ids, pos, args.draft)
    dtypes = {"float32": "F32", "int32": "I32", "int16": "I16", "int8": "I8"}
    stored = {n: release.Stored(dtypes[a.dtype.name], a.shape, a) for n, a in out.items()}
    meta = {"model": os.path.basename(os.path.normpath(args.checkpoint)), "config": json.dumps(c, sort_keys=True),
            "source": f"transformers {__import__('transformers').__version__}, torch {torch.__version__}, float32, eager"}
    if args.checkpoint not in parity_models.MODELS:         # theirs are in parity-models.sha256
        meta["sha256"] = json.dumps(file_hashes(ckpt))
    release.save_safetensors(args.out, stored, meta)
    print(f"{args.out}: {len(out)} arrays, {os.path.getsize(args.out)} bytes, {length} positions")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint")
    p.add_argument("--out", required=True)
    p.add_argument("--length", type=int)
    p.add_argument("--text")
    p.add_argument("--brief", action="store_true")
    p.add_argument("--draft", action="store_true")
    p.add_argument("--sim", action="store_true")
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.checkpoint in parity_models.MODELS:
        with tempfile.TemporaryDirectory() as d:
            parity_models.write(args.checkpoint, d)
            make(args, d)
    else:
        make(args, args.checkpoint)


if __name__ == "__main__":
    main()
