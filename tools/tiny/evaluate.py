#!/usr/bin/env python3
"""Measure a trained state in torch, weights as stored, keys and indexer rows rounded as in the engine, greedy.

    evaluate.py --state state.pt|CHECKPOINT --tokenizer tokenizer.json --eval tools/tiny/eval --out report.json
"""
import argparse
import json
import os
import re
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import dspark
import export
import model as M

D = "｜DSML｜"


class Runner:
    def __init__(self, model, dev, dtype, tok, limit=65536):
        self.model, self.dev, self.dtype, self.tok, self.limit = model, dev, dtype, tok, limit
        with torch.no_grad():
            self.W = {n: w.detach() for n, w in M.weights(model.named_parameters(), True, dtype).items()}
        self.shapes = {}

    def run(self, ids, logits=True):
        """Forward over padded ids [B,S]."""
        key = tuple(ids.shape)
        if key not in self.shapes:
            self.shapes = {key: M.Shape(self.model, *key, self.dev)}
        with torch.no_grad():
            return M.trunk(self.model, self.W, ids, self.shapes[key], sim=True, dtype=self.dtype, want_logits=logits), self.shapes[key]

    def generate(self, prompts, new, stop=1):
        """Greedy continuations; recomputes the whole batch for every token, which is quick enough at this size."""
        out = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        at = 0
        while at < len(order):
            longest, n = 0, 0
            while at + n < len(order):
                s = -(-(len(prompts[order[at + n]]) + new) // 128) * 128
                if n and s * (n + 1) > self.limit:
                    break
                longest, n = s, n + 1
            group = order[at:at + n]
            at += n
            ids = torch.full((n, longest), 2, device=self.dev)
            length = torch.tensor([len(prompts[i]) for i in group], device=self.dev)
            for k, i in enumerate(group):
                ids[k, :len(prompts[i])] = torch.tensor(prompts[i], device=self.dev)
            done = torch.zeros(n, dtype=torch.bool, device=self.dev)
            rows = torch.arange(n, device=self.dev)
            for _ in range(new):
                o, _ = self.run(ids, logits=False)
                y = o["y"].view(n, longest, -1)[rows, length - 1]
                nxt = F.linear(y.to(self.dtype), self.W["lm_head.weight"]).float().argmax(-1)
                for k, i in enumerate(group):
                    if not done[k]:
                        out[i].append(int(nxt[k]))
                done |= nxt == stop
                if done.all():
                    break
                ids[rows, length] = torch.where(done, ids[rows, length], nxt)
                length = length + (~done).long()
        return out


def parse_call(text):
    """(name, arguments) of the first call in a completion, or None."""
    m = re.search(rf'<{D}tool_calls>\n<{D}invoke name="([^"]*)">\n(.*?)\n</{D}invoke>\n</{D}tool_calls>', text, re.S)
    if not m:
        return None
    args = {}
    rest = re.sub(rf'<{D}parameter name="([^"]*)" string="(true|false)">(.*?)</{D}parameter>',
                  lambda p: args.__setitem__(p[1], (p[2], p[3])) or "", m[2], flags=re.S)
    if rest.strip():
        return None
    out = {}
    for k, (s, v) in args.items():
        try:
            out[k] = v if s == "true" else json.loads(v)
        except ValueError:
            return None
    return m[1], out


def fits(tools, call):
    """Does a parsed call name an offered tool and satisfy its schema?"""
    if not call:
        return False
    for t in tools:
        if t["name"] == call[0]:
            props = t["parameters"]["properties"]
            kinds = dict(string=str, boolean=bool, array=list)
            for k, v in call[1].items():
                if k not in props:
                    return False
                kind = props[k]["type"]
                if kind == "integer":
                    if not isinstance(v, int) or isinstance(v, bool):
                        return False
                elif not isinstance(v, kinds[kind]):
                    return False
            return all(k in call[1] for k in t["parameters"]["required"])
    return False


def lines(path):
    return [json.loads(s) for s in open(path, encoding="utf-8")]


def starts(run, items, new):
    """How many completions begin with `expect`; also returns them."""
    got = run.generate([run.tok.encode(x["prompt"]).ids for x in items], new)
    texts = [run.tok.decode(g, skip_special_tokens=False) for g in got]
    return [t.startswith(x["expect"]) for t, x in zip(texts, items)], texts


def heldout(run, path, length=2048):
    """Mean loss per token and bits per byte over the held-out documents, packed; also each expert's share per layer."""
    ids, size = [], 0
    for d in open(path, encoding="utf-8").read().split("\f"):
        ids += [0] + run.tok.encode(d).ids + [1]
        size += len(d.encode())
    n = len(ids) // length
    x = torch.tensor(ids[:n * length], device=run.dev).view(n, length)
    total, load = 0.0, 0
    for i in range(0, n, 8):
        o, _ = run.run(x[i:i + 8])
        lg = o["logits"].view(-1, length, M.VOCAB)[:, :-1].float()
        total += float(F.cross_entropy(lg.flatten(0, 1), x[i:i + 8, 1:].flatten(), reduction="sum"))
        load = load + o["load"]
    loss = total / (n * (length - 1))
    return dict(loss=loss, bits_per_byte=loss / 0.6931472 * len(ids) / size, share=(load / load.sum(1, keepdim=True)).tolist())


def draft_report(run, extra, items, new=96):
    """Greedy text, then the speculative walk over it."""
    P = {n: p.to(run.dev) for n, p in extra["draft"].items()}
    with torch.no_grad():
        Wd = M.weights(P.items(), True, run.dtype)
    bias = extra["draft_bias"].to(run.dev)
    report, load = {}, 0
    for kind in ("chat", "code"):
        prompts = [run.tok.encode(x["prompt"]).ids for x in items if x["kind"] == kind]
        outs = run.generate(prompts, new)
        hits, counts, accepted, blocks = torch.zeros(5), 0, 0, 0
        by_pos, conf_ok = torch.zeros(5), []
        for p, g in zip(prompts, outs):
            seq = p + g
            s = -(-len(seq) // 128) * 128
            ids = torch.full((1, s), 2, device=run.dev)
            ids[0, :len(seq)] = torch.tensor(seq, device=run.dev)
            o, sh = run.run(ids, logits=False)
            at = torch.arange(len(p), len(seq) - 1, device=run.dev)         # id0 = seq[P] is decided, P runs next
            if not len(at):
                continue
            with torch.no_grad():
                rows = dspark.seed_rows(Wd, o["taps"], *sh.rope["main"], True)
                tab = M.rope_tables(run.model, s + 8, run.dev)["main"]
                d, conf = dspark.propose(Wd, bias, run.W["model.embed_tokens.weight"], run.W["lm_head.weight"], rows, ids[0], at, at, tab)
            d, conf = d.cpu(), conf.cpu()
            run_len = []
            for k, P0 in enumerate(at.tolist()):
                real = seq[P0 + 1:P0 + 6]
                a = 0
                while a < len(real) and int(d[k, a]) == real[a]:
                    a += 1
                if len(real) == 5:
                    counts += 1
                    hits += torch.tensor([float(int(d[k, b]) == real[b]) for b in range(5)])
                    for b in range(5):
                        conf_ok.append((float(conf[k, b]), a > b))
                run_len.append(a)
            i = 0
            while i < len(run_len):                                          # the engine's walk
                if len(run_len) - i >= 5:                                    # whole blocks only
                    accepted += run_len[i]
                    blocks += 1
                    for b in range(run_len[i]):
                        by_pos[b] += 1
                i += run_len[i] + 1
        brier = sum((c - ok) ** 2 for c, ok in conf_ok) / max(1, len(conf_ok))
        report[kind] = dict(mean_accepted=accepted / max(1, blocks), blocks=blocks, accepted_by_position=(by_pos / max(1, blocks)).tolist(),
                            right_by_position=(hits / max(1, counts)).tolist(), confidence_brier=brier)
        report[kind + "_sample"] = [run.tok.decode(g, skip_special_tokens=False) for g in outs[:4]]
    return report


def evaluate(model, extra, tok, where, dev, dtype, log=print):
    M.use_compile(False)
    run = Runner(model, dev, dtype, tok)
    rep, t0 = {}, time.time()
    for name in ("facts", "facts-chat"):
        ok, texts = starts(run, lines(f"{where}/{name}.jsonl"), 12)
        rep[name] = dict(right=sum(ok), of=len(ok), wrong=[t for t, o in zip(texts, ok) if not o], first=texts[0])
    log(f"facts {rep['facts']['right']}/{rep['facts']['of']} chat {rep['facts-chat']['right']} {time.time() - t0:.0f} s")
    items = lines(f"{where}/needles.jsonl")
    for size in (500, 1500, 5000):
        part = [x for x in items if x["size"] == size]
        ok, texts = starts(run, part, 14)
        rep[f"needles-{size}"] = dict(right=sum(ok), of=len(ok), wrong=[[x["expect"], t] for x, t, o in zip(part, texts, ok) if not o][:8])
        log(f"needles {size}: {sum(ok)}/{len(ok)} {time.time() - t0:.0f} s")
    items = lines(f"{where}/tools.jsonl")
    got = run.generate([tok.encode(x["prompt"]).ids for x in items], 110)
    texts = [tok.decode(g, skip_special_tokens=False) for g in got]
    calls = [parse_call(t) for t in texts]
    valid = [fits(x["tools"], c) for x, c in zip(items, calls)]
    exact = [c == (x["call"]["name"], x["call"]["arguments"]) for x, c in zip(items, calls)]
    rep["tools"] = dict(valid=sum(valid), exact=sum(exact), of=len(items), wrong=[[x["call"], t] for x, t, v in zip(items, texts, exact) if not v][:8])
    log(f"tools valid {sum(valid)} exact {sum(exact)} of {len(items)} {time.time() - t0:.0f} s")
    rep["heldout"] = heldout(run, f"{where}/heldout.txt")
    share = torch.tensor(rep["heldout"]["share"])
    log(f"heldout loss {rep['heldout']['loss']:.3f} bits/byte {rep['heldout']['bits_per_byte']:.3f}; expert share min "
        + " ".join(f"{x:.3f}" for x in share.amin(1)) + " max " + " ".join(f"{x:.3f}" for x in share.amax(1)) + f" {time.time() - t0:.0f} s")
    if extra.get("draft"):
        rep["draft"] = draft_report(run, extra, lines(f"{where}/draft.jsonl"))
        for k in ("chat", "code"):
            d = rep["draft"][k]
            log(f"draft {k}: accepted {d['mean_accepted']:.2f} of 5 over {d['blocks']} blocks, right by position "
                + " ".join(f"{x:.2f}" for x in d["right_by_position"]) + f", Brier {d['confidence_brier']:.3f} {time.time() - t0:.0f} s")
    return rep


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--state", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--eval", required=True)
    ap.add_argument("--out", default="")
    ap.add_argument("--device", default="cuda")
    args = ap.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    state = export.load(args.state) if os.path.isdir(args.state) else torch.load(args.state, map_location="cpu")
    model = M.new_model()
    model.load_state_dict(state["trunk"])
    tok = Tokenizer.from_file(args.tokenizer)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    rep = evaluate(model.to(args.device), state, tok, args.eval, args.device, dtype, lambda s: print(s, flush=True))
    rep["tokens"] = state.get("tokens")
    if args.out:
        json.dump(rep, open(args.out, "w"), ensure_ascii=False, indent=1)


if __name__ == "__main__":
    main()
