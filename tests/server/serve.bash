# serve.bash - starts a server on models/tiny-v4 for tests from the outside; sourced. $affinity, $src and $tmp are set.
# serve_on FLAGS...: sets $pid, $port, $url. The server tells its address through a pipe, so that nothing waits for time.
serve_on() {
    rm -f "$tmp/log"
    mkfifo "$tmp/log"
    "$affinity" --serve -m "$src/models/tiny-v4" --port 0 --max-tokens-floor 0 --quiet "$@" 2>"$tmp/log" &
    pid=$!
    exec 3<"$tmp/log"
    port=
    while IFS= read -r line <&3; do
        case $line in *"listening on http://127.0.0.1:"*) port=${line##*:}; break ;; esac
        echo "$line" >&2
    done
    url=http://127.0.0.1:$port
    [ -n "$port" ] || { echo "the server did not start" >&2; return 1; }
    cat <&3 >"$tmp/said" & # what it says from now on, without which it would wait for a reader
    reader=$!
}

# Ends it; its exit code. What it said is in $tmp/said.
serve_off() {
    local code
    kill -TERM "$pid"
    wait "$pid"
    code=$?
    wait "$reader"
    exec 3<&-
    pid=
    return $code
}
