#!/usr/bin/env python3
"""Compare model.py and dspark.py with the numpy oracle on an exported checkpoint: check.py CHECKPOINT ORACLE_DIR [TEXT]

Runs one prompt in `sim` mode; prints the largest relative logit error, agreement of the picks and of the draft."""
import sys

import numpy as np
import torch
from tokenizers import Tokenizer

import dspark
import export
import model as M


def main():
    ckpt, oracle = sys.argv[1:3]
    sys.path.insert(0, oracle)
    import v4_numpy
    o = v4_numpy.V4(ckpt, "sim")
    s = export.load(ckpt)
    m = M.new_model()
    m.load_state_dict(s["trunk"])
    text = open(sys.argv[3] if len(sys.argv) > 3 else "eval/heldout.txt", encoding="utf-8").read()
    ids = ([0] + Tokenizer.from_file(ckpt + "/tokenizer.json").encode(text[:4000]).ids)[:640]
    ref = o.trunk(np.array(ids))
    with torch.no_grad():
        W = M.weights(m.named_parameters(), True, torch.float32)
        sh = M.Shape(m, 1, 640, "cpu")
        out = M.trunk(m, W, torch.tensor([ids]), sh, sim=True, dtype=torch.float32)
        got = out["logits"].numpy()
        err = np.abs(got - ref["logits"]).max(1) / np.abs(ref["logits"]).max(1)
        print(f"trunk: logits median {np.median(err):.1e} worst {err.max():.1e}, argmax equal {(got.argmax(1) == ref['logits'].argmax(1)).mean():.4f}, "
              f"taps {np.abs(out['taps'].numpy() - ref['taps']).max() / np.abs(ref['taps']).max():.1e}")
        Wd = M.weights(list({n: torch.nn.Parameter(p.float()) for n, p in s["draft"].items()}.items()), True, torch.float32)
        at = torch.tensor([1, 5, 100, 129, 300, 511])
        rows = dspark.seed_rows(Wd, out["taps"], *sh.rope["main"], True)
        d, conf = dspark.propose(Wd, s["draft_bias"].float(), W["model.embed_tokens.weight"], W["lm_head.weight"], rows, torch.tensor(ids), at, at,
                                 M.rope_tables(m, 700, "cpu")["main"])
        for i, n in enumerate(at.tolist()):
            r = o.draft(ref["taps"], n, ids[n])
            print(f"draft at {n}: {d[i].tolist()} oracle {np.array(r['ids']).tolist()} conf {conf[i].numpy().round(4)} oracle "
                  f"{(1 / (1 + np.exp(-np.array(r['conf'])))).round(4)}")


if __name__ == "__main__":
    main()
