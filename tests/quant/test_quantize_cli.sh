#!/bin/bash
# aff-quantize from the outside: exit codes, messages, what is left behind. Arguments: folder of the binaries, source tree.
set -u
bin=$1/aff-quantize src=$2/tests/golden/v4-sim/ckpt-dspark
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
fails=0

fail() {
    echo "FAILED: $*"
    fails=$((fails + 1))
}

# expect CODE PATTERN ARGS...: the exit code, and a line of output that matches
expect() {
    local code=$1 pattern=$2
    shift 2
    "$bin" "$@" >"$tmp/log" 2>&1
    local got=$?
    [ $got = "$code" ] || fail "aff-quantize $*: expected exit code $code, got $got: $(head -3 "$tmp/log")"
    grep -q -- "$pattern" "$tmp/log" || fail "aff-quantize $*: expected '$pattern' in: $(head -3 "$tmp/log")"
}

expect 0 '--cb-spread' --help
expect 2 'imatrix' --src "$src" --imatrix x
expect 2 'expected q2p875 or mxfp4' --src "$src" --experts q4
expect 2 '--src' --out "$tmp/a.aff"
expect 2 'give --codebook' --src "$src" --out "$tmp/a.aff" --dspark
expect 2 'layers' --src "$src" --out "$tmp/a.aff" --layers 0
expect 1 'nowhere' --src "$tmp/nowhere" --out "$tmp/a.aff" --experts mxfp4
expect 1 'the model has 3 layers' --src "$src" --out "$tmp/a.aff" --experts mxfp4 --layers 4
[ -e "$tmp/a.aff" ] && fail "a refused run left its output"

expect 0 'MiB in' --src "$src" --out "$tmp/a.aff" --experts mxfp4 --threads 1
expect 0 'MiB in' --src "$src" --out "$tmp/b.aff" --experts mxfp4 --threads 2
cmp "$tmp/a.aff" "$tmp/b.aff" || fail "one and two threads give different files"
left=$(ls "$tmp" | tr '\n' ' ')
[ "$left" = "a.aff b.aff log " ] || fail "left behind: $left"

# A lock held by someone else; an output that another run made stays as it is.
before=$(cksum <"$tmp/a.aff")
(
    flock 9
    expect 1 'another program is writing' --src "$src" --out "$tmp/a.aff" --experts mxfp4
    exit $fails
) 9>"$tmp/a.aff.lock" || fails=$((fails + 1))
[ "$before" = "$(cksum <"$tmp/a.aff")" ] || fail "a locked output changed"

[ $fails = 0 ] && echo "ok"
exit $((fails > 0))
