#!/usr/bin/env bash
# The model of the slot protocol holds, and its two wrong forms are found (package spin; skipped without it).
set -euo pipefail
source=$2
command -v spin >/dev/null || { echo "skipped: no spin"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"

# NAME WANT FLAGS...: WANT errors (0, or 1 for any).
check() {
    local name=$1 want=$2
    shift 2
    spin -a "$@" "$source/tests/spin/slots.pml" >spin.log 2>&1 || { cat spin.log; exit 1; }
    "${CC:-cc}" -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c
    ./pan -m200000 >pan.log 2>&1 || { cat pan.log; exit 1; }
    local errors states
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.log)
    states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
    ! grep -q 'max search depth too small' pan.log || { echo "$name: the search was cut off"; exit 1; }
    [ "$((errors > 0))" = "$want" ] || { cat pan.log; echo "$name: $errors errors"; exit 1; }
    echo "$name: $states states, errors $errors as expected"
}
check "with a card" 0
check "on the host" 0 -DHOST -DPASSES=2
check "slots freed as bytes land, with a card" 1 -DEARLY
check "slots freed whoever reads, on the host" 1 -DHOST -DUNPINNED
