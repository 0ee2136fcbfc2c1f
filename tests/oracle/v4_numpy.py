"""DeepSeek-V4-Flash in plain numpy: trunk, DSpark draft and MTP-1, straight from the model's definition.

    m = V4("models/tiny-v4", mode="math")           # a release-layout checkpoint
    r = m.trunk(ids)                                # whole sequence from position 0
    r["logits"], r["x"], r["router_ids"], r["taps"], ...
    m.draft(r["taps"], n, first_token)              # one DSpark block after n committed positions

Everything is float64 (or the given dtype), weights are the stored values. Modes:

    math    no rounding anywhere
    sim     A8 in groups of 64 on the un-rotated part of raw, compressed and draft KV rows; Hadamard and A4 on indexer
            queries and keys. A quantiser sees its input rounded to float32.

RoPE is the published float32 table in both: frequency in float32, position times frequency in float32, cosine and sine
of that rounded to float32. There is no cache and no chunking: a row of every result is a function of the whole prefix,
which is what an engine's caches have to reproduce.
"""

import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "tiny"))
import release  # noqa: E402


# ----------------------------------------------------------------------------------------------------- small ops

def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def a8(x, group=64):
    """E4M3 round trip with a power-of-two scale per `group` values of the last axis; only whole groups are touched."""
    n = x.shape[-1] // group * group
    g = x[..., :n].astype(np.float32).reshape(*x.shape[:-1], n // group, group)
    s = release.pow2_scale(np.maximum(np.abs(g).max(-1, keepdims=True), np.float32(1e-4)), 448)
    q = release.e4m3_decode(release.e4m3_encode(np.clip(g / s, -448, 448))) * s
    return np.concatenate([q.reshape(*x.shape[:-1], n).astype(x.dtype), x[..., n:]], -1)


def a4(x):
    """E2M1 round trip with a power-of-two scale per 32 values of the last axis."""
    g = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    s = release.pow2_scale(np.maximum(np.abs(g).max(-1, keepdims=True), np.float32(6 * 2.0**-126)), 6)
    return (release.e2m1_decode(release.e2m1_encode(np.clip(g / s, -6, 6))) * s).reshape(x.shape).astype(x.dtype)


def hadamard(x):
    """Orthonormal Walsh-Hadamard transform of the last axis in natural order."""
    n, y, stride = x.shape[-1], x, 1
    while stride < n:
        y = y.reshape(*x.shape[:-1], n // (2 * stride), 2, stride)
        y = np.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], -2)
        stride *= 2
    return y.reshape(x.shape) * n**-0.5


def rope_frequencies(dim, theta, scaling=None):
    """float32 [dim/2]; with `scaling` (the rope_scaling dict) the YaRN interpolation, without any magnitude factor."""
    f = np.float32(1) / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    length = scaling["original_max_position_embeddings"] if scaling else 0
    if not length:
        return f
    corr = lambda r: dim * np.log(length / (2 * np.pi * r)) / (2 * np.log(theta))
    lo = max(0, int(np.floor(corr(scaling["beta_fast"]))))
    hi = min(dim - 1, int(np.ceil(corr(scaling["beta_slow"]))))
    width = np.float32(hi - lo if hi > lo else 0.001)
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(lo)) / width, 0, 1)
    return f / np.float32(scaling["factor"]) * (1 - keep) + f * keep


def rope(x, pos, freq, inverse=False):
    """Rotate adjacent pairs of the last 2*len(freq) entries of x [T, ..., width]; pos [T]."""
    a = np.asarray(pos, np.float32)[:, None] * freq.astype(np.float32)
    cos, sin = np.cos(a.astype(np.float64)).astype(np.float32), np.sin(a.astype(np.float64)).astype(np.float32)
    shape = (len(pos),) + (1,) * (x.ndim - 2) + (len(freq),)
    cos, sin = cos.reshape(shape).astype(x.dtype), sin.reshape(shape).astype(x.dtype) * (-1 if inverse else 1)
    y = x.copy()
    v0, v1 = x[..., -2 * len(freq)::2], x[..., 1 - 2 * len(freq)::2]
    y[..., -2 * len(freq)::2] = v0 * cos - v1 * sin
    y[..., 1 - 2 * len(freq)::2] = v0 * sin + v1 * cos
    return y


def top_k(score, k):
    """Indices of the k largest, best first; equal scores: lower index first."""
    return np.argsort(-score, axis=-1, kind="stable")[..., :k]


# -------------------------------------------------------------------------------------------------------- model

class V4:
    """freqs: optional (base, yarn) frequency tables that replace the computed ones.
    dtype: np.float32 shows how far an engine in single precision may be off."""

    def __init__(self, directory, mode="math", freqs=None, dtype=np.float64):
        if mode not in ("math", "sim"):
            raise ValueError(mode)
        self.ckpt = release.Checkpoint(directory)
        self.c = c = self.ckpt.config
        self.sim = mode == "sim"
        self.dtype = dtype
        self.cache = {}
        dim = c["qk_rope_head_dim"]
        self.f_base, self.f_yarn = freqs or (
            rope_frequencies(dim, c["rope_theta"]),
            rope_frequencies(dim, c["compress_rope_theta"], c.get("rope_scaling")))

    def w(self, name):
        """Weight as float64 or self.dtype (kept)."""
        if name not in self.cache:
            a = self.ckpt.array(name)
            self.cache[name] = a if a.dtype == np.int64 else a.astype(self.dtype)
        return self.cache[name]

    def lin(self, name, x):
        return x @ self.w(name + ".weight").T

    def rms(self, x, name=None):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return y * self.w(name + ".weight") if name else y

    # Hyper-connections. X is [T, N, H].

    def _mix(self, X, prefix):
        x = X.reshape(len(X), -1)
        r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return (x @ self.w(prefix + "fn").T) * r, self.w(prefix + "base"), self.w(prefix + "scale")

    def hc_pre(self, X, prefix):
        """-> sublayer input u [T, H], post [T, N], C [T, N, N]."""
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        m, base, scale = self._mix(X, prefix)
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n:2 * n] * scale[1] + base[n:2 * n])
        C = (m[:, 2 * n:] * scale[2] + base[2 * n:]).reshape(-1, n, n)
        C = np.exp(C - C.max(-1, keepdims=True))
        C = C / C.sum(-1, keepdims=True) + eps
        C = C / (C.sum(-2, keepdims=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            C = C / (C.sum(-1, keepdims=True) + eps)
            C = C / (C.sum(-2, keepdims=True) + eps)
        return np.einsum("tn,tnh->th", pre, X), post, C

    def hc_post(self, f, X, post, C):
        return post[:, :, None] * f[:, None, :] + np.einsum("tjk,tjh->tkh", C, X)

    def hc_head(self, X, prefix=""):
        m, base, scale = self._mix(X, prefix + "hc_head_")
        return np.einsum("tn,tnh->th", sigmoid(m * scale[0] + base) + self.c["hc_eps"], X)

    # Attention. x is the normalised sublayer input [T, H] at positions pos [T].

    def queries(self, p, x, pos, freq):
        """-> qr [T, QR], q [T, NH, D]."""
        qr = self.rms(self.lin(p + "wq_a", x), p + "q_norm")
        q = self.lin(p + "wq_b", qr).reshape(len(x), self.c["num_attention_heads"], -1)
        return qr, rope(self.rms(q), pos, freq)

    def kv_quant(self, row):
        """A8 on the part in front of the rope tail."""
        if not self.sim:
            return row
        nope = self.c["head_dim"] - self.c["qk_rope_head_dim"]
        return np.concatenate([a8(row[..., :nope]), row[..., nope:]], -1)

    def kv_row(self, p, x, pos, freq):
        return self.kv_quant(rope(self.rms(self.lin(p + "wkv", x), p + "kv_norm"), pos, freq))

    def compress(self, p, x, ratio, freq):
        """Rows of all complete groups of x [T, H], T from position 0: [T div ratio, d], before any quantiser."""
        ape = self.w(p + "ape")
        groups, d = len(x) // ratio, ape.shape[1] // (2 if ratio == 4 else 1)
        if groups == 0:
            return np.zeros((0, d))
        x = x[:groups * ratio]
        c = self.lin(p + "wkv", x).reshape(groups, ratio, -1)
        z = self.lin(p + "wgate", x).reshape(groups, ratio, -1) + ape
        if ratio == 4:          # first half of the channels: from the group before
            earlier = lambda a, fill: np.concatenate([np.full((1, ratio, d), fill, a.dtype), a[:-1, :, :d]])
            c = np.concatenate([earlier(c, 0.0), c[:, :, d:]], 1)
            z = np.concatenate([earlier(z, -np.inf), z[:, :, d:]], 1)
        w = np.exp(z - z.max(1, keepdims=True))
        row = (w * c).sum(1) / w.sum(1)
        return rope(self.rms(row, p + "norm"), np.arange(groups) * ratio, freq)

    def index(self, p, x, qr, pos, freq):
        """-> scores [T, groups] (NaN where the group is not complete), keys [groups, ID]."""
        c = self.c
        key = self.compress(p + "compressor.", x, 4, freq)
        iq = rope(self.lin(p + "wq_b", qr).reshape(len(x), c["index_n_heads"], -1), pos, freq)
        if self.sim:
            key, iq = a4(hadamard(key)), a4(hadamard(iq))
        w = self.lin(p + "weights_proj", x) * (c["index_head_dim"] * c["index_n_heads"]) ** -0.5
        score = np.einsum("th,thg->tg", w, np.maximum(np.einsum("thd,gd->thg", iq, key), 0))
        visible = np.arange(len(key))[None] < (np.asarray(pos)[:, None] + 1) // 4
        return np.where(visible, score, np.nan), key

    def select(self, score):
        """Index scores -> mask [T, groups] of selected rows, and the relative gap at the boundary [T] (inf: all taken)."""
        k = self.c["index_topk"]
        mask, gap = ~np.isnan(score), np.full(len(score), np.inf)
        for t in np.nonzero(mask.sum(1) > k)[0]:
            s = np.where(mask[t], score[t], -np.inf)
            order = top_k(s, k + 1)
            gap[t] = (s[order[k - 1]] - s[order[k]]) / np.abs(score[t][mask[t]]).max()
            mask[t] = False
            mask[t, order[:k]] = True
        return mask, gap

    def attend(self, q, keys, mask, sink):
        """q [T, NH, D], keys [M, D], mask [T, M] -> [T, NH, D]. The sink only enters the denominator."""
        s = np.einsum("thd,md->thm", q, keys, optimize=True) * q.shape[-1] ** -0.5
        s = np.where(mask[:, None, :], s, -np.inf)
        m = s.max(-1, keepdims=True)
        e = np.exp(s - m)
        z = e.sum(-1, keepdims=True) + np.exp(sink[None, :, None] - m)
        return np.einsum("thm,md->thd", e / z, keys, optimize=True)

    def output(self, p, o, pos, freq):
        g = self.c["o_groups"]
        o = rope(o, pos, freq, inverse=True).reshape(len(o), g, -1)
        wo_a = self.w(p + "wo_a.weight").reshape(g, -1, o.shape[-1])
        return self.lin(p + "wo_b", np.einsum("tgc,grc->tgr", o, wo_a).reshape(len(o), -1))

    def attention(self, p, ratio, x, rec=None):
        """Attention sublayer over a whole sequence from position 0. p ends in "attn."; rec collects intermediates."""
        rec = {} if rec is None else rec
        freq, pos, w = (self.f_yarn if ratio else self.f_base), np.arange(len(x)), self.c["sliding_window"]
        qr, q = self.queries(p, x, pos, freq)
        keys = rec["kv"] = self.kv_row(p, x, pos, freq)
        mask = (pos[None] <= pos[:, None]) & (pos[None] > pos[:, None] - w)
        if ratio:
            rows = rec["comp"] = self.kv_quant(self.compress(p + "compressor.", x, ratio, freq))
            chosen = np.arange(len(rows))[None] < (pos[:, None] + 1) // ratio
            if ratio == 4:
                rec["index_score"], rec["ikey"] = self.index(p + "indexer.", x, qr, pos, freq)
                chosen, rec["sel_gap"] = self.select(rec["index_score"])
                rec["sel"] = chosen
            keys, mask = np.concatenate([keys, rows]), np.concatenate([mask, chosen], 1)
        return self.output(p, self.attend(q, keys, mask, self.w(p + "attn_sink")), pos, freq)

    # Mixture of experts.

    def route(self, p, x, ids, rec):
        """-> expert ids [T, K], weights [T, K]. p ends in "ffn."."""
        k = self.c["num_experts_per_tok"]
        sc = np.sqrt(np.logaddexp(0, self.lin(p + "gate", x)))
        if p + "gate.tid2eid" in self.ckpt:
            idx = self.w(p + "gate.tid2eid")[ids]
            rec["router_gap"], rec["router_max"] = np.full(len(x), np.inf), np.full(len(x), np.nan)
        else:
            biased = sc + self.w(p + "gate.bias")
            order = top_k(biased, k + 1)
            idx = order[:, :k]
            if order.shape[1] > k:
                edge = np.take_along_axis(biased, order[:, k - 1:k + 1], 1)
                rec["router_gap"], rec["router_max"] = edge[:, 0] - edge[:, 1], np.abs(biased).max(1)
            else:
                rec["router_gap"], rec["router_max"] = np.full(len(x), np.inf), np.abs(biased).max(1)
        s = np.take_along_axis(sc, idx, 1)
        rec["router_ids"] = idx
        rec["router_weights"] = s / s.sum(1, keepdims=True) * self.c["routed_scaling_factor"]
        return idx, rec["router_weights"]

    def expert(self, p, x):
        a, b, limit = self.lin(p + "w1", x), self.lin(p + "w3", x), self.c["swiglu_limit"]
        if limit > 0:
            a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
        return self.lin(p + "w2", a * sigmoid(a) * b)

    def moe(self, p, x, ids, rec=None):
        idx, weight = self.route(p, x, ids, {} if rec is None else rec)
        y = np.zeros_like(x)
        for e in np.unique(idx):
            t, k = np.nonzero(idx == e)
            y[t] += weight[t, k][:, None] * self.expert(f"{p}experts.{e}.", x[t])
        return y + self.expert(p + "shared_experts.", x)

    # The whole.

    def layer(self, p, X, ids, attention, rec=None):
        """One block; attention(x, rec) is its attention sublayer on the normalised input."""
        rec = {} if rec is None else rec
        u, post, C = self.hc_pre(X, p + "hc_attn_")
        rec["attn_in"] = self.rms(u, p + "attn_norm")
        rec["attn_out"] = attention(rec["attn_in"], rec)
        X = self.hc_post(rec["attn_out"], X, post, C)
        u, post, C = self.hc_pre(X, p + "hc_ffn_")
        rec["ffn_in"] = self.rms(u, p + "ffn_norm")
        rec["ffn_out"] = self.moe(p + "ffn.", rec["ffn_in"], ids, rec)
        return self.hc_post(rec["ffn_out"], X, post, C)

    def embed(self, ids):
        return np.repeat(self.w("embed.weight")[ids][:, None], self.c["hc_mult"], 1)

    def trunk(self, ids):
        """-> dict: logits [T, V], x (list per layer [T, N, H]), layers (list of intermediates), taps [T, n_taps*H]."""
        c, ids = self.c, np.asarray(ids)
        X, out = self.embed(ids), {"x": [], "layers": []}
        for l in range(c["num_hidden_layers"]):
            p, ratio, rec = f"layers.{l}.", c["compress_ratios"][l], {}
            X = self.layer(p, X, ids, lambda x, r: self.attention(p + "attn.", ratio, x, r), rec)
            out["x"].append(X)
            out["layers"].append(rec)
        out["logits"] = self.lin("head", self.rms(self.hc_head(X), "norm"))
        taps = sorted(c.get("dspark_target_layer_ids", []))
        out["taps"] = np.concatenate([out["x"][l].mean(1) for l in taps], -1) if taps else None
        return out

    def draft(self, taps, n, first, taps_from=0):
        """One DSpark block. taps [., n_taps*H]: row i belongs to position taps_from + i; n committed positions; `first`
        is the decided token at position n. -> dict of mx, seed_row, x, h, base, logits, ids, conf, router_*."""
        c, stages = self.c, release.draft_stages(self.c)
        b, w, last = c["dspark_block_size"], c["sliding_window"], f"mtp.{stages - 1}."
        seeded = np.arange(max(0, n - w), n)
        mx = self.rms(self.lin("mtp.0.main_proj", taps[seeded - taps_from]), "mtp.0.main_norm")
        ids, pos = np.array([first] + [c["dspark_noise_token_id"]] * (b - 1)), n + np.arange(b)
        X, out = self.embed(ids), {"mx": mx[-1], "in_ids": ids, "seed_row": [], "x": [], "router_ids": [],
                                   "router_gap": []}
        for s in range(stages):
            p, rec = f"mtp.{s}.", {}
            rows = self.kv_row(p + "attn.", mx, seeded, self.f_base)

            def attention(x, _, p=p + "attn.", rows=rows):
                _, q = self.queries(p, x, pos, self.f_base)
                keys = np.concatenate([rows, self.kv_row(p, x, pos, self.f_base)])
                everything = np.ones((b, len(keys)), bool)      # the block attends to itself in both directions
                return self.output(p, self.attend(q, keys, everything, self.w(p + "attn_sink")), pos, self.f_base)

            X = self.layer(p, X, ids, attention, rec)
            out["seed_row"].append(rows[-1])
            out["x"].append(X)
            out["router_ids"].append(rec["router_ids"])
            out["router_gap"].append(rec["router_gap"])
        out["h"] = self.hc_head(X, last)
        out["base"] = self.lin("head", self.rms(out["h"], last + "norm"))
        out["logits"], out["conf"], out["ids"] = out["base"].copy(), np.zeros(b), np.zeros(b, int)
        prev = first
        for i in range(b):
            e = self.w(last + "markov_head.markov_w1.weight")[prev]
            out["logits"][i] += self.lin(last + "markov_head.markov_w2", e)
            out["conf"][i] = self.lin(last + "confidence_head.proj", np.concatenate([out["h"][i], e]))[0]
            prev = out["ids"][i] = int(np.argmax(out["logits"][i]))
        return out

    def mtp1(self, X, ids):
        """June's MTP-1 block. X [T, N, H]: streams after the last trunk layer; ids [T+1]. Row i predicts token i+2.
        -> dict of x, logits, router_ids, router_gap."""
        p, rec, t = "mtp.0.", {}, len(X)
        e = self.rms(self.w("embed.weight")[np.asarray(ids)[1:t + 1]], p + "enorm")
        x = self.lin(p + "e_proj", e)[:, None] + self.lin(p + "h_proj", self.rms(X, p + "hnorm"))
        x = self.layer(p, x, np.asarray(ids)[1:t + 1], lambda y, r: self.attention(p + "attn.", 0, y, r), rec)
        rec["x"] = x
        rec["logits"] = self.lin("head", self.rms(self.hc_head(x, p), p + "norm"))
        return rec
