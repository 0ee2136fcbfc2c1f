"""Batches of token ids and loss weights, made by worker processes.

A batch is ids [B, S+1] (uint16) and weights [B, S+1] (uint8, 16 = 1.0; the weight of a token is that of predicting it).
"""
import multiprocessing as mp
import os
import random
import time

import numpy as np
from tokenizers import Tokenizer

import gen

# share of the tokens by kind of document, for short, middle and long sequences
MIX = {
    512: dict(text=28, facts=8, chat=20, tool=21, code=6, json=3, sums=4, lookup=4, copy=2, needle=4),
    2048: dict(text=28, facts=6, chat=15, tool=18, code=5, json=2, sums=3, lookup=7, copy=3, needle=13),
    8192: dict(text=28, facts=3, chat=9, tool=12, code=4, json=1, sums=2, lookup=11, copy=3, needle=27),
}
TEXT_WEIGHT = 17                                             # 1.06: marks plain text
TOKENS = int(os.environ.get("TINY_TOKENS", 32768))      # a batch
TEXT = dict(wordnet=2.0, pydocs=3.0, stdlib=1.6, kjv=1.6, jargon=.7, devil=.2)


class Maker:
    def __init__(self, text, tok, seed):
        self.text, self.tok, self.r = text, tok, random.Random(seed)
        self.names, self.prob = list(TEXT), list(TEXT.values())

    def raw(self, r, n):
        """n token ids of text from a random place."""
        a = self.text[r.choices(self.names, self.prob)[0]]
        i = r.randrange(max(1, len(a) - n))
        return a[i:i + n]

    def filler(self, r, n):
        """About n tokens of text as a string, whole lines at the start."""
        if n < 8:
            return ""
        ids = [int(i) for i in self.raw(r, n + 12) if i > 2]
        s = self.tok.decode(ids)
        cut = s.find("\n", 0, 60)
        return s[cut + 1:] if cut >= 0 else s[s.find(" ", 0, 40) + 1:]

    def encode(self, doc):
        """Ids and weights of a list of (text, weight) pieces."""
        s = "".join(t for t, _ in doc)
        starts = np.cumsum([0] + [len(t) for t, _ in doc])[:-1]
        w = np.array([min(255, round(16 * w)) for _, w in doc], np.uint8)
        e = self.tok.encode(s, add_special_tokens=False)
        off = np.array([o[0] for o in e.offsets])
        return np.array(e.ids, np.uint16), w[np.searchsorted(starts, off, side="right") - 1]

    def document(self, kind, room):
        r = self.r
        if kind == "text":
            a = self.raw(r, min(room, r.choice([128, 256, 512, 1024])))
            return a, np.full(len(a), TEXT_WEIGHT, np.uint8)
        if kind in ("lookup", "copy", "needle"):
            n = min(room, int(2 ** r.uniform(6.5, np.log2(max(128, room)) + .3)))
            d = gen.lookup(r, n * .9) if kind == "lookup" else gen.copy(r, n * .9) if kind == "copy" else gen.needle(r, n, self.filler)[0]
        else:
            d = dict(facts=gen.facts_raw, chat=gen.chat, tool=gen.tool_chat, code=gen.code_raw, json=gen.json_raw, sums=gen.sums_raw)[kind](r)
        return self.encode(d)

    def batch(self, b, s):
        """b sequences of s + 1 tokens, documents packed one after another."""
        r, mix = self.r, MIX[s]
        ids, ws = np.zeros((b, s + 1), np.uint16), np.zeros((b, s + 1), np.uint8)
        size = dict(text=400, facts=60, chat=90, tool=400, code=150, json=150, sums=70, lookup=s * .35, copy=s * .3, needle=s * .4)
        kinds = list(mix)
        prob = [mix[k] / size[k] for k in kinds]
        for i in range(b):
            n = 0
            while n < s + 1:
                room = s + 1 - n
                k = r.choices(kinds, prob)[0]
                if room < 200 and k in ("needle", "lookup", "copy", "tool"):
                    k = r.choice(["text", "facts", "chat", "sums"])
                a, w = self.document(k, room)
                a, w = a[:room], w[:room]
                ids[i, n:n + len(a)], ws[i, n:n + len(a)] = a, w
                n += len(a)
        return ids, ws


def work(path, tok, seed, want, queues):
    """Worker loop: keep the queue of the wanted length filled."""
    text = {k: v for k, v in np.load(path).items()}
    m = Maker(text, Tokenizer.from_file(tok), seed)
    while want.value >= 0:
        s = want.value
        try:
            queues[s].put(m.batch(TOKENS // s, s), timeout=2)
        except Exception:                                    # full: look again at what is wanted
            time.sleep(.05)


class Stream:
    """Worker processes behind one queue per length. `want` selects what they make."""

    def __init__(self, path, tok, workers, seed, first=512):
        ctx = mp.get_context("fork")
        self.want = ctx.Value("i", first)
        self.queues = {s: ctx.Queue(48) for s in MIX}
        self.procs = [ctx.Process(target=work, args=(path, tok, seed * 1000 + i, self.want, self.queues), daemon=True) for i in range(workers)]
        for p in self.procs:
            p.start()

    def get(self, s):
        self.want.value = s
        return self.queues[s].get()

    def close(self):
        self.want.value = -1
        for p in self.procs:
            p.terminate()
