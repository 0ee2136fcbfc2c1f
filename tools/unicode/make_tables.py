#!/usr/bin/env python3
"""Writes src/text/unicode_tables.c: the character classes of the pre-tokenizer, from Unicode 16.0.

    pip install 'unicodedata2==16.0.*'
    tools/unicode/make_tables.py [OUT]

A class is one of: N, L, M, the general categories, Y for P and S, W for the 25 code points of \\s, OTHER for the rest. To it
8 is added in the ranges of the second split pattern. Two stages: the page number of each 128 code points, then two classes a
byte.
"""
import os
import sys

import unicodedata2 as ud

assert ud.unidata_version.startswith("16.0"), f"expected Unicode 16.0 tables, got {ud.unidata_version}"

OTHER, N, L, M, Y, W = range(6)  # aff_char_class in unicode.h
SPACES = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
CJK = [(0x4E00, 0x9FA5), (0x3040, 0x309F), (0x30A0, 0x30FF)]
PAGE = 128

category = [ud.category(chr(c)) for c in range(0x110000)]
for letters, expected in (("N", 1911), ("P", 855), ("S", 8514), ("M", 2501)):
    got = sum(c[0] in letters for c in category)
    assert got == expected, f"|{letters}|: expected {expected}, got {got}"
assert len(SPACES) == 25


def char_class(c):
    if c in SPACES:
        assert category[c][0] in "ZC"
        return W
    value = {"N": N, "L": L, "M": M, "P": Y, "S": Y}.get(category[c][0], OTHER)
    if any(a <= c <= b for a, b in CJK):
        assert value != N
        value += 8
    return value


classes = [char_class(c) for c in range(0x110000)]
pages, number, first = [], {}, []
for base in range(0, 0x110000, PAGE):
    page = tuple(classes[base:base + PAGE])
    if page not in number:
        number[page] = len(pages)
        pages.append(page)
    first.append(number[page])
assert len(pages) <= 256
while first[-1] == first[-2]:
    first.pop()  # code points past the table have the class of its last entry
last = first[-1]
assert set(pages[last]) == {0}


def rows(values, width):
    for i in range(0, len(values), width):
        yield "    " + ", ".join(map(str, values[i:i + width])) + ",\n"


packed = [page[i] | page[i + 1] << 4 for page in pages for i in range(0, PAGE, 2)]
out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "../../src/text/unicode_tables.c")
with open(out, "w") as f:
    f.write("/* Made by tools/unicode/make_tables.py from Unicode %s (unicodedata2); do not edit. */\n" % ud.unidata_version)
    f.write('/* clang-format off */\n#include "text/unicode.h"\n\n')
    f.write("const uint32_t aff__unicode_end = 0x%X;\n" % (len(first) * PAGE))
    f.write("const uint8_t aff__unicode_page[%d] = {\n" % len(first))
    f.writelines(rows(first, 32))
    f.write("};\nconst uint8_t aff__unicode_class[%d] = {\n" % len(packed))
    f.writelines(rows(packed, 32))
    f.write("};\n")
print(f"{out}: {len(first)} page numbers, {len(pages)} pages, {len(first) + len(packed)} bytes")
