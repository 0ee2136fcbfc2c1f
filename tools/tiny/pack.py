#!/usr/bin/env python3
"""Split a training state into bf16 files of at most 15 MB, or join them: pack.py split state.pt DIR [trunk] | pack.py join DIR state.pt"""
import glob
import os
import sys

import torch


def main():
    what, src, dst = sys.argv[1:4]
    if what == "split":
        s = torch.load(src, map_location="cpu")
        if sys.argv[4:] == ["trunk"]:
            s = {k: v for k, v in s.items() if "draft" not in k}
        flat = {f"trunk/{n}": p for n, p in s["trunk"].items()}
        flat.update({f"draft/{n}": p for n, p in s.get("draft", {}).items()})
        if "draft_bias" in s:
            flat["bias/draft"] = s["draft_bias"]
        os.makedirs(dst, exist_ok=True)
        part, size, k = {}, 0, 0
        for n, p in flat.items():
            small = "tid2eid" in n
            p = p.short() if small else p.bfloat16() if p.numel() > 5000 and "position_bias" not in n else p
            if size + p.nbytes > 14.5e6:
                torch.save(part, f"{dst}/part{k}.pt")
                part, size, k = {}, 0, k + 1
            part[n] = p.clone()
            size += p.nbytes
        part["tokens"] = s.get("tokens", {})
        torch.save(part, f"{dst}/part{k}.pt")
    else:
        out = dict(trunk={}, draft={}, tokens={})
        for f in sorted(glob.glob(f"{src}/part*.pt")):
            for n, p in torch.load(f, map_location="cpu").items():
                if n == "tokens":
                    out["tokens"] = p
                    continue
                kind, name = n.split("/", 1)
                p = p.long() if "tid2eid" in n else p.float()
                if kind == "bias":
                    out["draft_bias"] = p
                else:
                    out[kind][name] = p
        if not out["draft"]:
            del out["draft"]
        torch.save(out, dst)


if __name__ == "__main__":
    main()
