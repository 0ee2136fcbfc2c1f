#!/bin/bash
# affinity on text, with the demonstration model: prompts in, words out.
. "$(dirname "$0")/cli.bash"
model=$src/models/tiny-v4
[ -f "$model/config.json" ] || { echo "$model/config.json is missing: this is not a complete checkout"; exit 1; }
m=(-m "$model")
ask="The capital of France is"

# The answer, with and without the prompt before it. Without --no-echo the prompt stands first, as it was given.
runs "${m[@]}" -p "$ask" -n 8
greedy=$(generated)
grep -qF "$ask Paris" "$tmp/out" || fail "the capital of France: $(cat "$tmp/out")"
cp "$tmp/out" "$tmp/echoed"
runs "${m[@]}" -p "$ask" -n 8 --no-echo
same "prompt and continuation" "$(cat "$tmp/echoed")" "$ask$(cat "$tmp/out")"
runs "${m[@]}" --model "$model" --prompt "$ask" --n-predict 8 --numerics fast --temp 0
same "long names and defaults" "$greedy" "$(generated)"
runs "${m[@]}" -p "$ask" -n 1
same "-n 1" "${greedy%%,*}" "$(generated)"

# Tokens of a text: begin-of-sequence, then the text; control tokens are recognised, nothing is stripped.
runs --tokenizer "$model/tokenizer.json" --dump-tokens -p "$ask"
ids=$(cat "$tmp/out")
same "begin of sequence" 0 "${ids%%,*}"
same "lines of --dump-tokens" 1 "$(wc -l <"$tmp/out")"
runs "${m[@]}" --dump-tokens -p "$ask"
same "the tokenizer beside the model" "$ids" "$(cat "$tmp/out")"
runs "${m[@]}" --tokens "$ids" -n 8 --no-echo
same "the prompt as ids" "$greedy" "$(generated)"
runs "${m[@]}" --dump-tokens -p "a<think>b"
think=$(grep -oE '"id": *[0-9]+, *"content": *"<think>"' <(tr -d '\n' <"$model/tokenizer.json" | sed 's/  */ /g') | grep -oE '[0-9]+' | head -n 1)
echo ",$(cat "$tmp/out")," | grep -qF ",$think," || fail "<think> is id $think, got $(cat "$tmp/out")"
same "tokens of a<think>b" 4 "$(tr ',' '\n' <"$tmp/out" | wc -l)"
runs "${m[@]}" --dump-tokens -p " $ask"
[ "$(cat "$tmp/out")" != "$ids" ] || fail "a leading space was stripped"

# Prompt files are taken whole; of -p and --prompt-file the last one counts.
printf '%s' "$ask" >"$tmp/ask"
printf '%s\n' "$ask" >"$tmp/ask_newline"
runs "${m[@]}" --dump-tokens --prompt-file "$tmp/ask"
same "--prompt-file" "$ids" "$(cat "$tmp/out")"
runs "${m[@]}" --dump-tokens --prompt-file "$tmp/ask_newline"
same "--prompt-file with its newline" "$(($(echo "$ids" | tr ',' '\n' | wc -l) + 1))" "$(tr ',' '\n' <"$tmp/out" | wc -l)"
runs "${m[@]}" --dump-tokens -p other --prompt-file "$tmp/ask"
same "--prompt-file after -p" "$ids" "$(cat "$tmp/out")"
runs "${m[@]}" --dump-tokens --prompt-file "$tmp/absent" -p "$ask"
same "-p after --prompt-file" "$ids" "$(cat "$tmp/out")"
runs "${m[@]}" --dump-tokens --prompt-file="$tmp/absent" --prompt="$ask"
same "the same with =" "$ids" "$(cat "$tmp/out")"
"$affinity" "${m[@]}" --dump-tokens --prompt-file - <"$tmp/ask" >"$tmp/out" 2>"$tmp/err"
same "standard input" "$ids" "$(cat "$tmp/out")"

# Characters cut by tokens come out whole: forced bytes of an emoji, then half of one.
runs "${m[@]}" --dump-tokens -p "😀"
bytes=$(cut -d, -f2- "$tmp/out")
count=$(echo "$bytes" | tr ',' '\n' | wc -l)
runs "${m[@]}" -p x -n "$count" --no-echo --force-tokens "$bytes"
same "a cut character" "😀" "$(cat "$tmp/out")"
[ "$count" -gt 1 ] || fail "the emoji is one token: nothing is cut"
runs "${m[@]}" -p x -n $((count - 1)) --no-echo --force-tokens "$bytes"
same "half a character" "�" "$(cat "$tmp/out")"
runs "${m[@]}" -p "x" -n 200 --no-echo --temp 5 --seed 3 --ignore-eos
iconv -f UTF-8 -t UTF-8 "$tmp/out" >/dev/null || fail "the text of random tokens is not UTF-8"

# Bits do not depend on chunks and threads, over the windows and compressed rows of a longer prompt.
seq 1 40 | sed 's/.*/Item & of the list is nothing special./' >"$tmp/long"
runs "${m[@]}" --prompt-file "$tmp/long" --logits-out "$tmp/ref" --logits-last -n 0
for args in "--prefill-chunk-size 37" "--prefill-chunk-size 5000 --threads 1" "--cpu-path scalar"; do
    # shellcheck disable=SC2086
    runs "${m[@]}" --prompt-file "$tmp/long" --logits-out "$tmp/f" --logits-last -n 0 $args
    same_file "$args" "$tmp/ref" "$tmp/f"
done

# Numerics agree on the obvious; an end of sequence is not printed.
for mode in math sim; do
    runs "${m[@]}" -p "$ask" -n 8 --no-echo --numerics $mode
    grep -qF "Paris" "$tmp/out" || fail "--numerics $mode: $(cat "$tmp/out")"
done
runs "${m[@]}" -p "<｜User｜>What is the capital of France?<｜Assistant｜></think>" -n 200 --no-echo
grep -q "\[stopped at EOS\]" "$tmp/err" || fail "an answer to a question does not end: $(tail -c 200 "$tmp/out")"
same "last id of an answer" 1 "$(generated | sed 's/.*,//')"
grep -q "of▁sentence" "$tmp/out" && fail "the end of sequence was printed"

# Text needs a tokenizer that is the model's.
refused 1 "tokenizer.json" -m "$src/tests/golden/v4-sim/ckpt-dspark" --tokenizer "$model/tokenizer.json" -p "$ask"
refused 1 "256" -m "$src/tests/golden/v4-sim/ckpt-dspark" --tokenizer "$model" --tokens 1,2
sed 's/▁of▁sentence/▁of▁sequence/' "$model/tokenizer.json" >"$tmp/tokenizer.json"
refused 1 "begin▁of▁sentence" "${m[@]}" --tokenizer "$tmp/tokenizer.json" -p "$ask"
refused 2 "expected --tokenizer FILE or -m PATH" --dump-tokens -p "$ask"
finish
