#!/usr/bin/env python3
"""Write a trained state as a release checkpoint, or read one back: export.py state.pt tokenizer.json OUT_DIR"""
import json
import os
import shutil
import sys

import torch

import model as M
import release

DRAFT = {"main_proj.weight": "main_proj.weight", "main_norm.weight": "main_norm.weight", "norm.weight": "norm.weight",
         "hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base", "hc_head.hc_scale": "hc_head_scale",
         "markov_w1.weight": "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
         "confidence.weight": "confidence_head.proj.weight"}


def tensors(state):
    """Release names -> float32 (or int64) arrays."""
    out = release.hf_to_release({n: p.numpy() for n, p in state["trunk"].items()})
    layers, rest = {}, {}
    for n, p in state["draft"].items():
        _, s, tail = n.split(".", 2)
        if tail in DRAFT:
            rest[f"mtp.{s}.{DRAFT[tail]}"] = p.float().numpy()
        else:
            layers[f"model.layers.{s}.{tail}"] = p.float().numpy()
    for s, b in enumerate(state["draft_bias"].float().numpy()):
        layers[f"model.layers.{s}.mlp.gate.e_score_correction_bias"] = b
    out.update({"mtp" + n[len("layers"):]: v for n, v in release.hf_to_release(layers).items()})
    out.update(rest)
    return out


def load(directory):
    """A checkpoint as a training state: the stored values, which rounding again leaves as they are."""
    c = release.Checkpoint(directory)
    arrays = {n: c.array(n) for n in c.names()}
    state = {"trunk": {n: torch.from_numpy(v.copy()) for n, v in release.release_to_hf(arrays).items()}, "draft": {}}
    back, layers = {v: k for k, v in DRAFT.items()}, {}
    for n, v in arrays.items():
        if n.startswith("mtp."):
            _, s, tail = n.split(".", 2)
            if tail in back:
                state["draft"][f"mtp.{s}.{back[tail]}"] = torch.from_numpy(v.copy())
            else:
                layers["layers." + n[len("mtp."):]] = v
    bias = {}
    for n, v in release.release_to_hf(layers).items():
        if n.endswith("e_score_correction_bias"):
            bias[int(n.split(".")[2])] = torch.from_numpy(v.copy())
        else:
            state["draft"]["mtp." + n[len("model.layers."):]] = torch.from_numpy(v.copy())
    state["draft_bias"] = torch.stack([bias[s] for s in sorted(bias)])
    return state


def main():
    state = torch.load(sys.argv[1], map_location="cpu")
    tok, out = sys.argv[2:4]
    os.makedirs(out, exist_ok=True)
    release.export(tensors(state), M.RELEASE_CONFIG, out, shards=2)
    release.Checkpoint(out).check()
    if os.path.abspath(tok) != os.path.abspath(f"{out}/tokenizer.json"):
        shutil.copy(tok, f"{out}/tokenizer.json")
    with open(f"{out}/generation_config.json", "w") as f:
        f.write(json.dumps(dict(_from_model_config=True, bos_token_id=0, eos_token_id=1, do_sample=True, temperature=1.0, top_p=1.0,
                                transformers_version="5.17.0"), indent=2) + "\n")
    print(sum(os.path.getsize(f"{out}/{f}") for f in os.listdir(out)) / 1e6, "MB in", sorted(os.listdir(out)))


if __name__ == "__main__":
    main()
