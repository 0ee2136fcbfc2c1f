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
expect 1 'nowhere.gguf' --src "$src" --out "$tmp/a.aff" --imatrix "$tmp/nowhere.gguf"
expect 2 'layer-range' --src "$src" --layer-range 3
expect 2 'layer-range' --src "$src" --layer-range 3:2 --experts-dir x --codebook-raw y
expect 2 'expected q2p875 or mxfp4' --src "$src" --experts q4
expect 2 '--src' --out "$tmp/a.aff"
expect 2 'give --codebook' --src "$src" --out "$tmp/a.aff" --dspark
expect 2 'layers' --src "$src" --out "$tmp/a.aff" --layers 0
expect 1 'nowhere' --src "$tmp/nowhere" --out "$tmp/a.aff" --experts mxfp4
expect 1 'the model has 3 layers' --src "$src" --out "$tmp/a.aff" --experts mxfp4 --layers 4
[ -e "$tmp/a.aff" ] && fail "a refused run left its output"

expect 0 'MiB in' --src "$src" --out "$tmp/a.aff" --experts mxfp4 --threads 1
expect 2 'leave out one' --src "$src" --out "$tmp/b.aff" --experts mxfp4 --device emu:64M
expect 2 'emu' --src "$src" --out "$tmp/b.aff" --device nowhere
expect 0 'MiB in' --src "$src" --out "$tmp/b.aff" --experts mxfp4 --threads 2
cmp "$tmp/a.aff" "$tmp/b.aff" || fail "one and two threads give different files"
left=$(ls "$tmp" | tr '\n' ' ')
[ "$left" = "a.aff b.aff log " ] || fail "left behind: $left"

# aff-info against the checkpoint, the other part and itself.
info=$1/aff-info
"$info" --against "$src" --hashes "$tmp/a.aff" >"$tmp/info" 2>&1 || fail "aff-info --against: $(tail -2 "$tmp/info")"
[ "$(grep -cE '^[0-9]+ [0-9]+ [0-9a-f]{16}$' "$tmp/info")" = 15 ] || fail "aff-info --hashes: expected 15 lines"
"$info" --bench 3 --topk 2 "$tmp/a.aff" >"$tmp/info" 2>&1 || fail "aff-info --bench: $(tail -2 "$tmp/info")"
grep -qE '^bench +3 tokens of 2 experts a layer: .* GB/s, .* ms a token' "$tmp/info" || fail "aff-info --bench: $(tail -3 "$tmp/info")"
"$info" --bench 3 --json "$tmp/a.aff" >/dev/null 2>&1
[ $? = 2 ] || fail "aff-info --bench --json: expected exit code 2"
expect 0 'MiB in' --src "$src" --out "$tmp/d.aff" --experts mxfp4 --dspark
"$info" --draft "$tmp/d.aff" "$tmp/a.aff" >/dev/null 2>&1 || fail "aff-info --draft refuses the companion"
"$info" --against "$src" "$tmp/d.aff" >/dev/null 2>&1 || fail "aff-info --against refuses a companion"
"$info" --draft "$tmp/b.aff" "$tmp/a.aff" >"$tmp/info" 2>&1 && fail "aff-info --draft takes a model for a draft"
grep -q "mtp_main_proj" "$tmp/info" || fail "aff-info --draft: no reason given"
mkdir "$tmp/other"
cp "$src"/* "$tmp/other/"
printf ' ' >>"$tmp/other/config.json"
"$info" --against "$tmp/other" "$tmp/a.aff" >"$tmp/info" 2>&1 && fail "aff-info --against: another config passes"
grep -q "its config differs" "$tmp/info" || fail "aff-info --against: $(tail -1 "$tmp/info")"
"$info" --against "$(dirname "$src")/ckpt-mtp1" "$tmp/a.aff" >/dev/null 2>&1 && fail "aff-info --against: another checkpoint passes"
rm -rf "$tmp/other" "$tmp/d.aff" "$tmp/info"

# A lock held by someone else; an output that another run made stays as it is.
before=$(cksum <"$tmp/a.aff")
(
    flock 9
    expect 1 'another program is writing' --src "$src" --out "$tmp/a.aff" --experts mxfp4
    exit $fails
) 9>"$tmp/a.aff.lock" || fails=$((fails + 1))
[ "$before" = "$(cksum <"$tmp/a.aff")" ] || fail "a locked output changed"

# Killed at any moment: nothing under the final name; --resume gives the file of one run. The kills come earlier and earlier in a run.
cb=$tmp/cb.raw
expect 0 'codebook' --src "$src" --codebook-out "$cb"
expect 0 'verified' --src "$src" --out "$tmp/one.aff" --codebook-raw "$cb" --threads 1 --verify
start=$(date +%s%N)
"$bin" --src "$src" --out "$tmp/k.aff" --codebook-raw "$cb" --threads 1 >/dev/null 2>&1
took=$(($(date +%s%N) - start))
rm -f "$tmp/k.aff"
kept=0
for i in $(seq 20); do
    "$bin" --src "$src" --out "$tmp/k.aff" --codebook-raw "$cb" --threads $((i % 3 + 1)) --resume >"$tmp/log" 2>&1 &
    pid=$!
    sleep "$(awk -v t=$took -v i="$i" 'BEGIN { srand(i); printf "%.3f", t * 1e-9 * (0.3 + 0.6 * rand()) }')"
    if kill -KILL $pid 2>/dev/null; then
        wait $pid 2>/dev/null
        [ -e "$tmp/k.aff" ] && cmp -s "$tmp/k.aff" "$tmp/one.aff" || [ ! -e "$tmp/k.aff" ] || fail "kill $i left a wrong file under the final name"
    fi
    wait $pid 2>/dev/null
    [ $((i % 5)) = 0 ] || continue # let progress add up over five kills
    expect 0 'experts are there already' --src "$src" --out "$tmp/k.aff" --codebook-raw "$cb" --threads 2 --resume
    grep -q 'resume: 0 experts' "$tmp/log" || kept=$((kept + 1))
    cmp "$tmp/k.aff" "$tmp/one.aff" || fail "after kill $i, --resume gives another file"
    rm -f "$tmp/k.aff"
done
[ -e "$tmp/k.aff.partial" ] || [ -e "$tmp/k.aff.journal" ] && fail "a finished run left its partial file"

# Two runs at once: one makes the file, the other is told.
"$bin" --src "$src" --out "$tmp/two.aff" --codebook-raw "$cb" --threads 1 >"$tmp/log1" 2>&1 &
pid=$!
"$bin" --src "$src" --out "$tmp/two.aff" --codebook-raw "$cb" --threads 1 >"$tmp/log2" 2>&1
second=$?
wait $pid
first=$?
case $first$second in
00) ;; # one after the other
01 | 10) cat "$tmp/log1" "$tmp/log2" | grep -q 'another program is writing' || fail "two runs: the one refused does not say why" ;;
*) fail "two runs on one output end with $first and $second" ;;
esac
cmp "$tmp/two.aff" "$tmp/one.aff" || fail "two runs on one output give another file"
ls "$tmp"/two.aff.* >/dev/null 2>&1 && fail "two runs on one output leave something behind"

# No index and no single file; an index whose shard is gone; a name twice in one shard.
mkdir "$tmp/ck"
cp "$src/config.json" "$tmp/ck/"
expect 1 'model.safetensors' --src "$tmp/ck" --out "$tmp/x.aff"
cp "$src"/*.index.json "$tmp/ck/"
expect 1 'model-00001-of-' --src "$tmp/ck" --out "$tmp/x.aff"
rm "$tmp/ck"/*.index.json
header='{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"bee.weight":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"bee.weight":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
printf "\\x$(printf %02x ${#header})\\0\\0\\0\\0\\0\\0\\0%s..." "$header" >"$tmp/ck/model.safetensors"
expect 1 'bee.weight' --src "$tmp/ck" --out "$tmp/x.aff"
expect 1 'duplicate' --src "$tmp/ck" --out "$tmp/x.aff"

# Where nothing can be written, a limit on file sizes, a full disk.
expect 1 'cannot create' --src "$src" --out /proc/x.aff --experts mxfp4
(
    ulimit -f 1000
    expect 1 'cannot make it .* bytes long' --src "$src" --out "$tmp/x.aff" --experts mxfp4
    exit $fails
) || fails=$((fails + 1))
ls "$tmp"/x.aff* >/dev/null 2>&1 && fail "refused runs left something behind"
if unshare -rm true 2>/dev/null; then
    export -f expect fail
    export bin src tmp cb
    unshare -rm bash -c '
        fails=0
        mkdir "$tmp/m"
        mount -t tmpfs -o size=4m tmpfs "$tmp/m"
        expect 1 "No space left on device" --src "$src" --out "$tmp/m/x.aff" --codebook-raw "$cb"
        [ -z "$(ls "$tmp/m")" ] || fail "a full disk: left behind: $(ls "$tmp/m")"
        mount -o remount,size=100m,ro "$tmp/m"
        expect 1 "Read-only file system" --src "$src" --out "$tmp/m/x.aff" --codebook-raw "$cb"
        mount -o remount,rw "$tmp/m"
        expect 0 "MiB in" --src "$src" --out "$tmp/m/x.aff" --codebook-raw "$cb"
        cmp "$tmp/m/x.aff" "$tmp/one.aff" || fail "another file system, another file"
        umount "$tmp/m"
        exit $fails' || fails=$((fails + 1))
else
    echo "no user namespaces here: full and read-only file systems are left out"
fi

[ $fails = 0 ] && echo "ok"
exit $((fails > 0))
