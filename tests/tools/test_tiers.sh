#!/bin/bash
# Tiers from the outside: no pool size and no knob changes a text; what cannot be is refused with what can.
. "$(dirname "$0")/cli.bash"
affinity=$bin/affinity
model=$src/models/tiny-v4
text=(-m "$model" --prompt "The capital of France is" -n 10 --temp 0 --threads 1)

runs "${text[@]}"
want=$(cat "$tmp/out")
grep -q '^experts: ' "$tmp/err" && fail "a model that fits has no line about tiers"
same_text() {
    runs "${text[@]}" "$@"
    same "the text with $*" "$want" "$(cat "$tmp/out")"
    grep -q '^experts: in memory' "$tmp/err" || fail "no line about tiers with $*"
}
for mib in 0 1 3 1000000; do same_text --host-pool-mib $mib; done
for strategy in heat demand static; do same_text --host-pool-mib 2 --placement-strategy $strategy; done
same_text --host-pool-mib 2 --placement-moves 0 --placement-decay 0 --placement-hysteresis 1000 --placement-min-gain 1e6
same_text --host-pool-mib 2 --placement-moves 4096 --placement-decay 1 --placement-hysteresis 0 --placement-min-gain 0 --placement-lead 0 --placement-shadow 4096
same_text --host-pool-mib 2 --host-pool-reserve-mib 0 --placement-lead 127 --placement-shadow 1

wrong() { # TEXT FLAGS...
    local what=$1
    shift
    "$affinity" "${text[@]}" "$@" >"$tmp/out" 2>"$tmp/err" && fail "$* should be refused"
    grep -qF -- "$what" "$tmp/err" || fail "$*: expected '$what', got: $(tail -n 1 "$tmp/err")"
}
wrong "placement-moves" --placement-moves 4097
wrong "placement-decay" --placement-decay nan
wrong "placement-decay" --placement-decay 1.1
wrong "placement-strategy" --placement-strategy luck
wrong "host-pool-mib" --host-pool-mib -1
wrong "--expert-copies: expected a model in one file" --host-pool-mib 2 --expert-copies "$model/config.json"

# A profile: the pool begins with it; one of another model is none.
runs "${text[@]}" --route-trace "$tmp/trace"
affinity=$bin/aff-profile
runs --fit "$tmp/profile" "$tmp/trace"
affinity=$bin/affinity
same_text --host-pool-mib 2 --expert-profile "$tmp/profile"
head -c 100 "$tmp/profile" >"$tmp/half"
wrong "$tmp/half" --host-pool-mib 2 --expert-profile "$tmp/half"
wrong "layers" --host-pool-mib 2 --expert-profile "$tmp/profile" --max-layers 3

# The plan: what is kept where; memory that is not there is not promised.
"$affinity" -m "$model" --plan --host-pool-mib 2 >"$tmp/out" 2>"$tmp/err"
grep -q '^  experts: pool  *memory  *[0-9]*  31 of 144 in slots of 53248 bytes$' "$tmp/out" || fail "pool: $(cat "$tmp/out")"
grep -q '^  experts: staging  *memory  *425984  8 slots' "$tmp/out" || fail "staging: $(cat "$tmp/out")"
grep -q '^  routed experts  *disk  *5013504' "$tmp/out" || fail "experts on disk: $(cat "$tmp/out")"
"$affinity" -m "$model" --plan --host-pool-mib 1000 --memory 1600 >"$tmp/out" 2>"$tmp/err"
grep -q 'MORE WAS ASKED FOR' "$tmp/out" || fail "clamped: $(cat "$tmp/out")"
affinity=$bin/aff-bench
"$affinity" --synthetic flash --layers 1 --experts 8 --plan --host-pool-mib 51 >"$tmp/out" 2>"$tmp/err" && fail "fewer slots than a token uses"
grep -qF 'expected --host-pool-mib 52 or more' "$tmp/err" || fail "the least: $(cat "$tmp/err")"

# Experts of a file, all on disk but a few, and a trace that finds the disk full.
runs --synthetic tiny --layers 3 --threads 1 --ctx-min 40 --ctx-max 40 -n 5 --memory-rate 10 --expert-file "$tmp/experts" --host-pool-mib 1 --route-trace "$tmp/trace"
grep -q '^aff-bench: experts: in memory' "$tmp/err" || fail "no line about tiers: $(cat "$tmp/err")"
awk '/^D / { sub(/.*\|/, ""); n += NF } END { exit n == 0 }' "$tmp/trace" || fail "the trace has no misses"
(
    trap '' XFSZ
    ulimit -f 2
    "$affinity" --synthetic tiny --layers 3 --threads 1 --ctx-min 40 --ctx-max 40 -n 5 --memory-rate 10 --route-trace "$tmp/full" >"$tmp/out" 2>"$tmp/err"
) && fail "a trace without room for it"
grep -qF "$tmp/full" "$tmp/err" || fail "a full disk: $(cat "$tmp/err")"
[ ! -e "$tmp/full" ] || fail "half a trace was left"
finish
