"""tiny-v4 in torch: transformers' DeepSeek-V4 holds the parameters, this file runs them fast.

The forward pass is the same mathematics as transformers' (test: `python model.py`), arranged for training: window attention by
blocks of 128, all experts as one wide matrix product with the unpicked ones weighted zero, and on request the release's rounding
of keys and indexer rows (`sim`). Tensors are flat over tokens, T = batch x length; length is a multiple of 128.
"""
import math

import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import quant
import sinkhorn

LAYERS, HIDDEN, HEADS, DIM, ROPE, WINDOW, EXPERTS, TOPK, WIDTH = 6, 256, 4, 512, 64, 128, 16, 4, 128
RATIOS = [0, 0, 4, 128, 4, 128]
INDEX_HEADS, INDEX_DIM, INDEX_TOPK, HASH_LAYERS, VOCAB = 4, 128, 64, 2, 4096
EPS = 1e-6
TAPS = [3, 4, 5]

RELEASE_CONFIG = dict(
    architectures=["DeepseekV4ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0, eos_token_id=1,
    compress_ratios=RATIOS + [0, 0, 0], compress_rope_theta=160000, dspark_block_size=5, dspark_markov_rank=64,
    dspark_noise_token_id=4030, dspark_target_layer_ids=TAPS, expert_dtype="fp4", hc_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20,
    head_dim=DIM, hidden_act="silu", hidden_size=HIDDEN, index_head_dim=INDEX_DIM, index_n_heads=INDEX_HEADS,
    index_topk=INDEX_TOPK, initializer_range=0.02, max_position_embeddings=65536, model_type="deepseek_v4",
    moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=HEADS,
    num_experts_per_tok=TOPK, num_hash_layers=HASH_LAYERS, num_hidden_layers=LAYERS, num_key_value_heads=1,
    num_nextn_predict_layers=1, o_groups=2, o_lora_rank=128, q_lora_rank=128, qk_rope_head_dim=ROPE,
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0",
                             weight_block_size=[128, 128]),
    rms_norm_eps=1e-6,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=16, original_max_position_embeddings=4096, type="yarn"),
    rope_theta=10000, routed_scaling_factor=1.5, scoring_func="sqrtsoftplus", sliding_window=WINDOW, swiglu_limit=10.0,
    tie_word_embeddings=False, topk_method="noaux_tc", torch_dtype="bfloat16", use_cache=True, vocab_size=VOCAB)


def hf_config():
    """The release's config.json as transformers wants it."""
    c = {k: v for k, v in RELEASE_CONFIG.items()
         if not k.startswith("dspark") and k not in ("quantization_config", "expert_dtype", "topk_method", "torch_dtype", "architectures")}
    c["compress_ratios"] = RATIOS
    c["rope_scaling"] = dict(c["rope_scaling"], rope_type="yarn")
    cfg = DeepseekV4Config(**c)
    assert cfg.rope_parameters["compress"]["rope_type"] == "yarn" and cfg.rope_parameters["compress"]["attention_factor"] == 1.0
    return cfg


def new_model(seed=0, tid2eid=None):
    """A freshly initialised DeepseekV4ForCausalLM in float32."""
    torch.manual_seed(seed)
    cfg = hf_config()
    cfg._attn_implementation = "eager"
    m = DeepseekV4ForCausalLM(cfg).float()
    with torch.no_grad():
        for n, p in m.named_parameters():
            if n.endswith("norm.weight") or "layernorm" in n or n.endswith("sinks"):
                continue
            if n.endswith(("hc.fn", "hc_fn")):
                p.normal_(0, 0.01)
            elif n.endswith("hc.base"):
                p.zero_()
                p[:4] = -1.0 + 0.5 * torch.randn(4)
                p[4:8] = 0.5 * torch.randn(4)
                p[8:].view(4, 4).copy_(3.0 * torch.eye(4))
            elif n.endswith("hc_base"):
                p.copy_(0.3 * torch.randn(4))
            elif n.endswith("scale") or n.endswith("hc_scale"):
                p.fill_(1.0)
            elif n.endswith("position_bias"):
                p.normal_(0, 0.02)
            elif n == "model.embed_tokens.weight":
                p.normal_(0, 0.5)
            elif n == "lm_head.weight" or "gate.weight" in n:
                p.normal_(0, 0.02)
            else:
                p.normal_(0, 0.6 * p.shape[-1] ** -0.5 * (0.5 if ("o_b_proj" in n or "down_proj" in n) else 1.0))
        for layer in range(HASH_LAYERS):
            g = m.model.layers[layer].mlp.gate
            g.tid2eid.copy_(tid2eid[layer] if tid2eid is not None else
                            torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(VOCAB)]))
    return m


def balanced_table(freq, seed):
    """Experts per token id so that every expert gets the same share of `freq`: heavy tokens first, least loaded experts."""
    g = torch.Generator().manual_seed(seed)
    load = torch.zeros(EXPERTS, dtype=torch.float64)
    table = torch.zeros(VOCAB, TOPK, dtype=torch.long)
    for t in torch.argsort(freq, descending=True).tolist():
        noise = torch.rand(EXPERTS, generator=g, dtype=torch.float64) * 1e-3 * (load.mean() + 1e-9)
        pick = torch.topk(-(load + noise), TOPK).indices
        table[t] = pick[torch.randperm(TOPK, generator=g)]
        load[pick] += float(freq[t]) + 1e-9
    return table


def rope_tables(model, length, device):
    """cos, sin [length, 32] for the two rope kinds."""
    pos = torch.arange(length, device=device).unsqueeze(0)
    rot = model.model.rotary_emb
    out = {}
    for kind in ("main", "compress"):
        f = getattr(rot, f"{kind}_inv_freq").to(device).float()
        a = pos[0, :, None].float() * f[None]
        out[kind] = (a.cos(), a.sin())
    return out


# ---------------------------------------------------------------- pieces, each compiled on its own

def rms(x, w=None):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return y if w is None else y * w


def rope(x, cos, sin, inverse=False):
    """x [..., D] float, cos/sin broadcastable [..., 32]; rotates the last 64."""
    a, b = x[..., :-ROPE], x[..., -ROPE:].unflatten(-1, (-1, 2))
    u, v = b[..., 0], b[..., 1]
    if inverse:
        sin = -sin
    return torch.cat([a, torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(-2)], -1)


def key_round(x, sim):
    """A8(64) on the first 448 dims."""
    return torch.cat([quant.a8(x[..., :-ROPE], 64), x[..., -ROPE:]], -1) if sim else x


def hc_mix(x, fn, base, scale, norm):
    """Streams [T,4,H] -> normed sublayer input [T,H], post [T,4], logits of the stream mixer [T,4,4]."""
    flat = x.flatten(1)
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    u = (pre.unsqueeze(-1) * x).sum(1)
    return rms(u, norm), post, (m[:, 8:] * scale[2] + base[8:]).unflatten(1, (4, 4))


def hc_pre(W, p, norm, x):
    """One hyper-connection site: sublayer input, post, mixer."""
    u, post, logits = FAST["hc_mix"](x, W[p + "fn"], W[p + "base"], W[p + "scale"], W[norm])
    return u, post, MIXER[0](logits)


def hc_post(f, x, post, c):
    """Streams after the sublayer: post * f + C^T x."""
    y = post.unsqueeze(-1) * f.float().unsqueeze(1)
    for j in range(4):
        y = y + c[:, j, :, None] * x[:, j, None, :]
    return y


def hc_head(x, fn, base, scale, norm):
    flat = x.flatten(1)
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    p = torch.sigmoid(m * scale + base) + EPS
    u = (p.unsqueeze(-1) * x).sum(1)
    return u, rms(u, norm)


def q_finish(q, cos, sin):
    """Per-head norm and rope: q [T,NH,D]."""
    return rope(rms(q.float()), cos[:, None], sin[:, None]).to(q.dtype)


def kv_finish(kv, norm, cos, sin, sim):
    return key_round(rope(rms(kv.float(), norm), cos, sin), sim).to(kv.dtype)


def pool4(c, z, ape, norm, cos, sin, first):
    """Overlapping ratio-4 compressor. c, z [G,4,2d]; `first` [G,1,1] marks a sequence's group 0. -> rows [G,d], before rounding."""
    d = c.shape[-1] // 2
    z = z.float() + ape
    c = c.float()
    pz = torch.roll(z[..., :d], 1, 0).masked_fill(first, float("-inf"))
    pc = torch.roll(c[..., :d], 1, 0).masked_fill(first, 0.0)
    w = torch.softmax(torch.cat([pz, z[..., d:]], 1), 1)
    return rope(rms((w * torch.cat([pc, c[..., d:]], 1)).sum(1), norm), cos, sin)


def pool128(c, z, ape, norm, cos, sin):
    w = torch.softmax(z.float() + ape, 1)
    return rope(rms((w * c.float()).sum(1), norm), cos, sin)


def index_query(q, cos, sin, h, sim):
    """Indexer heads [T,IH,ID] after rope, rotated and rounded if `sim`."""
    x = rope(q.float(), cos[:, None], sin[:, None])
    return (quant.a4(F.linear(x, h)) if sim else x).to(q.dtype)


def index_key(row, h, dtype, sim):
    return (quant.a4(F.linear(row, h)) if sim else row).to(dtype)


def low_norm(x, w):
    return rms(x.float(), w).to(x.dtype)


def index_score(s, w):
    """s [T,IH,G] dot products, w [T,IH] -> [T,G]."""
    return (torch.relu(s.float()) * w.float().unsqueeze(-1)).sum(1) * (INDEX_DIM ** -0.5 * INDEX_HEADS ** -0.5)


def window_bias(sw, first):
    """Additive mask over [T,NH,256] scores; block rows, keys of the previous and the same block."""
    i = torch.arange(128, device=sw.device)[:, None]
    j = torch.arange(256, device=sw.device)[None]
    ok = (j > i) & (j <= i + 128)
    ok = ok[None] & (~first[:, None, None] | (j >= 128)[None])          # [blocks,128,256]
    return ok.flatten(0, 1).unsqueeze(1)


def attend_window(sw, first, sink):
    s = (sw.float() * DIM ** -0.5).masked_fill(~window_bias(sw, first), float("-inf"))
    m = torch.maximum(s.amax(-1, keepdim=True), sink[None, :, None]).detach()
    e = torch.exp(s - m)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(sink[None, :, None] - m))).to(sw.dtype)


def attend_both(sw, sc, first, seen, keep, sink):
    """Joint softmax over window and compressed rows. seen [T] = number of visible rows, keep [T,G] selection or None.

    Returns probabilities of both parts and each row's share of the attention as if all visible rows were selected."""
    s = (sw.float() * DIM ** -0.5).masked_fill(~window_bias(sw, first), float("-inf"))
    g = torch.arange(sc.shape[-1], device=sc.device)
    visible = (g[None] < seen[:, None]).unsqueeze(1)
    c = (sc.float() * DIM ** -0.5).masked_fill(~visible, float("-inf"))
    sk = sink[None, :, None]
    m = torch.maximum(torch.maximum(s.amax(-1, keepdim=True), c.amax(-1, keepdim=True)), sk).detach()
    e, ec, es = torch.exp(s - m), torch.exp(c - m), torch.exp(sk - m)
    mass = None
    if keep is not None:
        full = (ec / (e.sum(-1, keepdim=True) + ec.sum(-1, keepdim=True) + es)).sum(1).detach()
        mass = full / (full.sum(-1, keepdim=True) + 1e-9)
        ec = ec * keep.unsqueeze(1)
    z = 1.0 / (e.sum(-1, keepdim=True) + ec.sum(-1, keepdim=True) + es)
    return (e * z).to(sw.dtype), (ec * z).to(sw.dtype), mass


def index_loss(score, mass, seen):
    """Mean KL(mass || softmax(score)) over queries that see rows."""
    g = torch.arange(score.shape[-1], device=score.device)
    logq = torch.log_softmax(score.masked_fill(g[None] >= seen[:, None], -1e30), -1)
    kl = (mass * (torch.log(mass + 1e-9) - logq)).sum(-1)
    ok = (seen > 0).float()
    return (kl * ok).sum() / ok.sum().clamp_min(1.0)


def out_finish(o, cos, sin):
    return rope(o.float(), cos[:, None], sin[:, None], inverse=True).to(o.dtype)


def route(x, gate, pick):
    """Dense routing weights [T,E] from picks [T,E] (0/1)."""
    s = torch.sqrt(F.softplus(F.linear(x, gate), threshold=1e6)) * pick
    return s / s.sum(-1, keepdim=True) * 1.5


def scores(x, gate):
    return torch.sqrt(F.softplus(F.linear(x, gate), threshold=1e6))


def swiglu(h, w):
    """h [T,17,2I], w [T,17] -> [T,17*I]."""
    a, b = h.float().chunk(2, -1)
    return (F.silu(a.clamp(max=10.0)) * b.clamp(-10.0, 10.0) * w.unsqueeze(-1)).flatten(1).to(h.dtype)


def token_loss(logits, target):
    return F.cross_entropy(logits.float(), target, reduction="none")


PIECES = {f.__name__: f for f in (hc_mix, hc_post, hc_head, q_finish, kv_finish, pool4, pool128, index_query, index_key, low_norm, index_score,
                                  attend_window, attend_both, index_loss, out_finish, route, swiglu, token_loss, key_round)}
EAGER = ("hc_head", "index_key", "low_norm", "route", "key_round")        # too little work to be worth compiling
FAST, MIXER = {}, [sinkhorn.sinkhorn]


def use_compile(on):
    """Run the pieces through torch.compile, or plainly."""
    for n, f in PIECES.items():
        FAST[n] = torch.compile(f, dynamic=False) if on and n not in EAGER else f


use_compile(False)

FP8 = ("q_a_proj", "q_b_proj", "self_attn.kv_proj", "o_a_proj", "o_b_proj", "shared_experts")
F32 = ("hc.fn", "hc.base", "hc.scale", "hc_fn", "hc_base", "hc_scale", "position_bias", "sinks")


def stored_as(name):
    """fp8, fp4, bf16 or f32 for a parameter name of transformers or of the draft."""
    if any(k in name for k in F32):
        return "f32"
    if ".experts." in name:
        return "fp4"
    if any(k in name for k in FP8) or "main_proj" in name:
        return "fp8"
    return "bf16"


def rounded(named):
    """Stored values of all parameters; equal shapes are rounded together."""
    out, groups = {}, {}
    with torch.no_grad():
        for n, p in named:
            kind = stored_as(n)
            if kind == "f32":
                out[n] = p
            elif kind == "bf16":
                out[n] = p.to(torch.bfloat16).float()
            else:
                groups.setdefault((kind, p.shape), []).append((n, p))
        for (kind, _), items in groups.items():
            q = (quant.fp8_weight if kind == "fp8" else quant.fp4_weight)(torch.stack([p for _, p in items]))
            out.update({n: q[i] for i, (n, _) in enumerate(items)})
    return out


def weights(named, qat, dtype):
    """Working copies of the parameters: rounded to their stored formats if `qat`, matrices in `dtype`."""
    named = list(named)
    q = rounded(named) if qat else None
    out = {}
    for n, p in named:
        small = stored_as(n) == "f32" or p.dim() < 2 or "gate.weight" in n
        d = torch.float32 if small else dtype
        out[n] = quant.Through.apply(p, q[n], d) if qat and stored_as(n) != "f32" else p.to(d)
    return out


class Shape:
    """Everything that depends on batch and length only."""

    def __init__(self, model, batch, length, device):
        assert length % 128 == 0
        self.b, self.s, self.t = batch, length, batch * length
        tab = rope_tables(model, length, device)
        self.rope = {k: (c.repeat(batch, 1), s.repeat(batch, 1)) for k, (c, s) in tab.items()}
        c, s = tab["compress"]
        self.rope_row = {r: (c[::r].repeat(batch, 1), s[::r].repeat(batch, 1)) for r in (4, 128)}
        self.first_block = (torch.arange(self.t // 128, device=device) % (length // 128)) == 0
        self.first_group = ((torch.arange(self.t // 4, device=device) % (length // 4)) == 0)[:, None, None]
        pos = torch.arange(length, device=device).repeat(batch)
        self.seen = {r: (pos + 1) // r for r in (4, 128)}
        self.had = quant.hadamard(INDEX_DIM, device)


def attention(W, p, x, qr, q, kv, sh, ratio, sim, sparse):
    """Attention core of one layer: returns the heads' outputs [T,NH,D], index loss and selection."""
    f = FAST
    b, s, t = sh.b, sh.s, sh.t
    blocks = kv.view(b, s // 128, 128, DIM)
    prev = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
    kw = torch.cat([prev, blocks], 2).flatten(0, 1)                                     # [blocks,256,D]
    qw = q.view(t // 128, 128 * HEADS, DIM)
    sw = torch.bmm(qw, kw.transpose(1, 2)).view(t, HEADS, 256)
    sink = W[p + "sinks"]
    if not ratio:
        pw = f["attend_window"](sw, sh.first_block, sink)
        return torch.bmm(pw.view(t // 128, 128 * HEADS, 256), kw).view(t, HEADS, DIM), None
    cp = p + "compressor."
    n = s // ratio
    c, z = F.linear(x, W[cp + "kv_proj.weight"]), F.linear(x, W[cp + "gate_proj.weight"])
    args = (c.view(b * n, ratio, -1), z.view(b * n, ratio, -1), W[cp + "position_bias"], W[cp + "kv_norm.weight"], *sh.rope_row[ratio])
    rows = f["pool4"](*args, sh.first_group) if ratio == 4 else f["pool128"](*args)
    rows = f["key_round"](rows, sim).to(x.dtype).view(b, n, DIM)
    sc = torch.bmm(q.view(b, s * HEADS, DIM), rows.transpose(1, 2)).view(t, HEADS, n)
    keep = loss = None
    if ratio == 4:
        ip = cp + "indexer."
        xd, qd = x.detach(), qr.detach()
        ic, iz = F.linear(xd, W[ip + "kv_proj.weight"]), F.linear(xd, W[ip + "gate_proj.weight"])
        ik = f["pool4"](ic.view(b * n, 4, -1), iz.view(b * n, 4, -1), W[ip + "position_bias"], W[ip + "kv_norm.weight"],
                        *sh.rope_row[4], sh.first_group)
        iq = F.linear(qd, W[ip + "q_b_proj.weight"]).view(t, INDEX_HEADS, INDEX_DIM)
        co, si = sh.rope["compress"]
        iq, ik = f["index_query"](iq, co, si, sh.had, sim), f["index_key"](ik, sh.had, x.dtype, sim)
        iw = F.linear(xd, W[ip + "scorer.weights_proj.weight"])
        dots = torch.bmm(iq.view(b, s * INDEX_HEADS, INDEX_DIM), ik.view(b, n, INDEX_DIM).transpose(1, 2))
        score = f["index_score"](dots.view(t, INDEX_HEADS, n), iw)
        with torch.no_grad():
            g = torch.arange(n, device=x.device)
            if sparse and n > INDEX_TOPK:
                masked = score.detach().masked_fill(g[None] >= sh.seen[4][:, None], float("-inf"))
                keep = torch.zeros_like(masked, dtype=torch.bool).scatter_(1, masked.topk(INDEX_TOPK, -1, sorted=False).indices, True)
            else:
                keep = torch.ones(t, n, device=x.device, dtype=torch.bool)
    pw, pc, mass = f["attend_both"](sw, sc, sh.first_block, sh.seen[ratio], keep, sink)
    if mass is not None:
        loss = f["index_loss"](score, mass, sh.seen[4])
    o = torch.bmm(pw.view(t // 128, 128 * HEADS, 256), kw).view(t, HEADS, DIM)
    o = o + torch.bmm(pc.view(b, s * HEADS, n), rows).view(t, HEADS, DIM)
    return o, loss


def qkv(W, p, x, cos, sin, sim):
    """Projections of one layer: normed low-rank query, heads, key row."""
    qr = FAST["low_norm"](F.linear(x, W[p + "q_a_proj.weight"]), W[p + "q_a_norm.weight"])
    q = FAST["q_finish"](F.linear(qr, W[p + "q_b_proj.weight"]).view(-1, HEADS, DIM), cos, sin)
    return qr, q, FAST["kv_finish"](F.linear(x, W[p + "kv_proj.weight"]), W[p + "kv_norm.weight"], cos, sin, sim)


def project_out(W, p, o, cos, sin):
    o = FAST["out_finish"](o, cos, sin)
    w = W[p + "o_a_proj.weight"].view(2, 128, HEADS * DIM // 2)
    low = torch.einsum("tgc,grc->tgr", o.view(-1, 2, HEADS * DIM // 2), w).flatten(1)
    return F.linear(low, W[p + "o_b_proj.weight"])


def experts(W, p, x, pick, dtype):
    """Routed and shared experts; x float32 [T,H], pick [T,E]."""
    w = FAST["route"](x, W[p + "gate.weight"], pick)
    w = torch.cat([w, torch.ones_like(w[:, :1])], 1)
    up = torch.cat([W[p + "experts.gate_up_proj"].flatten(0, 1), W[p + "shared_experts.gate_proj.weight"], W[p + "shared_experts.up_proj.weight"]])
    down = torch.cat([W[p + "experts.down_proj"].permute(1, 0, 2).flatten(1), W[p + "shared_experts.down_proj.weight"]], 1)
    h = F.linear(x.to(dtype), up).view(-1, EXPERTS + 1, 2 * WIDTH)
    return F.linear(FAST["swiglu"](h, w), down)


def balance_loss(routed, chosen):
    """Product of share and mean score per expert over the `chosen` tokens (0/1), summed; 1 when balanced."""
    n = chosen.sum().clamp_min(1.0)
    total = 0.0
    for x, gate, pick in routed:
        s = scores(x.detach(), gate)
        mean = ((s / s.sum(-1, keepdim=True)) * chosen[:, None]).sum(0) / n
        share = (pick * chosen[:, None]).sum(0) / (TOPK * n)
        total = total + EXPERTS * (mean * share.detach()).sum()
    return total / len(routed)


def pick_experts(x, gate, bias):
    """Top-K by biased score as a 0/1 matrix."""
    with torch.no_grad():
        s = scores(x, gate) + bias
        return torch.zeros_like(s).scatter_(1, s.topk(TOPK, -1).indices, 1.0)


def trunk(model, W, ids, sh, sim=False, sparse=True, dtype=torch.bfloat16, tables=None, want_logits=True):
    """Forward pass over ids [B,S]. Returns dict: y (normed head input), logits, taps, kl (index losses), load [L,E]."""
    f = FAST
    flat = ids.flatten()
    x = W["model.embed_tokens.weight"][flat].float().unsqueeze(1).expand(-1, 4, -1).contiguous()
    kl, load, taps, routed = [], [], [], []
    for L in range(LAYERS):
        p = f"model.layers.{L}."
        kind = "compress" if RATIOS[L] else "main"
        cos, sin = sh.rope[kind]
        u, post, comb = hc_pre(W, p + "attn_hc.", p + "input_layernorm.weight", x)
        ub = u.to(dtype)
        qr, q, kv = qkv(W, p + "self_attn.", ub, cos, sin, sim)
        o, loss = attention(W, p + "self_attn.", ub, qr, q, kv, sh, RATIOS[L], sim, sparse)
        if loss is not None:
            kl.append(loss)
        x = f["hc_post"](project_out(W, p + "self_attn.", o, cos, sin), x, post, comb)
        u, post, comb = hc_pre(W, p + "ffn_hc.", p + "post_attention_layernorm.weight", x)
        gate = model.model.layers[L].mlp.gate
        if L < HASH_LAYERS:
            pick = torch.zeros(len(flat), EXPERTS, device=x.device).scatter_(1, gate.tid2eid[flat], 1.0)
        else:
            pick = pick_experts(u, W[p + "mlp.gate.weight"], gate.e_score_correction_bias)
            routed.append((u, W[p + "mlp.gate.weight"], pick))
        load.append(pick.detach().sum(0))
        x = f["hc_post"](experts(W, p + "mlp.", u, pick, dtype), x, post, comb)
        if L in TAPS:
            taps.append(x.mean(1))
    _, y = f["hc_head"](x, W["model.hc_head.hc_fn"], W["model.hc_head.hc_base"], W["model.hc_head.hc_scale"], W["model.norm.weight"])
    out = dict(y=y, taps=torch.cat(taps, 1), kl=kl, load=torch.stack(load), routed=routed)
    if want_logits:
        out["logits"] = F.linear(y.to(dtype), W["lm_head.weight"])
    return out


def check():
    """Compare with transformers in float32, random weights with every bias randomised."""
    m = new_model(3)
    with torch.no_grad():
        for n, p in m.named_parameters():
            if n.endswith("sinks"):
                p.normal_()
            elif n.endswith("position_bias"):
                p.normal_(0, 0.5)
            elif "norm" in n and p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
        for L in range(HASH_LAYERS, LAYERS):
            m.model.layers[L].mlp.gate.e_score_correction_bias.normal_(0, 0.1)
        ids = torch.randint(0, VOCAB, (2, 640))
        ref = m(ids, use_cache=False).logits
        W = weights(m.named_parameters(), False, torch.float32)
        got = trunk(m, W, ids, Shape(m, 2, 640, "cpu"), dtype=torch.float32)["logits"].view_as(ref)
    err = (got - ref).abs().amax(-1) / ref.abs().amax(-1)
    print("max relative error", float(err.max()), "median", float(err.median()), "over 1e-4 at", int((err > 1e-4).sum()), "positions")


if __name__ == "__main__":
    torch.set_num_threads(1)
    check()
