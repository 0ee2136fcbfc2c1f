#!/usr/bin/env python3
"""Train tiny-v4 on one GPU in stages limited by the clock.

    train.py --text text.npz --tokenizer tokenizer.json --out DIR --state DIR --stage trunk|qat|draft --seconds N ...

Every stage reads DIR/state.pt if there is one and writes it back. `trunk`: plain training in bf16 over 512, then 2,048, then 8,192
tokens, dense rows first, the selection from --sparse-from on. `qat`: the same with weights rounded to their stored formats and keys
and indexer rows rounded as in the engine. `draft`: the DSpark stages on the frozen, rounded trunk.
"""
import argparse
import math
import os
import time

import numpy as np
import torch
import torch._inductor.config

import data
import dspark
import model as M
import sinkhorn

T = int(os.environ.get("TINY_TOKENS", 32768))


def orthogonalise(g):
    """Newton-Schulz iteration on a batch of matrices [N,m,n]."""
    x = g.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(1, 2) if flip else x


class Optimizer:
    """Muon for the matrices inside the layers, Adam for the rest."""

    def __init__(self, named, lr, adam_lr, decay=0.1):
        self.lr, self.adam_lr, self.decay, self.step_no = lr, adam_lr, decay, 0
        self.muon, rest = {}, []
        for n, p in named:
            s = self.split(n, p)
            if s is None:
                rest.append(p)
            else:
                self.muon.setdefault(s[1:], []).append((p, s))
        self.buf = {k: [torch.zeros(s, device=p.device) for p, s in v] for k, v in self.muon.items()}
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)
        self.rest = rest

    @staticmethod
    def split(n, p):
        """The shape [N,m,n] as which a parameter is orthogonalised, or None for Adam."""
        if p.dim() == 3:
            return (2 * p.shape[0], p.shape[1] // 2, p.shape[2]) if "gate_up" in n else tuple(p.shape)
        if p.dim() < 2 or any(k in n for k in ("embed", "lm_head", "gate.weight", "hc.fn", "hc_fn", "position_bias", "weights_proj",
                                               "markov", "confidence")):
            return None
        o, i = p.shape
        k = 4 if o == 2048 else 2 if o in (1024, 256) and ("compressor" in n or "o_a" in n) else 1
        return (k, o // k, i)

    @torch.no_grad()
    def step(self, scale):
        self.step_no += 1
        torch.nn.utils.clip_grad_norm_([p for p in self.rest if p.grad is not None], 1.0, foreach=True)
        for g in self.adam.param_groups:
            g["lr"] = self.adam_lr * scale
        self.adam.step()
        for key, items in self.muon.items():
            live = [(p, s, b) for (p, s), b in zip(items, self.buf[key]) if p.grad is not None]
            if not live:
                continue
            gs = [p.grad.view(s) for p, s, _ in live]
            bs = [b for _, _, b in live]
            torch._foreach_mul_(bs, 0.95)
            torch._foreach_add_(bs, gs)
            up = torch.cat(torch._foreach_add(gs, bs, alpha=0.95))
            lr = self.lr * scale
            o = orthogonalise(up).float() * (-0.2 * math.sqrt(max(key)) * lr)
            ps = [p for p, _, _ in live]
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_add_(ps, [u.view_as(p) for u, p in zip(o.split([s[0] for _, s, _ in live]), ps)])


def to_gpu(batch, dev):
    ids, w = batch
    ids = torch.from_numpy(ids.astype(np.int64)).to(dev, non_blocking=True)
    w = torch.from_numpy(w).to(dev, non_blocking=True).float() / 16
    return ids[:, :-1].contiguous(), ids[:, 1:].flatten(), w[:, 1:].flatten()


def save(path, model, extra):
    torch.save(dict(trunk=model.state_dict(), **extra), path + ".tmp")
    os.replace(path + ".tmp", path)


def plan(args, frac):
    """Sequence length at a fraction of the stage: a fixed pattern of lengths drawn by share."""
    for upto, shares in args.curriculum:
        if frac < upto:
            return shares
    return args.curriculum[-1][1]


class Shapes(dict):
    """model.Shape by sequence length, made on first use."""

    def __init__(self, model, dev):
        self.args = model, dev

    def __missing__(self, s):
        self[s] = M.Shape(self.args[0], T // s, s, self.args[1])
        return self[s]


class Steps:
    """Gradient steps on static buffers, replayed as CUDA graphs: the GPU needs 50 ms a step, launching one by one takes 125.

    `compute(s, ids, target, w)` runs forward and backward for length s and returns tensors; one graph per length."""

    def __init__(self, params, compute, dev, log, graphs=True):
        self.params, self.compute, self.dev, self.log = params, compute, dev, log
        self.graphs = graphs and dev != "cpu"
        self.kept = {}
        for p in params:
            p.grad = torch.zeros_like(p)
        self.grads = [p.grad for p in params]

    def eager(self, key, args):
        torch._foreach_zero_(self.grads)
        return self.compute(key, *args)

    def __call__(self, key, args):
        if not self.graphs:
            return self.eager(key, args)
        if key not in self.kept:
            t0 = time.time()
            static = [a.clone() for a in args]
            try:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        self.eager(key, static)
                torch.cuda.current_stream().wait_stream(side)
                torch.cuda.synchronize()
                t1 = time.time()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = self.eager(key, static)
                self.kept[key] = static, graph, out
                self.log(f"graph for {key}: warm-up {t1 - t0:.1f} s, capture {time.time() - t1:.1f} s, "
                         f"{torch.cuda.memory_reserved() / 2**30:.0f} GiB")
            except Exception as e:
                self.log(f"no graph for {key}: {e!r}"[:600])
                torch.cuda.synchronize()
                self.graphs = False
                return self.eager(key, args)
        static, graph, out = self.kept[key]
        for d, a in zip(static, args):
            d.copy_(a)
        graph.replay()
        return out


CODES = (1.0, 17 / 16, 1.5, 2.0, 3.0, 4.0)                  # loss weights that mark kinds of tokens
NAMES = ("chat", "text", "answers", "facts", "needles", "calls")


def train_trunk(args, model, stream, dev, qat, log):
    named = list(model.named_parameters())
    opt = Optimizer(named, args.lr, args.adam_lr)
    shapes = Shapes(model, dev)
    biases = [model.model.layers[L].mlp.gate.e_score_correction_bias for L in range(M.HASH_LAYERS, M.LAYERS)]

    def compute(key, ids, target, w):
        s, sparse = key
        W = M.weights(named, qat, torch.bfloat16)
        out = M.trunk(model, W, ids, shapes[s], sim=qat, sparse=sparse)
        ce = M.FAST["token_loss"](out["logits"], target)
        lm = (ce * w).sum() / w.sum()
        kl = sum(out["kl"]) / len(out["kl"])
        text = (w == CODES[1]).float()
        even = M.balance_loss(out["routed"], torch.roll(text, 1, 0))
        (lm + kl + args.balance * even).backward()
        with torch.no_grad():
            load = out["load"][M.HASH_LAYERS:]
            hit = (out["logits"].argmax(-1) == target).float()
            by = torch.stack([torch.stack([(hit * (w == c)).sum(), (w == c).sum()]) for c in CODES])
            tl = (ce * text).sum() / text.sum()
            return dict(lm=lm.detach(), kl=kl.detach(), even=even.detach(), text=tl, by=by, share=load / load.sum(1, keepdim=True))

    steps_of = Steps([p for _, p in named], compute, dev, log, not args.no_graphs)
    start, last, tokens, steps = time.time(), 0.0, 0, 0
    rng = np.random.default_rng(args.seed)
    stats, spent = {}, {}
    while True:
        frac = (time.time() - start) / args.seconds
        if frac >= 1 or steps >= args.steps:
            break
        shares = plan(args, frac)
        s = int(rng.choice(list(shares), p=np.array(list(shares.values())) / sum(shares.values())))
        batch = stream.get(s)
        timed = steps % 50 == 49 and dev != "cpu"
        if timed:
            torch.cuda.synchronize()
            t1 = time.time()
        out = steps_of((s, qat or frac >= args.sparse_from), to_gpu(batch, dev))
        up = min(1.0, (steps + 1) / args.warmup)
        left = max(0.0, 1.0 - frac)
        scale = up * min(1.0, left / args.cooldown)
        opt.step(max(scale, 0.01))
        with torch.no_grad():                                # balance the load of the scored layers
            d = args.bias_rate * max(0.1, scale) * torch.sign(1 / M.EXPERTS - out["share"])
            for b, x in zip(biases, d):
                b.add_(x)
        steps += 1
        tokens += T
        if steps == 2:
            log(f"first steps {time.time() - start:.0f} s")
        if timed:
            torch.cuda.synchronize()
            spent.setdefault(s, []).append(time.time() - t1)
        if steps % 20 == 0:
            st = stats.setdefault(s, [0, torch.zeros(4, device=dev), torch.zeros(len(CODES), 2, device=dev)])
            st[0] += 1
            st[1] += torch.stack([out["text"], out["lm"], out["kl"], out["even"]])
            st[2] += out["by"]
        if steps % args.log_every == 0:
            lo, hi = float(out["share"].min()), float(out["share"].max())
            for s2, (n, a, by) in sorted(stats.items()):
                a = (a / n).tolist()
                h = (by[:, 0] / by[:, 1].clamp_min(1)).tolist()
                log(f"step {steps} t {time.time() - start:.0f} tok {tokens / 1e6:.1f}M S {s2} text {a[0]:.3f} lm {a[1]:.3f} kl {a[2]:.3f} even {a[3]:.3f} hit "
                    + " ".join(f"{k} {x:.3f}" for k, x in zip(NAMES, h)) + f" load {lo:.3f}-{hi:.3f} "
                    f"{1e3 * np.median(spent.get(s2, [0])):.0f} ms {tokens / (time.time() - start) / 1e3:.0f}K/s")
            stats = {}
        if time.time() - start - last > args.save_every:
            last = time.time() - start
            if steps > 50:
                save(args.state + "/state.pt", model, {})
    log(f"stage done: {steps} steps, {tokens / 1e6:.1f}M tokens, {time.time() - start:.0f} s, peak {torch.cuda.max_memory_allocated() / 2**30 if dev != 'cpu' else 0:.1f} GiB")
    return tokens


def pick_anchors(w, s, per):
    """Flat anchor indices [blocks, per], drawn inside each block of 128 by the weight of the next token."""
    pos = torch.arange(len(w), device=w.device) % s
    p = w.clamp(max=1.0) + 0.02
    g = torch.log(p) - torch.log(-torch.log(torch.rand_like(p).clamp(1e-9, 1 - 1e-6)))
    g = g.masked_fill((pos < 1) | (pos >= s - dspark.BLOCK - 1), -1e9).view(-1, 128)
    off = g.topk(per, -1).indices
    return off + 128 * torch.arange(len(off), device=w.device)[:, None]


def train_draft(args, model, stream, dev, log, draft=None):
    """DSpark stages on the frozen trunk."""
    with torch.no_grad():
        W0 = {n: w.detach() for n, w in M.weights(model.named_parameters(), True, torch.bfloat16).items()}
    fresh = dspark.new_draft(model.state_dict())
    if draft:
        fresh = {n: torch.nn.Parameter(draft["draft"][n].float()) for n in fresh}
    P = {n: torch.nn.Parameter(p.to(dev)) for n, p in fresh.items()}
    bias = draft["draft_bias"].to(dev).float() if draft else dspark.new_bias(dev)
    named = list(P.items())
    opt = Optimizer(named, args.lr, args.adam_lr)
    shapes = Shapes(model, dev)

    def compute(s, ids, at):
        with torch.no_grad():
            out = M.trunk(model, W0, ids, shapes[s], sim=True)
        W = M.weights(named, True, torch.bfloat16)
        loss, info = dspark.loss(W, bias, W0["model.embed_tokens.weight"], W0["lm_head.weight"], out["taps"], ids, out["logits"], shapes[s], at)
        loss.backward()
        return dict(info, loss=loss.detach(), share=info["load"] / info["load"].sum(1, keepdim=True))

    steps_of = Steps([p for _, p in named], compute, dev, log, not args.no_graphs)
    start, steps, acc = time.time(), 0, []
    rng = np.random.default_rng(args.seed + 7)
    while True:
        frac = (time.time() - start) / args.seconds
        if frac >= 1 or steps >= args.steps:
            break
        s = 512 if rng.random() < .6 or T < 2048 else 2048
        ids, target, w = to_gpu(stream.get(s), dev)
        out = steps_of(s, (ids, pick_anchors(w, s, args.anchors)))
        scale = min(1.0, (steps + 1) / 50) * min(1.0, max(0.0, 1 - frac) / args.cooldown)
        opt.step(max(scale, 0.01))
        bias += args.bias_rate * max(.1, scale) * torch.sign(1 / M.EXPERTS - out["share"])
        steps += 1
        if steps % 20 == 0:
            acc.append([float(out["loss"]), float(out["run"]), float(out["bce"])] + out["hit"].tolist())
            if steps % args.log_every == 0:
                a = np.mean(acc, 0)
                log(f"draft step {steps} t {time.time() - start:.0f} loss {a[0]:.3f} run {a[1]:.2f} bce {a[2]:.3f} hit "
                    + " ".join(f"{x:.3f}" for x in a[3:]) + f" load {float(out['share'].min()):.3f}-{float(out['share'].max()):.3f}")
                acc = []
    log(f"draft done: {steps} steps, {time.time() - start:.0f} s")
    return dict(draft={n: p.detach().cpu() for n, p in P.items()}, draft_bias=bias.cpu())


def parse_curriculum(text):
    """'0.5:512=1;1:512=.3,2048=.7' -> [(0.5, {512: 1.0}), (1.0, {...})]"""
    out = []
    for part in text.split(";"):
        upto, shares = part.split(":")
        out.append((float(upto), {int(a): float(b) for a, b in (x.split("=") for x in shares.split(","))}))
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--text", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--state", required=True)
    ap.add_argument("--stage", default="trunk")
    ap.add_argument("--seconds", type=float, default=60)
    ap.add_argument("--steps", type=int, default=10**9)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--adam-lr", type=float, default=2e-3)
    ap.add_argument("--warmup", type=int, default=100)
    ap.add_argument("--cooldown", type=float, default=0.4)
    ap.add_argument("--bias-rate", type=float, default=0.002)
    ap.add_argument("--sparse-from", type=float, default=0.3)
    ap.add_argument("--curriculum", type=parse_curriculum, default=parse_curriculum("0.4:512=1;0.7:512=.4,2048=.6;1:512=.3,2048=.4,8192=.3"))
    ap.add_argument("--anchors", type=int, default=32, help="draft anchors per block of 128")
    ap.add_argument("--workers", type=int, default=10)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--log-every", type=int, default=100)
    ap.add_argument("--balance", type=float, default=0.02)
    ap.add_argument("--no-graphs", action="store_true")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--cache", default="")
    ap.add_argument("--cache-out", default="")
    ap.add_argument("--save-every", type=float, default=60)
    ap.add_argument("--device", default="cuda")
    args = ap.parse_args()
    t0 = time.time()
    log = lambda s: print(f"[{time.time() - t0:.0f}] {s}", flush=True)
    os.makedirs(args.state, exist_ok=True)
    first = max(args.curriculum[0][1], key=args.curriculum[0][1].get) if args.stage != "draft" else 512
    stream = data.Stream(args.text, args.tokenizer, args.workers, args.seed, first)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._inductor.config.triton.autotune_pointwise = False
    if args.device == "cuda":
        try:
            err = sinkhorn.check()
            log(f"sinkhorn kernel: errors {err}")
            assert max(err) < 1e-4
        except Exception as e:
            log(f"sinkhorn kernel not usable: {e!r}")
            M.MIXER[0] = sinkhorn.plain
    if args.cache and os.path.exists(args.cache):
        try:
            torch.compiler.load_cache_artifacts(open(args.cache, "rb").read())
            log("compile cache loaded")
        except Exception as e:                               # only costs time
            log(f"compile cache not usable: {e}")
    M.use_compile(not args.no_compile and args.stage != "draft")
    path = args.state + "/state.pt"
    state = torch.load(path, map_location="cpu") if os.path.exists(path) else None
    tables = None
    if not state:
        freq = torch.zeros(M.VOCAB, dtype=torch.float64)
        for s in (512, 2048):
            for _ in range(30 if args.device != "cpu" else 2):
                freq += torch.from_numpy(np.bincount(stream.get(s)[0].ravel(), minlength=M.VOCAB)).double()
        tables = [M.balanced_table(freq, 10 + L) for L in range(M.HASH_LAYERS)]
        stream.want.value = first
    model = M.new_model(args.seed, tables)
    if state:
        model.load_state_dict(state["trunk"])
        log("state loaded")
    model = model.to(args.device)
    extra = {k: state[k] for k in ("draft", "draft_bias") if state and k in state}
    tokens = dict(state.get("tokens", {})) if state else {}
    if args.stage == "draft":
        extra = train_draft(args, model, stream, args.device, log, extra or None)
    else:
        tokens[args.stage] = tokens.get(args.stage, 0) + train_trunk(args, model, stream, args.device, args.stage == "qat", log)
        extra = {}                                           # a draft of another trunk is worth nothing
    save(path, model, dict(extra, tokens=tokens))
    if args.cache_out:
        blob = torch.compiler.save_cache_artifacts()
        if blob:
            open(args.cache_out, "wb").write(blob[0])
            log(f"compile cache {len(blob[0]) / 1e6:.1f} MB")
    stream.close()
    log("saved")


if __name__ == "__main__":
    main()
