#!/bin/bash
# aff-bench from the outside: columns that add up, synthetic models, traces, refusals.
. "$(dirname "$0")/cli.bash"
affinity=$bin/aff-bench
model=$src/models/tiny-v4

runs -m "$model" --threads 1 --ctx-min 32 --ctx-max 100 -n 12 --memory-rate 10
same "a comment, a head and three contexts" 5 "$(wc -l <"$tmp/out")"
grep -q '^# .*tiny-v4; .*; 1 threads; memory 10.00 GB/s (given)$' "$tmp/out" || fail "the comment: $(head -n 1 "$tmp/out")"
same "contexts" "32 64 100" "$(sed 1,2d "$tmp/out" | cut -d, -f1 | xargs)"
same "prompt tokens run" "31 32 36" "$(sed 1,2d "$tmp/out" | cut -d, -f2 | xargs)"
sed 1,2d "$tmp/out" | awk -F, '
    NF != 24 { print "columns: " NF; exit 1 }
    $5 != 12 || $8 * $9 < 11.9 || $8 * $9 > 12.1 { print "tokens and passes: " $0; exit 1 }
    ($22 - $19 - $20 - $21) ^ 2 > 0.0001 { print "bytes do not add up: " $0; exit 1 }
    ($23 * $22 / 10000 - 1) ^ 2 > 0.0001 { print "floor is not rate / bytes: " $0; exit 1 }
    $18 != 1 { print "hit rate: " $0; exit 1 }' || fail "columns"
# One pass a token without drafts; its dense bytes are those of every pass.
runs -m "$model" --threads 1 --ctx-min 40 --ctx-max 40 -n 5 --memory-rate 10 --dspark-width 0
dense=$(sed 1,2d "$tmp/out" | cut -d, -f19)
same "passes without drafts" 5 "$(sed 1,2d "$tmp/out" | cut -d, -f8)"
same "no acceptance" ",,,,," "$(sed 1,2d "$tmp/out" | cut -d, -f12-17 | sed 's/[0-9.]*$//')"
runs -m "$model" --threads 1 --ctx-min 80 --ctx-max 80 -n 5 --memory-rate 10 --dspark-width 0 --text "$src/README.md"
same "dense bytes" "$dense" "$(sed 1,2d "$tmp/out" | cut -d, -f19)"

runs --synthetic tiny --layers 4 --experts 8 --threads 1 --ctx-min 20 --ctx-max 40 -n 3 --memory-rate 10 --route-skew 1 --route-locality 0.5 --route-trace "$tmp/trace" -o "$tmp/csv"
same "nothing on stdout with -o" "" "$(cat "$tmp/out")"
same "lines" 4 "$(wc -l <"$tmp/csv")"
grep -qF 'routes are made up' "$tmp/err" || fail "forced routes are said"
same "head of the trace" "# aff-route-trace 1 layers=4 experts=8 k=4" "$(head -n 1 "$tmp/trace")"
# Two contexts of one prompt pass and three decode passes, four layers each.
same "dispatches" $((2 * (1 + 3) * 4)) "$(grep -c '^D ' "$tmp/trace")"
first=$(grep '^D ' "$tmp/trace" | md5sum)
runs --synthetic tiny --layers 4 --experts 8 --threads 1 --ctx-min 20 --ctx-max 40 -n 3 --memory-rate 10 --route-skew 1 --route-locality 0.5 --route-trace "$tmp/trace"
same "forced routes again" "$first" "$(grep '^D ' "$tmp/trace" | md5sum)"

# Routes by tier: a line with every pick a hit and one for each rate; 16 picks a token, four in each of four layers.
runs --synthetic tiny --layers 4 --experts 16 --threads 1 --ctx-min 20 --hit-rate 0.5,0.9 -n 40 --memory-rate 10
same "rates" "1.000 0.500 0.900" "$(sed 1,2d "$tmp/out" | cut -d, -f1 | xargs)"
sed 1,2d "$tmp/out" | awk -F, 'NF != 25 || $6 + $7 + $8 != 16 { print; exit 1 }' || fail "columns by tier"
grep -qF 'routes are dealt to the tiers' "$tmp/err" || fail "forced routes are said"
refused 2 "--hit-rate: expected numbers of 0 to 1 with commas between them, got '0.5,'" --synthetic tiny --hit-rate 0.5,
refused 2 "--hit-rate: expected numbers of 0 to 1 with commas between them, got '1.5'" --synthetic tiny --hit-rate 1.5
refused 2 "--hit-rate: expected no other --route flag" --synthetic tiny --hit-rate 1 --route-skew 1
refused 2 "--hit-rate: expected --dspark off" -m "$model" --hit-rate 1 --dspark on
refused 2 "--hit-rate on a card: expected --memory-rate and --link-rate" --synthetic tiny --hit-rate 1 --device emu:1G
refused 2 "--disk-rate, --link-rate: expected a card" --synthetic tiny --hit-rate 1 --disk-rate 0.1
refused 2 "--disk-rate, --link-rate: expected --hit-rate" --synthetic tiny --link-rate 50

"$affinity" --synthetic flash --plan --machine ram=64G >"$tmp/out" 2>"$tmp/err"
same "exit code of a plan that does not fit" 3 $?
"$affinity" --synthetic flash --layers 2 --experts 8 --plan --machine ram=64G >"$tmp/out" 2>"$tmp/err"
same "exit code of one that does" 0 $?
refused 2 "expected a model" --ctx-max 10
refused 2 "expected a model" --synthetic tiny -m "$model"
refused 2 "synthetic: expected flash or tiny, got 'big'" --synthetic big
refused 2 "synthetic tiny: layers: expected 1 to 6, got 7" --synthetic tiny --layers 7
refused 2 "--layers, --experts, --expert-file: expected --synthetic" -m "$model" --layers 2
refused 2 "--ctx-max: expected at least --ctx-min" -m "$model" --ctx-min 100 --ctx-max 50
refused 2 "--ctx-max: expected at most 65472" -m "$model" --ctx-max 70000
refused 3 "memory plan: does not fit" --synthetic tiny --memory 5
refused 1 "/nonexistent-folder" --synthetic tiny --layers 1 --experts 4 --ctx-min 4 --ctx-max 4 -n 1 --memory-rate 1 -o /nonexistent-folder/x
finish
