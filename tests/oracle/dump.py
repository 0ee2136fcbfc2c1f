"""Every intermediate of the numpy oracle for one sequence: to find the first place where an engine differs.

    dump.py CHECKPOINT --ids 5,17,3 --out FILE.safetensors [--mode math|sim]

CHECKPOINT is a release directory or toy | toy-clamp | kernel. Arrays, float32: x.L (streams after layer L), attn_in.L,
attn_out.L, ffn_in.L, ffn_out.L, kv.L (raw rows), comp.L (compressed rows), ikey.L, index_score.L, sel.L (0/1 per row),
router_ids.L, router_weights.L, logits, taps. Names and layouts are those of tests/golden/README.md; every position is there.
"""

import argparse
import tempfile

import numpy as np

import v4_numpy             # puts tools/tiny on the path
import parity_models
import release


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint")
    p.add_argument("--ids", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--mode", choices=("math", "sim"), default="math")
    args = p.parse_args()
    ids = np.array([int(t) for t in args.ids.split(",")])
    with tempfile.TemporaryDirectory() as d:
        if args.checkpoint in parity_models.MODELS:
            parity_models.write(args.checkpoint, d)
            args.checkpoint = d
        r = v4_numpy.V4(args.checkpoint, args.mode).trunk(ids)
    arrays = {"logits": r["logits"]}
    if r["taps"] is not None:
        arrays["taps"] = r["taps"]
    for l, rec in enumerate(r["layers"]):
        arrays.update({f"{name}.{l}": a for name, a in {"x": r["x"][l], **rec}.items()})
    release.save_safetensors(args.out, {n: release.Stored("F32", a.shape, a.astype(np.float32)) for n, a in arrays.items()})
    print(f"{args.out}: {len(arrays)} arrays, {len(ids)} positions")


if __name__ == "__main__":
    main()
