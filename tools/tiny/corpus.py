#!/usr/bin/env python3
"""Turn unpacked Debian packages into plain text files, one per source, documents separated by form feeds.

    corpus.py UNPACKED_ROOT OUT_DIR

UNPACKED_ROOT holds `dpkg -x` trees of the packages named in README.md; the KJV text comes from the `bible` program.
About 1 document in 200 goes to OUT_DIR/heldout.txt instead (at most 100 KB in all).
"""
import glob
import gzip
import hashlib
import os
import re
import subprocess
import sys

PART = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


def wordnet(root):
    """Glosses as dictionary lines, 12 to a document."""
    lines = []
    for part, name in PART.items():
        for path in glob.glob(f"{root}/**/wordnet/data.{part}", recursive=True):
            for line in open(path, encoding="latin-1"):
                if line.startswith("  ") or "|" not in line:
                    continue
                head, gloss = line.rstrip().split("|", 1)
                field = head.split()
                n = int(field[3], 16)
                words = [re.sub(r"\(.*\)", "", field[4 + 2 * i]).replace("_", " ") for i in range(n)]
                lines.append(f"{', '.join(words)} ({name}): {gloss.strip()}")
    lines.sort(key=lambda s: hashlib.md5(s.encode()).digest())
    return ["\n".join(lines[i:i + 12]) + "\n" for i in range(0, len(lines), 12)]


def files(root, pattern, low=400, high=60000):
    """Whole files, long ones cut at blank lines."""
    out, seen = [], set()
    for path in sorted(glob.glob(f"{root}/{pattern}", recursive=True)):
        try:
            text = open(path, encoding="utf-8").read()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        text = text.replace("\f", "\n")
        if text in seen or "changelog" in path:
            continue
        seen.add(text)
        while len(text) > high:
            cut = text.rfind("\n\n", low, high)
            cut = high if cut < 0 else cut + 2
            out.append(text[:cut])
            text = text[cut:]
        if len(text) >= low:
            out.append(text)
    return out


def dictd(root, name, skip):
    """Entries of a dictd dictionary, grouped into documents of about 3 KB."""
    path = glob.glob(f"{root}/**/dictd/{name}.dict.dz", recursive=True)[0]
    text = gzip.open(path).read().decode("utf-8", "replace")
    entries = re.split(r"\n(?=\S)", text)[skip:]
    docs, now = [], ""
    for e in entries:
        now += e + "\n"
        if len(now) > 3000:
            docs.append(now)
            now = ""
    return docs


def kjv():
    """Chapters of the King James Bible without verse references."""
    raw = subprocess.run(["bible", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    docs = []
    for chapter in re.split(r"\n(?=[1-3]?\s?[A-Z][A-Za-z ]+ \d+\n\n)", raw):
        verses = [re.sub(r"^\s*\S*\d+(:\d+)?\s+", "", v) for v in chapter.split("\n")[1:] if v.strip()]
        text = chapter.split("\n")[0].strip() + "\n" + "\n".join(verses) + "\n"
        if len(text) > 200:
            docs.append(text)
    return docs


def main():
    root, out = sys.argv[1:3]
    os.makedirs(out, exist_ok=True)
    sources = {
        "wordnet": wordnet(root),
        "pydocs": files(root, "**/_sources/**/*.txt"),
        "stdlib": files(root, "**/python3.11/**/*.py"),
        "kjv": kjv(),
        "jargon": dictd(root, "jargon", 10),
        "devil": dictd(root, "devil", 5),
    }
    held = []
    for name, docs in sources.items():
        keep, test = [], []
        for d in docs:
            (test if int(hashlib.md5(d.encode()).hexdigest(), 16) % 200 == 0 else keep).append(d)
        with open(f"{out}/{name}.txt", "w", encoding="utf-8") as f:
            f.write("\f".join(keep))
        room = {"wordnet": 30000, "pydocs": 24000, "stdlib": 20000, "kjv": 14000, "jargon": 6000, "devil": 3000}[name]
        for d in test:
            d = d[:6000]
            if len(d.encode()) < room:
                room -= len(d.encode())
                held.append(d)
        print(f"{name}: {len(keep)} documents, {sum(map(len, keep)) / 1e6:.1f} MB; {len(test)} held out")
    with open(f"{out}/heldout.txt", "w", encoding="utf-8") as f:
        f.write("\f".join(held))


if __name__ == "__main__":
    main()
