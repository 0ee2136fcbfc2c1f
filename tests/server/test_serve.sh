# affinity --serve from the outside: flags, key, log, signals.
. "$(dirname "$0")/../tools/cli.bash"
model=$src/models/tiny-v4

refused 2 "--serve: expected a model" --serve
refused 2 "--chat-format: expected auto, v4, 0731 or v4.1, got 'v5'" --serve -m "$model" --chat-format v5
refused 2 "expected --prefix-cache-dir with them" --serve -m "$model" --persistent-prefix-cache
refused 2 "--ui dash: expected a terminal as standard input and output, got none" --serve -m "$model" --ui dash
refused 2 "--ui: expected auto, dash or plain, got 'x'" --serve -m "$model" --ui x
refused 2 "--port" --serve -m "$model" --port 70000
refused 1 "--host: expected an IPv4 or IPv6 address or unix:PATH, got 'nowhere'" --serve -m "$model" --host nowhere
: >"$tmp/empty"
refused 1 "expected a key in the first line" --serve -m "$model" --api-key-file "$tmp/empty"
refused 1 "$tmp/none" --serve -m "$model" --api-key-file "$tmp/none"
runs --serve --help
grep -q -- '--max-tokens-floor' "$tmp/out" || fail "--serve --help lists the server's flags"

# The server tells its address through a pipe, so that nothing here waits for time.
printf 'secret\nsecond line\n' >"$tmp/key"
mkfifo "$tmp/log"
"$affinity" --serve -m "$model" --port 0 --threads 1 --kv-size 2048 --api-key-file "$tmp/key" --max-tokens-floor 0 \
    --prefix-cache-dir "$tmp/cache" --prefix-cache-gib 1 --prefix-cache-block 64 2>"$tmp/log" &
pid=$!
exec 3<"$tmp/log"
port=
while IFS= read -r line <&3; do
    case $line in *"listening on http://127.0.0.1:"*) port=${line##*:}; break ;; esac
done
[ -n "$port" ] || { fail "no port was printed"; finish; }

# ask METHOD PATH KEY BODY: the answer to $tmp/answer.
ask() {
    exec 4<>"/dev/tcp/127.0.0.1/$port" || { fail "cannot connect"; return; }
    printf '%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-api-key: %s\r\nContent-Length: %d\r\n\r\n%s' "$1" "$2" "$3" "${#4}" "$4" >&4
    cat <&4 >"$tmp/answer"
    exec 4<&- 4>&-
}
ask GET /v1/models wrong ''
grep -q '^HTTP/1.1 401' "$tmp/answer" || fail "a wrong key is refused"
ask GET '/v1/models?secret=query' secret ''
grep -q '"context_length": 2048' "$tmp/answer" || fail "the context is in /v1/models"
ask POST /v1/chat/completions secret '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "thinking": {"type": "disabled"}, "temperature": 0}'
grep -q 'The capital of France is Paris\.' "$tmp/answer" || fail "an answer: $(cat "$tmp/answer")"

question='{"role": "user", "content": "What is the capital of France?"}'
ask POST /v1/chat/completions secret '{"thinking": {"type": "disabled"}, "temperature": 0, "messages": ['"$question"',
    {"role": "assistant", "content": "The capital of France is Paris."}, '"$question"']}'
grep -qE '"cached_tokens": [1-9]' "$tmp/answer" || fail "the next turn starts where the last one ended: $(cat "$tmp/answer")"

kill -TERM "$pid"
cat <&3 >"$tmp/rest"
wait "$pid"
same "exit code after SIGTERM" 0 $?
grep -q 'POST /v1/chat/completions 200 ' "$tmp/rest" || fail "the access log has the request"
grep -q 'GET /v1/models 401 ' "$tmp/rest" || fail "the access log has the refused request"
! grep -qE 'secret|capital|query' "$tmp/rest" || fail "the access log has content"

# On a card: the machine's view has it, with all experts in its memory.
"$affinity" --serve -m "$model" --port 0 --threads 1 --kv-size 2048 --api-key-file "$tmp/key" --device emu:512M 2>"$tmp/log" &
pid=$!
exec 3<"$tmp/log"
while IFS= read -r line <&3; do
    case $line in *"listening on http://127.0.0.1:"*) port=${line##*:}; break ;; esac
done
ask GET /snapshot secret ''
grep -q '"devices": \[{"id": "emu:0", "name": "emulated device", "arch": "nv", "memory": 536870912, ' "$tmp/answer" || fail "the card: $(cut -c 1-2000 "$tmp/answer")"
grep -qE '"tier": "c{96}"' "$tmp/answer" || fail "the experts are on the card: $(cut -c 1-4000 "$tmp/answer")"
kill -TERM "$pid"
cat <&3 >"$tmp/rest"
wait "$pid"
same "exit code of a server on a card" 0 $?

# A kernel faults: said once, with the kernel's name; the answer in progress ends with an error; then 503 in each dialect's shape, also in /health;
# then the server ends.
"$affinity" --serve -m "$model" --port 0 --threads 1 --kv-size 2048 --api-key-file "$tmp/key" --max-tokens-floor 0 --device emu:512M,fault=400 2>"$tmp/log" &
pid=$!
exec 3<"$tmp/log"
while IFS= read -r line <&3; do
    case $line in *"listening on http://127.0.0.1:"*) port=${line##*:}; break ;; esac
done
ask POST /v1/chat/completions secret '{"messages": ['"$question"'], "temperature": 0}'
grep -q '^HTTP/1.1 503' "$tmp/answer" || fail "a fault ends the answer: $(cat "$tmp/answer")"
grep -q 'a fault, as was asked for, in launch 400' "$tmp/answer" || fail "the error says what failed: $(cat "$tmp/answer")"
ask POST /v1/chat/completions secret '{"messages": ['"$question"'], "stream": true}'
grep -q '^HTTP/1.1 503' "$tmp/answer" || fail "no request after a fault: $(cat "$tmp/answer")"
grep -qE '"type": "unavailable_error", "message": "the device failed, the server ends: emu:0: kernel ' "$tmp/answer" || fail "503 of chat: $(cat "$tmp/answer")"
ask POST /v1/messages secret '{"max_tokens": 3, "messages": ['"$question"']}'
grep -qE '"type": "overloaded_error", "message": "the device failed' "$tmp/answer" || fail "503 of messages: $(cat "$tmp/answer")"
ask GET /health '' ''
grep -q '^HTTP/1.1 503' "$tmp/answer" || fail "/health after a fault: $(cat "$tmp/answer")"
grep -q 'a fault, as was asked for' "$tmp/answer" || fail "/health says why: $(cat "$tmp/answer")"
cat <&3 >"$tmp/rest"
wait "$pid"
same "exit code after a fault" 4 $?
same "a fault is said once" 1 "$(grep -c 'the device failed, nothing can run on it any more: emu:0: kernel .*: a fault' "$tmp/rest")"
finish
