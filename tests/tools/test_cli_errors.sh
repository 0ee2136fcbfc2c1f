#!/bin/bash
# Bad input to affinity: exit code 2 for a wrong command line, 1 for everything else, and one line that says what.
. "$(dirname "$0")/cli.bash"
model=$src/tests/golden/v4-sim/ckpt-dspark # 3 layers, 256 ids, context 4096, no tokenizer
m=(-m "$model")

# The command line.
refused 2 "--frobnicate" "${m[@]}" --tokens 1 --frobnicate
refused 2 "--model needs an argument" --tokens 1 -m
refused 2 "got none" --tokens 1
refused 2 "got none" "${m[@]}"
refused 2 "extra" "${m[@]}" --tokens 1 extra
refused 2 "--prompt: expected a text, got an empty prompt" "${m[@]}" -p ""
refused 2 "got both" "${m[@]}" -p x --tokens 1
refused 2 "got both" "${m[@]}" --prompt-file x --tokens 1
refused 2 "--numerics: expected math, sim or fast, got 'double'" "${m[@]}" --tokens 1 --numerics double
refused 2 "--cpu-path: expected scalar, avx2 or avx512, got 'sse'" "${m[@]}" --tokens 1 --cpu-path sse
refused 2 "--n-predict: expected 0 to 1000000000000, got -1" "${m[@]}" --tokens 1 -n -1
refused 2 "--n-predict: expected an integer, got 'ten'" "${m[@]}" --tokens 1 -n ten
refused 2 "--n-predict" "${m[@]}" --tokens 1 -n 99999999999999999999
refused 2 "--prefill-chunk-size" "${m[@]}" --tokens 1 --prefill-chunk-size 0
refused 2 "--threads" "${m[@]}" --tokens 1 --threads 0
refused 2 "--max-layers" "${m[@]}" --tokens 1 --max-layers 0
refused 2 "--dump-logits" "${m[@]}" --tokens 1 --dump-logits 0
refused 2 "--temp" "${m[@]}" --tokens 1 --temp nan
refused 2 "--temp" "${m[@]}" --tokens 1 --temp -0.5
refused 2 "--top-p: expected 0 to 1, got 1.5" "${m[@]}" --tokens 1 --temp 1 --top-p 1.5
refused 2 "--min-p: expected 0 to 1, got -1" "${m[@]}" --tokens 1 --temp 1 --min-p -1
refused 2 "--top-k" "${m[@]}" --tokens 1 --temp 1 --top-k -3
refused 2 "--logits-last" "${m[@]}" --tokens 1 --logits-last
refused 2 "--force-tokens and a sampling flag" "${m[@]}" --tokens 1 --force-tokens 1 --temp 1
refused 2 "--dump-tokens stops" "${m[@]}" --tokens 1 --dump-tokens --dump-logits 3
refused 2 "--dump-tokens stops" "${m[@]}" --tokens 1 --dump-tokens --logits-out "$tmp/f"

# Lists of ids.
refused 2 "--tokens: item 1 at byte 0: expected a token id (0 to 2147483647), got the end" "${m[@]}" --tokens ""
refused 2 "--tokens: item 2 at byte 2: expected a token id (0 to 2147483647), got 'b'" "${m[@]}" --tokens 1,b,3
refused 2 "got a comma" "${m[@]}" --tokens 1,,3
refused 2 "got '-4'" "${m[@]}" --tokens 1,-4
refused 2 "--force-tokens: item 2" "${m[@]}" --tokens 1 --force-tokens 1,x
printf '1 2\n3 oops\n' >"$tmp/ids"
refused 1 "$tmp/ids: item 4 at byte 6: expected a token id (0 to 2147483647), got 'oops'" "${m[@]}" --tokens "@$tmp/ids"
: >"$tmp/empty"
refused 1 "$tmp/empty: item 1" "${m[@]}" --tokens "@$tmp/empty"
refused 1 "$tmp/absent: cannot open" "${m[@]}" --tokens "@$tmp/absent"

# Prompts that do not fit the model.
refused 1 "prompt: token 2 of 3: expected an id of 0 to 255, got 256" "${m[@]}" --tokens 1,256,3
refused 1 "forced tokens: token 1 of 1: expected an id of 0 to 255, got 700" "${m[@]}" --tokens 1 --force-tokens 700
seq 1 4097 | sed 's/.*/7/' >"$tmp/long"
refused 1 "prompt: expected at most 4096 tokens, the model's context, got 4097" "${m[@]}" --tokens "@$tmp/long"
refused 1 "--max-layers: expected 1 to 3, got 4" "${m[@]}" --tokens 1 --max-layers 4
refused 1 "--dump-logits: expected 1 to 256, got 257" "${m[@]}" --tokens 1 --dump-logits 257
refused 1 "$tmp/empty: expected a text, got an empty prompt" "${m[@]}" --prompt-file "$tmp/empty"
refused 1 "$tmp/absent: cannot open" "${m[@]}" --prompt-file "$tmp/absent"
refused 1 "tokenizer.json" "${m[@]}" -p hello
refused 1 "$tmp/absent" "${m[@]}" --tokenizer "$tmp/absent" -p hello
printf '{"version": "1.0"}' >"$tmp/tokenizer.json"
refused 1 "$tmp/tokenizer.json" "${m[@]}" --tokenizer "$tmp/tokenizer.json" -p hello

# Models that are not.
refused 1 "$tmp/absent" -m "$tmp/absent" --tokens 1
printf 'not a container, only some text of more than sixty-four bytes, to be sure' >"$tmp/bad.aff"
refused 1 "$tmp/bad.aff" -m "$tmp/bad.aff" --tokens 1
mkdir "$tmp/hollow"
refused 1 "config.json" -m "$tmp/hollow" --tokens 1
damaged() { # a copy of the checkpoint to break
    rm -rf "$tmp/ckpt"
    cp -r "$model" "$tmp/ckpt"
    chmod -R u+w "$tmp/ckpt"
}
damaged
rm "$tmp/ckpt/model-00002-of-00002.safetensors"
refused 1 "model-00002-of-00002.safetensors" -m "$tmp/ckpt" --tokens 1
damaged
truncate -s -1 "$tmp/ckpt/model-00002-of-00002.safetensors"
refused 1 "model-00002-of-00002.safetensors" -m "$tmp/ckpt" --tokens 1
damaged
sed -i '/"sliding_window"/d' "$tmp/ckpt/config.json"
refused 1 "sliding_window" -m "$tmp/ckpt" --tokens 1

damaged
rm "$tmp/ckpt/model-00002-of-00002.safetensors"
mkfifo "$tmp/ckpt/model-00002-of-00002.safetensors"
refused 1 "model-00002-of-00002.safetensors: not a regular file" -m "$tmp/ckpt" --tokens 1

# A weight that is not a number: no output passes for a result, forced tokens or not.
damaged
for shard in "$tmp"/ckpt/*.safetensors; do
    begin=$(grep -aoE '"head.weight": ?\{[^}]*\}' "$shard" | sed -E 's/.*"data_offsets": ?\[([0-9]+).*/\1/')
    [ -n "$begin" ] && break
done
header=$(od -An -t u8 -N 8 "$shard" | tr -d ' ')
printf '\300\177' | dd of="$shard" bs=1 seek=$((8 + header + begin)) conv=notrunc status=none
for out in "--logits-out $tmp/nan.f32" "--dump-logits 2" "-n 2 --force-tokens 5" "-n 2" "-n 2 --dspark off"; do
    "$affinity" -m "$tmp/ckpt" --tokens 1,2 $out >/dev/null 2>"$tmp/err" </dev/null
    [ $? -eq 1 ] || fail "NaN weight, $out: expected exit code 1"
    grep -q "position [012]: logits: token 0: expected a finite number or -inf, got -\?nan" "$tmp/err" || fail "NaN weight, $out: $(cat "$tmp/err")"
done
[ ! -e "$tmp/nan.f32" ] || fail "NaN weight: logits were written"

# Outputs that cannot be written; nothing half-written stays behind.
refused 1 "$tmp/no/such" "${m[@]}" --tokens 1 --logits-out "$tmp/no/such"
mkdir "$tmp/o"
"$affinity" "${m[@]}" --tokens 1,2 -n 3 --logits-out "$tmp/o/f" >/dev/full 2>"$tmp/err"
[ $? -eq 1 ] || fail "full disk: expected exit code 1"
grep -q "standard output: cannot write" "$tmp/err" || fail "full disk: $(cat "$tmp/err")"
refused 1 "got 999" "${m[@]}" --tokens 999 --logits-out "$tmp/o/f"
same "files after failures" "" "$(ls -A "$tmp/o")"

# Help and version are not errors.
runs --help
grep -q -- "--prefill-chunk-size N" "$tmp/out" || fail "--help does not show the flags"
runs --version
grep -qE '^affinity [0-9]+\.[0-9]+\.[0-9]+$' "$tmp/out" || fail "--version: $(cat "$tmp/out")"
refused 2 "--ui dash: expected a terminal as standard input and output, got none" -m "$src/models/tiny-v4" -p x --ui dash
refused 2 "--ui: expected auto, dash or plain, got 'x'" -m "$src/models/tiny-v4" -p x --ui x
refused 2 "--ui dash shows a text as it comes" -m "$src/models/tiny-v4" -p x --ui dash --dump-logits 1
refused 2 "--chat-format: expected auto, v4, 0731 or v4.1, got 'x'" -m "$src/models/tiny-v4" -p x --chat-format x

# Cards: more than there are, more than are used, too small, memory that another program takes first.
tiny=$src/models/tiny-v4
refused 2 "--gpus 3: expected at most 2, so many emu cards there are" -m "$tiny" -p x --gpus 3 --device emu:2x64M
refused 2 "--gpus 2: this version runs a model on one card: use --gpus 1 or --device emu:0" -m "$tiny" -p x --gpus 2 --device emu:2x64M
refused 2 "--gpus and --device cpu: expected one of them" -m "$tiny" -p x --gpus 1 --device cpu
refused 2 "--device cuda:0,cuda:1: 2 cards: this version runs a model on one card" -m "$tiny" -p x --device cuda:0,cuda:1
refused 3 "weights and the buffers of a pass must fit on the card" -m "$tiny" -p x -n 1 --device emu:20M
refused 3 "of buffers: fewer --slots, a smaller --kv-commit" -m "$tiny" -p x -n 1 --kv-size 65536 --device emu:56M
refused 3 "out of memory: dense weights needs" -m "$tiny" -p x -n 1 --device emu:512M,taken=495M
finish
