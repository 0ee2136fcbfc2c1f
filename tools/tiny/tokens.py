#!/usr/bin/env python3
"""Turn the text files into one array of token ids a source: tokens.py CORPUS_DIR tokenizer.json OUT.npz

Every document is BOS, text, EOS.
"""
import sys

import numpy as np
from tokenizers import Tokenizer


def main():
    corpus, tok, out = sys.argv[1:4]
    tok = Tokenizer.from_file(tok)
    arrays = {}
    for name in ("wordnet", "pydocs", "stdlib", "kjv", "jargon", "devil"):
        docs = open(f"{corpus}/{name}.txt", encoding="utf-8").read().split("\f")
        ids = [np.array([0] + e.ids + [1], np.uint16) for e in tok.encode_batch(docs, add_special_tokens=False)]
        arrays[name] = np.concatenate(ids)
        print(name, len(arrays[name]))
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    main()
