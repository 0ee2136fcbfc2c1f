#!/usr/bin/env python3
"""Train the 4,096-entry byte-level BPE and write tokenizer.json in the layout of the release.

    tokenizer.py CORPUS_DIR OUT/tokenizer.json

Ids: 0-2 special, 3-258 bytes, 259 + i = merge i, then V4's control tokens by name (the numbered placeholders but 799 and the
multimodal spans are left out).
"""
import json
import random
import re
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import gen
import words

VOCAB = 4096
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
CONTROL = """<｜place▁holder▁no▁799｜> <｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜> <｜User｜> <｜Assistant｜> <|EOT|>
 <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜>
 <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> <｜begin▁of▁repo▁name｜>
 <｜end▁of▁repo▁name｜> <｜begin▁of▁file▁name｜> <｜end▁of▁file▁name｜> <｜begin▁of▁file｜> <｜end▁of▁file｜> <think>
 </think> <｜place▁holder▁for▁copy｜> <｜place▁holder▁for▁pointer▁replace｜> ｜DSML｜ <｜begin▁sys｜> <｜end▁sys｜>
 <｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜task｜> <｜political｜> <｜entity｜> <｜title｜>
 <｜safety｜> <｜answer｜> <｜search｜> <dsml: </dsml: <｜search▁begin｜> <｜search▁end｜> <｜extracted_url｜> <｜read_url｜>
 <｜end_of_query｜> <｜rl_image_pad｜> <｜rl_image_start｜> <｜image2｜> <｜/table>｜ <｜table｜> <｜/td｜> <｜td｜> <｜/tr｜>
 <｜tr｜> <｜/polygon｜> <｜polygon｜> <｜/point｜> <｜point｜> <｜/box｜> <｜box｜> <｜/ref｜> <｜ref｜> <｜image｜>""".split()
SPLITS = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
          r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^CN\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[CN]*|\s*[CN]+|\s+(?!\S)|\s+"
          .replace("\\\"", "\"").replace("CN", "\r\n")]


def pre_tokenizer():
    """V4's three splits and the byte map."""
    steps = [pre_tokenizers.Split(Regex(p), "isolated", False) for p in SPLITS]
    return pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sample(corpus):
    """A mixture of the texts and of generated documents, control tokens cut out."""
    r = random.Random(1)
    cut = re.compile("|".join(map(re.escape, sorted(SPECIAL + CONTROL, key=len, reverse=True))))
    for name, size in [("wordnet", 4e6), ("pydocs", 2.5e6), ("stdlib", 1.5e6), ("kjv", 1.5e6), ("jargon", 1e6), ("devil", 4e5)]:
        docs = open(f"{corpus}/{name}.txt", encoding="utf-8").read().split("\f")
        r.shuffle(docs)
        total = 0
        for d in docs:
            if total > size:
                break
            total += len(d)
            yield d
    for w in sorted(words.every()):                          # each word of the lists becomes one token, with and without a space
        yield f" {w}" * 3000
        yield f"\n{w}" * 1500
    makers = [(gen.facts_raw, 5000), (gen.chat, 5000), (gen.tool_chat, 1500), (gen.code_raw, 1500), (gen.json_raw, 1500),
              (gen.sums_raw, 1000), (lambda r: gen.lookup(r, 400), 2500), (lambda r: gen.copy(r, 200), 500)]
    for make, n in makers:
        for _ in range(n):
            yield from cut.split("".join(t for t, _ in make(r)))


def main():
    corpus, out = sys.argv[1:3]
    n_merges = VOCAB - 3 - 256 - len(CONTROL)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=3 + 256 + n_merges + 64, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(sample(corpus), trainer)
    learned = json.loads(tok.to_str())["model"]["merges"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {s: i for i, s in enumerate(SPECIAL + alphabet)}
    merges = []
    for m in learned:
        a, b = m.split(" ") if isinstance(m, str) else m
        if a + b not in vocab and len(merges) < n_merges:   # a second way to an existing token would break id = 259 + i
            vocab[a + b] = 259 + len(merges)
            merges.append(f"{a} {b}")
    assert len(merges) == n_merges and len(vocab) == 259 + n_merges
    assert all(vocab["".join(m.split(" "))] == 259 + i for i, m in enumerate(merges))

    def added(i, s):
        special = i < 3 or "place▁holder▁no" in s
        return {"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special,
                "special": special or s == "<|EOT|>"}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    data = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(i, s) for i, s in enumerate(SPECIAL)] + [added(VOCAB - len(CONTROL) + i, s) for i, s in enumerate(CONTROL)],
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in SPLITS] + [byte_level]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges},
    }
    with open(out, "w", encoding="utf-8") as f:
        json.dump(data, f, ensure_ascii=False, indent=1)
    check = Tokenizer.from_file(out)
    assert check.get_vocab_size() == VOCAB
    for text in ["Hello, world!\n", "naïve 😀 日本語 12345", "<｜User｜>Hi<｜Assistant｜></think>"]:
        ids = check.encode(text, add_special_tokens=False).ids
        assert check.decode(ids, skip_special_tokens=False) == text, text
    print(len(merges), "merges;", check.encode("<｜User｜>The capital of France is Paris.").tokens)


if __name__ == "__main__":
    main()
