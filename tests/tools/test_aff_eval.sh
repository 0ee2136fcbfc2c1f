#!/bin/bash
# aff-eval and affinity --collect-imatrix from the outside: figures do not depend on how they are computed, saved logits stand for their
# model, everything wrong is refused in one line, nothing is left behind.
. "$(dirname "$0")/cli.bash"
eval=$bin/aff-eval
[ -x "$eval" ] || { echo "$eval is missing"; exit 1; }
model=$src/tests/golden/v4-sim/ckpt-dspark other=$src/tests/golden/v4-sim/ckpt-mtp1 # 256 and 160 ids
seq 0 149 | awk '{print ($1 * $1 * 7 + $1 * 3 + 1) % 256}' >"$tmp/ids"
text=(--tokens "@$tmp/ids" --chunk 40)

# judged NAME ARGS...: must succeed; JSON in $tmp/NAME.
judged() {
    local name=$1
    shift
    "$eval" "$@" --json >"$tmp/$name" 2>"$tmp/err" </dev/null || fail "aff-eval $*: $(cat "$tmp/err")"
}

# eval_refused CODE TEXT ARGS...
eval_refused() {
    local affinity=$eval
    refused "$@"
}

# field FILE KEY: the first number after "KEY" in the JSON (mean of a statistic).
field() { grep -A1 "\"$2\":" "$tmp/$1" | tr -d '\n' | sed 's/^[^:]*: *[{ ]*\("mean": \)*//; s/[ ,].*//'; }
# figures FILE: all but the names of the models and what an option says of them.
figures() { sed -e '/"path"/d; /"fingerprint"/d; /"floor"/,/^ }/d' "$tmp/$1"; }

judged direct -m "$model" --numerics fast --ref "$model" --ref-numerics sim "${text[@]}" --floor 0
same "positions" 150 "$(field direct positions)"
for way in "--threads 1" "--threads 3 --memory 1" "--cpu-path scalar" "--cpu-path avx2 --threads 2"; do
    # shellcheck disable=SC2086
    judged way -m "$model" --ref "$model" --ref-numerics sim "${text[@]}" --floor 0 $way
    same_file "$way" "$tmp/direct" "$tmp/way"
done

# Saved and reused: the same figures; with the largest logits only, all but KL, which is a lower bound.
"$eval" --ref "$model" --ref-numerics sim "${text[@]}" --save-logits "$tmp/full" >"$tmp/out" 2>"$tmp/err" || fail "--save-logits: $(cat "$tmp/err")"
same "size of saved logits" $((80 + 150 * 256 * 4)) "$(wc -c <"$tmp/full")"
judged saved -m "$model" --logits "$tmp/full" "${text[@]}" --floor 0
figures direct >"$tmp/a"
figures saved >"$tmp/b"
same_file "--logits" "$tmp/a" "$tmp/b"
judged again -m "$model" --numerics math --ref "$model" --ref-numerics sim "${text[@]}" --save-logits "$tmp/full2" --floor 0
same_file "--save-logits beside a comparison" "$tmp/full" "$tmp/full2"
"$eval" -m "$model" --numerics sim "${text[@]}" --save-logits "$tmp/top20" --top 20 >/dev/null 2>"$tmp/err" || fail "--top: $(cat "$tmp/err")"
same "size with --top 20" $((80 + 150 * (24 + 20 * 8))) "$(wc -c <"$tmp/top20")"
judged top -m "$model" --logits "$tmp/top20" "${text[@]}" --floor 0
for key in perplexity reference_perplexity nll delta_nll top1 top5; do same "$key with --top" "$(field direct $key)" "$(field top $key)"; done
awk -v a="$(field top kl)" -v b="$(field direct kl)" 'BEGIN {exit !(a > 0 && a < b)}' || fail "--top: KL $(field top kl) is no lower bound of $(field direct kl)"
grep -q '"kl_is_lower_bound": true' "$tmp/top" || fail "--top: no word that KL is a lower bound"

# A model is itself; the floor says so. --skip, --limit, begin-of-sequence in the ids.
judged self -m "$model" --ref "$model" "${text[@]}"
same "KL of a model with itself" 0.0 "$(field self kl)"
same "width floor" 1 "$(grep -c '"width_differs": 0' "$tmp/self")"
judged limit -m "$model" "${text[@]}" --limit 80 --skip 10
same "positions of --limit 80 --skip 10" 60 "$(field limit positions)"
{ echo 0; cat "$tmp/ids"; } >"$tmp/ids0"
judged bos -m "$model" --tokens "@$tmp/ids0" --chunk 40
judged plain -m "$model" "${text[@]}"
same_file "ids after begin-of-sequence" "$tmp/plain" "$tmp/bos"
"$eval" -m "$model" --ref "$model" --ref-numerics math "${text[@]}" --worst 3 >"$tmp/out" 2>"$tmp/err" || fail "text output: $(cat "$tmp/err")"
for word in "same top 1" "shared of top 5" "KL(reference, model)" "std error" "median" "p99" "KL 0, every figure equal" "fast against sim"; do
    grep -qF "$word" "$tmp/out" || fail "text output: no '$word'"
done
same "worst positions" 3 "$(sed '1,/^ *token /d' "$tmp/out" | wc -l)"
# Perplexity against the logits that affinity writes for one sequence.
{ echo 0; head -n 39 "$tmp/ids"; } | tr '\n' ',' | sed 's/,$//' >"$tmp/rows"
runs -m "$model" --tokens "$(cat "$tmp/rows")" --logits-out "$tmp/l"
judged one -m "$model" "${text[@]}" --limit 40
od -An -v -tf4 -w1024 "$tmp/l" | awk -v ids="$tmp/ids" -v got="$(field one perplexity)" '
    { getline t < ids; m = $1 + 0; for (i = 1; i <= NF; i++) if ($i + 0 > m) m = $i + 0
      s = 0; for (i = 1; i <= NF; i++) s += exp($i - m)
      nll += m + log(s) - $(t + 1) }
    END { p = exp(nll / NR); d = (p - got) / p; if (NR != 40 || d > 1e-5 || d < -1e-5) { print NR, p, got; exit 1 } }' >"$tmp/why" ||
    fail "perplexity against --logits-out: $(cat "$tmp/why")"

# Refused.
echo "1 oops" >"$tmp/oops"
eval_refused 2 "expected a model"
eval_refused 2 "expected a text" -m "$model"
eval_refused 2 "one of them, got both" -m "$model" --ref "$model" --logits x --tokens 1
eval_refused 2 "expected math, sim or fast, got 'exact'" -m "$model" --tokens 1 --numerics exact
eval_refused 2 "--skip" -m "$model" --tokens 1 --chunk 4 --skip 4
eval_refused 2 "--top" -m "$model" --tokens 1 --top 20
eval_refused 2 "--top" -m "$model" --tokens 1 --top 3 --save-logits "$tmp/x"
eval_refused 2 "already saved" -m "$model" --tokens 1 --logits "$tmp/full" --save-logits "$tmp/x"
eval_refused 2 "got 'b'" -m "$model" --tokens 1,b
eval_refused 1 "got 'oops'" -m "$model" --tokens "@$tmp/oops"
eval_refused 1 "expected an id of 0 to 255, got 256" -m "$model" --tokens 1,256
eval_refused 1 "begin-of-sequence alone" -m "$model" --tokens 0
eval_refused 1 "/nonexistent" -m /nonexistent --tokens 1
eval_refused 1 "expected 1 to 4096" -m "$model" --tokens 1 --chunk 5000
eval_refused 1 "of another text" -m "$model" --logits "$tmp/full" --tokens "@$tmp/ids" --chunk 41
eval_refused 1 "of another text" -m "$model" --logits "$tmp/full" "${text[@]}" --limit 149
eval_refused 1 "not a file of saved logits" -m "$model" --logits "$tmp/ids" "${text[@]}"
head -c 5000 "$tmp/full" >"$tmp/cut"
eval_refused 1 "expected 150 rows" -m "$model" --logits "$tmp/cut" "${text[@]}"
eval_refused 1 "tokenizer.json" -m "$model" --prompt-file "$tmp/ids"
eval_refused 1 "expected a vocabulary of 256" -m "$model" --ref "$other" "${text[@]}"
eval_refused 1 "at most the vocabulary" -m "$model" "${text[@]}" --save-logits "$tmp/x" --top 300
same "files of refused runs" "" "$(find "$tmp" -name 'x*')"

# The importance matrix: the same file at any width, thread count and path; quiet about nothing.
collect=(-m "$model" --tokens "@$tmp/ids" --imatrix-chunk 40 --collect-imatrix)
runs "${collect[@]}" "$tmp/im1" --threads 1
same "closing line" "$tmp/im1: 150 tokens in sequences of 40; 0 of 15 experts were never used" "$(cat "$tmp/out")"
runs "${collect[@]}" "$tmp/im2" --threads 3 --cpu-path scalar
same_file "--collect-imatrix" "$tmp/im1" "$tmp/im2"
same "magic" GGUF "$(head -c 4 "$tmp/im1")"
refused 2 "--imatrix-chunk" -m "$model" --tokens 1,2 --imatrix-chunk 9
refused 2 "--collect-imatrix generates nothing" "${collect[@]}" "$tmp/x" -n 4
refused 2 "--collect-imatrix generates nothing" "${collect[@]}" "$tmp/x" --temp 1
refused 1 "expected 1 to 4096" -m "$model" --tokens 1,2 --imatrix-chunk 5000 --collect-imatrix "$tmp/x"
refused 1 "cannot create" "${collect[@]}" "$tmp/nowhere/x"
refused 1 "expected an id of 0 to 255, got 300" -m "$model" --tokens 1,300 --collect-imatrix "$tmp/x"
same "files of refused runs" "" "$(find "$tmp" -name 'x*')"
finish
