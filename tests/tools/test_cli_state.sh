#!/bin/bash
# Memory plan, state and prefix cache of affinity from the outside.
. "$(dirname "$0")/cli.bash"
model=$src/models/tiny-v4
m=(-m "$model" --threads 1)
ask="The capital of France is"

# plan CODE ARGS...: the plan on stdout, nothing on stderr.
plan() {
    local code=$1 got
    shift
    "$affinity" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    got=$?
    [ $got -eq "$code" ] || fail "affinity $*: expected exit code $code, got $got: $(cat "$tmp/err")"
    [ ! -s "$tmp/err" ] || fail "affinity $*: expected nothing on stderr, got: $(cat "$tmp/err")"
}
plan 0 "${m[@]}" --plan
grep -q 'verdict: fits' "$tmp/out" || fail "a verdict: $(cat "$tmp/out")"
grep -q 'sequence of up to 65536 positions' "$tmp/out" || fail "without a prompt, the model's context"
plan 0 "${m[@]}" --plan -p "$ask" -n 8
grep -q 'sequence of up to 14 positions' "$tmp/out" || fail "with a prompt, what it needs: $(cat "$tmp/out")"
plan 3 "${m[@]}" --plan --memory 10
grep -q 'verdict: does not fit: .* needed, 10.0 MiB available' "$tmp/out" || fail "a verdict: $(cat "$tmp/out")"
plan 0 "${m[@]}" --plan --machine 2x32G,ram=64G,pcie=27
grep -q 'card 1: 32.00 GiB' "$tmp/out" || fail "cards: $(cat "$tmp/out")"
plan 3 "${m[@]}" --plan --machine ram=1G
plan 0 "${m[@]}" --plan-json --slots 3
grep -q '"fits": true' "$tmp/out" || fail "JSON: $(cat "$tmp/out")"
plan 0 --serve -m "$model" --plan --slots 2 --kv-size 4096 --kv-commit 1000
grep -q '2 sequences of up to 4096 positions' "$tmp/out" || fail "the server's plan: $(cat "$tmp/out")"
plan 3 --serve -m "$model" --plan --memory 20
refused 2 "--machine: expected cards and memory as in" "${m[@]}" --plan --machine 32G
refused 2 "--machine: expected --plan with it" "${m[@]}" -p x --machine ram=64G
refused 2 "expected one of them, got both" "${m[@]}" --plan --machine ram=64G --memory 5
refused 3 "memory plan: does not fit: " "${m[@]}" -p x --memory 5
refused 3 "memory plan: does not fit: " --serve -m "$model" --memory 5
refused 2 "--kv-commit: expected at most" "${m[@]}" -p x --kv-size 10 --kv-commit 10000
refused 1 "--kv-size: expected at most 65536" "${m[@]}" -p x --kv-size 70000
refused 1 "prompt: expected at most --kv-size 3 tokens, got 6" "${m[@]}" -p "$ask" --kv-size 3
refused 2 "expected --prefix-cache-dir with them" "${m[@]}" -p x --prefix-cache-verify

# State: the same text with any way of backing it; the context ends where --kv-size says, also inside a drafted block.
runs "${m[@]}" -p "$ask" -n 60 --ignore-eos
want=$(generated)
for flags in "--kv-commit 0 --kv-margin 1" "--kv-size 300 --kv-commit 300" "--kv-commit 7 --kv-margin 3"; do
    # shellcheck disable=SC2086
    runs "${m[@]}" -p "$ask" -n 60 --ignore-eos $flags
    same "text with $flags" "$want" "$(generated)"
done
for width in 0 5; do
    runs "${m[@]}" -p "$ask" -n 60 --ignore-eos --kv-size 20 --dspark-width $width
    grep -qF '[stopped at the end of the context]' "$tmp/err" || fail "the end of the context: $(tail -n 2 "$tmp/err")"
    same "text up to the end of the context" "$(cut -d, -f1-15 <<<"$want")" "$(generated)"
done

# Prefix cache: the second run starts where the first one's prompt ended, a longer one where its answer did.
yes "The cat sat on the mat. The dog lay by the door." | head -n 40 | tr '\n' ' ' >"$tmp/long"
cache=(--prefix-cache-dir "$tmp/cache" --prefix-cache-gib 1 --prefix-cache-block 64 --persistent-prefix-cache --prefix-cache-verify)
restored() { sed -n 's/^prefix cache: \([0-9]*\) of .*/\1/p' "$tmp/err"; }
runs "${m[@]}" --prompt-file "$tmp/long" -n 20 --ignore-eos
want=$(generated)
runs "${m[@]}" --prompt-file "$tmp/long" -n 20 --ignore-eos "${cache[@]}"
same "text with an empty cache" "$want" "$(generated)"
same "restored from an empty cache" 0 "$(restored)"
runs "${m[@]}" --prompt-file "$tmp/long" -n 20 --ignore-eos "${cache[@]}"
same "text with a cache" "$want" "$(generated)"
tokens=$(grep -o 'restored' "$tmp/err" | wc -l)
same "one line of the cache" 1 "$tokens"
all=$(sed -n 's/^prefix cache: \([0-9]*\) of \([0-9]*\) .*/\2/p' "$tmp/err")
same "all of the prompt but its last token is restored" "$all" "$(restored)"
[ "$all" -gt 400 ] || fail "the prompt is long: $all"
! find "$tmp/cache" -type f ! -perm 600 | grep -q . || fail "files of mode 0600"
# A flipped byte is a miss, and the text is right.
for f in "$tmp/cache"/*.ckp; do printf 'X' | dd of="$f" bs=1 seek=9000 conv=notrunc status=none; done
runs "${m[@]}" --prompt-file "$tmp/long" -n 20 --ignore-eos "${cache[@]}"
same "text with a damaged cache" "$want" "$(generated)"
same "restored from a damaged cache" 0 "$(restored)"
grep -qF 'a damaged entry was removed' "$tmp/err" || fail "damage is said: $(cat "$tmp/err")"
# Another block length: the entries there are another layout's.
runs "${m[@]}" --prompt-file "$tmp/long" -n 20 --ignore-eos --prefix-cache-dir "$tmp/cache" --prefix-cache-block 32
same "text beside entries of another layout" "$want" "$(generated)"
same "restored from entries of another layout" 0 "$(restored)"
# Without the flag nothing stays; a file in the folder's place is an error.
runs "${m[@]}" -p "$ask" -n 2 --prefix-cache-dir "$tmp/passing"
same "entries left by a passing cache" 0 "$(find "$tmp/passing" -name '*.ckp' -o -name '*.blk' | wc -l)"
: >"$tmp/file"
refused 1 "$tmp/file" "${m[@]}" -p "$ask" -n 2 --prefix-cache-dir "$tmp/file"
finish
