#!/usr/bin/env bash
# aff-gpucheck: every op and every code on emulated devices of both fragment layouts, layers of a small model; without a device it skips.
# usage: test_gpucheck.sh BIN SOURCE
set -eu
bin=$1 src=$2
fail() { echo "$*" >&2; exit 1; }
"$bin/aff-gpucheck" --device emu:128M --rounds 2 --dq -m "$src/tests/golden/v4-sim/ckpt-dspark" --rows 60 || fail "emu: failed"
"$bin/aff-gpucheck" --device emu-amd:128M --rounds 2 --dq || fail "emu-amd: failed"
"$bin/aff-gpucheck" --device emu:256M --rounds 1 --synthetic tiny --layers 2 --rows 48 || fail "emu: a synthetic model failed"
code=0
"$bin/aff-gpucheck" --device emu:1M --layers 3 >/dev/null 2>&1 || code=$?
[ $code = 2 ] || fail "--layers without --synthetic: exit code $code, expected 2"
out=$("$bin/aff-gpucheck" --device emu:1M --rounds 1 2>&1) && fail "1 MB of memory passed: $out"
grep -q "out of memory" <<<"$out" || fail "expected 'out of memory', got: $out"
for d in cpu gpu emu: cuda:x; do
    code=0
    "$bin/aff-gpucheck" --device $d >/dev/null 2>&1 || code=$?
    [ $code = 2 ] || fail "--device $d: exit code $code, expected 2"
done
"$bin/aff-gpucheck" --list | grep -q '^cuda' || fail "--list names no cuda line"
if ! "$bin/aff-gpucheck" --list | grep -q '^cuda:0'; then
    out=$("$bin/aff-gpucheck" --device cuda:0) || fail "without a card: exit code $?"
    grep -q '^SKIP: ' <<<"$out" || fail "without a card: $out"
fi
