"""The three draft stages (DSpark) of tiny-v4 in torch, after spec section 13.2, on top of the pieces of model.py.

Parameters are a dict; inside a stage they carry transformers' layer names under `mtp.S.`.
"""
import torch
import torch.nn.functional as F

import model as M
from model import FAST

STAGES, BLOCK, RANK, NOISE = 3, 5, 64, 4030


def new_draft(trunk_state, seed=1):
    """Fresh stages. Layers start from the trunk's last window layer shape; embeddings of the Markov head start small."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, std):
        return torch.randn(*shape, generator=g) * std

    P = {}
    for s in range(STAGES):
        for n, w in trunk_state.items():
            src = "model.layers.1."
            if not n.startswith(src) or "tid2eid" in n:
                continue
            name = f"mtp.{s}." + n[len(src):]
            if n.endswith("sinks"):
                P[name] = torch.zeros_like(w)
            elif "norm" in n and w.dim() == 1:
                P[name] = torch.ones_like(w)
            elif n.endswith("hc.scale"):
                P[name] = torch.ones_like(w)
            elif n.endswith("hc.base"):
                b = torch.zeros(24)
                b[:4] = -1.0 + 0.5 * torch.randn(4, generator=g)
                b[4:8] = 0.5 * torch.randn(4, generator=g)
                b[8:] = (3.0 * torch.eye(4)).flatten()
                P[name] = b
            elif n.endswith("hc.fn"):
                P[name] = normal(*w.shape, std=0.01)
            elif "gate.weight" in n:
                P[name] = normal(*w.shape, std=0.02)
            else:
                std = 0.6 * w.shape[-1] ** -0.5 * (0.5 if ("o_b_proj" in n or "down_proj" in n) else 1.0)
                P[name] = normal(*w.shape, std=std)
    P["mtp.0.main_proj.weight"] = normal(M.HIDDEN, len(M.TAPS) * M.HIDDEN, std=0.6 * (len(M.TAPS) * M.HIDDEN) ** -0.5)
    P["mtp.0.main_norm.weight"] = torch.ones(M.HIDDEN)
    last = f"mtp.{STAGES - 1}."
    P[last + "norm.weight"] = torch.ones(M.HIDDEN)
    P[last + "hc_head.hc_fn"] = normal(4, 4 * M.HIDDEN, std=0.01)
    P[last + "hc_head.hc_base"] = normal(4, std=0.3)
    P[last + "hc_head.hc_scale"] = torch.ones(1)
    P[last + "markov_w1.weight"] = normal(M.VOCAB, RANK, std=0.3)
    P[last + "markov_w2.weight"] = normal(M.VOCAB, RANK, std=0.02)
    P[last + "confidence.weight"] = normal(1, M.HIDDEN + RANK, std=0.02)
    return {n: torch.nn.Parameter(w.float()) for n, w in P.items()}


def new_bias(device):
    """Routing biases of the stages."""
    return torch.zeros(STAGES, M.EXPERTS, device=device)


def seed_rows(W, taps, cos, sin, sim):
    """One key row per position and stage from the trunk's taps [T, 3H]."""
    dt = W["mtp.0.main_proj.weight"].dtype
    mx = FAST["low_norm"](F.linear(taps.to(dt), W["mtp.0.main_proj.weight"]), W["mtp.0.main_norm.weight"])
    return [FAST["kv_finish"](F.linear(mx, W[f"mtp.{s}.self_attn.kv_proj.weight"]), W[f"mtp.{s}.self_attn.kv_norm.weight"], cos, sin, sim)
            for s in range(STAGES)]


class Nearby:
    """Keys of the window before each anchor, gathered one by one (any anchors)."""

    def __init__(self, at, pos):
        back = torch.arange(M.WINDOW, 0, -1, device=at.device)
        self.ok, self.look = pos[:, None] >= back, (at[:, None] - back).clamp_min(0)

    def scores(self, q, rows):
        self.k = rows[self.look]
        return torch.bmm(q, self.k.transpose(1, 2))

    def mix(self, p):
        return torch.bmm(p, self.k)


class Blocks:
    """The same for `n` anchors in every block of 128: they share the rows of their own and the previous block."""

    def __init__(self, at, sh):
        self.sh, self.n = sh, at.shape[1]
        off = (at % 128).unsqueeze(-1)
        j = torch.arange(256, device=at.device)
        ok = (j >= off) & (j < off + 128) & ((j >= 128) | ~sh.first_block[:, None, None])
        self.ok = ok.flatten(0, 1)

    def scores(self, q, rows):
        b = rows.view(self.sh.b, -1, 128, M.DIM)
        self.k = torch.cat([F.pad(b[:, :-1], (0, 0, 0, 0, 1, 0)), b], 2).flatten(0, 1)
        return torch.bmm(q.view(len(self.k), -1, M.DIM), self.k.transpose(1, 2)).view(len(q), -1, 256)

    def mix(self, p):
        return torch.bmm(p.view(len(self.k), -1, 256), self.k).view(len(p), -1, M.DIM)


def draft(W, bias, embed, head, rows, ids0, keys, pos, rope, sim):
    """Block states for A anchors. ids0 [A] decided tokens, `keys` their windows, `pos` [A] their positions.

    Returns head states before and after the norm [A*B,H], base logits [A*B,V] and the load of each stage."""
    dt = W["mtp.0.main_proj.weight"].dtype
    A, dev = len(pos), pos.device
    ids = torch.full((A, BLOCK), NOISE, device=dev)
    ids[:, 0] = ids0
    x = embed[ids.flatten()].float().unsqueeze(1).expand(-1, 4, -1).contiguous()
    where = (pos[:, None] + torch.arange(BLOCK, device=dev)).flatten()
    cos, sin = rope[0][where], rope[1][where]
    load = []
    for s in range(STAGES):
        p = f"mtp.{s}."
        u, post, comb = M.hc_pre(W, p + "attn_hc.", p + "input_layernorm.weight", x)
        _, q, kv = M.qkv(W, p + "self_attn.", u.to(dt), cos, sin, sim)
        q, own = q.view(A, BLOCK * M.HEADS, M.DIM), kv.view(A, BLOCK, M.DIM)
        past = keys.scores(q, rows[s]).float() * M.DIM ** -0.5
        past = past.masked_fill(~keys.ok[:, None], float("-inf"))
        here = torch.bmm(q, own.transpose(1, 2)).float() * M.DIM ** -0.5
        sink = W[p + "self_attn.sinks"].repeat(BLOCK)[None, :, None].expand(A, -1, 1)
        pr = torch.softmax(torch.cat([past, here, sink], -1), -1).to(dt)
        n = past.shape[-1]
        o = keys.mix(pr[..., :n].contiguous()) + torch.bmm(pr[..., n:n + BLOCK], own)
        x = FAST["hc_post"](M.project_out(W, p + "self_attn.", o.view(A * BLOCK, M.HEADS, M.DIM), cos, sin), x, post, comb)
        u, post, comb = M.hc_pre(W, p + "ffn_hc.", p + "post_attention_layernorm.weight", x)
        pick = M.pick_experts(u, W[p + "mlp.gate.weight"], bias[s])
        load.append(pick.sum(0))
        x = FAST["hc_post"](M.experts(W, p + "mlp.", u, pick, dt), x, post, comb)
    last = f"mtp.{STAGES - 1}."
    h, y = FAST["hc_head"](x, W[last + "hc_head.hc_fn"], W[last + "hc_head.hc_base"], W[last + "hc_head.hc_scale"], W[last + "norm.weight"])
    return h, y, F.linear(y.to(dt), head), torch.stack(load)


def markov(W, prev):
    """Embedding of the previous token and its bias on the logits."""
    last = f"mtp.{STAGES - 1}."
    e = W[last + "markov_w1.weight"][prev]
    return e, F.linear(e, W[last + "markov_w2.weight"])


def confidence(W, h, e):
    return F.linear(torch.cat([h, e.float()], -1), W[f"mtp.{STAGES - 1}.confidence.weight"].float()).squeeze(-1)


def loss(W, bias, embed, head, taps, ids, logits, sh, at, sim=True):
    """Draft loss at anchors `at` (flat indices [blocks of 128, n]; at least 1 and BLOCK + 1 before the end of their sequence).

    The anchor's own token is id0; target b is the trunk's distribution after position P+b. A position counts fully while the text
    itself follows the trunk's greedy choice, as it does when the engine decodes greedily."""
    flat, keys, at = ids.flatten(), Blocks(at, sh), at.flatten()
    pos = at % sh.s
    rows = seed_rows(W, taps, *sh.rope["main"], sim)
    tab = (sh.rope["main"][0][:sh.s], sh.rope["main"][1][:sh.s])           # anchors stay BLOCK short of the end
    h, _, base, load = draft(W, bias, embed, head, rows, flat[at], keys, pos, tab, sim)
    step = at[:, None] + torch.arange(BLOCK, device=at.device)                                     # positions P+b
    e, mk = markov(W, flat[step].flatten())
    lg = base.float() + mk.float()
    with torch.no_grad():
        goal = logits[step.flatten()].float()
        top = goal.argmax(-1).view(-1, BLOCK)
        follows = (top == flat[step + 1]).long()
        before = torch.cat([torch.ones_like(follows[:, :1]), follows[:, :-1]], 1).cumprod(1).float()
        w = (0.05 + 0.95 * before)
        soft = torch.softmax(goal, -1)
    kl = -(soft * torch.log_softmax(lg, -1)).sum(-1).view(-1, BLOCK)
    hit = (lg.argmax(-1).view(-1, BLOCK) == top).float()
    conf = confidence(W, h.detach(), e.detach()).view(-1, BLOCK)
    want = hit.cumprod(1)
    bce = F.binary_cross_entropy_with_logits(conf, want, reduction="none")
    total = (w * kl).sum() / w.sum() + 0.1 * (w * bce).sum() / w.sum()
    chain = (hit * before).detach()
    return total, dict(hit=(chain.sum(0) / before.sum(0)), run=hit.cumprod(1).sum(1).mean(), bce=bce.mean().detach(), load=load)


def propose(W, bias, embed, head, rows, flat, at, pos, rope, sim=True):
    """Greedy proposals [A,5] and confidences for anchors, as the engine makes them."""
    h, _, base, _ = draft(W, bias, embed, head, rows, flat[at], Nearby(at, pos), pos, rope, sim)
    base, h = base.view(len(at), BLOCK, -1), h.view(len(at), BLOCK, -1)
    prev, out, conf = flat[at], [], []
    for b in range(BLOCK):
        e, mk = markov(W, prev)
        prev = (base[:, b].float() + mk.float()).argmax(-1)
        out.append(prev)
        conf.append(torch.sigmoid(confidence(W, h[:, b], e)))
    return torch.stack(out, 1), torch.stack(conf, 1)
