#!/bin/bash
# aff-profile from the outside: made-up traces, figures that agree with each other, profiles, refusals.
. "$(dirname "$0")/cli.bash"
affinity=$bin/aff-profile

runs --generate "$tmp/t" --layers 4 --experts 32 --picks 4 --tokens 300 --prompt 40 --skew 0.8 --locality 0.6
same "head of a made-up trace" "# aff-route-trace 1 layers=4 experts=32 k=4" "$(head -n 1 "$tmp/t")"
same "its dispatches" $((4 * 301)) "$(grep -c '^D ' "$tmp/t")"
runs --generate "$tmp/u" --layers 4 --experts 32 --picks 4 --tokens 300 --prompt 40 --skew 0.8 --locality 0.6
same_file "the same again" "$tmp/t" "$tmp/u"
runs --generate "$tmp/u" --layers 4 --experts 32 --picks 4 --tokens 300 --prompt 40 --skew 0.8 --locality 0.6 --seed 1
cmp -s "$tmp/t" "$tmp/u" && fail "another seed, the same trace"

runs "$tmp/t" "$tmp/u"
grep -qE ' 40 +300 +1204 +0 +' "$tmp/out" || fail "summary: $(cat "$tmp/out")"
runs --simulate --slab 45% -o "$tmp/csv" "$tmp/t" "$tmp/u"
same "strategies of two traces and both" 25 "$(wc -l <"$tmp/csv")"
awk -F, 'NR == 1 { n = NF; next }
    NF != n { print "columns: " NF; exit 1 }
    $3 != 57 || $4 != 128 || $5 != 1 { print "slots: " $0; exit 1 }
    { slab[$1 "/" $2] = $11; link[$1 "/" $2] = $14; moves[$1 "/" $2] = $13
      # what crosses the link: misses, and copies where they do not ride on them. 16 picks a token
      copies = $2 ~ /LRU|LFU|Belady/ ? 0 : $13
      if (($14 - copies - 16 * (1 - $11)) ^ 2 > 1e-4) { print "link: " $0; exit 1 }
      if ($12 != 1) { print "an inclusive pool of everything misses: " $0; exit 1 } }
    END { for (t in slab) { split(t, a, "/"); if (slab[t] > slab[a[1] "/Belady"]) { print t " beats the bound"; exit 1 }
            if (a[2] ~ /static/ && moves[t] != 0) { print "static moves"; exit 1 } } }' "$tmp/csv" || fail "figures of the CSV"
runs --simulate --slab 0 --pool 20 "$tmp/t"
same "no card: placement alone" 4 "$(grep -c '^t ' "$tmp/out")"
runs --simulate --slab 1 --pool 1 "$tmp/t"
runs --simulate --slab 128 --pool 0 "$tmp/t"
grep -qE '^t +heat +\| 100.00%' "$tmp/out" || fail "everything in the slab: $(cat "$tmp/out")"
runs --sweep --by hits -o "$tmp/csv" "$tmp/t"
awk -F, 'NR == 2 { first = $11 } NR > 2 && $11 < last { exit 1 } { last = $11 }' "$tmp/csv" || fail "a sweep goes down"
grep -q '^best by hits: decay ' "$tmp/out" || fail "what a sweep says"

runs --fit "$tmp/p" "$tmp/t" "$tmp/u"
same "bytes of a profile" $((16 + 4 * 4 * 32)) "$(stat -c %s "$tmp/p")"
runs --simulate --profile "$tmp/p" "$tmp/t"
grep -q '^t  *static profile' "$tmp/out" || fail "static with a profile"
runs --fit "$tmp/m" --maps "$tmp/t"
same "bytes of maps" $((16 + 4 * 4 * 32 + 24 + 3 * (4 * 32 + 4 * 32 * 32) + 8)) "$(stat -c %s "$tmp/m")"
runs --simulate --profile "$tmp/m" "$tmp/t"
runs --recall --hold-out 1 -o "$tmp/csv" "$tmp/t" "$tmp/u"
same "recall of three layers and all" $((1 + 4 * 5 * 4)) "$(wc -l <"$tmp/csv")"
grep -q '^all,map,16,' "$tmp/csv" || fail "recall of the map"

# Traces of a model, a profile of it in use: which changes no text.
"$bin/affinity" -m "$src/models/tiny-v4" -p "The capital of France is" -n 12 --dspark off --route-trace "$tmp/r" >"$tmp/plain" 2>"$tmp/err" || fail "affinity: $(tail -n 1 "$tmp/err")"
runs --fit "$tmp/q" "$tmp/r"
same "the model's profile" $((16 + 4 * 6 * 16)) "$(stat -c %s "$tmp/q")"
for strategy in heat static; do
    "$bin/affinity" -m "$src/models/tiny-v4" -p "The capital of France is" -n 12 --dspark off --host-pool-mib 3 --placement-strategy $strategy --expert-profile "$tmp/q" >"$tmp/out" 2>"$tmp/err" ||
        fail "affinity with a profile: $(tail -n 1 "$tmp/err")"
    same_file "text with a profile, $strategy" "$tmp/plain" "$tmp/out"
done
"$bin/affinity" -m "$src/models/tiny-v4" -p x -n 1 --expert-profile "$tmp/q" >"$tmp/out" 2>"$tmp/err" || fail "affinity with all experts mapped"
grep -q -- "--expert-profile: not used" "$tmp/err" || fail "a profile that is of no use is said: $(cat "$tmp/err")"
"$bin/affinity" -m "$src/models/tiny-v4" -p x -n 1 --expert-profile "$tmp/p" >"$tmp/out" 2>"$tmp/err" && fail "another model's profile was taken"
grep -q "expert profile of another model: expected 6 layers of 16 experts, got 4 of 32" "$tmp/err" || fail "another model's profile: $(cat "$tmp/err")"
"$bin/aff-bench" -m "$src/models/tiny-v4" --foresight --ctx-min 40 --ctx-max 40 >"$tmp/out" 2>"$tmp/err" || fail "foresight: $(tail -n 1 "$tmp/err")"
same "foresight: three moments, four layers and all, four sizes" $((1 + 3 * 5 * 4)) "$(wc -l <"$tmp/out")"

"$affinity" --help >"$tmp/out"
for flag in $(grep -o '{"[a-z-]*", *\(0\|.o.\),' "$src/tools/aff-profile.c" | sed 's/{"\([a-z-]*\)".*/\1/'); do
    grep -q -- "--$flag" "$tmp/out" || fail "--help lacks --$flag"
done
grep -q -- --placement-shadow "$tmp/out" || fail "--help lacks the placement's flags"

refused 2 "expected at least one route trace, got none"
refused 2 "--by: expected link or hits, got 'speed'" --sweep --by speed "$tmp/t"
refused 2 "--slab: expected a number of slots" --simulate --slab 45x "$tmp/t"
refused 2 "--slab: expected a number of slots" --simulate --slab 101% "$tmp/t"
refused 2 "--slab: expected a number of slots" --simulate --slab nan "$tmp/t"
refused 2 "--pool: expected a number of slots" --simulate --pool -1 "$tmp/t"
refused 2 "--placement-strategy: expected heat, demand or static, got 'lru'" --simulate --placement-strategy lru "$tmp/t"
refused 2 "--placement-decay: expected 0 to 1, got 1.5" --simulate --placement-decay 1.5 "$tmp/t"
refused 2 "--placement-decay" --simulate --placement-decay nan "$tmp/t"
refused 2 "--inclusive: expected a pool" --simulate --inclusive --pool 5 --slab 10 "$tmp/t"
refused 2 "--inclusive and --exclusive" --simulate --inclusive --exclusive "$tmp/t"
refused 2 "expected at most one of them" --simulate --recall "$tmp/t"
refused 2 "--hold-out: expected fewer than the 1 traces" --recall --hold-out 1 "$tmp/t"
refused 2 "--maps: expected --fit" --maps "$tmp/t"
refused 2 "--generate: expected no traces" --generate "$tmp/x" "$tmp/t"
refused 2 "routes: 6 of 4 experts" --generate "$tmp/x" --experts 4
[ ! -e "$tmp/x" ] || fail "a refused trace is there"
runs --generate "$tmp/x" --layers 3 --experts 32 --picks 4 --tokens 3
refused 2 "3 layers of 32 experts, 4 picks: expected those of" "$tmp/t" "$tmp/x"
refused 1 "expert profile of another model: expected 3 layers" --simulate --profile "$tmp/p" "$tmp/x"
head -c 3000 "$tmp/t" >"$tmp/cut"
refused 1 "ends within a line" "$tmp/cut"
head -n 1 "$tmp/t" >"$tmp/none"
refused 1 "no dispatch of the trunk" "$tmp/none"
refused 1 "/nonexistent" /nonexistent
refused 1 "/nonexistent" --fit /nonexistent/p "$tmp/t"
refused 1 "/nonexistent" --simulate -o /nonexistent/c "$tmp/t"
finish
