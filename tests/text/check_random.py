#!/usr/bin/env python3
"""Compares the tokenizer with the `tokenizers` package on random texts, id for id.

    check_random.py --tokenizer tokenizer.json --program build/tests/tokenize_lines [--count 100000] [--seed 1] [--chars]
    check_random.py --tokenizer tokenizer.json --sample FILE [--count 2000]     writes [text, ids] pairs for the quick test

Of the texts, 70 % are tokenized with control tokens recognised; 15 % the same after random damage to their UTF-8, against the
text that Python's decoder with U+FFFD makes of it; 15 % without control tokens, against a copy of the file that has none, where
the cuts into pieces are compared too: most of them leave no trace in ids. A tenth as many random lists of ids are decoded.
--chars also compares the cuts of every code point among neighbours of each kind. Exit status 1 if anything differs.
"""
import argparse
import json
import random
import struct
import subprocess
import sys
import time

import tokenizers

SPACES = [*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]


class Texts:
    def __init__(self, seed, added, words):
        self.r, self.added, self.words = random.Random(seed), added, words
        r = self.r
        pick = lambda *ranges: lambda: chr(r.randint(*r.choice(ranges)))
        self.chars = [
            (pick((97, 122), (65, 90)), 14), (pick((48, 57)), 6), (pick((0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)), 10),
            (lambda: " ", 12), (lambda: r.choice("\n\n\r\t"), 7), (lambda: chr(r.choice(SPACES)), 4),
            (pick((0, 31), (127, 160)), 3), (pick((0x4E00, 0x9FA5)), 6), (pick((0x3040, 0x30FF)), 3),
            (pick((0x2E80, 0x3040), (0x3100, 0x4E00), (0x9FA0, 0xA4D0)), 3), (pick((0xFF00, 0xFFEF)), 2),
            (pick((0x300, 0x36F), (0x483, 0x489), (0x591, 0x5BD), (0x64B, 0x65F), (0x1AB0, 0x1ACE), (0x20D0, 0x20F0)), 5),
            (pick((0xA1, 0x24F)), 4), (pick((0x370, 0x5FF)), 3), (pick((0x600, 0x1FFF)), 6), (pick((0x2000, 0x2BFF)), 6),
            (pick((0xB2, 0xBE), (0x660, 0x669), (0x966, 0x96F), (0x2150, 0x218B), (0x2460, 0x249B), (0xFF10, 0xFF19)), 3),
            (pick((0x1F000, 0x1FAFF)), 3), (pick((0xAC00, 0xD7A3)), 2), (pick((0, 0xD7FF), (0xE000, 0xFFFF)), 5),
            (pick((0x10000, 0x1FFFF)), 4), (pick((0x20000, 0x3FFFF), (0xE0000, 0xE01FF)), 1), (pick((0x10000, 0x10FFFF)), 1),
            (lambda: r.choice("\u200b\ufeff\u180e\u200d\u00ad\ufffd\ufe0f"), 2)]
        self.weights = [w for _, w in self.chars]

    def part(self):
        r = self.r
        kind = r.random()
        if kind < 0.05:
            return r.choice(self.added)
        if kind < 0.07:  # cut short
            token = r.choice(self.added)
            return token[r.randint(0, 2):r.randint(0, len(token))]
        if kind < 0.20:
            return r.choice(self.words)
        one = r.choices(self.chars, self.weights)[0][0]
        if kind < 0.28:
            return one() * r.randint(2, 12)
        if kind < 0.40:
            return "".join(one() for _ in range(r.randint(2, 8)))
        return one()

    def text(self, longest):
        if self.r.random() < 1 / 400:  # one long piece
            signs = self.r.choice(["abcdefghijklmnopqrstuvwxyz", "ab", "=", "=-", "\u4e00\u4e8c\u4e2d\u5927", "etaoin", "ABCDEFabcdef"])
            return "".join(self.r.choices(signs, k=self.r.randint(700, 9000)))
        return "".join(self.part() for _ in range(self.r.randint(0, longest)))

    def damaged(self, text):
        b = bytearray(text.encode())
        for _ in range(self.r.randint(1, 4)):
            at = self.r.randint(0, len(b))
            if self.r.random() < 0.5:
                del b[at:at + self.r.randint(1, 3)]
            else:
                b[at:at] = bytes(self.r.choice((self.r.randint(0x80, 0xFF), self.r.choice(b"\xe0\xed\xf0\xf4\xef\xc0\xc2")))
                                 for _ in range(self.r.randint(1, 3)))
        return bytes(b)


def records(args, tok, gen):
    """(kind, what the program reads, what tokenizers makes of it)"""
    file = json.load(open(args.tokenizer, encoding="utf-8"))
    plain = tokenizers.Tokenizer.from_str(json.dumps({**file, "added_tokens": []}))
    # A piece is given as its bytes, each written as one character.
    cuts = lambda text: [len(piece) for piece, _ in tok.pre_tokenizer.pre_tokenize_str(text)]
    for i in range(args.count):
        text = gen.text(30)
        kind = i % 20
        if kind < 14:
            yield "a", text.encode(), tok.encode(text, add_special_tokens=False).ids
        elif kind < 17:
            raw = gen.damaged(text)
            yield "a", raw, tok.encode(raw.decode("utf-8", "replace"), add_special_tokens=False).ids
        else:
            yield "p", text.encode(), plain.encode(text, add_special_tokens=False).ids
            yield "c", text.encode(), cuts(text)
    for c in range(0x110000 if args.chars else 0):
        if not 0xD800 <= c <= 0xDFFF:
            text = "a?é?あ?。?1? ?\n?\u0301?\u0007?b".replace("?", chr(c))
            yield "c", text.encode(), cuts(text)
    n = tok.get_vocab_size()
    for i in range(args.count // 10):
        ids = [gen.r.randrange(n if gen.r.random() < 0.5 else min(n, 300)) for _ in range(gen.r.randint(1, 12))]
        yield "d", ids, tok.decode(ids, skip_special_tokens=False).encode()


def compare(args, tok, gen):
    todo = list(records(args, tok, gen))
    data = b"".join(kind.encode() + struct.pack("=I", len(x)) + (x if kind != "d" else struct.pack(f"={len(x)}I", *x))
                    for kind, x, _ in todo)
    start = time.monotonic()
    out = subprocess.run([args.program, args.tokenizer, str(args.vocab_size)], input=data, stdout=subprocess.PIPE, check=True).stdout
    seconds = time.monotonic() - start
    at = wrong = n_ids = 0
    for kind, x, expected in todo:
        n = struct.unpack_from("=I", out, at)[0]
        if kind == "d":
            got = out[at + 4:at + 4 + n]
        else:
            got = list(struct.unpack_from(f"={n}I", out, at + 4))
            n_ids += n if kind != "c" else 0
        at += 4 + len(got) * (1 if kind == "d" else 4)
        if got != expected:
            wrong += 1
            if wrong <= 10:
                print(f"{kind} {x!r}\n  expected {expected!r}\n  got      {got!r}")
    assert at == len(out)
    print(f"{args.tokenizer}: {tok.get_vocab_size()} tokens; tokenizers {tokenizers.__version__}, seed {args.seed}")
    kinds = {k: sum(kind == k for kind, _, _ in todo) for k in "cd"}
    print(f"{args.count} texts, {sum(len(x) for k, x, _ in todo if k in 'ap')} bytes, {n_ids} ids; {kinds['c']} texts cut into "
          f"pieces; {kinds['d']} lists of ids decoded; {seconds:.2f} s with start-up")
    print(f"{wrong} differ: {'FAILED' if wrong else 'passed'}")
    return 1 if wrong else 0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--program")
    p.add_argument("--sample")
    p.add_argument("--vocab-size", type=int, default=0)
    p.add_argument("--count", type=int)
    p.add_argument("--chars", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    args.count = args.count or (2000 if args.sample else 100000)
    tok = tokenizers.Tokenizer.from_file(args.tokenizer)
    added = [t.content for t in tok.get_added_tokens_decoder().values()]
    n = tok.get_vocab_size()
    words = [w for w in (tok.decode([i]) for i in range(3, n, max(1, n // 20000))) if "\ufffd" not in w]
    gen = Texts(args.seed, added, words)
    if not args.sample:
        return compare(args, tok, gen)
    with open(args.sample, "w", encoding="utf-8", newline="\n") as f:
        rows = [[t, tok.encode(t, add_special_tokens=False).ids] for t in (gen.text(9) for _ in range(args.count))]
        f.write("[" + ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows) + "]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
